"""Shifted reuse: runs at any offset and in any order, the tail, seams and repair."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_suffix_cache import SuffixCache, SuffixCacheConfig
from reference import (
    ask,
    check_report,
    common_runs,
    first_layer_is_fresh,
    fresh_rows,
    kinds_of,
    moved_pieces,
    same_as_vanilla,
    served,
    served_rows,
    stored,
)
from tiny_models import CORE, A, B, C, D, head, make_model, new_text, old_text, question

TAIL = SuffixCacheConfig().tail_tokens
MOVED = ("shifted", "repaired")


# -- what is found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", ["balanced", "fast"])
@pytest.mark.parametrize("kind", CORE)
def test_runs_with_different_shifts_in_any_order(kind, fidelity):
    model = make_model(kind)
    source = head(0) + A + [131, 132, 133] + B + [134, 135, 136, 137, 138] + C + [139] + question(0)
    places = {"A": 12, "B": 12 + 40 + 3, "C": 12 + 40 + 3 + 33 + 5}
    texts = {"A": A, "B": B, "C": C}
    for number, order in enumerate(itertools.permutations("ABC"), start=1):
        cache = stored(model, source, fidelity=fidelity)
        ids, want = head(number, 10 + number), []
        for name in order:
            want.append((len(ids), len(ids) + len(texts[name]), len(ids) - places[name]))
            ids = ids + texts[name] + [140 + number] * number  # nothing that follows a text in the source
        ids = ids + question(number)
        answer, rows = served_rows(model, ids, cache)
        check_report(answer.report)
        assert moved_pieces(answer.report) == want
        first_layer_is_fresh(model, rows, ids)


@pytest.mark.parametrize("kind", CORE)
def test_same_run_twice_is_served_twice(kind):
    model = make_model(kind)
    for _ in range(4):
        cache = stored(model, head(0) + A + question(0))
        ids = head(1, 9) + A + new_text(4, 1) + A + new_text(5, 2) + A + question(1)
        answer, rows = served_rows(model, ids, cache)
        assert moved_pieces(answer.report) == [(9, 49, -3), (53, 93, 41), (98, 138, 86)]
        first_layer_is_fresh(model, rows, ids)


def test_insertions_and_deletions_cut_runs():
    model = make_model("llama")
    text = old_text(120, 1)
    cache = stored(model, head(0) + text + question(0))
    ids = head(1, 10) + text[:30] + new_text(2, 1) + text[30:70] + text[75:] + question(1)
    answer, rows = served_rows(model, ids, cache)
    assert moved_pieces(answer.report) == [(10, 40, -2), (42, 82, 0), (82, 127, -5)]
    first_layer_is_fresh(model, rows, ids)


def test_replaced_token_leaves_the_same_shift_on_both_sides():
    model = make_model("llama")
    text = old_text(100, 1)
    cache = stored(model, head(0) + text + question(0))
    ids = head(1) + text[:50] + new_text(1, 1) + text[51:] + question(1)
    assert moved_pieces(ask(model, ids, cache).report) == [(12, 62, 0), (63, 112, 0)]


@pytest.mark.parametrize("offset", range(16))
def test_run_of_sixteen_is_found_at_any_offset(offset):
    model = make_model("llama")
    text = old_text(64, 3)
    cache = stored(model, head(0) + text + question(0))
    piece = text[20 + offset : 36 + offset]
    report = ask(model, head(1, 7) + piece + question(1), cache).report
    assert moved_pieces(report) == [(7, 23, 7 - 12 - 20 - offset)]


@pytest.mark.parametrize("shortest", [16, 24, 40])
def test_runs_below_min_match_are_not_moved(shortest):
    model = make_model("llama")
    for length in (shortest - 1, shortest):
        cache = stored(model, head(0) + C + question(0), min_match_tokens=shortest)
        report = ask(model, head(1) + C[5 : 5 + length] + question(1), cache).report
        assert served(report) == (length if length == shortest else 0)


def test_tail_is_always_computed():
    model = make_model("llama")
    for tail in (1, 8, 32, 60):
        cache = stored(model, head(0) + C + A + question(0), tail_tokens=tail)
        report = ask(model, head(1) + C + A, cache).report
        kinds = kinds_of(report)
        assert set(kinds[-tail:]) == {"new"}
        assert moved_pieces(report) == [(12, 12 + len(C + A) - tail, 0)]


def test_prompt_no_longer_than_the_tail_is_computed():
    model = make_model("llama")
    cache = stored(model, head(0) + C + question(0))
    report = same_as_vanilla(model, C[:TAIL], cache).report
    assert served(report) == 0 and report.new_tokens == TAIL


def test_exact_prefix_comes_first_and_moved_rows_after_it():
    model = make_model("llama")
    first = D + A + B + C + question(0)
    for cut in (1, 15, 16, 17, 24, 30):
        cache = stored(model, first)
        ids = first[:cut] + new_text(3, cut) + B + A + question(1)
        answer, rows = served_rows(model, ids, cache)
        assert kinds_of(answer.report)[:cut] == ["exact"] * cut
        assert [piece[:2] for piece in moved_pieces(answer.report)] == [(cut + 3, cut + 36), (cut + 36, cut + 76)]
        first_layer_is_fresh(model, rows, ids)


def test_exact_prefix_that_ends_inside_a_run_that_occurs_twice():
    model = make_model("llama")
    first = A + B + question(0)
    for extra in (0, 1, 15, 16, 33):
        cache = stored(model, first)
        ids = A + B[:extra] + A + B + question(1)
        answer, rows = served_rows(model, ids, cache)
        check_report(answer.report)
        assert answer.report.exact_tokens == 40 + extra
        assert moved_pieces(answer.report) == [(40 + extra, 40 + extra + 73, 40 + extra)]
        first_layer_is_fresh(model, rows, ids)


def test_of_overlapping_copies_the_one_with_the_same_left_context_wins():
    model = make_model("llama")
    right = head(0, 30) + D + A + question(0)
    wrong = [head(number, 20 + number) + A + question(number) for number in (1, 2)]
    for order in itertools.permutations([right, *wrong]):
        cache = stored(model, *order, fidelity="exact")  # else the later ones would refer to the first one's rows
        ids = head(5, 11) + D + A + question(5)
        answer, rows = served_rows(model, ids, cache.using(fidelity="balanced"))
        assert moved_pieces(answer.report) == [(11, 75, -19)]
        first_layer_is_fresh(model, rows, ids)


def test_generated_text_is_moved_too():
    model = make_model("llama")
    cache = SuffixCache()
    tokens = ask(model, head(0) + A, cache, steps=40, do_sample=True, seed=2).tokens()
    report = ask(model, head(1, 20) + tokens[12:-1] + question(1), cache).report
    assert moved_pieces(report) == [(20, 20 + len(tokens) - 13, 8)]


def test_rows_of_a_batch_are_found_by_a_single_request_and_the_other_way_round():
    model = make_model("llama")
    cache = SuffixCache()
    ask(model, [head(0) + A + question(0), head(1) + A[:20] + C[:20] + question(1)], cache)
    report = ask(model, head(2, 5) + C[:20] + A + question(2), cache).report
    assert [piece[:2] for piece in moved_pieces(report)] == [(5, 25), (25, 65)]


@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_edit_of_a_stored_text_is_served_where_it_agrees(data):
    """What lies in a common run of 16 before the tail is served, nothing else is, each row at its place."""
    model = _shared_model()
    text = old_text(160, 11)
    pieces = data.draw(
        st.lists(st.tuples(st.integers(0, 140), st.integers(1, 60), st.integers(0, 6)), min_size=1, max_size=5)
    )
    ids = head(1, 1 + data.draw(st.integers(0, 20)))
    for start, length, gap in pieces:
        ids = ids + text[start : start + length] + new_text(gap, start)
    ids = ids + question(1)
    cache = stored(model, head(0) + text + question(0))
    answer, rows = served_rows(model, ids, cache, steps=1)
    check_report(answer.report)
    got = np.array([kind in MOVED for kind in kinds_of(answer.report)])
    want = common_runs(ids[:-TAIL], head(0) + text + question(0), 16)
    assert not got[len(want) :].any()
    assert (got[: len(want)] <= want).all()
    first_layer_is_fresh(model, rows, ids)
    if len(common_pieces(want)) == len(moved_pieces(answer.report)):
        assert (got[: len(want)] == want).all()


def common_pieces(inside) -> list:
    """Edges of the True stretches of a mask."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], inside.astype(int), [0]])))
    return list(zip(edges[::2], edges[1::2], strict=True))


_models: list = []


def _shared_model():
    """One model for all examples of the property test."""
    if not _models:
        _models.append(make_model("llama"))
    return _models[0]


# -- repair ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fidelity, share", [("balanced", 1.0), ("fast", 0.5)])
@pytest.mark.parametrize("fraction", [0.0, 0.15, 0.4, 1.0])
def test_repaired_share_is_the_configured_one(fidelity, share, fraction):
    model = make_model("llama")
    passages = [old_text(60, 70 + number) for number in range(4)]
    cache = stored(model, head(0) + sum(passages, []) + question(0), fidelity=fidelity, repair_fraction=fraction)
    report = ask(model, head(1) + sum(reversed(passages), []) + question(1), cache).report
    assert served(report) == 240
    seams = 4 * 4
    assert abs(report.repaired_tokens - max(seams, share * fraction * 240)) <= 4


@pytest.mark.parametrize("fidelity", ["balanced", "fast"])
@pytest.mark.parametrize("seam", [0, 1, 4, 9])
def test_seam_rows_are_repaired_and_continued_runs_have_no_seam(fidelity, seam):
    model = make_model("llama")
    cache = stored(model, head(0) + A + B + C + question(0), fidelity=fidelity, seam_tokens=seam, repair_fraction=0.0)
    report = ask(model, head(1, 20) + B + C + A + question(1), cache).report
    kinds = kinds_of(report)
    runs = [["repaired"] * seam + ["shifted"] * (length - seam) for length in (85, 40)]
    assert kinds == ["new"] * 20 + runs[0] + runs[1] + ["new"] * 36


def test_fast_repairs_the_first_rows_of_each_run():
    model = make_model("llama")
    cache = stored(model, head(0) + C + A + question(0), fidelity="fast", repair_fraction=0.5)
    report = ask(model, head(1, 20) + A + C + question(1), cache).report
    for start, stop, _ in moved_pieces(report):
        kinds = "".join(kind[0] for kind in kinds_of(report)[start:stop])
        assert kinds == "r" * kinds.count("r") + "s" * kinds.count("s") and 4 < kinds.count("r") < len(kinds)


@pytest.mark.parametrize("kind", CORE)
def test_more_repair_brings_the_rows_closer(kind):
    model = make_model(kind)
    deviations = {fraction: [] for fraction in (0.0, 0.15, 0.5, 1.0)}
    for number in range(6):
        texts = [old_text(30, 900 + 10 * number + piece) for piece in range(3)]
        source = head(0) + texts[0] + texts[1] + texts[2] + question(number)
        ids = head(1) + texts[2] + texts[0] + texts[1] + question(number + 50)
        want = fresh_rows(model, ids)[-1][1]
        for fraction, found in deviations.items():
            cache = stored(model, source, repair_fraction=fraction, seam_tokens=0)
            _, rows = served_rows(model, ids, cache)
            found.append((rows[-1][1][:, : len(ids)] - want).abs().mean().item())
    means = {fraction: float(np.mean(found)) for fraction, found in deviations.items()}
    assert means[1.0] < 1e-5 < means[0.5] < means[0.15] < means[0.0], means


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CORE)
def test_no_repaired_row_sees_a_later_token(kind, attention):
    """BUG_KINDS, 'causal mask wrong': alter one stored token; every row before it keeps its bits in all layers."""
    model = make_model(kind, attention=attention)
    altered = 47
    results = []
    for token in (C[altered], C[altered] + 1):
        text = C[:altered] + [token] + C[altered + 1 :]
        cache = stored(model, head(0) + text + A + question(0), fidelity="fast", repair_fraction=0.6)
        ids = head(1, 20) + text[30:] + A + question(1)
        answer, rows = served_rows(model, ids, cache, steps=1)
        results.append((kinds_of(answer.report), rows))
    (kinds, first), (same_kinds, second) = results
    assert kinds == same_kinds
    border = 20 + altered - 30
    assert "repaired" in kinds[:border] and "repaired" in kinds[border + 1 :]
    for (keys, values), (other_keys, other_values) in zip(first, second, strict=True):
        assert torch.equal(keys[:, :border], other_keys[:, :border])
        assert torch.equal(values[:, :border], other_values[:, :border])
    top, other_top = first[-1][1], second[-1][1]
    assert not torch.equal(top[:, border + 1 : border + 16], other_top[:, border + 1 : border + 16])  # control


@pytest.mark.parametrize("length", [16, 20, 30, 40])
@pytest.mark.parametrize("kind", CORE)
def test_a_short_prompt_never_costs_more_rows_than_a_prefill(kind, length):
    model = make_model(kind, spy=True)
    cache = stored(model, head(0) + A[:length] + question(0))
    model.spy.clear()
    report = ask(model, head(1, 3) + A[:length] + question(1), cache, steps=1).report
    assert model.spy.rows() == report.computed_rows <= report.prompt_tokens
    assert served(report) == length
    assert "probe" in report.reason  # control: new rows run twice, and these are more than the moved ones
    longer = ask(
        model, head(2, 3) + A + B + C + question(2), stored(model, head(0) + A + B + C + question(0)), steps=1
    )
    assert longer.report.reason is None and longer.report.computed_rows < longer.report.prompt_tokens
