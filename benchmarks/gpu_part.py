"""What a part of the GPU check has at hand."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.common import Options, Results, seconds


class NotRun(Exception):
    """A part can't be run here; the words say why."""


@dataclass
class Part:
    """
    One part of the check.

    Args:
        name (`str`): Of the part; it begins the `case` of its rows.
        device (`torch.device`): What it runs on.
        options (`Options`): Of the command line.
    """

    name: str
    device: torch.device
    options: Options
    checked: int = 0

    @property
    def dry(self) -> bool:
        """Whether this only shows that the script runs."""
        return self.device.type == "cpu"

    def size(self, full: int, dry: int) -> int:
        """A size on a GPU, and in a dry run."""
        return dry if self.dry else full

    def require(self, right: bool, words: str) -> None:
        """Count a check, and stop the part if it failed."""
        self.checked += 1
        if not right:
            raise AssertionError(words)

    def results(self, model: str = "", dtype: str = "") -> Results:
        """Where figures go."""
        return Results("gpu", model, dtype, self.options)

    def median(self, function: Callable[[], object]) -> float:
        """Median of seconds over a few calls, after one that warms up."""
        function()
        return float(np.median([seconds(function) for _ in range(self.options.n)]))
