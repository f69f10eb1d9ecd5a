"""What is measured of a model at first use."""

import re

import pytest
import torch

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.capabilities import CapabilityTable
from hf_suffix_cache.capability import cache_argument
from hf_suffix_cache.measurement import measure
from reference import ask, same_as_vanilla
from tiny_models import LENGTH_DEPENDENT, PREFIX, SUPPORTED, UNSUPPORTED, fingerprint, make_model, new_text, old_text

# what turns in each kind, and by which buffer
LAYOUTS = {
    "llama": "K half by inv_freq x3",
    "gemma3_text": "K half by sliding_attention_inv_freq x2, K half by full_attention_inv_freq x1",
    "olmo3": "K half by sliding_attention_inv_freq x2, K half by full_attention_inv_freq x1",
    "gpt_neox": "K half first 4 of 16 by inv_freq x3",
    "phi": "K half first 8 of 16 by inv_freq x3",
    "cohere": "K interleaved by inv_freq x3",
    "cohere2": "K interleaved by inv_freq x2, none x1",
    "glm": "K interleaved first 8 of 16 by inv_freq x3",
    "gptj": "K interleaved first 8 of 16 by embed_positions x3",
    "nanochat": "K -half by inv_freq x3",
    "smollm3": "K half by inv_freq x2, none x1",
    "bloom": "none x3",
}


@pytest.mark.parametrize("kind", SUPPORTED)
def test_models_whose_rows_can_be_moved(kind):
    model = make_model(kind)
    capability = measure(model)
    assert capability.kind == "shift" and capability.reason is None
    assert len(capability.layers) == len(capability.windows) == model.config.num_hidden_layers
    assert 0 < capability.rows < 120 and capability.seconds > 0
    if kind != "gptj":  # its attention goes through transformers' interface since 5.23
        assert capability.reads_attention == (kind != "bloom")
    assert capability.length_dependent == (kind in LENGTH_DEPENDENT)
    assert all(shape.dtype == torch.float32 for shape in capability.shapes)
    assert str(capability.rows) in str(capability)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_layout_is_found(kind):
    assert measure(make_model(kind)).layout == LAYOUTS[kind]


def test_latent_attention_turns_its_rotated_slot_only():
    capability = measure(make_model("deepseek_v3"))
    slots = {(shape.rotary is not None, shape.value_rotary is not None) for shape in capability.shapes}
    # the value slot since transformers 5.15, which keeps the latents; whole keys before
    assert slots == {(False, True)} and capability.layout == "V half by inv_freq x3"


@pytest.mark.parametrize("kind", PREFIX)
def test_absolute_positions_allow_reuse_at_the_front(kind):
    capability = measure(make_model(kind))
    assert capability.kind == "prefix" and "depend on the position" in capability.reason
    assert len(capability.shapes) == 3 and all(shape.rotary is None for shape in capability.shapes)


@pytest.mark.parametrize(
    "kind, word",
    [
        ("mamba", "LinearAttentionLayer|takes no cache"),
        ("qwen3_next", "LinearAttentionLayer"),
        ("bert_encoder", "not causal"),
    ],
)
def test_other_models_are_refused_with_the_right_reason(kind, word):
    capability = measure(make_model(kind))
    assert capability.kind == "none" and re.search(word, capability.reason)
    assert capability.shapes == ()
    assert set(UNSUPPORTED) == {"mamba", "qwen3_next", "bert_encoder"}


def test_encoder_decoder_models_are_refused():
    assert "encoder-decoder" in measure(make_model("t5")).reason


def _turn_twice_as_fast(model):
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def faster(*args, **kwargs):
        kwargs["position_ids"] = kwargs["position_ids"] * 2
        return forward(*args, **kwargs)

    rotary.forward = faster
    return lambda: delattr(rotary, "forward")


def _mix_neighbours(model):
    """Every row takes from the rows to its right."""
    layer = model.model.layers[0]
    hook = layer.register_forward_hook(lambda module, args, output: output + output.mean(dim=1, keepdim=True))
    return hook.remove


def _shift_values(model):
    """Values depend on the position, and by no rotation."""
    attention = model.model.layers[1].self_attn
    names = ("position_embeddings",)

    def before(module, args, kwargs):
        cos = kwargs[names[0]][0]
        kwargs["hidden_states"] = kwargs["hidden_states"] * (1 + 0.3 * cos[..., :1])
        return args, kwargs

    return attention.register_forward_pre_hook(before, with_kwargs=True).remove


@pytest.mark.parametrize(
    "change, kind", [(_turn_twice_as_fast, "prefix"), (_mix_neighbours, "none"), (_shift_values, "prefix")]
)
def test_a_model_that_does_something_else_is_noticed(change, kind):
    """Control: the same model is measured as shiftable before and after."""
    model = make_model("llama")
    assert measure(model).kind == "shift"
    undo = change(model)
    try:
        capability = measure(model)
        assert capability.kind == kind, capability
        cache = SuffixCache()
        text = old_text(40, 1)
        ask(model, text + new_text(40, 2), cache)
        assert ask(model, new_text(7, 3) + text + new_text(40, 4), cache).report.shifted_tokens == 0
    finally:
        undo()
    assert measure(model).kind == "shift"


def test_a_rotation_that_changes_later_is_measured_again():
    """The same cache notices a patched forward: rows must not be turned by what no longer turns them."""
    model, cache = make_model("llama"), SuffixCache()
    text, tail = old_text(40, 1), new_text(40, 2)
    ask(model, text + tail, cache)
    assert cache.capability(model).kind == "shift"
    undo = _turn_twice_as_fast(model)
    try:
        ask(model, text + tail, cache)
        assert ask(model, new_text(7, 3) + text + tail, cache).report.shifted_tokens == 0
        assert cache.capability(model).kind == "prefix"
    finally:
        undo()
    ask(model, text + new_text(40, 6), cache)
    assert ask(model, new_text(7, 5) + text + tail, cache).report.shifted_tokens > 0  # control


@pytest.mark.parametrize("kind", ["mistral", "phi3", "dynamic", "gpt2"])
def test_measurement_leaves_model_buffers_and_random_state_as_they_were(kind):
    model = make_model(kind)
    before, state = fingerprint(model), torch.get_rng_state()
    tensors = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    measure(model)
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    for name, (buffer, values) in tensors.items():
        assert model.get_buffer(name) is buffer and torch.equal(buffer, values)


def test_measurement_is_taken_once_per_state_and_shared_by_equal_configs():
    table, model = CapabilityTable(), make_model("llama")
    first, rows = table.get(model)
    assert rows == first.rows > 0
    assert table.get(model) == (first, 0)
    assert table.get(make_model("llama", seed=1)) == (first, 0)
    assert table.get(make_model("llama", hidden_act="gelu"))[1] > 0  # control: another config
    assert table.get(model, settings=("an adapter",))[1] > 0
    model.to(torch.bfloat16)
    halved, rows = table.get(model)
    assert rows > 0 and halved.kind == "shift" and halved.shapes[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3", "cohere", "qwen3"])
def test_half_precision_is_measured_as_single_precision_is(kind, dtype):
    model = make_model(kind).to(dtype)
    assert measure(model).kind == "shift" and measure(model).layout == measure(make_model(kind)).layout


def test_rows_run_by_the_measurement_are_counted_once():
    model, cache = make_model("llama", spy=True), SuffixCache()
    report = ask(model, old_text(40, 1), cache, steps=1).report
    assert report.capability_rows == cache.capability(model).rows > 0
    assert model.spy.rows() == report.capability_rows + report.computed_rows
    assert ask(model, old_text(40, 1), cache, steps=1).report.capability_rows == 0


def test_prefix_models_register_at_the_front_only():
    model, cache = make_model("gpt2"), SuffixCache()
    with pytest.raises(ValueError, match='at="front"'):
        cache.register(model, [old_text(40, 1)])
    assert cache.register(model, [old_text(40, 1)], at="front") == 40
    answer = same_as_vanilla(model, old_text(40, 1) + new_text(9, 1), cache)
    assert answer.report.exact_tokens == 40


def test_cache_argument_is_the_installed_versions_name():
    assert cache_argument(make_model("llama")) in ("cache", "past_key_values")
    assert cache_argument(torch.nn.Linear(2, 2)) is None


def _not_loaded_yet(model):
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return lambda: model.load_state_dict(weights)


def _out_of_memory_once(model):
    linear = model.model.layers[0].self_attn.k_proj

    def fail(*args):
        raise torch.OutOfMemoryError("no memory left")

    linear.forward = fail
    return lambda: delattr(linear, "forward")


def _no_keys(model):
    weight = model.model.layers[1].self_attn.k_proj.weight
    values = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()

    def undo():
        with torch.no_grad():
            weight.copy_(values)

    return undo


@pytest.mark.parametrize("break_it", [_not_loaded_yet, _out_of_memory_once, _no_keys])
def test_a_failed_measurement_is_taken_again_and_says_nothing_of_other_models(break_it):
    model, cache = make_model("llama"), SuffixCache()
    mend = break_it(model)
    assert cache.capability(model).kind != "shift"
    assert cache.capability(make_model("llama", seed=9)).kind == "shift"
    mend()
    assert cache.capability(model).kind == "shift"


def test_weights_that_come_later_are_measured_again():
    model, cache = make_model("gpt2"), SuffixCache()
    positions = model.transformer.wpe.weight
    values = positions.detach().clone()
    with torch.no_grad():
        positions.zero_()
    assert cache.capability(model).kind == "shift"  # control: without position embeddings nothing depends on them
    with torch.no_grad():
        positions.copy_(values)
    assert cache.capability(model).kind == "prefix"


def test_measurement_under_autocast_is_that_of_the_models_own_dtype():
    model, cache = make_model("llama"), SuffixCache()
    with torch.autocast("cpu", torch.bfloat16):
        assert cache.capability(model).kind == "shift"
    assert cache.capability(model).shapes[0].dtype == torch.float32
