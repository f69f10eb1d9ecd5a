"""Rows that were given up on a device and lie in the host's memory. Here the two are one, so `host_bytes` is given."""

import gc

import numpy as np
import pytest
import torch

from hf_suffix_cache import SuffixCache, SuffixCacheConfig
from hf_suffix_cache.store.host import HostRows
from reference import ask, check_pool, forgets_everything, same_as_vanilla
from tiny_models import A, B, C, head, make_model, old_text, question

ROW = 3 * 2 * 2 * 16 * 4  # bytes of one in the tiny Llama


def texts(count: int) -> list[list[int]]:
    return [old_text(150, number) for number in range(count)]


def in_host(cache) -> int:
    return sum(isinstance(stored, HostRows) for stored in cache._store.dormant.stored.values())


def served(report) -> int:
    return report.exact_tokens + report.carried_tokens + report.shifted_tokens + report.repaired_tokens


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_what_is_given_up_is_served_from_the_host(kind):
    model = make_model(kind)
    options = {"fidelity": "exact", "max_bytes": 640 * ROW, "consensus": False}
    cache, without = SuffixCache(host_bytes=1 << 30, **options), SuffixCache(**options)
    hits = [0, 0]
    for number, text in [*enumerate(texts(8)), *enumerate(texts(8))]:
        for which, each in enumerate((cache, without)):
            report = same_as_vanilla(model, text + question(number), each, steps=2).report
            hits[which] += report.exact_tokens >= 150
            check_pool(each)
    assert hits[0] == 8 and hits[1] < 8  # control: the device alone has no room for them
    assert in_host(cache) > 0 and cache.stats.bytes_total <= 640 * ROW
    assert cache.stats.evictions == 0 < without.stats.evictions
    forgets_everything(cache)
    gc.collect()
    assert cache._store.dormant.host.taken == 0


def test_rows_come_back_bit_for_bit():
    model = make_model()
    cache = SuffixCache(fidelity="exact", host_bytes=1 << 30, keep_conversations=0)
    ask(model, A + B + question(1), cache)
    (shelf,) = cache._store.shelves.values()
    (segment,) = shelf.segments

    def rows() -> list[torch.Tensor]:
        ((slab, index, _),) = shelf.pool.by_slab(segment.addresses)
        return [tensor.index_select(2, torch.from_numpy(index)).clone() for tensor in slab.tensors() if tensor.numel()]

    before = rows()
    (sequence,) = shelf.sequences
    shelf.drop_extent(sequence)
    assert cache._store.dormant.put_back(shelf, sequence) and shelf.pool.is_mapped(segment.addresses)
    assert cache.stats.bytes_used == 0 < cache._store.dormant.host.taken
    assert all(torch.equal(a, b) for a, b in zip(before, rows(), strict=True))
    for number in range(2):  # the second time they are brought back
        got = same_as_vanilla(model, A + B + question(number + 2), cache.using(store=False))
        assert got.report.exact_tokens >= len(A + B)
    assert not shelf.pool.is_mapped(segment.addresses)
    assert all(torch.equal(a, b) for a, b in zip(before, rows(), strict=True))
    taken = cache._store.dormant.host.taken
    assert cache._store.dormant.put_back(shelf, sequence)  # the copy is there still: none is made
    assert cache._store.dormant.host.taken == taken
    check_pool(cache)


def test_the_host_has_a_budget_too():
    """What was used longest ago goes; a text that has no room there goes as before."""
    model = make_model()
    cache = SuffixCache(fidelity="exact", max_bytes=640 * ROW, host_bytes=420 * ROW, consensus=False)
    host, most = cache._store.dormant.host, 0
    for number, text in enumerate(texts(10)):
        same_as_vanilla(model, text + question(number), cache, steps=2)
        most = max(most, host.taken)
        check_pool(cache)
    assert 0 < most <= 420 * ROW and cache.stats.evictions > 0
    report = ask(model, texts(10)[0] + question(0), cache.using(store=False)).report
    assert served(report) == 0  # the oldest one is gone
    small = SuffixCache(fidelity="exact", max_bytes=640 * ROW, host_bytes=100 * ROW, consensus=False)
    for number, text in enumerate(texts(6)):
        same_as_vanilla(model, text + question(number), small, steps=2)
    assert small._store.dormant.host.taken == 0 and small.stats.evictions > 0
    check_pool(small)


def test_what_is_gone_is_not_looked_at():
    """Making room in the host may take away a conversation that was to be given up next."""
    model = make_model()
    cache = SuffixCache(fidelity="exact", host_bytes=1 << 30, keep_conversations=0)
    ask(model, A + question(1), cache)
    (shelf,) = cache._store.shelves.values()
    (sequence,) = shelf.sequences
    shelf.remove(sequence)
    assert cache._store.dormant.put_back(shelf, sequence)
    assert cache._store.dormant.host.taken == 0
    check_pool(cache)


@pytest.mark.parametrize("store_dtype", [None, "bfloat16", "int8"])
def test_moved_rows_come_from_the_host(store_dtype):
    model = make_model()
    rows = 500 if store_dtype == "int8" else 900  # a row of 8 bit takes less
    options = {"store_dtype": store_dtype, "keep_conversations": 0, "max_bytes": rows * ROW}
    cache = SuffixCache(host_bytes=1 << 30, **options)
    for number, text in enumerate([A + B, C, *texts(8)]):
        ask(model, text + question(number), cache)
        check_pool(cache)
    assert in_host(cache) > 0
    report = ask(model, head(3) + B + question(30), cache).report
    assert report.shifted_tokens + report.repaired_tokens > 0
    check_pool(cache)


def test_rows_in_the_host_are_saved(tmp_path):
    model = make_model()
    cache = SuffixCache(fidelity="exact", max_bytes=640 * ROW, host_bytes=1 << 30, consensus=False)
    for number, text in enumerate(texts(8)):
        ask(model, text + question(number), cache, steps=2)
    assert in_host(cache) > 0
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact").using(store=False)
    for number, text in enumerate(texts(8)):
        assert same_as_vanilla(model, text + question(number), loaded, steps=1).report.exact_tokens >= 150
        assert same_as_vanilla(model, text + question(number), cache, steps=1).report.exact_tokens >= 150
    check_pool(cache)
    check_pool(loaded)


def test_sessions_in_the_host_expire_and_stay_apart():
    model, now = make_model(), [0.0]
    cache = SuffixCache(
        fidelity="exact", max_bytes=640 * ROW, host_bytes=1 << 30, consensus=False, clock=lambda: now[0]
    )
    alice = cache.session("alice", ttl=100)
    for number, text in enumerate(texts(6)):
        ask(model, text + question(number), alice, steps=2)
    assert in_host(cache) > 0
    assert served(ask(model, texts(6)[0] + question(0), cache.session("bob").using(store=False)).report) == 0
    assert ask(model, texts(6)[0] + question(0), alice.using(store=False)).report.exact_tokens >= 150
    now[0] += 200.0
    assert cache.stats.segments == 0
    gc.collect()
    assert cache._store.dormant.host.taken == 0
    check_pool(cache)


def test_at_random_with_every_tier(tmp_path):
    """Many texts, little room everywhere, saves in between: answers stay those of a full prefill."""
    model, generator = make_model(), np.random.default_rng(5)
    cache = SuffixCache(fidelity="exact", max_bytes=700 * ROW, host_bytes=500 * ROW)
    for step in range(60):
        text = old_text(60 + 10 * int(generator.integers(12)), int(generator.integers(12)))
        handle = [cache, cache.session(1), cache.session("1")][int(generator.integers(3))]
        same_as_vanilla(model, text + question(step), handle, steps=2)
        if step % 20 == 19:
            cache.save(tmp_path)
        check_pool(cache)
        assert cache._store.dormant.host.taken <= 500 * ROW
    forgets_everything(cache)


def test_nothing_is_kept_twice_on_a_cpu_unless_it_is_asked_for():
    model, cache = make_model(), SuffixCache(fidelity="exact", max_bytes=640 * ROW, consensus=False)
    for number, text in enumerate(texts(8)):
        ask(model, text + question(number), cache, steps=2)
    assert in_host(cache) == 0 and cache._store.dormant.host.taken == 0 and cache.stats.evictions > 0
    with pytest.raises(ValueError, match="host_bytes"):
        SuffixCacheConfig(host_bytes=-1)
