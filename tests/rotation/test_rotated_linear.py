"""Rotating the input of a linear layer gives the outputs and gradients of rotating its weight."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrize

from hypersphere.functions.orthogonal import Cayley
from hypersphere.rotation import BlockLayout, fold_, rotate_, rotated_layers
from hypersphere.rotation._rotated_linear import (
    _CayleySide,
    _InputSide,
    rotated_linear,
    rotating_input_and_output_is_cheaper,
    rotating_input_is_cheaper,
)

from .samples import perturb_

LAYOUTS = [
    BlockLayout(8, 4),
    BlockLayout(8, 4, shared=True),
    BlockLayout(16, 4, factors=3),
    BlockLayout(16, 4, shared=True, factors=2),
]
OPTIONS = [
    {"block_size": 4},
    {"block_size": 4, "shared": True},
    {"block_size": 4, "factors": 2},
    {"block_size": 4, "method": "exponential"},
    {"block_size": 4, "learn_neurons": True},
]


def problem(layout, dtype=torch.float64):
    torch.manual_seed(0)
    shape = layout.expand(torch.zeros(layout.block_size, layout.block_size)).shape
    tensors = torch.randn(5, layout.size), torch.randn(shape), torch.randn(3, layout.size)
    return [t.to(dtype).requires_grad_() for t in tensors]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_rotated_linear_passes_gradcheck_and_gradgradcheck(layout):
    x, matrices, v = problem(layout)
    torch.testing.assert_close(_InputSide.apply(layout, x, matrices, v), x @ layout.rotate_rows(matrices, v).mT)
    assert gradcheck(lambda *inputs: _InputSide.apply(layout, *inputs), (x, matrices, v))
    assert gradgradcheck(lambda *inputs: _InputSide.apply(layout, *inputs), (x, matrices, v))


@pytest.mark.slow
# Fewer rows than a block has entries, and more.
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("layout", [BlockLayout(8, 2), BlockLayout(12, 2, shared=True), BlockLayout(15, 3)], ids=repr)
@pytest.mark.parametrize("bound", [None, 0.05])
def test_cayley_linear_passes_gradcheck_and_gradgradcheck(rows, layout, bound):
    torch.manual_seed(0)
    method = Cayley(bound)
    x, v = torch.randn(rows, layout.size).double(), torch.randn(3, layout.size).double()
    free = 0.05 * torch.randn(layout.expand(method.identity(layout.block_size)).shape).double()
    inputs = [t.requires_grad_() for t in (x, free, v)]

    def output(x, free, v):
        bounded, series = method.series(free)
        return _CayleySide.apply(layout, x, bounded, v, *series)

    # Independent: R = (I+S)(I−S)⁻¹ by an inverse, as one block-diagonal matrix.
    s = method.generator(free.detach())
    r = (torch.eye(s.shape[-1]) + s) @ torch.linalg.inv(torch.eye(s.shape[-1]) - s)
    full = torch.block_diag(*([r] * layout.blocks if layout.shared else r))
    torch.testing.assert_close(output(*inputs), x @ full @ v.mT, rtol=1e-10, atol=1e-12)
    assert gradcheck(output, inputs)
    if bound is None:
        assert gradgradcheck(output, inputs)


def test_cayley_linear_computes_only_the_gradients_that_are_needed():
    layer = rotate_(nn.Linear(16, 12), block_size=8, side="input", output=True)
    perturb_(layer, 0.1)
    for rows in (3, 20):
        x = torch.randn(rows, 16, requires_grad=True)
        (rotation,) = [rotation for _, _, rotation in rotated_layers(layer)]
        both = torch.autograd.grad(layer(x).square().sum(), [x, rotation.parameter])
        assert torch.equal(torch.autograd.grad(layer(x).square().sum(), x)[0], both[0])
        assert torch.equal(torch.autograd.grad(layer(x.detach()).square().sum(), rotation.parameter)[0], both[1])


def test_rotated_linear_computes_chunks_of_any_number_of_rows():
    layout = BlockLayout(8, 2)
    for rows in (0, 1, 255, 256, 257, 600):
        x, matrices, v = torch.randn(rows, 8), torch.randn(2, 4, 4, requires_grad=True), torch.randn(3, 8)
        weight = layout.rotate_rows(matrices, v)
        y = rotated_linear(x, matrices, v, None, layout)
        torch.testing.assert_close(y, x @ weight.mT, atol=1e-5, rtol=1e-5)
        (ours,) = torch.autograd.grad(y.square().sum(), matrices)
        (expected,) = torch.autograd.grad((x @ weight.mT).square().sum(), matrices)
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("shape", [(16,), (7, 16), (2, 3, 16), (0, 16)])
def test_rotate_sides_give_equal_outputs_and_gradients(options, shape):
    torch.manual_seed(0)
    options = dict(options)
    method = options.pop("method", "cayley")
    plain, x = nn.Linear(16, 12), torch.randn(shape, requires_grad=True)
    results = []
    for side in ("weight", "input", "auto"):
        layer = rotate_(copy.deepcopy(plain), method, side=side, output=True, **options)
        torch.manual_seed(1)
        perturb_(layer, 0.1)
        y = layer(x)
        trained = [p for p in layer.parameters() if p.requires_grad]
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *trained])])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotate_half_precision_layers_keep_float32_parameters(dtype):
    torch.manual_seed(0)
    layer = nn.Linear(16, 12).to(dtype)
    exact = rotate_(copy.deepcopy(layer).double(), block_size=4, output=True)
    rotate_(layer, block_size=4, side="input", output=True)
    ((_, _, rotation),), ((_, _, reference),) = rotated_layers(layer), rotated_layers(exact)
    assert rotation.parameter.dtype == torch.float32
    with torch.no_grad():
        reference.parameter.normal_(std=0.1)
        rotation.parameter.copy_(reference.parameter)
    x = torch.randn(9, 16, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact(x.double()), atol=0.05, rtol=0.02)
    (gradient,) = torch.autograd.grad(y.float().square().sum(), rotation.parameter)
    (expected,) = torch.autograd.grad(exact(x.double()).square().sum(), reference.parameter)
    assert (gradient.double() - expected).norm() < 0.05 * expected.norm()


def test_rotate_input_side_works_under_autocast():
    torch.manual_seed(0)
    layer = rotate_(nn.Linear(16, 12), block_size=4, side="input", output=True)
    perturb_(layer, 0.1)
    x = torch.randn(9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), atol=0.05, rtol=0.05)
    y.float().sum().backward()
    assert all(p.grad is not None for p in layer.parameters() if p.requires_grad)


def test_rotate_input_side_folds_copies_and_reads_the_rotated_weight():
    torch.manual_seed(0)
    plain, x = nn.Linear(16, 12), torch.randn(5, 16)
    layer = rotate_(copy.deepcopy(plain), block_size=4, side="input", output=True)
    perturb_(layer, 0.1)
    y = layer(x)
    torch.testing.assert_close(x @ layer.weight.mT + layer.bias, y, atol=1e-5, rtol=1e-5)
    other = copy.deepcopy(layer)
    fold_(layer)
    assert type(layer) is nn.Linear
    torch.testing.assert_close(layer(x), y, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other(x), y, atol=0, rtol=0)
    assert nn.Linear.forward is plain.forward.__func__  # no other layer is affected


def test_rotate_input_side_keeps_only_the_input_for_backward():
    layer, x = rotate_(nn.Linear(64, 64), block_size=8, side="input", output=True), torch.randn(512, 64)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        layer(x)
    assert sum(size == x.numel() for size in sizes) == 1
    assert max(sizes) == x.numel()


def test_rotate_dropout_replaces_blocks_by_the_identity_in_training():
    torch.manual_seed(0)
    layer = rotate_(nn.Linear(400, 3, bias=False), block_size=4, dropout=0.3, side="input", output=True)
    perturb_(layer, 0.5)
    neurons = layer.parametrizations.weight.original
    kept = torch.stack([(layer.weight - neurons).view(3, 100, 4).abs().amax((0, 2)) < 1e-6 for _ in range(20)])
    assert 0.25 < kept.float().mean() < 0.35
    assert 0 < kept.float().mean(0).amin() < kept.float().mean(0).amax() < 1  # other blocks at every read
    torch.testing.assert_close(layer.eval()(neurons), neurons @ layer.weight.mT, atol=1e-4, rtol=1e-4)
    assert not ((layer.weight - neurons).view(3, 100, 4).abs().amax((0, 2)) < 1e-6).any()


def test_rotating_input_is_cheaper_unless_the_weight_is_reused_or_has_few_rows():
    layout = BlockLayout(1024, 32)
    assert rotating_input_is_cheaper(64, 1024, layout, x_needs_grad=True, trains=True)
    assert rotating_input_is_cheaper(64, 1024, layout, x_needs_grad=False, trains=False)
    assert not rotating_input_is_cheaper(4096, 1024, layout, x_needs_grad=False, trains=False)
    assert not rotating_input_is_cheaper(4096, 16, layout, x_needs_grad=True, trains=True)
    assert not rotating_input_is_cheaper(64, 1024, BlockLayout(1024), x_needs_grad=True, trains=True)
    with parametrize.cached():
        assert not rotating_input_is_cheaper(64, 1024, layout, x_needs_grad=False, trains=False)


def test_rotating_input_and_output_is_cheaper_unless_the_weight_is_reused():
    blocks = BlockLayout(1024, 16)
    shape = (1024, 1024)
    assert rotating_input_and_output_is_cheaper(64, shape, blocks, blocks, x_needs_grad=True, trains=True)
    assert rotating_input_and_output_is_cheaper(10**6, shape, blocks, blocks, x_needs_grad=True, trains=True)
    assert not rotating_input_and_output_is_cheaper(4096, shape, blocks, blocks, x_needs_grad=False, trains=False)
    with parametrize.cached():
        assert not rotating_input_and_output_is_cheaper(64, shape, blocks, blocks, x_needs_grad=False, trains=False)
