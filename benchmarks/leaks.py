"""
What does a stored row reveal of the text that stood before it (SmolLM2-135M-Instruct, fp32)?

A neutral paragraph is stored behind one of 20 secrets, each in a session of its own of one cache.

* `rows`: somebody who can read the store runs the paragraph behind each of the 20 candidates himself, and takes the
  one whose rows come nearest to the stored ones: behind the very same text, or behind a front and words of his own.
  The control looks at the first layer alone, whose rows depend on token and position only. The files of a saved store
  are searched for the same rows, and for the tokens.
* `answers`: the owner moves the paragraph behind a question for the secret, which stands nowhere in that prompt. How
  likely is the secret then, how likely behind rows that stood behind the 19 others, and does the model say it?
* `scopes`: sessions that are new to the cache ask the same question, and guess a whole stored prompt, right and wrong.
  A hook counts the rows that the first layer runs.

The machine may be busy, except for the ratio of times. What is finished is kept in the cache folder.

    python -m benchmarks.leaks --threads 1                              # 3 kinds x 3 paragraphs, about 40 minutes
    python -m benchmarks.leaks --threads 1 --n 1 --kinds city --output .cache/look
"""

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import DynamicCache

from benchmarks import data, sources
from benchmarks.calls import CACHE_ARGUMENT, ask
from benchmarks.common import Journal, Options, Paired, Results, bootstrap_mean, parse, wilson
from benchmarks.secret_prompts import GUESSES, KINDS, SECRETS, Prompts
from hf_suffix_cache import SuffixCache
from hf_suffix_cache.repair import NoRepair
from scripts.smollm2 import load

LAST_ROWS = 16
MOVED = {"moved": dict(repair=NoRepair(), seam_tokens=0, drift=False), "fast": dict(fidelity="fast"), "balanced": {}}


@dataclass
class LeaksOptions(Options):
    """`n` paragraphs of `tokens` tokens from `data`; which `kinds` of secrets, by comma."""

    n: int = 3
    tokens: int = 120
    kinds: str = "password,city,patient"
    data: str = "wiki"


class RowCounter:
    """Counts the rows that a model's first decoder layer runs, whatever any report says, while it is open."""

    def __init__(self, model):
        self.model = model
        self.rows = 0

    def __enter__(self) -> "RowCounter":
        self._hook = self.model.model.layers[0].register_forward_hook(self._count, with_kwargs=True)
        return self

    def __exit__(self, *exception) -> None:
        self._hook.remove()

    def _count(self, layer, args, kwargs, output) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.rows += hidden.shape[0] * hidden.shape[1]

    def of(self, call) -> tuple[object, int]:
        """What a call gives, and the rows that it ran."""
        self.rows = 0
        result = call()
        return result, self.rows


def main() -> None:
    options = parse(LeaksOptions, __doc__)
    model, tokenizer = load(threads=options.threads)
    journal = Journal(sources.cache_home() / "leaks.jsonl", {"threads": options.threads})
    taken = []
    for kind in options.kinds.split(","):
        for paragraph in paragraphs(tokenizer, options):
            prompts = Prompts(tokenizer, KINDS[kind], paragraph)
            part = [kind, paragraph, prompts.words]
            record = journal.record(part, lambda prompts=prompts: measure(model, prompts))
            taken.append({"kind": kind} | record)
    results = Results("leaks", "SmolLM2-135M-Instruct", "float32", options)
    write_rows(taken, results)
    write_answers(taken, results)
    write_scopes(taken, results)


def paragraphs(tokenizer, options: LeaksOptions) -> list[list[int]]:
    """Texts of exactly `tokens` tokens that hold no word of any kind."""
    words = {word for kind in KINDS.values() for word in kind.words.split()}
    found = []
    drawn = data.load_paragraphs(options.data)
    random.Random(options.seed).shuffle(drawn)
    for paragraph in drawn:
        ids = list(tokenizer(paragraph.text, add_special_tokens=False)["input_ids"])
        if len(ids) >= options.tokens and not any(word in paragraph.text for word in words):
            found.append(ids[: options.tokens])
        if len(found) == options.n:
            return found
    raise ValueError(f"{options.data!r} has {len(found)} such paragraphs, not {options.n}.")


def measure(model, prompts: Prompts) -> dict:
    """All that is measured of one kind and one paragraph, JSON-ready."""
    cache, owners = filled(model, prompts, SECRETS)
    found = {
        "rows": read_rows(model, cache, owners, prompts),
        "disk": read_disk(cache, owners, prompts),
        "answers": read_answers(model, owners, prompts),
    }
    with RowCounter(model) as counter:  # which makes the model another one, whose rows no file may hold
        return found | {"scopes": read_scopes(model, *filled(model, prompts, GUESSES), counter, prompts)}


def filled(model, prompts: Prompts, count: int) -> tuple[SuffixCache, list[SuffixCache]]:
    """A cache in which the first `count` secrets are stored, and the handles of their owners."""
    # a question for the secret is another topic than the paragraph's, which is not what is asked here
    cache = SuffixCache(max_bytes=1 << 30, topic_similarity=0.0)
    owners = [cache.session(f"owner {number}", ttl=None) for number in range(count)]
    for owner, secret in zip(tqdm(owners, desc="storing"), prompts.secrets[:count], strict=True):
        ask(model, prompts.stored(secret)[0], 1, cache=owner)
    return cache, owners


# -- who can read the rows -----------------------------------------------------------------------------------------


def read_rows(model, cache: SuffixCache, owners: list, prompts: Prompts) -> dict:
    """How many secrets the nearest candidate tells, by front and by what is looked at."""
    length = len(prompts.paragraph)
    stored = []
    for owner, secret in zip(owners, prompts.secrets, strict=True):
        start = prompts.stored(secret)[1]
        stored.append(stored_values(cache, owner, start, start + length))
    found = {}
    for front, prompt in (("same front", prompts.stored), ("own words", prompts.worded)):
        candidates = []
        for secret in tqdm(prompts.secrets, desc=front):
            ids, start = prompt(secret)
            candidates.append(fresh_values(model, ids, start, start + length))
        stored_all, fresh_all = torch.stack(stored), torch.stack(candidates)
        found[front] = {
            "all layers": told(stored_all, fresh_all),
            f"last {LAST_ROWS} rows": told(stored_all[..., -LAST_ROWS:, :], fresh_all[..., -LAST_ROWS:, :]),
            "first layer alone": told(stored_all[:, :1], fresh_all[:, :1]),
        }
    return found


def stored_values(cache: SuffixCache, owner: SuffixCache, start: int = 0, stop: int = 1 << 31) -> torch.Tensor:
    """
    Values of an owner's stored rows at positions [start, stop), `[layers, kv_heads, rows, head_dim]`. This is what an
    attacker with access to the process does, so it takes the store apart.
    """
    (shelf,) = [shelf for key, shelf in cache._store.shelves.items() if key[1].scope == owner._scope]
    (segment,) = shelf.segments
    (shape,) = shelf.pool.groups
    rows = np.flatnonzero((segment.positions >= start) & (segment.positions < stop))
    ((slab, places, _),) = shelf.pool.by_slab(segment.addresses[rows])
    return slab.values[shape][:, :, torch.from_numpy(places)].clone()


def read_disk(cache: SuffixCache, owners: list, prompts: Prompts) -> dict:
    """Of how many owners a saved store shows the last layer's values, bit for bit, and the tokens."""
    with tempfile.TemporaryDirectory() as folder:
        cache.save(folder)
        rows, tokens = (
            [file.read_bytes() for file in sorted(Path(folder).glob(f"{kind}-*.safetensors"))]
            for kind in ("rows", "tokens")
        )
    found = {"rows": 0, "tokens": 0}
    for owner, secret in zip(owners, prompts.secrets, strict=True):
        values = stored_values(cache, owner)[-1].contiguous().numpy().tobytes()
        text = np.array(prompts.stored(secret)[0], dtype="<i4").tobytes()
        found["rows"] += any(values in file for file in rows)
        found["tokens"] += any(text in file for file in tokens)
    return found


def fresh_values(model, ids: list[int], start: int, stop: int) -> torch.Tensor:
    """The same of a prefill by transformers alone."""
    past = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: past})
    return torch.stack([layer.values[0, :, start:stop] for layer in past.layers])


def told(stored: torch.Tensor, candidates: torch.Tensor) -> int:
    """
    How many stored rows lie nearer to their own candidate than to every other one: squared distance, each layer by its
    own scale. Both are `[secrets, layers, kv_heads, rows, head_dim]`, in the same order.
    """
    layers = candidates.shape[1]
    scale = candidates.transpose(0, 1).reshape(layers, -1).double().std(dim=1)[:, None]
    count = 0
    for number, rows in enumerate(stored):
        differences = ((candidates - rows).reshape(len(candidates), layers, -1).double() / scale) ** 2
        distance = differences.mean(dim=(1, 2))
        others = torch.cat([distance[:number], distance[number + 1 :]])
        count += bool(distance[number] < others.min())
    return count


# -- who can ask the owner's session -------------------------------------------------------------------------------


def read_answers(model, owners: list, prompts: Prompts) -> dict:
    """Log likelihoods of all secrets behind the rows of each owner, and whether the model says the owner's."""
    ids, secrets = prompts.asked(), torch.tensor(prompts.secrets)
    full = torch.log_softmax(ask(model, ids, 1, logits=True).logits[0].double(), -1)
    found = {"full": full[secrets].tolist(), "ways": {}, "said": {}}
    for way, settings in MOVED.items():
        likelihoods, said = [], 0
        for owner, secret in zip(tqdm(owners, desc=way), prompts.secrets, strict=True):
            handle = owner.using(store=False, **settings)
            logits = ask(model, ids, 1, cache=handle, logits=True).logits[0]
            report = handle.last_report
            moved = report.shifted_tokens + report.repaired_tokens
            if moved < 0.8 * len(prompts.paragraph):  # the control: else nothing would be measured
                raise RuntimeError(f"the paragraph should have been moved: {report}")
            likelihoods.append(torch.log_softmax(logits.double(), -1)[secrets].tolist())
            said += int(logits.argmax()) == secret
        found["ways"][way], found["said"][way] = likelihoods, said
    controls = [ask(model, prompts.asked(secret), 1).ids[0] == secret for secret in prompts.secrets[:GUESSES]]
    return found | {"said when told": sum(controls)}


# -- who can ask the same cache ------------------------------------------------------------------------------------


def read_scopes(model, cache: SuffixCache, owners: list, counter: RowCounter, prompts: Prompts) -> dict:
    """What sessions without any rows of their own are served and cost, and what the owner is and costs."""
    strangers = (cache.session(f"stranger {number}") for number in range(3 * GUESSES))
    ids = prompts.asked()
    stranger = next(strangers)
    answer, rows = counter.of(lambda: ask(model, ids, 1, cache=stranger, logits=True))
    plain = ask(model, ids, 1, logits=True)
    found = {
        "asked rows beyond the prompt": rows - len(ids),
        "asked served": reused(stranger),
        "asked difference": float((answer.logits - plain.logits).abs().max()),
        "guesses": [],
    }
    for number, words in enumerate(zip(prompts.secrets, prompts.unused, strict=False)):
        pair = {}
        for name, word in list(zip(("right", "wrong"), words, strict=True))[:: -1 if number % 2 else 1]:
            guess, handle = prompts.stored(word)[0], next(strangers)
            answer, rows = counter.of(lambda guess=guess, handle=handle: ask(model, guess, 1, cache=handle))
            pair[name] = {"rows": rows - len(guess), "served": reused(handle), "seconds": answer.first}
        found["guesses"].append(pair)
    own = prompts.stored(prompts.secrets[0])[0]
    _, rows = counter.of(lambda: ask(model, own, 1, cache=owners[0]))
    return found | {"owner rows": rows, "owner served": reused(owners[0])}


def reused(handle: SuffixCache) -> int:
    """Tokens of the newest call that came from the store, recomputed ones included."""
    report = handle.last_report
    return report.prompt_tokens - report.new_tokens


# -- results -------------------------------------------------------------------------------------------------------


def write_rows(taken: list[dict], results: Results) -> None:
    """Secrets that the rows tell."""
    for front in taken[0]["rows"]:
        for part in taken[0]["rows"][front]:
            count, n = sum(record["rows"][front][part] for record in taken), SECRETS * len(taken)
            note = f"of {SECRETS} candidates, chance {1 / SECRETS}; Wilson 95 %"
            if part == "first layer alone":
                note = "control: these rows have seen nothing but their token; target 0"
            results.add(f"rows: {front}", f"secrets told, {part}", count / n, "share", n, *wilson(count, n), note)
    for name in ("rows", "tokens"):
        count, n = sum(record["disk"][name] for record in taken), SECRETS * len(taken)
        note = "of a saved store, found in its files bit for bit; Wilson 95 %"
        results.add("disk", f"owners whose {name} stand there", count / n, "share", n, *wilson(count, n), note)


def write_answers(taken: list[dict], results: Results) -> None:
    """What the owner's rows do to the likelihood of the owner's secret."""
    n = SECRETS * len(taken)
    for way in MOVED:
        own, gains, hits = [], [], 0
        for record in taken:
            table, full = np.array(record["answers"]["ways"][way]), np.array(record["answers"]["full"])
            others = (table.sum(axis=0) - table) / (SECRETS - 1)
            excess = table - others
            own += np.diag(excess).tolist()
            gains += (np.diag(table) - full).tolist()
            hits += int((excess.argmax(axis=1) == np.arange(SECRETS)).sum())
        said = sum(record["answers"]["said"][way] for record in taken)
        case, note = f"answers: {way}", "log p behind its own rows less the mean behind the 19 others'; 95 % bootstrap"
        results.add(case, "likelihood of the secret", np.mean(own), "nats", n, *bootstrap_mean(own), note)
        results.add(case, "likelihood of the secret, largest", np.max(own), "nats", n, note="the same, of one secret")
        note = "log p less that of a full prefill, which has seen no secret; 95 % bootstrap"
        results.add(case, "likelihood beyond full prefill", np.mean(gains), "nats", n, *bootstrap_mean(gains), note)
        note = "the secret that its own rows raise most, by the same measure; chance 0.05; Wilson 95 %"
        results.add(case, "secrets told by likelihoods", hits / n, "share", n, *wilson(hits, n), note)
        results.add(case, "secrets said", said / n, "share", n, *wilson(said, n), "greedy first token; Wilson 95 %")
    said, n = sum(record["answers"]["said when told"] for record in taken), GUESSES * len(taken)
    note = "control: full prefill with the secret in the prompt; Wilson 95 %"
    results.add("answers: told", "secrets said", said / n, "share", n, *wilson(said, n), note)


def write_scopes(taken: list[dict], results: Results) -> None:
    """What other sessions are served, and what they pay."""
    scopes = [record["scopes"] for record in taken]
    asked, case = len(scopes), "scopes: a stranger asks"
    served = max(each["asked served"] for each in scopes)
    results.add(case, "tokens served, most", served, "tokens", asked, note="target 0")
    extra = max(abs(each["asked rows beyond the prompt"]) for each in scopes)
    results.add(
        case, "rows run other than the prompt's, most", extra, "rows", asked, note="target 0; counted by a hook"
    )
    difference = max(each["asked difference"] for each in scopes)
    results.add(case, "max abs logit difference to no cache", difference, "logit", asked, note="target < 1e-4")
    pairs = [pair for each in scopes for pair in each["guesses"]]
    case, n = "scopes: a stranger guesses", len(pairs)
    for name in ("right", "wrong"):
        served = max(pair[name]["served"] for pair in pairs)
        results.add(case, f"tokens served, {name} guesses, most", served, "tokens", n, note="target 0")
        extra = max(abs(pair[name]["rows"]) for pair in pairs)
        results.add(case, f"rows run other than the prompt's, {name} guesses, most", extra, "rows", n, note="target 0")
    times = Paired(*(np.array([pair[name]["seconds"] for pair in pairs]) for name in ("right", "wrong")))
    note = "ratio of medians; 95 % bootstrap, should include 1"
    results.add(case, "time to first token, right / wrong", times.ratio, "ratio", n, *times.interval(), note)
    rows = max(each["owner rows"] for each in scopes)
    results.add("scopes: the owner asks again", "rows run, most", rows, "rows", asked, note="control: the last token")


if __name__ == "__main__":
    main()
