"""
The figures of the oracles O1 to O7 and O9 (DESIGN.md, section 4) on tiny models with sharp random weights, each beside
its negative control: llama, qwen2, qwen3 and mistral (window 16); one model of every rotary layout (phi3's longrope in
both of its regimes); models with absolute positions, whose front alone is reused; models that are refused; and O1 on
SmolLM2-135M-Instruct. The tests in `tests/` assert the same things; here their figures are written down. The machine
may be busy.

    python -m benchmarks.oracles                       # 50 conversations for O7, about 8 minutes on 2 cores
    python -m benchmarks.oracles --n 3 --no-smollm2 --output .cache/look
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import DynamicCache

from benchmarks import data
from benchmarks.calls import CACHE_ARGUMENT
from benchmarks.calls import ask as ask_smollm2
from benchmarks.common import Options, Results, parse
from hf_suffix_cache import SuffixCache

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the slow oracles and tiny models of the tests

from reference import ask, cache_name, fresh_rows, kl, max_difference, served, served_rows  # noqa: E402
from tiny_models import (  # noqa: E402
    BREADTH,
    CORE,
    LENGTH_DEPENDENT,
    ORIGINAL_LENGTH,
    PREFIX,
    UNSUPPORTED,
    make_model,
    new_text,
    old_text,
)

REPEATS = 4  # some faults show from the third run on
SYSTEM, HEAD = old_text(24, 1), new_text(29, 2)
A, B, C = old_text(40, 3), old_text(33, 4), old_text(52, 5)
TAILS = [new_text(36, 20 + number) for number in range(4)]
STORED = SYSTEM + A + B + C + TAILS[0]
MOVED = HEAD + B + C + A + TAILS[1]
REQUESTS = [STORED, SYSTEM + C + A + TAILS[2], MOVED, STORED[:57] + TAILS[3]]
# For the controls: seams that also mistral's three windows of 16 reach from the last token. A row deep inside a moved
# run is exact there, since all that it looks at moved with it.
NEAR = HEAD + B + C + A[:20] + TAILS[1][:9]
NEAR_OPTIONS = {"tail_tokens": 8, "repair_fraction": 0.0, "seam_tokens": 0}
ROUNDS = 10


@dataclass
class OraclesOptions(Options):
    """
    `n` conversations for O7 (with few, its ratio is noise); `prompts` for O1 on SmolLM2; `kinds`: which tiny models,
    by comma; `data` as ever.
    """

    n: int = 50
    threads: int = 1
    prompts: int = 6
    kinds: str = ",".join((*CORE, *BREADTH, *PREFIX))
    smollm2: bool = True
    data: str = "wiki"


Add = Callable[..., None]


def main() -> None:
    options = parse(OraclesOptions, __doc__)
    for kind in options.kinds.split(","):
        results = Results("oracles", f"tiny {kind}", "float32", options)

        def add(oracle: str, metric: str, value, n: int, note: str, unit: str = "logit", kind=kind, results=results):
            results.add(f"{oracle} {kind}", metric, float(value), unit, n, note=note)

        if kind in PREFIX:
            for oracle in (prefix_exact, o4_work, o5_pool):
                oracle(kind, add)
            continue
        for oracle in (o1_exact, o2_layer_0, o3_everything_repaired, o4_work, o5_pool, o6_history):
            oracle(kind, add)
        if kind in LENGTH_DEPENDENT:
            regimes(kind, add)
        o7_states(kind, options.n, add)
        o9_inputs(kind, add)
    o9_models(Results("oracles", "tiny models that are refused", "float32", options))
    if options.smollm2:
        o1_smollm2(options)


# -- the oracles on one tiny model -----------------------------------------------------------------------------------


def o1_exact(kind: str, add: Add) -> None:
    """Exact mode against stock transformers, over all steps of all requests, four rounds of them; batches too."""
    model, cache = make_model(kind), SuffixCache(fidelity="exact")
    requests = [*REQUESTS, [STORED, MOVED[: len(STORED)]]]
    largest, same, count = 0.0, 0, 0
    for ids in requests * REPEATS:
        got, want = ask(model, ids, cache), ask(model, ids)
        largest = max(largest, max_difference(got.scores, want.scores))
        same += got.ids.tolist() == want.ids.tolist()
        count += 1
    add("O1", "max abs logit difference, exact", largest, count, "target < 1e-4")
    add("O1", "equal greedy ids, exact", same / count, count, "target 1", unit="share")
    add("O1", "control: max abs logit difference, no repair", _unrepaired(model), 1, "must be above 1e-3")


def o2_layer_0(kind: str, add: Add) -> None:
    """Layer-0 rows of moved text against a fresh prefill's."""
    model, cache = make_model(kind), SuffixCache()
    ask(model, STORED, cache)
    keys = values = 0.0
    for _ in range(REPEATS):
        answer, rows = served_rows(model, MOVED, cache)
        fresh = fresh_rows(model, MOVED)[0]
        keys = max(keys, _largest(rows[0][0][:, : len(MOVED)] - fresh[0]))
        values = max(values, _largest(rows[0][1][:, : len(MOVED)] - fresh[1]))
    scales = [max(_largest(part), 1e-9) for part in fresh]
    note = "relative to the largest; target < 1e-5"
    add("O2", "max abs difference of layer-0 keys", keys / scales[0], REPEATS, note, unit="ratio")
    add("O2", "max abs difference of layer-0 values", values / scales[1], REPEATS, note, unit="ratio")
    if kind == "bloom":  # nothing turns in it: its keys are the same at any position
        return
    elsewhere = fresh_rows(model, MOVED, offset=7)[0]
    turned = [_largest(there - here) / scale for there, here, scale in zip(elsewhere, fresh, scales, strict=True)]
    note = "rows of another position, in the slot that turns; must be above 1e-2"
    add("O2", "control: max abs difference, not rotated", max(turned), 1, note, unit="ratio")


def o3_everything_repaired(kind: str, add: Add) -> None:
    """Every moved row repaired: the approximate path must give the exact answer."""
    model, largest = make_model(kind), 0.0
    for _ in range(REPEATS):
        cache = SuffixCache(repair_fraction=1.0)
        ask(model, STORED, cache)
        got, want = ask(model, MOVED, cache), ask(model, MOVED)
        if got.report.repaired_tokens < len(A + B + C):
            raise RuntimeError(f"only {got.report.repaired_tokens} rows were moved and repaired: {got.report}")
        largest = max(largest, max_difference(got.scores, want.scores))
    add("O3", "max abs logit difference, all repaired", largest, REPEATS, "target < 1e-4")
    add("O3", "control: max abs logit difference, none", _unrepaired(model), 1, "must be above 1e-3")


def regimes(kind: str, add: Add) -> None:
    """Frequencies that depend on the length: the requests above are long ones, so here short ones and both in turn."""
    model, largest = make_model(kind), 0.0
    short = HEAD[:6] + B[:30] + TAILS[0][:12]
    moved = HEAD[9:18] + B[:30] + TAILS[1][:12]
    assert max(len(short), len(moved)) + 6 < ORIGINAL_LENGTH < min(map(len, REQUESTS[:3]))
    for _ in range(REPEATS):
        cache = SuffixCache(tail_tokens=8, repair_fraction=1.0)
        ask(model, short, cache)
        got = ask(model, moved, cache)
        if got.report.repaired_tokens != 30:
            raise RuntimeError(f"all 30 rows should be moved and repaired: {got.report}")
        largest = max(largest, max_difference(got.scores, ask(make_model(kind), moved).scores))
    add("O3", "max abs logit difference, all repaired, short regime", largest, REPEATS, "target < 1e-4")
    cache, text, largest, hits = SuffixCache(), old_text(100, 8), 0.0, []
    for length in (40, 100) * REPEATS:
        got = ask(model, text[:length], cache)
        largest = max(largest, max_difference(got.scores, ask(make_model(kind), text[:length]).scores))
        hits.append(got.report.exact_tokens)
    if hits[:2] != [0, 0] or hits[2:4] != [39, 99]:
        raise RuntimeError(f"each length should be reused in its own regime only: {hits}")
    note = "target < 1e-4; lengths of both regimes in turn, against a new model"
    add("O6", "max abs logit difference, across regimes", largest, 2 * REPEATS, note)
    past = DynamicCache()
    with torch.no_grad():
        make = make_model(kind)
        make(torch.tensor([text[:40]]), **{cache_name(make): past})
        wrong = make(torch.tensor([text[40:]]), **{cache_name(make): past}).logits[:, -1]
    control = _largest(wrong - ask(make_model(kind), text).first)
    add("O6", "control: max abs logit difference, short rows in a long prompt", control, 1, "must be above 1e-3")


def prefix_exact(kind: str, add: Add) -> None:
    """Absolute positions: exact reuse at the front whatever the fidelity and whatever ran before; nothing is moved."""
    model, cache = make_model(kind), SuffixCache()
    largest, same, count = 0.0, 0, 0
    for ids in REQUESTS * REPEATS:
        got, want = ask(model, ids, cache), ask(model, ids)
        if served(got.report) or got.report.carried_tokens:
            raise RuntimeError(f"rows of absolute positions were moved: {got.report}")
        largest = max(largest, max_difference(got.scores, want.scores))
        same += got.ids.tolist() == want.ids.tolist()
        count += 1
    add("O1", "max abs logit difference, exact", largest, count, "target < 1e-4")
    add("O1", "equal greedy ids, exact", same / count, count, "target 1", unit="share")
    note = "the last repetition; must be above 0.9"
    add("O1", "control: exact tokens / prompt", got.report.exact_tokens / len(REQUESTS[-1]), 1, note, unit="share")
    other = _largest(ask(model, MOVED).first - ask(model, HEAD + C + B + A + TAILS[1]).first)
    add("O1", "control: max abs logit difference, another order", other, 1, "must be above 1e-2")


def o4_work(kind: str, add: Add) -> None:
    """Rows that the first decoder layer ran against the report's, before the first new token."""
    model, largest, count = make_model(kind, spy=True), 0, 0
    for fidelity in ("exact", "balanced", "fast"):
        cache = SuffixCache(fidelity=fidelity)
        for ids in [*REQUESTS, [STORED, MOVED[: len(STORED)]]] * REPEATS:
            model.spy.clear()
            report = ask(model, ids, cache, steps=1).report
            largest = max(largest, abs(model.spy.rows() - report.computed_rows - report.capability_rows))
            count += 1
    add("O4", "largest |rows counted - rows reported|", largest, count, "target 0", unit="rows")
    model.spy.clear()
    ask(model, STORED, steps=1)
    note = "a stock prefill, must be 1"
    add("O4", "control: rows counted / prompt tokens", model.spy.rows() / len(STORED), 1, note, unit="ratio")


def o5_pool(kind: str, add: Add) -> None:
    """What stays in use after everything was forgotten, and that the pool then still serves right answers."""
    model, cache = make_model(kind), SuffixCache(fidelity="exact")
    for ids in REQUESTS * REPEATS:
        ask(model, ids, cache)
    before = cache.stats.bytes_used
    cache.clear()
    add("O5", "bytes in use after clear()", cache.stats.bytes_used, 1, "target 0", unit="bytes")
    add("O5", "control: bytes in use before it", before, 1, "must be above 0", unit="bytes")
    largest = max(max_difference(ask(model, ids, cache).scores, ask(model, ids).scores) for ids in REQUESTS * 2)
    add("O5", "max abs logit difference, recycled rows", largest, 2 * len(REQUESTS), "target < 1e-4")


def o6_history(kind: str, add: Add) -> None:
    """Exact answers over all orders of the requests."""
    model = make_model(kind)
    want = [ask(model, ids, steps=3) for ids in REQUESTS]
    largest, orders = 0.0, list(itertools.permutations(range(len(REQUESTS))))
    for order in orders:
        cache = SuffixCache(fidelity="exact")
        for number in order:
            got = ask(model, REQUESTS[number], cache, steps=3)
            largest = max(largest, max_difference(got.scores, want[number].scores))
    add("O6", "max abs logit difference over all orders", largest, len(orders), "target < 1e-4")
    first, second = SuffixCache(**NEAR_OPTIONS), SuffixCache(**NEAR_OPTIONS)
    ask(model, STORED, first)
    ask(model, SYSTEM + B[:20] + A + TAILS[0], second)
    answers = [ask(model, NEAR, cache).scores[:1] for cache in (first, second)]
    note = "two histories, moved rows; must be above 1e-3"
    add("O6", "control: max abs logit difference", max_difference(*answers), 1, note)


def o7_states(kind: str, conversations: int, add: Add) -> None:
    """
    Divergence by round of conversations that moved text in their first round and got new text in each. Mistral's
    windows forget the moved text after 45 tokens, so its rounds are shorter, and its later divergences are rounding.
    """
    model, size = make_model(kind), 14 if kind == "mistral" else 34
    progress = tqdm(range(conversations), desc=f"O7 {kind}")
    table = np.array([_conversation(model, 1000 * number, size) for number in progress])
    early, late = table[:, 1:4].mean(), table[:, 7:10].mean()
    note = f"{early:.3g} and {late:.3g} nats; target <= 1.2; below 1e-9 nats both count as equal"
    add(
        "O7",
        "divergence, rounds 8-10 over rounds 2-4",
        max(late, 1e-9) / max(early, 1e-9),
        conversations,
        note,
        "ratio",
    )
    note = "must be above 1e-6: the conversations are approximate at all"
    add("O7", "control: divergence in round 1", table[:, 0].mean(), conversations, note, "nats")


def o9_inputs(kind: str, add: Add) -> None:
    """Inputs that the package does not understand: the stock answer, nothing stored, a reason."""
    model = make_model(kind)
    ids = torch.tensor([STORED])
    options = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    cases = {"inputs_embeds": {"inputs_embeds": model.get_input_embeddings()(ids).detach()}}
    cases["training mode"] = {"input_ids": ids}  # the tiny models have no dropout, so the answer is the same
    for name, inputs in cases.items():
        cache = SuffixCache()
        ask(model, STORED, cache)
        segments = cache.stats.segments
        model.train(name == "training mode")
        got, want = (model.generate(**inputs, **options, **extra).logits for extra in ({"cache": cache}, {}))
        model.eval()
        report = cache.last_report
        closed = report.reason is not None and cache.stats.segments == segments and report.exact_tokens == 0
        add("O9", f"max abs logit difference, {name}", max_difference(got, want), 1, "target < 1e-4")
        add("O9", f"refused with a reason, {name}", closed, 1, report.reason or "no reason", unit="share")
    causal = torch.ones(len(STORED), len(STORED), dtype=torch.bool).tril()[None, None]
    causal[..., :30] &= torch.eye(len(STORED), dtype=torch.bool)[:, :30]  # the first 30 tokens are seen by nobody else
    if kind != "bloom":  # which takes no such mask
        with torch.no_grad():  # nor does generate itself
            want = model(ids, attention_mask=causal).logits
            got = model(ids, attention_mask=causal, **{cache_name(model): SuffixCache()}).logits
            plain = model(ids).logits
        add("O9", "max abs logit difference, 4D mask", _largest(got - want), 1, "target < 1e-4")
        add("O9", "control: what that mask changes", _largest(plain - want), 1, "must be above 1e-2")
    cache = SuffixCache()
    reports = [ask(model, STORED, cache).report for _ in range(2)]
    share = reports[-1].exact_tokens / len(STORED)
    add("O9", "control: plain ids reused", share, 1, "must be above 0.9", unit="share")


def _unrepaired(model) -> float:
    """What moved rows cost when nothing is repaired: the control of O1 and O3."""
    cache = SuffixCache(**NEAR_OPTIONS)
    ask(model, STORED, cache)
    got = ask(model, NEAR, cache)
    if not served(got.report):
        raise RuntimeError(f"nothing was moved, so this control shows nothing: {got.report}")
    return max_difference(got.scores[:1], ask(model, NEAR).scores[:1])


def _conversation(model, seed: int, size: int) -> list[float]:
    """KL(full || reuse) of the first token in each of 10 rounds, with `size` tokens of new text in each."""

    def asked(ids: list[int], *cache, steps: int):
        # a given mask, since transformers would take generated pad tokens for padding
        return ask(model, ids, *cache, steps=steps, attention_mask=torch.ones(1, len(ids), dtype=torch.long))

    cache = SuffixCache(tail_tokens=size - 2)
    passages = [old_text(24, seed + number) for number in range(4)]
    asked(old_text(30, seed + 9) + sum(passages, []) + new_text(size, seed), cache, steps=1)
    chat = new_text(20, seed + 8) + sum(reversed(passages), []) + new_text(size, seed + 9)
    divergences = []
    for number in range(ROUNDS):
        answer = asked(chat, cache, steps=4)
        approximate = served(answer.report) if number == 0 else answer.report.carried_tokens
        if not approximate:
            raise RuntimeError(f"round {number + 1} has no approximate row: {answer.report}")
        divergences.append(kl(asked(chat, steps=1).first, answer.first))
        chat = answer.tokens() + new_text(size, seed + 10 + number)
    return divergences


def _largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


# -- models beyond the tiny supported ones ---------------------------------------------------------------------------


def o9_models(results: Results) -> None:
    """Models whose rows can't be reused."""
    for kind in UNSUPPORTED:
        model, cache = make_model(kind), SuffixCache()
        want, largest, reasons = ask(model, STORED), 0.0, 0
        for _ in range(REPEATS):
            got = ask(model, STORED, cache)
            largest = max(largest, max_difference(got.scores, want.scores))
            reasons += bool(got.report.reason) and got.report.new_tokens == len(STORED)
        case = f"O9 {kind}"
        results.add(case, "max abs logit difference", largest, "logit", REPEATS, note="target < 1e-4")
        note = got.report.reason or "no reason"
        results.add(case, "refused with a reason", reasons / REPEATS, "share", REPEATS, note=note)


def o1_smollm2(options: OraclesOptions) -> None:
    """
    Exact reuse of a prompt's first half against what stock transformers shows between prefilling that prompt whole and
    in two chunks, split at the same place.
    """
    from scripts.smollm2 import load

    model, tokenizer = load(threads=options.threads)
    results = Results("oracles", "SmolLM2-135M-Instruct", "float32", options)
    cases = data.reorder_cases(tokenizer, options.data, options.prompts, options.seed)
    ours, stock = [], []
    for case in tqdm(cases, desc="O1 SmolLM2"):
        ids = case.measured
        whole = ask_smollm2(model, ids, 1, logits=True).logits
        past = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([ids[: len(ids) // 2]]), **{CACHE_ARGUMENT: past})
        stock.append(_largest(ask_smollm2(model, ids, 1, cache=past, logits=True).logits - whole))
        cache = SuffixCache(fidelity="exact")
        ask_smollm2(model, ids[: len(ids) // 2], 1, cache=cache)
        ours.append(_largest(ask_smollm2(model, ids, 1, cache=cache, logits=True).logits - whole))
        if cache.last_report.exact_tokens < len(ids) // 2:
            raise RuntimeError(f"the first half should be reused: {cache.last_report}")
    other = ask_smollm2(model, cases[0].stored, 1, logits=True).logits
    control = _largest(other - ask_smollm2(model, cases[0].measured, 1, logits=True).logits)
    n, name = len(cases), "O1 SmolLM2"
    for way, values, note in (("exact", ours, "target <= 2 x stock"), ("stock", stock, "whole against in two chunks")):
        metric = f"max abs logit difference, {way}"
        results.add(name, metric, max(values), "logit", n, min(values), max(values), f"{note}; smallest, largest")
    results.add(name, "exact / stock", max(ours) / max(stock), "ratio", n, note="target <= 2; ratio of the largest")
    note = "another order's answer; must be above 1e-2"
    results.add(name, "control: max abs logit difference", control, "logit", 1, note=note)


if __name__ == "__main__":
    main()
