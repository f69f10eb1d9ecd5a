"""
Does a session notice that its user has left the topic, and what follows from it (SmolLM2's tokens and model)?

* `detection`: dialogues with planted changes of topic (`planted`). Of every new part of a prompt, from a dialogue's
  second on, it is known whether the user leaves the topic with it. Precision and recall of `store/topic.py` by
  threshold on one half of the documents; the best one, and the default, on the other half, where the target is that
  both are at least 0.85. Beside it dialogues in which a topic may be left after any turn, which is before the session
  knows it, and small talk, most of whose turns are too short for anything to be moved into them.
* `answers`: sessions of seven requests about SQuAD passages, each over three of an article's passages and a standing
  instruction behind them: three about one article, two about another, two about the first again. With the topic
  watched, and with TTL alone (`topic_similarity=0`): KL to full prefill, the answers' texts, and rows run.

The machine may be busy. Finished sessions are kept in the cache folder, so a broken run goes on where it was.

    python -m benchmarks.topics --threads 1                       # 100 dialogues a half, 16 sessions: about 15 minutes
    python -m benchmarks.topics --part detection --n 20 --output .cache/look
"""

import random
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from benchmarks import planted, sources
from benchmarks.calls import ask, kl_divergence
from benchmarks.common import Journal, Options, Results, bootstrap_mean, parse, wilson
from benchmarks.data import SYSTEM_LINES
from hf_suffix_cache import SuffixCache, SuffixCacheConfig
from hf_suffix_cache.store.topic import MIN_TOKENS, Topic
from scripts.smollm2 import load

THRESHOLDS = tuple(round(0.005 * step, 3) for step in range(1, 17))
TARGET = 0.85
USER, ASSISTANT = "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"

PASSAGES = 3  # of a request
CHARACTERS = (240, 570)  # of a passage
PLAN = (  # article and kind of each request
    (0, "first"),
    (0, "on topic"),
    (0, "on topic"),
    (1, "leaves"),
    (1, "on topic"),
    (0, "returns"),
    (0, "on topic"),
)
STANDING = (
    "Answer the question below from these passages alone, in one short sentence and in plain words, and say that you "
    "do not know if they do not hold the answer."
)
WAYS = {"topic watched": {}, "TTL alone": {"topic_similarity": 0.0}}
SECONDS_BETWEEN = 30.0  # requests of a session, by the injected clock
GENERATED = 12


@dataclass
class TopicsOptions(Options):
    """`n` dialogues of each source and half; `sessions` whose requests are answered; which `part`s, by comma."""

    n: int = 100
    sessions: int = 16
    part: str = "detection,answers"


def main() -> None:
    options = parse(TopicsOptions, __doc__)
    model, tokenizer = load(threads=options.threads)
    results = Results("topics", "SmolLM2-135M-Instruct", "float32", options)
    if "detection" in options.part.split(","):
        measure_detection(tokenizer, options, results)
    if "answers" in options.part.split(","):
        measure_answers(model, tokenizer, options, results)


# -- detection -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """New parts that were taken for another topic's rightly and wrongly, and those that were missed."""

    right: int
    wrong: int
    missed: int

    @property
    def precision(self) -> float:
        return self.right / max(self.right + self.wrong, 1)

    @property
    def recall(self) -> float:
        return self.right / max(self.right + self.missed, 1)

    @property
    def f1(self) -> float:
        return 2 * self.right / max(2 * self.right + self.wrong + self.missed, 1)


def measure_detection(tokenizer, options: TopicsOptions, results: Results) -> None:
    """Tune the threshold on one half of the texts, and report on the other."""

    def parts(source: str, half: int, least: int = planted.LEAST) -> list:
        drawn = planted.dialogues(source, options.n, half, options.seed, least=least)
        return [new_parts(tokenizer, dialogue) for dialogue in drawn]

    tuning = parts("documents", 0)
    tuned = {threshold: count(tuning, threshold) for threshold in tqdm(THRESHOLDS, desc="thresholds")}
    for threshold, found in tuned.items():
        for name, others in (("precision", found.wrong), ("recall", found.missed)):
            metric, value = f"{name} at {threshold:.3f}", getattr(found, name)
            results.add("documents, tuning half", metric, value, "share", found.right + others)
    best = max(THRESHOLDS, key=lambda threshold: min(tuned[threshold].precision, tuned[threshold].recall))
    note = "largest smaller one of precision and recall"
    results.add("documents, tuning half", "best threshold", best, "cosine", options.n, note=note)
    held_out = {
        "documents": (parts("documents", 1), f"target >= {TARGET}"),
        "documents, left after any turn": (parts("documents", 1, least=1), "no target"),
        "small talk": (parts("small talk", 1), "no target"),
    }
    for name, threshold in (("best", best), ("default", SuffixCacheConfig().topic_similarity)):
        for source, (dialogues, target) in held_out.items():
            case = f"{source}, {name} threshold"
            write_counts(case, count(dialogues, threshold), f"{target}; threshold {threshold}", results)
    for source, (dialogues, _) in held_out.items():
        lengths = [len(ids) for dialogue in dialogues for ids, leaves in dialogue if leaves]
        short = sum(length <= MIN_TOKENS for length in lengths)
        note = f"of those that leave a topic: {MIN_TOKENS} tokens or fewer, with the template's"
        results.add(source, "parts too short to tell", short / len(lengths), "share", len(lengths), note=note)


def new_parts(tokenizer, dialogue: list[planted.Turn]) -> list[tuple[np.ndarray, bool]]:
    """
    The new part of each of a dialogue's prompts: what stands behind the answer before it, whose last token no call has
    run. And whether the user leaves the topic with it.
    """

    def plain(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    last = plain(f"<|im_start|>system\n{SYSTEM_LINES[4]}")
    parts = []
    for turn in dialogue:
        parts.append((np.array([*last, *plain(f"{USER}{turn.user}{ASSISTANT}")], dtype=np.int64), turn.leaves))
        last = plain(turn.reply)[-1:]
    return parts


def count(dialogues: list, threshold: float) -> Counts:
    """What a fresh `Topic` says of each dialogue's new parts, from the second on."""
    table = np.zeros((2, 2), dtype=int)  # left it, as planted; left it, as found
    for parts in dialogues:
        topic = Topic(threshold, cold=0.3)
        for number, (ids, leaves) in enumerate(parts):
            left = topic.observe(ids)
            if number:
                table[int(leaves), int(left)] += 1
    return Counts(int(table[1, 1]), int(table[0, 1]), int(table[1, 0]))


def write_counts(case: str, found: Counts, note: str, results: Results) -> None:
    """Precision and recall on the reporting half."""
    for name, others in (("precision", found.wrong), ("recall", found.missed)):
        n = found.right + others
        interval = wilson(found.right, n) if n else ("", "")
        results.add(case, name, getattr(found, name), "share", n, *interval, f"{note}; Wilson 95 %")


# -- answers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One request of a session: its tokens, its place in `PLAN`, and the right answers."""

    ids: list[int]
    kind: str
    answers: tuple[str, ...]


class Clock:
    """Seconds as the sessions tell them."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measure_answers(model, tokenizer, options: TopicsOptions, results: Results) -> None:
    """Run every session both ways and in full, and compare."""
    settings = {"threads": options.threads, "default": SuffixCacheConfig().topic_similarity}
    journal = Journal(sources.cache_home() / "topics.jsonl", settings)
    taken: list[dict] = []
    for asked in tqdm(sessions(tokenizer, options.sessions, options.seed), desc="sessions", total=options.sessions):
        part = [[each.kind, each.ids] for each in asked]
        taken += journal.record(part, lambda asked=asked: {"requests": answer(model, tokenizer, asked)})["requests"]
    for kind in dict.fromkeys(row["kind"] for row in taken):
        rows = [row for row in taken if row["kind"] == kind]
        for way in WAYS:
            write_answers(f"answers, {kind}: {way}", [row[way] for row in rows], results)
        right, n = sum(row["full right"] for row in rows), len(rows)
        note = f"contained in {GENERATED} tokens; Wilson 95 %"
        results.add(f"answers, {kind}: full prefill", "right answers", right / n, "share", n, *wilson(right, n), note)


def write_answers(case: str, rows: list[dict], results: Results) -> None:
    """What one way gave for one kind of request."""
    n = len(rows)
    for name, metric, unit in (("kl", "KL first token, mean", "nats"), ("rows", "rows run / prompt", "ratio")):
        values = [row[name] for row in rows]
        results.add(case, metric, np.mean(values), unit, n, *bootstrap_mean(values), "95 % bootstrap")
    results.add(case, "KL first token, largest", max(row["kl"] for row in rows), "nats", n)
    notes = {"same": f"{GENERATED} tokens, as full prefill's", "right": f"contained in {GENERATED} tokens"}
    for name, metric in (("same", "answers that are the same text"), ("right", "right answers")):
        held = sum(row[name] for row in rows)
        results.add(case, metric, held / n, "share", n, *wilson(held, n), f"{notes[name]}; Wilson 95 %")


def sessions(tokenizer, n: int, seed: int, corpus=None):
    """`n` sessions of `PLAN`, each about two articles of SQuAD; `corpus` stands in for SQuAD."""
    rng = random.Random(f"sessions {seed}")
    low, high = CHARACTERS
    pools = {
        title: [item for item in paragraphs if low <= len(item[0]) <= high and item[1]]
        for title, paragraphs in (sources.squad() if corpus is None else corpus).items()
    }
    titles = sorted(title for title, pool in pools.items() if len(pool) > PASSAGES)
    for _ in range(n):
        articles = [rng.sample(pools[title], PASSAGES + 1) for title in rng.sample(titles, 2)]
        yield [request(tokenizer, rng.sample(articles[number], PASSAGES), kind, rng) for number, kind in PLAN]


def request(tokenizer, passages: list, kind: str, rng: random.Random) -> Asked:
    """One request over these passages, with a question about one of them."""
    question = rng.choice(rng.choice(passages)[1])
    text = "\n\n".join([*(text for text, _ in passages), STANDING, f"Question: {question.text}"])
    rendered = f"<|im_start|>system\n{SYSTEM_LINES[0]}{USER}{text}{ASSISTANT}"
    return Asked(list(tokenizer(rendered, add_special_tokens=False)["input_ids"]), kind, question.answers)


def answer(model, tokenizer, asked: list[Asked]) -> list[dict]:
    """One session both ways: what each request gave, compared with its full prefill."""
    clock = Clock()
    handles = {way: SuffixCache(clock=clock, **settings).session("user") for way, settings in WAYS.items()}
    rows = []
    for each in asked:
        clock.now += SECONDS_BETWEEN
        full = ask(model, each.ids, GENERATED, logits=True)
        row: dict = {"kind": each.kind, "full right": holds(tokenizer, full.ids, each.answers)}
        for way, handle in handles.items():
            got = ask(model, each.ids, GENERATED, cache=handle, logits=True)
            row[way] = {
                "kl": max(0.0, float(kl_divergence(full.logits[0], got.logits[0]))),
                "rows": handle.last_report.computed_rows / len(each.ids),
                "same": got.ids == full.ids,
                "right": holds(tokenizer, got.ids, each.answers),
            }
        rows.append(row)
    return rows


def holds(tokenizer, ids: list[int], answers: tuple[str, ...]) -> bool:
    """Whether an answer's text contains one of the right ones."""
    text = tokenizer.decode(ids, skip_special_tokens=True).lower()
    return any(right.lower() in text for right in answers)


if __name__ == "__main__":
    main()
