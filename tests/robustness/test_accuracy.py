import math

import pytest
import torch
from torch import nn

from hypersphere.robustness import (
    BIM,
    FGSM,
    DeepFool,
    RobustAccuracy,
    Strength,
    accuracy_under,
    adversarial_loss,
    fooling_strength,
)


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(6, 3)


def data(model, n=40):
    x = torch.rand(n, 6, generator=torch.Generator().manual_seed(2))
    y = model(x).argmax(1)
    y[:4] = (y[:4] + 1) % 3  # four are misclassified from the start
    return [(x[:25], y[:25]), (x[25:], y[25:])]


def test_accuracy_under_counts_over_all_batches():
    model = linear(0)
    batches = data(model)
    result = accuracy_under(model, batches, BIM(steps=5, step=0.05), epsilons=(0.0, 0.02, 0.1, 0.5))
    assert (result.attack, result.transferred, result.images) == ("BIM", False, 40)
    assert result.clean == result.at(0.0) == 36 / 40
    assert list(result.accuracies) == sorted(result.accuracies, reverse=True)
    assert result.accuracies[-1] < 0.5
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    expected = (model(BIM(0.1, 0.05, 5)(model, x, y)).argmax(1) == y).float().mean()
    assert result.at(0.1) == pytest.approx(float(expected))
    assert accuracy_under(model, batches).epsilons == (8 / 255,)


def test_accuracy_under_computes_a_transferred_attack_on_its_source():
    model, source = linear(0), linear(1)
    batches = data(model)
    result = accuracy_under(model, batches, FGSM(0.1), source=source)
    hits = sum(int((model(FGSM(0.1)(source, x, y)).argmax(1) == y).sum()) for x, y in batches)
    assert result.transferred
    assert result.accuracies == (hits / 40,)
    assert result.accuracies[0] >= accuracy_under(model, batches, FGSM(0.1)).accuracies[0]
    assert all(p.grad is None for m in (model, source) for p in m.parameters())


def test_fooling_strength_is_the_norm_of_the_perturbation():
    model = linear(0)
    batches = data(model)
    for norm in ("l2", "linf"):
        strength = fooling_strength(model, batches, DeepFool(norm))
        assert strength.wrong.sum() == 4
        assert strength.fooled.double().mean() > 0.8  # clipping to [0, 1] may stop before the boundary
        assert (strength.l2[strength.wrong] == 0).all()
        perturbation = torch.cat([DeepFool(norm)(model, x, y) - x for x, y in batches])
        torch.testing.assert_close(strength.l2, perturbation.square().sum(1).sqrt())
        torch.testing.assert_close(strength.linf, perturbation.abs().amax(1))
        assert 0 < strength.median("linf") < strength.median("l2")
    euclidean, largest = (fooling_strength(model, batches, DeepFool(norm)) for norm in ("l2", "linf"))
    assert euclidean.median("l2") < largest.median("l2")  # each attack minimises its norm
    assert euclidean.median("linf") > largest.median("linf")
    nothing = torch.zeros(2, dtype=torch.bool)
    assert math.isnan(Strength(torch.zeros(2), torch.zeros(2), nothing, nothing).median())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: accuracy_under(linear(0), []), "data must be an iterable that yields at least one image"),
        (lambda: accuracy_under(linear(0), [], DeepFool()), "attack must be a dataclass with a field epsilon"),
        (lambda: accuracy_under(linear(0), [], epsilons=()), "epsilons must be a sequence of numbers >= 0"),
        (lambda: accuracy_under(linear(0), [], epsilons=0.1), "epsilons must be a sequence of numbers >= 0, not 0.1"),
        (lambda: fooling_strength(linear(0), []), "data must be an iterable that yields at least one batch"),
        (lambda: RobustAccuracy("FGSM", False, 1, 1.0, (0.1,), (0.5,)).at(0.2), "epsilon must be one of 0.1, not 0.2"),
        (lambda: adversarial_loss(linear(0), torch.rand(1, 6), torch.tensor([0]), weight=2), "weight must be a number"),
    ],
)
def test_accuracy_functions_reject_invalid_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_median_of_an_even_number_of_images_is_the_mean_of_the_middle_ones():
    norms, yes = torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.ones(4, dtype=torch.bool)
    assert Strength(norms, norms, yes, ~yes).median() == 3.0
