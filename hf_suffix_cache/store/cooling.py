"""Keeping rows in a smaller dtype once no kept extent needs them as they are. They are approximate from then on."""

from collections.abc import Sequence as Collection

import numpy as np
import torch

from .cold import DTYPES, stored_dtype
from .pool import BlockPool
from .room import members, pack
from .segments import DERIVED, EXACT, Segment
from .shelf import Sequence, Shelf


def cold_dtype(pool: BlockPool, name: str | None) -> torch.dtype | None:
    """The dtype of cold rows under the setting `store_dtype`; None where it would save nothing."""
    cold = None if name is None else DTYPES[name]
    return None if all(stored_dtype(shape.dtype, cold) is shape.dtype for shape in pool.shapes) else cold


def ready(shelves: Collection[Shelf]) -> list[Segment]:
    """
    What may be converted on a pool's shelves: neither rows that a running call refers to, nor those that lie in a kept
    extent, nor the exact ones of its conversation, on whichever shelf that is.
    """
    needed = {segment for shelf in shelves for sequence in shelf.kept for segment in _needed(sequence)}
    warm = (segment for shelf in shelves for segment in shelf.warm)
    return [each for each in warm if each not in needed and each.references == each.holders]


def cool(pool: BlockPool, shelves: Collection[Shelf], cold: torch.dtype) -> int:
    """
    Convert what is ready on a pool's shelves, as far as there is room; the others stay until the next call.

    Returns:
        `int`: Segments that were converted.
    """
    segments = [segment for segment in ready(shelves) if _fits(pool, segment, cold)]
    while segments and not pack(pool, segments, cold):
        segments = segments[: len(segments) // 2]
    inexact = set()
    for segment in segments:
        segment.home().warm.pop(segment)
        if segment.state == EXACT:
            segment.state, segment.hops = DERIVED, max(1, segment.hops)
            inexact.add(segment)
    for shelf in shelves if inexact else ():
        for sequence in [each for each in shelf.sequences if not inexact.isdisjoint(each.recipe.segments)]:
            shelf.set_exact(sequence, exact_rows(sequence))
    return len(segments)


def _fits(pool: BlockPool, segment: Segment, cold: torch.dtype) -> bool:
    """
    Whether the dtype can hold these rows; those that it can't hold stay as they are for good. fp16 ends at 65,504,
    which values of a model in fp32 or bf16 may pass; bf16 holds all of fp32, and rows of 8 bit have a scale.
    """
    if cold is not torch.float16:
        return True
    for slab, rows, _ in pool.by_slab(segment.addresses):
        index = torch.from_numpy(rows)
        for tensor in (*slab.keys.values(), *slab.values.values()):
            largest = tensor.index_select(2, index.to(tensor.device)).abs().amax()
            if largest > torch.finfo(torch.float16).max:
                segment.home().warm.pop(segment)
                return False
    return True


def exact_rows(sequence: Sequence) -> int:
    """Leading rows of a sequence whose segments are exact, at most those that it has as exact ones."""
    recipe = sequence.recipe
    exact = np.array([segment.state == EXACT for segment in recipe.segments], dtype=bool)[recipe.which]
    return min(sequence.exact, len(exact) if exact.all() else int(exact.argmin()))


def _needed(sequence: Sequence) -> list[Segment]:
    recipe = sequence.recipe
    exact = [recipe.segments[number] for number in np.unique(recipe.which[: sequence.exact]).tolist()]
    return exact + members(sequence)
