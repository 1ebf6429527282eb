r"""Points of least energy on the sphere: the problems of Thomson (s = 1), Whyte (s = 0) and Tammes (s = ∞)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, is_number, require

__all__ = ["Minimum", "minimize"]


class Minimum(NamedTuple):
    """The best points found, rows of a (n, d) matrix in float64, and their energy."""

    points: Tensor
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

    All restarts descend together, by L-BFGS in float64. Large powers are reached through smaller ones. What is known is
    not searched for: the regular simplex for n ≤ d+1, and an orthonormal set for n ≤ d in half space.

    Args:
        n: how many points, at least 2 (1 in half space).
        d: of how many coordinates.
        power: s ≥ 0, 0 for the logarithm, `math.inf` for the largest least distance.
        half_space: count −xᵢ beside every xᵢ: 2n points, of which n are returned.
        restarts: how many random beginnings; None for 32, and 128 for s = ∞, which has more false minima.
        iterations: at most so many steps, a tenth of them at powers beyond 64.
        generator: where beginnings come from; the global seed if None.

    Returns:
        Points and energy over unordered pairs, as tables of such points give it (half of `hyperspherical_energy` with
        `reduction="sum"`); for s = ∞ one over the least distance, the limit of E^(1/s).

    Example:
        >>> round(minimize(12, 3).energy, 6)  # the icosahedron
        49.165253

    Reference:
        Thomson, On the Structure of the Atom, 1904; Saff and Kuijlaars, Distributing Many Points on a Sphere, 1997.
    """
    require(isinstance(half_space, bool), "half_space", "a bool", half_space)
    for name, value in (("n", n), ("d", d)):
        require(is_integer(value, -math.inf), name, "an integer", value)
    require(n >= (1 if half_space else 2), "n", "at least 2 (1 in half space)", n)
    on_line = n <= (1 if half_space else 2)
    require(d >= 2 or (d == 1 and on_line), "d", "at least 2 (1 for two points, or one in half space)", d)
    require(power == math.inf or is_number(power, 0), "power", "a number >= 0", power)
    restarts = (128 if power == math.inf else 32) if restarts is None else restarts
    for name, value in (("restarts", restarts), ("iterations", iterations)):
        require(is_integer(value, 1), name, "an integer >= 1", value)
    if n <= (d if half_space else d + 1):
        points = torch.eye(n, d, dtype=torch.float64) if half_space else _simplex(n, d)
        return Minimum(points, float(_energies(points[None], power, half_space)[0]))
    x = sphere.normalize(torch.randn(restarts, n, d, dtype=torch.float64, generator=generator))
    for s in _continuation(power):
        x = _descend(
            x, partial(_potential, power=s, half_space=half_space), iterations if s <= 64 else iterations // 10
        )
    if power == math.inf:
        widest = _energies(x, power, half_space).argsort()[:8]
        x = torch.stack([_polish(points, half_space) for points in x[widest]])
    energies = _energies(x, power, half_space)
    best = int(energies.argmin())
    return Minimum(x[best], float(energies[best]))


def _simplex(n: int, d: int) -> Tensor:
    """n unit vectors with all cosines −1/(n−1), in the first n − 1 coordinates."""
    centred = torch.eye(n, dtype=torch.float64) - 1 / n
    left, values, _ = torch.linalg.svd(centred)
    points = torch.zeros(n, d, dtype=torch.float64)
    points[:, : n - 1] = (left * values)[:, : n - 1]
    return sphere.normalize(points)


def _continuation(power: float) -> list[float]:
    """The powers to descend at, one after the other: eight times larger each, up to the one that is wanted."""
    steps, last = [min(power, 64.0)], min(power, 2.0**15)
    while steps[-1] < last:
        steps.append(min(8 * steps[-1], last))
    return steps


def _log_squares(x: Tensor, half_space: bool) -> Tensor:
    """log‖xᵢ ∓ xⱼ‖² of unordered pairs, (restarts, pairs)."""
    i, j = torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device)
    c = (x @ x.mT)[:, i, j]
    u = 2 - 2 * (torch.cat([c, -c], 1) if half_space else c)
    return u.clamp_min(_numerics.distance_floor() ** 2).log()


def _potential(x: Tensor, power: float, half_space: bool) -> Tensor:
    """What is descended, with the same minima: Σ log(1/z), or log(Σ z^−s)/s, which no power overflows."""
    x = x / x.norm(dim=-1, keepdim=True)
    logs = _log_squares(x, half_space)
    if power == 0:
        return -0.5 * logs.sum(1)
    return torch.logsumexp(-0.5 * power * logs, 1) / power


def _energies(x: Tensor, power: float, half_space: bool) -> Tensor:
    logs = _log_squares(x, half_space)
    if power == math.inf:
        least = logs.amin(1) if logs.shape[1] else logs.new_full((len(x),), math.log(4.0))
        return (-0.5 * least).exp()
    values = -0.5 * logs if power == 0 else (-0.5 * power * logs).exp()
    if not half_space:
        return values.sum(1)
    opposite = -math.log(2.0) if power == 0 else 2.0**-power
    return 2 * values.sum(1) + x.shape[1] * opposite


def _descend(x: Tensor, potential: Callable[[Tensor], Tensor], iterations: int, memory: int = 12) -> Tensor:
    """L-BFGS for every restart by itself, all at once; each step is halved until it descends."""

    def value_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = potential(leaf)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), slope

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum((-2, -1), keepdim=True)

    value, slope = value_and_slope(x)
    moves: list[tuple[Tensor, Tensor, Tensor]] = []
    resting = 0
    for _ in range(iterations):
        direction = slope
        kept = []
        for move, change, curvature in reversed(moves):
            share = curvature * dot(move, direction)
            direction = direction - share * change
            kept.append(share)
        if moves:
            move, change, _ = moves[-1]
            squared = dot(change, change)
            direction = direction * torch.where(squared > 0, dot(move, change).abs() / squared, 1.0)
        else:
            size = dot(slope, slope).sqrt()
            direction = direction * torch.where(size > 0, 0.1 / size, 0.0)
        for (move, change, curvature), share in zip(moves, reversed(kept), strict=True):
            direction = direction + (share - curvature * dot(change, direction)) * move
        descent = dot(direction, slope)
        direction = torch.where(descent > 0, direction, slope)
        descent = dot(direction, slope)
        step = torch.ones_like(descent)
        for _ in range(30):
            there = x - step * direction
            new_value, new_slope = value_and_slope(there)
            worse = ~(new_value <= value - 1e-4 * (step * descent).flatten())
            if not worse.any():
                break
            step = torch.where(worse[:, None, None], step / 2, step)
        stays = worse[:, None, None]
        there = sphere.normalize(torch.where(stays, x, there))
        new_value, new_slope = value_and_slope(there)
        move, change = there - x, new_slope - slope
        product = dot(move, change)
        usable = product > 0
        moves = [
            *moves[-memory + 1 :],
            (move, change, torch.where(usable, 1 / torch.where(usable, product, 1.0), 0.0)),
        ]
        gain = (value - new_value).max()
        x, value, slope = there, new_value, new_slope
        resting = resting + 1 if gain <= _numerics.machine_epsilon(value.dtype) * value.abs().max() else 0
        if resting >= 3:
            break
    return x


def _polish(x: Tensor, half_space: bool, within: float = 4e-4, steps: int = 12) -> Tensor:
    """Make the least distances of a packing equal to each other by Newton steps; keep what enlarges the least one."""
    n, d = x.shape
    c = x @ x.mT
    signs = c.sign() if half_space else torch.ones_like(c)
    c = (signs * c).triu(1).masked_fill(torch.ones_like(c).tril() > 0, -math.inf)
    closest = float(c.max())
    i, j = (2 - 2 * c <= (2 - 2 * closest) * (1 + 2 * within)).nonzero(as_tuple=True)
    sign, at = signs[i, j], torch.arange(len(i), device=x.device)
    best, now = x, x
    for _ in range(steps):
        system = x.new_zeros(len(i) + n, n * d + 1)
        pairs = system[: len(i), :-1].view(len(i), n, d)
        pairs[at, i] = sign[:, None] * now[j]
        pairs[at, j] = sign[:, None] * now[i]
        system[: len(i), -1] = -1
        rows = torch.arange(n, device=x.device)
        system[len(i) :, :-1].view(n, n, d)[rows, rows] = now  # moves stay tangential
        wanted = torch.cat([-sign * (now[i] * now[j]).sum(1), x.new_zeros(n)])
        move = torch.linalg.lstsq(system, wanted, driver="gelsd").solution[:-1].view(n, d)
        now = sphere.normalize(now + move)
        if _energies(now[None], math.inf, half_space) < _energies(best[None], math.inf, half_space):
            best = now
    return best
