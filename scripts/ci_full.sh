#!/usr/bin/env bash
# Everything that is too slow for .ci/run: the quick tier, the tests marked slow, a soak, a smoke subset under the oldest
# and the newest transformers that setup.py allows and under newer Pythons, the cache's interface under versions between.
# Each has a virtual environment of its own under .venvs/. A Python that is not at hand is named and left out.
# Exits non-zero if any step failed; the log of the whole run is .cache/ci_full.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p .cache
log=.cache/ci_full.log
: >"$log"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # see test.sh
parallel=(-n auto --maxprocesses 4 --dist loadfile)
smoke=(
    tests/test_generate.py tests/test_exact.py tests/test_oracles.py tests/test_modes.py tests/test_devices.py
    tests/test_quantised.py tests/test_compile.py tests/test_capability.py tests/test_regimes.py
)
cache_api=(tests/test_cache_api.py tests/test_exact.py tests/test_modes.py)
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

tests_with() { # tests_with FOLDER PIN TESTS...: in .venvs/FOLDER, made with $PYTHON if that is set
    local venv=".venvs/$1" pin="$2"
    shift 2
    rm -f "$venv/.setup-stamp" # what is newest changes without setup.py changing
    VENV="$venv" scripts/setup_env.sh --upgrade "$pin" || return 1
    "$venv/bin/python" -VV || return 1
    "$venv/bin/python" -c 'import transformers; print("transformers", transformers.__version__)' || return 1
    "$venv/bin/python" -m pytest "${parallel[@]}" -m "not slow" "$@"
}

python_of() { # python_of 3.12: a Python of that version that starts, from PATH or from pyenv where there is one
    local candidate
    for candidate in "python$1" "$(pyenv root 2>/dev/null)"/versions/"$1".*/bin/python; do
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

step "quick tier" scripts/test.sh
step "slow tests" .venv/bin/python -m pytest "${parallel[@]}" -m slow
step "soak, two minutes" .venv/bin/python -m scripts.soak --hours 0.033
step "oldest transformers" tests_with transformers-oldest "transformers==5.17.0" "${smoke[@]}"
step "newest transformers" tests_with transformers-newest "transformers>=5.17,<6" "${smoke[@]}"
for version in 5.20.0 5.23.0; do
    pin="transformers==$version"
    step "cache interface of $pin" tests_with "transformers-$version" "$pin" "${cache_api[@]}"
done
for version in 3.12 3.13; do
    if python="$(python_of "$version")"; then
        PYTHON="$python" step "Python $version" tests_with "python-$version" "transformers>=5.17,<6" "${smoke[@]}"
    else
        echo "=== Python $version: not at hand, left out" | tee -a "$log"
    fi
done

if [ "${#failed[@]}" -gt 0 ]; then
    printf 'ci_full.sh: failed: %s\n' "${failed[@]}" | tee -a "$log"
    exit 1
fi
echo "ci_full.sh: all steps passed" | tee -a "$log"
