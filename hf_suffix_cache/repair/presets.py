"""Which policy a fidelity stands for."""

from collections.abc import Iterable

import numpy as np

from .first_rows import FirstRows
from .policy import RepairRequest
from .question import QuestionAttention

# Text in short runs is harder to move: nine few-shot examples of about 70 tokens in a new order have a first-token KL
# of 0.104 with 10 % of their rows repaired and 0.039 with 30 %, passages of about 120 tokens 0.016 and 0.007
# (SmolLM2-135M, 24 and 40 prompts, `benchmarks/results/fidelity.csv`).
SHORT_RUN = 80  # tokens, mean over the runs of a prompt
MANY_ROWS = 256  # moved rows below which a prompt is cheap either way


def preset(fidelity: str, repair, repair_fraction: float) -> tuple[object, float]:
    """The policy and the share of shifted rows of a fidelity; a policy of the caller's overrides the preset."""
    fast = fidelity == "fast"
    policy = repair if repair is not None else FirstRows() if fast else QuestionAttention()
    return policy, repair_fraction / 2 if fast else repair_fraction


def fraction_for(requests: Iterable[RepairRequest], fraction: float) -> float:
    """The share of shifted rows to repair by question attention: twice `fraction` where text came in short runs."""
    starts = [request.run_start[request.shifted] for request in requests]
    rows, runs = sum(map(len, starts)), sum(len(np.unique(each)) for each in starts)
    hard = rows >= MANY_ROWS and rows < SHORT_RUN * runs
    return min(1.0, 2 * fraction) if hard else fraction
