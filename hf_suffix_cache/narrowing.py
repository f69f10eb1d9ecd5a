"""Rows that leave a scattered forward layer by layer, and what is seen of rows before they are written over."""

import threading
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
import torch

from .view import View, ViewLayer


class RowWatch:
    """
    Compares stored rows with the fresh ones that are about to take their place.

    Args:
        columns (`np.ndarray` of int, ascending): Which columns of the view are watched; others are ignored.
        layers (set of `int`): The layers that are watched.
        of (`str`): `"keys"`, `"values"`, or `"both"` (the mean of the two differences).
        keep (`int`): The old rows of so many first layers are kept, to be put back.
    """

    def __init__(self, columns: np.ndarray, layers: set[int], of: str = "both", keep: int = 0):
        self._columns = columns
        self._layers = layers
        self._of = of
        self._keep = keep
        self._seen: dict[int, list[tuple[np.ndarray, torch.Tensor]]] = {}
        self._old: list[tuple[ViewLayer, np.ndarray, torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def see(self, layer: ViewLayer, columns: np.ndarray, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take one layer's fresh rows, `[batch, kv_heads, columns, head_dim]`, before they are written."""
        index = np.flatnonzero(np.isin(columns, self._columns)) if layer.index in self._layers else ()
        if len(index) == 0:
            return
        columns = columns[index]
        old_keys, old_values = layer.rows(columns)
        index = torch.from_numpy(index).to(keys.device)
        parts = []
        if self._of != "values":
            parts.append(_difference(old_keys, keys.index_select(2, index)))
        if self._of != "keys":
            parts.append(_difference(old_values, values.index_select(2, index)))
        # stays on the device: reading it here would wait for the GPU once a layer
        self._seen.setdefault(layer.index, []).append((columns, torch.stack(parts).mean(dim=0)))
        if layer.index < self._keep:
            self._old.append((layer, columns, old_keys, old_values))

    def put_back(self, columns: np.ndarray) -> None:
        """Restore the old rows at `columns`."""
        for layer, kept, keys, values in self._old:
            index = np.flatnonzero(np.isin(kept, columns))
            where = torch.from_numpy(index).to(keys.device)
            layer.put_rows(kept[index], keys.index_select(2, where), values.index_select(2, where))

    def at(self, layer: int, columns: np.ndarray) -> np.ndarray:
        """Differences in a layer at `columns`: `[batch, columns]` of float; NaN where none was seen."""
        parts = self._seen.get(layer, [])
        batch = parts[0][1].shape[0] if parts else 1
        result = np.full((batch, len(columns)), np.nan)
        for known, values in parts:
            order = np.argsort(known)
            place = order[np.minimum(np.searchsorted(known, columns, sorter=order), len(known) - 1)]
            found = known[place] == columns
            result[:, found] = values.float().cpu().numpy()[:, place[found]]
        return result

    def mean(self, first: int, stop: int, row: int, columns: np.ndarray) -> float:
        """Mean difference of batch row `row` at `columns` over the watched layers in `[first, stop)`; NaN if none."""
        layers = [layer for layer in self._seen if first <= layer < stop]
        values = np.array([self.at(layer, columns)[row] for layer in layers])
        return float(np.nanmean(values)) if values.size and not np.isnan(values).all() else float("nan")


def _difference(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Squared difference of each row, relative to the fresh row's own square: `[batch, columns]` in fp32."""
    old, new = old.float(), new.float()
    return (new - old).square().sum(dim=(1, 3)) / new.square().sum(dim=(1, 3)).clamp_min(1e-12)


def decoder_layers(model: torch.nn.Module, count: int) -> torch.nn.ModuleList | None:
    """The list of the model's decoder layers, if it has one of `count` modules whose first argument is the rows."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and count > 2:
            return module
    return None


@contextmanager
def narrowing(
    layers: torch.nn.ModuleList, view: View, columns: np.ndarray, decide: Callable[[int], np.ndarray | None]
):
    """
    Inside, rows may leave the scattered forward of `columns` between two decoder layers.

    Args:
        decide (callable): `decide(layer)` is called when `layer` has run: indices into `columns`, ascending, of the
            rows that go on, or None where all that are left do.

    Yields:
        `list[int]`: Grows by the number of rows of each layer as they run. The masks of the forward must be tensors
        (`open_pass(explicit_masks=True)`).
    """
    full = len(columns)
    thread = threading.get_ident()  # the layers are everybody's: a forward of another thread is none of this one's
    state = {"active": np.arange(full)}
    rows_run: list[int] = []

    def before_layer(number: int):
        def hook(module, args, kwargs):
            if threading.get_ident() != thread:
                return None
            if number:
                goes_on = decide(number - 1)
                if goes_on is not None:
                    args, kwargs = _narrow_rows(args, kwargs, state["active"], goes_on)
                    state["active"] = goes_on
            rows_run.append(len(state["active"]))
            if len(state["active"]) == full:
                return None
            index = torch.from_numpy(state["active"])
            view.place(columns[state["active"]])
            hidden = "hidden_states" if not args else None
            rest = {name: value if name == hidden else _cut(value, index, full) for name, value in kwargs.items()}
            return (*args[:1], *(_cut(value, index, full) for value in args[1:])), rest

        return hook

    handles = [
        layer.register_forward_pre_hook(before_layer(number), with_kwargs=True) for number, layer in enumerate(layers)
    ]
    try:
        yield rows_run
    finally:
        for handle in handles:
            handle.remove()


def _narrow_rows(args: tuple, kwargs: dict, active: np.ndarray, goes_on: np.ndarray) -> tuple[tuple, dict]:
    """The layer's input `[batch, rows, hidden]`, cut from the `active` rows to those that go on."""
    place = torch.from_numpy(np.searchsorted(active, goes_on))
    if args:
        return (args[0].index_select(1, place.to(args[0].device)), *args[1:]), kwargs
    hidden = kwargs["hidden_states"]
    return args, {**kwargs, "hidden_states": hidden.index_select(1, place.to(hidden.device))}


def _cut(value, index: torch.Tensor, full: int):
    """
    Rows of what a layer is given beside its input. By transformers' layouts rows are axis 0 of `[rows]`, axis 1 of
    `[batch, rows]` and `[batch, rows, dim]`, and axis 2 of a mask `[batch, 1, rows, keys]`.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(item, index, full) for item in value)
    if isinstance(value, torch.Tensor) and 1 <= value.dim() <= 4:
        axis = {1: 0, 2: 1, 3: 1, 4: 2}[value.dim()]
        if value.shape[axis] == full:
            return value.index_select(axis, index.to(value.device))
    return value
