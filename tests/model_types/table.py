"""What is expected of every causal model type: `types.csv`, from a survey, corrected by measurement."""

import csv
from dataclasses import dataclass
from pathlib import Path

KINDS = ("shift", "prefix", "none")
TABLE = Path(__file__).parent / "types.csv"


@dataclass(frozen=True)
class ModelType:
    """
    Args:
        model_type (`str`): The configuration's `model_type`.
        class_name (`str`): The model class that `AutoModelForCausalLM` makes.
        family (`str`): How its rows depend on the position, in our words.
        kind (`str`): `"shift"`, `"prefix"` or `"none"`, as `cache.capability(model).kind` must say.
        reason (`str`): Words that the capability's reason must contain; empty for `"shift"`.
        note (`str`): What is odd about the type, with the evidence.
    """

    model_type: str
    class_name: str
    family: str
    kind: str
    reason: str
    note: str


def expected() -> dict[str, ModelType]:
    """The rows of `types.csv` by model type."""
    with TABLE.open(newline="") as file:
        return {row["model_type"]: ModelType(**row) for row in csv.DictReader(file)}


def measured_family(capability) -> str:
    """The words of `types.csv` for a capability of kind `"shift"`, from what was measured of its layers."""
    rotations = [(shape, spec, dim) for shape in capability.shapes for spec, dim in _slots(shape)]
    if not rotations:
        return "position-free keys"
    layouts = {spec.layout for _, spec, _ in rotations}
    words = [" and ".join({"half": "half-split"}.get(layout, layout) for layout in sorted(layouts))]
    if any(spec.sign < 0 for _, spec, _ in rotations):
        words.append("negative sign")
    if any(spec.width < dim for _, spec, dim in rotations):
        words.append("partial")
    if all(shape.rotary is None for shape, _, _ in rotations):
        words.append("latent rows")
    if len({id(shape) for shape, _, _ in rotations}) < len(capability.shapes):
        words.append("layers without positions")
    return ", ".join(words)


def _slots(shape):
    slots = ((shape.rotary, shape.key_dim), (shape.value_rotary, shape.value_dim))
    return [(spec, dim) for spec, dim in slots if spec is not None]
