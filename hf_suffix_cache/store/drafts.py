"""What a finished call knows of one of its rows, before it is stored."""

from dataclasses import dataclass, replace

import numpy as np

from .pool import Extent
from .room import pack
from .segments import DERIVED, EXACT, Segment
from .shelf import Recipe, Sequence, Shelf, joined


@dataclass(frozen=True, eq=False)
class Draft:
    """
    One batch row of a finished call.

    Args:
        ids (`np.ndarray` of int64, `[rows]`): Tokens.
        prompt_length (`int`): Rows of the prompt.
        served (`Recipe`): Source of each row; `which` is -1 where the row was computed in this call.
        exact (`int`): Leading rows that are exact.
        hops (`int`): Hops of the rows computed behind approximate ones.
        extent (`Extent`), row (`int`), pad (`int`): The rows lie at columns [pad, pad + rows) of batch row `row`.
        reach (`np.ndarray`, `[rows, distances]`, *optional*): See `Segment`.
        expected_kl (`float`, *optional*): See `Sequence`.
    """

    ids: np.ndarray
    prompt_length: int
    served: Recipe
    exact: int
    hops: int
    extent: Extent
    row: int
    pad: int
    reach: np.ndarray | None = None
    expected_kl: float | None = None

    @property
    def own_rows(self) -> int:
        """Rows that its call has computed."""
        return int((self.served.which < 0).sum())

    def shared_front(self, length: int, shelf: Shelf) -> "Draft | None":
        """
        Its first `length` rows, as far as they are exact, to be stored on a shared shelf: it knows nothing of the
        tokens behind them, and refers to no row of another shelf. None if nothing is left.
        """
        length = min(length, self.exact)
        if length == 0:
            return None
        served = self.served
        foreign = [segment.state != EXACT or not segment.lives_on(shelf) for segment in served.segments]
        which = served.which[:length]
        # -1 takes the last entry: rows that this call has computed
        which = np.where(np.array([*foreign, True])[which], -1, which).astype(np.int32)
        cut = Recipe(served.segments, which, served.offset[:length], np.where(which < 0, 0, served.shift[:length]))
        reach = None if self.reach is None else self.reach[:length]
        return replace(
            self,
            ids=self.ids[:length].copy(),
            prompt_length=length,
            served=joined(Recipe.empty(), cut, 0),
            exact=length,
            hops=0,
            reach=reach,
            expected_kl=None,
        )


def sequence_of(
    shelf: Shelf, draft: Draft, copy: bool, frequencies, shared: Shelf | None, now: float
) -> Sequence | None:
    """
    The draft as a sequence: stored exact rows first, then served rows, its own rows in new segments; None if those
    were to be copied (`copy`), and there was no room for it.
    """
    fronts = [each.exact_prefixes.longest(draft.ids[: draft.exact], 1) for each in (shared, shelf) if each]
    stored, front = max(((None, 0), *(found for part in fronts for found in part)), key=lambda found: found[1])
    rows = np.arange(len(draft.ids))
    own = (draft.served.which < 0) & (rows >= front)
    recipe = joined(stored.recipe.head(front) if front else Recipe.empty(), draft.served, front)
    known = len(recipe.segments)
    for state in (EXACT, DERIVED):
        positions = np.flatnonzero(own & ((rows < draft.exact) == (state == EXACT)))
        if len(positions) == 0:
            continue
        segment = Segment(
            ids=draft.ids[positions],
            positions=positions,
            context=draft.ids,
            addresses=draft.extent.addresses(draft.row, draft.pad + positions),
            state=state,
            hops=0 if state == EXACT else draft.hops,
            last_used=now,
            created=now,
            reach=None if draft.reach is None else draft.reach[positions],
        )
        shelf.pool.retain_rows(segment.addresses)
        if copy and not pack(shelf.pool, [segment], frequencies=frequencies):
            for own in [*recipe.segments[known:], segment]:
                shelf.pool.release_rows(own.addresses)
            return None
        recipe.which[positions] = len(recipe.segments)
        recipe.offset[positions] = np.arange(len(positions))
        recipe.segments.append(segment)
    approximate = draft.exact < len(draft.ids)
    expected = draft.expected_kl if approximate else None
    return Sequence(draft.ids, recipe, draft.exact, draft.prompt_length, draft.hops, expected_kl=expected)
