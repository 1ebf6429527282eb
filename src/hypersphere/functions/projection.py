r"""Projections for compressive energies: which shorter vectors stand for the neurons (thesis, chapter 6).

A projection maps rows w (sets, N, d) to stacks (views, sets, N′, r) whose energies are taken, through a basis P that is
drawn (`Drawn`), or drawn once and then learned by gradient steps of its own (`Learned`). Only directions count, so P
acts on w itself: P ŵ/‖P ŵ‖ = P w/‖P w‖. To add one, write a frozen dataclass and list it in PROJECTIONS.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, is_number, require
from hypersphere.functions.potential import PairPotential
from hypersphere.functions.repulsion import mutual_repulsion

__all__ = [
    "CONSTRUCTIONS",
    "PROJECTIONS",
    "Adversarial",
    "AnglePreserving",
    "Bilateral",
    "Drawn",
    "Group",
    "Learned",
    "Projection",
    "Random",
]


class Projection(abc.ABC):
    """What the library asks of a projection: a basis for neurons of one shape, and the rows that it makes of them."""

    scope = "length"  # layers share a basis if this is equal: the "length" of neurons, their "channels", or the "layer"
    aggregate = "mean"  # of the energies of the views
    every: int

    @abc.abstractmethod
    def basis(self, neurons: int, channels: int, taps: int, generator: torch.Generator) -> Tensor:
        """Draw the basis for `neurons` rows of `channels`·`taps` numbers."""

    @abc.abstractmethod
    def __call__(self, w: Tensor, basis: Tensor) -> tuple[Tensor, ...]:
        """Return the stacks (views, sets, N′, r) that stand for the rows w (sets, N, d)."""

    def fits(self, neurons: int, d: int) -> bool:
        """Whether `neurons` rows of `d` numbers are large enough to be projected."""
        return d >= getattr(self, "dim", 2)


class Drawn(Projection):
    """A projection whose basis is drawn anew every `every` steps."""


class Learned(Projection):
    """A projection whose basis follows its own objective, `updates` steps of size `rate` every `every` steps."""

    dim: int
    views: int
    rate: float
    updates: int
    unrolled = False  # whether the energy is taken at P − rate·∂L/∂P and differentiated through it

    def __post_init__(self) -> None:
        """Refuse empty shapes and steps."""
        _require_shape(self.dim, self.views, self.every)
        require(is_number(self.rate, 0) and self.rate > 0, "rate", "a positive number", self.rate)
        _require_whole("updates", self.updates, 1)

    def basis(self, neurons: int, channels: int, taps: int, generator: torch.Generator) -> Tensor:
        """Draw the Gaussian that learning starts from."""
        _require_shape(self.dim, self.views, self.every, channels * taps)
        return _gaussian((self.views, self.dim, channels * taps), generator)

    def __call__(self, w: Tensor, basis: Tensor) -> tuple[Tensor, ...]:
        """Return P w."""
        return (_views(w, basis),)

    @abc.abstractmethod
    def slope(self, w: Tensor, basis: Tensor, potential: PairPotential) -> Tensor:
        """Return the derivative, with respect to the basis, of what it descends."""


def _gaussian(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Independent N(0, 1) entries."""
    return torch.randn(shape, generator=generator)


def _hadamard(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Some rows of a Hadamard matrix whose columns have random signs, (−1)^popcount(i & j): P = S·H·D."""
    views, dim, d = shape
    order = 1 << (d - 1).bit_length()
    signs = torch.randint(2, (views, 1, d), generator=generator) * 2 - 1
    rows = torch.stack([torch.randperm(order, generator=generator)[:dim] for _ in range(views)])
    parity = rows[:, :, None] & torch.arange(d)
    for shift in (32, 16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    return ((1 - 2 * (parity & 1)) * signs).float()


def _count_sketch(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """One entry ±1 a column, in a random row."""
    views, dim, d = shape
    rows = torch.randint(dim, (views, 1, d), generator=generator)
    signs = torch.randint(2, (views, 1, d), generator=generator) * 2.0 - 1
    return torch.zeros(shape).scatter_(1, rows, signs)


CONSTRUCTIONS = {"gaussian": _gaussian, "hadamard": _hadamard, "count_sketch": _count_sketch}


def _views(w: Tensor, basis: Tensor) -> Tensor:
    """Rows (sets, N, d) seen through every view (views, r, d) by one product, as (views, sets, N, r)."""
    views, dim, d = basis.shape
    seen = w @ basis.reshape(views * dim, d).mT
    return seen.unflatten(-1, (views, dim)).movedim(-2, 0)


def _pairs(w: Tensor) -> int:
    return max(w.shape[-2] * (w.shape[-2] - 1), 1)


def _require_whole(name: str, value: object, low: int) -> None:
    require(is_integer(value, low), name, f"an integer >= {low}", value)


def _require_shape(dim: int, views: int, every: int, d: int | None = None) -> None:
    _require_whole("dim", dim, 2)
    _require_whole("views", views, 1)
    _require_whole("every", every, 1)
    if d is not None:
        require(dim <= d, "dim", f"at most {d}, the length of the neurons", dim)


@dataclass(frozen=True)
class Random(Drawn):
    r"""Random views: g(ŵ) = Pŵ/‖Pŵ‖, the energies averaged over C bases P, or the largest taken   (thesis, 6.4, 6.5).

    `construction` is "gaussian", "hadamard" (subsampled randomised) or "count_sketch"; `aggregate` is "mean" or "max".

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
        """Refuse unknown names and empty shapes."""
        _require_shape(self.dim, self.views, self.every)
        accepted = f"one of {', '.join(map(repr, CONSTRUCTIONS))}"
        require(self.construction in CONSTRUCTIONS, "construction", accepted, self.construction)
        require(self.aggregate in ("mean", "max"), "aggregate", "'mean' or 'max'", self.aggregate)

    def basis(self, neurons: int, channels: int, taps: int, generator: torch.Generator) -> Tensor:
        """Draw the (views, dim, d) entries."""
        _require_shape(self.dim, self.views, self.every, channels * taps)
        return CONSTRUCTIONS[self.construction]((self.views, self.dim, channels * taps), generator)

    def __call__(self, w: Tensor, basis: Tensor) -> tuple[Tensor, ...]:
        """Return P w in every view."""
        return (_views(w, basis),)


@dataclass(frozen=True)
class AnglePreserving(Learned):
    r"""The basis that keeps angles best: P descends L = Σ_{i≠j}(cos θ(ŵᵢ,ŵⱼ) − cos θ(Pŵᵢ,Pŵⱼ))²   (thesis, 6.6, 6.7).

    L is the mean over pairs, so that `rate` does not depend on their number; `form` "angle" compares θ in place of
    cos θ. Unrolled, the energy is taken at P − η·∂L/∂P and differentiated through; alternating, P takes `updates` steps
    every `every` steps of the network.

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

    def __post_init__(self) -> None:
        """Refuse unknown names and empty shapes."""
        super().__post_init__()
        require(self.method in ("unrolled", "alternating"), "method", "'unrolled' or 'alternating'", self.method)
        require(self.form in ("cosine", "angle"), "form", "'cosine' or 'angle'", self.form)

    @property
    def unrolled(self) -> bool:  # type: ignore[override]
        """Whether the energy is differentiated through the step of P."""
        return self.method == "unrolled"

    def objective(self, w: Tensor, basis: Tensor) -> Tensor:
        """Return L, the mean over pairs, added up over sets and views."""
        unit = sphere.polar(w)[1]
        seen = sphere.polar(_views(unit, basis))[1]
        before, after = unit @ unit.mT, seen @ seen.mT
        if self.form == "angle":
            before, after = sphere.angle(before), sphere.angle(after)
        itself = torch.eye(w.shape[-2], dtype=torch.bool, device=w.device)
        return (after - before).masked_fill(itself, 0.0).square().sum() / _pairs(w)

    def slope(self, w: Tensor, basis: Tensor, potential: PairPotential) -> Tensor:
        """Return ∂L/∂P, differentiable; in the cosine form by products of N·d·r alone.

        Σⱼ(ĉᵢⱼ − cᵢⱼ)x̂ⱼ is X̂(X̂ᵀX̂) − Ŵ(ŴᵀX̂): no matrix of pairs.
        """
        if self.form == "angle":
            with torch.enable_grad():
                leaf = basis if basis.requires_grad else basis.detach().requires_grad_()
                return torch.autograd.grad(self.objective(w, leaf), leaf, create_graph=w.requires_grad)[0]
        length, w = _measured(w)
        seen_length, seen = sphere.polar(_views(w, basis))
        pull = seen @ (seen.mT @ seen) - w @ (w.mT @ (seen / length)) / length
        pull = (pull - (pull * seen).sum(-1, keepdim=True) * seen) / _nonzero(seen_length)
        return torch.einsum("vsnr,snd->vrd", pull, w) * (4 / _pairs(w))


def _measured(w: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of rows and the rows; where squares could overflow or vanish, their directions, whose norms are 1."""
    length = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    if _numerics.values_readable(w) and _numerics.squares_are_safe(length.detach()):
        return length, w
    return torch.ones_like(length), sphere.polar(w)[1]


def _nonzero(length: Tensor) -> Tensor:
    """Lengths to divide by: a row that the basis sees as zero has no direction, and no pull either."""
    return length.masked_fill(length == 0, 1.0)


@dataclass(frozen=True)
class Adversarial(Learned):
    r"""The basis in which neurons look worst: P ascends the energy that W descends   (thesis, 6.8).

    >>> p = Adversarial(dim=3)
    >>> p(torch.randn(1, 7, 9), p.basis(7, 9, 1, torch.Generator()))[0].shape
    torch.Size([1, 1, 7, 3])
    """

    dim: int = 30
    views: int = 1
    rate: float = 1.0
    updates: int = 1
    every: int = 1

    def slope(self, w: Tensor, basis: Tensor, potential: PairPotential) -> Tensor:
        """Return −∂Ē/∂P of the mean energy."""
        with torch.enable_grad():
            leaf = basis.detach().requires_grad_()
            energy = mutual_repulsion(_views(w.detach(), leaf), potential).sum() / _pairs(w)
            return -torch.autograd.grad(energy, leaf)[0]


@dataclass(frozen=True)
class Group(Drawn):
    r"""Some channels at a time: P_c keeps `channels` of them, the energies of the groups are averaged   (thesis, 6.9).

    Groups are consecutive, or drawn anew every `every` steps; if they do not divide the channels, the last is smaller,
    or, where it would have one number, joins the group before. A group of one number has no direction to speak of.

    >>> p = Group(channels=4)
    >>> p(torch.randn(1, 7, 12), p.basis(7, 12, 1, torch.Generator()))[0].shape
    torch.Size([3, 1, 7, 4])
    """

    channels: int = 8
    random: bool = False
    every: int = 1
    scope = "channels"

    def __post_init__(self) -> None:
        """Refuse empty groups."""
        _require_whole("channels", self.channels, 1)
        _require_whole("every", self.every, 1)

    def basis(self, neurons: int, channels: int, taps: int, generator: torch.Generator) -> Tensor:
        """Return which of d numbers are in each group, (groups, size); d stands for none."""
        order = torch.randperm(channels, generator=generator) if self.random else torch.arange(channels)
        places = order[:, None] * taps + torch.arange(taps)
        size = min(self.channels, channels)
        require(size * taps >= 2, "channels", "at least 2 where a channel has one number", self.channels)
        groups = list(places.split(size))
        if groups[-1].numel() < 2:
            groups[-2:] = [torch.cat(groups[-2:])]
        widest = max(len(group) for group in groups)
        none = channels * taps
        filled = [nn.functional.pad(group, (0, 0, 0, widest - len(group)), value=none) for group in groups]
        return torch.stack(filled).flatten(1)

    def __call__(self, w: Tensor, basis: Tensor) -> tuple[Tensor, ...]:
        """Return the numbers of each group; a place that stands for none is zero."""
        padded = torch.cat([w, w.new_zeros(*w.shape[:-1], 1)], -1)
        return (padded[..., basis].movedim(-2, 0),)


@dataclass(frozen=True)
class Bilateral(Drawn):
    r"""Shorter neurons and fewer neurons: the energies of P₁W and of WP₂ are added   (thesis, E.20 and E.21).

    >>> p = Bilateral(dim=3)
    >>> [y.shape[-2:] for y in p(torch.randn(1, 7, 9), p.basis(7, 9, 1, torch.Generator()))]
    [torch.Size([7, 3]), torch.Size([3, 9])]
    """

    dim: int = 30
    every: int = 1
    scope = "layer"

    def __post_init__(self) -> None:
        """Refuse empty shapes."""
        _require_shape(self.dim, 1, self.every)

    def fits(self, neurons: int, d: int) -> bool:
        """Whether there are enough rows, and long enough ones."""
        return self.dim <= min(neurons, d)

    def basis(self, neurons: int, channels: int, taps: int, generator: torch.Generator) -> Tensor:
        """Draw P₁ and P₂ side by side, (dim, d + N)."""
        _require_shape(self.dim, 1, self.every, min(neurons, channels * taps))
        return torch.randn(self.dim, channels * taps + neurons, generator=generator)

    def __call__(self, w: Tensor, basis: Tensor) -> tuple[Tensor, ...]:
        """Return P₁ w as rows and the `dim` mixtures P₂ of neurons."""
        left, right = basis.split([w.shape[-1], w.shape[-2]], -1)
        return (w @ left.mT).unsqueeze(0), (right @ w).unsqueeze(0)


PROJECTIONS: dict[str, type[Projection]] = {
    "random": Random,
    "angle_preserving": AnglePreserving,
    "adversarial": Adversarial,
    "group": Group,
    "bilateral": Bilateral,
}
