"""Every level of repair on one prompt, side by side with a full prefill: what calibration learns from."""

import numpy as np
import torch
from transformers import PreTrainedModel

from .bound.features import LevelTrace
from .capability import input_device
from .signals import divergence


def trace(handle, model: PreTrainedModel, ids) -> list[LevelTrace] | None:
    """
    Run a prompt at all levels of `max_kl`'s escalation, the last of which gives what a full prefill gives.

    Args:
        handle (`SuffixCache`): Whose rows are served. Nothing is stored, and its reports and statistics stay.
        model (`PreTrainedModel`), ids (`[tokens]`): One prompt.

    Returns:
        `list[LevelTrace]`, or None where nothing approximate would be served.
    """
    levels: list = []
    run(handle.silent(levels, store=False, fidelity="balanced", repair=None, max_kl=0.0, settle=False), model, ids)
    if not levels:
        return None
    full = levels[-1].logits
    return [
        LevelTrace(step.level, step.features, max(0.0, divergence(full, step.logits)), float(step.rows))
        for step in levels
    ]


def run(handle, model: PreTrainedModel, ids) -> None:
    """One greedy token behind a prompt, `[tokens]`; the token itself is not wanted."""
    inputs = torch.as_tensor(np.asarray(ids), device=input_device(model))[None]
    mask = torch.ones_like(inputs)
    model.generate(inputs, attention_mask=mask, cache=handle, max_new_tokens=1, do_sample=False, num_beams=1)
