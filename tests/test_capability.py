"""What is measured of a model at first use."""

import pytest
import torch

from hf_suffix_cache.capability import PROBE_TOKENS, CapabilityTable, cache_argument, measure
from tiny_models import SUPPORTED, UNSUPPORTED, fingerprint, make_model


@pytest.mark.parametrize("kind", SUPPORTED)
def test_plain_rotary_models_can_shift(kind):
    model = make_model(kind)
    capability = measure(model)
    assert capability.kind == "shift" and capability.reason is None
    assert len(capability.shapes) == len(capability.windows) == model.config.num_hidden_layers
    assert capability.rows == 2 * PROBE_TOKENS
    for shape in capability.shapes:
        assert shape.rotary is not None and shape.dtype == torch.float32
        assert len(shape.rotary.frequencies(model)) * 2 == shape.key_dim


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_other_models_are_refused_with_a_reason(kind):
    capability = measure(make_model(kind))
    assert capability.kind == "none" and len(capability.reason) > 10
    assert capability.shapes == ()


def test_reasons_say_what_was_found():
    reasons = {kind: measure(make_model(kind)).reason for kind in UNSUPPORTED}
    assert "values" not in reasons["gpt_neox"] and "full-width rotation" in reasons["gpt_neox"]
    assert "full-width rotation" in reasons["cohere"]


def test_length_dependent_frequencies_are_refused():
    scaling = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
    assert "dynamic" in measure(make_model("llama", rope_parameters=scaling)).reason


def test_wrong_rotation_is_noticed():
    """Control: keys that turn by other frequencies than the buffer's are not taken for shiftable."""
    model = make_model("llama")
    before = model.model.rotary_emb.inv_freq.clone()
    forward = model.model.rotary_emb.forward

    def faster(*args, **kwargs):
        kwargs["position_ids"] = kwargs["position_ids"] * 2
        return forward(*args, **kwargs)

    model.model.rotary_emb.forward = faster
    try:
        assert measure(model).kind == "none"
    finally:
        del model.model.rotary_emb.forward
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_measurement_leaves_model_and_random_state_as_they_were():
    model = make_model("mistral")
    before, state = fingerprint(model), torch.get_rng_state()
    measure(model)
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_measurement_is_taken_once_per_model_and_dtype():
    table, model = CapabilityTable(), make_model("llama")
    first, rows = table.get(model)
    assert rows == 2 * PROBE_TOKENS
    assert table.get(model) == (first, 0)
    model.to(torch.bfloat16)
    halved, rows = table.get(model)
    assert rows == 2 * PROBE_TOKENS and halved.kind == "shift"
    assert halved.shapes[0].dtype == torch.bfloat16


def test_cache_argument_is_the_installed_versions_name():
    assert cache_argument(make_model("llama")) in ("cache", "past_key_values")
    assert cache_argument(torch.nn.Linear(2, 2)) is None
