"""Rows that leave a forward layer by layer: against layers run by hand, and what is seen of rows before they go."""

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from hf_suffix_cache.masks import causal_by_position
from hf_suffix_cache.narrowing import RowWatch, _cut, decoder_layers
from hf_suffix_cache.repair import Deviation, NoRepair
from reference import (
    ask,
    check_report,
    kinds_of,
    max_difference,
    same_as_vanilla,
    served_rows,
    stored,
    view_of,
    view_rows,
)
from tiny_models import A, B, C, D, fingerprint, head, make_model, new_text, question

LAYERS = 5
SOURCE = D + head(0) + A + B + C + question(0)
REST = C + A + new_text(5, 3) + B
MOVED = D + head(1, 20) + REST + question(1)


class Narrow:
    """A filter of which each test says how many of the rows go on behind each layer; it remembers which."""

    filters_layers = True
    of = "both"

    def __init__(self, counts: dict[int, int]):
        self.counts, self.seen, self.kept = counts, [], []

    def select(self, request):
        return np.empty(0, dtype=np.int64)

    def filters(self, layer, num_layers):
        assert num_layers == LAYERS
        return layer in self.counts

    def rows_after(self, layer, num_layers, deviation, num_shifted, num_seams):
        random = np.random.default_rng(layer)
        rows = np.sort(random.permutation(len(deviation))[: self.counts[layer]])
        self.seen.append((layer, deviation))
        self.kept.append(rows)
        return rows


def active_rows(policy, always, others) -> list[np.ndarray]:
    """Positions that run in each layer."""
    active, alive = [], others
    steps = iter(policy.kept)
    for layer in range(LAYERS):
        active.append(np.sort(np.concatenate([always, alive])))
        if layer in policy.counts:
            alive = alive[next(steps)]
    return active


def run_by_hand(model, ids, stale, active) -> tuple[list, torch.Tensor]:
    """
    Run `active[layer]` positions of a llama through each layer, over the rows `stale` of all others: per layer keys
    and values `[kv_heads, tokens, head_dim]`, and the logits of the last token.
    """
    positions = torch.arange(len(ids))[None]
    rows = [(keys.clone(), values.clone()) for keys, values in stale]
    with torch.no_grad():
        hidden = model.model.embed_tokens(torch.tensor([ids]))
        cos, sin = model.model.rotary_emb(hidden, positions)
        for layer, (keys, values), where in zip(model.model.layers, rows, map(torch.from_numpy, active), strict=True):
            attention, states = layer.self_attn, layer.input_layernorm(hidden[:, where])
            query, key, value = (
                project(states).view(1, len(where), -1, attention.head_dim).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query, key = apply_rotary_pos_emb(query, key, cos[:, where], sin[:, where])
            keys[:, where], values[:, where] = key[0], value[0]
            mask = causal_by_position(where, positions[0], getattr(model.config, "sliding_window", None))
            groups = query.shape[1] // keys.shape[0]
            scores = query @ repeat_kv(keys[None], groups).transpose(2, 3) * attention.scaling
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            output = (weights @ repeat_kv(values[None], groups)).transpose(1, 2).reshape(1, len(where), -1)
            after = hidden[:, where] + attention.o_proj(output)
            hidden = hidden.clone()
            hidden[:, where] = after + layer.mlp(layer.post_attention_layernorm(after))
        return rows, model.lm_head(model.model.norm(hidden[:, -1]))


def compare(model, ids, plain, answer, rows, kinds, policy, number=0):
    """A filtered request's rows against those by hand; `kinds` are those of a request without repair."""
    new = np.array([place for place, kind in enumerate(kinds) if kind == "new"])
    moved = np.array([place for place, kind in enumerate(kinds) if kind == "shifted"])
    active = active_rows(policy, new, moved)
    want, _ = run_by_hand(model, ids, plain, active)
    left_first = np.setdiff1d(moved, active[min(policy.counts) + 1])
    for (keys, values), (old_keys, old_values) in zip(want, plain, strict=True):
        keys[:, left_first], values[:, left_first] = old_keys[:, left_first], old_values[:, left_first]
    # the last pass runs the last token once more, over the rows as they are now
    want, logits = run_by_hand(model, ids, want, [np.array([len(ids) - 1])] * LAYERS)
    for layer, (got, hand, stale) in enumerate(zip(rows, want, plain, strict=True)):
        for ours, theirs, old in zip(got, hand, stale, strict=True):
            ran = np.setdiff1d(active[layer], left_first)
            assert torch.allclose(ours[:, ran], theirs[:, ran], rtol=0, atol=1e-4)
            untouched = np.setdiff1d(np.arange(len(ids)), ran)  # put back, or never run: the same bits
            assert torch.equal(ours[:, untouched], old[:, untouched])
    assert max_difference([answer.scores[0][number : number + 1]], [logits]) < 1e-3
    repaired = [place for place, kind in enumerate(kinds_of(answer.report, number)) if kind == "repaired"]
    assert repaired == np.setdiff1d(moved, left_first).tolist()


@pytest.mark.parametrize("counts", [{1: 60}, {1: 90, 2: 40, 3: 7}, {2: 50}, {1: 0}, {1: 125, 3: 1}])
@pytest.mark.parametrize(
    "kind, attention", [("llama", "sdpa"), ("llama", "eager"), ("mistral", "sdpa"), ("mistral", "eager")]
)
def test_narrowed_forward_equals_each_layer_by_hand(kind, attention, counts):
    model = make_model(kind, attention=attention, num_hidden_layers=LAYERS)
    cache = stored(model, SOURCE, seam_tokens=0).using(store=False, repair=NoRepair(), seam_tokens=0)
    untouched, plain = served_rows(model, MOVED, cache, steps=1)
    policy = Narrow(counts)
    answer, rows = served_rows(model, MOVED, cache.using(repair=policy), steps=1)
    check_report(answer.report)
    kinds = kinds_of(untouched.report)
    assert kinds.count("exact") == 24 and kinds.count("shifted") == 125
    compare(model, MOVED, plain, answer, rows, kinds, policy)
    assert max_difference(answer.scores, untouched.scores) > 1e-3 or counts == {1: 0}  # control


def test_control_the_hand_run_of_all_rows_is_a_full_prefill():
    for kind in ("llama", "mistral"):
        model = make_model(kind, num_hidden_layers=LAYERS)
        cache = stored(model, SOURCE).using(store=False, repair=NoRepair(), seam_tokens=0)
        _, plain = served_rows(model, MOVED, cache, steps=1)
        everything = [np.arange(24, len(MOVED))] * LAYERS
        vanilla = ask(model, MOVED, steps=1).scores
        assert max_difference([run_by_hand(model, MOVED, plain, everything)[1]], vanilla) < 1e-3
        fewer = [*everything[:2], *[np.arange(100, len(MOVED))] * 3]
        assert max_difference([run_by_hand(model, MOVED, plain, fewer)[1]], vanilla) > 1e-3 or kind == "mistral"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_padded_batch_is_narrowed_as_its_prompts_alone(kind, attention):
    model = make_model(kind, attention=attention, num_hidden_layers=LAYERS)
    cache = stored(model, SOURCE).using(store=False, repair=NoRepair(), seam_tokens=0)
    prompts = [head(2, 30) + REST + question(2), head(3, 19) + REST + question(3)]
    pads = [0, 11]
    ids = torch.tensor([[0] * pad + row for pad, row in zip(pads, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * len(row) for pad, row in zip(pads, prompts, strict=True)])
    policy = Narrow({1: 90, 2: 40, 3: 7})
    options = {"attention_mask": mask, "pad_token_id": 0, "return_dict_in_generate": True}
    answer = ask(model, ids, cache.using(repair=policy), steps=1, **options)
    check_report(answer.report)
    for number, prompt in enumerate(prompts):
        untouched, plain = served_rows(model, prompt, cache, steps=1)
        rows = [[part[:, pads[number] :] for part in layer] for layer in view_rows(view_of(answer.output), number)]
        compare(model, prompt, plain, answer, rows, kinds_of(untouched.report), policy, number)


def test_the_deviation_that_a_filter_sees_is_that_of_fresh_rows():
    model = make_model("llama", num_hidden_layers=LAYERS)
    cache = stored(model, SOURCE).using(store=False, repair=NoRepair(), seam_tokens=0)
    untouched, plain = served_rows(model, MOVED, cache, steps=1)
    moved = np.array([place for place, kind in enumerate(kinds_of(untouched.report)) if kind == "shifted"])
    full, _ = run_by_hand(model, MOVED, plain, [np.arange(24, len(MOVED))] * LAYERS)
    for of, slots in (("keys", [0]), ("values", [1]), ("both", [0, 1])):
        policy = Narrow({1: 10})
        policy.of = of
        ask(model, MOVED, cache.using(repair=policy), steps=1)
        want = np.zeros(len(moved))
        for slot in slots:
            fresh, old = full[1][slot][:, moved], plain[1][slot][:, moved]
            want += ((fresh - old).square().sum(dim=(0, 2)) / fresh.square().sum(dim=(0, 2))).numpy() / len(slots)
        [(layer, deviation)] = policy.seen
        assert layer == 1
        np.testing.assert_allclose(deviation, want, rtol=1e-3, atol=1e-6)


# -- what is left behind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["filters", "rows_after"])
@pytest.mark.parametrize("layer", [1, 3])
def test_hooks_are_gone_after_an_exception(at, layer):
    class Broken(Narrow):
        def rows_after(self, current, *args):
            if at == "rows_after" and current == layer:
                raise KeyboardInterrupt
            return super().rows_after(current, *args)

        def filters(self, current, num_layers):
            if at == "filters" and current == layer:
                raise ArithmeticError("no filter here")
            return super().filters(current, num_layers)

    model = make_model("llama", num_hidden_layers=LAYERS)
    cache = stored(model, SOURCE)
    before = fingerprint(model)
    with pytest.raises((KeyboardInterrupt, ArithmeticError)):
        ask(model, MOVED, cache.using(repair=Broken({1: 60, 3: 20})))
    assert fingerprint(model) == before
    same_as_vanilla(model, MOVED, cache.using(fidelity="exact"))
    assert ask(model, MOVED, cache.using(repair=Deviation(), fidelity="balanced")).report.exact_tokens > 24


def test_hooks_are_there_while_it_runs_and_gone_afterwards():
    model = make_model("llama", num_hidden_layers=LAYERS)
    cache, counts = stored(model, SOURCE), []

    class Counting(Narrow):
        def rows_after(self, *args):
            counts.append(sum(len(layer._forward_pre_hooks) for layer in model.model.layers))
            return super().rows_after(*args)

    before = fingerprint(model)
    ask(model, MOVED, cache.using(repair=Counting({1: 60})))
    assert counts == [LAYERS] and fingerprint(model) == before


# -- the parts ------------------------------------------------------------------------------------------------------


class Layer:
    """Memory of one layer."""

    def __init__(self, index, keys, values):
        self.index, self.keys, self.values = index, keys, values

    def rows(self, columns):
        return self.keys[:, :, columns], self.values[:, :, columns]

    def put_rows(self, columns, keys, values):
        self.keys[:, :, columns], self.values[:, :, columns] = keys, values


def test_a_watch_keeps_what_was_there_and_puts_back_what_is_asked_for():
    old = [torch.randn(2, 3, 30, 4) for _ in range(4)]
    layers = [Layer(0, old[0].clone(), old[1].clone()), Layer(1, old[2].clone(), old[3].clone())]
    watched = np.array([3, 4, 9, 20, 25])
    watch = RowWatch(watched, {0, 1}, keep=1)
    for layer in layers:
        for part in (np.array([1, 3, 4, 5]), np.array([9, 12, 25])):  # two chunks; 20 is never run
            keys, values = torch.randn(2, 3, len(part), 4), torch.randn(2, 3, len(part), 4)
            watch.see(layer, part, keys, values)
            layer.put_rows(part, keys, values)
            for place, column in enumerate(part):
                seen = watch.at(layer.index, np.array([column]))[:, 0]
                if column not in watched:
                    assert np.isnan(seen).all()
                    continue
                number = 2 * layer.index
                want = np.zeros(2)
                for fresh, stale in ((keys, old[number]), (values, old[number + 1])):
                    fresh, stale = fresh[:, :, place], stale[:, :, column]
                    want += ((fresh - stale).square().sum((1, 2)) / fresh.square().sum((1, 2))).numpy() / 2
                np.testing.assert_allclose(seen, want, rtol=1e-4)
    assert np.isnan(watch.at(0, np.array([20]))).all() and np.isnan(watch.at(7, watched)).all()
    np.testing.assert_allclose(
        watch.mean(0, 2, 1, watched), np.nanmean([watch.at(layer, watched)[1] for layer in (0, 1)])
    )
    assert np.isnan(watch.mean(2, 9, 0, watched))
    written = layers[0].keys.clone(), layers[1].keys.clone()
    watch.put_back(np.array([4, 25]))
    for column in range(30):
        back = old[0] if column in (4, 25) else written[0]
        assert torch.equal(layers[0].keys[:, :, column], back[:, :, column])
    assert torch.equal(layers[0].values[:, :, [4, 25]], old[1][:, :, [4, 25]])
    assert torch.equal(layers[1].keys, written[1])  # of this layer nothing was kept


def test_rows_are_cut_by_transformers_layouts():
    index, full = torch.tensor([0, 2]), 3
    shapes = {(3,): (2,), (2, 3): (2, 2), (2, 3, 5): (2, 2, 5), (2, 1, 3, 7): (2, 1, 2, 7)}
    for shape, want in shapes.items():
        assert tuple(_cut(torch.zeros(shape), index, full).shape) == want
    for shape in ((4,), (2, 4), (3, 4, 5), (2, 1, 1, 3), (3, 1, 4, 3), (2, 3, 3, 3, 3)):
        assert tuple(_cut(torch.zeros(shape), index, full).shape) == shape
    pair = _cut((torch.zeros(1, 3, 4), [torch.zeros(1, 3, 4)]), index, full)
    assert isinstance(pair, tuple) and pair[0].shape[1] == 2 and isinstance(pair[1], list) and len(pair[1]) == 1
    assert pair[1][0].shape[1] == 2
    assert _cut(None, index, full) is None and _cut(3, index, full) == 3


def test_decoder_layers_are_a_list_of_the_right_length():
    model = make_model("llama", num_hidden_layers=LAYERS)
    assert decoder_layers(model, LAYERS) is model.model.layers
    assert decoder_layers(model, LAYERS + 1) is None
    assert decoder_layers(make_model("llama", num_hidden_layers=2), 2) is None
