"""
Attention by the flash-attn library, over a view's buffers as they lie: decoding, and passes of scattered rows.

Nothing is copied. Decoding reads `[batch, kv_heads, rows, dim]` buffers as `[batch, rows, kv_heads, dim]` views. In a
scattered pass each run of neighbouring columns is one sequence of variable length, whose keys are all columns up to
its last one. The library aligns its causal mask to the last query and the last key, so each query sees what stands to
its left. The sequences share their keys through a block table over overlapping pages, a page beginning at every row.

What is asked of the library was read in flash-attn 2.8.3, in its docstrings and in what its C++ interface checks.
Nothing here has run on a GPU yet: the tests run it on the CPU by a stand-in of the same signatures.
"""

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

logger = logging.getLogger("hf_suffix_cache")

PAGE_ROWS = 256  # flash-attn takes pages of multiples of this
MAX_HEAD_DIM = 256
GRID_LIMIT = 65_535  # CUDA's, of sequences x heads in one launch
INT32_MAX = 2**31 - 1  # cumulative lengths are int32
MOST_KEPT = 8  # of what is made for the layers of a forward: as many as there are kinds of layers
_NEEDED = {  # parameters that came with flash-attn 2.6
    "flash_attn_varlen_func": ("block_table", "window_size", "softcap"),
    "flash_attn_with_kvcache": ("cache_leftpad", "cache_seqlens", "window_size", "softcap"),
}


@dataclass(frozen=True)
class Library:
    """The library's two functions that are used, and what their tensors may be."""

    varlen: Callable
    with_kvcache: Callable
    device: str = "cuda"
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)


@functools.cache
def library() -> Library | None:
    """flash-attn, if it is installed, can be loaded and is new enough."""
    try:
        import flash_attn

        functions = [getattr(flash_attn, name) for name in _NEEDED]
        for function, needed in zip(functions, _NEEDED.values(), strict=True):
            missing = set(needed) - set(inspect.signature(function).parameters)
            if missing:
                raise ImportError(f"its {function.__name__} has no {sorted(missing)}; 2.6 or newer is needed")
    except ModuleNotFoundError as error:
        if error.name == "flash_attn":
            return None
        logger.warning("flash-attn is installed but can't be used: %s", error)
        return None
    except (ImportError, OSError, AttributeError) as error:  # built for another torch, or too old
        logger.warning("flash-attn is installed but can't be used: %s", error)
        return None
    return Library(*functions)


def flash_available(device: torch.device | str | None = None) -> bool:
    """
    Whether flash-attn can run on a device.

    Args:
        device (`torch.device` or `str`, *optional*): Where the tensors lie; the current GPU, unless given.
    """
    found = library()
    if found is None:
        return False
    device = torch.device(found.device if device is None else device)
    if device.type != found.device:
        return False
    return device.type != "cuda" or _is_ampere(device.index)


def flash_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    pads: np.ndarray | None = None,
    total: int | None = None,
) -> torch.Tensor | None:
    """
    Attention of the newest rows, one or more in one piece, which are the last of the keys.

    Sinks, dropout, alibi and masks with holes can't be expressed; the caller keeps such layers away.

    Args:
        query (`torch.Tensor`): `[batch, heads, queries, head_dim]`.
        key, value (`torch.Tensor`): `[batch, kv_heads, keys, head_dim]`, of any strides with packed `head_dim`.
        scaling (`float`, *optional*): Of the scores; `head_dim ** -0.5` by default.
        window (`int`, *optional*): Sliding attention: positions that are seen, the query's own included.
        softcap (`float`, *optional*): Scores become `softcap * tanh(scores / softcap)`.
        pads (`np.ndarray` of `[batch]`, *optional*): Columns at the front of each row that hold no token. The same
            object for every layer: what is made of it is kept as long as it comes again.
        total (`int`, *optional*): Columns so far, where `key` holds only the last of them.

    Returns:
        `torch.Tensor`: `[batch, queries, heads, head_dim]`, zero for queries that see nothing (pads); None where
        flash-attn can't do it.
    """
    found = _fitting(query, key, value)
    if found is None:
        return None
    keys = key.shape[2]
    lengths, skipped = _left_pads(pads, 0 if total is None else total - keys, keys, query.device)
    return found.with_kvcache(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        cache_seqlens=lengths,
        cache_leftpad=skipped,
        softmax_scale=scaling,
        causal=True,
        window_size=_window(window),
        softcap=softcap or 0.0,
    )


def flash_scattered(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    columns: np.ndarray,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    pads: np.ndarray | None = None,
) -> torch.Tensor | None:
    """
    Attention of rows at any columns, each seeing the columns up to its own.

    Args:
        query (`torch.Tensor`): `[batch, heads, queries, head_dim]`.
        key, value (`torch.Tensor`): `[batch, kv_heads, keys, head_dim]`: columns 0 and on, as in `flash_decode`.
        columns (`np.ndarray` of int64, `[queries]`): Column of each query, ascending. The same object for every layer.
        scaling, window, softcap, pads: As in `flash_decode`.

    Returns:
        `torch.Tensor`: `[batch, queries, heads, head_dim]`, zero for queries that see nothing (pads); None where
        flash-attn can't do it, or where the last page of keys would reach behind their memory.
    """
    found = _fitting(query, key, value)
    if found is None:
        return None
    if len(columns) != query.shape[2] or int(columns[-1]) >= key.shape[2]:
        raise ValueError(
            f"`columns` must name one of {key.shape[2]} keys for each of {query.shape[2]} queries, got {len(columns)} "
            f"up to {columns[-1]}."
        )
    spacing = _spacing(key)
    if spacing is None or spacing != _spacing(value):
        return None
    plan = _plan(columns, pads, query.shape[0], spacing, query.shape[1], query.device)
    pages = [_pages(tensor, plan.last_page) for tensor in (key, value)]
    if pages[0] is None or pages[1] is None:
        return None
    batch, heads, queries, dim = query.shape
    rows = query.transpose(1, 2).reshape(batch * queries, heads, dim)
    parts = [
        found.varlen(
            rows[part.rows],
            *pages,
            cu_seqlens_q=part.query_ends,
            cu_seqlens_k=part.key_ends,
            max_seqlen_q=part.max_queries,
            max_seqlen_k=part.max_keys,
            softmax_scale=scaling,
            causal=True,
            window_size=_window(window),
            softcap=softcap or 0.0,
            block_table=part.table,
        )
        for part in plan.parts
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(batch, queries, heads, dim)


# -- what goes ------------------------------------------------------------------------------------------------------


@functools.cache
def _is_ampere(index: int | None) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(index) >= (8, 0)


def _fitting(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Library | None:
    """The library, if it takes these tensors without copying them."""
    found, dim = library(), query.shape[-1]
    fits = (
        found is not None
        and flash_available(query.device)
        and query.dtype in found.dtypes
        and query.dtype == key.dtype == value.dtype
        and dim == key.shape[-1] == value.shape[-1]
        # other sizes are filled up to a multiple of 8, which would copy all keys, overlapping pages one by one
        and dim % 8 == 0
        and dim <= MAX_HEAD_DIM
        and query.shape[1] % key.shape[1] == 0
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    )
    return found if fits else None


def _window(window: int | None) -> tuple[int, int]:
    """flash-attn counts the columns left and right of a query's own; -1 is all."""
    return (-1, -1) if window is None else (window - 1, 0)


# -- kept for the layers of a forward ---------------------------------------------------------------------------------

_kept = threading.local()


def _recall(name: str, sources: tuple, key: tuple, make: Callable):
    """What `make` gave for these objects (by identity) and this key; only what the newest objects gave is kept."""
    entry = getattr(_kept, name, None)
    if entry is None or any(old is not new for old, new in zip(entry[0], sources, strict=True)):
        entry = sources, {}
        setattr(_kept, name, entry)
    if key not in entry[1]:
        if len(entry[1]) >= MOST_KEPT:
            entry[1].clear()
        entry[1][key] = make()
    return entry[1][key]


def _left_pads(pads: np.ndarray | None, first: int, keys: int, device) -> tuple:
    """Lengths and left pads of keys that begin at column `first`, int32 `[batch]` on the device; None for no pads."""
    if pads is None:
        return None, None

    def make():
        skipped = np.clip(pads - first, 0, keys)
        return torch.from_numpy(skipped.astype(np.int32)).to(device) if skipped.any() else None

    # as soon as a window has left the pads behind, `first` no longer matters
    longest = _recall("longest", (pads,), (), lambda: int(np.max(pads, initial=0)))
    skipped = _recall("pads", (pads,), (min(first, longest), keys < longest and keys, device), make)
    if skipped is None:
        return None, None
    # without lengths the library takes full tiles of keys for granted
    return _recall("lengths", (skipped,), (keys,), lambda: torch.full_like(skipped, keys)), skipped


@dataclass(frozen=True)
class _Part:
    """Sequences of one launch; int32 tensors on the device."""

    rows: slice  # of [batch * queries]
    query_ends: torch.Tensor  # [sequences + 1], cumulative from 0
    key_ends: torch.Tensor  # [sequences + 1]
    max_queries: int
    max_keys: int
    table: torch.Tensor  # [sequences, pages]: the row that each page begins at


@dataclass(frozen=True)
class _Plan:
    parts: list[_Part]
    last_page: int  # the highest row that a page begins at


def _plan(columns, pads, batch: int, spacing: int, heads: int, device) -> _Plan:
    key = batch, spacing, heads, device
    return _recall("plan", (columns, pads), key, lambda: _make_plan(columns, pads, batch, spacing, heads, device))


def _make_plan(columns, pads, batch: int, spacing: int, heads: int, device) -> _Plan:
    """
    Sequences of all runs of all batch rows, which are `spacing` key rows apart. A sequence's keys begin behind its
    row's pads; a run that begins among the pads has more queries than keys, and the library gives zeros for those.
    """
    cuts = np.flatnonzero(np.diff(columns) != 1) + 1
    borders = np.concatenate(([0], cuts, [len(columns)]))
    pads = np.zeros(batch, dtype=np.int64) if pads is None else np.asarray(pads, dtype=np.int64)
    queries = np.tile(np.diff(borders), batch)
    keys = np.maximum(columns[borders[1:] - 1] + 1 - pads[:, None], 0).ravel()
    first = np.repeat(np.arange(batch) * spacing + pads, len(borders) - 1)
    most = max(1, min(GRID_LIMIT // heads, INT32_MAX // max(1, int(keys.max()))))
    ends = np.concatenate(([0], queries.cumsum()))
    parts, last_page = [], 0
    for start in range(0, len(queries), most):
        stop = min(start + most, len(queries))
        count = -(-keys[start:stop] // PAGE_ROWS)  # pages of each sequence
        page = np.minimum(np.arange(max(1, count.max())), np.maximum(count - 1, 0)[:, None])
        table = first[start:stop, None] + PAGE_ROWS * page
        table[keys[start:stop] == 0] = 0
        last_page = max(last_page, int(table.max()))
        part = _Part(
            slice(int(ends[start]), int(ends[stop])),
            _int32(ends[start : stop + 1] - ends[start], device),
            _int32(np.concatenate(([0], keys[start:stop].cumsum())), device),
            int(queries[start:stop].max()),
            int(keys[start:stop].max()),
            _int32(table, device),
        )
        parts.append(part)
    return _Plan(parts, last_page)


def _int32(array: np.ndarray, device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(device)


# -- pages ------------------------------------------------------------------------------------------------------------


def _spacing(tensor: torch.Tensor) -> int | None:
    """Rows between batch rows of `[batch, kv_heads, rows, dim]`; None if they lie no whole number of rows apart."""
    if tensor.shape[0] == 1:
        return 0
    spacing, rest = divmod(tensor.stride(0), tensor.stride(2))
    return None if rest else spacing


def _pages(tensor: torch.Tensor, last_page: int) -> torch.Tensor | None:
    """
    `[pages, 256, kv_heads, dim]` view of `[batch, kv_heads, rows, dim]`: page i begins at row i, counted from the
    first batch row's first. None if the memory ends before page `last_page` does. No row behind the keys is read.
    """
    _, heads, _, dim = tensor.shape
    _, head_step, row_step, _ = tensor.stride()
    room = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    rows = (room - (heads - 1) * head_step - dim) // row_step + 1  # that every head has in the storage
    if last_page + PAGE_ROWS > rows:
        return None
    return tensor.as_strided((rows - PAGE_ROWS + 1, PAGE_ROWS, heads, dim), (row_step, row_step, head_step, 1))
