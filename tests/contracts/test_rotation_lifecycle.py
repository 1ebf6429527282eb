"""Rotated layers and orthogonal maps survive copying, pickling, saving, loading, resetting and failed construction."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from hypersphere import _numerics
from hypersphere.functions._rowmap import RowMap
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.functions.transform import TRANSFORMS
from hypersphere.rotation import InputRotation, fold_, rotate_, rotated_layers, rotation_parameters

METHODS = {**ORTHOGONALS, **TRANSFORMS}
KINDS = {
    "linear": (lambda: nn.Linear(6, 4), lambda: torch.randn(3, 6)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3), lambda: torch.randn(1, 2, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose1d(2, 4, 3), lambda: torch.randn(1, 2, 4)),
    "attention": (lambda: Attention(), lambda: torch.randn(2, 3, 8)),
}
LAYOUTS = [{}, {"block_size": 2}, {"quantize": "int8"}]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def rotated(kind, method="cayley", seed=0, **options):
    torch.manual_seed(seed)
    layer = rotate_(KINDS[kind][0](), method, output=True, output_layer=None, **options)
    with torch.no_grad():
        for p in rotation_parameters(layer):
            p.add_(0.1 * torch.randn_like(p))
    return layer


cases = pytest.mark.parametrize("options", LAYOUTS, ids=["whole", "blocks", "int8"])


@cases
@pytest.mark.parametrize("kind", KINDS)
def test_rotated_layer_copies_are_independent(kind, options):
    layer, x = rotated(kind, **options), KINDS[kind][1]()
    other, before = copy.deepcopy(layer), layer(x)
    assert torch.equal(other(x), before)
    with torch.no_grad():
        for p in rotation_parameters(layer):
            p.mul_(2)
    assert torch.equal(other(x), before)
    assert not torch.equal(layer(x), before)
    fold_(layer)
    assert torch.equal(other(x), before)
    assert list(rotated_layers(other))


@cases
@pytest.mark.parametrize("kind", KINDS)
def test_rotated_layer_state_loads_into_a_layer_of_another_start(kind, options):
    layer, other, x = rotated(kind, **options), rotated(kind, seed=1, **options), KINDS[kind][1]()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert other.load_state_dict(torch.load(file, weights_only=True)).missing_keys == []
    assert torch.equal(other(x), layer(x))
    assert torch.equal(fold_(other)(x), fold_(layer)(x))


@pytest.mark.parametrize("kind", KINDS)
def test_rotated_layer_refuses_to_be_pickled_and_is_plain_after_folding(kind):
    layer, x = rotated(kind), KINDS[kind][1]()
    # torch refuses to pickle parametrised modules; their state dict and adapters are what is saved.
    with pytest.raises(
        RuntimeError, match="Serialization of parametrized modules is only supported through state_dict"
    ):
        pickle.dumps(layer)
    expected = fold_(layer)(x)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)


@pytest.mark.parametrize(
    "options",
    [{"block_size": 4}, {"blocks": 5}, {"method": "cayly"}, {"side": "left"}, {"dropout": 2}, {"quantize": "int4"}],
    ids=repr,
)
def test_rotate_that_fails_leaves_every_layer_unchanged(options):
    # The first layer accepts blocks of 4; the second one has neurons of length 6.
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(4, 2))
    kinds, state = [type(m) for m in model], copy.deepcopy(model.state_dict())
    trained = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match=r"must be|cannot"):
        rotate_(model, **options)
    assert [type(m) for m in model] == kinds
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == trained


def test_input_rotation_that_fails_leaves_its_module_unchanged():
    layer = nn.Linear(6, 4)
    weight = layer.weight
    for options in ({"blocks": 4}, {"block_size": 5}, {"method": "cayly"}, {"seed": 0.5}):
        with pytest.raises(ValueError, match="must be"):
            InputRotation(layer, **options)
    assert layer.weight is weight
    assert weight.requires_grad


def test_input_rotation_resets_to_the_identity():
    layer, x = InputRotation(nn.Linear(6, 4), block_size=3), torch.randn(2, 6)
    start = layer(x)
    nn.init.normal_(layer.free)
    assert not torch.allclose(layer(x), start)
    layer.reset_parameters()
    torch.testing.assert_close(layer(x), start)


@pytest.mark.parametrize("name", METHODS)
def test_orthogonal_map_is_a_value(name):
    method = METHODS[name]()
    assert copy.deepcopy(method) == method == pickle.loads(pickle.dumps(method))
    free = method.identity(4)
    torch.testing.assert_close(method(free), torch.eye(4), atol=1e-6, rtol=0)
    assert isinstance(method.always_orthogonal, bool)
    with pytest.warns(DeprecationWarning, match="exact is deprecated, use .*always_orthogonal instead"):
        assert method.exact is method.always_orthogonal


def test_orthogonal_map_accepts_the_old_name_of_always_orthogonal():
    with pytest.warns(DeprecationWarning, match=r"Mine\.exact is deprecated, use always_orthogonal instead"):

        class Mine(RowMap):
            exact = False

            def expression(self, free, v):
                return v @ free.mT

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Mine().always_orthogonal is False


# Devices where reading a value makes the host wait -------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_orthogonal_map_gives_the_same_values_where_reading_is_not_free(name, batch, monkeypatch):
    torch.manual_seed(0)
    method = METHODS[name]()
    start = method.identity(6).double()
    free = (start + 0.1 * torch.randn(*batch, *start.shape).double()).requires_grad_()
    v, grad = torch.randn(*batch, 5, 6).double().requires_grad_(), torch.randn(*batch, 5, 6).double()

    def values():
        w = method(free, v)
        return w, *torch.autograd.grad(w, (free, v), grad), method(free)

    expected = values()
    # On other devices the maps must choose algorithms without reading values. These paths run on the CPU, too.
    monkeypatch.setattr(_numerics, "all_on_cpu", lambda *tensors: False)
    for ours, theirs in zip(values(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@cases
@pytest.mark.parametrize("kind", KINDS)
def test_rotated_layer_gives_the_same_gradients_where_reading_is_not_free(kind, options, monkeypatch):
    layer, x = rotated(kind, **options).double(), KINDS[kind][1]().double()

    def values():
        y = layer(x)
        return y, *torch.autograd.grad(y.square().sum(), rotation_parameters(layer))

    expected = values()
    monkeypatch.setattr(_numerics, "all_on_cpu", lambda *tensors: False)
    for ours, theirs in zip(values(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
