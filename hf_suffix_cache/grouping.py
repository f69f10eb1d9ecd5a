"""Which prompts of a batch run together: one forward runs the same columns of every batch row that is in it."""

import numpy as np

from .inputs import PromptBatch
from .prompt import SHIFTED, PlannedRow

# What a forward costs beside its rows, in rows: reading the weights, and Python. With SmolLM2-135M about 17 were
# measured on one thread (`benchmarks/speed_batch.py`); more threads make rows cheaper, but not the weights. Estimated,
# not measured, for other devices.
FORWARD_ROWS = {"cpu": 24}
OTHER_FORWARD_ROWS = 512


def groups_of(
    rows: list[PlannedRow], batch: PromptBatch, kept: np.ndarray, policy, fraction: float, device: str
) -> list[range]:
    """
    The cheapest way to split the prompts of a batch into groups of neighbours, each of which runs the union of what
    its prompts need; one group where nothing is cheaper.

    Args:
        rows (list of `PlannedRow`), batch (`PromptBatch`): The prompts.
        kept (`np.ndarray` of bool, `[columns]`): What the last pass runs of every batch row where groups run apart.
        policy, fraction: The repair that is likely.
        device (`str`): Kind of device that the model is on.
    """
    count, overhead = len(rows), FORWARD_ROWS.get(device, OTHER_FORWARD_ROWS)
    cost = _costs(rows, batch, kept, policy, fraction, overhead)
    best, cut = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
    best[0] = 0.0
    for stop in range(1, count + 1):
        ways = best[:stop] + cost[:stop, stop]
        cut[stop], best[stop] = np.argmin(ways), ways.min()
    # a single group's last forward runs the kept columns along with others; groups need one more for them
    if max(cost[0, count], overhead) <= best[count] + overhead:
        return [range(count)]
    groups, stop = [], count
    while stop:
        groups.append(range(int(cut[stop]), stop))
        stop = int(cut[stop])
    return groups[::-1]


def _costs(rows: list[PlannedRow], batch: PromptBatch, kept: np.ndarray, policy, fraction, overhead) -> np.ndarray:
    """
    Rows that prompts `[start, stop)` run together before the last pass, forwards counted as `overhead` rows each:
    `[prompts + 1, prompts + 1]`. Repaired rows are not known yet; prompts are taken to choose different ones.
    """
    new, shifted = (np.zeros((len(rows), batch.columns), dtype=bool) for _ in range(2))
    for number, row in enumerate(rows):
        new[number, row.pad : row.pad + len(row.ids)] = row.computed
        shifted[number, row.pad : row.pad + len(row.ids)] = row.kinds == SHIFTED
    budgets = [max(row.repair_request(fraction).budget, int(row.seams.sum())) for row in rows]
    filters, probes = (getattr(policy, name, False) for name in ("filters_layers", "needs_attention"))
    cost = np.full((len(rows) + 1, len(rows) + 1), np.inf)
    for start in range(len(rows)):
        (runs, moved), chosen, filtered = np.zeros((2, batch.columns), dtype=bool), 0, 0
        for stop in range(start + 1, len(rows) + 1):
            runs, moved = runs | new[stop - 1], moved | shifted[stop - 1]
            chosen += budgets[stop - 1]
            filtered += filters and bool(shifted[stop - 1].any())
            if filtered > 1:
                break  # rows of several prompts would compete for what each of them may keep
            before = int((runs & ~kept).sum())
            forwards, wanted = min(before, 1), before
            if moved.any():
                forwards, wanted = 1, before + min(chosen, int(moved.sum()))
                if filters:
                    wanted = int(((runs | moved) & ~kept).sum())
                elif probes:
                    forwards, behind = 2, int((runs & ~kept)[np.argmax(moved) :].sum())
                    wanted = int(runs.sum()) + behind + min(chosen, int(moved.sum()))
            cost[start, stop] = forwards * overhead + (stop - start) * batch.group * wanted
    return cost
