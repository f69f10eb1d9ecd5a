"""
Does everything that is made for GPUs give the right answers on this one, and how fast is it?

    python -m benchmarks.gpu_check                             # on a GPU, under 5 minutes: benchmarks/results/gpu.csv
    python -m benchmarks.gpu_check --parts rows,flash
    python -m benchmarks.gpu_check --device cpu --output /tmp/dry    # a dry run: the same checks, tiny sizes

Parts, in order: `build` the kernels; the `lookup` table and the copying of `rows`, bit for bit against their
references; attention by `flash`-attn against sdpa; a tiny model's `oracles`; the same model on flash-attn; `speed` and
peak memory of a model of 1B parameters. A part that fails doesn't stop the others, but the exit status is 1. A part
whose library is missing says "not run". Status 2: there is no GPU.
"""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import gpu_kernels, gpu_models
from benchmarks.common import Options, Results, parse
from benchmarks.gpu_part import NotRun, Part

PARTS: dict[str, Callable[[Part], None]] = {
    "build": gpu_kernels.build,
    "lookup": gpu_kernels.lookup,
    "rows": gpu_kernels.rows,
    "flash": gpu_kernels.flash_attention,
    "oracles": gpu_models.oracles,
    "flash_model": gpu_models.flash_model,
    "speed": gpu_models.speed,
}


@dataclass
class GPUOptions(Options):
    """`device`: "cuda", "cuda:1", or "cpu" for a dry run; `parts`: which, by comma; all by default; `n`: pairs."""

    n: int = 5
    device: str = "cuda"
    parts: str = ",".join(PARTS)


def main(argv: list[str] | None = None) -> int:
    """Run the parts; 1 if one failed, 2 if there is nothing to run them on."""
    options = parse(GPUOptions, __doc__, argv)
    device = torch.device(options.device)
    chosen = options.parts.split(",")
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        raise ValueError(f"`parts` must be of {list(PARTS)}, got {unknown}.")
    if device.type == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        print(f"gpu_check: no CUDA device. torch {torch.__version__} is {built}. `--device cpu` is a dry run.")
        return 2
    if device.type == "cpu" and not options.output:
        raise ValueError("figures of a dry run don't belong into benchmarks/results: name another folder by `output`.")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        print(f"GPU: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    states = {name: run(name, Part(name, device, options)) for name in chosen}
    print("\n".join(["", *(f"{name:>12}: {state}" for name, state in states.items())]))
    return 1 if any(state.startswith("FAILED") for state in states.values()) else 0


def run(name: str, part: Part) -> str:
    """Run a part, write its state into the CSV, and return it in words."""
    print(f"--- {name}", flush=True)
    started = time.perf_counter()
    try:
        PARTS[name](part)
        state, note = "passed", f"{part.checked} checks"
        if not part.checked:
            state, note = "FAILED", "it checked nothing"
    except NotRun as reason:
        state, note = "not run", str(reason)
    except Exception as error:  # the other parts run all the same
        traceback.print_exc()
        state, note = "FAILED", f"{type(error).__name__}: {error}".splitlines()[0]
    took = time.perf_counter() - started
    results = Results("gpu", "", "", part.options)
    results.add(name, "state", state, "", part.checked, note=note)
    results.add(name, "took", took, "s", 1)
    return f"{state} ({note}), {took:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
