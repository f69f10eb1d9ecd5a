"""Room in a store: how conversations and their rows shrink as they grow old, and find room to grow."""

from collections.abc import Sequence as Collection

import numpy as np
import torch

from ..config import PoolExhausted
from .gather import copy_rows
from .pool import BlockPool, Extent
from .segments import Segment
from .shelf import Sequence, Shelf

PACK_WASTE = 1.25  # blocks that an extent's own rows hold over those that they fill, from which they are packed
EXTENT_SHARE = 1 / 8  # of the stored rows: the most that kept extents hold of rows that recipes give as well
GROWTH_ROWS = (
    512  # room that a kept conversation finds behind it for its next turn, or half its length if that is more
)
PATIENCE = 8  # new conversations in a row after which nobody seems to continue any, and ...
IDLE_SHARE = 1 / 64  # ... that share is this one, for the newest conversation as well


def give_growth_room(shelf: Shelf, sequence: Sequence, view: Extent) -> None:
    """
    Move a conversation that has no room to grow, now that its answer is out: its next turn then goes on in place.
    The room is a share of its length, so that a row is moved a bounded number of times. What the call's own `view`
    still holds behind the last row is about to be free. Rows of a batch stay.
    """
    old, pool, columns = sequence.extent, shelf.pool, len(sequence.ids)
    room = growth_room(columns)
    if old is None or view.batch > 1:
        return
    own = old.slab is view.slab and old.start == view.start
    behind = view.rows - old.rows + pool.free_behind(view) if own else pool.free_behind(old)
    if behind >= room:
        return
    try:
        new = pool.allocate(columns, spare=room)
    except PoolExhausted:
        return
    if pool.free_behind(new) <= behind:
        pool.release(new)
        return
    rows = np.arange(columns)
    first, last = old.addresses(0, rows[[0, -1]]).tolist()
    copy_rows(pool, old.addresses(0, rows), new, 0, rows, np.zeros_like(rows), {})
    for segment in sequence.recipe.segments:
        if first <= segment.addresses[0] <= last:
            moved = segment.addresses - first + int(new.addresses(0, rows[:1])[0])
            pool.retain_rows(moved)
            left, segment.addresses = segment.addresses, moved
            pool.release_rows(left)
    shelf.keep_extent(sequence, new)
    pool.release(new)


def growth_room(columns: int) -> int:
    """Free rows that a conversation of so many rows should have behind it."""
    return max(GROWTH_ROWS, columns // 2)


def demote_old(shelves: Collection[Shelf], keep: int, uncontinued: int) -> None:
    """
    Keep the extents of the newest `keep` sequences, as long as the rows in them that recipes give as well are few
    beside what is stored. The newest one keeps its extent in any case, unless the last calls, `uncontinued` of them,
    were new conversations all, and too many.
    """
    share = EXTENT_SHARE if uncontinued < PATIENCE else IDLE_SHARE
    kept = [(sequence.last_used, shelf, sequence) for shelf in shelves for sequence in shelf.kept if not sequence.busy]
    kept.sort(key=lambda entry: -entry[0])
    moved: dict[BlockPool, int] = {}
    for rank, (_, shelf, sequence) in enumerate(kept):
        pool = shelf.pool
        extra = moved.get(pool, 0) + moved_rows(sequence)
        allowed = share * sum(other.rows for other in shelves if other.pool is pool)
        if rank >= keep or (extra > allowed and (pool in moved or uncontinued >= PATIENCE)):
            demote(shelf, sequence)
        else:
            moved[pool] = extra


def members(sequence: Sequence) -> list[Segment]:
    """The segments whose rows lie in a sequence's extent."""
    extent = sequence.extent
    first, last = extent.addresses(0, np.array([0, extent.rows - 1])).tolist()
    return [segment for segment in sequence.recipe.segments if first <= segment.addresses[0] <= last]


def moved_rows(sequence: Sequence) -> int:
    """Rows of a sequence's extent that it was served, and whose segments lie elsewhere."""
    return sequence.extent.rows - sum(map(len, members(sequence)))


def demote(shelf: Shelf, sequence: Sequence) -> None:
    """Give a sequence's extent back, and pack its own rows; without room for that they stay where they are."""
    own, pool = members(sequence), shelf.pool
    shelf.drop_extent(sequence)
    if not own:
        return
    blocks = len(np.unique(np.concatenate([segment.addresses for segment in own]) // pool.block_size))
    rows = sum(map(len, own))
    if blocks * pool.block_size > PACK_WASTE * rows + pool.block_size:
        pack(pool, own)


def pack(
    pool: BlockPool, segments: Collection[Segment], cold: torch.dtype | None = None, frequencies: dict | None = None
) -> bool:
    """Copy these segments' rows to where they lie one behind the other. False, and nothing done, without room."""
    try:
        places = pool.pack([len(segment) for segment in segments], cold)
    except PoolExhausted:
        return False
    copy_to(pool, np.concatenate([segment.addresses for segment in segments]), np.concatenate(places), frequencies)
    for segment, addresses in zip(segments, places, strict=True):
        left, segment.addresses = segment.addresses, addresses
        pool.release_rows(left)  # last: between any two steps a segment's rows are where it says
    return True


def copy_to(pool: BlockPool, addresses: np.ndarray, places: np.ndarray, frequencies: dict | None = None) -> None:
    """Copy rows, unturned, to free rows of any slab; both `[rows]` addresses."""
    for slab, rows, index in pool.by_slab(places):
        whole = Extent(slab, 0, slab.rows)
        copy_rows(pool, addresses[index], whole, 0, rows, np.zeros_like(rows), frequencies or {})
