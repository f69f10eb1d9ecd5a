"""What a model can do: whether its rows can be moved, reused at the front only, or not at all, and their shape."""

import inspect
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .rope import RotarySpec
from .store.pool import LayerShape


@dataclass(frozen=True)
class Capability:
    """
    What was measured of a model.

    Args:
        kind (`str`): `"shift"` (rows can be reused anywhere), `"prefix"` (at the front only) or `"none"`.
        reason (`str`, *optional*): Why it is not `"shift"`, one sentence.
        layers (`tuple[LayerShape | None]`): One per cache layer; None where a layer keeps no rows of its own.
        windows (`tuple[int | None]`): Sliding window, or chunk size, of each cache layer.
        takes_positions (`bool`), takes_mask (`bool`): Whether the forward takes `position_ids`, `attention_mask`.
        batches (`bool`): Whether batches come out as their rows do alone.
        reads_attention (`bool`): Whether a probe can read the model's attention.
        length_dependent (`bool`): Whether its rotary frequencies depend on the length of the text.
        failed (`bool`): Whether the measurement came to no end; it is taken again at the next use.
        rows (`int`): Rows that the measurement ran (batch x queries).
        seconds (`float`): What it took.
    """

    kind: str
    reason: str | None = None
    layers: tuple[LayerShape | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    takes_positions: bool = True
    takes_mask: bool = True
    batches: bool = True
    reads_attention: bool = False
    length_dependent: bool = False
    failed: bool = False
    rows: int = 0
    seconds: float = 0.0

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of the layers that keep rows."""
        return tuple(shape for shape in self.layers if shape is not None)

    @property
    def layout(self) -> str:
        """How keys (K) and values (V) turn, layers counted by kind, as in `K half x16, none x2`."""
        counts: dict[str, int] = {}
        for shape in self.shapes:
            slots = (("K", shape.rotary, shape.key_dim), ("V", shape.value_rotary, shape.value_dim))
            parts = [f"{slot} {_describe(spec, dim)}" for slot, spec, dim in slots if spec is not None]
            name = " + ".join(parts) or "none"
            counts[name] = counts.get(name, 0) + 1
        return ", ".join(f"{name} x{count}" for name, count in counts.items())

    def __str__(self) -> str:
        lines = [self.kind + (f": {self.reason}" if self.reason else "")]
        if self.shapes:
            windows = sorted({window for window in self.windows if window is not None})
            row_bytes = sum(shape.row_bytes for shape in self.shapes)
            lines.append(f"{len(self.shapes)} layers, {row_bytes:,} bytes a row, sliding windows: {windows or 'none'}")
            if self.kind == "shift":
                lines.append(f"rotation: {self.layout}" + ("; depends on length" if self.length_dependent else ""))
                lines.append(f"attention can be read: {'yes' if self.reads_attention else 'no'}")
            if not self.batches:
                lines.append("one sequence at a time: batches run without the cache")
        lines.append(f"measured with {self.rows} rows in {self.seconds:.2f} s")
        return "\n".join(lines)


def _describe(spec: RotarySpec, dim: int) -> str:
    turn = "" if spec.sign == 1 else "-"
    part = "" if spec.width == dim else f" {'last' if spec.start else 'first'} {spec.width} of {dim}"
    return f"{turn}{spec.layout}{part} by {spec.buffer.rsplit('.', 1)[-1]}"


def cache_argument(model: torch.nn.Module) -> str | None:
    """Name of the forward's cache argument: `cache` since transformers 5.24, `past_key_values` before; or None."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the model's forward is compiled, by `model.compile()` or by itself."""
    return vars(model).get("_compiled_call_impl") is not None or hasattr(model.forward, "_torchdynamo_orig_callable")


def input_device(model: PreTrainedModel) -> torch.device:
    """Where the model wants its token ids: offloaded weights lie on "meta" between forwards."""
    embedding = model.get_input_embeddings()
    device = next((tensor.device for tensor in embedding.parameters()), model.device)
    for module in (embedding, model):
        hook = getattr(module, "_hf_hook", None)
        if device.type == "meta" and getattr(hook, "execution_device", None) is not None:
            device = torch.device(hook.execution_device)
    return torch.device("cpu") if device.type == "meta" else device
