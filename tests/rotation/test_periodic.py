"""Rotations that are folded periodically: S-OPT, and POET against dense products with permutation matrices."""

import copy
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import hypersphere as hs
import oracle
from hypersphere.energy import MHE
from hypersphere.optim import Optimizers
from hypersphere.rotation import (
    Equivalence,
    Stochastic,
    degrees_of_freedom,
    fold_,
    orthogonality_error,
    rotated_layers,
    rotation_parameters,
    rotation_states,
)

from .reference import rotation as reference_matrix
from .samples import left_unchanged, mlp, perturb_

SIDES = ["both", "input", "output"]


# Stochastic rotations -------------------------------------------------------------------------------------------------


def neurons(layer):
    return layer.parametrizations.weight.original


def test_stochastic_rotates_the_drawn_dimensions_and_the_whole_first_layer():
    model = mlp()
    v = model[2].weight.detach().clone()
    Stochastic(model, 0.25, generator=torch.Generator().manual_seed(0))
    perturb_(model)
    first, second = [rotation for _, _, rotation in rotated_layers(model)]
    assert first.dimensions is None
    assert len(second.dimensions) == len(set(second.dimensions.tolist())) == 4
    moved = (model[2].weight - v).abs().amax(0) > 1e-6
    assert moved.nonzero().flatten().tolist() == second.dimensions.tolist()
    r = second.matrices()
    torch.testing.assert_close(model[2].weight[:, second.dimensions], v[:, second.dimensions] @ r.mT)
    x = torch.randn(3, 10)
    y = model(x)
    torch.testing.assert_close(fold_(model)(x), y, atol=1e-6, rtol=0)


def test_stochastic_gradient_matches_autograd():
    torch.manual_seed(0)
    model = mlp().double()
    Stochastic(model, 5, method="lowdin", whole_first=False)
    perturb_(model)
    _, layer, rotation = next(iter(rotated_layers(model)))
    neurons(layer).requires_grad_()
    g = torch.randn_like(layer.weight)
    ours = torch.autograd.grad((layer.weight * g).sum(), [rotation.parameter, neurons(layer)])
    free, v = rotation.parameter.detach().requires_grad_(), neurons(layer).detach().requires_grad_()
    u, _, vh = torch.linalg.svd(free)
    w = v.clone()
    w[:, rotation.dimensions] = v[:, rotation.dimensions] @ (u @ vh).mT
    torch.testing.assert_close(ours, torch.autograd.grad((w * g).sum(), [free, v]))


@pytest.mark.parametrize("method", ["cayley", "gram_schmidt", "lowdin"])
def test_stochastic_step_keeps_the_output_and_draws_other_dimensions(method):
    model, x = mlp(), torch.randn(5, 10)
    stochastic = Stochastic(model, 0.5, every=3, method=method)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    second = list(rotated_layers(model))[1][2]
    seen = set(second.dimensions.tolist())
    for step in range(1, 40):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        y = model(x)
        assert stochastic.step(optimizer) == (step % 3 == 0)
        torch.testing.assert_close(model(x), y, atol=1e-5, rtol=1e-5)
        if step % 3 == 0:
            assert torch.equal(second.parameter.detach(), second.identity())
            assert second.parameter not in optimizer.state
        seen |= set(second.dimensions.tolist())
    assert seen == set(range(16))


@pytest.mark.slow
def test_stochastic_keeps_the_energy_over_two_thousand_folds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 2))
    start = oracle.energy(model[0].weight.detach().double().numpy(), 2)
    norms = model[0].weight.detach().double().norm(dim=1)
    stochastic = Stochastic(model, 0.25, every=1, method="gram_schmidt", whole_first=False)
    _, layer, rotation = next(iter(rotated_layers(model)))
    first, eye = neurons(layer).clone(), rotation.identity()
    for _ in range(2_000):
        with torch.no_grad():
            rotation.parameter.copy_(eye + 0.5 * torch.randn_like(eye))
        stochastic.step()
    assert (neurons(layer) - first).abs().max() > 0.1
    end = neurons(layer).double()  # folds are computed in float64, so errors do not add up
    assert oracle.energy(end.numpy(), 2) == pytest.approx(start, rel=5e-7)
    torch.testing.assert_close(end.norm(dim=1), norms, rtol=5e-6, atol=0)


def test_stochastic_state_resumes_with_the_same_dimensions():
    def run(steps, resume=None):
        model = mlp()
        stochastic = Stochastic(model, 0.5, every=2, generator=torch.Generator().manual_seed(5))
        if resume:
            model.load_state_dict(resume[0])
            stochastic.load_state_dict(resume[1])
        drawn = []
        for _ in range(steps):
            stochastic.step()
            drawn.append(list(rotated_layers(model))[1][2].dimensions.tolist())
        return drawn, ({k: v.clone() for k, v in model.state_dict().items()}, stochastic.state_dict())

    uninterrupted, _ = run(8)
    half, state = run(3)
    rest, _ = run(5, state)
    assert half + rest == uninterrupted
    assert any("dimensions" in key for key in state[0])


def test_stochastic_fraction_may_be_a_share_a_number_or_a_mapping():
    def counts(fraction):
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
        Stochastic(model, fraction)
        return [rotation.layout.size for _, _, rotation in rotated_layers(model)]

    assert counts(0.25) == [16, 4, 4]
    assert counts(6) == [16, 6, 6]
    assert counts({"1": 0.5, "2": 3}) == [16, 8, 3]
    assert counts(1.0) == [16, 16, 16]


def test_stochastic_leaves_the_model_unchanged_after_an_error():
    model = mlp()
    with pytest.raises(TypeError):
        Stochastic(model, generator="no generator")
    assert not list(rotated_layers(model))


def test_stochastic_step_rejects_a_folded_model():
    model = mlp()
    stochastic = Stochastic(model, 0.5, every=1)
    fold_(model)
    with pytest.raises(ValueError, match="was folded; create a new"):
        stochastic.step()


@pytest.mark.parametrize("make", [partial(Stochastic, fraction=0.5), partial(Equivalence, block_size=4)])
def test_step_drops_the_state_of_several_optimizers(make):
    model, x = mlp(), torch.randn(5, 10)
    folded = make(model, every=1)
    rotated = {p for _, rotation in folded._folded_layers() for p in rotation.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    others = [p for p in trained if p not in rotated]
    optimizers = Optimizers([torch.optim.Adam(group) for group in (list(rotated), others)])
    model(x).square().sum().backward()
    optimizers.step()
    assert folded.step(optimizers)
    first, second = optimizers.optimizers
    assert not first.state
    assert set(second.state) == set(others)


@pytest.mark.parametrize("make", [partial(Stochastic, whole_first=False), partial(Equivalence, block_size=4)])
def test_step_leaves_everything_unchanged_after_an_error(make):
    model = mlp()
    folded = make(model, every=1)
    perturb_(model)
    with (
        left_unchanged(model),
        pytest.raises(ValueError, match=r"^optimizer must be None, an optimiser .*, not 'list'"),
    ):
        folded.step([torch.optim.Adam(model.parameters())])
    (*_, (_, last)) = folded._folded_layers()
    with torch.no_grad():
        next(last.parameters()).fill_(torch.nan)
    weight = model[0].parametrizations.weight.original.clone()
    with pytest.raises(ValueError, match="the parameters of a rotation must be finite"):
        folded.step()
    assert torch.equal(model[0].parametrizations.weight.original, weight)
    assert folded.steps == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 1}, r"fraction must be .* a share of them as a float in \(0, 1\], not 1"),
        ({"fraction": 0.0}, r"fraction must be a share in \(0, 1\], not 0.0"),
        ({"fraction": 1.5}, r"fraction must be a share in \(0, 1\], not 1.5"),
        ({"fraction": 99}, r"fraction must be a number of dimensions in \[2, 16\] of layer '2'"),
        ({"fraction": {"0": 0.5}}, "fraction must be a mapping with an entry for every layer"),
        ({"fraction": {"0": 0.5, "2": 0.5, "x": 2}}, r"fraction must be a mapping from names .*not \['x'\]"),
        ({"every": 0}, "every must be an integer >= 1, not 0"),
        ({"every": 2.5}, "every must be an integer >= 1, not 2.5"),
        ({"method": lambda d: nn.Linear(d, d)}, "method must be a name or an object"),
        ({"whole_first": 3}, "^whole_first must be a bool.*, not 3$"),
        ({"output": 3}, "^output must be a bool.*, not 3$"),
        ({"report": 3}, "^report must be a bool.*, not 3$"),
    ],
)
def test_stochastic_rejects_invalid_input_and_leaves_the_model_unchanged(options, message):
    model = mlp()
    with left_unchanged(model), pytest.raises(ValueError, match=message):
        Stochastic(model, **options)


def test_stochastic_accepts_the_old_name_of_partially_rotated():
    stochastic = Stochastic(mlp(), 0.5)
    with pytest.warns(DeprecationWarning, match="use Stochastic.partially_rotated"):
        assert stochastic.partial is stochastic.partially_rotated


# Orthogonal equivalence -----------------------------------------------------------------------------------------------


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def dense(rotation, order):
    """Return Πᵀ·Diag(blocks)·Π as a dense float64 matrix; entries beyond the blocks are not rotated."""
    free = rotation.parameter.detach().double().reshape(rotation.layout.blocks, -1)
    size, b = len(order), rotation.layout.block_size
    blocks = np.eye(size)
    for i, one in enumerate(free):
        blocks[i * b : (i + 1) * b, i * b : (i + 1) * b] = reference_matrix("cayley", one)
    permutation = np.eye(size)[order.numpy()]
    return permutation.T @ blocks @ permutation


def product(layer, start):
    """Return R·W₀·P for the plain weight W₀ of the layer."""
    (parametrization,) = layer.parametrizations.weight
    w = start.detach().double().flatten(1).numpy()
    if parametrization.output is not None:
        w = dense(parametrization.output, parametrization.output_order) @ w
    if parametrization.input is not None:
        w = w @ dense(parametrization.input, parametrization.input_order)
    return torch.from_numpy(w).view(start.shape)


def singular_values(layer):
    return torch.linalg.svdvals(layer.weight.detach().double().flatten(1))


def train(model, equivalence, steps, lr=0.01, optimizer=None):
    """Train on a regression with a random teacher, and return the optimiser."""
    optimizer = optimizer or torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    first = equivalence.steps
    for step in range(first, first + steps):
        random = seeded(step)
        x = torch.randn(32, 10, generator=random)
        optimizer.zero_grad()
        (model(x) - x[:, :3].sin()).square().mean().backward()
        optimizer.step()
        equivalence.step(optimizer)
    return optimizer


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("block_size", [4, 5, 64])
@pytest.mark.parametrize("layer", [nn.Linear(12, 9), nn.Conv2d(3, 8, 2), nn.Conv1d(4, 6, 3, groups=2)], ids=repr)
def test_equivalence_weight_is_the_dense_product(layer, block_size, sides):
    layer = copy.deepcopy(layer)
    start = layer.weight.detach().clone()
    Equivalence(layer, block_size, start="keep", sides=sides, output=True, generator=seeded())
    torch.testing.assert_close(layer.weight, start, rtol=0, atol=0)
    perturb_(layer)
    torch.testing.assert_close(layer.weight.double(), product(layer, start), rtol=0, atol=2e-6)
    assert (layer.weight - start).abs().max() > 0.01


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("tokens", [0, 1, 600])
@pytest.mark.parametrize("block_size", [4, 5])
def test_equivalence_linear_layer_equals_its_weight(tokens, sides, block_size):
    torch.manual_seed(0)
    layer = nn.Linear(48, 40)
    Equivalence(layer, block_size, sides=sides, output=True)
    perturb_(layer)
    parameters = [*rotation_parameters(layer), layer.bias]
    x = torch.randn(tokens, 48, requires_grad=True)
    results = []
    for output in (layer(x), x @ layer.weight.mT + layer.bias):
        results.append([output, *torch.autograd.grad(output.square().sum(), [x, *parameters])])
    assert layer.parametrizations.weight[0].rotates_input(x, layer.weight)
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)
    assert layer(x[:, None].expand(-1, 2, -1)).shape == (tokens, 2, 40)


def test_equivalence_layer_passes_gradcheck_with_respect_to_its_parameters():
    layer, x = nn.Linear(6, 5).double(), torch.randn(4, 6).double()
    Equivalence(layer, 3, output=True)
    perturb_(layer)
    names, parameters = zip(*[(n, p) for n, p in layer.named_parameters() if p.requires_grad], strict=True)

    def output(*values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert gradcheck(output, parameters)
    assert gradgradcheck(output, parameters)


def test_equivalence_keeps_singular_values_over_twenty_folds():
    model = mlp()
    equivalence = Equivalence(model, block_size=8, every=15)
    before = [singular_values(model[i]) for i in (0, 2)]
    start = model[0].weight.detach().clone()
    train(model, equivalence, 307, lr=0.02)  # 20 folds, and seven steps after the last one
    assert (model[0].weight - start).abs().max() > 0.3
    for i, values in zip((0, 2), before, strict=True):
        torch.testing.assert_close(singular_values(model[i]), values, rtol=1e-5, atol=0)
    assert orthogonality_error(model) < 1e-5
    fold_(model)
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(singular_values(model[0]), before[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("sides", SIDES)
def test_equivalence_fold_keeps_the_output_and_draws_other_permutations(sides):
    model, x = mlp(), torch.randn(5, 10)
    equivalence = Equivalence(model, block_size=4, every=3, sides=sides)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    (parametrization,) = model[2].parametrizations.weight
    orders = []
    for step in range(1, 13):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        y = model(x)
        assert equivalence.step(optimizer) == (step % 3 == 0)
        torch.testing.assert_close(model(x), y, atol=1e-5, rtol=1e-5)
        if step % 3 == 0:
            for rotation in parametrization.rotations:
                assert torch.equal(rotation.parameter.detach(), rotation.identity())
                assert rotation.parameter not in optimizer.state
            assert model[4].weight in optimizer.state
            orders.append(
                [b.clone() for b in (parametrization.output_order, parametrization.input_order) if b is not None]
            )
    for one in zip(*orders, strict=True):
        assert len({tuple(order.tolist()) for order in one}) == 4
        assert all(sorted(order.tolist()) == list(range(len(order))) for order in one)


def test_equivalence_rotates_entries_that_are_left_over_after_the_next_fold():
    layer = nn.Linear(7, 11, bias=False)
    equivalence = Equivalence(layer, block_size=4, every=1, start="keep", output=True, generator=seeded())
    (parametrization,) = layer.parametrizations.weight
    assert (parametrization.input.layout.size, parametrization.output.layout.size) == (6, 9)
    left_over = set()
    for _ in range(30):
        left_over |= set(parametrization.output_order[9:].tolist())
        before = layer.weight.detach().clone()
        perturb_(layer)
        unchanged = (layer.weight - before)[parametrization.output_order[9:]][:, parametrization.input_order[6:]]
        assert unchanged.abs().max() == 0
        equivalence.step()
    assert left_over == set(range(11))


def test_equivalence_one_block_of_inputs_is_stochastic_with_all_dimensions():
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))
    other = copy.deepcopy(one)
    Equivalence(one, block_size=8, sides="input", start="keep")
    Stochastic(other, 1.0)
    free = 0.3 * torch.randn(28)
    with torch.no_grad():
        rotation_parameters(one)[0].copy_(free)
        rotation_parameters(other)[0].copy_(free)
    (parametrization,) = one[0].parametrizations.weight
    assert torch.equal(parametrization.input_order, torch.arange(8))  # ascending within a block
    start = parametrization(torch.eye(8)[:6]), other[0].parametrizations.weight[0](torch.eye(8)[:6])
    # One multiplies neurons by P, the other by Rᵀ.
    r = other[0].parametrizations.weight[0].matrices()
    torch.testing.assert_close(start[0], r[:6])
    torch.testing.assert_close(start[1], r.mT[:6])


def test_equivalence_resumes_in_the_middle_of_a_period():
    def make(seed):
        model = mlp()
        return model, Equivalence(model, block_size=4, every=6, generator=seeded(seed))

    model, equivalence = make(5)
    train(model, equivalence, 20)
    expected = model.state_dict()

    model, equivalence = make(5)
    optimizer = train(model, equivalence, 10)
    saved = copy.deepcopy((model.state_dict(), equivalence.state_dict(), optimizer.state_dict()))
    model, equivalence = make(6)  # another seed, which the saved one replaces
    assert not torch.equal(
        model.state_dict()["0.parametrizations.weight.0.input_order"],
        saved[0]["0.parametrizations.weight.0.input_order"],
    )
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model.load_state_dict(saved[0])
    equivalence.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    train(model, equivalence, 10, optimizer=optimizer)
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)


def test_equivalence_draws_are_a_function_of_the_generator():
    def state(seed):
        model = mlp()
        equivalence = Equivalence(model, block_size=4, every=1, generator=seeded(seed))
        torch.manual_seed(seed)  # later draws do not depend on the global generator
        equivalence.step()
        return model.state_dict()

    one, same, other = state(1), state(1), state(2)
    torch.testing.assert_close(one, same, rtol=0, atol=0)
    for key in ("output_order", "input_order", "output.seed", "input.seed"):
        assert not torch.equal(one[f"0.parametrizations.weight.0.{key}"], other[f"0.parametrizations.weight.0.{key}"])
    assert (one["0.parametrizations.weight.original"] - other["0.parametrizations.weight.original"]).abs().max() > 0.1


def test_equivalence_starts_from_normalized_or_from_the_present_rows():
    model = mlp()
    present = model[0].weight.detach().clone()
    Equivalence(model, block_size=4, scale=1.5)
    torch.testing.assert_close(model[0].weight.norm(dim=1), torch.full((16,), 1.5))
    cosines = nn.functional.cosine_similarity(model[0].weight, present)
    assert cosines.abs().max() < 0.95
    model = mlp()
    Equivalence(model, start="keep")
    torch.testing.assert_close(model[0].weight, present, rtol=0, atol=0)


def test_equivalence_normalized_rows_are_gaussian_directions():
    layer = nn.Linear(400, 500, bias=False)
    Equivalence(layer, output=True, generator=seeded())
    values = layer.weight.detach().flatten() * 20  # √400: entries of a unit vector are about N(0, 1/d)
    assert abs(float(values.mean())) < 0.01
    assert float(values.pow(4).mean()) == pytest.approx(3.0, abs=0.05)  # the kurtosis of a Gaussian


def test_equivalence_trains_digits_better_than_frozen_layers():
    from sklearn.datasets import load_digits

    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    x = (x.float() - 8) / 8
    losses = {}
    for name in ("equivalence", "frozen"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
        equivalence = Equivalence(model, block_size=16, every=25, generator=seeded())
        if name == "frozen":
            for p in rotation_parameters(model):
                p.requires_grad_(False)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for step in range(100):
            rows = torch.randint(1400, (64,), generator=seeded(step))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            equivalence.step(optimizer)
        with torch.no_grad():
            losses[name] = float(nn.functional.cross_entropy(model(x[1400:]), y[1400:]))
    assert losses["equivalence"] < 0.75 * losses["frozen"]


@pytest.mark.parametrize(("sides", "warns"), [("both", False), ("output", False), ("input", True)])
def test_equivalence_warns_about_a_constant_energy_only_without_output_rotations(sides, warns):
    model = mlp()
    Equivalence(model, block_size=4, sides=sides)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        energy = MHE(model)
    assert any("rotations do not change the angles" in str(w.message) for w in caught) == warns
    before = energy().item()
    perturb_(model)
    assert (abs(energy().item() - before) > 1e-3) == (not warns)
    gradients = torch.autograd.grad(energy(), rotation_parameters(model), allow_unused=True)
    assert any(g is not None and g.abs().max() > 1e-3 for g in gradients) == (not warns)


def test_equivalence_layers_are_seen_by_layers_of_and_diagnostics():
    model = mlp()
    start = mlp()[0].weight
    Equivalence(model, block_size=4, start="keep")
    expected = degrees_of_freedom(model)
    perturb_(model)
    rows = hs.layers_of(model)[0].rows()
    torch.testing.assert_close(rows.double(), product(model[0], start), atol=2e-6, rtol=0)
    states = rotation_states(model)
    assert list(states) == ["0", "2"]
    # 4 blocks of outputs and 3 of inputs with 3 entries (10 = 3·3 + 1): 4·6 + 3·3.
    assert states["0"].degrees_of_freedom == 4 * 6 + 3 * 3
    assert states["0"].orthogonality_error < 1e-6
    assert states["0"].energy_drift > 1e-4
    assert degrees_of_freedom(model) == expected
    assert len(rotation_parameters(model)) == 4
    y = model(torch.ones(2, 10))
    fold_(model, keep=True)
    torch.testing.assert_close(model(torch.ones(2, 10)), y, atol=1e-5, rtol=1e-5)
    assert rotation_states(model)["0"].energy_drift == 0


def test_equivalence_copies_fold_independently():
    model, x = mlp(), torch.randn(3, 10)
    Equivalence(model, block_size=4)
    perturb_(model)
    y, other = model(x), copy.deepcopy(model)
    weight = model[0].weight.detach()
    fold_(model)
    torch.testing.assert_close(model[0].weight, weight, rtol=0, atol=0)
    assert all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model(x), y, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other(x), y, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equivalence_half_precision_layers_have_float32_parameters(dtype):
    torch.manual_seed(0)
    layer = nn.Linear(16, 12).to(dtype)
    equivalence = Equivalence(layer, 4, every=1, output=True)
    perturb_(layer, 0.1)
    assert {p.dtype for p in rotation_parameters(layer)} == {torch.float32}
    weight, x = layer.weight.detach(), torch.randn(9, 16, dtype=dtype)
    assert weight.dtype == dtype
    y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), x.float() @ weight.float().mT + layer.bias.float(), atol=0.05, rtol=0.02)
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().max() > 0 for p in rotation_parameters(layer))
    equivalence.step()
    torch.testing.assert_close(layer.weight.float(), weight.float(), atol=2e-3, rtol=1e-2)


def test_equivalence_works_under_autocast():
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 12), torch.randn(9, 16)
    Equivalence(layer, 4, output=True)
    perturb_(layer)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), atol=0.05, rtol=0.05)
    y.float().sum().backward()
    assert all(p.grad is not None for p in layer.parameters() if p.requires_grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_equivalence_works_with_activation_checkpointing(use_reentrant):
    model, x = mlp(), torch.randn(7, 10, requires_grad=True)
    Equivalence(model, 4)
    perturb_(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in parameters]
    model.zero_grad()
    checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close([p.grad for p in parameters], expected, rtol=0, atol=0)


@pytest.mark.slow
def test_equivalence_compiles():
    model, x = mlp(), torch.randn(7, 10)
    Equivalence(model, 4)
    perturb_(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(model(x).square().sum(), parameters)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad(compiled(x).square().sum(), parameters)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_equivalence_convolution_keeps_channels_last():
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    start = layer.weight.detach().clone()
    equivalence = Equivalence(layer, 8, every=1, start="keep", output=True)
    perturb_(layer)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    expected = product(layer, start)
    torch.testing.assert_close(layer.weight.double(), expected, atol=2e-6, rtol=0)
    equivalence.step()
    torch.testing.assert_close(layer.weight.double(), expected, atol=2e-6, rtol=0)


def test_equivalence_accepts_a_layer_with_one_output():
    layer = nn.Linear(6, 1)
    equivalence = Equivalence(layer, 3, every=1, output=True)
    layer(torch.randn(4, 6)).sum().backward()
    assert equivalence.step()


def test_equivalence_reports_blocks_per_layer(capsys):
    model = nn.Sequential(nn.Linear(27, 127), nn.Linear(127, 64), nn.Linear(64, 3))
    Equivalence(model, block_size=64, report=True)
    printed = capsys.readouterr().out
    assert "0  outputs: 2 blocks of 63 and 1 not rotated, inputs: 1 block of 27" in printed
    assert "1  outputs: 1 block of 64, inputs: 2 blocks of 63 and 1 not rotated" in printed
    assert "2: it is the output layer" in printed


def test_equivalence_rejects_a_model_of_fused_experts_only():
    experts = nn.Module()
    experts.num_experts, experts.hidden_size = 3, 8
    experts.up_proj = nn.Parameter(torch.randn(3, 8, 12))
    message = r"where must select at least one layer that can be rotated, but none is left \(up_proj: it holds several"
    with left_unchanged(experts), pytest.raises(ValueError, match=message):
        Equivalence(experts, output_layer=None)


def test_equivalence_step_rejects_a_folded_model():
    model = mlp()
    equivalence = Equivalence(model, every=1)
    fold_(model)
    with pytest.raises(ValueError, match="was folded; create a new"):
        equivalence.step()


def test_equivalence_fold_names_a_layer_whose_parameters_are_not_finite():
    model = mlp()
    equivalence = Equivalence(model, every=1)
    with torch.no_grad():
        rotation_parameters(model)[0].fill_(float("nan"))
    with pytest.raises(ValueError, match="layer '0': the parameters of a rotation must be finite"):
        equivalence.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size must be an integer >= 2, not 1"),
        ({"block_size": 2.5}, "block_size must be an integer >= 2, not 2.5"),
        ({"every": 0}, "every must be an integer >= 1, not 0"),
        ({"sides": "left"}, "sides must be 'both', 'input' or 'output', not 'left'"),
        ({"start": "zero"}, "start must be 'normalized' or 'keep', not 'zero'"),
        ({"scale": 0}, "scale must be a positive number, not 0"),
        ({"method": lambda d: nn.Linear(d, d)}, "method must be a name or an object"),
        ({"output": 3}, "^output must be a bool.*, not 3$"),
        ({"report": 3}, "^report must be a bool.*, not 3$"),
    ],
)
def test_equivalence_rejects_invalid_input_and_leaves_the_model_unchanged(options, message):
    model = mlp()
    with left_unchanged(model), pytest.raises(ValueError, match=message):
        Equivalence(model, **options)
    assert not list(rotated_layers(model))
