"""What a stored conversation remembers of the drift correction of its moved rows, to gather them again."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, eq=False)
class Drift:
    """
    What one pass corrects of one prompt (see `drift.py`): positions, not columns.

    Args:
        anchors (`np.ndarray` of int, ascending): Moved rows that the pass repairs.
        targets (`np.ndarray` of int, ascending): Moved rows that stay.
        run_start (`np.ndarray` of int, `[tokens]`): Start of the run of each moved row.
    """

    anchors: np.ndarray
    targets: np.ndarray
    run_start: np.ndarray


@dataclass(frozen=True, eq=False)
class Correction:
    """
    A drift, and what its anchors were before they were repaired: row `offset[i]` of `segments[which[i]]` of the recipe
    that it belongs to, turned by `shift[i]`.
    """

    drift: Drift
    which: np.ndarray
    offset: np.ndarray
    shift: np.ndarray

    def only(self, targets: np.ndarray) -> "Correction":
        """The part of it that corrects some of its targets: bool `[targets]`."""
        return replace(self, drift=replace(self.drift, targets=self.drift.targets[targets]))

    def head(self, length: int) -> "Correction":
        """The part of it that lies before position `length`: what stands behind has no part in that."""
        drift, inside = self.drift, self.drift.anchors < length
        targets = drift.targets[drift.targets < length]
        drift = Drift(drift.anchors[inside], targets, drift.run_start[:length])
        return Correction(drift, self.which[inside], self.offset[inside], self.shift[inside])

    def renumbered(self, number: Callable[[np.ndarray], np.ndarray]) -> "Correction":
        """The same where segments have other numbers."""
        return replace(self, which=number(self.which).astype(np.int32))
