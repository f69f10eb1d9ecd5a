"""How often stored text is asked for, and what running it would cost: what eviction goes by."""

import weakref
from collections import deque
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from .ghosts import Ghosts
from .pool import BlockPool, Budget
from .segments import Segment, Uses
from .shelf import Recipe, Shelf

# Prompts of so many stores' rows, after which a request counts half. Longer keeps what chats that have ended were made
# of, shorter loses the few texts that a scan runs past (`python -m benchmarks.eviction --half-lives 0.5,1,2,4`).
HALF_LIFE = 1.0
MEASURED_ROWS = 64  # a forward of fewer rows takes about as long as one of half as many
NUM_MEASURED = 31  # newest forwards of which the median counts


class Usage:
    """
    Counts requests by the rows that they were served, and remembers what text was asked for that had to go.

    Age is counted in work, not in time: a store that nobody asks does not age. The store's lock is held by callers.

    Args:
        budget (`Budget`), pools (`dict`): The store's.
        half_life (`float`, *optional*): See `HALF_LIFE`.

    Attributes:
        work (`float`): Rows of all prompts so far, in stores: 1 is as many as the budget has room for.
        contest (`int`): How many times calls had to give up sequences for their rows. What was stored since the last
            time, and not used yet, is new: it stands its first contest the next time.
    """

    def __init__(self, budget: Budget, pools: dict[object, BlockPool], half_life: float = HALF_LIFE):
        self.budget = budget
        self.pools = pools
        self.half_life = half_life
        self.work = 0.0
        self.contest = 0
        self.ghosts = Ghosts()
        self._seconds: weakref.WeakKeyDictionary[BlockPool, deque] = weakref.WeakKeyDictionary()

    # -- what is asked for --------------------------------------------------------------------------------------

    def ask(self, shelf: Shelf, recipe: Recipe) -> None:
        """Count a prompt of a shelf, whose rows were found where `recipe` says; -1 stands for what was not."""
        self.work += len(recipe) * shelf.pool.row_bytes / max(1, self.budget.max_bytes)
        for segment, part in _parts(recipe):
            uses = segment.uses
            uses.recent = uses.recent * self.fade(uses) + part
            uses.total, uses.at, uses.contest = uses.total + part, self.work, None

    def store(self, shelf: Shelf, segments: Collection[Segment], wanted: bool = False) -> None:
        """
        Segments are new on a shelf. Earlier requests for their text count, if it was stored before; where a caller
        has asked for them to be stored (`wanted`) that counts as a use.
        """
        for segment in segments:
            total, recent = self._known(self.ghosts.find(shelf, segment.ids, segment.positions, take=True))
            extra = 1.0 + wanted
            segment.uses = Uses(total + extra, recent + extra, self.work, None if wanted else self.contest)

    def give_up(self, shelf: Shelf, segments: Collection[Segment]) -> None:
        """Segments leave a shelf for lack of room: what is known of their text is remembered for a while."""
        for segment in segments:
            self.ghosts.keep(shelf, segment.ids, segment.positions, replace(segment.uses))

    def recent(self, segment: Segment) -> tuple[float, float]:
        """
        Recent uses of a segment as of now, and what the request that stored it is of these if it is new: neither used
        since nor in a contest for room. 0 if it is not.
        """
        fade = self.fade(segment.uses)
        return segment.uses.recent * fade, fade if segment.uses.contest == self.contest else 0.0

    def fade(self, uses: Uses) -> float:
        """What `uses.recent` must be multiplied by to be that of now."""
        return 0.5 ** ((self.work - uses.at) / self.half_life)

    def expected(self, shelf: Shelf, ids: np.ndarray, recipe: Recipe) -> tuple[float, float]:
        """
        Uses of a prompt's rows (`ids`, `[rows]`; see `ask`) as they would count if it was stored: totals and recent
        ones, sums over rows.
        """
        total = recent = 0.0
        for segment, part in _parts(recipe):
            rows = part * len(segment)
            total += rows * segment.uses.total
            recent += rows * segment.uses.recent * self.fade(segment.uses)
        new = np.flatnonzero(recipe.which < 0)
        known = self._known(self.ghosts.find(shelf, ids[new], new))
        return total + len(new) * (known[0] + 1), recent + len(new) * (known[1] + 1)

    def turn_away(self, shelf: Shelf, ids: np.ndarray, recipe: Recipe) -> None:
        """A prompt (see `expected`) is not stored: remember that its text was asked for."""
        new = np.flatnonzero(recipe.which < 0)
        total, recent = self._known(self.ghosts.find(shelf, ids[new], new, take=True))
        self.ghosts.keep(shelf, ids[new], new, Uses(total + 1, recent + 1, self.work))

    def _known(self, found: list[Uses | None]) -> tuple[float, float]:
        """Mean uses of a text whose windows were found as `found`: totals and recent ones."""
        known = [uses for uses in found if uses is not None]
        total = sum(uses.total for uses in known)
        return total / max(1, len(found)), sum(uses.recent * self.fade(uses) for uses in known) / max(1, len(found))

    # -- what it costs ------------------------------------------------------------------------------------------

    def measure(self, pool: BlockPool, seconds: float, rows: int) -> None:
        """A prefill of a pool's model took so long to run so many rows."""
        if rows >= MEASURED_ROWS:
            self._seconds.setdefault(pool, deque(maxlen=NUM_MEASURED)).append(seconds / rows)

    def seconds_of(self, pool: BlockPool) -> float | None:
        """Seconds that a row of a pool's model takes; None while that is not known."""
        return float(np.median(self._seconds[pool])) if pool in self._seconds else None

    def row_seconds(self) -> dict[BlockPool, float]:
        """Seconds that a row of each pool's model takes; 1 for all of them while one is not known."""
        pools = self.pools.values()
        if any(pool not in self._seconds for pool in pools):
            return dict.fromkeys(pools, 1.0)
        return {pool: float(np.median(self._seconds[pool])) for pool in pools}


def _parts(recipe: Recipe) -> list[tuple[Segment, float]]:
    """The segments that serve a prompt, each with the share of its rows that do; no more than all of them."""
    counts = np.bincount(recipe.which[recipe.which >= 0], minlength=len(recipe.segments)).tolist()
    pairs = zip(recipe.segments, counts, strict=True)
    return [(segment, min(1.0, count / len(segment))) for segment, count in pairs if count]
