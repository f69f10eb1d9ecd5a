"""
Puts a store in order that an interrupt, or a fault, has left in the middle of a change.

A KeyboardInterrupt may come between any two steps. What is stored, and what running calls hold (`Lease`), says what
every count and index must be; so they are made anew from that. Changes are ordered so that what is stored is right
between any two steps: rows are written before anything names them, and named elsewhere before they are let go.
"""

import functools
from collections import Counter
from collections.abc import Iterable

import numpy as np

from .cooling import exact_rows
from .leases import Lease
from .pool import BlockPool, Extent
from .segments import DERIVED, EXACT, Segment
from .shelf import Shelf


def changes(method):
    """A method of the store. Where it is broken off, the store is put in order before it is used again."""

    @functools.wraps(method)
    def changing(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self.unsure = True
            raise

    return changing


def mend(store) -> None:
    """Make all counts and indices of a store anew. Its lock is held, and no change of it is under way."""
    leases, shelves = store.leases.held(), list(store.shelves.values())
    for shelf in shelves:
        shelf.drop_halves()
    adopted = {lease.adopted for lease in leases}
    for shelf in shelves:
        for sequence in shelf.sequences:
            sequence.busy = sequence in adopted
    segments = _count(shelves, leases)
    for shelf in shelves:
        _mend_segments(shelf)
    for shelf in shelves:
        for sequence in shelf.sequences:
            exact = exact_rows(sequence)
            if exact < sequence.exact:
                sequence.exact, sequence.hops = exact, max(1, sequence.hops)
        shelf.reindex()
    for pool in store.pools.values():
        held = [extent for lease in leases if lease.pool is pool for extent in lease.extents]
        kept = [sequence.extent for shelf in shelves if shelf.pool is pool for sequence in shelf.kept]
        _mend_blocks(pool, [each for each, of in segments.items() if of is pool], [*held, *kept])
    store.budget.taken = sum(pool.bytes_total for pool in store.pools.values())


def _count(shelves: list[Shelf], leases: list[Lease]) -> dict[Segment, BlockPool]:
    """Count anew who refers to segments; returns those that anybody does, with their pools."""
    held, pinned, pools = Counter(), Counter(), {}
    for shelf in shelves:
        named = [segment for sequence in shelf.sequences for segment in sequence.recipe.segments]
        held.update([*named, *shelf.means])
        pools.update(dict.fromkeys([*named, *shelf.means, *shelf.segments], shelf.pool))
    for lease in leases:
        named = [segment for plan in lease.plans for segment in plan.segments]
        pinned.update(named)
        homes = {segment: segment.home() for segment in named}  # a shelf that was dropped lives as long as its calls
        pools = {**{segment: home.pool for segment, home in homes.items()}, **pools}
    for segment in pools:
        segment.holders, segment.references = held[segment], held[segment] + pinned[segment]
    return {segment: pool for segment, pool in pools.items() if segment.references}


def _mend_segments(shelf: Shelf) -> None:
    """The segments of a shelf are those that anybody refers to; rows in a smaller dtype are not exact."""
    for segment in list(shelf.segments):
        if segment.references == 0:
            del shelf.segments[segment]
    in_memory = [each for each in shelf.segments if not shelf.pool.is_mapped(each.addresses)]
    cold = {each for each in in_memory if shelf.pool.by_slab(each.addresses[:1])[0][0].cold is not None}
    shelf.rows = sum(map(len, in_memory))
    shelf.warm = {each: None for each in in_memory if each in shelf.warm and each not in cold}
    for segment in cold:
        if segment.state == EXACT and not segment.is_mean:
            segment.state, segment.hops = DERIVED, max(1, segment.hops)


def _mend_blocks(pool: BlockPool, segments: Iterable[Segment], extents: Iterable[Extent]) -> None:
    """References of a pool's blocks are those of segments and extents; blocks that nobody refers to are free."""
    slabs = {**pool.slabs, **pool.mapped}
    wanted = {slab: np.zeros_like(slab.references) for slab in slabs.values()}
    for segment in segments:
        for slab, rows, _ in pool.by_slab(segment.addresses):
            wanted[slab][np.unique(rows // pool.block_size)] += 1
    for extent in extents:
        if extent.pooled:
            first = extent.start // pool.block_size
            wanted[extent.slab][first : first + extent.batch * extent.rows // pool.block_size] += 1
    for slab, references in wanted.items():
        slab.references += np.maximum(references - slab.references, 0)
        while (slab.references > references).any():
            pool.release_blocks(slab, np.flatnonzero(slab.references > references))
        if slab.number in pool.mapped and not references.any():
            del pool.mapped[slab.number]
