"""Annealing and Ramp: values, counting, resuming, and activation checkpointing."""

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hypersphere as hs
import oracle
from hypersphere.functions._recomputation import REMEMBERED_PASSES
from hypersphere.heads import AngularHead, Annealing, Ramp

from .samples import problem


def test_annealing_ends_at_its_end_and_rejects_bad_settings():
    schedule = Annealing(end=0, gamma=2.5e-5, power=35)
    assert schedule(torch.tensor(0)).item() == 1000
    assert schedule(torch.tensor(10**7)).item() < 1e-3
    for wrong, message in (
        ({"end": -1}, r"^end must be a number in \[0, start=1000\], not -1$"),
        ({"end": 2000}, r"^end must be a number in \[0, start=1000\], not 2000$"),
        ({"gamma": -1}, "^gamma must be a number >= 0, not -1$"),
        ({"power": -1}, "^power must be a number >= 0, not -1$"),
    ):
        with pytest.raises(ValueError, match=message):
            Annealing(**wrong)


def test_annealing_blends_scores_counts_calls_and_resumes():
    x, y = problem()
    schedule = Annealing(start=10, gamma=0.5, power=1, end=2)
    head = hs.heads.a_softmax(5, 4, annealing=schedule).double()
    w = head.weight.detach().numpy()
    for step in range(4):
        weight = max(2, 10 / (1 + 0.5 * step))  # λ
        psi = lambda t: oracle.margin(t, math.cos, m1=4)  # noqa: E731
        expected = oracle.head_logits(x.numpy(), w, y.tolist(), psi=psi, annealing_weight=weight)
        np.testing.assert_allclose(head.logits(x, y).detach().numpy(), expected, atol=1e-5)
        head(x, y)
    again = hs.heads.a_softmax(5, 4, annealing=schedule).double()
    again.load_state_dict(head.state_dict())
    assert again.steps.item() == 4
    assert again(x, y).item() == head(x, y).item()
    head.eval()
    head(x, y)
    assert head.steps.item() == 5  # evaluation does not advance it


def test_ramp_strengthens_the_margin_and_resumes():
    x, y = problem(batch=7)
    head = AngularHead(5, 4, radius=8.0, margin="additive_cosine", ramp=Ramp(steps=4)).double()
    plain = head.scores(x).gather(1, y[:, None])
    for step in range(6):
        m = 0.35 * min(1, step / 4)
        torch.testing.assert_close(plain - head.logits(x, y).gather(1, y[:, None]), torch.full_like(plain, 8 * m))
        head(x, y)
    again = AngularHead(5, 4, radius=8.0, margin="additive_cosine", ramp=Ramp(steps=4)).double()
    again.load_state_dict(head.state_dict())
    assert again(x, y).item() == head(x, y).item()


def test_ramp_interpolates_a_callable_margin():
    x, y = problem(batch=7)
    head = AngularHead(5, 4, radius=8.0, margin=lambda c: c - 0.4, ramp=Ramp(steps=4)).double()
    gap = lambda: (head.scores(x) - head.logits(x, y)).sum().item() / len(x)  # noqa: E731
    assert gap() == pytest.approx(0)
    head.advance()
    assert gap() == pytest.approx(8 * 0.1)


@pytest.mark.parametrize("margin", [hs.margin.DividedOthers(2.0), hs.margin.TwoSided(0.3), hs.margin.AdditiveAngle()])
def test_ramp_backward_uses_the_strength_of_its_forward(margin):
    x, y = problem(dim=8, classes=5)
    head = AngularHead(8, 5, radius=16.0, margin=margin, ramp=Ramp(steps=4)).double()
    for _ in range(4):
        (expected,) = torch.autograd.grad(F.cross_entropy(head.logits(x, y), y), head.weight)
        (ours,) = torch.autograd.grad(head(x, y), head.weight)
        torch.testing.assert_close(ours, expected, atol=1e-11, rtol=1e-9)


def test_head_logits_do_not_advance_schedules():
    x, y = problem(batch=7)
    head = hs.heads.a_softmax(5, 4, annealing=Annealing()).double()
    head.logits(x, y)
    assert head.steps.item() == 0
    head.advance()
    assert head.steps.item() == 1
    hs.heads.softmax(5, 4).advance()  # nothing to advance


def test_head_reset_parameters_resets_schedules_and_statistics():
    with torch.device("meta"):
        head = hs.heads.AngularHead(5, 4, margin="norm_adaptive", ramp=Ramp())
    head.to_empty(device="cpu").reset_parameters()
    assert head.steps.item() == 0
    assert (head.norm_mean.item(), head.norm_std.item()) == (20, 100)


def test_head_in_inference_mode_does_not_advance_schedules():
    x, y = problem(dim=8, classes=5)
    head = AngularHead(8, 5, radius=8.0, margin="norm_adaptive", ramp=Ramp()).double()
    with torch.inference_mode():
        head(x, y)
    assert head.steps.item() == 0
    head.load_state_dict(copy.deepcopy(head.state_dict()))


SCHEDULED = {
    "annealing": lambda: hs.heads.a_softmax(5, 4, annealing=Annealing(start=10, gamma=1.0, end=0)),
    "ramp": lambda: hs.heads.arcface(5, 4, s=8.0, ramp=Ramp(steps=4)),
    "ramp on others": lambda: hs.heads.sphereface_r(5, 4, version=2, ramp=Ramp(steps=4)),
    "binary": lambda: hs.heads.sphereface2(5, 4, ramp=Ramp(steps=4)),
    "adaface": lambda: AngularHead(5, 4, radius=8.0, margin=hs.margin.NormAdaptive(momentum=0.5), ramp=Ramp(steps=4)),
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", SCHEDULED)
def test_head_schedules_give_the_same_gradients_and_state_under_checkpointing(name, use_reentrant):
    reference = SCHEDULED[name]().double()
    recomputed = copy.deepcopy(reference)
    backbone = torch.nn.Linear(5, 5).double()

    def checkpointed(x, y):
        return checkpoint(lambda x, y: recomputed(backbone(x), y), x, y, use_reentrant=use_reentrant)

    for step in range(5):
        x, y = problem(seed=step)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss, expected = checkpointed(ours, y), reference(backbone(theirs), y)
        loss.backward()
        expected.backward()
        torch.testing.assert_close((loss, ours.grad), (expected, theirs.grad))
        torch.testing.assert_close(recomputed.weight.grad, reference.weight.grad)
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(recomputed.state_dict()[key], value)
    assert recomputed.steps.item() == 5


def test_advance_with_counts_optimizer_steps_under_gradient_accumulation():
    x, y = problem()
    head = hs.heads.a_softmax(5, 4, annealing=Annealing(start=10, gamma=1.0, end=0)).double()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    handle = head.advance_with(optimizer)
    for step in range(3):
        for _ in range(4):
            head(x, y).backward()
            assert head.steps.item() == step
        optimizer.step()
        optimizer.zero_grad()
    assert head.steps.item() == 3
    handle.remove()
    optimizer.step()
    assert head.steps.item() == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_advance_with_makes_several_checkpointed_calls_per_step_exact(use_reentrant):
    batches = [problem(seed=seed) for seed in range(2)]
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        head = hs.heads.a_softmax(5, 4, annealing=Annealing(start=10, gamma=1.0, end=0)).double()
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        head.advance_with(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            losses = []
            for x, y in batches:
                x = x.clone().requires_grad_()
                losses.append(checkpoint(head, x, y, use_reentrant=use_reentrant) if checkpointed else head(x, y))
            sum(losses).backward()
            optimizer.step()
        gradients.append(head.weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])


def gradients_of_two_calls(head, batches, use_checkpoint, use_reentrant=False, loss=None):
    """Return the gradients of features and class vectors after two calls and one backward pass.

    `loss` is the function to call, if it is not the head. Then schedules advance after each call.
    """
    features = [x.clone().requires_grad_() for x, _ in batches]
    head.zero_grad()
    total = 0
    for x, (_, y) in zip(features, batches, strict=True):
        call = loss or head
        total = total + (checkpoint(call, x, y, use_reentrant=use_reentrant) if use_checkpoint else call(x, y))
        if loss is not None:
            head.advance()
    total.backward()
    return [x.grad for x in features] + [head.weight.grad.clone()]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", SCHEDULED)
def test_head_repeats_two_checkpointed_calls_before_one_backward_with_their_steps(name, use_reentrant):
    head = SCHEDULED[name]().double()
    reference = copy.deepcopy(head)
    for step in range(3):
        batches = [problem(seed=2 * step + i, batch=6 - i) for i in range(2)]
        ours = gradients_of_two_calls(head, batches, True, use_reentrant)
        torch.testing.assert_close(ours, gradients_of_two_calls(reference, batches, False))
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(head.state_dict()[key], value)


def test_head_repeats_checkpointed_mixup_with_the_steps_of_both_labels():
    head = SCHEDULED["annealing"]().double()
    reference = copy.deepcopy(head)
    x, y = problem()
    batches = [(x, y), (x, y.flip(0))]
    ours = gradients_of_two_calls(head, batches, True)
    torch.testing.assert_close(ours, gradients_of_two_calls(reference, batches, False))


@pytest.mark.parametrize("name", SCHEDULED)
def test_head_repeats_checkpointed_logits_with_their_steps(name):
    head = SCHEDULED[name]().double()
    reference = copy.deepcopy(head)

    def loss(head):
        return lambda x, y: F.cross_entropy(head.logits(x, y), y)

    for step in range(2):
        batches = [problem(seed=2 * step + i) for i in range(2)]
        ours = gradients_of_two_calls(head, batches, True, loss=loss(head))
        torch.testing.assert_close(ours, gradients_of_two_calls(reference, batches, False, loss=loss(reference)))


def test_head_logits_between_forward_and_backward_do_not_change_a_repeated_call():
    head = SCHEDULED["ramp"]().double()
    reference = copy.deepcopy(head)
    x, y = problem()
    loss = checkpoint(head, x, y, use_reentrant=False)
    head.logits(x, y)
    ours, expected = torch.autograd.grad(loss, head.weight), torch.autograd.grad(reference(x, y), reference.weight)
    torch.testing.assert_close(ours, expected)


def test_head_repeats_a_checkpointed_call_with_nan_in_an_ignored_sample():
    head = SCHEDULED["adaface"]().double()
    reference = copy.deepcopy(head)
    batches = [problem(seed=seed) for seed in range(2)]
    for x, y in batches:
        x[1], y[1] = float("nan"), -100
    ours = gradients_of_two_calls(head, batches, True)
    torch.testing.assert_close(ours[-1], gradients_of_two_calls(reference, batches, False)[-1])


def test_head_warns_once_of_a_repeated_call_that_is_not_remembered():
    head = SCHEDULED["ramp"]().double()

    def backward(calls):
        batches = [problem(seed=seed) for seed in range(calls)]
        sum(checkpoint(head, x, y, use_reentrant=False) for x, y in batches).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(REMEMBERED_PASSES)
    message = (
        "^a forward pass that activation checkpointing repeats was not recognised by its input, so its gradient uses "
        "the step and the statistics of the last pass: the last 8 passes of a module are remembered, and a repeated "
        "pass must have the same input$"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        backward(REMEMBERED_PASSES + 3)
    assert len(caught) == 1


def test_advance_with_follows_optimizers_that_step_together():
    head, layer = hs.heads.arcface(4, 3, ramp=Ramp(10)), torch.nn.Linear(2, 2)
    members = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (layer, head)]
    optimizer = hs.optim.Optimizers(members)
    with head.advance_with(optimizer):
        head(torch.randn(2, 4), torch.tensor([0, 1])).backward()
        optimizer.step()
        assert head.steps.item() == 1
    for wrong in (None, hs.optim.Optimizers([]), "adam"):
        with pytest.raises(ValueError, match="optimizer must be an optimiser of torch or `Optimizers`"):
            head.advance_with(wrong)


def test_advance_with_handle_returns_to_counting_calls():
    x, y = problem()
    head = hs.heads.a_softmax(5, 4, annealing=Annealing()).double()
    optimizers = [torch.optim.SGD(head.parameters(), lr=0.1) for _ in range(2)]
    handles = [head.advance_with(optimizer) for optimizer in optimizers]
    head(x, y)
    handles[0].remove()
    handles[0].remove()
    head(x, y)
    assert head.steps.item() == 0  # the second optimizer counts
    handles[1].remove()
    head(x, y)
    assert head.steps.item() == 1
    with head.advance_with(optimizers[0]):
        head(x, y)
        optimizers[0].step()
        assert head.steps.item() == 2
    optimizers[0].step()
    head(x, y)
    assert head.steps.item() == 3


def test_advance_with_the_same_optimizer_twice_counts_its_steps_once():
    x, y = problem()
    head = hs.heads.a_softmax(5, 4, annealing=Annealing()).double()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    first, second = head.advance_with(optimizer), head.advance_with(optimizer)
    head(x, y).backward()
    optimizer.step()
    assert head.steps.item() == 1
    first.remove()
    optimizer.step()
    assert head.steps.item() == 2
    second.remove()
    optimizer.step()
    assert head.steps.item() == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_copy_of_a_head_that_follows_an_optimizer_counts_its_calls(copied):
    head = hs.heads.arcface(4, 3, ramp=Ramp(10))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head.advance_with(optimizer)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    other = copied(head)
    for _ in range(2):
        other(x, y)
    assert int(other.steps) == 2
    head(x, y).backward()
    assert int(head.steps) == 0  # the original still follows its optimizer
    optimizer.step()
    assert (int(head.steps), int(other.steps)) == (1, 2)
