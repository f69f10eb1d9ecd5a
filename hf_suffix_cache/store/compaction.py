"""Moving stored rows together: blocks that are filled in part are packed, and free blocks form long ranges again."""

from collections.abc import Sequence as Collection
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from ..config import PoolExhausted
from .accounting import Layout, Survey
from .pool import SLAB_BITS, BlockPool
from .shelf import Shelf


class CompactionResult(NamedTuple):
    """What a compaction did."""

    bytes_moved: int
    blocks_freed: int

    def __add__(self, other):
        return CompactionResult(self.bytes_moved + other.bytes_moved, self.blocks_freed + other.blocks_freed)


def compact_pool(pool: BlockPool, shelves: Collection[Shelf], max_rows: int | None = None) -> CompactionResult:
    """
    Pack rows of blocks that are filled in part; without `max_rows`, also bring what is stored to the front of each
    slab, and empty slabs whose rows fit into others.

    Rows under a running call's view stay, and so do kept extents.

    Args:
        pool (`BlockPool`), shelves (sequence of `Shelf`): All shelves on that pool.
        max_rows (`int`, *optional*): Most rows that are moved; the emptiest blocks go first.
    """
    survey = Survey(pool, shelves)
    before, moved = pool.blocks_used, 0
    with suppress(PoolExhausted):  # the device has less memory than the budget: rows stay where they are
        moved += _pack(survey, max_rows)
        if max_rows is None:
            moved += _to_the_front(survey)
            moved += _out_of_small_slabs(survey)
    return CompactionResult(moved, before - pool.blocks_used)


def make_range(pool: BlockPool, shelves: Collection[Shelf], rows: int) -> bool:
    """
    Move stored rows aside so that an extent of `rows` rows can be had: a free range, or a slab less in favour of a
    larger one. False, and next to nothing has been moved, where that can't be.
    """
    try:
        return _make_range(Survey(pool, shelves), rows)
    except PoolExhausted:  # the device has less memory than the budget
        return False


def _make_range(survey: Survey, rows: int) -> bool:
    pool = survey.pool
    blocks = pool.round_up(rows) // pool.block_size
    free, left = _free_rows(pool, None), _new_rows(pool, None)
    if free + _waste_rows(survey) + left < rows:
        return False
    if free + left < rows + pool.block_size:
        _pack(survey, None)
    window = _cheapest_window(survey, blocks)
    if window is not None:
        layout, start = window
        picked = np.zeros(len(layout.fixed), dtype=bool)
        picked[start : start + blocks] = True
        _evacuate(survey, layout, picked)
        return True
    slabs = [layout for layout in survey.layouts.values() if layout.slab.cold is None and not layout.fixed.any()]
    slabs.sort(key=lambda layout: int(layout.used.sum()))
    for number in [layout.slab.number for layout in slabs]:
        layout = survey.layouts.get(number)
        if layout is not None and _fits_elsewhere(survey, layout):
            _evacuate(survey, layout, np.ones_like(layout.used))
            pool.trim()
            survey.survey()
        if pool.budget.left // pool.row_bytes >= pool.round_up(rows):
            return True
    return False


def empty_slabs(pool: BlockPool, shelves: Collection[Shelf]) -> int:
    """Give back slabs whose rows fit into free blocks of others, where that leaves any; returns the bytes."""
    taken = pool.budget.taken
    warm = [slab for slab in pool.slabs.values() if slab.cold is None]
    used = [int(np.count_nonzero(slab.references)) for slab in warm]
    free = [len(slab.references) - count for slab, count in zip(warm, used, strict=True)]
    if any(count <= sum(free) - own for count, own in zip(used, free, strict=True)):
        with suppress(PoolExhausted):
            _out_of_small_slabs(Survey(pool, shelves))
    return taken - pool.budget.taken


def _pack(survey: Survey, max_rows: int | None) -> int:
    """Bring the rows of the emptiest blocks together; bytes moved."""
    pool, moved = survey.pool, 0
    for cold in dict.fromkeys(slab.cold for slab in pool.slabs.values()):
        left = max_rows
        while left is None or left > 0:
            room = _free_rows(pool, cold) + _new_rows(pool, cold)
            chosen = _emptiest(survey, cold, room if left is None else min(room, left))
            if not chosen:
                break
            parts = [survey.rows_in(layout.slab, blocks) for layout, blocks in chosen]
            picked = np.sort(np.concatenate(parts))  # the rows of a segment stay in order, one behind the other
            survey.move(picked, np.concatenate(pool.free_rows(len(picked), cold)))
            moved += len(picked) * pool.row_bytes_of(cold)
            left = None if left is None else left - len(picked)
    return moved


def _emptiest(survey: Survey, cold, rows: int) -> list[tuple[Layout, np.ndarray]]:
    """Blocks (bool `[blocks]`) by slab, of at most so many rows in all, whose rows fit into fewer blocks than now."""
    size = survey.pool.block_size
    layouts = [layout for layout in survey.layouts.values() if layout.slab.cold is cold]
    filled = np.concatenate([layout.filled for layout in layouts])
    movable = np.concatenate([layout.used & ~layout.fixed for layout in layouts]) & (filled < size)
    order = np.flatnonzero(movable)
    order = order[np.argsort(filled[order], kind="stable")]
    total = np.cumsum(filled[order])
    order, total = order[total <= rows], total[total <= rows]
    fewer = np.flatnonzero(np.arange(1, len(order) + 1) > -(-total // size))
    if len(fewer) == 0:
        return []
    chosen = np.zeros(len(filled), dtype=bool)
    chosen[order[: fewer[-1] + 1]] = True
    borders = np.cumsum([len(layout.fixed) for layout in layouts])[:-1]
    return [pair for pair in zip(layouts, np.split(chosen, borders), strict=True) if pair[1].any()]


def _to_the_front(survey: Survey) -> int:
    """In each slab, move what lies behind as many blocks as are used into the free ones before; bytes moved."""
    moved = 0
    for number in list(survey.layouts):
        layout = survey.layouts[number]
        free = np.flatnonzero(~layout.used)
        last = np.flatnonzero(layout.used & ~layout.fixed)[::-1][: len(free)]
        count = int((last[: len(free)] > free[: len(last)]).sum())
        if count == 0:
            continue
        blocks = np.zeros(len(layout.fixed), dtype=bool)
        blocks[last[:count]] = True
        moved += _put(survey, layout, blocks, free[:count])
    return moved


def _put(survey: Survey, layout: Layout, blocks: np.ndarray, free: np.ndarray) -> int:
    """Move the rows of these blocks (bool `[blocks]`) into free ones of the same slab, in their order; bytes moved."""
    slab, size = layout.slab, survey.pool.block_size
    picked = survey.rows_in(slab, blocks)
    rows = survey.addresses[picked] & ((1 << SLAB_BITS) - 1)
    places = np.zeros(len(blocks), dtype=np.int64)
    places[blocks] = free
    survey.move(picked, (slab.number << SLAB_BITS) + places[rows // size] * size + rows % size)
    return len(picked) * slab.row_bytes


def _out_of_small_slabs(survey: Survey) -> int:
    """Empty slabs whose rows fit into the free blocks of others, those with the fewest rows first; bytes moved."""
    moved = 0
    for number in sorted(survey.layouts, key=lambda number: int(survey.layouts[number].used.sum())):
        layout = survey.layouts.get(number)  # None: it was empty, and is gone
        if layout is None or layout.fixed.any() or not layout.used.any():
            continue
        if _fits_elsewhere(survey, layout):
            moved += _evacuate(survey, layout, np.ones_like(layout.used))
            survey.pool.trim()
            survey.survey()
    return moved


def _fits_elsewhere(survey: Survey, layout: Layout) -> bool:
    """Whether the rows of a slab fit into free blocks of others."""
    free = _free_rows(survey.pool, layout.slab.cold, without=layout.slab.number)
    return int(layout.filled.sum()) <= free


def _evacuate(survey: Survey, layout: Layout, blocks: np.ndarray) -> int:
    """Move the rows of these blocks (bool `[blocks]`) to free ones outside of them; bytes moved."""
    pool, slab = survey.pool, layout.slab
    picked = survey.rows_in(slab, blocks)
    if len(picked) == 0:
        return 0
    slab.references[blocks] += 1  # not to be chosen
    try:
        addresses = np.concatenate(pool.free_rows(len(picked), slab.cold))
        survey.move(picked, addresses)
    finally:
        pool.release_blocks(slab, np.flatnonzero(blocks))
    survey.survey()
    return len(picked) * slab.row_bytes


def _cheapest_window(survey: Survey, blocks: int) -> tuple[Layout, int] | None:
    """Where so many neighbouring blocks can be freed by moving the fewest rows."""
    best, cost = None, None
    pool, size = survey.pool, survey.pool.block_size
    free = _free_rows(pool, None) + _new_rows(pool, None)
    for layout in survey.layouts.values():
        if layout.slab.cold is not None or len(layout.fixed) < blocks:
            continue
        fixed, filled, empty = (_windows(part, blocks) for part in (layout.fixed, layout.filled, ~layout.used))
        possible = (fixed == 0) & (filled <= free - empty * size)
        if possible.any():
            start = int(np.argmin(np.where(possible, filled, np.iinfo(np.int64).max)))
            if cost is None or filled[start] < cost:
                best, cost = (layout, start), int(filled[start])
    return best


def _windows(values: np.ndarray, length: int) -> np.ndarray:
    """Sum of each `length` neighbours."""
    sums = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    return sums[length:] - sums[:-length]


def _free_rows(pool: BlockPool, cold, without: int | None = None) -> int:
    slabs = [slab for slab in pool.slabs.values() if slab.cold is cold and slab.number != without]
    return sum(int(np.count_nonzero(slab.references == 0)) for slab in slabs) * pool.block_size


def _new_rows(pool: BlockPool, cold) -> int:
    """Rows that a new slab could have."""
    return max(0, pool.budget.left) // pool.row_bytes_of(cold) // pool.block_size * pool.block_size


def _waste_rows(survey: Survey) -> int:
    """Rows of warm blocks that may move, and that nothing explains."""
    layouts = [layout for layout in survey.layouts.values() if layout.slab.cold is None]
    return sum(int((survey.pool.block_size - layout.filled[layout.used & ~layout.fixed]).sum()) for layout in layouts)
