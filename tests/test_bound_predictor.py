"""`bound/predictor.py`: ranking, calibration of the mean, failing closed."""

import json
import math

import numpy as np
import pytest

from hf_suffix_cache.bound import APPROXIMATE, EPSILON, FEATURES, LevelTrace, Predictor, spearman
from hf_suffix_cache.bound.predictor import COLUMNS, MIN_PROMPTS
from synthetic_traces import FALL, synthetic_prompt, synthetic_prompts


@pytest.fixture(scope="module")
def predictor():
    return Predictor.fit(synthetic_prompts(60, 1))


def targets(prompts, level):
    return [math.log(trace[level].kl + EPSILON) for trace in prompts]


@pytest.mark.parametrize("level", range(4))
def test_prediction_ranks_prompts_at_one_level(predictor, level):
    fresh = synthetic_prompts(150, 2)
    predicted = [predictor.log_kl(trace[level].features) for trace in fresh]
    assert spearman(predicted, targets(fresh, level)) > 0.8


def test_control_features_without_a_signal_do_not_rank():
    random = np.random.default_rng(3)

    def blind(count):
        prompts = synthetic_prompts(count, random.integers(1 << 30))
        noise = [[{name: random.normal() for name in FEATURES} for _ in trace] for trace in prompts]
        return [
            [LevelTrace(s.level, f, s.kl, s.rows) for s, f in zip(trace, row, strict=True)]
            for trace, row in zip(prompts, noise, strict=True)
        ]

    fitted, fresh = Predictor.fit(blind(60)), blind(150)
    assert abs(spearman([fitted.log_kl(trace[0].features) for trace in fresh], targets(fresh, 0))) < 0.25
    assert fitted.ridge >= 100.0  # cross-validation shrinks what does not help


def test_cross_validation_keeps_the_levels_of_a_prompt_together():
    """Each prompt has features of its own, the same at all levels: a fold by rows would learn prompts by heart."""
    random, prompts = np.random.default_rng(14), []
    for _ in range(24):
        features, kl = {name: random.normal() for name in FEATURES}, math.exp(random.normal(-3, 1.5))
        prompts.append([LevelTrace(level, features, kl, 1.0) for level in APPROXIMATE])
        prompts[-1].append(LevelTrace("full", {}, 0.0, 1.0))
    assert Predictor.fit(prompts).ridge >= 100.0


def test_fit_equals_the_normal_equations_solved_the_long_way(predictor):
    """Slopes against a least-squares solution with the penalty written as extra rows."""
    prompts = synthetic_prompts(60, 1)
    raw = []
    for trace in prompts:
        for step in trace[:-1]:
            share = step.features["share"]
            raw.append([step.features[name] for name in FEATURES] + [max(0, share - 0.1), max(0, share - 0.3)])
    inputs = (np.array(raw) - predictor.means) / predictor.scales
    logs = np.array([math.log(step.kl + EPSILON) for trace in prompts for step in trace[:-1]])
    penalty = math.sqrt(predictor.ridge) * np.eye(len(COLUMNS))
    stacked = np.vstack([inputs - inputs.mean(0), penalty])
    slopes = np.linalg.lstsq(stacked, np.append(logs - logs.mean(), np.zeros(len(COLUMNS))), rcond=None)[0]
    assert np.allclose(slopes, predictor.slopes, atol=1e-8)
    for row, trace in zip(inputs[::4], prompts, strict=True):
        assert predictor.log_kl(trace[0].features) == pytest.approx(predictor.intercept + row @ slopes, abs=1e-8)


def test_expected_kl_has_the_mean_of_the_fit_and_nearly_of_fresh_prompts(predictor):
    seen = [step for trace in synthetic_prompts(60, 1) for step in trace[:-1]]
    assert np.mean([predictor.expected_kl(step.features) for step in seen]) == pytest.approx(
        np.mean([step.kl for step in seen])
    )
    fresh = [step for trace in synthetic_prompts(400, 4) for step in trace[:-1]]
    ratio = np.mean([predictor.expected_kl(s.features) for s in fresh]) / np.mean([s.kl for s in fresh])
    assert 0.6 < ratio < 1.6


def test_later_level_is_predicted_by_the_median_drop(predictor):
    prompts = synthetic_prompts(60, 1)
    features = prompts[0][1].features
    here = predictor.log_kl(features)
    for target in (2, 3):
        ratios = [math.log((t[target].kl + EPSILON) / (t[1].kl + EPSILON)) for t in prompts]
        found = predictor.log_kl(features, APPROXIMATE[target], level="10 %") - here
        assert found == pytest.approx(np.median(ratios)) and abs(found + FALL[target] - FALL[1]) < 0.3
    assert predictor.log_kl(features, "10 %", level="10 %") == here
    assert predictor.log_kl(features, "full") == math.log(EPSILON)


def test_level_is_guessed_from_the_share(predictor):
    features = synthetic_prompts(60, 1)[0][0].features | {"share": 0.12}
    assert predictor.log_kl(features, "60 %") == predictor.log_kl(features, "60 %", level="10 %")
    assert predictor.log_kl(features | {"share": math.nan}, "60 %") == predictor.log_kl(
        features | {"share": math.nan}, "60 %", level="seams"
    )


def test_earlier_target_level_raises(predictor):
    with pytest.raises(ValueError, match="must not come before"):
        predictor.log_kl({}, "seams", level="30 %")


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("side", [-1, 1])
def test_feature_far_outside_is_never_predicted_easier_than_the_hardest(predictor, name, side):
    easy = min((t[3] for t in synthetic_prompts(60, 1)), key=lambda step: step.kl).features
    assert predictor.log_kl(easy) < predictor.hardest - 3
    place = FEATURES.index(name)
    edge = predictor.highs[place] if side > 0 else predictor.lows[place]
    for value in (edge + side * 1e-6, edge + side * 1e3, side * math.inf):
        assert predictor.is_unknown({**easy, name: value})
        assert predictor.log_kl({**easy, name: value}) >= predictor.hardest
    assert not predictor.is_unknown({**easy, name: edge})  # control: the edge itself is known


def test_known_range_holds_the_fitted_values_and_four_deviations(predictor):
    for trace in synthetic_prompts(60, 1):
        assert not any(predictor.is_unknown(step.features) for step in trace[:-1])
    assert (predictor.highs >= predictor.means + 4 * np.minimum(predictor.scales, 0.1)).all()


def test_nan_counts_as_mean_where_the_fit_lacked_it_too():
    random = np.random.default_rng(5)
    prompts = synthetic_prompts(60, 5)
    for trace in prompts:
        for step in trace[:-1]:
            if random.random() < 0.3:
                step.features["change"] = math.nan
    fitted = Predictor.fit(prompts)
    features = prompts[0][0].features
    mean = float(fitted.means[FEATURES.index("change")])
    assert fitted.log_kl({**features, "change": math.nan}) == pytest.approx(
        fitted.log_kl({**features, "change": mean})
    )
    fresh = synthetic_prompts(100, 6)
    assert spearman([fitted.log_kl(trace[0].features) for trace in fresh], targets(fresh, 0)) > 0.7


def test_nan_counts_as_harder_than_the_mean_where_the_fit_always_had_it(predictor):
    features = synthetic_prompts(1, 7)[0][0].features
    place = FEATURES.index("change")
    mean = predictor.log_kl({**features, "change": float(predictor.means[place])})
    without = {name: value for name, value in features.items() if name != "change"}
    assert predictor.log_kl(without) == pytest.approx(mean + abs(predictor.slopes[place]))
    assert predictor.log_kl(without) > mean + 0.3
    assert math.isfinite(predictor.log_kl({}))


def test_feature_that_is_never_there_is_left_out():
    prompts = synthetic_prompts(30, 8)
    for trace in prompts:
        for step in trace[:-1]:
            del step.features["peak"]
    fitted = Predictor.fit(prompts)
    assert fitted.slopes[FEATURES.index("peak")] == 0.0
    assert all(math.isfinite(fitted.log_kl(trace[0].features)) for trace in prompts)


def test_explain_adds_up(predictor):
    features = synthetic_prompts(1, 9)[0][0].features
    parts = predictor.explain(features)
    assert predictor.intercept + sum(part for _, part in parts) == pytest.approx(predictor.log_kl(features))
    assert parts[0][0] in ("change", "residual", "moved_attention")


def test_dict_round_trip_is_exact(predictor):
    again = Predictor.from_dict(json.loads(json.dumps(predictor.to_dict(), allow_nan=False)))
    for trace in synthetic_prompts(20, 10):
        assert again.log_kl(trace[1].features, "60 %") == predictor.log_kl(trace[1].features, "60 %")
        assert again.expected_kl(trace[1].features) == predictor.expected_kl(trace[1].features)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"columns": ["share"]}, "columns"),
        ({"levels": []}, "levels"),
        ({"slopes": [1.0]}, "slopes"),
        ({"means": "abc"}, "means"),
        ({"intercept": None}, "intercept"),
        ({"hardest": math.nan}, "hardest"),
        ({"scales": [0.0] * len(COLUMNS)}, "positive"),
        ({"drops": [[0.0]]}, "drops"),
    ],
)
def test_dict_with_a_wrong_field_raises(predictor, change, words):
    with pytest.raises(ValueError, match=words):
        Predictor.from_dict({**predictor.to_dict(), **change})


def test_too_few_prompts_raise():
    with pytest.raises(ValueError, match=f"at least {MIN_PROMPTS} prompts, got {MIN_PROMPTS - 1}"):
        Predictor.fit(synthetic_prompts(MIN_PROMPTS - 1, 0))
    assert Predictor.fit(synthetic_prompts(MIN_PROMPTS, 0)).num_prompts == MIN_PROMPTS


def test_prompts_without_any_error_predict_none():
    prompts = [[LevelTrace(s.level, s.features, 0.0, s.rows) for s in t] for t in synthetic_prompts(12, 11)]
    fitted = Predictor.fit(prompts)
    assert fitted.expected_kl(prompts[0][0].features) == 0.0
    assert fitted.log_kl(prompts[0][0].features) == pytest.approx(math.log(EPSILON))


def test_spearman_equals_correlation_of_ranks_counted_one_by_one():
    random = np.random.default_rng(12)
    for _ in range(20):
        a, b = random.integers(0, 6, 30), random.normal(size=30)
        ranks = [[sum(y < x for y in side) + (sum(y == x for y in side) + 1) / 2 for x in side] for side in (a, b)]
        assert spearman(a, b) == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert spearman([1, 2, 3], [10, 20, 400]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0


@pytest.mark.parametrize("a, b", [([1], [1]), ([1, 2], [1, 2, 3]), ([1, math.nan], [1, 2])])
def test_spearman_of_what_has_no_ranks_raises(a, b):
    with pytest.raises(ValueError, match="spearman"):
        spearman(a, b)


def test_control_synthetic_traces_are_spread_as_measured_ones():
    logs = targets(synthetic_prompts(300, 13), 0)
    assert 1.2 < np.std(logs) < 1.9
    assert len({step.kl for step in synthetic_prompt(np.random.default_rng(0))}) == 5
