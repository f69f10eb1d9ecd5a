"""
Draws what the CSVs hold: one PNG a benchmark, beside them. Needs matplotlib (extra `plot`).

    python -m benchmarks.plot                          # benchmarks/results/*.csv -> benchmarks/results/*.png
    python -m benchmarks.plot --folder .cache/look
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from benchmarks import plot_fidelity, plot_speed
from benchmarks.common import RESULTS, read_rows
from benchmarks.drawing import BLUE, GREY, ORANGE, TARGET, Table, bars

VARIANTS = ("balanced", "fast", "no drift", "no repair", "no rotation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the CSVs are and the PNGs go")
    folder = parser.parse_args().folder
    drawn = 0
    for name, draw in DRAWINGS.items():
        csv = name.split("-")[0]
        rows = read_rows(folder / f"{csv}.csv")
        table = Table(rows)
        figure = draw(table) if rows else None
        if figure is None:
            print(f"{name}: nothing in {csv}.csv to draw")
            continue
        figure.text(0.01, 0.01, table.caption(), fontsize=6, color="#555555")
        figure.tight_layout(rect=(0, 0.03, 1, 1))
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=130)
        plt.close(figure)
        print(f"{name}: {path.name}")
        drawn += 1
    if not drawn:
        raise SystemExit("nothing was drawn: run a benchmark first, e.g. python -m benchmarks.reorder")


def draw_reorder(table: Table) -> Figure:
    """Divergence, rows run and time to first token of each variant, a row of panels for each model; targets dashed."""
    tables = table.by_model()
    figure, grid = plt.subplots(len(tables), 3, figsize=(11, 3.4 * len(tables) + 0.2), squeeze=False)
    panels = (
        ("KL first token, mean", "KL of the first token (nats)", {"balanced": 0.018, "fast": 0.045}),
        ("rows run / prompt tokens", "rows run / prompt tokens", {"balanced": 0.25, "fast": 0.15}),
        ("time to first token / full prefill", "time to first token / full prefill", {"balanced": 0.33, "fast": 0.2}),
    )
    for axes, ((model, _), part) in zip(grid, tables.items(), strict=True):
        for axis, (metric, title, targets) in zip(axes, panels, strict=True):
            cases = [case for case in part.cases if part.has(case, metric)]
            order = [case for case in VARIANTS if case in cases] + [case for case in cases if case not in VARIANTS]
            bars(axis, part, order, metric, [BLUE if case not in VARIANTS[2:] else GREY for case in order])
            for place, case in enumerate(order):
                if part.has(case, metric) and "target" in part.rows[case, metric]["note"] and case in targets:
                    axis.hlines(targets[case], place - 0.45, place + 0.45, colors=TARGET, linestyles="dashed")
            values = [part.value(case, metric) for case in order]
            if values and max(values) > 100 * min(values) > 0:
                axis.set_yscale("log")
            axis.set_title(f"{title}, {model}" if len(tables) > 1 else title, fontsize=8)
    figure.suptitle("Six passages in a new order behind a changed head (dashed: target)", fontsize=10)
    return figure


def draw_flips(table: Table) -> Figure:
    """Shares of answers that differ, and the first token's difference, with the cache and of stock in two forwards."""
    tables = table.by_model()
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4))
    for offset, (way, colour) in enumerate((("cache", BLUE), ("stock in two forwards", GREY), ("control", ORANGE))):
        for place, (_, part) in enumerate(tables.items()):
            for axis, start in zip(axes, ("answers that differ", "max abs logit"), strict=True):
                metric = next((metric for case, metric in part.rows if case == way and metric.startswith(start)), None)
                if metric is None:
                    continue
                value, errors = part.value(way, metric), part.errors(way, metric)
                if start.startswith("max"):  # the interval is from the smallest to the largest, which the bar is
                    errors = (0.0, 0.0)
                x = place + (offset - 1) * 0.27
                axis.bar(x, value, 0.25, yerr=[[errors[0]], [errors[1]]], color=colour, capsize=3)
                axis.text(x, value, f" {value:.2g}", ha="left", va="bottom", fontsize=7)
    for way, colour in (("with the cache", BLUE), ("stock in two forwards", GREY), ("another prompt's rows", ORANGE)):
        axes[0].bar(0, 0, color=colour, label=way)
    axes[0].set(title="share of answers that differ", ylim=(0, 1.15))
    axes[1].set(title="largest difference of the first token's logits", yscale="log")
    for axis in axes:
        axis.set_xticks(range(len(tables)), [dtype for _, dtype in tables], fontsize=8)
    axes[0].legend(fontsize=7)
    figure.suptitle("Exact hits against plain answers", fontsize=10)
    return figure


def draw_chat(table: Table) -> Figure:
    """Time to first token by turn for the three ways, and the new tokens of each turn."""
    turns = [case for case in table.cases if case.startswith("turn ")]
    numbers = range(1, len(turns) + 1)
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    ways = (("cache", "SuffixCache", BLUE), ("deep copy", "deep copy of a DynamicCache", ORANGE))
    for way, label, colour in (*ways, ("full prefill", "full prefill", GREY)):
        values = [table.value(turn, f"time to first token, {way}") for turn in turns]
        axes[0].plot(numbers, values, marker="o", markersize=3, color=colour, label=label)
    axes[0].set(xlabel="turn", ylabel="time to first token (s)", ylim=(0, None))
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(fontsize=8)
    new = [table.value(turn, "new tokens") for turn in turns]
    for way, label, colour in ways:
        values = [table.value(turn, f"time to first token, {way}") for turn in turns]
        axes[1].scatter(new[1:], values[1:], s=16, color=colour, label=label)
    axes[1].set(xlabel="new tokens of the turn", ylabel="time to first token (s)", xlim=(0, None), ylim=(0, None))
    axes[1].legend(fontsize=8)
    figure.suptitle("A chat, turn by turn", fontsize=10)
    return figure


def draw_nothing_in_common(table: Table) -> Figure:
    """What the cache adds to a prompt that it can't help, as shares of its targets' bounds."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2))
    panels = (
        ("prompt", "own time / stock prefill", 0.02, "own time / stock prefill"),
        ("generated token", "own time beyond update", 0.3, "own ms per generated token"),
        ("whole call", "total / stock", 1.03, "whole call / stock"),
    )
    for axis, (case, metric, target, title) in zip(axes, panels, strict=True):
        bars(axis, table, [case], metric, [BLUE])
        axis.axhline(target, color=TARGET, linestyle="dashed")
        axis.set_title(title, fontsize=9)
    axes[2].set_ylim(0.9, 1.1)
    figure.suptitle("Nothing in common with the store (dashed: target)", fontsize=10)
    return figure


def draw_oracles(table: Table) -> Figure:
    """Logit differences of the oracles against those of their controls, on a logarithmic scale."""
    cases = [case for case in table.cases if case[:2] in ("O1", "O3", "O6")]
    figure, axis = plt.subplots(figsize=(max(10.0, 0.22 * len(cases)), 3.8))
    floor = 1e-8  # a difference of exactly 0 has no place on the scale
    for place, case in enumerate(cases):
        for (other, metric), row in table.rows.items():
            if other == case and "logit difference" in metric:
                control = metric.startswith("control")
                axis.scatter(place, max(float(row["value"]), floor), color=GREY if control else BLUE, s=18)
    axis.axhline(1e-4, color=TARGET, linestyle="dashed", label="bound, tiny models")
    axis.set(yscale="log", ylabel="max abs logit difference", ylim=(None, 3e3))
    axis.set_xticks(range(len(cases)), cases, rotation=60, fontsize=7, ha="right")
    axis.scatter([], [], color=BLUE, s=18, label="with the cache")
    axis.scatter([], [], color=GREY, s=18, label="negative control")
    axis.legend(fontsize=8, ncols=3, loc="upper right")
    return figure


# CSV, or CSV and question: how it is drawn; None where the rows for it are not there
DRAWINGS: dict[str, Callable[[Table], Figure | None]] = {
    "reorder": draw_reorder,
    "flips": draw_flips,
    "nothing_in_common": draw_nothing_in_common,
    "chat": draw_chat,
    "oracles": draw_oracles,
    "fidelity": plot_fidelity.draw_cells,
    "fidelity-bound": plot_fidelity.draw_bound,
    "fidelity-factors": plot_fidelity.draw_factors,
    **plot_speed.DRAWINGS,
}

if __name__ == "__main__":
    main()
