"""What a model computes with besides its tensors: plain attributes, configs, hooks, replaced forwards."""

import hashlib
import operator
import types
import weakref
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch.nn.modules import module as torch_module

from .adapters import PLAIN, Adapters, is_adapter
from .code import Code
from .contents import CONTAINERS, Contents
from .serials import Serials
from .tensors import Special, leaves, offloading_hooks, own_tensors, rope_prefixes

OURS = ("hf_suffix_cache.", "transformers.")
# what changes without a change of any row: flags of torch's and transformers' own book-keeping
KEEPING = {*vars(torch.nn.Module()), "_is_hf_initialized", "all_tied_weights_keys", "_no_split_modules"} - {"training"}
KEEPING |= {f"_{kind}_plan" for kind in ("tp", "ep", "pp", "fsdp")} | {"_skip_keys_device_placement"}
KEEPING |= {"_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_keys_to_ignore_on_save"}
KEEPING |= {"_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_weight_conversions"}
KEEPING |= {"_previous_max_cache_length", "_is_torch_compile", "_last_compile_config", "_compiled_call"}
KEEPING |= {"_compiled_call_impl", "name_or_path"}
KEEPING |= {"_output_capturing_hooks_installed", "_can_record_outputs", "_tied_weights_keys", "_abc_impl"}
# how a call generates, how gradients flow, what a loss is
KEEPING |= {"generation_config", "gradient_checkpointing", "_gradient_checkpointing_func", "_loss_function"}
KEEPING |= {"_require_grads_hook", "_require_grads_hooks"}
# adapters are read as far as they act
KEEPING |= {"peft_config", "_hf_peft_config_loaded"}
# read with the code
APART = {"forward", "_hf_hook"}


@dataclass
class Reading:
    """
    A model's state at one moment. Holds tensors and modules: for use within one call only.

    Args:
        tensors (`list[torch.Tensor]`): All that act, in the order of the modules.
        values (`list`): Plain values, compared as they are.
        hooks (`list[tuple]`): Place and torch's number of all foreign hooks: a number is given once in a process.
        serials (`list[int]`): Numbers of replaced forwards, accelerate's hooks, functions of classes and source files,
            and other objects.
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
        self._addresses = set(map(id, modules))
        self._getters, self._others, self._own_methods, self._names = [], [], [], []
        self._special: dict[int, Special] = {}
        self._find_special(modules)
        for index, module in enumerate(modules):
            self._sort_attributes(index, module)
        # values are read without names
        self._layout = hashlib.blake2b(repr(self._names).encode(), digest_size=16).hexdigest()
        self._code = Code(serials, KEEPING)

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
            reading.values.append(self._layout)
            contents = Contents(self._serials, self._addresses, reading.tensors, reading.serials)
            self._read_tensors(modules, reading)
            for index, name in self._own_methods:
                if not _is_own_method(modules[index], name, owned[index][name]):
                    raise Stale
            for index, name, kind in self._others:
                value = owned[index][name]
                if type(value) is not kind:
                    raise Stale
                reading.values.append(contents.of(value))
        except KeyError:
            raise Stale from None
        for config in {id(own["config"]): own["config"] for own in owned if "config" in own}.values():
            reading.values.append(contents.of_config(config))
        self._read_code(modules, owned, contents, reading)
        reading.tensors = tensors = [tensor for tensor in reading.tensors if tensor is not None]
        if not {torch.Tensor, torch.nn.Parameter}.issuperset(map(type, tensors)):
            reading.tensors = [leaf for tensor in tensors for leaf in leaves(tensor)]

    def _read_tensors(self, modules, reading: Reading) -> None:
        tensors = reading.tensors
        for index, module in enumerate(modules):
            if index in self._special:
                own_tensors(module, self._special[index], tensors, reading.values)
                continue
            if module._parameters:
                tensors += module._parameters.values()
            if module._buffers:
                tensors += module._buffers.values()

    def _read_code(self, modules, owned, contents: Contents, reading: Reading) -> None:
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
        self._code.read(modules, contents, reading.values, reading.serials)

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
        for name, value in sorted(list(module.__dict__.items())):
            if name in KEEPING or name in APART or (special is not None and special.recomputes(name)):
                continue
            kind = type(value)
            if kind in PLAIN:
                plain.append(name)
            elif _is_own_method(module, name, value):
                self._own_methods.append((index, name))
            elif name == "config" or (issubclass(kind, CONTAINERS) and is_adapter(module)):
                continue  # configs are read once each, adapters' choices and numbers where they act
            else:
                self._others.append((index, name, kind))
                self._names.append((index, name))
        self._names.append((index, *plain))
        # of one name an itemgetter returns the bare value, of two or more a tuple
        self._getters.append(operator.itemgetter("training", "training", *plain))


def _is_own_method(module: torch.nn.Module, name: str, value) -> bool:
    """Whether an attribute is the method that the module has without it; peft's prompt learning leaves one."""
    if type(value) is not types.MethodType or value.__self__ is not module:
        return False
    return getattr(type(module), name, None) is value.__func__


def _is_ours(hook) -> bool:
    """Hooks of this package, and those with which transformers collects outputs, change no row."""
    return (getattr(hook, "__module__", None) or "").startswith(OURS)
