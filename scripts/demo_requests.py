"""The demo's four scenarios: which chats are asked, in which order, and which of them only fill the store."""

from collections.abc import Callable, Generator
from dataclasses import dataclass

from scripts import demo_texts as texts


@dataclass(frozen=True)
class Request:
    """One chat to answer. `fills_store`: the scenario's first, with nothing to reuse yet, so it is not compared."""

    title: str
    messages: list[dict]
    fills_store: bool = False


Requests = Generator[Request, str, None]  # is sent the answer to each request before it yields the next


@dataclass(frozen=True)
class Scenario:
    """A job with text that repeats; `requests` starts a fresh run of it."""

    letter: str
    title: str
    requests: Callable[[], Requests]


def chat(user: str, system: str | None = None) -> list[dict]:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": user}]


def passages() -> Requests:
    """Eight passages in another order behind another head each time, and another question."""
    for number, (head, order, question) in enumerate(texts.RAG_REQUESTS):
        body = "\n\n".join(texts.PASSAGES[name] for name in order)
        yield Request(question, chat(f"{body}\n\nQuestion: {question}", head), fills_store=number == 0)


def conversation() -> Requests:
    """A chat that grows turn by turn; then its two oldest turns are dropped, and it goes on."""
    system = {"role": "system", "content": texts.CHAT_SYSTEM}
    history = []
    for number, question in enumerate(texts.CHAT_TURNS):
        history = [*history, {"role": "user", "content": question}]
        reply = yield Request(f"turn {number + 1}", [system, *history], fills_store=number == 0)
        history = [*history, {"role": "assistant", "content": reply}]
    for number, question in enumerate(texts.CHAT_AFTER_LOSS, start=len(texts.CHAT_TURNS) + 1):
        lost = 4 if number == len(texts.CHAT_TURNS) + 1 else 0  # two turns: question and answer of each
        history = [*history[lost:], {"role": "user", "content": question}]
        title = f"turn {number}, after the two oldest turns were dropped" if lost else f"turn {number}"
        reply = yield Request(title, [system, *history])
        history = [*history, {"role": "assistant", "content": reply}]


def essay() -> Requests:
    """A long text whose first paragraph is another one each time."""
    for number, opening in enumerate(texts.ESSAY_OPENINGS):
        question = texts.ESSAY_QUESTIONS[number]
        text = "\n\n".join([opening, *texts.ESSAY_BODY])
        yield Request(question, chat(f"{text}\n\nQuestion: {question}"), fills_store=number == 0)


def letter() -> Requests:
    """A form letter to one person after another, to be summarised."""
    for number, name in enumerate(texts.LETTER_NAMES):
        text = texts.LETTER.format(name=name)
        question = "Summarise this letter in two sentences. Say who it is for."
        yield Request(f"the letter to {name}", chat(f"{text}\n\n{question}"), fills_store=number == 0)


SCENARIOS = [
    Scenario("a", "passages in another order", passages),
    Scenario("b", "a chat that loses its oldest turns", conversation),
    Scenario("c", "a text with an edited opening", essay),
    Scenario("d", "a form letter with a new name", letter),
]
