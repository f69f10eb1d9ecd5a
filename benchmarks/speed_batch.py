"""
How the prompts of a batch should run that are served differently (SmolLM2-135M-Instruct, fp32): every prompt eight of
16 passages of 120 tokens in an order that never came before. Rows go into `speed.csv`. Run it alone on the machine.

* Whole calls to the first token: `groups` (prompts with other plans run apart: the package), `together` (every row
  runs the columns that any prompt needs: what one forward with one set of columns can do), `one by one`.
* One repair pass over the same rows, without the package: `groups`, `slots` (`[batch, most rows]` with a column of its
  own for each query and an explicit 4-D mask; shorter prompts repeat their last row), `together`.
* What a forward costs beside its rows, in rows: `hf_suffix_cache/grouping.py` decides by it.

    python -m benchmarks.speed_batch                       # about 6 minutes on 2 cores
    python -m benchmarks.speed_batch --n 2 --sizes 4 --output .cache/look

First looks (one thread of a machine at other work, 2 and 3 rounds, not in the CSV): slots take 0.93 to 0.95 of what
groups take, all prompts together 1.8 (4 prompts) and 2.4 (8) of it. Groups are what the package does still: they
need no write per query, no 4-D masks (which not all models take, and which would have to be made for each kind of
layer) and no filled-up rows, and each prompt gets a policy, a level and a filter of its own.
"""

from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from tqdm import tqdm
from transformers.cache_utils import Cache, DynamicCache

from benchmarks.calls import CACHE_ARGUMENT, ask
from benchmarks.common import MODELS, Options, Results, load_model, parse, seconds
from benchmarks.speed_runs import add_median, add_ratio, ask_batch, rounds
from benchmarks.speed_workloads import Texts
from hf_suffix_cache import SuffixCache, passes

PASSAGES, TOKENS, CHOSEN, QUESTION_TOKENS = 16, 120, 8, 48


@dataclass
class BatchOptions(Options):
    """`sizes` of the batches, by comma."""

    n: int = 7
    sizes: str = "4,8"


class Rows(Cache):
    """Filled keys and values, `[batch, kv_heads, columns, head_dim]`, into which a pass writes some columns."""

    def __init__(self, filled: DynamicCache):
        super().__init__(layers=[])
        self.filled = [(layer.keys, layer.values) for layer in filled.layers]
        self.rows, self.columns = slice(None), torch.empty(0)

    def update(self, keys, values, layer_idx, *args, **kwargs):
        """Write where `columns` say: `[queries]` for all batch rows, or `[batch, queries]`."""
        found = []
        for buffer, states in zip(self.filled[layer_idx], (keys, values), strict=True):
            part = buffer[self.rows]
            if self.columns.dim() == 1:
                part.index_copy_(2, self.columns, states)
            else:
                part[torch.arange(len(part))[:, None], :, self.columns] = states.transpose(1, 2)
            found.append(part)
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def run(model, rows: Rows, ids: torch.Tensor, part: slice, columns: torch.Tensor) -> torch.Tensor:
    """One forward of some columns (`[queries]` or `[batch, queries]`) of some batch rows; the last column's logits."""
    rows.rows, rows.columns = part, columns
    ids = ids[part]
    each = columns.expand(len(ids), -1)
    mask = torch.arange(ids.shape[1]) <= each[:, None, :, None]
    with torch.no_grad():
        output = model(
            ids.gather(1, each), position_ids=each, attention_mask=mask, logits_to_keep=1, **{CACHE_ARGUMENT: rows}
        )
    return output.logits[:, -1]


def one_pass(model, prompts: list[list[int]], sets: list[np.ndarray]) -> dict:
    """The ways to run these columns of each prompt (all of one length) over rows that are there: name -> callable."""
    ids = torch.tensor(prompts)
    filled = DynamicCache()
    with torch.no_grad():
        model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: filled})
    rows = Rows(filled)
    most = max(map(len, sets))
    slots = torch.from_numpy(np.stack([np.pad(columns, (0, most - len(columns)), mode="edge") for columns in sets]))
    union = torch.from_numpy(np.unique(np.concatenate(sets)))

    def groups():
        parts = [slice(number, number + 1) for number in range(len(sets))]
        return torch.cat([run(model, rows, ids, part, torch.from_numpy(sets[part.start])) for part in parts])

    return {
        "groups": groups,
        "slots": lambda: run(model, rows, ids, slice(None), slots),
        "together": lambda: run(model, rows, ids, slice(None), union),
    }


def forward_rows(model, results: Results, n: int) -> None:
    """Write a forward's own cost: where the line through the seconds of few and many rows meets no rows."""
    prompt = torch.arange(1000, 2000)[None]
    filled = DynamicCache()
    with torch.no_grad():
        model(prompt, logits_to_keep=1, **{CACHE_ARGUMENT: filled})
    rows, counts = Rows(filled), (8, 32, 64, 128, 256)
    draw = np.random.default_rng(0)
    sets = [torch.from_numpy(np.sort(draw.permutation(1000)[:count])) for count in counts]
    every = [[seconds(lambda s=s: run(model, rows, prompt, slice(None), s)) for s in sets] for _ in range(n + 1)][1:]
    fits = [np.polyfit(counts, taken, 1) for taken in every]
    note = f"intercept over slope of the seconds of {', '.join(map(str, counts))} scattered rows of 1,000"
    add_median(results, "batch, one forward", "cost beside its rows, in rows", [b / a for a, b in fits], "rows", note)


def repaired_sets(report) -> list[np.ndarray]:
    """Positions of each prompt's repair pass: the repaired ones, and the new ones to the right of the first."""
    sets = []
    for spans in report.spans:
        kinds = np.concatenate([np.full(span.stop - span.start, span.kind) for span in spans])
        repaired, new = np.flatnonzero(kinds == "repaired"), np.flatnonzero(kinds == "new")
        sets.append(np.sort(np.concatenate([repaired, new[new > repaired[0]]])))
    return sets


def measure(model, texts: Texts, size: int, n: int, results: Results) -> None:
    """Whole calls and single passes of batches of `size`."""
    passages = [texts.take(TOKENS) for _ in range(PASSAGES)]
    draw = np.random.default_rng(size)
    head = texts.head("You answer questions about the passages that follow.")
    cache = SuffixCache()
    for first in range(0, PASSAGES, CHOSEN):
        ask(model, head + sum(passages[first : first + CHOSEN], []) + texts.question(QUESTION_TOKENS), 1, cache=cache)
    handle, case = cache.using(store=False), f"batch of {size} novel orders"

    def novel() -> list[int]:
        order = draw.permutation(PASSAGES)[:CHOSEN]
        return head + sum((passages[number] for number in order), []) + texts.question(QUESTION_TOKENS)

    batches = [[novel() for _ in range(size)] for _ in range(n + 1)]
    counts: dict[str, list[float]] = {"groups": [], "together": [], "one by one": []}

    def groups(number: int) -> float:
        taken = ask_batch(model, batches[number], 1, cache=handle)
        counts["groups"].append(handle.last_report.computed_rows)
        return taken

    def together(number: int) -> float:
        with mock.patch.object(passes, "groups_of", lambda rows, *others: [range(len(rows))]):
            taken = ask_batch(model, batches[number], 1, cache=handle)
        counts["together"].append(handle.last_report.computed_rows)
        return taken

    def single(number: int) -> float:
        taken, rows = 0.0, 0
        for prompt in batches[number]:
            taken += ask_batch(model, [prompt], 1, cache=handle)
            rows += handle.last_report.computed_rows
        counts["one by one"].append(rows)
        return taken

    ways = {"groups": groups, "together": together, "one by one": single}
    for way in ways.values():
        way(n)
    taken = rounds(ways, tqdm(range(n), desc=case))
    for way, values in taken.items():
        add_median(results, case, f"time to first token, {way}", values, "s")
        add_median(results, case, f"rows run, {way}", counts[way][1:], "rows")
    add_ratio(results, case, "time to first token, together / groups", taken["together"], taken["groups"])
    add_ratio(results, case, "time to first token, groups / one by one", taken["groups"], taken["one by one"])
    ask_batch(model, batches[0], 1, cache=handle)
    sets = repaired_sets(handle.last_report)
    passes_over = one_pass(model, batches[0], sets)
    apart, slots = passes_over["groups"](), passes_over["slots"]()
    if (apart - slots).abs().max() > 1e-2:
        raise RuntimeError("groups and slots ran the same rows and differ, so this would compare different things")
    passes_over["together"]()
    taken = rounds({way: lambda _, f=f: seconds(f) for way, f in passes_over.items()}, range(n))
    for way, values in taken.items():
        add_median(results, case, f"one repair pass, {way}", values, "s", f"{sum(map(len, sets))} wanted rows")
    add_ratio(results, case, "one repair pass, slots / groups", taken["slots"], taken["groups"])
    add_ratio(results, case, "one repair pass, together / groups", taken["together"], taken["groups"])


def main() -> None:
    options = parse(BatchOptions, __doc__)
    model, tokenizer = load_model("smollm2", options.threads)
    results = Results("speed", MODELS["smollm2"], "float32", options)
    forward_rows(model, results, options.n)
    for size in map(int, options.sizes.split(",")):
        measure(model, Texts(tokenizer, options.seed), size, options.n, results)


if __name__ == "__main__":
    main()
