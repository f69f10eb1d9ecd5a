"""Plots of the speed benchmark and of its peers, for `benchmarks.plot`."""

import re

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from benchmarks.drawing import BLUE, GREY, ORANGE, TARGET, Table

WORKLOADS = ("system", "chat", "rag8", "rag20", "edited", "nothing")
KIND_COLOURS = {
    "exact": BLUE,
    "derived": "#5fafd7",
    "means": ORANGE,
    "extents": "#87af5f",
    "waste": TARGET,
}
PEAKS = (("a hit, beyond the store", BLUE), ("a hit, view included", "#5fafd7"), ("DynamicCache", GREY))
LEAST_SHARE = 1 / 32  # of a target: where the picture of the targets begins
_TARGET = re.compile(r"target (<=|>=) ([0-9.]+)")


def label_of(model: str, dtype: str) -> str:
    """Short name of a model and dtype."""
    return f"{model.split('-')[0]} {dtype.replace('float32', 'fp32').replace('bfloat16', 'bf16')}"


def draw_targets(table: Table) -> Figure | None:
    """Every figure that has a target, as a share of it, with its interval: left of the line it is met."""
    found = []
    for (model, dtype), part in table.by_model().items():
        for (case, metric), row in part.rows.items():
            target = _TARGET.match(row["note"])
            if target and float(target[2]) > 0:
                bound, value = float(target[2]), float(row["value"])
                ends = sorted(float(row[end]) for end in ("low", "high") if row[end]) or [value, value]
                shares = [each / bound if target[1] == "<=" else bound / max(each, 1e-9) for each in (value, *ends)]
                found.append((f"{case}: {metric} ({label_of(model, dtype)})", *shares))
    if not found:
        return None
    figure, axis = plt.subplots(figsize=(13, 0.24 * len(found) + 1.2))
    for place, (_, value, first, second) in enumerate(reversed(found)):
        low, high = sorted((first, second))
        axis.barh(place, value, color=BLUE if value <= 1 else ORANGE, height=0.7)
        axis.plot([low, high], [place, place], color="black", linewidth=1)
        axis.text(max(value, high, LEAST_SHARE), place, f" {value:.2f}", va="center", fontsize=6)
    axis.axvline(1.0, color=TARGET, linestyle="dashed")
    axis.set_yticks(range(len(found)), [name for name, *_ in reversed(found)], fontsize=6)
    axis.set(xlabel="figure / target (of a floor: target / figure)", ylim=(-0.7, len(found) - 0.3))
    axis.set_xscale("log", base=2)
    axis.set_xlim(LEAST_SHARE, None)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_title("Targets: left of the line is met", fontsize=10)
    return figure


def draw_reuse(table: Table) -> Figure | None:
    """Time to first token by workload, and how the gain of ever new orders lasts."""
    part = _first_with(table, "rag8", "time to first token / vanilla")
    if part is None:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    smaller = [case for case in part.cases if case.startswith("rag8, store smaller") and ", batch" not in case]
    cases = [case for case in (*WORKLOADS, *smaller) if part.has(case, "time to first token / vanilla")]
    for offset, (metric, colour, label) in enumerate(
        (("time to first token / vanilla", BLUE, "first token"), ("total / vanilla", GREY, "whole request"))
    ):
        for place, case in enumerate(cases):
            value, errors = part.value(case, metric), part.errors(case, metric)
            axes[0].bar(place + 0.38 * offset, value, 0.36, yerr=[[errors[0]], [errors[1]]], color=colour, capsize=2)
            axes[0].text(place + 0.38 * offset, value, f"{value:.2f}", ha="center", va="bottom", fontsize=7)
        axes[0].bar(0, 0, color=colour, label=label)
    names = [case.replace("rag8, store smaller than the corpus", "rag8,\nsmall store") for case in cases]
    axes[0].set_xticks(np.arange(len(cases)) + 0.19, names, fontsize=7)
    axes[0].set(title="with the cache / vanilla", ylim=(0, max(1.25, 1.1 * axes[0].get_ylim()[1])))
    axes[0].axhline(1.0, color="black", linewidth=0.6)
    axes[0].legend(fontsize=7)
    for case, colour in (("rag8", BLUE), ("rag8, store smaller than the corpus", ORANGE), ("rag20", GREY)):
        batches = sorted(c for c in part.cases if re.fullmatch(re.escape(case) + r", batch \d+", c))
        values = [part.value(batch, "time to first token / vanilla") for batch in batches]
        if batches:
            axes[1].plot([int(b[-2:]) for b in batches], values, marker="o", markersize=3, color=colour, label=case)
    axes[1].set(title="first token / vanilla by batch of novel orders", xlabel="batch", ylim=(0, None))
    axes[1].xaxis.get_major_locator().set_params(integer=True)
    axes[1].legend(fontsize=7)
    return figure


def draw_curve(table: Table) -> Figure | None:
    """What repair costs in time and buys in KL, a line for each model."""
    lines = []
    for key, part in table.by_model().items():
        cases = [case for case in part.cases if case.startswith("curve, ") and part.has(case, "KL first token, mean")]
        repaired = [case for case in cases if "repair 0" in case]
        if repaired:
            lines.append((label_of(*key), part, repaired, [case for case in cases if case not in repaired]))
    if not lines:
        return None
    figure, axis = plt.subplots(figsize=(7, 4.2))
    for (name, part, repaired, others), colour in zip(lines, (BLUE, ORANGE, GREY, TARGET), strict=False):
        points = [
            (part.value(c, "time to first token / vanilla"), part.value(c, "KL first token, mean")) for c in repaired
        ]
        axis.plot(*zip(*points, strict=True), marker="o", color=colour, label=name)
        for case, (x, y) in zip(repaired, points, strict=True):
            axis.annotate(case.split("repair ")[1], (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
        for case in others:
            x, y = part.value(case, "time to first token / vanilla"), part.value(case, "KL first token, mean")
            axis.scatter(x, y, marker="x", color=colour)
            axis.annotate(case.split(", ")[-1], (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axis.axvline(0.20, color=TARGET, linestyle="dashed")
    axis.set(
        xlabel="time to first token / vanilla", ylabel="KL of the first token (nats)", yscale="log", xlim=(0, None)
    )
    axis.set_title("20 passages in a new order, by repair fraction (dashed: target)", fontsize=10)
    axis.legend(fontsize=8)
    return figure


def draw_growth(table: Table) -> Figure | None:
    """Total latency by prompt length, and time per generated token by context."""
    part = _first_with(table, "growth, prefix, 1024", "total, vanilla")
    if part is None:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    for kind, style in (("prefix", "solid"), ("passages", "dashed")):
        for way, colour in (("with the cache", BLUE), ("vanilla", GREY)):
            cases = [case for case in part.cases if re.fullmatch(rf"growth, {kind}, \d+", case)]
            sizes = [int(case.split(", ")[-1]) for case in cases]
            values = [part.value(case, f"total, {way}") for case in cases]
            axes[0].plot(sizes, values, marker="o", linestyle=style, color=colour, label=f"{way}, {kind}")
    axes[0].set(title="whole request, 128 new tokens, 90 % reuse (s)", xlabel="prompt tokens", ylim=(0, None))
    axes[0].legend(fontsize=7)
    tables = [(key, item) for key, item in table.by_model().items() if _decoded(item)]
    for number, ((model, dtype), item) in enumerate(tables):
        for place, case in enumerate(_decoded(item)):
            metric = "time per token / DynamicCache"
            value, errors = item.value(case, metric), item.errors(case, metric)
            x = place + number * 0.8 / len(tables)
            colour = (BLUE, ORANGE, GREY, "#5fafd7")[number % 4]
            label = label_of(model, dtype) if place == 0 else None
            axes[1].bar(
                x, value, 0.75 / len(tables), yerr=[[errors[0]], [errors[1]]], color=colour, label=label, capsize=2
            )
            axes[1].text(x, value, f"{value:.2f}", ha="center", va="bottom", fontsize=6)
    if tables:
        contexts = [case.split(", ")[1] for case in _decoded(tables[0][1])]
        middle = 0.4 * (len(tables) - 1) / len(tables)
        axes[1].set_xticks(np.arange(len(contexts)) + middle, contexts, fontsize=8)
        axes[1].axhline(1.0, color="black", linewidth=0.6)
        axes[1].set(title="time per token / DynamicCache, by context", ylim=(0, 1.3))
        axes[1].legend(fontsize=7)
    return figure


def draw_memory(table: Table) -> Figure | None:
    """Bytes of 32 requests by kind and dtype of the store, and peaks of hits."""
    part = _first_with(table, "memory, 32 requests", "stored bytes / DynamicCaches")
    if part is None:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    cases = [case for case in part.cases if case.startswith("memory, 32 requests")]
    for place, case in enumerate(cases):
        bottom = 0.0
        for kind, colour in KIND_COLOURS.items():
            size = part.value(case, f"{kind}, at rest") if part.has(case, f"{kind}, at rest") else 0.0
            axes[0].bar(place, size, 0.6, bottom=bottom, color=colour, label=kind if place == 0 else None)
            bottom += size
        text = f"{part.value(case, 'stored bytes / DynamicCaches'):.2f} of 32\nDynamicCaches"
        axes[0].text(place, bottom, text, ha="center", va="bottom", fontsize=7)
    names = [case.split("store_dtype=")[-1].replace("memory, 32 requests", "as the model") for case in cases]
    axes[0].set_xticks(range(len(cases)), names, fontsize=8)
    axes[0].set_ylim(0, axes[0].get_ylim()[1] * 1.2)
    axes[0].set_title("32 requests over one corpus: stored MiB", fontsize=9)
    axes[0].legend(fontsize=7)
    peaks = [case for case in part.cases if case.startswith("peak, ")]
    for place, case in enumerate(peaks):
        for offset, (metric, colour) in enumerate(PEAKS):
            value = part.value(case, metric) if part.has(case, metric) else 0.0
            axes[1].bar(place + 0.27 * offset, value, 0.25, color=colour, label=metric if place == 0 else None)
    axes[1].set_xticks(np.arange(len(peaks)) + 0.27, [c.removeprefix("peak, ") for c in peaks], fontsize=7)
    axes[1].set_title("peak memory of a call (MiB)", fontsize=9)
    if peaks:
        axes[1].legend(fontsize=7)
    return figure


def draw_micro(table: Table) -> Figure | None:
    """Lookup and plan by stored blocks, and materialise and commit by prompt length; 8B shapes, one core."""
    part = next((item for (model, _), item in table.by_model().items() if model.startswith("none")), None)
    if part is None:
        return None
    if not any("blocks" in case for case in part.cases):
        return None
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    for kind, style in (("moved pieces", "solid"), ("nothing stored", "dotted")):
        found = re.compile(rf"micro, {kind}, (\d+) tokens, (\d+) blocks")
        points = [
            (int(match[1]), int(match[2]), part.value(case, "lookup + plan"))
            for case in part.cases
            if (match := found.fullmatch(case))
        ]
        for colour, tokens in zip(
            (GREY, "#5fafd7", BLUE, ORANGE, TARGET), sorted({p[0] for p in points}), strict=False
        ):
            line = sorted((blocks, value) for size, blocks, value in points if size == tokens)
            label = f"{tokens:,} tokens" if kind == "moved pieces" else None
            axes[0].plot(
                *zip(*line, strict=True), marker="o", markersize=3, linestyle=style, color=colour, label=label
            )
    axes[0].axhline(50, color=TARGET, linestyle="dashed", linewidth=0.8)
    axes[0].set(title="lookup + plan (ms; dotted: nothing found)", xlabel="stored blocks", xscale="log", yscale="log")
    axes[0].legend(fontsize=7)
    for metric, colour in (("materialise", BLUE), ("commit", ORANGE)):
        found = re.compile(r"micro, moved pieces, (\d+) tokens")
        line = sorted(
            (int(match[1]), part.value(case, metric))
            for case in part.cases
            if (match := found.fullmatch(case)) and part.has(case, metric)
        )
        if line:
            axes[1].plot(*zip(*line, strict=True), marker="o", color=colour, label=metric)
    axes[1].set(title="all rows moved (ms)", xlabel="prompt tokens", xscale="log", yscale="log")
    axes[1].legend(fontsize=7)
    return figure


def draw_peers(table: Table) -> Figure | None:
    """Time to first token of each peer over its own cold run, by workload."""
    metric = "first token / own cold"
    ran = [case for case in table.cases if table.has(case, metric) and table.rows[case, metric]["value"]]
    if not ran:
        return None
    workloads = list(dict.fromkeys(case.rsplit(" ", 1)[1] for case in ran))
    peers = list(dict.fromkeys(case.rsplit(" ", 1)[0] for case in ran))
    figure, axis = plt.subplots(figsize=(11, 4))
    width = 0.85 / len(peers)
    colours = plt.get_cmap("tab10")
    for number, peer in enumerate(peers):
        for place, workload in enumerate(workloads):
            case = f"{peer} {workload}"
            if case in ran:
                value, errors = table.value(case, metric), table.errors(case, metric)
                x, label = place + number * width, peer if place == 0 else None
                bar = {"yerr": [[errors[0]], [errors[1]]], "color": colours(number % 10), "capsize": 1}
                axis.bar(x, value, width * 0.9, label=label, **bar)
    axis.set_xticks(np.arange(len(workloads)) + 0.4, workloads, fontsize=8)
    axis.axhline(1.0, color="black", linewidth=0.6)
    axis.set(ylabel="first token / own cold run", ylim=(0, None))
    axis.legend(fontsize=7, ncols=4)
    figure.suptitle("Each against its own cold run", fontsize=10)
    return figure


def _first_with(table: Table, case: str, metric: str) -> Table | None:
    """The first model's rows that have a figure."""
    return next((part for part in table.by_model().values() if part.has(case, metric)), None)


def _decoded(part: Table) -> list[str]:
    return [case for case in part.cases if re.fullmatch(r"decode, \d+", case)]


DRAWINGS = {
    "speed": draw_targets,
    "speed-reuse": draw_reuse,
    "speed-curve": draw_curve,
    "speed-growth": draw_growth,
    "speed-memory": draw_memory,
    "speed-micro": draw_micro,
    "peers": draw_peers,
}
