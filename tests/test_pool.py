"""The block pool: placement, counting, copying."""

import numpy as np
import pytest
import torch

from hf_suffix_cache import PoolExhausted
from hf_suffix_cache.rope import RotarySpec, rotate_keys
from hf_suffix_cache.store.gather import copy_rows
from hf_suffix_cache.store.pool import SLAB_BITS, BlockPool, Budget, LayerShape

SPEC = RotarySpec("rotary.inv_freq")
FREQUENCIES = {SPEC: 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)}
WIDE = LayerShape(2, 8, 8, torch.float32, torch.device("cpu"), SPEC)
NARROW = LayerShape(1, 8, 4, torch.float32, torch.device("cpu"), None)  # other heads, other values, no rotation
SHAPES = (WIDE, NARROW, WIDE)
ROW = sum(shape.row_bytes for shape in SHAPES)


def make_pool(rows=1024, block_size=16, poison=True):
    return BlockPool(SHAPES, block_size, Budget(rows * ROW), poison)


def used(pool):
    return pool.bytes_used // ROW


def write(pool, extent, seed=0):
    """Random rows into an extent of one run; returns keys and values per layer, `[kv_heads, rows, dim]`."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for layer, shape in enumerate(SHAPES):
        keys, values = (extent.layer_view(tensor)[0] for tensor in pool.layer_tensors(extent.slab, layer))
        keys.copy_(torch.randn(shape.kv_heads, extent.rows, shape.key_dim, generator=generator))
        values.copy_(torch.randn(shape.kv_heads, extent.rows, shape.value_dim, generator=generator))
        rows.append((keys.clone(), values.clone()))
    return rows


def test_extents_are_whole_blocks_and_never_overlap():
    pool = make_pool()
    extents = [pool.allocate(rows) for rows in (1, 16, 17, 100, 33)]
    assert [extent.rows for extent in extents] == [16, 16, 32, 112, 48]
    taken = [(extent.slab.number, extent.start + row) for extent in extents for row in range(extent.rows)]
    assert len(taken) == len(set(taken)) == used(pool) == 224


def test_budget_is_never_passed_and_freed_blocks_serve_again():
    pool = make_pool(rows=128)
    first, second = pool.allocate(64), pool.allocate(48)
    assert pool.bytes_total <= pool.budget.max_bytes
    with pytest.raises(PoolExhausted):
        pool.allocate(32)
    pool.release(first)
    third = pool.allocate(32)
    pool.release(second)
    pool.release(third)
    assert used(pool) == 0 and pool.trim() == 128 * ROW and pool.bytes_total == 0 == pool.budget.taken


def test_extent_grows_in_place_where_the_blocks_behind_are_free():
    pool = make_pool(rows=16384)
    extent = pool.allocate(40)
    other = pool.allocate(40)  # placed so that the first one keeps room
    grown = pool.grow_in_place(extent, 100)
    assert grown.slab is extent.slab and grown.start == extent.start and grown.rows == 112
    pool.release(extent)
    pool.release(grown)
    assert used(pool) == 48  # the other one
    blocked = pool.allocate(other.start - extent.start, 1)
    assert pool.grow_in_place(blocked, blocked.rows + 1) is None or blocked.start != extent.start


def test_grow_in_place_refuses_a_taken_block():
    pool = make_pool(rows=64)
    first = pool.allocate(32)
    pool.allocate(16)
    assert pool.grow_in_place(first, 64) is None
    assert used(pool) == 48


def test_blocks_are_free_when_the_last_reference_falls_and_poisoned():
    pool = make_pool()
    extent = pool.allocate(48)
    write(pool, extent)
    addresses = extent.addresses(0, np.arange(5, 20))  # blocks 0 and 1
    pool.retain_rows(addresses)
    pool.release(extent)
    keys = pool.layer_tensors(extent.slab, 0)[0][:, extent.start : extent.start + 48]
    assert used(pool) == 32
    assert not keys[:, :32].isnan().any() and keys[:, 32:].isnan().all()
    pool.release_rows(addresses)
    assert used(pool) == 0 and keys.isnan().all()
    with pytest.raises(AssertionError, match="more often"):
        pool.release_rows(addresses)


def test_batch_is_one_strided_view():
    pool = make_pool()
    extent = pool.allocate(20, batch=3)
    view = extent.layer_view(pool.layer_tensors(extent.slab, 0)[0])
    assert view.shape == (3, 2, 32, 8)
    view[1, :, 7] = 5.0
    address = int(extent.addresses(1, np.array([7]))[0])
    assert (pool.layer_tensors(extent.slab, 0)[0][:, address & ((1 << SLAB_BITS) - 1)] == 5.0).all()
    part = extent.part(1, 18)
    assert (part.start, part.rows, part.batch) == (extent.start + 32, 32, 1)


@pytest.mark.parametrize("runs", ["long", "scattered"])
def test_copied_rows_are_the_stored_ones_turned(runs):
    pool = make_pool()
    source, target = pool.allocate(96), pool.allocate(96)
    rows = write(pool, source, seed=3)
    write(pool, target, seed=4)
    picked = np.arange(10, 70) if runs == "long" else np.array([3, 9, 4, 77, 50, 51, 20])
    columns = np.arange(len(picked)) + 6
    shifts = np.where(np.arange(len(picked)) < len(picked) // 2, -4, 0)
    copy_rows(pool, source.addresses(0, picked), target, 0, columns, shifts, FREQUENCIES)
    for layer, shape in enumerate(SHAPES):
        keys, values = (target.layer_view(tensor)[0] for tensor in pool.layer_tensors(target.slab, layer))
        for row, column, shift in zip(picked, columns, shifts, strict=True):
            want = rows[layer][0][:, row]
            if shift and shape.rotary is not None:
                want = rotate_keys(want, int(shift), FREQUENCIES[SPEC])
            assert torch.equal(keys[:, column], want)
            assert torch.equal(values[:, column], rows[layer][1][:, row])


def test_copy_gathers_from_several_slabs():
    pool = make_pool(rows=4096)
    first = pool.allocate(200)
    second = pool.allocate(2000)  # more than the first slab holds
    assert first.slab is not second.slab
    rows = [write(pool, first, 1), write(pool, second, 2)]
    target = pool.allocate(40)
    addresses = np.concatenate([first.addresses(0, np.arange(30, 50)), second.addresses(0, np.arange(1900, 1920))])
    copy_rows(pool, addresses, target, 0, np.arange(40), np.zeros(40, dtype=np.int64), FREQUENCIES)
    keys = target.layer_view(pool.layer_tensors(target.slab, 2)[0])[0]
    assert torch.equal(keys[:, :20], rows[0][2][0][:, 30:50])
    assert torch.equal(keys[:, 20:40], rows[1][2][0][:, 1900:1920])


def test_private_extent_is_outside_pool_and_budget():
    pool = make_pool(rows=16)
    extent = pool.allocate_private(500, batch=2)
    assert not extent.pooled and pool.bytes_total == 0 and pool.budget.taken == 0
    pool.release(extent)  # nothing to give back
    assert pool.grow_in_place(extent, 1000) is None


def test_slabs_are_ordinary_tensors_even_when_made_in_inference_mode():
    pool = make_pool(poison=False)
    with torch.inference_mode():
        extent = pool.allocate(16)
    keys = pool.layer_tensors(extent.slab, 0)[0]
    assert not keys.is_inference()
    keys[:, 0] = 1.0  # would raise for an inference tensor
