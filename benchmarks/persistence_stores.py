"""Stores without a model behind them: random texts with random rows, and what was opened of them."""

from dataclasses import dataclass

import numpy as np
import torch

from hf_suffix_cache import SuffixCacheConfig
from hf_suffix_cache.rope import RotarySpec
from hf_suffix_cache.store import persistence
from hf_suffix_cache.store.files import checksum
from hf_suffix_cache.store.pool import BlockPool, LayerShape
from hf_suffix_cache.store.scopes import Place
from hf_suffix_cache.store.segments import Segment
from hf_suffix_cache.store.shelf import Recipe, Sequence, Shelf
from hf_suffix_cache.store.store import Store

CPU = torch.device("cpu")
SMOLLM2 = (LayerShape(3, 64, 64, torch.float32, CPU, RotarySpec("model.rotary_emb.inv_freq")),) * 30
SMALL = (LayerShape(2, 16, 16, torch.float32, CPU, RotarySpec("model.rotary_emb.inv_freq")),) * 3
VOCABULARY = 49_152


@dataclass(frozen=True)
class Named:
    """Stands in for a model's identity."""

    digest: str = checksum([b"weights"])
    portable: str = checksum([b"settings"])


def synthetic(shapes, num_bytes: int, text_tokens: int, seed: int = 0) -> Store:
    """A store of so many bytes: texts of `text_tokens` tokens, each a conversation of its own."""
    row_bytes = sum(shape.row_bytes for shape in shapes)
    count = max(1, num_bytes // (row_bytes * text_tokens))
    generator = np.random.default_rng(seed)
    random = torch.Generator().manual_seed(seed)
    store = Store(SuffixCacheConfig(max_bytes=2 * num_bytes + (1 << 26)))
    shelf = store.shelf(Named(), Place(), tuple(shapes))
    for _ in range(count):
        ids = generator.integers(0, VOCABULARY, text_tokens)
        (addresses,) = shelf.pool.pack([text_tokens])
        for slab, rows, _ in shelf.pool.by_slab(addresses):
            for tensor in slab.tensors():
                size = (*tensor.shape[:2], len(rows), tensor.shape[3])
                tensor.index_copy_(2, torch.from_numpy(rows), torch.randn(size, generator=random))
        segment = Segment(ids, np.arange(text_tokens), ids, addresses, last_used=store.clock(), created=store.clock())
        which = np.zeros(text_tokens, dtype=np.int32)
        recipe = Recipe([segment], which, np.arange(text_tokens), np.zeros(text_tokens, dtype=np.int64))
        shelf.add(Sequence(ids, recipe, text_tokens, text_tokens, last_used=store.clock()))
    return store


class Opened:
    """A store that was opened."""

    def __init__(self, store: Store):
        self.store = store

    def wake(self, shapes=SMOLLM2) -> Shelf:
        """The shelf of `Named`, as its model would have it made."""
        return self.store.shelf(Named(), Place(), tuple(shapes))

    def fingerprint(self, shapes=SMALL) -> str:
        """Of all texts and their rows; raises `ValueError` where any of them is damaged."""
        shelf, parts = self.wake(shapes), []
        for sequence in shelf.sequences:
            parts.append(sequence.ids.tobytes())
            addresses = sequence.recipe.addresses_of(np.arange(len(sequence.ids)))
            for name in ("keys", "values"):
                for shape in shelf.pool.groups:
                    parts.append(_rows(shelf.pool, addresses, name, shape).numpy().tobytes())
        return checksum(parts)


def _rows(pool: BlockPool, addresses: np.ndarray, name: str, shape: LayerShape) -> torch.Tensor:
    """Rows of the layers of one shape in their order, wherever they lie: `[layers, kv_heads, rows, head_dim]`."""
    taken, places = [], []
    for slab, rows, index in pool.by_slab(addresses):
        taken.append(getattr(slab, name)[shape].index_select(2, torch.from_numpy(rows)))
        places.append(index)
    return torch.cat(taken, dim=2)[:, :, np.argsort(np.concatenate(places))]


def opened(folder) -> Opened:
    """Open what is in a folder, as `SuffixCache.load` does."""
    store = Store(SuffixCacheConfig(max_bytes=1 << 30))
    persistence.load(store, folder)
    return Opened(store)
