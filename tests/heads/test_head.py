"""AngularHead: values, gradients, loss options, hard inputs, transforms and errors."""

import copy
import itertools
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
from hypersphere.heads import PRESETS, AngularHead, Annealing, NonFiniteScoresError, Ramp, ShardedHead

from .samples import problem

SOFTMAX_LOSSES = [name for name in PRESETS if name not in ("sphereface2", "sphereface_plus", "magface")]
LINEAR_IN_X = {"softmax", "modified_softmax", "w_softmax", "l_softmax", "a_softmax", "sphereface_plus"}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# Arguments of `AngularHead` and of `oracle.head_logits` for the same scores.
FORMS = {
    "softmax": ({"normalize_weight": False}, {"normalize_weight": False}),
    "modified": ({}, {}),
    "biased": ({"bias": True}, {"bias": True}),
    "l_softmax": (
        {"normalize_weight": False, "margin": hs.margin.Multiplicative(2)},
        {"normalize_weight": False, "psi": lambda t: oracle.margin(t, math.cos, m1=2)},
    ),
    "a_softmax": ({"margin": "multiplicative"}, {"psi": lambda t: oracle.margin(t, math.cos, m1=4)}),
    "real_m": ({"margin": hs.margin.Multiplicative(1.7)}, {"psi": lambda t: oracle.margin(t, math.cos, m1=1.7)}),
    "ga_softmax": (
        {"angular": "linear", "margin": hs.margin.Multiplicative(3)},
        {"g": oracle.ANGULARS["linear"], "psi": lambda t: oracle.margin(t, oracle.ANGULARS["linear"], m1=3)},
    ),
    "sigmoid": ({"angular": "sigmoid"}, {"g": oracle.ANGULARS["sigmoid"]}),
    "am_softmax": (
        {"radius": 30.0, "margin": "additive_cosine"},
        {"radius": 30.0, "psi": lambda t: math.cos(t) - 0.35},
    ),
    "arcface": (
        {"radius": 64.0, "margin": "additive_angle"},
        {"radius": 64.0, "psi": lambda t: oracle.margin(t, math.cos, m2=0.5)},
    ),
    "scaled_weighted": ({"radius": 8.0, "normalize_weight": False}, {"radius": 8.0, "normalize_weight": False}),
}


@pytest.mark.parametrize("form", FORMS)
def test_head_logits_loss_and_scores_equal_the_oracle(form):
    ours, theirs = FORMS[form]
    x, y = problem()
    head = AngularHead(5, 4, **ours).double()
    w = 2 * torch.randn(4, 5, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(w)
        if head.bias is not None:
            head.bias.copy_(torch.tensor([0.1, -0.2, 0.3, 0.4], dtype=torch.float64))
    theirs = dict(theirs)
    if theirs.pop("bias", False):
        theirs["bias"] = [0.1, -0.2, 0.3, 0.4]
    expected = oracle.head_logits(x.numpy(), w.numpy(), y.tolist(), **theirs)
    np.testing.assert_allclose(head.logits(x, y).detach().numpy(), expected, rtol=1e-10, atol=1e-10)
    assert head(x, y).item() == pytest.approx(oracle.cross_entropy(expected, y.tolist()), abs=1e-10, rel=1e-10)
    plain = oracle.head_logits(x.numpy(), w.numpy(), y.tolist(), **(theirs | {"psi": None}))
    np.testing.assert_allclose(head.scores(x).detach().numpy(), plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_head_gradients_pass_gradcheck(form):
    x, y = problem()
    head = AngularHead(5, 4, **FORMS[form][0]).double()
    names = [name for name, _ in head.named_parameters()]

    def loss(x, *parameters):
        return torch.func.functional_call(head, dict(zip(names, parameters, strict=True)), (x, y))

    assert gradcheck(loss, (x.requires_grad_(), *(p.detach().clone().requires_grad_() for p in head.parameters())))


@pytest.mark.parametrize("name", SOFTMAX_LOSSES)
def test_head_loss_is_cross_entropy_of_its_logits(name):
    x, y = problem(batch=7)
    head = PRESETS[name](5, 4).double().eval()
    x.requires_grad_()
    ours = torch.autograd.grad(head(x, y), (x, head.weight))
    theirs = torch.autograd.grad(F.cross_entropy(head.logits(x, y), y), (x, head.weight))
    assert head(x, y).item() == pytest.approx(F.cross_entropy(head.logits(x, y), y).item(), rel=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [False, True])
def test_head_options_equal_those_of_torch_cross_entropy(weighted, smoothing, reduction, ignored):
    x, y = problem(batch=7)
    y = y.index_fill(0, torch.tensor([1, 4]), -100) if ignored else y
    weights = torch.tensor([0.5, 1.0, 2.0, 0.0]) if weighted else None
    options = {"label_smoothing": smoothing, "reduction": reduction}
    for margin, bias in itertools.product([None, "additive_angle"], [False, True]):
        head = AngularHead(5, 4, radius=8.0, margin=margin, bias=bias, class_weights=weights, **options).double()
        if bias:
            torch.nn.init.normal_(head.bias)
        expected = F.cross_entropy(
            head.logits(x, y), y, weight=None if weights is None else weights.double(), **options
        )
        torch.testing.assert_close(head(x, y), expected, atol=1e-12, rtol=1e-10)
        parameters = list(head.parameters())
        for a, b in zip(
            torch.autograd.grad(head(x, y).sum(), parameters),
            torch.autograd.grad(expected.sum(), parameters),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


def test_head_loss_of_ignored_samples_is_zero():
    x, y = problem(batch=7)
    head = hs.heads.arcface(5, 4).double()
    loss = head(x, torch.full_like(y, -100))
    loss.backward()
    assert loss.item() == 0
    assert not head.weight.grad.any()


def test_head_loss_of_an_empty_batch_is_zero():
    head = hs.heads.a_softmax(5, 4)
    x = torch.zeros(0, 5, requires_grad=True)
    loss = head(x, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert not head.weight.grad.any()
    assert head.scores(x).shape == (0, 4)


def test_head_accepts_all_integer_dtypes_as_labels():
    x, y = problem()
    head = hs.heads.a_softmax(5, 4).double()
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert head(x, y.to(dtype)).item() == head(x, y).item()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_is_finite_for_zero_huge_and_parallel_vectors(name, dtype):
    head = PRESETS[name](5, 4)
    huge = 4e4 if dtype == torch.float16 else 1e20
    x = torch.zeros(5, 5, dtype=dtype)
    x[1], x[2] = huge, -huge
    with torch.no_grad():
        x[3], x[4] = head.weight[0].to(dtype), -head.weight[1].to(dtype)
        head.weight[3] = 0
    x.requires_grad_()
    y = torch.tensor([0, 1, 2, 0, 1])
    loss = head(x, y)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(head.weight.grad).all()
    # a zero feature has no direction, but where scores are linear in x it has the gradient of a linear layer
    assert x.grad[0].any() == (name in LINEAR_IN_X)
    assert head.weight.dtype == torch.float32


def test_head_gradient_of_zero_class_vectors_equals_linear_layer():
    x, y = problem(dim=8, classes=5)
    head = hs.heads.softmax(8, 5).double()
    torch.nn.init.zeros_(head.weight)
    (ours,) = torch.autograd.grad(head(x, y), head.weight)
    (expected,) = torch.autograd.grad(F.cross_entropy(F.linear(x, head.weight), y), head.weight)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("name", ["softmax", "l_softmax"])
@pytest.mark.parametrize("scale", [1e-25, 1e20])
def test_head_that_keeps_norms_computes_huge_and_tiny_class_vectors(name, scale):
    x, y = problem(dim=8, classes=5, dtype=torch.float32)
    head = PRESETS[name](8, 5)
    exact = copy.deepcopy(head).double()
    with torch.no_grad():
        head.weight.mul_(scale)
    loss = head(x / scale, y)
    loss.backward()
    torch.testing.assert_close(loss.double(), exact(x.double(), y), rtol=1e-4, atol=1e-4)
    assert torch.isfinite(head.weight.grad).all()


def test_head_ignores_nan_in_ignored_samples():
    x, y = problem(dim=8, classes=5)
    broken = x.clone()
    broken[1] = float("nan")
    ignored = y.index_fill(0, torch.tensor([1]), -100)
    for name in ("arcface", "adaface", "sphereface_plus"):
        head = PRESETS[name](8, 5).double().eval()
        (ours,) = torch.autograd.grad(head(broken, ignored), head.weight)
        (expected,) = torch.autograd.grad(head(x, ignored), head.weight)
        torch.testing.assert_close(ours, expected)


def test_head_computes_in_float32_under_autocast():
    x, y = problem(dtype=torch.float32)
    head = hs.heads.a_softmax(5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = head(x, y)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, head(x, y))


def test_head_returns_the_promoted_dtype():
    y = torch.tensor([0, 1])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(2, 5).to(dtype)
        pure, mixed = hs.heads.arcface(5, 4).to(dtype), hs.heads.arcface(5, 4)
        for head, expected in ((pure, dtype), (mixed, torch.promote_types(dtype, torch.float32))):
            assert head.scores(x).dtype == head.logits(x, y).dtype == head(x, y).dtype == expected


def test_head_detached_gradient_is_that_of_the_cosine():
    x, y = problem()
    true = hs.heads.AngularHead(5, 4, radius=8.0, margin="additive_angle").double()
    detached = hs.heads.AngularHead(5, 4, radius=8.0, margin="additive_angle", gradient="detached").double()
    detached.load_state_dict(true.state_dict())
    assert detached(x, y).item() == true(x, y).item()
    # softmax of the logits with margin, times the derivative of the plain scores
    logits = true.logits(x, y)
    p = torch.softmax(logits, 1) - torch.nn.functional.one_hot(y, 4)
    expected = torch.autograd.grad((true.scores(x) * p.detach()).sum() / len(x), true.weight)[0]
    ours = torch.autograd.grad(detached(x, y), detached.weight)[0]
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)


def test_head_normalized_gradient_equals_original_sphereface():
    x, y = problem()
    x.requires_grad_()
    true = hs.heads.a_softmax(5, 4, m=2).double()
    head = hs.heads.a_softmax(5, 4, m=2, gradient="normalized").double()
    head.load_state_dict(true.state_dict())
    assert head(x, y).item() == pytest.approx(true(x, y).item(), rel=1e-14)
    ours_x, ours_w = torch.autograd.grad(head(x, y), (x, head.weight))
    p = (torch.softmax(true.logits(x, y), 1) - torch.nn.functional.one_hot(y, 4)) / len(x)
    unit = true.weight / true.weight.norm(dim=1, keepdim=True)
    expected = torch.zeros_like(x)
    for i, label in enumerate(y.tolist()):
        norm = x[i].norm()
        c = (x[i] @ unit[label]) / norm
        k = int(c < 0)  # the piece of ψ for m = 2: 0 up to a right angle, 1 beyond
        along_w = (-1) ** k * 4 * c
        along_x = (-(((-1) ** k) * 2 * c**2 + 2 * k + (-1) ** k)) / norm
        length = torch.sqrt(along_w**2 + along_x**2)
        for j in range(4):
            if j == label:
                expected[i] += p[i, j] * (along_w * unit[j] + along_x * x[i]) / length
            else:
                expected[i] += p[i, j] * unit[j]
    torch.testing.assert_close(ours_x, expected.detach(), atol=1e-10, rtol=0)
    (plain_w,) = torch.autograd.grad((true.scores(x.detach()) * p.detach()).sum(), true.weight)
    torch.testing.assert_close(ours_w, plain_w, atol=1e-10, rtol=0)


@pytest.mark.slow
def test_head_normalized_gradient_works_compiled_transformed_and_in_inference():
    x, y = problem(dim=8, classes=5)
    head = hs.heads.a_softmax(8, 5, gradient="normalized").double()
    (expected,) = torch.autograd.grad(head(x, y), head.weight)
    (compiled,) = torch.autograd.grad(torch.compile(head, fullgraph=True, backend="aot_eager")(x, y), head.weight)
    torch.testing.assert_close(compiled, expected)
    parameters = {"weight": head.weight.detach()}
    transformed = torch.func.grad(lambda p: torch.func.functional_call(head, p, (x, y)))(parameters)["weight"]
    torch.testing.assert_close(transformed, expected)
    with torch.inference_mode():
        assert torch.isfinite(head(x, y))


def test_head_accepts_callables():
    x, y = problem()
    head = AngularHead(5, 4, angular=lambda c: c**3, margin=lambda c: c**3 - 0.2).double()
    difference = head.scores(x) - head.logits(x, y)
    target = difference.gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(target, 0.2 * x.norm(dim=1), atol=1e-10, rtol=0)
    assert (difference != 0).sum().item() == len(x)


def test_head_learns_k():
    x, y = problem(batch=7)
    k = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    head = AngularHead(5, 4, angular=hs.angular.Sigmoid(k)).double()
    assert "angular_k" in dict(head.named_parameters())
    head(x, y).backward()
    slow = F.cross_entropy(head.scores(x), y)
    (expected,) = torch.autograd.grad(slow, k)
    torch.testing.assert_close(k.grad, expected)
    twin = copy.deepcopy(head)
    assert twin.angular.k is twin.angular_k
    assert twin.angular_k is not k


def test_head_uses_its_current_k():
    x, y = problem(dim=8, classes=5)
    head = AngularHead(8, 5, angular=hs.angular.Sigmoid(torch.nn.Parameter(torch.tensor(0.5)))).double()
    other = AngularHead(8, 5, angular=hs.angular.Sigmoid(2.0)).double()
    other.load_state_dict({"weight": head.weight})
    state = {"weight": head.weight.detach(), "angular_k": torch.tensor(2.0, dtype=torch.float64)}
    called = torch.func.functional_call(head, state, (x, y))
    torch.testing.assert_close(called, other(x, y))
    head.load_state_dict(state, assign=True)
    torch.testing.assert_close(head(x, y), other(x, y))


def test_head_passes_gradients_to_a_computed_k():
    x, y = problem(dim=8, classes=5)
    raw = torch.tensor(-0.7, dtype=torch.float64, requires_grad=True)
    head = AngularHead(8, 5, angular=hs.angular.Sigmoid(raw.exp())).double()
    (ours,) = torch.autograd.grad(head(x, y), raw)
    step = 1e-6
    below, above = (
        AngularHead(8, 5, angular=hs.angular.Sigmoid(math.exp(-0.7 + change))).double() for change in (-step, step)
    )
    for other in (below, above):
        other.load_state_dict({"weight": head.weight.detach()})
    numeric = (above(x, y) - below(x, y)).item() / (2 * step)
    assert ours.item() == pytest.approx(numeric, rel=1e-5)
    with pytest.raises(ValueError, match=r"^k of angular must be one number in a head, not \(5,\)$"):
        AngularHead(8, 5, angular=hs.angular.Sigmoid(torch.rand(5) + 0.2))


def test_head_runs_on_meta_and_compiles():
    with torch.device("meta"):
        head = hs.heads.a_softmax(5, 4)
        assert head(torch.empty(3, 5), torch.empty(3, dtype=torch.long)).is_meta
    x, y = problem(dtype=torch.float32)
    head = hs.heads.a_softmax(5, 4, annealing=Annealing())
    twin = copy.deepcopy(head)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x, y), twin(x, y))
    assert head.steps.item() == 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_head_compiled_gradients_equal_eager_ones_over_several_steps(backend):
    x, y = torch.randn(6, 8), torch.randint(5, (6,))
    steep = Annealing(start=10, gamma=10.0, end=0)
    head = AngularHead(8, 5, margin="multiplicative", annealing=steep, label_smoothing=0.1, bias=True)
    twin = copy.deepcopy(head)
    compiled = torch.compile(head, fullgraph=True, backend=backend)
    for _ in range(3):
        for h in (head, twin):
            h.zero_grad()
        compiled(x, y).backward()
        twin(x, y).backward()
        torch.testing.assert_close(head.weight.grad, twin.weight.grad, atol=1e-5, rtol=1e-4)
    assert head.steps.item() == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adaface", "sphereface_plus", "sphereface_r", "sphereface2", "ga_softmax"])
def test_head_compiled_loss_with_ignored_samples_equals_eager_one(name):
    x, y = torch.randn(6, 8), torch.tensor([0, -100, 2, 3, -100, 1])
    head = PRESETS[name](8, 5)
    twin = copy.deepcopy(head)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x, y), twin(x, y))
    for key, value in head.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[key])


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_head_scores_export_and_copies_are_independent(name):
    head = PRESETS[name](5, 4).eval()
    x = torch.randn(3, 5)

    class Scores(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, x):
            return self.head.scores(x)

    exported = torch.export.export(Scores(), (x,)).module()
    torch.testing.assert_close(exported(x), head.scores(x))
    twin = copy.deepcopy(head)
    torch.testing.assert_close(twin.scores(x), head.scores(x))
    with torch.no_grad():
        twin.weight.zero_()
    assert head.weight.any()


def test_head_supports_per_sample_gradients():
    x, y = problem()
    head = hs.heads.a_softmax(5, 4).double()
    parameters = {name: p.detach() for name, p in head.named_parameters()}

    def loss(parameters, x, y):
        return torch.func.functional_call(head, parameters, (x[None], y[None]))

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)["weight"]
    head(x, y).backward()
    torch.testing.assert_close(each.mean(0), head.weight.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["arcface", "sphereface_plus", "adaface", "sphereface2"])
def test_head_supports_vmap_over_features_and_labels(name):
    x, y = problem(dim=8, classes=5)
    head = PRESETS[name](8, 5).double()
    labels = torch.stack([y, (y + 1) % 5])
    by_labels = torch.func.vmap(lambda t: head(x, t))(labels)
    by_features = torch.func.vmap(lambda a: head(a, y))(torch.stack([x, 2 * x]))
    head.eval()
    if name != "adaface":  # whose statistics move with every training call
        torch.testing.assert_close(by_labels, torch.stack([head(x, t) for t in labels]))
        torch.testing.assert_close(by_features, torch.stack([head(x, y), head(2 * x, y)]))
    assert torch.isfinite(head(x, y))


def test_head_detects_class_weights_changed_before_backward():
    x, y = problem(dim=8, classes=5)
    weights = torch.ones(5, dtype=torch.float64)
    head = AngularHead(8, 5, class_weights=weights, label_smoothing=0.1).double()
    loss = head(x, y)
    head.class_weights.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_head_keeps_the_dtype_of_class_weights():
    weights = torch.full((5,), 1 / 3, dtype=torch.float64)
    assert AngularHead(8, 5, class_weights=weights).class_weights.dtype == torch.float64


def test_head_accepts_numpy_numbers():
    head = AngularHead(np.int64(8), np.int32(5), radius=np.float32(3.0), margin=hs.margin.Multiplicative(np.int64(2)))
    x, y = problem(dim=8, classes=5, dtype=torch.float32)
    assert torch.isfinite(head(x, y))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x, y + 3), r"y must be in \[0, 4\), but row \d+ is"),
        (lambda x, y: (x, y - 9), r"y must be in \[0, 4\), but row 0 is -"),
        (lambda x, y: (x, y.double()), "y must be 6 integer labels"),
        (lambda x, y: (x, y[:-1]), "y must be 6 integer labels"),
        (lambda x, y: (x[:, :-1], y), r"x must be dense floating-point features of shape \(B, 5\)"),
        (lambda x, y: (x.long(), y), "x must be dense floating-point features"),
        (lambda x, y: (x.index_fill(0, torch.tensor([2]), float("nan")), y), "x must be finite, but row 2"),
    ],
)
def test_head_rejects_bad_batches_and_stays_unchanged(change, message):
    x, y = problem()
    head = hs.heads.a_softmax(5, 4, annealing=Annealing()).double()
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(ValueError, match=message):
        head(*change(x, y))
    assert all(torch.equal(before[key], value) for key, value in head.state_dict().items())


@pytest.mark.parametrize("name", PRESETS)
def test_head_state_is_unchanged_after_a_rejected_batch(name):
    x, y = problem(batch=7)
    head = PRESETS[name](5, 4).double()
    before = copy.deepcopy(head.state_dict())
    x[2, 1] = float("nan")
    with pytest.raises(ValueError, match="x must be finite, but row 2"):
        head(x, y)
    assert all(torch.equal(before[key], value) for key, value in head.state_dict().items())


def test_head_rejects_inputs_that_are_not_tensors():
    x, y = problem(batch=7)
    head = hs.heads.softmax(5, 4).double()
    with pytest.raises(ValueError, match="x must be a tensor of features, not 'ndarray'"):
        head(x.numpy(), y)
    with pytest.raises(ValueError, match="y must be a tensor of labels, not 'list'"):
        head(x, y.tolist())


def test_head_names_class_vectors_that_are_not_finite():
    x, y = problem(batch=7)
    head = hs.heads.arcface(5, 4, s=8.0).double()
    with torch.no_grad():
        head.weight[2, 1] = float("nan")
    for module in (head, ShardedHead(head)):
        with pytest.raises(NonFiniteScoresError, match="weight must be finite, but row 2"):
            module(x, y)


def test_head_scores_and_logits_name_class_vectors_that_are_not_finite():
    x, y = problem(batch=7)
    head = hs.heads.arcface(5, 4).double()
    with torch.no_grad():
        head.weight[3, 0] = float("inf")
    for call in (lambda: head.scores(x), lambda: head.logits(x, y)):
        with pytest.raises(NonFiniteScoresError, match="weight must be finite, but row 3"):
            call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 1}, "num_classes must be an integer >= 2"),
        ({"in_features": 0}, "in_features must be an integer >= 1"),
        ({"radius": -1.0}, "radius must be 'feature' or a positive number"),
        ({"radius": "huge"}, "radius must be 'feature' or a positive number"),
        ({"margin": "wide"}, "margin must be one of 'multiplicative'"),
        ({"angular": "round"}, "angular must be one of 'cosine'"),
        ({"gradient": "none"}, "gradient must be one of 'true', 'detached', 'normalized'"),
        ({"annealing": Annealing()}, "annealing must be None when there is no margin"),
    ],
)
def test_head_rejects_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        AngularHead(**({"in_features": 5, "num_classes": 4} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_weights": torch.ones(3)}, "class_weights must be 4 finite numbers >= 0"),
        ({"class_weights": torch.tensor([1.0, 1.0, -2.0, 1.0])}, r"finite numbers >= 0, not \[-2.0\]"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be a number in \[0, 1\)"),
        ({"reduction": "max"}, "reduction must be one of 'mean', 'sum', 'none'"),
        ({"energy_weight": -1}, "energy_weight must be a number >= 0"),
        ({"margin": "additive_angle", "annealing": 5}, "annealing must be a schedule or None, not 5"),
        ({"ignore_index": "a"}, "ignore_index must be an integer"),
        ({"energy_weight": 1.0, "reduction": "none"}, "reduction must be 'mean' with an energy or norm weight"),
        ({"radius": True}, "radius must be 'feature' or a positive number"),
        (
            {"gradient": "normalized"},
            "gradient='normalized' needs a margin on the target, radius='feature', normalize_weight=True and "
            "angular='cosine'",
        ),
    ],
)
def test_head_rejects_bad_loss_options(arguments, message):
    with pytest.raises(ValueError, match=message):
        AngularHead(5, 4, **arguments)


@pytest.mark.parametrize("name", PRESETS)
def test_head_passes_gradgradcheck_for_every_preset(name):
    x, y = problem(batch=4, dim=3)
    options = {"gradient": "true"} if name in ("sphereface_r", "sphereface2") else {}
    head = PRESETS[name](3, 4, **options).double().eval()
    if name == "adaface":
        head.norm_std.fill_(1e9)  # its margin depends on ‖x‖ without a gradient; here it is constant
    names = [parameter for parameter, _ in head.named_parameters()]

    def loss(x, *parameters):
        return torch.func.functional_call(head, dict(zip(names, parameters, strict=True)), (x, y))

    inputs = (x.requires_grad_(), *(p.detach().clone().requires_grad_() for p in head.parameters()))
    assert gradcheck(loss, inputs)
    assert gradgradcheck(loss, inputs, atol=1e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_head_gradient_penalty_in_eager_mode(name):
    x, y = problem()
    head = PRESETS[name](5, 4).double().eval()
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(head(x, y), x, create_graph=True)
    gradient.square().sum().backward()
    assert torch.isfinite(head.weight.grad).all()
    assert head.weight.grad.any()


@pytest.mark.parametrize("name", ["softmax", "arcface", "adaface", "sphereface_plus", "sphereface2"])
def test_head_supports_forward_mode_differentiation(name):
    x, y = problem()
    options = {"gradient": "true"} if name == "sphereface2" else {}
    head = PRESETS[name](5, 4, **options).double().eval()
    direction = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(head(x.requires_grad_(), y), x)
    expected = (gradient * direction).sum()
    x = x.detach()
    tangent = torch.func.jvp(lambda x: head(x, y), (x,), (direction,))[1]
    torch.testing.assert_close(tangent, expected)
    with torch.autograd.forward_ad.dual_level():
        loss = head(torch.autograd.forward_ad.make_dual(x, direction), y)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(loss).tangent, expected)


@pytest.mark.parametrize("name", PRESETS)
def test_head_float32_gradients_are_as_accurate_as_autograd(name):
    x, y = problem(batch=64, dim=32, classes=200)
    exact = PRESETS[name](32, 200).double().eval()
    head = copy.deepcopy(exact).float()
    exact.load_state_dict(head.state_dict())  # the float32 values, computed in float64
    ours, theirs = x.float().requires_grad_(), x.float().double().requires_grad_()
    head(ours, y).backward()
    exact(theirs, y).backward()
    for a, b in ((ours.grad, theirs.grad), (head.weight.grad, exact.weight.grad)):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_softmax_gradient_of_a_zero_feature_equals_linear_layer():
    x, y = problem()
    x[2] = 0
    x.requires_grad_()
    head = hs.heads.softmax(5, 4, bias=True).double()
    (ours,) = torch.autograd.grad(head(x, y), x)
    (expected,) = torch.autograd.grad(F.cross_entropy(F.linear(x, head.weight, head.bias), y), x)
    assert expected[2].any()
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("name", sorted(LINEAR_IN_X))
def test_head_gradient_of_a_zero_feature_is_that_of_the_plain_scores(name):
    x, y = torch.zeros(1, 5, dtype=torch.float64, requires_grad=True), torch.tensor([1])
    head = PRESETS[name](5, 4).double()
    (ours,) = torch.autograd.grad(head(x, y), x)
    rows = head.weight.detach() if head.uses_weight_norm else F.normalize(head.weight.detach())
    (expected,) = torch.autograd.grad(F.cross_entropy(F.linear(x, rows), y), x)
    torch.testing.assert_close(ours, expected)
    for scores in (head.scores(x), head.logits(x, y)):
        torch.testing.assert_close(torch.autograd.grad(F.cross_entropy(scores, y), x)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LINEAR_IN_X))
def test_head_trains_a_feature_layer_that_starts_at_zero(name):
    torch.manual_seed(0)
    inputs, y = torch.randn(30, 4), torch.arange(30) % 3
    inputs[:, :3] += 5 * F.one_hot(y, 3)
    layer, head = torch.nn.Linear(4, 5), PRESETS[name](5, 3)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        head(layer(inputs), y).backward()
        optimizer.step()
    assert F.cross_entropy(head.scores(layer(inputs)), y) < 0.1


@pytest.mark.parametrize("name", ["softmax", "l_softmax"])
def test_head_names_the_row_whose_scores_overflow(name):
    x, y = problem(dtype=torch.float32)
    head = PRESETS[name](5, 4)
    x[3] *= 1e20
    with torch.no_grad():
        head.weight.mul_(1e20)
    for call in (lambda: head(x, y), lambda: head.scores(x), lambda: head.logits(x, y)):
        with pytest.raises(NonFiniteScoresError, match=r"x must give scores .* but row 3 overflows"):
            call()


def test_head_does_not_report_misuse_as_scores_that_are_not_finite():
    head = PRESETS["softmax"](5, 4)
    with pytest.raises(ValueError, match="x must be dense floating-point features") as caught:
        head.scores(torch.zeros(2, 6))
    assert not isinstance(caught.value, NonFiniteScoresError)


@pytest.mark.parametrize("gradient", ["true", "detached", "normalized"])
@pytest.mark.parametrize("context", ["save_on_cpu", "reentrant", "not reentrant"])
def test_head_gradients_are_unchanged_by_saved_tensor_hooks_and_checkpointing(gradient, context):
    x, y = problem()
    head = hs.heads.a_softmax(5, 4, gradient=gradient).double()
    x.requires_grad_()
    expected = torch.autograd.grad(head(x, y), (x, head.weight))
    if context == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            loss = head(x, y)
    else:
        loss = checkpoint(head, x, y, use_reentrant=context == "reentrant")
    loss.backward()
    torch.testing.assert_close((x.grad, head.weight.grad), expected)


def test_head_loss_with_normalized_gradient_exports():
    x, y = problem(dtype=torch.float32)
    head = hs.heads.a_softmax(5, 4, gradient="normalized").eval()
    exported = torch.export.export(head, (x, y)).module()
    torch.testing.assert_close(exported(x, y), head(x, y))


def test_head_state_dict_has_the_keys_of_version_0_1():
    options = {"annealing": Annealing(), "ramp": Ramp(), "bias": True}
    head = AngularHead(5, 4, radius=8.0, margin="norm_adaptive", **options)
    assert list(head.state_dict()) == ["weight", "bias", "steps", "norm_mean", "norm_std"]
    learned = AngularHead(5, 4, angular=hs.angular.Sigmoid(torch.nn.Parameter(torch.tensor(0.5))))
    assert set(learned.state_dict()) == {"weight", "angular_k"}


def test_head_with_nearly_coincident_class_vectors_has_the_exact_energy():
    x, y = problem(dtype=torch.float32)
    head = hs.heads.sphereface_plus(5, 4)
    with torch.no_grad():
        head.weight[1] = head.weight[0] + 1e-4 * torch.randn(5)
    exact = copy.deepcopy(head).double()
    torch.testing.assert_close(head(x, y).double(), exact(x.double(), y), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16])
def test_head_counts_labels_that_equal_the_ignored_one_only_in_a_narrow_dtype(dtype):
    # -100, the ignored label, is 156 in uint8.
    head, x, y = AngularHead(4, 200, radius=8.0, reduction="none"), torch.randn(2, 4), torch.tensor([156, 3])
    assert torch.equal(head(x, y.to(dtype)), head(x, y))
    assert torch.equal(head.logits(x, y.to(dtype)), head.logits(x, y))


@pytest.mark.parametrize("name", ["normalize_weight", "bias"])
def test_head_requires_booleans(name):
    with pytest.raises(ValueError, match=f"^{name} must be True or False, not 'no'$"):
        AngularHead(4, 3, **{name: "no"})


def test_head_accepts_the_old_name_of_normalize_weight():
    with pytest.warns(
        DeprecationWarning, match="^the argument weight_norm is deprecated, use normalize_weight instead$"
    ):
        head = AngularHead(4, 3, weight_norm=False)
    assert head.uses_weight_norm
    with pytest.warns(DeprecationWarning, match="weight_norm is deprecated, use AngularHead.normalize_weight instead"):
        assert head.weight_norm is head.normalize_weight is False


def test_head_logits_accept_a_feature_that_is_not_finite_with_an_ignored_label():
    head = hs.heads.arcface(4, 3)
    x, y = torch.randn(3, 4), torch.tensor([0, -100, 2])
    x[1] = float("nan")
    loss = torch.nn.functional.cross_entropy(head.logits(x, y), y)
    torch.testing.assert_close(loss, head(x, y))
    loss.backward()
    assert torch.isfinite(head.weight.grad).all()


@pytest.mark.parametrize("k", [torch.tensor(0.5), torch.tensor([0.5])])
def test_head_reset_parameters_restores_a_learned_k(k):
    head = AngularHead(5, 4, angular=hs.angular.Sigmoid(torch.nn.Parameter(k.clone())))
    with torch.no_grad():
        head.angular_k.fill_(9.0)
    head.reset_parameters()
    assert torch.equal(head.angular_k, k)


def test_head_moves_a_fixed_tensor_of_an_entry_with_its_parameters():
    k = torch.tensor([0.5])
    head = AngularHead(5, 4, angular=hs.angular.Sigmoid(k), margin="additive_cosine")
    assert head.to("meta").angular.k.is_meta
    assert k.device.type == "cpu"
    learned = AngularHead(5, 4, angular=hs.angular.Sigmoid(torch.nn.Parameter(k))).to("meta")
    assert learned.angular.k is learned.angular_k
    # Other than a buffer, a fixed tensor keeps its value if the parameters are allocated later.
    with torch.device("meta"):
        head = AngularHead(5, 4, angular=hs.angular.Sigmoid(k))
    assert torch.equal(head.to_empty(device="cpu").angular.k, k)


@dataclass(frozen=True)
class LearnedAdditive(hs.margin.Margin):
    """A user's margin cos θ − m of the target, with a learned m."""

    m: torch.Tensor

    def __call__(self, c, angular=None, strength=1.0):
        return c - strength * self.m


def test_head_with_a_learned_margin_of_the_target_needs_no_matrix_of_scores():
    x, y = problem()
    fixed = [AngularHead(5, 4, margin=hs.margin.AdditiveCosine(m)).double() for m in (0.3, 0.3 - 1e-6, 0.3 + 1e-6)]
    m = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    learned = AngularHead(5, 4, margin=LearnedAdditive(m)).double()
    assert not learned.score_functions.needs_autograd()
    for head in (learned, *fixed[1:]):
        with torch.no_grad():
            head.weight.copy_(fixed[0].weight)
    expected, below, above = (head(x, y) for head in fixed)
    loss = learned(x, y)
    torch.testing.assert_close(loss, expected)
    grad_w, grad_m = torch.autograd.grad(loss, (learned.weight, learned.margin_m))
    torch.testing.assert_close(grad_w, torch.autograd.grad(expected, fixed[0].weight)[0])
    torch.testing.assert_close(grad_m.item(), (above - below).item() / 2e-6, rtol=1e-6, atol=1e-8)


def test_head_with_a_callable_or_a_learned_k_equals_its_menu_entry():
    x, y = problem()
    angular = hs.angular.Sigmoid(0.5)
    heads = [AngularHead(5, 4, angular=g).double() for g in (angular, lambda c: angular(c))]
    heads.append(AngularHead(5, 4, angular=hs.angular.Sigmoid(torch.nn.Parameter(torch.tensor(0.5)))).double())
    assert [head.score_functions.needs_autograd() for head in heads] == [False, True, True]
    for head in heads[1:]:
        with torch.no_grad():
            head.weight.copy_(heads[0].weight)
        torch.testing.assert_close(head(x, y), heads[0](x, y))
