r"""Minimum-energy configurations on the sphere: the problems of Thomson (s = 1), Whyte (s = 0) and Tammes (s = ∞)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, is_number, require

__all__ = ["Minimum", "minimize", "simplex"]

# (Σ z^−s)^(1/s) exceeds 1/min z by a factor of at most pairs^(1/s), which is below 1.001 at this power.
_NEARLY_INFINITE = 2.0**15


class Minimum(NamedTuple):
    """The best configuration: points as rows of a (n, d) matrix in float64, and their energy."""

    points: Float[Tensor, "n d"]
    energy: float


def minimize(
    n: int,
    d: int,
    *,
    power: float = 1,
    half_space: bool = False,
    restarts: int | None = None,
    iterations: int = 1000,
    generator: torch.Generator | None = None,
) -> Minimum:
    r"""Spread `n` points over the unit sphere of R^d: minimise Σ_{i<j} f_s(‖xᵢ − xⱼ‖).

    All restarts descend together by L-BFGS in float64. Large powers are approached through smaller ones. Known minima
    are constructed: the regular simplex for n ≤ d + 1, and an orthonormal set for n ≤ d in half space.

    Args:
        n: the number of points, at least 2 (1 in half space).
        d: the number of coordinates.
        power: s ≥ 0, 0 for the logarithm, `math.inf` to maximise the smallest distance.
        half_space: add −xᵢ for every xᵢ: 2n points, of which n are returned.
        restarts: the number of random starts; None for 32, and 128 for s = ∞, which has more local minima.
        iterations: the largest number of L-BFGS iterations, a tenth of it for powers above 64.
        generator: the generator of the starts; the global one if None.

    Returns:
        Points and energy. The energy is a sum over unordered pairs, as in published tables (half of
        `hyperspherical_energy` with `reduction="sum"`), and infinite if float64 cannot represent it. For s = ∞ it is
        1 / smallest distance, the limit of E^(1/s).

    Example:
        >>> round(minimize(12, 3).energy, 6)  # the icosahedron
        49.165253

    Reference:
        Thomson, On the Structure of the Atom, 1904; Saff and Kuijlaars, Distributing Many Points on a Sphere, 1997.
    """
    _check_arguments(n, d, power, half_space, restarts, iterations)
    restarts = (128 if power == math.inf else 32) if restarts is None else restarts
    # All distances are equal in a simplex, which minimises every convex decreasing function of the squared distance.
    # In half space xᵢ and −xᵢ are both present, and right angles to all others are the best possible.
    if n <= (d if half_space else d + 1):
        points = torch.eye(n, d, dtype=torch.float64) if half_space else simplex(n, d)
        return Minimum(points, float(_energies(points[None], power, half_space)[0]))
    x = sphere.normalize(torch.randn(restarts, n, d, dtype=torch.float64, generator=generator))
    # Large powers are stiff: only the smallest distances matter. Each stage starts close to its minimum and needs few
    # iterations.
    for s in _continuation(power):
        potential = partial(_potential, power=s, half_space=half_space)
        x = _descend(x, potential, iterations if s <= 64 else max(1, iterations // 10))
    if power == math.inf:
        # At a finite power the smallest distances are only nearly equal. Newton steps make them equal. They are costly,
        # so only the best restarts take them.
        best_starts = _potential(x, power, half_space).argsort()[:8]
        x = torch.stack([_equalize(points, half_space) for points in x[best_starts]])
    best = x[int(_potential(x, power, half_space).argmin())]
    return Minimum(best, float(_energies(best[None], power, half_space)[0]))


def _check_arguments(n: int, d: int, power: float, half_space: bool, restarts: int | None, iterations: int) -> None:
    """Raise a `ValueError` that names an invalid argument of `minimize`."""
    require(isinstance(half_space, bool), "half_space", "a bool", half_space)
    for name, value in (("n", n), ("d", d)):
        require(is_integer(value, -math.inf), name, "an integer", value)
    require(n >= (1 if half_space else 2), "n", "at least 2 (1 in half space)", n)
    on_line = n <= (1 if half_space else 2)
    require(d >= 2 or (d == 1 and on_line), "d", "at least 2 (1 for two points, or one in half space)", d)
    is_infinite = isinstance(power, float) and power == math.inf
    require(is_infinite or is_number(power, 0), "power", "a number >= 0 or math.inf", power)
    require(restarts is None or is_integer(restarts, 1), "restarts", "None or an integer >= 1", restarts)
    require(is_integer(iterations, 1), "iterations", "an integer >= 1", iterations)


def simplex(n: int, d: int) -> Tensor:
    """Return n ≤ d + 1 unit vectors in R^d whose cosines are all −1/(n−1), in float64."""
    # Rows of the Helmert matrix without its constant row are an orthonormal basis of the space orthogonal to
    # (1, …, 1). The columns, projections of the n unit vectors, form a simplex.
    k = torch.arange(1, n, dtype=torch.float64)
    basis = torch.ones(n - 1, n, dtype=torch.float64).tril()
    basis[torch.arange(n - 1), torch.arange(1, n)] = -k
    points = torch.zeros(n, d, dtype=torch.float64)
    points[:, : n - 1] = (basis / (k * (k + 1)).sqrt().unsqueeze(1)).mT
    return sphere.normalize(points)


def _continuation(power: float) -> list[float]:
    """Return the powers to descend at in turn: each is eight times the last one, up to the given power."""
    powers, last = [min(power, 64.0)], min(power, _NEARLY_INFINITE)
    while powers[-1] < last:
        powers.append(min(8 * powers[-1], last))
    return powers


def _log_squares(x: Tensor, half_space: bool) -> Tensor:
    """Return log‖xᵢ − xⱼ‖² of unordered pairs as (restarts, pairs); half space appends log‖xᵢ + xⱼ‖²."""
    i, j = torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device)
    c = (x @ x.mT)[:, i, j]
    u = 2 - 2 * (torch.cat([c, -c], 1) if half_space else c)
    # Rounding can make u of coincident points zero or negative.
    return u.clamp_min(_numerics.distance_floor() ** 2).log()


def _potential(x: Tensor, power: float, half_space: bool) -> Tensor:
    """Return an objective with the same minima as the energy, which cannot overflow: log(Σ z^−s)/s, or its limits.

    For s = 0 it is Σ log(1/z). For s = ∞, and for powers that are nearly infinite, it is log(1/min z).
    """
    # The line search leaves the sphere. Normalising here makes the gradient tangential.
    x = x / x.norm(dim=-1, keepdim=True)
    logs = _log_squares(x, half_space)
    if power == 0:
        return -0.5 * logs.sum(1)
    if power > _NEARLY_INFINITE:
        return -0.5 * logs.amin(1)
    return torch.logsumexp(-0.5 * power * logs, 1) / power


def _energies(x: Tensor, power: float, half_space: bool) -> Tensor:
    """Return the energy of each configuration (restarts, n, d)."""
    logs = _log_squares(x, half_space)
    if power == math.inf:
        # One point in half space has no pair except with its opposite, at the squared distance 4.
        smallest = logs.amin(1) if logs.shape[1] else logs.new_full((len(x),), math.log(4.0))
        return (-0.5 * smallest).exp()
    values = -0.5 * logs if power == 0 else (-0.5 * power * logs).exp()
    if not half_space:
        return values.sum(1)
    # ±xᵢ and ±xⱼ form four pairs, two at each of their distances. The other n pairs are opposites, at distance 2.
    opposite = -math.log(2.0) if power == 0 else 2.0**-power
    return 2 * values.sum(1) + x.shape[1] * opposite


def _descend(x: Tensor, potential: Callable[[Tensor], Tensor], iterations: int, memory: int = 12) -> Tensor:
    """Minimise each configuration by L-BFGS on the sphere, all of them in parallel."""

    def value_and_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = potential(leaf)
            (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), gradient

    value, gradient = value_and_gradient(x)
    # The last changes of x and of the gradient, and 1/(their product), or 0 where the curvature is not positive.
    history: list[tuple[Tensor, Tensor, Tensor]] = []
    iterations_without_gain = 0
    for _ in range(iterations):
        direction = _lbfgs_direction(gradient, history)
        # The model of the curvature can fail. Restarts whose direction does not descend use the gradient instead.
        direction = torch.where(_dot(direction, gradient) > 0, direction, gradient)
        new_x = _line_search(x, direction, potential, value, _dot(direction, gradient))
        new_value, new_gradient = value_and_gradient(new_x)
        change, gradient_change = new_x - x, new_gradient - gradient
        product = _dot(change, gradient_change)
        inverse = torch.where(product > 0, 1 / torch.where(product > 0, product, 1.0), 0.0)
        history = [*history[-memory + 1 :], (change, gradient_change, inverse)]
        # Stop when no restart has improved for three iterations: one of them alone may be a failed line search.
        gain = (value - new_value).max()
        x, value, gradient = new_x, new_value, new_gradient
        has_gain = gain > _numerics.machine_epsilon(value.dtype) * value.abs().max()
        iterations_without_gain = 0 if has_gain else iterations_without_gain + 1
        if iterations_without_gain >= 3:
            break
    return x


def _line_search(
    x: Tensor, direction: Tensor, potential: Callable[[Tensor], Tensor], value: Tensor, descent: Tensor
) -> Tensor:
    """Return x − step·direction on the sphere, where each restart halves its step until the Armijo condition holds.

    Args:
        x: the configurations.
        direction: where −direction descends.
        potential: the objective.
        value: the objective at x.
        descent: the inner product of direction and gradient.
    """
    step = torch.ones_like(descent)
    for _ in range(30):
        trial = x - step * direction
        # Negated, so that a NaN fails.
        fails = ~(potential(trial) <= value - 1e-4 * (step * descent).flatten())
        if not fails.any():
            break
        step = torch.where(fails[:, None, None], step / 2, step)
    # Restarts that still fail stay where they are; the others continue.
    return sphere.normalize(torch.where(fails[:, None, None], x, trial))


def _lbfgs_direction(gradient: Tensor, history: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Return the product of the inverse Hessian approximation with the gradient, by the two-loop recursion."""
    direction = gradient
    coefficients = []
    # First loop, from the newest change to the oldest: remove the components that the changes explain.
    for change, gradient_change, inverse in reversed(history):
        coefficient = inverse * _dot(change, direction)
        direction = direction - coefficient * gradient_change
        coefficients.append(coefficient)
    if history:
        # Scale by the curvature along the last change.
        change, gradient_change, _ = history[-1]
        squared = _dot(gradient_change, gradient_change)
        direction = direction * torch.where(squared > 0, _dot(change, gradient_change).abs() / squared, 1.0)
    else:
        # Nothing is known yet: take a first step of length 0.1.
        length = _dot(gradient, gradient).sqrt()
        direction = direction * torch.where(length > 0, 0.1 / length, 0.0)
    # Second loop, from the oldest change to the newest: add the curvature along each change.
    for (change, gradient_change, inverse), coefficient in zip(history, reversed(coefficients), strict=True):
        direction = direction + (coefficient - inverse * _dot(gradient_change, direction)) * change
    return direction


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of each configuration, with dimensions kept."""
    return (a * b).sum((-2, -1), keepdim=True)


def _equalize(x: Tensor, half_space: bool, tolerance: float = 4e-4, steps: int = 12) -> Tensor:
    """Make the smallest distances of a packing equal by Newton steps, and return the best iterate.

    The contacts are the pairs whose squared distance is within the relative `tolerance` of the smallest one. Each step
    solves the linearised equations ±xᵢ·xⱼ = t for all contacts, with moves tangential to the sphere and unknown t.
    """
    n, d = x.shape
    i, j, sign = _contacts(x, half_space, tolerance)
    contacts, points = torch.arange(len(i), device=x.device), torch.arange(n, device=x.device)
    best = current = x
    for _ in range(steps):
        # Unknowns: n·d coordinates of the move, and t.
        system = x.new_zeros(len(i) + n, n * d + 1)
        # One equation per contact, linear in the moves of both points.
        contact_rows = system[: len(i), :-1].view(len(i), n, d)
        contact_rows[contacts, i] = sign[:, None] * current[j]
        contact_rows[contacts, j] = sign[:, None] * current[i]
        system[: len(i), -1] = -1
        # One equation per point: its move is tangential.
        system[len(i) :, :-1].view(n, n, d)[points, points] = current
        target = torch.cat([-sign * (current[i] * current[j]).sum(1), x.new_zeros(n)])
        # More unknowns than equations, or dependent contacts: "gelsd" returns the shortest move of least error.
        move = torch.linalg.lstsq(system, target, driver="gelsd").solution[:-1].view(n, d)
        current = sphere.normalize(current + move)
        if _energies(current[None], math.inf, half_space) < _energies(best[None], math.inf, half_space):
            best = current
    return best


def _contacts(x: Tensor, half_space: bool, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs i < j of points at the smallest distance, and the signs for which ±xᵢ·xⱼ is largest."""
    c = x @ x.mT
    # In half space the nearer of xⱼ and −xⱼ counts, so all cosines become positive.
    signs = c.sign() if half_space else torch.ones_like(c)
    c = (signs * c).masked_fill(torch.ones_like(c).tril() > 0, -math.inf)
    smallest_square = 2 - 2 * float(c.max())
    i, j = (2 - 2 * c <= smallest_square * (1 + 2 * tolerance)).nonzero(as_tuple=True)
    return i, j, signs[i, j]
