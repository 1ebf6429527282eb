"""The operators of the thesis by name: `DecoupledConv2d` with its magnitude chosen, all other arguments the same.

>>> ball_conv2d(3, 8, 3, angular="linear").magnitude
Ball(alpha=1.0, radius=1.0)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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

sphere_conv2d = partial(DecoupledConv2d, magnitude="sphere")
ball_conv2d = partial(DecoupledConv2d, magnitude="ball")
tanh_conv2d = partial(DecoupledConv2d, magnitude="tanh")
linear_conv2d = partial(DecoupledConv2d, magnitude="linear")
seg_conv2d = partial(DecoupledConv2d, magnitude="seg")
log_conv2d = partial(DecoupledConv2d, magnitude="log")
mix_conv2d = partial(DecoupledConv2d, magnitude="mix")

PRESETS: dict[str, Callable[..., DecoupledConv2d]] = {
    "sphere_conv2d": sphere_conv2d,
    "ball_conv2d": ball_conv2d,
    "tanh_conv2d": tanh_conv2d,
    "linear_conv2d": linear_conv2d,
    "seg_conv2d": seg_conv2d,
    "log_conv2d": log_conv2d,
    "mix_conv2d": mix_conv2d,
}
