"""Energies of one set of rows: values, gradients, close pairs, blocks, random directions."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.profiler import ProfilerActivity, profile

import oracle
from hypersphere.energy import (
    MHE,
    data_dependent_energy,
    hyperspherical_energy,
    layer_energies,
    random_batch_energy,
    random_energy,
)
from hypersphere.functions import _pairwise
from hypersphere.functions._pairwise import PairSum, pair_energy
from hypersphere.functions.kernel import PairPotential, kernel_of

from . import reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def neurons(n=7, d=4, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("power", [0, 0.5, 1, 2, 3.3])
@pytest.mark.parametrize("distance", ["euclidean", "angular"])
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_hyperspherical_energy_agrees_with_the_oracle(power, distance, half_space, reduction):
    w = neurons()
    choice = {"distance": distance, "half_space": half_space, "reduction": reduction}
    ours = hyperspherical_energy(w, power=power, **choice)
    assert ours.item() == pytest.approx(oracle.energy(w.numpy(), power, **choice), rel=1e-10)


@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("power", [0, 1, 2])
def test_hyperspherical_energy_weighted_agrees_with_the_oracle(half_space, power):
    w, weights = neurons(), torch.linspace(0.5, 2, 7, dtype=torch.float64)
    ours = hyperspherical_energy(w, power=power, half_space=half_space, weights=weights)
    assert ours.item() == pytest.approx(oracle.energy(w.numpy(), power, "euclidean", half_space, weights), rel=1e-10)


@pytest.mark.parametrize("distance", ["euclidean", "angular"])
@pytest.mark.parametrize("half_space", [False, True])
def test_hyperspherical_energy_is_twice_differentiable(distance, half_space):
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
def test_hyperspherical_energy_of_coincident_antipodal_zero_and_huge_vectors_is_finite(
    dtype, distance, half_space, power
):
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


def test_hyperspherical_energy_does_not_change_under_rotation_or_scale():
    w = neurons(20, 6)
    q = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    scale = torch.rand(20, 1, dtype=torch.float64) + 0.1
    for half_space in (False, True):
        before = hyperspherical_energy(w, half_space=half_space).item()
        assert hyperspherical_energy(scale * w @ q, half_space=half_space).item() == pytest.approx(before, rel=1e-12)


def test_hyperspherical_energy_of_known_minima():
    simplex = torch.eye(4, dtype=torch.float64) - 0.25
    assert hyperspherical_energy(simplex, power=2).item() == pytest.approx(3 / 8)  # chord^2 = 2 - 2(-1/3)
    golden = (1 + 5**0.5) / 2
    corners = [(0, a, b * golden) for a in (1, -1) for b in (1, -1)]
    icosahedron = np.array([np.roll(corner, shift) for corner in corners for shift in range(3)])
    thomson = hyperspherical_energy(torch.from_numpy(icosahedron), power=1, reduction="sum") / 2
    assert thomson.item() == pytest.approx(49.165253058, rel=1e-9)


def test_hyperspherical_energy_flattens_filters_and_accepts_callables():
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
        (
            {"weights": torch.tensor([1, 1, 1e-40])},
            "weights must be numbers for which the energy is finite in torch.fl",
        ),
        ({"weights": torch.ones(3), "distance": "angular"}, "distance must be 'euclidean' when weights"),
    ],
)
def test_hyperspherical_energy_rejects_bad_input(arguments, words):
    arguments = {"w": torch.randn(3, 3)} | arguments
    with pytest.raises(ValueError, match=words):
        hyperspherical_energy(arguments.pop("w"), **arguments)


def test_hyperspherical_energy_of_one_vector_in_half_space():
    assert hyperspherical_energy(torch.tensor([[3.0, 4.0]]), power=2, half_space=True).item() == pytest.approx(0.25)


@pytest.mark.parametrize("pairs_in_cache", [400, 440, 24])  # a square number, and two others
def test_hyperspherical_energy_blocked_equals_dense(monkeypatch, pairs_in_cache):
    w, weights = neurons(90, 5).requires_grad_(), torch.linspace(0.5, 2, 90, dtype=torch.float64)
    for choice in (
        {"power": 2},
        {"power": 0, "half_space": True},
        {"power": 1.5, "distance": "angular", "half_space": True},
        {"power": 1, "weights": weights},
        {"power": lambda z: z**-3},
    ):
        dense = hyperspherical_energy(w, **choice)
        (gradient,) = torch.autograd.grad(dense, w)
        with monkeypatch.context() as small:
            small.setattr(_pairwise, "_DENSE_PAIRS", 100)
            small.setattr(_pairwise, "_PAIRS_IN_CACHE", pairs_in_cache)
            blocked = hyperspherical_energy(w, **choice)
            torch.testing.assert_close(blocked, dense, rtol=1e-12, atol=0)
            torch.testing.assert_close(torch.autograd.grad(blocked, w)[0], gradient, rtol=1e-9, atol=1e-14)


def test_pair_energy_of_split_stacks_equals_dense(monkeypatch):
    w = torch.randn(5, 2, 20, 4, dtype=torch.float64, requires_grad=True)
    potential = PairPotential(half_space=True)
    dense = pair_energy(PairSum(w, potential, mean=True))
    monkeypatch.setattr(_pairwise, "_DENSE_PAIRS", 800)
    chunked = pair_energy(PairSum(w, potential, mean=True))
    torch.testing.assert_close(chunked, dense)
    first, second = (torch.autograd.grad(e.square().sum(), w)[0] for e in (dense, chunked))
    torch.testing.assert_close(first, second)
    assert dense[3, 1].item() == pytest.approx(oracle.energy(w[3, 1].detach().numpy(), 2, half_space=True))


def test_hyperspherical_energy_memory_does_not_grow_with_pairs():
    n = 9_000  # a matrix of pairs would be 324 MB, and several are needed
    w = torch.randn(n, 2, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        hyperspherical_energy(w, power=2).backward()
    assert torch.isfinite(w.grad).all()
    level = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    block = 2**20 * 8  # bytes of the pairs that are computed at a time; close pairs are in float64
    assert block <= peak < 10 * block


def test_hyperspherical_energy_is_differentiable_in_the_weights():
    w, weights = neurons(5, 3).requires_grad_(), torch.linspace(0.5, 2, 5, dtype=torch.float64).requires_grad_()
    for half_space in (False, True):
        assert gradcheck(
            lambda w, b, half=half_space: hyperspherical_energy(w, weights=b, half_space=half), (w, weights)
        )


@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("betas", [None, torch.linspace(0.5, 2, 6, dtype=torch.float64)])
def test_pair_energy_of_samples_is_unbiased(half_space, betas):
    w = neurons(6, 3)
    all_rows = hyperspherical_energy(w, half_space=half_space, weights=betas).item()
    subsets = [torch.tensor(s) for s in itertools.combinations(range(6), 3)]
    potential = PairPotential(half_space=half_space)
    sampled = [
        PairSum(w[s], potential, None if betas is None else betas[s], sampled_from=6, mean=True) for s in subsets
    ]
    assert np.mean([pair_energy(one).item() for one in sampled]) == pytest.approx(all_rows, rel=1e-12)


@pytest.mark.parametrize("half_space", [False, True])
def test_random_batch_energy_is_unbiased(half_space):
    w = neurons(6, 3)
    all_rows = hyperspherical_energy(w, half_space=half_space).item()
    generator = torch.Generator().manual_seed(0)
    drawn = [random_batch_energy(w, 3, half_space=half_space, generator=generator).item() for _ in range(400)]
    assert np.mean(drawn) == pytest.approx(all_rows, abs=4 * np.std(drawn) / 20)


def test_data_dependent_energy_agrees_with_the_reference_and_is_unbiased():
    w = neurons(7, 4)
    for distance, power in itertools.product(("euclidean", "angular"), (0, 1, 2, 3.3)):
        labels = torch.tensor([0, 3, 3, 6])
        ours = data_dependent_energy(w, labels, power=power, distance=distance)
        assert ours.item() == pytest.approx(reference.data_dependent(w.numpy(), labels.tolist(), power, distance))
        each = [data_dependent_energy(w, torch.tensor([y]), power=power, distance=distance).item() for y in range(7)]
        assert np.mean(each) == pytest.approx(hyperspherical_energy(w, power=power, distance=distance).item())


def test_data_dependent_energy_differentiates_twice_and_in_blocks(monkeypatch):
    w, labels = neurons(9, 3).requires_grad_(), torch.tensor([1, 1, 8])
    monkeypatch.setattr(_pairwise, "_PAIRS_IN_CACHE", 8)
    for power in (0, 2):
        assert gradcheck(lambda w, p=power: data_dependent_energy(w, labels, power=p), (w,))
        assert gradgradcheck(lambda w, p=power: data_dependent_energy(w, labels, power=p), (w,))


@pytest.mark.slow
def test_data_dependent_energy_counts_the_same_rows_eager_and_compiled():
    w = neurons(7, 4).requires_grad_()
    compiled = torch.compile(data_dependent_energy, backend="aot_eager", fullgraph=True, dynamic=False)
    labels = torch.tensor([0, 3, 3, 6, 0])
    for flags in ([1, 0, 1, 1, 0], [1] * 5, [0] * 5):
        counted = torch.tensor(flags, dtype=torch.bool)
        counted_labels = labels[counted].tolist()
        expected = (
            reference.data_dependent(w.detach().numpy(), counted_labels, 2, "euclidean") if counted_labels else 0.0
        )
        (expected_gradient,) = torch.autograd.grad(data_dependent_energy(w, labels[counted]), w)
        for form in (data_dependent_energy, compiled):
            value = form(w, labels, counted=counted)
            assert value.item() == pytest.approx(expected)
            torch.testing.assert_close(torch.autograd.grad(value, w)[0], expected_gradient)
    assert gradgradcheck(lambda w: data_dependent_energy(w, labels, counted=labels > 0), (w,))
    with torch.no_grad():
        assert data_dependent_energy(w, labels, counted=labels < 0).item() == 0
    with pytest.raises(ValueError, match="counted must be booleans of shape"):
        data_dependent_energy(w, labels, counted=torch.ones(5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_data_dependent_energy_at_the_edges(dtype):
    w = torch.zeros(4, 3, dtype=dtype)
    w[0] = w[1] = 1
    w[2, 0] = 4e4 if dtype == torch.float16 else 1e20
    w.requires_grad_()
    value = data_dependent_energy(w, torch.tensor([0, 2, 3]))
    value.backward()
    assert value.dtype == dtype
    assert torch.isfinite(value)
    assert torch.isfinite(w.grad).all()
    assert not w.grad[3].any()
    assert data_dependent_energy(w, torch.zeros(0, dtype=torch.long)).item() == 0


@pytest.mark.parametrize(
    ("w", "labels", "words"),
    [
        (torch.randn(1, 3), torch.tensor([0]), "w must be a floating-point matrix"),
        (torch.randn(3, 3), torch.tensor([3]), r"labels must be integers in \[0, 3\)"),
        (torch.randn(3, 3), torch.tensor([0.5]), "labels must be a tensor of integers"),
    ],
)
def test_data_dependent_energy_names_bad_input(w, labels, words):
    with pytest.raises(ValueError, match=words):
        data_dependent_energy(w, labels)


def test_hyperspherical_energy_compiled_transformed_and_in_autocast():
    w = torch.randn(6, 4, requires_grad=True)
    eager = hyperspherical_energy(w, half_space=True)
    compiled = torch.compile(hyperspherical_energy, backend="aot_eager", fullgraph=True)(w, half_space=True)
    torch.testing.assert_close(compiled, eager)
    (slope,) = torch.autograd.grad(eager, w)
    torch.testing.assert_close(torch.autograd.grad(compiled, w)[0], slope)
    torch.testing.assert_close(torch.func.grad(lambda w: hyperspherical_energy(w, half_space=True))(w.detach()), slope)
    with torch.autocast("cpu", torch.bfloat16):
        assert hyperspherical_energy(w, half_space=True).item() == pytest.approx(eager.item(), rel=1e-6)
    assert hyperspherical_energy(torch.empty(5, 3, device="meta")).is_meta
    with torch.inference_mode():
        assert hyperspherical_energy(w, half_space=True).item() == pytest.approx(eager.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("power", [7, 13, 20, 50, 200])
@pytest.mark.parametrize("apart", [0.0, 1e-3, 2e-3, 0.1])
@pytest.mark.parametrize("distance", ["euclidean", "angular"])
def test_hyperspherical_energy_with_high_powers_is_finite(dtype, power, apart, distance):
    w = torch.tensor([[1.0, 0.0], [1.0, apart], [0.0, 1.0]], dtype=dtype, requires_grad=True)
    value = hyperspherical_energy(w, power=power, distance=distance)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(w.grad).all()


def test_hyperspherical_energy_in_half_precision_keeps_its_gradient_if_the_value_saturates():
    w = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    half, wide = (w.to(t).requires_grad_() for t in (torch.float16, torch.float32))
    hyperspherical_energy(half, reduction="sum").backward()
    hyperspherical_energy(wide, reduction="sum").backward()
    torch.testing.assert_close(half.grad.float(), wide.grad, rtol=0.02, atol=0.02)


def test_hyperspherical_energy_of_equal_rows_is_that_of_the_documented_distance():
    def distance(power):
        return hyperspherical_energy(torch.ones(2, 4), power=power).item() ** (-1 / power)

    for power in (1, 2, 3.6):
        assert distance(power) == pytest.approx(4.2147e-8, rel=1e-4)
    assert distance(3.7) > 5e-8  # in float32 the distance is raised for powers above 3.6


def test_hyperspherical_energy_with_a_callable_kernel_has_a_floor():
    for distance in ("euclidean", "angular"):
        value = hyperspherical_energy(torch.ones(3, 4), power=lambda z: z**-1, distance=distance)
        assert 1e6 < value.item() < 1e8  # a callable is assumed to grow like the power 4


@pytest.mark.parametrize("bad", [-1.0, 0.0, float("nan"), float("inf")])
def test_hyperspherical_energy_rejects_weights_that_are_not_positive(bad):
    with pytest.raises(ValueError, match="weights must be positive and finite"):
        hyperspherical_energy(torch.randn(3, 4), weights=torch.tensor([1.0, bad, 1.0]))


@pytest.mark.parametrize("power", [0, 1, 2, 3])
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e5, 1e18])
def test_hyperspherical_energy_weighted_handles_any_scale(power, scale):
    generator = torch.Generator().manual_seed(0)
    w, beta = torch.randn(6, 4, generator=generator), torch.rand(6, generator=generator) + 0.5
    w.requires_grad_()
    one = hyperspherical_energy(w, power=power, weights=beta)
    (slope,) = torch.autograd.grad(one, w)
    scaled = hyperspherical_energy(w, power=power, weights=beta * scale)
    (scaled_slope,) = torch.autograd.grad(scaled, w)
    if power == 0:
        assert scaled.item() == pytest.approx(one.item() - math.log(scale), rel=1e-4)
        torch.testing.assert_close(scaled_slope, slope)
    elif scale < 1e15 or power == 1:
        assert scaled.item() == pytest.approx(one.item() * scale**-power, rel=1e-4)
        torch.testing.assert_close(scaled_slope * scale**power, slope, rtol=1e-3, atol=1e-5)
    assert torch.isfinite(scaled_slope).all()


@pytest.mark.parametrize("length", [1e-30, 1e30])
def test_hyperspherical_energy_of_close_rows_of_extreme_length_has_finite_gradients(length):
    w = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    w = w / w.norm(dim=1, keepdim=True)
    w[1] = w[0] + torch.tensor([2e-3, 0, 0])
    w = (w * length).requires_grad_()
    hyperspherical_energy(w).backward()
    assert torch.isfinite(w.grad).all()


def test_hyperspherical_energy_backward_inside_autocast_is_exact():
    generator = torch.Generator().manual_seed(0)
    w, labels = torch.randn(20, 6, generator=generator, requires_grad=True), torch.tensor([1, 2])
    for energy in (hyperspherical_energy, lambda w: data_dependent_energy(w, labels)):
        (expected,) = torch.autograd.grad(energy(w), w)
        with torch.autocast("cpu", torch.bfloat16):
            (ours,) = torch.autograd.grad(energy(w), w)
            (plain,) = torch.autograd.grad(energy(w), w, create_graph=True)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(plain, expected, rtol=1e-4, atol=1e-7)


def exact_energy(w, half_space):
    """Return the energy of float64 rows from differences, without cosines."""
    x = w / w.norm(dim=1, keepdim=True)
    off_diagonal = ~torch.eye(len(x), dtype=torch.bool)
    energy = (x[:, None] - x[None]).square().sum(-1)[off_diagonal].reciprocal().sum()
    if half_space:
        energy = 2 * (energy + (x[:, None] + x[None]).square().sum(-1)[off_diagonal].reciprocal().sum() + len(x) / 4)
    return energy


def with_near_duplicate(d, chord, sign=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    w, direction = torch.randn(12, d, generator=generator), torch.randn(d, generator=generator)
    w[1] = sign * 1.7 * w[0]
    w[1] += direction / direction.norm() * chord * w[1].norm()
    return w


@pytest.mark.parametrize("chord", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("d", [3, 27, 1152])
@pytest.mark.parametrize("half_space", [False, True])
def test_hyperspherical_energy_near_duplicates_are_accurate_and_push_each_other_apart(chord, d, half_space):
    w = with_near_duplicate(d, chord, sign=-1.0 if half_space else 1.0).requires_grad_()
    exact = w.detach().double().requires_grad_()
    energy, expected = hyperspherical_energy(w, half_space=half_space, reduction="sum"), exact_energy(exact, half_space)
    assert energy.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,), (expected_gradient,) = torch.autograd.grad(energy, w), torch.autograd.grad(expected, exact)
    torch.testing.assert_close(
        gradient.double(), expected_gradient, rtol=1e-3, atol=1e-5 * expected_gradient.abs().max()
    )
    # A descent step moves the two rows apart (or, in half space, away from opposite directions).
    difference = w[1] / w[1].norm() - (-1.0 if half_space else 1.0) * w[0] / w[0].norm()
    assert (gradient[1] @ difference).item() < 0


@pytest.mark.parametrize("chord", [1e-2, 1e-4, 1e-6])
def test_hyperspherical_energy_near_duplicates_are_accurate_in_compiled_transformed_and_blocked_code(
    chord, monkeypatch
):
    w = with_near_duplicate(64, chord)
    exact = w.double().requires_grad_()
    expected = exact_energy(exact, True)
    (expected_gradient,) = torch.autograd.grad(expected, exact)

    def energy(w):
        return hyperspherical_energy(w, half_space=True, reduction="sum")

    value, gradient = torch.func.grad_and_value(energy)(w)[::-1]
    assert value.item() == pytest.approx(expected.item(), rel=1e-3)
    torch.testing.assert_close(
        gradient.double(), expected_gradient, rtol=2e-3, atol=1e-3 * expected_gradient.abs().max()
    )
    monkeypatch.setattr(_pairwise, "_DENSE_PAIRS", 16)
    monkeypatch.setattr(_pairwise, "_PAIRS_IN_CACHE", 16)
    leaf = w.clone().requires_grad_()
    blocked = energy(leaf)
    assert blocked.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(blocked, leaf)
    torch.testing.assert_close(
        gradient.double(), expected_gradient, rtol=1e-3, atol=1e-5 * expected_gradient.abs().max()
    )


@pytest.mark.parametrize("distance", ["euclidean", "angular"])
@pytest.mark.parametrize(("n", "d"), [(600, 2), (1500, 3), (500, 8)])
def test_hyperspherical_energy_in_float32_is_accurate_for_many_neurons_in_few_dimensions(n, d, distance):
    w = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    leaf, exact = w.clone().requires_grad_(), w.double().requires_grad_()
    for half_space in (False, True):
        value, expected = (hyperspherical_energy(x, distance=distance, half_space=half_space) for x in (leaf, exact))
        assert value.item() == pytest.approx(expected.item(), rel=1e-5)
        gradient, expected_gradient = torch.autograd.grad(value, leaf)[0], torch.autograd.grad(expected, exact)[0]
        error = (gradient - expected_gradient).norm() / expected_gradient.norm()
        assert error < 1e-4


def test_data_dependent_energy_of_near_duplicates_is_accurate():
    w = with_near_duplicate(32, 1e-5).requires_grad_()
    value = data_dependent_energy(w, torch.tensor([0, 3]))
    expected = reference.data_dependent(w.detach().double().numpy(), [0, 3], 2)
    assert value.item() == pytest.approx(expected, rel=1e-4)
    value.backward()
    assert torch.isfinite(w.grad).all()
    assert (w.grad[0] @ (w[0] / 1.0 - w[1] / 1.7)).item() < 0  # a descent step increases the difference


def test_data_dependent_energy_ignores_labels_and_accepts_any_shape():
    w = neurons(6, 4)
    labels = torch.tensor([[0, 2, -100], [5, -100, 2]])
    expected = reference.data_dependent(w.numpy(), [0, 2, 5, 2], 2)
    assert data_dependent_energy(w, labels).item() == pytest.approx(expected)
    assert data_dependent_energy(w, torch.full((2, 2), -100)).item() == 0


@pytest.mark.parametrize("power", [0, 1, 2])
@pytest.mark.parametrize("distance", ["euclidean", "angular"])
def test_hyperspherical_energy_min_distance_bounds_the_gradient_and_continues_linearly(power, distance):
    def energy(chord, min_distance):
        angle = torch.tensor(2 * math.asin(chord / 2), dtype=torch.float64, requires_grad=True)
        w = torch.stack([torch.stack([angle.cos(), angle.sin()]), angle.new_tensor([1.0, 0.0])])
        value = hyperspherical_energy(w, power=power, distance=distance, min_distance=min_distance)
        return value.item(), torch.autograd.grad(value, angle)[0].item()

    for chord in (0.2, 0.5):
        assert energy(chord, 0.1) == pytest.approx(energy(chord, None))
    limit = energy(0.1000001, None)[1]
    for chord in (1e-2, 1e-4, 1e-6):
        value, slope = energy(chord, 0.1)
        assert math.isfinite(value)
        assert slope == pytest.approx(limit, rel=1e-2)
    for value in (0.0, -1.0, 4.0, 1e300, math.nan):
        with pytest.raises(ValueError, match="min_distance must be a positive number up to pi, the largest distance"):
            energy(0.5, value)
    assert energy(0.5, 1e-300) == pytest.approx(energy(0.5, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [8, 64, 500, 10_000])
def test_hyperspherical_energy_min_distance_keeps_steep_kernels_finite(power, dtype):
    w = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w[1] = w[0] + 1e-5
    leaf = w.to(dtype).requires_grad_()
    for min_distance in (1e-300, 1e-6, 0.1):
        value = hyperspherical_energy(leaf, power=power, min_distance=min_distance, half_space=True)
        (gradient,) = torch.autograd.grad(value, leaf)
        assert torch.isfinite(value)
        assert torch.isfinite(gradient).all()


def test_hyperspherical_energy_of_tiny_powers_is_that_of_the_constant_kernel():
    w = torch.randn(4, 3, requires_grad=True)
    for power in (1e-30, 5e-324):
        value = hyperspherical_energy(w, power=power)
        assert value.item() == 1
        assert torch.isfinite(torch.autograd.grad(value, w)[0]).all()


@pytest.mark.parametrize("power", [1e300, 10_001, 10**400, math.inf, math.nan, -1, True])
def test_hyperspherical_energy_rejects_powers_whose_energies_cannot_be_represented(power):
    words = "power must be a number >= 0 and at most 10000, a kernel or a callable of the distance, not"
    for call in (
        lambda: hyperspherical_energy(torch.eye(3), power=power),
        lambda: random_energy(5, 3, power),
        lambda: MHE({"w": torch.eye(3)}, power=power),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_hyperspherical_energy_of_identical_rows_is_finite_and_no_gradient():
    w = torch.ones(300, 2000, requires_grad=True)
    value = hyperspherical_energy(w, half_space=True)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(w.grad).all()


@pytest.mark.parametrize("shape", [(8, 100), (100, 8)])
def test_pair_energy_keeps_the_smaller_of_gradient_and_factors(shape):
    w, saved = torch.randn(shape, requires_grad=True), {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.update({t.data_ptr(): t.numel()}) or t, lambda t: t):
        hyperspherical_energy(w)
    saved.pop(w.data_ptr(), None)
    assert sum(saved.values()) <= shape[0] * min(shape) + shape[0]


@pytest.mark.parametrize("half_space", [False, True])
def test_energies_in_forward_mode_equal_the_directional_derivative(half_space):
    w, direction, labels = neurons(6, 4), neurons(6, 4, seed=1), torch.tensor([0, 2, 2])
    for energy in (
        lambda w: hyperspherical_energy(w, half_space=half_space),
        lambda w: data_dependent_energy(w, labels),
    ):
        leaf = w.clone().requires_grad_()
        expected = (torch.autograd.grad(energy(leaf), leaf)[0] * direction).sum()
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(energy(forward_ad.make_dual(w, direction))).tangent
        torch.testing.assert_close(tangent, expected)


def test_layer_energies_sample_large_layers():
    body = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3, groups=2), torch.nn.Linear(3, 1))
    rows = torch.randn(5000, 16)
    found = layer_energies(body, rows)
    assert list(found) == ["0", "head"]
    halves = [hyperspherical_energy(part, half_space=True) for part in body[0].weight.flatten(1).split(3)]
    assert found["0"] == pytest.approx(sum(halves).item() / 2)
    assert found["head"] == pytest.approx(hyperspherical_energy(rows).item(), rel=0.02)


@pytest.mark.parametrize("energy", [hyperspherical_energy, lambda w: data_dependent_energy(w, torch.tensor([0]))])
def test_energy_gradients_of_float16_parameters_saturate(energy):
    w = torch.tensor([[1e-3, 0, 0], [1e-3, 4e-6, 0], [0, 0, 1e-3]], dtype=torch.float16, requires_grad=True)
    energy(w).backward()
    assert torch.isfinite(w.grad).all()
    assert w.grad.abs().max() == torch.finfo(torch.float16).max


# The energy of random directions


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
