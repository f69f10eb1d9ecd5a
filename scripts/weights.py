"""What the scripts that load a real model share: weights from a GGUF file, converted once to a transformers folder."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer


def load_folder(folder: Path, threads: int | None):
    """The model in a folder (fp32, eval) and its tokenizer; torch's thread count is set unless `threads` is None."""
    if threads is not None:
        torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def made_once(name: str, make: Callable[[Path, Path], None]) -> Path:
    """
    The folder `name` in the cache folder (`HF_SUFFIX_CACHE_HOME`, else `~/.cache/hf_suffix_cache`), made if it is not
    there yet: all of it or nothing. Safe when several processes ask at once.

    Args:
        name (`str`): Of the folder; a version belongs into it.
        make (callable): Called with an empty scratch folder, and the new folder in it that it is to fill.
    """
    home = Path(os.environ.get("HF_SUFFIX_CACHE_HOME") or Path.home() / ".cache" / "hf_suffix_cache")
    folder = home / name
    if folder.is_dir():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            scratch = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=home))
            try:
                target = scratch / "made"
                target.mkdir()
                make(scratch, target)
                os.replace(target, folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def convert(source: Path, gguf_file: str, target: Path) -> None:
    """Read the GGUF file in `source` and write fp32 safetensors, config and tokenizer to `target`."""
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file, dtype=torch.float32)
    # transformers (seen in 5.24) refuses to save what it takes for a quantised model; it is plain fp32 by now.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
