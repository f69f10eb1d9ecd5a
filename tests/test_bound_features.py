"""`bound/features.py`: names, levels, checks of what is traced."""

import math
import subprocess
import sys

import numpy as np
import pytest

from hf_suffix_cache.bound import FEATURES, FULL, LEVEL_NAMES, LEVELS, LevelTrace
from hf_suffix_cache.bound.features import check_traces, true_kls, vector
from synthetic_traces import synthetic_prompts


def test_levels_rise_to_full():
    shares = [share for _, share in LEVELS]
    assert shares == sorted(shares) and shares[-1] == 1.0 and LEVEL_NAMES[-1] == FULL
    assert len(set(FEATURES)) == len(FEATURES) == 17


def test_vector_puts_nan_for_what_is_missing():
    values = vector({"entropy": 2.0, "share": None})
    assert values[FEATURES.index("entropy")] == 2.0
    assert np.isnan(values).sum() == len(FEATURES) - 1


@pytest.mark.parametrize(
    "change, words",
    [
        ({"level": "half"}, "must be one of"),
        ({"features": {"entropi": 1.0}}, "entropi"),
        ({"kl": math.nan}, "finite number of nats"),
        ({"kl": -0.1}, "finite number of nats"),
        ({"kl": math.inf}, "finite number of nats"),
        ({"level": "full", "kl": 0.5}, "by definition"),
        ({"rows": -1.0}, "rows"),
    ],
)
def test_trace_with_a_wrong_value_raises(change, words):
    with pytest.raises(ValueError, match=words):
        LevelTrace(**{"level": "seams", "features": {}, "kl": 0.1, "rows": 5.0, **change})


def test_prompt_without_a_level_or_out_of_order_raises():
    prompt = synthetic_prompts(1, 0)[0]
    check_traces([prompt])
    for wrong in (prompt[:-1], prompt[::-1], []):
        with pytest.raises(ValueError, match="prompt 1 was traced at"):
            check_traces([prompt, wrong])


def test_rounding_below_zero_counts_as_zero():
    prompt = [LevelTrace(name, {}, -1e-9, 1.0) for name in LEVEL_NAMES]
    assert (true_kls([prompt]) == 0).all()


def test_package_needs_numpy_alone():
    """Loaded by itself (the package's own `__init__` brings torch), `bound` imports nothing heavy."""
    script = """
import importlib.util, sys
from pathlib import Path
folder = Path(sys.argv[1])
places = {"submodule_search_locations": [str(folder)]}
spec = importlib.util.spec_from_file_location("bound", folder / "__init__.py", **places)
module = importlib.util.module_from_spec(spec)
sys.modules["bound"] = module
spec.loader.exec_module(module)
assert module.Calibration.none().describe()
heavy = {"torch", "transformers", "scipy", "sklearn", "pandas", "hf_suffix_cache"} & set(sys.modules)
assert not heavy, heavy
assert "numpy" in sys.modules
"""
    import hf_suffix_cache.bound as bound

    subprocess.run([sys.executable, "-c", script, bound.__path__[0]], check=True)
