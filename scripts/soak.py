"""
Mixed work on small stores for a long time, by many threads, with the answers checked against transformers' own at
random (see benchmarks/soak.py). Exits non-zero on any wrong answer, leak between sessions, reference that nothing
explains, exception, or memory that grows.

    python -m scripts.soak --hours 0.033                                    # two minutes
    python -m scripts.soak --hours 1 --output benchmarks/results

What it writes to the output folder: `soak.csv` (the figures), `soak.png`, `soak.json` and `soak-samples.csv`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # started as a file it does not find the checkout

from benchmarks.common import Options, Results, parse  # noqa: E402


@dataclass
class SoakOptions(Options):
    """`hours`: how long it works; `workers`: how many threads do. `n` is not used."""

    hours: float = 0.033
    workers: int = 8
    threads: int = 1
    output: str = ".cache/soak"


def main() -> None:
    options = parse(SoakOptions, __doc__)
    from benchmarks.soak import Soak
    from benchmarks.soak_report import Record

    total = 3600 * options.hours
    soak = Soak(options.workers, options.seed)
    record = Record(soak, total)
    every, inspection, telling = max(0.5, min(5.0, total / 120)), min(60.0, total / 6), min(60.0, total / 6)
    inspected = told = 0.0
    soak.start()
    try:
        while record.seconds < total and len(soak.faults) < 50:
            soak.stopping.wait(every)
            now = record.sample()
            if now.seconds - inspected > inspection:
                soak.inspect()
                inspected = now.seconds
            if now.seconds - told > telling:
                told = now.seconds
                print(
                    f"{now.seconds / 60:6.1f} min: {now.requests:,} requests, {now.hits:,} hits, {now.evictions:,} "
                    f"evictions, {now.rss / 2**20:.0f} MB, P50 {1000 * now.p50:.0f} ms, P99 {1000 * now.p99:.0f} ms, "
                    f"{soak.counts['compared']:,} answers compared, {len(soak.faults)} faults",
                    flush=True,
                )
    except KeyboardInterrupt:
        print("interrupted: what was seen until now counts")
    soak.stop()
    record.sample()
    record.judge()
    record.write(Results("soak", "tiny llama, mistral, qwen3 and gpt2", "float32", options))
    if soak.faults:
        raise SystemExit(f"{len(soak.faults)} faults; the first one: {': '.join(soak.faults[0])}")
    print("no fault")


if __name__ == "__main__":
    main()
