"""After the answer: approximate conversations are run again exactly, at once or in the background."""

import atexit
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .capability import Capability, cache_argument, input_device
from .config import UnsupportedModelError
from .generation import at_uninstall, closing, hooked
from .identity.adapters import is_adapter
from .inputs import Refused
from .store.scopes import Scope
from .store.shelf import Sequence
from .store.store import Store

logger = logging.getLogger("hf_suffix_cache")

MAX_WAITING = 64  # conversations that wait to be settled in the background; the oldest ones give way


@dataclass(frozen=True)
class Settlement:
    """
    What settling did.

    Args:
        tokens (`int`): Tokens of the conversation that is exact now; 0 if none had to be settled, or its exact rows
            found no room in the store.
        rows (`int`): Rows that were run: those behind what was exact already.
        seconds (`float`): What it took.
    """

    tokens: int = 0
    rows: int = 0
    seconds: float = 0.0


# -- running text exactly -------------------------------------------------------------------------------------------


def exact_rerun(handle, model, ids, store: bool = True, with_types: bool = False) -> torch.Tensor:
    """
    Run one sequence exactly: exact rows of the store are reused, and what is computed is stored as exact (`store`)
    and replaces approximate rows of the same conversation. It is no call of the caller's: reports don't know of it,
    no random number is drawn, and its rows are counted in `stats.settled_rows`.

    Args:
        handle (`SuffixCache`): Whose scope it is run in.
        model (`PreTrainedModel`): In eval mode.
        ids (sequence of `int`, `[tokens]`): The text.
        store (`bool`, *optional*, defaults to `True`): Whether to store it.
        with_types (`bool`, *optional*, defaults to `False`): Whether its calls bring token types (all 0).

    Returns:
        `torch.Tensor`: Logits of the last token, `[vocab]`, fp32 on the CPU. Raises `Refused` if reuse can't serve the
        model now.
    """
    return _run(handle, model, ids, store, with_types)[0]


def _run(handle, model, ids, store: bool, with_types: bool) -> tuple[torch.Tensor, int]:
    """The logits of `exact_rerun`, and the rows that it ran."""
    ids = torch.as_tensor(ids, dtype=torch.long).reshape(1, -1).to(input_device(model))
    exact = handle.using(fidelity="exact", store=store)
    request = exact.open_view(model, batch=1, caller_rows=1, prompt_columns=ids.shape[1], new_tokens=1, keep_last=1)
    inputs = {"input_ids": ids, "use_cache": True, "return_dict": True, cache_argument(model): request.view}
    if request.capability.takes_mask:
        inputs["attention_mask"] = torch.ones_like(ids)
    if with_types:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = 1
    with torch.no_grad(), hooked(model), request.as_found(), closing(request):
        logits = model(**inputs).logits[0, -1].float().cpu()
        request.finish()
    rows = request.report.computed_rows
    handle.stats.count_settled(rows)
    return logits, rows


def settle(handle, model) -> Settlement:
    """See `SuffixCache.settle`."""
    if model.training:  # nothing of what is stored is this model's
        raise UnsupportedModelError("a model in training mode can't be settled; call model.eval() first.")
    found = next(iter(handle.approximate_conversations(model)), None)
    if found is None:
        return Settlement()
    try:
        return _settle(handle, model, *found)
    except Refused as refusal:
        raise UnsupportedModelError(f"this {type(model).__name__} can't be settled now: {refusal}.") from refusal


def settle_answer(model, request, settler: "Settler", background: bool, revive: Callable) -> None:
    """
    Settle what a call has stored, its last row first: at once, or in the background. The answer is out, so a fault is
    logged and not raised.

    `revive` gives a handle of the call's scope, or None once its store is gone.
    """
    approximate = [sequence for sequence in request.stored if sequence.exact < len(sequence.ids)]
    jobs = [_Job(revive, weakref.ref(model), weakref.ref(each), request.with_types) for each in approximate]
    if background and jobs and not _runs_alone(model, request.capability):
        for job in jobs:
            settler.put(job)
    else:
        for job in reversed(jobs):
            job.run()


def _runs_alone(model, capability: Capability) -> bool:
    """
    Whether forwards of the model can't run side by side with what its caller does meanwhile: frequencies that depend
    on the length lie in buffers that all of them share, offloaded weights come and go with each one, and adapters may
    be switched and switched back while one runs.
    """
    alone = any(hasattr(module, "_hf_hook") or is_adapter(module) for module in model.modules())
    return capability.length_dependent or alone


def _settle(handle, model, sequence, with_types: bool) -> Settlement:
    started = time.perf_counter()
    _, rows = _run(handle, model, sequence.ids, True, with_types)
    kept = (sequence, with_types) in handle.approximate_conversations(model)
    return Settlement(0 if kept else len(sequence.ids), rows, time.perf_counter() - started)


def approximate_conversations(store: Store, identity, scope: Scope) -> list[tuple[Sequence, bool]]:
    """The conversations of a model and a scope that are not exact, see `SuffixCache.approximate_conversations`."""
    with store.lock:
        found = [
            (sequence, place.with_types)
            for (owner, place), shelf in store.shelves.items()
            if owner is identity and place.scope == scope
            for sequence in shelf.sequences
            if sequence.exact < len(sequence.ids) and not sequence.busy
        ]
    return sorted(found, key=lambda each: -each[0].last_used)


# -- in the background ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """A conversation to settle, which keeps neither it nor store nor model alive."""

    revive: Callable
    model: weakref.ref
    sequence: weakref.ref
    with_types: bool

    def run(self) -> None:
        """Settle it, if it is all still there and not settled or continued meanwhile. Faults are logged."""
        handle, model, sequence = self.revive(), self.model(), self.sequence()
        if handle is None or model is None or sequence is None:
            return
        try:
            if (sequence, self.with_types) in handle.approximate_conversations(model):
                _settle(handle, model, sequence, self.with_types)
        except Refused:
            logger.debug("not settled", exc_info=True)
        except Exception:
            logger.warning("settling failed, the conversation stays approximate", exc_info=True)


class Settler:
    """
    Settles in a daemon thread of its own, the newest conversation first. The thread lives while there is work.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
        self._thread: threading.Thread | None = None
        _settlers.add(self)

    def put(self, job: _Job) -> None:
        """Settle another conversation, before those that wait already."""
        with self._changed:
            self._jobs = [*self._jobs, job][-MAX_WAITING:]
            if not self._works():
                self._thread = threading.Thread(target=self._work, name="hf_suffix_cache settling", daemon=True)
                self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; False if that took longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._works(), timeout)

    def stop(self) -> None:
        """Drop what waits, and let the running job come to its end."""
        with self._changed:
            self._jobs = []
        self.wait()

    def _works(self) -> bool:
        return self._thread is not None and self._thread.is_alive()  # in a forked process it is not

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job = self._jobs.pop()
            job.run()
            del job


_settlers: "weakref.WeakSet[Settler]" = weakref.WeakSet()


def _stop_all() -> None:
    for settler in list(_settlers):
        settler.stop()


at_uninstall(_stop_all)
atexit.register(_stop_all)
