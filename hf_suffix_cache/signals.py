"""What a request shows of its own error: the features that the expected KL is predicted from."""

import math

import numpy as np
import torch

from .narrowing import RowWatch
from .prompt import REPAIRED, SHIFTED, PlannedRow
from .store.index import LEFT_TOKENS

LOW_IDS = 1000  # byte-pair vocabularies begin with bytes, punctuation, digits and the commonest short pieces
WATCHED_LAYERS = 8
FLOOR = 1e-6


def watched_layers(num_layers: int) -> set[int]:
    """Layers whose repaired rows are compared with the old ones: a few, evenly spread, as all of them would say little
    more (layer 0 never differs)."""
    return set(np.linspace(1, num_layers - 1, min(WATCHED_LAYERS, num_layers - 1)).astype(int).tolist())


def describe_text(ids: np.ndarray) -> dict[str, float]:
    """How repetitive moved text is, in the order of the prompt: code, tables, ids and schemas are."""
    pairs = ids[:-1] * 2**31 + ids[1:]
    _, place, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    return {
        "distinct": len(np.unique(ids)) / len(ids),
        "repeats": float((counts[place] > 1).mean()) if len(pairs) else 0.0,
        "low_ids": float((ids < LOW_IDS).mean()),
    }


def describe_runs(row: PlannedRow) -> dict[str, float]:
    """Where the moved rows come from."""
    moved = np.isin(row.kinds, (SHIFTED, REPAIRED)) & (row.served.which >= 0)
    runs = max(1, len(np.unique(row.run_start[moved])))
    agreement = [
        min(LEFT_TOKENS, span.run.left_match + span.start - span.run.start) for span in row.plan.shifted if span.seam
    ]
    return {
        "share": float((row.kinds[moved] == REPAIRED).mean()),
        "shifted": float((row.kinds == SHIFTED).mean()),
        "runs": math.log1p(runs),
        "run_length": math.log(moved.sum() / runs),
        "hops": float(row.hops),
        "context": float(np.mean(agreement)) / LEFT_TOKENS if agreement else 1.0,
    }


def describe_attention(row: PlannedRow, attention: np.ndarray | None) -> dict[str, float]:
    """What the last queries of the prompt lean on; `attention` is `[tokens]`."""
    if attention is None:
        return dict.fromkeys(("moved_attention", "repaired_attention", "peak"), float("nan"))
    shifted, repaired = attention[row.kinds == SHIFTED], attention[row.kinds == REPAIRED]
    mass = shifted.sum() + repaired.sum()
    return {
        "moved_attention": float(shifted.sum()),
        "repaired_attention": float(repaired.sum()),
        "peak": float(shifted.max() / mass) if len(shifted) and mass > 0 else 0.0,
    }


def describe_answer(logits: torch.Tensor | None, before: torch.Tensor | None) -> dict[str, float]:
    """The first token's distribution, from logits `[vocabulary]`, and how far the newest pass has moved it."""
    if logits is None:
        return dict.fromkeys(("entropy", "margin", "change"), float("nan"))
    now = logits.float().log_softmax(-1)
    best = now.topk(2).values
    known = {"entropy": float(-(now.exp() * now).sum()), "margin": float(best[0] - best[1]), "change": float("nan")}
    if before is not None:
        known["change"] = math.log(max(0.0, divergence(logits, before)) + FLOOR)
    return known


def divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """KL(reference || other) in nats at temperature 1, of logits `[vocabulary]`."""
    wanted, got = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - got)).sum())


def describe_residual(watch: RowWatch | None, layers: int, number: int, row: PlannedRow) -> dict[str, float]:
    """
    How far repair has moved the repaired rows' keys and values: logs of the mean relative squared difference in the
    upper and the lower half of the layers. `number` is the batch row.
    """
    columns = row.pad + np.flatnonzero(row.kinds == REPAIRED)
    halves = {"residual_low": (0, layers // 2), "residual": (layers // 2, layers)}
    if watch is None:
        return dict.fromkeys(halves, float("nan"))
    return {name: _log(watch.mean(*half, number, columns)) for name, half in halves.items()}


def features(
    row: PlannedRow,
    number: int,
    layers: int,
    attention: np.ndarray | None,
    watch: RowWatch | None,
    logits: torch.Tensor | None,
    before: torch.Tensor | None,
) -> dict[str, float]:
    """
    All features of one prompt (`bound/features.py` names them) as it stands after a pass.

    Args:
        row (`PlannedRow`), number (`int`): The prompt and its batch row.
        layers (`int`): Of the model.
        attention (`np.ndarray`, `[tokens]`, *optional*): Of the probe.
        watch (`RowWatch`, *optional*): Saw the repaired rows.
        logits, before (`torch.Tensor`, `[vocabulary]`, *optional*): Of the first token, now and one pass earlier.
    """
    moved = np.isin(row.kinds, (SHIFTED, REPAIRED)) & (row.served.which >= 0)
    if not moved.any():
        return {}
    return {
        **describe_runs(row),
        **describe_text(row.ids[moved]),
        **describe_attention(row, attention),
        **describe_answer(logits, before),
        **describe_residual(watch, layers, number, row),
    }


def _log(value: float) -> float:
    return math.log(value + FLOOR)
