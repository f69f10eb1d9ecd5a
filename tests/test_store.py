"""The store: eviction order, deduplication, compaction."""

import gc
import itertools

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.store.room import growth_room
from reference import ask, check_pool, same_as_vanilla, stored
from tiny_models import A, B, C, forget, head, make_model, new_text, old_text, question

ROW = 3 * 2 * 2 * 16 * 4  # bytes: layers x (keys, values) x kv heads x head_dim x fp32


def shelf_of(cache):
    (shelf,) = cache._store.shelves.values()
    return shelf


def stored_rows(cache, sequence):
    """Keys and values of a stored sequence by its recipe, without turning: `[layers, 2, kv_heads, rows, head_dim]`."""
    pool = shelf_of(cache).pool
    rows = []
    for slab, inside, _ in pool.by_slab(sequence.recipe.addresses_of(np.arange(len(sequence.ids)))):
        rows.append(torch.stack([torch.stack(pool.layer_tensors(slab, layer))[:, :, inside] for layer in range(3)]))
    return torch.cat(rows, dim=-2)


def test_least_recently_used_conversation_goes_first():
    model = make_model("llama")
    texts = [old_text(100, 900 + number) for number in range(3)]
    cache = SuffixCache(fidelity="exact", max_bytes=400 * ROW, keep_conversations=0)
    for text in texts:
        ask(model, text, cache, steps=1)
    ask(model, texts[0], cache, steps=1)  # used again: the second one is now the oldest
    while not cache.stats.evictions:
        ask(model, old_text(60, 950 + cache.stats.requests), cache, steps=1)
    held = [sequence.ids[:100].tolist() for sequence in shelf_of(cache).sequences]
    assert texts[1] not in held and texts[0] in held
    check_pool(cache)


def test_same_text_is_kept_once():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", keep_conversations=0)
    prompt = old_text(160, 1)
    ask(model, prompt, cache, steps=1)
    once = cache.stats.bytes_used
    for number in range(5):
        ask(model, prompt + new_text(10, number), cache, steps=1)
    assert cache.stats.bytes_used <= once + 5 * 16 * ROW  # a block for each new end
    for _ in range(5):
        ask(model, prompt, cache, steps=1)
    assert cache.stats.bytes_used <= once + 5 * 16 * ROW
    check_pool(cache)


def test_moved_rows_need_no_memory_of_their_own():
    model = make_model("llama")
    cache = stored(model, head(0) + A + B + C + question(0), keep_conversations=0)
    before = cache.stats.bytes_used
    report = ask(model, head(1) + C + A + B + question(1), cache, steps=1).report
    grown = (cache.stats.bytes_used - before) // ROW
    assert grown <= report.computed_rows + 16 * 3  # its computed rows in whole blocks, a copy of the moved ones never
    assert report.shifted_tokens > 60
    check_pool(cache)


@pytest.mark.parametrize("keep", [0, 2])
def test_compaction_packs_the_pool_and_keeps_every_bit(keep):
    model = make_model("llama")
    cache = SuffixCache(keep_conversations=keep)
    for number, order in enumerate(itertools.permutations([A, B, C])):
        ask(model, head(number) + sum(order, []) + question(number), cache, steps=1)
    shelf = shelf_of(cache)
    for sequence in list(shelf.sequences)[1:4]:  # holes
        shelf.remove(sequence)
    before = {sequence: stored_rows(cache, sequence) for sequence in shelf.sequences}
    held = {sequence: sequence.extent for sequence in shelf.sequences}
    result = cache.compact()
    assert result.bytes_moved > 0 and result.blocks_freed >= 0
    for sequence, rows in before.items():
        assert torch.equal(stored_rows(cache, sequence), rows)
        assert (sequence.extent is None) == (held[sequence] is None)
    check_pool(cache)
    assert cache.compact() == (0, 0)
    last = head(5) + C + B + A + question(5)
    same_as_vanilla(model, last, cache.using(fidelity="exact"))
    same_as_vanilla(model, head(9) + A + question(9), cache.using(fidelity="exact"))
    check_pool(cache)


def test_compaction_leaves_alone_what_a_running_call_refers_to():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", keep_conversations=0)
    for number in range(4):
        ask(model, old_text(50, 70 + number), cache, steps=1)
    shelf = shelf_of(cache)
    shelf.remove(next(iter(shelf.sequences)))
    moved = []

    def compact(ids, scores):
        moved.append(cache.compact().bytes_moved)
        return scores

    ids = torch.tensor([old_text(50, 80)])
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
    options = dict(max_new_tokens=6, logits_processor=LogitsProcessorList([compact]))
    assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **options), want)
    assert moved[0] > 0 and set(moved[1:]) == {0}
    check_pool(cache)


def test_conversation_goes_on_in_place_after_compaction_and_then_gets_room_again():
    model = make_model("llama", spy=True)
    cache = SuffixCache(fidelity="exact")
    for number in range(3):
        ask(model, old_text(70, 60 + number), cache, steps=1)
    shelf_of(cache).remove(next(iter(shelf_of(cache).sequences)))
    ids = torch.tensor([old_text(70, 61) + new_text(9, 1)])
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    want = model.generate(ids, **options)
    cache.compact()
    assert torch.equal(model.generate(ids, cache=cache, **options), want)
    assert cache.last_report.exact_tokens == 70
    grown = next(each for each in shelf_of(cache).sequences if len(each.ids) == 81)
    assert shelf_of(cache).pool.free_behind(grown.extent) >= growth_room(81)
    check_pool(cache)


def test_conversation_without_room_behind_it_is_moved_when_its_answer_is_out():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", max_bytes=4000 * ROW)
    ids = torch.tensor([old_text(70, 61)])
    model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=3)
    (sequence,) = shelf_of(cache).sequences
    pool, before, size = shelf_of(cache).pool, stored_rows(cache, sequence), sequence.extent.rows
    wall = pool.grow_in_place(sequence.extent, sequence.extent.rows + 16)  # somebody else takes the block behind it
    pool.release(sequence.extent)
    ids = torch.tensor([sequence.ids.tolist() + new_text(3, 1)])
    model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=1)
    (grown,) = shelf_of(cache).sequences
    assert pool.free_behind(grown.extent) >= growth_room(len(grown.ids))
    assert torch.equal(stored_rows(cache, grown)[..., : len(sequence.ids), :], before)
    pool.retain(wall.part(0, size))
    pool.release(wall)
    check_pool(cache)


def test_rows_of_a_dead_model_are_forgotten():
    cache = SuffixCache()
    model = make_model("llama")
    ask(model, old_text(50, 1), cache, steps=1)
    assert cache.stats.segments
    forget(model)
    del model
    gc.collect()
    ask(make_model("llama", seed=1), old_text(50, 2), cache, steps=1)
    assert len(cache._store.shelves) == 1


@pytest.mark.parametrize("batch", [1, 2])
def test_answer_shorter_than_its_room_moves_no_row_when_it_is_stored(batch, monkeypatch):
    """The call's own view still holds the rows behind an answer that ended early, and is about to give them back."""
    model, cache, copied = make_model("llama"), SuffixCache(fidelity="exact"), []
    monkeypatch.setattr("hf_suffix_cache.store.room.copy_rows", lambda *args: copied.append(args))
    prompts = torch.tensor([old_text(70, 61 + row) for row in range(batch)])
    answer = ask(model, prompts, steps=6).output[:, 70:]
    ask(model, prompts, cache, steps=300, eos_token_id=answer[:, 2].tolist())
    assert len(shelf_of(cache).sequences) == batch and copied == []
    (first, *_) = shelf_of(cache).sequences
    assert first.extent is not None and len(first.ids) < 100
    if batch == 1:
        assert shelf_of(cache).pool.free_behind(first.extent) >= growth_room(len(first.ids))
    check_pool(cache)
