"""Energies of the layers of a network."""

import pytest
import torch

from hypersphere.energy import hyperspherical_energy, layer_energies


def test_layer_energies_sample_large_layers():
    body = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3, groups=2), torch.nn.Linear(3, 1))
    rows = torch.randn(5000, 16)
    found = layer_energies(body, rows)
    assert list(found) == ["0", "head"]
    halves = [hyperspherical_energy(part, half_space=True) for part in body[0].weight.flatten(1).split(3)]
    assert found["0"] == pytest.approx(sum(halves).item() / 2)
    assert found["head"] == pytest.approx(hyperspherical_energy(rows).item(), rel=0.02)
