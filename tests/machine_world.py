"""
A cache, its models' states and its sessions, beside an oracle of plain lists: what each scope has seen, and when.

Every step of a `World` is one thing that a user can do, drawn as whole numbers, so that hypothesis can shrink them and
a generator can draw thousands. After each, what was served must be explained by the lists, what must be there must be
served, answers must be transformers' own, and at rest every reference in the pool must be explained.
"""

import copy
import logging
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import peft
import torch

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.config import PoolExhausted
from hf_suffix_cache.store import files
from reference import (
    TOLERANCE,
    ask,
    check_pool,
    check_report,
    common_prefix,
    first_layer_is_fresh,
    stock_rounding,
    view_of,
    view_rows,
)
from tiny_models import VOCAB, fingerprint, make_model, new_text, old_text

LAYERS = 2
ROW = LAYERS * 2 * 2 * 16 * 4  # bytes
WINDOW = 8  # tokens: a run that is served has one of these in common with what is stored
TTLS = (50.5, 120.5, None)  # seconds; the clock goes in whole ones
SESSIONS = ("alice", "bob", "carol")
SHARED, ANONYMOUS = "shared", "anonymous"
TEXTS = [old_text(length, 60 + length) for length in (18, 21, 26, 33, 40)]
SECRETS = {scope: old_text(30, 90 + number) for number, scope in enumerate((*SESSIONS, ANONYMOUS))}
FACTORS = (1.0, 1.2, 0.85)  # of the weights
ADAPTERS = ("A", "B", None)
STEPS = 3  # tokens that a call generates, at most
LONGEST = 150
SINK = [7919 * (number + 1) % VOCAB for number in range(16)]  # what a text is registered behind, without a tokenizer


class Killed(BaseException):
    """Stands for the end of a process: nothing that comes after it is done."""


@dataclass
class Entry:
    """A text that was run: how many of its first rows are exact, when it was used last at most and at least."""

    ids: list[int]
    exact: int
    used: float
    stored: float
    wanted: bool = True  # whether it must be there, if nothing was given up
    pinned: bool = False


@dataclass
class Seen:
    """What each scope has seen of each state of the model, and how long sessions live."""

    entries: dict[tuple, list[Entry]] = field(default_factory=dict)
    ttl: dict[str, float | None] = field(default_factory=dict)
    now: float = 0.0

    def of(self, scope: str, state: tuple) -> list[Entry]:
        return self.entries.setdefault((scope, state), [])

    def readable(self, scope: str, state: tuple) -> list[Entry]:
        """What a scope may be served: its own, and what is shared."""
        return self.of(scope, state) + ([] if scope == SHARED else self.of(SHARED, state))

    def expire(self, now: float) -> None:
        """Forget what sessions can't have used for as long as they live."""
        for (scope, _), entries in self.entries.items():
            ttl = self.ttl.get(scope)
            if ttl is not None:
                entries[:] = [entry for entry in entries if now - entry.used < ttl]

    def use(self, scope: str, state: tuple, ids: list[int], now: float) -> None:
        """All that a prompt may have been served of was used: what has text in common with it, and so on."""
        windows, left = _windows(ids), list(self.of(scope, state))
        firsts, grown = {ids[0]}, True
        while grown:
            grown = False
            for entry in list(left):
                own = _windows(entry.ids)
                if own & windows or entry.ids[0] in firsts:
                    entry.used = now
                    windows |= own
                    firsts.add(entry.ids[0])
                    left.remove(entry)
                    grown = True

    def forget(self, scope: str | None = None) -> None:
        for key in list(self.entries):
            if scope in (None, key[0]):
                del self.entries[key]


def _windows(ids: list[int]) -> set[tuple]:
    return {tuple(ids[start : start + WINDOW]) for start in range(len(ids) - WINDOW + 1)}


class Clock:
    """A clock that the world sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """
    Args:
        folder (`Path`): Where stores are saved.
        **settings: Of the cache.
    """

    def __init__(self, folder: Path, **settings):
        self.folder, self.settings = Path(folder), settings
        self._wrapped = adapted()
        self.model = self._wrapped.get_base_model()
        self._weights = [
            module.weight for name, module in self.model.named_modules() if name.endswith("k_proj.base_layer")
        ]
        assert len(self._weights) == LAYERS
        self._first = [weight.detach().clone() for weight in self._weights]
        self.clock = Clock()
        self.state = (FACTORS[0], ADAPTERS[0])
        self.cache = SuffixCache(clock=self.clock, debug=True, **settings)
        self.seen, self.saved = Seen(), None
        self.answers: dict[str, list[int]] = {}
        self.complete = True  # nothing was given up since all was there
        self.counts: dict[str, int] = {}
        self.largest = 0.0

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    # -- prompts ------------------------------------------------------------------------------------------------

    def prompt(self, scope: str, draws: list[int]) -> list[int]:
        """A prompt from a few numbers: a continuation, or texts behind a head or none, and a question."""
        kind, first, second, tail = draws
        question = new_text(4 + tail % 14, 300 + tail)
        if kind % 3 == 0 and scope in self.answers and len(self.answers[scope]) < LONGEST - 20:
            return self.answers[scope] + question
        if kind % 7 == 1 and scope in self.answers:
            earlier = self.answers[scope]
            return earlier[: 1 + first * 7 % len(earlier)]
        head = [] if kind % 2 else new_text(1 + kind % 9, 400 + kind)
        pieces = [*TEXTS, SECRETS.get(scope, TEXTS[0])]
        return head + pieces[first % len(pieces)] + pieces[second % len(pieces)] + question

    # -- what a user does ---------------------------------------------------------------------------------------

    def generate(self, scope: str, fidelity: str, draws: list[int], way: int = 0, ttl: int = 0) -> None:
        """A call; by `way`: plain, its view handed out, nothing stored, its front shared, or stopped on its way."""
        self._call(scope, fidelity, self.prompt(scope, draws), ("", "view", "look", "front", "stop")[way % 5], ttl)

    def guess(self, scope: str, victim: int, moved: bool, fidelity: str) -> None:
        """A scope asks for the secret of another one."""
        others = [each for each in SECRETS if each != scope]
        secret = SECRETS[others[victim % len(others)]]
        ids = (new_text(5, 77) if moved else []) + secret + new_text(9, 78)
        self._call(scope, fidelity, ids, "look")  # not stored, else the next guess is one of its own text

    def batch(self, scope: str, fidelity: str, first: list[int], second: list[int]) -> None:
        """Two prompts in one call."""
        prompts = [self.prompt(scope, draws) for draws in (first, second)]
        width = max(map(len, prompts))
        ids = torch.tensor([[2] * (width - len(each)) + each for each in prompts])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
        handle = self._handle(scope, 0).using(fidelity=fidelity)
        self._before(scope)
        got = ask(self.model, ids, handle, steps=2, attention_mask=mask, pad_token_id=2)
        check_report(got.report)
        exact = True
        for row, each in enumerate(prompts):
            answer = got.ids[row, width:].tolist()
            exact &= self._explained(scope, each, got.report.spans[row], fidelity)
            self._right(each + answer, got, row, len(each), got.report)
        for row, each in enumerate(prompts):
            self.seen.use(scope, self.state, each, self.clock.now)
            text = each + got.ids[row, width:].tolist()[:-1]
            self._store(scope, text, len(text) if exact else 0, got.report, wanted=False)
        self._after("batch", got.report)

    def register(self, text: int, front: bool, pin: bool) -> None:
        """Text that all sessions may read."""
        ids = TEXTS[text % len(TEXTS)]
        self.seen.expire(self.clock.now)
        try:
            self.cache.register(self.model, [ids], at="front" if front else "anywhere", pin=pin)
        except (ValueError, PoolExhausted) as error:
            assert pin and "pin" in str(error)
            self.complete = False
            # it was run before it could not be pinned
            pin = False
        prompt = ids if front else SINK + ids
        wanted = front and not self._gave_up()
        self.seen.of(SHARED, self.state).append(
            Entry(prompt, len(prompt), self.clock.now, self.clock.now, wanted, pin and front)
        )
        self.at_rest()
        self.count("register")

    def unpin(self) -> None:
        self.cache.unpin()
        for entries in self.seen.entries.values():
            for entry in entries:
                entry.pinned = False

    def settle(self, scope: str) -> None:
        """The newest conversation becomes exact: what it was is not asked for, but it may be exact from now on."""
        self._before(scope)
        settled = self._handle(scope, 0).settle(self.model)
        for entry in self.seen.of(scope, self.state) if settled.tokens else ():
            entry.exact, entry.used = len(entry.ids), self.clock.now
            entry.wanted = False
        self.count("settled", settled.tokens > 0)
        self.at_rest()

    def explain(self, scope: str, draws: list[int]) -> None:
        """What would be served: as it is now, and nothing is touched."""
        ids = self.prompt(scope, draws)
        self._before(scope)
        found = self._handle(scope, 0).explain(self.model, ids)
        self._explained(scope, ids, found.spans, "balanced")
        self.at_rest()

    def wait(self, seconds: int) -> None:
        """Time goes by."""
        self.clock.now += seconds
        self.cache.stats  # noqa: B018
        self.at_rest()
        self.seen.expire(self.clock.now)

    def evict(self, steps: int) -> None:
        """Memory is short."""
        store = self.cache._store
        with store.lock:
            for _ in range(steps):
                for pool in list(store.pools.values()):
                    store.steward.step(pool, 10**6)
        self.complete = False
        self.at_rest()

    def clear(self, scope: str | None) -> None:
        """Forget a session, or everything."""
        self.cache.clear(scope)
        self.seen.forget(scope)
        if scope is None:
            self.complete = True
            assert self.at_rest().bytes_used == 0, "memory is in use after everything was forgotten"

    def compact(self) -> None:
        self.cache.compact()
        self.at_rest()

    def save(self) -> None:
        self.seen.expire(self.clock.now)
        self.cache.save(self.folder)
        self._keep_saved()
        self.at_rest()

    def load(self) -> None:
        """A new process: what was saved is there, and nothing else."""
        if self.saved is None:
            return
        with nothing_damaged():
            self.cache = SuffixCache.load(self.folder, clock=self.clock, debug=True, **self.settings)
        self.seen, self.complete = copy.deepcopy(self.saved[0]), self.saved[1]
        asleep = self.clock.now - self.seen.now
        for entries in self.seen.entries.values():
            for entry in entries:
                entry.used, entry.stored = entry.used + asleep, entry.stored + asleep
        self.seen.expire(self.clock.now)
        self.at_rest()
        self.count("loads")

    def crash(self, at: int) -> None:
        """The process ends at a write of a save, and another one loads what it has left: the old store or the new."""
        before = _index(self.folder)
        self.seen.expire(self.clock.now)
        try:
            with killing(at):
                self.cache.save(self.folder)
        except Killed:
            self.count("crashes")
        if _index(self.folder) != before:
            self._keep_saved()
        if self.saved is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.cache = SuffixCache(clock=self.clock, debug=True, **self.settings)
            self.seen, self.complete = Seen(), True
        else:
            self.load()

    def change_weights(self, number: int) -> None:
        """Other weights: a state that was there before may be found again."""
        factor = FACTORS[number % len(FACTORS)]
        with torch.no_grad():
            for weight, first in zip(self._weights, self._first, strict=True):
                weight.copy_(first * factor)
        self.state = (factor, self.state[1])
        for entries in self.seen.entries.values():  # written to, even with the same: nothing of it need be there
            for entry in entries:
                entry.wanted = entry.pinned = False

    def switch_adapter(self, number: int) -> None:
        """Another adapter, or none."""
        name = ADAPTERS[number % len(ADAPTERS)]
        self._wrapped.set_adapter(name or ADAPTERS[0])
        tuner = self._wrapped.base_model
        tuner.disable_adapter_layers() if name is None else tuner.enable_adapter_layers()
        self.state = (self.state[0], name)

    # -- calls --------------------------------------------------------------------------------------------------

    def _handle(self, scope: str, ttl: int) -> SuffixCache:
        if scope == ANONYMOUS:
            return self.cache
        if scope == SHARED:
            return self.cache.session("anyone", share=True)
        seconds = TTLS[ttl % len(TTLS)]
        self.seen.expire(self.clock.now)  # by the time to live until now
        self.seen.ttl[scope] = seconds
        return self.cache.session(scope, ttl=seconds)

    def _before(self, scope: str) -> None:
        self.seen.expire(self.clock.now)

    def _call(self, scope: str, fidelity: str, ids: list[int], way: str, ttl: int = 0) -> None:
        handle = self._handle(scope, ttl).using(fidelity=fidelity)
        if way == "look":
            handle = handle.using(store=False)
        elif way == "front":
            handle = handle.using(share_prefix=tuple(TEXTS[0]))
        self._before(scope)
        steps = 1 + len(ids) % STEPS
        if way == "stop":
            self._stopped(handle, ids, scope)
            return
        options = {"return_dict_in_generate": True} if way == "view" else {}
        got = ask(self.model, ids, handle, steps=steps, **options)
        report = got.report
        check_report(report)
        assert "failed" not in (report.reason or ""), report.reason
        exact = self._explained(scope, ids, report.spans[0], fidelity)
        self._right(got.tokens(), got, 0, len(ids), report)
        if way == "view" and self.settings.get("store_dtype") is None:
            first_layer_is_fresh(self.model, view_rows(view_of(got.output)), ids)
            for layer in view_of(got.output).layers:  # it is the caller's now
                layer.keys.fill_(float("nan"))
        self._wanted(scope, ids, report, fidelity)
        self.seen.use(scope, self.state, ids, self.clock.now)
        if way != "look":
            text = got.tokens()[:-1]
            first = next((span.start for span in report.spans[0] if span.kind not in ("exact", "new")), len(text))
            self._store(scope, text, len(text) if exact else first, report)
            if way == "front" and scope != SHARED:
                front = common_prefix(ids, TEXTS[0])
                if front:
                    self._store(SHARED, ids[:front], min(front, first), report, wanted=False)
            self.answers[scope] = got.tokens()
        del got
        self._after("look" if way == "look" else "generate", report)

    def _stopped(self, handle, ids: list[int], scope: str) -> None:
        """A caller's own code fails on the way: nothing is held, and what was not in the lists is not stored."""

        def fail(input_ids, scores):
            raise KeyboardInterrupt if len(ids) % 2 else RuntimeError("stopped")

        try:
            ask(self.model, ids, handle, steps=2, processors=[fail])
        except (KeyboardInterrupt, RuntimeError):
            self.count("stopped")
        else:
            raise AssertionError("a call that failed came to its end")
        self.seen.use(scope, self.state, ids, self.clock.now)
        self.at_rest()

    def _explained(self, scope: str, ids: list[int], spans, fidelity: str) -> bool:
        """Whatever was served must be in the lists; returns whether all of it is exact."""
        texts, approximate = self.seen.readable(scope, self.state), False
        for span in spans:
            piece = ids[span.start : span.stop]
            if span.kind == "exact":
                self.count("exact tokens", len(piece))
                known = max((common_prefix(ids, entry.ids) for entry in texts), default=0)
                assert span.stop <= known, f"{scope} was served {span} of a text that it has not seen"
            elif span.kind != "new":
                approximate = True
                self.count("approximate tokens", len(piece))
                assert fidelity != "exact" or span.kind == "repaired", f"exact, and yet {span}"
                known = any(_contains(entry.ids, piece) for entry in texts)
                assert known, f"{scope} was served {span} of a text that it has not seen"
        return not approximate

    def _wanted(self, scope: str, ids: list[int], report, fidelity: str) -> None:
        """What must be there is served: pinned text whatever happens, the rest if nothing was given up."""
        if self.settings.get("store_dtype") is not None:
            return  # pinned or not, rows that are kept in fewer bits are approximate
        everything = self.complete and not self._gave_up()
        live = [
            entry
            for entry in self.seen.readable(scope, self.state)
            if entry.pinned or (everything and entry.wanted and not self._old(scope, entry))
        ]
        least = max((min(common_prefix(ids, entry.ids), entry.exact) for entry in live), default=0)
        least = min(least, len(ids) - 1)
        served = report.exact_tokens + report.carried_tokens  # a conversation that goes on may hold fewer exact rows
        assert served >= least, f"{served} of {least} tokens that {scope} has seen were served: {report}"
        self.count("wanted tokens", least)

    def _old(self, scope: str, entry: Entry) -> bool:
        ttl = self.seen.ttl.get(scope)
        return ttl is not None and entry in self.seen.of(scope, self.state) and self.clock.now - entry.stored >= ttl

    def _store(self, scope: str, text: list[int], exact: int, report, wanted: bool = True) -> None:
        if report.reason is not None and ("stored" in report.reason or "of its own" in report.reason):
            wanted = False
        now = self.clock.now
        entries = self.seen.of(scope, self.state)
        entries.append(Entry(text, exact, now, now, wanted))

    def _right(self, tokens: list[int], got, row: int, prompt: int, report) -> None:
        """The answer is transformers' own where everything that was served is exact."""
        scores = torch.stack([step[row] for step in got.scores])
        assert not torch.isnan(scores).any(), "NaN in an answer"
        if report.shifted_tokens or report.carried_tokens:
            return
        with torch.no_grad():
            want = self.model(torch.tensor([tokens])).logits[0, prompt - 1 : -1]
        worst = (scores - want).abs().max().item()
        if worst >= TOLERANCE:  # over very many answers rounding gets there: then it must be about stock's own
            stock = stock_rounding(self.model, tokens)
            assert worst < min(1e-3, 3 * stock), f"max abs logit difference {worst:.2e}, stock's {stock:.2e}: {report}"
            self.count("differences above 1e-4")
        self.largest = max(self.largest, worst)
        self.count("compared")

    def _gave_up(self) -> bool:
        stats = self.cache.stats
        return bool(stats.evictions or stats.turned_away)

    def _after(self, what: str, report) -> None:
        self.count(what)
        self.at_rest()

    def _keep_saved(self) -> None:
        self.seen.now = self.clock.now
        self.saved = copy.deepcopy(self.seen), self.complete and not self._gave_up()

    def at_rest(self):
        """O5: every reference in the pool is explained."""
        self.count("steps")
        return check_pool(self.cache)


def _contains(text: list[int], piece: list[int]) -> bool:
    return any(text[start : start + len(piece)] == piece for start in range(len(text) - len(piece) + 1))


def adapted():
    """A tiny model with two adapters that matter."""
    model = make_model("llama", num_hidden_layers=LAYERS)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config, ADAPTERS[0])
    wrapped.add_adapter(ADAPTERS[1], config)
    wrapped.eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in wrapped.named_parameters():
            if ".lora_" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    model.baseline = fingerprint(model)
    return wrapped


def _index(folder: Path) -> bytes | None:
    path = folder / files.INDEX
    return path.read_bytes() if path.exists() else None


@contextmanager
def nothing_damaged():
    """Inside, a store warns of nothing: what a save or a crash has left is whole, so none of it is skipped."""
    warnings, handler = [], logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: Path(record.pathname).parent.name == "store")
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("hf_suffix_cache").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("hf_suffix_cache").removeHandler(handler)
    assert not warnings, f"a saved store is not whole: {warnings}"


class killing:
    """Inside, the process ends at the n-th operation on a file: it and all later ones raise, and none is done."""

    OPERATIONS = (("open", files), ("replace", files.os), ("fsync", files.os), ("unlink", files.os))

    def __init__(self, at: int):
        self.left = at

    def __enter__(self):
        self._old = []
        for name, place in self.OPERATIONS:
            right = vars(place).get(name)
            self._old.append((place, name, right))
            setattr(place, name, self._guard(right or open))
        return self

    def __exit__(self, *exception):
        for place, name, right in self._old:
            delattr(place, name) if right is None else setattr(place, name, right)

    def _guard(self, right):
        def operation(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                raise Killed
            return right(*args, **kwargs)

        return operation


def draw_step(world: World, random: np.random.Generator) -> None:
    """One step, drawn."""
    scope = str(random.choice([*SESSIONS, ANONYMOUS, SHARED], p=[0.3, 0.2, 0.1, 0.25, 0.15]))
    fidelity = str(random.choice(["exact", "balanced", "fast"], p=[0.5, 0.35, 0.15]))

    def draws() -> list[int]:
        return random.integers(0, 42, 4).tolist()

    number = int(random.integers(0, 1000))
    steps = [
        (50, lambda: world.generate(scope, fidelity, draws(), number, number // 7 % 3)),
        (8, lambda: world.guess(scope, number, bool(number % 2), fidelity)),
        (6, lambda: world.batch(scope, fidelity, draws(), draws())),
        (4, lambda: world.register(number, bool(number % 2), number % 3 == 0)),
        (1, world.unpin),
        (2, lambda: world.settle(scope)),
        (4, lambda: world.explain(scope, draws())),
        (5, lambda: world.wait((1, 20, 51, 130)[number % 4])),
        (2, lambda: world.evict(1 + number % 3)),
        (2, lambda: world.clear(None if number % 8 == 0 else scope if scope in SESSIONS else SESSIONS[0])),
        (3, world.compact),
        (2, world.save),
        (2, world.load),
        (2, lambda: world.crash(number % 14)),
        (3, lambda: world.change_weights(number)),
        (4, lambda: world.switch_adapter(number)),
    ]
    weights = np.array([weight for weight, _ in steps], dtype=float)
    steps[int(random.choice(len(steps), p=weights / weights.sum()))][1]()
