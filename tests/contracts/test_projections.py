"""Contracts that every projection satisfies. Entries are read from the menu, so a new one is tested at once."""

import dataclasses
import inspect
import re

import pytest
import torch

from hypersphere.functions import projection
from hypersphere.functions.kernel import PairPotential
from hypersphere.functions.projection import CONSTRUCTIONS, PROJECTIONS, AnglePreserving, Group, Learned, Random

NEURONS, CHANNELS, TAPS = 12, 16, 3
SMALL = {"dim": 5, "channels": 4}
every = pytest.mark.parametrize("name", PROJECTIONS)


def small(name):
    fields = {field.name for field in dataclasses.fields(PROJECTIONS[name])}
    return PROJECTIONS[name](**{k: v for k, v in SMALL.items() if k in fields})


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rows(seed=0, dtype=torch.float64):
    return torch.randn(1, NEURONS, CHANNELS * TAPS, dtype=dtype, generator=seeded(seed))


@every
def test_projection_is_finite_with_finite_gradients(name):
    entry, w = small(name), rows().requires_grad_()
    basis = entry.basis(NEURONS, CHANNELS, TAPS, seeded())
    stacks = entry(w, basis.to(w) if basis.is_floating_point() else basis)
    for stack in stacks:
        assert stack.ndim == 4
        assert stack.shape[1] == 1
        assert torch.isfinite(stack).all()
    sum(stack.square().sum() for stack in stacks).backward()
    assert torch.isfinite(w.grad).all()
    assert w.grad.abs().sum() > 0


@every
def test_projection_is_reproducible_with_a_generator(name):
    first, second = (small(name).basis(NEURONS, CHANNELS, TAPS, seeded(3)) for _ in range(2))
    assert torch.equal(first, second)


# The bilateral projection mixes neurons, weighted by their norms.
@pytest.mark.parametrize("name", [name for name in PROJECTIONS if name != "bilateral"])
def test_projection_is_invariant_to_the_norms_of_neurons(name):
    entry, w = small(name), rows()
    basis = entry.basis(NEURONS, CHANNELS, TAPS, seeded())
    basis = basis.to(w) if basis.is_floating_point() else basis
    for projected, scaled in zip(entry(w, basis), entry(3 * w, basis), strict=True):
        torch.testing.assert_close(
            scaled / scaled.norm(dim=-1, keepdim=True), projected / projected.norm(dim=-1, keepdim=True)
        )


@every
def test_projection_is_documented_and_has_a_repr_that_evaluates(name):
    entry = small(name)
    assert eval(repr(entry), vars(projection)) == entry
    kind = PROJECTIONS[name]
    assert re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower() == name
    assert ">>>" in inspect.getdoc(kind)
    assert kind.__dataclass_params__.frozen


@pytest.mark.parametrize("name", [name for name, kind in PROJECTIONS.items() if hasattr(kind(), "dim")])
def test_projection_rejects_more_dimensions_than_the_neurons(name):
    with pytest.raises(ValueError, match="dim must be at most"):
        PROJECTIONS[name](dim=30).basis(40, 9, 1, seeded())
    assert not PROJECTIONS[name](dim=30).fits(40, 9)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_random_constructions_preserve_inner_products_in_the_mean(construction):
    """Inner products are unbiased up to a common scale: E[PᵀP] ∝ I."""
    basis = Random(dim=8, views=600, construction=construction).basis(1, 24, 1, seeded()).double()
    gram = (basis.mT @ basis).mean(0)
    gram = gram / gram.diagonal().mean()
    torch.testing.assert_close(gram, torch.eye(24, dtype=torch.float64), atol=0.12, rtol=0)


def test_hadamard_has_orthogonal_rows_and_count_sketch_one_entry_per_column():
    hadamard = Random(dim=8, views=2, construction="hadamard").basis(1, 16, 1, seeded())
    torch.testing.assert_close(hadamard @ hadamard.mT, 16 * torch.eye(8).expand(2, 8, 8))
    sketch = Random(dim=8, views=2, construction="count_sketch").basis(1, 16, 1, seeded())
    assert ((sketch != 0).sum(1) == 1).all()
    assert sketch.abs().max() == 1


@pytest.mark.parametrize("form", ["cosine", "angle"])
def test_angle_preserving_gradient_is_the_derivative(form):
    entry, w = AnglePreserving(dim=4, views=2, form=form), rows(1)[:, :, :9].requires_grad_()
    basis = torch.randn(2, 4, 9, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(entry.objective(w, basis), basis)
    gradient = entry.gradient(w, basis, PairPotential())
    torch.testing.assert_close(gradient, expected)
    step = 1e-3
    second = torch.autograd.grad(gradient.square().sum(), w)[0]
    direction = torch.randn_like(w)
    ahead, behind = (
        entry.gradient((w + sign * step * direction).detach(), basis, PairPotential()).square().sum()
        for sign in (1, -1)
    )
    assert (second * direction).sum().item() == pytest.approx((ahead - behind).item() / (2 * step), rel=1e-3)


def test_learned_projections_move_in_the_direction_of_their_objective():
    w = rows(2).float() + 0.7
    for name, lower in (("angle_preserving", True), ("adversarial", False), ("cooperative", True)):
        entry = small(name)
        assert isinstance(entry, Learned)
        basis = entry.basis(NEURONS, CHANNELS, TAPS, seeded())
        potential = PairPotential()

        def measure(basis, entry=entry, potential=potential, lower=lower):
            if isinstance(entry, AnglePreserving):
                return entry.objective(w, basis).item()
            projected = torch.nn.functional.normalize(entry(w, basis)[0], dim=-1)
            return (1 / (2 - 2 * projected @ projected.mT + 1e9 * torch.eye(NEURONS))).sum().item()

        before = measure(basis)
        for _ in range(3):
            basis = basis - 0.1 * entry.rate * entry.gradient(w, basis, potential)
        assert (measure(basis) < before) == lower


def test_slope_is_a_deprecated_name_of_gradient():
    w, potential = rows(), PairPotential()
    entry = small("adversarial")
    basis = entry.basis(NEURONS, CHANNELS, TAPS, seeded()).double()
    with pytest.warns(DeprecationWarning, match="Adversarial.slope is deprecated"):
        assert torch.equal(entry.slope(w, basis, potential), entry.gradient(w, basis, potential))
    with pytest.warns(DeprecationWarning, match="define gradient instead"):

        @dataclasses.dataclass(frozen=True)
        class Shrinking(Learned):
            dim: int = 5
            views: int = 1
            rate: float = 1.0
            updates: int = 1
            every: int = 1

            def slope(self, w, basis, potential):
                return basis

    assert torch.equal(Shrinking().gradient(w, basis, potential), basis)


def test_groups_partition_the_channels():
    w = torch.arange(2 * 10 * 3.0).reshape(1, 2, 30)
    stacks = Group(channels=4)(w, Group(channels=4).basis(2, 10, 3, seeded()))[0]
    assert stacks.shape == (3, 1, 2, 12)
    assert torch.equal(stacks[1, 0, 0], w[0, 0, 12:24])
    assert torch.equal(stacks[2, 0, 1], torch.cat([w[0, 1, 24:], torch.zeros(6)]))
    chosen = Group(channels=4, random=True).basis(2, 10, 3, seeded())
    assert sorted(chosen.flatten().tolist()) == [*range(30), *[30] * 6]
    assert not torch.equal(chosen, Group(channels=4).basis(2, 10, 3, seeded()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Random(dim=1), "dim must be an integer >= 2"),
        (lambda: Random(views=0), "views must be an integer >= 1"),
        (lambda: Random(construction="fourier"), "construction must be one of 'gaussian'"),
        (lambda: Random(aggregate="median"), "aggregate must be 'mean' or 'max'"),
        (lambda: AnglePreserving(method="direct"), "method must be 'unrolled' or 'alternating'"),
        (lambda: AnglePreserving(form="sine"), "form must be 'cosine' or 'angle'"),
        (lambda: AnglePreserving(rate=0), "rate must be a positive number up to 1000000, not 0"),
        (lambda: AnglePreserving(rate=1e39), "rate must be a positive number up to 1000000"),
        (lambda: Random(construction=[1]), "construction must be one of .gaussian"),
        (lambda: Group(channels=0), "channels must be an integer >= 1"),
    ],
)
def test_projection_rejects_invalid_fields(make, message):
    with pytest.raises(ValueError, match=message):
        make()
