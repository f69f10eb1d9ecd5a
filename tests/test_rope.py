"""Turning keys to another position."""

import pytest
import torch

from hf_suffix_cache.rope import RotarySpec, rotate_keys
from tiny_models import make_model

FREQUENCIES = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)


def slow(keys, shift):
    """Each pair as a complex number, one by one."""
    half = keys.shape[-1] // 2
    turned = keys.clone().double()
    for index in range(half):
        number = torch.complex(keys[..., index].double(), keys[..., index + half].double())
        number = number * torch.exp(1j * shift * FREQUENCIES[index])
        turned[..., index], turned[..., index + half] = number.real, number.imag
    return turned


@pytest.mark.parametrize("shift", [-700, -7, 0, 1, 64, 4000])
def test_rotation_equals_complex_products(shift):
    keys = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0))
    assert (rotate_keys(keys, shift, FREQUENCIES).double() - slow(keys, shift)).abs().max() < 1e-6
    assert shift == 0 or (keys - slow(keys, shift)).abs().max() > 1e-2  # control


def test_rotation_back_gives_the_same_keys():
    keys = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    back = rotate_keys(rotate_keys(keys, 123, FREQUENCIES), -123, FREQUENCIES)
    assert (back - keys).abs().max() < 1e-6


def test_rotation_by_rows_gives_the_bits_of_rotation_by_runs():
    keys = torch.randn(3, 37, 16, generator=torch.Generator().manual_seed(2))
    shifts = torch.tensor([5] * 10 + [-9] * 27)
    together = rotate_keys(keys, shifts, FREQUENCIES)
    assert torch.equal(together[:, :10], rotate_keys(keys[:, :10], 5, FREQUENCIES))
    assert torch.equal(together[:, 10:], rotate_keys(keys[:, 10:], -9, FREQUENCIES))
    assert torch.equal(together[:, 20:21], rotate_keys(keys[:, 20:21], -9, FREQUENCIES))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keys_are_turned_in_single_precision(dtype):
    keys = torch.randn(5, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    turned = rotate_keys(keys, 11, FREQUENCIES)
    assert turned.dtype == dtype
    assert torch.equal(turned, rotate_keys(keys.float(), 11, FREQUENCIES).to(dtype))


def test_frequencies_are_read_live():
    model = make_model("llama")
    spec = RotarySpec("model.rotary_emb.inv_freq")
    before = spec.frequencies(model)
    assert before.dtype == torch.float64
    model.to(torch.bfloat16)
    assert not torch.equal(spec.frequencies(model), before)  # the cast changed what the model rotates by
