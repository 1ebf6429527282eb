"""Baselines against explicit sums, pytorch-metric-learning and torch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import distances, losses, miners
from torch.utils.checkpoint import checkpoint

import hypersphere as hs
from hypersphere.heads import BASELINES, CenterHead, HingeHead, MetricLearningHead, NonFiniteScoresError

from .samples import problem


@pytest.mark.parametrize("power", [1, 2])
def test_hinge_head_equals_the_sum_over_classes(power):
    x, y = problem(batch=7)
    head = HingeHead(5, 4, power=power, bias=True).double()
    torch.nn.init.normal_(head.bias)
    scores = x.numpy() @ head.weight.detach().numpy().T + head.bias.detach().numpy()
    total = 0.0
    for row, label in zip(scores, y.tolist(), strict=True):
        for j, score in enumerate(row):
            total += max(0.0, 1 - (1 if j == label else -1) * score) ** power
    assert head(x, y).item() == pytest.approx(total / 7, rel=1e-12)


@pytest.mark.parametrize("power", [1, 2])
def test_hinge_head_in_float16_sums_more_terms_than_float16_can_represent(power):
    x, y = problem(256, 8, 1000, torch.float16)
    head = HingeHead(8, 1000, power=power).half()
    loss = head(x, y)
    assert loss.dtype == torch.float16
    assert torch.isfinite(torch.autograd.grad(loss, head.weight)[0]).all()
    torch.testing.assert_close(loss.float(), head.float()(x.float(), y), rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_center_head_in_float16_sums_more_squares_than_float16_can_represent(dtype):
    x, y = problem(256, 512, 2, torch.float16)
    x = 30 * x / x.std() + 600
    head, reference = (CenterHead(512, 2, center_weight=1e-4).to(d) for d in (dtype, torch.float32))
    reference.load_state_dict(head.state_dict())
    x.requires_grad_()
    loss, wide = head(x, y), reference(x.float(), y)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss.float(), wide, rtol=2e-3, atol=0)
    assert torch.isfinite(torch.autograd.grad(loss, x)[0]).all()
    assert head.centers.dtype == dtype
    torch.testing.assert_close(head.centers.float(), reference.centers, rtol=2e-3, atol=0)


def test_center_head_adds_the_distance_to_the_centres_and_moves_them():
    x, y = problem(batch=6)
    head = CenterHead(5, 4, center_weight=0.4, rate=0.5).double()
    torch.nn.init.normal_(head.centers)
    centers = head.centers.clone().numpy()
    distances_squared = [np.sum((x[i].numpy() - centers[y[i]]) ** 2) for i in range(6)]
    expected = F.cross_entropy(x @ head.weight.mT, y).item() + 0.2 * np.mean(distances_squared)
    assert head(x, y).item() == pytest.approx(expected, rel=1e-12)
    for label in range(4):
        members = [i for i in range(6) if y[i] == label]
        change = sum((centers[label] - x[i].numpy() for i in members), np.zeros(5)) / (1 + len(members))
        np.testing.assert_allclose(head.centers[label].numpy(), centers[label] - 0.5 * change, rtol=1e-12)


@pytest.mark.parametrize("kind", [HingeHead, CenterHead])
def test_baselines_name_the_row_of_a_feature_that_is_not_finite(kind):
    x = torch.ones(3, 5)
    x[0], x[2, 1] = torch.nan, torch.inf
    with pytest.raises(ValueError, match="x must be finite, but row 2 is not"):
        kind(5, 4)(x, torch.tensor([-100, 1, 2]))


def test_center_head_keeps_centres_if_the_distances_overflow():
    head = CenterHead(5, 4)
    x, y = torch.ones(3, 5), torch.tensor([-100, 1, 2])
    head(x, y)
    centers = head.centers.clone()
    x[2] = 1e25
    with pytest.raises(NonFiniteScoresError, match="but row 2 overflows"):
        head(x, y)
    assert torch.equal(head.centers, centers)


def test_center_head_keeps_centres_in_evaluation_mode():
    x, y = problem(batch=6)
    head = CenterHead(5, 4).double().eval()
    head(x, y)
    assert not head.centers.any()
    assert "centers" in head.state_dict()


def test_center_head_reset_sets_centres_to_zero():
    head = CenterHead(5, 4)
    head(torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 0, 1]))
    assert head.centers.any()
    head.reset_parameters()
    assert not head.centers.any()


def test_center_head_created_on_the_meta_device_is_initialised_by_a_reset():
    with torch.device("meta"):
        head = CenterHead(5, 4)
    head = head.to_empty(device="cpu")
    head.centers.fill_(torch.nan)  # memory that `to_empty` allocates may contain anything
    head.reset_parameters()
    assert not head.centers.any()
    assert head(torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 0, 1])).isfinite()


def test_center_head_attracts_features_to_their_centres():
    x, y = problem(batch=6)
    head = CenterHead(5, 4, center_weight=1.0).double()
    leaf = x.clone().requires_grad_()
    plain = hs.heads.softmax(5, 4).double()
    plain.load_state_dict({"weight": head.weight.detach()})
    (gradient,) = torch.autograd.grad(head(leaf, y), leaf)
    (plain_gradient,) = torch.autograd.grad(plain(leaf, y), leaf)
    torch.testing.assert_close(gradient - plain_gradient, x / 6)  # the centres are zero before the call


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_center_head_repeats_checkpointed_calls_with_the_centres_they_used(use_reentrant):
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        head = CenterHead(5, 4, center_weight=1.0).double()
        features, total = [], 0
        for seed in range(2):
            x, y = problem(seed=seed)
            features.append(x.requires_grad_())
            total = total + (checkpoint(head, x, y, use_reentrant=use_reentrant) if checkpointed else head(x, y))
        total.backward()
        gradients.append([x.grad for x in features] + [head.weight.grad, head.centers])
    torch.testing.assert_close(*gradients)


def test_metric_learning_head_adds_the_loss_of_the_library():
    x, y = problem(batch=12)
    head = MetricLearningHead(5, 4, loss={"name": "ContrastiveLoss", "neg_margin": 0.8}, loss_weight=0.3).double()
    expected = F.cross_entropy(x @ head.weight.mT, y) + 0.3 * losses.ContrastiveLoss(neg_margin=0.8)(x, y)
    torch.testing.assert_close(head(x, y), expected, rtol=1e-12, atol=0)


def test_metric_learning_head_selects_triplets_with_a_miner_and_a_distance():
    x, y = problem(batch=12)
    squared = {"name": "LpDistance", "power": 2}
    head = MetricLearningHead(
        5,
        4,
        loss={"name": "TripletMarginLoss", "margin": 0.2, "distance": squared},
        miner={"name": "TripletMarginMiner", "margin": 0.2, "type_of_triplets": "semihard"},
        softmax_weight=2.0,
    ).double()
    selected = miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard")(x, y)
    triplets = losses.TripletMarginLoss(margin=0.2, distance=distances.LpDistance(power=2))(x, y, selected)
    torch.testing.assert_close(head(x, y), 2 * F.cross_entropy(x @ head.weight.mT, y) + triplets, rtol=1e-12, atol=0)


def test_metric_learning_head_without_softmax_trains_its_classifier_on_detached_features():
    x, y = problem(batch=12)
    head = MetricLearningHead(5, 4, loss="TripletMarginLoss", softmax_weight=0.0).double()
    leaf = x.clone().requires_grad_()
    head(leaf, y).backward()
    (expected,) = torch.autograd.grad(losses.TripletMarginLoss()(leaf, y), leaf)
    torch.testing.assert_close(leaf.grad, expected)
    classified = F.cross_entropy(x @ head.weight.mT, y)
    torch.testing.assert_close(head.weight.grad, torch.autograd.grad(classified, head.weight)[0])


def test_metric_learning_head_fills_in_the_sizes_of_proxies():
    head = MetricLearningHead(5, 4, loss="ProxyAnchorLoss")
    assert head.loss.proxies.shape == (4, 5)
    assert any(parameter is head.loss.proxies for parameter in head.parameters())


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_leave_out_ignored_samples(name):
    x, y = problem(batch=12)
    head = BASELINES[name](5, 4).double().eval()
    ignored = y.clone()
    ignored[:3] = head.ignore_index
    torch.testing.assert_close(head(x, ignored), head(x[3:], y[3:]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_cannot_be_sharded(name):
    with pytest.raises(ValueError, match="head must be a head whose loss is computed from the terms of its classes"):
        hs.heads.ShardedHead(BASELINES[name](5, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HingeHead(5, 4, power=3), "power must be 1 or 2, not 3"),
        (lambda: CenterHead(5, 4, rate=2.0), r"rate must be a number in \[0, 1\], not 2.0"),
        (lambda: MetricLearningHead(5, 4, loss="ContrastivLoss"), "did you mean ContrastiveLoss"),
        (
            lambda: MetricLearningHead(5, 4, loss={"margin": 1}),
            "loss must name a class of pytorch_metric_learning.losses",
        ),
        (lambda: MetricLearningHead(5, 4, loss={"name": "SupConLoss", "heat": 1}), "'SupConLoss' does not accept"),
        (lambda: MetricLearningHead(5, 4, miner="none"), "miner must name a class of pytorch_metric_learning.miners"),
    ],
)
def test_baselines_name_a_wrong_setting(make, message):
    with pytest.raises(ValueError, match=message):
        make()
