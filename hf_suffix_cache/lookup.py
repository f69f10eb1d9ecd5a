"""The hash table of kernels.py in compiled code: on the CPU over the same memory, and in a GPU's own memory."""

import ctypes

import numpy as np
import torch

from .building import library
from .kernels import _FREE, _GIVEN, _LIVE, HashTable, capacity_for, checked_pairs, unique_pairs

_POINTERS = ("heads", "pairs", "keys", "values", "next", "prev", "alive", "used")


class TableStruct(ctypes.Structure):
    """`lookup::Table` of csrc/lookup.cuh: addresses of the arrays, and two sizes."""

    _fields_ = [(name, ctypes.c_void_p) for name in _POINTERS] + [
        ("capacity", ctypes.c_int64),
        ("nodes", ctypes.c_int64),
    ]


def make_table(device: str | torch.device = "cpu", load: float = 0.5):
    """
    A hash table in the memory of a device.

    Args:
        device (`str` or `torch.device`, *optional*): Where the model's rows lie. Devices that there is no kernel for
            have their table in the host's memory: prompts are planned there.
        load (`float`, *optional*, defaults to 0.5): Most nodes per slot.

    Returns:
        `CompiledTable`, or `DeviceTable` for a CUDA device whose kernel is built.
    """
    device = torch.device(device)
    if device.type == "cuda" and library("lookup", "cuda") is not None:
        return DeviceTable(device, load)
    return CompiledTable(load)


class CompiledTable(HashTable):
    """A `HashTable` that compiled code works on as soon as it is built. Either may take over from the other."""

    def insert(self, keys: np.ndarray, values: np.ndarray) -> None:
        """As `HashTable.insert`."""
        compiled = host_library()
        if compiled is None:
            return super().insert(keys, values)
        keys, values = checked_pairs(keys, values)
        done = 0
        while done < len(keys):
            free, counts = self._free.ctypes.data, self._counts.ctypes.data
            part = keys[done:], values[done:]
            where = [array.ctypes.data for array in part]
            done += compiled.lookup_insert(self._struct(), *where, len(part[0]), free, counts, self._max_used())
            if done < len(keys):
                self._rehash(len(keys) - done)

    def remove(self, keys: np.ndarray, values: np.ndarray) -> None:
        """As `HashTable.remove`."""
        compiled = host_library()
        if compiled is None:
            return super().remove(keys, values)
        keys, values = checked_pairs(keys, values)
        before = len(self)
        free, counts = self._free.ctypes.data, self._counts.ctypes.data
        compiled.lookup_remove(self._struct(), keys.ctypes.data, values.ctypes.data, len(keys), free, counts)
        if before and not len(self):
            self._reset(capacity_for(0, self._load))

    def probe(self, keys: np.ndarray, limit: int) -> np.ndarray:
        """As `HashTable.probe`."""
        compiled = host_library()
        if compiled is None:
            return super().probe(keys, limit)
        keys = np.ascontiguousarray(keys, dtype=np.uint64)
        found = np.empty((len(keys), limit), dtype=np.int64)
        compiled.lookup_probe(self._struct(), keys.ctypes.data, len(keys), limit, found.ctypes.data, None)
        return found

    def _place_all(self, count: int) -> None:
        compiled = host_library()
        if compiled is None:
            return super()._place_all(count)
        compiled.lookup_rebuild(self._struct(), count, None)

    def _struct(self):
        """Where the arrays lie now: every growth brings new ones."""
        arrays = (self._heads, self._pair_slots, self._keys, self._values, self._next, self._prev, self._alive)
        addresses = [array.ctypes.data for array in (*arrays, self._used)]
        return ctypes.byref(TableStruct(*addresses, self.capacity, len(self._keys)))


class DeviceTable:
    """
    A `HashTable` in a device's memory, with the same answers. Keys and values come from the host, and answers go
    there: that is where prompts are planned. Every method has finished on the device when it returns, so that the next
    caller may come from another thread with another stream.

    Args:
        device (`str` or `torch.device`): A CUDA device, or the CPU (to test what is around the kernels).
        load (`float`, *optional*, defaults to 0.5): Most nodes per slot.
    """

    def __init__(self, device: str | torch.device, load: float = 0.5):
        self.device = torch.device(device)
        self._compiled = _declared("lookup", self.device.type)
        if self._compiled is None:
            raise RuntimeError(f"the lookup kernel for {self.device.type} is not built: run `hf-suffix-cache build`.")
        self._load = load
        self.rebuilds = 0
        self._reset(capacity_for(0, load))

    def __len__(self) -> int:
        """Number of pairs."""
        return self._counts[_LIVE]

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return len(self._heads)

    def insert(self, keys: np.ndarray, values: np.ndarray) -> None:
        """As `HashTable.insert`."""
        keys, values = self._moved(*unique_pairs(*checked_pairs(keys, values)))
        absent = self._find(keys, values) < 0
        keys, values = keys[absent], values[absent]
        if not len(keys):
            return
        room = min(len(self._keys) - len(self), int(self.capacity * (1 + self._load) / 2) - int(self._used.max()))
        if len(keys) > room:
            self._rehash(len(keys))
        free, given, _ = self._counts
        reused = min(free, len(keys))
        fresh = torch.arange(given, given + len(keys) - reused, device=self.device)
        nodes = torch.cat([self._free[free - reused : free], fresh])
        self._keys[nodes], self._values[nodes], self._alive[nodes] = keys, values, True
        by_key = nodes[torch.argsort(keys, stable=True)]
        self._run("lookup_enter", by_key, len(by_key))
        self._counts = [free - reused, given + len(keys) - reused, len(self) + len(keys)]

    def remove(self, keys: np.ndarray, values: np.ndarray) -> None:
        """As `HashTable.remove`."""
        slots = self._find(*self._moved(*unique_pairs(*checked_pairs(keys, values))))
        slots = slots[slots >= 0]
        if not len(slots):
            return
        if len(slots) == len(self):
            return self._reset(capacity_for(0, self._load))
        dead = self._pair_slots[slots]
        self._run("lookup_drop", slots, dead, len(slots))
        free = self._counts[_FREE]
        self._free[free : free + len(dead)] = dead
        self._counts[_FREE] += len(dead)
        self._counts[_LIVE] -= len(dead)

    def probe(self, keys: np.ndarray, limit: int) -> np.ndarray:
        """As `HashTable.probe`."""
        keys = np.ascontiguousarray(keys, dtype=np.uint64).view(np.int64)
        asked = torch.from_numpy(keys).to(self.device)
        found = torch.empty((len(keys), limit), dtype=torch.int64, device=self.device)
        self._run("lookup_probe", asked, len(keys), limit, found)
        return found.cpu().numpy()

    def _reset(self, capacity: int) -> None:
        nodes = int(capacity * self._load)

        def filled(size, value, dtype=torch.int64):
            return torch.full((size,), value, dtype=dtype, device=self.device)

        self._heads, self._pair_slots = filled(capacity, -1), filled(capacity, -1)
        self._keys, self._values = filled(nodes, 0), filled(nodes, -1)  # keys: bits of uint64
        self._next, self._prev, self._free = filled(nodes, -1), filled(nodes, -1), filled(nodes, -1)
        self._alive = filled(nodes, False, torch.bool)
        self._used = filled(2, 0)
        self._counts = [0, 0, 0]  # entries of `_free`, numbers ever given out, living nodes

    def _rehash(self, extra: int) -> None:
        """As `HashTable._rehash`."""
        live = self._alive.nonzero().squeeze(1)
        count = len(live)
        renumber = torch.full((len(self._alive) + 1,), -1, dtype=torch.int64, device=self.device)
        renumber[live] = torch.arange(count, device=self.device)
        keys, values = self._keys[live], self._values[live]
        following, previous = renumber[self._next[live]], renumber[self._prev[live]]
        self._reset(capacity_for(count + extra, self._load))
        self.rebuilds += 1
        self._counts[_GIVEN] = self._counts[_LIVE] = count
        self._keys[:count], self._values[:count], self._alive[:count] = keys, values, True
        self._next[:count], self._prev[:count] = following, previous
        self._run("lookup_rebuild", count)

    def _moved(self, keys: np.ndarray, values: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(self.device) for array in (keys.view(np.int64), values)]

    def _find(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        slots = torch.empty(len(keys), dtype=torch.int64, device=self.device)
        self._run("lookup_find", keys, values, len(keys), slots)
        return slots

    def _run(self, name: str, *arguments) -> None:
        """Call a kernel with the table and these tensors and sizes, and wait for it."""
        arrays = (self._heads, self._pair_slots, self._keys, self._values, self._next, self._prev, self._alive)
        addresses = [array.data_ptr() for array in (*arrays, self._used)]
        table = ctypes.byref(TableStruct(*addresses, self.capacity, len(self._keys)))
        plain = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments]
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                stream = torch.cuda.current_stream()
                error = getattr(self._compiled, name)(table, *plain, stream.cuda_stream)
                stream.synchronize()
        else:
            error = getattr(self._compiled, name)(table, *plain, None)
        if error:
            raise RuntimeError(f"{name} failed on {self.device} with CUDA error {error}.")


def find_spans(
    table,
    hashes: np.ndarray,
    ids: np.ndarray,
    first: int,
    min_match: int,
    check: int,
    window: int,
    max_candidates: int,
    tokens: np.ndarray,
) -> np.ndarray | None:
    """
    Common runs of a prompt and of stored text, by compiled code; `WindowIndex` holds the reference.

    Args:
        table (`CompiledTable` or `DeviceTable`): Places in `tokens` by the hash of the window there.
        hashes (`np.ndarray` of uint64, `[len(ids) - first - window + 1]`): Of the windows of `ids[first:]`.
        ids (`np.ndarray` of int64, `[n]`): The prompt.
        first (`int`), min_match (`int`): As for `WindowIndex.find_runs`.
        check (`int`): A hit that is in no common run of so many tokens is dropped.
        window (`int`), max_candidates (`int`): As for `WindowIndex`.
        tokens (`np.ndarray` of int64): The stored text, with marks between its pieces.

    Returns:
        `np.ndarray` of int64, `[runs, 3]`: Start, stop and place in `tokens`, in the order in which they were found.
        None where there is no kernel, or it could not do it: then the reference does.
    """
    compiled = host_library()
    if compiled is None:
        return None
    ids, hashes = np.ascontiguousarray(ids, dtype=np.int64), np.ascontiguousarray(hashes, dtype=np.uint64)
    found, place = None, None
    if isinstance(table, CompiledTable):
        place = table._struct()
    else:
        found = table.probe(hashes, max_candidates)
    room = len(ids) * max_candidates // min_match + 1  # no position is in more than `max_candidates` runs
    spans = np.empty((room, 3), dtype=np.int64)
    count = compiled.lookup_spans(
        place,
        hashes.ctypes.data,
        None if found is None else found.ctypes.data,
        max_candidates,
        ids.ctypes.data,
        len(ids),
        first,
        min_match,
        check,
        window,
        max_candidates,
        tokens.ctypes.data,
        len(tokens),
        spans.ctypes.data,
        room,
    )
    return spans[:count] if count >= 0 else None


def host_library() -> ctypes.CDLL | None:
    """The compiled code for the host's memory, or None."""
    return _declared("lookup", "cpu")


def _declared(name: str, device: str) -> ctypes.CDLL | None:
    """The library with its functions' types set."""
    compiled = library(name, device)
    if compiled is not None and not hasattr(compiled, "declared"):
        declare(compiled)
    return compiled


def declare(compiled: ctypes.CDLL) -> None:
    """Set the types of what a library of csrc/lookup.cuh has; a GPU's lacks what works on the host's memory only."""
    for function, (result, arguments) in _SIGNATURES.items():
        if hasattr(compiled, function):
            one = getattr(compiled, function)
            one.restype = _TYPES[result]
            one.argtypes = [_TYPES[letter] for letter in arguments]
    compiled.declared = True


_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "-": None}  # pointer, size, error, nothing
_SIGNATURES = {
    "lookup_probe": ("i", "ppnnpp"),
    "lookup_find": ("i", "pppnpp"),
    "lookup_enter": ("i", "ppnp"),
    "lookup_drop": ("i", "pppnp"),
    "lookup_rebuild": ("i", "pnp"),
    "lookup_insert": ("n", "pppnppn"),
    "lookup_remove": ("-", "pppnpp"),
    "lookup_spans": ("n", "pppnpnnnnnnpnpn"),
}
_HOST_ONLY = ("lookup_insert", "lookup_remove", "lookup_spans")
