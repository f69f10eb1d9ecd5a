"""Part `register` of the benchmark `persistence`: many passages, straight to a folder, by a process that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import DynamicCache

from benchmarks.calls import ask
from benchmarks.common import MODELS, Options, Results, load_model, wilson
from benchmarks.data import load_paragraphs
from benchmarks.persistence_faults import tiny_llama
from hf_suffix_cache import SuffixCache
from hf_suffix_cache.store import filing
from hf_suffix_cache.store.files import INDEX, unpack_index

KINDS = {"tiny": 10_000, "smollm2": 1_000}  # passages
TOKENS = 64  # of a passage, at most
MAX_BYTES = {"tiny": 64 << 20, "smollm2": 512 << 20}  # of the store: a fraction of what is registered
CHECKPOINT_SECONDS = 10.0  # so that a run of a minute has some; less for fewer passages
KILL_AT = 0.4  # of the passages
CHECKED = 50


def register(options: Options, folder: Path) -> None:
    """A process registers the passages, is killed, and another one goes on; then some of them are asked for."""
    for kind, count in KINDS.items():
        count = options.n or count
        name, dtype = (MODELS["smollm2"], "bfloat16") if kind == "smollm2" else ("tiny random Llama", "float32")
        results = Results("persistence", name, dtype, options)
        case, here = f"register {count:,} passages to a folder", folder / kind
        started = time.perf_counter()
        first = _process(kind, count, here, options)
        while _found(here) < KILL_AT * count and first.poll() is None:
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        taken = time.perf_counter() - started
        kept = _found(here)
        assert 0 < kept < count, f"killed too late: {kept} of {count} passages are there"
        results.add(case, "passages that kill -9 left, served after it", kept, "passages", count)
        results.add(case, "first process, with its start", taken, "s", 1)
        second = _process(kind, count, here, options)
        out, _ = second.communicate()
        assert second.returncode == 0
        done = json.loads(out.splitlines()[-1])
        note = f"target: the {count - kept} that were missing, and no others"
        results.add(case, "passages run by the second process", done["run"], "passages", count, note=note)
        results.add(case, "second process, without its start", done["seconds"], "s", 1)
        rate = done["rows"] / done["seconds"]
        results.add(case, "rows per second, written and all", rate, "rows/s", 1, note="padding not counted")
        size = sum(path.stat().st_size for path in here.iterdir())
        results.add(case, "bytes on disk", size / 2**20, "MiB", 1, note=f"{done['tokens']:,} rows")
        held, limit = done["held"] / 2**20, MAX_BYTES[kind] / 2**20
        results.add(case, "largest memory of the store", held, "MiB", 1, note=f"`max_bytes` is {limit:g} MiB")
        results.add(case, "largest growth of the process, pages of files apart", done["grown"] / 2**20, "MiB", 1)
        _check(results, case, kind, count, here, options)


def _process(kind: str, count: int, folder: Path, options: Options) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks.persistence_register", kind, str(count), str(folder)]
    return subprocess.Popen([*command, str(options.threads)], stdout=subprocess.PIPE, text=True)


def _found(folder: Path) -> int:
    """Passages in a folder."""
    if not (folder / INDEX).exists():
        return 0
    contents = unpack_index((folder / INDEX).read_bytes(), folder)
    return sum(len(shelf["sequences"]) for shelf in contents["shelves"])


def _check(results: Results, case: str, kind: str, count: int, folder: Path, options: Options) -> None:
    """Passages at random as the start of a prompt: are they served, and is the answer that of a full prefill."""
    model, texts = _passages(kind, count, options.threads)
    started = time.perf_counter()
    cache = SuffixCache.load(folder, fidelity="exact", max_bytes=MAX_BYTES[kind])
    results.add(case, "open", time.perf_counter() - started, "s", 1)
    generator, good, agree = np.random.default_rng(options.seed), 0, 0
    largest = parts = 0.0
    started = time.perf_counter()
    for number in generator.choice(count, min(CHECKED, count), replace=False).tolist():
        prompt = texts[number] + texts[(number + 1) % count][:20]
        got = ask(model, prompt, 1, cache=cache, logits=True).logits.float()
        if good == 0:
            results.add(
                case, "first call: index of all texts, measurement of the model", time.perf_counter() - started, "s", 1
            )
        want = ask(model, prompt, 1, logits=True).logits.float()
        parts = max(parts, float((_in_parts(model, prompt, len(texts[number])) - want).abs().max()))
        good += cache.last_report.exact_tokens >= len(texts[number])
        largest = max(largest, float((got - want).abs().max()))
        agree += int(got.argmax()) == int(want.argmax())
    n = min(CHECKED, count)
    results.add(case, "served whole afterwards", good / n, "share", n, *wilson(good, n), note="target: all")
    results.add(case, "same first token as a full prefill", agree / n, "share", n, *wilson(agree, n))
    results.add(case, "largest difference of a logit to a full prefill", largest, "", n)
    note = "the prompts run in two parts, without this package"
    results.add(case, "the same of plain transformers", parts, "", n, note=note)


def _in_parts(model, prompt: list[int], first: int) -> torch.Tensor:
    """Logits of the last token where the first tokens run apart from the others, as they must to be served."""
    past = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([prompt[:first]]), past_key_values=past)
        return model(torch.tensor([prompt[first:]]), past_key_values=past).logits[0, -1].float()


def _passages(kind: str, count: int, threads: int):
    """Model, and token ids of its passages."""
    if kind == "tiny":
        generator = np.random.default_rng(0)
        sizes = generator.integers(TOKENS // 2, TOKENS + 1, count)
        return tiny_llama(), [generator.integers(3, 256, size).tolist() for size in sizes]
    model, tokenizer = load_model("smollm2", threads)
    texts = dict.fromkeys(tuple(tokenizer(each.text)["input_ids"][:TOKENS]) for each in load_paragraphs())
    texts = [list(each) for each in texts if len(each) >= TOKENS // 2][:count]
    assert len(texts) == count, f"there are {len(texts)} passages only"
    return model.to(torch.bfloat16), texts


def main(kind: str, count: int, folder: Path, threads: int) -> None:
    """What a process of its own does: its last line of output is JSON."""
    torch.set_num_threads(threads)
    model, texts = _passages(kind, count, threads)
    filing.CHECKPOINT_SECONDS = CHECKPOINT_SECONDS * count / KINDS[kind]
    cache = SuffixCache(fidelity="exact", max_bytes=MAX_BYTES[kind])
    cache.capability(model)  # apart from what is timed
    before, run, held, grown = _memory(), 0, 0, 0
    real = filing.Filing.done

    def done(self, batch):
        nonlocal run, held, grown
        run, held = run + len(batch), max(held, cache.stats.bytes_total)
        real(self, batch)
        grown = max(grown, _memory() - before)

    filing.Filing.done = done
    started = time.perf_counter()
    tokens = cache.register(model, texts, at="front", folder=folder)
    found = {"seconds": time.perf_counter() - started, "rows": cache.stats.prompt_tokens, "tokens": tokens}
    print(json.dumps(found | {"run": run, "held": held, "grown": grown}))


def _memory() -> int:
    """Memory of this process, in bytes, apart from pages of files: the system takes these back when it needs them."""
    found = psutil.Process().memory_info()
    return found.rss - getattr(found, "shared", 0)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
