"""A request with its view, for a call of a model that can be served."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from .admission import Admission
from .bound.rule import Rule
from .capability import input_device
from .config import SuffixCacheConfig
from .identity import Identity
from .request import Request
from .store.scopes import Place, Scope
from .store.store import Store
from .view import View


def open_request(
    store: Store,
    scope: Scope,
    config: SuffixCacheConfig,
    model: PreTrainedModel,
    admitted: Admission,
    identity_of: Callable[[PreTrainedModel, int], Identity],
    rule_of: Callable[[Admission], Rule],
    options: dict,
) -> Request:
    """
    Open a request.

    Args:
        store (`Store`), scope (`Scope`), config (`SuffixCacheConfig`): Where its rows come from and go to, and how.
        model (`PreTrainedModel`), admitted (`Admission`): Whose call it is, and what it is served as.
        identity_of (callable): Gives the identity of a model now.
        rule_of (callable): Gives what predicts the call's KL and holds its bound.
        options (`dict`): More arguments of `Request`.
    """
    identity, capability = admitted.identity, admitted.capability
    device = input_device(model)
    specs = {spec for shape in capability.shapes for spec in (shape.rotary, shape.value_rotary) if spec is not None}

    def frequencies():
        return {spec: spec.frequencies(model) for spec in specs}

    def reading_of(regime: bytes | None = None, with_types: bool = False):
        return store.reading(identity, Place(scope, regime, with_types), capability.shapes)

    def shared_of(regime: bytes | None, with_types: bool):
        return store.shelf(identity, Place(scope, regime, with_types).beside, capability.shapes)

    def same_model() -> bool:
        return not torch.is_autocast_enabled(device.type) and identity_of(model, 0) is identity

    rule = rule_of(admitted)
    rule.check()
    reading = reading_of()
    return Request(
        View(store, reading.own, capability),
        config,
        frequencies,
        capability=capability,
        regimes=admitted.regimes,
        reading=reading,
        reading_of=reading_of,
        shared_of=shared_of,
        same_model=same_model,
        rule=rule,
        **options,
    )
