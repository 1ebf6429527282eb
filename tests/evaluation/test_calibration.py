import json
import math

import numpy as np
import pytest
import torch
from scipy import optimize, special
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from hypersphere.evaluation import Calibration, actual_dcf, bayes_threshold, min_dcf, roc


def scored_pairs(seed=0, count=400, fraction=0.3, decimals=None):
    rng = np.random.default_rng(seed)
    same = rng.random(count) < fraction
    same[:2] = True, False
    quality = rng.uniform(0, 1, count)
    scores = 0.2 + 0.15 * rng.standard_normal(count) + 0.3 * same * (0.5 + quality)
    return scores if decimals is None else scores.round(decimals), same, quality


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("prior", [None, 0.5, 0.01])
@pytest.mark.parametrize("with_quality", [False, True])
def test_calibration_logistic_matches_scikit_learn(prior, with_quality):
    scores, same, quality = scored_pairs()
    columns = np.stack([scores, quality], 1) if with_quality else scores[:, None]
    weight = None
    if prior is not None:
        weight = np.where(same, prior / same.sum(), (1 - prior) / (~same).sum()) * len(same)
    expected = LogisticRegression(C=np.inf, tol=1e-12, max_iter=10_000).fit(columns, same, sample_weight=weight)
    more = {"quality": quality} if with_quality else {}
    calibration = Calibration.fit(scores, same, prior=prior, **more)
    np.testing.assert_allclose(
        calibration.probability(scores, **more), expected.predict_proba(columns)[:, 1], rtol=1e-4, atol=1e-7
    )
    odds = math.log(calibration.prior / (1 - calibration.prior))
    assert calibration.llr(0.4, *([0.7] if with_quality else [])).item() + odds == pytest.approx(
        expected.decision_function([[0.4, 0.7][: columns.shape[1]]])[0], rel=1e-4
    )


def test_calibration_logistic_is_a_stationary_point_to_rounding():
    scores, same, _ = scored_pairs()
    calibration = Calibration.fit(scores, same, prior=0.2)
    residual = np.where(same, 0.2 / same.sum(), 0.8 / (~same).sum()) * (calibration.probability(scores).numpy() - same)
    assert abs(residual.sum()) < 1e-14
    assert abs(residual @ scores) < 1e-14


@pytest.mark.parametrize("decimals", [None, 1])
def test_calibration_isotonic_matches_scikit_learn(decimals):
    scores, same, _ = scored_pairs(decimals=decimals)
    expected = IsotonicRegression(out_of_bounds="clip").fit(scores, same)
    calibration = Calibration.fit(scores, same, method="isotonic")
    at = np.concatenate([scores, np.linspace(-1, 2, 500)])
    # Probabilities of 0 and 1 are moved by 1/402, and with them the lines to the next blocks.
    np.testing.assert_allclose(calibration.probability(at), expected.predict(at), atol=1 / 402 + 1e-12)
    on_scores = calibration.probability(scores).numpy()
    np.testing.assert_allclose(on_scores, expected.predict(scores).clip(1 / 402, 401 / 402), atol=1e-12)
    assert (np.diff(calibration.llr(np.sort(at)).numpy()) >= -1e-12).all()


def test_calibration_probability_uses_the_given_prior():
    calibration = Calibration.fit(*scored_pairs()[:2])
    llr = calibration.llr([0.1, 0.4])
    expected = special.expit(llr.numpy() + math.log(0.01 / 0.99))
    np.testing.assert_allclose(calibration.probability([0.1, 0.4], prior=0.01), expected)
    assert calibration.llr(torch.zeros(2, 3)).shape == (2, 3)
    assert calibration.probability(0.3).shape == ()


@pytest.mark.parametrize("scores", [[0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 1.0, 2.0, 3.0]])
def test_calibration_of_separated_scores_is_platts_fit(scores):
    same = np.array([0, 0, 1, 1, 1])
    targets = np.where(same == 1, 4 / 5, 1 / 4)
    x = np.array(scores)

    def loss(parameters):
        z = parameters[0] * x + parameters[1]
        return (np.logaddexp(0, z) - targets * z).sum()

    expected = optimize.minimize(loss, [0.0, 0.0], tol=1e-14).x
    calibration = Calibration.fit(scores, same)
    odds = math.log(3 / 2)
    assert calibration.map.slope == pytest.approx(expected[0], rel=1e-4)
    assert calibration.map.intercept + odds == pytest.approx(expected[1], rel=1e-4)


def test_calibration_of_scores_separated_by_quality_is_finite():
    scores, quality = [0.0, 1.0, 0.5, 1.5], [0.0, 1.0, 0.0, 1.0]  # same if score − quality > 0.25
    calibration = Calibration.fit(scores, [0, 0, 1, 1], quality)
    llrs = calibration.llr(scores, quality)
    assert torch.isfinite(llrs).all()
    assert llrs[:2].max() < llrs[2:].min()
    isotonic = Calibration.fit([0.0, 1.0, 2.0, 3.0], [0, 0, 1, 1], method="isotonic")
    np.testing.assert_allclose(isotonic.probability([0.0, 1.0, 2.0, 3.0]), [1 / 6, 1 / 6, 5 / 6, 5 / 6])


@pytest.mark.parametrize("method", ["logistic", "isotonic"])
def test_calibration_of_constant_scores_gives_the_prior(method):
    calibration = Calibration.fit([0.3] * 4, [1, 0, 0, 0], method=method)
    assert calibration.llr([0.1, 0.3, 0.9]).tolist() == pytest.approx([0, 0, 0], abs=1e-12)
    assert calibration.probability(0.3).item() == pytest.approx(0.25)
    assert calibration.threshold(prior=0.9, samples=5).value == -math.inf
    assert calibration.threshold(prior=0.1, samples=5).value == math.inf


def test_calibration_warns_about_distances():
    with pytest.warns(UserWarning, match="same pairs score lower than different pairs"):
        calibration = Calibration.fit([0.9, 0.4, 0.5, 0.1], [0, 0, 1, 1])
    assert calibration.threshold(prior=0.1, samples=5).value == math.inf


@pytest.mark.parametrize("far", [0.2, 0.05, 0.01])
def test_calibration_threshold_at_far_is_that_of_the_curve(far):
    scores, same, _ = scored_pairs()
    threshold = Calibration.fit(scores, same).threshold(far=far, samples=50, generator=generator())
    assert threshold.value == roc(scores, same).at(far).threshold
    assert threshold.low <= threshold.value <= threshold.high
    assert np.mean(scores[~same] >= threshold.value) <= far


def test_calibration_threshold_at_far_with_quality_keeps_the_rate():
    scores, same, quality = scored_pairs(count=2000)
    calibration = Calibration.fit(scores, same, quality)
    thresholds = [calibration.threshold(far=0.05, quality=q, samples=2).value for q in quality[~same][:200]]
    llrs = calibration.llr(scores, quality).numpy()
    accepted = scores[~same][:200] >= np.array(thresholds)
    limit = roc(llrs, same).at(0.05).threshold
    assert (accepted == (llrs[~same][:200] >= limit - 1e-9)).all()


def test_calibration_threshold_warns_if_the_rate_is_not_resolved():
    calibration = Calibration.fit([0.1, 0.6, 0.4, 0.9], [0, 0, 1, 1])
    with pytest.warns(
        UserWarning, match=r"2 different pairs are too few for a FAR of 0.001; the lowest they resolve is 1/2"
    ):
        assert calibration.threshold(far=1e-3, samples=5).value == 0.9


@pytest.mark.parametrize(("prior", "cost"), [(0.5, (1, 1)), (0.1, (10, 1)), (0.3, (1.0, 4.0)), (0.5, 3)])
def test_calibration_bayes_threshold_has_the_ratio_of_costs(prior, cost):
    scores, same, quality = scored_pairs()
    c_miss, c_fa = cost if isinstance(cost, tuple) else (1, cost)
    calibration = Calibration.fit(scores, same)
    threshold = calibration.threshold(prior=prior, cost=cost, samples=30, generator=generator())
    assert calibration.llr(threshold.value).item() == pytest.approx(math.log(c_fa * (1 - prior) / (c_miss * prior)))
    assert threshold.low < threshold.value < threshold.high
    both = Calibration.fit(scores, same, quality)
    value = both.threshold(prior=prior, cost=cost, quality=0.2, samples=2).value
    assert both.llr(value, 0.2).item() == pytest.approx(math.log(c_fa * (1 - prior) / (c_miss * prior)))


@pytest.mark.parametrize("prior", [0.5, 0.2, 0.05])
def test_calibration_isotonic_bayes_threshold_has_the_lowest_cost(prior):
    scores, same, _ = scored_pairs(seed=3)
    threshold = Calibration.fit(scores, same, method="isotonic").threshold(prior=prior, samples=20)
    cost = actual_dcf(scores, same, prior, threshold=threshold.value)
    assert cost == pytest.approx(min_dcf(scores, same, prior), abs=1e-12)


def test_calibration_makes_the_actual_cost_nearly_minimal_on_other_pairs():
    scores, same, _ = scored_pairs(seed=1, count=4000)
    test_scores, test_same, _ = scored_pairs(seed=2, count=4000)
    for method in ("logistic", "isotonic"):
        llrs = Calibration.fit(scores, same, method=method).llr(test_scores)
        for prior in (0.5, 0.1):
            assert actual_dcf(llrs, test_same, prior) < 1.1 * min_dcf(test_scores, test_same, prior) + 0.01


def test_calibration_threshold_interval_has_the_width_of_the_large_sample_formula():
    rng = np.random.default_rng(0)
    same = np.arange(600) % 2 == 0
    scores = rng.standard_normal(600) + np.where(same, 1, -1)
    calibration = Calibration.fit(scores, same)
    interval = calibration.threshold(prior=0.5, samples=400, generator=generator())
    # The covariance of slope and intercept is the inverse of the information. Both kinds are resampled separately,
    # which takes 1/n₁ + 1/n₀ from the variance of the intercept (Prentice and Pyke, Biometrika 1979).
    design = np.stack([scores, np.ones(600)], 1)
    probability = calibration.probability(scores).numpy()
    covariance = np.linalg.inv(design.T @ (design * (probability * (1 - probability))[:, None]))
    covariance[1, 1] -= 2 / 300
    slope, intercept = calibration.map.slope, calibration.map.intercept
    gradient = np.array([intercept / slope**2, -1 / slope])  # of the threshold −intercept/slope
    error = math.sqrt(gradient @ covariance @ gradient)
    assert (interval.high - interval.low) / 2 == pytest.approx(1.96 * error, rel=0.15)


def test_calibration_threshold_interval_is_wider_over_groups():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(30), 20)
    same = np.arange(600) % 2 == 0
    scores = rng.standard_normal(600) + 2 * same + 2 * rng.standard_normal(30)[groups]

    def width(**more):
        calibration = Calibration.fit(scores, same, **more)
        interval = calibration.threshold(prior=0.5, samples=100, generator=generator())
        return interval.high - interval.low

    assert width(groups=groups) > 1.5 * width()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"method": "isotonic"},
        {"quality": scored_pairs()[2], "prior": 0.1},
        {"groups": np.arange(400) % 7},
        {"groups": (np.arange(400), np.where(scored_pairs()[1], np.arange(400), 400 + np.arange(400)))},
    ],
)
def test_calibration_survives_json(arguments):
    scores, same, _ = scored_pairs()
    calibration = Calibration.fit(scores, same, **arguments)
    text = json.dumps(calibration.to_dict(), allow_nan=False)
    restored = Calibration.from_dict(json.loads(text))
    quality = {"quality": 0.5} if "quality" in arguments else {}
    assert torch.equal(restored.llr(0.4, *quality.values()), calibration.llr(0.4, *quality.values()))
    options = {"samples": 5, **quality}
    for target in ({"far": 0.1}, {"prior": 0.2}):
        before, after = (one.threshold(**target, **options, generator=generator()) for one in (calibration, restored))
        assert before == after
    assert json.dumps(restored.to_dict()) == text
    assert repr(restored) == repr(calibration)


def test_calibration_from_dict_names_what_is_wrong():
    stored = Calibration.fit([0.1, 0.6, 0.4, 0.9], [0, 0, 1, 1]).to_dict()
    for change, message in (
        ({"format": "other"}, "stored must be a dictionary with the format 'hypersphere calibration 1'"),
        ({"method": "spline"}, "stored must be a complete calibration, but reading it failed: KeyError"),
        ({"map": {"slope": 1.0}}, "stored must be a complete calibration"),
        ({"map": {"slope": math.nan, "intercept": 0.0}}, "slope of the stored map must be finite"),
        ({"map": {"slope": "steep", "intercept": 0.0}}, "slope of the stored map"),
        ({"scores": [0.1, math.nan, 0.2, 0.3]}, "scores must be finite, but row 1 is not"),
        ({"same": [0, 1]}, "same must be a vector of 4 flags"),
        ({"prior": 2}, r"prior must be a probability in \(0, 1\), not 2"),
    ):
        with pytest.raises(ValueError, match=message):
            Calibration.from_dict(stored | change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"same": [1, 1, 1, 1]}, "at least one negative"),
        ({"same": [0, 0, 0, 0]}, "at least one positive"),
        ({"scores": [0.1, math.nan, 0.2, 0.3]}, "scores must be finite, but row 1 is not"),
        ({"method": "platt"}, "method must be one of 'logistic', 'isotonic', not 'platt'"),
        ({"quality": [1.0, 2.0]}, "quality must be a vector of 4 numbers"),
        ({"quality": [1.0] * 4, "method": "isotonic"}, "quality needs the method 'logistic', not 'isotonic'"),
        ({"prior": 1}, r"prior must be a probability in \(0, 1\), not 1"),
        ({"groups": [0, 1]}, "groups must be two vectors of labels or one vector of 4 labels"),
        ({"groups": ([0] * 4, [0] * 4)}, "groups must be equal exactly where same is True, which row 0 violates"),
    ],
)
def test_calibration_fit_rejects_invalid_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        Calibration.fit(**{"scores": [0.1, 0.6, 0.4, 0.9], "same": [0, 0, 1, 1], **arguments})


def test_calibration_rejects_invalid_use():
    plain = Calibration.fit([0.1, 0.6, 0.4, 0.9], [0, 0, 1, 1])
    rated = Calibration.fit([0.1, 0.6, 0.4, 0.9], [0, 0, 1, 1], [1.0, 2.0, 1.0, 2.5])
    for use, message in (
        (lambda: plain.llr(0.5, 1.0), "quality must be given if and only if the calibration was fitted with qualities"),
        (lambda: rated.probability(0.5), "quality must be given if and only if"),
        (lambda: rated.threshold(far=0.5), "quality must be given if and only if"),
        (lambda: plain.threshold(), "exactly one of far and prior must be given, not None and None"),
        (lambda: plain.threshold(far=0.5, prior=0.5), "exactly one of far and prior must be given, not 0.5 and 0.5"),
        (lambda: plain.threshold(far=2), r"far must be a rate in \(0, 1\), not 2"),
        (lambda: plain.threshold(prior=0.5, cost=(0, 1)), "c_miss must be a positive number, not 0"),
        (lambda: plain.threshold(prior=0.5, cost=(1, 2, 3)), "cost must be a positive number or two of them"),
        (lambda: plain.threshold(prior=0.5, samples=1), "samples must be an integer >= 2"),
        (lambda: plain.llr([0.1, math.nan]), "score must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            use()


def test_bayes_threshold_is_the_point_of_indifference():
    # Accepting costs (1 − p)·c_fa, rejecting costs p·c_miss; both are equal at the threshold.
    llr = bayes_threshold(0.02, c_miss=5, c_fa=2)
    p = special.expit(llr + math.log(0.02 / 0.98))
    assert (1 - p) * 2 == pytest.approx(p * 5)


def test_calibration_of_constant_scores_still_uses_the_quality():
    calibration = Calibration.fit([0.5] * 4, [0, 0, 1, 1], quality=[0.1, 0.2, 0.8, 0.9])
    for quality in (0.1, 0.9):
        is_same = calibration.llr([0.5], quality=[quality]).item() > 0
        threshold = calibration.threshold(prior=0.5, quality=quality, samples=5).value
        assert (threshold <= 0.5) == is_same, quality
