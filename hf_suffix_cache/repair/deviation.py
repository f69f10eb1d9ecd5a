"""Repair the rows whose own values changed most, filtered layer by layer."""

from dataclasses import dataclass

import numpy as np

from .policy import RepairRequest

TAPER = 0.3  # how far the first filtered layer is above the mean ratio, and the last below


@dataclass(frozen=True)
class Deviation:
    """
    CacheBlend (arXiv 2405.16444): all rows run through the first two layers; the share `ratio` of the shifted rows
    whose second-layer keys or values differ most (squared) from the stored ones goes on.

    Unlike the published code, whose bottom-right mask lets recomputed rows see later tokens, every row here sees
    exactly what stands to its left.

    Args:
        ratio (`float`, defaults to 0.15): Share of the shifted rows, mean over the layers behind the second; published
            with 0.15. 1.0 is a full prefill.
        of (`str`, defaults to `"keys"`): What is compared, `"keys"` or `"values"`.
        gradual (`bool`, defaults to True): The paper's gradual filter: from layer to layer fewer rows, each time those
            that deviate most in the layer before. The paper gives no schedule; here the share falls evenly from
            1.3 to 0.7 times the ratio.
    """

    ratio: float = 0.15
    of: str = "keys"
    gradual: bool = True
    filters_layers = True

    def __post_init__(self):
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, (int, float)):
            raise TypeError(f"`ratio` must be a number from 0 to 1, got {self.ratio!r}.")
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"`ratio` must be from 0 to 1, got {self.ratio}.")
        if self.of not in ("keys", "values"):
            raise ValueError(f"`of` must be 'keys' or 'values', got {self.of!r}.")

    def select(self, request: RepairRequest) -> np.ndarray:
        """No row beforehand: `rows_after` filters them while they run."""
        return np.empty(0, dtype=np.int64)

    def share(self, layer: int, num_layers: int) -> float:
        """Share of the shifted rows that goes on to the layers behind `layer` (counted from 0)."""
        if layer < 1 or self.ratio == 1:
            return 1.0
        if not self.gradual or num_layers <= 3:
            return self.ratio
        part = (layer - 1) / (num_layers - 3)  # the last filter stands before the last layer
        return min(1.0, self.ratio * (1 + TAPER * (1 - 2 * part)))

    def filters(self, layer: int, num_layers: int) -> bool:
        """Whether rows leave behind `layer`."""
        return 1 <= layer < num_layers - 1 and (self.gradual or layer == 1) and self.ratio < 1

    def rows_after(
        self, layer: int, num_layers: int, deviation: np.ndarray, num_shifted: int, num_seams: int
    ) -> np.ndarray:
        """
        Which of the rows that ran through `layer` go on: indices into `deviation`, ascending.

        Args:
            deviation (`np.ndarray` of float, `[rows]`): Squared difference of their stored and fresh keys or values.
            num_shifted (`int`): Shifted rows of the prompt, of which the shares are taken.
            num_seams (`int`): Seam rows, which go on in any case and count in the shares.
        """
        wanted = max(0, int(np.ceil(self.share(layer, num_layers) * num_shifted - 1e-9)) - num_seams)
        return np.sort(np.argsort(-deviation, kind="stable")[:wanted])
