"""The rest of the contract: using, shared, compare, diagnose, register, clear, compact, reports and totals."""

import json

import pytest
import torch
from transformers.generation.utils import GenerationMixin

import hf_suffix_cache
from hf_suffix_cache import SuffixCache, UnsupportedModelError, diagnose, uninstall
from reference import (
    ask,
    cache_name,
    check_pool,
    forgets_everything,
    same_as_vanilla,
    served,
)
from tiny_models import CORE, make_model, new_text, old_text

PROMPT = old_text(48, 1)
MOVED = new_text(11, 1) + PROMPT + new_text(36, 2)
IDS = torch.tensor([PROMPT])


def test_a_cache_is_true_though_its_private_view_is_empty():
    cache = SuffixCache()
    assert bool(cache) and bool(cache.session("alice")) and len(cache) == 0


# -- handles ----------------------------------------------------------------------------------------------------------


def test_using_shares_the_store_and_keeps_its_own_report():
    model = make_model("llama")
    cache = SuffixCache()
    handle = cache.using(fidelity="exact")
    assert handle.last_report is None
    ask(model, PROMPT, cache)
    own = cache.last_report
    answer = same_as_vanilla(model, PROMPT, handle)
    assert answer.report.exact_tokens == len(PROMPT) - 1
    assert handle.last_report is not own and cache.last_report is own


def test_handles_work_wherever_a_cache_does():
    model = make_model("llama")
    cache = SuffixCache()
    handle = cache.using(fidelity="fast")
    ask(model, PROMPT, handle)
    with torch.no_grad(), handle.attach(model):
        model(IDS, logits_to_keep=1)
    assert handle.last_report.exact_tokens == len(PROMPT) - 1
    assert cache.stats.requests == 2


def test_shared_is_one_cache_for_the_process():
    model = make_model("llama")
    cache = SuffixCache.shared()
    assert SuffixCache.shared() is cache
    try:
        ask(model, PROMPT, SuffixCache.shared())
        assert ask(model, PROMPT, SuffixCache.shared()).report.exact_tokens == len(PROMPT) - 1
    finally:
        cache.clear()


def test_caches_and_namespaces_share_nothing():
    model = make_model("llama")
    first, second = SuffixCache(namespace="ab"), SuffixCache(namespace="a")
    ask(model, PROMPT, first)
    report = same_as_vanilla(model, PROMPT, second).report
    assert report.new_tokens == len(PROMPT)
    assert same_as_vanilla(model, PROMPT, first).report.exact_tokens == len(PROMPT) - 1  # control


# -- reports and totals -----------------------------------------------------------------------------------------------


def test_reports_keep_the_newest_256():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    assert cache.last_report is None and len(cache.reports) == 0
    for number in range(260):
        model.generate(torch.tensor([[5 + number % 200]]), cache=cache, max_new_tokens=1)
    assert len(cache.reports) == 256
    assert cache.reports[-1] is cache.last_report
    assert cache.stats.requests == 260


def test_report_is_json_ready_and_printable():
    model = make_model("llama")
    cache = SuffixCache()
    ask(model, PROMPT, cache)
    report = ask(model, MOVED, cache).report
    assert set(report.timings) == {"lookup", "plan", "materialise", "repair", "first_token", "total"}
    assert report.timings["total"] >= report.timings["first_token"] > 0
    table = json.loads(json.dumps(report.to_dict()))
    assert table["prompt_tokens"] == len(MOVED)
    assert "shifted" in str(report) and "<" in report._repr_html_()
    assert not any(isinstance(value, torch.Tensor) for value in vars(report).values())


def test_stats_are_the_sums_of_the_reports():
    model = make_model("llama")
    cache = SuffixCache()
    for ids in (PROMPT, MOVED, [PROMPT, PROMPT[::-1]], PROMPT, MOVED):
        ask(model, ids, cache)
    stats, reports = cache.stats, list(cache.reports)
    assert stats.requests == len(reports) == 5
    names = ["prompt_tokens", "computed_rows"] + [
        f"{kind}_tokens" for kind in ("exact", "carried", "shifted", "repaired", "new")
    ]
    for name in names:
        assert getattr(stats, name) == sum(getattr(report, name) for report in reports)
    reused = stats.exact_tokens + stats.carried_tokens + stats.shifted_tokens
    assert abs(stats.hit_rate - reused / stats.prompt_tokens) < 1e-9
    assert 0 < stats.bytes_used <= stats.bytes_total and stats.segments > 0 and stats.evictions == 0


def test_compare_runs_both_ways():
    model = make_model("llama")
    cache = SuffixCache()
    ask(model, PROMPT, cache)
    moved = torch.tensor([MOVED])
    exact = cache.compare(model, input_ids=IDS, max_new_tokens=4)
    approximate = cache.compare(model, input_ids=moved, max_new_tokens=4)
    assert exact.kl < 1e-6 and exact.differing_tokens == 0
    assert approximate.kl > exact.kl
    assert len(str(approximate)) > 20


def test_diagnose_passes_on_a_causal_model_and_fails_on_a_leak(monkeypatch):
    for attention in ("sdpa", "eager"):
        model = make_model("llama", attention=attention)
        assert diagnose(model, IDS) is not None
        assert diagnose(model, PROMPT) is not None
    model = make_model("llama", attention="eager")
    everything = torch.zeros(1, 1, len(PROMPT), len(PROMPT))
    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", lambda *a, **k: everything)
    with pytest.raises(Exception, match="later|future|position"):
        diagnose(model, IDS)


# -- register, clear, compact -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CORE)
def test_register_in_front_is_exact(kind):
    model = make_model(kind)
    cache = SuffixCache(fidelity="exact")
    cache.register(model, PROMPT, at="front")
    report = same_as_vanilla(model, PROMPT + new_text(9, 1), cache).report
    assert report.exact_tokens == len(PROMPT)


@pytest.mark.parametrize("kind", CORE)
def test_register_anywhere_is_moved(kind):
    model = make_model(kind)
    cache = SuffixCache()
    other = old_text(40, 2)
    cache.register(model, [PROMPT, other])
    report = ask(model, new_text(9, 1) + other + PROMPT + new_text(36, 1), cache).report
    assert served(report) == len(PROMPT) + len(other)
    check_pool(cache)
    forgets_everything(cache)


def test_register_wants_a_tokenizer_for_strings_and_a_known_place():
    model = make_model("llama")
    cache = SuffixCache()
    with pytest.raises((TypeError, ValueError), match="tokenizer"):
        cache.register(model, "some text")
    with pytest.raises(ValueError, match="front"):
        cache.register(model, PROMPT, at="behind")
    with pytest.raises(UnsupportedModelError):
        cache.register(make_model("mamba"), PROMPT)


def test_clear_forgets_and_the_cache_works_on():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    for _ in range(3):
        ask(model, PROMPT, cache)
        forgets_everything(cache)
        assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == 0
    cache.clear()
    cache.clear()


def test_compact_returns_bytes_and_blocks_and_changes_no_answer():
    model = make_model("llama")
    cache = SuffixCache(keep_conversations=1)
    for number in range(6):
        ask(model, old_text(40 + 7 * number, number), cache)
    moved, freed = cache.compact()
    assert moved >= 0 and freed >= 0
    for number in range(6):
        ids = old_text(40 + 7 * number, number)
        assert same_as_vanilla(model, ids, cache).report.exact_tokens == len(ids) - 1
    check_pool(cache)


# -- the hook on generate ---------------------------------------------------------------------------------------------


def test_uninstall_is_idempotent_and_the_next_cache_installs_again():
    SuffixCache()
    installed = GenerationMixin.generate
    original = installed.__wrapped__
    uninstall()
    uninstall()
    assert GenerationMixin.generate is original
    SuffixCache()
    SuffixCache()
    assert GenerationMixin.generate.__wrapped__ is original
    model = make_model("llama")
    cache = SuffixCache()
    ask(model, PROMPT, cache)
    assert ask(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1


def test_public_names():
    for name in (
        "SuffixCache",
        "SuffixCacheConfig",
        "ReuseReport",
        "Span",
        "PoolExhausted",
        "UnsupportedModelError",
        "diagnose",
        "uninstall",
        "__version__",
    ):
        assert hasattr(hf_suffix_cache, name), name


def test_generate_after_uninstall_takes_the_cache_for_an_ordinary_one():
    """Not ours to serve then, but never a wrong answer: every call begins a new sequence."""
    model, cache = make_model("llama"), SuffixCache()
    uninstall()
    try:
        for prompt in (PROMPT, PROMPT[:20], PROMPT + new_text(9, 1), PROMPT):
            ids = torch.tensor([prompt])
            options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
            got = model.generate(ids, **{cache_name(model): cache}, **options)
            assert torch.equal(got, model.generate(ids, **options))
    finally:
        SuffixCache()  # installs the wrapper again
