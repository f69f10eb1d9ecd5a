"""What one call goes by: a calibration, with the call's own bound and workload."""

from dataclasses import dataclass

from .calibration import Calibration


@dataclass(frozen=True)
class Rule:
    """
    Args:
        calibration (`Calibration`): Predictor and margins.
        bound (`float`, *optional*): `max_kl` of the call; None: no bound, KL is only predicted.
        workload (`str`, *optional*): Label whose margin holds.
        extra_margin (`float`): What audits have added to the margin, log scale.
        foreign (`bool`): Whether the calibration belongs to another model or other settings: it predicts nothing then.
    """

    calibration: Calibration
    bound: float | None = None
    workload: str | None = None
    extra_margin: float = 0.0
    foreign: bool = False

    def check(self) -> None:
        """Raise `ValueError` for a bound whose workload was not calibrated."""
        if self.workload is not None and self.bound is not None and not self.foreign:
            self.calibration.margin(self.bound, self.workload)

    @property
    def always_full(self) -> bool:
        """Whether nothing but a full prefill can come of it."""
        return self.bound is None or self.foreign or self.calibration.always_full(self.bound, self.workload)

    def next_level(self, level: str, features: dict[str, float], previous: str | None = None) -> str | None:
        """The level that must be run after this one; None: this one holds the bound."""
        return self.calibration.next_level(level, features, self.bound, self.workload, previous, self.extra_margin)

    def expected_kl(self, features: dict[str, float]) -> float | None:
        """Predicted KL of the first new token in nats; None without a predictor."""
        return None if self.foreign else self.calibration.expected_kl(features)
