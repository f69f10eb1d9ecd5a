"""Tiny random models of many architectures, and texts for them: small and sharp enough to notice a wrong row.

With the default `initializer_range` a random model hardly uses its context, so a wrong cache would pass. 0.3 makes the
last logits depend on the whole prompt (`test_oracles.py` begins with that control).
"""

import weakref

import numpy as np
import torch
import transformers

VOCAB = 256
FIRST_TEXT_ID = 4  # 0 to 3 stay free for pads, BOS and EOS
_SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=None,  # else `generate` takes a generated pad for padding; batches name theirs
    tie_word_embeddings=False,
)
_LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
    rope_theta=10000.0,
)
_LINEAR = dict(rope_type="linear", factor=4.0, rope_theta=10000.0)
ORIGINAL_LENGTH = 64  # of the models whose frequencies depend on the length
_YARN = dict(rope_type="yarn", factor=4.0, rope_theta=10000.0, original_max_position_embeddings=64)
_DYNAMIC = dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0)
_LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    long_factor=[1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
    original_max_position_embeddings=ORIGINAL_LENGTH,
)
_PARTIAL = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25)
_NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
_HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
_GPT2 = dict(
    vocab_size=VOCAB,
    n_embd=64,
    n_layer=3,
    n_head=4,
    n_positions=512,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)


def _sized(config_class, **changes):
    return lambda: config_class(**{**_SIZES, **changes})


# Rows of these can be moved. `mistral` has a window of 16 tokens, so its three layers see 45 tokens back.
SUPPORTED = {
    "llama": _sized(transformers.LlamaConfig),
    "llama3_scaling": _sized(transformers.LlamaConfig, rope_parameters=_LLAMA3),
    "linear_scaling": _sized(transformers.LlamaConfig, rope_parameters=_LINEAR),
    "yarn": _sized(transformers.LlamaConfig, rope_parameters=_YARN),
    "qwen2": _sized(transformers.Qwen2Config),
    "qwen3": _sized(transformers.Qwen3Config, head_dim=16),
    "mistral": _sized(transformers.MistralConfig, sliding_window=16),
    "mistral_full": _sized(transformers.MistralConfig, sliding_window=None),
    "gemma3_text": _sized(
        transformers.Gemma3TextConfig,
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=16,
        layer_types=_HYBRID,
    ),
    "phi3": _sized(
        transformers.Phi3Config,
        rope_parameters=_LONGROPE,
        original_max_position_embeddings=ORIGINAL_LENGTH,
        sliding_window=None,
    ),
    "gpt_neox": _sized(transformers.GPTNeoXConfig, rope_parameters=_PARTIAL),
    "phi": _sized(transformers.PhiConfig, rope_parameters={**_PARTIAL, "partial_rotary_factor": 0.5}),
    "stablelm": _sized(transformers.StableLmConfig, rope_parameters=_PARTIAL),
    "cohere": _sized(transformers.CohereConfig),
    "cohere2": _sized(transformers.Cohere2Config, sliding_window=16, layer_types=_HYBRID),
    "glm": _sized(transformers.GlmConfig, head_dim=16, rope_parameters={**_PARTIAL, "partial_rotary_factor": 0.5}),
    "gptj": lambda: transformers.GPTJConfig(rotary_dim=8, **{**_GPT2, "n_positions": 2048}),
    "nanochat": _sized(transformers.NanoChatConfig),
    "smollm3": _sized(transformers.SmolLM3Config, no_rope_layers=[1, 0, 1]),
    "olmo3": _sized(transformers.Olmo3Config, sliding_window=16, layer_types=_HYBRID),
    "gpt_oss": _sized(
        transformers.GptOssConfig,
        head_dim=16,
        sliding_window=16,
        layer_types=_HYBRID,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=_YARN,
    ),
    "deepseek_v3": _sized(
        transformers.DeepseekV3Config,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        n_layer=3,
        n_head=4,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tie_word_embeddings=False,
    ),
}
CORE = ("llama", "qwen2", "qwen3", "mistral")  # what every oracle of DESIGN.md runs on, four times over
BREADTH = tuple(
    "phi3 gpt_neox phi stablelm cohere cohere2 glm gptj nanochat gemma3_text smollm3 deepseek_v3 olmo3 gpt_oss "
    "bloom".split()
)

# Beyond its first length every other length is a regime of its own: nothing that runs on SUPPORTED fits it.
_REGIMES = {
    "dynamic": _sized(transformers.LlamaConfig, rope_parameters=_DYNAMIC, max_position_embeddings=ORIGINAL_LENGTH),
    "llama_longrope": _sized(transformers.LlamaConfig, rope_parameters=_LONGROPE),
    "phimoe": _sized(
        transformers.PhimoeConfig,
        rope_parameters=_LONGROPE | dict(short_mscale=1.0, long_mscale=1.1),
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
}
LENGTH_DEPENDENT = ("phi3", "dynamic")

# Absolute positions: reuse at the front only.
PREFIX = {
    "gpt2": lambda: transformers.GPT2Config(**_GPT2),
    "bert": _sized(transformers.BertConfig, is_decoder=True, max_position_embeddings=512, **_NO_DROPOUT),
    "opt": _sized(transformers.OPTConfig, ffn_dim=96, word_embed_proj_dim=64, dropout=0.0, init_std=0.3),
}

# Rows of these can't be reused: transformers' own behaviour and a reason.
UNSUPPORTED = {
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=3,
        state_size=8,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "qwen3_next": _sized(
        transformers.Qwen3NextConfig,
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "bert_encoder": _sized(transformers.BertConfig, max_position_embeddings=512, **_NO_DROPOUT),
}
_ENCODER_DECODER = {
    "t5": lambda: transformers.T5Config(
        vocab_size=VOCAB,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
        dropout_rate=0.0,
    ),
}
CONFIGS = {**SUPPORTED, **_REGIMES, **PREFIX, **UNSUPPORTED, **_ENCODER_DECODER}

_baselines = weakref.WeakKeyDictionary()
# kept beside the models: what is among a model's attributes is part of its identity
transformers.PreTrainedModel.baseline = property(_baselines.__getitem__, _baselines.__setitem__)
_made: list[torch.nn.Module] = []  # held until the test that made them has been checked


def make_model(kind: str = "llama", seed: int = 0, attention: str = "sdpa", spy: bool = False, **config_changes):
    """
    A fresh tiny model in fp32 and eval mode; the global random generator is left as it was.

    Args:
        kind (`str`): A key of `CONFIGS`.
        seed (`int`): Seed of the weights; equal seeds give equal weights.
        attention (`str`): `"sdpa"` or `"eager"`; ignored by models that know only one.
        spy (`bool`): Give the model a `spy` (a `reference.LayerSpy`) on its first decoder layer, for its whole life,
            because a hook that comes and goes would be another identity.
    """
    config = CONFIGS[kind]()
    for name, value in config_changes.items():
        setattr(config, name, value)
    auto = transformers.AutoModelForSeq2SeqLM if kind in _ENCODER_DECODER else transformers.AutoModelForCausalLM
    known = auto._model_mapping[type(config)]
    options = {"attn_implementation": attention} if known._supports_sdpa else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, **options).float().eval()
    model.generation_config.eos_token_id = None
    if spy:
        from reference import LayerSpy

        model.spy = LayerSpy(model)
    model.baseline = fingerprint(model)
    _made.append(model)
    return model


def living_models() -> list:
    """The models that the factory has made and that were not forgotten since."""
    return list(_made)


def fingerprint(model) -> dict:
    """
    What a call must leave as it was: hooks of every module, instance attributes, configuration, mode. The hooks with
    which transformers collects hidden states and attentions stay on a model for good, and don't count.
    """
    return {
        "hooks": {name: _foreign_hooks(module) for name, module in model.named_modules()},
        "attributes": sorted(set(vars(model)) - {"baseline"}),
        "forward": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "attention": getattr(model.config, "_attn_implementation", None),
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "training": model.training,
    }


def _foreign_hooks(module) -> list[str]:
    hooks = [
        hook for kind in vars(module) if kind.endswith("_hooks") for hook in (getattr(module, kind) or {}).values()
    ]
    return [str(hook) for hook in hooks if not getattr(hook, "__module__", "").startswith("transformers.")]


def text(length: int, seed: int, low: int = FIRST_TEXT_ID, high: int = VOCAB) -> list[int]:
    """`length` random token ids in `[low, high)`. Texts of disjoint ranges have no token in common."""
    return np.random.default_rng(seed).integers(low, high, length).tolist()


def old_text(length: int, seed: int) -> list[int]:
    """Text of the lower half of the vocabulary: what earlier requests are made of."""
    return text(length, seed, FIRST_TEXT_ID, 130)


def new_text(length: int, seed: int) -> list[int]:
    """Text of the upper half: never matches an `old_text`."""
    return text(length, seed + 10_000, 130, VOCAB)


# What the tests of moved text are made of: four stored texts, questions and heads that nothing stored agrees with.
A, B, C, D = (old_text(length, 30 + length) for length in (40, 33, 52, 24))


def question(number: int, length: int = 36) -> list[int]:
    """New text for the end of a prompt, longer than the tail."""
    return new_text(length, 500 + number)


def head(number: int, length: int = 12) -> list[int]:
    """A start that no other head shares: nothing behind it is an exact hit."""
    return [250 - number] + new_text(length - 1, 700 + number)


def forget(model) -> None:
    """Let go of a model: it is not checked when the test ends, or has been."""
    _made[:] = [other for other in _made if other is not model]
