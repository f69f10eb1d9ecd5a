"""The Cache that one generate call sees: layers over one preallocated extent, which the model appends to in place."""

import weakref
from contextlib import contextmanager

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .capability import Capability
from .store.pool import Extent
from .store.shelf import Shelf
from .store.store import Store

GROWTH_ROWS = 256  # room asked for beyond what is needed now, when a view has to grow


class QueryOffset(torch.Tensor):
    """
    Offset per query row, `[queries]`, which mask code adds to `arange(queries)`: the sum is each row's column.

    Mask code of transformers 5.17 to 5.24 takes a tensor here (StaticCache gives one) but compares it with 0 first;
    that comparison must be one False, not a tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __eq__(self, other):
        return False

    __hash__ = torch.Tensor.__hash__


class ViewLayer(CacheLayerMixin):
    """One layer of a view. `keys` and `values` are `[batch, kv_heads, tokens, head_dim]` views of the extent."""

    is_compileable = False
    is_croppable = True

    def __init__(self, view: "View", window: int | None, index: int = 0):
        self._view = weakref.ref(view)
        self.index = index
        self.window = window
        self.is_sliding = window is not None
        self.is_initialized = False
        self.length = 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys so far."""
        return None if self._keys is None else self._keys[:, :, : self.length]

    @property
    def values(self) -> torch.Tensor | None:
        """Values so far."""
        return None if self._values is None else self._values[:, :, : self.length]

    def rows(self, columns: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values at `columns`, `[batch, kv_heads, columns, head_dim]` each."""
        index = torch.from_numpy(columns).to(self._keys.device)
        return self._keys.index_select(2, index), self._values.index_select(2, index)

    def buffer(self, slot: str) -> torch.Tensor:
        """Memory of `"keys"` or `"values"`, `[batch, kv_heads, capacity, head_dim]`."""
        return self._keys if slot == "keys" else self._values

    def put_rows(self, columns: np.ndarray, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write what `rows` gave back to `columns`."""
        index = torch.from_numpy(columns).to(self._keys.device)
        with torch.no_grad():
            self._keys.index_copy_(2, index, keys)
            self._values.index_copy_(2, index, values)

    def bind(self, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        """Lay the layer over `[batch, kv_heads, capacity, head_dim]` tensors."""
        self._keys, self._values = keys, values
        self.is_initialized = keys is not None
        if keys is not None:
            self.device, self.dtype = keys.device, keys.dtype

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the extent is preallocated."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write `[batch, kv_heads, queries, head_dim]` states and return all that the queries may attend to."""
        view = self._view()
        queries = key_states.shape[-2]
        slots, start = view.slots, self.length
        keys, stop = self._keys, start + queries
        if slots is None and not view.watches and not torch.is_grad_enabled() and keys is not None:
            # the path of every decoded token, 30 times: half the Python of the general one below
            batch, _, capacity, _ = keys.shape
            if stop <= capacity and batch == key_states.shape[0]:
                self.length = stop
                keys.narrow(2, start, queries).copy_(key_states)
                self._values.narrow(2, start, queries).copy_(value_states)
                first = 0 if self.window is None else max(0, stop - queries - self.window + 1)
                return keys.narrow(2, first, stop - first), self._values.narrow(2, first, stop - first)
        stop = start + queries if slots is None else view.total
        if self._keys is None or stop > self._keys.shape[2] or key_states.shape[0] != self._keys.shape[0]:
            view.reserve(key_states.shape[0], stop)
        self.length = stop
        if view.watches:
            columns = view.columns if slots is not None else view.contiguous(start, stop)
            for watch in view.watches:
                watch.see(self, columns, key_states, value_states)
        # a model-wide mask fits the rows that `get_mask_sizes` announced: a window's worth for contiguous queries
        first = 0 if self.window is None or slots is not None else max(0, stop - queries - self.window + 1)
        keys = _write(self._keys, key_states, slots, start, first, stop)
        values = _write(self._values, value_states, slots, start, first, stop)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Rows handed out at the next update, and the column of the first of them."""
        view = self._view()
        if view.slots is not None:
            return view.total, 0
        stop = self.length + query_length
        first = 0 if self.window is None else max(0, self.length - self.window + 1)
        return stop - first, first

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length  # abstract until transformers 5.19

    def reset(self) -> None:
        """Start over, in the same memory."""
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens."""
        self.length = max(0, self.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the batch, from the first column that can differ between beams of one prompt."""
        first = self._view().shared_columns(beam_idx)
        for tensor in (self._keys, self._values):
            part = tensor[:, :, first : self.length]
            part.copy_(part.index_select(0, beam_idx.to(tensor.device)))


class NoRows(ViewLayer):
    """A layer without rows of its own: it uses another layer's (KV sharing), or has no attention."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Measured not to be called."""
        raise NotImplementedError("this layer kept no rows when the model was measured, and now it does.")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Nothing to reorder."""


def _write(buffer, states, slots, start, first, stop) -> torch.Tensor:
    """Write states into the buffer without a graph; hand out rows [first, stop), with the states' own graph if any."""
    with torch.no_grad():
        if slots is None:
            buffer[:, :, start:stop] = states
        else:
            buffer.index_copy_(2, slots.to(buffer.device), states.to(buffer.dtype))
    if not (torch.is_grad_enabled() and states.requires_grad):
        return buffer[:, :, first:stop]
    if slots is None and start == first:
        return states
    # a copy: the buffer is written again by later forwards, and autograd keeps what it was given
    kept = buffer[:, :, first : start if slots is None else stop].detach().clone()
    kept = _WithoutGradient.apply(kept.requires_grad_())
    return torch.cat([kept, states], dim=2) if slots is None else kept.index_copy(2, slots.to(buffer.device), states)


class _WithoutGradient(torch.autograd.Function):
    """Rows that were not computed in this forward: a gradient through them would be lost, so asking for it raises."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        raise RuntimeError(
            "gradients can't flow through rows that a SuffixCache served. Run this forward without the cache, or "
            "under torch.no_grad() if no gradient is wanted."
        )


class View(Cache):
    """
    The growing sequences of one call, `[batch]` rows over one extent of the pool.

    It reports a length of 0 until the first forward, so that `generate` passes the whole prompt; `Request` decides
    in that forward what is computed. The view only holds rows; it never decides.

    Args:
        store (`Store`), shelf (`Shelf`): Where its memory comes from.
        capability (`Capability`): Layout of the model's cache layers.
    """

    def __init__(self, store: Store, shelf: Shelf, capability: Capability):
        shapes, windows = capability.layers, capability.windows
        super().__init__(
            layers=[
                NoRows(self, None, index) if shape is None else ViewLayer(self, window, index)
                for index, (shape, window) in enumerate(zip(shapes, windows, strict=True))
            ]
        )
        self._is_dummy = [isinstance(layer, NoRows) for layer in self.layers]
        self._is_sliding = [layer.is_sliding for layer in self.layers]
        self._is_linear = [False] * len(self.layers)
        self.own_layers = [layer for layer in self.layers if not isinstance(layer, NoRows)]
        self.store = store
        self.shelf = shelf
        self.lease = store.leases.new(shelf.pool)
        self.slots: torch.Tensor | None = None  # columns of a scattered forward, on the device ...
        self.columns: np.ndarray | None = None  # ... and on the host
        self.total = 0
        self._range: tuple | None = None
        self.watches: tuple = ()  # they see rows before they are written over
        self.prompt_columns = 0  # columns that all beams of one prompt share
        self.group = 1  # batch rows per prompt of the caller's
        self.fed: list[torch.Tensor] = []  # token ids of every forward, [batch, queries]
        self.altered = False  # batch rows were selected or repeated: not what was planned any more
        self.request = None

    @property
    def extent(self) -> Extent | None:
        """The rows that the view lies over."""
        return self.lease.extents[-1] if self.lease.extents else None

    # -- memory -------------------------------------------------------------------------------------------------

    def lay_over(self, extent: Extent) -> None:
        """
        Use an extent, whose references become the view's own, from now on. One of the pool must come to it under the
        same hold of the store's lock that it was allocated under: between calls the lease names all references.
        """
        self.lease.extents.append(extent)
        pool = self.shelf.pool
        # a view tensor made in inference mode could not be written in a later grad-enabled forward
        with torch.inference_mode(False):
            for index, layer in enumerate(self.own_layers):
                keys, values = pool.layer_tensors(extent.slab, index)
                layer.bind(extent.layer_view(keys), extent.layer_view(values))

    def reserve(self, batch: int, columns: int) -> None:
        """Make room for `columns` columns: in place if the blocks behind are free, else by one copy."""
        old = self.extent
        if old is not None and old.batch == batch == 1:
            with self.store.lock:
                grown = self.shelf.pool.grow_in_place(old, columns + GROWTH_ROWS)
                if grown is not None:
                    self.lay_over(grown)
                    self.lease.extents.remove(old)
                    self.shelf.pool.release(old)
                    return
        before = [(layer.keys, layer.values) for layer in self.own_layers]
        with self.store.lock:
            self.lay_over(self.store.allocate(self.shelf, columns + max(GROWTH_ROWS, columns // 2), batch))
        for layer, (keys, values) in zip(self.own_layers, before, strict=True):
            if keys is not None and keys.shape[0] == batch:
                layer._keys[:, :, : keys.shape[2]] = keys
                layer._values[:, :, : values.shape[2]] = values
        if old is not None:
            self._leave(old)

    def _leave(self, extent: Extent) -> None:
        """Give an extent back that the view does not lie over any more."""
        with self.store.lock:
            self.lease.extents.remove(extent)
            self.store.release(self.shelf, extent)

    def _move(self, extent: Extent) -> None:
        """Copy what there is to another extent, and lie over that."""
        old, before = self.extent, [(layer.keys, layer.values) for layer in self.own_layers]
        self.lay_over(extent)
        for layer, (keys, values) in zip(self.own_layers, before, strict=True):
            layer.keys[:], layer.values[:] = keys, values
        self._leave(old)

    def close(self) -> None:
        """Give the extent back. The view is empty then."""
        self.unbind()
        for extent in list(self.lease.extents):
            self._leave(extent)

    def unbind(self) -> None:
        """Be empty, whatever becomes of the extent."""
        for layer in self.layers:
            layer.bind(None, None)
            layer.reset()

    def hand_out(self, shares: bool) -> None:
        """
        From now on the view belongs to the caller; its extent comes back when he drops it. Where it `shares` memory
        with a stored conversation, it gets a copy of its own: the caller may write into it.
        """
        if shares:
            self._move(self.shelf.pool.allocate_private(self.extent.rows, self.extent.batch))
        weakref.finalize(self, self.store.leases.leave, self.lease)
        self.request = None

    # -- passes -------------------------------------------------------------------------------------------------

    @contextmanager
    def scatter(self, columns: np.ndarray, total: int):
        """Inside, an update writes its queries to `columns` and hands out columns [0, total)."""
        self.total = total
        self.place(columns)
        try:
            yield
        finally:
            self.slots = self.columns = None

    @contextmanager
    def narrowed(self, rows: slice):
        """Inside, the view consists of some of its batch rows: forwards of those write into the whole one's memory."""
        before = [(layer, layer.buffer("keys"), layer.buffer("values")) for layer in self.own_layers]
        with torch.inference_mode(False):
            for layer, keys, values in before:
                layer.bind(keys[rows], values[rows])
        try:
            yield
        finally:
            for layer, keys, values in before:
                layer.bind(keys, values)

    def contiguous(self, start: int, stop: int) -> np.ndarray:
        """Columns `[start, stop)`: the same array for every layer of a forward."""
        if self._range is None or self._range[0] != (start, stop):
            self._range = (start, stop), np.arange(start, stop)
        return self._range[1]

    def place(self, columns: np.ndarray) -> None:
        """From here on in a scattered forward, updates write to `columns`."""
        self.columns = columns
        self.slots = torch.from_numpy(columns).to(self.own_layers[0].device)

    def set_length(self, length: int) -> None:
        """Columns [0, length) are filled."""
        for layer in self.layers:
            layer.length = length

    # what mask code and `generate` ask of every layer at every token; stock ones go through the layers each time

    @property
    def is_dummy(self) -> list[bool]:
        """Layers without rows, which masks are not made for."""
        return self._is_dummy

    @property
    def is_sliding(self) -> list[bool]:
        """Layers with a window."""
        return self._is_sliding

    @property
    def is_linear(self) -> list[bool]:
        """Layers of linear attention: none."""
        return self._is_linear

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the forward by itself: its shapes grow, so no."""
        return False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Write one layer's states and return all that its queries may attend to. Nothing is ever offloaded."""
        return self.layers[layer_idx].update(key_states, value_states)

    def __bool__(self) -> bool:
        """Whether it holds rows: Phi-3 drops a cache that is true when a long prompt begins."""
        return self.get_seq_length() > 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return self.own_layers[0].length if layer is None or isinstance(layer, NoRows) else layer.length

    def get_query_offset(self, layer_idx: int = 0):
        """Columns before the first query; in a scattered pass each query's own offset, `[queries]`."""
        if self.slots is None:
            return self.get_seq_length(layer_idx)
        offset = self.slots - torch.arange(len(self.slots), device=self.slots.device)
        return offset.as_subclass(QueryOffset)

    # -- what generate does to a cache --------------------------------------------------------------------------

    get_max_cache_shape = Cache.get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (rejected drafts); 0 does nothing."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 counts in a tensor
        if tokens_to_remove > 0:
            raise ValueError(f"`tokens_to_remove` must be 0 or negative, got {tokens_to_remove}.")
        super().crop(tokens_to_remove)
        surplus = sum(ids.shape[1] for ids in self.fed) - self.get_seq_length()
        while surplus > 0 and self.fed:
            last = self.fed.pop()
            if last.shape[1] > surplus:
                self.fed.append(last[:, :-surplus])
            surplus -= last.shape[1]

    def shared_columns(self, beam_idx: torch.LongTensor) -> int:
        """First column to reorder: the prompt's columns are equal where each beam stays with its prompt."""
        home = torch.arange(len(beam_idx), device=beam_idx.device) // self.group
        return self.prompt_columns if torch.equal(beam_idx // self.group, home) else 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the batch for beam search."""
        if self.shared_columns(beam_idx) == 0:
            self.altered = True
        super().reorder_cache(beam_idx)
        self.fed = [ids.index_select(0, beam_idx.to(ids.device)) for ids in self.fed]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        self._rebatch(torch.arange(self.extent.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some batch rows."""
        rows = torch.arange(self.extent.batch)
        self._rebatch(rows[indices.to(rows.device)])

    def _rebatch(self, rows: torch.Tensor) -> None:
        self.altered = True
        old = self.extent
        before = [(layer.keys, layer.values) for layer in self.own_layers]
        with self.store.lock:
            self.lay_over(self.store.allocate(self.shelf, old.rows, len(rows)))
        for layer, (keys, values) in zip(self.own_layers, before, strict=True):
            layer._keys[:, :, : layer.length] = keys.index_select(0, rows.to(keys.device))
            layer._values[:, :, : layer.length] = values.index_select(0, rows.to(values.device))
        self._leave(old)
