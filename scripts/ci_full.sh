#!/usr/bin/env bash
# Everything that is too slow for .ci/run: the quick tier, the tests marked slow, and a smoke subset under the oldest and
# the newest transformers that setup.py allows, each in a virtual environment of its own under .venvs/.
# Exits non-zero if any step failed; the log of the whole run is .cache/ci_full.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p .cache
log=.cache/ci_full.log
: >"$log"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
smoke=(tests/test_generate.py tests/test_exact.py tests/test_oracles.py)
failed=()

step() { # step NAME COMMAND...: runs on after a failure, so that one log shows all of them
    local name="$1"
    shift
    echo "=== $name: $*" | tee -a "$log"
    if ! "$@" 2>&1 | tee -a "$log"; then
        failed+=("$name")
        echo "=== $name FAILED" | tee -a "$log"
    fi
}

smoke_with() { # smoke_with FOLDER PIN
    local venv=".venvs/$1"
    rm -f "$venv/.setup-stamp" # what is newest changes without setup.py changing
    VENV="$venv" scripts/setup_env.sh --upgrade "$2" || return 1
    "$venv/bin/python" -c 'import transformers; print("transformers", transformers.__version__)' || return 1
    "$venv/bin/python" -m pytest -m "not slow" "${smoke[@]}"
}

step "quick tier" scripts/test.sh
step "slow tests" .venv/bin/python -m pytest -m slow
step "oldest transformers" smoke_with transformers-oldest "transformers==5.17.0"
step "newest transformers" smoke_with transformers-newest "transformers>=5.17,<6"

if [ "${#failed[@]}" -gt 0 ]; then
    printf 'ci_full.sh: failed: %s\n' "${failed[@]}" | tee -a "$log"
    exit 1
fi
echo "ci_full.sh: all steps passed" | tee -a "$log"
