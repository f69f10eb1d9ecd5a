"""The table of row states (DESIGN.md, section 3): exact, derived and moved rows, and who may reuse them."""

import pytest
import torch

from hf_suffix_cache import SuffixCache, SuffixCacheConfig
from reference import (
    ask,
    check_pool,
    check_report,
    first_layer_is_fresh,
    kl,
    moved_pieces,
    same_answer,
    same_as_vanilla,
    served,
    served_rows,
    stored,
    view_of,
    view_rows,
)
from tiny_models import CORE, A, B, C, head, make_model, new_text, old_text, question

TAIL = SuffixCacheConfig().tail_tokens


@pytest.mark.parametrize("fidelity", ["balanced", "fast"])
@pytest.mark.parametrize("kind", CORE)
def test_exact_request_after_an_approximate_one_is_exact(kind, fidelity):
    model = make_model(kind)
    ids = head(1) + B + A + question(1)
    longer = ids + new_text(20, 1)
    vanilla = ask(model, longer)
    cache = stored(model, head(0) + A + B + question(0), fidelity=fidelity)
    for _ in range(10):
        assert ask(model, ids, cache).report.exact_tokens < len(ids) - 1
    for _ in range(4):
        got = ask(model, longer, cache.using(fidelity="exact"))
        same_answer(got, vanilla)
    assert got.report.exact_tokens == len(longer) - 1
    same_answer(ask(model, longer, SuffixCache(fidelity="exact")), vanilla)


def test_first_exact_request_after_approximate_ones_reuses_only_what_was_exact():
    model = make_model("llama")
    cache = stored(model, head(0) + A + B + question(0))
    ids = head(1) + B + A + question(1)
    ask(model, ids, cache)
    handle = cache.using(fidelity="exact")
    report = same_as_vanilla(model, ids, handle).report
    # what was computed behind exact rows only: the head, and the repaired rows directly behind it
    assert 12 <= report.exact_tokens == report.prompt_tokens - report.new_tokens < 12 + len(B)
    # the exact rows have replaced the derived and moved ones
    assert same_as_vanilla(model, ids, handle).report.exact_tokens == len(ids) - 1
    report = ask(model, ids, cache).report
    assert report.exact_tokens == len(ids) - 1 and report.carried_tokens == 0


def test_derived_rows_replace_no_exact_ones():
    model = make_model("llama")
    cache = SuffixCache()
    ids = head(1) + B + A + question(1)
    ask(model, ids, cache)  # exact
    ask(model, head(0) + A + B + question(0), cache)
    for _ in range(3):
        ask(model, ids + question(2), cache)
        assert same_as_vanilla(model, ids, cache).report.exact_tokens == len(ids) - 1


def test_repeated_approximate_request_does_not_drift():
    model = make_model("llama")
    cache = stored(model, head(0) + A + B + C + question(0))
    ids = head(1) + C + A + B + question(1)
    full = ask(model, ids, steps=1).first
    found = []
    for number in range(10):
        answer = ask(model, ids, cache)
        check_report(answer.report)
        found.append(kl(full, answer.first))
        if number:  # the repaired rows directly behind the exact head are exact too
            assert answer.report.carried_tokens + answer.report.exact_tokens == len(ids) - TAIL
            assert answer.report.carried_tokens > 100
    assert found[0] > 1e-6  # control: it is approximate
    assert max(found[1:]) <= found[1] * (1 + 1e-3)
    assert found[-1] <= 1.2 * found[0]


def test_carried_rows_are_those_of_the_turn_before_bit_for_bit():
    model = make_model("llama")
    for keep in (0, 1, 4):
        cache = stored(model, head(0) + A + B + C + question(0), keep_conversations=keep)
        ids = head(1) + C + A + B + question(1)
        answer, before = served_rows(model, ids, cache)
        for number in range(6):  # other conversations push it out of the newest ones
            ask(model, old_text(60, 600 + number), cache, steps=1)
        longer = answer.tokens() + question(2)
        after, rows = served_rows(model, longer, cache)
        assert after.report.carried_tokens + after.report.exact_tokens == len(answer.tokens()) - 1
        length = len(answer.tokens()) - 1
        for (keys, values), (old_keys, old_values) in zip(rows, before, strict=True):
            assert torch.equal(keys[:, :length], old_keys[:, :length])
            assert torch.equal(values[:, :length], old_values[:, :length])


def test_moved_rows_are_never_a_source():
    model = make_model("llama")
    cache = stored(model, head(0) + A + question(0), repair_fraction=0.0, seam_tokens=0)
    ids = head(1, 30) + A + question(1)
    ask(model, ids, cache)
    report = ask(model, head(2, 50) + A + question(2), cache).report
    assert moved_pieces(report) == [(50, 90, 38)]  # from where the rows were computed, not from where they were put


def test_derived_rows_are_moved_but_never_exact():
    model = make_model("llama")
    cache = stored(model, head(0) + A + question(0))
    ask(model, head(1) + A + C + question(1), cache)  # C was computed behind moved rows
    report = ask(model, head(2, 20) + C + question(2), cache).report
    assert moved_pieces(report) == [(20, 72, 20 - 52)]
    again = head(1) + A + C + new_text(40, 9)
    assert 12 <= ask(model, again, cache).report.exact_tokens < 12 + len(A)
    assert 12 <= same_as_vanilla(model, again, cache.using(fidelity="exact")).report.exact_tokens < 12 + len(A)


def test_rows_behind_more_than_three_moves_are_not_moved():
    model = make_model("llama")
    texts = [old_text(40, 300 + number) for number in range(8)]
    cache = stored(model, head(0) + texts[0] + question(0))
    found = []
    for number in range(1, 8):  # texts[n] is computed behind texts[n - 1], which is moved
        ids = head(number, 12 + number) + texts[number - 1] + texts[number] + question(number)
        found.append(served(ask(model, ids, cache).report))
    assert found[:4] == [40] * 4
    assert 0 in found[4:]
    assert set(found) == {0, 40}


def test_approximate_answer_with_nothing_in_common_is_exact():
    model = make_model("llama")
    cache = stored(model, head(0) + A + question(0))
    report = same_as_vanilla(model, head(1) + old_text(80, 999), cache).report
    assert report.new_tokens == report.prompt_tokens == report.computed_rows


def test_using_fast_and_balanced_share_one_store():
    model = make_model("llama")
    cache = stored(model, head(0) + A + question(0), fidelity="exact")
    for number, fidelity in enumerate(("exact", "balanced", "fast"), start=1):
        handle = cache.using(fidelity=fidelity)
        ask(model, head(number) + A + question(number), handle)
        assert served(handle.last_report) == (0 if fidelity == "exact" else 40)
    check_pool(cache)


def test_dropping_the_oldest_turns_moves_the_rest():
    model = make_model("qwen3")
    cache = SuffixCache()
    system, turns = old_text(20, 1), [old_text(30, 2 + number) for number in range(5)]
    ask(model, system + sum(turns, []), cache)
    ids = system + sum(turns[2:], []) + question(1)
    answer = ask(model, ids, cache, return_dict_in_generate=True)
    assert answer.report.exact_tokens == 20
    assert moved_pieces(answer.report) == [(20, 110, -60)]
    first_layer_is_fresh(model, view_rows(view_of(answer.output)), ids)
