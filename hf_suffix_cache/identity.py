"""Which rows may meet: those of one model whose tensors have not changed since."""

import weakref
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Identity:
    """
    One state of one model. Rows are stored under the identity that computed them.

    Args:
        model (`weakref.ref`): The model.
        versions (`tuple`): Address and version counter of each of its tensors.
    """

    model: weakref.ref
    versions: tuple = field(repr=False)


class IdentityTable:
    """The current identity of each model."""

    def __init__(self):
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, Identity] = weakref.WeakKeyDictionary()

    def get(self, model: torch.nn.Module) -> tuple[Identity, Identity | None]:
        """The model's identity now, and the one it had before if its tensors have changed."""
        versions = tensor_versions(model)
        known = self._known.get(model)
        if known is not None and known.versions == versions:
            return known, None
        current = Identity(weakref.ref(model), versions)
        self._known[model] = current
        return current, known

    def lost(self, identity: Identity) -> bool:
        """Whether the model is gone."""
        return identity.model() is None


def tensor_versions(model: torch.nn.Module) -> tuple:
    """Address and version counter of every parameter and buffer. Tensors made in inference mode have no counter."""
    return tuple(
        (tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version)
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    )
