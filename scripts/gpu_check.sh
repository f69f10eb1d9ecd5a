#!/usr/bin/env bash
# Builds, checks and times everything that is made for GPUs, on one card, in under 5 minutes, and writes
# benchmarks/results/gpu.csv. Arguments go to `python -m benchmarks.gpu_check`:
#
#   scripts/gpu_check.sh
#   scripts/gpu_check.sh --output "$OUT"               # the CSV elsewhere
#   PYTHON=/path/to/python scripts/gpu_check.sh        # a Python whose torch has CUDA
#   WHEELS=/path/to/wheels scripts/gpu_check.sh        # where what is missing lies, on a machine without an index
#
# Status 1: a check failed. Status 2: there is nothing to run it on. What only lacks a library is named "not run".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

find_python() { # the first whose torch has CUDA
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} .venv/bin/python python3 python; do
        if "$candidate" -c 'import torch; raise SystemExit(torch.version.cuda is None)' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

want() { # want MODULE REQUIREMENT...: installed unless it is there
    local module="$1"
    shift
    "$python" -c "import $module" >/dev/null 2>&1 && return
    "$python" -m pip install -q ${WHEELS:+--no-index --find-links "$WHEELS"} "$@"
}

if ! python="$(find_python)"; then
    echo "gpu_check.sh: no Python whose torch is built for CUDA (PYTHON=... names one)." >&2
    exit 2
fi
if ! want transformers 'transformers>=5.17,<6' accelerate safetensors; then
    echo "gpu_check.sh: transformers is not installed and can't be (WHEELS=... names a folder of wheels)." >&2
    exit 2
fi
want ninja ninja || echo "gpu_check.sh: no ninja: kernels can't be built, their parts are not run."
want filelock filelock || echo "gpu_check.sh: no filelock: kernels can't be built, their parts are not run."
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH" # a virtual environment's ninja

"$python" - <<'END'
import importlib, platform, shutil, subprocess, torch
print("Python", platform.python_version(), "| torch", torch.__version__, "| CUDA", torch.version.cuda)
for name in ("transformers", "accelerate", "flash_attn", "ninja", "filelock", "pytest", "hypothesis"):
    try:
        print(name, getattr(importlib.import_module(name), "__version__", "is there"))
    except Exception as error:
        print(name, "is not there:", error)
nvcc = shutil.which("nvcc")
print(subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.strip() if nvcc else "no nvcc on PATH")
END

status=0
"$python" -m benchmarks.gpu_check "$@" || status=$?
if [ "$status" -eq 2 ]; then
    exit 2
fi
# the tests that are marked for GPUs, but for those that are the check above again
if "$python" -c 'import pytest, hypothesis' >/dev/null 2>&1; then
    timeout 120 "$python" -m pytest -q -p no:cacheprovider -m gpu -k 'not test_part_on_a_card' tests || status=1
else
    echo "tests marked gpu: not run (pytest and hypothesis are not installed)"
fi
exit "$status"
