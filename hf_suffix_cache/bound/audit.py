"""Compares a share of answered requests with their full prefill, warns when a bound breaks, and tightens the rule."""

import math
import threading
from collections import deque
from dataclasses import dataclass

from .conformal import check_alpha

KEPT = 256  # newest records
Z95 = 1.959963984540054

# A break is told by a Shiryaev-Roberts statistic: at coverage 1 - alpha or better the mean number of audits until a
# false alarm is at least this many, however often one looks, and a break after a long good time is seen as fast as
# one from the start.
ALARM = 1000.0
ALTERNATIVES = 8

FIRST_MARGIN = math.log(2.0)  # least tightening once coverage has broken
STEP = 0.5  # a miss adds STEP * (1 - alpha), a hit takes STEP * alpha: at rest a share alpha of misses
MOST_MARGIN = 20.0  # beyond any KL: always full


@dataclass(frozen=True)
class AuditRecord:
    """Predicted and true KL of one request, nats, and the bound it was under (`None`: none)."""

    predicted: float
    true: float
    bound: float | None

    @property
    def is_covered(self) -> bool:
        return self.true <= self.bound


@dataclass(frozen=True)
class Coverage:
    """Share of the kept audited requests that held their bound, with Wilson's 95 % interval; 0 to 1 without any."""

    share: float
    low: float
    high: float
    count: int


class Auditor:
    """
    Chooses requests, keeps what came out, and steers `extra_margin`. Safe to use from several threads.

    The guarantee of a calibration is a share of *all* requests under a bound. So requests that the rule sent to a full
    prefill are counted too: ask `is_due` for every request under a bound, and record a due one that was run in full
    with `true=0.0`, which costs nothing.

    Args:
        rate (`float`): share of requests to audit, from 0 to 1; every 1/rate-th one, no random generator is used.
        alpha (`float`, *optional*, defaults to 0.1): tolerated share over the bound.
    """

    def __init__(self, rate: float, alpha: float = 0.1):
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            raise TypeError(f"`rate` must be a number from 0 to 1, got {rate!r}.")
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"`rate` must be from 0 to 1, got {rate}.")
        check_alpha(alpha)
        self.rate, self.alpha = float(rate), float(alpha)
        self._lock = threading.Lock()
        self._requests = 0
        self._records: deque[AuditRecord] = deque(maxlen=KEPT)
        self._rates = [alpha + (1.0 - alpha) * (step + 0.5) / ALTERNATIVES for step in range(ALTERNATIVES)]
        self._evidence = [0.0] * ALTERNATIVES
        self._extra_margin = 0.0
        self._warning: str | None = None

    def __repr__(self) -> str:
        held = self.coverage
        share = f"{held.share:.0%} of {held.count} under their bound held it" if held.count else "none under a bound"
        return f"<Auditor rate {self.rate:g}, {len(self.records)} kept, {share}, extra margin {self.extra_margin:.2f}>"

    def is_due(self) -> bool:
        """Count one request and say whether to audit it: the first one after 1/rate requests, then steadily."""
        with self._lock:
            before = self._passed(self._requests)
            self._requests += 1
            return self._passed(self._requests) > before

    def record(self, predicted: float, true: float, bound: float | None = None) -> AuditRecord:
        """
        Take in one audited request; returns what is kept of it. Without a bound that counts for no coverage.
        """
        record = AuditRecord(float(predicted), float(true), None if bound is None else float(bound))
        with self._lock:
            self._records.append(record)
            if record.bound is not None:
                self._weigh(record)
        return record

    @property
    def records(self) -> list[AuditRecord]:
        """The newest records, oldest first."""
        with self._lock:
            return list(self._records)

    @property
    def coverage(self) -> Coverage:
        """Over the kept records that were under a bound."""
        with self._lock:
            return self._coverage()

    @property
    def extra_margin(self) -> float:
        """What to add to the rule's margin (log scale): 0 while the coverage holds."""
        with self._lock:
            return self._extra_margin

    def warning(self) -> str | None:
        """A sentence, once for each time that coverage breaks beyond chance; else `None`."""
        with self._lock:
            text, self._warning = self._warning, None
            return text

    def _passed(self, requests: int) -> int:
        return math.floor(requests * self.rate + 1e-9)  # 100 requests at 0.29 are 29

    def _coverage(self) -> Coverage:
        bounded = [record for record in self._records if record.bound is not None]
        return wilson(sum(record.is_covered for record in bounded), len(bounded))

    def _weigh(self, record: AuditRecord) -> None:
        """Update the evidence, or, once tightened, the extra margin. Under the lock."""
        missed = not record.is_covered
        if self._extra_margin > 0.0:
            step = STEP * ((1.0 if missed else 0.0) - self.alpha)
            self._extra_margin = min(max(self._extra_margin + step, 0.0), MOST_MARGIN)
            return
        for place, rate in enumerate(self._rates):
            ratio = rate / self.alpha if missed else (1.0 - rate) / (1.0 - self.alpha)
            self._evidence[place] = (1.0 + self._evidence[place]) * ratio
        if sum(self._evidence) / ALTERNATIVES >= ALARM:
            self._break()

    def _break(self) -> None:
        """Coverage broke: say so once, and tighten by what would have covered the kept requests."""
        coverage = self._coverage()
        self._evidence = [0.0] * ALTERNATIVES
        self._extra_margin = min(max(FIRST_MARGIN, self._missing_margin()), MOST_MARGIN)
        self._warning = (
            f"the bound held in {coverage.share:.0%} of the {coverage.count} newest audited requests (95 % "
            f"interval {coverage.low:.0%} to {coverage.high:.0%}), less than the {1.0 - self.alpha:.0%} asked for, "
            f"beyond chance. The rule is tightened by a factor of {math.exp(self._extra_margin):.1f}; "
            "calibrate on such prompts."
        )

    def _missing_margin(self) -> float:
        """The (1 - alpha)-quantile of log(true KL / bound) over the newest audits since coverage may have broken."""
        bounded = [record for record in self._records if record.bound is not None]
        newest = bounded[-max(10, math.ceil(2.0 / self.alpha)) :]
        excess = sorted(_log_ratio(record) for record in newest)
        return excess[min(math.ceil((1.0 - self.alpha) * (len(excess) + 1)), len(excess)) - 1]


def wilson(covered: int, count: int) -> Coverage:
    """Wilson's 95 % interval of a share."""
    if count == 0:
        return Coverage(math.nan, 0.0, 1.0, 0)
    share, z2 = covered / count, Z95**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return Coverage(share, max(0.0, centre - half), min(1.0, centre + half), count)


def _log_ratio(record: AuditRecord) -> float:
    if record.is_covered:
        return 0.0
    if not record.bound > 0.0 or not record.true < math.inf:  # also a true KL of NaN: nothing is known, tighten most
        return MOST_MARGIN
    return math.log(record.true / record.bound)
