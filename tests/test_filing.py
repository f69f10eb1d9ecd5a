"""Texts that are registered straight to a folder: bounded memory, rows served from files, interrupted runs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hf_suffix_cache import SuffixCache, registration
from hf_suffix_cache.store import filing
from reference import ask, check_pool, in_threads, same_as_vanilla
from test_persistence import contents_of, row_files, served
from tiny_models import A, B, C, forget, head, make_model, question

ROW = 3 * 2 * 2 * 16 * 4  # bytes of one in the tiny Llama


def passages(count: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, 250, int(size)).tolist() for size in generator.integers(20, 60, count)]


def mapped(cache) -> int:
    return sum(len(pool.mapped) for pool in cache._store.pools.values())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3"])
def test_rows_of_a_folder_are_those_of_a_full_prefill(kind, tmp_path):
    model, texts = make_model(kind), passages(40)
    texts[0], texts[17], texts[39] = texts[0][:40], texts[17][:33], texts[39][:50]  # phi3 has other angles from 64 on
    cache = SuffixCache(fidelity="exact")
    assert cache.register(model, texts, at="front", folder=tmp_path) == sum(map(len, texts))
    assert cache.stats.bytes_used == 0 and mapped(cache) == 40
    assert cache.stats.requests < 20  # in batches, also where lengths differ (gpt2 takes positions too)
    check_pool(cache)
    for number in (0, 17, 39):
        got = same_as_vanilla(model, texts[number] + question(number)[:6], cache)
        assert got.report.exact_tokens >= len(texts[number])
    again = SuffixCache.load(tmp_path, fidelity="exact")
    same = make_model(kind)
    again.register(same, texts, at="front", folder=tmp_path)
    assert again.stats.computed_rows == 0
    for number in (0, 17):
        got = same_as_vanilla(same, texts[number] + question(number)[:6], again.session("alice"))
        assert got.report.exact_tokens >= len(texts[number])
    check_pool(again)


def test_texts_to_be_moved_are_behind_the_sink_prefix(tmp_path):
    """What is served moved is the same whether it was registered in memory one by one, or in batches to a folder."""
    model, texts = make_model(), passages(12, seed=3)
    plain, filed = SuffixCache(), SuffixCache()
    plain.register(model, texts)
    filed.register(model, texts, folder=tmp_path)
    prompt = head(1) + texts[4] + texts[9] + question(1)
    want, got = ask(model, prompt, plain), ask(model, prompt, filed)
    assert got.report.shifted_tokens == want.report.shifted_tokens > 0
    assert got.report.repaired_tokens == want.report.repaired_tokens
    assert got.tokens() == want.tokens()
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(got.scores, want.scores, strict=True))


def test_memory_stays_within_the_budget(tmp_path, monkeypatch):
    model, texts = make_model(), passages(200)
    cache = SuffixCache(fidelity="exact", max_bytes=1600 * ROW)  # a fifth of the texts
    written = []
    real = filing.persistence.save
    monkeypatch.setattr(
        filing.persistence, "save", lambda *a, **k: (written.append(cache._store.bytes_total), real(*a, **k))[1]
    )
    cache.register(model, texts, at="front", folder=tmp_path)
    assert len(written) > 5 and max(written) <= 1600 * ROW
    assert cache.stats.evictions == 0  # control: nothing had to go that was not written yet
    for text in texts[::20]:
        assert same_as_vanilla(model, text + question(1), cache, steps=1).report.exact_tokens >= len(text)
    assert cache.stats.bytes_total <= 1600 * ROW
    check_pool(cache)


def test_what_is_there_is_not_run_again(tmp_path):
    model, texts = make_model(), passages(30)
    cache = SuffixCache(fidelity="exact")
    cache.register(model, texts[:20] + texts[:5], at="front", folder=tmp_path)
    rows = cache.stats.computed_rows
    cache.register(model, texts[:20], at="front", folder=tmp_path)
    assert cache.stats.computed_rows == rows
    index = (tmp_path / "index.json").read_bytes()
    other = SuffixCache(fidelity="exact")  # new and empty, as in a notebook that is run again: it opens the folder
    other.register(make_model(), texts, at="front", folder=tmp_path)
    assert 0 < other.stats.computed_rows <= 2 * sum(map(len, texts[20:]))
    assert (tmp_path / "index.json").read_bytes() != index
    assert len(contents_of(tmp_path)["shelves"][0]["sequences"]) == 30
    stranger = SuffixCache(fidelity="exact")
    stranger.register(make_model(seed=1), texts[:3], at="front", folder=tmp_path)  # another model's rows join them
    assert len(contents_of(tmp_path)["shelves"]) == 2
    got = same_as_vanilla(model, texts[29] + question(1), SuffixCache.load(tmp_path, fidelity="exact"))
    assert got.report.exact_tokens >= len(texts[29])


def test_nothing_but_shared_text_is_written(tmp_path):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    ask(model, A + question(1), cache.session("alice"))
    ask(model, B + question(1), cache)
    cache.register(model, [C], at="front", folder=tmp_path)
    ask(model, C + question(2), cache.session("alice"))  # refers to what is shared
    cache.register(model, [A[:30]], at="front", folder=tmp_path)
    assert [shelf["place"]["kind"] for shelf in contents_of(tmp_path)["shelves"]] == ["shared"]
    loaded = SuffixCache.load(tmp_path, fidelity="exact")
    assert served(ask(model, B + question(2), loaded.using(store=False)).report) == 0
    assert ask(model, C + question(2), loaded).report.exact_tokens == len(C)
    # they are still served here, and a save that means all keeps all
    assert ask(model, A + question(2), cache.session("alice")).report.exact_tokens >= len(A)
    cache.save(tmp_path)
    kinds = {shelf["place"]["kind"] for shelf in contents_of(tmp_path)["shelves"]}
    assert kinds == {"shared", "session", "anonymous"}
    # and what a save has put there stays when more is registered, by whoever has loaded it
    loaded = SuffixCache.load(tmp_path, fidelity="exact")
    ask(model, head(9) + question(9), loaded)  # not this
    loaded.register(model, [C[::-1]], at="front", folder=tmp_path)
    last = SuffixCache.load(tmp_path, fidelity="exact")
    assert ask(model, A + question(3), last.session("alice")).report.exact_tokens >= len(A)
    assert ask(model, B + question(3), last).report.exact_tokens >= len(B)
    assert served(ask(model, head(9) + question(9), last.using(store=False)).report) == 0
    check_pool(last)


def test_folders_that_are_not_ours_are_refused(tmp_path):
    model, cache = make_model(), SuffixCache(fidelity="exact")
    SuffixCache(fidelity="exact").register(model, [A], at="front", folder=tmp_path)
    ask(model, B + question(1), cache)
    index, requests = (tmp_path / "index.json").read_bytes(), cache.stats.requests
    with pytest.raises(ValueError, match="was not loaded from"):
        cache.register(model, [C], at="front", folder=tmp_path)
    with pytest.raises(ValueError, match="need no pin"):
        cache.register(model, [C], at="front", folder=tmp_path / "new", pin=True)
    spied = make_model(spy=True)
    with pytest.raises(ValueError, match="can't be told in another process"):
        cache.register(spied, [C], at="front", folder=tmp_path / "new")
    assert (tmp_path / "index.json").read_bytes() == index and not (tmp_path / "new").exists()
    assert cache.stats.requests == requests  # nothing was run
    forget(spied)


def test_two_who_register_to_one_folder_do_not_undo_each_other(tmp_path, monkeypatch):
    model, texts = make_model(), passages(20)
    first, second = SuffixCache(fidelity="exact"), SuffixCache(fidelity="exact")
    monkeypatch.setattr(filing, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(registration, "BATCH_TEXTS", 3)
    real = filing.persistence.save
    calls = []

    def save(store, *arguments, **options):
        calls.append(store)
        if len(calls) == 2:  # the other one comes in between
            second.register(model, texts[10:], at="front", folder=tmp_path)
        return real(store, *arguments, **options)

    monkeypatch.setattr(filing.persistence, "save", save)
    with pytest.raises(ValueError, match="by somebody else meanwhile"):
        first.register(model, texts[:10], at="front", folder=tmp_path)
    loaded = SuffixCache.load(tmp_path, fidelity="exact")
    for text in texts[10:]:
        assert same_as_vanilla(model, text + question(1), loaded, steps=1).report.exact_tokens >= len(text)


def test_a_run_that_fails_has_written_what_was_done(tmp_path, monkeypatch):
    model, texts = make_model(), passages(100)
    cache = SuffixCache(fidelity="exact")
    real, calls = model.generate, []

    def generate(*arguments, **options):
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    model.generate = generate
    with pytest.raises(KeyboardInterrupt):
        cache.register(model, texts, at="front", folder=tmp_path)
    del model.generate
    assert len(contents_of(tmp_path)["shelves"][0]["sequences"]) == 64


def test_texts_that_find_no_room_are_told(tmp_path, caplog):
    model = make_model()
    cache = SuffixCache(fidelity="exact", max_bytes=160 * ROW)
    short, long = passages(3), np.random.default_rng(1).integers(3, 250, 300).tolist()
    cache.register(model, [*short, long], at="front", folder=tmp_path)
    assert "1 texts were not stored" in caplog.text
    assert len(contents_of(tmp_path)["shelves"][0]["sequences"]) == 3


@pytest.mark.parametrize("store_dtype", ["bfloat16", "int8"])
def test_rows_in_a_smaller_dtype_are_filed_too(store_dtype, tmp_path):
    model, texts = make_model(), passages(20)
    cache = SuffixCache(store_dtype=store_dtype, keep_conversations=0)
    cache.register(model, texts, folder=tmp_path)
    rows = cache.stats.computed_rows
    prompt = head(1) + texts[4] + question(1)
    assert served(ask(model, prompt, cache).report) > 0
    loaded = SuffixCache.load(tmp_path, store_dtype=store_dtype, keep_conversations=0)
    loaded.register(model, texts, folder=tmp_path)
    assert loaded.stats.computed_rows == 0 < rows
    assert served(ask(model, prompt, loaded).report) > 0
    check_pool(loaded)


def test_calls_go_on_while_texts_are_registered(tmp_path, monkeypatch):
    monkeypatch.setattr(filing, "CHECKPOINT_SECONDS", 0.05)
    monkeypatch.setattr(registration, "BATCH_TEXTS", 8)
    model, texts = make_model(), passages(150)
    cache = SuffixCache(fidelity="exact", max_bytes=4000 * ROW)
    want = {number: ask(model, texts[number] + question(number), steps=3).tokens() for number in range(6)}
    done = threading.Event()

    def registers():
        try:
            cache.register(model, texts, at="front", folder=tmp_path)
        finally:
            done.set()

    def asks(first: int):
        step = first
        while not done.is_set() or step < first + 12:
            number = step % 6
            answer = ask(model, texts[number] + question(number), cache.session(first), steps=3)
            assert answer.tokens() == want[number]
            step += 1

    in_threads([registers, *(lambda first=first: asks(first) for first in range(2))])
    for number in range(6):
        assert ask(model, texts[number] + question(9), cache, steps=1).report.exact_tokens >= len(texts[number])
    check_pool(cache)


REGISTERING = """
import json, sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from hf_suffix_cache import SuffixCache, registration
from hf_suffix_cache.store import filing
from test_filing import passages
from tiny_models import make_model
filing.CHECKPOINT_SECONDS = 0.1
registration.BATCH_TEXTS = 8
cache = SuffixCache(fidelity="exact", max_bytes=4 << 20)
model = make_model()
print("begins", flush=True)
cache.register(model, passages(int(sys.argv[3])), at="front", folder=sys.argv[1])
print(json.dumps(cache.stats.computed_rows))
"""


def register_in_process(folder, count: int):
    command = [sys.executable, "-c", REGISTERING, str(folder), str(Path(__file__).parent), str(count)]
    environment = os.environ | {"HF_SUFFIX_CACHE_BUILD": "0"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.skipif(os.name != "posix", reason="needs kill -9")
@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_where_it_was(kills, tmp_path):
    count, found = 400, [0]
    for _ in range(kills):
        before = len(row_files(tmp_path))
        process = register_in_process(tmp_path, count)
        assert process.stdout.readline() == "begins\n"
        deadline = time.monotonic() + 60
        while len(row_files(tmp_path)) < before + 2 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL  # control: it was still at work
        found.append(len(contents_of(tmp_path)["shelves"][0]["sequences"]))
    assert all(before < after < count for before, after in zip(found, found[1:], strict=False))
    process = register_in_process(tmp_path, count)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error[-2000:]
    texts = passages(count)
    rest = sum(sorted(map(len, texts))[: count - found[-1]])
    assert json.loads(out.splitlines()[-1]) <= 1.1 * rest + 100  # no more than what was missing, and padding
    model, loaded = make_model(), SuffixCache.load(tmp_path, fidelity="exact")
    for text in texts[::60]:
        assert same_as_vanilla(model, text + question(1), loaded, steps=1).report.exact_tokens >= len(text)
    assert not list(tmp_path.glob("*.tmp"))
