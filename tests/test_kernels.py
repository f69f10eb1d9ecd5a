"""Rolling hashes against Python integers, the hash table against a dict of lists."""

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_suffix_cache import kernels
from hf_suffix_cache.kernels import HashTable, splitmix64, window_hashes

MASK = 2**64 - 1


def slow_hashes(ids, window=8):
    """The definition, one window and one Python integer at a time."""
    hashes = []
    for start in range(len(ids) - window + 1):
        x = 0
        for token in ids[start : start + window]:
            x = (x * 0x9E3779B97F4A7C15 + int(token) + 1) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        hashes.append(x ^ (x >> 31))
    return hashes


class SlowTable:
    """Multimap as a dict of lists, newest first."""

    def __init__(self):
        self.lists = {}

    def insert(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            if value not in self.lists.setdefault(key, []):
                self.lists[key].insert(0, value)

    def remove(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            if value in self.lists.get(key, []):
                self.lists[key].remove(value)

    def probe(self, keys, limit):
        return [(self.lists.get(key, []) + [-1] * limit)[:limit] for key in keys]

    def __len__(self):
        return sum(len(values) for values in self.lists.values())


def uint64(values):
    return np.array(values, dtype=np.uint64)


def int64(values):
    return np.array(values, dtype=np.int64)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 10))
def test_window_hashes_any_ids_equal_definition(ids, window):
    hashes = window_hashes(int64(ids), window)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == slow_hashes(ids, window)


def test_window_hashes_order_zeros_and_place_count():
    distinct = [
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 2, 3, 4, 5, 6, 7, 8],
        [8, 7, 6, 5, 4, 3, 2, 1],
        [2, 1, 3, 4, 5, 6, 7, 8],
    ]
    assert len({int(window_hashes(int64(ids))[0]) for ids in distinct}) == len(distinct)
    leading = [int(window_hashes(int64([0] * zeros + [5]), window=zeros + 1)[0]) for zeros in range(8)]
    assert len(set(leading)) == 8
    ids = int64([9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8])
    hashes = window_hashes(ids)
    assert hashes[0] == hashes[9] and len(set(hashes.tolist())) == 9  # nothing but the tokens enters


def test_window_hashes_control_without_order_collides():
    """Control of the test above: a sum of tokens doesn't tell permutations apart."""
    sums = {sum(ids) for ids in ([1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1])}
    assert len(sums) == 1


def test_window_hashes_short_input_is_empty():
    assert len(window_hashes(int64([1, 2, 3]))) == 0
    assert len(window_hashes(int64([]))) == 0
    with pytest.raises(ValueError, match="window"):
        window_hashes(int64([1, 2]), window=0)


def test_window_hashes_other_process_same_values():
    code = (  # by path: importing the package would import torch
        "import runpy, sys; module = runpy.run_path(sys.argv[1]); "
        "print(*module['window_hashes'](module['np'].arange(100, 112)))"
    )
    command = [sys.executable, "-c", code, kernels.__file__]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    expected = window_hashes(np.arange(100, 112)).tolist()
    assert [int(word) for word in printed.split()] == expected
    assert int(window_hashes(np.zeros(8, dtype=np.int64))[0]) == GOLDEN  # and in every version: stores are saved


GOLDEN = 0x5760887B9FD6BB91


def test_splitmix64_published_vector_reproduced():
    # First outputs of splitmix64 seeded with 0: the finaliser of multiples of the golden gamma.
    gamma = uint64([0x9E3779B97F4A7C15, 0x9E3779B97F4A7C15 * 2 & MASK])
    assert splitmix64(gamma).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_hash_table_empty_probe_all_minus_one():
    table = HashTable()
    assert len(table) == 0
    assert (table.probe(uint64([1, 2, MASK]), 3) == -1).all()
    assert table.probe(uint64([]), 3).shape == (0, 3)
    table.remove(uint64([1]), int64([1]))
    table.insert(uint64([]), int64([]))
    assert len(table) == 0


def test_hash_table_wrong_arguments_raise():
    table = HashTable()
    with pytest.raises(ValueError, match="at least 0"):
        table.insert(uint64([1]), int64([-1]))
    with pytest.raises(ValueError, match="one length"):
        table.insert(uint64([1, 2]), int64([1]))
    assert len(table) == 0


KEYS = st.one_of(st.integers(0, 4), st.sampled_from([MASK, MASK - 1, 2**63, 64, 128, 1 << 20]))
BATCH = st.lists(st.tuples(KEYS, st.integers(0, 12)), max_size=60)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.booleans(), BATCH), max_size=8))
def test_hash_table_random_batches_equal_dict_of_lists(batches):
    table, slow = HashTable(), SlowTable()
    every_key = [0, 1, 2, 3, 4, MASK, MASK - 1, 2**63, 64, 128, 1 << 20, 77]
    for insert, batch in batches:
        keys, values = [key for key, _ in batch], [value for _, value in batch]
        for one in (table, slow):
            arrays = (uint64(keys), int64(values)) if one is table else (keys, values)
            (one.insert if insert else one.remove)(*arrays)
        assert len(table) == len(slow)
        for limit in (1, 3, 20):
            assert table.probe(uint64(every_key), limit).tolist() == slow.probe(every_key, limit)


@pytest.mark.parametrize("spread", [1, 7, 5000, 2**64 - 1])
def test_hash_table_long_churn_equal_dict_of_lists(spread):
    """Growth, tombstones and rehashes: far more pairs come and go than stay."""
    rng = np.random.default_rng(spread % 1000)
    table, slow = HashTable(), SlowTable()
    kept = []
    for step in range(30):
        keys = rng.integers(0, spread, 300, dtype=np.uint64, endpoint=True) % np.uint64(spread)
        values = np.arange(step * 300, step * 300 + 300)
        table.insert(keys, values)
        slow.insert(keys.tolist(), values.tolist())
        kept += zip(keys.tolist(), values.tolist(), strict=True)
        order = rng.permutation(len(kept))
        gone, kept = [kept[i] for i in order[:250]], [kept[i] for i in order[250:]]
        for one, make in ((table, (uint64, int64)), (slow, (list, list))):
            one.remove(make[0]([key for key, _ in gone]), make[1]([value for _, value in gone]))
        keys = sorted(slow.lists)[:400]
        assert table.probe(uint64(keys), 8).tolist() == slow.probe(keys, 8)
    assert len(table) == len(slow) == len(kept)
    assert table.capacity <= 16 * len(kept)
    table.remove(uint64([key for key, _ in kept]), int64([value for _, value in kept]))
    assert len(table) == 0 and table.capacity == HashTable().capacity
    assert (table.probe(uint64(keys), 2) == -1).all()


def test_hash_table_removed_pairs_leave_no_value_behind():
    table = HashTable()
    table.insert(uint64([5, 5, 6]), int64([1001, 1002, 1003]))
    table.remove(uint64([5, 6]), int64([1002, 1003]))
    for array in vars(table).values():
        if isinstance(array, np.ndarray) and array.dtype != bool:
            assert not np.isin(array, [1002, 1003]).any()
    assert table.probe(uint64([5, 6]), 2).tolist() == [[1001, -1], [-1, -1]]


@pytest.mark.parametrize("equal_keys", [True, False])
def test_hash_table_hundred_thousand_pairs_bounded_time(equal_keys):
    count = 100_000
    keys = np.zeros(count, dtype=np.uint64) if equal_keys else splitmix64(np.arange(count).astype(np.uint64))
    values = np.arange(count)
    table = HashTable()
    started = time.perf_counter()
    table.insert(keys, values)
    found = table.probe(keys, 8)
    table.insert(uint64([MASK]), int64([3]))
    assert table.probe(uint64([MASK, 1]), 1).tolist() == [[3], [-1]]
    for one in range(0, 1000):  # single pairs out of the middle of the long list
        table.remove(keys[one * 50 : one * 50 + 1], values[one * 50 : one * 50 + 1])
    table.remove(keys, values)
    assert time.perf_counter() - started < 5  # 0.2 s measured
    assert found[0].tolist() == ([*range(count - 1, count - 9, -1)] if equal_keys else [0] + [-1] * 7)
    assert len(table) == 1
