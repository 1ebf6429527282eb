"""Compute the measurements of `hypersphere evaluate`, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hypersphere import data, evaluation, heads
from hypersphere._numerics import evenly_spaced
from hypersphere._validation import require
from hypersphere.cli.opening import LoadedRun
from hypersphere.data.embeddings import Embeddings, read_array, read_embeddings
from hypersphere.training import RunCalibration

__all__ = ["EvaluationOptions", "measure_files", "measure_run"]

MAX_PCA_SAMPLES = 20_000  # largest number of training samples on which principal components are fitted


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of `hypersphere evaluate`. `pairs` may also be the pairs that the data define."""

    pairs: Path | int | data.Pairs | None = None
    folds: int | None = None
    ranks: Sequence[int] = (1, 5, 10)
    far: Sequence[float] = (0.1, 0.01, 0.001)
    bootstrap: int | None = None
    seed: int = 0
    subtract_mean: bool = False
    pca: int | None = None
    mirror: bool = False
    calibrate: bool = False
    prior: float = 0.5

    def __post_init__(self) -> None:
        require(self.bootstrap != 1, "--bootstrap", "0, or a number of draws >= 2", self.bootstrap)
        if self.calibrate:
            require(0 < self.prior < 1, "--prior", "a probability in (0, 1)", self.prior)
            for option in ("subtract_mean", "pca", "mirror"):
                value = getattr(self, option)
                require(not value, f"--{option.replace('_', '-')}", "omitted with --calibrate", value)

    @property
    def plain(self) -> bool:
        """True if the embeddings are compared as the network computes them, which a calibration requires."""
        return not (self.subtract_mean or self.pca or self.mirror)

    def verify(
        self,
        first: Tensor,
        second: Tensor,
        same: Tensor,
        folds: int | Tensor,
        identities: tuple[Tensor, Tensor] | None = None,
    ) -> dict[str, Any]:
        """Verify pairs of embeddings. Bootstrap intervals resample identities, or pairs if `identities` is None."""
        verified = evaluation.verify(first, second, same, folds=folds, far=self.far, subtract_mean=self.subtract_mean)
        return evaluation.summarize_verification(
            verified, bootstrap=self.bootstrap, identities=identities, seed=self.seed
        )


def measure_run(opened: LoadedRun, protocol: EvaluationOptions) -> dict[str, Any]:
    """Evaluate a run on its held-out data; classification is measured if the classes are those of training."""
    split, source = opened.experiment.data, opened.held_out
    results: dict[str, Any] = {"step": opened.step, "data": _data_name(opened), "classes": len(source.classes)}
    features, labels = opened.embed(source)
    if not split.open_set:
        head: Any = opened.experiment.head
        with torch.no_grad():
            predicted = head.scores(features.to(opened.experiment.device)).argmax(1).cpu()
        accuracy, count = float((predicted == labels).double().mean()), len(labels)
        hardness = evaluation.angular_visual_hardness(features, labels, heads.class_vectors(head, features, labels))
        moments = {"mean": float(hardness.mean()), "deviation": float(hardness.std(correction=0))}
        results["classification"] = {"accuracy": accuracy, "samples": count, "classes": len(split.classes)}
        results["hardness"] = {**moments, "samples": count}
    calibration = _measure_calibration(opened, features, labels, protocol)
    if protocol.mirror:
        features, _ = opened.embed(source, mirror=True)
    if protocol.pca is not None:
        train = data.subset(split.train, evenly_spaced(len(split.train), MAX_PCA_SAMPLES))
        fitted_on, _ = opened.embed(opened.experiment.readable(train), mirror=protocol.mirror)
        features = evaluation.fit_pca(fitted_on, protocol.pca)(features)
    names = tuple(source.name(index) for index in range(len(source)))
    pairs = opened.pairs if protocol.pairs is None else protocol.pairs
    try:
        chosen = replace(protocol, pairs=pairs, pca=None)
        results |= _measure(Embeddings(features, labels, names), chosen, by_class=split.open_set)
    except data.NoPairsError as error:
        results["left_out"] = str(error)
    return results | calibration


def _measure_calibration(
    opened: LoadedRun, features: Tensor, labels: Tensor, protocol: EvaluationOptions
) -> dict[str, Any]:
    """Fit and store a calibration, or read the stored one, and measure it on the classes that it was not fitted on.

    Returns:
        The key "calibration" with its measurements, or nothing if the run has no calibration.
    """
    classes, split = opened.held_out.classes, opened.experiment.data
    if protocol.calibrate:
        fitted = RunCalibration.fit(
            features,
            labels,
            classes,
            step=opened.step,
            fingerprint=opened.fingerprint,
            open_set=split.open_set,
            far=protocol.far,
            prior=protocol.prior,
            seed=protocol.seed,
        )
    elif (stored := opened.run.calibration()) is None:
        return {}
    elif reason := opened.refusal(stored) or ("" if protocol.plain else "it applies to unchanged embeddings only"):
        return {"calibration": {"left_out": reason}}
    else:
        fitted = stored
    measured = {**fitted.measure(features, labels, classes), "fitted": fitted.description()}
    if protocol.calibrate:
        if unresolved := [rate for rate in protocol.far if rate not in fitted.thresholds]:
            measured["unresolved"] = unresolved
        # Stored after the measurement, which may fail.
        measured["file"] = str(fitted.save(opened.run.folder))
    return {"calibration": measured}


def _data_name(opened: LoadedRun) -> str:
    """Return what the held-out data of a run are, in words."""
    fraction = opened.run.config.selection
    if not fraction:
        return "test data"
    if opened.experiment.data.graph is not None:
        return "selection data (the validation nodes)"
    return f"selection data ({fraction:g} of the training data)"


def measure_files(source: Path, second: Path | None, same: Path | None, protocol: EvaluationOptions) -> dict[str, Any]:
    """Evaluate a file of embeddings, with labels in `second` if given, or two files of paired embeddings."""
    other = None if second is None else _read_labels_or_embeddings(second)
    sample = read_embeddings(source)
    if other is None or other.ndim != 2:
        labels = sample.labels if other is None else other
        return _measure(replace(sample, labels=labels), protocol, by_class=True)
    require(protocol.pca is None, "--pca", "omitted with two files of embeddings", protocol.pca)
    if same is None:
        raise ValueError("two files of embeddings need --same, a .npy file of zeros and ones")
    matches = torch.from_numpy(read_array(same))
    return {
        "verification": {**protocol.verify(sample.features, other, matches, protocol.folds or 10), "pairs": "given"}
    }


def _read_labels_or_embeddings(path: Path) -> Tensor:
    """Read the second file of `measure_files`. Labels that are texts become numbers."""
    array = read_array(path, texts=True)
    return torch.from_numpy(array if array.dtype.kind != "U" else np.unique(array, return_inverse=True)[1])


def _measure(sample: Embeddings, protocol: EvaluationOptions, *, by_class: bool) -> dict[str, Any]:
    """Evaluate features by verification and, if they have labels, by identification and Fisher score.

    Bootstrap intervals resample classes if `by_class`, and pairs otherwise.
    """
    results: dict[str, Any] = {}
    folds: int | Tensor = protocol.folds or 10
    features, labels, pairs, identities = sample.features, sample.labels, protocol.pairs, None
    if protocol.pca is not None:
        features = evaluation.fit_pca(features, protocol.pca)(features)
    if labels is not None:
        fits = labels.ndim == 1 and len(labels) == len(features) and not labels.is_floating_point()
        accepted = f"one integer or text for each of the {len(features)} embeddings"
        require(fits, "labels", accepted, f"{labels.dtype} {tuple(labels.shape)}")
        labels = labels.long()
    if isinstance(pairs, Path):
        pairs = data.read_pairs(pairs, sample.names or tuple(map(str, range(len(features)))))
        require(len(pairs) > 0, "--pairs", "a list with at least one pair", f"{protocol.pairs}, which is empty")
    if isinstance(pairs, data.Pairs):
        chosen, kind = pairs, "listed"
        if protocol.folds is None and chosen.folds > 1:
            folds = chosen.fold
    elif labels is not None:
        chosen, kind = data.draw_all_class_pairs(labels, pairs, seed=protocol.seed), "drawn"
        identities = (labels[chosen.first], labels[chosen.second]) if by_class else None
    else:
        raise ValueError("embeddings without labels need a second .npy file with labels, or --pairs FILE")
    if labels is not None:
        score = evaluation.angular_fisher_score(features, labels)
        results |= {"samples": len(labels), "angular_fisher_score": score}
    verified = protocol.verify(features[chosen.first], features[chosen.second], chosen.same, folds, identities)
    results["verification"] = {**verified, "pairs": kind}
    if kind == "drawn" and pairs is None and labels is not None and not protocol.subtract_mean:
        # Accuracies are those of the drawn pairs, equally many of both kinds. Rates and thresholds need all pairs.
        rates = evaluation.summarize_all_pairs(
            features, labels, protocol.far, bootstrap=protocol.bootstrap, by_class=by_class, seed=protocol.seed
        )
        intervals = results["verification"].pop("intervals", {})
        intervals.pop("eer", None)  # that of the drawn pairs; the one of all pairs replaces it
        intervals |= rates.pop("intervals", {})
        results["verification"] |= {"eer": rates.pop("eer"), "tar": rates.pop("tar")}
        results["verification"] |= {"intervals": intervals} if intervals else {}
        results["verification"]["rates"] = {"pairs": "all", **rates}
    if labels is not None and len(labels.unique()) < len(labels):
        results["identification"] = evaluation.summarize_identification(features, labels, protocol.ranks)
    return results
