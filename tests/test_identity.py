"""Whose rows these are: threads on one cache, several models, weights that change in place."""

import pytest
import torch

from hf_suffix_cache import SuffixCache
from reference import (
    ask,
    check_pool,
    check_report,
    forgets_everything,
    in_threads,
    kinds_of,
    same_answer,
    same_as_vanilla,
    work_is_reported,
)
from tiny_models import make_model, new_text, old_text

PROMPT = old_text(48, 1)
MOVED = new_text(11, 1) + PROMPT + new_text(36, 2)
IDS = torch.tensor([PROMPT])


@pytest.mark.parametrize("budget", [None, 700 * 768])
def test_four_threads_share_one_cache(budget):
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", max_bytes=budget)
    families = [old_text(60, 60 + number) for number in range(3)]
    prompts = [families[number % 3][: 20 + 5 * number] + new_text(15, number) for number in range(8)]
    serial = [ask(model, ids, steps=4) for ids in prompts]

    def work(offset):
        for number in range(8):
            number = (number + offset) % 8
            got = ask(model, prompts[number], cache, steps=4)
            same_answer(got, serial[number])
            check_report(got.report)
            assert got.report.prompt_tokens == len(prompts[number])
            assert list(cache.reports) and str(cache.stats)

    in_threads([lambda offset=offset: work(2 * offset) for offset in range(4)])
    assert cache.stats.requests == 32
    check_pool(cache)
    forgets_everything(cache)


def test_threads_of_two_models_and_both_fidelities():
    models = [make_model("llama"), make_model("llama", seed=1), make_model("mistral")]
    cache = SuffixCache()
    want = [ask(model, MOVED, steps=3) for model in models]

    def work(number):
        handle = cache.using(fidelity="exact")
        for _ in range(6):
            same_answer(ask(models[number], MOVED, handle, steps=3), want[number])
            ask(models[number], PROMPT + new_text(33, number), cache, steps=2)

    in_threads([lambda number=number: work(number) for number in range(3)])
    check_pool(cache)


def test_two_models_of_the_same_shapes_share_no_row():
    models = [make_model("llama"), make_model("llama", seed=1)]
    cache = SuffixCache()
    for _ in range(4):
        for model in models:
            ask(model, PROMPT, cache)
    fresh = make_model("llama", seed=2)
    assert same_as_vanilla(fresh, PROMPT, cache).report.new_tokens == len(PROMPT)
    assert ask(fresh, MOVED, cache).report.exact_tokens == 0
    for model in models:
        assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1  # control


def _scale_key_projection(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)


def _load_other_weights(model):
    model.load_state_dict(make_model("llama", seed=5).state_dict())


def _one_step_of_sgd(model):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    model(IDS, labels=IDS).loss.backward()
    optimiser.step()
    optimiser.zero_grad()


def _to_half_and_back(model):
    model.half().float()


def _to_double(model):
    model.double()


def _other_frequencies(model):
    model.model.rotary_emb.inv_freq.mul_(0.7)


def _other_tensor_in_place_of_a_weight(model):
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data = torch.randn_like(weight)


CHANGES = [
    _scale_key_projection,
    _load_other_weights,
    _one_step_of_sgd,
    _to_half_and_back,
    _to_double,
    _other_frequencies,
    _other_tensor_in_place_of_a_weight,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_changed_weights_are_noticed(change):
    model = make_model("llama")
    cache = SuffixCache()
    ask(model, PROMPT, cache)
    before = ask(model, PROMPT)
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1  # control
    change(model)
    after = ask(model, PROMPT)
    assert change in (_to_double,) or (before.first - after.first).abs().max() > 1e-5
    report = same_as_vanilla(model, PROMPT, cache).report
    assert report.new_tokens == len(PROMPT)
    report = ask(model, MOVED, cache).report
    assert report.exact_tokens == report.carried_tokens == 0
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1
    check_pool(cache)


def test_rows_stored_in_inference_mode_serve_every_mode():
    model = make_model("llama", spy=True)
    cache = SuffixCache(fidelity="exact")
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad) * 2:
        with mode():
            tokens = ask(model, PROMPT, cache).tokens()
            model.spy.clear()
            longer = ask(model, tokens + new_text(7, 1), cache, steps=1)
            work_is_reported(model, longer)
    assert kinds_of(longer.report).count("exact") >= len(tokens) - 1


def test_settings_and_hooks_that_change_the_rows_are_noticed():
    """Scales, windows, adapter states and foreign hooks change no tensor, and yet what the model computes."""
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    attention = model.model.layers[1].self_attn

    def check():
        same_as_vanilla(model, PROMPT, cache)
        assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1  # control: it is stored

    check()
    attention.scaling *= 2
    check()
    attention.scaling /= 2
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.5)
    check()
    hook.remove()
    check()


def test_new_tensor_at_an_old_address_is_noticed():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    projection = model.model.layers[0].self_attn.k_proj
    for number in range(30):
        for _ in range(number % 3 + 1):  # the allocator may hand out the freed tensor's place again
            projection.weight = torch.nn.Parameter(torch.randn(32, 64) * 0.3)
        same_as_vanilla(model, PROMPT, cache)


def test_gradient_through_served_rows_raises():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    ids = torch.tensor([PROMPT])
    with cache.attach(model):
        model(ids, logits_to_keep=1).logits.sum().backward()  # nothing served: the gradient is right
        with pytest.raises(RuntimeError, match="gradients can't flow"):
            model(ids, logits_to_keep=1).logits.sum().backward()
        with torch.no_grad():
            model(ids, logits_to_keep=1)
    model.zero_grad()


def test_threads_at_a_models_first_use_get_one_identity():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    texts = [old_text(40, 300 + number) for number in range(6)]
    in_threads([lambda ids=ids: ask(model, ids, cache) for ids in texts])
    assert len(cache._store.shelves) == 1
    for ids in texts:
        assert same_as_vanilla(model, ids, cache).report.exact_tokens == len(ids) - 1
