"""The measurements of `hypersphere evaluate`, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypersphere import data, evaluation
from hypersphere._validation import require
from hypersphere.cli.opening import Opened
from hypersphere.data.embeddings import Embeddings, read_array, read_embeddings

__all__ = ["Protocol", "measure_files", "measure_run"]

MOST_FITTED = 20_000  # training samples on which principal components are fitted


@dataclass(frozen=True)
class Protocol:
    """The options of the evaluation, see the command. `pairs` may be those that the data define."""

    pairs: Path | int | data.Pairs | None = None
    folds: int | None = None
    ranks: Sequence[int] = (1, 5, 10)
    far: Sequence[float] = (0.1, 0.01, 0.001)
    bootstrap: int | None = None
    seed: int = 0
    subtract_mean: bool = False
    pca: int | None = None

    def __post_init__(self) -> None:
        require(self.bootstrap != 1, "--bootstrap", "0, or a number of draws >= 2", self.bootstrap)

    def verify(self, first: Tensor, second: Tensor, same: Tensor, folds: int | Tensor) -> evaluation.Verification:
        """Verify pairs of embeddings."""
        return evaluation.verify(first, second, same, folds=folds, far=self.far, subtract_mean=self.subtract_mean)


def measure_run(opened: Opened, protocol: Protocol, mirror: bool) -> dict[str, Any]:
    """Evaluate a run on its held-out data; the classes are known in training unless the data are an open set."""
    split, source = opened.experiment.data, opened.held_out
    results: dict[str, Any] = {"step": opened.step}
    features, labels = opened.embed(source)
    if not split.open_set:
        correct = float((opened.predict(features) == labels).double().mean())
        hardness = evaluation.angular_visual_hardness(features, labels, opened.class_vectors)
        results["classification"] = {"accuracy": correct, "samples": len(labels), "classes": len(split.classes)}
        moments = {"mean": float(hardness.mean()), "deviation": float(hardness.std(correction=0))}
        results["hardness"] = moments | {"samples": len(labels)}
    if mirror:
        features, _ = opened.embed(source, mirror=True)
    if protocol.pca is not None:
        count = len(split.train)
        train = data.subset(split.train, torch.linspace(0, count - 1, min(count, MOST_FITTED)).long())
        features = evaluation.fit_pca(opened.embed(train, mirror=mirror)[0], protocol.pca)(features)
    pairs = split.pairs if protocol.pairs is None else protocol.pairs
    names = tuple(source.name(index) for index in range(len(source)))
    try:
        chosen = replace(protocol, pairs=pairs, pca=None)
        return results | _measure(Embeddings(features, labels, names), chosen, by_class=split.open_set)
    except data.NoPairsError as error:
        return results | {"left_out": str(error)}


def measure_files(source: Path, second: Path | None, same: Path | None, protocol: Protocol) -> dict[str, Any]:
    """Evaluate embeddings, or two files of paired embeddings."""
    other = None if second is None else torch.from_numpy(read_array(second))
    sample = read_embeddings(source)
    if other is None or other.ndim != 2:
        labels = sample.labels if other is None else other
        return _measure(Embeddings(sample.features, labels, sample.names), protocol, by_class=True)
    require(protocol.pca is None, "--pca", "omitted with two files of embeddings", protocol.pca)
    if same is None:
        raise ValueError("two files of embeddings need --same, a .npy file of zeros and ones")
    verified = protocol.verify(sample.features, other, torch.from_numpy(read_array(same)), protocol.folds or 10)
    summary = evaluation.summarize_verification(verified, bootstrap=protocol.bootstrap, seed=protocol.seed)
    return {"verification": summary | {"pairs": "given"}}


def _measure(sample: Embeddings, protocol: Protocol, *, by_class: bool) -> dict[str, Any]:
    """Evaluate features by verification and, if they have labels, by identification and Fisher score.

    Bootstrap intervals resample whole classes, or pairs of classes that were seen in training.
    """
    results: dict[str, Any] = {}
    features, labels, pairs, people = sample.features, sample.labels, protocol.pairs, None
    if protocol.pca is not None:
        features = evaluation.fit_pca(features, protocol.pca)(features)
    if labels is not None:
        fits = labels.ndim == 1 and len(labels) == len(features) and not labels.is_floating_point()
        accepted = f"one integer for each of the {len(features)} embeddings"
        require(fits, "labels", accepted, f"{labels.dtype} {tuple(labels.shape)}")
        labels = labels.long()
    if isinstance(pairs, Path):
        chosen = data.read_pairs(pairs, sample.names or tuple(map(str, range(len(features)))))
        require(len(chosen) > 0, "--pairs", "a list with at least one pair", f"{pairs}, which is empty")
    elif isinstance(pairs, data.Pairs):
        chosen = pairs
    elif labels is not None:
        chosen = data.draw_all_class_pairs(labels, pairs, seed=protocol.seed)
        people = (labels[chosen.first], labels[chosen.second]) if by_class else None
    else:
        raise ValueError("embeddings without labels need a second .npy file with labels, or --pairs FILE")
    if labels is not None:
        score = evaluation.angular_fisher_score(features, labels)
        results |= {"samples": len(labels), "angular_fisher_score": score}
    drawn = not isinstance(pairs, (Path, data.Pairs))
    has_folds = not drawn and protocol.folds is None and chosen.folds > 1
    folds = chosen.fold if has_folds else protocol.folds or 10
    verified = protocol.verify(features[chosen.first], features[chosen.second], chosen.same, folds)
    summary = evaluation.summarize_verification(
        verified, bootstrap=protocol.bootstrap, identities=people, seed=protocol.seed
    )
    results["verification"] = summary | {"pairs": "drawn" if drawn else "listed"}
    if labels is not None and len(labels.unique()) < len(labels):
        results["identification"] = evaluation.summarize_identification(features, labels, protocol.ranks)
    return results
