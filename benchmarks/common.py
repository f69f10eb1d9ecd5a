"""What all benchmarks share: options from a dataclass, rows of one CSV schema, pairs of timings that alternate."""

import argparse
import contextlib
import csv
import dataclasses
import datetime
import gc
import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    "benchmark case metric value unit n low high command model dtype threads machine python torch transformers "
    "package date note"
).split()
KEY = ("benchmark", "model", "dtype", "case", "metric")
MODELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma": "gemma-3-270m"}


@dataclass
class Options:
    """
    Options that every benchmark has; a benchmark adds its own by subclassing.

    Args:
        n (`int`): How many prompts, pairs or conversations. A small number is a quick look.
        threads (`int`): CPU threads of torch.
        seed (`int`): Seed of everything that is drawn.
        output (`str`): Folder of the CSV; empty for `benchmarks/results`. Quick looks should go elsewhere.
    """

    n: int = 30
    threads: int = 2
    seed: int = 0
    output: str = ""


def parse(options_class: type, module_doc: str, argv: list[str] | None = None):
    """
    Fill `options_class` from the command line, set the threads, and print the configuration. A `bool` becomes a
    `--name/--no-name` switch, everything else `--name VALUE`.
    """
    parser = argparse.ArgumentParser(
        description=module_doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for item in dataclasses.fields(options_class):
        name = "--" + item.name.replace("_", "-")
        if isinstance(item.default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=item.default)
        else:
            parser.add_argument(name, type=type(item.default), default=item.default, help=f"default {item.default!r}")
    options = options_class(**vars(parser.parse_args(argv)))
    torch.set_num_threads(options.threads)
    print("configuration:", ", ".join(f"{k}={v!r}" for k, v in dataclasses.asdict(options).items()))
    print("machine:", machine(), "| torch", torch.__version__, "| transformers", transformers.__version__)
    return options


def load_model(name: str, threads: int):
    """
    A model that benchmarks run on, from a package of the package index: `(model, tokenizer)` in fp32.

    Args:
        name (`str`): A key of `MODELS`. `"gemma"` comes under the Gemma Terms of Use, so it is never a default.
        threads (`int`): CPU threads of torch.
    """
    if name == "smollm2":
        from scripts.smollm2 import load
    elif name == "gemma":
        from scripts.gemma import load
    else:
        raise ValueError(f"`model` must be one of {list(MODELS)}, got {name!r}.")
    return load(threads=threads)


# -- where and with what a figure was measured ---------------------------------------------------------------------


def machine() -> str:
    """Processor model and cores (and the GPU, if there is one). No host name: the CSV is published."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{model}, {os.cpu_count()} cores{gpu}"


def package_version() -> str:
    """Version of the package and, in a checkout, the commit (`+dirty` if files differ from it)."""
    from hf_suffix_cache import __version__

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    dirty = "+dirty" if git("status", "--porcelain", "--", ":/hf_suffix_cache") else ""
    return f"{__version__} ({commit}{dirty})" if commit else __version__


def command_line() -> str:
    """The command as a reader would type it: module and options, without the folder that results go to."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    name = f"-m {spec.name}" if spec is not None else Path(sys.argv[0]).name
    options, skip = [], False
    for argument in sys.argv[1:]:
        if not skip and not argument.startswith("--output"):
            options.append(argument)
        skip = argument == "--output"
    return shlex.join(["python", *name.split(), *options])


# -- rows ----------------------------------------------------------------------------------------------------------


@dataclass
class Results:
    """
    Rows of one benchmark, written through to its CSV after every `add`, so that a broken run keeps what it has.

    Args:
        benchmark (`str`): Name of the benchmark and of the CSV.
        model (`str`), dtype (`str`): What was run.
        options (`Options`): Threads and output folder are taken from it.
    """

    benchmark: str
    model: str
    dtype: str
    options: Options
    constant: dict = field(init=False)

    def __post_init__(self):
        self.constant = {
            "benchmark": self.benchmark,
            "command": command_line(),
            "model": self.model,
            "dtype": self.dtype,
            "threads": self.options.threads,
            "machine": machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "package": package_version(),
        }

    @property
    def path(self) -> Path:
        """The CSV file."""
        return Path(self.options.output or RESULTS) / f"{self.benchmark}.csv"

    def add(self, case: str, metric: str, value: float, unit: str, n: int, low="", high="", note="") -> None:
        """
        Put one figure into the CSV and print it. `low` and `high` are the ends of a 95 % interval, or the smallest
        and the largest value; `note` says which, and what the target is.
        """
        row = {"case": case, "metric": metric, "value": _text(value), "unit": unit, "n": n, "note": note}
        row |= {"low": _text(low), "high": _text(high), "date": datetime.date.today().isoformat()}
        replace_rows(self.path, [row | self.constant])
        interval = f"  [{row['low']}, {row['high']}]" if row["low"] or row["high"] else ""
        print(f"{case:>28} | {metric:<38} {row['value']:>10} {unit}{interval}  n={n}  {note}", flush=True)


def replace_rows(path: Path, rows: Iterable[dict]) -> None:
    """Append `rows` to the CSV at `path`; a row that agrees in all of `KEY` gives way in place."""
    table = {tuple(str(row[name]) for name in KEY): row for row in read_rows(path)}
    for row in rows:
        table[tuple(str(row[name]) for name in KEY)] = row
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table.values())
    partial.replace(path)


def read_rows(path: Path) -> list[dict]:
    """Rows of the CSV at `path` as dicts of strings; an absent file has none."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@dataclass
class Journal:
    """
    What a long benchmark has finished, one JSON object a line, so that a broken or repeated run goes on where it was.

    Args:
        path (`Path`): The file. A last line that a kill cut short is left out.
        settings (`dict`): What the finished parts depend on. The package's own source is part of it, so nothing that
            other code measured is taken for this one's.
    """

    path: Path
    settings: dict
    done: dict[str, dict] = field(init=False, default_factory=dict)

    def __post_init__(self):
        source = hashlib.sha256()
        for file in sorted((RESULTS.parent.parent / "hf_suffix_cache").rglob("*.[pc]*")):
            if file.suffix != ".pyc":
                source.update(file.read_bytes())
        settings = self.settings | {"source": source.hexdigest(), "torch": torch.__version__}
        self.settings = settings | {"transformers": transformers.__version__, "machine": machine()}
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                self.done[entry["key"]] = entry["record"]

    def record(self, part: object, measure: Callable[[], dict]) -> dict:
        """What `measure` gave for `part` (anything that JSON can hold), now or in an earlier run."""
        text = json.dumps([self.settings, part], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self.done:
            self.done[key] = measure()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "record": self.done[key]}) + "\n")
        return self.done[key]


def _text(value) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


# -- timing --------------------------------------------------------------------------------------------------------


def seconds(function: Callable[[], object]) -> float:
    """Wall-clock seconds of one call, with the collector off and the device idle at both ends."""
    gc.collect()
    gc.disable()
    try:
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        return time.perf_counter() - start
    finally:
        gc.enable()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Paired:
    """Timings of two ways of doing the same work, in seconds, pair by pair: `first[i]` and `second[i]`."""

    first: np.ndarray
    second: np.ndarray

    @property
    def ratio(self) -> float:
        """Median of `first` over median of `second`."""
        return float(np.median(self.first) / np.median(self.second))

    def interval(self, resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
        """95 % bootstrap interval of `ratio`: whole pairs are drawn, so what hit both of a pair stays together."""
        drawn = np.random.default_rng(seed).integers(0, len(self.first), (resamples, len(self.first)))
        ratios = np.median(self.first[drawn], axis=1) / np.median(self.second[drawn], axis=1)
        low, high = np.percentile(ratios, [2.5, 97.5])
        return float(low), float(high)


def alternate(first: Callable[[int], float], second: Callable[[int], float], pairs: Iterable[int]) -> Paired:
    """
    Run both ways for every index in `pairs`; which one comes first changes from pair to pair, so that drift and
    caches favour neither. Each callable takes the index and returns its own seconds (set-up stays outside of them).
    """
    taken: tuple[list, list] = ([], [])
    for count, index in enumerate(pairs):
        for way in (0, 1) if count % 2 == 0 else (1, 0):
            taken[way].append((first, second)[way](index))
    return Paired(np.array(taken[0]), np.array(taken[1]))


def bootstrap_mean(values, resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of `values`."""
    return _bootstrap(values, np.mean, resamples, seed)


def bootstrap_median(values, resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the median of `values`."""
    return _bootstrap(values, np.median, resamples, seed)


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a share. Unlike a bootstrap it does not shrink to a point where all or none succeeded."""
    z, share = 1.96, successes / n
    middle = share + z * z / (2 * n)
    reach = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = ((middle + sign * reach) / (1 + z * z / n) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def _bootstrap(values, statistic: Callable, resamples: int, seed: int) -> tuple[float, float]:
    values = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    low, high = np.percentile(statistic(values[drawn], axis=1), [2.5, 97.5])
    return float(low), float(high)
