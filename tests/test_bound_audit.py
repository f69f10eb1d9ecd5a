"""`bound/audit.py`: which requests, when it warns, how it tightens; against slow counts and simulations."""

import math
import random
import threading

import numpy as np
import pytest

from hf_suffix_cache.bound import Auditor
from hf_suffix_cache.bound.audit import KEPT, wilson


def audited(auditor, requests):
    return [number for number in range(1, requests + 1) if auditor.is_due()]


@pytest.mark.parametrize(
    "rate, first",
    [(0.01, [100, 200, 300]), (1.0, [1, 2, 3]), (0.5, [2, 4, 6]), (0.4, [3, 5, 8]), (0.0, []), (0.29, [4, 7, 11])],
)
def test_every_so_many_th_request_is_audited(rate, first):
    found = audited(Auditor(rate), 1000)
    assert found[:3] == first and len(found) == round(1000 * rate)


@pytest.mark.parametrize("percent", range(1, 101))
def test_hundred_requests_have_as_many_audits_as_the_rate_has_percent(percent):
    assert len(audited(Auditor(percent / 100), 100)) == percent  # 100 * 0.29 is less than 29 in floating point


def test_choosing_touches_no_random_generator():
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    auditor = Auditor(0.3)
    audited(auditor, 50)
    auditor.record(0.1, 0.2, 0.1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_rate_out_of_range_raises(rate):
    with pytest.raises(ValueError, match="rate"):
        Auditor(rate)


@pytest.mark.parametrize("rate", ["1", None, True])
def test_rate_of_another_type_raises(rate):
    with pytest.raises(TypeError, match="rate"):
        Auditor(rate)


def test_coverage_counts_requests_under_a_bound_only():
    auditor = Auditor(1.0)
    assert auditor.coverage.count == 0 and (auditor.coverage.low, auditor.coverage.high) == (0.0, 1.0)
    for true in (0.01, 0.01, 0.3, 0.0):
        auditor.record(0.02, true, 0.1)
    auditor.record(0.02, 5.0)
    found = auditor.coverage
    assert found.count == 4 and found.share == 0.75 and found.low < 0.75 < found.high
    assert [record.true for record in auditor.records] == [0.01, 0.01, 0.3, 0.0, 5.0]


@pytest.mark.parametrize("covered, count", [(0, 5), (5, 5), (90, 100), (9, 10)])
def test_wilson_ends_are_where_the_score_test_turns(covered, count):
    found = wilson(covered, count)
    for end in (found.low, found.high):
        if 0.0 < end < 1.0:
            assert abs(covered / count - end) / math.sqrt(end * (1 - end) / count) == pytest.approx(1.959963984540054)
    assert found.low <= found.share <= found.high


def simulate(auditor, random, misses, count, bound=0.1, excess=1.0):
    """Feed audits with a share of `misses`, off by exp(excess); a warning's place, or None."""
    warned = None
    for number in range(count):
        true = bound * math.exp(excess) if random.random() < misses else 0.5 * bound
        auditor.record(0.5 * bound, true, bound)
        if auditor.warning() and warned is None:
            warned = number + 1
    return warned


def test_coverage_as_promised_hardly_ever_warns():
    """At exactly alpha, 300 audits, looked at after each: the mean time to a false alarm is 1,000 audits or more."""
    random = np.random.default_rng(0)
    alarms = [simulate(Auditor(1.0), random, 0.1, 300) is not None for _ in range(200)]
    assert np.mean(alarms) < 0.3
    assert not any(simulate(Auditor(1.0), random, 0.03, 300) for _ in range(50))


@pytest.mark.parametrize("misses, most", [(0.5, 25), (0.3, 80)])
def test_broken_coverage_warns_soon(misses, most):
    random = np.random.default_rng(1)
    found = [simulate(Auditor(1.0), random, misses, 400) for _ in range(50)]
    assert all(found) and np.median(found) < most


def test_coverage_that_breaks_late_is_seen_as_fast():
    random, delays = np.random.default_rng(2), []
    for _ in range(30):
        auditor = Auditor(1.0)
        simulate(auditor, random, 0.03, 1000)
        delays.append(simulate(auditor, random, 0.5, 100))
    assert all(delays) and np.median(delays) < 25


def test_warning_comes_once_and_says_what_was_seen():
    auditor, random = Auditor(1.0), np.random.default_rng(3)
    texts = []
    for _ in range(60):
        auditor.record(0.01, 0.4 if random.random() < 0.6 else 0.01, 0.1)
        texts.append(auditor.warning())
    found = [text for text in texts if text]
    assert len(found) == 1 and "newest audited requests" in found[0] and "90% asked for" in found[0]
    assert auditor.warning() is None


def test_extra_margin_is_zero_until_coverage_breaks_then_covers_what_was_missed():
    auditor = Auditor(1.0)
    for _ in range(100):
        auditor.record(0.01, 0.01, 0.1)
    assert auditor.extra_margin == 0.0
    for _ in range(20):
        auditor.record(0.01, 0.1 * math.exp(1.5), 0.1)
        if auditor.extra_margin:
            break
    assert auditor.extra_margin == pytest.approx(1.5, abs=0.01)


def world(random, tightened):
    """A request whose log KL exceeds what the rule thinks by more than it should; a larger margin repairs more."""
    return 0.1 * math.exp(random.normal(0.6, 1.0) - tightened)


def test_tightened_rule_holds_the_bound_again_and_loosens_when_all_is_well():
    random, auditor = np.random.default_rng(4), Auditor(1.0)
    early = [world(random, 0.0) > 0.1 for _ in range(400)]
    for _ in range(100):
        auditor.record(0.05, world(random, auditor.extra_margin), 0.1)
    late = []
    for _ in range(2000):
        true = world(random, auditor.extra_margin)
        late.append(true > 0.1)
        auditor.record(0.05, true, 0.1)
    assert np.mean(early) > 0.5 and np.mean(late) < 0.15
    for _ in range(600):
        auditor.record(0.05, 0.01, 0.1)
    assert auditor.extra_margin == 0.0


def test_control_without_tightening_the_bound_stays_broken():
    random = np.random.default_rng(4)
    assert np.mean([world(random, 0.0) > 0.1 for _ in range(2000)]) > 0.5


def test_second_break_warns_again():
    auditor, random = Auditor(1.0), np.random.default_rng(5)
    assert simulate(auditor, random, 0.6, 40)
    for _ in range(2000):
        auditor.record(0.01, 0.0, 0.1)
    assert auditor.extra_margin == 0.0 and auditor.warning() is None
    assert simulate(auditor, random, 0.6, 60)


@pytest.mark.parametrize("true", [math.nan, math.inf])
def test_unknown_true_kl_breaks_the_bound_and_tightens_to_full(true):
    auditor = Auditor(1.0)
    for _ in range(15):
        auditor.record(0.01, true, 0.1)
    assert auditor.coverage.share == 0.0 and auditor.extra_margin >= 15.0


def test_memory_is_bounded():
    auditor = Auditor(1.0)
    for number in range(KEPT + 50):
        auditor.record(0.0, float(number))
    assert len(auditor.records) == KEPT and auditor.records[0].true == 50.0


def test_threads_lose_no_request_and_no_record():
    auditor, due = Auditor(0.25), []

    def work():
        for _ in range(400):
            if auditor.is_due():
                due.append(1)
                auditor.record(0.01, 0.0, 0.1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(due) == 800 and auditor.coverage.count == KEPT
