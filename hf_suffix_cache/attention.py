"""
The attention function that the package registers with transformers, and its mask function.

A model is switched to it only while a forward of ours runs, by count under a lock. Threads that have no such forward
open get the model's own attention and mask. A probe reads how much the last queries attend to each position. Where the
model's own is sdpa and it is known to be faster, grouped heads are attended to without copies (`grouped.py`). Where it
is flash-attn, scattered rows and padded batches go through that in a way that it understands (`flash.py`).
"""

import sys
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .flash import flash_available, flash_decode, flash_scattered
from .grouped import Bounds, grouped_attention, visible_bounds

NAME = "suffix_cache"
MODEL_BUILDS_MASKS = ("sdpa", "eager")  # implementations whose masks follow a query offset per row
FLASH = "flash_attention_2"
FLASH_DECODE_QUERIES = 16  # most new tokens of a forward, drafts included, that flash-attn is called for by ourselves

# arguments of a layer that say nothing about its arithmetic, or what the mask says already
HARMLESS = {"dropout", "scaling", "is_causal", "sliding_window", "position_ids", "use_cache", "cache_position"}
MOST_MASKS = 4  # as many kinds of layers as a model has masks for

_lock = threading.Lock()
_counts: dict[int, int] = {}  # open passes by id(config)
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
        mean = weights.mean(dim=(1, 2))  # stays on its GPU: fetching it would wait for every layer
        self._total = mean if self._total is None else self._total + mean.to(self._total.device)
        self._layers += 1

    def attention(self) -> torch.Tensor | None:
        """`[batch, keys]`, rows summing to 1; None if no layer could be read."""
        return None if self._total is None else self._total.cpu() / self._layers


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
class Pass:
    """
    What a thread's open forward wants of the attention function.

    Args:
        probe (`Probe`, *optional*): Reads every layer.
        explicit_masks (`bool`): Whether masks have to be tensors even where sdpa could do without.
        grouped (`bool`): Whether grouped heads may be attended to in our own way.
        columns (`np.ndarray`, `[queries]`), total (`int`), *optional*: Column of each query, and of how many.
        pads (`np.ndarray`, `[batch]`, *optional*): Columns at the front of each row that hold no token.
        configs (list): What the forward is to switch; `switched` (list): what it has.
    """

    probe: Probe | None = None
    explicit_masks: bool = False
    grouped: bool = False
    columns: np.ndarray | None = None
    total: int | None = None
    pads: np.ndarray | None = None
    configs: list = field(default_factory=list)
    switched: list = field(default_factory=list)
    _bounds: list = field(default_factory=list)  # of the newest masks: (weak reference to the mask, bounds)

    def bounds(self, mask: torch.Tensor, block_rows: int) -> Bounds:
        """What blocks of queries see by this mask, which most layers share."""
        for known, bounds in self._bounds:
            if known() is mask:
                return bounds
        bounds = visible_bounds(mask, block_rows)
        self._bounds = [(weakref.ref(mask), bounds), *self._bounds[: MOST_MASKS - 1]]
        return bounds


@contextmanager
def open_pass(
    model: PreTrainedModel,
    probe: Probe | None = None,
    explicit_masks: bool = False,
    columns: np.ndarray | None = None,
    total: int | None = None,
    pads: np.ndarray | None = None,
):
    """
    Run the forwards inside with the registered attention function, if that is needed: for a probe, because masks have
    to be tensors even where sdpa could do without (rows that leave the forward are cut out of them), because the
    model's own implementation can't attend from scattered rows (flash and flex attention; these then run as sdpa), or
    for speed: with `columns`, the queries' own of `total`, grouped heads are attended to in our own way. Only models
    whose attention goes through transformers' interface (`Capability.reads_attention`) may be given columns.
    """
    own = own_implementation(model)
    in_place = own not in MODEL_BUILDS_MASKS and columns is not None and columns[-1] - columns[0] + 1 == len(columns)
    grouped = columns is not None and own != "eager" and not _is_ungrouped() and not is_compiled_anywhere(model)
    if probe is None and not explicit_masks and (in_place or (not grouped and own in MODEL_BUILDS_MASKS)):
        yield
        return
    outer = getattr(_thread, "current", None)
    current = Pass(probe, explicit_masks, grouped, columns, total, pads, attention_configs(model))
    try:
        _begin(current)
        yield
    finally:
        _switch_back(current)
        _thread.current = outer


def begin_forward(configs: list, queries: int = 0, pads: np.ndarray | None = None, total: int | None = None) -> None:
    """
    Until `end_forward`, this thread's forward attends to grouped heads in our own way. `configs` are those that
    `groupable_configs` gave. Nothing happens inside of an open pass.

    With `pads` `[batch]`, the columns at the front of each row that hold no token, a model that is set to flash-attn
    decodes its `queries` new tokens, of `total` columns, in our way: stock copies all keys to leave the pads out.
    """
    current = getattr(_thread, "current", None)
    if current is not None and current is getattr(_thread, "forward", None):
        end_forward()  # of a forward that an interrupt ended without its hooks
        current = None
    if not configs or current is not None or _is_ungrouped():
        return
    own = _own(configs[0])
    if own == "sdpa":
        _thread.forward = Pass(grouped=True, configs=configs)
        _begin(_thread.forward)
    elif own == FLASH and pads is not None and queries <= FLASH_DECODE_QUERIES and flash_available():
        _thread.forward = Pass(pads=pads, total=total, configs=configs)
        _begin(_thread.forward)


def end_forward() -> None:
    """The forward of this thread that `begin_forward` began, if there is one, has ended."""
    current = getattr(_thread, "forward", None)
    if current is not None:
        _thread.forward = None
        if _thread.current is current:
            _thread.current = None
        _switch_back(current)


@contextmanager
def ungrouped():
    """Inside, this thread switches no model for speed: the forward that begins is part of a graph."""
    _thread.ungrouped = True
    try:
        yield
    finally:
        _thread.ungrouped = False


def _is_ungrouped() -> bool:
    return getattr(_thread, "ungrouped", False)


def groupable_configs(model: PreTrainedModel) -> list:
    """The configs to switch so that the model's forwards may be sped up; none if something in it is compiled."""
    return [] if is_compiled_anywhere(model) else attention_configs(model)


def is_compiled_anywhere(model: torch.nn.Module) -> bool:
    """Whether the model or a part of it is compiled: what is compiled was compiled for the model's own attention."""
    return hasattr(model.forward, "_torchdynamo_orig_callable") or any(
        vars(module).get("_compiled_call_impl") is not None
        or isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
        for module in model.modules()
    )


def own_implementation(model: PreTrainedModel) -> str:
    """The attention implementation that the model has when nothing of ours is open."""
    return _own(model.config.get_text_config(decoder=True))


def alias_of(name: str | None) -> str:
    """
    What a config says while its model is switched. It carries the implementation that the model has otherwise, so that
    a copy of the config that is made meanwhile goes on as that one; spelled so that code of transformers that looks
    for "flash" in it finds none.
    """
    return f"{NAME}:{(name or '').encode().hex()}"


def named_by(alias: str | None) -> str | None:
    """The implementation that an alias stands for; any other name as it is."""
    if not is_alias(alias):
        return alias
    return bytes.fromhex(alias[len(NAME) + 1 :]).decode() or None


def is_alias(name: str | None) -> bool:
    """Whether a config says this while its model is switched."""
    return name is not None and name.startswith(f"{NAME}:")


def register(name: str) -> None:
    """Register attention and mask function with transformers; without the mask function no mask is made at all."""
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, mask_function)


def attention_forward(module, query, key, value, attention_mask, **kwargs):
    """The model's own attention; in a thread with an open pass sdpa or eager, or grouped heads, read by the probe."""
    current = getattr(_thread, "current", None)
    own, output = _own(module.config), None
    if current is not None and own == FLASH:
        output = _by_flash(current, query, key, value, kwargs)
    if current is not None and own not in MODEL_BUILDS_MASKS:
        own = "sdpa"
    if output is None and current is not None and current.grouped and own == "sdpa" and _is_plain(kwargs):
        output = grouped_attention(query, key, value, attention_mask, kwargs.get("scaling"), current.bounds)
    if output is None:
        output = _implementation(own, module)(module, query, key, value, attention_mask, **kwargs)
    else:
        output = output, None
    if current is not None and current.probe is not None:
        current.probe.read(module, query, key, attention_mask, kwargs.get("scaling"), kwargs.get("softcap"))
    return output


def _by_flash(current: Pass, query, key, value, kwargs: dict) -> torch.Tensor | None:
    """A layer of a model that is set to flash-attn; None where that has no answer: then sdpa serves."""
    pads = current.pads
    if current.explicit_masks or current.total is None or not _is_plain({**kwargs, "softcap": None}):
        return None
    if pads is not None and len(pads) != query.shape[0]:
        return None
    options = kwargs.get("scaling"), kwargs.get("sliding_window"), kwargs.get("softcap"), pads
    if current.columns is None:
        return flash_decode(query, key, value, *options, current.total)
    if len(current.columns) != query.shape[2] or current.total != key.shape[2]:
        return None
    return flash_scattered(query, key, value, current.columns, *options)


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


def _is_plain(kwargs: dict) -> bool:
    """Whether a layer's arguments ask for nothing but softmax(scores) @ values."""
    if kwargs.get("dropout"):
        return False
    return all(name in HARMLESS or value is None or value is False for name, value in kwargs.items())


def _own(config) -> str:
    return named_by(config._attn_implementation)


def _begin(current: Pass) -> None:
    _thread.current = current  # first: what is switched from here on is known to whoever ends the pass
    _switch(current)


def _switch(current: Pass) -> None:
    """Count each config's passes; what has been switched is noted one by one, for an interrupt may come anywhere."""
    with _lock:
        for config in current.configs:
            _counts[id(config)] = _counts.get(id(config), 0) + 1
            current.switched.append(config)
            own = config._attn_implementation_internal
            if not is_alias(own):
                register(alias_of(own))
                config._attn_implementation_internal = alias_of(own)


def _switch_back(current: Pass) -> None:
    with _lock:
        while current.switched:
            config = current.switched[-1]
            if _counts[id(config)] == 1:
                config._attn_implementation_internal = named_by(config._attn_implementation_internal)
                del _counts[id(config)]
            else:
                _counts[id(config)] -= 1
            current.switched.pop()
