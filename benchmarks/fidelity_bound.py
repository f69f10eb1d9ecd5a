"""
Parts `levels`, `builtin`, `bound` and `spot` of the fidelity benchmark: does the bound hold, and what does it cost?

`levels` runs every workload's prompts at every level of repair and writes what was seen to `fidelity/<model>-traces/`
in the cache folder, whatever package it was that traced them. `builtin` and `bound` read these files: the first fits
the package's built-in values, the second measures coverage on held-out prompts, by cross-validation. `spot` checks
real calls with `max_kl` on the last prompts of each workload, calibrated on the others.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks import workloads
from benchmarks.common import MODELS, Results, package_version, wilson
from benchmarks.fidelity_cells import Cell, Stores
from benchmarks.fidelity_headline import journal
from benchmarks.fidelity_runs import References, served
from benchmarks.scores import spearman
from benchmarks.sources import cache_home
from hf_suffix_cache.bound import calibration, conformal
from hf_suffix_cache.bound.calibration import Calibration
from hf_suffix_cache.bound.features import LEVEL_NAMES, LevelTrace

BOUNDS = (0.005, 0.02, 0.1)
ALPHA = 0.1
FOLDS = 5
TARGETS = {"all": 0.87, "one": 0.80, "rows": 1.5, "spearman": 0.5}
SPOT = 10  # prompts of each workload that real calls are checked on


@dataclass(frozen=True)
class Traced:
    """One prompt at every level: its place in the workload, its length, and the traces."""

    workload: str
    number: int
    prompt: int
    trace: list[LevelTrace]


def traces_path(options, workload: str) -> Path:
    """The file of one workload's traces: one each, so that several processes can trace at once."""
    return cache_home() / "fidelity" / f"{options.model}-traces" / f"{workload}.json"


def names(options) -> list[str]:
    """The workloads that were asked for, all by default."""
    return options.workload.split(",") if options.workload else list(workloads.WORKLOADS)


def levels(model, tokenizer, options, results: Results) -> None:
    """Trace the workloads; prompts of one workload are independent of one another (one of each group)."""
    from hf_suffix_cache.tracing import trace

    done = journal(options)
    for name in names(options):
        found = []
        cases = workloads.cases(name, tokenizer, options.n, options.seed, share=1)
        for number, case in enumerate(tqdm(cases, desc=f"levels, {name}")):

            def run(case=case) -> dict:
                handle = Stores(model, tokenizer, case).handle(Cell("levels"))
                taken = trace(handle, model, list(case.measured))
                return {"trace": None if taken is None else [asdict(step) for step in taken]}

            taken = done.record(["levels", case.measured, case.stored], run)["trace"]
            if taken is not None:
                found.append({"number": number, "prompt": len(case.measured), "trace": taken})
        path = traces_path(options, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"package": package_version(), "n": len(cases), "traces": found}))
        partial.replace(path)
        write_levels(name, traced(options, [name]), results)


def write_levels(name: str, found: list[Traced], results: Results) -> None:
    """Mean KL and rows of every fixed level."""
    for place, level in enumerate(LEVEL_NAMES):
        kls = [item.trace[place].kl for item in found]
        rows = [direct_rows(item, level) / item.prompt for item in found]
        case, ends = f"{name}: level {level}", np.percentile(kls, [5, 95])
        results.add(case, "KL first token, mean", np.mean(kls), "nats", len(kls), *ends, "5th and 95th percentile")
        results.add(case, "rows run / prompt tokens", np.mean(rows), "share", len(rows), note="if gone to at once")


def traced(options, chosen: list[str]) -> list[Traced]:
    """What `levels` wrote of the chosen workloads."""
    absent = [name for name in chosen if not traces_path(options, name).exists()]
    if absent:
        raise RuntimeError(f"there are no traces of {absent}: run --part levels --workload {','.join(absent)}.")
    kept = {name: json.loads(traces_path(options, name).read_text()) for name in chosen}
    return [
        Traced(name, item["number"], item["prompt"], [LevelTrace(**step) for step in item["trace"]])
        for name in chosen
        for item in kept[name]["traces"]
    ]


# -- rows of a walk ------------------------------------------------------------------------------------------------


def walk_rows(item: Traced, visited: tuple[str, ...]) -> float:
    """Rows that the levels in `visited` run, one after the other, and the probe before them."""
    return probe_rows(item) + sum(pass_rows(item, LEVEL_NAMES.index(level)) for level in visited)


def direct_rows(item: Traced, level: str) -> float:
    """Rows of a fixed level without the levels before it; a full prefill needs no probe."""
    place = LEVEL_NAMES.index(level)
    if place == len(item.trace) - 1:
        return probe_rows(item) + moved(item)  # the probe runs all new rows
    return probe_rows(item) + pass_rows(item, place)


def pass_rows(item: Traced, place: int) -> float:
    """Rows of one level's own pass. A level that repairs no more than the one before it was not run for the trace."""
    if place == 0:
        return item.trace[0].rows - probe_rows(item)
    return (item.trace[place].rows - item.trace[place - 1].rows) or pass_rows(item, place - 1)


def probe_rows(item: Traced) -> float:
    """Rows of the probe: what the first level ran beside its seam rows and the new rows behind the first of them."""
    trace = item.trace
    twice = trace[-1].rows - trace[-2].rows - moved(item)  # new rows that the last level ran with all moved ones
    return trace[0].rows - share(trace[0]) * moved(item) - twice


def share(step: LevelTrace) -> float:
    """Share of the moved rows that is repaired."""
    return step.features["share"]


def moved(item: Traced) -> float:
    """Moved rows of the prompt, repaired or not."""
    first = item.trace[0]
    return first.features["shifted"] * item.prompt / max(1.0 - share(first), 1e-9)


# -- coverage ------------------------------------------------------------------------------------------------------


def folds(found: list[Traced], seed: int) -> Iterator[tuple[list[Traced], list[Traced]]]:
    """Fitting and held-out prompts; every workload is spread evenly over the folds."""
    place = np.zeros(len(found), dtype=int)
    rng = np.random.default_rng(seed)
    for name in dict.fromkeys(item.workload for item in found):
        mine = np.array([at for at, item in enumerate(found) if item.workload == name])
        place[rng.permutation(mine)] = np.arange(len(mine)) % FOLDS
    for fold in range(FOLDS):
        yield (
            [item for item, at in zip(found, place, strict=True) if at != fold],
            [item for item, at in zip(found, place, strict=True) if at == fold],
        )


def fit(found: list[Traced], origin: str = "prompts", fingerprint: str = "", seed: int = 0) -> Calibration:
    """A calibration with the workloads as its labels."""
    return Calibration.fit(
        [item.trace for item in found],
        [item.workload for item in found],
        alpha=ALPHA,
        fingerprint=fingerprint,
        origin=origin,
        seed=seed,
    )


def builtin(model, tokenizer, options, results: Results) -> None:
    """Fit the package's built-in values on all traces and write them where the package looks for them."""
    found = traced(options, names(options))
    made = fit(found, "builtin", f"{MODELS[options.model]}, eight workloads of the benchmark")
    path = Path(options.output) / "builtin.json" if options.output else calibration.BUILTIN
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(path)
    print(f"wrote {path.name}: {made.describe()}")


def bound(model, tokenizer, options, results: Results) -> None:
    """Coverage and rows of the rule on held-out prompts, labelled and pooled, and how well KL is predicted."""
    found = traced(options, names(options))
    fitted = [(fit(rest, seed=options.seed), held) for rest, held in folds(found, options.seed)]
    for value in BOUNDS:
        for labelled in (True, False):
            ends = [
                (item, ended(made, item, value, label))
                for made, held in fitted
                for item in held
                for label in [item.workload if labelled else None]
            ]
            write_coverage(ends, value, "labelled" if labelled else "pooled", results)
    write_ranks(fitted, results)


def ended(made: Calibration, item: Traced, value: float, label: str | None) -> conformal.Walk:
    """Where a call with this calibration ends. Where nothing but full can pass, the engine tries nothing else."""
    if made.always_full(value, label):
        return conformal.Walk(item.trace[-1], (LEVEL_NAMES[-1],))
    return conformal.walk(made.predictor, item.trace, value, made.margin(value, label))


def write_coverage(ends: list[tuple], value: float, how: str, results: Results) -> None:
    """Share of prompts under the bound, by workload and in all, and their rows against the cheapest fixed level."""
    groups = list(dict.fromkeys(item.workload for item, _ in ends))
    for name in ["all", *groups]:
        chosen = [(item, end) for item, end in ends if name in ("all", item.workload)]
        n, held = len(chosen), sum(end.accepted.kl <= value for _, end in chosen)
        case = f"{name}: max_kl {value:g}, {how}"
        target = f"target >= {TARGETS['all' if name == 'all' else 'one']}; " if how == "labelled" else ""
        note = f"{target}alpha {ALPHA:g}, {FOLDS}-fold, 95 % Wilson"
        results.add(case, "share under the bound", held / n, "share", n, *wilson(held, n), note)
        rows = np.mean([walk_rows(item, end.visited) / item.prompt for item, end in chosen])
        results.add(case, "rows run / prompt tokens", rows, "share", n, note="all levels that were run")
        full = np.mean([end.accepted.level == LEVEL_NAMES[-1] for _, end in chosen])
        results.add(case, "ended in a full prefill", full, "share", n)
        level, fixed = cheapest([item for item, _ in chosen], value, held / n)
        target = f"target <= {TARGETS['rows']}; " if how == "labelled" and name != "all" else ""
        note = f"{target}fixed level {level}, the cheapest that covers as many"
        results.add(case, "rows run / cheapest fixed level", rows / fixed, "ratio", n, note=note)


def cheapest(found: list[Traced], value: float, coverage: float) -> tuple[str, float]:
    """The cheapest fixed level that covers as many prompts, chosen in hindsight, and its mean share of rows."""
    candidates = []
    for place, level in enumerate(LEVEL_NAMES):
        if np.mean([item.trace[place].kl <= value for item in found]) >= min(coverage, 1 - ALPHA):
            candidates.append((np.mean([direct_rows(item, level) / item.prompt for item in found]), level))
    rows, level = min(candidates)
    return level, float(rows)


def write_ranks(fitted: list[tuple], results: Results) -> None:
    """Rank correlation of predicted and true KL of held-out prompts, within a workload, at fixed levels."""
    for place, level in enumerate(LEVEL_NAMES[:-1]):
        by_workload: dict[str, list] = {}
        for made, held in fitted:
            for item in held:
                step = item.trace[place]
                by_workload.setdefault(item.workload, []).append((made.expected_kl(step.features), step.kl))
        found = {name: spearman(*zip(*pairs, strict=True)) for name, pairs in by_workload.items()}
        for name, value in found.items():
            n = len(by_workload[name])
            results.add(f"{name}: level {level}", "Spearman, predicted and true KL", value, "", n, note="held out")
        known = [value for value in found.values() if not math.isnan(value)]
        note = f"target >= {TARGETS['spearman']}; median, smallest and largest of the workloads"
        case, n = f"all: level {level}", sum(map(len, by_workload.values()))
        results.add(case, "Spearman, median of workloads", np.median(known), "", n, min(known), max(known), note)


# -- real calls ----------------------------------------------------------------------------------------------------


def spot(model, tokenizer, options, results: Results) -> None:
    """Real calls with `max_kl` on the last prompts of each workload, calibrated on the traces of the others."""
    done, references = journal(options), References(model, options.model, options.forced)
    found = traced(options, names(options))
    held = {name: [item for item in found if item.workload == name][-SPOT:] for name in names(options)}
    made = fit([item for item in found if item not in held[item.workload]], seed=options.seed)
    for name, items in held.items():
        cases = workloads.cases(name, tokenizer, items[-1].number + 1, options.seed, share=1)
        taken: dict[float, list[dict]] = {value: [] for value in BOUNDS}
        for item in tqdm(items, desc=f"spot check, {name}"):
            case = cases[item.number]
            stores = Stores(model, tokenizer, case)
            for value in BOUNDS:

                def run(case=case, stores=stores, value=value, name=name) -> dict:
                    handle = stores.handle(Cell("bound", settings={"max_kl": value, "workload": name}))
                    handle.calibration = made
                    full = references.get(case.measured)
                    out = served(model, case.measured, handle, full.ids)
                    parts = {"level": out.report.level, "rows": out.report.computed_rows / len(case.measured)}
                    return out.against(full) | parts

                key = ["spot", case.measured, case.stored, value, made.describe(), options.forced]
                taken[value].append(done.record(key, run))
        for value, outcomes in taken.items():
            n, under = len(outcomes), sum(outcome["first"] <= value for outcome in outcomes)
            case, note = (
                f"{name}: max_kl {value:g}, real calls",
                f"95 % Wilson; calibrated on {made.num_prompts} others",
            )
            results.add(case, "share under the bound", under / n, "share", n, *wilson(under, n), note)
            rows = np.mean([outcome["rows"] for outcome in outcomes])
            results.add(case, "rows run / prompt tokens", rows, "share", n)
