"""The driver of the peers' benchmark, with a stand-in for a peer, and the recipe of copied prefixes that it runs."""

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.common import Results, read_rows
from benchmarks.peers import METRICS, Peer, PeerFailed, PeerOptions, in_order, run, write
from benchmarks.speed_workloads import Request
from tiny_models import make_model, text

STAND_IN = """
import os, sys
sys.path.insert(0, {folder!r})
from protocol import serve

def make(job):
    print("an engine's remark")
    os.write(1, b"and one from C++\\n")

    def run(ids, reuse):
        if ids == [13]:
            raise ValueError("thirteen")
        return {{"first": 0.5 if reuse else 2.0, "total": 3.0, "cached": len(ids) * reuse, "answer": [sum(ids)]}}

    return run

serve(make)
"""


@pytest.fixture
def stand_in(tmp_path) -> Peer:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN.format(folder=str(peers.SCRIPTS)))
    return Peer(str(script))


def job_of(prompts: list[list[int]], runs: list[dict]) -> dict:
    return {"threads": 1, "new_tokens": 4, "prompts": prompts, "runs": runs}


def both_ways(prompt: int) -> list[dict]:
    return [{"prompt": prompt, "reuse": reuse, "measured": True} for reuse in (False, True)]


def test_run_engine_prints_to_stdout_gives_only_the_records(stand_in):
    lines = run(stand_in, job_of([[1, 2], [3]], both_ways(0) + both_ways(1)), limit=60)
    assert [(line["prompt"], line["reuse"], line["cached"], line["answer"]) for line in lines] == [
        (0, False, 0, [3]),
        (0, True, 2, [3]),
        (1, False, 0, [3]),
        (1, True, 1, [3]),
    ]


def test_run_script_fails_says_where_and_why(stand_in):
    with pytest.raises(PeerFailed, match="after 2 of 4 requests: ValueError: thirteen"):
        run(stand_in, job_of([[1], [13]], both_ways(0) + both_ways(1)), limit=60)


def test_run_too_slow_says_so(tmp_path):
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    with pytest.raises(PeerFailed, match="not finished after 1 s"):
        run(Peer(str(tmp_path / "sleeps.py")), job_of([], []), limit=1)


def test_versions_environment_missing_names_the_command():
    with pytest.raises(PeerFailed, match="scripts/peers.sh nowhere"):
        peers.versions_of(Peer("generate_plain.py", environment="nowhere"))


def test_in_order_measured_requests_run_both_ways_alternating():
    found = [Request(0, 0, True, [1]), *(Request(1, index, False, [2 + index]) for index in range(4))]
    prompts, runs = in_order(found, [9], n=3)
    assert prompts == [[9], [1], [2], [3], [4]]
    order = [(item["prompt"], item["reuse"], item["measured"]) for item in runs]
    assert order[:4] == [(0, False, False), (0, True, False), (0, True, False), (1, True, False)]
    assert order[4:] == [(2, True, True), (2, False, True), (3, False, True), (3, True, True), (4, True, True)] + [
        (4, False, True)
    ]


def test_write_ratio_is_of_medians_and_a_failure_replaces_every_row(tmp_path):
    job = job_of([[0] * 10, [0] * 20, [0] * 40], [])
    warm = [(0.1, 1.0, 5, [7]), (0.2, 2.0, 10, [7]), (0.9, 9.0, 40, [7])]
    cold = [(2.0, 4.0, 0, [7]), (4.0, 5.0, 0, [7]), (5.0, 6.0, 0, [8])]
    lines = [
        {"prompt": prompt, "reuse": reuse, "measured": True, "first": a, "total": b, "cached": c, "answer": d}
        for reuse, side in ((False, reversed(list(enumerate(cold)))), (True, enumerate(warm)))
        for prompt, (a, b, c, d) in side
    ]
    results = Results("peers", "a model", "float32", PeerOptions(output=str(tmp_path)))
    write("one rag", job, lines, "engine 1", results)
    values = {row["metric"]: float(row["value"]) for row in read_rows(results.path)}
    assert list(values) == list(METRICS)
    assert values == pytest.approx(
        {
            "first token / own cold": 0.2 / 4.0,
            "total / own cold": 2.0 / 5.0,
            "tokens reused share": (0.5 + 0.5 + 1.0) / 3,
            "cold first token": 4.0,
            "warm first token": 0.2,
            "answers equal to own cold": 2 / 3,
        },
        rel=1e-3,
    )
    peers.write_failure("one rag", PeerFailed("broke"), results)
    rows = read_rows(results.path)
    assert [(row["metric"], row["value"], row["n"]) for row in rows] == [(metric, "", "0") for metric in METRICS]
    assert {row["note"] for row in rows} == {"did not run: broke"}


@pytest.fixture
def prefix_copy(monkeypatch):
    monkeypatch.syspath_prepend(str(peers.SCRIPTS))
    module = importlib.import_module("prefix_copy")
    monkeypatch.setattr(module, "LEAST_PREFIX", 8)
    return module


def overlapping() -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens of each an earlier one begins with."""
    ids = text(60, seed=0)
    return [(ids[:20], 0), (ids[:20] + ids[30:34], 20), (ids[:12] + ids[40:50], 12), (ids[:4] + ids[50:], 0)]


@pytest.mark.parametrize("variant", ["DynamicCache", "StaticCache"])
def test_copied_prefix_answers_like_a_cold_run(variant, prefix_copy):
    copies = prefix_copy.PrefixCopies(make_model("llama"), {"variant": variant, "longest": 64, "new_tokens": 4})
    for prompt, shared in overlapping():
        cold, warm = copies(prompt, reuse=False), copies(prompt, reuse=True)
        assert warm["cached"] == shared
        assert warm["answer"] == cold["answer"]
    lengths = [len(prompt) + 3 for prompt, _ in overlapping()]
    assert [len(tokens) for tokens, _ in copies.held] == lengths
    assert [cache.get_seq_length() for _, cache in copies.held] == lengths


def test_copied_prefix_of_another_text_would_be_seen(prefix_copy, monkeypatch):
    monkeypatch.setattr(prefix_copy, "common", lambda first, second: min(len(first), len(second), 12))
    copies = prefix_copy.PrefixCopies(make_model("llama"), {"variant": "DynamicCache", "longest": 64, "new_tokens": 4})
    prompts = [text(20, seed=1), text(20, seed=2)]
    copies(prompts[0], reuse=True)
    assert copies(prompts[1], reuse=True)["answer"] != copies(prompts[1], reuse=False)["answer"]


def test_every_peer_has_a_script_and_the_scripts_import_no_engine_by_their_own_name():
    for peer in peers.PEERS.values():
        assert (peers.SCRIPTS / peer.script).is_file()
    modules = {path.stem for path in Path(peers.SCRIPTS).glob("*.py")}
    assert not modules & ({"vllm", "kvboost", "xllamacpp", "transformers", "torch"} | set(sys.stdlib_module_names))
