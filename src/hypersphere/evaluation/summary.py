"""Summaries of an evaluation as plain data, for tables and JSON files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from hypersphere._validation import require
from hypersphere.evaluation._arrays import Array
from hypersphere.evaluation.identification import identify_by_first
from hypersphere.evaluation.intervals import as_groups, percentile_interval, resampled_weights
from hypersphere.evaluation.roc import OperatingPoint, RankedScores, read_curve
from hypersphere.evaluation.streaming import AllPairs, verify_blocks
from hypersphere.evaluation.verification import Verification, pair_scores

__all__ = ["summarize_all_pairs", "summarize_identification", "summarize_verification"]

BOOTSTRAP = 1000  # default number of bootstrap draws
MAX_RESAMPLED_PAIRS = 20_000  # largest number of pairs for which intervals are computed by default
# Default draws for up to this number of pairs, so that intervals take a few seconds; none for more pairs.
ALL_PAIRS_DRAWS = {20_000: 1000, 500_000: 200}
MAX_STORED_PAIRS = 10_000_000  # largest number of pairs whose scores are stored for intervals that were requested
LEVEL = 0.95


def summarize_verification(
    verified: Verification,
    *,
    bootstrap: int | None = None,
    identities: tuple[Array, Array] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Return accuracies, rates and thresholds of a verification, with 95 % bootstrap intervals, by name.

    Args:
        verified: the result of `verify`.
        bootstrap: draws for the intervals, 0 for none; None for 1,000 unless there are more than 20,000 pairs.
        identities: identities of the two sides of each pair, to resample whole identities rather than pairs.
        seed: seed of the draws.

    Example:
        >>> from hypersphere.evaluation import verify
        >>> x = torch.eye(4)
        >>> same = torch.tensor([True, False, True, False])
        >>> verified = verify(x, x[[0, 2, 2, 1]], same, folds=2)
        >>> summary = summarize_verification(verified, bootstrap=0)
        >>> summary["accuracy"], summary["same"], summary["different"]
        (1.0, 2, 2)
    """
    names = ("accuracy", "standard_error", "best_accuracy", "best_threshold", "eer", "auc")
    summary: dict[str, Any] = {name: getattr(verified, name) for name in names}
    summary["tar"] = _point_rows(verified.points)
    same = int(verified.same.sum())
    summary |= {"same": same, "different": len(verified.same) - same, "folds": len(verified.accuracies)}
    draws = bootstrap
    if draws is None:
        draws = BOOTSTRAP if len(verified.same) <= MAX_RESAMPLED_PAIRS else 0
    if not draws:
        return summary
    require(draws >= 2, "bootstrap", "0, or a number of draws >= 2", draws)
    groups = None if identities is None else as_groups("identities", identities, verified.same)
    curve_intervals = _add_intervals(verified.scores, verified.same, groups, summary, draws, seed, verified.rule)
    generator = torch.Generator().manual_seed(seed)
    accuracy = verified.interval("accuracy", identities=identities, samples=draws, generator=generator)
    intervals = {"accuracy": [accuracy.low, accuracy.high], **curve_intervals}
    return summary | {"intervals": intervals, "draws": draws, "drawn": "pairs" if identities is None else "classes"}


def summarize_all_pairs(
    features: Array,
    labels: Array,
    far: Sequence[float],
    *,
    bootstrap: int | None = None,
    by_class: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the equal error rate, and the rates and thresholds at false accept rates, of all pairs of samples.

    They are exact, and memory does not grow with the number of pairs, except for the 95 % bootstrap intervals.

    Args:
        features: (N, d) embeddings.
        labels: (N,) integers.
        far: false accept rates.
        bootstrap: draws for the intervals, 0 for none; None for 1,000, or 200 for more than 20,000 pairs, and none for
            more than 500,000. There are never intervals for more than ten million pairs.
        by_class: resample whole classes rather than pairs.
        seed: seed of the draws.

    Example:
        >>> features, labels = torch.eye(4)[[0, 0, 1, 1]], [0, 0, 1, 1]
        >>> summary = summarize_all_pairs(features, labels, [0.25], bootstrap=0)
        >>> summary["same"], summary["different"], summary["tar"][0]["threshold"]
        (2, 4, 1.0)
    """
    pairs = AllPairs(features, labels)
    verified = verify_blocks(pairs, far)
    counts = {"same": verified.same, "different": verified.different}
    summary: dict[str, Any] = {"eer": verified.eer, "tar": _point_rows(verified.points), **counts}
    total = verified.same + verified.different
    draws = bootstrap
    if draws is None:
        draws = next((number for max_pairs, number in ALL_PAIRS_DRAWS.items() if total <= max_pairs), 0)
    if not draws or total > MAX_STORED_PAIRS:
        return summary
    require(draws >= 2, "bootstrap", "0, or a number of draws >= 2", draws)
    first, second = torch.triu_indices(len(pairs.labels), len(pairs.labels), offset=1, device=pairs.labels.device)
    identities_of_pairs = torch.stack([pairs.labels[first], pairs.labels[second]])
    same = identities_of_pairs[0] == identities_of_pairs[1]
    scores = pair_scores(pairs.features, first, second)
    curve_intervals = _add_intervals(scores, same, identities_of_pairs if by_class else None, summary, draws, seed)
    return summary | {
        "intervals": {"eer": curve_intervals["eer"]},
        "draws": draws,
        "drawn": "classes" if by_class else "pairs",
    }


def _add_intervals(
    scores: Float[Tensor, " pairs"],
    same: Bool[Tensor, " pairs"],
    groups: Int64[Tensor, "sides pairs"] | None,
    summary: dict[str, Any],
    draws: int,
    seed: int,
    rule: str = "step",
) -> dict[str, list[float]]:
    """Return intervals of EER and AUC, and add those of the true accept rates and thresholds to `summary["tar"]`.

    One curve per draw gives all statistics.
    """
    ranked = RankedScores(scores, same)
    weights = resampled_weights(same, groups, torch.Generator().manual_seed(seed))
    resolved = [point for point in summary["tar"] if point["resolved"]]
    rows = []
    for _ in range(draws):
        curve = ranked.roc(next(weights))
        rates = curve.tar, curve.far
        points = [
            read_curve(curve.thresholds, *rates, curve.negatives, point["far"], "far", rule) for point in resolved
        ]
        rows.append([curve.eer, curve.auc, *(p.true_rate for p in points), *(p.threshold for p in points)])
    columns = torch.tensor(rows, dtype=torch.float64).unbind(1)
    ends = [percentile_interval(0.0, float, iter(column), draws, LEVEL) for column in columns]
    eer, auc, *others = ([interval.low, interval.high] for interval in ends)
    for index, point in enumerate(resolved):
        point["interval"], point["threshold_interval"] = others[index], others[index + len(resolved)]
    return {"eer": eer, "auc": auc}


def _point_rows(points: Sequence[OperatingPoint]) -> list[dict[str, Any]]:
    """Return operating points as plain data."""
    return [
        {"far": p.requested_rate, "tar": p.true_rate, "threshold": p.threshold, "resolved": p.resolved} for p in points
    ]


def summarize_identification(features: Array, labels: Array, ranks: Sequence[int] = (1, 5, 10)) -> dict[str, Any]:
    """Identify all other samples in a gallery of the first sample of each class; return the accuracy at each rank.

    >>> summarize_identification([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.8, 0.2]], [0, 1, 0, 1], ranks=[1])
    {'rank': {1: 0.5}, 'probes': 2, 'gallery': 2}
    """
    result = identify_by_first(features, labels, ranks=ranks)
    return {"rank": result.accuracy, "probes": len(result.mated), "gallery": result.entries}
