"""Served rows on their way from the store into a call's view. The store's lock is held meanwhile."""

from collections.abc import Sequence

import numpy as np
import torch

from .drift import replay
from .inputs import PromptBatch
from .prompt import SHIFTED, PlannedRow
from .rope import RotarySpec
from .store import readahead
from .store.gather import copy_rows
from .store.reading import Reading
from .view import View


def read_files(view: View, rows: Sequence[PlannedRow], reading: Reading) -> str | None:
    """
    Have the planned rows that lie in files read, before the store's lock is taken for them. Those that are computed
    sooner are read for the next time, while they are. Returns what to say of these.

    Args:
        view (`View`), rows (sequence of `PlannedRow`), reading (`Reading`): Of the call; the rows are pinned.
    """
    store, pool = view.store, view.shelf.pool
    if not pool.mapped:
        return None
    with store.lock:
        planned = store.dormant.in_files(pool, {segment for row in rows for segment in row.segments()})
        later = store.dormant.in_files(pool, reading.slower)
    readahead.read(planned)
    readahead.read_later(later)
    if not later:
        return None
    return f"up to {sum(reading.slower.values()):,} rows were computed, which is faster than reading them from disk"


def load(
    view: View,
    batch: PromptBatch,
    rows: Sequence[PlannedRow],
    in_place: int,
    frequencies: dict[RotarySpec, torch.Tensor],
) -> None:
    """
    Bring every served row of a batch into the view's extent.

    Args:
        view (`View`): Lies over an extent for all of it.
        batch (`PromptBatch`), rows (sequence of `PlannedRow`): The prompts, and what serves each.
        in_place (`int`): Leading rows that lie there already, because a stored conversation goes on.
        frequencies (`dict`): Live inverse frequencies by `RotarySpec`.
    """
    for number in range(batch.rows):
        _load_row(view, number, rows[number // batch.group], in_place, frequencies)


def _load_row(view: View, number: int, planned: PlannedRow, in_place: int, frequencies) -> None:
    extent = view.extent
    if planned.pad:
        # masked, but a product with memory that was never written could be NaN
        start = extent.start + number * extent.rows
        extent.slab.fill(start, start + planned.pad, 0.0)
    served = np.flatnonzero(~planned.computed)
    served = served[served >= in_place]
    if len(served):
        addresses, shift = planned.served.addresses_of(served), planned.served.shift[served]
        copy_rows(view.shelf.pool, addresses, extent, number, planned.pad + served, shift, frequencies)
        if planned.drifts and in_place == 0:
            replay(view, planned.served, number, planned.pad, frequencies)


def reload_moved(
    view: View,
    batch: PromptBatch,
    rows: Sequence[PlannedRow],
    prompts: range,
    frequencies: dict[RotarySpec, torch.Tensor],
) -> None:
    """Gather the moved rows of some prompts anew; the other arguments are those of `load`."""
    for number in range(prompts.start * batch.group, prompts.stop * batch.group):
        row = rows[number // batch.group]
        moved = np.flatnonzero(row.kinds == SHIFTED)
        if len(moved):
            addresses, shift = row.served.addresses_of(moved), row.served.shift[moved]
            copy_rows(view.shelf.pool, addresses, view.extent, number, row.pad + moved, shift, frequencies)
