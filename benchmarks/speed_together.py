"""Parts `interleaved` and `batch`: conversations that take turns, and several prompts in one call."""

import numpy as np
from tqdm import tqdm

from benchmarks.calls import ask
from benchmarks.speed_runs import Setting, add_median, add_ratio, ask_batch, rounds
from benchmarks.speed_workloads import Texts, reordered
from hf_suffix_cache import SuffixCache

NUM_CONVERSATIONS, TURNS, REPLY_TOKENS = 10, 3, 24
BATCHES, BATCH_TOKENS = (1, 2, 4, 8), 1024


def interleaved(setting: Setting) -> None:
    """
    Ten conversations of which each in turn takes its next turn: 600 tokens first, then 64 new ones and a reply a turn.
    Only the newest `keep_conversations` keep their extents, so all of these are gathered anew.
    """
    model, cache = setting.model, SuffixCache()
    texts = Texts(setting.tokenizer, setting.options.seed)
    prompts = [texts.take(600) + texts.question(64) for _ in range(setting.options.n or NUM_CONVERSATIONS)]
    for turn in range(TURNS):
        replies: dict[int, list[int]] = {}
        reports = []

        def reuse(number: int, prompts=prompts, replies=replies, reports=reports) -> float:
            answer = ask(model, prompts[number], REPLY_TOKENS, cache=cache)
            replies[number] = answer.ids
            reports.append(cache.last_report)
            return answer.total

        def vanilla(number: int, prompts=prompts) -> float:
            return ask(model, prompts[number], REPLY_TOKENS).total

        case = f"interleaved, turn {turn + 1}"
        numbers = tqdm(range(len(prompts)), desc=case)
        taken = rounds({"with the cache": reuse, "vanilla": vanilla}, numbers)
        for way, values in taken.items():
            add_median(setting.results, case, f"total, {way}", values, "s", f"{REPLY_TOKENS} new tokens; median")
        add_ratio(setting.results, case, "total / vanilla", taken["with the cache"], taken["vanilla"])
        rows = [report.computed_rows / report.prompt_tokens for report in reports]
        add_median(setting.results, case, "rows run / prompt tokens", rows, "share")
        firsts = [report.timings["materialise"] * 1e3 for report in reports]
        add_median(setting.results, case, "materialise", firsts, "ms")
        prompts = [
            prompt + replies[number] + texts.between + texts.question(64) for number, prompt in enumerate(prompts)
        ]


def batches(setting: Setting) -> None:
    """
    Time to first token of 1, 2, 4, 8 prompts of 1,024 tokens in one call, each with passages of its own in an order
    that never came before, against a plain batch.
    """
    model, n = setting.model, setting.options.n or 3
    texts, cache = Texts(setting.tokenizer, setting.options.seed), SuffixCache()
    largest = max(BATCHES)
    cases = [reordered(texts, BATCH_TOKENS, 64, n + 1) for _ in range(largest)]
    for case in tqdm(cases, desc="filling the store"):
        ask(model, case.stored, 1, cache=cache)
    handle = cache.using(store=False)
    for size in BATCHES:
        prompts = [[case.measured[number] for case in cases[:size]] for number in range(n + 1)]
        rows = []

        def reuse(number: int, prompts=prompts, rows=rows) -> float:
            taken = ask_batch(model, prompts[number], 1, cache=handle)
            report = handle.last_report
            if report.shifted_tokens == 0:
                raise RuntimeError(f"nothing was moved, so this would measure nothing: {report}")
            rows.append(report.computed_rows / report.prompt_tokens)
            return taken

        def vanilla(number: int, prompts=prompts) -> float:
            return ask_batch(model, prompts[number], 1)

        reuse(n), vanilla(n)
        rows.clear()
        name = f"batch of {size}"
        taken = rounds({"with the cache": reuse, "vanilla": vanilla}, tqdm(range(n), desc=name))
        for way, values in taken.items():
            note = "seconds of the whole batch over its prompts; median"
            add_median(setting.results, name, f"time to first token per prompt, {way}", values / size, "s", note)
        add_ratio(setting.results, name, "time to first token / vanilla", taken["with the cache"], taken["vanilla"])
        note = "all passes"
        setting.results.add(name, "rows run / prompt tokens", np.mean(rows), "share", n, min(rows), max(rows), note)
