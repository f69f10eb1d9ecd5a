"""
Stores on disk: how soon one opens, what a restart keeps, and what crashes and damaged files do.

| part | question |
|---|---|
| `open` | how long does a store of `--gigabytes` take to be saved, to open, and to give its first rows (no model) |
| `restart` | are hits and plans in a new process those of the old one; how soon is its first token (SmolLM2-135M) |
| `kill` | is a store whole after `kill -9` at a random moment of a save (no model) |
| `together` | is what readers find whole while other processes save to the same folder (no model) |
| `fuzz` | what becomes of damaged and hostile files (a tiny random Llama) |
| `register` | 10,000 passages of a tiny model and 1,000 of SmolLM2-135M in bf16 go to a folder, by a killed process |

Parts `kill`, `together` and `fuzz` give counts, for which the machine may be busy. Run the others alone.

    python -m benchmarks.persistence --part all
    python -m benchmarks.persistence --part fuzz --n 40 --output .cache/look
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from tqdm import tqdm

from benchmarks.calls import ask
from benchmarks.common import MODELS, Options, Results, load_model, parse, wilson
from benchmarks.persistence_faults import fuzz, kill, together
from benchmarks.persistence_register import register
from benchmarks.persistence_stores import SMOLLM2, opened, synthetic
from benchmarks.speed_workloads import requests
from hf_suffix_cache import SuffixCache
from hf_suffix_cache.store import persistence

OPEN_TARGET = 0.2  # seconds, of 2 GB
PARTS = ("open", "restart", "kill", "together", "fuzz", "register")


@dataclass
class PersistenceOptions(Options):
    """
    `n` kills, files, opened stores or passages (0: 200, 500, 20, all); a folder for the stores, empty for one that is
    removed again; `serve` is what `restart` calls itself with in the new process.
    """

    n: int = 0
    part: str = "all"
    gigabytes: float = 2.0
    requests: int = 2
    folder: str = ""
    serve: str = ""


# -- opening --------------------------------------------------------------------------------------------------------


def open_store(options: PersistenceOptions, folder: Path) -> None:
    """Save and open a store of the demo model's shape."""
    results = Results("persistence", "SmolLM2's shape, random rows", "float32", options)
    case, n = f"{options.gigabytes:g} GB", options.n or 20
    store = synthetic(SMOLLM2, int(options.gigabytes * 2**30), text_tokens=200)
    started = time.perf_counter()
    saved = persistence.save(store, folder)
    seconds = time.perf_counter() - started
    results.add(case, "save", seconds, "s", 1, note=f"{saved.segments} segments, on the disk when it returns")
    results.add(case, "save, per second", saved.bytes_written / 2**20 / seconds, "MiB/s", 1)
    started = time.perf_counter()
    kept = persistence.save(store, folder)
    results.add(case, "save again, nothing new", time.perf_counter() - started, "s", 1)
    assert kept.bytes_written == 0
    del store
    for state in ("files in the page cache", "files not in memory"):
        taken, grown = [], []
        for _ in range(n):
            if state == "files not in memory":
                forget_pages(folder)
            before = psutil.Process().memory_info().rss
            started = time.perf_counter()
            loaded = opened(folder)
            taken.append(time.perf_counter() - started)
            grown.append(psutil.Process().memory_info().rss - before)
        note = f"median, quartiles; target <= {OPEN_TARGET} s; largest {max(taken):.4f} s"
        low, high = np.percentile(taken, [25, 75])
        results.add(case, f"open, {state}", np.median(taken), "s", n, low, high, note)
        results.add(case, f"memory that opening takes, {state}", np.median(grown) / 2**20, "MiB", n)
    started = time.perf_counter()
    shelf = loaded.wake()
    results.add(case, "first use by its model: index of all texts", time.perf_counter() - started, "s", 1)
    forget_pages(folder)
    for state in ("not in memory", "in the page cache"):
        segments = list(shelf.segments)[:10] if state == "not in memory" else list(shelf.segments)[10:20]
        if state == "in the page cache":
            for file in folder.glob("rows-*"):
                file.read_bytes()
        taken = []
        for segment in segments:
            started = time.perf_counter()
            assert shelf.pool.is_intact(segment.addresses)
            taken.append(time.perf_counter() - started)
        note = "checksum included; median, smallest and largest"
        results.add(case, f"first read of 200 rows, {state}", np.median(taken), "s", 10, min(taken), max(taken), note)


def forget_pages(folder: Path) -> None:
    """Have the system forget what it holds of the files in a folder."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# -- restarting -----------------------------------------------------------------------------------------------------


def restart(options: PersistenceOptions, folder: Path) -> None:
    """The same requests in this process, which has its rows in memory, and in a new one, which has them on disk."""
    model, tokenizer = load_model("smollm2", options.threads)
    results = Results("persistence", MODELS["smollm2"], "float32", options)
    prompts: list[list[int]] = []
    cache = SuffixCache()
    for workload in ("rag8", "chat", "system"):
        for request in tqdm(requests(tokenizer, workload, options.requests, options.seed), desc=workload):
            if request.group > 2 or request.index > 3:
                continue
            warm = request.warm or (workload == "chat" and request.index < 3)
            if warm:
                ask(model, request.prompt, 16, cache=cache)
            else:
                prompts.append(request.prompt)
    saved = cache.save(folder)
    here = serve(model, cache, prompts)
    (folder / "prompts.txt").write_text(json.dumps(prompts))
    command = [
        sys.executable,
        "-m",
        "benchmarks.persistence",
        "--serve",
        str(folder),
        "--threads",
        str(options.threads),
    ]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    there = json.loads(done.stdout.splitlines()[-1])
    n, case = len(prompts), "restart"
    note = f"{saved.segments} segments, {saved.bytes_written / 2**20:.0f} MiB; another hash seed; target: all"
    for metric, key in (("same plan", "plan"), ("same exact hits", "exact"), ("same first token", "token")):
        same = sum(a[key] == b[key] for a, b in zip(here, there["answers"], strict=True))
        results.add(case, metric, same / n, "share", n, *wilson(same, n), note=note)
    reused = sum(each["exact"] + each["moved"] for each in there["answers"])
    results.add(case, "rows served after the restart", reused / sum(map(len, prompts)), "share", n)
    for name, answers in (("rows in memory", here), ("rows on disk", there["answers"])):
        taken = [each["seconds"] for each in answers]
        results.add(
            case, f"first token, {name}", np.median(taken), "s", n, min(taken), max(taken), "with the extremes"
        )
    results.add(case, "open", there["open"], "s", 1)


def serve(model, cache, prompts: list[list[int]]) -> list[dict]:
    """What each prompt was served, and its first token; nothing is stored, so that their order plays no part."""
    answers = []
    handle = cache.using(store=False)
    for prompt in prompts:
        answer = ask(model, prompt, 1, cache=handle)
        report = handle.last_report
        plan = [[span.start, span.stop, span.kind, span.shift] for row in report.spans for span in row]
        moved = report.shifted_tokens + report.repaired_tokens
        answers.append(
            {
                "plan": plan,
                "exact": report.exact_tokens,
                "moved": moved,
                "token": answer.ids[-1],
                "seconds": report.timings["first_token"],
            }
        )
    return answers


def in_new_process(options: PersistenceOptions) -> None:
    """What the new process of `restart` does: its last line of output is JSON."""
    folder = Path(options.serve)
    model, _ = load_model("smollm2", options.threads)
    prompts = json.loads((folder / "prompts.txt").read_text())
    started = time.perf_counter()
    cache = SuffixCache.load(folder)
    seconds = time.perf_counter() - started
    print(json.dumps({"open": seconds, "answers": serve(model, cache, prompts)}))


def main() -> None:
    options = parse(PersistenceOptions, __doc__)
    torch.manual_seed(options.seed)
    if options.serve:
        return in_new_process(options)
    parts = PARTS if options.part == "all" else (options.part,)
    if not set(parts) <= set(PARTS):
        raise SystemExit(f"--part must be `all` or one of {', '.join(PARTS)}, got {options.part!r}.")
    functions = {
        "open": open_store,
        "restart": restart,
        "kill": kill,
        "together": together,
        "fuzz": fuzz,
        "register": register,
    }
    for part in parts:
        with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
            functions[part](options, Path(folder) / "store")


if __name__ == "__main__":
    main()
