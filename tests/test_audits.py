"""Audits: a share of answers is run in full as well, what was predicted is held against what is true."""

import logging

import numpy as np
import pytest
import torch

from hf_suffix_cache import SuffixCache
from hf_suffix_cache.signals import divergence
from reference import ask, check_pool, stored
from tiny_models import A, B, C, D, head, make_model, question

SOURCE = head(0) + A + B + C + D + question(0)


def moved(number: int) -> list[int]:
    return head(1 + number, 9) + C + A + D + B + question(1 + number)


def full_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


def test_audit_records_the_true_kl_and_its_exact_rows_replace_the_approximate_ones():
    model = make_model("llama")
    cache = stored(model, SOURCE, audit_rate=1.0)
    ids = moved(0)
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt, cache=cache, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    (record,) = cache.audits.records
    want = divergence(full_logits(model, ids), out.logits[0][0])
    assert record.true == pytest.approx(want, rel=1e-3, abs=1e-6)
    assert record.true > 1e-3 and record.bound is None
    del out  # with the view that it hands out
    answer = ask(model, ids + [9, 8, 7], cache.using(fidelity="exact"))
    assert answer.report.exact_tokens == len(ids)
    check_pool(cache)


def test_audits_of_a_batch_take_the_worst_row():
    model = make_model("llama")
    cache = stored(model, SOURCE, audit_rate=1.0)
    prompts = torch.tensor([moved(0), moved(1)])
    out = model.generate(
        prompts, cache=cache, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    want = max(divergence(full_logits(model, moved(row)), out.logits[0][row]) for row in (0, 1))
    assert cache.audits.records[0].true == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("rate, count", [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_rate_is_a_share_of_the_approximate_requests(rate, count):
    model = make_model("llama")
    cache = stored(model, SOURCE, audit_rate=rate)
    for number in range(8):
        ask(model, moved(number), cache)
        ask(model, [200 + number, *SOURCE[:8]], cache)  # nothing approximate in it
    assert len(cache.audits.records) == count


def test_audits_count_in_no_report_and_draw_no_random_number():
    model = make_model("llama")
    plain, audited = stored(model, SOURCE), stored(model, SOURCE, audit_rate=1.0)
    for cache in (plain, audited):
        torch.manual_seed(3)
        prompt = torch.tensor([moved(0)])
        cache.sampled = model.generate(prompt, cache=cache, max_new_tokens=5, do_sample=True)
        cache.next_number = torch.rand(1)
    assert torch.equal(plain.sampled, audited.sampled) and torch.equal(plain.next_number, audited.next_number)
    assert plain.stats.requests == audited.stats.requests == 2
    assert plain.stats.computed_rows == audited.stats.computed_rows
    assert len(audited.reports) == 2 and audited.last_report.shifted_tokens > 0


def test_requests_under_a_bound_that_ran_in_full_count_as_kept():
    model = make_model("llama")
    cache = stored(model, SOURCE, audit_rate=1.0)
    report = ask(model, moved(0), cache.using(max_kl=0.0)).report
    assert report.level == "full" and report.shifted_tokens == 0
    (record,) = cache.audits.records
    assert record.true == 0.0 and record.bound == 0.0


def test_broken_coverage_warns_once_and_tightens(caplog):
    cache = SuffixCache(audit_rate=1.0)
    auditor = cache.audits
    with caplog.at_level(logging.WARNING, logger="hf_suffix_cache"):
        for _ in range(40):
            auditor.record(0.001, 0.5, 0.01)
    assert auditor.extra_margin > 0 and auditor.coverage.share == 0.0
    assert "calibrate" in auditor.warning() and auditor.warning() is None


def test_a_failing_audit_leaves_the_answer(monkeypatch, caplog):
    from hf_suffix_cache import auditing

    model = make_model("llama")
    cache = stored(model, SOURCE, audit_rate=1.0)

    def fails(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(auditing, "exact_rerun", fails)
    answer = ask(model, moved(0), cache)
    assert answer.report.shifted_tokens > 0 and not cache.audits.records
    assert any("audit failed" in record.message for record in caplog.records)
    assert np.isfinite(answer.report.timings["total"])


def test_an_audit_of_a_call_that_is_not_stored_stores_nothing():
    model = make_model("llama")
    cache = stored(model, SOURCE, audit_rate=1.0)
    before = cache.stats.segments
    for _ in range(2):
        report = ask(model, moved(0), cache.using(store=False)).report
        assert report.shifted_tokens and report.exact_tokens == 0
    assert len(cache.audits.records) == 2 and cache.stats.segments == before
    ask(model, moved(0), cache)  # control: one that is stored becomes exact
    assert ask(model, moved(0), cache.using(store=False)).report.exact_tokens == len(moved(0)) - 1
