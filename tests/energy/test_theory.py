"""Statements of the sources about energies and random directions, checked numerically."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from scipy.spatial import ConvexHull

from hypersphere import sphere
from hypersphere.energy import hyperspherical_energy, minimize, random_energy
from hypersphere.energy.inspect import hole_radius
from hypersphere.functions.projection import CONSTRUCTIONS, Random

from . import reference


def gaussian_directions(n, d, seed=0):
    rows = torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return sphere.normalize(rows)


def polygon(n):
    angles = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    return torch.stack([angles.cos(), angles.sin()], 1)


# Growth of the minimal energy with N (thesis, theorem 2 of chapter 5). On the circle, d = 1, regular polygons are
# minimal for every s, so the limits can be checked at large N.


@pytest.mark.parametrize("s", [0.3, 0.7])
def test_minimal_energy_below_the_dimension_grows_like_n_squared(s):
    limit = random_energy(2, 2, s)[0]  # the energy integral of the uniform distribution
    ratios = [hyperspherical_energy(polygon(n), power=s, reduction="sum").item() / n**2 for n in (250, 1000, 4000)]
    assert ratios[0] < ratios[1] < ratios[2] < limit
    # The correction is 2ζ(s)/(2π)^s·N^(s−1), with ζ(s) < 0 continued to s < 1.
    zeta = {0.3: -0.904559, 0.7: -2.778388}[s]
    assert ratios[2] == pytest.approx(limit + 2 * zeta / (2 * math.pi) ** s * 4000 ** (s - 1), rel=1e-5)


def test_minimal_energy_at_the_dimension_grows_like_n_squared_log_n():
    energies = {n: hyperspherical_energy(polygon(n), power=1, reduction="sum").item() for n in (500, 1000, 2000, 4000)}
    slopes = [(energies[2 * n] / (2 * n) ** 2 - energies[n] / n**2) / math.log(2) for n in (500, 1000, 2000)]
    assert slopes == pytest.approx([1 / math.pi] * 3, rel=1e-5)


@pytest.mark.parametrize("s", [2, 3])
def test_minimal_energy_above_the_dimension_grows_like_the_power_one_plus_s(s):
    limit = 2 * special.zeta(s) / (2 * math.pi) ** s
    ratio = hyperspherical_energy(polygon(2000), power=s, reduction="sum").item() / 2000 ** (1 + s)
    assert ratio == pytest.approx(limit, rel=1e-3)


def test_minimal_energy_on_the_sphere_grows_like_n_squared():
    n = np.array(sorted(reference.THOMSON))
    energies = np.array([2 * reference.THOMSON[k] for k in n])
    assert (np.diff(energies / n**2) > 0).all()
    # E/N² = 1 − 1.1·N^(−1/2): extrapolation reaches the energy integral, which is 1 for s = 1.
    slope, intercept = np.polyfit(n[n > 8] ** -0.5, (energies / n**2)[n > 8], 1)
    assert intercept == pytest.approx(random_energy(2, 3, 1)[0], abs=0.02)
    assert slope == pytest.approx(-1.1, abs=0.1)


def test_minimal_energy_on_the_sphere_above_the_dimension_grows_like_n_to_the_one_plus_s_over_d():
    energies = [minimize(n, 3, power=6, restarts=4, iterations=300).energy for n in (20, 40)]
    assert math.log2(energies[1] / energies[0]) == pytest.approx(1 + 6 / 2, abs=0.15)


# Gaussian rows are uniform on the sphere (thesis, theorem 6 of chapter 7).


@pytest.mark.parametrize("d", [2, 3, 8])
def test_gaussian_rows_are_uniform_on_the_sphere(d):
    unit = gaussian_directions(4000, d, seed=d).numpy()
    # Every projection t of a uniform direction has a Beta((d−1)/2, (d−1)/2) distribution of (1 + t)/2.
    for axis in (np.eye(d)[0], np.ones(d) / math.sqrt(d)):
        assert stats.kstest((1 + unit @ axis) / 2, stats.beta((d - 1) / 2, (d - 1) / 2).cdf).pvalue > 1e-3
    # Rayleigh's test of the mean direction, and the second moments.
    assert stats.chi2(d).sf(d * len(unit) * (unit.mean(0) ** 2).sum()) > 1e-3
    assert np.abs(unit.T @ unit / len(unit) - np.eye(d) / d).max() < 5 / math.sqrt(len(unit)) / d


def test_rows_that_are_not_gaussian_are_not_uniform():
    rows = torch.rand(4000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    projection = sphere.normalize(rows)[:, 0].numpy()
    assert stats.kstest((1 + projection) / 2, stats.uniform.cdf).pvalue < 1e-3


def test_minimum_energy_configurations_become_uniform():
    discrepancies = []
    for n in (8, 32, 96):
        points = minimize(n, 3, restarts=2, iterations=200, generator=torch.Generator().manual_seed(0)).points
        heights = (1 + points @ gaussian_directions(50, 3).T).numpy() / 2  # uniform on [0, 1] in the limit
        discrepancies.append(np.mean([stats.kstest(column, "uniform").statistic for column in heights.T]))
    assert discrepancies[0] > 2 * discrepancies[1] > 3 * discrepancies[2]


@pytest.mark.parametrize(("d", "s"), [(3, 1.9), (3, 1), (4, 2), (9, 2), (40, 3.3), (2, 0), (7, 0)])
def test_random_energy_is_the_energy_integral(d, s):
    def expectation(f):
        weight = lambda t: math.sin(t) ** (d - 2)  # noqa: E731
        total = integrate.quad(weight, 0, math.pi)[0]
        options = {"epsabs": 0, "epsrel": 1e-11, "limit": 400}
        return (
            sum(integrate.quad(lambda t: f(t) * weight(t), *ends, **options)[0] for ends in ((0, 1), (1, math.pi)))
            / total
        )

    for distance, apart in (("euclidean", lambda t: 2 * math.sin(t / 2)), ("angular", lambda t: t)):
        kernel = (lambda z: z**-s) if s else (lambda z: -math.log(z))
        expected = expectation(lambda t, k=kernel, a=apart: k(a(t)))
        assert random_energy(10, d, s, distance)[0] == pytest.approx(expected, rel=1e-8, abs=1e-9)


# Random vectors become nearly orthogonal as the dimension grows (thesis, 1.1).


def test_random_vectors_become_orthogonal_as_the_dimension_grows():
    generator = torch.Generator().manual_seed(0)
    cosines, gaps = [], []
    for d in (10, 100, 1000, 10000):
        x, y = torch.randn(2, 400, d, dtype=torch.float64, generator=generator)
        cosines.append(sphere.cosine(x, y).square().mean().sqrt().item() * math.sqrt(d))
        pythagoras = (x.square().sum(1) + y.square().sum(1)).sqrt()
        gaps.append(((x - y).norm(dim=1) / pythagoras - 1).abs().mean().item() * math.sqrt(d))
    assert cosines == pytest.approx([1] * 4, rel=0.1)  # the root mean square of the cosine is 1/√d
    assert max(gaps) < 1


# Random projections preserve angles (thesis, theorem 3 of chapter 6).


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_random_projection_preserves_angles_within_the_stated_bound(construction):
    k, epsilon, d, trials = 200, 0.5, 256, 400
    generator = torch.Generator().manual_seed(1)
    first, other = torch.linalg.qr(torch.randn(d, 2, generator=generator))[0].T
    basis = Random(dim=k, views=trials, construction=construction).basis(2, d, 1, generator)
    stated = (1 - 2 * math.exp(-k * epsilon**2 / 8)) ** 2
    assert stated > 0.99
    for cosine in (-0.5, 0.0, 0.6, 0.95):
        pair = torch.stack([first, cosine * first + math.sqrt(1 - cosine**2) * other])
        projected = pair @ basis.mT
        after = sphere.cosine(projected[:, 0], projected[:, 1])
        holds = ((cosine - epsilon) / (1 + epsilon) < after) & (after < (cosine + epsilon) / (1 - epsilon))
        assert holds.double().mean().item() >= stated


# Facets and holes of random points (thesis, appendix F.9). The index of κ in B_d is d², not κ_d squared.


def kappa(d):
    return math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2)) / (d * math.sqrt(math.pi))


def facet_constant(d):
    return 2 / (d + 1) * kappa(d**2) / kappa(d) ** d


def hole_constant(d, p):
    return facet_constant(d) * math.exp(math.lgamma(d + p / d) - math.lgamma(d)) * kappa(d) ** (-p / d)


def hole_radii(points):
    """Return the Euclidean radii of the spherical caps that belong to the facets of the convex hull."""
    offsets = -ConvexHull(points).equations[:, -1]  # the cosine of the geodesic radius of each cap
    return np.sqrt(np.maximum(2 - 2 * offsets, 0))


def test_kappa_satisfies_its_recursion():
    assert kappa(1) == pytest.approx(1 / math.pi)
    for d in range(2, 8):
        assert kappa(d) == pytest.approx(1 / (2 * math.pi * d * kappa(d - 1)))


@pytest.mark.parametrize(("d", "n", "trials"), [(1, 500, 10), (2, 1000, 10), (3, 2000, 4)])
def test_facets_and_hole_radii_of_random_points_follow_the_asymptotics(d, n, trials):
    radii = [hole_radii(gaussian_directions(n, d + 1, seed).numpy()) for seed in range(trials)]
    assert np.mean([len(r) for r in radii]) == pytest.approx(facet_constant(d) * n, rel=0.05)
    for p in (1, 2):
        sums = [(r**p).sum() for r in radii]
        assert np.mean(sums) == pytest.approx(hole_constant(d, p) * n ** (1 - p / d), rel=0.06)
    assert [facet_constant(d) for d in (1, 2)] == pytest.approx([1, 2])


def test_largest_hole_is_the_covering_radius():
    points = gaussian_directions(60, 3)
    largest = 2 * math.asin(hole_radii(points.numpy()).max() / 2)
    assert hole_radius(points) == pytest.approx(largest, rel=1e-6)
