"""
What a model's first use costs: its rows are measured by a few forwards of 12 tokens (see `measurement.py`), once for
each state of a model (SmolLM2-135M-Instruct; `--model gemma` adds its rows beside). Run it alone on the machine.

    python -m benchmarks.first_use
"""

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.common import MODELS, Options, Results, load_model, parse
from hf_suffix_cache.measurement import measure


@dataclass
class FirstUseOptions(Options):
    """`n` measurements in each dtype; `model`: smollm2 or gemma."""

    n: int = 10
    model: str = "smollm2"


def main() -> None:
    options = parse(FirstUseOptions, __doc__)
    model, _ = load_model(options.model, options.threads)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        results = Results("first_use", MODELS[options.model], str(dtype).removeprefix("torch."), options)
        measure(model)  # what torch sets up at its first forward is not ours
        taken = [measure(model) for _ in range(options.n)]
        seconds = np.array([capability.seconds for capability in taken])
        case, capability = f"{options.model} {results.dtype}", taken[0]
        low, high = np.percentile(seconds, [25, 75])
        note = f"median, with quartiles; found: {capability.kind}, {capability.layout}"
        results.add(case, "measurement at first use", np.median(seconds), "s", options.n, low, high, note)
        results.add(case, "rows run by it", capability.rows, "rows", options.n)


if __name__ == "__main__":
    main()
