"""Parts `growth`, `decode` and `own`: how latency grows with the prompt, time per token, the package's own time."""

import copy
from collections.abc import Callable

import numpy as np
from tqdm import tqdm

from benchmarks import data
from benchmarks.calls import ask
from benchmarks.common import Results
from benchmarks.nothing_in_common import NothingOptions, measure_own_time
from benchmarks.speed_runs import Setting, add_median, add_ratio, prefilled, rounds
from benchmarks.speed_workloads import Texts, reordered
from hf_suffix_cache import SuffixCache

GROWTH_TARGET, GROWTH_TOKENS, REUSED = 1.40, 128, 0.9
DECODE_TARGET = {"float32": 0.80, "bfloat16": 0.55}
DECODE_CONTEXTS, DECODE_TOKENS = (128, 1024, 4096), 32
SHORT, SHORT_TARGET, SHORT_PAIRS = 128, 1.02, 30
OWN_TARGET, OWN_TOKEN_TARGET_MS = 0.015, 0.2


# -- growth --------------------------------------------------------------------------------------------------------


def growth(setting: Setting) -> None:
    """
    Total latency, 128 new tokens, at 90 % reuse: behind an exact prefix, and of passages in an order that never came
    before. Requests are stored as they come, as in real traffic.
    """
    texts = Texts(setting.tokenizer, setting.options.seed)
    n = setting.options.n or 3
    medians: dict[tuple[str, str, int], float] = {}
    for tokens in setting.options.lengths():
        for kind, prompts in (("prefix", _prefixed(texts, tokens, n)), ("passages", _shuffled(texts, tokens, n))):
            case = f"growth, {kind}, {tokens}"
            taken = _totals(setting, case, next(prompts), list(prompts))
            for way, values in taken.items():
                medians[kind, way, tokens] = float(np.median(values))
                add_median(
                    setting.results, case, f"total, {way}", values, "s", "128 new tokens, 90 % of prompt stored"
                )
            add_ratio(setting.results, case, "total / vanilla", taken["with the cache"], taken["vanilla"])
    if {2048, 4096} <= set(setting.options.lengths()):
        for kind in ("prefix", "passages"):
            for way in ("with the cache", "vanilla"):
                grown = medians[kind, way, 4096] / medians[kind, way, 2048]
                note = f"target <= {GROWTH_TARGET}; ratio of medians" if way != "vanilla" else "ratio of medians"
                setting.results.add(f"growth, {kind}", f"total at 4096 / at 2048, {way}", grown, "ratio", n, note=note)


def _prefixed(texts: Texts, tokens: int, n: int):
    """A stored prompt, and `n` others that share its first 90 %; one more to warm up."""
    shared = texts.take(int(tokens * REUSED))
    for _ in range(n + 2):
        yield shared + texts.question(tokens - len(shared))


def _shuffled(texts: Texts, tokens: int, n: int):
    """The same with 90 % in passages, each time in another order."""
    case = reordered(texts, tokens, tokens - int(tokens * REUSED), n + 1)
    yield case.stored
    yield from case.measured


def _totals(setting: Setting, case: str, stored: list[int], prompts: list[list[int]]) -> dict[str, np.ndarray]:
    model, cache = setting.model, SuffixCache()
    ask(model, stored, 4, cache=cache)
    ask(model, prompts.pop(), 4, cache=cache)

    def reuse(number: int) -> float:
        total = ask(model, prompts[number], GROWTH_TOKENS, cache=cache).total
        report = cache.last_report
        if not 0.7 * REUSED < (report.prompt_tokens - report.new_tokens) / report.prompt_tokens < 1.1 * REUSED:
            raise RuntimeError(f"about {REUSED:.0%} of the prompt should have been found: {report}")
        return total

    ways = {
        "with the cache": reuse,
        "vanilla": lambda number: ask(model, prompts[number], GROWTH_TOKENS).total,
    }
    return rounds(ways, tqdm(range(len(prompts)), desc=case))


# -- decoding ------------------------------------------------------------------------------------------------------


def decode(setting: Setting) -> None:
    """
    Milliseconds per generated token behind contexts of 128, 1K and 4K tokens, against a `DynamicCache` that holds the
    same rows. Each call generates 32 tokens; its median step counts.
    """
    model, dtype = setting.model, setting.options.dtype
    texts = Texts(setting.tokenizer, setting.options.seed)
    for context in DECODE_CONTEXTS:
        prompt, cache = texts.take(context), SuffixCache()
        pairs = setting.options.n or (SHORT_PAIRS if context == SHORT else 10)
        ask(model, prompt, 1, cache=cache)
        handle = cache.using(store=False, fidelity="exact")
        stock = prefilled(model, prompt[:-1])

        def step(make: Callable, prompt=prompt) -> Callable[[int], float]:
            def run(_: int) -> float:
                past = make()
                return float(np.median(ask(model, prompt, DECODE_TOKENS + 1, cache=past).steps)) * 1e3

            return run

        ways = {"with the cache": step(lambda handle=handle: handle)}
        ways["DynamicCache"] = step(lambda stock=stock: copy.deepcopy(stock))
        for way in ways.values():
            way(0)
        if handle.last_report.computed_rows != 1:
            raise RuntimeError(f"all rows but the last should have been served: {handle.last_report}")
        case = f"decode, {context}"
        taken = rounds(ways, tqdm(range(pairs), desc=case))
        for way, values in taken.items():
            add_median(setting.results, case, f"time per token, {way}", values, "ms")
        note = f"target: the interval includes a value <= {SHORT_TARGET}" if context == SHORT else ""
        target = DECODE_TARGET[dtype] if context == 4096 else None
        first, second = taken["with the cache"], taken["DynamicCache"]
        add_ratio(setting.results, case, "time per token / DynamicCache", first, second, target, note)


# -- own time ------------------------------------------------------------------------------------------------------


class Renamed(Results):
    """Rows of another benchmark's measurement under this one's name, case and targets."""

    def add(self, case: str, metric: str, value, unit, n, low="", high="", note="") -> None:
        targets = {"own time / stock prefill": OWN_TARGET, "own time beyond update": OWN_TOKEN_TARGET_MS}
        rest = "; ".join(part for part in note.split("; ") if not part.startswith("target"))
        note = f"target <= {targets[metric]}; {rest}" if metric in targets else rest
        super().add(f"own time, {case}", metric, value, unit, n, low, high, note)


def own_time(setting: Setting) -> None:
    """What the cache adds to prompts of 1,000 tokens that it can't help: see `nothing_in_common`."""
    options = NothingOptions(
        n=setting.options.n or 15,
        threads=setting.options.threads,
        seed=setting.options.seed,
        tokens=1000,
        data="squad",
    )
    prompts = data.plain_prompts(setting.tokenizer, options.data, options.stored + 1 + options.n, 1000, options.seed)
    results = Renamed("speed", setting.results.model, setting.results.dtype, setting.options)
    measure_own_time(setting.model, prompts, options, results)
