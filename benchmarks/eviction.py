"""
What a full store should give up: the policies on workloads that are larger than the store, through the real store,
without a model (rows of 16 bytes, whatever memory held; 1 of 7 moved rows counts as run again).

The figure is the share of the prompts' rows that were not run, after the first third of the requests. Beside it stands
what the best fixed set of documents would have saved that fits into the store, chosen with all requests known (`loop`,
`zipf`, `drift`, `scan`, `large`: documents that are asked for as a whole), or a store without a limit (all).

| workload | requests |
|---|---|
| `loop` | documents in turn, 1.2 times the store; target: at least 0.8 of the best fixed set's |
| `loop, questions` | the same, with a new question behind each |
| `zipf` | ten times the store, the r-th most popular one in proportion to 1 / r |
| `drift` | the same, and a tenth of the ranks is dealt anew after every 100 requests |
| `scan` | every second request is for one of a few documents, the others come once |
| `large` | the few documents alone, but every 25th request is for a new one of 0.6 of the store |
| `chats` | 8 chats at a time, on average 0.6 of the store; each ends after 10 turns, and another begins |
| `many chats` | 24 at a time, 1.8 times the store |
| `corpus` | 5 passages in any order behind a system prompt; the corpus is 2.5 times the store, popular as in `zipf` |

    python -m benchmarks.eviction                                   # about 4 minutes on 2 cores
    python -m benchmarks.eviction --half-lives 0.5,1,2,4 --output .cache/look
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.common import Options, Results, parse
from hf_suffix_cache import SuffixCacheConfig
from hf_suffix_cache.prompt import SHIFTED, PlannedRow
from hf_suffix_cache.store.drafts import Draft
from hf_suffix_cache.store.eviction import Candidates, Gdsf
from hf_suffix_cache.store.pool import LayerShape
from hf_suffix_cache.store.scopes import Place
from hf_suffix_cache.store.store import Store

SHAPES = (LayerShape(1, 2, 2, torch.float32, torch.device("cpu")),)
ROW_BYTES = sum(shape.row_bytes for shape in SHAPES)
VOCABULARY = 50_000
STORE = 8_000  # rows
DOCUMENT = 200
LOOP = 1.2
LOOP_TARGET = 0.8

Prompt = np.ndarray


@dataclass
class EvictionOptions(Options):
    """`half_lives`: besides the default one, these for `gdsf`, with commas. `workload`: one of them alone."""

    n: int = 900
    half_lives: str = ""
    workload: str = ""


class Server:
    """
    Answers prompts without a model from a store, and stores them, as a request does.

    Args:
        rows (`int`): What the store may hold.
        eviction (`str` or policy): See `SuffixCacheConfig`.
        half_life (`float`, *optional*): Of uses, if not the default one.
        room (`int`): Rows that a view has beyond its prompt.
        **settings: Others of `SuffixCacheConfig`.
    """

    def __init__(self, rows: int, eviction="gdsf", half_life: float | None = None, room: int = 0, **settings):
        self.config = SuffixCacheConfig(max_bytes=rows * ROW_BYTES, eviction=eviction, **settings)
        self.now, self.room = 0.0, room
        self.store = Store(self.config, lambda: self.now)
        self.store.usage.half_life = half_life or self.store.usage.half_life
        self.identity, self.shapes = "model", SHAPES
        self.shelf = self.store.shelf(self.identity, Place(), self.shapes)

    def ask(self, ids: Prompt) -> int:
        """Rows of a prompt that are served and not run again; what is run is stored."""
        self.now += 1
        store, shelf, config = self.store, self.shelf, self.config
        reading = store.reading(self.identity, Place(), self.shapes)
        row = PlannedRow.make(
            ids, 0, reading.match(ids), lambda first: reading.runs(ids, first, config.min_match_tokens), 1, config
        )
        shelf.pin(row.segments())
        for used in [*row.segments(), *([row.prefix_sequence] if row.prefix_sequence is not None else [])]:
            used.last_used = self.now
        store.usage.ask(shelf, row.served)
        extent = store.allocate(shelf, len(ids) + self.room, 1, [(ids, row.served)], [row.served])
        moved = np.flatnonzero(row.kinds == SHIFTED)
        row.mark_recomputed(np.union1d(moved[::7], np.flatnonzero(row.seams)).astype(np.int64))
        exact = row.exact
        draft = Draft(ids, len(ids), row.recipe(), exact, 0 if exact == len(ids) else row.hops, extent, 0, 0)
        store.commit(shelf, draft, {}, False)
        shelf.unpin(row.segments())
        store.release(shelf, extent)
        return int((row.recipe().which >= 0).sum())


class GreedyDual:
    """
    GDSF with the ageing of its paper: what is used is worth as much more as what was given up last was worth. What is
    new stands no contest.
    """

    def __init__(self):
        self.floor = 0.0
        self._known: WeakKeyDictionary = WeakKeyDictionary()

    def worth(self, candidates: Candidates) -> np.ndarray:
        """Saved seconds for a byte, and the floor at the last use."""
        values = candidates.uses * candidates.seconds / np.maximum(candidates.num_bytes, 1)
        for sequence, uses, value in zip(candidates.sequences, candidates.uses, values, strict=True):
            if self._known.get(sequence, (None,))[0] != uses:
                self._known[sequence] = uses, self.floor + value
        worth = np.array([self._known[sequence][1] for sequence in candidates.sequences])
        self.floor = max(self.floor, float(worth.min(initial=np.inf)) if len(worth) else 0.0)
        return worth


# -- workloads ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """`prompts` in order; `documents` names the document that each asks for as a whole, where that is what they do."""

    prompts: list[Prompt]
    documents: list[int] | None = None


def text(rng: np.random.Generator, rows: int) -> Prompt:
    """Tokens that nothing else has in common."""
    return rng.integers(0, VOCABULARY, rows)


def of_documents(rng: np.random.Generator, drawn: list[int], rows: Callable[[int], int]) -> Workload:
    """Requests for documents, by their numbers."""
    texts = {number: text(rng, rows(number)) for number in dict.fromkeys(drawn)}
    return Workload([texts[number] for number in drawn], drawn)


def loop(rng: np.random.Generator, n: int, store: int = STORE, rows: int = DOCUMENT) -> Workload:
    count = round(LOOP * store / rows)
    return of_documents(rng, [number % count for number in range(n)], lambda _: rows)


def loop_with_questions(rng: np.random.Generator, n: int) -> Workload:
    plain = loop(rng, n)
    return Workload([np.concatenate([ids, text(rng, 32)]) for ids in plain.prompts])


def ranks(rng: np.random.Generator, n: int, count: int) -> list[int]:
    """Ranks of `count` things, each drawn in proportion to 1 / (rank + 1)."""
    share = 1 / np.arange(1, count + 1)
    return rng.choice(count, n, p=share / share.sum()).tolist()


def zipf(rng: np.random.Generator, n: int) -> Workload:
    return of_documents(rng, ranks(rng, n, 10 * STORE // DOCUMENT), lambda _: DOCUMENT)


def drift(rng: np.random.Generator, n: int) -> Workload:
    count = 10 * STORE // DOCUMENT
    names, drawn = np.arange(count), []
    for number, rank in enumerate(ranks(rng, n, count)):
        if number % 100 == 0:
            moved = rng.choice(count, count // 10, replace=False)
            names[moved] = names[rng.permutation(moved)]
        drawn.append(int(names[rank]))
    return of_documents(rng, drawn, lambda _: DOCUMENT)


def scan(rng: np.random.Generator, n: int) -> Workload:
    hot = STORE // DOCUMENT * 3 // 4
    drawn = [int(rng.integers(hot)) if number % 2 else hot + number for number in range(n)]
    return of_documents(rng, drawn, lambda _: DOCUMENT)


def large(rng: np.random.Generator, n: int) -> Workload:
    hot = STORE // DOCUMENT * 3 // 4
    drawn = [hot + number if number % 25 == 24 else int(rng.integers(hot)) for number in range(n)]
    return of_documents(rng, drawn, lambda number: DOCUMENT if number < hot else STORE * 6 // 10)


def chats(rng: np.random.Generator, n: int, active: int = 8, turns: int = 10) -> Workload:
    system = text(rng, 100)
    talks = [(system, int(rng.integers(turns))) for _ in range(active)]  # so many turns are over: they end in turn
    prompts = []
    for _ in range(n):
        place = int(rng.integers(active))
        ids, turn = talks[place]
        ids = np.concatenate([ids, text(rng, int(rng.integers(60, 121)))])
        talks[place] = (ids, turn + 1) if turn + 1 < turns else (system, 0)
        prompts.append(ids)
    return Workload(prompts)


def many_chats(rng: np.random.Generator, n: int) -> Workload:
    return chats(rng, n, active=24)


def corpus(rng: np.random.Generator, n: int) -> Workload:
    passages = [text(rng, DOCUMENT) for _ in range(5 * STORE // (2 * DOCUMENT))]
    system, share = text(rng, 60), 1 / np.arange(1, len(passages) + 1)
    prompts = []
    for _ in range(n):
        chosen = rng.choice(len(passages), 5, replace=False, p=share / share.sum())
        prompts.append(np.concatenate([system, *(passages[number] for number in chosen), text(rng, 32)]))
    return Workload(prompts)


WORKLOADS = {
    "loop": loop,
    "loop, questions": loop_with_questions,
    "zipf": zipf,
    "drift": drift,
    "scan": scan,
    "large": large,
    "chats": chats,
    "many chats": many_chats,
    "corpus": corpus,
}


def best_fixed(workload: Workload, skip: int, store: int) -> int:
    """
    Rows of the requests from the `skip`-th on that the best set of documents would have saved which fits into `store`
    rows: a knapsack. The last row of a prompt is always run.
    """
    counts = Counter(workload.documents[skip:])
    sizes = {number: len(ids) for number, ids in zip(workload.documents, workload.prompts, strict=True)}
    unit = int(np.gcd.reduce([store, *sizes.values()]))
    gain = np.zeros(store // unit + 1, dtype=np.int64)
    for number, count in counts.items():
        size = sizes[number] // unit
        if size < len(gain):
            gain[size:] = np.maximum(gain[size:], gain[: len(gain) - size] + count * (sizes[number] - 1))
    return int(gain[-1])


# -- measuring ------------------------------------------------------------------------------------------------------


def main() -> None:
    options = parse(EvictionOptions, __doc__)
    results = Results("eviction", "none", "none", options)
    for name in [options.workload] if options.workload else WORKLOADS:
        measure(results, name, WORKLOADS[name](np.random.default_rng(options.seed), options.n), options)
    ranking(results)


def servers(options: EvictionOptions) -> dict[str, Callable[[], Server]]:
    """The policies, by the name that they have in the CSV."""
    found = {
        "lru": lambda: Server(STORE, "lru"),
        "lfu": lambda: Server(STORE, "lfu"),
        "greedy dual": lambda: Server(STORE, GreedyDual()),
        "gdsf": lambda: Server(STORE, "gdsf"),
        "gdsf, all of the past": lambda: Server(STORE, Gdsf(past=1.0)),
        "all": lambda: Server(50 * STORE),
    }
    for half_life in filter(None, options.half_lives.split(",")):
        found[f"gdsf, half-life {half_life}"] = lambda value=float(half_life): Server(STORE, "gdsf", value)
    return found


def measure(results: Results, name: str, workload: Workload, options: EvictionOptions) -> None:
    """Rows of one workload."""
    skip, n = len(workload.prompts) // 3, len(workload.prompts)
    prompt_rows, saved = sum(map(len, workload.prompts[skip:])), {}
    note = f"of the prompts' rows; after the first {skip} requests; store of {STORE:,} rows"
    best = best_fixed(workload, skip, STORE) if workload.documents is not None else None
    if best is not None:
        results.add(name, "rows saved, best fixed set", best / prompt_rows, "share", n, note=note)
    for policy, make in servers(options).items():
        server = make()
        taken = [server.ask(ids) for ids in tqdm(workload.prompts, desc=f"{name}, {policy}", mininterval=5)]
        saved[policy] = sum(taken[skip:])
        results.add(name, f"rows saved, {policy}", saved[policy] / prompt_rows, "share", n, note=note)
        if policy == "gdsf":
            results.add(name, "evictions, gdsf", server.store.evictions, "sequences", n)
            results.add(name, "turned away, gdsf", server.store.steward.turned_away, "calls", n)
    if name == "loop":
        goal = f"target >= {LOOP_TARGET}; the view of a running call takes a part of the store too"
        for policy in ("gdsf", "lru", "greedy dual"):
            note = goal if policy == "gdsf" else ""
            results.add(
                name, f"saved by {policy} / by the best fixed set", saved[policy] / best, "ratio", n, note=note
            )
    elif saved["lru"]:
        results.add(name, "saved by gdsf / by lru", saved["gdsf"] / saved["lru"], "ratio", n)


def ranking(results: Results, counts: tuple[int, ...] = (100, 1000, 5000)) -> None:
    """Milliseconds of one search for the sequence that is worth least."""
    rng = np.random.default_rng(0)
    for count in counts:
        server = Server(2 * count * 64)
        for _ in tqdm(range(count), desc=f"{count} sequences", mininterval=5):
            server.ask(text(rng, 64))
        taken = []
        for _ in range(15):
            start = time.perf_counter()
            server.store.steward.step(server.shelf.pool, 10**9)
            taken.append((time.perf_counter() - start) * 1e3)
        note = "smallest, largest; 8 of them go after one search"
        results.add(f"{count} stored", "one search", np.median(taken), "ms", len(taken), min(taken), max(taken), note)


if __name__ == "__main__":
    main()
