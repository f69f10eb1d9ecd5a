"""
Every allocation, copy, write and index insertion of the package can fail once: which there are, and what follows.

A site is one such call in one run of a scenario. It is found by looking at the calls that the package's own files make
(`sys.setprofile`), so that a new allocation is a new site without being listed here.
"""

import builtins
import errno
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import hf_suffix_cache
from hf_suffix_cache import SuffixCache, generation
from hf_suffix_cache.config import PoolExhausted
from hf_suffix_cache.store import consensus, gather, packing
from hf_suffix_cache.store.index import PrefixIndex, WindowIndex
from hf_suffix_cache.store.pool import BlockPool, Slab
from reference import ask, check_pool, check_report, same_answer, same_as_vanilla, view_of
from tiny_models import A, B, C, fingerprint, head, make_model, new_text, old_text, question

logger = logging.getLogger("hf_suffix_cache")

PACKAGE = os.path.dirname(hf_suffix_cache.__file__) + os.sep
SOURCES = [PACKAGE]  # files whose calls are sites
LAYERS = 2
ROW = LAYERS * 2 * 2 * 16 * 4  # bytes
NO_MEMORY = set(  # calls on tensors that take none, and copy nothing
    "as_subclass data_ptr detach dim element_size expand flatten is_contiguous is_inference item narrow numel numpy "
    "permute requires_grad_ reshape select size squeeze storage_offset stride t transpose unbind unflatten unsqueeze "
    "untyped_storage view split chunk __get__ type device any all max tolist".split()
)
WRITES = {"open", "fsync", "replace", "rename", "unlink", "mkdir", "write", "flush", "writelines"}
FUNCTIONS = (  # of the package, that allocate or copy in one go, or insert
    Slab.__init__,
    BlockPool.allocate,
    BlockPool.allocate_private,
    BlockPool.pack,
    BlockPool.free_rows,
    BlockPool.grow_in_place,
    BlockPool.attach,
    gather.copy_rows,
    gather.average_rows,
    consensus.learn,
    WindowIndex.add,
    WindowIndex.find_runs,
    PrefixIndex.add,
    packing.RowWriter.close,
)
CODES = {function.__code__: function.__qualname__ for function in FUNCTIONS}
KINDS_OF_FAULT = {
    "out of memory": lambda: torch.OutOfMemoryError("injected: out of memory"),
    "no memory": lambda: MemoryError("injected"),
    "runtime": lambda: RuntimeError("injected"),
    "disk full": lambda: OSError(errno.ENOSPC, "injected: no space left on device"),
    "interrupt": lambda: KeyboardInterrupt("injected"),
}
# The passes of a call's prefill are the model's own run: a fault there reaches the caller of `generate`, as one in a
# layer does. Elsewhere it costs reuse, or storing.
OWN_RUN = {"passes.py", "forwards.py", "healing.py"}
MODELS = os.sep + os.path.join("transformers", "models") + os.sep


class Fault:
    """Raises at the `at`-th site; with None it counts them. Writes alone, or all but writes, by the kind of fault."""

    def __init__(self, kind: str, at: int | None):
        self.kind, self.at, self.seen = kind, at, 0
        self.place = None
        self.in_forward = False  # whether the model ran then
        self.error: BaseException | None = None

    def __call__(self, frame, event, arg):
        place = self._site(frame, event, arg)
        if place is None:
            return
        self.seen += 1
        if self.seen == self.at:
            sys.setprofile(None)
            self.place, self.in_forward = place, _runs_the_model(frame)
            self.error = KINDS_OF_FAULT[self.kind]()
            raise self.error

    def _site(self, frame, event, arg) -> str | None:
        if event == "call":
            name = CODES.get(frame.f_code)
            return None if name is None or self.kind == "disk full" else f"{_file(frame)}: {name}"
        if event != "c_call" or not frame.f_code.co_filename.startswith(tuple(SOURCES)):
            return None
        name, owner = getattr(arg, "__name__", ""), getattr(arg, "__self__", None)
        if name in WRITES and not isinstance(owner, torch.Tensor):
            is_file = owner in (os, sys.modules["posix"], builtins, sys.modules["io"]) or hasattr(owner, "fileno")
            return f"{_file(frame)}: {name}" if is_file and self.kind in ("disk full", "interrupt") else None
        tensors = isinstance(owner, torch.Tensor) or (isinstance(owner, type) and owner.__module__.startswith("torch"))
        tensors = tensors or type(owner).__module__.startswith("torch")
        if not tensors or name in NO_MEMORY or self.kind == "disk full":
            return None
        return f"{_file(frame)}: {name}"


def _file(frame) -> str:
    return frame.f_code.co_filename.removeprefix(PACKAGE)


def _runs_the_model(frame) -> bool:
    """Whether a forward is what called this; measuring a model, and looking at its answer, are none of the call's."""
    found = False
    while frame is not None:
        file = _file(frame)
        if file == "measurement.py" or (file, frame.f_code.co_name) == ("request.py", "prefilled"):
            return False
        found = found or file in OWN_RUN or MODELS in file
        frame = frame.f_back
    return found


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error and all that led to it."""
    found = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


@contextmanager
def failing(fault: Fault):
    """Inside, the fault is there; it is gone when it was raised, or at the end."""
    sys.setprofile(fault)
    try:
        yield fault
    finally:
        sys.setprofile(None)


class Bench:
    """A model and a cache that a scenario works on."""

    def __init__(self, model, folder: Path, measured=None):
        self.model, self.folder = model, folder
        self.now = 1000.0
        self.cache: SuffixCache = None
        self.measured = measured  # what is known of the model, so that it is not measured again and again

    def make(self, *prompts, **settings) -> SuffixCache:
        """A cache in which these prompts have run."""
        settings = dict(max_bytes=16 << 20, debug=True, clock=lambda: self.now) | settings
        self.cache = SuffixCache(**settings)
        if self.measured is not None:
            self.cache._owned.capabilities = self.measured
        for ids in prompts:
            ask(self.model, ids, self.cache, steps=1)
        return self.cache

    def load(self) -> None:
        """The cache that was saved, as a new process has it."""
        self.cache = SuffixCache.load(self.folder, max_bytes=16 << 20, debug=True, clock=lambda: self.now)
        self.cache._owned.capabilities = self.measured

    def ask(self, ids, handle=None, **options):
        """A call whose answer is compared: what serves it, and what it says."""
        return lambda: (ids, options, ask(self.model, ids, handle or self.cache, steps=2, **options))


Scenario = Callable[[Bench], Callable]
STORED = A + B + question(1)
MOVED = head(2) + B + A + question(2)
BATCH = [head(3) + A + question(3), head(4) + B[:26] + A[:14] + question(4)]


def first_use(bench: Bench):
    """The model is measured first."""
    bench.make()
    return bench.ask(STORED)


def cold_call(bench: Bench):
    bench.make()
    return bench.ask(STORED)


def exact_hit(bench: Bench):
    bench.make(STORED, fidelity="exact")
    return bench.ask(STORED + new_text(9, 3))


def shifted_hit(bench: Bench):
    bench.make(STORED)
    return bench.ask(MOVED)


def batch(bench: Bench):
    bench.make(STORED)
    width = min(map(len, BATCH))
    return bench.ask([ids[:width] for ids in BATCH])


def refused_call(bench: Bench):
    """A batch with padding on the right, which reuse does not understand."""
    bench.make(STORED)
    mask = torch.ones(2, len(STORED), dtype=torch.long)
    mask[1, -5:] = 0
    return bench.ask([STORED, STORED], attention_mask=mask)


def handed_out_view(bench: Bench):
    bench.make(STORED)
    return bench.ask(MOVED, return_dict_in_generate=True)


def next_turn(bench: Bench):
    """A conversation of moved text goes on in its own memory."""
    bench.make(STORED)
    tokens = ask(bench.model, MOVED, bench.cache, steps=4).tokens()
    return bench.ask(tokens + new_text(12, 4))


def mean_of_contexts(bench: Bench):
    """A text from a second context: its mean is made."""
    bench.make(head(5) + C + question(5))
    return bench.ask(head(6, 20) + C + question(6))


def full_store(bench: Bench):
    """What is stored must go for the call."""
    bench.make(max_bytes=260 * ROW, block_size=4, fidelity="exact", keep_conversations=1)
    for number in range(3):
        ask(bench.model, old_text(70, number), bench.cache, steps=1)
    return bench.ask(old_text(90, 9))


def small_rows(bench: Bench):
    """Rows are kept in 8 bit."""
    bench.make(STORED, MOVED, store_dtype="int8", keep_conversations=0, max_bytes=900 * ROW)
    return bench.ask(head(7) + A + question(7))


def new_session(bench: Bench):
    """A session's call beside shared text, when others have expired."""
    bench.make()
    bench.cache.register(bench.model, [A], at="front")
    ask(bench.model, STORED, bench.cache.session("old", ttl=10.0), steps=1)
    bench.now += 50.0
    return bench.ask(A + C + question(8), bench.cache.session("new", ttl=10.0))


def loaded_rows(bench: Bench):
    """Rows are read from their file, and come into memory as they are used again."""
    bench.make(STORED).save(bench.folder)
    bench.load()
    ask(bench.model, STORED, bench.cache, steps=1)
    return bench.ask(STORED + new_text(5, 5))


def compaction(bench: Bench):
    bench.make(max_bytes=600 * ROW, block_size=4, keep_conversations=0, compact_waste=None)
    for number in range(3):
        ask(bench.model, old_text(50 + number, number) + B, bench.cache.session(number), steps=1)
    bench.cache.clear(1)
    return bench.cache.compact


def registering(bench: Bench):
    bench.make(STORED)
    return lambda: bench.cache.register(bench.model, [C], pin=True)


def saving(bench: Bench):
    """Over an older store."""
    bench.make(STORED).save(bench.folder)
    ask(bench.model, MOVED, bench.cache, steps=1)
    return lambda: bench.cache.save(bench.folder)


def loading_a_store(bench: Bench):
    bench.make(STORED, MOVED).save(bench.folder)

    def load():
        bench.load()
        ask(bench.model, STORED, bench.cache, steps=1)

    return load


def settling(bench: Bench):
    bench.make(STORED, MOVED)
    return lambda: bench.cache.settle(bench.model)


def expiry(bench: Bench):
    bench.make()
    for name in ("one", "two"):
        ask(bench.model, STORED, bench.cache.session(name, ttl=10.0), steps=1)
    bench.now += 50.0
    return lambda: bench.cache.stats.segments


SCENARIOS: dict[str, Scenario] = {
    each.__name__.replace("_", " "): each
    for each in (
        first_use,
        cold_call,
        exact_hit,
        shifted_hit,
        batch,
        refused_call,
        handed_out_view,
        next_turn,
        mean_of_contexts,
        full_store,
        small_rows,
        new_session,
        loaded_rows,
        compaction,
        registering,
        saving,
        loading_a_store,
        settling,
        expiry,
    )
}


@dataclass
class Case:
    """What became of one fault: where it was, whether it reached the caller, and what was wrong then."""

    number: int
    place: str
    raised: bool
    fault: str | None


class Sites:
    """
    All sites of a scenario for one kind of fault.

    Args:
        scenario (`str`): A key of `SCENARIOS`.
        kind (`str`): A key of `KINDS_OF_FAULT`.
        folder (`Path`): Where stores are saved.
    """

    def __init__(self, scenario: str, kind: str, folder: Path):
        self.scenario, self.kind, self.folder = SCENARIOS[scenario], kind, folder
        self.model = make_model("llama", num_hidden_layers=LAYERS)
        self._prints = fingerprint(self.model)
        cache = SuffixCache(max_bytes=16 << 20)
        ask(self.model, old_text(40, 1), cache, steps=1)  # measured, and with a reference for what follows
        self._measured = cache._owned.capabilities

    def count(self) -> int:
        """How many sites there are."""
        action = self._start(0)
        with failing(Fault(self.kind, None)) as fault:
            action()
        return fault.seen

    def cases(self, step: int = 1, first: int = 1) -> Iterator[Case]:
        """Have each site fail, every `step`-th of them from the `first` on."""
        for number in range(first, self.count() + 1, step):
            yield self.run(number)

    def run(self, number: int) -> Case:
        """Have one site fail."""
        action, fault = self._start(number), Fault(self.kind, number)
        outcome, raised = [], None  # emptied as it is judged: an answer may hold a view
        logger.disabled = True  # a record of a warning would hold the error, and with it all that was alive
        try:
            with failing(fault):
                outcome.append(action())
        except BaseException as error:
            raised = error
        logger.disabled = False
        del action
        if fault.place is None:  # the run took another way this time
            return Case(number, "not reached", raised is not None, None if raised is None else repr(raised))
        wrong, reached = None, raised is not None
        for error in (raised, fault.error):
            if error is not None:  # its frames hold what was alive
                traceback.clear_frames(error.__traceback__)
                error.__traceback__ = None
        try:
            self._judge(fault, outcome, raised)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        return Case(number, fault.place, reached, wrong)

    def _start(self, number: int) -> Callable:
        measured = None if self.scenario is first_use else self._measured
        self.bench = Bench(self.model, self.folder / f"{number}", measured)
        return self.scenario(self.bench)

    def _right(self, ids, options: dict, got) -> None:
        """An answer must be transformers' own where all that was served is exact; its view is the caller's."""
        check_report(got.report)
        assert not any(torch.isnan(step).any() for step in got.scores), "NaN in an answer"
        if not (got.report.shifted_tokens or got.report.carried_tokens):
            same_answer(got, ask(self.model, ids, steps=2, **options))
        if options.get("return_dict_in_generate"):
            for layer in view_of(got.output).layers:
                layer.keys.fill_(float("nan"))

    def _judge(self, fault: Fault, outcomes: list, raised: BaseException | None) -> None:
        """The right answer or the fault itself; right answers from then on; nothing held, nothing left."""
        bench, outcome = self.bench, outcomes.pop() if outcomes else None
        answered = type(outcome) is tuple and len(outcome) == 3
        if raised is not None:
            no_room = self.scenario is registering and isinstance(raised, PoolExhausted)  # what was not stored
            assert fault.error in _chain(raised) or no_room, f"another error: {raised!r}"
            generates = self.scenario.__name__ not in MANAGING and self.kind != "interrupt"
            assert not generates or fault.in_forward, f"what is no fault of the model's reached the caller: {raised!r}"
        if answered:
            self._right(*outcome)
        del outcome
        gc.collect()
        assert not generation._hooked, "hooks are left on a model"
        assert fingerprint(self.model) == self._prints, "a model is left changed"
        check_pool(bench.cache)
        exact = bench.cache.using(fidelity="exact")
        for ids in (STORED, MOVED[:70], old_text(70, 1), STORED + new_text(4, 6)):
            same_as_vanilla(self.model, ids, exact, steps=2)
        check_pool(bench.cache)
        if self.folder.exists() and (bench.folder / "index.json").exists():
            loaded = SuffixCache.load(bench.folder, max_bytes=16 << 20, debug=True, fidelity="exact")
            report = same_as_vanilla(self.model, STORED, loaded, steps=2).report
            assert report.exact_tokens == len(STORED) - 1, f"the saved store lost what it had: {report}"
            check_pool(loaded)
        bench.cache.clear()
        left = check_pool(bench.cache)
        assert left.bytes_used == left.segments == 0, f"left in use: {left}"


MANAGING = {each.__name__ for each in (compaction, registering, saving, loading_a_store, settling, expiry)}
