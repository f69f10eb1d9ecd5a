#!/usr/bin/env bash
# Sets up and runs the demo on SmolLM2-135M-Instruct. Arguments go to it: scripts/demo.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 # the weights come from an installed package, never from a hub
exec .venv/bin/python -m scripts.demo "$@"
