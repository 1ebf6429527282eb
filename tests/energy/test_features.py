"""Energies of features: values, gradients, close and zero features, and features of several processes."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import special
from scipy.spatial import distance
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
from hypersphere import kernel
from hypersphere.energy import (
    FEATURE_ENERGIES,
    MHE,
    FeatureEnergy,
    Gaussian,
    alignment,
    hyperspherical_energy,
    koleo,
    random_energy,
    uniformity,
)
from hypersphere.heads import AngularHead, ShardedHead
from processes import run_processes

from . import reference

NAMES = [*FEATURE_ENERGIES, *kernel.KERNELS]
every_energy = pytest.mark.parametrize("name", NAMES)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def chords(x):
    """Return all distances between unit rows, pair by pair from differences."""
    unit = reference.unit(np.asarray(x, dtype=np.float64))
    return np.array([[np.linalg.norm(a - b) for b in unit] for a in unit])


def brute_force(name, x, t=2.0):
    """Return an energy of features from all pairs, in float64."""
    z = chords(x)
    pairs = z[~np.eye(len(z), dtype=bool)]
    if name == "koleo":
        return -np.mean([math.log(min(np.delete(row, i))) for i, row in enumerate(z)])
    if name in ("uniformity", "gaussian"):
        mean = np.mean(np.exp(-t * pairs**2))
        return math.log(mean) if name == "uniformity" else mean
    return oracle.energy(np.asarray(x), 2 if name == "riesz" else 0)


def numerical_gradient(name, x, step):
    gradient = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        sides = []
        for sign in (1, -1):
            moved = x.copy()
            moved[index] += sign * step
            sides.append(brute_force(name, moved))
        gradient[index] = (sides[0] - sides[1]) / (2 * step)
    return gradient


@every_energy
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_feature_energy_equals_the_sum_over_pairs(name, dtype):
    x = 3 * torch.randn(17, 5, dtype=dtype)
    value = FeatureEnergy(name)(x)
    assert value.dtype == dtype
    assert value.item() == pytest.approx(brute_force(name, x), rel=1e-9 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("t", [0.01, 0.5, 2, 16, 17, 100])
def test_uniformity_is_accurate_for_every_t(t):
    x = torch.randn(12, 6)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    value, expected = uniformity(leaf, t=t), uniformity(exact, t=t)
    assert expected.item() == pytest.approx(brute_force("uniformity", x, t), rel=1e-9)
    assert value.item() == pytest.approx(expected.item(), rel=2e-5)
    value.backward()
    expected.backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-5 * exact.grad.abs().max().item())


def test_energies_equal_the_published_code():
    """The functions that the authors print: Wang and Isola (2020), figure 5, and DINOv2's KoLeoLoss."""
    x, y = torch.randn(2, 20, 8, dtype=torch.float64)
    unit_x, unit_y = (nn.functional.normalize(z) for z in (x, y))
    torch.testing.assert_close(alignment(x, y), (unit_x - unit_y).norm(p=2, dim=1).pow(2).mean())
    torch.testing.assert_close(uniformity(x, t=3), torch.pdist(unit_x, p=2).pow(2).mul(-3).exp().mean().log())
    dots = torch.mm(unit_x, unit_x.t())
    dots.view(-1)[:: len(x) + 1].fill_(-1)
    distances = nn.functional.pairwise_distance(unit_x, unit_x[dots.argmax(1)], 2, eps=1e-8)
    torch.testing.assert_close(koleo(x), -torch.log(distances + 1e-8).mean(), rtol=1e-6, atol=0)


def test_gaussian_energy_of_random_directions_is_a_bessel_function():
    """E exp(−t‖x − y‖²) over the sphere of R^d is Γ(d/2)·t^(1−d/2)·I_{d/2−1}(2t)·exp(−2t)."""
    for d, t in ((3, 2.0), (8, 0.5), (50, 6.0)):
        mean, deviation = random_energy(400, d, power=Gaussian(t))
        expected = special.gamma(d / 2) * t ** (1 - d / 2) * special.ive(d / 2 - 1, 2 * t)
        assert mean == pytest.approx(expected, rel=1e-9)
        drawn = FeatureEnergy("gaussian", t=t)(torch.randn(400, d, dtype=torch.float64)).item()
        assert drawn == pytest.approx(mean, abs=4 * deviation)


def test_energies_of_regular_configurations_have_closed_forms():
    icosahedron = torch.tensor(reference.icosahedron())
    edge = 1 / math.sin(2 * math.pi / 5)
    assert koleo(icosahedron).item() == pytest.approx(-math.log(edge))
    simplex = torch.eye(6) - 1 / 6  # all squared chords are 2 + 2/5
    assert uniformity(simplex).item() == pytest.approx(-2 * (2 + 2 / 5), rel=1e-6)
    assert alignment(simplex, -simplex).item() == pytest.approx(4)


@every_energy
def test_feature_energy_passes_gradcheck_and_gradgradcheck(name):
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    energy = FeatureEnergy(name)
    assert gradcheck(energy, (x,))
    assert gradgradcheck(energy, (x,))


def test_alignment_passes_gradcheck_and_gradgradcheck():
    x, y = (torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradcheck(alignment, (x, y))
    assert gradgradcheck(alignment, (x, y))


@every_energy
def test_feature_energy_has_finite_values_and_gradients_in_every_dtype(name):
    for dtype in DTYPES:
        x = torch.randn(9, 5).to(dtype)
        x[0] = 0  # no direction
        x[1] = x[2]  # coincident
        x[3] = -x[4]
        x[5] = 4e4 if dtype == torch.float16 else 1e20
        x.requires_grad_()
        value = FeatureEnergy(name)(x)
        value.backward()
        assert value.dtype == dtype
        assert torch.isfinite(value)
        assert torch.isfinite(x.grad).all()
        assert not x.grad[0].any()
    with torch.autocast("cpu", torch.bfloat16):
        assert FeatureEnergy(name)(x.detach().float()).dtype == torch.float32


def test_zero_features_are_at_right_angles():
    for x in (torch.zeros(3, 4), torch.eye(3, 4).index_fill(0, torch.tensor([1]), 0.0)):
        assert uniformity(x).item() == pytest.approx(-4)
        assert koleo(x).item() == pytest.approx(-math.log(2) / 2)
        assert alignment(torch.zeros(3, 4), x).item() == pytest.approx(2)


@pytest.mark.parametrize("name", ["uniformity", "koleo", "riesz"])
@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
def test_feature_energy_is_accurate_for_near_duplicates_in_float32(name, gap):
    """Two clusters of near-duplicates. Float32 cosines cannot tell which neighbour is the nearest."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.eye(4)[:2].repeat_interleave(4, 0)
    x = centres + gap * torch.randn(8, 4, generator=generator) * torch.tensor([1.0, 1.0, 5.0, 5.0])
    leaf = x.clone().requires_grad_()
    value = FeatureEnergy(name)(leaf)
    value.backward()
    exact = x.double().numpy()  # the features as float32 represents them
    assert value.item() == pytest.approx(brute_force(name, exact), rel=1e-3, abs=1e-6)
    expected = numerical_gradient(name, exact, gap * 1e-4)
    error = np.abs(leaf.grad.double().numpy() - expected).max() / np.abs(expected).max()
    assert error < 2e-3


class LargestResult(TorchDispatchMode):
    """Records the number of entries of the largest tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("name", ["uniformity", "koleo"])
def test_feature_energy_of_a_large_batch_needs_bounded_memory(name):
    n = 2200
    x = torch.randn(n, 8, requires_grad=True)
    with LargestResult() as recorded:
        value = FeatureEnergy(name)(x)
        value.backward()
    assert recorded.largest <= 2**20 < n**2 / 4
    squared = distance.pdist(x.detach().double().numpy() / np.linalg.norm(x.detach(), axis=1)[:, None]) ** 2
    if name == "koleo":
        nearest = (distance.squareform(squared) + 9 * np.eye(n)).min(1)
        assert value.item() == pytest.approx(-0.5 * np.log(nearest).mean(), rel=1e-5)
    else:
        assert value.item() == pytest.approx(np.log(np.exp(-2 * squared).mean()), rel=1e-5)


@every_energy
def test_feature_energy_descends_with_its_gradient(name):
    x = torch.randn(20, 3, requires_grad=True)
    energy = FeatureEnergy(name)
    value = energy(x)
    value.backward()
    with torch.no_grad():
        assert energy(x - 1e-3 * x.grad) < value


def test_feature_energy_accepts_kernels_powers_and_callables():
    x = torch.randn(10, 4)
    for given, power in (("riesz", 2), (1, 1), (0.5, 0.5), ("logarithmic", 0), (kernel.Riesz(3), 3)):
        torch.testing.assert_close(FeatureEnergy(given)(x), hyperspherical_energy(x, power=power))
    torch.testing.assert_close(FeatureEnergy(lambda z: (-2 * z * z).exp())(x), FeatureEnergy("gaussian")(x))
    torch.testing.assert_close(FeatureEnergy("gaussian", t=1)(x), FeatureEnergy(Gaussian(1))(x))
    torch.testing.assert_close(FeatureEnergy("gaussian", t=5)(x).log(), FeatureEnergy("uniformity", t=5)(x))
    assert torch.isfinite(MHE({"w": x}, power=Gaussian())())


@pytest.mark.parametrize("name", ["uniformity", "koleo"])
def test_feature_energy_works_compiled(name):
    x = torch.randn(7, 4)
    x[1] = x[0] + 1e-4
    energy = FeatureEnergy(name)
    compiled = torch.compile(energy, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), energy(x), rtol=1e-5, atol=1e-5)


@every_energy
def test_feature_energy_works_in_functional_transforms(name):
    x, y = torch.randn(2, 7, 4)
    x[1] = x[0] + 1e-3
    energy = FeatureEnergy(name)
    leaf = x.clone().requires_grad_()
    energy(leaf).backward()
    torch.testing.assert_close(torch.func.grad(energy)(x), leaf.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.func.vmap(energy)(torch.stack([x, y])), torch.stack([energy(x), energy(y)]))


def test_feature_energy_is_a_module_without_state():
    energy = FeatureEnergy("uniformity", t=3)
    assert not energy.state_dict()
    assert repr(energy) == "FeatureEnergy('uniformity', t=3)"
    assert repr(FeatureEnergy("koleo", gather=True)) == "FeatureEnergy('koleo', gather=True, backbone='averaged')"
    x = torch.randn(5, 3)
    for twin in (copy.deepcopy(energy), pickle.loads(pickle.dumps(energy))):
        assert torch.equal(twin(x), energy(x))
    assert torch.equal(FeatureEnergy("uniformity", t=3, gather=True)(x), energy(x))  # no process group


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: uniformity(torch.ones(1, 3)), r"features must be a floating-point matrix \(n, d\) with n >= 2, not "),
        (lambda: koleo(torch.ones(0, 3)), "features must be a floating-point matrix .* n >= 2, not .*\\(0, 3\\)"),
        (lambda: alignment(torch.ones(0, 3), torch.ones(0, 3)), "features must be .* n >= 1"),
        (lambda: alignment(torch.ones(2, 3), torch.ones(3, 3)), r"positives must be of shape \(2, 3\)"),
        (lambda: uniformity(torch.ones(2, 3, 4)), r"not 'torch.float32 \(2, 3, 4\)'"),
        (lambda: uniformity(torch.ones(2, 3).long()), "not 'torch.int64"),
        (lambda: koleo([1.0]), "features must be a floating-point matrix .*, not 'list'"),
        (lambda: uniformity(torch.ones(2, 3), t=0), "t must be a positive number up to 100, not 0"),
        (lambda: FeatureEnergy("uniformity", t=101), "t must be a positive number up to 100, not 101"),
        (lambda: FeatureEnergy("koleo", t=2.0), "t must be None unless the energy is 'uniformity' or 'gaussian'"),
        (lambda: FeatureEnergy("unifomity"), "energy must be one of 'uniformity', .*; did you mean uniformity?"),
        (lambda: FeatureEnergy("koleo", gather=1), "gather must be a bool, not 1"),
        (lambda: FeatureEnergy("koleo", backbone="mean"), "backbone must be 'averaged' or 'summed', not 'mean'"),
    ],
)
def test_features_that_have_no_energy_raise(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@every_energy
def test_feature_energy_names_features_that_are_not_finite(name):
    x = torch.randn(6, 3)
    x[4, 1] = math.nan
    with pytest.raises(ValueError, match="features must be finite, but row 4 is not"):
        FeatureEnergy(name)(x)
    with pytest.raises(ValueError, match="positives must be finite, but row 4 is not"):
        alignment(torch.ones(6, 3), x)


# Several processes ---------------------------------------------------------------------------------------------------

COUNTS = {"uneven": (5, 3), "empty": (0, 6)}


def encoder():
    torch.manual_seed(0)
    return nn.Linear(4, 3, bias=False).double()


def inputs(counts):
    return torch.randn(sum(counts), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check_in_process(rank, folder):
    results = {}
    for case, counts in COUNTS.items():
        part = inputs(counts).split(counts)[rank]
        for name in NAMES:
            model = nn.parallel.DistributedDataParallel(encoder())
            loss = FeatureEnergy(name, gather=True)(model(part))
            loss.backward()
            features = model.module(part).detach().requires_grad_()
            FeatureEnergy(name, gather=True, backbone="summed")(features).backward()
            results[case, name] = loss.detach(), model.module.weight.grad, features.grad
    errors = []
    ones = torch.ones(2, 3)
    for features in (
        (ones, torch.ones(3)),
        (ones, torch.ones(2, 4)),
        (ones, ones.double()),
        (torch.ones(1, 3), torch.ones(0, 3)),
        (ones, [[1.0, 1.0, 1.0]]),
    ):
        try:
            FeatureEnergy("koleo", gather=True)(features[rank])
        except ValueError as error:
            errors.append(str(error))
    sharded = nn.ModuleList([encoder(), ShardedHead(AngularHead(3, 7))])
    regularizer = MHE(sharded, output=0)
    results["sharded"] = regularizer().detach(), [skip.name for skip in regularizer.skipped]
    try:
        MHE(sharded)
    except ValueError as error:
        errors.append(str(error))
    torch.save((results, errors), folder / f"{rank}.pt")


@pytest.mark.slow
def test_gathered_features_give_the_loss_and_gradient_of_one_process(tmp_path):
    run_processes(check_in_process, 2, tmp_path, tmp_path)
    results, errors = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)), strict=True)
    for case, counts in COUNTS.items():
        for name in NAMES:
            model, everything = encoder(), inputs(counts)
            loss = FeatureEnergy(name)(model(everything))
            loss.backward()
            features = model(everything).detach().requires_grad_()
            FeatureEnergy(name)(features).backward()
            assert loss.item() == pytest.approx(brute_force(name, features.detach()))
            for rank, rows in enumerate(features.grad.split(counts)):
                gathered_loss, weight_gradient, feature_gradient = results[rank][case, name]
                torch.testing.assert_close(gathered_loss, loss.detach())
                torch.testing.assert_close(weight_gradient, model.weight.grad)
                torch.testing.assert_close(feature_gradient, rows)
    value = MHE(nn.ModuleList([encoder()]), output_layer=None)().detach()
    for rank in range(2):
        torch.testing.assert_close(results[rank]["sharded"][0], value)
        assert results[rank]["sharded"][1] == ["1"]
        shapes, widths, dtypes, few, no_tensor, refused = errors[rank]
        assert "(n, d)" in shapes
        assert "features must be as wide in all processes, not [3, 4]" in widths
        assert dtypes == ("features must be of one dtype in all processes, not ['torch.float32', 'torch.float64']")
        assert "with n >= 2, not 'torch.float32 (1, 3)'" in few
        assert "floating-point matrix" in no_tensor
        assert ["those of process 1 are not", "not 'list'"][rank] in no_tensor
        assert refused == "output must be 0 with '1', whose class vectors are distributed over processes, not 1.0"
