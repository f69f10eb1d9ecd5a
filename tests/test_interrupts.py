"""A call may be broken off anywhere: nothing leaks, nothing wrong is served, what was stored is found again."""

import gc
import threading

import numpy as np
import pytest
import torch

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.store.store import Store
from interrupts import interrupted
from reference import ask, check_pool, forgets_everything, in_threads, same_answer
from tiny_models import A, B, C, head, make_model, new_text, old_text, question

ROW = 3 * 2 * 2 * 16 * 4  # bytes: layers x (keys, values) x kv heads x head_dim x fp32

FIRST = head(0) + A + B + question(0)
TALK = FIRST + new_text(12, 3)
MOVED = head(1) + B + A + C + question(1)
CASES = {
    "new": (FIRST, {}),
    "moved": (MOVED, {}),
    "continued": (TALK, {}),
    "handed out": (MOVED, {"return_dict_in_generate": True}),
    "full": (old_text(150, 7), {}),
    "grown": (FIRST + new_text(9, 4), {"prompt_lookup_num_tokens": 3}),
}


@pytest.fixture(autouse=True)
def quick_collections():
    """What lives already needs no look at each of many collections."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def prepared(model, case: str) -> SuffixCache:
    """A cache that a call of this case finds something in, and has to make room in if it is `"full"`."""
    cache = SuffixCache(debug=True, max_bytes=(500 if case == "full" else 3000) * ROW)
    if case != "new":
        ask(model, FIRST, cache, steps=3)
    if case == "full":
        ask(model, old_text(150, 8), cache, steps=2)
    return cache


def broken_off(model, case: str, place: int | None, error=KeyboardInterrupt):
    """A cache after a call that was broken off at its `place`-th call, and the interrupts."""
    cache = prepared(model, case)
    ids, options = CASES[case]
    with interrupted(place, error) as interrupts:
        ask(model, ids, cache, steps=4, **options)
    return cache, interrupts


def is_in_order(model, cache: SuffixCache, case: str, wanted: dict) -> None:
    """O5, right answers, and reuse as ever."""
    gc.collect()
    check_pool(cache)
    for _ in range(2):
        for name in ("continued", case):
            got = ask(model, CASES[name][0], cache.using(fidelity="exact"), steps=2)
            same_answer(got, wanted[name])
        check_pool(cache)
    assert got.report.reason is None and got.report.exact_tokens == len(CASES[case][0]) - 1
    forgets_everything(cache)


def places_of(total: int, count: int, seed: int) -> list[int]:
    """So many of the calls, the same ones each time."""
    return sorted(
        np.random.default_rng(seed).choice(np.arange(1, total + 1), min(count, total), replace=False).tolist()
    )


def run_all(case: str, count: int, seed: int, error=KeyboardInterrupt) -> int:
    """Break a case off at so many places; returns how many calls it makes."""
    model = make_model("llama")
    wanted = {name: ask(model, CASES[name][0], steps=2) for name in ("continued", case)}
    ask(model, FIRST, SuffixCache())  # measured
    _, counted = broken_off(model, case, None)
    for place in places_of(counted.seen, count, seed):
        cache, interrupts = broken_off(model, case, place, error)
        try:
            is_in_order(model, cache, case, wanted)
        except BaseException as problem:
            raise AssertionError(f"broken off at call {place}: {interrupts.where}") from problem
    return counted.seen


@pytest.mark.parametrize("case", CASES)
def test_a_call_that_is_broken_off_anywhere_leaves_the_store_in_order(case):
    assert run_all(case, 8, 0) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_call_that_is_broken_off_at_many_more_places(case):
    run_all(case, 150, 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["moved", "full"])
def test_any_other_exception_at_many_places(case):
    class Fault(BaseException):
        pass

    run_all(case, 100, 2, Fault)


def test_control_without_mending_references_leak(monkeypatch):
    monkeypatch.setattr(Store, "mend", lambda self: None)
    with pytest.raises(AssertionError, match="broken off at call"):
        run_all("moved", 12, 0)


def test_a_save_that_is_broken_off_leaves_the_store_in_order(tmp_path):
    model = make_model("llama")
    cache = prepared(model, "moved")
    ask(model, MOVED, cache)
    with interrupted(None) as counted:
        cache.save(tmp_path / "whole")
    for place in places_of(counted.seen, 12, 3):
        with interrupted(place):
            cache.save(tmp_path / str(place))
        gc.collect()
        check_pool(cache)


# -- mending a store in which nothing is broken ---------------------------------------------------------------------


def state(cache: SuffixCache) -> list:
    """All counts of a store, and what can be found in it."""
    found = []
    for pool in cache._store.pools.values():
        found += [(number, slab.references.tolist()) for number, slab in pool.slabs.items()]
    for shelf in cache._store.shelves.values():
        found += [(segment, segment.references, segment.holders, len(segment)) for segment in shelf.segments]
        found += [(each, each.busy, each.exact, each.extent) for each in shelf.sequences]
        found += [list(shelf.kept), list(shelf.warm), list(shelf.means), shelf.rows]
        found += [set(shelf.windows.segments), set(shelf.mean_windows.segments)]
        found += [len(shelf.exact_prefixes), len(shelf.conversations)]
    return [*found, cache._store.budget.taken]


@pytest.mark.parametrize("settings", [{}, {"consensus": True}, {"store_dtype": "int8", "keep_conversations": 0}])
def test_mending_changes_nothing_that_is_in_order(settings):
    model = make_model("llama")
    cache = SuffixCache(debug=True, max_bytes=900 * ROW, **settings)
    views = []
    for number in range(14):
        ids = head(number % 5) + [A + B, B + A, C + A, B + C][number % 4] + question(number % 3)
        turn = ask(model, ids, cache, return_dict_in_generate=number % 5 == 4)
        views += [turn.output] if number % 5 == 4 else []
        if number % 3 == 0:
            ask(model, turn.tokens() + new_text(20, number), cache)
        assert cache.stats.bytes_used > 0  # by which what was dropped is given back
        before = state(cache)
        cache._store.mend()
        assert state(cache) == before
    views.clear()
    gc.collect()
    check_pool(cache)
    forgets_everything(cache)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"num_return_sequences": 2}]
)
def test_mending_at_every_moment_of_a_call_takes_nothing_from_it(options):
    """As another thread may, whose call was broken off. Freed rows are filled with NaN, so what is lost would show."""
    model = make_model("llama")
    cache = SuffixCache(debug=True, max_bytes=1500 * ROW)
    mended = []

    def mend(*args):
        with cache._store.lock:
            cache._store.unsure = True
            mended.append(cache._store.bytes_used)

    handles = [layer.register_forward_pre_hook(mend) for layer in model.model.layers]
    prompts = [FIRST, MOVED, TALK, TALK + new_text(300, 5), MOVED + new_text(5, 6)]
    if options.get("num_return_sequences"):
        options = options | {"do_sample": True, "seed": 3}
    for ids in prompts * 2:
        got = ask(model, ids, cache.using(fidelity="exact"), steps=5, **options)
        same_answer(got, ask(model, ids, steps=5, **options))
        approximate = ask(model, ids, cache, steps=5, **options)
        assert all(torch.isfinite(scores).any() for scores in approximate.scores)
        assert not any(torch.isnan(scores).any() for scores in approximate.scores)
    assert len(mended) > 300
    for handle in handles:
        handle.remove()
    check_pool(cache)


def test_mending_while_others_run_takes_nothing_from_them():
    model = make_model("llama")
    cache = SuffixCache(debug=True, fidelity="exact", max_bytes=900 * ROW)
    prompts = [head(number % 4) + A + B + new_text(30, number % 6) for number in range(20)]
    wanted = [ask(model, ids, steps=4) for ids in prompts]
    done = threading.Event()

    def mend():
        while not done.is_set():
            cache._store.mend()

    def run(first):
        try:
            for place in range(first, len(prompts), 3):
                same_answer(ask(model, prompts[place], cache, steps=4), wanted[place])
        finally:
            running.discard(first)
            if not running:
                done.set()

    running = set(range(3))
    in_threads([mend, *(lambda first=first: run(first) for first in range(3))])
    forgets_everything(cache)
