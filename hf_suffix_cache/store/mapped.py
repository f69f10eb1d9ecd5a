"""Rows that lie in files: looked at when they are first asked for, checked then, and never written to."""

import mmap
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import torch

from .files import DamagedFile, Folder, checksum
from .layout import RowLayout
from .pool import LayerShape, Slab
from .segments import Segment


class RowFile:
    """
    A file with rows. Once it was opened its rows stay readable, also where a later save removes it.

    Args:
        folder (`Folder`), name (`str`), size (`int`): Which one, and its bytes.
    """

    def __init__(self, folder: Folder, name: str, size: int):
        self.folder = folder
        self.name = name
        self.size = size
        self._map: mmap.mmap | None = None

    def open(self) -> mmap.mmap:
        """Its bytes; raises `DamagedFile` where it is gone, or is not what was saved."""
        if self._map is None:
            self._map = self.folder.map(self.name, self.size)
        elif self._map.size() < self.size:  # to touch what was cut off would end the process (SIGBUS)
            raise DamagedFile(f"{self.folder.where(self.name)} was cut short while it was in use")
        return self._map


class StoredRows:
    """
    Where the rows of one segment lie in a file.

    Args:
        file (`RowFile`), offset (`int`), size (`int`): Which bytes of which file.
        checksum (`str`): Of these bytes.
        cold (`str`, *optional*): Their dtype where that is smaller than the model's.

    Attributes:
        is_read (`bool`): Whether the rows are here, and are what was saved.
    """

    def __init__(self, file: RowFile, offset: int, size: int, checksum: str, cold: str | None):
        self.file = file
        self.offset = offset
        self.size = size
        self.checksum = checksum
        self.cold = cold
        self.is_read = False
        self._lock = threading.Lock()

    def is_there(self) -> bool:
        """Whether the file can be opened, or was."""
        try:
            self.file.open()
        except (DamagedFile, OSError):
            return False
        return True

    def read(self) -> tuple[mmap.mmap, int]:
        """
        The file's bytes and where the segment's begin in them. At the first time they are all read, and compared with
        the checksum; raises `DamagedFile` if they are not what was saved.
        """
        data = self.file.open()
        with self._lock:  # somebody may read ahead
            if not self.is_read:
                started, folder = time.perf_counter(), self.file.folder
                try:
                    folder.fetch(self.file.name, self.offset, self.offset + self.size)
                except OSError:
                    folder.speed.note(0, time.perf_counter() - started)  # so that not everybody waits for this again
                    raise
                self.announce()
                with memoryview(data) as view, view[self.offset : self.offset + self.size] as part:
                    if checksum([part]) != self.checksum:
                        where = folder.where(self.file.name)
                        raise DamagedFile(f"{where}: the rows at byte {self.offset} are not what was saved")
                folder.speed.note(self.size, time.perf_counter() - started)
                self.is_read = True
        return data, self.offset

    def look(self) -> None:
        """Raise `DamagedFile` if bytes that were read are gone."""
        self.file.open()

    def announce(self) -> None:
        """Have the system read the bytes soon: in one piece, instead of a few pages at a time."""
        data = self.file.open()
        if hasattr(data, "madvise"):
            first = self.offset - self.offset % mmap.PAGESIZE
            data.madvise(mmap.MADV_WILLNEED, first, self.offset + self.size - first)


class MappedSlab(Slab):
    """
    The rows of one segment where they lie in a file: read only, in no budget. It has a number from the time on that a
    pool takes it (`BlockPool.attach`).

    Args:
        segment (`Segment`): Whose rows they are.
        stored (`StoredRows`): Where they lie.
        layout (`RowLayout`): How.
        shapes (list of `LayerShape`): The pool's, in its order.
        block_size (`int`): The pool's.
        note (callable): Told of the slab at every look at its rows.

    Attributes:
        uses (`int`): Calls that have looked at its rows, as far as somebody counts them.
        damage (`str`, *optional*): Why its rows can't be had.
    """

    def __init__(
        self,
        segment: Segment,
        stored: StoredRows,
        layout: RowLayout,
        shapes: list[LayerShape],
        block_size: int,
        note: Callable[["MappedSlab"], None],
    ):
        # without the base class's own: no memory is taken
        self.number = -1
        self.rows = len(segment)
        self.block_size = block_size
        self.cold = layout.cold
        self.row_bytes = layout.row_bytes
        self.references = np.zeros(-(-self.rows // block_size), dtype=np.int32)
        self.segment = weakref.ref(segment)
        self.stored = stored
        self.uses = 0
        self.damage: str | None = None
        self._layout = layout
        self._shapes = shapes
        self._note = note
        self._slots: dict[str, dict[LayerShape, torch.Tensor]] | None = None

    # what is a plain attribute of other slabs is there once it is asked for

    @property
    def keys(self) -> dict[LayerShape, torch.Tensor]:
        """Keys by layer shape, `[layers, kv_heads, rows, head_dim]`, in the host's memory."""
        return self._slot("keys")

    @property
    def values(self) -> dict[LayerShape, torch.Tensor]:
        """Values likewise."""
        return self._slot("values")

    @property
    def key_scales(self) -> dict[LayerShape, torch.Tensor]:
        """Scales of keys of 8 bit."""
        return self._slot("key_scales")

    @property
    def value_scales(self) -> dict[LayerShape, torch.Tensor]:
        """Scales of values of 8 bit."""
        return self._slot("value_scales")

    def is_intact(self) -> bool:
        """Whether its rows can be had, and are what was saved. They are read for this if they were not yet."""
        try:
            self._slot("keys")
        except (DamagedFile, OSError):
            return False
        return True

    def fill(self, start: int, stop: int, value: float) -> None:
        """Nothing is written to a file."""

    def _slot(self, name: str) -> dict[LayerShape, torch.Tensor]:
        if self._slots is None and self.damage is None:
            try:
                self._slots = self._open()
            except DamagedFile as damage:
                self.damage = str(damage)
        elif self.damage is None:
            self._look_again()
        self._note(self)
        if self.damage is not None:
            raise DamagedFile(self.damage)
        return self._slots[name]

    def _look_again(self) -> None:
        try:
            self.stored.look()
        except DamagedFile as damage:
            self.damage = str(damage)

    def _open(self) -> dict[str, dict[LayerShape, torch.Tensor]]:
        data, start = self.stored.read()
        slots: dict[str, dict] = {"keys": {}, "values": {}, "key_scales": {}, "value_scales": {}}
        with torch.inference_mode(False):
            for piece in self._layout.pieces(self.rows):
                if piece.size:
                    count = piece.size // piece.dtype.itemsize
                    flat = torch.frombuffer(data, dtype=piece.dtype, count=count, offset=start + piece.offset)
                else:
                    flat = torch.empty(0, dtype=piece.dtype)
                slots[piece.slot][self._shapes[piece.group]] = flat.view(piece.shape)
        return slots
