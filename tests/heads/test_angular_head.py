import copy
import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

import hypersphere as hs
import oracle
from hypersphere.heads import PRESETS, AngularHead, Annealing

LINEAR_IN_X = {"softmax", "modified_softmax", "w_softmax", "l_softmax", "a_softmax", "sphereface_plus"}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def problem(batch=6, dim=5, classes=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(classes, (batch,), generator=generator)


FORMS = {
    "softmax": ({"weight_norm": False}, {"weight_norm": False}),
    "modified": ({}, {}),
    "biased": ({"bias": True}, {"bias": True}),
    "l_softmax": (
        {"weight_norm": False, "margin": hs.margin.Multiplicative(2)},
        {"weight_norm": False, "psi": lambda t: oracle.margin(t, math.cos, m1=2)},
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
    "scaled_weighted": ({"radius": 8.0, "weight_norm": False}, {"radius": 8.0, "weight_norm": False}),
}


@pytest.mark.parametrize("form", FORMS)
def test_values_agree_with_the_oracle(form):
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
def test_gradients(form):
    x, y = problem()
    head = AngularHead(5, 4, **FORMS[form][0]).double()
    names = [name for name, _ in head.named_parameters()]

    def loss(x, *parameters):
        return torch.func.functional_call(head, dict(zip(names, parameters, strict=True)), (x, y))

    assert gradcheck(loss, (x.requires_grad_(), *(p.detach().clone().requires_grad_() for p in head.parameters())))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_hard_features_are_finite_in_every_type(name, dtype):
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


def test_autocast_computes_in_float32():
    x, y = problem(dtype=torch.float32)
    head = hs.heads.a_softmax(5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = head(x, y)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, head(x, y))


def test_detached_gradient_passes_the_margin_by():
    x, y = problem()
    true = hs.heads.AngularHead(5, 4, radius=8.0, margin="additive_angle").double()
    detached = hs.heads.AngularHead(5, 4, radius=8.0, margin="additive_angle", gradient="detached").double()
    detached.load_state_dict(true.state_dict())
    assert detached(x, y).item() == true(x, y).item()
    # by hand: softmax of the logits with margin, times the derivative of the plain scores
    logits = true.logits(x, y)
    p = torch.softmax(logits, 1) - torch.nn.functional.one_hot(y, 4)
    expected = torch.autograd.grad((true.scores(x) * p.detach()).sum() / len(x), true.weight)[0]
    ours = torch.autograd.grad(detached(x, y), detached.weight)[0]
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)


def test_annealing_blends_counts_and_resumes():
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


def test_annealing_ends_at_its_end():
    schedule = Annealing(end=0, gamma=2.5e-5, power=35)
    assert schedule(torch.tensor(0)).item() == 1000
    assert schedule(torch.tensor(10**7)).item() < 1e-3
    for wrong in ({"end": -1}, {"end": 2000}, {"gamma": -1}, {"power": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            Annealing(**wrong)


def test_margin_between_two_classes_is_the_stated_fraction():
    # thesis, section 2.3: with m, the decision boundaries of two classes are (m-1)/(m+1) of their angle apart
    between, m = 1.0, 4
    head = hs.heads.a_softmax(2, 2, m).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [math.cos(between), math.sin(between)]]))
    theta = torch.linspace(0, between, 100_001, dtype=torch.float64)
    x = torch.stack([theta.cos(), theta.sin()], 1)
    y = torch.zeros(len(x), dtype=torch.long)
    first = head.logits(x, y)
    second = head.logits(x, y + 1)
    last_of_first = theta[(first[:, 0] > first[:, 1]).nonzero().max()]
    first_of_second = theta[(second[:, 1] > second[:, 0]).nonzero().min()]
    assert (first_of_second - last_of_first).item() == pytest.approx((m - 1) / (m + 1) * between, abs=1e-4)


def test_empty_batch_is_zero_with_zero_gradient():
    head = hs.heads.a_softmax(5, 4)
    x = torch.zeros(0, 5, requires_grad=True)
    loss = head(x, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert not head.weight.grad.any()
    assert head.scores(x).shape == (0, 4)


def test_small_integer_labels_are_welcome():
    x, y = problem()
    head = hs.heads.a_softmax(5, 4).double()
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert head(x, y.to(dtype)).item() == head(x, y).item()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, y: (x, y + 3), r"y must lie in \[0, 4\), but row \d+ is"),
        (lambda x, y: (x, y - 9), r"y must lie in \[0, 4\), but row 0 is -"),
        (lambda x, y: (x, y.double()), "y must be 6 integer labels"),
        (lambda x, y: (x, y[:-1]), "y must be 6 integer labels"),
        (lambda x, y: (x[:, :-1], y), r"x must be dense floating-point features of shape \(B, 5\)"),
        (lambda x, y: (x.long(), y), "x must be dense floating-point features"),
        (lambda x, y: (x.index_fill(0, torch.tensor([2]), float("nan")), y), "x must be finite, but row 2"),
    ],
)
def test_bad_batches_name_themselves_and_change_nothing(change, words):
    x, y = problem()
    head = hs.heads.a_softmax(5, 4, annealing=Annealing()).double()
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(ValueError, match=words):
        head(*change(x, y))
    assert all(torch.equal(before[key], value) for key, value in head.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "words"),
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
def test_bad_arguments_name_themselves(arguments, words):
    with pytest.raises(ValueError, match=words):
        AngularHead(**({"in_features": 5, "num_classes": 4} | arguments))


def test_users_callables_are_accepted():
    x, y = problem()
    head = AngularHead(5, 4, angular=lambda c: c**3, margin=lambda c: c**3 - 0.2).double()
    difference = head.scores(x) - head.logits(x, y)
    target = difference.gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(target, 0.2 * x.norm(dim=1), atol=1e-10, rtol=0)
    assert (difference != 0).sum().item() == len(x)


def test_lives_on_meta_and_compiles():
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


def test_per_sample_gradients_through_torch_func():
    x, y = problem()
    head = hs.heads.a_softmax(5, 4).double()
    parameters = {name: p.detach() for name, p in head.named_parameters()}

    def loss(parameters, x, y):
        return torch.func.functional_call(head, parameters, (x[None], y[None]))

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)["weight"]
    head(x, y).backward()
    torch.testing.assert_close(each.mean(0), head.weight.grad, atol=1e-12, rtol=0)
