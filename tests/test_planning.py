"""Plans against a slow sweep that looks at every run at every step, and against their rules."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_suffix_cache.config import SuffixCacheConfig
from hf_suffix_cache.planning import Plan, PlanSpan, Prefix, Span, plan_prompt
from hf_suffix_cache.prompt import SHIFTED, PlannedRow
from hf_suffix_cache.store.index import Run, WindowIndex
from hf_suffix_cache.store.segments import ALONE_TOKENS, Copies, Segment
from hf_suffix_cache.store.shelf import Match
from test_index import random_case

SETTINGS = {"tail_tokens": 32, "keep_last": 1, "min_match": 16, "seam_tokens": 4, "fidelity": "balanced"}


def make_segment(length=400, context_length=0, copies=None):
    ids = np.zeros(length, dtype=np.int64)
    positions = np.arange(context_length, context_length + length)
    context = np.zeros(context_length + length, dtype=np.int64)
    return Segment(ids, positions, context, np.arange(length), copies=copies)


def make_run(start, stop, segment=None, offset=0, *, hops=0, left_match=0, same_start=0, left_total=99, shift=7):
    return Run(start, stop, segment or make_segment(), offset, shift, hops, left_match, left_total, same_start)


def plan(length, runs=(), prefix=None, **changes):
    return plan_prompt(length, prefix, runs, **{**SETTINGS, **changes})


def kinds(plan):
    return [(span.start, span.stop, span.kind) for span in plan.spans]


def slow_rank(run, stop):
    """What makes a source better than another, in words: False and small numbers first."""
    moved_from_the_start = run.shift != 0 and run.left_total < ALONE_TOKENS and run.left_match < 16
    agrees, mean = run.left_match == 16, run.segment.is_mean
    kind = ["agreeing copy", "mean", "other copy"].index(
        "mean" if mean else "agreeing copy" if agrees else "other copy"
    )
    quality = (-(run.left_match >= 8), -(run.same_start // 16), -stop, run.start - run.left_match, -run.same_start)
    age = (run.segment.segment_id, run.start, run.offset)
    return (moved_from_the_start, kind, run.hops == 3, not agrees, *quality, run.hops, -run.left_total, *age)


def slow_pieces(runs, first, limit, min_match, seam_tokens):
    """The rules of the sweep, read aloud: (start, stop, run, seam) pieces before merging."""
    pieces, cursor = [], first
    while cursor < limit:
        continuing, others = [], []
        for run in runs:
            stop = min(run.stop, limit)
            if run.start <= cursor < stop and cursor - run.start + run.left_match >= 16:
                continuing.append((slow_rank(run, stop), cursor, stop, run))
            start = max(run.start, cursor)
            if run.start <= cursor + (seam_tokens if cursor else 0):
                if stop - start >= max(min_match, seam_tokens + 1 if cursor else 0):
                    others.append((slow_rank(run, stop), start, stop, run))
        candidates = continuing or others
        if candidates:
            _, start, stop, run = min(candidates, key=lambda candidate: candidate[0])
            pieces.append((start, stop, run, start > 0 and start - run.start + run.left_match < 16))
            cursor = stop
        else:
            cursor = min((run.start for run in runs if run.start > cursor), default=limit)
    return pieces


@st.composite
def run_lists(draw):
    segments = [make_segment() for _ in range(3)] + [make_segment(copies=Copies({}, 0))]
    runs = []
    for _ in range(draw(st.integers(0, 12))):
        start = draw(st.one_of(st.just(0), st.integers(40, 48), st.integers(0, 90)))
        stops = st.one_of(st.integers(start + 8, start + 60), st.sampled_from([100, 120]))  # ties matter
        runs.append(
            make_run(
                start,
                draw(stops),
                draw(st.sampled_from(segments)),
                draw(st.integers(0, 5)),
                hops=draw(st.sampled_from([0, 1, 3])),
                left_match=min(start, draw(st.sampled_from([0, 3, 12, 16]))),
                same_start=draw(st.sampled_from([0, 1, 20])),
                left_total=draw(st.sampled_from([0, 39, 40, 41])),
                shift=draw(st.integers(0, 1)),
            )
        )
    return runs


@settings(deadline=None, max_examples=300)
@given(run_lists(), st.integers(0, 40), st.integers(0, 40), st.sampled_from([8, 16]), st.sampled_from([0, 4, 20]))
def test_plan_prompt_random_runs_equal_slow_sweep(runs, exact, tail, min_match, seam_tokens):
    length = 140
    found = plan(length, runs, Prefix(exact, exact), tail_tokens=tail, min_match=min_match, seam_tokens=seam_tokens)
    expected = slow_pieces(runs, exact, min(length - 1, length - tail), min_match, seam_tokens)
    served = {position: None for position in range(length)}
    for start, stop, run, _ in expected:
        for position in range(start, stop):
            served[position] = (run.segment.segment_id, run.shift, run.offset + position - run.start)
    for span in found.spans:
        for position in range(span.start, span.stop):
            if span.kind == "shifted":
                assert served[position] == (span.segment, span.shift, span.offset + position - span.start)
            else:
                assert served[position] is None and span.kind == ("exact" if position < exact else "new")
    seams = {start: seam for start, _, _, seam in expected}
    assert all(seams[span.start] == span.seam for span in found.shifted)
    for left, right in zip(found.spans, found.spans[1:], strict=False):  # merged as far as possible
        assert left.kind != right.kind or left.kind == "shifted"
        if left.kind == right.kind:
            assert (left.segment, left.shift, left.offset + len(left)) != (right.segment, right.shift, right.offset)
    shuffled = plan(length, runs[::-1], Prefix(exact, exact), tail_tokens=tail, min_match=min_match,
                    seam_tokens=seam_tokens)  # fmt: skip
    assert kinds(shuffled) == kinds(found)


def test_plan_prompt_control_two_runs_make_two_shifted_spans():
    """Control: what the test above compares is not empty."""
    found = plan(200, [make_run(10, 60), make_run(100, 150)])
    assert kinds(found) == [
        (0, 10, "new"), (10, 60, "shifted"), (60, 100, "new"), (100, 150, "shifted"), (150, 200, "new"),
    ]  # fmt: skip
    assert found.tokens("shifted") == 100 and found.tokens("new") == 100 and found.has_approximate
    assert [span.offset for span in found.shifted] == [0, 0]
    assert found.new_positions().tolist() == [*range(10), *range(60, 100), *range(150, 200)]


def test_plan_prompt_nothing_stored_all_new():
    assert kinds(plan(50)) == [(0, 50, "new")]
    assert plan(0).spans == () and plan(0).new_positions().tolist() == []
    assert not plan(50).has_approximate


@pytest.mark.parametrize("keep_last", [1, 2, 10, 60])
def test_plan_prompt_exact_prefix_cut_by_keep_last_only(keep_last):
    found = plan(50, prefix=Prefix(50, 50), keep_last=keep_last)
    stop = max(0, 50 - keep_last)
    assert kinds(found) == ([(0, stop, "exact")] if stop else []) + [(stop, 50, "new")]


def test_plan_prompt_carried_rows_end_before_tail():
    assert kinds(plan(100, prefix=Prefix(20, 100))) == [(0, 20, "exact"), (20, 68, "carried"), (68, 100, "new")]
    assert kinds(plan(100, prefix=Prefix(0, 50))) == [(0, 50, "carried"), (50, 100, "new")]
    assert kinds(plan(100, prefix=Prefix(90, 99))) == [(0, 90, "exact"), (90, 100, "new")]
    assert kinds(plan(100, prefix=Prefix(20, 100), keep_last=50)) == [
        (0, 20, "exact"), (20, 50, "carried"), (50, 100, "new"),
    ]  # fmt: skip


def test_plan_prompt_runs_end_before_tail():
    assert kinds(plan(100, [make_run(10, 100)])) == [(0, 10, "new"), (10, 68, "shifted"), (68, 100, "new")]
    assert kinds(plan(100, [make_run(55, 100)])) == [(0, 100, "new")]  # 13 are left of the tail
    assert kinds(plan(20, [make_run(0, 20)])) == [(0, 20, "new")]
    assert kinds(plan(100, [make_run(10, 100)], keep_last=60)) == [
        (0, 10, "new"), (10, 40, "shifted"), (40, 100, "new"),
    ]  # fmt: skip


def test_plan_prompt_fidelity_exact_no_approximate_row():
    found = plan(100, [make_run(20, 90)], Prefix(20, 60), fidelity="exact")
    assert kinds(found) == [(0, 20, "exact"), (20, 100, "new")]
    assert not found.has_approximate and found.shifted == []


def test_plan_prompt_run_left_of_prefix_end_is_cut_there():
    segment = make_segment()
    found = plan(200, [make_run(10, 100, segment, offset=5, shift=3)], Prefix(30, 40))
    assert kinds(found) == [(0, 30, "exact"), (30, 40, "carried"), (40, 100, "shifted"), (100, 200, "new")]
    (span,) = found.shifted
    assert (span.offset, span.shift, span.segment, span.seam) == (35, 3, segment.segment_id, False)
    assert kinds(plan(200, [make_run(10, 55)], Prefix(50, 50)))[1] == (50, 55, "shifted")  # no seam: short is fine
    assert plan(200, [make_run(10, 55)], Prefix(20, 20)).shifted[0].seam  # 10 of 16 agree
    assert plan(200, [make_run(10, 30)], Prefix(20, 20)).shifted == []  # a seam: short is not


MEAN = make_segment(copies=Copies({}, 0))


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"left_match": 16, "hops": 3}, {"stop": 150, "left_match": 15}),
        ({"left_match": 16, "hops": 2, "left_total": 16}, {"stop": 150, "same_start": 64, "segment": MEAN}),
        ({"segment": MEAN}, {"stop": 150, "left_match": 15, "same_start": 64}),
        ({"left_total": ALONE_TOKENS}, {"left_total": ALONE_TOKENS - 1, "stop": 150, "same_start": 64}),
        ({"left_total": 0, "shift": 0}, {"left_total": 39}),  # nothing stood there either
        ({"left_match": 15, "left_total": 90}, {"left_match": 15, "left_total": 15}),
        ({"hops": 2}, {"hops": 3, "stop": 150, "left_match": 15, "same_start": 64}),
        ({"left_match": 8, "hops": 2}, {"left_match": 7, "stop": 150, "same_start": 64}),
        ({"same_start": 64, "hops": 2}, {"same_start": 47, "stop": 150, "left_match": 7}),
        ({"stop": 101, "hops": 2}, {"left_match": 7, "same_start": 15, "left_total": 500}),
        ({"left_match": 4, "hops": 2}, {"left_match": 3, "same_start": 15, "left_total": 500}),
        ({"same_start": 5, "hops": 2}, {"same_start": 4, "left_total": 500}),
        ({"hops": 0}, {"hops": 1, "left_total": 500}),
        ({"left_total": 500}, {"left_total": 400}),
    ],
)
def test_plan_prompt_better_run_wins(better, worse):
    runs = []
    for fields in (worse, better):  # the worse one has the lower segment id
        fields = dict(fields)
        runs.append(make_run(40, fields.pop("stop", 100), **fields))
    for order in (runs, runs[::-1]):
        first = plan(300, order).shifted[0]
        assert first.run is runs[1]


def test_plan_prompt_better_run_that_begins_within_the_seam_rows_wins():
    worse, better = make_run(40, 150), make_run(43, 100, same_start=64)
    found = plan(300, [worse, better])
    assert [(span.start, span.stop, span.run, span.seam) for span in found.shifted] == [
        (43, 100, better, True), (100, 150, worse, False),
    ]  # fmt: skip
    late = make_run(45, 100, same_start=64)
    assert plan(300, [worse, late]).shifted[0].run is worse
    assert plan(300, [worse, better], seam_tokens=2).shifted[0].run is worse
    agreeing = make_run(44, 61, left_match=16)
    assert [(span.start, span.seam) for span in plan(300, [worse, agreeing]).shifted] == [(44, False), (61, False)]


def test_plan_prompt_worse_run_that_begins_within_the_seam_rows_does_not_wait():
    better, worse = make_run(40, 100, same_start=64), make_run(43, 150)
    found = plan(300, [worse, better])
    assert [(span.start, span.stop, span.run) for span in found.shifted] == [(40, 100, better), (100, 150, worse)]


def test_plan_prompt_equal_runs_lower_segment_id_wins():
    runs = [make_run(40, 100), make_run(40, 100)]
    assert plan(300, runs[::-1]).shifted[0].run is runs[0]


def test_plan_prompt_longer_run_goes_on_where_first_ends():
    far = make_run(40, 200, hops=1)
    near = make_run(20, 100)
    found = plan(300, [far, near])
    assert [(span.start, span.stop, span.seam, span.offset) for span in found.shifted] == [
        (20, 100, True, 0), (100, 200, False, 60),
    ]  # fmt: skip


def test_plan_prompt_piece_of_seam_rows_only_is_not_served():
    assert plan(200, [make_run(10, 30)], seam_tokens=20).shifted == []
    assert len(plan(200, [make_run(10, 31)], seam_tokens=20).shifted) == 1


def test_plan_prompt_at_position_zero_no_seam():
    (span,) = plan(200, [make_run(0, 18)], seam_tokens=20).shifted
    assert (span.start, span.stop, span.seam) == (0, 18, False)
    assert plan(200, [make_run(0, 15)]).shifted == []


def test_plan_prompt_cut_run_agrees_with_its_own_tokens():
    runs = [make_run(40, 100, left_match=3), make_run(30, 100)]  # behind 45: 8 and 15 tokens agree
    assert plan(300, runs, Prefix(45, 45)).shifted[0].run is runs[1]
    assert plan(300, runs, Prefix(45, 45)).shifted[0].seam


def test_plan_prompt_consecutive_rows_of_one_segment_are_merged():
    segment = make_segment()
    parts = [make_run(10, 40, segment, 5), make_run(40, 70, segment, 35, left_match=16)]
    (span,) = plan(200, parts).shifted
    assert (span.start, span.stop, span.offset, span.seam, len(span)) == (10, 70, 5, True, 60)
    gap = [make_run(10, 40, segment, 5), make_run(40, 70, segment, 35, left_match=16, shift=9)]
    assert len(plan(200, gap).shifted) == 2


def test_plan_prompt_many_runs_near_linear_time():
    segment = make_segment()
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 131_000, 100_000)
    runs = [make_run(int(start), int(start) + 20 + int(start) % 50, segment) for start in starts]
    started = time.perf_counter()
    found = plan(131_072, runs)
    assert time.perf_counter() - started < 8  # 0.7 s measured
    assert found.tokens("shifted") > 100_000


def test_plan_prompt_with_index_serves_the_prompts_own_tokens():
    """Documents of one request in another order behind another start: every served row holds the right token."""
    rng = np.random.default_rng(7)
    documents = [rng.integers(0, 5000, 60) for _ in range(6)]
    old = np.concatenate([rng.integers(0, 5000, 20), *documents])
    segment = Segment(old, np.arange(len(old)), old, np.arange(len(old)))
    index = WindowIndex()
    assert index.add(segment)
    prompt = np.concatenate([rng.integers(0, 5000, 33), *[documents[i] for i in (3, 4, 0, 5, 2)], old[-40:]])
    found = plan(len(prompt), index.find_runs(prompt))
    for span in found.shifted:
        rows = slice(span.offset, span.offset + len(span))
        assert np.array_equal(segment.ids[rows], prompt[span.start : span.stop])
        assert (segment.positions[rows] + span.shift == np.arange(span.start, span.stop)).all()
    assert found.tokens("shifted") == 5 * 60  # the tail leaves 8 of the last 40: too few behind a seam
    assert len(found.shifted) == 4  # documents 3 and 4 stand together, as they did
    assert all(span.seam for span in found.shifted)


def test_plan_data_broken_values_raise():
    with pytest.raises(ValueError, match="kind"):
        Span(0, 1, "moved")
    with pytest.raises(ValueError, match="start < stop"):
        Span(3, 3, "new")
    with pytest.raises(ValueError, match="cover"):
        Plan(5, (Span(0, 2, "exact"), Span(3, 5, "new")))
    with pytest.raises(ValueError, match="cover"):
        Plan(5, (Span(0, 4, "exact"),))
    with pytest.raises(ValueError, match="exact"):
        Prefix(5, 4)
    with pytest.raises(ValueError, match="keep_last"):
        plan(5, keep_last=-1)
    with pytest.raises(ValueError, match="kind"):
        plan(5).tokens("moved")


def test_plan_span_plain_drops_the_run():
    span = plan(200, [make_run(10, 60)]).shifted[0]
    assert isinstance(span, PlanSpan)
    plain = span.plain()
    assert type(plain) is Span and not hasattr(plain, "run")
    assert (plain.start, plain.stop, plain.kind, plain.shift, plain.segment) == (10, 60, "shifted", 7, span.segment)


@pytest.mark.parametrize("seam_tokens", [0, 1, 4])
@pytest.mark.parametrize("seed", range(6))
def test_planned_row_of_runs_equals_a_loop_over_spans(seed, seam_tokens):
    """Source, shift and seam of every row, set at once, are those that one span after the other gives."""
    segments, ids = random_case(np.random.default_rng(seed), 3, num_segments=9, length=260)
    index = WindowIndex()
    for segment in segments:
        index.add(segment)
    config = SuffixCacheConfig(tail_tokens=8, min_match_tokens=8, seam_tokens=seam_tokens)
    row = PlannedRow.make(ids, 0, Match(0, None, 0, None), lambda first: index.find_runs(ids, first, 8), 1, config)
    assert len(row.plan.shifted) > 2 and len(row.segments()) > 1
    start_of_run, hops = 0, 0
    expected = {"which": -1, "offset": 0, "shift": 0, "run_start": 0, "seams": False}
    expected = {name: [value] * len(ids) for name, value in expected.items()}
    numbers = {}
    for span in row.plan.shifted:
        number = numbers.setdefault(span.segment, len(numbers))
        start_of_run = span.start if span.seam else start_of_run
        hops = max(hops, span.hops + 1)
        for position in range(span.start, span.stop):
            expected["which"][position] = number
            expected["offset"][position] = span.offset + position - span.start
            expected["shift"][position] = span.shift
            expected["run_start"][position] = start_of_run
            expected["seams"][position] = span.seam and position < span.start + seam_tokens
    for name, values in expected.items():
        assert getattr(row.served if hasattr(row.served, name) else row, name).tolist() == values, name
    assert [segment.segment_id for segment in row.segments()] == list(numbers)
    assert row.hops == hops and [kind == SHIFTED for kind in row.kinds] == [x >= 0 for x in expected["which"]]
