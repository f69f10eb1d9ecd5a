"""Copying stored rows: gathered into an extent with their keys rotated, or drawn into running means."""

import numpy as np
import torch

from ..rope import RotarySpec, rotate_keys
from .pool import BlockPool, Extent, LayerShape, Slab

DIRECT_COPY_ROWS = 16  # mean run length from which slices beat index_select (SmolLM2 shapes, 2 cores)


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
    Gather stored rows into an extent, keys rotated by `shifts`, all layers of a group at a time.

    Args:
        pool (`BlockPool`): Where the rows lie.
        addresses (`np.ndarray` of `[rows]`): Where the rows lie.
        target (`Extent`), row (`int`), columns (`np.ndarray` of `[rows]`): Where they go.
        shifts (`np.ndarray` of `[rows]`): Positions to move each key by.
        frequencies (`dict`): Live inverse frequencies by `RotarySpec`.
    """
    base = target.start + row * target.rows
    for slab, rows, index in pool.by_slab(addresses):
        destination, moves = base + columns[index], shifts[index]
        cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(destination) != 1) | (np.diff(moves) != 0)) + 1
        borders = np.concatenate(([0], cuts, [len(rows)]))
        for shape in pool.groups:
            for source, goal, turn in _slots(shape, slab, target.slab, frequencies):
                if len(rows) >= DIRECT_COPY_ROWS * (len(borders) - 1):
                    _copy_runs(source, goal, rows, destination, moves, borders, turn)
                else:
                    _copy_scattered(source, goal, rows, destination, moves, turn)


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
            for source, goal, turn in _slots(shape, slab, target, frequencies):
                _average(source, goal, rows, into[index], shifts[index], counts[index], turn)


def _slots(shape: LayerShape, slab: Slab, target: Slab, frequencies):
    """Source, target, and frequencies and spec if it is rotated, of the keys and the values of layers of one shape."""
    for source, goal, spec in (
        (slab.keys[shape], target.keys[shape], shape.rotary),
        (slab.values[shape], target.values[shape], shape.value_rotary),
    ):
        yield source, goal, None if spec is None else (frequencies.get(spec), spec)


def _average(source, goal, rows, destination, moves, counts, turn) -> None:
    """One slot of `average_rows`."""
    device = source.device
    here, there = (torch.from_numpy(np.ascontiguousarray(index)).to(device) for index in (rows, destination))
    dtype = torch.promote_types(goal.dtype, torch.float32)
    states = source.index_select(2, here).to(dtype)
    if moves.any() and turn is not None:
        states = rotate_keys(states, torch.from_numpy(np.ascontiguousarray(moves)), *turn)
    mean = goal.index_select(2, there).to(dtype)
    weight = torch.from_numpy(1.0 / (counts + 1)).to(device, dtype)
    goal.index_copy_(2, there, (mean + (states - mean) * weight[:, None]).to(goal.dtype))


def _copy_runs(source, goal, rows, destination, moves, borders, turn) -> None:
    """Slice copies, one per run of neighbouring rows with one shift. `turn`: a rotated slot's frequencies and spec."""
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        here = slice(int(rows[start]), int(rows[start]) + stop - start)
        there = slice(int(destination[start]), int(destination[start]) + stop - start)
        states, shift = source[:, :, here], int(moves[start])
        if shift and turn is not None:
            states = rotate_keys(states, shift, *turn)
        goal[:, :, there] = states


def _copy_scattered(source, goal, rows, destination, moves, turn) -> None:
    """One indexed copy, each row with its own shift."""
    device = source.device
    here = torch.from_numpy(np.ascontiguousarray(rows)).to(device)
    there = torch.from_numpy(np.ascontiguousarray(destination)).to(device)
    states = source.index_select(2, here)
    if moves.any() and turn is not None:
        turned = rotate_keys(states, torch.from_numpy(np.ascontiguousarray(moves)), *turn)
        # rows that stay where they are keep their bits: a rotation by 0 would turn -0.0 into 0.0
        states = torch.where(torch.from_numpy(moves != 0).to(device)[:, None], turned, states)
    goal.index_copy_(2, there, states)
