"""Sessions: who is served what, who is told what, how long rows live, and what follows from a change of topic."""

import gc
import math
import sys

import numpy as np
import pytest
import torch

import hf_suffix_cache
from hf_suffix_cache import SuffixCache, SuffixCacheConfig
from hf_suffix_cache.repair.none import NoRepair
from hf_suffix_cache.store.eviction import Lru
from hf_suffix_cache.store.sessions import Sessions
from hf_suffix_cache.store.topic import MIN_TOKENS, Topic, similarity, without_frame
from reference import ask, check_pool, in_threads, same_as_vanilla
from tiny_models import A, B, C, head, make_model, new_text, old_text, question


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def served(report) -> int:
    return report.exact_tokens + report.carried_tokens + report.shifted_tokens + report.repaired_tokens


def moved(middle: list[int], number: int) -> list[int]:
    """A prompt in which a stored text stands behind another front and before another question."""
    return head(number) + middle + question(number)


# -- who is served what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", ["exact", "balanced", "fast"])
def test_a_session_is_served_its_own_rows_and_no_other_session_is(fidelity):
    model, cache = make_model("llama"), SuffixCache(fidelity=fidelity)
    alice, bob = cache.session("alice"), cache.session("bob")
    secret = A + B
    ask(model, secret + question(1), alice)
    for other in (bob, cache, cache.session("Alice"), cache.session("alice ")):
        got = same_as_vanilla(model, secret + question(1), other)
        assert served(got.report) == 0 and got.report.computed_rows == len(secret + question(1))
    # control: where nothing is kept apart the same prompt is served
    assert ask(model, secret + question(2), alice).report.exact_tokens >= len(secret)
    check_pool(cache)


def test_a_middle_piece_is_no_oracle_either():
    """Moved rows would answer guesses of any piece of another's text: right and wrong ones cost the same."""
    model, cache = make_model("llama"), SuffixCache()
    ask(model, head(1) + A + B + question(1), cache.session("alice"))
    work = set()
    for number, guess in enumerate((A, B, old_text(len(A), 77), A[10:50], B[:40] + old_text(8, 5))):
        report = ask(model, moved(guess[:40], 2 + number), cache.session(f"guesser {number}")).report
        assert served(report) == 0
        work.add(report.computed_rows - report.prompt_tokens)
    assert work == {0}
    report = ask(model, moved(A, 3), cache.session("alice")).report  # control
    assert report.shifted_tokens + report.repaired_tokens > 0
    check_pool(cache)


def test_the_anonymous_scope_is_read_by_no_session():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    ask(model, A + question(1), cache)
    assert served(ask(model, A + question(1), cache.session("alice")).report) == 0
    assert served(ask(model, A + question(1), cache).report) > 0
    check_pool(cache)


def test_tags_keep_ids_and_namespaces_apart():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", namespace="ab")
    ask(model, A + question(1), cache.session("c"))
    ask(model, B + question(1), cache.session("1"))
    assert served(ask(model, B + question(1), cache.session(1)).report) == 0
    assert served(ask(model, A + question(1), cache.session("shared")).report) == 0
    other = SuffixCache(fidelity="exact", namespace="a")
    other._owned.store = cache._owned.store  # what would happen if two namespaces met in one store
    assert served(ask(model, A + question(1), other.session("bc")).report) == 0
    assert served(ask(model, A + question(1), cache.session("c")).report) > 0
    check_pool(cache)


@pytest.mark.parametrize("bad, error", [("", ValueError), (None, TypeError), (True, TypeError), (1.5, TypeError)])
def test_what_is_no_id_is_refused(bad, error):
    with pytest.raises(error, match="session"):
        SuffixCache().session(bad)


def test_sessions_that_run_nothing_leave_nothing_behind():
    model, cache = make_model("llama"), SuffixCache()
    for number in range(100):
        cache.session(number).explain(model, A)
        assert cache.session(number).stats.requests == 0
    assert len(cache._store.sessions) == 0
    ask(model, A + question(1), cache.session(7))  # control
    assert len(cache._store.sessions) == 1


def test_an_id_may_be_an_integer_of_numpy():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    ask(model, A + question(1), cache.session(np.int64(7)))
    assert served(ask(model, A + question(1), cache.session(7)).report) > 0
    assert served(ask(model, A + question(1), cache.session("7")).report) == 0


def test_wrong_arguments_are_named():
    cache = SuffixCache()
    with pytest.raises(ValueError, match="ttl"):
        cache.session("alice", ttl=-1)
    with pytest.raises(TypeError, match="share"):
        cache.session("alice", share=1)
    with pytest.raises(TypeError, match="share_prefix"):
        SuffixCache(share_prefix="system")
    with pytest.raises(ValueError, match="share_prefix"):
        SuffixCache(share_prefix=-1)
    for bad in ([1.5], [True], np.ones((2, 2)), np.ones((2, 2), dtype=np.int64), [[1, 2], [3]], {1: 2}):
        with pytest.raises(TypeError, match="share_prefix"):
            SuffixCache(share_prefix=bad)
    with pytest.raises(TypeError, match="clock"):
        SuffixCache(clock=5)
    for policy in ("eviction", "repair"):
        with pytest.raises(TypeError, match=f"`{policy}` must be"):  # the class, where one of its objects is meant
            SuffixCache(**{policy: {"eviction": Lru, "repair": NoRepair}[policy]})


@pytest.mark.parametrize(
    "given, kept",
    [
        (np.int64(3), 3),
        ([np.int64(3), 4], (3, 4)),
        (torch.tensor([3, 4]), (3, 4)),
        (torch.tensor([[3, 4]]), (3, 4)),  # as a tokenizer gives it
        (np.array([3, 4], dtype=np.int32), (3, 4)),
        (range(3), (0, 1, 2)),
    ],
)
def test_a_common_start_may_be_any_kind_of_integers(given, kept):
    assert SuffixCacheConfig(share_prefix=given).share_prefix == kept


def test_using_and_settling_stay_in_the_session():
    model, cache = make_model("llama"), SuffixCache()
    alice = cache.session("alice")
    ask(model, A + B + question(1), alice)
    handle = alice.using(fidelity="fast")
    assert ask(model, moved(B, 2), handle).report.shifted_tokens > 0
    assert alice.last_report.shifted_tokens == 0  # reports are the handle's own
    alice.settle(model)
    assert served(ask(model, moved(B, 2), cache).report) == 0
    assert served(ask(model, moved(B, 2), cache.session("bob")).report) == 0
    check_pool(cache)


def test_background_settling_stays_in_the_session():
    model, cache = make_model("llama"), SuffixCache(settle="background")
    alice = cache.session("alice")
    ask(model, A + B + question(1), alice)
    first = ask(model, moved(B, 2), alice)
    assert first.report.shifted_tokens > 0 and cache.settled(60)
    longer = first.tokens() + new_text(8, 3)
    assert served(ask(model, longer, cache).report) == 0
    assert ask(model, longer, alice).report.exact_tokens >= len(first.tokens()) - 1
    cache.settled(60)
    check_pool(cache)


def test_plain_forwards_are_served_in_the_session():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    ids = torch.tensor([A + question(1)])
    with cache.session("alice").attach(model) as alice, torch.no_grad():
        model(ids)
        model(ids, logits_to_keep=1)
        assert served(alice.last_report) > 0
    with cache.session("bob").attach(model) as bob, torch.no_grad():
        model(ids, logits_to_keep=1)
        assert served(bob.last_report) == 0
    gc.collect()
    check_pool(cache)


# -- what is shared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["front", "anywhere"])
def test_registered_text_is_served_to_everyone(at):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact" if at == "front" else "balanced")
    cache.session("alice").register(model, A, at=at)  # whoever registers it
    for handle in (cache, cache.session("alice"), cache.session("bob")):
        prompt = A + question(1) if at == "front" else moved(A, 1)
        assert served(ask(model, prompt, handle).report) >= len(A) - 8
    check_pool(cache)


def test_a_shared_start_is_served_to_everyone_and_what_follows_is_not():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", share_prefix=tuple(A))
    ask(model, A + B + question(1), cache.session("alice"))
    got = same_as_vanilla(model, A + B + question(1), cache.session("bob"))
    assert got.report.exact_tokens == len(A)
    again = same_as_vanilla(model, A + B + question(2), cache.session("alice"))
    assert again.report.exact_tokens >= len(A + B)  # control
    # a prompt that only begins like it shares the common front
    ask(model, A[:30] + C + question(1), cache.session("carol"))
    assert ask(model, A[:30] + C + question(1), cache.session("dave")).report.exact_tokens == 30
    check_pool(cache)


def test_a_shared_start_is_stored_once():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", share_prefix=len(A), keep_conversations=0)
    for number in range(8):
        same_as_vanilla(model, A + question(number), cache.session(number), steps=1)
    cache.compact()
    rows = sum(shelf.rows for shelf in cache._store.shelves.values())
    assert rows <= len(A) + 8 * (len(question(0)) + 1)
    check_pool(cache)


def test_a_shared_start_knows_nothing_of_what_follows():
    """Neither its rows nor the text it keeps tell what stood behind it in the prompt that it comes from."""
    model = make_model("llama")
    cache = SuffixCache(share_prefix=len(A))
    alice = cache.session("alice")
    ask(model, C + A + question(1), alice)
    ask(model, A + B + question(1), alice)
    (shelf,) = (each for each in cache._store.shelves.values() if each.scope.kind == "shared")
    for segment in shelf.segments:
        text = segment.context.tolist()
        assert text in ((C + A)[: len(A)][: len(text)], A[: len(text)])
    check_pool(cache)


def test_a_start_that_was_moved_in_is_not_shared():
    """Approximate rows may have seen the session's text, so the shared start ends before the first of them."""
    model = make_model("llama")
    cache = SuffixCache()
    alice = cache.session("alice")
    ask(model, old_text(60, 9) + A + question(1), alice)
    prompt = head(2) + A + question(2)
    assert ask(model, prompt, alice.using(share_prefix=len(prompt))).report.shifted_tokens > 0
    report = ask(model, prompt, cache.session("bob").using(fidelity="exact")).report
    assert 0 < report.exact_tokens <= len(head(2)) + 8
    check_pool(cache)


def test_what_shares_reads_what_is_shared_alone():
    model, cache = make_model("llama"), SuffixCache()
    ask(model, A + B + question(1), cache.session("alice"))
    open_to_all = cache.session("alice", share=True)
    assert served(ask(model, A + B + question(1), open_to_all).report) == 0
    assert served(ask(model, A + B + question(2), cache.session("bob")).report) >= len(A + B) - 8
    check_pool(cache)


def test_rows_outlive_a_session_only_where_they_are_shared():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", share_prefix=tuple(A))
    ask(model, A + B + question(1), cache.session("alice"))
    ask(model, A + C + question(1), cache.session("bob"))
    cache.clear(session="alice")
    assert ask(model, A + B + question(1), cache.session("alice")).report.exact_tokens == len(A)
    assert ask(model, A + C + question(2), cache.session("bob")).report.exact_tokens >= len(A + C)
    cache.session("bob").clear()  # the handle of a session clears that session
    assert ask(model, A + C + question(3), cache.session("bob")).report.exact_tokens == len(A)
    cache.clear(session="never seen")
    cache.clear()
    assert cache.stats.segments == 0 and served(ask(model, A + question(1), cache).report) == 0
    check_pool(cache)


def test_registered_text_goes_while_sessions_refer_to_it():
    """Eviction in one scope must not touch rows that another one refers to."""
    model = make_model("llama")
    cache = SuffixCache(max_bytes=420 * 3 * 2 * 2 * 16 * 4, keep_conversations=0, share_prefix=tuple(A))
    for number in range(12):
        session = cache.session(number % 3)
        same_as_vanilla(model, A + old_text(60, number) + question(number), session.using(fidelity="exact"), steps=2)
        ask(model, head(number) + A + question(number), session, steps=2)
        check_pool(cache)
    assert cache.stats.evictions > 0


def test_system_turn_gives_the_common_start_of_a_template():
    class Tokenizer:
        chat_template = "x"

        def apply_chat_template(self, messages, tokenize):
            return "".join(f"<{each['role']}>{each['content']}</s>" for each in messages)

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [ord(character) for character in text]}

    ids = hf_suffix_cache.system_turn(Tokenizer(), "Be brief.")
    assert "".join(map(chr, ids)) == "<system>Be brief.</s><user>"
    Tokenizer.apply_chat_template = lambda self, messages, tokenize: messages[-1]["content"]
    with pytest.raises(ValueError, match="system"):
        hf_suffix_cache.system_turn(Tokenizer(), "Be brief.")
    Tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        hf_suffix_cache.system_turn(Tokenizer(), "Be brief.")


# -- what is told ---------------------------------------------------------------------------------------------------


def test_statistics_and_reports_of_a_session_tell_of_it_alone():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    alice, bob = cache.session("alice"), cache.session("bob")
    ask(model, A + question(1), alice)
    before = bob.stats.to_dict()
    assert not any(value for name, value in before.items() if name != "bytes_by_kind")
    ask(model, A + question(1), alice)
    assert bob.stats.to_dict() == before and bob.reports == [] and bob.last_report is None
    assert alice.stats.requests == 2 and alice.stats.exact_tokens > 0 and alice.stats.bytes_used > 0
    assert cache.session("alice").stats.requests == 2
    assert cache.stats.requests == 2 and cache.stats.prompt_tokens == 2 * len(A + question(1))


def test_statistics_of_a_session_that_is_being_evicted():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact", max_bytes=300_000)
    alice, done, interval = cache.session("alice"), [], sys.getswitchinterval()

    def work():
        try:
            for number in range(40):
                ask(model, old_text(40, number) + question(number), alice, steps=1)
        finally:
            done.append(True)

    def look():
        while not done:
            assert str(alice.stats)

    sys.setswitchinterval(1e-5)
    try:
        in_threads([work, look])
    finally:
        sys.setswitchinterval(interval)
    assert alice.stats.evictions > 20


# -- how long rows live ---------------------------------------------------------------------------------------------


@pytest.fixture
def clock():
    return Clock()


def test_rows_expire_when_they_are_not_used(clock):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact", clock=clock)
    alice, forever = cache.session("alice", ttl=60), cache.session("eve", ttl=None)
    for handle in (alice, forever, cache):
        ask(model, A + question(1), handle)
    clock.now += 59.9
    assert served(ask(model, A + question(2), alice).report) >= len(A)  # which is a use
    clock.now += 59.9
    assert served(ask(model, A + question(3), alice).report) >= len(A)
    clock.now += 60.1
    assert served(ask(model, A + question(4), alice).report) == 0
    clock.now += 1e9
    assert served(ask(model, A + question(5), forever).report) >= len(A)
    assert served(ask(model, A + question(6), cache).report) >= len(A)
    check_pool(cache)


def test_only_what_was_not_used_expires(clock):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact", clock=clock)
    alice = cache.session("alice", ttl=60)
    ask(model, A + question(1), alice)
    clock.now += 40
    ask(model, B + question(1), alice)
    clock.now += 40
    assert served(ask(model, A + question(1), alice).report) == 0
    assert served(ask(model, B + question(2), alice).report) >= len(B)
    check_pool(cache)


def test_memory_of_expired_sessions_comes_back(clock):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact", clock=clock)
    for number in range(20):
        ask(model, old_text(50, number), cache.session(number, ttl=10), steps=1)
    assert cache.stats.segments == 20
    clock.now += 10
    assert cache.stats.segments == 0 and cache.stats.bytes_used == 0
    assert len(cache._store.shelves) == 0 and len(cache._store.sessions) == 0
    check_pool(cache)


def test_the_newest_time_to_live_holds(clock):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact", clock=clock)
    ask(model, A + question(1), cache.session("alice", ttl=None))
    cache.session("alice", ttl=5)
    clock.now += 6
    assert served(ask(model, A + question(1), cache.session("alice", ttl=None)).report) == 0
    ask(model, A + question(1), cache.session("alice", ttl=5))
    cache.session("alice", ttl=500)
    clock.now += 6
    assert served(ask(model, A + question(1), cache.session("alice", ttl=500)).report) > 0
    check_pool(cache)


@pytest.mark.parametrize("jump", [-1e6, 1e6, float("1e300")])
def test_a_clock_that_jumps(clock, jump):
    """Backwards: nothing lives longer than its time from then on. Forwards: everything expires at once."""
    model, cache = make_model("llama"), SuffixCache(fidelity="exact", clock=clock)
    alice = cache.session("alice", ttl=60)
    ask(model, A + question(1), alice)
    clock.now += jump
    got = same_as_vanilla(model, A + question(2), alice)
    assert served(got.report) == (0 if jump > 0 else len(A))
    clock.now += 61 if abs(jump) < 1e100 else 0
    same_as_vanilla(model, A + question(3), alice)
    check_pool(cache)


def test_expiry_in_the_middle_of_a_call(clock):
    """A running call keeps what it was planned with; the answer is right, and the pool whole afterwards."""

    class Expire:
        def __call__(self, input_ids, scores):
            clock.now += 1000
            assert cache.stats.segments >= 0  # expires
            cache.session("alice")
            ask(model, old_text(80, 40 + input_ids.shape[1]), cache.session("mallory"), steps=1)
            return scores

    model, cache = make_model("llama"), SuffixCache(fidelity="exact", clock=clock)
    alice = cache.session("alice", ttl=60)
    ask(model, A + B + question(1), alice)
    same_as_vanilla(model, A + B + question(2), alice, processors=[Expire()], steps=4)
    check_pool(cache)


@pytest.mark.parametrize("keep", [0, 4])
def test_a_call_that_outlives_its_session(clock, keep):
    """Its session's shelf goes when the call is about to be stored: nothing is stored there, and no block is lost."""

    class Wait:
        def __call__(self, input_ids, scores):
            clock.now += 1000
            return scores

    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", clock=clock, keep_conversations=keep)
    alice = cache.session("alice", ttl=60)
    same_as_vanilla(model, A + B + question(2), alice, processors=[Wait()], steps=4)
    check_pool(cache)
    assert cache.stats.segments == 0 and cache.stats.bytes_used == 0
    assert ask(model, A + B + question(3), alice).report.exact_tokens == 0
    assert ask(model, A + B + question(4), alice).report.exact_tokens >= len(A + B)
    check_pool(cache)


def test_sessions_in_threads(clock):
    """Each thread its own session, one text in all of them: nobody is served another's rows, and all are right."""
    model, cache = make_model("llama"), SuffixCache(fidelity="exact", max_bytes=4 << 20)
    want = {number: ask(model, A + question(number), steps=3).tokens() for number in range(6)}
    first: list[int] = []

    def job(name: int):
        handle = cache.session(name, ttl=0.05 if name % 2 else None)
        for number in range(6):
            answer = ask(model, A + question(number), handle, steps=3)
            assert answer.tokens() == want[number]
            if number == 0:
                first.append(served(answer.report))

    in_threads([lambda name=name: job(name) for name in range(8)])
    assert first == [0] * 8
    check_pool(cache)


# -- what a prompt is about -----------------------------------------------------------------------------------------


def about(topic: int, seed: int, tokens: int = 60) -> list[int]:
    """Text in the words of one topic: 25 token ids of its own, and 10 that all topics have."""
    rng = np.random.default_rng(seed)
    words = np.concatenate([100 + 25 * topic + np.arange(25), 90 + np.arange(10)])
    return rng.choice(words, tokens).tolist()


def test_topic_falls_when_it_is_left_and_rises_when_it_goes_on():
    topic = Topic(threshold=0.3, cold=0.3)
    assert [topic.observe(about(0, seed)) for seed in range(4)] == [False] * 4 and topic.temperature == 0.8
    assert topic.observe(about(3, 10)) and topic.temperature == 0.3 and topic.similarity < 0.3
    assert not topic.observe(about(3, 11)) and topic.temperature == 0.8
    # a topic of few parts can't be left yet: these may have been the aside
    assert not topic.observe(about(0, 12)) and topic.similarity < 0.3


def test_too_little_text_has_no_topic():
    for tokens in (0, 1, MIN_TOKENS, 1 + MIN_TOKENS):  # the first one does not count
        topic = Topic(threshold=0.3, cold=0.3)
        for seed in range(3):
            topic.observe(about(0, seed))
        assert topic.observe(about(3, 10, tokens)) is (tokens > MIN_TOKENS)
        assert topic.temperature == (0.3 if tokens > MIN_TOKENS else 0.8)


def test_similarity_is_a_cosine():
    a, b = np.array(about(0, 1)), np.array(about(2, 2))
    assert similarity(a, [a]) == pytest.approx(1.0)
    assert 0.0 < similarity(a, [b]) < 0.3
    assert similarity(a, [b]) == pytest.approx(similarity(np.random.default_rng(0).permutation(a), [b]))
    assert similarity(np.array([1, 2]), [np.array([3, 4])]) == 0.0 == similarity(a[:0], [a])


def test_similarity_is_that_of_a_slow_count():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 44_000, 90)
    parts = [rng.choice(words, 80) for _ in range(4)]
    largest, documents = 44_000, [part.tolist() for part in parts]

    def vector(ids: list[int]) -> dict[int, float]:
        return {
            token: (1 + math.log(ids.count(token)))
            * math.log(1 + token / 12) ** 2
            * (2 + math.log(5 / (1 + sum(token in document for document in documents))))
            * (token <= 39_600)
            for token in ids
        }

    a, b = vector(documents[0]), vector(sum(documents[1:], []))
    assert any(value == 0 for value in (a | b).values())
    lengths = [math.sqrt(sum(value**2 for value in each.values())) for each in (a, b)]
    want = sum(value * b.get(token, 0.0) for token, value in a.items()) / math.prod(lengths)
    assert similarity(parts[0], parts[1:], largest) == pytest.approx(want) and want > 0.01


def test_what_frames_every_part_is_no_topic():
    frame = about(2, 9, 12)
    parts = [np.array([*about(0, seed, 40), *frame, *about(0, 10 + seed, 20)]) for seed in range(4)]
    kept = without_frame([*parts, np.array(about(0, 20, 10))])  # one that is too short to tell
    assert [len(part) for part in kept] == [60, 60, 60, 60, 10]
    assert all(
        np.array_equal(part, np.delete(whole, range(40, 52))) for part, whole in zip(kept[:4], parts, strict=True)
    )
    once_without = [*parts, np.array(about(0, 21, 60))]
    assert all(map(np.array_equal, without_frame(once_without), once_without))


def test_old_rows_are_not_moved_into_another_topic():
    model, cache = make_model("llama"), SuffixCache(topic_similarity=0.3)
    alice = cache.session("alice")
    old, new = about(0, 1, 80), about(3, 2, 80)
    for seed in (3, 13):
        ask(model, old + about(0, seed, 40), alice)
    on_topic = ask(model, about(0, 4, 20) + old + about(0, 5, 30), alice).report
    assert on_topic.shifted_tokens > 0
    off_topic = ask(model, new + old[:30] + about(3, 6, 60), alice).report
    assert off_topic.shifted_tokens == 0 and off_topic.carried_tokens == 0
    # the exact front stays, and what was stored since is moved again
    again = ask(model, old + about(0, 3, 40), alice.using(fidelity="exact")).report
    assert again.exact_tokens >= len(old)
    later = ask(model, about(3, 7, 20) + new + about(3, 8, 30), alice).report
    assert later.shifted_tokens > 0
    # control: the topic of one session is nobody else's business, and it can be switched off
    ask(model, old + about(0, 3, 40), cache)
    assert ask(model, new + old[:30] + about(3, 6, 60), cache).report.shifted_tokens > 0
    indifferent = SuffixCache(topic_similarity=0.0).session("alice")
    for seed in (3, 13, 23):
        ask(model, old + about(0, seed, 40), indifferent)
    assert ask(model, new + old[:30] + about(3, 6, 60), indifferent).report.shifted_tokens > 0
    check_pool(cache)


def test_the_registry_looks_at_each_shelf_when_it_is_due():
    sessions = Sessions(lambda: Topic(0.3, 0.3))
    for name, when in (("a", 5.0), ("b", 1.0), ("a", 3.0)):
        sessions.look_at((name, None), when)
    assert sessions.due(0.5) == []
    assert sessions.due(3.0) == [("b", None), ("a", None)]
    assert sessions.due(10.0) == [("a", None)] and sessions.due(10.0) == []
