import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hypersphere as hs
from hypersphere.robustness import FGSM, accuracy_under, adversarial_loss


def test_adversarial_loss_mixes_two_losses():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.rand(10, 6), torch.arange(10) % 3
    attacked = FGSM(0.1)(model, x, y)
    clean, hard = F.cross_entropy(model(x), y), F.cross_entropy(model(attacked), y)
    for weight in (0.0, 0.3, 1.0):
        mixed = adversarial_loss(model, x, y, attack=FGSM(0.1), weight=weight)
        torch.testing.assert_close(mixed, (1 - weight) * clean + weight * hard)
    mixed.backward()
    expected = torch.autograd.grad(hard, list(model.parameters()))  # no gradient flows through the attack
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_adversarial_loss_improves_accuracy_under_fgsm():
    def trained(loss):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(80):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
        return model

    x = torch.rand(200, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, :5].mean(1) > 0.5).long()
    x[:, 5] = 0.5 + 0.02 * (2 * y - 1)  # a feature that is always right and that a small step reverses
    attack = FGSM(0.08)
    natural = trained(lambda model: F.cross_entropy(model(x), y))
    hardened = trained(lambda model: adversarial_loss(model, x, y, attack=attack))
    accuracy = [accuracy_under(model, [(x, y)], attack).accuracies[0] for model in (natural, hardened)]
    assert accuracy[1] > accuracy[0]


HEADS = {
    "annealing": lambda: hs.heads.a_softmax(8, 3, annealing=hs.heads.Annealing(start=20)),
    "ramp": lambda: hs.heads.arcface(8, 3, ramp=hs.heads.Ramp(steps=5)),
    "running statistics": lambda: hs.heads.adaface(8, 3),
}


@pytest.mark.parametrize("make_head", HEADS.values(), ids=HEADS)
def test_adversarial_loss_advances_a_head_once(make_head):
    torch.manual_seed(0)
    model, head = nn.Linear(6, 8), make_head()
    x, y = torch.rand(10, 6), torch.arange(10) % 3
    for _ in range(2):  # not only at the start of the schedule
        reference_head = copy.deepcopy(head)
        attacked = FGSM(0.1)(model, x, y, head)
        at_this_step = copy.deepcopy(head).eval()(model(attacked), y)
        expected = 0.7 * reference_head(model(x), y) + 0.3 * at_this_step
        torch.testing.assert_close(adversarial_loss(model, x, y, attack=FGSM(0.1), weight=0.3, loss=head), expected)
        for name, value in reference_head.state_dict().items():  # one call on the clean images
            torch.testing.assert_close(head.state_dict()[name], value, msg=name)
        assert head.training
