"""
Compiled kernels: found in a cache folder, built by a command or in the background, never on a request's path.

A kernel is `csrc/<name>.cpp` for the CPU or `csrc/<name>.cu` for CUDA: plain `extern "C"` functions over raw pointers,
called through ctypes, which lets other threads run meanwhile. Each has a reference in Python that gives the same bits;
where a kernel is missing, the reference serves.

Environment: `HF_SUFFIX_CACHE_KERNELS` is the cache folder, or `off` for references only; `HF_SUFFIX_CACHE_BUILD=0`
keeps a process from building in the background.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger("hf_suffix_cache")

SOURCES = Path(__file__).parent / "csrc"
# products and sums are rounded one by one, as numpy and torch do it: a kernel's results are those of its reference
CPU_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno")
CUDA_FLAGS = ("-O3", "-fmad=false")
# OpenMP by torch's own runtime: a second one would have threads of its own, which wait beside torch's in busy loops
OPENMP = (("-fopenmp",), ("-Wl,--no-as-needed",))
KINDS = {"cpu": ".cpp", "cuda": ".cu"}

_libraries: dict[tuple[str, str], ctypes.CDLL | None] = {}
_failures: dict[tuple[str, str], str] = {}
_lock = threading.Lock()
_started = False


def library(name: str, device: str = "cpu") -> ctypes.CDLL | None:
    """
    The compiled kernel of this name, or None: then the reference serves.

    Never builds and never raises; after the first call it costs one look into a dict.

    Args:
        name (`str`): `"lookup"` or `"rows"`.
        device (`str`, *optional*, defaults to `"cpu"`): Device that its memory lies on, with or without an index.
    """
    if _off():
        return None
    key = (name, device.partition(":")[0])
    if key not in _libraries:
        with _lock:
            _libraries[key] = _load(*key)
    return _libraries[key]


def build(names=None, verbose: bool = False) -> dict[str, Path]:
    """
    Build what is not built yet, for the CPU, and for CUDA where this torch has it and a GPU is there.

    Args:
        names (sequence of `str`, *optional*): Kernels to build; all, unless given.
        verbose (`bool`): Whether the compiler's commands are printed.

    Returns:
        `dict[str, Path]`: The library of each kernel; those for CUDA are named `"<name>:cuda"`.

    Raises:
        RuntimeError: with the compiler's own words, if one can't be built.
        ValueError: for a name that there is no kernel of.
    """
    built = {}
    for name in kernel_names() if names is None else names:
        if name not in kernel_names():
            raise ValueError(f"there is no kernel {name!r}: choose from {kernel_names()}.")
        for device in _devices(name):
            built[name if device == "cpu" else f"{name}:{device}"] = _build(name, device, verbose)
            _failures.pop((name, device), None)
    forget()
    return built


def build_in_background() -> threading.Thread | None:
    """
    Build what is missing in a process beside this one, once a process; returns the thread that waits for it.

    Nothing happens where compiler, ninja or filelock are missing, or if `HF_SUFFIX_CACHE_BUILD=0`.
    """
    global _started
    if _started or os.environ.get("HF_SUFFIX_CACHE_BUILD") == "0" or _off() or missing_tools():
        return None
    _started = True
    try:
        if all(_target(name, device).exists() for name in kernel_names() for device in _devices(name)):
            return None
    except (OSError, RuntimeError):  # the home folder can't be read or named: nowhere to build to
        return None
    thread = threading.Thread(target=_build_beside, name="hf_suffix_cache build", daemon=True)
    thread.start()
    return thread


def status() -> dict[str, str]:
    """What is known of each kernel: where it lies, that it is not built, or why it can't be."""
    if _off():
        return dict.fromkeys(kernel_names(), "off")
    words = {}
    for name in kernel_names():
        for device in _devices(name):
            path = _target(name, device)
            state = str(path) if library(name, device) is not None else _failures.get((name, device), "not built")
            words[name if device == "cpu" else f"{name}:{device}"] = state
    return words


def forget() -> None:
    """Look for libraries again at the next call of `library`: some may have been built meanwhile."""
    with _lock:
        for key in [key for key, found in _libraries.items() if found is None and key not in _failures]:
            del _libraries[key]


def kernel_names() -> tuple[str, ...]:
    """Names of all kernels that have a source for the CPU."""
    return tuple(sorted(path.stem for path in SOURCES.glob("*.cpp")))


def missing_tools() -> list[str]:
    """What is not there of the tools that building takes."""
    missing = [tool for tool in (_compiler(), "ninja") if shutil.which(tool) is None]
    try:
        import filelock  # noqa: F401
    except ImportError:
        missing.append("filelock")
    return missing


def _off() -> bool:
    """Whether only the references are to serve."""
    return os.environ.get("HF_SUFFIX_CACHE_KERNELS", "").lower() in ("off", "0")


def _loads(path: Path) -> bool:
    """Whether there is a library, and a whole one."""
    try:
        return path.exists() and ctypes.CDLL(str(path)) is not None
    except OSError:
        return False


def _devices(name: str) -> list[str]:
    cuda = torch.version.cuda is not None and torch.cuda.is_available() and (SOURCES / f"{name}.cu").exists()
    return ["cpu", "cuda"] if cuda else ["cpu"]


def _compiler() -> str:
    return os.environ.get("CXX", "c++")  # what torch.utils.cpp_extension takes


def _target(name: str, device: str) -> Path:
    root = os.environ.get("HF_SUFFIX_CACHE_KERNELS") or Path.home() / ".cache" / "hf_suffix_cache" / "kernels"
    return Path(root) / _digest(name, device, _compiler()) / f"{name}.so"


@cache
def _digest(name: str, device: str, compiler: str) -> str:
    """Name of a build's folder: another one for other sources, flags, tools or processor."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob(f"{name}.*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    found = shutil.which(compiler)
    if found is not None:  # its own --version would cost a process
        found = os.path.realpath(found)
        found = (found, os.stat(found).st_size, os.stat(found).st_mtime_ns)
    flags = CPU_FLAGS if device == "cpu" else CUDA_FLAGS
    card = torch.cuda.get_device_capability() if device == "cuda" else None
    machine = (platform.system(), platform.machine(), _cpu_flags())
    about = (device, flags, found, torch.__version__, card, machine)
    digest.update(repr(about).encode())
    return f"{name}-{device}-{digest.hexdigest()[:16]}"


def _cpu_flags() -> str:
    """Instruction sets of this processor: `-march=native` of another one may not run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _load(name: str, device: str) -> ctypes.CDLL | None:
    if (name, device) in _failures:
        return None
    try:
        path = _target(name, device)
        return ctypes.CDLL(str(path)) if path.exists() else None
    except Exception as error:  # a kernel may make a call faster, never make it fail
        _fail(name, device, error)
        return None


def _fail(name: str, device: str, error: object) -> None:
    if (name, device) not in _failures:
        _failures[name, device] = f"failed: {error}"
        logger.warning("the kernel %r for %s can't be used, its reference serves: %s", name, device, error)


def _build(name: str, device: str, verbose: bool) -> Path:
    target = _target(name, device)
    if _loads(target):
        return target
    from filelock import FileLock

    target.parent.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent.with_suffix(".lock")):
        if _loads(target):  # somebody else was faster
            return target
        with tempfile.TemporaryDirectory(dir=target.parent.parent, prefix=".building-") as folder:
            made = _compile(name, device, Path(folder), verbose)
            target.parent.mkdir(exist_ok=True)
            os.replace(made, target)  # whole or not at all
    return target


def _compile(name: str, device: str, folder: Path, verbose: bool) -> Path:
    """The new library. With OpenMP, if this compiler and torch's runtime of it go together."""
    from torch.utils.cpp_extension import load

    source = SOURCES / (name + KINDS[device])
    errors = []
    for number, (compiling, linking) in enumerate((OPENMP, ((), ()))):
        at = folder / str(number)
        at.mkdir()
        flags = [*CPU_FLAGS, *compiling]
        try:
            load(
                name,
                [str(source)],
                extra_cflags=flags,
                extra_cuda_cflags=list(CUDA_FLAGS),
                extra_ldflags=list(linking),
                build_directory=str(at),
                verbose=verbose,
                is_python_module=False,
            )
            return next(at.glob("*.so"))
        except (RuntimeError, OSError) as error:
            errors.append(str(error))
    raise RuntimeError(f"{source.name} could not be built: {errors[-1]}")


def _build_beside() -> None:
    """Run the build command in a process of its own: imports and compilers take nothing of this one's lock."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(SOURCES.parent.parent), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "hf_suffix_cache", "build"]
    if shutil.which("nice"):
        command = ["nice", "-n", "10", *command]
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        done = subprocess.CompletedProcess(command, 1, "", str(error))
    for name in kernel_names():
        for device in _devices(name):
            if not _loads(_target(name, device)):
                _fail(name, device, done.stderr.strip()[-2000:] or f"the build ended with status {done.returncode}")
    forget()
