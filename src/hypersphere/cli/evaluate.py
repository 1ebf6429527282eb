"""`hypersphere evaluate`: evaluate the features of a run or of a file, and print one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hypersphere import report
from hypersphere._validation import require
from hypersphere.cli.embeddings import Embeddings, read_array, read_embeddings
from hypersphere.cli.evaluation_table import evaluation_table
from hypersphere.cli.opening import Opened, device_of, open_run
from hypersphere.cli.options import BOOTSTRAP, FARS, RANKS
from hypersphere.cli.target import check_target, write_json
from hypersphere.data import Pairs, draw_pairs, read_pairs
from hypersphere.evaluation import (
    Roc,
    Verification,
    angular_fisher_score,
    angular_visual_hardness,
    first_of_each,
    identify,
    verify,
)

__all__ = ["DRAWN", "Protocol", "drawn_pairs", "evaluate", "numbers"]

DRAWN = 3000  # pairs of each kind, as in View 2 of LFW
MOST_RESAMPLED = 20_000  # largest number of pairs for which intervals are computed by default
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Protocol:
    """The evaluation protocol.

    Attributes:
        pairs: a file of pairs, the number of pairs of each kind to draw, or None for the numbers of LFW.
        folds: number of folds of the pairs; None for those of the file, or ten.
        ranks: ranks at which identification is reported.
        far: false accept rates at which verification is reported.
        bootstrap: draws for intervals, 0 for none; None for 1,000 unless there are very many pairs.
        seed: seed for the drawn pairs and the bootstrap.
    """

    pairs: Path | int | None = None
    folds: int | None = None
    ranks: Sequence[int] = RANKS
    far: Sequence[float] = FARS
    bootstrap: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.bootstrap != 1, "--bootstrap", "0, or a number of draws >= 2", self.bootstrap)


def evaluate(
    source: Path,
    second: Path | None,
    protocol: Protocol,
    *,
    same: Path | None = None,
    mirror: bool = False,
    step: int | None = None,
    json_file: Path | None = None,
    device: str | None = None,
    data_root: Path | None = None,
) -> None:
    """Evaluate a run, embeddings with labels, two files of paired embeddings, or embeddings with a list of pairs."""
    check_target("--json", json_file, [".json"])
    results: dict[str, Any] = {"source": str(source)}
    if source.is_dir():
        require(second is None, "second", "omitted if the source is a run", str(second))
        _measure_run(results, open_run(source, data_root, step=step, device=device_of(device)), protocol, mirror)
    else:
        for option, value in (("--mirror", mirror or None), ("--step", step), ("--device", device)):
            require(value is None, option, "omitted unless the source is a run", value)
        other = None if second is None else torch.from_numpy(read_array(second))
        sample = read_embeddings(source)
        if other is not None and other.ndim == 2:
            _measure_sides(results, sample.features, other, same, protocol)
        else:
            labels = sample.labels if other is None else other
            _measure_features(results, Embeddings(sample.features, labels, sample.names), protocol)
    if json_file is not None:
        write_json(json_file, results)  # before printing, so that a closed pipe cannot prevent it
    report.print_table(evaluation_table(results))


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Parse numbers that are separated by commas; fractions such as 8/255 are allowed.

    >>> numbers("--far", "0.1,1/100", float)
    (0.1, 0.01)
    """
    try:
        return tuple(_number(part, kind) for part in text.split(","))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{option} must be numbers separated by commas, not {text!r}") from None


def _number(text: str, kind: Callable[[str], Number]) -> Number:
    above, line, below = text.partition("/")
    return kind(above) if not line or kind is int else kind(above) / kind(below)  # type: ignore[return-value]


def _measure_run(results: dict[str, Any], opened: Opened, protocol: Protocol, mirror: bool) -> None:
    task = opened.assembly.task
    labels = task.test_labels
    plain = opened.features(task.test_inputs)
    right = float((opened.predict(plain) == labels).double().mean())
    results["step"] = opened.step
    results["classification"] = {"accuracy": right, "samples": len(labels), "classes": len(task.classes)}
    hardness = angular_visual_hardness(plain, labels, opened.class_vectors)
    features = opened.features(task.test_inputs, mirror=True) if mirror else plain
    try:
        _measure_features(results, Embeddings(features, labels, task.test_names), protocol, resample="pairs")
    except _Alone as error:
        results["left_out"] = str(error)
    results["hardness"] = {
        "mean": float(hardness.mean()),
        "deviation": float(hardness.std(correction=0)),
        "samples": len(labels),
    }


def _measure_sides(
    results: dict[str, Any], first: Tensor, second: Tensor, same: Path | None, protocol: Protocol
) -> None:
    if same is None:
        raise ValueError("two files of embeddings need --same, a .npy file of zeros and ones")
    flags = torch.from_numpy(read_array(same))
    verified = verify(first, second, flags, folds=protocol.folds or 10, far=protocol.far)
    results["verification"] = _of_verification(verified, protocol) | {"pairs": "given"}


def _measure_features(
    results: dict[str, Any], sample: Embeddings, protocol: Protocol, resample: str = "classes"
) -> None:
    """Evaluate features by verification and, if they have labels, by identification and Fisher score.

    Bootstrap intervals resample pairs for classes seen in training, and whole classes otherwise.
    """
    features, labels, pairs = sample.features, sample.labels, protocol.pairs
    if labels is not None:
        fits = labels.ndim == 1 and len(labels) == len(features) and not labels.is_floating_point()
        accepted = f"one integer for each of the {len(features)} embeddings"
        require(fits, "labels", accepted, f"{labels.dtype} {tuple(labels.shape)}")
        labels = labels.long()
        results["samples"] = len(labels)
        if len(labels.unique()) < len(labels):  # the score needs two samples of a class
            results["angular_fisher_score"] = angular_fisher_score(features, labels)
    folds: int | Tensor = protocol.folds or 10
    people = None
    if isinstance(pairs, Path):
        chosen = read_pairs(pairs, sample.names or tuple(map(str, range(len(features)))))
        require(len(chosen) > 0, "--pairs", "a list with at least one pair", f"{pairs}, which is empty")
        if protocol.folds is None and chosen.folds > 1:
            folds = chosen.fold
    elif labels is not None:
        chosen = drawn_pairs(labels, pairs, protocol.seed)
        people = (labels[chosen.first], labels[chosen.second]) if resample == "classes" else None
    else:
        raise ValueError("embeddings without labels need a second .npy file with labels, or --pairs FILE")
    one, two = features[chosen.first], features[chosen.second]
    verified = verify(one, two, chosen.same, folds=folds, far=protocol.far)
    origin = "listed" if isinstance(pairs, Path) else "drawn"
    results["verification"] = _of_verification(verified, protocol, people) | {"pairs": origin}
    if labels is not None and len(labels.unique()) < len(labels):
        results["identification"] = _identification(features, labels, protocol.ranks)


class _Alone(ValueError):
    """Raised if no class has two samples."""


def drawn_pairs(labels: Tensor, count: int | None, seed: int) -> Pairs:
    """Draw equal numbers of same and different pairs from all classes: `count` of each, by default up to 3,000.

    >>> drawn_pairs(torch.tensor([0, 0, 1, 1]), None, 0)
    Pairs(4 pairs, 2 of them same, 1 folds)
    """
    counts = labels.unique(return_counts=True)[1]
    same = int((counts * (counts - 1) // 2).sum())
    different = len(labels) * (len(labels) - 1) // 2 - same
    if not same:
        raise _Alone("verification and identification need a class with two samples; every class has one")
    require(different > 0, "labels", "labels of at least two classes", len(counts))
    most = min(same, different)
    accepted = f"a list, or a number from 1 to {most}: there are {same} same and {different} different pairs"
    require(count is None or 1 <= count <= most, "--pairs", accepted, count)
    return draw_pairs(labels, folds=1, per_fold=min(DRAWN, most) if count is None else count, seed=seed)


def _of_verification(
    verified: Verification, protocol: Protocol, people: tuple[Tensor, Tensor] | None = None
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "accuracy": verified.accuracy,
        "standard_error": verified.standard_error,
        "best_accuracy": verified.best_accuracy,
        "eer": verified.eer,
        "auc": verified.auc,
        "tar": [{"far": p.requested_rate, "tar": p.true_rate, "resolved": p.resolved} for p in verified.points],
        "same": int(verified.same.sum()),
        "different": int((~verified.same).sum()),
        "folds": len(verified.accuracies),
    }
    draws = protocol.bootstrap
    if draws is None:
        draws = BOOTSTRAP if len(verified.same) <= MOST_RESAMPLED else 0
    if not draws:
        return summary

    def ends(statistic: str | Callable[[Roc], float]) -> list[float]:
        generator = torch.Generator().manual_seed(protocol.seed)
        interval = verified.interval(statistic, identities=people, samples=draws, generator=generator)
        return [interval.low, interval.high]

    for point in summary["tar"]:
        if point["resolved"]:
            point["interval"] = ends(partial(Roc.tar_at, far=point["far"]))
    intervals = {name: ends(name) for name in ("accuracy", "eer", "auc")}
    return summary | {"intervals": intervals, "draws": draws, "drawn": "pairs" if people is None else "classes"}


def _identification(features: Tensor, labels: Tensor, ranks: Sequence[int]) -> dict[str, Any]:
    """Identify all other samples in a gallery of the first sample of each class."""
    first = first_of_each(labels)
    result = identify(features[~first], labels[~first], features[first], labels[first], ranks=ranks)
    return {"rank": result.accuracy, "probes": int((~first).sum()), "gallery": int(first.sum())}
