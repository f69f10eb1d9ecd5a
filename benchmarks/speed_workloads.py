"""
Requests of the speed benchmark as token ids, decided completely by a seed. Nothing here needs the package: peers in
environments of their own read the same requests from a JSON file.

| workload | requests of a group |
|---|---|
| `system` | one system prompt of about 1,000 tokens, other questions behind it |
| `chat` | one growing conversation: each turn's prompt begins with the one before and its answer |
| `rag8`, `rag20` | 8 (20) of 40 passages of 200 tokens in an order that never came before, and a question |
| `edited` | a document of 1,000 tokens: the one before with another head and instruction |
| `nothing` | texts that have nothing in common |

    python -m benchmarks.speed_workloads --file requests.json
    python -m benchmarks.speed_workloads --model gemma --n 2 --file requests-gemma.json

The file: `{"model": ..., "seed": ..., "workloads": {name: [request]}}`, a request being
`{"group": 0, "index": 0, "warm": true, "prompt": [ids]}`. Requests come in their order. `warm` ones only fill a cache
and are not measured; a cache may be emptied between groups, which share nothing but what the table says.
"""

import argparse
import functools
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import sources
from benchmarks.data import SYSTEM_LINES

CORPUS_PASSAGES, PASSAGE_TOKENS = 40, 200
BATCHES = 10
NEW_TOKENS = 64  # of a request that is held against its limit
_STARTS = (
    "First of all:",
    "Editor's note, second version:",
    "Printed on Tuesday for the library:",
    "Draft; do not quote:",
    "Received by mail this morning:",
    "Copy made for the archive in the north wing:",
)
_INSTRUCTIONS = (
    "Sum up the text in one sentence.",
    "Give the text a title.",
    "Name one fact that the text speaks of.",
    "Who or what is the text about?",
    "Write one question that the text answers.",
    "Which place does the text name first?",
)


@dataclass(frozen=True)
class Request:
    """
    One request.

    Args:
        group (`int`): Requests that share something with each other; for `rag`, the number of the batch.
        index (`int`): Number inside the group.
        warm (`bool`): Whether it only fills a cache.
        prompt (`list[int]`): Its token ids.
    """

    group: int
    index: int
    warm: bool
    prompt: list[int]


class Texts:
    """
    Real text as token ids: SQuAD's paragraphs with people's questions, in an order that the seed decides.

    Args:
        tokenizer: With a chat template, requests are chats under it; without, plain text.
        seed (`int`): Decides the order.
    """

    def __init__(self, tokenizer, seed: int = 0):
        self.tokenizer = tokenizer
        self.rng = random.Random(f"speed {seed}")
        paragraphs = [item for items in sources.squad().values() for item in items]
        self.rng.shuffle(paragraphs)
        self._paragraphs = iter(paragraphs)
        self.questions: list[str] = []

    def encode(self, text: str) -> list[int]:
        """Ids of a piece of text, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def take(self, tokens: int) -> list[int]:
        """Exactly `tokens` tokens of text that no earlier call gave: whole paragraphs, the last one cut."""
        ids: list[int] = []
        while len(ids) < tokens:
            text, questions = next(self._paragraphs)
            self.questions += [question.text for question in questions[:1]]
            ids += self.encode(text + "\n\n")
        return ids[:tokens]

    def question(self, tokens: int) -> list[int]:
        """Exactly `tokens` tokens with a question at their end and the marks that ask for its answer."""
        if not self.questions:
            self.take(PASSAGE_TOKENS)
        end = self.encode(f"Question: {self.questions.pop()}")[-(tokens // 2) :] + self.closing
        return self.take(tokens - len(end)) + end

    @functools.cached_property
    def closing(self) -> list[int]:
        """What stands between a question and its answer."""
        return self.encode("\nAnswer:" if self.plain else "<|im_end|>\n<|im_start|>assistant\n")

    @functools.cached_property
    def between(self) -> list[int]:
        """What stands between an answer and the next question."""
        return self.encode("\n\n" if self.plain else "<|im_end|>\n<|im_start|>user\n")

    @property
    def plain(self) -> bool:
        """Whether the model has no chat template (SmolLM2's marks are written out here, so that ids can be joined)."""
        return self.tokenizer.chat_template is None

    def head(self, line: str) -> list[int]:
        """The beginning of a request with the system line `line`."""
        if self.plain:
            first = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
            return first + self.encode(f"{line}\n\n")
        return self.encode(f"<|im_start|>system\n{line}<|im_end|>\n<|im_start|>user\n")


# -- the workloads -------------------------------------------------------------------------------------------------


def system(texts: Texts, n: int) -> Iterator[Request]:
    """One system prompt of 1,000 tokens; the first request stores it."""
    head = texts.head(SYSTEM_LINES[0]) + texts.take(1000)
    for index in range(n + 1):
        yield Request(0, index, index == 0, head + texts.question(48))


def chat(texts: Texts, n: int, turns: int = 6) -> Iterator[Request]:
    """Conversations of a few turns behind a text of 600 tokens; answers are given, 24 tokens each."""
    for group in range(max(1, n // (turns - 1))):
        prompt = texts.head(SYSTEM_LINES[0]) + texts.take(600)
        for index in range(turns):
            prompt = prompt + texts.question(texts.rng.randint(40, 160))
            yield Request(group, index, index == 0, prompt)
            prompt = prompt + texts.take(24) + texts.between


def rag(texts: Texts, n: int, passages: int, batches: int = BATCHES) -> Iterator[Request]:
    """
    Batches of `n` requests over one corpus, each over other passages in another order. Batch 0 fills a cache: together
    its requests hold the whole corpus once.
    """
    corpus = [texts.take(PASSAGE_TOKENS) for _ in range(CORPUS_PASSAGES)]
    head = texts.head(SYSTEM_LINES[0])
    order = texts.rng.sample(range(CORPUS_PASSAGES), CORPUS_PASSAGES)
    seen = set()

    def request(group: int, index: int, chosen: list[int]) -> Request:
        seen.add(tuple(chosen))
        context = [token for number in chosen for token in corpus[number]]
        return Request(group, index, group == 0, head + context + texts.question(32))

    for index in range(CORPUS_PASSAGES // passages):
        yield request(0, index, order[index * passages : (index + 1) * passages])
    for group in range(1, batches + 1):
        for index in range(n):
            chosen = texts.rng.sample(range(CORPUS_PASSAGES), passages)
            while tuple(chosen) in seen:
                chosen = texts.rng.sample(range(CORPUS_PASSAGES), passages)
            yield request(group, index, chosen)


def edited(texts: Texts, n: int) -> Iterator[Request]:
    """A document of 1,000 tokens; each request has another head of it and another instruction."""
    document = texts.take(1000)
    for index in range(n + 1):
        first = texts.encode(f"{_STARTS[index % len(_STARTS)]} {index}. ")
        last = texts.encode(f"\n\n{_INSTRUCTIONS[index % len(_INSTRUCTIONS)]}") + texts.closing
        yield Request(0, index, index == 0, texts.head(SYSTEM_LINES[0]) + first + document + last)


def nothing(texts: Texts, n: int) -> Iterator[Request]:
    """Texts of 1,000 tokens with nothing in common but what a language has."""
    for index in range(n + 1):
        yield Request(0, index, index == 0, texts.take(1000))


WORKLOADS = {
    "system": system,
    "chat": chat,
    "rag8": functools.partial(rag, passages=8),
    "rag20": functools.partial(rag, passages=20),
    "edited": edited,
    "nothing": nothing,
}


def requests(tokenizer, workload: str, n: int, seed: int = 0) -> list[Request]:
    """The requests of a workload, in their order; `n` measured ones (of `rag` in each of 10 batches)."""
    if workload not in WORKLOADS:
        raise ValueError(f"`workload` must be one of {list(WORKLOADS)}, got {workload!r}.")
    return list(WORKLOADS[workload](Texts(tokenizer, seed), n))


# -- pieces for the other parts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reordered:
    """
    Requests over the same passages.

    Args:
        stored (`list[int]`): The earlier request.
        measured (`list[list[int]]`): Later ones, of one length, each in an order that never came before.
    """

    stored: list[int]
    measured: list[list[int]]


def reordered(texts: Texts, tokens: int, new_tokens: int, n: int) -> Reordered:
    """Requests of exactly `tokens` tokens: a head that they share, passages of about 200 tokens, `new_tokens` new."""
    head = texts.head(SYSTEM_LINES[0])
    left = tokens - len(head) - new_tokens
    if left < 2 * PASSAGE_TOKENS:
        raise ValueError(f"{tokens} tokens leave {left} for passages; at least {2 * PASSAGE_TOKENS} are needed.")
    count = left // PASSAGE_TOKENS
    sizes = [left // count + (place < left % count) for place in range(count)]
    passages = [texts.take(size) for size in sizes]
    orders: list[tuple[int, ...]] = []
    for order in itertools.chain([tuple(range(count))], _orders(count, texts.rng)):
        if order not in orders and (count < 4 or all(not _neighbours(order, other) for other in orders[:1])):
            orders.append(order)
        if len(orders) == n + 1:
            break
    else:
        found = len(orders) - 1
        raise ValueError(f"{count} passages have {found} orders in which all move, not {n}: take more tokens.")
    made = [head + [t for number in order for t in passages[number]] + texts.question(new_tokens) for order in orders]
    return Reordered(made[0], made[1:])


def _orders(count: int, rng: random.Random) -> Iterator[tuple[int, ...]]:
    if count < 7:  # all that there are
        orders = list(itertools.permutations(range(count)))
        yield from rng.sample(orders, len(orders))
    else:
        while True:
            yield tuple(rng.sample(range(count), count))


def _neighbours(order: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a passage keeps its left neighbour, or the first one its place."""
    pairs = set(zip(order, order[1:], strict=False))
    return order[0] == other[0] or bool(pairs & set(zip(other, other[1:], strict=False)))


def write_json(path: Path, model: str, tokenizer, n: int, seed: int = 0) -> None:
    """Write all workloads of a model to a file that any environment can read."""
    found = {name: [asdict(item) for item in requests(tokenizer, name, n, seed)] for name in WORKLOADS}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"model": model, "seed": seed, "workloads": found}), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True, help="where the requests go")
    parser.add_argument("--model", default="smollm2", choices=["smollm2", "gemma"])
    parser.add_argument("--n", type=int, default=3, help="measured requests (of rag: in each batch)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from scripts import gemma, smollm2

    _, tokenizer = {"smollm2": smollm2, "gemma": gemma}[options.model].load()
    write_json(options.file, options.model, tokenizer, options.n, options.seed)
    print(f"requests of {len(WORKLOADS)} workloads: {options.file}")


if __name__ == "__main__":
    main()
