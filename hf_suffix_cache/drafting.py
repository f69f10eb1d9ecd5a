"""What a finished request leaves to the store, row by row of its batch."""

import numpy as np

from .store.drafts import Draft
from .store.index import common_prefix
from .store.shelf import Recipe, Sequence, Shelf


def store_rows(request, tokens: np.ndarray, handed_out: bool) -> list[Sequence]:
    """
    Store what a request leaves; returns the sequences. The store's lock is held meanwhile.

    Args:
        request (`Request`): Its forwards are done.
        tokens (`np.ndarray` of int, `[batch, columns]`): All that was fed to the model.
        handed_out (`bool`): Whether its view goes to the caller.
    """
    frequencies, view, stored = request.frequencies(), request.view, []
    for number in range(len(tokens)):
        if request.store_answer or number % request.batch.group == 0:
            draft = draft_of(request, number, tokens[number])
            shared = _share(request, draft, frequencies, handed_out)
            sequence = view.store.commit(view.shelf, draft, frequencies, handed_out, shared, wanted=request.wanted)
            stored += [sequence] if sequence is not None else []
            if sequence is None and handed_out and view.extent.pooled:
                request.remark(view.store.no_copies(view.shelf))
    return stored


def _share(request, draft: Draft, frequencies, handed_out: bool) -> Shelf | None:
    """Store the start of a prompt that all may reuse, if the call names one; returns the shared shelf."""
    reading = request.reading
    length = shared_length(draft.ids[: draft.prompt_length], request.config.share_prefix)
    if length == 0 or reading.own.scope.kind == "shared":
        return reading.shared
    shelf = request.shared_of(request.regime, request.with_types)
    front = draft.shared_front(length, shelf)
    if front is not None:
        request.view.store.commit(shelf, front, frequencies, handed_out, keep_extent=False)
    return shelf


def draft_of(request, number: int, tokens: np.ndarray) -> Draft:
    """
    One batch row of a request as the store takes it.

    Args:
        request (`Request`): Its forwards are done.
        number (`int`): The batch row.
        tokens (`np.ndarray` of int, `[columns]`): All that was fed to the model in that row.
    """
    row = request.rows[number // request.batch.group]
    stop = _end(request, tokens) if request.store_answer else min(request.batch.prompt_columns, len(tokens))
    ids = tokens[row.pad : stop].astype(np.int64)
    exact = row.exact
    if request.healer is not None:
        exact = request.healer.exact - row.pad
        row.mark_recomputed(request.healer.healed)
    elif exact == len(row.ids):
        exact = len(ids)
    exact = min(exact, len(ids))
    return Draft(
        ids,
        len(row.ids),
        _extended(row.recipe(), len(ids)),
        exact,
        0 if exact == len(ids) else row.hops,
        request.view.extent,
        number,
        row.pad,
        _reach(request.reach, number, row.pad, len(ids)),
        request.report.expected_kl,
    )


def shared_length(ids: np.ndarray, share_prefix: int | tuple[int, ...] | None) -> int:
    """How many leading tokens of a prompt all may reuse."""
    if share_prefix is None:
        return 0
    if isinstance(share_prefix, int):
        return min(share_prefix, len(ids))
    return common_prefix(ids, np.array(share_prefix, dtype=np.int64))


def _extended(recipe: Recipe, length: int) -> Recipe:
    """A prompt's recipe with the generated rows behind it, which the call has computed itself."""
    extra = length - len(recipe)
    if extra > 0:
        zeros = np.zeros(extra, dtype=np.int64)
        recipe.which = np.concatenate([recipe.which, np.full(extra, -1, dtype=np.int32)])
        recipe.offset, recipe.shift = (np.concatenate([part, zeros]) for part in (recipe.offset, recipe.shift))
    return recipe


def _reach(reach: np.ndarray | None, number: int, pad: int, rows: int) -> np.ndarray | None:
    """How far each row looked, `[rows, distances]`, NaN where that was not read; None if no policy asks for it."""
    if reach is None:
        return None
    kept = np.full((rows, reach.shape[2]), np.nan, dtype=np.float16)
    known = reach[number, pad : pad + rows]
    kept[: len(known)] = known
    return kept


def _end(request, tokens: np.ndarray) -> int:
    """Columns up to the end of the sequence: its first stop token, or what fills a finished row."""
    first = request.batch.prompt_columns
    answer = tokens[first:]
    ended = np.flatnonzero(np.isin(answer, list(request.stops)))
    if len(ended):
        return first + int(ended[0]) + 1
    written = np.flatnonzero(answer != request.pad) if request.pad is not None else np.arange(len(answer))
    return first + (int(written[-1]) + 1 if len(written) else 0)
