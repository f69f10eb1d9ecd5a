"""The speed benchmark's own arithmetic: exact token counts, limits that do the same work, peaks, plots. No timing."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from benchmarks import sources, speed_lookup, speed_micro, speed_workloads
from benchmarks.calls import CACHE_ARGUMENT, ask
from benchmarks.common import COLUMNS
from benchmarks.drawing import Table
from benchmarks.plot_speed import DRAWINGS
from benchmarks.speed import PARTS
from benchmarks.speed_limit import Preallocated, _arguments, roomy
from benchmarks.speed_reuse import _kept
from benchmarks.speed_runs import Peak, cache_bytes, passes_of, prefilled, rotated, rounds, row_bytes
from hf_suffix_cache import SuffixCache, SuffixCacheConfig
from hf_suffix_cache.planning import Span
from tiny_models import make_model, text


class Letters:
    """A tokenizer of words."""

    chat_template, bos_token_id = None, 1

    def __init__(self):
        self.ids: dict[str, int] = {}

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [self.ids.setdefault(word, len(self.ids) + 2) for word in re.findall(r"\w+|\s|.", text)]}


@pytest.fixture
def tokenizer(monkeypatch):
    rng = np.random.default_rng(0)
    words = [f"word{number}" for number in range(500)]
    paragraphs = [
        (" ".join(rng.choice(words, 60)) + ".", (sources.Question(f"What is {number}?", ("it",)),))
        for number in range(1500)
    ]
    monkeypatch.setattr(sources, "squad", lambda: {"one": paragraphs})
    return Letters()


# -- requests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passages", [8, 20])
def test_rag_holds_the_corpus_once_and_never_repeats_an_order(tokenizer, passages):
    found = speed_workloads.requests(tokenizer, f"rag{passages}", 2)
    warm = [request for request in found if request.warm]
    size, count = speed_workloads.PASSAGE_TOKENS, speed_workloads.CORPUS_PASSAGES
    head = len(found[0].prompt) - 32 - passages * size

    def cut(request):
        starts = range(head, head + passages * size, size)
        return [tuple(request.prompt[start : start + size]) for start in starts]

    corpus = {passage for request in warm for passage in cut(request)}
    assert len(corpus) == count and len(warm) * passages == count
    assert len({tuple(cut(request)) for request in found}) == len(found) == len(warm) + 20
    assert all(set(cut(request)) <= corpus for request in found)


def test_requests_are_decided_by_the_seed(tokenizer):
    for name in speed_workloads.WORKLOADS:
        assert speed_workloads.requests(tokenizer, name, 1) == speed_workloads.requests(tokenizer, name, 1)
    assert speed_workloads.requests(tokenizer, "nothing", 1) != speed_workloads.requests(
        tokenizer, "nothing", 1, seed=1
    )


def test_too_few_orders_are_an_error_and_no_endless_search(tokenizer):
    assert len(speed_workloads.reordered(speed_workloads.Texts(tokenizer), 1024, 64, 5).measured) == 5
    with pytest.raises(ValueError, match="4 passages have"):
        speed_workloads.reordered(speed_workloads.Texts(tokenizer), 1024, 64, 16)


def test_reordered_requests_have_exactly_the_length_and_other_neighbours(tokenizer):
    case = speed_workloads.reordered(speed_workloads.Texts(tokenizer), 2048, 64, 5)
    assert {len(ids) for ids in (case.stored, *case.measured)} == {2048} and len(case.measured) == 5
    bodies = {tuple(ids[:-64]) for ids in (case.stored, *case.measured)}
    assert len(bodies) == 6
    assert all(sorted(body) == sorted(case.stored[:-64]) for body in bodies)


def test_the_file_for_peers_holds_the_same_requests(tokenizer, tmp_path):
    speed_workloads.write_json(tmp_path / "requests.json", "none", tokenizer, 1)
    read = json.loads((tmp_path / "requests.json").read_text())
    for name in speed_workloads.WORKLOADS:
        prompts = [request.prompt for request in speed_workloads.requests(tokenizer, name, 1)]
        assert [item["prompt"] for item in read["workloads"][name]] == prompts


# -- limits --------------------------------------------------------------------------------------------------------


def report_of(*spans: tuple, rows: int):
    return SimpleNamespace(spans=(tuple(Span(*span) for span in spans),), computed_rows=rows, reason=None)


def test_passes_are_read_off_a_report():
    report = report_of((0, 2, "new"), (2, 4, "shifted"), (4, 5, "repaired"), (5, 6, "shifted"), (6, 8, "new"), rows=7)
    probe, repair = passes_of(report)
    assert probe.tolist() == [0, 1, 6, 7] and repair.tolist() == [4, 6, 7]
    (only,) = passes_of(report_of((0, 6, "exact"), (6, 8, "new"), rows=2))
    assert only.tolist() == [6, 7]


def test_passes_that_do_not_explain_the_rows_are_refused():
    with pytest.raises(RuntimeError, match="not the passes"):
        passes_of(report_of((0, 6, "exact"), (6, 8, "new"), rows=3))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_the_limits_passes_compute_what_a_prefill_does(kind):
    """With every row in one scattered pass the logits are a full prefill's; with wrong positions they are not."""
    model, ids = make_model(kind), text(48, 0)
    with torch.no_grad():
        full = model(torch.tensor([ids])).logits[0, -1]
        out = model(**_arguments(model, ids, np.arange(48), len(ids))).logits[0, -1]
        assert (out - full).abs().max() < 1e-3
        wrong = _arguments(model, ids, np.arange(48), len(ids))
        wrong["position_ids"] = wrong["position_ids"].flip(1)
        assert (model(**wrong).logits[0, -1] - full).abs().max() > 1e-2


def test_a_roomy_cache_appends_without_copies_and_says_the_same():
    model, ids = make_model("llama"), text(40, 1)
    stock = prefilled(model, ids[:30], chunk=8)
    room = roomy(stock, 16)
    assert all(isinstance(layer, Preallocated) for layer in room.layers)
    before = room.layers[0].keys.data_ptr()
    assert ask(model, ids, 5, cache=room).ids == ask(model, ids, 5).ids
    assert room.layers[0].keys.data_ptr() == before and room.get_seq_length() == 44
    assert stock.get_seq_length() == 30
    assert ask(model, text(30, 2) + ids[30:], 5, cache=roomy(stock, 16)).ids == ask(model, ids, 5).ids  # rows are used


def test_bytes_of_a_row():
    model = make_model("llama")
    assert row_bytes(model) == 3 * 2 * 16 * 2 * 4
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([text(7, 0)]), **{CACHE_ARGUMENT: cache})
    assert cache_bytes(cache) == 7 * row_bytes(model)


def test_a_peak_counts_what_was_freed_again():
    kept = torch.ones(1 << 20)
    with Peak() as peak:
        second = kept + 1  # 4 MiB
        third = second + 1  # 4 MiB
        del second
        del third
    assert 8 << 20 <= peak.bytes < 9 << 20
    with Peak() as peak:
        kept.add_(1)
    assert peak.bytes < 1 << 16


# -- figures -------------------------------------------------------------------------------------------------------


def test_rounds_change_which_way_comes_first():
    seen = []
    ways = {name: lambda number, name=name: seen.append((number, name)) or 1.0 for name in "abc"}
    assert {len(values) for values in rounds(ways, range(3)).values()} == {3}
    assert [name for _, name in seen] == list("abc") + list("bca") + list("cab")
    assert rotated(["x", "y"], 5) == ["y", "x"]


def test_kept_gain():
    groups = np.array([2, 2, 10, 10])
    first = {"cache": np.array([2.0, 2.0, 4.0, 4.0]), "vanilla": np.full(4, 10.0)}
    assert _kept(first, groups, 10) == pytest.approx((0.75, 0.75, 0.75))


def test_every_part_is_there():
    import importlib

    for module, function in PARTS.values():
        assert callable(getattr(importlib.import_module(f"benchmarks.{module}"), function))


def row(case: str, metric: str, value: float, note: str = "", model: str = "SmolLM2-135M-Instruct") -> dict:
    given = {"benchmark": "speed", "case": case, "metric": metric, "value": f"{value:.4g}", "note": note}
    return dict.fromkeys(COLUMNS, "") | given | {"model": model, "dtype": "float32"}


def test_targets_are_drawn_as_met_and_missed():
    rows = [
        row("limit, in place, 1024", "first token / limit", 1.0, "target <= 1.05; x"),
        row("rag8", "gain of batch 10 / of batch 2", 0.45, "target >= 0.9; x"),
        row("rag8", "lookup", 3.0, "median"),
    ]
    figure = DRAWINGS["speed"](Table(rows))
    assert [label.get_text() for label in figure.axes[0].texts] == [" 2.00", " 0.95"]
    assert DRAWINGS["speed"](Table(rows[2:])) is None


def test_drawings_of_what_was_not_measured_are_left_out():
    table = Table([row("rag8", "lookup", 3.0)])
    assert {name for name, draw in DRAWINGS.items() if draw(table) is not None} == set()


# -- without a model -----------------------------------------------------------------------------------------------


def test_a_prompt_of_stored_pieces_is_found_and_others_are_not():
    rng, config = np.random.default_rng(0), SuffixCacheConfig()
    shelf, texts, taken = speed_lookup.stored_shelf(rng, 1000)
    assert len(taken) == len(texts) - 1
    assert sum(map(len, texts)) <= 16_000
    moved = speed_lookup.timed_plan(shelf, speed_lookup.pieces(rng, texts, 2048), config)[1]
    assert 0.85 < (~moved.computed).mean() < 1.0
    assert speed_lookup.timed_plan(shelf, speed_lookup.words(rng, 2048), config)[1].computed.all()
    for kind, ids in speed_lookup.hard_prompts(rng, shelf, texts, 2000).items():
        with speed_lookup.without_kernels():
            row = speed_lookup.timed_plan(shelf, ids, config)[1]
        assert (~row.computed).mean() > 0.5, kind


def test_traffic_serves_what_it_stored():
    traffic, rng = speed_micro.Traffic(1, 1 << 28), np.random.default_rng(0)
    first = [speed_lookup.words(rng, 200) for _ in range(4)]
    assert traffic.serve(np.concatenate(first))["served"] == 0
    end = speed_lookup.words(rng, 32)
    assert traffic.serve(np.concatenate([*first[::-1], end]))["served"] > 700
    rows = traffic.store.bytes_used / traffic.shelf.pool.row_bytes
    assert rows < 2 * 832 + 64


def test_the_smallest_request_is_measured_against_its_limit():
    """What `limit` relies on: the rows that a moved prompt ran are those that its report names."""
    model, ids = make_model("llama"), text(600, 3)
    cache = SuffixCache()
    ask(model, ids[:300] + ids[300:600], 1, cache=cache)
    ask(model, ids[300:500] + ids[100:300] + text(64, 4), 1, cache=cache.using(store=False))
    handle = cache.using(store=False)
    ask(model, ids[300:500] + ids[100:300] + text(64, 5), 1, cache=handle)
    probe, repair = passes_of(handle.last_report)
    assert len(probe) >= 64 and len(repair) > 64 and repair[-1] == 463
