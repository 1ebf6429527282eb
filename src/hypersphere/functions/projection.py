r"""Projections for compressive energies: maps from neurons to shorter vectors   (thesis, chapter 6).

A projection maps rows w (sets, N, d) to stacks (views, sets, N′, r) through a basis P, which is drawn again every few
steps (`Drawn`), or drawn once and then learned by gradient steps (`Learned`). Only directions matter, so P is applied
to w itself: P ŵ/‖P ŵ‖ = P w/‖P w‖. To add a projection, write a frozen dataclass and list it in PROJECTIONS. Override
`min_length` if it needs neurons of more than two numbers.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._deprecation import accept_old_methods, deprecated_attribute
from hypersphere._validation import is_integer, is_number, require
from hypersphere.functions._autograd import inner_graph
from hypersphere.functions._pairwise import PairSum, pair_energy
from hypersphere.functions.kernel import PairPotential

__all__ = [
    "CONSTRUCTIONS",
    "PROJECTIONS",
    "Adversarial",
    "AnglePreserving",
    "Bilateral",
    "Cooperative",
    "Drawn",
    "Group",
    "Learned",
    "Projection",
    "Random",
]


class Projection(abc.ABC):
    """A basis for neurons of one shape, and the vectors that it maps neurons to.

    Attributes:
        scope: which layers share a basis: those with neurons of the same "length", those with the same "channels" and
            kernel positions, or none ("layer").
        aggregate: how the energies of the views are combined, "mean" or "max".
        min_distance: the distance at which `CoMHE` caps the energy unless it is given another one; None for no cap.
        every: the number of steps between draws or updates of the basis.
    """

    scope = "length"
    aggregate = "mean"
    min_distance: float | None = None
    every: int

    @abc.abstractmethod
    def basis(self, neurons: int, channels: int, taps: int, generator: torch.Generator) -> Tensor:
        """Draw the basis for `neurons` rows of `channels`·`taps` numbers, where taps are the positions of a kernel."""

    @abc.abstractmethod
    def __call__(self, w: Tensor, basis: Tensor) -> tuple[Tensor, ...]:
        """Return stacks (views, sets, N′, r) of projected vectors for the rows w (sets, N, d)."""

    @property
    def min_length(self) -> int:
        """The smallest length of a neuron that can be projected."""
        return 2

    def fits(self, neurons: int, d: int) -> bool:
        """Return True if a layer of `neurons` rows of `d` numbers is large enough to be projected."""
        return d >= self.min_length


class Drawn(Projection):
    """A projection whose basis is drawn again every `every` steps."""


class Learned(Projection):
    """A projection whose basis descends an objective: `updates` gradient steps of size `rate` every `every` steps.

    If `redraw_every` is not None, the basis is drawn again after that many steps, so that it does not settle.
    """

    dim: int
    views: int
    rate: float
    updates: int
    redraw_every: int | None = None
    slope = deprecated_attribute("slope", "gradient")
    unrolled = False  # True if P is updated at every step of the network and the energy differentiated through it

    def __init_subclass__(cls) -> None:
        """Accept a subclass that defines `gradient` under its old name `slope`."""
        super().__init_subclass__()
        accept_old_methods(cls, {"slope": "gradient"})

    def __post_init__(self) -> None:
        """Check shapes and steps."""
        _check_shape(self.dim, self.views, self.every)
        # Larger rates would make the basis overflow.
        largest = _numerics.SAFE_PARAMETER_RANGE[1]
        is_rate = is_number(self.rate, 0, largest) and self.rate > 0
        require(is_rate, "rate", f"a positive number up to {largest:.0f}", self.rate)
        _check_integer("updates", self.updates, 1)
        if self.redraw_every is not None:
            _check_integer("redraw_every", self.redraw_every, 1)

    @property
    def min_length(self) -> int:
        """The length of projected neurons, `dim`: shorter neurons are not projected."""
        return self.dim

    def basis(self, neurons: int, channels: int, taps: int, generator: torch.Generator) -> Tensor:
        """Draw the Gaussian basis that learning starts from."""
        _check_shape(self.dim, self.views, self.every, channels * taps)
        return _gaussian((self.views, self.dim, channels * taps), generator)

    def __call__(self, w: Tensor, basis: Tensor) -> tuple[Tensor, ...]:
        """Return P w in every view."""
        return (_project(w, basis),)

    def update(self, basis: Tensor, gradient: Tensor) -> Tensor:
        """Return the basis after one step against the gradient of its objective."""
        return basis - self.rate * gradient

    @abc.abstractmethod
    def gradient(self, w: Tensor, basis: Tensor, potential: PairPotential) -> Tensor:
        """Return the derivative of the basis' objective with respect to the basis."""


def _gaussian(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Draw independent N(0, 1) entries."""
    return torch.randn(shape, generator=generator)


def _hadamard(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Draw a subsampled randomised Hadamard transform: rows of H_ij = (−1)^popcount(i & j), with random signs."""
    views, dim, d = shape
    # H exists for powers of two: use the smallest order that holds d columns, and drop the columns beyond d.
    order = 1 << (d - 1).bit_length()
    signs = torch.randint(2, (views, 1, d), generator=generator) * 2 - 1
    rows = torch.stack([torch.randperm(order, generator=generator)[:dim] for _ in range(views)])
    # Only `dim` rows are needed, so each entry is computed by its formula instead of building H.
    parity = rows[:, :, None] & torch.arange(d)
    # Fold the bits onto the last one, which becomes the parity of their number.
    for shift in (32, 16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    return ((1 - 2 * (parity & 1)) * signs).float()


def _count_sketch(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Draw one entry ±1 per column, in a random row."""
    views, dim, d = shape
    rows = torch.randint(dim, (views, 1, d), generator=generator)
    signs = torch.randint(2, (views, 1, d), generator=generator) * 2.0 - 1
    return torch.zeros(shape).scatter_(1, rows, signs)


CONSTRUCTIONS = {"gaussian": _gaussian, "hadamard": _hadamard, "count_sketch": _count_sketch}


def _project(w: Tensor, basis: Tensor) -> Tensor:
    """Return P w as (views, sets, N, r) for rows (sets, N, d) and a basis (views, r, d), by one product."""
    views, dim, d = basis.shape
    # One product with the bases stacked as rows. A batched product would copy w for every view.
    projected = w @ basis.reshape(views * dim, d).mT
    return projected.unflatten(-1, (views, dim)).movedim(-2, 0)


def _pair_count(w: Tensor) -> int:
    return max(w.shape[-2] * (w.shape[-2] - 1), 1)


def _check_integer(name: str, value: object, low: int) -> None:
    require(is_integer(value, low), name, f"an integer >= {low}", value)


def _check_shape(dim: int, views: int, every: int, d: int | None = None) -> None:
    _check_integer("dim", dim, 2)
    _check_integer("views", views, 1)
    _check_integer("every", every, 1)
    if d is not None:
        require(dim <= d, "dim", f"at most {d}, the length of the neurons", dim)


@dataclass(frozen=True)
class Random(Drawn):
    r"""Random projection to several views: g(ŵ) = Pŵ/‖Pŵ‖   (thesis, 6.4 and 6.5).

    Args:
        dim: r, the length of projected neurons.
        views: C, the number of independent bases.
        construction: "gaussian", "hadamard" (subsampled randomised Hadamard transform) or "count_sketch".
        aggregate: "mean" or "max" of the energies of the views.
        every: the number of steps after which the bases are drawn again.

    >>> p = Random(dim=3, views=2)
    >>> p(torch.randn(1, 7, 9), p.basis(7, 9, 1, torch.Generator()))[0].shape
    torch.Size([2, 1, 7, 3])
    """

    dim: int = 30
    views: int = 5
    construction: str = "gaussian"
    aggregate: str = "mean"
    every: int = 1

    def __post_init__(self) -> None:
        """Check names and shapes."""
        _check_shape(self.dim, self.views, self.every)
        accepted = f"one of {', '.join(map(repr, CONSTRUCTIONS))}"
        require(self.construction in tuple(CONSTRUCTIONS), "construction", accepted, self.construction)
        require(self.aggregate in ("mean", "max"), "aggregate", "'mean' or 'max'", self.aggregate)

    @property
    def min_length(self) -> int:
        """The length of projected neurons, `dim`: shorter neurons are not projected."""
        return self.dim

    def basis(self, neurons: int, channels: int, taps: int, generator: torch.Generator) -> Tensor:
        """Draw the (views, dim, d) entries."""
        _check_shape(self.dim, self.views, self.every, channels * taps)
        return CONSTRUCTIONS[self.construction]((self.views, self.dim, channels * taps), generator)

    def __call__(self, w: Tensor, basis: Tensor) -> tuple[Tensor, ...]:
        """Return P w in every view."""
        return (_project(w, basis),)


@dataclass(frozen=True)
class AnglePreserving(Learned):
    r"""The basis that preserves angles best   (thesis, 6.6 and 6.7).

    P descends L = Σ_{i≠j}(cos θ(ŵᵢ,ŵⱼ) − cos θ(Pŵᵢ,Pŵⱼ))².

    Args:
        dim: r, the length of projected neurons.
        views: the number of independent bases.
        method: when P takes `updates` gradient steps P − η·∂L/∂P. "unrolled": at every step of the network, and the
            gradient of the energy with respect to W includes the dependence of the new P on W. "alternating": every
            `every` steps of the network, and P is a constant in the gradient of the energy.
        form: "cosine", or "angle" to compare θ instead of cos θ.
        rate: η, for L divided by the number of pairs.
        updates: the number of gradient steps that P takes whenever it is updated.
        every: steps of the network between updates (only "alternating").
        redraw_every: steps of the network after which P is drawn again; None for never.

    >>> p = AnglePreserving(dim=3)
    >>> p(torch.randn(1, 7, 9), p.basis(7, 9, 1, torch.Generator()))[0].shape
    torch.Size([1, 1, 7, 3])
    """

    dim: int = 30
    views: int = 1
    method: str = "unrolled"
    form: str = "cosine"
    rate: float = 30.0
    updates: int = 1
    every: int = 10
    redraw_every: int | None = 1000

    def __post_init__(self) -> None:
        """Check names and shapes."""
        super().__post_init__()
        require(self.method in ("unrolled", "alternating"), "method", "'unrolled' or 'alternating'", self.method)
        require(self.form in ("cosine", "angle"), "form", "'cosine' or 'angle'", self.form)

    @property
    def unrolled(self) -> bool:  # type: ignore[override]
        """True if the energy is differentiated through the gradient steps of P."""
        return self.method == "unrolled"

    def objective(self, w: Tensor, basis: Tensor) -> Tensor:
        """Return L, the mean over pairs, summed over sets and views."""
        unit = sphere.polar(w)[1]
        projected = sphere.polar(_project(unit, basis))[1]
        before, after = unit @ unit.mT, projected @ projected.mT
        if self.form == "angle":
            before, after = sphere.angle(before), sphere.angle(after)
        excluded = torch.eye(w.shape[-2], dtype=torch.bool, device=w.device)
        return (after - before).masked_fill(excluded, 0.0).square().sum() / _pair_count(w)

    def gradient(self, w: Tensor, basis: Tensor, potential: PairPotential) -> Tensor:
        """Return ∂L/∂P as a differentiable expression. The cosine form needs no matrix of pairs.

        With x = P w, the gradient with respect to a projected direction is proportional to Σⱼ(ĉᵢⱼ − cᵢⱼ)·x̂ⱼ, where
        ĉ and c are the cosines after and before. In matrix form this is X̂(X̂ᵀX̂) − Ŵ(ŴᵀX̂), products of N·d·r only.
        """
        if self.form == "angle":
            # The unrolled step differentiates this gradient once more, so the graph is needed if w has one.
            with inner_graph():
                leaf = basis if basis.requires_grad else basis.detach().requires_grad_()
                return torch.autograd.grad(self.objective(w, leaf), leaf, create_graph=w.requires_grad)[0]
        # Rows are not normalised first: x̂ and ∂L/∂P are the same for w and ŵ, and dividing the N·r projected entries is
        # cheaper than dividing the N·d entries of w.
        lengths, w = _lengths_and_rows(w)
        x_lengths, x = sphere.polar(_project(w, basis))
        # Σⱼ(ĉᵢⱼ − cᵢⱼ)·x̂ⱼ. Evaluated from the right; the term j = i is 0, because ĉᵢᵢ = cᵢᵢ = 1.
        grad_direction = x @ (x.mT @ x) - w @ (w.mT @ (x / lengths)) / lengths
        # Through the normalisation of x: the tangential part, divided by the norm.
        tangential = grad_direction - (grad_direction * x).sum(-1, keepdim=True) * x
        # A neuron that P maps to zero has no direction and gets no gradient.
        grad_projected = tangential / x_lengths.masked_fill(x_lengths == 0, 1.0)
        # x = P w gives ∂L/∂P = Σᵢ(∂L/∂xᵢ)·wᵢᵀ. The factor 4 is 2 of the square times 2 of the ordered pairs.
        return torch.einsum("vsnr,snd->vrd", grad_projected, w) * (4 / _pair_count(w))


def _lengths_and_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return norms and rows; if squares could overflow or underflow, norms of 1 and the directions of the rows."""
    length = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    if _numerics.values_readable(w) and _numerics.norms_in_bounds(length.detach()):
        return length, w
    return torch.ones_like(length), sphere.polar(w)[1]


@dataclass(frozen=True)
class Adversarial(Learned):
    r"""The basis with the highest energy: P ascends the energy that W descends   (thesis, 6.8).

    The energy of projected neurons has no upper bound: in few dimensions P can make two of them coincide. Therefore the
    energy is capped at `min_distance`, and one step changes P by at most a tenth of its norm.

    Args:
        dim: r, the length of projected neurons.
        views: the number of independent bases.
        rate: the size of a gradient step of P.
        updates: the number of gradient steps that P takes whenever it is updated.
        every: steps of the network between updates.
        min_distance: the distance below which the energy continues linearly; None for no cap.
        redraw_every: steps of the network after which P is drawn again; None for never.

    >>> p = Adversarial(dim=3)
    >>> p(torch.randn(1, 7, 9), p.basis(7, 9, 1, torch.Generator()))[0].shape
    torch.Size([1, 1, 7, 3])
    """

    dim: int = 30
    views: int = 1
    rate: float = 1.0
    updates: int = 1
    every: int = 1
    min_distance: float | None = 0.1
    redraw_every: int | None = None

    def gradient(self, w: Tensor, basis: Tensor, potential: PairPotential) -> Tensor:
        """Return −∂Ē/∂P, with Ē the mean energy over pairs."""
        return -_energy_gradient(w, basis, potential)  # `update` descends, and P ascends

    def update(self, basis: Tensor, gradient: Tensor) -> Tensor:
        """Return the basis after one step, which is at most a tenth as long as the basis of its view."""
        # The energy depends only on the directions P w, so the norm of P is a natural unit for the length of its steps.
        step = self.rate * gradient
        lengths = torch.linalg.vector_norm(step, dim=(-2, -1), keepdim=True)
        longest = torch.linalg.vector_norm(basis, dim=(-2, -1), keepdim=True) / 10
        return basis - step * (longest / lengths.clamp_min(torch.finfo(step.dtype).tiny)).clamp_max(1.0)


@dataclass(frozen=True)
class Cooperative(Learned):
    r"""The basis that is trained with the network: P descends the energy that W descends   (thesis, E.8).

    The energy can fall because P changes instead of the neurons, so this projection regularises less than a random one.
    It is the "naively learned projection" of the source, for comparison.

    Args:
        dim: r, the length of projected neurons.
        views: the number of independent bases.
        rate: the size of a gradient step of P, for the mean energy over pairs.
        updates: the number of gradient steps that P takes whenever it is updated.
        every: steps of the network between updates.
        redraw_every: steps of the network after which P is drawn again; None for never.

    >>> p = Cooperative(dim=3)
    >>> p(torch.randn(1, 7, 9), p.basis(7, 9, 1, torch.Generator()))[0].shape
    torch.Size([1, 1, 7, 3])
    """

    dim: int = 30
    views: int = 1
    rate: float = 0.1
    updates: int = 1
    every: int = 1
    redraw_every: int | None = None

    def gradient(self, w: Tensor, basis: Tensor, potential: PairPotential) -> Tensor:
        """Return ∂Ē/∂P, with Ē the mean energy over pairs."""
        return _energy_gradient(w, basis, potential)


def _energy_gradient(w: Tensor, basis: Tensor, potential: PairPotential) -> Tensor:
    """Return ∂Ē/∂P of the mean energy Ē of the projected rows over pairs."""
    with inner_graph():
        # P is not a function of W here: no gradient flows from the basis to the neurons.
        leaf = basis.detach().requires_grad_()
        energy = pair_energy(PairSum(_project(w.detach(), leaf), potential)).sum() / _pair_count(w)
        return torch.autograd.grad(energy, leaf)[0]


@dataclass(frozen=True)
class Group(Drawn):
    r"""Groups of channels: P_c selects `channels` of them, and the energies of all groups are averaged   (thesis, 6.9).

    If the group size does not divide the number of channels, the last group is smaller. A last group of a single
    number, whose direction is only a sign, is merged into the group before it.

    Args:
        channels: the number of channels per group.
        random: assign channels to groups at random instead of consecutively.
        every: the number of steps after which random groups are drawn again.

    >>> p = Group(channels=4)
    >>> p(torch.randn(1, 7, 12), p.basis(7, 12, 1, torch.Generator()))[0].shape
    torch.Size([3, 1, 7, 4])
    """

    channels: int = 8
    random: bool = False
    every: int = 1
    scope = "channels"

    def __post_init__(self) -> None:
        """Check the group size."""
        _check_integer("channels", self.channels, 1)
        _check_integer("every", self.every, 1)

    def basis(self, neurons: int, channels: int, taps: int, generator: torch.Generator) -> Tensor:
        """Return the indices of the entries of each group, (groups, size); the index d marks an unused place."""
        order = torch.randperm(channels, generator=generator) if self.random else torch.arange(channels)
        # Rows are flattened filters: channel k occupies the entries k·taps to (k + 1)·taps − 1.
        entries = order[:, None] * taps + torch.arange(taps)
        size = min(self.channels, channels)
        require(size * taps >= 2, "channels", "at least 2 where a channel has one number", self.channels)
        groups = list(entries.split(size))
        if groups[-1].numel() < 2:
            groups[-2:] = [torch.cat(groups[-2:])]
        # Pad to one rectangular index. The padding reads a zero that `__call__` appends, which changes no cosine.
        widest = max(len(group) for group in groups)
        unused = channels * taps
        padded = [nn.functional.pad(group, (0, 0, 0, widest - len(group)), value=unused) for group in groups]
        return torch.stack(padded).flatten(1)

    def __call__(self, w: Tensor, basis: Tensor) -> tuple[Tensor, ...]:
        """Return the entries of each group; unused places are 0."""
        padded = torch.cat([w, w.new_zeros(*w.shape[:-1], 1)], -1)
        return (padded[..., basis].movedim(-2, 0),)


@dataclass(frozen=True)
class Bilateral(Drawn):
    r"""Shorter neurons and fewer neurons: the sum of the energies of P₁W and of WP₂   (thesis, E.20 and E.21).

    Args:
        dim: r, the length of the neurons of P₁W and the number of neurons of WP₂.
        every: the number of steps after which P₁ and P₂ are drawn again.

    >>> p = Bilateral(dim=3)
    >>> [y.shape[-2:] for y in p(torch.randn(1, 7, 9), p.basis(7, 9, 1, torch.Generator()))]
    [torch.Size([7, 3]), torch.Size([3, 9])]
    """

    dim: int = 30
    every: int = 1
    scope = "layer"

    def __post_init__(self) -> None:
        """Check the shape."""
        _check_shape(self.dim, 1, self.every)

    def fits(self, neurons: int, d: int) -> bool:
        """Return True if there are at least `dim` rows of at least `dim` numbers."""
        return self.dim <= min(neurons, d)

    def basis(self, neurons: int, channels: int, taps: int, generator: torch.Generator) -> Tensor:
        """Draw P₁ and P₂ next to each other, (dim, d + N)."""
        _check_shape(self.dim, 1, self.every, min(neurons, channels * taps))
        return torch.randn(self.dim, channels * taps + neurons, generator=generator)

    def __call__(self, w: Tensor, basis: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of length `dim`, and `dim` linear combinations of the neurons."""
        left, right = basis.split([w.shape[-1], w.shape[-2]], -1)
        return (w @ left.mT).unsqueeze(0), (right @ w).unsqueeze(0)


PROJECTIONS: dict[str, type[Projection]] = {
    "random": Random,
    "angle_preserving": AnglePreserving,
    "adversarial": Adversarial,
    "cooperative": Cooperative,
    "group": Group,
    "bilateral": Bilateral,
}
