"""
The eight workloads of the fidelity benchmark. Each turns texts into `Case`s, decided completely by a seed.

| workload | earlier live request | measured request |
|---|---|---|
| `passages` | five SQuAD passages and a question | other system line, order and question; known answers |
| `references` | five countries, each passage pointing to the one above | the same; answers depend on the order |
| `chat` | a dialogue | its oldest turns dropped, two turns more |
| `edited` | a speech and an instruction | the speech with another head and instruction |
| `few-shot` | nine labelled reviews and one to label | other order and review |
| `tools` | JSON schemas of tools and a request | other order and request |
| `needle` | a long speech with three needles | other system line, order of its parts and needle |
| `chinese` | five Chinese reviews and a question | other order and question |

Several measured requests may share one stored one (their `group`): that saves its prefill, and intervals are drawn
over groups.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks import sources
from benchmarks.data import SYSTEM_LINES, split_sentences

INSTRUCTIONS = (
    "Sum up the text in one sentence.",
    "What does the speaker ask of Congress?",
    "Which subject does the text end with?",
    "Name one problem that the text speaks of.",
    "Who is addressed here, and about what?",
    "Give the text a title.",
)
CITIES = "Lisbon Oslo Nairobi Lima Hanoi Perth Quito Riga Dakar Osaka Turin Malmo".split()
MOODS = {"positive": "正面", "negative": "负面", "neutral": "中性", "ambivalent": "矛盾"}


@dataclass(frozen=True)
class Case:
    """
    A request to measure and what came before it.

    Args:
        workload (`str`): Name in `WORKLOADS`.
        group (`str`): Cases of one group have the same `stored` and the same texts in `alone`.
        stored (`tuple` of `tuple[int]`): Earlier live requests, in their order.
        alone (`tuple` of `tuple[int]`): The reusable pieces, token by token as they occur in `measured`.
        measured (`tuple[int]`): The request.
        answers (`tuple[str]`): Right answers; empty where none is known.
    """

    workload: str
    group: str
    stored: tuple[tuple[int, ...], ...]
    alone: tuple[tuple[int, ...], ...]
    measured: tuple[int, ...]
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draft:
    """A request as text: a system line, turns of user and assistant in turn, and which stretches are reusable."""

    system: str
    turns: tuple[str, ...]
    pieces: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


Group = tuple[Draft, list[Draft]]  # the stored request, and the measured ones


def cases(workload: str, tokenizer, n: int, seed: int = 0, share: int = 4, corpus=None) -> list[Case]:
    """
    The first `n` cases of a workload. A larger `n` with the same seed begins with the same cases.

    Args:
        tokenizer: Its chat template is used if it has one, else plain text.
        share (`int`): Most cases of one group. 1 makes them independent, at the price of a stored request each.
        corpus (*optional*): Texts in place of those that the workload fetches, in the same form.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"`workload` must be one of {list(WORKLOADS)}, got {workload!r}.")
    load, draw = WORKLOADS[workload]
    rng = random.Random(f"{workload} {seed}")
    found: list[Case] = []
    for number, (stored, measured) in enumerate(draw(load() if corpus is None else corpus, rng)):
        earlier = (tuple(encoded(tokenizer, stored)[0]),)
        for draft in measured[:share]:
            ids, pieces = encoded(tokenizer, draft)
            found.append(Case(workload, f"{workload} {number}", earlier, pieces, tuple(ids), draft.answers))
        if len(found) >= n:
            return found[:n]
    raise ValueError(f"{workload!r} has {len(found)} cases, not {n}.")


def encoded(tokenizer, draft: Draft) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Token ids of a request, and of its pieces as they occur in it: tokens that lie wholly inside the piece."""
    text, special = rendered(tokenizer, draft)
    out = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    ids, offsets = list(out["input_ids"]), out["offset_mapping"]
    pieces = []
    for piece in draft.pieces:
        start = text.index(piece)
        stop = start + len(piece)
        pieces.append(
            tuple(token for token, (first, last) in zip(ids, offsets, strict=True) if start <= first < last <= stop)
        )
    return ids, tuple(pieces)


def rendered(tokenizer, draft: Draft) -> tuple[str, bool]:
    """The request's text, and whether the tokenizer still has to add its special tokens: a base model's has them."""
    if tokenizer.chat_template is None:
        if len(draft.turns) == 1:
            return f"{draft.system}\n\n{draft.turns[0]}\nAnswer:", True
        names = itertools.cycle(("User", "Assistant"))
        turns = "\n".join(f"{name}: {turn}" for name, turn in zip(names, draft.turns, strict=False))
        return f"{draft.system}\n\n{turns}\nAssistant:", True
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, draft.turns, strict=False)]
    messages = [{"role": "system", "content": draft.system}, *messages]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False), False


# -- the workloads -------------------------------------------------------------------------------------------------


def passages(articles: dict, rng: random.Random, count: int = 5, share: int = 4) -> Iterator[Group]:
    """Multi-passage questions: passages of one article in even groups, of as many articles in odd ones."""
    kept = {
        title: [item for item in paragraphs if 240 <= len(item[0]) <= 570 and len(item[1]) >= 2]
        for title, paragraphs in articles.items()
    }
    pools: dict[str, list] = {}
    for number in itertools.count():
        least, needed = (1, count) if number % 2 else (count, 1)
        titles = [title for title, pool in pools.items() if len(pool) >= least]
        if len(titles) < needed:  # 364 prompts use all of SQuAD dev up; then its passages meet others
            pools = {title: rng.sample(items, len(items)) for title, items in kept.items()}
            titles = [title for title, pool in pools.items() if len(pool) >= least]
            if len(titles) < needed:
                return
        drawn = rng.sample(titles, count) if number % 2 else [rng.choice(titles)] * count
        chosen = [pools[title].pop() for title in drawn]
        texts = [text for text, _ in chosen]
        first, *others = rng.sample(SYSTEM_LINES, len(SYSTEM_LINES))
        asked = rng.sample(range(count), count)
        stored = Draft(first, (asking(texts, rng.choice(chosen[asked[0]][1]).text),))
        measured = []
        for system, target in zip(others, asked[1 : share + 1], strict=False):
            question = rng.choice(chosen[target][1])
            order = new_order(count, rng)
            turn = asking([texts[index] for index in order], question.text)
            measured.append(Draft(system, (turn,), tuple(texts), question.answers))
        yield stored, measured


def references(countries: list, rng: random.Random, count: int = 5, share: int = 4) -> Iterator[Group]:
    """Each passage points at the one above it, so what it means changes with the order."""
    pool = rng.sample(countries, len(countries))
    while len(pool) >= count:
        chosen = [pool.pop() for _ in range(count)]
        pool = pool if len(pool) >= count else rng.sample(countries, len(countries))
        texts = [f"{item.text} The city named first in the passage above is not in {item.name}." for item in chosen]
        first, *others = rng.sample(SYSTEM_LINES, len(SYSTEM_LINES))
        stored = Draft(first, (asking(texts, f"Which of these countries is the highest: {chosen[0].name}?"),))
        measured = []
        for system in others[:share]:
            order = new_order(count, rng)
            place = rng.randrange(1, count)
            above, below = chosen[order[place - 1]], chosen[order[place]]
            question = f"What is the capital of the country in the passage directly above the one about {below.name}?"
            turn = asking([texts[index] for index in order], question)
            measured.append(Draft(system, (turn,), tuple(texts), (above.capital,)))
        yield stored, measured


def chat(dialogues: list, rng: random.Random, share: int = 2) -> Iterator[Group]:
    """A dialogue that goes on after its oldest turns were dropped."""
    system = "You are a friendly person who likes to talk about films, sports, music and science."
    for turns in rng.sample(dialogues, len(dialogues)):
        turns = [turn for turn in turns if turn]
        stop = len(turns) - 2 - len(turns) % 2 + 1  # an odd number of turns ends with the user's
        if stop < 11 or len(turns) < stop + 2 or not 1200 <= len(" ".join(turns[:stop])) <= 3200:
            continue
        measured = []
        for dropped in rng.sample((2, 4, 6), share):
            draft = Draft(system, tuple(turns[dropped : stop + 2]))
            measured.append((draft, dropped))
        yield (
            Draft(system, tuple(turns[:stop])),
            [
                Draft(draft.system, draft.turns, tuple(turn for turn in turns[dropped:stop] if len(turn) >= 90))
                for draft, dropped in measured
            ],
        )


def edited(speeches: list[str], rng: random.Random, share: int = 2) -> Iterator[Group]:
    """A stretch of a speech whose first sentences are others than before, with another instruction."""
    for text in rng.sample(speeches, len(speeches)) * 4:
        pieces = [piece for piece in split_sentences(text) if 40 <= len(piece) <= 500]
        if len(pieces) < 60:
            continue
        at = rng.randrange(10, len(pieces) - 40)
        body = stretch(pieces[at:], 2300)
        heads = [stretch(pieces[rng.randrange(0, at - 3) :], 300) for _ in range(share + 1)]
        instructions = rng.sample(INSTRUCTIONS, share + 1)
        drafts = [
            Draft(SYSTEM_LINES[0], (f"{head} {body}\n\n{instruction}",), (body,))
            for head, instruction in zip(heads, instructions, strict=True)
        ]
        if len(set(heads)) == len(heads):
            yield drafts[0], drafts[1:]


def few_shot(reviews: list, rng: random.Random, count: int = 9, share: int = 4) -> Iterator[Group]:
    """Labelled examples in new order before another text to label."""
    pool = [item for item in reviews if 120 <= len(item[0]) <= 300]
    system = "Label the mood of a review: positive, negative, neutral or ambivalent."
    for _ in range(len(pool)):
        *examples, last = rng.sample(pool, count + 1)
        others = [item for item in pool if item not in examples]
        texts = [f"Review: {text}\nMood: {mood}" for text, mood in examples]

        def draft(order, item, texts=tuple(texts)) -> Draft:
            turn = "\n\n".join([*(texts[index] for index in order), f"Review: {item[0]}\nMood:"])
            return Draft(system, (turn,), texts, (item[1],))

        yield (
            draft(range(count), last),
            [draft(new_order(count, rng), rng.choice(others)) for _ in range(share)],
        )


def tools(requests: list, rng: random.Random, share: int = 3) -> Iterator[Group]:
    """JSON schemas in new order before another request; requests over the same schemas first share a group."""
    by_schemas: dict[frozenset, list] = {}
    for item in requests:
        fits = len(item.schemas) == len(set(item.schemas)) >= 2
        if fits and 900 <= sum(map(len, item.schemas)) <= 3000 and len(item.user) <= 400:
            by_schemas.setdefault(frozenset(item.schemas), []).append(item)
    system = "You have the tools below. Reply with the name of the right tool and its arguments."
    keys = sorted(by_schemas, key=sorted)
    for key in rng.sample(keys, len(keys)):
        members = by_schemas[key]
        schemas = members[0].schemas
        users = rng.sample(members, min(len(members), share + 1))
        first = "What can you do for me?" if len(users) == 1 else users.pop().user

        def draft(order, user, answers=(), schemas=schemas) -> Draft:
            turn = "\n\n".join([*(schemas[index] for index in order), f"Request: {user}"])
            return Draft(system, (turn,), schemas, answers)

        orders = [new_order(len(schemas), rng) for _ in users]
        measured = [draft(order, item.user, item.answers) for order, item in zip(orders, users, strict=True)]
        yield draft(range(len(schemas)), first), measured


def needle(speeches: list[str], rng: random.Random, share: int = 3) -> Iterator[Group]:
    """Three needles in a speech of about 1,500 tokens, whose parts come in another order behind another line."""
    for text in rng.sample(speeches, len(speeches)) * 4:
        pieces = [piece for piece in split_sentences(text) if 40 <= len(piece) <= 500]
        if len(pieces) < 80:
            continue
        at = rng.randrange(0, len(pieces) - 70)
        parts, facts = [], []
        for city in rng.sample(CITIES, 3):
            part = split_sentences(stretch(pieces[at:], 2150))
            at += len(part)
            facts.append((city, str(rng.randrange(1000, 10000))))
            part.insert(rng.randrange(1, len(part)), f"The code of the office in {city} is {facts[-1][1]}.")
            parts.append(" ".join(part))
        first, *others = rng.sample(SYSTEM_LINES, len(SYSTEM_LINES))
        measured = []
        for system, (city, code) in zip(others, facts[:share], strict=False):
            turn = asking([parts[index] for index in new_order(3, rng)], f"What is the code of the office in {city}?")
            measured.append(Draft(system, (turn,), tuple(parts), (code,)))
        yield Draft(first, (asking(parts, "What does the speaker ask of Congress?"),)), measured


def chinese(reviews: list, rng: random.Random, count: int = 5, share: int = 4) -> Iterator[Group]:
    """Chinese reviews in new order, and a question about the mood of one of them."""
    pool = [item for item in reviews if 45 <= len(item[0]) <= 80]
    for _ in range(len(pool)):
        chosen = rng.sample(pool, count)
        texts = [text for text, _ in chosen]
        first, second = rng.sample(("请根据下面的评论回答问题。", "你是一位细心的助手，请用简短的中文回答。"), 2)

        def turn(order, target: int, chosen=chosen, texts=texts) -> str:
            question = f"以“{chosen[target][0][:8]}”开头的评论的情感是正面还是负面？"
            return "\n\n".join([*(texts[index] for index in order), f"问题：{question}"])

        targets = rng.sample(range(count), share + 1)
        measured = [
            Draft(second, (turn(new_order(count, rng), target),), tuple(texts), (MOODS[chosen[target][1]],))
            for target in targets[1:]
        ]
        yield Draft(first, (turn(range(count), targets[0]),)), measured


WORKLOADS: dict[str, tuple[Callable, Callable[..., Iterator[Group]]]] = {
    "passages": (sources.squad, passages),
    "references": (sources.countries, references),
    "chat": (sources.dialogues, chat),
    "edited": (sources.speeches, edited),
    "few-shot": (lambda: sources.reviews("en"), few_shot),
    "tools": (sources.tool_requests, tools),
    "needle": (sources.speeches, needle),
    "chinese": (lambda: sources.reviews("zh"), chinese),
}


# -- pieces of drafts ----------------------------------------------------------------------------------------------


def asking(texts: list[str], question: str) -> str:
    """Passages and a question below them."""
    return "\n\n".join([*texts, f"Question: {question}"])


def stretch(pieces: list[str], characters: int) -> str:
    """Sentences from the first on, until they have about so many characters."""
    taken, length = [], 0
    for piece in pieces:
        if taken and length + len(piece) > characters:
            break
        taken.append(piece)
        length += len(piece)
    return " ".join(taken)


def new_order(count: int, rng: random.Random) -> list[int]:
    """A permutation in which nothing keeps its place or its left neighbour, if there is one; else any other order."""
    for strict in (True, False):
        for _ in range(200):
            order = rng.sample(range(count), count)
            kept = any(place == index for place, index in enumerate(order))
            followed = any(right == left + 1 for left, right in zip(order, order[1:], strict=False))
            if not (kept or followed) or (not strict and order != list(range(count))):
                return order
    raise ValueError(f"{count} piece(s) have no other order.")
