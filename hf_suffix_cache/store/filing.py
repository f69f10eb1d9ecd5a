"""Texts that go straight to a folder: memory holds a part of them at a time, and a crash costs that part alone."""

import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as Collection

import numpy as np

from . import persistence
from .packing import FILE_BYTES
from .scopes import Place, Scope
from .shelf import Sequence, Shelf
from .store import Store

logger = logging.getLogger("hf_suffix_cache")

CHECKPOINT_SECONDS = 60.0  # each writes the whole index: about 1 KB a text
MEMORY_SHARE = 1 / 4  # of `max_bytes`: rows in memory, from which on they are written


class Filing:
    """
    Writes what is stored of some texts to a folder, part by part, and lets go of its memory: the rows are served from
    their files from then on. Nothing but shared text, and what is in the folder already, is written.

    Args:
        store (`Store`): Where the texts are stored.
        identity, scope (`Scope`), shapes (`tuple` of `LayerShape`): Whose texts.
        path (`str` or path): The folder. If it holds a store, that is opened, so that an interrupted run goes on.

    Raises:
        ValueError: where the folder holds a store that this one, which is in use, was not loaded from or saved to; and
            where rows of this model can't be saved.
    """

    def __init__(self, store: Store, identity, scope: Scope, shapes: tuple, path):
        self._store = store
        self._key = identity, scope
        self._path = path
        self._pending: list[np.ndarray] = []
        self._rows = 0
        self._written = time.monotonic()
        self.lost = 0
        if identity.portable is None:
            raise ValueError(
                "rows of this model can't be saved: it has hooks, replaced functions or objects that can't be told in "
                "another process. Take them off, or register without `folder`."
            )
        persistence.reopen(store, path)
        with store.lock:
            store.shelf(identity, Place(scope), shapes)  # also tells the store what memory it has
            store.dormant.wake_scope(store, identity, scope, shapes)

    def missing(self, texts: Collection[list[int]]) -> list[list[int]]:
        """The texts that are not stored yet, each once, in their order."""
        with self._store.lock:
            different = dict.fromkeys(map(tuple, texts))
            return [list(ids) for ids in different if not self._find(np.array(ids, dtype=np.int64))]

    def done(self, texts: Collection[list[int]]) -> None:
        """Texts were stored just now; they are written once they are many, or the last time is long ago."""
        self._pending += [np.array(ids, dtype=np.int64) for ids in texts]
        self._rows += sum(map(len, texts))
        if self._rows >= self.max_rows or time.monotonic() - self._written >= CHECKPOINT_SECONDS:
            self.write()

    @property
    def max_rows(self) -> int:
        """Rows that are in memory at most before they are written."""
        budget = self._store.budget.max_bytes
        row_bytes = max(pool.row_bytes for pool in self._store.pools.values())
        return max(1, int(min(FILE_BYTES, MEMORY_SHARE * budget) / row_bytes))

    def write(self) -> None:
        """Write what is pending, and serve it from its files."""
        if not self._pending:
            return
        persistence.save(self._store, self._path, shared_only=True)
        with self._store.lock:
            for ids in self._pending:
                found = self._find(ids)
                self.lost += not found
                for shelf, sequence in found:
                    if not sequence.busy:
                        shelf.drop_extent(sequence)
                        self._store.dormant.put_back(shelf, sequence)
            for pool in self._store.pools.values():
                pool.trim()
        self._pending, self._rows, self._written = [], 0, time.monotonic()

    def close(self) -> None:
        """Write the rest, and say what found no room."""
        self.write()
        if self.lost:
            logger.warning(
                "%d texts were not stored: `max_bytes` has no room for them beside what running calls hold", self.lost
            )

    def _find(self, ids: np.ndarray) -> list[tuple[Shelf, Sequence]]:
        """Sequences that begin with a text, with their shelves."""
        return list(self._finds(ids))

    def _finds(self, ids: np.ndarray) -> Iterator[tuple[Shelf, Sequence]]:
        for (identity, place), shelf in self._store.shelves.items():
            if (identity, place.scope) == self._key:
                for sequence, length in shelf.exact_prefixes.longest(ids) + shelf.conversations.longest(ids):
                    if length == len(ids):
                        yield shelf, sequence
