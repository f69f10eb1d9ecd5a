"""
The block pool: preallocated memory for key and value rows of one model geometry.

Memory is taken in slabs. A slab holds, for every group of layers with equal shape, one key and one value tensor
`[layers, kv_heads, rows, head_dim]`, so that a row has the same address in every layer. `references[block]` is the
only state: a block is free where it is 0. An extent is a contiguous range of blocks; a batch is one extent seen as
equally spaced rows of a strided tensor. Stored rows need no extent: they are packed one behind the other, those of
several segments in one block. Cold slabs hold rows in a smaller dtype (`cold.py`), and no extents. Mapped slabs lie in
files (`mapped.py`): they are read only, take none of the budget, and go when nothing refers to their rows.
"""

import itertools
import weakref
from collections.abc import Sequence as Collection
from dataclasses import dataclass

import numpy as np
import torch

from ..config import PoolExhausted
from ..rope import RotarySpec
from .cold import cold_bytes, is_scaled, stored_dtype
from .paging import prefer_large_pages

SLAB_BITS = 32  # an address is slab number << 32 | row
MAPPED = 3 << 29  # numbers of mapped slabs begin here; all are below 2**31
SLAB_BYTES = 256 << 20  # a slab is not larger than this, or than twice what is asked for
COLD_SLAB_BYTES = 32 << 20  # cold slabs hold packed rows alone, so they may be small


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores per row, and how its keys rotate (`None`: they don't)."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    rotary: RotarySpec | None = None
    value_rotary: RotarySpec | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in this layer."""
        return self.stored_bytes(None)

    def stored_bytes(self, cold: torch.dtype | None) -> int:
        """Bytes of one row in this layer in a slab of a temperature: `None`, or the dtype of its rows."""
        return sum(cold_bytes(self.dtype, self.kv_heads, width, cold) for width in (self.key_dim, self.value_dim))


class Budget:
    """Bytes that all pools of a store may take together."""

    def __init__(self, max_bytes: int | None):
        self.max_bytes = max_bytes
        self.taken = 0
        self.refused = False  # the device had no memory for a slab, whatever `max_bytes` says; until it is asked again

    @property
    def left(self) -> int:
        """Bytes still to be had; before `max_bytes` is known, nothing."""
        return 0 if self.max_bytes is None or self.refused else self.max_bytes - self.taken


class Slab:
    """
    One allocation: keys and values of `rows` rows for all layers, grouped by layer shape, `[layers, kv_heads, rows,
    head_dim]` each.

    `cold` is the dtype of its rows where that may be smaller than the model's, else None. Rows of 8 bit have
    `key_scales` and `value_scales`, `[layers, kv_heads, rows]` in fp32: a row is its numbers times its scale.
    """

    def __init__(self, number: int, rows: int, block_size: int, groups: dict[LayerShape, list[int]], cold=None):
        self.number = number
        self.rows = rows
        self.block_size = block_size
        self.cold: torch.dtype | None = cold
        self.row_bytes = sum(len(layers) * shape.stored_bytes(cold) for shape, layers in groups.items())
        self.references = np.zeros(rows // block_size, dtype=np.int32)
        self.keys: dict[LayerShape, torch.Tensor] = {}
        self.values: dict[LayerShape, torch.Tensor] = {}
        self.key_scales: dict[LayerShape, torch.Tensor] = {}
        self.value_scales: dict[LayerShape, torch.Tensor] = {}
        for shape, layers in groups.items():
            size = (len(layers), shape.kv_heads, rows)
            kept = {"dtype": stored_dtype(shape.dtype, cold), "device": shape.device}
            # inference tensors can't be written in a later grad-enabled forward, so leave inference mode here
            with torch.inference_mode(False):
                self.keys[shape] = torch.empty(*size, shape.key_dim, **kept)
                self.values[shape] = torch.empty(*size, shape.value_dim, **kept)
                for tensor in (self.keys[shape], self.values[shape]):
                    prefer_large_pages(tensor)
                if is_scaled(shape.dtype, cold):
                    for scales in (self.key_scales, self.value_scales):
                        scales[shape] = torch.ones(size, dtype=torch.float32, device=shape.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return self.rows * self.row_bytes

    def tensors(self) -> list[torch.Tensor]:
        """All its tensors; rows are their dimension 2."""
        kinds = (self.keys, self.values, self.key_scales, self.value_scales)
        return [tensor for kind in kinds for tensor in kind.values()]

    def free_ranges(self) -> np.ndarray:
        """Half-open ranges of free blocks, `[ranges, 2]`."""
        return np.flatnonzero(np.diff(self.references == 0, prepend=False, append=False)).reshape(-1, 2)

    def fill(self, start: int, stop: int, value: float) -> None:
        """Write `value` into rows [start, stop) of every layer."""
        for tensor in self.tensors():
            if tensor.dtype is not torch.int8:  # those are worth their scales
                tensor[:, :, start:stop] = value

    def copy_from(self, other: "Slab", rows: np.ndarray, here: np.ndarray) -> None:
        """Copy rows of a slab of the same temperature, bit for bit; the two may be one where no row is in both."""
        for source, target in zip(other.tensors(), self.tensors(), strict=True):
            from_rows, to_rows = (torch.from_numpy(index).to(source.device) for index in (rows, here))
            target.index_copy_(2, to_rows, source.index_select(2, from_rows))


@dataclass(frozen=True, eq=False)
class Extent:
    """Rows [start, start + batch * rows) of a slab, seen as `batch` equally spaced runs of `rows` rows."""

    slab: Slab
    start: int
    rows: int
    batch: int = 1

    @property
    def pooled(self) -> bool:
        """Whether these rows lie in the pool (else: memory of this call alone, never stored)."""
        return self.slab.number >= 0

    def layer_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[batch, kv_heads, rows, head_dim]` view of one layer's slab tensor `[kv_heads, slab rows, head_dim]`."""
        window = tensor[:, self.start : self.start + self.batch * self.rows]
        return window.unflatten(1, (self.batch, self.rows)).transpose(0, 1)

    def addresses(self, row: int, columns: np.ndarray) -> np.ndarray:
        """Addresses of `columns` of batch row `row`."""
        return (self.slab.number << SLAB_BITS) + self.start + row * self.rows + columns

    def part(self, row: int, columns: int) -> "Extent":
        """The extent of batch row `row`, cut to the blocks that hold its first `columns` rows."""
        rows = -(-columns // self.slab.block_size) * self.slab.block_size
        return Extent(self.slab, self.start + row * self.rows, rows)


class BlockPool:
    """
    Blocks of rows for one geometry (one `LayerShape` per layer), reference counted.

    Args:
        shapes (sequence of `LayerShape`): One per layer.
        block_size (`int`): Rows in a block.
        budget (`Budget`): Shared by all pools of the store.
        poison (`bool`): Debug mode: freed rows are filled with NaN, so that a use after free shows in the output.
    """

    def __init__(self, shapes: Collection[LayerShape], block_size: int, budget: Budget, poison: bool = False):
        self.shapes = tuple(shapes)
        self.block_size = block_size
        self.budget = budget
        self.poison = poison
        self.generous = True  # whether slabs are larger than what they are made for
        self.groups: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(self.shapes):
            self.groups.setdefault(shape, []).append(layer)
        self.row_bytes = sum(shape.row_bytes for shape in self.shapes)
        self.slabs: dict[int, Slab] = {}
        self.mapped: dict[int, Slab] = {}  # `MappedSlab`s
        self._next_number = 0
        self._next_mapped = itertools.count(MAPPED)
        self._private: weakref.WeakSet[Slab] = weakref.WeakSet()
        self._open: dict[torch.dtype | None, tuple[Slab, int]] = {}  # where the next packed row goes, by temperature

    # -- accounting ---------------------------------------------------------------------------------------------

    @property
    def bytes_total(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.num_bytes for slab in self.slabs.values())

    @property
    def bytes_used(self) -> int:
        """Bytes of the blocks that something refers to."""
        return sum(
            int(np.count_nonzero(slab.references)) * self.block_size * slab.row_bytes for slab in self.slabs.values()
        )

    @property
    def blocks_used(self) -> int:
        """Blocks that something refers to."""
        return sum(int(np.count_nonzero(slab.references)) for slab in self.slabs.values())

    @property
    def bytes_private(self) -> int:
        """Bytes of the extents outside the pool that are alive."""
        return sum(slab.num_bytes for slab in list(self._private))

    def row_bytes_of(self, cold: torch.dtype | None) -> int:
        """Bytes of one row in slabs of a temperature."""
        return sum(shape.stored_bytes(cold) for shape in self.shapes)

    def layer_tensors(self, slab: Slab, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer in a slab, `[kv_heads, slab rows, head_dim]` each."""
        shape = self.shapes[layer]
        index = self.groups[shape].index(layer)
        return slab.keys[shape][index], slab.values[shape][index]

    def is_mapped(self, addresses: np.ndarray) -> bool:
        """Whether the rows of a segment lie in a file, and take none of the pool's memory."""
        return len(addresses) > 0 and int(addresses[0]) >> SLAB_BITS >= MAPPED

    def is_intact(self, addresses: np.ndarray) -> bool:
        """Whether the rows of a segment can be had. Those in a file are read for this, and may be damaged."""
        return not self.is_mapped(addresses) or self.mapped[int(addresses[0]) >> SLAB_BITS].is_intact()

    # -- allocation ---------------------------------------------------------------------------------------------

    def attach(self, slab: Slab) -> np.ndarray:
        """Take a mapped slab; returns the addresses of its rows, `[rows]`, with a reference for one segment."""
        slab.number = next(self._next_mapped)
        self.mapped[slab.number] = slab
        addresses = (slab.number << SLAB_BITS) + np.arange(slab.rows)
        self.retain_rows(addresses)
        return addresses

    def round_up(self, rows: int) -> int:
        """`rows` rounded up to whole blocks."""
        return -(-max(rows, 1) // self.block_size) * self.block_size

    def allocate(self, rows: int, batch: int = 1, spare: int = 0) -> Extent:
        """
        A referenced extent of `batch` runs of at least `rows` rows.

        It is taken from the middle of the largest free range, so that the extent before it has room to grow in place.
        With `spare`, that many rows behind it are free too, if a slab or the budget has them. Raises `PoolExhausted`
        where neither has room for the extent itself.
        """
        rows = self.round_up(rows)
        blocks, behind = batch * rows // self.block_size, spare // self.block_size
        slab, start, stop = self._largest_range()
        spare = spare if self.generous else 0
        for wanted in (batch * rows + spare, batch * rows):
            if stop - start < wanted // self.block_size:
                try:
                    slab = self._new_slab(wanted)
                    start, stop = 0, len(slab.references)
                except PoolExhausted:
                    if wanted == batch * rows:
                        raise
        left = stop - start - blocks
        if start > 0 and left > blocks // 2 + 2 * behind:
            start += left // 2
        slab.references[start : start + blocks] += 1
        return Extent(slab, start * self.block_size, rows, batch)

    def pack(self, counts: Collection[int], cold: torch.dtype | None = None) -> list[np.ndarray]:
        """
        Room for packed rows of several segments: addresses `[count]` for each, its blocks referenced once for each.

        The rows begin behind those that were packed last, and fill the smallest free ranges that hold them. Raises
        `PoolExhausted`, with nothing taken, where there is no room.
        """
        wanted = sum(counts)
        addresses = [np.empty(0, dtype=np.int64)]
        if cold in self._open:
            slab, row = self._open[cold]
            stop = min(row + wanted, self.round_up(row))
            addresses.append((slab.number << SLAB_BITS) + np.arange(row, stop))
        missing = wanted - len(addresses[-1])
        if missing:
            addresses += self.free_rows(missing, cold)
        joined = np.concatenate(addresses)
        parts = np.split(joined, np.cumsum(counts)[:-1])
        for part in parts:
            self.retain_rows(part)
        last, row = self.slabs[int(joined[-1]) >> SLAB_BITS], int(joined[-1]) & ((1 << SLAB_BITS) - 1)
        self._open.pop(cold, None)
        if (row + 1) % self.block_size:
            self._open[cold] = last, row + 1
        return parts

    def free_behind(self, extent: Extent) -> int:
        """Free rows directly behind an extent."""
        first = (extent.start + extent.batch * extent.rows) // self.block_size
        taken = np.flatnonzero(extent.slab.references[first:])
        blocks = int(taken[0]) if len(taken) else len(extent.slab.references) - first
        return blocks * self.block_size

    def free_rows(self, rows: int, cold: torch.dtype | None) -> list[np.ndarray]:
        """
        Addresses of free blocks' rows, in pieces, with no reference taken: of the smallest range that holds them all,
        else of the largest ones. Raises `PoolExhausted` where there is no room.
        """
        while True:
            found = [(slab, slab.free_ranges()) for slab in self.slabs.values() if slab.cold is cold]
            sizes = np.concatenate([np.empty(0, dtype=np.int64), *(np.diff(ranges)[:, 0] for _, ranges in found)])
            sizes *= self.block_size
            if sizes.sum() >= rows:
                break
            self._new_slab(rows - int(sizes.sum()), cold)
        starts = [(slab.number << SLAB_BITS) + ranges[:, 0] * self.block_size for slab, ranges in found]
        starts = np.concatenate(starts)
        holding = np.flatnonzero(sizes >= rows)
        order = holding[[np.argmin(sizes[holding])]] if len(holding) else np.argsort(-sizes, kind="stable")
        taken = np.minimum(sizes[order], np.maximum(rows - np.cumsum(sizes[order]) + sizes[order], 0))
        return [starts[place] + np.arange(size) for place, size in zip(order, taken.tolist(), strict=True) if size]

    def allocate_private(self, rows: int, batch: int = 1) -> Extent:
        """An extent outside pool and budget, for a call that has to go without storing."""
        rows = self.round_up(rows)
        slab = Slab(-1, batch * rows, self.block_size, self.groups)
        self._private.add(slab)
        return Extent(slab, 0, rows, batch)

    def grow_in_place(self, extent: Extent, rows: int) -> Extent | None:
        """
        The same extent with at least `rows` rows, if the blocks behind it are free. Every block of the result carries
        one more reference for the ones that `extent` had already, and one for the new ones.
        """
        rows = self.round_up(rows)
        slab, size = extent.slab, self.block_size
        first, old, new = extent.start // size, (extent.start + extent.rows) // size, (extent.start + rows) // size
        if not extent.pooled or extent.batch != 1 or new > len(slab.references) or slab.references[old:new].any():
            return None
        slab.references[first:new] += 1
        return Extent(slab, extent.start, max(rows, extent.rows))

    def retain(self, extent: Extent) -> None:
        """Add a reference to every block of an extent."""
        self._count(extent, 1)

    def release(self, extent: Extent) -> None:
        """Take a reference from every block of an extent."""
        self._count(extent, -1)

    def release_blocks(self, slab: Slab, blocks: np.ndarray) -> None:
        """Take one reference from each of these blocks of a slab."""
        self._change(slab, blocks, -1)

    def retain_rows(self, addresses: np.ndarray) -> None:
        """Add one reference to every block that holds one of these rows."""
        self._count_rows(addresses, 1)

    def release_rows(self, addresses: np.ndarray) -> None:
        """Take one reference from every block that holds one of these rows."""
        self._count_rows(addresses, -1)

    def trim(self, keep_largest: bool = False) -> int:
        """
        Give slabs without a used block back to the system, except the largest of the warm ones (`keep_largest`), which
        the next call is to find; returns the bytes.
        """
        empty = [slab for slab in self.slabs.values() if not slab.references.any()]
        if keep_largest:
            warm = [slab for slab in empty if slab.cold is None]
            kept = max(warm, key=lambda slab: slab.rows, default=None)
            empty = [slab for slab in empty if slab is not kept]
        for slab in empty:
            del self.slabs[slab.number]
        freed = sum(slab.num_bytes for slab in empty)
        self.budget.taken -= freed
        self.budget.refused = self.budget.refused and not freed
        return freed

    def _largest_range(self) -> tuple[Slab | None, int, int]:
        """The largest free range of blocks for an extent: slab, start, stop."""
        best = (None, 0, 0)
        for slab in self.slabs.values():
            ranges = slab.free_ranges()
            if slab.cold is None and len(ranges):
                start, stop = ranges[np.argmax(ranges[:, 1] - ranges[:, 0])].tolist()
                best = max(best, (slab, start, stop), key=lambda found: found[2] - found[1])
        return best

    def _new_slab(self, rows: int, cold: torch.dtype | None = None) -> Slab:
        row_bytes = self.row_bytes_of(cold)
        left = max(0, self.budget.left) // row_bytes // self.block_size * self.block_size
        rows = self.round_up(rows)
        if left < rows:
            raise PoolExhausted(f"{rows} rows need {rows * row_bytes} bytes, {self.budget.left} are left.")
        # a sixteenth of the budget at a time: few slabs, and room behind each conversation to go on in place
        if cold is None and not self.generous:
            wanted = rows
        elif cold is None:
            wanted = max(2 * rows, min(self.budget.max_bytes // 16, SLAB_BYTES) // row_bytes)
        else:
            wanted = max(rows, min(self.budget.max_bytes // 64, COLD_SLAB_BYTES) // row_bytes)
        try:
            slab = Slab(self._next_number, min(self.round_up(wanted), left), self.block_size, self.groups, cold)
        except (RuntimeError, MemoryError) as error:  # out of memory, as torch says it
            self.budget.refused = True
            raise PoolExhausted(f"the device has no room for another slab: {error}") from error
        self._next_number += 1
        self.slabs[slab.number] = slab
        self.budget.taken += slab.num_bytes
        if self.poison:
            slab.fill(0, slab.rows, float("nan"))
        return slab

    def _count(self, extent: Extent, change: int) -> None:
        if extent.pooled:
            first = extent.start // self.block_size
            last = (extent.start + extent.batch * extent.rows) // self.block_size
            self._change(extent.slab, np.arange(first, last), change)

    def _count_rows(self, addresses: np.ndarray, change: int) -> None:
        for slab, rows, _ in self.by_slab(addresses):
            self._change(slab, np.unique(rows // self.block_size), change)

    def _change(self, slab: Slab, blocks: np.ndarray, change: int) -> None:
        slab.references[blocks] += change
        assert (slab.references[blocks] >= 0).all(), "a block was released more often than it was retained"
        if slab.number >= MAPPED:
            if not slab.references.any():
                del self.mapped[slab.number]
            return
        if change < 0:  # a block that is free may hold anything next
            for cold, (opened, row) in list(self._open.items()):
                if opened is slab and slab.references[row // self.block_size] == 0:
                    del self._open[cold]
        if self.poison and change < 0:
            for block in blocks[slab.references[blocks] == 0].tolist():
                slab.fill(block * self.block_size, (block + 1) * self.block_size, float("nan"))

    # -- copying ------------------------------------------------------------------------------------------------

    def by_slab(self, addresses: np.ndarray) -> list[tuple[Slab, np.ndarray, np.ndarray]]:
        """Split addresses by slab: (slab, rows in it, indices into `addresses`)."""
        numbers = addresses >> SLAB_BITS
        parts = []
        for number in np.unique(numbers).tolist():
            index = np.flatnonzero(numbers == number)
            slab = (self.mapped if number >= MAPPED else self.slabs)[number]
            parts.append((slab, addresses[index] & ((1 << SLAB_BITS) - 1), index))
        return parts
