"""Seeds, one thread, and what every test must leave as it was: models, transformers' generate, the warnings."""

import os
import random

import numpy as np
import pytest
import torch
import transformers
from transformers.generation.utils import GenerationMixin

from hf_suffix_cache import building
from hf_suffix_cache.store.store import Store
from tiny_models import fingerprint, forget, living_models

ORIGINAL_GENERATE = GenerationMixin.generate  # importing the package must not change it

os.environ.setdefault("HF_SUFFIX_CACHE_BUILD", "0")  # no compiler in the background of a test
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def pytest_configure(config):
    # A call that transformers deprecates is a call that a newer transformers breaks.
    config.addinivalue_line("filterwarnings", "error::FutureWarning")
    config.addinivalue_line("filterwarnings", "error::DeprecationWarning:hf_suffix_cache")


@pytest.fixture(scope="session")
def kernels():
    """`library(name)` with every kernel built, in the usual cache folder; without a compiler the test skips."""
    if building.missing_tools():
        pytest.skip(f"kernels can't be built: {building.missing_tools()} not found")
    building.build()
    return building.library


@pytest.fixture
def references(monkeypatch):
    """No kernel serves, built or not."""
    monkeypatch.setenv("HF_SUFFIX_CACHE_KERNELS", "off")


@pytest.fixture(autouse=True)
def small_and_poisoned_pools(monkeypatch):
    """Every cache of the suite fills freed memory with NaN, and takes memory in equally small slabs everywhere."""
    monkeypatch.setattr("hf_suffix_cache.store.store.free_bytes", lambda device: 256 << 20)
    monkeypatch.setattr("hf_suffix_cache.owned.Store", lambda config, clock: Store(config.replace(debug=True), clock))


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Seeds before; afterwards no hook, attribute or setting may be left on a model, and one wrapper at most."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    changed = []
    for model in living_models():
        now = fingerprint(model)
        changed += [(type(model).__name__, key) for key, value in model.baseline.items() if now[key] != value]
        forget(model)
    assert not changed, f"left changed on models: {changed}"
    generate = GenerationMixin.generate
    assert generate is ORIGINAL_GENERATE or generate.__wrapped__ is ORIGINAL_GENERATE, "generate is wrapped twice"
