import pytest
import torch
from torch import nn

from hypersphere.layers import sphere_conv2d
from hypersphere.robustness import BIM, FGSM, DeepFool, Foolbox

from .reference import batch, network


@pytest.mark.parametrize("conv", [nn.Conv2d, sphere_conv2d])
def test_attacks_match_foolbox(conv):
    attacks = pytest.importorskip("foolbox.attacks", reason="foolbox (extra 'attack') is not installed")
    model, (x, y) = network(conv).eval().double(), batch()
    x = x.double()
    y[:8] = model(x).argmax(1)[:8]  # most are classified correctly, so that the attacks change them
    pairs = [
        (FGSM(0.05), attacks.LinfFastGradientAttack(random_start=False), 0.05),
        (
            BIM(0.05, 0.01, 8),
            attacks.LinfBasicIterativeAttack(abs_stepsize=0.01, steps=8, random_start=False),
            0.05,
        ),
        (DeepFool("l2"), attacks.L2DeepFoolAttack(loss="logits"), None),
        (DeepFool("linf", candidates=3), attacks.LinfDeepFoolAttack(loss="logits", candidates=3), None),
    ]
    for ours, theirs, epsilon in pairs:
        attacked, expected = ours(model, x, y), Foolbox(theirs, epsilon)(model, x, y)
        # foolbox adds 1e-8 to the norms of gradients, which changes small steps by a relative 1e-6. Without this
        # constant its DeepFool and ours agree to 1e-14.
        torch.testing.assert_close(attacked, expected, atol=2e-6, rtol=0)
        assert ((attacked - x).flatten(1) != 0).any(1).sum() >= 8  # those that were classified correctly


def test_foolbox_leaves_the_model_unchanged():
    attacks = pytest.importorskip("foolbox.attacks", reason="foolbox (extra 'attack') is not installed")
    model, (x, y) = network().train(), batch(4)
    attack = Foolbox(attacks.LinfPGD(steps=2, random_start=False), 0.03)
    attacked = attack(model, x, y)
    assert float((attacked - x).abs().max()) <= 0.03 + 1e-6
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert attack(lambda images: model(images), x, y).shape == x.shape  # any callable
    assert all(p.grad is None for p in model.parameters())
