"""
Every causal model type of the installed transformers as a tiny random model, made from its own default configuration.

Sizes shrink by the name of the field; what a family needs beside that stands in `OVERRIDES`. The default pattern of
layers is kept: every kind of layer of the default configuration occurs in the tiny one.
"""

import contextlib
import copy
import dataclasses

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 256
WINDOW = 16
LAYERS = 4
INIT = 0.3  # with the default of 0.02 a random model hardly uses its context, and a wrong cache would pass
MAX_PARAMETERS = 50_000_000

# Field name -> tiny value, for every configuration class that has the field (and where its default is not None).
_SIZES = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "output_vocab_size", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(("vocab_size_per_layer_input", "audio_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "hidden_size_global", "input_size"), 64),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size", "backbone_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dim_ff", "dff", "d_inner", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "ffn_hidden_size", "intermediate_size_mlp", "feed_forward_size"), 96),
    **dict.fromkeys(("dense_intermediate_size", "mlp_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "depth"), LAYERS),
    **dict.fromkeys(("num_decoder_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_global_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "kv_n_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim", "dim_head", "attention_head_size"), 16),
    **dict.fromkeys(("d_head", "kv_channels", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 16),
    **dict.fromkeys(("query_pre_attn_scalar", "hidden_size_per_layer_input", "mamba_head_dim"), 16),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("moe_num_shared_experts", "num_shared_experts", "n_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "local_attention"), WINDOW),
    **dict.fromkeys(("window_size", "local_attention_window_len", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("max_target_positions", "context_length"), 512),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "n_groups", "mamba_n_groups"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("laurel_rank", "adapter_rank", "gated_norm_rank", "loop_gate_rank", "d_rel", "hc_lowrank"), 8),
    **dict.fromkeys(("router_hidden_size",), 16),
    **dict.fromkeys(("pad_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "eod_token_id"), None),
    "bos_token_id": 1,
    "zero_expert_num": 1,
    "rotary_dim": 8,
    "attention_multiplier": 0.25,  # 1 / sqrt(head_dim), as released granite models have it; 1 amplifies rounding
    "is_decoder": True,
    "use_cache": True,
    "layerdrop": 0.0,
    "max_window_layers": 2,
    "index_topk": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "rel_extent": 64,
}
_INITIALISERS = ("initializer_range", "init_std", "initializer_factor", "embed_init_std")
_LAYER_KINDS = ("layer_types", "layers_block_type")
# Left open by some default configurations, though the model class needs them.
_FILLED = ("head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")

_HYBRID = ["linear_attention", "full_attention"] * 2
_CONVOLUTIONS = ["conv", "full_attention"] * 2
_SHARING = ["sliding_attention", "full_attention"] * 2
# An assistant lives on its target's rows: it shares all of them and has no per-layer inputs of its own.
_ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": LAYERS}
_ASSISTANT["num_kv_shared_layers"] = LAYERS
_WINDOWED_LATENTS = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
_ROTARY_2D = {"rope_type": "default", "rope_theta": 10000.0}

# What a type needs beside the rules.
OVERRIDES: dict[str, dict] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    # `generate` asks its configuration for a number of layers that only the parts have.
    "blt": {"encoder_hash_byte_group_vocab": 500, "num_hidden_layers": LAYERS},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROTARY_2D}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots3_note_text": _WINDOWED_LATENTS,
    "dots3_note": {
        "text_config": _WINDOWED_LATENTS,
        "vision_config": {
            "pyramid_num_routed": [-1, -1, 2, 4],
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
        },
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 32},
    },
    "emu3": {"text_config": {"pad_token_id": 0}, "pad_token_id": 0},
    "gemma3n_text": {"layer_types": _SHARING, "num_kv_shared_layers": 2},
    "gemma4": {"text_config": {"pad_token_id": 0, "layer_types": _SHARING, "num_kv_shared_layers": 2}},
    "gemma4_text": {"layer_types": _SHARING, "num_kv_shared_layers": 2},
    "gemma4_unified": {"text_config": {"pad_token_id": 0}},
    "gemma4_assistant": {"text_config": _ASSISTANT},
    "gemma4_unified_assistant": {"text_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": _HYBRID},
    "hrm_text": {"initializer_range": 0.1},  # its loops amplify rounding: with 0.3 two stock runs differ by 1e-2
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "lfm2": {"layer_types": _CONVOLUTIONS},
    "lfm2_moe": {"layer_types": _CONVOLUTIONS},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "modernbert-decoder": {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "eos_token_id": 2},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "nemotron": {"num_key_value_heads": 2},
    "prophetnet": {"pad_token_id": 0},
    "reformer": {
        "pad_token_id": 0,
        "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_embds": False,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "xlm": {"pad_token_id": 0},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "chunk_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
OVERRIDES["qwen4_exp"] = {"text_config": OVERRIDES["qwen4_exp_text"]}
OVERRIDES["gemma3n"] = {"text_config": OVERRIDES["gemma3n_text"]}


def model_types() -> list[str]:
    """The causal model types of the installed transformers."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(config_class, overrides: dict | None = None):
    """A small configuration of a class, with the kinds of layers and the sub-configurations of its default one."""
    overrides = dict(overrides or {})
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    parts = {name: value for name, value in overrides.items() if name in config_class.sub_configs}
    default = _default(config_class, parts)
    values = {}
    for name, field in fields.items():
        if name in config_class.sub_configs:
            part = getattr(default, name, None)
            if part is not None:
                values[name] = tiny_config(type(part), overrides.pop(name, None))
        elif name in overrides:
            values[name] = overrides.pop(name)
        elif name in _INITIALISERS:
            values[name] = INIT
        elif name == "num_key_value_heads" and "kv_lora_rank" in fields:
            values[name] = _SIZES["num_attention_heads"]  # latent attention has no groups of heads
        elif name in _SIZES and (field.default is not None or _SIZES[name] is None or name in _FILLED):
            values[name] = _SIZES[name]
        elif name.endswith(("token_id", "token_index")) and isinstance(field.default, int):
            values[name] = 3
        elif name in _LAYER_KINDS and getattr(default, name, None):
            values[name] = _few(getattr(default, name))
    return config_class(**values, **overrides)


def _default(config_class, parts: dict):
    """The default configuration of a class; `parts` are changes without which some classes refuse to be made."""
    try:
        return config_class()
    except StrictDataclassError:
        return config_class(**{name: {"model_type": "gemma4_text", **part} for name, part in parts.items()})


def _few(layer_types: list[str]) -> list[str]:
    """A few layers of the same kinds: the default's first ones, or, where kinds would be missing, each in turn."""
    kinds = list(dict.fromkeys(layer_types))
    first = list(layer_types[:LAYERS])
    if set(first) == set(kinds):
        return first
    return [kinds[i % len(kinds)] for i in range(LAYERS)]


def build(model_type: str, seed: int = 0, attention: str | None = None, **changes):
    """
    A tiny model of a type: fp32, eval mode, seeded weights that make every answer depend on its context. `changes` are
    fields of its configuration that shall be otherwise.

    Raises whatever the configuration or model class raises, and `ValueError` above 50M parameters.
    """
    overrides = {**OVERRIDES.get(model_type, {}), **changes}
    config = tiny_config(CONFIG_MAPPING[model_type], copy.deepcopy(overrides))
    options = {"attn_implementation": attention} if attention else {}
    with torch.device("meta"):
        size = sum(p.numel() for p in _make(config, options).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f}M parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _make(config, options).float().eval()
        for parameter in model.parameters():
            if not parameter.any():  # biases, sinks and gates that start at zero would hide what they do
                parameter.data.normal_(0.0, 0.1)
    # No end and no pad of its own, so that every answer has its full length and a generated pad is not taken for
    # padding. musicgen delays its codebooks with pads, and needs one.
    pad = 2 if model_type.startswith("musicgen") else None
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, pad_token_id=pad, decoder_start_token_id=pad, num_return_sequences=1
    )
    return model


def _make(config, options):
    config = copy.deepcopy(config)
    if hasattr(config, "audio_encoder") and hasattr(config, "decoder"):
        # The class that the mapping names is made from the decoder's part; AutoModelForCausalLM gives it the whole.
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
        return getattr(transformers, name)._from_config(config.decoder, **options)
    with _without_timm() if config.model_type == "gemma3n" else contextlib.nullcontext():
        return transformers.AutoModelForCausalLM.from_config(config, **options)


@contextlib.contextmanager
def _without_timm():
    """gemma3n's vision tower needs the timm library. Text never reaches it, so an empty module stands in for it."""
    from transformers.models.gemma3n import modeling_gemma3n

    auto = modeling_gemma3n.AutoModel
    needs_timm = modeling_gemma3n.Gemma3nVisionConfig

    class TextOnly:
        @staticmethod
        def from_config(config, **options):
            return torch.nn.Identity() if isinstance(config, needs_timm) else auto.from_config(config, **options)

    modeling_gemma3n.AutoModel = TextOnly
    try:
        yield
    finally:
        modeling_gemma3n.AutoModel = auto
