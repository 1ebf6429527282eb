"""Closed forms of ψ, ψ′ and of the target score against automatic differentiation in float64."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import hypersphere as hs
from hypersphere.functions.margin import AffineAngleMargin, Combined, Multiplicative, NormAdaptive
from hypersphere.heads import target_score
from hypersphere.heads.target_score import TargetMargin, reference_scaled_psi, scaled_psi

QUALITY = torch.linspace(-1, 1, 41, dtype=torch.float64)
FAMILY = {
    **{f"multiplicative {m}": Multiplicative(m) for m in (1, 2, 3, 4, 5, 7, 2.5)},
    "additive_cosine": hs.margin.AdditiveCosine(),
    "additive_angle": hs.margin.AdditiveAngle(),
    "combined": Combined(1.35, 0.4, 0.1),
    "two_sided": hs.margin.TwoSided(),
    "norm_adaptive": NormAdaptive().for_quality(QUALITY),
}


@pytest.mark.parametrize("strength", [1.0, 0.4, torch.tensor(0.7, dtype=torch.float64)], ids=["full", "0.4", "tensor"])
@pytest.mark.parametrize("name", FAMILY)
def test_margin_value_and_slope_equal_automatic_differentiation(name, strength):
    psi = FAMILY[name]
    c = torch.linspace(-0.999, 0.999, 41, dtype=torch.float64).requires_grad_()
    expected = psi(c, hs.angular.Cosine(), strength)
    (expected_slope,) = torch.autograd.grad(expected.sum(), c)
    value, slope = psi.value_and_slope(c.detach(), strength)
    torch.testing.assert_close(value, expected.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(torch.as_tensor(slope, dtype=c.dtype).expand_as(c), expected_slope, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("m", [2, 3, 4, 5])
def test_margin_value_and_slope_of_a_multiple_are_exact_at_the_poles(m):
    value, slope = Multiplicative(m).value_and_slope(torch.tensor([1.0, -1.0, 1.0000001]))
    torch.testing.assert_close(value, torch.tensor([1.0, 1.0 - 2 * m, 1.0]))
    torch.testing.assert_close(slope, torch.full((3,), float(m**2)))


FAMILY_PRESETS = ["l_softmax", "a_softmax", "am_softmax", "arcface", "combined_margin", "adaface", "sphereface_plus"]


@pytest.mark.parametrize("preset", FAMILY_PRESETS)
def test_presets_with_a_margin_of_the_family_use_its_closed_form(preset, monkeypatch):
    monkeypatch.setattr(target_score, "reference_scaled_psi", None)
    x = torch.randn(2, 4, requires_grad=True)
    hs.heads.PRESETS[preset](4, 3)(x, torch.tensor([0, 1])).backward()
    assert x.grad.isfinite().all()
    assert x.grad.any()


@pytest.mark.parametrize("preset", ["l_softmax", "a_softmax", "am_softmax", "arcface", "adaface"])
def test_scaled_psi_differentiates_twice(preset):
    torch.manual_seed(0)
    head = hs.heads.PRESETS[preset](4, 5).double().eval()
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 4, 2])
    weight = head.weight.detach()

    def loss(x, weight):
        return torch.func.functional_call(head, {"weight": weight}, (x, y))

    inputs = (x.requires_grad_(), weight.requires_grad_())
    assert gradcheck(loss, inputs, fast_mode=True)
    assert gradgradcheck(loss, inputs, atol=1e-4, fast_mode=True)


def test_scaled_psi_of_zero_magnitude_has_the_gradient_of_a_linear_layer():
    psi = TargetMargin(Multiplicative(4))
    product = torch.tensor([0.0, 0.5], requires_grad=True)
    magnitude = torch.tensor([0.0, 1.0], requires_grad=True)
    score = scaled_psi(product, magnitude, psi)
    assert score[0] == 0
    (grad,) = torch.autograd.grad(score.sum(), product)
    assert grad[0] == 1
    assert torch.isfinite(grad).all()


class Doubled(AffineAngleMargin):
    """ψ = 2c, whose slope is a number other than 1."""

    coefficients = (1, 0, 0)

    def __call__(self, c, angular=None, strength=1.0):
        return 2 * c

    def value_and_slope(self, c, strength=1.0):
        return 2 * c, 2.0


@pytest.mark.parametrize("magnitude", [3.0, torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)])
def test_scaled_psi_uses_a_constant_derivative(magnitude):
    product = torch.tensor([0.25, 0.5], dtype=torch.float64, requires_grad=True)
    inputs = [product, *([magnitude] if isinstance(magnitude, torch.Tensor) else [])]
    psi = TargetMargin(Doubled())
    actual = torch.autograd.grad(scaled_psi(product, magnitude, psi).sum(), inputs)
    expected = torch.autograd.grad(reference_scaled_psi(product, magnitude, psi).sum(), inputs)
    torch.testing.assert_close(actual, expected)


def test_head_clamps_float16_gradients_of_class_vectors():
    head = hs.heads.softmax(4, 3).half()
    loss = head(torch.full((2, 4), 60000.0), torch.tensor([0, 1])) * 4096
    loss.backward()
    assert torch.isfinite(head.weight.grad).all()
    assert head.weight.grad.abs().max() == torch.finfo(torch.float16).max
