"""
What the cache costs a prompt that it can't help: text that has nothing in common with anything stored, not even its
first token (SmolLM2-135M-Instruct, fp32). Run it alone on the machine.

* Instrumented: the time of each call outside the decoder's forward, with the cache less without it, is the package's
  own time (lookup, plan, commit, hook): at most 2 % of a stock prefill. For each generated token, the time outside the
  decoder's forward and in the cache's methods other than `update`, with the cache less without it: at most 0.3 ms.
  Whole steps less their `update` are given beside it. They differ by more than the own time: stock's `update`
  copies all keys and values in every step, which leaves them in the processor's cache for the attention that follows.
* Plain: 30 pairs of whole calls that alternate; the 95 % bootstrap interval of the ratio of medians should include a
  value <= 1.03.

    python -m benchmarks.nothing_in_common             # about 12 minutes on 2 cores
    python -m benchmarks.nothing_in_common --n 4 --output .cache/look
"""

import time
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from benchmarks import data
from benchmarks.calls import CACHE_ARGUMENT, ask, timing
from benchmarks.common import Options, Results, alternate, bootstrap_median, parse, seconds
from hf_suffix_cache import SuffixCache
from scripts.smollm2 import load

PREFILL_TARGET = 0.02
TOKEN_TARGET_MS = 0.3
RATIO_TARGET = 1.03
OTHER_MEMBERS = ("get_seq_length", "get_mask_sizes", "get_query_offset", "is_sliding", "is_linear", "is_compileable")


@dataclass
class NothingOptions(Options):
    """`tokens` of a prompt, `new_tokens` after it, prompts `stored` beforehand, `data`; plain `pairs` too?"""

    tokens: int = 700
    new_tokens: int = 32
    stored: int = 10
    data: str = "wiki"
    pairs: bool = True


@dataclass
class Instruments:
    """
    Times, within one call, each forward of the decoder and the cache updates in it; both ways alike.

    Its hooks stay on the model while it is open: one that comes and goes would be another identity to the cache.
    """

    model: object
    forwards: list = field(default_factory=list)
    updates: list = field(default_factory=list)
    others: list = field(default_factory=list)  # the cache's methods that a forward calls, without `update`

    def __enter__(self) -> "Instruments":
        self._real = {}
        decoder = self.model.model
        self._hooks = [
            decoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            decoder.register_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *exception) -> None:
        for hook in self._hooks:
            hook.remove()
        for (kind, name), (own, member) in self._real.items():
            if own:
                setattr(kind, name, member)
            else:
                delattr(kind, name)

    def clear(self) -> None:
        """Forget what was timed: call it before each request."""
        self.forwards, self.updates, self.others = [], [], []

    def _begin(self, decoder, args, kwargs) -> None:
        kind = type(kwargs[CACHE_ARGUMENT])
        if (kind, "update") not in self._real:
            for name in ("update", *OTHER_MEMBERS):
                member = getattr(kind, name)
                self._real[kind, name] = (name in vars(kind), member)
                times = self._timed(member.fget if isinstance(member, property) else member, name == "update")
                setattr(kind, name, property(times) if isinstance(member, property) else times)
        self.updates.append(0.0)
        self.others.append(0.0)
        self._depth = 0
        self._start = time.perf_counter()

    def _end(self, decoder, args, output) -> None:
        self.forwards.append(time.perf_counter() - self._start)

    def _timed(self, member, is_update: bool):
        def timed(*args, **kwargs):
            self._depth += 1
            start = time.perf_counter()
            result = member(*args, **kwargs)
            taken = time.perf_counter() - start
            self._depth -= 1
            totals = self.updates if is_update else self.others
            if totals and self._depth == 0:  # one member may call another
                totals[-1] += taken
            return result

        return timed


def main() -> None:
    options = parse(NothingOptions, __doc__)
    model, tokenizer = load(threads=options.threads)
    wanted = options.stored + 1 + options.n
    prompts = data.plain_prompts(tokenizer, options.data, wanted, options.tokens, options.seed)
    results = Results("nothing_in_common", "SmolLM2-135M-Instruct", "float32", options)
    measure_own_time(model, prompts, options, results)
    if options.pairs:
        measure_pairs(model, prompts, options, results)


def filled(model, prompts: list[list[int]], options: NothingOptions) -> SuffixCache:
    """A cache that holds the first `stored` prompts and has been used on one that it couldn't help."""
    cache = SuffixCache()
    for prompt in tqdm(prompts[: options.stored + 1], desc="filling the store"):
        ask(model, prompt, 1, cache=cache)
    return cache


def nothing_was_reused(report) -> None:
    """The control of this benchmark: a prompt that found something would make it measure something else."""
    if report.new_tokens != report.prompt_tokens or report.reason is not None:
        raise RuntimeError(f"this prompt should have nothing in common with the store: {report}")


def measure_own_time(model, prompts: list[list[int]], options: NothingOptions, results: Results) -> None:
    """Write the package's own time at the prompt and per generated token."""
    taken: dict[bool, list[dict]] = {True: [], False: []}
    with Instruments(model) as instruments:
        cache = filled(model, prompts, options)

        def run(index: int, with_cache: bool) -> float:
            instruments.clear()
            prompt = prompts[options.stored + 1 + index]
            answer = ask(model, prompt, options.new_tokens, cache=cache if with_cache else None)
            inner, updates = np.array(instruments.forwards), np.array(instruments.updates)
            steps = np.array(answer.steps)
            item = {
                "prefill": inner[0],
                "outside": answer.total - inner.sum(),
                "step": np.median(steps),
                "step beyond update": np.median(steps - updates[1:]),
                "step outside": np.median(steps - inner[1:]),
                "step own": np.median(steps - inner[1:] + np.array(instruments.others)[1:]),
                "update": np.median(updates[1:]),
            }
            if with_cache:
                nothing_was_reused(cache.last_report)
                item |= {name: timing(cache.last_report, name) for name in ("lookup", "plan", "materialise")}
            taken[with_cache].append(item)
            return answer.total

        progress = tqdm(range(options.n), desc="instrumented pairs")
        alternate(lambda index: run(index, True), lambda index: run(index, False), progress)
    write_own_time(taken[True], taken[False], options, results)


def write_own_time(cached: list[dict], stock: list[dict], options: NothingOptions, results: Results) -> None:
    """Medians over the pairs of what the cache adds, with 95 % bootstrap intervals."""

    def column(items: list[dict], name: str) -> np.ndarray:
        return np.array([item[name] for item in items])

    def add(case: str, metric: str, values: np.ndarray, unit: str, note: str) -> None:
        results.add(case, metric, np.median(values), unit, len(values), *bootstrap_median(values), note)

    # the steps' share of what lies outside the forward is counted per token below, not at the prompt
    per_token = column(cached, "step outside") - column(stock, "step outside")
    outside = column(cached, "outside") - column(stock, "outside") - per_token * (options.new_tokens - 1)
    prefill = np.median(column(stock, "prefill"))
    size = f"{options.tokens} tokens; {options.stored} and more prompts stored"
    add("prompt", "own time outside the forward", outside * 1e3, "ms", size)
    add("prompt", "own time / stock prefill", outside / prefill, "ratio", f"target <= {PREFILL_TARGET}; {size}")
    add("prompt", "stock prefill", column(stock, "prefill"), "s", size)
    for name in ("lookup", "plan", "materialise"):
        add("prompt", f"reported {name}", column(cached, name) * 1e3, "ms", size)
    own = (column(cached, "step own") - column(stock, "step own")) * 1e3
    add("generated token", "own time beyond update", own, "ms", f"target <= {TOKEN_TARGET_MS}; median of pairs")
    beyond = (column(cached, "step beyond update") - column(stock, "step beyond update")) * 1e3
    note = "stock's update leaves keys and values in the processor's cache"
    add("generated token", "whole steps less update, difference", beyond, "ms", note)
    step = (column(cached, "step") - column(stock, "step")) * 1e3
    add("generated token", "whole steps, difference", step, "ms", "update included")
    add("generated token", "update, with the cache", column(cached, "update") * 1e3, "ms", "all layers of one step")
    add("generated token", "update, stock", column(stock, "update") * 1e3, "ms", "all layers of one step")
    add("generated token", "whole step, stock", column(stock, "step") * 1e3, "ms", "")


def measure_pairs(model, prompts: list[list[int]], options: NothingOptions, results: Results) -> None:
    """Write the ratio of the total time of whole calls, with the cache over without it, nothing instrumented."""
    cache = filled(model, prompts, options)

    def run(index: int, used: SuffixCache | None) -> float:
        prompt = prompts[options.stored + 1 + index]
        taken = seconds(lambda: ask(model, prompt, options.new_tokens, cache=used))
        if used is not None:
            nothing_was_reused(used.last_report)
        return taken

    progress = tqdm(range(options.n), desc="plain pairs")
    paired = alternate(lambda index: run(index, cache), lambda index: run(index, None), progress)
    n, size = len(paired.first), f"{options.tokens} tokens, {options.new_tokens} generated"
    for way, values in (("with the cache", paired.first), ("stock", paired.second)):
        note = f"{size}; median; smallest, largest"
        results.add("whole call", f"total, {way}", np.median(values), "s", n, values.min(), values.max(), note)
    note = f"target: 95 % interval includes a value <= {RATIO_TARGET}; ratio of medians of alternating pairs"
    results.add("whole call", "total / stock", paired.ratio, "ratio", n, *paired.interval(), note)


if __name__ == "__main__":
    main()
