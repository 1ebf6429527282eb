"""Statements of the thesis about margins, checked numerically."""

import math

import pytest
import torch
from sklearn.datasets import load_digits

import hypersphere as hs

from .samples import problem


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
    # Nearer to its class vector a sample is classified correctly, and farther away it is not.
    for shift, is_correct in ((-1e-3, True), (1e-3, False)):
        theta = boundaries + shift * torch.tensor([1, -1])
        logits = head.logits(torch.stack([theta.cos(), theta.sin()], 1), torch.tensor([0, 1]))
        assert (logits.argmax(1) == torch.tensor([0, 1])).tolist() == [is_correct] * 2
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


@pytest.mark.parametrize(("s", "trains"), [(1.0, False), (10.0, True), (30.0, True), (70.0, True)])
def test_sphere_normalised_softmax_needs_a_scale(s, trains):
    """Thesis, section 3.3: the loss of S-Softmax does not fall from scratch unless scores are scaled by s.

    For C unit class vectors the mean loss is at least log(1 + (C−1)·exp(−s·C/(C−1))), the value of a regular simplex.
    Without a scale this bound is 1.38 for ten classes; for 1,000 classes it is 5.9, not far below the initial loss of
    6.9. The predictions of this small network become right nevertheless.
    """
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    head = hs.heads.s_softmax(16, 10, s=s)
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(300):
        batch = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        head(network(x[batch]), y[batch]).backward()
        optimizer.step()
    loss = head(network(x), y).item()
    assert loss > math.log1p(9 * math.exp(-s * 10 / 9))
    assert (loss < 0.1) == trains
    assert loss > 1.37 or trains
    assert math.log1p(999 * math.exp(-1000 / 999)) > 0.85 * math.log(1000)
