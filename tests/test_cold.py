"""Rows in a smaller dtype: how close they come back, and who may be served with them."""

import numpy as np
import pytest
import torch

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.rope import RotarySpec, rotate_keys
from hf_suffix_cache.store.cold import DTYPES, decode, encode, stored_dtype
from hf_suffix_cache.store.pool import BlockPool, Budget, LayerShape
from hf_suffix_cache.store.room import copy_to
from reference import ask, check_pool, forgets_everything, same_as_vanilla, stored
from tiny_models import A, B, C, head, make_model, new_text, old_text, question

SPEC = RotarySpec("rotary.inv_freq")
FREQUENCIES = {SPEC: 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)}
SHAPE = LayerShape(2, 16, 12, torch.float32, torch.device("cpu"), SPEC)
# largest error of a number beside the largest number of its row and head: half a step of its dtype
BOUNDS = {"bfloat16": 2**-8, "float16": 2**-11, "int8": 0.5 / 127 + 1e-6}
ROWS = 40


def cold_rows(name: str):
    """A pool; random rows in a warm extent, and the addresses of their copies in a cold slab."""
    pool = BlockPool([SHAPE] * 3, 8, Budget(1 << 20), poison=True)
    extent = pool.allocate(ROWS)
    generator = torch.Generator().manual_seed(1)
    for tensor in extent.slab.tensors():
        size = tensor[:, :, extent.start : extent.start + ROWS].shape
        scale = torch.logspace(-3, 2, ROWS)[:, None]  # rows of very different sizes
        tensor[:, :, extent.start : extent.start + ROWS] = torch.randn(size, generator=generator) * scale
    (places,) = pool.pack([ROWS], DTYPES[name])
    copy_to(pool, extent.addresses(0, np.arange(ROWS)), places)
    return pool, extent, places


def warm_states(extent, slot: str) -> torch.Tensor:
    return getattr(extent.slab, slot)[SHAPE][:, :, extent.start : extent.start + ROWS]


def worst_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).abs().amax(-1) / want.abs().amax(-1)).max().item()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("slot", ["keys", "values"])
def test_rows_come_back_within_half_a_step(name, slot):
    pool, extent, places = cold_rows(name)
    ((slab, rows, _),) = pool.by_slab(places)
    assert slab.cold is DTYPES[name] and getattr(slab, slot)[SHAPE].dtype is DTYPES[name]
    want = warm_states(extent, slot)
    for index in (rows, torch.from_numpy(rows), slice(int(rows[0]), int(rows[-1]) + 1)):
        got = decode(slab, SHAPE, slot, index)
        assert got.dtype is torch.float32 and 0 < worst_error(got, want) <= BOUNDS[name]


@pytest.mark.parametrize("name", DTYPES)
def test_served_with_a_shift_they_are_as_close(name):
    from hf_suffix_cache.store.gather import copy_rows

    pool, extent, places = cold_rows(name)
    target, shifts = pool.allocate(ROWS), np.where(np.arange(ROWS) % 3 == 0, 0, np.arange(ROWS) * 5 - 60)
    copy_rows(pool, places, target, 0, np.arange(ROWS), shifts, FREQUENCIES)
    want = warm_states(extent, "keys")
    for row, shift in enumerate(shifts.tolist()):
        turned = (
            rotate_keys(want[:, :, row : row + 1], shift, FREQUENCIES[SPEC]) if shift else want[:, :, row : row + 1]
        )
        # a rotation mixes two numbers, so their errors may add up to sqrt(2) of one
        assert worst_error(warm_states(target, "keys")[:, :, row : row + 1], turned) <= 1.5 * 1.42 * BOUNDS[name]
    assert worst_error(warm_states(target, "values"), warm_states(extent, "values")) <= BOUNDS[name]


def test_rows_that_are_moved_between_cold_slabs_keep_their_bits():
    pool, _, places = cold_rows("int8")
    ((slab, rows, _),) = pool.by_slab(places)
    before = [tensor[:, :, rows].clone() for tensor in slab.tensors()]
    other = pool._new_slab(64, torch.int8)
    other.copy_from(slab, rows, np.arange(ROWS) + 7)
    assert all(torch.equal(a, b[:, :, 7 : 7 + ROWS]) for a, b in zip(before, other.tensors(), strict=True))


def test_zeros_stay_zeros_and_nan_stays_nan():
    pool, _, places = cold_rows("int8")
    ((slab, rows, _),) = pool.by_slab(places)
    states = torch.zeros(3, 2, 2, 16)
    states[:, :, 1] = float("nan")
    encode(slab, SHAPE, "keys", rows[:2], states)
    got = decode(slab, SHAPE, "keys", rows[:2])
    assert (got[:, :, 0] == 0).all() and got[:, :, 1].isnan().all()


def test_bytes_are_those_of_the_tensors():
    for name, dtype in {**DTYPES, "own": None}.items():
        pool = BlockPool([SHAPE] * 3, 8, Budget(1 << 20))
        slab = pool._new_slab(64, dtype)
        real = sum(tensor.untyped_storage().nbytes() for tensor in slab.tensors())
        assert real == slab.num_bytes == pool.budget.taken == pool.bytes_total, name
    assert pool.row_bytes == 3 * 2 * 28 * 4 and pool.row_bytes_of(torch.int8) == 3 * 2 * (28 + 2 * 4)


def test_a_dtype_that_saves_nothing_changes_nothing():
    assert stored_dtype(torch.bfloat16, torch.float16) is torch.bfloat16
    assert stored_dtype(torch.float32, None) is torch.float32
    model = make_model("llama").to(torch.bfloat16)
    model.baseline = {**model.baseline}
    cache = SuffixCache(store_dtype="bfloat16", keep_conversations=0)
    ask(model, old_text(60, 1), cache, steps=1)
    ask(model, old_text(60, 2), cache, steps=1)
    report = ask(model, old_text(60, 1) + new_text(9, 1), cache.using(fidelity="exact"), steps=1).report
    assert report.exact_tokens == 60
    (shelf,) = cache._store.shelves.values()
    assert all(slab.cold is None for slab in shelf.pool.slabs.values())
    check_pool(cache)


# -- who is served --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_exact_calls_are_never_served_with_cold_rows_and_others_are(name):
    model = make_model("llama", spy=True)
    cache = stored(model, old_text(100, 1), old_text(80, 2), store_dtype=name, keep_conversations=0)
    (shelf,) = cache._store.shelves.values()
    assert shelf.segments and all(shelf.is_cold(each) and each.state == "derived" for each in shelf.segments)
    assert all(each.exact == 0 and each.hops >= 1 for each in shelf.sequences)
    for _ in range(2):
        answer = same_as_vanilla(model, old_text(100, 1) + new_text(30, 1), cache.using(fidelity="exact", store=False))
        assert answer.report.exact_tokens == 0
    report = ask(model, old_text(100, 1) + new_text(30, 1), cache, steps=2).report
    assert report.carried_tokens == 100 and report.exact_tokens == 0
    assert ask(model, head(1) + old_text(80, 2) + question(1), cache, steps=2).report.shifted_tokens > 50
    check_pool(cache)
    forgets_everything(cache)


def test_control_without_store_dtype_exact_calls_are_served():
    model = make_model("llama")
    cache = stored(model, old_text(100, 1), old_text(80, 2), keep_conversations=0)
    report = ask(model, old_text(100, 1) + new_text(30, 1), cache.using(fidelity="exact"), steps=1).report
    assert report.exact_tokens == 100


def test_newest_conversations_stay_as_they_are_until_they_grow_old():
    model = make_model("llama")
    cache = SuffixCache(store_dtype="int8", keep_conversations=1, fidelity="exact")
    first = ask(model, old_text(60, 1), cache, steps=2).tokens()
    assert same_as_vanilla(model, first + new_text(9, 1), cache, steps=2).report.exact_tokens >= 60
    ask(model, old_text(60, 2), cache, steps=2)
    assert same_as_vanilla(model, first + new_text(9, 2), cache, steps=2).report.exact_tokens == 0
    check_pool(cache)


def test_exact_rows_take_the_place_of_cold_ones():
    model = make_model("llama")
    cache = stored(model, old_text(60, 1), old_text(60, 2), store_dtype="int8", keep_conversations=1)
    (shelf,) = cache._store.shelves.values()
    assert [each.exact for each in shelf.sequences] == [0, 60]
    same_as_vanilla(model, old_text(60, 1), cache.using(fidelity="exact"), steps=1)
    assert [each.ids.tolist() for each in shelf.sequences if each.exact == 60] == [old_text(60, 1)]
    assert len(shelf.sequences) == 2  # the cold one of the same text is gone
    check_pool(cache)


def test_means_are_kept_cold_and_still_learn():
    model = make_model("llama")
    cache = SuffixCache(store_dtype="int8", keep_conversations=0)
    passage, seen = old_text(80, 5), []
    for number in range(4):
        ids = old_text(60, 50 + number) + passage + question(number)
        ask(model, ids, cache.using(fidelity="exact"), steps=1)
        (shelf,) = cache._store.shelves.values()
        seen.append([int(mean.copies.counts.max()) for mean in shelf.means])
        assert all(shelf.is_cold(mean) for mean in shelf.means)
        check_pool(cache)
    assert seen == [[], [2], [3], [4]]
    (mean,) = shelf.means
    for slab, rows, _ in shelf.pool.by_slab(mean.addresses):
        for shape in shelf.pool.groups:
            assert torch.isfinite(decode(slab, shape, "keys", rows)).all()


def test_moved_answers_from_8_bit_are_close_to_those_from_rows_as_they_are():
    from reference import kl

    model = make_model("llama")
    divergence = {}
    for name in (None, "int8"):
        cache = stored(
            model, head(0) + A + B + C + question(0), old_text(60, 3), store_dtype=name, keep_conversations=0
        )
        ids = head(1) + C + A + B + question(1)
        answer = ask(model, ids, cache, steps=1)
        assert answer.report.shifted_tokens > 60
        divergence[name] = kl(ask(model, ids, steps=1).first, answer.first)
    assert divergence["int8"] <= 1.5 * divergence[None] + 0.01, divergence
