r"""Loss landscapes: a measurement of a model, such as its loss, on a plane through its trained parameters θ*.

    f(a, b) = L(θ* + aδ + bη)

The directions δ and η are random. By default each of their filters has the norm of the corresponding filter of θ*, so
that models with different weight scales can be compared.

Reference:
    Li et al., Visualizing the Loss Landscape of Neural Nets, NeurIPS 2018; OPT, appendices E and F.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
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
        a, b: float64, the coordinates along the first and the second direction.
        values: float64 by name. Entry [i, j] belongs to a[i] and b[j].
        centre: the values at the trained parameters, by name.
    """

    a: Float[Tensor, " points"]
    b: Float[Tensor, " points"]
    values: dict[str, Float[Tensor, "points points"]]
    centre: dict[str, float]

    def __repr__(self) -> str:
        parts = [
            f"{name} {self.centre[name]:.4g}, {float(grid.min()):.4g} to {float(grid.max()):.4g}"
            for name, grid in self.values.items()
        ]
        return f"Landscape({len(self.a)}×{len(self.b)} points to ±{float(self.a[-1]):g}: {'; '.join(parts)})"


@dataclass(frozen=True, eq=False)
class _MovedParameter:
    """A parameter that the landscape moves, its trained value, and the row norms (…, 1) that directions should have."""

    parameter: nn.Parameter
    trained: Tensor
    row_norms: Tensor


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
    r"""Measure a model on a plane spanned by two random directions through its trained parameters.

    A filter is a row: all weights of one output. One-dimensional parameters (biases, parameters of normalisation
    layers) and filters of zeros do not move. In a rotated layer the free parameters of the rotation move, row by row.
    If these are the entries of a skew-symmetric matrix S, which is zero for R = I, its direction gets the norm of R,
    √d, instead of that of S. Any module can set the norms for its parameters with a method `direction_norms` that
    returns row norms (…, 1) by parameter name.

    Args:
        model: one module or several, such as a network and its head. Parameters with `requires_grad` are moved in place
            and restored exactly, and all buffers are restored after every point, also if `measure` raises.
        measure: called without arguments at every point. It returns numbers by name, such as
            {"loss": …, "error": …}, or one number, which is then named "value". It provides the data, and it should
            switch the model to evaluation mode and disable gradients.
        span: the largest coordinate. The grid extends from −span to span in both directions.
        points: P, the number of points along each direction. With an odd number the centre is on the grid.
        directions: "normal", or "uniform" on [0, 1].
        normalize: "filter", "layer" (one norm per parameter), or None to use directions as they are drawn.
        generator: source of randomness for the directions; the global one if None.
        only: a function of name and parameter that returns True for parameters to move; None moves all.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(layer.weight, 2.0)
        >>> landscape(layer, lambda: layer.weight.item() ** 2, points=3, directions="uniform").values["value"]
        tensor([[ 4.,  0.,  4.],
                [ 0.,  4., 16.],
                [ 4., 16., 36.]], dtype=torch.float64)
    """
    require(is_number(span, 0) and span > 0, "span", "a positive number", span)
    require(is_integer(points, 2), "points", "an integer >= 2", points)
    require(directions in DRAWS, "directions", "one of " + ", ".join(map(repr, DRAWS)), directions)
    require(normalize in ("filter", "layer", None), "normalize", "'filter', 'layer' or None", normalize)
    require(callable(measure), "measure", "a callable without arguments", measure)
    require(only is None or callable(only), "only", "None or a callable of name and parameter", only)
    root = model if isinstance(model, nn.Module) else _as_one_module(model)
    moved = _moved_parameters(root, only)
    if not moved:
        raise ValueError(
            "model must have a trainable parameter of two or more dimensions that `only` selects, but has none"
        )
    delta, eta = (_draw_direction(moved, DRAWS[directions], normalize, generator) for _ in range(2))
    buffers = [(buffer, buffer.clone()) for buffer in root.buffers()]

    def values_at(a: float, b: float) -> dict[str, float]:
        with torch.no_grad():
            for entry, along_delta, along_eta in zip(moved, delta, eta, strict=True):
                # Start from the trained values at every point, so that rounding errors do not accumulate.
                point = _numerics.widen(entry.trained) + a * along_delta + b * along_eta
                entry.parameter.copy_(_numerics.narrow(point, entry.parameter.dtype))
        return _measure_once(measure, buffers)

    # Scaled integers are symmetric about zero, and an odd grid has exactly 0 in the middle. linspace ensures neither.
    axis = torch.arange(1 - points, points, 2, dtype=torch.float64) * (span / (points - 1))
    try:
        centre = _measure_once(measure, buffers)
        grid = [values_at(a, b) if a or b else centre for a in axis.tolist() for b in axis.tolist()]
    finally:
        # Copy back instead of subtracting the offset, so that the parameters are restored to the last bit.
        with torch.no_grad():
            for entry in moved:
                entry.parameter.copy_(entry.trained)
    for point in grid:
        if point.keys() != centre.keys():
            raise ValueError(f"measure must return the same names at every point, not {list(centre)} and {list(point)}")
    values = {
        name: torch.tensor([point[name] for point in grid], dtype=torch.float64).view(points, points) for name in centre
    }
    return Landscape(axis, axis.clone(), values, centre)


def _as_one_module(models: object) -> nn.ModuleList:
    """Return a `ModuleList` of several modules. Parameters that they share are then listed once."""
    modules = list(models) if isinstance(models, Iterable) else []
    are_modules = bool(modules) and all(isinstance(module, nn.Module) for module in modules)
    require(are_modules, "model", "a module or several modules", type(models).__name__)
    return nn.ModuleList(modules)


def _moved_parameters(root: nn.Module, only: Callable[[str, nn.Parameter], bool] | None) -> list[_MovedParameter]:
    # Norms from `direction_norms` methods, by the identity of the parameter.
    custom_norms: dict[int, Tensor] = {}
    for module in root.modules():
        direction_norms = getattr(module, "direction_norms", None)
        if callable(direction_norms):
            custom_norms |= {id(module.get_parameter(name)): norms for name, norms in direction_norms().items()}
    moved = []
    for name, parameter in root.named_parameters():
        # Biases and parameters of normalisation layers have one dimension and do not move.
        has_rows = parameter.numel() > 0 and (parameter.ndim >= 2 or id(parameter) in custom_norms)
        if parameter.requires_grad and has_rows and (only is None or only(name, parameter)):
            trained = parameter.detach().clone()
            has_custom_norms = id(parameter) in custom_norms
            norms = custom_norms[id(parameter)] if has_custom_norms else sphere.polar(trained.flatten(1))[0]
            moved.append(_MovedParameter(parameter, trained, _numerics.widen(norms)))
    return moved


def _draw_direction(
    moved: list[_MovedParameter],
    draw: Callable[..., Tensor],
    normalize: str | None,
    generator: torch.Generator | None,
) -> list[Tensor]:
    """Return one random tensor per moved parameter, of the same shape, in float32 or wider."""
    device = None if generator is None else generator.device
    direction = []
    for entry in moved:
        shape, norms = entry.parameter.shape, entry.row_norms
        # Draw on the generator's device, so that a seed gives the same directions for models on any device.
        part = draw(shape, generator=generator, device=device).to(norms)
        if normalize == "filter":
            part = sphere.polar(part.view(*norms.shape[:-1], -1))[1] * norms
        elif normalize == "layer":
            # The norm of a parameter is the norm of its row norms.
            part = sphere.polar(part.flatten())[1] * sphere.norm(norms.flatten())
        direction.append(part.view(shape))
    return direction


def _measure_once(measure: Measure, buffers: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the measured numbers by name, and restore the buffers."""
    try:
        result = measure()
    finally:
        with torch.no_grad():
            for buffer, before in buffers:  # such as running means, if `measure` runs in training mode
                if not torch.equal(buffer, before):  # an expanded buffer cannot be written, but has not changed either
                    buffer.copy_(before)
    by_name = result if isinstance(result, Mapping) else {"value": result}
    are_numbers = all(v.numel() == 1 if isinstance(v, Tensor) else hasattr(v, "__float__") for v in by_name.values())
    require(are_numbers, "measure", "a function that returns one number or a mapping of names to numbers", result)
    return {name: float(v.item() if isinstance(v, Tensor) else v) for name, v in by_name.items()}
