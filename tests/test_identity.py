"""Whose rows these are: threads on one cache, several models, whatever changes what a model computes."""

import collections
import copy
import functools
import gc
import os
import subprocess
import sys
import types
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import accelerate
import numpy as np
import pytest
import torch
import transformers
from transformers import CompileConfig
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.llama import modeling_llama

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.attention import own_implementation
from hf_suffix_cache.identity import IdentityTable, refusal, sample
from hf_suffix_cache.identity.sample import Sample
from hf_suffix_cache.identity.serials import Serials
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
from tiny_models import VOCAB, fingerprint, forget, make_model, new_text, old_text

PROMPT = old_text(48, 1)
MOVED = new_text(11, 1) + PROMPT + new_text(36, 2)
IDS = torch.tensor([PROMPT])
WHOLE = len(PROMPT) - 1


def reused(model, cache, ids=PROMPT) -> int:
    """Rows that a call took from the store as exact; its answer must be right."""
    return same_as_vanilla(model, ids, cache).report.exact_tokens


def is_noticed(model, cache, ids=PROMPT) -> None:
    """The model computes otherwise than in the calls before: none of their rows is used, and later its own are."""
    report = same_as_vanilla(model, ids, cache).report
    assert report.new_tokens == len(ids)
    assert reused(model, cache, ids) == len(ids) - 1


def make_table() -> IdentityTable:
    return IdentityTable(own_implementation)


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


def _one_element(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[3, 5] += 20


def _one_element_of_a_slice(model):
    model.model.layers[0].self_attn.v_proj.weight.detach()[3, 5:6].add_(20)


def _transposed(model):
    weight = model.model.layers[0].self_attn.q_proj.weight  # square: the same address, version and shape
    weight.data = weight.data.t()


def _dense_through_data(model):
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)


CHANGES = [
    _scale_key_projection,
    _load_other_weights,
    _one_step_of_sgd,
    _to_half_and_back,
    _to_double,
    _other_frequencies,
    _other_tensor_in_place_of_a_weight,
    _one_element,
    _one_element_of_a_slice,
    _transposed,
    _dense_through_data,
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


SETTINGS = {
    "scaling": ("model.layers.1.self_attn", "scaling", 0.5),
    "window": ("model.layers.1.self_attn", "sliding_window", 7),
    "epsilon": ("model.layers.0.input_layernorm", "variance_epsilon", 0.5),
    "rope scaling": ("model.rotary_emb", "attention_scaling", 1.5),
    "new attribute": ("model.layers.1.self_attn", "softcap", 3.0),
    "small list": ("model.layers.1.self_attn", "gates", [1.0, 2.0]),
    "small tensor": ("model.layers.1.self_attn", "gate", torch.ones(3)),
    "config": ("config", "rope_theta", 5e5),
    "numpy's number": ("model.layers.1.self_attn", "scaling", np.float64(0.5)),
    "function": ("model.layers.1.mlp.act_fn", "act", torch.relu),
    "another method": ("model.layers.1.self_attn", "_attend", types.MethodType(print, object())),
    "long list": ("model.layers.1.self_attn", "gates", [0.5] * 5000),
    "list of tensors": ("model.layers.1.self_attn", "gates", [torch.ones(100)]),
    "mode": ("model.layers.1", "training", True),
}


@pytest.mark.parametrize("which", SETTINGS)
def test_a_changed_setting_is_noticed_and_undone(which):
    place, name, value = SETTINGS[which]
    model, cache = make_model("mistral"), SuffixCache(fidelity="exact")
    owner = operator_get(model, place)
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    missing = object()
    before = getattr(owner, name, missing)
    setattr(owner, name, value)
    is_noticed(model, cache)
    if before is missing:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
    assert reused(model, cache) == WHOLE  # as it was, and so are its rows


def operator_get(model, path: str):
    return functools.reduce(getattr, path.split("."), model)


def test_containers_and_small_tensors_are_seen_when_they_change_in_place():
    model, table = make_model(), make_table()
    attention = model.model.layers[1].self_attn
    attention.gates, attention.gate = {"a": [1, 2]}, torch.ones(3)
    first, _ = table.get(model, 10)
    attention.gates["a"][1] = 3
    second, _ = table.get(model, 10)
    attention.gate[1] = 3.0
    third, _ = table.get(model, 10)
    attention.gate[1], attention.gates["a"][1] = 1.0, 2
    assert len({first, second, third}) == 3 and table.get(model, 10)[0] is first


class _Thing:
    """No two differ in what they hold."""


@dataclass(slots=True)
class _Fields:
    scale: float
    parts: list


def _change(holder, value):
    holder[0] = value


EDITS = {
    "numpy's number": (lambda: [np.float32(0.1)], lambda held: _change(held, np.float32(0.2))),
    "numpy's array": (lambda: np.zeros(9), lambda held: _change(held, 1.0)),
    "large array": (lambda: np.zeros(50_000), lambda held: held.fill(1.0)),
    "array of objects": (lambda: [np.array([None])], lambda held: _change(held, np.array([None]))),
    "list of 100": (lambda: [1.0] * 100, lambda held: _change(held, 2.0)),
    "list of 100,000": (lambda: [1.0] * 100_000, lambda held: _change(held, 2.0)),
    "dict of 5,000": (lambda: dict.fromkeys(range(5000), 1.0), lambda held: _change(held, 2.0)),
    "key of a dict": (lambda: {"a": 1}, lambda held: held.update(b=held.pop("a"))),
    "set": (lambda: {1, 2}, lambda held: held.add(3)),
    "deque": (lambda: collections.deque([1, 2]), lambda held: held.rotate()),
    "deep": (lambda: [[[[[[1]]]]]], lambda held: _change(held[0][0][0][0][0], 2)),
    "list in itself": (lambda: (lambda held: held.append(held) or held)([1]), lambda held: _change(held, 2)),
    "type of a number": (lambda: [1], lambda held: _change(held, 1.0)),
    "tensor": (lambda: [torch.zeros(100)], lambda held: _change(held, torch.zeros(100))),
    "tensor in place": (lambda: {"a": (torch.zeros(100),)}, lambda held: held["a"][0].add_(1)),
    "small tensor": (lambda: [torch.zeros(3)], lambda held: held[0].add_(1)),
    "module": (lambda: [torch.nn.Linear(9, 9)], lambda held: torch.nn.init.ones_(held[0].weight)),
    "function": (lambda: [torch.relu], lambda held: _change(held, torch.sigmoid)),
    "method of a builtin type": (lambda: [torch.Tensor.add], lambda held: _change(held, torch.Tensor.sub)),
    "numpy's function": (lambda: [np.exp], lambda held: _change(held, np.log)),
    "partial": (lambda: [functools.partial(print)], lambda held: _change(held, functools.partial(print))),
    "object": (lambda: [_Thing()], lambda held: _change(held, _Thing())),
    "class": (lambda: [_Thing], lambda held: _change(held, _Fields)),
    "namespace": (lambda: SimpleNamespace(a=[1]), lambda held: _change(held.a, 2)),
    "dataclass": (lambda: _Fields(1.0, [np.float64(1)]), lambda held: _change(held.parts, np.float64(2))),
    "path": (lambda: [Path("a")], lambda held: _change(held, Path("b"))),
    "type of torch": (lambda: [torch.finfo(torch.half)], lambda held: _change(held, torch.finfo(torch.bfloat16))),
}


@pytest.mark.parametrize("place", ["model.layers.1.self_attn", "config", "class"])
@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_of_what_an_attribute_holds_is_seen(kind, place, monkeypatch):
    make, edit = EDITS[kind]
    model, table = make_model(), make_table()
    owner = modeling_llama.LlamaAttention if place == "class" else operator_get(model, place)
    bare, _ = table.get(model, 10)
    held = make()
    monkeypatch.setattr(owner, "held", held, raising=False)
    first, _ = table.get(model, 10)
    assert first is not bare and table.get(model, 10) == (first, [])  # control: it is recognised
    edit(held)
    second, _ = table.get(model, 10)
    assert second is not first and table.get(model, 10) == (second, [])
    monkeypatch.undo()
    assert table.get(model, 10)[0] is bare


def test_an_attribute_that_changes_its_kind_or_name_is_seen():
    model, table = make_model(), make_table()
    attention, identities = model.model.layers[1].self_attn, []
    for value in (torch.relu, 0.5, [0.5], (0.5,), np.float64(0.5), torch.ones(100), _Thing(), None, "relu"):
        attention.held = value
        identities.append(table.get(model, 10)[0])
        assert table.get(model, 10)[0] is identities[-1]
    del attention.held
    attention.other = "relu"
    identities.append(table.get(model, 10)[0])
    assert len(set(identities)) == 10


def test_an_object_that_can_not_be_recognised_never_matches():
    model, table = make_model(), make_table()
    model.model.layers[1].self_attn.held = [_NoWeakReference(print)]
    assert len({table.get(model, 10)[0] for _ in range(3)}) == 3


def test_configs_of_many_layers_are_compared_by_content():
    """Of 66 layers: one kind of each in a list."""
    model, table = make_model("mistral"), make_table()
    model.config.layer_types = ["full_attention"] * 66
    model.config.part = copy.deepcopy(model.config)  # as the text part of a model of images
    first, _ = table.get(model, 10)
    model.config.part = copy.deepcopy(model.config.part)
    assert table.get(model, 10) == (first, [])
    for config in (model.config, model.config.part):
        config.layer_types[65] = "sliding_attention"
        assert table.get(model, 10)[0] is not first
        config.layer_types[65] = "full_attention"
        assert table.get(model, 10)[0] is first
    forget(model)


PLACES = ["", "model", "model.embed_tokens", "model.layers.1", "model.layers.1.self_attn", "model.layers.1.mlp"]
PLACES += ["model.layers.1.self_attn.v_proj", "model.layers.1.mlp.act_fn", "model.layers.0.input_layernorm"]


@pytest.mark.parametrize("place", PLACES)
def test_a_foreign_hook_on_any_module_is_noticed(place):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    module = model.get_submodule(place)
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)

    def after(module, args, output):
        return output * 1.5 if isinstance(output, torch.Tensor) else None

    def before(module, args):
        return tuple(each * 1.5 if each.is_floating_point() else each for each in args) if args else None

    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        hook = register(after if register == module.register_forward_hook else before)
        is_noticed(model, cache)
        hook.remove()
        assert reused(model, cache) == WHOLE


def test_hooks_on_all_modules_of_the_process_are_noticed():
    model, cache = make_model(), SuffixCache(fidelity="exact")
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    kinds = modeling_llama.LlamaMLP
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 1.5 if isinstance(module, kinds) else None
    )
    try:
        is_noticed(model, cache)
    finally:
        hook.remove()
    assert reused(model, cache) == WHOLE


def test_hooks_that_come_and_go_with_each_call_leave_nothing_behind():
    model, cache = make_model(), SuffixCache(fidelity="exact")
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    for number in range(20):
        factor = 1.0 + 0.1 * number
        hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output, f=factor: output * f)
        assert reused(model, cache) == 0
        hook.remove()
        assert len(cache._store.shelves) <= 2  # the hookless rows, and those of the newest hook
    assert reused(model, cache) == WHOLE
    assert len(cache._store.shelves) == 1


def _scaled(function, factor):
    def forward(*args, **kwargs):
        return function(*args, **kwargs) * factor

    return forward


REPLACED = {
    "function": lambda module, factor: _scaled(module.forward, factor),
    "partial": lambda module, factor: functools.partial(_scaled(module.forward, factor)),
    "bound method": lambda module, factor: types.MethodType(
        lambda self, hidden: _scaled(type(self).forward, factor)(self, hidden), module
    ),
}


@pytest.mark.parametrize("kind", REPLACED)
def test_a_replaced_forward_is_noticed_also_at_an_old_address(kind):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    mlp = model.model.layers[1].mlp
    for number in range(6):
        mlp.forward = REPLACED[kind](mlp, 1.1 + 0.1 * number)
        is_noticed(model, cache)
        del mlp.forward
        assert number > 0 or reused(model, cache) == 0
        assert reused(model, cache) == WHOLE
    assert len(cache._store.shelves) == 1


class _NoWeakReference:
    """A callable that can't be told from another one at its address later."""

    __slots__ = ("function",)

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def test_a_forward_that_can_not_be_recognised_never_matches():
    model, cache = make_model(), SuffixCache(fidelity="exact")
    mlp = model.model.layers[1].mlp
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    mlp.forward = _NoWeakReference(mlp.forward)
    for _ in range(10):
        assert reused(model, cache) == 0
        assert len(cache._store.shelves) <= 2
    del mlp.forward
    assert reused(model, cache) == WHOLE


def test_a_patched_class_or_function_is_noticed(monkeypatch):
    """As kernel libraries do it: for all models of a type at once, also those that exist."""
    model, cache = make_model(), SuffixCache(fidelity="exact")
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    original = modeling_llama.apply_rotary_pos_emb
    for target, name, replacement in (
        (modeling_llama.LlamaMLP, "forward", _scaled(modeling_llama.LlamaMLP.forward, 1.5)),
        (modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, **options: original(q, k, cos, -sin)),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, replacement)
            is_noticed(model, cache)
        assert reused(model, cache) == WHOLE


def _halved(method):
    return lambda self, query, *rest, **options: method(self, query * 0.5, *rest, **options)


def test_a_method_other_than_forward_is_noticed_on_the_class_and_on_an_instance(monkeypatch):
    kind = modeling_gpt_neo.GPTNeoSelfAttention
    model, cache = _gpt_neo(), SuffixCache(fidelity="exact")
    attention = model.transformer.h[1].attn.attention
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    for target, replacement in (
        (kind, _halved(kind._attn)),
        (attention, types.MethodType(_halved(kind._attn), attention)),
        (attention, functools.partial(_halved(kind._attn), attention)),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, "_attn", replacement)
            is_noticed(model, cache)
        # monkeypatch leaves the class's own method on the instance: no other one than it would find without
        assert reused(model, cache) == WHOLE


def _gpt_neo():
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        intermediate_size=96,
        attention_types=[[["global"], 2]],
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.GPTNeoForCausalLM(config).eval()


class _Base(torch.nn.Module):
    factor = 2.0

    def forward(self, hidden):
        return self.scale(hidden) * self.own + self.shift(hidden) + self.offset()

    def scale(self, hidden):
        return hidden * self.factor

    @property
    def own(self):
        return 1.0

    @staticmethod
    def shift(hidden):
        return hidden

    @classmethod
    def offset(cls):
        return 0.0


class _Derived(_Base):
    pass


PARTS = {
    "method": ("scale", lambda self, hidden: hidden),
    "property": ("own", property(lambda self: 5.0)),
    "static method": ("shift", staticmethod(lambda hidden: hidden * 2)),
    "class method": ("offset", classmethod(lambda cls: 1.0)),
    "plain value": ("factor", 3.0),
}


@pytest.mark.parametrize("owner", [_Base, _Derived], ids=["base", "derived"])
@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_a_class_is_seen(part, owner, monkeypatch):
    name, value = PARTS[part]
    model, table = torch.nn.Sequential(_Derived()), IdentityTable(lambda model: "")
    first, _ = table.get(model, 10)
    before = model(torch.ones(2))
    for _ in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value, raising=False)
            assert not torch.equal(model(torch.ones(2)), before)  # control
            assert table.get(model, 10)[0] is not first
        if owner is _Derived:  # monkeypatch writes what it found in the base class
            delattr(owner, name) if name in vars(owner) else None
        assert table.get(model, 10)[0] is first


def test_a_plain_value_of_the_source_file_is_seen(monkeypatch):
    model, table = torch.nn.Sequential(_Derived()), IdentityTable(lambda model: "")
    first, _ = table.get(model, 10)
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[__name__], "WHOLE", 7)
        assert table.get(model, 10)[0] is not first
    assert table.get(model, 10)[0] is first


def _checkpointing(model, what):
    newer = getattr(model, f"activation_checkpointing_{what}", None)
    (newer or getattr(model, f"gradient_checkpointing_{what}"))()


STOCK_CALLS = {
    "hidden states": lambda model: model(IDS, output_hidden_states=True),
    "attentions": lambda model: model(IDS, output_attentions=True),
    "static cache": lambda model: ask(model, PROMPT, cache_implementation="static", disable_compile=True),
    "beams": lambda model: model.generate(IDS, num_beams=2, max_new_tokens=2),
    "scores": lambda model: model.generate(
        IDS, max_new_tokens=2, return_dict_in_generate=True, output_scores=True, output_hidden_states=True
    ),
    "compile config": lambda model: model.generate(
        IDS, max_new_tokens=2, cache_implementation="static", compile_config=CompileConfig(backend="eager")
    ),
    "another generation config": lambda model: setattr(
        model, "generation_config", copy.deepcopy(model.generation_config)
    ),
    "checkpointing": lambda model: _checkpointing(model, "enable"),
    "no checkpointing": lambda model: _checkpointing(model, "disable"),
    "gradients of inputs": lambda model: model.enable_input_require_grads(),
    "no gradients of inputs": lambda model: model.disable_input_require_grads(),
    "no cache": lambda model: setattr(model.config, "use_cache", False),
    "always hidden states": lambda model: setattr(model.config, "output_hidden_states", True),
    "another attention and back": lambda model: [model.set_attn_implementation(name) for name in ("eager", "sdpa")],
    "training and back": lambda model: model.train().eval(),
    "a backward pass": lambda model: model(IDS, labels=IDS).loss.backward(),
    "a copy": copy.deepcopy,
}


@pytest.mark.parametrize(
    ("kind", "which"),
    [
        (kind, which)
        for kind in ("llama", "gpt2", "gpt_oss")
        for which in STOCK_CALLS
        if (kind, which) != ("gpt_oss", "another attention and back")  # it has no sdpa
    ],
)
def test_what_stock_calls_leave_on_a_model_changes_nothing(kind, which):
    model, cache, table = make_model(kind), SuffixCache(fidelity="exact"), make_table()
    first, _ = table.get(model, 1000)
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    STOCK_CALLS[which](model)
    assert table.get(model, 1000) == (first, [])
    model.config.use_cache, model.config.output_hidden_states = True, False
    assert reused(model, cache) == WHOLE
    forget(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_model_shares_no_row_with_what_it_was(dtype):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    model.to(dtype)
    for expected in (0, WHOLE):
        answer = ask(model, PROMPT, cache)
        assert answer.report.exact_tokens == expected
        want = ask(model, PROMPT)
        assert (answer.first - want.first).abs().max() < {8: 1e-4}.get(dtype.itemsize, 0.3)
    model.to(torch.float32)
    is_noticed(model, cache)


def test_a_resized_vocabulary_is_noticed():
    model, cache = make_model(), SuffixCache(fidelity="exact")
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    model.resize_token_embeddings(300)
    is_noticed(model, cache)
    model.baseline = fingerprint(model)


def test_another_attention_implementation_has_rows_of_its_own():
    model, cache = make_model(), SuffixCache(fidelity="exact")
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    model.set_attn_implementation("eager")
    is_noticed(model, cache)
    model.set_attn_implementation("sdpa")
    assert reused(model, cache) == WHOLE


def test_models_made_one_after_the_other_share_nothing():
    cache = SuffixCache(fidelity="exact")
    for seed in range(4):
        model = make_model(seed=seed)
        is_noticed(model, cache)
        assert len(cache._store.shelves) == 1  # what the one before left is gone
        forget(model)
        del model
        gc.collect()


def test_a_model_at_the_address_of_a_dead_one_is_another():
    table, addresses, identities = IdentityTable(lambda model: ""), set(), []
    for number in range(50):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
        torch.nn.init.constant_(model[0].weight, number % 2)
        addresses.add(id(model))
        identity, gone = table.get(model, 10)
        assert identity not in identities and gone == []
        identities.append(identity)
        del model
    assert len(addresses) < 50  # control
    assert all(map(table.lost, identities))


def test_a_compiled_model_keeps_its_identity():
    model, table = make_model(), make_table()
    first, _ = table.get(model, 1000)
    model.compile(backend="eager")
    assert [table.get(model, 1000) for _ in range(3)] == [(first, [])] * 3
    model.forward = torch.compile(model.forward, backend="eager")
    compiled, _ = table.get(model, 1000)
    assert compiled is not first and table.get(model, 1000) == (compiled, [])
    forget(model)


def test_autocast_is_refused():
    model, cache = make_model(), SuffixCache(fidelity="exact")
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = same_as_vanilla(model, PROMPT, cache)
        assert "autocast" in answer.report.reason and answer.report.exact_tokens == 0
    assert reused(model, cache) == WHOLE


# -- what torch counts no version for -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [48, 250])
def test_a_dense_write_through_data_is_noticed(tokens):
    ids = old_text(tokens, 5)
    model, cache = make_model(), SuffixCache(fidelity="exact")
    assert (reused(model, cache, ids), reused(model, cache, ids)) == (0, tokens - 1)
    weight = model.model.layers[1].self_attn.v_proj.weight
    version = weight._version
    weight.data.add_(torch.randn_like(weight) * 0.3)
    assert weight._version == version  # control: torch does not know
    is_noticed(model, cache, ids)


def test_weights_on_another_device_are_sampled_for_long_prompts_and_after_changes(monkeypatch):
    """No other device is at hand: the means for them are used on the CPU's tensors."""
    monkeypatch.setattr(sample, "_is_plain_memory", lambda tensor: False)
    model, table = make_model(), make_table()
    attention = model.model.layers[1].self_attn
    first, _ = table.get(model, 100)
    attention.v_proj.weight.data.mul_(1.5)
    assert table.get(model, 200) == (first, [])  # documented: not looked at for a short prompt
    second, gone = table.get(model, 201)
    assert second is not first and gone == [first]
    attention.v_proj.weight.data.mul_(1.5)
    attention.scaling *= 2
    third, gone = table.get(model, 10)
    assert third.digest != second.digest and gone == []
    attention.scaling /= 2
    fourth, gone = table.get(model, 10)  # seemingly back at the second state
    assert fourth is not second and second in gone


def test_a_tensor_at_an_old_address_is_another_also_where_it_is_not_sampled(monkeypatch):
    monkeypatch.setattr(sample, "_is_plain_memory", lambda tensor: False)
    table, model = IdentityTable(lambda model: ""), torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    memory, identities, places = torch.ones(4, 4), [], set()
    for _ in range(5):
        model[0].weight = torch.nn.Parameter(memory.data)
        places.add((model[0].weight.data_ptr(), model[0].weight._version, model[0].weight.stride()))
        identities.append(table.get(model, 10)[0])
        assert table.get(model, 10)[0] is identities[-1]
    assert len(places) == 1 and len(set(identities)) == 5


def test_a_sparse_write_through_data_is_not_seen_and_clear_heals_it():
    """Documented first: nothing short of reading all weights could see it."""
    model, cache = make_model(), SuffixCache(fidelity="exact")
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    model.model.layers[0].self_attn.v_proj.weight.data.view(-1)[1] += 100
    stale = ask(model, PROMPT, cache)
    assert stale.report.exact_tokens == WHOLE
    assert (stale.first - ask(model, PROMPT).first).abs().max() > 1e-2  # control: it would have mattered
    cache.clear()
    is_noticed(model, cache)


TENSORS = {
    "float32": lambda: torch.randn(40, 30),
    "bfloat16": lambda: torch.randn(40, 30).bfloat16(),
    "float16": lambda: torch.randn(40, 30).half(),
    "float64": lambda: torch.randn(9).double(),
    "float8": lambda: torch.randn(40, 30).to(torch.float8_e4m3fn),
    "int8": lambda: torch.randint(-9, 9, (40, 30), dtype=torch.int8),
    "bool": lambda: torch.rand(40, 30) > 0.5,
    "complex": lambda: torch.randn(40, 30, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(40, 30, dtype=torch.complex64).conj(),
    "scalar": lambda: torch.tensor(3.0),
    "transposed": lambda: torch.randn(40, 30).t(),
    "expanded": lambda: torch.randn(40, 1).expand(40, 30),
    "slice": lambda: torch.randn(80, 60)[3:43, 5:35],
    "quantised": lambda: torch.quantize_per_tensor(torch.randn(40, 30), 0.1, 0, torch.qint8),
    "parameter": lambda: torch.nn.Parameter(torch.randn(40, 30)),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", TENSORS)
def test_the_sample_reads_every_kind_of_tensor_and_depends_on_values_only(kind, monkeypatch):
    torch.manual_seed(1)
    first = TENSORS[kind]()
    torch.manual_seed(2)
    other = TENSORS[kind]() if kind != "scalar" else torch.tensor(4.0)
    tensors = [torch.ones(3), first, torch.ones(3)]
    digest = Sample(tensors).digest(tensors)
    assert digest == Sample(tensors).digest(tensors)
    copies = [torch.ones(3), first.detach().clone().contiguous(), torch.ones(3)]
    if kind != "conjugate":  # clone keeps it lazy
        assert Sample(copies).digest(copies) == digest
    others = [torch.ones(3), other, torch.ones(3)]
    assert Sample(others).digest(others) != digest
    monkeypatch.setattr(sample, "_is_plain_memory", lambda tensor: False)
    assert Sample(tensors).digest(tensors) == digest  # by torch's means as by the gather over memory


def test_sampled_elements_lie_in_many_rows_and_columns():
    """Else a write to most of a matrix could be missed."""
    weight = torch.zeros(128, 128)
    before = Sample([weight]).digest([weight])
    for view in (weight, weight.t()):
        seen = 0
        for row in view:
            row.fill_(1)
            seen += Sample([weight]).digest([weight]) != before
            row.fill_(0)
        assert seen >= 12


def test_the_sample_takes_tensors_without_elements_to_read():
    for tensor in (torch.empty(4, 4, device="meta"), torch.empty(0), torch.eye(3).to_sparse()):
        assert Sample([tensor, torch.ones(2)]).digest([tensor, torch.ones(2)])
    with torch.inference_mode():
        made = torch.randn(30, 30)
    assert Sample([made]).digest([made]) == Sample([made.clone()]).digest([made.clone()])


def test_a_model_made_in_inference_mode_has_an_identity():
    with torch.inference_mode():
        model = make_model()
    table, cache = make_table(), SuffixCache(fidelity="exact")
    first, _ = table.get(model, 1000)
    assert table.get(model, 1000) == (first, [])
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    weight = model.model.layers[0].self_attn.k_proj.weight
    with torch.inference_mode():
        weight.mul_(1.5)
    is_noticed(model, cache)
    with torch.inference_mode():
        weight[3, 7] += 5.0
    stale = ask(model, PROMPT, cache)  # documented: no counter, and no sampled element
    assert stale.report.exact_tokens == WHOLE and (stale.first - ask(model, PROMPT).first).abs().max() > 1e-2
    cache.clear()
    is_noticed(model, cache)


def test_the_digest_is_the_same_in_another_process():
    script = (
        "import sys; sys.path[:0] = ['tests', '.']; import torch; torch.set_num_threads(1)\n"
        "from tiny_models import make_model; from hf_suffix_cache.identity import IdentityTable\n"
        "print(*[IdentityTable(lambda model: '').get(make_model(seed=s), 9)[0].digest for s in (0, 1)])"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = [make_table().get(make_model(seed=seed), 9)[0].digest for seed in (0, 1)]
    assert done.stdout.split() == here and here[0] != here[1]


# -- the table ------------------------------------------------------------------------------------------------------


def test_states_are_found_again_and_the_oldest_are_given_up():
    model, table = make_model(), make_table()
    attention = model.model.layers[1].self_attn
    identities = []
    for number in range(8):
        attention.scaling = 1.0 + number
        identity, gone = table.get(model, 10)
        identities.append(identity)
        assert gone == []
    attention.scaling = 1.0
    assert table.get(model, 10) == (identities[0], [])
    attention.scaling = 99.0
    assert table.get(model, 10)[1] == [identities[1]]  # the longest unused
    attention.scaling = 2.0
    again, gone = table.get(model, 10)
    assert again is not identities[1] and gone == [identities[2]]
    attention.scaling = 0.25


def test_a_changed_weight_ends_every_state_that_it_acts_in():
    model, table = make_model(), make_table()
    attention = model.model.layers[1].self_attn
    first, _ = table.get(model, 10)
    attention.scaling *= 2
    second, _ = table.get(model, 10)
    with torch.no_grad():
        attention.k_proj.weight.mul_(2)
    third, gone = table.get(model, 10)
    assert gone == [first, second]
    attention.scaling /= 2
    assert table.get(model, 10)[0] not in (first, second, third)


def test_equal_states_of_models_of_one_config_have_equal_settings():
    table = make_table()
    first, second = (table.get(make_model(seed=seed), 10)[0] for seed in (0, 1))
    assert first.settings == second.settings and first.digest != second.digest
    assert table.get(make_model("mistral"), 10)[0].settings != first.settings


def test_modules_added_or_replaced_make_another_identity():
    model, table = make_model(), make_table()
    first, _ = table.get(model, 10)
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    second, gone = table.get(model, 10)
    assert second is not first and gone == []
    layers[0], layers[1] = layers[1], layers[0]
    assert table.get(model, 10) == (first, [])
    model.model.norm = torch.nn.Identity()
    assert set(table.get(model, 10)[1]) == {first, second}
    forget(model)


def test_nothing_is_kept_alive():
    """With hooks and forwards that refer to the model, as accelerate's do."""
    model, table = make_model(), make_table()
    layer = model.model.layers[0]

    class Hook:
        def __call__(self, module, args, output):
            return None

    def new_forward(module, *args, **kwargs):
        return type(module).forward(module, *args, **kwargs)

    hook = Hook()
    layer.register_forward_hook(hook)
    for module in (model, layer.mlp):
        module.forward = functools.partial(new_forward, module)
    layer.owner = [1, 2]
    table.get(model, 1000)
    table.get(model, 1000)
    watched = [weakref.ref(each) for each in (model, layer, layer.mlp.up_proj.weight, hook, model.forward)]
    watched.append(weakref.ref(layer.mlp.up_proj.weight.untyped_storage()))
    identity, _ = table.get(model, 10)
    replaced = weakref.ref(layer.mlp.down_proj.weight)
    layer.mlp.down_proj.weight = torch.nn.Parameter(torch.ones(64, 96))
    assert replaced() is None  # a replaced weight is free at once
    assert not table.lost(identity)
    forget(model)
    del model, layer, hook, module
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)
    assert table.lost(identity)


def test_a_serial_is_never_given_twice():
    serials, numbers = Serials(), set()
    for _ in range(200):
        function = functools.partial(print)  # at the address of the one before, as a rule
        number = serials.of(function)
        assert number == serials.of(function) and serials.alive([number])
        assert number not in numbers
        numbers.add(number)
        del function
        assert not serials.alive([number])
    slotted = _NoWeakReference(print)
    assert serials.of(slotted) != serials.of(slotted)


# -- state that lies elsewhere --------------------------------------------------------------------------------------


def test_offloaded_weights_are_those_in_the_map():
    model, table = make_model(), make_table()
    bare, _ = table.get(model, 1000)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert model.model.layers[0].self_attn.k_proj.weight.is_meta  # control
    first, _ = table.get(model, 1000)
    assert first is not bare and first.digest == bare.digest
    with torch.no_grad():
        model(IDS)
    assert table.get(model, 1000) == (first, [])
    kept = model.lm_head._hf_hook.hooks if hasattr(model.lm_head._hf_hook, "hooks") else [model.lm_head._hf_hook]
    weights = next(hook.weights_map for hook in kept if getattr(hook, "weights_map", None) is not None).dataset
    name = "model.layers.0.self_attn.k_proj.weight"
    weights = getattr(weights, "state_dict", weights)
    with torch.no_grad():
        weights[name].mul_(1.5)
    second, gone = table.get(model, 10)
    assert second is not first and first in gone
    weights[name] = weights[name].clone()
    assert table.get(model, 10)[0] is not second
    forget(model)


def test_rows_of_an_offloaded_model_are_reused_until_a_weight_changes():
    model, cache = make_model(), SuffixCache(fidelity="exact")
    accelerate.cpu_offload(model, execution_device="cpu")
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    weights = model.lm_head._hf_hook.weights_map.dataset
    weights = getattr(weights, "state_dict", weights)
    with torch.no_grad():
        weights["model.layers.0.self_attn.k_proj.weight"].mul_(1.5)
    is_noticed(model, cache)
    forget(model)


def test_weights_offloaded_to_disk_are_known_by_their_files(tmp_path):
    model, table = make_model(), make_table()
    accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    first, _ = table.get(model, 1000)
    with torch.no_grad():
        model(IDS)
    assert table.get(model, 1000) == (first, [])
    file = tmp_path / "model.layers.0.self_attn.k_proj.weight.dat"
    file.write_bytes(bytes(len(file.read_bytes())))
    assert table.get(model, 10)[0] is not first
    forget(model)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_packed_weights_are_known_by_their_object():
    model, table = make_model(), make_table()
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    first, _ = table.get(quantised, 1000)
    assert table.get(quantised, 1000) == (first, [])
    layer = quantised.model.layers[0].self_attn.k_proj
    weight, bias = layer._weight_bias()
    layer.set_weight_bias(weight, bias)
    second, gone = table.get(quantised, 1000)
    assert second is not first and gone == [first]


LONGROPE = dict(
    rope_type="longrope",
    short_factor=[1.0] * 8,
    long_factor=[4.0] * 8,
    factor=4.0,
    original_max_position_embeddings=64,
    rope_theta=10000.0,
)
DYNAMIC = dict(rope_type="dynamic", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0)


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=lambda rope: rope["rope_type"])
def test_state_of_length_dependent_rope_is_left_to_its_regime(rope):
    model = make_model(rope_parameters=rope, max_position_embeddings=64 if rope is DYNAMIC else 256)
    table, rotary = make_table(), model.model.rotary_emb
    first, _ = table.get(model, 1000)
    before = rotary.inv_freq.clone()
    with torch.no_grad():
        model(torch.tensor([old_text(100, 1)]))
    assert not torch.equal(rotary.inv_freq, before)  # control: the forward changed it
    assert table.get(model, 1000) == (first, [])
    with torch.no_grad():
        model(torch.tensor([old_text(20, 1)]))
    assert table.get(model, 1000) == (first, [])
    rotary.original_inv_freq = rotary.original_inv_freq * 0.7
    assert table.get(model, 1000)[0] is not first
    plain = make_model()
    kept, _ = table.get(plain, 1000)
    plain.model.rotary_emb.inv_freq.data.mul_(0.7)  # of any other rope it counts
    assert table.get(plain, 1000)[0] is not kept


def test_nothing_is_refused_without_a_reason():
    assert refusal(make_model()) is None


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


def test_transformers_own_notes_on_a_model_change_nothing():
    """A static cache in between leaves `_previous_max_cache_length` on the model."""
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    before = set(vars(model))
    ask(model, PROMPT, cache_implementation="static", disable_compile=True)
    model.baseline = fingerprint(model)
    assert set(vars(model)) - before  # control: it does leave something
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1
