"""
The block pool: preallocated memory for key and value rows of one model geometry.

Memory is taken in slabs. A slab holds, for every group of layers with equal shape, one key and one value tensor
`[layers, kv_heads, rows, head_dim]`, so that a row has the same address in every layer. `references[block]` is the
only state: a block is free where it is 0. An extent is a contiguous range of blocks; a batch is one extent seen as
equally spaced rows of a strided tensor.
"""

from collections.abc import Sequence as Collection
from dataclasses import dataclass

import numpy as np
import torch

from ..config import PoolExhausted
from ..rope import RotarySpec

SLAB_BITS = 32  # an address is slab number << 32 | row


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
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class Budget:
    """Bytes that all pools of a store may take together."""

    def __init__(self, max_bytes: int | None):
        self.max_bytes = max_bytes
        self.taken = 0

    @property
    def left(self) -> int:
        """Bytes still to be had; before `max_bytes` is known, nothing."""
        return 0 if self.max_bytes is None else self.max_bytes - self.taken


class Slab:
    """One allocation: keys and values of `rows` rows for all layers, grouped by layer shape."""

    def __init__(self, number: int, rows: int, block_size: int, groups: dict[LayerShape, list[int]]):
        self.number = number
        self.rows = rows
        self.block_size = block_size
        self.references = np.zeros(rows // block_size, dtype=np.int32)
        self.keys: dict[LayerShape, torch.Tensor] = {}
        self.values: dict[LayerShape, torch.Tensor] = {}
        for shape, layers in groups.items():
            size = (len(layers), shape.kv_heads, rows)
            # inference tensors can't be written in a later grad-enabled forward, so leave inference mode here
            with torch.inference_mode(False):
                self.keys[shape] = torch.empty(*size, shape.key_dim, dtype=shape.dtype, device=shape.device)
                self.values[shape] = torch.empty(*size, shape.value_dim, dtype=shape.dtype, device=shape.device)

    def free_ranges(self) -> list[tuple[int, int]]:
        """Half-open ranges of free blocks."""
        edges = np.flatnonzero(np.diff(np.concatenate(([1], self.references, [1])) == 0))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    def fill(self, start: int, stop: int, value: float) -> None:
        """Write `value` into rows [start, stop) of every layer."""
        for tensor in (*self.keys.values(), *self.values.values()):
            tensor[:, :, start:stop] = value


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
        self.groups: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(self.shapes):
            self.groups.setdefault(shape, []).append(layer)
        self.row_bytes = sum(shape.row_bytes for shape in self.shapes)
        self.slabs: dict[int, Slab] = {}
        self._next_number = 0

    # -- accounting ---------------------------------------------------------------------------------------------

    @property
    def bytes_total(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.rows for slab in self.slabs.values()) * self.row_bytes

    @property
    def bytes_used(self) -> int:
        """Bytes of the blocks that something refers to."""
        blocks = sum(int(np.count_nonzero(slab.references)) for slab in self.slabs.values())
        return blocks * self.block_size * self.row_bytes

    def layer_tensors(self, slab: Slab, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer in a slab, `[kv_heads, slab rows, head_dim]` each."""
        shape = self.shapes[layer]
        index = self.groups[shape].index(layer)
        return slab.keys[shape][index], slab.values[shape][index]

    # -- allocation ---------------------------------------------------------------------------------------------

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
        slab, start, stop = max(self._free_ranges(), key=lambda found: found[2] - found[1], default=(None, 0, 0))
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

    def free_behind(self, extent: Extent) -> int:
        """Free rows directly behind an extent."""
        first = (extent.start + extent.batch * extent.rows) // self.block_size
        taken = np.flatnonzero(extent.slab.references[first:])
        blocks = int(taken[0]) if len(taken) else len(extent.slab.references) - first
        return blocks * self.block_size

    def allocate_private(self, rows: int, batch: int = 1) -> Extent:
        """An extent outside pool and budget, for a call that has to go without storing."""
        rows = self.round_up(rows)
        return Extent(Slab(-1, batch * rows, self.block_size, self.groups), 0, rows, batch)

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

    def retain_rows(self, addresses: np.ndarray) -> None:
        """Add one reference to every block that holds one of these rows."""
        self._count_rows(addresses, 1)

    def release_rows(self, addresses: np.ndarray) -> None:
        """Take one reference from every block that holds one of these rows."""
        self._count_rows(addresses, -1)

    def trim(self) -> int:
        """Give slabs without a used block back to the system; returns the bytes."""
        freed = 0
        for number in [number for number, slab in self.slabs.items() if not slab.references.any()]:
            freed += self.slabs.pop(number).rows * self.row_bytes
        self.budget.taken -= freed
        return freed

    def _free_ranges(self) -> list[tuple[Slab, int, int]]:
        """Every free range of blocks."""
        return [(slab, *free) for slab in self.slabs.values() for free in slab.free_ranges()]

    def _new_slab(self, rows: int) -> Slab:
        left = self.budget.left // self.row_bytes // self.block_size * self.block_size
        rows = self.round_up(rows)
        if left < rows:
            raise PoolExhausted(f"{rows} rows need {rows * self.row_bytes} bytes, {self.budget.left} are left.")
        # a sixteenth of the budget at a time: few slabs, and room behind each conversation to go on in place
        wanted = max(2 * rows, self.budget.max_bytes // 16 // self.row_bytes)
        try:
            slab = Slab(self._next_number, min(self.round_up(wanted), left), self.block_size, self.groups)
        except (
            RuntimeError,
            MemoryError,
        ) as error:  # out of memory, as torch says it
            raise PoolExhausted(f"the device has no room for another slab: {error}") from error
        self._next_number += 1
        self.slabs[slab.number] = slab
        self.budget.taken += slab.rows * self.row_bytes
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
            parts.append((self.slabs[number], addresses[index] & ((1 << SLAB_BITS) - 1), index))
        return parts
