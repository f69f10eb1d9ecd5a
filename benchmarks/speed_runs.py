"""What the parts of the speed benchmark share: options, models, batches, memory peaks, and how rows are written."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from benchmarks.calls import CACHE_ARGUMENT, Clock
from benchmarks.common import MODELS, Options, Paired, Results, bootstrap_median, load_model


@dataclass
class SpeedOptions(Options):
    """
    `part`: which one; `model`: "smollm2" or "gemma"; `dtype`: "float32" or "bfloat16"; `n`: 0 for the part's own
    number; `sizes`: prompt lengths, by comma, of the parts that go through several; `new_tokens` of the workloads.
    """

    n: int = 0
    part: str = ""
    model: str = "smollm2"
    dtype: str = "float32"
    sizes: str = "1024,2048,4096"
    new_tokens: int = 32

    def lengths(self) -> list[int]:
        """`sizes` as numbers."""
        return [int(size) for size in self.sizes.split(",")]


@dataclass
class Setting:
    """What a part runs on."""

    options: SpeedOptions
    model: object
    tokenizer: object
    results: Results


def setting(options: SpeedOptions) -> Setting:
    """The model in the dtype that was asked for, and where figures go."""
    if options.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"`dtype` must be 'float32' or 'bfloat16', got {options.dtype!r}.")
    model, tokenizer = load_model(options.model, options.threads)
    model = model.to(getattr(torch, options.dtype))
    return Setting(options, model, tokenizer, Results("speed", MODELS[options.model], options.dtype, options))


# -- stock caches --------------------------------------------------------------------------------------------------


def row_bytes(model) -> int:
    """Bytes of one row in all layers, measured on a stock `DynamicCache` of one row."""
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([[1]], device=model.device), **{CACHE_ARGUMENT: cache})
    return cache_bytes(cache)


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of all keys and values of a stock cache."""
    return sum(
        tensor.numel() * tensor.element_size() for layer in cache.layers for tensor in (layer.keys, layer.values)
    )


def prefilled(model, ids: list[int], cache: DynamicCache | None = None, chunk: int = 512) -> DynamicCache:
    """The cache that transformers itself would make for `ids`, or `cache` continued by them, run in chunks."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        for start in range(0, len(ids), chunk):
            part = torch.tensor([ids[start : start + chunk]], device=model.device)
            model(part, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    return cache


# -- calls ---------------------------------------------------------------------------------------------------------


def ask_batch(model, prompts: list[list[int]], new_tokens: int, cache=None) -> float:
    """Seconds to the first token of a batch of prompts, padded on the left; `new_tokens` are generated greedily."""
    width = max(map(len, prompts))
    pad = model.generation_config.pad_token_id or 0
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    clock = Clock()
    options = {} if cache is None else {CACHE_ARGUMENT: cache}
    start = time.perf_counter()
    model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        streamer=clock,
        **options,
    )
    return clock.times[0] - start


def passes_of(report) -> list[np.ndarray]:
    """
    Positions that each pass of a request of one prompt ran, from its report: the new ones alone if nothing was
    repaired; else those (the probe), and then the repaired ones with every new one to the right of the first of them.
    """
    (spans,) = report.spans
    kinds = np.concatenate([np.full(span.stop - span.start, span.kind) for span in spans])
    new, repaired = np.flatnonzero(kinds == "new"), np.flatnonzero(kinds == "repaired")
    passes = [new] if not len(repaired) else [new, np.sort(np.concatenate([repaired, new[new > repaired[0]]]))]
    if sum(map(len, passes)) != report.computed_rows or report.reason is not None:
        raise RuntimeError(f"these are not the passes that were run ({[len(part) for part in passes]} rows): {report}")
    return passes


# -- memory --------------------------------------------------------------------------------------------------------


@dataclass
class Peak:
    """
    Most bytes that torch's CPU allocator had handed out at a time inside the block, beyond those before it: the
    allocator's own events, collected by torch's profiler. Slow, so never around something that is timed.
    """

    bytes: int = 0
    _profile: object = field(default=None, repr=False)

    def __enter__(self) -> "Peak":
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._profile.__exit__(*exception)
        events = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        changes = np.array([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
        self._profile = None
        self.bytes = int(max(changes.cumsum().max(), 0)) if len(changes) else 0


# -- rows of the CSV -----------------------------------------------------------------------------------------------


def rotated(ways: list[str], number: int) -> list[str]:
    """The ways in an order that changes from round to round, so that drift favours none."""
    start = number % len(ways)
    return ways[start:] + ways[:start]


def rounds(ways: dict[str, Callable[[int], float]], numbers: Iterable[int]) -> dict[str, np.ndarray]:
    """Seconds of every way for every number; which one comes first changes from round to round."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for number in numbers:
        for way in rotated(list(ways), number):
            taken[way].append(ways[way](number))
    return {way: np.array(values) for way, values in taken.items()}


def add_median(results: Results, case: str, metric: str, values, unit: str, note: str = "") -> None:
    """One row: the median with its 95 % bootstrap interval."""
    results.add(case, metric, np.median(values), unit, len(values), *bootstrap_median(values), note or "median")


def add_ratio(results: Results, case: str, metric: str, first, second, target: float | None = None, note="") -> float:
    """One row: the ratio of medians of two columns of the same rounds, with its interval; gives the ratio."""
    paired = Paired(np.asarray(first), np.asarray(second))
    goal = "" if target is None else f"target <= {target}; "
    text = f"{goal}ratio of medians, alternating, 95 % bootstrap{'; ' + note if note else ''}"
    results.add(case, metric, paired.ratio, "ratio", len(paired.first), *paired.interval(), text)
    return paired.ratio


def add_latency(results: Results, case: str, way: str, firsts, totals, new_tokens: int) -> None:
    """Rows of one way: time to first token, total latency (mean, P50, P99), tokens per second."""
    totals = np.asarray(totals)
    add_median(results, case, f"time to first token, {way}", firsts, "s")
    results.add(case, f"total, {way}, mean", totals.mean(), "s", len(totals), note=f"{new_tokens} new tokens")
    for share in (50, 99):
        note = "of so few calls P99 is nearly the largest" if share == 99 else ""
        results.add(case, f"total, {way}, P{share}", np.percentile(totals, share), "s", len(totals), note=note)
    results.add(
        case, f"tokens per second, {way}", new_tokens / totals.mean(), "1/s", len(totals), note="prefill included"
    )
