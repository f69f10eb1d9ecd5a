"""What a predictor sees of a request at one level of repair, and what a calibration keeps of it."""

import math
from dataclasses import dataclass

import numpy as np

# The levels of escalation, cheapest first: name, share of the shifted rows that is recomputed (seam rows always are).
LEVELS = (("seams", 0.0), ("10 %", 0.10), ("30 %", 0.30), ("60 %", 0.60), ("full", 1.0))
LEVEL_NAMES = tuple(name for name, _ in LEVELS)
FULL = LEVEL_NAMES[-1]  # a full prefill: KL 0 by definition, never predicted
APPROXIMATE = LEVEL_NAMES[:-1]

# KL enters as log(KL + EPSILON): below a millionth of a nat two answers are the same.
EPSILON = 1e-6

FEATURES = (
    "share",  # repaired share of the shifted rows, 0 to 1
    "shifted",  # unrepaired shifted rows / prompt tokens
    "runs",  # log1p(number of seams)
    "run_length",  # log of the mean length of moved runs
    "hops",  # mean hops of the shifted rows
    "context",  # share of seams whose left neighbours agree in part (mean left_match / 16)
    "moved_attention",  # share of the last queries' attention that goes to unrepaired shifted rows
    "repaired_attention",  # the same for repaired rows
    "peak",  # largest attention on one unrepaired shifted row / mass on all shifted rows
    "change",  # log(KL(this level || level before) + EPSILON) of the first token; before "seams" stands no repair
    "residual",  # log of the mean normalised difference old/new over repaired rows, upper half of the layers
    "residual_low",  # the same, lower half
    "entropy",  # entropy of the first token's distribution at this level, nats
    "margin",  # logit gap of the two best tokens
    "distinct",  # distinct tokens / tokens among the shifted rows
    "repeats",  # share of bigrams among the shifted rows that occur more than once: tables, schemas and code repeat
    "low_ids",  # share of shifted tokens with id < 1000: punctuation, digits, brackets in BPE vocabularies
)


@dataclass(frozen=True)
class LevelTrace:
    """
    One prompt at one level of repair.

    Args:
        level (`str`): one of `LEVEL_NAMES`.
        features (`dict[str, float]`): by the names of `FEATURES`; a missing one counts as NaN.
        kl (`float`): KL(full prefill || this level) of the first new token, nats; 0 at "full".
        rows (`float`): rows run up to and including this level, all passes.
    """

    level: str
    features: dict[str, float]
    kl: float
    rows: float

    def __post_init__(self):
        level_index(self.level)
        unknown = sorted(set(self.features) - set(FEATURES))
        if unknown:
            raise ValueError(f"unknown feature(s) {unknown}; the features are {list(FEATURES)}.")
        if not -EPSILON <= self.kl < math.inf:  # false for NaN; rounding may leave a KL just below 0
            raise ValueError(f"`kl` must be a finite number of nats from 0, got {self.kl!r} at level {self.level!r}.")
        if self.level == FULL and self.kl > EPSILON:
            raise ValueError(f"a full prefill has `kl` 0 by definition, got {self.kl!r}.")
        if not 0 <= self.rows < math.inf:
            raise ValueError(f"`rows` must be a finite number from 0, got {self.rows!r}.")


def level_index(level: str) -> int:
    """Place of a level in `LEVELS`."""
    if level not in LEVEL_NAMES:
        raise ValueError(f"`level` must be one of {LEVEL_NAMES}, got {level!r}.")
    return LEVEL_NAMES.index(level)


def vector(features: dict[str, float]) -> np.ndarray:
    """Values in the order of `FEATURES`, float64 `[features]`; what is missing or None is NaN."""
    values = (features.get(name) for name in FEATURES)
    return np.array([math.nan if value is None else float(value) for value in values])


def check_traces(prompts) -> None:
    """Raise `ValueError` unless every prompt was traced at every level, in order."""
    for number, trace in enumerate(prompts):
        levels = tuple(step.level for step in trace)
        if levels != LEVEL_NAMES:
            raise ValueError(f"prompt {number} was traced at {levels}; expected one trace at each of {LEVEL_NAMES}.")


def true_kls(prompts) -> np.ndarray:
    """KL of every prompt at every level, `[prompts, levels]`, 0 at "full"."""
    kls = np.array([[max(step.kl, 0.0) for step in trace] for trace in prompts], dtype=float)
    kls = kls.reshape(-1, len(LEVELS))
    kls[:, -1] = 0.0
    return kls
