"""The registered attention function: who gets it, what it delegates to, what the probe reads."""

import copy
import threading

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_suffix_cache import SuffixCache, attention, grouped
from hf_suffix_cache.attention import (
    Probe,
    alias_of,
    attention_weights,
    begin_forward,
    end_forward,
    groupable_configs,
    is_alias,
    open_pass,
    own_implementation,
    ungrouped,
)
from reference import Recorder, ask, same_answer, same_as_vanilla, stored
from tiny_models import A, B, C, head, living_models, make_model, old_text, question

IDS = torch.tensor([head(0, 40)])
STORED = head(0) + A + B + C + question(0)
MOVED = head(1, 13) + C + A + B + question(1)


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


def flash_like(calls):
    """
    An attention that, like flash attention, knows no mask but "the queries are the last positions of the keys", and
    says so by raising where it gets any other.
    """

    def forward(module, query, key, value, attention_mask, **kwargs):
        assert attention_mask is None, "flash attention takes no 4-D mask"
        calls.append(query.shape[2])
        queries, keys = query.shape[2], key.shape[2]
        columns = torch.arange(keys)
        kwargs.pop("is_causal", None)
        mask = (columns <= columns[keys - queries :, None])[None, None]
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    return forward


@pytest.fixture
def flash_calls():
    calls = []
    AttentionInterface.register("maskless", flash_like(calls))
    AttentionMaskInterface.register("maskless", lambda *args, **kwargs: None)
    yield calls
    for model in living_models():
        model.set_attn_implementation("sdpa")


@pytest.fixture
def grouped_calls(monkeypatch):
    """Rows of every attention that ran in our own way, which here is always said to be faster."""
    calls = []

    def counted(function):
        def run(query, *args):
            calls.append(query.shape[2])
            return function(query, *args)

        return run

    for name in ("decode_attention", "scattered_attention"):
        monkeypatch.setattr(grouped, name, counted(getattr(grouped, name)))
    for name in ("decode_is_faster", "scattered_is_faster"):
        monkeypatch.setattr(grouped, name, lambda query, key: True)
    return calls


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_probe_reads_what_eager_attention_gives(implementation):
    model = make_model("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = model(IDS, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    probe = Probe(num_queries=8, first_layer=1)
    with open_pass(model, probe):
        logits(model)
    mean = torch.stack([weights[:, :, -8:].mean(dim=(1, 2)) for weights in want[1:]]).mean(dim=0)
    assert torch.allclose(probe.attention(), mean, atol=1e-6)
    assert not torch.allclose(probe.attention(), mean.flip(-1), atol=1e-3)  # control
    model.set_attn_implementation("sdpa")  # as it was made


def test_probe_changes_no_answer_and_leaves_the_model_as_it_was():
    model = make_model("mistral")
    want = logits(model)
    with open_pass(model, Probe(8, 0)):
        assert is_alias(model.config._attn_implementation)
        assert own_implementation(model) == "sdpa"
        assert torch.equal(logits(model), want)
    assert model.config._attn_implementation == "sdpa"


def test_other_threads_get_the_models_own_attention_and_mask(flash_calls):
    model = make_model("llama")
    model.set_attn_implementation("maskless")
    want, seen = logits(model), {}
    flash_calls.clear()

    def other():
        seen["logits"], seen["calls"] = logits(model), list(flash_calls)

    with open_pass(model, Probe(8, 0)):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen["calls"] == [IDS.shape[1]] * 3  # its three layers ran the model's own function
        logits(model)
        assert len(flash_calls) == 3  # this thread's pass ran as sdpa
    assert torch.allclose(seen["logits"], want, atol=1e-5)
    assert model.config._attn_implementation == "maskless"


def test_switch_is_counted_and_goes_back_after_an_exception(flash_calls):
    model = make_model("llama")
    model.set_attn_implementation("maskless")
    with pytest.raises(KeyboardInterrupt), open_pass(model):
        with open_pass(model, Probe(8, 0)):
            assert is_alias(model.config._attn_implementation)
        assert is_alias(model.config._attn_implementation)  # the outer pass is still open
        raise KeyboardInterrupt
    assert model.config._attn_implementation == "maskless"


def test_model_set_to_flash_attention_runs_scattered_passes_as_sdpa(flash_calls):
    model = make_model("llama")
    want = ask(model, MOVED, stored(model, STORED))
    model.set_attn_implementation("maskless")
    cache = stored(model, STORED)
    flash_calls.clear()
    got = ask(model, MOVED, cache)
    assert got.report.shifted_tokens and got.report.repaired_tokens
    same_answer(got, want)  # what the same request gives under sdpa, where the model builds its masks
    assert set(flash_calls) == {1}  # decoding went on as the model's own
    assert (
        alias_of("sdpa") in ALL_MASK_ATTENTION_FUNCTIONS
    )  # attention without its mask function would make no mask at all


def test_attention_weights_equal_a_loop_over_heads():
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 10, 8)
    got = attention_weights(query, key, None, None)
    for batch in range(2):
        for number in range(4):
            for row in range(3):
                visible = 10 - 3 + row + 1
                scores = key[batch, number // 2, :visible] @ query[batch, number, row] * 8**-0.5
                want = torch.cat([scores.softmax(0), torch.zeros(10 - visible)])
                assert torch.allclose(got[batch, number, row], want, atol=1e-6)


# -- grouped heads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "cohere2", "phi3"])
def test_decoding_runs_grouped_and_answers_as_stock(kind, grouped_calls):
    model = make_model(kind)
    want = ask(model, STORED, steps=6)
    assert not grouped_calls  # a call without our cache is stock's own
    got = ask(model, STORED, SuffixCache(fidelity="exact"), steps=6)
    assert grouped_calls.count(1) >= 5
    same_answer(got, want)
    assert model.config._attn_implementation == "sdpa"


def test_scattered_rows_run_grouped_and_answer_as_without(grouped_calls, monkeypatch):
    model = make_model("gemma3_text")
    got = ask(model, MOVED, stored(model, STORED))
    assert got.report.shifted_tokens and max(grouped_calls) > 1
    monkeypatch.setattr(attention, "grouped_attention", lambda *args: None)
    grouped_calls.clear()
    same_answer(got, ask(model, MOVED, stored(model, STORED)))
    assert not grouped_calls


def test_callbacks_see_the_models_own_implementation_and_a_change_of_it_stays(grouped_calls):
    model, seen = make_model("llama"), []

    class Look(Recorder):
        def __call__(self, input_ids, scores):
            seen.append(model.config._attn_implementation)
            if len(seen) == 3:
                model.set_attn_implementation("eager")
                grouped_calls.clear()
            return super().__call__(input_ids, scores)

    ids = torch.tensor([STORED])
    model.generate(ids, cache=SuffixCache(), logits_processor=[Look()], max_new_tokens=6, do_sample=False)
    assert seen[:3] == ["sdpa"] * 3 and seen[3:] == ["eager"] * 3
    assert not grouped_calls  # eager stays eager
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")  # as it was made


def test_change_while_a_forward_is_open_is_not_undone():
    model = make_model("llama")
    begin_forward(groupable_configs(model))
    assert is_alias(model.config._attn_implementation)
    model.set_attn_implementation("eager")
    assert own_implementation(model) == "eager"
    end_forward()
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")  # as it was made


@pytest.mark.parametrize("implementation", ["eager", "maskless"])
def test_other_implementations_are_never_grouped(implementation, flash_calls, grouped_calls):
    model = make_model("llama")
    model.set_attn_implementation(implementation)
    ask(model, STORED, SuffixCache(), steps=4)
    assert not grouped_calls
    assert model.config._attn_implementation == implementation
    model.set_attn_implementation("sdpa")  # as it was made


def test_threads_without_a_forward_of_ours_get_stock_in_the_middle_of_one(grouped_calls):
    model = make_model("mistral")
    want, results = logits(model), {}

    class Other(Recorder):
        """Runs a plain forward of another thread while this thread's is open."""

        def __call__(self, module, args, output):
            if threading.current_thread() is threading.main_thread() and "plain" not in results:
                before = len(grouped_calls)
                assert is_alias(model.config._attn_implementation)
                thread = threading.Thread(target=lambda: results.update(plain=logits(model)))
                thread.start()
                thread.join()
                results["calls"] = len(grouped_calls) - before

    handle = model.model.layers[1].register_forward_hook(Other())
    try:
        begin_forward(groupable_configs(model))
        logits(model)
    finally:
        end_forward()
        handle.remove()
    assert results["calls"] == 0
    assert torch.equal(results["plain"], want)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("attached", [False, True])
def test_model_is_as_it_was_after_an_exception_in_a_forward(error, attached):
    model = make_model("llama")
    ids, armed = torch.tensor([STORED]), []

    def fail(module, args, output):
        if armed:
            assert is_alias(model.config._attn_implementation)
            raise error("on purpose")

    handle = model.model.layers[1].register_forward_hook(fail)
    try:
        cache = stored(model, STORED)
        armed.append(True)
        if attached:
            with pytest.raises(error), cache.attach(model):
                model(ids)
        else:
            with pytest.raises(error):
                model.generate(ids, cache=cache, max_new_tokens=2)
    finally:
        handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert not attention._counts
    assert getattr(attention._thread, "current", None) is None
    same_answer(ask(model, STORED, cache), ask(model, STORED))


def test_interrupted_forward_under_attach_does_not_hold_up_the_next_one():
    model = make_model("llama")
    ids, armed = torch.tensor([STORED]), []

    def fail(module, args, output):
        if armed:
            raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_hook(fail)
    with stored(model, STORED).attach(model), torch.no_grad():
        armed.append(True)
        with pytest.raises(KeyboardInterrupt):
            model(ids)
        armed.clear()
        got = model(ids).logits
        assert model.config._attn_implementation == "sdpa"
    handle.remove()
    assert not attention._counts
    assert torch.allclose(got[:, -1], logits(model, ids)[:, -1], atol=1e-4)


@pytest.mark.parametrize("part", ["model", "inner", "layer"])
def test_nothing_is_switched_where_something_is_compiled(part):
    model = make_model("llama")
    assert groupable_configs(model)
    compiled = {"model": model, "inner": model.model, "layer": model.model.layers[1]}[part]
    compiled.compile(backend="eager")
    assert groupable_configs(model) == []
    del vars(compiled)["_compiled_call_impl"]  # as it was made


def test_nothing_is_switched_in_a_forward_that_is_part_of_a_graph():
    model = make_model("llama")
    columns = torch.arange(4).numpy()
    with ungrouped():
        begin_forward(groupable_configs(model))
        assert model.config._attn_implementation == "sdpa"
        with open_pass(model, columns=columns, total=9):
            assert model.config._attn_implementation == "sdpa"
    with open_pass(model, columns=columns, total=9):
        assert is_alias(model.config._attn_implementation)  # control


@pytest.mark.parametrize("change", [{"dropout": 0.1}, {"s_aux": torch.zeros(4)}, {"position_bias": torch.zeros(1)}])
def test_arguments_that_change_the_arithmetic_are_left_to_the_model(change, grouped_calls):
    model = make_model("llama")
    module, own = model.model.layers[0].self_attn, []
    query, key = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 20, 16)

    def implementation(name, module):
        def run(*args, **kwargs):
            own.append(kwargs)
            return torch.zeros(1), None

        return run

    begin_forward(groupable_configs(model))
    original, attention._implementation = attention._implementation, implementation
    try:
        attention.attention_forward(module, query, key, key, None, scaling=0.25, dropout=0.0, use_cache=True)
        assert len(grouped_calls) == 1 and not own  # control
        attention.attention_forward(module, query, key, key, None, **{"scaling": 0.25, **change})
        assert len(grouped_calls) == 1 and len(own) == 1
    finally:
        attention._implementation = original
        end_forward()


@pytest.mark.parametrize("attention_name", ["sdpa", "eager"])
def test_a_copy_made_while_a_model_is_switched_goes_on_as_the_model(attention_name):
    model = make_model("llama", attention=attention_name)
    ids = torch.tensor([old_text(20, 1)])
    want = model(ids).logits
    with open_pass(model, Probe(4, 0)):
        assert is_alias(model.config._attn_implementation)
        copied = copy.deepcopy(model)
    assert model.config._attn_implementation == attention_name
    assert attention.own_implementation(copied) == attention_name
    assert torch.equal(copied(ids).logits, want)
    same_as_vanilla(copied, old_text(30, 2), SuffixCache())
    assert not attention._counts
