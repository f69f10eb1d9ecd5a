"""
A slow stand-in for flash-attn on the CPU: `flash_attn_varlen_func` and `flash_attn_with_kvcache` with the signatures,
the checks and the documented meaning of flash-attn 2.8, one query at a time, in fp64.

What the library takes on trust is asserted: a block table's entries have pages, lengths are within the memory.
"""

import torch


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Sequences of variable length, `[total, heads, dim]`; keys packed likewise, or `[pages, page, heads, dim]`."""
    assert dropout_p == 0.0 and alibi_slopes is None and not return_attn_probs, "not in this stand-in"
    sequences = len(cu_seqlens_q) - 1
    _check(q, k, v, 2 if block_table is None else 3)
    for ends in (cu_seqlens_q, cu_seqlens_k):
        assert ends.dtype == torch.int32 and ends.is_contiguous() and ends.shape == (sequences + 1,)
        assert ends[0] == 0 and (ends.diff() >= 0).all()
    assert cu_seqlens_q[-1] == q.shape[0], "every query belongs to a sequence"
    lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert lengths[0].max() == max_seqlen_q and lengths[1].max() == max_seqlen_k
    assert sequences * q.shape[1] <= 65_535, "CUDA's limit of a launch"
    output = torch.empty(q.shape, dtype=q.dtype)
    for number in range(sequences):
        rows = slice(int(cu_seqlens_q[number]), int(cu_seqlens_q[number + 1]))
        if block_table is None:
            part = slice(int(cu_seqlens_k[number]), int(cu_seqlens_k[number + 1]))
            keys, values = k[part], v[part]
        else:
            keys, values = (_from_pages(cache, block_table, number, int(lengths[1][number])) for cache in (k, v))
        output[rows] = _attend(q[rows], keys, values, softmax_scale, causal, window_size, softcap)
    return output


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Queries `[batch, queries, heads, dim]` over `[batch, rows, heads, dim]` caches, or over pages of them."""
    assert k is None and v is None and rotary_cos is None and rotary_sin is None, "not in this stand-in"
    assert alibi_slopes is None and not return_softmax_lse, "not in this stand-in"
    _check(q, k_cache, v_cache, 3)
    if block_table is not None:
        assert cache_leftpad is None and cache_batch_idx is None, "pages go with neither"
    batch = q.shape[0]
    full = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if cache_seqlens is None:
        # the library then skips the bounds of full tiles, left pads or not
        assert cache_leftpad is None, "left pads want lengths beside them"
        cache_seqlens = full
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32)
    for numbers in (cache_seqlens, cache_leftpad, cache_batch_idx):
        assert numbers is None or (numbers.dtype == torch.int32 and numbers.shape == (batch,))
    assert int(cache_seqlens.max()) <= full
    output = torch.empty(q.shape, dtype=q.dtype)
    for row in range(batch):
        first = 0 if cache_leftpad is None else int(cache_leftpad[row])
        source, length = row if cache_batch_idx is None else int(cache_batch_idx[row]), int(cache_seqlens[row])
        if block_table is None:
            keys, values = (cache[source, first:length] for cache in (k_cache, v_cache))
        else:
            keys, values = (_from_pages(cache, block_table, row, length) for cache in (k_cache, v_cache))
        output[row] = _attend(q[row], keys, values, softmax_scale, causal, window_size, softcap)
    return output


def visible(queries: int, keys: int, causal: bool, window_size=(-1, -1)) -> torch.Tensor:
    """
    Bool `[queries, keys]`. The mask is aligned to the bottom right corner: query i stands at key i + keys - queries.
    With `causal`, nothing right of it is seen, whatever `window_size` says.
    """
    place = torch.arange(queries)[:, None] + keys - queries
    column = torch.arange(keys)
    left, right = window_size[0], 0 if causal else window_size[1]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= column >= place - left
    if right >= 0:
        seen &= column <= place + right
    return seen


def _attend(q, k, v, scale, causal, window_size, softcap) -> torch.Tensor:
    """One sequence: q `[queries, heads, dim]`, k and v `[keys, kv_heads, dim]`; zeros where nothing is seen."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    seen = visible(q.shape[0], k.shape[0], causal, window_size)
    output = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(q.shape[0]):
        columns = seen[row].nonzero().flatten()
        if not len(columns):
            continue
        for head in range(q.shape[1]):
            scores = k[columns, head // groups].double() @ q[row, head].double() * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            output[row, head] = scores.softmax(0) @ v[columns, head // groups].double()
    return output.to(q.dtype)


def _from_pages(cache, block_table, sequence: int, length: int) -> torch.Tensor:
    """The first `length` rows of a sequence, `[length, heads, dim]`."""
    pages, size = cache.shape[:2]
    assert size % 256 == 0, "a page is a multiple of 256 rows"
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
    needed = block_table[sequence, : -(-length // size)].tolist()
    assert len(needed) * size >= length and all(0 <= page < pages for page in needed)
    if not needed:
        return cache[0, :0]
    return torch.cat([cache[page] for page in needed])[:length]


def _check(q, k, v, queries_dim: int) -> None:
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "packed heads"
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    assert q.shape[-2] % k.shape[-2] == 0 and k.shape == v.shape
    assert k.dim() == queries_dim + 1
