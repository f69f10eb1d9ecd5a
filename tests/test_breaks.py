"""What a fresh engineer broke once, each as a test of its whole kind, with the right value."""

import gc

import numpy as np
import pytest
import torch

from hf_suffix_cache import Calibration, ReuseReport, SuffixCache
from hf_suffix_cache.repair import Deviation, FirstRows, QuestionAttention
from hf_suffix_cache.settling import Settler
from reference import ask, check_pool, in_threads, max_difference, same_answer, same_as_vanilla, stored, view_of
from tiny_models import A, B, C, D, fingerprint, head, make_model, new_text, old_text, question

SOURCE = head(0) + A + B + C + D + question(0)
ROW_BYTES = 3 * 2 * 2 * 16 * 4  # of the tiny llama


def moved(number: int) -> list[int]:
    return head(1 + number, 9) + C + A + D + B + question(1 + number)


@pytest.mark.parametrize("policy", [Deviation(0.15), QuestionAttention("deviation")])
def test_rows_that_leave_early_do_so_in_their_own_forward_only(policy):
    model = make_model("llama")
    cache = stored(model, SOURCE)
    plain = {number: ask(model, moved(number), steps=2) for number in range(4)}

    def repairs():
        for number in range(12):
            assert ask(
                model, moved(number % 4), cache.using(repair=policy, store=False), steps=1
            ).report.shifted_tokens

    def stock():
        for number in range(12):
            same_answer(ask(model, moved(number % 4), steps=2), plain[number % 4])

    def exact():
        for number in range(12):
            handle = cache.using(fidelity="exact", store=False)
            same_answer(ask(model, moved(number % 4), handle, steps=2), plain[number % 4])

    in_threads([repairs, stock, exact])
    check_pool(cache)


def test_settling_beside_a_policy_that_filters_layers():
    model = make_model("llama")
    cache = stored(model, SOURCE, settle="background", repair=Deviation(0.15))
    for number in range(12):
        ask(model, moved(number), cache, steps=2)
    assert cache.settled(60)
    for number in range(12):
        same_as_vanilla(model, moved(number) + [200], cache.using(fidelity="exact", repair=None, store=False))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_background_settling_waits_for_nobody_where_adapters_may_be_switched(monkeypatch):
    from peft import LoraConfig, get_peft_model

    base = make_model("llama")
    config = LoraConfig(r=4, lora_alpha=64, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    inner = get_peft_model(base, config, adapter_name="A").eval().base_model.model
    base.baseline = fingerprint(base)
    put = []
    monkeypatch.setattr(Settler, "put", lambda self, job: put.append(job))
    cache = stored(inner, SOURCE, settle="background")
    answer = ask(inner, moved(0), cache)
    assert answer.report.shifted_tokens and not put and cache.stats.settled_rows > 0
    report = same_as_vanilla(inner, answer.tokens() + [200], cache.using(fidelity="exact")).report
    assert report.exact_tokens >= len(answer.tokens()) - 1
    plain = make_model("llama", seed=1)
    ask(plain, SOURCE, cache)
    ask(plain, moved(0), cache)
    assert put  # control: without adapters it is left to the background


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_returned_cache_of_a_full_store_shares_nothing_with_it(kind):
    model = make_model(kind)
    cache = SuffixCache(fidelity="exact", max_bytes=900 * ROW_BYTES)
    served = 0
    for number in range(20):
        prompt = head(number % 90) + new_text(120, number)
        answer = ask(model, prompt, cache, return_dict_in_generate=True)
        for layer in view_of(answer.output).layers:
            layer.keys.fill_(7.0), layer.values.fill_(9.0)
        tokens = answer.tokens()
        del answer
        report = same_as_vanilla(model, tokens + [200], cache.using(store=False)).report
        served += report.exact_tokens > 100
    assert cache.stats.evictions > 5 and served > 10  # control: the store was full, and still of use
    check_pool(cache)


def test_calibration_of_another_model_or_of_other_settings_predicts_nothing():
    texts = [old_text(40, number) for number in range(6)]

    def prompts(model):
        rng = np.random.default_rng(1)
        return [
            head(number) + sum((texts[i] for i in rng.permutation(6)[:4]), []) + question(number)
            for number in range(30)
        ]

    model, other = make_model("llama"), make_model("llama", seed=3)
    cache = SuffixCache(max_bytes=1 << 28)
    cache.calibrate(model, prompts(model))
    for each, handle, foreign in (
        (model, cache.using(max_kl=5.0), False),
        (other, cache.using(max_kl=5.0), True),
        (model, cache.using(max_kl=5.0, seam_tokens=9), True),
    ):
        ask(each, head(50) + sum(texts[:4], []) + question(3), cache)
        report = ask(each, head(51) + sum(texts[3::-1], []) + question(4), handle.using(store=False)).report
        assert ("another model" in (report.reason or "")) is foreign
        assert (report.level == "full" and report.shifted_tokens == 0) or not foreign
    report = ask(other, head(52) + sum(texts[3::-1], []) + question(5), cache.using(store=False)).report
    assert report.shifted_tokens and report.expected_kl is None


def test_builtin_calibration_is_shipped_and_says_that_it_guarantees_nothing():
    cache = SuffixCache()
    assert cache.calibration.origin == "builtin" and "no guarantee" in repr(cache.calibration)
    model = make_model("llama")
    ask(model, SOURCE, cache)
    report = ask(model, moved(0), cache.using(store=False)).report
    assert report.expected_kl is not None and report.expected_kl > 0
    assert "expected KL" in str(report)


@pytest.mark.parametrize(
    "given, message",
    [
        (np.zeros(194, dtype=bool), "bool mask"),
        (None, "integers"),
        ({12, 13}, "integers"),
        ([12.5], "integers"),
        ([float("nan")], "integers"),
        ("12", "integers"),
        ([[12], [13]], "1-D"),
    ],
)
def test_what_a_policy_gives_is_checked_and_nothing_is_lost(given, message):
    class Gives:
        def select(self, request):
            return given

    model = make_model("llama")
    cache = stored(model, SOURCE)
    with pytest.raises(TypeError, match=message) as caught:
        ask(model, moved(0), cache.using(repair=Gives()))
    assert "Gives.select" in str(caught.value) and len(str(caught.value)) < 300
    same_as_vanilla(model, moved(0), cache.using(fidelity="exact"))
    check_pool(cache)


def test_workload_without_a_bound_means_nothing_and_raises_nothing():
    model = make_model("llama")
    cache = stored(model, SOURCE)
    assert ask(model, moved(0), cache.using(workload="no such label", store=False)).report.shifted_tokens
    with pytest.raises(ValueError, match="no such label"):
        ask(model, moved(0), cache.using(workload="no such label", max_kl=0.1))


def test_handles_count_for_the_hint_of_a_cache_that_died_young(caplog):
    model = make_model("llama")
    cache = stored(model, SOURCE)
    handle = cache.using(repair=FirstRows())
    ask(model, moved(0), handle)
    assert cache._calls[0] == handle._calls[0] == 2
    assert max_difference(ask(model, [5, 6, 7]).scores, ask(model, [5, 6, 7]).scores) == 0.0


def test_calibrate_says_what_it_left_out(caplog):
    texts = [old_text(40, number) for number in range(6)]
    rng = np.random.default_rng(2)
    shared = [head(n) + sum((texts[i] for i in rng.permutation(6)[:4]), []) + question(n) for n in range(24)]
    alone = [new_text(150, 100 + number) for number in range(3)]
    model, cache = make_model("llama"), SuffixCache(max_bytes=1 << 28)
    made = cache.calibrate(model, {"shared": shared, "alone": alone})
    assert made.labels == ["shared"] and any("3 of 3 (alone)" in record.message for record in caplog.records)
    with pytest.raises(ValueError, match="at least 17"):
        cache.calibrate(model, shared[:5])
    with pytest.raises(TypeError, match="got a dict"):
        cache.calibrate(model, {"a": {"b": shared}})
    assert cache.calibration is made
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("origin, says", [("builtin", False), ("prompts", True)])
def test_hard_text_is_named_once_where_the_calibration_is_the_callers(origin, says, caplog, monkeypatch):
    monkeypatch.setattr("hf_suffix_cache.hints._said", set())
    cache = SuffixCache()
    cache.calibration = Calibration(None, {}, origin=origin)
    for _ in range(2):
        cache.record(ReuseReport(expected_kl=0.5))
    assert sum("hard to move" in record.message for record in caplog.records) == says


@pytest.mark.parametrize(
    "calls, loaded, says", [(1, False, True), (2, False, False), (1, True, False), (0, True, False)]
)
def test_a_cache_that_is_dropped_after_one_call_is_named_once(calls, loaded, says, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr("hf_suffix_cache.hints._said", set())
    SuffixCache().save(tmp_path)  # without a call
    for _ in range(2):
        cache = SuffixCache.load(tmp_path) if loaded else SuffixCache()
        for _ in range(calls):
            cache.session("alice").record(ReuseReport())
        del cache
        gc.collect()
    assert sum("was dropped after one call" in record.message for record in caplog.records) == says
