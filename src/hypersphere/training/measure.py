"""Metrics computed during training: test accuracy, and the energy of the neurons of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere._layer_selection import layers_of
from hypersphere._modes import evaluation_mode
from hypersphere.energy import hyperspherical_energy
from hypersphere.heads import NonFiniteScoresError, ShardedHead
from hypersphere.heads._collectives import Processes
from hypersphere.training.objective import Objective
from hypersphere.training.parallel import part_of

__all__ = ["accuracy", "class_vectors", "layer_energies", "mean_energy"]

MOST = 2048


@torch.no_grad()
def accuracy(objective: Objective, data: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the accuracy on the data. Each process evaluates a part; all processes get the same number.

    Raises:
        FloatingPointError: if features or scores are not finite.
    """
    processes, where = Processes(), next(objective.parameters()).device
    right, seen, sound = 0, 0, 1
    with evaluation_mode(objective):
        for inputs, labels in data:
            x, y = (part.to(where) for part in part_of(inputs, labels, processes))
            features = objective.features(x)
            sound &= int(torch.isfinite(features).all())
            try:
                scores: Tensor = objective.head.scores(features.nan_to_num(0.0, 0.0, 0.0))  # type: ignore[operator]
            except NonFiniteScoresError:  # finite features can be so large that their scores overflow
                sound = 0
                continue
            right, seen = right + int((scores.argmax(1) == y).sum()), seen + len(labels)
    right, broken = processes.add_(torch.tensor([right, 1 - sound], device=where)).tolist()
    if broken:
        raise FloatingPointError("training diverged: the features or scores of test data are not finite")
    return right / seen


@torch.no_grad()
def layer_energies(body: nn.Module, head: Tensor) -> dict[str, float]:
    """Return the mean energy (s = 2) of each layer: hidden ones in half space, the class vectors in full space.

    Layers with more than 2,048 neurons are sampled at evenly spaced rows; layers with one neuron are skipped.

    >>> energies = layer_energies(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), torch.eye(3))
    >>> list(energies), energies["head"]
    (['0', 'head'], 0.5)
    """
    energies = {}
    for layer in layers_of(body, output=None):
        if layer.role == "hidden" and layer.shape[1] > 1:
            values = [hyperspherical_energy(_some(rows), half_space=True) for rows in layer.row_sets()]
            energies[layer.name] = float(torch.stack(values).mean())
    return {**energies, "head": float(hyperspherical_energy(_some(head)))}


def _some(rows: Tensor) -> Tensor:
    return rows if len(rows) <= MOST else rows[_evenly(len(rows)).to(rows.device)]


def _evenly(count: int) -> Tensor:
    return torch.linspace(0, count - 1, min(count, MOST)).long()


@torch.no_grad()
def class_vectors(head: Any) -> Tensor | None:
    """Return the class vectors of a head, or a sample of them; those of a sharded head only in the first process."""
    if not isinstance(head, ShardedHead):
        return head.weight
    chosen, sizes = _evenly(head.num_classes), head.sizes
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


def mean_energy(energies: Mapping[str, float]) -> float:
    """Return the mean over the hidden layers, or the energy of the head if there are none.

    >>> mean_energy({"a": 1.0, "b": 2.0, "head": 9.0})
    1.5
    """
    hidden = [value for name, value in energies.items() if name != "head"]
    return sum(hidden) / len(hidden) if hidden else energies["head"]
