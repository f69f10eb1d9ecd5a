"""One shelf per identity and scope: its segments and sequences, and the two indices that find them."""

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from .corrections import Correction
from .index import PrefixIndex, Run, WindowIndex
from .pool import BlockPool, Extent
from .scopes import ANONYMOUS, Scope
from .segments import Segment


@dataclass(eq=False)
class Recipe:
    """
    Where each row of a sequence comes from: row `i` is row `offset[i]` of `segments[which[i]]`, its key turned by
    `shift[i]` positions, and then corrected by what `drifts` say, in their order.
    """

    segments: list[Segment]
    which: np.ndarray
    offset: np.ndarray
    shift: np.ndarray
    drifts: tuple[Correction, ...] = ()
    _used: dict[int, np.ndarray] = field(init=False, repr=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self.which)

    @classmethod
    def empty(cls) -> "Recipe":
        """A recipe of no rows."""
        none = np.empty(0, dtype=np.int64)
        return cls([], none.astype(np.int32), none, none)

    def head(self, length: int) -> "Recipe":
        """The first `length` rows, with only the segments that they need."""
        cut = (correction.head(length) for correction in self.drifts)
        drifts = [correction for correction in cut if len(correction.targets)]
        used = np.unique(np.concatenate([self.which[:length], *(correction.which for correction in drifts)]))
        segments = [self.segments[number] for number in used.tolist()]
        which = np.searchsorted(used, self.which[:length]).astype(np.int32)
        renumbered = tuple(correction.renumbered(lambda old: np.searchsorted(used, old)) for correction in drifts)
        return Recipe(segments, which, self.offset[:length], self.shift[:length], renumbered)

    def used(self, number: int) -> np.ndarray:
        """Which rows of `segments[number]` it refers to: bool `[rows of the segment]`. It must not change any more."""
        if number not in self._used:
            used = np.zeros(len(self.segments[number]), dtype=bool)
            for part in (self, *self.drifts):
                used[part.offset[part.which == number]] = True
            self._used[number] = used
        return self._used[number]

    def with_part(self, segment: Segment, part: Segment, rows: np.ndarray) -> "Recipe":
        """The same with a part of a segment, its rows `rows` (ascending), in its place: all that it refers to."""
        number = self.segments.index(segment)

        def offset_in(which: np.ndarray, offset: np.ndarray) -> np.ndarray:
            return np.where(which == number, np.searchsorted(rows, offset), offset)

        drifts = tuple(replace(each, offset=offset_in(each.which, each.offset)) for each in self.drifts)
        segments = [part if each is segment else each for each in self.segments]
        return Recipe(segments, self.which, offset_in(self.which, self.offset), self.shift, drifts)

    def take(self, other: "Recipe") -> None:
        """Become another recipe of the same rows."""
        self.segments, self.which, self.offset, self.shift = other.segments, other.which, other.offset, other.shift
        self.drifts = other.drifts
        self._used.clear()

    def addresses_of(self, rows: np.ndarray) -> np.ndarray:
        """Address of the source of each of these rows."""
        starts = np.cumsum([0, *(len(segment) for segment in self.segments)])
        addresses = np.concatenate([segment.addresses for segment in self.segments])
        return addresses[starts[self.which[rows]] + self.offset[rows]]


def joined(head: Recipe, served: Recipe, start: int) -> Recipe:
    """The rows of `head`, then those of `served` from `start` on, as one recipe with each segment once."""
    numbers: dict[Segment, int] = {}
    for segment in (*head.segments, *served.segments):
        numbers.setdefault(segment, len(numbers))
    which = served.which.copy()
    offset, shift = served.offset.copy(), served.shift.copy()
    for recipe, rows in ((head, slice(0, start)), (served, slice(start, None))):
        if recipe.segments:
            renumber = np.array([numbers[segment] for segment in recipe.segments] + [-1], dtype=np.int32)
            which[rows] = renumber[recipe.which[:start] if recipe is head else recipe.which[rows]]
    offset[:start], shift[:start] = head.offset, head.shift
    renumber = np.array([numbers[segment] for segment in served.segments], dtype=np.int32)
    drifts = [correction.renumbered(lambda old: renumber[old]) for correction in served.drifts]
    used = np.unique(np.concatenate([which[which >= 0], *(correction.which for correction in drifts)]))
    segments = list(numbers)
    compacted = np.full(len(segments) + 1, -1, dtype=np.int32)
    compacted[used] = np.arange(len(used))
    kept = tuple(correction.renumbered(lambda old: compacted[old]) for correction in drifts)
    return Recipe([segments[number] for number in used.tolist()], compacted[which], offset, shift, kept)


@dataclass(eq=False)
class Sequence:
    """
    A conversation: tokens and the recipe of their rows; the newest ones also keep their extent as it is.

    Args:
        ids (`np.ndarray` of int64, `[rows]`): Its tokens.
        recipe (`Recipe`): Source of each row.
        exact (`int`): Leading rows that are exact.
        prompt_length (`int`): Rows of the prompt it was born from; the rest was generated.
        hops (`int`): Generations of moved rows that rows computed behind it are away from exact ones (0: exact).
        extent (`Extent`, *optional*): Its rows as they lay when its call ended.
        expected_kl (`float`, *optional*): What its call expected of its answer, where its rows are approximate.
        pinned (`bool`): Whether it is never given up for room (see `pins.py`).
    """

    ids: np.ndarray
    recipe: Recipe
    exact: int
    prompt_length: int
    hops: int = 0
    extent: Extent | None = None
    last_used: float = 0.0
    busy: bool = False
    expected_kl: float | None = None
    pinned: bool = False


@dataclass(frozen=True)
class Match:
    """The longest stored prefixes of a prompt: by exact rows alone, and by a whole conversation's rows."""

    exact: int
    exact_sequence: Sequence | None
    carried: int
    carried_sequence: Sequence | None


class Shelf:
    """
    Segments and sequences of one identity and scope. Its sequences may refer to segments of the shared shelf too.

    Args:
        pool (`BlockPool`): Where the rows lie.
        scope (`Scope`, *optional*, defaults to the anonymous one): Whose rows they are.
        happened (`deque`, *optional*): Takes `("eviction", scope, 1)` for each entry that is given up for room.
    """

    def __init__(self, pool: BlockPool, scope: Scope = ANONYMOUS, happened: deque | None = None):
        self.pool = pool
        self.scope = scope
        self.evictions = 0
        self._numbers = itertools.count()
        self._happened = deque(maxlen=1) if happened is None else happened
        device = next(iter(pool.groups)).device  # where the model's rows lie, or the first of them
        self.windows = WindowIndex(device=device)
        self.exact_prefixes = PrefixIndex()
        self.conversations = PrefixIndex()
        self.sequences: dict[Sequence, None] = {}
        self.segments: dict[Segment, None] = {}
        self.means: dict[Segment, None] = {}  # among the segments; the shelf itself refers to them
        self.kept: dict[Sequence, None] = {}  # sequences with an extent
        self.warm: dict[Segment, None] = {}  # segments whose rows are in memory, in the model's dtype
        self.rows = 0  # in memory, of all segments
        # apart from the windows of copies, of which there are as many of a text as its index allows
        self.mean_windows = WindowIndex(device=device)
        self._unsure: set[WindowIndex | PrefixIndex] = set()  # those that are being changed

    @property
    def bytes_used(self) -> int:
        """Bytes of the rows of its segments."""
        parts = (part for segment in self.segments for part in self.pool.by_slab(segment.addresses))
        return sum(len(rows) * slab.row_bytes for slab, rows, _ in parts)

    # -- finding ------------------------------------------------------------------------------------------------

    def match(self, ids: np.ndarray) -> Match:
        """Longest exact prefix, and the longest prefix that goes on from a stored conversation's whole prompt."""
        exact = next(iter(self.exact_prefixes.longest(ids)), (None, 0))
        carried = (None, 0)
        for sequence, length in self.conversations.longest(ids):
            # an approximate prefix belongs to its own conversation: a prompt that leaves it before the end of its
            # question asks something else of the same rows, and gets them moved and repaired for itself
            if length >= sequence.prompt_length and length > carried[1]:
                carried = (sequence, length)
        return Match(exact[1], exact[0], carried[1], carried[0])

    def runs(self, ids: np.ndarray, first: int, min_match: int) -> list[Run]:
        """Stored runs that may be moved into the prompt, from position `first` on."""
        found = [windows.find_runs(ids, first=first, min_match=min_match) for windows in self._indices()]
        return [run for runs in found for run in runs]

    def _indices(self) -> tuple[WindowIndex, ...]:
        return (self.windows, self.mean_windows) if self.means else (self.windows,)

    # -- keeping ------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Index a sequence and those of its segments that are new. Its extent and segments must hold their blocks."""
        self.sequences[sequence] = None
        for segment in sequence.recipe.segments:
            if segment.home is None:
                self._enter(segment)
                if segment.movable:
                    self.make_findable(segment)
        self._hold(sequence.recipe.segments)
        self._index(sequence)

    def bring_back(self, segment: Segment, findable: bool) -> None:
        """Enter a segment that was saved, whose rows must hold their blocks, before what refers to it is added."""
        self._enter(segment)
        if findable:
            self.make_findable(segment)

    def make_findable(self, segment: Segment) -> bool:
        """Let prompts find a segment of this shelf; False if it is of no use to them."""
        return self._change(self.windows.add, segment)

    def came_in(self, segment: Segment, warm: bool) -> None:
        """A segment's rows lie in the pool from now on, in the model's dtype if they are `warm`."""
        self.rows += len(segment)
        if warm:
            self.warm[segment] = None

    def went_out(self, segment: Segment) -> None:
        """A segment's rows, which lie in the pool, are served from a file from now on."""
        self.rows -= len(segment)
        self.warm.pop(segment, None)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, its extent, and every segment that nothing refers to any more."""
        if sequence not in self.sequences:
            return
        del self.sequences[sequence]
        self._unindex(sequence)
        self.drop_extent(sequence)
        self._let_go(sequence.recipe.segments)

    def part_of(self, segment: Segment, rows: np.ndarray) -> Segment:
        """Some rows of a segment of this shelf, ascending, as one that shares their memory and can't be found yet."""
        part = replace(
            segment,
            ids=segment.ids[rows],
            positions=segment.positions[rows],
            addresses=segment.addresses[rows],
            reach=None if segment.reach is None else segment.reach[rows],
            uses=replace(segment.uses),
            references=0,
            holders=0,
        )
        self.pool.retain_rows(part.addresses)
        self._enter(part)
        if self.is_cold(segment):
            self.warm.pop(part, None)
        return part

    def put_in_place(self, sequence: Sequence, segment: Segment, part: Segment, rows: np.ndarray) -> None:
        """Let a sequence refer to a part of a segment in its stead (see `Recipe.with_part`)."""
        recipe = sequence.recipe.with_part(segment, part, rows)
        self._hold([part])
        sequence.recipe = recipe  # a new one: whoever saves the store still has the old one
        self._let_go([segment])

    def set_exact(self, sequence: Sequence, exact: int) -> None:
        """Some of a sequence's rows are approximate from now on: only the first `exact` ones are exact."""
        self._unindex(sequence)
        sequence.exact, sequence.hops = exact, max(1, sequence.hops)
        self._index(sequence)

    def add_mean(self, mean: Segment) -> bool:
        """Keep a mean, whose rows must hold their blocks; False, and nothing is kept, if its text can't be found."""
        self.means[mean] = None
        if mean not in self.segments:
            self._enter(mean)
        self._hold([mean])
        if self._change(self.mean_windows.add, mean):
            return True
        self.forget_mean(mean)
        return False

    def forget_mean(self, mean: Segment) -> None:
        """Let a mean go. Its rows stay as long as anything else refers to them."""
        del self.means[mean]
        self._change(self.mean_windows.remove, mean)
        self._let_go([mean])

    def keep_extent(self, sequence: Sequence, extent: Extent) -> None:
        """Keep a sequence's rows as they lie in an extent, whose blocks get a reference for it."""
        self.pool.retain(extent)
        self.drop_extent(sequence)
        sequence.extent = extent
        self.kept[sequence] = None

    def is_cold(self, segment: Segment) -> bool:
        """Whether a segment's rows are kept in a smaller dtype than the model's."""
        return segment not in self.warm

    def drop_extent(self, sequence: Sequence) -> None:
        """Give a sequence's extent back; its rows stay reachable by its recipe."""
        if sequence.extent is not None:
            self.pool.release(sequence.extent)
            sequence.extent = None
            self.kept.pop(sequence, None)

    def pin(self, segments: list[Segment]) -> None:
        """Keep segments alive while a view refers to them."""
        for segment in segments:
            segment.references += 1

    def unpin(self, segments: list[Segment]) -> None:
        """Undo `pin`; what nothing refers to leaves index and pool."""
        for segment in segments:
            segment.references -= 1
            assert segment.references >= 0, "a segment was unpinned more often than it was pinned"
            if segment.references == 0:
                home = segment.home and segment.home()
                if home is not None:
                    home._leave(segment)
                self.pool.release_rows(segment.addresses)

    def expire(self, now: float, ttl: float) -> tuple[int, float | None]:
        """
        Forget sequences and means that were last used `ttl` seconds ago or longer; those of running calls stay.

        Returns:
            Segments that were forgotten, and the time of the earliest last use of what is left, None if nothing is.
        """
        before = len(self.segments)
        for sequence in list(self.sequences):
            used = self.newest_use(sequence)
            if used > now:  # the clock was put back: it counts from here
                sequence.last_used = used = now
            if now - used >= ttl and not sequence.busy:
                self.remove(sequence)
        for mean in [mean for mean in self.means if now - mean.last_used >= ttl]:
            self.forget_mean(mean)
        uses = [*map(self.newest_use, self.sequences), *(mean.last_used for mean in self.means)]
        return before - len(self.segments), min(uses, default=None)

    def count_eviction(self) -> None:
        """A sequence or mean was given up for room."""
        self.evictions += 1
        self._happened.append(("eviction", self.scope, 1))

    def newest_use(self, sequence: Sequence) -> float:
        """When a sequence or one of its rows on this shelf was last used; uses of shared rows are not its own."""
        own = (segment.last_used for segment in sequence.recipe.segments if segment.lives_on(self))
        return max([sequence.last_used, *own])

    def _enter(self, segment: Segment) -> None:
        segment.home = weakref.ref(self)
        segment.segment_id = next(self._numbers)  # this shelf's alone: reports show it
        self.segments[segment] = None
        if not self.pool.is_mapped(segment.addresses):
            self.came_in(segment, True)

    def _leave(self, segment: Segment) -> None:
        if segment in self.segments:
            del self.segments[segment]
            self.warm.pop(segment, None)
            if not self.pool.is_mapped(segment.addresses):
                self.rows -= len(segment)
            self._change(self.windows.remove, segment)

    def _hold(self, segments: list[Segment]) -> None:
        for segment in segments:
            segment.holders += 1
        self.pin(segments)

    def _let_go(self, segments: list[Segment]) -> None:
        for segment in segments:
            segment.holders -= 1
        self.unpin(segments)

    def _index(self, sequence: Sequence) -> None:
        for index, ids in self._places(sequence):
            self._change(index.add, ids, sequence)

    def _unindex(self, sequence: Sequence) -> None:
        for index, ids in self._places(sequence):
            self._change(index.remove, ids, sequence)

    def _places(self, sequence: Sequence) -> list[tuple[PrefixIndex, np.ndarray]]:
        """By what tokens a sequence can be found, and where."""
        exact = [(self.exact_prefixes, sequence.ids[: sequence.exact])] if sequence.exact else []
        return exact + ([(self.conversations, sequence.ids)] if sequence.exact < len(sequence.ids) else [])

    def _change(self, change: Callable, *args):
        """Change an index. Where that is broken off, the index stays unsure."""
        self._unsure.add(change.__self__)
        done = change(*args)
        self._unsure.discard(change.__self__)
        return done

    # -- after a change that was broken off ---------------------------------------------------------------------

    def drop_halves(self) -> None:
        """Forget sequences that were not stored to the end, and means that can't be found."""
        for sequence in list(self.sequences):
            homes = ((segment, segment.home and segment.home()) for segment in sequence.recipe.segments)
            if any(home is None or segment not in home.segments for segment, home in homes):
                del self.sequences[sequence]
        self.kept = {sequence: None for sequence in self.sequences if sequence.extent is not None}
        self.mean_windows = self._mended(self.mean_windows, [each for each in self.means if each in self.segments])
        self.means = {mean: None for mean in self.means if mean in self.mean_windows}

    def reindex(self) -> None:
        """Make sure that sequences can be found, and segments, and nothing that is not there."""
        self.windows = self._mended(self.windows, [each for each in self.segments if not each.is_mean])
        self.exact_prefixes, self.conversations = PrefixIndex(), PrefixIndex()
        for sequence in self.sequences:
            self._index(sequence)
        self._unsure.clear()

    def _mended(self, windows: WindowIndex, segments: list[Segment]) -> WindowIndex:
        """An index of no more than these segments: the old one, unless it was being changed."""
        if windows in self._unsure:
            windows = WindowIndex(device=windows.device)
            for segment in segments:
                windows.add(segment)
        for segment in set(windows.segments).difference(segments):
            windows.remove(segment)
        return windows
