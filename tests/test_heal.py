"""heal_rows: approximate rows are recomputed along with decoded tokens, and end exact from left to right."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache, StoppingCriteria

from hf_suffix_cache import SuffixCache, SuffixCacheConfig
from hf_suffix_cache.healing import Healer
from hf_suffix_cache.view import ViewLayer
from reference import (
    ask,
    cache_name,
    check_pool,
    check_report,
    fresh_rows,
    in_threads,
    max_difference,
    same_answer,
    same_as_vanilla,
    served,
    served_rows,
    stored,
    view_of,
    view_rows,
)
from tiny_models import A, B, C, fingerprint, head, make_model, question

KINDS = ("llama", "gemma3_text", "gpt_neox")
SOURCE = head(0) + A + B + C + question(0)
PROMPT = head(1) + C + A + B + question(1)
MORE = question(2)
FIRST = 16  # the head, and the four seam rows behind it: exact when the prompt is done
LONG = 60  # steps after which three rows a step have caught up with the newest token


def healing(model, num_rows: int, order: str = "left", **options):
    """A handle on a new store that holds SOURCE. No row but the seams' is repaired."""
    return stored(model, SOURCE, repair_fraction=0.0).using(heal_rows=num_rows, heal_order=order, **options)


def rows_of(model, ids, handle, **options):
    """Copies of the rows of a request that is not stored; the view that they are from is let go."""
    _, rows = served_rows(model, ids, handle.using(store=False), **options)
    return [(keys.clone(), values.clone()) for keys, values in rows]


def equal(left, right) -> bool:
    """Whether two lists of rows are the same to the bit."""
    return all(torch.equal(a, b) for pair in zip(left, right, strict=True) for a, b in zip(*pair, strict=True))


# -- settings -------------------------------------------------------------------------------------------------------


def test_nothing_is_healed_by_default():
    assert (SuffixCacheConfig().heal_rows, SuffixCacheConfig().heal_order) == (0, "left")
    model = make_model("llama", spy=True)
    cache = stored(model, SOURCE)
    model.spy.clear()
    assert ask(model, PROMPT, cache).report.healed_rows == 0
    assert model.spy.calls[-5:] == [(1, 1)] * 5


@pytest.mark.parametrize("fields", [{"heal_rows": -1}, {"heal_rows": 5000}, {"heal_order": "right"}])
def test_wrong_settings_are_named_with_their_legal_values(fields):
    name = next(iter(fields))
    with pytest.raises(ValueError, match=name):
        SuffixCache(**fields)
    with pytest.raises(ValueError, match=name):
        SuffixCache().using(**fields)


# -- the forward that heals -----------------------------------------------------------------------------------------


def _row_by_row(model, prompt_rows, tokens, columns_of_step, prompt_length) -> list[torch.Tensor]:
    """
    The oracle: before each decoded token the healed rows are run one by one, from left to right, each on what lies to
    its left, by transformers alone; then the token on all of it. Logits of each step.
    """
    rows = [[keys.clone(), values.clone()] for keys, values in prompt_rows]

    def run(token: int, position: int) -> torch.Tensor:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(rows):
            cache.update(keys[None, :, :position].clone(), values[None, :, :position].clone(), layer)
        with torch.no_grad():
            output = model(
                torch.tensor([[token]]),
                attention_mask=torch.ones(1, position + 1, dtype=torch.long),
                position_ids=torch.tensor([[position]]),
                use_cache=True,
                **{cache_name(model): cache},
            )
        for layer, pair in zip(cache.layers, rows, strict=True):
            for slot, new in enumerate((layer.keys, layer.values)):
                before, after = pair[slot][:, :position], pair[slot][:, position + 1 :]
                pair[slot] = torch.cat([before, new[0, :, -1:], after], dim=1)
        return output.logits[:, -1]

    found = []
    for step, columns in enumerate(columns_of_step):
        for column in columns:
            run(tokens[column], column)
        found.append(run(tokens[prompt_length + step], prompt_length + step))
    return found


@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize(
    "kind, attention", [("llama", "sdpa"), ("llama", "eager"), ("gemma3_text", "sdpa"), ("gpt_neox", "sdpa")]
)
def test_each_step_gives_the_logits_of_rows_that_were_recomputed_before_it(kind, attention, num_rows):
    model = make_model(kind, attention=attention)
    steps = 9
    rows = rows_of(model, PROMPT, healing(model, 0), steps=1)
    got = ask(model, PROMPT, healing(model, num_rows), steps=steps)
    columns = [range(FIRST + step * num_rows, FIRST + (step + 1) * num_rows) for step in range(steps - 1)]
    want = _row_by_row(model, rows, got.tokens(), columns, len(PROMPT))
    assert max_difference(got.scores[1:], want) < 1e-4
    unhealed = _row_by_row(model, rows, got.tokens(), [()] * (steps - 1), len(PROMPT))
    assert max_difference(got.scores[1:], unhealed) > 1e-3  # control


@pytest.mark.parametrize("kind", KINDS)
def test_rows_healed_from_the_left_are_those_of_a_full_prefill(kind):
    model = make_model(kind)
    answer, rows = served_rows(model, PROMPT, healing(model, 8), steps=9)
    fresh = fresh_rows(model, answer.tokens()[:-1])
    healed = FIRST + 8 * 8
    worst = 0.0
    for (keys, values), (want_keys, want_values) in zip(rows, fresh, strict=True):
        assert (keys - want_keys)[:, :healed].abs().max() < 1e-4
        assert (values - want_values)[:, :healed].abs().max() < 1e-4
        worst = max(worst, (values - want_values)[:, healed:].abs().max().item())
    assert worst > 1e-2  # control: those behind are not


@pytest.mark.parametrize("order", ["left", "attention"])
def test_healed_rows_are_counted_and_computed_rows_are_not_changed(order):
    model = make_model("llama", spy=True)
    plain = ask(model, PROMPT, healing(model, 0), steps=20)
    handle = healing(model, 3, order)
    model.spy.clear()
    answer = ask(model, PROMPT, handle, steps=20)
    check_report(answer.report)
    assert answer.report.computed_rows == plain.report.computed_rows
    read = 1 if order == "attention" else 0  # attention has to be read first
    assert answer.report.healed_rows == handle.stats.healed_rows == 3 * (19 - read)
    assert model.spy.rows() == answer.report.computed_rows + 19 + answer.report.healed_rows
    assert f"healed {answer.report.healed_rows} rows" in str(answer.report)
    assert max_difference(answer.scores[:1], plain.scores[:1]) == 0  # the first token is out before


def test_healing_ends_when_everything_is_exact():
    model = make_model("llama", spy=True)
    handle = healing(model, 32)
    model.spy.clear()
    answer = ask(model, PROMPT, handle, steps=30)
    assert model.spy.calls[-20:] == [(1, 1)] * 20
    # from the first approximate row to the last one that was computed behind one
    assert len(PROMPT) - FIRST <= answer.report.healed_rows <= len(PROMPT) - FIRST + 8


def test_conversations_that_are_exact_run_no_more_rows():
    model = make_model("llama", spy=True)
    cache = SuffixCache(heal_rows=8)
    chat = SOURCE
    for turn in range(3):
        model.spy.clear()
        answer = same_as_vanilla(model, chat, cache, steps=5)
        assert model.spy.calls[1:5] == [(1, 1)] * 4 or turn == 0
        assert answer.report.healed_rows == 0 and answer.report.reason is None
        chat = answer.tokens() + question(7 + turn)


class Alter(StoppingCriteria):
    """After a step, changes the cached rows of some columns, as another token there would have."""

    def __init__(self, model, step: int, columns):
        self.step, self.columns, self.count, self.view = step, columns, 0, None
        self.hook = model.register_forward_pre_hook(self._take, with_kwargs=True)

    def _take(self, model, args, kwargs):
        self.view = kwargs.get(cache_name(model), self.view)

    def __call__(self, ids, scores, **kwargs):
        self.count += 1
        if self.count == self.step and self.columns is not None:
            for layer in self.view.layers:
                layer.keys[:, :, self.columns] += 1.0
                layer.values[:, :, self.columns] -= 1.0
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["left", "scattered"])
def test_healed_rows_do_not_see_what_stands_right_of_them(kind, order, monkeypatch):
    """Leak test: rows that are altered right of all that is healed leave it bit-equal, and rows left of it don't."""
    if order == "scattered":
        monkeypatch.setattr(Healer, "_choose", lambda healer: np.array([20, 33, 41]) + healer._new - len(PROMPT))
    found = []
    for columns in (None, slice(80, 120), slice(8, 12)):
        model = make_model(kind)
        alter = Alter(model, 2, columns)
        answer, rows = served_rows(model, PROMPT, healing(model, 3), steps=8, stopping_criteria=[alter])
        alter.hook.remove()
        assert answer.report.healed_rows == 3 * 7
        found.append([(keys[:, 12:80], values[:, 12:80]) for keys, values in rows])
    plain, behind, before = found
    assert equal(plain, behind)
    assert not equal(plain, before)  # control


# -- what is stored -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [3, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_next_turn_is_exact_once_the_rows_have_caught_up(kind, num_rows):
    model = make_model(kind)
    handle = healing(model, num_rows)
    answer = ask(model, PROMPT, handle, steps=100)
    check_pool(handle)
    for turn in range(2):
        chat = answer.tokens() + question(2 + turn)
        known = len(answer.tokens()) - 1
        answer = same_as_vanilla(model, chat, handle)
        assert answer.report.exact_tokens == known
        assert answer.report.carried_tokens == answer.report.shifted_tokens == answer.report.healed_rows == 0
    check_pool(handle)
    assert handle.settle(model).rows == 0


@pytest.mark.parametrize("kind", KINDS)
def test_control_without_healing_the_next_turn_is_not_exact(kind):
    model = make_model(kind)
    cache = stored(model, SOURCE)
    answer = ask(model, PROMPT, cache, steps=100)
    got = ask(model, answer.tokens() + MORE, cache)
    assert got.report.carried_tokens > 100
    assert max_difference(got.scores[:1], ask(model, answer.tokens() + MORE).scores[:1]) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_is_too_short_leaves_the_front_exact(kind):
    model = make_model(kind)
    handle = healing(model, 5)
    answer = ask(model, PROMPT, handle, steps=9)
    chat = answer.tokens() + MORE
    report = same_as_vanilla(model, chat, handle.using(fidelity="exact", store=False)).report
    assert report.exact_tokens == FIRST + 8 * 5
    again = ask(model, chat, handle, steps=9)
    assert again.report.exact_tokens == FIRST + 8 * 5 and again.report.carried_tokens > 50
    report = same_as_vanilla(model, again.tokens() + MORE, handle.using(fidelity="exact")).report
    assert report.exact_tokens == FIRST + 16 * 5  # it went on where the turn before had ended
    check_pool(handle)


def test_one_row_a_step_never_catches_up_but_the_front_is_exact():
    model = make_model("llama")
    handle = healing(model, 1)
    answer = ask(model, PROMPT, handle, steps=30)
    report = same_as_vanilla(model, answer.tokens() + MORE, handle.using(fidelity="exact")).report
    assert report.exact_tokens == FIRST + 29


@pytest.mark.parametrize("steps", [2, 5, 9, 20])
def test_rows_healed_out_of_order_are_never_called_exact(steps):
    model = make_model("llama")
    handle = healing(model, 4, "attention")
    answer = ask(model, PROMPT, handle, steps=steps)
    assert answer.report.healed_rows == 4 * (steps - 2)
    report = same_as_vanilla(model, answer.tokens() + MORE, handle.using(fidelity="exact")).report
    assert FIRST <= report.exact_tokens < FIRST + 4 * (steps - 2) + 1
    check_pool(handle)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_order_ends_exact_too(kind):
    model = make_model(kind)
    handle = healing(model, 16, "attention")
    answer = ask(model, PROMPT, handle, steps=60)
    chat = answer.tokens() + MORE
    report = same_as_vanilla(model, chat, handle).report
    assert report.exact_tokens == len(answer.tokens()) - 1
    check_pool(handle)


def test_attention_order_heals_the_rows_that_are_attended_to_most():
    """The approximate prompt row that the first decoded token attends to most is recomputed at the second."""
    model = make_model("llama", attention="eager")
    plain, rows = served_rows(model, PROMPT, healing(model, 0), steps=3)
    kinds = [span for spans in plain.report.spans for span in spans]
    shifted = np.concatenate([np.full(len(span), span.kind == "shifted") for span in kinds])
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(rows):
        cache.update(keys[None, :, : len(PROMPT)].clone(), values[None, :, : len(PROMPT)].clone(), layer)
    with torch.no_grad():
        token = torch.tensor([[plain.tokens()[len(PROMPT)]]])
        output = model(token, output_attentions=True, use_cache=True, **{cache_name(model): cache})
    seen = torch.stack(output.attentions[1:]).mean(dim=(0, 1, 2, 3))[: len(PROMPT)].numpy()
    best = np.argsort(-np.where(shifted, seen, -1.0))[:3]
    _, healed = served_rows(model, PROMPT, healing(model, 3, "attention"), steps=3)
    changed = (healed[2][1][:, : len(PROMPT)] - rows[2][1][:, : len(PROMPT)]).abs().amax(dim=(0, 2)) > 0
    assert set(np.flatnonzero(changed.numpy())) == set(best.tolist())


def test_a_carried_conversation_is_healed_without_touching_what_is_stored():
    model = make_model("llama")
    cache = healing(model, 0)
    chat = ask(model, PROMPT, cache).tokens() + MORE
    before = rows_of(model, chat, cache, steps=1)
    seen = []

    class Look(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            seen.append(rows_of(model, chat, cache, steps=1))
            return torch.zeros(len(ids), dtype=torch.bool)

    healed = ask(model, chat, cache.using(heal_rows=8), steps=6, stopping_criteria=[Look()])
    assert healed.report.carried_tokens > 50 and healed.report.healed_rows == 40
    assert all(equal(rows, before) for rows in seen)
    exact = cache.using(fidelity="exact")
    assert same_as_vanilla(model, healed.tokens() + question(4), exact).report.exact_tokens == FIRST + 40
    check_pool(cache)


class Fail(StoppingCriteria):
    def __init__(self, step: int):
        self.left = step

    def __call__(self, ids, scores, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("stop here")
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("order", ["left", "attention"])
@pytest.mark.parametrize("where", ["between forwards", "in a forward"])
def test_an_exception_leaves_the_store_as_it_was(where, order, monkeypatch):
    model = make_model("llama")
    cache = healing(model, 0)
    chat = ask(model, PROMPT, cache).tokens() + MORE
    rows = rows_of(model, chat, cache, steps=1)
    before = check_pool(cache)
    update, calls = ViewLayer.update, []

    def failing(layer, *args, **kwargs):
        if layer is layer._view().layers[1]:
            calls.append(1)
            if len(calls) == 5:
                raise RuntimeError("stop here")
        return update(layer, *args, **kwargs)

    for _ in range(3):
        calls.clear()
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stop here"):
            criteria = [Fail(4)]
            if where == "in a forward":
                patch.setattr(ViewLayer, "update", failing)
                criteria = []
            ask(model, chat, cache.using(heal_rows=8, heal_order=order), steps=12, stopping_criteria=criteria)
        assert check_pool(cache) == before
    assert equal(rows_of(model, chat, cache, steps=1), rows)
    same_as_vanilla(model, chat, cache.using(fidelity="exact"))


@pytest.mark.parametrize("num_rows", [0, 4])
def test_a_forward_whose_failure_the_caller_survives_stores_nothing(num_rows, monkeypatch):
    """A decoding loop of the caller's catches what the model raised, and returns what there is."""
    model = make_model("llama")
    handle = healing(model, num_rows)
    update, calls = ViewLayer.update, []

    def failing(layer, *args, **kwargs):
        calls.append(layer is layer._view().layers[1])
        if sum(calls) == 6 and calls[-1]:  # the probe and the last pass of the prompt are two of them
            raise RuntimeError("stop here")
        return update(layer, *args, **kwargs)

    def surviving(model, input_ids, **options):
        try:
            return model._sample(input_ids, **options)
        except RuntimeError:
            return input_ids

    before = check_pool(handle)
    with monkeypatch.context() as patch:
        patch.setattr(ViewLayer, "update", failing)
        ask(model, PROMPT, handle, steps=12, custom_generate=surviving)
    assert sum(calls) == 6
    assert check_pool(handle) == before
    tokens = ask(model, PROMPT, steps=12).tokens()
    same_as_vanilla(model, tokens + MORE, handle.using(fidelity="exact"))


def test_a_model_that_changes_during_the_call_is_not_healed_further():
    """Rows that another model computes must not stand left of what is stored."""
    model = make_model("llama")

    class Change(StoppingCriteria):
        def __init__(self):
            self.count = 0

        def __call__(self, ids, scores, **kwargs):
            self.count += 1
            for layer in model.model.layers:
                layer.self_attn.scaling = 0.05 if 4 <= self.count < 8 else 0.25
            return torch.zeros(len(ids), dtype=torch.bool)

    handle = healing(model, 8)
    answer = ask(model, PROMPT, handle, steps=12, stopping_criteria=[Change()])
    assert answer.report.healed_rows == 8 * 3
    report = same_as_vanilla(model, answer.tokens() + MORE, handle.using(fidelity="exact")).report
    assert report.exact_tokens == FIRST + 8 * 3


def test_a_stop_token_ends_what_is_stored():
    model = make_model("llama")
    tokens = ask(model, PROMPT, healing(model, 16), steps=40).tokens()
    for stop in (tokens[len(PROMPT) + 4], tokens[len(PROMPT) + 30]):
        handle = healing(model, 16)
        answer = ask(model, PROMPT, handle, steps=40, eos_token_id=stop, pad_token_id=0)
        length = len(answer.tokens())
        assert len(PROMPT) < length < len(tokens) and answer.tokens()[-1] == stop
        assert answer.report.generated_tokens == length - len(PROMPT)
        report = same_as_vanilla(model, answer.tokens() + MORE, handle.using(fidelity="exact")).report
        assert report.exact_tokens == min(length - 1, FIRST + 16 * (length - len(PROMPT) - 1))
        check_pool(handle)


def test_what_is_not_stored_is_healed_and_forgotten():
    model = make_model("llama")
    handle = healing(model, 8, store=False)
    before = check_pool(handle)
    assert ask(model, PROMPT, handle, steps=9).report.healed_rows == 64
    assert check_pool(handle) == before


def test_views_that_are_handed_out_hold_the_healed_rows():
    model = make_model("llama")
    handle = healing(model, 16)
    answer = ask(model, PROMPT, handle, steps=40, return_dict_in_generate=True)
    rows = view_rows(view_of(answer.output))
    for pair, fresh in zip(rows, fresh_rows(model, answer.tokens()[:-1]), strict=True):
        assert all((got - want).abs().max() < 1e-4 for got, want in zip(pair, fresh, strict=True))
    assert same_as_vanilla(model, answer.tokens() + MORE, handle).report.exact_tokens == len(answer.tokens()) - 1


def test_settling_goes_on_from_what_was_healed():
    model = make_model("llama")
    handle = healing(model, 8)
    answer = ask(model, PROMPT, handle, steps=9)
    done = handle.settle(model)
    assert done.rows == len(answer.tokens()) - 1 - (FIRST + 64)
    assert same_as_vanilla(model, answer.tokens() + MORE, handle).report.exact_tokens == done.tokens


# -- beside other options -------------------------------------------------------------------------------------------


def test_sampling_draws_as_often_as_without():
    model = make_model("llama")
    states = []
    for num_rows in (0, 8):
        answer = ask(model, PROMPT, healing(model, num_rows), steps=20, seed=3, do_sample=True)
        states.append(torch.random.get_rng_state())
        assert len(answer.tokens()) == len(PROMPT) + 20
    assert torch.equal(*states)


def test_a_padded_prompt_is_healed():
    model = make_model("llama")
    ids = torch.tensor([[0] * 7 + PROMPT])
    mask = (torch.arange(ids.shape[1]) >= 7).long()[None]
    handle = healing(model, 8)
    answer = ask(model, ids, handle, steps=60, attention_mask=mask, pad_token_id=0)
    assert answer.report.healed_rows > 100
    chat = answer.tokens()[7:] + MORE
    report = same_as_vanilla(model, chat, handle).report
    assert report.exact_tokens == len(answer.tokens()) - 8


def test_a_view_that_grows_while_it_heals_keeps_its_rows(monkeypatch):
    model = make_model("llama")
    want = ask(model, PROMPT, healing(model, 8), steps=LONG)
    monkeypatch.setattr("hf_suffix_cache.request.MAX_GENERATION_ROWS", 2)
    monkeypatch.setattr("hf_suffix_cache.view.GROWTH_ROWS", 1)
    handle = healing(model, 8)
    got = ask(model, PROMPT, handle, steps=LONG)
    same_answer(got, want, tolerance=1e-6)
    check_pool(handle)
    same_as_vanilla(model, got.tokens() + MORE, handle)


def test_a_chunk_bounds_the_rows_of_a_step():
    model = make_model("llama", spy=True)
    handle = healing(model, 16)
    model.spy.clear()
    answer = ask(model, PROMPT, handle, steps=6, prefill_chunk_size=8)
    assert max(queries for _, queries in model.spy.calls) == 8
    assert answer.report.healed_rows == 5 * 7
    same_as_vanilla(model, answer.tokens() + MORE, handle.using(fidelity="exact"))


NOT_HEALED = {
    "batch": ({}, "batches"),
    "beams": ({"num_beams": 2}, "beams"),
    "samples": ({"num_return_sequences": 2, "do_sample": True, "seed": 1}, "batches"),
    "chunk": ({"prefill_chunk_size": 1}, "prefill_chunk_size"),
    "length": ({}, "depend on the length"),
    "compiled": ({}, "compiled"),
}


@pytest.mark.parametrize("what", NOT_HEALED)
def test_calls_that_are_not_healed_say_why_and_answer_as_without(what):
    options, reason = NOT_HEALED[what]
    model = make_model("phi3" if what == "length" else "llama")
    if what == "compiled":
        model.compile(backend="eager")
        model.baseline = fingerprint(model)
    prompt = [PROMPT, head(2) + PROMPT[12:]] if what == "batch" else PROMPT
    handle = healing(model, 4)
    with torch.compiler.set_stance("force_eager"):
        want = ask(model, prompt, healing(model, 0), **options)
        got = ask(model, prompt, handle, **options)
    assert served(got.report) > 100 and got.report.healed_rows == 0
    assert "without healing" in got.report.reason and reason in got.report.reason
    same_answer(got, want, tolerance=1e-5)
    check_pool(handle)


def test_a_model_whose_attention_cannot_be_read_is_healed_from_left_to_right():
    model = make_model("bloom")
    cache = stored(model, SOURCE, repair_fraction=0.0)
    assert not cache.capability(model).reads_attention
    answer = ask(model, PROMPT, cache.using(heal_rows=8, heal_order="attention"), steps=9)
    assert answer.report.healed_rows == 64 and "attention can't be read" in answer.report.reason
    report = same_as_vanilla(model, answer.tokens() + MORE, cache.using(fidelity="exact")).report
    assert report.exact_tokens == FIRST + 64


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
def test_answers_with_drafts_are_healed_where_one_token_runs_alone(how):
    model = make_model("llama")
    handle = healing(model, 8)
    drafts = {"prompt_lookup_num_tokens": 3} if how == "prompt lookup" else {"assistant_model": make_model("llama")}
    answer = ask(model, PROMPT, handle, steps=40, **drafts)
    assert "drafts" in answer.report.reason
    assert answer.report.healed_rows > 0 or how == "assistant"  # whose drafts may all be right
    report = same_as_vanilla(model, answer.tokens() + MORE, handle.using(fidelity="exact")).report
    assert report.exact_tokens >= FIRST + answer.report.healed_rows
    check_pool(handle)


def test_models_whose_rows_are_not_moved_have_nothing_to_heal():
    model = make_model("gpt2", spy=True)
    cache = stored(model, SOURCE, heal_rows=4)
    model.spy.clear()
    report = same_as_vanilla(model, SOURCE[:40] + MORE, cache).report
    assert report.healed_rows == 0 and report.exact_tokens == 40


def test_two_threads_that_heal_one_conversation_leave_it_right():
    model = make_model("llama")
    cache = stored(model, SOURCE)
    chat = ask(model, PROMPT, cache).tokens() + MORE
    handles = [cache.using(heal_rows=rows) for rows in (3, 9)]
    for _ in range(3):
        in_threads([lambda handle=handle: ask(model, chat, handle, steps=20) for handle in handles])
        same_as_vanilla(model, chat, cache.using(fidelity="exact", store=False))
    check_pool(cache)
