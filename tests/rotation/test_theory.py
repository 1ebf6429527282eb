"""Claims of the sources about training by rotation, checked numerically."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import oracle
from hypersphere.functions.orthogonal import Cayley, Exponential, GramSchmidt, Householder, Lowdin
from hypersphere.functions.transform import TRANSFORMS
from hypersphere.optim import OGD
from hypersphere.rotation import Stochastic, degrees_of_freedom, rotate_, rotation_parameters, rotation_states

from . import reference


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def random_orthogonal(d, seed=0):
    q, _ = torch.linalg.qr(gaussian(d, d, seed=seed))
    return q


@pytest.mark.parametrize("power", [0.5, 1, 2, 3])
@pytest.mark.parametrize("method", [GramSchmidt(), Householder(), Lowdin(), Cayley(), Exponential()], ids=repr)
def test_one_rotation_of_all_neurons_keeps_the_energy(method, power):
    """OPT, equation 2."""
    rows = gaussian(12, 7)
    free = method.identity(7).double()
    rotated = method(free + 0.7 * gaussian(*free.shape, seed=1), rows)
    assert (rotated - rows).abs().max() > 0.1
    assert oracle.energy(rotated.numpy(), power) == pytest.approx(oracle.energy(rows.numpy(), power), rel=1e-12)


@pytest.mark.parametrize("p", [2, 3, 5, 7])
def test_rotating_any_p_dimensions_keeps_the_energy(p):
    """OPT, theorem 2: for every choice of p dimensions."""
    rows, r = gaussian(10, 7), random_orthogonal(p, seed=p)
    start = oracle.energy(rows.numpy(), 2)
    for dimensions in itertools.combinations(range(7), p):
        rotated = rows.clone()
        rotated[:, dimensions] = rows[:, dimensions] @ r.mT
        assert oracle.energy(rotated.numpy(), 2) == pytest.approx(start, rel=1e-12)


def test_stochastic_training_keeps_the_energy_over_many_folds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    start = oracle.energy(model[0].weight.detach().numpy(), 2)
    stochastic = Stochastic(model, 4, every=2, whole_first=False)
    optimizer = torch.optim.SGD(rotation_parameters(model), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        model(gaussian(8, 9)).square().sum().backward()
        optimizer.step()
        stochastic.step(optimizer)
    assert oracle.energy(model[0].weight.detach().numpy(), 2) == pytest.approx(start, rel=1e-12)


def test_lowdin_gives_the_nearest_orthogonal_matrix():
    """Among orthogonal matrices, in the sum of squared distances of columns (thesis, F.1.3)."""
    p = gaussian(6, 6)
    nearest = Lowdin()(p)
    distance = (nearest - p).norm()
    for seed in range(200):
        assert (random_orthogonal(6, seed) - p).norm() >= distance
    for seed in range(200):  # and along every direction from it
        nearby = nearest @ Exponential()(1e-2 * gaussian(15, seed=seed))
        assert (nearby - p).norm() > distance
    assert (GramSchmidt()(p) - p).norm() > distance
    w, _, vh = np.linalg.svd(p.numpy())
    np.testing.assert_allclose(nearest.numpy(), w @ vh, atol=1e-12)


@pytest.mark.parametrize("d", [2, 3, 4, 5])
def test_cayley_reaches_rotations_without_reflection_only(d):
    """det R = +1 always, and every R without the eigenvalue −1 is reached by S = (R − I)(R + I)⁻¹."""
    for seed, size in itertools.product(range(10), (0.1, 1.0, 100.0)):
        r = Cayley()(size * gaussian(d * (d - 1) // 2, seed=seed))
        assert torch.linalg.det(r).item() == pytest.approx(1, abs=1e-9)
        target = Exponential()(0.5 * gaussian(d * (d - 1) // 2, seed=seed))
        eye = torch.eye(d, dtype=torch.float64)
        s = (target - eye) @ torch.linalg.inv(target + eye)
        torch.testing.assert_close(s, -s.mT, atol=1e-9, rtol=0)
        torch.testing.assert_close((eye + s) @ torch.linalg.inv(eye - s), target, atol=1e-9, rtol=0)
    reflection = torch.eye(d, dtype=torch.float64)
    reflection[0, 0] = -1
    assert torch.linalg.det(GramSchmidt()(reflection)).item() == pytest.approx(-1)  # other maps do reach reflections


def test_two_fixed_point_iterations_of_ogd_are_enough():
    """The error of the Cayley curve after two iterations is of fourth order in the length of the step."""
    u0, grad = random_orthogonal(8), gaussian(8, 8, seed=1)
    omega = -0.5 * (u0.mT @ grad - grad.mT @ u0)
    eye = torch.eye(8, dtype=torch.float64)
    lengths, errors, departures = (0.05, 0.1, 0.2, 0.4), [], []
    for length in lengths:
        rate = length / torch.linalg.matrix_norm(omega).item()
        exact = u0 @ (eye + rate / 2 * omega) @ torch.linalg.inv(eye - rate / 2 * omega)
        u = nn.Parameter(u0.clone())
        u.grad = grad.clone()
        OGD([u], lr=rate, momentum=0.0, restore_every=None).step()
        errors.append((u.detach() - exact).norm().item())
        departures.append((u.detach().mT @ u.detach() - eye).abs().max().item())
    orders = np.diff(np.log(errors)) / np.diff(np.log(lengths))
    assert orders == pytest.approx(4, abs=0.1)
    assert all(error < length**4 / 16 for error, length in zip(departures, lengths, strict=True))
    assert errors[1] < 1e-5


@pytest.mark.parametrize("d", [2, 5, 12])
def test_classical_modified_and_iterative_gram_schmidt_agree_in_exact_arithmetic(d):
    """For well-conditioned matrices in float64, all forms agree up to rounding."""
    p = torch.eye(d, dtype=torch.float64) + 0.3 * gaussian(d, d) / d**0.5
    expected = reference.gram_schmidt(p.numpy())
    for form in ("classical", "modified", "iterative"):
        np.testing.assert_allclose(GramSchmidt(form)(p).numpy(), expected, atol=1e-13)


def test_iterated_gram_schmidt_helps_in_low_precision_only():
    """One step leaves an error that grows with the condition of P, a second one removes it."""
    p = (random_orthogonal(32) * torch.logspace(0, -2, 32, dtype=torch.float64)) @ random_orthogonal(32, seed=1)

    def error(x, steps):
        q = x
        for _ in range(steps):
            lower = torch.linalg.cholesky(q.mT @ q)
            q = torch.linalg.solve_triangular(lower.mT, q, upper=True, left=False)
        return (q.double().mT @ q.double() - torch.eye(32, dtype=torch.float64)).abs().max().item()

    assert error(p.float(), 1) > 30 * error(p.float(), 2)
    assert error(p.float(), 3) == pytest.approx(error(p.float(), 2), rel=2)
    q = GramSchmidt("iterative")(p.float()).double()
    assert (q.mT @ q - torch.eye(32, dtype=torch.float64)).abs().max() < 1e-5
    assert error(p, 1) < 1e-11  # in double precision one step is enough


def test_no_rotation_changes_the_norms_of_neurons():
    """A neuron of norm 1000 among neurons of norm 0.01 dominates the output, whatever the rotation."""
    rows = nn.functional.normalize(gaussian(8, 8))
    energy = oracle.energy(rows.numpy(), 2)
    norms = torch.tensor([1000.0] + [0.01] * 7, dtype=torch.float64)
    layer = nn.Linear(8, 8, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(norms[:, None] * rows)
    rotate_(layer, "cayley", spread=1.0)
    assert oracle.energy(layer.weight.detach().numpy(), 2) == pytest.approx(energy, rel=1e-12)
    torch.testing.assert_close(layer.weight.detach().norm(dim=1), norms)
    share = layer(gaussian(100, 8)).square().mean(0)
    assert share[0] / share.sum() > 1 - 1e-6
    rotate_(plain := nn.Linear(8, 8, bias=False).double(), "cayley", normalize=True)
    torch.testing.assert_close(plain.weight.detach().norm(dim=1), torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize("method", ["gram_schmidt", "householder", "lowdin", "cayley", "exponential"])
@pytest.mark.parametrize(("n", "d"), [(3, 4), (6, 5)])
def test_a_rotated_layer_has_d_times_d_minus_one_over_two_degrees_of_freedom(method, n, d):
    """The count of `degrees_of_freedom` is the rank of the map from parameters to R, not the number of parameters."""
    torch.manual_seed(0)
    layer = rotate_(nn.Linear(d, n, bias=False).double(), method)
    rotation = layer.parametrizations.weight[0]
    free = rotation.parameter.detach() + 0.2 * torch.randn_like(rotation.parameter)
    jacobian = torch.func.jacrev(rotation.method)(free).reshape(d * d, -1)
    assert torch.linalg.matrix_rank(jacobian, rtol=1e-9) == d * (d - 1) // 2 == degrees_of_freedom(layer)
    assert degrees_of_freedom(nn.Linear(d, n, bias=False)) == n * d


@pytest.mark.parametrize("name", TRANSFORMS)
def test_general_transforms_have_their_structure_and_do_not_keep_the_energy(name):
    """G-OPT (OPT, appendix J)."""
    torch.manual_seed(0)
    layer = rotate_(nn.Linear(6, 9, bias=False).double(), name, spread=0.5)
    rotation = layer.parametrizations.weight[0]
    r = rotation.matrices()
    if name == "positive_definite":
        torch.testing.assert_close(r, r.mT)
        assert torch.linalg.eigvalsh(r).min() > 0
    elif name == "triangular":
        assert torch.equal(r, r.tril())
    else:
        assert torch.equal(r, r.triu(-1).tril(1))
    assert rotation_states(layer)["weight"].energy_drift > 1e-3
    jacobian = torch.func.jacrev(rotation.method)(rotation.parameter.detach()).reshape(36, 36)
    assert torch.linalg.matrix_rank(jacobian) == rotation.method.degrees_of_freedom(6)
