"""Part `curve`: what repair buys. Time to first token and KL by repair fraction, 20 passages in a new order."""

import numpy as np
from tqdm import tqdm

from benchmarks.calls import ask, kl_divergence
from benchmarks.common import bootstrap_mean
from benchmarks.speed_reuse import RAG_TARGET
from benchmarks.speed_runs import Setting, add_median, add_ratio, rotated
from benchmarks.speed_workloads import requests
from hf_suffix_cache import SuffixCache

FRACTIONS = (0.0, 0.05, 0.10, 0.15, 0.30)


def measure(setting: Setting, workload: str = "rag20") -> None:
    """
    Requests of one batch, none of which is stored: every fraction serves each of them from the same store. A fraction
    of 0 still runs the seam rows; `no repair` runs none.
    """
    model, n = setting.model, setting.options.n or 8
    cache = SuffixCache()
    found = requests(setting.tokenizer, workload, n, setting.options.seed)
    for request in tqdm([request for request in found if request.warm], desc="filling the store"):
        ask(model, request.prompt, 4, cache=cache)
    handles = {f"repair {f:.2f}": cache.using(store=False, repair_fraction=f) for f in FRACTIONS}
    handles["no repair"] = cache.using(store=False, fidelity="fast", repair_fraction=0.0, seam_tokens=0)
    handles["fast"] = cache.using(store=False, fidelity="fast")
    firsts: dict[str, list[float]] = {way: [] for way in ["vanilla", *handles]}
    divergences: dict[str, list[float]] = {way: [] for way in handles}
    rows: dict[str, list[float]] = {way: [] for way in handles}
    measured = [request for request in found if request.group == 1]
    for number, request in enumerate(tqdm(measured, desc="repair fractions")):
        full = ask(model, request.prompt, 1, logits=True)
        for way in rotated(list(firsts), number):
            if way == "vanilla":
                firsts[way].append(ask(model, request.prompt, 1).first)
                continue
            answer = ask(model, request.prompt, 1, cache=handles[way], logits=True)
            report = handles[way].last_report
            if report.shifted_tokens == 0:
                raise RuntimeError(f"{way}: nothing was moved, so this would measure nothing: {report}")
            firsts[way].append(answer.first)
            divergences[way].append(float(kl_divergence(full.logits, answer.logits)[0]))
            rows[way].append(report.computed_rows / report.prompt_tokens)
    add_median(setting.results, f"curve, {workload}", "time to first token, vanilla", firsts["vanilla"], "s")
    for way in handles:
        case, values = f"curve, {workload}, {way}", divergences[way]
        target = RAG_TARGET if way == "repair 0.15" else None
        add_ratio(setting.results, case, "time to first token / vanilla", firsts[way], firsts["vanilla"], target)
        setting.results.add(
            case, "KL first token, mean", np.mean(values), "nats", len(values), *bootstrap_mean(values)
        )
        setting.results.add(case, "rows run / prompt tokens", np.mean(rows[way]), "share", len(values))
