"""How far rows look to the left: read when they are computed, kept beside them, asked for when they are moved."""

import numpy as np
import torch

from .attention import Probe, attention_weights
from .masks import query_blocks

DISTANCES = 2 ** np.arange(14) - 1  # 0, 1, 3 ... 8,191 rows


class ReachProbe(Probe):
    """
    Of every query the attention that goes to rows farther to the left than each of `DISTANCES`: mean over heads and
    layers. The first token is left out: on upper layers it gets most of the mass whatever stands there (30 to 77 % on
    SmolLM2-135M).

    Args:
        columns (`np.ndarray` of int, `[queries]`): Column of each query, among keys that lie in columns 0, 1, ...
        pads (`np.ndarray` of int, `[batch]`): Columns of left padding: where each row's first token is.
    """

    def __init__(self, columns: np.ndarray, pads: np.ndarray):
        super().__init__(len(columns), first_layer=0)
        self.columns, self.pads = columns, pads
        self._sum: torch.Tensor | None = None

    def read(self, module, query, key, mask, scaling, softcap) -> None:
        """Read one layer, query by query block: all weights at once would be `[heads, queries, keys]`."""
        if query.shape[2] != len(self.columns) or key.shape[2] <= int(self.columns[-1]):
            return  # not the rows that were announced
        parts = []
        batch, heads, queries, _ = query.shape
        for block in query_blocks(queries, key.shape[2], bytes_per_entry=4 * batch * heads):
            # `attention_weights` takes the last queries of a mask, so the block gets a mask of its own
            part = self._mask(mask, block, key.shape[2], query.device)
            weights = attention_weights(query[:, :, block], key, part, scaling, softcap).mean(dim=1)
            parts.append(self._beyond(weights, block))
        taken = torch.cat(parts, dim=1).cpu()
        self._sum = taken if self._sum is None else self._sum + taken
        self._layers += 1

    def reach(self) -> np.ndarray | None:
        """`[batch, queries, distances]`, float16; None if no layer could be read."""
        return None if self._sum is None else (self._sum / self._layers).half().numpy()

    def _mask(self, mask, block: slice, keys: int, device) -> torch.Tensor:
        if mask is not None:
            return mask[:, :, block]
        seen = torch.arange(keys, device=device) <= torch.from_numpy(self.columns[block]).to(device)[:, None]
        return seen[None, None]

    def _beyond(self, weights: torch.Tensor, block: slice) -> torch.Tensor:
        """Mass in columns below `column - distance`, of weights `[batch, queries, keys]`."""
        weights = weights.clone()
        weights[torch.arange(len(weights)), :, torch.from_numpy(self.pads)] = 0.0
        below = torch.nn.functional.pad(weights.cumsum(dim=-1), (1, 0))  # [..., k]: mass in columns [0, k)
        ends = np.maximum(self.columns[block][:, None] - DISTANCES, 0)
        index = torch.from_numpy(ends).to(weights.device)
        return below.gather(2, index.expand(len(weights), *index.shape))


def outside_mass(reach: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """
    Attention of rows to what lies more than `distance` rows to their left, `[rows]`, from their `[rows, distances]`:
    linear in the logarithm of the distance between those that were kept.
    """
    place = np.log2(distance + 1.0)
    low = np.minimum(place.astype(np.int64), len(DISTANCES) - 1)
    high, part = np.minimum(low + 1, len(DISTANCES) - 1), place - low
    rows, reach = np.arange(len(reach)), reach.astype(np.float64)
    return (1 - part) * reach[rows, low] + part * reach[rows, high]
