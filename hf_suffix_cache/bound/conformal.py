"""
The rule that decides how far a request is repaired, and its margin by conformal risk control.

With n exchangeable calibration prompts the margin of `margin` makes the chance that the rule accepts a level with
KL > bound on one more prompt at most alpha, averaged over calibration sets, whatever the predictor is worth: a bad
one only costs more rows (Angelopoulos et al., Conformal Risk Control, arXiv 2208.02814). It is the chance over all
prompts, those that end in a full prefill included, not over the accepted ones alone.
"""

import math
import sys
from dataclasses import dataclass

import numpy as np

from .features import APPROXIMATE, FULL, LEVEL_NAMES, LevelTrace, check_traces, level_index

_TINY = 1e-9  # alpha * (n + 1) of 0.1 and 9 shall be 1


@dataclass(frozen=True)
class Walk:
    """Where the rule ends on one prompt: the accepted trace, and the names of all levels that were run for it."""

    accepted: LevelTrace
    visited: tuple[str, ...]


def next_level(predictor, level: str, features: dict, bound: float, margin: float, previous: str | None = None):
    """
    The whole rule: `None` to accept `level`, else the name of the level to run next.

    A level is accepted if its predicted log KL is at most log(bound) - margin. Else the cheapest later level that is
    predicted to pass comes next (its own features then decide again), and a full prefill if there is none.

    Args:
        predictor (`Predictor` or `None`): `None` knows nothing: always full.
        level (`str`): the level that was just run.
        features (`dict[str, float]`): what was seen at it.
        bound (`float`): KL in nats. 0 leaves only the full prefill.
        margin (`float`): from `margin`; infinity means always full.
        previous (`str`, *optional*): the level run before this one. After a jump over levels `change` compares other
            levels than in the calibration's traces, so it is left out.
    """
    place = level_index(level)
    if level == FULL:
        return None
    log_bound = _log_bound(bound)
    if predictor is None:
        return FULL
    before = place - 1 if previous is None else level_index(previous)
    base = predictor.log_kl(_known(features, place - before > 1))
    chosen = int(_chosen(_ahead(base, predictor.drops)[place], log_bound, margin))
    return None if chosen == place else LEVEL_NAMES[chosen]


def walk(predictor, trace: list[LevelTrace], bound: float, margin: float) -> Walk:
    """Follow the rule through one prompt's traces at all levels."""
    check_traces([trace])
    visited, level, previous = [], LEVEL_NAMES[0], None
    while level is not None:
        visited.append(level)
        step = trace[level_index(level)]
        level, previous = next_level(predictor, level, step.features, bound, margin, previous), level
    return Walk(step, tuple(visited))


def base_predictions(predictor, prompts) -> np.ndarray:
    """
    Predicted log KL of each prompt at each level from that level's own features, `[prompts, 2, levels]` without
    "full"; in the second plane as if the level had been reached by a jump.
    """
    check_traces(prompts)
    return np.array(
        [
            [[predictor.log_kl(_known(step.features, jumped)) for step in trace[:-1]] for jumped in (False, True)]
            for trace in prompts
        ]
    ).reshape(-1, 2, len(APPROXIMATE))


def forecasts(base: np.ndarray, drops: np.ndarray) -> np.ndarray:
    """`[prompts, 2, levels, levels]`: predicted log KL at the last axis' level from what is seen at the third's."""
    return _ahead(base[..., None], drops)


def margin(predicted: np.ndarray, kls: np.ndarray, bound: float, alpha: float) -> float:
    """
    The smallest margin that keeps the risk of the rule at most `alpha`; infinity (always full) if n is too small.

    Args:
        predicted (`np.ndarray` `[prompts, 2, levels, levels]`): of `forecasts`, without "full".
        kls (`np.ndarray` `[prompts, levels + 1]`): true KL at every level, "full" included.
        bound (`float`): KL in nats.
        alpha (`float`): tolerated share of prompts over the bound, between 0 and 1.

    It is never below the slack of the calibration prompt that was predicted worst, so that a prompt predicted worse
    than all of them is not accepted even where every calibration prompt held the bound.
    """
    check_alpha(alpha)
    allowed = math.floor(alpha * (len(kls) + 1) + _TINY) - 1
    log_bound = _log_bound(bound)
    if allowed < 0 or log_bound == -math.inf:
        return math.inf
    critical = np.sort(critical_margins(predicted, kls, bound))[::-1][allowed]
    return float(max(np.nextafter(critical, math.inf), log_bound - predicted[:, 0, 0, 0].max()))


def critical_margins(predicted: np.ndarray, kls: np.ndarray, bound: float) -> np.ndarray:
    """
    Per prompt the largest margin at which the rule accepts a level with KL > bound, -infinity if none, `[prompts]`.

    The loss of one prompt, made monotone, is 1 up to this margin and 0 above. It changes only where the margin crosses
    a slack of this prompt, so it is enough to follow the rule at those, the largest first.
    """
    log_bound = _log_bound(bound)
    slacks = log_bound - predicted[:, :, *np.triu_indices(predicted.shape[-1])]
    candidates = -np.sort(-slacks.reshape(len(kls), -1), axis=1)
    critical = np.full(len(kls), -math.inf)
    for column in candidates.T:
        ends = accepted_levels(predicted, log_bound, column)
        broken = ~(kls[np.arange(len(kls)), ends] <= bound)  # NaN breaks the bound
        critical = np.where(broken & (critical == -math.inf), column, critical)
    return critical


def accepted_levels(predicted: np.ndarray, log_bound: float, margin) -> np.ndarray:
    """
    Places in `LEVELS` at which the rule ends, `[prompts]`, for forecasts `[prompts, 2, levels, levels]`; `margin` is
    one number or one a prompt.
    """
    num_prompts, _, num_levels, _ = predicted.shape
    margins = np.broadcast_to(np.asarray(margin, dtype=float), (num_prompts,))
    chosen = _chosen(predicted, log_bound, margins[:, None, None, None])
    prompts, level, jumped = np.arange(num_prompts), np.zeros(num_prompts, int), np.zeros(num_prompts, int)
    for _ in range(num_levels):
        ended = level == num_levels
        after = np.where(ended, level, chosen[prompts, jumped, np.minimum(level, num_levels - 1)])
        jumped = np.where(after == level, jumped, after - level > 1).astype(int)
        level = after
    return level


def smallest_sample(alpha: float) -> int:
    """Prompts that a finite margin needs at least: 9 for alpha 0.1, 19 for 0.05."""
    check_alpha(alpha)
    return math.ceil(1.0 / alpha - _TINY) - 1


def check_alpha(alpha) -> None:
    """Raise unless `alpha` is a share between 0 and 1."""
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise TypeError(f"`alpha` must be a number between 0 and 1, got {alpha!r}.")
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"`alpha` must lie between 0 and 1 (both excluded), got {alpha}.")


def _chosen(predicted: np.ndarray, log_bound: float, margin) -> np.ndarray:
    """
    The rule itself: along the last axis of forecasts the place of the first level that passes, its length for none.
    """
    if log_bound == -math.inf:
        return np.full(predicted.shape[:-1], predicted.shape[-1])
    # The slack is compared, never predicted + margin: the search takes margins from slacks, to the last bit.
    passing = (log_bound - predicted >= margin) & (predicted < math.inf)
    return np.where(passing.any(-1), passing.argmax(-1), predicted.shape[-1])


def _ahead(base, drops: np.ndarray) -> np.ndarray:
    """Log KL at each level (last axis) from `base` at each (the one before); infinite for those that lie behind."""
    return np.where(np.triu(np.ones(drops.shape, dtype=bool)), base + drops, math.inf)


def _known(features: dict, jumped: bool) -> dict:
    """What the rule may use of `features`: after a jump `change` is none of the calibration's."""
    return {**features, "change": math.nan} if jumped else features


def _log_bound(bound: float) -> float:
    """Logarithm of the bound; that of infinity is finite, for slacks are differences."""
    if not bound >= 0.0:  # true for NaN
        raise ValueError(f"`bound` must be a KL in nats from 0, got {bound!r}.")
    return math.log(min(bound, sys.float_info.max)) if bound > 0.0 else -math.inf
