"""Options for other classes, margins that differ by sample or class, and the scale of AdaCos, against the oracle."""

import copy
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import hypersphere as hs
import oracle
from hypersphere.heads import AngularHead, Ramp

from .samples import problem

S, M, DIM, CLASSES = 8.0, 0.3, 5, 7


def arc(theta, norm, label, m=M):
    return oracle.margin(theta, math.cos, m2=m)


def batch(size=9, seed=0, ignored=True):
    x, y = problem(size, DIM, CLASSES, seed=seed)
    return x, y.index_fill(0, torch.tensor([2]), -100) if ignored else y


# Options of `arcface(5, 7, s=8, m=0.3)` and of `oracle.objective` for the same loss.
OPTIONS = {
    "centers": ({"centers": 3}, {"centers": 3}),
    "hard_negatives": ({"hard_negatives": 2, "hard_margin": 0.2}, {"hard": 2, "hard_margin": 0.2}),
    "all_hard": ({"hard_negatives": 100, "hard_margin": 0.1}, {"hard": 100, "hard_margin": 0.1}),
    "filter": ({"interclass_filter": 0.3}, {"limit": 0.3}),
    "combined": (
        {"centers": 2, "hard_negatives": 2, "hard_margin": 0.2, "interclass_filter": 0.4},
        {"centers": 2, "hard": 2, "hard_margin": 0.2, "limit": 0.4},
    ),
    "class_sizes": (
        {"class_sizes": torch.tensor([1.0, 16, 81, 4, 100, 2, 50], dtype=torch.float64)},
        {"psi": lambda t, n, j: arc(t, n, j, M * (1 / [1.0, 16, 81, 4, 100, 2, 50][j]) ** 0.25)},
    ),
}


def build(name):
    head = hs.heads.arcface(DIM, CLASSES, s=S, m=M, **OPTIONS[name][0]).double()
    oracle_options = {"radius": S, "psi": arc, **OPTIONS[name][1]}
    return head, oracle_options


@pytest.mark.parametrize("name", OPTIONS)
def test_head_options_equal_the_oracle(name):
    head, oracle_options = build(name)
    x, y = batch()
    expected = oracle.objective(x.numpy(), head.weight.detach().numpy(), y.tolist(), **oracle_options)
    assert head(x, y).item() == pytest.approx(expected, rel=1e-10)
    counted = y >= 0
    logits = head.logits(x, y)
    assert F.cross_entropy(logits[counted], y[counted]).item() == pytest.approx(expected, rel=1e-10)
    cosines = oracle.class_cosines(x.numpy(), head.weight.detach().numpy(), head.num_centers)
    np.testing.assert_allclose(head.scores(x).detach().numpy(), S * cosines, rtol=1e-10, atol=1e-10)
    assert torch.equal(hs.training.predict(head, x), torch.from_numpy(cosines.argmax(1)))


@pytest.mark.parametrize("name", OPTIONS)
def test_head_options_pass_gradcheck_and_gradgradcheck(name):
    head, _ = build(name)
    x, y = batch(4)

    def loss(x, weight):
        return torch.func.functional_call(head, {"weight": weight}, (x, y))

    inputs = (x.requires_grad_(), head.weight.detach().clone().requires_grad_())
    assert gradcheck(loss, inputs, fast_mode=True)
    assert gradgradcheck(loss, inputs, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["centers", "combined"])
def test_head_options_transform_and_compile(name):
    head, _ = build(name)
    x, y = batch()
    (expected,) = torch.autograd.grad(head(x, y), head.weight)
    parameters = {"weight": head.weight.detach()}
    transformed = torch.func.grad(lambda p: torch.func.functional_call(head, p, (x, y)))(parameters)["weight"]
    torch.testing.assert_close(transformed, expected)
    (compiled,) = torch.autograd.grad(torch.compile(head, fullgraph=True, backend="aot_eager")(x, y), head.weight)
    torch.testing.assert_close(compiled, expected)


@pytest.mark.parametrize("name", [*OPTIONS, "magface", "curricularface", "adacos", "elasticface"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_options_compute_half_precision_in_float32(name, dtype):
    head = build(name)[0] if name in OPTIONS else hs.heads.PRESETS[name](DIM, CLASSES)
    head = head.to(dtype).eval()
    x, y = batch()
    loss = head(x.to(dtype), y)
    assert loss.dtype == dtype
    exact = head.double()(x.to(dtype).double(), y)
    torch.testing.assert_close(loss.double(), exact, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    "preset", ["softmax", "l_softmax", "a_softmax", "w_softmax", "ga_softmax", "sphereface_r", "adaface"]
)
def test_presets_with_centers_equal_the_loss_of_their_logits(preset):
    x, y = batch(ignored=False)
    x.requires_grad_()
    head = hs.heads.PRESETS[preset](DIM, CLASSES, centers=3).double().eval()
    with torch.no_grad():
        head.weight *= torch.rand(len(head.weight), 1, dtype=torch.float64) + 0.5
    slow = F.cross_entropy(head.logits(x, y), y)
    ours, oracle_options = (torch.autograd.grad(loss, (x, head.weight)) for loss in (head(x, y), slow))
    torch.testing.assert_close(head(x, y), slow, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours, oracle_options, rtol=1e-9, atol=1e-10)
    # The plain scores from the definition: the largest of the K scores of the class.
    each = AngularHead(
        DIM, 3 * CLASSES, normalize_weight=head.normalize_weight, radius=head.radius, angular=head.angular
    ).double()
    each.load_state_dict({"weight": head.weight.detach()})
    expected = each.scores(x).unflatten(1, (CLASSES, 3)).amax(2)
    torch.testing.assert_close(head.scores(x), expected, rtol=1e-10, atol=1e-10)


def test_head_with_centers_gives_the_gradient_to_the_nearest_centre():
    x, y = batch(ignored=False)
    head = hs.heads.arcface(DIM, CLASSES, s=S, centers=3).double()
    head(x, y).backward()
    cosines = hs.sphere.cosines(x, head.weight).unflatten(1, (CLASSES, 3))
    used = torch.zeros(CLASSES, 3, dtype=torch.bool)
    for sample in cosines.argmax(2):
        used[torch.arange(CLASSES), sample] = True
    assert torch.equal(head.weight.grad.unflatten(0, (CLASSES, 3)).any(2), used)


def test_head_with_centers_and_energy_counts_all_other_centres():
    x, y = batch(ignored=False)
    plain = hs.heads.a_softmax(DIM, CLASSES, centers=2).double()
    plus = hs.heads.sphereface_plus(DIM, CLASSES, energy_weight=0.7, centers=2).double()
    plus.load_state_dict(plain.state_dict())
    w = hs.sphere.normalize(plain.weight.detach()).numpy()
    cosines = hs.sphere.cosines(x, plain.weight).detach().numpy()
    total = 0.0
    for i, label in enumerate(y.tolist()):
        row = 2 * label + int(cosines[i, 2 * label + 1] > cosines[i, 2 * label])
        total += sum(np.linalg.norm(w[row] - w[j]) ** -2 for j in range(len(w)) if j != row)
    expected = plain(x, y).item() + 0.7 * total / (len(y) * (2 * CLASSES - 1))
    assert plus(x, y).item() == pytest.approx(expected, rel=1e-10)


def test_head_with_many_classes_and_centers_is_computed_in_blocks(monkeypatch):
    x, y = problem(6, DIM, 40)
    for name, options in (("arcface", {}), ("l_softmax", {}), ("w_softmax", {"angular": "sigmoid", "bias": True})):
        head = hs.heads.PRESETS[name](DIM, 40, centers=3, label_smoothing=0.1, **options).double()
        x.requires_grad_()
        parameters = [x, *head.parameters()]
        whole = torch.autograd.grad(head(x, y), parameters)
        for saved in (2**26, 0):
            with monkeypatch.context() as patch:
                patch.setattr(hs.heads.fused_loss, "_WEIGHT_ENTRIES_OF_ONE_BLOCK", 0)
                patch.setattr(hs.heads.fused_loss, "_WEIGHT_ENTRIES_PER_BLOCK", 12 * DIM)
                patch.setattr(hs.heads.fused_loss, "_SAVED_PRODUCTS", saved)
                torch.testing.assert_close(torch.autograd.grad(head(x, y), parameters), whole)


def test_interclass_filter_that_leaves_out_all_classes_has_zero_loss():
    x, y = batch()
    head = hs.heads.arcface(DIM, CLASSES, interclass_filter=-1.0).double()
    loss = head(x, y)
    loss.backward()
    assert loss.item() == 0
    assert not head.weight.grad.any()
    assert not head.weight.grad.isnan().any()


# Margins per class ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "m", "psi"),
    [
        ("arcface", [0.1, 0.2, 0.3, 0.4, 0.5, 0.0, 0.2], lambda t, m: oracle.margin(t, m2=m)),
        ("am_softmax", [0.1, 0.2, 0.3, 0.4, 0.5, 0.0, 0.2], lambda t, m: math.cos(t) - m),
        ("a_softmax", [1.0, 1.5, 2.0, 3.0, 4.0, 1.2, 2.5], lambda t, m: oracle.margin(t, m1=m)),
    ],
)
def test_presets_accept_one_margin_per_class(preset, m, psi):
    x, y = batch()
    options = {} if preset == "a_softmax" else {"s": S}
    head = hs.heads.PRESETS[preset](DIM, CLASSES, m=torch.tensor(m, dtype=torch.float64), **options).double()
    w, total, count = head.weight.detach().numpy(), 0.0, 0
    for i, label in enumerate(y.tolist()):
        if label == -100:
            continue
        rho = np.linalg.norm(x[i].numpy()) if preset == "a_softmax" else S
        scores = rho * oracle.class_cosines(x[i : i + 1].numpy(), w)
        scores[0, label] = rho * psi(oracle.angle(x[i].numpy(), w[label]), m[label])
        total, count = total + oracle.cross_entropy(scores, [label]), count + 1
    assert head(x, y).item() == pytest.approx(total / count, rel=1e-8)
    assert "class_margins" not in head.state_dict()
    assert "class_margins" in repr(head)


def test_class_margins_combine_with_a_ramp():
    x, y = batch()
    head = hs.heads.arcface(DIM, CLASSES, s=S, m=M, class_margins=torch.full((CLASSES,), 0.5), ramp=Ramp(2)).double()
    head.steps = torch.tensor(1)
    expected = hs.heads.arcface(DIM, CLASSES, s=S, m=M / 4).double()
    expected.load_state_dict({"weight": head.weight})
    assert head(x, y).item() == pytest.approx(expected(x, y).item(), rel=1e-10)


# MagFace, CurricularFace, AdaCos, ElasticFace ------------------------------------------------------------------------


def test_magface_equals_the_oracle():
    x, y = batch()
    x = x * torch.linspace(0.2, 25, len(x), dtype=torch.float64)[:, None]
    head = hs.heads.magface(DIM, CLASSES, s=S).double()

    def psi(theta, norm, label):
        a = min(max(norm, 10.0), 110.0)
        return oracle.margin(theta, m2=0.45 + 0.35 / 100 * (a - 10))

    norms = np.clip(np.linalg.norm(x[y >= 0].numpy(), axis=1), 10, 110)
    expected = oracle.objective(x.numpy(), head.weight.detach().numpy(), y.tolist(), radius=S, psi=psi)
    expected += float(np.mean(35 * (1 / norms + norms / 110**2)))
    assert head(x, y).item() == pytest.approx(expected, rel=1e-10)
    assert gradcheck(head, (x.clone().requires_grad_(), y))
    assert gradgradcheck(head, (x[:3].clone().requires_grad_(), y[:3]))


def test_curricularface_equals_the_oracle_and_saves_its_mean():
    x, y = batch()
    head = hs.heads.curricularface(DIM, CLASSES, s=S, m=M).double()
    head.t = torch.tensor(0.4, dtype=torch.float64)
    cosines = oracle.class_cosines(x.numpy(), head.weight.detach().numpy())
    mean = np.mean([cosines[i, label] for i, label in enumerate(y.tolist()) if label >= 0])
    t = 0.99 * 0.4 + 0.01 * mean
    options = {"radius": S, "psi": arc}
    weight = head.weight.detach().numpy()
    expected = oracle.objective(x.numpy(), weight, y.tolist(), hardness=t, **options)
    assert head(x, y).item() == pytest.approx(expected, rel=1e-10)
    assert head.t.item() == pytest.approx(t, rel=1e-12)
    head.eval()
    assert head(x, y).item() == pytest.approx(expected, rel=1e-10)
    assert head.t.item() == pytest.approx(t, rel=1e-12)
    assert set(head.state_dict()) == {"weight", "t"}
    inputs = (x.clone().requires_grad_(), y)
    assert gradcheck(head, inputs)
    assert gradgradcheck(head, inputs, fast_mode=True)


def test_adacos_equals_the_oracle_and_saves_its_scale():
    x, y = batch()
    x = x + 3 * hs.heads.adacos(DIM, CLASSES).double().weight.detach()[y.clamp_min(0)]
    head = hs.heads.adacos(DIM, CLASSES).double()
    s, counted = math.sqrt(2) * math.log(CLASSES - 1), [i for i, label in enumerate(y.tolist()) if label >= 0]
    assert head.scale.item() == pytest.approx(s, rel=1e-6)
    weight = head.weight.detach().numpy()
    cosines = oracle.class_cosines(x.numpy(), weight)
    head.scale = torch.tensor(s, dtype=torch.float64)
    for _ in range(2):
        sums = [sum(math.exp(s * c) for j, c in enumerate(cosines[i]) if j != y[i]) for i in counted]
        median = np.median([math.acos(cosines[i, y[i]]) for i in counted])
        s = math.log(np.mean(sums)) / math.cos(min(math.pi / 4, median))
        expected = oracle.objective(x.numpy(), weight, y.tolist(), radius=s, psi=lambda t, *_: math.cos(t))
        assert head(x, y).item() == pytest.approx(expected, rel=1e-10)
        assert head.scale.item() == pytest.approx(s, rel=1e-10)
    head.eval()
    assert head(x, y).item() == pytest.approx(expected, rel=1e-10)
    np.testing.assert_allclose(head.scores(x).detach().numpy(), s * cosines, rtol=1e-9, atol=1e-9)
    assert set(head.state_dict()) == {"weight", "scale"}
    head.train()
    head(x, torch.full_like(y, -100))
    assert head.scale.item() == pytest.approx(s, rel=1e-10)
    head.eval()
    inputs = (x.clone().requires_grad_(), y)
    assert gradcheck(head, inputs)
    assert gradgradcheck(head, inputs, fast_mode=True)


def test_adacos_fixed_scale_is_a_number():
    head = hs.heads.adacos(DIM, CLASSES, dynamic=False)
    assert head.radius == pytest.approx(math.sqrt(2) * math.log(CLASSES - 1))
    assert set(head.state_dict()) == {"weight"}
    margined = AngularHead(DIM, CLASSES, radius="adaptive", margin="additive_cosine", angular="linear").double()
    x, y = batch()
    margined(x, y)
    margined.eval()
    assert margined(x, y).item() == pytest.approx(F.cross_entropy(margined.logits(x, y)[y >= 0], y[y >= 0]).item())


def test_elasticface_draws_margins_in_training_only():
    x, y = batch()
    head = hs.heads.elasticface(DIM, CLASSES, s=S, m=M, sigma=0.1).double()
    weight = head.weight.detach().numpy()
    torch.manual_seed(3)
    loss = head(x, y)
    torch.manual_seed(3)
    margins = (M + 0.1 * torch.randn(len(x), dtype=torch.float64)).tolist()
    kept = [i for i, label in enumerate(y.tolist()) if label >= 0]
    losses = [
        oracle.objective(
            x[i : i + 1].numpy(), weight, [int(y[i])], radius=S, psi=lambda t, *_, i=i: oracle.margin(t, m2=margins[i])
        )
        for i in kept
    ]
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-10)
    head.eval()
    fixed = oracle.objective(x.numpy(), weight, y.tolist(), radius=S, psi=arc)
    assert head(x, y).item() == pytest.approx(fixed, rel=1e-10)
    assert head(x, y).item() == head(x, y).item()


@pytest.mark.parametrize("name", ["curricularface", "adacos", "elasticface", "magface"])
def test_presets_with_state_are_exact_under_checkpointing(name):
    x, y = batch()
    torch.manual_seed(0)
    head = hs.heads.PRESETS[name](DIM, CLASSES).double()
    twin = copy.deepcopy(head)
    for step in range(3):
        gradients = []
        for one, call in ((head, head), (twin, lambda a, b: checkpoint(twin, a, b, use_reentrant=False))):
            torch.manual_seed(step)
            leaf = (x * (step + 1)).requires_grad_()
            one.zero_grad()
            call(leaf, y).backward()
            gradients.append((leaf.grad, one.weight.grad))
        torch.testing.assert_close(*gradients, rtol=0, atol=0)
        for key, value in head.state_dict().items():
            assert torch.equal(value, twin.state_dict()[key]), key


@pytest.mark.parametrize(("variant", "m"), [("C", None), ("A", None), ("M", None), ("A", 0.2), ("M", 2.0)])
def test_sphereface2_variants_equal_the_oracle(variant, m):
    x, y = batch(ignored=False)
    options = {} if m is None else {"m": m}
    head = hs.heads.sphereface2(DIM, CLASSES, s=S, variant=variant, **options).double()
    m = {"C": 0.4, "A": 0.5, "M": 1.5}[variant] if m is None else m
    g, b, total = oracle.ANGULARS["power_cosine"], head.bias.item(), 0.0
    target = {
        "C": lambda t: g(t) - m,
        "A": lambda t: oracle.margin(t, g, m2=m),
        "M": lambda t: g(min(m * t, math.pi)),
    }[variant]
    for i, label in enumerate(y.tolist()):
        for j in range(CLASSES):
            theta = oracle.angle(x[i].numpy(), head.weight[j].detach().numpy())
            if j == label:
                total += 0.7 / S * math.log1p(math.exp(-S * target(theta) - b))
            else:
                total += 0.3 / S * math.log1p(math.exp(S * (g(theta) + (m if variant == "C" else 0)) + b))
    assert head(x, y).item() == pytest.approx(total / len(y), rel=1e-8)


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize_weight", [True, False])
@pytest.mark.parametrize("centers", [1, 2])
@pytest.mark.parametrize("option", [{"curriculum": 0.9}, {"interclass_filter": 0.3}, {"hard_negatives": 2}, {}])
def test_loss_is_the_cross_entropy_of_the_logits(normalize_weight, centers, option):
    if "curriculum" in option and centers > 1 and not normalize_weight:
        pytest.skip("refused")
    torch.manual_seed(0)
    options = {"radius": 8.0, "margin": "additive_cosine", "normalize_weight": normalize_weight, "centers": centers}
    head = AngularHead(4, 5, **options, **option).double().eval()
    with torch.no_grad():
        head.weight.mul_(torch.rand(len(head.weight), 1) * 3)
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randint(0, 5, (40,))
    torch.testing.assert_close(head(x, y), F.cross_entropy(head.logits(x, y), y))


def test_energy_of_class_vectors_with_norms_is_that_of_their_directions():
    torch.manual_seed(0)
    head = AngularHead(8, 3, normalize_weight=False, energy_weight=1.0).double()
    plain = AngularHead(8, 3, normalize_weight=False).double()
    with torch.no_grad():
        head.weight.copy_(torch.eye(3, 8) * 0.5 + 0.1)
    plain.load_state_dict(head.state_dict())
    x, y = torch.randn(4, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    directions = head.weight.detach().numpy()
    directions = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    pairs = [1 / np.sum((directions[a] - directions[j]) ** 2) for a in y.tolist() for j in range(3) if j != a]
    assert (head(x, y) - plain(x, y)).item() == pytest.approx(sum(pairs) / 4 / 2)
    assert gradcheck(
        lambda w: torch.func.functional_call(head, {"weight": w}, (x, y)), head.weight.detach().requires_grad_()
    )


def test_adacos_of_an_empty_batch_is_zero_and_keeps_the_scale():
    head = hs.heads.adacos(8, 3)
    scale = head.scale.clone()
    assert head(torch.zeros(0, 8), torch.zeros(0, dtype=torch.long)).item() == 0
    assert head.scale == scale


def test_scores_with_centers_can_be_exported_for_any_batch():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = hs.heads.arcface(8, 5, centers=3)

        def forward(self, x):
            return self.head.scores(x)

    model = Model().eval()
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model, (torch.randn(4, 8),), dynamic_shapes=shapes).module()
    x = torch.randn(7, 8)
    torch.testing.assert_close(program(x), model(x))


@dataclass(frozen=True)
class NormShift(hs.margin.Margin):
    """A user's margin cos θ − shift·‖x‖, with the penalty ‖x‖²."""

    shift: float | torch.Tensor = 0.01
    uses_feature_norm = True

    def __call__(self, c, angular=None, strength=1.0):
        return c - strength * self.shift

    def for_batch(self, x_norm, norm_statistics, noise):
        return NormShift(self.shift * x_norm)

    def norm_penalty(self, x_norm):
        return x_norm.square()


def test_head_uses_a_margin_of_the_user_that_depends_on_the_batch():
    x, y = problem()
    head = AngularHead(5, 4, radius=8.0, margin=NormShift()).double()
    features = x.requires_grad_()
    norms, one_hot = features.norm(dim=1), F.one_hot(y, 4)
    cosines = F.normalize(features) @ F.normalize(head.weight).T
    expected = F.cross_entropy(8 * (cosines - 0.01 * norms.unsqueeze(1) * one_hot), y) + norms.square().mean()
    actual = head(features, y)
    torch.testing.assert_close(actual, expected)
    inputs = (features, head.weight)
    torch.testing.assert_close(torch.autograd.grad(actual, inputs), torch.autograd.grad(expected, inputs))
    with pytest.raises(ValueError, match="reduction must be 'mean' with the margin NormShift, which has a penalty"):
        AngularHead(5, 4, radius=8.0, margin=NormShift(), reduction="sum")


def test_subclass_of_norm_adaptive_may_define_its_quality_margin():
    class Constant(hs.margin.NormAdaptive):
        def __call__(self, c, angular=None, strength=1.0):
            return c - 1

        def for_quality(self, q):
            return hs.margin.AdditiveCosine(0.2)

    x, y = problem()
    head = AngularHead(5, 4, radius=8.0, margin=Constant()).double()
    expected = AngularHead(5, 4, radius=8.0, margin=hs.margin.AdditiveCosine(0.2)).double()
    expected.weight = head.weight
    torch.testing.assert_close(head(x, y), expected(x, y))
