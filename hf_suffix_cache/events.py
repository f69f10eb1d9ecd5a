"""What a store has to tell: structured log events, and one line where next to nothing is reused."""

import hashlib
import logging
import secrets
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable

from .bound.audit import AuditRecord
from .causes import LITTLE
from .report import ReuseReport
from .store.scopes import Scope
from .strip import percent

logger = logging.getLogger("hf_suffix_cache.events")  # INFO: silent unless somebody asks for it
warnings = logging.getLogger("hf_suffix_cache")

LOW_CALLS = 50  # newest calls over which ...
LOW_SHARE = LITTLE  # ... a smaller share of the prompts' tokens that is reused is low

# The commonest cause of a low hit rate, and what can be done about it.
REMEDIES = {
    "unstored": "the text is new",
    "empty": "the text is new",
    "session": "most of it came in the first call of a session, and sessions read only their own rows and what is "
    "shared (see `register` and `share_prefix`)",
    "state": "the model has changed since the text was stored (weights, adapters, settings or hooks)",
    "conditions": "the text was stored under other rotary frequencies, or with token types",
    "hops": "the text is stored behind three generations of moved rows; `settle=True` makes it exact again",
    "topic": "sessions have left the topic of what they stored (see `topic_similarity`)",
    "front": "the text is stored, but behind other text, and this model's rows can't be moved",
    "unmoved": 'the text is stored, but not exact where it stands now, and fidelity="exact" moves nothing',
    "short": "the text is stored in pieces too short to move (see `min_match_tokens` and `seam_tokens`)",
    "tail": "prompts are hardly longer than the newest `tail_tokens`, which always run",
    "last": "prompts have hardly more than the one token that always runs",
    "repaired": "what was moved was recomputed, at the seams of short pieces or as `repair_fraction` and `max_kl` ask",
}
_REFUSED = "reuse was refused: "


class Events:
    """
    Tells what happens in a store: the events of its calls as log records with numbers as attributes, and once that
    little is reused. Records name a session by a hash with a salt of this object alone, and hold no token and no text.
    Nothing is logged while a lock is held: handlers may ask the cache.

    Args:
        evictions (callable): Gives how many stored entries were given up for room.
    """

    def __init__(self, evictions: Callable[[], int] = int):
        self._evictions = evictions
        self._salt = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._newest: deque[tuple[int, int, dict[str, int]]] = deque(maxlen=LOW_CALLS)  # served, prompt, causes
        self._warned = False
        self._first: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> its first identity

    @property
    def wants_causes(self) -> bool:
        """Whether it is worth looking for why a call is served little."""
        return not self._warned or logger.isEnabledFor(logging.INFO)

    def has_changed(self, model, identity) -> bool:
        """Whether a model is in another state than when this was asked of it first."""
        with self._lock:
            return self._first.setdefault(model, identity) is not identity

    def session_hash(self, scope: Scope) -> str | None:
        """What a session is called here: equal for equal sessions, and of no use elsewhere. None for other scopes."""
        if scope.kind != "session":
            return None
        name = repr((scope.namespace, scope.session)).encode()
        return hashlib.blake2b(name, key=self._salt, digest_size=8).hexdigest()

    # -- what happened ------------------------------------------------------------------------------------------

    def finished(self, report: ReuseReport, scope: Scope) -> None:
        """A call has ended: a hit if it was served anything, repaired rows included, else a miss."""
        served = _served(report) + report.repaired_tokens
        if logger.isEnabledFor(logging.INFO):
            event = "hit" if served else "miss"
            cause = _main_cause(report)
            self._log(
                event,
                f"{served:,} of {report.prompt_tokens:,} tokens served, {report.computed_rows:,} rows computed",
                scope,
                prompt_tokens=report.prompt_tokens,
                exact_tokens=report.exact_tokens,
                carried_tokens=report.carried_tokens,
                shifted_tokens=report.shifted_tokens,
                repaired_tokens=report.repaired_tokens,
                new_tokens=report.new_tokens,
                computed_rows=report.computed_rows,
                generated_tokens=report.generated_tokens,
                hit_rate=report.hit_rate,
                expected_kl=report.expected_kl,
                first_token_seconds=report.timings["first_token"],
                total_seconds=report.timings["total"],
                cause=cause,
                reason=_plain_reason(report),
            )
        if scope.kind != "shared":  # registering is not meant to find anything
            warning = self._note(report)
            if warning is not None:
                warnings.warning(warning)

    def gave_up(self, happened: deque[tuple[str, Scope, int]]) -> None:
        """Tell of what the store has noted of evictions and expiries, and forget that."""
        counts: Counter = Counter()
        while happened:
            try:
                event, scope, count = happened.popleft()
            except IndexError:  # another thread was faster
                break
            counts[event, scope] += count
        for (event, scope), count in counts.items() if logger.isEnabledFor(logging.INFO) else ():
            what = "entries given up for room" if event == "eviction" else "segments given up for their age"
            self._log(event, f"{count:,} {what}", scope, count=count)

    def audited(self, record: AuditRecord, scope: Scope) -> None:
        """An answer was compared with its full prefill."""
        if logger.isEnabledFor(logging.INFO):
            held = "" if record.bound is None else f", bound {record.bound:.4f}"
            self._log(
                "audit",
                f"true KL {record.true:.4f} nats, predicted {record.predicted:.4f}{held}",
                scope,
                true_kl=record.true,
                predicted_kl=record.predicted,
                bound=record.bound,
                covered=None if record.bound is None else record.is_covered,
            )

    def _log(self, event: str, text: str, scope: Scope, **numbers) -> None:
        about = {"event": event, "scope": scope.kind, "session": self.session_hash(scope)}
        logger.info("%s: %s", event, text, extra={**about, **numbers})

    # -- a low hit rate -----------------------------------------------------------------------------------------

    def _note(self, report: ReuseReport) -> str | None:
        """Take a call into the newest ones; the warning, once, if little of them was reused."""
        causes = {name: count for name, count in report.causes.items() if name in REMEDIES}
        if report.repaired_tokens:
            causes["repaired"] = report.repaired_tokens
        if not report.causes and report.reason and report.new_tokens == report.prompt_tokens:
            causes = {_REFUSED + _plain_reason(report): report.prompt_tokens}
        with self._lock:
            if self._warned:
                return None
            self._newest.append((_served(report), report.prompt_tokens, causes))
            served, total = (sum(call[place] for call in self._newest) for place in (0, 1))
            if len(self._newest) < LOW_CALLS or served >= LOW_SHARE * total:
                return None
            self._warned = True
            tokens: Counter = sum((Counter(call[2]) for call in self._newest), Counter())
            self._newest.clear()
        return self._low(served / total, tokens)

    def _low(self, share: float, tokens: Counter) -> str:
        cause = tokens.most_common(1)[0][0] if tokens else "unstored"
        why = REMEDIES.get(cause, cause)
        evictions = self._evictions()
        if cause == "unstored" and evictions:
            why += f", or was given up again ({evictions:,} evictions; see `max_bytes`)"
        return (
            f"{percent(share)} of the tokens of the newest {LOW_CALLS} calls' prompts were reused. The commonest "
            f"reason: {why}. `cache.explain(model, ids)` tells it for each token of a prompt."
        )


def _served(report: ReuseReport) -> int:
    return report.exact_tokens + report.carried_tokens + report.shifted_tokens


def _main_cause(report: ReuseReport) -> str | None:
    """Why most of what was computed was not served; None where that was not looked for."""
    missed = {name: count for name, count in report.causes.items() if name in REMEDIES}
    if missed:
        return max(missed, key=missed.__getitem__)
    return "refused" if report.reason and report.new_tokens == report.prompt_tokens else None


def _plain_reason(report: ReuseReport) -> str | None:
    """A report's reason; of a fault only its type, for the message of an exception may quote anything."""
    reason = report.reason
    return ":".join(reason.split(":")[:2]) if reason and reason.startswith("reuse failed:") else reason
