"""Forwards that rows leave early: repair that is filtered layer by layer, and the deviation of rows in layer 1."""

import numpy as np

from .narrowing import RowWatch, decoder_layers, narrowing
from .prompt import SHIFTED

CHECKED_LAYER = 1  # the first layer in which moved rows deviate: layer 0 sees only token and position


def cannot_filter(passes, model) -> str | None:
    """Why rows can't leave a forward of this model or call early, or None."""
    instead = "the first rows of each run were repaired"
    if decoder_layers(model, len(passes.view.layers)) is None:
        return f"the model's decoder layers were not found; {instead}"
    if passes.chunk:
        return f"rows are filtered in one forward, which prefill_chunk_size forbids; {instead}"
    if not passes.mask_fits(int(passes.columns(lambda row: row.computed | (row.kinds == SHIFTED)).sum())):
        return f"rows are filtered in one forward, whose mask would be too large for this prompt; {instead}"
    if len(passes.view.own_layers) != len(passes.view.layers):
        return f"layers that share rows can't be filtered one by one; {instead}"
    return None


def run_filtered(passes, model, kwargs: dict, new: np.ndarray, seams: np.ndarray, policy) -> None:
    """
    Run the new and all shifted rows, of which only those that the policy wants go on from layer to layer.

    Rows that leave at the first filter get their old rows back and stay moved rows; those that leave later are
    recomputed in the lower layers only, which makes them the call's own, approximate rows.
    """
    layers = decoder_layers(model, len(passes.view.layers))
    shifted = passes.columns(lambda row: row.kinds == SHIFTED)
    columns = np.flatnonzero(new | shifted)
    always = np.flatnonzero((new | seams)[columns])
    alive = np.flatnonzero(~(new | seams)[columns])
    num_shifted, num_seams = int((shifted & ~new).sum()), int((seams & ~new).sum())
    first = next((layer for layer in range(len(layers)) if policy.filters(layer, len(layers))), 0)
    watch = RowWatch(columns[alive], set(range(len(layers))), of=policy.of, keep=first + 1)
    dropped: list[np.ndarray] = []

    def decide(layer: int) -> np.ndarray | None:
        nonlocal alive
        if not policy.filters(layer, len(layers)) or len(alive) == 0:
            return None
        deviation = watch.at(layer, columns[alive]).max(axis=0)
        goes_on = alive[policy.rows_after(layer, len(layers), deviation, num_shifted, num_seams)]
        dropped.append(columns[np.setdiff1d(alive, goes_on)])
        alive = goes_on
        return np.sort(np.concatenate([always, alive]))

    passes.view.watches = (watch,)
    with narrowing(layers, passes.view, columns, decide) as rows_run:
        _forward(passes, model, kwargs, columns, rows_run)
    passes.watch = watch
    passes.view.watches = ()
    unrepaired = dropped[0] if dropped else np.empty(0, dtype=np.int64)
    watch.put_back(unrepaired)
    recomputed = new | shifted
    recomputed[unrepaired] = False
    passes.mark(recomputed)
    partial = np.concatenate(dropped[1:]) if len(dropped) > 1 else np.empty(0, dtype=np.int64)
    for row in passes.rows:
        positions = partial - row.pad
        row.partial[positions[(positions >= 0) & (positions < len(row.ids))]] = True


def deviation_of(passes, model, kwargs: dict, new: np.ndarray) -> np.ndarray:
    """
    Run all shifted and new rows through the first two layers: the difference of each shifted row's keys and values in
    layer 1, `[batch rows, columns]`, NaN elsewhere. The view is left as it was.
    """
    layers = decoder_layers(model, len(passes.view.layers))
    shifted = passes.columns(lambda row: row.kinds == SHIFTED) & ~new
    columns, moved = np.flatnonzero(new | shifted), np.flatnonzero(shifted)
    watch = RowWatch(moved, {0, CHECKED_LAYER}, keep=CHECKED_LAYER + 1)
    last = np.array([len(columns) - 1])
    passes.view.watches = (watch,)
    with narrowing(layers, passes.view, columns, lambda layer: last if layer == CHECKED_LAYER else None) as rows_run:
        _forward(passes, model, kwargs, columns, rows_run)
    passes.view.watches = ()
    watch.put_back(moved)
    deviation = np.full((passes.batch.rows, passes.batch.columns), np.nan)
    deviation[:, moved] = watch.at(CHECKED_LAYER, moved)
    return deviation


def _forward(passes, model, kwargs: dict, columns: np.ndarray, rows_run: list[int]):
    """A forward whose layers need not run all rows, counted as such."""
    before = passes.report.equivalent_rows
    logits = passes.forward(model, kwargs, columns, explicit_masks=True)
    passes.report.equivalent_rows = before + passes.batch.rows * sum(rows_run) / len(rows_run)
    return logits
