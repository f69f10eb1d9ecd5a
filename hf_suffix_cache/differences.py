"""Differences of rows taken, and added to other rows: compiled, with the torch reference beside it."""

import ctypes

import numpy as np
import torch

from .building import library
from .rope import RotarySpec, turn

KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # csrc/rows.cpp's
ARGUMENTS = {"rows_subtract": 20, "rows_add": 16}

Turn = tuple[torch.Tensor, torch.Tensor, RotarySpec] | None  # cosine and sine, `[rows, pairs]` in fp32, and the layout


class Places:
    """Row numbers, `[rows]`, on the host and on every device that asks for them."""

    def __init__(self, rows: np.ndarray):
        self.rows = np.ascontiguousarray(rows, dtype=np.int64)
        self.address = self.rows.ctypes.data
        self._on: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def on(self, device: torch.device) -> torch.Tensor:
        """The same on a device."""
        if device not in self._on:
            self._on[device] = torch.from_numpy(self.rows).to(device)
        return self._on[device]


def take_differences(
    fresh: torch.Tensor,
    place: Places,
    old: torch.Tensor,
    columns: Places,
    out: torch.Tensor,
    into: Places,
    turned: Turn,
) -> None:
    """
    `out[into[i]] = fresh[place[i]] - old[columns[i]]`, formed and turned in fp32.

    Args:
        fresh, old (`torch.Tensor`, `[kv_heads, rows, head_dim]`): Of one dtype.
        out (`torch.Tensor` of fp32, `[rows, kv_heads, head_dim]`, contiguous): Other rows keep what they hold.
        turned (tuple, *optional*): Row `into[i]` of its tables turns a row.
    """
    names = fresh, old
    if _compiled("rows_subtract", names, (place, columns, into), out, turned):
        return
    device = fresh.device
    new, before = fresh.index_select(1, place.on(device)), old.index_select(1, columns.on(device))
    out.index_copy_(0, into.on(device), _turned((new.float() - before.float()).transpose(0, 1), into, turned))


def add_rows(rows: torch.Tensor, columns: Places, estimate: torch.Tensor, which: Places, turned: Turn) -> None:
    """
    `rows[columns[i]] += estimate[which[i]]`, turned and summed in fp32.

    Args:
        rows (`torch.Tensor`, `[kv_heads, rows, head_dim]`): Written to; each column at most once.
        estimate (`torch.Tensor` of fp32, `[rows, kv_heads, head_dim]`, contiguous): What is added.
        turned (tuple, *optional*): Row `which[i]` of its tables turns a row.
    """
    if _compiled("rows_add", (rows,), (columns, which), estimate, turned):
        return
    device = rows.device
    change = _turned(estimate.index_select(0, which.on(device)), which, turned).transpose(0, 1)
    place = columns.on(device)
    rows.index_copy_(1, place, (rows.index_select(1, place).float() + change).to(rows.dtype))


def _turned(rows: torch.Tensor, which: Places, turned: Turn) -> torch.Tensor:
    """Rows `[rows, kv_heads, head_dim]` of fp32, each turned by its row of the tables."""
    if turned is None:
        return rows
    cosine, sine = (table.index_select(0, which.on(rows.device))[:, None] for table in turned[:2])
    return turn(rows, cosine, sine, turned[2])


def _compiled(name: str, memory: tuple, places: tuple, wide: torch.Tensor, turned: Turn) -> bool:
    """Call a kernel over rows `memory`; False, and nothing is done, if there is none for them."""
    first = memory[0]
    if first.device.type != "cpu" or first.dtype not in KINDS or any(part.stride(-1) != 1 for part in memory):
        return False
    if any(part.dtype != first.dtype for part in memory):
        return False
    kernels = library("rows")
    if kernels is None:
        return False
    kernel = getattr(kernels, name)
    if kernel.argtypes is None:
        kernel.argtypes, kernel.restype = [ctypes.c_int64] * ARGUMENTS[name], ctypes.c_int64
    size = first.itemsize
    ends = [number for part in memory for number in (part.data_ptr(), part.stride(0) * size, part.stride(1) * size)]
    tables = (0, 0, 0, 0, 0)
    if turned is not None:
        cosine, sine, spec = turned
        interleaved = int(spec.layout == "interleaved")
        tables = (cosine.data_ptr(), sine.data_ptr(), cosine.shape[1], spec.start, interleaved)
    arrays = [part.address for part in places]
    about = (*ends, first.shape[0], first.shape[2], KINDS[first.dtype], len(places[0]), *arrays)
    return kernel(*about, wide.data_ptr(), *tables, torch.get_num_threads()) == 0
