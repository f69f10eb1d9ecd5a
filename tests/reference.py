"""Slow and obvious oracles: what a request must give, what it must cost, and what its rows must be.

Nothing here knows how the package works, except `check_pool`, the one place that looks inside a store.
"""

import inspect
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

TOLERANCE = 1e-4  # O1, fp32: max abs difference of logits
KINDS = ("exact", "carried", "shifted", "repaired", "new")


# -- asking a model -------------------------------------------------------------------------------------------------


class Recorder(LogitsProcessor):
    """Keeps what a logits processor sees at every step. Unlike `return_dict_in_generate` it leaves the view alone."""

    def __init__(self):
        self.ids, self.scores = [], []

    def __call__(self, input_ids, scores):
        self.ids.append(input_ids.clone())
        self.scores.append(scores.clone())
        return scores


@dataclass
class Answer:
    """`ids` `[batch, tokens]` with the prompt; per step `scores` `[batch, vocab]` and the ids `seen` by processors."""

    ids: torch.Tensor
    scores: list
    seen: list
    report: object = None
    output: object = None
    extra: dict = field(default_factory=dict)

    @property
    def first(self) -> torch.Tensor:
        """Logits of the first new token, `[batch, vocab]`."""
        return self.scores[0]

    def tokens(self, row: int = 0) -> list[int]:
        return self.ids[row].tolist()


def as_batch(ids) -> torch.Tensor:
    """A `[batch, tokens]` tensor from a tensor, a list of ids or a list of equally long lists."""
    if isinstance(ids, torch.Tensor):
        return ids
    return torch.tensor(ids if ids and isinstance(ids[0], (list, tuple)) else [ids])


def ask(model, ids, cache=None, steps: int = 6, seed: int | None = None, processors=(), **options) -> Answer:
    """One greedy `generate` call of `steps` new tokens; with `cache=None` it is the call of transformers alone."""
    recorder = Recorder()
    if seed is not None:
        torch.manual_seed(seed)
    if cache is not None:
        options["cache"] = cache
    options.setdefault("do_sample", False)
    output = model.generate(
        as_batch(ids),
        max_new_tokens=steps,
        logits_processor=LogitsProcessorList([recorder, *processors]),
        **options,
    )
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    report = None if cache is None else cache.last_report
    return Answer(sequences, recorder.scores, recorder.ids, report, output)


def max_difference(left, right) -> float:
    """Largest absolute difference over two lists of score tensors; forbidden tokens (-inf) must be the same ones."""
    assert len(left) == len(right), f"{len(left)} steps against {len(right)}"
    return max((a - b).masked_fill(a == b, 0.0).abs().max().item() for a, b in zip(left, right, strict=True))


def same_answer(got: Answer, want: Answer, tolerance: float = TOLERANCE) -> None:
    """O1: equal ids and logits within `tolerance` at every step and in every row."""
    assert got.ids.shape == want.ids.shape
    difference = max_difference(got.scores, want.scores)
    assert difference < tolerance, f"max abs logit difference {difference:.2e}"
    assert got.ids.tolist() == want.ids.tolist()


def same_as_vanilla(model, ids, cache, tolerance: float = TOLERANCE, **options) -> Answer:
    """O1 for one request: ask with the cache, then without, and compare. Returns the answer with the cache."""
    got = ask(model, ids, cache, **options)
    same_answer(got, ask(model, ids, **options), tolerance)
    check_report(got.report)
    return got


def kl(full: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL(full || other) in nats of two sets of logits `[..., vocab]`."""
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (full, other))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def in_threads(jobs) -> None:
    """Run callables at the same time, one thread each; the first exception of any of them is raised here."""
    problems = []

    def guarded(job):
        try:
            job()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    if problems:
        raise problems[0]


# -- rows -----------------------------------------------------------------------------------------------------------


def cache_name(model) -> str:
    """`"cache"` from transformers 5.24 on, `"past_key_values"` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def fresh_rows(model, ids, offset: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer the keys and values `[kv_heads, tokens, head_dim]` of a full prefill by transformers alone."""
    batch = as_batch(ids)
    cache = DynamicCache()
    positions = torch.arange(offset, offset + batch.shape[1])[None]
    mask = torch.ones(batch.shape, dtype=torch.long)
    with torch.no_grad():
        model(batch, attention_mask=mask, position_ids=positions, use_cache=True, **{cache_name(model): cache})
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def view_of(output):
    """The cache that `return_dict_in_generate=True` handed out."""
    name = "cache" if "cache" in output else "past_key_values"
    return output[name]


def view_rows(view, row: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer the keys and values `[kv_heads, tokens, head_dim]` of one sequence of a view."""
    length = int(view.get_seq_length())
    return [(layer.keys[row, :, :length], layer.values[row, :, :length]) for layer in view.layers]


def served_rows(model, ids, cache, **options):
    """`(answer, rows)` of a request whose view is handed out, so that its rows can be looked at."""
    answer = ask(model, ids, cache, return_dict_in_generate=True, **options)
    return answer, view_rows(view_of(answer.output))


def first_layer_is_fresh(model, rows, ids, tolerance: float = 1e-5) -> None:
    """O2: layer-0 keys and values depend on token and position only, whatever was moved."""
    (keys, values), (want_keys, want_values) = rows[0], fresh_rows(model, ids)[0]
    length = len(ids)
    assert torch.allclose(keys[:, :length], want_keys, rtol=0, atol=tolerance * max(1.0, want_keys.abs().max().item()))
    assert torch.allclose(
        values[:, :length], want_values, rtol=0, atol=tolerance * max(1.0, want_values.abs().max().item())
    )


def stock_rounding(model, ids) -> float:
    """
    How far the last logits of a text are apart that transformers runs in one piece, in two, and token by token as it
    generates, at most.
    """
    tokens, worst = as_batch(ids), 0.0
    with torch.no_grad():
        want = model(tokens).logits[0, -8:]
        for split in sorted({int(cut) for cut in np.linspace(1, tokens.shape[1] - 9, 12) if cut >= 1}):
            cache = DynamicCache()
            model(tokens[:, :split], use_cache=True, **{cache_name(model): cache})
            got = model(tokens[:, split:], use_cache=True, **{cache_name(model): cache}).logits[0, -8:]
            worst = max(worst, (got - want).abs().max().item())
        cache, first = DynamicCache(), max(1, tokens.shape[1] - 8)
        model(tokens[:, :first], use_cache=True, **{cache_name(model): cache})
        for place in range(first, tokens.shape[1]):
            got = model(tokens[:, place : place + 1], use_cache=True, **{cache_name(model): cache}).logits[0, 0]
            worst = max(worst, (got - want[place - tokens.shape[1]]).abs().max().item())
    return worst


# -- work -----------------------------------------------------------------------------------------------------------


class LayerSpy:
    """O4: counts the rows that the first decoder layer really runs, `batch x queries` for every forward."""

    def __init__(self, model):
        self.calls: list[tuple[int, int]] = []
        self.addresses: list[int] = []  # where layer 0's keys lay after each forward
        first_decoder_layer(model).register_forward_hook(self._count, with_kwargs=True)

    def _count(self, layer, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        self.calls.append(tuple(hidden.shape[:2]))
        cache = kwargs.get("cache", kwargs.get("past_key_values", kwargs.get("layer_past")))
        if cache is not None and len(getattr(cache, "layers", ())) and cache.layers[0].keys is not None:
            self.addresses.append(cache.layers[0].keys.data_ptr())

    def rows(self) -> int:
        """Rows since the last call, then start anew."""
        total = sum(batch * queries for batch, queries in self.calls)
        self.clear()
        return total

    def clear(self) -> None:
        self.calls, self.addresses = [], []


def first_decoder_layer(model):
    """The first of as many modules in one list as the model has layers."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return next(module for module in lists if len(module) == count)[0]


def work_is_reported(model, answer: Answer, decoded_rows: int = 0) -> int:
    """O4: what the spy saw is what the report says. `decoded_rows`: rows that ran after the first new token."""
    rows = model.spy.rows()
    report = answer.report
    assert rows == report.computed_rows + report.capability_rows + decoded_rows, (rows, report)
    return rows


# -- reports --------------------------------------------------------------------------------------------------------


def check_report(report) -> None:
    """What must hold for every report: the sum, spans that cover each row's prompt once, kinds that add up."""
    parts = [getattr(report, f"{kind}_tokens") for kind in KINDS]
    assert min(parts) >= 0 and sum(parts) == report.prompt_tokens, str(report)
    totals = dict.fromkeys(KINDS, 0)
    for spans in report.spans:
        cursor = spans[0].start if spans else 0
        assert cursor == 0
        for span in spans:
            assert span.kind in KINDS and span.start == cursor < span.stop, spans
            cursor = span.stop
            totals[span.kind] += span.stop - span.start
    assert [totals[kind] for kind in KINDS] == parts, (totals, parts)
    for seconds in report.timings.values():
        assert seconds >= 0.0


def kinds_of(report, row: int = 0) -> list[str]:
    """The kind of every prompt position of one batch row."""
    return [span.kind for span in report.spans[row] for _ in range(span.start, span.stop)]


def shifts_of(report, row: int = 0) -> list[int | None]:
    """The shift of every prompt position that is `"shifted"` or `"repaired"`, else None."""
    moved = ("shifted", "repaired")
    return [
        span.shift if span.kind in moved else None for span in report.spans[row] for _ in range(span.start, span.stop)
    ]


def served(report) -> int:
    """Approximate rows that were taken from the store, repaired or not."""
    return report.shifted_tokens + report.repaired_tokens


def moved_pieces(report, row: int = 0) -> list[tuple[int, int, int]]:
    """Maximal `(start, stop, shift)` pieces of rows that were taken from the store approximately, repaired or not."""
    pieces = []
    for position, shift in enumerate(shifts_of(report, row)):
        if shift is None:
            continue
        if pieces and pieces[-1][1] == position and pieces[-1][2] == shift:
            pieces[-1] = (pieces[-1][0], position + 1, shift)
        else:
            pieces.append((position, position + 1, shift))
    return pieces


def stored(model, *requests, **options):
    """A new `SuffixCache` in which these requests have run."""
    from hf_suffix_cache import SuffixCache

    cache = SuffixCache(**options)
    for ids in requests:
        ask(model, ids, cache, steps=1)
    return cache


# -- texts ----------------------------------------------------------------------------------------------------------


def common_runs(prompt, stored, shortest: int) -> np.ndarray:
    """Which prompt positions lie in a common run of at least `shortest` tokens with `stored`, by brute force."""
    prompt, stored = np.asarray(prompt), np.asarray(stored)
    inside = np.zeros(len(prompt), dtype=bool)
    for diagonal in range(-len(stored) + 1, len(prompt)):
        start = max(diagonal, 0)
        stop = min(len(prompt), len(stored) + diagonal)
        equal = prompt[start:stop] == stored[start - diagonal : stop - diagonal]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.astype(int), [0]])))
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            if last - first >= shortest:
                inside[start + first : start + last] = True
    return inside


def common_prefix(left, right) -> int:
    """How many leading tokens agree."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


def slow_mask(query_positions, key_positions, window=None) -> torch.Tensor:
    """The mask that is causal by position, cell by cell: `[queries, keys]`, True where a query may look."""
    mask = torch.zeros(len(query_positions), len(key_positions), dtype=torch.bool)
    for i, query in enumerate(query_positions):
        for j, key in enumerate(key_positions):
            mask[i, j] = key <= query and (window is None or query - key < window)
    return mask


# -- the pool -------------------------------------------------------------------------------------------------------


def check_pool(cache, handed_out: bool = False) -> SimpleNamespace:
    """
    O5 for an idle cache: free + used = total, and every reference is explained by a stored segment or conversation.

    The only function of the suite that looks inside the store. With `handed_out` the test still holds views that
    `return_dict_in_generate` gave it, whose extents count too.
    """
    store, stats = cache._store, cache.stats
    bytes_used = stats.bytes_used  # first: it takes back what views have let go of
    slabs = [(pool, slab) for pool in store.pools.values() for slab in [*pool.slabs.values(), *pool.mapped.values()]]
    expected = {id(slab): np.zeros_like(slab.references) for _, slab in slabs}
    sources: dict = {}
    shelves = list(store.shelves.values())
    for shelf in shelves:
        for sequence in shelf.sequences:
            assert not sequence.busy, "an idle cache holds a conversation that is in use"
            if sequence.extent is not None:
                first = sequence.extent.start // store.config.block_size
                count = sequence.extent.batch * sequence.extent.rows // store.config.block_size
                expected[id(sequence.extent.slab)][first : first + count] += 1
            for segment in sequence.recipe.segments:
                sources[segment] = sources.get(segment, 0) + 1
        for mean in shelf.means:
            sources[mean] = sources.get(mean, 0) + 1
    for shelf in shelves:
        # what is stored in one scope may refer to its own rows and to shared ones, and to nothing else
        scopes = (shelf.scope, shelf.scope.beside)
        found = {segment for each in shelf.sequences for segment in each.recipe.segments}
        assert all(segment.home().scope in scopes for segment in found), "a row is referred to from another scope"
        recipes = {segment for segment in sources if segment.home() is shelf}
        assert set(shelf.segments) == recipes | set(shelf.means)
        assert len(shelf.mean_windows) == len(shelf.means) and all(mean in shelf.mean_windows for mean in shelf.means)
        for segment in shelf.segments:
            assert segment.references == sources[segment], "a segment is pinned by nothing that is stored"
            for slab, rows, _ in shelf.pool.by_slab(segment.addresses):
                expected[id(slab)][np.unique(rows // store.config.block_size)] += 1
    used = 0
    for pool, slab in slabs:
        want, have = expected[id(slab)], slab.references
        assert (have >= want).all() if handed_out else (have == want).all(), "references that nothing explains"
        if slab.number in pool.slabs:
            used += int(np.count_nonzero(have)) * store.config.block_size * slab.row_bytes
    assert bytes_used == used <= stats.bytes_total
    if cache.config.max_bytes is not None:
        assert stats.bytes_total <= cache.config.max_bytes
    return SimpleNamespace(bytes_used=used, bytes_total=stats.bytes_total, segments=stats.segments)


def forgets_everything(cache) -> None:
    """After `clear()` no row may stay in use: whatever does has leaked."""
    cache.clear()
    left = check_pool(cache)
    assert left.bytes_used == 0 and left.segments == 0, left
