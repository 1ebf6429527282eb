"""The energy of random directions against samples and the Beta distribution."""

import math

import pytest
import torch

from hypersphere.energy import random_energy
from hypersphere.functions._pairwise import PairSum, pair_energy
from hypersphere.functions.kernel import PairPotential, kernel_of


@pytest.mark.parametrize("power", [0, 1, 2])
@pytest.mark.parametrize("distance", ["euclidean", "angular"])
@pytest.mark.parametrize("half_space", [False, True])
def test_random_energy_agrees_with_samples(power, distance, half_space):
    w = torch.randn(2000, 10, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = pair_energy(PairSum(w, PairPotential(kernel_of(power), distance, half_space), mean=True))
    mean, deviation = random_energy(10, 8, power, distance, half_space)
    assert values.mean().item() == pytest.approx(mean, abs=4 * deviation / 2000**0.5)
    assert values.std().item() == pytest.approx(deviation, rel=0.15)


def test_random_energy_agrees_with_the_beta_distribution():
    """E‖x−y‖^−s = 2^−s Γ(a−s/2)Γ(2a)/(Γ(a)Γ(2a−s/2)) with a = (d−1)/2, by the Beta law of (1−c)/2."""
    for d, s in ((5, 1), (9, 2), (40, 2), (3000, 2)):
        a = (d - 1) / 2
        log = math.lgamma(a - s / 2) + math.lgamma(2 * a) - math.lgamma(a) - math.lgamma(2 * a - s / 2)
        assert random_energy(7, d, s)[0] == pytest.approx(2**-s * math.exp(log), rel=1e-6)
    assert random_energy(7, 3, 2) == (math.inf, math.inf)
    assert random_energy(7, 4, 2)[0] == pytest.approx(1.0, rel=1e-6)
    assert math.isinf(random_energy(7, 4, 2)[1])
