"""Adapters (peft): which parts of an adapter layer act in a forward, and what rules reuse out."""

import functools
import weakref
from dataclasses import dataclass

import torch
from torch.nn.modules.dropout import _DropoutNd

PLAIN = {bool, int, float, complex, str, type(None), torch.dtype, torch.device}
KINDS = {torch.nn.ModuleDict: "_modules", torch.nn.ParameterDict: "_parameters"}


@dataclass
class _Plan:
    """
    Where to find what acts in one adapter layer, as long as its state and the sizes of its containers stay.

    Args:
        state (`tuple`): Disabled, active adapters, merged adapters.
        containers (`list[tuple]`): Name, kind and size of the layer's dicts of parts by adapter.
        children (`int`), others (`list[str]`): How many children the layer has, and which are no such dicts.
        whole (`bool`): The parts can't be told apart by adapter: all of the layer counts.
        parts (`list[tuple]`): Name and kind of a container, and an adapter that acts.
        tables (`list[tuple]`): Name of a dict of numbers by adapter, and an adapter that acts.
        names (`tuple`): What the settings say of the choice.
    """

    layer: weakref.ref
    state: tuple
    containers: list
    children: int
    others: list
    whole: bool
    parts: list
    tables: list
    names: tuple

    def holds(self, layer: torch.nn.Module, state: tuple) -> bool:
        """Whether the plan was made for this layer, and nothing came or went since."""
        modules = layer._modules
        if self.layer() is not layer or self.state != state or self.children != len(modules):
            return False
        for name, kind, size in self.containers:
            if len(modules[name].__dict__[kind]) != size:
                return False
        return True

    @property
    def is_asleep(self) -> bool:
        """Whether nothing of an adapter acts in the layer."""
        return not self.whole and not self.parts


class Adapters:
    """
    Reads the adapter layers of one model. What belongs to adapters that are active counts, and what belongs to merged
    ones: it tells which weights were added to the base's, in a way for which torch counts no version.
    """

    def __init__(self):
        self._plans: dict[int, _Plan] = {}

    def awake(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module that acts in this place: the wrapped one where no adapter of the layer is switched on."""
        while is_adapter(module) and self._plan(module).is_asleep:
            parts = module._modules
            wrapped = parts.get("base_layer", parts.get("original_module"))
            if wrapped is None or module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
                break
            module = wrapped
        return module

    def acting(self, layer: torch.nn.Module, tensors: list, settings: list) -> list[torch.nn.Module]:
        """
        Children of an adapter layer that act in its forward, the wrapped module first; the layer must have been given
        to `awake` just before. Tensors that lie in no module of their own are added to `tensors`, the choice of
        adapters and its numbers to `settings`.
        """
        plan = self._plans[id(layer)]
        modules, own = layer._modules, layer.__dict__
        children = [modules[name] for name in plan.others]
        for name, kind, adapter in plan.parts:
            (children if kind == "_modules" else tensors).append(modules[name].__dict__[kind][adapter])
        values = [own[name].get(adapter) for name, adapter in plan.tables]
        if not PLAIN.issuperset(map(type, values)):
            values = [_plain(value) for value in values]
        settings += (plan.names, *values)
        return children

    def _plan(self, layer: torch.nn.Module) -> _Plan:
        plan = self._plans.get(id(layer))
        state = (layer._disable_adapters, layer._active_adapter, layer.merged_adapters)
        if plan is None or not plan.holds(layer, state):
            plan = self._plans[id(layer)] = _make_plan(layer, state)
        return plan

    def forget_dead(self) -> None:
        """Let go of the plans of layers that are gone."""
        self._plans = {key: plan for key, plan in self._plans.items() if plan.layer() is not None}


def _make_plan(layer: torch.nn.Module, state: tuple) -> _Plan:
    disabled, active, merged = state
    active = [active] if isinstance(active, str) else active
    # of a disabled layer nothing acts: if it is merged it unmerges before it runs
    names = {} if disabled else dict.fromkeys([*active, *merged])
    modules, own = layer._modules, layer.__dict__
    first, others = layer.adapter_layer_names, getattr(layer, "other_param_names", ())
    kinds = {name: _kind(modules.get(name)) for name in (*first, *others)}
    whole = any(kinds[name] is None for name in first)
    found = [] if whole else [(name, kind) for name, kind in kinds.items() if kind is not None]
    parts = [
        (name, kind, adapter)
        for adapter in names
        for name, kind in found
        if modules[name].__dict__[kind].get(adapter) is not None
    ]
    acting = tuple(name for name in names if any(name == adapter for _, _, adapter in parts))
    tables = [name for name in (*others, "lora_variant") if type(own.get(name)) is dict]
    return _Plan(
        layer=weakref.ref(layer),
        state=(disabled, state[1] if isinstance(state[1], str) else list(active), list(merged)),
        containers=[(name, kind, len(modules[name].__dict__[kind])) for name, kind in found],
        children=len(modules),
        others=[name for name in modules if name not in dict(found)],
        whole=whole,
        parts=parts,
        tables=[(name, adapter) for name in tables for adapter in acting],
        names=(repr(state),) if whole else (acting, tuple(name for name in merged if name in acting)),
    )


def is_adapter(module: torch.nn.Module) -> bool:
    """Whether a module wraps another one and adds what adapters say. Only peft's classes have this attribute."""
    return bool(module._modules) and getattr(type(module), "adapter_layer_names", None) is not None


def refusal(model: torch.nn.Module) -> str | None:
    """Why this model's rows can't be told apart at all, or None."""
    prepare = model.__dict__.get("prepare_inputs_for_generation")
    owner = getattr(prepare, "__self__", model)
    if owner is not model and getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        return "prompt learning (peft) puts learned rows before the prompt"
    for module in walk(model):
        for hook in module._forward_pre_hooks.values() if module._forward_pre_hooks else ():
            if isinstance(hook, functools.partial) and (hook.func.__module__ or "").startswith("peft."):
                return "peft chooses adapters by row or by position in this call"
        if module.training and isinstance(module, _DropoutNd) and module.p > 0:
            return "a dropout layer is in training mode; call model.eval() to reuse rows"
    return None


def walk(model: torch.nn.Module) -> list[torch.nn.Module]:
    """All modules, breadth first, each once: a fifth of the time of `model.modules()`."""
    modules, seen = [model], {id(model)}
    for module in modules:
        for child in module._modules.values() if module._modules else ():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return modules


def _kind(container) -> str | None:
    """Where a dict of parts by adapter keeps them; None for anything else."""
    if type(container).__name__ == "BufferDict":  # peft's own
        return "_buffers"
    return KINDS.get(type(container))


def _plain(value):
    """A number that an adapter is applied with; of an object, its type."""
    return value if type(value) in PLAIN else f"{type(value).__module__}.{type(value).__qualname__}"
