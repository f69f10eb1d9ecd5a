"""Uses of text that was given up, for when it comes back: known by what it says, wherever it then stands."""

import secrets
import weakref
from collections import OrderedDict

import numpy as np

from ..kernels import window_hashes
from .segments import Uses
from .shelf import Shelf

WINDOW = 8  # tokens that are hashed together
SAMPLE = 16  # one window in so many is remembered, chosen by its hash
GHOSTS = 1 << 16  # windows of all shelves that are remembered: about a million tokens, and 12 MB


class Ghosts:
    """
    How often text was asked for that is not stored any more.

    Which windows of a text are remembered depends on their tokens alone, so that it is known at any place and behind
    anything. Each shelf has a secret of its own that enters its keys: what was asked for in one scope tells nothing
    in another, and all is lost with the shelf.

    Args:
        limit (`int`, *optional*): Most windows; those that were given up first are forgotten first.
    """

    def __init__(self, limit: int = GHOSTS):
        self.limit = limit
        self._secrets: weakref.WeakKeyDictionary[Shelf, np.uint64] = weakref.WeakKeyDictionary()
        self._uses: OrderedDict[int, Uses] = OrderedDict()  # one object for all windows of a text, oldest first

    def __len__(self) -> int:
        return len(self._uses)

    def keep(self, shelf: Shelf, ids: np.ndarray, positions: np.ndarray, uses: Uses) -> None:
        """
        Remember the uses of a text that a shelf gives up.

        Args:
            shelf (`Shelf`): Whose text.
            ids (`np.ndarray` of int64, `[rows]`): Its tokens.
            positions (`np.ndarray` of int64, `[rows]`): Ascending; no window reaches across a gap.
            uses (`Uses`): Must not change any more.
        """
        for key in self._keys(shelf, ids, positions):
            self._uses[key] = uses
            self._uses.move_to_end(key)
        while len(self._uses) > self.limit:
            self._uses.popitem(last=False)

    def find(self, shelf: Shelf, ids: np.ndarray, positions: np.ndarray, take: bool = False) -> list[Uses | None]:
        """What is known of each remembered window of a text (see `keep`), forgotten from now on with `take`."""
        look = self._uses.pop if take else self._uses.get
        return [look(key, None) for key in self._keys(shelf, ids, positions)] if self._uses else []

    def clear(self) -> None:
        """Forget all of it."""
        self._uses.clear()

    def _keys(self, shelf: Shelf, ids: np.ndarray, positions: np.ndarray) -> list[int]:
        pieces = np.split(ids, np.flatnonzero(np.diff(positions) != 1) + 1)
        found = [window_hashes(piece, WINDOW) for piece in pieces if len(piece) >= WINDOW]
        hashes = np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *found]))
        chosen = hashes[hashes % np.uint64(SAMPLE) == 0]
        if len(chosen) == 0:
            chosen = hashes[:1]  # the smallest: the same one each time
        if shelf not in self._secrets:
            self._secrets[shelf] = np.uint64(secrets.randbits(64))
        return (chosen ^ self._secrets[shelf]).tolist()
