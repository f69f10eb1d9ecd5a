"""Kernels are built on demand or beside the process, found again, and never in the way of a request."""

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_suffix_cache import __main__ as command
from hf_suffix_cache import building

SOURCE = """
#include <cstdint>
extern "C" int64_t answer() { return 42; }
extern "C" double squares(const double* x, int64_t n) {
    double total = 0;
    #pragma omp parallel for reduction(+ : total) num_threads(2)
    for (int64_t i = 0; i < n; i++) total += x[i] * x[i];
    return total;
}
"""

needs_tools = pytest.mark.skipif(bool(building.missing_tools()), reason=f"missing: {building.missing_tools()}")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder of one kernel of our own, and an empty cache folder."""
    folder = tmp_path / "package" / "csrc"
    folder.mkdir(parents=True)
    (folder / "toy.cpp").write_text(SOURCE)
    monkeypatch.setattr(building, "SOURCES", folder)
    monkeypatch.setenv("HF_SUFFIX_CACHE_KERNELS", str(tmp_path / "kernels"))
    monkeypatch.delenv("HF_SUFFIX_CACHE_BUILD", raising=False)
    monkeypatch.setattr(building, "_libraries", {})
    monkeypatch.setattr(building, "_failures", {})
    monkeypatch.setattr(building, "_started", False)
    building._digest.cache_clear()
    yield folder
    building._digest.cache_clear()


@needs_tools
def test_build_makes_a_library_that_is_found_and_called(sources, tmp_path):
    assert building.library("toy") is None and building.status() == {"toy": "not built"}
    built = building.build()
    library = building.library("toy", "cpu")
    assert library.answer() == 42
    library.squares.restype = ctypes.c_double
    numbers = (ctypes.c_double * 3)(1, 2, 3)
    assert library.squares(numbers, ctypes.c_int64(3)) == 14
    assert built["toy"].is_relative_to(tmp_path / "kernels") and building.status() == {"toy": str(built["toy"])}
    assert building.library("toy") is library
    assert not list((tmp_path / "kernels").glob(".building-*"))  # nothing half done is left


@needs_tools
def test_build_again_compiles_nothing_and_new_sources_do(sources, monkeypatch):
    compiled = []
    compiling = building._compile
    monkeypatch.setattr(building, "_compile", lambda *args: compiled.append(args[0]) or compiling(*args))
    first = building.build()["toy"]
    assert building.build()["toy"] == first and compiled == ["toy"]
    (sources / "toy.cpp").write_text(SOURCE.replace("42", "43"))
    building._digest.cache_clear()  # a process reads its sources once
    building._libraries.clear()
    assert building.library("toy") is None
    assert building.build()["toy"] != first and building.library("toy").answer() == 43


@needs_tools
def test_broken_source_raises_the_compilers_words(sources, tmp_path):
    (sources / "toy.cpp").write_text("int broken = ;")
    with pytest.raises(RuntimeError, match="broken"):
        building.build(["toy"])
    assert building.library("toy") is None
    assert not list((tmp_path / "kernels").glob("*/*.so"))


def test_unknown_name_raises(sources):
    with pytest.raises(ValueError, match="toy"):
        building.build(["nothing"])


@needs_tools
def test_kernels_off_gives_references_whatever_is_built(sources, monkeypatch):
    building.build()
    assert building.library("toy") is not None
    monkeypatch.setenv("HF_SUFFIX_CACHE_KERNELS", "off")
    assert building.library("toy") is None and building.status() == {"toy": "off"}
    assert building.build_in_background() is None


def test_damaged_library_is_told_once_and_the_reference_serves(sources, caplog):
    target = building._target("toy", "cpu")
    target.parent.mkdir(parents=True)
    target.write_bytes(b"no library at all")
    with caplog.at_level(logging.WARNING, "hf_suffix_cache"):
        for _ in range(3):
            assert building.library("toy") is None
            building.forget()
    assert len([record for record in caplog.records if "reference serves" in record.message]) == 1
    assert building.status()["toy"].startswith("failed: ")


@needs_tools
def test_background_build_runs_once_and_is_found(sources, monkeypatch):
    """The real command, on our own source: a small program stands for the package's entry."""
    stub = sources.parent.parent / "run_build.py"
    stub.write_text(
        "from pathlib import Path\nfrom hf_suffix_cache import building\n"
        f"building.SOURCES = Path({str(sources)!r})\nprint(building.build())\n"
    )
    run, started = subprocess.run, []

    def run_stub(arguments, **options):
        if "hf_suffix_cache" in arguments:
            started.append(arguments)
            arguments = [sys.executable, str(stub)]
            options["env"]["PYTHONPATH"] = str(Path(building.__file__).parent.parent)
        return run(arguments, **options)

    monkeypatch.setattr(building.subprocess, "run", run_stub)
    assert building.library("toy") is None
    thread = building.build_in_background()
    assert thread.daemon and building.build_in_background() is None
    thread.join(120)
    assert building.library("toy").answer() == 42
    assert len(started) == 1 and started[0][-2:] == ["hf_suffix_cache", "build"]


@needs_tools
def test_background_build_that_fails_is_told_once_and_remembered(sources, monkeypatch, caplog):
    def run_stub(arguments, **options):
        return subprocess.CompletedProcess(arguments, 1, "", "cc1plus: out of memory")

    monkeypatch.setattr(building.subprocess, "run", run_stub)
    with caplog.at_level(logging.WARNING, "hf_suffix_cache"):
        building.build_in_background().join(60)
        assert building.library("toy") is None and building.library("toy") is None
    assert len(caplog.records) == 1 and "out of memory" in caplog.text
    assert "out of memory" in building.status()["toy"]


@pytest.mark.parametrize("how", ["HF_SUFFIX_CACHE_BUILD", "no compiler", "no filelock"])
def test_background_build_that_can_not_run_starts_nothing(how, sources, monkeypatch):
    monkeypatch.setattr(building.threading, "Thread", lambda *args, **options: pytest.fail("a thread was started"))
    if how == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
        assert "no-such-compiler" in building.missing_tools()
    elif how == "no filelock":
        monkeypatch.setitem(sys.modules, "filelock", None)
        assert "filelock" in building.missing_tools()
    else:
        monkeypatch.setenv("HF_SUFFIX_CACHE_BUILD", "0")
    assert building.build_in_background() is None


@needs_tools
def test_build_command_prints_where(sources, capsys):
    assert command.main(["build"]) == 0
    printed = capsys.readouterr().out.split()
    assert printed[0] == "toy:" and os.path.exists(printed[1])
    assert command.main(["info"]) == 0
    assert f"kernel toy: {printed[1]}" in capsys.readouterr().out


def test_build_command_without_tools_says_what_is_missing(sources, capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert command.main(["build"]) == 2
    assert "no-such-compiler" in capsys.readouterr().err


@needs_tools
def test_build_command_with_a_broken_source_fails(sources, capsys):
    (sources / "toy.cpp").write_text("int broken = ;")
    assert command.main(["build"]) == 2
    assert "broken" in capsys.readouterr().err


@pytest.mark.parametrize("home", ["unnamed", "unreadable"])
def test_home_that_can_not_be_used_leaves_the_references(home, monkeypatch):
    def lost(*args):
        raise RuntimeError("Could not determine home directory.") if home == "unnamed" else PermissionError("home")

    monkeypatch.delenv("HF_SUFFIX_CACHE_BUILD", raising=False)
    monkeypatch.delenv("HF_SUFFIX_CACHE_KERNELS", raising=False)
    monkeypatch.setattr(building, "_started", False)
    monkeypatch.setattr(building, "missing_tools", list)
    monkeypatch.setattr(building, "_target", lost)
    assert building.build_in_background() is None
