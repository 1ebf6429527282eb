"""The operators of the thesis, section 4.3, by name: each is a `DecoupledConv2d` with one magnitude of the menu.

The arguments are those of `DecoupledConv2d`. Pass `magnitude` to change the numbers of the magnitude, for example
`ball_conv2d(3, 16, 3, magnitude=Ball(radius=2.0))`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hypersphere.layers.decoupled import ConvOptions, DecoupledConv2d

if TYPE_CHECKING:
    from typing_extensions import Unpack

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

Size = int | Sequence[int]


def sphere_conv2d(
    in_channels: int,
    out_channels: int,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    bias: bool = True,
    **options: Unpack[ConvOptions],
) -> DecoupledConv2d:
    """SphereConv, the bounded operator with constant magnitude: f = α·g(θ) (thesis, 4.4; Liu et al., NeurIPS 2017)."""
    shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
    return DecoupledConv2d(*shape, **(ConvOptions(magnitude="sphere") | options))


def ball_conv2d(
    in_channels: int,
    out_channels: int,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    bias: bool = True,
    **options: Unpack[ConvOptions],
) -> DecoupledConv2d:
    """BallConv: f = α·min(‖x‖, ρ)/ρ·g(θ), which grows up to the radius ρ (thesis, 4.5; Liu et al., CVPR 2018)."""
    shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
    return DecoupledConv2d(*shape, **(ConvOptions(magnitude="ball") | options))


def tanh_conv2d(
    in_channels: int,
    out_channels: int,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    bias: bool = True,
    **options: Unpack[ConvOptions],
) -> DecoupledConv2d:
    """TanhConv: f = α·tanh(‖x‖/ρ)·g(θ), a smooth BallConv (thesis, 4.6; Liu et al., CVPR 2018)."""
    shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
    return DecoupledConv2d(*shape, **(ConvOptions(magnitude="tanh") | options))


def linear_conv2d(
    in_channels: int,
    out_channels: int,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    bias: bool = True,
    **options: Unpack[ConvOptions],
) -> DecoupledConv2d:
    """LinearConv: f = α‖x‖·g(θ), unbounded (thesis, 4.7; Liu et al., CVPR 2018)."""
    shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
    return DecoupledConv2d(*shape, **(ConvOptions(magnitude="linear") | options))


def seg_conv2d(
    in_channels: int,
    out_channels: int,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    bias: bool = True,
    **options: Unpack[ConvOptions],
) -> DecoupledConv2d:
    """SegConv: f = h·g(θ) with h piecewise linear in ‖x‖, of slope α up to ρ and β beyond (thesis, 4.8)."""
    shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
    return DecoupledConv2d(*shape, **(ConvOptions(magnitude="seg") | options))


def log_conv2d(
    in_channels: int,
    out_channels: int,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    bias: bool = True,
    **options: Unpack[ConvOptions],
) -> DecoupledConv2d:
    """LogConv: f = α·log(1 + ‖x‖)·g(θ), which grows slowly (thesis, 4.9; Liu et al., CVPR 2018)."""
    shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
    return DecoupledConv2d(*shape, **(ConvOptions(magnitude="log") | options))


def mix_conv2d(
    in_channels: int,
    out_channels: int,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    bias: bool = True,
    **options: Unpack[ConvOptions],
) -> DecoupledConv2d:
    """MixConv: f = (α‖x‖ + β·log(1 + ‖x‖))·g(θ), LinearConv plus LogConv (thesis, 4.10)."""
    shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
    return DecoupledConv2d(*shape, **(ConvOptions(magnitude="mix") | options))


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
