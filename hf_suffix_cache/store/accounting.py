"""What a pool's rows are there for: which segment or kept extent explains each of them, and what nothing explains."""

from collections.abc import Sequence as Collection

import numpy as np

from .pool import SLAB_BITS, BlockPool, Slab
from .segments import EXACT, Segment
from .shelf import Shelf

NOTHING, EXACT_ROW, DERIVED_ROW, MEAN_ROW, EXTENT_ROW = range(5)
KINDS = ("exact", "derived", "means", "extents", "views", "waste")


class Layout:
    """
    The rows of one slab.

    Args:
        slab (`Slab`): The slab.
        kinds (`np.ndarray` of int8, `[rows]`): What each row is there for.
        explained (`np.ndarray` of int32, `[blocks]`): References that segments and kept extents account for.
        fixed (`np.ndarray` of bool, `[blocks]`): Blocks that must stay where they are: a running call's view lies over
            them, or they belong to a kept extent, which goes on growing in place. Segments that a call was planned
            with may move: it looks up where they are under the store's lock.
    """

    def __init__(self, slab: Slab):
        self.slab = slab
        self.kinds = np.zeros(slab.rows, dtype=np.int8)
        self.explained = np.zeros_like(slab.references)
        self.fixed = np.zeros(len(slab.references), dtype=bool)

    @property
    def used(self) -> np.ndarray:
        """Blocks that something refers to: bool `[blocks]`."""
        return self.slab.references > 0

    @property
    def filled(self) -> np.ndarray:
        """Rows of each block that are there for something: `[blocks]`."""
        return np.count_nonzero(self.kinds.reshape(-1, self.slab.block_size), axis=1)

    @property
    def viewed(self) -> np.ndarray:
        """Blocks that running calls refer to: bool `[blocks]`."""
        return self.slab.references > self.explained

    def rows_by_kind(self) -> np.ndarray:
        """Number of rows of each of `KINDS`. They add up to the rows of the used blocks."""
        size = self.slab.block_size
        counts = np.bincount(self.kinds, minlength=5)
        nothing = (self.kinds == NOTHING).reshape(-1, size)
        views, waste = nothing[self.viewed].sum(), nothing[self.used & ~self.viewed].sum()
        return np.array([*counts[1:], views, waste])


class Survey:
    """
    All rows of a pool at one moment. The store's lock must be held while it is used.

    Args:
        pool (`BlockPool`): The pool.
        shelves (sequence of `Shelf`): All shelves on it.

    Attributes:
        segments (`list[Segment]`): All segments.
        owner (`np.ndarray` of int64, `[rows]`): Number of the segment of each stored row, in order.
        addresses (`np.ndarray` of int64, `[rows]`): Where it lies.
        layouts (`dict`): `Layout` by slab number.
    """

    def __init__(self, pool: BlockPool, shelves: Collection[Shelf]):
        self.pool = pool
        self.segments: list[Segment] = [segment for shelf in shelves for segment in shelf.segments]
        self.extents = [sequence.extent for shelf in shelves for sequence in shelf.kept]
        lengths = [len(segment) for segment in self.segments]
        self.owner = np.repeat(np.arange(len(lengths)), lengths)
        self.addresses = _joined([segment.addresses for segment in self.segments])
        self._kinds = np.array([_kind(segment) for segment in self.segments], dtype=np.int8)
        self.survey()

    def survey(self) -> None:
        """Make the layouts from where the rows lie now."""
        size = self.pool.block_size
        self.layouts = {number: Layout(slab) for number, slab in self.pool.slabs.items()}
        number, row = self.addresses >> SLAB_BITS, self.addresses & ((1 << SLAB_BITS) - 1)
        for layout in self.layouts.values():
            inside = np.flatnonzero(number == layout.slab.number)
            rows, owner = row[inside], self.owner[inside]
            layout.kinds[rows] = self._kinds[owner]
            blocks = np.unique(owner * len(layout.explained) + rows // size) % max(1, len(layout.explained))
            layout.explained += np.bincount(blocks, minlength=len(layout.explained)).astype(np.int32)
        for extent in self.extents:
            layout, rows = self.layouts[extent.slab.number], slice(extent.start, extent.start + extent.rows)
            kinds = layout.kinds[rows]
            kinds[kinds == NOTHING] = EXTENT_ROW
            blocks = slice(rows.start // size, rows.stop // size)
            layout.explained[blocks] += 1
            layout.fixed[blocks] = True
        for layout in self.layouts.values():
            layout.fixed |= layout.viewed

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of the used blocks by what their rows are there for."""
        total = np.zeros(len(KINDS), dtype=np.int64)
        for layout in self.layouts.values():
            total += layout.rows_by_kind() * layout.slab.row_bytes
        return dict(zip(KINDS, total.tolist(), strict=True))

    def rows_in(self, slab: Slab, blocks: np.ndarray) -> np.ndarray:
        """Which stored rows lie in these blocks (bool `[blocks]`) of a slab: indices into `addresses`, ascending."""
        found = np.flatnonzero(self.addresses >> SLAB_BITS == slab.number)
        rows = self.addresses[found] & ((1 << SLAB_BITS) - 1)
        return found[blocks[rows // self.pool.block_size]]

    def move(self, picked: np.ndarray, addresses: np.ndarray) -> None:
        """Move stored rows, `picked` of `self.addresses`, to free rows of slabs of the same temperature."""
        pool, old = self.pool, self.addresses[picked]
        for source, rows, index in pool.by_slab(old):
            for target, here, part in pool.by_slab(addresses[index]):
                target.copy_from(source, rows[part], here)
        self.addresses[picked] = addresses
        borders = np.searchsorted(self.owner, np.arange(len(self.segments) + 1))
        touched = [self.segments[number] for number in np.unique(self.owner[picked]).tolist()]
        before = [segment.addresses for segment in touched]
        for number, segment in zip(np.unique(self.owner[picked]).tolist(), touched, strict=True):
            segment.addresses = self.addresses[borders[number] : borders[number + 1]].copy()
            pool.retain_rows(segment.addresses)
        for rows in before:  # last, for rows that are released are free, and filled with NaN in debug mode
            pool.release_rows(rows)
        self.survey()


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _kind(segment: Segment) -> int:
    if segment.is_mean:
        return MEAN_ROW
    return EXACT_ROW if segment.state == EXACT else DERIVED_ROW
