"""GPU check: whole requests, of a tiny model for what is right, of one with 1B parameters for time and memory."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from benchmarks.calls import CACHE_ARGUMENT, Forced, ask, kl_divergence
from benchmarks.common import Paired, alternate
from benchmarks.gpu_kernels import need_flash
from benchmarks.gpu_part import Part
from hf_suffix_cache import SuffixCache, flash

TINY = dict(hidden_size=256, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2)
LARGE = dict(  # the sizes of Llama 3.2 1B, with a small vocabulary
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8
)
VOCABULARY = 4096


def make_model(part: Part, sizes: dict, dtype: torch.dtype, spread: float = 0.02):
    """A llama of random weights on the part's device, and a count of the rows that its first layer sees."""
    torch.manual_seed(part.options.seed)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=65_536, initializer_range=spread, **sizes)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, None, None
    with torch.device(part.device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    counter = Rows()
    model.model.layers[0].register_forward_pre_hook(counter, with_kwargs=True)  # stays: another hook, another identity
    return model, counter


class Rows:
    """Forward hook that counts rows: batch x queries."""

    def __init__(self):
        self.seen = 0

    def __call__(self, module, args, kwargs):
        states = args[0] if args else kwargs["hidden_states"]
        self.seen += states.shape[0] * states.shape[1]


def passages(part: Part, count: int, length: int) -> list[list[int]]:
    """Texts of random tokens."""
    random = np.random.default_rng(part.options.seed + 1)
    return random.integers(4, VOCABULARY, (count, length)).tolist()


def prompt(texts: list[list[int]], number: int) -> list[int]:
    """A head of its own, the texts in an order of their own, and a question of its own."""
    random = np.random.default_rng(1000 + number)
    own = random.integers(4, VOCABULARY, 64).tolist()
    order = random.permutation(len(texts))
    return own[:16] + [token for place in order for token in texts[place]] + own[16:]


# -- what is right ------------------------------------------------------------------------------------------------


def oracles(part: Part) -> None:
    """Exact hits, moved text wholly repaired, rows counted, in fp32; more than one row, and padding."""
    model, counter = make_model(part, TINY, torch.float32, spread=0.1)
    texts = passages(part, 6, part.size(200, 40))
    prompts = [prompt(texts, number) for number in range(4)]
    stock = [ask(model, ids, 8, logits=True) for ids in prompts]
    allowed = tolerance(part, model, prompts[0])
    part.require(apart(stock[0], stock[1]) > 10 * allowed, "control: another prompt gives the same logits")
    for fidelity, fraction in (("exact", 0.15), ("balanced", 1.0), ("balanced", 0.15)):
        cache = SuffixCache(fidelity=fidelity, repair_fraction=fraction)
        case, reused = f"{fidelity}, {fraction:.0%} repaired", 0
        for number in (0, 0, 1, 1, 2, 3):  # each text is seen as new, again, and in other orders
            counter.seen = 0
            got, report = ask(model, prompts[number], 8, cache, logits=True), cache.last_report
            report.check()
            generated = 7  # the forwards behind the first one
            rows = counter.seen - generated - report.capability_rows - report.healed_rows
            part.require(rows == report.computed_rows, f"{case}: {rows} rows ran, {report.computed_rows} are reported")
            if fidelity == "exact" or fraction == 1.0:
                off = apart(got, stock[number])
                part.require(off < allowed, f"{case}: logits off by {off:.2e}, allowed {allowed:.2e}")
            moved = report.shifted_tokens + report.repaired_tokens
            reused += report.exact_tokens if fidelity == "exact" else moved
        part.require(reused > 0, f"{case}: nothing was reused: {report.reason}")
    check_batch(part, model, prompts, allowed)


def check_batch(part: Part, model, prompts: list[list[int]], allowed: float) -> None:
    """Rows of unequal length, padded on the left, twice."""
    parts = [prompts[0], prompts[1][:-7], prompts[0][: len(prompts[0]) // 2]]
    longest = max(len(ids) for ids in parts)
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in parts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in parts], device=model.device)
    cache, options = SuffixCache(fidelity="exact"), dict(do_sample=False, max_new_tokens=6, pad_token_id=0)
    options |= {"output_logits": True, "return_dict_in_generate": True}
    want = torch.stack(model.generate(ids, attention_mask=mask, **options).logits)
    for _ in range(2):
        got = torch.stack(model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **options).logits)
        off = float((got - want).abs().max())
        part.require(off < allowed, f"batch: logits off by {off:.2e}, allowed {allowed:.2e}")
    part.require(cache.last_report.exact_tokens > 0, f"batch: nothing was reused: {cache.last_report.reason}")


def apart(left, right) -> float:
    """Largest difference of logits of two answers."""
    return float((left.logits - right.logits).abs().max())


def tolerance(part: Part, model, ids: list[int]) -> float:
    """Twice what stock transformers differs by between a prompt run whole and in two chunks, 1e-4 at least."""
    tokens, cache = torch.tensor([ids], device=model.device), DynamicCache()
    with torch.no_grad():
        whole = model(tokens).logits[:, -1]
        model(tokens[:, : len(ids) // 2], **{CACHE_ARGUMENT: cache})
        chunked = model(tokens[:, len(ids) // 2 :], **{CACHE_ARGUMENT: cache}).logits[:, -1]
    off = float((whole - chunked).abs().max())
    part.results("tiny llama", "float32").add("oracles", "stock, whole against chunks", off, "", 1)
    return max(1e-4, 2 * off)


def flash_model(part: Part) -> None:
    """A model that is set to flash-attn answers as under sdpa: moved text, and a padded batch; by our calls of it."""
    need_flash(part)
    texts, forced = passages(part, 6, part.size(200, 40)), list(range(10, 18))
    first, second = prompt(texts, 0), prompt(texts, 1)
    answers, batches = {}, {}
    for attention in ("sdpa", "flash_attention_2"):
        model, _ = make_model(part, TINY, torch.bfloat16, spread=0.1)
        set_attention(model, attention)
        cache = SuffixCache(repair_fraction=0.15)
        ask(model, first, 4, cache)
        with counted_calls() as calls:
            answers[attention] = ask(model, second, 8, cache, logits=True, forced=forced)
            report = cache.last_report
            batches[attention] = padded_answer(model, [first, second[:100]], cache)
        part.require(report.shifted_tokens > 0, f"{attention}: nothing was moved: {report.reason}")
        used = calls["varlen"] > 0 and calls["with_kvcache"] > 0
        part.require(used == (attention != "sdpa"), f"{attention}: flash-attn was called {calls}")
    stock = ask(model, second, 8, logits=True, forced=forced)
    away = float(kl_divergence(stock.logits, answers["sdpa"].logits).mean())
    results = part.results("tiny llama", "bfloat16")
    for case, (one, other) in {
        "moved text": [answer.logits for answer in answers.values()],
        "padded batch": list(batches.values()),
    }.items():
        between = float(kl_divergence(one, other).mean())
        results.add(f"flash model, {case}", "KL(sdpa || flash)", between, "nats", 8)
        part.require(between < 0.05 + away, f"{case}: KL(sdpa || flash) {between:.4f}, KL(full || sdpa) {away:.4f}")


def set_attention(model, name: str) -> None:
    """Run the model's layers by this implementation from now on."""
    model.set_attn_implementation(name)


def padded_answer(model, rows: list[list[int]], cache: SuffixCache) -> torch.Tensor:
    """Logits of the first two tokens behind prompts that are padded on the left, `[tokens, batch, vocabulary]`."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=model.device)
    options = dict(do_sample=False, max_new_tokens=2, min_new_tokens=2, pad_token_id=0)
    options |= {"output_logits": True, "return_dict_in_generate": True, CACHE_ARGUMENT: cache}
    forced = Forced(longest, [10, 11])  # the same two tokens whatever the logits
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    output = model.generate(ids, attention_mask=mask, logits_processor=LogitsProcessorList([forced]), **options)
    return torch.stack(output.logits).float().cpu()


@contextlib.contextmanager
def counted_calls() -> Iterator[dict[str, int]]:
    """How often flash-attn's functions are called inside by `flash.py`."""
    calls, found = {"varlen": 0, "with_kvcache": 0}, flash.library()

    def counted(name: str) -> Callable:
        def call(*args, **kwargs):
            calls[name] += 1
            return getattr(found, name)(*args, **kwargs)

        return call

    spy = flash.Library(counted("varlen"), counted("with_kvcache"), found.device, found.dtypes)
    with mock.patch.object(flash, "library", lambda: spy):
        yield calls


# -- time and memory ------------------------------------------------------------------------------------------------


def speed(part: Part) -> None:
    """First token, decoding and peak memory of a model of 1B parameters, a 4K prompt, in bf16."""
    model, _ = make_model(part, TINY if part.dry else LARGE, torch.bfloat16)
    results = part.results("tiny llama" if part.dry else "llama 1B, random", "bfloat16")
    texts, steps, pairs = passages(part, 20, part.size(200, 20)), part.size(32, 4), range(part.options.n)
    numbers = iter(range(10_000))
    exact, moving = SuffixCache(fidelity="exact"), SuffixCache()
    fixed = prompt(texts, 0)
    for cache in (exact, moving):
        ask(model, fixed, 2, cache)
    ask(model, fixed, 2)

    def first(cache, ids):
        return ask(model, ids, 1, cache).first

    def fresh(_):
        return first(None, prompt(texts, next(numbers)))

    hits = alternate(lambda _: first(exact, fixed), fresh, pairs)
    add_ratio(part, results, "exact hit", "first token / vanilla", hits)
    part.require(exact.last_report.exact_tokens > 0.9 * len(fixed), f"no exact hit: {exact.last_report.reason}")
    moved = alternate(lambda _: first(moving, prompt(texts, next(numbers))), fresh, pairs)
    add_ratio(part, results, "passages in a new order", "first token / vanilla", moved)
    report = moving.last_report
    part.require(report.shifted_tokens > len(fixed) // 2, f"passages were not reused: {report.reason}")
    results.add("passages in a new order", "rows run / prompt", report.computed_rows / report.prompt_tokens, "", 1)

    def step(cache):
        return lambda _: float(np.median(ask(model, fixed, steps, cache()).steps))

    decoding = alternate(step(lambda: exact), step(lambda: None), pairs)
    add_ratio(part, results, "decoding", "time per token / DynamicCache", decoding)
    results.add("decoding", "time per token", float(np.median(decoding.first)) * 1e3, "ms", part.options.n)
    if not part.dry:
        peak_memory(part, results, model, exact, fixed)


def add_ratio(part: Part, results, case: str, metric: str, times: Paired) -> None:
    """A ratio of medians, with what it is a ratio of."""
    note = f"{np.median(times.first) * 1e3:.2f} ms and {np.median(times.second) * 1e3:.2f} ms; 95 % interval"
    results.add(case, metric, times.ratio, "", len(times.first), *times.interval(), note=note)
    part.require(bool(np.isfinite(times.ratio)), f"{case}: no times")


def peak_memory(part: Part, results, model, cache: SuffixCache, ids: list[int]) -> None:
    """Peak of a hit beyond the store's memory, and of stock, each above what is allocated before."""

    def peak(store) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - cache.stats.bytes_total
        ask(model, ids, 16, store)
        return torch.cuda.max_memory_allocated() - before - cache.stats.bytes_total

    ours, stock = peak(cache), peak(None)
    results.add("exact hit", "peak memory / DynamicCache", ours / stock, "", 1, note=f"{ours} and {stock} bytes")
    part.require(ours <= 1.1 * stock, f"peak memory of a hit {ours:,} bytes, of stock {stock:,}")
