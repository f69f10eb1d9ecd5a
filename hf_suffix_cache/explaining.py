"""Why each token of a prompt would be reused or not: an `Explanation`, made without running the model."""

import copy
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

import numpy as np

from .admission import Admission
from .calls import GenerateCall
from .causes import CAUSES, NAMES, SHORTEST, Search
from .inputs import Refused
from .near_misses import NearMiss, edges_of, near_misses
from .planning import KINDS, Span
from .prompt import NEW, PlannedRow
from .registration import check_ids, encode
from .store.reading import Reading
from .store.scopes import Place, Scope
from .store.store import Store
from .strip import STYLES, Strip, count_tokens, percent

SHOWN = 40  # reasons, and near misses, in a text or a table


class Reason(NamedTuple):
    """
    Neighbouring tokens `[start, stop)` of a prompt to which the same happens for the same cause.

    Args:
        start (`int`), stop (`int`): Half-open positions.
        kind (`str`): `"exact"`, `"carried"`, `"shifted"` or `"new"`, as in a report before repair.
        cause (`str`): One word, a key of `causes.CAUSES`.
        text (`str`): The cause in a sentence.
    """

    start: int
    stop: int
    kind: str
    cause: str
    text: str


@dataclass(frozen=True)
class Explanation:
    """
    What a call with this prompt would be served now, and why; repair, which recomputes some of the moved rows, comes
    after that. Holds no reference to what is stored.

    Args:
        spans (`tuple` of `Span`): Cover the prompt once and in order, as the call's report would before repair.
        reasons (`tuple` of `Reason`): Cover it too.
        near_misses (`tuple` of `NearMiss`): Stored text that is tokenised otherwise.
        reason (`str`, *optional*): Why the call could not be served at all.
        tokens (`tuple` of `str`, *optional*): The text of each token, given with a tokenizer.
    """

    spans: tuple[Span, ...]
    reasons: tuple[Reason, ...]
    near_misses: tuple[NearMiss, ...] = ()
    reason: str | None = None
    tokens: tuple[str, ...] | None = field(default=None, repr=False)

    @property
    def prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return self.spans[-1].stop

    @property
    def hit_rate(self) -> float:
        """Share of the prompt that would be served, 0 to 1."""
        return 1 - count_tokens([self.spans])["new"] / self.prompt_tokens

    @property
    def causes(self) -> dict[str, int]:
        """Tokens by cause, most first."""
        counts: dict[str, int] = {}
        for reason in self.reasons:
            counts[reason.cause] = counts.get(reason.cause, 0) + reason.stop - reason.start
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        lines = [f"Explanation: {self.prompt_tokens:,} prompt tokens, {percent(self.hit_rate)} would be served"]
        lines += [f"  reuse is refused: {self.reason}"] if self.reason else []
        width = max(len(_place(reason)) for reason in self.reasons[:SHOWN])
        for reason in self.reasons[:SHOWN]:
            lines.append(f"  {_place(reason):<{width}}  {reason.kind}: {reason.text}{self._moved(reason)}")
        lines += _more(self.reasons)
        if self.near_misses:
            lines.append("near misses:")
            lines += [f"  {miss}" for miss in self.near_misses[:SHOWN]] + _more(self.near_misses)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        share = escape(percent(self.hit_rate))
        head = f"<b>{self.prompt_tokens:,}</b> prompt tokens, <b>{share}</b> would be served"
        refused = f"<div>reuse is refused: {escape(self.reason)}</div>" if self.reason else ""
        cells = "".join(
            f'<tr><td style="background:{STYLES[reason.kind].colour};color:{STYLES[reason.kind].ink}">'
            f"{escape(_place(reason))}</td><td>{escape(reason.kind)}</td>"
            f"<td>{escape(reason.text + self._moved(reason))}</td></tr>"
            for reason in self.reasons[:SHOWN]
        )
        misses = "".join(f"<li>{escape(str(miss))}</li>" for miss in self.near_misses[:SHOWN])
        more = "".join(f"<div>{line.strip()}</div>" for line in _more(self.reasons))
        return (
            f'<div style="font:13px/1.6 system-ui,sans-serif;max-width:960px"><div>{head}</div>{refused}'
            f"{Strip([self.spans]).html(self.tokens)}<table>{cells}</table>{more}"
            + (f"<div>near misses</div><ul>{misses}</ul>" if misses else "")
            + "</div>"
        )

    def _moved(self, reason: Reason) -> str:
        """By how much the rows of a reason are moved, where that is one number."""
        shifts = {
            span.shift for span in self.spans if span.start < reason.stop and span.stop > reason.start and span.shift
        }
        return f", by {shifts.pop():+,}" if reason.kind == "shifted" and len(shifts) == 1 else ""


def read_prompt(model, ids, tokenizer) -> np.ndarray:
    """The token ids of one prompt, int64 `[tokens]`; raises `TypeError` or `ValueError` for what is none."""
    found = encode(ids, tokenizer, special_tokens=True)
    check_ids(model, found)
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(f"`tokenizer` must have a `decode` method, got {type(tokenizer).__name__}.")
    return np.array(found, dtype=np.int64)


def plain_call(model) -> GenerateCall:
    """A `generate` call that is given a prompt alone; raises `Refused` if the model's own settings rule reuse out."""
    call = GenerateCall(model, (), {})
    other_cache = call.other_cache()
    if other_cache:
        raise Refused(other_cache)
    if call.get("use_cache") is False:
        raise Refused("use_cache=False")
    return call


def refused(ids: np.ndarray, reason: str, tokenizer=None) -> Explanation:
    """Of a call that could not be served."""
    span = Span(0, len(ids), "new")
    return Explanation((span,), (Reason(0, len(ids), "new", "refused", reason),), (), reason, _texts(ids, tokenizer))


def explain(
    ids: np.ndarray, store: Store, scope: Scope, config, admitted: Admission, search: Search, tokenizer=None
) -> Explanation:
    """
    Plan a prompt as `Request` does, from what it would read, and look for what the plan has left out. Nothing is
    referred to, no use is noted; what has expired is given up, as any look at the store does.

    Args:
        ids (`np.ndarray` of int64, `[tokens]`): The prompt, of a call of `generate` without token types.
        store (`Store`), scope (`Scope`): Whose rows.
        config (`SuffixCacheConfig`): Of the call.
        admitted (`Admission`): What the call would be served as.
        search (`Search`): Looks for what the plan leaves out.
        tokenizer (*optional*): Tells near misses from edits, and gives the tokens' texts.
    """
    capability = admitted.capability
    config = config if capability.kind == "shift" else config.replace(fidelity="exact")
    regime = None
    if admitted.regimes is not None:
        with admitted.regimes.cold():
            regime = admitted.regimes.enter(len(ids))
    place = Place(scope, regime)
    with store.lock:
        store.expire()
        reading = _reading(store, admitted.identity, place, capability.shapes)
        match = reading.match(ids)
        if config.fidelity != "exact":
            reading.observe(ids[max(match.exact, match.carried) :], store.clock())

        def find_runs(first: int):
            return reading.runs(ids, first, config.min_match_tokens)

        planned = PlannedRow.make(ids, 0, match, find_runs, 1, config)
        causes = search.causes(store, planned, reading, place, config)
        start = planned.prefix.length if planned.prefix is not None else 0
        edges = edges_of(match, reading.runs(ids, start, SHORTEST))
    new = (planned.planned_kinds == NEW) & (causes != NAMES.index("last"))
    misses = near_misses(ids, new, edges, tokenizer)  # without the lock: a tokenizer is somebody else's code
    for miss in misses:
        causes[miss.start : miss.stop] = NAMES.index("broken" if miss.text is None else "tokenised")
    return Explanation(
        planned.spans(), _reasons(planned.planned_kinds, causes), tuple(misses), None, _texts(ids, tokenizer)
    )


def _reading(store: Store, identity, place: Place, shapes) -> Reading:
    """
    What the call would read, with a copy of what is known of its session, which may be told of the prompt. A session
    that is forgotten gets no shelf again for being asked about.
    """
    if place.scope.kind == "session" and store.sessions.get(place.scope) is None:
        store.dormant.wake_scope(store, identity, place.scope, shapes)  # of a store that was loaded
        if store.sessions.get(place.scope) is None:
            return store.reading(identity, place.beside, shapes)
    reading = store.reading(identity, place, shapes)
    return Reading(reading.own, reading.shared, copy.deepcopy(reading.session), reading.slow)


def _reasons(kinds: np.ndarray, causes: np.ndarray) -> tuple[Reason, ...]:
    """Neighbours of one kind and cause together."""
    cuts = np.flatnonzero((np.diff(kinds) != 0) | (np.diff(causes) != 0)) + 1
    borders = [0, *cuts.tolist(), len(kinds)]
    reasons = []
    for start, stop in zip(borders, borders[1:], strict=False):
        cause = NAMES[causes[start]]
        reasons.append(Reason(start, stop, KINDS[kinds[start]], cause, CAUSES[cause]))
    return tuple(reasons)


def _texts(ids: np.ndarray, tokenizer) -> tuple[str, ...] | None:
    return None if tokenizer is None else tuple(tokenizer.decode([token]) for token in ids.tolist())


def _place(reason: Reason) -> str:
    return f"[{reason.start:,}, {reason.stop:,})"


def _more(entries: tuple) -> list[str]:
    hidden = len(entries) - SHOWN
    return [f"  and {hidden:,} more"] if hidden > 0 else []
