"""The operators of the thesis, section 4.3, by name: each is a `DecoupledConv2d` with one magnitude of the menu.

The arguments are those of `DecoupledConv2d`. Pass `magnitude` to change the numbers of the magnitude, for example
`ball_conv2d(3, 16, 3, magnitude=Ball(radius=2.0))`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ParamSpec

from hypersphere.functions.magnitude import MAGNITUDES
from hypersphere.layers.decoupled import DecoupledConv2d

__all__ = [
    "PRESETS",
    "ball_conv2d",
    "linear_conv2d",
    "log_conv2d",
    "mix_conv2d",
    "seg_conv2d",
    "sphere_conv2d",
    "tanh_conv2d",
]

Arguments = ParamSpec("Arguments")


def _with_magnitude(
    layer: Callable[Arguments, DecoupledConv2d], magnitude: str
) -> Callable[Arguments, DecoupledConv2d]:
    """Return a function with the arguments of `layer` and another default magnitude."""

    def make(*arguments: Arguments.args, **options: Arguments.kwargs) -> DecoupledConv2d:
        options.setdefault("magnitude", magnitude)
        return layer(*arguments, **options)

    # Pickle finds the function by its name in this module; `help` and `inspect` show the signature of the layer.
    make.__name__ = make.__qualname__ = f"{magnitude}_conv2d"
    formula = (MAGNITUDES[magnitude].__doc__ or "").partition("\n")[0]
    make.__doc__ = f"Return a `DecoupledConv2d` with the magnitude {magnitude!r}. {formula}"
    make.__signature__ = inspect.signature(layer).replace(return_annotation=DecoupledConv2d)  # type: ignore[attr-defined]
    return make


sphere_conv2d = _with_magnitude(DecoupledConv2d, "sphere")
"""SphereConv, the bounded operator with constant magnitude: f = α·g(θ) (thesis, 4.4; Liu et al., NeurIPS 2017)."""

ball_conv2d = _with_magnitude(DecoupledConv2d, "ball")
"""BallConv: f = α·min(‖x‖, ρ)/ρ·g(θ), which grows up to the radius ρ (thesis, 4.5; Liu et al., CVPR 2018)."""

tanh_conv2d = _with_magnitude(DecoupledConv2d, "tanh")
"""TanhConv: f = α·tanh(‖x‖/ρ)·g(θ), a smooth BallConv (thesis, 4.6; Liu et al., CVPR 2018)."""

linear_conv2d = _with_magnitude(DecoupledConv2d, "linear")
"""LinearConv: f = α‖x‖·g(θ), unbounded (thesis, 4.7; Liu et al., CVPR 2018)."""

seg_conv2d = _with_magnitude(DecoupledConv2d, "seg")
"""SegConv: f = h·g(θ) with h piecewise linear in ‖x‖, of slope α up to ρ and β beyond (thesis, 4.8)."""

log_conv2d = _with_magnitude(DecoupledConv2d, "log")
"""LogConv: f = α·log(1 + ‖x‖)·g(θ), which grows slowly (thesis, 4.9; Liu et al., CVPR 2018)."""

mix_conv2d = _with_magnitude(DecoupledConv2d, "mix")
"""MixConv: f = (α‖x‖ + β·log(1 + ‖x‖))·g(θ), LinearConv plus LogConv (thesis, 4.10)."""

PRESETS: dict[str, Callable[..., DecoupledConv2d]] = {
    "sphere_conv2d": sphere_conv2d,
    "ball_conv2d": ball_conv2d,
    "tanh_conv2d": tanh_conv2d,
    "linear_conv2d": linear_conv2d,
    "seg_conv2d": seg_conv2d,
    "log_conv2d": log_conv2d,
    "mix_conv2d": mix_conv2d,
}
"""The presets by name."""
