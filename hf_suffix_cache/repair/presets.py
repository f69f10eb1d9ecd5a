"""Which policy a fidelity stands for."""

from .first_rows import FirstRows
from .question import QuestionAttention


def preset(fidelity: str, repair, repair_fraction: float) -> tuple[object, float]:
    """The policy and the share of shifted rows of a fidelity; a policy of the caller's overrides the preset."""
    fast = fidelity == "fast"
    policy = repair if repair is not None else FirstRows() if fast else QuestionAttention()
    return policy, repair_fraction / 2 if fast else repair_fraction
