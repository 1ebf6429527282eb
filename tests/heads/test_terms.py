"""The fused pass against the plain one, and both against sums written out."""

import copy

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.profiler import ProfilerActivity, profile

import hypersphere as hs
from hypersphere.heads import terms
from hypersphere.heads.terms import LOG_SUM_EXP, SOFTPLUS_SUM, Wanted, class_terms, plain_terms


def problem(batch=9, dim=6, classes=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    w = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    y = torch.randint(-1, classes, (batch,), generator=generator)
    y[0], y[1], y[2] = -1, 0, classes - 1
    rho = torch.rand(batch, generator=generator, dtype=torch.float64) + 0.5
    bias = torch.randn(classes, generator=generator, dtype=torch.float64)
    return x, w, y, rho, bias


FORMS = {
    "unit": Wanted(True),
    "raw": Wanted(False),
    "response": Wanted(True, hs.angular.Linear()),
    "detached": Wanted(True, hs.angular.Sigmoid(), detached=True),
    "total": Wanted(True, total_weights=torch.linspace(0, 1, 40, dtype=torch.float64)),
    "binary": Wanted(True, hs.angular.PowerCosine(), reduction=SOFTPLUS_SUM),
}


@pytest.fixture(params=["one block", "many blocks", "computed again"])
def blocks(request, monkeypatch):
    if request.param != "one block":
        monkeypatch.setattr(terms, "_WEIGHTS_AT_ONCE", 6 * 7)  # seven classes at once
    if request.param == "computed again":
        monkeypatch.setattr(terms, "_PRODUCTS_KEPT", 0)


def gradients(function, x, w, y, rho, bias, wanted):
    leaves = [t.clone().requires_grad_() for t in (x, w, rho, bias)]
    out = function(leaves[0], leaves[1], y, leaves[2] if wanted.response else None, leaves[3], wanted)
    generator = torch.Generator().manual_seed(5)
    shares = [torch.randn(len(x), generator=generator, dtype=torch.float64) for _ in out]
    value = sum((share * term).sum() for share, term in zip(shares, out, strict=True) if term is not None)
    value.backward()
    return out, [t.grad for t in leaves]


@pytest.mark.parametrize("form", FORMS)
def test_fused_terms_and_gradients_are_the_plain_ones(form, blocks):
    ours, mine = gradients(class_terms, *problem(), FORMS[form])
    theirs, expected = gradients(plain_terms, *problem(), FORMS[form])
    for a, b in zip([*ours, *mine], [*theirs, *expected], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_others_are_the_sum_over_all_but_the_target(blocks):
    x, w, y, _, bias = problem()
    unit = (w / w.norm(dim=1, keepdim=True)).numpy()
    out = class_terms(x, w, y, None, bias, FORMS["unit"])
    for i in range(len(x)):
        scores = unit @ x[i].numpy() + bias.numpy()
        kept = np.delete(scores, y[i].item()) if y[i] >= 0 else scores
        assert out.others[i].item() == pytest.approx(np.log(np.exp(kept).sum()), rel=1e-12)
        target = unit[y[i]] @ x[i].numpy() if y[i] >= 0 else 0
        assert out.target[i].item() == pytest.approx(target, abs=1e-12)


@pytest.mark.parametrize("form", [form for form in FORMS if not FORMS[form].detached])  # whose gradient is none
def test_derivatives_twice(form, blocks):
    x, w, y, rho, bias = problem(4, 3, 40)
    wanted = FORMS[form]

    def loss(x, w, rho, bias):
        out = class_terms(x, w, y, rho if wanted.response else None, bias, wanted)
        return sum(term.square().sum() for term in out if term is not None)

    inputs = [t.requires_grad_() for t in (x, w, rho, bias)]
    assert gradcheck(loss, inputs)
    assert gradgradcheck(loss, inputs, atol=1e-4, fast_mode=True)  # along random directions: all take minutes


def test_a_second_backward_through_the_same_graph(blocks):
    x, w, y, _, _ = problem()
    w.requires_grad_()
    loss = class_terms(x, w, y, None, None, FORMS["unit"]).others.sum()
    loss.backward(retain_graph=True)
    first = w.grad.clone()
    loss.backward()
    torch.testing.assert_close(w.grad, 2 * first)


def test_class_vectors_out_of_range_are_taken_care_of():
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 2])
    head = hs.heads.modified_softmax(4, 5)
    reference = copy.deepcopy(head)
    with torch.no_grad():
        head.weight[1] *= 1e25
        head.weight[2] *= 1e-25
    torch.testing.assert_close(head(x, y), reference(x, y))
    with torch.no_grad():
        head.weight[3] = 0
    loss = head(x, y)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(head.weight.grad).all()
    assert not head.weight.grad[3].any()


def test_reductions_have_their_slopes():
    scores = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    for reduction in (LOG_SUM_EXP, SOFTPLUS_SUM):
        value = reduction.within(scores)
        (expected,) = torch.autograd.grad(value.sum(), scores)
        torch.testing.assert_close(reduction.slope(scores.detach(), value.detach()), expected)


def test_memory_does_not_grow_with_the_number_of_classes(monkeypatch):
    monkeypatch.setattr(terms, "_PRODUCTS_KEPT", 0)
    monkeypatch.setattr(terms, "_WEIGHTS_AT_ONCE", 2**12)
    x, y = torch.randn(64, 4, requires_grad=True), torch.randint(50_000, (64,))
    w = torch.randn(50_000, 4, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        class_terms(x, w, y, None, None, Wanted(True)).others.sum().backward()
    level = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    gradient, block = w.numel() * 4, 64 * 2**10 * 4
    assert gradient <= peak < gradient + 6 * block  # all products would be 49 blocks
