"""
Dialogues with planted changes of topic, decided completely by a seed. The texts come from `sources`.

| source | one topic | a turn of the user |
|---|---|---|
| `documents` | an article of SQuAD | a paragraph of it and a question, or another question about the last paragraph |
| `small talk` | a dialogue of Topical-Chat | what one of its two people says |

A dialogue is made of stretches of several topics. The user leaves a topic with the first turn of each later stretch.
A stretch has at least `least` turns; from then on each one is its last with the same chance, so that how long it has
lasted tells little of when it ends.
In `small talk` that is a rough label: people wander from one subject to another by themselves, and two dialogues may
be about the same film.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import sources

SOURCES = ("documents", "small talk")
TOPICS = 3  # of a dialogue
LEAST, MOST = 3, 8  # turns of the user on one topic
LEAVES = 0.25  # chance that a turn is the last one of its stretch
WITH_TEXT = 0.6  # share of the turns about a document that bring another paragraph of it
CHARACTERS = (240, 1200)  # of a paragraph


@dataclass(frozen=True)
class Turn:
    """What the user says, what is answered, and whether the user has left the topic with it."""

    user: str
    reply: str
    leaves: bool


def dialogues(source: str, n: int, half: int = 0, seed: int = 0, corpus=None, least: int = LEAST) -> list[list[Turn]]:
    """
    `n` dialogues of `TOPICS` topics each.

    Args:
        source (`str`): One of `SOURCES`.
        half (`int`): 0 or 1. Dialogues of different halves have no text in common.
        corpus (*optional*): Texts in place of those that the source fetches, in the same form.
        least (`int`): Turns that a stretch has at least, up to `MOST`.
    """
    if source not in SOURCES:
        raise ValueError(f"`source` must be one of {SOURCES}, got {source!r}.")
    rng = random.Random(f"{source} {half} {seed}")
    draw, load = (_documents, sources.squad) if source == "documents" else (_small_talk, sources.dialogues)
    stretches = draw(load() if corpus is None else corpus, half, rng, least)
    found = []
    for _ in range(n):
        parts = [next(stretches) for _ in range(TOPICS)]
        found.append(
            [
                Turn(user, reply, leaves=topic > 0 and number == 0)
                for topic, part in enumerate(parts)
                for number, (user, reply) in enumerate(part)
            ]
        )
    return found


def _documents(articles: dict, half: int, rng: random.Random, least: int) -> Iterator[list[tuple[str, str]]]:
    """Stretches about one article each, no two in a row about the same."""
    low, high = CHARACTERS
    pools = {
        title: [item for item in articles[title] if low <= len(item[0]) <= high and item[1]]
        for title in sorted(articles)[half::2]
    }
    pools = {title: pool for title, pool in pools.items() if len(pool) >= MOST}
    last = None
    while True:
        last = rng.choice([title for title in pools if title != last])
        paragraphs = iter(rng.sample(pools[last], MOST))
        questions: list = []
        turns: list[tuple[str, str]] = []
        for _ in range(_length(rng, least)):
            if not questions or rng.random() < WITH_TEXT:
                text, asked = next(paragraphs)
                questions = rng.sample(asked, len(asked))
                question = questions.pop()
                turns.append((f"{text}\n\n{question.text}", question.answers[0]))
            else:
                question = questions.pop()
                turns.append((question.text, question.answers[0]))
        yield turns


def _small_talk(talks: list, half: int, rng: random.Random, least: int) -> Iterator[list[tuple[str, str]]]:
    """Stretches of one dialogue each, from anywhere in it, no two in a row of the same."""
    kept = [turns for turns in talks[half::2] if len(turns) >= 2 * MOST]
    last = None
    while True:
        for turns in rng.sample(kept, len(kept)):
            if turns is last:  # the last one of a round and the first of the next
                continue
            last = turns
            pairs = list(zip(turns[::2], turns[1::2], strict=False))
            size = _length(rng, least)
            start = rng.randrange(0, len(pairs) - size + 1)
            yield pairs[start : start + size]


def _length(rng: random.Random, least: int) -> int:
    """Turns of one stretch."""
    length = least
    while length < MOST and rng.random() >= LEAVES:
        length += 1
    return length
