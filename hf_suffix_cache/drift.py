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
from dataclasses import dataclass

import numpy as np
import torch

from .differences import Places, Turn, add_rows, take_differences
from .rope import RotarySpec, rotation
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
BLOCK = 256  # targets that one product corrects


def blocks(drift: Drift, slot: str) -> list[tuple[slice, slice, np.ndarray]]:
    """
    Targets, anchors, and weights `[targets, anchors]` in fp64 for `"keys"` or `"values"`, run by run. Targets without
    an anchor to their left are in none.
    """
    found = []
    for start in np.unique(drift.run_start[drift.anchors]).tolist():
        anchors, targets = (_range(rows, drift.run_start, start) for rows in (drift.anchors, drift.targets))
        rows, known = drift.targets[targets], drift.anchors[anchors]
        left = np.searchsorted(known, rows)  # anchors to the left of each target
        for first in range(int(np.searchsorted(left, 1)), len(rows), BLOCK):
            last = min(first + BLOCK, len(rows))
            part, near = rows[first:last], slice(max(0, int(left[first]) - NEIGHBOURS), int(left[last - 1]))
            weights = weights_of(known[near], part, COMMON[slot])
            sizes = [(1.0 + each - start) ** SIZE_POWER for each in (part, known[near])]
            where = slice(targets.start + first, targets.start + last)
            used = slice(anchors.start + near.start, anchors.start + near.stop)
            found.append((where, used, weights * (sizes[0][:, None] / sizes[1])))
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
    # targets between the same two anchors have the same nearest ones: one matrix is inverted for all of them
    left, which = np.unique(np.searchsorted(anchors, targets), return_inverse=True)
    place = left[:, None] - 1 - np.arange(min(NEIGHBOURS, len(anchors)))
    valid = place >= 0
    near = anchors[np.maximum(place, 0)]
    between = correlation(near[:, :, None] - near[:, None, :], common)
    between = np.where(valid[:, :, None] & valid[:, None, :], between, np.eye(near.shape[1]))
    towards = np.where(valid[which], correlation(targets[:, None] - near[which], common), 0.0)
    solved = (np.linalg.inv(between)[which] @ towards[:, :, None])[:, :, 0]
    weights = np.zeros((len(targets), len(anchors)))
    row, column = np.nonzero(valid[which])
    weights[row, place[which][row, column]] = solved[row, column]
    return weights


@dataclass(frozen=True, eq=False)
class Piece:
    """
    What one forward, or one piece of it, brings and corrects.

    Args:
        place (`Places`), anchors (`Places`): The fresh rows of the anchors numbered `anchors` among those it computes.
        columns (`Places`): Their columns.
        targets (`Places`), rows (`Places`): The targets that it corrects, and their columns.
        final (`bool`): Whether no anchor is to come.
    """

    place: Places
    anchors: Places
    columns: Places
    targets: Places
    rows: Places
    final: bool


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
        self.batch_rows = batch_rows
        self.frequencies = frequencies
        self.pad = pad
        self.blocks = {slot: blocks(drift, slot) for slot in COMMON}
        self.shapes = dict(zip((layer.index for layer in view.own_layers), view.shelf.pool.shapes, strict=True))
        reached = np.zeros(len(drift.targets), dtype=bool)
        for targets, _, _ in self.blocks["keys"]:
            reached[targets] = True
        self.targets = np.flatnonzero(reached if kept is None else reached & kept)
        self._columns: np.ndarray | None = None
        self._piece: Piece | None = None
        self._before: dict[tuple, torch.Tensor] = {}  # differences at the anchors of earlier pieces of this forward
        self._turns: dict[tuple, Turn] = {}
        self._weights: dict[tuple, list] = {}
        self._sums: dict[tuple, torch.Tensor] = {}  # one layer's estimates, in memory that the next one takes over

    @torch.no_grad()
    def see(self, layer: ViewLayer, columns: np.ndarray, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take one layer's fresh rows, `[batch, kv_heads, columns, head_dim]`, and correct that layer's targets."""
        # keys and values of layer 0 depend on token and position alone
        if layer.index == 0 or len(self.targets) == 0:
            return
        if columns is not self._columns:
            anchors = self.drift.anchors + self.pad
            place = np.minimum(np.searchsorted(columns, anchors), len(columns) - 1)
            found = columns[place] == anchors
            self._columns, self._piece = columns, self.piece(np.flatnonzero(found), place[found])
        if self._piece is None:
            return
        for slot, states in (("keys", keys), ("values", values)):
            for row in self.batch_rows:
                self.correct(layer, slot, row, states[row], self._piece)

    def piece(self, anchors: np.ndarray, place: np.ndarray) -> Piece | None:
        """
        The anchors of these numbers, ascending, are rows `place` of a forward; None if there are none. Where a pass
        runs in pieces, each brings the anchors behind those of the piece before it, and corrects the targets up to the
        anchors to come: a target is written once, and gets the same bits as in one piece.
        """
        if len(anchors) == 0 or len(self.targets) == 0:
            return None
        final = int(anchors[-1]) + 1 == len(self.drift.anchors)
        borders = self.drift.anchors[[anchors[0], anchors[-1] if final else anchors[-1] + 1]]
        first, stop = np.searchsorted(self.drift.targets[self.targets], borders).tolist()
        mine = self.targets[first if anchors[0] else 0 : None if final else stop]
        columns = [rows + self.pad for rows in (self.drift.anchors[anchors], self.drift.targets[mine])]
        return Piece(*map(Places, (place, anchors, columns[0], mine, columns[1])), final)

    def correct(self, layer: ViewLayer, slot: str, row: int, states: torch.Tensor, piece: Piece) -> None:
        """
        Correct one slot (`"keys"` or `"values"`) of one batch row by the fresh rows `states`, `[kv_heads, columns,
        head_dim]`.
        """
        device, heads, dim = states.device, states.shape[0], states.shape[-1]
        spec = self.shapes[layer.index].rotary if slot == "keys" else self.shapes[layer.index].value_rotary
        buffer = layer.buffer(slot)[row]
        differences = self._before.pop((layer.index, slot, row), None)
        if differences is None:
            differences = states.new_zeros(len(self.drift.anchors), heads, dim, dtype=torch.float32)
        turned = self._turn(spec, "anchors", device)
        take_differences(states, piece.place, buffer, piece.columns, differences, piece.anchors, turned)
        if not piece.final:
            self._before[layer.index, slot, row] = differences
        if len(piece.targets) == 0:
            return
        estimate = self._sums.get((device, heads, dim))
        if estimate is None:
            estimate = differences.new_empty(len(self.drift.targets), heads, dim)
            self._sums[device, heads, dim] = estimate
        flat, sums = differences.view(len(differences), -1), estimate.view(len(estimate), -1)
        first, last = piece.targets.rows[[0, -1]].tolist()
        for targets, anchors, weights in self._on_device(slot, device):
            if targets.start <= last and targets.stop > first:
                torch.mm(weights, flat[anchors], out=sums[targets])
        add_rows(buffer, piece.rows, estimate, piece.targets, self._turn(spec, "targets", device))

    def _on_device(self, slot: str, device: torch.device) -> list:
        """The slot's blocks with weights in fp32 on a device."""
        if (slot, device) not in self._weights:
            parts = [(*part[:2], torch.from_numpy(part[2]).float().to(device)) for part in self.blocks[slot]]
            self._weights[slot, device] = parts
        return self._weights[slot, device]

    def _turn(self, spec: RotarySpec | None, rows: str, device: torch.device) -> Turn:
        """What takes anchors' keys to position 0, or targets' keys from there."""
        if spec is None:
            return None
        if (spec, rows, device) not in self._turns:
            positions = -self.drift.anchors if rows == "anchors" else self.drift.targets
            frequencies = spec.sign * self.frequencies[spec].to(device)
            tables = rotation(torch.from_numpy(positions), frequencies, torch.float32)
            self._turns[spec, rows, device] = *tables, spec
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
        piece = step.piece(np.arange(len(place)), place)
        if piece is not None:
            steps.append((step, piece))
    for index, layer in enumerate(view.own_layers):
        for slot, tensor in zip(("keys", "values"), pool.layer_tensors(repaired.slab, index), strict=True):
            states = repaired.layer_view(tensor)[0, :, : len(anchors)]
            for correction, piece in steps:
                if layer.index > 0:
                    correction.correct(layer, slot, number, states, piece)
            columns = torch.from_numpy(pad + anchors).to(states.device)
            layer.buffer(slot)[number].index_copy_(1, columns, states)
