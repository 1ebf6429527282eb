"""Hard inputs, number types, memory formats, compilers, export, state."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hypersphere.functions.angular import Linear, Sigmoid
from hypersphere.functions.magnitude import Ball, Tanh
from hypersphere.layers import DecoupledConv2d, DecoupledLinear, SphereNorm, shared_k

KINDS = {
    "sphere": {},
    "ball": {"magnitude": "ball"},
    "tanh": {"magnitude": "tanh", "learn_radius": "layer"},
    "linear angle": {"angular": "linear"},
    "sigmoid": {"angular": "sigmoid", "learn_k": "filter"},
    "seg": {"magnitude": "seg", "angular": "square_cosine", "learn_radius": "filter"},
    "joint": {"magnitude": "tanh", "weighting": "joint", "angular": "linear"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def conv(kind="sphere", inputs=4, filters=6, **more):
    torch.manual_seed(5)
    return DecoupledConv2d(inputs, filters, 3, padding=1, **(KINDS[kind] | more))


def images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(layer, x):
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    pull = images(*y.shape, seed=7).to(y.dtype)
    return y, torch.autograd.grad((y * pull).sum(), [x, *layer.parameters()])


@every_kind
@pytest.mark.parametrize("level", [0.0, 1.0, -3.0])
def test_constant_images(kind, level):
    y, gradients = run(conv(kind), torch.full((2, 4, 5, 5), level))
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(g).all() for g in gradients)


@every_kind
def test_zero_patches_among_others_have_no_gradient(kind):
    layer = conv(kind, bias=False)
    x = images(2, 4, 9, 9)
    x[:, :, :, 5:] = 0
    x = x.requires_grad_()
    y = layer(x)
    assert torch.isfinite(y).all()
    (gradient,) = torch.autograd.grad(y[..., 7:].sum(), x)  # patches that are all zero
    assert gradient.abs().max() == 0
    if not isinstance(layer.angular, (Linear, Sigmoid)):
        assert y[..., 7:].abs().max() == 0


def test_zero_filter():
    layer = conv()
    with torch.no_grad():
        layer.weight[0] = 0
    y, gradients = run(layer, images(2, 4, 5, 5))
    assert torch.equal(y[:, 0], layer.bias[0].expand_as(y[:, 0]))
    assert all(torch.isfinite(g).all() for g in gradients)
    assert gradients[1][0].abs().max() == 0


@pytest.mark.parametrize("size", [1e20, 1e-20, 1e30, 1e-28])
@pytest.mark.parametrize("g", ["cosine", "linear"])
def test_huge_and_tiny_images_keep_their_directions(size, g):
    layer, x = conv(angular=g, bias=False), images(2, 4, 5, 5)
    mixed = torch.stack([x[0] * size, x[1]])  # an ordinary image beside it stays what it is
    y, (to_x, _) = run(layer, mixed)
    expected, (to_expected, _) = run(layer, x)
    torch.testing.assert_close(y, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(to_x[0] * size, to_expected[0], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(to_x[1], to_expected[1], atol=2e-4, rtol=2e-4)


def test_huge_half_precision_rows():
    layer = DecoupledLinear(64, 8, bias=False).half()
    x = (images(3, 64).sign() * 4e4).half()
    expected = copy.deepcopy(layer).double()(x.double())
    torch.testing.assert_close(layer(x).double(), expected, atol=2e-3, rtol=0)


@every_kind
def test_float32_gradients(kind):
    layer, x = conv(kind, inputs=16, filters=32), images(3, 16, 8, 8)
    y, gradients = run(layer, x)
    if layer.log_radius is not None:
        layer.batches.zero_()
    wide = copy.deepcopy(layer).double()
    expected, wide_gradients = run(wide, x.double())
    torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=1e-5)
    for ours, theirs in zip(gradients, wide_gradients, strict=True):
        assert (ours - theirs).norm() < 5e-4 * theirs.norm()


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(kind, dtype):
    layer, x = conv(kind, inputs=16), images(2, 16, 6, 6)
    expected, wide_gradients = run(layer.eval(), x)
    with torch.autocast("cpu", dtype=dtype):
        y, gradients = run(layer, x)
    narrow = copy.deepcopy(layer).to(dtype)
    ours, half_gradients = run(narrow, x.to(dtype))
    assert y.dtype == ours.dtype == dtype
    tolerance = 0.03 if dtype == torch.bfloat16 else 0.005
    torch.testing.assert_close(y.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours.float(), expected, atol=tolerance, rtol=tolerance)
    for a, b, wide in zip(gradients, half_gradients, wide_gradients, strict=True):
        assert a.dtype == torch.float32
        assert b.dtype == dtype
        assert (a - wide).norm() < 2 * tolerance * wide.norm()
        assert (b - wide).norm() < 2 * tolerance * wide.norm()


@every_kind
def test_channels_last(kind):
    layer, x = conv(kind, inputs=8, groups=2), images(2, 8, 6, 6)
    expected, gradients = run(layer.eval(), x)
    layer = layer.to(memory_format=torch.channels_last)
    y, ours = run(layer, x.to(memory_format=torch.channels_last))
    if kind != "joint":  # its magnitude is as large as the output
        assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-5)
    for a, b in zip(ours, gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_single_sample_empty_batch_meta_and_inference():
    layer, x = conv("tanh").eval(), images(2, 4, 5, 5)
    torch.testing.assert_close(layer(x[0]), layer(x)[0])
    assert layer(x[:0]).shape == (0, 6, 5, 5)
    meta = DecoupledConv2d(4, 6, 3, device="meta", magnitude="tanh", angular="sigmoid", learn_radius="layer")
    assert meta(torch.empty(2, 4, 5, 5, device="meta")).shape == (2, 6, 3, 3)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), conv("tanh").eval()(x))


def test_an_inplace_activation_may_follow_and_the_input_is_untouched():
    layer, x = conv(), images(2, 4, 5, 5).requires_grad_()
    before = x.detach().clone()
    F.relu(layer(x), inplace=True).sum().backward()
    first = x.grad.clone()
    x.grad = None
    F.relu(layer(x)).sum().backward()
    assert torch.equal(first, x.grad)
    assert torch.equal(before, x)


def test_nothing_is_kept_that_backward_does_not_need():
    layer, x = DecoupledConv2d(64, 64, 3, padding=1, bias=False), images(4, 64, 16, 16).requires_grad_()
    for g in ("cosine", "linear", "sigmoid"):
        layer = DecoupledConv2d(64, 64, 3, padding=1, bias=False, angular=g)
        ours, theirs = kept(layer, x), kept(nn.Conv2d(64, 64, 3, padding=1, bias=False), x)
        weights = layer.weight.nbytes  # of which the sphere keeps the directions
        assert ours - weights <= 2.1 * (theirs - weights)


def kept(layer, x):
    seen = {}

    def pack(t):
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    return sum(seen.values()) + 0 * len(y)


@every_kind
def test_compiles_in_one_graph(kind):
    torch._dynamo.reset()
    layer, x = conv(kind), images(2, 4, 5, 5)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    (y, gradients), (expected, wanted) = run(compiled, x), run(layer, x)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_inductor():
    torch._dynamo.reset()
    layer, x = conv("tanh", angular="sigmoid"), images(2, 4, 5, 5)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True)
    (y, gradients), (expected, wanted) = run(compiled, x), run(layer, x)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_per_sample_gradients_by_vmap():
    layer, x = conv("tanh").eval(), images(3, 4, 5, 5)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    buffers = dict(layer.named_buffers())

    def loss(parameters, x):
        return torch.func.functional_call(layer, (parameters, buffers), (x.unsqueeze(0),)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)["weight"]
    layer(x).square().sum().backward()
    torch.testing.assert_close(each.sum(0), layer.weight.grad, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["tanh", "sigmoid"])
def test_onnx(kind, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = nn.Sequential(conv(kind, stride=2), nn.ReLU(), SphereNorm(nn.Conv2d(6, 5, 3), rescale="learned")).eval()
    x = images(2, 4, 12, 12)
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert abs(y - model(x).detach().numpy()).max() <= 1e-5


@every_kind
def test_state_round_trips(kind):
    layer, x = conv(kind), images(2, 4, 5, 5)
    run(layer, x)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    other = DecoupledConv2d(4, 6, 3, padding=1, **KINDS[kind])
    other.load_state_dict(torch.load(stream))
    assert torch.equal(other.eval()(x), layer.eval()(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert f"magnitude={layer.magnitude!r}" in repr(layer)


def test_learned_radius_follows_the_patches():
    layer = conv("tanh", momentum=0.25, magnitude=Tanh(radius=2.0), bias=False)
    x = images(2, 4, 5, 5)

    def mean(x):
        return F.conv2d(x.square(), torch.ones(1, 4, 3, 3), padding=1).sqrt().mean()

    assert layer.log_radius.exp().item() == pytest.approx(2)
    layer.eval()(x)
    assert layer.mean_norm == 1
    layer.train()(x)
    assert layer.mean_norm.item() == pytest.approx(mean(x).item(), rel=1e-5)
    layer(3 * x)
    assert layer.mean_norm.item() == pytest.approx(1.5 * mean(x).item(), rel=1e-5)
    layer.eval()
    expected = DecoupledConv2d(4, 6, 3, padding=1, bias=False, magnitude=Tanh(radius=2 * layer.mean_norm.item()))
    expected.load_state_dict({"weight": layer.weight})
    torch.testing.assert_close(layer(x), expected(x))
    layer(x).sum().backward()
    assert layer.log_radius.grad.abs() > 0


def test_a_radius_a_filter():
    layer = conv("ball", learn_radius="filter", bias=False)
    with torch.no_grad():
        layer.log_radius.copy_(torch.linspace(-1, 1, 6))
        layer.mean_norm.fill_(3.0)
    x = images(2, 4, 5, 5)
    y = layer.eval()(x)
    for j in range(6):
        one = DecoupledConv2d(
            4, 1, 3, padding=1, bias=False, magnitude=Ball(radius=3 * layer.log_radius[j].exp().item())
        )
        one.load_state_dict({"weight": layer.weight[j : j + 1]})
        torch.testing.assert_close(y[:, j : j + 1], one(x), atol=1e-6, rtol=1e-5)


def test_k_a_layer_a_filter_and_a_network():
    x = images(2, 4, 5, 5)
    assert conv("sigmoid", learn_k="layer").log_k.shape == (1,)
    layer = conv("sigmoid", bias=False)
    with torch.no_grad():
        layer.log_k.copy_(torch.linspace(-2, 0, 6))
    y = layer(x)
    for j in range(6):
        g = Sigmoid(k=layer.log_k[j].exp().item())
        one = DecoupledConv2d(4, 1, 3, padding=1, bias=False, angular=g)
        one.load_state_dict({"weight": layer.weight[j : j + 1]})
        torch.testing.assert_close(y[:, j : j + 1], one(x), atol=1e-6, rtol=1e-5)
    k = shared_k(0.3)
    network = nn.Sequential(conv("sigmoid", learn_k=k), DecoupledConv2d(6, 2, 3, angular="sigmoid", learn_k=k))
    assert network[0].log_k is network[1].log_k is k
    assert sum(p is k for p in network.parameters()) == 1
    network(x).sum().backward()
    assert k.grad.abs() > 0
    with pytest.raises(ValueError, match="angular must have a fixed k"):
        conv(angular=Sigmoid(k=nn.Parameter(torch.tensor(0.5))))


def test_gradient_of_k_and_radius():
    layer = DecoupledConv2d(
        2,
        4,
        2,
        groups=2,
        magnitude="tanh",
        angular="sigmoid",
        learn_k="filter",
        learn_radius="layer",
        dtype=torch.float64,
    ).eval()
    x = images(1, 2, 3, 3).double()

    def response(k, radius):
        return torch.func.functional_call(layer, {"log_k": k, "log_radius": radius}, (x,))

    assert torch.autograd.gradcheck(response, (layer.log_k, layer.log_radius))


def test_sphere_norm():
    plain = nn.Conv2d(4, 6, 3, bias=False)
    weight, x = plain.weight, images(2, 4, 5, 5)
    norm = SphereNorm(plain, rescale=(2.0, 0.5))
    sphere = DecoupledConv2d(4, 6, 3, bias=False)
    sphere.load_state_dict({"weight": weight})
    assert norm.layer.weight is weight
    torch.testing.assert_close(norm(x), 2 * sphere(x) + 0.5)
    learned = SphereNorm(nn.Linear(4, 3), rescale="learned", angular="linear")
    assert {n for n, _ in learned.named_parameters()} == {"layer.weight", "layer.bias", "beta", "gamma"}
    learned(images(5, 4)).sum().backward()
    assert learned.beta.grad.shape == (3,)
    assert SphereNorm(nn.Conv2d(4, 6, 3))(x).shape == (2, 6, 3, 3)
    with pytest.raises(ValueError, match="rescale must be None"):
        SphereNorm(nn.Linear(4, 3), rescale="yes")
