"""
Means of a text's rows from several left contexts: one segment a text, which remains while its copies come and go.

Where no stored copy of a text stood behind what the prompt has to its left, the mean of several copies is closer to
fresh rows than one of them (DESIGN.md, section 6). Keys are turned to the mean's positions before they enter it.
"""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from ..config import PoolExhausted
from .gather import average_rows
from .index import LEFT_TOKENS, Run, common_prefix
from .room import copy_to
from .segments import ALONE_TOKENS, DERIVED, MAX_HOPS, Copies, Segment
from .shelf import Shelf

MEAN_HOPS = MAX_HOPS - 1  # most hops of rows in a mean: what is computed behind a mean can still be moved
MAX_CONTEXTS = 8  # copies in a mean, after which it stays as it is
MIN_TEXT = 32  # shortest text that a mean is kept of
START_SHARE = 0.5  # share of a text that must come from a second context before a mean is worth its memory
CONTEXT_TOKENS = 64  # left neighbours that tell one context from another

_LOOK_BACK = 256  # tokens before the first new row in which the text that it belongs to may begin


@dataclass(frozen=True)
class Copy:
    """
    A text as one request computed it, or parts of it.

    Args:
        context (`np.ndarray` of int64): The request's tokens.
        start (`int`): Position of the text's first row; the others follow it.
        addresses (`np.ndarray` of int64, `[rows]`): Where the rows lie in the pool.
        usable (`np.ndarray` of bool, `[rows]`): Those that were computed there.
        hops (`int`): Most generations of moved rows behind any of them.
    """

    context: np.ndarray
    start: int
    addresses: np.ndarray
    usable: np.ndarray
    hops: int

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def ids(self) -> np.ndarray:
        """Its tokens, `[rows]`."""
        return self.context[self.start : self.start + len(self)]

    @property
    def fingerprint(self) -> bytes:
        """What tells its left context from others. The same request again has the same one."""
        left = np.ascontiguousarray(self.context[max(0, self.start - CONTEXT_TOKENS) : self.start], dtype=np.int64)
        return blake2b(left.tobytes(), digest_size=8).digest()


@dataclass(frozen=True)
class Computed:
    """
    The rows of a finished request.

    Args:
        ids (`np.ndarray` of int64, `[rows]`): Tokens.
        own (`np.ndarray` of bool, `[rows]`): Rows that this request has computed.
        hops (`np.ndarray` of int64, `[rows]`): Generations of moved rows behind each.
        addresses (`np.ndarray` of int64, `[rows]`): Where they lie in the pool.
    """

    ids: np.ndarray
    own: np.ndarray
    hops: np.ndarray
    addresses: np.ndarray

    def copy(self, start: int, stop: int) -> Copy:
        """This request's copy of the text `[start, stop)`."""
        rows = slice(start, stop)
        usable = self.own[rows] & (self.hops[rows] <= MEAN_HOPS)
        hops = int(self.hops[rows][usable].max(initial=0))
        return Copy(self.ids, start, self.addresses[rows], usable, hops)


def learn(shelf: Shelf, computed: Computed, frequencies, now: float) -> None:
    """
    Draw a finished request's rows into the means of their texts, and begin means of texts that had one context so far.

    Rows of a text with next to nothing to its left stay out. So do copies from a context that is in the mean already.

    Args:
        shelf (`Shelf`): Where the means are kept.
        computed (`Computed`): The request, before it is indexed.
        frequencies (`dict`): Live inverse frequencies by `RotarySpec`.
        now (`float`): The time, for the order of use.
    """
    own = np.flatnonzero(computed.own & (computed.hops <= MEAN_HOPS))
    if len(own) == 0:
        return
    first = max(0, int(own[0]) - _LOOK_BACK)
    covered = np.zeros(len(computed.ids), dtype=bool)
    versions: dict[Segment, Segment] = {}  # a mean that somebody refers to is replaced when it changes
    for run in shelf.mean_windows.find_runs(computed.ids, first):
        covered[run.start : run.stop] = True
        if run.start >= ALONE_TOKENS and shelf.pool.is_intact(run.segment.addresses):
            mean = versions.get(run.segment, run.segment)
            copy = computed.copy(run.start, run.stop)
            versions[run.segment] = _draw(shelf, mean, run.offset, copy, frequencies, now)
    if len(own) < START_SHARE * MIN_TEXT:
        return
    found = shelf.windows.find_runs(computed.ids, first, MIN_TEXT)
    runs = [run for run in found if _useful(run) and shelf.pool.is_intact(run.segment.addresses)]
    runs.sort(key=lambda run: (run.hops, -len(run), run.start, run.segment.segment_id))
    starts, stops = np.array([(run.start, run.stop) for run in runs], dtype=np.int64).reshape(-1, 2).T
    for run in runs:
        for start, stop in _stretches(~covered[run.start : run.stop], run.start):
            new, old = computed.copy(start, stop), _stored_copy(run, start, stop)
            if new.usable.sum() < START_SHARE * len(new) or new.fingerprint == old.fingerprint:
                continue
            mean = _begin(shelf, old, now)
            if mean is None:
                return
            covered[start:stop] = True
            for other in np.flatnonzero((starts < stop) & (stops > start)).tolist():
                low, high = max(start, runs[other].start), min(stop, runs[other].stop)
                _draw(shelf, mean, low - start, _stored_copy(runs[other], low, high), frequencies, now)
            _draw(shelf, mean, 0, new, frequencies, now)


def _useful(run: Run) -> bool:
    return run.hops <= MEAN_HOPS and run.left_total >= ALONE_TOKENS and run.start >= ALONE_TOKENS


def _stretches(free: np.ndarray, start: int) -> list[tuple[int, int]]:
    """Half-open ranges of at least `MIN_TEXT` True entries; entry 0 is position `start`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], free.astype(np.int8), [0])))) + start
    return [(low, high) for low, high in edges.reshape(-1, 2).tolist() if high - low >= MIN_TEXT]


def _stored_copy(run: Run, start: int, stop: int) -> Copy:
    """The stored copy of the prompt's `[start, stop)`, which lies inside the run."""
    segment, rows = run.segment, slice(run.offset + start - run.start, run.offset + stop - run.start)
    usable = np.ones(stop - start, dtype=bool)
    return Copy(segment.context, start - run.shift, segment.addresses[rows], usable, segment.hops)


def _begin(shelf: Shelf, copy: Copy, now: float) -> Segment | None:
    """A mean of one copy; None if the pool has no room, for which no conversation is given up."""
    try:
        (places,) = shelf.pool.pack([len(copy)])
    except PoolExhausted:
        return None
    rows = np.arange(len(copy))
    copy_to(shelf.pool, copy.addresses, places)
    mean = Segment(
        ids=copy.ids,
        positions=copy.start + rows,
        context=copy.context[: copy.start + len(copy)],
        addresses=places,
        state=DERIVED,
        hops=copy.hops,
        copies=Copies({copy.fingerprint: copy.usable}, min(copy.start, LEFT_TOKENS)),
        last_used=now,
    )
    return mean if shelf.add_mean(mean) else None


def _draw(shelf: Shelf, mean: Segment, first: int, copy: Copy, frequencies, now: float) -> Segment:
    """
    Let a copy's rows into rows `[first, first + len(copy))` of a mean, each once for every context.

    Returns:
        `Segment`: The mean, or what replaces it: a mean that a conversation or a view refers to is left as it is.
    """
    known = mean.copies.contexts.get(copy.fingerprint)
    if known is None and len(mean.copies.contexts) >= MAX_CONTEXTS:
        return mean
    known = np.zeros(len(mean), dtype=bool) if known is None else known
    rows = np.flatnonzero(copy.usable & ~known[first : first + len(copy)])
    if len(rows) == 0:
        return mean
    if mean.references > 1 or shelf.is_cold(mean):
        renewed = _renew(shelf, mean)
        if renewed is None:
            return mean
        mean = renewed
    places, shifts = mean.addresses[first + rows], mean.positions[first + rows] - (copy.start + rows)
    counts = mean.copies.counts[first + rows]
    for _, _, part in shelf.pool.by_slab(places):
        average_rows(shelf.pool, copy.addresses[rows[part]], places[part], shifts[part], counts[part], frequencies)
    drawn = known.copy()
    drawn[first + rows] = True
    mean.copies.contexts[copy.fingerprint] = drawn
    mean.hops, mean.last_used = max(mean.hops, copy.hops), now
    if first == 0:
        begin, left = int(mean.positions[0]), mean.copies.shared_left
        same = common_prefix(
            mean.context[begin - left : begin][::-1], copy.context[max(0, copy.start - left) : copy.start][::-1]
        )
        mean.copies.shared_left = same
    return mean


def _renew(shelf: Shelf, mean: Segment) -> Segment | None:
    """The mean in memory of its own, in the model's dtype, instead of the old one; None where there is no room."""
    copy = Copy(mean.context, int(mean.positions[0]), mean.addresses, np.ones(len(mean), dtype=bool), mean.hops)
    shelf.pin([mean])  # while its rows are copied
    shelf.forget_mean(mean)
    new = _begin(shelf, copy, mean.last_used)
    if new is None:
        shelf.add_mean(mean)
    else:
        new.copies = Copies(dict(mean.copies.contexts), mean.copies.shared_left)
    shelf.unpin([mean])
    return new
