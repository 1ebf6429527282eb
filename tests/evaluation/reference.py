"""Brute-force evaluation: loops over pairs and thresholds in NumPy, written from the definitions."""

import itertools

import numpy as np


def unit(x):
    x = np.asarray(x, dtype=np.float64)
    length = np.linalg.norm(x, axis=1, keepdims=True)
    return np.divide(x, length, out=np.zeros_like(x), where=length > 0)


def rates(scores, same, threshold):
    """Return (FAR, TAR) when pairs with score >= threshold are accepted."""
    accepted = [s >= threshold for s in scores]
    true = sum(1 for a, flag in zip(accepted, same, strict=True) if a and flag)
    false = sum(1 for a, flag in zip(accepted, same, strict=True) if a and not flag)
    positives = sum(map(bool, same))
    return false / (len(same) - positives), true / positives


def every_threshold(scores):
    return [np.inf, *sorted(set(scores), reverse=True)]


def tar_step(scores, same, far):
    """Return the highest TAR of all thresholds whose FAR is at most `far`."""
    return max(t for f, t in (rates(scores, same, h) for h in every_threshold(scores)) if f <= far)


def tar_linear(scores, same, far):
    """Return the TAR at `far` on the piecewise linear curve through all points."""
    points = sorted(rates(scores, same, h) for h in every_threshold(scores))
    for (f0, t0), (f1, t1) in itertools.pairwise(points):
        if f0 <= far < f1:
            return t0 + (far - f0) / (f1 - f0) * (t1 - t0)
    raise AssertionError(far)


def auc(scores, same):
    """Return the fraction of (same, different) combinations in the right order; ties count one half."""
    wins = [
        1.0 if p > n else 0.5 if p == n else 0.0
        for p, a in zip(scores, same, strict=True)
        if a
        for n, b in zip(scores, same, strict=True)
        if not b
    ]
    return sum(wins) / len(wins)


def eer(scores, same):
    """Return the FAR with FAR = 1 − TAR, by bisection on the piecewise linear curve through all points."""
    points = np.array([rates(scores, same, h) for h in every_threshold(scores)])
    low, high = 0.0, len(points) - 1.0
    for _ in range(200):
        middle = (low + high) / 2
        i = min(int(middle), len(points) - 2)
        far, tar = points[i] + (middle - i) * (points[i + 1] - points[i])
        low, high = (middle, high) if far < 1 - tar else (low, middle)
    return far


def best_accuracy(scores, same):
    return max(
        np.mean([(s >= h) == bool(f) for s, f in zip(scores, same, strict=True)]) for h in every_threshold(scores)
    )


def fold_accuracies(first, second, same, fold, *, subtract_mean=False):
    """Return two accuracies per fold: with the lower and with the upper of the middle best thresholds."""
    result = []
    for k in range(max(fold) + 1):
        train, test = fold != k, fold == k
        center = np.concatenate([first[train], second[train]]).mean(0) if subtract_mean else 0.0
        scores = (unit(first - center) * unit(second - center)).sum(1)
        distinct = np.unique(scores[train])
        cuts = [-np.inf, *((distinct[1:] + distinct[:-1]) / 2), np.inf]
        train_accuracies = [np.mean((scores[train] >= c) == same[train]) for c in cuts]
        best = [c for c, a in zip(cuts, train_accuracies, strict=True) if a > max(train_accuracies) - 1e-12]
        test_accuracies = [np.mean((scores[test] >= c) == same[test]) for c in best]
        result.append((test_accuracies[(len(best) - 1) // 2], test_accuracies[len(best) // 2]))
    return result


def ranks(probes, probe_labels, gallery, gallery_labels, tolerance):
    """Return the rank of each probe's best mate, ties counted against it; None for a probe without a mate."""
    ranks_of_mates = []
    for x, y in zip(unit(probes), probe_labels, strict=True):
        scores = [float(x @ g) for g in unit(gallery)]
        mates = [s for s, label in zip(scores, gallery_labels, strict=True) if label == y]
        others = [s for s, label in zip(scores, gallery_labels, strict=True) if label != y]
        ranks_of_mates.append(1 + sum(s >= max(mates) - tolerance for s in others) if mates else None)
    return ranks_of_mates


def tpir(identified_scores, stranger_scores, mated, fpir):
    """Return the highest TPIR of all thresholds whose FPIR is at most `fpir`."""
    best = 0.0
    for h in [np.inf, *identified_scores, *stranger_scores]:
        if np.mean([s >= h for s in stranger_scores]) <= fpir:
            best = max(best, sum(s >= h for s in identified_scores) / mated)
    return best


def fisher(x, y):
    """Return the angular Fisher score (thesis, equation A.1)."""

    def cos(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    m = x.mean(0)
    within = between = 0.0
    for k in np.unique(y):
        members = x[y == k]
        within += sum(1 - cos(v, members.mean(0)) for v in members)
        between += len(members) * (1 - cos(members.mean(0), m))
    return within / between
