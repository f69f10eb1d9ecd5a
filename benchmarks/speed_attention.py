"""
Attention of grouped heads against transformers' own sdpa, without a model: microseconds of one layer, by dtype,
context, rows and heads. The rule in `hf_suffix_cache/grouped.py` stands on these figures. Run it alone on the machine.

    python -m benchmarks.speed_attention --threads 2
    python -m benchmarks.speed_attention --threads 1 --n 5 --contexts 4096 --output .cache/look

`rows` 1 is decoding (no mask). More rows lie scattered over the context, the last of them at its end, under a bool
mask as the model makes it. Each layer that decodes has keys and values of its own, as in a model, so that the
processor's caches do not keep them.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.common import Options, Results, alternate, parse, seconds
from hf_suffix_cache.grouped import (
    PACKED_ROWS,
    decode_attention,
    grouped_attention,
    rows_of_block,
    scattered_attention,
    visible_bounds,
)

LAYOUTS = {
    "9q/3kv/d64": (9, 3, 64),
    "4q/1kv/d256": (4, 1, 256),
    "32q/8kv/d128": (32, 8, 128),
    "8q/8kv/d64": (8, 8, 64),
}
SPARE_ROWS = 256  # of the buffers that keys and values are views of
ALL_BYTES = 256 << 20  # of the layers' keys and values together
MOST_SCORES = 40_000_000  # heads x rows x keys of one layer that are worth measuring here


@dataclass
class AttentionOptions(Options):
    """`contexts` and `rows`, by comma; `n` pairs of timings for each case."""

    n: int = 9
    contexts: str = "128,512,1024,4096,16384,32768"
    rows: str = "1,2,8,64,256,700"


def main() -> None:
    options = parse(AttentionOptions, __doc__)
    torch.set_grad_enabled(False)
    for dtype in ("float32", "bfloat16"):
        results = Results("speed", "no model", dtype, options)
        for name, layout in LAYOUTS.items():
            for context in map(int, options.contexts.split(",")):
                for rows in map(int, options.rows.split(",")):
                    if rows <= context // 4 and layout[0] * rows * context <= MOST_SCORES:
                        measure(results, name, layout, context, rows, getattr(torch, dtype))


def measure(results: Results, name: str, layout: tuple, context: int, rows: int, dtype: torch.dtype) -> None:
    """One case: our time over stock's, both in microseconds a layer, and whether the rule would take ours."""
    heads, kv_heads, dim = layout
    generator = torch.Generator().manual_seed(results.options.seed)
    size = 2, 1, kv_heads, context + SPARE_ROWS, dim
    layer_bytes = 2 * kv_heads * context * dim * dtype.itemsize
    layers = [
        torch.randn(size, generator=generator).to(dtype)[:, :, :, :context]
        for _ in range(max(1, min(30 if rows == 1 else 2, ALL_BYTES // layer_bytes)))
    ]
    query = torch.randn(1, rows, heads, dim, generator=generator).to(dtype).transpose(1, 2)
    chosen = np.random.default_rng(results.options.seed).choice(context - 1, rows - 1, replace=False)
    columns = torch.from_numpy(np.sort(np.append(chosen, context - 1)))
    mask = None if rows == 1 else (torch.arange(context) <= columns[:, None])[None, None]
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)
    bounds = None if mask is None else visible_bounds(mask, rows_of_block(query))

    def ours(key, value):
        if mask is None or heads // kv_heads * rows <= PACKED_ROWS:
            return decode_attention(query, key, value, mask, None)
        return scattered_attention(query, key, value, mask, None, bounds)

    def stock(key, value):
        return sdpa_attention_forward(module, query, key, value, mask)[0]

    def timed(function):
        return lambda _: seconds(lambda: [function(key, value) for key, value in layers]) / len(layers)

    got, want = ours(*layers[0]), stock(*layers[0])
    worst = float((got - want).abs().max())
    taken = grouped_attention(query, *layers[0], mask, None) is not None
    pairs = alternate(timed(ours), timed(stock), range(results.options.n))
    low, high = pairs.interval()
    case = f"attention {name}, {context} keys, {rows} rows, {results.options.threads} threads"
    note = f"ours {'taken' if taken else 'not taken'} by the rule; largest difference {worst:.1e}"
    results.add(case, "grouped / stock", pairs.ratio, "ratio", len(pairs.first), low, high, note)
    for metric, times in (("grouped", pairs.first * 1e6), ("stock", pairs.second * 1e6)):
        results.add(case, metric, float(np.median(times)), "us", len(times), times.min(), times.max())


if __name__ == "__main__":
    main()
