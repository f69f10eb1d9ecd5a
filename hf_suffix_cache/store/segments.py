"""What the store keeps: segments (runs of computed rows) and sequences (a conversation as a recipe over segments)."""

import itertools
import weakref
from dataclasses import dataclass, field

import numpy as np

EXACT = "exact"
DERIVED = "derived"

MAX_HOPS = 3  # a row behind three generations of moved rows is not moved again (DESIGN.md, table of row states)

ALONE_TOKENS = 40  # rows of a text with fewer tokens to its left are as good as alone (DESIGN.md, section 6)

_segment_ids = itertools.count()


@dataclass(eq=False)
class Copies:
    """
    What a segment of mean rows was made from.

    Args:
        contexts (`dict`): By the fingerprint of a left context, which rows it has given a copy of: bool `[rows]`.
            Together they are the provenance of the rows.
        shared_left (`int`): How many tokens left of the first row are the same in every context, at most 16.
    """

    contexts: dict[bytes, np.ndarray]
    shared_left: int

    @property
    def counts(self) -> np.ndarray:
        """Copies in the mean of each row: int64 `[rows]`."""
        return np.sum(list(self.contexts.values()), axis=0, dtype=np.int64)


@dataclass(eq=False)
class Uses:
    """
    How often rows were asked for, the request that stored them included. A request for a part of them counts in part.

    Args:
        total (`float`): All requests.
        recent (`float`): The same, where a request counts half after each half-life (see `usage.py`) ...
        at (`float`): ... as of this moment of the store's work.
        contest (`int`, *optional*): The contest for room that is the first that they stand; None once they were used.
    """

    total: float = 1.0
    recent: float = 1.0
    at: float = 0.0
    contest: int | None = None


@dataclass(eq=False)
class Segment:
    """
    Rows computed in one request, in order, all in one state.

    Args:
        ids (`np.ndarray` of int64, `[rows]`): Token of each row.
        positions (`np.ndarray` of int64, `[rows]`): Position each row was computed at, ascending. Gaps are rows that
            were served from elsewhere in that request.
        context (`np.ndarray` of int64): All tokens of the request up to the last row at least:
            `context[positions] == ids`, and `context[:positions[i]]` is what row `i` has seen (its provenance).
        addresses (`np.ndarray` of int64, `[rows]`): Where the rows lie in the block pool.
        state (`str`): `"exact"` or `"derived"`.
        hops (`int`): Generations of moved rows between these rows and exact ones; 0 for exact rows.
        copies (`Copies`, *optional*): Given if each row is the mean of its copies from several contexts; `positions`
            and `context` are those of the first one.
        reach (`np.ndarray` of float16, `[rows, distances]`, *optional*): How much of each row's attention went farther
            to the left than each of `reach.DISTANCES`; kept where a repair policy asks for it.
        created (`float`): When the store took them, by its clock.
        uses (`Uses`): How often they were asked for.

    Attributes:
        home (weak reference to `Shelf`, *optional*): The shelf that it can be found on. Sequences of other shelves may
            refer to it where it is shared.
    """

    ids: np.ndarray
    positions: np.ndarray
    context: np.ndarray
    addresses: np.ndarray
    state: str = EXACT
    hops: int = 0
    copies: Copies | None = None
    reach: np.ndarray | None = None
    segment_id: int = field(default_factory=lambda: next(_segment_ids))
    references: int = 0  # of sequences, means and running calls ...
    holders: int = 0  # ... and of the first two alone
    last_used: float = 0.0
    created: float = 0.0
    uses: Uses = field(default_factory=Uses)
    home: weakref.ref | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def lives_on(self, shelf) -> bool:
        """Whether it is found on this shelf."""
        return self.home is not None and self.home() is shelf

    @property
    def movable(self) -> bool:
        """Whether these rows may be served from another position or behind another left context."""
        return self.hops <= MAX_HOPS

    @property
    def is_mean(self) -> bool:
        """Whether each row is the mean of several copies."""
        return self.copies is not None

    def pieces(self) -> list[tuple[int, int]]:
        """Half-open row ranges within which positions have no gap."""
        cuts = np.flatnonzero(np.diff(self.positions) != 1) + 1
        borders = [0, *cuts.tolist(), len(self.positions)]
        return [(start, stop) for start, stop in zip(borders, borders[1:], strict=False) if stop > start]
