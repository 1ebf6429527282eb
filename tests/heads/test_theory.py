"""Statements of the thesis and of other sources about margin losses, checked numerically."""

import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import hypersphere as hs

from .samples import features_near_class_vectors, problem

CLASSES, DIM = 6, 5


def printed_loss(target_score, scale, features, labels, weight):
    """Return −log(e^{f_y}/(e^{f_y} + Σ_{j≠y} e^{s·cos θ_j})) with f_y = s·target_score(θ_y), averaged over samples."""
    losses = []
    for x, y in zip(features, labels, strict=True):
        s = np.linalg.norm(x) if scale is None else scale
        cosines = weight @ x / np.linalg.norm(weight, axis=1) / np.linalg.norm(x)
        target = math.exp(s * target_score(math.acos(cosines[y])))
        others = sum(math.exp(s * c) for j, c in enumerate(cosines) if j != y)
        losses.append(-math.log(target / (target + others)))
    return np.mean(losses)


def multiplicative(theta, m=4):
    k = min(math.floor(m * theta / math.pi), m - 1)
    return (-1) ** k * math.cos(m * theta) - 2 * k


def loss_of(head, features, labels, weight):
    head = head.double().eval()
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(weight))
        return head(torch.from_numpy(features), torch.from_numpy(labels)).item()


# The losses of Part I and their target scores ψ(θ); a scale of None is ‖x‖.
FAMILY = {
    "weight-normalised": (lambda: hs.heads.modified_softmax(DIM, CLASSES), math.cos, None),
    "sphere-normalised": (lambda: hs.heads.s_softmax(DIM, CLASSES, s=12.0), math.cos, 12.0),
    "multiplicative margin": (lambda: hs.heads.a_softmax(DIM, CLASSES, 4), multiplicative, None),
    "additive cosine margin": (
        lambda: hs.heads.am_softmax(DIM, CLASSES, s=12.0, m=0.35),
        lambda theta: math.cos(theta) - 0.35,
        12.0,
    ),
    "additive angle margin": (
        lambda: hs.heads.arcface(DIM, CLASSES, s=12.0, m=0.5),
        lambda theta: math.cos(theta + 0.5),
        12.0,
    ),
}


@pytest.mark.parametrize("name", FAMILY)
def test_loss_matches_the_printed_formula(name):
    make_head, target_score, scale = FAMILY[name]
    assert loss_of(make_head(), *features_near_class_vectors(DIM, CLASSES)) == pytest.approx(
        printed_loss(target_score, scale, *features_near_class_vectors(DIM, CLASSES)), rel=1e-9
    )


@pytest.mark.parametrize("name", FAMILY)
def test_target_score_is_at_most_the_cosine(name):
    target_score = FAMILY[name][1]
    limit = math.pi - (0.5 if name == "additive angle margin" else 0.0)  # the printed cos(θ + m) rises again after π
    for theta in np.linspace(0, limit, 200):
        assert target_score(theta) <= math.cos(theta) + 1e-12


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_sphere_normalised_loss_needs_a_large_scale(classes):
    """With features on their class vectors, evenly spread, no smaller loss is possible at a given scale s."""
    simplex = np.eye(classes) - 1 / classes  # all cosines are −1/(C−1)
    labels = np.arange(classes)
    losses = []
    for s in (1.0, 10.0, 30.0, 70.0):
        loss = loss_of(hs.heads.s_softmax(classes, classes, s=s), simplex, labels, simplex)
        bound = math.log1p((classes - 1) * math.exp(-s * classes / (classes - 1)))
        assert loss == pytest.approx(bound, rel=1e-6, abs=1e-12)
        losses.append(loss)
    assert losses == sorted(losses, reverse=True)
    # At s = 1 even perfect features keep a large part of the initial loss log C; at s = 30 nothing is left of it.
    assert losses[0] > 0.15 * math.log(classes)
    assert losses[2] < 1e-9


# Annealing (thesis, appendix A.7) ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "start", "gamma", "power", "end"),
    [
        (hs.heads.Annealing(), 1000, 0.12, 1, 5),
        (hs.heads.Annealing(start=1000, gamma=2.5e-5, power=35, end=0), 1000, 2.5e-5, 35, 0),
    ],
    ids=["A-Softmax", "L-Softmax"],
)
def test_annealing_follows_its_formula(schedule, start, gamma, power, end):
    steps = np.array([0, 1, 10, 100, 1658, 1659, 10_000, 100_000])
    expected = np.maximum(end, start * (1 + gamma * steps) ** -float(power))
    np.testing.assert_allclose(schedule(torch.from_numpy(steps)).numpy(), expected, rtol=1e-5)
    assert (np.diff(expected) <= 0).all()


def test_annealing_of_a_softmax_reaches_five_after_1659_steps():
    values = hs.heads.Annealing()(torch.tensor([0, 1658, 1659, 10**6])).tolist()
    assert values[0] == 1000
    assert values[1] > 5
    assert values[2:] == [5, 5]


@pytest.mark.parametrize("lam", [0.0, 5.0, 1000.0])
def test_annealed_loss_mixes_plain_and_margin_scores(lam):
    schedule = hs.heads.Annealing(start=lam, gamma=0, end=lam)  # λ stays at one value
    loss = loss_of(hs.heads.a_softmax(DIM, CLASSES, 4, annealing=schedule), *features_near_class_vectors(DIM, CLASSES))
    expected = printed_loss(
        lambda theta: (lam * math.cos(theta) + multiplicative(theta)) / (1 + lam),
        None,
        *features_near_class_vectors(DIM, CLASSES),
    )
    assert loss == pytest.approx(expected, rel=1e-6)


def test_annealing_goes_from_the_plain_loss_to_the_margin_loss():
    def annealed(lam):
        schedule = hs.heads.Annealing(start=lam, gamma=0, end=lam)
        return loss_of(
            hs.heads.a_softmax(DIM, CLASSES, 4, annealing=schedule), *features_near_class_vectors(DIM, CLASSES)
        )

    losses = [annealed(lam) for lam in (1e6, 1000.0, 100.0, 5.0, 1.0, 0.0)]
    assert losses == sorted(losses)  # the task becomes harder as λ falls
    assert losses[0] == pytest.approx(
        loss_of(hs.heads.modified_softmax(DIM, CLASSES), *features_near_class_vectors(DIM, CLASSES)), rel=1e-5
    )
    assert losses[-1] == pytest.approx(
        loss_of(hs.heads.a_softmax(DIM, CLASSES, 4), *features_near_class_vectors(DIM, CLASSES)), rel=1e-9
    )


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
