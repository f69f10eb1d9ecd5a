"""SuffixCache: the long-lived object that a user holds and passes to `generate`; owns the store."""

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager

from transformers import PreTrainedModel

from . import generation, hints
from .admission import Admission, admit, check_model, make_search
from .auditing import audit_answer
from .bound import Auditor, Calibration
from .building import build_in_background
from .calibrating import calibrate, fingerprint
from .capability import Capability
from .causes import Search
from .comparison import Comparison, compare
from .config import SuffixCacheConfig, check_field_names, check_ttl, short
from .explaining import Explanation, explain, plain_call, read_prompt, refused
from .identity import Identity
from .inputs import Refused
from .opening import open_request
from .owned import Owned, revival
from .private import PrivateView
from .registration import check_registrable, into, register
from .report import CacheStats, ReuseReport
from .request import Request
from .settling import Settlement, approximate_conversations, settle, settle_answer
from .store import persistence
from .store.compaction import CompactionResult
from .store.pins import unpin
from .store.scopes import Scope, session_scope
from .store.shelf import Sequence
from .store.store import Store

NUM_REPORTS = 256
PER_CALL = (  # settings that a handle may have of its own
    "fidelity max_kl workload repair repair_fraction drift seam_tokens tail_tokens min_match_tokens heal_rows "
    "heal_order settle store share_prefix"
).split()
_UNSET = object()
_shared_lock = threading.Lock()
_shared: list["SuffixCache"] = []


class SuffixCache(PrivateView):
    """
    A store of computed rows, passed to `generate` as its cache: text that an earlier call has run through the model is
    not prefilled again, wherever it stands in the prompt.

    Args:
        config (`SuffixCacheConfig`, *optional*): Settings; or give any of its fields by keyword.
        clock (callable, *optional*, defaults to `time.monotonic`): Seconds, by which sessions expire.

    Example:

    ```python
    cache = SuffixCache()                                  # keep it as long as you like
    out = model.generate(**inputs, cache=cache, max_new_tokens=64)
    print(cache.last_report)
    ```
    """

    def __init__(
        self, config: SuffixCacheConfig | None = None, *, clock: Callable[[], float] = time.monotonic, **fields
    ):
        check_field_names(fields)
        if config is None:
            config = SuffixCacheConfig()
        if not isinstance(config, SuffixCacheConfig):
            raise TypeError(f"`config` must be a SuffixCacheConfig, got {short(config)}; fields go in by keyword.")
        if not callable(clock):
            raise TypeError(f"`clock` must be a function without arguments that gives seconds, got {clock!r}.")
        config = config.replace(**fields)
        self._start(Owned(config, clock), config, Scope("anonymous", config.namespace))
        weakref.finalize(self, hints.say_short_lived, self._calls).atexit = False
        generation.install()
        build_in_background()

    def _start(self, owned: Owned, config: SuffixCacheConfig, scope: Scope) -> None:
        self._owned = owned
        self.config = config
        self._scope = scope
        self._reports: deque[ReuseReport] = deque(maxlen=NUM_REPORTS)
        self._thread = threading.local()
        self._calls: list[int] = [0]
        self._counts = True
        self._levels: list | None = None
        self._wanted = False  # whether its calls are stored whatever must go
        super().__init__()

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

    def using(self, **changes) -> "SuffixCache":
        """
        A handle on the same store and session with other settings and its own `last_report`. Takes `fidelity`,
        `max_kl`, `workload`, `repair`, `repair_fraction`, `drift`, `seam_tokens`, `tail_tokens`, `min_match_tokens`,
        `heal_rows`, `heal_order`, `settle`, `store` and `share_prefix`; the other settings belong to the store.
        """
        unknown = sorted(set(changes) - set(PER_CALL))
        if unknown:
            raise TypeError(f"`using` takes {', '.join(PER_CALL)}, got {unknown}.")
        return self._handle(changes)

    def session(self, id: str | int, ttl=_UNSET, share: bool = False) -> "SuffixCache":
        """
        A handle on the same store for one user: what it runs is stored for this session alone. No other session, and
        no call without one, is served any of it; it is served its own rows, and what is shared (`register`,
        `share_prefix`).

        Args:
            id (`str` or `int`): Which session. The same id gives the same session.
            ttl (`float`, *optional*): Seconds that its rows live unused; None: for ever. Defaults to the config's.
            share (`bool`, *optional*, defaults to `False`): What this handle runs is shared with all sessions. It is
                served what is shared alone, for a row that has seen a session's text is never shared.

        Returns:
            `SuffixCache`: With its own `last_report`, `reports` and `stats`, which tell nothing of other sessions.
        """
        scope = session_scope(self.config.namespace, id)
        ttl = self.config.ttl if ttl is _UNSET else ttl
        check_ttl(ttl)
        if not isinstance(share, bool):
            raise TypeError(f"`share` must be True or False, got {share!r}.")
        if share:
            return self._handle({}, scope.beside)
        self._store.open_session(scope, ttl, is_new=False)  # a handle that is never used leaves nothing behind
        return self._handle({"ttl": ttl}, scope)

    @classmethod
    def _again(cls, owned: Owned, config: SuffixCacheConfig, scope: Scope) -> "SuffixCache":
        handle = object.__new__(cls)
        handle._start(owned, config, scope)
        return handle

    def _handle(self, changes: dict, scope: Scope | None = None) -> "SuffixCache":
        handle = self._again(self._owned, self.config.replace(**changes), scope or self._scope)
        handle._calls = self._calls  # a store that served its handles was not dropped unused
        return handle

    def silent(self, levels: list | None = None, **changes) -> "SuffixCache":
        """
        A handle for runs of the package's own, which count in no statistics; it may differ in any setting. With
        `levels`, its calls run every level of escalation and append what each one gave.
        """
        handle = self._handle(changes)
        handle._counts, handle._levels = False, levels
        return handle

    @property
    def last_report(self) -> ReuseReport | None:
        """Report of the newest finished call of this handle in this thread."""
        return getattr(self._thread, "report", None)

    @property
    def reports(self) -> list[ReuseReport]:
        """Reports of the newest 256 finished calls of this handle, of all threads."""
        return list(self._reports)

    @property
    def stats(self) -> CacheStats:
        """Totals over all calls of all handles; on the handle of a session, over that session's alone."""
        return self._owned.stats if self._scope.kind != "session" else self._owned.stats_of(self._scope)

    def record(self, report: ReuseReport) -> None:
        """Take a finished call's report."""
        self._thread.report = report
        self._reports.append(report)
        self._calls[0] += 1
        if not self._counts:
            return
        self._owned.stats.update(report)
        if self._scope.kind == "session":
            self.stats.update(report)
        self._owned.events.gave_up(self._store.happened)
        self._owned.events.finished(report, self._scope)
        if report.carried_tokens or report.shifted_tokens:
            hints.say_approximate()
        hints.say_hard(self.calibration, report)

    def answered(self, model: PreTrainedModel, request: Request) -> None:
        """A `generate` call's answer is out, and reported."""
        if self.config.audit_rate:
            record = audit_answer(self.silent(audit_rate=0.0), model, request, self._owned.auditor)
            if record is not None:
                self._owned.events.audited(record, self._scope)
        if self.config.settle:
            background = self.config.settle == "background"
            revive = revival(self._owned, self._again, self.config.replace(repair=None), self._scope)
            settle_answer(model, request, self._owned.settler, background, revive)

    # -- what generation asks for -------------------------------------------------------------------------------

    @property
    def _store(self) -> Store:
        return self._owned.store

    def open_view(
        self, model: PreTrainedModel, batch: int | None = None, attached: bool = False, **options
    ) -> Request:
        """
        A request with its view for one call of a model, of `batch` rows if that is known, or for one plain forward of
        an `attached` model; raises `Refused` with a reason if reuse can't serve it.
        """
        tokens = options.get("prompt_columns") or 10**9
        known = self._identity, self._owned.capabilities
        admitted = admit(model, *known, tokens, batch, attached, options.get("chunk"))
        asks = self._counts and not self._wanted and self._owned.events.wants_causes
        options |= {
            "capability_rows": admitted.capability_rows,
            "wanted": self._wanted,
            "trace": self._levels,
            "search": self._search(model, admitted) if asks else None,
            **({"adopt": False} if attached else {}),
        }
        if self._scope.kind == "session":
            self._store.open_session(self._scope, self.config.ttl)
        rule = functools.partial(self._owned.rule, self.config)
        return open_request(self._store, self._scope, self.config, model, admitted, self._identity, rule, options)

    def _search(self, model: PreTrainedModel, admitted: Admission) -> Search:
        """What finds out why prompts of this scope are not served."""
        first = self._scope.kind == "session" and not self.stats.requests
        return make_search(admitted, self.config, self._owned.events.has_changed(model, admitted.identity), first)

    @property
    def _identity(self) -> Callable[[PreTrainedModel, int], Identity]:
        return self._owned.identity

    # -- serving ------------------------------------------------------------------------------------------------

    @contextmanager
    def attach(self, model: PreTrainedModel):
        """Inside, the model's plain forwards are served too, and so is a `generate` that names no cache."""
        check_model(model)
        with generation.attached(model, self):
            yield self

    def compare(self, model: PreTrainedModel, **inputs) -> Comparison:
        """Run a request with and without the cache: KL, differing tokens, rows and time of both. See `Comparison`."""
        check_model(model)
        return compare(self, model, inputs)

    @property
    def calibration(self) -> Calibration:
        """What `max_kl` and `expected_kl` go by: built-in conservative values until `calibrate` or an assignment."""
        return self._owned.calibration

    @calibration.setter
    def calibration(self, value: Calibration) -> None:
        if not isinstance(value, Calibration):
            raise TypeError(f"`calibration` must be a Calibration (see `Calibration.load`), got {value!r}.")
        self._owned.calibration = value

    @property
    def audits(self) -> Auditor:
        """Requests that were run both ways (`audit_rate`): records, coverage, and what the bound was tightened by."""
        return self._owned.auditor

    def calibrate(self, model: PreTrainedModel, prompts, alpha: float = 0.1, tokenizer=None) -> Calibration:
        """
        Fit the predictor of `expected_kl`, and set the rule that holds `max_kl`, on prompts of the caller's.

        Each prompt is run at every level of repair, the last of which is a full prefill; nothing is stored in this
        cache. A prompt is served from what this cache holds, and where it holds nothing of it from the prompts before
        it in the list. The guarantee: of prompts like these, a share of at most `alpha` is expected above the bound.

        Args:
            model (`PreTrainedModel`): Whose answers are compared.
            prompts (list, or `dict` of lists by workload label): Lists of token ids, or strings with a `tokenizer`.
            alpha (`float`, *optional*, defaults to 0.1): Share of prompts that may exceed a bound.
            tokenizer (*optional*): Encodes strings.

        Returns:
            `Calibration`, in use from now on; `save` writes it to a file. Raises `ValueError` if too few of the
            prompts share text with anything (`alpha=0.1` needs 9 to set the margin, and the fit others).
        """
        check_model(model)
        identity = self._identity(model, 0)
        owner = fingerprint(self.config, self.capability(model), identity.digest)
        self.calibration = calibrate(self, model, prompts, alpha, tokenizer, owner)
        return self.calibration

    def register(
        self, model: PreTrainedModel, texts_or_ids, tokenizer=None, at="anywhere", pin: bool = False, folder=None
    ) -> int:
        """
        Precompute texts, one or many, with progress. They are shared: every session is served them.

        Args:
            model (`PreTrainedModel`): Whose rows are stored.
            texts_or_ids (`str`, list of `str`, list of ids, or list of those): Strings need a `tokenizer`.
            tokenizer (*optional*): Encodes strings, and gives the sink prefix (BOS and an empty system turn).
            at (`str`): `"anywhere"`: behind the sink prefix, to be moved; `"front"`: at position 0, exact for prompts
                that start so.
            pin (`bool`, *optional*, defaults to `False`): Never give them up for room, until `unpin` or `clear`.
            folder (`str` or path, *optional*): Have them on disk, as many as there is room, and serve them from there.
                They run in batches; what an interrupted run has left in the folder is not run again.

        Returns:
            `int`: Tokens stored. Raises `UnsupportedModelError` for a model whose rows can't be stored, and
            `ValueError`, before anything runs, if more would be pinned than `pin_share` allows, or for a folder with
            another store in it.
        """
        check_model(model)
        capability = self.capability(model)
        check_registrable(model, capability, at)
        handle = self._handle({"fidelity": "exact"}, self._scope.beside)
        handle._wanted = True
        where = self._store, self._identity(model, 0), handle._scope, capability.shapes
        return register(handle, model, texts_or_ids, tokenizer, at, *into(where, pin, folder))

    def unpin(self) -> int:
        """Take off all pins (see `register`): what was pinned stays as long as it is worth it. Returns how many."""
        return unpin(self._store)

    def explain(self, model: PreTrainedModel, ids, tokenizer=None) -> Explanation:
        """
        Why each token of a prompt would be reused or not if `generate` were called with it now, and where stored text
        was missed because it is tokenised otherwise. The model is not run, and no use of what is stored is noted; a
        model that this cache has not met is measured by its first call, or by `capability`.

        Args:
            model (`PreTrainedModel`): Whose call it would be.
            ids (`str`, list of `int`, or tensor or array of one row): The prompt. A string needs a `tokenizer`.
            tokenizer (*optional*): Tells stored text that is tokenised otherwise from text that was edited.

        Returns:
            `Explanation`: With `spans`, `reasons` and `near_misses`; it can be printed, and a notebook shows it. Reads
            what a call of this handle would read, and tells of nothing else.
        """
        check_model(model)
        ids = read_prompt(model, ids, tokenizer)
        try:
            call = plain_call(model)
            options = {"batch": call.expansion, "chunk": call.get("prefill_chunk_size"), "measures": False}
            admitted = admit(model, self._identity, self._owned.capabilities, len(ids), **options)
        except Refused as refusal:
            return refused(ids, str(refusal), tokenizer)
        return explain(ids, self._store, self._scope, self.config, admitted, self._search(model, admitted), tokenizer)

    def capability(self, model: PreTrainedModel) -> Capability:
        """
        What was measured of this model, at its first use or now: `kind` is `"shift"` (rows can be reused anywhere),
        `"prefix"` (at the front only) or `"none"`; `reason` says why it is not `"shift"`.
        """
        check_model(model)
        identity = self._identity(model, 0)
        return self._owned.capabilities.get(model, (identity.settings, identity.digest))[0]

    def settle(self, model: PreTrainedModel) -> Settlement:
        """
        Recompute the newest conversation that is not exact, its generated tokens included, and replace its approximate
        rows: its next turn is exact then. Runs nothing if everything is exact already. Counted in
        `stats.settled_rows`, in no report. See `settle=True` and `settle="background"` for doing so after each answer.

        Returns:
            `Settlement`: Tokens, rows run and seconds. Raises `UnsupportedModelError` if the model can't be settled
            now, for example because it is in training mode.
        """
        check_model(model)
        return settle(self, model)

    def settled(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to settle in the background; False if `timeout` seconds were not enough."""
        return self._owned.settler.wait(timeout)

    def approximate_conversations(self, model: PreTrainedModel) -> list[tuple[Sequence, bool]]:
        """
        The stored conversations of this scope and of the model as it is now that are not exact, newest first; each
        with whether its calls bring token types.
        """
        return approximate_conversations(self._store, self._identity(model, 0), self._scope)

    # -- managing -----------------------------------------------------------------------------------------------

    def clear(self, session: str | int | None = None) -> None:
        """
        Forget all rows of all sessions (`session=None`), or those of one session, which may be gone already. On the
        handle of a session: that session's rows. Totals of `stats` stay.
        """
        own = self._scope if self._scope.kind == "session" else None
        self._store.clear(own if session is None else session_scope(self.config.namespace, session))

    def compact(self) -> CompactionResult:
        """Pack all that is stored, as the store does by itself in small steps; returns (bytes moved, blocks freed)."""
        return self._store.compact()

    def save(self, folder) -> persistence.Saved:
        """
        Write the rows of all handles to a folder, and what waits there still for its model, while calls go on. A
        crash leaves the old store or the new one. Rows are as secret on disk as in memory: see docs/security.md.

        Returns:
            `Saved`: Segments, bytes written, and bytes of rows that lay in the folder already. Raises `ValueError` for
            a folder with another kind of `index.json`, `OSError` where it can't be written to.
        """
        return persistence.save(self._store, folder)

    @classmethod
    def load(cls, folder, config: SuffixCacheConfig | None = None, **fields) -> "SuffixCache":
        """
        A cache that holds what was saved to a folder. Rows stay in their files, and find their model, whose weights
        and settings must be the same, when it asks first; what is damaged is skipped with a warning.

        Args:
            folder (`str` or path): What `save` wrote.
            config, fields: As for `SuffixCache(...)`: settings are not saved.

        Raises `FileNotFoundError` where nothing was saved, `ValueError` where the index or the tokens are damaged.
        """
        cache = cls(config, **fields)
        persistence.load(cache._store, folder)
        cache._calls[0] = 2  # one call of it is worth while: it was not empty
        return cache

    def __deepcopy__(self, memo):
        raise TypeError("a SuffixCache can't be copied: it owns memory. Pass it on itself, or `save` it to a folder.")

    __copy__ = functools.partialmethod(__deepcopy__, None)

    def __reduce_ex__(self, protocol):
        raise TypeError("a SuffixCache can't be pickled. Use `save` to write its rows to a folder.")

    def __repr__(self) -> str:
        return f"SuffixCache(fidelity={self.config.fidelity!r}, {self.stats})"
