"""Drift correction: its weights, what it does to rows, and that a stored conversation gathers the same rows again."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.bound import LEVEL_NAMES
from hf_suffix_cache.bound.rule import Rule
from hf_suffix_cache.drift import COMMON, NEIGHBOURS, SIZE_POWER, DriftCorrection, blocks, correlation, weights_of
from hf_suffix_cache.repair import FirstRows, NoRepair
from hf_suffix_cache.rope import RotarySpec, rotate_keys
from hf_suffix_cache.store.corrections import Correction, Drift
from reference import (
    ask,
    check_pool,
    check_report,
    first_layer_is_fresh,
    forgets_everything,
    kinds_of,
    max_difference,
    moved_pieces,
    same_as_vanilla,
    served,
    served_rows,
    stored,
    view_of,
    view_rows,
)
from tiny_models import A, B, C, D, head, make_model, new_text, old_text, question

SOURCE = D + head(0) + A + B + C + question(0)
MOVED = D + head(1, 20) + C + A + new_text(5, 3) + B + question(1)


class EveryNinth:
    """Repairs rows all over a run, so that moved rows have repaired ones to their left and right."""

    def select(self, request):
        return request.candidates[4::9]


# -- weights --------------------------------------------------------------------------------------------------------


def slow_weights(anchors, target, common) -> np.ndarray:
    """Simple kriging by hand: the nearest anchors to the left, one system of equations."""
    left = [number for number, row in enumerate(anchors) if row < target][-NEIGHBOURS:]
    weights = np.zeros(len(anchors))
    if left:
        near = [anchors[number] for number in left]
        between = [[correlation(np.float64(a - b), common) for b in near] for a in near]
        towards = [correlation(np.float64(target - a), common) for a in near]
        weights[left] = np.linalg.lstsq(np.array(between), np.array(towards), rcond=None)[0]
    return weights


@pytest.mark.parametrize("count", [1, 2, NEIGHBOURS, NEIGHBOURS + 1, 40])
@pytest.mark.parametrize("slot", COMMON)
def test_weights_are_those_of_a_brute_force_solution(slot, count):
    random = np.random.default_rng(count)
    rows = random.permutation(120)
    anchors, targets = np.sort(rows[:count]) + 7, np.sort(rows[count : count + 60]) + 7
    got = weights_of(anchors, targets, COMMON[slot])
    want = np.stack([slow_weights(anchors, target, COMMON[slot]) for target in targets])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
    assert (got[targets[:, None] < anchors[None]] == 0).all()  # nothing is learned of rows to the right
    assert ((got != 0).sum(axis=1) <= NEIGHBOURS).all()


def test_weights_of_many_anchors_shrink_little_and_of_few_a_lot():
    for slot, common in COMMON.items():
        far = weights_of(np.array([10, 30, 50, 70]), np.array([20, 40, 60, 400]), common).sum(axis=1)
        assert (np.diff(far[:3]) > 0).all() and 0 < far[0] and (far < 1).all(), slot
        # one anchor: its correlation alone
        one = weights_of(np.array([10]), np.array([11, 60]), common)
        assert one[:, 0] == pytest.approx([correlation(np.array(1), common), correlation(np.array(50), common)])


def drift_of(anchors, targets, starts) -> Drift:
    """A drift of rows of runs that begin at `starts`."""
    tokens = int(max(*anchors, *targets)) + 1
    run_start = np.zeros(tokens, dtype=np.int64)
    for start in starts:
        run_start[start:] = start
    return Drift(np.array(anchors), np.array(targets), run_start)


def test_runs_tell_nothing_of_one_another():
    drift = drift_of([10, 14, 40, 44], [11, 20, 30, 41, 60, 75], [10, 40, 70])
    found = blocks(drift, "keys")
    assert [(part, anchors) for part, anchors, _ in found] == [
        (slice(0, 3), slice(0, 2)),
        (slice(3, 5), slice(2, 4)),
    ]  # the run at 70 has no anchor
    sizes = [[((1 + t - 40) / (1 + a - 40)) ** SIZE_POWER for a in (40, 44)] for t in (41, 60)]
    want = [slow_weights([40, 44], target, COMMON["keys"]) for target in (41, 60)]
    np.testing.assert_allclose(found[1][2], np.array(want) * sizes)


# -- a field that is known ------------------------------------------------------------------------------------------

SPEC = RotarySpec("frequencies", "half", 1, 0, 16)
FREQUENCIES = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)


class Layer:
    """Memory of one layer, `[batch, kv_heads, columns, head_dim]` per slot."""

    index = 1

    def __init__(self, keys, values):
        self.memory = {"keys": keys, "values": values}

    def buffer(self, slot):
        return self.memory[slot]


def corrected_field(rotary, anchors, targets, pad=3, alter=None):
    """
    Errors of the targets before and after correction, `{slot: [targets]}`, and the rows after it: each run's rows
    differ from the fresh ones by one vector, whose size falls as `SIZE_POWER` says. `alter` changes a fresh row.
    """
    random = torch.Generator().manual_seed(0)
    drift = drift_of(anchors, targets, [10, 60])
    columns = len(drift.run_start) + pad
    stale = {slot: torch.randn(2, 2, columns, 16, generator=random) for slot in COMMON}
    positions = torch.arange(columns) - pad
    start = torch.from_numpy(np.concatenate([np.zeros(pad, dtype=np.int64), drift.run_start]))
    size = (1.0 + positions - start).clamp_min(1.0) ** SIZE_POWER
    fresh = {}
    for slot, rows in stale.items():
        offsets = {run: torch.randn(2, 2, 1, 16, generator=random) for run in (0, 10, 60)}
        offset = torch.cat([offsets[run] for run in start.tolist()], dim=2) * size[:, None]
        fresh[slot] = rows + (rotate_keys(offset, positions, FREQUENCIES, SPEC) if slot == "keys" else offset)
    layer = Layer(*(rows.clone() for rows in stale.values()))
    shape = SimpleNamespace(rotary=SPEC if rotary else None, value_rotary=None)
    shelf = SimpleNamespace(pool=SimpleNamespace(shapes=[shape]))
    view = SimpleNamespace(own_layers=[layer], shelf=shelf)
    correction = DriftCorrection(view, drift, pad, [0, 1], {SPEC: FREQUENCIES})
    computed = np.sort(np.concatenate([drift.anchors, [columns - pad - 1]])) + pad
    states = [fresh[slot][:, :, computed].clone() for slot in COMMON]
    if alter is not None:
        for rows in states:
            rows[:, :, computed == alter + pad] += 1.0
    correction.see(layer, computed, *states)
    where = drift.targets + pad
    errors = {}
    for slot in COMMON:
        before, after = (
            (rows[:, :, where] - fresh[slot][:, :, where]).square().sum(dim=(0, 1, 3)).sqrt().numpy()
            for rows in (stale[slot], layer.memory[slot])
        )
        errors[slot] = before, after
    others = np.setdiff1d(np.arange(columns), where)
    assert all(torch.equal(layer.memory[slot][:, :, others], stale[slot][:, :, others]) for slot in COMMON)
    return errors, {slot: layer.memory[slot][:, :, where] for slot in COMMON}


ANCHORS = [10, 11, 12, 13, 20, 27, 40, 60, 61, 80]
TARGETS = [row for row in range(14, 100) if row not in ANCHORS and not 50 <= row < 60]


def test_an_offset_of_a_whole_run_is_removed_to_within_the_shrinkage():
    errors, _ = corrected_field(True, ANCHORS, TARGETS)
    for slot, (before, after) in errors.items():
        want = []
        for target in TARGETS:
            inside = [anchor for anchor in ANCHORS if (anchor < 60) == (target < 60)]
            want.append(1.0 - slow_weights(inside, target, COMMON[slot]).sum())
        np.testing.assert_allclose(after / before, want, atol=1e-5)
        assert (after < before).all() and after.mean() < (0.4 if slot == "keys" else 0.7) * before.mean()


def test_control_without_rotation_an_offset_of_the_keys_is_not_removed():
    turned, plain = (corrected_field(rotary, ANCHORS, TARGETS)[0] for rotary in (True, False))
    assert plain["keys"][1].mean() > 2 * turned["keys"][1].mean()
    np.testing.assert_array_equal(plain["values"][1], turned["values"][1])


def test_a_repaired_row_changes_nothing_to_its_left_or_in_another_run():
    _, rows = corrected_field(True, ANCHORS, TARGETS)
    targets = np.array(TARGETS)
    for altered in (20, 60):
        _, others = corrected_field(True, ANCHORS, TARGETS, alter=altered)
        reached = (targets > altered) & ((targets < 60) == (altered < 60))
        for slot in COMMON:
            assert torch.equal(rows[slot][:, :, ~reached], others[slot][:, :, ~reached])
            changed = (rows[slot] != others[slot]).flatten(0, 1).any(dim=2).any(dim=0).numpy()
            assert (changed == reached).all()  # control


# -- in a request ---------------------------------------------------------------------------------------------------

KINDS = ("llama", "gemma3_text", "mistral", "gpt_neox", "gptj", "cohere", "deepseek_v3", "phi3", "llama_longrope")


def expected_rows(model, cache, plain, rows, kinds, pieces, layer: int):
    """
    By hand what correction makes of one layer's moved rows, `{slot: [kv_heads, tokens, dim]}` in fp64, from the rows
    as they were moved (`plain`), and those of the request, of which the repaired ones are taken.
    """
    shape, found = cache.capability(model).shapes[layer], {}
    for slot, spec in enumerate((shape.rotary, shape.value_rotary)):
        stale, fresh = plain[layer][slot].double(), rows[layer][slot].double()
        want, common = stale.clone(), COMMON["keys" if slot == 0 else "values"]

        def turned(row, position, spec=spec):
            if spec is None:
                return row
            return rotate_keys(row[:, None], position, spec.frequencies(model), spec)[:, 0]

        for start, stop, _ in pieces:
            anchors = [row for row in range(start, stop) if kinds[row] == "repaired"]
            difference = {row: turned(fresh[:, row] - stale[:, row], -row) for row in anchors}
            for target in range(start, stop):
                if kinds[target] == "repaired":
                    continue
                weights = slow_weights(anchors, target, common)
                for anchor, weight in zip(anchors, weights, strict=True):
                    size = ((1 + target - start) / (1 + anchor - start)) ** SIZE_POWER
                    want[:, target] += turned(weight * size * difference[anchor], target)
        found[slot] = want
    return found


@pytest.mark.parametrize("policy", [EveryNinth(), FirstRows(9)], ids=["scattered", "first"])
@pytest.mark.parametrize("kind", KINDS)
def test_moved_rows_are_corrected_as_by_hand(kind, policy):
    model = make_model(kind)
    cache = stored(model, head(0, 36) + A + B + C + question(0), fidelity="exact")
    ids = head(1, 44) + C + A + new_text(5, 3) + B + question(1)
    options = {"fidelity": "balanced", "store": False}
    nothing = cache.using(repair=NoRepair(), seam_tokens=0, **options)
    _, plain = served_rows(model, ids, nothing, steps=1)
    answer, rows = served_rows(model, ids, cache.using(repair=policy, **options), steps=1)
    kinds, pieces = kinds_of(answer.report), moved_pieces(answer.report)
    assert len(pieces) == 3 and served(answer.report) == 125
    moved = [row for row, name in enumerate(kinds) if name == "shifted"]
    first_layer_is_fresh(model, rows, ids)
    for layer in range(1, 3):
        want = expected_rows(model, cache, plain, rows, kinds, pieces, layer)
        for slot in (0, 1):
            if rows[layer][slot].numel() == 0:
                continue
            got, stale = (each[layer][slot][:, moved].double() for each in (rows, plain))
            scale = want[slot].abs().max()
            assert (got - want[slot][:, moved]).abs().max() < 2e-5 * scale
            assert (got - stale).abs().max() > 1e-3 * scale  # control: they are corrected at all
    # without it they are what was moved, bit for bit
    answer, rows = served_rows(model, ids, cache.using(repair=policy, drift=False, **options), steps=1)
    assert [row for row, name in enumerate(kinds_of(answer.report)) if name == "shifted"] == moved
    for layer in range(3):
        for got, stale in zip(rows[layer], plain[layer], strict=True):
            assert torch.equal(got[:, moved], stale[:, moved])


@pytest.mark.parametrize("policy", [None, EveryNinth()], ids=["default", "scattered"])
@pytest.mark.parametrize("chunk", [7, 32, 64])
def test_chunks_give_what_one_forward_gives(chunk, policy):
    model = make_model("llama")
    handle = stored(model, SOURCE).using(store=False, repair=policy)
    want, rows = served_rows(model, MOVED, handle, steps=2)
    got, others = served_rows(model, MOVED, handle, steps=2, prefill_chunk_size=chunk)
    assert kinds_of(got.report) == kinds_of(want.report) or policy is None
    if kinds_of(got.report) == kinds_of(want.report):
        assert max_difference(got.scores, want.scores) < 1e-4
        for pair in zip(rows, others, strict=True):
            for left, right in zip(*pair, strict=True):
                assert torch.allclose(left, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3"])
def test_padded_batch_equals_its_prompts_alone(kind):
    model = make_model(kind)
    handle = stored(model, SOURCE).using(store=False, repair=EveryNinth())
    rest = C + A + new_text(5, 3) + B
    rows = [head(2, 30) + rest + question(2), head(3, 19) + rest + question(3)]
    ids = torch.tensor([rows[0], [0] * 11 + rows[1]])
    mask = torch.tensor([[1] * len(rows[0]), [0] * 11 + [1] * len(rows[1])])
    batch = ask(model, ids, handle, steps=2, attention_mask=mask, pad_token_id=0, return_dict_in_generate=True)
    check_report(batch.report)
    assert served(batch.report) == 250
    for number, prompt in enumerate(rows):
        alone, want = served_rows(model, prompt, handle, steps=2)
        assert kinds_of(batch.report, number) == kinds_of(alone.report)
        assert max_difference([scores[number : number + 1] for scores in batch.scores], alone.scores) < 1e-4
        got = view_rows(view_of(batch.output), number)
        pad = 11 * number
        for pair in zip(got, want, strict=True):
            for left, right in zip(*pair, strict=True):
                assert torch.allclose(left[:, pad:], right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_half_precision_rows_stay_finite_and_are_gathered_again(kind, dtype):
    model = make_model(kind)
    model.to(dtype)
    found = []
    for keep in (4, 0):
        cache = stored(model, SOURCE, repair=EveryNinth(), keep_conversations=keep)
        answer = ask(model, MOVED, cache, steps=2)
        assert served(answer.report) == 125 and torch.isfinite(answer.first).all()
        found.append(served_rows(model, answer.tokens() + question(2), cache, steps=1))
        assert found[-1][0].report.carried_tokens > 60
    same_bits(found[0][1], found[1][1], len(MOVED))
    assert all(torch.isfinite(part).all() for layer in found[0][1] for part in layer)


@pytest.mark.parametrize("kind", ["llama", "gptj", "deepseek_v3"])
def test_rows_are_the_same_whether_the_kernel_or_its_reference_serves(kernels, monkeypatch, kind):
    found = []
    for first, then in (("", ""), ("", "off"), ("off", ""), ("off", "off")):
        model = make_model(kind)
        set_kernels(monkeypatch, first)
        cache = stored(model, SOURCE, repair=EveryNinth(), keep_conversations=0)
        answer = ask(model, MOVED, cache, steps=2)
        assert served(answer.report) == 125
        set_kernels(monkeypatch, then)
        found.append(served_rows(model, answer.tokens() + question(2), cache, steps=1))
        assert found[-1][0].report.carried_tokens > 60
    for _, rows in found[1:]:
        same_bits(found[0][1], rows, len(MOVED))


def set_kernels(monkeypatch, value: str) -> None:
    """Kernels as they are built, or `"off"`."""
    if value:
        monkeypatch.setenv("HF_SUFFIX_CACHE_KERNELS", value)
    else:
        monkeypatch.delenv("HF_SUFFIX_CACHE_KERNELS", raising=False)


# -- conversations --------------------------------------------------------------------------------------------------


def same_bits(left, right, length: int) -> None:
    """Whether the first rows are equal to the bit, in all layers."""
    for pair in zip(left, right, strict=True):
        for ours, theirs in zip(*pair, strict=True):
            assert torch.equal(ours[:, :length], theirs[:, :length])


def at_level(monkeypatch, level):
    """The rule accepts at a level."""
    monkeypatch.setattr(Rule, "always_full", property(lambda rule: rule.bound is None))
    monkeypatch.setattr(
        Rule,
        "next_level",
        lambda rule, current, found, previous=None: (
            None if current == level else LEVEL_NAMES[LEVEL_NAMES.index(current) + 1]
        ),
    )


def conversation(model, way: str, turns: int, **settings):
    """Rows of the last turn of a conversation that went approximate in its first; they came back by `way`."""
    options = {"keep_conversations": 0} if way == "gathered" else {}
    cache = stored(model, SOURCE, **options)
    handle, ids, lengths = cache.using(**settings), MOVED, []
    for turn in range(turns):
        last = turn == turns - 1
        handed_out = {"return_dict_in_generate": True} if last or way == "handed_out" else {}
        if turn and way == "aside":  # what is not stored goes on in no stored conversation's memory
            handle = cache.using(store=False)
        answer = ask(model, ids, handle if turn == 0 or way == "aside" and last else cache, steps=3, **handed_out)
        check_report(answer.report)
        assert turn == 0 or answer.report.carried_tokens > 60
        lengths.append(len(ids))
        if way == "compacted":
            cache.compact()
        if way == "pushed_out":
            for number in range(5):
                ask(model, old_text(40, 900 + 10 * turn + number), cache, steps=1)
        moved = A[:30] if turn else []
        ids = answer.tokens() + moved + question(30 + turn)
    rows = view_rows(view_of(answer.output))
    check_pool(cache, handed_out=True)
    return rows, lengths


WAYS = ("gathered", "handed_out", "aside", "compacted", "pushed_out")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind, turns", [("llama", 2), ("llama", 3), ("gemma3_text", 2), ("deepseek_v3", 3)])
def test_rows_come_back_bit_for_bit(kind, turns, way):
    model = make_model(kind)
    for settings in ({}, {"repair": EveryNinth()}):
        want, lengths = conversation(model, "in place", turns, **settings)
        got, _ = conversation(model, way, turns, **settings)
        same_bits(got, want, lengths[-1])


@pytest.mark.parametrize("order", ["left", "attention"])
@pytest.mark.parametrize("way", ["gathered", "aside", "pushed_out"])
def test_rows_that_were_healed_in_part_come_back_bit_for_bit(way, order):
    """Fewer rows are corrected then than there were when the correction was made."""
    model = make_model("llama")
    settings = {"repair": EveryNinth(), "heal_rows": 3, "heal_order": order}
    want, lengths = conversation(model, "in place", 2, **settings)
    got, _ = conversation(model, way, 2, **settings)
    same_bits(got, want, lengths[-1])


@pytest.mark.parametrize("level", LEVEL_NAMES[:-1])
@pytest.mark.parametrize("way", WAYS)
def test_rows_of_a_bound_come_back_bit_for_bit(way, level, monkeypatch):
    model = make_model("llama")
    at_level(monkeypatch, level)
    want, lengths = conversation(model, "in place", 2, max_kl=0.1)
    got, _ = conversation(model, way, 2, max_kl=0.1)
    same_bits(got, want, lengths[-1])


def test_control_rows_without_their_correction_are_others(monkeypatch):
    model = make_model("llama")
    want, lengths = conversation(model, "in place", 2)
    monkeypatch.setattr("hf_suffix_cache.loading.replay", lambda *args: None)
    got, _ = conversation(model, "gathered", 2)
    with pytest.raises(AssertionError):
        same_bits(got, want, lengths[-1])


@pytest.mark.parametrize("cut", range(20, 130, 13))
def test_a_prefix_may_end_in_the_middle_of_a_corrected_run(cut):
    """A longer tail leaves less of the prompt to be carried on."""
    model = make_model("llama")
    found = []
    for keep in (4, 0):
        cache = stored(model, SOURCE, repair=EveryNinth(), keep_conversations=keep)
        first, before = served_rows(model, MOVED, cache, steps=1)
        answer, rows = served_rows(model, MOVED, cache.using(tail_tokens=len(question(1)) + cut), steps=1)
        length = len(MOVED) - len(question(1)) - cut
        assert answer.report.carried_tokens + answer.report.exact_tokens == length
        assert "shifted" in kinds_of(first.report)[:length]
        same_bits(rows, before, length)
        found.append(rows)
        check_pool(cache, handed_out=True)
    same_bits(*found, len(MOVED))


def test_rows_of_a_batch_come_back_bit_for_bit():
    """One prompt's moved rows lie where the other one's head is new, so some are run before they are corrected."""
    model = make_model("llama")
    rows = [
        head(3, 40) + C + new_text(15, 3) + A + B + question(11),
        head(4, 20) + C + A + new_text(15, 4) + B + question(12),
    ]
    pads = [0, len(rows[0]) - len(rows[1])]
    ids = torch.tensor([[0] * pad + row for pad, row in zip(pads, rows, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * len(row) for pad, row in zip(pads, rows, strict=True)])
    for policy in (None, EveryNinth()):
        cache = stored(model, SOURCE, repair=policy)
        batch = ask(model, ids, cache, steps=3, attention_mask=mask, pad_token_id=0, return_dict_in_generate=True)
        for number, pad in enumerate(pads):
            before = view_rows(view_of(batch.output), number)
            turn = batch.tokens(number)[pad:]
            answer, after = served_rows(model, turn + question(2), cache.using(store=False), steps=1)
            assert answer.report.carried_tokens > 60
            same_bits([[part[:, pad:] for part in layer] for layer in before], after, len(turn) - 1)


def test_chunked_rows_come_back_to_within_rounding():
    model = make_model("llama")
    cache = stored(model, SOURCE, repair=EveryNinth())
    answer, before = served_rows(model, MOVED, cache, steps=2, prefill_chunk_size=23)
    turn, after = served_rows(model, answer.tokens() + question(2), cache, steps=1)
    assert turn.report.carried_tokens > 60
    for pair in zip(before, after, strict=True):
        for left, right in zip(*pair, strict=True):
            assert torch.allclose(left[:, : len(MOVED)], right[:, : len(MOVED)], rtol=0, atol=1e-5)


def test_after_clear_nothing_is_left_of_it():
    model = make_model("llama")
    cache = stored(model, SOURCE, repair=EveryNinth())
    turn = ask(model, MOVED, cache).tokens()
    check_pool(cache)
    cache.clear()
    assert same_as_vanilla(model, turn + question(2), cache).report.new_tokens == len(turn) + 36
    forgets_everything(cache)
    assert isinstance(cache, SuffixCache)


def test_head_of_a_correction_keeps_what_stands_before_the_cut():
    drift = drift_of([10, 20, 30], [11, 25, 33], [10, 28])
    which, offset, shift = np.array([0, 1, 0]), np.array([5, 6, 7]), np.array([-3, -3, 4])
    correction = Correction(drift, which, offset, shift, np.ones(3, dtype=bool))
    cut = correction.head(26)
    assert cut.anchors.tolist() == [10, 20] and cut.targets.tolist() == [11, 25]
    assert cut.which.tolist() == [0, 1] and cut.offset.tolist() == [5, 6] and cut.shift.tolist() == [-3, -3]
    rows = np.zeros(34, dtype=bool)
    rows[[25, 33]] = True
    assert correction.only(rows).targets.tolist() == [25, 33]
    assert cut.only(rows).targets.tolist() == [25] and cut.head(12).anchors.tolist() == [10]
    assert cut.only(rows[:26]).head(25).targets.tolist() == []
