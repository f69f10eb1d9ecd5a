"""Quantised weights: what computes each row by itself is reused; what mixes rows of a prompt is seen and refused."""

import warnings

import pytest
import torch
from torch import nn

from hf_suffix_cache import SuffixCache
from reference import (
    ask,
    check_pool,
    check_report,
    max_difference,
    same_answer,
    same_as_vanilla,
    served,
    served_rows,
)
from tiny_models import fingerprint, make_model, new_text, old_text

PROMPT = old_text(48, 1)
BIG = dict(hidden_size=128, intermediate_size=256, head_dim=32)  # sides that packed kernels accept


class Int8Linear(nn.Module):
    """The common core of weight-only formats: int8 weights with a scale per output, multiplied in fp32."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("packed", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, rows):
        return nn.functional.linear(rows, self.packed.to(rows.dtype) * self.scale)


def replace_linears(model, make) -> None:
    """Every linear layer of the decoder replaced by `make(layer)`."""
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(block, name, make(child))


def weight_only(kind: str):
    """`(model, number of its quantised layers)`: a tiny model with weight-only quantisation of one kind."""
    model = make_model("llama", **({} if kind == "plain" else BIG))
    if kind == "plain":
        replace_linears(model, Int8Linear)
        marker = "Int8Linear"
    elif kind == "torchao":
        quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        return _counted(model, sum("Int8" in type(each.weight).__name__ for each in _linears(model)))
    elif kind == "quanto":
        quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
        quanto.quantize(model, weights=quanto.qint8)
        quanto.freeze(model)
        marker = "QLinear"
    else:
        quantize = pytest.importorskip("hqq.core.quantize", reason="hqq is not installed")
        settings = quantize.BaseQuantizeConfig(nbits=4, group_size=32)
        replace_linears(
            model, lambda each: quantize.HQQLinear(each, settings, compute_dtype=torch.float32, device="cpu")
        )
        marker = "HQQLinear"
    return _counted(model, sum(type(each).__name__ == marker for each in model.modules()))


def _linears(model) -> list[nn.Linear]:
    return [each for each in model.modules() if isinstance(each, nn.Linear)]


def _counted(model, layers: int):
    assert layers >= 3 * 7, "control: the layers are quantised"
    model.baseline = fingerprint(model)
    return model, layers


@pytest.mark.parametrize("kind", ["plain", "torchao", "quanto", "hqq"])
def test_weight_only_quantised_model_is_reused_like_any_other(kind):
    model, _ = weight_only(kind)
    cache = SuffixCache(fidelity="exact")
    assert cache.capability(model).kind == "shift"
    for ids, expected in ((PROMPT, 0), (PROMPT, 47), (PROMPT[:30] + new_text(9, 1), 30), (PROMPT, 47)):
        report = same_as_vanilla(model, ids, cache).report
        assert report.exact_tokens == expected and report.reason is None
    check_pool(cache)
    ids = new_text(21, 7) + PROMPT + new_text(60, 8)
    for fraction in (1.0, 0.15):
        cache = SuffixCache(repair_fraction=fraction)
        ask(model, new_text(9, 1) + PROMPT + new_text(40, 2), cache, steps=1)
        got = ask(model, ids, cache, steps=1)
        check_report(got.report)
        assert served(got.report) == len(PROMPT)
        if fraction == 1.0:
            same_answer(got, ask(model, ids, steps=1))
        check_pool(cache)


@pytest.mark.parametrize("kind", ["plain", "torchao", "quanto", "hqq"])
def test_quantised_and_plain_weights_never_share_rows(kind):
    """The same object before and after, and a second model beside it."""
    plain, (quantised, _) = make_model("llama", **({} if kind == "plain" else BIG)), weight_only(kind)
    cache = SuffixCache(fidelity="exact")
    far = max_difference(ask(plain, PROMPT, steps=1).scores, ask(quantised, PROMPT, steps=1).scores)
    assert far > 1e-3  # control
    for model in (plain, quantised):
        assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == 0
    for model in (plain, quantised):
        assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1
    replace_linears(plain, Int8Linear)
    assert same_as_vanilla(plain, PROMPT, cache).report.exact_tokens == 0


def test_new_integers_in_a_quantised_weight_are_another_model():
    model, _ = weight_only("plain")
    cache = SuffixCache(fidelity="exact")
    for change in ("packed", "scale"):
        for expected in (0, len(PROMPT) - 1):
            assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == expected
        before = ask(model, PROMPT, steps=1)
        tensor = getattr(model.model.layers[1].mlp.down_proj, change)
        tensor.copy_(-tensor)
        assert max_difference(before.scores, ask(model, PROMPT, steps=1).scores) > 1e-2  # control


def dynamically_quantised():
    """torch's own dynamic quantisation, in which one scale for all rows of a forward depends on all of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.ao.quantization.quantize_dynamic(make_model("llama"), {nn.Linear}, dtype=torch.qint8)


def test_activations_quantised_over_the_whole_prompt_are_refused():
    model = dynamically_quantised()
    whole, chunked = ask(model, PROMPT, steps=1), ask(model, PROMPT, steps=1, prefill_chunk_size=40)
    assert max_difference(whole.scores, chunked.scores) > 1e-2  # control: stock's own rows depend on the chunks
    cache = SuffixCache()
    capability = cache.capability(model)
    assert capability.kind == "none" and "tokens to their right" in capability.reason
    for _ in range(3):
        got = ask(model, PROMPT, cache)
        same_answer(got, ask(model, PROMPT), tolerance=1e-30)
        assert got.report.exact_tokens == 0 and got.report.reason
    assert check_pool(cache).bytes_used == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_models_are_reused_or_refused_but_never_wrong(bits, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    source = make_model("llama", **BIG)
    source.save_pretrained(tmp_path)
    source.baseline = fingerprint(source)  # saving writes the architecture into the config
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == {4: "Linear4bit", 8: "Linear8bitLt"}[bits]
    cache = SuffixCache(fidelity="exact")
    # 4 bits: kernels of a CPU compute in bf16, too coarse to tell a rotation in fp32 rows; repeats are the same bits.
    # 8 bits: columns are told apart by what all rows of a forward hold in them.
    assert cache.capability(model).kind in {4: ("shift", "prefix"), 8: ("none",)}[bits]
    for ids in (PROMPT, PROMPT, PROMPT[:30] + new_text(9, 1)):
        got = ask(model, ids, cache)
        assert got.ids.tolist() == ask(model, ids).ids.tolist()
    assert got.report.exact_tokens == {4: 30, 8: 0}[bits]
    check_pool(cache)


def test_gguf_weights_load_dequantised_and_are_reused(tmp_path):
    """A GGUF file of Q8_0 blocks, read through `gguf_file`: weights are plain tensors of the model then."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    from transformers import AutoModelForCausalLM

    source = make_model("llama", vocab_size=256)
    path = write_gguf(gguf, source, tmp_path / "tiny.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    far = max_difference(ask(source, PROMPT, steps=1).scores, ask(model, PROMPT, steps=1).scores)
    assert 1e-4 < far < 3.0  # control: the same model, rounded
    cache = SuffixCache(fidelity="exact")
    for ids, expected in ((PROMPT, 0), (PROMPT, 47), (PROMPT[:30] + new_text(9, 1), 30)):
        assert same_as_vanilla(model, ids, cache).report.exact_tokens == expected
    assert same_as_vanilla(source, PROMPT, cache).report.exact_tokens == 0
    _, rows = served_rows(model, PROMPT, cache, steps=1)
    assert rows[0][0].dtype is torch.float32


def write_gguf(gguf, model, path):
    """A llama of `transformers` as a GGUF file without a tokenizer, its matrices in Q8_0."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array = tensor.detach().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # GGUF's llama has its rotary pairs side by side
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        stem = names.get_name(name, try_suffixes=(".weight",))
        if array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stem, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stem, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
