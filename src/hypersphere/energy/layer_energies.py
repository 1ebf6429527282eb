"""The energy of each layer of a network, for example during training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hypersphere._layer_selection import layers_of
from hypersphere.energy._sampling import MAX_NEURONS, evenly_spaced
from hypersphere.energy.energy import hyperspherical_energy

__all__ = ["layer_energies", "mean_energy"]


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
            values = [hyperspherical_energy(_sample(rows), half_space=True) for rows in layer.row_sets()]
            energies[layer.name] = float(torch.stack(values).mean())
    return {**energies, "head": float(hyperspherical_energy(_sample(head)))}


def mean_energy(energies: Mapping[str, float]) -> float:
    """Return the mean over the hidden layers, or the energy of the head if there are none.

    >>> mean_energy({"a": 1.0, "b": 2.0, "head": 9.0})
    1.5
    """
    hidden = [value for name, value in energies.items() if name != "head"]
    return sum(hidden) / len(hidden) if hidden else energies["head"]


def _sample(rows: Tensor) -> Tensor:
    return rows if len(rows) <= MAX_NEURONS else rows[evenly_spaced(len(rows)).to(rows.device)]
