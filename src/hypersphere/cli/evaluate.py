"""`hypersphere evaluate`: measure features, of a run or from files, and print one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hypersphere import report
from hypersphere.cli.embed import features_of
from hypersphere.cli.embeddings import Embeddings, read_array, read_embeddings
from hypersphere.cli.target import check_target, write_json
from hypersphere.data import Pairs, draw_pairs, read_pairs
from hypersphere.evaluation import (
    Verification,
    angular_fisher_score,
    angular_visual_hardness,
    identify,
    verify,
)
from hypersphere.functions.menu import require
from hypersphere.training import predict
from hypersphere.training.run import Run

__all__ = ["Protocol", "drawn_pairs", "evaluate", "numbers"]

DRAWN = 3000  # pairs of either kind, as in View 2 of LFW
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Protocol:
    """How features are measured.

    Attributes:
        pairs: a file of pairs, how many of either kind to draw, or None for as many as LFW has.
        folds: of the pairs; None for those of the file, or ten.
        ranks, far: where identification and verification are read.
        seed: of the drawn pairs.
    """

    pairs: Path | int | None = None
    folds: int | None = None
    ranks: Sequence[int] = (1, 5, 10)
    far: Sequence[float] = (0.1, 0.01, 0.001)
    seed: int = 0


def evaluate(
    source: Path,
    second: Path | None,
    protocol: Protocol,
    *,
    same: Path | None = None,
    mirror: bool = False,
    json_file: Path | None = None,
    data_root: Path | None = None,
) -> None:
    """Measure a run, features with labels, two sides of pairs, or features with a list of pairs."""
    check_target("--json", json_file, [".json"])
    found: dict[str, Any] = {"source": str(source)}
    if source.is_dir():
        require(second is None, "second", "left out with a run", str(second))
        _measure_run(found, source, protocol, mirror, data_root)
    else:
        require(not mirror, "--mirror", "left out, unless of a run", mirror)
        other = None if second is None else torch.from_numpy(read_array(second))
        sample = read_embeddings(source)
        if other is not None and other.ndim == 2:
            _measure_sides(found, sample.features, other, same, protocol)
        else:
            labels = sample.labels if other is None else other
            _measure_features(found, Embeddings(sample.features, labels, sample.names), protocol)
    if json_file is not None:
        write_json(json_file, found)  # before anything is printed: a closed pipe must not cost it
    report.print_table(_table(found))


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


def _measure_run(found: dict[str, Any], folder: Path, protocol: Protocol, mirror: bool, data_root: Path | None) -> None:
    assembly = Run.open(folder).assembly(data_root)
    labels = assembly.task.test_labels
    plain = features_of(assembly, assembly.task.test_inputs)
    right = (predict(assembly.head, plain) == labels).double().mean()
    found["classification"] = {"accuracy": float(right), "samples": len(labels), "classes": len(assembly.task.classes)}
    hardness = angular_visual_hardness(plain, labels, assembly.head.weight.detach())
    features = features_of(assembly, assembly.task.test_inputs, mirror=True) if mirror else plain
    try:
        _measure_features(found, Embeddings(features, labels), protocol)
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
    found["verification"] = _of_verification(verified) | {"pairs": "given"}


def _measure_features(found: dict[str, Any], sample: Embeddings, protocol: Protocol) -> None:
    features, labels, pairs = sample.features, sample.labels, protocol.pairs
    if labels is not None:
        fits = labels.ndim == 1 and len(labels) == len(features) and not labels.is_floating_point()
        accepted = f"a whole number for each of the {len(features)} embeddings"
        require(fits, "labels", accepted, f"{labels.dtype} {tuple(labels.shape)}")
        labels = labels.long()
        found["angular_fisher_score"] = angular_fisher_score(features, labels)
    folds: int | Tensor = protocol.folds or 10
    if isinstance(pairs, Path):
        chosen = read_pairs(pairs, sample.names or tuple(map(str, range(len(features)))))
        require(len(chosen) > 0, "--pairs", "a list with at least one pair", f"{pairs}, which has none")
        if protocol.folds is None and chosen.folds > 1:
            folds = chosen.fold
    elif labels is not None:
        chosen = drawn_pairs(labels, pairs, protocol.seed)
    else:
        raise ValueError("labels must be given, as a second .npy file, or pairs by --pairs FILE")
    one, two = features[chosen.first], features[chosen.second]
    verified = verify(one, two, chosen.same, folds=folds, far=protocol.far)
    origin = "listed" if isinstance(pairs, Path) else "drawn"
    found["verification"] = _of_verification(verified) | {"pairs": origin}
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


def _of_verification(verified: Verification) -> dict[str, Any]:
    return {
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


def _identification(features: Tensor, labels: Tensor, ranks: Sequence[int]) -> dict[str, Any]:
    """Search all samples but the first of each class among the first ones."""
    order = labels.argsort(stable=True)
    sorted_labels = labels[order]
    starts = torch.cat([torch.ones(1, dtype=torch.bool), sorted_labels[1:] != sorted_labels[:-1]])
    gallery, probes = order[starts], order[~starts]
    result = identify(features[probes], labels[probes], features[gallery], labels[gallery], ranks=ranks)
    return {"rank": result.accuracy, "probes": len(probes), "gallery": len(gallery)}


def _table(found: Mapping[str, Any]) -> report.Table:
    share, number = report.Column("", format=".2%"), report.Column("", format=".4f")
    rows: list[list[str]] = []
    if part := found.get("classification"):
        of = f"{part['samples']} test samples of {part['classes']} classes"
        rows.append(["classification accuracy", share.show(part["accuracy"]), of])
    if part := found.get("verification"):
        of = f"{part['same']} same and {part['different']} different pairs, {part['folds']} folds"
        rows.append(["verification accuracy", share.show((part["accuracy"], part["standard_error"])), of])
        rows.append(["with the best threshold", share.show(part["best_accuracy"]), "chosen on the same pairs"])
        rows.append(["equal error rate", share.show(part["eer"]), ""])
        rows.append(["area under the ROC curve", number.show(part["auc"]), ""])
        for point in part["tar"]:
            of = "" if point["resolved"] else f"not resolved by {part['different']} different pairs"
            rows.append([f"true accepts at {point['far']:g} false", share.show(point["tar"]), of])
    if part := found.get("identification"):
        of = f"{part['probes']} probes among {part['gallery']}, one a class"
        rows += [[f"identification at rank {rank}", share.show(value), of] for rank, value in part["rank"].items()]
    if "angular_fisher_score" in found:
        rows.append(["angular Fisher score", number.show(found["angular_fisher_score"]), "lower is better"])
    if part := found.get("hardness"):
        value = number.show((part["mean"], part["deviation"]))
        rows.append(["angular visual hardness", value, "mean and deviation, lower is easier"])
    columns = [report.Column("measure"), report.Column("value"), report.Column("of")]
    left_out = found.get("left_out")
    return report.Table(f"Evaluation of {found['source']}", columns, rows, f"Left out: {left_out}." if left_out else "")
