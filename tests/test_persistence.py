"""Stores on disk: what was saved is served as before, by the same model alone; what is written, and when; crashes."""

import errno
import itertools
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.identity import IdentityTable
from hf_suffix_cache.repair import OutsideMass
from hf_suffix_cache.store import files, packing, persistence
from hf_suffix_cache.store.files import INDEX, pack_index, unpack_index
from hf_suffix_cache.store.packing import TextTable
from reference import ask, check_pool, forgets_everything, in_threads, same_as_vanilla
from tiny_models import BREADTH, CORE, A, B, C, D, forget, head, make_model, new_text, old_text, question


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def served(report) -> int:
    return report.exact_tokens + report.carried_tokens + report.shifted_tokens + report.repaired_tokens


def plan_of(report) -> list:
    """What a report says of each row of a batch, but for numbers of segments, which are a process's own."""
    return [[(span.start, span.stop, span.kind, span.shift) for span in row] for row in report.spans]


def contents_of(folder) -> dict:
    return unpack_index((Path(folder) / INDEX).read_bytes(), folder)


def rewrite(folder, change) -> None:
    """Change what an index says, with a checksum that is right again."""
    contents = contents_of(folder)
    change(contents)
    (Path(folder) / INDEX).write_bytes(pack_index(contents))


def row_files(folder) -> list[Path]:
    return sorted(Path(folder).glob("rows-*.safetensors"))


def every_row(cache) -> list[torch.Tensor]:
    """All stored rows of a cache, segment by segment in the order of their text: keys and values of every layer."""
    store, found = cache._store, []
    for shelf in store.shelves.values():
        for segment in shelf.segments:
            parts = []
            for slab, rows, _ in shelf.pool.by_slab(segment.addresses):
                index = torch.from_numpy(rows)
                parts.append([tensor.index_select(2, index).clone() for tensor in slab.tensors()])
            joined = [torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True)]
            found.append(((segment.context.tolist(), segment.positions.tolist(), segment.state), joined))
    return sorted(found, key=lambda entry: str(entry[0]))


def same_rows(left, right) -> None:
    assert [key for key, _ in left] == [key for key, _ in right]
    for (_, a), (_, b) in zip(left, right, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def fill(model, cache) -> list[int]:
    """Requests of every kind: a conversation with moved text that went on, other texts in two contexts, a batch."""
    ask(model, A + B + question(1), cache)
    first = ask(model, head(2) + B + A + question(2), cache)  # moved
    second = ask(model, first.tokens() + new_text(20, 1), cache)  # carried
    ask(model, old_text(50, 3) + C + question(3), cache)
    ask(model, old_text(60, 4) + C + D + question(4), cache)  # means of C
    ask(model, [old_text(64, 5), old_text(64, 6)], cache)
    return second.tokens()


def later(conversation: list[int]) -> list[list[int]]:
    """Prompts that go on with what `fill` has left."""
    return [
        A + B + question(11),
        conversation + new_text(18, 9),
        head(12) + C + question(12),
        head(13) + D + B + question(13),
        A[:25] + question(14),
        old_text(64, 6) + question(15),
    ]


# -- what comes back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", ["exact", "balanced", "fast"])
@pytest.mark.parametrize("kind", CORE)
def test_what_was_saved_is_served_as_before(kind, fidelity, tmp_path):
    model, cache = make_model(kind), SuffixCache(fidelity=fidelity)
    conversation = fill(model, cache)
    cache.save(tmp_path)
    same = make_model(kind)
    loaded = SuffixCache.load(tmp_path, fidelity=fidelity)
    total = 0
    for prompt in later(conversation):
        before, after = ask(model, prompt, cache), ask(same, prompt, loaded)
        assert plan_of(after.report) == plan_of(before.report)
        assert after.tokens() == before.tokens()
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(after.scores, before.scores, strict=True))
        total += served(after.report)
        check_pool(loaded)
    assert total > 100  # control: there was something to serve
    forgets_everything(loaded)


def test_rows_come_back_bit_for_bit(tmp_path):
    model, cache = make_model(), SuffixCache()
    fill(model, cache)
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path)
    assert loaded.stats.segments == 0  # nothing is there before its model asks
    ask(model, new_text(20, 50), loaded.using(store=False))
    same_rows(every_row(cache), every_row(loaded))
    check_pool(loaded)


@pytest.mark.parametrize("kind", [kind for kind in BREADTH if kind not in ("bloom",)])
def test_other_architectures_come_back_too(kind, tmp_path):
    model, cache = make_model(kind), SuffixCache(fidelity="exact")
    ask(model, A + B + question(1), cache)
    cache.save(tmp_path)
    got = same_as_vanilla(make_model(kind), A + B + question(2), SuffixCache.load(tmp_path, fidelity="exact"))
    assert got.report.exact_tokens >= len(A + B)


@pytest.mark.parametrize("store_dtype", ["bfloat16", "int8"])
def test_rows_in_a_smaller_dtype_come_back(store_dtype, tmp_path):
    model, same = make_model(), make_model()
    cache = SuffixCache(store_dtype=store_dtype, keep_conversations=0)
    fill(model, cache)
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path, store_dtype=store_dtype, keep_conversations=0)
    for number in range(4):  # the second time they are promoted
        prompt = head(20 + number) + C + question(20 + number)
        before, after = ask(model, prompt, cache), ask(same, prompt, loaded)
        assert plan_of(after.report) == plan_of(before.report)
        check_pool(loaded)
    plain = SuffixCache.load(tmp_path)  # the setting need not be the same
    assert served(ask(make_model(), head(30) + C + question(30), plain).report) > 0
    check_pool(plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_of_another_dtype_is_another_model(dtype, tmp_path):
    model, cache = make_model().to(dtype), SuffixCache(fidelity="exact")
    ask(model, A + B + question(1), cache)
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact")
    assert served(ask(make_model(), A + B + question(1), loaded).report) == 0
    assert ask(make_model().to(dtype), A + B + question(1), loaded).report.exact_tokens >= len(A + B)
    check_pool(loaded)


def test_what_policies_keep_of_rows_comes_back(tmp_path):
    model, cache = make_model(), SuffixCache(repair=OutsideMass())
    fill(model, cache)
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path, repair=OutsideMass())
    prompt = head(40) + A + B + question(40)
    before, after = ask(model, prompt, cache), ask(make_model(), prompt, loaded)
    assert after.report.repaired_tokens > 0 and plan_of(after.report) == plan_of(before.report)


def test_what_was_loaded_is_saved_again_in_whatever_state_it_is(tmp_path):
    """Waiting for its model, in files, in memory: a third cache serves the same."""
    model, same, stranger, cache = make_model(), make_model(), make_model(seed=7), SuffixCache()
    conversation = fill(model, cache)
    cache.save(tmp_path / "1")
    waiting = SuffixCache.load(tmp_path / "1")
    ask(stranger, A + question(1), waiting)
    waiting.save(tmp_path / "2")
    used = SuffixCache.load(tmp_path / "2")
    for number in range(3):
        report = ask(same, head(50) + A + question(50), used.using(store=False)).report
        assert served(report) > 0, number
    used.save(tmp_path / "3")
    last = SuffixCache.load(tmp_path / "3")
    for prompt in later(conversation):
        before, after = ask(model, prompt, cache), ask(same, prompt, last)
        assert plan_of(after.report) == plan_of(before.report) and after.tokens() == before.tokens()
    assert served(ask(make_model(seed=7), A + question(1), last).report) > 0
    check_pool(last)


def test_a_recipe_that_needs_corrections_comes_back(tmp_path):
    model, cache = make_model(), SuffixCache(drift=True, keep_conversations=0)
    ask(model, A + B + C + question(1), cache)
    first = ask(model, head(2) + C + A + B + question(2), cache)
    assert first.report.shifted_tokens and any(
        sequence.recipe.drifts for shelf in cache._store.shelves.values() for sequence in shelf.sequences
    )
    cache.save(tmp_path)
    longer = first.tokens() + new_text(20, 3)
    before = ask(model, longer, cache)
    after = ask(make_model(), longer, SuffixCache.load(tmp_path, drift=True, keep_conversations=0))
    assert before.report.carried_tokens > 0 and plan_of(after.report) == plan_of(before.report)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(after.scores, before.scores, strict=True))


# -- whose rows -----------------------------------------------------------------------------------------------------


def test_rows_wait_for_their_model(tmp_path):
    model, other, cache = make_model(), make_model(seed=1), SuffixCache(fidelity="exact")
    ask(model, A + question(1), cache)
    ask(other, B + question(1), cache)
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact")
    assert served(same_as_vanilla(make_model(seed=2), A + question(1), loaded).report) == 0
    assert same_as_vanilla(make_model(seed=1), B + question(2), loaded).report.exact_tokens >= len(B)
    assert served(same_as_vanilla(make_model(seed=1), A + question(2), loaded).report) == 0
    assert same_as_vanilla(make_model(), A + question(2), loaded).report.exact_tokens >= len(A)


def changed_scale(model):
    model.model.layers[1].self_attn.scaling *= 0.5


def changed_forward(model):
    own = type(model.model.layers[1].mlp).forward
    layer = model.model.layers[1].mlp
    layer.forward = lambda states: 0.5 * own(layer, states)


def changed_weight(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.01)


def changed_config(model):
    model.config.rms_norm_eps = 1e-3


@pytest.mark.parametrize("change", [changed_scale, changed_forward, changed_weight, changed_config])
def test_a_changed_model_finds_nothing(change, tmp_path):
    cache = SuffixCache(fidelity="exact")
    ask(make_model(), A + question(1), cache)
    cache.save(tmp_path)
    model = make_model()
    change(model)
    assert served(ask(model, A + question(2), SuffixCache.load(tmp_path, fidelity="exact")).report) == 0
    forget(model)


def portable(model, warm_up=()):
    table = IdentityTable(lambda model: "sdpa")
    for other in warm_up:
        table.get(other, 0)
    return table.get(model, 0)[0].portable


@pytest.mark.parametrize("kind", (*CORE, *BREADTH, "gpt2", "opt", "dynamic"))
def test_settings_are_told_alike_whatever_was_met_before(kind):
    told = portable(make_model(kind))
    assert told is not None
    assert portable(make_model(kind, seed=3), [make_model("gpt2"), make_model("llama", seed=5)]) == told
    assert portable(make_model(kind, attention_dropout=0.25)) != told


def test_what_a_hook_does_can_not_be_told(tmp_path, caplog):
    model = make_model(spy=True)
    assert portable(model) is None
    cache = SuffixCache(fidelity="exact")
    ask(model, A + question(1), cache)
    ask(make_model(), A + question(1), cache)
    assert cache.save(tmp_path).segments == 1
    assert "can't be told in another process" in caplog.text
    loaded = SuffixCache.load(tmp_path, fidelity="exact")
    assert served(ask(make_model(spy=True), A + question(2), loaded).report) == 0


def test_functions_are_told_by_what_they_do():
    def first(x, scale=2.0):
        return x * scale

    def second(x, scale=3.0):
        return x * scale

    models = [make_model() for _ in range(4)]
    for model, function in zip(models, (first, first, second), strict=False):
        model.model.extra = function
    told = [portable(model) for model in models]
    assert told[0] == told[1] and len(set(told)) == 3 and None not in told
    models[0].model.extra = object()  # nobody knows what it does
    assert portable(models[0]) is None


# -- sessions -------------------------------------------------------------------------------------------------------


def test_scopes_stay_apart(tmp_path):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    cache.register(model, D, at="front")
    ask(model, A + question(1), cache.session("alice"))
    ask(model, B + question(1), cache.session(7))
    ask(model, C + question(1), cache)
    cache.save(tmp_path)
    loaded, same = SuffixCache.load(tmp_path, fidelity="exact"), make_model()
    for handle in (loaded, loaded.session("7"), loaded.session("bob")):
        for text in (A, B):
            assert served(ask(same, text + question(2), handle.using(store=False)).report) == 0
    assert served(ask(same, C + question(2), loaded.session("alice").using(store=False)).report) == 0
    for handle, text in ((loaded.session("alice"), A), (loaded.session(7), B), (loaded, C)):
        assert ask(same, text + question(3), handle).report.exact_tokens >= len(text)
    for handle in (loaded, loaded.session("new"), loaded.session("alice")):
        assert ask(same, D + question(4), handle).report.exact_tokens >= len(D) - 1
    check_pool(loaded)


def test_another_namespace_sees_nothing(tmp_path):
    model, cache = make_model(), SuffixCache(fidelity="exact", namespace="a")
    cache.register(model, A, at="front")
    ask(model, B + question(1), cache)
    cache.save(tmp_path)
    for namespace, seen in (("", False), ("b", False), ("a", True)):
        loaded = SuffixCache.load(tmp_path, fidelity="exact", namespace=namespace)
        for text in (A, B):
            assert (served(ask(model, text + question(2), loaded).report) > 0) is seen


def test_sessions_go_on_with_the_life_that_was_left(tmp_path):
    model, clock = make_model(), Clock()
    cache = SuffixCache(fidelity="exact", clock=clock)
    ask(model, A + question(1), cache.session("alice", ttl=100))
    ask(model, B + question(1), cache.session("eve", ttl=None))
    clock.now += 40
    cache.save(tmp_path)

    def ask_after(seconds: float, waited: float, name: str, text) -> int:
        """`seconds` in this process after the load, and `waited` between save and load."""
        rewrite(tmp_path, lambda contents: contents.update(saved=time.time() - waited))
        clock = Clock(5e6)
        loaded = SuffixCache.load(tmp_path, fidelity="exact", clock=clock)
        clock.now += seconds
        ttl = 100 if name == "alice" else None
        return served(ask(make_model(), text + question(2), loaded.session(name, ttl=ttl)).report)

    assert ask_after(50, 0, "alice", A) > 0
    assert ask_after(61, 0, "alice", A) == 0
    assert ask_after(0, 55, "alice", A) > 0
    assert ask_after(0, 61, "alice", A) == 0
    assert ask_after(1e6, 1e6, "eve", B) > 0
    assert ask_after(0, -1e6, "alice", A) > 0  # the clock of the machine was put back


@pytest.mark.parametrize("ends", ["a longer life", "its end"])
def test_what_waits_expires_by_the_life_that_a_session_has_meanwhile(tmp_path, ends):
    """Its rows of this model wait in the folder, while calls of another model go on in the same session."""
    clock, first = Clock(), make_model()
    cache = SuffixCache(fidelity="exact", clock=clock)
    ask(first, A + question(1), cache.session("alice", ttl=None))
    cache.save(tmp_path)
    for ttl, expected in ((100, 0), (None, len(A))):  # the second one is the control
        loaded, other = SuffixCache.load(tmp_path, fidelity="exact", clock=clock), make_model("qwen2")
        ask(other, B + question(1), loaded.session("alice", ttl=ttl))
        clock.now += 101
        if ends == "its end":
            assert (loaded.stats.segments == 0) == (ttl is not None)
        report = ask(make_model(), A + question(2), loaded.session("alice", ttl=None)).report
        assert report.exact_tokens == expected
        check_pool(loaded)


def test_what_waits_is_saved_with_the_life_that_its_session_has_now(tmp_path):
    clock, model = Clock(), make_model()
    cache = SuffixCache(fidelity="exact", clock=clock)
    ask(model, A + question(1), cache.session("alice", ttl=None))
    cache.save(tmp_path)
    for ttl, expected in ((100, 0), (None, len(A))):  # the second one is the control
        loaded, other = SuffixCache.load(tmp_path, fidelity="exact", clock=clock), make_model("qwen2")
        ask(other, B + question(1), loaded.session("alice", ttl=ttl))
        loaded.save(tmp_path / str(ttl))
        clock.now += 101
        rewrite(tmp_path / str(ttl), lambda contents: contents.update(saved=time.time() - 101))
        again = SuffixCache.load(tmp_path / str(ttl), fidelity="exact", clock=clock)
        report = ask(make_model(), A + question(2), again.session("alice", ttl=None)).report
        assert report.exact_tokens == expected


def test_expired_sessions_are_not_saved_again(tmp_path):
    model, clock = make_model(), Clock()
    cache = SuffixCache(clock=clock)
    ask(model, A + question(1), cache.session("alice", ttl=100))
    ask(model, B + question(1), cache)
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path, clock=clock)
    clock.now += 200
    loaded.save(tmp_path)
    assert [shelf["place"]["kind"] for shelf in contents_of(tmp_path)["shelves"]] == ["anonymous"]


def test_a_change_of_topic_outlives_a_restart(tmp_path):
    model, clock = make_model(), Clock()
    cache = SuffixCache(clock=clock)
    alice = cache.session("alice")
    ask(model, A + B + question(1), alice)
    clock.now += 1
    cache._store.sessions.get(alice._scope).cutoff = clock.now  # what leaving the topic does
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path, clock=clock, topic_similarity=0.0)
    report = ask(make_model(), head(2) + B + question(2), loaded.session("alice")).report
    assert report.shifted_tokens + report.repaired_tokens == 0
    cache._store.sessions.get(alice._scope).cutoff = float("-inf")  # control
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path, clock=clock, topic_similarity=0.0)
    report = ask(make_model(), head(2) + B + question(2), loaded.session("alice")).report
    assert report.shifted_tokens + report.repaired_tokens > 0


def test_shared_rows_that_only_a_session_refers_to_come_back(tmp_path):
    model = make_model()
    cache = SuffixCache(fidelity="exact", share_prefix=tuple(A))
    ask(model, A + B + question(1), cache.session("alice"))
    (shelf,) = (each for each in cache._store.shelves.values() if each.scope.kind == "shared")
    with cache._store.lock:
        for sequence in list(shelf.sequences):  # as eviction may do
            shelf.remove(sequence)
    assert len(shelf.segments) == 1
    for step in range(3):  # saved live, waiting, and live again
        cache.save(tmp_path / str(step))
        cache = SuffixCache.load(tmp_path / str(step), fidelity="exact", share_prefix=tuple(A))
        if step == 1:
            got = ask(make_model(), A + B + question(2), cache.session("alice").using(store=False))
            assert got.report.exact_tokens >= len(A + B)
            check_pool(cache)
    assert ask(make_model(), A + B + question(2), cache.session("alice")).report.exact_tokens >= len(A + B)
    check_pool(cache)


def test_shared_rows_change_while_what_refers_to_them_waits(tmp_path, caplog):
    """A session's conversation begins with shared rows that are kept in 8 bits meanwhile: it is not lost."""
    cache = SuffixCache(share_prefix=tuple(A), keep_conversations=0)
    model = make_model()
    ask(model, A + B + question(1), cache.session("alice"))
    cache.save(tmp_path)
    small = dict(share_prefix=tuple(A), keep_conversations=0, store_dtype="int8")
    loaded, again = SuffixCache.load(tmp_path, **small), make_model()
    for number in range(3):  # used twice, so brought into memory, and converted
        ask(again, A + question(2 + number), loaded.session("bob"))
    (shared,) = (each for each in loaded._store.shelves.values() if each.scope.kind == "shared")
    assert all(segment.state == "derived" for segment in shared.segments)
    loaded.save(tmp_path)  # alice's shelf waits still
    for cache, fidelity in itertools.product((loaded, SuffixCache.load(tmp_path, **small)), ("exact", "balanced")):
        handle = cache.session("alice").using(fidelity=fidelity, store=False)
        report = ask(again, A + B + question(5), handle).report
        assert report.exact_tokens == 0
        assert (served(report) >= len(B)) == (fidelity == "balanced")
        check_pool(cache)
    assert "damaged" not in caplog.text


def test_clear_forgets_what_waits_too(tmp_path):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    ask(model, A + question(1), cache.session("alice"))
    ask(model, B + question(1), cache)
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact")
    loaded.clear(session="alice")
    assert served(ask(model, A + question(2), loaded.session("alice")).report) == 0
    assert served(ask(model, B + question(2), loaded).report) > 0
    loaded = SuffixCache.load(tmp_path, fidelity="exact")
    loaded.clear()
    assert served(ask(model, B + question(2), loaded).report) == 0
    loaded.clear()
    loaded.save(tmp_path)
    assert contents_of(tmp_path)["shelves"] == [] and row_files(tmp_path) == []


# -- in files and in memory -----------------------------------------------------------------------------------------


def test_rows_stay_in_files_until_they_are_used_twice(tmp_path):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    ask(model, A + B + question(1), cache)
    ask(model, C + question(1), cache)
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact").using(store=False)
    store = loaded._store

    def mapped() -> int:
        return sum(len(pool.mapped) for pool in store.pools.values())

    ask(model, A + B + question(2), loaded)
    assert mapped() == 2 and loaded.stats.bytes_used == 0
    got = same_as_vanilla(model, A + B + question(3), loaded)
    assert mapped() == 1 and loaded.stats.bytes_used > 0
    assert got.report.exact_tokens >= len(A + B)
    assert same_as_vanilla(model, A + B + question(4), loaded).report.exact_tokens >= len(A + B)
    check_pool(loaded)


def test_rows_stay_in_files_where_memory_has_no_room(tmp_path):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    for number in range(8):
        ask(model, old_text(150, number) + question(number), cache)
    cache.save(tmp_path)
    row = 3 * 2 * 2 * 16 * 4
    loaded = SuffixCache.load(tmp_path, fidelity="exact", max_bytes=420 * row)
    for round_number in range(3):
        for number in range(8):
            prompt = old_text(150, number) + question(10 * round_number + number + 20)
            assert same_as_vanilla(model, prompt, loaded, steps=2).report.exact_tokens >= 150
            check_pool(loaded)
    assert loaded.stats.bytes_total <= 420 * row


def test_expired_rows_leave_their_files(tmp_path):
    model, clock = make_model(), Clock()
    cache = SuffixCache(fidelity="exact", clock=clock)
    ask(model, A + question(1), cache.session("alice", ttl=100))
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact", clock=clock)
    assert served(ask(model, A + question(2), loaded.session("alice", ttl=100).using(store=False)).report) > 0
    clock.now += 200
    assert loaded.stats.segments == 0
    assert all(not pool.mapped for pool in loaded._store.pools.values())
    check_pool(loaded)


def test_nothing_that_is_served_writes_to_a_file(tmp_path):
    model, cache = make_model(), SuffixCache()
    conversation = fill(model, cache)
    cache.save(tmp_path)
    before = {path.name: path.read_bytes() for path in row_files(tmp_path)}
    loaded = SuffixCache.load(tmp_path)
    for _ in range(3):
        for prompt in later(conversation):
            ask(model, prompt, loaded, return_dict_in_generate=True)
    assert {path.name: path.read_bytes() for path in row_files(tmp_path)} == before


def test_rows_of_files_that_were_removed_are_still_served(tmp_path):
    """Another process saves to the folder, and sweeps it, while this one has it open."""
    model, cache = make_model(), SuffixCache(fidelity="exact")
    ask(model, A + question(1), cache)
    cache.save(tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact")
    other = SuffixCache(fidelity="exact")
    ask(model, B + question(1), other)
    other.save(tmp_path)
    assert same_as_vanilla(model, A + question(2), loaded).report.exact_tokens >= len(A)
    loaded.save(tmp_path)  # and they can be saved again, from the file that is gone
    again = SuffixCache.load(tmp_path, fidelity="exact")
    assert same_as_vanilla(model, A + question(3), again).report.exact_tokens >= len(A)
    assert served(ask(model, B + question(3), again).report) == 0  # the last one to save wins


# -- what is written ------------------------------------------------------------------------------------------------


def test_files_are_safetensors_and_json(tmp_path):
    model, cache = make_model(), SuffixCache(store_dtype="int8", keep_conversations=0)
    fill(model, cache)
    cache.save(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["format"] == "hf_suffix_cache store" and index["version"] == 1
    names = {each["name"] for each in index["contents"]["files"]} | {index["contents"]["tokens"]["name"]}
    assert {path.name for path in tmp_path.glob("*.safetensors")} == names
    total = 0
    for path in row_files(tmp_path):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                total += file.get_tensor(name).numel()
    rows = sum(each["rows"] for shelf in index["contents"]["shelves"] for each in shelf["segments"])
    assert total >= rows * 3 * 2 * 2 * 16
    with safe_open(next(tmp_path.glob("tokens-*")), framework="pt") as file:
        assert set(file.keys()) == {"texts", "numbers", "reach", "flags"}


def test_each_text_is_written_once(tmp_path):
    texts = [np.array(text, dtype=np.int64) for text in ([1, 2], [1, 2, 3], [2], [1, 2, 3, 4], [1, 3], [1, 2])]
    table = TextTable(texts)
    assert len(table.joined) == 4 + 1 + 2
    for text in texts:
        start = table.start(text)
        assert table.joined[start : start + len(text)].tolist() == text.tolist()
    model, cache = make_model(), SuffixCache(fidelity="exact")
    conversation = A + question(1)
    for turn in range(6):
        conversation = ask(model, conversation, cache).tokens() + new_text(10, turn)
    cache.save(tmp_path)
    assert contents_of(tmp_path)["tokens"]["texts"] < len(conversation)


def test_only_what_is_new_is_written(tmp_path):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    ask(model, A + question(1), cache)
    first = cache.save(tmp_path)
    before = row_files(tmp_path)
    assert first.bytes_written > 0 and first.bytes_kept == 0
    ask(model, B + question(1), cache)
    second = cache.save(tmp_path)
    assert second.bytes_kept == first.bytes_written and 0 < second.bytes_written
    assert set(before) < set(row_files(tmp_path))
    third = cache.save(tmp_path)
    assert third.bytes_written == 0 and third.segments == 2
    elsewhere = cache.save(tmp_path / "elsewhere")
    assert elsewhere.bytes_kept == 0 and elsewhere.bytes_written == third.bytes_kept
    before[0].unlink()  # what is missing there is written again
    assert cache.save(tmp_path).bytes_written >= first.bytes_written
    loaded = SuffixCache.load(tmp_path, fidelity="exact")
    for text in (A, B):
        assert same_as_vanilla(model, text + question(2), loaded).report.exact_tokens >= len(text)


def test_files_of_little_use_are_written_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "FILE_BYTES", 400 << 10)
    model, cache = make_model(), SuffixCache(fidelity="exact")
    for number in range(12):
        ask(model, old_text(60, number) + question(number), cache.session(number))
    cache.save(tmp_path)
    assert len(row_files(tmp_path)) > 1
    for number in range(11):
        cache.clear(session=number)
    saved = cache.save(tmp_path)
    assert saved.segments == 1 and len(row_files(tmp_path)) == 1
    assert row_files(tmp_path)[0].stat().st_size < saved.bytes_kept + saved.bytes_written + 4096
    report = same_as_vanilla(
        model, old_text(60, 11) + question(30), SuffixCache.load(tmp_path, fidelity="exact").session(11)
    ).report
    assert report.exact_tokens >= 60


def test_two_models_with_the_same_rows_share_a_file(tmp_path):
    cache = SuffixCache(fidelity="exact")
    for _ in range(2):
        ask(make_model(), A + question(1), cache)
    model = make_model()
    ask(model, A + question(1), cache)
    cache.save(tmp_path)
    assert same_as_vanilla(model, A + question(2), SuffixCache.load(tmp_path, fidelity="exact")).report.exact_tokens
    cache.save(tmp_path)
    SuffixCache.load(tmp_path)


def test_nobody_else_may_read_the_files(tmp_path):
    model, cache = make_model(), SuffixCache()
    ask(model, A + question(1), cache)
    folder = tmp_path / "new" / "store"
    cache.save(folder)
    if os.name == "posix":
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in folder.iterdir())


def test_wrong_folders_are_named(tmp_path):
    cache = SuffixCache()
    with pytest.raises(FileNotFoundError, match="no store in"):
        SuffixCache.load(tmp_path / "nowhere")
    with pytest.raises(TypeError):
        cache.save(None)
    (tmp_path / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match="not of a saved store"):
        cache.save(tmp_path)
    with pytest.raises(ValueError, match="no index of a saved store"):
        SuffixCache.load(tmp_path)
    assert (tmp_path / INDEX).read_text() == '{"weight_map": {}}'
    assert [path.name for path in tmp_path.iterdir()] == [INDEX]  # and no lock is left in it
    with pytest.raises(TypeError, match="unknown"):
        SuffixCache.load(tmp_path, fidelty="exact")


def test_an_empty_store_comes_back_empty(tmp_path):
    SuffixCache().save(tmp_path)
    loaded = SuffixCache.load(tmp_path)
    assert loaded.stats.segments == 0
    ask(make_model(), A + question(1), loaded)
    check_pool(loaded)


def test_strangers_in_the_folder_are_left_alone(tmp_path):
    strangers = ["notes.txt", "rows-1.safetensors", "model.safetensors", "rows-" + 32 * "g" + ".safetensors", "x.tmp"]
    for name in strangers:
        (tmp_path / name).write_text("mine")
    leftovers = ["rows-" + 32 * "a" + ".safetensors", "saving-" + 32 * "0" + ".tmp"]
    for name in leftovers:
        (tmp_path / name).write_text("of a crash")
    SuffixCache().save(tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in strangers)
    assert not any((tmp_path / name).exists() for name in leftovers)


# -- faults and crashes ---------------------------------------------------------------------------------------------


def two_stores() -> tuple:
    """A model, and two caches that hold different texts of it."""
    model, caches = make_model(), [SuffixCache(fidelity="exact") for _ in range(2)]
    for cache, texts in zip(caches, ((A, B), (C, D)), strict=True):
        for text in texts:
            ask(model, text + question(1), cache)
    return model, caches


def which_store(model, folder) -> int:
    """0 or 1: which of the two is in a folder, whole."""
    loaded = SuffixCache.load(folder, fidelity="exact").using(store=False)
    hits = [ask(model, text + question(2), loaded).report.exact_tokens >= len(text) for text in (A, B, C, D)]
    assert hits in ([True, True, False, False], [False, False, True, True]), hits
    return int(hits[2])


@pytest.mark.parametrize("site", ["fsync", "replace", "_private"])
def test_a_save_that_fails_leaves_a_whole_store(site, tmp_path, monkeypatch):
    """Every place at which the disk may be full or gone, one after the other."""
    model, (old, new) = two_stores()
    old.save(tmp_path)
    owner = files if site == "_private" else os
    real, seen, failing = getattr(owner, site), [], 0
    while True:
        calls = 0

        def fails(*arguments, failing=failing):
            nonlocal calls
            calls += 1
            if calls > failing:
                raise OSError(errno.ENOSPC, "no space left on device")
            return real(*arguments)

        new._store.dormant.stored.clear()  # write all of it each time
        with monkeypatch.context() as patch:
            patch.setattr(owner, site, fails)
            try:
                new.save(tmp_path)
                break
            except OSError:
                seen.append(which_store(model, tmp_path))
        assert not list(tmp_path.glob("*.tmp"))
        check_pool(new)
        failing += 1
    # only the last of all, once the index is in its place, may be one too many
    assert len(seen) >= 3 and seen[:-1] == [0] * (len(seen) - 1)
    assert which_store(model, tmp_path) == 1


def test_the_old_store_survives_a_failure_after_rows_of_the_same_name(tmp_path, monkeypatch):
    """Rows that are equal have one file: taking back what a failed save wrote must not take that away."""
    model, caches = make_model(), [SuffixCache(fidelity="exact") for _ in range(2)]
    for cache in caches:
        ask(model, A + question(1), cache)
    caches[0].save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(persistence, "pack_index", lambda contents: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            caches[1].save(tmp_path)
    assert same_as_vanilla(model, A + question(2), SuffixCache.load(tmp_path, fidelity="exact")).report.exact_tokens


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_save_that_is_killed_leaves_the_old_store_or_the_new_one(tmp_path):
    """benchmarks/persistence.py kills 200; here are 25."""
    model, caches = two_stores()
    caches[0].save(tmp_path)
    seconds = []
    for cache in (caches[1], caches[0]):
        started = time.perf_counter()
        cache.save(tmp_path / f"timed {len(seconds)}")
        seconds.append(time.perf_counter() - started)
    generator, seen = random.Random(0), []
    for _ in range(25):
        process = os.fork()
        if process == 0:
            for cache in (*caches, *caches):
                cache._store.dormant.stored.clear()  # write all of it each time
                cache.save(tmp_path)
            os._exit(0)
        time.sleep(generator.uniform(0, 4 * max(seconds)))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        seen.append(which_store(model, tmp_path))
    assert set(seen) == {0, 1}  # control: some came to the new one
    caches[1].save(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


def test_calls_go_on_while_the_store_is_saved(tmp_path):
    model, cache = make_model(), SuffixCache(fidelity="exact", max_bytes=2 << 20)
    want = {number: ask(model, old_text(60, number) + question(number), steps=3).tokens() for number in range(8)}
    stop = threading.Event()

    def work(first: int):
        for step in range(24):
            number = (first + step) % 8
            answer = ask(model, old_text(60, number) + question(number), cache, steps=3)
            assert answer.tokens() == want[number]
        stop.set()

    def saver():
        saved = 0
        while not stop.is_set() or saved == 0:
            cache.save(tmp_path)
            loaded = SuffixCache.load(tmp_path, fidelity="exact").using(store=False)
            assert ask(model, old_text(60, 0) + question(0), loaded, steps=3).tokens() == want[0]
            check_pool(loaded)
            saved += 1

    in_threads([lambda first=first: work(first) for first in range(3)] + [saver])
    check_pool(cache)


def test_readers_and_writers_at_once(tmp_path):
    """Several caches save to one folder while others open it: whoever opens it finds one of the stores, whole."""
    model, caches = two_stores()
    caches[0].save(tmp_path)
    results = []

    def write(cache):
        for _ in range(6):
            cache._store.dormant.stored.clear()
            cache.save(tmp_path)

    def read():
        for _ in range(8):
            results.append(which_store(model, tmp_path))

    in_threads([lambda cache=cache: write(cache) for cache in caches] + [read, read])
    assert len(results) == 16
    assert not list(tmp_path.glob("*.tmp"))


SECOND_PROCESS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from hf_suffix_cache import SuffixCache
from reference import ask
from tiny_models import make_model
make_model("gpt2")
model = make_model(sys.argv[4])
cache = SuffixCache.load(sys.argv[1])
found = []
for prompt in json.loads(sys.argv[3]):
    report = ask(model, prompt, cache).report
    found.append([[[s.start, s.stop, s.kind, s.shift] for s in row] for row in report.spans])
print(json.dumps([found, cache.stats.exact_tokens]))
"""


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "phi3"])
def test_another_process_makes_the_same_plans(kind, tmp_path):
    model, cache = make_model(kind), SuffixCache()
    conversation = fill(model, cache)
    cache.save(tmp_path)
    prompts = later(conversation)
    before = cache.stats.exact_tokens
    want = [[[list(span) for span in row] for row in plan_of(ask(model, prompt, cache).report)] for prompt in prompts]
    command = [
        sys.executable,
        "-c",
        SECOND_PROCESS,
        str(tmp_path),
        str(Path(__file__).parent),
        json.dumps(prompts),
        kind,
    ]
    seed = str(
        1 + int(os.environ.get("PYTHONHASHSEED", "0") or 0) if os.environ.get("PYTHONHASHSEED") != "random" else 3
    )
    environment = os.environ | {"PYTHONHASHSEED": seed, "HF_SUFFIX_CACHE_BUILD": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found, exact = json.loads(done.stdout.splitlines()[-1])
    assert found == want
    assert exact == cache.stats.exact_tokens - before > 0
