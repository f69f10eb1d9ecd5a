"""What a finished call knows of one of its rows, before it is stored."""

from dataclasses import dataclass, replace

import numpy as np

from .pool import Extent
from .segments import EXACT
from .shelf import Recipe, Shelf, joined


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
