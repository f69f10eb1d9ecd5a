"""
Attention of grouped query heads without copying keys and values: one or a few new tokens, and rows that lie scattered.

Pure functions over tensors: queries `[batch, heads, queries, head_dim]`, keys and values `[batch, kv_heads, keys,
head_dim]` (views of larger buffers as they are), result `[batch, queries, heads, head_dim]`, contiguous, as
transformers' attention functions give it. Query head i belongs to key head i // (heads // kv_heads).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

BLOCK_ROWS = 32  # queries of one block: the CPU's sdpa works on 32 at a time, larger blocks only see more keys
PACKED_ROWS = 64  # groups x queries up to which queries are packed behind each key head, their mask repeated

# What one layer takes, ours / stock in ms (2 AMD EPYC cores, one thread, torch 2.13). The fp32 lines of the first two
# shapes are rows of speed.csv (benchmarks/speed_attention.py); the others are one-off runs, not in a CSV yet.
#   one token, no mask           512 keys      4,096 keys    16,384 keys
#   9q/3kv/d64    fp32           0.11 / 0.12   0.70 / 0.87   2.53 / 3.95
#                 bf16           0.11 / 0.50   0.65 / 3.31   2.54 / 13.3
#   4q/1kv/d256   fp32           0.12 / 0.18   0.77 / 1.78   3.11 / 9.26
#                 bf16           0.09 / 0.86   0.72 / 7.19   2.81 / 29.3
#   32q/8kv/d128  fp32           0.44 / 0.57   3.22 / 5.87   18.1 / 52.3
#                 bf16           0.41 / 3.10   3.13 / 24.4   12.2 / 98.6
#   scattered rows of 4,096      8 rows        64 rows       700 rows
#   9q/3kv/d64    fp32           1.69 / 6.08   7.80 / 12.5   51.9 / 89.7
#                 bf16           1.19 / 2.19   6.63 / 9.29   48.5 / 85.1
#   4q/1kv/d256   fp32           2.28 / 3.56   11.6 / 14.6   82.3 / 141
#                 bf16           1.65 / 2.37   10.2 / 13.0   75.3 / 130
#   32q/8kv/d128  fp32           8.05 / 71.1   38.5 / 113    -
#                 bf16           7.84 / 43.0   43.0 / 86.6   -
# One token under a mask is packed by stock too. Without a mask, more rows than one are causal: stock's own kernel.
FP32_KEYS = 512  # below, one fp32 token is as fast in stock
GAINS = {True: 5.0, False: 2.0}  # by whether the dtype is half precision: ours over stock, one thread ...
NARROW_GAIN, NARROW_DIM = 1.1, 128  # ... and in fp32 for heads of fewer dims
# Queries in one piece at the end of the keys that are worth the causal kernel, if they are this share of the keys. Of
# 4,096 keys 98 % take 0.83 of the blocks' time with 9q/3kv/d64 on 2 threads and 0.94 on one, 0.90 and 0.88 with
# 4q/1kv/d256, 0.89 and 0.92 with 32q/8kv/d128; 60 % take 0.97 to 1.19; of 1,024 keys 98 % take 1.01 to 1.22 (one-off
# runs).
CAUSAL_ROWS = 1536
CAUSAL_SHARE = 0.8

# by batch row the blocks of `visible_bounds`; none where its queries are the last positions, and each sees all before
Bounds = list[list[tuple[int, int, int, int]]]


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    bounds: Callable[[torch.Tensor, int], Bounds] | None = None,
) -> torch.Tensor | None:
    """
    Attention in the way that is fastest for these tensors.

    Args:
        query, key, value, mask, scaling: As in `decode_attention`.
        bounds (callable, *optional*): `visible_bounds`, or what remembers its results.

    Returns:
        `torch.Tensor`, `[batch, queries, heads, head_dim]`; None where transformers' own attention is as fast, or
        where these functions have no answer.
    """
    if not _fits(query, key, value, mask):
        return None
    queries, groups = query.shape[2], query.shape[1] // key.shape[1]
    if mask is None:
        faster = queries == 1 and decode_is_faster(query, key)
        return decode_attention(query, key, value, None, scaling) if faster else None
    if queries in (1, key.shape[2]) or not scattered_is_faster(query, key):
        return None  # nothing cached: a whole prefill is stock's own, to the bit, also in half precision
    if groups * queries <= PACKED_ROWS and groups > 1:
        return decode_attention(query, key, value, mask, scaling)
    return scattered_attention(
        query, key, value, mask, scaling, (bounds or visible_bounds)(mask, rows_of_block(query))
    )


def decode_is_faster(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether one token's attention without a mask is faster packed than as stock's sdpa with `enable_gqa`."""
    batch, heads, _, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    half = query.dtype != torch.float32
    if heads == kv_heads or (not half and keys < FP32_KEYS):
        return False
    gain = NARROW_GAIN if not half and dim < NARROW_DIM else GAINS[half]
    # sdpa shares heads among threads, and packed there are fewer
    threads = torch.get_num_threads()
    return min(threads, batch * heads) <= gain * min(threads, batch * kv_heads)


def scattered_is_faster(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether attention under a mask is faster here than stock's, which copies keys and values for every group."""
    return query.shape[1] > key.shape[1] or query.shape[2] >= 2 * BLOCK_ROWS


def rows_of_block(query: torch.Tensor) -> int:
    """Queries of one block: enough of them to keep all threads busy with its heads."""
    return BLOCK_ROWS * -(-2 * torch.get_num_threads() // query.shape[1])


def _fits(query, key, value, mask) -> bool:
    """Whether these are plain tensors of one dtype on the CPU that no gradient flows through."""
    tensors = (query, key, value)
    if torch.compiler.is_compiling() or query.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    if any(type(tensor) is not torch.Tensor or tensor.dtype != query.dtype for tensor in tensors):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    batch, heads, queries, dim = query.shape
    if key.shape != value.shape or key.shape[0] != batch or key.shape[3] != dim or heads % key.shape[1]:
        return False
    if mask is None:
        return True
    sizes = (1, queries, key.shape[2])
    kinds = (torch.bool, query.dtype)
    return mask.dim() == 4 and mask.shape[1:] == sizes and mask.shape[0] in (1, batch) and mask.dtype in kinds


def decode_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """
    Attention of a few queries: those of one key head stand behind each other as its queries.

    Args:
        query (`[batch, heads, queries, head_dim]`), key, value (`[batch, kv_heads, keys, head_dim]`): See above.
        mask (`[batch or 1, 1, queries, keys]`, *optional*): True, or 0 to add, where a query attends. None: every
            query attends to every key, which decoding one token means.
        scaling (`float`, *optional*): Factor of the scores; None for head_dim ** -0.5.

    Returns:
        `torch.Tensor`, `[batch, queries, heads, head_dim]`.
    """
    batch, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    packed = query.reshape(batch, kv_heads, groups * queries, dim)
    if mask is not None and queries > 1:
        rows, _, _, keys = mask.shape
        mask = mask.expand(rows, groups, queries, keys).reshape(rows, 1, groups * queries, keys)
    output = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    if queries == 1:
        return output.reshape(batch, 1, heads, dim)
    return output.reshape(batch, heads, queries, dim).transpose(1, 2).contiguous()


def scattered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    bounds: Bounds | None = None,
) -> torch.Tensor:
    """
    Attention of many queries, by blocks of them, each to the keys between the first and the last that it sees. Where
    the queries are most of a text and its end, by the causal kernel that runs a whole prefill.

    What a block sees is read off the mask, so padding, windows, chunked attention and rows in any places need nothing
    said about them. Query heads of a group share their keys through a stride of 0.

    Args:
        query (`[batch, heads, queries, head_dim]`), key, value (`[batch, kv_heads, keys, head_dim]`): See above.
        mask (`[batch or 1, 1, queries, keys]`): True, or 0 to add, where a query attends.
        scaling (`float`, *optional*): Factor of the scores; None for head_dim ** -0.5.
        bounds (*optional*): What `visible_bounds` gave for this mask: it is the same in every layer.

    Returns:
        `torch.Tensor`, `[batch, queries, heads, head_dim]`.
    """
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    bounds = visible_bounds(mask) if bounds is None else bounds
    output = query.new_empty(batch, queries, heads, dim)
    for row in range(batch):
        # [kv_heads, groups, rows, dim]: key heads stand in for the batch, so that no copy is needed
        asked = query[row].unflatten(0, (kv_heads, groups))
        seen = key[row].unsqueeze(1).expand(kv_heads, groups, keys, dim)
        given = value[row].unsqueeze(1).expand(kv_heads, groups, keys, dim)
        place = row if mask.shape[0] > 1 else 0
        if not bounds[place]:
            output[row] = _last_positions(asked, seen, given, scaling).flatten(0, 1).transpose(0, 1)
        for start, stop, first, last in bounds[place]:
            part = scaled_dot_product_attention(
                asked[:, :, start:stop],
                seen[:, :, first:last],
                given[:, :, first:last],
                attn_mask=mask[place : place + 1, :, start:stop, first:last],
                scale=scaling,
            )
            output[row, start:stop] = part.flatten(0, 1).transpose(0, 1)
    return output


def _last_positions(asked, seen, given, scaling: float | None) -> torch.Tensor:
    """
    Attention of the last positions, `[kv_heads, groups, queries, head_dim]`, to all keys. The kernel's own causal mask
    begins at position 0, so queries of zeros stand for the positions before: it works on 4 to 8 times as many queries
    at once as under a mask, and skips what they don't see.
    """
    queries, keys = asked.shape[2], seen.shape[2]
    padded = torch.nn.functional.pad(asked, (0, 0, keys - queries, 0))
    output = scaled_dot_product_attention(padded, seen, given, is_causal=True, scale=scaling)
    return output[:, :, keys - queries :]


def visible_bounds(mask: torch.Tensor, block_rows: int = BLOCK_ROWS) -> Bounds:
    """
    Blocks of queries, and what each sees at most.

    Args:
        mask (`[batch, 1, queries, keys]`): Bool (True = attends), or what is added to the scores.
        block_rows (`int`): Queries of one block at most.

    Returns:
        For each batch row a list of `(start, stop, first, last)`: queries `[start, stop)` see nothing outside of keys
        `[first, last)`; an empty list where `_are_last` says so. A block without any visible key (padding) gets all
        keys. A row without any that shares its block with others may get fewer than in the model's own attention;
        nothing reads such rows.
    """
    plain = mask.dtype == torch.bool  # what is added may be more than a mask
    if not plain:
        # half of the lowest value and below weighs nothing beside any other score; a bias on top of it stays below
        mask = mask > torch.finfo(mask.dtype).min / 2
    batch, _, queries, keys = mask.shape
    num_blocks = -(-queries // block_rows)
    borders = [block * queries // num_blocks for block in range(num_blocks + 1)]
    # numpy: torch takes 2 ms and more for each of these reductions over 32 x 4,096 bools on a CPU, numpy 5 us
    flags = mask[:, 0].cpu().numpy()
    bounds = []
    for row in range(batch):
        blocks = []
        if plain and _are_last(flags[row]):
            bounds.append(blocks)
            continue
        for start, stop in zip(borders, borders[1:], strict=False):
            seen = flags[row, start:stop].max(axis=0)
            first, last = int(seen.argmax()), keys - int(seen[::-1].argmax())
            blocks.append((start, stop, first, last))  # nothing seen: argmax gives 0 twice, which means all keys
        bounds.append(blocks)
    return bounds


def _are_last(flags: np.ndarray) -> bool:
    """Whether queries, bool `[queries, keys]`, are the last positions, see all before them, and are many."""
    queries, keys = flags.shape
    before = keys - queries
    if queries < max(CAUSAL_ROWS, CAUSAL_SHARE * keys) or not flags[:, : before + 1].all():
        return False
    return bool((flags[:, before:] == np.tri(queries, dtype=bool)).all())
