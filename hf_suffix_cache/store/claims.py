"""Who refers to which rows of a segment, and how a segment shrinks to those that somebody still needs."""

from collections import Counter
from collections.abc import Collection

import numpy as np

from .pool import SLAB_BITS
from .segments import Segment
from .shelf import Recipe, Sequence, Shelf


class Claims:
    """
    Rows of segments by how many stored sequences, and plans of the call at hand, refer to them.

    Args:
        shelves (sequence of `Shelf`): All shelves of the store: those of sessions refer to shared segments.
        plans (sequence of `Recipe`): What the call at hand is served. Their segments are pinned, once for each.
        only (set of `Segment`, *optional*): Count these alone.
    """

    def __init__(
        self, shelves: Collection[Shelf], plans: Collection[Recipe] = (), only: Collection[Segment] | None = None
    ):
        self.shelves = shelves
        self.plans = plans
        self._pins = Counter(segment for plan in plans for segment in plan.segments)
        self._counts: dict[Segment, np.ndarray] = {}
        stored = (sequence.recipe for shelf in shelves for sequence in shelf.sequences)
        for recipe in (*stored, *plans):
            for number, segment in enumerate(recipe.segments):
                wanted = segment.references > 1 or self._pins[segment] if only is None else segment in only
                if wanted and self.may_shrink(segment):
                    if segment not in self._counts:
                        self._counts[segment] = np.zeros(len(segment), dtype=np.int32)
                    self._counts[segment] += recipe.used(number)

    def may_shrink(self, segment: Segment) -> bool:
        """
        Whether rows of it may go alone: all who refer to it are known here. What other running calls are planned with
        stays whole, and so do means, and what lies in a file, where it takes no memory.
        """
        home = None if segment.home is None else segment.home()
        if home is None or segment.is_mean or home.pool.is_mapped(segment.addresses):
            return False
        return segment.references - segment.holders == self._pins[segment]

    def freed(self, shelf: Shelf, sequence: Sequence) -> list[tuple[Segment, int]]:
        """What is free once a sequence is gone: of each of its segments so many rows. See `shrink`."""
        found = []
        for number, segment in enumerate(sequence.recipe.segments):
            if segment.references == 1 and not shelf.pool.is_mapped(segment.addresses):
                found.append((segment, len(segment)))
            elif segment in self._counts:
                rows = int(np.count_nonzero(self._counts[segment] <= sequence.recipe.used(number)))
                found += [(segment, rows)] if rows >= shelf.pool.block_size else []
        return found

    def needed(self, recipes: Collection[Recipe]) -> int:
        """Bytes of the rows in memory that these recipes refer to, and of all that others are planned with."""
        kept: dict[Segment, np.ndarray] = {}
        whole = (each for shelf in self.shelves for each in shelf.segments)
        for segment in whole:
            if segment.references - segment.holders > self._pins[segment]:
                kept[segment] = np.ones(len(segment), dtype=bool)
        for recipe in recipes:
            for number, segment in enumerate(recipe.segments):
                used = recipe.used(number) if self.may_shrink(segment) else np.ones(len(segment), dtype=bool)
                kept[segment] = kept[segment] | used if segment in kept else used
        return sum(int(np.count_nonzero(rows)) * row_bytes(segment) for segment, rows in kept.items())

    def shrink(self, segment: Segment) -> int:
        """
        Let go of the rows that nobody refers to: what is left is a segment of its own, which takes its place. Returns
        how many rows went; fewer than a block are left where they are.
        """
        if segment not in self._counts:
            return 0
        home, rows = segment.home(), np.flatnonzero(self._counts[segment])
        if len(segment) - len(rows) < home.pool.block_size:
            return 0
        part, findable = home.part_of(segment, rows), segment in home.windows
        for shelf in self.shelves:
            for sequence in [each for each in shelf.sequences if segment in each.recipe.segments]:
                shelf.put_in_place(sequence, segment, part, rows)
        for plan in self.plans:
            if segment in plan.segments:
                home.pin([part])
                plan.take(plan.with_part(segment, part, rows))
                home.unpin([segment])
        assert segment.references == 0, "somebody who is not known here refers to a segment"
        if findable:
            home.make_findable(part)
        return len(segment) - len(rows)


def row_bytes(segment: Segment) -> int:
    """Bytes of memory that one of a segment's rows takes: none in a file."""
    home = None if segment.home is None else segment.home()
    if home is None or home.pool.is_mapped(segment.addresses):
        return 0
    return home.pool.slabs[int(segment.addresses[0]) >> SLAB_BITS].row_bytes
