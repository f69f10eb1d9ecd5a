"""What one call may be served from: the shelf of its own scope, and the shared one beside it."""

import numpy as np

from .index import Run
from .sessions import Session
from .shelf import Match, Shelf


class Reading:
    """
    The shelves that a call reads.

    Args:
        own (`Shelf`): Of its scope; what the call computes is stored there.
        shared (`Shelf`, *optional*): The shared one, if its scope is another and anything is shared.
        session (`Session`, *optional*): If its scope is one: rows from before its cutoff are not moved.
    """

    def __init__(self, own: Shelf, shared: Shelf | None = None, session: Session | None = None):
        self.own = own
        self.shared = shared
        self.session = session

    def observe(self, new_part: np.ndarray, now: float) -> None:
        """Take the new part of the call's prompts (token ids), before runs are looked up for them."""
        if self.session is not None:
            self.session.observe(new_part, now)

    def match(self, ids: np.ndarray) -> Match:
        """The longest stored prefixes of a prompt; of two that are equally long the call's own one."""
        own = self.own.match(ids)
        if self.shared is None:
            return own
        shared = self.shared.match(ids)
        exact = own if own.exact >= shared.exact else shared
        carried = own if own.carried >= shared.carried else shared
        return Match(exact.exact, exact.exact_sequence, carried.carried, carried.carried_sequence)

    def runs(self, ids: np.ndarray, first: int, min_match: int) -> list[Run]:
        """Stored runs that may be moved into the prompt, from position `first` on."""
        found = self.own.runs(ids, first, min_match)
        if self.session is not None and self.session.cutoff > float("-inf"):
            found = [run for run in found if run.segment.created >= self.session.cutoff]
        return found if self.shared is None else found + self.shared.runs(ids, first, min_match)
