import numpy as np
import torch
from scipy import stats
from sklearn import metrics

from hypersphere.evaluation import det_curve


def test_det_curve_matches_scikit_learn():
    rng = np.random.default_rng(0)
    same = rng.random(200) < 0.4
    scores = (rng.standard_normal(200) + 1.5 * same).round(1)
    curve = det_curve(scores, same)
    far, frr, thresholds = metrics.det_curve(same, scores, drop_intermediate=False)
    # scikit-learn ascends, and has only one point without a false accept and one without a false reject.
    first, last = int((curve.far == 0).sum()) - 1, int((curve.frr > 0).sum())
    np.testing.assert_allclose(curve.far[first : last + 1].flip(0), far, atol=1e-15)
    np.testing.assert_allclose(curve.frr[first : last + 1].flip(0), frr, atol=1e-15)
    np.testing.assert_array_equal(curve.thresholds[first : last + 1].flip(0), thresholds)
    assert curve.far[-1] == 1
    assert curve.frr[0] == 1


def test_det_curve_is_a_straight_line_for_normal_scores():
    quantiles = stats.norm.ppf((np.arange(4000) + 0.5) / 4000)
    scores, same = np.concatenate([quantiles, 2 + quantiles]), np.arange(8000) >= 4000
    curve = det_curve(scores, same)
    finite = (curve.far > 0.001) & (curve.far < 0.999) & (curve.frr > 0.001) & (curve.frr < 0.999)
    np.testing.assert_allclose(curve.probit_far[finite], stats.norm.ppf(curve.far[finite]), rtol=1e-9, atol=1e-9)
    # FAR = Φ(−t) and FRR = Φ(t − 2) add up to −2 on probit axes.
    np.testing.assert_allclose(curve.probit_far[finite] + curve.probit_frr[finite], -2, atol=0.05)
    assert curve.probit_far[0] == -torch.inf
    assert curve.probit_frr[0] == torch.inf
    assert repr(curve) == f"DetCurve({len(curve.far)} points)"
