"""Contracts that every entry of a menu satisfies. Entries are read from the menus, so a new one is tested at once."""

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
from hypersphere._validation import choose
from hypersphere.functions import angular, kernel, magnitude, margin

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
MENUS = {
    "angular": angular.ANGULARS,
    "magnitude": magnitude.MAGNITUDES,
    "weighting": magnitude.WEIGHTINGS,
    "margin": margin.MARGINS,
    "kernel": kernel.KERNELS,
}
ORACLES = {
    "angular": oracle.ANGULARS,
    "magnitude": oracle.MAGNITUDES,
    "weighting": oracle.WEIGHTINGS,
    "margin": oracle.MARGINS,
    "kernel": oracle.KERNELS,
}
MODULES = {
    "angular": angular,
    "magnitude": magnitude,
    "weighting": magnitude,
    "margin": margin,
    "kernel": kernel,
}
ENTRIES = [pytest.param(menu, name, id=f"{menu}-{name}") for menu, entries in MENUS.items() for name in entries]
TWO_NORMS = {"magnitude", "weighting"}

everywhere = pytest.mark.parametrize(("menu", "name"), ENTRIES)
every_type = pytest.mark.parametrize("dtype", DTYPES)


def build(menu, name):
    return MENUS[menu][name]()


def inputs(menu, dtype=torch.float64, *, edges=False) -> tuple[Tensor, ...]:
    """Return cosines, norms or distances, the inputs of the entries of a menu; `edges` adds extreme values."""
    if menu in TWO_NORMS:
        values = [0.0, 0.3, 0.7, 1.7, 4.2] + ([1.0, 4e4 if dtype == torch.float16 else 1e20] if edges else [])
        x_norm = torch.tensor(values, dtype=dtype)
        return torch.linspace(0.5, 2, len(values), dtype=dtype), x_norm
    if menu == "kernel":
        return (torch.tensor([0.1, 0.5, 1.0, 1.9] + ([0.0, 2.0] if edges else []), dtype=dtype),)
    values = torch.linspace(-0.98, 0.98, 24, dtype=torch.float64).tolist()
    return (torch.tensor(values + ([1.0, -1.0, 1 + 1e-6, -1 - 1e-6] if edges else []), dtype=dtype),)


@everywhere
@every_type
def test_entry_has_finite_values_and_gradients_in_the_dtype_of_its_input(menu, name, dtype):
    tensors = tuple(t.requires_grad_() for t in inputs(menu, dtype, edges=True))
    value = build(menu, name)(*tensors)
    assert value.dtype == dtype
    assert torch.isfinite(value).all()
    assert build(menu, name)(*(t.to("meta") for t in tensors)).is_meta
    if value.requires_grad:
        value.sum().backward()
        for t in tensors:
            assert t.grad is None or (torch.isfinite(t.grad).all() and t.grad.dtype == dtype)


@everywhere
def test_entry_passes_gradcheck_and_gradgradcheck(menu, name):
    tensors = tuple(t.requires_grad_() for t in inputs(menu))
    if menu in TWO_NORMS:
        tensors = (tensors[0], (tensors[1].detach() + 0.01).requires_grad_())
    function = build(menu, name)
    if not function(*tensors).requires_grad:
        assert name == "sphere"  # a constant
        return
    assert gradcheck(function, tensors)
    assert gradgradcheck(function, tensors)


@everywhere
def test_entry_computes_half_precision_in_float32(menu, name):
    narrow = inputs(menu, torch.bfloat16)
    value = build(menu, name)(*narrow)
    wide = build(menu, name)(*(t.double() for t in narrow))
    torch.testing.assert_close(value.double(), wide, rtol=2**-8, atol=1e-4)  # within the rounding error of bfloat16


# Two values per field. They differ from their squares, their inverses and the defaults, so that a formula with a wrong
# power or sign fails. A field with a new name is added here.
OTHER_FIELDS = {
    "alpha": [1.7, 0.6],
    "beta": [0.3, 2.2],
    "radius": [2.5, 0.4],
    "k": [0.3, 1.9],
    "t": [1.5, 4.25],
    "m": [1.3, 2.1],
    "m1": [1.4, 2.3],
    "m2": [0.3, 1.1],
    "m3": [0.15, 0.7],
    "h": [0.2, 0.8],
    "momentum": [0.3, 0.6],
    "m_low": [0.3, 0.7],
    "m_high": [0.9, 1.2],
    "norm_low": [5.0, 12.0],
    "norm_high": [50.0, 200.0],
    "penalty": [3.0, 0.4],
    "sigma": [0.02, 0.1],
    "power": [1.5, 3.25],
}


def other_fields(kind, variant):
    return {field.name: OTHER_FIELDS[field.name][variant] for field in dataclasses.fields(kind)}


@everywhere
@pytest.mark.parametrize("variant", ["default", 0, 1])
def test_entry_matches_the_oracle(menu, name, variant):
    formulas = ORACLES[menu]
    assert name in formulas, f"add the formula of the {menu} {name!r} to tests/oracle.py"
    described = magnitude.Tanh if menu == "weighting" else MENUS[menu][name]
    fields = {} if variant == "default" else other_fields(described, variant)
    entry = MENUS[menu][name](described(**fields)) if menu == "weighting" else described(**fields)
    tensors = inputs(menu)
    # The oracle takes angles where an entry takes cosines.
    numbers = [[math.acos(c) for c in tensors[0]]] if menu in ("angular", "margin") else [t.tolist() for t in tensors]
    expected = [formulas[name](*arguments, **fields) for arguments in zip(*numbers, strict=True)]
    assert entry(*tensors).tolist() == pytest.approx(expected, abs=1e-10)


@everywhere
def test_entry_has_a_repr_that_evaluates(menu, name):
    entry = build(menu, name)
    # Two modules define `Linear`, so the names of the module of the entry come last.
    names = {k: v for module in (*MODULES.values(), MODULES[menu]) for k, v in vars(module).items()}
    assert eval(repr(entry), names) == entry


@everywhere
def test_entry_uses_every_field(menu, name):
    entry, tensors = build(menu, name), inputs(menu)
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        other = magnitude.Tanh(alpha=2.0, radius=3.0) if callable(value) else value + 0.5
        changed = dataclasses.replace(entry, **{field.name: other})
        assert not torch.equal(all_outputs(menu, changed, tensors), all_outputs(menu, entry, tensors)), field.name


def all_outputs(menu, entry, tensors):
    """Return everything that an entry computes. A margin may also change other scores and use feature norms."""
    value = entry(*tensors)
    if isinstance(entry, margin.Margin):
        value = torch.cat([value, entry.others(*tensors)])
    if isinstance(entry, margin.NormAdaptive):
        quality = entry.quality(tensors[0].abs(), torch.tensor(0.5), torch.tensor(1.0))
        value = torch.cat([value, quality, torch.tensor([entry.momentum])])  # used by the head to update its statistics
    if isinstance(entry, margin.NormLinear):
        norms = torch.linspace(5, 120, len(tensors[0]), dtype=torch.float64)
        value = torch.cat([value, entry.for_batch(norms, None, None)(*tensors), entry.norm_penalty(norms)])
    if isinstance(entry, margin.RandomAngle):
        value = torch.cat([value, entry.for_batch(None, None, tensors[0])(*tensors)])
    return value


@everywhere
def test_entry_is_documented_and_named_like_its_class(menu, name):
    entry = MENUS[menu][name]
    if menu != "weighting":
        assert re.sub(r"(?<!^)(?=[A-Z])", "_", entry.__name__).lower() == name
    assert ">>>" in inspect.getdoc(entry)
    assert entry.__dataclass_params__.frozen


@everywhere
def test_entry_accepts_scalars_and_empty_tensors(menu, name):
    entry = build(menu, name)
    count = 2 if menu in TWO_NORMS else 1
    assert entry(*[torch.tensor(0.5)] * count).shape == ()
    assert entry(*[torch.zeros(0)] * count).shape == (0,)


@pytest.mark.parametrize("name", angular.ANGULARS)
def test_angular_falls_from_one_to_minus_one(name):
    g = angular.ANGULARS[name]()
    c = torch.linspace(1, -1, 2001, dtype=torch.float64)
    values = g(c)
    assert values[0].item() == pytest.approx(1, abs=1e-12)
    assert values[-1].item() == pytest.approx(-1, abs=1e-12)
    assert (values.diff() <= 1e-12).all()
    theta = torch.acos(c)
    torch.testing.assert_close(g.at(theta), values, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", angular.ANGULARS)
def test_angular_slope_is_the_derivative(name):
    kind = angular.ANGULARS[name]
    for g in (kind(), *(kind(**other_fields(kind, variant)) for variant in (0, 1))):
        c = torch.tensor([-1.0, -0.9, -0.3, 0.2, 0.7, 0.999, 1.0], dtype=torch.float64, requires_grad=True)
        value = g(c)
        (expected,) = torch.autograd.grad(value.sum(), c)
        torch.testing.assert_close(g.slope(c.detach(), value.detach()), expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(
    "name", [name for name, kind in magnitude.MAGNITUDES.items() if issubclass(kind, magnitude.Radial)]
)
def test_magnitude_slope_is_the_derivative(name):
    x = torch.tensor([0.2, 0.7, 1.3, 4.0], dtype=torch.float64, requires_grad=True)
    kind = magnitude.MAGNITUDES[name]
    for h in (kind(), *(kind(**other_fields(kind, variant)) for variant in (0, 1))):
        value = h(torch.ones_like(x), x) + 0 * x
        torch.testing.assert_close(h.slope(x.detach(), value.detach()), torch.autograd.grad(value.sum(), x)[0])


def test_sigmoid_is_stable_for_small_k_and_learns_k():
    c = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0])
    assert torch.isfinite(angular.Sigmoid(k=1e-3)(c)).all()
    k = torch.full((3, 1), 0.5, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda k: angular.Sigmoid(k)(torch.linspace(-0.9, 0.9, 5, dtype=torch.float64)), (k,))


VARIED = {
    "multiplicative": [{"m": m} for m in (1, 1.5, 2, 3, 4.7, 20)],
    "additive_cosine": [{"m": 0.8}],
    "additive_angle": [{"m": m} for m in (0.1, 3.0)],
    "combined": [{"m1": 1.3, "m2": 0.4, "m3": 0.1}, {"m1": 2.0, "m2": 0.0, "m3": 0.2}],
    "truncated_multiplicative": [{"m": 3}],
    "divided_others": [{"m": 2.2}],
    "two_sided": [{"m": 0.7}],
}
MARGIN_CASES = [
    pytest.param(name, fields, id=f"{name}-{fields}")
    for name in margin.MARGINS
    for fields in [{}, *VARIED.get(name, [])]
]


@pytest.mark.parametrize("g", angular.ANGULARS)
@pytest.mark.parametrize(("name", "fields"), MARGIN_CASES)
def test_margin_is_monotone_continuous_and_below_g(g, name, fields):
    activation, psi = angular.ANGULARS[g](), margin.MARGINS[name](**fields)
    theta = torch.linspace(0, math.pi, 20_001, dtype=torch.float64)
    c = theta.cos()
    values = psi(c, activation)
    assert (values.diff() <= 1e-7).all()
    assert values.diff().abs().max() < 2e-2  # no jump
    assert (values <= activation(c) + 1e-9).all()
    expected = [oracle.MARGINS[name](t, oracle.ANGULARS[g], **fields) for t in theta[1:-1:97].tolist()]
    assert values[1:-1:97].tolist() == pytest.approx(expected, abs=1e-10)
    others = psi.others(c, activation)
    if psi.changes_other_classes:
        assert (others >= activation(c) - 1e-9).all()
        assert (others.diff() <= 1e-7).all()
        expected = [oracle.OTHERS[name](t, oracle.ANGULARS[g], **fields) for t in theta[1:-1:97].tolist()]
        assert others[1:-1:97].tolist() == pytest.approx(expected, abs=1e-10)
    else:
        assert torch.equal(others, activation(c))


@pytest.mark.parametrize("name", margin.MARGINS)
def test_margin_increases_with_its_strength(name):
    c, psi = torch.linspace(-0.9, 0.9, 19, dtype=torch.float64), margin.MARGINS[name]()
    strengths = [torch.tensor(a, dtype=torch.float64) for a in (0.0, 0.3, 0.6, 1.0)]
    gaps = torch.stack([psi.others(c, strength=a) - psi(c, strength=a) for a in strengths])
    torch.testing.assert_close(gaps[0], torch.zeros_like(c), atol=1e-12, rtol=0)
    assert (gaps.diff(dim=0) >= -1e-12).all()
    torch.testing.assert_close(psi(c, strength=strengths[-1]), psi(c), atol=1e-10, rtol=0)


def test_margin_is_bounded_for_cosines_beyond_one():
    c = torch.tensor([1 + 5e-7, -1 - 5e-7])
    for m in (4, 16, 17, 100, 1000):
        torch.testing.assert_close(margin.Multiplicative(m)(c), torch.tensor([1.0, 1.0 - 2 * m]), rtol=1e-3, atol=1e-3)


def test_norm_adaptive_margin_matches_adaface():
    psi, theta = margin.NormAdaptive(m=0.4, h=0.333), torch.tensor([0.8, 0.8, 0.8, 2.0], dtype=torch.float64)
    norms = torch.tensor([5.0, 20.0, 35.0, 21.0], dtype=torch.float64)
    q = psi.quality(norms, torch.tensor(20.0).double(), torch.tensor(4.0).double())
    assert q.tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.333 / 4])
    ours = psi.for_quality(q)(theta.cos(), angular.Cosine(), 1.0).tolist()
    expected = [math.cos(t - 0.4 * z) - (0.4 + 0.4 * z) for t, z in zip(theta.tolist(), q.tolist(), strict=True)]
    assert ours == pytest.approx(expected, abs=1e-12)
    assert psi.quality(norms, norms.mean(), torch.zeros(()).double()).tolist() == [0, 0, 0, 0]


def test_norm_linear_margin_matches_magface():
    psi, norms = margin.NormLinear(), torch.tensor([3.0, 10.0, 60.0, 110.0, 500.0], dtype=torch.float64)
    theta = torch.full_like(norms, 0.8)
    margins, penalties = [], []
    for a in norms.tolist():
        a = min(max(a, 10.0), 110.0)
        margins.append(math.cos(0.8 + (0.8 - 0.45) / (110 - 10) * (a - 10) + 0.45))
        penalties.append(35 * (1 / a + a / 110**2))
    assert psi.for_batch(norms, None, None)(theta.cos()).tolist() == pytest.approx(margins, abs=1e-12)
    assert psi.norm_penalty(norms).tolist() == pytest.approx(penalties, rel=1e-12)
    leaf = norms.clone().requires_grad_()
    assert gradcheck(lambda a: psi.for_batch(a, None, None)(theta.cos()) + psi.norm_penalty(a), (leaf[2:3],))


def test_random_angle_margin_is_shifted_by_noise_and_never_negative():
    psi, noise = margin.RandomAngle(m=0.3, sigma=0.1), torch.tensor([0.0, 1.0, -5.0], dtype=torch.float64)
    theta = torch.full_like(noise, 1.1)
    expected = [math.cos(1.4), math.cos(1.5), math.cos(1.1)]
    assert psi.for_batch(None, None, noise)(theta.cos()).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("g", angular.ANGULARS)
def test_margin_of_zero_strength_is_g(g):
    activation, c = angular.ANGULARS[g](), torch.linspace(-1, 1, 41, dtype=torch.float64)
    for psi in (margin.Multiplicative(1), margin.AdditiveCosine(0), margin.AdditiveAngle(0), margin.Combined()):
        torch.testing.assert_close(psi(c, activation), activation(c), atol=0, rtol=0)


def test_multiplicative_margin_of_cosine_has_slope_m_squared_at_the_pole():
    for m in (2, 3, 4, 7):
        c = torch.tensor([1.0, -1.0], dtype=torch.float64, requires_grad=True)
        margin.Multiplicative(m)(c).sum().backward()
        assert c.grad.tolist() == pytest.approx([m**2, m**2])


def test_multiplicative_margin_of_linear_is_a_straight_line():
    c = torch.linspace(-1, 1, 41, dtype=torch.float64)
    torch.testing.assert_close(
        margin.Multiplicative(3)(c, angular.Linear()), 1 - 6 * torch.acos(c) / math.pi, atol=1e-12, rtol=0
    )


def test_margin_accepts_a_custom_g():
    c = torch.linspace(-0.95, 0.95, 21, dtype=torch.float64)
    ours = margin.Multiplicative(3)(c, angular.Linear())
    theirs = margin.Multiplicative(3)(c, lambda c: 1 - 2 * torch.acos(c.clamp(-1, 1)) / math.pi)
    torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=0)


@pytest.mark.parametrize("menu", MENUS)
def test_choose_lists_the_menu_for_an_unknown_name(menu):
    with pytest.raises(ValueError, match=f"{menu} must be one of '{next(iter(MENUS[menu]))}'.*not 'nonsense'"):
        choose(MENUS[menu], "nonsense", menu)
    with pytest.raises(ValueError, match=f"{menu} must be one of .*an instance of those classes or a callable, not 3$"):
        choose(MENUS[menu], 3, menu)


def test_choose_accepts_names_objects_and_callables():
    assert choose(angular.ANGULARS, "square_cosine", "angular") == angular.SquareCosine()
    assert choose(angular.ANGULARS, angular.Sigmoid(k=0.2), "angular") == angular.Sigmoid(k=0.2)
    assert choose(angular.ANGULARS, torch.tanh, "angular") is torch.tanh


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: angular.Sigmoid(k=0), "k must be a number in"),
        (lambda: angular.Sigmoid(k=float("nan")), "k must be a number in"),
        (lambda: magnitude.Ball(radius=-1), "radius must be a number in"),
        (lambda: magnitude.Ball(alpha="1"), "alpha must be a number or a tensor, not '1'"),
        (lambda: magnitude.Seg(beta=float("nan")), "beta must be a number or a tensor, not nan"),
        (lambda: margin.Multiplicative(m=0.5), "m must be a number >= 1"),
        (lambda: margin.AdditiveCosine(m=-0.1), "m must be a number >= 0"),
        (lambda: margin.AdditiveAngle(m=4), r"m must be an angle in \[0, pi\]"),
        (lambda: margin.Combined(m1=0.9), "m1 must be a number >= 1"),
        (lambda: margin.NormLinear(m_high=4), r"m_high must be an angle in \[0, pi\]"),
        (lambda: margin.NormLinear(norm_low=0), "norm_low must be a positive number"),
        (lambda: margin.NormLinear(norm_high=5), "norm_high must be a number above norm_low=10.0"),
        (lambda: margin.NormLinear(penalty=-1), "penalty must be a number >= 0"),
        (lambda: margin.RandomAngle(sigma=-0.1), "sigma must be a number >= 0"),
        (lambda: kernel.Riesz(power=0), "power must be a positive number"),
        (lambda: kernel.kernel_of(-1), "power must be a number >= 0"),
        (lambda: magnitude.weighted("ball", "joint"), "'joint' is defined for the magnitude Tanh"),
        (lambda: magnitude.weighted("inner_product", "linear"), "weighting must be None"),
        (lambda: magnitude.weighted("ball", ["linear"]), "weighting must be None or one of 'linear'"),
        (lambda: magnitude.weighted("ball", "cubic"), "weighting must be None or one of 'linear'"),
    ],
)
def test_entry_rejects_invalid_fields(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_weighted_linear_with_cosine_is_the_inner_product():
    w, x = torch.rand(2, 9, dtype=torch.float64)
    torch.testing.assert_close(
        magnitude.weighted("linear", "linear")(w, x), magnitude.InnerProduct()(w, x), atol=0, rtol=0
    )


def test_functions_package_lists_its_menus():
    assert {"angular", "magnitude", "margin", "kernel"} <= set(functions.__all__)


def test_kernel_accepts_old_names():
    u = torch.tensor([0.25, 1.0])
    with pytest.warns(DeprecationWarning, match="Riesz.at_square is deprecated, use Riesz.value_at_square"):
        assert torch.equal(kernel.Riesz().at_square(u), 1 / u)
    with pytest.warns(DeprecationWarning, match="Riesz.of_square is deprecated, use Riesz.floored_value_at_square"):
        assert torch.equal(kernel.Riesz().of_square(u), 1 / u)
    with pytest.warns(
        DeprecationWarning, match="Inverse.at_square is deprecated, define value_at_square instead"
    ) as caught:

        @dataclasses.dataclass(frozen=True)
        class Inverse(kernel.Kernel):
            power = 1.0

            def at_square(self, u):
                return u.rsqrt()

    assert caught[0].filename == __file__
    torch.testing.assert_close(Inverse()(torch.tensor(0.5)), torch.tensor(2.0))


def test_margin_accepts_old_names():
    with pytest.warns(DeprecationWarning, match="FamilyMargin is deprecated, use .*AffineAngleMargin instead"):
        assert margin.FamilyMargin is margin.AffineAngleMargin
    with pytest.warns(DeprecationWarning, match="TwoSided.touches_others is deprecated, use TwoSided.changes_other"):
        assert margin.TwoSided().touches_others
    with pytest.warns(DeprecationWarning, match="Shifted._parts is deprecated, define coefficients instead") as caught:

        class Shifted(margin.AffineAngleMargin):
            _parts = (1, 0.2, 0)

    assert caught[0].filename == __file__
    c = torch.linspace(-0.9, 0.9, 5)
    torch.testing.assert_close(Shifted()(c), margin.AdditiveAngle(0.2)(c))
    with pytest.warns(DeprecationWarning, match="Raised.touches_others is deprecated, define changes_other_classes"):

        class Raised(margin.Margin):
            touches_others = True

            def __call__(self, c, angular=None, strength=1.0):
                return c

    assert Raised.changes_other_classes
