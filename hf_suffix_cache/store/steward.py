"""Who finds memory for calls in a store that is full, and gives up for it what is worth least."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Collection
from contextlib import contextmanager

import numpy as np

from ..config import PoolExhausted
from .accounting import Survey
from .claims import Claims
from .compaction import compact_pool, empty_slabs, make_range
from .cooling import cold_dtype, cool, ready
from .eviction import VIEW_SHARE, EvictionPolicy, admits, describe, evictable, order_of
from .pool import BlockPool, Extent, Slab
from .room import demote, growth_room, moved_rows
from .segments import Segment
from .shelf import Recipe, Sequence, Shelf
from .usage import Usage

COMPACT_ROWS = 512  # most rows that are moved together after one call: 24 MB of SmolLM2-135M in fp32
RANKED = 8  # sequences that go one after the other before all are looked at anew


class Steward:
    """
    Finds memory for the rows of calls, and gives up what is worth least for it. The store's lock is held by callers.

    Args:
        usage (`Usage`): Of the store, whose pools and budget it knows.
        shelves (`dict`): The store's, by key.
        policy (`EvictionPolicy`): What is to stay.
        clock (callable): Seconds.
        store_dtype (`str`, *optional*): The dtype that old rows are kept in, if that is not the model's.
        put_back (callable, *optional*): Takes a shelf and a sequence, and has its rows served from the files that they
            lie in as well; False if no memory comes of it.

    Attributes:
        evictions (`int`): Sequences and means that were given up.
        unpackable (`dict`): Of each pool, rows of waste that the last compaction could do nothing about.
        turned_away (`int`): Calls whose rows were not kept because what was there is worth more: their rows found no
            room in the pool for that reason, or went unused at the first contest.
    """

    def __init__(
        self,
        usage: Usage,
        shelves: dict[object, Shelf],
        policy: EvictionPolicy,
        clock: Callable[[], float],
        store_dtype: str | None = None,
        put_back: Callable[[Shelf, Sequence], bool] = lambda shelf, sequence: False,
    ):
        self.usage = usage
        self.budget = usage.budget
        self.policy = policy
        self.evictions = 0
        self.turned_away = 0
        self.unpackable: dict[BlockPool, int] = {}
        self._shelves = shelves
        self._clock = clock
        self._store_dtype = store_dtype
        self._put_back = put_back
        self._strangers: weakref.WeakSet[Slab] = weakref.WeakSet()  # memory of calls that were turned away
        self._next: deque[tuple[Shelf, Sequence, bool]] | None = None  # in a contest: what goes next, see `_ranked`
        self._plans: Collection[Recipe] = ()  # in a contest: of the call that it is for

    def allocate(
        self, shelf: Shelf, rows: int, batch: int, prompts: Collection[tuple] | None, plans: Collection[Recipe]
    ) -> Extent:
        """See `Store.allocate`."""
        pool, wanted, fits = shelf.pool, batch * shelf.pool.round_up(rows), None
        self.budget.refused = False  # the device may have memory again
        if not self._admits(shelf, wanted, prompts, plans):
            self.turned_away += 1
            for ids, recipe in prompts:
                self.usage.turn_away(shelf, ids, recipe)
            extent = pool.allocate_private(rows, batch)
            self._strangers.add(extent.slab)
            return extent
        with self._contest(plans):
            while wanted * pool.row_bytes <= self.budget.max_bytes:
                try:
                    return pool.allocate(rows, batch, spare=growth_room(rows) if batch == 1 else 0)
                except PoolExhausted:
                    if fits is None:
                        fits = wanted * pool.row_bytes <= self.budget.max_bytes - self._bytes_in_use(plans)
                    if not self.step(pool, wanted, fits):
                        break
        return pool.allocate_private(rows, batch)

    def have_rows(self, pool: BlockPool, rows: int) -> bool:
        """
        Have room for so many packed rows, for which sequences are given up; False if that was not enough. Nothing is
        given up where all of it would not be enough.
        """
        if pool.round_up(rows) * pool.row_bytes > self.budget.max_bytes - self._bytes_in_use(()):
            return False
        with self._contest(()):
            while True:
                try:
                    pool.free_rows(rows, None)
                    return True
                except PoolExhausted:
                    if not self.step(pool, pool.round_up(rows)):
                        return False

    def shortage(self, shelf: Shelf, extent: Extent | None) -> str | None:
        """
        What to say of a call whose extent the pool had no room for; None where it had, and of one that was turned
        away: that is no fault.
        """
        if extent is None or extent.pooled or extent.slab in self._strangers:
            return None
        needed = extent.batch * extent.rows * shelf.pool.row_bytes
        return (
            f"the call needed {needed:,} bytes, and {self.limit()} had no room for them: it ran in memory of its "
            "own, and nothing of it was stored"
        )

    def limit(self) -> str:
        """What keeps the pools from growing, in words."""
        return "the device" if self.budget.refused else f"`max_bytes` ({self.budget.max_bytes:,})"

    def step(self, wanting: BlockPool, rows: int, evict: bool = True) -> bool:
        """
        Take one step towards an extent of `rows` rows in the pool `wanting`, of those left the one that loses least:
        rows in a smaller dtype, slabs that hold nothing, moving rows aside, the oldest kept extent (its rows can be
        gathered again), the oldest mean, and then the sequence that is worth least (with `evict`). What running calls
        refer to stays. False if nothing is left to be given up.
        """
        shelves = list(self._shelves.values())
        if self.cool() or sum(pool.trim() for pool in self.usage.pools.values()):
            return True
        on_pool = self._on(wanting)
        if _might_fit(wanting, on_pool, rows) and make_range(wanting, on_pool, rows):
            return True
        return _demote_oldest(shelves) or self._forget_mean(shelves) or (evict and self._give_up(shelves))

    def tidy(self, pool: BlockPool, compact_waste: float | None) -> None:
        """
        Convert old rows, give empty slabs back, and pack a few rows where more than a share `compact_waste` of what is
        used is waste.
        """
        self.cool()
        pool.trim(keep_largest=True)
        if compact_waste is None:
            return
        waste, used = self._waste(pool)
        if waste <= compact_waste * used or waste <= self.unpackable.get(pool, 0):
            return
        compact_pool(pool, self._on(pool), COMPACT_ROWS)
        left = self._waste(pool)[0]
        # what running calls hold looks like waste from here
        self.unpackable[pool] = left if left > waste - pool.block_size else 0

    def _waste(self, pool: BlockPool) -> tuple[int, int]:
        """Rows of used blocks that neither a segment nor a kept extent explains, and all rows of used blocks."""
        used = pool.blocks_used * pool.block_size
        kept = sum(moved_rows(sequence) for shelf in self._on(pool) for sequence in shelf.kept)
        return used - kept - sum(shelf.rows for shelf in self._on(pool)), used

    def cool(self) -> int:
        """Convert rows to `store_dtype`, for which warm slabs are emptied; returns the number of segments."""
        done = 0
        for pool in self.usage.pools.values() if self._store_dtype is not None else ():
            cold, shelves = cold_dtype(pool, self._store_dtype), self._on(pool)
            if cold is not None:
                done += cool(pool, shelves, cold)
                if ready(shelves) and empty_slabs(pool, shelves):
                    done += cool(pool, shelves, cold)
        return done

    def _forget_mean(self, shelves: Collection[Shelf]) -> bool:
        """Forget the oldest mean. One that a sequence refers to frees nothing before that goes, nor one in a file."""
        idle = [
            (mean.last_used, shelf, mean)
            for shelf in shelves
            for mean in shelf.means
            if mean.references == 1 and not shelf.pool.is_mapped(mean.addresses)
        ]
        if idle:
            _, shelf, mean = min(idle, key=lambda entry: entry[0])
            shelf.forget_mean(mean)
            self._count(shelf)
        return bool(idle)

    def _give_up(self, shelves: Collection[Shelf]) -> bool:
        """Give up the memory of the sequence that is worth least, and the sequence itself if it lies in no file."""
        waiting = deque() if self._next is None else self._next
        if not waiting:
            waiting.extend(self._ranked(shelves))
        if not waiting:
            return False
        shelf, sequence, in_vain = waiting.popleft()
        if self._put_back(shelf, sequence):
            return True
        self.turned_away += in_vain
        gone = [each for each in sequence.recipe.segments if each.references == 1]
        self.usage.give_up(shelf, [each for each in gone if not shelf.pool.is_mapped(each.addresses)])
        shelf.remove(sequence)
        self._count(shelf)
        self._shrink(shelves, [each for each in sequence.recipe.segments if each.references])
        return True

    def _shrink(self, shelves: Collection[Shelf], left: Collection[Segment]) -> None:
        """Of segments that a sequence has left, which is gone, others keep the rows that they need."""
        claims = Claims(shelves, self._plans, set(left)) if left else None
        for segment in left:
            home = segment.home()
            if claims.shrink(segment):
                self.usage.give_up(home, [segment])

    def _ranked(self, shelves: Collection[Shelf]) -> list[tuple[Shelf, Sequence, bool]]:
        """What goes next, each with its shelf, and whether it is new and went unused where older ones stay."""
        found = evictable(shelves)
        candidates = describe(found, self.usage, Claims(shelves, self._plans))
        order = order_of(candidates, self.policy)[0]
        oldest = np.minimum.accumulate(candidates.last_used[order][::-1])[::-1]  # of those that stay, and itself
        in_vain = (candidates.new_bytes == candidates.num_bytes) & (candidates.num_bytes > 0)
        in_vain[order] &= oldest < candidates.last_used[order]
        return [(*found[number], bool(in_vain[number])) for number in order[:RANKED].tolist()]

    def _count(self, shelf: Shelf) -> None:
        self.evictions += 1
        shelf.count_eviction()

    @contextmanager
    def _contest(self, plans: Collection[Recipe]) -> Iterator[None]:
        """Around one call's search for room: what is left of what was new has stood its first contest."""
        before, self._next, self._plans = self.evictions, deque(), plans
        try:
            yield
        finally:
            self.usage.contest += self.evictions > before
            self._next, self._plans = None, ()

    def _admits(self, shelf: Shelf, wanted: int, prompts: Collection[tuple] | None, plans: Collection[Recipe]) -> bool:
        """
        Whether a call may have so many rows. A view must lie somewhere, so a share of the store is for any call to
        have: what is given up for it is what is worth least. A larger one must be worth what has to go for it.
        """
        size = wanted * shelf.pool.row_bytes
        if prompts is None or not VIEW_SHARE * self.budget.max_bytes < size <= self.budget.max_bytes:
            return True
        shelves = list(self._shelves.values())
        claims = Claims(shelves, plans)
        return admits(shelves, shelf, size, prompts, self.policy, self.usage, self._clock(), claims)

    def _on(self, pool: BlockPool) -> list[Shelf]:
        """The shelves on a pool."""
        return [shelf for shelf in self._shelves.values() if shelf.pool is pool]

    def _bytes_in_use(self, plans: Collection[Recipe]) -> int:
        """Bytes that stay: views of running calls, the rows that they were planned with, and what is pinned."""
        shelves = list(self._shelves.values())
        pinned = [sequence.recipe for shelf in shelves for sequence in shelf.sequences if sequence.pinned]
        views = (Survey(pool, self._on(pool)).bytes_by_kind()["views"] for pool in self.usage.pools.values())
        return sum(views) + Claims(shelves, plans, ()).needed([*pinned, *plans])


def _demote_oldest(shelves: Collection[Shelf]) -> bool:
    """Give up the oldest kept extent; False if there is none."""
    kept = [(sequence.last_used, shelf, sequence) for shelf in shelves for sequence in shelf.kept if not sequence.busy]
    if kept:
        _, shelf, sequence = min(kept, key=lambda entry: entry[0])
        demote(shelf, sequence)
    return bool(kept)


def _might_fit(pool: BlockPool, shelves: Collection[Shelf], rows: int) -> bool:
    """Whether room, and memory that nothing stored explains, are enough: a quick look before a long one."""
    held = sum(shelf.rows for shelf in shelves)
    spare = sum(slab.rows for slab in pool.slabs.values()) - held
    return max(0, pool.budget.left) + spare * pool.row_bytes >= rows * pool.row_bytes
