"""
What a model can do, measured on the model at first use: whether its keys turn by a position shift, and what shape its
rows have. The class name and `model_type` are not looked at.
"""

import inspect
import threading
import weakref
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .rope import RotarySpec, rotate_keys
from .store.pool import LayerShape

PROBE_TOKENS = 6
PROBE_OFFSET = 11
# relative error of a turned key against a fresh one; measured on tiny and real models: 1e-6 in fp32, 8e-3 in bf16
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Capability:
    """
    Args:
        kind (`str`): `"shift"` (rows can be reused anywhere) or `"none"`.
        reason (`str`, *optional*): Why not, one sentence.
        shapes (`tuple[LayerShape]`): One per layer.
        windows (`tuple[int | None]`): Sliding window of each layer.
        rows (`int`): Rows that the measurement ran (batch x queries).
    """

    kind: str
    reason: str | None = None
    shapes: tuple[LayerShape, ...] = ()
    windows: tuple[int | None, ...] = ()
    rows: int = 0


class CapabilityTable:
    """Measurements by model, taken once per model and state (dtype and device)."""

    def __init__(self):
        self._lock = threading.Lock()
        self._known: weakref.WeakKeyDictionary[PreTrainedModel, tuple] = weakref.WeakKeyDictionary()

    def get(self, model: PreTrainedModel) -> tuple[Capability, int]:
        """The model's capability and the rows that were run to measure it now (0 if it was known)."""
        state = (model.dtype, model.device)
        with self._lock:
            known = self._known.get(model)
            if known is not None and known[0] == state:
                return known[1], 0
            capability = measure(model)
            self._known[model] = (state, capability)
            return capability, capability.rows


def cache_argument(model: torch.nn.Module) -> str | None:
    """Name of the forward's cache argument: `cache` since transformers 5.24, `past_key_values` before; or None."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def measure(model: PreTrainedModel) -> Capability:
    """
    Run a few tokens at two offsets and compare the rows of all layers: keys must turn by the rotation that one of the
    model's own frequency buffers gives, values must stay.
    """
    reason = _refusal(model)
    if reason is not None:
        return Capability("none", reason)
    try:
        near, far = _rows_at(model, 0), _rows_at(model, PROBE_OFFSET)
    except Exception as error:  # whatever a foreign forward raises here, it must not reach the caller's generate
        return Capability("none", f"the model could not be measured: {type(error).__name__}: {error}")
    rows = 2 * PROBE_TOKENS
    buffers = _frequency_buffers(model)
    shapes, windows = [], []
    for layer, (first, second) in enumerate(zip(near.layers, far.layers, strict=True)):
        if type(first) not in (DynamicLayer, DynamicSlidingWindowLayer):
            kept = type(first).__name__
            return Capability("none", f"layer {layer} keeps a {kept}, not plain keys and values", rows=rows)
        spec = _fit(first, second, model, buffers)
        if isinstance(spec, str):
            return Capability("none", f"layer {layer}: {spec}", rows=rows)
        keys, values = first.keys, first.values
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device, spec))
        windows.append(getattr(first, "sliding_window", None))
    if not shapes:
        return Capability("none", "the model keeps no keys and values", rows=rows)
    return Capability("shift", None, tuple(shapes), tuple(windows), rows)


def _refusal(model: PreTrainedModel) -> str | None:
    """What rules a model out before anything is run."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "encoder-decoder models keep two caches"
    parameters = inspect.signature(model.forward).parameters
    if cache_argument(model) is None:
        return "the model's forward takes no cache"
    if "position_ids" not in parameters:
        return "the model's forward takes no position_ids"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "chunked attention layers are not supported yet"
    for name, module in model.named_modules():
        rope_type = getattr(module, "rope_type", None)
        types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
        unknown = [kind for kind in types if kind is not None and kind not in SUPPORTED_ROPE_TYPES]
        if unknown:
            return f"rotary frequencies of type {unknown[0]!r} in {name} depend on the length of the text"
    return None


@torch.no_grad()
def _rows_at(model: PreTrainedModel, offset: int) -> DynamicCache:
    """Rows of a fixed short text at positions offset, offset + 1, ..."""
    config = model.config.get_text_config(decoder=True)
    device = model.get_input_embeddings().weight.device
    ids = (torch.arange(1, PROBE_TOKENS + 1, device=device) * 7919 % config.vocab_size)[None]
    cache = DynamicCache(config=model.config)
    model.forward(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        position_ids=torch.arange(offset, offset + PROBE_TOKENS, device=device)[None],
        use_cache=True,
        **{cache_argument(model): cache},
    )
    return cache


def _frequency_buffers(model: PreTrainedModel) -> list[RotarySpec]:
    """Buffers that may hold rotary frequencies; `original_*` ones are length-dependent scaling's spare copies."""
    names = [name for name, buffer in model.named_buffers() if name.endswith("inv_freq") and buffer.dim() == 1]
    return [RotarySpec(name) for name in names if not name.rsplit(".", 1)[-1].startswith("original")]


def _fit(near: DynamicLayer, far: DynamicLayer, model: PreTrainedModel, buffers: list[RotarySpec]) -> RotarySpec | str:
    """The buffer whose full-width half-split rotation takes the near keys to the far ones, or why there is none."""
    if near.keys is None or near.keys.dim() != 4 or near.keys.shape[-2] != PROBE_TOKENS:
        return "no plain [batch, heads, tokens, head_dim] keys"
    tolerance = TOLERANCE.get(near.keys.dtype)
    if tolerance is None:
        return f"keys of dtype {near.keys.dtype}"
    if _error(near.values, far.values) > tolerance:
        return "values depend on the position"
    if _error(near.keys, far.keys) <= tolerance:
        return "keys carry no position"
    for spec in buffers:
        frequencies = spec.frequencies(model)
        if 2 * len(frequencies) == near.keys.shape[-1]:
            turned = rotate_keys(near.keys, PROBE_OFFSET, frequencies)
            if _error(turned, far.keys) <= tolerance:
                return spec
    return "keys don't turn by a plain full-width rotation"


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference relative to the largest wanted value."""
    wanted = wanted.float()
    return float((got.float() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9))
