"""Parts `kill`, `together` and `fuzz` of the benchmark `persistence`: crashes, processes together, hostile files."""

import contextlib
import copy
import os
import pickle
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.calls import ask
from benchmarks.common import Results, wilson
from benchmarks.persistence_stores import SMALL, Opened, opened, synthetic
from hf_suffix_cache import SuffixCache
from hf_suffix_cache.store import persistence
from hf_suffix_cache.store.files import INDEX, pack_index, unpack_index

KILLS, FILES = 200, 500
STORE_BYTES = 24 << 20
TOLERANCE = 1e-4  # O1
STRANGE = [None, True, -1, 0, 1, 2**31, 2**63, 10**40, 1.5, 1e300, "", "x", "../../etc/passwd", [], {}, [[]], {"a": 1}]


# -- crashes --------------------------------------------------------------------------------------------------------


def kill(options, folder: Path) -> None:
    """`kill -9` at random moments of saves that change one store for the other."""
    torch.set_num_threads(1)  # the threads of a pool are not there in a forked process
    results = Results("persistence", "random rows", "float32", options)
    n, generator = options.n or KILLS, random.Random(options.seed)
    stores = [synthetic(SMALL, STORE_BYTES, 50, seed) for seed in range(2)]
    whole = [Opened(store).fingerprint() for store in stores]
    taken = []
    for store in stores:
        started = time.perf_counter()
        persistence.save(store, folder)
        taken.append(time.perf_counter() - started)
        store.dormant.stored.clear()
    seen: Counter = Counter()
    for _ in tqdm(range(n), desc="kill"):
        process = _fork(lambda: _save_for_ever(stores, folder))
        time.sleep(generator.uniform(0, 6 * max(taken)))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        seen["left over files"] += sum(1 for _ in folder.glob("*.tmp"))
        seen[_which(folder, whole)] += 1
    good = seen["first"] + seen["second"]
    note = f"{seen['first']} and {seen['second']} of the two; a save takes {max(taken) * 1e3:.0f} ms; target: all"
    results.add("kill -9", "stores that load whole", good / n, "share", n, *wilson(good, n), note=note)
    for metric in ("left over files", "neither", "does not load"):
        results.add("kill -9", metric, seen[metric], "times", n)
    persistence.save(stores[0], folder)
    left = [path.name for path in folder.iterdir() if path.suffix == ".tmp"]
    results.add("kill -9", "left over files after the next save", len(left), "files", n)


def _save_for_ever(stores, folder: Path) -> None:
    while True:
        for store in stores:
            persistence.save(store, folder)
            store.dormant.stored.clear()  # all of it is written each time


def _which(folder: Path, whole: list[str]) -> str:
    try:
        found = opened(folder).fingerprint()
    except (ValueError, OSError):
        return "does not load"
    return {whole[0]: "first", whole[1]: "second"}.get(found, "neither")


def together(options, folder: Path) -> None:
    """Two processes save to a folder in turn while three others open it again and again."""
    torch.set_num_threads(1)  # the threads of a pool are not there in a forked process
    results = Results("persistence", "random rows", "float32", options)
    n = options.n or 40
    stores = [synthetic(SMALL, STORE_BYTES // 4, 50, seed) for seed in range(2)]
    whole = [Opened(store).fingerprint() for store in stores]
    persistence.save(stores[0], folder)
    writers = [_fork(lambda store=store: _save_for_ever([store], folder)) for store in stores]
    readers = [_fork(lambda number=number: _read(folder, whole, n, number)) for number in range(3)]
    bad = [os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) for reader in readers]
    for writer in writers:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    note = "three processes, while two save; target: all"
    total, good = 3 * n, 3 * n - sum(bad)
    results.add(
        "readers and writers", "stores that load whole", good / total, "share", total, *wilson(good, total), note
    )


def _read(folder: Path, whole: list[str], n: int, number: int) -> None:
    generator, bad = random.Random(number), 0
    for _ in range(n):
        bad += _which(folder, whole) not in ("first", "second")
        time.sleep(generator.uniform(0, 0.02))
    os._exit(min(bad, 255))


def _fork(work) -> int:
    """Run a function in a process of its own that shares what is loaded; its number."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException):
            work()
        os._exit(255)
    return process


# -- damaged and hostile files --------------------------------------------------------------------------------------


class Bomb:
    """What unpickling would run."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


class Damage:
    """Ways to spoil the files of a store."""

    def __init__(self, generator: random.Random, outside: Path):
        self.generator = generator
        self.outside = outside
        self.ways = {
            "a flipped bit": self.flip,
            "cut short": self.cut,
            "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 64),
            "zeroed range": self.zero,
            "empty": lambda path: path.write_bytes(b""),
            "missing": Path.unlink,
            "a link": self.link,
            "a folder": lambda path: (path.unlink(), path.mkdir()),
            "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
            "a pickle": lambda path: path.write_bytes(pickle.dumps(Bomb(outside / "marker"))),
            "random bytes": lambda path: path.write_bytes(self.generator.randbytes(path.stat().st_size)),
            "swapped": self.swap,
        }

    def flip(self, path: Path) -> None:
        """One bit."""
        data = bytearray(path.read_bytes())
        data[self.generator.randrange(len(data))] ^= 1 << self.generator.randrange(8)
        path.write_bytes(data)

    def cut(self, path: Path) -> None:
        """At any place."""
        os.truncate(path, self.generator.randrange(path.stat().st_size))

    def zero(self, path: Path) -> None:
        """A page that was not written."""
        data = bytearray(path.read_bytes())
        start = self.generator.randrange(len(data))
        data[start : start + 4096] = bytes(len(data[start : start + 4096]))
        path.write_bytes(data)

    def link(self, path: Path) -> None:
        """To a file outside, with the very same content."""
        target = self.outside / path.name
        shutil.move(path, target)
        path.symlink_to(target)

    def swap(self, path: Path) -> None:
        """For another file of the store."""
        others = [
            other for other in path.parent.iterdir() if other != path and other.suffix in (".json", ".safetensors")
        ]
        path.write_bytes(self.generator.choice(others).read_bytes())


def hostile_index(generator: random.Random, contents: dict) -> None:
    """Values of any kind in some places of an index."""
    places = list(_leaves(contents))
    for path in generator.sample(places, generator.choice([1, 1, 1, 2, 4])):
        inside = contents
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = generator.choice([*STRANGE, generator.randrange(400), -generator.randrange(400)])


def _leaves(value, path=()):
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _leaves(value[key], (*path, key))
    else:
        yield path


class Watch:
    """Notes every file that is opened, while `paths` is a list. An audit hook stays for good."""

    def __init__(self):
        self.paths: list[str] | None = None
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple) -> None:
        if event == "open" and self.paths is not None and isinstance(arguments[0], (str, bytes, os.PathLike)):
            self.paths.append(os.fsdecode(arguments[0]))


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """A random model whose answers depend on what it reads."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=256)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, initializer_range=0.3)).eval()
    model.generation_config.eos_token_id = None
    return model


def fuzz(options, folder: Path) -> None:
    """
    Half of the files are damaged in some way; half have an index that somebody changed on purpose, with the right
    checksum. Damage must be refused, skipped or harmless, with the answers of a full prefill. What somebody means can
    give wrong rows, for who writes to the folder can write what he likes: but it must run nothing, open nothing
    outside, and bring nothing down.
    """
    results = Results("persistence", "tiny random Llama", "float32", options)
    n, generator = options.n or FILES, random.Random(options.seed)
    model, live, watch = tiny_llama(), SuffixCache(fidelity="exact"), Watch()
    texts = [[generator.randrange(3, 256) for _ in range(40 + 4 * number)] for number in range(8)]
    cache = SuffixCache()
    for number in range(4):
        ask(model, texts[number] + texts[number + 1] + texts[7][:20], 8, cache=cache)
        ask(model, texts[number + 1][::-1] + texts[number], 8, cache=cache.session(number))
    cache.register(model, texts[6], at="front")
    cache.save(folder)
    prompts = [texts[0] + texts[1] + texts[6], texts[6] + texts[2], texts[3] + texts[4] + texts[5][:30]]
    full = [ask(model, prompt, 2, logits=True).logits for prompt in prompts]
    ask(model, prompts[0], 2, cache=live)
    before = _bits(live)
    outside = folder.parent / "outside"
    damaged, seen = folder.parent / "damaged", Counter()
    for number in tqdm(range(n), desc="fuzz"):
        for place in (damaged, outside):
            shutil.rmtree(place, ignore_errors=True)
        outside.mkdir()
        shutil.copytree(folder, damaged)
        on_purpose = number % 2 == 1
        if on_purpose:
            contents = copy.deepcopy(unpack_index((damaged / INDEX).read_bytes(), damaged))
            hostile_index(generator, contents)
            (damaged / INDEX).write_bytes(pack_index(contents))
        else:
            damage = Damage(generator, outside)
            kinds = ("index*", "tokens-*", "rows-*", "rows-*")
            path = generator.choice(sorted(damaged.glob(generator.choice(kinds))))
            damage.ways[generator.choice(list(damage.ways))](path)
        watch.paths = []
        outcome = _outcome(model, damaged, prompts, full)
        opened_outside = [path for path in watch.paths if path.startswith(str(outside)) or path.startswith("/etc")]
        watch.paths = None
        seen[("meant", outcome) if on_purpose else ("damaged", outcome)] += 1
        seen["outside"] += len(opened_outside)
        seen["run"] += (outside / "marker").exists()
    seen["live"] = sum(not torch.equal(a, b) for a, b in zip(before, _bits(live), strict=True))
    for kind, case in (("damaged", "damaged files"), ("meant", "hostile index, right checksum")):
        total = sum(count for key, count in seen.items() if isinstance(key, tuple) and key[0] == kind)
        for outcome in ("refused", "right", "wrong", "raised"):
            goal = {"wrong": "target 0", "raised": "target 0"}.get(outcome, "")
            if (kind, outcome) == ("meant", "wrong"):
                goal = "rows that were taken for others: who writes to the folder can write what he likes"
            results.add(case, outcome, seen[kind, outcome], "files", total, note=goal)
    for metric, key in (("files opened outside", "outside"), ("code run", "run"), ("live tensors changed", "live")):
        results.add("damaged and hostile files", metric, seen[key], "times", n, note="target 0")


def _outcome(model, folder: Path, prompts, full) -> str:
    try:
        loaded = SuffixCache.load(folder, fidelity="exact")
    except (ValueError, FileNotFoundError):
        return "refused"
    except Exception:
        return "raised"
    try:
        for handle in (loaded, loaded.session(1)):
            for prompt, want in zip(prompts, full, strict=True):
                got = ask(model, prompt, 2, cache=handle, logits=True).logits
                if (got - want).abs().max() > TOLERANCE:
                    return "wrong"
        approximate = SuffixCache.load(folder)
        for prompt in prompts:
            ask(model, prompt, 2, cache=approximate)
    except Exception:
        return "raised"
    return "right"


def _bits(cache) -> list[torch.Tensor]:
    """A copy of all memory of a cache, as integers: what is not used may be anything."""
    slabs = [slab for pool in cache._store.pools.values() for slab in pool.slabs.values()]
    return [tensor.clone().view(torch.int32) for slab in slabs for tensor in slab.tensors()]
