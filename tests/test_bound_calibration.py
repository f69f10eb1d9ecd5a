"""`bound/calibration.py` and `bound/files.py`: split, labels, any bound and alpha, files that are damaged."""

import json
import math
import os

import numpy as np
import pytest

from hf_suffix_cache.bound import APPROXIMATE, FULL, Calibration, LevelTrace, Predictor, builtin, walk
from hf_suffix_cache.bound import calibration as module
from hf_suffix_cache.bound.conformal import base_predictions, forecasts, margin
from hf_suffix_cache.bound.features import true_kls
from synthetic_traces import synthetic_prompts

BOUNDS = (0.005, 0.02, 0.1)


def two_labels(count=60, seed=1, gap=2.0):
    prompts = synthetic_prompts(count, seed) + synthetic_prompts(count, seed + 1000, shift=gap)
    return prompts, ["prose"] * count + ["code"] * count


@pytest.fixture(scope="module")
def calibration():
    return Calibration.fit(*two_labels(), fingerprint="a tiny model")


def coverage(calibration, prompts, bound, label, margin_of=None):
    found = calibration.margin(bound, label) if margin_of is None else margin_of
    walks = [walk(calibration.predictor, trace, bound, found) for trace in prompts]
    return np.mean([w.accepted.kl <= bound for w in walks])


# --- fit


def test_margin_is_set_on_prompts_that_the_fit_did_not_see():
    prompts, labels = two_labels(30)
    calibration = Calibration.fit(prompts, labels)
    assert calibration.predictor.num_prompts == 24 and calibration.num_prompts == 36
    assert {label: len(sample) for label, sample in calibration.samples.items()} == {"code": 18, "prose": 18}
    for label, sample in calibration.samples.items():
        own = [trace for trace, name in zip(prompts, labels, strict=True) if name == label]
        places = [int(np.flatnonzero((true_kls(own) == row).all(1))[0]) for row in sample.kls]
        assert len(set(places)) == 18
        fitted_on = [own[place] for place in range(30) if place not in places]
        assert len(fitted_on) == 12
    again = Calibration.fit(prompts, labels)
    assert again.to_dict() == calibration.to_dict()
    assert Calibration.fit(prompts, labels, seed=1).to_dict() != again.to_dict()


def test_split_draws_at_random_inside_a_label():
    """Prompts come in the order of the caller's corpus: its first ones alone would make a skewed fit."""
    chosen = module._spread(["a"] * 40, 16, np.random.default_rng(0))
    assert chosen.sum() == 16 and 3 < chosen[:20].sum() < 13
    assert not np.array_equal(chosen, module._spread(["a"] * 40, 16, np.random.default_rng(1)))


def test_coverage_holds_for_each_label_and_bound_over_many_calibrations():
    kept = {(label, bound): [] for label in ("prose", "code") for bound in BOUNDS}
    fresh = {"prose": synthetic_prompts(100, 77), "code": synthetic_prompts(100, 78, shift=2.0)}
    for seed in range(12):
        calibration = Calibration.fit(*two_labels(50, 10 * seed))
        for label, bound in kept:
            kept[label, bound].append(coverage(calibration, fresh[label], bound, label))
    for label, bound in kept:
        assert np.mean(kept[label, bound]) > 0.9 - 3 * np.std(kept[label, bound]) / math.sqrt(12) - 0.02


def test_control_the_other_labels_margin_breaks_the_bound():
    """Features say that code is as easy as prose, and it is 20 times worse; so a margin from prose is too small."""
    prose, code = synthetic_prompts(60, 5), synthetic_prompts(160, 6)
    code = [[LevelTrace(s.level, s.features, s.kl * 20, s.rows) for s in trace] for trace in code]
    predictor = Predictor.fit(prose[:20])
    calibration = Calibration.fit(prose[20:] + code[:60], ["prose"] * 40 + ["code"] * 60, predictor=predictor)
    assert calibration.num_prompts == 100
    wrong = coverage(calibration, code[60:], 0.05, "code", calibration.margin(0.05, "prose"))
    assert wrong < 0.8 < coverage(calibration, code[60:], 0.05, "code")


def test_label_with_too_few_prompts_goes_by_all_together():
    prompts, labels = synthetic_prompts(60, 7), ["many"] * 50 + ["few"] * 10
    calibration = Calibration.fit(prompts, labels)
    assert len(calibration.samples["few"]) < 9 <= len(calibration.samples["many"])
    assert calibration.margin(0.02, "few") == calibration.margin(0.02)
    assert calibration.margin(0.02, "many") != calibration.margin(0.02, "few")
    assert "few (6, pooled)" in calibration.describe() and "many (30)" in calibration.describe()


def test_unknown_label_raises_and_lists_the_labels(calibration):
    for call in (
        lambda: calibration.margin(0.02, "poems"),
        lambda: calibration.next_level("seams", {}, 0.02, "poems"),
        lambda: calibration.always_full(0.02, "poems"),
    ):
        with pytest.raises(ValueError, match=r"'poems' was not calibrated; the labels are \['code', 'prose'\]"):
            call()


@pytest.mark.parametrize("labels", [["a"], ["a"] * 29 + [""], ["a"] * 29 + [3]])
def test_wrong_labels_raise(labels):
    with pytest.raises(ValueError, match="`labels` must hold one non-empty string per prompt, 30 in all"):
        Calibration.fit(synthetic_prompts(30, 0), labels)


@pytest.mark.parametrize("alpha, least", [(0.1, 9), (0.05, 19), (0.2, 4)])
def test_too_few_prompts_raise_and_say_how_many_are_needed(alpha, least):
    words = f"at least {least} to set the margin and the predictor 8 others, {least + 8} in all"
    with pytest.raises(ValueError, match=words):
        Calibration.fit(synthetic_prompts(least + 7, 0), alpha=alpha)
    enough = Calibration.fit(synthetic_prompts(least + 8, 0), alpha=alpha)
    assert enough.num_prompts == least and not enough.always_full(0.02)
    predictor = Predictor.fit(synthetic_prompts(8, 1))
    with pytest.raises(ValueError, match=f"at least {least} to set the margin; give more"):
        Calibration.fit(synthetic_prompts(least - 1, 0), alpha=alpha, predictor=predictor)


# --- any bound, any alpha


@pytest.mark.parametrize("alpha", [None, 0.05, 0.2])
@pytest.mark.parametrize("bound", [0.0007, 0.005, 0.033, 1.5])
def test_margin_of_any_bound_and_alpha_is_that_of_the_search(calibration, bound, alpha):
    sample = calibration.samples["code"]
    expected = margin(forecasts(sample.base, calibration.predictor.drops), sample.kls, bound, alpha or 0.1)
    assert calibration.margin(bound, "code", alpha) == expected
    assert calibration.margin(bound, "code", alpha) == expected  # from memory


def test_predictions_of_a_sample_are_the_predictors(calibration):
    prompts = synthetic_prompts(9, 8)
    own = Calibration.fit(prompts, predictor=calibration.predictor).samples["all"]
    assert np.array_equal(own.base, base_predictions(calibration.predictor, prompts))
    assert own.base[3, 0, 2] == calibration.predictor.log_kl(prompts[3][2].features)


def test_alpha_too_small_for_the_prompts_is_always_full_and_says_why(calibration):
    assert calibration.shortfall() is None and not calibration.always_full(0.02)
    assert calibration.margin(0.02, alpha=0.001) == math.inf and calibration.always_full(0.02, alpha=0.001)
    assert "alpha=0.001 needs at least 999 calibration prompts for the margin, there are 72" in calibration.shortfall(
        alpha=0.001
    )


def test_next_level_is_the_rule_with_the_margin_and_an_audits_extra(calibration):
    features = min((trace[0].features for trace in two_labels()[0]), key=calibration.predictor.log_kl)
    assert calibration.next_level("seams", features, 0.1, "code") is None
    assert calibration.next_level("seams", features, 0.1, "code", extra_margin=20.0) == FULL
    assert calibration.always_full(0.0) and calibration.next_level("seams", features, 0.0) == FULL


# --- nothing calibrated, built-in values


def test_margins_kept_are_few(calibration, monkeypatch):
    monkeypatch.setattr(module, "MARGINS_KEPT", 5)
    fresh = Calibration.from_dict(calibration.to_dict())
    for step in range(12):
        assert fresh.margin(0.01 + step / 1000) == calibration.margin(0.01 + step / 1000)
    assert len(fresh._margins) <= 5


def test_without_calibration_everything_is_full_and_says_so():
    empty = Calibration.none()
    assert empty.always_full(0.5) and empty.always_full(0.5, "poems") and empty.margin(0.5) == math.inf
    assert all(empty.next_level(level, {}, 10.0) == FULL for level in APPROXIMATE)
    assert empty.next_level(FULL, {}, 0.001) is None
    assert empty.expected_kl({}) is None
    assert "always a full prefill" in empty.describe() and "not calibrated" in empty.shortfall()


def test_builtin_without_its_file_knows_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "BUILTIN", tmp_path / "builtin.json")
    assert builtin().origin == "none" and builtin().always_full(0.1)


def test_builtin_takes_the_largest_margin_and_says_that_it_guarantees_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "BUILTIN", tmp_path / "builtin.json")
    prompts, labels = two_labels()
    Calibration.fit(prompts, labels, origin="builtin").save(tmp_path / "builtin.json")
    found, plain = builtin(), Calibration.fit(prompts, labels)
    for bound in BOUNDS:
        largest = max(plain.margin(bound, label) for label in (None, "prose", "code"))
        assert found.margin(bound) == found.margin(bound, "prose") == largest
        assert largest > min(plain.margin(bound, label) for label in (None, "prose", "code"))
    assert "built-in conservative values, no guarantee" in found.describe()


def test_shipped_builtin_file_if_any_loads():
    found = builtin()
    assert found.origin == ("builtin" if module.BUILTIN.exists() else "none")


def test_describe_is_one_line_with_alpha_sizes_and_labels(calibration):
    text = calibration.describe()
    for word in ("caller's prompts", "alpha 0.1", "72 prompts", "48 for the predictor", "code (36)", "a tiny model"):
        assert word in text
    assert "\n" not in text


# --- files


def test_save_and_load_round_trip(calibration, tmp_path):
    path = tmp_path / "calibration.json"
    calibration.save(path)
    calibration.save(path)  # over an old one
    again = Calibration.load(path, fingerprint="a tiny model")
    assert again.to_dict() == calibration.to_dict() and again.labels == ["code", "prose"]
    for bound in BOUNDS:
        for label in (None, "code"):
            assert again.margin(bound, label) == calibration.margin(bound, label)
    for trace in synthetic_prompts(30, 9):
        features = trace[0].features
        assert again.next_level("seams", features, 0.02) == calibration.next_level("seams", features, 0.02)
    assert os.listdir(tmp_path) == ["calibration.json"]
    Calibration.none().save(path)
    assert Calibration.load(path).origin == "none"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_save_leaves_the_old_file_and_nothing_else(calibration, tmp_path, monkeypatch, step):
    path = tmp_path / "calibration.json"
    calibration.save(path)
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, step, full_disk)
    with pytest.raises(OSError, match="no space"):
        Calibration.none().save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["calibration.json"]


def test_missing_file_and_folder_raise(calibration, tmp_path):
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError):
        calibration.save(tmp_path / "none" / "calibration.json")


@pytest.mark.parametrize("keep", [0, 1, 0.3, 0.999])
def test_truncated_file_raises(calibration, tmp_path, keep):
    path = tmp_path / "calibration.json"
    calibration.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(len(whole) * keep)])
    with pytest.raises(ValueError, match="no complete JSON file"):
        Calibration.load(path)


def edit(calibration, path, change, recount=False):
    from hf_suffix_cache.bound.files import _checksum

    calibration.save(path)
    document = json.loads(path.read_text())
    change(document)
    if recount:
        document["sha256"] = _checksum(document["calibration"])
    path.write_text(json.dumps(document))


def put(*keys, value):
    def change(document):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    "change, words",
    [
        (put("version", value=2), "has version 2, this release reads 1"),
        (put("version", value=None), "version None"),
        (put("format", value="else"), "not a calibration"),
        (put("calibration", "alpha", value=0.5), "changed after it was saved"),
        (put("calibration", "samples", "code", "kls", 0, 0, value=0.0), "changed after it was saved"),
        (put("calibration", value=[]), "changed after it was saved"),
    ],
)
def test_edited_file_raises(calibration, tmp_path, change, words):
    edit(calibration, tmp_path / "c.json", change)
    with pytest.raises(ValueError, match=words):
        Calibration.load(tmp_path / "c.json")


@pytest.mark.parametrize(
    "change, words",
    [
        (put("calibration", "alpha", value=2.0), "alpha"),
        (put("calibration", "alpha", value="much"), "alpha"),
        (put("calibration", "origin", value="heaven"), "origin"),
        (put("calibration", "fingerprint", value=None), "fingerprint"),
        (put("calibration", "samples", value=[]), "samples"),
        (put("calibration", "samples", "code", value=[]), "base"),
        (put("calibration", "samples", "code", "kls", value=[[0.1] * 5]), "as many predictions as KLs"),
        (put("calibration", "samples", "code", "base", 0, value=[1.0]), "base"),
        (put("calibration", "samples", "code", "kls", 0, 0, value=-1.0), "no KL below 0"),
        (put("calibration", "samples", "code", "kls", 0, 0, value=float("nan")), "finite"),
        (put("calibration", "predictor", "columns", value=["share"]), "columns"),
        (put("calibration", "predictor", value=7), "object with fields"),
        (lambda document: document["calibration"].pop("predictor"), "predictor"),
    ],
)
def test_file_with_a_right_checksum_and_wrong_content_raises(calibration, tmp_path, change, words):
    edit(calibration, tmp_path / "c.json", change, recount=True)
    with pytest.raises(ValueError, match=f"c.json can't be used.*{words}"):
        Calibration.load(tmp_path / "c.json")


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b"\xff\xfe\x00", b"{}", b"null"])
def test_file_of_another_kind_raises(tmp_path, content):
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(ValueError, match="c.json"):
        Calibration.load(tmp_path / "c.json")


def test_calibration_of_another_model_raises(calibration, tmp_path):
    calibration.save(tmp_path / "c.json")
    with pytest.raises(ValueError, match="was calibrated for 'a tiny model', not for 'another'"):
        Calibration.load(tmp_path / "c.json", fingerprint="another")
