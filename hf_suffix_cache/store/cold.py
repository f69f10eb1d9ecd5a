"""
Rows in a smaller dtype than the model's: half precision, or 8 bit with one scale for each row and head.

A slab of such rows is cold. What is read from it is close to what was written, never the same, so that its rows are
approximate ones ("derived") whatever they were before.
"""

import numpy as np
import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}

_LARGEST = 127.0  # symmetric: -128 is not used


def stored_dtype(dtype: torch.dtype, cold: torch.dtype | None) -> torch.dtype:
    """The dtype in which a slab of temperature `cold` keeps rows of `dtype`: the smaller one, `dtype` where equal."""
    return dtype if cold is None or cold.itemsize >= dtype.itemsize else cold


def cold_bytes(dtype: torch.dtype, heads: int, width: int, cold: torch.dtype | None) -> int:
    """Bytes of one row of `heads` heads with `width` numbers each, scales included."""
    kept = stored_dtype(dtype, cold)
    scales = torch.float32.itemsize if is_scaled(dtype, cold) else 0
    return heads * (width * kept.itemsize + scales)


def is_scaled(dtype: torch.dtype, cold: torch.dtype | None) -> bool:
    """Whether rows of `dtype` have scales in a slab of temperature `cold`."""
    return stored_dtype(dtype, cold) is torch.int8 and dtype is not torch.int8


def decode(slab, shape, slot: str, rows) -> torch.Tensor:
    """
    Read rows of a slab, warm or cold.

    Args:
        slab (`Slab`), shape (`LayerShape`): Where they lie, and of which layers.
        slot (`str`): `"keys"` or `"values"`.
        rows (`slice`, or `np.ndarray` or `torch.Tensor` of int64): Rows of the slab.

    Returns:
        `torch.Tensor`, `[layers, kv_heads, rows, head_dim]` in the model's dtype; a copy, or a view of a warm slab.
    """
    states = _take(getattr(slab, slot)[shape], rows)
    scales = _scales(slab, shape, slot)
    if scales is None:
        return states.to(shape.dtype)
    return (states.float() * _take(scales, rows)[..., None]).to(shape.dtype)


def encode(slab, shape, slot: str, rows, states: torch.Tensor) -> None:
    """
    Write rows into a slab, warm or cold: the inverse of `decode`, up to rounding.

    Args:
        slab (`Slab`), shape (`LayerShape`), slot (`str`), rows: As in `decode`; each row once.
        states (`torch.Tensor`, `[layers, kv_heads, rows, head_dim]`): In the model's dtype.
    """
    kept, scales = getattr(slab, slot)[shape], _scales(slab, shape, slot)
    if scales is None:
        _put(kept, rows, states.to(kept.dtype))
        return
    states = states.float()
    scale = states.abs().amax(dim=-1) / _LARGEST
    scale = torch.where(scale == 0, 1.0, scale)  # a row of zeros; NaN stays NaN
    _put(kept, rows, (states / scale[..., None]).round().clamp(-_LARGEST, _LARGEST).to(torch.int8))
    _put(scales, rows, scale)


def _scales(slab, shape, slot: str) -> torch.Tensor | None:
    """Scales `[layers, kv_heads, rows]` of one slot of a slab; None where it has none."""
    return (slab.key_scales if slot == "keys" else slab.value_scales).get(shape)


def _take(tensor: torch.Tensor, rows) -> torch.Tensor:
    return tensor[:, :, rows] if isinstance(rows, slice) else tensor.index_select(2, _index(rows, tensor))


def _put(tensor: torch.Tensor, rows, states: torch.Tensor) -> None:
    if isinstance(rows, slice):
        tensor[:, :, rows] = states
    else:
        tensor.index_copy_(2, _index(rows, tensor), states)


def _index(rows, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(rows, np.ndarray):
        rows = torch.from_numpy(np.ascontiguousarray(rows))
    return rows.to(tensor.device)
