"""
Speed and memory, part by part, into `speed.csv` (SmolLM2-135M-Instruct; `--model gemma` is gemma-3-270m, which comes
under the Gemma Terms of Use: scripts/gemma.py). Run it alone on the machine.

| part | question |
|---|---|
| `limit` | how close is the first token to what transformers needs for just the rows that ran |
| `rag`, `rag-small`, `rag4k` | 8, 8 with a small store, 20 of 40 passages in ever new orders; does the gain last |
| `curve` | time to first token and KL at 4K tokens by repair fraction |
| `system`, `chat`, `edited`, `nothing` | the other workloads, the same columns |
| `growth` | total latency at 1K, 2K, 4K tokens of which 90 % are stored |
| `decode` | time per generated token against DynamicCache |
| `own` | the package's own time where there is nothing to reuse |
| `bytes`, `ten`, `peak` | stored bytes, ten conversations in the bytes of five, memory of a hit |
| `interleaved`, `batch` | ten conversations in turn; batches of 1, 2, 4, 8 |
| `threads` | lookups and plans of 1, 2 and 8 threads on one store; whole calls |
| `micro`, `blocks` | without a model: lookup, plan, materialise, commit by size; block sizes |

    python -m benchmarks.speed --part limit
    python -m benchmarks.speed --part decode --model gemma --dtype bfloat16
    python -m benchmarks.speed --part rag --n 1 --output .cache/look
"""

import importlib
import os

from benchmarks.common import parse
from benchmarks.speed_runs import SpeedOptions, setting
from hf_suffix_cache import building

PARTS = {  # part: module of this package and function in it; those of the last three bring their own model or none
    "limit": ("speed_limit", "measure"),
    "rag": ("speed_reuse", "rag"),
    "rag-small": ("speed_reuse", "rag_small"),
    "rag4k": ("speed_reuse", "rag4k"),
    "curve": ("speed_curve", "measure"),
    "system": ("speed_reuse", "system"),
    "chat": ("speed_reuse", "chat"),
    "edited": ("speed_reuse", "edited"),
    "nothing": ("speed_reuse", "nothing"),
    "growth": ("speed_growth", "growth"),
    "decode": ("speed_growth", "decode"),
    "own": ("speed_growth", "own_time"),
    "bytes": ("speed_memory", "stored_bytes"),
    "ten": ("speed_memory", "ten_conversations"),
    "peak": ("speed_memory", "peaks"),
    "interleaved": ("speed_together", "interleaved"),
    "batch": ("speed_together", "batches"),
    "threads": ("speed_threads", "measure"),
    "micro": ("speed_micro", "measure"),
    "blocks": ("speed_micro", "block_sizes"),
}
WITHOUT_MODEL = ("threads", "micro", "blocks")


def main() -> None:
    options = parse(SpeedOptions, __doc__)
    if options.part not in PARTS:
        raise SystemExit(f"--part must be one of {', '.join(PARTS)}, got {options.part!r}.")
    if os.environ.get("HF_SUFFIX_CACHE_KERNELS") != "off":
        building.build()  # never on a request's path, so never inside what is measured
    print("kernels:", ", ".join(f"{name}: {state}" for name, state in building.status().items()))
    module, function = PARTS[options.part]
    measure = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    measure(options if options.part in WITHOUT_MODEL else setting(options))


if __name__ == "__main__":
    main()
