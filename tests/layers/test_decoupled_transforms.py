"""Decoupled layers under `torch.compile`, `torch.func`, forward-mode differentiation, checkpointing and export."""

import copy
import warnings

import pytest
import torch
from benchmarks.host_syncs import count, layer_steps
from benchmarks.layers import OPERATORS
from torch import nn
from torch.autograd import gradgradcheck
from torch.utils.checkpoint import checkpoint

from hypersphere.functions._recomputation import REMEMBERED_PASSES
from hypersphere.layers import DecoupledLinear, SphereNorm

from .cases import conv, every_kind, images, run


@pytest.mark.slow
@every_kind
def test_decoupled_compiles_in_one_graph(kind):
    layer, x = conv(kind), images(2, 4, 5, 5)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    (y, gradients), (expected, expected_gradients) = run(compiled, x), run(layer, x)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_decoupled_compiles_with_inductor():
    layer, x = conv("tanh", angular="sigmoid"), images(2, 4, 5, 5)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True)
    (y, gradients), (expected, expected_gradients) = run(compiled, x), run(layer, x)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_decoupled_per_sample_gradients_by_vmap():
    layer, x = conv("tanh").eval(), images(3, 4, 5, 5)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    buffers = dict(layer.named_buffers())

    def loss(parameters, x):
        return torch.func.functional_call(layer, (parameters, buffers), (x.unsqueeze(0),)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)["weight"]
    layer(x).square().sum().backward()
    torch.testing.assert_close(each.sum(0), layer.weight.grad, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tanh", "sigmoid"])
def test_decoupled_exports_to_onnx(kind, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript (extra 'onnx') is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime (extra 'onnx') is not installed")
    model = nn.Sequential(conv(kind, stride=2), nn.ReLU(), SphereNorm(nn.Conv2d(6, 5, 3), rescale="learned")).eval()
    x = images(2, 4, 12, 12)
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert abs(y - model(x).detach().numpy()).max() <= 1e-5


@every_kind
def test_decoupled_forward_mode_agrees_with_reverse_mode(kind):
    layer = conv(kind).double().eval()
    x, direction = images(2, 4, 5, 5).double(), images(2, 4, 5, 5, seed=3).double()
    grad = images(2, 6, 5, 5, seed=4).double()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    y, from_func = torch.func.jvp(layer, (x,), (direction,))
    torch.testing.assert_close(from_func, tangent)
    leaf = x.clone().requires_grad_()
    (grad_x,) = torch.autograd.grad(layer(leaf), leaf, grad)
    torch.testing.assert_close((tangent * grad).sum(), (grad_x * direction).sum())
    torch.testing.assert_close(y, layer(x))


@every_kind
def test_decoupled_transforms_of_a_training_layer_leave_its_state(kind):
    layer = conv(kind)
    parameters, x = {n: p.detach() for n, p in layer.named_parameters()}, images(3, 4, 5, 5)
    state = copy.deepcopy(layer.state_dict())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x.unsqueeze(0),)).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    assert all(torch.isfinite(g).all() for g in gradients.values())
    assert all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), state.values(), strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["tanh", "seg", "separate"])
def test_decoupled_checkpointing_moves_the_running_mean_once(kind, use_reentrant):
    def train(use_checkpoint):
        layer = conv(kind)
        total = 0
        for scale in (1.0, 4.0):  # two forward passes before one backward pass
            x = (scale * images(2, 4, 5, 5)).requires_grad_()
            y = checkpoint(layer, x, use_reentrant=use_reentrant) if use_checkpoint else layer(x)
            total = total + y.square().sum()
        total.backward()
        return [p.grad for p in layer.parameters()], layer.mean_norm, layer.num_batches_tracked

    for ours, theirs in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_decoupled_checkpointing_recalls_the_newest_pass_with_the_same_batch():
    def train(use_checkpoint):
        layer, grads = conv("tanh", momentum=0.5), []
        for scale in (1.0, 4.0, 1.0):  # the third step repeats the batch of the first, with another running mean
            x = (scale * images(2, 4, 5, 5)).requires_grad_()
            y = checkpoint(layer, x, use_reentrant=False) if use_checkpoint else layer(x)
            grads += torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        return grads

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)


@pytest.mark.parametrize("radius_norm", ["running", "batch"])
def test_decoupled_checkpointing_warns_once_of_a_pass_that_is_not_remembered(radius_norm):
    layer = DecoupledLinear(4, 3, magnitude="tanh", learn_radius="layer", radius_norm=radius_norm)

    def backward(passes):
        outputs = [checkpoint(layer, torch.randn(5, 4), use_reentrant=False) for _ in range(passes)]
        torch.stack(outputs).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(REMEMBERED_PASSES)
        if radius_norm == "batch":  # no pass uses the running mean
            backward(REMEMBERED_PASSES + 1)
            return
    message = (
        "^a forward pass that activation checkpointing repeats was not recognised by its input, so its gradient uses "
        "the current running mean: the last 8 passes of a module are remembered, and a repeated pass must have the "
        "same input$"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        backward(REMEMBERED_PASSES + 3)
    assert len(caught) == 1


@pytest.mark.parametrize("name", OPERATORS)
def test_decoupled_step_does_not_synchronise_with_the_host(name, monkeypatch):
    step = layer_steps()[name]
    assert count(step).total == 0

    # A dispatch mode does not see operations inside a custom operator, so the methods that read values are blocked too.
    def fail(*_):
        raise AssertionError("a value was read")

    for method in ("item", "tolist", "nonzero", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, method, fail)
    step()


@pytest.mark.parametrize("magnitude", ["tanh", "seg"])
def test_decoupled_counts_each_path_once_when_one_input_depends_on_another(magnitude):
    options = {"magnitude": magnitude, "learn_radius": "filter", "angular": "sigmoid", "learn_k": "layer"}
    layer = DecoupledLinear(4, 6, dtype=torch.float64, radius_norm="batch", **options)

    def loss(weight):
        # The radius depends on the mean norm of the batch, and the batch on the filters.
        return torch.func.functional_call(layer, {"weight": weight}, (weight**2,)).square().sum()

    weight = layer.weight.detach().requires_grad_()
    (first,) = torch.autograd.grad(loss(weight), weight)
    (twice_differentiable,) = torch.autograd.grad(loss(weight), weight, create_graph=True)
    torch.testing.assert_close(twice_differentiable, first)
    assert gradgradcheck(loss, weight, atol=1e-4, fast_mode=True)
