"""Find stored text in a prompt: runs of tokens anywhere (`WindowIndex`), and the longest front (`PrefixIndex`)."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hf_suffix_cache.kernels import window_hashes
from hf_suffix_cache.lookup import find_spans, make_table
from hf_suffix_cache.store.segments import Segment

LEFT_TOKENS = 16  # left neighbours compared to tell a seam
SAME_START_TOKENS = 64

_GAP = -1  # stands between stored pieces; no token id equals it
_CUT = -2  # stands between pieces of a segment that is looked up; equals neither a token id nor _GAP
_MAX_IDS = 2**31
_PROBED_AT_ONCE = 1 << 22  # table entries, 32 MB
_CHECKED_TOKENS = 16  # a hit that can't reach this length (or `min_match`, if that is less) is dropped early
_MAX_COPIES = 2  # contexts kept of one text


@dataclass(frozen=True)
class Run:
    """
    Consecutive stored rows that hold the tokens of `[start, stop)` of a prompt.

    Args:
        start (`int`): First prompt position.
        stop (`int`): Position behind the last one.
        segment (`Segment`): Where the rows are.
        offset (`int`): Rows `[offset, offset + stop - start)` of `segment`; their positions have no gap.
        shift (`int`): `start` minus the position that row `offset` was computed at.
        hops (`int`): Generations of moved rows behind these rows.
        left_match (`int`): How many tokens directly left of `start` agree with those that row `offset` saw, 0 to 16.
        left_total (`int`): How many tokens row `offset` saw to its left.
        same_start (`int`): Equal leading tokens of the prompt and `segment.context`, at most 64.
    """

    start: int
    stop: int
    segment: Segment
    offset: int
    shift: int
    hops: int
    left_match: int
    left_total: int
    same_start: int

    def __len__(self) -> int:
        return self.stop - self.start


class WindowIndex:
    """
    Finds every long enough run of tokens that a prompt and a stored segment have in common.

    Pieces of segments without a gap lie one behind the other in one token array, with a gap mark around each, so that
    comparing tokens there never crosses a border. Windows at every `stride`-th token of a piece are in a hash table
    (hash -> place in that array). A common run of `window + stride - 1` tokens holds one of them, wherever it starts.

    Args:
        window (`int`, *optional*, defaults to 8): Tokens in a window.
        stride (`int`, *optional*, defaults to 8): Distance of stored windows.
        max_candidates (`int`, *optional*, defaults to 8): Most equal windows looked at per prompt position, newest
            segment first, and most runs that may overlap at one.
        hash_fn (*optional*): `hash_fn(ids, window) -> uint64 [n - window + 1]`. A bad one only costs time.
        device (*optional*, defaults to `"cpu"`): Where the table lies: where the model's rows do.
    """

    def __init__(
        self,
        window: int = 8,
        stride: int = 8,
        max_candidates: int = 8,
        hash_fn: Callable = window_hashes,
        device="cpu",
    ):
        for name, value in (("window", window), ("stride", stride), ("max_candidates", max_candidates)):
            if not 1 <= value <= 255:
                raise ValueError(f"`{name}` must be from 1 to 255, got {value}.")
        self.window = window
        self.stride = stride
        self.max_candidates = max_candidates
        self.hash_fn = hash_fn
        self.device = device
        self._reset()

    def __len__(self) -> int:
        """Number of indexed segments."""
        return len(self._places)

    def __contains__(self, segment: Segment) -> bool:
        return segment in self._places

    @property
    def segments(self) -> list[Segment]:
        """Indexed segments."""
        return list(self._places)

    @property
    def num_windows(self) -> int:
        """Number of stored windows."""
        return len(self._table)

    def add(self, segment: Segment) -> bool:
        """
        Make a segment findable.

        Returns:
            `bool`: False, and nothing is kept, if no row of it could be of use: rows that may not be moved, pieces
            shorter than a window, or every window present twice already (at most two contexts of one text are kept).
        """
        if segment in self._places:
            return True
        pieces = [piece for piece in segment.pieces() if piece[1] - piece[0] >= self.window]
        ids = _checked(segment.ids, "segment.ids")
        if not pieces or not segment.movable or self._present(ids, pieces):
            return False
        self._places[segment] = (self._used, sum(stop - start + 1 for start, stop in pieces))
        for start, stop in pieces:
            self._append(segment, start, ids[start:stop])
        self._table.insert(*self._windows([self._places[segment]]))
        return True

    def remove(self, segment: Segment) -> None:
        """Forget a segment; no-op for one that is not indexed."""
        if segment not in self._places:
            return
        start, length = self._places[segment]
        self._table.remove(*self._windows([(start, length)]))
        del self._places[segment]
        if not self._places:
            self._reset()
            return
        self._tokens[start : start + length] = _GAP
        first, last = bisect_left(self._piece_starts, start), bisect_left(self._piece_starts, start + length)
        del self._piece_starts[first:last], self._piece_rows[first:last]
        self._garbage += length
        if 2 * self._garbage > self._used:
            self._compact()

    def find_runs(self, ids: np.ndarray, first: int = 0, min_match: int = 16) -> list[Run]:
        """
        Runs of a prompt that stored segments hold.

        Each is maximal inside `[first, len(ids))` and its piece, unless it meets a place where `max_candidates` runs
        overlap already: it ends there, which keeps the time linear. Text whose windows are rare in the store goes
        first. The same text twice in a prompt gives two runs, and each copy in the store gives its own.

        Args:
            ids (`np.ndarray` of int64, `[n]`): The prompt.
            first (`int`, *optional*, defaults to 0): Nothing left of this position is looked up or returned.
            min_match (`int`, *optional*, defaults to 16): Shortest run. Runs below `window + stride - 1` tokens are
                found only if a stored window lies inside them.

        Returns:
            `list[Run]`: Sorted by start, longest first.
        """
        ids = _checked(ids, "ids")
        same_start: dict[Segment, int] = {}
        found = self._spans(ids, max(0, first), max(1, min_match))
        runs = [self._run(ids, start, stop, place, same_start) for start, stop, place in found]
        return sorted(runs, key=lambda run: (run.start, -run.stop, run.segment.segment_id, run.offset))

    def _reset(self) -> None:
        self._table = make_table(self.device)
        self._tokens = np.full(1024, _GAP, dtype=np.int64)
        self._used = 1  # entry 0 is the mark left of the first piece
        self._garbage = 0
        self._places: dict[Segment, tuple[int, int]] = {}  # start and length in _tokens, gap marks included
        self._piece_starts: list[int] = []  # ascending
        self._piece_rows: list[tuple[Segment, int]] = []  # segment and its row at that start

    def _append(self, segment: Segment, row: int, ids: np.ndarray) -> None:
        stop = self._used + len(ids)
        if stop + 1 > len(self._tokens):
            grown = np.full(2 * (stop + 1), _GAP, dtype=np.int64)
            grown[: self._used] = self._tokens[: self._used]
            self._tokens = grown
        self._tokens[self._used : stop] = ids
        self._piece_starts.append(self._used)
        self._piece_rows.append((segment, row))
        self._used = stop + 1

    def _windows(self, parts: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """
        Hashes and places of the windows of segments, given by start and length, oldest first. Each one's last window
        comes first: repeated text is to be found at its beginning.
        """
        hashes, places = [], []
        for start, length in parts:  # one by one: the hashes of millions of tokens at once would leave the cache
            first, last = bisect_left(self._piece_starts, start), bisect_left(self._piece_starts, start + length)
            borders = [*self._piece_starts[first:last], start + length]
            pieces = [
                np.arange(piece, following - self.window, self.stride, dtype=np.int64)
                for piece, following in zip(borders, borders[1:], strict=False)
            ]
            places.append(np.concatenate(pieces)[::-1])
            hashes.append(self.hash_fn(self._tokens[start : start + length], self.window)[places[-1] - start])
        return np.concatenate(hashes), np.concatenate(places)

    def _compact(self) -> None:
        """Close the holes that removed segments left. Order of age, and so every answer, stays."""
        old, places, rows, starts = self._tokens, self._places, self._piece_rows, self._piece_starts
        self._reset()
        for segment, (start, length) in places.items():
            self._places[segment] = (self._used, length)
            first, last = bisect_left(starts, start), bisect_left(starts, start + length)
            borders = [*starts[first:last], start + length]
            for piece, (begin, end) in enumerate(zip(borders, borders[1:], strict=False), first):
                self._append(segment, rows[piece][1], old[begin : end - 1])
        self._table.insert(*self._windows(list(self._places.values())))

    def _present(self, ids: np.ndarray, pieces: list[tuple[int, int]]) -> bool:
        """Whether every stored window of these pieces is in the index `_MAX_COPIES` times, at whatever offset."""
        if not self._places:
            return False
        parts, windows, used = [], [], 0
        for start, stop in pieces:
            parts += [ids[start:stop], [_CUT]]
            windows.append(np.arange(used, used + stop - start - self.window + 1, self.stride))
            used += stop - start + 1
        copies = np.zeros(used + 1, dtype=np.int64)
        for start, stop, _ in self._spans(np.concatenate(parts), 0, self.window):
            copies[start] += 1
            copies[stop - self.window + 1] -= 1
        return bool((np.cumsum(copies)[np.concatenate(windows)] >= _MAX_COPIES).all())

    def _spans(self, ids: np.ndarray, first: int, min_match: int) -> list[tuple[int, int, int]]:
        """Common runs as (start, stop, place of start in `_tokens`): hits are grown one by one, rare ones first."""
        if len(ids) - first < max(self.window, min_match) or not self._places:
            return []
        hashes, check = self.hash_fn(ids[first:], self.window), min(min_match, _CHECKED_TOKENS)
        tokens = self._tokens[: self._used]
        found = find_spans(self._table, hashes, ids, first, min_match, check, self.window, self.max_candidates, tokens)
        if found is not None:
            return list(map(tuple, found.tolist()))
        position, place = self._hits(ids, hashes, first, check)
        spans: list[tuple[int, int, int]] = []
        cover = np.zeros(len(ids), dtype=np.uint8)  # how many runs hold each position
        seen: dict[int, list[tuple[int, int]]] = {}  # diagonal -> parts of it that were grown already, ascending
        for start, at in zip(position.tolist(), place.tolist(), strict=True):
            if cover[start] >= self.max_candidates:
                continue
            done = seen.setdefault(at - start, [])
            before = bisect_right(done, (start, len(ids))) - 1
            if before >= 0 and done[before][1] > start:
                continue
            right = start + self._grow(ids[start:], self._tokens[at:], cover[start:])
            left = start - self._grow(ids[first:start][::-1], self._tokens[:at][::-1], cover[first:start][::-1])
            insort(done, (left, right))
            if right - left >= min_match:
                cover[left:right] += 1
                spans.append((left, right, at - start + left))
        return spans

    def _grow(self, ids: np.ndarray, tokens: np.ndarray, cover: np.ndarray) -> int:
        """How many leading entries of `ids` and `tokens` agree, up to the first place that is covered fully."""
        done, step, end = 0, 64, min(len(ids), len(tokens))
        while done < end:
            part = slice(done, min(done + step, end))
            same = (ids[part] == tokens[part]) & (cover[part] < self.max_candidates)
            if not same.all():
                return done + int(same.argmin())
            done, step = part.stop, 2 * step
        return done

    def _hits(self, ids: np.ndarray, hashes: np.ndarray, first: int, check: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Prompt positions and equal stored windows, in the order in which to grow them.

        Returns:
            Two `np.ndarray` of int64, `[hits]`: Start of the window in `ids`, its place in `_tokens`.
        """
        parts = []
        pending, limit = np.arange(len(hashes)), self.max_candidates
        while len(pending):
            again = []
            at_once = max(1, _PROBED_AT_ONCE // limit)
            for chunk in np.split(pending, range(at_once, len(pending), at_once)):
                row, place, rank, unfinished = self._confirmed(ids, hashes, chunk, first, limit)
                parts.append((first + chunk[row], place, rank))
                again.append(chunk[unfinished])
            # Where different windows share a hash, equal ones may lie deeper in the list than we have read.
            pending, limit = np.concatenate(again), 4 * limit
        position, place, rank = (np.concatenate(part) for part in zip(*parts, strict=True))
        number = np.bincount(position, minlength=len(ids))[position]
        long_enough = self._reaches(ids, position, place, first, check)
        position, place, rank, number = (part[long_enough] for part in (position, place, rank, number))
        order = np.lexsort((rank, position, number))
        return position[order], place[order]

    def _confirmed(self, ids: np.ndarray, hashes: np.ndarray, chunk: np.ndarray, first: int, limit: int):
        """Candidates whose tokens are equal (row of `chunk`, place, rank), and which rows must be read deeper."""
        found = self._table.probe(hashes[chunk], limit)
        row, column = np.nonzero(found >= 0)
        place, position = found[row, column], first + chunk[row]
        equal = np.ones(len(row), dtype=bool)
        for k in range(self.window):
            equal &= ids[position + k] == self._tokens[place + k]
        row, place = row[equal], place[equal]
        number = np.bincount(row, minlength=len(chunk))
        unfinished = (found[:, -1] >= 0) & (number < self.max_candidates)
        rank = np.arange(len(row)) - (np.cumsum(number) - number)[row]
        keep = ~unfinished[row] & (rank < self.max_candidates)
        return row[keep], place[keep], rank[keep], unfinished

    def _reaches(self, ids: np.ndarray, position: np.ndarray, place: np.ndarray, first: int, length: int):
        """Which hits lie in a common run of at least `length` tokens inside `[first, len(ids))`: bool `[hits]`."""
        missing = np.full(len(position), length - self.window)
        for step, start in ((1, self.window), (-1, -1)):
            active = np.flatnonzero(missing > 0)
            at = position[active] + start
            stored = place[active] + start
            while len(active):
                inside = (at >= first) & (at < len(ids))
                inside[inside] = ids[at[inside]] == self._tokens[stored[inside]]
                active, at, stored = active[inside], at[inside] + step, stored[inside] + step
                missing[active] -= 1
                more = missing[active] > 0
                active, at, stored = active[more], at[more], stored[more]
        return missing <= 0

    def _run(self, ids: np.ndarray, start: int, stop: int, place: int, same_start: dict[Segment, int]) -> Run:
        piece = bisect_right(self._piece_starts, place) - 1
        segment, row = self._piece_rows[piece]
        offset = row + place - self._piece_starts[piece]
        seen = int(segment.positions[offset])
        context, left_match = segment.context, 0
        if segment not in same_start:  # most often the first tokens differ: then arrays would cost more than they save
            front = len(ids) and len(context) and ids[0] == context[0]
            same_start[segment] = common_prefix(ids[:SAME_START_TOKENS], context[:SAME_START_TOKENS]) if front else 0
        if start and seen and ids[start - 1] == context[seen - 1]:
            left = context[max(0, seen - LEFT_TOKENS) : seen][::-1]
            left_match = common_prefix(ids[max(0, start - LEFT_TOKENS) : start][::-1], left)
        if segment.is_mean:  # what was left of its first row differs from copy to copy
            left_match = min(left_match, offset + segment.copies.shared_left)
        return Run(start, stop, segment, offset, start - seen, segment.hops, left_match, seen, same_start[segment])


class PrefixIndex:
    """
    Stored sequences by their tokens, in lexicographic order: those that share the longest front with a prompt are the
    neighbours of the place where the prompt would stand.
    """

    def __init__(self):
        self._keys: list[bytes] = []  # ascending; big-endian tokens, so that bytes sort as tokens do
        self._items: dict[bytes, list[object]] = {}

    def __len__(self) -> int:
        """Number of items."""
        return sum(len(items) for items in self._items.values())

    def add(self, ids: np.ndarray, item: object) -> None:
        """Keep `item` under the tokens `ids` (int64, `[n]`). Several items may share them."""
        key = _key(ids)
        if key not in self._items:
            insort(self._keys, key)
        self._items.setdefault(key, []).append(item)

    def remove(self, ids: np.ndarray, item: object) -> None:
        """Forget `item` (the very object) under `ids`; no-op where it is not."""
        key = _key(ids)
        items = [kept for kept in self._items.get(key, []) if kept is not item]
        if items:
            self._items[key] = items
        elif key in self._items:
            del self._items[key], self._keys[bisect_left(self._keys, key)]

    def longest(self, ids: np.ndarray, limit: int = 8) -> list[tuple[object, int]]:
        """
        Items that share a front with a prompt.

        Args:
            ids (`np.ndarray` of int64, `[n]`): The prompt.
            limit (`int`, *optional*, defaults to 8): Most items.

        Returns:
            `list[tuple[object, int]]`: Item and length of the common front (at least 1), longest first. Among equals
            those whose tokens match completely come first, then newer ones of the same tokens.
        """
        query = _key(ids)
        middle = bisect_right(self._keys, query)
        shared = self._walk(query, range(middle - 1, -1, -1), limit)
        shared |= self._walk(query, range(middle, len(self._keys)), limit)
        for length in set(shared.values()):  # a complete match sorts before all others of its length: maybe far off
            front = query[: 4 * length]
            if front in self._items:
                shared[front] = length
        ordered = sorted(shared, key=lambda key: (-shared[key], len(key) != 4 * shared[key]))  # stable: nearest first
        return [(item, shared[key]) for key in ordered for item in reversed(self._items[key])][:limit]

    def _walk(self, query: bytes, indices: range, limit: int) -> dict[bytes, int]:
        """Neighbours on one side, nearest first, with their common fronts, which only get shorter on the way."""
        shared: dict[bytes, int] = {}
        number = 0
        tokens = np.frombuffer(query, dtype=">i4")
        for index in indices:
            key = self._keys[index]
            length = common_prefix(tokens, np.frombuffer(key, dtype=">i4"))
            if number >= limit or not length:
                break
            shared[key] = length
            number += len(self._items[key])
        return shared


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of equal leading entries of two 1-D arrays."""
    end = min(len(a), len(b))
    differs = a[:end] != b[:end]
    return int(differs.argmax()) if differs.any() else end


def _checked(ids: np.ndarray, name: str) -> np.ndarray:
    ids = np.asarray(ids)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise TypeError(f"`{name}` must be a 1-D array of integers, got shape {ids.shape} of {ids.dtype}.")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < _MAX_IDS:
        raise ValueError(f"`{name}` must hold token ids from 0 to 2**31 - 1, got {ids.min()} to {ids.max()}.")
    return ids.astype(np.int64, copy=False)


def _key(ids: np.ndarray) -> bytes:
    return _checked(ids, "ids").astype(">i4").tobytes()
