"""Masks against a slow double loop, against transformers' own masks, and through attention itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import (
    chunked_causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from hf_suffix_cache.masks import causal_by_position, query_blocks, to_additive, two_segment


def loop_mask(queries, keys, window=None, valid=None, chunk=None):
    """The obvious oracle: `[batch][query][key]` lists in, bool `[batch, 1, queries, keys]` out, one pair at a time."""
    mask = torch.zeros(len(queries), 1, len(queries[0]), len(keys[0]), dtype=torch.bool)
    for b, row in enumerate(queries):
        for q, query in enumerate(row):
            for k, key in enumerate(keys[b]):
                seen = key <= query
                seen = seen and (window is None or query - key < window)
                seen = seen and (chunk is None or query // chunk == key // chunk)
                seen = seen and (valid is None or bool(valid[b][k]))
                mask[b, 0, q, k] = seen
    return mask


def bottom_right(num_queries, num_keys):
    """What a kernel builds that is only told "causal": the last query is taken for the row in the last slot."""
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool)
    return ones.tril(num_keys - num_queries)[None, None]


def attend(queries, keys, values, mask):
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


@st.composite
def batches(draw):
    batch, num_keys = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    keys = [draw(st.permutations(range(num_keys))) for _ in range(batch)]
    num_queries = draw(st.integers(1, num_keys))
    queries = [draw(st.permutations(range(num_keys)))[:num_queries] for _ in range(batch)]
    valid = [[draw(st.booleans()) for _ in range(num_keys)] for _ in range(batch)]
    window, chunk = draw(st.none() | st.integers(1, 14)), draw(st.none() | st.integers(1, 14))
    return queries, keys, window, draw(st.sampled_from([None, valid])), chunk


@given(batches())
@settings(max_examples=200, deadline=None)
def test_causal_by_position_any_order_equals_double_loop(case):
    queries, keys, window, valid, chunk = case
    tensor = None if valid is None else torch.tensor(valid)
    mask = causal_by_position(torch.tensor(queries), torch.tensor(keys), window, tensor, chunk)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, loop_mask(queries, keys, window, valid, chunk))


def test_causal_by_position_one_dimensional_inputs_broadcast_over_batch():
    positions, valid = torch.arange(6), torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    assert causal_by_position(positions, positions).shape == (1, 1, 6, 6)
    mask = causal_by_position(positions[-3:], positions, key_valid=valid)
    assert torch.equal(mask, loop_mask([[3, 4, 5]] * 2, [list(range(6))] * 2, valid=valid.tolist()))
    assert causal_by_position(positions.expand(2, 6), positions, key_valid=valid[1]).shape == (2, 1, 6, 6)


@pytest.mark.parametrize("window, chunk", [(None, None), (1, None), (4, None), (40, None), (None, 3), (None, 40)])
@pytest.mark.parametrize("pads", [0, 3])
@pytest.mark.parametrize("first_query", [0, 7, 9], ids=["prefill", "continue", "decode"])
def test_causal_by_position_left_padded_batch_equals_transformers(window, chunk, pads, first_query):
    total = 10
    attention_mask = torch.ones(2, total, dtype=torch.bool)
    attention_mask[1, :pads] = False
    positions = torch.stack([torch.arange(total), torch.arange(total) - pads]).clamp(min=0)
    function = {}
    if window is not None:
        function = {"mask_function": sliding_window_causal_mask_function(window)}
    if chunk is not None:
        function = {"mask_function": chunked_causal_mask_function(chunk, torch.tensor([0, pads]))}
    arguments = dict(batch_size=2, q_length=total - first_query, kv_length=total, q_offset=first_query, **function)
    stock = sdpa_mask(attention_mask=attention_mask, allow_is_causal_skip=False, **arguments)
    ours = causal_by_position(positions[:, first_query:], positions, window, attention_mask, chunk)
    # What a pad itself would see differs (its position is clamped) and never reaches an answer.
    real = attention_mask[:, first_query:]
    assert torch.equal(ours[:, 0][real], stock[:, 0][real])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        additive = eager_mask(attention_mask=attention_mask, dtype=dtype, **arguments)
        assert to_additive(ours, dtype).dtype == dtype
        assert torch.equal(to_additive(ours, dtype)[:, 0][real], additive[:, 0][real])


@pytest.mark.parametrize("window", [None, 5])
def test_causal_by_position_scattered_queries_equals_transformers_query_offset(window):
    """transformers builds this mask too if its query offset is a tensor (`slots - arange`), as the view makes it."""
    chosen, total = torch.tensor([2, 3, 7, 11, 19]), 20
    function = {} if window is None else {"mask_function": sliding_window_causal_mask_function(window)}
    offset = chosen - torch.arange(len(chosen))
    stock = sdpa_mask(1, len(chosen), total, q_offset=offset, allow_is_causal_skip=False, **function)
    assert torch.equal(causal_by_position(chosen, torch.arange(total), window), stock)


@pytest.mark.parametrize("prefix, suffix", [(5, 4), (1, 1), (0, 4), (4, 0), (16, 3)])
@pytest.mark.parametrize("order", ["prefix first", "suffix first", "shuffled"])
def test_two_segment_any_slot_order_equals_causal_by_position(prefix, suffix, order):
    total = prefix + suffix
    slots = torch.arange(total)
    if order == "suffix first":
        slots = torch.cat([slots[suffix:], slots[:suffix]])  # the first tokens lie behind the suffix rows
    elif order == "shuffled":
        slots = torch.randperm(total, generator=torch.Generator().manual_seed(total))
    positions = slots.argsort()  # position of the row in each slot
    mask = two_segment(prefix, suffix, slots[:prefix], slots[prefix:].tolist())
    assert mask.shape == (1, 1, total, total)
    assert torch.equal(mask, causal_by_position(positions, positions))
    if order == "prefix first":
        assert torch.equal(mask, two_segment(prefix, suffix))
    if order == "suffix first":
        assert torch.equal(mask, two_segment(prefix, suffix, suffix_slots=range(suffix)))
        assert torch.equal(mask, two_segment(prefix, suffix, prefix_slots=range(suffix, total)))


def test_two_segment_suffix_before_prefix_in_memory_is_the_named_block_form():
    """Written out: slots 0, 1 hold the suffix of `[a b c | x y]`, slots 2 to 4 its prefix."""
    expected = [
        [1, 0, 1, 1, 1],  # x
        [1, 1, 1, 1, 1],  # y
        [0, 0, 1, 0, 0],  # a
        [0, 0, 1, 1, 0],  # b
        [0, 0, 1, 1, 1],  # c
    ]
    assert torch.equal(two_segment(3, 2, suffix_slots=[0, 1])[0, 0], torch.tensor(expected, dtype=torch.bool))


@pytest.mark.parametrize("order", ["in prompt order", "suffix before prefix"])
def test_attention_under_position_mask_is_that_of_a_plain_prefill(order):
    """Scattered queries over slots in either order give a full prefill's outputs; a bottom-right mask does not."""
    generator = torch.Generator().manual_seed(0)
    total, suffix = 24, 10
    queries, keys, values = torch.randn(3, 1, 2, total, 8, generator=generator).unbind(0)
    full = attend(queries, keys, values, torch.ones(total, total, dtype=torch.bool).tril())

    in_slot = torch.arange(total)
    if order == "suffix before prefix":
        in_slot = in_slot.roll(suffix)
    chosen = torch.tensor([1, 4, 5, 13, 14, 20, 23])
    slot_keys, slot_values = keys[:, :, in_slot], values[:, :, in_slot]
    mask = causal_by_position(chosen, in_slot)
    error = (attend(queries[:, :, chosen], slot_keys, slot_values, mask) - full[:, :, chosen]).abs().max()
    assert error < 1e-5

    wrong = bottom_right(len(chosen), total)
    control = (attend(queries[:, :, chosen], slot_keys, slot_values, wrong) - full[:, :, chosen]).abs().max()
    assert control > 0.1 and not torch.equal(mask, wrong)


def test_bottom_right_mask_is_right_for_the_newest_rows_in_one_piece_only():
    """The negative control has teeth because it is right where it should be."""
    assert torch.equal(causal_by_position(torch.arange(6, 10), torch.arange(10)), bottom_right(4, 10))
    assert not torch.equal(causal_by_position(torch.tensor([2, 6, 7, 9]), torch.arange(10)), bottom_right(4, 10))


def test_to_additive_in_eager_attention_equals_bool_in_sdpa():
    queries, keys, values = torch.randn(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(1)).unbind(0)
    mask = causal_by_position(torch.arange(8), torch.arange(8), window=3)
    scores = queries @ keys.transpose(-1, -2) / 2.0
    right = attend(queries, keys, values, mask)
    eager = (scores + to_additive(mask, torch.float32)).softmax(-1) @ values
    assert (eager - right).abs().max() < 1e-5
    assert ((scores + mask).softmax(-1) @ values - right).abs().max() > 0.1  # the fault that `to_additive` prevents


def test_to_additive_query_without_keys_stays_finite():
    mask = torch.zeros(1, 1, 2, 3, dtype=torch.bool)
    assert to_additive(mask, torch.float16).softmax(-1).isfinite().all()


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 5000), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_query_blocks_cover_once_within_bytes(num_queries, num_keys, max_bytes, bytes_per_entry):
    blocks = query_blocks(num_queries, num_keys, max_bytes, bytes_per_entry)
    assert [query for block in blocks for query in range(num_queries)[block]] == list(range(num_queries))
    sizes = [block.stop - block.start for block in blocks]
    assert all(size == 1 or size * num_keys * bytes_per_entry <= max_bytes for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    # As few blocks as the bound allows: with one block less, some block would be too big.
    if len(sizes) > 1:
        assert -(-num_queries // (len(sizes) - 1)) * num_keys * bytes_per_entry > max_bytes


def test_query_blocks_masks_put_together_equal_the_whole():
    chosen, keys = torch.arange(0, 200, 3), torch.randperm(200, generator=torch.Generator().manual_seed(2))
    blocks = query_blocks(len(chosen), 200, max_bytes=1000)
    assert len(blocks) > 5 and query_blocks(len(chosen), 200) == [slice(0, len(chosen))]
    parts = [causal_by_position(chosen[block], keys, window=50) for block in blocks]
    assert torch.equal(torch.cat(parts, dim=2), causal_by_position(chosen, keys, window=50))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: causal_by_position(torch.arange(3), torch.arange(3), window=0), ValueError, "`window`"),
        (lambda: causal_by_position(torch.arange(3), torch.arange(3), chunk=0), ValueError, "`chunk`"),
        (lambda: causal_by_position(torch.rand(3), torch.arange(3)), TypeError, "`query_positions`"),
        (lambda: causal_by_position(torch.arange(3), torch.zeros(1, 1, 3).long()), ValueError, "`key_positions`"),
        (lambda: causal_by_position(torch.arange(3), torch.arange(3), key_valid=torch.ones(4)), ValueError, "3 keys"),
        (lambda: two_segment(-1, 2), ValueError, "-1"),
        (lambda: two_segment(2, 2, [0, 1, 2]), ValueError, "`prefix_slots` must hold 2"),
        (lambda: two_segment(2, 2, [0, 1], [1, 2]), ValueError, "once"),
        (lambda: two_segment(2, 2, [0, 7]), ValueError, "once"),
        (lambda: two_segment(2, 2, suffix_slots=[-1, 0]), ValueError, "once"),
        (lambda: to_additive(torch.zeros(2, 2), torch.float32), TypeError, "bool"),
        (lambda: to_additive(torch.zeros(2, 2).bool(), torch.int64), TypeError, "floating"),
        (lambda: query_blocks(-1, 2), ValueError, "-1"),
        (lambda: query_blocks(1, 2, max_bytes=0), ValueError, "`max_bytes`"),
    ],
)
def test_user_mistakes_raise_and_name_the_argument(call, error, words):
    with pytest.raises(error, match=words):
        call()
