"""Drop-in: every way of calling `generate` gives with a cache what it gives without one."""

import random
import warnings

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_suffix_cache import SuffixCache
from reference import (
    Recorder,
    ask,
    cache_name,
    check_pool,
    check_report,
    max_difference,
    same_answer,
    same_as_vanilla,
    served,
    view_of,
)
from tiny_models import CORE, make_model, new_text, old_text

PROMPT = old_text(48, 1)
SECOND = PROMPT[:29] + new_text(19, 2)  # as long as PROMPT, shares its first 29 tokens
BEFORE = PROMPT[:37] + new_text(20, 3)  # what an earlier request left: a partial hit for PROMPT

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 50},
    "return_3": {"do_sample": True, "num_return_sequences": 3},
    "return_4": {"do_sample": True, "num_return_sequences": 4, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "beams_return_3": {"num_beams": 3, "num_return_sequences": 3},
    "beams_sampling": {"num_beams": 3, "do_sample": True},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "chunks": {"prefill_chunk_size": 8},
    "no_cache": {"use_cache": False},
}
SINGLE_ROW_MODES = {"prompt_lookup": {"prompt_lookup_num_tokens": 3}}


def warm_cache(model, hit: str, **options) -> SuffixCache:
    """A cache that holds nothing of PROMPT, its first 37 tokens, or all of it."""
    cache = SuffixCache(**{"fidelity": "exact", **options})
    before = {"none": new_text(40, 4), "partial": BEFORE, "full": PROMPT}[hit]
    ask(model, before, cache, steps=2)
    return cache


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("hit", ["none", "partial", "full"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_generate_in_every_mode_equals_vanilla(kind, mode, hit, batch):
    model = make_model(kind)
    cache = warm_cache(model, hit)
    ids = [PROMPT, SECOND][:batch]
    vanilla = ask(model, ids, seed=5, **MODES[mode])
    for _ in range(4):
        got = ask(model, ids, cache, seed=5, **MODES[mode])
        same_answer(got, vanilla)
        check_report(got.report)
        assert got.report.prompt_tokens == batch * len(PROMPT)
    check_pool(cache)
    if mode != "no_cache":
        assert got.report.exact_tokens >= len(PROMPT) - 1
        replay = same_as_vanilla(model, PROMPT, cache)
        assert replay.report.exact_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("hit", ["none", "partial", "full"])
@pytest.mark.parametrize("kind", CORE)
def test_prompt_lookup_equals_vanilla_and_stores_no_rejected_draft(kind, hit):
    model = make_model(kind)
    cache = warm_cache(model, hit)
    repeated = PROMPT[:20] * 3
    vanilla = ask(model, repeated, prompt_lookup_num_tokens=3, steps=12)
    for _ in range(4):
        got = ask(model, repeated, cache, prompt_lookup_num_tokens=3, steps=12)
        assert got.ids.tolist() == vanilla.ids.tolist()
        check_report(got.report)
    again = same_as_vanilla(model, got.tokens() + new_text(5, 6), cache)
    assert again.report.exact_tokens >= len(repeated) - 1
    check_pool(cache)


@pytest.mark.parametrize("hit", ["none", "partial", "full"])
def test_assisted_decoding_equals_vanilla_and_keeps_the_assistant_out(hit):
    model, assistant = make_model("llama", spy=True), make_model("llama", seed=1)
    cache = warm_cache(model, hit)
    vanilla = ask(model, PROMPT, assistant_model=assistant, steps=12)
    for _ in range(4):
        got = ask(model, PROMPT, cache, assistant_model=assistant, steps=12)
        assert got.ids.tolist() == vanilla.ids.tolist()
    same_as_vanilla(model, got.tokens() + new_text(5, 6), cache)
    other = SuffixCache(fidelity="exact")
    assert same_as_vanilla(assistant, PROMPT, other).report.exact_tokens == 0
    check_pool(cache)


@pytest.mark.parametrize("fidelity", ["balanced", "fast"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "no_cache"])
def test_generate_in_every_mode_works_behind_moved_rows(mode, fidelity):
    model = make_model("llama")
    cache = SuffixCache(fidelity=fidelity, repair_fraction=1.0)
    ask(model, new_text(9, 1) + PROMPT + new_text(40, 2), cache, steps=2)
    ids = new_text(21, 7) + PROMPT + new_text(36, 8)
    got = ask(model, ids, cache, seed=5, **MODES[mode])
    check_report(got.report)
    assert served(got.report) == len(PROMPT)
    if fidelity == "balanced":  # every moved row is recomputed
        same_answer(got, ask(model, ids, seed=5, **MODES[mode]))
    check_pool(cache)


class Collector(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], 0

    def put(self, value):
        self.pieces.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("hit", ["none", "partial", "full"])
def test_streamer_sees_the_same_pieces(hit):
    model = make_model("llama")
    cache, mine, theirs = warm_cache(model, hit), Collector(), Collector()
    ask(model, PROMPT, cache, streamer=mine)
    ask(model, PROMPT, streamer=theirs)
    assert mine.pieces == theirs.pieces
    assert mine.ended == 1


class StopAt(StoppingCriteria):
    """Stops after `steps` tokens; keeps the shapes of what it saw."""

    def __init__(self, steps: int):
        self.steps, self.shapes = steps, []

    def __call__(self, input_ids, scores, **kwargs):
        self.shapes.append(tuple(input_ids.shape))
        return torch.full((input_ids.shape[0],), len(self.shapes) >= self.steps)


@pytest.mark.parametrize("hit", ["none", "partial", "full"])
def test_stopping_criteria_see_all_ids(hit):
    model = make_model("llama")
    cache, mine, theirs = warm_cache(model, hit), StopAt(3), StopAt(3)
    got = ask(model, PROMPT, cache, steps=10, stopping_criteria=StoppingCriteriaList([mine]))
    same_answer(got, ask(model, PROMPT, steps=10, stopping_criteria=StoppingCriteriaList([theirs])))
    assert mine.shapes == theirs.shapes == [(1, len(PROMPT) + step) for step in (1, 2, 3)]
    assert got.report.generated_tokens == 3


@pytest.mark.parametrize("hit", ["none", "partial", "full"])
def test_logits_processors_see_all_ids(hit):
    model = make_model("llama")
    got = ask(model, [PROMPT, SECOND], warm_cache(model, hit))
    want = ask(model, [PROMPT, SECOND])
    assert [seen.tolist() for seen in got.seen] == [seen.tolist() for seen in want.seen]


@pytest.mark.parametrize("mode", ["greedy", "return_3", "beams_return_3"])
def test_dictionary_output_has_the_same_scores_and_logits(mode):
    model = make_model("qwen2")
    cache = warm_cache(model, "partial")
    flags = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, **MODES[mode])
    want = ask(model, PROMPT, seed=5, **flags).output
    for _ in range(4):
        got = ask(model, PROMPT, cache, seed=5, **flags).output
        assert type(got) is type(want) and set(got) == set(want)
        assert got.sequences.tolist() == want.sequences.tolist()
        assert max_difference(got.logits, want.logits) < 1e-4
        assert max_difference(got.scores, want.scores) < 1e-4


def test_returned_cache_may_be_changed_by_the_caller():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    for number in range(4):
        got = same_as_vanilla(model, PROMPT, cache, return_dict_in_generate=True)
        for layer in view_of(got.output).layers:
            layer.keys.fill_(1000.0)
            layer.values.mul_(-3.0)
        # the next turn must not go on in the caller's memory
        turn = same_as_vanilla(model, got.tokens() + new_text(9, number), cache)
        assert turn.report.exact_tokens >= len(got.tokens()) - 1
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1


def test_returned_cache_continues_in_a_plain_forward():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    ask(model, BEFORE, cache)
    got = ask(model, PROMPT, cache, return_dict_in_generate=True)
    view = view_of(got.output)
    assert view.get_seq_length() == got.ids.shape[1] - 1
    next_ids = torch.tensor([got.tokens()[-1:] + new_text(3, 3)])
    with torch.no_grad():
        logits = model(next_ids, **{cache_name(model): view}).logits
        want = model(torch.cat([got.ids[:, :-1], next_ids], -1), use_cache=False).logits[:, -4:]
    assert (logits - want).abs().max() < 1e-4
    same_as_vanilla(model, PROMPT, cache)


def test_returned_cache_stays_as_it_is_when_later_requests_run():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact", keep_conversations=1)
    first = ask(model, PROMPT, cache, return_dict_in_generate=True)
    view = view_of(first.output)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in view.layers]
    ask(model, first.tokens() + new_text(30, 8), cache)
    for number in range(6):
        ask(model, PROMPT + new_text(30, number), cache)
    cache.clear()
    cache.compact()
    ask(model, new_text(200, 9), cache)
    for layer, (keys, values) in zip(view.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


@pytest.mark.parametrize("how", ["argument", "model"])
def test_generation_config_is_used_and_not_altered(how):
    model = make_model("llama")
    cache = warm_cache(model, "partial")
    config = GenerationConfig(max_new_tokens=5, num_beams=2, repetition_penalty=1.2, pad_token_id=0, bos_token_id=1)
    before = config.to_dict()
    kwargs = {"generation_config": config} if how == "argument" else {}
    if how == "model":
        model.generation_config = config
        model.baseline["generation_config"] = before
    ids = torch.tensor([PROMPT])
    for _ in range(4):
        assert model.generate(ids, cache=cache, **kwargs).tolist() == model.generate(ids, **kwargs).tolist()
        assert config.to_dict() == before


def test_use_cache_false_in_the_generation_config_stores_nothing():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    config = GenerationConfig(max_new_tokens=4, use_cache=False, pad_token_id=0)
    for _ in range(2):
        got = model.generate(torch.tensor([PROMPT]), cache=cache, generation_config=config)
        assert got.tolist() == model.generate(torch.tensor([PROMPT]), generation_config=config).tolist()
        assert cache.last_report.exact_tokens == 0 and cache.last_report.reason


@pytest.mark.parametrize("implementation", ["static", "quantized", "offloaded"])
def test_cache_implementation_beside_a_cache_is_one_clear_error(implementation):
    model = make_model("llama")
    cache = warm_cache(model, "partial")
    with pytest.raises(ValueError, match="cache_implementation"):
        ask(model, PROMPT, cache, cache_implementation=implementation)
    same_as_vanilla(model, PROMPT, cache)


def test_past_key_values_is_the_same_argument():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    ids = torch.tensor([PROMPT])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            got = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert got.tolist() == model.generate(ids, max_new_tokens=4, do_sample=False).tolist()
    assert cache.last_report.exact_tokens == len(PROMPT) - 1


def test_both_names_at_once_is_an_error():
    model = make_model("llama")
    cache = SuffixCache()
    with pytest.raises((TypeError, ValueError), match="past_key_values"):
        model.generate(torch.tensor([PROMPT]), cache=cache, past_key_values=SuffixCache(), max_new_tokens=2)
    same_as_vanilla(model, PROMPT, cache, steps=2, repetition_penalty=1.1)


def test_cache_none_is_vanilla():
    model = make_model("llama")
    SuffixCache()  # the hook is on generate
    ids = torch.tensor([PROMPT])
    assert model.generate(ids, cache=None, max_new_tokens=4).tolist() == model.generate(ids, max_new_tokens=4).tolist()


def test_a_stock_cache_still_works_while_the_hook_is_on():
    from transformers import DynamicCache

    model = make_model("llama")
    SuffixCache()
    stock, ids = DynamicCache(), torch.tensor([PROMPT])
    got = model.generate(ids, max_new_tokens=6, **{cache_name(model): stock})
    assert got.tolist() == model.generate(ids, max_new_tokens=6).tolist()
    assert stock.get_seq_length() == len(PROMPT) + 5


@pytest.mark.parametrize("call", ["positional", "inputs", "input_ids", "none"])
def test_ids_may_come_in_any_way(call):
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    ids = torch.tensor([PROMPT])
    args = {"positional": (ids,), "none": (None,)}.get(call, ())
    kwargs = {call: ids} if call in ("inputs", "input_ids") else {}
    for _ in range(4):
        got = model.generate(*args, cache=cache, max_new_tokens=5, **kwargs)
        assert got.tolist() == model.generate(*args, max_new_tokens=5, **kwargs).tolist()
        check_report(cache.last_report)
        assert cache.last_report.prompt_tokens == (1 if call == "none" else len(PROMPT))


@pytest.mark.parametrize("fidelity", ["exact", "balanced", "fast"])
def test_global_random_state_moves_as_in_vanilla(fidelity):
    model = make_model("llama")
    cache = SuffixCache(fidelity=fidelity)
    ask(model, new_text(9, 1) + PROMPT + new_text(40, 2), cache, steps=2)
    ids = new_text(21, 7) + PROMPT + new_text(36, 8)
    states = []
    for _ in range(3):
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        before = torch.get_rng_state()
        ask(model, ids, cache)
        assert torch.equal(torch.get_rng_state(), before)  # greedy: not drawn from at all
        ask(model, ids, cache, do_sample=True)
        states.append((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()))
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    ask(model, ids, do_sample=True)
    vanilla = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
    assert all(state == vanilla for state in states)


class NestedCall(Recorder):
    """Runs another request with another cache in the middle of a request, and keeps how many hooks it saw."""

    def __init__(self, model, cache):
        super().__init__()
        self.model, self.cache, self.hooks = model, cache, []

    def __call__(self, input_ids, scores):
        self.hooks.append(len(self.model._forward_pre_hooks))
        ask(self.model, SECOND, self.cache, steps=2)
        return super().__call__(input_ids, scores)


@pytest.mark.parametrize("same", [True, False])
def test_a_request_inside_a_request_disturbs_neither(same):
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    inner = cache if same else SuffixCache(fidelity="exact")
    nested = NestedCall(model, inner)
    vanilla = ask(model, PROMPT)
    for _ in range(4):
        got = ask(model, PROMPT, cache, processors=[nested])
        same_answer(got, vanilla)
    assert max(nested.hooks) <= 1  # one counted hook, whatever is nested
    same_as_vanilla(model, SECOND, inner)


def test_many_calls_in_a_row_leave_one_wrapper_and_no_growth():
    model = make_model("llama")
    caches = [SuffixCache(fidelity="exact") for _ in range(5)]
    sizes = []
    for _ in range(6):
        for cache in caches:
            ask(model, PROMPT, cache, steps=2)
        sizes.append([check_pool(cache).bytes_used for cache in caches])
    assert sizes[1] == sizes[-1]


def test_logits_processor_list_of_the_caller_is_not_altered():
    model = make_model("llama")
    processors = LogitsProcessorList([Recorder()])
    model.generate(torch.tensor([PROMPT]), cache=SuffixCache(), max_new_tokens=2, logits_processor=processors)
    assert len(processors) == 1
