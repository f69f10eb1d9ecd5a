"""Part `factors` of the fidelity benchmark: one factor at a time, on the same prompts, all else at its default."""

from dataclasses import replace

import numpy as np

from benchmarks import workloads
from benchmarks.common import Results
from benchmarks.fidelity_cells import PUBLISHED, Cell
from benchmarks.fidelity_headline import measured, write_cells
from benchmarks.workloads import Case

MOST = 20  # prompts
FRACTIONS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
SEAMS = (0, 2, 4, 8, 16)
TAILS = (1, 8, 16, 32, 64, 128)
RUNS = (8, 12, 16, 24, 32, 48, 64)
SOURCES = ("live", "alone", "sink")


def policies() -> dict[str, object]:
    """All policies by name."""
    from hf_suffix_cache.repair import Deviation, FirstRows, FullRepair, NoRepair, OutsideMass, QuestionAttention

    found = {"none": NoRepair(), "outside mass": OutsideMass(), "full": FullRepair()}
    found |= {f"first {rows} rows": FirstRows(rows=rows) for rows in (1, 4, 16, 64)}
    found["first rows, by fraction"] = FirstRows()
    found |= {
        f"attention x {weight}": QuestionAttention(weight) for weight in ("distance", "outside_mass", "deviation")
    }
    found["attention"] = QuestionAttention(None)
    for of in ("keys", "values"):
        found |= {
            f"deviation of {of}, {'gradual' if gradual else 'at once'}": Deviation(of=of, gradual=gradual)
            for gradual in (True, False)
        }
    return found


def factor_cells() -> dict[str, tuple[Cell, ...]]:
    """Cells of each factor."""
    return {
        "policy": tuple(
            Cell(
                f"policy: {name}",
                policy=lambda policy=policy: policy,
                settings=PUBLISHED if name.startswith(("none", "first", "deviation")) else {},
                moves=False,
            )
            for name, policy in policies().items()
        ),
        "source": tuple(Cell(f"source: {source}", source) for source in SOURCES),
        "repair_fraction": tuple(
            Cell(f"repair_fraction: {value:g}", settings={"repair_fraction": value}) for value in FRACTIONS
        ),
        "seam_tokens": tuple(Cell(f"seam_tokens: {value}", settings={"seam_tokens": value}) for value in SEAMS),
        "tail_tokens": tuple(Cell(f"tail_tokens: {value}", settings={"tail_tokens": value}) for value in TAILS),
        "run length": tuple(
            Cell(f"run length: {value}", f"slices of {value}", settings={"min_match_tokens": 8}, moves=False)
            for value in RUNS
        ),
    }


def factors(model, tokenizer, options, results: Results) -> None:
    """Every factor on the first `MOST` prompts, and consensus rows on and off with several stored contexts."""
    for name in (options.workload or "passages").split(","):
        cases = workloads.cases(name, tokenizer, min(options.n, MOST), options.seed)
        for cells in factor_cells().values():
            rows = measured(model, tokenizer, options, cases, cells)
            write_cells(rows, name, options, results, tuple(cell.name for cell in cells))
            if cells[0].name.startswith("run length"):
                write_per_row(rows, name, cells, results)
        for consensus in (True, False):
            cell = Cell(f"consensus: {'on' if consensus else 'off'}")
            rows = measured(model, tokenizer, options, several_contexts(cases), (cell,), consensus=consensus)
            write_cells(rows, name, options, results, (cell.name,))


def several_contexts(cases: list[Case]) -> list[Case]:
    """The same cases after up to three more requests over the same texts: the other measured ones of their group."""
    return [
        replace(
            case,
            stored=case.stored
            + tuple(other.measured for other in cases if other.group == case.group and other is not case)[:3],
        )
        for case in cases
    ]


def write_per_row(rows: list[dict], workload: str, cells: tuple[Cell, ...], results: Results) -> None:
    """KL for each share of the prompt that was spared: what a run length costs for what it gives."""
    for cell in cells:
        taken = [row[cell.name] for row in rows]
        spared = np.mean([1 - item["rows"] for item in taken])
        value = np.mean([item["first"] for item in taken]) / max(spared, 1e-9)
        note = f"{workload}; mean KL / mean share of rows not run"
        results.add(f"{workload}: {cell.name}", "KL per row spared", value, "nats", len(taken), note=note)
