#!/usr/bin/env bash
# Sets up and passes the tests: the quick tier, the notebook included. Arguments go to pytest:
#
#   scripts/test.sh                      # the quick tier
#   scripts/test.sh tests/test_index.py  # some of it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 # no test may reach for a model hub
# a process for each core, each with one thread: tiny models gain nothing from more, and threads of two processes that
# wait for one another cost 10 times their work
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/python -m ruff check .
exec .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile "$@"
