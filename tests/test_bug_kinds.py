"""
How other KV caches went wrong, kind by kind. `COVERAGE` names the tests of every kind, wherever they are, or the part
of the series that brings them; the tests in this file are those that belong to no other file.
"""

import ast
import contextlib
import functools
import gc
import hashlib
import itertools
import random
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from hf_suffix_cache import SuffixCache, uninstall
from hf_suffix_cache.kernels import HashTable, window_hashes
from hf_suffix_cache.store.index import WindowIndex
from hf_suffix_cache.store.pool import BlockPool, Budget, LayerShape
from hf_suffix_cache.view import View
from reference import (
    Recorder,
    ask,
    cache_name,
    check_pool,
    check_report,
    first_layer_is_fresh,
    forgets_everything,
    fresh_rows,
    in_threads,
    kinds_of,
    moved_pieces,
    same_answer,
    same_as_vanilla,
    served,
    served_rows,
    stored,
    view_of,
)
from tiny_models import CORE, LENGTH_DEPENDENT, VOCAB, A, B, C, head, make_model, new_text, old_text, question

# Kind of fault -> the tests that show that it can't happen, as `file.name` for `test_file.py::test_name`, with their
# controls. `PARTS`: what waits for a later part of the series.
COVERAGE = {
    "approximate rows promoted to exact ones": """
        row_states.exact_request_after_an_approximate_one_is_exact
        row_states.first_exact_request_after_approximate_ones_reuses_only_what_was_exact
        row_states.derived_rows_replace_no_exact_ones
        row_states.repeated_approximate_request_does_not_drift
        oracles.o1_control_unrepaired_rows_differ""",
    "adapter switched, rows of the other one reused": """
        adapters.switched_adapters_keep_their_rows_apart_and_find_them_again
        adapters.other_weights_under_a_deleted_adapters_name_are_noticed
        adapters.merged_and_unmerged_adapters
        adapters.scales_of_active_adapters
        adapters.prompt_learning_is_refused
        identity.changed_weights_are_noticed""",
    "causal mask of recomputed rows that are not contiguous": """
        bug_kinds.rows_recomputed_one_by_one_see_no_later_token
        bug_kinds.control_a_mask_aligned_to_the_end_lets_recomputed_rows_see_later_tokens
        shifted.no_repaired_row_sees_a_later_token
        oracles.o3_with_every_shifted_row_repaired_the_answer_is_exact
        masks.bottom_right_mask_is_right_for_the_newest_rows_in_one_piece_only""",
    "re-rotation assumes one layout": """
        oracles.o2_first_layer_rows_are_fresh_after_any_shift
        oracles.o2_control_unrotated_keys_are_noticed
        capability.layout_is_found
        capability.a_model_that_does_something_else_is_noticed
        capability.absolute_positions_allow_reuse_at_the_front
        capability.other_models_are_refused_with_the_right_reason
        rope.rotation_back_gives_the_same_keys""",
    "no gate on accuracy": """
        oracles.o1_exact_answers_are_those_of_vanilla_whatever_ran_before
        smollm2.reordered_passages_behind_another_head_stay_close
        smollm2.exact_fidelity_bound_is_broken_by_another_prompts_rows""",
    "left-padded batch with different hits": """
        generate_batch.left_padded_rows_equal_their_own_runs
        generate_batch.left_padded_batch_reports_each_row_without_pads
        generate_batch.rows_of_a_padded_batch_are_stored_without_pads
        generate_batch.right_padding_and_holes_in_the_mask_equal_vanilla
        generate_batch.pad_token_inside_the_text_is_text
        bug_kinds.pad_that_is_the_end_token_also_inside_the_text
        oracles.control_rows_of_another_prompt_fail_o1""",
    "one cache shared by threads": """
        identity.four_threads_share_one_cache
        identity.threads_of_two_models_and_both_fidelities
        identity.threads_at_a_models_first_use_get_one_identity
        bug_kinds.eight_threads_under_eviction_while_statistics_are_read""",
    "same shapes, another model or dtype": """
        identity.two_models_of_the_same_shapes_share_no_row
        identity.a_cast_model_shares_no_row_with_what_it_was
        identity.a_resized_vocabulary_is_noticed
        identity.another_attention_implementation_has_rows_of_its_own
        identity.models_made_one_after_the_other_share_nothing
        identity.a_model_at_the_address_of_a_dead_one_is_another
        identity.a_changed_setting_is_noticed_and_undone
        identity.new_tensor_at_an_old_address_is_noticed
        store.rows_of_a_dead_model_are_forgotten""",
    "weights changed in place": """
        identity.changed_weights_are_noticed
        identity.a_dense_write_through_data_is_noticed
        identity.a_sparse_write_through_data_is_not_seen_and_clear_heals_it
        identity.a_changed_weight_ends_every_state_that_it_acts_in
        identity.a_foreign_hook_on_any_module_is_noticed""",
    "entry gone between lookup and use": """
        bug_kinds.entries_that_go_while_they_are_used
        failclosed.requests_after_clear_inside_a_request_stay_right
        store.compaction_leaves_alone_what_a_running_call_refers_to""",
    "frequencies that depend on the length": """
        regimes.no_row_crosses_the_border_and_answers_are_those_of_a_new_model
        regimes.control_without_the_fingerprint_a_wrong_answer_would_show
        regimes.requests_around_the_border_equal_a_new_model
        regimes.buffers_are_left_as_they_were_found
        regimes.text_is_moved_within_a_regime
        regimes.yarn_is_turned_right_at_any_distance
        bug_kinds.moved_text_stays_on_its_side_of_the_first_length""",
    "mask, positions and length disagree": """
        bug_kinds.ids_mask_and_positions_that_disagree
        bug_kinds.a_second_cache_beside_the_first_is_an_error
        bug_kinds.cache_shortened_by_the_caller_continues_where_it_ends
        failclosed.mask_of_another_length_is_a_precise_error_or_vanilla
        failclosed.position_ids_of_the_caller
        failclosed.reordered_position_ids_are_refused
        failclosed.four_dimensional_masks_are_refused_under_attach""",
    "beams, several return sequences": """
        generate.generate_in_every_mode_equals_vanilla
        generate.generate_in_every_mode_works_behind_moved_rows
        generate_batch.padded_batch_with_beams_equals_vanilla
        generate_batch.beam_continuations_are_not_stored
        bug_kinds.ways_of_decoding_that_transformers_has_moved_out
        oracles.o4_counts_beams_and_returned_sequences
        oracles.control_rows_of_another_prompt_fail_o1""",
    "drift of transformers' API": """
        bug_kinds.crop_removes_that_many_tokens_and_0_removes_none
        layering.files_stay_small_and_names_of_old_transformers_stay_out
        layering.control_the_reader_finds_wrong_edges
        capability.cache_argument_is_the_installed_versions_name""",
    "stored entry is the live object": """
        bug_kinds.stored_rows_never_change
        generate.returned_cache_may_be_changed_by_the_caller
        generate.returned_cache_stays_as_it_is_when_later_requests_run
        row_states.carried_rows_are_those_of_the_turn_before_bit_for_bit""",
    "everything is cached": """
        exact.full_hit_runs_one_row
        exact.one_new_token_and_a_full_hit
        exact.generated_tokens_of_an_earlier_call_are_reused
        exact.prefix_at_block_borders
        bug_kinds.prompt_of_stored_pieces_in_another_order_to_the_last_token
        oracles.o2_control_unrotated_keys_are_noticed""",
    "prefix and content hits mixed": """
        shifted.exact_prefix_comes_first_and_moved_rows_after_it
        shifted.exact_prefix_that_ends_inside_a_run_that_occurs_twice
        shifted.same_run_twice_is_served_twice
        shifted.of_overlapping_copies_the_one_with_the_same_left_context_wins
        bug_kinds.longest_of_overlapping_pieces_is_served_whatever_was_stored_first
        oracles.o2_control_unrotated_keys_are_noticed""",
    "layers with a running state": """
        bug_kinds.models_with_a_running_state_are_refused_with_a_reason
        bug_kinds.control_the_same_requests_are_served_on_a_model_without_a_running_state""",
    "hash hit without comparing tokens": """
        bug_kinds.any_hash_gives_the_answers_of_a_good_one
        bug_kinds.control_an_index_that_believes_its_hashes_serves_the_wrong_rows
        index.find_runs_random_text_equals_brute_force
        index.find_runs_adversarial_ids_equal_brute_force
        index.find_runs_control_hash_that_forgets_finds_nothing
        kernels.window_hashes_order_zeros_and_place_count
        kernels.window_hashes_control_without_order_collides""",
    "rejected drafts stored": """
        generate.prompt_lookup_equals_vanilla_and_stores_no_rejected_draft
        generate.assisted_decoding_equals_vanilla_and_keeps_the_assistant_out
        modes.drafts_give_the_stock_answer_and_rejected_ones_are_not_stored
        modes.assistant_has_no_part_in_the_cache
        oracles.control_rows_of_another_prompt_fail_o1""",
    "clash with cache_implementation": """
        generate.cache_implementation_beside_a_cache_is_one_clear_error
        generate.generation_config_is_used_and_not_altered
        modes.another_cache_beside_ours_is_one_clear_error
        compile.compiled_model_compiles_a_bounded_number_of_times_in_exact_mode
        compile.view_never_asks_for_compilation""",
    "stored slices keep the parent tensor; growth": """
        bug_kinds.the_pool_holds_the_bytes_that_it_says_and_no_parent_tensor
        bug_kinds.memory_is_flat_over_300_calls
        store.same_text_is_kept_once
        store.moved_rows_need_no_memory_of_their_own""",
    "32-bit offsets": """
        bug_kinds.offsets_past_2_to_the_31_are_those_of_exact_arithmetic
        bug_kinds.addresses_of_far_slabs_come_back_whole
        bug_kinds.lookup_table_keeps_values_past_2_to_the_31""",
    "cached and uncached differ numerically": """
        bug_kinds.64_greedy_tokens_are_equal_in_fp32
        bug_kinds.low_precision_answers_move_no_more_than_stocks_and_are_reproducible
        smollm2.exact_fidelity_repeated_prompts_equal_stock""",
    "hits vanish after a restart": """
        kernels.window_hashes_other_process_same_values""",
    "layers on several devices": """
        identity.rows_of_an_offloaded_model_are_reused_until_a_weight_changes
        identity.offloaded_weights_are_those_in_the_map
        identity.weights_offloaded_to_disk_are_known_by_their_files""",
    "inference-mode tensors, retained graphs": """
        bug_kinds.stored_rows_keep_no_graph_alive
        identity.rows_stored_in_inference_mode_serve_every_mode
        identity.gradient_through_served_rows_raises
        attach.attach_in_training_and_with_gradients_is_vanilla
        pool.slabs_are_ordinary_tensors_even_when_made_in_inference_mode""",
    "statistics count rows that ran": """
        bug_kinds.statistics_are_the_rows_that_ran_over_100_mixed_calls
        oracles.o4_reported_rows_are_the_rows_that_the_first_layer_ran
        oracles.o4_control_the_spy_sees_a_full_prefill
        cache_api.stats_are_the_sums_of_the_reports""",
    "the keyword itself": """
        process.import_changes_nothing_and_the_first_cache_installs_one_hook
        pipeline.pipeline_gives_the_same_text
        pipeline.cache_may_be_given_when_the_pipeline_is_made
        generate.streamer_sees_the_same_pieces
        generate.ids_may_come_in_any_way
        generate.cache_none_is_vanilla
        cache_api.uninstall_is_idempotent_and_the_next_cache_installs_again
        cache_api.generate_after_uninstall_takes_the_cache_for_an_ordinary_one
        bug_kinds.control_without_the_hook_the_keyword_serves_nothing""",
    "a hit copies its entry": """
        bug_kinds.a_hit_holds_the_entry_once
        exact.growing_chat_goes_on_in_place""",
}
PARTS = {
    "no gate on accuracy": 3,  # the bound and its calibration
    "32-bit offsets": 4,  # on a GPU
    "entry gone between lookup and use": 5,  # sessions that expire
    "damaged cache file": 5,
    "sharing across tenants": 5,
    "cache file that executes code": 5,
    "hits vanish after a restart": 5,
    "eviction thrash, shared roots lost": 5,
    "rows of another model used without a gate": 6,
}


def functions_of_the_suite() -> dict[str, str]:
    """Source of every test function by `file.name`."""
    found = {}
    for path in Path(__file__).parent.glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                first = min(part.lineno for part in (node, *node.decorator_list))
                source = "\n".join(lines[first - 1 : node.end_lineno])
                found[f"{path.stem.removeprefix('test_')}.{node.name.removeprefix('test_')}"] = source
    return found


def gaps(coverage: dict[str, str], parts: dict[str, int]) -> list[str]:
    """Tests that are named and don't exist, and kinds that no control stands beside."""
    functions, found = functions_of_the_suite(), []
    for kind, text in coverage.items():
        names = text.split()
        found += [f"{kind}: there is no test {name}" for name in names if name not in functions]
        sources = [name + functions.get(name, "") for name in names]
        if not any("control" in source for source in sources) and kind not in parts:
            found.append(f"{kind}: none of its tests shows that it can fail")
    return found


def test_every_kind_of_fault_has_its_tests_and_a_control():
    assert gaps(COVERAGE, PARTS) == []
    assert all(kind in COVERAGE or part > 4 for kind, part in PARTS.items())


def test_control_a_missing_test_and_a_missing_control_are_noticed():
    wrong = {"first": "bug_kinds.no_such_test", "second": "rope.frequencies_are_read_live"}
    assert gaps(wrong, {}) == [
        "first: there is no test bug_kinds.no_such_test",
        "first: none of its tests shows that it can fail",
        "second: none of its tests shows that it can fail",
    ]


PROMPT = old_text(48, 1)
ROW = 3 * 2 * 2 * 16 * 4  # bytes: layers x (keys, values) x kv heads x head_dim x fp32


# -- causal mask for recomputed rows that are not contiguous --------------------------------------------------------


class Chosen:
    """A policy that recomputes the given positions and nothing else."""

    def __init__(self, rows: list[int], needs_attention: bool):
        self.rows, self.needs_attention = np.array(rows), needs_attention

    def select(self, request):
        return self.rows


def _rows_with_one_token_altered(kind, attention, probe, around=contextlib.nullcontext):
    """Rows of two requests that repair positions 25 and 40 of a moved text, whose stored token at 32 differs."""
    model, found = make_model(kind, attention=attention), []
    for token in (C[12], C[12] + 1):
        text = C[:12] + [token] + C[13:]
        cache = stored(model, head(0) + text + question(0), seam_tokens=0, repair=Chosen([25, 40], probe))
        with around():
            answer, rows = served_rows(model, head(1, 20) + text + question(1), cache, steps=1)
        kinds = kinds_of(answer.report)
        assert [place for place, name in enumerate(kinds) if name == "repaired"] == [25, 40]
        found.append(rows)
    return found


@pytest.mark.parametrize("probe", [False, True], ids=["one_pass", "probe"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CORE)
def test_rows_recomputed_one_by_one_see_no_later_token(kind, attention, probe):
    first, second = _rows_with_one_token_altered(kind, attention, probe)
    for (keys, values), (other_keys, other_values) in zip(first, second, strict=True):
        assert torch.equal(keys[:, :32], other_keys[:, :32]) and torch.equal(values[:, :32], other_values[:, :32])
    assert not torch.equal(first[-1][1][:, 40], second[-1][1][:, 40])  # control: the altered token is looked at


def test_control_a_mask_aligned_to_the_end_lets_recomputed_rows_see_later_tokens(monkeypatch):
    def aligned_to_the_end(self, layer_idx=0):
        return self.get_seq_length(layer_idx) if self.slots is None else self.total - len(self.slots)

    @contextlib.contextmanager
    def around():
        with monkeypatch.context() as patch:
            patch.setattr(View, "get_query_offset", aligned_to_the_end)
            yield

    first, second = _rows_with_one_token_altered("llama", "sdpa", False, around)
    assert not torch.equal(first[-1][1][:, 25], second[-1][1][:, 25])


# -- left-padded batch: the pad is the end-of-text token ------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_pad_that_is_the_end_token_also_inside_the_text(side):
    model = make_model("llama")
    rows = [old_text(31, 1), old_text(40, 2), old_text(26, 3), old_text(38, 4)]
    end = ask(model, rows[1], steps=4).tokens()[-1]  # one row ends by itself, the others at the limit
    rows[2] = [*rows[2][:9], end, end, *rows[2][9:], end]
    width = max(map(len, rows))
    pads = [width - len(row) for row in rows]
    pairs = list(zip(rows, pads, strict=True))
    ids = [[end] * pad + row if side == "left" else row + [end] * pad for row, pad in pairs]
    mask = [
        [0] * pad + [1] * len(row) if side == "left" else [1] * len(row) + [0] * pad for row, pad in pairs
    ]  # given: from the ids alone nobody can tell a pad from the end token
    options = {"pad_token_id": end, "eos_token_id": end, "steps": 10}
    batch = {**options, "attention_mask": torch.tensor(mask)}
    want = ask(model, ids, **batch)
    cache = SuffixCache(fidelity="exact")
    for hit, row in ((7, rows[0]), (16, rows[2]), (len(rows[3]), rows[3])):
        ask(model, row[:hit] + new_text(5, hit), cache, steps=1)
    for _ in range(4):
        got = ask(model, ids, cache, **batch)
        same_answer(got, want)
        if side == "left":
            for number, row in enumerate(rows):
                alone = ask(model, row, attention_mask=torch.ones(1, len(row), dtype=torch.long), **options)
                answer = alone.tokens()[len(row) :]
                assert got.ids[number, width : width + len(answer)].tolist() == answer
    assert got.ids[1, width + 4 :].tolist() == [end] * (got.ids.shape[1] - width - 4)  # control: it did end
    assert (got.report.reason is None) is (side == "left")
    check_pool(cache)


# -- one cache object shared by threads -----------------------------------------------------------------------------


def test_eight_threads_under_eviction_while_statistics_are_read():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", max_bytes=900 * ROW)
    families = [old_text(60, 60 + number) for number in range(5)]
    prompts = [families[number % 5][: 20 + 8 * (number // 5)] + new_text(11, number) for number in range(25)]
    serial = [ask(model, ids, steps=2) for ids in prompts]
    readings = []

    def work(seed):
        order = list(range(25))
        random.Random(seed).shuffle(order)
        for number in order:
            got = ask(model, prompts[number], cache, steps=2)
            same_answer(got, serial[number])
            check_report(got.report)
            assert got.report.prompt_tokens == len(prompts[number])

    def read():
        end = time.monotonic() + 60
        while cache.stats.requests < 200 and time.monotonic() < end:
            stats = cache.stats
            assert 0 <= stats.bytes_used <= stats.bytes_total <= 900 * ROW
            time.sleep(0.001)
            readings.append((stats.segments, str(stats), [str(report) for report in cache.reports]))

    in_threads([read, *(lambda seed=seed: work(seed) for seed in range(8))])
    assert cache.stats.requests == 200 and len(readings) > 10
    assert cache.stats.evictions > 0 and cache.stats.exact_tokens > 0  # control: rows were shared and taken away
    check_pool(cache)
    forgets_everything(cache)


# -- entry evicted between lookup and use ---------------------------------------------------------------------------


class Disturbance(StoppingCriteria):
    """At its third call: a large foreign request, eviction of all, `clear()`, another request, and `compact()`."""

    def __init__(self, model, cache, number: int):
        self.model, self.cache, self.number, self.calls, self.evicted = model, cache, number, 0, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 3:
            handle, before = self.cache.using(fidelity="exact"), self.cache.stats.evictions
            ask(self.model, new_text(150, 50 + self.number), handle, steps=1)
            store = self.cache._store  # which gives up no sequence by itself whose rows are in use: it would free none
            for shelf in store.shelves.values():
                while store.steward.step(shelf.pool, 10**6):
                    pass
            self.evicted = self.cache.stats.evictions - before
            self.cache.clear()
            ask(self.model, new_text(90, 70 + self.number), handle, steps=1)
            self.cache.compact()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("keep", [0, 4], ids=["gathered", "in_place"])
@pytest.mark.parametrize("fidelity", ["exact", "balanced", "fast"])
def test_entries_that_go_while_they_are_used(fidelity, keep):
    model = make_model("llama")
    source = head(0) + A + B + question(0)
    ids = head(1) + B + A + question(1) if fidelity != "exact" else source + new_text(9, 1)
    options = {"fidelity": fidelity, "keep_conversations": keep, "max_bytes": 400 * ROW}
    undisturbed = ask(model, ids, stored(model, source, **options), steps=8)
    assert served(undisturbed.report) + undisturbed.report.exact_tokens > 60  # control: rows are used
    for number in range(4):
        cache = stored(model, source, **options)
        disturbance = Disturbance(model, cache, number)
        got = ask(model, ids, cache, steps=8, stopping_criteria=StoppingCriteriaList([disturbance]))
        same_answer(got, undisturbed, tolerance=1e-5)
        # the conversation that goes on in place is in use, and nothing else was there to be evicted
        assert disturbance.calls == 8 and (disturbance.evicted > 0 or (fidelity == "exact" and keep))
        check_pool(cache)
        same_as_vanilla(model, source, cache.using(fidelity="exact"))
        forgets_everything(cache)


# -- frequencies that depend on the length --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_moved_text_stays_on_its_side_of_the_first_length(kind):
    model, cache = make_model(kind), SuffixCache(tail_tokens=8)
    short, long = head(0, 6) + B[:30] + question(0, 12), head(1, 20) + B[:30] + C + question(1)
    ask(model, short, cache)
    same_answer(ask(model, long, cache), ask(make_model(kind), long))  # nothing fits, so nothing is approximate
    assert served(cache.last_report) == 0
    within = head(2, 9) + B[:30] + question(2, 12)
    answer, rows = served_rows(model, within, cache)
    assert served(answer.report) == 30  # control: at the old length it is moved
    first_layer_is_fresh(model, rows, within)
    wrong = fresh_rows(model, long)[0][0][:, 20:50]  # what the long prompt would have been served instead
    stale = fresh_rows(make_model(kind), head(0, 20) + B[:30])[0][0][:, 20:50]
    assert (wrong - stale).abs().max() > 1e-2  # control: the two sides differ


# -- attention mask, positions and length disagree ------------------------------------------------------------------

KNOWN, NEW = PROMPT, new_text(9, 3)


MASKS = {
    "no mask": lambda n: None,
    "mask of the whole": lambda n: [1] * len(KNOWN + NEW),
    "mask of the new part": lambda n: [1] * len(NEW),
    "mask with a hole": lambda n: [1] * (n // 2) + [0] * 3 + [1] * (n - n // 2 - 3),
    "mask without the first": lambda n: [0] + [1] * (n - 1),
}
POSITIONS = {
    "no positions": lambda n: None,
    "positions from 0": lambda n: list(range(n)),
    "positions from the stored length": lambda n: list(range(len(KNOWN), len(KNOWN) + n)),
}


def outcome(call):
    """What a call gives, or the exception that it raises."""
    try:
        with torch.no_grad():
            return call()
    except Exception as error:
        return error


def difference(got, want, names) -> str | None:
    """What is wrong with an outcome: it must be transformers' own, or an error that names one of the arguments."""
    if isinstance(got, Exception):
        if isinstance(got, ValueError) and any(name in str(got) for name in names):
            return None
        return f"unclear error {got!r}"
    if isinstance(want, Exception):
        return f"an answer, where transformers alone raises {want!r}"
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} in place of {tuple(want.shape)}"
    return None if (got - want).abs().max() < 1e-4 else "another answer"


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("ids", [KNOWN + NEW, NEW], ids=["whole", "new_only"])
@pytest.mark.parametrize("way", ["generate", "attach", "attach_last"])
def test_ids_mask_and_positions_that_disagree(way, ids, batch):
    """Plain transformers' answer, or an error that names the argument: never an IndexError, never a silent shift."""
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    ask(model, KNOWN, cache, steps=1)
    batched, faults, served_tokens = torch.tensor([ids] * batch), [], []
    for mask, position in itertools.product(MASKS, POSITIONS):
        parts = {"attention_mask": MASKS[mask](len(ids)), "position_ids": POSITIONS[position](len(ids))}
        kwargs = {name: torch.tensor([row] * batch) for name, row in parts.items() if row is not None}

        def call(with_cache, kwargs=kwargs):
            if way == "generate":
                extra = {"cache": cache} if with_cache else {}
                return model.generate(batched, max_new_tokens=4, do_sample=False, **kwargs, **extra)
            with cache.attach(model) if with_cache else contextlib.nullcontext():
                return model(batched, logits_to_keep=int(way == "attach_last"), **kwargs).logits

        want = outcome(lambda call=call: call(False))
        for _ in range(2):
            got = outcome(lambda call=call: call(True))
            fault = difference(got, want, parts)
            if fault:
                faults.append(f"{mask}, {position}: {fault}")
            elif not isinstance(got, Exception):
                check_report(cache.last_report)
                served_tokens.append(cache.last_report.exact_tokens)
    assert not faults, "\n".join(faults)
    if way != "attach":  # which wants the logits of every token, so all are computed
        assert max(served_tokens) == batch * (len(ids) - 1)  # control: what agrees is served
    same_as_vanilla(model, KNOWN + NEW, cache)
    check_pool(cache)


@pytest.mark.parametrize("other", [DynamicCache, SuffixCache])
def test_a_second_cache_beside_the_first_is_an_error(other):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    with pytest.raises((TypeError, ValueError), match="past_key_values"):
        model.generate(torch.tensor([PROMPT]), cache=cache, past_key_values=other(), max_new_tokens=2)
    same_as_vanilla(model, PROMPT, cache)


@pytest.mark.parametrize("kind", CORE)
def test_cache_shortened_by_the_caller_continues_where_it_ends(kind):
    model, cache = make_model(kind), SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache, steps=1)
    view = view_of(ask(model, PROMPT, cache, steps=1, return_dict_in_generate=True).output)
    view.crop(-5)
    kept = PROMPT[: len(PROMPT) - 5]
    with torch.no_grad():
        got = model(torch.tensor([NEW]), **{cache_name(model): view}).logits
        want = model(torch.tensor([kept + NEW])).logits[:, -len(NEW) :]
    assert (got - want).abs().max() < 1e-4
    assert (want - model(torch.tensor([PROMPT + NEW])).logits[:, -len(NEW) :]).abs().max() > 1e-2  # control
    ids = torch.tensor([kept + NEW + new_text(3, 5)])
    got = model.generate(ids, max_new_tokens=4, do_sample=False, **{cache_name(model): view})
    assert got.tolist() == model.generate(ids, max_new_tokens=4, do_sample=False).tolist()
    same_as_vanilla(model, PROMPT, cache)


# -- beams and other ways of decoding -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"num_beams": 2, "force_words_ids": [[7]]},
    ],
    ids=["group_beams", "contrastive", "dola", "constrained"],
)
def test_ways_of_decoding_that_transformers_has_moved_out(options):
    """With the cache they do what they do without: the same answer, or the same error."""
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    for _ in range(2):
        results = []
        for extra in ({}, {"cache": cache}):
            result = outcome(
                lambda extra=extra: model.generate(
                    torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False, **options, **extra
                ).tolist()
            )
            results.append((type(result), str(result)))
        assert results[0] == results[1]
        assert not model._forward_pre_hooks
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1
    check_pool(cache)


# -- drift of transformers' API: what `crop` means ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("removed", [0, 1, 47, 48])
def test_crop_removes_that_many_tokens_and_0_removes_none(kind, removed):
    model, cache = make_model(kind), SuffixCache(fidelity="exact")
    view = view_of(ask(model, PROMPT, cache, steps=1, return_dict_in_generate=True).output)
    assert view.get_seq_length() == len(PROMPT)
    with pytest.raises(ValueError, match="tokens_to_remove"):
        view.crop(removed + 1)  # it once meant a length
    view.crop(-removed)
    assert view.get_seq_length() == len(PROMPT) - removed
    kept = PROMPT[: len(PROMPT) - removed]
    with torch.no_grad():
        got = model(torch.tensor([NEW]), **{cache_name(model): view}).logits
        want = model(torch.tensor([kept + NEW])).logits[:, -len(NEW) :]
    assert (got - want).abs().max() < 1e-4
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1


# -- stored entry is the live object --------------------------------------------------------------------------------


def checksums(cache) -> dict:
    """A digest of the rows of every stored segment, and of every conversation that is kept as it is."""
    (shelf,) = cache._store.shelves.values()
    places = {segment: shelf.pool.by_slab(segment.addresses) for segment in shelf.segments}
    for sequence in shelf.sequences:
        if sequence.extent is not None:
            rows = sequence.extent.start + np.arange(len(sequence.ids))
            places[sequence] = [(sequence.extent.slab, rows, None)]
    found = {}
    for stored_thing, parts in places.items():
        digest = hashlib.blake2b()
        for slab, rows, _ in parts:
            for tensor in (*slab.keys.values(), *slab.values.values()):
                digest.update(tensor[:, :, torch.from_numpy(rows)].numpy().tobytes())
        found[stored_thing] = digest.hexdigest()
    return found


@pytest.mark.parametrize("keep", [0, 4], ids=["gathered", "in_place"])
@pytest.mark.parametrize("fidelity", ["exact", "balanced"])
def test_stored_rows_never_change(fidelity, keep):
    model = make_model("llama")
    cache = stored(model, head(0) + A + B + question(0), fidelity=fidelity, keep_conversations=keep)
    ids = head(1) + B + A + question(1)
    known = {}

    def unchanged():
        now = checksums(cache)
        assert all(now[stored_thing] == digest for stored_thing, digest in known.items() if stored_thing in now)
        known.update(now)

    unchanged()
    for seed in range(4):
        answer = ask(model, ids, cache, seed=seed, do_sample=True, return_dict_in_generate=True)
        unchanged()
        for layer in view_of(answer.output).layers:
            layer.keys.mul_(-2.0)
            layer.values.fill_(7.0)
        unchanged()
        ask(model, answer.tokens() + new_text(9, seed), cache, seed=seed, do_sample=True)
        unchanged()
    assert len(known) > 1
    (shelf,) = cache._store.shelves.values()
    for slab in shelf.pool.slabs.values():
        slab.keys[next(iter(slab.keys))].add_(1.0)
    assert all(digest != known[stored_thing] for stored_thing, digest in checksums(cache).items())  # control


# -- everything is cached, nothing left to compute ------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", ["balanced", "fast"])
@pytest.mark.parametrize("kind", CORE)
def test_prompt_of_stored_pieces_in_another_order_to_the_last_token(kind, fidelity):
    model = make_model(kind, spy=True)
    texts = {"A": A, "B": B, "C": C}
    for number, order in enumerate(["BAC", "CAB", "CBA"], start=1):
        cache = stored(model, head(0) + A + B + C, fidelity=fidelity)
        ids = head(number) + sum((texts[name] for name in order), [])
        answer, rows = served_rows(model, ids, cache)
        check_report(answer.report)
        tail = cache.config.tail_tokens
        assert kinds_of(answer.report)[-tail:] == ["new"] * tail  # though all of it is stored
        assert served(answer.report) >= len(A + B + C) - tail - 15
        first_layer_is_fresh(model, rows, ids)
        repaired = stored(model, head(0) + A + B + C, fidelity=fidelity, repair_fraction=1.0)
        if fidelity == "balanced":
            same_as_vanilla(model, ids, repaired)
        for _ in range(3):
            again = ask(model, ids, cache)
            assert again.report.computed_rows >= 1 and again.ids.shape[1] == len(ids) + 6


# -- prefix and content hashes mixed --------------------------------------------------------------------------------


def test_longest_of_overlapping_pieces_is_served_whatever_was_stored_first():
    model = make_model("llama")
    pieces = [head(0) + C[:30] + question(0), head(1, 20) + C[10:44] + question(1), head(2, 25) + C + question(2)]
    for order in itertools.permutations(pieces):
        cache = stored(model, *order, fidelity="exact")  # exact: each one's rows are its own
        ids = head(5, 14) + C + question(5)
        answer, rows = served_rows(model, ids, cache.using(fidelity="balanced"))
        assert moved_pieces(answer.report) == [(14, 14 + len(C), 14 - 25)]
        first_layer_is_fresh(model, rows, ids)


# -- layers whose state can't be cut or moved -----------------------------------------------------------------------

_STATE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
)
STATE_MODELS = {
    "mamba": lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, state_size=8),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=16, n_groups=1
    ),
    "jamba": lambda: transformers.JambaConfig(
        **_STATE,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "bamba": lambda: transformers.BambaConfig(
        **_STATE,
        num_hidden_layers=3,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_n_groups=1,
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_STATE,
        num_hidden_layers=4,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **_STATE, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]
    ),
}


def state_model(kind: str):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(STATE_MODELS[kind]()).float().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


REPEAT, LONGER = PROMPT, PROMPT + new_text(9, 1)
DIVERGING, SHIFTED = PROMPT[:30] + new_text(20, 2), new_text(12, 3) + PROMPT + new_text(36, 4)


@pytest.mark.parametrize("kind", STATE_MODELS)
def test_models_with_a_running_state_are_refused_with_a_reason(kind):
    model, cache = state_model(kind), SuffixCache()
    for ids in (PROMPT, REPEAT, LONGER, DIVERGING, SHIFTED):
        got = ask(model, ids, cache, attention_mask=torch.ones(1, len(ids), dtype=torch.long))
        same_answer(got, ask(model, ids, attention_mask=torch.ones(1, len(ids), dtype=torch.long)))
        check_report(got.report)
        assert got.report.new_tokens == got.report.prompt_tokens == len(ids)
        assert got.report.reason and len(got.report.reason) > 10
    assert cache.stats.hit_rate == 0 and cache.stats.requests == 5  # the no-op shows in the statistics
    assert check_pool(cache).bytes_used == 0


def test_control_the_same_requests_are_served_on_a_model_without_a_running_state():
    model, cache = make_model("llama"), SuffixCache()
    ask(model, PROMPT, cache)
    for ids in (REPEAT, LONGER, DIVERGING, SHIFTED):
        report = ask(model, ids, cache).report
        assert report.exact_tokens + served(report) >= 30


# -- hash hit without comparing tokens ------------------------------------------------------------------------------


def constant_hash(ids, window):
    return np.zeros(max(0, len(ids) - window + 1), dtype=np.uint64)


def remainder_hash(ids, window):
    return window_hashes(ids, window) % np.uint64(7)


@pytest.mark.parametrize("hash_fn", [constant_hash, remainder_hash])
def test_any_hash_gives_the_answers_of_a_good_one(hash_fn, monkeypatch):
    model = make_model("llama")
    zeros = [4] * 30
    requests = [
        head(0) + A + B + question(0),
        head(1) + B + A + question(1),
        head(2) + A[::-1] + A + question(2),  # a permutation of a stored text is not it
        head(3) + zeros + [9] + question(3),
        head(4) + zeros[1:] + [9] + A + question(4),  # equal but for a leading token
    ]

    def run():
        cache = SuffixCache()
        for ids in requests * 2:
            yield ask(model, ids, cache)
            yield same_as_vanilla(model, ids, cache.using(fidelity="exact"))

    want = list(run())
    monkeypatch.setattr("hf_suffix_cache.store.shelf.WindowIndex", functools.partial(WindowIndex, hash_fn=hash_fn))
    for got, expected in zip(run(), want, strict=True):
        assert kinds_of(got.report) == kinds_of(expected.report)
        assert moved_pieces(got.report) == moved_pieces(expected.report)
        same_answer(got, expected)
    assert sum(served(each.report) for each in want) > 100  # control


def test_control_an_index_that_believes_its_hashes_serves_the_wrong_rows(monkeypatch):
    class Believing(WindowIndex):
        def find_runs(self, ids, *args, **kwargs):
            """Whatever is stored, for whatever is asked."""
            stand_in = np.array(head(0) + A + question(0), dtype=np.int64)
            return super().find_runs(np.resize(stand_in, len(ids)), *args, **kwargs)

    monkeypatch.setattr("hf_suffix_cache.store.shelf.WindowIndex", Believing)
    model = make_model("llama")
    cache = stored(model, head(0) + A + question(0), repair_fraction=0.0, seam_tokens=0)
    ids = head(1, 9) + old_text(70, 77) + question(1)
    answer, rows = served_rows(model, ids, cache)
    assert served(answer.report) > 0
    with pytest.raises(AssertionError):
        first_layer_is_fresh(model, rows, ids)


# -- what stored rows take, and growth over calls -------------------------------------------------------------------


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_the_pool_holds_the_bytes_that_it_says_and_no_parent_tensor():
    model, cache = make_model("llama"), SuffixCache(keep_conversations=2)
    for number in range(8):
        ask(model, head(number) + sum(([A, B, C][number % 3 :] + [A]), []) + question(number), cache, steps=2)
    (shelf,) = cache._store.shelves.values()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for slab in shelf.pool.slabs.values()
        for tensor in (*slab.keys.values(), *slab.values.values())
    }
    assert sum(storages.values()) == cache.stats.bytes_total
    rows = sum(len(segment) for segment in shelf.segments)
    in_use = cache.stats.bytes_used // ROW
    extents = sum(each.extent.rows for each in shelf.sequences if each.extent is not None)
    assert rows <= in_use <= rows + extents + 16 * len(shelf.segments)  # whole blocks, and the newest conversations
    part = next(iter(next(iter(shelf.pool.slabs.values())).keys.values()))[:, :, :1]
    assert part.untyped_storage().nbytes() > 100 * part.nbytes  # control: a kept slice would be seen
    before = cache.stats.bytes_total
    cache.clear()
    assert cache.stats.bytes_used == 0 and cache.stats.bytes_total <= before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("leak", [False, True], ids=["", "control"])
def test_memory_is_flat_over_300_calls(leak):
    """In a process of its own: what earlier tests have freed would take in a leak without growing."""
    code = (
        f"import sys; sys.path[:0] = ['tests', '.']; import test_bug_kinds as t; print(t.growth_of_300_calls({leak}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent
    )
    grown = float(done.stdout.split()[-1])
    limit = 0.1 * 300 * 200 * ROW  # a tenth of what keeping one request's rows in every call would take
    assert (grown > limit) is leak, f"{grown / 1e6:.1f} MB more"


def growth_of_300_calls(leak: bool) -> float:
    """Resident bytes that 300 calls on a small store add; with `leak` each leaves a copy of its rows."""
    torch.set_num_threads(1)
    model, cache, kept = make_model("llama"), SuffixCache(max_bytes=1200 * ROW), []
    sizes = []
    for number in range(560):  # the first 260 warm up: the cache keeps the newest 256 reports
        ids = head(number % 100) + old_text(150, number % 7) + new_text(38, number)
        answer = ask(model, ids, cache, steps=1, return_dict_in_generate=leak)
        if leak:
            kept.append([layer.keys.clone() for layer in view_of(answer.output).layers])
        if number >= 259:
            gc.collect(0)
            sizes.append(resident_bytes())
    assert cache.stats.evictions > 0
    return float(np.median(sizes[-20:]) - np.median(sizes[:20]))


# -- 32-bit offsets -------------------------------------------------------------------------------------------------


def test_offsets_past_2_to_the_31_are_those_of_exact_arithmetic():
    """A slab of five million rows on the meta device: its element offsets pass 2^31, its addresses 2^32."""
    shape = LayerShape(8, 128, 128, torch.float32, torch.device("meta"))
    rows = 5_000_000
    pool = BlockPool([shape] * 2, 16, Budget(4 * rows * 2 * shape.row_bytes))
    first = pool.allocate(16)
    extent = pool.allocate(4_900_000 // 16 * 16)
    assert extent.start + extent.rows > 4_500_000
    columns = np.array([0, 1, extent.rows - 1])
    addresses = extent.addresses(0, columns)
    assert addresses.dtype == np.int64
    assert addresses.tolist() == [(extent.slab.number << 32) + extent.start + int(column) for column in columns]
    view = extent.layer_view(pool.layer_tensors(extent.slab, 1)[0])
    last = view[0, 7, extent.rows - 1, 127]
    slab_rows = extent.slab.rows
    assert last.storage_offset() == ((8 + 7) * slab_rows + extent.start + extent.rows - 1) * 128 + 127 > 2**31
    pool.release(extent)
    pool.release(first)
    assert pool.bytes_used == 0


def test_addresses_of_far_slabs_come_back_whole():
    pool = BlockPool([LayerShape(1, 2, 2, torch.float32, torch.device("cpu"))], 4, Budget(1 << 20))
    pool._next_number = 2**30  # numbers are never used twice, so they grow for as long as a process lives
    extent = pool.allocate(8)
    addresses = extent.addresses(0, np.arange(8))
    ((slab, rows, index),) = pool.by_slab(addresses)
    assert slab is extent.slab and index.tolist() == list(range(8))
    assert rows.tolist() == [extent.start + number for number in range(8)]
    assert addresses.min() > 2**61


@pytest.mark.parametrize("offset", [0, 2**31 - 3, 2**32 - 3, 2**62])
def test_lookup_table_keeps_values_past_2_to_the_31(offset):
    table, keys = HashTable(), np.arange(1, 40, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values = np.arange(offset, offset + len(keys), dtype=np.int64)
    table.insert(keys, values)
    found = table.probe(keys, 1)
    assert np.asarray(found)[:, 0].tolist() == values.tolist()


# -- numerical differences ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CORE)
def test_64_greedy_tokens_are_equal_in_fp32(kind):
    model, cache = make_model(kind), SuffixCache(fidelity="exact")
    for number in range(4):
        ids = PROMPT[: 10 + 10 * number] + new_text(15, number)
        answer = same_as_vanilla(model, ids, cache, steps=64)
        assert answer.report.exact_tokens >= 10 * number * (number > 0)
        assert same_as_vanilla(model, answer.tokens(), cache, steps=3).report.exact_tokens == len(ids) + 63


def test_low_precision_answers_move_no_more_than_stocks_and_are_reproducible():
    model = make_model("llama").bfloat16()
    mine, stocks, runs = [], [], []
    for _ in range(2):
        cache = SuffixCache(fidelity="exact")
        ask(model, PROMPT, cache, steps=1)
        run = []
        for number in range(12):
            ids, cut = PROMPT[: 20 + 2 * number] + new_text(15, number), 20 + 2 * number
            past, plain = DynamicCache(), ask(model, ids, steps=1).first
            with torch.no_grad():
                model(torch.tensor([ids[:cut]]), **{cache_name(model): past})
                chunked = model(torch.tensor([ids[cut:]]), **{cache_name(model): past}).logits[:, -1]
            got = ask(model, ids, cache, steps=1)
            assert got.report.exact_tokens == cut and got.first.dtype == plain.dtype
            run.append(got.first)
            mine.append((got.first - plain).float().abs().max().item())
            stocks.append((chunked - plain).float().abs().max().item())
        runs.append(run)
    assert all(torch.equal(left, right) for left, right in zip(*runs, strict=True))  # the same calls, the same bits
    assert max(mine) <= 2 * max(stocks)
    other = ask(model, PROMPT[::-1], steps=1).first
    assert (other - plain).float().abs().max() > 4 * max(stocks)  # control


# -- graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_stored_rows_keep_no_graph_alive(grad):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    ids = torch.tensor([PROMPT])
    graph = weakref.WeakSet()  # what autograd keeps for a backward pass

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor.detach()  # the tensor itself would be a cycle that no collector sees
            graph.add(self)

    hooks = torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor)
    with torch.set_grad_enabled(grad), cache.attach(model), hooks:
        logits = model(ids).logits
    assert logits.requires_grad is grad and bool(graph) is grad  # control: there was a graph
    del logits
    gc.collect()
    assert not graph
    for pool in cache._store.pools.values():
        for slab in pool.slabs.values():
            for tensor in (*slab.keys.values(), *slab.values.values()):
                assert tensor.grad_fn is None and not tensor.requires_grad and not tensor.is_inference()
    for context in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with context():
            assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1


# -- statistics -----------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


class Fail(Recorder):
    def __call__(self, input_ids, scores):
        raise Boom


def test_statistics_are_the_rows_that_ran_over_100_mixed_calls():
    model = make_model("llama", spy=True)
    cache, draw = SuffixCache(max_bytes=1500 * ROW), random.Random(4)
    ran = capability = reused = refusals = failures = 0
    totals = dict.fromkeys(["prompt_tokens", "new_tokens", "computed_rows", "exact_tokens", "shifted_tokens"], 0)
    pieces = [A, B, C, *(old_text(30, 80 + number) for number in range(3))]
    for _ in range(100):
        handle = cache.using(fidelity=draw.choice(["exact", "balanced", "fast"]))
        ids = head(draw.randrange(4)) + sum(draw.sample(pieces, 3), []) + question(draw.randrange(6))
        options = draw.choice([{}, {}, {}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}])
        way = draw.choice(["plain", "plain", "plain", "batch", "embeds", "training", "failing"])
        requests, before = cache.stats.requests, cache.stats.computed_rows
        model.spy.clear()
        if way == "failing":
            with pytest.raises(Boom):
                ask(model, ids, handle, steps=1, processors=[Fail()])
            failures += 1
            assert (cache.stats.requests, cache.stats.computed_rows) == (requests, before)
            continue
        if way == "embeds":
            embeds = model.get_input_embeddings()(torch.tensor([ids])).detach()
            model.generate(inputs_embeds=embeds, max_new_tokens=1, do_sample=False, cache=handle)
        elif way == "training":
            model.train()
            ask(model, ids, handle, steps=1, **options)
            model.eval()
        else:
            ask(model, [ids, ids[::-1]] if way == "batch" else ids, handle, steps=1, **options)
        report, rows = handle.last_report, model.spy.rows()
        check_report(report)
        assert rows == report.computed_rows + report.capability_rows, (way, options, str(report))
        ran, capability = ran + rows, capability + report.capability_rows
        refusals += way in ("embeds", "training") and report.reason is not None
        reused += report.exact_tokens + report.shifted_tokens
        for name in totals:
            totals[name] += getattr(report, name)
    stats = cache.stats
    assert ran == stats.computed_rows + capability
    assert {name: getattr(stats, name) for name in totals} == totals
    assert stats.requests == 100 - failures
    assert min(refusals, failures, stats.evictions) > 3 and reused > 1000  # control: there was something of each
    ask(model, PROMPT, cache, steps=3)
    assert model.spy.rows() == cache.last_report.computed_rows + 2  # control: decoded rows are not in it


# -- the keyword itself ---------------------------------------------------------------------------------------------


def test_control_without_the_hook_the_keyword_serves_nothing():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": 3, "do_sample": False, cache_name(model): cache}
    model.generate(ids, **options)
    uninstall()
    try:
        model.generate(ids, **options)
        assert cache.stats.requests == 1  # an ordinary cache, as far as transformers can tell
    finally:
        SuffixCache()
    model.generate(ids, **options)
    assert cache.stats.requests == 2 and cache.last_report.exact_tokens == len(PROMPT) - 1


# -- peak memory of a hit -------------------------------------------------------------------------------------------


def peak_bytes(function) -> int:
    """The most bytes of CPU tensors that existed at once during a call, beyond those that were there before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = function()
    del kept
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(held.max(initial=0))


@pytest.mark.parametrize("keep", [0, 4])
def test_a_hit_holds_the_entry_once(keep):
    model = make_model("llama", num_key_value_heads=4, head_dim=64)
    row = 3 * 2 * 4 * 64 * 4
    prompt = old_text(800, 5)
    cache = SuffixCache(fidelity="exact", keep_conversations=keep, max_bytes=8000 * row)
    for number in range(8):  # until the pool has all its slabs
        ask(model, prompt + new_text(9, number), cache, steps=2)
    before, during = cache.stats.bytes_used, []

    class Look(Recorder):
        def __call__(self, input_ids, scores):
            during.append(sum(pool.bytes_used for pool in cache._store.pools.values()))
            return super().__call__(input_ids, scores)

    total = cache.stats.bytes_total
    outside = peak_bytes(lambda: ask(model, prompt + new_text(9, 50), cache, steps=2, processors=[Look()]))
    assert cache.last_report.exact_tokens == len(prompt) and cache.stats.bytes_total == total
    entry = len(prompt) * row
    assert 0 < max(during) - before + outside <= 1.1 * entry
    copies = peak_bytes(lambda: [torch.empty(entry, dtype=torch.uint8) for _ in range(2)])
    assert copies > 1.9 * entry  # control: two copies would be seen
