"""What happens once in a process: importing changes nothing, the first cache installs, two log lines."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run(code: str) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter that finds the tests' modules."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert result.returncode == 0, result.stderr
    return result


def test_import_changes_nothing_and_the_first_cache_installs_one_hook():
    run(
        """
from transformers import AttentionInterface
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface
state = lambda: (GenerationMixin.generate, sorted(AttentionInterface()), sorted(AttentionMaskInterface()))
before = state()
import hf_suffix_cache
assert state() == before
hf_suffix_cache.SuffixCache()
assert GenerationMixin.generate is not before[0] and GenerationMixin.generate.__wrapped__ is before[0]
wrapper = GenerationMixin.generate
hf_suffix_cache.SuffixCache()
assert GenerationMixin.generate is wrapper
hf_suffix_cache.uninstall()
assert GenerationMixin.generate is before[0]
"""
    )


def test_log_lines_come_once():
    result = run(
        """
import logging, sys
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s|%(message)s")
import torch
torch.set_num_threads(1)
from reference import ask
from tiny_models import make_model, new_text, old_text
from hf_suffix_cache import SuffixCache
model = make_model("llama")
text = old_text(48, 1)
for number in range(3):
    ask(model, text, SuffixCache())  # a cache that dies after one call
print("MIDDLE")
cache = SuffixCache()
ask(model, new_text(9, 1) + text + new_text(33, 2), cache)
print("EXACT SO FAR")
for number in range(3):
    ask(model, new_text(20, 3 + number) + text + new_text(33, 4), cache)
"""
    )
    text = result.stdout + result.stderr
    lines = [line for line in text.splitlines() if "hf_suffix_cache" in line]
    before, after = result.stdout.split("EXACT SO FAR") if "hf_suffix_cache" in result.stdout else (text, text)
    assert sum("empty" in line for line in lines) == 1, text
    approximate = [line for line in lines if "approximat" in line and "exact" in line]
    assert len(approximate) == 1, text
    assert 'fidelity="exact"' in approximate[0] or "fidelity='exact'" in approximate[0]
    if "hf_suffix_cache" in result.stdout:
        assert approximate[0] in after and approximate[0] not in before
