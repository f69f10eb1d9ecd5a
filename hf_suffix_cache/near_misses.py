"""Text that is stored, but was tokenised otherwise: where an agreement of tokens breaks although the text goes on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .store.index import Run
from .store.shelf import Match

MOST_TOKENS = 3  # that differ, on either side
GOES_ON = 8  # equal tokens behind them
BESIDE = 4  # equal tokens that are decoded along, so that a word's first or last token reads as in its place


@dataclass(frozen=True)
class NearMiss:
    """
    Args:
        start (`int`), stop (`int`): Half-open positions of the prompt.
        ids (`tuple` of `int`): Its tokens there.
        stored (`tuple` of `int`): The stored tokens in their place.
        text (`str`, *optional*): What both read as. None without a tokenizer: the text may have been edited as well.
    """

    start: int
    stop: int
    ids: tuple[int, ...]
    stored: tuple[int, ...]
    text: str | None = None

    def __str__(self) -> str:
        here, there = " ".join(map(str, self.ids)), " ".join(map(str, self.stored))
        if self.text is None:
            end = ": tokenised otherwise or edited (`tokenizer=` tells which)"
        else:
            end = f": both texts read {self.text!r} there"
        return f"[{self.start:,}, {self.stop:,}) is {here}, stored is {there}{end}"


class Edge(NamedTuple):
    """Where an agreement ends: to the right (`step` 1) from `at` and `place` on, or to the left (-1) before them."""

    at: int  # in the prompt
    stored: np.ndarray  # tokens of what is stored
    place: int  # in these
    step: int


def edges_of(match: Match, runs: Iterable[Run]) -> list[Edge]:
    """Both ends of every run, after the ends of what the front agrees with."""
    fronts = ((match.exact_sequence, match.exact), (match.carried_sequence, match.carried))
    edges = [Edge(length, sequence.ids, length, 1) for sequence, length in fronts if sequence is not None]
    for run in sorted(runs, key=len, reverse=True):
        first = int(run.segment.positions[run.offset])
        edges.append(Edge(run.stop, run.segment.context, first + len(run), 1))
        edges.append(Edge(run.start, run.segment.context, first, -1))
    return edges


def near_misses(ids: np.ndarray, new: np.ndarray, edges: Iterable[Edge], tokenizer=None) -> list[NearMiss]:
    """
    Near misses among the tokens that must be computed.

    Args:
        ids (`np.ndarray` of int64, `[tokens]`): The prompt.
        new (`np.ndarray` of bool, `[tokens]`): What is not served.
        edges (iterable of `Edge`): Where to look; of two that say different things of one token the first one counts.
        tokenizer (*optional*): With a `decode`. Given, a near miss is what reads the same, at the border of the stored
            text too; not given, it is what goes on with equal tokens behind at most three that differ.

    Returns:
        `list[NearMiss]`: From left to right, without overlaps.
    """
    found: list[NearMiss] = []
    taken = ~new
    looked_at: set[tuple] = set()
    for edge in edges:
        beside = edge.at if edge.step == 1 else edge.at - 1
        if not 0 <= beside < len(ids) or taken[beside]:
            continue
        around = edge.stored[max(0, edge.place - GOES_ON - MOST_TOKENS) : edge.place + GOES_ON + MOST_TOKENS]
        key = (edge.at, edge.step, around.tobytes())
        if key in looked_at:
            continue
        looked_at.add(key)
        miss = _near_miss(ids, edge, tokenizer)
        if miss is not None and not taken[miss.start : miss.stop].any():
            taken[miss.start : miss.stop] = True
            found.append(miss)
    return sorted(found, key=lambda miss: miss.start)


def _near_miss(ids: np.ndarray, edge: Edge, tokenizer) -> NearMiss | None:
    """The smallest one at an edge."""
    sizes = [(here, there) for here in range(1, MOST_TOKENS + 1) for there in range(1, MOST_TOKENS + 1)]
    for here, there in sorted(sizes, key=lambda size: (sum(size), abs(size[0] - size[1]))):
        own, other = _piece(ids, edge.at, here, edge.step), _piece(edge.stored, edge.place, there, edge.step)
        if own is None or other is None:
            continue
        if any(ids[own][end] == edge.stored[other][end] for end in (0, -1)):  # these are no part of the difference
            continue
        goes_on = _goes_on(ids, own, edge.stored, other, edge.step)
        text = None
        if tokenizer is not None:
            text = _common_text(tokenizer, ids, own, edge.stored, other, edge.step, goes_on)
            if text is None:
                continue
        elif not goes_on:
            continue
        return NearMiss(own.start, own.stop, tuple(ids[own].tolist()), tuple(edge.stored[other].tolist()), text)
    return None


def _piece(tokens: np.ndarray, at: int, size: int, step: int) -> slice | None:
    """The `size` tokens behind or before a place; None if they are not there."""
    start = at if step == 1 else at - size
    return slice(start, start + size) if 0 <= start and start + size <= len(tokens) else None


def _goes_on(ids: np.ndarray, own: slice, stored: np.ndarray, other: slice, step: int) -> bool:
    """Whether enough tokens agree beyond these pieces."""
    ends = (own.stop, other.stop) if step == 1 else (own.start, other.start)
    pieces = [_piece(tokens, at, GOES_ON, step) for tokens, at in zip((ids, stored), ends, strict=True)]
    return None not in pieces and np.array_equal(ids[pieces[0]], stored[pieces[1]])


def _common_text(tokenizer, ids, own: slice, stored, other: slice, step: int, goes_on: bool) -> str | None:
    """What both pieces read as, None if that differs; at the border of a text, white space does not count."""
    piece = tokenizer.decode(ids[own].tolist())
    left, right = (BESIDE if goes_on or step == 1 else 0), (BESIDE if goes_on or step == -1 else 0)
    texts = [
        tokenizer.decode(tokens[max(0, part.start - left) : part.stop + right].tolist())
        for tokens, part in ((ids, own), (stored, other))
    ]
    if not goes_on:
        texts = [text.rstrip() if step == 1 else text.lstrip() for text in texts]
        if not piece.strip():
            return None
    # a part of a letter reads as U+FFFD whichever part it is
    return piece if texts[0] == texts[1] and "\ufffd" not in texts[0] else None
