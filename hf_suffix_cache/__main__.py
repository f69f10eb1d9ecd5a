"""The `hf-suffix-cache` command."""

import argparse
import platform
import sys


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hf-suffix-cache", description="Reuse of computed rows behind generate().")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices and kernels, for a bug report")
    build = commands.add_parser("build", help="compile the kernels now, so that no process has to")
    build.add_argument("--verbose", action="store_true", help="show the compiler's commands")
    check = commands.add_parser("check", help="measure what a model's rows can do")
    check.add_argument("model", help="a folder or name that AutoModelForCausalLM.from_pretrained takes")
    options = parser.parse_args(arguments)
    if options.command == "build":
        return build_kernels(options.verbose)
    return info() if options.command == "info" else check_model(options.model)


def info() -> int:
    """Print versions, devices and which kernels are in use."""
    import torch
    import transformers

    from . import __version__, building

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(f"hf_suffix_cache {__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    print(f"Python {platform.python_version()}, {platform.machine()}, GPU: {gpu}")
    for name, state in building.status().items():
        print(f"kernel {name}: {state}")
    return 0


def build_kernels(verbose: bool) -> int:
    """Build all kernels and print where they lie; 2 if one can't be built."""
    from . import building

    missing = building.missing_tools()
    if missing:
        return failed("kernels could not be built", RuntimeError(f"{', '.join(missing)} not found"))
    try:
        built = building.build(verbose=verbose)
    except Exception as error:  # whatever is wrong with a compiler
        return failed("kernels could not be built", error)
    for name, path in built.items():
        print(f"{name}: {path}")
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
