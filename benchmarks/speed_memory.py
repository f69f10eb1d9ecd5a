"""Parts `bytes`, `ten` and `peak`: what a store holds, ten conversations in the bytes of five, memory of a hit."""

import itertools
from collections.abc import Callable

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.calls import CACHE_ARGUMENT, ask, kl_divergence
from benchmarks.common import Results, bootstrap_mean
from benchmarks.speed_runs import Peak, Setting, prefilled, row_bytes
from benchmarks.speed_workloads import Request, Texts, reordered, requests
from hf_suffix_cache import SuffixCache

STORED_TARGET, WASTE_TARGET, PEAK_TARGET = 0.35, 0.05, 1.1
NUM_REQUESTS, NUM_LATER = 32, 6
NUM_CONVERSATIONS, NUM_CACHES = 10, 5
ANSWER_TOKENS = 16
STORE_DTYPES = (None, "bfloat16", "int8")


# -- stored bytes --------------------------------------------------------------------------------------------------


def stored_bytes(setting: Setting) -> None:
    """
    32 requests over 40 passages of 200 tokens, 8 each, behind one system prompt: bytes of the used blocks at rest over
    those of 32 DynamicCaches, by `store_dtype`; and what the smaller dtypes cost in fidelity.
    """
    found = requests(setting.tokenizer, "rag8", 4, setting.options.seed)
    stored = found[: setting.options.n or NUM_REQUESTS]
    later = found[len(stored) : len(stored) + min(NUM_LATER, len(stored))]
    full = [ask(setting.model, request.prompt, 1, logits=True).logits for request in tqdm(later, desc="full prefill")]
    for dtype in STORE_DTYPES:
        if dtype == setting.options.dtype:
            continue
        cache = SuffixCache(store_dtype=dtype)
        for request in tqdm(stored, desc=f"store_dtype={dtype}"):
            ask(setting.model, request.prompt, ANSWER_TOKENS, cache=cache)
        case = "memory, 32 requests" if dtype is None else f"memory, 32 requests, store_dtype={dtype}"
        _write_bytes(setting, case, cache, stored, dtype is None)
        _write_fidelity(setting, case, cache, later, full)
        _write_error(setting, case, cache, [request for request in stored if request.warm][:3])


def _write_bytes(setting: Setting, case: str, cache: SuffixCache, stored: list[Request], is_default: bool) -> None:
    results, n = setting.results, len(stored)
    rows = [len(request.prompt) + ANSWER_TOKENS - 1 for request in stored]
    dynamic = sum(rows) * row_bytes(setting.model)
    note = "bytes of used blocks at rest, all settings at their defaults but the dtype"
    goal = f"target <= {STORED_TARGET}; " if is_default else ""
    results.add(case, "stored bytes / DynamicCaches", cache.stats.bytes_used / dynamic, "ratio", n, note=goal + note)
    note = "bytes of all slabs, free blocks included"
    results.add(case, "allocated bytes / DynamicCaches", cache.stats.bytes_total / dynamic, "ratio", n, note=note)
    results.add(case, "stored rows' waste", _waste(cache), "share", n, note="of the used blocks, before compact()")
    for moment in ("at rest", "after compact()"):
        for kind, size in cache.stats.bytes_by_kind().items():
            results.add(case, f"{kind}, {moment}", size / 2**20, "MiB", n)
        if moment == "at rest":
            cache.compact()
    note = f"target <= {WASTE_TARGET}; of the used blocks" if is_default else "of the used blocks"
    results.add(case, "stored rows' waste after compact()", _waste(cache), "share", n, note=note)
    after = cache.stats.bytes_used / dynamic
    results.add(case, "stored bytes / DynamicCaches after compact()", after, "ratio", n)


def _waste(cache: SuffixCache) -> float:
    """Share of the used blocks' bytes that nothing needs."""
    return cache.stats.bytes_by_kind()["waste"] / max(cache.stats.bytes_used, 1)


def _write_fidelity(setting: Setting, case: str, cache: SuffixCache, later: list[Request], full: list) -> None:
    """KL of the first token of requests in orders that come next, nothing stored."""
    handle, found, rows = cache.using(store=False), [], []
    for request, reference in zip(later, full, strict=True):
        answer = ask(setting.model, request.prompt, 1, cache=handle, logits=True)
        found.append(float(kl_divergence(reference, answer.logits)[0]))
        rows.append(handle.last_report.computed_rows / handle.last_report.prompt_tokens)
    results = setting.results
    results.add(
        case, "KL first token, mean", np.mean(found), "nats", len(found), *bootstrap_mean(found), "later orders"
    )
    results.add(case, "rows run / prompt tokens", np.mean(rows), "share", len(rows))


def _write_error(setting: Setting, case: str, cache: SuffixCache, first: list[Request]) -> None:
    """
    Relative error of rows of the first conversations, all of them computed exactly, as they are served to a next turn
    now, against a full prefill. With a smaller `store_dtype` those that were kept in it count, which are not exact.
    """
    kind = "exact" if cache.config.store_dtype is None else "carried"
    errors: dict[str, list[float]] = {"keys": [], "values": []}
    count = 0
    for request in first:
        prompt = request.prompt + Texts(setting.tokenizer, 1).question(64)
        view, report = _served_view(setting.model, prompt, cache.using(store=False))
        (spans,) = report.spans
        rows = [row for span in spans if span.kind == kind for row in range(span.start, span.stop)]
        rows = [row for row in rows if row < len(request.prompt)]
        count += len(rows)
        stock = prefilled(setting.model, prompt)
        for own, other in zip(view.layers, stock.layers, strict=True):
            if rows and other.keys.shape[2] == len(prompt):  # else a window's rows only
                for slot, found in errors.items():
                    mine, true = (getattr(layer, slot)[:, :, rows].float() for layer in (own, other))
                    found.append(float((mine - true).norm() / true.norm()))
    note = f"of {len(first)} conversations of which all rows were exact when they were computed"
    setting.results.add(case, f"{kind} rows compared", count, "rows", len(first), note=note)
    for slot, found in errors.items():
        if found:
            note = "|served - full prefill| / |full prefill|; mean and extremes of layers and conversations"
            setting.results.add(case, f"error of {slot}", np.mean(found), "ratio", count, min(found), max(found), note)


def _served_view(model, prompt: list[int], handle: SuffixCache):
    """The cache that a call of one token leaves, and its report."""
    out = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=1,
        return_dict_in_generate=True,
        **{CACHE_ARGUMENT: handle},
    )
    return out.past_key_values, handle.last_report


# -- ten conversations ---------------------------------------------------------------------------------------------


def ten_conversations(setting: Setting) -> None:
    """
    Ten conversations over one corpus, 20 passages each, in turn, in a store of five DynamicCaches' bytes: does each go
    on without its history being run again, and with the answers of a full prefill?
    """
    model = setting.model
    found = requests(setting.tokenizer, "rag20", 1, setting.options.seed)
    count = setting.options.n or NUM_CONVERSATIONS
    prompts = [request.prompt for request in found[:count]]
    texts = Texts(setting.tokenizer, setting.options.seed + 1)
    budget = NUM_CACHES * (max(map(len, prompts)) + 2 * ANSWER_TOKENS + 128) * row_bytes(model)
    cache, most = SuffixCache(max_bytes=budget), 0
    replies = []
    for prompt in tqdm(prompts, desc="first turns"):
        replies.append(ask(model, prompt, ANSWER_TOKENS, cache=cache).ids)
        most = max(most, cache.stats.bytes_total)
    reports, first, own, reference = [], [], [], []
    for prompt, reply in tqdm(list(zip(prompts, replies, strict=True)), desc="second turns"):
        following = prompt + reply + texts.between + texts.question(64)
        # logits come in a run of their own: a call that hands its view out leaves no extent in the store
        first.append(ask(model, following, 1, cache=cache.using(store=False), logits=True).logits)
        own.append(ask(model, following, ANSWER_TOKENS, cache=cache).ids)
        reports.append(cache.last_report)
        most = max(most, cache.stats.bytes_total)
        reference.append(ask(model, following, ANSWER_TOKENS, logits=True))
    _write_ten(setting.results, cache, (budget, most), reports, first, own, reference)


def _write_ten(results: Results, cache, size: tuple[int, int], reports, first, own, reference) -> None:
    case, n, (budget, most) = "memory, ten conversations of 4K", len(reports), size
    results.add(
        case, "most bytes / max_bytes", most / budget, "ratio", n, note="target <= 1; max_bytes: 5 DynamicCaches"
    )
    results.add(case, "max_bytes", budget / 2**20, "MiB", n, note="bytes of 5 DynamicCaches of these conversations")
    new = len(reference) * [0]
    for number, report in enumerate(reports):
        new[number] = report.computed_rows / report.prompt_tokens
    results.add(
        case, "rows run / prompt tokens", np.mean(new), "share", n, min(new), max(new), "second turns; extremes"
    )
    going_on = [report.exact_tokens + report.carried_tokens >= report.prompt_tokens - 96 for report in reports]
    note = "target 1: history in place or gathered, not run again"
    results.add(case, "continued without their history", np.mean(going_on), "share", n, note=note)
    kl = [float(kl_divergence(b.logits[:1], a)[0]) for a, b in zip(first, reference, strict=True)]
    results.add(case, "KL first token, mean", np.mean(kl), "nats", n, *bootstrap_mean(kl), "against full prefill")
    others = zip(reference, reference[1:] + reference[:1], strict=True)
    control = [float(kl_divergence(a.logits[:1], b.logits[:1])[0]) for a, b in others]
    note = "control: answers of another conversation"
    results.add(case, "control: KL first token, mean", np.mean(control), "nats", n, *bootstrap_mean(control), note)
    same = [a[0] == b.ids[0] for a, b in zip(own, reference, strict=True)]
    results.add(case, "same first token", np.mean(same), "share", n)
    equal = [_agree(a, b.ids) / len(b.ids) for a, b in zip(own, reference, strict=True)]
    results.add(case, "tokens until answers differ", np.mean(equal), "share", n, note=f"of {ANSWER_TOKENS}, mean")
    results.add(case, "evictions", cache.stats.evictions, "sequences", n)
    for kind, size in cache.stats.bytes_by_kind().items():
        results.add(case, f"{kind}, at rest", size / 2**20, "MiB", n)


def _agree(first: list[int], second: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=True)))


# -- peaks ---------------------------------------------------------------------------------------------------------


def peaks(setting: Setting) -> None:
    """Most memory in a call: a hit, beyond the store's bytes, against the same request on a DynamicCache."""
    model, texts = setting.model, Texts(setting.tokenizer, setting.options.seed)
    for tokens in setting.options.lengths():
        case = reordered(texts, tokens, 64, 1)
        base = texts.take(tokens - 64)
        pairs = {"passages": (case.stored, case.measured[0]), "prefix": (base, base + texts.question(64))}
        for kind, (stored, measured) in pairs.items():
            cache = SuffixCache()
            ask(model, stored, 4, cache=cache)
            ask(model, stored[:64], 1, cache=cache)
            hit = _peak(lambda m=measured, c=cache: ask(model, m, 4, cache=c), cache)
            if cache.last_report.shifted_tokens + cache.last_report.exact_tokens < tokens // 2:
                raise RuntimeError(f"this should have been a hit: {cache.last_report}")
            stock = _peak(lambda m=measured: ask(model, m, 4))
            name = f"peak, {kind}, {tokens}"
            note = "torch's CPU allocator, most bytes at a time beyond those before the call"
            setting.results.add(name, "a hit, beyond the store", hit / 2**20, "MiB", 1, note=note)
            view = (tokens + 64) * row_bytes(model)
            note = "with the rows of its view, which are the store's bytes"
            setting.results.add(name, "a hit, view included", (hit + view) / 2**20, "MiB", 1, note=note)
            note = "torch's CPU allocator, most bytes at a time beyond those before the call"
            setting.results.add(name, "DynamicCache", stock / 2**20, "MiB", 1, note=note)
            note = f"target <= {PEAK_TARGET}; slabs that the call added to the store are the store's bytes"
            setting.results.add(name, "hit / DynamicCache", hit / stock, "ratio", 1, note=note)


def _peak(call: Callable, cache: SuffixCache | None = None) -> int:
    """Peak bytes of a call; growth of the store's slabs is not counted."""
    before = 0 if cache is None else cache.stats.bytes_total
    with Peak() as peak:
        call()
    grown = 0 if cache is None else cache.stats.bytes_total - before
    return peak.bytes - max(grown, 0)
