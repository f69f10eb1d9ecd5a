"""Everything that outlives a call: pools, shelves, and the order in which sequences are given up."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from ..config import PoolExhausted, SuffixCacheConfig
from ..rope import RotarySpec
from .accounting import KINDS, Survey
from .compaction import CompactionResult, compact_pool, empty_slabs
from .consensus import Computed, learn
from .cooling import cold_dtype, cool, ready
from .pool import BlockPool, Budget, Extent, LayerShape
from .room import PATIENCE, demote_old, give_growth_room, growth_room, make_room, moved_rows, pack
from .segments import DERIVED, EXACT, Segment
from .shelf import Recipe, Sequence, Shelf, joined

COMPACT_ROWS = 512  # most rows that are moved together after one call: 24 MB of SmolLM2-135M in fp32


@dataclass(frozen=True, eq=False)
class Draft:
    """
    What a finished call knows of one of its rows, before it is stored.

    Args:
        ids (`np.ndarray` of int64, `[rows]`): Tokens.
        prompt_length (`int`): Rows of the prompt.
        served (`Recipe`): Source of each row; `which` is -1 where the row was computed in this call.
        exact (`int`): Leading rows that are exact.
        hops (`int`): Hops of the rows computed behind approximate ones.
        extent (`Extent`), row (`int`), pad (`int`): The rows lie at columns [pad, pad + rows) of batch row `row`.
        reach (`np.ndarray`, `[rows, distances]`, *optional*): See `Segment`.
        expected_kl (`float`, *optional*): See `Sequence`.
    """

    ids: np.ndarray
    prompt_length: int
    served: Recipe
    exact: int
    hops: int
    extent: Extent
    row: int
    pad: int
    reach: np.ndarray | None = None
    expected_kl: float | None = None


class Store:
    """
    Pools, shelves, sequences. Every method takes the lock; what a view holds is referenced and can't be evicted.

    Args:
        config (`SuffixCacheConfig`): `max_bytes`, `block_size`, `keep_conversations`, `fidelity`, `consensus`,
            `store_dtype`, `compact_waste`, `debug` are read.
        clock (callable): Seconds, for the order of use.
    """

    def __init__(self, config: SuffixCacheConfig, clock: Callable[[], float] = time.monotonic):
        self.lock = threading.RLock()
        self.config = config
        self.clock = clock
        self.budget = Budget(config.max_bytes)
        self.pools: dict[tuple[LayerShape, ...], BlockPool] = {}
        self.shelves: dict[tuple, Shelf] = {}
        self.evictions = 0
        self._orphans: deque[tuple[BlockPool, Extent]] = deque()
        self._uncontinued = 0  # calls in a row that continued no stored conversation
        self._unpackable: dict[BlockPool, int] = {}  # rows of waste that the last compaction could do nothing about

    # -- what views ask for -------------------------------------------------------------------------------------

    def shelf(self, identity, scope: tuple, shapes: tuple[LayerShape, ...]) -> Shelf:
        """The shelf of an identity and scope; made at first use."""
        with self.lock:
            shelf = self.shelves.get((identity, scope))
            if shelf is None:
                shelf = self.shelves[identity, scope] = Shelf(self._pool(shapes))
            return shelf

    def allocate(self, shelf: Shelf, rows: int, batch: int = 1) -> Extent:
        """An extent from the pool, for which old sequences are given up; outside the pool if that is not enough."""
        with self.lock:
            self._release_orphans()
            pool = shelf.pool
            self.budget.refused = False  # the device may have memory again
            wanted, fits = batch * pool.round_up(rows), None
            while wanted * pool.row_bytes <= self.budget.max_bytes:
                try:
                    return pool.allocate(rows, batch, spare=growth_room(rows) if batch == 1 else 0)
                except PoolExhausted:
                    if fits is None:
                        fits = wanted * pool.row_bytes <= self.budget.max_bytes - self._bytes_in_use()
                    if not self._make_room(pool, wanted, fits):
                        break
            return pool.allocate_private(rows, batch)

    def shortage(self, shelf: Shelf, extent: Extent | None) -> str | None:
        """What to say of a call whose extent the pool had no room for; None where it had."""
        if extent is None or extent.pooled:
            return None
        needed = extent.batch * extent.rows * shelf.pool.row_bytes
        return (
            f"the call needed {needed:,} bytes, and {self._limit()} had no room for them: it ran in memory of its "
            "own, and nothing of it was stored"
        )

    def no_copies(self, shelf: Shelf) -> str | None:
        """
        What to say of a call whose view goes to the caller, and of which nothing was stored: there was no room for
        copies of its rows; None if its shelf was cleared meanwhile.
        """
        if shelf not in self.shelves.values():
            return None
        return f"the caller holds the call's cache, and {self._limit()} had no room for a copy: it was not stored"

    def _limit(self) -> str:
        return "the device" if self.budget.refused else f"`max_bytes` ({self.budget.max_bytes:,})"

    def adopt(self, shelf: Shelf, sequence: Sequence, rows: int) -> Extent | None:
        """The sequence's own extent, grown to `rows` rows, if it has one that is free and can grow in place."""
        with self.lock:
            if sequence.busy or sequence.extent is None or sequence not in shelf.sequences:
                return None
            extent = shelf.pool.grow_in_place(sequence.extent, rows)
            sequence.busy = extent is not None
            return extent

    def release(self, shelf: Shelf, extent: Extent) -> None:
        """Take a view's reference from its extent, and tidy up what its call has left."""
        with self.lock:
            shelf.pool.release(extent)
            self._tidy(shelf.pool)

    def release_later(self, shelf: Shelf, lease: list[Extent | None]) -> None:
        """The same from a finalizer, which must not touch the store while another frame of the thread works on it."""
        if lease[0] is not None:
            self._orphans.append((shelf.pool, lease[0]))

    def commit(
        self, shelf: Shelf, draft: Draft, frequencies: dict[RotarySpec, torch.Tensor], handed_out: bool
    ) -> Sequence | None:
        """
        Store one row of a finished call. Rows that are stored already in the same state are referred to, not kept
        twice. If the view was handed to the caller (`handed_out`), the store keeps copies, never memory
        that he may write to.
        """
        with self.lock:
            if shelf not in self.shelves.values() or not draft.extent.pooled or len(draft.ids) == 0:
                return None
            self._release_orphans()
            keep = None if handed_out or draft.pad else draft.extent.part(draft.row, len(draft.ids))
            known = self._contained(shelf, draft)
            if known is not None:
                self._touch(known)
                # an extent takes a recipe's place only where both are exact: approximate rows may have come otherwise
                exact = draft.exact == len(draft.ids) == len(known.ids)
                if keep is not None and known.extent is None and exact:
                    shelf.keep_extent(known, keep)
                self._demote_old()
                return known
            if self.config.consensus and self.config.fidelity != "exact":  # else nobody would be served by a mean
                self._learn(shelf, draft, frequencies)
            if handed_out and not self._make_room_for_copies(shelf.pool, draft):
                return None
            sequence = self._build(shelf, draft, handed_out, frequencies)
            if sequence is None:
                return None
            if keep is not None:
                shelf.keep_extent(sequence, keep)
            # what the new sequence replaces goes first: its windows would count as other contexts of the same text
            shelf.pin(sequence.recipe.segments)
            self._uncontinued = 0 if self._drop_subsumed(shelf, sequence) else self._uncontinued + 1
            shelf.add(sequence)
            shelf.unpin(sequence.recipe.segments)
            self._touch(sequence)
            if self.config.keep_conversations and self._uncontinued < PATIENCE:
                give_growth_room(shelf, sequence, draft.extent)
            self._demote_old()
            return sequence

    # -- managing -----------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything. Running calls keep their views, and store nothing when they end."""
        with self.lock:
            self._release_orphans()
            for key in list(self.shelves):
                self._drop_shelf(key)
            for pool in self.pools.values():
                pool.trim()

    def forget(self, identity) -> None:
        """Forget all rows of an identity: its weights have changed or are gone."""
        with self.lock:
            for key in [key for key in self.shelves if key[0] is identity]:
                self._drop_shelf(key)

    def drop(self, shelf: Shelf) -> None:
        """Forget all that is on one shelf."""
        with self.lock:
            for key in [key for key, held in self.shelves.items() if held is shelf]:
                self._drop_shelf(key)

    def forget_lost(self, lost: Callable) -> None:
        """Forget identities of which `lost(identity)` says that their model is gone."""
        with self.lock:
            for identity in {key[0] for key in self.shelves if lost(key[0])}:
                self.forget(identity)

    def compact(self) -> CompactionResult:
        """Defragment every pool; returns bytes moved and blocks freed."""
        with self.lock:
            self._release_orphans()
            total = CompactionResult(0, 0)
            for pool in self.pools.values():
                total += compact_pool(pool, self._on(pool))
                pool.trim()
            self._unpackable.clear()
            return total

    @property
    def bytes_used(self) -> int:
        """Bytes of used blocks, views included."""
        with self.lock:
            self._release_orphans()
            return sum(pool.bytes_used for pool in self.pools.values())

    @property
    def bytes_total(self) -> int:
        """Bytes of all slabs."""
        with self.lock:
            return sum(pool.bytes_total for pool in self.pools.values())

    def bytes_by_kind(self) -> dict[str, int]:
        """
        Bytes of used blocks by what they are there for: `exact`, `derived` and `means` rows; `extents` (rows of kept
        conversations that their recipes give as well), `views` of running calls, and `waste`. These add up to
        `bytes_used`. `private` are bytes outside the pool, of running calls that found no room in it.
        """
        with self.lock:
            self._release_orphans()
            total = dict.fromkeys(KINDS, 0)
            for pool in self.pools.values():
                for kind, size in Survey(pool, self._on(pool)).bytes_by_kind().items():
                    total[kind] += size
            return total | {"private": sum(pool.bytes_private for pool in self.pools.values())}

    @property
    def num_segments(self) -> int:
        """Stored segments."""
        with self.lock:
            self._release_orphans()
            return sum(len(shelf.segments) for shelf in self.shelves.values())

    # -- inside -------------------------------------------------------------------------------------------------

    def _pool(self, shapes: tuple[LayerShape, ...]) -> BlockPool:
        if self.budget.max_bytes is None:
            self.budget.max_bytes = free_bytes(shapes[0].device) // 4
        if shapes not in self.pools:
            pool = self.pools[shapes] = BlockPool(shapes, self.config.block_size, self.budget, self.config.debug)
            if cold_dtype(pool, self.config.store_dtype) is not None:
                pool.generous = False  # what warm slabs take is missing where most rows are to be
        return self.pools[shapes]

    def _drop_shelf(self, key: tuple) -> None:
        shelf = self.shelves.pop(key)
        for sequence in list(shelf.sequences):
            shelf.remove(sequence)
        for mean in list(shelf.means):
            shelf.forget_mean(mean)

    def _release_orphans(self) -> None:
        freed = set()
        while self._orphans:
            pool, extent = self._orphans.popleft()
            pool.release(extent)
            freed.add(pool)
        for pool in freed:
            self._tidy(pool)

    def _on(self, pool: BlockPool) -> list[Shelf]:
        """The shelves on a pool."""
        return [shelf for shelf in self.shelves.values() if shelf.pool is pool]

    def _make_room(self, wanting: BlockPool, rows: int, evict: bool = True) -> bool:
        """
        Move rows aside for an extent of so many rows, or give up what is worth least, sequences only with `evict`;
        False if nothing is left.
        """
        if self._cool():
            return True
        given_up = make_room(self.pools.values(), list(self.shelves.values()), wanting, rows, evict)
        self.evictions += given_up or 0
        return given_up is not None

    def _bytes_in_use(self) -> int:
        """Bytes that running calls need: their views, and the segments that they were planned with."""
        views = [Survey(pool, self._on(pool)).bytes_by_kind()["views"] for pool in self.pools.values()]
        pinned = [
            sum(len(each) for each in shelf.segments if each.references > each.holders) * shelf.pool.row_bytes
            for shelf in self.shelves.values()
        ]
        return sum(views) + sum(pinned)

    def _tidy(self, pool: BlockPool) -> None:
        """Convert old rows, give empty slabs back, and pack a few rows where much of what is used is waste."""
        self._cool()
        pool.trim(keep_largest=True)
        if self.config.compact_waste is None:
            return
        waste, used = self._waste(pool)
        if waste <= self.config.compact_waste * used or waste <= self._unpackable.get(pool, 0):
            return
        compact_pool(pool, self._on(pool), COMPACT_ROWS)
        left = self._waste(pool)[0]
        # what running calls hold looks like waste from here
        self._unpackable[pool] = left if left > waste - pool.block_size else 0

    def _waste(self, pool: BlockPool) -> tuple[int, int]:
        """Rows of used blocks that neither a segment nor a kept extent explains, and all rows of used blocks."""
        used = pool.blocks_used * pool.block_size
        kept = sum(moved_rows(sequence) for shelf in self._on(pool) for sequence in shelf.kept)
        return used - kept - sum(shelf.rows for shelf in self._on(pool)), used

    def _touch(self, sequence: Sequence) -> None:
        sequence.last_used = self.clock()
        sequence.busy = False

    def _contained(self, shelf: Shelf, draft: Draft) -> Sequence | None:
        """A stored sequence that starts with all of the draft's tokens and is at least as exact."""
        index = shelf.exact_prefixes if draft.exact == len(draft.ids) else shelf.conversations
        for sequence, length in index.longest(draft.ids):
            if length >= len(draft.ids) and sequence.exact >= draft.exact:
                return sequence
        return None

    def _drop_subsumed(self, shelf: Shelf, sequence: Sequence) -> int:
        """Forget the sequences that the new one continues: their segments live on in its recipe. Returns how many."""
        before = len(shelf.sequences)
        found = shelf.exact_prefixes.longest(sequence.ids) + shelf.conversations.longest(sequence.ids)
        for old, _ in found:
            inside = old is not sequence and len(old.ids) <= len(sequence.ids) and old.exact <= sequence.exact
            if inside and not old.busy and np.array_equal(old.ids, sequence.ids[: len(old.ids)]):
                shelf.remove(old)
        return before - len(shelf.sequences)

    def _learn(self, shelf: Shelf, draft: Draft, frequencies) -> None:
        """Draw the draft's own rows into the means of their texts."""
        rows = np.arange(len(draft.ids))
        hops = np.where(rows < draft.exact, 0, draft.hops)
        addresses = draft.extent.addresses(draft.row, draft.pad + rows)
        learn(shelf, Computed(draft.ids, draft.served.which < 0, hops, addresses), frequencies, self.clock())

    def _make_room_for_copies(self, pool: BlockPool, draft: Draft) -> bool:
        """Have room for copies of the rows that the draft's call computed, for which old sequences are given up."""
        rows = int((draft.served.which < 0).sum()) + 2 * self.config.block_size
        if pool.round_up(rows) * pool.row_bytes > self.budget.max_bytes - self._bytes_in_use():
            return False  # whatever is given up
        while True:
            try:
                pool.free_rows(rows, None)
                return True
            except PoolExhausted:
                if not self._make_room(pool, pool.round_up(rows)):
                    return False

    def _build(self, shelf: Shelf, draft: Draft, copy: bool, frequencies) -> Sequence | None:
        """
        The draft as a sequence: stored exact rows first, then served rows, its own rows in new segments; None if those
        were to be copied (`copy`), and there was no room for it.
        """
        stored, shared = next(iter(shelf.exact_prefixes.longest(draft.ids[: draft.exact])), (None, 0))
        rows = np.arange(len(draft.ids))
        own = (draft.served.which < 0) & (rows >= shared)
        recipe = joined(stored.recipe.head(shared) if shared else Recipe.empty(), draft.served, shared)
        known = len(recipe.segments)
        for state in (EXACT, DERIVED):
            positions = np.flatnonzero(own & ((rows < draft.exact) == (state == EXACT)))
            if len(positions) == 0:
                continue
            segment = Segment(
                ids=draft.ids[positions],
                positions=positions,
                context=draft.ids,
                addresses=draft.extent.addresses(draft.row, draft.pad + positions),
                state=state,
                hops=0 if state == EXACT else draft.hops,
                last_used=self.clock(),
                reach=None if draft.reach is None else draft.reach[positions],
            )
            shelf.pool.retain_rows(segment.addresses)
            if copy and not pack(shelf.pool, [segment], frequencies=frequencies):
                for own in [*recipe.segments[known:], segment]:
                    shelf.pool.release_rows(own.addresses)
                return None
            recipe.which[positions] = len(recipe.segments)
            recipe.offset[positions] = np.arange(len(positions))
            recipe.segments.append(segment)
        approximate = draft.exact < len(draft.ids)
        expected = draft.expected_kl if approximate else None
        return Sequence(draft.ids, recipe, draft.exact, draft.prompt_length, draft.hops, expected_kl=expected)

    def _demote_old(self) -> None:
        """Keep the extents of the newest conversations; pack the rows of the others."""
        demote_old(list(self.shelves.values()), self.config.keep_conversations, self._uncontinued)

    def _cool(self) -> int:
        """Convert rows to `store_dtype`, for which warm slabs are emptied; returns the number of segments."""
        done = 0
        for pool in self.pools.values() if self.config.store_dtype is not None else ():
            cold, shelves = cold_dtype(pool, self.config.store_dtype), self._on(pool)
            if cold is not None:
                done += sum(cool(shelf, cold) for shelf in shelves)
                if any(ready(shelf) for shelf in shelves) and empty_slabs(pool, shelves):
                    done += sum(cool(shelf, cold) for shelf in shelves)
        return done


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
