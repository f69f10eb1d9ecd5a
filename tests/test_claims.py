"""A segment that several refer to shrinks to the rows that they need: small stores keep turning over."""

import numpy as np
import pytest
import torch

from benchmarks.eviction import Server, text
from hf_suffix_cache import SuffixCache
from hf_suffix_cache.store.claims import Claims
from reference import (
    ask,
    check_pool,
    forgets_everything,
    in_threads,
    same_answer,
    same_as_vanilla,
    served,
    served_rows,
)
from tiny_models import A, B, C, head, make_model, new_text, old_text, question

ROW = 3 * 2 * 2 * 16 * 4  # bytes: layers x (keys, values) x kv heads x head_dim x fp32
VIEW = 208  # rows that a call of 140 tokens and 60 new ones has
EXACT = {"fidelity": "exact", "keep_conversations": 0}
FOR_EVER = 10**9  # rows that no store has


def endless(**settings):
    """A model whose answers have no end."""
    model = make_model("llama", **settings)
    model.generation_config.eos_token_id = None
    return model


def shrink(server: Server, plans=()) -> int:
    """Rows that go when all segments of a server's store shrink to what is needed of them."""
    claims = Claims(list(server.store.shelves.values()), plans, set(server.shelf.segments))
    return sum(claims.shrink(segment) for segment in list(server.shelf.segments))


# -- small stores ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conversations", [1.5, 2, 2.5])
@pytest.mark.parametrize("where", ["front", "middle"])
def test_a_small_store_keeps_turning_over_where_prompts_share_text(where, conversations):
    model, common = endless(), old_text(60, 1)
    cache = SuffixCache(max_bytes=int(conversations * VIEW) * ROW)
    for number in range(6):
        own = [new_text(40, 100 + number), new_text(40, 200 + number)]
        prompt = common + own[0] + own[1] if where == "front" else own[0] + common + own[1]
        answer = ask(model, prompt, cache, steps=60)
        assert answer.report.reason is None, number
        if number:
            assert answer.report.exact_tokens >= 60 if where == "front" else served(answer.report) >= 56, number
        if where == "front":
            same_answer(answer, ask(model, prompt, steps=60))
        check_pool(cache)
        longer = answer.tokens() + new_text(5, number)
        found = same_as_vanilla(model, longer, cache.using(store=False, fidelity="exact"), steps=1).report
        reused = ask(model, longer, cache.using(store=False), steps=1).report
        # approximate rows end where the newest 32 tokens begin
        assert found.exact_tokens >= 199 if where == "front" else reused.exact_tokens + reused.carried_tokens >= 173
    assert cache.stats.evictions >= 3
    forgets_everything(cache)


def test_what_another_call_is_planned_with_stays_whole():
    """Its recipe names rows by number, outside of the store's lock."""
    rng = np.random.default_rng(0)
    root, server = text(rng, 160), Server(4000, "lru", **EXACT)
    for _ in range(2):
        server.ask(np.concatenate([root, text(rng, 64)]))
    first, second = server.shelf.sequences
    (segment,) = first.recipe.segments
    server.shelf.pin([segment])  # as that call does
    while server.store.steward.step(server.shelf.pool, FOR_EVER):
        pass
    assert not server.shelf.sequences and segment in server.shelf.segments and len(segment) == 224
    assert shrink(server) == 0
    server.shelf.unpin([segment])
    assert server.store.bytes_used == 0


def test_threads_on_a_small_store_get_right_answers():
    model, common = make_model("llama"), old_text(48, 2)
    cache = SuffixCache(fidelity="exact", max_bytes=400 * ROW)
    prompts = [common[: 16 + number % 33] + new_text(60, 300 + number % 9) for number in range(24)]
    wanted = [ask(model, ids, steps=3) for ids in prompts]

    def run(first):
        for place in range(first, len(prompts), 4):
            same_answer(ask(model, prompts[place], cache, steps=3), wanted[place])

    in_threads([lambda first=first: run(first) for first in range(4)])
    assert cache.stats.evictions > 0
    forgets_everything(cache)


# -- rows -----------------------------------------------------------------------------------------------------------


def test_rows_that_others_need_stay_when_a_sequence_goes():
    rng = np.random.default_rng(1)
    root, server = text(rng, 160), Server(4000, "lru", **EXACT)
    chats = [np.concatenate([root[:rows], text(rng, 64)]) for rows in (160, 96, 130)]
    for ids in chats:
        server.ask(ids)
    (segment,) = next(iter(server.shelf.sequences)).recipe.segments
    before = segment.uses.total
    server.store.steward.step(server.shelf.pool, FOR_EVER)
    assert segment not in server.shelf.segments
    parts = [each for each in server.shelf.segments if each.positions[0] == 0]
    (part,) = parts
    assert np.array_equal(part.ids, root[:130]) and part.references == part.holders == 2
    assert part.uses.total == before
    assert server.shelf.rows == sum(len(each) for each in server.shelf.segments) == 130 + 64 + 64
    for ids in chats[1:]:
        assert server.ask(ids) == len(ids) - 1
    run = server.shelf.runs(np.concatenate([text(rng, 9), root]), 0, 16)
    assert [(found.start, found.stop, found.segment) for found in run] == [(9, 139, part)]  # it can be moved as before
    while server.store.steward.step(server.shelf.pool, FOR_EVER):
        pass
    assert server.store.bytes_used == 0 and server.shelf.rows == 0


def test_rows_of_the_call_at_hand_stay_and_its_plan_names_them():
    rng = np.random.default_rng(2)
    document, server = text(rng, 200), Server(4000, "lru", **EXACT)
    server.ask(document)
    reading = server.store.reading(server.identity, next(iter(server.store.shelves))[1], server.shapes)
    ids = np.concatenate([document[:90], text(rng, 30)])
    (sequence,) = server.shelf.sequences
    plan = sequence.recipe.head(90)
    assert reading.match(ids).exact == 90
    server.shelf.pin(plan.segments)
    wanted = plan.addresses_of(np.arange(90)).tolist()
    server.shelf.remove(sequence)
    assert shrink(server, [plan]) == 110
    (part,) = plan.segments
    assert len(part) == 90 and plan.addresses_of(np.arange(90)).tolist() == wanted
    assert part.references == 1 and part.holders == 0
    server.shelf.unpin(plan.segments)
    assert server.store.bytes_used == 0


def test_less_than_a_block_is_not_worth_it():
    rng = np.random.default_rng(3)
    root, server = text(rng, 160), Server(4000, "lru", **EXACT)
    for rows in (15, 64):
        server.ask(np.concatenate([root, text(rng, rows)]))
    first, second = server.shelf.sequences
    server.shelf.remove(first)
    assert shrink(server) == 0
    assert len(second.recipe.segments[0]) == 175


def test_moved_rows_are_gathered_again_bit_for_bit_from_what_is_left():
    model = make_model("llama")
    cache = SuffixCache(keep_conversations=0)
    ask(model, head(0) + A + B + C + new_text(60, 1) + question(0), cache)
    first = ask(model, head(1) + C + A + question(1), cache)
    longer = first.tokens() + new_text(20, 2)
    answer, rows = served_rows(model, longer, cache.using(store=False), steps=1)
    assert answer.report.carried_tokens > 0
    (shelf,) = cache._store.shelves.values()
    source, moved = list(shelf.sequences)
    assert moved.recipe.drifts  # control: corrections name rows of the segments too
    before = sum(map(len, shelf.segments))
    shelf.remove(source)
    claims = Claims([shelf], only=set(shelf.segments))
    gone = sum(claims.shrink(segment) for segment in list(shelf.segments))
    assert gone > 60 and before - sum(map(len, shelf.segments)) == gone
    again, same = served_rows(model, longer, cache.using(store=False), steps=1)
    assert again.report.carried_tokens == answer.report.carried_tokens
    length = len(longer)
    for (keys, values), (want_keys, want_values) in zip(same, rows, strict=True):
        assert torch.equal(keys[:, :length], want_keys[:, :length])
        assert torch.equal(values[:, :length], want_values[:, :length])
    same_answer(again, answer, 1e-12)
    del same, rows, again, answer
    forgets_everything(cache)


def test_control_rows_by_their_old_numbers_are_other_rows():
    rng = np.random.default_rng(4)
    document, server = text(rng, 200), Server(4000, "lru", **EXACT)
    server.ask(document)
    (sequence,) = server.shelf.sequences
    (segment,) = sequence.recipe.segments
    rows = np.arange(50, 120)
    part = server.shelf.part_of(segment, rows)
    recipe = sequence.recipe.head(200)
    recipe.which, recipe.offset, recipe.shift = recipe.which[50:120], recipe.offset[50:120], recipe.shift[50:120]
    renamed = recipe.with_part(segment, part, rows)
    assert np.array_equal(renamed.addresses_of(np.arange(70)), recipe.addresses_of(np.arange(70)))
    wrong = recipe.with_part(segment, part, rows)
    wrong.offset = recipe.offset
    with pytest.raises(IndexError):
        wrong.addresses_of(np.arange(70))
    server.shelf.pin([part])
    server.shelf.unpin([part])
