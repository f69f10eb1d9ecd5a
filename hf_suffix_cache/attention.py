"""
The attention function that the package registers with transformers, and its mask function.

A model is switched to it only while a scattered pass or a probe runs, by count under a lock. Threads that have no such
pass open get the model's own attention and mask. A probe reads how much the last queries attend to each position.
"""

import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "suffix_cache"
MODEL_BUILDS_MASKS = ("sdpa", "eager")  # implementations whose masks follow a query offset per row

_lock = threading.Lock()
_switched: dict[int, list] = {}  # id(config) -> [config, its own implementation, count]
_thread = threading.local()


class Probe:
    """
    Mean attention that the last `num_queries` queries pay to each key, over heads and the layers from `first_layer`.

    After the pass, `attention()` gives `[batch, keys]`.
    """

    def __init__(self, num_queries: int, first_layer: int):
        self.num_queries = num_queries
        self.first_layer = first_layer
        self._total: torch.Tensor | None = None
        self._layers = 0
        self.windows: set[int | None] = set()  # windows, or chunk sizes, of the masks that were asked for

    def read(self, module, query, key, mask, scaling, softcap) -> None:
        """Read one layer: query `[batch, heads, q, d]`, key `[batch, kv_heads, k, d]`, mask `[batch, 1, q, k]`."""
        if self.wants(getattr(module, "layer_idx", -1)):
            self.add(attention_weights(query[:, :, -self.num_queries :], key, mask, scaling, softcap))

    def wants(self, layer: int) -> bool:
        """Whether a layer is read."""
        return layer >= self.first_layer

    def add(self, weights: torch.Tensor) -> None:
        """Take one layer's weights, `[batch, heads, queries, keys]`."""
        mean = weights.mean(dim=(1, 2)).cpu()
        self._total = mean if self._total is None else self._total + mean
        self._layers += 1

    def attention(self) -> torch.Tensor | None:
        """`[batch, keys]`, rows summing to 1; None if no layer could be read."""
        return None if self._total is None else self._total / self._layers


def attention_weights(query, key, mask, scaling, softcap=None) -> torch.Tensor:
    """
    Softmax weights in fp32, `[batch, heads, q, k]`, of the last q of the sequence's queries; grouped heads without
    copying keys. A missing mask means that the queries are the last q positions of the keys.
    """
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    scaling = dim**-0.5 if scaling is None else scaling
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * queries, dim)
    scores = (grouped @ key.transpose(2, 3)).float().view(batch, heads, queries, keys) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        columns = torch.arange(keys, device=scores.device)
        mask = columns <= columns[-queries:, None]
    else:
        mask = mask[:, :, -queries:, :keys]
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    return scores.softmax(dim=-1)


@dataclass
class _Pass:
    """What the current thread's open pass wants of the attention function."""

    probe: Probe | None = None
    explicit_masks: bool = False


@contextmanager
def open_pass(model: PreTrainedModel, probe: Probe | None = None, explicit_masks: bool = False):
    """
    Run the forwards inside with the registered attention function, if that is needed: for a probe, because masks have
    to be tensors even where sdpa could do without (rows that leave the forward are cut out of them), or because the
    model's own implementation can't attend from scattered rows (flash and flex attention; these then run as sdpa).
    """
    own = own_implementation(model)
    if probe is None and not explicit_masks and own in MODEL_BUILDS_MASKS:
        yield
        return
    register()
    configs = attention_configs(model)
    outer = getattr(_thread, "current", None)
    _thread.current = _Pass(probe, explicit_masks)
    _switch(configs)
    try:
        yield
    finally:
        _switch_back(configs)
        _thread.current = outer


def own_implementation(model: PreTrainedModel) -> str:
    """The attention implementation that the model has when nothing of ours is open."""
    return _own(model.config.get_text_config(decoder=True))


def register() -> None:
    """Register attention and mask function with transformers; without the mask function no mask is made at all."""
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, attention_forward)
        AttentionMaskInterface.register(NAME, mask_function)


def attention_forward(module, query, key, value, attention_mask, **kwargs):
    """The model's own attention; in a thread with an open pass sdpa or eager, read by the probe."""
    current = getattr(_thread, "current", None)
    own = _own(module.config)
    if current is not None and own not in MODEL_BUILDS_MASKS:
        own = "sdpa"
    output = _implementation(own, module)(module, query, key, value, attention_mask, **kwargs)
    if current is not None and current.probe is not None:
        current.probe.read(module, query, key, attention_mask, kwargs.get("scaling"), kwargs.get("softcap"))
    return output


def mask_function(*args, **kwargs):
    """The mask of the implementation that `attention_forward` will use in this thread."""
    own, current = _own(kwargs["config"]), getattr(_thread, "current", None)
    if current is not None and current.probe is not None:
        current.probe.windows.add(kwargs.get("local_size"))
    if current is not None and own not in MODEL_BUILDS_MASKS:
        own = "sdpa"
    if current is not None and current.explicit_masks:
        kwargs = {**kwargs, "allow_is_causal_skip": False}
    if own not in ALL_MASK_ATTENTION_FUNCTIONS:
        return kwargs.get("attention_mask")
    return ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **kwargs)


def attention_configs(model: PreTrainedModel) -> list:
    """The config objects that the model's attention modules and mask code read, each once."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    text = model.config.get_text_config(decoder=True)
    configs[id(text)] = text
    return [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]


def _implementation(name: str, module):
    """Attention function by name; the eager one lives beside the module's class."""
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _own(config) -> str:
    with _lock:  # between the two looks another thread might switch
        entry = _switched.get(id(config))
        return config._attn_implementation if entry is None else entry[1]


def _switch(configs: list) -> None:
    with _lock:
        for config in configs:
            entry = _switched.setdefault(id(config), [config, config._attn_implementation_internal, 0])
            entry[2] += 1
            config._attn_implementation_internal = NAME


def _switch_back(configs: list) -> None:
    with _lock:
        for config in configs:
            entry = _switched[id(config)]
            entry[2] -= 1
            if entry[2] == 0:
                config._attn_implementation_internal = entry[1]
                del _switched[id(config)]
