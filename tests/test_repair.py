"""The repair policies, and what a policy of the caller's may do."""

import numpy as np
import pytest

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.repair import (
    FirstRows,
    FullRepair,
    NoRepair,
    QuestionAttention,
    RepairRequest,
    budget,
    fraction_for,
    preset,
)
from reference import ask, kinds_of, moved_pieces, stored
from tiny_models import A, B, head, make_model, old_text, question


def request_of(budget_rows, attention=None):
    """Two runs, [10, 30) behind a seam and [40, 60) behind another, 4 seam rows each."""
    shifted, seams, run_start = np.zeros(70, bool), np.zeros(70, bool), np.zeros(70, np.int64)
    for start in (10, 40):
        shifted[start : start + 20] = True
        seams[start : start + 4] = True
        run_start[start : start + 20] = start
    return RepairRequest(shifted, seams, run_start, budget_rows, attention)


def test_question_attention_takes_the_best_rows_by_attention_over_distance():
    attention = np.zeros(70)
    attention[[14, 29, 45, 59]] = [0.12, 0.2, 0.3, 0.1]
    # 0.12 / sqrt(5) = 0.054, 0.2 / sqrt(20) = 0.045, 0.3 / sqrt(6) = 0.122, 0.1 / sqrt(20) = 0.022
    for spare, want in ((1, [45]), (2, [14, 45]), (3, [14, 29, 45]), (4, [14, 29, 45, 59])):
        assert QuestionAttention().select(request_of(8 + spare, attention)).tolist() == want


def test_question_attention_never_takes_seam_rows_or_rows_that_were_not_moved():
    attention = np.ones(70)
    attention[[10, 11, 40, 65, 2]] = 100.0
    rows = QuestionAttention().select(request_of(40, attention))
    assert set(rows) == set(request_of(40).candidates) and len(rows) == 32


@pytest.mark.parametrize("spare", [0, 2, 6, 100])
def test_first_rows_takes_equally_many_of_each_run(spare):
    rows = FirstRows().select(request_of(8 + spare))
    assert len(rows) == min(spare, 32)
    if spare in (2, 6):
        each = spare // 2
        assert rows.tolist() == [*range(14, 14 + each), *range(44, 44 + each)]


def test_no_repair_and_full_repair_are_the_two_ends():
    assert NoRepair().select(request_of(20)).tolist() == []
    assert FullRepair().select(request_of(0)).tolist() == [*range(14, 30), *range(44, 60)]


def test_budget_smaller_than_the_seams_leaves_nothing_to_choose():
    assert request_of(5).spare == 0
    assert QuestionAttention().select(request_of(5, np.ones(70))).tolist() == []


def test_presets_and_their_budgets():
    assert isinstance(preset("balanced", None, 0.15)[0], QuestionAttention)
    assert isinstance(preset("fast", None, 0.15)[0], FirstRows)
    mine = NoRepair()
    assert preset("balanced", mine, 0.15) == (mine, 0.15) and preset("fast", mine, 0.2) == (mine, 0.1)
    assert [budget(100, 0.15), budget(101, 0.15), budget(0, 0.15), budget(7, 1.0)] == [15, 16, 0, 7]


def test_policy_of_the_callers_chooses_the_rows():
    class EveryFifth:
        needs_attention = False

        def select(self, request):
            return request.candidates[::5]

    model = make_model("llama")
    cache = stored(model, head(0) + A + B + question(0))
    report = ask(model, head(1) + B + A + question(1), cache.using(repair=EveryFifth())).report
    kinds = kinds_of(report)
    for start, _, _ in moved_pieces(report):
        assert kinds[start : start + 4] == ["repaired"] * 4  # seam rows come on top
    rest = [kind for start, stop, _ in moved_pieces(report) for kind in kinds[start + 4 : stop]]
    assert rest[::5] == ["repaired"] * len(rest[::5]) and rest.count("repaired") == len(rest[::5])


def test_policy_that_names_other_rows_raises_and_leaves_nothing():
    class Wrong:
        needs_attention = False

        def select(self, request):
            return np.array([0])

    model = make_model("llama")
    cache = stored(model, head(0) + A + B + question(0))
    with pytest.raises(ValueError, match="Wrong.select named rows that are not shifted: \\[0\\]"):
        ask(model, head(1) + B + A + question(1), cache.using(repair=Wrong()))
    assert ask(model, head(2) + B + A + question(2), cache).report.shifted_tokens > 0


def test_object_without_select_is_refused():
    with pytest.raises(TypeError, match="select"):
        SuffixCache(repair="attention")


def lengths(*runs):
    """One prompt with runs of these lengths, one behind the other."""
    total = sum(runs)
    start = np.repeat(np.cumsum([0, *runs[:-1]]), runs)
    return RepairRequest(np.ones(total, bool), np.zeros(total, bool), start, 0)


@pytest.mark.parametrize(
    "requests, want",
    [
        ([lengths(*[70] * 5)], 0.3),
        ([lengths(*[90] * 5)], 0.15),
        ([lengths(*[70] * 3)], 0.15),  # too few rows to matter
        ([lengths(70, 70), lengths(70, 70)], 0.3),  # a batch counts together
        ([lengths(400, 16)], 0.15),
        ([], 0.15),
    ],
)
def test_text_in_short_runs_is_repaired_twice_as_much(requests, want):
    assert fraction_for(requests, 0.15) == want
    assert fraction_for(requests, 0.7) == (1.0 if want == 0.3 else 0.7)


def test_balanced_repairs_short_runs_of_a_long_prompt_twice_as_much():
    model = make_model("llama")
    texts = [old_text(60, number) for number in range(6)]
    cache = stored(model, head(0) + sum(texts, []) + question(0))
    ids = head(1) + sum(texts[::-1], []) + question(1)
    shares = {}
    for fidelity, repair in (("balanced", None), ("balanced", QuestionAttention()), ("fast", None)):
        report = ask(model, ids, cache.using(fidelity=fidelity, repair=repair, store=False)).report
        shares[fidelity, repair] = report.repaired_tokens / (report.repaired_tokens + report.shifted_tokens)
    assert shares["balanced", None] == pytest.approx(0.30, abs=0.01)
    assert shares["balanced", QuestionAttention()] == pytest.approx(0.15, abs=0.01)  # a policy of the caller's is his
    assert shares["fast", None] == pytest.approx(0.075, abs=0.01)
