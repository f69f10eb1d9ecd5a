"""GPU check: building, the lookup table, copying of rows, and attention by flash-attn."""

import contextlib
import os
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_part import NotRun, Part
from hf_suffix_cache import building, flash
from hf_suffix_cache.flash import PAGE_ROWS, flash_available, flash_decode, flash_scattered
from hf_suffix_cache.kernels import HashTable, splitmix64
from hf_suffix_cache.lookup import DeviceTable
from hf_suffix_cache.masks import causal_by_position
from hf_suffix_cache.rope import RotarySpec
from hf_suffix_cache.store.gather import copy_rows
from hf_suffix_cache.store.pool import BlockPool, Budget, LayerShape

BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def build(part: Part) -> None:
    """Every kernel, from nothing or from the cache folder."""
    started = time.perf_counter()
    need_kernels(part)
    part.results().add("build", "all kernels", time.perf_counter() - started, "s", 1, note="0 where they were built")
    for name in building.kernel_names():
        part.require(building.library(name, part.device.type) is not None, f"{name} is not built for {part.device}")


def need_kernels(part: Part) -> None:
    """Build what is missing; a part that works on kernels is not run where that can't be."""
    missing = building.missing_tools()
    if missing:
        raise NotRun(f"no {', '.join(missing)} to build kernels with")
    for name, path in building.build().items():
        print(f"{name}: {path}")


# -- lookup -----------------------------------------------------------------------------------------------------------


def lookup(part: Part) -> None:
    """The table in the device's memory gives the answers of the reference, also where everything collides."""
    need_kernels(part)
    random, count = np.random.default_rng(part.options.seed), part.size(1_000_000, 20_000)
    keys = splitmix64(random.integers(0, count // 2, count).astype(np.uint64))  # most keys have several values
    values = np.arange(count)
    for load in (0.5, 0.9):
        table, reference = DeviceTable(part.device, load), HashTable(load)
        for one in (table, reference):
            one.insert(keys, values)
            one.remove(keys[::3], values[::3])
            one.insert(keys[::6], values[::6] + count)
        asked = np.concatenate([keys, splitmix64(keys)])
        for limit in (1, 8):
            same = np.array_equal(table.probe(asked, limit), reference.probe(asked, limit))
            part.require(same and len(table) == len(reference), f"load {load}, {limit} values a key: other answers")
        part.require(
            not np.array_equal(table.probe(asked, 1), table.probe(asked[::-1], 1)), "control: it always agrees"
        )
    crowd = np.full(part.size(10_000, 500), 7, dtype=np.uint64)
    for one in (table, reference):
        one.insert(crowd, np.arange(len(crowd)) + 2 * count)
    part.require(np.array_equal(table.probe(crowd[:1], 500), reference.probe(crowd[:1], 500)), "values of one key")
    hashes = keys[: part.size(131_072, 1_000)]
    took = part.median(lambda: table.probe(hashes, 8))
    part.results().add(f"lookup of {len(hashes)} hashes", "probe", took * 1e3, "ms", part.options.n, note="8 a hash")


# -- rows -------------------------------------------------------------------------------------------------------------


def rows(part: Part) -> None:
    """Rows gathered and turned by the kernel have the bits of the reference; as fast as memory is?"""
    need_kernels(part)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)[: part.size(3, 1)]:
        pool, source = filled_pool(part, dtype)
        cases = {
            "one run in place": (np.arange(source.rows), np.zeros(source.rows, dtype=np.int64)),
            "one run moved": (np.arange(source.rows), np.full(source.rows, 137)),
            "runs of 200 moved": runs_of(source.rows, part.size(200, 20), part.options.seed),
            "runs of 32 moved": runs_of(source.rows, part.size(32, 2), part.options.seed),
            "single rows moved": runs_of(source.rows, 1, part.options.seed),
        }
        for case, (columns, shifts) in cases.items():
            measure_rows(part, pool, source, columns, shifts, case, dtype)


def filled_pool(part: Part, dtype: torch.dtype):
    """A pool with the layers of an 8B model, and an extent of random rows."""
    layers, heads, dim = (2, 2, 16) if part.dry else (32, 8, 128)
    spec = RotarySpec("table", "half", 1, 0, dim)
    shape = LayerShape(heads, dim, dim, dtype, part.device, spec)
    count = part.size(8192, 256) * 2 // dtype.itemsize
    pool = BlockPool([shape] * layers, 16, Budget(5 * count * layers * shape.row_bytes))
    source = pool.allocate(count)
    for tensor in (*source.slab.keys.values(), *source.slab.values.values()):
        tensor.normal_()
    return pool, source


def runs_of(count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """All rows in runs of `length` that come in another order, each run with a shift of its own."""
    random = np.random.default_rng(seed)
    order = random.permutation(count // length)
    columns = (order[:, None] * length + np.arange(length)).ravel()
    return columns, np.repeat(random.integers(-4000, 4000, len(order)), length)


def measure_rows(part: Part, pool: BlockPool, source, columns, shifts, case: str, dtype: torch.dtype) -> None:
    """One way of copying: its bits, and its time beside that of a plain copy of as many bytes."""
    target = pool.allocate(source.rows)
    shape = pool.shapes[0]
    pairs = shape.key_dim // 2
    frequencies = {shape.rotary: 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)}
    tensors = [tensor[:, :, target.start : target.start + target.rows] for tensor in target.slab.tensors()]

    def copy():
        copy_rows(pool, source.addresses(0, columns), target, 0, np.arange(len(columns)), shifts, frequencies)

    gone = []
    for way in (reference_only, contextlib.nullcontext):
        for tensor in tensors:
            tensor.zero_()
        with way():
            copy()
        gone.append([tensor.clone().view(BITS[dtype.itemsize]) for tensor in tensors])
    part.require(all(bool(one.any()) for one in gone[0]), f"{case}, {dtype}: the reference copied nothing")
    same = all(torch.equal(one, other) for one, other in zip(*gone, strict=True))
    part.require(same, f"{case}, {dtype}: other bits than the reference")
    del gone
    took, moved = part.median(copy), 2 * len(columns) * pool.row_bytes
    plain = [tensor[:, :, source.start : source.start + len(columns)] for tensor in source.slab.tensors()]
    goals = [tensor[:, :, : len(columns)] for tensor in tensors]
    memcpy = part.median(lambda: [goal.copy_(one) for goal, one in zip(goals, plain, strict=True)])
    with reference_only():
        slow = part.median(copy)
    results = part.results("8B shapes", str(dtype).removeprefix("torch."))
    note = f"{moved / memcpy / 1e9:.0f} GB/s by torch's copy, {moved / slow / 1e9:.0f} by the reference"
    results.add(f"rows: {case}", "read and written", moved / took / 1e9, "GB/s", part.options.n, note=note)
    results.add(f"rows: {case}", "time / torch's copy", took / memcpy, "", part.options.n)
    pool.release(target)


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """No kernels inside."""
    before = os.environ.get("HF_SUFFIX_CACHE_KERNELS")
    os.environ["HF_SUFFIX_CACHE_KERNELS"] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_SUFFIX_CACHE_KERNELS"]
        else:
            os.environ["HF_SUFFIX_CACHE_KERNELS"] = before


# -- flash-attn ---------------------------------------------------------------------------------------------------


def need_flash(part: Part) -> None:
    """A part that works on flash-attn is not run without it."""
    if flash.library() is None:
        raise NotRun("flash-attn is not installed, or can't be used")
    if not flash_available(part.device):
        raise NotRun(f"flash-attn does not run on {part.device}: it wants a GPU of sm_80 or newer")


def flash_attention(part: Part) -> None:
    """Decoding and scattered rows by flash-attn: as near to attention in fp32 as sdpa is, and how much faster."""
    need_flash(part)
    heads, kv_heads, dim = (4, 2, 16) if part.dry else (32, 8, 128)
    dtype = flash.library().dtypes[-1]
    for context in (1024, 4096, 32768) if not part.dry else (64,):
        key, value = attended(part, context, 1, kv_heads, dim, dtype)
        query = torch.randn(1, heads, 1, dim, device=part.device, dtype=dtype)
        columns = np.array([context - 1])
        compare(part, f"flash: decode at {context}", query, key, value, columns, decode)
    context, count = part.size(4096, 64), part.size(608, 12)
    for length in (1, 16, 64, count) if not part.dry else (1, 3, 12):
        starts = np.linspace(0, context - length, count // length).astype(int)
        columns = (starts[:, None] + np.arange(length)).ravel()
        query = torch.randn(1, heads, len(columns), dim, device=part.device, dtype=dtype)
        key, value = attended(part, context, 1, kv_heads, dim, dtype)
        compare(part, f"flash: {len(columns)} rows in runs of {length}", query, key, value, columns, flash_scattered)
    check_more(part, heads, kv_heads, dim, dtype)


def decode(query, key, value, columns) -> torch.Tensor | None:
    """As `flash_scattered` is called: the columns are the last ones."""
    return flash_decode(query, key, value)


def check_more(part: Part, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Windows, left pads and batches, scattered and decoded."""
    context, pads = part.size(700, 40), np.array([0, part.size(300, 9)])
    key, value = attended(part, context, 2, kv_heads, dim, dtype)
    columns = np.concatenate([np.arange(3, 9), [context // 2], np.arange(context - 6, context)])
    query = torch.randn(2, heads, len(columns), dim, device=part.device, dtype=dtype)
    for window in (None, part.size(100, 7)):
        got = flash_scattered(query, key, value, columns, None, window, None, pads)
        check_error(part, f"scattered, window {window}", got, query, key, value, columns, window, pads)
        last = query[:, :, -4:]
        got = flash_decode(last, key, value, None, window, None, pads)
        check_error(part, f"decode, window {window}", got, last, key, value, columns[-4:], window, pads)


def attended(part: Part, context: int, batch: int, kv_heads: int, dim: int, dtype: torch.dtype):
    """Keys and values as a view has them: of one layer of a slab."""
    shape = LayerShape(kv_heads, dim, dim, dtype, part.device)
    pool = BlockPool([shape, shape], 16, Budget(1 << 40))
    extent = pool.allocate_private(context + PAGE_ROWS, batch)  # the last page has to lie in memory
    views = []
    for tensor in pool.layer_tensors(extent.slab, 1):
        tensor.normal_()
        views.append(extent.layer_view(tensor)[:, :, :context])
    return views


def in_full(query, key, value, columns, window=None, pads=None) -> torch.Tensor:
    """Attention in fp32, `[batch, queries, heads, dim]`; NaN for queries that see nothing."""
    keys = torch.arange(key.shape[2], device=key.device)
    valid = None if pads is None else keys >= torch.from_numpy(pads).to(key.device)[:, None]
    mask = causal_by_position(torch.from_numpy(columns).to(key.device), keys, window, valid)
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.float().repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query.float() @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value).transpose(1, 2)


def check_error(part: Part, case: str, got, query, key, value, columns, window=None, pads=None) -> float:
    """Largest difference to attention in fp32; half precision may err by 1 % of the largest value."""
    part.require(got is not None, f"{case}: flash-attn was not used")
    want = in_full(query, key, value, columns, window, pads)
    seen = ~want.isnan()
    part.require(bool((got[~seen] == 0).all()), f"{case}: a query that sees nothing got something")
    error = float((got.float() - want)[seen].abs().max())
    part.require(error < 0.01 * float(want[seen].abs().max()), f"{case}: off by {error:.2e}")
    return error


def compare(part: Part, case: str, query, key, value, columns, function) -> None:
    """Errors and times of flash-attn and of sdpa."""
    mask = None
    if len(columns) > 1:
        keys = torch.arange(key.shape[2], device=key.device)
        mask = causal_by_position(torch.from_numpy(columns).to(key.device), keys)

    def sdpa():
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    error = check_error(part, case, function(query, key, value, columns), query, key, value, columns)
    other = check_error(part, f"{case}, sdpa", sdpa(), query, key, value, columns)
    part.require(error <= 2 * other + 1e-3, f"{case}: error {error:.2e}, sdpa's {other:.2e}")
    repeats = part.size(50, 1)  # one call is too short for a clock

    def often(call):
        return lambda: [call() for _ in range(repeats)]

    took = part.median(often(lambda: function(query, key, value, columns))) / repeats
    slow = part.median(often(sdpa)) / repeats
    results = part.results("8B shapes", str(query.dtype).removeprefix("torch."))
    results.add(case, "time", took * 1e3, "ms", part.options.n, note=f"sdpa {slow * 1e3:.3f} ms")
    results.add(case, "time / sdpa", took / slow, "", part.options.n, note=f"errors {error:.1e} and {other:.1e}")
