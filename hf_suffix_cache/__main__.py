"""The `hf-suffix-cache` command."""

import argparse
import platform
import sys


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hf-suffix-cache", description="Reuse of computed rows behind generate().")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions and devices, for a bug report")
    check = commands.add_parser("check", help="measure what a model's rows can do")
    check.add_argument("model", help="a folder or name that AutoModelForCausalLM.from_pretrained takes")
    options = parser.parse_args(arguments)
    return info() if options.command == "info" else check_model(options.model)


def info() -> int:
    """Print versions and devices."""
    import torch
    import transformers

    from . import __version__

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(f"hf_suffix_cache {__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    print(f"Python {platform.python_version()}, {platform.machine()}, GPU: {gpu}")
    return 0


def check_model(name: str) -> int:
    """Measure a model and print what was found; 1 if its rows can't be moved, 2 if it can't be loaded or measured."""
    from transformers import AutoModelForCausalLM

    from .measurement import measure

    try:  # whatever is wrong with a folder, its files or the packages that it needs: this is not our code's fault
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False).eval()
    except Exception as error:
        return failed(f"{name} could not be loaded as a causal language model", error)
    try:
        capability = measure(model)
    except Exception as error:
        return failed(f"{name} could not be measured", error)
    print(f"{type(model).__name__}: {capability}")
    return 0 if capability.kind == "shift" else 1


def failed(what: str, error: Exception) -> int:
    """Say in one line on stderr what failed, and return the exit status for it."""
    words = " ".join(str(error).split())
    print(f"hf-suffix-cache: {what}: {type(error).__name__}{': ' if words else ''}{words}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
