"""Parts `rag`, `rag-small`, `rag4k`, `system`, `chat`, `edited`, `nothing`: requests with the cache and without."""

from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from benchmarks.calls import ask, kl_divergence, timing
from benchmarks.common import Results, bootstrap_mean
from benchmarks.speed_runs import Peak, Setting, add_latency, add_median, add_ratio, row_bytes
from benchmarks.speed_workloads import CORPUS_PASSAGES, PASSAGE_TOKENS, Request, requests
from hf_suffix_cache import SuffixCache

RAG_TARGET, KEPT_TARGET = 0.20, 0.9


@dataclass
class Taken:
    """What one workload gave, a value a measured request, in their order."""

    groups: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    firsts: dict[str, list[float]] = field(default_factory=lambda: {"cache": [], "vanilla": []})
    totals: dict[str, list[float]] = field(default_factory=lambda: {"cache": [], "vanilla": []})
    reports: list = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)


def rag(setting: Setting) -> None:
    """8 passages a request, with a store larger than the corpus."""
    measure(setting, "rag8", "rag8", setting.options.n or 3)


def rag_small(setting: Setting) -> None:
    """The same with a store of half the corpus' bytes, the view of the running request included."""
    corpus = CORPUS_PASSAGES * PASSAGE_TOKENS * row_bytes(setting.model)
    measure(setting, "rag8", "rag8, store smaller than the corpus", setting.options.n or 2, max_bytes=corpus // 2)


def rag4k(setting: Setting) -> None:
    """20 passages a request: 4,051 tokens."""
    measure(setting, "rag20", "rag20", setting.options.n or 1)


def system(setting: Setting) -> None:
    """Shared system prompt."""
    measure(setting, "system", "system", setting.options.n or 10)


def chat(setting: Setting) -> None:
    """Growing chat."""
    measure(setting, "chat", "chat", setting.options.n or 15)


def edited(setting: Setting) -> None:
    """Edited head."""
    measure(setting, "edited", "edited", setting.options.n or 10)


def nothing(setting: Setting) -> None:
    """No reuse."""
    measure(setting, "nothing", "nothing", setting.options.n or 10)


def measure(setting: Setting, workload: str, case: str, n: int, max_bytes: int | None = None) -> None:
    """
    Every request of a workload in its order with one cache that keeps its defaults, and without; which of the two
    comes first changes. The KL of the first token is taken from a run of its own that stores nothing.
    """
    model, tokens = setting.model, setting.options.new_tokens
    cache = SuffixCache(max_bytes=max_bytes)
    ask(model, list(range(5, 45)), 2, cache=cache)  # first use measures the model
    cache.clear()
    taken = Taken()
    found = requests(setting.tokenizer, workload, n, setting.options.seed)
    for number, request in enumerate(tqdm(found, desc=case)):
        if request.warm:
            ask(model, request.prompt, tokens, cache=cache)
            continue
        last = number == len(found) - 1
        _measure_one(model, cache, request, number, tokens, taken, with_peak=last)
    write(setting.results, case, taken, tokens, setting.options.model)
    if workload.startswith("rag"):
        write_batches(setting.results, case, taken)


def _measure_one(model, cache, request: Request, number: int, tokens: int, taken: Taken, with_peak: bool) -> None:
    prompt = request.prompt
    full = ask(model, prompt, 1, logits=True)
    reused = ask(model, prompt, 1, cache=cache.using(store=False), logits=True)
    taken.kl.append(float(kl_divergence(full.logits, reused.logits)[0]))
    if with_peak:
        for way, used in (("cache", cache.using(store=False)), ("vanilla", None)):
            with Peak() as peak:
                ask(model, prompt, 1, cache=used)
            taken.peaks[way] = peak.bytes
    for way in ("cache", "vanilla") if number % 2 else ("vanilla", "cache"):
        answer = ask(model, prompt, tokens, cache=cache if way == "cache" else None)
        taken.firsts[way].append(answer.first)
        taken.totals[way].append(answer.total)
    taken.reports.append(cache.last_report)
    taken.groups.append(request.group)
    taken.prompts.append(len(prompt))


def write(results: Results, case: str, taken: Taken, tokens: int, model: str) -> None:
    """All columns of a workload."""
    n, reports = len(taken.reports), taken.reports
    for way, label in (("cache", "with the cache"), ("vanilla", "vanilla")):
        add_latency(results, case, label, taken.firsts[way], taken.totals[way], tokens)
    target = RAG_TARGET if case == "rag20" and model == "smollm2" else None
    add_ratio(results, case, "time to first token / vanilla", taken.firsts["cache"], taken.firsts["vanilla"], target)
    add_ratio(results, case, "total / vanilla", taken.totals["cache"], taken.totals["vanilla"])
    served = sum(r.exact_tokens + r.carried_tokens + r.shifted_tokens for r in reports)
    results.add(case, "hit rate", served / sum(taken.prompts), "share", n, note="(exact + carried + moved) / prompt")
    rows = [report.computed_rows / report.prompt_tokens for report in reports]
    results.add(case, "rows run / prompt tokens", np.mean(rows), "share", n, *bootstrap_mean(rows), "all passes")
    results.add(case, "prompt tokens", np.mean(taken.prompts), "tokens", n, note="mean")
    note = "against full prefill; repair fraction 0.15, the default"
    results.add(case, "KL first token, mean", np.mean(taken.kl), "nats", n, *bootstrap_mean(taken.kl), note)
    for phase in ("lookup", "plan", "materialise", "repair"):
        known = [timing(report, phase) * 1e3 for report in reports if phase in report.timings]
        if known:
            add_median(results, case, phase, known, "ms")
    commits = [(report.timings["total"] - report.timings["first_token"]) * 1e3 for report in reports]
    add_median(results, case, "after the first token", commits, "ms", "decoding and storing")
    for way, peak in taken.peaks.items():
        label = "with the cache" if way == "cache" else "vanilla"
        note = "most bytes of torch's CPU allocator at a time in the call, beyond those before it; the last request"
        results.add(case, f"peak memory, {label}", peak / 2**20, "MiB", 1, note=note)


def write_batches(results: Results, case: str, taken: Taken) -> None:
    """Ratio, rows and KL by batch of novel orders; how much of batch 2's gain batch 10 keeps."""
    groups = np.array(taken.groups)
    first = {way: np.array(values) for way, values in taken.firsts.items()}
    gains = {}
    for group in sorted(set(taken.groups)):
        own = groups == group
        name = f"{case}, batch {group:02d}"
        ratio = add_ratio(results, name, "time to first token / vanilla", first["cache"][own], first["vanilla"][own])
        gains[group] = 1.0 - ratio
        rows = [r.computed_rows / r.prompt_tokens for r, mine in zip(taken.reports, own, strict=True) if mine]
        results.add(name, "rows run / prompt tokens", np.mean(rows), "share", len(rows))
        results.add(name, "KL first token, mean", np.mean(np.array(taken.kl)[own]), "nats", len(rows))
    last = max(gains)
    kept, low, high = _kept(first, groups, last)
    goal = f"target >= {KEPT_TARGET}; " if "smaller" not in case else ""
    note = f"{goal}gain is 1 - time to first token / vanilla; 95 % bootstrap"
    results.add(case, f"gain of batch {last} / of batch 2", kept, "ratio", int((groups == 2).sum()), low, high, note)


def _kept(first: dict[str, np.ndarray], groups: np.ndarray, last: int, resamples: int = 10_000) -> tuple:
    """Gain of the last batch over that of batch 2, with its interval: pairs are drawn inside each batch."""
    rng, gains = np.random.default_rng(0), []
    for group in (last, 2):
        own = np.flatnonzero(groups == group)
        drawn = np.concatenate([own[None], own[rng.integers(0, len(own), (resamples, len(own)))]])
        cache, vanilla = (np.median(first[way][drawn], axis=1) for way in ("cache", "vanilla"))
        gains.append(1.0 - cache / vanilla)
    ratios = gains[0] / gains[1]
    return float(ratios[0]), *(float(value) for value in np.percentile(ratios[1:], [2.5, 97.5]))
