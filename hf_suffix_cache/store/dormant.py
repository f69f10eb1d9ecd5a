"""
What was loaded and waits for its model, and what lies in files while it is used.

Loading reads no row. A shelf is filled when a model of its identity asks for it first; its rows are read from their
file when they are served first, and brought into the pool when they are served again and there is room. Where memory
is short they go back to their file.
"""

import logging
import weakref
from collections.abc import Iterable

import numpy as np

from .contents import Contents, Shelved, without
from .host import HostMemory, HostRows
from .layout import COLD, RowLayout, geometry_of
from .mapped import MappedSlab, StoredRows
from .pool import BlockPool
from .readahead import is_slow
from .room import pack
from .scopes import Place, Scope
from .segments import Segment
from .shelf import Sequence, Shelf

logger = logging.getLogger("hf_suffix_cache")

PROMOTED_ROWS = 2048  # after one call, at most: 94 MB of SmolLM2-135M in fp32, 15 ms
USES = 2  # of rows in a file, from which on they are worth memory


class Dormant:
    """
    The part of a store that lies in files, and in the host's memory where the pools are elsewhere. The store's lock is
    held by its callers.

    Args:
        host (`HostMemory`, *optional*): Where rows go that are given up and lie in no file; by default nowhere.
        shelves (`dict`, *optional*): The store's.

    Attributes:
        stored (weak dict): Where the rows of a segment lie in a file, of those that were loaded or saved.
        folders (`dict`): Checksum of the index of each folder (by its `key`) that was loaded from or saved to, as it
            was then.
    """

    def __init__(self, host: HostMemory | None = None, shelves: dict | None = None):
        self.host = HostMemory(0) if host is None else host
        self.evictions = 0
        self._shelves = {} if shelves is None else shelves
        self.stored: weakref.WeakKeyDictionary[Segment, StoredRows] = weakref.WeakKeyDictionary()
        self.folders: dict[str, str] = {}
        self._contents: Contents | None = None
        self._waiting: dict[tuple[str, str, Place], list[int]] = {}  # which shelves of the contents
        self._digests: set[str] = set()
        self._awake: dict[int, weakref.ref[Segment]] = {}
        self._read: weakref.WeakSet[MappedSlab] = weakref.WeakSet()  # since they were last counted
        self._damaged: weakref.WeakSet[MappedSlab] = weakref.WeakSet()

    def __len__(self) -> int:
        """Number of shelves that wait for their model."""
        return sum(map(len, self._waiting.values()))

    def take(self, contents: Contents) -> None:
        """Wait for the models of what was loaded."""
        self._contents = contents
        for number, shelf in enumerate(contents.shelves):
            self._waiting.setdefault((shelf.digest, shelf.settings, shelf.place), []).append(number)
        self._digests = {shelf.digest for shelf in contents.shelves}

    def wake(self, store, identity, place: Place, shapes) -> None:
        """
        Fill the store's shelves of this identity and place, and the shared one beside, with what waits for them. It
        raises nothing: what can't be woken is forgotten, with a warning.
        """
        if not self._waiting or getattr(identity, "digest", None) not in self._digests:
            return
        contents = self._contents
        for each in (place.beside, place):  # what is shared first: sessions refer to it
            key = (identity.digest, identity.portable, each)
            if key not in self._waiting or contents.shelves[self._waiting[key][0]].geometry != geometry_of(shapes):
                continue
            for number in list(self._waiting[key]):
                try:
                    self._wake(contents, store, identity, shapes, number)
                except Exception:
                    logger.warning("saved rows of a model can't be used: they are forgotten", exc_info=True)
                    store.forget(identity)
        if not self._waiting:
            self._contents = None

    def wake_scope(self, store, identity, scope: Scope, shapes) -> None:
        """Wake all that waits for an identity in a scope, whatever conditions its rows were computed under."""
        for digest, settings, place in list(self._waiting):
            if (digest, settings, place.scope) == (identity.digest, identity.portable, scope):
                self.wake(store, identity, place, shapes)

    def clear(self, scope: Scope | None = None) -> None:
        """Forget what waits, of one scope or all. The files stay until the next `save` to their folder."""
        self._waiting = {key: each for key, each in self._waiting.items() if scope not in (None, key[2].scope)}

    def age(self, scope: Scope, now: float, ttl: float | None) -> None:
        """A session lived for `ttl` seconds until now: of what waits for it, what is older has expired."""
        if self._contents is not None and ttl is not None:
            last_used = now - ttl
            self._contents.dead[scope] = max(last_used, self._contents.dead.get(scope, last_used))

    def shelved(self, now: float) -> list[Shelved]:
        """What waits, as it would be woken now, to be saved again."""
        built: dict[int, Segment] = {}
        made = []

        def find(number: int) -> Segment | None:
            return built.get(number) or self._find(number)

        # what is shared first: sessions refer to it
        for key in sorted(self._waiting, key=lambda key: key[2].beside is not None):
            for number in self._waiting[key]:
                made.append(self._contents.build(number, now, find))
                built.update(made[-1].segments)
        return made

    def promote(self, pool: BlockPool) -> None:
        """Count which mapped rows of a pool were served since the last time; bring into memory what is used again."""
        rows = 0
        for slab in [slab for slab in self._read if pool.mapped.get(slab.number) is slab]:
            segment = slab.segment()
            if segment is None or segment.references > segment.holders:  # a call that uses it goes on
                continue
            self._read.discard(slab)
            slab.uses += 1
            if slab.uses < USES or slab.damage is not None or rows >= PROMOTED_ROWS:
                continue
            home = None if segment.home is None else segment.home()
            if home is not None and pack(pool, [segment], slab.cold):
                rows += len(segment)
                home.came_in(segment, slab.cold is None)
            self._read.discard(slab)  # packing has read it

    def is_slow(self, segment: Segment, rows: int, row_seconds: float | None) -> bool:
        """Whether so many rows of a segment in a file are computed sooner than they are read; see `readahead.py`."""
        stored = self.stored.get(segment)
        return stored is not None and is_slow(stored, rows, row_seconds)

    def in_files(self, pool: BlockPool, segments: Iterable[Segment]) -> list[StoredRows]:
        """Where those of these segments lie that are in files."""
        return [self.stored[each] for each in segments if each in self.stored and pool.is_mapped(each.addresses)]

    def put_back(self, shelf: Shelf, sequence: Sequence) -> bool:
        """
        Let go of the memory of a sequence's rows, instead of giving it up, where they lie in files as well, or find
        room in the host's memory: they are served from there. False if there are none.
        """
        if sequence not in shelf.sequences:
            return True  # it went for another one's sake
        pool, done = shelf.pool, False
        for segment in sequence.recipe.segments:
            home = None if segment.home is None else segment.home()
            if home is None or pool.is_mapped(segment.addresses) or segment.is_mean:
                continue  # means go on changing
            cold = COLD.get(pool.by_slab(segment.addresses[:1])[0][0].cold)
            if segment.references > segment.holders:
                continue
            stored = self.stored.get(segment)
            if stored is None or stored.cold != cold or not stored.is_there():
                stored = self._to_host(pool, segment, cold)
            if stored is None:
                continue
            old = segment.addresses
            home.went_out(segment)
            segment.addresses = self._map(pool, segment, stored)
            pool.release_rows(old)
            done = True
        return done

    def drop_damaged(self, store) -> None:
        """Forget rows in files that turned out to be damaged, and what can't be without them."""
        for slab in list(self._damaged):
            segment = slab.segment()
            if segment is None or self._drop(store.shelves.values(), segment):
                self._damaged.discard(slab)
                logger.warning("saved rows are forgotten: %s", slab.damage)

    # -- inside -------------------------------------------------------------------------------------------------

    def _wake(self, contents: Contents, store, identity, shapes, number: int) -> None:
        """Fill the live shelf that a saved one belongs to; nothing is done for one that has been woken."""
        record, now = contents.shelves[number], store.clock()
        key = (record.digest, record.settings, record.place)
        if number not in self._waiting.get(key, ()):
            return  # making its shelf has woken it
        self._waiting[key].remove(number)
        if not self._waiting[key]:
            del self._waiting[key]
        made = contents.build(number, now, self._find)
        if made.faults:
            logger.warning("%d parts of a saved shelf are damaged and skipped: %s", len(made.faults), made.faults[0])
        if made.session is not None and store.sessions.get(record.place.scope) is None:
            store.open_session(record.place.scope, made.session.ttl)
        shelf = store.shelf(identity, record.place, shapes)
        try:
            for segment in made.segments.values():
                segment.uses.at = store.usage.work
            self._fill(shelf, made)
            for other in contents.bound.get(number, ()):
                self._wake(contents, store, identity, shapes, other)
        finally:
            shelf.unpin(list(made.segments.values()))  # what nothing refers to goes
        session = store.sessions.get(record.place.scope)
        if session is not None and made.session is not None and made.session.left_topic is not None:
            session.cutoff = max(session.cutoff, now - made.session.left_topic)

    def _fill(self, shelf: Shelf, made: Shelved) -> None:
        """Bring what was made of a saved shelf to a live one; its segments stay pinned."""
        shelf.pin(list(made.segments.values()))
        for number, segment in made.segments.items():
            segment.addresses = self._map(shelf.pool, segment, made.stored[segment])
            self._awake[number] = weakref.ref(segment)
            shelf.bring_back(segment, segment in made.findable)
        for sequence in made.sequences:
            shelf.add(sequence)
        for mean in made.means:
            shelf.add_mean(mean)

    def _map(self, pool: BlockPool, segment: Segment, stored: StoredRows) -> np.ndarray:
        """Addresses of a segment's rows in its file, `[rows]`, with a reference for it."""
        self.stored[segment] = stored
        layout = RowLayout(geometry_of(pool.shapes), stored.cold)
        return pool.attach(MappedSlab(segment, stored, layout, list(pool.groups), pool.block_size, self._note))

    def _to_host(self, pool: BlockPool, segment: Segment, cold: str | None) -> HostRows | None:
        """A copy of a segment's rows in the host's memory, for which older ones go; None without room."""
        geometry, limit = geometry_of(pool.shapes), self.host.limit(pool)
        if geometry is None or not limit:
            return None
        layout = RowLayout(geometry, cold)
        if layout.size(len(segment)) > limit:
            return None
        while self.host.taken + layout.size(len(segment)) > limit:
            if not self._forget_oldest(segment):
                return None
        return HostRows(self.host, pool, segment, layout, cold)

    def _forget_oldest(self, spared: Segment) -> bool:
        """Let go of the rows in the host's memory that were used longest ago; False if all are needed."""
        found = [each for each, stored in list(self.stored.items()) if isinstance(stored, HostRows)]
        for segment in sorted((each for each in found if each is not spared), key=lambda each: each.last_used):
            home = None if segment.home is None else segment.home()
            if home is None or not home.pool.is_mapped(segment.addresses):
                del self.stored[segment]  # they are in the pool as well, or nowhere
                return True
            users = [each for shelf in self._shelves.values() for each in shelf.sequences]
            users = [each for each in users if segment in each.recipe.segments]
            if segment.references > segment.holders or any(each.busy or each.pinned for each in users):
                continue
            if self._drop(self._shelves.values(), segment):
                self.stored.pop(segment, None)
                self.evictions += 1
                home.count_eviction()
                return True
        return False

    def _find(self, number: int) -> Segment | None:
        """A segment of a shelf that was woken before, if it is still there."""
        segment = self._awake[number]() if number in self._awake else None
        home = None if segment is None or segment.home is None else segment.home()
        return segment if home is not None and segment in home.segments else None

    def _note(self, slab: MappedSlab) -> None:
        (self._read if slab.damage is None else self._damaged).add(slab)

    def _drop(self, shelves: Iterable[Shelf], segment: Segment) -> bool:
        """Forget a segment; False where a conversation that is going on still refers to it."""
        done = True
        for shelf in shelves:
            for sequence in [each for each in shelf.sequences if segment in each.recipe.segments]:
                if sequence.busy:
                    done = False
                    continue
                head = without(sequence, {segment})
                if head is not None:
                    shelf.add(head)
                shelf.remove(sequence)
            if segment in shelf.means:
                shelf.forget_mean(segment)
        return done
