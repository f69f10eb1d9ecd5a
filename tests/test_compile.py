"""torch.compile: compiled models give the same answers, reuse as much, and compile a bounded number of times."""

import gc

import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache

from hf_suffix_cache import SuffixCache
from reference import ask, cache_name, check_pool, check_report, in_threads, same_answer, same_as_vanilla, served
from tiny_models import fingerprint, make_model, new_text, old_text

PASSAGE = old_text(80, 9)
WAYS = ("forward", "module")
SMALL, TINY = {"num_hidden_layers": 2}, {"num_hidden_layers": 1}
OWN_GRAPHS = 4  # more than stock: the arena grows while decoding; scattered passes; each once more with free sizes


@pytest.fixture(autouse=True)
def fresh_compiler():
    """No compiled code of earlier tests; a model that is compiled too often raises instead of running plainly."""
    torch._dynamo.reset()
    counters.clear()
    with dynamo_config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def compiled(kind: str, way: str, backend: str = "eager", **changes):
    """`(model, counter)`: a tiny model compiled in one of the ways, and what counts its graphs."""
    model, counter = make_model(kind, **changes), CompileCounterWithBackend(backend)
    if way == "forward":
        model.forward = torch.compile(model.forward, backend=counter)
    else:
        model.compile(backend=counter)
    as_it_is_now(model)
    return model, counter


def as_it_is_now(model) -> None:
    """What compiling left on a model is the test's own doing."""
    model.baseline = fingerprint(model)


def requests() -> list[list[int]]:
    """Ten prompts of ten lengths with pieces of PASSAGE of ten lengths at ten places; behind them three repeats."""
    new = [new_text(5 + 7 * n, n + 1) + PASSAGE[: 40 + 4 * n] + new_text(36 + n, 50 + n) for n in range(10)]
    return [PASSAGE, *new, new[2], new[5], new[8]]


def graphs_of_stock(kind: str, way: str, **changes) -> int:
    """Graphs that the same requests need with transformers' own cache."""
    model, counter = compiled(kind, way, **changes)
    for ids in requests():
        ask(model, ids, steps=4)
    torch._dynamo.reset()
    return counter.frame_count


def run_and_count(kind: str, way: str, fidelity: str, repair_fraction: float, backend="eager", **changes):
    """The requests through a compiled model and a cache, each checked: `(reports, graphs, cache)`."""
    plain = make_model(kind, **changes)
    model, counter = compiled(kind, way, backend, **changes)
    cache = SuffixCache(fidelity=fidelity, repair_fraction=repair_fraction)
    reports = []
    for ids in requests():
        got = ask(model, ids, cache, steps=4)
        check_report(got.report)
        if fidelity == "exact" or repair_fraction == 1.0:
            same_answer(got, ask(plain, ids, steps=4))
        reports.append(got.report)
    assert not counters["graph_break"], dict(counters["graph_break"])
    check_pool(cache)
    return reports, counter.frame_count, cache


@pytest.mark.parametrize("way", ["module", pytest.param("forward", marks=pytest.mark.slow)])
def test_compiled_model_compiles_a_bounded_number_of_times_in_exact_mode(way):
    stock = graphs_of_stock("llama", way, **SMALL)
    reports, graphs, _ = run_and_count("llama", way, "exact", 0.15, **SMALL)
    assert [report.exact_tokens for report in reports[-3:]] == [report.prompt_tokens - 1 for report in reports[-3:]]
    assert 2 <= stock <= graphs <= stock + OWN_GRAPHS


@pytest.mark.parametrize("way", ["forward", pytest.param("module", marks=pytest.mark.slow)])
def test_compiled_model_compiles_a_bounded_number_of_times_with_moved_text(way):
    stock = graphs_of_stock("llama", way, **SMALL)
    reports, graphs, _ = run_and_count("llama", way, "balanced", 0.15, **SMALL)
    assert all(report.shifted_tokens for report in reports[2:11])
    assert any(report.reason is None for report in reports[2:11])  # a probe and a second pass ran too
    assert 2 <= stock <= graphs <= stock + OWN_GRAPHS


def test_dropped_hook_of_a_compiled_model_leaves_its_call_as_it_was():
    model, _ = compiled("llama", "module", **TINY)
    call, cache = model._compiled_call_impl, SuffixCache(fidelity="exact")
    seen = []

    class Look:
        def __call__(self, input_ids, scores):
            seen.append(model._compiled_call_impl is not call and not model._forward_pre_hooks)
            return scores

    ask(model, PASSAGE, cache, processors=[Look()])
    assert all(seen) and model._compiled_call_impl is call
    with pytest.raises(ZeroDivisionError):
        ask(model, PASSAGE, cache, processors=[lambda ids, scores: 1 / 0])
    assert model._compiled_call_impl is call
    with cache.attach(model):
        assert model._compiled_call_impl is not call
        with torch.no_grad():
            model(torch.tensor([PASSAGE]), logits_to_keep=1)
        assert cache.last_report.exact_tokens == len(PASSAGE) - 1
    assert model._compiled_call_impl is call


def test_module_compiled_before_or_after_the_first_request_serves_both():
    model, cache = make_model("llama", **TINY), SuffixCache(fidelity="exact")
    want = ask(model, PASSAGE)
    same_answer(ask(model, PASSAGE, cache), want)
    model.compile(backend="eager")
    as_it_is_now(model)
    for _ in range(2):
        got = ask(model, PASSAGE, cache)
        same_answer(got, want)
    assert got.report.exact_tokens == len(PASSAGE) - 1


def test_compiled_wrapper_generates_and_is_served_under_attach():
    model = make_model("llama", **TINY)
    wrapper = torch.compile(model, backend="eager")
    with torch.no_grad():
        wrapper(torch.tensor([PASSAGE]))
    as_it_is_now(model)
    cache = SuffixCache(fidelity="exact")
    for expected in (0, len(PASSAGE) - 1):
        assert same_as_vanilla(wrapper, PASSAGE, cache).report.exact_tokens == expected
    ids = torch.tensor([PASSAGE[:60] + new_text(9, 1)])
    with torch.no_grad():
        want = model(ids, use_cache=False).logits[:, -1:]
        with cache.attach(model):
            for expected in (60, ids.shape[1] - 1):
                got = wrapper(ids, logits_to_keep=1).logits
                assert (got - want).abs().max() < 1e-4
                assert cache.last_report.exact_tokens == expected
            # a forward that brings its own cache is not touched
            own, before = DynamicCache(), cache.stats.requests
            assert (wrapper(ids, logits_to_keep=1, **{cache_name(model): own}).logits - want).abs().max() < 1e-4
            assert own.get_seq_length() == ids.shape[1] and cache.stats.requests == before
        assert (wrapper(ids, logits_to_keep=1).logits - want).abs().max() < 1e-4
    del got
    gc.collect()
    check_pool(cache)


def test_view_never_asks_for_compilation():
    """transformers compiles decoding by itself where a cache says that it can be compiled."""
    model, cache = make_model("llama", **TINY), SuffixCache(fidelity="exact")
    config = CompileConfig(backend="eager")
    config._compile_all_devices = True
    static = ask(model, PASSAGE, cache_implementation="static", compile_config=config)  # control: it does compile
    assert counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()
    counters.clear()
    as_it_is_now(model)
    for expected in (0, len(PASSAGE) - 1):
        got = ask(model, PASSAGE, cache, compile_config=config)
        assert got.ids.tolist() == static.ids.tolist() and got.report.exact_tokens == expected
    assert counters["stats"]["unique_graphs"] == 0
    same_as_vanilla(model, PASSAGE, cache)


@pytest.mark.slow
@pytest.mark.parametrize("fidelity", ["exact", "balanced"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3_text"])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_models_answer_right_and_compile_a_bounded_number_of_times(way, kind, fidelity):
    stock = graphs_of_stock(kind, way)
    reports, graphs, _ = run_and_count(kind, way, fidelity, 1.0)
    assert all(report.exact_tokens for report in reports[11:])  # repeats
    assert fidelity == "exact" or all(served(report) for report in reports[2:11])
    assert graphs <= stock + OWN_GRAPHS


@pytest.mark.slow
def test_model_compiled_for_autograd_too_answers_right():
    reports, _, _ = run_and_count("mistral", "module", "balanced", 1.0, "aot_eager", **SMALL)
    assert all(served(report) for report in reports[2:11])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prefill_chunk_size": 16}, {"prompt_lookup_num_tokens": 3}])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_model_in_other_modes_equals_vanilla(way, options):
    model, _ = compiled("llama", way, **SMALL)
    plain = make_model("llama", **SMALL)
    cache = SuffixCache(fidelity="exact")
    with dynamo_config.patch(recompile_limit=32):
        for ids in requests()[:5] * 2:
            got = ask(model, ids, cache, steps=8, **options)
            assert got.ids.tolist() == ask(plain, ids, steps=8, **options).ids.tolist()
    assert got.report.exact_tokens == len(ids) - 1
    check_pool(cache)


@pytest.mark.slow
def test_threads_on_one_compiled_model_answer_right():
    model, _ = compiled("llama", "module", **SMALL)
    plain = make_model("llama", **SMALL)
    cache = SuffixCache(fidelity="exact")
    want = [ask(plain, ids, steps=4) for ids in requests()[:6]]

    def job(number):
        for ids, answer in zip(requests()[number:6], want[number:], strict=True):
            same_answer(ask(model, ids, cache, steps=4), answer)

    with dynamo_config.patch(recompile_limit=32):
        ask(model, requests()[0], cache, steps=4)
        in_threads([lambda number=number: job(number) for number in range(3)])
    check_pool(cache)
