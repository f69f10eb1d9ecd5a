"""Pinned sequences: never given up for room, within a share of the store."""

from collections.abc import Collection, Iterable

import numpy as np

from .scopes import Place, Scope
from .segments import Segment
from .shelf import Sequence, Shelf


def pinned_segments(shelves: Iterable[Shelf]) -> set[Segment]:
    """The segments that pinned sequences of these shelves refer to."""
    pinned = (sequence for shelf in shelves for sequence in shelf.sequences if sequence.pinned)
    return {segment for sequence in pinned for segment in sequence.recipe.segments}


def check_share(store, identity, scope: Scope, shapes: tuple, texts: Collection[np.ndarray]) -> None:
    """
    Raise `ValueError` if these texts, pinned as well, would pass the share of the store that pins may have.

    Args:
        store (`Store`), identity, scope (`Scope`), shapes (`tuple` of `LayerShape`): Where they are to be stored.
        texts (sequence of `np.ndarray`): Token ids, `[rows]` each. What is pinned already counts once.
    """
    with store.lock:
        pool, shelves = store.shelf(identity, Place(scope), shapes).pool, store.shelves.values()
        held = sum(len(each) * shelf.pool.row_bytes for shelf in shelves for each in pinned_segments([shelf]))
        here = _shelves(store, identity, scope)
        new = sum(pool.round_up(len(ids)) for ids in texts if not any(_is_pinned(shelf, ids) for shelf in here))
        share, max_bytes = store.config.pin_share, store.budget.max_bytes
    wanted, allowed = held + new * pool.row_bytes, int(share * max_bytes)
    if wanted > allowed:
        raise ValueError(
            f"these texts would bring what is pinned to {wanted:,} bytes, and {allowed:,} may be (`pin_share` {share} "
            f"of {max_bytes:,}): pin fewer, `unpin()` others, or raise `pin_share` or `max_bytes`."
        )


def pin(store, identity, scope: Scope, ids: np.ndarray) -> bool:
    """Pin a text (`ids`, `[rows]`) that is stored from its first token to its last; False if it is not."""
    with store.lock:
        try:
            return any([_pin(shelf, ids, store.clock()) for shelf in _shelves(store, identity, scope)])
        except BaseException:
            store.unsure = True
            raise


def unpin(store) -> int:
    """Take all pins of a store off; returns how many there were."""
    with store.lock:
        pinned = [sequence for shelf in store.shelves.values() for sequence in shelf.sequences if sequence.pinned]
        for sequence in pinned:
            sequence.pinned = False
        return len(pinned)


def _shelves(store, identity, scope: Scope) -> list[Shelf]:
    """The shelves of an identity and scope: one for each condition that rows are computed under."""
    return [shelf for key, shelf in store.shelves.items() if key[0] is identity and key[1].scope == scope]


def _pin(shelf: Shelf, ids: np.ndarray, now: float) -> bool:
    found = shelf.exact_prefixes.longest(ids) + shelf.conversations.longest(ids)
    whole = [sequence for sequence, length in found if length == len(ids)]
    if not whole:
        return False
    # the most exact one; of a longer one its beginning, in a sequence of its own that takes no memory
    sequence = min(whole, key=lambda each: (-min(each.exact, len(ids)), len(each.ids)))
    if len(sequence.ids) > len(ids):
        exact = min(sequence.exact, len(ids))
        hops = 0 if exact == len(ids) else sequence.hops
        sequence = Sequence(ids, sequence.recipe.head(len(ids)), exact, len(ids), hops, last_used=now)
        shelf.add(sequence)
    sequence.pinned = True
    return True


def _is_pinned(shelf: Shelf, ids: np.ndarray) -> bool:
    found = shelf.exact_prefixes.longest(ids) + shelf.conversations.longest(ids)
    return any(sequence.pinned and length == len(ids) == len(sequence.ids) for sequence, length in found)
