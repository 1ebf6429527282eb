"""Rotations of neurons that are stored as 8-bit integers."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from hypersphere._layer_selection import WeightPart
from hypersphere.energy import MHE
from hypersphere.rotation import (
    Stochastic,
    fold_,
    load_adapter,
    rotate_,
    rotated_layers,
    rotation_parameters,
    save_adapter,
)
from hypersphere.rotation._quantized import Int8Neurons, int8_linear

from .samples import mlp, perturb_


def test_int8_neurons_are_the_nearest_integers_with_one_scale_per_row():
    weight = torch.randn(5, 7) * torch.tensor([[1.0], [1e-3], [0.0], [1e4], [2.0]])
    integers, scale = Int8Neurons(WeightPart()).right_inverse(weight)
    v = weight.double().numpy()
    for row, q, s in zip(v, integers.numpy(), scale.double().numpy(), strict=True):
        if not row.any():
            assert not q.any()
            continue
        assert s[0] == pytest.approx(np.abs(row).max() / 127, rel=1e-6)
        nearest = [min(range(-127, 128), key=lambda i: abs(i * s[0] - entry)) for entry in row]
        assert q.tolist() == nearest
        assert np.abs(q * s[0] - row).max() <= np.abs(row).max() / 254 * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_int8_neurons_of_each_dtype_have_the_same_relative_error(dtype):
    weight = torch.randn(32, 512).to(dtype)
    quantizer = Int8Neurons(WeightPart())
    integers, scale = quantizer.right_inverse(weight)
    restored = quantizer(integers, scale)
    assert restored.dtype == scale.dtype == dtype
    assert (restored.double() - weight.double()).norm() < 1e-2 * weight.double().norm()


@pytest.mark.parametrize(
    ("part", "shape", "scales"),
    [
        (WeightPart(orientation="columns"), (6, 4), (1, 4)),
        (WeightPart(orientation="transposed"), (6, 4, 3, 3), (1, 4, 1, 1)),
        (WeightPart(), (6, 4, 3, 3), (6, 1, 1, 1)),
        (WeightPart(groups=2, stacked=True), (2, 6, 4), (2, 6, 1)),
        (WeightPart(groups=2, stacked=True, orientation="columns"), (2, 6, 4), (2, 1, 4)),
    ],
)
def test_int8_neurons_have_one_scale_per_neuron_in_every_orientation(part, shape, scales):
    weight = torch.randn(shape)
    integers, scale = Int8Neurons(part).right_inverse(weight)
    assert (integers.shape, scale.shape) == (shape, scales)
    assert (integers * scale - weight).abs().max() <= scale.max() / 2 * (1 + 1e-5)


@pytest.mark.parametrize("side", ["weight", "input"])
def test_quantized_rotation_is_close_to_the_rotation_of_the_exact_neurons(side):
    model, x = nn.Linear(48, 64), torch.randn(20, 48, requires_grad=True)
    exact = rotate_(copy.deepcopy(model), block_size=4, side=side, output=True)
    rotate_(model, block_size=4, side=side, quantize="int8", output=True)
    for one in (model, exact):
        perturb_(one)
    y, expected = model(x), exact(x)
    assert (y - expected).norm() < 1e-2 * expected.norm()
    gradients = [
        torch.autograd.grad(out.square().sum(), [x, *rotation_parameters(m)])
        for out, m in ((y, model), (expected, exact))
    ]
    for a, b in zip(*gradients, strict=True):
        assert (a - b).norm() < 2e-2 * b.norm()
    assert all(p.dtype == torch.float32 for p in rotation_parameters(model))


def test_quantized_sides_agree_and_keep_no_float_neurons_on_the_input_side():
    layer, x = nn.Linear(64, 96), torch.randn(16, 64, requires_grad=True)
    results = []
    for side in ("weight", "input"):
        rotated = rotate_(copy.deepcopy(layer), block_size=8, side=side, quantize="int8", output=True)
        perturb_(rotated, 0.1)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            y = rotated(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *rotation_parameters(rotated)])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)
    assert not any(t.is_floating_point() and t.numel() == 64 * 96 for t in saved)  # of side="input"


def test_int8_linear_passes_gradcheck_and_works_in_transforms():
    integers = torch.randint(-127, 128, (5, 4), dtype=torch.int8)
    scale, bias = torch.rand(5, 1, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: int8_linear(x, integers, scale, bias), x)
    assert torch.autograd.gradgradcheck(lambda x: int8_linear(x, integers, scale, bias).square(), x)
    expected = x @ (integers * scale).T + bias
    torch.testing.assert_close(torch.func.vmap(lambda row: int8_linear(row, integers, scale, bias))(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert int8_linear(x.float(), integers, scale.float(), None).dtype == torch.bfloat16


def test_quantized_models_are_stored_in_a_quarter_and_loaded_again():
    def stored(model):
        tensors = [t for name, t in model.state_dict().items() if "original" in name or name.endswith("weight")]
        return sum(t.numel() * t.element_size() for t in tensors)

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Conv2d(64, 32, 3), nn.Linear(128, 2))

    model, twin = (rotate_(make(), block_size=8, quantize="int8", output_layer="3") for _ in range(2))
    plain = stored(make()) - 4 * 256
    assert 0.25 < (stored(model) - 4 * 256) / plain < 0.27
    perturb_(model)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(3, 256)
    assert torch.equal(twin[0](x), model[0](x))
    half = copy.deepcopy(model).bfloat16()
    assert half[0].weight.dtype == torch.bfloat16
    torch.testing.assert_close(half[0].weight.float(), model[0].weight, atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("frozen", [False, True])
def test_quantized_layers_fold_to_plain_parameters(frozen):
    model, x = mlp(), torch.randn(4, 10)
    model[0].weight.requires_grad_(False)
    plain = copy.deepcopy(model)
    rotate_(model, quantize="int8")
    perturb_(model)
    for p in rotation_parameters(model):
        p.requires_grad_(not frozen)
    y = model(x)
    with pytest.raises(ValueError, match="keep=True needs neurons in floating point, but layer '0' has quant"):
        fold_(model, keep=True)
    torch.testing.assert_close(fold_(model)(x), y, atol=1e-6, rtol=1e-5)
    state = [(n, type(p), p.dtype, p.requires_grad, p.is_leaf) for n, p in model.named_parameters()]
    assert state == [(n, type(p), p.dtype, p.requires_grad, p.is_leaf) for n, p in plain.named_parameters()]
    assert not list(rotated_layers(model))
    assert not list(model.buffers())


def test_stochastic_and_custom_transforms_on_and_with_quantized_neurons():
    model, x = rotate_(mlp(), lambda d: nn.Linear(d, d), quantize="int8"), torch.randn(4, 10)
    y = model(x)
    torch.testing.assert_close(fold_(model)(x), y, atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="it is parametrised already"):
        Stochastic(rotate_(mlp(), quantize="int8"))


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("method", ["cayley", "free"])
def test_energy_of_rotated_layers_warns_if_neurons_are_quantised_or_not(quantize, method):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    rotate_(model, method, quantize=quantize, where=lambda name, module: name == "0")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MHE(model)
    message = "rotations do not change the angles between neurons, so the regulariser is constant in 0"
    assert [str(w.message) for w in caught] == ([message] if method == "cayley" else [])


def test_adapters_of_quantised_models_load_into_the_plain_base_model(tmp_path):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 4), nn.MultiheadAttention(4, 2)).requires_grad_(False)
    model = rotate_(copy.deepcopy(base), quantize="int8", spread=0.1, output_layer=None)
    save_adapter(model, tmp_path)
    loaded = load_adapter(copy.deepcopy(base), tmp_path)
    for name in ("0.weight", "1.in_proj_weight"):
        module, parameter = name.split(".")
        assert torch.equal(getattr(loaded[int(module)], parameter), getattr(model[int(module)], parameter))
    assert loaded[0].parametrizations.weight.original0.dtype == torch.int8
    base[0].weight.data[0] *= 1.1
    with pytest.raises(ValueError, match=r"^model must be the base model of the adapter, but 1 of 5 weights differ"):
        load_adapter(base, tmp_path)
