"""Adapters (peft): the content, choice and scale of what acts decides which rows meet, never a name."""

import peft
import pytest
import torch

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.attention import own_implementation
from hf_suffix_cache.identity import IdentityTable, sample
from reference import ask, check_pool, max_difference, same_answer, same_as_vanilla
from tiny_models import fingerprint, forget, make_model, new_text, old_text

# peft 0.21 asks transformers 5.24 for an attribute under its old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

PROMPT = old_text(48, 1)
WHOLE = len(PROMPT) - 1
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def lora(**changes) -> peft.LoraConfig:
    """Adapters that matter from the start, on attention."""
    return peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, "init_lora_weights": False, **changes})


def adapted(*names: str, config=None):
    """A tiny model in peft's wrapper with random adapters of these names, the first of them active."""
    model = make_model()
    wrapped = peft.get_peft_model(model, config or lora(), names[0])
    for name in names[1:]:
        wrapped.add_adapter(name, config or lora())
    wrapped.eval()
    randomise(wrapped)
    model.baseline = fingerprint(model)
    return wrapped


def randomise(wrapped, seed: int = 0) -> None:
    """Give all adapters random weights: some kinds begin as nothing at all."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in wrapped.named_parameters():
            if tensor.requires_grad or ".lora_" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + (0.5 if "ia3" in name else 0.0))


def layer_of(wrapped):
    """One adapter layer."""
    return wrapped.get_base_model().model.layers[1].self_attn.k_proj


def reused(wrapped, cache, ids=PROMPT) -> int:
    """Rows that a call took from the store as exact; its answer must be right."""
    report = same_as_vanilla(wrapped, ids, cache).report
    assert report.carried_tokens == report.shifted_tokens == 0
    return report.exact_tokens


def differs(first, second) -> bool:
    return max_difference(first.scores[:1], second.scores[:1]) > 1e-2


def test_switched_adapters_keep_their_rows_apart_and_find_them_again():
    wrapped = adapted("A", "B")
    cache = SuffixCache(fidelity="exact")
    answers = {}
    for name in ("A", "B"):
        wrapped.set_adapter(name)
        answers[name] = ask(wrapped, PROMPT)
        assert reused(wrapped, cache) == 0
        assert reused(wrapped, cache) == WHOLE  # control
    with wrapped.disable_adapter():
        answers["base"] = ask(wrapped, PROMPT)
        assert reused(wrapped, cache) == 0
    assert differs(answers["A"], answers["B"]) and differs(answers["A"], answers["base"])  # control
    for name in ("A", "B", "A"):
        wrapped.set_adapter(name)
        assert reused(wrapped, cache) == WHOLE
        with wrapped.disable_adapter():
            assert reused(wrapped, cache) == WHOLE
    check_pool(cache)


def test_default_fidelity_moves_no_row_between_adapters():
    wrapped = adapted("A", "B")
    cache = SuffixCache()
    moved = new_text(11, 1) + PROMPT + new_text(36, 2)
    ask(wrapped, PROMPT, cache)
    assert ask(wrapped, moved, cache).report.shifted_tokens > 0  # control
    wrapped.set_adapter("B")
    report = ask(wrapped, moved, cache).report
    assert report.new_tokens == report.prompt_tokens


def test_rows_of_the_bare_model_serve_the_wrapped_one_with_its_adapters_off():
    model = make_model()
    cache = SuffixCache(fidelity="exact")
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    wrapped = peft.get_peft_model(model, lora(), "A").eval()
    model.baseline = fingerprint(model)
    assert reused(wrapped, cache) == 0
    with wrapped.disable_adapter():
        assert reused(wrapped, cache) == WHOLE


def test_another_adapter_loaded_beside_keeps_the_rows():
    wrapped = adapted("A")
    cache = SuffixCache(fidelity="exact")
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    wrapped.add_adapter("B", lora())
    wrapped.eval()
    wrapped.set_adapter("A")
    assert reused(wrapped, cache) == WHOLE
    with torch.no_grad():  # what is not active may change as it likes
        layer_of(wrapped).lora_A["B"].weight.mul_(3)
    layer_of(wrapped).set_scale("B", 7)
    wrapped.delete_adapter("B")
    assert reused(wrapped, cache) == WHOLE


def test_other_weights_under_a_deleted_adapters_name_are_noticed():
    wrapped = adapted("A", "B")
    cache = SuffixCache(fidelity="exact")
    for _ in range(4):
        assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
        wrapped.delete_adapter("A")
        wrapped.add_adapter("A", lora())
        wrapped.set_adapter("A")
        wrapped.eval()
    check_pool(cache)


def test_adapter_weights_loaded_over_the_old_ones_are_noticed():
    wrapped = adapted("A")
    cache = SuffixCache(fidelity="exact")
    other = {name: tensor + 0.3 for name, tensor in peft.get_peft_model_state_dict(wrapped, adapter_name="A").items()}
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    peft.set_peft_model_state_dict(wrapped, other, adapter_name="A")
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)


def test_merged_and_unmerged_adapters():
    wrapped = adapted("A", "B")
    cache = SuffixCache(fidelity="exact")
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    wrapped.merge_adapter()
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    wrapped.unmerge_adapter()
    reused(wrapped, cache)  # right, with the old rows or without: rounding may have changed a weight
    assert reused(wrapped, cache) == WHOLE
    wrapped.merge_adapter(["B"])
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    wrapped.unmerge_adapter()
    with torch.no_grad():
        layer_of(wrapped).lora_B["B"].weight.mul_(3)
    wrapped.merge_adapter(["B"])  # merged as before, but other weights
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)


def test_what_was_merged_is_known_also_where_weights_are_not_sampled(monkeypatch):
    """On another device: a merge counts no version, and a short prompt is worth no look at the weights."""
    monkeypatch.setattr(sample, "_is_plain_memory", lambda tensor: False)
    wrapped = adapted("A", "B")
    model, table, seen = wrapped.get_base_model(), IdentityTable(own_implementation), []

    def is_new() -> bool:
        seen.append(table.get(model, 10)[0])
        assert table.get(model, 10)[0] is seen[-1]  # control
        return seen[-1] not in seen[:-1]

    monkeypatch.setattr(sample.Sample, "digest", lambda self, tensors: "")  # as if no sampled element changed
    assert is_new()
    for change in (1.0, 3.0):
        with torch.no_grad():
            layer_of(wrapped).lora_B["B"].weight.mul_(change)
        wrapped.merge_adapter(["B"])
        assert is_new()
        wrapped.unmerge_adapter()


def test_merged_adapters_that_are_disabled():
    """Peft unmerges such a layer in its next forward."""
    wrapped = adapted("A")
    cache = SuffixCache(fidelity="exact")
    with wrapped.disable_adapter():
        assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    for _ in range(2):
        wrapped.merge_adapter()
        with wrapped.disable_adapter():
            reused(wrapped, cache)
            assert layer_of(wrapped).merged_adapters == []  # control: that is what peft does
            reused(wrapped, cache)
            assert reused(wrapped, cache) == WHOLE
        reused(wrapped, cache)


@pytest.mark.parametrize("tokens", [48, 250])
def test_merge_and_unload_between_two_calls_of_the_bare_model(tokens):
    """Modules and tensors are the very ones of before, and peft merges through `.data`, which counts no version."""
    ids = old_text(tokens, 3)
    model = make_model()
    cache = SuffixCache(fidelity="exact")
    assert (reused(model, cache, ids), reused(model, cache, ids)) == (0, tokens - 1)
    before = ask(model, ids)
    weight = model.model.layers[0].self_attn.k_proj.weight
    version = weight._version
    wrapped = peft.get_peft_model(model, lora(), "A").eval()
    randomise(wrapped)
    assert wrapped.merge_and_unload() is model
    assert model.model.layers[0].self_attn.k_proj.weight is weight and weight._version == version  # control
    model.baseline = fingerprint(model)
    assert differs(before, ask(model, ids))
    assert (reused(model, cache, ids), reused(model, cache, ids)) == (0, tokens - 1)


def test_scales_of_active_adapters():
    wrapped = adapted("A")
    cache = SuffixCache(fidelity="exact")
    layer = layer_of(wrapped)
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    layer.set_scale("A", 0.25)
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    layer.set_scale("A", 1.0)
    assert reused(wrapped, cache) == WHOLE  # as it was
    layer.scale_layer(3.0)
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    with peft.helpers.rescale_adapter_scale(wrapped, 0.5):
        assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)


def test_weighted_sums_and_sets_of_adapters():
    wrapped = adapted("A", "B")
    cache = SuffixCache(fidelity="exact")
    wrapped.add_weighted_adapter(["A", "B"], [0.5, 0.7], "C", combination_type="linear")
    wrapped.get_base_model().baseline = fingerprint(wrapped.get_base_model())
    for name in ("A", "C"):
        wrapped.set_adapter(name)
        assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    wrapped.base_model.set_adapter(["A", "B"])
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    wrapped.set_adapter("A")
    assert reused(wrapped, cache) == WHOLE


def test_adapters_chosen_by_row_share_nothing_and_store_nothing():
    wrapped = adapted("A", "B")
    cache = SuffixCache(fidelity="exact")
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    held = cache.stats.segments, cache.stats.bytes_used
    batch = [PROMPT, PROMPT, PROMPT]
    for _ in range(12):
        answer = same_as_vanilla(wrapped, batch, cache, steps=3, adapter_names=["A", "B", "__base__"])
        assert answer.report.exact_tokens == 0 and "by row" in answer.report.reason
    assert differs_by_row(answer)
    assert (cache.stats.segments, cache.stats.bytes_used) == held
    assert reused(wrapped, cache) == WHOLE  # and the single adapter's rows are still there
    check_pool(cache)


def differs_by_row(answer) -> bool:
    """Control: the rows of a batch of one prompt got different answers."""
    first, second, third = answer.first
    return min((first - second).abs().max(), (second - third).abs().max()) > 1e-2


KINDS = {
    "lora": lora(),
    "rslora": lora(use_rslora=True),
    "dora": lora(use_dora=True),
    "lora_bias": lora(lora_bias=True),
    "embedding": lora(target_modules=["embed_tokens", "v_proj"]),
    "modules_to_save": lora(modules_to_save=["lm_head"]),
    "trainable_tokens": lora(trainable_token_indices=PROMPT[:8]),
    "ia3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": peft.LoHaConfig(target_modules=TARGETS, r=4),
    "vera": peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=4),
    "oft": peft.OFTConfig(target_modules=TARGETS, oft_block_size=4, r=0),
    "layer_norm": peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter(kind):
    model = make_model()
    cache = SuffixCache(fidelity="exact")
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    wrapped = peft.get_peft_model(model, KINDS[kind], "A").eval()
    model.baseline = fingerprint(model)
    randomise(wrapped)
    if kind != "modules_to_save":  # a head makes no difference to rows, but counts all the same
        with wrapped.disable_adapter():
            base = ask(wrapped, PROMPT)
        assert differs(base, ask(wrapped, PROMPT))
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    trained = [tensor for tensor in wrapped.parameters() if tensor.requires_grad]
    assert trained
    for tensor in trained[:: max(1, len(trained) // 8)]:
        with torch.no_grad():
            tensor.add_(0.125)
        assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    with wrapped.disable_adapter():
        reused(wrapped, cache)
        assert reused(wrapped, cache) == WHOLE
    assert reused(wrapped, cache) == WHOLE


def test_adapters_injected_without_a_wrapper():
    """What transformers' own `load_adapter` does with peft's layers."""
    model = make_model()
    cache = SuffixCache(fidelity="exact")
    for name in ("A", "B"):
        peft.inject_adapter_in_model(lora(), model, name)
    model.eval()
    model.baseline = fingerprint(model)
    layers = [module for module in model.modules() if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)]

    def each(act):
        for layer in layers:
            act(layer)

    for name in ("A", "B"):
        each(lambda layer, name=name: layer.set_adapter(name))
        assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    each(lambda layer: layer.enable_adapters(False))
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    each(lambda layer: layer.enable_adapters(True))
    assert reused(model, cache) == WHOLE
    layers[4].set_adapter("A")  # one layer alone
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)


PROMPT_LEARNING = {
    "prompt_tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "prefix_tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "p_tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16),
}


# peft 0.21 passes a forward of transformers 5.24 its cache under two names; what comes of that is the same both ways
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache`:FutureWarning")
@pytest.mark.parametrize("kind", PROMPT_LEARNING)
def test_prompt_learning_is_refused(kind):
    model = make_model()
    cache = SuffixCache(fidelity="exact")
    assert (reused(model, cache), reused(model, cache)) == (0, WHOLE)
    wrapped = peft.get_peft_model(model, PROMPT_LEARNING[kind]).eval()
    for _ in range(2):
        got = ask(wrapped, PROMPT, cache)
        same_answer(got, ask(wrapped, PROMPT))
        assert got.report.exact_tokens == 0 and "prompt learning" in got.report.reason
    assert reused(model, cache) == WHOLE  # the model beneath it is not refused
    forget(model)  # peft leaves a method on the model


def test_dropout_of_an_adapter_left_in_training_mode_is_refused():
    model = make_model()
    wrapped = peft.get_peft_model(model, lora(lora_dropout=0.5), "A")
    model.baseline = fingerprint(model)
    cache = SuffixCache(fidelity="exact")
    for _ in range(2):
        got = ask(wrapped, PROMPT, cache, seed=3)
        same_answer(got, ask(wrapped, PROMPT, seed=3))
        assert "dropout" in got.report.reason
    wrapped.eval()
    assert (reused(wrapped, cache), reused(wrapped, cache)) == (0, WHOLE)
    model.baseline = fingerprint(model)
