"""
Attention of grouped query heads without copying keys and values: one or a few new tokens, and rows that lie scattered.

Pure functions over tensors: queries `[batch, heads, queries, head_dim]`, keys and values `[batch, kv_heads, keys,
head_dim]` (views of larger buffers as they are), result `[batch, queries, heads, head_dim]`, contiguous, as
transformers' attention functions give it. Query head i belongs to key head i // (heads // kv_heads).
"""

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

BLOCK_ROWS = 32  # queries of one block: the CPU's sdpa works on 32 at a time, larger blocks only see more keys
PACKED_ROWS = 64  # groups x queries up to which queries are packed behind each key head, their mask repeated

Bounds = list[list[tuple[int, int, int, int]]]


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    bounds: Callable[[torch.Tensor], Bounds] | None = None,
) -> torch.Tensor | None:
    """
    Attention in the way that is fastest for these tensors.

    Args:
        query, key, value, mask, scaling: As in `decode_attention`.
        bounds (callable, *optional*): Gives `visible_bounds` of the mask; it may remember them.

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
    if queries == 1 or not scattered_is_faster(query, key):
        return None
    if groups * queries <= PACKED_ROWS and groups > 1:
        return decode_attention(query, key, value, mask, scaling)
    return scattered_attention(query, key, value, mask, scaling, None if bounds is None else bounds(mask))


def decode_is_faster(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether one token's attention without a mask is faster packed than as stock's sdpa with `enable_gqa`."""
    groups, keys = query.shape[1] // key.shape[1], key.shape[2]
    return groups > 1 and (query.dtype != torch.float32 or keys >= 512)


def scattered_is_faster(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether attention under a mask is faster here than stock's, which copies keys and values for every group."""
    return query.shape[1] > key.shape[1] or query.shape[2] >= 64


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
    Attention of many queries, by blocks of them, each to the keys between the first and the last that it sees.

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


def visible_bounds(mask: torch.Tensor, block_rows: int = BLOCK_ROWS) -> Bounds:
    """
    Blocks of queries, and what each sees at most.

    Args:
        mask (`[batch, 1, queries, keys]`): Bool (True = attends), or what is added to the scores.
        block_rows (`int`): Queries of one block at most.

    Returns:
        For each batch row a list of `(start, stop, first, last)`: queries `[start, stop)` see nothing outside of keys
        `[first, last)`. A block without any visible key (padding) gets all keys: what the model's own attention makes
        of such a row depends on them.
    """
    if mask.dtype != torch.bool:
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
        for start, stop in zip(borders, borders[1:], strict=False):
            seen = flags[row, start:stop].max(axis=0)
            first, last = int(seen.argmax()), keys - int(seen[::-1].argmax())
            blocks.append((start, stop, first, last))  # nothing seen: argmax gives 0 twice, which means all keys
        bounds.append(blocks)
    return bounds
