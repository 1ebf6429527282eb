"""Validation: metrics on held-out data during training, and the energy of the neurons of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from hypersphere import data
from hypersphere._collectives import Processes
from hypersphere._modes import evaluation_mode
from hypersphere._numerics import evenly_spaced
from hypersphere._validation import require
from hypersphere.data.images import as_floats
from hypersphere.data.loading import batch_sizes, rows_of_rank
from hypersphere.data.pairs import draw_possible_pairs
from hypersphere.energy import layer_energies
from hypersphere.energy.energy import MAX_NEURONS
from hypersphere.evaluation import identify_by_first, retrieve, verify
from hypersphere.heads import NonFiniteScoresError, ShardedHead
from hypersphere.training.objective import Objective

__all__ = ["PROTOCOLS", "Validator", "gathered_class_vectors"]

DIVERGED = "training diverged: the features or scores of validation data are not finite"


@dataclass(frozen=True)
class Accuracy:
    """Fraction of examples whose class has the largest score, and of those whose class is among the `top` largest.

    The scores are those of the head, so the classes must be those of training.
    """

    top: int = 5

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of its metrics."""
        return ("accuracy", f"top{self.top}")

    def hits(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the numbers of correct examples (2,): by the largest score, and among the `top` largest."""
        is_first = scores.argmax(1) == labels
        is_in_top = (scores.topk(min(self.top, scores.shape[1])).indices == labels.unsqueeze(1)).any(1)
        return torch.stack([is_first.sum(), is_in_top.sum()])


@dataclass(frozen=True)
class VerificationProtocol:
    """Verification of pairs: are two examples of the same class?

    Pairs are those of a file or of the data. Otherwise equally many pairs of both kinds are drawn, in folds of
    different classes if there are enough.

    Attributes:
        pairs: a file with pairs of held-out images (LFW's pairs.txt, or names of files), or a .bin file of insightface
            that contains its images.
        folds, per_fold, seed: number of folds, of pairs of each kind per fold, and the seed, for drawn pairs. There are
            fewer if there are not enough examples.
        subtract_mean: subtract the mean feature of the other folds.
    """

    pairs: str | None = None
    folds: int = 10
    per_fold: int = 300
    seed: int = 0
    subtract_mean: bool = False
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "eer", "auc")

    @property
    def label(self) -> str:
        """The prefix of its metrics: "verification", followed by the name of a .bin file."""
        return f"verification.{Path(self.pairs or '').stem}" if self._has_images else "verification"

    @property
    def _has_images(self) -> bool:
        return self.pairs is not None and self.pairs.endswith(".bin")

    def split(self, split: data.DataSplit) -> data.DataSplit:
        """Return the data on which to verify: the given ones, or the images of a .bin file, resized to their shape."""
        if self.pairs is None or not self._has_images:
            return split
        shape = (split.outline() or {"shape": []})["shape"]
        require(
            len(shape) == 3, "validation.protocols", "without a .bin file, because the data are not images", self.pairs
        )
        source = data.BinSource(self.pairs, size=(shape[1], shape[2]), grey=shape[0] == 1)
        return replace(split, validation=source, pairs=source.pairs, open_set=True)

    def __call__(self, features: Tensor, labels: Tensor, split: data.DataSplit) -> dict[str, float]:
        """Return accuracy, equal error rate and area under the curve."""
        pairs = self.chosen_pairs(labels, split)
        result = verify(
            features[pairs.first],
            features[pairs.second],
            pairs.same,
            folds=_folds_of(pairs),
            subtract_mean=self.subtract_mean,
        )
        return {name: getattr(result, name) for name in self.metrics}

    def draws_pairs(self, split: data.DataSplit) -> bool:
        """Return True if pairs are drawn, because neither the protocol nor the data define them."""
        return self.pairs is None and split.pairs is None

    def chosen_pairs(self, labels: Tensor, split: data.DataSplit) -> data.Pairs:
        """Return the pairs of the file or of the data, or drawn ones.

        Examples that cannot be decoded have a negative label and are in no pair.

        Raises:
            ValueError: if there are fewer than two pairs of a kind, so that no threshold can be cross-validated.
        """
        source = split.validation
        assert source is not None
        if self.draws_pairs(split):
            readable = (labels >= 0).nonzero().flatten()
            drawn = draw_possible_pairs(labels[readable], self.folds, self.per_fold, self.seed)
            pairs = replace(drawn, first=readable[drawn.first], second=readable[drawn.second])
        else:
            pairs = split.pairs  # type: ignore[assignment]
            if self.pairs is not None and not self._has_images:
                pairs = data.read_pairs(self.pairs, [source.name(index) for index in range(len(source))])
            pairs = pairs.subset((labels[pairs.first] >= 0) & (labels[pairs.second] >= 0))
        same = int(pairs.same.sum())
        accepted = "at least two of the same class and two of different classes"
        require(min(same, len(pairs) - same) >= 2, "verification pairs", accepted, f"{same} and {len(pairs) - same}")
        return pairs


def _folds_of(pairs: data.Pairs) -> Tensor | int:
    """Return the fold of each pair, or a number of new folds if there is one fold or one lacks a kind of pairs."""
    different = ~pairs.same
    counts = [pairs.fold[kind].bincount(minlength=pairs.folds) for kind in (pairs.same, different)]
    if pairs.folds > 1 and bool(torch.stack(counts).all()):
        return pairs.fold
    return min(10, int(pairs.same.sum()), int(different.sum()))


@dataclass(frozen=True)
class IdentificationProtocol:
    """Identification: the first example of each class is the gallery, all others are probes."""

    ranks: Sequence[int] = (1, 5)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of its metrics."""
        return tuple(f"rank{rank}" for rank in self.ranks)

    def __call__(self, features: Tensor, labels: Tensor, split: data.DataSplit) -> dict[str, float]:
        """Return the accuracy at each rank."""
        result = identify_by_first(features, labels, ranks=self.ranks)
        return {f"rank{rank}": value for rank, value in result.accuracy.items()}


@dataclass(frozen=True)
class RetrievalProtocol:
    """Retrieval: every example is a query among all others (`hypersphere.evaluation.retrieve`)."""

    metrics: ClassVar[tuple[str, ...]] = ("recall1", "map_at_r")

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
        protocols: by name; each is an `Accuracy`, or maps features, labels and split to metrics by name.
        batch_size: examples per batch.
        broken: what to do with files that cannot be decoded: "error" or "skip".
        workers: number of worker processes that read and decode data.
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
        self._protocols = dict(protocols)

    def __repr__(self) -> str:
        return f"Validator({', '.join([*self._protocols, *['energy'] * self.energy])})"

    @cached_property
    def _passes(self) -> list[tuple[data.DataSplit, dict[str, Any]]]:
        """The data splits to evaluate, with the protocols of each. All protocols on the held-out data share one pass.

        Files of protocols are opened at the first use, so that a run can be opened where they do not exist.
        """
        passes: list[tuple[data.DataSplit, dict[str, Any]]] = [(self.split, {})]
        for name, protocol in self._protocols.items():
            split = protocol.split(self.split) if hasattr(protocol, "split") else self.split
            if split is self.split:
                passes[0][1][name] = protocol
            else:
                passes.append((split, {protocol.label: protocol}))
        return passes

    def protocols(self) -> Iterator[tuple[str, Any, data.DataSplit]]:
        """Yield name, protocol and data of each protocol that has held-out data."""
        for split, protocols in self._passes:
            if split.validation is not None:
                for name, protocol in protocols.items():
                    yield name, protocol, split

    def metric_names(self) -> list[str]:
        """Return the names of all metrics apart from energies; `NAME.*` for a protocol outside the library."""
        names: list[str] = []
        for name, protocol, _ in self.protocols():
            if isinstance(protocol, Accuracy):
                names += protocol.metrics
            else:
                metrics = protocol.metrics if type(protocol) in PROTOCOLS.values() else ["*"]
                names += [f"{name}.{metric}" for metric in metrics]
        return names

    def __call__(self, objective: Objective) -> dict[str, Any]:
        """Return metrics by name: `accuracy` and `top5`; others are prefixed by their protocol, as `verification.eer`.

        Raises:
            FloatingPointError: if features or scores are not finite.
        """
        metrics: dict[str, Any] = {}
        for split, protocols in self._passes:
            if split.validation is not None and protocols:
                metrics |= self._measure(objective, split, split.validation, protocols)
        if self.energy:
            vectors = gathered_class_vectors(objective.head)  # collective operation
            body = getattr(objective.network, "body", objective.network)
            metrics["energy"] = {} if vectors is None else layer_energies(body, vectors)
        return metrics

    def _measure(
        self, objective: Objective, split: data.DataSplit, source: data.Source, protocols: Mapping[str, Any]
    ) -> dict[str, float]:
        """Return the metrics of protocols that share one pass over `source`."""
        accuracy = next((protocol for protocol in protocols.values() if isinstance(protocol, Accuracy)), None)
        others = {name: protocol for name, protocol in protocols.items() if not isinstance(protocol, Accuracy)}
        features, labels, hits = self._evaluate(objective, source, accuracy, keep_features=bool(others))
        metrics: dict[str, float] = {}
        if accuracy is not None:
            values = (hits.double() / max(int((labels >= 0).sum()), 1)).tolist()
            metrics |= dict(zip(accuracy.metrics, values, strict=True))
        for name, protocol in others.items():
            # Pairs refer to positions; all other protocols leave out examples that cannot be decoded.
            rows = slice(None) if isinstance(protocol, VerificationProtocol) else labels >= 0
            values = protocol(features[rows], labels[rows], split)
            metrics |= {f"{name}.{key}": float(value) for key, value in values.items()}
        return metrics

    @torch.no_grad()
    def _evaluate(
        self, objective: Objective, source: data.Source, accuracy: Accuracy | None, *, keep_features: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return features (empty unless `keep_features`), labels, and the counts of `Accuracy.hits`."""
        processes, device = Processes(), next(objective.parameters()).device
        loader = data.Loader(
            source,
            batch_size=self.batch_size,
            sampler=data.SAMPLERS["sequential"](source.labels, 0),
            broken=self.broken,
            workers=self.workers,
            rank=processes.rank,
            world=processes.size,
        )
        # Sums stay on the device, so that no batch waits for it.
        hits, failures = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros((), device=device)
        feature_parts, label_parts = [], []
        with evaluation_mode(objective), parametrize.cached():
            for inputs, labels in loader:
                features = objective.features(as_floats(inputs.to(device, non_blocking=True)))
                failures += ~torch.isfinite(features).all()
                features = features.nan_to_num(0.0, 0.0, 0.0)
                if accuracy is not None:
                    try:
                        scores: Tensor = objective.head.scores(features)  # type: ignore[operator]
                        hits += accuracy.hits(scores, labels.to(device))
                    except NonFiniteScoresError:  # finite features can be so large that their scores overflow
                        failures += 1
                label_parts.append(labels)
                if keep_features:
                    feature_parts.append(features.float().cpu())
        # All processes raise or none, because they wait for each other below.
        if processes.all_reduce_(failures) > 0:
            raise FloatingPointError(DIVERGED)
        labels = self._rows_in_order(torch.cat(label_parts), len(source), device)
        features = torch.empty(0)
        if keep_features:
            features = self._rows_in_order(torch.cat(feature_parts), len(source), device)
        return features, labels, processes.all_reduce_(hits).cpu()

    def _rows_in_order(self, part: Tensor, count: int, device: torch.device) -> Tensor:
        """Gather `part`, the rows of this process, from all processes, and return all rows in the order of the data."""
        processes = Processes()
        if processes.size == 1:
            return part
        batches = torch.arange(count).split(batch_sizes(count, self.batch_size))
        positions = [
            torch.cat([rows_of_rank(batch, rank, processes.size)[0] for batch in batches])
            for rank in range(processes.size)
        ]
        counts = [len(rows) for rows in positions]
        gathered = processes.concatenate_rows(part.to(device), counts).cpu().split(counts)
        ordered = part.new_empty(count, *part.shape[1:])
        # If a batch is too small for all processes, the last ones repeat rows of it, see `rows_of_rank`. The originals
        # are written after these copies.
        for rows, values in zip(reversed(positions), reversed(gathered), strict=True):
            ordered[rows] = values
        return ordered


@torch.no_grad()
def gathered_class_vectors(head: Any) -> Tensor | None:
    """Return the class vectors of a head. Of a sharded head, the first process gets a sample and the others None."""
    if not isinstance(head, ShardedHead):
        return head.weight
    centers = head.head.num_centers
    chosen = evenly_spaced(head.num_classes * centers, MAX_NEURONS)
    sizes = [size * centers for size in head.sizes]
    counts = [len(part) for part in _by_owner(chosen, sizes)]
    local_rows = _by_owner(chosen, sizes)[head.processes.rank] - head.rows.start
    return head.processes.gather_at_first(head.weight[local_rows.to(head.weight.device)], counts)


def _by_owner(rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split sorted row numbers by the process that has them; process r has `sizes[r]` rows.

    >>> _by_owner(torch.tensor([0, 2, 3]), [1, 3])
    [tensor([0]), tensor([2, 3])]
    """
    ends = torch.tensor(sizes).cumsum(0)
    return list(rows.tensor_split(torch.searchsorted(rows, ends[:-1])))
