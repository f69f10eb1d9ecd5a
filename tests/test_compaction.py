"""Compaction: rows move together without a change, in bounded steps, and what calls lie over stays where it is."""

import numpy as np
import pytest
import torch

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.config import PoolExhausted
from hf_suffix_cache.store.accounting import Survey
from hf_suffix_cache.store.compaction import compact_pool, make_range
from hf_suffix_cache.store.pool import SLAB_BITS, BlockPool, Budget, LayerShape
from hf_suffix_cache.store.segments import Segment
from hf_suffix_cache.store.shelf import Recipe, Sequence, Shelf
from reference import ask, check_pool, same_as_vanilla
from tiny_models import A, B, C, head, make_model, question

SHAPE = LayerShape(1, 2, 2, torch.float32, torch.device("cpu"))
ROW = SHAPE.row_bytes


class Held:
    """A pool with sequences of one segment each, whose rows hold the numbers that they were given."""

    def __init__(self, rows: int, block_size: int = 4):
        self.pool = BlockPool([SHAPE], block_size, Budget(rows * ROW), poison=True)
        self.shelf = Shelf(self.pool)
        self.held: dict[Sequence, torch.Tensor] = {}

    def put(self, addresses) -> Sequence:
        """A sequence whose rows lie at these addresses; they get a reference."""
        addresses, ids = np.asarray(addresses), np.arange(len(addresses)) + 1000 * len(self.held)
        self.pool.retain_rows(addresses)
        segment = Segment(ids, np.arange(len(ids)), ids, addresses)
        values = torch.arange(len(ids), dtype=torch.float32) + 10_000.0 * (len(self.held) + 1)
        for slab, rows, index in self.pool.by_slab(addresses):
            for tensor in slab.tensors():
                tensor[:, :, rows] = values[index, None]
        zeros = np.zeros(len(ids), dtype=np.int64)
        sequence = Sequence(ids, Recipe([segment], zeros.astype(np.int32), np.arange(len(ids)), zeros), len(ids), 1)
        self.shelf.add(sequence)
        self.shelf.unpin([])
        segment_rows = self.held.setdefault(sequence, values)
        assert len(segment_rows) == len(segment)
        return sequence

    def check(self) -> None:
        """Every row of every sequence holds its number; every reference is explained; nothing else is filled."""
        survey = Survey(self.pool, [self.shelf])
        for layout in survey.layouts.values():
            assert np.array_equal(layout.explained, layout.slab.references)
        for sequence, values in self.held.items():
            if sequence in self.shelf.sequences:
                (segment,) = sequence.recipe.segments
                assert len(np.unique(segment.addresses)) == len(segment)
                for slab, rows, index in self.pool.by_slab(segment.addresses):
                    for tensor in slab.tensors():
                        assert torch.equal(tensor[0, 0, rows, 0], values[index])

    def kinds(self) -> dict[str, int]:
        return {kind: size // ROW for kind, size in Survey(self.pool, [self.shelf]).bytes_by_kind().items()}


def scattered(held: Held, rows: int, step: int) -> np.ndarray:
    """Every `step`-th address of a new extent of `rows` rows, whose own reference is given back."""
    extent = held.pool.allocate(rows)
    addresses = extent.addresses(0, np.arange(0, rows, step))
    held.pool.retain_rows(addresses)
    held.pool.release(extent)
    return addresses


def test_scattered_rows_are_packed_and_their_blocks_freed():
    held = Held(256)
    for step in (2, 3, 4):
        addresses = scattered(held, 60, step)
        held.put(addresses)
        held.pool.release_rows(addresses)
    assert held.kinds()["waste"] > 60
    result = compact_pool(held.pool, [held.shelf])
    held.check()
    assert held.kinds()["waste"] < 4 and result.bytes_moved > 0
    assert result.blocks_freed == 45 - (30 + 20 + 15 + 3) // 4
    assert compact_pool(held.pool, [held.shelf]) == (0, 0)


def test_bounded_steps_reach_the_same_and_never_move_more_than_they_may():
    held = Held(512)
    for _ in range(4):
        addresses = scattered(held, 80, 3)
        held.put(addresses)
        held.pool.release_rows(addresses)
    wastes = [held.kinds()["waste"]]
    for _ in range(40):
        result = compact_pool(held.pool, [held.shelf], max_rows=12)
        held.check()
        assert result.bytes_moved <= 12 * ROW
        wastes.append(held.kinds()["waste"])
        if result == (0, 0):
            break
    assert wastes == sorted(wastes, reverse=True) and wastes[-1] <= 0.05 * held.pool.bytes_used / ROW + 4
    assert len(wastes) > 5


def test_free_blocks_form_one_range_after_a_whole_compaction():
    held = Held(320)
    sequences = [held.put(held.pool.pack([12])[0]) for _ in range(20)]
    for sequence in sequences:
        held.pool.release_rows(sequence.recipe.segments[0].addresses)  # `pack` has taken one as well
    for sequence in sequences[::2]:
        held.shelf.remove(sequence)
    compact_pool(held.pool, [held.shelf])
    held.check()
    for slab in held.pool.slabs.values():
        assert len(slab.free_ranges()) <= 1
    assert held.kinds()["exact"] == 120


def test_blocks_under_a_view_stay_and_are_never_written():
    held = Held(256)
    view = held.pool.allocate(40)
    window = view.layer_view(held.pool.layer_tensors(view.slab, 0)[0])
    window.fill_(7.0)
    own = held.put(view.addresses(0, np.array([3, 9, 17])))
    addresses = scattered(held, 60, 3)
    held.put(addresses)
    held.pool.release_rows(addresses)
    before = own.recipe.segments[0].addresses.copy()
    window[0, 0, [3, 9, 17]] = held.held[own][:, None]
    want = window.clone()
    compact_pool(held.pool, [held.shelf])
    assert torch.equal(window, want) and np.array_equal(own.recipe.segments[0].addresses, before)
    assert held.kinds()["views"] == 37
    held.pool.release(view)
    compact_pool(held.pool, [held.shelf])
    held.check()
    assert not np.array_equal(own.recipe.segments[0].addresses, before)


def test_rows_move_aside_for_a_long_extent():
    held = Held(200)
    addresses = held.pool.allocate(200).addresses(0, np.arange(200))
    for start in range(0, 200, 20):
        held.put(addresses[start : start + 8])
    held.pool.release_rows(addresses)  # the extent's own references, a block at a time
    with pytest.raises(PoolExhausted):
        held.pool.allocate(60)
    assert make_range(held.pool, [held.shelf], 60)
    extent = held.pool.allocate(60)
    held.pool.release(extent)
    held.check()
    assert not make_range(held.pool, [held.shelf], 160)
    held.check()


def test_slabs_give_way_to_a_longer_one():
    held = Held(128)
    held.pool.generous = False
    extents = [held.pool.allocate(40) for _ in range(3)]
    assert len(held.pool.slabs) == 3
    for extent in extents:
        held.put(extent.addresses(0, np.arange(8)))
        held.pool.release(extent)
    assert make_range(held.pool, [held.shelf], 64)
    extent = held.pool.allocate(64)
    assert extent.rows == 64 and held.pool.bytes_total <= 128 * ROW
    held.pool.release(extent)
    held.check()


def test_check_notices_a_row_that_was_lost_or_moved_wrongly():
    held = Held(64)
    sequence = held.put(held.pool.pack([10])[0])
    (segment,) = sequence.recipe.segments
    held.pool.release_rows(segment.addresses)
    held.check()
    segment.addresses = segment.addresses[::-1].copy()
    with pytest.raises(AssertionError):
        held.check()
    segment.addresses = segment.addresses[::-1].copy()
    held.pool.retain_rows(segment.addresses[:1])
    with pytest.raises(AssertionError):
        held.check()


# -- by itself ------------------------------------------------------------------------------------------------------


def holey(model, **options) -> SuffixCache:
    """A cache with many conversations of moved rows, most of which are given up again."""
    cache = SuffixCache(keep_conversations=2, **options)
    for number in range(12):
        order = [(A, B, C), (B, C, A), (C, A, B)][number % 3]
        ask(model, head(number) + sum(order, []) + question(number), cache, steps=1)
    (shelf,) = cache._store.shelves.values()
    for sequence in [each for each in shelf.sequences if each.extent is None][1::2]:
        shelf.remove(sequence)
    return cache


@pytest.mark.parametrize("threshold", [None, 0.02])
def test_store_packs_itself_after_calls_past_the_threshold(threshold):
    model = make_model("llama")
    cache = holey(model, compact_waste=threshold)
    share = [waste_share(cache)]
    for number in range(4):
        same_as_vanilla(model, head(30 + number) + A + question(number), cache.using(fidelity="exact"), steps=1)
        share.append(waste_share(cache))
        check_pool(cache)
    if threshold is None:
        assert share[-1] > 0.02
        cache.compact()
    assert waste_share(cache) <= 0.05
    check_pool(cache)
    same_as_vanilla(model, head(8) + C + A + B + question(8), cache.using(fidelity="exact"))


def waste_share(cache) -> float:
    return cache.stats.bytes_by_kind()["waste"] / cache.stats.bytes_used


def test_compaction_of_a_pool_of_several_slabs_keeps_answers_and_slabs_apart():
    model = make_model("llama")
    cache = holey(model, max_bytes=4000 * 768)
    (shelf,) = cache._store.shelves.values()
    before = {id(slab) for slab in shelf.pool.slabs.values()}
    cache.compact()
    assert {id(slab) for slab in shelf.pool.slabs.values()} <= before
    numbers = {int(segment.addresses[0]) >> SLAB_BITS for segment in shelf.segments}
    assert numbers <= set(shelf.pool.slabs)
    for number in range(3):
        same_as_vanilla(model, head(number) + A + B + question(number), cache.using(fidelity="exact"))
    check_pool(cache)
