"""Plots of the fidelity benchmark: error against cost, coverage of the bound, and one factor at a time."""

import re

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from benchmarks.drawing import BLUE, GREY, ORANGE, TARGET, Table

KL, ROWS = "KL first token, mean", "rows run / prompt tokens, by layers"
COVERAGE, FIXED = "share under the bound", "rows run / cheapest fixed level"
FACTORS = ("repair_fraction", "seam_tokens", "tail_tokens", "run length")
COLOURS = {"default": BLUE, "CacheBlend": ORANGE, "EPIC": "#5f8700", "no repair": GREY}


def draw_cells(table: Table) -> Figure | None:
    """Mean KL of the first token against rows run, one panel for each model: left and low is better."""
    tables = {key: part for key, part in table.by_model().items() if headline(part)}
    if not tables:
        return None
    figure, axes = plt.subplots(1, len(tables), figsize=(5.6 * len(tables), 4.2), squeeze=False)
    for axis, ((model, _), part) in zip(axes[0], tables.items(), strict=True):
        for case in headline(part):
            name = case.split(": ", 1)[1]
            alone = name.endswith(("alone", "published"))
            colour = next(colour for start, colour in COLOURS.items() if name.startswith(start))
            x, y = part.value(case, ROWS), part.value(case, KL)
            axis.errorbar(
                x,
                y,
                xerr=[[error] for error in part.errors(case, ROWS)],
                yerr=[[error] for error in part.errors(case, KL)],
                color=colour,
                marker="o",
                markerfacecolor="white" if alone else colour,
                capsize=2,
                linewidth=0.8,
            )
            axis.annotate(name, (x, y), xytext=(6, 5), textcoords="offset points", fontsize=7)
        axis.set(yscale="log", xlabel="rows run / prompt tokens, weighted by layers")
        axis.set_ylabel("KL of the first token (nats), mean")
        axis.set_xlim(0, 1.5 * max(part.value(case, ROWS) for case in headline(part)))
        axis.set_title(model, fontsize=9)
    axes[0][0].plot([], [], "o", color="black", label="live rows")
    axes[0][0].plot([], [], "o", color="black", markerfacecolor="white", label="rows run alone")
    axes[0][0].legend(fontsize=7, loc="lower left")
    figure.suptitle("SQuAD passages in a new order: error against cost (95 % intervals)", fontsize=10)
    return figure


def headline(table: Table) -> list[str]:
    """Cases that are named cells with both figures."""
    cells = tuple(f": {name}" for name in COLOURS)
    return [
        case
        for case in table.cases
        if table.has(case, KL) and table.has(case, ROWS) and "/" not in case and any(name in case for name in cells)
    ]


def draw_bound(table: Table) -> Figure | None:
    """Share of prompts under the bound by workload, and what its rows cost against the cheapest fixed level."""
    tables = {}
    for key, part in table.by_model().items():
        cases = [case for case in part.cases if part.has(case, COVERAGE) and case.endswith(", labelled")]
        if cases:
            tables[key] = (part, cases)
    if not tables:
        return None
    figure, grid = plt.subplots(len(tables), 2, figsize=(12, 3.6 * len(tables) + 0.3), squeeze=False)
    for axes, ((model, _), (part, cases)) in zip(grid, tables.items(), strict=True):
        names = list(dict.fromkeys(case.split(":")[0] for case in cases))
        bounds = list(dict.fromkeys(re.search(r"max_kl ([\d.]+)", case).group(1) for case in cases))
        panels = ((COVERAGE, 0.8, "share under the bound"), (FIXED, 1.5, "rows / cheapest fixed level"))
        for axis, (metric, target, title) in zip(axes, panels, strict=True):
            for offset, (bound, colour) in enumerate(zip(bounds, (BLUE, ORANGE, GREY), strict=False)):
                for place, name in enumerate(names):
                    case = f"{name}: max_kl {bound}, labelled"
                    if not part.has(case, metric):
                        continue
                    errors = [[error] for error in part.errors(case, metric)]
                    x = place + (offset - 1) * 0.27
                    axis.bar(x, part.value(case, metric), 0.25, yerr=errors, color=colour, capsize=2)
                axis.bar(0, 0, color=colour, label=f"max_kl {bound}")
            axis.axhline(target, color=TARGET, linestyle="dashed")
            axis.set_xticks(range(len(names)), names, fontsize=7, rotation=20)
            axis.set_title(f"{title}, {model}", fontsize=8)
        axes[0].axhline(0.9, color=TARGET, linestyle="dotted")
        axes[0].set_ylim(0.5, 1.02)
        axes[0].legend(fontsize=7, loc="lower right", ncols=3, framealpha=1)
    figure.suptitle("The bound on held-out prompts, alpha 0.1 (dashed: target; dotted: 1 - alpha)", fontsize=10)
    return figure


def draw_factors(table: Table) -> Figure | None:
    """Mean KL of the first token, and rows run, against one setting at a time."""
    tables = {}
    for (model, _), part in table.by_model().items():
        found = {factor: values(part, factor) for factor in FACTORS}
        if any(found.values()):
            tables[model] = (part, found)
    if not tables:
        return None
    figure, axes = plt.subplots(1, len(FACTORS), figsize=(13, 3.6))
    for colour, (model, (part, found)) in zip((BLUE, ORANGE), tables.items(), strict=False):
        for axis, factor in zip(axes, FACTORS, strict=True):
            pairs = found[factor]
            if not pairs:
                continue
            x = [value for value, _ in pairs]
            kls = [part.value(case, KL) for _, case in pairs]
            errors = list(zip(*(part.errors(case, KL) for _, case in pairs), strict=True))
            axis.errorbar(x, kls, yerr=errors, color=colour, marker="o", markersize=4, capsize=2, label=model)
            rows = [part.value(case, ROWS) for _, case in pairs]
            for at, kl, share in zip(x, kls, rows, strict=True):
                axis.annotate(f"{share:.2f}", (at, kl), xytext=(3, 4), textcoords="offset points", fontsize=6)
            axis.set(yscale="log", xlabel=factor)
    axes[0].set_ylabel("KL of the first token (nats), mean")
    axes[0].legend(fontsize=7)
    figure.suptitle("One setting at a time; the small figures are rows run / prompt tokens", fontsize=10)
    return figure


def values(table: Table, factor: str) -> list[tuple[float, str]]:
    """Values of a factor and their cases, in order."""
    start = f": {factor}: "
    found = [(float(case.split(start)[1]), case) for case in table.cases if start in case and table.has(case, KL)]
    return sorted(found)
