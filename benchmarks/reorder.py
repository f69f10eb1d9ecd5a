"""
Six passages of about 200 tokens that an earlier live request left behind, asked about again in another order, behind
another system line, with another question (fp32). SmolLM2-135M-Instruct gets them under its chat template;
`--model gemma` is gemma-3-270m, a base model with sliding layers, which gets plain text (and comes under the Gemma
Terms of Use: scripts/gemma.py). The targets are those of SmolLM2.

`--accuracy`: KL(full prefill || reuse) of the first answer token and its mean over 10 forced tokens, and the share of
the prompt's rows that ran, all passes counted; for `balanced`, `fast`, and three that must be worse: `no drift`
(`balanced` without drift correction), `no repair`, and `no rotation` (a test double: this benchmark alone switches the
rotation of keys off). The machine may be busy.
`--timing`: time to first token against a full prefill of the same prompt, alternating; and of a prompt of 1,500 tokens
that is stored as a whole. Run it alone on the machine.

    python -m benchmarks.reorder                       # both, about 25 minutes on 2 cores
    python -m benchmarks.reorder --model gemma         # the same for gemma-3-270m, about 20 minutes
    python -m benchmarks.reorder --no-timing --n 4 --output .cache/look
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import data
from benchmarks.calls import Answer, ask, kl_divergence
from benchmarks.common import MODELS, Options, Paired, Results, alternate, bootstrap_mean, load_model, parse
from hf_suffix_cache import SuffixCache

VARIANTS = {
    "balanced": {"fidelity": "balanced"},
    "fast": {"fidelity": "fast"},
    "no drift": {"fidelity": "balanced", "drift": False},
    "no repair": {"fidelity": "fast", "repair_fraction": 0.0, "seam_tokens": 0},
    "no rotation": {"fidelity": "balanced"},
}
KL_TARGET = {"balanced": 0.018, "fast": 0.045}
ROWS_TARGET = {"balanced": 0.25, "fast": 0.15}
TIME_TARGET = {"balanced": 0.33, "fast": 0.20}
HIT_TOKENS, HIT_TARGET = 1500, 0.05
STORED_TOKENS = 4  # what the earlier request generates: enough to be a live one


@dataclass
class ReorderOptions(Options):
    """
    `model`: "smollm2" or "gemma"; `data`: "wiki" or "squad"; `variants`: which of them, by comma; `forced`: tokens of
    the continuation's mean.
    """

    model: str = "smollm2"
    data: str = "wiki"
    variants: str = ",".join(VARIANTS)
    forced: int = 10
    accuracy: bool = True
    timing: bool = True


def main() -> None:
    options = parse(ReorderOptions, __doc__)
    variants = options.variants.split(",")
    unknown = sorted(set(variants) - set(VARIANTS))
    if unknown:
        raise ValueError(f"unknown variant(s) {unknown}; there are {list(VARIANTS)}.")
    model, tokenizer = load_model(options.model, options.threads)
    cases = data.reorder_cases(tokenizer, options.data, options.n, options.seed)
    lengths = [len(case.measured) for case in cases]
    print(f"{len(cases)} prompts of {min(lengths)} to {max(lengths)} tokens from {options.data}")
    results = Results("reorder", MODELS[options.model], "float32", options)
    if options.accuracy:
        measure_accuracy(model, cases, variants, options, results)
    if options.timing:
        for fidelity in TIME_TARGET:
            if fidelity in variants:
                measure_time(model, cases, fidelity, options, results)
        measure_exact_hit(model, tokenizer, options, results)


# -- accuracy ------------------------------------------------------------------------------------------------------


def measure_accuracy(model, cases, variants: list[str], options: ReorderOptions, results: Results) -> None:
    """Write what each variant's answers lose against a full prefill, and how many rows it ran for them."""
    tokens = options.forced + 1
    taken: dict[str, list[dict]] = {variant: [] for variant in variants}
    for case in tqdm(cases, desc="accuracy"):
        full = ask(model, case.measured, tokens, logits=True)
        cache = SuffixCache()
        ask(model, case.stored, STORED_TOKENS, cache=cache)
        for variant in variants:
            taken[variant].append(measure_variant(model, cache, case, variant, full))
    for variant in variants:
        write_variant(variant, taken[variant], options, results)


def measure_variant(model, cache: SuffixCache, case: data.ReorderCase, variant: str, full: Answer) -> dict:
    """One prompt under one variant, nothing stored: divergences, shares of rows by kind, same first token."""
    handle = cache.using(store=False, **VARIANTS[variant])
    with without_rotation() if variant == "no rotation" else contextlib.nullcontext():
        reused = ask(model, case.measured, len(full.ids), cache=handle, logits=True, forced=full.ids)
    report = handle.last_report
    if report.reason is not None or report.shifted_tokens == 0:
        raise RuntimeError(f"{variant}: nothing was moved, so this would measure nothing: {report}")
    divergence = kl_divergence(full.logits, reused.logits)
    prompt = report.prompt_tokens
    return {
        "first": float(divergence[0]),
        "forced": float(divergence[1:].mean()) if len(divergence) > 1 else 0.0,
        "same": float(full.logits[0].argmax() == reused.logits[0].argmax()),
        "rows": report.computed_rows / prompt,
        "shifted": report.shifted_tokens / prompt,
        "repaired": report.repaired_tokens / prompt,
    }


def write_variant(variant: str, taken: list[dict], options: ReorderOptions, results: Results) -> None:
    """Means over the prompts, with 95 % bootstrap intervals."""

    def add(name: str, metric: str, unit: str, note: str = "") -> None:
        values = [item[name] for item in taken]
        results.add(variant, metric, np.mean(values), unit, len(values), *bootstrap_mean(values), note)

    source = f"data={options.data} seed={options.seed}"
    target = _target(KL_TARGET, variant, options)
    add("first", "KL first token, mean", "nats", target + source)
    largest = max(item["first"] for item in taken)
    results.add(variant, "KL first token, largest", largest, "nats", len(taken), note=source)
    add("forced", f"KL over {options.forced} forced tokens, mean", "nats", source)
    add("same", "same first token", "share", source)
    target = _target(ROWS_TARGET, variant, options)
    add("rows", "rows run / prompt tokens", "share", f"{target}all passes; {source}")
    add("shifted", "tokens served moved", "share", source)
    add("repaired", "tokens repaired", "share", source)


def _target(targets: dict[str, float], case: str, options: ReorderOptions) -> str:
    """What a row's note says of its target; there are none but for SmolLM2."""
    return f"target <= {targets[case]}; " if options.model == "smollm2" and case in targets else ""


@contextlib.contextmanager
def without_rotation() -> Iterator[None]:
    """
    Test double: within the block moved keys keep the rotation of their old position. Everything else is the product's;
    what a model can do has been measured before, in the earlier request.
    """
    from hf_suffix_cache import rope

    real = rope.rotation

    def identity(shift, frequencies: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return real(torch.zeros_like(torch.as_tensor(shift)), frequencies, dtype)

    holders = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("hf_suffix_cache") and getattr(module, "rotation", None) is real
    ]
    for module in holders:
        module.rotation = identity
    try:
        yield
    finally:
        for module in holders:
            module.rotation = real


# -- time ----------------------------------------------------------------------------------------------------------


def measure_time(model, cases, fidelity: str, options: ReorderOptions, results: Results) -> None:
    """Write the time to first token against a full prefill of the same prompt; one cache, emptied for each prompt."""
    cache = SuffixCache(fidelity=fidelity)

    def full(index: int) -> float:
        return ask(model, cases[index].measured, 1).first

    def reuse(index: int) -> float:
        cache.clear()
        ask(model, cases[index].stored, STORED_TOKENS, cache=cache)
        return ask(model, cases[index].measured, 1, cache=cache).first

    full(0), reuse(0)  # first use measures the model and takes the pool's first slab
    paired = alternate(reuse, full, tqdm(range(len(cases)), desc=f"time, {fidelity}"))
    write_times(fidelity, paired, _target(TIME_TARGET, fidelity, options), results)


def measure_exact_hit(model, tokenizer, options: ReorderOptions, results: Results) -> None:
    """Write the time to first token of a prompt of 1,500 tokens that the store holds as a whole."""
    case = data.reorder_cases(tokenizer, options.data, 1, options.seed + 1, passages=9)[0]
    excess = len(case.measured) - HIT_TOKENS
    if excess < 0:
        raise RuntimeError(f"nine passages gave only {len(case.measured)} tokens, {HIT_TOKENS} are needed.")
    prompt = case.measured[:100] + case.measured[100 + excess :]
    cache = SuffixCache()
    full = lambda _: ask(model, prompt, 1).first  # noqa: E731
    hit = lambda _: ask(model, prompt, 1, cache=cache).first  # noqa: E731
    hit(0), full(0), hit(0)
    if cache.last_report.computed_rows != 1:
        raise RuntimeError(f"a full hit should run one row: {cache.last_report}")
    paired = alternate(hit, full, tqdm(range(min(options.n, 10)), desc="time, exact hit"))
    case = f"exact hit, {HIT_TOKENS} tokens"
    write_times(case, paired, _target({case: HIT_TARGET}, case, options), results)


def write_times(case: str, paired: Paired, target: str, results: Results) -> None:
    """Medians of both ways, and their ratio with its 95 % bootstrap interval."""
    n = len(paired.first)
    for way, values in (("with the cache", paired.first), ("full prefill", paired.second)):
        metric = f"time to first token, {way}"
        results.add(case, metric, np.median(values), "s", n, values.min(), values.max(), "median; smallest, largest")
    note = f"{target}ratio of medians, alternating pairs, 95 % bootstrap"
    results.add(case, "time to first token / full prefill", paired.ratio, "ratio", n, *paired.interval(), note)


if __name__ == "__main__":
    main()
