"""Runs against a brute-force search over all diagonals, prefixes against comparing with everything stored."""

import gc
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_suffix_cache.kernels import window_hashes
from hf_suffix_cache.store.index import PrefixIndex, WindowIndex
from hf_suffix_cache.store.segments import MAX_HOPS, Segment


def make_segment(context, positions=None, **fields):
    """A segment whose rows are `positions` (all, unless given) of the request `context`."""
    context = np.asarray(context, dtype=np.int64)
    positions = np.arange(len(context)) if positions is None else np.asarray(positions)
    return Segment(context[positions], positions, context, np.arange(len(positions)), **fields)


def slow_runs(ids, segments, first=0, min_match=16):
    """Every maximal common run of `ids[first:]` and a gap-free piece, by walking along every diagonal."""
    runs = set()
    for segment in segments:
        for piece_start, piece_stop in segment.pieces():
            for diagonal in range(first - piece_stop, len(ids) - piece_start + 1):
                length = 0
                for row in range(piece_start, piece_stop + 1):
                    at = row + diagonal
                    inside = row < piece_stop and first <= at < len(ids)
                    if inside and ids[at] == segment.ids[row]:
                        length += 1
                        continue
                    if length >= min_match:
                        runs.add((at - length, at, segment.segment_id, row - length))
                    length = 0
    return runs


def as_tuples(runs):
    return [(run.start, run.stop, run.segment.segment_id, run.offset) for run in runs]


def check_fields(ids, runs):
    """Everything a run says about itself, from the definitions."""
    for run in runs:
        rows = slice(run.offset, run.offset + len(run))
        assert np.array_equal(run.segment.ids[rows], ids[run.start : run.stop])
        assert (np.diff(run.segment.positions[rows]) == 1).all()
        seen = int(run.segment.positions[run.offset])
        assert (run.shift, run.left_total, run.hops) == (run.start - seen, seen, run.segment.hops)
        left = 0
        context = run.segment.context
        while left < min(16, run.start, seen) and ids[run.start - 1 - left] == context[seen - 1 - left]:
            left += 1
        start = 0
        while start < min(64, len(ids), len(context)) and ids[start] == context[start]:
            start += 1
        assert (run.left_match, run.same_start) == (left, start)


def constant_hash(ids, window):
    return np.zeros(max(0, len(ids) - window + 1), dtype=np.uint64)


def mod7_hash(ids, window):
    return window_hashes(ids, window) % np.uint64(7)


HASHES = {"real": window_hashes, "mod7": mod7_hash, "constant": constant_hash}


def random_case(rng, vocabulary, num_segments=4, length=120):
    """Segments (some with gaps, some behind a context) and a prompt of their pieces and new words."""
    segments = []
    for _ in range(num_segments):
        context = rng.integers(0, vocabulary, rng.integers(20, length))
        keep = np.ones(len(context), dtype=bool)
        keep[: rng.integers(0, 12)] = False
        for _ in range(rng.integers(0, 3)):
            start = rng.integers(0, len(context))
            keep[start : start + rng.integers(1, 6)] = False
        segments.append(make_segment(context, np.flatnonzero(keep), hops=int(rng.integers(0, 3))))
    parts = []
    for _ in range(5):
        context = segments[rng.integers(0, num_segments)].context
        start = rng.integers(0, len(context))
        parts += [context[start : start + rng.integers(5, 60)], rng.integers(0, vocabulary, rng.integers(0, 9))]
    return segments, np.concatenate(parts)


@pytest.mark.parametrize("hash_name", HASHES)
@pytest.mark.parametrize("vocabulary", [2, 50_000])
def test_find_runs_random_text_equals_brute_force(hash_name, vocabulary):
    rng = np.random.default_rng(vocabulary)
    total = 0
    for _ in range(6):
        segments, ids = random_case(rng, vocabulary)
        index = WindowIndex(max_candidates=255, hash_fn=HASHES[hash_name])
        assert all([index.add(segment) for segment in segments])
        for first, min_match in ((0, 16), (37, 16), (0, 15), (0, 40)):
            runs = index.find_runs(ids, first, min_match)
            expected = slow_runs(ids, segments, first, min_match)
            assert sorted(as_tuples(runs)) == sorted(expected)
            check_fields(ids, runs)
            total += len(runs)
    assert total > 20  # control: there was something to find


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_find_runs_stride_one_finds_all_shortest_runs(data):
    """Window 3 at every token: nothing of 3 tokens may be missed, whatever the tokens."""
    tokens = st.lists(st.integers(0, 2), min_size=0, max_size=25)
    segments = [make_segment(ids) for ids in data.draw(st.lists(tokens, min_size=1, max_size=3))]
    ids = np.array(data.draw(tokens), dtype=np.int64)
    first = data.draw(st.integers(0, 5))
    index = WindowIndex(window=3, stride=1, max_candidates=255)
    kept = [segment for segment in segments if index.add(segment)]
    runs = index.find_runs(ids, first, 3)
    assert sorted(as_tuples(runs)) == sorted(slow_runs(ids, kept, first, 3))
    check_fields(ids, runs)


def test_find_runs_control_hash_that_forgets_finds_nothing():
    """Control of the oracle: an index whose hashes are of no use must fail the comparison."""
    rng = np.random.default_rng(0)

    def forgetful(ids, window):
        return rng.integers(0, 2**63, max(0, len(ids) - window + 1)).astype(np.uint64)

    segment = make_segment(np.arange(100))
    index = WindowIndex(hash_fn=forgetful)
    index.add(segment)
    assert slow_runs(np.arange(100), [segment]) and index.find_runs(np.arange(100)) == []


@pytest.mark.parametrize("length", range(15, 24))
def test_find_runs_fifteen_tokens_anywhere_found(length):
    rng = np.random.default_rng(length)
    segment = make_segment(rng.integers(0, 1000, 64))
    index = WindowIndex()
    index.add(segment)
    for row in range(64 - length + 1):
        ids = np.concatenate([[2000], segment.ids[row : row + length], [2001]])
        assert as_tuples(index.find_runs(ids, 0, 15)) == [(1, 1 + length, segment.segment_id, row)]
        assert (index.find_runs(ids) == []) == (length < 16)


@pytest.mark.parametrize("hash_name", HASHES)
def test_find_runs_adversarial_ids_equal_brute_force(hash_name):
    """Zeros in front, one block permuted in every way, blocks that differ by one token."""
    rng = np.random.default_rng(3)
    block = np.arange(1, 9)
    permuted = np.concatenate([rng.permutation(block) for _ in range(20)])
    zeros = np.concatenate([np.zeros(9), block, np.zeros(8), block[::-1]])
    edited = np.tile(block, 6)
    edited[::9] += 1
    segments = [make_segment(part) for part in (permuted, zeros, edited, np.zeros(17), np.arange(17))]
    index = WindowIndex(max_candidates=255, hash_fn=HASHES[hash_name])
    kept = [segment for segment in segments if index.add(segment)]
    assert len(kept) >= 4
    for ids in (permuted[3:], permuted[::-1], np.concatenate([zeros, edited]), np.roll(edited, 5), np.zeros(40)):
        ids = ids.astype(np.int64)
        assert sorted(as_tuples(index.find_runs(ids))) == sorted(slow_runs(ids, kept))


@pytest.mark.parametrize("hash_name", ["mod7", "constant"])
def test_find_runs_bad_hash_few_candidates_same_answer_as_good_hash(hash_name):
    """Only windows with equal tokens count as candidates, however many others share their hash."""
    rng = np.random.default_rng(8)
    front = rng.integers(0, 100, 7)
    endings = [np.concatenate([front, [200 + number], rng.integers(0, 100, 7)]) for number in range(30)]  # 1 window
    segments, ids = random_case(rng, 2, num_segments=8)
    segments += [make_segment(ending) for ending in endings]
    good = WindowIndex(max_candidates=2)
    bad = WindowIndex(max_candidates=2, hash_fn=HASHES[hash_name])
    assert [good.add(segment) for segment in segments] == [bad.add(segment) for segment in segments]
    for prompt in (ids, *endings[:4]):
        assert as_tuples(bad.find_runs(prompt, 0, 15)) == as_tuples(good.find_runs(prompt, 0, 15)) != []


def test_find_runs_same_text_twice_gives_two_runs():
    text = np.arange(100, 140)
    segment = make_segment(text)
    index = WindowIndex()
    index.add(segment)
    ids = np.concatenate([[1, 2, 3], text, [4, 5], text])
    assert as_tuples(index.find_runs(ids)) == [
        (3, 43, segment.segment_id, 0),
        (45, 85, segment.segment_id, 0),
    ]


def test_find_runs_gap_in_positions_is_not_crossed():
    context = np.arange(60)
    segment = make_segment(context, np.r_[0:20, 25:60])  # rows 20 and on were computed at position 25 and on
    index = WindowIndex()
    index.add(segment)
    ids = np.concatenate([segment.ids, [999]])  # the rows' tokens one behind the other, across the gap
    assert as_tuples(index.find_runs(ids)) == [(0, 20, segment.segment_id, 0), (20, 55, segment.segment_id, 20)]
    assert [run.left_match for run in index.find_runs(ids)] == [0, 0]
    both = index.find_runs(context)
    assert [(run.start, run.shift, run.left_match) for run in both] == [(0, 0, 0), (25, 0, 16)]


def test_find_runs_first_cuts_and_left_match_still_sees_left():
    segment = make_segment(np.arange(80))
    index = WindowIndex()
    index.add(segment)
    (run,) = index.find_runs(np.arange(80), first=30)
    assert (run.start, run.stop, run.offset, run.left_match, run.left_total) == (30, 80, 30, 16, 30)
    (run,) = index.find_runs(np.arange(80), first=5)
    assert (run.start, run.left_match) == (5, 5)
    assert index.find_runs(np.arange(80), first=65) == []
    assert index.find_runs(np.arange(80), first=500) == []


def test_find_runs_rare_text_behind_common_text_is_whole():
    """20 copies of a template, 8 candidates a window: the copy whose ending the prompt has must not be cut."""
    rng = np.random.default_rng(5)
    template = rng.integers(0, 1000, 48)
    segments = [make_segment(np.concatenate([template, rng.integers(1000, 2000, 24)])) for _ in range(20)]
    index = WindowIndex()
    assert all([index.add(segment) for segment in segments])
    runs = index.find_runs(segments[3].ids)
    assert (0, 72, segments[3].segment_id, 0) in as_tuples(runs)
    assert max_overlap(runs, 72) == 8


def max_overlap(runs, length):
    cover = np.zeros(length, dtype=int)
    for run in runs:
        cover[run.start : run.stop] += 1
    return cover.max()


def test_find_runs_repeated_call_same_answer_in_order():
    rng = np.random.default_rng(11)
    segments, ids = random_case(rng, 2, num_segments=8)
    index = WindowIndex()
    for segment in segments:
        index.add(segment)
    answers = [as_tuples(index.find_runs(ids)) for _ in range(4)]
    assert answers[0] and all(answer == answers[0] for answer in answers)
    assert answers[0] == sorted(answers[0], key=lambda run: (run[0], -run[1], run[2:]))


@pytest.mark.parametrize("period", [1, 3, 8, 997])
def test_find_runs_128k_periodic_tokens_linear_time(period):
    length = 131_072
    ids = np.resize(np.random.default_rng(0).permutation(5000)[:period], length)
    segment = make_segment(ids)
    index = WindowIndex()
    index.add(segment)
    started = time.perf_counter()
    runs = index.find_runs(ids)
    assert time.perf_counter() - started < 4  # 0.55 s measured for period 1
    assert (0, length, segment.segment_id, 0) in as_tuples(runs)
    assert max_overlap(runs, length) <= 8
    started = time.perf_counter()
    assert not index.add(make_segment(ids))  # the first one holds each of its windows more than twice
    index.remove(segment)
    assert time.perf_counter() - started < 4


def test_find_runs_128k_equal_tokens_many_short_segments_linear_time():
    index = WindowIndex()
    for size in range(40, 60):
        index.add(make_segment(np.concatenate([[size], np.full(size, 7), [size]])))
    assert len(index) > 1
    started = time.perf_counter()
    runs = index.find_runs(np.full(131_072, 7))
    assert time.perf_counter() - started < 6  # 0.7 s measured
    assert max_overlap(runs, 131_072) <= 8
    served = np.zeros(131_072, dtype=bool)
    for run in runs:
        served[run.start : run.stop] = True
    assert served.mean() > 0.99


def test_find_runs_128k_random_tokens_fast():
    rng = np.random.default_rng(0)
    index = WindowIndex()
    segments = [make_segment(rng.integers(0, 50_000, 8000)) for _ in range(100)]
    for segment in segments:
        index.add(segment)
    assert index.num_windows == 100_000
    ids = rng.integers(0, 50_000, 131_072)
    ids[1000:9000] = segments[7].ids
    started = time.perf_counter()
    runs = index.find_runs(ids)
    assert time.perf_counter() - started < 0.6  # 0.012 s measured
    assert as_tuples(runs) == [(1000, 9000, segments[7].segment_id, 0)]


def test_find_runs_wrong_ids_raise():
    index = WindowIndex()
    with pytest.raises(ValueError, match="2\\*\\*31"):
        index.find_runs(np.array([1, -1, 2]))
    with pytest.raises(TypeError, match="1-D"):
        index.find_runs(np.zeros((2, 20), dtype=np.int64))
    with pytest.raises(TypeError, match="integers"):
        index.find_runs(np.zeros(20))
    assert index.find_runs(np.array([], dtype=np.int64)) == []
    with pytest.raises(ValueError, match="max_candidates"):
        WindowIndex(max_candidates=0)


def test_add_third_context_of_one_text_is_refused():
    rng = np.random.default_rng(1)
    text = rng.integers(0, 1000, 100)
    index = WindowIndex()
    copies = [make_segment(np.concatenate([rng.integers(0, 1000, 30), text]), np.arange(30, 130)) for _ in range(3)]
    assert [index.add(copy) for copy in copies] == [True, True, False]
    assert len(index) == 2 and copies[2] not in index
    shifted = make_segment(text[3:90])  # its windows stand elsewhere than the stored ones
    assert not index.add(shifted)
    longer = make_segment(np.concatenate([text, rng.integers(0, 1000, 8)]))
    assert index.add(longer)
    index.remove(copies[0])
    index.remove(longer)
    assert index.add(copies[2])


def test_add_equal_hash_other_tokens_is_kept():
    index = WindowIndex(hash_fn=constant_hash)
    rng = np.random.default_rng(2)
    assert all([index.add(make_segment(rng.integers(0, 1000, 40))) for _ in range(6)])


def test_add_useless_segment_is_refused_and_again_is_no_op():
    index = WindowIndex()
    scattered = make_segment(np.arange(60), np.r_[0:5, 10:17, 30:33])
    assert not index.add(scattered)
    assert not index.add(make_segment(np.arange(60), hops=MAX_HOPS + 1))
    segment = make_segment(np.arange(60), hops=MAX_HOPS)
    assert index.add(segment) and index.add(segment)
    assert len(index) == 1 and index.num_windows == 7


def test_remove_everything_leaves_nothing_behind():
    rng = np.random.default_rng(4)
    index, fresh = WindowIndex(), WindowIndex()
    segments = [segment for _ in range(8) for segment in random_case(rng, 50_000)[0] if index.add(segment)]
    index.remove(make_segment(np.arange(70_000, 70_050)))
    assert len(index) == len(segments) > 25
    for number in rng.permutation(len(segments)):
        index.remove(segments[number])
        index.remove(segments[number])
        assert segments[number] not in index
        assert index.find_runs(segments[number].ids, 0, 8) == []
    for name, value in vars(fresh).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(getattr(index, name), value)
        elif name == "_table":
            assert len(index._table) == 0 and index._table.capacity == value.capacity
        else:
            assert getattr(index, name) == value


def test_remove_one_of_three_its_tokens_and_itself_are_gone():
    index = WindowIndex()
    segments = [make_segment(np.arange(100 * number, 100 * number + 50)) for number in range(1, 4)]
    for segment in segments:
        index.add(segment)
    index.remove(segments[1])
    assert len(index._tokens) and not np.isin(index._tokens, np.arange(200, 250)).any()  # not compacted yet
    assert index._garbage == 51 and len(index._piece_starts) == 2
    gone = weakref.ref(segments.pop(1))
    del segment
    gc.collect()
    assert gone() is None
    assert index.num_windows == 12


def test_remove_some_tokens_gone_rest_equals_fresh_index():
    """Holes and compaction change no answer: the same as an index that never saw the removed segments."""
    rng = np.random.default_rng(6)
    segments, ids = random_case(rng, 3, num_segments=24, length=80)
    index = WindowIndex()
    kept = [segment for segment in segments if index.add(segment)]
    while len(kept) > 1:
        gone = kept.pop(int(rng.integers(0, len(kept))))
        index.remove(gone)
        fresh = WindowIndex()
        assert all([fresh.add(segment) for segment in kept])
        assert as_tuples(index.find_runs(ids)) == as_tuples(fresh.find_runs(ids))
        assert index.num_windows == fresh.num_windows
        assert index._used <= 3 * fresh._used
    assert as_tuples(index.find_runs(kept[0].ids))


def test_compaction_of_many_segments_keeps_every_answer():
    """One insertion of all windows gives the lists that one a segment gave."""
    rng = np.random.default_rng(8)
    texts = [rng.integers(0, 3, rng.integers(30, 60)) for _ in range(40)]
    index, segments = WindowIndex(), []
    for number, text in enumerate(texts):
        keep = np.ones(len(text), dtype=bool)
        keep[10 + number % 9] = False
        segments.append(make_segment(text, np.flatnonzero(keep)))
        index.add(segments[-1])
    before = {tuple(ids): as_tuples(index.find_runs(ids, 0, 8)) for ids in texts}
    assert sum(map(len, before.values())) > 100
    used = index._used
    index._compact()
    assert index._used == used
    assert {tuple(ids): as_tuples(index.find_runs(ids, 0, 8)) for ids in texts} == before


def slow_prefix(a, b):
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 2**31 - 1]), max_size=6)


@settings(deadline=None, max_examples=200)
@given(st.lists(TOKENS, max_size=25), TOKENS, st.integers(1, 6), st.data())
def test_prefix_index_random_sequences_equal_brute_force(sequences, query, limit, data):
    index = PrefixIndex()
    for number, ids in enumerate(sequences):
        index.add(np.array(ids, dtype=np.int64), number)
    stored = dict(enumerate(sequences))
    for number in data.draw(st.sets(st.sampled_from(range(len(sequences))))) if sequences else ():
        index.remove(np.array(stored.pop(number), dtype=np.int64), number)
    found = index.longest(np.array(query, dtype=np.int64), limit)
    assert len(index) == len(stored)
    assert all(slow_prefix(stored[number], query) == length for number, length in found)
    assert len({number for number, _ in found}) == len(found)
    # What is left open is only which of several equally good sequences come.
    kinds = [(-length, length != len(stored[number])) for number, length in found]
    every = [(-slow_prefix(ids, query), slow_prefix(ids, query) != len(ids)) for ids in stored.values()]
    assert kinds == sorted(kind for kind in every if kind[0])[:limit]


def test_prefix_index_full_match_far_away_comes_first():
    index = PrefixIndex()
    index.add(np.array([1, 2]), "all of it")
    for number in range(50):
        index.add(np.array([1, 2, 3, number]), number)
    found = index.longest(np.array([1, 2, 9]), limit=3)
    assert found[0] == ("all of it", 2) and [length for _, length in found] == [2, 2, 2]


def test_prefix_index_items_of_equal_tokens_newest_first():
    index = PrefixIndex()
    ids = np.arange(5)
    first, second = object(), object()
    index.add(ids, first)
    index.add(ids, second)
    assert index.longest(np.arange(9)) == [(second, 5), (first, 5)]
    index.remove(ids, first)
    index.remove(ids, first)
    index.remove(np.arange(4), second)
    assert index.longest(np.arange(9)) == [(second, 5)]
    index.remove(ids, second)
    assert len(index) == 0 and index._keys == [] and index._items == {}
    assert index.longest(np.arange(9)) == []


def test_prefix_index_long_sequences_fast():
    rng = np.random.default_rng(0)
    index = PrefixIndex()
    front = rng.integers(0, 50_000, 100_000)
    for number in range(20):
        index.add(np.concatenate([front, rng.integers(0, 50_000, 100)]), number)
    started = time.perf_counter()
    found = index.longest(np.concatenate([front, [1, 2, 3]]))
    assert time.perf_counter() - started < 1
    assert len(found) == 8 and all(length >= 100_000 for _, length in found)
