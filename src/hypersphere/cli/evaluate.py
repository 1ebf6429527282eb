"""`hypersphere evaluate`: measure features, of a run or from files, and print one table."""

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

DRAWN = 3000  # pairs of either kind, as in View 2 of LFW
MOST_RESAMPLED = 20_000  # pairs that have intervals without being asked for
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Protocol:
    """How features are measured.

    Attributes:
        pairs: a file of pairs, how many of either kind to draw, or None for as many as LFW has.
        folds: of the pairs; None for those of the file, or ten.
        ranks, far: where identification and verification are read.
        bootstrap: draws for intervals, 0 for none; None for 1,000 if there are not too many pairs.
        seed: of the drawn pairs, and of these draws.
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
    """Measure a run, features with labels, two sides of pairs, or features with a list of pairs."""
    check_target("--json", json_file, [".json"])
    found: dict[str, Any] = {"source": str(source)}
    if source.is_dir():
        require(second is None, "second", "left out with a run", str(second))
        _measure_run(found, open_run(source, data_root, step=step, device=device_of(device)), protocol, mirror)
    else:
        for option, value in (("--mirror", mirror or None), ("--step", step), ("--device", device)):
            require(value is None, option, "left out, unless of a run", value)
        other = None if second is None else torch.from_numpy(read_array(second))
        sample = read_embeddings(source)
        if other is not None and other.ndim == 2:
            _measure_sides(found, sample.features, other, same, protocol)
        else:
            labels = sample.labels if other is None else other
            _measure_features(found, Embeddings(sample.features, labels, sample.names), protocol)
    if json_file is not None:
        write_json(json_file, found)  # before anything is printed: a closed pipe must not cost it
    report.print_table(evaluation_table(found))


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Read numbers that are separated by commas; a quotient as 8/255 is one too.

    >>> numbers("--far", "0.1,1/100", float)
    (0.1, 0.01)
    """
    try:
        return tuple(_number(part, kind) for part in text.split(","))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{option} must be numbers with commas between them, not {text!r}") from None


def _number(text: str, kind: Callable[[str], Number]) -> Number:
    above, line, below = text.partition("/")
    return kind(above) if not line or kind is int else kind(above) / kind(below)  # type: ignore[return-value]


def _measure_run(found: dict[str, Any], opened: Opened, protocol: Protocol, mirror: bool) -> None:
    task = opened.assembly.task
    labels = task.test_labels
    plain = opened.features(task.test_inputs)
    right = float((opened.predict(plain) == labels).double().mean())
    found["step"] = opened.step
    found["classification"] = {"accuracy": right, "samples": len(labels), "classes": len(task.classes)}
    hardness = angular_visual_hardness(plain, labels, opened.class_vectors)
    features = opened.features(task.test_inputs, mirror=True) if mirror else plain
    try:
        _measure_features(found, Embeddings(features, labels, task.test_names), protocol, resample="pairs")
    except _Alone as error:
        found["left_out"] = str(error)
    found["hardness"] = {
        "mean": float(hardness.mean()),
        "deviation": float(hardness.std(correction=0)),
        "samples": len(labels),
    }


def _measure_sides(found: dict[str, Any], first: Tensor, second: Tensor, same: Path | None, protocol: Protocol) -> None:
    if same is None:
        raise ValueError("--same must be given with two sides of pairs: a .npy file of zeros and ones")
    flags = torch.from_numpy(read_array(same))
    verified = verify(first, second, flags, folds=protocol.folds or 10, far=protocol.far)
    found["verification"] = _of_verification(verified, protocol) | {"pairs": "given"}


def _measure_features(found: dict[str, Any], sample: Embeddings, protocol: Protocol, resample: str = "classes") -> None:
    """Measure features: pairs of them, and where they are labelled each of them.

    Intervals are over pairs drawn anew; where the labels are of people whom no training saw, over people.
    """
    features, labels, pairs = sample.features, sample.labels, protocol.pairs
    if labels is not None:
        fits = labels.ndim == 1 and len(labels) == len(features) and not labels.is_floating_point()
        accepted = f"a whole number for each of the {len(features)} embeddings"
        require(fits, "labels", accepted, f"{labels.dtype} {tuple(labels.shape)}")
        labels = labels.long()
        found |= {"samples": len(labels), "angular_fisher_score": angular_fisher_score(features, labels)}
    folds: int | Tensor = protocol.folds or 10
    people = None
    if isinstance(pairs, Path):
        chosen = read_pairs(pairs, sample.names or tuple(map(str, range(len(features)))))
        require(len(chosen) > 0, "--pairs", "a list with at least one pair", f"{pairs}, which has none")
        if protocol.folds is None and chosen.folds > 1:
            folds = chosen.fold
    elif labels is not None:
        chosen = drawn_pairs(labels, pairs, protocol.seed)
        people = (labels[chosen.first], labels[chosen.second]) if resample == "classes" else None
    else:
        raise ValueError("labels must be given, as a second .npy file, or pairs by --pairs FILE")
    one, two = features[chosen.first], features[chosen.second]
    verified = verify(one, two, chosen.same, folds=folds, far=protocol.far)
    origin = "listed" if isinstance(pairs, Path) else "drawn"
    found["verification"] = _of_verification(verified, protocol, people) | {"pairs": origin}
    if labels is not None and len(labels.unique()) < len(labels):
        found["identification"] = _identification(features, labels, protocol.ranks)


class _Alone(ValueError):
    """No class has two samples."""


def drawn_pairs(labels: Tensor, count: int | None, seed: int) -> Pairs:
    """Draw as many same as different pairs from all classes: `count` of each, or 3,000 as far as there are so many.

    >>> drawn_pairs(torch.tensor([0, 0, 1, 1]), None, 0)
    Pairs(4 pairs, 2 of them same, 1 folds)
    """
    counts = labels.unique(return_counts=True)[1]
    same = int((counts * (counts - 1) // 2).sum())
    different = len(labels) * (len(labels) - 1) // 2 - same
    if not same:
        raise _Alone("verification and identification need a class with two samples, and there is none")
    require(different > 0, "labels", "of two classes or more", len(counts))
    most = min(same, different)
    accepted = f"a list, or a number from 1 to {most}: there are {same} same and {different} different pairs"
    require(count is None or 1 <= count <= most, "--pairs", accepted, count)
    return draw_pairs(labels, folds=1, per_fold=min(DRAWN, most) if count is None else count, seed=seed)


def _of_verification(
    verified: Verification, protocol: Protocol, people: tuple[Tensor, Tensor] | None = None
) -> dict[str, Any]:
    told: dict[str, Any] = {
        "accuracy": verified.accuracy,
        "standard_error": verified.standard_error,
        "best_accuracy": verified.best_accuracy,
        "eer": verified.eer,
        "auc": verified.auc,
        "tar": [{"far": p.asked, "tar": p.true_rate, "resolved": p.resolved} for p in verified.points],
        "same": int(verified.same.sum()),
        "different": int((~verified.same).sum()),
        "folds": len(verified.accuracies),
    }
    draws = protocol.bootstrap
    if draws is None:
        draws = BOOTSTRAP if len(verified.same) <= MOST_RESAMPLED else 0
    if not draws:
        return told

    def ends(statistic: str | Callable[[Roc], float]) -> list[float]:
        generator = torch.Generator().manual_seed(protocol.seed)
        found = verified.interval(statistic, identities=people, samples=draws, generator=generator)
        return [found.low, found.high]

    for point in told["tar"]:
        if point["resolved"]:
            point["interval"] = ends(partial(Roc.tar_at, far=point["far"]))
    intervals = {name: ends(name) for name in ("accuracy", "eer", "auc")}
    return told | {"intervals": intervals, "draws": draws, "drawn": "pairs" if people is None else "classes"}


def _identification(features: Tensor, labels: Tensor, ranks: Sequence[int]) -> dict[str, Any]:
    """Search all samples but the first of each class among the first ones."""
    known = first_of_each(labels)
    result = identify(features[~known], labels[~known], features[known], labels[known], ranks=ranks)
    return {"rank": result.accuracy, "probes": int((~known).sum()), "gallery": int(known.sum())}
