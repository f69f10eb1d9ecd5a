"""
Whether everything that can go wrong ends in a right answer, on a tiny model.

`machine`: drawn steps of all kinds (calls, sessions, registering, expiry, eviction, clearing, compaction, saving,
loading, crashes, changes of weights and adapters) against plain lists of what each scope has seen; see
tests/machine_world.py. What must be: no step in which what was served, answered or referred to is not explained.

`inject`: every allocation, copy and write fails once, in every scenario; see tests/fault_sites.py. What must be: the
right answer or the documented error, right answers from then on, and nothing that stays in use.

    python -m benchmarks.faults --part machine              # 20 seeds of 5,000 steps: about 45 minutes on one core
    python -m benchmarks.faults --part inject
"""

import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.common import Journal, Options, Results, parse

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the world and the sites of the tests

from machine_world import ROW, World, draw_step  # noqa: E402
from tiny_models import forget  # noqa: E402

KINDS = (
    dict(max_bytes=64 << 20),
    dict(max_bytes=420 * ROW, block_size=4, keep_conversations=1),
    dict(max_bytes=900 * ROW, store_dtype="int8", keep_conversations=1, block_size=4),
    dict(max_bytes=300 * ROW, eviction="lru", consensus=False, compact_waste=None, keep_conversations=0),
)
COUNTED = (
    "compared",
    "exact tokens",
    "approximate tokens",
    "wanted tokens",
    "loads",
    "crashes",
    "stopped",
    "differences above 1e-4",
)


@dataclass
class FaultsOptions(Options):
    """`part`: `machine` or `inject`; `n`, `steps`: seeds of the machine, and of each; `journal`: of finished seeds."""

    n: int = 20
    threads: int = 1
    part: str = "machine"
    steps: int = 5000
    journal: str = ".cache/faults.jsonl"


def main() -> None:
    options = parse(FaultsOptions, __doc__)
    {"machine": machine, "inject": inject}[options.part](options)


def machine(options: FaultsOptions) -> None:
    """All seeds; a finished one is not run again."""
    journal = Journal(Path(options.journal), {"part": "machine", "steps": options.steps})
    results = Results("faults", "tiny llama, 2 adapters", "float32", options)
    total: Counter = Counter()
    for seed in tqdm(range(options.seed, options.seed + options.n), desc="seeds"):
        total.update(journal.record(seed, lambda seed=seed: _seed(seed, options.steps)))
        total["seeds"] += 1
    for name in ("faults", "steps", "seeds", *COUNTED):
        note = "target 0" if name == "faults" else "of 4 kinds of stores in turn" if name == "seeds" else ""
        results.add("state machine", name, total[name], "count", total["steps"], note=note)


def _seed(seed: int, steps: int) -> dict:
    """The counts of one seed; a fault ends it."""
    random, faults, done = np.random.default_rng(seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "store", **KINDS[seed % len(KINDS)])
        for _ in range(steps):
            try:
                draw_step(world, random)
            except Exception:
                traceback.print_exc()
                print(f"seed {seed}, step {done}", flush=True)
                faults += 1
                break
            done += 1
        forget(world.model)
    return {"faults": faults, "steps": done, **{name: world.counts.get(name, 0) for name in COUNTED}}


def inject(options: FaultsOptions) -> None:
    """Every site of every scenario."""
    from fault_sites import KINDS_OF_FAULT, SCENARIOS, Sites

    def run(name: str, kind: str) -> dict:
        found: dict = {"faults": 0, "cases": 0, "reached": 0, "places": []}
        with tempfile.TemporaryDirectory() as folder:
            for case in Sites(name, kind, Path(folder)).cases():
                if case.place == "not reached":
                    continue
                found["cases"] += 1
                found["reached"] += case.raised
                found["places"] = sorted({*found["places"], case.place})
                if case.fault is not None:
                    found["faults"] += 1
                    print(f"{name}, {kind}, {case.place} {case.number}: {case.fault}", flush=True)
        return found

    journal = Journal(Path(options.journal), {"part": "inject"})
    results = Results("faults", "tiny llama", "float32", options)
    total: Counter = Counter()
    places: dict[str, set] = {name: set() for name in SCENARIOS}
    # all scenarios of one kind, then of the next: the first kind finds what is broken; the longest scenario last
    pairs = [(name, kind) for kind in KINDS_OF_FAULT for name in SCENARIOS]
    for name, kind in tqdm(sorted(pairs, key=lambda pair: pair[0] == "first use"), desc="scenarios"):
        found = journal.record(f"{name}, {kind}", lambda name=name, kind=kind: run(name, kind))
        places[name].update(found["places"])
        for count in ("faults", "cases", "reached"):
            total[name, count] += found[count]
            total[count] += found[count]
    for name in SCENARIOS:
        cases, note = total[name, "cases"], f"target 0; {', '.join(sorted(places[name]))}"
        results.add(f"injected, {name}", "faults", total[name, "faults"], "count", cases, note=note)
        results.add(f"injected, {name}", "places", len(places[name]), "count", cases)
    results.add("injected", "places", len(set().union(*places.values())), "count", total["cases"])
    results.add("injected", "faults", total["faults"], "count", total["cases"], note="target 0")
    note = "those of the model's own run, interrupts, and those of managing a store"
    results.add("injected", "reached the caller", total["reached"], "count", total["cases"], note=note)


if __name__ == "__main__":
    main()
