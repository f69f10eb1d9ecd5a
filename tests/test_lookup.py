"""The compiled hash table against the reference in numpy; compiled run finding against its oracle."""

import ctypes
import shutil
import subprocess
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_suffix_cache import building, lookup
from hf_suffix_cache.kernels import HashTable, splitmix64, window_hashes
from hf_suffix_cache.lookup import CompiledTable, DeviceTable, make_table
from hf_suffix_cache.store.index import WindowIndex
from test_index import HASHES, as_tuples, make_segment, random_case

MASK = 2**64 - 1
KEYS = st.one_of(st.integers(0, 4), st.sampled_from([MASK, MASK - 1, 2**63, 64, 128, 1 << 20]))
BATCH = st.lists(st.tuples(KEYS, st.integers(0, 12)), max_size=60)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def uint64(values):
    return np.array(values, dtype=np.uint64)


def int64(values):
    return np.array(values, dtype=np.int64)


def need(device):
    if device == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        building.build(["lookup"])


def make(kind, load=0.5):
    """A compiled table: over numpy memory, or over tensors of a device."""
    if kind == "host":
        return CompiledTable(load)
    need(kind)
    return DeviceTable(kind, load)


TABLES = ["host", *DEVICES]


@pytest.fixture(params=TABLES)
def kind(request, kernels):
    assert kernels("lookup") is not None
    return request.param


def check_same(table, reference, keys, limits=(1, 3, 20)):
    assert len(table) == len(reference)
    for limit in limits:
        assert np.array_equal(table.probe(keys, limit), reference.probe(keys, limit))


def unmix(x):
    """Inverse of splitmix64 for one Python integer."""
    x ^= (x >> 31) ^ (x >> 62)
    x = x * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    x ^= (x >> 27) ^ (x >> 54)
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return x ^ (x >> 30) ^ (x >> 60)


# -- the table ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.tuples(st.booleans(), BATCH), max_size=8), load=st.sampled_from([0.5, 0.9]))
def test_random_batches_equal_the_reference(kind, batches, load):
    table, reference = make(kind, load), HashTable(load)
    every_key = uint64([0, 1, 2, 3, 4, MASK, MASK - 1, 2**63, 64, 128, 1 << 20, 77])
    for insert, batch in batches:
        arrays = uint64([key for key, _ in batch]), int64([value for _, value in batch])
        for one in (table, reference):
            (one.insert if insert else one.remove)(*arrays)
        check_same(table, reference, every_key)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.tuples(st.booleans(), st.booleans(), BATCH), max_size=10))
def test_kernel_and_reference_take_over_from_each_other(kernels, batches):
    """A kernel that is built meanwhile works on the memory that the reference left, and the reverse."""
    table, reference = CompiledTable(), HashTable()
    every_key = uint64([0, 1, 2, 3, 4, MASK, MASK - 1, 2**63, 64, 128, 1 << 20, 77])
    for insert, compiled, batch in batches:
        arrays = uint64([key for key, _ in batch]), int64([value for _, value in batch])
        with pytest.MonkeyPatch.context() as patch:
            if not compiled:
                patch.setenv("HF_SUFFIX_CACHE_KERNELS", "off")
            (table.insert if insert else table.remove)(*arrays)
            check_same(table, reference := _with(reference, insert, arrays), every_key)


def _with(reference, insert, arrays):
    (reference.insert if insert else reference.remove)(*arrays)
    return reference


ADVERSARIAL = {
    "constant": lambda count: np.full(count, 5, dtype=np.uint64),
    "mod 7": lambda count: np.arange(count, dtype=np.uint64) % np.uint64(7),
    "one slot": lambda count: uint64([unmix(number << 40) for number in range(count)]),  # splitmix64 ends in zeros
    "last slot": lambda count: uint64([unmix(number << 40 | (1 << 40) - 1) for number in range(count)]),
    "zeros and ones": lambda count: np.tile(uint64([0, MASK]), count // 2),
    "multiples of 2**32": lambda count: np.arange(count, dtype=np.uint64) << np.uint64(32),
}


@pytest.mark.parametrize("load", [0.5, 0.9])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_keys_equal_the_reference(kind, name, load):
    count = 10_000 if kind == "cuda" or name not in ("one slot", "last slot") else 2000  # quadratic by design
    keys, values = ADVERSARIAL[name](count), np.random.default_rng(0).permutation(count)
    table, reference = make(kind, load), HashTable(load)
    for one in (table, reference):
        one.insert(keys, values)
        one.remove(keys[100:1500], values[100:1500])
        one.insert(keys[300:400], values[300:400])
    check_same(table, reference, np.unique(keys[:: max(1, count // 500)]))
    check_same(table, reference, keys[:50] + np.uint64(1), (2,))


@pytest.mark.parametrize("load", [0.25, 0.5, 0.75, 0.9])
def test_full_tables_equal_the_reference(kind, load):
    """Filled to the last node, emptied by half and filled again: the load is what it says."""
    table, reference, rng = make(kind, load), HashTable(load), np.random.default_rng(1)
    count = 20_000
    keys = rng.integers(0, MASK, count, dtype=np.uint64)
    table.insert(keys, np.arange(count))
    more = int(table.capacity * load) - count
    more_keys = rng.integers(0, MASK, more, dtype=np.uint64)
    reference.insert(keys, np.arange(count))
    for one in (table, reference):
        one.insert(more_keys, np.arange(more))
    assert len(table) == int(table.capacity * load) and table.capacity == reference.capacity
    rebuilds = table.rebuilds
    check_same(table, reference, np.concatenate([keys, more_keys]), (2,))
    for one in (table, reference):
        one.remove(keys[::2], np.arange(count)[::2])
        one.insert(keys[::2] + np.uint64(1), np.arange(count)[::2])
    check_same(table, reference, np.concatenate([keys, keys + np.uint64(1), more_keys]), (2,))
    assert load > 0.5 or table.rebuilds == rebuilds


@pytest.mark.parametrize("compiled", [True, False])
def test_pairs_come_and_go_without_a_rebuild(compiled, kernels):
    rng = np.random.default_rng(2)
    table = CompiledTable() if compiled else HashTable()
    keys, values = rng.integers(0, MASK, 6000, dtype=np.uint64), np.arange(6000)
    table.insert(keys, values)
    rebuilds, capacity = table.rebuilds, table.capacity
    for step in range(200):  # each pair is replaced about 20 times
        gone = rng.permutation(6000)[:600]
        table.remove(keys[gone], values[gone])
        keys[gone], values[gone] = rng.integers(0, MASK, 600, dtype=np.uint64), 6000 + 600 * step + np.arange(600)
        table.insert(keys[gone], values[gone])
    assert (table.rebuilds, table.capacity, len(table)) == (rebuilds, capacity, 6000)
    assert np.array_equal(table.probe(keys, 1)[:, 0], values)
    used = [np.count_nonzero(slots != -1) for slots in (table._heads, table._pair_slots)]
    assert used == table._used.tolist()  # what is counted is what is there


@pytest.mark.parametrize("device", DEVICES)
def test_counted_slots_are_the_used_ones_on_a_device(device, kernels):
    table, rng = make(device), np.random.default_rng(3)
    keys = rng.integers(0, 300, 3000, dtype=np.uint64)
    for step in range(20):
        values = np.arange(step * 3000, step * 3000 + 3000)
        table.insert(keys, values)
        table.remove(keys[: 3000 - step], values[: 3000 - step])
    used = [int((slots != -1).sum()) for slots in (table._heads, table._pair_slots)]
    assert used == table._used.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_million_random_keys_equal_the_reference(device, kernels):
    need(device)
    rng = np.random.default_rng(4)
    count = 1_000_000 if device == "cuda" else 200_000
    keys = rng.integers(0, count, count, dtype=np.uint64)  # some more than once
    table, reference = DeviceTable(device), HashTable()
    for one in (table, reference):
        one.insert(keys, np.arange(count))
        one.remove(keys[::3], np.arange(count)[::3])
    check_same(table, reference, np.arange(count, dtype=np.uint64), (8,))


THREADS = """
#define LOOKUP_THREADS
#include "lookup.cuh"
#include <thread>
#include <vector>
namespace lookup {
template <class Step>
int run(const Step& step, int64_t n, void*) {
    std::vector<std::thread> threads;
    for (int64_t first = 0; first < 6; first++)
        threads.emplace_back([=] { for (int64_t i = first; i < n; i += 6) step(i); });
    for (auto& thread : threads) thread.join();
    return 0;
}
}
"""


@pytest.fixture(scope="module")
def threaded(kernels, tmp_path_factory):
    """The steps of a GPU, entry beside entry, in threads: they must get along without any order."""
    folder = tmp_path_factory.mktemp("threads")
    (folder / "threads.cpp").write_text(THREADS)
    command = ["c++", "-O2", "-std=c++17", "-pthread", "-fPIC", "-shared", f"-I{building.SOURCES}"]
    subprocess.run([*command, "-o", folder / "threads.so", folder / "threads.cpp"], check=True)
    compiled = ctypes.CDLL(str(folder / "threads.so"))
    lookup.declare(compiled)
    return compiled


@pytest.mark.parametrize("name", ["random", "constant", "mod 7", "one slot", "zeros and ones"])
def test_steps_side_by_side_equal_the_reference(name, threaded):
    rng = np.random.default_rng(5)
    count = 300 if name == "one slot" else 3000
    make_keys = ADVERSARIAL.get(name, lambda count: rng.integers(0, count, count, dtype=np.uint64))
    table, reference = DeviceTable("cpu"), HashTable()
    table._compiled = threaded
    for step in range(12):
        keys, values = make_keys(count), rng.permutation(count) + step * 7
        gone = rng.permutation(count)[: count * 9 // 10]
        for one in (table, reference):
            one.insert(keys, values)
            one.remove(keys[gone], values[gone])
        check_same(table, reference, np.unique(keys), (3, 50))
        used = [int((slots != -1).sum()) for slots in (table._heads, table._pair_slots)]
        assert used == table._used.tolist()


def test_negative_control_a_swapped_link_is_noticed(kernels):
    """The comparison above would tell a wrong order of values."""
    table, reference = CompiledTable(), HashTable()
    for one in (table, reference):
        one.insert(uint64([9, 9, 9]), int64([1, 2, 3]))
    table._values[[0, 1]] = table._values[[1, 0]]
    with pytest.raises(AssertionError):
        check_same(table, reference, uint64([9]))


def test_wrong_arguments_raise(kind):
    table = make(kind)
    with pytest.raises(ValueError, match="at least 0"):
        table.insert(uint64([1]), int64([-1]))
    with pytest.raises(ValueError, match="one length"):
        table.remove(uint64([1, 2]), int64([1]))
    assert table.probe(uint64([]), 3).shape == (0, 3) and len(table) == 0
    with pytest.raises(ValueError, match="load"):
        HashTable(load=1.0)


def test_removed_pairs_leave_no_value_behind(kind):
    table = make(kind)
    table.insert(uint64([5, 5, 6]), int64([1001, 1002, 1003]))
    table.remove(uint64([5, 6]), int64([1002, 1003]))
    for array in vars(table).values():
        if isinstance(array, (np.ndarray, torch.Tensor)):
            assert not np.isin(np.asarray(array.cpu() if hasattr(array, "cpu") else array), [1002, 1003]).any()


# -- damage and size ----------------------------------------------------------------------------------------------


DAMAGE = {
    "link to nowhere": ("_next", 10**12),
    "link far below": ("_next", -(10**12)),
    "head to nowhere": ("_heads", 10**12),
    "circle": ("_next", 0),
    "back link to nowhere": ("_prev", 2**62),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_links_never_read_outside(kind, how):
    """Far outside lies no memory of ours: reading there would crash, or be seen in an answer."""
    table = make(kind)
    keys, values = np.repeat(uint64([3, 4, 5]), 8), np.arange(24)
    table.insert(keys, values)
    name, wrong = DAMAGE[how]
    array = getattr(table, name)
    array[array >= 0] = wrong
    found = table.probe(uint64([3, 4, 5, 6]), 30)
    assert np.isin(found, [-1, *range(24)]).all()
    table.remove(keys[::2], values[::2])
    found = table.probe(uint64([3, 4, 5, 6]), 30)
    assert np.isin(found, [-1, *range(24)]).all()


def test_table_without_an_empty_slot_ends_its_searches(kind):
    table = make(kind)
    table.insert(uint64([1]), int64([1]))
    table._heads[:] = -2
    table._pair_slots[:] = -2
    assert (table.probe(uint64([1, 2, 3]), 2) == -1).all()
    table.remove(uint64([1]), int64([1]))


@pytest.mark.parametrize("device", DEVICES)
def test_indices_past_2_to_the_31_are_not_cut(device, kernels):
    """
    A table of 2**34 slots whose nodes start at 2**33: only a part of it has memory, and the addresses of the arrays
    lie so far before it that 64-bit indices, and no others, meet it.
    """
    need(device)
    first_slot, first_node, room = (1 << 34) - 4096, 1 << 33, 512
    compiled = lookup._declared("lookup", device)
    keys = uint64([unmix(first_slot + 8 * number | number << 40) for number in range(200)])
    memory = {name: torch.full((4096,), -1, dtype=torch.int64, device=device) for name in ("heads", "pairs")}
    nodes = {name: torch.full((room,), -1, dtype=torch.int64, device=device) for name in ("keys", "values", "next")}
    nodes["prev"] = torch.full((room,), -1, dtype=torch.int64, device=device)
    alive = torch.zeros(room, dtype=torch.uint8, device=device)
    used = torch.zeros(2, dtype=torch.int64, device=device)
    nodes["keys"][:200] = torch.from_numpy(keys.view(np.int64)).to(device)
    values = np.arange(200) + 2**40
    nodes["values"][:200] = torch.from_numpy(values).to(device)
    struct = lookup.TableStruct(
        memory["heads"].data_ptr() - 8 * first_slot,
        memory["pairs"].data_ptr(),
        *(nodes[name].data_ptr() - 8 * first_node for name in ("keys", "values", "next", "prev")),
        alive.data_ptr() - first_node,
        used.data_ptr(),
        1 << 34,
        first_node + room,
    )
    numbers = torch.arange(200, device=device) + first_node
    homes = splitmix64(keys) & np.uint64((1 << 34) - 1)
    assert homes.min() == first_slot > 2**31
    memory["heads"][torch.from_numpy((homes - np.uint64(first_slot)).astype(np.int64)).to(device)] = numbers
    asked, found = keys.view(np.int64), torch.zeros((200, 2), dtype=torch.int64, device=device)
    asked = torch.from_numpy(asked).to(device)
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else None
    table = ctypes.byref(struct)
    assert compiled.lookup_probe(table, asked.data_ptr(), 200, 2, found.data_ptr(), stream) == 0
    assert found[:, 0].cpu().tolist() == values.tolist() and (found[:, 1] == -1).all()
    cut = lookup.TableStruct(*[getattr(struct, name) for name, _ in struct._fields_])
    cut.nodes = first_node  # control: nodes past the end are not read
    assert compiled.lookup_probe(ctypes.byref(cut), asked.data_ptr(), 200, 2, found.data_ptr(), stream) == 0
    assert (found == -1).all()


def test_values_past_2_to_the_31_are_not_cut(kind):
    table, keys = make(kind), np.arange(1, 40, dtype=np.uint64)
    table.insert(keys, np.arange(39) + 2**62)
    assert table.probe(keys, 1)[:, 0].tolist() == [2**62 + number for number in range(39)]


# -- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["host", "device"])
@pytest.mark.parametrize("hash_name", HASHES)
@pytest.mark.parametrize("vocabulary", [2, 3, 50_000])
def test_compiled_runs_equal_the_reference(table, hash_name, vocabulary, kernels, monkeypatch):
    rng = np.random.default_rng(vocabulary)
    if table == "device":
        monkeypatch.setattr("hf_suffix_cache.store.index.make_table", lambda device: DeviceTable("cpu"))
    total = 0
    for _ in range(8):
        segments, ids = random_case(rng, vocabulary, num_segments=8, length=200)
        for candidates in (1, 3, 8, 255):
            index = WindowIndex(max_candidates=candidates, hash_fn=HASHES[hash_name])
            for segment in segments:
                index.add(segment)
            index.remove(segments[3])
            for first, min_match in ((0, 16), (37, 16), (0, 8), (0, 40), (5, 1)):
                with monkeypatch.context() as patch:
                    patch.setattr("hf_suffix_cache.store.index.find_spans", lambda *args: None)
                    expected = index._spans(ids, first, min_match)
                assert index._spans(ids, first, min_match) == expected
                total += len(expected)
    assert total > 100


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), candidates=st.integers(1, 9), min_match=st.integers(1, 30), first=st.integers(0, 20))
def test_compiled_runs_of_any_text_equal_the_reference(kernels, data, candidates, min_match, first):
    texts = st.lists(st.integers(0, 1), min_size=8, max_size=80)
    index = WindowIndex(window=4, stride=data.draw(st.integers(1, 5)), max_candidates=candidates)
    for text in data.draw(st.lists(texts, max_size=4)):
        index.add(make_segment(text))
    ids = int64(data.draw(texts))
    found = index._spans(ids, first, min_match)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_SUFFIX_CACHE_KERNELS", "off")
        assert found == index._spans(ids, first, min_match)


@pytest.mark.gpu
def test_index_on_a_gpu_equals_one_on_the_host(kernels):
    need("cuda")
    rng = np.random.default_rng(6)
    segments, ids = random_case(rng, 50, num_segments=30, length=3000)
    here, there = WindowIndex(), WindowIndex(device="cuda")
    assert isinstance(there._table, DeviceTable)
    for index in (here, there):
        for segment in segments:
            index.add(segment)
        for segment in segments[::3]:
            index.remove(segment)
    assert as_tuples(here.find_runs(ids)) == as_tuples(there.find_runs(ids)) != []


def test_table_of_a_device_without_kernel_lies_on_the_host(references):
    assert isinstance(make_table("cuda"), CompiledTable) and isinstance(make_table("cpu"), CompiledTable)
    with pytest.raises(RuntimeError, match="hf-suffix-cache build"):
        DeviceTable("cpu")


@pytest.mark.parametrize("period", [1, 3, 8, 997])
def test_128k_periodic_tokens_take_milliseconds(period, kernels):
    ids = np.resize(np.random.default_rng(0).permutation(5000)[:period], 131_072)
    index = WindowIndex()
    index.add(make_segment(ids))
    started = time.perf_counter()
    runs = index.find_runs(ids)
    assert time.perf_counter() - started < 0.5  # 0.02 s measured
    assert runs


# -- the CUDA source ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not there")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_cuda_source_compiles_by_plain_nvcc_in_seconds(architecture, tmp_path):
    source, target = building.SOURCES / "lookup.cu", tmp_path / "lookup.so"
    command = ["nvcc", *building.CUDA_FLAGS, f"-arch={architecture}", "-Xcompiler", "-fPIC", "-shared", "-o"]
    started = time.perf_counter()
    done = subprocess.run([*command, str(target), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - started < 60  # 3 s measured
    assert "warning" not in done.stderr
    library = ctypes.CDLL(str(target))  # what Python calls is there, under the names that it uses
    assert all(hasattr(library, name) for name in lookup._SIGNATURES if name not in lookup._HOST_ONLY)


def test_sources_include_no_torch_headers():
    for source in building.SOURCES.glob("lookup.*"):
        assert "torch/" not in source.read_text() and "ATen" not in source.read_text()


def test_hashes_of_windows_are_probed_as_stored(kernels):
    """A prompt's windows, at every offset, through both tables."""
    ids = np.random.default_rng(7).integers(0, 9, 5000)
    hashes = window_hashes(ids)
    tables = [HashTable(), CompiledTable(), DeviceTable("cpu")]
    for table in tables:
        table.insert(hashes[::8], np.arange(0, len(hashes), 8))
    answers = [table.probe(hashes, 8) for table in tables]
    assert (answers[0][:, 0] >= 0).sum() >= len(hashes[::8])
    assert all(np.array_equal(answer, answers[0]) for answer in answers[1:])
