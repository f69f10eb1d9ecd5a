"""Which stored rows serve which part of a prompt: prefix and runs in, a `Plan` out. Pure data, no tensors."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_suffix_cache.store.index import LEFT_TOKENS, Run
from hf_suffix_cache.store.segments import ALONE_TOKENS, MAX_HOPS

KINDS = ("exact", "carried", "shifted", "repaired", "new")
APPROXIMATE = ("carried", "shifted")

_START_STEP = 16  # equal leading tokens count in steps of so many


@dataclass(frozen=True)
class Span:
    """
    Half-open positions `[start, stop)` of one prompt row and where their rows come from.

    Args:
        start (`int`): First position.
        stop (`int`): Position behind the last one.
        kind (`str`): `"exact"`, `"carried"`, `"shifted"`, `"repaired"` or `"new"`.
        shift (`int`, *optional*, defaults to 0): By how much the stored rows were moved to the right.
        segment (`int`, *optional*): Id of the stored segment that shifted rows come from.
    """

    start: int
    stop: int
    kind: str
    shift: int = 0
    segment: int | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"`kind` must be one of {KINDS}, got {self.kind!r}.")
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a span needs 0 <= start < stop, got [{self.start}, {self.stop}).")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class PlanSpan(Span):
    """
    A shifted span with what it takes to serve it.

    Args:
        offset (`int`): Row of `run.segment` that serves `start`; the following rows serve the following positions.
        run (`Run`): The stored run that it was cut from.
        seam (`bool`): Whether the tokens left of `start` are not those that the stored row saw there.
        hops (`int`): Generations of moved rows behind these rows.
    """

    offset: int = 0
    run: Run | None = None
    seam: bool = False
    hops: int = 0

    def plain(self) -> Span:
        """The span as reports keep it: without a reference to stored rows."""
        return Span(self.start, self.stop, self.kind, self.shift, self.segment)


@dataclass(frozen=True)
class Prefix:
    """
    What a stored sequence offers for the front of a prompt.

    Args:
        exact (`int`): Rows `[0, exact)` are exact.
        length (`int`): Rows `[exact, length)` are approximate rows of this conversation, continued in place.
        shift (`int`, *optional*, defaults to 0): By how much the carried rows are moved; 0 in place.
        sequence (*optional*): The stored sequence; handed through untouched.
    """

    exact: int
    length: int
    shift: int = 0
    sequence: object = None

    def __post_init__(self):
        if not 0 <= self.exact <= self.length:
            raise ValueError(f"a prefix needs 0 <= exact <= length, got exact={self.exact}, length={self.length}.")


@dataclass(frozen=True)
class Plan:
    """
    Spans that cover the positions `[0, length)` of a prompt once, in order. No two neighbours are both new.

    Args:
        length (`int`): Tokens in the prompt.
        spans (`tuple` of `Span`): `"exact"`, then `"carried"`, then `"shifted"` (`PlanSpan`) and `"new"` in turn.
    """

    length: int
    spans: tuple[Span, ...]

    def __post_init__(self):
        borders = [0, *(span.stop for span in self.spans)]
        if [span.start for span in self.spans] != borders[:-1] or borders[-1] != self.length:
            raise ValueError(f"spans must cover [0, {self.length}) once and in order, got {self.spans}.")

    def tokens(self, kind: str) -> int:
        """Number of positions of one kind."""
        if kind not in KINDS:
            raise ValueError(f"`kind` must be one of {KINDS}, got {kind!r}.")
        return sum(len(span) for span in self.spans if span.kind == kind)

    @property
    def shifted(self) -> list[PlanSpan]:
        """The shifted spans, from left to right."""
        return [span for span in self.spans if span.kind == "shifted"]

    @property
    def has_approximate(self) -> bool:
        """Whether any carried or shifted row is served."""
        return any(span.kind in APPROXIMATE for span in self.spans)

    def new_positions(self) -> np.ndarray:
        """Positions that must be computed, ascending: int64 `[tokens("new")]`."""
        parts = [np.arange(span.start, span.stop, dtype=np.int64) for span in self.spans if span.kind == "new"]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def plan_prompt(
    ids_length: int,
    prefix: Prefix | None,
    runs: Sequence[Run],
    *,
    tail_tokens: int,
    keep_last: int,
    min_match: int,
    seam_tokens: int,
    fidelity: str,
) -> Plan:
    """
    Choose what serves each position of a prompt.

    The longest prefix comes first; the rest is swept from left to right by runs. The last `keep_last` positions are
    always new; if anything approximate is served, so are the last `tail_tokens` behind it.

    Args:
        ids_length (`int`): Tokens in the prompt.
        prefix (`Prefix`, *optional*): What may be continued at the front.
        runs (sequence of `Run`): What `WindowIndex.find_runs` found; the order does not matter.
        tail_tokens (`int`): No approximate row is served at or behind `ids_length - tail_tokens`.
        keep_last (`int`): Nothing is served at or behind `ids_length - keep_last`.
        min_match (`int`): Shortest piece to serve behind a seam.
        seam_tokens (`int`): Rows recomputed after a seam; a piece that has no more than these is not served.
        fidelity (`str`): `"exact"` allows neither carried nor shifted rows.

    Returns:
        `Plan`: Kinds are exact, carried, shifted and new.
    """
    for name, value in (("ids_length", ids_length), ("tail_tokens", tail_tokens), ("keep_last", keep_last)):
        if value < 0:
            raise ValueError(f"`{name}` must be at least 0, got {value}.")
    exact, length = (prefix.exact, prefix.length) if prefix is not None else (0, 0)
    limit = max(0, ids_length - keep_last)
    approximate_limit = 0 if fidelity == "exact" else max(0, min(limit, ids_length - tail_tokens))
    cursor = min(exact, limit)
    spans: list[Span] = []
    if cursor:
        spans.append(Span(0, cursor, "exact"))
    carried = min(length, approximate_limit)
    if carried > cursor:
        spans.append(Span(cursor, carried, "carried", prefix.shift))
        cursor = carried
    if cursor < approximate_limit:
        spans += _cover(runs, cursor, approximate_limit, min_match, seam_tokens)
    return Plan(ids_length, _fill(_merge(spans), ids_length))


def _cover(runs: Sequence[Run], first: int, limit: int, min_match: int, seam_tokens: int) -> list[PlanSpan]:
    """
    Sweep `[first, limit)` and cut pieces from the best run at each place.

    A run changes from seamed to seamless once, where 16 of its own tokens (or left neighbours) agree, and among the
    runs of one of the two sorts the order never changes as the sweep goes on: two heaps hold them, best first, and
    what falls out of one stays out. Each run is pushed twice at most, so the time is that of sorting.

    Copies of one text rarely begin at one place: a full stop or a line break in common makes the worse one longer. So
    at a seam the runs that begin within the next `seam_tokens` compete too. What is left out for a better one would
    have been seam rows, which run anyway.
    """
    waiting = sorted((run for run in runs if run.stop > first and run.start < limit), key=lambda run: run.start)
    ranks = [_rank(run, limit) for run in waiting]
    best_first = sorted(range(len(waiting)), key=ranks.__getitem__)
    places = [0] * len(waiting)  # place of each run among the best: heaps compare numbers, not ranks
    for place, number in enumerate(best_first):
        places[number] = place
    turning: list[tuple[int, int]] = []  # where a run becomes seamless, its place
    seamed: list[int] = []
    seamless: list[int] = []
    spans: list[PlanSpan] = []
    cursor, arrived, following = first, 0, 0
    while cursor < limit:
        # nothing stands left of position 0: no seam, no seam rows
        least, ahead = (max(min_match, seam_tokens + 1), seam_tokens) if cursor else (min_match, 0)
        while arrived < len(waiting) and waiting[arrived].start <= cursor + ahead:
            run = waiting[arrived]
            heapq.heappush(seamed, places[arrived])
            heapq.heappush(turning, (run.start + LEFT_TOKENS - run.left_match, places[arrived]))
            arrived += 1
        while turning and turning[0][0] <= cursor:
            heapq.heappush(seamless, heapq.heappop(turning)[1])
        while seamless and waiting[best_first[seamless[0]]].stop <= cursor:
            heapq.heappop(seamless)
        while seamed:
            run = waiting[best_first[seamed[0]]]
            if min(run.stop, limit) - max(cursor, run.start) >= least:
                break
            heapq.heappop(seamed)
        best = seamless or seamed
        if best:
            run = waiting[best_first[best[0]]]
            start = max(cursor, run.start)
            seam = start > 0 and best is seamed and run.left_match + start - run.start < LEFT_TOKENS
            spans.append(_cut(run, start, limit, seam))
            cursor = spans[-1].stop
        else:
            while following < len(waiting) and waiting[following].start <= cursor:
                following += 1
            cursor = waiting[following].start if following < len(waiting) else limit
    return spans


def _rank(run: Run, limit: int) -> tuple:
    """
    Sort key, best first: what stood alone comes last; copies whose left neighbours agree come before means, means
    before other copies.

    A few agreeing tokens are a full stop and a line break, a few at the start a chat template: both count in steps.
    Fewer hops are no better as a source (DESIGN.md, section 6), but keep what is computed behind them movable for
    longer; so a source of the last generation, behind which nothing can be moved any more, comes late.
    """
    mean = run.segment.is_mean
    agreement = run.left_match - run.start  # plus the cursor, the same for all
    return (
        _alone(run),
        1 if mean else 0 if run.left_match == LEFT_TOKENS else 2,
        run.hops >= MAX_HOPS,
        -(run.left_match // (LEFT_TOKENS // 2)),
        -(run.same_start // _START_STEP),
        -min(run.stop, limit),
        -agreement,
        -run.same_start,
        run.hops,
        -run.left_total,
        run.segment.segment_id,
        run.start,
        run.offset,
    )


def _alone(run: Run) -> bool:
    """Whether these rows saw next to nothing when they were computed, and would now stand behind something."""
    return run.left_total < ALONE_TOKENS and run.left_match < LEFT_TOKENS and run.shift != 0


def _cut(run: Run, start: int, limit: int, seam: bool) -> PlanSpan:
    return PlanSpan(
        start,
        min(run.stop, limit),
        "shifted",
        shift=run.shift,
        segment=run.segment.segment_id,
        offset=run.offset + start - run.start,
        run=run,
        seam=seam,
        hops=run.hops,
    )


def _merge(spans: list[Span]) -> list[Span]:
    """Join shifted neighbours that are consecutive rows of one segment, moved by one shift."""
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if (
            isinstance(last, PlanSpan)
            and last.stop == span.start
            and last.run.segment is span.run.segment  # numbers of segments are those of one shelf
            and (last.shift, last.offset + len(last)) == (span.shift, span.offset)
        ):
            merged[-1] = PlanSpan(
                last.start, span.stop, "shifted", last.shift, last.segment, last.offset, last.run, last.seam, last.hops
            )
        else:
            merged.append(span)
    return merged


def _fill(spans: list[Span], length: int) -> tuple[Span, ...]:
    """New spans where nothing else is."""
    filled: list[Span] = []
    cursor = 0
    for span in spans:
        if span.start > cursor:
            filled.append(Span(cursor, span.start, "new"))
        filled.append(span)
        cursor = span.stop
    if cursor < length:
        filled.append(Span(cursor, length, "new"))
    return tuple(filled)
