"""
Does an exact hit change what a model says? Real questions behind real text (SmolLM2-135M-Instruct, 100 to 600 tokens),
64 greedy tokens each, with `fidelity="exact"` and the front of the prompt stored by an earlier request, and without.

* fp32: the answers must be the same. One that differs counts as a flip, unless the two tokens' logits at the first
  step that differs are closer than stock's own noise: how far stock's logits of that prompt's first token move when it
  is prefilled in two forwards, split where the stored part ends.
* bf16: rounding flips tokens whatever one does. The share of answers that differ with the cache stands beside the
  share that differ between two stock runs, one of them in two forwards.
* The control serves another prompt's rows (stock's own cache, filled with the wrong text): answers must differ.

The machine may be busy. Finished prompts are kept in the cache folder, so a broken run goes on where it was.

    python -m benchmarks.flips                         # 50 prompts, about 20 minutes on 2 cores
    python -m benchmarks.flips --n 2 --output .cache/look
"""

import random
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm
from transformers import DynamicCache

from benchmarks import data, sources
from benchmarks.calls import CACHE_ARGUMENT, Answer, ask
from benchmarks.common import MODELS, Journal, Options, Results, load_model, parse, wilson
from hf_suffix_cache import SuffixCache

SHORTEST, LONGEST = 100, 600
CONTROLS = 5


@dataclass
class FlipsOptions(Options):
    """`tokens`: how many are generated; `data`: "wiki" or "squad"; `dtypes`: which of them, by comma."""

    n: int = 50
    tokens: int = 64
    model: str = "smollm2"
    data: str = "wiki"
    dtypes: str = "float32,bfloat16"


@dataclass(frozen=True)
class Case:
    """A prompt, how many of its tokens an earlier request has left, and another prompt's ids for the control."""

    ids: list[int]
    cut: int
    other: list[int]


def main() -> None:
    options = parse(FlipsOptions, __doc__)
    model, tokenizer = load_model(options.model, options.threads)
    cases = make_cases(tokenizer, options)
    lengths = [len(case.ids) for case in cases]
    print(f"{len(cases)} prompts of {min(lengths)} to {max(lengths)} tokens, {np.median(lengths):.0f} in the middle")
    for dtype in options.dtypes.split(","):
        settings = {"model": options.model, "dtype": dtype, "threads": options.threads, "tokens": options.tokens}
        journal = Journal(sources.cache_home() / "flips.jsonl", settings)
        model = model.to(getattr(torch, dtype))
        measure = float_case if dtype == "float32" else low_precision_case
        taken = [
            journal.record(
                [measure.__name__, case.ids, case.cut],
                lambda case=case, measure=measure, model=model: measure(model, case, options.tokens),
            )
            for case in tqdm(cases, desc=dtype)
        ]
        results = Results("flips", MODELS[options.model], dtype, options)
        write_cache(taken, dtype, options, results)
        write_stock(taken, dtype, options, results)
        if dtype == "float32":
            wrong = [
                journal.record(
                    ["control", case.ids, case.other],
                    lambda case=case, model=model: {"differs": control(model, case, options.tokens)},
                )["differs"]
                for case in tqdm(cases[:CONTROLS], desc="control")
            ]
            note = f"stock, with another prompt's rows; must be above 0.5; {_source(options)}"
            add_share(results, "control", f"answers that differ within {options.tokens} tokens", wrong, note)


def make_cases(tokenizer, options: FlipsOptions) -> list[Case]:
    """The prompts; the stored part of each is a tenth to nine tenths of it."""
    rng = random.Random(options.seed)
    prompts = data.question_prompts(tokenizer, options.data, options.n, SHORTEST, LONGEST, options.seed)
    others = data.question_prompts(tokenizer, options.data, options.n, LONGEST, LONGEST, options.seed + 1)
    return [
        Case(ids, int(len(ids) * rng.uniform(0.1, 0.9)), other) for ids, other in zip(prompts, others, strict=True)
    ]


# -- one prompt ----------------------------------------------------------------------------------------------------


def float_case(model, case: Case, tokens: int) -> dict:
    """fp32: the answer with the cache against the plain one, and stock's noise on this prompt."""
    plain = ask(model, case.ids, tokens, logits=True)
    chunked = in_two_forwards(model, case.ids, case.cut, 1)
    record = compare(plain, with_cache(model, case, tokens))
    record["stock difference"] = largest(chunked.logits[0] - plain.logits[0])
    return record


def low_precision_case(model, case: Case, tokens: int) -> dict:
    """bf16: the answer with the cache, and that of stock in two forwards, each against the plain one."""
    plain = ask(model, case.ids, tokens, logits=True)
    stock = compare(plain, in_two_forwards(model, case.ids, case.cut, tokens))
    record = compare(plain, with_cache(model, case, tokens))
    return record | {f"stock {name}": value for name, value in stock.items()}


def with_cache(model, case: Case, tokens: int) -> Answer:
    """The answer with `fidelity="exact"` after an earlier request has left the first `cut` tokens."""
    cache = SuffixCache(fidelity="exact")
    ask(model, case.ids[: case.cut], 1, cache=cache)
    answer = ask(model, case.ids, tokens, cache=cache, logits=True)
    report = cache.last_report
    if report.exact_tokens < case.cut or report.reason is not None:
        raise RuntimeError(f"{case.cut} tokens should be reused, or this would measure nothing: {report}")
    return answer


def in_two_forwards(model, ids: list[int], cut: int, tokens: int, filled_with: list[int] | None = None) -> Answer:
    """Stock transformers, with a prefill in two: the first `cut` tokens, then the rest."""
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([(filled_with or ids)[:cut]]), **{CACHE_ARGUMENT: past})
    return ask(model, ids, tokens, cache=past, logits=True)


def control(model, case: Case, tokens: int) -> bool:
    """Whether the answer differs when the rows of nine tenths of the prompt are those of another one."""
    cut = min(len(case.ids) * 9 // 10, len(case.other))
    wrong = in_two_forwards(model, case.ids, cut, tokens, filled_with=case.other)
    return wrong.ids != ask(model, case.ids, tokens).ids


def compare(plain: Answer, other: Answer) -> dict:
    """
    How two answers to one prompt differ: `same` tokens before the first one that differs, the `gap` of plain's logits
    between the two tokens there (`None` where all are equal), and the `difference` of the first token's logits.
    """
    pairs = zip(plain.ids, other.ids, strict=True)
    step = next((step for step, (left, right) in enumerate(pairs) if left != right), None)
    gap = None
    if step is not None:
        gap = float(plain.logits[step][plain.ids[step]] - plain.logits[step][other.ids[step]])
    same = len(plain.ids) if step is None else step
    return {"same": same, "gap": gap, "difference": largest(other.logits[0] - plain.logits[0])}


def largest(difference: torch.Tensor) -> float:
    """The largest absolute value."""
    return difference.abs().max().item()


# -- rows of the CSV -----------------------------------------------------------------------------------------------


def write_cache(taken: list[dict], dtype: str, options: FlipsOptions, results: Results) -> None:
    """Shares of answers that differ with the cache, and of flips; the first token's difference."""
    source, differ = _source(options), [item["gap"] is not None for item in taken]
    add_share(results, "cache", f"answers that differ within {options.tokens} tokens", differ, source)
    if dtype == "float32":
        flips = [item["gap"] is not None and item["gap"] >= item["stock difference"] for item in taken]
        note = f"target 0; the gap of the two logits is not below stock's noise; {source}"
        add_share(results, "cache", f"flips within {options.tokens} tokens", flips, note)
    add_difference(results, "cache", [item["difference"] for item in taken], source)


def write_stock(taken: list[dict], dtype: str, options: FlipsOptions, results: Results) -> None:
    """The same of stock in two forwards."""
    case, source = "stock in two forwards", _source(options)
    if dtype != "float32":
        differ = [item["stock gap"] is not None for item in taken]
        add_share(results, case, f"answers that differ within {options.tokens} tokens", differ, source)
    add_difference(results, case, [item["stock difference"] for item in taken], source)


def add_share(results: Results, case: str, metric: str, happened: list[bool], note: str) -> None:
    """The share of prompts on which something happened, with its 95 % interval."""
    count, n = sum(happened), len(happened)
    results.add(case, metric, count / n, "share", n, *wilson(count, n), note)


def add_difference(results: Results, case: str, values: list[float], source: str) -> None:
    """The largest difference of the first token's logits over all prompts."""
    low, high, note = min(values), max(values), f"smallest, largest; {source}"
    results.add(case, "max abs logit difference, first token", high, "logit", len(values), low, high, note)


def _source(options: FlipsOptions) -> str:
    return f"data={options.data} seed={options.seed}"


if __name__ == "__main__":
    main()
