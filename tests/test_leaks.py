"""O8: what one scope has run changes nothing for another: neither answers, nor work, nor reports, nor statistics."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_suffix_cache import SuffixCache
from reference import ask, check_pool, fresh_rows, in_threads, max_difference, same_as_vanilla, served_rows
from test_traffic import Traffic
from tiny_models import CORE, A, B, head, make_model, new_text, old_text, question

ROW = 3 * 2 * 2 * 16 * 4  # bytes: layers x (keys, values) x kv heads x head_dim x fp32


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def told(report) -> dict:
    """All that a report says but its times and what rounding moves."""
    values = report.to_dict()
    for name in ("timings", "residual", "expected_kl", "features", "equivalent_rows"):
        del values[name]
    return values


def reused(report) -> int:
    return report.prompt_tokens - report.new_tokens


# -- the threat is there --------------------------------------------------------------------------------------------


def behind(number: int) -> list[int]:
    """A neutral text behind one of 20 secrets, which are one token each."""
    return head(0) + [140 + number] + new_text(6, 0) + A + question(0)


def test_stored_rows_tell_what_stood_before_them():
    """The control of this file: who reads another scope's rows reads its text. The first layer's rows tell nothing."""
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    place = slice(behind(0).index(A[0]), behind(0).index(A[0]) + len(A))
    candidates = [[values[:, place] for _, values in fresh_rows(model, behind(number))] for number in range(20)]
    for number in range(20):
        owner = cache.session(number)
        ask(model, behind(number), owner)
        answer, rows = served_rows(model, behind(number), owner, steps=1)
        assert answer.report.exact_tokens == len(behind(number)) - 1
        stored = [values[:, place] for _, values in rows]
        for layer in (0, 1, 2):
            distances = [float((stored[layer] - other[layer]).abs().max()) for other in candidates]
            nearest = int(np.argmin(distances))
            if layer == 0:
                assert max(distances) < 1e-5
            else:
                assert nearest == number and sorted(distances)[1] > 100 * distances[nearest]
    check_pool(cache, handed_out=True)


def test_moved_rows_carry_what_stood_before_them_into_the_answer():
    model, cache = make_model("llama"), SuffixCache()
    scores = []
    for number in range(4):
        owner = cache.session(number)
        ask(model, behind(number), owner)
        answer = ask(model, head(9) + A + question(9), owner, steps=1)
        assert answer.report.shifted_tokens > 0
        scores.append(answer.first)
    differences = [float((one - other).abs().max()) for one in scores for other in scores if one is not other]
    assert min(differences) > 1e-2


# -- guesses of what another scope has said ---------------------------------------------------------------------------

SAID = head(1) + A + B + question(1)
NOT_SAID = head(1) + old_text(len(A), 91) + old_text(len(B), 92) + question(2)
SCOPES = {
    "session": lambda cache: cache.session("alice"),
    "session with another spelling": lambda cache: cache.session("Alice"),
    "number": lambda cache: cache.session(1),
    "digit": lambda cache: cache.session("1"),
    "anonymous": lambda cache: cache,
    "sharing": lambda cache: cache.session("carol", share=True),
}
PAIRS = [
    ("session", "session with another spelling"),
    ("session", "anonymous"),
    ("session", "sharing"),
    ("number", "digit"),
    ("anonymous", "session"),
    ("anonymous", "sharing"),
]


def guesses(answer: list[int]) -> dict[str, list[int]]:
    return {
        "all of it": SAID,
        "its front": SAID[:60],
        "more": SAID + new_text(30, 3),
        "a piece of it": head(5) + A + question(5),
        "a small piece of it": head(5) + B[3:22] + question(5),
        "the answer too": answer + question(9),
        "the answer alone": head(6) + answer[-40:] + question(9),
    }


def forward(model, ids, handle):
    """One plain forward under `attach`."""
    with torch.no_grad(), handle.attach(model):
        logits = model(torch.tensor([ids]), logits_to_keep=1).logits[:, -1]
    gc.collect()
    return SimpleNamespace(scores=[logits], ids=logits.argmax(-1), report=handle.last_report)


WAYS = {
    "greedy": lambda model, ids, handle: ask(model, ids, handle, steps=3),
    "sampled": lambda model, ids, handle: ask(model, ids, handle, steps=3, seed=3, do_sample=True),
    "beams": lambda model, ids, handle: ask(model, ids, handle, steps=3, num_beams=2),
    "batch": lambda model, ids, handle: ask(model, [ids, new_text(len(ids), 8)], handle, steps=3),
    "bound": lambda model, ids, handle: ask(model, ids, handle.using(max_kl=0.05), steps=3),
    "forward": forward,
}


def world(model, said: list[int], owner: str, asking: str, guess: list[int], way: str = "greedy", **options):
    """What a guess gives and costs in a cache in which its owner has said something."""
    cache = SuffixCache(**options)
    cache.capability(model)
    ask(model, said, SCOPES[owner](cache), steps=8)
    handle = SCOPES[asking](cache)
    model.spy.clear()
    got = WAYS[way](model, guess, handle)
    got.rows = model.spy.rows()
    got.again = WAYS[way](model, guess, handle)  # what was stored of the guess must not differ either
    check_pool(cache)
    return got


def same_worlds(one, other) -> None:
    """Nothing that can be seen from outside tells the two apart."""
    assert one.rows == other.rows and one.ids.tolist() == other.ids.tolist()
    assert max_difference(one.scores, other.scores) < 1e-4
    for left, right in ((one, other), (one.again, other.again)):
        if left.report is not None:
            assert told(left.report) == told(right.report)


@pytest.mark.parametrize("guess", list(guesses([])))
@pytest.mark.parametrize("kind", CORE)
def test_a_guess_costs_the_same_right_or_wrong(kind, guess):
    model = make_model(kind, spy=True)
    ids = guesses(ask(model, SAID, steps=8).tokens())[guess]
    right = world(model, SAID, "session", "anonymous", ids)
    wrong = world(model, NOT_SAID, "session", "anonymous", ids)
    same_worlds(right, wrong)
    assert reused(right.report) == 0
    # control: within one scope the two worlds differ, and the right guess costs less; random texts have no topic
    right, wrong = (world(model, said, "session", "session", ids, topic_similarity=0.0) for said in (SAID, NOT_SAID))
    assert right.rows < wrong.rows and reused(right.report) >= 19


@pytest.mark.parametrize("owner, asking", PAIRS)
@pytest.mark.parametrize("fidelity", ["exact", "balanced", "fast"])
def test_no_scope_answers_for_another(owner, asking, fidelity):
    model = make_model("llama", spy=True)
    for guess in (SAID, head(5) + A + question(5)):
        worlds = [world(model, said, owner, asking, guess, fidelity=fidelity) for said in (SAID, NOT_SAID)]
        same_worlds(*worlds)
        assert reused(worlds[0].report) == 0


@pytest.mark.parametrize("way", [name for name in WAYS if name != "greedy"])
def test_no_way_of_asking_tells(way):
    model = make_model("llama", spy=True)
    for guess in (SAID, head(5) + A + question(5)):
        same_worlds(*(world(model, said, "session", "anonymous", guess, way) for said in (SAID, NOT_SAID)))
    right, wrong = (world(model, said, "session", "session", SAID, way) for said in (SAID, NOT_SAID))  # control
    assert right.rows < wrong.rows


@pytest.mark.parametrize(
    "settings", [dict(heal_rows=4), dict(settle=True), dict(audit_rate=1.0), dict(consensus=False)]
)
def test_no_setting_tells(settings):
    model = make_model("llama", spy=True)
    for guess in (SAID, head(5) + A + question(5)):
        same_worlds(*(world(model, said, "session", "anonymous", guess, **settings) for said in (SAID, NOT_SAID)))


def test_guesses_are_served_nothing_while_rows_are_given_up():
    """A store that is always full: rows come and go, and memory passes from scope to scope."""
    model, served = make_model("llama"), 0
    cache = SuffixCache(max_bytes=900 * ROW, keep_conversations=1)
    alice = cache.session("alice")
    for number in range(30):
        secret = head(number) + old_text(60, 200 + number) + question(number)
        ask(model, secret, alice, steps=2)
        for part, guess in enumerate((secret, head(90) + secret[12:72] + question(90 + number))):
            stranger = cache.session(f"mallory {number} {part}")
            got = same_as_vanilla(model, guess, stranger, steps=2)
            assert reused(got.report) == 0 and got.report.computed_rows == len(guess)
        served += reused(ask(model, secret, alice, steps=2).report)
        check_pool(cache)
    assert served > 0 and cache.stats.evictions > 0


def test_guesses_are_served_nothing_beside_their_owner():
    """Owner and strangers at the same time, on one model and one cache."""
    model, cache = make_model("llama"), SuffixCache(max_bytes=4000 * ROW)
    secrets = [head(number) + old_text(60, 300 + number) + question(number) for number in range(6)]
    served = []

    def owner():
        alice = cache.session("alice")
        for secret in secrets * 3:
            served.append(reused(ask(model, secret, alice, steps=2).report))

    def stranger(name: int):
        for number, secret in enumerate(secrets * 3):
            report = ask(model, secret, cache.session(f"mallory {name} {number}"), steps=2).report
            assert reused(report) == 0 and report.computed_rows == len(secret)

    in_threads([owner, *(lambda name=name: stranger(name) for name in range(4))])
    assert max(served) > 0
    check_pool(cache)


# -- everything that a scope sees, with and without the others ------------------------------------------------------

ACTORS = {
    "alice": lambda cache: cache.session("alice", ttl=8.0),
    "bob": lambda cache: cache.session("bob", ttl=None),
    "anonymous": lambda cache: cache,
    "everyone": lambda cache: cache.session("alice", share=True),
}


def play(model, order: list[str], actors, handle_of=ACTORS) -> dict[str, list]:
    """
    What each of `actors` sees where only they act, each at its moments of `order`. All of them ask the same in the
    same order, so that every row that is served across scopes shows.
    """
    clock = Clock()
    cache = SuffixCache(clock=clock)
    cache.capability(model)
    cache.register(model, old_text(30, 77))
    handles = {who: handle_of[who](cache) for who in actors}
    traffic = {who: Traffic(5) for who in actors}
    seen: dict[str, list] = {who: [] for who in actors}
    for moment, who in enumerate(order):
        clock.now = float(moment)
        if who not in actors:
            continue
        draw, handle = traffic[who], handles[who]
        ids = draw.prompt() + (old_text(30, 77) + new_text(40, 1) if draw.random.random() < 0.2 else [])
        fidelity = str(draw.random.choice(["exact", "balanced", "fast"]))
        got = ask(model, ids, handle.using(fidelity=fidelity), steps=int(draw.random.integers(1, 4)))
        draw.keep(got.tokens())
        seen[who].append(got)
        check_pool(cache)
    for who in actors:
        if cache.session(who).stats.requests:
            seen[who].append(cache.session(who).stats.to_dict())
    return seen


def same_seen(one: list, other: list) -> None:
    """Two accounts of one actor agree."""
    assert len(one) == len(other) > 0
    for left, right in zip(one, other, strict=True):
        if isinstance(left, dict):
            assert left == right
            continue
        assert left.tokens() == right.tokens() and told(left.report) == told(right.report)
        assert max_difference(left.scores, right.scores) < 1e-4
        assert (left.report.expected_kl is None) == (right.report.expected_kl is None)


def interference(seed: int, handle_of=ACTORS) -> int:
    """Compare what each actor sees among all the others with what it sees where only it and what is shared are."""
    model = make_model("llama")
    order = np.random.default_rng(seed).choice(list(ACTORS), 64).tolist()
    together = play(model, order, list(ACTORS), handle_of)
    for who in ACTORS:
        same_seen(together[who], play(model, order, {who, "everyone"}, handle_of)[who])
    answers = [got for seen in together.values() for got in seen if not isinstance(got, dict)]
    return sum(reused(got.report) for got in answers)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
def test_others_change_nothing_of_what_a_scope_sees(seed):
    assert interference(seed) > 500  # not vacuous: much is reused within the scopes


def test_scopes_that_are_one_do_change_it():
    """The control: the comparison fails where rows are served across actors."""
    with pytest.raises(AssertionError):
        interference(0, dict.fromkeys(ACTORS, lambda cache: cache))


# -- what stored rows have seen ---------------------------------------------------------------------------------------


def check_provenance(cache, texts: dict[str, list[list[int]]]) -> int:
    """Every stored row's left context is the front of a text of its scope; returns how many segments there are."""
    count = 0
    for shelf in cache._store.shelves.values():
        own = texts[shelf.scope.kind if shelf.scope.session is None else shelf.scope.session]
        for segment in shelf.segments:
            seen = segment.context[: segment.positions[-1] + 1].tolist()
            assert any(text[: len(seen)] == seen for text in own), (shelf.scope, seen)
            assert len(segment.context) <= max(map(len, own))
            count += 1
    return count


def test_every_stored_row_has_seen_its_own_scope_alone():
    model = make_model("llama")
    cache = SuffixCache(share_prefix=tuple(A), max_bytes=3000 * ROW)
    handles = {
        "alice": cache.session("alice"),
        "bob": cache.session("bob"),
        "anonymous": cache,
        "shared": cache.session("alice", share=True),
    }
    texts: dict[str, list] = {who: [] for who in handles}
    texts["shared"].append(A)
    traffic = {who: Traffic(6) for who in handles}
    random = np.random.default_rng(6)
    for _ in range(80):
        who = str(random.choice(list(handles)))
        draw = traffic[who]
        ids = (A[: int(random.integers(1, len(A) + 1))] if random.random() < 0.4 else []) + draw.prompt()
        fidelity = str(random.choice(["exact", "balanced", "fast"]))
        got = ask(model, ids, handles[who].using(fidelity=fidelity), steps=3)
        draw.keep(got.tokens())
        texts[who].append(got.tokens())
        assert check_provenance(cache, texts) > 0
        check_pool(cache)
    kinds = {shelf.scope.kind for shelf in cache._store.shelves.values() if shelf.segments}
    assert kinds == {"anonymous", "session", "shared"}
    with pytest.raises(AssertionError):  # control: the check can tell scopes apart
        check_provenance(cache, texts | {"alice": texts["bob"][:1], "bob": texts["alice"][:1]})


def test_a_shared_start_is_the_same_whoever_brought_it():
    """Its rows are what a prefill of it alone gives: nothing behind it, and nobody's text, is in them."""
    model = make_model("llama")
    for owner in ("alice", "bob"):
        cache = SuffixCache(fidelity="exact", share_prefix=tuple(A))
        ask(model, A + B + question(len(owner)), cache.session(owner))
        answer, rows = served_rows(model, A + question(7), cache.session("carol"), steps=1)
        assert answer.report.exact_tokens == len(A)
        for (keys, values), (want_keys, want_values) in zip(rows, fresh_rows(model, A), strict=True):
            assert torch.allclose(keys[:, : len(A)], want_keys, atol=1e-4)
            assert torch.allclose(values[:, : len(A)], want_values, atol=1e-4)
        check_pool(cache, handed_out=True)
