import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from hypersphere.evaluation import landscape
from hypersphere.rotation import InputRotation, fold_, rotate_, rotated_layers


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def small(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 8))
    return nn.Sequential(*model, nn.ReLU(), nn.Linear(8, 3)).to(dtype)


def batch(dtype=torch.float32):
    return torch.randn(16, 2, 4, 4, generator=seeded(1)).to(dtype), torch.randint(3, (16,), generator=seeded(2))


def bits(tensor):
    return tensor.flatten().view(torch.uint8).tolist()


def loss_and_error(model, dtype=torch.float32):
    x, y = batch(dtype)

    def measure():
        with torch.no_grad():
            scores = model(x)
        return {
            "loss": nn.functional.cross_entropy(scores, y),
            "error": (scores.argmax(1) != y).double().mean().item(),
        }

    return measure


class Recorded:
    """A quadratic ½Σ h∘(w − 0.3)² of all parameters, in NumPy, that records the points at which it is evaluated."""

    def __init__(self, model):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.points = []

    def __call__(self):
        self.points.append([p.detach().double().numpy().copy() for p in self.parameters])
        return self.value(self.points[-1])

    @staticmethod
    def value(arrays):
        total = 0.0
        for w in arrays:
            h = np.linspace(0.5, 2, w.size).reshape(w.shape)
            total += 0.5 * float((h * (w - 0.3) ** 2).sum())
        return total


@pytest.mark.parametrize("weight", [2.0, -3.0])
def test_landscape_of_a_parabola_is_exact(weight):
    layer = nn.Linear(1, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[weight], [0.0]]))
    surface = landscape(
        layer, lambda: layer.weight.square().sum(), span=1.5, points=7, directions="uniform", generator=seeded()
    )
    axis = np.linspace(-1.5, 1.5, 7)
    # Rows have one entry, so every uniform direction is normalised to +‖w‖; a row of zeros does not move.
    size = abs(weight)
    expected = (weight + size * axis[:, None] + size * axis[None, :]) ** 2
    np.testing.assert_allclose(surface.values["value"].numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(surface.a.numpy(), axis)
    np.testing.assert_allclose(surface.b.numpy(), axis)
    assert surface.centre == {"value": weight**2}
    assert "7×7" in repr(surface)


@pytest.mark.parametrize("directions", ["normal", "uniform"])
@pytest.mark.parametrize("normalize", ["filter", "layer", None])
def test_landscape_points_are_on_a_plane_of_normalised_directions(directions, normalize):
    model = small(torch.float64)
    quadratic = Recorded(model)
    before = [p.detach().numpy().copy() for p in quadratic.parameters]
    surface = landscape(
        model, quadratic, span=0.5, points=3, directions=directions, normalize=normalize, generator=seeded()
    )
    grid = list(itertools.product(surface.a.tolist(), surface.b.tolist()))
    grid.remove((0.0, 0.0))
    at = dict(zip([(0.0, 0.0), *grid], quadratic.points, strict=True))
    for k, start in enumerate(before):
        first, second = ((at[spot][k] - start) / 0.5 for spot in ((0.5, 0.0), (0.0, 0.5)))
        for (a, b), arrays in at.items():
            np.testing.assert_allclose(arrays[k], start + a * first + b * second, atol=1e-12)
        if start.ndim == 1:
            assert not first.any()
            continue
        assert np.abs(first - second).max() > 1e-3
        assert (first.min() >= 0) == (directions == "uniform")
        for direction in (first, second):
            rows, trained_rows = (w.reshape(len(w), -1) for w in (direction, start))
            if normalize == "filter":
                np.testing.assert_allclose(np.linalg.norm(rows, axis=1), np.linalg.norm(trained_rows, axis=1))
            elif normalize == "layer":
                np.testing.assert_allclose(np.linalg.norm(rows), np.linalg.norm(trained_rows))
                assert np.ptp(np.linalg.norm(rows, axis=1) / np.linalg.norm(trained_rows, axis=1)) > 0.01
            else:
                assert np.std(rows) == pytest.approx(1.0 if directions == "normal" else 12**-0.5, rel=0.4)
    for (a, b), arrays in at.items():
        i, j = surface.a.tolist().index(a), surface.b.tolist().index(b)
        assert surface.values["value"][i, j].item() == pytest.approx(Recorded.value(arrays))
    assert surface.centre["value"] == pytest.approx(Recorded.value(before))


def test_landscape_is_reproducible_with_a_generator_or_the_global_seed():
    model = small().eval()
    measure = loss_and_error(model)
    first, repeated, other = (landscape(model, measure, points=3, generator=seeded(s)) for s in (5, 5, 6))
    assert torch.equal(first.values["loss"], repeated.values["loss"])
    assert torch.equal(first.values["error"], repeated.values["error"])
    assert not torch.equal(first.values["loss"], other.values["loss"])
    torch.manual_seed(5)
    first = landscape(model, measure, points=3)
    torch.manual_seed(5)
    assert torch.equal(first.values["loss"], landscape(model, measure, points=3).values["loss"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("raises", [False, True])
def test_landscape_restores_parameters_and_buffers_exactly(dtype, raises):
    model = small(dtype).train()  # in training mode the measure changes running means
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = -0.0
    before = {name: t.clone() for name, t in model.state_dict().items()}
    addresses = {name: t.data_ptr() for name, t in model.state_dict().items()}
    measure, calls = loss_and_error(model, dtype), []

    def failing():
        calls.append(model[0].weight.detach().clone())
        if raises and len(calls) == 4:
            raise RuntimeError("no more")
        return measure()

    if raises:
        with pytest.raises(RuntimeError, match="no more"):
            landscape(model, failing, points=3)
    else:
        landscape(model, failing, points=3)
    assert len(calls) == (4 if raises else 9)
    assert not torch.equal(calls[1], calls[0])
    for name, t in model.state_dict().items():
        assert t.data_ptr() == addresses[name]
        assert bits(t) == bits(before[name]), name
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_landscape_contains_its_centre_if_the_grid_is_odd():
    model = small().eval()
    odd = landscape(model, loss_and_error(model), points=5, span=2.0)
    for name in ("loss", "error"):
        assert odd.values[name][2, 2].item() == odd.centre[name]
    assert odd.a[2] == odd.b[2] == 0
    assert odd.values["error"].min() >= 0
    assert odd.values["error"].max() <= 1
    even = landscape(model, loss_and_error(model), points=4, span=2.0)
    assert even.a.tolist() == pytest.approx([-2, -2 / 3, 2 / 3, 2])
    assert even.centre == odd.centre


def test_landscape_moves_only_selected_trainable_parameters():
    body, head = nn.Linear(4, 5), nn.Linear(5, 2)
    body.weight.requires_grad_(False)
    moved = set()

    def measure():
        moved.update(n for n, w in start.items() if not torch.equal(w, now[n]))
        return 0.0

    now = {"body": body.weight, "head": head.weight}
    start = {n: w.detach().clone() for n, w in now.items()}
    landscape([body, head], measure, points=2)
    assert moved == {"head"}
    body.weight.requires_grad_(True)
    moved.clear()
    landscape([body, head], measure, points=2, only=lambda name, p: name.startswith("0."))
    assert moved == {"body"}
    moved.clear()
    landscape(iter([body, head]), measure, points=2)
    assert moved == {"body", "head"}


@pytest.mark.parametrize("method", ["cayley", "exponential", "gram_schmidt", "lowdin"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_landscape_moves_rotated_layers_by_their_free_matrices(method, blocks):
    model = rotate_(small().eval(), method, blocks=blocks)
    layers = [layer for _, layer, _ in rotated_layers(model)]
    frozen = [layer.parametrizations.weight.original.clone() for layer in layers]
    grams = [layer.weight.detach().flatten(1) @ layer.weight.detach().flatten(1).mT for layer in layers]
    measure, relative_changes = loss_and_error(model), []

    def check_and_measure():
        for layer, gram, v in zip(layers, grams, frozen, strict=True):
            w = layer.weight.detach().flatten(1)
            # The layer is rotated at every point, not only at θ*, so inner products do not change.
            torch.testing.assert_close(w @ w.mT, gram, atol=1e-4, rtol=1e-4)
            relative_changes.append(((w - v.flatten(1)).norm() / v.norm()).item())
        return measure()

    surface = landscape(
        model, check_and_measure, points=3, generator=seeded(), only=lambda name, p: "parametrizations" in name
    )
    assert max(relative_changes[: len(layers)]) < 1e-6  # the centre is measured first
    assert 0.3 < np.mean(relative_changes[len(layers) :]) < 2  # also at R = I the direction has the norm of R
    assert surface.values["loss"].std() > 0
    folded = fold_(copy.deepcopy(model))
    plain = landscape(folded, loss_and_error(folded), points=3, generator=seeded())
    assert plain.centre["loss"] == pytest.approx(surface.centre["loss"], abs=1e-6)
    assert plain.centre["error"] == surface.centre["error"]
    assert all(torch.equal(x.parametrizations.weight.original, v) for x, v in zip(layers, frozen, strict=True))


def first_direction(module):
    """Return the parameter of a module and δ, from the points (1, −1) and (1, 1)."""
    recorded = Recorded(module)
    landscape(module, recorded, points=2)
    (start,), _, _, (right_low,), (right_high,) = recorded.points
    return start, (right_low + right_high) / 2 - start


def test_landscape_directions_of_rotations_have_the_norm_of_the_rotation():
    _, numbers = first_direction(rotate_(nn.Linear(12, 5, bias=False), "cayley", blocks=3))
    assert numbers.shape == (3, 6)
    np.testing.assert_allclose(np.linalg.norm(numbers, axis=1), np.sqrt(4 / 2), rtol=1e-5)  # ‖S‖_F = √4 in each block
    _, numbers = first_direction(InputRotation(nn.Linear(8, 3, bias=False)))
    assert np.linalg.norm(numbers) == pytest.approx(2.0, rel=1e-5)
    for blocks in (1, 2):
        p, rows = first_direction(rotate_(nn.Linear(6, 5, bias=False), "lowdin", spread=1.0, blocks=blocks))
        np.testing.assert_allclose(np.linalg.norm(rows, axis=-1), np.linalg.norm(p, axis=-1), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span": 0}, "span must be a positive number, not 0"),
        ({"points": 1}, "points must be an integer >= 2, not 1"),
        ({"points": 2.5}, "points must be an integer >= 2"),
        ({"directions": "sphere"}, "directions must be one of 'normal', 'uniform', not 'sphere'"),
        ({"normalize": "rows"}, "normalize must be 'filter', 'layer' or None, not 'rows'"),
        ({"only": lambda name, p: False}, "model must have a trainable parameter"),
    ],
)
def test_landscape_rejects_invalid_options(options, message):
    with pytest.raises(ValueError, match=message):
        landscape(nn.Linear(3, 2), lambda: 0.0, **options)


@pytest.mark.parametrize(
    ("model", "measure", "message"),
    [
        (nn.Linear(3, 2), 3, "measure must be a callable without arguments, not 3"),
        (nn.Linear(3, 2), lambda: None, "measure must be a function that returns one number"),
        (nn.Linear(3, 2), lambda: torch.ones(3), "measure must be a function that returns one number"),
        (3, lambda: 1.0, "model must be a module or several modules, not 'int'"),
        (nn.Linear(3, 2).parameters(), lambda: 1.0, "model must be a module or several modules"),
    ],
)
def test_landscape_rejects_invalid_models_and_measures(model, measure, message):
    with pytest.raises(ValueError, match=message):
        landscape(model, measure, points=3)


def test_landscape_rejects_a_measure_that_changes_its_names():
    names = iter("abcdefghijkl")
    with pytest.raises(ValueError, match="measure must return the same names"):
        landscape(nn.Linear(3, 2), lambda: {next(names): 0.0}, points=2)
