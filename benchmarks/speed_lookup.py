"""
Part `micro`, lookup and plan: without tensors, on one core, with up to 10^6 stored blocks of 16 tokens.

The shapes are those of an 8B model: 32 layers, 8 key-value heads of 128 dimensions, bfloat16.
"""

import contextlib
import os
import time
from collections.abc import Iterator

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.common import Results
from benchmarks.speed_runs import add_median
from hf_suffix_cache import SuffixCacheConfig
from hf_suffix_cache.prompt import PlannedRow
from hf_suffix_cache.rope import RotarySpec
from hf_suffix_cache.store.pool import BlockPool, Budget, LayerShape
from hf_suffix_cache.store.segments import Segment
from hf_suffix_cache.store.shelf import Recipe, Sequence, Shelf

LAYERS, HEADS, DIM = 32, 8, 128
ROTARY = RotarySpec("rotary_emb.inv_freq")
VOCABULARY, PIECE, SEQUENCE = 128_000, 200, 4096
PROMPTS = (1024, 4096, 16384, 32768, 131072)
BLOCKS = (10**3, 10**4, 10**5, 10**6)
LOOKUP_TARGET_MS = 50


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


def words(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Token ids as frequent as words are: the r-th most frequent one in proportion to 1 / r."""
    return (VOCABULARY ** rng.random(tokens)).astype(np.int64) - 1


def stored_shelf(rng: np.random.Generator, blocks: int) -> tuple[Shelf, list[np.ndarray], list[float]]:
    """
    A shelf of `blocks` blocks in sequences of 4,096 tokens and one of up to 128K, without tensors behind it; its
    texts, and the seconds that adding each sequence of 4,096 took.
    """
    config = SuffixCacheConfig()
    shelf = Shelf(BlockPool(shapes(), config.block_size, Budget(0)))
    left, texts = blocks * config.block_size, []
    lengths = [min(max(PROMPTS), left // 2)]
    lengths += [SEQUENCE] * ((left - lengths[0]) // SEQUENCE)
    taken = []
    for length in tqdm(lengths, desc=f"{blocks} blocks", mininterval=2):
        texts.append(words(rng, length))
        start = time.perf_counter()
        store_text(shelf, texts[-1])
        taken.append(time.perf_counter() - start)
    return shelf, texts, taken[1:]


def store_text(shelf: Shelf, ids: np.ndarray) -> None:
    """Keep a sequence of exact rows, whose addresses are made up."""
    rows = np.arange(len(ids))
    segment = Segment(ids, rows, ids, rows)
    recipe = Recipe([segment], np.zeros(len(ids), dtype=np.int32), rows, np.zeros(len(ids), dtype=np.int64))
    shelf.add(Sequence(ids, recipe, len(ids), len(ids)))


def lookups(results: Results, blocks: int, n: int) -> None:
    """Milliseconds of lookup and plan by prompt length: moved pieces of 200 tokens, one prefix, nothing stored."""
    rng = np.random.default_rng(blocks)
    shelf, texts, added = stored_shelf(rng, blocks)
    case, note = f"micro, {blocks} blocks", f"{SEQUENCE} tokens; one core; the largest one grew the table"
    values = np.array(added) * 1e3
    results.add(case, "index a sequence", np.median(values), "ms", len(values), values.min(), values.max(), note)
    for tokens in PROMPTS:
        prompts = {"moved pieces": pieces(rng, texts, tokens), "nothing stored": words(rng, tokens)}
        if len(texts[0]) >= tokens:
            prompts["one prefix"] = np.concatenate([texts[0][: tokens - 64], words(rng, 64)])
        if tokens == max(PROMPTS) and blocks == max(BLOCKS):
            prompts |= hard_prompts(rng, shelf, texts, tokens)
        for kind, ids in prompts.items():
            measure_plan(results, f"micro, {kind}, {tokens} tokens, {blocks} blocks", shelf, ids, n, tokens, blocks)


def hard_prompts(rng: np.random.Generator, shelf: Shelf, texts: list[np.ndarray], tokens: int) -> dict:
    """Prompts that find much: fragments, one token over and over, passages that are stored in two orders each."""
    fragments = [_part(rng, texts, 32) for _ in range(tokens // 32)]
    equal = np.full(tokens, 7)
    store_text(shelf, equal)
    passages = [words(rng, PIECE) for _ in range(tokens // PIECE)]
    for _ in range(2):
        order = rng.permutation(len(passages))
        for start in range(0, len(order), 20):
            store_text(shelf, np.concatenate([passages[number] for number in order[start : start + 20]]))
    third = np.concatenate([passages[number] for number in rng.permutation(len(passages))])
    return {
        "fragments of 32": np.concatenate(fragments),
        "equal tokens": np.concatenate([[3], equal[1:]]),
        "two contexts": third,
    }


def measure_plan(results: Results, case: str, shelf: Shelf, ids: np.ndarray, n: int, tokens: int, blocks: int) -> None:
    """Rows of one prompt; at the size that the target speaks of also without compiled kernels."""
    config, largest = SuffixCacheConfig(), (tokens, blocks) == (max(PROMPTS), max(BLOCKS))
    taken = [timed_plan(shelf, ids, config) for _ in range(n + 1)][1:]
    served = float((~taken[-1][1].computed).mean())
    if (served > 0.5) != ("nothing stored" not in case):
        raise RuntimeError(f"{case}: {served:.0%} of the prompt were found")
    lookup, plan = (np.array([item[0][part] for item in taken]) * 1e3 for part in (0, 1))
    goal = f"target <= {LOOKUP_TARGET_MS}; " if largest else ""
    for name, values in (("lookup", lookup), ("plan", plan)):
        add_median(results, case, name, values, "ms", "one core; median")
    add_median(results, case, "lookup + plan", lookup + plan, "ms", f"{goal}one core; median")
    if largest:
        with without_kernels():
            slow = [timed_plan(shelf, ids, config)[0] for _ in range(2)]
        add_median(results, case, "lookup + plan, reference", np.sum(slow, axis=1) * 1e3, "ms", "no compiled kernel")


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """The references alone serve inside."""
    before = os.environ.get("HF_SUFFIX_CACHE_KERNELS")
    os.environ["HF_SUFFIX_CACHE_KERNELS"] = "off"
    try:
        yield
    finally:
        del os.environ["HF_SUFFIX_CACHE_KERNELS"]
        if before is not None:
            os.environ["HF_SUFFIX_CACHE_KERNELS"] = before


def pieces(rng: np.random.Generator, texts: list[np.ndarray], tokens: int) -> np.ndarray:
    """A prompt of pieces of 200 tokens from anywhere in the store, one in twenty new, and a new end."""
    parts = []
    for number in range(-(-tokens // PIECE)):
        parts.append(words(rng, PIECE) if number % 20 == 19 else _part(rng, texts, PIECE))
    return np.concatenate([*parts, words(rng, 64)])[-tokens:]


def _part(rng: np.random.Generator, texts: list[np.ndarray], tokens: int) -> np.ndarray:
    """So many tokens from anywhere in the texts."""
    text = texts[rng.integers(len(texts))]
    start = rng.integers(len(text) - tokens)
    return text[start : start + tokens]


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
