"""Eviction: what a full store gives up, by which policy, what it never gives up, and what it remembers."""

import numpy as np
import pytest

from benchmarks.eviction import GreedyDual, Server, best_fixed, corpus, loop, of_documents, ranks, text
from hf_suffix_cache import SuffixCache, SuffixCacheConfig
from hf_suffix_cache.config import EVICTIONS
from hf_suffix_cache.store.eviction import NEWCOMER, PAST, POLICIES, Candidates, Gdsf, order_of, policy_of
from reference import ask, check_pool, forgets_everything, same_as_vanilla
from tiny_models import A, B, C, head, make_model, new_text, old_text, question

ROW = 3 * 2 * 2 * 16 * 4  # bytes: layers x (keys, values) x kv heads x head_dim x fp32
ROWS = 64  # of a document
EXACT = {"fidelity": "exact", "keep_conversations": 0}
FOR_EVER = 10**9  # rows that no store has


def candidates(**columns) -> Candidates:
    """Candidates of which only these columns differ."""
    count = len(next(iter(columns.values())))
    values = dict.fromkeys(("last_used", "uses", "recent", "unproven", "new_bytes", "seconds", "num_bytes"), 0.0)
    values |= {"recent": 1.0, "uses": 1.0, "seconds": 1.0, "num_bytes": 1.0}
    arrays = {name: np.full(count, value) for name, value in values.items()}
    arrays |= {name: np.array(column, dtype=float) for name, column in columns.items()}
    return Candidates((None,) * count, **arrays, max_bytes=64)


def order(policy, **columns) -> list[int]:
    return order_of(candidates(**columns), policy)[0].tolist()


def held(server: Server) -> set[tuple[int, ...]]:
    """The sequences that a store holds, by their tokens."""
    return {tuple(sequence.ids.tolist()) for sequence in server.shelf.sequences}


# -- policies -------------------------------------------------------------------------------------------------------


def test_each_policy_gives_up_what_its_name_says():
    facts = dict(last_used=[1, 2, 3, 4], uses=[4, 2, 9, 3], recent=[4, 2, 1, 3])
    assert order(POLICIES["lru"], **facts) == [0, 1, 2, 3]
    assert order(POLICIES["lfu"], **facts) == [1, 3, 0, 2]
    assert order(POLICIES["gdsf"], **facts) == [2, 1, 3, 0]


def test_gdsf_weighs_the_seconds_that_a_byte_saves():
    assert order(POLICIES["gdsf"], seconds=[3, 1, 2]) == [1, 2, 0]
    assert order(POLICIES["gdsf"], num_bytes=[3, 1, 2]) == [0, 2, 1]
    assert order(POLICIES["gdsf"], seconds=[2, 4], num_bytes=[1, 4], recent=[1, 3]) == [0, 1]


@pytest.mark.parametrize("policy", EVICTIONS)
def test_of_equals_the_one_used_longest_ago_goes_and_what_frees_nothing_goes_last(policy):
    assert order(POLICIES[policy], last_used=[7, 7, 7], num_bytes=[1, 0, 1]) == [0, 2, 1]
    assert order(POLICIES[policy], last_used=[3, 1, 2]) == [1, 2, 0]


def test_new_text_counts_by_its_past():
    facts = {"recent": [1, 1, 5, 0.5], "unproven": [1, 0, 1, 0.5]}
    assert Gdsf().worth(candidates(**facts)).tolist() == [NEWCOMER, 1, 4 * PAST, 0.5 * NEWCOMER]
    assert Gdsf(past=1.0).worth(candidates(**facts)).tolist() == [NEWCOMER, 1, 4, 0.5 * NEWCOMER]
    assert Gdsf(newcomer=1.0).worth(candidates(**facts)).tolist() == [1, 1, 4 * PAST, 0.5]


def test_a_policy_of_the_callers_decides():
    class Shortest:
        def worth(self, candidates):
            return -candidates.num_bytes

    server = Server(20 * ROWS, Shortest(), **EXACT)
    rng = np.random.default_rng(0)
    texts = [text(rng, rows) for rows in (64, 160, 32, 96)]
    for ids in texts:
        server.ask(ids)
    for ids in sorted(texts, key=len, reverse=True):
        assert tuple(ids.tolist()) in held(server)
        server.store.steward.step(server.shelf.pool, FOR_EVER)
        assert tuple(ids.tolist()) not in held(server)


def test_a_policy_that_fails_costs_no_answer_and_is_told_once(caplog):
    class Broken:
        def __init__(self, wrong):
            self.wrong = wrong

        def worth(self, candidates):
            return self.wrong(len(candidates))

    wrongs = (lambda count: np.zeros(count + 1), lambda count: np.full(count, np.nan), lambda count: 1 // 0)
    for wrong in wrongs[:2]:
        with pytest.raises(ValueError, match="one number for each"):
            order(Broken(wrong), last_used=[1, 2])
    model = make_model("llama")
    for wrong in wrongs:
        caplog.clear()
        cache = SuffixCache(fidelity="exact", max_bytes=400 * ROW, eviction=Broken(wrong), keep_conversations=0)
        for number in range(6):
            report = same_as_vanilla(model, old_text(100, number), cache, steps=2).report
            assert report.reason is None
        assert cache.stats.evictions > 0
        assert ask(model, old_text(100, 5), cache, steps=2).report.exact_tokens == 99  # it stores and serves as ever
        assert sum("the eviction policy failed" in record.getMessage() for record in caplog.records) == 1
        check_pool(cache)


# -- settings -------------------------------------------------------------------------------------------------------


def test_settings_name_what_is_legal():
    with pytest.raises(ValueError, match=r"eviction.*lru.*'fifo'"):
        SuffixCache(eviction="fifo")
    with pytest.raises(TypeError, match="worth"):
        SuffixCacheConfig(eviction={})
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="pin_share"):
            SuffixCacheConfig(pin_share=wrong)
    assert SuffixCacheConfig().eviction == "gdsf"
    for name in EVICTIONS:
        config = SuffixCacheConfig(eviction=name, pin_share=0.25)
        assert SuffixCacheConfig.from_json(config.to_json()) == config
        assert policy_of(name) is POLICIES[name]
    with pytest.raises(TypeError, match=r"eviction.*JSON.*'gdsf'"):
        SuffixCacheConfig(eviction=Gdsf()).to_json()


# -- against a slow oracle ------------------------------------------------------------------------------------------


class SlowStore:
    """
    What a store of equally long texts must hold, from lists of all requests that there ever were.

    Args:
        capacity (`int`): Texts that it has room for, that of a running call included.
        policy (`str`): One of `EVICTIONS`.
    """

    def __init__(self, capacity: int, policy: str, half_life: float = 2.0):
        self.capacity, self.policy, self.half_life = capacity, policy, half_life
        self.requests: dict[int, list[tuple[float, float]]] = {}  # when, in stores; share of the text that it served
        self.held: dict[int, dict] = {}
        self.now = self.contests = 0

    def ask(self, name: int) -> None:
        self.now += 1
        hit = name in self.held
        # the last row of a prompt is always run
        self.requests.setdefault(name, []).append((self.now / self.capacity, (ROWS - 1) / ROWS if hit else 1.0))
        if hit:
            self.held[name] |= {"last": self.now, "unused": False}
        full = len(self.held) >= self.capacity
        while len(self.held) >= self.capacity:
            others = [other for other in self.held if other != name]
            del self.held[min(others, key=lambda other: (self._worth(other), self.held[other]["last"]))]
        self.contests += full
        if not hit:
            self.held[name] = {"last": self.now, "unused": True, "contest": self.contests}

    def _worth(self, name: int) -> float:
        entry = self.held[name]
        if self.policy == "lru":
            return entry["last"]
        if self.policy == "lfu":
            return sum(share for _, share in self.requests[name])
        faded = [
            share * 0.5 ** ((self.now / self.capacity - at) / self.half_life) for at, share in self.requests[name]
        ]
        if not self._is_new(name):
            return sum(faded)
        return max(PAST * sum(faded[:-1]), NEWCOMER * faded[-1])

    def _is_new(self, name: int) -> bool:
        return self.held[name]["unused"] and self.held[name]["contest"] == self.contests


def both(policy: str, slow_policy: str, seed: int) -> list[bool]:
    """Whether the store and the oracle hold the same after each of many requests."""
    rng = np.random.default_rng(seed)
    count, capacity = 40, 16
    texts = [text(rng, ROWS) for _ in range(count)]
    names = {tuple(ids.tolist()): number for number, ids in enumerate(texts)}
    around = [number % 20 for number in range(60)]
    drawn = ranks(rng, 150, count) + around + [count - 1 - rank for rank in ranks(rng, 150, count)] + around
    server, slow = Server(capacity * ROWS, policy, **EXACT), SlowStore(capacity, slow_policy)
    server.store.usage.half_life = slow.half_life
    same = []
    for number in drawn:
        server.ask(texts[number])
        slow.ask(number)
        same.append({names[ids] for ids in held(server)} == set(slow.held))
    assert server.store.evictions > 100
    return same


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", EVICTIONS)
def test_the_store_holds_what_lists_of_all_requests_say(policy, seed):
    assert all(both(policy, policy, seed))


@pytest.mark.parametrize("policy", EVICTIONS)
def test_control_the_lists_tell_policies_apart(policy):
    for other in set(EVICTIONS) - {policy}:
        assert sum(both(policy, other, 0)) < 200


# -- loops ----------------------------------------------------------------------------------------------------------


def unequal_loop(rng, n: int, store: int):
    """Texts of 32 to 160 rows in turn, 1.2 times the store."""
    sizes = []
    while sum(sizes) < 1.2 * store:
        sizes.append(int(rng.integers(2, 11)) * 16)
    return of_documents(rng, [number % len(sizes) for number in range(n)], lambda number: sizes[number])


def saved_of_best(workload, store: int, policy, skip: int) -> float:
    """What a policy saves from the `skip`-th request on, over what the best fixed set of texts does."""
    server = Server(store, policy, **EXACT)
    taken = [server.ask(ids) for ids in workload.prompts]
    return sum(taken[skip:]) / best_fixed(workload, skip, store)


@pytest.mark.parametrize("store", [20 * ROWS, pytest.param(40 * ROWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "unequal"])
def test_a_loop_of_a_fifth_too_much_keeps_most_of_the_best_fixed_set(equal, store):
    rng, n = np.random.default_rng(1), 8 * 48
    workload = loop(rng, n, store, ROWS) if equal else unequal_loop(rng, n, store)
    skip = 2 * len(set(workload.documents))
    assert saved_of_best(workload, store, "gdsf", skip) >= 0.8
    assert saved_of_best(workload, store, "lru", skip) < 0.1  # control: it gives up just what comes next
    assert saved_of_best(workload, store, GreedyDual(), skip) < 0.5  # control: and so does ageing by what was given up


def test_the_best_fixed_set_is_the_best_of_all_sets():
    rng = np.random.default_rng(2)
    sizes = [16 * int(rng.integers(1, 6)) for _ in range(8)]
    workload = of_documents(rng, rng.integers(0, 8, 60).tolist(), lambda number: sizes[number])
    rows = {number: len(ids) for number, ids in zip(workload.documents, workload.prompts, strict=True)}
    for store in (48, 112, 160):
        sets = ([number for number in range(8) if mask >> number & 1] for mask in range(256))
        fits = [chosen for chosen in sets if sum(rows.get(number, 0) for number in chosen) <= store]
        asked = workload.documents[10:]
        gains = [sum(rows[number] - 1 for number in asked if number in chosen) for chosen in fits]
        assert best_fixed(workload, 10, store) == max(gains)


def test_a_loop_of_prompts_through_generate():
    model = make_model("llama")
    # of which no two begin with the same token: a hit of one row is a use too
    prompts = list({ids[0]: ids for ids in (old_text(112, 500 + number) for number in range(120))}.values())[:36]
    assert len(prompts) == 36
    caches = {name: SuffixCache(fidelity="exact", max_bytes=30 * 112 * ROW, eviction=name) for name in ("gdsf", "lru")}
    hits = dict.fromkeys(caches, 0)
    for turn in range(4):
        for ids in prompts:
            for name, cache in caches.items():
                hit = ask(model, ids, cache, steps=1).report.exact_tokens == 111
                hits[name] += hit and turn > 1
    assert hits["lru"] == 0 and hits["gdsf"] >= 0.8 * 30 * 2
    check_pool(caches["gdsf"])


def test_what_comes_once_does_not_push_out_what_comes_again():
    rng = np.random.default_rng(3)
    hot = [text(rng, ROWS) for _ in range(10)]
    saved = {}
    for policy in EVICTIONS:
        server, saved[policy] = Server(20 * ROWS, policy, **EXACT), 0
        for number in range(160):
            once = [server.ask(text(rng, ROWS)) for _ in range(3)]
            assert max(once) <= 1  # the first token may be that of another text
            saved[policy] += server.ask(hot[number % 10]) * (number >= 60)
    best = 100 * (ROWS - 1)
    assert saved["gdsf"] >= 0.95 * best and saved["lru"] < 0.1 * best


def test_the_store_follows_when_other_text_becomes_popular():
    rng = np.random.default_rng(4)
    server = Server(20 * ROWS, **EXACT)
    for _ in range(3):
        group = [text(rng, ROWS) for _ in range(15)]
        for _ in range(40):
            for ids in group:
                server.ask(ids)
        assert sum(server.ask(ids) for ids in group) >= 0.9 * 15 * (ROWS - 1)


def test_a_root_that_many_chats_share_stays():
    rng = np.random.default_rng(5)
    root, share = text(rng, 320), {}
    for policy in ("gdsf", "lru"):
        server, served = Server(1280, policy), []
        for number in range(80):
            served.append(server.ask(np.concatenate([root, text(rng, 48)])))
            server.ask(text(rng, 160))
            if number % 10 == 9:
                server.store.compact()
        share[policy] = sum(served[1:]) / (79 * 320)
        assert server.store.evictions > 50
    assert share["gdsf"] > 0.99 and share["gdsf"] >= share["lru"]


def test_reuse_over_a_corpus_that_is_too_large_is_no_worse_than_with_lru():
    saved = {}
    for policy in ("gdsf", "lru"):
        server = Server(8000, policy)
        saved[policy] = sum(server.ask(ids) for ids in corpus(np.random.default_rng(6), 150).prompts)
    assert saved["gdsf"] >= 0.98 * saved["lru"] > 0


# -- who may push out whom ------------------------------------------------------------------------------------------


def test_one_long_prompt_does_not_push_out_what_is_asked_for_all_the_time():
    rng = np.random.default_rng(12)
    hot, long = [text(rng, ROWS) for _ in range(16)], text(rng, 1000)
    left = {}
    for policy in ("gdsf", "lru"):
        server = Server(1400, policy, half_life=20.0, **EXACT)
        for number in range(320):
            server.ask(hot[number % 16])
        assert server.store.evictions == 0
        server.ask(long)
        left[policy] = sum(server.ask(ids) > 0 for ids in hot)
        assert server.store.steward.turned_away == (policy == "gdsf")
    assert left["gdsf"] == 16 and left["lru"] < 8
    tries = 0
    server = Server(1400, half_life=20.0, **EXACT)
    for number in range(320):
        server.ask(hot[number % 16])
    while server.ask(long) == 0:  # asked for again and again it gets in: what was asked for is remembered
        tries += 1
        assert tries < 60
    assert tries > 2


def test_a_call_that_is_turned_away_is_answered_and_does_not_complain():
    model = make_model("llama", spy=True)
    cache = SuffixCache(fidelity="exact", max_bytes=480 * ROW)
    cache._store.usage.half_life = 100.0
    hot = [old_text(60, 700 + number) for number in range(2)]
    for _ in range(12):
        for ids in hot:
            ask(model, ids, cache, steps=1)
    long = old_text(400, 702)
    model.spy.clear()
    report = same_as_vanilla(model, long, cache, steps=3).report
    assert report.reason is None and cache.stats.turned_away == 1 and cache.stats.evictions == 0
    assert cache.stats.to_dict()["turned_away"] == 1
    assert all(ask(model, ids, cache, steps=1).report.exact_tokens == 59 for ids in hot)
    assert ask(model, long, cache.using(store=False), steps=1).report.exact_tokens == 0  # it is not stored
    check_pool(cache)
    small = SuffixCache(fidelity="exact", max_bytes=480 * ROW, eviction="lru")
    for ids in [*hot, long]:
        ask(model, ids, small, steps=1)
    assert small.stats.turned_away == 0 and ask(model, long, small, steps=1).report.exact_tokens == 399


def test_what_is_not_stored_pushes_out_nothing_that_is_large():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", max_bytes=480 * ROW, keep_conversations=0)
    ask(model, old_text(300, 1), cache, steps=1)
    same_as_vanilla(model, old_text(300, 2), cache.using(store=False), steps=1)
    assert ask(model, old_text(300, 1), cache, steps=1).report.exact_tokens == 299
    assert cache.stats.evictions == 0
    check_pool(cache)


def test_a_new_chat_is_kept_in_a_store_of_two():
    """Even if both old ones were asked more often: the newest conversation most often goes on."""
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", max_bytes=700 * ROW)
    for number in range(5):
        talk = old_text(150, 800 + number)
        for turn in range(4):
            report = ask(model, talk, cache, steps=2).report
            assert report.exact_tokens >= (len(talk) - 13 if turn else 0), (number, turn)
            talk = ask(model, talk, cache, steps=2).tokens() + new_text(10, turn)
    assert cache.stats.evictions > 0
    check_pool(cache)


def test_new_text_that_went_unused_is_counted():
    rng = np.random.default_rng(13)
    server = Server(20 * ROWS, **EXACT)
    hot = [text(rng, ROWS) for _ in range(15)]
    for number in range(150):
        server.ask(hot[number % 15])
    for _ in range(50):
        server.ask(text(rng, ROWS))
    assert server.store.evictions == server.shelf.evictions > 40
    # the first ones found free room, so they were not new any more when they went
    assert server.store.evictions - 5 <= server.store.steward.turned_away <= server.store.evictions
    assert all(server.ask(ids) == ROWS - 1 for ids in hot)


# -- what goes first, and what goes last ----------------------------------------------------------------------------


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("policy", EVICTIONS)
def test_what_nobody_can_reach_any_more_goes_first(policy):
    model, clock = make_model("llama"), Clock()
    cache = SuffixCache(fidelity="exact", max_bytes=800 * ROW, eviction=policy, keep_conversations=0, clock=clock)
    for _ in range(6):  # asked for much more often than what follows
        ask(model, old_text(200, 1), cache.session("gone", ttl=10.0), steps=1)
    clock.now += 5
    for number in range(3):
        ask(model, old_text(100, 10 + number), cache, steps=1)
    clock.now += 20
    ask(model, old_text(200, 2), cache, steps=1)
    assert cache.stats.evictions == 0
    held = [len(sequence.ids) for shelf in cache._store.shelves.values() for sequence in shelf.sequences]
    assert sorted(held) == [100, 100, 100, 200]
    check_pool(cache)


@pytest.mark.parametrize("policy", EVICTIONS)
def test_what_frees_no_memory_goes_last(policy):
    rng = np.random.default_rng(14)
    document, server = text(rng, 320), Server(4000, policy, **EXACT)
    for question_rows in (8, 32):  # a block has 16: without its own rows the first one would free none
        server.ask(np.concatenate([document, text(rng, question_rows)]))
    first, second = server.shelf.sequences
    (segment,) = first.recipe.segments
    assert segment in second.recipe.segments  # control: the second one refers to the document's rows
    first.last_used = segment.last_used = segment.uses.total = segment.uses.recent = 0.0
    server.store.steward.step(server.shelf.pool, FOR_EVER)
    assert list(server.shelf.sequences) == [first]
    server.store.steward.step(server.shelf.pool, FOR_EVER)
    assert not server.shelf.sequences and server.store.bytes_used == 0


def test_rows_that_a_call_is_planned_with_go_last():
    rng = np.random.default_rng(15)
    texts = [text(rng, ROWS) for _ in range(4)]
    server = Server(20 * ROWS, "lru", **EXACT)
    for ids in texts:
        server.ask(ids)
    (oldest,) = [each for each in server.shelf.sequences if each.ids is texts[0]]
    server.shelf.pin(oldest.recipe.segments)
    gone = []
    while server.store.steward.step(server.shelf.pool, FOR_EVER):
        gone.append(len(server.shelf.sequences))
        assert oldest in server.shelf.sequences or gone[-1] == 0
    server.shelf.unpin(oldest.recipe.segments)
    assert server.store.bytes_used == 0


@pytest.mark.parametrize("policy", EVICTIONS)
def test_every_policy_gives_right_answers_and_leaks_no_reference(policy):
    model, random = make_model("llama"), np.random.default_rng(16)
    cache = SuffixCache(max_bytes=700 * ROW, eviction=policy, block_size=5)
    pieces = [A, B, C, *(old_text(40, 900 + number) for number in range(4))]
    for number in range(40):
        chosen = [pieces[place] for place in random.permutation(len(pieces))[:3]]
        ids = head(number % 5) + sum(chosen, []) + question(number % 7)
        if number % 2:
            same_as_vanilla(model, ids, cache.using(fidelity="exact"), steps=2)
        else:
            ask(model, ids, cache, steps=2)
        check_pool(cache)
    assert cache.stats.evictions > 5
    forgets_everything(cache)
