"""Repair the rows that had looked outside of their own text."""

from dataclasses import dataclass

import numpy as np

from .policy import RepairRequest, best
from .question import known


@dataclass(frozen=True)
class OutsideMass:
    """
    The rows that gave most attention to text to the left of their run when they were computed.

    It tells without a probe which rows will deviate (Spearman 0.65 with the true deviation on SmolLM2-135M), but
    reading it takes the attention of every row that is stored, so only a cache made with this policy keeps it. Rows
    without it are ranked by their distance from the run's start.
    """

    needs_outside_mass = True

    def select(self, request: RepairRequest) -> np.ndarray:
        """The `spare` candidates of the largest outside mass."""
        rows = request.candidates
        if request.outside_mass is None or np.isnan(request.outside_mass[rows]).all():
            return best(request, -request.distance.astype(float))
        return best(request, known(request.outside_mass, rows))
