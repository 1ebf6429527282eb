"""What once went wrong, or would silently: schedules in backward, odd norms, transforms, learned fields."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hypersphere as hs
from hypersphere.heads import PRESETS, AngularHead, BinaryHead, Ramp


def problem(batch=6, dim=8, classes=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(classes, (batch,), generator=generator)


@pytest.mark.parametrize("margin", [hs.margin.DividedOthers(2.0), hs.margin.TwoSided(0.3), hs.margin.AdditiveAngle()])
def test_backward_uses_the_strength_of_its_own_step(margin):
    x, y = problem()
    head = AngularHead(8, 5, radius=16.0, margin=margin, ramp=Ramp(steps=4)).double()
    for _ in range(4):
        (expected,) = torch.autograd.grad(F.cross_entropy(head.logits(x, y), y), head.weight)
        (ours,) = torch.autograd.grad(head(x, y), head.weight)
        torch.testing.assert_close(ours, expected, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize(("classes", "radius"), [(2, 40.0), (2, 64.0), (3, 50.0), (3, 64.0), (1000, 40.0)])
def test_the_first_bias_of_few_classes(classes, radius):
    head = BinaryHead(8, classes, radius=radius).double()
    b = head._initial_bias()
    own, others = radius * (-0.75 - 0.4), radius * (-0.75 + 0.4)
    pull = 0.7 / (1 + math.exp(own + b))
    push = 0.3 * (classes - 1) / (1 + math.exp(-others - b))
    assert pull == pytest.approx(push, rel=1e-6)


def test_zero_class_vectors_have_the_gradient_of_the_linear_layer():
    x, y = problem()
    head = hs.heads.softmax(8, 5).double()
    torch.nn.init.zeros_(head.weight)
    (ours,) = torch.autograd.grad(head(x, y), head.weight)
    (expected,) = torch.autograd.grad(F.cross_entropy(F.linear(x, head.weight), y), head.weight)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("name", ["softmax", "l_softmax"])
@pytest.mark.parametrize("scale", [1e-25, 1e20])
def test_huge_and_tiny_class_vectors_with_their_norms_kept(name, scale):
    x, y = problem(dtype=torch.float32)
    head = PRESETS[name](8, 5)
    exact = copy.deepcopy(head).double()
    with torch.no_grad():
        head.weight.mul_(scale)
    loss = head(x / scale, y)
    loss.backward()
    torch.testing.assert_close(loss.double(), exact(x.double(), y), rtol=1e-4, atol=1e-4)
    assert torch.isfinite(head.weight.grad).all()


def test_a_nan_in_an_ignored_row_is_harmless():
    x, y = problem()
    broken = x.clone()
    broken[1] = float("nan")
    ignored = y.index_fill(0, torch.tensor([1]), -100)
    for name in ("arcface", "adaface", "sphereface_plus"):
        head = PRESETS[name](8, 5).double().eval()
        (ours,) = torch.autograd.grad(head(broken, ignored), head.weight)
        (expected,) = torch.autograd.grad(head(x, ignored), head.weight)
        torch.testing.assert_close(ours, expected)


def test_normalized_gradient_compiles_transforms_and_rests():
    x, y = problem()
    head = hs.heads.a_softmax(8, 5, gradient="normalized").double()
    (expected,) = torch.autograd.grad(head(x, y), head.weight)
    (compiled,) = torch.autograd.grad(torch.compile(head, fullgraph=True, backend="aot_eager")(x, y), head.weight)
    torch.testing.assert_close(compiled, expected)
    parameters = {"weight": head.weight.detach()}
    transformed = torch.func.grad(lambda p: torch.func.functional_call(head, p, (x, y)))(parameters)["weight"]
    torch.testing.assert_close(transformed, expected)
    with torch.inference_mode():
        assert torch.isfinite(head(x, y))


def test_a_learned_k_follows_the_head():
    x, y = problem()
    head = AngularHead(8, 5, angular=hs.angular.Sigmoid(torch.nn.Parameter(torch.tensor(0.5)))).double()
    other = AngularHead(8, 5, angular=hs.angular.Sigmoid(2.0)).double()
    other.load_state_dict({"weight": head.weight})
    state = {"weight": head.weight.detach(), "angular_k": torch.tensor(2.0, dtype=torch.float64)}
    called = torch.func.functional_call(head, state, (x, y))
    torch.testing.assert_close(called, other(x, y))
    head.load_state_dict(state, assign=True)
    torch.testing.assert_close(head(x, y), other(x, y))


def test_a_k_made_of_something_learned_gets_its_gradient():
    x, y = problem()
    raw = torch.tensor(-0.7, dtype=torch.float64, requires_grad=True)
    head = AngularHead(8, 5, angular=hs.angular.Sigmoid(raw.exp())).double()
    (ours,) = torch.autograd.grad(head(x, y), raw)
    step = 1e-6
    losses = [AngularHead(8, 5, angular=hs.angular.Sigmoid(math.exp(-0.7 + h))).double() for h in (-step, step)]
    for h in losses:
        h.load_state_dict({"weight": head.weight.detach()})
    numeric = (losses[1](x, y) - losses[0](x, y)).item() / (2 * step)
    assert ours.item() == pytest.approx(numeric, rel=1e-5)
    with pytest.raises(ValueError, match="k of angular must be one number in a head"):
        AngularHead(8, 5, angular=hs.angular.Sigmoid(torch.rand(5) + 0.2))


@pytest.mark.parametrize("name", ["arcface", "sphereface_plus", "adaface", "sphereface2"])
def test_vmap_over_features_and_over_labels(name):
    x, y = problem()
    head = PRESETS[name](8, 5).double()
    labels = torch.stack([y, (y + 1) % 5])
    by_labels = torch.func.vmap(lambda t: head(x, t))(labels)
    by_features = torch.func.vmap(lambda a: head(a, y))(torch.stack([x, 2 * x]))
    head.eval()
    if name != "adaface":  # whose statistics move with every training call
        torch.testing.assert_close(by_labels, torch.stack([head(x, t) for t in labels]))
        torch.testing.assert_close(by_features, torch.stack([head(x, y), head(2 * x, y)]))
    assert torch.isfinite(head(x, y))


def test_training_calls_in_inference_mode_leave_the_state_alone():
    x, y = problem()
    head = AngularHead(8, 5, radius=8.0, margin="norm_adaptive", ramp=Ramp()).double()
    with torch.inference_mode():
        head(x, y)
    assert head.steps.item() == 0
    head.load_state_dict(copy.deepcopy(head.state_dict()))


def test_class_weights_changed_between_forward_and_backward_are_noticed():
    x, y = problem()
    weights = torch.ones(5, dtype=torch.float64)
    head = AngularHead(8, 5, class_weights=weights, label_smoothing=0.1).double()
    loss = head(x, y)
    head.class_weights.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_double_class_weights_stay_double():
    weights = torch.full((5,), 1 / 3, dtype=torch.float64)
    assert AngularHead(8, 5, class_weights=weights).class_weights.dtype == torch.float64


def test_numbers_of_numpy_are_numbers():
    head = AngularHead(np.int64(8), np.int32(5), radius=np.float32(3.0), margin=hs.margin.Multiplicative(np.int64(2)))
    x, y = problem(dtype=torch.float32)
    assert torch.isfinite(head(x, y))
