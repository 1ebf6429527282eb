"""The laws that every menu entry keeps; entries are found from the dictionaries, so listing one tests it."""

import dataclasses
import inspect
import math
import re

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import oracle
from hypersphere import functions
from hypersphere.functions import angular, kernel, magnitude, margin
from hypersphere.functions.menu import choose

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
MENUS = {
    "angular": angular.ANGULARS,
    "magnitude": magnitude.MAGNITUDES,
    "weighting": magnitude.WEIGHTINGS,
    "margin": margin.MARGINS,
    "kernel": kernel.KERNELS,
}
ENTRIES = [pytest.param(menu, name, id=f"{menu}-{name}") for menu, entries in MENUS.items() for name in entries]
TWO_NORMS = {"magnitude", "weighting"}

everywhere = pytest.mark.parametrize(("menu", "name"), ENTRIES)
every_type = pytest.mark.parametrize("dtype", DTYPES)


def build(menu, name):
    return MENUS[menu][name]()


def inputs(menu, dtype=torch.float64, *, edges=False) -> tuple[Tensor, ...]:
    """What entries of a menu are functions of: cosines, norms or distances; with `edges`, the hard ones."""
    if menu in TWO_NORMS:
        values = [0.0, 0.3, 0.7, 1.7, 4.2] + ([1.0, 4e4 if dtype == torch.float16 else 1e20] if edges else [])
        x_norm = torch.tensor(values, dtype=dtype)
        return torch.linspace(0.5, 2, len(values), dtype=dtype), x_norm
    if menu == "kernel":
        return (torch.tensor([0.1, 0.5, 1.0, 1.9] + ([0.0, 2.0] if edges else []), dtype=dtype),)
    values = torch.linspace(-0.98, 0.98, 24, dtype=torch.float64).tolist()
    return (torch.tensor(values + ([1.0, -1.0, 1 + 1e-6, -1 - 1e-6] if edges else []), dtype=dtype),)


def call(menu, entry, tensors):
    return entry(*tensors)


@everywhere
@every_type
def test_finite_value_and_gradient_and_type_kept(menu, name, dtype):
    tensors = tuple(t.requires_grad_() for t in inputs(menu, dtype, edges=True))
    value = call(menu, build(menu, name), tensors)
    assert value.dtype == dtype
    assert value.device == tensors[0].device
    assert torch.isfinite(value).all()
    if value.requires_grad:
        value.sum().backward()
        for t in tensors:
            assert t.grad is None or (torch.isfinite(t.grad).all() and t.grad.dtype == dtype)


@everywhere
def test_derivatives(menu, name):
    tensors = tuple(t.requires_grad_() for t in inputs(menu))
    if menu in TWO_NORMS:
        tensors = (tensors[0], (tensors[1].detach() + 0.01).requires_grad_())
    function = build(menu, name)
    if not call(menu, function, tensors).requires_grad:
        assert name == "sphere"  # a constant
        return
    assert gradcheck(function, tensors)
    assert gradgradcheck(function, tensors)


@everywhere
def test_half_precision_is_computed_wide(menu, name):
    narrow = inputs(menu, torch.bfloat16)
    value = call(menu, build(menu, name), narrow)
    wide = call(menu, build(menu, name), tuple(t.double() for t in narrow))
    torch.testing.assert_close(value.double(), wide, rtol=2**-8, atol=1e-4)  # no worse than the type's own rounding


@everywhere
def test_values_agree_with_the_oracle(menu, name):
    tensors = inputs(menu)
    value = call(menu, build(menu, name), tensors).tolist()
    if menu == "angular":
        expected = [oracle.ANGULARS[name](math.acos(c)) for c in tensors[0].tolist()]
    elif menu == "magnitude":
        expected = [oracle.MAGNITUDES[name](w, x) for w, x in zip(*(t.tolist() for t in tensors), strict=True)]
    elif menu == "weighting":
        entry = MENUS[menu][name](magnitude.Tanh())
        value = call(menu, entry, tensors).tolist()
        expected = [oracle.WEIGHTINGS[name](w, x) for w, x in zip(*(t.tolist() for t in tensors), strict=True)]
    elif menu == "margin":
        expected = [oracle.margin(math.acos(c), math.cos, **oracle.MARGINS[name]) for c in tensors[0].tolist()]
    else:
        expected = [oracle.kernel(z, {"riesz": 2, "logarithmic": 0}[name]) for z in tensors[0].tolist()]
    assert value == pytest.approx(expected, abs=1e-10)


@everywhere
def test_repr_evaluates_back(menu, name):
    entry = build(menu, name)
    names = {k: v for module in (angular, magnitude, margin, kernel) for k, v in vars(module).items()}
    names |= vars(MENUS_MODULE[menu])
    assert eval(repr(entry), names) == entry


MENUS_MODULE = {
    "angular": angular,
    "magnitude": magnitude,
    "weighting": magnitude,
    "margin": margin,
    "kernel": kernel,
}


@everywhere
def test_every_field_matters(menu, name):
    entry, tensors = build(menu, name), inputs(menu)
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        other = magnitude.Tanh(alpha=2.0, radius=3.0) if callable(value) else value + 1.25
        changed = dataclasses.replace(entry, **{field.name: other})
        assert not torch.equal(call(menu, changed, tensors), call(menu, entry, tensors)), field.name


@everywhere
def test_named_as_its_class_and_documented(menu, name):
    entry = MENUS[menu][name]
    if menu != "weighting":
        assert re.sub(r"(?<!^)(?=[A-Z])", "_", entry.__name__).lower() == name
    assert ">>>" in inspect.getdoc(entry)
    assert entry.__dataclass_params__.frozen


@everywhere
def test_scalar_and_empty_tensors_are_welcome(menu, name):
    entry = build(menu, name)
    count = 2 if menu in TWO_NORMS else 1
    assert entry(*[torch.tensor(0.5)] * count).shape == ()
    assert entry(*[torch.zeros(0)] * count).shape == (0,)


@pytest.mark.parametrize("name", angular.ANGULARS)
def test_angular_ends_and_fall(name):
    g = angular.ANGULARS[name]()
    c = torch.linspace(1, -1, 2001, dtype=torch.float64)
    values = g(c)
    assert values[0].item() == pytest.approx(1, abs=1e-12)
    assert values[-1].item() == pytest.approx(-1, abs=1e-12)
    assert (values.diff() <= 1e-12).all()
    theta = torch.acos(c)
    torch.testing.assert_close(g.at(theta), values, atol=1e-7, rtol=0)


def test_sigmoid_is_stable_for_small_k_and_learns_k():
    c = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0])
    assert torch.isfinite(angular.Sigmoid(k=1e-3)(c)).all()
    k = torch.full((3, 1), 0.5, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda k: angular.Sigmoid(k)(torch.linspace(-0.9, 0.9, 5, dtype=torch.float64)), (k,))


@pytest.mark.parametrize("g", angular.ANGULARS)
@pytest.mark.parametrize(
    "psi",
    [
        *[margin.Multiplicative(m) for m in (1, 1.5, 2, 3, 4, 4.7)],
        margin.AdditiveCosine(),
        *[margin.AdditiveAngle(m) for m in (0.1, 0.5, 3.0)],
        margin.Combined(1.3, 0.4, 0.1),
        margin.Combined(2.0, 0.0, 0.2),
    ],
    ids=str,
)
def test_margin_is_monotone_continuous_and_below_g(g, psi):
    activation = angular.ANGULARS[g]()
    theta = torch.linspace(0, math.pi, 20_001, dtype=torch.float64)
    c = theta.cos()
    values = psi(c, activation)
    assert (values.diff() <= 1e-7).all()
    assert values.diff().abs().max() < 5e-3  # no jump
    assert (values <= activation(c) + 1e-9).all()
    fields = {"m1": 1.0, "m2": 0.0, "m3": 0.0}
    fields |= {
        "Multiplicative": lambda: {"m1": psi.m},
        "AdditiveCosine": lambda: {"m3": psi.m},
        "AdditiveAngle": lambda: {"m2": psi.m},
        "Combined": lambda: {"m1": psi.m1, "m2": psi.m2, "m3": psi.m3},
    }[type(psi).__name__]()
    expected = [oracle.margin(t, oracle.ANGULARS[g], **fields) for t in theta[1:-1:97].tolist()]
    # the cosine is the coordinate, so where g goes through the angle, values near 0 and pi carry arccos' rounding
    assert values[1:-1:97].tolist() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("g", angular.ANGULARS)
def test_no_margin_is_no_margin(g):
    activation, c = angular.ANGULARS[g](), torch.linspace(-1, 1, 41, dtype=torch.float64)
    for psi in (margin.Multiplicative(1), margin.AdditiveCosine(0), margin.AdditiveAngle(0), margin.Combined()):
        torch.testing.assert_close(psi(c, activation), activation(c), atol=0, rtol=0)


def test_multiplicative_margin_of_cosine_has_slope_m_squared_at_the_pole():
    for m in (2, 3, 4, 7):
        c = torch.tensor([1.0, -1.0], dtype=torch.float64, requires_grad=True)
        margin.Multiplicative(m)(c).sum().backward()
        assert c.grad.tolist() == pytest.approx([m**2, m**2])


def test_linear_margin_is_the_straight_line():
    c = torch.linspace(-1, 1, 41, dtype=torch.float64)
    torch.testing.assert_close(
        margin.Multiplicative(3)(c, angular.Linear()), 1 - 6 * torch.acos(c) / math.pi, atol=1e-12, rtol=0
    )


def test_a_users_callable_serves_as_g_under_a_margin():
    c = torch.linspace(-0.95, 0.95, 21, dtype=torch.float64)
    ours = margin.Multiplicative(3)(c, angular.Linear())
    theirs = margin.Multiplicative(3)(c, lambda c: 1 - 2 * torch.acos(c.clamp(-1, 1)) / math.pi)
    torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=0)


@pytest.mark.parametrize("menu", MENUS)
def test_unknown_name_lists_the_choices(menu):
    with pytest.raises(ValueError, match=f"{menu} must be one of '{next(iter(MENUS[menu]))}'.*not 'nonsense'"):
        choose(MENUS[menu], "nonsense", menu)
    with pytest.raises(ValueError, match="not 3"):
        choose(MENUS[menu], 3, menu)


def test_choose_accepts_names_objects_and_callables():
    assert choose(angular.ANGULARS, "square_cosine", "angular") == angular.SquareCosine()
    assert choose(angular.ANGULARS, angular.Sigmoid(k=0.2), "angular") == angular.Sigmoid(k=0.2)
    assert choose(angular.ANGULARS, torch.tanh, "angular") is torch.tanh


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: angular.Sigmoid(k=0), "k must be a positive number"),
        (lambda: angular.Sigmoid(k=float("nan")), "k must be a positive number"),
        (lambda: magnitude.Ball(radius=-1), "radius must be a positive number"),
        (lambda: margin.Multiplicative(m=0.5), "m must be a number >= 1"),
        (lambda: margin.AdditiveCosine(m=-0.1), "m must be a number >= 0"),
        (lambda: margin.AdditiveAngle(m=4), r"m must be an angle in \[0, pi\]"),
        (lambda: margin.Combined(m1=0.9), "m1 must be a number >= 1"),
        (lambda: kernel.Riesz(power=0), "power must be a positive number"),
        (lambda: kernel.kernel_of(-1), "power must be a number >= 0"),
        (lambda: magnitude.weighted("ball", "joint"), "'joint' is defined for the magnitude Tanh"),
        (lambda: magnitude.weighted("inner_product", "linear"), "weighting must be None"),
        (lambda: magnitude.weighted("ball", "cubic"), "weighting must be None or one of 'linear'"),
    ],
)
def test_bad_fields_name_themselves(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_weighted_linear_with_cosine_is_the_inner_product():
    w, x = torch.rand(2, 9, dtype=torch.float64)
    torch.testing.assert_close(
        magnitude.weighted("linear", "linear")(w, x), magnitude.InnerProduct()(w, x), atol=0, rtol=0
    )


def test_functions_room_names_its_menus():
    assert {"angular", "magnitude", "margin", "kernel"} <= set(functions.__all__)
