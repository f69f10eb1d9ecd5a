"""`explain` says what the next call does, changes nothing, tells of nobody else's text, and names near misses."""

import numpy as np
import pytest
import torch

import hf_suffix_cache
from hf_suffix_cache import SuffixCache
from hf_suffix_cache.causes import CAUSES
from hf_suffix_cache.explaining import SHOWN
from hf_suffix_cache.near_misses import NearMiss
from reference import ask, check_pool, common_runs, in_threads, stored
from tiny_models import A, B, C, D, head, make_model, new_text, old_text, question, text


def planned(spans) -> list[tuple]:
    """Of each token what it is served as, by how much it is moved, and from which segment; before repair."""
    return [
        ("shifted" if span.kind == "repaired" else span.kind, span.shift, span.segment)
        for span in spans
        for _ in range(span.start, span.stop)
    ]


def agrees(explanation, report) -> bool:
    (spans,) = report.spans
    return planned(explanation.spans) == planned(spans)


def check(explanation) -> None:
    """Spans and reasons cover the prompt once and in order, and say the same."""
    for parts in (explanation.spans, explanation.reasons):
        borders = [0, *(part.stop for part in parts)]
        assert [part.start for part in parts] == borders[:-1] and borders[-1] == explanation.prompt_tokens
    kinds = [kind for kind, _, _ in planned(explanation.spans)]
    assert kinds == [reason.kind for reason in explanation.reasons for _ in range(reason.start, reason.stop)]
    for reason in explanation.reasons:
        assert (reason.cause == reason.kind) == (reason.kind != "new") and reason.cause in CAUSES
    assert sum(explanation.causes.values()) == explanation.prompt_tokens
    str(explanation), explanation._repr_html_()


def causes_of(explanation) -> list[str]:
    return [reason.cause for reason in explanation.reasons for _ in range(reason.start, reason.stop)]


def some_prompt(rng, before: list[list[int]]) -> list[int]:
    """Pieces of what has run before, of fixed texts and of new text; now and then a turn of a conversation."""
    if before and rng.random() < 0.3:
        return before[rng.integers(len(before))] + new_text(int(rng.integers(2, 40)), int(rng.integers(10**6)))
    ids = []
    for _ in range(rng.integers(1, 6)):
        source = [A, B, C, D, *before][rng.integers(4 + len(before))]
        start = int(rng.integers(0, max(1, len(source) - 8)))
        piece = source[start : start + int(rng.integers(3, 60))]
        ids += piece if rng.random() < 0.7 else new_text(int(rng.integers(1, 25)), int(rng.integers(10**6)))
    return ids[:180]


# -- what the next call does ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, options, session",
    [
        ("llama", {"fidelity": "exact"}, None),
        ("llama", {}, None),
        ("llama", {"fidelity": "fast", "min_match_tokens": 8, "seam_tokens": 0, "tail_tokens": 1}, None),
        ("llama", {"max_kl": 0.02}, None),
        ("llama", {"share_prefix": 12}, "alice"),
        ("qwen3", {"topic_similarity": 0.9}, "alice"),
        ("llama", {"store_dtype": "bfloat16", "keep_conversations": 0}, None),
        ("llama", {"max_bytes": 900 * 3 * 2 * 2 * 16 * 4}, None),
        ("llama", {"settle": True}, None),
        ("gpt2", {}, None),
        ("phi3", {}, None),
        ("dynamic", {}, None),
    ],
    ids=lambda value: str(value),
)
def test_explain_says_what_the_next_call_does(kind, options, session):
    model, cache = make_model(kind), SuffixCache(**options)
    handles = [cache] if session is None else [cache.session(session), cache.session("other"), cache]
    cache.capability(model)
    rng, before, seen = np.random.default_rng(7), [], set()
    for number in range(40):
        ids, handle = some_prompt(rng, before), handles[int(rng.integers(len(handles)))]
        explanation = handle.explain(model, ids)
        check(explanation)
        answer = ask(model, ids, handle, steps=int(rng.integers(1, 5)))
        assert agrees(explanation, answer.report), (number, explanation.spans, answer.report.spans)
        seen |= {kind for kind, _, _ in planned(explanation.spans)}
        before = [*before[-5:], answer.tokens()[:150]]
    wanted = {"exact", "new"} | (set() if cache.config.fidelity == "exact" or kind == "gpt2" else {"shifted"})
    if cache.config.store_dtype is not None:  # rows in a smaller dtype are no exact ones
        wanted = wanted - {"exact"} | {"carried"}
    assert wanted <= seen
    check_pool(cache)


@pytest.mark.parametrize(
    "kind, options, kinds",
    [
        ("llama", {}, ("exact", "shifted")),
        ("qwen3", {"fidelity": "exact"}, ("exact",)),
        ("llama", {"store_dtype": "bfloat16", "keep_conversations": 0}, ("shifted",)),
        ("gpt2", {"store_dtype": "int8"}, ("exact",)),  # the newest conversations keep their rows as they are
    ],
    ids=lambda value: str(value),
)
def test_explain_says_what_a_loaded_store_does(tmp_path, kind, options, kinds):
    model, cache = make_model(kind), SuffixCache(**options)
    for handle in (cache, cache.session("alice", ttl=None)):
        ask(model, head(1) + A + B + question(1), handle)
        ask(model, head(2) + C + D + question(2), handle)
    cache.save(tmp_path)
    cache = SuffixCache.load(tmp_path, **options)
    cache.capability(model)
    rng, seen = np.random.default_rng(8), set()
    for number in range(12):
        handle = (cache, cache.session("alice", ttl=None), cache.session("bob"))[number % 3]
        ids = head(1 + number // 6) + [A, C][number // 6] + new_text(20, number)
        ids = ids if number % 2 else head(3) + [B, D][number // 6] + some_prompt(rng, [])
        explanation = handle.explain(model, ids)
        check(explanation)
        assert agrees(explanation, ask(model, ids, handle, steps=2).report), (number, explanation.spans)
        seen |= {span.kind for span in explanation.spans if number % 3 < 2}
    assert {*kinds, "new"} <= seen
    check_pool(cache)


def test_control_what_has_changed_since_is_seen():
    """The comparison above can fail: an explanation from before a store, an eviction or for another handle differs."""
    model, cache = make_model("llama"), SuffixCache()
    ids = head(1) + A + B + question(1)
    cache.capability(model)
    early = cache.explain(model, ids)
    assert agrees(early, ask(model, ids, cache).report)
    full = cache.explain(model, ids)
    exact = cache.using(fidelity="exact").explain(model, head(2) + A + B + question(1))
    other = cache.session("alice").explain(model, ids)
    assert not agrees(other, ask(model, ids, cache).report)
    assert not agrees(exact, ask(model, head(2) + A + B + question(1), cache).report)
    cache.clear()
    assert not agrees(full, ask(model, ids, cache).report)
    assert not agrees(early, ask(model, ids, cache).report)


def test_conversations_that_are_carried_on():
    model, cache = make_model("llama"), SuffixCache()
    ask(model, A + B + question(1), cache)
    answer = ask(model, head(1) + B + question(2), cache)
    assert answer.report.shifted_tokens > 0
    # the tail reaches into what would be carried: all but the newest token of the conversation, which was not run
    assert cache.explain(model, answer.tokens() + new_text(3, 6)).causes["tail"] == 16 - 3 - 1
    turn = answer.tokens() + new_text(30, 5)
    explanation = cache.explain(model, turn)
    assert explanation.causes["carried"] > 0 and agrees(explanation, ask(model, turn, cache).report)


@pytest.mark.parametrize("fidelity", ["balanced", "exact"])
def test_causes_are_those_of_a_slow_search(fidelity):
    """What is called not stored has no long piece in common with any stored rows; what is called stored has one."""
    model = make_model("llama")
    cache = stored(model, A + B + question(1), C + D + question(2), fidelity=fidelity)
    rng, before, told = np.random.default_rng(3), [A + B, C + D], set()
    for _ in range(15):
        ids = some_prompt(rng, before)
        explanation = cache.explain(model, ids)
        causes = np.array(causes_of(explanation))
        front = max((span.stop for span in explanation.spans if span.kind in ("exact", "carried")), default=0)
        long, some = np.zeros((2, len(ids)), dtype=bool)
        for shelf in cache._store.shelves.values():
            for segment in shelf.segments:
                for start, stop in (piece for piece in segment.pieces() if piece[1] - piece[0] >= 8):
                    for found, shortest in ((long, 15), (some, 8)):
                        found[front:] |= common_runs(ids[front:], segment.ids[start:stop], shortest)
        assert not (long & np.isin(causes, ("unstored", "empty"))).any()
        assert (some | ~np.isin(causes, ("short", "unmoved", "shifted"))).all()
        assert causes[-1] == "last" and (causes == "last").sum() == 1
        told |= set(causes)
        ask(model, ids, cache, steps=1)
    assert {"unstored", "exact", "last"} <= told
    assert {"shifted", "short", "tail"} <= told if fidelity == "balanced" else "unmoved" in told


# -- it changes nothing -----------------------------------------------------------------------------------------------


def state_of(cache) -> list:
    """All that a call could have touched."""
    store = cache._store
    shelves = [
        (
            key[1],
            [(sequence.last_used, sequence.busy, sequence.extent is None) for sequence in shelf.sequences],
            [
                (each.segment_id, each.references, each.holders, each.last_used, {**vars(each.uses)})
                for each in shelf.segments
            ],
            len(shelf.windows),
            shelf.evictions,
        )
        for key, shelf in store.shelves.items()
    ]
    sessions = [
        (scope, session.ttl, session.last_used, session.cutoff, session.topic.temperature, session.topic.similarity)
        for scope, session in ((scope, store.sessions.get(scope)) for scope in store.sessions)
    ]
    slabs = [slab.references.tolist() for pool in store.pools.values() for slab in pool.slabs.values()]
    return [shelves, sessions, slabs, store.usage.work, cache.stats.to_dict(), len(cache.reports), cache.last_report]


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("session", [None, "alice"])
def test_explain_runs_nothing_and_touches_nothing(session):
    clock = Clock()
    model, cache = make_model("llama", spy=True), SuffixCache(clock=clock, topic_similarity=1.0)
    handle = cache if session is None else cache.session(session, ttl=100)
    for ids in (A + B + question(1), head(1) + B + question(2)):
        ask(model, ids, handle)
    clock.now += 50
    before = state_of(cache)
    model.spy.clear()
    for ids in (A + B + question(1), head(2) + B + C + question(3), C + D):
        check(handle.explain(model, ids))
    assert state_of(cache) == before and model.spy.rows() == 0
    ask(model, head(2) + B + C + question(3), handle)  # control
    assert state_of(cache) != before and model.spy.rows() > 0
    check_pool(cache)


def test_explaining_keeps_nothing_alive():
    clock = Clock()
    model, cache = make_model("llama"), SuffixCache(fidelity="exact", clock=clock)
    alice = cache.session("alice", ttl=100)
    ask(model, A + question(1), alice)
    clock.now += 60
    assert alice.explain(model, A + question(2)).causes["exact"] == len(A)
    clock.now += 60
    explanation = alice.explain(model, A + question(2))
    assert "exact" not in explanation.causes and cache.stats.segments == 0
    assert len(cache._store.sessions) == 0 and all(key[1].scope.kind == "shared" for key in cache._store.shelves)
    assert agrees(explanation, ask(model, A + question(2), alice).report)


def test_rotary_modules_are_left_as_they_were():
    model, cache = make_model("phi3"), SuffixCache()
    ask(model, old_text(100, 1), cache)
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    check(cache.explain(model, old_text(100, 1)))
    check(cache.explain(model, old_text(20, 1)))
    after = dict(model.named_buffers())
    assert before.keys() == after.keys() and all(torch.equal(after[name], each) for name, each in before.items())


def test_explaining_while_others_store_and_evict():
    """Whatever goes on meanwhile, an explanation covers its prompt, and the pool is whole afterwards."""
    model, cache = make_model("llama"), SuffixCache(max_bytes=900 * 3 * 2 * 2 * 16 * 4)
    ask(model, A + B + question(1), cache)
    running, told = [True], set()

    def call(name: str):
        for number in range(15):
            ask(model, head(number) + A + old_text(60, number) + question(number), cache.session(name), steps=2)
        running.clear()

    def look(name: str):
        while running:
            explanation = cache.session(name).explain(model, head(1) + A + B + question(1), WORDS)
            check(explanation)
            told.update(explanation.causes)

    in_threads([lambda: call("alice"), lambda: call("bob"), lambda: look("alice"), lambda: look("bob")])
    assert "shifted" in told and cache.stats.evictions > 0
    check_pool(cache)


# -- whose text -------------------------------------------------------------------------------------------------------


def test_nothing_is_told_of_another_sessions_text():
    """The same words, spans and near misses, whether another session has run the text or nobody has."""
    model = make_model("llama")
    told = []
    for others in (True, False):
        cache = SuffixCache()
        cache.capability(model)
        ask(model, D + question(9), cache.session("bob"))
        if others:
            ask(model, A + B + C + question(1), cache.session("alice"))
            ask(model, A + B + C + question(1), cache)
        bob = cache.session("bob")
        guesses = (A + B + question(1), head(1) + B + question(2), A[:20] + [9] + A[20:] + question(3))
        told.append([str(bob.explain(model, ids)) + bob.explain(model, ids)._repr_html_() for ids in guesses])
        assert bob.explain(model, D + question(8)).causes["exact"] == len(D)  # control
        if others:
            assert cache.session("alice").explain(model, A + B).causes["exact"] == len(A + B) - 1
            assert cache.explain(model, A + B).causes["exact"] == len(A + B) - 1
    assert told[0] == told[1]


def test_shared_text_is_explained_to_everyone():
    model, cache = make_model("llama"), SuffixCache()
    cache.register(model, A)
    for handle in (cache, cache.session("alice"), cache.session("bob")):
        explanation = handle.explain(model, head(1) + A + question(1))
        assert explanation.causes["shifted"] >= len(A) - 4
        assert agrees(explanation, ask(model, head(1) + A + question(1), handle).report)


# -- causes -----------------------------------------------------------------------------------------------------------


def test_kinds_and_causes_of_one_prompt():
    model = make_model("llama")
    cache = stored(model, A + B + C + question(1))
    ids = A + new_text(20, 1) + C + new_text(9, 2) + B[:11] + new_text(20, 3) + B
    explanation = cache.explain(model, ids)
    check(explanation)
    causes = causes_of(explanation)
    assert causes[: len(A)] == ["exact"] * len(A)
    assert causes[len(A) : len(A) + 20] == ["unstored"] * 20
    assert causes[len(A) + 20 : len(A) + 20 + len(C)] == ["shifted"] * len(C)
    assert causes[-1] == "last" and "tail" in causes[-16:-1]
    computed = sum(count for cause, count in explanation.causes.items() if cause not in ("exact", "shifted"))
    assert explanation.hit_rate == pytest.approx(1 - computed / len(ids))
    moved = len(A) + 20 - len(A + B)
    (line,) = (line for line in str(explanation).split("\n") if line.startswith("  [60, 112) "))
    assert line.endswith(f"shifted: {CAUSES['shifted']}, by {moved:+}")


def test_pieces_that_are_too_short():
    model = make_model("llama")
    cache = stored(model, A + B + question(1))
    ids = head(1) + A[8:20] + new_text(30, 3)
    explanation = cache.explain(model, ids)
    assert explanation.causes == {"short": 12, "unstored": len(ids) - 13, "last": 1}
    assert "shifted" in cache.using(min_match_tokens=8).explain(model, ids).causes  # control


def test_text_that_may_not_be_moved():
    model = make_model("llama")
    cache = stored(model, A + B + question(1))
    ids = head(1) + A + B + question(2)
    assert cache.using(fidelity="exact").explain(model, ids).causes["unmoved"] == len(A + B)
    assert "unmoved" not in cache.explain(model, ids).causes
    gpt2 = make_model("gpt2")
    ask(gpt2, A + B + question(1), cache)
    assert cache.explain(gpt2, ids).causes["front"] == len(A + B)


def test_text_that_was_moved_too_often():
    model = make_model("llama")
    cache = stored(model, A + B + question(1))
    (shelf,) = cache._store.shelves.values()
    for segment in shelf.segments:  # as if it had been computed behind moved rows again and again
        shelf.windows.remove(segment)
        segment.hops = 4
    for mean in list(shelf.means):
        shelf.forget_mean(mean)
    ids = head(1) + A + B + question(2)
    explanation = cache.explain(model, ids)
    assert explanation.causes["hops"] == len(A + B)
    assert agrees(explanation, ask(model, ids, cache).report)


def test_text_from_another_topic():
    model, cache = make_model("llama"), SuffixCache(topic_similarity=0.3)
    alice = cache.session("alice")
    rng = np.random.default_rng(0)
    about = [rng.choice(100 + 25 * topic + np.arange(25), 60).tolist() for topic in (0, 0, 3, 3, 0, 0)]
    for part in (about[0] + about[1], about[4], about[5]):  # a topic of fewer parts can't be left
        ask(model, part, alice)
    ids = about[2] + about[0][:24] + about[3]
    explanation = alice.explain(model, ids)
    assert explanation.causes["topic"] == 24
    assert alice.explain(model, ids).causes == explanation.causes  # asking is no prompt of the session
    assert agrees(explanation, ask(model, ids, alice).report)
    indifferent = SuffixCache(topic_similarity=0.0).session("alice")  # control
    for part in (about[0] + about[1], about[4], about[5]):
        ask(model, part, indifferent)
    assert indifferent.explain(model, ids).causes["shifted"] == 24


def test_text_of_the_model_in_another_state():
    model = make_model("llama")
    cache = stored(model, A + B + question(1))
    attention = model.model.layers[1].self_attn
    before = attention.scaling
    attention.scaling = 2 * before
    cache.capability(model)
    ids = A + B + question(1)
    explanation = cache.explain(model, ids)
    assert explanation.causes == {"state": len(ids) - 1, "last": 1}
    assert agrees(explanation, ask(model, ids, cache).report)
    attention.scaling = before
    assert cache.explain(model, ids).causes == {"exact": len(ids) - 1, "last": 1}
    other = make_model("llama", seed=1)  # control: of another model nothing is told
    cache.capability(other)
    assert cache.explain(other, ids).causes == {"empty": len(ids) - 1, "last": 1}


def test_text_under_other_frequencies():
    model, cache = make_model("phi3"), SuffixCache()
    ask(model, A + question(1, 10), cache)  # within the original length
    ids = A + old_text(40, 7)
    explanation = cache.explain(model, ids)
    assert explanation.causes["conditions"] == len(A) and agrees(explanation, ask(model, ids, cache).report)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_a_call_refuses_explain_refuses_for_the_same_reason():
    ids = A + question(1)
    for kind, prepare in (
        ("mamba", None),
        ("llama", lambda model: model.train()),
        ("llama", lambda model: setattr(model.generation_config, "use_cache", False)),
    ):
        model, cache = make_model(kind), SuffixCache()
        before = model.generation_config.use_cache
        ask(model, ids, cache)
        if prepare is not None:
            prepare(model)
        explanation = cache.explain(model, ids)
        check(explanation)
        report = ask(model, ids, cache).report
        assert explanation.reason == report.reason and explanation.reason
        assert explanation.causes == {"refused": len(ids)} and agrees(explanation, report)
        assert explanation.reason in str(explanation)
        model.eval()
        model.generation_config.use_cache = before


def test_a_model_that_was_not_met_is_not_run():
    model, cache = make_model("llama", spy=True), SuffixCache()
    explanation = cache.explain(model, A)
    assert model.spy.rows() == 0 and "capability" in explanation.reason
    cache.capability(model)
    assert model.spy.rows() > 0 and cache.explain(model, A).causes == {"empty": len(A) - 1, "last": 1}
    assert agrees(explanation, ask(model, A, cache).report)


@pytest.mark.parametrize(
    "ids, tokenizer, error, words",
    [
        ([], None, ValueError, "empty"),
        ([5, 256], None, ValueError, "255"),
        ([-1], None, ValueError, "255"),
        ("words", None, ValueError, "tokenizer"),
        ([[5, 6], [7, 8]], None, TypeError, r"token ids, integers, got \[5, 6\]"),
        (torch.tensor([[5, 6], [7, 8]]), None, TypeError, "token ids"),
        ([5, 5.5], None, TypeError, "token ids, integers, got 5.5"),
        (torch.tensor([5.0]), None, TypeError, "token ids, integers, got 5.0"),
        (5, None, TypeError, "got int"),
        ({"input_ids": [5, 6]}, None, TypeError, 'pass its \\["input_ids"\\]'),
        ("words", "gpt2", TypeError, "`tokenizer` must be a tokenizer of transformers, got 'gpt2'"),
        ([5, 6], object(), TypeError, "decode"),
    ],
)
def test_wrong_prompts_are_named(ids, tokenizer, error, words):
    with pytest.raises(error, match=words):
        SuffixCache().explain(make_model("llama"), ids, tokenizer)


def test_prompts_of_all_kinds():
    model = make_model("llama")
    cache = stored(model, A + question(1))
    want = cache.explain(model, A)
    for ids in (tuple(A), np.array(A), torch.tensor(A), torch.tensor([A])):
        assert cache.explain(model, ids) == want
    assert isinstance(want, hf_suffix_cache.Explanation)
    with pytest.raises(TypeError, match="PreTrainedModel"):
        cache.explain(object(), A)


# -- near misses ------------------------------------------------------------------------------------------------------


class Words:
    """Reads some tokens as told, the others as words of their own."""

    def __init__(self, **tokens: str):
        self.tokens = {int(name[1:]): text for name, text in tokens.items()}

    def decode(self, ids) -> str:
        return "".join(self.tokens.get(token, f" w{token}") for token in ids)

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [int(word[1:]) for word in text.split()]}


WORDS = Words(
    t200=" foobar", t201=" foo", t202="bar", t203=" fob", t210="The", t211=" The", t220="\ufffd", t221="\ufffd"
)


@pytest.mark.parametrize("fidelity", ["exact", "balanced"])
def test_text_that_is_tokenised_otherwise_is_named(fidelity):
    """An answer that is encoded again: one token there, two here, and the same text behind them."""
    model = make_model("llama")
    cache = stored(model, A + [200] + B + question(1), fidelity=fidelity)
    ids = A + [201, 202] + B + question(2)
    miss = NearMiss(len(A), len(A) + 2, (201, 202), (200,), " foobar")
    explanation = cache.explain(model, ids, WORDS)
    check(explanation)
    assert explanation.near_misses == (miss,)
    assert explanation.causes["tokenised"] == 2 and "' foobar'" in str(explanation)
    assert "tokenised otherwise" in str(explanation) and "&#x27; foobar&#x27;" in explanation._repr_html_()
    (unsure,) = cache.explain(model, ids).near_misses
    assert (unsure.start, unsure.stop, unsure.stored, unsure.text) == (miss.start, miss.stop, (200,), None)
    assert "tokenizer=" in str(unsure)
    assert agrees(explanation, ask(model, ids, cache).report)


@pytest.mark.parametrize(
    "there, here, named, unsure",
    [
        ([200], [201, 202], True, True),
        ([201, 202], [200], True, True),
        ([200], [203], False, True),  # an edit
        ([200], [201, 203], False, True),
        ([201, 202, 90], [200, 91], True, True),  # and an edit behind it
        ([200], [], False, False),  # a word less
        ([200, 201, 202, 203], [203, 202, 201, 200], False, False),  # too many
        ([220], [221], False, True),  # parts of letters, which may be any
    ],
)
def test_only_what_reads_the_same_is_named(there, here, named, unsure):
    model = make_model("llama")
    cache = stored(model, A + there + B + question(1))
    ids = A + here + B + question(2)
    assert bool(cache.explain(model, ids, WORDS).near_misses) == named
    assert bool(cache.explain(model, ids).near_misses) == unsure


@pytest.mark.parametrize("there, here, named", [([210], [211], True), ([210], [203], False), ([220], [221], False)])
def test_the_first_word_of_a_text_behind_other_text(there, here, named):
    """At the border of a stored text nothing goes on to the left: only a tokenizer can tell."""
    model = make_model("llama")
    cache = stored(model, old_text(20, 1) + there + B + question(1))
    ids = head(1) + here + B + question(2)
    misses = cache.explain(model, ids, WORDS).near_misses
    assert [(miss.start, miss.ids, miss.stored) for miss in misses] == (
        [(len(head(1)), tuple(here), tuple(there))] if named else []
    )
    assert cache.explain(model, ids).near_misses == ()


def test_the_last_word_of_a_text_before_other_text():
    model = make_model("llama")
    cache = stored(model, old_text(20, 1) + B + [200] + new_text(40, 1))
    misses = cache.explain(model, head(1) + B + [201, 202] + question(2), WORDS).near_misses
    assert [(miss.start, miss.ids, miss.stored) for miss in misses] == [(len(head(1) + B), (201, 202), (200,))]


def test_what_another_copy_serves_is_no_miss():
    model = make_model("llama")
    texts = A + [200] + B + question(1), new_text(9, 1) + A + [201, 202] + B + question(3)
    cache = stored(model, *texts, fidelity="exact").using(fidelity="balanced")
    assert cache.explain(model, head(1) + A + [201, 202] + B + question(2), WORDS).near_misses == ()
    assert cache.explain(model, head(1) + A[5:] + [201, 202] + C + question(2), WORDS).near_misses == ()


def test_near_misses_of_other_sessions_are_not_named():
    model, cache = make_model("llama"), SuffixCache()
    ask(model, A + [200] + B + question(1), cache.session("alice"))
    ids = A + [201, 202] + B + question(2)
    ask(model, D + question(1), cache.session("bob"))
    assert cache.session("bob").explain(model, ids, WORDS).near_misses == ()
    assert len(cache.session("alice").explain(model, ids, WORDS).near_misses) == 1  # control


# -- how it looks -----------------------------------------------------------------------------------------------------


def test_strings_are_encoded_and_tokens_shown():
    model = make_model("llama")
    cache = stored(model, A + question(1))
    explanation = cache.explain(model, " ".join(f"w{token}" for token in A), Words(t40="<b>&"))
    assert explanation.causes["exact"] == len(A) - 1
    assert explanation.tokens[0] == f" w{A[0]}" and f" w{A[0]}" in explanation._repr_html_()
    shown = cache.explain(model, [40] + A, Words(t40="<b>&"))._repr_html_()
    assert "&lt;b&gt;&amp;" in shown and "<b>&" not in shown
    for tag in ("div", "span", "table", "tr", "td", "svg"):
        assert shown.count(f"<{tag} ") + shown.count(f"<{tag}>") == shown.count(f"</{tag}>")


def test_long_lists_are_cut():
    model = make_model("llama")
    cache = stored(model, A + B + C + question(1))
    ids = [token for number in range(60) for token in [*C[:20], *text(3, 800 + number, 130, 250)]]
    explanation = cache.explain(model, ids)
    assert len(explanation.reasons) > SHOWN
    lines = str(explanation).split("\n")
    assert lines[SHOWN + 1] == f"  and {len(explanation.reasons) - SHOWN} more"
    assert f"and {len(explanation.reasons) - SHOWN} more" in explanation._repr_html_()
