"""Summaries of an evaluation as plain data, for tables and JSON files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hypersphere.evaluation._arrays import Array, as_features, as_labels
from hypersphere.evaluation.identification import first_of_each, identify
from hypersphere.evaluation.roc import Roc
from hypersphere.evaluation.verification import Verification

__all__ = ["summarize_identification", "summarize_verification"]

BOOTSTRAP = 1000  # draws for intervals
MAX_RESAMPLED_PAIRS = 20_000  # largest number of pairs for which intervals are computed by default


def summarize_verification(
    verified: Verification,
    *,
    bootstrap: int | None = None,
    identities: tuple[Array, Array] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Return accuracies, rates and thresholds of a verification, with 95 % bootstrap intervals.

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
    summary["tar"] = [
        {"far": p.requested_rate, "tar": p.true_rate, "threshold": p.threshold, "resolved": p.resolved}
        for p in verified.points
    ]
    same = int(verified.same.sum())
    summary |= {"same": same, "different": len(verified.same) - same, "folds": len(verified.accuracies)}
    draws = bootstrap
    if draws is None:
        draws = BOOTSTRAP if len(verified.same) <= MAX_RESAMPLED_PAIRS else 0
    if not draws:
        return summary

    def ends(statistic: str | Callable[[Roc], float]) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        interval = verified.interval(statistic, identities=identities, samples=draws, generator=generator)
        return [interval.low, interval.high]

    for point in summary["tar"]:
        if point["resolved"]:
            point["interval"] = ends(partial(Roc.tar_at, far=point["far"]))
    intervals = {name: ends(name) for name in ("accuracy", "eer", "auc")}
    return summary | {"intervals": intervals, "draws": draws, "drawn": "pairs" if identities is None else "classes"}


def summarize_identification(features: Array, labels: Array, ranks: Sequence[int] = (1, 5, 10)) -> dict[str, Any]:
    """Identify all other samples in a gallery of the first sample of each class; return the accuracy at each rank.

    >>> summarize_identification([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.8, 0.2]], [0, 1, 0, 1], ranks=[1])
    {'rank': {1: 0.5}, 'probes': 2, 'gallery': 2}
    """
    x = as_features("features", features)
    y = as_labels("labels", labels, len(x), x.device)
    first = first_of_each(y)
    result = identify(x[~first], y[~first], x[first], y[first], ranks=ranks)
    return {"rank": result.accuracy, "probes": int((~first).sum()), "gallery": int(first.sum())}
