"""What a model computes with besides its tensors: plain attributes, configs, hooks, replaced forwards."""

import operator
import sys
import types
import weakref
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch.nn.modules import module as torch_module

from .adapters import PLAIN, Adapters, is_adapter
from .serials import Serials
from .tensors import Special, leaves, offloading_hooks, own_tensors, rope_prefixes

OURS = ("hf_suffix_cache.", "transformers.")
# what changes without a change of any row: flags of torch's and transformers' own book-keeping
KEEPING = {*vars(torch.nn.Module()), "_is_hf_initialized", "all_tied_weights_keys", "_no_split_modules"} - {"training"}
KEEPING |= {f"_{kind}_plan" for kind in ("tp", "ep", "pp", "fsdp")} | {"_skip_keys_device_placement"}
KEEPING |= {"_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_keys_to_ignore_on_save"}
KEEPING |= {"_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"}
KEEPING |= {"_previous_max_cache_length", "_is_torch_compile", "_last_compile_config", "_compiled_call"}
# attention is asked for separately: a pass of ours changes it for a while; and transformers switches the kernel
# of experts while it decodes
SWITCHED = {"_attn_implementation_internal", "_experts_implementation_internal"}
SMALL = 64  # entries of a list or dict, and elements of a tensor, that is kept as a plain attribute


@dataclass
class Reading:
    """
    A model's state at one moment. Holds tensors and modules: for use within one call only.

    Args:
        tensors (`list[torch.Tensor]`): All that act, in the order of the modules.
        values (`list`): Plain values, compared as they are.
        hooks (`list[tuple]`): Place and torch's number of all foreign hooks: a number is given once in a process.
        serials (`list[int]`): Numbers of replaced forwards, accelerate's hooks, classes' forwards and other objects.
    """

    tensors: list = field(default_factory=list)
    values: list = field(default_factory=list)
    hooks: list = field(default_factory=list)
    serials: list = field(default_factory=list)


class Stale(Exception):
    """The model's modules or their attributes are other ones than at the last look."""


def effective_modules(model: torch.nn.Module, adapters: Adapters, reading: Reading) -> list[torch.nn.Module]:
    """
    Modules that act in a forward, breadth first, each once: wrapped modules stand in the place of adapter layers in
    which nothing is switched on. Adapters' own tensors and settings are added to the reading.
    """
    modules, seen = [adapters.awake(model)], {id(model)}
    for module in modules:
        children = module._modules
        if not children:
            continue
        if getattr(type(module), "adapter_layer_names", None) is None:
            children = children.values()
        else:
            children = adapters.acting(module, reading.tensors, reading.values)
        for child in children:
            if child is None:
                continue
            if child._modules and getattr(type(child), "adapter_layer_names", None) is not None:
                child = adapters.awake(child)
            if id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return modules


class Scan:
    """
    Where a model's settings are to be found; made anew when its modules or their attributes are other ones. Holds
    names, numbers and weak references.

    Args:
        modules (`list[torch.nn.Module]`): Effective modules.
        serials (`Serials`): Numbers of objects.
    """

    def __init__(self, modules: list[torch.nn.Module], serials: Serials):
        self._serials = serials
        self._modules = [weakref.ref(module) for module in modules]
        self._sizes = [len(module.__dict__) for module in modules]
        self._getters, self._containers, self._tensors, self._objects = [], [], [], []
        self._special: dict[int, Special] = {}
        self._find_special(modules)
        for index, module in enumerate(modules):
            self._sort_attributes(index, module)
        namespaces = dict.fromkeys(type(module).__module__ for module in modules)
        self._functions = [
            (namespace, name)
            for namespace in namespaces
            if not namespace.startswith("torch.")
            for name, value in vars(sys.modules.get(namespace, types)).items()
            if isinstance(value, types.FunctionType)
        ]

    def fits(self, modules: list[torch.nn.Module]) -> bool:
        """Whether these are the modules that were looked at, with as many attributes."""
        return [reference() for reference in self._modules] == modules and self._sizes == [
            len(module.__dict__) for module in modules
        ]

    def read(self, modules: list[torch.nn.Module], reading: Reading) -> None:
        """Fill a reading; raises `Stale` if an attribute is gone or has another kind of value."""
        owned = [module.__dict__ for module in modules]
        try:
            values = [getter(own) for getter, own in zip(self._getters, owned, strict=True)]
            if not PLAIN.issuperset(map(type, chain.from_iterable(values))):
                raise Stale
            reading.values += values
            reading.values += [repr(owned[index][name]) for index, name in self._containers]
            self._read_tensors(modules, owned, reading)
            reading.serials += [self._serials.of(owned[index][name]) for index, name in self._objects]
        except KeyError:
            raise Stale from None
        for config in {id(own["config"]): own["config"] for own in owned if "config" in own}.values():
            reading.values.append(_config_values(config))
        self._read_code(modules, owned, reading)

    def _read_tensors(self, modules, owned, reading: Reading) -> None:
        tensors = reading.tensors
        for index, module in enumerate(modules):
            if index in self._special:
                own_tensors(module, self._special[index], tensors, reading.values)
                continue
            if module._parameters:
                tensors += module._parameters.values()
            if module._buffers:
                tensors += module._buffers.values()
        for index, name in self._tensors:
            tensor = owned[index][name]
            if not isinstance(tensor, torch.Tensor):
                raise Stale
            if tensor.numel() <= SMALL and not tensor.is_meta:
                reading.values.append((name, str(tensor.dtype), repr(tensor.tolist())))
            else:
                tensors.append(tensor)
        reading.tensors = tensors = [tensor for tensor in tensors if tensor is not None]
        if not {torch.Tensor, torch.nn.Parameter}.issuperset(map(type, tensors)):
            reading.tensors = [leaf for tensor in tensors for leaf in leaves(tensor)]

    def _read_code(self, modules, owned, reading: Reading) -> None:
        """Hooks, forwards of instances and classes, functions beside the classes."""
        number = self._serials.of
        hooked = [(0, torch_module._global_forward_pre_hooks), (0, torch_module._global_forward_hooks)]
        for index, module in enumerate(modules):
            if module._forward_pre_hooks or module._forward_hooks:
                hooked += [(index, module._forward_pre_hooks), (index, module._forward_hooks)]
        reading.hooks += [(index, key) for index, hooks in hooked for key, hook in hooks.items() if not _is_ours(hook)]
        for name in ("forward", "_hf_hook"):
            replaced = [(index, number(own[name])) for index, own in enumerate(owned) if name in own]
            reading.values.append((name, tuple(replaced)))
            reading.serials += [serial for _, serial in replaced]
        for kind in dict.fromkeys(map(type, modules)):
            reading.serials += (number(kind), number(kind.forward))
        for namespace, name in self._functions:
            reading.serials.append(number(getattr(sys.modules[namespace], name, None)))

    def _find_special(self, modules: list[torch.nn.Module]) -> None:
        places = {id(module): index for index, module in enumerate(modules)}
        for index, module in enumerate(modules):
            prefixes = rope_prefixes(module)
            if prefixes:
                self._special.setdefault(index, Special()).prefixes = prefixes
            for hook in offloading_hooks(module.__dict__.get("_hf_hook")):
                inside = module.named_modules() if getattr(hook, "place_submodules", False) else [("", module)]
                for path, each in inside:
                    if id(each) in places:
                        special = self._special.setdefault(places[id(each)], Special())
                        special.maps.append((weakref.ref(module), f"{path}." if path else ""))

    def _sort_attributes(self, index: int, module: torch.nn.Module) -> None:
        """Find out which of a module's attributes to read how."""
        special = self._special.get(index)
        plain = []
        for name, value in module.__dict__.items():
            if name in KEEPING or (special is not None and special.recomputes(name)):
                continue
            if type(value) in PLAIN:
                plain.append(name)
            elif type(value) in (dict, list, tuple):
                if not is_adapter(module) and _is_plain_container(value):
                    self._containers.append((index, name))
            elif isinstance(value, torch.Tensor):
                self._tensors.append((index, name))
            elif isinstance(value, torch.ScriptObject):  # packed weights of torch's dynamic quantisation
                self._objects.append((index, name))
        # of one name an itemgetter returns the bare value, of two or more a tuple
        self._getters.append(operator.itemgetter("training", "training", *plain))


def _config_values(config) -> tuple:
    """Plain values of a config object."""
    return tuple(
        (name, value if type(value) in PLAIN else repr(value))
        for name, value in list(vars(config).items())
        if name not in SWITCHED and (type(value) in PLAIN or _is_plain_container(value))
    )


def _is_plain_container(value, depth: int = 2) -> bool:
    """Whether a value is a small dict, list or tuple of plain values, or of such containers."""
    if type(value) not in (dict, list, tuple) or len(value) > SMALL:
        return False
    inside = value.values() if type(value) is dict else value
    return all(type(each) in PLAIN or (depth > 0 and _is_plain_container(each, depth - 1)) for each in inside)


def _is_ours(hook) -> bool:
    """Hooks of this package, and those with which transformers collects outputs, change no row."""
    return (getattr(hook, "__module__", None) or "").startswith(OURS)
