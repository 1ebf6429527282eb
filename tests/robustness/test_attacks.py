import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import hypersphere as hs
from hypersphere.layers import sphere_conv2d
from hypersphere.models import PlainCNN
from hypersphere.robustness import ATTACKS, BIM, FGSM, Classifier, DeepFool, Foolbox

from . import reference
from .reference import batch, network


@pytest.mark.parametrize("attack", [FGSM(0.1), BIM(0.1, 0.03, 7), BIM(0.05, 0.1, 3)])
def test_fgsm_and_bim_match_the_formula_on_a_linear_model(attack):
    rng = np.random.default_rng(0)
    weight, x, y = rng.normal(size=(5, 6)), rng.uniform(size=(8, 6)), rng.integers(5, size=8)
    step, steps = (attack.epsilon, 1) if isinstance(attack, FGSM) else (attack.step, attack.steps)
    expected = [reference.bim(weight, a, b, attack.epsilon, step, steps) for a, b in zip(x, y, strict=True)]
    w = torch.from_numpy(weight)
    attacked = attack(lambda images: images @ w.mT, torch.from_numpy(x), torch.from_numpy(y))
    np.testing.assert_allclose(attacked.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(("norm", "dual"), [("l2", 2), ("linf", 1)])
def test_deepfool_on_two_linear_classes_finds_the_distance_to_the_boundary(norm, dual):
    torch.manual_seed(0)
    w, x = torch.randn(2, 5, dtype=torch.float64), 0.4 + 0.2 * torch.rand(6, 5, dtype=torch.float64)
    logits = x @ w.mT
    y, gap, normal = logits.argmax(1), (logits[:, 0] - logits[:, 1]).abs(), w[0] - w[1]
    attacked = DeepFool(norm, overshoot=0.001, nudge=0.0)(lambda images: images @ w.mT, x, y)
    assert ((attacked @ w.mT).argmax(1) != y).all()
    length = torch.linalg.vector_norm(attacked - x, 2 if norm == "l2" else torch.inf, dim=1)
    torch.testing.assert_close(length, 1.001 * gap / torch.linalg.vector_norm(normal, dual), atol=1e-12, rtol=1e-9)


ALL_ATTACKS = [FGSM(), BIM(steps=3), DeepFool(steps=3), DeepFool("linf", steps=3)]


@pytest.mark.parametrize("attack", ALL_ATTACKS, ids=repr)
def test_attacks_leave_the_model_unchanged(attack):
    model, (x, y) = network(), batch()
    model.train()
    model.stages[1].eval()  # frozen by the user
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    with torch.no_grad():
        attacked = attack(model, x, y)
    with torch.inference_mode():
        again = attack(model, x.clone(), y.clone())
    assert torch.equal(attacked, again)
    assert not attacked.requires_grad
    assert attacked.shape == x.shape
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert not torch.equal(attacked, x)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(bool((p.grad == 3).all()) and p.requires_grad for p in model.parameters())


def test_attacks_restore_modes_after_an_error():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.Dropout())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        FGSM()(model, torch.rand(2, 4), torch.tensor([0, 1]))
    assert all(m.training for m in model.modules())


def test_attacks_stay_within_epsilon_and_increase_the_loss():
    model, (x, y) = network(sphere_conv2d, None), batch()
    for attack in (FGSM(0.05), BIM(0.05, 0.01, 10)):
        attacked = attack(model, x, y)
        assert float((attacked - x).abs().max()) <= 0.05 + 1e-6
        loss = [float(nn.functional.cross_entropy(model(images), y).detach()) for images in (x, attacked)]
        assert loss[1] > loss[0]


def test_attacks_accept_a_head_as_loss_without_advancing_it():
    torch.manual_seed(0)
    model = PlainCNN(3, (4, 4, 4), 6, in_channels=1, image_size=8, norm=None)
    head = hs.heads.a_softmax(6, 4, annealing=hs.heads.Annealing())
    x, y = batch()
    state = {name: value.clone() for name, value in head.state_dict().items()}
    attacked = BIM(0.1, 0.03, 5)(model, x, y, head)
    assert all(torch.equal(value, state[name]) for name, value in head.state_dict().items())
    assert head.training
    head.eval()
    with torch.no_grad():
        assert head(model(attacked), y) > head(model(x), y)
    assert all(p.grad is None for p in (*model.parameters(), *head.parameters()))
    scores = Classifier(model, head)(x)
    assert torch.equal(scores, head.scores(model(x)))
    assert FGSM()(Classifier(model, head), x, y).shape == x.shape


@pytest.mark.parametrize("attack", ALL_ATTACKS, ids=repr)
def test_attacks_do_not_change_images_without_a_gradient(attack):
    x = torch.rand(3, 4)
    constant = torch.tensor([1.0, 0.0])
    attacked = attack(lambda images: images.sum(1, keepdim=True) * 0 + constant, x, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(attacked, x)
    assert attack(lambda images: images, torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)).shape == (0, 2)


def test_deepfool_does_not_change_misclassified_images():
    x, y = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([1, 1])
    attacked = DeepFool()(lambda images: images, x, y)
    assert torch.equal(attacked[0], x[0])
    assert not torch.equal(attacked[1], x[1])


def test_attacks_use_every_field_and_have_a_repr_that_evaluates():
    model, (x, y) = network().eval(), batch()
    y = model(x).argmax(1)
    others = {"epsilon": 0.2, "step": 1 / 255, "steps": 1, "norm": "linf", "overshoot": 0.5, "nudge": 0.1}
    for name, entry in ATTACKS.items():
        attack = entry()
        assert name == entry.__name__.lower()
        assert eval(repr(attack)) == attack
        base = attack(model, x, y)
        for field in dataclasses.fields(attack):
            if field.name != "candidates":  # the other candidates rarely matter
                changed = dataclasses.replace(attack, **{field.name: others[field.name]})
                assert not torch.equal(changed(model, x, y), base), field.name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FGSM(-0.1), r"epsilon must be a number in \[0, 1\], not -0.1"),
        (lambda: BIM(step=2), "step must be"),
        (lambda: BIM(steps=0), "steps must be an integer >= 1, not 0"),
        (lambda: DeepFool("l1"), "norm must be 'l2' or 'linf', not 'l1'"),
        (lambda: DeepFool(candidates=1), "candidates must be an integer >= 2"),
        (lambda: FGSM()(nn.Identity(), torch.full((1, 2), 2.0), torch.zeros(1).long()), r"images must be numbers in"),
        (lambda: FGSM()(nn.Identity(), torch.full((1, 2), torch.nan), torch.zeros(1).long()), "images must be numbers"),
        (lambda: FGSM()(nn.Identity(), torch.zeros(1, 2).byte(), torch.zeros(1).long()), "images must be a floating"),
        (lambda: FGSM()(nn.Identity(), [[0.5]], torch.zeros(1).long()), "images must be a floating-point tensor, not"),
        (lambda: FGSM()(nn.Identity(), torch.zeros(2, 2), torch.zeros(2)), "labels must be a vector of integers"),
        (lambda: FGSM()(None, torch.zeros(2, 2), torch.zeros(2).long()), "model must be a callable that maps images"),
        (
            lambda: BIM()(lambda x: torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2).long()),
            "model must be differentiable with respect to images",
        ),
        (
            lambda: FGSM()(nn.Identity(), torch.zeros(2, 2), torch.zeros(1).long()),
            r"labels must be a vector of integers, one for each of the 2 images, not 'torch.int64 \(1,\)'",
        ),
        (
            lambda: DeepFool()(nn.Identity(), torch.zeros(2, 1), torch.zeros(2).long()),
            "model must be a function from images to logits",
        ),
    ],
)
def test_attacks_reject_invalid_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_deepfool_fools_models_with_tied_logits():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5, bias=False))
    images = torch.zeros(5, 1, 2, 2)  # all logits are zero, and the first class is predicted
    attacked = DeepFool(candidates=5)(model, images, torch.zeros(5, dtype=torch.int32))
    assert (model(attacked).argmax(1) != 0).all()


@pytest.mark.slow
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
