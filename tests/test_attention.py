"""The registered attention function: who gets it, what it delegates to, what the probe reads."""

import threading

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_suffix_cache.attention import NAME, Probe, attention_weights, open_pass, own_implementation
from reference import ask, same_answer, stored
from tiny_models import A, B, C, head, living_models, make_model, question

IDS = torch.tensor([head(0, 40)])
STORED = head(0) + A + B + C + question(0)
MOVED = head(1, 13) + C + A + B + question(1)


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


def flash_like(calls):
    """
    An attention that, like flash attention, knows no mask but "the queries are the last positions of the keys", and
    says so by raising where it gets any other.
    """

    def forward(module, query, key, value, attention_mask, **kwargs):
        assert attention_mask is None, "flash attention takes no 4-D mask"
        calls.append(query.shape[2])
        queries, keys = query.shape[2], key.shape[2]
        columns = torch.arange(keys)
        kwargs.pop("is_causal", None)
        mask = (columns <= columns[keys - queries :, None])[None, None]
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    return forward


@pytest.fixture
def flash_calls():
    calls = []
    AttentionInterface.register("maskless", flash_like(calls))
    AttentionMaskInterface.register("maskless", lambda *args, **kwargs: None)
    yield calls
    for model in living_models():
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_probe_reads_what_eager_attention_gives(implementation):
    model = make_model("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = model(IDS, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    probe = Probe(num_queries=8, first_layer=1)
    with open_pass(model, probe):
        logits(model)
    mean = torch.stack([weights[:, :, -8:].mean(dim=(1, 2)) for weights in want[1:]]).mean(dim=0)
    assert torch.allclose(probe.attention(), mean, atol=1e-6)
    assert not torch.allclose(probe.attention(), mean.flip(-1), atol=1e-3)  # control
    model.set_attn_implementation("sdpa")  # as it was made


def test_probe_changes_no_answer_and_leaves_the_model_as_it_was():
    model = make_model("mistral")
    want = logits(model)
    with open_pass(model, Probe(8, 0)):
        assert model.config._attn_implementation == NAME
        assert own_implementation(model) == "sdpa"
        assert torch.equal(logits(model), want)
    assert model.config._attn_implementation == "sdpa"


def test_other_threads_get_the_models_own_attention_and_mask(flash_calls):
    model = make_model("llama")
    model.set_attn_implementation("maskless")
    want, seen = logits(model), {}
    flash_calls.clear()

    def other():
        seen["logits"], seen["calls"] = logits(model), list(flash_calls)

    with open_pass(model, Probe(8, 0)):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen["calls"] == [IDS.shape[1]] * 3  # its three layers ran the model's own function
        logits(model)
        assert len(flash_calls) == 3  # this thread's pass ran as sdpa
    assert torch.allclose(seen["logits"], want, atol=1e-5)
    assert model.config._attn_implementation == "maskless"


def test_switch_is_counted_and_goes_back_after_an_exception(flash_calls):
    model = make_model("llama")
    model.set_attn_implementation("maskless")
    with pytest.raises(KeyboardInterrupt), open_pass(model):
        with open_pass(model, Probe(8, 0)):
            assert model.config._attn_implementation == NAME
        assert model.config._attn_implementation == NAME  # the outer pass is still open
        raise KeyboardInterrupt
    assert model.config._attn_implementation == "maskless"


def test_model_set_to_flash_attention_runs_scattered_passes_as_sdpa(flash_calls):
    model = make_model("llama")
    want = ask(model, MOVED, stored(model, STORED))
    model.set_attn_implementation("maskless")
    cache = stored(model, STORED)
    flash_calls.clear()
    got = ask(model, MOVED, cache)
    assert got.report.shifted_tokens and got.report.repaired_tokens
    same_answer(got, want)  # what the same request gives under sdpa, where the model builds its masks
    assert set(flash_calls) == {1}  # decoding went on as the model's own
    assert NAME in ALL_MASK_ATTENTION_FUNCTIONS  # attention without its mask function would make no mask at all


def test_attention_weights_equal_a_loop_over_heads():
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 10, 8)
    got = attention_weights(query, key, None, None)
    for batch in range(2):
        for number in range(4):
            for row in range(3):
                visible = 10 - 3 + row + 1
                scores = key[batch, number // 2, :visible] @ query[batch, number, row] * 8**-0.5
                want = torch.cat([scores.softmax(0), torch.zeros(10 - visible)])
                assert torch.allclose(got[batch, number, row], want, atol=1e-6)
