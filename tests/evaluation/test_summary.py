import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

from hypersphere.evaluation import summarize_all_pairs, summarize_verification, summary, verify_scores


def people(count=15, each=4):
    labels = torch.arange(count).repeat_interleave(each)
    return torch.randn(count, 6)[labels] + 0.7 * torch.randn(count * each, 6), labels


def all_scores(x, y):
    x = x.double().numpy() / np.linalg.norm(x.double().numpy(), axis=1, keepdims=True)
    first, second = np.triu_indices(len(x), 1)
    return (x[first] * x[second]).sum(1), (y[first] == y[second]).numpy(), y[first].numpy(), y[second].numpy()


def test_summarize_all_pairs_matches_the_curve_of_scikit_learn():
    x, y = people()
    scores, same, *_ = all_scores(x, y)
    found = summarize_all_pairs(x, y, [0.1, 0.02], bootstrap=0)
    assert (found["same"], found["different"]) == (same.sum(), (~same).sum())
    far, tar, _ = roc_curve(same, scores, drop_intermediate=False)
    for point in found["tar"]:
        assert point["tar"] == pytest.approx(tar[far <= point["far"]].max())
    assert "draws" not in found


@pytest.mark.parametrize("by_class", [True, False])
def test_summarize_all_pairs_intervals_match_resampling(by_class):
    x, y = people()
    scores, same, one, two = all_scores(x, y)
    found = summarize_all_pairs(x, y, [0.1], bootstrap=400, by_class=by_class)
    rng, drawn = np.random.default_rng(1), []
    for _ in range(400):
        if by_class:
            times = np.bincount(rng.integers(15, size=15), minlength=15)
            weights = np.where(same, times[one], times[one] * times[two])
        else:
            weights = np.zeros(len(same))
            for kind in (same, ~same):
                places = np.flatnonzero(kind)
                weights += np.bincount(rng.choice(places, len(places)), minlength=len(same))
        order = np.argsort(-scores)
        negative, positive = (np.cumsum((weights * kind)[order]) / (weights * kind).sum() for kind in (~same, same))
        last = np.flatnonzero(negative <= 0.1)[-1]
        drawn.append((scores[order][last], positive[last]))
    expected = np.quantile(drawn, [0.025, 0.975], axis=0)
    assert found["drawn"] == ("classes" if by_class else "pairs")
    assert found["tar"][0]["threshold_interval"] == pytest.approx(expected[:, 0], abs=0.03)
    assert found["tar"][0]["interval"] == pytest.approx(expected[:, 1], abs=0.04)


def test_summarize_all_pairs_leaves_out_intervals_of_many_pairs(monkeypatch):
    x, y = people()
    monkeypatch.setattr(summary, "ALL_PAIRS_DRAWS", {1000: 1000, 2000: 20})
    assert summarize_all_pairs(x, y, [0.1])["draws"] == 20
    monkeypatch.setattr(summary, "ALL_PAIRS_DRAWS", {1000: 1000})
    assert "draws" not in summarize_all_pairs(x, y, [0.1])
    assert summarize_all_pairs(x, y, [0.1], bootstrap=5)["draws"] == 5
    monkeypatch.setattr(summary, "MAX_STORED_PAIRS", 1000)
    assert "draws" not in summarize_all_pairs(x, y, [0.1], bootstrap=5)


def test_summarize_verification_computes_intervals_like_single_statistics():
    x, y = people()
    scores, same, one, two = all_scores(x, y)
    verified = verify_scores(scores, same, far=[0.1])
    found = summarize_verification(verified, bootstrap=50, identities=(one, two), seed=3)
    assert found["auc"] == pytest.approx(roc_auc_score(same, scores))
    for name in ("accuracy", "eer", "auc"):
        generator = torch.Generator().manual_seed(3)
        interval = verified.interval(name, identities=(one, two), samples=50, generator=generator)
        assert found["intervals"][name] == [interval.low, interval.high]


def test_intervals_use_the_rule_of_the_points():
    verified = verify_scores([0.5] * 40, [1, 0] * 20, folds=2, far=[0.1], rule="linear")
    (point,) = summarize_verification(verified, bootstrap=20)["tar"]
    assert point["tar"] == pytest.approx(0.1)
    assert point["interval"] == pytest.approx([0.1, 0.1])
