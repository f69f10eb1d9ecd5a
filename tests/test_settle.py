"""After the answer: conversations are recomputed exactly, at once or in the background, and nobody notices."""

import gc
import random
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import hf_suffix_cache
from hf_suffix_cache import SuffixCache, UnsupportedModelError
from hf_suffix_cache.settling import MAX_WAITING, Settlement, Settler, exact_rerun
from hf_suffix_cache.view import ViewLayer
from reference import (
    ask,
    check_pool,
    check_report,
    first_layer_is_fresh,
    forgets_everything,
    fresh_rows,
    in_threads,
    max_difference,
    same_answer,
    same_as_vanilla,
    served,
    served_rows,
    stored,
)
from test_traffic import ROW, Traffic
from tiny_models import A, B, C, forget, head, make_model, new_text, old_text, question

KINDS = ("llama", "gemma3_text", "gpt_neox")
SOURCE = head(0) + A + B + C + question(0)
PROMPT = head(1) + C + A + B + question(1)
MORE = question(2)


def approximate_chat(kind: str = "llama", spy: bool = False, **options):
    """A model, a cache whose newest conversation is approximate, and the answer that made it so."""
    model = make_model(kind, spy=spy)
    cache = stored(model, SOURCE, **options)
    answer = ask(model, PROMPT, cache)
    assert served(answer.report) > 100
    if spy:
        model.spy.clear()
    return model, cache, answer


# -- settle ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", ["balanced", "fast"])
@pytest.mark.parametrize("kind", KINDS)
def test_next_turn_of_a_settled_conversation_is_exact(kind, fidelity):
    model, cache, answer = approximate_chat(kind, spy=True, fidelity=fidelity)
    done = cache.settle(model)
    known = len(answer.tokens()) - 1  # the last one was never run
    assert done.tokens == known and done.rows == model.spy.rows() == cache.stats.settled_rows
    assert known - 30 < done.rows < known  # an exact head is not run again
    check_pool(cache)
    for handle in (cache.using(store=False), cache.using(fidelity="exact")):
        report = same_as_vanilla(model, answer.tokens() + MORE, handle).report
        assert report.exact_tokens == known and served(report) == report.carried_tokens == 0
    check_pool(cache)


@pytest.mark.parametrize("kind", KINDS)
def test_control_next_turn_without_settling_is_not_exact(kind):
    model, cache, answer = approximate_chat(kind)
    chat = answer.tokens() + MORE
    got = ask(model, chat, cache)
    assert got.report.carried_tokens > 50
    assert max_difference(got.scores[:1], ask(model, chat).scores[:1]) > 1e-3


def test_settled_rows_are_those_of_a_full_prefill():
    model, cache, answer = approximate_chat()
    cache.settle(model)
    chat = answer.tokens() + MORE
    _, rows = served_rows(model, chat, cache, steps=1)
    for (keys, values), (want_keys, want_values) in zip(rows, fresh_rows(model, chat), strict=True):
        assert (keys - want_keys).abs().max() < 1e-4 and (values - want_values).abs().max() < 1e-4


def test_second_settle_runs_nothing():
    model, cache, _ = approximate_chat(spy=True)
    cache.settle(model)
    model.spy.clear()
    assert cache.settle(model) == Settlement(0, 0, 0.0)
    assert model.spy.rows() == 0


def test_exact_conversations_are_not_settled():
    model = make_model("llama")
    cache = stored(model, SOURCE, PROMPT, fidelity="exact")
    assert cache.settle(model).rows == cache.stats.settled_rows == 0


def test_settling_frees_what_was_approximate():
    model, cache, answer = approximate_chat()
    cache.settle(model)
    other = stored(model, SOURCE, fidelity="exact")
    ask(model, answer.tokens()[:-1], other, steps=1)
    used, want = check_pool(cache), check_pool(other)
    assert used.segments == want.segments + 1  # the head was exact before
    assert abs(used.bytes_used - want.bytes_used) <= 2 * 16 * 3 * 2 * 2 * 16 * 4  # two blocks, by where a row starts


def test_each_settle_takes_the_newest_conversation_that_is_left():
    model, cache, first = approximate_chat()
    second = ask(model, head(2) + B + C + A + question(3), cache)
    for answer in (second, first):
        done = cache.settle(model)
        assert done.tokens == len(answer.tokens()) - 1
        report = same_as_vanilla(model, answer.tokens() + MORE, cache.using(store=False)).report
        assert report.exact_tokens == done.tokens
    assert cache.settle(model).tokens == 0
    check_pool(cache)


def test_a_continued_conversation_is_settled_with_all_its_turns():
    model, cache, answer = approximate_chat()
    for turn in range(3):
        answer = ask(model, answer.tokens() + question(3 + turn), cache)
    assert cache.settle(model).tokens == len(answer.tokens()) - 1
    assert cache.settle(model).tokens == 0
    same_as_vanilla(model, answer.tokens() + question(9), cache)


def test_settling_is_not_the_callers_request():
    model, cache, answer = approximate_chat()
    reports, before = cache.reports, cache.stats.to_dict()
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    cache.settle(model)
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert random.getstate() == states[1] and np.random.get_state()[1].tolist() == states[2]
    assert cache.last_report is answer.report and cache.reports == reports
    after = cache.stats.to_dict()
    changed = {name for name in after if after[name] != before[name]}
    assert "settled_rows" in changed and changed <= {
        "settled_rows",
        "bytes_used",
        "bytes_total",
        "bytes_by_kind",
        "segments",
    }


def test_other_namespaces_are_not_settled():
    model, cache, _ = approximate_chat()
    other = SuffixCache(namespace="other")
    other._owned = cache._owned  # the same store
    assert other.settle(model).tokens == 0
    assert cache.settle(model).tokens > 0


def test_a_changed_model_has_nothing_to_settle():
    model, cache, answer = approximate_chat()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    assert cache.settle(model).tokens == 0
    assert same_as_vanilla(model, answer.tokens() + MORE, cache).report.exact_tokens == 0


def test_a_model_in_training_mode_is_refused_with_the_remedy():
    model, cache, _ = approximate_chat()
    model.train()
    with pytest.raises(UnsupportedModelError, match="eval"):
        cache.settle(model)
    model.eval()
    with torch.autocast("cpu"), pytest.raises(UnsupportedModelError, match="autocast"):
        cache.settle(model)
    assert cache.settle(model).tokens > 0


def test_settle_takes_models_only():
    with pytest.raises(TypeError, match="PreTrainedModel"):
        SuffixCache().settle("gpt2")


@pytest.mark.parametrize("rows", [360, 520, 560, 600])
def test_a_budget_that_hardly_holds_the_conversation_stays_right(rows):
    model = make_model("llama")
    cache = stored(model, SOURCE, max_bytes=rows * ROW)
    answer = ask(model, PROMPT, cache)
    for _ in range(3):
        cache.settle(model)
        assert not cache.approximate_conversations(model)
        assert check_pool(cache).bytes_total <= rows * ROW
    same_as_vanilla(model, answer.tokens() + MORE, cache.using(fidelity="exact"))


@pytest.mark.parametrize("kind", ["phi3", "mistral", "deepseek_v3"])
def test_other_kinds_settle_too(kind):
    model, cache, answer = approximate_chat(kind)
    assert cache.settle(model).tokens == len(answer.tokens()) - 1
    report = same_as_vanilla(model, answer.tokens() + MORE, cache).report
    assert report.exact_tokens == len(answer.tokens()) - 1


# -- exact re-run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "gpt2"])
def test_exact_rerun_gives_the_logits_of_a_full_prefill(kind):
    model = make_model(kind, spy=True)
    cache = stored(model, SOURCE)
    want = ask(model, PROMPT, steps=1).first[0]
    for number, rows in enumerate((len(PROMPT), 1)):
        model.spy.clear()
        logits = exact_rerun(cache, model, PROMPT)
        assert logits.shape == want.shape and logits.dtype == torch.float32
        assert (logits - want).abs().max() < 1e-4
        assert model.spy.rows() == rows, number
    check_pool(cache)


def test_exact_rerun_without_storing_leaves_the_store_as_it_was():
    model, cache, answer = approximate_chat(spy=True)
    before = check_pool(cache)
    for _ in range(3):
        model.spy.clear()
        exact_rerun(cache, model, PROMPT, store=False)
        assert model.spy.rows() > 100
        assert check_pool(cache) == before
    assert ask(model, answer.tokens() + MORE, cache).report.carried_tokens > 50


# -- after each answer ----------------------------------------------------------------------------------------------


def test_settle_true_makes_every_next_turn_exact():
    model = make_model("llama", spy=True)
    cache = stored(model, SOURCE, settle=True)
    plain = ask(model, PROMPT, stored(model, SOURCE))
    model.spy.clear()
    answer = ask(model, PROMPT, cache)
    assert answer.tokens() == plain.tokens() and max_difference(answer.scores, plain.scores) == 0
    assert served(answer.report) > 100  # the answer came first, and is reported as what it was
    assert model.spy.rows() == answer.report.computed_rows + 5 + cache.stats.settled_rows
    for turn in range(3):
        answer = same_as_vanilla(model, answer.tokens() + question(2 + turn), cache)
        assert answer.report.carried_tokens == answer.report.shifted_tokens == 0
    check_pool(cache)


def test_settle_true_settles_every_row_of_a_batch():
    model = make_model("llama")
    cache = stored(model, SOURCE, settle=True)
    rows = [PROMPT, head(2) + B + C + A + question(3)]
    answer = ask(model, rows, cache)
    assert served(answer.report) > 200
    for row in range(2):
        tokens = answer.tokens(row)
        assert same_as_vanilla(model, tokens + question(7 + row), cache).report.exact_tokens == len(tokens) - 1


def test_what_is_not_stored_is_not_settled():
    model = make_model("llama")
    cache = stored(model, SOURCE)
    before = check_pool(cache)
    ask(model, PROMPT, cache.using(store=False, settle=True))
    assert cache.stats.settled_rows == 0 and check_pool(cache) == before


@pytest.mark.parametrize("when", [True, "background"])
def test_a_fault_in_settling_is_logged_and_the_answer_stays(when, monkeypatch, caplog):
    model = make_model("llama")
    cache = stored(model, SOURCE)
    want = ask(model, PROMPT, stored(model, SOURCE))
    update = ViewLayer.update

    def broken(layer, *args, **kwargs):
        view = layer._view()
        if view.request.config.fidelity == "exact" and layer is view.layers[1]:
            raise RuntimeError("out of order")
        return update(layer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ViewLayer, "update", broken)
        got = ask(model, PROMPT, cache.using(settle=when))
        assert cache.settled(30)
    assert got.tokens() == want.tokens()
    assert "stays approximate" in caplog.text
    check_pool(cache)
    assert cache.settle(model).tokens == len(got.tokens()) - 1
    same_as_vanilla(model, got.tokens() + MORE, cache)


# -- in the background ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_background_settling_makes_the_next_turn_exact(kind):
    model = make_model(kind)
    cache = stored(model, SOURCE, settle="background")
    answer = ask(model, PROMPT, cache)
    report = cache.last_report
    assert cache.settled(30)
    assert cache.last_report is report and cache.reports[-1] is report
    assert cache.settle(model).tokens == 0
    got = same_as_vanilla(model, answer.tokens() + MORE, cache)
    assert got.report.exact_tokens == len(answer.tokens()) - 1
    assert cache.settled(30)
    check_pool(cache)


def test_exact_answers_give_the_background_no_work(monkeypatch):
    model = make_model("llama")
    cache = stored(model, SOURCE, settle="background")
    monkeypatch.setattr(Settler, "put", None)
    for ids in (SOURCE + MORE, new_text(60, 1), SOURCE[:40] + question(3)):
        assert served(ask(model, ids, cache).report) == 0


def test_frequencies_that_depend_on_the_length_are_settled_at_once():
    """Their buffers are shared by all forwards of the model, those of other threads without a cache included."""
    model = make_model("phi3")
    cache = stored(model, SOURCE, settle="background")
    threads = threading.active_count()
    answer = ask(model, PROMPT, cache)
    assert cache.stats.settled_rows > 100 and threading.active_count() == threads
    assert same_as_vanilla(model, answer.tokens() + MORE, cache).report.exact_tokens == len(answer.tokens()) - 1


def test_calls_beside_background_settling_are_right():
    model = make_model("llama")
    cache = stored(model, SOURCE, settle="background")
    exact = cache.using(fidelity="exact")
    chats = [head(number) + passages + question(number) for number, passages in enumerate((C + A, B + C, A + B), 1)]

    def talk(chat):
        for turn in range(4):
            answer = ask(model, chat, cache)
            check_report(answer.report)
            same_as_vanilla(model, answer.tokens() + MORE, exact)
            ask(model, chat, steps=2)  # and calls without a cache
            chat = answer.tokens() + new_text(12, turn)

    in_threads([lambda chat=chat: talk(chat) for chat in chats])
    assert cache.settled(60)
    assert cache.settle(model).tokens == 0
    check_pool(cache)


class _Recorded:
    """A job that says when it runs, and may have to wait first."""

    def __init__(self, name, ran: list, gate=None):
        self.name, self.ran, self.gate = name, ran, gate

    def run(self):
        if self.gate is not None:
            self.gate.wait(30)
        self.ran.append(self.name)


def test_newest_conversation_is_settled_first_and_old_ones_give_way():
    settler, ran, gate = Settler(), [], threading.Event()
    settler.put(_Recorded("running", ran, gate))
    while settler._jobs:  # until the thread has taken it
        pass
    for number in range(MAX_WAITING + 3):
        settler.put(_Recorded(number, ran))
    assert not settler.wait(0.01)
    gate.set()
    assert settler.wait(30)
    assert ran == ["running", *reversed(range(3, MAX_WAITING + 3))]


def test_background_thread_ends_with_the_work_and_starts_again():
    settler, ran = Settler(), []
    for _ in range(3):
        settler.put(_Recorded("job", ran))
        assert settler.wait(30)
        assert settler._thread is None
    assert ran == ["job"] * 3


def test_waiting_jobs_keep_neither_model_nor_cache_alive():
    model = make_model("llama")
    cache = stored(model, SOURCE, settle="background")
    settler, gate, ran = cache._owned.settler, threading.Event(), []
    settler.put(_Recorded("first", ran, gate))
    ask(model, PROMPT, cache)
    watched = weakref.ref(cache._owned), weakref.ref(model)
    forget(model)
    del model, cache
    gc.collect()
    assert [reference() for reference in watched] == [None, None]
    gate.set()
    assert settler.wait(30) and ran == ["first"]


def test_uninstall_waits_for_the_running_job_and_drops_the_others():
    model = make_model("llama")
    cache = stored(model, SOURCE, settle="background")
    ran, gate = [], threading.Event()
    cache._owned.settler.put(_Recorded("running", ran, gate))
    while cache._owned.settler._jobs:
        pass
    ask(model, PROMPT, cache)
    threading.Timer(0.2, gate.set).start()
    hf_suffix_cache.uninstall()
    assert ran == ["running"] and cache.stats.settled_rows == 0
    again = stored(model, SOURCE, settle="background")  # installs again
    ask(model, PROMPT, again)
    assert again.settled(30) and again.stats.settled_rows > 100
    check_pool(cache)


def test_process_ends_cleanly_while_settling():
    script = """
import torch
from reference import ask, stored
from tiny_models import make_model
from test_settle import PROMPT, SOURCE
torch.set_num_threads(1)
model = make_model("llama")
cache = stored(model, SOURCE, settle="background")
ask(model, PROMPT, cache)
print("answered")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout == "answered\n", done.stderr
    assert "Traceback" not in done.stderr and "failed" not in done.stderr, done.stderr


def test_control_texts_have_nothing_exact_in_common():
    assert SOURCE[0] != PROMPT[0] and set(SOURCE[:12]).isdisjoint(old_text(40, 1))


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("rows", [None, 900], ids=["roomy", "evicting"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_oracles_hold_under_random_traffic_that_heals_and_settles(kind, rows, seed):
    """O1, O2, O4 and O5 with every mixture of fidelity, healing and settling on one store."""
    model, traffic = make_model(kind, spy=True), Traffic(seed)
    cache = SuffixCache(max_bytes=None if rows is None else rows * ROW)
    draw = traffic.random.choice
    for number in range(40):
        options = {
            "fidelity": str(draw(["exact", "balanced", "fast"])),
            "heal_rows": int(draw([0, 1, 3, 20])),
            "heal_order": str(draw(["left", "attention"])),
            "settle": [False, False, True, "background"][int(traffic.random.integers(4))],
            "store": bool(traffic.random.random() < 0.9),
        }
        ids, steps = traffic.prompt(), int(traffic.random.integers(1, 16))
        handle, settled = cache.using(**options), cache.stats.settled_rows
        model.spy.clear()
        got, seen = served_rows(model, ids, handle, steps=steps)
        assert cache.settled(30)
        ran = model.spy.rows() - (cache.stats.settled_rows - settled)
        report = got.report
        assert ran == report.computed_rows + report.capability_rows + steps - 1 + report.healed_rows, options
        check_report(report)
        first_layer_is_fresh(model, seen, got.tokens()[:-1])
        approximate = report.carried_tokens or report.shifted_tokens
        assert approximate or report.healed_rows == 0
        if options["fidelity"] == "exact" or not approximate:
            same_answer(got, ask(model, ids, steps=steps))
        traffic.keep(got.tokens())
        del got, seen
        check_pool(cache)
        if number % 10 == 9:
            for _ in range(8):
                cache.settle(model)
                check_pool(cache)
            for ids in traffic.history[-3:]:
                same_as_vanilla(model, ids + MORE, cache.using(fidelity="exact", store=False))
    assert cache.stats.healed_rows > 100 and cache.stats.settled_rows > 100
    forgets_everything(cache)
