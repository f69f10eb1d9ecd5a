"""Every repair policy under the same oracles: work, counts, row states, no look at later tokens, and ratio 1."""

import functools

import numpy as np
import pytest
import torch

from hf_suffix_cache import narrowing
from hf_suffix_cache.filtering import CHECKED_LAYER
from hf_suffix_cache.passes import Passes
from hf_suffix_cache.prompt import PlannedRow
from hf_suffix_cache.repair import (
    Deviation,
    FirstRows,
    FullRepair,
    NoRepair,
    OutsideMass,
    QuestionAttention,
    best,
)
from reference import (
    ask,
    check_pool,
    check_report,
    first_layer_is_fresh,
    kinds_of,
    moved_pieces,
    same_as_vanilla,
    served,
    served_rows,
    stored,
)
from tiny_models import A, B, C, D, fingerprint, head, make_model, new_text, question


class WrongAndRead:
    """A policy of a user's own: rows that are both read and wrong, at most half of the budget in one run."""

    needs_attention = True
    needs_deviation = True

    def select(self, request):
        rows = request.candidates
        score = request.attention[rows] * np.nan_to_num(request.deviation[rows], nan=1.0)
        chosen = []
        for start in np.unique(request.run_start[rows]):
            inside = np.flatnonzero(request.run_start[rows] == start)
            share = request.spare if request.spare >= len(rows) else -(-request.spare // 2)
            chosen.extend(inside[np.argsort(-score[inside])[:share]])
        order = sorted(chosen, key=lambda row: -score[row])[: request.spare]
        return np.sort(rows[order])


POLICIES = {
    "none": NoRepair(),
    "first": FirstRows(),
    "first_7": FirstRows(7),
    "attention": QuestionAttention(None),
    "attention_distance": QuestionAttention(),
    "attention_outside_mass": QuestionAttention("outside_mass"),
    "attention_deviation": QuestionAttention("deviation"),
    "deviation_keys": Deviation(0.3, gradual=False),
    "deviation_values": Deviation(0.3, of="values", gradual=False),
    "gradual_keys": Deviation(0.6),
    "gradual_values": Deviation(0.6, of="values"),
    "outside_mass": OutsideMass(),
    "full": FullRepair(),
    "own": WrongAndRead(),
}
FILTERS = [name for name, policy in POLICIES.items() if isinstance(policy, Deviation)]
AT_RATIO_1 = {
    **{name: policy for name, policy in POLICIES.items() if name not in ("none", "first_7", *FILTERS)},
    "first_1000": FirstRows(1000),
    "deviation_keys": Deviation(1.0, gradual=False),
    "gradual_values": Deviation(1.0, of="values"),
}
DEEP = 6  # layers: with 3 there is one place only where rows can leave
SOURCE = head(0) + A + B + C + question(0)
MOVED = head(1, 20) + C + A + new_text(5, 3) + B + question(1)


def make_deep(kind: str = "llama", attention: str = "sdpa"):
    """A model deep enough for a gradual filter, with a `spy` on all of its layers."""
    model = make_model(kind, attention=attention, num_hidden_layers=DEEP)
    model.spy = LayersSpy(model)
    model.baseline = fingerprint(model)
    return model


class LayersSpy:
    """Counts the rows that each decoder layer really runs."""

    def __init__(self, model):
        self.clear()
        for number, layer in enumerate(narrowing.decoder_layers(model, DEEP)):
            layer.register_forward_hook(functools.partial(self._count, number), with_kwargs=True)

    def _count(self, number, layer, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        self.rows[number] += hidden.shape[0] * hidden.shape[1]

    def clear(self):
        self.rows = [0] * DEEP


# -- work and counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind, drift", [("llama", True), ("llama", False), ("mistral", True)])
def test_reported_rows_are_the_rows_that_the_layers_ran(kind, name, drift):
    model = make_deep(kind)
    cache = stored(model, SOURCE, repair=POLICIES[name], repair_fraction=0.2, drift=drift)
    model.spy.clear()
    answer, rows = served_rows(model, MOVED, cache, steps=1)
    report = answer.report
    check_report(report)
    assert report.reason is None and report.capability_rows == 0
    assert [piece[:2] for piece in moved_pieces(report)] == [(20, 72), (72, 112), (117, 150)]
    assert report.computed_rows == model.spy.rows[0]
    assert report.equivalent_rows == pytest.approx(sum(model.spy.rows) / DEEP)
    filtered = name in FILTERS or getattr(POLICIES[name], "needs_deviation", False)
    assert (report.equivalent_rows < report.computed_rows) == filtered
    first_layer_is_fresh(model, rows, MOVED)


@pytest.mark.parametrize("name", POLICIES)
def test_repaired_rows_are_as_many_as_asked_for(name):
    model = make_deep()
    cache = stored(model, SOURCE, repair=POLICIES[name], repair_fraction=0.2)
    report = ask(model, MOVED, cache, steps=1).report
    moved = len(A + B + C)
    share = {**dict.fromkeys(FILTERS, 0.3), "gradual_keys": 0.78, "gradual_values": 0.78, "full": 1.0}.get(name, 0.2)
    want = {"none": 3 * 4, "first_7": 3 * 7}.get(name, int(np.ceil(share * moved - 1e-9)))
    assert served(report) == moved and report.repaired_tokens == want
    kinds = kinds_of(report)
    for start, _, _ in moved_pieces(report):
        assert kinds[start : start + 4] == ["repaired"] * 4  # seam rows, whatever the policy


def test_control_a_gradual_filter_runs_fewer_rows_from_layer_to_layer():
    model = make_deep()
    cache = stored(model, SOURCE, repair=Deviation(0.6))
    model.spy.clear()
    ask(model, MOVED, cache, steps=1)
    left = [rows - 1 for rows in model.spy.rows]  # the last pass is one row
    new = len(MOVED) - len(A + B + C)
    shares = [1, 1, 0.78, 0.66, 0.54, 0.42]
    assert left == [new + int(np.ceil(share * 125 - 1e-9)) for share in shares]
    assert CHECKED_LAYER == 1


@pytest.mark.parametrize("name", POLICIES)
def test_batch_of_two_prompts_is_counted_too(name):
    model = make_deep()
    cache = stored(model, SOURCE, repair=POLICIES[name], repair_fraction=0.2)
    rows = [MOVED, head(2, 9) + C + A + new_text(5, 3) + B + question(2)]
    pads = [len(MOVED) - len(row) for row in rows]
    ids = torch.tensor([[0] * pad + row for pad, row in zip(pads, rows, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * len(row) for pad, row in zip(pads, rows, strict=True)])
    model.spy.clear()
    report = ask(model, ids, cache, steps=1, attention_mask=mask, pad_token_id=0).report
    check_report(report)
    assert served(report) == 2 * 125 and report.computed_rows == model.spy.rows[0]
    assert report.equivalent_rows == pytest.approx(sum(model.spy.rows) / DEEP)
    check_pool(cache)


# -- row states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_exact_request_after_a_repaired_one_is_exact(kind, name):
    model = make_deep(kind)
    cache = stored(model, SOURCE, repair=POLICIES[name], seam_tokens=0, repair_fraction=0.4)
    handle = cache.using(fidelity="exact")
    for number in range(2):
        ids = head(1 + number, 20) + C + A + new_text(5, 3 + number) + B + question(4 + number)
        answer = ask(model, ids, cache, steps=3)
        assert served(answer.report) == 125
        report = same_as_vanilla(model, answer.tokens() + question(2), handle, steps=2).report
        assert report.exact_tokens >= 20
    assert same_as_vanilla(model, SOURCE + question(3), handle, steps=2).report.exact_tokens == len(SOURCE)
    check_pool(cache)


def test_rows_that_left_a_filter_half_way_are_not_exact(monkeypatch):
    """All rows go beyond the first filter, so none stays a moved row; those that leave later are approximate."""
    model = make_deep()
    policy, ids = Deviation(0.77), head(1, 20) + C + question(1)

    def exact_request_afterwards():
        cache = stored(model, SOURCE, repair=policy, seam_tokens=0)
        assert kinds_of(ask(model, ids, cache, steps=1).report)[20:72] == ["repaired"] * 52
        return same_as_vanilla(model, ids + question(2), cache.using(fidelity="exact"), steps=2).report

    assert 20 <= exact_request_afterwards().exact_tokens < 72
    monkeypatch.setattr(PlannedRow, "exact", property(lambda row: len(row.ids)))
    with pytest.raises(AssertionError, match="difference"):
        exact_request_afterwards()


# -- no look at later tokens ----------------------------------------------------------------------------------------


class Recorded:
    """A policy whose choices of the first request are those of the second, so that the same rows run in both."""

    def __init__(self, policy):
        self.policy, self.choices, self.next = policy, [], None

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def again(self):
        self.next = iter(self.choices)

    def _choose(self, choose):
        if self.next is not None:
            return next(self.next)
        self.choices.append(choose())
        return self.choices[-1]

    def select(self, request):
        return self._choose(lambda: self.policy.select(request))

    def rows_after(self, *args):
        return self._choose(lambda: self.policy.rows_after(*args))


ALTERED = 23  # token of C, which lies at 65 in the prompt


def rows_with_one_token_altered(model, policy, drift: bool):
    """`(kinds, rows)` of two requests that run the same rows; the stored text differs in one token, at position 88."""
    policy, found = Recorded(policy), []
    for token in (C[ALTERED], C[ALTERED] + 1):
        text = C[:ALTERED] + [token] + C[ALTERED + 1 :]
        cache = stored(model, head(0) + A + text + B + question(0), repair=policy, repair_fraction=0.3, drift=drift)
        if found:
            policy.again()
        else:
            policy.choices.clear()  # what storing asked for
        ids = head(1, 20) + A + new_text(5, 3) + text + new_text(3, 4) + B + question(1)
        answer, rows = served_rows(model, ids, cache, steps=1)
        assert answer.report.reason is None
        found.append((kinds_of(answer.report), rows))
    assert found[0][0] == found[1][0]
    return found


def equal_before(found, border: int) -> bool:
    """Whether all rows before `border` have the same bits in all layers."""
    (_, first), (_, second) = found
    pairs = [pair for layers in zip(first, second, strict=True) for pair in zip(*layers, strict=True)]
    return all(torch.equal(left[:, :border], right[:, :border]) for left, right in pairs)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    "kind, attention, drift",
    [("llama", "sdpa", True), ("llama", "sdpa", False), ("llama", "eager", True), ("mistral", "sdpa", True)],
)
def test_no_row_sees_a_later_token(kind, attention, name, drift):
    model, border = make_deep(kind, attention), 65 + ALTERED
    found = rows_with_one_token_altered(model, POLICIES[name], drift)
    kinds = found[0][0]
    assert "repaired" in kinds[20:border] and ("shifted" in kinds[20:border] or name == "full")
    assert equal_before(found, border)
    assert not equal_before(found, border + 12)  # control: the altered token is looked at


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FILTERS)
def test_control_a_narrowed_mask_that_shows_later_rows_is_noticed(name, attention, monkeypatch):
    cut = narrowing._cut

    def show_everything(value, index, full):
        value = cut(value, index, full)
        if not isinstance(value, torch.Tensor) or value.dim() != 4:
            return value
        return torch.ones_like(value) if value.dtype == torch.bool else torch.zeros_like(value)

    model = make_deep("llama", attention)
    monkeypatch.setattr(narrowing, "_cut", show_everything)
    assert not equal_before(rows_with_one_token_altered(model, POLICIES[name], True), 65 + ALTERED)


# -- ratio 1 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AT_RATIO_1)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mistral", "gpt_neox", "deepseek_v3"])
def test_at_ratio_1_the_answer_is_that_of_a_full_prefill(kind, name, monkeypatch):
    model = make_model(kind)
    monkeypatch.setattr(Passes, "_probe_pays", lambda *args: True)  # it does not where everything is repaired
    cache = stored(model, SOURCE, repair=AT_RATIO_1[name], repair_fraction=1.0, seam_tokens=0)
    ids = MOVED[:-20]  # a short question looks at moved rows also through mistral's windows
    report = same_as_vanilla(model, ids, cache, steps=3).report
    assert report.reason is None
    assert report.repaired_tokens == 125 and report.shifted_tokens == 0
    # and the rows are exact ones
    after = same_as_vanilla(model, ids + D, cache.using(fidelity="exact"), steps=2).report
    assert after.exact_tokens == len(ids)


@pytest.mark.parametrize("policy", [NoRepair(), Deviation(0.0), FirstRows(0)], ids=["none", "deviation", "first"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_neox", "deepseek_v3"])
def test_control_at_ratio_0_it_is_not(kind, policy):
    model = make_model(kind)
    cache = stored(model, SOURCE, repair=policy, repair_fraction=0.0, seam_tokens=0)
    with pytest.raises(AssertionError, match="difference"):
        same_as_vanilla(model, MOVED[:-20], cache, steps=3)


# -- where a policy can't be had ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILTERS, "attention_deviation", "own"])
def test_filters_in_chunks_give_way_to_the_first_rows_and_say_so(name):
    model = make_deep()
    cache = stored(model, SOURCE, repair=POLICIES[name], repair_fraction=0.2)
    report = ask(model, MOVED, cache, steps=1, prefill_chunk_size=40).report
    assert "prefill_chunk_size" in report.reason and report.repaired_tokens == 25
    model = make_model("llama", num_hidden_layers=2)
    cache = stored(model, SOURCE, repair=POLICIES[name], repair_fraction=0.2)
    report = ask(model, MOVED, cache, steps=1).report
    assert "decoder layers" in report.reason and report.repaired_tokens == 25


def test_best_takes_the_left_one_of_equals():
    class Request:
        candidates, spare = np.array([3, 5, 9]), 2

    assert best(Request, np.array([1.0, 1.0, 1.0])).tolist() == [3, 5]
