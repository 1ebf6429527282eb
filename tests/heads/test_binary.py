"""BinaryHead (SphereFace2) against the oracle, and its initial bias."""

import math

import pytest
import torch

import hypersphere as hs
import oracle
from hypersphere.heads import BinaryHead, Ramp

from .samples import angles, problem


@pytest.mark.parametrize(
    ("margin", "target_response", "other_response"),
    [
        (hs.margin.TwoSided(0.3), lambda t, g: g(t) - 0.3, lambda t, g: g(t) + 0.3),
        (hs.margin.AdditiveAngle(0.3), lambda t, g: oracle.margin(t, g, m2=0.3), lambda t, g: g(t)),
        (hs.margin.TruncatedMultiplicative(1.6), lambda t, g: g(min(1.6 * t, math.pi)), lambda t, g: g(t)),
    ],
)
def test_binary_head_equals_the_oracle(margin, target_response, other_response):
    x, y = problem()
    head = hs.heads.sphereface2(5, 4, s=9.0, margin=margin, balance=0.6).double()
    torch.nn.init.constant_(head.bias, -0.4)
    g, theta, total = oracle.ANGULARS["power_cosine"], angles(x, head.weight), 0.0
    for i, label in enumerate(y.tolist()):
        for j in range(4):
            if j == label:
                total += 0.6 / 9 * math.log1p(math.exp(-(9 * target_response(theta[i, j], g) - 0.4)))
            else:
                total += 0.4 / 9 * math.log1p(math.exp(9 * other_response(theta[i, j], g) - 0.4))
    assert head(x, y).item() == pytest.approx(total / len(x), rel=1e-10)


def test_binary_head_initial_bias_minimises_the_loss_at_right_angles():
    # the last feature is at right angles to all class vectors, as nearly all are in many dimensions
    head = BinaryHead(5, 4, radius=9.0, gradient="true").double()
    with torch.no_grad():
        head.weight.copy_(torch.eye(4, 5))
    x = torch.tensor([[0.0, 0, 0, 0, 2]], dtype=torch.float64)
    head.reset_parameters()
    with torch.no_grad():
        head.weight.copy_(torch.eye(4, 5))
    loss = head(x, torch.tensor([1]))
    (slope,) = torch.autograd.grad(loss, head.bias)
    assert slope.item() == pytest.approx(0, abs=1e-6)  # the bias is float32


@pytest.mark.parametrize(("classes", "radius"), [(2, 40.0), (2, 64.0), (3, 50.0), (3, 64.0), (1000, 40.0)])
def test_binary_head_initial_bias_solves_its_equation(classes, radius):
    head = BinaryHead(8, classes, radius=radius).double()
    b = head._initial_bias()
    target_score, other_score = radius * (-0.75 - 0.4), radius * (-0.75 + 0.4)
    target_derivative = 0.7 / (1 + math.exp(target_score + b))
    others_derivative = 0.3 * (classes - 1) / (1 + math.exp(-other_score - b))
    assert target_derivative == pytest.approx(others_derivative, rel=1e-6)


@pytest.mark.parametrize("margin", [hs.margin.TwoSided(0.4), hs.margin.NormLinear(), hs.margin.NormAdaptive()])
def test_binary_head_reset_computes_on_the_device_of_the_head(margin):
    def make():
        return BinaryHead(5, 4, angular=hs.angular.Sigmoid(torch.nn.Parameter(torch.tensor(0.3))), margin=margin)

    head, expected = make(), make().bias
    torch.nn.init.zeros_(head.bias)
    with torch.device("meta"):  # not the device of the head
        head.reset_parameters()
    assert torch.equal(head.bias, expected)
    with torch.device("meta"):
        head = BinaryHead(5, 4, margin=margin)
    head.to_empty(device="cpu").reset_parameters()
    assert torch.equal(head.bias, BinaryHead(5, 4, margin=margin).bias)


def test_binary_head_detached_gradient_is_that_of_the_cosine():
    x, y = problem()
    head = hs.heads.sphereface2(5, 4, s=9.0).double()
    logits = head.logits(x, y)
    slope = torch.sigmoid(logits) * 0.3
    slope[torch.arange(len(y)), y] = -(0.7 * torch.sigmoid(-logits)).gather(1, y[:, None])[:, 0]
    c = hs.sphere.cosines(x, head.weight)
    (expected,) = torch.autograd.grad((c * slope.detach()).sum() / len(x), head.weight)
    torch.testing.assert_close(torch.autograd.grad(head(x, y), head.weight)[0], expected, atol=1e-10, rtol=0)


def test_binary_head_accepts_a_ramp_ignored_samples_and_reductions():
    x, y = problem(batch=7)
    head = hs.heads.sphereface2(5, 4, ramp=Ramp(steps=2), ignore_index=-1, reduction="none").double()
    losses = head(x, y.index_fill(0, torch.tensor([1]), -1))
    assert losses.shape == (7,)
    assert losses[1] == 0
    with pytest.raises(TypeError, match="sphereface2 has no option 'label_smoothing'"):
        hs.heads.sphereface2(5, 4, label_smoothing=0.1)


def test_sphereface2_rejects_m_together_with_a_margin():
    with pytest.raises(ValueError, match=r"^m must be None if margin is given, not 0\.4$"):
        hs.heads.sphereface2(5, 4, m=0.4, margin=hs.margin.AdditiveCosine(0.2))
    with pytest.raises(ValueError, match=r"^m must be None if margin is given, not 0\.0$"):
        hs.heads.sphereface2(5, 4, m=0.0, margin="two_sided")
    default, given = hs.heads.sphereface2(5, 4), hs.heads.sphereface2(5, 4, m=0.3)
    assert (default.margin, given.margin) == (hs.margin.TwoSided(0.4), hs.margin.TwoSided(0.3))
    assert hs.heads.sphereface2(5, 4, margin=hs.margin.TwoSided(0.2)).margin == hs.margin.TwoSided(0.2)


@pytest.mark.parametrize(("classes", "balance"), [(2, 0.5), (2, 0.9), (10, 0.5)])
@pytest.mark.parametrize("margin", [None, hs.margin.TwoSided(0.4)])
def test_binary_bias_is_a_minimum_at_a_large_radius(classes, balance, margin):
    radius = 1000.0
    head = BinaryHead(8, classes, balance=balance, radius=radius, margin=margin).double()
    # At a right angle the derivative λ·σ(−a_y − b) − (1−λ)(C−1)·σ(a_j + b) changes its sign at b.
    right_angle = torch.zeros(1, dtype=torch.float64)
    response = head.angular(right_angle) if margin is None else head.margin(right_angle, head.angular, 1.0)
    target, others = radius * response, radius * head.score_functions.others(right_angle, 1.0)
    odds = math.log(balance / ((1 - balance) * (classes - 1)))
    signs = []
    for step in (-1.0, 1.0):
        b = head.bias.detach() + step
        difference = torch.nn.functional.logsigmoid(-target - b) - torch.nn.functional.logsigmoid(others + b)
        signs.append(torch.sign(odds + difference).item())
    assert signs == [1, -1]
    assert BinaryHead(8, classes, balance=balance, radius=1e5, margin=margin).bias.isfinite().all()
