"""Keeping rows in a smaller dtype once no kept extent needs them as they are. They are approximate from then on."""

from collections.abc import Sequence as Collection

import numpy as np
import torch

from .cold import DTYPES, stored_dtype
from .pool import BlockPool
from .room import pack
from .segments import DERIVED, EXACT
from .shelf import Sequence, Shelf


def cold_dtype(pool: BlockPool, name: str | None) -> torch.dtype | None:
    """The dtype of cold rows under the setting `store_dtype`; None where it would save nothing."""
    cold = None if name is None else DTYPES[name]
    return None if all(stored_dtype(shape.dtype, cold) is shape.dtype for shape in pool.shapes) else cold


def cool(shelf: Shelf, cold: torch.dtype) -> None:
    """
    Convert what may be converted: rows that neither a kept extent's conversation nor a running call refers to. Without
    room for that they stay as they are, until the next call.
    """
    needed = {segment for sequence in shelf.kept for segment in sequence.recipe.segments}
    ready = [each for each in shelf.warm if each not in needed and each.references == each.holders]
    if not ready or not pack(shelf.pool, ready, cold):
        return
    inexact = set()
    for segment in ready:
        del shelf.warm[segment]
        if segment.state == EXACT:
            segment.state, segment.hops = DERIVED, max(1, segment.hops)
            inexact.add(segment)
    if inexact:
        for sequence in [each for each in shelf.sequences if not inexact.isdisjoint(each.recipe.segments)]:
            shelf.set_exact(sequence, exact_rows(sequence))


def exact_rows(sequence: Sequence) -> int:
    """Leading rows of a sequence whose segments are exact, at most those that it has as exact ones."""
    recipe = sequence.recipe
    exact = np.array([segment.state == EXACT for segment in recipe.segments], dtype=bool)[recipe.which]
    return min(sequence.exact, len(exact) if exact.all() else int(exact.argmin()))


def all_cold(shelves: Collection[Shelf], pool: BlockPool, cold: torch.dtype | None) -> None:
    """Cool every shelf of a pool."""
    for shelf in shelves:
        if shelf.pool is pool and cold is not None:
            cool(shelf, cold)
