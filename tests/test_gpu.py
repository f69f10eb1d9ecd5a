"""
What runs on a GPU: that it compiles without one, and what it gives on one.

Kernels compile with plain nvcc where that is at hand. `rows.cu` also runs on the CPU, thread by thread, through a
stand-in of CUDA's runtime (`cuda_shim/`). Tests marked `gpu` need a card; `scripts/gpu_check.sh` runs and times them.
"""

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import flash_shim
from benchmarks import gpu_check, gpu_models
from benchmarks.common import read_rows
from hf_suffix_cache import building, flash
from hf_suffix_cache.attention import attention_configs
from hf_suffix_cache.store import gather
from test_flash import SHIM, Stock, upper_left
from test_gather import DTYPES, PICKED, ROTATIONS, SHIFTS, check, fill, frequencies_of, make_pool

SOURCES = sorted(building.SOURCES.glob("*.cu"))
CUDA_SHIM = Path(__file__).parent / "cuda_shim"


# -- compiling --------------------------------------------------------------------------------------------------------


def test_kernels_include_no_torch_headers():
    """With them a kernel takes minutes to compile, and can't be where torch has no CUDA."""
    assert {path.name for path in SOURCES} >= {"lookup.cu", "rows.cu"}
    for path in sorted(building.SOURCES.iterdir()):
        included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(), re.M)
        assert included, path.name
        assert not [name for name in included if re.match(r"(torch|ATen|c10|pybind11|Python\.h)", name)], path.name


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_plain_nvcc_compiles_kernels(path, architecture, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    command = [nvcc, "-std=c++17", *building.CUDA_FLAGS, f"-arch={architecture}", "--shared", "-Xcompiler", "-fPIC"]
    command += ["-Xptxas", "-v", "-o", str(tmp_path / "kernel.so"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    spilled = re.findall(r"(\d+) bytes spill", done.stderr)
    assert spilled and set(spilled) == {"0"}
    library = ctypes.CDLL(str(tmp_path / "kernel.so"))  # loads without a driver; its functions are C's
    if path.name == "rows.cu":
        assert library.rows_copy


# -- rows.cu on the CPU -----------------------------------------------------------------------------------------------


def build_on_cpu(source: Path, folder: Path) -> ctypes.CDLL:
    """A .cu file by the C++ compiler, its threads one after the other."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on PATH")
    target = folder / f"{source.stem}.so"
    command = [compiler, "-x", "c++", "-std=c++17", "-O1", "-ffp-contract=off", "-fsanitize=alignment", "-fPIC"]
    command += ["-shared", f"-I{CUDA_SHIM}", "-o", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


class AsOnGPU:
    """`rows_copy` as `gather` calls it for the CPU, put into the form of `rows.cu`: ends for lengths, a stream."""

    def __init__(self, function):
        function.argtypes, function.restype = [ctypes.c_int64] * gather.ARGUMENTS, ctypes.c_int64
        self.function, self.calls, self.argtypes = function, 0, function.argtypes

    def __call__(self, *arguments):
        arguments = list(arguments)
        runs, length = arguments[10], ctypes.cast(arguments[13], ctypes.POINTER(ctypes.c_int64))
        ends = np.ctypeslib.as_array(length, (runs,)).cumsum()
        arguments[13], arguments[20] = ends.ctypes.data, 0
        self.calls += 1
        return self.function(*arguments)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return build_on_cpu(building.SOURCES / "rows.cu", tmp_path_factory.mktemp("rows"))


@pytest.fixture
def through_cuda_source(emulated, monkeypatch):
    """`gather` calls the CUDA source, run on the CPU."""
    function = AsOnGPU(emulated.rows_copy)
    monkeypatch.setattr(gather, "library", lambda name, device: SimpleNamespace(rows_copy=function))
    return function


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_source_copies_rows_to_the_bit(through_cuda_source, capfd, dtype, rotation):
    spec, random = ROTATIONS[rotation], np.random.default_rng(2)
    for shifting, picking in itertools.product(SHIFTS.values(), PICKED.values()):
        pool, (source, _) = make_pool(dtype, rotation)
        rows, target = picking(random), pool.allocate(96)
        fill(target.slab, 5)
        check(pool, source, target, 0, rows, np.arange(len(rows)) + 6, shifting(rows, random), frequencies_of(spec))
    assert through_cuda_source.calls >= 16
    assert "misaligned" not in capfd.readouterr().err  # a GPU stops at those


def test_cuda_source_refuses_what_it_cannot_turn(emulated):
    """Bytes have no rotation, and an unknown kind no size; nothing is written then."""
    function = AsOnGPU(emulated.rows_copy)
    source, goal = torch.ones(1, 1, 4, 16), torch.zeros(1, 1, 4, 16)
    lists = np.array([[0], [0], [4], [-1]])

    def call(kind, pairs):
        ends = [number for tensor in (source, goal) for number in (tensor.data_ptr(), 0, 0)]
        places = [part.ctypes.data for part in lists]
        return function(*ends, 1, 1, 16, kind, 1, *places, 0, 0, pairs, 0, 0, 0)

    assert call(4, 8) == 1 and call(9, 0) == 1
    assert not goal.any()
    assert call(0, 0) == 0 and torch.equal(goal, source)


# -- the check that runs on a card ------------------------------------------------------------------------------------


@pytest.fixture
def check_gpu(tmp_path):
    """`check_gpu(*arguments)`: exit status and `{part: state}` of `benchmarks.gpu_check`."""

    def call(*arguments):
        status = gpu_check.main(["--n", "1", "--threads", "1", "--output", str(tmp_path), *arguments])
        rows = read_rows(tmp_path / "gpu.csv")
        return status, {row["case"]: row["value"] for row in rows if row["metric"] == "state"}

    return call


@pytest.mark.parametrize("name", gpu_check.PARTS)
def test_every_part_of_the_check_runs_dry(check_gpu, kernels, monkeypatch, name):
    """On the CPU: kernels of the CPU, stand-ins for flash-attn and for transformers' use of it."""
    monkeypatch.setattr(flash, "library", lambda: SHIM)
    monkeypatch.setattr(gpu_models, "set_attention", set_attention)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", Stock())
    status, states = check_gpu("--device", "cpu", "--parts", name)
    assert status == 0
    assert states == {name: "passed"}


def set_attention(model, name: str) -> None:
    """Transformers refuses flash attention where there is no GPU."""
    for config in attention_configs(model):
        config._attn_implementation_internal = name


def test_part_without_its_library_is_not_run(check_gpu, monkeypatch, capsys):
    monkeypatch.setattr(flash, "library", lambda: None)
    monkeypatch.setattr(building, "missing_tools", lambda: ["ninja"])
    status, states = check_gpu("--device", "cpu", "--parts", "build,rows,lookup,flash")
    assert status == 0 and set(states.values()) == {"not run"}
    said = capsys.readouterr().out
    assert "no ninja to build kernels with" in said and "flash-attn is not installed" in said


def test_check_fails_on_wrong_rows_and_goes_on(check_gpu, kernels, monkeypatch):
    copied = gather._copy_compiled

    def off_by_a_bit(source, goal, *arguments):
        done = copied(source, goal, *arguments)
        goal.view(torch.int16)[0, 0, -1, 0] ^= 1
        return done

    monkeypatch.setattr(gather, "_copy_compiled", off_by_a_bit)
    status, states = check_gpu("--device", "cpu", "--parts", "rows,lookup")
    assert status == 1 and states == {"rows": "FAILED", "lookup": "passed"}


def test_check_fails_on_wrong_attention(check_gpu, monkeypatch):
    monkeypatch.setattr(flash, "library", lambda: SHIM)
    monkeypatch.setattr(flash_shim, "visible", upper_left)
    assert check_gpu("--device", "cpu", "--parts", "flash") == (1, {"flash": "FAILED"})


def test_check_fails_on_a_report_that_miscounts(check_gpu, monkeypatch):
    monkeypatch.setattr(gpu_models.Rows, "__call__", lambda *args: None)
    assert check_gpu("--device", "cpu", "--parts", "oracles") == (1, {"oracles": "FAILED"})


def test_check_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--threads", "1"]) == 2
    assert "no CUDA device" in capsys.readouterr().out
    with pytest.raises(ValueError, match="don't belong into benchmarks/results"):
        gpu_check.main(["--device", "cpu", "--threads", "1"])
    with pytest.raises(ValueError, match="`parts` must be of"):
        gpu_check.main(["--device", "cpu", "--threads", "1", "--parts", "rows,nothing"])


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA: the script would run")
def test_script_says_what_is_missing():
    script = building.SOURCES.parent.parent / "scripts" / "gpu_check.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        pytest.skip("another Python here has a torch with CUDA")
    assert done.returncode == 2 and "no Python whose torch is built for CUDA" in done.stderr


# -- on a card --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in gpu_check.PARTS if name != "speed"])
def test_part_on_a_card(check_gpu, name):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    status, states = check_gpu("--parts", name)
    assert status == 0
    if states[name] == "not run":
        pytest.skip("its library is missing: see the output")


@pytest.mark.gpu
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_on_a_card_are_those_of_a_slow_oracle_to_the_bit(kernels, monkeypatch, dtype, rotation):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert kernels("rows", "cuda") is not None
    spec, random = ROTATIONS[rotation], np.random.default_rng(3)
    for shifting, picking in zip(SHIFTS.values(), PICKED.values(), strict=True):  # the oracle launches row by row
        pool, (source, _) = make_pool(dtype, rotation, device=torch.device("cuda"))
        rows, target = picking(random), pool.allocate(96)
        fill(target.slab, 5)
        check(pool, source, target, 0, rows, np.arange(len(rows)) + 6, shifting(rows, random), frequencies_of(spec))
