"""Validation: metrics on held-out data during training, and the energy of the neurons of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hypersphere import data
from hypersphere._modes import evaluation_mode
from hypersphere._validation import require
from hypersphere.data.loading import batch_sizes, rows_of_rank
from hypersphere.energy import layer_energies, mean_energy
from hypersphere.energy.layers import evenly_spaced
from hypersphere.evaluation import first_of_each, identify, retrieve, verify
from hypersphere.heads import NonFiniteScoresError, ShardedHead
from hypersphere.heads._collectives import Processes
from hypersphere.training.loop import Objective

__all__ = ["PROTOCOLS", "Validator", "class_vectors", "layer_energies", "mean_energy"]

DIVERGED = "training diverged: the features or scores of validation data are not finite"


class ValidationProtocol(Protocol):
    """Maps features and labels of held-out data to metrics. An import path names a class or factory of such objects."""

    def __call__(self, features: Tensor, labels: Tensor, split: data.DataSplit) -> Mapping[str, float]:
        """Return metrics by name."""


@dataclass(frozen=True)
class Accuracy:
    """Fraction of examples whose class has the largest score, and of those whose class is among the `top` largest.

    The scores are those of the head, so the classes must be those of training.
    """

    top: int = 5

    def hits(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the numbers of examples counted by the two metrics."""
        first = scores.argmax(1) == labels
        among = (scores.topk(min(self.top, scores.shape[1])).indices == labels.unsqueeze(1)).any(1)
        return torch.stack([first.sum(), among.sum()])


CLASSES_PER_FOLD = 2  # fewest classes with two examples per fold of drawn pairs


@dataclass(frozen=True)
class VerificationProtocol:
    """Verification of pairs: are two examples of the same class?

    Pairs are those of the data, those of a file, or drawn: balanced, in folds of different classes.

    Attributes:
        pairs: a file with pairs of held-out images (LFW's pairs.txt, or names of files), or a .bin file of insightface
            that contains its images.
        folds, per_fold, seed: of drawn pairs; fewer if there are not enough examples.
        subtract_mean: subtract the mean feature of the other folds.
    """

    pairs: str | None = None
    folds: int = 10
    per_fold: int = 300
    seed: int = 0
    subtract_mean: bool = False

    @property
    def label(self) -> str:
        """The prefix of its metrics: "verification", followed by the name of a .bin file."""
        return f"verification.{Path(self.pairs or '').stem}" if self._has_images else "verification"

    @property
    def _has_images(self) -> bool:
        return self.pairs is not None and self.pairs.endswith(".bin")

    def split(self, split: data.DataSplit) -> data.DataSplit:
        """Return the data on which to verify: those of training, or the images of a .bin file in the same size."""
        if self.pairs is None or not self._has_images:
            return split
        shape = (split.outline() or {"shape": []})["shape"]
        require(
            len(shape) == 3, "validation.protocols", "without a .bin file, because the data are no images", self.pairs
        )
        source = data.BinSource(self.pairs, size=(shape[1], shape[2]), grey=shape[0] == 1)
        return replace(split, validation=source, pairs=source.pairs, open_set=True)

    def __call__(self, features: Tensor, labels: Tensor, split: data.DataSplit) -> dict[str, float]:
        """Return accuracy, equal error rate and area under the curve."""
        pairs = self._pairs(labels, split)
        # Without pairs of examples that cannot be decoded.
        pairs = pairs.subset((labels[pairs.first] >= 0) & (labels[pairs.second] >= 0))
        folds: Any = pairs.fold if pairs.folds > 1 else min(10, int(pairs.same.sum()), int((~pairs.same).sum()))
        options: dict[str, Any] = {"folds": folds, "subtract_mean": self.subtract_mean}
        result = verify(features[pairs.first], features[pairs.second], pairs.same, **options)
        return {"accuracy": result.accuracy, "eer": result.eer, "auc": result.auc}

    def _pairs(self, labels: Tensor, split: data.DataSplit) -> data.Pairs:
        source = split.validation
        assert source is not None
        if self.pairs is not None and not self._has_images:
            return data.read_pairs(self.pairs, [source.name(index) for index in range(len(source))])
        return draw_possible_pairs(labels, self.folds, self.per_fold, self.seed) if split.pairs is None else split.pairs


def draw_possible_pairs(labels: Tensor, folds: int, per_fold: int, seed: int) -> data.Pairs:
    """Draw pairs in folds of different classes, or from all classes together if a fold would have few classes.

    With few classes per fold, a threshold that is chosen on the other folds does not transfer, and accuracies would
    say more about the folds than about the features. There are at most `folds` times `per_fold` pairs of each kind.

    >>> draw_possible_pairs(torch.arange(12) // 3, folds=10, per_fold=300, seed=0)
    Pairs(24 pairs, 12 of them same, 1 folds)
    """
    counts = labels.unique(return_counts=True)[1]
    if int((counts > 1).sum()) >= CLASSES_PER_FOLD * folds:
        for pairs in _halved(per_fold, 10):
            with suppress(ValueError):
                return data.draw_pairs(labels, folds=folds, per_fold=pairs, seed=seed)
    same = int((counts * (counts - 1) // 2).sum())
    different = len(labels) * (len(labels) - 1) // 2 - same
    return data.draw_all_class_pairs(labels, min(same, different, folds * per_fold) or None, seed=seed)


def _halved(number: int, least: int) -> list[int]:
    """Return a number and its halves down to `least`.

    >>> _halved(10, 1)
    [10, 5, 2, 1]
    """
    return [number] if number // 2 < least else [number, *_halved(number // 2, least)]


@dataclass(frozen=True)
class IdentificationProtocol:
    """Identification: the first example of each class is the gallery, all others are probes."""

    ranks: Sequence[int] = (1, 5)

    def __call__(self, features: Tensor, labels: Tensor, split: data.DataSplit) -> dict[str, float]:
        """Return the accuracy at each rank."""
        gallery = first_of_each(labels)
        result = identify(features[~gallery], labels[~gallery], features[gallery], labels[gallery], ranks=self.ranks)
        return {f"rank{rank}": value for rank, value in result.accuracy.items()}


@dataclass(frozen=True)
class RetrievalProtocol:
    """Retrieval: every example is a query among all others (`hypersphere.evaluation.retrieve`)."""

    def __call__(self, features: Tensor, labels: Tensor, split: data.DataSplit) -> dict[str, float]:
        """Return recall at 1 and mean average precision at R."""
        result = retrieve(features, labels)
        return {"recall1": result.recall_at_1, "map_at_r": result.map_at_r}


PROTOCOLS: dict[str, Callable[..., Any]] = {
    "accuracy": Accuracy,
    "verification": VerificationProtocol,
    "identification": IdentificationProtocol,
    "retrieval": RetrievalProtocol,
}


class Validator:
    """Compute all metrics of an experiment on its held-out data. Each process evaluates a part of the data.

    Args:
        split: the data; without held-out data there are no metrics apart from energies.
        protocols: protocols by name.
        batch_size: examples per batch.
        broken: what to do with files that cannot be decoded, "error" or "skip".
        workers: worker processes that decode.
        energy: also measure the energy of each layer.
    """

    def __init__(
        self,
        split: data.DataSplit,
        protocols: Mapping[str, Any],
        *,
        batch_size: int = 500,
        broken: str = "error",
        workers: int = 0,
        energy: bool = True,
    ) -> None:
        self.split, self.energy = split, energy
        size = batch_size if split.graph is None or split.validation is None else len(split.validation)
        self.batch_size, self.broken, self.workers = size, broken, workers
        # Protocols on the held-out data share one pass over them; others bring their data.
        self._passes: list[tuple[data.DataSplit, dict[str, Any]]] = [(split, {})]
        for name, protocol in protocols.items():
            its_split = protocol.split(split) if hasattr(protocol, "split") else split
            if its_split is split:
                self._passes[0][1][name] = protocol
            else:
                self._passes.append((its_split, {protocol.label: protocol}))

    def __call__(self, objective: Objective) -> dict[str, Any]:
        """Return metrics by name: `accuracy` and `top5`, others with the name of their protocol and a dot.

        Raises:
            FloatingPointError: if features or scores are not finite.
        """
        metrics: dict[str, Any] = {}
        for split, protocols in self._passes:
            if split.validation is not None and protocols:
                metrics |= self._measure(objective, split, protocols)
        if self.energy:
            vectors = class_vectors(objective.head)  # collective operation
            body = getattr(objective.network, "body", objective.network)
            metrics["energy"] = {} if vectors is None else layer_energies(body, vectors)
        return metrics

    def _measure(self, objective: Objective, split: data.DataSplit, protocols: Mapping[str, Any]) -> dict[str, float]:
        accuracy = next((one for one in protocols.values() if isinstance(one, Accuracy)), None)
        others = {name: one for name, one in protocols.items() if not isinstance(one, Accuracy)}
        assert split.validation is not None
        features, labels, hits = self._evaluate(objective, split.validation, accuracy, keep=bool(others))
        metrics: dict[str, float] = {}
        if accuracy is not None and hits is not None:
            first, among = (hits.double() / max(int((labels >= 0).sum()), 1)).tolist()
            metrics |= {"accuracy": first, f"top{accuracy.top}": among}
        for name, protocol in others.items():
            # Pairs refer to positions; all other protocols leave out examples that cannot be decoded.
            rows = slice(None) if isinstance(protocol, VerificationProtocol) else labels >= 0
            values = protocol(features[rows], labels[rows], split)
            metrics |= {f"{name}.{key}": float(value) for key, value in values.items()}
        return metrics

    @torch.no_grad()
    def _evaluate(
        self, objective: Objective, source: data.Source, accuracy: Accuracy | None, *, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return features (or none), labels of all held-out data, and the hits of the accuracy, in every process."""
        processes, device = Processes(), next(objective.parameters()).device
        hits, sound = torch.zeros(2, dtype=torch.int64, device=device), torch.ones((), dtype=torch.bool, device=device)
        parts: list[Tensor] = []
        labels = source.labels.clone()
        with evaluation_mode(objective):
            for inputs, targets, rows in _batches(source, self.batch_size, self.broken, self.workers, processes):
                labels[rows] = targets
                features = objective.features(_floats(inputs.to(device, non_blocking=True)))
                sound &= torch.isfinite(features).all()
                features = features.nan_to_num(0.0, 0.0, 0.0)
                if accuracy is not None:
                    try:
                        scores: Tensor = objective.head.scores(features)  # type: ignore[operator]
                        hits += accuracy.hits(scores, targets.to(device))
                    except NonFiniteScoresError:  # finite features can be so large that their scores overflow
                        sound.fill_(False)
                if keep:
                    parts.append(features.float().cpu())
        counts = processes.add_(torch.cat([hits, (~sound).long().view(1)]))
        if int(counts[2]):
            raise FloatingPointError(DIVERGED)
        features = torch.cat(parts) if parts else torch.empty(0)
        if processes.size > 1 and keep:
            features = _gather(features, len(source), self.batch_size, processes, device)
        return features, labels, counts[:2].cpu() if accuracy is not None else None


def _batches(
    source: data.Source, size: int, broken: str, workers: int, processes: Processes
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield inputs, labels and positions of the part of this process, in order."""
    loader = data.make_loader(
        source,
        batch_size=size,
        sampler=data.SAMPLERS["sequential"](source.labels, 0),
        broken=broken,
        workers=workers,
        rank=processes.rank,
        world=processes.size,
    )
    positions = torch.arange(len(source)).split(batch_sizes(len(source), size))
    for (inputs, labels), batch in zip(loader, positions, strict=True):
        rows, is_ignored = rows_of_rank(batch, processes.rank, processes.size)
        if is_ignored:  # rows that another process evaluates
            yield inputs, source.labels[rows].clone().fill_(-100), rows[:0].new_empty(0)
        else:
            yield inputs, labels, rows


def _gather(features: Tensor, count: int, size: int, processes: Processes, device: torch.device) -> Tensor:
    """Return the features of all processes in the order of the data."""
    rows = [
        torch.cat(
            [
                rows_of_rank(batch, rank, processes.size)[0]
                for batch in torch.arange(count).split(batch_sizes(count, size))
            ]
        )
        for rank in range(processes.size)
    ]
    gathered = processes.concatenate_rows(features.to(device), [len(part) for part in rows]).cpu()
    ordered = torch.empty(count, features.shape[1])
    # Ignored rows of small batches are repetitions, in reverse order of rank so that the real ones remain.
    for part, positions in zip(reversed(gathered.split([len(part) for part in rows])), reversed(rows), strict=True):
        ordered[positions] = part
    return ordered


def _floats(inputs: Tensor) -> Tensor:
    return inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs


# --- class vectors


@torch.no_grad()
def class_vectors(head: Any) -> Tensor | None:
    """Return the class vectors of a head, or a sample of them; those of a sharded head only in the first process."""
    if not isinstance(head, ShardedHead):
        return head.weight
    chosen, sizes = evenly_spaced(head.num_classes), head.sizes
    counts = [len(part) for part in _by_owner(chosen, sizes)]
    mine = _by_owner(chosen, sizes)[head.processes.rank] - head.first
    return head.processes.gather_at_first(head.weight[mine.to(head.weight.device)], counts)


def _by_owner(classes: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split sorted classes by the process that owns them.

    >>> _by_owner(torch.tensor([0, 2, 3]), [1, 3])
    [tensor([0]), tensor([2, 3])]
    """
    ends = torch.tensor(sizes).cumsum(0)
    return list(classes.tensor_split(torch.searchsorted(classes, ends[:-1])))
