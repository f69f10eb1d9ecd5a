"""SuffixCache: the long-lived object that a user holds and passes to `generate`; owns the store."""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from . import generation
from .capability import CapabilityTable
from .comparison import Comparison, compare
from .config import SuffixCacheConfig, UnsupportedModelError, check_field_names
from .identity import IdentityTable
from .inputs import Refused
from .registration import register
from .report import CacheStats, ReuseReport
from .request import Request
from .store.compaction import CompactionResult
from .store.store import Store
from .view import View

logger = logging.getLogger("hf_suffix_cache")

NUM_REPORTS = 256
_said: set[str] = set()  # hints that this process has given
_shared_lock = threading.Lock()
_shared: list["SuffixCache"] = []


class _Owned:
    """What all handles on one store share."""

    def __init__(self, config: SuffixCacheConfig):
        self.store = Store(config)
        self.capabilities = CapabilityTable()
        self.identities = IdentityTable()
        self.stats = CacheStats(
            bytes_used=lambda: self.store.bytes_used,
            bytes_total=lambda: self.store.bytes_total,
            segments=lambda: self.store.num_segments,
            evictions=lambda: self.store.evictions,
        )


class SuffixCache(Cache):
    """
    A store of computed rows, passed to `generate` as its cache: text that an earlier call has run through the model is
    not prefilled again, wherever it stands in the prompt.

    Args:
        config (`SuffixCacheConfig`, *optional*): Settings; or give any of its fields by keyword.

    Example:

    ```python
    cache = SuffixCache()                                  # keep it as long as you like
    out = model.generate(**inputs, cache=cache, max_new_tokens=64)
    print(cache.last_report)
    ```
    """

    def __init__(self, config: SuffixCacheConfig | None = None, **fields):
        check_field_names(fields)
        if config is None:
            config = SuffixCacheConfig()
        if not isinstance(config, SuffixCacheConfig):
            raise TypeError(f"`config` must be a SuffixCacheConfig, got {config!r}; fields go in by keyword.")
        self._start(_Owned(config.replace(**fields)), config.replace(**fields))
        weakref.finalize(self, _hint_if_short_lived, self._calls).atexit = False
        generation.install()

    def _start(self, owned: _Owned, config: SuffixCacheConfig) -> None:
        self._owned = owned
        self.config = config
        self.reports: deque[ReuseReport] = deque(maxlen=NUM_REPORTS)
        self._thread = threading.local()
        self._calls: list[int] = [0]
        super().__init__(layer_class_to_replicate=DynamicLayer)

    # -- handles and reports ------------------------------------------------------------------------------------

    @classmethod
    def shared(cls, **options) -> "SuffixCache":
        """One cache for the process. Options are those of the first call; other ones later raise `ValueError`."""
        with _shared_lock:
            if not _shared:
                _shared.append(cls(**options))
            cache = _shared[0]
            wanted = cache.config.replace(**options)
            if wanted != cache.config:
                raise ValueError(
                    f"the shared cache was made with {cache.config}; {options} differs. For one call's settings use "
                    "`using(...)`."
                )
            return cache

    def using(self, *, fidelity: str | None = None, repair=None) -> "SuffixCache":
        """A handle on the same store with other settings and its own `last_report`."""
        changes = {name: value for name, value in (("fidelity", fidelity), ("repair", repair)) if value is not None}
        handle = object.__new__(type(self))
        handle._start(self._owned, self.config.replace(**changes))
        return handle

    @property
    def last_report(self) -> ReuseReport | None:
        """Report of the newest finished call of this handle in this thread."""
        return getattr(self._thread, "report", None)

    @property
    def stats(self) -> CacheStats:
        """Totals over all calls of all handles."""
        return self._owned.stats

    def record(self, report: ReuseReport) -> None:
        """Take a finished call's report."""
        self._thread.report = report
        self.reports.append(report)
        self._calls[0] += 1
        self._owned.stats.update(report)
        if report.carried_tokens or report.shifted_tokens:
            _say_once(
                "approximate",
                'this answer is approximate: it used moved rows. SuffixCache(fidelity="exact") never does that.',
            )

    # -- what generation asks for -------------------------------------------------------------------------------

    @property
    def _store(self) -> Store:
        return self._owned.store

    def open_view(self, model: PreTrainedModel, **options) -> Request:
        """A request with its view for one call of a model; raises `Refused` with a reason if reuse can't serve it."""
        if model.training:
            raise Refused("the model is in training mode; call model.eval() to reuse rows")
        if torch.is_autocast_enabled(model.device.type):
            raise Refused("autocast is on: rows would depend on a setting that can't be seen later")
        capability, rows = self._owned.capabilities.get(model)
        if capability.kind != "shift":
            raise Refused(capability.reason)
        identity, before = self._owned.identities.get(model)
        if before is not None:
            self._store.forget(before)
        self._store.forget_lost(self._owned.identities.lost)
        shelf = self._store.shelf(identity, self._scope(), capability.shapes)
        specs = {shape.rotary for shape in capability.shapes if shape.rotary is not None}

        def frequencies():
            return {spec: spec.frequencies(model) for spec in specs}

        view = View(self._store, shelf, capability)
        return Request(view, self.config, frequencies, capability_rows=rows, **options)

    def _scope(self) -> tuple:
        return ("anonymous", self.config.namespace)

    # -- serving ------------------------------------------------------------------------------------------------

    @contextmanager
    def attach(self, model: PreTrainedModel):
        """Inside, the model's plain forwards are served too, and so is a `generate` that names no cache."""
        _check_model(model)
        with generation.attached(model, self):
            yield self

    def compare(self, model: PreTrainedModel, **inputs) -> Comparison:
        """Run a request with and without the cache: KL, differing tokens, rows and time of both. See `Comparison`."""
        _check_model(model)
        return compare(self, model, inputs)

    def register(self, model: PreTrainedModel, texts_or_ids, tokenizer=None, at: str = "anywhere") -> int:
        """
        Precompute texts, one or many, with progress.

        Args:
            model (`PreTrainedModel`): Whose rows are stored.
            texts_or_ids (`str`, list of `str`, list of ids, or list of those): Strings need a `tokenizer`.
            tokenizer (*optional*): Encodes strings, and gives the sink prefix (BOS and an empty system turn).
            at (`str`): `"anywhere"`: behind the sink prefix, to be moved; `"front"`: at position 0, exact for prompts
                that start so.

        Returns:
            `int`: Tokens stored. Raises `UnsupportedModelError` for a model whose rows can't be stored.
        """
        _check_model(model)
        capability, _ = self._owned.capabilities.get(model)
        if capability.kind != "shift":
            raise UnsupportedModelError(f"rows of this {type(model).__name__} can't be stored: {capability.reason}.")
        return register(self, model, texts_or_ids, tokenizer, at)

    # -- managing -----------------------------------------------------------------------------------------------

    def clear(self, session=None) -> None:
        """Forget all rows. Statistics stay."""
        if session is not None:
            raise ValueError(f"there is no session {session!r}: all rows belong to the anonymous scope. Call clear().")
        self._store.clear()

    def compact(self) -> CompactionResult:
        """Defragment the pool; returns (bytes moved, blocks freed)."""
        return self._store.compact()

    def __deepcopy__(self, memo):
        raise TypeError("a SuffixCache can't be copied: it owns memory. Pass it on itself, or `save` it to a folder.")

    __copy__ = None

    def __reduce_ex__(self, protocol):
        raise TypeError("a SuffixCache can't be pickled. Use `save` to write its rows to a folder.")

    def __repr__(self) -> str:
        return f"SuffixCache(fidelity={self.config.fidelity!r}, {self.stats})"

    # -- straight in a forward ----------------------------------------------------------------------------------
    # `model(ids, cache=SuffixCache())` has no call to hook, so it gets a private list of transformers' own layers.

    @property
    def layers(self) -> list:
        """Layers of this thread's private view."""
        if not hasattr(self._thread, "layers"):
            self._thread.layers = []
        return self._thread.layers

    @layers.setter
    def layers(self, value: list) -> None:
        self._thread.layers = value

    @property
    def _is_user_defined(self) -> bool:
        """What transformers' own generate asks of a cache that it was given."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # only a generate without our wrapper (after `uninstall`) sets this, at its start: a new sequence begins, and
        # rows of the one before would be taken for its prompt's
        self.reset()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Grow the private view; `ValueError` for what does not continue it, since masks are made before this."""
        if layer_idx == 0 and self.layers and self.get_seq_length():
            positions = (kwargs.get("kwargs") or {}).get("position_ids")
            restarted = positions is not None and int(positions.min()) == 0 and positions.shape[-1] > 1
            if restarted or key_states.shape[0] != self.layers[0].keys.shape[0]:
                length = self.get_seq_length()
                raise ValueError(
                    f"this forward starts a new sequence, but the SuffixCache holds {length} tokens of another. "
                    "Call reset() first, pass a fresh SuffixCache, or use attach(model) to serve plain forwards."
                )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reset(self) -> None:
        """End this thread's private view."""
        self._thread.layers = []

    get_max_cache_shape = Cache.get_max_length


def _check_model(model) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"expected a transformers PreTrainedModel, got {type(model).__name__}.")


def _say_once(what: str, message: str) -> None:
    if what not in _said:
        _said.add(what)
        logger.warning(message)


def _hint_if_short_lived(calls: list[int], say: Callable = _say_once) -> None:
    if calls[0] == 1:
        say(
            "short-lived",
            "a SuffixCache was dropped after one call: it was empty, and saved nothing. Make it once and keep it.",
        )
