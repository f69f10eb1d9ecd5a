"""Made-up traces with the shape of measured ones: log KL spread by 1.5, falling from level to level with noise."""

import math

import numpy as np

from hf_suffix_cache.bound import FEATURES, LEVELS, LevelTrace

FALL = (0.0, 0.8, 1.6, 2.6)  # mean fall of log KL from "seams" to each approximate level


def synthetic_prompt(random, shift: float = 0.0, spread: float = 1.5, noise: float = 0.7) -> list[LevelTrace]:
    """One prompt at every level; `shift` moves its log KL, features know the log KL up to `noise`."""
    difficulty = shift + random.normal(-3.5, spread)
    plain = {name: random.normal() for name in ("runs", "hops", "entropy", "distinct", "repeats", "low_ids")}
    traces, rows = [], 20.0
    for (name, share), fall in zip(LEVELS[:-1], FALL, strict=True):
        log_kl = difficulty - fall + random.normal(0.0, 0.4)
        features = dict.fromkeys(FEATURES, 0.0) | plain
        features["share"] = max(share, 0.03) + random.normal(0.0, 0.005)
        features["change"] = log_kl + 0.5 + random.normal(0.0, noise)
        features["residual"] = 0.5 * difficulty + random.normal(0.0, noise)
        features["moved_attention"] = 0.1 * difficulty - share + random.normal(0.0, 0.1)
        rows += 20.0 + 200.0 * share
        traces.append(LevelTrace(name, features, math.exp(log_kl), rows))
    return [*traces, LevelTrace("full", {}, 0.0, rows + 220.0)]


def synthetic_prompts(count: int, seed: int, **options) -> list[list[LevelTrace]]:
    random = np.random.default_rng(seed)
    return [synthetic_prompt(random, **options) for _ in range(count)]
