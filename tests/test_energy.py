import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import oracle
from hypersphere.energy import hyperspherical_energy

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def neurons(n=7, d=4, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("power", [0, 0.5, 1, 2, 3.3])
@pytest.mark.parametrize("distance", ["euclidean", "angular"])
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_values_agree_with_the_oracle(power, distance, half_space, reduction):
    w = neurons()
    choice = {"distance": distance, "half_space": half_space, "reduction": reduction}
    ours = hyperspherical_energy(w, power=power, **choice)
    assert ours.item() == pytest.approx(oracle.energy(w.numpy(), power, **choice), rel=1e-10)


@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("power", [0, 1, 2])
def test_weighted_values_agree_with_the_oracle(half_space, power):
    w, weights = neurons(), torch.linspace(0.5, 2, 7, dtype=torch.float64)
    ours = hyperspherical_energy(w, power=power, half_space=half_space, weights=weights)
    assert ours.item() == pytest.approx(oracle.energy(w.numpy(), power, "euclidean", half_space, weights), rel=1e-10)


@pytest.mark.parametrize("distance", ["euclidean", "angular"])
@pytest.mark.parametrize("half_space", [False, True])
def test_derivatives(distance, half_space):
    w = neurons(4, 3).requires_grad_()
    for power in (0, 1, 2):

        def energy(w, power=power):
            return hyperspherical_energy(w, power=power, distance=distance, half_space=half_space)

        assert gradcheck(energy, (w,))
        assert gradgradcheck(energy, (w,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distance", ["euclidean", "angular"])
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("power", [0, 1, 2, 4])
def test_coincident_antipodal_zero_and_huge_vectors_are_finite(dtype, distance, half_space, power):
    w = torch.zeros(6, 3, dtype=dtype)
    w[0] = w[1] = torch.tensor([1.0, 2.0, 3.0])
    w[2] = -w[0]
    w[4] = 4e4 if dtype == torch.float16 else 1e20
    w[5, 0] = 1
    w.requires_grad_()
    value = hyperspherical_energy(w, power=power, distance=distance, half_space=half_space)
    value.backward()
    assert value.dtype == dtype
    assert torch.isfinite(value)
    assert torch.isfinite(w.grad).all()
    assert not w.grad[3].any()


def test_energy_does_not_change_under_rotation_or_scale():
    w = neurons(20, 6)
    q = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    scale = torch.rand(20, 1, dtype=torch.float64) + 0.1
    for half_space in (False, True):
        before = hyperspherical_energy(w, half_space=half_space).item()
        assert hyperspherical_energy(scale * w @ q, half_space=half_space).item() == pytest.approx(before, rel=1e-12)


def test_known_minima():
    simplex = torch.eye(4, dtype=torch.float64) - 0.25
    assert hyperspherical_energy(simplex, power=2).item() == pytest.approx(3 / 8)  # chord^2 = 2 - 2(-1/3)
    golden = (1 + 5**0.5) / 2
    corners = [(0, a, b * golden) for a in (1, -1) for b in (1, -1)]
    icosahedron = np.array([np.roll(corner, shift) for corner in corners for shift in range(3)])
    thomson = hyperspherical_energy(torch.from_numpy(icosahedron), power=1, reduction="sum") / 2
    assert thomson.item() == pytest.approx(49.165253058, rel=1e-9)


def test_filters_are_flattened_and_callables_accepted():
    w = torch.randn(5, 2, 3, 3)
    assert torch.equal(hyperspherical_energy(w), hyperspherical_energy(w.flatten(1)))
    mine = hyperspherical_energy(w, power=lambda z: z**-2)
    torch.testing.assert_close(mine, hyperspherical_energy(w))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"w": torch.randn(1, 3)}, "w must be a matrix with at least two rows"),
        ({"w": torch.randn(3)}, "w must be a floating-point matrix"),
        ({"w": torch.ones(3, 2, dtype=torch.long)}, "w must be a floating-point matrix"),
        ({"w": torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])}, "w must be finite, but row 1"),
        ({"power": -1}, "power must be a number >= 0"),
        ({"power": "cubic"}, "power must be one of 'riesz'"),
        ({"distance": "taxi"}, "distance must be 'euclidean' or 'angular'"),
        ({"reduction": "max"}, "reduction must be 'mean' or 'sum'"),
        ({"weights": torch.ones(2)}, "weights must be a vector of 3"),
        ({"weights": torch.ones(3), "distance": "angular"}, "distance must be 'euclidean' when weights"),
    ],
)
def test_bad_input_names_itself(arguments, words):
    arguments = {"w": torch.randn(3, 3)} | arguments
    with pytest.raises(ValueError, match=words):
        hyperspherical_energy(arguments.pop("w"), **arguments)


def test_one_vector_in_half_space_has_its_antipode():
    assert hyperspherical_energy(torch.tensor([[3.0, 4.0]]), power=2, half_space=True).item() == pytest.approx(0.25)
