"""The fused pass against the reference, and both against sums that are written out."""

import copy

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.profiler import ProfilerActivity, profile

import hypersphere as hs
from hypersphere.heads import fused_loss
from hypersphere.heads.fused_loss import LOG_SUM_EXP, SOFTPLUS_SUM, ClassInputs, ScoreRule, class_terms, reference_terms

from .samples import class_problem

RULES = {
    "unit": ScoreRule(True),
    "raw": ScoreRule(False, needs_feature_norm=True, needs_target_norm=True),
    "radius": ScoreRule(True, 2.0, needs_feature_norm=True),
    "response": ScoreRule(True, None, hs.angular.Linear(), hs.angular.Linear().slope),
    "response without derivative": ScoreRule(True, None, hs.angular.SquareCosine(), needs_feature_norm=True),
    "detached": ScoreRule(True, 2.0, hs.angular.Sigmoid(), detached=True),
    "binary": ScoreRule(True, 2.0, hs.angular.PowerCosine(), reduction=SOFTPLUS_SUM),
    "energy": ScoreRule(True, needs_energy=True, targets_present=True),
    "energy and response": ScoreRule(True, None, hs.angular.PowerCosine(), needs_energy=True, targets_present=True),
}
FIELDS = ("others", "weighted_sum", "target", "feature_norm", "target_norm", "target_bias", "energy")


@pytest.fixture(params=["one block", "many blocks", "computed again"])
def blocks(request, monkeypatch):
    if request.param != "one block":
        monkeypatch.setattr(fused_loss, "_WEIGHT_ENTRIES_OF_ONE_BLOCK", 0)
        monkeypatch.setattr(fused_loss, "_WEIGHT_ENTRIES_PER_BLOCK", 6 * 7)  # seven classes per block
    if request.param == "computed again":
        monkeypatch.setattr(fused_loss, "_SAVED_PRODUCTS", 0)


def evaluate(function, rule, smoothing, counted, x, w, y, bias):
    """Return all terms, and the gradients of a random linear combination of them."""
    y = y.clamp_min(0) if rule.needs_energy else y
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    options = {"bias": leaves[2], "counted": counted}
    options["class_weights"] = torch.linspace(0, 1, len(w), dtype=torch.float64) if smoothing else None
    terms = function(ClassInputs(leaves[0], leaves[1], y, **options), rule)
    values = [getattr(terms, name) for name in FIELDS]
    generator = torch.Generator().manual_seed(5)
    factors = [torch.randn(len(x), generator=generator, dtype=torch.float64) for _ in values]
    total = sum((f * t).sum() for f, t in zip(factors, values, strict=True) if t is not None)
    total.backward()
    return [*values, *(t.grad for t in leaves)]


@pytest.mark.parametrize("smoothing", [False, True], ids=["no smoothing", "smoothing"])
@pytest.mark.parametrize("form", RULES)
def test_class_terms_fused_values_and_gradients_equal_the_reference(form, smoothing, blocks):
    counted = torch.arange(9) != 3
    ours = evaluate(class_terms, RULES[form], smoothing, counted, *class_problem())
    expected = evaluate(reference_terms, RULES[form], smoothing, counted, *class_problem())
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_class_terms_others_are_the_sum_over_all_classes_except_the_target(blocks):
    x, w, y, bias = class_problem()
    unit = (w / w.norm(dim=1, keepdim=True)).numpy()
    terms = class_terms(ClassInputs(x, w, y, bias), RULES["unit"])
    for i in range(len(x)):
        scores = unit @ x[i].numpy() + bias.numpy()
        remaining = np.delete(scores, y[i].item()) if y[i] >= 0 else scores
        assert terms.others[i].item() == pytest.approx(np.log(np.exp(remaining).sum()), rel=1e-12)
        target = unit[y[i]] @ x[i].numpy() if y[i] >= 0 else 0
        assert terms.target[i].item() == pytest.approx(target, abs=1e-12)
        assert terms.target_bias[i].item() == (bias[y[i]].item() if y[i] >= 0 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in RULES if not RULES[form].detached])
def test_class_terms_differentiate_twice(form, blocks):
    x, w, y, bias = class_problem(4, 3, 40)
    rule = RULES[form]
    y = y.clamp_min(0) if rule.needs_energy else y

    def loss(x, w, bias):
        terms = class_terms(ClassInputs(x, w, y, bias), rule)
        return sum(getattr(terms, name).square().sum() for name in FIELDS if getattr(terms, name) is not None)

    inputs = [t.requires_grad_() for t in (x, w, bias)]
    assert gradcheck(loss, inputs, fast_mode=True)
    assert gradgradcheck(loss, inputs, atol=1e-4, fast_mode=True)
    # One input may be computed from another. Then no path may count twice.
    for dependent in (lambda w: loss(w[:4] ** 2, w, bias), lambda w: loss(w[:4], w.exp(), bias)):
        (first,) = torch.autograd.grad(dependent(w), w)
        (twice_differentiable,) = torch.autograd.grad(dependent(w), w, create_graph=True)
        torch.testing.assert_close(twice_differentiable, first)
        assert gradgradcheck(dependent, w, atol=1e-4, fast_mode=True)


def test_class_terms_backward_twice_through_one_graph(blocks):
    x, w, y, _ = class_problem()
    w.requires_grad_()
    loss = class_terms(ClassInputs(x, w, y), RULES["unit"]).others.sum()
    loss.backward(retain_graph=True)
    first = w.grad.clone()
    loss.backward()
    torch.testing.assert_close(w.grad, 2 * first)


@pytest.mark.parametrize("form", ["unit", "energy", "response"])
def test_class_terms_float32_gradients_are_as_accurate_as_autograd(form):
    arguments = class_problem(batch=64, dim=32, classes=500)
    exact = evaluate(reference_terms, RULES[form], False, None, *arguments)
    ours = evaluate(
        class_terms, RULES[form], False, None, *(t.float() if t.is_floating_point() else t for t in arguments)
    )
    for a, b in zip(ours, exact, strict=True):
        if a is not None:
            error = (a.double() - b).norm() / b.norm().clamp_min(1e-30)
            assert error < 1e-5


def test_class_terms_in_range_is_false_for_zero_huge_tiny_and_coincident_class_vectors():
    x, w, y, _ = class_problem()
    y = y.clamp_min(0)
    assert class_terms(ClassInputs(x, w, y), RULES["energy"]).in_range
    for factor in (0.0, 1e200, 1e-200):
        changed = w.clone()
        changed[3] *= factor
        assert not class_terms(ClassInputs(x, changed, y), RULES["unit"]).in_range
    twin = w.clone()
    twin[5] = 3 * twin[y[1]]
    assert not class_terms(ClassInputs(x, twin, y), RULES["energy"]).in_range
    assert class_terms(ClassInputs(x, twin, y), RULES["unit"]).in_range
    assert class_terms(ClassInputs(x, twin, y), RULES["energy"]._replace(exact=True)).in_range


def test_head_computes_class_vectors_out_of_range_exactly():
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


def test_class_reduction_derivatives_equal_autograd():
    scores = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    for reduction in (LOG_SUM_EXP, SOFTPLUS_SUM):
        value = reduction.within(scores)
        (expected,) = torch.autograd.grad(value.sum(), scores)
        torch.testing.assert_close(reduction.within_and_derivatives(scores.detach()), (value.detach(), expected))


def test_class_reduction_log_sum_exp_of_the_excluded_target_alone_is_minus_infinity():
    scores = torch.tensor([[float("-inf")], [2.0]])
    value, derivatives = LOG_SUM_EXP.within_and_derivatives(scores)
    assert value.tolist() == [float("-inf"), 2.0]
    assert torch.isfinite(derivatives).all()


def test_class_terms_memory_does_not_grow_with_the_number_of_classes(monkeypatch):
    monkeypatch.setattr(fused_loss, "_SAVED_PRODUCTS", 0)
    monkeypatch.setattr(fused_loss, "_WEIGHT_ENTRIES_OF_ONE_BLOCK", 0)
    monkeypatch.setattr(fused_loss, "_WEIGHT_ENTRIES_PER_BLOCK", 2**12)
    x, y = torch.randn(64, 4, requires_grad=True), torch.randint(50_000, (64,))
    w = torch.randn(50_000, 4, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        class_terms(ClassInputs(x, w, y), ScoreRule(True)).others.sum().backward()
    level = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    gradient, block = w.numel() * 4, 64 * 2**10 * 4
    assert gradient <= peak < gradient + 6 * block  # all products would be 49 blocks
