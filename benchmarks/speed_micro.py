"""
Parts `micro` and `blocks`: lookup, plan, materialise and commit without a model, in the shapes of an 8B model: 32
layers, 8 key-value heads of 128 dimensions, bfloat16, 128 KiB a row. On one core.
"""

import contextlib
import os
import time
from collections.abc import Iterator

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.common import Results
from benchmarks.speed_runs import SpeedOptions, add_median
from hf_suffix_cache import SuffixCacheConfig
from hf_suffix_cache.prompt import SHIFTED, PlannedRow
from hf_suffix_cache.rope import RotarySpec
from hf_suffix_cache.store.gather import copy_rows
from hf_suffix_cache.store.pool import BlockPool, Budget, LayerShape
from hf_suffix_cache.store.segments import Segment
from hf_suffix_cache.store.shelf import Recipe, Sequence, Shelf
from hf_suffix_cache.store.store import Draft, Store

MODEL, DTYPE = "none, shapes of an 8B model", "bfloat16"
LAYERS, HEADS, DIM = 32, 8, 128
ROTARY = RotarySpec("rotary_emb.inv_freq")
FREQUENCIES = {ROTARY: 500000.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)}
VOCABULARY, PIECE, SEQUENCE = 128_000, 200, 4096
PROMPTS = (1024, 4096, 16384, 32768, 131072)
BLOCKS = (10**3, 10**4, 10**5, 10**6)
LOOKUP_TARGET_MS, MEMORY_LIMIT = 50, 6e9
BLOCK_SIZES = (8, 16, 32, 64)


def shapes(layers: int = LAYERS) -> tuple[LayerShape, ...]:
    """Layers of the model."""
    return (LayerShape(HEADS, DIM, DIM, torch.bfloat16, torch.device("cpu"), ROTARY),) * layers


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """One thread on one core."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)


def measure(options: SpeedOptions) -> None:
    """All sizes."""
    options.threads = 1
    results, n = Results("speed", MODEL, DTYPE, options), options.n or 7
    with one_core():
        for blocks in BLOCKS:
            lookups(results, blocks, n)
        for tokens in PROMPTS:
            if 2.3 * tokens * sum(shape.row_bytes for shape in shapes()) <= MEMORY_LIMIT:
                rows_by_size(results, tokens, n)
            else:
                print(f"materialise and commit of {tokens} tokens would take more than {MEMORY_LIMIT / 1e9:.0f} GB")


# -- lookup and plan -----------------------------------------------------------------------------------------------


def words(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Token ids as frequent as words are: the r-th most frequent one in proportion to 1 / r."""
    return (VOCABULARY ** rng.random(tokens)).astype(np.int64) - 1


def stored_shelf(rng: np.random.Generator, blocks: int) -> tuple[Shelf, list[np.ndarray]]:
    """A shelf of `blocks` blocks in sequences of 4,096 tokens and one of up to 128K; no tensors are behind it."""
    config = SuffixCacheConfig()
    shelf = Shelf(BlockPool(shapes(), config.block_size, Budget(0)))
    left, texts = blocks * config.block_size, []
    lengths = [min(max(PROMPTS), left // 2)]
    lengths += [SEQUENCE] * ((left - lengths[0]) // SEQUENCE)
    address = 0
    for length in tqdm(lengths, desc=f"{blocks} blocks", mininterval=2):
        ids, rows = words(rng, length), np.arange(length)
        segment = Segment(ids, rows, ids, address + rows)
        which = np.zeros(length, dtype=np.int32)
        shelf.add(Sequence(ids, Recipe([segment], which, rows, np.zeros(length, dtype=np.int64)), length, length))
        texts.append(ids)
        address += length
    return shelf, texts


def lookups(results: Results, blocks: int, n: int) -> None:
    """Milliseconds of lookup and plan by prompt length: moved pieces of 200 tokens, one prefix, nothing stored."""
    rng, config = np.random.default_rng(blocks), SuffixCacheConfig()
    shelf, texts = stored_shelf(rng, blocks)
    for tokens in PROMPTS:
        kinds = {"moved pieces": pieces(rng, texts, tokens), "nothing stored": words(rng, tokens)}
        if len(texts[0]) >= tokens:
            kinds["one prefix"] = np.concatenate([texts[0][: tokens - 64], words(rng, 64)])
        for kind, ids in kinds.items():
            taken = [timed_plan(shelf, ids, config) for _ in range(n + 1)][1:]
            row = taken[-1][1]
            served = float((~row.computed).mean())
            if (served > 0.5) != (kind != "nothing stored"):
                raise RuntimeError(f"{kind}: {served:.0%} of the prompt were found")
            case = f"micro, {kind}, {tokens} tokens, {blocks} blocks"
            lookup, plan = (np.array([item[0][part] for item in taken]) * 1e3 for part in (0, 1))
            target = f"target <= {LOOKUP_TARGET_MS}; " if (tokens, blocks) == (max(PROMPTS), max(BLOCKS)) else ""
            add_median(results, case, "lookup", lookup, "ms", "one core; median")
            add_median(results, case, "plan", plan, "ms", "one core; median")
            add_median(results, case, "lookup + plan", lookup + plan, "ms", f"{target}one core; median")


def pieces(rng: np.random.Generator, texts: list[np.ndarray], tokens: int) -> np.ndarray:
    """A prompt of pieces of 200 tokens from anywhere in the store, one in twenty new, and a new end."""
    parts = []
    for number in range(-(-tokens // PIECE)):
        text = texts[rng.integers(len(texts))]
        start = rng.integers(len(text) - PIECE)
        parts.append(words(rng, PIECE) if number % 20 == 19 else text[start : start + PIECE])
    return np.concatenate([*parts, words(rng, 64)])[-tokens:]


def timed_plan(shelf: Shelf, ids: np.ndarray, config: SuffixCacheConfig) -> tuple[tuple[float, float], PlannedRow]:
    """Seconds of lookup and of plan, as a request makes them, and the planned prompt."""
    lookup = 0.0

    def timed(function, *arguments):
        nonlocal lookup
        start = time.perf_counter()
        found = function(*arguments)
        lookup += time.perf_counter() - start
        return found

    start = time.perf_counter()
    match = timed(shelf.match, ids)
    row = PlannedRow.make(
        ids, 0, match, lambda first: timed(shelf.runs, ids, first, config.min_match_tokens), 1, config
    )
    return (lookup, time.perf_counter() - start - lookup), row


# -- rows ----------------------------------------------------------------------------------------------------------


class Traffic:
    """
    Requests without a model: rows are whatever memory held, 15 % of the moved ones count as repaired.

    Args:
        layers (`int`), max_bytes (`int`), block_size (`int`): Of the store.
        touched (`int`): Rows of memory that is written once beforehand, as that of a store in use has been: fresh
            memory costs the operating system's time, which is several times that of the copy.
    """

    def __init__(self, layers: int, max_bytes: int, block_size: int = 16, touched: int = 0, seed: int = 0):
        self.config = SuffixCacheConfig(max_bytes=max_bytes, block_size=block_size)
        self.store = Store(self.config)
        self.shelf = self.store.shelf("model", ("scope",), shapes(layers))
        self.rng = np.random.default_rng(seed)
        if touched:
            extent = self.shelf.pool.allocate(touched)
            extent.slab.fill(0, extent.slab.rows, 0.0)
            self.store.release(self.shelf, extent)

    def serve(self, ids: np.ndarray) -> dict[str, float]:
        """Seconds of a request's phases; it is stored."""
        (lookup, plan), row = timed_plan(self.shelf, ids, self.config)
        self.shelf.pin(row.segments())
        start = time.perf_counter()
        extent = self.store.allocate(self.shelf, len(ids) + 64)
        served = np.flatnonzero(~row.computed)
        if len(served):
            addresses = row.served.addresses_of(served)
            shifts = row.served.shift[served]
            copy_rows(self.shelf.pool, addresses, extent, 0, served, shifts, FREQUENCIES)
        materialise = time.perf_counter() - start
        moved = np.flatnonzero(row.kinds == SHIFTED)
        chosen = self.rng.choice(moved, int(0.15 * len(moved)), replace=False) if len(moved) else moved
        row.mark_recomputed(np.union1d(chosen, np.flatnonzero(row.seams)))
        exact = row.exact if len(moved) else len(ids)
        start = time.perf_counter()
        draft = Draft(ids, len(ids), row.recipe(), exact, row.hops if len(moved) else 0, extent, 0, 0)
        self.store.commit(self.shelf, draft, FREQUENCIES, False)
        commit = time.perf_counter() - start
        self.shelf.unpin(row.segments())
        self.store.release(self.shelf, extent)
        return {"lookup": lookup, "plan": plan, "materialise": materialise, "commit": commit, "served": len(served)}


def rows_by_size(results: Results, tokens: int, n: int) -> None:
    """
    Milliseconds of materialise and commit of a prompt whose rows are stored in pieces elsewhere (moved), and of one
    that is stored as a whole. The view and the stored rows are both in memory: 6 GB hold 16K tokens.
    """
    traffic = Traffic(LAYERS, int(MEMORY_LIMIT), touched=int(2.2 * tokens))
    rng = np.random.default_rng(tokens)
    text = words(rng, tokens)
    first = traffic.serve(text)

    def add(case: str, metric: str, values: list[float]) -> None:
        note = "one core; memory that was in use before; median"
        add_median(results, f"micro, {case}, {tokens} tokens", metric, np.array(values) * 1e3, "ms", note)

    add("all new", "commit", [first["commit"]])
    parts = np.split(text, range(PIECE, tokens, PIECE))
    taken = []
    for _ in range(min(n, 3)):
        order = rng.permutation(len(parts))
        taken.append(traffic.serve(np.concatenate([parts[number] for number in order] + [words(rng, 64)])[-tokens:]))
    for metric in ("materialise", "commit"):
        add("moved pieces", metric, [item[metric] for item in taken])
    size = tokens * traffic.shelf.pool.row_bytes
    speed = size / np.median([item["materialise"] for item in taken]) / 2**30
    results.add(f"micro, moved pieces, {tokens} tokens", "materialise, rows per second", speed, "GiB/s", len(taken))
    source = torch.empty(size // 2, dtype=torch.bfloat16).zero_()
    goal = torch.empty_like(source).zero_()
    copies = []
    for _ in range(3):
        start = time.perf_counter()
        goal.copy_(source)
        copies.append(time.perf_counter() - start)
    speed = size / np.median(copies) / 2**30
    results.add(f"micro, moved pieces, {tokens} tokens", "plain copy of as many bytes", speed, "GiB/s", len(copies))


# -- block sizes ---------------------------------------------------------------------------------------------------


def block_sizes(options: SpeedOptions, layers: int = 4) -> None:
    """
    40 requests of 8 of 40 passages of 200 tokens, 15 % of the moved rows repaired: what blocks of 8 to 64 rows waste,
    and how long rows take to gather. 4 layers, so that all sizes fit; times are given for 32.
    """
    options.threads = 1
    results = Results("speed", MODEL, DTYPE, options)
    with one_core():
        for size in BLOCK_SIZES:
            traffic, rng = Traffic(layers, 2**31, size, touched=40_000), np.random.default_rng(0)
            corpus = [words(rng, PIECE) for _ in range(40)]
            system, taken = words(rng, 40), []
            for _ in range(options.n or 40):
                chosen = rng.permutation(len(corpus))[:8]
                prompt = np.concatenate([system, *(corpus[number] for number in chosen), words(rng, 32)])
                taken.append(traffic.serve(prompt))
            _write_blocks(results, f"blocks of {size}", traffic, taken, LAYERS / layers)


def _write_blocks(results: Results, case: str, traffic: Traffic, taken: list[dict], scale: float) -> None:
    later = [item for item in taken if item["served"] > 1000]
    values = np.array([item["materialise"] for item in later]) * 1e3 * scale
    add_median(
        results, case, "materialise", values, "ms", f"about 1,600 moved rows, scaled to {LAYERS} layers; median"
    )
    add_median(results, case, "commit", np.array([i["commit"] for i in later]) * 1e3 * scale, "ms", "scaled; median")
    for moment in ("at rest", "after compact()"):
        used = traffic.store.bytes_used
        waste = traffic.store.bytes_by_kind()["waste"] / used
        results.add(
            case, f"waste, {moment}", waste, "share", len(taken), note=f"{len(taken)} requests; of the used blocks"
        )
        results.add(
            case, f"used, {moment}", used * scale / 2**20, "MiB", len(taken), note=f"scaled to {LAYERS} layers"
        )
        if moment == "at rest":
            traffic.store.compact()
