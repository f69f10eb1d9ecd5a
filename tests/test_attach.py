"""`attach`, and a cache given straight to a forward."""

import inspect
import threading
import warnings

import pytest
import torch
from transformers import Cache

from hf_suffix_cache import SuffixCache
from reference import (
    ask,
    cache_name,
    check_pool,
    check_report,
    in_threads,
    same_as_vanilla,
)
from tiny_models import CORE, make_model, new_text, old_text

PROMPT = old_text(48, 1)
IDS = torch.tensor([PROMPT])


@pytest.mark.parametrize("kind", CORE)
def test_attach_serves_plain_forwards(kind):
    model = make_model(kind, spy=True)
    cache = SuffixCache(fidelity="exact")
    longer = torch.tensor([PROMPT + new_text(9, 1)])
    with torch.no_grad():
        want = model(longer).logits
        with cache.attach(model):
            assert (model(IDS).logits - want[:, : len(PROMPT)]).abs().max() < 1e-4
            for number in range(4):
                model.spy.clear()
                logits = model(longer, logits_to_keep=3).logits
                assert logits.shape[1] == 3
                assert (logits - want[:, -3:]).abs().max() < 1e-4
                assert model.spy.rows() == (9 if number == 0 else 3)
                whole = model(longer).logits
                assert whole.shape == want.shape and (whole - want).abs().max() < 1e-4
    assert same_as_vanilla(model, longer, cache).report.exact_tokens == longer.shape[1] - 1
    check_pool(cache)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_no_cache_by_any_name_is_no_cache(name):
    """transformers 5.24 warns of `past_key_values` beside `cache`, of which the caller's script knows nothing."""
    model = make_model("llama")
    if name not in inspect.signature(model.forward).parameters and name == "cache":
        pytest.skip("this transformers has no argument `cache`")
    cache = SuffixCache(fidelity="exact")
    with torch.no_grad(), cache.attach(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model(IDS, logits_to_keep=1, **{name: None})
    assert cache.last_report.exact_tokens == len(PROMPT) - 1


def test_attach_reports_and_counts():
    model = make_model("llama", spy=True)
    cache = SuffixCache(fidelity="exact")
    with torch.no_grad(), cache.attach(model):
        for _ in range(3):
            model.spy.clear()
            model(IDS, logits_to_keep=1)
            report = cache.last_report
            check_report(report)
            assert model.spy.rows() == report.computed_rows + report.capability_rows
    assert report.exact_tokens == len(PROMPT) - 1
    assert cache.stats.requests == 3


def test_attach_scores_with_labels_and_masks_as_vanilla():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    rows = [PROMPT, PROMPT[:20] + new_text(28, 1)]
    ids = torch.tensor(rows)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    with torch.no_grad():
        want = (model(ids, labels=ids).loss, model(ids, attention_mask=mask).logits)
        with cache.attach(model):
            for _ in range(4):
                assert abs(model(ids, labels=ids).loss - want[0]) < 1e-5
                assert (model(ids, attention_mask=mask).logits - want[1]).abs()[mask.bool()].max() < 1e-4


def test_attach_serves_an_own_decoding_loop():
    model = make_model("qwen2", spy=True)
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    want = ask(model, PROMPT, steps=6).tokens()
    name = cache_name(model)
    for _ in range(4):
        model.spy.clear()
        tokens = list(PROMPT)
        with torch.no_grad(), cache.attach(model):
            output = model(IDS, use_cache=True, logits_to_keep=1)
            for _ in range(6):
                tokens.append(int(output.logits[0, -1].argmax()))
                output = model(torch.tensor([tokens[-1:]]), use_cache=True, **{name: output[name]})
        assert tokens == want
        assert model.spy.rows() == 1 + 6
        del output  # it holds the view
    check_pool(cache)


def test_attach_detaches_after_an_exception_and_nests():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    with pytest.raises(KeyboardInterrupt), cache.attach(model):
        raise KeyboardInterrupt
    assert not model._forward_pre_hooks and not model._forward_hooks
    with cache.attach(model), cache.attach(model):
        same_as_vanilla(model, PROMPT, cache)
        assert len(model._forward_pre_hooks) == 1
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_attach_in_training_and_with_gradients_is_vanilla():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    with torch.inference_mode():
        ask(model, PROMPT, cache)
    model(IDS, labels=IDS).loss.backward()
    want = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
    for _ in range(4):
        model.zero_grad()
        with cache.attach(model):
            model(IDS, labels=IDS).loss.backward()
        assert (model.model.layers[0].self_attn.k_proj.weight.grad - want).abs().max() <= 1e-4 * want.abs().max()
    model.zero_grad()
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("kind", CORE)
def test_direct_forward_is_an_ordinary_growing_cache(kind):
    model = make_model(kind)
    name, cache = cache_name(model), SuffixCache()
    assert isinstance(cache, Cache)
    with torch.no_grad():
        want = model(IDS).logits
        assert (model(IDS, **{name: SuffixCache()}).logits - want).abs().max() < 1e-4
        pieces = [model(IDS[:, start : start + 12], **{name: cache}).logits for start in range(0, 48, 12)]
        pieces += [model(torch.tensor([[9]]), **{name: cache}).logits]
        whole = model(torch.tensor([PROMPT + [9]])).logits
    assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-4
    assert check_pool(cache).segments == 0  # not stored: `attach` does that


@pytest.mark.parametrize("ids", [IDS.repeat(2, 1), IDS.flip(1)], ids=["batch", "restart"])
def test_direct_forward_that_does_not_continue_is_right_or_a_clear_error(ids):
    model = make_model("llama")
    name, cache = cache_name(model), SuffixCache()
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        model(IDS, **{name: cache})
        try:
            got = model(ids, position_ids=positions, **{name: cache}).logits
        except ValueError as error:
            assert "reset" in str(error)
            cache.reset()
            got = model(ids, position_ids=positions, **{name: cache}).logits
        assert (got - model(ids).logits).abs().max() < 1e-4
    same_as_vanilla(model, PROMPT, cache)  # generate is not disturbed by the forwards before it


def test_direct_forwards_of_two_threads_are_apart():
    model = make_model("llama")
    name, cache = cache_name(model), SuffixCache()
    barrier = threading.Barrier(2, timeout=60)

    def run(ids):
        with torch.no_grad():
            want = model(ids).logits
            barrier.wait()
            first = model(ids[:, :20], **{name: cache}).logits
            barrier.wait()
            second = model(ids[:, 20:], **{name: cache}).logits
        assert (torch.cat([first, second], 1) - want).abs().max() < 1e-4

    in_threads([lambda: run(IDS), lambda: run(torch.tensor([PROMPT[::-1]]))])
