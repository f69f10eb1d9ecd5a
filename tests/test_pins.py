"""Pins: what stays whatever comes, and how much of the store that may be."""

import pytest

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.config import EVICTIONS
from reference import ask, check_pool, forgets_everything, same_as_vanilla
from tiny_models import A, B, C, make_model, old_text, question

ROW = 3 * 2 * 2 * 16 * 4  # bytes: layers x (keys, values) x kv heads x head_dim x fp32


@pytest.mark.parametrize("policy", EVICTIONS)
def test_pinned_text_stays_whatever_comes(policy):
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", max_bytes=800 * ROW, eviction=policy, keep_conversations=1)
    assert cache.register(model, [A, B], at="front", pin=True) == len(A) + len(B)
    cache.register(model, old_text(60, 5), at="front")
    for number in range(30):
        ask(model, old_text(150, 1000 + number), cache, steps=1)
    assert cache.stats.evictions > 10
    for ids in (A, B):
        assert same_as_vanilla(model, ids + question(1), cache, steps=2).report.exact_tokens >= len(ids)
        assert same_as_vanilla(model, ids + question(2), cache.session("alice"), steps=2).report.exact_tokens >= len(
            ids
        )
    if policy == "lru":  # control: what is not pinned goes
        assert ask(model, old_text(60, 5) + question(1), cache, steps=1).report.exact_tokens < 60
    check_pool(cache)
    assert cache.unpin() == 2 and cache.unpin() == 0
    for number in range(40):
        ask(model, old_text(150, 1100 + number), cache, steps=1)
    if policy == "lru":
        assert ask(model, A + question(3), cache, steps=1).report.exact_tokens < len(A)
    forgets_everything(cache)


def test_pins_beyond_their_share_are_refused_before_anything_runs():
    model = make_model("llama", spy=True)
    cache = SuffixCache(max_bytes=1000 * ROW, pin_share=0.25)
    cache.capability(model)
    model.spy.clear()
    with pytest.raises(ValueError) as caught:
        cache.register(model, [old_text(100, number) for number in range(3)], at="front", pin=True)
    assert f"{3 * 112 * ROW:,}" in str(caught.value) and f"{250 * ROW:,}" in str(caught.value)
    assert model.spy.rows() == 0 and cache.stats.segments == 0
    cache.register(model, [old_text(100, number) for number in range(2)], at="front", pin=True)
    cache.register(model, old_text(100, 1), at="front", pin=True)  # counts once
    with pytest.raises(ValueError, match="unpin"):
        cache.register(model, old_text(100, 2), at="front", pin=True)
    cache.unpin()
    cache.register(model, old_text(100, 2), at="front", pin=True)
    check_pool(cache)


def test_a_pin_is_asked_for_by_true_alone():
    cache = SuffixCache()
    with pytest.raises(TypeError, match="`pin` must be True or False, got 'no'"):
        cache.register(make_model("llama"), [A], pin="no")
    with pytest.raises(TypeError, match="`tokenizer` must be a tokenizer of transformers, got 'gpt2'"):
        cache.register(make_model("llama"), [A], "gpt2")
    assert cache.stats.segments == 0


def test_pins_hold_text_that_longer_text_was_stored_with_or_goes_on_from():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", max_bytes=900 * ROW, keep_conversations=0)
    shared = cache.session("any", share=True)
    ask(model, A + B, shared, steps=1)
    cache.register(model, A, at="front", pin=True)  # stored already, as the beginning of another text
    ask(model, A + C, shared, steps=1)
    cache.register(model, C, at="front", pin=True)
    ask(model, C + old_text(30, 3), shared, steps=1)  # would replace it
    pinned = [len(each.ids) for shelf in cache._store.shelves.values() for each in shelf.sequences if each.pinned]
    assert sorted(pinned) == sorted([len(A), len(C)])
    for number in range(30):
        ask(model, old_text(150, 1200 + number), cache, steps=1)
    for ids in (A, C):
        assert same_as_vanilla(model, ids + question(1), cache, steps=1).report.exact_tokens >= len(ids)
    check_pool(cache)
    cache.clear()
    assert cache.stats.bytes_used == 0  # pins hold against want of room alone


def test_a_call_that_pins_leave_no_room_for_gives_nothing_up():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", max_bytes=400 * ROW, pin_share=1.0, keep_conversations=0)
    cache.register(model, old_text(200, 1), at="front", pin=True)
    ask(model, old_text(60, 2), cache, steps=1)
    report = same_as_vanilla(model, old_text(300, 3), cache, steps=2).report
    assert "no room" in report.reason and cache.stats.evictions == 0
    assert ask(model, old_text(60, 2), cache, steps=1).report.exact_tokens == 59
    check_pool(cache)


def test_registered_text_counts_as_used():
    """It was asked for, if not yet by a prompt: what comes once does not push it out."""
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", max_bytes=900 * ROW, keep_conversations=0)
    for number in range(10):
        ask(model, old_text(100, 1300 + number), cache, steps=1)
    assert cache.stats.evictions > 0
    cache.register(model, A, at="front")
    ask(model, B, cache, steps=1)
    for number in range(8):
        ask(model, old_text(100, 1400 + number), cache, steps=1)
    assert ask(model, A + question(1), cache, steps=1).report.exact_tokens >= len(A)
    assert ask(model, B + question(1), cache, steps=1).report.exact_tokens < len(B)  # control: it came once
    check_pool(cache)
