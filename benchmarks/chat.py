"""
A chat of 12 turns that begins with a long text: what does each turn cost (SmolLM2-135M-Instruct, fp32)?

Time to first token by turn with a `SuffixCache`, with stock transformers (the whole conversation is prefilled), and
with transformers' documented recipe for reuse: deep-copy a prefilled `DynamicCache` and generate with the copy.
Targets: the time follows the turn's new tokens only; `timings.materialise` <= 2 ms in each turn, however long the
conversation; never slower than the recipe. All three are given the same replies. Run it alone on the machine.

    python -m benchmarks.chat                          # 5 conversations, about 8 minutes on 2 cores
    python -m benchmarks.chat --n 1 --output .cache/look
"""

import copy
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm
from transformers import DynamicCache

from benchmarks import data
from benchmarks.calls import ask, timing
from benchmarks.common import Options, Paired, Results, parse
from hf_suffix_cache import SuffixCache
from scripts.smollm2 import load

WAYS = ("cache", "deep copy", "full prefill")
MATERIALISE_TARGET_MS = 2.0
NEW_TOKENS = (16, 160)  # smallest and largest text of a turn


@dataclass
class ChatOptions(Options):
    """`n` conversations of `turns` turns; the first holds `document` tokens; each reply has `reply` tokens."""

    n: int = 5
    turns: int = 12
    document: int = 600
    reply: int = 24
    data: str = "wiki"


@dataclass(frozen=True)
class Turn:
    """One turn: the whole prompt, the tokens in it that no earlier turn ran, and the reply that is generated."""

    prompt: list[int]
    new_tokens: int
    reply: list[int]


def main() -> None:
    options = parse(ChatOptions, __doc__)
    model, tokenizer = load(threads=options.threads)
    results = Results("chat", "SmolLM2-135M-Instruct", "float32", options)
    cache = SuffixCache()
    chats = list(conversations(tokenizer, options, options.n + 1))
    for turn in chats.pop()[:2]:  # first use measures the model and takes the pool's first slab
        ask(model, turn.prompt, len(turn.reply), cache=cache, forced=turn.reply)
    progress = tqdm(total=options.n * options.turns, desc="turns")
    table = [run_conversation(model, cache, chat, number, progress) for number, chat in enumerate(chats)]
    progress.close()
    write_turns(table, chats, results)
    write_summary(table, chats, results)


def conversations(tokenizer, options: ChatOptions, count: int) -> Iterator[list[Turn]]:
    """
    Conversations over different texts. Turn `i` has the same number of new tokens in all of them, and that number
    jumps up and down from turn to turn, so that it can't be taken for the conversation's length.
    """
    rng = random.Random(options.seed)
    sizes = [rng.randint(*NEW_TOKENS) for _ in range(options.turns)]
    stream = itertools.chain.from_iterable(
        tokenizer(" " + sentence, add_special_tokens=False)["input_ids"]
        for sentence in data.sentences(options.data, options.seed)
    )

    def take(tokens: int) -> list[int]:
        return list(itertools.islice(stream, tokens))

    def plain(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    between, after = plain("<|im_end|>\n<|im_start|>user\n"), plain("<|im_end|>\n<|im_start|>assistant\n")
    for _ in range(count):
        prompt = plain(f"<|im_start|>system\n{data.SYSTEM_LINES[0]}<|im_end|>\n<|im_start|>user\n")
        turns, ran = [], 0
        for size in sizes:
            prompt = prompt + take(size if turns else options.document) + after
            turns.append(Turn(prompt, len(prompt) - ran, take(options.reply)))
            ran = len(prompt) + options.reply - 1  # the last token of a reply is handed out, but never run
            prompt = prompt + turns[-1].reply + between
        yield turns


def run_conversation(model, cache: SuffixCache, turns: list[Turn], number: int, progress) -> list[dict]:
    """One conversation all three ways, turn by turn; which way comes first changes. Seconds by way, and the report."""
    prefilled, table = DynamicCache(), []
    for index, turn in enumerate(turns):
        row = {}
        start = (number + index) % len(WAYS)
        for way in WAYS[start:] + WAYS[:start]:
            if way == "cache":
                row[way] = ask(model, turn.prompt, len(turn.reply), cache=cache, forced=turn.reply).first
                row |= read_report(cache.last_report, turn, first=index == 0)
            elif way == "deep copy":
                begun = time.perf_counter()
                past = copy.deepcopy(prefilled)
                copied = time.perf_counter() - begun
                answer = ask(model, turn.prompt, len(turn.reply), cache=past, forced=turn.reply)
                row[way], row["copying"], prefilled = copied + answer.first, copied, past
            else:
                row[way] = ask(model, turn.prompt, 1).first
        table.append(row)
        progress.update()
    return table


def read_report(report, turn: Turn, first: bool) -> dict:
    """What the report says of a turn. It is an error if a later turn ran more than its new tokens."""
    if not first and report.computed_rows != turn.new_tokens:
        raise RuntimeError(f"{turn.new_tokens} tokens of this turn are new, {report.computed_rows} were run: {report}")
    return {"materialise": timing(report, "materialise"), "rows": report.computed_rows}


def write_turns(table: list[list[dict]], chats: list[list[Turn]], results: Results) -> None:
    """Medians over the conversations, turn by turn."""
    n = len(table)
    for index in range(len(chats[0])):
        rows, turn = [conversation[index] for conversation in table], chats[0][index]
        case = f"turn {index + 1:02d}"
        results.add(case, "prompt tokens", len(turn.prompt), "tokens", n)
        results.add(case, "new tokens", turn.new_tokens, "tokens", n)
        for way in WAYS:
            values = [row[way] for row in rows]
            note = "median; smallest, largest"
            metric = f"time to first token, {way}"
            results.add(case, metric, np.median(values), "s", n, min(values), max(values), note)
        values = [row["materialise"] * 1e3 for row in rows]
        note = f"target <= {MATERIALISE_TARGET_MS}; median; smallest, largest"
        results.add(case, "materialise", np.median(values), "ms", n, min(values), max(values), note)


def write_summary(table: list[list[dict]], chats: list[list[Turn]], results: Results) -> None:
    """What holds over all turns but the first, which has nothing to reuse."""
    rows = [row for conversation in table for row in conversation[1:]]
    turns = [turn for chat in chats for turn in chat[1:]]
    n, case = len(rows), "turns 2 and later"

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows])

    materialise = column("materialise") * 1e3
    note = f"target <= {MATERIALISE_TARGET_MS} whatever the length"
    results.add(case, "materialise, largest", materialise.max(), "ms", n, note=note)
    for other, target in (("deep copy", "target <= 1: never slower; "), ("full prefill", "")):
        # pairs are turns of different sizes, so the ratio is taken turn by turn first
        ratios = Paired(column("cache") / column(other), np.ones(n))
        note = f"{target}median of the turns' ratios, 95 % bootstrap"
        results.add(case, f"time to first token / {other}", ratios.ratio, "ratio", n, *ratios.interval(), note)
    by_turn = (column("cache") / column("deep copy")).reshape(len(table), -1)
    worst = float(np.median(by_turn, axis=0).max())
    note = "largest of the turns, each a median over conversations"
    results.add(case, "time to first token / deep copy, worst turn", worst, "ratio", n, note=note)
    results.add(case, "deep copy alone, largest", column("copying").max() * 1e3, "ms", n)
    new = np.array([turn.new_tokens for turn in turns], dtype=float)
    reused = np.array([len(turn.prompt) for turn in turns]) - new
    design = np.stack([np.ones(n), new, reused], axis=1)
    (_, per_new, per_reused), *_ = np.linalg.lstsq(design, column("cache") * 1e3, rcond=None)
    results.add(case, "time to first token, per new token", per_new, "ms", n, note="least squares on new and reused")
    note = "least squares on new and reused; what attention to the reused tokens costs"
    results.add(case, "time to first token, per reused token", per_reused, "ms", n, note=note)
    explained = float(np.corrcoef(new, column("cache"))[0, 1] ** 2) if n > 2 else float("nan")
    results.add(case, "variance explained by new tokens alone", explained, "share", n)


if __name__ == "__main__":
    main()
