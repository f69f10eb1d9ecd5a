"""
Part `limit`: the first token against its limit, the time that transformers itself needs for just the rows that ran,
given a cache that holds the others.
"""

import copy
from collections.abc import Iterator

import numpy as np
import torch
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from benchmarks.calls import CACHE_ARGUMENT, ask, timing
from benchmarks.common import Results, seconds
from benchmarks.speed_runs import Setting, add_median, add_ratio, passes_of, prefilled, rounds
from benchmarks.speed_workloads import NEW_TOKENS, Texts, reordered
from hf_suffix_cache import SuffixCache
from hf_suffix_cache.masks import causal_by_position

IN_PLACE_TARGET, BALANCED_TARGET = 1.05, 1.25
GATHERED_TARGET = {4096: 1.40}  # else 1.25
MATERIALISE_TARGET_MS = 1.0
MATERIALISE_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


class Preallocated(DynamicLayer):
    """
    A layer of a stock cache with room: nothing is copied to append. It is not the package's code, so it may be held
    against it.

    Args:
        keys, values (`torch.Tensor`, `[1, kv_heads, capacity, head_dim]`): Its rows.
        length (`int`): Rows that are filled.
        slots (`torch.Tensor` of int64, *optional*): Where the next update's queries go; else behind the filled ones.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int, slots: torch.Tensor | None = None):
        super().__init__()
        self.keys, self.values, self.length, self.slots = keys, values, length, slots
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the states, and hand out all rows up to the last filled one."""
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if self.slots is None:
                buffer[:, :, self.length : self.length + states.shape[2]] = states
            else:
                buffer.index_copy_(2, self.slots, states)
        if self.slots is None:
            self.length += key_states.shape[2]
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length


def roomy(cache: DynamicCache, room: int) -> DynamicCache:
    """A copy of a stock cache in which every layer without a window has room for `room` more rows."""
    other = copy.deepcopy(cache)
    for index, layer in enumerate(other.layers):
        if type(layer) is DynamicLayer:
            keys, values = (
                torch.cat([t, t[:, :, :1].expand(-1, -1, room, -1)], 2) for t in (layer.keys, layer.values)
            )
            other.layers[index] = Preallocated(keys, values, layer.keys.shape[2])
    return other


def measure(setting: Setting) -> None:
    """All of the part."""
    texts = Texts(setting.tokenizer, setting.options.seed)
    n = setting.options.n or 9
    for tokens in setting.options.lengths():
        in_place(setting, texts, tokens, n)
        gathered(setting, texts, tokens, n)
        balanced(setting, texts, tokens, n)
    materialise(setting.results, setting.options.seed)


# -- exact rows ----------------------------------------------------------------------------------------------------


def in_place(setting: Setting, texts: Texts, tokens: int, n: int) -> None:
    """A conversation that goes on, 64 tokens a turn; in the middle of the rounds it is `tokens` long."""
    model, cache = setting.model, SuffixCache()
    first = tokens - NEW_TOKENS * (n // 2 + 2)
    text = texts.take(first + NEW_TOKENS * (n + 2))
    ask(model, text[:first], 1, cache=cache)
    stock = prefilled(model, text[:first])

    def advance(turn: int) -> Iterator:
        """Round -1 warms up: both ways run once without being timed."""
        done = first + NEW_TOKENS * (turn + 1)
        prompt = text[: done + NEW_TOKENS]
        grown, prealloc = copy.deepcopy(stock), roomy(stock, NEW_TOKENS + 1)
        yield lambda: _served(model, prompt, cache, NEW_TOKENS)
        yield lambda: ask(model, prompt, 1, cache=grown).first
        yield lambda: ask(model, prompt, 1, cache=prealloc).first

    _rounds_of(setting, advance, n, f"limit, in place, {tokens}", IN_PLACE_TARGET, stock, text, first)


def _rounds_of(setting, advance, n, case, target, stock, text, first) -> None:
    taken: dict[str, list[float]] = {"cache": [], "DynamicCache": [], "preallocated": []}
    for turn in tqdm(range(-1, n), desc=case):
        ways = dict(zip(taken, advance(turn), strict=True))
        order = list(ways)[turn % 3 :] + list(ways)[: turn % 3]
        for way in order:
            value = ways[way]()
            taken[way] += [value] if turn >= 0 else []
        start = first + NEW_TOKENS * (turn + 1)
        prefilled(setting.model, text[start : start + NEW_TOKENS], stock)
    _write(setting.results, case, taken, target)


def gathered(setting: Setting, texts: Texts, tokens: int, n: int) -> None:
    """Another 64 tokens behind a stored prefix that is somebody's conversation: its rows are gathered."""
    model, cache = setting.model, SuffixCache()
    base = texts.take(tokens - NEW_TOKENS)
    ask(model, base, 1, cache=cache)
    handle, stock = cache.using(store=False, fidelity="exact"), prefilled(model, base)
    prompts = [base + texts.question(NEW_TOKENS) for _ in range(n)]

    def against(make):
        def run(number: int) -> float:
            past = make()
            return ask(model, prompts[number], 1, cache=past).first

        return run

    ways = {
        "cache": lambda number: _served(model, prompts[number], handle, NEW_TOKENS),
        "DynamicCache": against(lambda: copy.deepcopy(stock)),
        "preallocated": against(lambda: roomy(stock, NEW_TOKENS + 1)),
    }
    for way in ways.values():
        way(0)
    case = f"limit, gathered, {tokens}"
    taken = rounds(ways, tqdm(range(n), desc=case))
    _write(setting.results, case, taken, GATHERED_TARGET.get(tokens, 1.25))
    report = handle.last_report
    setting.results.add(case, "materialise", timing(report, "materialise") * 1e3, "ms", 1, note="of the last request")


def _served(model, prompt: list[int], cache, rows: int) -> float:
    """Seconds to the first token; an error if not exactly `rows` rows ran, or nothing approximate was to be served."""
    taken = ask(model, prompt, 1, cache=cache).first
    report = cache.last_report
    if report.computed_rows != rows or report.exact_tokens != len(prompt) - rows:
        raise RuntimeError(f"{rows} rows should have run, all others be served exactly: {report}")
    return taken


def _write(results: Results, case: str, taken: dict, target: float) -> None:
    for way, values in taken.items():
        label = "with the cache" if way == "cache" else f"limit ({way})"
        add_median(results, case, f"time to first token, {label}", values, "s")
    note = "the limit appends to a DynamicCache, which copies all its rows"
    add_ratio(results, case, "first token / limit", taken["cache"], taken["DynamicCache"], target, note)
    note = "the limit's cache was given room beforehand, so that appending copies nothing"
    add_ratio(results, case, "first token / limit without copies", taken["cache"], taken["preallocated"], None, note)


# -- moved rows ----------------------------------------------------------------------------------------------------


def balanced(setting: Setting, texts: Texts, tokens: int, n: int) -> None:
    """Passages in a new order and 64 new tokens: probe and repair, against the same rows through stock attention."""
    model, cache = setting.model, SuffixCache()
    case = reordered(texts, tokens, NEW_TOKENS, n)
    ask(model, case.stored, 1, cache=cache)
    handle = cache.using(store=False)
    ask(model, case.measured[0], 1, cache=handle)
    reports = {}

    def reuse(number: int) -> float:
        taken = ask(model, case.measured[number], 1, cache=handle).first
        reports[number] = handle.last_report
        return taken

    def limit(number: int) -> float:
        """The same row sets; rows that are not run hold something finite, whatever it is."""
        if number not in reports:
            reuse(number)
        return stock_passes(model, case.measured[number], passes_of(reports[number]))

    limit(0)
    name = f"limit, balanced, {tokens}"
    taken = rounds({"cache": reuse, "limit": limit}, tqdm(range(len(case.measured)), desc=name))
    results = setting.results
    add_median(results, name, "time to first token, with the cache", taken["cache"], "s")
    add_median(results, name, "time to first token, limit", taken["limit"], "s")
    note = "both passes as stock forwards over the same rows, masks made beforehand, generate's own time left out"
    add_ratio(results, name, "first token / limit", taken["cache"], taken["limit"], BALANCED_TARGET, note)
    rows = [report.computed_rows / tokens for report in reports.values()]
    add_median(results, name, "rows run / prompt tokens", rows, "share")
    for phase in ("lookup", "plan", "materialise", "repair"):
        add_median(
            results, name, phase, [timing(r, phase) * 1e3 for r in reports.values()], "ms", "repair: all passes"
        )


def stock_passes(model, ids: list[int], passes: list[np.ndarray]) -> float:
    """
    Seconds that transformers needs for these passes over a prompt of which every other row is there: explicit
    positions, explicit masks causal by position, the model's own attention. Everything else is made beforehand.
    """
    total = len(ids)
    forwards = [_arguments(model, ids, rows, total) for rows in passes]

    def run() -> None:
        with torch.no_grad():
            for arguments in forwards:
                model(**arguments).logits.argmax(-1)

    return seconds(run)


def _arguments(model, ids: list[int], rows: np.ndarray, total: int) -> dict:
    positions = torch.from_numpy(rows)
    cache = DynamicCache()
    text = model.config.get_text_config(decoder=True)
    heads, dim = (
        text.num_key_value_heads,
        getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
    )
    for _ in range(text.num_hidden_layers):
        keys, values = torch.randn(2, 1, heads, total, dim, dtype=model.dtype)
        cache.layers.append(Preallocated(keys, values, total, positions))
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    windows = {"full_attention": None, "sliding_attention": getattr(text, "sliding_window", None)}
    masks = {kind: causal_by_position(positions, torch.arange(total), windows[kind]) for kind in kinds}
    return {
        "input_ids": torch.tensor([ids])[:, positions],
        "position_ids": positions[None],
        "attention_mask": masks["full_attention"] if kinds == {"full_attention"} else masks,
        "logits_to_keep": 1,
        CACHE_ARGUMENT: cache,
    }


# -- handing over --------------------------------------------------------------------------------------------------


def materialise(results: Results, seed: int, lengths=MATERIALISE_LENGTHS, turns: int = 5) -> None:
    """
    `timings.materialise` of the next turns of a conversation, whatever its length. The model is random and narrow,
    with 30 layers as SmolLM2 has: handing memory over costs by layers and by length, not by width.
    """
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM(
        LlamaConfig(**shape, num_hidden_layers=30, vocab_size=1000, max_position_embeddings=65536)
    ).eval()
    narrow = Results("speed", "random Llama, 30 layers", "float32", results.options)
    ids = torch.randint(3, 1000, (max(lengths) + 64 * turns,)).tolist()
    worst = 0.0
    for length in lengths:
        cache, taken = SuffixCache(), []
        for turn in range(turns + 1):
            prompt = ids[: length - 64 * (turns - turn)]
            ask(model, prompt, 1, cache=cache)
            if turn and cache.last_report.computed_rows != 64:
                raise RuntimeError(f"a turn should run its 64 new tokens: {cache.last_report}")
            taken += [timing(cache.last_report, "materialise") * 1e3] if turn else []
        worst = max(worst, float(np.median(taken)))
        add_median(narrow, f"materialise, {length}", "materialise", taken, "ms", f"target <= {MATERIALISE_TARGET_MS}")
    narrow.add("materialise", "largest median", worst, "ms", len(lengths), note=f"target <= {MATERIALISE_TARGET_MS}")
