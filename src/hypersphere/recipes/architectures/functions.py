"""The functions behind SphereNets and decoupled networks: figures 3.2 and 4.3 of the thesis."""

from __future__ import annotations

import math
from typing import Any

import torch

from hypersphere.functions import angular, magnitude
from hypersphere.recipes.architectures import cifar
from hypersphere.recipes.recipe import Axis, Metric, Outcome, Recipe, Row
from hypersphere.training.components import NESTED, create
from hypersphere.training.config import Component

__all__ = ["MAGNITUDE_FUNCTIONS", "SPHERE_FUNCTIONS", "draw_angular", "draw_magnitude"]

_LARGEST_NORM = 3.0


def draw_angular(points: int, name: str, **options: Any) -> Outcome:
    """Evaluate an angular activation g at an odd number of evenly spaced angles from 0 to π, which include π/2."""
    function = create(Component(name, options), NESTED["angular"], setting="angular")
    values = angular.at_angle(function, torch.linspace(0, math.pi, points, dtype=torch.float64)).tolist()
    return Outcome(
        {"at_zero": values[0], "at_right_angle": values[points // 2], "at_pi": values[-1]}, {"response": values}
    )


def draw_magnitude(points: int, name: str) -> Outcome:
    """Evaluate a magnitude h with ρ = 1 and the constants of section 4.6 at evenly spaced patch norms."""
    function = magnitude.MAGNITUDES[name]()
    norms = torch.linspace(0, _LARGEST_NORM, points, dtype=torch.float64)
    values = function(torch.ones_like(norms), norms).tolist()
    return Outcome(
        {"at_one": values[round((points - 1) / _LARGEST_NORM)], "at_three": values[-1]}, {"magnitude": values}
    )


def _compute(seed: int, *, points: int, angular: Any = None, magnitude: str | None = None) -> Outcome:
    if magnitude is not None:
        return draw_magnitude(points, magnitude)
    return draw_angular(points, **({"name": angular} if isinstance(angular, str) else angular))


_SCALES: dict[str, dict[str, Any]] = {"paper": {}, "cpu": {}, "smoke": {"measure": {"points": 7}}}
_ANGLE = Axis("angle θ", 0.0, math.pi)
_AT_ANGLES = (
    Metric("at_zero", "g(0)", ".3f"),
    Metric("at_right_angle", "g(π/2)", ".3f"),
    Metric("at_pi", "g(π)", ".3f"),
)

SPHERE_FUNCTIONS = Recipe(
    name="spherenet-functions",
    title="Angular functions of the SphereConv operators",
    reference="figure 3.2 of the thesis",
    base={"measure": {"points": 181}},
    scales=_SCALES,
    rows=tuple(
        Row(name, {"measure": {"angular": cifar.ANGULARS[name]}}) for name in cifar.ANGULARS if name != "Square Cosine"
    ),
    metrics=_AT_ANGLES,
    covers=("F3.2",),
    cost={"paper": 0.001, "cpu": 0.001, "smoke": 0.001},
    compute=_compute,
    figures=("response",),
    axes={"response": _ANGLE},
    note="Nothing is trained. All five functions fall from 1 at θ = 0 to −1 at θ = π. The text of the source says that "
    "the linear operator has values in [0, 1]; its formula gives [−1, 1].",
)

MAGNITUDE_FUNCTIONS = Recipe(
    name="decoupled-functions",
    title="Magnitudes and angular activations of the decoupled operators",
    reference="figure 4.3 of the thesis",
    base={"measure": {"points": 181}},
    scales=_SCALES,
    rows=(
        *(Row(name, {"measure": {"magnitude": cifar.MAGNITUDES[name]}}) for name in cifar.MAGNITUDES),
        *(
            Row(f"g: {name.lower()}", {"measure": {"angular": cifar.ANGULARS[name]}})
            for name in ("Linear", "Cosine", "Sigmoid (0.3)", "Square Cosine")
        ),
    ),
    metrics=(Metric("at_one", "h(1)", ".3f"), Metric("at_three", "h(3)", ".3f"), *_AT_ANGLES),
    covers=("F4.3",),
    cost={"paper": 0.001, "cpu": 0.001, "smoke": 0.001},
    compute=_compute,
    figures=("magnitude", "response"),
    axes={"magnitude": Axis("patch norm ‖x‖", 0.0, _LARGEST_NORM), "response": _ANGLE},
    note="Nothing is trained. ρ = 1, α = 1, β = 0.5 for SegConv and 1 for MixConv, as in the source. The k of the "
    "sigmoid in the figure is not printed; 0.3 is drawn.",
)
