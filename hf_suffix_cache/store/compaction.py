"""Moving stored rows together, so that free blocks form long ranges again."""

from typing import NamedTuple

import numpy as np

from .pool import SLAB_BITS, BlockPool, Slab
from .segments import Segment
from .shelf import Sequence, Shelf


class CompactionResult(NamedTuple):
    """What a compaction did."""

    bytes_moved: int
    blocks_freed: int

    def __add__(self, other):
        return CompactionResult(self.bytes_moved + other.bytes_moved, self.blocks_freed + other.blocks_freed)


def compact_pool(pool: BlockPool, shelves: list[Shelf]) -> CompactionResult:
    """Pack each slab towards its front. A slab in which a running call holds rows is left as it is."""
    segments = [segment for shelf in shelves for segment in shelf.segments]
    sequences = [sequence for shelf in shelves for sequence in shelf.sequences if sequence.extent is not None]
    total = CompactionResult(0, 0)
    for slab in pool.slabs.values():
        inside = [segment for segment in segments if segment.addresses[0] >> SLAB_BITS == slab.number]
        kept = [sequence for sequence in sequences if sequence.extent.slab is slab]
        explained = count_references(slab, inside, kept)
        if np.array_equal(explained, slab.references):
            total += _compact_slab(pool, slab, inside, kept)
    return total


def count_references(slab: Slab, segments: list[Segment], sequences: list[Sequence]) -> np.ndarray:
    """References per block that these segments and kept extents account for."""
    references = np.zeros_like(slab.references)
    for segment in segments:
        references[np.unique(rows_of(segment) // slab.block_size)] += 1
    for sequence in sequences:
        first = sequence.extent.start // slab.block_size
        references[first : first + sequence.extent.rows // slab.block_size] += 1
    return references


def rows_of(segment: Segment) -> np.ndarray:
    """Rows of a segment within its slab."""
    return segment.addresses & ((1 << SLAB_BITS) - 1)


def _compact_slab(pool: BlockPool, slab: Slab, segments: list[Segment], sequences: list[Sequence]) -> CompactionResult:
    size, used_before = slab.block_size, int(np.count_nonzero(slab.references))
    units = []  # (first row, rows in order, segments, sequence or None)
    loose = set(segments)
    for sequence in sequences:
        start, stop = sequence.extent.start, sequence.extent.start + sequence.extent.rows
        members = [s for s in segments if start <= rows_of(s).min() and rows_of(s).max() < stop]
        loose -= set(members)
        units.append((start, np.arange(start, stop), members, sequence))
    units += [(int(rows_of(segment).min()), rows_of(segment), [segment], None) for segment in loose]
    cursor = moved = 0
    for _, rows, members, sequence in sorted(units, key=lambda unit: unit[0]):
        if sequence is not None:
            # a kept extent goes on growing in place, so it owns its blocks from border to border
            cursor = -(-cursor // size) * size
        moved += _move(slab, rows, cursor)
        for segment in members:
            order = np.searchsorted(rows, rows_of(segment)) if sequence is not None else np.arange(len(rows))
            segment.addresses = (slab.number << SLAB_BITS) + cursor + order
        cursor += len(rows)
        if sequence is not None:
            extent = sequence.extent
            sequence.extent = type(extent)(slab, cursor - len(rows), extent.rows)
    slab.references[:] = count_references(slab, segments, sequences)
    if pool.poison:
        for first, last in slab.free_ranges():
            slab.fill(first * size, last * size, float("nan"))
    return CompactionResult(moved * pool.row_bytes, used_before - int(np.count_nonzero(slab.references)))


def _move(slab: Slab, rows: np.ndarray, cursor: int) -> int:
    """Copy rows to [cursor, cursor + len(rows)), which never lies behind the rows still to come."""
    if rows[0] == cursor and len(rows) == rows[-1] - rows[0] + 1:
        return 0
    for tensor in (*slab.keys.values(), *slab.values.values()):
        # advanced indexing copies first, so source and target may overlap
        tensor[:, :, cursor : cursor + len(rows)] = tensor[:, :, rows.tolist()]
    return len(rows)
