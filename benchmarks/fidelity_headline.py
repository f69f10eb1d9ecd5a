"""Parts `headline` and `f1` of the fidelity benchmark: the default against published methods, and its answers."""

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import workloads
from benchmarks.calls import CACHE_ARGUMENT
from benchmarks.common import Journal, Results
from benchmarks.fidelity_cells import CACHEBLEND, DEFAULT, EPIC, HEADLINE, LESS, MORE, Cell, Stores, measure
from benchmarks.fidelity_runs import References, in_chunks, spoken, stop_tokens
from benchmarks.scores import contained, f1, grouped_bootstrap
from benchmarks.sources import cache_home
from benchmarks.workloads import Case

TARGET = 0.25  # of CacheBlend's and EPIC's mean KL
F1_TARGET = -0.03
ANSWER_TOKENS = 16
NOISE, NOISE_PROMPTS = "full prefill, two forwards", 20
RATIOS = (
    (DEFAULT, CACHEBLEND),
    (DEFAULT, EPIC),
    (MORE, CACHEBLEND),
    (LESS, EPIC),
    (DEFAULT, "default without drift, live"),
    (DEFAULT, "CacheBlend, live"),
    (DEFAULT, "EPIC, live"),
    ("default, run alone", CACHEBLEND),
    ("default, run alone", EPIC),
)


def journal(options) -> Journal:
    """What this model has finished, apart from full prefill."""
    return Journal(cache_home() / "fidelity" / f"{options.model}.jsonl", {"model": options.model})


def measured(model, tokenizer, options, cases: list[Case], cells: tuple[Cell, ...], **settings) -> list[dict]:
    """
    Every case in every cell: one dict a case, of a dict by cell name, `"group"`, and for the first ones `NOISE`.

    Args:
        settings: Settings of the stores.
    """
    done, references = journal(options), References(model, options.model, options.forced)
    found, stores = [], None
    for number, case in enumerate(tqdm(cases, desc=cases[0].workload)):
        if stores is None or stores.case.stored != case.stored or stores.case.alone != case.alone:
            stores = Stores(model, tokenizer, case, **settings)
        part = {"case": case.measured, "stored": case.stored, "alone": case.alone, "forced": options.forced}

        def noise(case=case) -> dict:
            full = references.get(case.measured)
            return in_chunks(model, case.measured, full.ids).against(full)

        row = {"group": case.group}
        if number < NOISE_PROMPTS:
            row[NOISE] = done.record([part, NOISE], noise)
        for cell in cells:
            if number >= cell.most:
                continue
            key = [part, cell.source, cell.policy_key, cell.settings, settings]
            row[cell.name] = done.record(
                key, lambda stores=stores, case=case, cell=cell: measure(stores, case, cell, references)
            )
        found.append(row)
    return found


def headline(model, tokenizer, options, results: Results) -> None:
    """The named cells on `passages`, with intervals of their means and of ratios of means."""
    for name in (options.workload or "passages").split(","):
        cases = workloads.cases(name, tokenizer, options.n, options.seed)
        rows = measured(model, tokenizer, options, cases, HEADLINE)
        write_cells(rows, name, options, results, (NOISE, *(cell.name for cell in HEADLINE)))
        write_ratios(rows, name, results)


def write_cells(rows: list[dict], workload: str, options, results: Results, cells: tuple[str, ...]) -> None:
    """Means over the prompts of each cell, with 95 % intervals drawn over groups."""
    metrics = (
        ("first", "KL first token, mean", "nats"),
        ("forced", f"KL over {options.forced - 1} forced tokens, mean", "nats"),
        ("same", f"top-1 agreement over {options.forced} tokens", "share"),
        ("rows", "rows run / prompt tokens", "share"),
        ("weighted", "rows run / prompt tokens, by layers", "share"),
        ("shifted", "tokens served moved", "share"),
    )
    for cell in cells:
        taken = [row[cell] for row in rows if cell in row]
        groups = [row["group"] for row in rows if cell in row]
        note = f"{workload}; 95 % bootstrap over {len(set(groups))} groups"
        for key, metric, unit in metrics:
            if key in taken[0]:
                values = [item[key] for item in taken]
                interval = grouped_bootstrap([values], groups, lambda mean: mean)
                results.add(f"{workload}: {cell}", metric, np.mean(values), unit, len(values), *interval, note)
        first = [item["first"] for item in taken]
        ends = np.percentile(first, [5, 95])
        note = f"{workload}; 5th and 95th percentile"
        results.add(f"{workload}: {cell}", "KL first token, median", np.median(first), "nats", len(first), *ends, note)
        if "seconds" in taken[0]:
            ratio = [item["seconds"] / item["full_seconds"] for item in taken]
            ends = np.percentile(ratio, [5, 95])
            metric = "time to first token / full prefill, median"
            note = f"{workload}; 5th and 95th percentile; not alternating, an indication"
            results.add(f"{workload}: {cell}", metric, np.median(ratio), "ratio", len(ratio), *ends, note)


def write_ratios(rows: list[dict], workload: str, results: Results) -> None:
    """Ratios of mean KL, and differences of rows run, between cells."""
    groups = [row["group"] for row in rows]
    for ours, theirs in RATIOS:
        case = f"{workload}: {ours} / {theirs}"
        target = f"target <= {TARGET}; " if ours == DEFAULT and theirs in (CACHEBLEND, EPIC) else ""
        for key, metric in (("first", "ratio of mean KL, first token"), ("forced", "ratio of mean KL, forced tokens")):
            columns = [[row[cell][key] for row in rows] for cell in (ours, theirs)]
            ratio = np.mean(columns[0]) / np.mean(columns[1])
            interval = grouped_bootstrap(columns, groups, lambda first, second: first / second)
            note = f"{target}{workload}; 95 % paired bootstrap over groups"
            results.add(case, metric, ratio, "ratio", len(rows), *interval, note)
            target = ""
        for key, metric in (("rows", "rows run more"), ("weighted", "rows run more, by layers")):
            columns = [[row[cell][key] for row in rows] for cell in (ours, theirs)]
            interval = grouped_bootstrap(columns, groups, lambda first, second: first - second)
            more = np.mean(columns[0]) - np.mean(columns[1])
            note = f"{workload}; difference of shares of the prompt; 95 % paired bootstrap over groups"
            results.add(case, metric, more, "share", len(rows), *interval, note)


# -- answers -------------------------------------------------------------------------------------------------------


def answers(model, tokenizer, options, results: Results) -> None:
    """F1 and contained answers of the default and of full prefill, and their paired difference."""
    for name in (options.workload or "passages").split(","):
        rows = answered(model, tokenizer, options, name)
        groups = [row["group"] for row in rows]
        for metric in ("F1", "answer contained"):
            ours, full = ([row[way][metric] for row in rows] for way in ("default", "full"))
            for case, values in (("default", ours), ("full prefill", full)):
                interval = grouped_bootstrap([values], groups, lambda mean: mean)
                note = f"{name}; answers of {ANSWER_TOKENS} tokens; 95 % bootstrap over groups"
                results.add(f"{name}: answers, {case}", metric, np.mean(values), "share", len(rows), *interval, note)
            interval = grouped_bootstrap([ours, full], groups, lambda first, second: first - second)
            target = f"target: lower end > {F1_TARGET}; " if metric == "F1" else ""
            note = f"{target}{name}; 95 % paired bootstrap over {len(set(groups))} groups"
            difference = np.mean(ours) - np.mean(full)
            case = f"{name}: answers, default - full prefill"
            results.add(case, metric, difference, "share", len(rows), *interval, note)
        same = np.mean([row["default"]["text"] == row["full"]["text"] for row in rows])
        results.add(f"{name}: answers, default", "same text as full prefill", same, "share", len(rows), note=name)


def answered(model, tokenizer, options, name: str) -> list[dict]:
    """Answers to every case of a workload, by the default and by full prefill, with their scores."""
    done, references = journal(options), References(model, options.model, options.forced)
    stop, found, stores = stop_tokens(model), [], None
    for case in tqdm(workloads.cases(name, tokenizer, options.n, options.seed), desc=f"answers, {name}"):
        if not case.answers:
            raise ValueError(f"the workload {name!r} has no known answers; choose one that has, like 'passages'.")
        if stores is None or stores.case.stored != case.stored:
            stores = Stores(model, tokenizer, case)
        full = references.get(case.measured)
        best = [int(full.first.argmax()), *full.forced.argmax(-1).tolist()]
        texts = {"full": spoken(tokenizer, full.ids[:ANSWER_TOKENS], best[:ANSWER_TOKENS], stop)}
        part = ["answer", case.measured, case.stored, ANSWER_TOKENS]

        def ask_default(case=case, stores=stores) -> dict:
            prompt = torch.tensor([list(case.measured)], device=model.device)
            out = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=ANSWER_TOKENS,
                **{CACHE_ARGUMENT: stores.handle(Cell(DEFAULT))},
            )
            return {"ids": out[0, prompt.shape[1] :].tolist()}

        texts["default"] = spoken(tokenizer, done.record(part, ask_default)["ids"], stop=stop)
        scored = {
            way: {"text": text, "F1": f1(text, case.answers), "answer contained": contained(text, case.answers)}
            for way, text in texts.items()
        }
        found.append({"group": case.group} | scored)
    return found
