"""The later members: SphereFace+, SphereFace-R, SphereFace2, AdaFace; peers; gradients of public code."""

import math

import numpy as np
import pytest
import torch

import hypersphere as hs
import oracle
from hypersphere.heads import BinaryHead


def problem(batch=6, dim=5, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (batch,), generator=generator)


def angles(x, w):
    return np.array([[oracle.angle(a, b) for b in w.detach().numpy()] for a in x.detach().numpy()])


def test_sphereface_plus_adds_the_energy_that_the_batch_asks_for():
    x, y = problem()
    plain, plus = hs.heads.a_softmax(5, 4).double(), hs.heads.sphereface_plus(5, 4, energy_weight=0.7).double()
    plus.load_state_dict(plain.state_dict())
    w = plain.weight.detach().numpy()
    unit = w / np.linalg.norm(w, axis=1, keepdims=True)
    pairs = [np.linalg.norm(unit[label] - unit[j]) ** -2 for label in y.tolist() for j in range(4) if j != label]
    expected = plain(x, y).item() + 0.7 * sum(pairs) / (len(y) * 3)
    assert plus(x, y).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("normalization", ["none", "hard", "soft"])
@pytest.mark.parametrize("version", [1, 2])
def test_sphereface_r_agrees_with_the_oracle(version, normalization):
    x, y = problem()
    head = hs.heads.sphereface_r(5, 4, m=1.7, version=version, s=12.0, normalization=normalization).double()
    theta, m = angles(x, head.weight), 1.7
    response = np.cos(theta / m) if version == 2 else np.cos(theta)
    for i, label in enumerate(y.tolist()):
        t = theta[i, label]
        response[i, label] = math.cos(t) if version == 2 else math.cos(min(m * t, math.pi))
    norms = x.norm(dim=1, keepdim=True).numpy()
    scores = response * (12.0 if normalization == "hard" else norms)
    expected = oracle.cross_entropy(scores, y.tolist())
    if normalization == "soft":
        expected += 0.01 * np.abs(norms - 12.0).mean()
    assert head(x, y).item() == pytest.approx(expected, rel=1e-10)
    plain = np.cos(theta) * (12.0 if normalization == "hard" else norms)
    np.testing.assert_allclose(head.scores(x).detach().numpy(), plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("margin", "own", "other"),
    [
        (hs.margin.TwoSided(0.3), lambda t, g: g(t) - 0.3, lambda t, g: g(t) + 0.3),
        (hs.margin.AdditiveAngle(0.3), lambda t, g: oracle.margin(t, g, m2=0.3), lambda t, g: g(t)),
        (hs.margin.TruncatedMultiplicative(1.6), lambda t, g: g(min(1.6 * t, math.pi)), lambda t, g: g(t)),
    ],
)
def test_sphereface2_agrees_with_the_oracle(margin, own, other):
    x, y = problem()
    head = hs.heads.sphereface2(5, 4, s=9.0, margin=margin, balance=0.6).double()
    torch.nn.init.constant_(head.bias, -0.4)
    g, theta, total = oracle.ANGULARS["power_cosine"], angles(x, head.weight), 0.0
    for i, label in enumerate(y.tolist()):
        for j in range(4):
            if j == label:
                total += 0.6 / 9 * math.log1p(math.exp(-(9 * own(theta[i, j], g) - 0.4)))
            else:
                total += 0.4 / 9 * math.log1p(math.exp(9 * other(theta[i, j], g) - 0.4))
    assert head(x, y).item() == pytest.approx(total / len(x), rel=1e-10)


def test_the_first_bias_of_sphereface2_is_the_best_one_for_features_at_right_angles():
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


def test_sphereface2_detached_gradient_is_that_of_the_bare_cosine():
    x, y = problem()
    head = hs.heads.sphereface2(5, 4, s=9.0).double()
    logits = head.logits(x, y)
    slope = torch.sigmoid(logits) * 0.3
    slope[torch.arange(len(y)), y] = -(0.7 * torch.sigmoid(-logits)).gather(1, y[:, None])[:, 0]
    c = hs.sphere.cosines(x, head.weight)
    (expected,) = torch.autograd.grad((c * slope.detach()).sum() / len(x), head.weight)
    torch.testing.assert_close(torch.autograd.grad(head(x, y), head.weight)[0], expected, atol=1e-10, rtol=0)


def test_adaface_moves_its_statistics_and_keeps_them():
    x, y = problem()
    head = hs.heads.adaface(5, 4, s=10.0).double()
    norms = x.norm(dim=1)
    head(x, y)
    assert head.norm_mean.item() == pytest.approx(0.99 * 20 + 0.01 * norms.mean().item(), rel=1e-6)
    assert head.norm_std.item() == pytest.approx(0.99 * 100 + 0.01 * norms.std().item(), rel=1e-6)
    head.eval()
    q = (0.333 * (norms - head.norm_mean) / head.norm_std).clamp(-1, 1).tolist()
    theta = angles(x, head.weight)
    scores = 10 * np.cos(theta)
    for i, label in enumerate(y.tolist()):
        scores[i, label] = 10 * (math.cos(theta[i, label] - 0.4 * q[i]) - 0.4 * (1 + q[i]))
    assert head(x, y).item() == pytest.approx(oracle.cross_entropy(scores, y.tolist()), rel=1e-10)
    assert {"norm_mean", "norm_std"} <= set(head.state_dict())
    quick = hs.heads.AngularHead(5, 4, radius=10.0, margin=hs.margin.NormAdaptive(momentum=1.0)).double()
    quick(x, y)
    assert quick.norm_mean.item() == pytest.approx(norms.mean().item(), rel=1e-6)


def test_normalized_gradient_is_the_original_spherefaces():
    x, y = problem()
    x.requires_grad_()
    true = hs.heads.a_softmax(5, 4, m=2).double()
    head = hs.heads.a_softmax(5, 4, m=2, gradient="normalized").double()
    head.load_state_dict(true.state_dict())
    assert head(x, y).item() == pytest.approx(true(x, y).item(), rel=1e-14)
    ours_x, ours_w = torch.autograd.grad(head(x, y), (x, head.weight))
    p = (torch.softmax(true.logits(x, y), 1) - torch.nn.functional.one_hot(y, 4)) / len(x)
    unit = true.weight / true.weight.norm(dim=1, keepdim=True)
    expected = torch.zeros_like(x)
    for i, label in enumerate(y.tolist()):
        norm = x[i].norm()
        c = (x[i] @ unit[label]) / norm
        k = int(c < 0)  # m = 2: one turn below a right angle
        along_w = (-1) ** k * 4 * c
        along_x = (-(((-1) ** k) * 2 * c**2 + 2 * k + (-1) ** k)) / norm
        length = torch.sqrt(along_w**2 + along_x**2)
        for j in range(4):
            if j == label:
                expected[i] += p[i, j] * (along_w * unit[j] + along_x * x[i]) / length
            else:
                expected[i] += p[i, j] * unit[j]
    torch.testing.assert_close(ours_x, expected.detach(), atol=1e-10, rtol=0)
    (plain_w,) = torch.autograd.grad((true.scores(x.detach()) * p.detach()).sum(), true.weight)
    torch.testing.assert_close(ours_w, plain_w, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        ("am_softmax", "CosFaceLoss", {"margin": 0.35, "scale": 30}),
        ("arcface", "ArcFaceLoss", {"margin": math.degrees(0.5), "scale": 30}),
    ],
)
def test_values_agree_with_pytorch_metric_learning(ours, theirs, options):
    losses = pytest.importorskip("pytorch_metric_learning.losses", reason="the extra 'compare' is not installed")
    x, y = problem(batch=20)
    head = hs.heads.PRESETS[ours](5, 4, s=30.0).double()
    peer = getattr(losses, theirs)(num_classes=4, embedding_size=5, **options).double()
    with torch.no_grad():
        peer.W.copy_(head.weight.T)
    near = hs.sphere.angle(hs.sphere.cosine(x, head.weight[y])) < math.pi - 0.5  # beyond, ArcFace's fall-backs differ
    assert head(x[near], y[near]).item() == pytest.approx(peer(x[near], y[near]).item(), rel=1e-6)
