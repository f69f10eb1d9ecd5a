"""Which stored copy of a text is served, from the requests that left it to the rows of the next one."""

import itertools

import numpy as np
import pytest

from hf_suffix_cache.planning import plan_prompt
from hf_suffix_cache.store.index import WindowIndex
from hf_suffix_cache.store.segments import ALONE_TOKENS, Segment
from reference import ask, check_report, first_layer_is_fresh, moved_pieces, served_rows, stored
from tiny_models import A, C, D, head, make_model, new_text, question

EXACT = dict(fidelity="exact", consensus=False)  # every copy is a fresh one, and stays what it is


def start(number: int, length: int = 60) -> list[int]:
    """What no other prompt begins with, long enough for what follows not to stand alone."""
    return head(number, length + number)


def shift_of(model, stored_prompts, prompt, text=C) -> int:
    """By how much the text was moved; its stored copies stand at different positions, so this tells which it was."""
    cache = stored(model, *stored_prompts, **EXACT)
    answer, rows = served_rows(model, prompt, cache.using(fidelity="balanced"), steps=1)
    check_report(answer.report)
    first_layer_is_fresh(model, rows, prompt)
    pieces = moved_pieces(answer.report)
    shifts = {shift for _, _, shift in pieces}
    assert len(shifts) == 1 and sum(stop - start for start, stop, _ in pieces) >= len(text)
    return shifts.pop()


@pytest.mark.parametrize("length", [0, 12, ALONE_TOKENS - 1])
def test_copy_that_stood_alone_is_served_only_where_there_is_no_other(length):
    model = make_model("llama")
    alone = head(1, length) + C + question(1) if length else C + question(1)
    other = start(2) + C + question(2)
    prompt = start(5) + C + question(5)
    for order in itertools.permutations([alone, other]):
        assert shift_of(model, order, prompt) == 65 - 62
    assert shift_of(model, [alone], prompt) == 65 - length  # control: it can be served


@pytest.mark.parametrize(("length", "wins"), [(ALONE_TOKENS - 1, False), (ALONE_TOKENS, True)])
def test_rows_behind_enough_text_do_not_stand_alone(length, wins):
    """All but the few tokens to its left speaks for the first copy: the prompt begins as its request did."""
    model = make_model("llama")
    beginning = head(1, 50)
    copies = [beginning[:length] + C + question(1), start(2) + C + question(2)]
    prompt = beginning[:25] + new_text(40, 3) + C + question(5)
    for order in itertools.permutations(copies):
        cache = stored(model, *order, **EXACT)
        report = ask(model, prompt, cache.using(fidelity="balanced"), steps=1).report
        assert moved_pieces(report) == [(65, 117, 65 - length if wins else 65 - 62)]


def test_agreeing_copy_wins_over_hops():
    """A copy behind the prompt's left neighbours is served though it was computed behind moved rows."""
    model = make_model("llama")
    exact = start(2) + C + question(2)
    cache = stored(model, start(1) + A + question(1), exact, **EXACT)
    handle = cache.using(fidelity="balanced")
    derived = start(3) + A + D[:20] + question(3)  # A is moved; D is new behind it
    ask(model, derived, handle, steps=1)
    exact_copy = start(4) + D[:20] + question(4)
    ask(model, exact_copy, cache, steps=1)
    answer = ask(model, start(5) + A + D[:20] + question(5), handle, steps=1)
    pieces = moved_pieces(answer.report)
    assert pieces[-1] == (65 + 40, 65 + 60, 65 - 63)  # from `derived`: the same left neighbours


def test_same_start_decides_between_copies_that_do_not_agree():
    model = make_model("llama")
    beginning = start(1, 70)
    same = beginning + new_text(9, 1) + C + question(1)
    other = start(2, 90) + C + question(2)
    prompt = beginning[:-4] + new_text(6, 2) + C + question(5)
    for order in itertools.permutations([same, other]):
        cache = stored(model, *order, **EXACT)
        answer = ask(model, prompt, cache.using(fidelity="balanced"), steps=1)
        assert moved_pieces(answer.report) == [(73, 125, 73 - 80)]


def test_tokens_in_common_before_a_text_do_not_choose_its_copy():
    """A full stop and a line break before the text make a worse copy's run begin earlier; the better one is served."""
    model = make_model("llama")
    stop, beginning = [141, 142], start(1, 70)
    same = beginning + new_text(7, 1) + C + question(1)
    other = start(2, 90) + stop + C + question(2)
    prompt = beginning[:-4] + new_text(6, 2) + stop + C + question(5)
    for order in itertools.permutations([same, other]):
        cache = stored(model, *order, **EXACT)
        answer = ask(model, prompt, cache.using(fidelity="balanced"), steps=1)
        assert moved_pieces(answer.report) == [(75, 127, 75 - 78)]
    without = stored(model, *order, **EXACT).using(fidelity="balanced", seam_tokens=1)
    assert moved_pieces(ask(model, prompt, without, steps=1).report) == [(73, 127, 73 - 92)]  # control


def test_runs_that_continue_one_another_have_no_seam():
    """Where the better copy ends, the longer one goes on, and nothing is repaired there."""
    model = make_model("llama")
    beginning = start(1, 70)
    short = beginning + new_text(9, 1) + C[:30] + question(1)
    long = start(2, 90) + C + question(2)
    prompt = beginning[:-4] + new_text(6, 2) + C + question(5)
    cache = stored(model, short, long, **EXACT)
    handle = cache.using(fidelity="fast", repair_fraction=0.0)
    report = ask(model, prompt, handle, steps=1).report
    assert moved_pieces(report) == [(73, 103, -7), (103, 125, 73 - 92)]
    assert report.repaired_tokens == 4  # of the one seam


def test_served_rows_hold_their_tokens_whatever_is_chosen():
    """Random stores with several copies of each text: every served row is one of the prompt's token, in order."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 5000, 60) for _ in range(5)]
    for _ in range(30):
        index = WindowIndex()
        for _ in range(6):
            order = rng.permutation(5)[: rng.integers(1, 6)]
            ids = np.concatenate([rng.integers(0, 5000, rng.integers(0, 70)), *(texts[each] for each in order)])
            index.add(Segment(ids, np.arange(len(ids)), ids, np.arange(len(ids)), hops=int(rng.integers(0, 4))))
        order = rng.permutation(5)
        prompt = np.concatenate(
            [rng.integers(0, 5000, 50), *(texts[each] for each in order), rng.integers(0, 5000, 40)]
        )
        plan = plan_prompt(
            len(prompt), None, index.find_runs(prompt), tail_tokens=32, keep_last=1, min_match=16, seam_tokens=4,
            fidelity="balanced",
        )  # fmt: skip
        for span in plan.shifted:
            rows = slice(span.offset, span.offset + len(span))
            assert np.array_equal(span.run.segment.ids[rows], prompt[span.start : span.stop])
            assert (span.run.segment.positions[rows] + span.shift == np.arange(span.start, span.stop)).all()
        assert plan.tokens("shifted") > 0
