r"""Decoupled layers: f(w, x) = h(‖w‖, ‖x‖)·g(θ(w, x)) in place of the inner product (thesis, 4.3).

Each is torch's layer of the same arguments, parameters and state dict (and more of both where k or a radius is learned:
load a plain checkpoint into such a layer with strict=False); only what a filter does to a patch differs.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere.functions.angular import ANGULARS, Angular, Cosine
from hypersphere.functions.magnitude import InnerProduct, Linear, LinearlyWeighted, Radial, Sphere
from hypersphere.layers.by_hand import opaque
from hypersphere.layers.direction import direction
from hypersphere.layers.learned import Learned
from hypersphere.layers.operation import operate
from hypersphere.layers.patches import patch_norms, plain_squares, sample_peak, squares
from hypersphere.layers.response import respond
from hypersphere.layers.walk import Walk

__all__ = ["DecoupledConv1d", "DecoupledConv2d", "DecoupledConv3d", "DecoupledLinear"]


class _Operator(Learned, abc.ABC):
    """The operator itself; the layers below say what an inner product is and how the input is gone over."""

    bias: Any

    @abc.abstractmethod
    def _inner_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ⟨w, x⟩ + b as the plain layer does."""

    @abc.abstractmethod
    def _walk(self, x: Tensor) -> tuple[Tensor, Walk]:
        """Return the input, padded if the walk cannot, and the walk over it."""

    def _operate(self, x: Tensor) -> Tensor:
        """Return f (N, filters, …) for a batch (N, channels, …)."""
        if not x.is_floating_point():
            raise ValueError(f"x must be of a floating type, not {x.dtype}")
        plain = isinstance(self.angular, Cosine)
        dtype = _product_type(x, self.weight)
        x = x.to(dtype)
        if plain and isinstance(self.magnitude, InnerProduct):
            return self._inner_product(x, self.weight.to(dtype), _cast(self.bias, dtype))
        if plain and isinstance(self.magnitude, Linear) and self.weighting == "linear":
            return self._inner_product(x, (self.weight * self.magnitude.alpha).to(dtype), _cast(self.bias, dtype))
        w_norm, w_hat = direction(self.weight)
        if plain and isinstance(self.magnitude, Linear):
            return self._inner_product(x, (w_hat * self.magnitude.alpha).to(dtype), _cast(self.bias, dtype))
        x, walk = self._walk(x)
        with _numerics.autocast_disabled(x):
            before = None
            if dtype == torch.float16:  # products of entries up to 1 do not overflow
                before = _numerics.unit_scale(sample_peak(x)).unsqueeze(1)
                x = (x * before.squeeze(1)).to(dtype)
            return self._respond(x, w_hat.to(dtype), w_norm, walk, before)

    def _respond(self, x: Tensor, w_hat: Tensor, w_norm: Tensor, walk: Walk, before: Tensor | None) -> Tensor:
        """Return f, given directions and norms of filters, and what `x` was multiplied by before it came here."""
        fused = self._is_radial and opaque(x)
        squared, scale = (squares if fused else plain_squares)(x, walk.groups)
        norm, reciprocal = patch_norms(walk.window_sum(squared), scale)
        x_norm = norm if before is None else norm / before
        w_norm = self._by_filter(w_norm, x_norm)
        magnitude, angular = self._current_magnitude(x_norm), self._current_angular(x_norm)
        linearly = isinstance(magnitude, LinearlyWeighted)
        if isinstance(magnitude, LinearlyWeighted):
            magnitude = magnitude.magnitude
        unit = isinstance(magnitude, Sphere) and magnitude.alpha == 1
        h = None if unit else magnitude(w_norm, x_norm)
        if fused:
            assert isinstance(angular, Angular)
            assert isinstance(magnitude, Radial)
            slope = magnitude.slope(x_norm).detach() if h is not None and x.requires_grad else None
            if before is not None and slope is not None:
                slope = slope / before
            y = operate(x, w_hat, walk, scale, reciprocal, h, slope, angular)
        else:
            y = respond(walk.product(x, w_hat), reciprocal, h, angular)
        if linearly:
            y = y * _by_channel(w_norm, y)
        if self.bias is None:
            return y
        return y.add_(_by_channel(self.bias, y)) if fused else y + _by_channel(self.bias, y)

    @property
    def _is_radial(self) -> bool:
        """Whether h is one number a patch, and g the library's: what the operator by hand takes."""
        k = getattr(self.angular, "k", None) if self.log_k is None else None
        radius = getattr(self.magnitude, "radius", None) if self.log_radius is None else self.log_radius
        single = all(not isinstance(number, Tensor) or number.ndim == 0 for number in (k, radius))
        known = isinstance(self.magnitude, Radial) and type(self.angular) in ANGULARS.values()
        return known and single and self.weighting in (None, "linear")


def _by_channel(value: Tensor, like: Tensor) -> Tensor:
    return value.to(like.dtype).reshape(-1, *[1] * (like.ndim - 2))


def _cast(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if value is None else value.to(dtype)


def _product_type(x: Tensor, weight: Tensor) -> torch.dtype:
    """The type of products: autocast's if that is on, which leaves float64 alone, or the wider of both."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(x.dtype, weight.dtype)


class _Convolution(_Operator):
    """What the convolutions share: torch's constructor, the walk over patches, batches of one."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: Any
    _reversed_padding_repeated_twice: list[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        magnitude: str | Callable[[Tensor, Tensor], Tensor] = "sphere",
        angular: str | Callable[[Tensor], Tensor] = "cosine",
        weighting: str | None = None,
        learn_k: str | nn.Parameter | None = None,
        learn_radius: str | None = None,
        momentum: float = 0.1,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device=device,
            dtype=dtype,
        )
        self._choose(magnitude, angular, weighting, learn_k, learn_radius, momentum)

    def _inner_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(x, weight, bias)  # type: ignore[operator]

    def _walk(self, x: Tensor) -> tuple[Tensor, Walk]:
        padding = self._reversed_padding_repeated_twice
        before = tuple(padding[-2::-2])
        if self.padding_mode != "zeros" or padding[::2] != padding[1::2]:
            x = F.pad(x, padding, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)
            before = (0,) * len(before)
        return x, Walk(self.kernel_size, self.stride, before, self.dilation, self.groups)

    def forward(self, x: Tensor) -> Tensor:
        """Return responses (N, filters, …) to `x` (N, channels, …), or without N for a single sample."""
        if x.ndim == self.weight.ndim - 1:
            return self._operate(x.unsqueeze(0)).squeeze(0)
        return self._operate(x)

    def extra_repr(self) -> str:
        """Show torch's arguments and ours."""
        return f"{super().extra_repr()}, {self._describe()}"


class DecoupledConv1d(_Convolution, nn.Conv1d):
    r"""A decoupled convolution over sequences (N, C, L); arguments as in `DecoupledConv2d`.

    >>> DecoupledConv1d(4, 8, 3)(torch.randn(2, 4, 10)).shape
    torch.Size([2, 8, 8])
    """


class DecoupledConv2d(_Convolution, nn.Conv2d):
    r"""A convolution whose filters respond by magnitude and angle (thesis, 4.3; SphereConv is 3.1).

        f(w, x) = h(‖w‖, ‖x‖)·g(θ(w, x)),   x a patch

    The first eight arguments, `padding_mode`, `device` and `dtype` are those of `torch.nn.Conv2d`, and so are the
    parameters; a bias is added to f. With `InnerProduct` and cosine this is `torch.nn.Conv2d`, exactly.

    Args:
        magnitude: h, a name of `hypersphere.magnitude`, an object or a callable of (‖w‖, ‖x‖).
        angular: g, a name of `hypersphere.angular`, an object or a callable of the cosine.
        weighting: how ‖w‖ enters: None (not at all), "linear", or for Tanh "joint" or "separate".
        learn_k: for a Sigmoid g: None, "layer", "filter", or the parameter of `shared_k` that layers share.
        learn_radius: for Ball, Tanh and Seg: None, "layer" or "filter"; ρ is then a learned factor that starts at the
            magnitude's radius, times a running mean of the patch norm.
        momentum: the share of a new batch in that running mean.

    A zero patch gives h·g(π/2), with zero gradient through its direction. Norms, and angles from the products of
    patches and filters, are computed in float32 or wider; the products themselves in the type of the input, so in half
    precision a cosine is as good as that type. Patches 10¹⁶ times shorter than the largest number of their sample
    count as zero, and where h has no bound gradients are finite for patches up to a norm of 10¹⁹ in float32. In eager
    mode a gradient of the gradient is not available; through `torch.func` it is.

    Example:
        >>> layer = DecoupledConv2d(3, 16, 3, padding=1, magnitude="tanh", learn_radius="layer")
        >>> layer(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 16, 8, 8])
    """


class DecoupledConv3d(_Convolution, nn.Conv3d):
    r"""A decoupled convolution over volumes (N, C, D, H, W); arguments as in `DecoupledConv2d`.

    >>> DecoupledConv3d(2, 4, 3, padding="same")(torch.randn(1, 2, 5, 5, 5)).shape
    torch.Size([1, 4, 5, 5, 5])
    """


class DecoupledLinear(_Operator, nn.Linear):
    r"""A fully connected decoupled layer: a row is a patch; further arguments as in `DecoupledConv2d`.

    >>> layer = DecoupledLinear(2, 1, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 0.0]]))
    >>> layer(torch.tensor([[5.0, 0.0], [0.0, 2.0]]))
    tensor([[1.],
            [0.]], grad_fn=...)
    """

    groups = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        magnitude: str | Callable[[Tensor, Tensor], Tensor] = "sphere",
        angular: str | Callable[[Tensor], Tensor] = "cosine",
        weighting: str | None = None,
        learn_k: str | nn.Parameter | None = None,
        learn_radius: str | None = None,
        momentum: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._choose(magnitude, angular, weighting, learn_k, learn_radius, momentum)

    def _inner_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def _walk(self, x: Tensor) -> tuple[Tensor, Walk]:
        return x, Walk()

    def forward(self, x: Tensor) -> Tensor:
        """Return responses (…, out_features) to `x` (…, in_features)."""
        y = self._operate(x.reshape(-1, x.shape[-1]))
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def extra_repr(self) -> str:
        """Show torch's arguments and ours."""
        filters, inputs = self.weight.shape
        return f"in_features={inputs}, out_features={filters}, bias={self.bias is not None}, {self._describe()}"
