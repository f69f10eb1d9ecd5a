"""Repair nothing."""

import numpy as np

from .policy import RepairRequest


class NoRepair:
    """Nothing but the seam rows."""

    def select(self, request: RepairRequest) -> np.ndarray:
        """No row."""
        return np.empty(0, dtype=np.int64)
