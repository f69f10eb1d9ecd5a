"""Whether a call of a model can be served, and what it must be served as: asked before anything is looked up."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from .capabilities import CapabilityTable
from .capability import Capability, input_device
from .causes import Search
from .config import SuffixCacheConfig
from .identity import Identity, refusal
from .inputs import Refused
from .regimes import RotaryRegimes


class Admission(NamedTuple):
    """
    Args:
        identity (`Identity`): The model as it is.
        capability (`Capability`): What it can do.
        capability_rows (`int`): Rows that were run to measure it now.
        regimes (`RotaryRegimes`, *optional*): Given where its rotary frequencies depend on the length of the text.
    """

    identity: Identity
    capability: Capability
    capability_rows: int
    regimes: RotaryRegimes | None


def check_model(model) -> None:
    """Raise `TypeError` for what is no model."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"expected a transformers PreTrainedModel, got {type(model).__name__}.")


def admit(
    model: PreTrainedModel,
    identity_of: Callable[[PreTrainedModel, int], Identity],
    capabilities: CapabilityTable,
    tokens: int,
    batch: int | None = None,
    attached: bool = False,
    chunk: int | None = None,
    measures: bool = True,
) -> Admission:
    """
    What a call is served as; raises `Refused` with the reason if reuse can't serve it.

    Args:
        model (`PreTrainedModel`): Whose call.
        identity_of (callable): Gives the identity of a model for a prompt of so many tokens.
        capabilities (`CapabilityTable`): What is known of models.
        tokens (`int`): Columns of the prompt.
        batch (`int`, *optional*): Batch rows, if that is known.
        attached (`bool`): Whether the call is a plain forward.
        chunk (`int`, *optional*): Rows that one forward may run.
        measures (`bool`): Whether a model that is not known is measured, which runs it; else it is refused.
    """
    if model.training:
        raise Refused("the model is in training mode; call model.eval() to reuse rows")
    if torch.is_autocast_enabled(input_device(model).type):
        raise Refused("autocast is on: rows would depend on a setting that can't be seen later")
    reason = refusal(model)
    if reason is not None:
        raise Refused(reason)
    identity = identity_of(model, tokens)
    state = identity.settings, identity.digest
    capability, rows = capabilities.get(model, state) if measures else (capabilities.known(model, state), 0)
    if capability is None:
        raise Refused("the model is not measured yet: its first call does that, or `cache.capability(model)`")
    if rows:
        identity = identity_of(model, tokens)  # some models get ready for their first forward in it
    if capability.kind == "none":
        raise Refused(capability.reason)
    if not capability.batches and batch != 1:
        raise Refused("this model's batches can't be continued from stored rows; one sequence at a time can")
    regimes = RotaryRegimes(model) if capability.length_dependent else None
    if regimes is not None and regimes.edited:
        raise Refused("rotary frequencies that depend on the length were edited by hand")
    if regimes is not None and attached and regimes.keep_history:
        raise Refused("dynamic frequencies go on from forward to forward, and only generate's are followed")
    if regimes is not None and chunk:
        raise Refused("prefill_chunk_size: each chunk would have rotary frequencies of its own")
    return Admission(identity, capability, rows, regimes)


def make_search(admitted: Admission, config: SuffixCacheConfig, changed: bool, first: bool) -> Search:
    """
    What finds out why prompts are not served.

    Args:
        admitted (`Admission`), config (`SuffixCacheConfig`): What the call is served as, and its settings.
        changed (`bool`): Whether the model was another one before.
        first (`bool`): Whether it is the first call of a session.
    """
    nothing = "session" if first else "state" if changed else "empty"
    front_only = admitted.capability.kind != "shift" and config.fidelity != "exact"
    return Search(admitted.identity, front_only, nothing)
