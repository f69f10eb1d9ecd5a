"""Grouped attention against a slow softmax in fp64: all kinds of masks, paddings, windows, rows in any places."""

import numpy as np
import pytest
import torch

from hf_suffix_cache import grouped
from hf_suffix_cache.grouped import decode_attention, grouped_attention, scattered_attention, visible_bounds
from hf_suffix_cache.masks import causal_by_position, to_additive

HEADS = [(9, 3, 16), (4, 1, 32), (6, 6, 8), (8, 2, 24)]  # query heads, key heads, head_dim
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def oracle(query, key, value, mask, scaling=None) -> torch.Tensor:
    """Softmax by the book, head by head, in fp64. Queries that see nothing are NaN."""
    batch, heads, queries, dim = query.shape
    groups = heads // key.shape[1]
    output = torch.zeros(batch, queries, heads, dim, dtype=torch.float64)
    for row in range(batch):
        for head in range(heads):
            scores = query[row, head].double() @ key[row, head // groups].double().T
            scores = scores * (dim**-0.5 if scaling is None else scaling)
            if mask is not None:
                part = mask[min(row, mask.shape[0] - 1), 0]
                scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part.double()
            output[row, :, head] = scores.softmax(dim=-1) @ value[row, head // groups].double()
    return output


def tensors(layout, queries, keys, batch=1, dtype=torch.float32, seed=0):
    """Query, key and value as a model and a view give them: not packed, keys and values in larger buffers."""
    heads, kv_heads, dim = layout
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, queries, heads, dim, generator=generator).to(dtype).transpose(1, 2)
    key, value = (
        torch.randn(kv_heads, 2, batch, keys + 7, dim, generator=generator)
        .to(dtype)[:, 1]
        .transpose(0, 1)[:, :, :keys]
        for _ in range(2)
    )
    return query, key, value


def same(got, want, dtype=torch.float32) -> bool:
    assert got.shape == want.shape and got.is_contiguous() and got.dtype == dtype
    seen = ~want.isnan()
    return bool((got.double() - want)[seen].abs().max() < TOLERANCE[dtype])


def scattered_columns(queries, keys, seed=0) -> torch.Tensor:
    chosen = np.random.default_rng(seed).choice(keys - 1, queries - 1, replace=False)
    return torch.from_numpy(np.sort(np.append(chosen, keys - 1)))


def mask_of(kind, queries, keys, batch) -> torch.Tensor:
    """Masks of scattered queries; those with padding differ from one batch row to the next."""
    columns, everything = scattered_columns(queries, keys), torch.arange(keys)
    pads = torch.arange(batch) * 5
    valid = everything >= pads[:, None]
    if kind == "causal":
        return causal_by_position(columns, everything)
    if kind == "window":
        return causal_by_position(columns, everything, window=9)
    if kind == "chunked":
        return causal_by_position(columns, everything, chunk=16)
    if kind == "padded window":
        return causal_by_position(columns, everything, window=20, key_valid=valid)
    if kind == "holes":
        return causal_by_position(columns, everything) & (everything % 7 != 3)
    return causal_by_position(columns, everything, key_valid=valid)


# -- one token ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", HEADS, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_decoding_one_token_equals_the_oracle(layout, batch, dtype):
    query, key, value = tensors(layout, 1, 100, batch, dtype)
    assert same(decode_attention(query, key, value, None, None), oracle(query, key, value, None), dtype)
    assert same(decode_attention(query, key, value, None, 0.3), oracle(query, key, value, None, 0.3), dtype)


@pytest.mark.parametrize("kind", ["padded", "window", "holes"])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("queries", [1, 2, 5])
def test_decoding_under_a_mask_equals_the_oracle(queries, additive, kind):
    query, key, value = tensors((9, 3, 16), queries, 60, batch=2)
    mask = mask_of(kind, queries, 60, 2)
    want = oracle(query, key, value, mask)
    mask = to_additive(mask, torch.float32) if additive else mask
    assert same(decode_attention(query, key, value, mask, None), want)


# -- scattered rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["causal", "window", "chunked", "padded", "padded window", "holes"])
@pytest.mark.parametrize("layout", HEADS, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("additive", [False, True])
def test_scattered_rows_equal_the_oracle(kind, layout, batch, additive):
    query, key, value = tensors(layout, 70, 200, batch)
    mask = mask_of(kind, 70, 200, batch)
    want = oracle(query, key, value, mask)
    mask = to_additive(mask, torch.float32) if additive else mask
    assert same(scattered_attention(query, key, value, mask, None), want)
    assert not same(scattered_attention(query, key, value, mask.roll(1, dims=-1), None), want)  # control


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scattered_rows_in_half_precision_equal_the_oracle(dtype):
    query, key, value = tensors((9, 3, 64), 70, 200, 2, dtype)
    mask = mask_of("padded", 70, 200, 2)
    want = oracle(query, key, value, mask)
    assert same(scattered_attention(query, key, value, mask, None), want, dtype)
    assert not same(scattered_attention(query, key, value, mask.roll(40, dims=-1), None), want, dtype)  # control


def test_rows_of_one_piece_equal_the_oracle_whatever_the_block():
    query, key, value = tensors((4, 2, 16), 33, 80)
    mask = causal_by_position(torch.arange(47, 80), torch.arange(80))
    want = oracle(query, key, value, mask)
    for block in (1, 8, 32, 33, 100):
        bounds = visible_bounds(mask, block)
        assert same(scattered_attention(query, key, value, mask, None, bounds), want)


@pytest.mark.parametrize("layout", HEADS, ids=str)
@pytest.mark.parametrize("before", [0, 1, 9, 20])
def test_the_end_of_a_text_by_the_causal_kernel_equals_the_oracle(before, layout, monkeypatch):
    monkeypatch.setattr(grouped, "CAUSAL_ROWS", 64)
    query, key, value = tensors(layout, 100 - before, 100, 2)
    mask = causal_by_position(torch.arange(before, 100), torch.arange(100))
    bounds = visible_bounds(mask)
    assert bounds == [[]]
    for scaling in (None, 0.3):
        got = scattered_attention(query, key, value, mask, scaling, bounds)
        assert same(got, oracle(query, key, value, mask, scaling))
    padded = torch.cat([mask, mask & (torch.arange(100) >= 5)])  # only rows without padding are plain
    assert [not part for part in visible_bounds(padded)] == [True, False]
    want = oracle(query, key, value, padded)
    assert same(scattered_attention(query, key, value, padded, None), want)


def test_only_the_end_of_a_text_is_taken_for_it(monkeypatch):
    """Each of these differs from a plain causal mask in one cell, its rows in number, or its type."""
    monkeypatch.setattr(grouped, "CAUSAL_ROWS", 64)
    mask = causal_by_position(torch.arange(10, 100), torch.arange(100))
    assert visible_bounds(mask) == [[]]
    for row, column in ((0, 0), (0, 10), (0, 11), (89, 99), (89, 0), (40, 30), (40, 51)):
        other = mask.clone()
        other[0, 0, row, column] ^= True
        assert visible_bounds(other) != [[]], (row, column)
    assert visible_bounds(mask[:, :, :63]) != [[]]
    assert visible_bounds(causal_by_position(torch.arange(30, 100), torch.arange(100))) != [[]]
    assert visible_bounds(to_additive(mask, torch.float32)) != [[]]


def test_queries_that_see_nothing_are_those_of_stock():
    query, key, value = tensors((4, 2, 16), 40, 40, 2)
    mask = causal_by_position(
        torch.arange(40), torch.arange(40), key_valid=torch.arange(40) >= torch.tensor([[0], [36]])
    )
    got = scattered_attention(query, key, value, mask, None)
    repeated = (states.repeat_interleave(2, dim=1) for states in (key, value))
    want = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask).transpose(1, 2)
    assert torch.allclose(got, want, atol=1e-6, equal_nan=True)
    assert torch.isfinite(got).all()


def test_not_a_number_behind_what_a_block_sees_does_not_reach_it():
    """Rows behind a chunk may never have been written. What no query of a block sees is not even multiplied."""
    query, key, value = tensors((4, 2, 16), 32, 80)
    mask = causal_by_position(torch.arange(32), torch.arange(80))
    want = oracle(query, key, value, mask)
    key[:, :, 32:], value[:, :, 32:] = torch.nan, torch.nan
    assert same(scattered_attention(query, key, value, mask, None), want)


# -- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["causal", "window", "chunked", "padded window", "holes"])
def test_bounds_are_the_first_and_the_last_visible_key(kind):
    mask = mask_of(kind, 70, 200, 3)
    for form in (mask, to_additive(mask, torch.float32), to_additive(mask, torch.bfloat16)):
        bounds = visible_bounds(form, 16)
        assert len(bounds) == mask.shape[0]
        for row, blocks in enumerate(bounds):
            assert [block[0] for block in blocks] == [0] + [block[1] for block in blocks[:-1]]
            assert blocks[-1][1] == 70 and all(stop - start <= 16 for start, stop, _, _ in blocks)
            for start, stop, first, last in blocks:
                visible = mask[row, 0, start:stop].any(dim=0).nonzero().flatten().tolist()
                assert (first, last) == ((visible[0], visible[-1] + 1) if visible else (0, 200))


# -- which way ------------------------------------------------------------------------------------------------------


def test_grouped_attention_takes_the_faster_way_or_none(monkeypatch):
    ways = []
    for name in ("decode_attention", "scattered_attention"):
        function = getattr(grouped, name)
        monkeypatch.setattr(grouped, name, lambda *args, _f=function, _n=name: ways.append(_n) or _f(*args))
    for queries, keys, expected in ((1, 4096, "decode_attention"), (2, 600, "decode_attention"), (70, 600, None)):
        query, key, value = tensors((9, 3, 16), queries, keys)
        mask = None if queries == 1 else mask_of("causal", queries, keys, 1)
        assert same(grouped_attention(query, key, value, mask, None), oracle(query, key, value, mask))
        assert ways.pop() == (expected or "scattered_attention") and not ways


@pytest.mark.parametrize(
    "change",
    [
        "other value dim",
        "mask of each head",
        "mask of other length",
        "gradient",
        "other dtype",
        "prefill",
        "one mask row",
    ],
)
def test_what_it_has_no_answer_for_is_left_to_the_model(change):
    query, key, value = tensors((9, 3, 16), 70, 600)
    mask = mask_of("causal", 70, 600, 1)
    assert grouped_attention(query, key, value, mask, None) is not None  # control
    if change == "other value dim":
        value = value[..., :8]
    elif change == "mask of each head":
        mask = mask.expand(1, 9, 70, 600)
    elif change == "mask of other length":
        mask = mask[..., :-1]
    elif change == "gradient":
        query = query.clone().requires_grad_()
    elif change == "other dtype":
        key = key.double()
    elif change == "prefill":
        mask = None
    elif change == "masked prefill":
        key, value, mask = key[:, :, :70], value[:, :, :70], mask[..., :70]
    else:
        mask = mask[:, :, :1]
    assert grouped_attention(query, key, value, mask, None) is None
    if change == "gradient":
        with torch.no_grad():
            assert grouped_attention(query, key, value, mask, None) is not None
