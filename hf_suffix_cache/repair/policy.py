"""What a repair policy sees of a prompt, and what all of them share."""

import math
from dataclasses import dataclass

import numpy as np

PROBE_QUERIES = 8
MIN_PROBE_QUERIES = 4


@dataclass(frozen=True)
class RepairRequest:
    """
    What a policy sees of one prompt.

    Args:
        shifted (`np.ndarray` of bool, `[tokens]`): Rows that were moved.
        seams (`np.ndarray` of bool, `[tokens]`): Seam rows: recomputed whatever the policy says.
        run_start (`np.ndarray` of int, `[tokens]`): For a shifted row, where its run (since the last seam) starts.
        budget (`int`): Rows to recompute, seam rows included.
        attention (`np.ndarray` of float, `[tokens]`, *optional*): Mean attention of the prompt's last queries, over
            heads and the upper half of the layers; given to policies with `needs_attention`.
        deviation (`np.ndarray` of float, `[tokens]`, *optional*): Squared difference of each shifted row's key and
            value in the second layer from what a full prefill gives there, each relative to the mean square of the
            fresh ones; NaN elsewhere. Given to policies with `needs_deviation`, at the cost of two layers of all rows.
        outside_mass (`np.ndarray` of float, `[tokens]`, *optional*): Attention that each shifted row gave to text to
            the left of its run when it was computed; NaN where that was not kept. Given to policies with
            `needs_outside_mass`, for rows that were stored by a cache with such a policy.
    """

    shifted: np.ndarray
    seams: np.ndarray
    run_start: np.ndarray
    budget: int
    attention: np.ndarray | None = None
    deviation: np.ndarray | None = None
    outside_mass: np.ndarray | None = None

    @property
    def candidates(self) -> np.ndarray:
        """Positions of shifted rows that are not seam rows."""
        return np.flatnonzero(self.shifted & ~self.seams)

    @property
    def spare(self) -> int:
        """Rows left to choose after the seam rows."""
        return max(0, self.budget - int(self.seams.sum()))

    @property
    def distance(self) -> np.ndarray:
        """Rows between each candidate and its run's start: `[candidates]`."""
        rows = self.candidates
        return rows - self.run_start[rows]


def best(request: RepairRequest, score: np.ndarray) -> np.ndarray:
    """The `spare` candidates of the highest score, `[candidates]`, in ascending order; ties go to the left."""
    order = np.argsort(-score, kind="stable")
    return np.sort(request.candidates[order[: request.spare]])


def budget(num_shifted: int, fraction: float) -> int:
    """Rows to recompute out of `num_shifted`."""
    return math.ceil(num_shifted * fraction - 1e-9)
