"""A store at one moment, as it is saved while calls go on."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from .contents import Shelved
from .files import Folder
from .layout import COLD, Piece, geometry_of
from .mapped import StoredRows
from .pool import BlockPool
from .records import MAX_AMOUNT, MAX_HOPS, SegmentRecord, SessionRecord
from .scopes import Place, Scope
from .segments import Segment
from .shelf import Shelf


@dataclass(eq=False)
class Entry:
    """A segment's record, complete but for where its rows lie, and the rows that each context of a mean gave."""

    record: SegmentRecord
    masks: list[np.ndarray]


@dataclass(eq=False)
class Part:
    """A shelf, live or waiting (without a pool)."""

    shelved: Shelved
    entries: dict[Segment, Entry]
    pool: BlockPool | None = None


class Snapshot:
    """
    A store at one moment. What may change later is copied; rows are pinned, so that they stay until they are written:
    they are not given up, not converted, and means that are pinned are not drawn into.

    Args:
        store (`Store`): Which one.
        shared_in (`Folder`, *optional*): Take only what is shared, and of the rest what lies in this folder.
    """

    def __init__(self, store, shared_in: Folder | None = None):
        self._store = store
        self._shared_in = shared_in
        self._pinned: dict[Segment, Shelf] = {}
        self._lease = store.leases.new()
        self._lease.plans.append(self)
        self.parts: list[Part] = []
        self.now = 0.0
        self.untold = 0

    def __enter__(self) -> "Snapshot":
        try:
            self._fill()
        except BaseException:
            self.__exit__(BaseException)
            raise
        return self

    def __exit__(self, error=None, *rest) -> None:
        with self._store.lock:
            if error is not None:  # whatever it came in the middle of
                self._store.unsure, self._pinned = True, {}
            for segment, shelf in self._pinned.items():
                shelf.unpin([segment])
            self._pinned = {}

    @property
    def segments(self) -> list[Segment]:
        """What it has pinned."""
        return list(self._pinned)

    def source(self, part: Part, segment: Segment) -> Callable[[list[Piece]], list[torch.Tensor]] | None:
        """What gives the rows of a segment, tensor by tensor, and lets it go: None of one that lies in a file."""
        if part.pool is None or part.pool.is_mapped(segment.addresses):
            return None

        def read(pieces) -> list[torch.Tensor]:
            with self._store.lock:
                found = [gathered(part.pool, segment, piece) for piece in pieces]
                self._pinned.pop(segment).unpin([segment])
            return found

        return read

    def _fill(self) -> None:
        store = self._store
        with store.lock:
            store.expire()
            store.dormant.drop_damaged(store)
            self.now = store.clock()
            for (identity, place), shelf in store.shelves.items():
                settings, geometry = getattr(identity, "portable", None), geometry_of(shelf.pool.shapes)
                if settings is None or geometry is None:
                    self.untold += len(shelf.segments)
                    continue
                made = Shelved(identity.digest, settings, place, geometry, self._session(place.scope))
                held = (each for each in shelf.segments if each.holders and self._takes(place, each))
                made.segments = dict(enumerate(held))
                made.findable = {each for each in made.segments.values() if each in shelf.windows}
                made.means = [mean for mean in shelf.means if self._takes(place, mean)]
                made.sequences = [copy.copy(sequence) for sequence in shelf.sequences]
                made.stored = {segment: self._unchanged(shelf.pool, segment) for segment in made.segments.values()}
                self._take(made, shelf.pool)
                for segment in made.segments.values():
                    shelf.pin([segment])
                    self._pinned[segment] = shelf
            for made in store.dormant.shelved(self.now):
                made.session = self._session(made.place.scope, made.session)
                if all(self._takes(made.place, segment, stored) for segment, stored in made.stored.items()):
                    self._take(made)

    def _session(self, scope: Scope, saved: SessionRecord | None = None) -> SessionRecord | None:
        """What is known of a session now; what was `saved` of it, if it has not been met since then."""
        session = self._store.sessions.get(scope)
        if session is None:
            return saved
        left = [] if session.cutoff == -math.inf else [amount(self.now - session.cutoff)]
        left += [] if saved is None or saved.left_topic is None else [saved.left_topic]
        return SessionRecord(None if session.ttl == math.inf else session.ttl, min(left, default=None))

    def _takes(self, place: Place, segment: Segment, stored: StoredRows | None = None) -> bool:
        """Whether a segment is to be saved."""
        if self._shared_in is None or place.scope.kind == "shared":
            return True
        stored = self._store.dormant.stored.get(segment, stored)
        return stored is not None and stored.file is not None and stored.file.folder == self._shared_in

    def _take(self, made: Shelved, pool: BlockPool | None = None) -> None:
        if not made.segments:
            return
        entries = {}
        for segment in made.segments.values():
            if pool is None or pool.is_mapped(segment.addresses):
                cold = made.stored[segment].cold
            else:
                cold = COLD.get(pool.by_slab(segment.addresses[:1])[0][0].cold)
            entry = entries[segment] = _entry(segment, segment in made.findable, cold, self.now)
            entry.record.recent = amount(self._store.usage.recent(segment)[0])
        self.parts.append(Part(made, entries, pool))

    def _unchanged(self, pool: BlockPool, segment: Segment) -> StoredRows | None:
        """Where the rows of a segment lie in a file, if they are the same ones still."""
        stored = self._store.dormant.stored.get(segment)
        if stored is None or pool.is_mapped(segment.addresses):
            return stored
        cold = COLD.get(pool.by_slab(segment.addresses[:1])[0][0].cold)
        return None if segment.is_mean or cold != stored.cold else stored


def _entry(segment: Segment, findable: bool, cold: str | None, now: float) -> Entry:
    contexts = {} if segment.copies is None else segment.copies.contexts
    record = SegmentRecord(
        text=0,
        length=len(segment.context),
        rows=len(segment),
        state=segment.state,
        hops=min(int(segment.hops), MAX_HOPS),
        unused=amount(now - segment.last_used),
        age=amount(now - segment.created),
        findable=findable,
        distances=0 if segment.reach is None else segment.reach.shape[1],
        contexts=[context.hex() for context in contexts],
        shared_left=0 if segment.copies is None else int(segment.copies.shared_left),
        cold=cold,
        file=0,
        offset=0,
        checksum="",
        uses=amount(segment.uses.total),
        recent=0.0,
    )
    return Entry(record, list(contexts.values()))


def amount(value: float) -> float:
    """A number of seconds, or of nats, as it is written."""
    return min(max(0.0, float(value)), MAX_AMOUNT)


def gathered(pool: BlockPool, segment: Segment, piece: Piece) -> torch.Tensor:
    """One tensor of a segment, in the host's memory."""
    shape = list(pool.groups)[piece.group]
    parts = pool.by_slab(segment.addresses)
    whole = torch.empty(piece.shape, dtype=piece.dtype)
    for slab, rows, index in parts:
        kept = getattr(slab, piece.slot)[shape]
        taken = kept.index_select(2, torch.from_numpy(rows).to(kept.device)).cpu()
        if len(parts) == 1:
            return taken
        whole.index_copy_(2, torch.from_numpy(index), taken)
    return whole
