"""How a save lays out what it writes: each text once, and rows in files of a bounded size."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from .files import ALIGNMENT, DamagedFile, Folder, checksum, header, named_by_content
from .layout import TAGS, Piece, RowLayout
from .mapped import RowFile, StoredRows
from .segments import Segment

FILE_BYTES = 256 << 20  # about, of a file with rows
WORTH_KEEPING = 0.5  # share of a file's bytes that must be of use still, or what is left is written anew


class TextTable:
    """
    Texts, one behind the other, those that others begin with inside of them.

    Args:
        texts (sequence of `np.ndarray` of int64): Tokens.

    Attributes:
        joined (`np.ndarray` of int32): All that is kept.
    """

    def __init__(self, texts: Sequence[np.ndarray]):
        self._texts = texts  # held, so that no other array gets an address that is known here
        keys = {id(text): text.astype(">i4").tobytes() for text in texts}  # big-endian: bytes sort as tokens do
        starts, kept, at, following = {}, [], 0, b""
        for key in sorted(set(keys.values()), reverse=True):
            # what begins with a text stands directly behind it in the order
            if following.startswith(key) and following:
                starts[key] = starts[following]
            else:
                starts[key] = at
                kept.append(key)
                at += len(key) // 4
            following = key
        self.joined = np.frombuffer(b"".join(kept), dtype=">i4").astype(np.int32)
        self._starts = {address: starts[key] for address, key in keys.items()}

    def start(self, text: np.ndarray) -> int:
        """Where one of the texts (the very array) begins."""
        return self._starts[id(text)]


class RowWriter:
    """
    Writes segments to files of a folder. What lies in a file there already is left where it is, unless little else of
    that file is needed any more.

    Args:
        folder (`Folder`): Where to.

    Attributes:
        stored (`dict`): Where each segment's rows lie; those that turned out to be damaged are not in it.
        files (`list[RowFile]`): All that the segments lie in, once this is closed.
        bytes_written (`int`), bytes_kept (`int`): Of rows.
    """

    def __init__(self, folder: Folder):
        self.stored: dict[Segment, StoredRows] = {}
        self.files: list[RowFile] = []
        self.bytes_written = self.bytes_kept = 0
        self._folder = folder
        self._jobs: list[tuple] = []
        self._new: list[str] = []  # names of files that were not there before
        self._kept: dict[RowFile, int] = {}  # bytes that are of use in files of this folder
        self._layouts: dict[tuple[int, str | None], RowLayout] = {}

    def add(
        self,
        segment: Segment,
        geometry: dict,
        cold: str | None,
        stored: StoredRows | None,
        read: Callable[[list[Piece]], list[torch.Tensor]] | None,
    ) -> None:
        """
        A segment to be written by `close`.

        Args:
            segment (`Segment`), geometry (`dict`), cold (`str`, *optional*): Whose rows, and their form.
            stored (`StoredRows`, *optional*): Where they lie in a file already, of whichever folder.
            read (callable, *optional*): Gives its tensors, where that file is not what they are read from.
        """
        key = id(geometry), cold
        if key not in self._layouts:
            self._layouts[key] = RowLayout(geometry, cold)
        self._jobs.append((segment, self._layouts[key], cold, stored, read))
        if stored is not None:
            self._kept[stored.file] = self._kept.get(stored.file, 0) + stored.size

    def close(self) -> None:
        """Write all; raises `OSError` where that can't be."""
        for file, used in list(self._kept.items()):
            here = file.folder == self._folder and self._folder.size(file.name) == file.size
            if not here or used < WORTH_KEEPING * file.size:
                del self._kept[file]
        self.files = list(self._kept)
        batch, size = [], 0
        for segment, layout, cold, stored, read in self._jobs:
            if stored is not None and stored.file in self._kept:
                self.stored[segment] = stored
                self.bytes_kept += stored.size
                continue
            more = layout.size(len(segment))
            if batch and size + more > FILE_BYTES:
                self._write(batch)
                batch, size = [], 0
            batch.append((segment, layout, cold, stored, read))
            size += more
        if batch:
            self._write(batch)

    def discard(self) -> None:
        """Remove what was written: the index that would name it will not be."""
        for name in self._new:
            self._folder.remove(name)

    def _write(self, batch: list[tuple]) -> None:
        """One file."""
        tensors, blocks, at = [], [], 0
        # one piece of memory, which goes back to the system: many small ones would leave the heap full of holes
        needed = (layout.size(len(segment)) for segment, layout, _, _, read in batch if read is not None)
        buffer = np.zeros(sum(needed), dtype=np.uint8)
        for segment, layout, cold, stored, read in batch:
            pieces, size = layout.pieces(len(segment)), layout.size(len(segment))
            try:
                if read is None:
                    block = _bytes_in_file(stored, size)
                else:
                    block = _laid_out(buffer[at : at + size], pieces, read(pieces))
                    at += size
            except DamagedFile:
                continue
            number = len(blocks)
            for piece in pieces:
                tensors.append((f"{number}.{piece.slot}.{piece.group}", TAGS[piece.dtype], piece.shape, piece.size))
                padding = -piece.size % ALIGNMENT
                if padding:  # safetensors allows no holes
                    tensors.append((f"{number}.padding.{piece.slot}.{piece.group}", "U8", (padding,), padding))
            blocks.append((segment, cold, block, checksum([block])))
        if not blocks:
            return
        start = header(tensors)
        name = named_by_content("rows", checksum([start, *(digest.encode() for *_, digest in blocks)]))
        sizes = [len(block) for _, _, block, _ in blocks]
        if self._folder.size(name) is None:
            self._new.append(name)
        self._folder.put(name, [start, *(block for _, _, block, _ in blocks)])
        file = next((each for each in self.files if each.name == name), None)
        if file is None:  # else another shelf has the same rows
            file = RowFile(self._folder, name, len(start) + sum(sizes))
            self.files.append(file)
        self.bytes_written += sum(sizes)
        offset = len(start)
        for (segment, cold, _, digest), size in zip(blocks, sizes, strict=True):
            self.stored[segment] = StoredRows(file, offset, size, digest, cold)
            offset += size


def _laid_out(place: np.ndarray, pieces: list[Piece], tensors: list[torch.Tensor]) -> memoryview:
    """The bytes of tensors, each where its piece says, in a place that is full of zeros."""
    for piece, tensor in zip(pieces, tensors, strict=True):
        if piece.size:
            flat = torch.from_numpy(place[piece.offset : piece.offset + piece.size])
            flat.view(piece.dtype).view(piece.shape).copy_(tensor)
    return memoryview(place)


def _bytes_in_file(stored: StoredRows, size: int) -> memoryview:
    """The bytes of a segment as they lie in a file, padding included; raises `DamagedFile` if they are damaged."""
    data, start = stored.read()
    return memoryview(data)[start : start + size]
