"""What the store's memory is spent on, what it never takes, and what it gives up first."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.store import pool as pools
from hf_suffix_cache.store.consensus import MIN_TEXT
from hf_suffix_cache.store.room import EXTENT_SHARE, IDLE_SHARE, PATIENCE, demote, moved_rows
from reference import ask, check_pool, forgets_everything, same_as_vanilla, served_rows, stored, work_is_reported
from tiny_models import A, B, C, forget, head, make_model, new_text, old_text, question, text

ROW = 3 * 2 * 2 * 16 * 4  # bytes: layers x (keys, values) x kv heads x head_dim x fp32
CORPUS = [text(200, 9000 + number) for number in range(40)]
SYSTEM = text(100, 9100)


def shelf_of(cache):
    (shelf,) = cache._store.shelves.values()
    return shelf


def prompt_of(passages, seed: int) -> list[int]:
    """A system prompt, passages of the corpus, and a question."""
    return SYSTEM + sum((CORPUS[number] for number in passages), []) + text(20, 9200 + seed)


def bytes_of(cache) -> int:
    """Bytes of all tensors that the store really holds."""
    slabs = [slab for pool in cache._store.pools.values() for slab in pool.slabs.values()]
    return sum(tensor.untyped_storage().nbytes() for slab in slabs for tensor in slab.tensors())


def check_kinds(cache) -> dict[str, int]:
    """Bytes by kind add up to what is used, and to what the segments and extents of an idle store say."""
    kinds, shelves = cache.stats.bytes_by_kind(), list(cache._store.shelves.values())
    assert sum(size for kind, size in kinds.items() if kind != "private") == cache.stats.bytes_used, kinds
    assert kinds["views"] == kinds["private"] == 0 and min(kinds.values()) >= 0
    expected = dict.fromkeys(("exact", "derived", "means"), 0)
    for shelf in shelves:
        for segment in shelf.segments:
            kind = "means" if segment.is_mean else segment.state
            for slab, rows, _ in shelf.pool.by_slab(segment.addresses):
                expected[kind] += len(rows) * slab.row_bytes
    assert {kind: kinds[kind] for kind in expected} == expected
    assert kinds["extents"] == sum(moved_rows(each) * s.pool.row_bytes for s in shelves for each in s.kept)
    return kinds


# -- targets --------------------------------------------------------------------------------------------------------


def test_32_requests_over_a_corpus_take_a_third_of_their_caches():
    model, random = make_model("llama", max_position_embeddings=8192), np.random.default_rng(1)
    cache, alone = SuffixCache(), 0
    for number in range(32):
        answer = ask(model, prompt_of(random.permutation(40)[:8], number), cache, steps=32)
        alone += (answer.ids.shape[1] - 1) * ROW
    assert cache.stats.bytes_used <= 0.35 * alone, cache.stats
    check_kinds(cache)
    before = cache.stats.bytes_used
    cache.compact()
    kinds = check_kinds(cache)
    assert kinds["waste"] <= 0.05 * cache.stats.bytes_used <= 0.05 * before
    check_pool(cache)


def test_ten_conversations_go_on_in_the_memory_of_five():
    model, random = make_model("llama", spy=True, max_position_embeddings=8192), np.random.default_rng(2)
    talks = [prompt_of(random.permutation(40)[:20], number) for number in range(10)]
    cache = SuffixCache(max_bytes=5 * (len(talks[0]) + 2 * 32 + 20) * ROW)
    for turn in range(2):
        for number, ids in enumerate(talks):
            model.spy.clear()
            answer = ask(model, ids, cache, steps=32)
            work_is_reported(model, answer, decoded_rows=31)
            assert turn == 0 or answer.report.computed_rows <= 22, answer.report
            talks[number] = answer.tokens() + text(20, 9400 + 10 * turn + number)
            assert bytes_of(cache) <= cache.config.max_bytes
    assert cache.stats.evictions == 0
    same_as_vanilla(model, talks[0], cache.using(fidelity="exact"), steps=3)
    check_pool(cache)


def test_conversations_go_on_by_their_recipes_in_little_memory():
    model = make_model("llama", spy=True)
    orders = list(itertools.permutations([A, B, C]))
    talks = [head(number) + sum(orders[number % 6], []) + question(number) for number in range(9)]
    cache = SuffixCache(max_bytes=1400 * ROW, block_size=4)
    for turn in range(3):
        for number, ids in enumerate(talks):
            answer = ask(model, ids, cache, steps=3)
            if turn:
                assert answer.report.computed_rows <= 22, (turn, number, answer.report)
            talks[number] = answer.tokens() + new_text(8, 60 + 10 * turn + number)
            check_pool(cache)
    assert cache.stats.evictions == 0


# -- what is never passed -------------------------------------------------------------------------------------------


@pytest.fixture
def watched(monkeypatch):
    """Counts new slabs, each of which must leave all real tensors of its store within `max_bytes`."""
    made, make = [], pools.BlockPool._new_slab

    def new_slab(self, rows, cold=None):
        slab = make(self, rows, cold)
        real = sum(each.untyped_storage().nbytes() for other in self.slabs.values() for each in other.tensors())
        assert real == self.budget.taken == self.bytes_total <= self.budget.max_bytes
        made.append(slab.num_bytes)
        return slab

    monkeypatch.setattr(pools.BlockPool, "_new_slab", new_slab)
    return made


MODEL = {}


def tiny_model():
    """One model for all examples, which the factory's checks have forgotten."""
    if not MODEL:
        MODEL["model"] = make_model("llama", spy=True)
        forget(MODEL["model"])
    return MODEL["model"]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.integers(40, 700),
    keep=st.integers(0, 4),
    store_dtype=st.sampled_from([None, "int8", "float16"]),
    block_size=st.sampled_from([1, 5, 16]),
    requests=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 9)), min_size=3, max_size=14),
)
def test_max_bytes_is_never_passed_whatever_is_asked(watched, budget, keep, store_dtype, block_size, requests):
    model = tiny_model()
    options = dict(keep_conversations=keep, store_dtype=store_dtype, block_size=block_size)
    cache = SuffixCache(max_bytes=budget * ROW, **options)
    pieces = [A, B, C, A + C, C + B, B + A + C]
    for number, (piece, start, steps) in enumerate(requests):
        ids = head(start) + pieces[piece] + question(number % 4)
        handle = cache.using(fidelity="exact") if number % 3 == 0 else cache
        answer = (
            same_as_vanilla(model, ids, handle, steps=steps)
            if number % 3 == 0
            else ask(model, ids, cache, steps=steps)
        )
        assert torch.isfinite(torch.stack(answer.scores)).all()
        assert bytes_of(cache) == cache.stats.bytes_total <= cache.config.max_bytes
        left_out = "memory of its own" in (answer.report.reason or "")
        assert left_out or cache.stats.bytes_used > 0
        check_pool(cache)
        check_kinds(cache)
    forgets_everything(cache)
    assert cache.stats.bytes_total == 0


def test_watching_slabs_notices_one_too_many(watched):
    pool = pools.BlockPool([pools.LayerShape(1, 8, 8, torch.float32, torch.device("cpu"))], 4, pools.Budget(64 * 64))
    pool.allocate(16)
    pool.budget.taken = 0  # as if it had been forgotten
    with pytest.raises(AssertionError):
        pool.allocate(64)
    assert len(watched) == 1


def test_call_that_finds_no_room_says_so_and_is_counted_as_private():
    model = make_model("llama", spy=True)
    cache = stored(model, old_text(60, 1), max_bytes=100 * ROW)
    seen = []

    def look(ids, scores):
        seen.append(cache.stats.bytes_by_kind())
        return scores

    answer = same_as_vanilla(model, old_text(120, 3), cache, processors=[look])
    needed, reason = seen[0]["private"], answer.report.reason
    assert needed >= 125 * ROW and f"{needed:,} bytes" in reason and f"({100 * ROW:,})" in reason
    assert seen[0]["views"] == 0 and cache.stats.bytes_by_kind()["private"] == 0
    assert cache.stats.evictions == 0 and ask(model, old_text(60, 1), cache, steps=1).report.exact_tokens >= 59
    fits = ask(model, old_text(20, 5), cache.using(fidelity="exact"), steps=1).report
    assert fits.reason is None
    check_pool(cache)


def test_views_are_counted_while_their_calls_run():
    model, seen = make_model("llama"), []
    cache = stored(model, old_text(60, 1))

    def look(ids, scores):
        seen.append((cache.stats.bytes_by_kind(), cache.stats.bytes_used))
        return scores

    ids = torch.tensor([old_text(90, 3)])
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=3)
    model.generate(ids, cache=cache, logits_processor=LogitsProcessorList([look]), **options)
    for kinds, used in seen:
        assert 93 * ROW <= kinds["views"] <= 112 * ROW and sum(kinds.values()) == used
    assert check_kinds(cache)["views"] == 0
    assert "exact" in str(cache.stats) and cache.stats.to_dict()["bytes_by_kind"] == cache.stats.bytes_by_kind()


def test_empty_slabs_go_back_except_one_for_the_next_call():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", max_bytes=8000 * ROW)
    for number in range(12):
        ask(model, old_text(100 + 30 * number, number), cache.using(store=False), steps=1)
    pool = shelf_of(cache).pool
    assert cache.stats.bytes_used == 0 and len(pool.slabs) == 1


# -- what is given up first -----------------------------------------------------------------------------------------


def test_kept_extents_hold_few_rows_that_recipes_give_as_well():
    model = make_model("llama")
    cache = SuffixCache(keep_conversations=4)
    for number in range(PATIENCE - 1):
        order = [(A, B, C), (B, C, A), (C, A, B)][number % 3]
        ask(model, head(number) + sum(order, []) + question(number), cache, steps=2)
        shelf = shelf_of(cache)
        kept = sorted(shelf.kept, key=lambda each: -each.last_used)
        assert 1 <= len(kept) <= 4 and kept[0].last_used == max(each.last_used for each in shelf.sequences)
        assert sum(map(moved_rows, kept[1:])) <= EXTENT_SHARE * shelf.rows
    check_kinds(cache)


def test_store_of_requests_that_nobody_continues_keeps_no_extent_of_moved_rows_until_somebody_does():
    model, cache = make_model("llama"), SuffixCache()
    for number in range(PATIENCE + 2):
        order = [(A, B, C), (B, C, A), (C, A, B)][number % 3]
        answer = ask(model, head(number) + sum(order, []) + question(number), cache, steps=2)
        assert len(shelf_of(cache).kept) >= (number < PATIENCE - 1)
    assert all(moved_rows(each) <= IDLE_SHARE * shelf_of(cache).rows for each in shelf_of(cache).kept)
    answer = ask(model, answer.tokens() + new_text(20, 9), cache, steps=2)
    assert answer.report.carried_tokens > 100 and len(shelf_of(cache).kept) == 1
    assert ask(model, answer.tokens() + new_text(20, 9), cache, steps=2).report.carried_tokens > 100
    check_pool(cache)


def test_chats_that_moved_nothing_keep_their_extents():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", keep_conversations=3)
    for number in range(5):
        ask(model, old_text(60, number), cache, steps=2)
    assert len(shelf_of(cache).kept) == 3  # whole blocks, but no row twice
    check_pool(cache)


def test_extents_then_means_go_before_sequences():
    model = make_model("llama")
    cache = SuffixCache(max_bytes=900 * ROW, keep_conversations=4)
    passage = old_text(2 * MIN_TEXT, 5)
    for number in range(2):  # from two contexts: a mean
        ask(model, old_text(60, 50 + number) + passage + question(number), cache.using(fidelity="exact"), steps=2)
    shelf, store = shelf_of(cache), cache._store
    assert len(shelf.means) == 1 and len(shelf.kept) == 2 and len(shelf.sequences) == 2
    seen = []
    while store.steward.step(shelf.pool, 10**6):
        seen.append((len(shelf.kept), len(shelf.means), len(shelf.sequences)))
    left = [entry for index, entry in enumerate(seen) if index == 0 or entry != seen[index - 1]]
    assert left == [(1, 1, 2), (0, 1, 2), (0, 0, 2), (0, 0, 1), (0, 0, 0)]
    assert store.evictions == 3 and cache.stats.bytes_used == 0
    check_pool(cache)


def test_rows_of_a_recipe_come_back_bit_for_bit_when_their_extent_is_given_up():
    model = make_model("llama")
    cache = SuffixCache()
    for number, order in enumerate([(A, B, C), (C, A, B), (B, A, C)]):
        ask(model, head(number) + sum(order, []) + question(number), cache, steps=2)
    shelf = shelf_of(cache)
    (newest,) = [each for each in shelf.kept if len(shelf.kept) == 1] or [max(shelf.kept, key=lambda s: s.last_used)]
    turn = newest.ids.tolist() + new_text(5, 1)
    want = rows_of_next_turn(model, cache, turn)
    demote(shelf, newest)
    cache.compact()
    check_pool(cache)
    assert newest.extent is None
    got = rows_of_next_turn(model, cache, turn)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def rows_of_next_turn(model, cache, ids):
    """Keys and values of all layers that a turn is served with, which is not stored."""
    answer, rows = served_rows(model, ids, cache.using(store=False), steps=1)
    assert answer.report.carried_tokens > 50
    served = answer.report.exact_tokens + answer.report.carried_tokens
    return [part[:, :served].clone() for layer in rows for part in layer]


def test_tails_of_several_conversations_share_blocks():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", keep_conversations=0, block_size=64)
    for number in range(8):
        ask(model, old_text(70, number), cache.using(), steps=1)
    cache.compact()
    kinds = check_kinds(cache)
    assert kinds["waste"] < 64 * ROW and kinds["exact"] == 8 * 70 * ROW
    for number in range(8):
        same_as_vanilla(model, old_text(70, number) + new_text(4, number), cache)
    check_pool(cache)


def test_store_does_not_grow_over_many_requests_for_the_same():
    model, random = make_model("llama"), np.random.default_rng(3)
    cache, sizes = SuffixCache(max_bytes=2000 * ROW), []
    for number in range(120):
        order = random.permutation(3)
        ids = head(number % 7) + sum(([A, B, C][place] for place in order), []) + question(number)
        ask(model, ids, cache, steps=1)
        sizes.append((cache.stats.bytes_total, len(shelf_of(cache).pool.slabs)))
    assert max(sizes[60:]) <= (2000 * ROW, 8)
    kinds = check_kinds(cache)
    assert kinds["waste"] <= 0.25 * cache.stats.bytes_used + 16 * ROW
    check_pool(cache)


class DeviceWithoutMemory:
    """From `at` on the device refuses slabs of the pool, whatever `max_bytes` says."""

    def __init__(self, monkeypatch):
        self.at, self.asked, right = None, 0, pools.Slab.__init__

        def make(slab, number, *args, **kwargs):
            self.asked += number >= 0
            if number >= 0 and self.at is not None and self.asked > self.at:
                raise RuntimeError("CUDA out of memory")
            right(slab, number, *args, **kwargs)

        monkeypatch.setattr(pools.Slab, "__init__", make)


@pytest.mark.parametrize("seed", range(12))
def test_device_without_memory_costs_storing_and_never_an_answer(seed, monkeypatch):
    """`max_bytes` was fixed when more was free: no endless search for room, and no error that reaches the caller."""
    rng, device = np.random.default_rng(seed), DeviceWithoutMemory(monkeypatch)
    model = make_model("llama")
    cache = SuffixCache(
        max_bytes=int(rng.integers(500, 1500)) * ROW,
        keep_conversations=int(rng.integers(0, 3)),
        fidelity="exact",
        block_size=int(rng.choice([1, 5, 16])),
    )
    for number in range(int(rng.integers(2, 25))):
        ask(model, old_text(int(rng.integers(60, 120)), number), cache, steps=2)
    device.at = device.asked
    for number in range(3):
        prompt = old_text(int(rng.integers(60, 300)), 99 + number)
        got, want = ask(model, prompt, cache, steps=40), ask(model, prompt, steps=40)
        assert torch.equal(got.ids, want.ids)
        assert got.report.reason is None or "the device had no room" in got.report.reason
    assert device.asked > device.at or seed  # control: some of these calls ask for a slab
    cache.compact()
    check_pool(cache)
    device.at = None
    long = old_text(400, 7)
    ask(model, long, cache, steps=1)
    assert ask(model, long, cache, steps=1).report.exact_tokens == 399  # the device has memory again
    check_pool(cache)


def test_rows_beyond_half_precision_stay_as_they_are():
    model = make_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(1e5)
            layer.self_attn.o_proj.weight.mul_(1e-5)
    cache = SuffixCache(store_dtype="float16", keep_conversations=0)
    for number in (1, 2):
        ask(model, old_text(50, number), cache)
    answer = ask(model, new_text(9, 1) + old_text(50, 1) + new_text(40, 2), cache)
    assert answer.report.shifted_tokens > 20 and torch.isfinite(answer.first).all()
    assert ask(model, old_text(50, 1) + new_text(3, 1), cache).report.exact_tokens >= 50  # exact, as nothing was lost
    check_pool(cache)


def test_a_call_that_finds_no_room_for_copies_says_so_and_gives_nothing_up():
    model, cache = make_model("llama"), SuffixCache(max_bytes=480 * ROW, keep_conversations=0)
    ask(model, old_text(60, 1), cache, steps=1)
    for number in range(3):  # its view fits beside what is stored; a copy of its rows never does
        got = ask(model, old_text(200, 2 + number), cache, steps=60, return_dict_in_generate=True)
        assert "was not stored" in got.report.reason
        del got
        assert ask(model, old_text(60, 1) + old_text(4, 9), cache, steps=1).report.exact_tokens >= 60
    check_pool(cache)


def test_a_call_whose_store_was_cleared_meanwhile_does_not_speak_of_room():
    class Clear:
        def __call__(self, input_ids, scores):
            cache.clear()
            return scores

    model, cache = make_model("llama"), SuffixCache()
    got = ask(model, old_text(60, 1), cache, steps=2, processors=[Clear()], return_dict_in_generate=True)
    assert got.report.reason is None and cache.stats.segments == 0


def test_rows_are_kept_small_also_where_views_go_to_the_caller():
    model, cache = make_model("llama"), SuffixCache(store_dtype="int8", keep_conversations=1)
    for number in range(6):
        ask(model, old_text(200, number), cache, steps=2, return_dict_in_generate=True)  # and is dropped
    kinds = cache.stats.bytes_by_kind()
    assert kinds["derived"] > kinds["exact"]
    check_pool(cache)
