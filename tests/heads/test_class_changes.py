"""Adding, removing and merging classes, with optimiser state; dominant centres and labels far from them."""

import math

import numpy as np
import pytest
import torch

import hypersphere as hs
import oracle
from hypersphere.heads import AngularHead, ShardedHead

from .samples import problem

DIM, CLASSES = 5, 6
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "row_sgd": lambda p: hs.optim.RowSGD(p, 0.1, momentum=0.9),
    "row_adamw": lambda p: hs.optim.RowAdamW(p, 0.01),
    "optimizers": lambda p: hs.optim.Optimizers([torch.optim.SGD(p, 0.1, momentum=0.9)]),
    "hyperball": lambda p: hs.optim.Hyperball(torch.optim.SGD(p, 0.1, momentum=0.9), per="row"),
}


def trained(make, centers=1, wrap=lambda head: head, **options):
    torch.manual_seed(0)
    weights = torch.arange(1.0, CLASSES + 1)
    head = wrap(hs.heads.arcface(DIM, CLASSES, s=8.0, centers=centers, class_weights=weights, **options))
    optimizer = make(list(head.parameters()))
    x, y = problem(12, DIM, CLASSES, torch.float32)
    for _ in range(2):
        optimizer.zero_grad()
        loss = head(x, y)  # kept alive, as in a training loop
        loss.backward()
        optimizer.step()
    return head, optimizer, loss


def states(optimizer):
    """Return copies of the tensors with rows that an optimiser keeps for its first parameter."""
    optimizer = getattr(optimizer, "optimizers", [optimizer])[0]
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    return {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor) and value.ndim}


def assert_trains(head, optimizer, classes):
    """Train one step, which must move the class vectors."""
    before = head.weight.detach().clone()
    x, y = problem(30, DIM, classes, torch.float32, seed=1)
    optimizer.zero_grad()
    head(x, y).backward()
    optimizer.step()
    assert not torch.equal(head.weight, before)
    assert head.scores(x).shape == (30, classes)


@pytest.mark.parametrize("centers", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_drop_removes_rows_of_weight_and_optimizer_state(name, centers):
    head, optimizer, _ = trained(OPTIMIZERS[name], centers)
    weight, before = head.weight.detach().clone(), states(optimizer)
    assert before
    assert head.drop([1, 4], optimizer=optimizer).tolist() == [0, -1, 1, 2, -1, 3]
    kept = [centers * j + k for j in (0, 2, 3, 5) for k in range(centers)]
    assert head.num_classes == 4
    assert torch.equal(head.weight, weight[kept])
    after = states(optimizer)
    for key, value in before.items():
        if key != "radius":  # measured again
            assert torch.equal(after[key], value[kept]), key
    assert head.class_weights.tolist() == [1, 3, 4, 6]
    assert_trains(head, optimizer, 4)


@pytest.mark.parametrize("centers", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_grow_keeps_rows_and_starts_new_ones_at_features(name, centers):
    head, optimizer, _ = trained(OPTIMIZERS[name], centers)
    weight, before = head.weight.detach().clone(), states(optimizer)
    init = torch.randn(2, DIM)
    assert head.grow(2, init=init, optimizer=optimizer).tolist() == list(range(CLASSES))
    assert head.num_classes == CLASSES + 2
    assert torch.equal(head.weight[: len(weight)], weight)
    new = head.weight[len(weight) :].detach()
    torch.testing.assert_close(new.norm(dim=1), weight.norm(dim=1).mean().expand(len(new)))
    torch.testing.assert_close(hs.sphere.cosine(new[::centers], init), torch.ones(2))
    after = states(optimizer)
    for key, value in before.items():
        if key != "radius":
            assert torch.equal(after[key][: len(value)], value), key
            assert not after[key][len(value) :].any(), key
    assert head.class_weights.tolist() == [1, 2, 3, 4, 5, 6, 1, 1]
    assert_trains(head, optimizer, CLASSES + 2)


STARTING_AWAY_FROM_ZERO = {
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.3),
    "rprop": lambda p: torch.optim.Rprop(p, 0.02),
    "hyperball": lambda p: hs.optim.Hyperball(torch.optim.Rprop(p, 0.02), per="row"),
}


@pytest.mark.parametrize("wrap", [lambda head: head, ShardedHead], ids=["plain", "sharded"])
@pytest.mark.parametrize("name", STARTING_AWAY_FROM_ZERO)
def test_grow_starts_the_optimizer_state_of_new_rows_as_for_a_new_parameter(name, wrap):
    make = STARTING_AWAY_FROM_ZERO[name]
    head, optimizer, _ = trained(make, 2, wrap)
    before = states(optimizer)
    head.grow(3, optimizer=optimizer)
    parameter = torch.nn.Parameter(torch.ones(6, DIM))
    parameter.grad = torch.zeros_like(parameter)  # does not change the initial state
    fresh = make([parameter])
    fresh.step()
    after, expected = states(optimizer), states(fresh)
    assert any(value.any() for key, value in expected.items() if key != "radius")
    for key in before.keys() - {"radius"}:
        assert torch.equal(after[key], torch.cat([before[key], expected[key]])), key
    assert_trains(head, optimizer, CLASSES + 3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_merge_averages_directions_and_optimizer_state(name):
    head, optimizer, _ = trained(OPTIMIZERS[name])
    weight, before = head.weight.detach().clone(), states(optimizer)
    assert head.merge(4, 1, optimizer=optimizer).tolist() == [0, 3, 1, 2, 3, 4]
    a, b = weight[4].double().numpy(), weight[1].double().numpy()
    mean = a / np.linalg.norm(a) + b / np.linalg.norm(b)
    expected = mean / np.linalg.norm(mean) * (np.linalg.norm(a) + np.linalg.norm(b)) / 2
    np.testing.assert_allclose(head.weight[3].detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(head.weight[[0, 1, 2, 4]], weight[[0, 2, 3, 5]])
    after = states(optimizer)
    for key, value in before.items():
        if key != "radius":
            mean = (value[4] + value[1]) / 2 if value.is_floating_point() else (value[4] + value[1]) // 2
            torch.testing.assert_close(after[key][3], mean)
            assert torch.equal(after[key][[0, 1, 2, 4]], value[[0, 2, 3, 5]])
    assert head.class_weights.tolist() == [1, 3, 4, 5, 6]
    assert_trains(head, optimizer, CLASSES - 1)


def test_merge_matches_nearest_centres():
    head = AngularHead(2, 3, centers=2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [0, 1], [1, 0], [-1, 0], [0, -1]]))
    head.merge(0, 1)
    torch.testing.assert_close(head.weight.detach(), torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]]))


def test_class_changes_follow_biases_margins_and_energy():
    torch.manual_seed(0)
    strengths = torch.linspace(0, 1, CLASSES)
    head = AngularHead(
        DIM, CLASSES, margin="multiplicative", bias=True, class_margins=strengths, energy_weight=0.5, energy_start=1
    )
    torch.nn.init.normal_(head.bias)
    bias = head.bias.detach().clone()
    x, y = problem(12, DIM, CLASSES, torch.float32)
    head(x, y)
    head.drop(torch.tensor([0]))
    assert torch.equal(head.bias, bias[1:])
    assert torch.equal(head.class_margins, strengths[1:])
    head.grow(1)
    torch.testing.assert_close(head.bias[-1], bias[1:].mean())
    assert head.class_margins[-1] == 1
    twin = AngularHead(
        DIM,
        CLASSES,
        margin="multiplicative",
        bias=True,
        class_margins=torch.cat([strengths[1:], torch.ones(1)]),
        energy_weight=0.5,
        energy_start=1,
    )
    twin.load_state_dict(head.state_dict())
    assert head.steps.item() == 1
    assert head(x, y).item() == twin(x, y).item()
    merged = head.bias.detach()[[1, 3]].mean()
    head.merge(1, 3)
    torch.testing.assert_close(head.bias[1], merged)


def test_class_changes_of_a_binary_head_keep_its_shared_bias():
    head = hs.heads.sphereface2(DIM, CLASSES)
    bias = head.bias.item()
    head.grow(2)
    head.drop([0])
    x, y = problem(8, DIM, CLASSES + 1, torch.float32)
    assert torch.isfinite(head(x, y))
    assert head.bias.item() == bias


def test_class_changes_of_a_center_head_follow_its_centres():
    head = hs.heads.CenterHead(DIM, CLASSES)
    x, y = problem(12, DIM, CLASSES, torch.float32)
    head(x, y)
    centers = head.centers.clone()
    head.drop([2])
    head.grow(1)
    assert torch.equal(head.centers[:-1], centers[[0, 1, 3, 4, 5]])
    assert not head.centers[-1].any()
    assert torch.isfinite(head(x, y))


def test_class_changes_reject_invalid_arguments():
    head = hs.heads.arcface(DIM, 4)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    for call, message in (
        (lambda: head.grow(0), "n must be an integer >= 1, not 0"),
        (
            lambda: head.grow(2, init=torch.ones(3, DIM)),
            r"init must be features of shape \(2, 5\) or None, not \(3, 5\)",
        ),
        (lambda: head.grow(1, init=torch.full((1, DIM), math.nan)), "init must be finite, but row 0 is not"),
        (lambda: head.drop([]), r"classes must be classes in \[0, 4\), not \[\]"),
        (lambda: head.drop([4]), r"classes must be classes in \[0, 4\), not \[4\]"),
        (lambda: head.drop([1, 1]), r"classes must be classes in \[0, 4\), not \[1, 1\]"),
        (lambda: head.drop([0, 1, 2]), "classes must be at most 2 of 4 classes, not 3"),
        (lambda: head.merge(0, 0), "b must be a class other than a=0, not 0"),
        (lambda: head.merge(5, 0), r"a must be a class in \[0, 4\), not 5"),
        (
            lambda: head.drop([0], optimizer=other),
            "optimizer must have the parameters of the head, but lacks its weight",
        ),
        (
            lambda: head.grow(1, optimizer=torch.optim.LBFGS(head.parameters())),
            "optimizer must not be LBFGS, whose state does not follow rows",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert head.num_classes == len(head.weight) == 4


@pytest.mark.parametrize("wrap", [lambda head: head, ShardedHead])
def test_class_changes_reject_a_fixed_head(wrap):
    head = wrap(hs.heads.fixed(DIM, 4))
    weight = head.weight.clone()
    for change in (lambda: head.grow(1), lambda: head.drop([0]), lambda: head.merge(0, 1)):
        with pytest.raises(ValueError, match="head must be one whose weight is a plain parameter, not 'FixedHead'"):
            change()
    assert head.num_classes == 4
    assert torch.equal(head.weight, weight)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("change", ["grow", "drop", "merge"])
def test_sharded_head_in_one_process_changes_classes_like_a_plain_head(name, change):
    results = []
    for wrap in (lambda head: head, ShardedHead):
        head, optimizer, _ = trained(OPTIMIZERS[name], 2, wrap)
        if change == "grow":
            mapping = head.grow(2, init=torch.ones(2, DIM), optimizer=optimizer)
        else:
            mapping = head.drop([1], optimizer=optimizer) if change == "drop" else head.merge(0, 3, optimizer=optimizer)
        results.append((head, optimizer, mapping))
    (plain, _, ours), (sharded, optimizer, theirs) = results
    assert torch.equal(ours, theirs)
    assert sharded.num_classes == sharded.head.num_classes == plain.num_classes
    if change == "grow":  # the other centres of new classes are random
        assert torch.equal(plain.weight[: 2 * CLASSES + 1], sharded.weight[: 2 * CLASSES + 1])
    else:
        assert torch.equal(plain.weight, sharded.weight)
        x, y = problem(12, DIM, plain.num_classes, torch.float32)
        torch.testing.assert_close(sharded(x, y), plain(x, y))
    assert_trains(sharded, optimizer, plain.num_classes)


# Dominant centres ----------------------------------------------------------------------------------------------------


def test_label_angles_equal_brute_force():
    torch.manual_seed(0)
    head = hs.heads.arcface(DIM, CLASSES, centers=3).double()
    x, y = problem(40, DIM, CLASSES)
    y[3] = -100
    result = head.label_angles(x, y, max_angle=1.2)
    w, counts = head.weight.detach().numpy().reshape(CLASSES, 3, DIM), np.zeros((CLASSES, 3), dtype=int)
    angles = np.array(
        [[oracle.angle(a.numpy(), v) for v in w[max(label, 0)]] for a, label in zip(x, y.tolist(), strict=True)]
    )
    for row, label in zip(angles, y.tolist(), strict=True):
        if label >= 0:
            counts[label, row.argmin()] += 1
    assert result.counts.tolist() == counts.tolist()
    assert result.dominant.tolist() == counts.argmax(1).tolist()
    expected = [
        0.0 if label < 0 else row[counts[label].argmax()] for row, label in zip(angles, y.tolist(), strict=True)
    ]
    np.testing.assert_allclose(result.angles.numpy(), expected, atol=1e-10)
    assert result.exceeds.tolist() == [value > 1.2 for value in expected]
    with pytest.raises(ValueError, match=r"max_angle must be an angle in \[0, pi\], not 75"):
        head.label_angles(x, y, max_angle=75)


def test_label_angles_separate_wrong_labels():
    """Samples of another class under the label 0 have a centre of their own and are found by their angle."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(60, 8) * 0.2 + torch.eye(8)[0] * 3, torch.randn(20, 8) * 0.2 + torch.eye(8)[1] * 3])
    y = torch.zeros(80, dtype=torch.long)
    head = hs.heads.arcface(8, 3, s=16.0, m=0.1, centers=2)
    optimizer = torch.optim.SGD(head.parameters(), 0.5, momentum=0.9)
    for _ in range(60):
        optimizer.zero_grad()
        head(x, y).backward()
        optimizer.step()
    result = head.label_angles(x, y)
    assert result.exceeds[60:].all()
    assert not result.exceeds[:60].any()


@pytest.mark.parametrize("name", ["sgd", "adam", "row_adamw"])
def test_keep_dominant_centers_reduces_the_head_and_its_state(name):
    head, optimizer, _ = trained(OPTIMIZERS[name], 3)
    weight, before = head.weight.detach().clone(), states(optimizer)
    x, y = problem(20, DIM, CLASSES, torch.float32)
    dominant = head.label_angles(x, y).dominant
    head.keep_dominant_centers(dominant, optimizer=optimizer)
    rows = [3 * j + int(k) for j, k in enumerate(dominant)]
    assert head.num_centers == 1
    assert "centers" not in repr(head)
    assert torch.equal(head.weight, weight[rows])
    for key, value in states(optimizer).items():
        assert torch.equal(value, before[key][rows])
    assert_trains(head, optimizer, CLASSES)
    with pytest.raises(ValueError, match=r"dominant must be 6 centres in \[0, 1\)"):
        head.keep_dominant_centers(torch.ones(CLASSES, dtype=torch.long))


@pytest.mark.parametrize("change", ["grow", "drop", "merge"])
def test_class_changes_leave_everything_as_it_was_if_the_optimizer_lacks_the_bias(change):
    head = AngularHead(8, 4, bias=True)
    optimizer = torch.optim.SGD([head.weight], 0.1)
    weight, bias = head.weight, head.bias
    arguments = {"grow": (1,), "drop": ([0],), "merge": (0, 1)}[change]
    with pytest.raises(ValueError, match="optimizer must have the parameters of the head, but lacks its bias"):
        getattr(head, change)(*arguments, optimizer=optimizer)
    assert (head.weight, head.bias) == (weight, bias)
    assert head.num_classes == 4
    assert optimizer.param_groups[0]["params"] == [weight]


def test_fixed_heads_refuse_to_keep_centers():
    with pytest.raises(ValueError, match="head must be one whose weight is a plain parameter, not 'FixedHead'"):
        hs.heads.FixedHead(torch.eye(3, 8)).keep_dominant_centers(torch.zeros(3, dtype=torch.long))


def test_grow_refuses_a_class_vector_without_direction():
    with pytest.raises(ValueError, match="init must be features other than zero"):
        AngularHead(8, 3).grow(1, init=torch.zeros(1, 8))


def test_adacos_keeps_three_classes():
    head = hs.heads.adacos(8, 3)
    with pytest.raises(ValueError, match="classes must be at most 0 of 3 classes, not 1"):
        head.drop([0])
    with pytest.raises(ValueError, match="b must be a class of a head with more than 3 classes, not 1"):
        head.merge(0, 1)


@pytest.mark.parametrize("classes", [1, torch.tensor(1), "01"])
def test_drop_refuses_what_is_no_list(classes):
    with pytest.raises(ValueError, match="classes must be a list or tensor of classes"):
        hs.heads.arcface(4, 5).drop(classes)


def test_label_angles_refuse_features_that_are_not_finite():
    x = torch.full((2, 4), math.nan)
    head = hs.heads.arcface(4, 3)
    with pytest.raises(ValueError, match="x must be finite"):
        head.label_angles(x, torch.tensor([0, 1]))
    assert head.label_angles(x, torch.tensor([-100, -100])).exceeds.tolist() == [False, False]
