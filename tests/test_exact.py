"""Exact reuse: the longest stored prefix at any token, generated tokens too, and conversations that go on in place."""

import random

import pytest
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_suffix_cache import SuffixCache
from reference import (
    ask,
    check_pool,
    check_report,
    common_prefix,
    first_layer_is_fresh,
    fresh_rows,
    kinds_of,
    same_as_vanilla,
    served,
    served_rows,
    shifts_of,
)
from tiny_models import CORE, make_model, new_text, old_text

PROMPT = old_text(48, 1)


@pytest.mark.parametrize("kind", CORE)
def test_prefix_is_reused_up_to_any_token(kind):
    model = make_model(kind)
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache, steps=1)
    lengths = list(range(41))
    random.shuffle(lengths)
    for length in lengths:
        answer = same_as_vanilla(model, PROMPT[:length] + new_text(12, length), cache, steps=2)
        assert answer.report.exact_tokens == length
        assert answer.report.new_tokens == 12
    check_pool(cache)


@pytest.mark.parametrize("length", range(1, 41))
def test_prefix_is_reused_by_the_second_request_of_a_fresh_cache(length):
    model = make_model("llama")
    cache = SuffixCache()
    ask(model, PROMPT, cache, steps=1)
    answer = same_as_vanilla(model, PROMPT[:length] + new_text(9, 1), cache, steps=2)
    assert answer.report.exact_tokens == length
    assert answer.report.computed_rows == 9


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_prefix_at_block_borders(block_size):
    model = make_model("llama")
    for length in (15, 16, 17, 31, 32, 33, 47):
        cache = SuffixCache(fidelity="exact", block_size=block_size)
        ask(model, PROMPT, cache, steps=1)
        assert same_as_vanilla(model, PROMPT[:length] + new_text(9, 1), cache).report.exact_tokens == length
        assert same_as_vanilla(model, PROMPT[:length], cache).report.exact_tokens == length - 1
        check_pool(cache)


@pytest.mark.parametrize("kind", CORE)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 48, 160])
def test_full_hit_runs_one_row(kind, length):
    model = make_model(kind, spy=True)
    ids = old_text(length, 7)
    for fidelity in ("exact", "balanced", "fast"):
        cache = SuffixCache(fidelity=fidelity)
        for number in range(5):
            model.spy.clear()
            answer = same_as_vanilla(model, ids, cache, steps=3) if number else ask(model, ids, cache, steps=3)
            if number:
                assert answer.report.computed_rows == answer.report.new_tokens == 1
                assert answer.report.exact_tokens == length - 1
                assert model.spy.calls[: 1 + 2] == [(1, 1)] * 3


def test_one_new_token_and_a_full_hit():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    for _ in range(4):
        answer = same_as_vanilla(model, PROMPT, cache, steps=1)
        assert answer.report.generated_tokens == 1
    assert answer.report.exact_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("kind", CORE)
def test_generated_tokens_of_an_earlier_call_are_reused(kind):
    model = make_model(kind)
    cache = SuffixCache(fidelity="exact")
    tokens = ask(model, PROMPT, cache, steps=20).tokens()
    for cut in (len(tokens), len(tokens) - 1, len(PROMPT) + 7, len(PROMPT)):
        report = same_as_vanilla(model, tokens[:cut] + new_text(6, cut), cache).report
        assert report.exact_tokens == min(cut, len(tokens) - 1)  # the last one was never run
    assert same_as_vanilla(model, tokens, cache).report.exact_tokens == len(tokens) - 1


@pytest.mark.parametrize("kind", CORE)
@pytest.mark.parametrize("fidelity", ["exact", "balanced"])
def test_growing_chat_is_exact_and_computes_the_new_turn_only(kind, fidelity):
    model = make_model(kind)
    cache = SuffixCache(fidelity=fidelity)
    chat, known = list(PROMPT), 0
    for turn in range(10):
        answer = same_as_vanilla(model, chat, cache, steps=5)
        if turn:
            assert answer.report.exact_tokens == known
            assert answer.report.computed_rows == len(chat) - known
            assert set(kinds_of(answer.report)) == {"exact", "new"}
        known = len(answer.tokens()) - 1
        chat = answer.tokens() + new_text(11, turn)
        check_pool(cache)


def test_growing_chat_goes_on_in_place():
    model = make_model("llama", spy=True)
    cache = SuffixCache(fidelity="exact")
    chat, places = list(PROMPT), []
    for turn in range(8):
        model.spy.clear()
        answer = ask(model, chat, cache, steps=5)
        places.append(set(model.spy.addresses[-3:]))  # the first forwards of all measured the model
        chat = answer.tokens() + new_text(11, turn)
    assert len(set.union(*places)) == 1, "a turn was copied"
    used = check_pool(cache).bytes_used
    row = 3 * 2 * 2 * 16 * 4
    assert used <= (len(chat) + 32) * row  # one copy of the conversation, whole blocks


def test_two_conversations_in_turn_do_not_disturb_each_other():
    model = make_model("qwen3")
    cache = SuffixCache(fidelity="exact")
    chats = [PROMPT + new_text(5, 1), PROMPT + new_text(6, 2), new_text(20, 3)]
    for turn in range(6):
        for number, chat in enumerate(chats):
            answer = same_as_vanilla(model, chat, cache, steps=4)
            if turn:
                assert answer.report.exact_tokens == len(chat) - 8  # seven new tokens and the last one of the answer
            chats[number] = answer.tokens() + new_text(7, 10 * turn + number)
    check_pool(cache)


def test_a_chat_that_branches_keeps_both_branches():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    trunk = ask(model, PROMPT, cache, steps=8).tokens()
    left, right = trunk + new_text(9, 1), trunk + new_text(9, 2)
    for _ in range(2):
        for branch in (left, right):
            same_as_vanilla(model, branch, cache)
    for branch in (left, right):
        assert same_as_vanilla(model, branch + new_text(4, 3), cache).report.exact_tokens == len(branch)


@pytest.mark.parametrize("keep", [0, 1, 4])
def test_more_conversations_than_are_kept_stay_exact(keep):
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", keep_conversations=keep)
    chats = [old_text(30 + number, 50 + number) for number in range(8)]
    chats = [ask(model, chat, cache, steps=6).tokens() for chat in chats]
    for number, chat in enumerate(chats):
        report = same_as_vanilla(model, chat + new_text(8, number), cache).report
        assert report.exact_tokens == len(chat) - 1
    check_pool(cache)


def test_the_same_text_is_not_kept_twice():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    for _ in range(3):
        ask(model, PROMPT, cache)
    used, segments = check_pool(cache).bytes_used, cache.stats.segments
    for _ in range(20):
        ask(model, PROMPT, cache)
    assert (check_pool(cache).bytes_used, cache.stats.segments) == (used, segments)
    row = 3 * 2 * 2 * 16 * 4
    assert used <= 2 * (len(PROMPT) + 5 + 16) * row


def test_long_prefix_wins_over_a_shorter_one_with_a_longer_rest():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT[:10] + new_text(60, 1), cache)
    ask(model, PROMPT[:30] + new_text(3, 2), cache)
    ask(model, PROMPT[:20] + new_text(60, 3), cache)
    ids = PROMPT[:40] + new_text(9, 4)
    assert same_as_vanilla(model, ids, cache).report.exact_tokens == 30
    assert same_as_vanilla(model, ids, cache).report.exact_tokens == len(ids) - 1


@pytest.mark.parametrize("kind", CORE)
def test_rows_of_an_exact_hit_are_those_of_a_full_prefill(kind):
    model = make_model(kind)
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    ids = PROMPT[:33] + new_text(15, 1)
    for _ in range(4):
        _, rows = served_rows(model, ids, cache)
        for (keys, values), (want_keys, want_values) in zip(rows, fresh_rows(model, ids), strict=True):
            assert (keys[:, : len(ids)] - want_keys).abs().max() < 1e-4
            assert (values[:, : len(ids)] - want_values).abs().max() < 1e-4


@pytest.mark.parametrize("kind", CORE)
@pytest.mark.parametrize("change", ["merged", "split"])
def test_retokenised_turn_is_exact_up_to_the_change_and_approximate_after_it(kind, change):
    model = make_model(kind)
    cache = SuffixCache()
    # sampled: a tiny greedy model soon repeats itself, and then a run has many places to come from
    tokens = ask(model, PROMPT, cache, steps=50, do_sample=True, seed=1).tokens()
    cut = len(PROMPT) + 6
    spelled = new_text(1, 1) if change == "merged" else new_text(3, 1)
    assert spelled[0] != tokens[cut]
    ids = tokens[:cut] + spelled + tokens[cut + 2 :] + new_text(40, 2)
    answer, rows = served_rows(model, ids, cache)
    report = answer.report
    check_report(report)
    assert report.exact_tokens == cut == common_prefix(ids, tokens), report.reason
    moved = len(tokens) - 1 - cut - 2
    assert served(report) == moved
    first = cut + len(spelled)
    assert set(shifts_of(report)[first : first + moved]) == {len(spelled) - 2}
    assert kinds_of(report)[first : first + 4] == ["repaired"] * 4  # the seam
    assert set(kinds_of(report)[first + moved :]) == {"new"}
    first_layer_is_fresh(model, rows, ids)
    assert ask(model, ids, cache).report.carried_tokens > 0
    exact = same_as_vanilla(model, ids, cache.using(fidelity="exact")).report.exact_tokens
    assert cut + len(spelled) <= exact < first + moved  # repaired rows that stood behind exact ones only are exact


@pytest.mark.parametrize("hit", [False, True])
def test_sliding_layers_hand_out_their_window_at_one_query(hit, monkeypatch):
    model, seen = make_model("mistral"), []
    cache = SuffixCache(fidelity="exact")
    cache.capability(model)  # measured now: its forwards are shorter than a window
    if hit:
        ask(model, PROMPT, cache, steps=1)
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def recording(module, query, key, *args, **kwargs):
        seen.append((query.shape[2], key.shape[2]))
        return own(module, query, key, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", recording)
    ask(model, PROMPT, cache, steps=5)
    assert {keys for queries, keys in seen if queries == 1} == {16}
