"""Copying rows: the compiled kernel, the torch reference beside it, and a slow oracle give the same bits."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_suffix_cache import building
from hf_suffix_cache.rope import RotarySpec, rotate_keys
from hf_suffix_cache.store import gather
from hf_suffix_cache.store.cold import DTYPES as DTYPES_COLD
from hf_suffix_cache.store.cold import decode, encode
from hf_suffix_cache.store.gather import Runs, average_rows, copy_rows
from hf_suffix_cache.store.pool import BlockPool, Budget, Extent, LayerShape, Slab

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ROTATIONS = {
    "half": RotarySpec("table", "half"),
    "interleaved": RotarySpec("table", "interleaved"),
    "backwards": RotarySpec("table", "half", sign=-1),
    "first dimensions": RotarySpec("table", "half", 1, 0, 8),
    "last dimensions": RotarySpec("table", "interleaved", 1, 8, 8),
    "values": RotarySpec("table", "half"),
    "none": None,
}
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
ROWS = 96
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compiled():
    """The kernel, built if it is not."""
    missing = building.missing_tools()
    if missing:
        pytest.skip(f"not there to build the kernel with: {', '.join(missing)}")
    building.build(["rows"])
    library = building.library("rows")
    assert library is not None
    return library


def frequencies_of(spec) -> dict:
    pairs = 8 if spec is None or spec.width is None else spec.width // 2
    return {spec: 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)}


def make_pool(dtype, rotation, slabs=2, device=CPU) -> tuple[BlockPool, list]:
    """
    A pool of three layers, two of them alike, with as many extents of `ROWS` random rows, each in a slab of its own,
    -0.0 and subnormal numbers among them.
    """
    spec = ROTATIONS[rotation]
    turned = (None, spec) if rotation == "values" else (spec, None)
    wide = LayerShape(2, 16, 16, dtype, device, *turned)
    odd = LayerShape(1, 16, 3, dtype, device, spec)
    pool = BlockPool((wide, odd, wide), 16, Budget(1 << 22))
    extents = []
    for number in range(slabs):
        extent = pool.allocate(ROWS * (number + 1) if number == 0 else 4 * ROWS)
        while extents and extent.slab in [other.slab for other in extents]:
            extent = pool.allocate(2 * extent.rows)
        fill(extent.slab, number)
        extents.append(extent)
    return pool, extents


def fill(slab, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*slab.keys.values(), *slab.values.values()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype))
        tensor[:, :, ::7] = -0.0
        tensor[:, :, 3::11] *= 1e-6


def slow_copy(before, source, goal, rows, destination, shifts, spec, frequencies):
    """Row by row, head by head, layer by layer: what `goal`, whose rows were `before`, should be."""
    want = before.clone()
    for row, to, shift in zip(rows.tolist(), destination.tolist(), shifts.tolist(), strict=True):
        for layer, head in itertools.product(range(source.shape[0]), range(source.shape[1])):
            states = source[layer, head, row : row + 1]
            if shift and spec is not None:
                states = rotate_keys(states, shift, frequencies, spec)
            want[layer, head, to] = states[0]
    return want


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    kind = BITS[left.itemsize]
    return left.shape == right.shape and torch.equal(left.view(kind), right.view(kind))


def check(pool, extent, target, row, rows, columns, shifts, frequencies, faults=None) -> None:
    """`copy_rows` of rows of one extent against the slow oracle, everything else of the target's slab included."""
    goals, wants = [], []
    start = target.start + row * target.rows
    for shape in pool.groups:
        for slot, spec in (("keys", shape.rotary), ("values", shape.value_rotary)):
            source, goal = getattr(extent.slab, slot)[shape], getattr(target.slab, slot)[shape]
            goals.append(goal)
            places = extent.start + rows, start + columns
            wants.append(slow_copy(goal, source, goal, *places, shifts, spec, frequencies.get(spec)))
    copy_rows(pool, extent.addresses(0, rows), target, row, columns, shifts, frequencies)
    for goal, want in zip(goals, wants, strict=True):
        assert same_bits(goal, want)


SHIFTS = {
    "none": lambda rows, random: np.zeros(len(rows), dtype=np.int64),
    "one": lambda rows, random: np.full(len(rows), -37),
    "some stay": lambda rows, random: np.where(np.arange(len(rows)) // 5 % 2 == 0, 0, 1900),
    "each its own": lambda rows, random: random.integers(-4000, 4000, len(rows)),
}
PICKED = {
    "one run": lambda random: np.arange(3, 90),
    "scattered": lambda random: random.permutation(ROWS)[:60],
    "repeated": lambda random: random.integers(0, ROWS, 60),
    "backwards": lambda random: np.arange(60)[::-1],
}


@pytest.mark.parametrize("how", ["compiled", "reference"])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copied_rows_are_those_of_a_slow_oracle_to_the_bit(compiled, monkeypatch, dtype, rotation, how):
    if how == "reference":
        monkeypatch.setenv("HF_SUFFIX_CACHE_KERNELS", "off")
    spec, random = ROTATIONS[rotation], np.random.default_rng(1)
    for shifting, picking in itertools.product(SHIFTS.values(), PICKED.values()):
        pool, (source, other) = make_pool(dtype, rotation)
        rows = picking(random)
        target = pool.allocate(ROWS)
        fill(target.slab, 5)
        columns = np.sort(random.permutation(ROWS)[: len(rows)]) if random.integers(2) else np.arange(len(rows)) + 6
        check(pool, source, target, 0, rows, columns, shifting(rows, random), frequencies_of(spec))


@given(
    runs=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 6), st.integers(-3, 3)), max_size=12),
    gaps=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    dtype=st.sampled_from(DTYPES),
    rotation=st.sampled_from(list(ROTATIONS)),
    row=st.integers(0, 2),
    threads=st.sampled_from([1, 2]),
)
@settings(max_examples=100, deadline=None)
def test_any_list_of_runs_is_copied_to_the_bit(compiled, runs, gaps, dtype, rotation, row, threads):
    spec = ROTATIONS[rotation]
    pool, (source, _) = make_pool(dtype, rotation)
    target = pool.allocate(ROWS, batch=3)  # equally spaced runs of rows
    fill(target.slab, 5)
    rows, columns, shifts, column = [], [], [], 0
    for (first, length, shift), gap in zip(runs, gaps, strict=False):
        length = min(length, ROWS - first)
        column += gap
        rows += range(first, first + length)
        columns += range(column, column + length)
        shifts += [shift * 811] * length
        column += length
    parts = (np.array(part, dtype=np.int64) for part in (rows, columns, shifts))
    torch.set_num_threads(threads)
    try:
        check(pool, source, target, row, *parts, frequencies_of(spec))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("how", ["compiled", "reference"])
def test_rows_of_several_slabs_come_together(compiled, monkeypatch, how):
    if how == "reference":
        monkeypatch.setenv("HF_SUFFIX_CACHE_KERNELS", "off")
    pool, extents = make_pool(torch.float32, "half", slabs=3)
    assert len({extent.slab for extent in extents}) == 3
    random = np.random.default_rng(2)
    which, rows = random.integers(0, 3, 80), random.integers(0, ROWS, 80)
    shifts = random.integers(-2, 3, 80) * 100
    addresses = np.array([int(extents[w].addresses(0, np.array([r]))[0]) for w, r in zip(which, rows, strict=True)])
    target = pool.allocate_private(ROWS)
    frequencies = frequencies_of(ROTATIONS["half"])
    copy_rows(pool, addresses, target, 0, np.arange(80), shifts, frequencies)
    for shape, spec in ((shape, shape.rotary) for shape in pool.groups):
        for number in range(80):
            extent = extents[which[number]]
            want = extent.slab.keys[shape][:, :, extent.start + rows[number]][:, :, None]
            if shifts[number]:
                want = rotate_keys(want, int(shifts[number]), frequencies[spec], spec)
            assert same_bits(target.slab.keys[shape][:, :, number], want[:, :, 0].clone())


@pytest.mark.parametrize("threads", [1, 2])
def test_work_of_many_megabytes_is_shared_by_threads(compiled, threads):
    shape = LayerShape(3, 64, 64, torch.float32, torch.device("cpu"), RotarySpec("table"))
    pool = BlockPool((shape,) * 8, 16, Budget(1 << 28))
    source = pool.allocate(2048)
    fill(source.slab, 0)
    target = pool.allocate(2048)
    frequencies = {shape.rotary: 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)}
    rows = np.concatenate([np.arange(1500, 2000), np.arange(0, 1500)])
    shifts = np.where(rows < 700, 0, 55)
    torch.set_num_threads(threads)
    try:
        copy_rows(pool, source.addresses(0, rows), target, 0, np.arange(2000), shifts, frequencies)
    finally:
        torch.set_num_threads(1)
    keys, got = (e.slab.keys[shape][:, :, e.start : e.start + 2048] for e in (source, target))
    want = rotate_keys(keys[:, :, rows], torch.from_numpy(shifts), frequencies[shape.rotary], shape.rotary)
    want[:, :, shifts == 0] = keys[:, :, rows[shifts == 0]]
    assert same_bits(got[:, :, :2000].contiguous(), want)
    values, got = (e.slab.values[shape][:, :, e.start : e.start + 2048] for e in (source, target))
    assert same_bits(got[:, :, :2000].contiguous(), values[:, :, rows].contiguous())


@pytest.mark.parametrize("how", ["compiled", "reference"])
def test_nothing_to_copy_changes_nothing(compiled, monkeypatch, how):
    if how == "reference":
        monkeypatch.setenv("HF_SUFFIX_CACHE_KERNELS", "off")
    pool, (source, _) = make_pool(torch.float32, "half")
    none = np.empty(0, dtype=np.int64)
    target = pool.allocate(ROWS)
    fill(target.slab, 5)
    check(pool, source, target, 0, none, none, none, {})


def test_infinities_and_what_is_not_a_number_stay_where_they_are(compiled):
    pool, (source, _) = make_pool(torch.bfloat16, "half")
    for keys in source.slab.keys.values():
        keys[:, :, source.start, 0] = float("inf")
        keys[:, :, source.start + 1, 2] = float("nan")
    target = pool.allocate(ROWS)
    copy_rows(
        pool,
        source.addresses(0, np.arange(3)),
        target,
        0,
        np.arange(3),
        np.full(3, 5),
        frequencies_of(ROTATIONS["half"]),
    )
    for shape, keys in target.slab.keys.items():
        first, second, third = keys[:, :, target.start : target.start + 3].unbind(2)
        assert first[..., 0].isinf().all() and second[..., [2, 10]].isnan().all() and third.isfinite().all()
        assert second[..., [0, 1, 8, 9]].isfinite().all(), shape


def test_half_precision_is_rounded_as_torch_rounds_it(compiled):
    """All numbers of bfloat16 and float16, turned by an angle of 0 in the table: loading and storing alone."""
    for dtype in (torch.bfloat16, torch.float16):
        numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        numbers = numbers[numbers.isfinite()][: 2**15 // 16 * 30]
        source = numbers.reshape(1, 1, -1, 16).contiguous()
        goal = torch.zeros_like(source)
        rows = source.shape[2]
        runs = Runs.of(np.arange(rows), np.arange(rows), np.full(rows, 9))
        turn = (frequencies_of(None)[None], RotarySpec("table"))
        assert gather._copy_compiled(source, goal, runs, turn, {})
        want = rotate_keys(source, 9, *turn)
        known = want.isfinite()
        assert known.float().mean() > 0.9 and torch.equal(goal.isfinite(), known)
        assert torch.equal(goal[known].view(torch.int16), want[known].view(torch.int16))


class Broken:
    """A kernel that says that it has copied, and turns by what it likes."""

    def __init__(self, real, change):
        self.change, self.real = change, real

    def library(self, name, device):
        def rows_copy(*arguments):
            return self.change(self.real.rows_copy, list(arguments))

        rows_copy.argtypes = ()
        return SimpleNamespace(rows_copy=rows_copy)


@pytest.mark.parametrize("fault", ["nothing copied", "other layout", "one run less", "no rotation"])
def test_control_a_broken_kernel_is_noticed(compiled, monkeypatch, fault):
    spec = ROTATIONS["half"]
    gather.library("rows")  # the real one, with its arguments declared
    pool, (source, _) = make_pool(torch.float32, "half")
    rows, frequencies = np.arange(40), frequencies_of(spec)
    target = pool.allocate(ROWS)
    check(pool, source, target, 0, rows, rows, np.full(40, 7), frequencies)

    def change(real, arguments):
        if fault == "nothing copied":
            return 0
        if fault == "other layout":
            arguments[19] = 1 - arguments[19]
        if fault == "one run less":
            arguments[10] -= 1
        if fault == "no rotation":
            kept.append(np.full(arguments[10], -1, dtype=np.int64))
            arguments[14] = kept[-1].ctypes.data
        return real(*arguments)

    kept = []
    monkeypatch.setattr(gather, "library", Broken(compiled, change).library)
    fill(target.slab, 6)
    with pytest.raises(AssertionError):
        check(pool, source, target, 0, rows, rows, np.full(40, 7), frequencies)


def test_what_the_kernel_refuses_the_reference_copies(compiled, monkeypatch):
    refused = []

    def change(real, arguments):
        refused.append(arguments[9])
        return 1

    monkeypatch.setattr(gather, "library", Broken(compiled, change).library)
    pool, (source, _) = make_pool(torch.float16, "interleaved")
    target = pool.allocate(ROWS)
    check(pool, source, target, 0, *[np.arange(30)] * 2, np.full(30, -8), frequencies_of(ROTATIONS["interleaved"]))
    assert set(refused) == {gather.KINDS[torch.float16]}


def test_kernel_refuses_what_it_does_not_know(compiled):
    memory = torch.zeros(4)
    one, turned = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    places = [memory.data_ptr(), 0, 0, memory.data_ptr(), 0, 0, 1, 1, 1]
    for kind, turn in ((9, -one), (4, turned)):
        arrays = [array.ctypes.data for array in (turned, one, one, turn)]
        assert compiled.rows_copy(*places, kind, 1, *arrays, 0, 0, 0, 0, 0, 1) == 1


# -- runs -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(-1, 1)), max_size=40))
@settings(max_examples=200, deadline=None)
def test_runs_are_the_longest_and_give_the_same_rows_again(rows):
    source, target, shift = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    runs = Runs.of(source, target, shift)
    for got, want in zip(runs.rows(), (source, target, shift), strict=True):
        np.testing.assert_array_equal(got, want)
    ends = runs.source + runs.length, runs.target + runs.length
    for number in range(len(runs) - 1):
        goes_on = ends[0][number] == runs.source[number + 1] and ends[1][number] == runs.target[number + 1]
        assert not (goes_on and runs.shift[number] == runs.shift[number + 1])


# -- means ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_means_are_running_means_of_turned_rows(dtype):
    pool, (source, other) = make_pool(dtype, "half")
    frequencies, spec = frequencies_of(ROTATIONS["half"]), ROTATIONS["half"]
    rows, into = np.array([4, 9, 10, 50]), np.array([30, 2, 70, 71])
    shifts, counts = np.array([5, 5, 0, -300]), np.array([1, 2, 3, 1])
    before = {shape: (other.slab.keys[shape].clone(), other.slab.values[shape].clone()) for shape in pool.groups}
    average_rows(pool, source.addresses(0, rows), other.addresses(0, into), shifts, counts, frequencies)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for shape in pool.groups:
        for slot, old, turned in zip(("keys", "values"), before[shape], (True, False), strict=True):
            got, want = getattr(other.slab, slot)[shape].double(), old.double().clone()
            for number in range(4):
                row = getattr(source.slab, slot)[shape][:, :, source.start + rows[number]].double()[:, :, None]
                if turned:
                    row = rotate_keys(row, int(shifts[number]), frequencies[spec], spec)
                place = other.start + into[number]
                want[:, :, place] += (row[:, :, 0] - want[:, :, place]) / (counts[number] + 1)
            assert (got - want).abs().max() < tolerance
            assert (got - old.double()).abs().max() > 10 * tolerance  # control


# -- slabs that keep rows in a smaller dtype --------------------------------------------------------------------------

COLD = {
    "bfloat16": 2**-8,
    "float16": 2**-11,
    "int8": 0.5 / 127,
}  # largest error of a row, relative to its largest number


@pytest.mark.parametrize("shift", [0, -70])
@pytest.mark.parametrize("cold", COLD)
def test_rows_are_packed_smaller_and_served_again(compiled, cold, shift):
    pool, (source, _) = make_pool(torch.float32, "half")
    frequencies, spec = frequencies_of(ROTATIONS["half"]), ROTATIONS["half"]
    rows, columns = np.array([5, 6, 7, 30, 2, 90]), np.array([1, 2, 3, 9, 11, 12])
    packed = Slab(7, ROWS, 16, pool.groups, DTYPES_COLD[cold])
    pool.slabs[7] = packed
    extent, served = Extent(packed, 0, ROWS), pool.allocate(ROWS)
    still = np.zeros(6, dtype=np.int64)
    copy_rows(pool, source.addresses(0, rows), extent, 0, columns, still, frequencies)
    copy_rows(pool, extent.addresses(0, columns), served, 0, rows, still + shift, frequencies)
    for shape in pool.groups:
        for slot, turned in (("keys", True), ("values", False)):
            want = getattr(source.slab, slot)[shape][:, :, source.start + rows]
            largest = want.abs().amax(dim=-1, keepdim=True)
            if shift and turned:
                want, largest = rotate_keys(want, shift, frequencies[spec], spec), 2 * largest
            got = getattr(served.slab, slot)[shape][:, :, served.start + rows]
            error = (got - want).abs()
            assert (error <= 1.01 * COLD[cold] * largest).all() and error.max() > 0


@pytest.mark.parametrize("cold", COLD)
def test_rows_that_stay_small_keep_their_bits_and_turned_ones_are_rounded_once_more(compiled, cold):
    pool, (source, _) = make_pool(torch.float32, "half")
    frequencies, spec = frequencies_of(ROTATIONS["half"]), ROTATIONS["half"]
    slabs = [Slab(number, ROWS, 16, pool.groups, DTYPES_COLD[cold]) for number in (7, 8)]
    pool.slabs |= {slab.number: slab for slab in slabs}
    first, second = (Extent(slab, 0, ROWS) for slab in slabs)
    rows, still = np.array([3, 4, 40, 8]), np.zeros(4, dtype=np.int64)
    copy_rows(pool, source.addresses(0, rows), first, 0, rows, still, frequencies)
    copy_rows(pool, first.addresses(0, rows), second, 0, rows + 1, still, frequencies)
    for tensor, moved in zip(first.slab.tensors(), second.slab.tensors(), strict=True):
        assert torch.equal(tensor[:, :, rows], moved[:, :, rows + 1])
    copy_rows(pool, first.addresses(0, rows), second, 0, rows + 20, still + 9, frequencies)
    for shape in pool.groups:
        want = rotate_keys(decode(first.slab, shape, "keys", rows), 9, frequencies[spec], spec)
        expected = Slab(9, ROWS, 16, pool.groups, DTYPES_COLD[cold])
        encode(expected, shape, "keys", rows, want)
        assert torch.equal(decode(second.slab, shape, "keys", rows + 20), decode(expected, shape, "keys", rows))


@pytest.mark.parametrize("cold", COLD)
def test_means_are_drawn_from_rows_of_a_smaller_dtype(compiled, cold):
    pool, (source, other) = make_pool(torch.float32, "half")
    frequencies = frequencies_of(ROTATIONS["half"])
    packed = Slab(7, ROWS, 16, pool.groups, DTYPES_COLD[cold])
    pool.slabs[7] = packed
    extent, rows, still = Extent(packed, 0, ROWS), np.array([5, 60]), np.zeros(2, dtype=np.int64)
    copy_rows(pool, source.addresses(0, rows), extent, 0, rows, still, frequencies)
    before = {shape: keys.clone() for shape, keys in other.slab.keys.items()}
    average_rows(pool, extent.addresses(0, rows), other.addresses(0, rows), still, still + 1, frequencies)
    for shape, old in before.items():
        where = other.start + rows
        want = old[:, :, where] + (decode(packed, shape, "keys", rows) - old[:, :, where]) / 2
        assert (other.slab.keys[shape][:, :, where] - want).abs().max() < 1e-6
        assert not torch.equal(other.slab.keys[shape][:, :, where], old[:, :, where])  # control
