"""Annealing and Ramp: values, counting, resuming, and activation checkpointing."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hypersphere as hs
import oracle
from hypersphere.heads import AngularHead, Annealing, Ramp

from .samples import problem


def test_annealing_ends_at_its_end_and_rejects_bad_settings():
    schedule = Annealing(end=0, gamma=2.5e-5, power=35)
    assert schedule(torch.tensor(0)).item() == 1000
    assert schedule(torch.tensor(10**7)).item() < 1e-3
    for wrong in ({"end": -1}, {"end": 2000}, {"gamma": -1}, {"power": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            Annealing(**wrong)


def test_annealing_blends_scores_counts_calls_and_resumes():
    x, y = problem()
    schedule = Annealing(start=10, gamma=0.5, power=1, end=2)
    head = hs.heads.a_softmax(5, 4, annealing=schedule).double()
    w = head.weight.detach().numpy()
    for step in range(4):
        share = max(2, 10 / (1 + 0.5 * step))
        psi = lambda t: oracle.margin(t, math.cos, m1=4)  # noqa: E731
        expected = oracle.head_logits(x.numpy(), w, y.tolist(), psi=psi, share=share)
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


def test_logits_do_not_advance_schedules():
    x, y = problem(batch=7)
    head = hs.heads.a_softmax(5, 4, annealing=Annealing()).double()
    head.logits(x, y)
    assert head.steps.item() == 0
    head.advance()
    assert head.steps.item() == 1
    hs.heads.softmax(5, 4).advance()  # nothing to advance


def test_reset_parameters_resets_schedules_and_statistics():
    with torch.device("meta"):
        head = hs.heads.AngularHead(5, 4, margin="norm_adaptive", ramp=Ramp())
    head.to_empty(device="cpu").reset_parameters()
    assert head.steps.item() == 0
    assert (head.norm_mean.item(), head.norm_std.item()) == (20, 100)


def test_inference_mode_does_not_advance_schedules():
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
def test_schedules_give_the_same_gradients_and_state_under_checkpointing(name, use_reentrant):
    plain = SCHEDULED[name]().double()
    recomputed = copy.deepcopy(plain)
    backbone = torch.nn.Linear(5, 5).double()

    def checkpointed(x, y):
        return checkpoint(lambda x, y: recomputed(backbone(x), y), x, y, use_reentrant=use_reentrant)

    for step in range(5):
        x, y = problem(seed=step)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss, expected = checkpointed(ours, y), plain(backbone(theirs), y)
        loss.backward()
        expected.backward()
        torch.testing.assert_close((loss, ours.grad), (expected, theirs.grad))
        torch.testing.assert_close(recomputed.weight.grad, plain.weight.grad)
        for key, value in plain.state_dict().items():
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
