"""Modes of generate beside the plain ones: drafts, chunks, other caches, half precision, nested and parallel calls."""

import gc
import threading
import warnings

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerFast, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_suffix_cache import SuffixCache
from reference import (
    Recorder,
    ask,
    check_pool,
    check_report,
    forgets_everything,
    fresh_rows,
    in_threads,
    max_difference,
    moved_pieces,
    same_answer,
    same_as_vanilla,
    served,
    served_rows,
    work_is_reported,
)
from tiny_models import A, B, C, fingerprint, forget, head, make_model, new_text, old_text, question

PROMPT = old_text(48, 1)
REPEATED = PROMPT[:20] * 3  # prompt lookup finds drafts in it
HITS = {"none": new_text(40, 4), "partial": REPEATED[:37] + new_text(20, 3), "full": REPEATED}
KINDS = ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mistral", "gemma3_text"))]


def warm(model, hit: str, **options) -> SuffixCache:
    """A cache that holds nothing of REPEATED, its first 37 tokens, or all of it."""
    cache = SuffixCache(**{"fidelity": "exact", **options})
    ask(model, HITS[hit], cache, steps=2)
    return cache


# -- drafts ---------------------------------------------------------------------------------------------------------


class Drafts:
    """Counts what assisted decoding took back: tokens that `crop` removed from the views of a model's calls."""

    def __init__(self, monkeypatch):
        from hf_suffix_cache.view import View

        self.rejected, original = 0, View.crop

        def crop(view, tokens_to_remove):
            self.rejected -= tokens_to_remove
            return original(view, tokens_to_remove)

        monkeypatch.setattr(View, "crop", crop)


def drafting(kind: str, way: str) -> dict:
    """Options of a generate call that drafts tokens."""
    if way == "lookup":
        return {"prompt_lookup_num_tokens": 3}
    if way == "early_exit":
        return {"assistant_early_exit": 1}
    return {"assistant_model": make_model(kind, seed=0 if way == "twin" else 1)}


WAYS = ["lookup", "assistant", "twin", "early_exit"]


@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_give_the_stock_answer_and_rejected_ones_are_not_stored(monkeypatch, kind, way, hit):
    if (kind, way) == ("gemma3_text", "early_exit"):
        # stock itself fails: its forward reads one layer type per layer of the shortened model
        kind = "mistral_full"
    model = make_model(kind, spy=True)
    options = drafting(kind, way)
    want = ask(model, REPEATED, steps=12)
    assert ask(model, REPEATED, steps=12, **options).ids.tolist() == want.ids.tolist()
    cache, drafts = warm(model, hit), Drafts(monkeypatch)
    for number in range(3):
        got = ask(model, REPEATED, cache, steps=12, **options)
        assert got.ids.tolist() == want.ids.tolist()
        check_report(got.report)
        assert got.report.generated_tokens == 12
        expected = {"none": 0, "partial": 37, "full": len(REPEATED) - 1}[hit]
        assert got.report.exact_tokens == (len(REPEATED) - 1 if number else expected)
    if way != "twin":  # control: a twin's drafts are right, the others' mostly wrong
        assert drafts.rejected > 0
    check_pool(cache)
    # the answer goes on: what was stored of it is what was accepted, and all of that
    for tail in (new_text(5, 6), got.tokens()[-20:]):
        again = same_as_vanilla(model, got.tokens() + tail, cache)
        assert len(got.tokens()) - 1 <= again.report.exact_tokens <= len(got.tokens()) + len(tail) - 1
    forgets_everything(cache)


@pytest.mark.parametrize("way", ["lookup", "assistant"])
def test_work_of_a_call_with_drafts_is_counted_without_its_later_drafts(way):
    """O4: up to the first new token, the drafts that ride along in the first forward included."""
    model, rows = make_model("llama", spy=True), []
    cache, options = SuffixCache(fidelity="exact"), drafting("llama", way)
    ask(model, REPEATED[:37], cache, steps=1)
    for _ in range(3):
        model.spy.clear()
        got = ask(model, REPEATED, cache, steps=12, **options)
        batch, queries = model.spy.calls[0]
        assert batch * queries == got.report.computed_rows
        assert got.report.computed_rows > got.report.new_tokens  # drafts: never looked up, never the prompt's
        assert got.report.prompt_tokens == len(REPEATED)
        rows.append(got.report.computed_rows)
    assert rows[0] - rows[1] == len(REPEATED) - 1 - 37


@pytest.mark.parametrize("way", WAYS)
def test_drafts_behind_moved_text_are_exact_when_all_is_repaired(way):
    model = make_model("llama")
    cache = SuffixCache(repair_fraction=1.0)
    ask(model, new_text(9, 1) + REPEATED + new_text(40, 2), cache, steps=2)
    ids = new_text(21, 7) + REPEATED + new_text(36, 8)
    options = drafting("llama", way)
    got = ask(model, ids, cache, steps=12, **options)
    assert got.ids.tolist() == ask(model, ids, steps=12).ids.tolist()
    assert served(got.report) == len(REPEATED)
    check_report(got.report)
    check_pool(cache)


def test_drafts_at_little_repair_keep_layer_0_fresh_and_the_pool_whole():
    model = make_model("llama")
    cache = SuffixCache()
    ask(model, new_text(9, 1) + REPEATED + new_text(40, 2), cache, steps=2)
    ids = new_text(21, 7) + REPEATED + new_text(60, 8)
    answer, rows = served_rows(model, ids, cache, steps=12, prompt_lookup_num_tokens=3)
    assert answer.report.shifted_tokens > 0
    tokens = answer.tokens()[:-1]
    for mine, fresh in zip(rows[0], fresh_rows(model, tokens)[0], strict=True):
        assert mine.shape == fresh.shape and (mine - fresh).abs().max() < 1e-4
    del answer, rows
    gc.collect()
    forgets_everything(cache)


@pytest.mark.parametrize("way", ["assistant", "twin", "early_exit"])
def test_assistant_has_no_part_in_the_cache(way):
    """The assistant is never handed the view, and a store that is attached to it (or to its twin) takes no drafts."""
    model = make_model("llama")
    options = drafting("llama", way)
    assistant = options.get("assistant_model", model)
    caches = []

    def look(module, args, kwargs):
        caches.append(type(kwargs.get("cache", kwargs.get("past_key_values"))).__name__)

    hook = assistant.register_forward_pre_hook(look, with_kwargs=True)
    assistant.baseline["hooks"] = {**assistant.baseline["hooks"]}
    try:
        want = ask(model, REPEATED, steps=12)
        cache, other = SuffixCache(fidelity="exact"), SuffixCache(fidelity="exact")
        for number in range(3):
            caches.clear()
            with other.attach(assistant):
                got = ask(model, REPEATED, cache, steps=12, **options)
            assert got.ids.tolist() == want.ids.tolist()
            assert "DynamicCache" in caches  # control: the assistant did run
            assert ("View" in caches) == (assistant is model)
            assert got.report.exact_tokens == (len(REPEATED) - 1 if number else 0)
        assert other.stats.requests == 0 and other.stats.segments == 0
        assert cache.stats.requests == 3
    finally:
        hook.remove()
    assert same_as_vanilla(assistant, REPEATED, other).report.exact_tokens == 0
    # and with the store attached to the drafting model itself
    with cache.attach(model):
        assert ask(model, REPEATED, steps=12, **options).ids.tolist() == want.ids.tolist()
    same_as_vanilla(model, got.tokens() + new_text(3, 1), cache)


def word_tokenizer(size: int, offset: int) -> PreTrainedTokenizerFast:
    """`size` words of one letter and a number; another offset gives the same words other ids."""
    words = {f"w{(number + offset) % size}": number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


@pytest.mark.parametrize("hit", HITS)
def test_universal_assisted_decoding_gives_the_stock_answer(hit):
    """An assistant with another tokenizer and another vocabulary."""
    model, assistant = make_model("llama"), make_model("qwen2", seed=3, vocab_size=240)
    mine, theirs = word_tokenizer(256, 0), word_tokenizer(240, 7)
    options = dict(assistant_model=assistant, tokenizer=mine, assistant_tokenizer=theirs)
    want = ask(model, REPEATED, steps=8)
    assert ask(model, REPEATED, steps=8, **options).ids.tolist() == want.ids.tolist()
    cache = warm(model, hit)
    for _ in range(3):
        got = ask(model, REPEATED, cache, steps=8, **options)
        assert got.ids.tolist() == want.ids.tolist()
    assert got.report.exact_tokens == len(REPEATED) - 1
    assert same_as_vanilla(model, got.tokens() + new_text(5, 6), cache).report.exact_tokens >= len(got.tokens()) - 1
    check_pool(cache)


@pytest.mark.parametrize("way", ["lookup", "assistant"])
def test_sampled_drafts_draw_as_stock_does(way):
    model, options = make_model("llama"), drafting("llama", way)
    options |= dict(do_sample=True, temperature=0.9, steps=12)
    cache = warm(model, "full")
    states = []
    for store in (None, cache, cache):
        got = ask(model, REPEATED, store, seed=11, **options)
        states.append((got.ids.tolist(), torch.get_rng_state().tolist()))
    assert states[0] == states[1] == states[2]
    assert got.report.exact_tokens == len(REPEATED) - 1


@pytest.mark.parametrize("way", ["lookup", "assistant"])
def test_drafts_for_a_batch_raise_as_in_stock_and_leave_nothing(way):
    model, cache, options = make_model("llama"), SuffixCache(), drafting("llama", way)
    ids = [PROMPT, PROMPT]
    errors = []
    for store in (None, cache):
        with pytest.raises(ValueError) as caught:
            ask(model, ids, store, **options)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert check_pool(cache).bytes_used == 0
    same_as_vanilla(model, PROMPT, cache)


def test_stop_token_inside_accepted_drafts_ends_what_is_stored():
    model = make_model("llama")
    free = ask(model, REPEATED, steps=12).tokens()[len(REPEATED) :]
    stop = free[5]
    length = len(REPEATED) + free.index(stop) + 1
    for way in ("lookup", "twin"):
        cache = SuffixCache(fidelity="exact")
        options = dict(eos_token_id=stop, pad_token_id=0, steps=12, **drafting("llama", way))
        got = ask(model, REPEATED, cache, **options)
        assert got.tokens() == ask(model, REPEATED, **options).tokens() and len(got.tokens()) == length
        assert got.report.generated_tokens == length - len(REPEATED)
        again = same_as_vanilla(model, got.tokens() + new_text(9, 1), cache)
        assert again.report.exact_tokens == length - 1


# -- the end of a sequence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", ["none", "eos", "text"])
def test_rows_behind_the_stop_token_of_a_finished_row_are_not_stored(pad):
    """A finished row is filled up while its neighbour goes on; a stop token ends it, whatever the fill looks like."""
    model = make_model("llama")
    rows = [old_text(31, 1), old_text(31, 2)]
    free = [ask(model, row, steps=12).tokens()[31:] for row in rows]
    stop = next(token for token in free[0][2:5] if token not in free[1])
    length = 31 + free[0].index(stop) + 1
    fill = {"none": None, "eos": stop, "text": free[0][free[0].index(stop) - 1]}[pad]
    options = dict(eos_token_id=stop, steps=12, attention_mask=torch.ones(2, 31, dtype=torch.long))
    options |= {} if fill is None else {"pad_token_id": fill}
    cache = SuffixCache(fidelity="exact")
    got = ask(model, rows, cache, **options)
    same_answer(got, ask(model, rows, **options))
    tokens = got.tokens(0)
    filler = stop if fill is None else fill
    assert tokens[length - 1 :] == [stop] + [filler] * (43 - length) and 43 - length >= 5  # control: it was filled
    whole = torch.ones(1, len(tokens) + 9, dtype=torch.long)
    again = same_as_vanilla(model, tokens + new_text(9, 1), cache, attention_mask=whole, pad_token_id=0)
    assert again.report.exact_tokens == length
    kept = got.tokens(1)[31:-1]
    kept = 31 + (kept.index(filler) if filler in kept else len(kept))  # what could be a fill may be left out
    assert kept <= same_as_vanilla(model, got.tokens(1) + new_text(9, 1), cache).report.exact_tokens <= 42
    check_pool(cache)


# -- chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 16, 47, 48, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_any_size_give_the_stock_answer_on_every_hit(kind, size):
    model = make_model(kind, spy=True)
    cache = SuffixCache(fidelity="exact")
    want = ask(model, PROMPT)
    for start in (new_text(30, 1), PROMPT[:21] + new_text(5, 2), PROMPT, PROMPT):
        ask(model, start, cache, steps=1, prefill_chunk_size=size)
        model.spy.clear()
        got = ask(model, PROMPT, cache, prefill_chunk_size=size)
        same_answer(got, want)
        check_report(got.report)
        forwards = [queries for _, queries in model.spy.calls][: -5 or None]
        assert max(forwards) <= size and sum(forwards) == got.report.computed_rows
        work_is_reported(model, got, decoded_rows=5)
        cache.clear()
    check_pool(cache)


def as_tuple(span) -> tuple:
    return span.start, span.stop, span.kind, span.shift


@pytest.mark.parametrize("size", [1, 9, 33, 500])
@pytest.mark.parametrize("fidelity", ["balanced", "fast"])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_with_moved_text_run_the_rows_that_the_report_says(kind, fidelity, size):
    model = make_model(kind, spy=True)
    ids = head(1) + A + question(1) + B + question(2)
    answers = []
    for chunk in (None, size):
        cache = SuffixCache(fidelity=fidelity, repair_fraction=0.3)
        for text in (A, B):
            ask(model, head(5) + text + question(7), cache, steps=1)
        model.spy.clear()
        got = ask(model, ids, cache, steps=1, prefill_chunk_size=chunk)
        forwards = [queries for _, queries in model.spy.calls]
        work_is_reported(model, got)
        assert chunk is None or max(forwards) <= chunk
        assert [piece[1] - piece[0] for piece in moved_pieces(got.report)] == [len(A), len(B)]
        check_report(got.report)
        check_pool(cache)
        answers.append(got)
    assert max_difference(answers[0].scores, answers[1].scores) < 1e-3  # chunking alone changes nothing
    whole, chunked = (list(map(as_tuple, answer.report.spans[0])) for answer in answers)
    assert whole == chunked


def test_chunks_in_a_config_leave_it_alone_and_raise_no_warning(caplog):
    model = make_model("llama", spy=True)
    cache = warm(model, "none")
    config = GenerationConfig(max_new_tokens=5, prefill_chunk_size=8, pad_token_id=0, do_sample=False)
    before, ids = config.to_dict(), torch.tensor([PROMPT])
    want = model.generate(ids, max_new_tokens=5, do_sample=False).tolist()
    transformers.logging.set_verbosity_warning()
    transformers.logging.get_logger("transformers").addHandler(caplog.handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for args, kwargs in (((ids,), {"generation_config": config}), ((ids, config), {})):
                model.spy.clear()
                assert model.generate(*args, cache=cache, **kwargs).tolist() == want
                assert max(queries for _, queries in model.spy.calls) <= 8
                assert config.to_dict() == before
                cache.clear()
    finally:
        transformers.logging.get_logger("transformers").removeHandler(caplog.handler)
        transformers.logging.set_verbosity_error()
    assert not caplog.records, caplog.text
    # in the model's own configuration, and switched off by the call
    model.generation_config.prefill_chunk_size = 8
    try:
        for options, largest in (({}, 8), ({"prefill_chunk_size": None}, 48)):
            model.spy.clear()
            assert model.generate(ids, cache=cache, max_new_tokens=5, do_sample=False, **options).tolist() == want
            assert max(queries for _, queries in model.spy.calls) == largest
            cache.clear()
    finally:
        model.generation_config.prefill_chunk_size = None


@pytest.mark.parametrize("size", [0, -1, "many"])
def test_a_chunk_size_that_is_none_raises_as_in_stock(size):
    model, cache = make_model("llama"), SuffixCache()
    errors = []
    for store in (None, cache):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            ask(model, PROMPT, store, prefill_chunk_size=size)
        errors.append(type(caught.value))
    assert errors[0] is errors[1]
    assert check_pool(cache).bytes_used == 0
    same_as_vanilla(model, PROMPT, cache)


# -- other caches ---------------------------------------------------------------------------------------------------


IMPLEMENTATIONS = ["static", "hybrid", "quantized", "offloaded", "dynamic", "offloaded_static"]


@pytest.mark.parametrize("where", ["call", "passed", "positional", "model"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_another_cache_beside_ours_is_one_clear_error(implementation, where):
    model, ids = make_model("llama"), torch.tensor([PROMPT])
    cache = warm(model, "none")
    config = GenerationConfig(max_new_tokens=3, pad_token_id=0, cache_implementation=implementation)
    before = config.to_dict()
    args, kwargs, named = (ids,), {"max_new_tokens": 3}, "this call's arguments"
    if where == "call":
        kwargs["cache_implementation"] = implementation
    elif where == "passed":
        kwargs, named = {"generation_config": config}, "`generation_config` that was passed"
    elif where == "positional":
        args, kwargs, named = (ids, config), {}, "`generation_config` that was passed"
    else:
        model.generation_config.cache_implementation, named = implementation, "`model.generation_config`"
    try:
        if implementation == "hybrid" and where != "call":
            # the hub's Gemma configurations say so, and transformers takes it for unset
            want = model.generate(*args, **kwargs)
            for _ in range(2):
                assert model.generate(*args, cache=cache, **kwargs).tolist() == want.tolist()
            assert cache.last_report.exact_tokens == len(PROMPT) - 1
        else:
            with pytest.raises(ValueError, match=f"cache_implementation='{implementation}'") as caught:
                model.generate(*args, cache=cache, **kwargs)
            assert named in str(caught.value) and "cache_implementation=None" in str(caught.value)
            # the remedy works
            remedy = {**kwargs, "cache_implementation": None}
            got = model.generate(*args, cache=cache, **remedy)
            assert got.shape == (1, len(PROMPT) + 3) and cache.last_report.reason is None
    finally:
        model.generation_config.cache_implementation = None
    assert config.to_dict() == before
    check_pool(cache)
    same_as_vanilla(model, PROMPT, cache)


def test_another_cache_under_attach_is_used_with_a_reason():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    static = dict(cache_implementation="static", disable_compile=True)
    want = ask(model, PROMPT, **static)  # leaves an attribute of transformers' own on the model
    model.baseline = fingerprint(model)
    with cache.attach(model):
        ask(model, PROMPT)
        got = ask(model, PROMPT, **static)
        assert got.ids.tolist() == want.ids.tolist()
        report = cache.last_report
        assert "static" in report.reason and report.new_tokens == len(PROMPT)
        check_report(report)
        assert ask(model, PROMPT).ids.tolist() == want.ids.tolist()
        assert cache.last_report.exact_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("where", ["call", "passed", "positional", "model"])
def test_use_cache_false_reuses_and_stores_nothing(where):
    model, ids = make_model("llama", spy=True), torch.tensor([PROMPT])
    cache = SuffixCache()
    config = GenerationConfig(max_new_tokens=3, pad_token_id=0, use_cache=False)
    args, kwargs, before = (ids,), {"max_new_tokens": 3}, config.to_dict()
    if where == "call":
        kwargs["use_cache"] = False
    elif where == "passed":
        kwargs = {"generation_config": config}
    elif where == "positional":
        args, kwargs = (ids, config), {}
    else:
        model.generation_config.use_cache = False
    try:
        want = model.generate(*args, **kwargs)
        for _ in range(2):
            model.spy.clear()
            assert model.generate(*args, cache=cache, **kwargs).tolist() == want.tolist()
            assert model.spy.calls == [(1, 48), (1, 49), (1, 50)]  # control: nothing was kept between steps either
            report = cache.last_report
            assert report.new_tokens == len(PROMPT) and "use_cache=False" in report.reason
        assert cache.stats.segments == 0 and check_pool(cache).bytes_used == 0
        # the call wins over the configuration
        if where == "model":
            for _ in range(2):
                model.generate(ids, cache=cache, max_new_tokens=3, use_cache=True)
            assert cache.last_report.exact_tokens == len(PROMPT) - 1
    finally:
        model.generation_config.use_cache = True
    assert config.to_dict() == before


def test_every_option_may_come_from_a_config_that_stays_as_it_is():
    model, ids = make_model("llama"), torch.tensor([REPEATED])
    configs = [
        GenerationConfig(max_new_tokens=6, num_beams=3, num_return_sequences=2, pad_token_id=0),
        GenerationConfig(max_new_tokens=6, prompt_lookup_num_tokens=3, pad_token_id=0, do_sample=False),
        GenerationConfig(max_length=len(REPEATED) + 4, eos_token_id=[7, 9], pad_token_id=0, prefill_chunk_size=5),
    ]
    cache = warm(model, "partial")
    for config in configs:
        before = config.to_dict()
        for _ in range(2):
            got = model.generate(ids, generation_config=config, cache=cache)
            assert got.tolist() == model.generate(ids, generation_config=config).tolist()
            assert config.to_dict() == before
            check_report(cache.last_report)
        assert cache.last_report.exact_tokens == len(REPEATED) - 1
    check_pool(cache)


# -- half precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_half_precision_repeats_exactly_and_moves_within_its_noise(kind, dtype):
    model = make_model(kind).to(dtype)
    cache = SuffixCache(fidelity="exact")
    first = ask(model, PROMPT, cache, steps=8)
    stock = ask(model, PROMPT, steps=8)
    assert first.ids.tolist() == stock.ids.tolist() and max_difference(first.scores, stock.scores) == 0.0
    noise = 16 * torch.finfo(dtype).eps * stock.scores[0].abs().max().item()
    # the same rows, the last one run alone: as two chunks of stock would
    for _ in range(3):
        again = ask(model, PROMPT, cache, steps=8)
        assert again.report.exact_tokens == len(PROMPT) - 1 and again.report.reason is None
        assert max_difference(again.scores[:1], first.scores[:1]) <= noise
    other = ask(model, PROMPT[:30] + new_text(20, 1), cache, steps=1)
    assert other.report.exact_tokens == 30
    plain = ask(model, PROMPT[:30] + new_text(20, 1), steps=1)
    assert max_difference(other.scores, plain.scores) <= noise
    assert max_difference(other.scores, first.scores[:1]) > 4 * noise  # control: another prompt is another answer
    check_pool(cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_half_precision_gives_the_same_ids_where_the_chunks_are_the_same(kind, dtype):
    """The first run in the chunks that a hit makes: then every row is computed alike, bit for bit."""
    model = make_model(kind).to(dtype)
    cache = SuffixCache(fidelity="exact")
    answers = []
    for _ in range(3):
        ask(model, PROMPT[:40], cache, steps=1)
        answers.append(ask(model, PROMPT, cache.using(fidelity="exact"), steps=8))
        assert answers[-1].report.exact_tokens == (40 if len(answers) == 1 else answers[-1].report.exact_tokens)
        cache.clear()
    for answer in answers[1:]:
        assert answer.ids.tolist() == answers[0].ids.tolist()
        assert max_difference(answer.scores, answers[0].scores) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_half_precision_rows_of_layer_0_are_fresh_after_a_move(kind, dtype):
    model = make_model(kind).to(dtype)
    cache = SuffixCache()
    for text in (A, C):
        ask(model, head(5) + text + question(7), cache, steps=1)
    ids = head(1) + C + question(1) + A + question(2, 60)
    answer, rows = served_rows(model, ids, cache, steps=1)
    check_report(answer.report)
    assert answer.report.shifted_tokens > 0 and answer.report.prompt_tokens == len(ids)
    assert {tensor.dtype for pair in rows for tensor in pair} == {dtype}
    (keys, values), (want_keys, want_values) = rows[0], fresh_rows(model, ids)[0]
    # a stored key is rounded once, a turned one twice
    limit = 4 * torch.finfo(dtype).eps * want_keys.float().abs().max().item()
    assert (keys.float() - want_keys.float()).abs().max() <= limit
    assert torch.equal(values, want_values)
    unturned = fresh_rows(model, head(5) + C)[0][0][:, -len(C) :].float()
    there = want_keys[:, len(head(1)) : len(head(1)) + len(C)].float()
    assert (unturned - there).abs().max() <= limit  # heads are equally long: C has not moved
    there = want_keys[:, -60 - len(A) : -60].float()
    unturned = fresh_rows(model, head(5) + A)[0][0][:, -len(A) :].float()
    assert (unturned - there).abs().max() > 10 * limit  # control: A has, and without a turn it is far off


# -- calls in calls, and side by side ---------------------------------------------------------------------------------


class Nested(Recorder):
    """A processor, or a stopping criterion, that asks the same model through the same cache at every step."""

    def __init__(self, model, cache, options):
        super().__init__()
        self.model, self.cache, self.options = model, cache, options
        self.answers, self.hooks = [], []

    def __call__(self, input_ids, scores):
        self.hooks.append((len(self.model._forward_pre_hooks), len(self.model._forward_hooks)))
        self.answers.append(ask(self.model, REPEATED, self.cache, steps=4, **self.options))
        return super().__call__(input_ids, scores)


class NestedCriterion(StoppingCriteria):
    def __init__(self, nested: Nested):
        self.nested = nested

    def __call__(self, input_ids, scores, **kwargs):
        self.nested(input_ids, torch.zeros(input_ids.shape[0], 256))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


INNER = [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"do_sample": True, "num_return_sequences": 2}]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("where", ["processor", "criterion"])
def test_call_inside_a_call_disturbs_neither_and_shares_one_pair_of_hooks(where, inner):
    model = make_model("llama")
    cache = SuffixCache(fidelity="exact")
    want, want_inner = ask(model, PROMPT), ask(model, REPEATED, steps=4, seed=3, **inner)
    for number in range(3):
        nested = Nested(model, cache, {"seed": 3, **inner})
        options = (
            {"processors": [nested]} if where == "processor" else {"stopping_criteria": [NestedCriterion(nested)]}
        )
        got = ask(model, PROMPT, cache, **options)
        same_answer(got, want)
        for answer in nested.answers:
            same_answer(answer, want_inner)
            check_report(answer.report)
        assert len(nested.answers) == 6 and set(nested.hooks) == {(1, 1)}
        assert got.report.exact_tokens == (len(PROMPT) - 1 if number else 0)
        assert nested.answers[-1].report.exact_tokens == len(REPEATED) - 1
    assert not model._forward_pre_hooks and not model._forward_hooks
    check_pool(cache)


def test_failing_inner_call_that_is_caught_leaves_the_outer_one_right():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")

    class Failing(Recorder):
        def __call__(self, input_ids, scores):
            with pytest.raises(ZeroDivisionError):
                ask(model, REPEATED, cache, processors=[lambda ids, logits: 1 / 0])
            assert len(model._forward_pre_hooks) == 1  # the outer call's
            return super().__call__(input_ids, scores)

    want = ask(model, PROMPT)
    for _ in range(3):
        same_answer(ask(model, PROMPT, cache, processors=[Failing()]), want)
    assert not model._forward_pre_hooks
    assert same_as_vanilla(model, REPEATED, cache).report.exact_tokens == 20  # the outer calls' only
    check_pool(cache)


THREAD_MODES = [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 9}, {"use_cache": False}]


def test_threads_in_different_modes_on_one_model_and_one_cache_answer_right():
    model, other = make_model("llama"), make_model("qwen2", seed=4)
    cache = SuffixCache(fidelity="exact")
    prompts = [REPEATED[: 20 + 8 * number] + new_text(3, number) for number in range(4)]
    want = {
        (number, mode): ask(model, prompts[number], **THREAD_MODES[mode]).ids.tolist()
        for number in range(4)
        for mode in range(len(THREAD_MODES))
    }
    want_other = ask(other, REPEATED).ids.tolist()
    barrier = threading.Barrier(len(THREAD_MODES) + 1)

    def job(mode):
        barrier.wait(timeout=60)
        for number in (0, 1, 2, 3, 2, 1):
            got = ask(model, prompts[number], cache, **THREAD_MODES[mode])
            assert got.ids.tolist() == want[number, mode]
            check_report(got.report)
            assert got.report.prompt_tokens == len(prompts[number])  # this thread's own report

    def another():
        barrier.wait(timeout=60)
        for _ in range(4):
            assert ask(other, REPEATED, cache).ids.tolist() == want_other

    in_threads([lambda mode=mode: job(mode) for mode in range(len(THREAD_MODES))] + [another])
    assert not model._forward_pre_hooks and not other._forward_hooks
    assert cache.stats.requests == 6 * len(THREAD_MODES) + 4
    assert same_as_vanilla(model, prompts[3], cache).report.exact_tokens == len(prompts[3]) - 1
    check_pool(cache)


def test_threads_some_of_which_fail_leave_no_hook_and_the_rest_right():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    want = ask(model, PROMPT).ids.tolist()
    failed = []

    def good():
        for _ in range(6):
            assert ask(model, PROMPT, cache).ids.tolist() == want

    def bad():
        for _ in range(6):
            try:
                ask(model, REPEATED, cache, processors=[lambda ids, scores: 1 / 0])
            except ZeroDivisionError:
                failed.append(1)

    in_threads([good, bad, good, bad])
    assert len(failed) == 12
    assert not model._forward_pre_hooks and not model._forward_hooks
    assert same_as_vanilla(model, REPEATED, cache).report.exact_tokens == 20
    forgets_everything(cache)


def test_inference_mode_in_one_thread_and_gradients_in_another():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    want = ask(model, PROMPT).ids.tolist()
    ids = torch.tensor([PROMPT[:30] + new_text(9, 2)])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[:, -1:]

    def inference():
        with torch.inference_mode():
            for number in range(5):
                assert ask(model, PROMPT, cache).ids.tolist() == want
                ask(model, PROMPT + new_text(5, number), cache)

    def gradients():
        with torch.enable_grad(), cache.attach(model):
            for number in range(5):
                assert ask(model, PROMPT, cache).ids.tolist() == want
                got = model(ids, logits_to_keep=1).logits
                assert (got - logits).abs().max() < 1e-4
                ask(model, PROMPT + new_text(5, 50 + number), cache)

    inference()  # the first slab comes from inference mode
    in_threads([inference, gradients, inference])
    gradients()
    inference()
    report = same_as_vanilla(model, PROMPT, cache).report
    assert report.exact_tokens == len(PROMPT) - 1
    for pool in cache._store.pools.values():
        for slab in pool.slabs.values():
            for tensor in (*slab.keys.values(), *slab.values.values()):
                assert not tensor.requires_grad and tensor.grad_fn is None
    gc.collect()
    check_pool(cache)


class Stop(BaseException):
    """What is no Exception: KeyboardInterrupt's and GeneratorExit's like."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, SystemExit, Stop])
@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}, {"prefill_chunk_size": 7}])
def test_anything_raised_in_any_mode_leaves_no_hook_and_no_row(error, options):
    model = make_model("llama")
    cache = warm(model, "partial")
    before = check_pool(cache)

    class Raise(Recorder):
        def __call__(self, input_ids, scores):
            super().__call__(input_ids, scores)
            if len(self.ids) == 3:
                raise error
            return scores

    for _ in range(3):
        with pytest.raises(error):
            ask(model, REPEATED, cache, processors=[Raise()], **options)
        assert not model._forward_pre_hooks and not model._forward_hooks
        assert check_pool(cache) == before
    assert same_as_vanilla(model, REPEATED, cache).report.exact_tokens == 37
    forgets_everything(cache)


class Pieces(BaseStreamer):
    def __init__(self, fail_at: int | None = None):
        self.pieces, self.ended, self.fail_at = [], 0, fail_at

    def put(self, value):
        self.pieces.append(value.tolist())
        if len(self.pieces) == self.fail_at:
            raise GeneratorExit

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 7}])
def test_streamers_see_the_same_pieces_and_may_break_off(options):
    model = make_model("llama")
    cache, mine, theirs = warm(model, "partial"), Pieces(), Pieces()
    ask(model, REPEATED, streamer=theirs, **options)
    with pytest.raises(GeneratorExit):
        ask(model, REPEATED, cache, streamer=Pieces(fail_at=3), **options)
    assert not model._forward_pre_hooks
    got = ask(model, REPEATED, cache, streamer=mine, **options)
    assert got.report.exact_tokens == 37  # nothing of the one that broke off
    assert mine.pieces == theirs.pieces and mine.ended == 1
    check_pool(cache)


def test_several_models_share_a_cache_without_meeting():
    kinds = ["llama", "qwen2", "gemma3_text", "gpt2"]
    made = [make_model(kind) for kind in kinds] + [make_model("llama", seed=7), make_model("llama").to(torch.bfloat16)]
    cache = SuffixCache(fidelity="exact")
    for turn in range(3):
        for model in made:
            tolerance = 1e-4 if model.dtype is torch.float32 else 0.5
            got = ask(model, PROMPT, cache, steps=3)
            assert max_difference(got.scores[:1], ask(model, PROMPT, steps=3).scores[:1]) < tolerance
            expected = len(PROMPT) - 1 if turn and cache.capability(model).kind != "none" else 0
            assert got.report.exact_tokens == expected
    assert all(not model._forward_pre_hooks for model in made)
    gone = made.pop(0)
    forget(gone)
    del gone, model
    gc.collect()
    check_pool(cache)
    same_as_vanilla(made[0], PROMPT, cache)


def test_processors_of_the_caller_may_hold_the_cache():
    """Assisted decoding deep-copies what it hands to its assistant; a SuffixCache can't be copied."""
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    nested = Nested(model, cache, {})
    want = ask(model, PROMPT, steps=8)
    for way in ("lookup", "assistant", "early_exit"):
        options = drafting("llama", way)
        output = model.generate(
            torch.tensor([PROMPT]),
            cache=cache,
            max_new_tokens=8,
            do_sample=False,
            logits_processor=LogitsProcessorList([nested]),
            **options,
        )
        assert output.tolist() == want.ids.tolist()
    check_pool(cache)
