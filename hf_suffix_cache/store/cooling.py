"""Keeping rows in a smaller dtype once no kept extent needs them as they are. They are approximate from then on."""

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


def cool(shelf: Shelf, cold: torch.dtype) -> int:
    """
    Convert what may be converted: rows that neither a kept extent's conversation nor a running call refers to, as many
    as find room; the others stay as they are until the next call. Returns the number of segments.
    """
    needed = {segment for sequence in shelf.kept for segment in sequence.recipe.segments}
    ready = [each for each in shelf.warm if each not in needed and each.references == each.holders]
    while ready and not pack(shelf.pool, ready, cold):
        ready = ready[: len(ready) // 2]
    inexact = set()
    for segment in ready:
        del shelf.warm[segment]
        if segment.state == EXACT:
            segment.state, segment.hops = DERIVED, max(1, segment.hops)
            inexact.add(segment)
    if inexact:
        for sequence in [each for each in shelf.sequences if not inexact.isdisjoint(each.recipe.segments)]:
            shelf.set_exact(sequence, exact_rows(sequence))
    return len(ready)


def exact_rows(sequence: Sequence) -> int:
    """Leading rows of a sequence whose segments are exact, at most those that it has as exact ones."""
    recipe = sequence.recipe
    exact = np.array([segment.state == EXACT for segment in recipe.segments], dtype=bool)[recipe.which]
    return min(sequence.exact, len(exact) if exact.all() else int(exact.argmin()))
