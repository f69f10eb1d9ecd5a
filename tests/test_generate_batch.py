"""Batches: rows that hit at different lengths, padding, pads inside the text, sequences that end early."""

import pytest
import torch

from hf_suffix_cache import SuffixCache
from reference import (
    ask,
    check_pool,
    check_report,
    kinds_of,
    max_difference,
    same_answer,
    same_as_vanilla,
    served,
    work_is_reported,
)
from tiny_models import CORE, make_model, new_text, old_text

PAD = 2  # also the eos of these models
ROWS = [old_text(31, 1), old_text(40, 2), old_text(26, 3), old_text(38, 4)]
STORED = [None, ROWS[1][:7] + new_text(20, 2), ROWS[2][:16] + new_text(20, 3), ROWS[3]]
HITS = [0, 7, 16, len(ROWS[3]) - 1]


def padded(rows, side: str = "left", pad: int = PAD) -> dict:
    """`input_ids` and `attention_mask` of rows of different lengths."""
    width = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        fill = width - len(row)
        ids.append([pad] * fill + row if side == "left" else row + [pad] * fill)
        mask.append([0] * fill + [1] * len(row) if side == "left" else [1] * len(row) + [0] * fill)
    return {"ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "pad_token_id": pad}


def warmed(model, fidelity: str = "exact") -> SuffixCache:
    """A cache in which the rows of `ROWS` hit 0, 7, 16 and all tokens."""
    cache = SuffixCache(fidelity=fidelity)
    for ids in STORED:
        if ids:
            ask(model, ids, cache, steps=1)
    return cache


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CORE)
def test_left_padded_rows_equal_their_own_runs(kind, attention):
    model = make_model(kind, attention=attention)
    alone = [ask(model, row) for row in ROWS]
    vanilla = ask(model, **padded(ROWS))
    for _ in range(4):
        got = ask(model, cache=warmed(model), **padded(ROWS))
        same_answer(got, vanilla)
        for number, (row, own) in enumerate(zip(ROWS, alone, strict=True)):
            assert got.ids[number, -6 - len(row) :].tolist() == own.tokens()
            assert max_difference([step[number : number + 1] for step in got.scores], own.scores) < 1e-4


@pytest.mark.parametrize("kind", CORE)
def test_left_padded_batch_reports_each_row_without_pads(kind):
    model = make_model(kind, spy=True)
    cache = warmed(model)
    model.spy.clear()
    got = ask(model, cache=cache, steps=1, **padded(ROWS))
    report = got.report
    check_report(report)
    assert report.prompt_tokens == sum(map(len, ROWS))
    assert len(report.spans) == len(ROWS)
    for number, (row, hit) in enumerate(zip(ROWS, HITS, strict=True)):
        kinds = kinds_of(report, number)
        assert len(kinds) == len(row)
        assert kinds[-1] == "new"
        found = sum(kind in ("exact", "repaired") for kind in kinds)  # repaired: recomputed for a neighbour's sake
        assert found == hit
        assert set(kinds[:hit]) <= {"exact", "repaired"}
    work_is_reported(model, got)


@pytest.mark.parametrize("kind", CORE)
def test_rows_of_a_padded_batch_are_stored_without_pads(kind):
    model = make_model(kind)
    for number, row in enumerate(ROWS):
        cache = SuffixCache(fidelity="exact")
        got = ask(model, cache=cache, **padded(ROWS))
        tokens = got.ids[number, -6 - len(row) :].tolist()
        replay = same_as_vanilla(model, tokens + new_text(4, number), cache)
        assert replay.report.exact_tokens == len(tokens) - 1
        assert same_as_vanilla(model, row, cache).report.exact_tokens == len(row) - 1
        check_pool(cache)


@pytest.mark.parametrize("kind", CORE)
def test_whole_batch_again_is_served_and_right(kind):
    model = make_model(kind)
    cache = SuffixCache(fidelity="exact")
    vanilla = ask(model, **padded(ROWS))
    for _ in range(4):
        got = ask(model, cache=cache, **padded(ROWS))
        same_answer(got, vanilla)
    assert got.report.exact_tokens == sum(map(len, ROWS)) - len(ROWS)
    assert got.report.computed_rows == len(ROWS)


@pytest.mark.parametrize("kind", CORE)
def test_right_padding_and_holes_in_the_mask_equal_vanilla(kind):
    model = make_model(kind)
    cache = warmed(model)
    right = padded(ROWS, side="right")
    hole = padded(ROWS[:2])
    hole["attention_mask"][:, 20:23] = 0
    for inputs in (right, hole) * 4:
        got = ask(model, cache=cache, **inputs)
        same_answer(got, ask(model, **inputs))
        check_report(got.report)
    for row in ROWS:
        same_as_vanilla(model, row, cache)
    check_pool(cache)


@pytest.mark.parametrize("kind", CORE)
def test_pad_token_inside_the_text_is_text(kind):
    model = make_model(kind)
    rows = [ROWS[0][:10] + [PAD, PAD] + ROWS[0][10:], ROWS[1][:3] + [PAD] + ROWS[1][3:], [PAD] + ROWS[2]]
    cache = SuffixCache(fidelity="exact")
    for _ in range(4):
        got = ask(model, cache=cache, **padded(rows))
        same_answer(got, ask(model, **padded(rows)))
        assert got.report.prompt_tokens == sum(map(len, rows))
    for row in rows:
        mask = torch.ones(1, len(row), dtype=torch.long)
        options = {"attention_mask": mask, "pad_token_id": PAD}
        assert same_as_vanilla(model, row, cache, **options).report.exact_tokens == len(row) - 1


@pytest.mark.parametrize("beams", [2, 3])
def test_padded_batch_with_beams_equals_vanilla(beams):
    model = make_model("llama")
    cache = warmed(model)
    for count in (1, beams):
        vanilla = ask(model, num_beams=beams, num_return_sequences=count, **padded(ROWS[1:3]))
        for _ in range(4):
            got = ask(model, cache=cache, num_beams=beams, num_return_sequences=count, **padded(ROWS[1:3]))
            same_answer(got, vanilla)
    for row in ROWS[1:3]:
        assert same_as_vanilla(model, row, cache).report.exact_tokens == len(row) - 1
    check_pool(cache)


def test_same_prompt_twice_in_a_batch():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    for _ in range(4):
        same_as_vanilla(model, [ROWS[1], ROWS[1], ROWS[1]], cache)
    used = check_pool(cache).bytes_used
    for _ in range(4):
        same_as_vanilla(model, [ROWS[1], ROWS[1], ROWS[1]], cache)
    assert check_pool(cache).bytes_used == used


@pytest.mark.parametrize("fidelity", ["balanced", "fast"])
@pytest.mark.parametrize("kind", CORE)
def test_padded_batch_with_moved_rows_is_exact_when_all_are_repaired(kind, fidelity):
    model = make_model(kind, spy=True)
    passage = old_text(60, 9)
    rows = [
        new_text(11, 1) + passage + new_text(34, 2),
        new_text(30, 3) + passage[:40] + new_text(40, 4),
        new_text(50, 5),
    ]
    vanilla = ask(model, **padded(rows))
    for fraction in (1.0, 0.15):
        cache = SuffixCache(fidelity=fidelity, repair_fraction=fraction)
        ask(model, new_text(5, 0) + passage + new_text(33, 8), cache)
        model.spy.clear()
        got = ask(model, cache=cache, **padded(rows))
        work_is_reported(model, got, decoded_rows=5 * len(rows))
        check_report(got.report)
        assert served(got.report) == 100
        assert set(kinds_of(got.report, 2)) == {"new"}
        if fidelity == "balanced" and fraction == 1.0:
            same_answer(got, vanilla)
        assert max_difference([got.scores[0][2:]], [vanilla.scores[0][2:]]) < 1e-4  # nothing was moved in that row
        check_pool(cache)


def test_rows_after_a_sequence_has_ended_are_not_stored():
    model = make_model("llama")
    free = [ask(model, row, steps=12).tokens()[len(row) :] for row in ROWS[:2]]
    # the first row ends at its fourth token; the second goes on, so the first is filled up with pads
    eos = next(token for token in free[0][3:] if token not in free[1])
    options = {"eos_token_id": eos, "steps": 12}
    cache = SuffixCache(fidelity="exact")
    got = ask(model, cache=cache, **options, **padded(ROWS[:2]))
    same_answer(got, ask(model, **options, **padded(ROWS[:2])))
    first = got.ids[0, -12 - len(ROWS[0]) :].tolist()
    length = first.index(eos, len(ROWS[0])) + 1
    assert first[length:] and set(first[length:]) == {PAD}
    replay = same_as_vanilla(
        model, first + new_text(9, 1), cache, attention_mask=torch.ones(1, len(first) + 9, dtype=torch.long)
    )
    assert replay.report.exact_tokens in (length - 1, length)
    assert replay.report.generated_tokens == 6


def test_beam_continuations_are_not_stored():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    tokens = ask(model, ROWS[0], cache, num_beams=3, steps=10).tokens()
    report = same_as_vanilla(model, tokens + new_text(5, 1), cache).report
    assert report.exact_tokens == len(ROWS[0])


def test_generated_tokens_of_every_returned_sequence_count():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    got = ask(model, ROWS[0], cache, do_sample=True, num_return_sequences=3, seed=1)
    assert got.report.prompt_tokens == len(ROWS[0])  # the caller's rows
    assert len({tuple(row) for row in got.ids.tolist()}) > 1
    for row in got.ids.tolist():
        report = same_as_vanilla(model, row + new_text(5, 1), cache).report
        assert len(ROWS[0]) <= report.exact_tokens <= len(row) - 1
