"""How rows of one geometry lie in a file: one segment behind the other, tensor by tensor, ready to be used there."""

from dataclasses import dataclass

import torch

from .cold import DTYPES, cold_bytes, is_scaled, stored_dtype
from .files import ALIGNMENT, DamagedFile

TAGS = {  # safetensors' names of dtypes
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
COLD = {dtype: name for name, dtype in DTYPES.items()}
MAX_COUNT = 2**31 - 1  # tokens, rows, positions
MAX_LAYERS, MAX_SHAPES = 4096, 256

_WIDTHS = ("key", "value")


def is_count(value, low: int = 0, high: int = MAX_COUNT) -> bool:
    """Whether a value is an integer in this range."""
    return type(value) is int and low <= value <= high


def geometry_of(shapes) -> dict | None:
    """The layers of a pool as JSON, devices left out; None for a dtype that safetensors has no name for."""
    distinct = list(dict.fromkeys(shapes))
    if any(shape.dtype not in TAGS for shape in distinct):
        return None
    described = [
        {
            "kv_heads": shape.kv_heads,
            "key_dim": shape.key_dim,
            "value_dim": shape.value_dim,
            "dtype": TAGS[shape.dtype],
            "rotary": None if shape.rotary is None else dict(vars(shape.rotary)),
            "value_rotary": None if shape.value_rotary is None else dict(vars(shape.value_rotary)),
        }
        for shape in distinct
    ]
    return {"shapes": described, "layers": [distinct.index(shape) for shape in shapes]}


def check_geometry(data) -> None:
    """Raise `DamagedFile` unless this is what `geometry_of` gives. How keys turn is compared with a model's later."""
    try:
        shapes, layers = data["shapes"], data["layers"]
        sound = type(shapes) is list and type(layers) is list
        sound = sound and 0 < len(shapes) <= MAX_SHAPES and len(layers) <= MAX_LAYERS
        sound = sound and all(map(is_count, layers)) and set(layers) == set(range(len(shapes)))
        for shape in shapes if sound else ():
            sizes = (shape["kv_heads"], shape["key_dim"], shape["value_dim"])
            sound = sound and all(is_count(size, 0, 2**20) for size in sizes) and shape["dtype"] in TAGS.values()
    except (KeyError, TypeError) as error:
        raise DamagedFile(f"the index holds no legal geometry: {str(data)[:200]}") from error
    if not sound:
        raise DamagedFile(f"the index holds no legal geometry: {str(data)[:200]}")


@dataclass(frozen=True)
class Piece:
    """One tensor of a segment in a file: rows of one slot of the layers of one shape (`group`)."""

    slot: str
    group: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int


class RowLayout:
    """
    How the rows of a segment lie in a file: one tensor behind the other, each aligned.

    Args:
        geometry (`dict`): See `geometry_of`.
        cold (`str`, *optional*): Dtype of the rows where that is smaller than the model's.
    """

    def __init__(self, geometry: dict, cold: str | None):
        self.cold = None if cold is None else DTYPES[cold]
        dtypes = {tag: dtype for dtype, tag in TAGS.items()}
        self._groups = [
            (geometry["layers"].count(group), shape, dtypes[shape["dtype"]])
            for group, shape in enumerate(geometry["shapes"])
        ]
        self.row_bytes = sum(
            layers * sum(cold_bytes(dtype, shape["kv_heads"], shape[f"{slot}_dim"], self.cold) for slot in _WIDTHS)
            for layers, shape, dtype in self._groups
        )

    def pieces(self, rows: int) -> list[Piece]:
        """The tensors of a segment of so many rows, in their order; offsets count from its first byte."""
        found, offset = [], 0
        for group, (layers, shape, dtype) in enumerate(self._groups):
            size = (layers, shape["kv_heads"], rows)
            kept = stored_dtype(dtype, self.cold)
            parts = [(f"{slot}s", kept, (*size, shape[f"{slot}_dim"])) for slot in _WIDTHS]
            if is_scaled(dtype, self.cold):
                parts += [(f"{slot}_scales", torch.float32, size) for slot in _WIDTHS]
            for slot, kind, dimensions in parts:
                num_bytes = kind.itemsize
                for length in dimensions:
                    num_bytes *= length
                found.append(Piece(slot, group, kind, dimensions, offset, num_bytes))
                offset += num_bytes + -num_bytes % ALIGNMENT
        return found

    def size(self, rows: int) -> int:
        """Bytes of a segment of so many rows, padding included."""
        last = self.pieces(rows)[-1]
        return last.offset + last.size + -last.size % ALIGNMENT
