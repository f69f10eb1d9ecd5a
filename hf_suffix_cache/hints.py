"""What a process is told once: how it might use the cache better."""

import logging

from .bound import Calibration
from .report import ReuseReport

logger = logging.getLogger("hf_suffix_cache")

HARD_KL = 0.1  # nats; expected of few-shot examples in new order, five times what passages show
_said: set[str] = set()  # hints that this process has given


def say_once(what: str, message: str) -> None:
    """Log a warning, once in a process for each `what`."""
    if what not in _said:
        _said.add(what)
        logger.warning(message)


def say_approximate() -> None:
    """An answer used moved rows."""
    say_once(
        "approximate",
        'this answer is approximate: it used moved rows. SuffixCache(fidelity="exact") never does that.',
    )


def say_hard(calibration: Calibration, report: ReuseReport) -> None:
    """An answer is expected to be far off, by a calibration that knows such prompts."""
    # the built-in values are never low where they have seen nothing, which would cry wolf
    known = calibration.origin == "prompts" and report.expected_kl is not None
    if known and report.expected_kl > HARD_KL:
        say_once(
            "hard",
            f"an answer's expected KL is {report.expected_kl:.2f} nats: its text is hard to move. State a bound "
            '(`max_kl`), raise `repair_fraction`, or use fidelity="exact" for such prompts.',
        )


def say_short_lived(calls: list[int]) -> None:
    """A cache was dropped after one call."""
    if calls[0] == 1:
        say_once(
            "short-lived",
            "a SuffixCache was dropped after one call: made for each call it is empty. Make it once and keep it.",
        )
