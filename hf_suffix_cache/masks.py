"""
Attention masks for rows that do not lie in prompt order: causal by position, and the two-segment form by name.

Everywhere `True` means "this query attends to this key". A query attends to itself and to what stands to its left *in
the prompt*, wherever those rows lie in memory. A mask that counts from the last key ("bottom-right aligned") says the
same only while the queries are the newest rows in one piece.
"""

from collections.abc import Sequence

import torch


def causal_by_position(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    window: int | None = None,
    key_valid: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """
    The general mask: a query sees the valid keys at its own position and to the left of it.

    Args:
        query_positions (`torch.Tensor` of integers, `[queries]` or `[batch, queries]`): Position of each query.
        key_positions (`torch.Tensor` of integers, `[keys]` or `[batch, keys]`): Position of the row in each slot, in
            any order.
        window (`int`, *optional*): Sliding attention: only the last `window` positions are seen, the query's own
            included.
        key_valid (`torch.Tensor`, `[keys]` or `[batch, keys]`, *optional*): False (or 0) for pads and free slots.
        chunk (`int`, *optional*): Chunked attention: only the query's own block of `chunk` positions is seen.

    Returns:
        `torch.Tensor` of bool, `[batch, 1, queries, keys]`, batch 1 where no argument has one. A query without any
        visible key (a pad) has a row of False, as in transformers' own masks.
    """
    _check_size("window", window)
    _check_size("chunk", chunk)
    queries = _rows("query_positions", query_positions).unsqueeze(-1)  # [batch, queries, 1]
    keys = _rows("key_positions", key_positions).unsqueeze(-2)  # [batch, 1, keys]
    mask = keys <= queries
    # Only comparisons of vectors below: nothing wider than a bool is ever made at [batch, queries, keys].
    if window is not None:
        mask &= keys > queries - window
    if chunk is not None:
        mask &= keys // chunk == queries // chunk
    if key_valid is not None:
        valid = key_valid if key_valid.dim() == 2 else key_valid[None]
        if valid.dim() != 2 or valid.shape[-1] != keys.shape[-1]:
            raise ValueError(
                f"`key_valid` must be [keys] or [batch, keys] with {keys.shape[-1]} keys, got {list(key_valid.shape)}."
            )
        mask = mask & valid.bool().unsqueeze(-2)  # not in place: `key_valid` may bring the batch axis
    return mask.unsqueeze(1)


def two_segment(
    prefix_length: int,
    suffix_length: int,
    prefix_slots: Sequence[int] | torch.Tensor | None = None,
    suffix_slots: Sequence[int] | torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """
    The mask of the suffix-cache literature, for a prompt `[prefix | suffix]` whose rows lie in any slots:

        [ prefix causal |       0       ]
        [       1       | suffix causal ]

    Args:
        prefix_length (`int`), suffix_length (`int`): Tokens of each part.
        prefix_slots, suffix_slots (`[prefix_length]`, `[suffix_length]`, *optional*): Slot of each token, in prompt
            order. One that is left out takes the free slots in ascending order: prefix first by default, and
            `suffix_slots=range(suffix_length)` puts the suffix *before* the prefix in memory.

    Returns:
        `torch.Tensor` of bool, `[1, 1, slots, slots]`: queries and keys in slot order.
    """
    if prefix_length < 0 or suffix_length < 0:
        raise ValueError(f"segment lengths must not be negative, got {prefix_length} and {suffix_length}.")
    prefix, suffix = _assign_slots(prefix_length, suffix_length, prefix_slots, suffix_slots)
    slots = prefix_length + suffix_length
    mask = torch.zeros(slots, slots, dtype=torch.bool)
    mask[prefix[:, None], prefix] = torch.ones(prefix_length, prefix_length, dtype=torch.bool).tril()
    mask[suffix[:, None], prefix] = True
    mask[suffix[:, None], suffix] = torch.ones(suffix_length, suffix_length, dtype=torch.bool).tril()
    return mask[None, None].to(device)


def to_additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """
    The float form of a bool mask, same shape: 0 where a query attends, the dtype's lowest finite value elsewhere.

    Eager attention *adds* its mask, so a bool mask is silently wrong there (transformers 5.24); the lowest finite
    value instead of -inf keeps the softmax of a pad without visible keys free of NaN.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"`mask` must be a bool tensor (True = attend), got {mask.dtype}.")
    if not dtype.is_floating_point:
        raise TypeError(f"`dtype` must be a floating point type, got {dtype}.")
    lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=mask.device)
    return torch.where(mask, torch.zeros_like(lowest), lowest)


def query_blocks(num_queries: int, num_keys: int, max_bytes: int = 64 << 20, bytes_per_entry: int = 1) -> list[slice]:
    """
    Consecutive slices of the queries, of nearly equal size, so that the mask of one block stays within `max_bytes`.

    `bytes_per_entry` is what one query and key pair takes: batch size x item size. A block holds at least one query,
    also where that alone is over `max_bytes`.
    """
    if num_queries < 0 or num_keys < 0:
        raise ValueError(f"counts must not be negative, got {num_queries} queries and {num_keys} keys.")
    if max_bytes < 1 or bytes_per_entry < 1:
        raise ValueError(f"`max_bytes` and `bytes_per_entry` must be at least 1, got {max_bytes}, {bytes_per_entry}.")
    query_bytes = num_keys * bytes_per_entry
    most = max(1, max_bytes // query_bytes if query_bytes else num_queries)
    num_blocks = -(-num_queries // most)
    borders = [block * num_queries // num_blocks for block in range(num_blocks)] + [num_queries]
    return [slice(start, stop) for start, stop in zip(borders, borders[1:], strict=False)]


def _rows(name: str, positions: torch.Tensor) -> torch.Tensor:
    """Positions as `[batch, tokens]`."""
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise TypeError(f"`{name}` must hold integers, got {positions.dtype}.")
    if positions.dim() not in (1, 2):
        raise ValueError(f"`{name}` must be [tokens] or [batch, tokens], got {list(positions.shape)}.")
    return positions if positions.dim() == 2 else positions[None]


def _check_size(name: str, size: int | None) -> None:
    if size is not None and size < 1:
        raise ValueError(f"`{name}` must be None or at least 1, got {size}.")


def _assign_slots(prefix_length, suffix_length, prefix_slots, suffix_slots) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot of each token of both parts, int64; together they must be every slot once."""
    total = prefix_length + suffix_length
    given = {"prefix_slots": prefix_slots, "suffix_slots": suffix_slots}
    parts = []
    for (name, slots), length in zip(given.items(), (prefix_length, suffix_length), strict=True):
        part = None if slots is None else torch.as_tensor(slots, dtype=torch.int64, device="cpu")
        if part is not None and part.shape != (length,):
            raise ValueError(f"`{name}` must hold {length} slots, got shape {list(part.shape)}.")
        parts.append(part)
    prefix, suffix = parts
    if prefix is None:
        prefix = _free_slots(suffix, total)[:prefix_length] if suffix is not None else torch.arange(prefix_length)
    if suffix is None:
        suffix = _free_slots(prefix, total)[:suffix_length]
    if not torch.equal(torch.cat([prefix, suffix]).sort().values, torch.arange(total)):
        raise ValueError(
            f"the slots must be every number from 0 to {total - 1} once, got {prefix.tolist()} and {suffix.tolist()}."
        )
    return prefix, suffix


def _free_slots(taken: torch.Tensor, total: int) -> torch.Tensor:
    slots = torch.arange(total)
    return slots[~torch.isin(slots, taken)]
