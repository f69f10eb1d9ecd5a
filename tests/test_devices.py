"""Models whose layers are offloaded by accelerate: right answers, rows where each layer computes, clear faults."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module

from hf_suffix_cache import SuffixCache
from reference import (
    ask,
    check_pool,
    check_report,
    first_layer_is_fresh,
    forgets_everything,
    same_answer,
    same_as_vanilla,
    served,
    served_rows,
)
from tiny_models import fingerprint, make_model, new_text, old_text

PROMPT = old_text(48, 1)
OTHER = PROMPT[:30] + new_text(9, 1)
CPU = torch.device("cpu")


def device_map(**changes) -> dict:
    """Each part of a tiny llama on the CPU, but for `changes`: `layer_1="disk"`, `embed_tokens="disk"`."""
    places = {name: "cpu" for name in ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")}
    places |= {f"model.layers.{number}": "cpu" for number in range(3)}
    for name, place in changes.items():
        part = f"model.layers.{name[-1]}" if name.startswith("layer_") else f"model.{name}"
        assert part in places
        places[part] = place
    return places


WAYS = {
    "cpu_offload": lambda model, folder: cpu_offload(model, execution_device=CPU),
    "disk_offload": lambda model, folder: disk_offload(model, folder, execution_device=CPU),
    "one_layer_on_disk": lambda model, folder: dispatch_model(
        model, device_map(layer_1="disk"), main_device="cpu", offload_dir=folder
    ),
    "embeddings_on_disk": lambda model, folder: dispatch_model(
        model, device_map(embed_tokens="disk"), main_device="cpu", offload_dir=folder
    ),
    "last_layer_on_disk": lambda model, folder: dispatch_model(
        model, device_map(layer_2="disk", norm="disk"), main_device="cpu", offload_dir=folder
    ),
}


@pytest.fixture
def offload(tmp_path):
    """`offload(model, way)`: the model with some of its weights offloaded; what that left on it is the test's own."""

    def offloaded(model, way):
        model = WAYS[way](model, str(tmp_path / way))
        assert any(parameter.device.type == "meta" for parameter in model.parameters())  # control
        model.baseline = fingerprint(model)
        return model

    return offloaded


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_offloaded_model_reuses_as_one_in_memory(kind, way, offload):
    plain, model = make_model(kind), offload(make_model(kind), way)
    want = {name: ask(plain, ids) for name, ids in (("prompt", PROMPT), ("other", OTHER))}
    cache = SuffixCache(fidelity="exact")
    for expected in (0, len(PROMPT) - 1, len(PROMPT) - 1):
        got = ask(model, PROMPT, cache)
        same_answer(got, want["prompt"])
        assert got.report.exact_tokens == expected and got.report.reason is None
    got = ask(model, OTHER, cache)
    same_answer(got, want["other"])
    assert got.report.exact_tokens == 30
    check_report(got.report)
    forgets_everything(cache)


@pytest.mark.parametrize("way", WAYS)
def test_offloaded_model_moves_text(way, offload):
    plain, model = make_model("llama"), offload(make_model("llama"), way)
    ids = new_text(21, 7) + PROMPT + new_text(60, 8)
    for fraction in (1.0, 0.15):
        cache = SuffixCache(repair_fraction=fraction)
        ask(model, new_text(9, 1) + PROMPT + new_text(40, 2), cache, steps=1)
        got, rows = served_rows(model, ids, cache, steps=1)
        assert served(got.report) == len(PROMPT)
        first_layer_is_fresh(plain, rows, ids)
        if fraction == 1.0:
            same_answer(got, ask(plain, ids, steps=1))
        else:
            assert got.report.shifted_tokens > 0
        assert {keys.device.type for keys, _ in rows} == {"cpu"}  # where the layers compute, not where weights rest


@pytest.mark.parametrize("way", ["cpu_offload", "one_layer_on_disk"])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 7}])
def test_offloaded_model_keeps_every_mode(way, options, offload):
    plain, model = make_model("llama"), offload(make_model("llama"), way)
    cache = SuffixCache(fidelity="exact")
    if way == "cpu_offload" and "prompt_lookup_num_tokens" in options:
        # stock moves drafts to the device of the first weight, which has no memory: the same error, and nothing left
        for store in (None, cache):
            with pytest.raises(NotImplementedError, match="meta tensor"):
                ask(model, PROMPT, store, **options)
        forgets_everything(cache)
        return
    for ids in (PROMPT, PROMPT, OTHER):
        got = ask(model, ids, cache, **options)
        assert got.ids.tolist() == ask(plain, ids, **options).ids.tolist()
    assert got.report.exact_tokens == 30
    check_pool(cache)


@pytest.mark.parametrize("way", WAYS)
def test_offloaded_model_is_measured_and_registers_as_one_in_memory(way, offload):
    plain, model = make_model("llama"), offload(make_model("llama"), way)
    cache = SuffixCache(fidelity="exact")
    assert cache.capability(model).kind == cache.capability(plain).kind == "shift"
    cache.register(model, [PROMPT], at="front")
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1
    ids = torch.tensor([OTHER])
    with torch.no_grad(), cache.attach(model):
        got = model(ids, logits_to_keep=1).logits
    with torch.no_grad():
        assert (got - plain(ids).logits[:, -1:]).abs().max() < 1e-4
    assert cache.last_report.exact_tokens == 30


def test_autocast_is_seen_on_an_offloaded_model(offload):
    """Its first weight rests on the meta device, for which there is no autocast."""
    model, cache = offload(make_model("llama"), "cpu_offload"), SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            report = same_as_vanilla(model, PROMPT, cache).report
            assert report.exact_tokens == 0 and "autocast" in report.reason
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1


def test_offloading_a_model_and_fetching_it_back_never_serves_wrong_rows(tmp_path):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    before = model.baseline
    want = ask(model, PROMPT)
    for _ in range(2):
        same_answer(ask(model, PROMPT, cache), want)
    dispatch_model(model, device_map(layer_1="disk"), main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    model.baseline = fingerprint(model)
    for _ in range(2):
        got = ask(model, PROMPT, cache)
        same_answer(got, want)
    assert got.report.exact_tokens == len(PROMPT) - 1
    remove_hook_from_module(model, recurse=True)
    del model.hf_device_map
    model.baseline = {**fingerprint(model), "config": before["config"]}
    for _ in range(2):
        got = ask(model, PROMPT, cache)
        same_answer(got, want)
    assert got.report.exact_tokens == len(PROMPT) - 1
    check_pool(cache)


def test_changed_weight_of_an_offloaded_layer_is_another_model(tmp_path, offload):
    model, cache = offload(make_model("llama"), "cpu_offload"), SuffixCache(fidelity="exact")
    want = ask(model, PROMPT, cache)
    store = model.model.layers[1].mlp.up_proj._hf_hook.weights_map
    name = "model.layers.1.mlp.up_proj.weight"
    weights = store.dataset.state_dict if hasattr(store.dataset, "state_dict") else store.dataset
    with torch.no_grad():
        weights[name].mul_(1.5)
    changed = ask(model, PROMPT)
    assert (changed.scores[0] - want.scores[0]).abs().max() > 1e-2  # control
    got = ask(model, PROMPT, cache)
    same_answer(got, changed)
    assert got.report.exact_tokens == 0


def test_fake_device_map_changes_nothing():
    """What `hf_device_map` says is not believed: rows go where the layer's own rows lie."""
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu", "model.layers.2": "disk"}
    try:
        for expected in (0, len(PROMPT) - 1):
            assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == expected
    finally:
        del model.hf_device_map


@pytest.mark.parametrize("how", ["all", "one_layer"])
def test_model_without_weights_fails_as_in_stock_and_leaves_nothing(how):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    part = model if how == "all" else model.model.layers[1]
    part.to("meta")
    errors = []
    for store in (None, cache):
        with pytest.raises((RuntimeError, NotImplementedError)) as caught:
            ask(model, PROMPT, store)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]
    assert not model._forward_pre_hooks and not model._forward_hooks
    check_pool(cache)


def test_model_cast_after_storing_serves_rows_of_its_own_only():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        model.to(dtype)
        got, rows = served_rows(model, PROMPT, cache)
        assert got.report.exact_tokens == 0 and rows[0][0].dtype is dtype
        assert (got.scores[0] - ask(model, PROMPT).scores[0]).abs().max() == 0.0
        assert ask(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1
    check_pool(cache, handed_out=True)
