"""Claims of the sources about the family of margin losses."""

import math

import numpy as np
import pytest
import torch

import hypersphere as hs

from .samples import features_near_class_vectors

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
