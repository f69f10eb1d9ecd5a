"""The view's layers: the short path of a decoded token against the general one, and what is asked of every layer."""

import pytest
import torch
from transformers.cache_utils import Cache

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.view import View, ViewLayer
from reference import ask, same_as_vanilla
from tiny_models import make_model, old_text


class Watch:
    """Sees every row that is written; with one, a view takes the general path."""

    def __init__(self):
        self.seen = []

    def see(self, layer, columns, keys, values):
        self.seen.append((layer.index, columns.tolist(), keys.clone(), values.clone()))


@pytest.fixture
def views():
    """`views(kind, batch)`: two empty views of one model."""
    opened = []

    def make(kind: str, batch: int = 1) -> list[View]:
        model, cache = make_model(kind), SuffixCache()
        for _ in range(2):
            view = cache.open_view(model, batch=batch).view
            view.lay_over(view.store.allocate(view.shelf, 40, batch))
            opened.append(view)
        return opened[-2:]

    yield make
    for view in opened:
        view.request.abort()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "deepseek_v3"])
def test_short_and_general_path_write_and_give_the_same(views, kind, batch):
    short, general = views(kind, batch)
    general.watches = (Watch(),)
    draw = torch.Generator().manual_seed(0)
    for queries in (5, 1, 1, 20, 1, 3, 1):  # past the window of 16
        for index, layer in enumerate(short.layers):
            shapes = [(batch, part.shape[1], queries, part.shape[3]) for part in (layer._keys, layer._values)]
            keys, values = (torch.randn(shape, generator=draw) for shape in shapes)
            sizes = [view.layers[index].get_mask_sizes(queries) for view in (short, general)]
            with torch.no_grad():
                got, want = (view.update(keys, values, index) for view in (short, general))
            assert sizes[0] == sizes[1] and got[0].shape[2] == sizes[0][0]
            assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
            assert torch.equal(got[0][:, :, -queries:], keys) and torch.equal(got[1][:, :, -queries:], values)
            assert torch.equal(layer.keys, general.layers[index].keys)
            assert layer.keys.data_ptr() != general.layers[index].keys.data_ptr()
    assert len(general.watches[0].seen) == 7 * len(short.layers)
    assert short.get_seq_length() == general.get_seq_length() == 32


def test_a_view_that_is_full_grows_on_the_short_path(views):
    view, _ = views("llama")
    _, heads, capacity, dim = view.layers[0]._keys.shape
    keys = torch.randn(1, heads, capacity, dim)
    with torch.no_grad():
        for layer in range(3):
            view.update(keys, keys, layer)
        for layer in range(3):
            found, _ = view.update(keys[:, :, :1] + 1, keys[:, :, :1], layer)
            assert torch.equal(found, torch.cat([keys, keys[:, :, :1] + 1], dim=2))
    assert view.layers[0]._keys.shape[2] > capacity


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_what_is_asked_of_every_layer_is_what_transformers_would_find(views, kind):
    view, _ = views(kind)
    for name in ("is_sliding", "is_linear", "is_compileable"):
        assert getattr(view, name) == getattr(Cache, name).fget(view)
    assert view.is_dummy == [False] * 3
    assert any(view.is_sliding) == (kind == "gemma3_text")


def test_narrowed_rows_are_written_into_the_whole_view(views):
    view, _ = views("llama", 3)
    layer = view.layers[1]
    layer._keys.zero_(), layer._values.zero_()
    before = layer._keys
    heads, dim = before.shape[1], before.shape[3]
    states = torch.randn(1, heads, 4, dim)
    with view.narrowed(slice(1, 2)), torch.no_grad():
        found, _ = view.update(states, states, 1)
        assert torch.equal(found, states)
    assert layer._keys is before and layer.length == 4
    assert torch.equal(layer._keys[1, :, :4], states[0])
    assert layer._keys[[0, 2]].abs().max() == 0 and layer._keys[1, :, 4:].abs().max() == 0
    with pytest.raises(RuntimeError), view.narrowed(slice(0, 2)):
        raise RuntimeError
    assert layer._keys is before


def test_a_decoded_token_asks_no_layer_but_to_write(monkeypatch):
    """Python of ours runs once a layer and token: nothing else goes through the layers."""
    model, cache = make_model("llama"), SuffixCache()
    same_as_vanilla(model, old_text(30, 1), cache)
    counts: dict[str, int] = {}
    for name in ("update", "get_seq_length", "get_mask_sizes"):
        real = getattr(ViewLayer, name)

        def counted(*args, real=real, name=name, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return real(*args, **kwargs)

        monkeypatch.setattr(ViewLayer, name, counted)
    few = ask(model, old_text(30, 2), cache, steps=4) and dict(counts)
    counts.clear()
    ask(model, old_text(30, 3), cache, steps=24)
    assert counts["update"] - few["update"] == 20 * 3
    assert (counts["get_mask_sizes"] - few["get_mask_sizes"]) <= 2 * 20
