"""What was learned from prompts run both ways: the predictor, and margins for any bound, per workload label."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import conformal
from .conformal import base_predictions, check_alpha, forecasts, smallest_sample
from .features import APPROXIMATE, LEVELS, check_traces, true_kls
from .files import read, write
from .predictor import MIN_PROMPTS, Predictor, numbers

FIT_SHARE = 0.4  # of the prompts; the others set the margin, and margins want many
ORIGINS = ("prompts", "builtin", "none")
NO_LABEL = "all"
MARGINS_KEPT = 256
BUILTIN = Path(__file__).with_name("builtin.json")


@dataclass(frozen=True)
class Sample:
    """
    The prompts of one label that set margins. None of them was seen by the fit.

    Args:
        base (`np.ndarray` `[prompts, 2, levels]`): predicted log KL, of `base_predictions`.
        kls (`np.ndarray` `[prompts, levels + 1]`): true KL at every level, "full" included.
    """

    base: np.ndarray
    kls: np.ndarray

    def __len__(self) -> int:
        return len(self.kls)


class Calibration:
    """
    A predictor and the margins of the whole escalation rule for it.

    A margin holds for prompts like those it was set on: the same model, cache settings and kind of text. Of prompts
    that depend on one another (turns of one chat) give one each. A label with fewer prompts than `alpha` needs goes by
    all labels together. With origin "builtin" the prompts were not the caller's: the largest margin of all labels
    holds, and nothing is guaranteed.

    Args:
        predictor (`Predictor` or `None`): `None`: every request under a bound is a full prefill.
        samples (`dict[str, Sample]`): by label.
        alpha (`float`, *optional*, defaults to 0.1): share of prompts that may exceed a bound.
        fingerprint (`str`, *optional*): of the model and the settings, as the caller names them.
        origin (`str`, *optional*): one of `ORIGINS`.
    """

    def __init__(self, predictor, samples, alpha: float = 0.1, fingerprint: str = "", origin: str = "prompts"):
        check_alpha(alpha)
        if origin not in ORIGINS:
            raise ValueError(f"`origin` must be one of {ORIGINS}, got {origin!r}.")
        self.predictor, self.samples = predictor, dict(samples)
        self.alpha, self.fingerprint, self.origin = float(alpha), fingerprint, origin
        self._margins: dict[tuple, float] = {}

    @classmethod
    def fit(
        cls,
        prompts,
        labels=None,
        alpha: float = 0.1,
        fingerprint: str = "",
        predictor: Predictor | None = None,
        origin: str = "prompts",
        seed: int = 0,
    ) -> "Calibration":
        """
        Fit the predictor on one part of `prompts` and set margins on the rest.

        Args:
            prompts (`list[list[LevelTrace]]`): per prompt one trace at every level.
            labels (`list[str]`, *optional*): workload of each prompt.
            predictor (`Predictor`, *optional*):
                One that was fitted elsewhere, on none of `prompts`; then all of them set margins.
            seed (`int`, *optional*, defaults to 0): of the split, which takes the same share of every label.
        """
        check_traces(prompts)
        labels = [NO_LABEL] * len(prompts) if labels is None else list(labels)
        if len(labels) != len(prompts) or not all(isinstance(label, str) and label for label in labels):
            raise ValueError(
                f"`labels` must hold one non-empty string per prompt, {len(prompts)} in all, got {labels!r}."
            )
        fitted = _num_fitted(len(prompts), alpha, predictor is None)
        chosen = _spread(labels, fitted, np.random.default_rng(seed))
        if predictor is None:
            predictor = Predictor.fit([trace for trace, fit in zip(prompts, chosen, strict=True) if fit])
        samples = {}
        for label in sorted(set(labels)):
            rest = [prompts[i] for i in range(len(prompts)) if labels[i] == label and not chosen[i]]
            if rest:
                samples[label] = Sample(base_predictions(predictor, rest), true_kls(rest))
        return cls(predictor, samples, alpha, fingerprint, origin)

    @classmethod
    def none(cls, alpha: float = 0.1) -> "Calibration":
        """Knows nothing: every request under a bound is a full prefill."""
        return cls(None, {}, alpha, origin="none")

    def is_foreign(self, fingerprint: str) -> bool:
        """Whether it was set on prompts of another model or with other settings; the built-in one is everybody's."""
        return self.origin == "prompts" and self.fingerprint not in ("", fingerprint)

    def __repr__(self) -> str:
        return f"<Calibration {self.describe()}>"

    @property
    def labels(self) -> list[str]:
        """Workloads that margins were set on."""
        return sorted(self.samples)

    @property
    def num_prompts(self) -> int:
        """Prompts that set margins, all labels together."""
        return sum(map(len, self.samples.values()))

    def next_level(self, level, features, bound, label=None, previous=None, extra_margin: float = 0.0) -> str | None:
        """`conformal.next_level` with the margin for `bound` and `label`, plus an audit's `extra_margin`."""
        margin = self.margin(bound, label) + extra_margin
        return conformal.next_level(self.predictor, level, features, bound, margin, previous)

    def expected_kl(self, features) -> float | None:
        """Expected KL in nats of a request with these features; `None` without a predictor."""
        return None if self.predictor is None else self.predictor.expected_kl(features)

    def margin(self, bound: float, label: str | None = None, alpha: float | None = None) -> float:
        """Margin of the rule for any `bound`; infinity means always full, and `shortfall` may say why."""
        alpha = self._checked(label, alpha)
        if self.predictor is None:
            return math.inf
        if self.origin == "builtin":
            groups = [tuple(self.labels), *((name,) for name in self.labels if self._is_enough(name, alpha))]
            return max((self._margin(group, bound, alpha) for group in groups), default=math.inf)
        own = label is not None and self._is_enough(label, alpha)
        return self._margin((label,) if own else tuple(self.labels), bound, alpha)

    def always_full(self, bound: float, label: str | None = None, alpha: float | None = None) -> bool:
        """Whether the rule can end in nothing but a full prefill, so that no level need be tried."""
        return self.predictor is None or bound == 0 or self.margin(bound, label, alpha) == math.inf

    def shortfall(self, label: str | None = None, alpha: float | None = None) -> str | None:
        """Why every request is a full prefill, one sentence, if it is for lack of prompts; else `None`."""
        alpha = self._checked(label, alpha)
        if self.predictor is None:
            return "max_kl is not calibrated: every request under a bound is a full prefill; see cache.calibrate"
        if self.num_prompts < smallest_sample(alpha):
            return (
                f"alpha={alpha:g} needs at least {smallest_sample(alpha)} calibration prompts for the margin, there "
                f"are {self.num_prompts}: every request under a bound is a full prefill"
            )
        return None

    def describe(self) -> str:
        """One line: where the margins come from, alpha, sample sizes, labels."""
        if self.predictor is None:
            return "max_kl: not calibrated, always a full prefill; cache.calibrate(model, prompts) sets it"
        counts = []
        for label in self.labels:
            pooled = "" if self._is_enough(label, self.alpha) else ", pooled"
            counts.append(f"{label} ({len(self.samples[label])}{pooled})")
        where = {
            "prompts": "calibrated on the caller's prompts",
            "builtin": "built-in conservative values, no guarantee for other prompts or models",
        }.get(self.origin, self.origin)
        model = f"; {self.fingerprint}" if self.fingerprint else ""
        return (
            f"max_kl: {where}; alpha {self.alpha:g}, {self.num_prompts} prompts for the margin, "
            f"{self.predictor.num_prompts} for the predictor; labels: {', '.join(counts)}{model}"
        )

    def save(self, path) -> None:
        """Write JSON to `path`, atomically."""
        write(path, self.to_dict())

    @classmethod
    def load(cls, path, fingerprint: str | None = None) -> "Calibration":
        """
        Read what `save` wrote. `ValueError` if the file is damaged, changed, of another version, or, with
        `fingerprint` given, made for another model or other settings.
        """
        data = read(path)
        try:
            loaded = cls.from_dict(data)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} can't be used: {error} Calibrate and save again.") from error
        if fingerprint is not None and fingerprint != loaded.fingerprint:
            raise ValueError(
                f"{path} was calibrated for {loaded.fingerprint!r}, not for {fingerprint!r}; calibrate this one."
            )
        return loaded

    def to_dict(self) -> dict:
        """JSON-ready form."""
        samples = {
            label: {"base": sample.base.tolist(), "kls": sample.kls.tolist()} for label, sample in self.samples.items()
        }
        predictor = None if self.predictor is None else self.predictor.to_dict()
        names = {"alpha": self.alpha, "fingerprint": self.fingerprint, "origin": self.origin}
        return {**names, "predictor": predictor, "samples": samples}

    @classmethod
    def from_dict(cls, data: dict) -> "Calibration":
        """The inverse of `to_dict`; `ValueError` naming what is wrong."""
        samples = {}
        if not isinstance(data.get("samples"), dict) or not isinstance(data.get("fingerprint"), str):
            raise ValueError("field 'samples' must be an object and 'fingerprint' a string.")
        for label, fields in data["samples"].items():
            sample = Sample(
                numbers(fields, "base", (None, 2, len(APPROXIMATE))), numbers(fields, "kls", (None, len(LEVELS)))
            )
            if len(sample.base) != len(sample.kls) or (sample.kls < 0).any():
                raise ValueError(f"label {label!r} must hold as many predictions as KLs, and no KL below 0.")
            samples[label] = sample
        if "predictor" not in data:
            raise ValueError("field 'predictor' is missing.")
        predictor = None if data["predictor"] is None else Predictor.from_dict(data["predictor"])
        alpha = float(numbers(data, "alpha", ()))
        return cls(predictor, samples, alpha, data["fingerprint"], data.get("origin"))

    def _checked(self, label, alpha) -> float:
        alpha = self.alpha if alpha is None else alpha
        check_alpha(alpha)
        # Where nothing was calibrated everything is a full prefill, which is right whatever the label.
        if label is not None and self.predictor is not None and label not in self.samples:
            raise ValueError(
                f"workload {label!r} was not calibrated; the labels are {self.labels}, None takes them all."
            )
        return alpha

    def _is_enough(self, label, alpha) -> bool:
        return len(self.samples[label]) >= smallest_sample(alpha)

    def _margin(self, group: tuple[str, ...], bound, alpha) -> float:
        """Margin set on the prompts of the labels `group`. Kept: it costs milliseconds for each hundred prompts."""
        key = (group, float(bound), alpha)
        found = self._margins.get(key)  # one look: another thread may clear
        if found is None:
            if not group:
                return math.inf
            base = np.concatenate([self.samples[label].base for label in group])
            kls = np.concatenate([self.samples[label].kls for label in group])
            if len(self._margins) >= MARGINS_KEPT:  # a caller that asks for a new bound each time
                self._margins.clear()
            found = conformal.margin(forecasts(base, self.predictor.drops), kls, bound, alpha)
            self._margins[key] = found
        return found


def builtin() -> Calibration:
    """The package's own conservative values; without them a calibration that always goes to full and says so."""
    return Calibration.load(BUILTIN) if BUILTIN.exists() else Calibration.none()


def _num_fitted(num_prompts: int, alpha: float, fits: bool) -> int:
    """How many prompts the predictor is fitted on; `ValueError` if too few would be left for the margin."""
    least, others = smallest_sample(alpha), MIN_PROMPTS if fits else 0
    if num_prompts < least + others:
        raise ValueError(
            f"{num_prompts} prompts are too few: alpha={alpha:g} needs at least {least} to set the margin"
            + (f" and the predictor {others} others, {least + others} in all" if fits else "")
            + "; give more prompts or a larger alpha."
        )
    return min(max(MIN_PROMPTS, round(FIT_SHARE * num_prompts)), num_prompts - least) if fits else 0


def _spread(labels: list[str], count: int, random) -> np.ndarray:
    """`count` of the prompts, drawn evenly from every label, as a mask `[prompts]`."""
    order = sorted(random.permutation(len(labels)), key=lambda prompt: labels[prompt])  # stable: shuffled in a label
    chosen = np.zeros(len(labels), dtype=bool)
    places = np.floor((np.arange(count) + 0.5) * len(labels) / max(count, 1)).astype(int)
    chosen[np.array(order, dtype=int)[places]] = True
    return chosen
