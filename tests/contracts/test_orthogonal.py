"""Contracts that every orthogonal map satisfies. Entries come from the menu, so a new one is tested automatically."""

import dataclasses
import inspect
import re

import numpy as np
import pytest
import torch
from rotation import reference
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from hypersphere import _numerics
from hypersphere._validation import choose
from hypersphere.functions import _factorizations as factor
from hypersphere.functions import orthogonal, transform

MENU = {**orthogonal.ORTHOGONALS, **transform.TRANSFORMS}
EXACT = [name for name, entry in MENU.items() if entry.always_orthogonal]
VARIANTS = {
    **{name: entry() for name, entry in MENU.items()},
    "modified": orthogonal.GramSchmidt("modified"),
    "iterative": orthogonal.GramSchmidt("iterative"),
    "bounded": orthogonal.Cayley(bound=0.5),
    "upper": transform.Triangular(upper=True),
}
OTHER_VALUES = {"form": "modified", "bound": 0.1, "terms": 1, "upper": True, "width": 2}
every_map = pytest.mark.parametrize("name", VARIANTS)


def free_parameters(method, d, *lead, spread=0.3, dtype=torch.float64):
    one = method.identity(d).to(dtype)
    random = torch.Generator().manual_seed(d)
    return one + spread * torch.randn(*lead, *one.shape, generator=random, dtype=dtype)


def random_rows(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=dtype)


@every_map
@pytest.mark.parametrize("d", [1, 2, 3, 6, 9])
def test_map_matches_numpy(name, d):
    method, v = VARIANTS[name], random_rows(4, d)
    free = free_parameters(method, d)
    r = method(free)
    np.testing.assert_allclose(r.numpy(), reference.rotation(name, free, getattr(method, "bound", None)), atol=1e-12)
    torch.testing.assert_close(method(free, v), v @ r.mT, atol=1e-12, rtol=0)
    assert method.size(free) == d


@every_map
@pytest.mark.parametrize("shape", [(3, 5), (7, 5), (2, 3, 4), (2, 6, 4)])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_map_passes_gradcheck(name, shape, spread):
    method = VARIANTS[name]
    free = free_parameters(method, shape[-1], *shape[:-2], spread=spread).requires_grad_()
    assert gradcheck(method, (free, random_rows(*shape).requires_grad_()))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_map_preserves_inner_products_and_dtype(name, dtype):
    method = VARIANTS[name]
    free = free_parameters(method, 24, spread=0.1).to(dtype).requires_grad_()
    v = random_rows(10, 24).to(dtype)
    w = method(free, v)
    assert w.dtype == dtype
    (gradient,) = torch.autograd.grad(w.sum(), free)
    assert gradient.dtype == dtype
    assert torch.isfinite(gradient).all()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float16: 0.03}[dtype]
    torch.testing.assert_close(w.double() @ w.double().mT, v.double() @ v.double().mT, atol=tolerance, rtol=tolerance)


@every_map
def test_map_identity_gives_the_identity_matrix(name):
    method, v = VARIANTS[name], random_rows(4, 6, dtype=torch.float32)
    torch.testing.assert_close(method(method.identity(6), v), v, atol=1e-6, rtol=0)
    assert 0 <= method.degrees_of_freedom(6) <= 36
    if method.always_orthogonal:
        assert method.degrees_of_freedom(6) == 15


@pytest.mark.parametrize("name", ["gram_schmidt", "householder", "lowdin", "modified", "iterative"])
@pytest.mark.parametrize(
    "p",
    [
        torch.eye(6),
        2 * torch.eye(6),
        torch.diag(torch.tensor([1.0, 1, 1, 3, 3, 3])),
        torch.diag(torch.tensor([1.0, 1, -1, 1, 2, 1])),
        torch.eye(6).flip(0),
        torch.diag(torch.tensor([1.0, 1e-4, 1, 1e3, 1, 1])) + 1e-3 * torch.ones(6, 6).triu(),
        1e20 * torch.eye(6),
        1e-20 * torch.eye(6),
    ],
    ids=["identity", "scaled", "repeated", "reflection", "flip", "ill-conditioned", "huge", "tiny"],
)
def test_map_is_finite_and_orthogonal_at_difficult_points(name, p):
    method = VARIANTS[name]
    free = p.clone().requires_grad_()
    w = method(free, torch.eye(6))
    (gradient,) = torch.autograd.grad((w * random_rows(6, 6, dtype=torch.float32)).sum(), free)
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close(w @ w.mT, torch.eye(6), atol=2e-5, rtol=0)
    np.testing.assert_allclose(w.mT.detach().numpy(), reference.rotation(name, p.double()), atol=1e-3)


HILBERT = 1 / (torch.arange(10.0).unsqueeze(1) + torch.arange(10.0) + 1)


@pytest.mark.parametrize("name", ["gram_schmidt", "householder", "lowdin", "modified", "iterative"])
@pytest.mark.parametrize(
    "p",
    [
        torch.zeros(6, 6),
        torch.eye(6).index_fill(1, torch.tensor([2]), 0.0),
        torch.eye(6)[:, [0, 0, 2, 3, 4, 5]],
        HILBERT,
    ],
    ids=["zero", "zero column", "equal columns", "Hilbert"],
)
def test_map_of_a_singular_matrix_has_finite_gradients(name, p):
    d, free = len(p), p.clone().requires_grad_()
    w = VARIANTS[name](free, random_rows(7, d, dtype=torch.float32))
    (gradient,) = torch.autograd.grad((w * random_rows(7, d, dtype=torch.float32).flip(0)).sum(), free)
    assert torch.isfinite(gradient).all()
    # The expression, which compiled graphs and transforms use, has the same guard.
    by_expression = torch.func.grad(
        lambda f: (VARIANTS[name](f, random_rows(7, d, dtype=torch.float32)) * random_rows(7, d).flip(0)).sum()
    )(p)
    assert torch.isfinite(by_expression).all()
    if p is HILBERT or name != "lowdin":  # a singular P has no nearest orthogonal matrix
        r = VARIANTS[name](p)
        torch.testing.assert_close(r @ r.mT, torch.eye(d), atol=2e-5, rtol=0)


@pytest.mark.parametrize("diagonal", [[1.0, 1, 1, 1], [2.0, 2, 2, 2], [1.0, 1, -1, 1], [1.0, 1, 3, 3]])
def test_lowdin_gradient_is_exact_at_repeated_singular_values(diagonal):
    free = torch.diag(torch.tensor(diagonal, dtype=torch.float64)).requires_grad_()
    assert gradcheck(orthogonal.Lowdin(), (free, random_rows(3, 4)))


def test_map_of_gaussian_matrices_is_orthogonal_to_rounding():
    p = random_rows(96, 96, dtype=torch.float32)
    for name in ("gram_schmidt", "householder", "lowdin", "iterative"):
        q = VARIANTS[name](p)
        assert (q.mT @ q - torch.eye(96)).abs().max() < 2e-5, name


def test_neumann_matches_cayley_also_if_the_series_diverges():
    for spread in (1e-3, 0.1, 1.0, 30.0):
        free = free_parameters(orthogonal.Cayley(), 8, spread=spread)
        series = orthogonal.Neumann(terms=6)
        torch.testing.assert_close(series(free), orthogonal.Cayley()(free), atol=1e-9, rtol=0)
        a, b = (
            torch.autograd.grad(m(free.requires_grad_(), random_rows(5, 8)).square().sum() + m(free).sum(), free)[0]
            for m in (series, orthogonal.Cayley())
        )
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 20.0, 200.0])
def test_exponential_matches_torch_for_small_and_large_generators(spread):
    free = free_parameters(orthogonal.Exponential(), 11, spread=spread)
    for v in (random_rows(3, 11), random_rows(30, 11)):
        grads = []
        for compute in (
            lambda f, v=v: orthogonal.Exponential()(f, v),
            lambda f, v=v: v @ torch.linalg.matrix_exp(factor.unpack_skew(f)).mT,
        ):
            leaf = free.clone().requires_grad_()
            w = compute(leaf)
            grads.append((w, *torch.autograd.grad((w * torch.linspace(-1, 1, 11)).sum(), leaf)))
        torch.testing.assert_close(grads[0], grads[1], atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("size", [0.1, 1.0, 4.0, 30.0])
def test_exponential_is_exact_if_the_norm_estimate_fails(size):
    # The power iteration starts on the axis of this rotation, so its estimate of the norm is 0.
    generator = torch.tensor([[0.0, -3, 2], [3, 0, -1], [-2, 1, 0]])
    free = factor.pack_skew(size * generator) / 2
    r = orthogonal.Exponential()(free)
    torch.testing.assert_close(r, torch.linalg.matrix_exp(size * generator.double()).float(), atol=1e-4, rtol=0)
    compiled = torch.compile(lambda f: orthogonal.Exponential()(f), backend="aot_eager")(free)
    torch.testing.assert_close(compiled, r)


@pytest.mark.parametrize("name", ["exponential", "bounded"])
@pytest.mark.parametrize("spread", [1e6, 1e7, 1e20, 1e30])
def test_map_of_huge_generators_is_a_rotation_with_finite_gradients(name, spread):
    free = free_parameters(VARIANTS[name], 11, spread=spread, dtype=torch.float32).requires_grad_()
    r = VARIANTS[name](free)
    (gradient,) = torch.autograd.grad((r * random_rows(11, 11, dtype=torch.float32)).sum(), free)
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close(r @ r.mT, torch.eye(11), atol=1e-5, rtol=0)
    assert (r - torch.eye(11)).abs().max() > 0.01


@pytest.mark.parametrize("spread", [1e4, 1e7, 1e10])
def test_cayley_of_a_large_odd_generator_preserves_norms(spread):
    free = free_parameters(orthogonal.Cayley(), 11, spread=spread, dtype=torch.float32).requires_grad_()
    r = orthogonal.Cayley()(free)
    torch.testing.assert_close(r @ r.mT, torch.eye(11), atol=2e-5, rtol=0)
    assert torch.linalg.det(r.double()).item() == pytest.approx(1, abs=1e-4)
    (gradient,) = torch.autograd.grad((r * random_rows(11, 11, dtype=torch.float32)).sum(), free)
    assert gradient.dtype == torch.float32
    assert torch.isfinite(gradient).all()


def test_neumann_checks_every_block():
    free = torch.stack([torch.zeros(28), torch.full((28,), 0.2)])
    v = torch.stack([1e4 * torch.ones(5, 8), 1e-3 * random_rows(5, 8, dtype=torch.float32)])
    torch.testing.assert_close(orthogonal.Neumann()(free, v)[1], orthogonal.Cayley()(free, v)[1], atol=1e-9, rtol=1e-5)


def test_cayley_bound_limits_only_large_generators():
    far, near = (
        free_parameters(orthogonal.Cayley(), 8, spread=5.0),
        free_parameters(orthogonal.Cayley(), 8, spread=0.01),
    )
    bounded = orthogonal.Cayley(bound=0.5)
    assert torch.linalg.matrix_norm(bounded.generator(far)).item() == pytest.approx(0.5)
    torch.testing.assert_close(bounded(near), orthogonal.Cayley()(near), atol=0, rtol=0)
    # Scaling a long generator does not change R, so its gradient is perpendicular to it, whatever its size.
    for size in (1.0, 1e12, 1e25):
        free = (size * far.float()).requires_grad_()
        r = bounded(free, random_rows(3, 8, dtype=torch.float32))
        (gradient,) = torch.autograd.grad(r.square().sum() + r.sum(), free)
        directions = [torch.nn.functional.normalize(x.detach().double(), dim=-1) for x in (size * gradient, far)]
        assert (directions[0] * directions[1]).sum().abs() < 1e-5


@pytest.mark.parametrize("d", range(1, 12))
def test_skew_uses_every_entry_once_and_has_the_adjoint_as_gradient(d):
    numbers = torch.arange(1.0, d * (d - 1) // 2 + 1, dtype=torch.float64)
    s = factor.unpack_skew(numbers)
    assert torch.equal(s, -s.mT)
    assert sorted(s[s > 0].tolist() + (-s[s < 0]).tolist()) == sorted(2 * numbers.tolist())
    g = random_rows(d, d)
    assert (s * g).sum().item() == pytest.approx((numbers * factor.pack_skew(g)).sum().item())
    assert factor.skew_size(len(numbers)) == d or d == 1


@pytest.mark.parametrize("name", MENU)
def test_map_is_documented_frozen_and_has_a_repr_that_evaluates(name):
    entry = MENU[name]
    assert re.sub(r"(?<!^)(?=[A-Z])", "_", entry.__name__).lower() == name
    assert ">>>" in inspect.getdoc(entry)
    assert entry.__dataclass_params__.frozen
    assert eval(repr(entry()), {**vars(orthogonal), **vars(transform)}) == entry()


@pytest.mark.parametrize(
    ("name", "field"), [(name, field.name) for name, entry in MENU.items() for field in dataclasses.fields(entry)]
)
def test_map_uses_every_field(name, field):
    method = MENU[name]()
    assert field in OTHER_VALUES, f"add a value of {name}.{field} other than the default to OTHER_VALUES"
    # The terms of the series matter only while it converges, for small generators.
    free = free_parameters(method, 8, spread=0.02 if name == "neumann" else 0.5, dtype=torch.float32)
    assert not torch.equal(method(free), dataclasses.replace(method, **{field: OTHER_VALUES[field]})(free))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: orthogonal.GramSchmidt("fast"), "form must be 'classical', 'modified' or 'iterative', not 'fast'"),
        (lambda: orthogonal.Cayley(bound=0), "bound must be None or a positive number"),
        (lambda: orthogonal.Neumann(terms=0), "terms must be an integer >= 1"),
        (lambda: transform.Banded(width=-1), "width must be an integer >= 0"),
        (lambda: orthogonal.Cayley(bound="a"), "bound must be None or a positive number, not 'a'"),
        (lambda: orthogonal.Neumann(terms=1.5), "terms must be an integer >= 1, not 1.5"),
        (lambda: transform.Banded(width=1.5), "width must be an integer >= 0, not 1.5"),
        (lambda: choose(MENU, "nonsense", "method"), "method must be one of 'gram_schmidt'"),
    ],
)
def test_map_rejects_invalid_fields(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@every_map
@pytest.mark.parametrize("d", [4, 5])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("readable", [True, False], ids=["CPU", "device"])
def test_map_of_parameters_that_are_not_finite_is_not_finite(name, d, value, readable, monkeypatch):
    monkeypatch.setattr(_numerics, "all_on_cpu", lambda *tensors: readable)
    method, v = VARIANTS[name], random_rows(3, d, dtype=torch.float32)
    free = free_parameters(method, d, 2, dtype=torch.float32)
    free[0].view(-1)[0] = value
    free.requires_grad_()
    w = method(free, v.expand(2, -1, -1))
    torch.autograd.grad(w.sum(), free)  # neither raises an error nor hangs
    for result in (w, method.expression(free, v.expand(2, -1, -1))):
        assert not torch.isfinite(result[0]).all()
        assert torch.isfinite(result[1]).all()  # blocks do not affect each other


# Transforms of torch: every map has a differentiable expression next to its kernels -----------------------------------


@pytest.mark.slow
@every_map
@pytest.mark.parametrize("shape", [(3, 5), (7, 4), (2, 3, 4)])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_map_second_derivatives_pass_gradgradcheck(name, shape, spread):
    method = VARIANTS[name]
    free = free_parameters(method, shape[-1], *shape[:-2], spread=spread).requires_grad_()
    assert gradgradcheck(method, (free, random_rows(*shape).requires_grad_()))


@every_map
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("readable", [True, False], ids=["CPU", "device"])
def test_map_agrees_with_its_expression(name, batch, readable, monkeypatch):
    monkeypatch.setattr(_numerics, "all_on_cpu", lambda *tensors: readable)
    method, v = VARIANTS[name], random_rows(*batch, 7, 5)
    leaves = free_parameters(method, 5, *batch).requires_grad_(), v.requires_grad_()
    w, expected = method(*leaves), method.expression(*leaves)
    torch.testing.assert_close(w, expected, atol=1e-12, rtol=0)
    g = random_rows(*batch, 7, 5).flip(0)
    grads, expected_grads = (torch.autograd.grad(output, leaves, g) for output in (w, expected))
    torch.testing.assert_close(grads, expected_grads, atol=1e-10, rtol=0)


@every_map
def test_map_works_under_vmap_grad_and_jvp(name):
    method, v = VARIANTS[name], random_rows(3, 4, 5)
    frees = free_parameters(method, 5, 3)
    together = torch.func.vmap(method)(frees, v)
    torch.testing.assert_close(together, torch.stack([method(f, x) for f, x in zip(frees, v, strict=True)]))

    def loss(free, x):
        return method(free, x).pow(3).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(frees[0], v)
    for x, grad in zip(v, per_sample, strict=True):
        leaf = frees[0].clone().requires_grad_()
        torch.testing.assert_close(grad, torch.autograd.grad(loss(leaf, x), leaf)[0], atol=1e-9, rtol=1e-9)
    tangent = torch.randn(frees[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, derivative = torch.func.jvp(lambda f: loss(f, v[0]), (frees[0],), (tangent,))
    torch.testing.assert_close(derivative, (per_sample[0] * tangent).sum(), atol=1e-9, rtol=1e-9)
    with forward_ad.dual_level():
        dual = loss(forward_ad.make_dual(frees[0], tangent), v[0])
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, derivative)


def test_lowdin_third_derivative_is_exact_at_repeated_singular_values():
    """Along P = I + tA with A skew, U is known in closed form for d = 2: the rotation by the angle arctan t."""
    a = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    sine = orthogonal.Lowdin()(torch.eye(2, dtype=torch.float64) + t * a)[1, 0]  # t/√(1+t²) = t − t³/2 + …
    derivatives = []
    for _ in range(3):
        (sine,) = torch.autograd.grad(sine, t, create_graph=True)
        derivatives.append(sine.item())
    assert derivatives == pytest.approx([1.0, 0.0, -3.0], abs=1e-9)


@pytest.mark.parametrize("spread", [1e13, 1e17, 1e30])
def test_cayley_rejects_an_odd_generator_beyond_float64(spread):
    free = free_parameters(orthogonal.Cayley(), 11, spread=spread, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"generator of a Cayley rotation must have a norm below 1e\+12, not \d"):
        orthogonal.Cayley()(free)
    even = orthogonal.Cayley()(free_parameters(orthogonal.Cayley(), 10, spread=spread, dtype=torch.float32))
    torch.testing.assert_close(even, -torch.eye(10))  # the limit, which is a rotation


@dataclasses.dataclass(frozen=True)
class PlaneRotation(orthogonal.RowMap):
    """The rotation by an angle in the plane of the first two entries, defined by an expression alone."""

    def identity(self, d):
        return torch.zeros(1)

    def expression(self, free, v):
        x, y, *rest = v.unbind(-1)
        c, s = free[..., 0:1].cos(), free[..., 0:1].sin()
        return torch.stack([c * x - s * y, s * x + c * y, *rest], -1)


def test_map_defined_by_an_expression_needs_no_kernels():
    method, v = PlaneRotation(), random_rows(3, 4)
    free = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(method(free, v).norm(dim=1), v.norm(dim=1))
    assert gradcheck(method, (free, v.requires_grad_()))
    assert gradgradcheck(method, (free, v))
    with torch.inference_mode():
        assert method(free, v).shape == (3, 4)


def test_kernels_run_in_eager_mode_and_the_expression_runs_elsewhere():
    calls = []

    class Logged(orthogonal.Householder):
        def expression(self, free, v):
            calls.append("expression")
            return super().expression(free, v)

        def forward_kernel(self, free, v):
            calls.append("forward")
            return super().forward_kernel(free, v)

        def backward_kernel(self, *arguments, **options):
            calls.append("backward")
            return super().backward_kernel(*arguments, **options)

    method, v = Logged(), random_rows(3, 4)
    free = free_parameters(method, 4).requires_grad_()
    tangent = torch.ones_like(free)

    def value(f):
        return method(f, v).square().sum()

    situations = {
        "forward": (lambda: value(free.detach()), ["forward"]),
        "gradient": (lambda: value(free).backward(), ["forward", "backward"]),
        "create_graph": (
            lambda: torch.autograd.grad(value(free), free, create_graph=True),
            ["forward", "expression"],
        ),
        "torch.func": (lambda: torch.func.grad(value)(free.detach()), ["expression"]),
        "forward mode": (lambda: torch.func.jvp(value, (free.detach(),), (tangent,)), ["expression"]),
        "tracing": (
            lambda: torch.jit.trace(lambda f: method(f, v), (free.detach(),), check_trace=False),
            ["expression"],
        ),
        "meta": (lambda: method(free.detach().to("meta"), v.to("meta")), ["expression"]),
    }
    for name, (run, expected) in situations.items():
        calls.clear()
        run()
        assert calls == expected, name


@every_map
@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0])
def test_map_matrix_of_a_batch_matches_numpy_and_passes_gradcheck(name, spread):
    method = VARIANTS[name]
    free = free_parameters(method, 6, 3, spread=spread).requires_grad_()
    expected = np.stack([reference.rotation(name, one, getattr(method, "bound", None)) for one in free.detach()])
    np.testing.assert_allclose(method(free).detach().numpy(), expected, atol=1e-12)
    assert gradcheck(method, (free,))
    assert gradgradcheck(method, (free,), fast_mode=True)  # every entry is checked for single matrices above


@pytest.mark.parametrize("name", EXACT)
def test_map_of_a_batch_of_large_matrices_is_right_with_two_threads(name):
    # The LU factorisation of torch 2.13 is wrong for such batches.
    method, threads = VARIANTS[name], torch.get_num_threads()
    free = free_parameters(method, 160, 3, spread=0.05, dtype=torch.float32)
    torch.set_num_threads(2)
    try:
        batch = method(free)
    finally:
        torch.set_num_threads(threads)
    one_by_one = torch.stack([method(one) for one in free])
    torch.testing.assert_close(batch, one_by_one, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch @ batch.mT, torch.eye(160).expand_as(batch), atol=2e-5, rtol=0)


def test_skew_series_gives_the_cayley_transform_or_none():
    for size in (1, 5, 32):
        for spread in (0.0, 1e-4, 1e-3, 5e-3, 1e-2, 2e-2, 0.1, 3.0):
            s = factor.unpack_skew(spread * random_rows(4, size * (size - 1) // 2, dtype=torch.float32))
            series = factor.skew_series(s)
            norm = torch.linalg.matrix_norm(s.double(), 2).amax() if size > 1 else 0.0
            assert series is not None or norm > 0.5
            if series is not None:
                resolvent = torch.linalg.inv(torch.eye(size).double() - s.double())
                expected = (torch.eye(size).double() + s.double()) @ resolvent
                torch.testing.assert_close(factor.cayley_from_series(series).double(), expected, atol=1e-6, rtol=0)
                rows = random_rows(4, 3 * size, dtype=torch.float32).unflatten(1, (3, size))
                for transposed, inverse in ((False, resolvent), (True, resolvent.mT)):
                    applied = factor.apply_skew_series(rows, series, transposed=transposed)
                    torch.testing.assert_close(applied.double(), rows.double() @ inverse, atol=3e-6, rtol=1e-6)
    assert factor.skew_series(torch.full((1, 2, 2), torch.nan)) is None


@pytest.mark.parametrize("size", [2, 5, 6, 9])
def test_cayley_generator_refuses_every_reflection(size):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        q = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]
        q[0] *= -torch.linalg.det(q)  # the determinant is now −1
        with pytest.raises(ValueError, match="turns a plane by 180° or reflects"):
            factor.cayley_generator(q)
