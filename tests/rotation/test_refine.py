"""Refinement of neurons before training."""

import pytest
import torch
from torch import nn

import oracle
from hypersphere.energy import hyperspherical_energy
from hypersphere.rotation import refine_neurons, rotate_
from hypersphere.rotation.refine import CompressiveEnergy


def gaussian_rows(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def half_space_energy(rows):
    return hyperspherical_energy(rows, half_space=True)


def test_compressive_energy_is_the_mean_over_projections():
    rows = gaussian_rows(9, 6).double()
    energy = CompressiveEnergy(dim=4, views=3, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    projected = [rows @ torch.randn(6, 4, dtype=rows.dtype, generator=generator) for _ in range(3)]
    expected = [oracle.energy(torch.cat([w, -w]).numpy(), 2) for w in projected]
    assert energy(rows).item() == pytest.approx(sum(expected) / 3)
    with pytest.raises(ValueError, match="dim must be an integer >= 2, not 1"):
        CompressiveEnergy(dim=1)
    with pytest.raises(ValueError, match="views must be an integer >= 1, not 0"):
        CompressiveEnergy(views=0)


def test_refine_with_random_projections_is_reproducible_with_a_generator():
    rows = gaussian_rows(12, 5)
    first, second = (
        refine_neurons(rows, "comhe", steps=5, generator=torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert torch.equal(first, second)
    chosen = CompressiveEnergy(generator=torch.Generator().manual_seed(3))
    assert torch.equal(refine_neurons(rows, chosen, steps=5), first)
    assert not torch.equal(refine_neurons(rows, "comhe", steps=5), first)


def test_refine_rejects_a_single_neuron():
    with pytest.raises(ValueError, match="rows must be at least two neurons, not 1"):
        refine_neurons(gaussian_rows(1, 4), steps=2)


@pytest.mark.parametrize("energy", ["mhe", "half_space_mhe", "comhe"])
@pytest.mark.parametrize(("n", "d"), [(64, 27), (30, 8), (10, 40), (2, 5)])
def test_refine_lowers_the_half_space_energy(energy, n, d):
    rows = gaussian_rows(n, d)
    torch.manual_seed(0)
    refined = refine_neurons(rows, energy, steps=60)
    torch.testing.assert_close(refined.norm(dim=1), rows.norm(dim=1))
    before, after = (oracle.energy(torch.cat([w, -w]).double().numpy(), 2) for w in (rows, refined))
    assert after < before * (1 - 1e-4) or (n, d) == (2, 5)
    assert after <= before * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("energy", ["mhe", "half_space_mhe", "comhe"])
def test_refine_makes_no_antipodal_pairs_in_the_first_layer_of_cnn6(energy):
    """64 filters of 3×3×3: the full-space minimum would pair filters with their negatives."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 64, 3)
    before = half_space_energy(conv.weight.detach().flatten(1))
    rotate_(conv, "cayley", refine=energy, refine_steps=400)
    w = nn.functional.normalize(conv.weight.detach().flatten(1))
    assert half_space_energy(w) < before
    assert (w @ w.mT).fill_diagonal_(0).abs().max() < 0.9


def test_refine_in_full_space_lowers_the_full_energy_if_neurons_are_few():
    rows = gaussian_rows(10, 40)
    refined = refine_neurons(rows, "mhe", steps=200)
    assert hyperspherical_energy(refined) < hyperspherical_energy(rows)
    cosines = nn.functional.normalize(refined) @ nn.functional.normalize(refined).mT
    assert cosines.fill_diagonal_(0).mean() < 0  # towards the simplex


def test_refine_takes_a_function_and_keeps_its_best_iterate():
    rows = gaussian_rows(30, 8)

    def spread(w):
        return -w.std()

    def value(w):
        return spread(nn.functional.normalize(w))

    assert value(refine_neurons(rows, spread, steps=80)) < value(rows)
    # A rate so large that descent overshoots cannot make the result worse than the start.
    assert half_space_energy(refine_neurons(rows, half_space_energy, steps=3, rate=3.0)) <= half_space_energy(rows)


def test_refine_returns_the_rows_if_their_half_space_energy_would_rise():
    rows = torch.eye(3, 5)  # orthogonal: the minimum in half space, but not in full space
    assert torch.equal(refine_neurons(rows, "mhe", steps=50), rows)
