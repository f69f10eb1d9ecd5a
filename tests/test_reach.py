"""How far rows look to the left: read once, kept with the rows, asked for when they are moved."""

import numpy as np
import pytest
import torch

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.reach import DISTANCES, outside_mass
from hf_suffix_cache.repair import FirstRows, OutsideMass, QuestionAttention
from reference import ask, kinds_of, stored
from tiny_models import A, B, C, D, head, make_model, question

SOURCE = head(0) + A + B + C + D + question(0)
MOVED = head(1, 9) + C + A + D + B + question(1)


def segments(cache):
    return [segment for shelf in cache._store.shelves.values() for segment in shelf.segments]


def eager_attention(kind, ids):
    """Mean attention over heads and layers, `[queries, keys]`, from the model's own eager weights."""
    model = make_model(kind)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_attentions=True)
    model.set_attn_implementation("sdpa")
    return torch.stack(out.attentions).mean(dim=(0, 2))[0].numpy()


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "gpt_neox", "cohere"])
def test_reach_is_the_mass_beyond_each_distance(kind):
    cache = stored(make_model(kind), SOURCE, repair=OutsideMass())
    (segment,) = segments(cache)
    weights = eager_attention(kind, SOURCE)
    weights[:, 0] = 0.0
    for row in (0, 1, 5, 40, 100, len(SOURCE) - 1):
        want = [weights[row, : max(0, row - distance)].sum() for distance in DISTANCES]
        np.testing.assert_allclose(segment.reach[row].astype(float), want, atol=2e-3)


def test_reach_of_a_padded_batch_is_that_of_its_rows():
    model = make_model("llama")
    cache = SuffixCache(repair=OutsideMass())
    short, pad = SOURCE[20:], 20
    ids = torch.tensor([SOURCE, [0] * pad + short])
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=1, do_sample=False, pad_token_id=0)
    alone = stored(model, short, repair=OutsideMass())
    (want,) = segments(alone)
    got = next(segment for segment in segments(cache) if len(segment) == len(want))
    np.testing.assert_allclose(got.reach.astype(float), want.reach.astype(float), atol=2e-3)


def test_reach_is_not_read_where_no_policy_asks_for_it():
    cache = stored(make_model("llama"), SOURCE)
    assert all(segment.reach is None for segment in segments(cache))


def test_outside_mass_is_read_off_between_the_kept_distances():
    reach = np.tile(np.linspace(1.0, 0.0, len(DISTANCES)), (4, 1)).astype(np.float16)
    got = outside_mass(reach, np.array([0, 1, 2, 10**6]))
    step = 1 / (len(DISTANCES) - 1)
    np.testing.assert_allclose(got, [1.0, 1 - step, 1 - step * np.log2(3), 0.0], atol=1e-3)


@pytest.mark.parametrize("policy", [OutsideMass(), QuestionAttention("outside_mass")])
def test_policies_choose_by_it_and_without_it_as_before(policy):
    model = make_model("llama")
    with_it, without = stored(model, SOURCE, repair=OutsideMass()), stored(model, SOURCE)
    first = FirstRows() if isinstance(policy, OutsideMass) else QuestionAttention(None)

    def repaired(cache, repair):
        kinds = kinds_of(ask(model, MOVED, cache.using(repair=repair, seam_tokens=0, store=False)).report)
        return [place for place, kind in enumerate(kinds) if kind == "repaired"]

    assert repaired(without, policy) == repaired(without, first)
    assert repaired(with_it, policy) != repaired(with_it, first)


def test_outside_mass_takes_the_rows_that_looked_outside_of_their_run():
    model = make_model("llama")
    cache = stored(model, SOURCE, repair=OutsideMass())
    (segment,) = segments(cache)
    report = ask(model, MOVED, cache.using(seam_tokens=0, store=False)).report
    kinds = kinds_of(report)
    spans = [span for span in report.spans[0] if span.kind in ("shifted", "repaired")]
    mass = {}
    for place, kind in enumerate(kinds):
        if kind in ("shifted", "repaired"):
            span = next(span for span in spans if span.start <= place < span.stop)
            mass[place] = (kind, span.shift)
    chosen = [place for place, (kind, _) in mass.items() if kind == "repaired"]
    # each run starts where the shift changes; its rows' distance is counted from there
    starts, previous = {}, None
    for place, (_, shift) in mass.items():
        if previous is None or mass[previous][1] != shift or place != previous + 1:
            start = place
        starts[place], previous = start, place
    score = {
        place: float(outside_mass(segment.reach[[place - shift]], np.array([place - starts[place]]))[0])
        for place, (_, shift) in mass.items()
    }
    assert min(score[place] for place in chosen) >= max(score[place] for place in score if place not in chosen) - 1e-9
