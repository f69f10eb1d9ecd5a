"""
Mixed work of many threads on few models and two small stores, checked all the time. `python -m scripts.soak` runs it.

Each thread draws one job after the other: calls in exact, balanced and fast fidelity, of sessions and without one;
batches and beams; views that go to the caller; strangers who guess another session's text; texts that are registered,
pinned and shared; `settle`, `explain`, `clear`, `compact`, `save` and `load`; a clock that jumps; weights that change.
The threads follow what a user must: while a model's weights change nobody calls it.
"""

import gc
import logging
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.soak_checks import Gate, RowsOfThread, Warnings, difference, finite
from benchmarks.soak_traffic import ANONYMOUS, SCOPES, SESSIONS, SHARED, TTL, Traffic, text
from hf_suffix_cache import SuffixCache
from hf_suffix_cache.config import PoolExhausted
from reference import (
    TOLERANCE,
    ask,
    check_pool,
    check_report,
    first_layer_is_fresh,
    kl,
    served,
    stock_rounding,
    view_of,
    view_rows,
)
from tiny_models import make_model

ROW = 3 * 2 * 2 * 16 * 4  # bytes: layers x (keys, values) x KV heads x head_dim x fp32
ROWS = 6000  # that a store may hold
CHECKED = 0.25  # of the answers that are compared with transformers' own
POPULAR = (0.35, 0.15, 0.2, 0.2, 0.1)  # of the subjects, how often each is asked
PAD = 2
FAULTS_SHOWN = 20
ROUNDINGS = 3  # times the difference that stock shows between a prompt in one piece and in two: rows have a history


class Subject:
    """
    A model that is asked. With `spied` its rows are counted; a hook keeps a model's rows from being saved.

    Args:
        kind (`str`), seed (`int`): See `make_model`.
        moves (`bool`): Whether its rows can be moved.
        changes (`bool`): Whether its weights change now and then.
    """

    def __init__(self, kind: str, seed: int = 0, spied: bool = False, moves: bool = True, changes: bool = False):
        self.name = f"{kind} {seed}"
        self.model = make_model(kind, seed)
        self.moves, self.changes = moves, changes
        self.rows = RowsOfThread(self.model) if spied else None
        self.gate = Gate()
        self.longest = 260 if moves else 200
        self._weights = [module.weight for name, module in self.model.named_modules() if name.endswith("k_proj")]
        self._first = [weight.detach().clone() for weight in self._weights]

    def change(self, factor: float) -> None:
        """Other weights, a multiple of the first ones: a factor that was there before brings them back."""
        with self.gate.alone(), torch.no_grad():
            for weight, first in zip(self._weights, self._first, strict=True):
                weight.copy_(first * factor)


class Soak:
    """
    What the threads share, and what they have seen.

    Args:
        workers (`int`): Threads.
        seed (`int`): Of all draws.
    """

    def __init__(self, workers: int, seed: int):
        self.subjects = [
            Subject("llama", spied=True),
            Subject("mistral", spied=True),
            Subject("qwen3"),
            Subject("llama", 1, changes=True),
            Subject("gpt2", moves=False),
        ]
        self.offset = 0.0
        budget = ROWS * ROW
        settings = dict(clock=self.clock, debug=True, ttl=60.0)
        self.caches = [
            SuffixCache(max_bytes=budget, pin_share=0.2, **settings),
            SuffixCache(max_bytes=budget, store_dtype="int8", keep_conversations=1, eviction="lru", **settings),
        ]
        self.gate = Gate()  # closed while the stores are counted
        self.counts: Counter = Counter()
        self.latencies: list[tuple[float, float]] = []
        self.divergences: list[tuple[float, float]] = []
        self.largest = 0.0
        self.faults: list[tuple[str, str]] = []
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="soak-")
        self.folders = [Path(self._folder.name) / str(number) for number in range(len(self.caches))]
        self.workers = [Worker(self, 1000 * seed + number) for number in range(workers)]
        self._handler = Warnings(self.fault)

    def clock(self) -> float:
        """Seconds, which jump now and then."""
        return time.monotonic() + self.offset

    def jump(self, seconds: float) -> None:
        """Have the clock jump."""
        self.offset += seconds

    def fault(self, kind: str, what: str) -> None:
        """Note what must not happen."""
        with self._lock:
            self.faults.append((kind, what))
            if len(self.faults) <= FAULTS_SHOWN:
                print(f"FAULT ({kind}): {what}", flush=True)

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number

    def took(self, seconds: float) -> None:
        """Note a call's latency."""
        with self._lock:
            self.latencies.append((time.monotonic(), seconds))

    def take_latencies(self) -> list[tuple[float, float]]:
        """When each call has ended since this was asked last, and its seconds."""
        with self._lock:
            found, self.latencies = self.latencies, []
        return found

    def checked(self, worst: float, parted: bool) -> None:
        """Note a comparison with transformers' own answer."""
        with self._lock:
            self.largest = max(self.largest, worst)
            self.counts["compared"] += 1
            self.counts["equally likely tokens"] += parted

    def diverged(self, nats: float, control: float) -> None:
        """Note how far an approximate answer is from the full prefill's, and how far a wrong one would be."""
        with self._lock:
            self.divergences.append((nats, control))

    # -- from start to end --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Let the threads begin."""
        logging.getLogger("hf_suffix_cache").addHandler(self._handler)
        logging.getLogger("hf_suffix_cache").propagate = False
        for worker in self.workers:
            worker.start()

    def inspect(self) -> None:
        """With all threads at rest: every row and reference is explained."""
        with self.gate.alone():
            gc.collect()
            for cache in self.caches:
                try:
                    check_pool(cache)
                    kinds = cache.stats.bytes_by_kind()
                    assert kinds["views"] == kinds["private"] == 0, f"no call is running: {kinds}"
                except Exception:
                    self.fault("accounting", traceback.format_exc())
            self.count("inspections")

    def stop(self) -> None:
        """Wait for the threads, then look at what they have left: nothing may stay in use once all is forgotten."""
        self.stopping.set()
        for worker in self.workers:
            worker.join(timeout=120)
            if worker.is_alive():
                self.fault("exception", "a thread does not come to its end")
        self.inspect()
        self.totals = [cache.stats.to_dict() for cache in self.caches]
        for cache in self.caches:
            cache.clear()
            stats = cache.stats
            if stats.bytes_used or stats.segments:
                self.fault("accounting", f"{stats.bytes_used} bytes are in use after everything was forgotten")
        logging.getLogger("hf_suffix_cache").removeHandler(self._handler)
        self._folder.cleanup()


class Worker(threading.Thread):
    """One thread: draws jobs and does them until the soak ends."""

    def __init__(self, soak: Soak, seed: int):
        super().__init__(daemon=True)
        self.soak = soak
        self.traffic = Traffic(seed)
        self.random = self.traffic.random
        self._strangers = 0
        self._last: tuple[SuffixCache, Subject, str] | None = None
        self._seed = seed
        jobs: list[tuple[float, Callable[[], None]]] = [
            (60, self.call),
            (6, self.batch),
            (8, self.look_at_rows),
            (7, self.guess),
            (2, self.register),
            (2, self.publish),
            (2, self.settle),
            (2, self.explain),
            (1, self.clear),
            (1, self.compact),
            (1, self.statistics),
            (0.6, self.save_and_load),
            (0.5, self.change_weights),
            (0.25, self.jump),
        ]
        self._jobs = [job for _, job in jobs]
        weights = np.array([weight for weight, _ in jobs])
        self._shares = weights / weights.sum()

    def run(self) -> None:
        while not self.soak.stopping.is_set():
            job = self._jobs[int(self.random.choice(len(self._jobs), p=self._shares))]
            with self.soak.gate.shared():
                try:
                    job()
                    self.soak.count(job.__name__)
                except AssertionError as error:
                    kind = "leak" if job == self.guess else "wrong"
                    self.soak.fault(kind, f"{job.__name__}: {error}\n{traceback.format_exc()}")
                except Exception:
                    self.soak.fault("exception", f"{job.__name__}\n{traceback.format_exc()}")

    # -- drawing ------------------------------------------------------------------------------------------------

    def _cache(self) -> SuffixCache:
        return self.soak.caches[int(self.traffic.chance(0.25))]

    def _subject(self) -> Subject:
        return self.soak.subjects[int(self.random.choice(len(self.soak.subjects), p=POPULAR))]

    def _handle(self, cache: SuffixCache, scope: str) -> SuffixCache:
        return cache if scope == ANONYMOUS else cache.session(scope, ttl=TTL[scope])

    def _request(self):
        """A subject, a handle, its scope, and a key for what they have said to each other."""
        if self._last is None or self.traffic.chance(0.3):
            self._last = self._cache(), self._subject(), self.traffic.pick(SCOPES)
        cache, subject, scope = self._last  # a user stays with what he does for a while
        fidelity = str(self.random.choice(["exact", "balanced", "fast"], p=[0.45, 0.4, 0.15]))
        options = {} if self.traffic.chance(0.9) else {"repair_fraction": 1.0}
        if self.traffic.chance(0.05):
            options["share_prefix"] = tuple(self.traffic.pick(SHARED))
        handle = self._handle(cache, scope).using(fidelity=fidelity, **options)
        return subject, handle, scope, (subject.name, scope)

    # -- calls --------------------------------------------------------------------------------------------------

    def call(self) -> None:
        """One prompt."""
        subject, handle, scope, key = self._request()
        ids = self.traffic.prompt(key, scope, subject.longest)
        with subject.gate.shared():
            got = self._ask(subject, ids, handle)
            self._check(subject, ids, handle, got)
        self.traffic.keep(key, got.tokens())

    def batch(self) -> None:
        """Several prompts, padded at the left, or beams."""
        subject, handle, scope, key = self._request()
        prompts = [self.traffic.prompt(key, scope, subject.longest) for _ in range(int(self.random.integers(2, 4)))]
        width = max(map(len, prompts))
        options = {
            "attention_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
            "pad_token_id": PAD,
            **({"num_beams": 2} if self.traffic.chance(0.3) else {}),
        }
        ids = torch.tensor([[PAD] * (width - len(ids)) + ids for ids in prompts])
        with subject.gate.shared():
            got = self._ask(subject, ids, handle, **options)
            self._check(subject, ids, handle, got, **options)

    def look_at_rows(self) -> None:
        """A view that goes to the caller: its first layer is what these tokens have at these places, moved or not."""
        subject, handle, scope, key = self._request()
        ids = self.traffic.prompt(key, scope, subject.longest)
        with subject.gate.shared():
            got = self._ask(subject, ids, handle, return_dict_in_generate=True)
            view = view_of(got.output)
            if subject.moves and handle.config.store_dtype is None:
                first_layer_is_fresh(subject.model, view_rows(view), ids)
            self._check(subject, ids, handle, got)
            for layer in view.layers:  # it is the caller's now
                layer.keys.fill_(float("nan"))

    def guess(self) -> None:
        """A stranger asks for another scope's text: nothing is served, and the work is that of an empty store."""
        subject = self.soak.subjects[int(self.random.integers(2))]  # whose rows are counted
        victim, self._strangers = self.traffic.pick(SCOPES), self._strangers + 1
        stranger = self._cache().session(f"stranger {self._seed} {self._strangers}", ttl=5.0)
        ids = self.traffic.guess(victim)
        with subject.gate.shared():
            report = self._ask(subject, ids, stranger).report
        front = report.exact_tokens + report.carried_tokens
        assert front <= 2, f"served to a stranger: {report}"  # a shared text may begin with such a token by chance
        assert report.new_tokens == report.computed_rows == len(ids) - front, f"cheap guess: {report}"

    def _ask(self, subject: Subject, ids, handle, **options):
        """A call, its latency, its report and the rows that it has run."""
        steps = int(self.random.integers(1, 5))
        if subject.rows is not None:
            subject.rows.take()
        started = time.perf_counter()
        got = ask(subject.model, ids, handle, steps=steps, **options)
        self.soak.took(time.perf_counter() - started)
        report = got.report
        check_report(report)
        finite(got)
        reason = report.reason or ""
        assert "failed" not in reason, reason
        if subject.rows is not None:
            rows = subject.rows.take()
            decoded = sum(step.shape[0] for step in got.scores[1:])
            wanted = report.computed_rows + report.capability_rows + decoded
            assert rows == wanted, f"{rows} rows were run, the report says {wanted}: {report}"
        self.soak.count("hits", report.exact_tokens + report.carried_tokens + served(report) > 0)
        self.soak.count("requests")
        self.soak.count("prompt tokens", report.prompt_tokens)
        self.soak.count("served tokens", report.exact_tokens + report.carried_tokens + report.shifted_tokens)
        self.soak.count("moved tokens", served(report))
        return got

    def _check(self, subject: Subject, ids, handle, got, **options) -> None:
        """Compare an answer with transformers' own: all of it where it must be the same, else the first token."""
        report = got.report
        everything = report.shifted_tokens == report.carried_tokens == 0
        if handle.config.fidelity == "exact":
            alone = got.ids.shape[0] == 1  # in a batch exact rows are run again for a neighbour's sake
            assert everything and (report.repaired_tokens == 0 or not alone), f"exact, and yet: {report}"
        if not self.traffic.chance(CHECKED):
            return
        want = ask(subject.model, ids, steps=len(got.scores), **options)
        if everything:
            self._same(subject, got, want, greedy="num_beams" not in options)
        elif want.first.shape == got.first.shape:
            self.soak.diverged(kl(want.first, got.first), kl(want.first, want.first.roll(1, -1)))

    def _same(self, subject: Subject, got, want, greedy: bool = True) -> None:
        """Two answers must be the same; where they are further apart than O1 allows, about as far as stock's own."""
        worst, parted = difference(got, want, greedy)
        if worst >= TOLERANCE:
            stock = max(
                stock_rounding(subject.model, [each for each in ids if each != PAD]) for ids in want.ids.tolist()
            )
            assert worst < max(TOLERANCE, ROUNDINGS * stock), f"logits {worst:.2e} off, stock in two parts {stock:.2e}"
            self.soak.count("differences above 1e-4")
        self.soak.checked(worst, parted)

    # -- managing -----------------------------------------------------------------------------------------------

    def register(self) -> None:
        """Precompute a shared text; some are pinned, as long as there is room for that."""
        subject, cache, pin = self._subject(), self._cache(), self.traffic.chance(0.3)
        texts = [self.traffic.pick(SHARED)]  # one alone shows no progress bar
        at = "anywhere" if subject.moves and self.traffic.chance(0.5) else "front"
        with subject.gate.shared():
            try:
                cache.register(subject.model, texts, at=at, pin=pin)
            except (ValueError, PoolExhausted) as error:
                if "pin" not in str(error):
                    raise
                self.soak.count("full of pins")
                cache.unpin()

    def publish(self) -> None:
        """A call whose rows all may read: of shared text alone."""
        subject, cache = self._subject(), self._cache()
        ids = self.traffic.pick(SHARED) + self.traffic.pick(SHARED) + text(self.random, 4, 36)
        with subject.gate.shared():
            handle = cache.session(self.traffic.pick(SESSIONS), share=True)
            self._check(subject, ids, handle, self._ask(subject, ids, handle))

    def settle(self) -> None:
        """Recompute a conversation exactly."""
        subject, handle, *_ = self._request()
        if subject.moves:
            with subject.gate.shared():
                self.soak.count("settled rows", handle.settle(subject.model).rows)

    def explain(self) -> None:
        """What would be served: it adds up, whatever the other threads do."""
        subject, handle, scope, key = self._request()
        ids = self.traffic.prompt(key, scope, subject.longest)
        with subject.gate.shared():
            spans = handle.explain(subject.model, ids).spans
        covered = [place for span in spans for place in range(span.start, span.stop)]
        assert covered == list(range(len(ids))), "an explanation leaves tokens out"

    def clear(self) -> None:
        """Forget a session, seldom everything."""
        self._cache().clear(None if self.traffic.chance(0.05) else self.traffic.pick(SESSIONS))

    def compact(self) -> None:
        """Pack all that is stored."""
        self._cache().compact()

    def statistics(self) -> None:
        """Read what a monitor would."""
        cache = self._cache()
        stats = cache.stats
        assert stats.bytes_total <= cache.config.max_bytes
        assert "hf_suffix_cache" in stats.prometheus() and str(stats)
        str(cache.session(self.traffic.pick(SESSIONS), ttl=60.0).stats)

    def save_and_load(self) -> None:
        """Save a store while it works, and ask what was loaded."""
        number = int(self.traffic.chance(0.25))
        cache, folder = self.soak.caches[number], self.soak.folders[number]
        cache.save(folder)
        loaded = SuffixCache.load(folder, max_bytes=ROWS * ROW, fidelity="exact", debug=True)
        subject = self.soak.subjects[2 + int(self.random.integers(3))]  # whose rows can be saved
        with subject.gate.shared():
            for _ in range(3):
                scope = self.traffic.pick(SCOPES)
                ids = self.traffic.prompt((subject.name, scope), scope, subject.longest)
                got = self._ask(subject, ids, self._handle(loaded, scope))
                self._same(subject, got, ask(subject.model, ids, steps=len(got.scores)))
                self.soak.count("tokens served after a load", got.report.exact_tokens)
        check_pool(loaded)

    def change_weights(self) -> None:
        """Other weights for the model whose weights change."""
        subject = next(subject for subject in self.soak.subjects if subject.changes)
        subject.change(float(self.random.choice([1.0, 1.25, 0.8])))

    def jump(self) -> None:
        """The clock jumps, seldom backward."""
        self.soak.jump(-5.0 if self.traffic.chance(0.1) else float(self.random.uniform(5.0, 60.0)))
