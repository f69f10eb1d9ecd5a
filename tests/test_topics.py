"""The arithmetic of the `topics` and `leaks` benchmarks: labels, counts, prompts. No fetching, no model."""

import itertools
import random
import re

import numpy as np
import pytest
import torch

from benchmarks import leaks, planted, topics
from benchmarks.secret_prompts import GUESSES, KINDS, SECRETS, Prompts
from benchmarks.sources import Question
from hf_suffix_cache.store.topic import ESTABLISHED
from tiny_models import make_model, text


class Words:
    """A tokenizer of words with their space in front, template marks and single signs."""

    def __init__(self):
        self.ids: dict[str, int] = {}

    def __call__(self, text, add_special_tokens=True):
        pieces = re.findall(r"<\|\w+\|>| ?[A-Za-z0-9]+|.", text, re.DOTALL)
        return {"input_ids": [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]}


def articles() -> dict:
    """Ten articles in words of their own."""

    def paragraph(title: str, number: int) -> tuple:
        words = [f"{title}{word}" for word in random.Random(f"{title} {number}").choices(range(23), k=75)]
        questions = tuple(Question(f"What of {word}?", (word,)) for word in words[:4])
        return " ".join(words) + ".", questions

    return {title: [paragraph(title, number) for number in range(8)] for title in "abcdefghij"}


def talks() -> list[list[str]]:
    return [[f"{name}{number} is what I say" for number in range(2 * planted.MOST + 2)] for name in "klmnopqrst"]


CORPORA = {"documents": articles, "small talk": talks}


def topic_of(turn: planted.Turn) -> str:
    """The corpus names things so that a topic is a letter in front of a number."""
    return re.search(r"([a-z])\d", turn.user + turn.reply).group(1)


@pytest.mark.parametrize("source", planted.SOURCES)
def test_planted_jumps_are_where_the_topic_changes(source):
    found = planted.dialogues(source, 30, corpus=CORPORA[source]())
    for turns in found:
        names = [topic_of(turn) for turn in turns]
        assert [turn.leaves for turn in turns] == [False, *(a != b for a, b in itertools.pairwise(names))]
        assert sum(turn.leaves for turn in turns) == planted.TOPICS - 1
        assert planted.TOPICS * planted.LEAST <= len(turns) <= planted.TOPICS * planted.MOST


@pytest.mark.parametrize("source", planted.SOURCES)
def test_halves_have_no_text_in_common_and_a_seed_decides(source):
    corpus = CORPORA[source]()
    halves = [planted.dialogues(source, 20, half, corpus=corpus) for half in (0, 1)]
    texts = [{turn.user for turns in half for turn in turns} for half in halves]
    assert not texts[0] & texts[1]
    assert planted.dialogues(source, 20, 0, corpus=corpus) == halves[0]
    assert planted.dialogues(source, 20, 0, seed=1, corpus=corpus) != halves[0]


def test_unknown_source_is_named():
    with pytest.raises(ValueError, match="weather"):
        planted.dialogues("weather", 1)


def test_new_part_is_what_no_call_has_run():
    tokenizer = Words()
    turns = [planted.Turn("one", "two three", False), planted.Turn("four", "five", True)]
    (first, leaves), (second, later) = topics.new_parts(tokenizer, turns)
    spelled = {number: piece for piece, number in tokenizer.ids.items()}
    text = "".join(spelled[token] for token in second.tolist())
    assert text == f" three{topics.USER}four{topics.ASSISTANT}" and (leaves, later) == (False, True)
    assert "".join(spelled[token] for token in first.tolist()).endswith(f"{topics.USER}one{topics.ASSISTANT}")


def test_counts_of_extreme_thresholds():
    tokenizer = Words()
    parts = [topics.new_parts(tokenizer, turns) for turns in planted.dialogues("documents", 10, corpus=articles())]
    jumps = sum(leaves for dialogue in parts for _, leaves in dialogue)
    total = sum(len(dialogue) - 1 for dialogue in parts)
    never, always = topics.count(parts, 0.0), topics.count(parts, 1.0)
    assert (never.right, never.wrong, never.missed) == (0, 0, jumps) and never.recall == 0.0
    # every part of some length is taken for another topic, as soon as there are enough of the last one
    assert always.right + always.wrong > 0.5 * total / ESTABLISHED and always.precision < 0.5
    best = max((topics.count(parts, threshold) for threshold in (0.1, 0.2, 0.3)), key=lambda found: found.f1)
    assert best.f1 > 0.9 and best.right + best.missed == jumps  # words of their own are told apart


def test_sessions_follow_the_plan():
    found = list(topics.sessions(Words(), 3, 0, corpus=articles()))
    assert [[each.kind for each in asked] for asked in found] == [[kind for _, kind in topics.PLAN]] * 3
    for asked in found:
        sets = [set(each.ids) for each in asked]
        for (one, (a, _)), (other, (b, _)) in itertools.combinations(zip(sets, topics.PLAN, strict=True), 2):
            common = len(one & other) / len(one)
            assert (common > 0.85) is (a == b), common
        assert len({tuple(each.ids) for each in asked}) == len(asked)
        assert all(each.answers for each in asked)


# -- leaks ----------------------------------------------------------------------------------------------------------


def test_rows_are_told_by_their_own_candidate_alone():
    random = torch.Generator().manual_seed(0)
    candidates = torch.randn(5, 3, 2, 4, 8, generator=random)
    assert leaks.told(candidates + 0.1 * torch.randn(candidates.shape, generator=random), candidates) == 5
    assert leaks.told(candidates.roll(1, dims=0), candidates) == 0
    alike = candidates[:1].expand_as(candidates)
    assert leaks.told(alike, alike + 0.0) == 0  # what fits all candidates equally tells none
    # a layer of large numbers does not drown the others
    candidates[:, 0] = 1e4 * torch.randn(2, 4, 8, generator=random)
    noise = torch.cat([1e4 * torch.randn(5, 1, 2, 4, 8, generator=random), torch.zeros(5, 2, 2, 4, 8)], dim=1)
    assert leaks.told(candidates + noise, candidates) == 5


@pytest.mark.parametrize("name", list(KINDS))
def test_prompts_differ_in_the_secret_alone(name):
    tokenizer = Words()
    paragraph = tokenizer("The river rises in the hills, and falls into the sea.")["input_ids"]
    prompts = Prompts(tokenizer, KINDS[name], paragraph)
    assert len(set(prompts.secrets)) == SECRETS and len(set(prompts.unused)) == GUESSES
    assert not set(prompts.secrets) & set(prompts.unused)
    for build in (prompts.stored, prompts.worded):
        (first, start), (second, again) = build(prompts.secrets[0]), build(prompts.secrets[1])
        assert start == again and first[start : start + len(paragraph)] == paragraph
        assert np.count_nonzero(np.array(first) != np.array(second)) == 1 and len(first) == len(second)
    asked = prompts.asked()
    assert not set(asked) & set(prompts.words)  # the secret stands nowhere in the question
    assert prompts.secrets[3] in prompts.asked(prompts.secrets[3])


def test_a_whole_measurement_on_a_tiny_model():
    """What the benchmark writes about SmolLM2, on random weights: rows tell all, and strangers are told nothing."""
    model, tokenizer = make_model("llama"), Words()
    prompts = Prompts(tokenizer, KINDS["city"], text(120, 1, 180, 256))
    record = leaks.measure(model, prompts)
    assert len(tokenizer.ids) < 180
    assert record["rows"]["same front"] == {"all layers": SECRETS, "last 16 rows": SECRETS, "first layer alone": 0}
    assert record["rows"]["own words"]["first layer alone"] == 0
    assert record["disk"] == {"rows": SECRETS, "tokens": SECRETS}
    for way in leaks.MOVED:
        assert np.array(record["answers"]["ways"][way]).shape == (SECRETS, SECRETS)
    scopes = record["scopes"]
    assert scopes["asked served"] == scopes["asked rows beyond the prompt"] == 0 and scopes["asked difference"] < 1e-4
    assert {(pair[name]["rows"], pair[name]["served"]) for pair in scopes["guesses"] for name in pair} == {(0, 0)}
    assert scopes["owner rows"] == 1 and scopes["owner served"] > 120


def test_too_few_words_of_one_token_are_named():
    class Letters(Words):
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [ord(sign) for sign in text]}

    with pytest.raises(ValueError, match="one token"):
        Prompts(Letters(), KINDS["city"], [1, 2, 3])
