"""
Part `threads`: lookups and plans of requests of several threads on one store, without a model, and whole calls of
SmolLM2-135M-Instruct, each thread with one thread of torch.
"""

import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.calls import ask
from benchmarks.common import MODELS, Results, load_model
from benchmarks.speed_lookup import pieces, shapes, store_text, words
from benchmarks.speed_micro import DTYPE, MODEL
from benchmarks.speed_runs import SpeedOptions, add_median
from benchmarks.speed_workloads import Texts, reordered
from hf_suffix_cache import SuffixCache, SuffixCacheConfig
from hf_suffix_cache.capability import Capability
from hf_suffix_cache.inputs import PromptBatch
from hf_suffix_cache.request import Request
from hf_suffix_cache.store.reading import Reading
from hf_suffix_cache.store.scopes import Place, Scope
from hf_suffix_cache.store.store import Store
from hf_suffix_cache.view import View

THREADS = (1, 2, 8)
STORED_TEXTS, TEXT_TOKENS = 390, 4096  # 10^5 blocks of 16 tokens
PROMPTS = (1024, 4096, 16384)
SECONDS = 1.5  # of one measurement
CALL_TOKENS, CALLS = 1536, 16


def measure(options: SpeedOptions) -> None:
    """Both."""
    options.threads = 1
    torch.set_num_threads(1)
    plans(Results("speed", MODEL, DTYPE, options), options.n or 7)
    model, tokenizer = load_model("smollm2", 1)
    calls(Results("speed", MODELS["smollm2"], "float32", options), model, tokenizer, min(options.n or 5, 5))


def plans(results: Results, n: int) -> None:
    """Plans a second, in rounds over the numbers of threads that alternate."""
    rng = np.random.default_rng(0)
    config = SuffixCacheConfig(max_bytes=1 << 40)
    store = Store(config)
    shelf = store.shelf("a model", Place(Scope("anonymous", "")), shapes())
    texts = [words(rng, TEXT_TOKENS) for _ in range(STORED_TEXTS)]
    for text in texts:
        store_text(shelf, text)
    for tokens in PROMPTS:
        prompts = [pieces(rng, texts, tokens) for _ in range(16)]
        served = plan(store, shelf, config, prompts[0]).report
        if served.prompt_tokens != tokens:
            raise RuntimeError(f"{served.prompt_tokens} tokens were planned, not {tokens}")

        def job(number: int, prompts=prompts) -> None:
            plan(store, shelf, config, prompts[number % len(prompts)])

        rates = {count: [] for count in THREADS}
        for _ in range(n):
            for count in THREADS:
                rates[count].append(rate(job, count, SECONDS))
        write(results, f"threads, lookup + plan, {tokens} tokens, 10^5 blocks", "plans", rates)


def plan(store: Store, shelf, config: SuffixCacheConfig, ids: np.ndarray) -> Request:
    """What a request does before its rows are brought into its view, and its end."""
    capability = Capability("shift", layers=shapes(), windows=(None,) * len(shapes()))
    view = View(store, shelf, capability)
    request = Request(view, config, dict, capability=capability, reading=Reading(shelf), keep_last=1)
    request.batch = PromptBatch(ids[None], np.zeros(1, dtype=np.int64), len(ids), 1)
    request._plan({})
    request._close(handed_out=False)
    return request


def calls(results: Results, model, tokenizer, n: int) -> None:
    """Calls a second that are served, and without the cache: one token, passages in ever new orders."""
    texts, cache = Texts(tokenizer, results.options.seed), SuffixCache()
    case = reordered(texts, CALL_TOKENS, 64, CALLS)
    ask(model, case.stored, 1, cache=cache)
    ways = {
        "with the cache": lambda number: ask(model, case.measured[number % CALLS], 1, cache=cache.using(store=False)),
        "vanilla": lambda number: ask(model, case.measured[number % CALLS], 1),
    }
    for way, job in ways.items():
        rates = {count: [] for count in THREADS}
        for _ in range(n):
            for count in THREADS:
                rates[count].append(rate(job, count, 4 * SECONDS))
        write(results, f"threads, calls of {CALL_TOKENS} tokens, {way}", "calls", rates)


def rate(job: Callable[[int], object], threads: int, seconds: float) -> float:
    """How often a second `job` is done by so many threads, each of which goes on until the time is over."""
    done, start = [0] * threads, threading.Barrier(threads + 1)
    over = threading.Event()

    def work(number: int) -> None:
        start.wait()
        while not over.is_set():
            job(number + threads * done[number])
            done[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    start.wait()
    began = time.perf_counter()
    over.wait(seconds)
    over.set()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - began)


def write(results: Results, case: str, unit: str, rates: dict[int, list[float]]) -> None:
    """Rates and their ratios, of rounds that alternate."""
    for count, values in rates.items():
        add_median(results, case, f"{unit} a second, {count} threads", values, "1/s")
    one, two, eight = (np.array(rates[count]) for count in THREADS)
    add_median(results, case, "2 threads / 1 thread", two / one, "ratio", "target >= 1.5; median of rounds")
    add_median(results, case, "8 threads / 2 threads", eight / two, "ratio", "target >= 0.95; median of rounds")
