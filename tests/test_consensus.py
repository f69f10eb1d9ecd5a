"""Means of a text's rows: against the plain mean of fresh rows with un-rotated keys, and who may have them."""

import itertools

import numpy as np
import pytest
import torch

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.store import consensus
from hf_suffix_cache.store.gather import average_rows
from hf_suffix_cache.store.pool import BlockPool, Budget, LayerShape
from reference import (
    ask,
    check_pool,
    check_report,
    first_layer_is_fresh,
    forgets_everything,
    fresh_rows,
    same_as_vanilla,
    served_rows,
    stored,
)
from test_traffic import ROW, Traffic, _one, _several
from tiny_models import CORE, A, B, C, head, make_model, old_text, question

LAYERS = 3


def context(number: int, length: int = 60) -> list[int]:
    """A start that no other has, long enough for what follows not to stand alone."""
    return head(number, length + 5 * number)


def request(number: int, text=C) -> list[int]:
    """A text in a context of its own."""
    return context(number) + text + question(number)


def learned(model, *requests, **options) -> SuffixCache:
    """An exact handle on a new store that keeps means, after these requests."""
    handle = SuffixCache(**options).using(fidelity="exact")
    for ids in requests:
        ask(model, ids, handle, steps=1)
    return handle


def the_shelf(cache):
    (shelf,) = cache._store.shelves.values()
    return shelf


def the_mean(cache):
    (mean,) = the_shelf(cache).means
    return mean


def unrotated(model, keys: torch.Tensor, positions) -> np.ndarray:
    """Keys `[kv_heads, rows, head_dim]` as they were before rotation, in fp64, pair by pair as complex numbers."""
    frequencies = model.get_buffer("model.rotary_emb.inv_freq").double().numpy()
    half = keys.shape[-1] // 2
    pairs = keys.double().numpy()[..., :half] + 1j * keys.double().numpy()[..., half:]
    pairs = pairs * np.exp(-1j * np.asarray(positions)[:, None] * frequencies)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def fresh_copy(model, ids, start: int, length: int) -> np.ndarray:
    """Rows `[start, start + length)` of a full prefill, keys un-rotated: `[layers, 2, kv_heads, rows, head_dim]`."""
    rows = slice(start, start + length)
    found = []
    for keys, values in fresh_rows(model, ids):
        turned_back = unrotated(model, keys[:, rows], np.arange(start, start + length))
        found.append(np.stack([turned_back, values[:, rows].double().numpy()]))
    return np.stack(found)


def stored_mean(model, shelf, mean) -> np.ndarray:
    """The rows of a mean, keys un-rotated: `[layers, 2, kv_heads, rows, head_dim]`."""
    ((slab, inside, _),) = shelf.pool.by_slab(mean.addresses)
    found = []
    for layer in range(LAYERS):
        keys, values = (tensor[:, inside] for tensor in shelf.pool.layer_tensors(slab, layer))
        found.append(np.stack([unrotated(model, keys, mean.positions), values.double().numpy()]))
    return np.stack(found)


def bits(shelf, segment) -> torch.Tensor:
    """The rows of a segment as they are: `[layers, 2, kv_heads, rows, head_dim]`."""
    ((slab, inside, _),) = shelf.pool.by_slab(segment.addresses)
    return torch.stack([torch.stack(shelf.pool.layer_tensors(slab, layer))[:, :, inside] for layer in range(LAYERS)])


def check_mean(model, cache, requests, starts, text=C) -> None:
    """The one mean is that of these requests' fresh rows, each at its start."""
    mean = the_mean(cache)
    assert mean.ids.tolist() == text
    assert mean.copies.counts.tolist() == [len(requests)] * len(text)
    want = np.mean([fresh_copy(model, ids, at, len(text)) for ids, at in zip(requests, starts, strict=True)], axis=0)
    got = stored_mean(model, the_shelf(cache), mean)
    assert np.abs(got - want).max() < 1e-5 * max(1.0, np.abs(want).max())


# -- what a mean is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("kind", CORE)
def test_mean_is_the_mean_of_fresh_rows_with_unrotated_keys(kind, number):
    model = make_model(kind)
    requests = [request(each) for each in range(number)]
    cache = learned(model, *requests)
    check_mean(model, cache, requests, [60 + 5 * each for each in range(number)])
    check_pool(cache)


@pytest.mark.parametrize("fault", ["rotation", "weight", "context"])
def test_control_a_wrong_mean_is_noticed(fault, monkeypatch):
    model = make_model("llama")
    requests = [request(each) for each in range(3)]
    right = consensus.average_rows

    def wrong(pool, addresses, means, shifts, counts, frequencies):
        shifts = np.zeros_like(shifts) if fault == "rotation" else shifts
        counts = np.ones_like(counts) if fault == "weight" else counts
        right(pool, addresses, means, shifts, counts, frequencies)

    monkeypatch.setattr(consensus, "average_rows", wrong)
    if fault == "context":
        requests[2] = request(7)
        cache = learned(model, request(0), request(1), request(2))
    else:
        cache = learned(model, *requests)
    with pytest.raises(AssertionError):
        check_mean(model, cache, requests, [60, 65, len(context(7)) if fault == "context" else 70])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_average_rows_sums_in_fp32_and_keeps_the_dtype(dtype):
    shape = LayerShape(2, 8, 4, dtype, torch.device("cpu"))
    pool = BlockPool([shape] * 2, 4, Budget(1 << 20), poison=False)
    extent = pool.allocate(40)
    generator = torch.Generator().manual_seed(0)
    for tensors in (extent.slab.keys, extent.slab.values):
        tensors[shape].copy_(torch.randn(tensors[shape].shape, generator=generator))
    before = {name: getattr(extent.slab, name)[shape].clone() for name in ("keys", "values")}
    rows, means, counts = np.array([3, 30, 7]), np.array([20, 11, 12]), np.array([1, 4, 2])
    addresses = lambda columns: extent.addresses(0, columns)  # noqa: E731
    average_rows(pool, addresses(rows), addresses(means), np.zeros(3, dtype=np.int64), counts, {})
    wide = torch.promote_types(dtype, torch.float32)
    for name, old in before.items():
        want = old.clone()
        for row, mean, count in zip(rows, means, counts, strict=True):
            step = (old[:, :, row].to(wide) - old[:, :, mean].to(wide)) / (count + 1)
            want[:, :, mean] = (old[:, :, mean].to(wide) + step).to(dtype)
        assert torch.allclose(getattr(extent.slab, name)[shape], want, rtol=1e-6, atol=0)


def test_rows_of_a_padded_batch_enter_a_mean():
    model = make_model("llama")
    requests = [request(each) for each in range(2)]
    width = max(map(len, requests))
    ids = torch.tensor([[2] * (width - len(each)) + each for each in requests])
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in requests])
    cache = learned(model)
    ask(model, ids, cache, steps=1, attention_mask=mask, pad_token_id=2)
    check_mean(model, cache, requests, [60, 65])


def test_a_long_text_keeps_one_mean_and_what_lies_beside_it_another():
    """Two texts that stood together once and apart later: rows of each have all their copies."""
    model = make_model("llama")
    together = [context(number) + A + C + question(number) for number in range(2)]
    apart = context(2) + C + context(3, 9) + A + question(2)
    cache = learned(model, *together, apart)
    mean, shelf = the_mean(cache), the_shelf(cache)
    assert mean.ids.tolist() == A + C and mean.copies.counts.tolist() == [3] * len(A + C)
    copies = [fresh_copy(model, ids, 60 + 5 * number, 92) for number, ids in enumerate(together)]
    at = apart.index(A[0], 70 + len(C) + 9)
    pieces = [fresh_copy(model, apart, at, len(A)), fresh_copy(model, apart, 70, len(C))]
    want = np.mean([*copies, np.concatenate(pieces, axis=-2)], axis=0)
    assert np.abs(stored_mean(model, shelf, mean) - want).max() < 1e-5 * max(1.0, np.abs(want).max())


# -- what enters a mean ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lonely", [[], head(9, 12), head(9, 39)], ids=len)
def test_rows_that_stood_alone_stay_out(lonely):
    model = make_model("llama")
    alone = lonely + C + question(9)
    for order in itertools.permutations([request(0), request(1), alone]):
        cache = learned(model, *order)
        requests = [ids for ids in order if ids is not alone]
        check_mean(model, cache, requests, [ids.index(C[0], 60) for ids in requests])
    cache = learned(model, request(0), alone)
    assert not the_shelf(cache).means  # one copy is no mean


def test_same_context_is_counted_once():
    model = make_model("llama")
    cache = learned(model)
    for number in range(10):
        ask(model, context(0) + C + question(number), cache, steps=1)
    assert not the_shelf(cache).means
    second = context(1) + C + question(10)
    ask(model, second, cache, steps=1)
    before = bits(the_shelf(cache), the_mean(cache))
    for number in range(10):
        ask(model, context(number % 2) + C + question(20 + number), cache, steps=1)
    assert torch.equal(bits(the_shelf(cache), the_mean(cache)), before)
    check_mean(model, cache, [context(0) + C, second], [60, 65])


def test_same_context_is_counted_once_when_its_rows_are_run_again():
    """Without what was stored of it, a context comes again in full, and is known."""
    model = make_model("llama")
    cache = learned(model, request(0), request(1), request(2))
    shelf = the_shelf(cache)
    before = bits(shelf, the_mean(cache))
    for sequence in list(shelf.sequences):
        shelf.remove(sequence)
    for number in (2, 0, 1):
        assert ask(model, request(number), cache, steps=1).report.new_tokens == len(request(number))
    assert torch.equal(bits(shelf, the_mean(cache)), before)
    assert the_mean(cache).copies.counts.tolist() == [3] * len(C)
    check_pool(cache)


def test_repaired_rows_enter_and_later_exact_ones_fill_the_rest():
    model = make_model("llama")
    cache = learned(model, request(0), request(1))
    answer = ask(model, request(2), cache.using(fidelity="balanced"), steps=1)
    repaired = answer.report.repaired_tokens
    counts = the_mean(cache).copies.counts
    assert sorted(set(counts)) == [2, 3] and (counts == 3).sum() == repaired
    drawn = counts == 3
    ask(model, request(2), cache, steps=1)  # exact: every row of that context
    mean, used = the_mean(cache), the_mean(cache).last_used
    assert mean.copies.counts.tolist() == [3] * len(C)
    copies = [fresh_copy(model, request(number), 60 + 5 * number, len(C)) for number in range(3)]
    want = np.mean(copies, axis=0)[..., ~drawn, :]
    got = stored_mean(model, the_shelf(cache), mean)[..., ~drawn, :]
    assert np.abs(got - want).max() < 1e-5 * max(1.0, np.abs(want).max())
    ask(model, request(3), cache, steps=1)
    assert the_mean(cache).last_used > used
    check_pool(cache)


def test_text_behind_a_long_mean_begins_none_where_its_left_neighbours_are_the_same():
    model = make_model("llama")
    text = old_text(70, 5)
    cache = learned(model, request(0, text), request(1, text))
    for number in (2, 3):
        ask(model, request(number, text + C), cache, steps=1)
    mean = the_mean(cache)
    assert mean.ids.tolist() == text and mean.copies.counts.tolist() == [4] * 70
    ask(model, request(4), cache, steps=1)  # control: behind something else it begins one
    assert sorted(each.ids.tolist() == C for each in the_shelf(cache).means) == [False, True]


def test_repaired_rows_alone_begin_no_mean():
    model = make_model("llama")
    cache = stored(model, request(0), fidelity="balanced")
    for number in range(1, 6):
        assert ask(model, request(number), cache, steps=1).report.repaired_tokens
    assert not the_shelf(cache).means


def test_mean_of_eight_contexts_stays_as_it_is():
    model = make_model("llama")
    requests = [request(number) for number in range(8)]
    cache = learned(model, *requests)
    check_mean(model, cache, requests, [60 + 5 * number for number in range(8)])
    before = bits(the_shelf(cache), the_mean(cache))
    ask(model, request(8), cache, steps=1)
    assert torch.equal(bits(the_shelf(cache), the_mean(cache)), before)


def test_rows_of_the_last_generations_stay_out():
    model = make_model("llama")
    cache = learned(model, request(0), request(1))
    shelf, rows = the_shelf(cache), np.arange(len(C))
    source = next(segment for segment in shelf.segments if not segment.is_mean and len(segment) > 100)
    for hops in range(5):
        ids = np.array(request(2 + hops))
        start = len(context(2 + hops))
        addresses = np.zeros(len(ids), dtype=np.int64)
        addresses[start : start + len(C)] = source.addresses[60 + rows]
        own = np.zeros(len(ids), dtype=bool)
        own[start : start + len(C)] = True
        computed = consensus.Computed(ids, own, np.full(len(ids), hops), addresses)
        frequencies = {shape.rotary: shape.rotary.frequencies(model) for shape in shelf.pool.shapes}
        consensus.learn(shelf, computed, frequencies, 0.0)
    assert the_mean(cache).copies.counts.tolist() == [2 + 3] * len(C) and the_mean(cache).hops == 2


# -- how a mean is served -------------------------------------------------------------------------------------------


def test_mean_is_served_where_no_copy_agrees():
    model = make_model("llama")
    cache = learned(model, request(0), request(1))
    mean = the_mean(cache)
    ids = request(5)
    answer, rows = served_rows(model, ids, cache.using(fidelity="fast"), steps=1)
    check_report(answer.report)
    first_layer_is_fresh(model, rows, ids)
    sources = {span.segment for span in answer.report.spans[0] if span.kind in ("shifted", "repaired")}
    assert sources == {mean.segment_id}
    agreeing = context(6) + context(1)[-20:] + C + question(6)
    report = ask(model, agreeing, cache.using(fidelity="fast"), steps=1).report
    assert mean.segment_id not in {span.segment for span in report.spans[0]}
    del answer, rows  # the view that was handed out
    check_pool(cache)


def test_mean_goes_on_where_its_text_does():
    """Behind its own text a mean has no seam, nor behind what stood before all of its copies."""
    model = make_model("llama")
    cache = learned(model, request(0, A))
    balanced = cache.using(fidelity="balanced")
    ask(model, context(1) + A + C + question(1), balanced, steps=1)  # A is moved, and C computed behind it
    ask(model, context(2) + A + C + question(2), cache, steps=1)
    shelf, prompt = the_shelf(cache), context(5) + A + C + question(5)
    first, second = shelf.mean_windows.find_runs(np.array(prompt))
    assert [len(first), len(second)] == [len(A), len(C)] and first.segment is not second.segment
    assert (first.left_match, second.left_match) == (0, 16)
    (cut,) = shelf.mean_windows.find_runs(np.array(prompt), first=85 + 25)[:1]
    assert cut.left_match == 16
    for sequence in list(shelf.sequences):
        shelf.remove(sequence)  # the copies, which would go on where the prompt does
    report = ask(model, prompt, balanced.using(repair_fraction=0.0, fidelity="fast"), steps=1).report
    assert {first.segment.segment_id, second.segment.segment_id} <= {span.segment for span in report.spans[0]}
    assert report.repaired_tokens == 4
    ask(model, context(3) + C + question(3), cache, steps=1)  # something else to its left
    *_, second = shelf.mean_windows.find_runs(np.array(prompt))
    assert second.left_match == 0


@pytest.mark.parametrize("options", [dict(consensus=False), dict(fidelity="exact")])
def test_no_mean_where_none_is_wanted(options):
    model = make_model("llama")
    cache = stored(model, **options).using(fidelity="exact")
    for number in range(4):
        ask(model, request(number), cache, steps=1)
    assert not the_shelf(cache).means
    check_pool(cache)


def _conversation_behind_a_mean(model):
    """A conversation that was served by a mean, which another context then changes: (cache, its tokens, its rows)."""
    cache = learned(model, request(0), request(1), keep_conversations=0)
    handle = cache.using(fidelity="balanced")
    answer, rows = served_rows(model, request(2), handle)
    rows = [(keys.clone(), values.clone()) for keys, values in rows]  # the view's memory goes back with the answer
    assert answer.report.shifted_tokens
    ask(model, request(3), cache, steps=1)
    assert max(the_mean(cache).copies.counts) == 4
    return handle, answer.tokens(), rows


def _continued(model, handle, tokens, rows) -> bool:
    """Whether the conversation goes on with the bits that it had."""
    after, now = served_rows(model, tokens + question(20), handle)
    assert after.report.carried_tokens > 20
    length = len(tokens) - 1
    pairs = zip(now, rows, strict=True)
    return all(torch.equal(new[part][:, :length], old[part][:, :length]) for new, old in pairs for part in (0, 1))


def test_conversation_served_by_a_mean_keeps_its_bits_when_the_mean_changes():
    model = make_model("llama")
    handle, tokens, rows = _conversation_behind_a_mean(model)
    check_pool(handle)
    assert _continued(model, handle, tokens, rows)
    check_pool(handle)
    handle.compact()
    assert _continued(model, handle, tokens, rows)


def test_control_a_mean_that_changes_under_a_conversation_is_noticed(monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr(consensus, "_renew", lambda shelf, mean: mean)
    handle, tokens, rows = _conversation_behind_a_mean(model)
    assert not _continued(model, handle, tokens, rows)


def test_replaced_mean_leaves_with_the_last_conversation_that_needs_it():
    model = make_model("llama")
    handle, _, _ = _conversation_behind_a_mean(model)
    shelf = the_shelf(handle)
    old = [segment for segment in shelf.segments if segment.is_mean and segment not in shelf.means]
    assert old
    for sequence in [each for each in shelf.sequences if set(old) & set(each.recipe.segments)]:
        shelf.remove(sequence)
    assert not set(old) & set(shelf.segments)
    check_pool(handle)


# -- where it is kept -----------------------------------------------------------------------------------------------


def test_mean_outlives_its_copies_and_is_evicted_when_it_is_the_oldest():
    model = make_model("llama")
    cache = learned(model, request(0), request(1), max_bytes=700 * ROW, keep_conversations=0)
    shelf = the_shelf(cache)
    for sequence in list(shelf.sequences):
        shelf.remove(sequence)
    assert cache.stats.bytes_used == 64 * ROW and check_pool(cache).segments == 1
    assert ask(model, request(5), cache.using(fidelity="fast"), steps=1).report.shifted_tokens
    number = 0
    while shelf.means:
        assert number < 20
        ask(model, old_text(150, 800 + number), cache, steps=1)
        check_pool(cache)
        number += 1
    assert number > 1 and cache.stats.evictions
    forgets_everything(cache)


def test_clear_and_compaction_know_means():
    model = make_model("llama")
    cache = learned(model, *[request(n, (C, A)[n % 2]) for n in range(6)])
    shelf = the_shelf(cache)
    for sequence in list(shelf.sequences)[:4]:
        shelf.remove(sequence)
    before = {mean: bits(shelf, mean) for mean in shelf.means}
    assert len(before) == 2 and cache.compact().bytes_moved > 0
    assert all(torch.equal(bits(shelf, mean), rows) for mean, rows in before.items())
    check_pool(cache)
    forgets_everything(cache)
    assert not shelf.means and not len(shelf.mean_windows)


def test_exact_mode_knows_nothing_of_means():
    model = make_model("llama")
    cache = learned(model, request(0), request(1))
    for number in (5, 0, 1, 6):
        for _ in range(2):
            same_as_vanilla(model, request(number), cache)


@pytest.mark.parametrize("rows", [None, 1500], ids=["roomy", "evicting"])
@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_every_oracle_holds_under_random_traffic_with_means(rows, seed, monkeypatch):
    """O1 in exact mode, O2, O4 and O5 after every request, where much of the text is known from several contexts."""
    monkeypatch.setattr(consensus, "MIN_TEXT", 16)
    monkeypatch.setattr(consensus, "START_SHARE", 0.1)
    model, traffic = make_model(CORE[seed], spy=True), _Shuffled(seed)
    cache = SuffixCache(max_bytes=rows and rows * ROW, keep_conversations=(4, 0)[seed % 2], debug=True)
    served = means = 0
    for number in range(80):
        fidelity = str(traffic.random.choice(["exact", "balanced", "fast"]))
        handle = cache.using(fidelity=fidelity)
        (_several if traffic.random.random() < 0.2 else _one)(traffic, model, handle, fidelity)
        check_pool(cache)
        shelf = the_shelf(cache)
        means = max(means, len(shelf.means))
        assert all(mean.hops <= 2 and mean.copies.counts.max() <= 8 for mean in shelf.means)
        ids = {segment.segment_id for segment in shelf.segments if segment.is_mean}
        served += any(span.segment in ids for row in handle.last_report.spans for span in row)
        if number % 20 == 19:
            cache.compact()
            check_pool(cache)
    assert means > 1 and served > 3, (means, served)
    forgets_everything(cache)


class _Shuffled(Traffic):
    """Texts behind longer starts, so that few rows stand alone."""

    def prompt(self) -> list[int]:
        if self.random.random() < 0.3:
            return super().prompt()
        texts = [(A, B, C)[each] for each in self.random.permutation(3)[: int(self.random.integers(1, 4))]]
        start = self._new(int(self.random.integers(30, 60)))
        return start + sum(texts, []) + self._new(int(self.random.integers(10, 45)))
