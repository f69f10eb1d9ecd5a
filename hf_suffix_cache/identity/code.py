"""Functions with which a model computes: those of its modules' classes, and those beside them in the source file."""

import functools
import sys
import types
import weakref
from itertools import chain

import torch

from .adapters import PLAIN
from .contents import Contents
from .serials import Serials

# classes of all models, generate() among their methods: ours and other packages wrap some of these
EVERYBODYS = {*torch.nn.Module.__mro__}
LIBRARY = ("transformers.", "peft.", "accelerate.")
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools.partial)
WRAPPERS = (staticmethod, classmethod, property)
SILENT = (type, types.MemberDescriptorType, types.GetSetDescriptorType)


class Code:
    """
    Finds out whether functions were replaced. All values of a class or file are listed by address, which tells within
    microseconds whether any is another one: functions are known to live, and plain values are held here.

    Args:
        serials (`Serials`): Numbers of objects.
        keeping (`set[str]`): Names of attributes that change no row.
    """

    def __init__(self, serials: Serials, keeping: set[str]):
        self._serials = serials
        self._keeping = keeping
        self._kinds: list[int] = []
        self._classes: list[weakref.ref] = []
        self._files: list[str] = []
        self._addresses: list[int] = []
        self._numbers: list[int] = []
        self._held: list = []
        self._values: tuple = ()
        self._looked_at: list[tuple] = []

    def read(self, modules: list[torch.nn.Module], contents: Contents, values: list, numbers: list) -> None:
        """Add what was found: plain values and places to `values`, numbers of functions and classes to `numbers`."""
        kinds = dict.fromkeys(map(type, modules))
        kind_numbers = [self._serials.of(kind) for kind in kinds]
        classes = [reference() for reference in self._classes]
        if kind_numbers != self._kinds or None in classes:
            classes = list(dict.fromkeys(each for kind in kinds for each in kind.__mro__ if _is_own(each)))
            self._classes = [weakref.ref(each) for each in classes]
            self._files = _files(kinds)
            self._kinds, self._addresses = kind_numbers, []
        spaces = [vars(each) for each in classes] + [vars(sys.modules.get(file, types)) for file in self._files]
        addresses = list(map(id, chain.from_iterable(space.values() for space in spaces)))
        if addresses != self._addresses or not self._serials.alive(self._numbers):
            self._list(spaces)
            self._addresses = addresses
        numbers += kind_numbers
        numbers += self._numbers
        values.append(self._values)
        for index, name in self._looked_at:
            value = spaces[index].get(name)
            if isinstance(value, property):
                value = (value.fget, value.fset)
            elif isinstance(value, WRAPPERS):
                value = value.__func__
            values.append(contents.of(value))

    def _list(self, spaces: list) -> None:
        number, numbers, self._held, values, self._looked_at = self._serials.of, [], [], [], []
        for index, space in enumerate(spaces):
            of_class = index < len(self._classes)
            for name, value in sorted(list(space.items())):
                if isinstance(value, FUNCTIONS):
                    numbers.append(number(value))
                    values.append((index, name, numbers[-1]))
                elif name in self._keeping or name.endswith(("__", "_cached_value")):  # transformers' own findings
                    continue
                elif type(value) in PLAIN:
                    self._held.append(value)
                    values.append((index, name, repr(value)))
                elif of_class and not isinstance(value, SILENT):
                    values.append((index, name))
                    self._looked_at.append((index, name))
        self._numbers, self._values = numbers, tuple(values)


def _is_own(kind: type) -> bool:
    """Whether a class says how one kind of module computes."""
    if kind in EVERYBODYS or kind.__module__ == "transformers.modeling_utils":
        return False
    own = kind.__module__.startswith("transformers.models.")
    return own or issubclass(kind, torch.nn.Module) or not kind.__module__.startswith(LIBRARY)


def _files(kinds) -> list[str]:
    """Names of the source files of classes, but torch's."""
    names = dict.fromkeys(kind.__module__ for kind in kinds)
    return [name for name in names if not name.startswith("torch.") and name in sys.modules]
