"""What a store knows of how often its text is asked for, also of text that it had to give up."""

import gc

import numpy as np
import pytest

from benchmarks.eviction import SHAPES, Server, text
from hf_suffix_cache import SuffixCache
from hf_suffix_cache.store.ghosts import Ghosts
from hf_suffix_cache.store.pool import BlockPool, Budget
from hf_suffix_cache.store.scopes import Place
from hf_suffix_cache.store.segments import Uses
from hf_suffix_cache.store.shelf import Shelf
from hf_suffix_cache.store.usage import MEASURED_ROWS, Usage
from reference import ask
from tiny_models import A, B, C, head, make_model, new_text, question

ROWS = 64  # of a document
EXACT = {"fidelity": "exact", "keep_conversations": 0}
FOR_EVER = 10**9  # rows that no store has


def empty_shelf() -> Shelf:
    server = Server(1000)
    return Shelf(server.shelf.pool)


def test_ghosts_know_a_text_at_any_place_and_on_their_own_shelf_only():
    rng, shelf, other = np.random.default_rng(7), empty_shelf(), empty_shelf()
    ids, uses, ghosts = text(rng, 400), Uses(5.0, 4.0, 0.0), Ghosts()
    ghosts.keep(shelf, ids, np.arange(400), uses)
    around = np.concatenate([text(rng, 37), ids, text(rng, 5)])
    found = ghosts.find(shelf, around, np.arange(len(around)))
    assert sum(each is uses for each in found) == len(ghosts) >= 15
    assert all(each is None for each in ghosts.find(other, ids, np.arange(400)))
    assert all(each is None for each in ghosts.find(shelf, text(rng, 400), np.arange(400)))
    gap = ghosts.find(shelf, np.concatenate([ids[:200], ids[205:]]), np.delete(np.arange(400), np.arange(200, 205)))
    assert sum(each is uses for each in gap) == len(gap) < len(ghosts) + 1  # no window reaches across the gap
    assert ghosts.find(shelf, ids[:5], np.arange(5)) == []
    assert None not in ghosts.find(shelf, ids, np.arange(400), take=True) and len(ghosts) == 0


def test_ghosts_are_bounded_and_a_shelf_takes_its_own_with_it():
    rng, shelf, ghosts = np.random.default_rng(8), empty_shelf(), Ghosts(limit=100)
    texts = [text(rng, 200) for _ in range(40)]
    for ids in texts:
        ghosts.keep(shelf, ids, np.arange(200), Uses())
        assert len(ghosts) <= 100
    assert None not in ghosts.find(shelf, texts[-1], np.arange(200))
    assert set(ghosts.find(shelf, texts[0], np.arange(200))) == {None}
    del shelf
    gc.collect()
    assert len(ghosts._secrets) == 0


def test_uses_outlive_the_rows_for_a_while():
    rng = np.random.default_rng(9)
    server = Server(20 * ROWS, **EXACT)
    ids = text(rng, ROWS)
    for _ in range(5):
        server.ask(ids)
    for _ in range(400):
        server.ask(text(rng, ROWS))
    assert server.ask(ids) == 0  # it had to go at last
    (again,) = [each for each in server.shelf.sequences if each.ids is ids]
    uses = again.recipe.segments[0].uses
    assert 5.5 < uses.total < 6.0 and 1.0 < uses.recent < 1.1
    server.store.clear()
    assert len(server.store.usage.ghosts) == 0


def test_a_store_that_nobody_asks_does_not_age():
    server = Server(20 * ROWS, **EXACT)
    ids = text(np.random.default_rng(10), ROWS)
    server.ask(ids)
    server.ask(ids)
    (sequence,) = server.shelf.sequences
    before = server.store.usage.recent(sequence.recipe.segments[0])
    server.now += 1e9
    assert server.store.usage.recent(sequence.recipe.segments[0]) == before
    server.ask(text(np.random.default_rng(11), 10 * ROWS))
    assert server.store.usage.recent(sequence.recipe.segments[0])[0] < before[0]


def test_a_conversation_keeps_its_uses_when_its_rows_are_made_exact():
    model, cache = make_model("llama"), SuffixCache()
    ask(model, head(0) + A + B + C + question(0), cache)
    answer = ask(model, head(1) + B + A + C + question(1), cache)
    for number in range(6):
        answer = ask(model, answer.tokens() + new_text(6, number), cache)
    (shelf,) = cache._store.shelves.values()
    newest = max(shelf.sequences, key=lambda sequence: sequence.last_used)
    assert newest.exact < len(newest.ids)  # control: there is something to settle
    own = [segment.uses.total for segment in newest.recipe.segments if segment.holders == 1]
    cache.settle(model)
    newest = max(shelf.sequences, key=lambda sequence: sequence.last_used)
    assert newest.exact == len(newest.ids)
    made = [segment for segment in newest.recipe.segments if segment.holders == 1]
    assert max(own) > 4 and max(segment.uses.total for segment in made) > 3


def test_seconds_of_a_row_are_measured_for_each_model():
    budget = Budget(10**6)
    pools = {number: BlockPool(Server(10).shelf.pool.shapes, 16, budget) for number in range(2)}
    usage = Usage(budget, pools)
    usage.measure(pools[0], 2.0, MEASURED_ROWS - 1)  # too few rows
    assert set(usage.row_seconds().values()) == {1.0}
    usage.measure(pools[0], 3.0, 300)
    assert set(usage.row_seconds().values()) == {1.0}  # comparable only once both are known
    for seconds in (1.0, 2.0, 90.0):
        usage.measure(pools[1], seconds, 100)
    assert usage.row_seconds() == {pools[0]: 0.01, pools[1]: 0.02}


@pytest.mark.parametrize("seconds, goes", [(1.0, 1), (3.0, 0)])
def test_rows_stay_of_the_model_that_takes_longer_for_a_byte(seconds, goes):
    rng = np.random.default_rng(17)
    servers = [Server(4000, **EXACT), Server(4000, **EXACT)]
    servers[1].store, servers[1].identity, servers[1].shapes = servers[0].store, "other", 2 * SHAPES  # twice the bytes
    servers[1].shelf = servers[0].store.shelf("other", Place(), 2 * SHAPES)
    for ids in (text(rng, ROWS) for _ in range(4)):
        for server in servers:
            server.ask(ids)
    for server, took in zip(servers, (1.0, seconds), strict=True):
        server.store.usage.measure(server.shelf.pool, took, 1000)
    for _ in range(4):
        servers[0].store.steward.step(servers[0].shelf.pool, FOR_EVER)
    left = [len(server.shelf.sequences) for server in servers]
    assert left[goes] == 0 and left[1 - goes] == 4
