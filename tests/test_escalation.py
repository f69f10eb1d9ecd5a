"""`max_kl`: repair by levels until the rule accepts one, traces of all levels, and calibration."""

import numpy as np
import pytest
import torch

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.bound import LEVEL_NAMES, LEVELS, Calibration
from hf_suffix_cache.bound.rule import Rule
from hf_suffix_cache.prompt import PlannedRow
from hf_suffix_cache.tracing import trace
from reference import (
    ask,
    check_pool,
    check_report,
    kinds_of,
    kl,
    max_difference,
    same_as_vanilla,
    served,
    stored,
    work_is_reported,
)
from tiny_models import A, D, forget, head, make_model, new_text, old_text, question

MODELS = ("llama", "gemma3_text", "deepseek_v3")
TEXTS = [old_text(50, 800 + number) for number in range(6)]
SOURCE = D + head(0) + sum(TEXTS, []) + question(0)
ORDERS = [(3, 1, 5, 0), (5, 2, 4, 1), (0, 4, 2, 3), (2, 0, 5, 4)]
PROMPTS = [D + head(1 + n) + sum((TEXTS[k] for k in order), []) + question(1 + n) for n, order in enumerate(ORDERS)]
MOVED = 4 * 50


@pytest.fixture
def accept(monkeypatch):
    """`accept(level, jumps)`: the rule accepts at `level`, or jumps from one level to another."""

    def install(level: str, jumps: dict | None = None):
        seen = []

        def next_level(rule, current, features, previous=None):
            seen.append((current, previous, features))
            if current == level:
                return None
            return (jumps or {}).get(current, LEVEL_NAMES[LEVEL_NAMES.index(current) + 1])

        monkeypatch.setattr(Rule, "always_full", property(lambda rule: rule.bound is None))
        monkeypatch.setattr(Rule, "next_level", next_level)
        return seen

    return install


def checksum(cache) -> list:
    """All that a store holds: the bits of every row in use, and how many segments and conversations there are."""
    store, found = cache._store, []
    for shelf in store.shelves.values():
        found.append((len(shelf.segments), len(shelf.sequences), len(shelf.means)))
        for pool in (shelf.pool,):
            for slab in pool.slabs.values():
                used = np.repeat(slab.references > 0, store.config.block_size)
                for index in range(len(pool.shapes)):
                    for tensor in pool.layer_tensors(slab, index):
                        rows = tensor[:, torch.from_numpy(np.flatnonzero(used))]
                        found.append(rows.double().nan_to_num().sum().item())
    return found


def levels_of(model, cache, ids) -> list:
    """`TracedLevel`s of a prompt: features, logits and rows of every level."""
    levels = []
    ask(model, ids, cache.silent(levels, store=False, max_kl=0.0), steps=1)
    return levels


# -- tracing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_last_level_is_a_full_prefill_and_each_runs_more_rows(kind):
    model = make_model(kind)
    cache = stored(model, SOURCE)
    for ids in PROMPTS[:2]:
        full = ask(model, ids, steps=1).first
        levels = levels_of(model, cache, ids)
        assert [step.level for step in levels] == list(LEVEL_NAMES)
        assert max_difference([levels[-1].logits[None]], [full]) < 1e-4
        assert max_difference([levels[0].logits[None]], [full]) > 1e-3  # control
        rows = [step.rows for step in levels]
        assert rows == sorted(rows) and rows[0] < len(ids) < rows[-1]
        shares = [step.features["share"] for step in levels]
        assert shares == pytest.approx([16 / MOVED, 0.1, 0.3, 0.6, 1.0])
        traced = trace(cache, model, ids)
        assert [step.level for step in traced] == list(LEVEL_NAMES)
        for step, again in zip(traced, levels, strict=True):
            assert step.kl == pytest.approx(max(0.0, kl(full[0], again.logits)), abs=1e-5)
            assert step.rows == again.rows and step.features == pytest.approx(again.features, nan_ok=True)


@pytest.mark.parametrize("drift", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_a_level_gives_what_a_plain_request_gives_that_repairs_as_much(kind, drift):
    model = make_model(kind)
    cache = stored(model, SOURCE, drift=drift)
    levels = levels_of(model, cache, PROMPTS[0])
    for step, (_, share) in zip(levels[:-1], LEVELS[:-1], strict=True):
        plain = ask(model, PROMPTS[0], cache.using(repair_fraction=share, store=False), steps=1)
        assert plain.report.reason is None
        assert max_difference([step.logits[None]], plain.scores) < 1e-4
        for name, value in plain.report.features[0].items():
            if name != "change":  # a plain request compares itself with no repair, not with the level before
                assert step.features[name] == pytest.approx(value, rel=1e-3, abs=1e-4, nan_ok=True), name


@pytest.mark.parametrize("chunk", [None, 37])
def test_a_row_that_was_repaired_stays_repaired(monkeypatch, chunk):
    model = make_model("llama")
    cache = stored(model, SOURCE)
    repaired, mark = [], PlannedRow.mark_recomputed

    def marking(row, columns):
        mark(row, columns)
        repaired.append(frozenset(np.flatnonzero(row.kinds == 3).tolist()))

    monkeypatch.setattr(PlannedRow, "mark_recomputed", marking)
    levels = []
    options = {"prefill_chunk_size": chunk} if chunk else {}
    ask(model, PROMPTS[0], cache.silent(levels, store=False, max_kl=0.0), steps=1, **options)
    for before, after in zip(repaired, repaired[1:], strict=False):
        assert before <= after
    assert [len(rows) for rows in dict.fromkeys(filter(None, repaired))] == [16, 20, 60, 120, 200]
    full = ask(model, PROMPTS[0], steps=1).first
    assert max_difference([levels[-1].logits[None]], [full]) < 1e-4


def test_tracing_stores_nothing_and_counts_in_no_statistics():
    model = make_model("llama")
    cache = stored(model, SOURCE)
    ask(model, PROMPTS[1], cache)
    before, stats, report = checksum(cache), cache.stats.to_dict(), cache.last_report
    random_state = torch.get_rng_state()
    assert trace(cache, model, PROMPTS[0]) is not None
    assert torch.equal(torch.get_rng_state(), random_state)
    assert checksum(cache) == before and cache.stats.to_dict() == stats and cache.last_report is report
    check_pool(cache)
    ask(model, PROMPTS[2], cache)
    assert checksum(cache) != before  # control


def test_nothing_is_traced_where_nothing_is_moved():
    model = make_model("llama")
    cache = stored(model, SOURCE)
    assert trace(cache, model, head(9) + new_text(80, 3)) is None
    assert trace(cache, model, SOURCE + question(7)) is None  # an exact prefix


# -- under a rule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("kind", MODELS)
def test_answer_is_that_of_the_level_that_the_rule_accepted(kind, level, accept):
    model = make_model(kind, spy=True)
    cache = stored(model, SOURCE)
    want = {step.level: step for step in levels_of(model, cache, PROMPTS[0])}[level]
    model.spy.clear()
    seen = accept(level)
    answer = ask(model, PROMPTS[0], cache.using(max_kl=0.1), steps=1)
    check_report(answer.report)
    assert answer.report.level == level
    work_is_reported(model, answer)
    assert max_difference(answer.scores, [want.logits[None]]) < 1e-4
    names = LEVEL_NAMES[: min(LEVEL_NAMES.index(level), 3) + 1]
    assert [current for current, _, _ in seen] == list(names)
    assert [previous for _, previous, _ in seen] == [None, *names[:-1]]
    if level == "full":
        assert max_difference(answer.scores, ask(model, PROMPTS[0], steps=1).scores) < 1e-4
        assert answer.report.expected_kl == 0.0 and answer.report.shifted_tokens == 0
        assert answer.report.computed_rows == want.rows  # nothing to the left of the first moved row runs again
        assert "full prefill" in answer.report.reason
    else:
        assert answer.report.computed_rows == want.rows + 1  # the last pass gives the logits once more
        assert answer.report.reason is None
        # what the report says is what the rule went by
        assert answer.report.features == [seen[-1][2]]
    check_pool(cache)


def test_levels_that_the_rule_jumps_over_are_not_run(accept):
    model = make_model("llama", spy=True)
    cache = stored(model, SOURCE)
    rows = {}
    for number, (level, jumps) in enumerate(
        {"60 %": None, "seams": None, "30 %": {"seams": "30 %"}, "full": {"seams": "full"}}.items()
    ):
        seen = accept(level, jumps)
        model.spy.clear()
        ids = D + head(20 + number) + PROMPTS[0][len(D) + 12 :]
        answer = ask(model, ids, cache.using(max_kl=0.1, store=False), steps=1)
        work_is_reported(model, answer)
        assert answer.report.level == level and len(seen) == (4 if level == "60 %" else 1 if level != "30 %" else 2)
        rows[level] = answer.report.computed_rows
        if level == "full":
            assert max_difference(answer.scores, ask(model, ids, steps=1).scores) < 1e-4
    assert rows["seams"] < rows["30 %"] < rows["60 %"]


@pytest.mark.parametrize("seam_tokens", [0, 4])
def test_an_accepted_answer_is_no_exact_conversation(seam_tokens, accept):
    """Rows that an early level repaired stood behind others that only a later one did."""
    model = make_model("llama")
    for level in LEVEL_NAMES:
        cache = stored(model, SOURCE, seam_tokens=seam_tokens)
        accept(level)
        answer = ask(model, PROMPTS[0], cache.using(max_kl=0.1))
        assert answer.report.level == level
        longer = answer.tokens() + question(9)
        exact = same_as_vanilla(model, longer, cache.using(fidelity="exact"), steps=2).report.exact_tokens
        assert exact == len(answer.tokens()) - 1 if level == "full" else exact < len(PROMPTS[0]) - 36


@pytest.mark.parametrize("level", [None, *LEVEL_NAMES])
@pytest.mark.parametrize("seam_tokens", [0, 4])
def test_rows_run_for_a_neighbours_sake_are_exact_only_if_they_are(level, seam_tokens, accept):
    """The second prompt's moved rows begin where the first one's head is still new, and the other way round."""
    model = make_model("llama", spy=True)
    cache = stored(model, SOURCE, seam_tokens=seam_tokens)
    texts = [TEXTS[k] for k in ORDERS[0]]
    rows = [
        head(3, 40) + texts[0] + texts[1] + new_text(15, 3) + texts[2] + texts[3] + question(11),
        head(4, 20) + texts[0] + new_text(15, 4) + texts[1] + texts[2] + new_text(10, 5) + texts[3] + question(12),
    ]
    pads = [0, len(rows[0]) - len(rows[1])]
    ids = torch.tensor([[0] * pad + row for pad, row in zip(pads, rows, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * len(row) for pad, row in zip(pads, rows, strict=True)])
    if level is not None:
        accept(level)
    model.spy.clear()
    answer = ask(model, ids, cache.using(max_kl=level and 0.1), steps=3, attention_mask=mask, pad_token_id=0)
    work_is_reported(model, answer, decoded_rows=4)
    check_report(answer.report)
    assert answer.report.level == level and served(answer.report) == 2 * MOVED
    for number, pad in enumerate(pads):
        turn = answer.tokens(number)[pad:]
        report = same_as_vanilla(model, turn + question(9), cache.using(fidelity="exact"), steps=2).report
        assert (report.exact_tokens == len(turn) - 1) == (level == "full")
    check_pool(cache)


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_padded_batch_gives_what_its_prompts_give_alone(level, accept):
    """The same columns are moved in both prompts, so each level runs the same rows of each as alone."""
    model = make_model("llama", spy=True)
    cache = stored(model, SOURCE, seam_tokens=4)
    long, short = head(3, 30) + PROMPTS[0][36:], head(4, 21) + PROMPTS[0][36:-36] + question(12)
    ids = torch.tensor([long, [0] * 9 + short])
    mask = torch.tensor([[1] * len(long), [0] * 9 + [1] * len(short)])
    seen = accept(level)
    handle = cache.using(max_kl=0.1, store=False)
    model.spy.clear()
    answer = ask(model, ids, handle, steps=1, attention_mask=mask, pad_token_id=0)
    work_is_reported(model, answer)
    check_report(answer.report)
    assert answer.report.level == level and served(answer.report) == 2 * MOVED
    assert len(seen) == 2 * (min(LEVEL_NAMES.index(level), 3) + 1)  # every prompt is asked
    if level == "full":
        vanilla = ask(model, ids, steps=1, attention_mask=mask, pad_token_id=0)
        assert max_difference(answer.scores, vanilla.scores) < 1e-4
    if level == "seams":  # later ones run what either prompt wants
        for row, prompt in enumerate((long, short)):
            assert max_difference([answer.scores[0][row : row + 1]], ask(model, prompt, handle, steps=1).scores) < 1e-4


def test_the_prompt_that_needs_most_decides_for_the_batch(monkeypatch, accept):
    model = make_model("llama")
    cache = stored(model, SOURCE)
    accept("never")
    asked = []

    def next_level(rule, current, features, previous=None):
        asked.append(current)
        return None if len(asked) % 2 or current == "60 %" else "60 %"  # the first is content, the second is not

    monkeypatch.setattr(Rule, "next_level", next_level)
    rows = [head(3, 30) + PROMPTS[0][36:], head(4, 30) + PROMPTS[0][36:]]
    assert ask(model, rows, cache.using(max_kl=0.1), steps=1).report.level == "60 %"
    assert asked == ["seams", "seams", "60 %", "60 %"]


@pytest.mark.parametrize("level", ["seams", "30 %", "full"])
@pytest.mark.parametrize("chunk", [16, 37, 100])
def test_levels_in_chunks_give_the_same_answer(level, chunk, accept):
    model = make_model("llama", spy=True)
    cache = stored(model, SOURCE)
    accept(level)
    handle = cache.using(max_kl=0.1, store=False)
    want = ask(model, PROMPTS[0], handle, steps=3)
    model.spy.clear()
    got = ask(model, PROMPTS[0], handle, steps=3, prefill_chunk_size=chunk)
    work_is_reported(model, got, decoded_rows=2)
    assert max(calls for _, calls in model.spy.calls or [(1, 0)]) <= chunk
    assert max_difference(got.scores, want.scores) < 1e-4
    assert got.report.level == level and got.report.computed_rows == want.report.computed_rows


@pytest.mark.parametrize("level", ["seams", "30 %", "full"])
@pytest.mark.parametrize("drafts", ["prompt_lookup", "assistant"])
def test_drafts_behind_the_prompt_change_nothing(level, drafts, accept):
    model = make_model("llama", spy=True)
    cache = stored(model, SOURCE)
    accept(level)
    handle = cache.using(max_kl=0.1, store=False)
    want = ask(model, PROMPTS[0], handle, steps=6)
    options = {"prompt_lookup_num_tokens": 3}
    if drafts == "assistant":
        options = {"assistant_model": make_model("llama", num_hidden_layers=1)}
    for _ in range(2):
        got = ask(model, PROMPTS[0], handle, steps=6, **options)
        check_report(got.report)
        assert got.report.level == level
        assert got.tokens() == want.tokens()
        assert got.report.expected_kl == pytest.approx(want.report.expected_kl)
        for name, value in want.report.features[0].items():
            assert got.report.features[0][name] == pytest.approx(value, rel=1e-3, abs=1e-3, nan_ok=True)
    if drafts == "assistant":
        forget(options["assistant_model"])


@pytest.mark.parametrize("reads", [True, False])
def test_without_readable_attention_the_first_rows_of_each_run_come_first(reads, accept, monkeypatch):
    model = make_model("llama", spy=True)
    cache = stored(model, SOURCE)
    accept("30 %")
    if not reads:
        monkeypatch.setattr("hf_suffix_cache.passes.Probe.attention", lambda probe: None)
    model.spy.clear()
    answer = ask(model, PROMPTS[0], cache.using(max_kl=0.1), steps=1)
    work_is_reported(model, answer)
    kinds = kinds_of(answer.report)
    assert answer.report.level == "30 %" and kinds.count("repaired") == 60
    firsts = all(kinds[start : start + 15] == ["repaired"] * 15 for start in (36, 86, 136, 186))
    assert firsts != reads


# -- when the answer is a full prefill ------------------------------------------------------------------------------


def is_full(model, ids, handle, expected_rows: int) -> str:
    """O1, everything behind the exact prefix run once; returns the reason."""
    model.spy.clear()
    answer = ask(model, ids, handle, steps=1)
    work_is_reported(model, answer)
    assert max_difference(answer.scores, ask(model, ids, steps=1).scores) < 1e-4
    report = answer.report
    check_report(report)
    assert report.level == "full" and report.computed_rows == expected_rows
    assert report.shifted_tokens == report.carried_tokens == 0 and report.repaired_tokens == MOVED
    assert report.expected_kl == 0.0
    return report.reason


@pytest.mark.parametrize("kind", MODELS)
def test_without_calibration_it_is_always_a_full_prefill_and_says_so(kind):
    model = make_model(kind, spy=True)
    cache = stored(model, SOURCE)
    cache.calibration = Calibration.none()
    for number, ids in enumerate(PROMPTS):
        reason = is_full(model, ids, cache.using(max_kl=0.1, store=False), len(ids) - len(D))
        assert "no calibration" in reason, number


def test_a_bound_of_zero_is_a_full_prefill_whatever_the_calibration():
    model = make_model("llama", spy=True)
    cache = stored(model, SOURCE)
    cache.calibration = calibrated(model)
    is_full(model, PROMPTS[0], cache.using(max_kl=0.0, store=False), len(PROMPTS[0]) - len(D))


def test_a_prompt_that_is_too_short_to_ask_is_a_full_prefill(accept):
    model = make_model("llama", spy=True)
    cache = stored(model, head(0) + A + question(0))
    accept("seams")
    ids = head(1) + A[:20] + question(1)
    model.spy.clear()
    answer = ask(model, ids, cache.using(max_kl=0.1), steps=1)
    assert model.spy.rows() == answer.report.computed_rows == len(ids)
    assert answer.report.level == "full" and "too short" in answer.report.reason
    assert max_difference(answer.scores, ask(model, ids, steps=1).scores) < 1e-4


def test_exact_fidelity_wins(accept):
    model = make_model("llama")
    cache = stored(model, SOURCE)
    seen = accept("seams")
    report = same_as_vanilla(model, PROMPTS[0], cache.using(fidelity="exact", max_kl=0.5)).report
    assert report.level is None and served(report) == 0 and not seen


def test_rows_of_an_approximate_turn_are_not_carried_on_under_a_bound(accept):
    model = make_model("llama")
    cache = stored(model, SOURCE)
    turn = ask(model, PROMPTS[0], cache).tokens()
    longer = turn + question(9)
    carried = ask(model, longer, cache.using(store=False), steps=1).report.carried_tokens
    assert carried > MOVED // 2  # control: without a bound they are
    seen = accept("seams")
    report = ask(model, longer, cache.using(max_kl=0.1, store=False), steps=1).report
    assert report.carried_tokens == 0 and seen and report.level == "seams"
    cache.calibration = Calibration.none()
    accept("never")
    answer = ask(model, longer, cache.using(max_kl=0.1), steps=1)
    assert answer.report.level == "full" and answer.report.carried_tokens == 0
    assert max_difference(answer.scores, ask(model, longer, steps=1).scores) < 1e-4


def test_the_next_turn_of_a_full_prefill_is_exact():
    model = make_model("llama")
    cache = stored(model, SOURCE)
    cache.calibration = Calibration.none()
    turn = ask(model, PROMPTS[0], cache.using(max_kl=0.1)).tokens()
    report = same_as_vanilla(model, turn + question(9), cache.using(max_kl=0.1)).report
    assert report.exact_tokens == len(turn) - 1 and report.level is None


# -- calibrating ----------------------------------------------------------------------------------------------------


def workload(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that share texts, in new orders behind new heads."""
    random = np.random.default_rng(seed)
    prompts = []
    for number in range(count):
        order = random.permutation(6)[:3]
        prompts.append(new_text(10, seed + 300 + number) + sum((TEXTS[k] for k in order), []) + question(number, 20))
    return prompts


_calibrations: list = []


def calibrated(model) -> Calibration:
    """One calibration for all tests that only need some: a margin needs 9 prompts, the predictor others."""
    if not _calibrations:
        cache = stored(model, SOURCE)
        _calibrations.append(cache.calibrate(model, workload(34), alpha=0.2))
    return _calibrations[0]


def test_calibrate_gives_a_calibration_that_is_in_use_and_stores_nothing():
    model = make_model("llama")
    cache = stored(model, SOURCE)
    assert cache.calibration.origin != "prompts"
    before, stats = checksum(cache), cache.stats.to_dict()
    found = cache.calibrate(model, workload(34), alpha=0.2)
    assert cache.calibration is found is cache.using(max_kl=0.1).calibration
    assert checksum(cache) == before and cache.stats.to_dict() == stats
    check_pool(cache)
    assert found.origin == "prompts" and found.alpha == 0.2 and found.labels == ["all"]
    assert found.num_prompts + found.predictor.num_prompts == 34
    assert "alpha 0.2" in found.describe() and "weights" in found.describe()
    report = ask(model, PROMPTS[0], cache).report
    assert report.expected_kl is not None and report.expected_kl >= 0.0
    levels = {ask(model, ids, cache.using(max_kl=1e3, store=False), steps=1).report.level for ids in PROMPTS}
    assert levels == {"seams"}  # no error of these models comes near such a bound
    _calibrations.append(found)


def test_prompts_that_only_share_text_with_one_another_calibrate_too():
    model = make_model("llama")
    cache = SuffixCache()
    found = cache.calibrate(model, workload(36), alpha=0.2)
    assert 20 < found.num_prompts + found.predictor.num_prompts < 36  # the first ones find nothing
    assert cache.stats.segments == 0 and cache.stats.requests == 0


def test_a_saved_calibration_decides_as_it_did(tmp_path):
    model = make_model("llama")
    found, path = calibrated(model), tmp_path / "calibration.json"
    found.save(path)
    cache = stored(model, SOURCE)
    cache.calibration = Calibration.load(path)
    assert cache.calibration.describe() == found.describe()
    other = stored(model, SOURCE)
    other.calibration = found
    for bound in (1e-4, 0.05, 0.3, 1.0, 1e3):
        reports = [ask(model, PROMPTS[0], each.using(max_kl=bound, store=False)).report for each in (cache, other)]
        assert reports[0].level == reports[1].level and reports[0].expected_kl == reports[1].expected_kl
    with pytest.raises(TypeError, match="Calibration"):
        cache.calibration = path


def test_workloads_by_label():
    model = make_model("llama")
    cache = stored(model, SOURCE)
    found = cache.calibrate(model, {"orders": workload(24), "edits": workload(20, seed=50)}, alpha=0.3)
    assert found.labels == ["edits", "orders"]
    handle = cache.using(max_kl=1e3, workload="edits")
    assert ask(model, PROMPTS[0], handle).report.level == "seams"
    before = checksum(cache)
    requests = cache.stats.requests
    with pytest.raises(ValueError, match="'poems' was not calibrated.*edits.*orders"):
        ask(model, PROMPTS[1], cache.using(max_kl=0.1, workload="poems"))
    with pytest.raises(ValueError, match="'poems'"):
        ask(model, head(3) + new_text(50, 1), cache.using(max_kl=0.1, workload="poems"))  # nothing would be moved
    assert checksum(cache) == before and cache.stats.requests == requests
    check_pool(cache)


@pytest.mark.parametrize(
    "prompts, options, error, message",
    [
        (workload(8), {}, ValueError, "holds 8"),
        ([], {}, ValueError, "holds 0"),
        ([new_text(60, number) for number in range(30)], {}, ValueError, "0 of the 30 prompts"),
        (["a text"], {}, ValueError, "tokenizer"),
        ("a text", {}, TypeError, "list of prompts"),
        (7, {}, TypeError, "list of prompts"),
        ({"": workload(2)}, {}, TypeError, "non-empty strings"),
        ({3: workload(2)}, {}, TypeError, "non-empty strings"),
        ([[1, 2, 3000]], {}, ValueError, "from 0 to 255"),
        ([[]], {}, ValueError, "empty"),
        ([[1.5, 2.0]], {}, TypeError, "sequence of token ids"),
        (workload(34), {"alpha": 0.0}, ValueError, "alpha"),
        (workload(34), {"alpha": 1.0}, ValueError, "alpha"),
        (workload(34), {"alpha": "much"}, TypeError, "alpha"),
    ],
)
def test_prompts_that_can_not_be_calibrated_on_are_named(prompts, options, error, message):
    model = make_model("llama")
    cache = stored(model, SOURCE)
    before, calibration = checksum(cache), cache.calibration
    with pytest.raises(error, match=message):
        cache.calibrate(model, prompts, **options)
    assert cache.calibration is calibration and checksum(cache) == before


def test_a_wrong_alpha_is_told_before_any_prompt_runs():
    model = make_model("llama", spy=True)
    cache = stored(model, SOURCE)
    model.spy.clear()
    with pytest.raises(ValueError, match="alpha"):
        cache.calibrate(model, workload(34), alpha=2.0)
    assert model.spy.rows() == 0
    with pytest.raises(TypeError, match="PreTrainedModel"):
        cache.calibrate("model", workload(34))
