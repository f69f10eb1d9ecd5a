"""Cells of the fidelity benchmark: a repair policy, the source of the rows it repairs, and the settings beside it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.calls import ask
from benchmarks.fidelity_runs import Measured, References, served
from benchmarks.workloads import Case
from hf_suffix_cache import SuffixCache

STORED_TOKENS = 4  # what an earlier live request generates: enough to be one
DEFAULT, CACHEBLEND, EPIC = "default, live", "CacheBlend published", "EPIC published"


@dataclass(frozen=True)
class Cell:
    """
    One way of serving a prompt.

    Args:
        name (`str`): Case of its rows in the CSV.
        source (`str`): Where rows come from, a key of `SOURCES`.
        policy (callable, *optional*): Makes the repair policy; `None` is the package's default.
        settings (`dict`): Other settings of the handle.
        moves (`bool`): Whether a prompt must have moved rows, or else the cell would measure nothing.
        most (`int`): Prompts that it is measured on: what is only rounding needs few.
    """

    name: str
    source: str = "live"
    policy: Callable[[], object] | None = None
    settings: dict = field(default_factory=dict)
    moves: bool = True
    most: int = 10**6

    @property
    def policy_key(self) -> str:
        """What the policy is, in words that are the same in the next run."""
        policy = None if self.policy is None else self.policy()
        return "" if policy is None else f"{type(policy).__name__} {sorted(vars(policy).items())}"


def cacheblend(**options):
    """CacheBlend's policy: rows whose layer-1 keys deviate most, fewer and fewer from layer to layer."""
    from hf_suffix_cache.repair import Deviation

    return Deviation(**options)


def epic(rows: int = 16):
    """EPIC's LegoLink: the first rows of each moved run."""
    from hf_suffix_cache.repair import FirstRows

    return FirstRows(rows=rows)


def no_repair():
    from hf_suffix_cache.repair import NoRepair

    return NoRepair()


# the published methods know neither seam rows nor drift; the tail stays, since a question is new text anyway
PUBLISHED = {"seam_tokens": 0, "drift": False}
LESS, MORE = "default at 10 %, live", "default at 18 %, live"  # about the rows of EPIC's and of CacheBlend's setting
HEADLINE = (
    Cell(DEFAULT),
    Cell(LESS, settings={"repair_fraction": 0.10}),
    Cell(MORE, settings={"repair_fraction": 0.18}),
    Cell("default without drift, live", settings={"drift": False}),
    Cell(CACHEBLEND, "alone", cacheblend, PUBLISHED),
    Cell(EPIC, "alone", epic, PUBLISHED),
    Cell("CacheBlend, live", "live", cacheblend, PUBLISHED),
    Cell("EPIC, live", "live", epic, PUBLISHED),
    Cell("default, run alone", "alone"),
    Cell("no repair, live", "live", no_repair, PUBLISHED),
    Cell("no repair, run alone", "alone", no_repair, PUBLISHED),
    Cell("exact prefix only", "live", None, {"fidelity": "exact"}, moves=False, most=20),
)


# -- sources -------------------------------------------------------------------------------------------------------


def live(cache, model, tokenizer, case: Case) -> None:
    """Rows of the earlier requests."""
    for ids in case.stored:
        ask(model, list(ids), STORED_TOKENS, cache=cache)


def alone(cache, model, tokenizer, case: Case) -> None:
    """Rows of each piece run by itself at position 0."""
    for piece in case.alone:
        cache.register(model, list(piece), at="front")


def sink(cache, model, tokenizer, case: Case) -> None:
    """Rows of each piece run behind a sink prefix."""
    for piece in case.alone:
        cache.register(model, list(piece), tokenizer, at="anywhere")


def sliced(length: int) -> Callable:
    """A source of runs of `length` tokens: the text of the pieces cut up and put together in another order."""

    def store(cache, model, tokenizer, case: Case) -> None:
        slices = [piece[at : at + length] for piece in case.alone for at in range(0, len(piece), length)]
        random.Random(length).shuffle(slices)
        start = case.stored[0][:24]
        ask(model, [*start, *(token for piece in slices for token in piece)], 1, cache=cache)

    return store


SOURCES: dict[str, Callable] = {"live": live, "alone": alone, "sink": sink}
SOURCES |= {f"slices of {length}": sliced(length) for length in (8, 12, 16, 24, 32, 48, 64)}


class Stores:
    """
    The caches that the cases of one group are served from, one for each source, filled when first asked for.

    Args:
        settings (`dict`): Settings of the store itself, for all of them.
    """

    def __init__(self, model, tokenizer, case: Case, **settings):
        self.model, self.tokenizer, self.case, self.settings = model, tokenizer, case, settings
        self.caches: dict[str, SuffixCache] = {}

    def handle(self, cell: Cell):
        """A handle of `cell`'s settings on its source's store, which stays as it is."""
        if cell.source not in self.caches:
            cache = SuffixCache(**self.settings)
            SOURCES[cell.source](cache, self.model, self.tokenizer, self.case)
            self.caches[cell.source] = cache
        policy = {} if cell.policy is None else {"repair": cell.policy()}
        return self.caches[cell.source].using(store=False, **policy, **cell.settings)


def measure(stores: Stores, case: Case, cell: Cell, references: References) -> dict:
    """Divergences from full prefill, rows run and times of one prompt in one cell."""
    full = references.get(case.measured)
    taken = served(stores.model, case.measured, stores.handle(cell), full.ids)
    report = taken.report
    if cell.moves and report.shifted_tokens + report.repaired_tokens == 0:
        raise RuntimeError(f"{cell.name}: nothing was moved, so this would measure nothing: {report}")
    return taken.against(full) | costs(taken, len(case.measured)) | {"full_seconds": full.seconds}


def costs(taken: Measured, prompt: int) -> dict:
    """Rows run as shares of the prompt, and seconds to the first token."""
    report = taken.report
    return {
        "rows": report.computed_rows / prompt,
        "weighted": (getattr(report, "equivalent_rows", 0) or report.computed_rows) / prompt,
        "shifted": report.shifted_tokens / prompt,
        "repaired": report.repaired_tokens / prompt,
        "exact": report.exact_tokens / prompt,
        "seconds": taken.seconds,
        "reason": report.reason or "",
    }
