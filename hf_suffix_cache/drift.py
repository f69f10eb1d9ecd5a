"""
Drift correction: what repair shows of the rows beside the repaired ones.

The difference that a new left context makes to a row's key (before rotation) and value is alike in all rows of a
moved run: on SmolLM2-135M (7 prompts of five passages) the keys' differences of two rows correlate by 0.57 side by
side, 0.43 at a distance of 16 and 0.37 at 64, the values' by 0.33, 0.17 and 0.13; rows of different runs do not
correlate. So the differences of the repaired rows, which are known, are a sample of a field over the run, and the best
linear estimate of it at the other rows (simple kriging) is added to them while the repair runs, layer by layer. It
costs no row. Only repaired rows to the left of a row have a part in its correction, so that no row learns anything of
text behind it.
"""

from collections.abc import Sequence

import numpy as np
import torch

from .rope import RotarySpec, rotation, turn
from .store.corrections import Drift
from .store.gather import copy_rows
from .store.shelf import Recipe
from .view import View, ViewLayer

# Correlation of the differences of two rows of a run by their distance: COMMON + LOCAL * exp(-distance / REACH), for
# keys and values; the rest is the row's own. Their size falls with the distance from the run's start: 2.4 times the
# mean at the first row, 0.8 times behind the 64th.
COMMON = {"keys": 0.42, "values": 0.17}
LOCAL = 0.12
REACH = 8.0
SIZE_POWER = -0.25
NEIGHBOURS = 16  # nearest repaired rows to the left that a correction is made from
BLOCK = 512  # targets that one product corrects


def blocks(drift: Drift, slot: str) -> list[tuple[slice, slice, np.ndarray]]:
    """
    Targets, anchors, and weights `[targets, anchors]` in fp64 for `"keys"` or `"values"`, run by run; runs without
    anchors have none.
    """
    found = []
    for start in np.unique(drift.run_start[drift.targets]).tolist():
        anchors, targets = (_range(rows, drift.run_start, start) for rows in (drift.anchors, drift.targets))
        if anchors.start == anchors.stop:
            continue
        for first in range(targets.start, targets.stop, BLOCK):
            part = slice(first, min(first + BLOCK, targets.stop))
            weights = weights_of(drift.anchors[anchors], drift.targets[part], COMMON[slot])
            sizes = [(1.0 + rows - start) ** SIZE_POWER for rows in (drift.targets[part], drift.anchors[anchors])]
            found.append((part, anchors, weights * (sizes[0][:, None] / sizes[1])))
    return found


def _range(rows: np.ndarray, run_start: np.ndarray, start: int) -> slice:
    """Where the rows of one run lie in ascending `rows`: runs don't overlap."""
    inside = np.flatnonzero(run_start[rows] == start)
    return slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(0, 0)


def correlation(distance: np.ndarray, common: float) -> np.ndarray:
    """Of the differences of two rows of a run."""
    return common + LOCAL * np.exp(-np.abs(distance) / REACH) + (1 - common - LOCAL) * (distance == 0)


def weights_of(anchors: np.ndarray, targets: np.ndarray, common: float) -> np.ndarray:
    """
    Weights `[targets, anchors]` of the best linear estimate of the differences at `targets` from those at the nearest
    `anchors` to the left of each; all ascending positions of one run.
    """
    place = np.searchsorted(anchors, targets)[:, None] - 1 - np.arange(min(NEIGHBOURS, len(anchors)))
    valid = place >= 0
    near = anchors[np.maximum(place, 0)]
    between = correlation(near[:, :, None] - near[:, None, :], common)
    between = np.where(valid[:, :, None] & valid[:, None, :], between, np.eye(near.shape[1]))
    towards = np.where(valid, correlation(targets[:, None] - near, common), 0.0)
    solved = np.linalg.solve(between, towards[:, :, None])[:, :, 0]
    weights = np.zeros((len(targets), len(anchors)))
    row, column = np.nonzero(valid)
    weights[row, place[row, column]] = solved[row, column]
    return weights


class DriftCorrection:
    """
    Adds the estimated differences while the repaired rows are written.

    Args:
        view (`View`): Whose rows are corrected.
        drift (`Drift`): Of one prompt.
        pad (`int`): Columns before its first position.
        batch_rows (sequence of `int`): The batch rows of the prompt.
        frequencies (`dict`): Live inverse frequencies by `RotarySpec`.
        kept (`np.ndarray` of bool, `[targets]`, *optional*): Which targets are corrected.
    """

    def __init__(
        self,
        view: View,
        drift: Drift,
        pad: int,
        batch_rows: Sequence[int],
        frequencies: dict[RotarySpec, torch.Tensor],
        kept: np.ndarray | None = None,
    ):
        self.drift = drift
        self.kept = np.arange(len(drift.targets)) if kept is None else np.flatnonzero(kept)
        self.batch_rows = batch_rows
        self.frequencies = frequencies
        self.anchors = drift.anchors + pad
        self.targets = drift.targets + pad
        self.blocks = {slot: blocks(drift, slot) for slot in COMMON}
        self.shapes = dict(zip((layer.index for layer in view.own_layers), view.shelf.pool.shapes, strict=True))
        self._columns: np.ndarray | None = None
        self._here: tuple[np.ndarray, np.ndarray] = (self.anchors[:0], self.anchors[:0])
        self._before: dict[tuple, torch.Tensor] = {}  # differences at the anchors of earlier pieces of this forward
        self._turns: dict[tuple, tuple] = {}
        self._on_device: dict[tuple, tuple] = {}

    @torch.no_grad()
    def see(self, layer: ViewLayer, columns: np.ndarray, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take one layer's fresh rows, `[batch, kv_heads, columns, head_dim]`, and correct that layer's targets."""
        # keys and values of layer 0 depend on token and position alone
        if layer.index == 0 or not self.blocks["keys"]:
            return
        if columns is not self._columns:
            place = np.minimum(np.searchsorted(columns, self.anchors), len(columns) - 1)
            found = columns[place] == self.anchors
            self._columns, self._here = columns, (np.flatnonzero(found), place[found])
        if len(self._here[0]) == 0:
            return
        for slot, states in (("keys", keys), ("values", values)):
            for row in self.batch_rows:
                self.correct(layer, slot, row, states[row], *self._here)

    def correct(
        self, layer: ViewLayer, slot: str, row: int, states: torch.Tensor, here: np.ndarray, place: np.ndarray
    ) -> None:
        """
        Correct one slot (`"keys"` or `"values"`) of one batch row: `place` says where in `states`, `[kv_heads,
        columns, head_dim]`, the fresh rows of the anchors numbered `here` are. Where a pass runs in pieces, each is
        given the anchors behind those of the piece before it, and corrects the targets up to the anchors to come: a
        target is written once, and gets the same bits as in one piece.
        """
        spec = self.shapes[layer.index].rotary if slot == "keys" else self.shapes[layer.index].value_rotary
        device = states.device
        anchors, targets, kept, blocks = self._placed(slot, device)
        borders = self.anchors[here[0]], self.anchors[min(here[-1] + 1, len(self.anchors) - 1)]
        first, stop = np.searchsorted(self.targets[self.kept], borders).tolist()
        final = here[-1] + 1 == len(self.anchors)
        mine = slice(first if here[0] else 0, None if final else stop)
        here, place = (torch.from_numpy(index).to(device) for index in (here, place))
        buffer = layer.buffer(slot)[row]
        fresh = states.index_select(1, place).float()
        difference = self._before.pop((layer.index, slot, row), None)
        if difference is None:
            difference = fresh.new_zeros(states.shape[0], len(anchors), states.shape[-1])
        difference[:, here] = fresh - buffer.index_select(1, anchors[here]).float()
        if not final:
            self._before[layer.index, slot, row] = difference
        if spec is not None:
            difference = turn(difference, *self._turn(spec, "anchors", device), spec)
        estimate = difference.new_zeros(states.shape[0], len(self.targets), states.shape[-1])
        for rows, columns, weights in blocks:
            estimate[:, rows] = weights @ difference[:, columns]
        if spec is not None:
            estimate = turn(estimate, *self._turn(spec, "targets", device), spec)
        targets = targets[mine]
        corrected = buffer.index_select(1, targets).float() + estimate.index_select(1, kept[mine])
        buffer.index_copy_(1, targets, corrected.to(buffer.dtype))

    def _placed(self, slot: str, device: torch.device) -> tuple:
        """Columns of anchors and kept targets, which targets are kept, and the slot's blocks, on a device."""
        if (slot, device) not in self._on_device:
            rows = (self.anchors, self.targets[self.kept], self.kept)
            columns = [torch.from_numpy(each).to(device) for each in rows]
            blocks = [(*part[:2], torch.from_numpy(part[2]).float().to(device)) for part in self.blocks[slot]]
            self._on_device[slot, device] = *columns, blocks
        return self._on_device[slot, device]

    def _turn(self, spec: RotarySpec, rows: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine that take anchors' keys to position 0, or targets' keys from there."""
        if (spec, rows, device) not in self._turns:
            positions = -self.drift.anchors if rows == "anchors" else self.drift.targets
            frequencies = spec.sign * self.frequencies[spec].to(device)
            self._turns[spec, rows, device] = rotation(torch.from_numpy(positions), frequencies, torch.float32)
        return self._turns[spec, rows, device]


@torch.no_grad()
def replay(view: View, served: Recipe, number: int, pad: int, frequencies: dict[RotarySpec, torch.Tensor]) -> None:
    """
    Correct rows that were gathered by a stored recipe as they were corrected in the call that it is of.

    Args:
        view (`View`): Batch row `number`, behind `pad` columns of padding, holds the recipe's rows uncorrected.
        served (`Recipe`): With its `drifts`. Where their anchors come from is the call's own, repaired rows.
    """
    pool, extent = view.shelf.pool, view.extent
    anchors = np.unique(np.concatenate([correction.anchors for correction in served.drifts]))
    repaired = pool.allocate_private(len(anchors))
    rows = np.arange(len(anchors))
    copy_rows(pool, served.addresses_of(anchors), repaired, 0, rows, np.zeros_like(rows), {})
    steps = []
    for correction in served.drifts:
        source = Recipe(served.segments, correction.which, correction.offset, correction.shift)
        addresses = source.addresses_of(np.arange(len(source)))
        copy_rows(pool, addresses, extent, number, pad + correction.anchors, correction.shift, frequencies)
        place = np.searchsorted(anchors, correction.anchors)
        step = DriftCorrection(view, correction.drift, pad, [number], frequencies, correction.kept)
        steps.append((step, np.arange(len(place)), place))
    for index, layer in enumerate(view.own_layers):
        for slot, tensor in zip(("keys", "values"), pool.layer_tensors(repaired.slab, index), strict=True):
            states = repaired.layer_view(tensor)[0, :, : len(anchors)]
            for correction, here, place in steps:
                if layer.index > 0 and correction.blocks["keys"]:
                    correction.correct(layer, slot, number, states, here, place)
            columns = torch.from_numpy(pad + anchors).to(states.device)
            layer.buffer(slot)[number].index_copy_(1, columns, states)
