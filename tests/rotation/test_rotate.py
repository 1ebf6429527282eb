"""`rotate_`, `fold_` and `use_rotation_set`: selection of layers, weights and outputs, state dicts."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import hypersphere as hs
import oracle
from hypersphere.functions.orthogonal import ORTHOGONALS, Cayley, GramSchmidt
from hypersphere.heads import AngularHead
from hypersphere.rotation import (
    BlockLayout,
    InputRotation,
    Stochastic,
    degrees_of_freedom,
    fold_,
    orthogonality_error,
    rotatable_layers,
    rotate_,
    rotated_layers,
    rotation_parameters,
    rotation_states,
    use_rotation_set,
)

from . import reference
from .samples import left_unchanged, mlp, perturb_

METHODS = list(ORTHOGONALS)
LAYERS = {
    "linear": lambda: (nn.Linear(12, 7), (5, 12)),
    "conv1d": lambda: (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2), (2, 4, 15)),
    "conv2d": lambda: (nn.Conv2d(4, 6, (3, 2), groups=2, stride=(1, 2), padding=1), (2, 4, 9, 8)),
    "conv3d": lambda: (nn.Conv3d(2, 5, 2, padding="same", bias=False), (1, 2, 4, 5, 6)),
    "depthwise": lambda: (nn.Conv2d(6, 6, 3, groups=6), (2, 6, 8, 8)),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", LAYERS)
def test_rotate_multiplies_each_neuron_and_fold_keeps_the_output(kind, method):
    torch.manual_seed(1)
    layer, shape = LAYERS[kind]()
    x, v, parameter = torch.randn(shape), layer.weight.detach().clone(), layer.weight
    names, trained = [n for n, _ in layer.named_parameters()], parameter.requires_grad
    before = layer(x)
    rotate_(layer, method)
    torch.testing.assert_close(layer(x), before, atol=1e-6, rtol=0)
    perturb_(layer)
    ((_, _, rotation),) = rotated_layers(layer)
    r = reference.rotation(method, rotation.parameter.detach().double())
    expected = np.stack([r @ row for row in v.flatten(1).double().numpy()]).reshape(v.shape)
    np.testing.assert_allclose(layer.weight.detach().numpy(), expected, atol=2e-5)
    rotated = layer(x)
    assert (rotated - before).abs().max() > 1e-3 or layer.weight.flatten(1).shape[1] == 1
    assert fold_(layer) is layer
    torch.testing.assert_close(layer(x), rotated, atol=1e-6, rtol=0)
    assert layer.weight is parameter
    assert layer.weight.requires_grad is trained
    assert [n for n, _ in layer.named_parameters()] == names
    assert not hasattr(layer, "parametrizations")


@pytest.mark.parametrize("method", METHODS)
def test_rotate_trains_only_the_rotation_and_keeps_the_energy(method):
    model = rotate_(mlp(), method)
    frozen = [layer.parametrizations.weight.original for _, layer, _ in rotated_layers(model)]
    copies = [v.clone() for v in frozen]
    start = oracle.energy(model[0].weight.detach().double().numpy(), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(32, 10), torch.randint(3, (32,))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(a, b) for a, b in zip(frozen, copies, strict=True))
    drift = abs(oracle.energy(model[0].weight.detach().double().numpy(), 2) / start - 1)
    assert rotation_states(model)["0"].energy_drift == pytest.approx(drift, abs=1e-6)
    if method == "free":
        assert drift > 1e-3
        assert orthogonality_error(model) > 1e-3
    else:
        assert drift < 1e-5
        assert orthogonality_error(model) < 1e-5


def test_rotate_skips_the_output_layer_by_default():
    model = mlp()
    rotate_(model)
    assert [name for name, _, _ in rotated_layers(model)] == ["0", "2"]
    plain = mlp()
    with pytest.raises(ValueError, match="where selects the output layer '4'; pass output=True"):
        rotate_(plain, where=lambda name, module: True)
    assert not list(rotated_layers(plain))
    rotate_(plain, where=lambda name, module: name == "4", output=True)
    assert [name for name, _, _ in rotated_layers(plain)] == ["4"]
    headed = nn.ModuleDict({"head": AngularHead(8, 3), "net": nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8))})
    rotate_(headed)
    assert [name for name, _, _ in rotated_layers(headed)] == ["net.0", "net.1"]  # the head is the output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: rotate_(m, blocks=3), "layer '0': blocks must be a divisor of 10"),
        (lambda m: rotate_(m, blocks=0), "blocks must be an integer >= 1, not 0"),
        (lambda m: rotate_(m, blocks=2.0), "blocks must be an integer >= 1, not 2.0"),
        (lambda m: rotate_(m, blocks="2"), "blocks must be an integer >= 1, not '2'"),
        (lambda m: rotate_(m, factors=1.0), "factors must be an integer >= 1, not 1.0"),
        (lambda m: rotate_(m, spread="a"), "spread must be None or a number >= 0, not 'a'"),
        (lambda m: rotate_(m, where="0"), "where must be None or a function of a name and a module, not '0'"),
        (lambda m: rotate_(m, "caley"), r"not 'caley'; did you mean cayley\?$"),
        (
            lambda m: rotate_(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)), blocks=2),
            r"blocks must be a divisor of 3, the channels of '0' \(or leave it out with `where`\), not 2",
        ),
        (lambda m: rotate_(m, Cayley), "method must be one of 'gram_schmidt'"),
        (lambda m: rotate_(m, lambda d: 3), "method must be a callable that makes a module for a given d, not 3"),
        (lambda m: rotate_(m, lambda d: nn.Linear(d, 3)), r"method must be a module from and to rows \(16, 10\)"),
        (
            lambda m: rotate_(m, lambda d: nn.Linear(d, d), blocks=2),
            "method must be a name or a RowMap if blocks, block_size, shared, factors, dropout or spread are used",
        ),
        (lambda m: rotate_(m, refine="mhe", refine_steps=0), "refine_steps must be an integer >= 1, not 0"),
        (lambda m: rotate_(m, refine="mhe", refine_rate="fast"), "refine_rate must be a positive number, not 'fast'"),
        (
            lambda m: rotate_(m, blocks=5, factors=2),
            r"layer '0': factors must be a number with 2\^\(factors−1\) dividing the 5 blocks, not 2",
        ),
        (
            lambda m: rotate_(m, blocks=10, factors=2),
            "layer '0': blocks must be of even size for more than one factor, but 10/10 = 1 is odd, not 10",
        ),
        (
            lambda m: rotate_(m, block_size=3),
            r"block_size must be a divisor of 10, the length of a neuron of '0' \(or leave it out with `where`\)",
        ),
        (
            lambda m: rotate_(m, blocks=2, block_size=5),
            "block_size must be None with blocks=2, because the two exclude each other, not 5",
        ),
        (lambda m: rotate_(m, side="left"), "side must be 'auto', 'weight' or 'input', not 'left'"),
        (lambda m: rotate_(m, dropout=1.0), r"dropout must be a number in \[0, 1\), not 1.0"),
        (lambda m: rotate_(m, "twist"), "method must be one of 'gram_schmidt'.*not 'twist'"),
        (lambda m: rotate_(m, block_size=0), "block_size must be None or an integer >= 1, not 0"),
        (lambda m: rotate_(m, where=lambda *_: False), r"where must select at least one layer .*none is left \(0: "),
        (
            lambda m: rotate_(nn.ReLU()),
            "where must select at least one layer that can be rotated, but the model has no layers$",
        ),
        (lambda m: rotate_(m, refine="max"), "refine must be a callable of rows or one of 'mhe'"),
        (lambda m: rotate_(m, quantize="int4"), "quantize must be None or 'int8', not 'int4'"),
        (
            lambda m: rotate_(m, quantize="int8", learn_neurons=True),
            "quantize must be None if learn_neurons=True, not 'int8'",
        ),
        (lambda m: rotate_(m, spread=-1), "spread must be None or a number >= 0, not -1"),
    ],
)
def test_rotate_rejects_invalid_input_and_leaves_the_model_unchanged(change, message):
    model = mlp()
    with left_unchanged(model), pytest.raises(ValueError, match=message):
        change(model)


def test_rotate_rejects_rotated_layers():
    model = rotate_(mlp())
    message = "layer '0' must have a plain weight, but it is parametrised already"
    for call in (rotate_, rotatable_layers):
        with left_unchanged(model), pytest.raises(ValueError, match=message):
            call(model)


def test_fold_rejects_a_parametrisation_that_it_would_remove():
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model, x = rotate_(mlp(), block_size=2, side="input"), torch.randn(3, 10)
    perturb_(model)
    parametrize.register_parametrization(model[2], "weight", Double())
    hidden = model[1](model[0](x))
    torch.testing.assert_close(model[2](hidden), hidden @ model[2].weight.mT + model[2].bias)
    message = r"layer '2' has another parametrisation after its rotation \(Double\), which folding would remove"
    with left_unchanged(model), pytest.raises(ValueError, match=message):
        fold_(model)


def test_fold_ignores_the_dropout_of_blocks():
    layer = rotate_(nn.Linear(8, 6), block_size=2, dropout=0.5)
    perturb_(layer)
    x = torch.randn(3, 8)
    y = layer.eval()(x)
    torch.testing.assert_close(fold_(layer.train())(x), y)


def test_fold_rejects_a_keep_that_is_not_a_bool():
    model = rotate_(mlp())
    with left_unchanged(model), pytest.raises(ValueError, match="keep must be a bool, not 3"):
        fold_(model, keep=3)


def test_use_rotation_set_rejects_a_plain_model():
    model = mlp()
    with left_unchanged(model), pytest.raises(ValueError, match="model must be a rotated model"):
        use_rotation_set(model, "x")


def test_rotate_and_fold_reject_values_that_are_not_finite():
    model = mlp()
    with torch.no_grad():
        model[2].weight[3, 1] = float("nan")
    with pytest.raises(ValueError, match="the weight of layer '2' must be finite, but row 3 is not"):
        rotate_(model)
    assert not list(rotated_layers(model))
    model = rotate_(mlp())
    with torch.no_grad():
        rotation_parameters(model)[1][0] = float("inf")
    assert not torch.isfinite(model(torch.randn(2, 10))).any()  # training sees a loss that is not finite
    with pytest.raises(
        ValueError, match="layer '2': the parameters of a rotation must be finite, but 1 of 120 are not"
    ):
        fold_(model)
    assert len(list(rotated_layers(model))) == 2


def test_rotate_rejects_a_shared_weight():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="layer '0' must not share its weight, but it shares it with '1'"):
        rotate_(model)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("method", ["cayley", "gram_schmidt", "lowdin", "exponential"])
def test_rotate_blocks_act_on_groups_of_channels(shared, method):
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 5, 3)
    v = layer.weight.detach().clone()
    rotate_(layer, method, blocks=4, shared=shared)
    perturb_(layer)
    ((_, _, rotation),) = rotated_layers(layer)
    r = rotation.matrices()
    assert r.shape == ((18, 18) if shared else (4, 18, 18))
    for k in range(4):
        part = v[:, 2 * k : 2 * k + 2].flatten(1)
        expected = part @ (r if shared else r[k]).mT
        torch.testing.assert_close(layer.weight[:, 2 * k : 2 * k + 2].flatten(1), expected, atol=1e-5, rtol=0)
    assert rotation.degrees_of_freedom() == (1 if shared else 4) * 18 * 17 // 2
    x = torch.randn(2, 8, 9, 9)
    y = layer(x)
    torch.testing.assert_close(fold_(layer)(x), y, atol=1e-6, rtol=0)


@pytest.mark.parametrize("factors", [1, 2, 3])
def test_rotate_factors_multiply_permuted_block_diagonal_rotations(factors):
    torch.manual_seed(0)
    layer = nn.Linear(8, 5).double()
    v = layer.weight.detach().clone()
    rotate_(layer, "cayley", blocks=4, factors=factors)
    perturb_(layer, 0.5)
    ((_, _, rotation),) = rotated_layers(layer)
    blocks = rotation.matrices().reshape(factors, 4, 2, 2)
    product = torch.eye(8, dtype=torch.float64)
    for j in range(factors):
        r, step = torch.eye(8, dtype=torch.float64), 2**j
        firsts = [i for i in range(8) if not i // step % 2]  # pairs (i, i + step), as in a fast Fourier transform
        for block, i in zip(blocks[j], firsts, strict=True):
            pair = torch.tensor([i, i + step])
            r[pair.unsqueeze(1), pair] = block
        product = r @ product
    torch.testing.assert_close(layer.weight.detach(), v @ product.mT, atol=1e-12, rtol=0)
    assert rotation.degrees_of_freedom() == factors * 4
    g = torch.randn_like(v)
    (ours,) = torch.autograd.grad((layer.weight * g).sum(), rotation.parameter)
    numbers = rotation.parameter.detach().clone().requires_grad_()

    def value(numbers):
        w = v
        for j in range(factors):
            free = numbers[j] if factors > 1 else numbers
            w = rotation.layout.join(Cayley()(free, rotation.layout.split(w, j)), 5, j)
        return (w * g).sum()

    (theirs,) = torch.autograd.grad(value(numbers), numbers)
    torch.testing.assert_close(ours, theirs)
    if factors == 3:
        assert (product != 0).all()  # every entry depends on every other


def test_rotate_can_learn_and_normalize_neurons():
    torch.manual_seed(0)
    layer = rotate_(nn.Linear(12, 20), learn_neurons=True, normalize=True)
    torch.testing.assert_close(layer.weight.norm(dim=1), torch.ones(20))
    assert degrees_of_freedom(layer) == 12 * 11 // 2 + 12 * 20 + 20
    layer.weight.square().sum().backward()
    assert layer.parametrizations.weight.original.grad is not None
    with torch.no_grad():
        layer.parametrizations.weight.original.data[0, 0] += 5  # not counted by the version counter
    assert layer.weight[0].norm() > 2


def test_rotate_accepts_custom_modules_and_general_transforms():
    model, x = mlp(), torch.randn(4, 10)
    rotate_(model, lambda d: nn.Sequential(nn.Linear(d, d), nn.Tanh()))
    y = model(x)
    y.sum().backward()
    assert model[0].parametrizations.weight[0].transform[0].weight.grad.abs().sum() > 0
    torch.testing.assert_close(fold_(model)(x), y, atol=1e-6, rtol=0)
    for method in ("positive_definite", "triangular", "banded"):
        model = rotate_(mlp(), method)
        perturb_(model)
        y = model(x)
        y.sum().backward()
        torch.testing.assert_close(fold_(model)(x), y, atol=1e-6, rtol=0)


def test_rotate_spread_draws_the_initial_rotation():
    torch.manual_seed(0)
    layer = nn.Linear(32, 20)
    v = layer.weight.detach().clone()
    rotate_(layer, "gram_schmidt", spread=1.0)
    assert (layer.weight - v).abs().max() > 0.1
    torch.testing.assert_close(layer.weight @ layer.weight.mT, v @ v.mT, atol=1e-5, rtol=0)


def test_rotation_undoes_in_place_writes_to_the_weight():
    layer = rotate_(nn.Linear(5, 4))
    perturb_(layer)
    weight = layer.weight.detach().clone()
    with torch.no_grad():
        nn.init.zeros_(layer.weight)
    assert torch.equal(layer.weight, weight)


def test_rotate_accepts_objects_as_methods():
    model = rotate_(mlp(), GramSchmidt("iterative"))
    assert "iterative" in repr(model)


@pytest.mark.parametrize("seed", [None, 0])
def test_rotate_treats_an_input_rotation_as_output(seed):
    model = nn.ModuleDict({"net": mlp(), "head": InputRotation(AngularHead(3, 4), seed=seed)})
    rotate_(model)
    assert [name for name, _, _ in rotated_layers(model)] == ["net.0", "net.2", "net.4"]


def test_rotate_selects_layers_of_other_libraries_by_their_attributes():
    class CustomLayer(nn.Module):
        def __init__(self, *shape, **attributes):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(*shape))
            for name, value in attributes.items():
                setattr(self, name, value)

    norm = nn.LayerNorm([4, 8])
    model = nn.Sequential(
        CustomLayer(6, 4, in_features=4, out_features=6), CustomLayer(6, 4), norm, nn.Embedding(3, 4), mlp()
    )
    rotate_(model)
    assert [name for name, _, _ in rotated_layers(model)] == ["0", "4.0", "4.2"]
    model = nn.Sequential(CustomLayer(4, 6, nx=4, nf=6), mlp())
    rotate_(model)
    assert [name for name, _, _ in rotated_layers(model)] == ["0", "1.0", "1.2"]
    assert next(rotated_layers(model))[2].layout.size == 4  # a column is one neuron


@pytest.mark.parametrize("name", ["values", "training", "_keys", "a b", "", 3])
def test_use_rotation_set_rejects_invalid_names(name):
    model = rotate_(mlp())
    before = list(model.state_dict())
    with pytest.raises(ValueError, match="name must be an identifier that is not yet in use"):
        use_rotation_set(model, name, create=True)
    assert list(model.state_dict()) == before
    assert model(torch.randn(2, 10)).shape == (2, 3)


def test_use_rotation_set_rejects_unknown_names():
    model = rotate_(mlp())
    use_rotation_set(model, "second", create=True)
    with left_unchanged(model), pytest.raises(ValueError, match="name must be 'main' or 'second', or a new name with"):
        use_rotation_set(model, "secnod")


# Folding, rotation sets, saving and loading --------------------------------------------------------------------------


def test_fold_with_keep_preserves_outputs_and_parameters():
    model = rotate_(mlp(), "lowdin")
    perturb_(model)
    x, parameters = torch.randn(4, 10), rotation_parameters(model)
    y = model(x)
    fold_(model, keep=True)
    torch.testing.assert_close(model(x), y, atol=1e-6, rtol=0)
    assert all(a is b for a, b in zip(parameters, rotation_parameters(model), strict=True))
    assert rotation_states(model)["0"].energy_drift == 0
    assert torch.equal(parameters[0].detach(), torch.eye(10))


@pytest.mark.parametrize("kind", LAYERS)
def test_fold_returns_exactly_the_weight_of_the_rotated_layer(kind):
    torch.manual_seed(1)
    layer = rotate_(LAYERS[kind]()[0], "lowdin")
    perturb_(layer, 0.5)
    rotated = layer.weight.detach().clone()
    assert torch.equal(fold_(layer).weight, rotated)


@pytest.mark.parametrize("kind", LAYERS)
def test_fold_with_keep_rounds_a_weight_of_float64(kind):
    torch.manual_seed(1)
    layer = rotate_(LAYERS[kind]()[0], "lowdin")
    perturb_(layer, 0.5)
    expected = copy.deepcopy(layer).double().weight.float()
    fold_(layer, keep=True)
    assert torch.equal(layer.parametrizations.weight.original, expected)


def test_use_rotation_set_switches_between_sets():
    model, x = rotate_(mlp()), torch.randn(4, 10)
    start = model(x)
    use_rotation_set(model, "other", create=True)
    torch.testing.assert_close(model(x), start)
    with torch.no_grad():
        model[0].parametrizations.weight[0].parameter.add_(0.3)
    rotated = model(x)
    assert (rotated - start).abs().max() > 1e-3
    use_rotation_set(model, "main")
    assert torch.equal(model(x), start)
    use_rotation_set(model, "other")
    with pytest.raises(ValueError, match="layer '0': model must be rotated by a single rotation set"):
        fold_(model, keep=True)
    torch.testing.assert_close(fold_(model)(x), rotated, atol=1e-6, rtol=0)


def test_use_rotation_set_is_stored_in_the_state_dict():
    model, x = rotate_(mlp()), torch.randn(4, 10)
    assert not any("active" in key for key in model.state_dict())  # one set needs no name
    use_rotation_set(model, "other", create=True)
    perturb_(model)
    rotated, state = model(x), model.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    use_rotation_set(model, "main")
    assert (model(x) - rotated).abs().max() > 1e-3
    model.load_state_dict(state)
    assert torch.equal(model(x), rotated)
    assert torch.equal(copy.deepcopy(model)(x), rotated)
    fresh = rotate_(mlp())
    for strict in (True, False):
        with pytest.raises(
            RuntimeError,
            match=r"'other' in use, but there is only 'main': call use_rotation_set\(model, 'other', create=True\)",
        ):
            fresh.load_state_dict(state, strict=strict)
    use_rotation_set(fresh, "other", create=True)
    use_rotation_set(fresh, "main")
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x), rotated)
    use_rotation_set(model, "main")
    rest = rotate_(mlp()).load_state_dict(model.state_dict(), strict=False)
    assert [key.rsplit(".", 1)[1] for key in rest.unexpected_keys] == ["other", "other"]


def test_fold_and_measure_use_the_cpu_if_a_device_has_no_float64(monkeypatch):
    model, expected, x = mlp(), mlp(), torch.randn(4, 10)
    for m in (model, expected):
        Stochastic(m, 0.5, every=1, generator=torch.Generator().manual_seed(0)).step()
        rotate_(m[4], "lowdin")
        perturb_(m)
    fold_(expected, keep=True)
    errors = rotation_states(expected)
    double, host, hosted = torch.Tensor.double, torch.Tensor.cpu, []

    def without_float64(tensor):
        if not any(tensor is other for other in hosted):
            raise TypeError("this device has no float64")
        return double(tensor)

    def to_host(tensor):
        hosted.append(host(tensor).clone())
        return hosted[-1]

    monkeypatch.setattr(torch.Tensor, "double", without_float64)
    monkeypatch.setattr(torch.Tensor, "cpu", to_host)
    fold_(model, keep=True)
    assert hosted
    assert rotation_states(model) == errors
    monkeypatch.undo()
    torch.testing.assert_close(model(x), expected(x), atol=0, rtol=0)


LOAD_IN_NEW_PROCESS = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from rotation.samples import mlp
from hypersphere.rotation import Stochastic, fold_, rotate_, use_rotation_set

def several(model):
    rotate_(model)
    for name in ("third", "second", "main"):
        use_rotation_set(model, name, create=True)

saved = torch.load(sys.argv[1])
makers = {"full": lambda m: rotate_(m, "gram_schmidt"), "partial": lambda m: Stochastic(m, 0.5, 3), "several": several}
for key, convert in makers.items():
    model = mlp()
    convert(model)
    model.load_state_dict(saved[key])
    torch.testing.assert_close(model(saved["x"]), saved[key + "_y"], atol=1e-6, rtol=0)
    torch.testing.assert_close(fold_(model)(saved["x"]), saved[key + "_y"], atol=1e-6, rtol=0)
print("same")
"""


@pytest.mark.slow
def test_rotated_models_can_be_loaded_in_another_process_and_folded(tmp_path):
    saved = {"x": torch.randn(4, 10)}
    full, partial, several = rotate_(mlp(), "gram_schmidt"), mlp(), rotate_(mlp())
    stochastic = Stochastic(partial, 0.5, 3)
    for name in ("second", "third", "second"):  # the state dict also stores the name of the active set
        use_rotation_set(several, name, create=True)
    for key, model in (("full", full), ("partial", partial), ("several", several)):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(7):
            optimizer.zero_grad()
            model(saved["x"]).square().sum().backward()
            optimizer.step()
            if key == "partial":
                stochastic.step(optimizer)
        saved |= {key: model.state_dict(), key + "_y": model(saved["x"]).detach()}
    torch.save(saved, tmp_path / "model.pt")
    tests = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", LOAD_IN_NEW_PROCESS, str(tmp_path / "model.pt"), tests],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "same", done.stderr


# Layers that are not rotated -----------------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.classifier = nn.Linear(6, 4)

    def forward(self, tokens):
        return self.classifier(self.lstm(self.encoder(self.embedding(tokens)))[0])


def test_rotate_reports_layers_that_it_leaves_unchanged(capsys):
    torch.manual_seed(0)
    model, tokens = Tagger(), torch.randint(20, (3, 5))
    before = model(tokens)
    message = (
        r"8 layers are not rotated \(lstm.weight_ih_l0.i, .*, …\); rotate_\(\.\.\., report=True\) prints the reason"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        rotate_(model, report=True)
    assert caught[0].filename == __file__
    report = capsys.readouterr().out
    assert [name for name, _, _ in rotated_layers(model)] == [
        "encoder.self_attn.q",
        "encoder.self_attn.k",
        "encoder.self_attn.v",
        "encoder.self_attn.out_proj",
        "encoder.linear1",
        "encoder.linear2",
    ]
    assert "lstm.weight_ih_l0.i: LSTM passes its stored weights to torch, and not the parametrised ones" in report
    assert "embedding: it is an embedding, which needs embeddings=True" in report
    assert "classifier: it is the output layer, which needs output=True" in report
    torch.testing.assert_close(model(tokens), before)
    perturb_(model)
    after = model(tokens)
    assert (after - before).abs().max() > 1e-4
    after.sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in rotation_parameters(model))
    torch.testing.assert_close(fold_(model)(tokens), after, atol=1e-5, rtol=0)


def test_rotate_needs_the_name_of_an_output_layer_that_cannot_be_recognised():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.answer = nn.ModuleDict({"last": nn.Linear(6, 3)})
            self.body = nn.ModuleDict({"first": nn.Linear(4, 6)})

    with pytest.warns(UserWarning, match="no output layer was recognised in Net") as caught:
        rotate_(Net())
    assert caught[0].filename == __file__
    model = rotate_(Net(), output_layer="answer.last")
    assert [name for name, _, _ in rotated_layers(model)] == ["body.first"]
    with pytest.raises(ValueError, match="output_layer must be 'auto', None or one of"):
        rotate_(Net(), output_layer="nonsense")
    with pytest.raises(ValueError, match=r"^output_layer must be 'auto', None, a name or several names, not 3$"):
        Stochastic(Net(), output_layer=3)


def test_rotate_names_the_layer_whose_generator_is_too_large():
    model = rotate_(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)))
    with torch.no_grad():
        rotation_parameters(model)[0].fill_(1e20)
    with pytest.raises(
        ValueError, match=r"layer '0': the generator of a Cayley rotation must have a norm below 1e\+12"
    ):
        model(torch.randn(2, 5))


def test_deprecated_names_of_rotation_still_work():
    from hypersphere import rotation

    model = mlp()
    with pytest.warns(DeprecationWarning, match="use rotation.rotatable_layers"):
        assert [name for name, _ in rotation.select(model)] == ["0", "2"]
    with pytest.warns(DeprecationWarning, match="refine_neurons"):
        assert rotation.refined is rotation.refine_neurons


@pytest.mark.parametrize("name", ["shared", "learn_neurons", "normalize", "output", "embeddings", "report"])
def test_rotate_requires_bools_and_leaves_the_model_unchanged(name):
    model = mlp()
    with left_unchanged(model), pytest.raises(ValueError, match=rf"^{name} must be a bool.*, not 3$"):
        rotate_(model, **{name: 3})


def test_block_layout_accepts_old_names():
    layout = BlockLayout(size=12, blocks=4, factors=1)
    with pytest.warns(DeprecationWarning, match="use BlockLayout.block_size"):
        assert layout.block == layout.block_size == 3
    with pytest.warns(DeprecationWarning, match="use BlockLayout.matrix_count"):
        assert layout.matrices == layout.matrix_count == 4


def test_use_creates_rotation_sets_as_in_version_0_1():
    model = rotate_(mlp())
    with pytest.warns(DeprecationWarning, match="use rotation.use_rotation_set"):
        hs.rotation.use(model, "second")
    assert set(model[0].parametrizations.weight[0].free) == {"main", "second"}


@pytest.mark.parametrize(("old", "new"), [("Layout", BlockLayout), ("measure", rotation_states)])
def test_rotation_accepts_old_names(old, new):
    with pytest.warns(DeprecationWarning, match=f"use hypersphere.rotation.{new.__name__}"):
        assert getattr(hs.rotation, old) is new
