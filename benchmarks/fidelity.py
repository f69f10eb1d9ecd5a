"""
How close answers with reused rows are to full prefill, at what cost, and whether the bound on it holds.

Parts, by name (`--part`, several by comma):

* `references`: full prefill of the prompts, computed once and kept; every other part does this for itself.
* `headline`: the default against CacheBlend's and EPIC's policy, by source of the rows, on `passages`.
* `f1`: answers of the default against those of full prefill, on `passages`.
* `levels`: all workloads at every level of repair. `builtin` fits the package's built-in calibration on that, `bound`
  measures coverage and cost of `max_kl` on held-out prompts, `spot` checks real calls.
* `factors`: policies, sources and settings, one at a time, on `passages`.
* `extras`: what `settle` and `heal_rows` cost and give.

    python -m benchmarks.fidelity --part headline --n 100
    python -m benchmarks.fidelity --part headline --model gemma --n 100
    python -m benchmarks.fidelity --part headline --n 4 --output .cache/look

A broken or repeated run goes on where it was: what it has finished lies in `fidelity/` of the cache folder. Full
prefill is kept by prompt and model, everything else by the package's source as well.
"""

from dataclasses import dataclass

from tqdm import tqdm

from benchmarks import workloads
from benchmarks.common import MODELS, Options, Results, load_model, parse
from benchmarks.fidelity_bound import bound, builtin, levels, spot
from benchmarks.fidelity_extras import extras
from benchmarks.fidelity_factors import factors
from benchmarks.fidelity_headline import answers, headline
from benchmarks.fidelity_runs import References


@dataclass
class FidelityOptions(Options):
    """
    `part`: what to measure, by comma; `model`: "smollm2" or "gemma"; `workload`: which of them, by comma, empty for
    those that the part is about; `forced`: tokens of each continuation.
    """

    n: int = 100
    part: str = "headline"
    model: str = "smollm2"
    workload: str = ""
    forced: int = 32


def main() -> None:
    options = parse(FidelityOptions, __doc__)
    parts = options.part.split(",")
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise ValueError(f"unknown part(s) {unknown}; there are {list(PARTS)}.")
    model, tokenizer = load_model(options.model, options.threads)
    results = Results("fidelity", MODELS[options.model], "float32", options)
    for part in parts:
        PARTS[part](model, tokenizer, options, results)


def references(model, tokenizer, options: FidelityOptions, results: Results) -> None:
    """Compute full prefill of the chosen workloads' prompts ahead of time."""
    store = References(model, options.model, options.forced)
    for name in (options.workload or "passages").split(","):
        for case in tqdm(workloads.cases(name, tokenizer, options.n, options.seed), desc=f"full prefill, {name}"):
            store.get(case.measured)


PARTS = {
    "references": references,
    "headline": headline,
    "f1": answers,
    "levels": levels,
    "builtin": builtin,
    "bound": bound,
    "spot": spot,
    "factors": factors,
    "extras": extras,
}

if __name__ == "__main__":
    main()
