"""What a saved store says of its shelves, and the segments and sequences that are made of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .cooling import exact_rows
from .corrections import Correction, Drift
from .files import DamagedFile
from .layout import RowLayout
from .mapped import RowFile, StoredRows
from .records import DriftRecord, SegmentRecord, SequenceRecord, SessionRecord, ShelfRecord
from .scopes import Place, Scope
from .segments import EXACT, Copies, Segment, Uses
from .shelf import Recipe, Sequence


@dataclass(eq=False)
class Shelved:
    """
    What is on one shelf, apart from any pool.

    Args:
        digest (`str`), settings (`str`), place (`Place`): Whose rows.
        geometry (`dict`): See `geometry_of`.
        session (`SessionRecord`, *optional*): If its scope is one, as it is at the moment.
        segments (`dict`): By the number that the index gives them, in their order.
        findable (`set[Segment]`): Those in the index of windows.
        means (`list[Segment]`), sequences (`list[Sequence]`): In their order.
        stored (`dict`): Where the rows of each segment lie.
        faults (`list[str]`): Why some of it could not be made.
    """

    digest: str
    settings: str
    place: Place
    geometry: dict
    session: SessionRecord | None = None
    segments: dict[int, Segment] = field(default_factory=dict)
    findable: set[Segment] = field(default_factory=set)
    means: list[Segment] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    stored: dict[Segment, StoredRows] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, Place]:
        """What tells it from other shelves."""
        return self.digest, self.settings, self.place


class Arrays:
    """
    The arrays of a saved store: the texts, in which segments and sequences lie anywhere, and three that are read from
    front to back.

    Args:
        texts, numbers, reach, flags (`np.ndarray` of int32, int32, float16 and uint8): See `records.py`.
    """

    KINDS = {"texts": np.dtype("<i4"), "numbers": np.dtype("<i4"), "reach": np.dtype("<f2"), "flags": np.dtype("u1")}

    def __init__(self, texts: np.ndarray, numbers: np.ndarray, reach: np.ndarray, flags: np.ndarray):
        self.texts = texts.astype(np.int64)
        self._parts = {"numbers": numbers, "reach": reach, "flags": flags}
        self._at = dict.fromkeys(self._parts, 0)

    @property
    def place(self) -> dict[str, int]:
        """Where reading goes on, which can be set."""
        return dict(self._at)

    @place.setter
    def place(self, place: dict[str, int]) -> None:
        self._at = dict(place)

    def text(self, start: int, length: int) -> np.ndarray:
        """Tokens; raises `DamagedFile` where there are not so many."""
        if start + length > len(self.texts):
            raise DamagedFile("a text lies outside of the texts")
        return self.texts[start : start + length]

    def numbers(self, count: int) -> np.ndarray:
        """The next numbers, int64."""
        return self._next("numbers", count).astype(np.int64)

    def flags(self, count: int) -> np.ndarray:
        """The next flags, bool."""
        return self._next("flags", count) != 0

    def reach(self, rows: int, distances: int) -> np.ndarray | None:
        """The next halves, `[rows, distances]`; None for none."""
        taken = self._next("reach", rows * distances)
        return taken.astype(np.float16).reshape(rows, distances) if distances else None

    def skip(self, shelf: ShelfRecord) -> None:
        """Go behind what a shelf takes; raises `DamagedFile` where there is not so much."""
        for each in shelf.segments:
            self._at["numbers"] += each.rows
            self._at["reach"] += each.rows * each.distances
            self._at["flags"] += each.rows * len(each.contexts)
        for each in shelf.sequences:
            self._at["numbers"] += 3 * each.length
            for drift in each.drifts:
                self._at["numbers"] += drift.anchors + drift.targets + drift.tokens + 3 * drift.sources
                self._at["flags"] += drift.targets
        if any(at > len(self._parts[name]) for name, at in self._at.items()):
            raise DamagedFile("the index refers to more than the arrays hold")

    def _next(self, name: str, count: int) -> np.ndarray:
        start = self._at[name]
        self._at[name] = start + count
        return self._parts[name][start : start + count]


class Contents:
    """
    All that an index and its tokens say.

    Args:
        shelves (list of `ShelfRecord`): Checked, each for itself.
        files (list of `RowFile`, or None): In the index's order; None where one is missing.
        arrays (`Arrays`): Of the whole store.
        saved (`float`): When it was saved, by the clock of the store that it is loaded into.

    Attributes:
        lent (`dict`): By shelf, numbers of its segments that only sequences of others refer to: shared text that was
            given up, while sessions go on with it.
        bound (`dict`): By shelf, the others that refer to these, and must be woken with it.
        dead (`dict`): By scope, a time: what was last used then, or before, has expired, as the session has lived
            shorter meanwhile than when it was saved.

    Raises `DamagedFile` where shelves refer to what is not there, or where rows of two segments lie over each other.
    """

    def __init__(
        self, shelves: list[ShelfRecord], files: list[RowFile | None], sizes: list[int], arrays: Arrays, saved
    ):
        self.shelves = shelves
        self._files = files
        self._arrays = arrays
        self.saved = saved
        self._layouts: dict[tuple[int, str | None], RowLayout] = {}
        self._first: list[int] = []  # number of each shelf's first segment ...
        self._places: list[dict] = []  # ... and where its arrays begin
        number = 0
        for shelf in shelves:
            self._first.append(number)
            self._places.append(arrays.place)
            number += len(shelf.segments)
            arrays.skip(shelf)
        self.dead: dict[Scope, float] = {}
        self.lent: dict[int, set[int]] = {}
        self.bound: dict[int, set[int]] = {}
        self._check_references()
        self._check_ranges(sizes)

    def build(self, shelf: int, now: float, foreign: Callable[[int], Segment | None]) -> Shelved:
        """
        What is on a shelf, without what has expired since, and without what is damaged or refers to that.

        Args:
            shelf (`int`): Which one.
            now (`float`): The time.
            foreign (callable): Gives a segment of another shelf by its number, None where it is no more.
        """
        record, first = self.shelves[shelf], self._first[shelf]
        self._arrays.place = self._places[shelf]
        made = Shelved(record.digest, record.settings, record.place, record.geometry)
        if record.session is not None:
            left = record.session.left_topic
            left = None if left is None else max(0.0, now - self.saved + left)
            made.session = SessionRecord(record.session.ttl, left)
        for number, each in enumerate(record.segments, first):
            segment = self._segment(each, made)
            if segment is not None:
                made.segments[number] = segment
                made.stored[segment] = self._stored(each, shelf)
                if each.findable:
                    made.findable.add(segment)

        def segment_of(number: int) -> Segment | None:
            return made.segments.get(number) if first <= number < first + len(record.segments) else foreign(number)

        for each in record.sequences:
            sequence = self._sequence(each, segment_of, made)
            if sequence is not None:
                made.sequences.append(sequence)
        made.means = [made.segments[number] for number in record.means if number in made.segments]
        self._drop_expired(made, now, self.lent.get(shelf, set()))
        return made

    # -- the parts ----------------------------------------------------------------------------------------------

    def _segment(self, record: SegmentRecord, made: Shelved) -> Segment | None:
        arrays, rows = self._arrays, record.rows
        positions, reach = arrays.numbers(rows), arrays.reach(rows, record.distances)
        drawn = {bytes.fromhex(context): arrays.flags(rows) for context in record.contexts}
        if self._files[record.file] is None:
            return None
        try:
            context = arrays.text(record.text, record.length)
        except DamagedFile as fault:
            made.faults.append(str(fault))
            return None
        if positions[0] < 0 or positions[-1] >= record.length or (np.diff(positions) <= 0).any():
            made.faults.append("positions of a segment do not ascend within its text")
            return None
        return Segment(
            ids=context[positions],
            positions=positions,
            context=context,
            addresses=np.empty(0, dtype=np.int64),
            state=record.state,
            hops=record.hops,
            copies=Copies(drawn, min(record.shared_left, int(positions[0]))) if drawn else None,
            reach=reach,
            last_used=self.saved - record.unused,
            created=self.saved - record.age,
            uses=Uses(record.uses, record.recent),
        )

    def _stored(self, record: SegmentRecord, shelf: int) -> StoredRows:
        size = self._layout(shelf, record).size(record.rows)
        return StoredRows(self._files[record.file], record.offset, size, record.checksum, record.cold)

    def _layout(self, shelf: int, record: SegmentRecord) -> RowLayout:
        if (shelf, record.cold) not in self._layouts:
            self._layouts[shelf, record.cold] = RowLayout(self.shelves[shelf].geometry, record.cold)
        return self._layouts[shelf, record.cold]

    def _sequence(self, record: SequenceRecord, segment_of, made: Shelved) -> Sequence | None:
        arrays, rows = self._arrays, record.length
        which, offset, shift = arrays.numbers(3 * rows).reshape(3, rows)
        drifts = [_drift(arrays, each) for each in record.drifts]
        segments, missing = [], set()
        for number in record.segments:
            segment = segment_of(number)
            if segment is None:
                segment = Segment(*(np.empty(0, dtype=np.int64) for _ in range(4)))
                missing.add(segment)
            segments.append(segment)
        try:
            ids = arrays.text(record.text, rows)
            for numbers in (which, *(drift.which for drift in drifts)):
                if (numbers < 0).any() or (numbers >= len(segments)).any():
                    raise DamagedFile("a recipe refers to a segment that it does not have")
            sequence = Sequence(
                ids,
                Recipe(segments, which.astype(np.int32), offset, shift, tuple(drifts)),
                record.exact,
                record.prompt_length,
                record.hops,
                last_used=self.saved - record.unused,
                expected_kl=record.expected_kl,
                pinned=record.pinned,
            )
            if missing:
                sequence = without(sequence, missing)
            if sequence is not None:
                _take_back(sequence)
                _check_recipe(sequence)
        except DamagedFile as fault:
            made.faults.append(str(fault))
            return None
        return sequence

    def _drop_expired(self, made: Shelved, now: float, lent: set[int]) -> None:
        """Leave out what its session has not used for as long as it lives, and segments that nothing refers to."""
        ttl = None if made.session is None else made.session.ttl
        dead = self.dead.get(made.place.scope, -math.inf)
        if ttl is not None or dead > -math.inf:
            own = set(made.segments.values())

            def is_alive(last_used: float, segments) -> bool:
                newest = max([last_used, *(each.last_used for each in segments if each in own)])
                return newest > dead and (ttl is None or now - newest < ttl)

            made.sequences = [each for each in made.sequences if is_alive(each.last_used, each.recipe.segments)]
            made.means = [each for each in made.means if is_alive(each.last_used, ())]
        needed = {segment for sequence in made.sequences for segment in sequence.recipe.segments} | set(made.means)
        needed |= {made.segments[number] for number in lent if number in made.segments}
        made.segments = {number: segment for number, segment in made.segments.items() if segment in needed}

    # -- what must hold between the parts -----------------------------------------------------------------------

    def _check_references(self) -> None:
        """A shelf refers to its own segments, and to those of the shared one beside it, whoever wrote the index."""
        keys = [(shelf.digest, shelf.settings, shelf.place) for shelf in self.shelves]
        owner = [shelf for shelf, record in enumerate(self.shelves) for _ in record.segments]
        referred = [{each for sequence in shelf.sequences for each in sequence.segments} for shelf in self.shelves]
        for number, shelf in enumerate(self.shelves):
            beside = (shelf.digest, shelf.settings, shelf.place.beside)
            if any(each >= len(owner) for each in (*referred[number], *shelf.means)):
                raise DamagedFile("a shelf names a segment that there is not")
            for each in referred[number]:
                if owner[each] == number:
                    continue
                if keys[owner[each]] != beside:
                    raise DamagedFile("a sequence refers to rows of another scope")
                if each not in referred[owner[each]] and each not in self.shelves[owner[each]].means:
                    self.lent.setdefault(owner[each], set()).add(each)
                    self.bound.setdefault(owner[each], set()).add(number)
            means = {each for each in shelf.means if owner[each] == number}
            if len(means) < len(shelf.means):
                raise DamagedFile("a shelf names a mean twice, or one of another shelf")
            if not all(shelf.segments[each - self._first[number]].contexts for each in means):
                raise DamagedFile("a shelf names a mean that is none")

    def _check_ranges(self, sizes: list[int]) -> None:
        """Rows lie inside of their files, and those of two segments in the same place or apart."""
        ranges: dict[int, set[tuple[int, int]]] = {}
        for number, shelf in enumerate(self.shelves):
            for each in shelf.segments:
                stop = each.offset + self._layout(number, each).size(each.rows)
                if each.file >= len(sizes) or stop > sizes[each.file]:
                    raise DamagedFile("rows lie outside of their file")
                ranges.setdefault(each.file, set()).add((each.offset, stop))
        for found in map(sorted, ranges.values()):
            if any(first[1] > second[0] for first, second in zip(found, found[1:], strict=False)):
                raise DamagedFile("rows of two segments lie over each other")


def without(sequence: Sequence, missing: set[Segment]) -> Sequence | None:
    """
    The part of a sequence that is left when some segments are gone: its rows before the first one of those. Of an
    approximate one only the exact part is left if that cuts into its prompt: what was moved into half a question
    answers another one. None where nothing is left.
    """
    recipe = sequence.recipe
    gone = np.array([segment in missing for segment in recipe.segments], dtype=bool)
    rows = np.flatnonzero(gone[recipe.which])
    length = int(rows[0]) if len(rows) else len(sequence.ids)
    exact = min(length, sequence.exact)
    for end in (length if length >= sequence.prompt_length else exact, exact):
        head = recipe.head(end) if end else None
        if head is not None and missing.isdisjoint(head.segments):  # not so if corrections of its rows need them
            break
    else:
        return None
    return Sequence(
        sequence.ids[:end],
        head,
        exact,
        min(sequence.prompt_length, end),
        0 if exact == end else sequence.hops,
        last_used=sequence.last_used,
        expected_kl=None if exact == end else sequence.expected_kl,
        pinned=sequence.pinned,
    )


def _drift(arrays: Arrays, record: DriftRecord) -> Correction:
    anchors, targets = arrays.numbers(record.anchors), arrays.numbers(record.targets)
    drift = Drift(anchors, targets, arrays.numbers(record.tokens))
    which, offset, shift = arrays.numbers(3 * record.sources).reshape(3, record.sources)
    return Correction(drift, which.astype(np.int32), offset, shift, arrays.flags(record.targets))


def _take_back(sequence: Sequence) -> None:
    """Shared rows that this sequence refers to may be kept in fewer bits by now: then less of it is exact."""
    exact = exact_rows(sequence)
    if exact < sequence.exact:
        sequence.exact, sequence.hops = exact, max(1, sequence.hops)


def _check_recipe(sequence: Sequence) -> None:
    """Raise `DamagedFile` unless each row of a sequence comes from a row with its token that stands where it says."""
    recipe, rows = sequence.recipe, np.arange(len(sequence.ids))
    lengths = np.array([len(segment) for segment in recipe.segments], dtype=np.int64)
    parts = [(recipe.which, recipe.offset)] + [(drift.which, drift.offset) for drift in recipe.drifts]
    if any((offset < 0).any() or (offset >= lengths[which]).any() for which, offset in parts):
        raise DamagedFile("a recipe refers to a row that its segment does not have")
    source = (np.cumsum(lengths) - lengths)[recipe.which] + recipe.offset
    ids = np.concatenate([segment.ids for segment in recipe.segments])[source]
    positions = np.concatenate([segment.positions for segment in recipe.segments])[source]
    if not np.array_equal(ids, sequence.ids) or not np.array_equal(positions + recipe.shift, rows):
        raise DamagedFile("a recipe's rows are of another text than its sequence")
    exact = np.array([segment.state == EXACT for segment in recipe.segments], dtype=bool)[recipe.which]
    if not exact[: sequence.exact].all() or recipe.shift[: sequence.exact].any():
        raise DamagedFile("a sequence takes approximate rows for exact ones")
    for correction in recipe.drifts:
        drift, tokens = correction.drift, len(correction.drift.run_start)
        inside = [_ascend_within(part, tokens) for part in (drift.anchors, drift.targets)]
        inside += [_ascend_within(part, len(rows)) for part in (correction.anchors, correction.targets)]
        if not all(inside) or (drift.run_start < 0).any() or (drift.run_start > tokens).any():
            raise DamagedFile("a correction refers to rows that its sequence does not have")


def _ascend_within(values: np.ndarray, stop: int) -> bool:
    """Whether numbers ascend from 0 or more to less than `stop`."""
    return len(values) == 0 or bool(values[0] >= 0 and values[-1] < stop and (np.diff(values) > 0).all())
