"""Which rows may meet: those of one model that computes as it did when they were stored."""

import threading
import weakref
from dataclasses import dataclass, field

import torch

# what changes a module's arithmetic without touching a tensor: scales, windows, and the state of peft's layers
SETTINGS = (
    "scaling",
    "attention_scaling",
    "sliding_window",
    "_active_adapter",
    "_disable_adapters",
    "merged_adapters",
)
OURS = ("hf_suffix_cache.", "transformers.")


@dataclass(eq=False)
class Identity:
    """
    One state of one model. Rows are stored under the identity that computed them.

    Args:
        model (`weakref.ref`): The model.
        tensors (`list`): Weak reference, address and version counter of each of its tensors. The reference tells a
            new tensor at the address of a freed one from the old one.
        settings (`tuple`): What else its modules compute with, see `module_settings`.
    """

    model: weakref.ref
    tensors: list = field(repr=False)
    settings: tuple = field(repr=False)

    def still_holds(self, tensors: list, settings: tuple) -> bool:
        """Whether the model's tensors and settings are those of this identity."""
        return (
            len(tensors) == len(self.tensors)
            and settings == self.settings
            and all(
                reference() is tensor and (address, version) == _state(tensor)
                for tensor, (reference, address, version) in zip(tensors, self.tensors, strict=True)
            )
        )


class IdentityTable:
    """The current identity of each model."""

    def __init__(self):
        self._lock = threading.Lock()  # two threads at a model's first use must get one identity
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, Identity] = weakref.WeakKeyDictionary()

    def get(self, model: torch.nn.Module) -> tuple[Identity, Identity | None]:
        """The model's identity now, and the one it had before if it has changed."""
        modules = list(model.modules())
        tensors = [
            tensor
            for module in modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ]
        settings = module_settings(modules)
        with self._lock:
            known = self._known.get(model)
            if known is not None and known.still_holds(tensors, settings):
                return known, None
            states = [(weakref.ref(tensor), *_state(tensor)) for tensor in tensors]
            current = self._known[model] = Identity(weakref.ref(model), states, settings)
            return current, known

    def lost(self, identity: Identity) -> bool:
        """Whether the model is gone."""
        return identity.model() is None


def module_settings(modules: list[torch.nn.Module]) -> tuple:
    """Settings, foreign hooks and replaced forwards of all modules, in order."""
    found = []
    for number, module in enumerate(modules):
        own = module.__dict__
        for name in SETTINGS:
            if name in own:
                found.append((number, name, repr(own[name])))
        if "forward" in own:
            found.append((number, "forward", id(own["forward"])))
        if module._forward_hooks or module._forward_pre_hooks:
            # torch numbers all hooks of a process: unlike an address, a number is never given twice
            hooks = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
            found += [(number, "hook", key) for key, hook in hooks if not _is_ours(hook)]
    return tuple(found)


def _is_ours(hook) -> bool:
    """Hooks of this package, and those with which transformers collects outputs, change no row."""
    return (getattr(hook, "__module__", None) or "").startswith(OURS)


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and version counter; tensors made in inference mode have no counter."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version
