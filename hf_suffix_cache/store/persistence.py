"""
A store in a folder: `save` writes it, `load` opens it. See `files.py` for what a crash leaves behind, `records.py` for
what is written, and `dormant.py` for what becomes of it once it is loaded.
"""

import importlib.metadata
import logging
import math
import time
from typing import NamedTuple

import numpy as np
import torch

from .contents import Arrays, Contents, without
from .files import (
    INDEX,
    MAX_INDEX_BYTES,
    MAX_TOKENS_BYTES,
    DamagedFile,
    Folder,
    checksum,
    header,
    named_by_content,
    pack_index,
    unpack_index,
)
from .mapped import RowFile
from .packing import RowWriter, TextTable
from .records import (
    MAX_HOPS,
    DriftRecord,
    FileRecord,
    SegmentRecord,
    SequenceRecord,
    ShelfRecord,
    TokensRecord,
    is_amount,
    place_record,
)
from .remote import folder_of
from .segments import Segment
from .shelf import Sequence
from .snapshot import Entry, Snapshot, amount

logger = logging.getLogger("hf_suffix_cache")

WRITERS, READERS = "save", "load"  # locks: of whoever saves, and of whoever replaces the index or reads it

_UNTOLD = "belong to models with hooks, replaced functions or objects that can't be told in another process"


class Saved(NamedTuple):
    """What a save did."""

    segments: int
    bytes_written: int
    bytes_kept: int  # rows that lay in the folder already


def save(store, path, shared_only: bool = False) -> Saved:
    """
    Write all that a store holds to a folder, and what waits there for its model. Calls go on meanwhile.

    Args:
        store (`Store`): Whose rows.
        path (`str` or path): The folder, made if there is none. What an earlier save has left in it is replaced, all
            at once and last of all.
        shared_only (`bool`, *optional*, defaults to `False`): Write nothing that is not shared, but for what is in the
            folder already; and nothing at all where somebody else has saved to it meanwhile.

    Raises:
        ValueError: where the folder holds an `index.json` of another kind, or (`shared_only`) of somebody else.
        OSError: where it can't be written to; what was saved before is untouched then.
    """
    folder = folder_of(path)
    folder.make()
    shared_in = folder if shared_only else None
    with folder.locked(WRITERS, writing=True), Snapshot(store, shared_in) as snapshot:
        if shared_only and folder.index_checksum() != store.dormant.folders.get(folder.key):
            raise ValueError(f"{path} was saved to by somebody else meanwhile: load it, and begin again.")
        rows = RowWriter(folder)
        try:
            for part in snapshot.parts:
                for segment, entry in part.entries.items():
                    stored = part.shelved.stored.get(segment)
                    rows.add(segment, part.shelved.geometry, entry.record.cold, stored, snapshot.source(part, segment))
            rows.close()
            missing = {segment for part in snapshot.parts for segment in part.entries if segment not in rows.stored}
            contents, tokens = _contents(snapshot, rows, missing)
            index = pack_index(contents)
            _check_sizes(len(index), contents["tokens"].size)
            folder.put(*tokens)
        except BaseException:
            rows.discard()
            raise
        # from here on nothing is taken back: the new index may be in its place although its writing has failed
        with folder.locked(READERS, writing=True):
            folder.put(INDEX, [index])
            folder.sweep({tokens[0], *(file.name for file in rows.files)})
        with store.lock:
            store.dormant.folders[folder.key] = checksum([index])
            for segment, stored in rows.stored.items():
                if segment.home is not None:  # of what waits there are copies only
                    store.dormant.stored[segment] = stored
    for reason, count in (("are damaged", len(missing)), (_UNTOLD, snapshot.untold)):
        if count:
            logger.warning("%d segments were not saved: they %s", count, reason)
    return Saved(len(rows.stored), rows.bytes_written, rows.bytes_kept)


def load(store, path) -> None:
    """
    Open the store in a folder: its rows are found by a model of their identity from now on.

    Args:
        store (`Store`): An empty one.
        path (`str` or path): The folder.

    Raises:
        FileNotFoundError: where no store was saved there.
        ValueError: where the index, or the file with the tokens, is damaged or of another version. Rows that are
            missing or damaged are skipped, with a warning.
    """
    folder = folder_of(path)
    if not folder.has_index():
        what = "it is a file" if not folder.is_remote and folder.path.is_file() else f"there is no {INDEX}"
        raise FileNotFoundError(f"no store in {path}: {what}. `SuffixCache.save` makes a folder with one.")
    if not folder.is_remote and folder.is_foreign():  # no lock is left in it
        raise DamagedFile(f"{folder.where(INDEX)} is no index of a saved store, or its first bytes are damaged.")
    with folder.locked(READERS, writing=False):
        index, contents = _read_again(folder, store) if folder.is_remote else _read_once(folder, store)
    with store.lock:
        store.dormant.take(contents)
        store.dormant.folders[folder.key] = checksum([index])


def reopen(store, path) -> None:
    """
    Have what is in a folder before more goes there: nothing is done where it is known, or empty; else it is loaded.

    Raises:
        ValueError: where the folder holds a store that this one knows nothing of, while it is in use itself.
    """
    folder = folder_of(path)
    found = folder.index_checksum()
    if found is None or found == store.dormant.folders.get(folder.key):
        return
    with store.lock:
        in_use = len(store.dormant) or any(shelf.segments for shelf in store.shelves.values())
    if in_use:
        raise ValueError(
            f"{path} holds a store that this cache was not loaded from, or that somebody else has saved to "
            "since. Make the cache with `SuffixCache.load(folder)`, or choose another folder."
        )
    load(store, path)


# -- the index ------------------------------------------------------------------------------------------------------


def _contents(snapshot: Snapshot, rows: RowWriter, missing: set[Segment]) -> tuple[dict, tuple[str, list[bytes]]]:
    """The index of what was written, and name and bytes of the file with the tokens."""
    numbers: dict[Segment, int] = {}
    for part in snapshot.parts:
        for segment in part.entries:
            if segment not in missing:
                numbers[segment] = len(numbers)
    shelves = []
    for part in snapshot.parts:
        kept = []
        for sequence in part.shelved.sequences:
            # gone: damaged, or of a shelf that was cleared while this one refers to it
            gone = {segment for segment in sequence.recipe.segments if segment not in numbers}
            left = without(sequence, gone) if gone else sequence
            kept += [] if left is None else [left]
        shelves.append((part, kept))
    texts = [segment.context for segment in numbers]
    texts = TextTable(texts + [sequence.ids for _, kept in shelves for sequence in kept])
    arrays = {"texts": [texts.joined], "numbers": [], "flags": [], "reach": []}
    records = []
    for part, kept in shelves:
        made = part.shelved
        segments = [
            _segment_record(segment, entry, rows, texts, arrays)
            for segment, entry in part.entries.items()
            if segment in numbers
        ]
        sequences = [_sequence_record(sequence, numbers, texts, arrays, snapshot.now) for sequence in kept]
        means = [numbers[mean] for mean in made.means if mean in numbers]
        place = place_record(made.place)
        shelf = (made.digest, made.settings, place, made.geometry, made.session, segments, means, sequences)
        records.append(ShelfRecord(*shelf))
    record, tokens = _tokens(arrays)
    contents = {
        "package": _package_version(),
        "torch": torch.__version__,
        "saved": time.time(),
        "tokens": record,
        "files": [FileRecord(file.name, file.size) for file in rows.files],
        "shelves": records,
    }
    return contents, tokens


def _segment_record(segment: Segment, entry: Entry, rows: RowWriter, texts: TextTable, arrays: dict) -> SegmentRecord:
    record, stored = entry.record, rows.stored[segment]
    record.text, record.offset, record.checksum = texts.start(segment.context), stored.offset, stored.checksum
    record.file = rows.files.index(stored.file)
    arrays["numbers"].append(segment.positions)
    arrays["flags"] += entry.masks
    if segment.reach is not None:
        arrays["reach"].append(segment.reach.reshape(-1))
    return record


def _sequence_record(sequence: Sequence, numbers: dict, texts: TextTable, arrays: dict, now: float) -> SequenceRecord:
    recipe = sequence.recipe
    arrays["numbers"] += [recipe.which, recipe.offset, recipe.shift]
    drifts = []
    for each in recipe.drifts:
        drift = each.drift
        arrays["numbers"] += [drift.anchors, drift.targets, drift.run_start, each.which, each.offset, each.shift]
        arrays["flags"].append(each.kept)
        counts = (len(part) for part in (drift.anchors, drift.targets, drift.run_start, each.which))
        drifts.append(DriftRecord(*counts))
    known = sequence.expected_kl is not None and math.isfinite(sequence.expected_kl)
    return SequenceRecord(
        text=texts.start(sequence.ids),
        length=len(sequence.ids),
        exact=int(sequence.exact),
        prompt_length=int(sequence.prompt_length),
        hops=min(int(sequence.hops), MAX_HOPS),
        expected_kl=amount(sequence.expected_kl) if known else None,
        unused=amount(now - sequence.last_used),
        segments=[numbers[segment] for segment in recipe.segments],
        drifts=drifts,
        pinned=sequence.pinned,
    )


def _tokens(arrays: dict[str, list]) -> tuple[TokensRecord, tuple[str, list[bytes]]]:
    """The file with the tokens: its record, its name and its bytes."""
    joined = {}
    for name, dtype in Arrays.KINDS.items():
        parts = [np.asarray(part).astype(dtype) for part in arrays[name]]
        joined[name] = np.concatenate([np.empty(0, dtype=dtype), *parts])
    counts = {name: len(array) for name, array in joined.items()}
    data = [_tokens_header(counts), *(array.tobytes() for array in joined.values())]
    name = named_by_content("tokens", checksum(data))
    return TokensRecord(name, sum(map(len, data)), **counts), (name, data)


def _tokens_header(counts: dict[str, int]) -> bytes:
    tags = {"texts": "I32", "numbers": "I32", "reach": "F16", "flags": "U8"}
    kinds = Arrays.KINDS.items()
    return header((name, tags[name], (counts[name],), counts[name] * dtype.itemsize) for name, dtype in kinds)


def _package_version() -> str:
    try:
        return importlib.metadata.version("hf-suffix-cache")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"


def _check_sizes(index: int, tokens: int) -> None:
    """Write nothing that could not be loaded."""
    for what, size, limit in (("index", index, MAX_INDEX_BYTES), ("tokens", tokens, MAX_TOKENS_BYTES)):
        if size > limit:
            raise ValueError(f"the {what} of this store would take {size:,} bytes, {limit:,} are the most.")


# -- reading --------------------------------------------------------------------------------------------------------


def _read_once(folder: Folder, store) -> tuple[bytes, Contents]:
    index = folder.read(INDEX, MAX_INDEX_BYTES)
    return index, _read(folder, index, store.clock())


def _read_again(folder: Folder, store) -> tuple[bytes, Contents]:
    """The same where there are no locks: once more if somebody has saved to the folder meanwhile."""
    for attempt in range(3):
        before = folder.index_checksum()
        try:
            index, contents = _read_once(folder, store)
        except DamagedFile:
            if attempt == 2 or folder.index_checksum() == before:
                raise
            continue
        if folder.index_checksum() == checksum([index]):
            break
    return index, contents


def _read(folder: Folder, data: bytes, now: float) -> Contents:
    """What an index (its bytes) and the tokens in a folder say, checked."""
    where = folder.where(INDEX)
    index = unpack_index(data, where)
    saved, files, shelves = (index.get(name) for name in ("saved", "files", "shelves"))
    if not is_amount(saved) or type(files) is not list or type(shelves) is not list:
        raise DamagedFile(f"{where} is not complete.")
    records = [FileRecord.read(each) for each in files]
    if len({record.name for record in records}) < len(records):
        raise DamagedFile(f"{where} names a file twice.")
    arrays = _read_tokens(folder, TokensRecord.read(index.get("tokens")))
    opened, faults = [], []
    for record in records:
        file = RowFile(folder, record.name, record.size)
        try:
            file.open()
        except DamagedFile as fault:
            file = None
            faults.append(str(fault))
        opened.append(file)
    age = max(0.0, time.time() - saved)
    try:
        read = [ShelfRecord.read(each) for each in shelves]
        contents = Contents(read, opened, [record.size for record in records], arrays, now - age)
    except DamagedFile as fault:
        raise DamagedFile(f"{where}: {fault}.") from fault
    if faults:
        logger.warning("%d files of a saved store are skipped, with the rows in them: %s", len(faults), faults[0])
    return contents


def _read_tokens(folder: Folder, record: TokensRecord) -> Arrays:
    where = folder.where(record.name)
    data = folder.read(record.name, MAX_TOKENS_BYTES)
    counts = {name: getattr(record, name) for name in Arrays.KINDS}
    start = _tokens_header(counts)
    num_bytes = len(start) + sum(counts[name] * dtype.itemsize for name, dtype in Arrays.KINDS.items())
    if len(data) != record.size or num_bytes != record.size or not data.startswith(start):
        raise DamagedFile(f"{where} is not the file that the index is of.")
    if named_by_content("tokens", checksum([data])) != record.name:
        raise DamagedFile(f"{where} was changed after it was saved: its checksum is off.")
    arrays, offset = {}, len(start)
    for name, dtype in Arrays.KINDS.items():
        arrays[name] = np.frombuffer(data, dtype=dtype, count=counts[name], offset=offset)
        offset += counts[name] * dtype.itemsize
    if (arrays["texts"] < 0).any():
        raise DamagedFile(f"{where} holds token ids below 0.")
    return Arrays(**arrays)
