"""Everything that outlives a call: pools, shelves, and the order in which sequences are given up."""

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import psutil
import torch

from ..config import SuffixCacheConfig
from ..rope import RotarySpec
from .accounting import KINDS, Survey
from .compaction import CompactionResult, compact_pool
from .consensus import Computed, learn
from .cooling import cold_dtype
from .dormant import Dormant
from .drafts import Draft, sequence_of
from .eviction import policy_of
from .host import HostMemory
from .leases import Leases
from .mending import changes, mend
from .pool import BlockPool, Budget, Extent, LayerShape
from .reading import Reading
from .room import PATIENCE, demote_old, give_growth_room
from .scopes import Place, Scope
from .sessions import Sessions
from .shelf import Sequence, Shelf
from .steward import Steward
from .topic import Topic
from .usage import Usage

logger = logging.getLogger("hf_suffix_cache")

MAX_HAPPENED = 1024  # evictions and expiries that wait to be told


class Store:
    """
    Pools, shelves, sequences, sessions. Every method takes the lock; what a view holds is referenced and can't be
    evicted.

    Args:
        config (`SuffixCacheConfig`): `max_bytes`, `block_size`, `keep_conversations`, `fidelity`, `consensus`,
            `store_dtype`, `compact_waste`, `eviction`, `topic_similarity`, `topic_temperature`, `debug` are read.
        clock (callable): Seconds, for the order of use and for what expires.

    Attributes:
        usage (`Usage`): What is asked for how often.
        steward (`Steward`): Who finds memory for calls, and gives up what is worth least for it.
    """

    def __init__(self, config: SuffixCacheConfig, clock: Callable[[], float] = time.monotonic):
        self.lock = threading.RLock()
        self.config = config
        self.clock = clock
        self.budget = Budget(config.max_bytes)
        self.pools: dict[tuple[LayerShape, ...], BlockPool] = {}
        self.shelves: dict[tuple[object, Place], Shelf] = {}
        self.sessions = Sessions(lambda: Topic(config.topic_similarity, config.topic_temperature))
        self.dormant = Dormant(HostMemory(config.host_bytes), self.shelves)
        self.usage = Usage(self.budget, self.pools)
        self.steward = Steward(
            self.usage, self.shelves, policy_of(config.eviction), clock, config.store_dtype, self.dormant.put_back
        )
        self.expirations = 0
        self.happened: deque[tuple[str, Scope, int]] = deque(maxlen=MAX_HAPPENED)  # to be told, see `Events`
        self.leases = Leases()
        self.unsure = False  # whether a call, or a change, was broken off
        self._uncontinued = 0  # calls in a row that continued no stored conversation

    # -- what views ask for -------------------------------------------------------------------------------------

    @changes
    def shelf(self, identity, place: Place, shapes: tuple[LayerShape, ...]) -> Shelf:
        """The shelf of an identity and place; made at first use."""
        with self.lock:
            self.dormant.wake(self, identity, place, shapes)
            shelf = self.shelves.get((identity, place))
            if shelf is None:
                shelf = self.shelves[identity, place] = Shelf(self._pool(shapes), place.scope, self.happened)
                self.sessions.look_at((identity, place), self.clock())
            return shelf

    @changes
    def reading(self, identity, place: Place, shapes: tuple[LayerShape, ...]) -> Reading:
        """What a call of an identity and place is served from."""
        with self.lock:
            self.dormant.wake(self, identity, place, shapes)
            shared = None if place.beside is None else self.shelves.get((identity, place.beside))
            own = self.shelf(identity, place, shapes)
            slow = functools.partial(self.dormant.is_slow, row_seconds=self.usage.seconds_of(own.pool))
            return Reading(own, shared, self.sessions.get(place.scope), slow)

    @changes
    def expire(self) -> None:
        """Give up what sessions have not used for as long as they live; what a running call refers to stays."""
        with self.lock:
            now = self.clock()
            for key in self.sessions.due(now):
                shelf = self.shelves.get(key)
                session = None if shelf is None else self.sessions.get(shelf.scope)
                if session is None or session.ttl is None:
                    continue
                gone, oldest = shelf.expire(now, session.ttl)
                session.expired += gone
                self.expirations += gone
                if gone:
                    self.happened.append(("expiry", shelf.scope, gone))
                if oldest is not None:
                    self.sessions.look_at(key, oldest + session.ttl)
                elif now - session.last_used < session.ttl:
                    self.sessions.look_at(key, session.last_used + session.ttl)
                else:
                    self._drop_shelf(key)
                    if all(other.scope != shelf.scope for other in self.shelves.values()):
                        self.dormant.age(shelf.scope, now, session.ttl)
                        self.sessions.forget(shelf.scope)

    @changes
    def open_session(self, scope: Scope, ttl: float | None, is_new: bool = True) -> None:
        """
        A call of a session begins, whose rows live for `ttl` seconds unused from now on. Without `is_new` nothing is
        remembered of a session that is not known.
        """
        with self.lock:
            self.expire()  # by the time to live that held until now
            known, now = self.sessions.get(scope), self.clock()
            if known is None and not is_new:
                return
            if known is not None and known.ttl != ttl:
                self.dormant.age(scope, now, known.ttl)
                for key in [key for key in self.shelves if key[1].scope == scope]:
                    self.sessions.look_at(key, now)
            self.sessions.open(scope, ttl, now)

    @changes
    def allocate(self, shelf: Shelf, rows: int, batch: int = 1, prompts=None, plans=()) -> Extent:
        """
        An extent from the pool, for which sequences are given up; outside the pool if that is not enough, or if what
        would have to go is worth more than the call.

        Args:
            prompts (sequence, *optional*): Of each prompt of the call its tokens, `[rows]`, and the recipe of what is
                served. None: all else gives way to the call. Empty: nothing does, as the call is not stored.
            plans (sequence of `Recipe`, *optional*): What the call was planned with and has pinned. Of a segment that
                must go otherwise its rows stay: the recipe then names them in another one.
        """
        with self.lock:
            self._catch_up()
            return self.steward.allocate(shelf, rows, batch, prompts, plans)

    def shortage(self, shelf: Shelf, extent: Extent | None) -> str | None:
        """What to say of a call whose extent the pool had no room for; None where it had."""
        return self.steward.shortage(shelf, extent)

    def no_copies(self, shelf: Shelf) -> str | None:
        """
        What to say of a call whose view goes to the caller, and of which nothing was stored: there was no room for
        copies of its rows; None if its shelf was cleared meanwhile.
        """
        if shelf not in self.shelves.values():
            return None
        return (
            f"the caller holds the call's cache, and {self.steward.limit()} had no room for a copy: it was not stored"
        )

    @changes
    def adopt(self, shelf: Shelf, sequence: Sequence, rows: int) -> Extent | None:
        """The sequence's own extent, grown to `rows` rows, if it has one that is free and can grow in place."""
        with self.lock:
            if sequence.busy or sequence.extent is None or sequence not in shelf.sequences:
                return None
            extent = shelf.pool.grow_in_place(sequence.extent, rows)
            sequence.busy = extent is not None
            return extent

    @changes
    def release(self, shelf: Shelf, extent: Extent) -> None:
        """Take a view's reference from its extent, and tidy up what its call has left."""
        with self.lock:
            shelf.pool.release(extent)
            self._tidy(shelf.pool)

    @changes
    def commit(
        self,
        shelf: Shelf,
        draft: Draft,
        frequencies: dict[RotarySpec, torch.Tensor],
        handed_out: bool,
        shared: Shelf | None = None,
        keep_extent: bool = True,
        wanted: bool = False,
    ) -> Sequence | None:
        """
        Store one row of a finished call. Rows that are stored already in the same state, also on the `shared` shelf
        beside, are referred to, not kept twice. If the view was handed to the caller (`handed_out`), the store keeps
        copies, never memory that he may write to. Storing what a caller asked to be stored (`wanted`) counts as a use.
        """
        with self.lock:
            self._catch_up()  # first: it may drop the shelf
            if shelf not in self.shelves.values() or not draft.extent.pooled or len(draft.ids) == 0:
                return None
            copied = handed_out or draft.pad or not keep_extent
            keep = None if copied else draft.extent.part(draft.row, len(draft.ids))
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
            # room for copies of the rows that the call has computed
            if handed_out and not self.steward.have_rows(shelf.pool, draft.own_rows + 2 * self.config.block_size):
                return None
            sequence = sequence_of(shelf, draft, handed_out, frequencies, shared, self.clock())
            if sequence is None:
                return None
            if keep is not None:
                shelf.keep_extent(sequence, keep)
            # what the new sequence replaces goes first: its windows would count as other contexts of the same text
            shelf.pin(sequence.recipe.segments)
            self._uncontinued = 0 if self._drop_subsumed(shelf, sequence) else self._uncontinued + 1
            new = [segment for segment in sequence.recipe.segments if segment.home is None]
            shelf.add(sequence)
            self.usage.store(shelf, new, wanted)
            shelf.unpin(sequence.recipe.segments)
            self._touch(sequence)
            if self.config.keep_conversations and self._uncontinued < PATIENCE:
                give_growth_room(shelf, sequence, draft.extent)
            self._demote_old()
            return sequence

    # -- managing -----------------------------------------------------------------------------------------------

    @changes
    def clear(self, scope: Scope | None = None) -> None:
        """Forget everything, or one scope. Running calls keep their views, and store nothing when they end."""
        with self.lock:
            self._catch_up()
            for key in [key for key in self.shelves if scope in (None, key[1].scope)]:
                self._drop_shelf(key)
            self.dormant.clear(scope)
            for each in self.sessions if scope is None else [scope]:
                self.sessions.forget(each)
            if scope is None:
                self.usage.ghosts.clear()
            for pool in self.pools.values():
                pool.trim()

    @changes
    def forget(self, identity) -> None:
        """Forget all rows of an identity: its weights have changed or are gone."""
        with self.lock:
            for key in [key for key in self.shelves if key[0] is identity]:
                self._drop_shelf(key)

    def abandon(self, shelf: Shelf) -> None:
        """Forget all rows of the identity that a shelf is of (others refer to its segments), in whatever state."""
        with self.lock:
            self.unsure = True
            for identity in [key[0] for key, held in self.shelves.items() if held is shelf]:
                for key in [key for key in self.shelves if key[0] is identity]:
                    del self.shelves[key]
            self.mend()

    def mend(self) -> None:
        """Put all counts and indices in order, after a change may have been broken off."""
        with self.lock:
            mend(self)
            self.unsure = False

    def forget_lost(self, lost: Callable) -> None:
        """Forget identities of which `lost(identity)` says that their model is gone."""
        with self.lock:
            for identity in {key[0] for key in self.shelves if lost(key[0])}:
                self.forget(identity)

    @changes
    def compact(self) -> CompactionResult:
        """Defragment every pool; returns bytes moved and blocks freed."""
        with self.lock:
            self._catch_up()
            total = CompactionResult(0, 0)
            for pool in self.pools.values():
                total += compact_pool(pool, self._on(pool))
                pool.trim()
            self.steward.unpackable.clear()
            return total

    @property
    def evictions(self) -> int:
        """Sequences and means that were given up for room."""
        return self.steward.evictions + self.dormant.evictions

    @property
    def bytes_used(self) -> int:
        """Bytes of used blocks, views included."""
        with self.lock:
            self._catch_up()
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
            self._catch_up()
            total = dict.fromkeys(KINDS, 0)
            for pool in self.pools.values():
                for kind, size in Survey(pool, self._on(pool)).bytes_by_kind().items():
                    total[kind] += size
            return total | {"private": sum(pool.bytes_private for pool in self.pools.values())}

    @property
    def num_segments(self) -> int:
        """Stored segments."""
        with self.lock:
            self._catch_up()
            return sum(len(shelf.segments) for shelf in self.shelves.values())

    def expired_of(self, scope: Scope) -> int:
        """Segments of a session that were given up for their age, since it was opened."""
        with self.lock:
            self._catch_up()
            session = self.sessions.get(scope)
            return 0 if session is None else session.expired

    def total_of(self, scope: Scope, read: Callable[[Shelf], int]) -> int:
        """Sum of what `read` gives of each shelf of a scope, while nothing changes on them."""
        with self.lock:
            self._catch_up()
            return sum(read(shelf) for key, shelf in self.shelves.items() if key[1].scope == scope)

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

    @changes
    def _catch_up(self) -> None:
        """Let go of what has expired, and of the views that their callers have dropped."""
        if self.unsure:
            self.mend()
        self._release_orphans()
        self.expire()
        self.dormant.drop_damaged(self)

    def _release_orphans(self) -> None:
        freed = set()
        while (lease := self.leases.next_orphan()) is not None:
            extents = lease.extents
            lease.end()
            for extent in extents:
                lease.pool.release(extent)
            freed.add(lease.pool)
        for pool in freed:
            self._tidy(pool)

    def _on(self, pool: BlockPool) -> list[Shelf]:
        """The shelves on a pool."""
        return [shelf for shelf in self.shelves.values() if shelf.pool is pool]

    def _tidy(self, pool: BlockPool) -> None:
        """What a call has left is tidied up, and what lies in files and is used again comes into memory."""
        try:
            self.dormant.promote(pool)
            self.steward.tidy(pool, self.config.compact_waste)
        except Exception:  # nothing that a call needs
            logger.warning("tidying up a store failed", exc_info=True)
            self.mend()

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
            inside = inside and not (old.busy or old.pinned)
            if inside and np.array_equal(old.ids, sequence.ids[: len(old.ids)]):
                # what replaces these rows says the same
                self.usage.give_up(shelf, [each for each in old.recipe.segments if each.references == 1])
                shelf.remove(old)
        return before - len(shelf.sequences)

    def _learn(self, shelf: Shelf, draft: Draft, frequencies) -> None:
        """Draw the draft's own rows into the means of their texts."""
        rows = np.arange(len(draft.ids))
        hops = np.where(rows < draft.exact, 0, draft.hops)
        addresses = draft.extent.addresses(draft.row, draft.pad + rows)
        learn(shelf, Computed(draft.ids, draft.served.which < 0, hops, addresses), frequencies, self.clock())

    def _demote_old(self) -> None:
        """Keep the extents of the newest conversations; pack the rows of the others."""
        demote_old(list(self.shelves.values()), self.config.keep_conversations, self._uncontinued)


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
