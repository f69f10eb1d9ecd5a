"""
Turning cached keys to a new position.

A rotary key at position `p` is `R(p) k`; rotations compose, so the key at `p + shift` is `R(shift) (R(p) k)`
(Su et al. 2021, "RoFormer", eq. 34). Nothing but the rotary frequencies is needed, and a constant factor on cos and
sin (yarn's attention scaling) cancels.
"""

import math
from dataclasses import dataclass

import torch

LAYOUTS = ("half", "interleaved")


@dataclass(frozen=True)
class RotarySpec:
    """
    How one slot of a layer (its keys, or with latent attention its values) is rotated, as measured on the model.

    Args:
        buffer (`str`): Dotted name of the model's buffer that gives the frequencies: inverse frequencies `[pairs]`, or
            a table of sines and cosines `[positions, 2 * pairs]`.
        layout (`str`): What a pair is: `"half"`: dimensions i and i + pairs (llama); `"interleaved"`: 2i and 2i + 1
            (GPT-J, Cohere).
        sign (`int`): 1, or -1 where a later position turns the other way (NanoChat).
        start (`int`), width (`int`, *optional*): First rotated dimension (0, or what precedes a rotation of the last
            ones), and how many turn.
    """

    buffer: str
    layout: str = "half"
    sign: int = 1
    start: int = 0
    width: int | None = None

    def frequencies(self, model: torch.nn.Module) -> torch.Tensor:
        """The live inverse frequencies in fp64, `[pairs]`: read at every use, since `model.to` casts them."""
        buffer = model.get_buffer(self.buffer).detach().to(torch.float64)
        return buffer if buffer.dim() == 1 else frequencies_of_table(buffer)


def frequencies_of_table(table: torch.Tensor) -> torch.Tensor:
    """
    Inverse frequencies, `[pairs]`, behind a table `[positions, 2 * pairs]` of sines and cosines (GPT-J's
    `embed_positions`). Each doubling of the position that is looked at doubles the precision, up to the table's own:
    the angle is known modulo a turn, and the estimate so far says which turn.
    """
    sines, cosines = table.double().chunk(2, dim=-1)
    angles = torch.atan2(sines, cosines)
    estimate, position = angles[1], 2
    while position < len(table):
        turns = torch.round((estimate * position - angles[position]) / math.tau)
        estimate, position = (angles[position] + math.tau * turns) / position, 2 * position
    return estimate


def rotation(shift: torch.Tensor | int, frequencies: torch.Tensor, dtype: torch.dtype):
    """
    Cosine and sine of a rotation by `shift` positions, `[..., pairs]` each, angles in fp64: in fp32 they are off by
    1.3e-4 at a shift of 4,000 tokens.
    """
    shift = torch.as_tensor(shift, dtype=torch.float64, device=frequencies.device)
    angles = shift[..., None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_keys(
    keys: torch.Tensor, shift: torch.Tensor | int, frequencies: torch.Tensor, spec: RotarySpec | None = None
) -> torch.Tensor:
    """
    Rotate keys by `shift` positions.

    Args:
        keys (`torch.Tensor`): `[..., rows, head_dim]`, any float dtype; not modified.
        shift (`int` or `torch.Tensor` of `[rows]`): Positions to move by.
        frequencies (`torch.Tensor`): `[pairs]`, fp64.
        spec (`RotarySpec`, *optional*): Layout, sign and first rotated dimension; by default half-split from the
            first dimension on. Dimensions outside of `[start, start + 2 * pairs)` keep their bits.

    Returns:
        `torch.Tensor`: Rotated keys, same shape and dtype. Products and sums are rounded one by one (no fused
        multiply-add), so that the same row and shift give the same bits whatever stands beside them.
    """
    sign = 1 if spec is None else spec.sign
    return turn(keys, *rotation(shift, sign * frequencies.to(keys.device), compute_dtype(keys)), spec)


def compute_dtype(keys: torch.Tensor) -> torch.dtype:
    """What keys are rotated in: half precision in fp32."""
    return torch.float32 if keys.dtype in (torch.float16, torch.bfloat16) else keys.dtype


def turn(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, spec: RotarySpec | None = None) -> torch.Tensor:
    """`rotate_keys` with the cosine and sine of `rotation`, whose frequencies carry the sign."""
    layout, start = ("half", 0) if spec is None else (spec.layout, spec.start)
    dtype = compute_dtype(keys)
    stop = start + 2 * cos.shape[-1]
    rotated = torch.empty_like(keys)
    if start > 0 or stop < keys.shape[-1]:
        rotated[..., :start], rotated[..., stop:] = keys[..., :start], keys[..., stop:]
    first, second = _pairs(keys[..., start:stop], layout)
    first, second = first.to(dtype), second.to(dtype)
    to_first, to_second = _pairs(rotated[..., start:stop], layout)
    to_first.copy_(first * cos - second * sin)
    to_second.copy_(second * cos + first * sin)
    return rotated


def _pairs(rotated: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and second members of all pairs, `[..., pairs]` each."""
    if layout == "half":
        return rotated.chunk(2, dim=-1)
    return rotated[..., 0::2], rotated[..., 1::2]


def fit_rotation(
    near: torch.Tensor, far: torch.Tensor, shift: int, candidates: dict[str, torch.Tensor]
) -> tuple[RotarySpec | None, float]:
    """
    The rotation that takes a slot's rows at one position to those of the same tokens `shift` positions later.

    Args:
        near, far (`torch.Tensor`, `[..., rows, head_dim]`): The slot at both positions.
        candidates (`dict`): Inverse frequencies `[pairs]`, fp64, by the name of the buffer that gives them.

    Returns:
        The best `RotarySpec` of every buffer, layout, sign, and first or last dimensions (None if there is no
        candidate of a fitting width), and its `relative_error`.
    """
    best: tuple[RotarySpec | None, float] = (None, float("inf"))
    for name, frequencies in candidates.items():
        spare = near.shape[-1] - 2 * len(frequencies)
        if spare < 0:
            continue
        for start in sorted({0, spare}):
            for layout in LAYOUTS:
                for sign in (1, -1):
                    spec = RotarySpec(name, layout, sign, start, 2 * len(frequencies))
                    error = relative_error(rotate_keys(near, shift, frequencies, spec), far)
                    if error < best[1]:
                        best = (spec, error)
    return best


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """
    Largest difference relative to the largest wanted value; infinite if anything is not a number.

    In half precision, of rows `[..., rows, head_dim]`: the median over the rows of each one's RMS error, largest head.
    Deep layers of a mixture of experts pick other experts for some rows after a rounding, and those say nothing of the
    rotation; a wrong rotation shows in all.
    """
    half = wanted.dtype in (torch.float16, torch.bfloat16)
    got, wanted = got.double(), wanted.double()
    if half:
        errors = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
        error = float(errors.median(dim=-1).values.max())
    else:
        error = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    return error if error == error else float("inf")
