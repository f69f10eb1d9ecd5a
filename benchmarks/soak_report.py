"""What a soak has seen over time: samples, the figures of its first and last ten minutes, and its plot."""

import csv
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.common import Results

WINDOW = 600.0  # seconds at each end whose latencies are compared; a third of a run that is shorter than three of them
GROWTH = 0.15  # of the memory after the first tenth: what may come on top of it
GROWTH_BYTES = 48 << 20  # or this
MAX_KL = 0.2  # of a wrong answer's: the median of approximate ones
MUST_HAPPEN = (  # else a run without a fault says nothing
    "hits",
    "moved tokens",
    "compared",
    "guess",
    "look_at_rows",
    "batch",
    "register",
    "clear",
    "compact",
    "save_and_load",
    "change_weights",
    "jump",
    "inspections",
    "tokens served after a load",
)


@dataclass
class Sample:
    """One moment: seconds since the start, resident bytes, totals until then, and latencies since the last one."""

    seconds: float
    rss: int
    requests: int
    hits: int
    evictions: int
    expirations: int
    bytes_used: int
    p50: float
    p99: float


class Record:
    """
    Samples of a soak.

    Args:
        soak (`Soak`): What runs.
        total (`float`): Seconds that it will take.
    """

    def __init__(self, soak, total: float):
        self.soak = soak
        self.window = min(WINDOW, total / 3)
        self.samples: list[Sample] = []
        self.latencies: tuple[list, list] = ([], [])  # of the first window and the last one
        self._total = total
        self._started = time.monotonic()
        self._process = psutil.Process()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def sample(self) -> Sample:
        """Take a sample."""
        soak, taken = self.soak, self.soak.take_latencies()
        for ended, seconds in taken:
            after = ended - self._started
            if after < self.window:
                self.latencies[0].append(seconds)
            if after > self._total - self.window:
                self.latencies[1].append(seconds)
        seconds = [seconds for _, seconds in taken] or [float("nan")]
        stats = [cache.stats for cache in soak.caches]
        found = Sample(
            self.seconds,
            self._process.memory_info().rss,
            soak.counts["requests"],
            soak.counts["hits"],
            sum(each.evictions for each in stats),
            sum(each.expirations for each in stats),
            sum(each.bytes_used for each in stats),
            *np.percentile(seconds, [50, 99]).tolist(),
        )
        self.samples.append(found)
        return found

    # -- afterwards ---------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Memory that grows is a fault, and so is a run in which something has never happened."""
        warm, last = self._rss()
        if last > warm + max(GROWTH * warm, GROWTH_BYTES):
            self.soak.fault("memory", f"{warm / 2**20:.0f} MB after the first tenth, {last / 2**20:.0f} MB at the end")
        missing = [name for name in MUST_HAPPEN if not self.soak.counts[name]]
        missing += [name for name in ("evictions", "expirations") if not getattr(self.samples[-1], name)]
        if missing:
            self.soak.fault("vacuous", f"never happened: {', '.join(missing)}")
        nats, control = self._divergence
        if len(self.soak.divergences) > 50 and not nats < MAX_KL * control:
            self.soak.fault("wrong", f"approximate answers are {nats:.2f} nats off, wrong ones {control:.2f}")
        if self.soak.counts["differences above 1e-4"] > 1 + 0.002 * self.soak.counts["compared"]:
            self.soak.fault("wrong", "too many answers are further than 1e-4 from transformers' own")
        few = self.soak.counts["equally likely tokens"] <= 1 + 0.002 * self.soak.counts["compared"]
        if not few:
            self.soak.fault("wrong", f"{self.soak.counts['equally likely tokens']} answers part from the right ones")

    @property
    def _divergence(self) -> tuple[float, float]:
        """Median KL of approximate answers to the full prefill's, and of the same with all tokens mixed up."""
        return tuple(np.median(self.soak.divergences or [(np.nan, np.nan)], axis=0).tolist())

    def _rss(self) -> tuple[float, float]:
        """Resident bytes once everything has happened for the first time, and at the end; medians of a tenth each."""
        tenth = max(1, len(self.samples) // 10)
        parts = self.samples[tenth : 2 * tenth] or self.samples[:1], self.samples[-tenth:]
        return tuple(float(np.median([sample.rss for sample in part])) for part in parts)

    def summary(self) -> dict:
        """All figures."""
        soak, last = self.soak, self.samples[-1]
        kinds = ("wrong", "leak", "accounting", "exception", "warning", "memory", "vacuous")
        found = [kind for kind, _ in soak.faults]
        first, end = (np.array(part or [float("nan")]) * 1000 for part in self.latencies)
        warm, at_end = self._rss()
        return {
            "seconds": last.seconds,
            "threads": len(soak.workers),
            **{f"faults, {kind}": found.count(kind) for kind in kinds},
            "requests": last.requests,
            "requests that were served something": last.hits,
            "share of prompt tokens served": soak.counts["served tokens"] / max(1, soak.counts["prompt tokens"]),
            "answers compared with transformers'": soak.counts["compared"],
            "max abs logit difference": soak.largest,
            "differences above 1e-4": soak.counts["differences above 1e-4"],
            "equally likely tokens": soak.counts["equally likely tokens"],
            "approximate answers compared": len(soak.divergences),
            "KL of those, median": self._divergence[0],
            "KL of those, control": self._divergence[1],
            "guesses of strangers": soak.counts["guess"],
            "evictions": last.evictions,
            "segments expired": last.expirations,
            "saves and loads": soak.counts["save_and_load"],
            "tokens served after a load": soak.counts["tokens served after a load"],
            "texts registered, calls": soak.counts["register"],
            "sessions cleared": soak.counts["clear"],
            "compactions": soak.counts["compact"],
            "changes of weights": soak.counts["change_weights"],
            "jumps of the clock": soak.counts["jump"],
            "settled rows": soak.counts["settled rows"],
            "inspections of the pool at rest": soak.counts["inspections"],
            "RSS at the start": self.samples[0].rss / 2**20,
            "RSS after the first tenth": warm / 2**20,
            "RSS at the end": at_end / 2**20,
            "latency P50, first window": float(np.percentile(first, 50)),
            "latency P50, last window": float(np.percentile(end, 50)),
            "latency P99, first window": float(np.percentile(first, 99)),
            "latency P99, last window": float(np.percentile(end, 99)),
        }

    def write(self, results: Results) -> None:
        """The figures into the CSV, all of them and the samples beside it, and the plot."""
        folder, figures = results.path.parent, self.summary()
        folder.mkdir(parents=True, exist_ok=True)
        case = f"{self._total / 3600:g} hours"
        for name, value in figures.items():
            unit, note = _unit(name)
            if name.startswith("latency"):
                note = f"windows of {self.window:.0f} s; each compared with the other"
            results.add(case, name, value, unit, int(figures["requests"]), note=note)
        details = {"figures": figures, "counts": dict(self.soak.counts), "faults": self.soak.faults[:100]}
        (folder / "soak.json").write_text(json.dumps(details, indent=1), encoding="utf-8")
        with (folder / "soak-samples.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(asdict(self.samples[0])))
            writer.writeheader()
            writer.writerows(map(asdict, self.samples))
        self.plot(folder / "soak.png")

    def plot(self, path: Path) -> None:
        """Memory, latency and hits over time."""
        from matplotlib import pyplot as plt

        from benchmarks.drawing import BLUE, GREY, ORANGE  # it chooses a backend that needs no screen

        minutes = [sample.seconds / 60 for sample in self.samples]
        figure, axes = plt.subplots(1, 3, figsize=(12, 3.4))
        axes[0].plot(minutes, [sample.rss / 2**20 for sample in self.samples], color=BLUE, label="resident")
        axes[0].set(ylabel="MB", title="memory of the process", ylim=(0, None))
        axes[1].plot(minutes, [1000 * sample.p50 for sample in self.samples], color=BLUE, label="P50")
        axes[1].plot(minutes, [1000 * sample.p99 for sample in self.samples], color=ORANGE, label="P99")
        axes[1].set(ylabel="ms", title="latency of a call", yscale="log")
        axes[1].legend(fontsize=8)
        for name, colour in (("requests", BLUE), ("hits", ORANGE), ("evictions", GREY)):
            axes[2].plot(minutes, [getattr(sample, name) for sample in self.samples], color=colour, label=name)
        axes[2].set(title="totals", ylim=(0, None))
        axes[2].legend(fontsize=8)
        for axis in axes:
            axis.set_xlabel("minutes")
        figure.suptitle(f"{len(self.soak.workers)} threads, {len(self.soak.faults)} faults", fontsize=10)
        figure.tight_layout()
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _unit(name: str) -> tuple[str, str]:
    """Unit of a figure, and what must be."""
    if name.startswith("faults"):
        return "faults", "target 0"
    for start, unit in (("RSS", "MB"), ("latency", "ms"), ("KL", "nats"), ("share", "share"), ("seconds", "s")):
        if name.startswith(start):
            return unit, ""
    if name.startswith("max abs"):
        return "logit", "target < 1e-4, or 3 times what transformers shows between a prompt in one piece and in two"
    return "count", ""
