"""Every engine computes the function of a user's subclass of a menu entry, not that of its parent.

The reference of each test is the same function in a form that no closed form or kernel can apply to: a plain callable,
or a class that derives from the interface only.
"""

import pytest
import torch
from torch import nn

from hypersphere import rotation
from hypersphere.energy import hyperspherical_energy, random_energy
from hypersphere.functions.angular import ANGULARS, at_angle
from hypersphere.functions.kernel import KERNELS, Kernel
from hypersphere.functions.magnitude import MAGNITUDES, Ball, Magnitude, Radial, Seg, Tanh
from hypersphere.functions.margin import MARGINS, Margin
from hypersphere.functions.orthogonal import ORTHOGONALS, SkewMap
from hypersphere.heads import AngularHead
from hypersphere.layers import DecoupledConv2d, DecoupledLinear, equivalent_weight

FACTOR = 0.9


def override(parent, method):
    """Return a subclass of a menu entry whose `method` returns 0.9 times what that of the parent returns."""

    def scaled(self, *arguments):
        return FACTOR * getattr(parent, method)(self, *arguments)

    return type(f"Scaled{parent.__name__}", (parent,), {method: scaled})


def results(module, *inputs):
    """Return the output of a module and the gradients of its sum of squares: eagerly, then by `torch.func`."""
    parameters = dict(module.named_parameters())

    def loss(parameters):
        output = torch.func.functional_call(module, parameters, inputs)
        return output.square().sum(), output

    value, output = loss(parameters)
    eager = torch.autograd.grad(value, list(parameters.values()), materialize_grads=True)
    grads, functional_output = torch.func.grad(loss, has_aux=True)(parameters)
    return [(output, *eager), (functional_output, *grads.values())]


def assert_same(module, reference, *inputs):
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            reference.get_parameter(name).copy_(parameter)
    for ours, theirs in zip(results(module, *inputs), results(reference, *inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def linear_layer(magnitude, angular, **options):
    torch.manual_seed(0)
    return DecoupledLinear(5, 4, magnitude=magnitude, angular=angular, **options).double()


def head(**options):
    torch.manual_seed(0)
    return AngularHead(5, 4, radius=3.0, **options).double()


X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 3, 0, 1])


@pytest.mark.parametrize("name", ANGULARS)
@pytest.mark.parametrize("listed", [False, True])
def test_layer_computes_the_angular_of_a_subclass(name, listed, monkeypatch):
    subclass, parent = override(ANGULARS[name], "__call__"), ANGULARS[name]()
    if listed:
        monkeypatch.setitem(ANGULARS, "subclass", subclass)
    for magnitude, weighting in [("tanh", None), ("tanh", "linear"), ("linear", None), ("inner_product", None)]:
        layer = linear_layer(magnitude, subclass(), weighting=weighting)
        assert_same(layer, linear_layer(magnitude, lambda c: FACTOR * parent(c), weighting=weighting), X)
        assert equivalent_weight(layer) is None


@pytest.mark.parametrize("name", MAGNITUDES)
@pytest.mark.parametrize("listed", [False, True])
def test_layer_computes_the_magnitude_of_a_subclass(name, listed, monkeypatch):
    subclass, parent = override(MAGNITUDES[name], "__call__"), MAGNITUDES[name]()
    if listed:
        monkeypatch.setitem(MAGNITUDES, "subclass", subclass)
    for angular in ("cosine", "sigmoid"):
        for weighting in (None, "linear") if isinstance(parent, Radial) else (None,):
            layer = linear_layer(subclass(), angular, weighting=weighting)
            assert_same(layer, linear_layer(lambda w, x: FACTOR * parent(w, x), angular, weighting=weighting), X)
            assert equivalent_weight(layer) is None


@pytest.mark.parametrize("parent", [Ball, Tanh, Seg])
def test_layer_inserts_the_learned_radius_into_a_subclass(parent):
    class Subclass(parent):
        def __call__(self, w_norm, x_norm):
            return self.radius**2 * parent.__call__(self, w_norm, x_norm)

    layer = linear_layer(Subclass(radius=2.0), "cosine", learn_radius="layer").eval()  # the mean norm is 1
    fixed = linear_layer(Subclass(radius=2.0), "cosine")
    torch.testing.assert_close(layer(X), fixed(X))
    layer.train()(X)  # sets the mean norm
    radius = layer.log_radius.exp().item() * layer.mean_norm.item()
    torch.testing.assert_close(layer(X), linear_layer(Subclass(radius=radius), "cosine")(X))
    layer(X).sum().backward()
    assert layer.log_radius.grad.item() != 0


class Saturating(Magnitude):
    """A magnitude that is not `Radial`."""

    def __call__(self, w_norm, x_norm):
        return x_norm / (1 + x_norm)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MAGNITUDES, "saturating"])
@pytest.mark.parametrize("angular", ["cosine", "linear"])
def test_layer_of_every_listed_magnitude_passes_gradcheck(name, angular, monkeypatch):
    monkeypatch.setitem(MAGNITUDES, "saturating", Saturating)
    torch.manual_seed(0)
    layer = DecoupledConv2d(2, 3, 2, magnitude=name, angular=angular).double()
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    weight = layer.weight.detach().clone().requires_grad_()

    def respond(x, weight):
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(respond, (x, weight))


@pytest.mark.parametrize("name", ANGULARS)
@pytest.mark.parametrize("margin", [None, "multiplicative", "additive_angle", "divided_others"])
@pytest.mark.parametrize("listed", [False, True])
def test_head_computes_the_angular_of_a_subclass(name, margin, listed, monkeypatch):
    subclass, parent = override(ANGULARS[name], "__call__"), ANGULARS[name]()
    if listed:
        monkeypatch.setitem(ANGULARS, "subclass", subclass)
    ours, theirs = head(angular=subclass(), margin=margin), head(angular=lambda c: FACTOR * parent(c), margin=margin)
    assert_same(ours, theirs, X, Y)
    torch.testing.assert_close(ours.scores(X), theirs.scores(X))
    theta = torch.linspace(0.1, 3.0, 7, dtype=torch.float64)
    torch.testing.assert_close(at_angle(subclass(), theta), subclass()(theta.cos()))


# Without a penalty and noise, which the references do not have.
PLAIN_FIELDS = {"norm_linear": {"penalty": 0.0}, "random_angle": {"sigma": 0.0}}


@pytest.mark.slow
@pytest.mark.parametrize("name", MARGINS)
@pytest.mark.parametrize("gradient", ["true", "detached"])
@pytest.mark.parametrize("listed", [False, True])
def test_head_computes_the_margin_of_a_subclass(name, gradient, listed, monkeypatch):
    subclass, parent = override(MARGINS[name], "__call__"), MARGINS[name]()
    if listed:
        monkeypatch.setitem(MARGINS, "subclass", subclass)

    class Reference(Margin):
        changes_other_classes = parent.changes_other_classes

        def __call__(self, c, angular, strength=1.0):
            return FACTOR * parent(c, angular, strength)

        def others(self, c, angular, strength=1.0):
            return parent.others(c, angular, strength)

    for angular in ("cosine", "linear"):
        ours = head(margin=subclass(**PLAIN_FIELDS.get(name, {})), angular=angular, gradient=gradient)
        assert_same(ours, head(margin=Reference(), angular=angular, gradient=gradient), X, Y)


@pytest.mark.parametrize("name", MARGINS)
@pytest.mark.parametrize("listed", [False, True])
def test_head_computes_the_other_responses_of_a_subclass(name, listed, monkeypatch):
    subclass, parent = override(MARGINS[name], "others"), MARGINS[name]()
    if listed:
        monkeypatch.setitem(MARGINS, "subclass", subclass)

    class Reference(Margin):
        changes_other_classes = True

        def __call__(self, c, angular, strength=1.0):
            return parent(c, angular, strength)

        def others(self, c, angular, strength=1.0):
            return FACTOR * parent.others(c, angular, strength)

    if name != "norm_adaptive":  # its margin depends on norms, which the reference does not receive
        assert_same(head(margin=subclass(**PLAIN_FIELDS.get(name, {}))), head(margin=Reference()), X, Y)
    assert subclass.changes_other_classes


ROW_MAPS = [
    pytest.param(kind, method, id=f"{name}-{method}")
    for name, kind in ORTHOGONALS.items()
    for method in ("expression", *(["generator"] if issubclass(kind, SkewMap) else []))
]


@pytest.mark.parametrize(("parent", "method"), ROW_MAPS)
def test_rotation_computes_the_map_of_a_subclass(parent, method):
    row_map = override(parent, method)()
    torch.manual_seed(0)
    free, v = row_map.identity(4).double(), torch.randn(3, 4, dtype=torch.float64)
    free = (free + 0.1 * torch.randn_like(free)).requires_grad_()
    (expected,) = torch.autograd.grad(row_map.expression(free, v).square()[:, 0].sum(), free)
    functional = torch.func.grad(lambda free: row_map(free, v).square()[:, 0].sum())(free)
    torch.testing.assert_close(functional, expected)
    torch.testing.assert_close(row_map(free, v), row_map.expression(free, v))
    (eager,) = torch.autograd.grad(row_map(free, v).square()[:, 0].sum(), free)
    torch.testing.assert_close(eager, expected)


@pytest.mark.parametrize("name", ORTHOGONALS)
def test_rotated_layer_computes_the_map_of_a_subclass(name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2)).double()
    rows = net[0].weight.detach().clone()
    row_map = override(ORTHOGONALS[name], "expression")()
    rotation.rotate_(net, method=row_map)
    ((_, _, rotated),) = [one for one in rotation.rotated_layers(net) if one[0] == "0"]
    with torch.no_grad():
        rotated.parameter.add_(0.1 * torch.randn_like(rotated.parameter))
    free = rotated.parameter.detach().clone().requires_grad_()
    expected = row_map.expression(free.reshape(rotated.parameter.shape), rows)
    torch.testing.assert_close(net[0].weight.detach(), expected.detach().view(6, 4))
    (expected_grad,) = torch.autograd.grad(expected.square()[..., 0].sum(), free)
    (grad,) = torch.autograd.grad(net[0].weight.square()[:, 0].sum(), rotated.parameter)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("distance", ["euclidean", "angular"])
def test_energy_computes_the_kernel_of_a_subclass(name, distance):
    parent = KERNELS[name]

    class Subclass(parent):
        def value_at_square(self, u):
            return u.sqrt() + parent.value_at_square(self, u)

    class Reference(Kernel):
        power = parent().power

        def value_at_square(self, u):
            return u.sqrt() + parent().value_at_square(u)

    torch.manual_seed(0)
    w = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    betas = torch.linspace(0.5, 1.5, 7, dtype=torch.float64) if distance == "euclidean" else None
    values = [hyperspherical_energy(w, power=k, distance=distance, weights=betas) for k in (Subclass(), Reference())]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*[torch.autograd.grad(value, w)[0] for value in values])
    assert random_energy(10, 6, power=Subclass(), distance=distance) == pytest.approx(
        random_energy(10, 6, power=Reference(), distance=distance)
    )
    assert not Subclass.bounded_by_power
