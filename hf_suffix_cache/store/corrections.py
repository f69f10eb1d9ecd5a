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
    that it belongs to, turned by `shift[i]`. `kept`, bool `[targets]`, says which targets it still corrects.

    Where only a part of it is left, the drift stays whole: products of other shapes would round otherwise, and the
    rows that are gathered again would not be the same to the bit.
    """

    drift: Drift
    which: np.ndarray
    offset: np.ndarray
    shift: np.ndarray
    kept: np.ndarray

    @property
    def anchors(self) -> np.ndarray:
        """Anchors that are left: the first ones."""
        return self.drift.anchors[: len(self.which)]

    @property
    def targets(self) -> np.ndarray:
        """Targets that are left."""
        return self.drift.targets[self.kept]

    def only(self, rows: np.ndarray) -> "Correction":
        """The part of it that corrects these rows: bool by position, of all that are left."""
        kept = self.kept.copy()
        kept[kept] = rows[self.targets]
        return replace(self, kept=kept)

    def head(self, length: int) -> "Correction":
        """The part of it that lies before position `length`: what stands behind has no part in that."""
        inside, kept = self.anchors < length, self.kept & (self.drift.targets < length)
        return Correction(self.drift, self.which[inside], self.offset[inside], self.shift[inside], kept)

    def renumbered(self, number: Callable[[np.ndarray], np.ndarray]) -> "Correction":
        """The same where segments have other numbers."""
        return replace(self, which=number(self.which).astype(np.int32))
