"""A look at a model's attention by position, which also proves that nothing attends to the future."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from .attention import Probe, open_pass
from .capability import input_device

LAYERS = 3


class _FullProbe(Probe):
    """Keeps the head mean of all queries of the first layers."""

    def __init__(self, queries: int):
        super().__init__(queries, first_layer=0)
        self.maps: list[np.ndarray] = []

    def wants(self, layer: int) -> bool:
        return layer < LAYERS

    def add(self, weights: torch.Tensor) -> None:
        self.maps.append(weights[0].mean(dim=0).cpu().numpy())


@dataclass(frozen=True)
class Diagnosis:
    """
    Args:
        attention (`np.ndarray`): `[layers, queries, keys]`, mean over heads, rows summing to 1.
    """

    attention: np.ndarray

    def __str__(self) -> str:
        lines = ["layer  on itself  on the 16 before  on the first  farther"]
        for layer, weights in enumerate(self.attention):
            rows = np.arange(len(weights))
            own = weights[rows, rows].mean()
            near = np.mean([weights[row, max(0, row - 16) : row].sum() for row in rows])
            first = weights[:, 0].mean()
            rest = max(0.0, 1 - own - near - first)
            lines.append(f"{layer:5d}  {own:9.3f}  {near:16.3f}  {first:12.3f}  {rest:7.3f}")
        return "\n".join(lines)

    def plot(self, axes=None):
        """One picture per layer, keys to the right, queries downwards (extra `plot`)."""
        import matplotlib.pyplot as plt

        if axes is None:
            _, axes = plt.subplots(1, len(self.attention), figsize=(4 * len(self.attention), 4), squeeze=False)
        for layer, (weights, ax) in enumerate(zip(self.attention, np.ravel(axes), strict=False)):
            ax.imshow(np.sqrt(weights), cmap="magma", vmin=0, vmax=1)
            ax.set(title=f"layer {layer}, square root of weight", xlabel="key position", ylabel="query position")
        return axes


def diagnose(model: PreTrainedModel, ids) -> Diagnosis:
    """
    Attention of the first three layers over a text.

    Args:
        model (`PreTrainedModel`): A causal model; it is run once, without a cache.
        ids (`list[int]` or `torch.Tensor`): One sequence of token ids, `[tokens]` or `[1, tokens]`.

    Returns:
        `Diagnosis`. Raises `ValueError` if any weight lies on a later position, or the attention can't be read.
    """
    if isinstance(ids, str):
        raise TypeError("`ids` must be token ids, got a string; pass `tokenizer(text).input_ids`.")
    inputs = torch.as_tensor(ids, dtype=torch.long, device=input_device(model))
    inputs = inputs[None] if inputs.dim() == 1 else inputs
    if inputs.dim() != 2 or inputs.shape[0] != 1 or inputs.shape[1] == 0:
        raise ValueError(f"`ids` must be one sequence of token ids, got shape {tuple(inputs.shape)}.")
    vocabulary = model.get_input_embeddings().num_embeddings
    if inputs.min() < 0 or inputs.max() >= vocabulary:
        raise ValueError(f"token ids must be from 0 to {vocabulary - 1}, got {inputs.min()} to {inputs.max()}.")
    probe = _FullProbe(inputs.shape[1])
    with torch.no_grad(), open_pass(model, probe):
        model(input_ids=inputs, attention_mask=torch.ones_like(inputs), use_cache=False)
    if not probe.maps:
        raise ValueError(f"{type(model).__name__} does not use transformers' attention interface: it can't be read.")
    attention = np.stack(probe.maps)
    future = np.triu(attention, k=1)
    if future.max() > 0:
        layer, query, key = (int(part) for part in np.unravel_index(future.argmax(), future.shape))
        raise ValueError(
            f"layer {layer} gives weight {future.max():.2e} from position {query} to the later position {key}: "
            "this model is not causal, or its masks are wrong."
        )
    return Diagnosis(attention)
