"""
Passages and prompts of the benchmarks, decided completely by a seed. The texts come from `sources`.

* `wiki`: leads of English Wikipedia. Questions are made from titles.
* `squad`: SQuAD v1.1 dev, 2,067 paragraphs of 48 articles with people's questions.
"""

import json
import random
import re
from dataclasses import dataclass

from benchmarks import sources

PASSAGE_TOKENS = (180, 220)
PASSAGES = 6
SYSTEM_LINES = (
    "You are a helpful assistant. Answer from the passages.",
    "You read encyclopedia passages and reply to questions about them in one short sentence.",
    "Use only the text below. If it does not hold the answer, say that you do not know.",
    "You are a careful research librarian. Quote facts exactly and keep every answer brief and plain.",
    "Answer the user.",
    "Today is Monday. You work at the help desk of a public library and answer visitors from what they bring.",
)
_TITLE_QUESTIONS = (
    "What do the passages say about {}?",
    "Which fact about {} stands in the passages?",
    "In one sentence: {} - what is it, or who?",
    "When or where does {} matter, by these passages?",
)


@dataclass(frozen=True)
class Paragraph:
    """One paragraph of a source: `topic` groups paragraphs that belong together, `questions` are about this one."""

    topic: str
    text: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Passage:
    """A text of 180 to 220 tokens that ends with a sentence, and questions about it."""

    text: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class ReorderCase:
    """
    Two requests over the same passages.

    Args:
        stored (`list[int]`): The earlier request: one system line, one order, a question about one passage.
        measured (`list[int]`): The later one: another system line, another order, a question about another passage.
    """

    stored: list[int]
    measured: list[int]


# -- sources -------------------------------------------------------------------------------------------------------


def load_paragraphs(source: str = "wiki") -> list[Paragraph]:
    """All paragraphs of `"wiki"` or `"squad"`, in the source's order; fetched first, if need be."""
    if source == "wiki":
        leads = json.loads(sources.fetched("wiki-leads-0.0.7.json").read_text(encoding="utf-8")).values()
        return [
            Paragraph(lead["topic"], lead["extract"], tuple(q.format(lead["title"]) for q in _TITLE_QUESTIONS))
            for lead in leads
        ]
    if source == "squad":
        return [
            Paragraph(title, text, tuple(question.text for question in questions))
            for title, paragraphs in sources.squad().items()
            for text, questions in paragraphs
        ]
    raise ValueError(f"`source` must be 'wiki' or 'squad', got {source!r}.")


# -- prompts -------------------------------------------------------------------------------------------------------


def reorder_cases(tokenizer, source: str = "wiki", n: int = 30, seed: int = 0, passages: int = PASSAGES):
    """
    `n` pairs of requests (`ReorderCase`) over `passages` passages each; no passage serves two cases.

    The measured request has another system line, another order (no passage keeps its place or its left neighbour) and
    a question about another passage than the stored one.
    """
    rng = random.Random(seed)
    pools = _passage_pools(tokenizer, load_paragraphs(source), passages, rng)
    cases = []
    for _ in range(n):
        pool = pools[rng.randrange(len(pools))]
        chosen = [pool.pop() for _ in range(passages)]
        if len(pool) < passages:
            pools.remove(pool)
        order = _other_order(passages, rng)
        first, second = rng.sample(SYSTEM_LINES, 2)
        asked, other = rng.sample(chosen, 2)
        stored = request_ids(tokenizer, first, _context(chosen, rng.choice(other.questions)))
        moved = [chosen[index] for index in order]
        cases.append(ReorderCase(stored, request_ids(tokenizer, second, _context(moved, rng.choice(asked.questions)))))
    return cases


def question_prompts(tokenizer, source: str, n: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    """
    `n` questions behind whole sentences, with a system line: prompts whose lengths are spread evenly from `low` to
    `high` tokens, up to a sentence more. Each paragraph serves one prompt at most.
    """
    rng = random.Random(seed)
    paragraphs = load_paragraphs(source)
    rng.shuffle(paragraphs)
    prompts = []
    for number in range(n):
        target = low + (high - low) * number // max(n - 1, 1)
        system, first, text = SYSTEM_LINES[number % len(SYSTEM_LINES)], paragraphs.pop(), ""
        question = rng.choice(first.questions)
        ids = request_ids(tokenizer, system, f"Question: {question}")
        pieces = split_sentences(first.text)
        while len(ids) < target:
            text = f"{text} {pieces.pop(0)}".strip()
            ids = request_ids(tokenizer, system, f"{text}\n\nQuestion: {question}")
            pieces = pieces or split_sentences(paragraphs.pop().text)
        prompts.append(ids)
    rng.shuffle(prompts)
    return prompts


def request_ids(tokenizer, system: str, user: str) -> list[int]:
    """One request ready for its answer: a chat under the model's template, or plain text for a base model."""
    if tokenizer.chat_template is None:
        return list(tokenizer(f"{system}\n\n{user}\nAnswer:")["input_ids"])
    return chat_ids(tokenizer, system, user)


def chat_ids(tokenizer, system: str, user: str) -> list[int]:
    """Token ids of one system and one user message under the model's chat template, ready for the answer."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def plain_prompts(tokenizer, source: str, n: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """
    `n` prompts of exactly `tokens` tokens of running text that have nothing in common: no two begin with the same
    token, no two share a run of 16.
    """
    rng = random.Random(seed)
    paragraphs = load_paragraphs(source)
    rng.shuffle(paragraphs)
    prompts, firsts, runs, ids = [], set(), set(), []
    for paragraph in paragraphs:
        ids += tokenizer(paragraph.text + "\n\n", add_special_tokens=False)["input_ids"]
        if ids[0] in firsts:
            ids = []
        if len(ids) < tokens:
            continue
        ids = ids[:tokens]
        own = {tuple(ids[at : at + 16]) for at in range(len(ids) - 15)}
        if not own & runs:
            prompts.append(ids)
            firsts.add(ids[0])
            runs |= own
        ids = []
        if len(prompts) == n:
            return prompts
    raise ValueError(f"{source!r} has {len(prompts)} prompts of {tokens} tokens with nothing in common, not {n}.")


def sentences(source: str, seed: int = 0) -> list[str]:
    """All sentences of the source, its paragraphs in an order that `seed` decides."""
    paragraphs = load_paragraphs(source)
    random.Random(seed).shuffle(paragraphs)
    return [sentence for paragraph in paragraphs for sentence in split_sentences(paragraph.text)]


def split_sentences(text: str) -> list[str]:
    """Pieces of `text` that end with a full stop, a question or an exclamation mark, and begin with a capital."""
    return [piece for piece in re.split(r"(?<=[.!?])\s+(?=[A-Z\"(])", text.strip()) if piece]


def _context(passages: list[Passage], question: str) -> str:
    return "\n\n".join(passage.text for passage in passages) + f"\n\nQuestion: {question}"


def _passage_pools(tokenizer, paragraphs: list[Paragraph], least: int, rng: random.Random) -> list[list[Passage]]:
    """Passages by topic, shuffled; topics with fewer than `least` are left out."""
    topics: dict[str, list[Paragraph]] = {}
    for paragraph in paragraphs:
        topics.setdefault(paragraph.topic, []).append(paragraph)
    pools = []
    for topic in sorted(topics):
        members = topics[topic]
        rng.shuffle(members)
        # 40 a topic are more than a run draws, and tokenising all of a source would take a minute
        pool = _passages(tokenizer, members, most=40)
        if len(pool) >= least:
            rng.shuffle(pool)
            pools.append(pool)
    return pools


def _passages(tokenizer, paragraphs: list[Paragraph], most: int) -> list[Passage]:
    """Whole sentences of paragraphs put together until they have 180 to 220 tokens; what doesn't fit is dropped."""
    low, high = PASSAGE_TOKENS
    done, text, questions, count = [], "", (), 0
    for paragraph in paragraphs:
        for position, sentence in enumerate(split_sentences(paragraph.text)):
            tokens = len(tokenizer(" " + sentence, add_special_tokens=False)["input_ids"])
            if count + tokens > high:
                break
            text, count = f"{text} {sentence}".strip(), count + tokens
            questions += paragraph.questions if position == 0 else ()
        if count >= low:
            done.append(Passage(text, questions))
        if count >= low or count > high - 20:
            text, questions, count = "", (), 0
        if len(done) == most:
            break
    return done


def _other_order(count: int, rng: random.Random) -> list[int]:
    """A permutation in which nothing stays at its place and nothing keeps its left neighbour."""
    while True:
        order = rng.sample(range(count), count)
        kept = any(place == index for place, index in enumerate(order))
        if not kept and all(right != left + 1 for left, right in zip(order, order[1:], strict=False)):
            return order
