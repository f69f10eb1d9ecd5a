"""Repair the beginning of each run."""

from dataclasses import dataclass

import numpy as np

from .policy import RepairRequest, best


@dataclass(frozen=True)
class FirstRows:
    """
    The first rows of every run, equally many of each: LegoLink of EPIC (arXiv 2410.15332).

    Args:
        rows (`int`, *optional*): How many of each run, seam rows included (EPIC: 1 to 64, published with 16).
            Without it, as many as the budget of the call allows.
    """

    rows: int | None = None

    def __post_init__(self):
        if self.rows is not None and (isinstance(self.rows, bool) or not isinstance(self.rows, int)):
            raise TypeError(f"`rows` must be None or an integer, got {self.rows!r}.")
        if self.rows is not None and self.rows < 0:
            raise ValueError(f"`rows` must be None or at least 0, got {self.rows}.")

    def select(self, request: RepairRequest) -> np.ndarray:
        """The candidates nearest to their run's start."""
        if self.rows is not None:
            return request.candidates[request.distance < self.rows]
        return best(request, -request.distance.astype(float))
