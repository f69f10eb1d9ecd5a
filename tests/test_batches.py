"""Batches whose prompts are served differently run in groups, and passes over long contexts in pieces."""

import itertools
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_suffix_cache import SuffixCache, forwards, grouping, passes
from hf_suffix_cache.inputs import PromptBatch
from hf_suffix_cache.prompt import NEW, SHIFTED, PlannedRow
from hf_suffix_cache.repair import Deviation, FirstRows, OutsideMass, QuestionAttention
from hf_suffix_cache.view import View
from reference import (
    ask,
    check_pool,
    check_report,
    kinds_of,
    kl,
    max_difference,
    same_answer,
    served_rows,
    shifts_of,
    stored,
    view_of,
    view_rows,
    work_is_reported,
)
from tiny_models import head, make_model, new_text, old_text, question

SHIFTING = ("llama", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3", "bloom")
PASSAGES = [old_text(60, 900 + number) for number in range(8)]
ORDERS = list(itertools.permutations(range(8), 4))[7::29]
LIVE = [head(0) + sum(PASSAGES[:4], []) + question(0), head(1) + sum(PASSAGES[4:], []) + question(1)]


def novel(count: int) -> list[list[int]]:
    """Prompts of four passages each, in orders that no other has; none is a text of `LIVE`."""
    return [
        head(10 + n, 12 + n) + sum((PASSAGES[k] for k in ORDERS[n]), []) + question(10 + n, 36 + 3 * (n % 3))
        for n in range(count)
    ]


def padded(rows) -> dict:
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "pad_token_id": 0}


def together(monkeypatch) -> None:
    """The way without groups: every row runs what any of them needs."""
    monkeypatch.setattr(passes, "groups_of", lambda rows, *others: [range(len(rows))])


# -- exact ----------------------------------------------------------------------------------------------------------

MIXED = [old_text(150, 1), old_text(170, 2), old_text(160, 3), old_text(140, 4)]  # of the second 100 tokens are stored
HITS = [0, 100, 159, 139]


@pytest.fixture
def mixed():
    """`mixed(model)`: a cache in which the rows of `MIXED` hit none, some, and all but the last token."""

    def make(model, **options):
        return stored(model, MIXED[1][:100] + new_text(9, 2), MIXED[2], MIXED[3], fidelity="exact", **options)

    return make


@pytest.mark.parametrize("kind", [*SHIFTING, "gpt2"])
def test_rows_of_a_mixed_batch_equal_their_own_runs_and_cost_as_much(kind, mixed):
    model = make_model(kind, spy=True)
    alone = [ask(model, row) for row in MIXED]
    for size in (4, 8):
        rows = MIXED * (size // 4)
        if kind == "gpt2":  # padded rows of models without rotary positions: see its tests
            rows = [row[:140] for row in rows]
            alone = [ask(model, row) for row in rows]
        inputs = padded(rows)
        cache = mixed(model)
        model.spy.clear()
        got = ask(model, cache=cache, **inputs)
        check_report(got.report)
        work_is_reported(model, got, decoded_rows=5 * size)
        hits = [min(hit, len(row) - 1) for hit, row in zip(HITS * 2, rows, strict=False)]
        assert got.report.computed_rows == sum(map(len, rows)) - sum(hits)
        assert got.report.exact_tokens == sum(hits) and got.report.repaired_tokens == 0
        for number, row in enumerate(rows):
            own = alone[number % 4]
            assert got.ids[number, -6 - len(row) :].tolist() == own.tokens()
            assert max_difference([step[number : number + 1] for step in got.scores], own.scores) < 1e-4
        again = ask(model, cache=cache, **inputs)
        same_answer(again, got)
        assert again.report.computed_rows == size
        check_pool(cache)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True, "seed": 3}])
def test_beams_and_return_sequences_stay_with_their_prompt(options, mixed):
    model = make_model("llama", spy=True)
    cache = mixed(model)
    inputs = padded(MIXED)
    want = ask(model, **options, **inputs)
    model.spy.clear()
    got = ask(model, cache=cache, **options, **inputs)
    same_answer(got, want)
    work_is_reported(model, got, decoded_rows=5 * 12)
    assert got.report.computed_rows == 3 * (sum(map(len, MIXED)) - sum(HITS))
    check_pool(cache)


def test_drafts_behind_a_mixed_prompt_run_once(mixed):
    model = make_model("llama", spy=True)
    cache = mixed(model)
    for row in MIXED:
        want = ask(model, row, prompt_lookup_num_tokens=3, steps=12)
        same_answer(ask(model, row, cache, prompt_lookup_num_tokens=3, steps=12), want)


def test_together_costs_what_the_worst_row_needs(mixed, monkeypatch):
    """The control of the counts above."""
    model = make_model("llama", spy=True)
    cache = mixed(model)
    together(monkeypatch)
    got = ask(model, cache=cache, steps=1, **padded(MIXED))
    assert got.report.computed_rows == 4 * 150  # the columns of the row that hits nothing
    assert got.report.repaired_tokens > 200


def test_a_group_in_the_wrong_rows_is_noticed(mixed, monkeypatch):
    """The control of the answers above."""
    model, narrowed = make_model("llama"), View.narrowed

    def beside(view, rows):
        return narrowed(view, slice(rows.start - 1, rows.stop - 1) if rows.start else rows)

    cache = mixed(model)
    monkeypatch.setattr(View, "narrowed", beside)
    with pytest.raises(AssertionError):
        same_answer(ask(model, cache=cache, **padded(MIXED)), ask(model, **padded(MIXED)))


def test_an_exception_in_a_group_leaves_nothing_behind(mixed, monkeypatch):
    model, narrowed = make_model("llama"), View.narrowed
    cache = mixed(model)

    @contextmanager
    def broken(view, rows):
        with narrowed(view, rows):
            yield
        if rows.start == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(View, "narrowed", broken)
    with pytest.raises(KeyboardInterrupt):
        ask(model, cache=cache, **padded(MIXED))
    monkeypatch.setattr(View, "narrowed", narrowed)
    check_pool(cache)
    same_answer(ask(model, cache=cache, **padded(MIXED)), ask(model, **padded(MIXED)))


# -- moved ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [None, FirstRows(16), Deviation(0.2), OutsideMass()], ids=lambda p: type(p).__name__
)
@pytest.mark.parametrize("kind", SHIFTING)
def test_novel_orders_in_a_batch_are_what_each_is_alone(kind, policy):
    model = make_model(kind, spy=True)
    cache = stored(model, *LIVE, repair=policy).using(store=False)
    for size in (4, 8) if policy is None else (4,):
        rows = novel(size)
        model.spy.clear()
        alone = [ask(model, row, cache, steps=2) for row in rows]
        work = sum(answer.report.computed_rows for answer in alone)
        assert model.spy.rows() == work + size
        got = ask(model, cache=cache, steps=2, **padded(rows))
        work_is_reported(model, got, decoded_rows=size)
        check_report(got.report)
        assert got.report.computed_rows <= 1.1 * work + size
        assert got.report.repaired_tokens > 40 * size // 4
        for number, own in enumerate(alone):
            assert kinds_of(got.report, number) == kinds_of(own.report)
            assert shifts_of(got.report, number) == shifts_of(own.report)
            assert max_difference([step[number : number + 1] for step in got.scores], own.scores) < 1e-4
            full = ask(model, rows[number], steps=1).first
            assert kl(full, got.first[number : number + 1]) == pytest.approx(kl(full, own.first), rel=1e-4, abs=1e-5)
        assert len(got.report.features) == size and all(got.report.features)
        for found, own in zip(got.report.features, alone, strict=True):
            assert found == pytest.approx(own.report.features[0], rel=1e-3, abs=1e-4, nan_ok=True)
        residuals = [own.report.residual for own in alone]
        if None not in residuals:
            assert got.report.residual == pytest.approx(np.mean(residuals), rel=1e-3)
        expected = [own.report.expected_kl for own in alone]
        assert got.report.expected_kl == (None if None in expected else pytest.approx(max(expected), rel=1e-3))


def test_together_novel_orders_cost_more_than_alone(monkeypatch):
    """The control of the work above."""
    model = make_model("llama", spy=True)
    cache = stored(model, *LIVE).using(store=False)
    rows = novel(4)
    work = sum(ask(model, row, cache, steps=1).report.computed_rows for row in rows)
    together(monkeypatch)
    assert ask(model, cache=cache, steps=1, **padded(rows)).report.computed_rows > 1.25 * work


@pytest.mark.parametrize("kind", SHIFTING)
def test_a_mixed_batch_repaired_whole_is_a_full_prefill(kind):
    model = make_model(kind, spy=True)
    rows = [*novel(2), new_text(140, 5), LIVE[0]]
    inputs = padded(rows)
    want = ask(model, **inputs)
    cache = stored(model, *LIVE, repair_fraction=1.0)
    model.spy.clear()
    got = ask(model, cache=cache, **inputs)
    same_answer(got, want)
    work_is_reported(model, got, decoded_rows=5 * 4)
    assert set(kinds_of(got.report, 2)) == {"new"} and set(kinds_of(got.report, 3)[:-1]) == {"exact"}
    check_pool(cache)


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True, "seed": 1}])
def test_beams_of_novel_orders_are_what_each_prompt_gives_alone(options):
    model = make_model("llama", spy=True)
    cache = stored(model, *LIVE).using(store=False)
    rows = novel(4)
    alone = [ask(model, row, cache, steps=3, **{**options, "seed": None}) for row in rows]
    model.spy.clear()
    got = ask(model, cache=cache, steps=3, **options, **padded(rows))
    assert got.report.computed_rows == sum(own.report.computed_rows for own in alone)
    work_is_reported(model, got, decoded_rows=2 * 8)
    for number, own in enumerate(alone):
        assert kinds_of(got.report, number) == kinds_of(own.report)
        pair = got.scores[0][2 * number : 2 * number + 2]
        assert max_difference([pair], [own.scores[0]]) < 1e-4


@pytest.mark.parametrize("bound", [1e-6, 0.05, 10.0])
def test_each_prompt_of_a_batch_is_repaired_as_far_as_its_own_bound_asks(bound, monkeypatch):
    """Escalation: the rule judges each group by itself, and restoring one leaves the others' rows alone."""
    from hf_suffix_cache.bound.rule import Rule

    model = make_model("llama", spy=True)
    monkeypatch.setattr(Rule, "always_full", property(lambda rule: False))
    levels = {1e-6: "60 %", 0.05: "30 %", 10.0: "seams"}
    order = ("seams", "10 %", "30 %", "60 %", "full")

    def next_level(rule, current, features, previous=None):
        return None if current == levels[bound] else order[order.index(current) + 1]

    monkeypatch.setattr(Rule, "next_level", next_level)
    cache = stored(model, *LIVE).using(store=False, max_kl=0.5)
    rows = novel(4)
    alone = [served_rows(model, row, cache, steps=1) for row in rows]
    model.spy.clear()
    got = ask(model, cache=cache, steps=1, return_dict_in_generate=True, **padded(rows))
    work_is_reported(model, got)
    check_report(got.report)
    assert got.report.level == levels[bound]
    width = max(map(len, rows))
    for number, (own, own_rows) in enumerate(alone):
        assert kinds_of(got.report, number) == kinds_of(own.report)
        assert max_difference([got.first[number : number + 1]], own.scores) < 1e-4
        pad = width - len(rows[number])
        for pair in zip(view_rows(view_of(got.output), number), own_rows, strict=True):
            for left, right in zip(*pair, strict=True):
                assert torch.allclose(left[:, pad : pad + right.shape[1]], right, rtol=0, atol=1e-4)


def test_turns_after_a_grouped_batch_carry_its_rows_bit_for_bit():
    """The recipes of a batch in groups give the rows again that it had served and corrected."""
    model = make_model("llama")
    cache = stored(model, *LIVE)
    rows = novel(4)
    batch = ask(model, cache=cache, steps=2, return_dict_in_generate=True, **padded(rows))
    width = max(map(len, rows))
    for number, row in enumerate(rows):
        before = view_rows(view_of(batch.output), number)
        turn = batch.tokens(number)[width - len(row) :]
        answer, after = served_rows(model, turn + question(30), cache.using(store=False), steps=1)
        assert answer.report.carried_tokens > 100
        for left, right in zip(itertools.chain(*before), itertools.chain(*after), strict=True):
            assert torch.equal(left[:, width - len(row) : width], right[:, : len(row)])


# -- which groups ---------------------------------------------------------------------------------------------------


def planned(tokens: int, computed, shifted=(), pad: int = 0) -> PlannedRow:
    """A prompt of which these `(start, stop)` ranges run and are moved; the rest is exact."""
    row = PlannedRow(np.arange(tokens), pad, None, None)
    row.kinds[:] = 0
    for kind, ranges in ((NEW, computed), (SHIFTED, shifted)):
        for start, stop in ranges:
            row.kinds[start:stop] = kind
    row.served.which[row.kinds == SHIFTED] = 0
    return row


def cost_of(rows, kept, groups, overhead: int, fraction: float) -> float:
    """Slow and obvious: rows run, and forwards, if these groups run apart under a policy that asks."""
    total = 0
    for members in groups:
        union, moved, chosen = set(), set(), 0
        for row in (rows[number] for number in members):
            union |= {row.pad + at for at, kind in enumerate(row.kinds) if kind == NEW}
            moved |= {row.pad + at for at, kind in enumerate(row.kinds) if kind == SHIFTED}
            chosen += row.repair_request(fraction).budget
        before = {column for column in union if not kept[column]}
        if not moved:
            total += overhead * bool(before) + len(members) * len(before)
        else:
            behind = {column for column in before if column >= min(moved)}
            total += 2 * overhead + len(members) * (len(union) + len(behind) + min(chosen, len(moved)))
    return total


def all_ways(count: int):
    """Every way to split `count` prompts into groups of neighbours."""
    for cuts in itertools.product((False, True), repeat=count - 1):
        borders = [0, *(number + 1 for number, cut in enumerate(cuts) if cut), count]
        yield [range(*pair) for pair in itertools.pairwise(borders)]


@pytest.mark.parametrize("seed", range(12))
def test_groups_are_the_cheapest_way(seed, monkeypatch):
    draw = np.random.default_rng(seed)
    overhead = int(draw.choice([0, 10, 60]))
    monkeypatch.setattr(grouping, "FORWARD_ROWS", {"cpu": overhead})
    columns, rows = 120, []
    for _ in range(int(draw.integers(2, 6))):
        pad = int(draw.choice([0, 0, 20]))
        start, stop = np.sort(draw.integers(0, 60, 2))
        moved = [(61, int(draw.integers(62, 90)))] if draw.random() < 0.5 else []
        rows.append(planned(columns - pad, [(start, stop), (columns - pad - 10, columns - pad)], moved, pad))
    batch = PromptBatch(np.zeros((len(rows), columns)), np.array([row.pad for row in rows]), columns, 1)
    kept = np.arange(columns) >= columns - 1
    got = grouping.groups_of(rows, batch, kept, QuestionAttention(), 0.15, "cpu")
    assert [number for members in got for number in members] == list(range(len(rows)))

    def total(groups):  # one group has no forward of its own for the kept columns
        cost = cost_of(rows, kept, groups, overhead, 0.15)
        return max(cost, overhead) if len(groups) == 1 else cost + overhead

    assert total(got) == min(map(total, all_ways(len(rows))))


def test_prompts_with_one_plan_stay_together_and_others_part():
    same = [planned(400, [(100, 400)]) for _ in range(3)]
    other = [planned(400, [(390, 400)])]
    batch = PromptBatch(np.zeros((4, 400)), np.zeros(4, dtype=int), 400, 1)
    kept = np.arange(400) >= 399
    assert grouping.groups_of(same, batch, kept, None, 0.15, "cpu") == [range(3)]
    assert grouping.groups_of(same + other, batch, kept, None, 0.15, "cpu") == [range(3), range(3, 4)]
    assert grouping.groups_of(same + other, batch, kept, None, 0.15, "cuda") == [range(4)]  # forwards cost more there
    moved = [planned(400, [(390, 400)], [(0, 390)]) for _ in range(2)]
    assert grouping.groups_of(moved + same[:1] + other, batch, kept, Deviation(), 0.15, "cuda") == [
        range(1),
        range(1, 4),
    ]


def test_models_whose_frequencies_depend_on_the_length_run_together(monkeypatch):
    model = make_model("phi3", spy=True)
    monkeypatch.setattr(passes, "groups_of", lambda *_: pytest.fail("a group would get other frequencies"))
    inputs = padded([old_text(150, 1), old_text(60, 2)])
    cache = SuffixCache(fidelity="exact")
    for _ in range(2):
        same_answer(ask(model, cache=cache, **inputs), ask(model, **inputs))


# -- pieces ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def masks(monkeypatch):
    """Bytes of every mask that is made, as sdpa sees it: in floats."""
    seen = []
    for name in ("sdpa", "eager"):
        made = ALL_MASK_ATTENTION_FUNCTIONS[name]

        def record(*args, made=made, **kwargs):
            mask = made(*args, **kwargs)
            if isinstance(mask, torch.Tensor):
                seen.append(mask.numel() * 4)
            return mask

        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, record)
    return seen


LONG = [old_text(300, 950 + number) for number in range(6)]
SOURCE = head(2) + sum(LONG, []) + question(2)
ASKED = head(3, 30) + LONG[4] + new_text(150, 1) + LONG[0] + LONG[5] + new_text(90, 2) + LONG[2] + question(3)
LIMIT = 250_000  # bytes: about 45 rows of this prompt


@pytest.mark.parametrize("policy", [None, FirstRows(40), OutsideMass()], ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_masks_of_long_passes_stay_below_the_limit(kind, policy, masks, monkeypatch):
    model = make_model(kind, spy=True)
    cache = stored(model, SOURCE, repair=policy).using(store=False)
    masks.clear()
    want, want_rows = served_rows(model, ASKED, cache, steps=2)
    assert max(masks) > 2 * LIMIT  # control: there is something to cut
    monkeypatch.setattr(forwards, "MASK_BYTES", LIMIT)
    masks.clear()
    model.spy.clear()
    got, rows = served_rows(model, ASKED, cache, steps=2)
    assert max(masks) <= LIMIT
    work_is_reported(model, got, decoded_rows=1)
    assert got.report.computed_rows == want.report.computed_rows
    assert kinds_of(got.report) == kinds_of(want.report)
    assert max_difference(got.scores, want.scores) < 1e-4
    assert got.report.features[0] == pytest.approx(want.report.features[0], rel=1e-3, abs=1e-4, nan_ok=True)
    for left, right in zip(itertools.chain(*rows), itertools.chain(*want_rows), strict=True):
        assert torch.allclose(left, right, rtol=0, atol=1e-4)


def test_no_mask_of_a_long_context_is_above_64_mb(masks):
    model = make_model("llama", spy=True)
    text = old_text(5000, 71)
    cache = stored(model, head(6) + text + question(6)).using(store=False)
    ids = head(7) + new_text(1200, 8) + text + new_text(1500, 9)
    assert len(ids) * 2700 * 4 > 64 << 20
    masks.clear()
    model.spy.clear()
    got = ask(model, ids, cache, steps=1)
    assert 32 << 20 < max(masks) <= 64 << 20
    assert work_is_reported(model, got) < 1.3 * len(ids) and got.report.shifted_tokens > 4000
    alone = ask(model, ids[:1212] + new_text(800, 9), cache, steps=1)  # control: below the limit nothing is cut
    assert [queries for _, queries in model.spy.calls] == [2012] and alone.report.new_tokens == 2012


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_masks_of_batches_stay_below_the_limit(kind, masks, monkeypatch):
    model = make_model(kind, spy=True)
    cache = stored(model, SOURCE).using(store=False)
    rows = [ASKED, head(4) + LONG[1] + new_text(120, 3) + LONG[3] + question(4), new_text(400, 6), SOURCE]
    want = ask(model, cache=cache, steps=2, **padded(rows))
    monkeypatch.setattr(forwards, "MASK_BYTES", LIMIT)
    for apart in (True, False):
        if not apart:
            together(monkeypatch)
        masks.clear()
        model.spy.clear()
        got = ask(model, cache=cache, steps=2, **padded(rows))
        assert max(masks) <= LIMIT
        work_is_reported(model, got, decoded_rows=4)
        if apart:
            assert max_difference(got.scores, want.scores) < 1e-4
            assert [kinds_of(got.report, row) for row in range(4)] == [kinds_of(want.report, row) for row in range(4)]


def test_a_filtered_pass_whose_mask_would_be_too_large_says_so(masks, monkeypatch):
    model = make_model("llama")
    cache = stored(model, SOURCE, repair=Deviation(0.15)).using(store=False)
    assert ask(model, ASKED, cache, steps=1).report.reason is None
    monkeypatch.setattr(forwards, "MASK_BYTES", LIMIT)
    masks.clear()
    report = ask(model, ASKED, cache, steps=1).report
    assert "mask would be too large" in report.reason and max(masks) <= LIMIT
    assert report.repaired_tokens > 0


def test_a_prompt_with_nothing_to_reuse_is_not_cut(monkeypatch):
    monkeypatch.setattr(forwards, "MASK_BYTES", 1000)
    model = make_model("llama", spy=True)
    cache = SuffixCache()
    got = ask(model, ASKED, cache, steps=1)
    assert model.spy.calls[-1] == (1, len(ASKED)) and got.report.new_tokens == len(ASKED)


def test_rows_corrected_in_pieces_come_back_bit_for_bit(monkeypatch):
    model = make_model("llama")
    cache = stored(model, SOURCE)
    monkeypatch.setattr(forwards, "MASK_BYTES", LIMIT)
    answer, before = served_rows(model, ASKED, cache, steps=2)
    monkeypatch.undo()
    turn, after = served_rows(model, answer.tokens() + question(5), cache, steps=1)
    assert turn.report.carried_tokens > 500
    for left, right in zip(itertools.chain(*before), itertools.chain(*after), strict=True):
        assert torch.equal(left[:, : len(ASKED)], right[:, : len(ASKED)])


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 45, 46, 100, 999])
@pytest.mark.parametrize("chunk", [None, 3, 8, 50])
@pytest.mark.parametrize("end", [1, 5, 8])
def test_pieces_hold_every_column_once_and_the_end_together(rows, chunk, end, monkeypatch):
    monkeypatch.setattr(forwards, "MASK_BYTES", 4 * 2 * 1000 * 45)
    batch = PromptBatch(np.zeros((2, 1000)), np.zeros(2, dtype=int), 1000, 1)
    runs = forwards.Forwards(None, batch, None, type("Any", (), {"length_dependent": False}), chunk, None, None)
    columns = np.sort(np.random.default_rng(rows).permutation(1000)[:rows])
    pieces = runs.pieces(columns, end)
    assert np.concatenate(pieces).tolist() == columns.tolist() and min(map(len, pieces)) > 0
    assert max(map(len, pieces)) <= max(min(chunk or 45, 45), end)
    assert len(pieces[-1]) >= min(end, rows)
