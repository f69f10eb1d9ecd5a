"""
Rotary frequencies that depend on the length of the text: longrope and dynamic NTK.

Such a model computes other keys for the same tokens once a text has outgrown the length that it was trained on, so
rows of different frequencies must not meet. Rows are kept apart by a fingerprint of the frequencies that computed
them (their regime). Transformers keeps the state in the rotary module and changes it in the forward; a request starts
from the state of a new model, so that its answer does not depend on the requests before, and leaves the module as it
was found.
"""

import hashlib
import threading
import weakref
from contextlib import contextmanager

import torch

SPARE = ("original_inv_freq", "long_inv_freq")  # copies beside the live frequencies
ATTRIBUTES = ("max_seq_len_cached", "attention_scaling", "long_inv_freq")  # also with a layer type before them

_locks: "weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock]" = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


def rope_types(module: torch.nn.Module) -> dict[str | None, str]:
    """RoPE type of each layer type of a rotary module; the key is None where all layers share one."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return {layer: kind for layer, kind in kinds.items() if isinstance(kind, str)}
    return {None: kinds} if isinstance(kinds, str) else {}


def depends_on_length(kind: str) -> bool:
    """Whether frequencies of this RoPE type change with the length of the text (as transformers decides it)."""
    return "dynamic" in kind or kind == "longrope"


def length_dependent_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Rotary modules whose frequencies depend on the length."""
    return [module for module in model.modules() if any(map(depends_on_length, rope_types(module).values()))]


class RotaryRegimes:
    """
    The length-dependent rotary modules of one model.

    Args:
        model (`torch.nn.Module`): The model. It is referred to weakly.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = weakref.ref(model)
        with _locks_lock:
            self._lock = _locks.setdefault(model, threading.RLock())
        self._own: list | None = None  # state of each module between this request's forwards
        self._found: list = []

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules, in order."""
        return length_dependent_modules(self._model())

    @property
    def keep_history(self) -> bool:
        """Whether a forward's frequencies depend on the forwards before it: dynamic NTK's do, longrope's don't."""
        return any("dynamic" in kind for module in self.modules for kind in rope_types(module).values())

    @property
    def edited(self) -> bool:
        """
        Whether somebody has changed dynamic NTK's frequencies by hand: transformers goes on with them for short texts,
        and a request that starts from a new model's state would not.
        """
        for module in self.modules:
            if any("dynamic" in kind for kind in rope_types(module).values()):
                limits = {int(value) for name, value in vars(module).items() if name.endswith("max_seq_len_cached")}
                untouched = limits == {module.original_max_seq_len}
                pairs = [(name, name.removesuffix("original_inv_freq") + "inv_freq") for name in module._buffers]
                for original, live in pairs:
                    if untouched and original.endswith("original_inv_freq"):
                        if not torch.equal(module._buffers[original], module._buffers[live]):
                            return True
        return False

    def resume(self) -> None:
        """
        Bring the modules to this request's own state, a new model's at first. Other requests wait until `pause`: there
        is one state a model. Both stand around one forward, so that no code of the caller's runs in between.
        """
        self._lock.acquire()
        try:
            modules = self.modules
            self._found = [_state(module) for module in modules]
            for number, module in enumerate(modules):
                if self._own is None:
                    _reset(module)
                else:
                    _restore(module, *self._own[number])
        except BaseException:
            self._lock.release()
            raise

    def pause(self) -> None:
        """Keep the request's state for its next forward, and leave the modules as they were found."""
        try:
            modules = self.modules
            self._own = [_state(module) for module in modules]
            for module, state in zip(modules, self._found, strict=True):
                _restore(module, *state)
        finally:
            self._lock.release()

    @contextmanager
    def cold(self):
        """Inside, the modules are in this request's own state, a new model's at first; then as they were found."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    @contextmanager
    def as_found(self):
        """Around a whole call, whose forwards may also run without the request (Phi-3's, once it drops its cache)."""
        with self._lock:
            modules = self.modules
            found = [_state(module) for module in modules]
        try:
            yield
        finally:
            with self._lock:
                for module, state in zip(modules, found, strict=True):
                    _restore(module, *state)

    def enter(self, length: int) -> bytes:
        """Bring the modules to the state of a forward over `length` tokens, and return its regime."""
        for module in self.modules:
            buffer = next(tensor for name, tensor in module.named_buffers(recurse=False) if name.endswith("inv_freq"))
            states = torch.zeros(1, 1, 1, device=buffer.device)
            last = torch.tensor([[length - 1]], device=buffer.device)
            for layer in rope_types(module):
                module.forward(states, last, **({} if layer is None else {"layer_type": layer}))
        return self.current()

    def current(self) -> bytes:
        """Fingerprint of the live frequencies."""
        digest = hashlib.blake2b(digest_size=16)
        for module in self.modules:
            for name in sorted(module._buffers):
                if name.endswith("inv_freq") and not name.endswith(SPARE):
                    digest.update(module._buffers[name].detach().double().cpu().numpy().tobytes())
        return digest.digest()


def _state(module: torch.nn.Module) -> tuple[dict, dict]:
    """Frequency buffers with copies of their values, and the plain attributes that the forward changes."""
    buffers = {
        name: (buffer, buffer.detach().clone())
        for name, buffer in module._buffers.items()
        if name.endswith("inv_freq")
    }
    return buffers, {name: value for name, value in vars(module).items() if name.endswith(ATTRIBUTES)}


def _reset(module: torch.nn.Module) -> None:
    """As after construction. New tensors, since some types write into theirs in place."""
    for name, buffer in list(module._buffers.items()):
        if name.endswith("original_inv_freq"):
            live = name.removesuffix("original_inv_freq") + "inv_freq"
            module._buffers[live] = buffer.detach().clone()
    for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
        setattr(module, name, module.original_max_seq_len)


def _restore(module: torch.nn.Module, buffers: dict, attributes: dict) -> None:
    for name in [name for name in module._buffers if name.endswith("inv_freq") and name not in buffers]:
        del module._buffers[name]
    for name, (buffer, values) in buffers.items():
        module._buffers[name] = buffer
        if not torch.equal(buffer, values):
            with torch.no_grad():
                buffer.copy_(values)
    for name in [name for name in vars(module) if name.endswith(ATTRIBUTES) and name not in attributes]:
        delattr(module, name)
    for name, value in attributes.items():
        setattr(module, name, value)
