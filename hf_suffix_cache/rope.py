"""
Turning cached keys to a new position.

A rotary key at position `p` is `R(p) k`; rotations compose, so the key at `p + shift` is `R(shift) (R(p) k)`
(Su et al. 2021, "RoFormer", eq. 34). Nothing but the rotary frequencies is needed, and a constant factor on cos and
sin (yarn's attention scaling) cancels.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RotarySpec:
    """
    How a layer's keys are rotated, as measured on the model.

    Args:
        buffer (`str`): Dotted name of the buffer that holds the inverse frequencies, `[head_dim / 2]`.
    """

    buffer: str

    def frequencies(self, model: torch.nn.Module) -> torch.Tensor:
        """The live inverse frequencies in fp64, `[head_dim / 2]`: read at every use, since `model.to` casts them."""
        return model.get_buffer(self.buffer).detach().to(torch.float64)


def rotation(shift: torch.Tensor | int, frequencies: torch.Tensor, dtype: torch.dtype):
    """
    Cosine and sine of a rotation by `shift` positions, `[..., head_dim / 2]` each, angles in fp64: in fp32 they are
    off by 1.3e-4 at a shift of 4,000 tokens.
    """
    shift = torch.as_tensor(shift, dtype=torch.float64, device=frequencies.device)
    angles = shift[..., None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_keys(keys: torch.Tensor, shift: torch.Tensor | int, frequencies: torch.Tensor) -> torch.Tensor:
    """
    Rotate keys of the half-split layout by `shift` positions.

    Args:
        keys (`torch.Tensor`): `[..., rows, head_dim]`, any float dtype; not modified.
        shift (`int` or `torch.Tensor` of `[rows]`): Positions to move by.
        frequencies (`torch.Tensor`): `[head_dim / 2]`, fp64.

    Returns:
        `torch.Tensor`: Rotated keys, same shape and dtype. Products and sums are rounded one by one (no fused
        multiply-add), so that the same row and shift give the same bits whatever stands beside them.
    """
    compute_dtype = torch.float32 if keys.dtype in (torch.float16, torch.bfloat16) else keys.dtype
    cos, sin = rotation(shift, frequencies.to(keys.device), compute_dtype)
    half = keys.shape[-1] // 2
    first, second = keys[..., :half].to(compute_dtype), keys[..., half:].to(compute_dtype)
    rotated = torch.empty_like(keys)
    rotated[..., :half] = first * cos - second * sin
    rotated[..., half:] = second * cos + first * sin
    return rotated
