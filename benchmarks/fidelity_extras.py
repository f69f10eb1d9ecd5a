"""Part `extras` of the fidelity benchmark: what `settle` and `heal_rows` cost and give."""

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import workloads
from benchmarks.calls import ask, kl_divergence
from benchmarks.common import Results, bootstrap_mean
from benchmarks.fidelity_cells import Cell, Stores
from benchmarks.fidelity_headline import journal

MOST = 20  # prompts
HEALED = (0, 4, 8, 16)
AT = (1, 10, 20, 40)  # tokens at which the KL is reported
ANSWER, TURN = 16, 24  # tokens of the answer, and of the next turn


def extras(model, tokenizer, options, results: Results) -> None:
    """Both, on the first prompts of `passages`."""
    for name in (options.workload or "passages").split(","):
        cases = workloads.cases(name, tokenizer, min(options.n, MOST), options.seed)
        heal(model, tokenizer, options, name, cases, results)
        settle(model, tokenizer, options, name, cases, results)


def heal(model, tokenizer, options, name: str, cases: list, results: Results) -> None:
    """KL of tokens along a forced answer, and seconds a token, by the rows healed with each token."""
    done, stores, found = journal(options), None, []
    for case in tqdm(cases, desc=f"heal, {name}"):
        stores = stores if stores is not None and stores.case.stored == case.stored else Stores(model, tokenizer, case)

        def run(case=case, stores=stores) -> dict:
            full = ask(model, list(case.measured), max(AT), logits=True)
            record: dict = {"full": float(np.median(full.steps))}
            for rows in HEALED:
                handle = stores.handle(Cell("heal", settings={"heal_rows": rows}))
                taken = ask(model, list(case.measured), max(AT), cache=handle, logits=True, forced=full.ids)
                kls = kl_divergence(full.logits, taken.logits).clamp(min=0).tolist()
                healed = getattr(handle.last_report, "healed_rows", 0)
                record[str(rows)] = {"kls": kls, "step": float(np.median(taken.steps)), "healed": healed}
            return record

        found.append(done.record(["heal", case.measured, case.stored, HEALED, AT], run))
    for rows in HEALED:
        case = f"{name}: heal_rows {rows}"
        for at in AT:
            window = slice(max(0, at - 5), at)
            values = [np.mean(item[str(rows)]["kls"][window]) for item in found]
            note = "mean of the 5 tokens up to there; 95 % bootstrap"
            results.add(case, f"KL at token {at}", np.mean(values), "nats", len(values), *bootstrap_mean(values), note)
        ratio = [item[str(rows)]["step"] / item["full"] for item in found]
        note = "medians of 40 steps; 95 % bootstrap"
        results.add(
            case, "time per token / without a cache", np.mean(ratio), "ratio", len(ratio), *bootstrap_mean(ratio), note
        )
        healed = np.mean([item[str(rows)]["healed"] for item in found])
        results.add(case, "rows healed", healed, "rows", len(found))


def settle(model, tokenizer, options, name: str, cases: list, results: Results) -> None:
    """Rows and seconds of settling, and how far the next turn is from full prefill with and without it."""
    done, found = journal(options), []
    again = tokenizer("\nAnd what else stands there? Answer in full.\n", add_special_tokens=False)["input_ids"]
    for case in tqdm(cases, desc=f"settle, {name}"):

        def run(case=case) -> dict:
            record = {}
            for settles in (True, False):
                cache = Stores(model, tokenizer, case).handle(Cell("settle")).using(store=True)
                answer = ask(model, list(case.measured), ANSWER, cache=cache)
                if settles:
                    taken = cache.settle(model)
                    record |= {"rows": taken.rows / len(case.measured), "seconds": taken.seconds}
                turn = [*case.measured, *answer.ids, *again]
                full = ask(model, turn, TURN, logits=True)
                own = ask(model, turn, TURN, cache=cache, logits=True, forced=full.ids)
                key = "settled" if settles else "unsettled"
                record[key] = {
                    "logit": float((full.logits - own.logits).abs().max()),
                    "first": float(kl_divergence(full.logits[0], own.logits[0]).clamp(min=0)),
                    "same": bool(torch.equal(full.logits.argmax(-1), own.logits.argmax(-1))),
                    "rows": cache.last_report.computed_rows / len(turn),
                    "full_seconds": full.first,
                }
            return record

        found.append(done.record(["settle", case.measured, case.stored, again, ANSWER, TURN], run))
    n, case = len(found), f"{name}: settle"
    for key, metric, unit in (
        ("rows", "rows run / prompt tokens", "share"),
        ("seconds", "seconds", "s"),
    ):
        values = [item[key] for item in found]
        results.add(case, metric, np.mean(values), unit, n, *bootstrap_mean(values))
    ratio = [item["seconds"] / item["settled"]["full_seconds"] for item in found]
    results.add(case, "seconds / full prefill of the next turn", np.mean(ratio), "ratio", n, *bootstrap_mean(ratio))
    for key in ("settled", "unsettled"):
        case = f"{name}: next turn, {key}"
        largest = max(item[key]["logit"] for item in found)
        results.add(case, "max abs logit difference", largest, "logits", n, note=f"over {TURN} forced tokens")
        values = [item[key]["first"] for item in found]
        results.add(case, "KL first token, mean", np.mean(values), "nats", n, *bootstrap_mean(values))
        for metric, unit in (("same", "share"), ("rows", "share")):
            values = [float(item[key][metric]) for item in found]
            title = "same tokens" if metric == "same" else "rows run / prompt tokens"
            results.add(case, title, np.mean(values), unit, n)
