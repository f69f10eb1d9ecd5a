"""What an attribute holds, as values that can be compared later: by content where it is known, else by object."""

import collections
import dataclasses
import decimal
import fractions
import functools
import hashlib
import pathlib
import types

import numpy as np
import torch

from .adapters import PLAIN
from .serials import Serials

# attention is asked for separately: a pass of ours changes it for a while; and transformers switches the kernel
# of experts while it decodes
SWITCHED = {"_attn_implementation_internal", "_experts_implementation_internal"}
# what a config says of the form of outputs, and of where it was saved
SILENT = {"use_cache", "return_dict", "output_hidden_states"}
SILENT |= {"architectures", "transformers_version", "_name_or_path", "_commit_hash"}
SMALL = 64  # elements of a tensor that is kept by value
LONG = 4096  # characters of a description, beyond which its hash is kept; elements of an array that are read
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)
WRITTEN_OUT = (np.generic, np.dtype, torch.Size, decimal.Decimal, fractions.Fraction, pathlib.PurePath)
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
HEAP_TYPE = 1 << 9  # CPython's flag of classes that Python code defines


class Contents:
    """
    Describes what attributes hold. Plain values, numpy's numbers and arrays, configs and dataclasses are taken by
    content, to any depth of lists and dicts; tensors among them join the model's; anything else gets a number for as
    long as it lives, so that it is seen when it is replaced. An object of a class with `__slots__` and without
    `__weakref__` never equals itself: its rows are not reused.

    Args:
        serials (`Serials`): Numbers of objects.
        modules (`set[int]`): Addresses of modules that are read anyway.
        tensors (`list[torch.Tensor]`), numbers (`list[int]`): Tensors and numbers of objects are added to these.
    """

    def __init__(self, serials: Serials, modules: set[int], tensors: list, numbers: list):
        self._serials = serials
        self._modules = modules
        self._tensors = tensors
        self._numbers = numbers
        self._open: set[int] = set()  # what is being described: a container may hold itself

    def of(self, value):
        """Something that equals what it was as long as the value is as it was."""
        kind = type(value)
        if kind in PLAIN:
            return repr(value)
        if issubclass(kind, FUNCTIONS):
            return self._number(value)
        if issubclass(kind, torch.Tensor):
            return self._tensor(value)
        if issubclass(kind, torch.nn.Module):
            if id(value) not in self._modules:
                self._tensors += (*value.parameters(), *value.buffers())
            return self._number(value)
        if issubclass(kind, WRITTEN_OUT):
            return kind.__name__, repr(value)
        if issubclass(kind, np.ndarray):
            return self._array(value)
        if issubclass(kind, CONTAINERS + VIEWS):
            return self._within(value, self._container)
        if _has_fields(kind, value):
            return self._within(value, self._fields)
        text = _written_out(kind, value)
        return self._number(value) if text is None else (kind.__name__, text)

    def of_config(self, config):
        """A config, also one of a class that is not transformers' own."""
        if isinstance(config, CONTAINERS) or not hasattr(config, "__dict__"):
            return self.of(config)
        return self._within(config, self._fields)

    def _number(self, value) -> int:
        number = self._serials.of(value)
        self._numbers.append(number)
        return number

    def _within(self, value, describe) -> tuple | str:
        if id(value) in self._open:
            return "itself"
        self._open.add(id(value))
        try:
            return describe(value)
        finally:
            self._open.discard(id(value))

    def _tensor(self, tensor: torch.Tensor) -> tuple:
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() <= SMALL:
            return str(tensor.dtype), tuple(tensor.shape), repr(tensor.tolist())
        self._tensors.append(tensor)
        return str(tensor.dtype), tuple(tensor.shape)

    def _array(self, array: np.ndarray) -> tuple:
        head = (array.dtype.str, array.shape)
        if array.dtype.hasobject:
            return *head, self._number(array)
        if array.size <= LONG:
            return *head, hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
        elements = array.flat[:: array.size // LONG]
        return *head, hashlib.blake2b(elements.tobytes(), digest_size=16).hexdigest(), self._number(array)

    def _container(self, value) -> tuple | str:
        kind = type(value)
        if issubclass(kind, dict):
            keys, inside = list(dict.keys(value)), list(dict.values(value))
            parts = [*keys, *inside]
        else:
            parts = list(value)
        if PLAIN.issuperset(map(type, parts)):
            if issubclass(kind, (set, frozenset)):
                parts = sorted(map(repr, parts))
            text = f"{kind.__name__} {len(parts)} {parts}"
            return text if len(text) <= LONG else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        described = [self.of(part) for part in parts]
        if issubclass(kind, (set, frozenset)):
            described.sort(key=repr)
        return kind.__name__, *described

    def _fields(self, value) -> tuple:
        """A config, a dataclass or a namespace; raises no error for one that another thread changes."""
        if hasattr(value, "__dict__"):
            fields = list(vars(value).items())
        else:  # a dataclass with slots
            fields = [(each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value)]
        return type(value).__qualname__, *[
            (name, each if type(each) in PLAIN else self.of(each))
            for name, each in fields
            if name not in SWITCHED and name not in SILENT
        ]


def _has_fields(kind: type, value) -> bool:
    """Whether an object is nothing but its fields: transformers' configs, dataclasses and namespaces."""
    if dataclasses.is_dataclass(kind):
        return True
    return (issubclass(kind, types.SimpleNamespace) or hasattr(kind, "model_type")) and hasattr(value, "__dict__")


def _written_out(kind: type, value) -> str | None:
    """What Python's and torch's own values say of themselves if they can't be referred to weakly, and say all."""
    if kind.__weakrefoffset__ or kind.__flags__ & HEAP_TYPE:
        return None
    text = repr(value)
    return None if " at 0x" in text or "vectorized" in text or kind is object else text  # `np.frompyfunc`
