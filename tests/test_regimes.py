"""Rotary frequencies that depend on the length of the text: rows of one regime never serve another."""

import threading

import pytest
import torch
from transformers import StoppingCriteria

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.measurement import measure
from hf_suffix_cache.regimes import RotaryRegimes, length_dependent_modules
from reference import (
    ask,
    cache_name,
    check_pool,
    first_layer_is_fresh,
    in_threads,
    max_difference,
    same_answer,
    served,
    served_rows,
)
from tiny_models import LENGTH_DEPENDENT, ORIGINAL_LENGTH, make_model, new_text, old_text

LONG = old_text(100, 1)
SHORT = LONG[:40]
CROSSING = old_text(ORIGINAL_LENGTH - 3, 2)  # a prompt that outgrows the first length while it is answered


def cold(kind, ids, **options):
    """The answer of a new model without any cache."""
    return ask(make_model(kind), ids, **options)


def buffers_of(model) -> dict:
    return {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
@pytest.mark.parametrize("fidelity", ["exact", "balanced"])
@pytest.mark.parametrize("first, second", [(SHORT, LONG), (LONG, SHORT), (CROSSING, LONG), (LONG, CROSSING)])
def test_no_row_crosses_the_border_and_answers_are_those_of_a_new_model(kind, fidelity, first, second):
    model, cache = make_model(kind), SuffixCache(fidelity=fidelity)
    want = {len(ids): cold(kind, ids) for ids in (first, second)}
    for _ in range(3):
        for ids in (first, second):
            got = ask(model, ids, cache)
            same_answer(got, want[len(ids)])
            assert served(got.report) == 0
    assert got.report.exact_tokens == len(second) - 1  # control: within its regime each is reused
    check_pool(cache)


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_control_without_the_fingerprint_a_wrong_answer_would_show(kind, monkeypatch):
    model = make_model(kind)
    regimes = RotaryRegimes(model)
    with regimes.cold():
        assert regimes.enter(40) != regimes.enter(100)
        assert regimes.enter(30) == regimes.enter(40)
    monkeypatch.setattr(RotaryRegimes, "current", lambda self: b"one for all")
    cache = SuffixCache(fidelity="exact")
    ask(model, SHORT, cache)
    got = ask(model, LONG, cache)
    assert got.report.exact_tokens == len(SHORT)
    with pytest.raises(AssertionError, match="difference"):
        same_answer(got, cold(kind, LONG))


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
@pytest.mark.parametrize("length", [20, ORIGINAL_LENGTH - 2, ORIGINAL_LENGTH, ORIGINAL_LENGTH + 1, 90])
def test_requests_around_the_border_equal_a_new_model(kind, length):
    model, cache = make_model(kind), SuffixCache(fidelity="exact")
    text = old_text(length, 3)
    for _ in range(3):
        got = ask(model, text, cache, steps=8)
        same_answer(got, cold(kind, text, steps=8))
    assert got.report.exact_tokens == length - 1
    answer = got.tokens() + new_text(3, 1)  # the next turn: rows that were computed beyond the border stay out
    same_answer(ask(model, answer, cache), cold(kind, answer))
    check_pool(cache)


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
@pytest.mark.parametrize("fidelity", ["exact", "balanced"])
def test_buffers_are_left_as_they_were_found(kind, fidelity):
    model, cache = make_model(kind), SuffixCache(fidelity=fidelity)
    for state in (SHORT, LONG):
        ask(model, state, steps=1)  # transformers alone brings the module into some state
        before = buffers_of(model)
        attributes = {k: v for k, v in vars(model.model.rotary_emb).items() if not k.startswith("_")}
        for ids in (LONG, SHORT, CROSSING):
            ask(model, ids, cache)
        assert {k: v for k, v in vars(model.model.rotary_emb).items() if not k.startswith("_")} == attributes
        for name, (buffer, values) in before.items():
            assert model.get_buffer(name) is buffer and torch.equal(buffer, values)


@pytest.mark.parametrize("kind, lengths", [("phi3", (25, 70)), ("dynamic", (25,))])
def test_text_is_moved_within_a_regime(kind, lengths):
    """Short requests share the first frequencies; long ones of longrope the long ones."""
    for length in lengths:
        model, cache = make_model(kind), SuffixCache(tail_tokens=8)
        text = old_text(length, 6)
        ask(model, text + new_text(12, 1), cache)
        for number in range(3):
            ids = new_text(5 + number, 2) + text + new_text(12, 3)
            answer, rows = served_rows(model, ids, cache)
            assert served(answer.report) == length
            with torch.no_grad(), RotaryRegimes(model).cold():
                first_layer_is_fresh(model, rows, ids)
        full = SuffixCache(tail_tokens=8, repair_fraction=1.0)
        ask(model, text + new_text(12, 1), full)
        answer = ask(model, ids, full)
        assert answer.report.repaired_tokens == length
        same_answer(answer, cold(kind, ids))


def test_dynamic_frequencies_beyond_the_first_length_serve_their_own_length_only():
    model, cache = make_model("dynamic"), SuffixCache()
    text = old_text(90, 7)
    ask(model, text, cache)
    report = ask(model, text + new_text(5, 1), cache).report
    assert report.new_tokens == report.prompt_tokens == 95
    report = ask(model, text[:80] + new_text(10, 1), cache).report
    assert report.exact_tokens == 80  # control: as long as the first one


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_threads_share_one_rotary_module(kind):
    model, cache = make_model(kind), SuffixCache(fidelity="exact")
    texts = [SHORT, LONG, CROSSING, old_text(80, 9)]
    want = [cold(kind, ids, steps=4) for ids in texts]

    def work(number):
        for _ in range(4):
            same_answer(ask(model, texts[number], cache, steps=4), want[number])

    in_threads([lambda number=number: work(number) for number in range(4)])
    check_pool(cache)


def test_plain_forwards_go_on_from_each_other_and_are_not_served_for_dynamic_frequencies():
    model, cache, warm = make_model("dynamic"), SuffixCache(), make_model("dynamic")
    name = cache_name(model)

    def loop(model):
        output = model(torch.tensor([LONG[:70]]), use_cache=True)
        logits = [output.logits[:, -1]]
        for token in new_text(4, 2):
            output = model(torch.tensor([[token]]), use_cache=True, **{name: output[name]})
            logits.append(output.logits[:, -1])
        return logits

    ask(model, old_text(200, 5), steps=1)
    ask(warm, old_text(200, 5), steps=1)
    with torch.no_grad():
        with cache.attach(model):
            got = loop(model)
        assert max_difference(got, loop(warm)) == 0
        assert max_difference(got, loop(make_model("dynamic"))) > 1e-2  # control: a new model says something else
    assert "dynamic" in cache.last_report.reason


def test_frequencies_that_were_edited_by_hand_are_not_overwritten():
    model, cache = make_model("dynamic"), SuffixCache()
    model.model.rotary_emb.inv_freq.mul_(0.5)
    got = ask(model, SHORT, cache)
    same_answer(got, ask(model, SHORT))
    assert "edited" in got.report.reason


@pytest.mark.parametrize("lookup", [None, 8])
@pytest.mark.parametrize("kind, length, seed", [("phi3", 51, 1), ("dynamic", 50, 2), ("llama_longrope", 51, 1)])
def test_drafts_across_the_border_leave_no_wrong_row(kind, length, seed, lookup):
    text = (old_text(8, seed) * 10)[:length]
    model, cache = make_model(kind), SuffixCache(fidelity="exact")
    options = {"prompt_lookup_num_tokens": lookup} if lookup else {}
    start = ask(model, text, cache, steps=20, **options).tokens()[:ORIGINAL_LENGTH]
    for ids in (start, start[:-2]):
        got = ask(model, ids, cache, steps=1)
        same_answer(got, cold(kind, ids, steps=1))
        assert got.report.exact_tokens >= length


class _Once(StoppingCriteria):
    def __init__(self, job):
        self.job = job

    def __call__(self, ids, scores, **kwargs):
        job, self.job = self.job, None
        if job is not None:
            job()
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_calls_inside_of_calls_and_other_threads_never_wait_for_each_other_for_ever(kind):
    models, cache = [make_model(kind), make_model(kind, seed=1)], SuffixCache(fidelity="exact")
    barrier = threading.Barrier(2, timeout=60)
    want = [ask(make_model(kind, seed=seed), SHORT) for seed in (0, 1)]
    want_inner = [ask(make_model(kind, seed=seed), LONG, steps=2) for seed in (0, 1)]

    def crosswise(mine, other):
        inner = []
        criteria = _Once(lambda: (barrier.wait(), inner.append(ask(models[other], LONG, cache, steps=2))))
        same_answer(ask(models[mine], SHORT, cache, stopping_criteria=[criteria]), want[mine])
        same_answer(inner[0], want_inner[other])

    in_threads([lambda: crosswise(0, 1), lambda: crosswise(1, 0)])
    worker = _Once(lambda: in_threads([lambda: ask(models[0], LONG, cache)]))
    same_answer(ask(models[0], SHORT, cache, stopping_criteria=[worker]), want[0])
    check_pool(cache)


def test_a_model_that_swaps_its_frequencies_elsewhere_is_not_moved():
    """Phi-3.5-MoE computes its long frequencies in the rotary module's forward, and ignores the buffer."""
    assert measure(make_model("phi3")).kind == "shift"  # control
    capability = measure(make_model("phimoe"))
    assert capability.kind == "prefix" and f"beyond {ORIGINAL_LENGTH} tokens" in capability.reason


@pytest.mark.parametrize("kind", ["phi3"])
def test_plain_forwards_are_served_from_a_new_models_state(kind):
    model, cache = make_model(kind), SuffixCache(fidelity="exact")
    before = buffers_of(model)
    with cache.attach(model), torch.no_grad():
        for number, ids in enumerate((LONG, SHORT) * 3):
            got = model(torch.tensor([ids]), logits_to_keep=1).logits[:, -1]
            assert max_difference([got], [cold(kind, ids, steps=1).first]) < 1e-4
            assert cache.last_report.exact_tokens == (0 if number < 2 else len(ids) - 1)
    assert all(torch.equal(model.get_buffer(name), values) for name, (_, values) in before.items())


def test_prefill_in_chunks_runs_without_the_cache():
    model, cache = make_model("phi3"), SuffixCache()
    want = ask(model, LONG, prefill_chunk_size=32)
    got = ask(model, LONG, cache, prefill_chunk_size=32)
    same_answer(got, want)
    assert "prefill_chunk_size" in got.report.reason


@pytest.mark.parametrize("shift", [10, 100, 300])
def test_yarn_is_turned_right_at_any_distance(shift):
    """Static scaling is no regime: one shelf, whatever the length."""
    model, cache = make_model("yarn"), SuffixCache()
    assert length_dependent_modules(model) == []
    text = old_text(60, 4)
    ask(model, text + new_text(40, 1), cache)
    ids = new_text(shift, 2) + text + new_text(40, 3)
    answer, rows = served_rows(model, ids, cache)
    assert served(answer.report) == 60
    first_layer_is_fresh(model, rows, ids)
