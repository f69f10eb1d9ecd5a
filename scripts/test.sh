#!/usr/bin/env bash
# Sets up and passes the tests: the quick tier, the notebook included. Arguments go to pytest:
#
#   scripts/test.sh                      # the quick tier
#   scripts/test.sh tests/test_index.py  # some of it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 # no test may reach for a model hub
.venv/bin/python -m ruff check .
exec .venv/bin/python -m pytest "$@"
