"""Statements of the thesis about margins, checked numerically."""

import math

import pytest
import torch

import hypersphere as hs

from .samples import problem


def test_margin_between_two_classes_is_the_stated_fraction():
    # thesis, section 2.3: with m, the decision boundaries of two classes are (m-1)/(m+1) of their angle apart
    between, m = 1.0, 4
    head = hs.heads.a_softmax(2, 2, m).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [math.cos(between), math.sin(between)]]))
    theta = torch.linspace(0, between, 100_001, dtype=torch.float64)
    x = torch.stack([theta.cos(), theta.sin()], 1)
    y = torch.zeros(len(x), dtype=torch.long)
    first = head.logits(x, y)
    second = head.logits(x, y + 1)
    last_of_first = theta[(first[:, 0] > first[:, 1]).nonzero().max()]
    first_of_second = theta[(second[:, 1] > second[:, 0]).nonzero().min()]
    assert (first_of_second - last_of_first).item() == pytest.approx((m - 1) / (m + 1) * between, abs=1e-4)


@pytest.mark.parametrize("m", [1, 1.5, 2, 3, 4])
@pytest.mark.parametrize("between", [0.5, 1.0])
def test_angular_margin_is_m_minus_1_over_m_plus_1_for_any_m(m, between):
    # On the arc between two class vectors the decision boundaries are mθ₁ = θ₂ and θ₁ = mθ₂ (thesis, section 2.3).
    head = hs.heads.a_softmax(2, 2, m).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [math.cos(between), math.sin(between)]]))
    boundaries = torch.tensor([between / (m + 1), m * between / (m + 1)], dtype=torch.float64)
    x = torch.stack([boundaries.cos(), boundaries.sin()], 1)
    logits = head.logits(x, torch.tensor([0, 1]))
    torch.testing.assert_close(logits[:, 0], logits[:, 1])
    assert (boundaries[1] - boundaries[0]).item() == pytest.approx((m - 1) / (m + 1) * between)


IDENTITIES = {
    "modified softmax is W-Softmax with cosine": (
        lambda: hs.heads.modified_softmax(5, 4),
        lambda: hs.heads.w_softmax(5, 4, "cosine"),
    ),
    "A-Softmax with m = 1 is the modified softmax": (
        lambda: hs.heads.a_softmax(5, 4, m=1),
        lambda: hs.heads.modified_softmax(5, 4),
    ),
    "L-Softmax with m = 1 is the softmax": (lambda: hs.heads.l_softmax(5, 4, m=1), lambda: hs.heads.softmax(5, 4)),
    "A-Softmax is GA-Softmax with cosine": (
        lambda: hs.heads.a_softmax(5, 4, m=3),
        lambda: hs.heads.ga_softmax(5, 4, "cosine", m=3),
    ),
    "GA-Softmax with m = 1 is W-Softmax": (
        lambda: hs.heads.ga_softmax(5, 4, "linear", m=1),
        lambda: hs.heads.w_softmax(5, 4, "linear"),
    ),
    "ArcFace with m = 0 is S-Softmax": (
        lambda: hs.heads.arcface(5, 4, s=9.0, m=0),
        lambda: hs.heads.s_softmax(5, 4, s=9.0),
    ),
    "AM-Softmax with m = 0 is S-Softmax": (
        lambda: hs.heads.am_softmax(5, 4, s=9.0, m=0),
        lambda: hs.heads.s_softmax(5, 4, s=9.0),
    ),
    "ArcFace is a combined margin": (
        lambda: hs.heads.arcface(5, 4, s=9.0, m=0.4),
        lambda: hs.heads.combined_margin(5, 4, s=9.0, m1=1, m2=0.4, m3=0),
    ),
    "AM-Softmax is a combined margin": (
        lambda: hs.heads.am_softmax(5, 4, s=9.0, m=0.2),
        lambda: hs.heads.combined_margin(5, 4, s=9.0, m1=1, m2=0, m3=0.2),
    ),
    "SphereFace-R v1 with m = 1 is S-Softmax": (
        lambda: hs.heads.sphereface_r(5, 4, m=1, s=9.0, gradient="true"),
        lambda: hs.heads.s_softmax(5, 4, s=9.0),
    ),
    "SphereFace-R v2 with m = 1 is S-Softmax": (
        lambda: hs.heads.sphereface_r(5, 4, m=1, version=2, s=9.0, gradient="true"),
        lambda: hs.heads.s_softmax(5, 4, s=9.0),
    ),
    "SphereFace+ without energy is A-Softmax": (
        lambda: hs.heads.sphereface_plus(5, 4, m=3, energy_weight=0.0),
        lambda: hs.heads.a_softmax(5, 4, m=3),
    ),
}


@pytest.mark.parametrize("identity", IDENTITIES)
def test_members_of_the_family_coincide(identity):
    x, y = problem()
    first, second = (make().double() for make in IDENTITIES[identity])
    second.load_state_dict(first.state_dict())
    results = []
    for head in (first, second):
        features = x.clone().requires_grad_()
        loss = head(features, y)
        results.append((loss, head.logits(x, y), *torch.autograd.grad(loss, (features, head.weight))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)
