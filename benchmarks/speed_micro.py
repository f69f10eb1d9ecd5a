"""
Parts `micro` and `blocks`: lookup, plan, materialise and commit without a model, in the shapes of an 8B model: 32
layers, 8 key-value heads of 128 dimensions, bfloat16, 128 KiB a row. On one core.
"""

import time

import numpy as np
import torch

from benchmarks.common import Results
from benchmarks.speed_lookup import (
    BLOCKS,
    DIM,
    LAYERS,
    PIECE,
    PROMPTS,
    ROTARY,
    lookups,
    one_core,
    shapes,
    timed_plan,
    words,
)
from benchmarks.speed_runs import SpeedOptions, add_median
from hf_suffix_cache import SuffixCacheConfig
from hf_suffix_cache.prompt import SHIFTED
from hf_suffix_cache.store.drafts import Draft
from hf_suffix_cache.store.gather import copy_rows
from hf_suffix_cache.store.scopes import Place
from hf_suffix_cache.store.store import Store

MODEL, DTYPE = "none, shapes of an 8B model", "bfloat16"
FREQUENCIES = {ROTARY: 500000.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)}
MEMORY_LIMIT = 6e9
BLOCK_SIZES = (8, 16, 32, 64)


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
        self.shelf = self.store.shelf("model", Place(), shapes(layers))
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
