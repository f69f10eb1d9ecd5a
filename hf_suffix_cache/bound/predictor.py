"""Predicts log KL of a request from what is seen while it is served: ridge regression, a few numbers to read."""

import math
from dataclasses import dataclass

import numpy as np

from .features import APPROXIMATE, EPSILON, FEATURES, FULL, LEVELS, check_traces, level_index, true_kls, vector

MIN_PROMPTS = 8  # fewer tell nothing of 17 features
FOLDS = 5
RIDGES = tuple(float(ridge) for ridge in 10.0 ** np.linspace(-1, 4, 11))
# log KL falls steeply with the first repaired rows and slowly after: two hinges bend the line.
HINGES = (0.1, 0.3)
COLUMNS = (*FEATURES, *(f"share above {hinge:g}" for hinge in HINGES))
RANGE = 4.0  # standard deviations from the mean beyond which the fit knows nothing
MIN_SCALE = 0.1  # least standard deviation that the range goes by: a feature that was constant may move a little
RARELY_MISSING = 0.05


@dataclass(frozen=True)
class Predictor:
    """
    log(KL + 1e-6) of the first new token as a sum of contributions, one a feature, of one request at one level.

    It fails closed where it has seen nothing: with a feature beyond both the fitted values and `RANGE` standard
    deviations a request is never predicted easier than the hardest one of the fit, and a feature that the fit always
    had counts, where it is NaN, as one standard deviation to the hard side. Other NaNs count as the mean.

    Args:
        means, scales, lows, highs, missing, slopes (`np.ndarray` `[columns]`):
            Per column of `COLUMNS`: mean, standard deviation, known range, share of the fit's rows that lacked it, and
            change of log KL per standard deviation.
        intercept (`float`): log KL of a request that is average in everything.
        hardest (`float`): largest log KL of the fit.
        smear (`float`): what exp(log KL) is multiplied by, so that its mean over the fit is the mean KL.
        drops (`np.ndarray` `[levels, levels]`): `[l, t]`: median change of log KL from level l to t, "full" aside.
        ridge (`float`): the penalty that cross-validation by prompts chose.
        num_prompts (`int`): prompts of the fit.
    """

    means: np.ndarray
    scales: np.ndarray
    lows: np.ndarray
    highs: np.ndarray
    missing: np.ndarray
    slopes: np.ndarray
    intercept: float
    hardest: float
    smear: float
    drops: np.ndarray
    ridge: float
    num_prompts: int

    @classmethod
    def fit(cls, prompts) -> "Predictor":
        """Fit on `prompts`, a list with one list of `LevelTrace` (every level) per prompt, all workloads together."""
        check_traces(prompts)
        if len(prompts) < MIN_PROMPTS:
            raise ValueError(f"fitting a predictor needs at least {MIN_PROMPTS} prompts, got {len(prompts)}.")
        kls = true_kls(prompts)[:, :-1]
        values = np.array([_columns(step.features) for trace in prompts for step in trace[:-1]])
        values[~np.isfinite(values)] = math.nan
        present = ~np.isnan(values)
        count = np.maximum(present.sum(0), 1)
        means = np.where(present, values, 0.0).sum(0) / count
        deviations = np.where(present, values - means, 0.0)
        spread = np.sqrt((deviations**2).sum(0) / count)
        scales = np.where(spread > 1e-9, spread, 1.0)
        known = RANGE * np.maximum(spread, MIN_SCALE)
        targets = np.log(kls + EPSILON).reshape(-1)
        groups = np.repeat(np.arange(len(prompts)), len(APPROXIMATE))
        ridge = _choose_ridge(deviations / scales, targets, groups)
        slopes, intercept = _solve(deviations / scales, targets, ridge)
        fitted = cls(
            means=means,
            scales=scales,
            lows=np.minimum(np.where(present, values, math.inf).min(0), means - known),
            highs=np.maximum(np.where(present, values, -math.inf).max(0), means + known),
            missing=1.0 - present.mean(0),
            slopes=slopes,
            intercept=intercept,
            hardest=float(targets.max()),
            smear=1.0,
            drops=_drops(kls),
            ridge=ridge,
            num_prompts=len(prompts),
        )
        predicted = [math.exp(fitted.log_kl(step.features)) for trace in prompts for step in trace[:-1]]
        return cls(**{**fitted.__dict__, "smear": float(kls.mean() / np.mean(predicted))})

    def log_kl(self, features: dict[str, float], target_level: str | None = None, level: str | None = None) -> float:
        """
        Predicted log(KL + 1e-6) at the level that the features were taken at; with `target_level`, at that later level
        by the table of drops. `level` names the features' own level; by default it is guessed from `share`.
        """
        predicted = self.intercept + float(self._contributions(features).sum())
        if self.is_unknown(features):
            predicted = max(predicted, self.hardest)
        if target_level is None:
            return predicted
        if target_level == FULL:
            return math.log(EPSILON)
        start = _level_by_share(features) if level is None else level_index(level)
        target = level_index(target_level)
        if target < start or start >= len(APPROXIMATE):
            raise ValueError(f"`target_level` {target_level!r} must not come before level {LEVELS[start][0]!r}.")
        return predicted + float(self.drops[start, target])

    def expected_kl(self, features: dict[str, float]) -> float:
        """Expected KL in nats at the level that the features were taken at."""
        return self.smear * math.exp(self.log_kl(features))

    def is_unknown(self, features: dict[str, float]) -> bool:
        """Whether a feature lies far outside of what the fit saw."""
        values, known = vector(features), slice(len(FEATURES))
        return bool(((values < self.lows[known]) | (values > self.highs[known])).any())  # NaN is neither

    def explain(self, features: dict[str, float]) -> list[tuple[str, float]]:
        """What each column adds to the mean log KL, largest effect first."""
        pairs = zip(COLUMNS, self._contributions(features).tolist(), strict=True)
        return sorted(pairs, key=lambda pair: -abs(pair[1]))

    def _contributions(self, features) -> np.ndarray:
        """Change of log KL by column, `[columns]`."""
        values = _columns(features)
        absent = np.isnan(values)
        inside = np.clip(np.where(absent, self.means, values), self.lows, self.highs)
        hard = absent & (self.missing < RARELY_MISSING)
        return np.where(hard, np.abs(self.slopes), self.slopes * (inside - self.means) / self.scales)

    def to_dict(self) -> dict:
        """JSON-ready form."""
        arrays = {name: getattr(self, name).tolist() for name in (*_VECTORS, "drops")}
        numbers = {name: getattr(self, name) for name in (*_NUMBERS, "num_prompts")}
        return {"columns": list(COLUMNS), "levels": list(APPROXIMATE), **arrays, **numbers}

    @classmethod
    def from_dict(cls, data: dict) -> "Predictor":
        """The inverse of `to_dict`; `ValueError` where columns or levels are not this version's, or a value is off."""
        if not isinstance(data, dict):
            raise ValueError(f"a predictor must be an object with fields, got {data!r}.")
        for name, ours in (("columns", COLUMNS), ("levels", APPROXIMATE)):
            if data.get(name) != list(ours):
                raise ValueError(f"the predictor's {name} {data.get(name)!r} are not this version's, {list(ours)}.")
        size = len(COLUMNS)
        fields = {name: numbers(data, name, (size,)) for name in _VECTORS}
        fields["drops"] = numbers(data, "drops", (len(APPROXIMATE), len(APPROXIMATE)))
        fields |= {name: float(numbers(data, name, ())) for name in _NUMBERS}
        if (fields["scales"] <= 0).any() or (fields["lows"] > fields["highs"]).any() or fields["smear"] < 0:
            raise ValueError(
                "the predictor's scales must be positive, its lows below its highs, its smear not negative."
            )
        return cls(**fields, num_prompts=int(numbers(data, "num_prompts", ())))


_VECTORS = ("means", "scales", "lows", "highs", "missing", "slopes")
_NUMBERS = ("intercept", "hardest", "smear", "ridge")


def numbers(data: dict, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
    """The finite numbers `data[name]` of `shape` (None: any length); else `ValueError` naming the field."""
    try:
        found = np.array(data[name], dtype=float)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"field {name!r} is missing or holds no numbers.") from error
    fits = len(found.shape) == len(shape) and all(
        want in (None, got) for want, got in zip(shape, found.shape, strict=True)
    )
    if not fits or not np.isfinite(found).all():
        raise ValueError(f"field {name!r} must hold finite numbers of shape {shape}, got shape {found.shape}.")
    return found


def spearman(a, b) -> float:
    """Rank correlation with average ranks for ties; 0.0 where one side is constant."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if a.ndim != 1 or a.shape != b.shape or len(a) < 2:
        raise ValueError(f"`spearman` takes two equally long lists of 2 or more, got shapes {a.shape} and {b.shape}.")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("`spearman` takes finite numbers; leave out the pairs that hold NaN or infinity.")
    a, b = _ranks(a), _ranks(b)
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if norm else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Average ranks from 1, `[n]`."""
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2.0)[inverse]


def _columns(features) -> np.ndarray:
    """Features and hinges, `[columns]`."""
    values = vector(features)
    share = values[0]
    return np.append(values, [share if math.isnan(share) else max(0.0, share - hinge) for hinge in HINGES])


def _level_by_share(features) -> int:
    """The last approximate level whose share the request reaches; the first one where the share is unknown."""
    share = vector(features)[0]
    reached = [place for place, (_, level_share) in enumerate(LEVELS[:-1]) if share >= level_share - 1e-9]
    return reached[-1] if reached else 0


def _drops(kls: np.ndarray) -> np.ndarray:
    """Median log ratio between levels, `[levels, levels]`, from row to column; 0 below the diagonal."""
    logs = np.log(kls + EPSILON)
    return np.triu(np.median(logs[:, None, :] - logs[:, :, None], axis=0), k=1)


def _solve(inputs: np.ndarray, targets: np.ndarray, ridge: float) -> tuple[np.ndarray, float]:
    """Ridge regression of `targets` `[n]` on `inputs` `[n, columns]` with a free intercept."""
    centre, level = inputs.mean(0), float(targets.mean())
    shifted = inputs - centre
    gram = shifted.T @ shifted + ridge * np.eye(inputs.shape[1])
    slopes = np.linalg.solve(gram, shifted.T @ (targets - level))
    return slopes, level - float(centre @ slopes)


def _choose_ridge(inputs: np.ndarray, targets: np.ndarray, groups: np.ndarray) -> float:
    """The penalty with the least squared error on prompts left out; the levels of one prompt stay in one fold."""
    folds = groups % FOLDS
    errors = []
    for ridge in RIDGES:
        error = 0.0
        for fold in range(FOLDS):
            out = folds == fold
            slopes, intercept = _solve(inputs[~out], targets[~out], ridge)
            error += float(((targets[out] - intercept - inputs[out] @ slopes) ** 2).sum())
        errors.append(error)
    return RIDGES[int(np.argmin(errors))]
