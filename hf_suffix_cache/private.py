"""
What a SuffixCache is straight in a forward: `model(ids, cache=SuffixCache())` has no call to hook, so it gets a
private list of transformers' own layers.
"""

import threading

import torch
from transformers.cache_utils import Cache, DynamicLayer


class PrivateView(Cache):
    """An ordinary growing cache, one for each thread, that is not stored and says so when it is misunderstood."""

    def __init__(self):
        self._private = threading.local()
        super().__init__(layer_class_to_replicate=DynamicLayer)

    def __bool__(self) -> bool:
        return True  # `len` is that of the private view: `cache or SuffixCache()` must not drop a cache for it

    @property
    def layers(self) -> list:
        """Layers of this thread's private view."""
        if not hasattr(self._private, "layers"):
            self._private.layers = []
        return self._private.layers

    @layers.setter
    def layers(self, value: list) -> None:
        self._private.layers = value

    @property
    def _is_user_defined(self) -> bool:
        """What transformers' own generate asks of a cache that it was given."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # only a generate without our wrapper (after `uninstall`) sets this, at its start: a new sequence begins, and
        # rows of the one before would be taken for its prompt's
        self.reset()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Grow the private view; `ValueError` for what does not continue it, since masks are made before this."""
        if layer_idx == 0 and self.layers and self.get_seq_length():
            positions = (kwargs.get("kwargs") or {}).get("position_ids")
            restarted = positions is not None and int(positions.min()) == 0 and positions.shape[-1] > 1
            if restarted or key_states.shape[0] != self.layers[0].keys.shape[0]:
                length = self.get_seq_length()
                raise ValueError(
                    f"this forward starts a new sequence, but the SuffixCache holds {length} tokens of another. "
                    "Call reset() first, pass a fresh SuffixCache, or use attach(model) to serve plain forwards."
                )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reset(self) -> None:
        """End this thread's private view."""
        self._private.layers = []

    get_max_cache_shape = Cache.get_max_length
