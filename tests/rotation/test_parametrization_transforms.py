"""Rotated layers under torch.func, second derivatives, forward-mode differentiation and tracing."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jvp, stack_module_state, vmap

from hypersphere.functions.orthogonal import ORTHOGONALS, Cayley, GramSchmidt
from hypersphere.functions.transform import TRANSFORMS, Triangular
from hypersphere.rotation import Stochastic, rotate_, rotation_parameters

METHODS = {
    **{name: name for name in (*ORTHOGONALS, *TRANSFORMS)},
    "modified": GramSchmidt("modified"),
    "bounded": Cayley(bound=0.3),
    "upper": Triangular(upper=True),
}
FORMS = {
    **{name: lambda model, method=method: rotate_(model, method) for name, method in METHODS.items()},
    "blocks": lambda model: rotate_(model, "cayley", blocks=2),
    "shared blocks": lambda model: rotate_(model, "lowdin", blocks=2, shared=True),
    "butterfly": lambda model: rotate_(model, "cayley", blocks=2, factors=2),
    "stochastic": lambda model: Stochastic(model, 3, whole_first=False),
    "learned neurons": lambda model: rotate_(model, "exponential", learn_neurons=True),
}
every_form = pytest.mark.parametrize("form", FORMS)


def network(form, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    FORMS[form](model)
    with torch.no_grad():
        for p in rotation_parameters(model):
            p += 0.2 * torch.randn_like(p)
    return model


def trained(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def loss(model, parameters, x, y):
    return (functional_call(model, parameters, (x,)) - y).square().sum()


def batch(n=3):
    random = torch.Generator().manual_seed(5)
    return (
        torch.randn(n, 4, generator=random, dtype=torch.float64),
        torch.randn(n, 2, generator=random, dtype=torch.float64),
    )


@every_form
def test_rotated_layers_per_sample_gradients_agree_with_backward(form):
    model, (x, y) = network(form), batch()
    per_sample = vmap(grad(lambda p, a, b: loss(model, p, a, b)), in_dims=(None, 0, 0))(trained(model), x, y)
    for i in range(len(x)):
        model.zero_grad()
        (model(x[i]) - y[i]).square().sum().backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(per_sample[name][i], p.grad, atol=1e-9, rtol=1e-9)


@every_form
def test_rotated_layers_work_in_an_ensemble(form):
    members, (x, _) = [network(form, seed) for seed in range(3)], batch()
    parameters, buffers = stack_module_state(members)
    skeleton = copy.deepcopy(members[0]).to("meta")
    together = vmap(lambda p, b: functional_call(skeleton, (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([member(x) for member in members]), atol=1e-9, rtol=1e-9)


@pytest.mark.slow
@every_form
def test_rotated_layers_pass_gradcheck_and_gradgradcheck(form):
    model, (x, y) = network(form), batch(2)
    names, values = zip(*trained(model).items(), strict=True)
    inputs = [value.clone().requires_grad_() for value in values]

    def value(*parameters):
        return loss(model, dict(zip(names, parameters, strict=True)), x, y)

    assert gradcheck(value, inputs)
    assert gradgradcheck(value, inputs)


@every_form
def test_rotated_layers_support_forward_mode(form):
    model, (x, y) = network(form), batch()
    parameters = trained(model)
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}
    gradient = grad(lambda p: loss(model, p, x, y))(parameters)
    expected = sum((gradient[name] * tangents[name]).sum() for name in parameters)
    _, derivative = jvp(lambda p: loss(model, p, x, y), (parameters,), (tangents,))
    torch.testing.assert_close(derivative, expected, atol=1e-9, rtol=1e-9)
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p, tangents[name]) for name, p in parameters.items()}
        torch.testing.assert_close(forward_ad.unpack_dual(loss(model, duals, x, y)).tangent, derivative)


@pytest.mark.slow
@every_form
def test_rotated_layers_can_be_traced(form):
    model, (x, _) = network(form), batch()
    traced = torch.jit.trace(model, (x,))
    torch.testing.assert_close(traced(2 * x), model(2 * x), atol=1e-9, rtol=1e-9)


def test_rotated_layer_hessian_is_symmetric_and_exact():
    model, (x, y) = network("cayley"), batch()
    name = "0.parametrizations.weight.0.free.main"
    free = dict(model.named_parameters())[name]
    second = hessian(lambda p: loss(model, {name: p}, x, y))(free.detach())
    torch.testing.assert_close(second, second.mT)
    (first,) = torch.autograd.grad((model(x) - y).square().sum(), free, create_graph=True)
    rows = torch.stack([torch.autograd.grad(entry, free, retain_graph=True)[0] for entry in first])
    torch.testing.assert_close(rows, second)


def test_gradient_penalty_reaches_the_rotation():
    model, (x, _) = network("gram_schmidt"), batch()
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in rotation_parameters(model))


def test_functional_call_with_equal_values_links_to_the_tensors_that_were_passed():
    layer = rotate_(nn.Linear(4, 3))
    (free,) = rotation_parameters(layer)
    name = next(name for name, p in layer.named_parameters() if p is free)
    x = torch.randn(2, 4)
    layer(x).sum().backward()
    other = free.detach().clone().requires_grad_()
    functional_call(layer, {name: other}, (x,)).sum().backward()
    torch.testing.assert_close(other.grad, free.grad)
