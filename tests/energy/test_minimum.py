"""Configurations of minimal energy, compared with the known ones."""

import math

import numpy as np
import pytest
import torch

from hypersphere.energy import hyperspherical_energy, minimize

from . import reference


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("n", reference.THOMSON)
def test_minimize_solves_thomson_problems(n):
    points, energy = minimize(n, 3, restarts=16)
    assert energy == pytest.approx(reference.THOMSON[n], rel=1e-8)
    torch.testing.assert_close(points.norm(dim=1), torch.ones(n, dtype=torch.float64))
    assert 2 * energy == pytest.approx(hyperspherical_energy(points, power=1, reduction="sum").item())


def test_minimize_solves_whyte_problems():
    five = np.array(
        [[0, 0, 1], [0, 0, -1], *[[math.cos(a), math.sin(a), 0] for a in (0, 2.0943951023931953, 4.1887902047863905)]]
    )
    cube_turned = minimize(8, 3, power=0).energy
    for points in (five, reference.icosahedron()):
        assert minimize(len(points), 3, power=0).energy == pytest.approx(reference.log_energy(points), rel=1e-9)
    cube = reference.unit(np.array([[a, b, c] for a in (1, -1) for b in (1, -1) for c in (1, -1)], float))
    assert cube_turned < reference.log_energy(cube)  # the antiprism is better


@pytest.mark.slow
@pytest.mark.parametrize("n", reference.TAMMES)
def test_minimize_solves_tammes_problems(n):
    angle = 2 * math.degrees(math.asin(0.5 / minimize(n, 3, power=math.inf, restarts=12, iterations=200).energy))
    assert angle == pytest.approx(reference.TAMMES[n], abs=1e-6)


def test_minimize_with_large_powers_approaches_tammes():
    energy = minimize(7, 3, power=200).energy
    assert energy ** (1 / 200) == pytest.approx(0.5 / math.sin(math.radians(reference.TAMMES[7] / 2)), rel=0.02)


def test_minimize_with_huge_powers_chooses_the_best_start_though_all_energies_vanish():
    points, energy = minimize(7, 3, power=1e308, restarts=12)
    assert energy == 0  # all distances are above 1
    largest_cosine = (points @ points.T).fill_diagonal_(-1).max().item()
    assert math.degrees(math.acos(largest_cosine)) == pytest.approx(reference.TAMMES[7], abs=0.1)


@pytest.mark.parametrize("power", [0, 1, 2, 30, math.inf])
def test_minimize_gives_simplex_and_polygon(power):
    for n, d in ((2, 1), (3, 2), (4, 3), (5, 9)):
        points = minimize(n, d, power=power).points
        off = (points @ points.T)[~torch.eye(n, dtype=torch.bool)]
        torch.testing.assert_close(off, torch.full_like(off, -1 / (n - 1)))
    if power != math.inf:
        polygon = minimize(7, 2, power=power, restarts=4).points
        assert (polygon @ polygon.T).fill_diagonal_(-1).max().item() == pytest.approx(
            math.cos(2 * math.pi / 7), abs=1e-5
        )


def test_minimize_in_half_space():
    points, energy = minimize(6, 3, half_space=True)  # the six axes of the icosahedron
    assert energy == pytest.approx(reference.THOMSON[12], rel=1e-9)
    ordered_pairs = hyperspherical_energy(points, power=1, half_space=True, reduction="sum").item()
    assert 2 * energy == pytest.approx(ordered_pairs)
    basis = minimize(4, 5, half_space=True, power=2)
    torch.testing.assert_close(basis.points @ basis.points.T, torch.eye(4, dtype=torch.float64))
    assert minimize(1, 3, half_space=True, power=2).energy == pytest.approx(0.25)


def test_minimize_is_reproducible_with_a_generator():
    first, second = (minimize(7, 4, restarts=2, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first.points, second.points)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 1}, "n must be at least 2"),
        ({"d": 1}, "d must be at least 2"),
        ({"power": -1}, "power must be a number >= 0 or math.inf"),
        ({"power": torch.ones(2)}, "power must be a number >= 0 or math.inf"),
        ({"power": 10**400}, "power must be a number >= 0 or math.inf"),
        ({"restarts": 0}, "restarts must be None or an integer >= 1"),
    ],
)
def test_minimize_rejects_bad_input(arguments, words):
    with pytest.raises(ValueError, match=words):
        minimize(**({"n": 5, "d": 3} | arguments))


def test_minimize_descends_at_large_powers_with_few_iterations():
    start, descended = (
        minimize(20, 3, power=power, iterations=9, restarts=2, generator=torch.Generator().manual_seed(0))
        for power in (64.0, 128.0)
    )
    # The stage of power 128 moves the points, so the smallest distance is not that of the stage before.
    smallest = [torch.pdist(one.points).min() for one in (start, descended)]
    assert smallest[1] > smallest[0]
