"""What one call may be served from: the shelf of its own scope, and the shared one beside it."""

from collections import Counter
from collections.abc import Callable

import numpy as np

from .index import Run
from .segments import Segment
from .sessions import Session
from .shelf import Match, Sequence, Shelf


class Reading:
    """
    The shelves that a call reads.

    Args:
        own (`Shelf`): Of its scope; what the call computes is stored there.
        shared (`Shelf`, *optional*): The shared one, if its scope is another and anything is shared.
        session (`Session`, *optional*): If its scope is one: rows from before its cutoff are not moved.
        slow (callable, *optional*): Whether so many rows of a segment are computed sooner than they are read from its
            file, where they lie in one that was not read yet.

    Attributes:
        slower (`dict`): Segments that were not used for this reason, by the prompt's rows that they would have given.
    """

    def __init__(
        self,
        own: Shelf,
        shared: Shelf | None = None,
        session: Session | None = None,
        slow: Callable[[Segment, int], bool] | None = None,
    ):
        self.own = own
        self.shared = shared
        self.session = session
        self.slower: dict[Segment, int] = {}
        self.slow = slow

    def observe(self, new_part: np.ndarray, now: float) -> None:
        """Take the new part of the call's prompts (token ids), before runs are looked up for them."""
        if self.session is not None:
            self.session.observe(new_part, now)

    def match(self, ids: np.ndarray) -> Match:
        """The longest stored prefixes of a prompt; of two that are equally long the call's own one."""
        own = self._without_slow(self.own, self.own.match(ids))
        if self.shared is None:
            return own
        shared = self._without_slow(self.shared, self.shared.match(ids))
        exact = own if own.exact >= shared.exact else shared
        carried = own if own.carried >= shared.carried else shared
        return Match(exact.exact, exact.exact_sequence, carried.carried, carried.carried_sequence)

    def runs(self, ids: np.ndarray, first: int, min_match: int) -> list[Run]:
        """Stored runs that may be moved into the prompt, from position `first` on."""
        found = self.own.runs(ids, first, min_match)
        if self.session is not None and self.session.cutoff > float("-inf"):
            found = [run for run in found if run.segment.created >= self.session.cutoff]
        found = found if self.shared is None else found + self.shared.runs(ids, first, min_match)
        if self.slow is None or not self.own.pool.mapped:
            return found
        rows = Counter()  # a segment is read once for all that it gives
        for run in found:
            rows[run.segment] += run.stop - run.start
        slow = {segment for segment, count in rows.items() if self._is_slow(segment, min(count, len(segment)))}
        return [run for run in found if run.segment not in slow]

    def _without_slow(self, shelf: Shelf, match: Match) -> Match:
        """A match as far as its rows are worth reading: an approximate one whole, or not at all."""
        if not shelf.pool.mapped or self.slow is None:
            return match
        exact = self._worth_reading(match.exact_sequence, match.exact)
        carried = self._worth_reading(match.carried_sequence, match.carried)
        whole = carried == match.carried
        return Match(
            exact,
            match.exact_sequence if exact else None,
            match.carried if whole else 0,
            match.carried_sequence if whole else None,
        )

    def _worth_reading(self, sequence: Sequence | None, length: int) -> int:
        """Leading rows of a sequence, of its first `length`, up to the first one that is computed sooner than read."""
        if sequence is None:
            return length
        which, segments = sequence.recipe.which[:length], sequence.recipe.segments
        counts = np.bincount(which, minlength=len(segments)).tolist()
        slow = [bool(count) and self._is_slow(each, count) for each, count in zip(segments, counts, strict=True)]
        rows = np.flatnonzero(np.array(slow, dtype=bool)[which])
        return int(rows[0]) if len(rows) else length

    def _is_slow(self, segment: Segment, rows: int) -> bool:
        if self.slow is None or not self.own.pool.is_mapped(segment.addresses) or not self.slow(segment, rows):
            return False
        self.slower[segment] = max(rows, self.slower.get(segment, 0))
        return True
