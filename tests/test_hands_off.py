"""What the caller gets his hands on (a view, the model between two forwards) never changes what is stored."""

import threading

import pytest
import torch
from transformers import StoppingCriteria

from hf_suffix_cache import SuffixCache
from reference import ask, cache_name, check_pool, same_answer, same_as_vanilla, view_of
from tiny_models import make_model, new_text, old_text

PROMPT, MORE = old_text(40, 1), new_text(20, 3)
NAME = cache_name(make_model("llama"))


def wipe(view) -> None:
    for layer in view.layers:
        layer.keys.zero_()
        layer.values.zero_()


@pytest.mark.parametrize("config", [False, True], ids=["argument", "generation_config"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "deepseek_v3"])
def test_returned_view_of_a_continued_conversation_is_the_callers_alone(kind, config):
    model, cache = make_model(kind), SuffixCache(fidelity="exact")
    turn = ask(model, PROMPT, cache).tokens() + MORE
    options = {"return_dict_in_generate": True}
    if config:
        model.generation_config.return_dict_in_generate, options = True, {}
    answer = ask(model, turn, cache, **options)
    model.generation_config.return_dict_in_generate = None
    assert answer.report.exact_tokens >= len(PROMPT)
    wipe(view_of(answer.output))
    for ids in (turn, PROMPT, answer.tokens() + MORE):
        assert same_as_vanilla(model, ids, cache).report.exact_tokens > 0
    del answer
    check_pool(cache)


class At(StoppingCriteria):
    """Does something after the third token, and something else after the sixth."""

    def __init__(self, change, undo):
        self.jobs = {3: change, 6: undo}
        self.step = 0

    def __call__(self, ids, scores, **kwargs):
        self.step += 1
        self.jobs.get(self.step, lambda: None)()
        return torch.zeros(len(ids), dtype=torch.bool)


def _scaled(model):
    def scale(value):
        for layer in model.model.layers:
            layer.self_attn.scaling = value

    return lambda: scale(0.05), lambda: scale(0.25)


def _hooked(model):
    hooks = []

    def put():
        hooks.append(model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.5))

    return put, lambda: hooks.pop().remove()


@pytest.mark.parametrize("change", [_scaled, _hooked])
@pytest.mark.parametrize("undone", ["during the call", "after it"])
def test_rows_of_a_model_that_was_changed_during_a_call_are_not_stored(change, undone):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    do, undo = change(model)
    criteria = At(do, undo if undone == "during the call" else lambda: None)
    tokens = ask(model, PROMPT, cache, steps=10, stopping_criteria=[criteria]).tokens()
    if undone == "after it":
        undo()
    assert tokens != ask(model, PROMPT, steps=10).tokens()  # control: the change is felt
    report = same_as_vanilla(model, tokens + MORE, cache).report
    assert report.exact_tokens in ((len(PROMPT) + 2,) if undone == "during the call" else (0,))
    check_pool(cache)


def test_control_a_criterion_that_changes_nothing_costs_no_row():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    tokens = ask(model, PROMPT, cache, steps=10, stopping_criteria=[At(lambda: None, lambda: None)]).tokens()
    assert same_as_vanilla(model, tokens + MORE, cache).report.exact_tokens == len(tokens) - 1


LATER = {
    "mask with holes": {"attention_mask": torch.ones(1, 60, dtype=torch.long).index_fill(1, torch.arange(20), 0)},
    "other positions": {"position_ids": torch.arange(100, 120)[None]},
    "4-D mask": {"attention_mask": torch.zeros(1, 1, 20, 60)},
    "not causal": {"is_causal": False},
    "edited rows": None,
    "nothing else": {},
}


@pytest.mark.parametrize("what", LATER)
def test_what_an_attached_loop_does_later_is_never_served(what):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    with torch.no_grad(), cache.attach(model):
        view = model(torch.tensor([PROMPT]), use_cache=True)[NAME]
        if LATER[what] is None:
            wipe(view)
        model(torch.tensor([MORE]), **{NAME: view}, **(LATER[what] or {}))
        got = model(torch.tensor([PROMPT + MORE]), logits_to_keep=1).logits[:, -1]
    assert cache.last_report.exact_tokens == len(PROMPT)
    assert (got - ask(model, PROMPT + MORE).first).abs().max() < 1e-4
    del view
    check_pool(cache)


def test_threads_that_end_leave_nothing_open_under_attach():
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    used = []
    with torch.no_grad(), cache.attach(model):
        for _ in range(6):
            thread = threading.Thread(target=lambda: model(torch.tensor([PROMPT]), logits_to_keep=1))
            thread.start()
            thread.join()
            used.append(cache.stats.bytes_used)
        assert cache.reports[-1].exact_tokens == len(PROMPT) - 1
    assert len(set(used)) == 1
    check_pool(cache)


@pytest.mark.parametrize("first", [True, False])
def test_arguments_that_change_rows_are_refused(first):
    """`is_causal=False` is a plain value that goes down to the attention."""
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    want = {causal: ask(model, PROMPT, **({} if causal else {"is_causal": False})) for causal in (True, False)}
    assert (want[True].first - want[False].first).abs().max() > 1e-2  # control
    for causal in (first, not first) * 2:
        got = ask(model, PROMPT, cache, **({} if causal else {"is_causal": False}))
        same_answer(got, want[causal])
        assert (got.report.reason is None) == causal
    for harmless in ({"output_router_logits": False}, {"return_dict": True}, {"use_cache": True}):
        with torch.no_grad(), cache.attach(model):
            model(torch.tensor([PROMPT]), logits_to_keep=1, **harmless)
        assert cache.last_report.exact_tokens == len(PROMPT) - 1
