r"""Landscapes: what is measured around the trained parameters θ*, on a plane through them.

    f(a, b) = L(θ* + aδ + bη)

δ and η are random, and each of their filters is as long as the filter of θ* that it moves, so that models of different
weights can be compared.

Reference:
    Li et al., Visualizing the Loss Landscape of Neural Nets, NeurIPS 2018; OPT, appendices E and F.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, is_number, require

__all__ = ["Landscape", "landscape"]

Number: TypeAlias = float | Tensor
Measure: TypeAlias = Callable[[], Mapping[str, Number] | Number]
DRAWS: dict[str, Callable[..., Tensor]] = {"normal": torch.randn, "uniform": torch.rand}


@dataclass(frozen=True, eq=False, repr=False)
class Landscape:
    """Values on a square grid around the trained parameters.

    Attributes:
        a, b: (P,) float64, the coordinates along the first and the second direction.
        values: (P, P) float64 by name; entry [i, j] belongs to a[i] and b[j].
        centre: the values of the parameters as they are, by name.
    """

    a: Tensor
    b: Tensor
    values: dict[str, Tensor]
    centre: dict[str, float]

    def __repr__(self) -> str:
        parts = [
            f"{n} {self.centre[n]:.4g}, {float(v.min()):.4g} to {float(v.max()):.4g}" for n, v in self.values.items()
        ]
        return f"Landscape({len(self.a)}×{len(self.b)} points to ±{float(self.a[-1]):g}: {'; '.join(parts)})"


def landscape(
    model: nn.Module | Iterable[nn.Module],
    measure: Measure,
    *,
    span: float = 1.0,
    points: int = 21,
    directions: str = "normal",
    normalize: str | None = "filter",
    generator: torch.Generator | None = None,
    only: Callable[[str, nn.Parameter], bool] | None = None,
) -> Landscape:
    r"""Measure a model on a plane of two random directions through its trained parameters.

    A filter is a row: all numbers of one output. Parameters without rows (biases, those of normalisations) stay where
    they are, and so do filters of zeros. A rotated layer is moved by its free parameters, row by row; where these are
    the numbers of a skew matrix S, which is zero at R = I, the direction is as long as R itself, ‖S‖_F = √d. Any module
    can say so of its own parameters by a method `direction_norms`, a mapping of their names to row norms (…, 1).

    Args:
        model: one module or several, such as a network and its head. Their trained parameters (`requires_grad`) are
            moved in place and put back bit for bit, and all buffers after every point, also if `measure` raises.
        measure: called without arguments at every point; returns numbers by name, such as {"loss": …, "error": …}, or
            one number, then called "value". It decides on data, on `eval()`, on gradients.
        span: the largest coordinate; the grid goes from −span to span in both directions.
        points: P, along each direction; with an odd number the centre is on the grid.
        directions: "normal", or "uniform" on [0, 1].
        normalize: "filter", "layer" (one length for each parameter), or None for directions as they are drawn.
        generator: where the directions are drawn from; the global seed if None.
        only: which of the trained parameters are moved, by name and parameter; all if None.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(layer.weight, 2.0)
        >>> landscape(layer, lambda: layer.weight.item() ** 2, points=3, directions="uniform").values["value"]
        tensor([[ 4.,  0.,  4.],
                [ 0.,  4., 16.],
                [ 4., 16., 36.]], dtype=torch.float64)
    """
    require(is_number(span, 0) and span > 0, "span", "a positive number", span)
    require(is_integer(points, 2), "points", "a whole number >= 2", points)
    require(directions in DRAWS, "directions", "one of " + ", ".join(map(repr, DRAWS)), directions)
    require(normalize in ("filter", "layer", None), "normalize", "'filter', 'layer' or None", normalize)
    require(callable(measure), "measure", "a callable without arguments", measure)
    require(only is None or callable(only), "only", "None or a callable of name and parameter", only)
    root = model if isinstance(model, nn.Module) else _together(model)
    moved = _moved(root, only)
    require(bool(moved), "model", "a module with trained parameters that have rows (and that `only` selects)", "none")
    plane = [_directions(moved, DRAWS[directions], normalize, generator) for _ in range(2)]
    kept = [(p, p.detach().clone()) for p, _ in moved]
    buffers = [(buffer, buffer.clone()) for buffer in root.buffers()]

    def at(a: float, b: float) -> dict[str, float]:
        with torch.no_grad():
            for (p, start), first, second in zip(kept, *plane, strict=True):
                p.copy_(_numerics.narrow(_numerics.widen(start) + a * first + b * second, p.dtype))
        return _measured(measure, buffers)

    axis = torch.arange(1 - points, points, 2, dtype=torch.float64) * (span / (points - 1))  # exactly 0 in the middle
    try:
        centre = _measured(measure, buffers)
        table = [at(a, b) if a or b else centre for a in axis.tolist() for b in axis.tolist()]
    finally:
        with torch.no_grad():
            for p, start in kept:
                p.copy_(start)
    same = all(point.keys() == centre.keys() for point in table)
    require(same, "measure", f"a function that returns the same names at every point, {list(centre)}", "other names")
    values = {n: torch.tensor([point[n] for point in table], dtype=torch.float64).view(points, points) for n in centre}
    return Landscape(axis, axis.clone(), values, centre)


def _together(models: object) -> nn.ModuleList:
    """Several modules as one."""
    modules = list(models) if isinstance(models, Iterable) else []
    fits = bool(modules) and all(isinstance(one, nn.Module) for one in modules)
    require(fits, "model", "a module or several", type(models).__name__)
    return nn.ModuleList(modules)


def _moved(root: nn.Module, only: Callable[[str, nn.Parameter], bool] | None) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters that are moved, each with the norms (…, 1) of its rows."""
    told: dict[int, Tensor] = {}
    for module in root.modules():
        say = getattr(module, "direction_norms", None)
        if callable(say):
            told |= {id(module.get_parameter(name)): norms for name, norms in say().items()}
    found = []
    for name, p in root.named_parameters():
        if p.requires_grad and p.numel() and (p.ndim >= 2 or id(p) in told) and (only is None or only(name, p)):
            norms = told[id(p)] if id(p) in told else sphere.polar(p.detach().flatten(1))[0]
            found.append((p, _numerics.widen(norms)))
    return found


def _directions(
    moved: list[tuple[nn.Parameter, Tensor]],
    draw: Callable[..., Tensor],
    normalize: str | None,
    generator: torch.Generator | None,
) -> list[Tensor]:
    """One direction for each parameter, of its shape, in float32 or wider."""
    found = []
    for p, norms in moved:
        drawn = draw(p.shape, generator=generator, device=None if generator is None else generator.device).to(norms)
        if normalize == "filter":
            drawn = sphere.polar(drawn.view(*norms.shape[:-1], -1))[1] * norms
        elif normalize == "layer":
            drawn = sphere.polar(drawn.flatten())[1] * sphere.norm(norms.flatten())
        found.append(drawn.view(p.shape))
    return found


@torch.no_grad()
def _restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    """Undo what a measure left in the buffers, such as running means of a model in training mode."""
    for buffer, before in buffers:
        if not torch.equal(buffer, before):  # one that is a broadcast view cannot be written, nor has it been
            buffer.copy_(before)


def _measured(measure: Measure, buffers: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """The numbers at this point, by name."""
    try:
        result = measure()
    finally:
        _restore(buffers)
    named = result if isinstance(result, Mapping) else {"value": result}
    single = all(v.numel() == 1 if isinstance(v, Tensor) else hasattr(v, "__float__") for v in named.values())
    require(single, "measure", "a function that returns one number or a mapping of names to numbers", result)
    return {n: float(v.item() if isinstance(v, Tensor) else v) for n, v in named.items()}
