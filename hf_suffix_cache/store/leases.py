"""What running calls hold of a store, so that what nobody holds any more can be told from it."""

import weakref
from collections import deque
from dataclasses import dataclass, field

from .pool import BlockPool, Extent
from .shelf import Recipe, Sequence


@dataclass(eq=False)
class Lease:
    """
    What one call holds. It is kept so that each reference of the call is in it whenever the store's lock is free.

    Args:
        pool (`BlockPool`, *optional*): Where its extents lie.

    Attributes:
        extents (`list[Extent]`): Extents of its view: the newest one, and those that it is about to leave.
        plans (`list`): Recipes, or whatever else has `segments`, each of which is pinned once.
        adopted (`Sequence`, *optional*): The stored conversation that it goes on with in place.
    """

    pool: BlockPool | None = None
    extents: list[Extent] = field(default_factory=list)
    plans: list[Recipe] = field(default_factory=list)
    adopted: Sequence | None = None

    def end(self) -> None:
        """It holds nothing any more, whatever of its references is left."""
        self.extents, self.plans, self.adopted = [], [], None


class Leases:
    """All leases of a store."""

    def __init__(self):
        self._alive: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._orphans: deque[Lease] = deque()

    def new(self, pool: BlockPool | None = None) -> Lease:
        """A lease that holds nothing yet."""
        lease = Lease(pool)
        self._alive.add(lease)
        return lease

    def leave(self, lease: Lease) -> None:
        """
        The view of a lease is gone. Finalizers call this, which must not touch the store while another frame of the
        thread works on it: the lease waits.
        """
        if lease.extents:
            self._orphans.append(lease)

    def next_orphan(self) -> Lease | None:
        """A lease whose view is gone, to be given back; None if there is none."""
        return self._orphans.popleft() if self._orphans else None

    def held(self) -> list[Lease]:
        """All that count, those whose view is gone but which were not given back included."""
        return list(dict.fromkeys([*self._alive, *list(self._orphans)]))
