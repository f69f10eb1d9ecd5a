"""The capabilities that have been measured, by model and state."""

import hashlib
import threading
import weakref
from collections import OrderedDict

import torch
import transformers
from transformers import PreTrainedModel

from .attention import own_implementation
from .capability import Capability, input_device
from .measurement import measure

KEPT = 64  # states (adapters, hooks, settings) whose measurement is remembered


class CapabilityTable:
    """
    Measurements, taken once for each state of a model (dtype, device, attention implementation, settings and weights),
    and shared by models of one class, config, and state. A measurement that failed is not kept.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._known: weakref.WeakKeyDictionary[PreTrainedModel, OrderedDict] = weakref.WeakKeyDictionary()
        self._shared: OrderedDict[tuple, Capability] = OrderedDict()

    def get(self, model: PreTrainedModel, settings="") -> tuple[Capability, int]:
        """
        The model's capability and the rows that were run to measure it now (0 if it was known). `settings` is whatever
        else a measurement depends on.
        """
        state = _state(model, settings)
        with self._lock:
            known = self._known.setdefault(model, OrderedDict())
            if state in known:
                known.move_to_end(state)
                return known[state], 0
        shared = (config_fingerprint(model), *state)
        capability, rows = self._shared.get(shared), 0
        if capability is None:
            # without the lock: a measurement may wait for another thread's request, which may need the table
            capability = measure(model)
            rows = capability.rows
        if not capability.failed:
            with self._lock:
                for table, key in ((known, state), (self._shared, shared)):
                    table[key] = capability
                    if len(table) > KEPT:
                        table.popitem(last=False)
        return capability, rows

    def known(self, model: PreTrainedModel, settings="") -> Capability | None:
        """The model's capability if it was measured before; nothing is run."""
        state = _state(model, settings)
        with self._lock:
            found = self._known.get(model, {}).get(state)
            return found or self._shared.get((config_fingerprint(model), *state))


def _state(model: PreTrainedModel, settings) -> tuple:
    return model.dtype, str(input_device(model)), own_implementation(model), settings


def config_fingerprint(model: PreTrainedModel) -> str:
    """Class, config, layer placement and versions: what a measurement depends on beside a model's state."""
    kind = type(model)
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    parts = (
        f"{kind.__module__}.{kind.__qualname__}",
        model.config.to_json_string(),
        repr(getattr(model, "hf_device_map", devices)),
        transformers.__version__,
        torch.__version__,
    )
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
