"""Copying stored rows: gathered into an extent with their keys rotated, or drawn into running means."""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from ..building import library
from ..rope import RotarySpec, compute_dtype, rotate_keys, rotation
from .cold import decode, encode
from .pool import BlockPool, Extent, LayerShape, Slab

DIRECT_COPY_ROWS = 16  # mean run length from which slices beat index_select (SmolLM2 shapes, 2 cores)
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4}  # csrc/rows.cpp's
ARGUMENTS = 21  # of its rows_copy


@dataclass(frozen=True, eq=False)
class Runs:
    """
    Copies of neighbouring rows: `[source[i], source[i] + length[i])` goes to the rows from `target[i]` on, keys turned
    by `shift[i]` positions. All int64 `[runs]`; `source` are addresses, or rows of one slab.
    """

    source: np.ndarray
    target: np.ndarray
    length: np.ndarray
    shift: np.ndarray

    @classmethod
    def of(cls, source: np.ndarray, target: np.ndarray, shifts: np.ndarray) -> "Runs":
        """The longest runs of these rows, `[rows]` each, in their order."""
        cuts = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1) | (np.diff(shifts) != 0)) + 1
        starts = np.concatenate(([0], cuts)) if len(source) else np.empty(0, dtype=np.int64)
        length = np.diff(np.append(starts, len(source)))
        parts = source[starts], target[starts], length, shifts[starts]
        return cls(*(np.asarray(part, dtype=np.int64) for part in parts))

    def __len__(self) -> int:
        return len(self.source)

    def part(self, index: np.ndarray, rows: np.ndarray) -> "Runs":
        """These runs, whose sources are `rows` of one slab."""
        return Runs(rows, self.target[index], self.length[index], self.shift[index])

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Source, target and shift of each row, `[rows]` each."""
        within = np.arange(self.length.sum()) - np.repeat(np.cumsum(self.length) - self.length, self.length)
        source, target, shift = (np.repeat(part, self.length) for part in (self.source, self.target, self.shift))
        return source + within, target + within, shift


def copy_rows(
    pool: BlockPool,
    addresses: np.ndarray,
    target: Extent,
    row: int,
    columns: np.ndarray,
    shifts: np.ndarray,
    frequencies: dict[RotarySpec, torch.Tensor],
) -> None:
    """
    Gather stored rows into an extent, keys rotated by `shifts`, all layers of a group at a time. Rows that stay where
    they are (shift 0) keep their bits, unless one of both slabs keeps rows in a smaller dtype.

    Args:
        pool (`BlockPool`): Where the rows lie.
        addresses (`np.ndarray` of `[rows]`): Where the rows lie.
        target (`Extent`), row (`int`), columns (`np.ndarray` of `[rows]`): Where they go; each column once.
        shifts (`np.ndarray` of `[rows]`): Positions to move each key by.
        frequencies (`dict`): Live inverse frequencies by `RotarySpec`.
    """
    runs = Runs.of(addresses, target.start + row * target.rows + columns, shifts)
    for slab, first, index in pool.by_slab(runs.source):  # rows of two slabs are never neighbours
        part, turns = runs.part(index, first), {}
        for shape in pool.groups:
            if slab.cold or target.slab.cold:
                _recode(shape, slab, target.slab, part, frequencies)
                continue
            for source, goal, turn in _slots(shape, slab, target.slab, frequencies):
                if source.numel() and not _copy_compiled(source, goal, part, turn, turns):
                    _copy_reference(source, goal, part, turn)


def average_rows(
    pool: BlockPool,
    addresses: np.ndarray,
    means: np.ndarray,
    shifts: np.ndarray,
    counts: np.ndarray,
    frequencies: dict[RotarySpec, torch.Tensor],
) -> None:
    """
    Draw rows into running means: `mean += (row - mean) / (count + 1)`, keys rotated first. Sums are formed in fp32
    at least and rounded to the pool's dtype.

    Args:
        pool (`BlockPool`): Where the rows lie.
        addresses (`np.ndarray` of `[rows]`): The rows that are drawn in.
        means (`np.ndarray` of `[rows]`): The rows that hold the means, each once, all in one slab.
        shifts (`np.ndarray` of `[rows]`): Positions to move each key by.
        counts (`np.ndarray` of `[rows]`): How many rows each mean is of already.
        frequencies (`dict`): Live inverse frequencies by `RotarySpec`.
    """
    ((target, into, _),) = pool.by_slab(means)
    for slab, rows, index in pool.by_slab(addresses):
        for shape in pool.groups:
            for slot, spec in _specs(shape):
                turn = None if spec is None else (frequencies.get(spec), spec)
                _average(shape, slot, slab, rows, target, into[index], shifts[index], counts[index], turn)


def _specs(shape: LayerShape):
    """Each slot of layers of one shape, and how it rotates."""
    return ("keys", shape.rotary), ("values", shape.value_rotary)


def _slots(shape: LayerShape, slab: Slab, target: Slab, frequencies):
    """Source, target, and frequencies and spec if it is rotated, of the keys and the values of layers of one shape."""
    for slot, spec in _specs(shape):
        turn = None if spec is None else (frequencies.get(spec), spec)
        yield getattr(slab, slot)[shape], getattr(target, slot)[shape], turn


# -- compiled -------------------------------------------------------------------------------------------------------


def _copy_compiled(source: torch.Tensor, goal: torch.Tensor, runs: Runs, turn, turns: dict) -> bool:
    """One slot by the kernel; False, and nothing is done, if there is none for it. `turns` keeps tables."""
    device = source.device
    same = goal.dtype == source.dtype and goal.device == device  # rows of a mapped slab lie in the host's memory
    kernel = library("rows", device.type) if source.dtype in KINDS and same else None
    if kernel is None:
        return False
    which, cosines, sines, spec = _tables(runs, turn, source, turns)
    arrays = [runs.source, runs.target, runs.length, which]
    if device.type == "cpu":
        places, last = [array.ctypes.data for array in arrays], torch.get_num_threads()
    else:
        arrays[2] = runs.length.cumsum()  # csrc/rows.cu: its threads look up the run that they are in
        lists = torch.from_numpy(np.stack(arrays)).to(device)  # one transfer; freed behind the kernel, on its stream
        places, last = [part.data_ptr() for part in lists], torch.cuda.current_stream(device).cuda_stream
    if kernel.rows_copy.argtypes is None:
        kernel.rows_copy.argtypes, kernel.rows_copy.restype = [ctypes.c_int64] * ARGUMENTS, ctypes.c_int64
    layers, heads, _, dim = source.shape
    ends = [
        number
        for tensor in (source, goal)
        for number in (tensor.data_ptr(), *(step * tensor.itemsize for step in tensor.stride()[:2]))
    ]
    tables = (0, 0, 0, 0, 0)
    if spec is not None:
        start, interleaved = spec.start, int(spec.layout == "interleaved")
        tables = (cosines.data_ptr(), sines.data_ptr(), cosines.shape[1], start, interleaved)
    return kernel.rows_copy(*ends, layers, heads, dim, KINDS[source.dtype], len(runs), *places, *tables, last) == 0


def _tables(runs: Runs, turn, states: torch.Tensor, turns: dict) -> tuple:
    """
    Which row of the tables turns each run, -1 for none: int64 `[runs]`; cosine and sine of each shift, `[shifts,
    pairs]`, and the spec; None for these if nothing turns.
    """
    if turn is None or not runs.shift.any():
        return np.full(len(runs), -1, dtype=np.int64), None, None, None
    frequencies, spec = turn
    key = spec, states.dtype
    if key not in turns:
        shifts, which = np.unique(runs.shift, return_inverse=True)
        which = np.where(runs.shift != 0, which, -1)
        steps = spec.sign * frequencies.to(states.device)
        turns[key] = which, *rotation(torch.from_numpy(shifts), steps, compute_dtype(states)), spec
    return turns[key]


# -- reference ------------------------------------------------------------------------------------------------------


def _copy_reference(source: torch.Tensor, goal: torch.Tensor, runs: Runs, turn) -> None:
    """One slot by torch."""
    if runs.length.sum() >= DIRECT_COPY_ROWS * len(runs):
        _copy_runs(source, goal, runs, turn)
    else:
        _copy_scattered(source, goal, runs, turn)


def _copy_runs(source: torch.Tensor, goal: torch.Tensor, runs: Runs, turn) -> None:
    """Slice copies, one per run."""
    parts = (part.tolist() for part in (runs.source, runs.target, runs.length, runs.shift))
    for start, to, length, shift in zip(*parts, strict=True):
        states = source[:, :, start : start + length]
        if shift and turn is not None:
            states = rotate_keys(states, shift, *turn)
        goal[:, :, to : to + length] = states


def _copy_scattered(source: torch.Tensor, goal: torch.Tensor, runs: Runs, turn) -> None:
    """One indexed copy, each row with its own shift."""
    rows, destination, shifts = runs.rows()
    states = _turned(source.index_select(2, _index(rows, source)), shifts, turn)
    goal.index_copy_(2, _index(destination, goal), states.to(goal.device))


def _turned(states: torch.Tensor, shifts: np.ndarray, turn) -> torch.Tensor:
    """Rows `[..., rows, dim]`, each turned by its own shift."""
    if turn is None or not shifts.any():
        return states
    turned = rotate_keys(states, torch.from_numpy(shifts), *turn)
    # rows that stay where they are keep their bits: a rotation by 0 would turn -0.0 into 0.0
    return torch.where(torch.from_numpy(shifts != 0).to(states.device)[:, None], turned, states)


def _index(rows: np.ndarray, states: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows)).to(states.device)


# -- slabs that keep rows in a smaller dtype ------------------------------------------------------------------------


def _recode(shape: LayerShape, slab: Slab, target: Slab, runs: Runs, frequencies) -> None:
    """Layers of one shape, from or to a slab of another dtype than the model's."""
    rows, destination, shifts = runs.rows()
    for slot, spec in _specs(shape):
        if getattr(slab, slot)[shape].numel() == 0:
            continue
        if slab.cold == target.cold and (spec is None or not shifts.any()):
            for source, goal in zip(_kept(slab, shape, slot), _kept(target, shape, slot), strict=True):
                states = source.index_select(2, _index(rows, source))
                goal.index_copy_(2, _index(destination, goal), states.to(goal.device))
            continue
        turn = None if spec is None else (frequencies.get(spec), spec)
        states = _turned(_read(slab, shape, slot, rows), shifts, turn)
        if target.cold is None:
            goal = getattr(target, slot)[shape]
            goal.index_copy_(2, _index(destination, goal), states)
        else:
            encode(target, shape, slot, destination, states)


def _kept(slab: Slab, shape: LayerShape, slot: str) -> list[torch.Tensor]:
    """All that a slab keeps of one slot, `[layers, kv_heads, rows, ...]` each."""
    scales = getattr(slab, f"{slot[:-1]}_scales", {}).get(shape)
    return [getattr(slab, slot)[shape], *([] if scales is None else [scales])]


def _read(slab: Slab, shape: LayerShape, slot: str, rows: np.ndarray) -> torch.Tensor:
    """Rows in the model's dtype, `[layers, kv_heads, rows, dim]`."""
    if slab.cold is not None:
        return decode(slab, shape, slot, rows).to(shape.device)
    states = getattr(slab, slot)[shape]
    return states.index_select(2, _index(rows, states)).to(shape.device)


# -- means ----------------------------------------------------------------------------------------------------------


def _average(shape, slot, slab, rows, target, into, moves, counts, turn) -> None:
    """One slot of `average_rows`."""
    states = _read(slab, shape, slot, rows)
    dtype = torch.promote_types(states.dtype, torch.float32)
    states = states.to(dtype)
    if moves.any() and turn is not None:
        states = rotate_keys(states, torch.from_numpy(np.ascontiguousarray(moves)), *turn)
    mean = _read(target, shape, slot, into).to(dtype)
    weight = torch.from_numpy(1.0 / (counts + 1)).to(mean.device, dtype)
    mean = mean + (states - mean) * weight[:, None]
    if target.cold is None:
        goal = getattr(target, slot)[shape]
        goal.index_copy_(2, _index(into, goal), mean.to(goal.dtype))
    else:
        encode(target, shape, slot, into, mean.to(shape.dtype))
