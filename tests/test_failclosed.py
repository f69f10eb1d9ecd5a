"""O9: what is not understood gets vanilla behaviour and a reason; what breaks off leaves nothing."""

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
import transformers
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_suffix_cache import SuffixCache, UnsupportedModelError
from hf_suffix_cache.calls import GenerateCall
from reference import (
    Recorder,
    ask,
    check_pool,
    check_report,
    forgets_everything,
    max_difference,
    same_answer,
    same_as_vanilla,
)
from tiny_models import UNSUPPORTED, forget, make_model, new_text, old_text

PROMPT = old_text(48, 1)
STEPS = dict(max_new_tokens=5, do_sample=False)


def refused(cache, reused: int = 0) -> str:
    """The reason of the last report, which must name one and report no reuse."""
    report = cache.last_report
    check_report(report)
    assert report.exact_tokens + report.carried_tokens + report.shifted_tokens + report.repaired_tokens == reused
    assert isinstance(report.reason, str) and report.reason
    return report.reason


# -- inputs ---------------------------------------------------------------------------------------------------------


def test_inputs_embeds_are_refused():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    segments = cache.stats.segments
    embeds = model.get_input_embeddings()(torch.tensor([PROMPT])).detach()
    want = model.generate(inputs_embeds=embeds, **STEPS)
    for _ in range(4):
        assert model.generate(inputs_embeds=embeds, cache=cache, **STEPS).tolist() == want.tolist()
        assert "inputs_embeds" in refused(cache)
    assert cache.stats.segments == segments
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1  # control


def test_inputs_embeds_beside_ids_are_refused():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    other = model.get_input_embeddings()(torch.tensor([new_text(48, 1)])).detach()
    ids = torch.tensor([PROMPT])
    want = model.generate(ids, inputs_embeds=other, **STEPS)
    for _ in range(4):
        assert model.generate(ids, inputs_embeds=other, cache=cache, **STEPS).tolist() == want.tolist()
        refused(cache)
    same_as_vanilla(model, PROMPT, cache)


def four_dimensional(length: int) -> torch.Tensor:
    """A mask that is not causal: the first ten tokens are hidden from all later ones."""
    mask = torch.tril(torch.ones(length, length, dtype=torch.bool))
    mask[10:, :10] = False
    return mask[None, None]


def test_four_dimensional_masks_are_refused_under_attach():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    ids = torch.tensor([PROMPT])
    mask = four_dimensional(len(PROMPT))
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        causal = model(ids).logits
        assert (want - causal).abs().max() > 1e-2  # control
        with cache.attach(model):
            model(ids)
            for _ in range(4):
                assert (model(ids, attention_mask=mask).logits - want).abs().max() < 1e-4
                assert (model(ids, attention_mask=mask, logits_to_keep=1).logits - want[:, -1:]).abs().max() < 1e-4
                assert (model(ids, logits_to_keep=1).logits - causal[:, -1:]).abs().max() < 1e-4
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1
    check_pool(cache)


def test_four_dimensional_masks_in_generate_do_what_vanilla_does():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    for _ in range(4):
        outcomes = []
        for kwargs in ({}, {"cache": cache}):
            try:
                mask = four_dimensional(len(PROMPT))
                got = model.generate(torch.tensor([PROMPT]), attention_mask=mask, **STEPS, **kwargs).tolist()
            except Exception as error:
                got = type(error)
            outcomes.append(got)
        assert outcomes[0] == outcomes[1]
    same_as_vanilla(model, PROMPT, cache)


@pytest.mark.parametrize("start", [0, 5])
def test_position_ids_of_the_caller(start):
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    positions = torch.arange(start, start + len(PROMPT))[None]
    options = {"position_ids": positions, "steps": 4}
    for _ in range(4):
        got = ask(model, PROMPT, cache, **options)
        same_answer(got, ask(model, PROMPT, **options))
        check_report(got.report)
    same_as_vanilla(model, PROMPT, cache)


def test_reordered_position_ids_are_refused():
    model = make_model("llama")
    cache = SuffixCache()
    ask(model, PROMPT, cache)
    positions = torch.arange(len(PROMPT))
    positions[5:9] = positions[5:9].flip(0)
    options = {"position_ids": positions[None], "steps": 4}
    for _ in range(4):
        same_answer(ask(model, PROMPT, cache, **options), ask(model, PROMPT, **options))
        refused(cache)
    same_as_vanilla(model, PROMPT, cache)


@pytest.mark.parametrize("mask_length", [len(PROMPT) - 5, len(PROMPT) + 3])
def test_mask_of_another_length_is_a_precise_error_or_vanilla(mask_length):
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    mask = torch.ones(1, mask_length, dtype=torch.long)
    mask[0, 0] = 0
    for _ in range(2):
        try:
            got = model.generate(torch.tensor([PROMPT]), attention_mask=mask, cache=cache, **STEPS).tolist()
        except ValueError as error:
            assert "attention_mask" in str(error)
        else:
            assert got == model.generate(torch.tensor([PROMPT]), attention_mask=mask, **STEPS).tolist()
    same_as_vanilla(model, PROMPT, cache)


def test_training_mode_is_refused():
    model = make_model("llama", attention_dropout=0.5)
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    model.train()
    try:
        want = ask(model, PROMPT, seed=3)
        assert max_difference(want.scores, ask(model, PROMPT, seed=4).scores) > 1e-3  # control: dropout is on
        for _ in range(4):
            same_answer(ask(model, PROMPT, cache, seed=3), want)
            assert "train" in refused(cache)
    finally:
        model.eval()
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1


def test_encoder_decoder_models_are_refused():
    model = make_model("t5")
    cache = SuffixCache()
    want = model.generate(torch.tensor([PROMPT]), **STEPS)
    for _ in range(4):
        assert model.generate(torch.tensor([PROMPT]), cache=cache, **STEPS).tolist() == want.tolist()
        refused(cache)
    assert cache.stats.segments == 0


@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.parametrize("options", [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}])
def test_models_that_are_not_understood_keep_every_mode(kind, options):
    model = make_model(kind)
    cache = SuffixCache()
    for _ in range(2):
        got = ask(model, [PROMPT, PROMPT[::-1]], cache, seed=1, **options)
        same_answer(got, ask(model, [PROMPT, PROMPT[::-1]], seed=1, **options))
        refused(cache)
    assert check_pool(cache).bytes_used == 0


@pytest.mark.parametrize("kind", ["gpt2", "mamba", "qwen3_next", "t5"])
def test_register_on_a_model_that_cannot_raises(kind):
    with pytest.raises(UnsupportedModelError):
        SuffixCache().register(make_model(kind), [PROMPT])


def test_output_attentions_and_hidden_states_are_those_of_vanilla():
    model = make_model("llama", attention="eager")
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    flags = dict(return_dict_in_generate=True, output_hidden_states=True, output_attentions=True)
    want = ask(model, PROMPT, **flags)
    for _ in range(4):
        got = ask(model, PROMPT, cache, **flags)
        same_answer(got, want)
        if got.report.reason is None:  # then at least the shapes of decoding are those of vanilla
            continue
        for mine, theirs in zip(got.output.hidden_states, want.output.hidden_states, strict=True):
            assert [part.shape for part in mine] == [part.shape for part in theirs]


# -- what breaks off ------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


class RaiseInProcessor(Recorder):
    def __init__(self, error, step: int):
        super().__init__()
        self.error, self.step = error, step

    def __call__(self, input_ids, scores):
        super().__call__(input_ids, scores)
        if len(self.ids) > self.step:
            raise self.error
        return scores


class RaiseInCriteria(StoppingCriteria):
    def __init__(self, error, step: int):
        self.error, self.step, self.calls = error, step, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls > self.step:
            raise self.error
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["processor", "criteria"])
def test_exception_commits_nothing_and_leaves_nothing(where, error, step):
    model = make_model("llama", spy=True)
    cache = SuffixCache()
    ask(model, new_text(9, 1) + PROMPT + new_text(33, 2), cache)
    before = (check_pool(cache), cache.stats.requests)
    ids = new_text(12, 3) + PROMPT + new_text(36, 4)
    for _ in range(4):
        kwargs = (
            {"logits_processor": LogitsProcessorList([RaiseInProcessor(error, step)])}
            if where == "processor"
            else {"stopping_criteria": StoppingCriteriaList([RaiseInCriteria(error, step)])}
        )
        with pytest.raises(error):
            model.generate(torch.tensor([ids]), cache=cache, max_new_tokens=6, **kwargs)
        assert not model._forward_pre_hooks
        after = check_pool(cache)
        assert (after.bytes_used, after.segments) == (before[0].bytes_used, before[0].segments)
    assert ask(model, ids, cache.using(fidelity="exact"), steps=1).report.exact_tokens == 0  # nothing was committed
    same_as_vanilla(model, ids, cache.using(fidelity="exact"))
    forgets_everything(cache)


def test_exception_inside_a_forward_commits_nothing():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)
    used = check_pool(cache).bytes_used
    failing = []

    def explode(module, args):
        if failing == [module]:
            raise Boom

    layers = [model.model.layers[number].mlp for number in (0, 1, 2)]
    hooks = [layer.register_forward_pre_hook(explode) for layer in layers]  # a foreign hook makes a new identity
    try:
        ask(model, PROMPT, cache)
        assert check_pool(cache).bytes_used == 2 * used  # the rows of both identities are kept
        for layer in layers:
            failing[:] = [layer]
            with pytest.raises(Boom):
                ask(model, PROMPT[:30] + new_text(20, 1), cache)
        failing.clear()
        assert check_pool(cache).bytes_used == 2 * used
    finally:
        for hook in hooks:
            hook.remove()
    ask(model, PROMPT, cache)
    assert same_as_vanilla(model, PROMPT[:30] + new_text(20, 1), cache).report.exact_tokens == 30
    forgets_everything(cache)


def test_exception_in_the_middle_of_a_chat_keeps_the_turn_before():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    tokens = ask(model, PROMPT, cache).tokens()
    for number in range(4):
        with pytest.raises(Boom):
            ask(model, tokens + new_text(9, number), cache, processors=[RaiseInProcessor(Boom, 2)])
        assert same_as_vanilla(model, tokens, cache, steps=1).report.exact_tokens == len(tokens) - 1
    check_pool(cache)


def test_wrong_arguments_raise_as_in_vanilla_and_leave_nothing():
    model = make_model("llama")
    cache = SuffixCache()
    with pytest.raises(ValueError, match="not_an_argument"):
        ask(model, PROMPT, cache, not_an_argument=3)
    assert check_pool(cache).bytes_used == 0
    same_as_vanilla(model, PROMPT, cache)


def test_requests_after_clear_inside_a_request_stay_right():
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)

    class Disturb(Recorder):
        def __call__(self, input_ids, scores):
            super().__call__(input_ids, scores)
            if len(self.ids) == 3:
                cache.clear()
                cache.compact()
                ask(model, new_text(100, 1), cache, steps=1)
            return scores

    want = ask(model, PROMPT)
    for _ in range(4):
        same_answer(ask(model, PROMPT, cache, processors=[Disturb()]), want)
    forgets_everything(cache)


# -- copies, and the end of things ----------------------------------------------------------------------------------


@pytest.mark.parametrize("copier, word", [(copy.copy, "copied"), (copy.deepcopy, "copied"), (pickle.dumps, "pickled")])
def test_copies_are_refused_and_name_save(copier, word):
    cache = SuffixCache()
    for thing in (cache, cache.using(fidelity="exact")):
        with pytest.raises(TypeError, match=f"{word}.*save"):
            copier(thing)


def test_cache_does_not_keep_the_model_alive():
    model = make_model("llama")
    cache = SuffixCache()
    ask(model, PROMPT, cache)
    report, gone = cache.last_report, weakref.ref(model)
    forget(model)
    del model
    gc.collect()
    assert gone() is None
    assert report.prompt_tokens == len(PROMPT)
    same_as_vanilla(make_model("llama", seed=1), PROMPT, cache)


def test_model_does_not_keep_the_cache_alive():
    model = make_model("llama")
    cache = SuffixCache()
    ask(model, PROMPT, cache)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    ask(model, PROMPT)


def test_fault_in_storing_keeps_the_answer_and_forgets_the_rows(monkeypatch):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    ask(model, PROMPT, cache)

    def broken(*args, **kwargs):
        raise RuntimeError("disk on fire")

    with monkeypatch.context() as patch:
        patch.setattr(cache._store, "commit", broken)
        same_as_vanilla(model, PROMPT + new_text(9, 1), cache)
    assert cache.stats.segments == 0
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == 0
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1
    check_pool(cache)


@pytest.mark.parametrize("broken_part", ["match", "runs"])
def test_fault_in_planning_is_a_full_prefill_with_a_reason(monkeypatch, broken_part):
    model, cache = make_model("llama"), SuffixCache()
    ask(model, PROMPT, cache)

    def broken(*args, **kwargs):
        raise RuntimeError("index on fire")

    with monkeypatch.context() as patch:
        patch.setattr(f"hf_suffix_cache.store.shelf.Shelf.{broken_part}", broken)
        report = same_as_vanilla(model, new_text(5, 2) + PROMPT + new_text(40, 1), cache).report
        assert "index on fire" in report.reason and report.new_tokens == report.prompt_tokens
    check_pool(cache)
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1


def test_fault_in_materialising_is_a_full_prefill_with_a_reason(monkeypatch):
    model, cache = make_model("llama"), SuffixCache()
    ask(model, PROMPT, cache)

    def broken(*args, **kwargs):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("hf_suffix_cache.loading.copy_rows", broken)
        report = same_as_vanilla(model, new_text(5, 2) + PROMPT + new_text(40, 1), cache).report
        assert "no memory" in report.reason and report.computed_rows == report.prompt_tokens
    check_pool(cache)
    assert same_as_vanilla(model, PROMPT, cache).report.exact_tokens == len(PROMPT) - 1


def test_model_that_drops_its_cache_is_reported():
    """Phi-3 runs without the cache that it was given once a prompt crosses `original_max_position_embeddings`."""
    config = transformers.Phi3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        original_max_position_embeddings=32,
        max_position_embeddings=32,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0),
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model, cache = transformers.Phi3ForCausalLM(config).eval(), SuffixCache()
    ids = torch.tensor([PROMPT])
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    want = model.generate(ids, **options)
    for _ in range(3):
        assert torch.equal(model.generate(ids, cache=cache, **options), want)
        check_report(cache.last_report)
        assert cache.last_report.prompt_tokens == len(PROMPT)
    check_pool(cache)


def test_only_code_of_the_callers_own_is_watched():
    """Each forward after such code asks whether the model is the same; transformers' own code can't change it."""
    tokenizer = object()

    class Criteria(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.zeros(len(input_ids), dtype=torch.bool)

    class Streamer(transformers.TextStreamer):
        pass

    replaced, partly = transformers.TextStreamer(tokenizer), transformers.TextStreamer(tokenizer)
    replaced.put = lambda value: None
    partly.on_finalized_text = functools.partial(print, end="")

    class Processors(LogitsProcessorList):
        pass

    own_code = [
        {"stopping_criteria": StoppingCriteriaList([Criteria()])},
        {"streamer": Streamer(tokenizer)},
        {"streamer": replaced},
        {"streamer": partly},
        {"logits_processor": Processors()},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [1]},
        {"logits_processor": LogitsProcessorList([transformers.PrefixConstrainedLogitsProcessor(list, 1)])},
        {"assistant_model": make_model("llama")},
    ]
    theirs = [
        {},
        {"streamer": transformers.TextStreamer(tokenizer)},
        {"streamer": transformers.TextIteratorStreamer(tokenizer)},
        {"logits_processor": LogitsProcessorList([transformers.TopKLogitsWarper(3)])},
        {"stopping_criteria": StoppingCriteriaList()},
    ]
    model = make_model("llama")
    for watch, calls in ((True, own_code), (False, theirs)):
        for kwargs in calls:
            options = GenerateCall(model, (torch.tensor([PROMPT]),), kwargs).request_options()
            assert options["watch"] is watch, kwargs
    by_position = (torch.tensor([PROMPT]), None, None, StoppingCriteriaList([Criteria()]))
    assert GenerateCall(model, by_position, {}).request_options()["watch"]
