"""
A model's settings as another process has them too, so that saved rows find their model again.

Within a process functions and other objects are told apart by numbers. Here functions are described by what they do:
their code, their defaults, and what they close over as far as that is plain values and functions; classes by their
name; arrays by their content. What can't be described, and any foreign hook, means that there is no such description:
rows of such a model are not saved.
"""

import functools
import hashlib
import types

import numpy as np
import torch

from .adapters import PLAIN
from .serials import Serial, Serials


class _Untold(Exception):
    """Something that can't be told in another process."""


def portable(values: list, hooks: list, numbers: list, serials: Serials) -> str | None:
    """
    Hash of what was read of a model (see `Reading`), equal in every process; None where that can't be told.

    Args:
        values (`list`), hooks (`list`), numbers (`list`): Of the reading.
        serials (`Serials`): Who gave the numbers.
    """
    if hooks:
        return None
    try:
        text = repr(_Description(serials).of([values, numbers]))
    except _Untold:
        return None
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class _Description:
    """Describes values; each object once."""

    def __init__(self, serials: Serials):
        self._things = serials.things()
        self._known: dict[int, tuple] = {}  # with the objects, so that no other one gets their address

    def of(self, value):
        """The value, with descriptions in the places of numbers of objects."""
        kind = type(value)
        if kind is Serial:
            if value not in self._things:
                raise _Untold
            return self._thing(self._things[value])
        if kind in (list, tuple):
            return [self.of(each) for each in value]
        return repr(value)

    def _thing(self, thing):
        if id(thing) not in self._known:
            self._known[id(thing)] = thing, type(thing).__qualname__  # while it is described: it may refer to itself
            self._known[id(thing)] = thing, self._described(thing)
        return self._known[id(thing)][1]

    def _described(self, thing):
        if isinstance(thing, type):
            return "class", thing.__module__, thing.__qualname__
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if isinstance(thing, types.MethodType):
            return "method", self._thing(thing.__func__), type(thing.__self__).__qualname__
        if isinstance(thing, functools.partial):
            return "partial", self._thing(thing.func), self._inside(thing.args), self._inside(thing.keywords)
        if isinstance(thing, types.BuiltinFunctionType):
            if not isinstance(thing.__self__, (types.ModuleType, type(None), type)):
                raise _Untold
            return "builtin", thing.__module__, thing.__qualname__
        if isinstance(thing, torch.nn.Module):
            return "module", type(thing).__module__, type(thing).__qualname__
        if isinstance(thing, np.ndarray) and not thing.dtype.hasobject:
            digest = hashlib.blake2b(np.ascontiguousarray(thing), digest_size=16)
            return "array", thing.dtype.str, thing.shape, digest.hexdigest()
        if isinstance(getattr(thing, "__wrapped__", None), types.FunctionType):  # of functools.lru_cache, for example
            return type(thing).__qualname__, self._thing(thing.__wrapped__)
        raise _Untold

    def _function(self, function: types.FunctionType):
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self._inside(cell.cell_contents))
            except ValueError:  # empty
                cells.append("nothing")
        defaults = self._inside(function.__defaults__), self._inside(function.__kwdefaults__)
        return function.__module__, function.__qualname__, self._code(function.__code__), defaults, cells

    def _inside(self, value):
        """What a function holds: plain values and functions, of other objects their class."""
        if type(value) in PLAIN:
            return repr(value)
        if isinstance(value, (list, tuple)):
            return [self._inside(each) for each in value]
        if isinstance(value, dict):
            return [[self._inside(key), self._inside(each)] for key, each in value.items()]
        if isinstance(value, (type, types.FunctionType, types.MethodType, functools.partial)):
            return self._thing(value)
        return type(value).__module__, type(value).__qualname__

    def _code(self, code: types.CodeType):
        return code.co_code.hex(), code.co_names, [self._constant(each) for each in code.co_consts]

    def _constant(self, value):
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, frozenset):  # in another order in each process
            return sorted(repr(self._constant(each)) for each in value)
        if isinstance(value, tuple):
            return [self._constant(each) for each in value]
        return repr(value)
