"""Differences of rows taken and added: compiled and not, the bits of a slow oracle."""

import numpy as np
import pytest
import torch

from hf_suffix_cache.differences import Places, add_rows, take_differences
from hf_suffix_cache.rope import RotarySpec, rotate_keys, rotation

FREQUENCIES = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
SPECS = {
    "none": None,
    "half": RotarySpec("table", "half", 1, 0, 8),
    "interleaved": RotarySpec("table", "interleaved", -1, 0, 8),
    "last dimensions": RotarySpec("table", "half", 1, 4, 8),
}
HEADS, DIM = 3, 12
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(params=["compiled", "reference"])
def how(request):
    request.getfixturevalue("kernels" if request.param == "compiled" else "references")


def random(*size, dtype=torch.float32, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables(spec, positions):
    return (
        None
        if spec is None
        else (*rotation(torch.from_numpy(positions), spec.sign * FREQUENCIES, torch.float32), spec)
    )


def turned(row, position, spec):
    """One row `[kv_heads, head_dim]` of fp32."""
    return row if spec is None else rotate_keys(row[:, None], int(position), FREQUENCIES, spec)[:, 0]


@pytest.mark.parametrize("rows", [1, 70, 3000])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_those_of_a_slow_oracle_to_the_bit(how, dtype, spec, threads, rows):
    shuffled = np.random.default_rng(3)
    positions = shuffled.integers(-5000, 5000, rows + 5)
    # as a model gives them: heads inside of rows
    fresh = random(rows + 9, HEADS, DIM, dtype=dtype, seed=1).transpose(0, 1)
    old = random(2, HEADS, rows + 20, DIM, dtype=dtype, seed=2)[1]
    place, columns, into = (shuffled.permutation(size)[:rows] for size in (rows + 9, rows + 20, rows + 5))
    out = random(rows + 5, HEADS, DIM, seed=4)
    want, target, found = out.clone(), old.clone(), old.clone()
    slow = range(rows) if rows < 100 else shuffled.permutation(rows)[:50].tolist()
    torch.set_num_threads(threads)
    try:
        take_differences(fresh, *[Places(place), old, Places(columns), out, Places(into)], tables(spec, positions))
        add_rows(found, Places(columns), out, Places(into), tables(spec, positions))
    finally:
        torch.set_num_threads(1)
    for number in slow:
        row = fresh[:, place[number]].float() - old[:, columns[number]].float()
        want[into[number]] = turned(row, positions[into[number]], spec)
        change = turned(out[into[number]], positions[into[number]], spec)
        target[:, columns[number]] = (old[:, columns[number]].float() + change).to(dtype)
        assert torch.equal(out[into[number]], want[into[number]])
        assert torch.equal(found[:, columns[number]], target[:, columns[number]])
        assert not torch.equal(found[:, columns[number]], old[:, columns[number]])  # control
    others = np.setdiff1d(np.arange(rows + 20), columns)
    assert torch.equal(found[:, others], old[:, others])
    rest = np.setdiff1d(np.arange(rows + 5), into)
    assert torch.equal(out[rest], want[rest])


def test_nothing_to_do_changes_nothing(how):
    none, rows, out = Places(np.empty(0)), random(HEADS, 5, DIM), random(4, HEADS, DIM)
    before = rows.clone(), out.clone()
    take_differences(rows, none, rows, none, out, none, None)
    add_rows(rows, none, out, none, None)
    assert torch.equal(rows, before[0]) and torch.equal(out, before[1])


def test_memory_that_the_kernel_can_not_walk_is_left_to_torch(kernels):
    rows, out = random(HEADS, DIM, 5).transpose(1, 2), torch.zeros(5, HEADS, DIM)
    every = Places(np.arange(5))
    take_differences(rows, every, rows + 1, every, out, every, None)
    assert torch.equal(out.transpose(0, 1), rows - (rows + 1))
