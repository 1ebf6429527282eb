r"""What g does to a block of cosines: forward in place, backward from 16 bits a number.

Backward needs the cosines to know how much of a gradient runs along the patch, and for any g but the cosine itself how
steep g is. A function of the angle keeps the cotangents t = cot θ instead, which half precision holds to 0.05 % from a
right angle to the poles: π/2 − θ = arctan t, dθ/dc = −√(1+t²), and the share of a gradient along the patch is t times
its share of the angle. What is kept has 16 bits unless the numbers have 64. A layer's gradient is so rounded by some
parts in 10⁵ of its size; that of one filter that lies within a tenth of a radian of its patch, where the rest of the
gradient cancels, by up to 1 %, and those of a learned k or radius by up to 0.5 %.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere.functions.angular import Angular, Cosine, Linear, Sigmoid

__all__ = ["Response", "respond", "response_of"]


def respond(
    product: Tensor, reciprocal: Tensor, magnitude: Tensor | None, angular: Callable[[Tensor], Tensor]
) -> Tensor:
    r"""Return h·g(c), c = product/‖x‖, in the type and shape of `product`, in plain operations.

    Args:
        product: ⟨ŵ, x⟩ (N, filters, …).
        reciprocal: 1/‖x‖ (N, groups, 1, …), 0 for a zero patch.
        magnitude: h, broadcasting with (N, groups, filters of a group, …); None for 1.
        angular: g, a function of the cosine.
    """
    groups = reciprocal.shape[1]
    value = angular(_numerics.widen(product).unflatten(1, (groups, -1)) * reciprocal)
    if magnitude is not None:
        value = value * magnitude  # in this order the memory format is the product's
    return _numerics.narrow(value, product.dtype).flatten(1, 2)


class Response(abc.ABC):
    """One g; cosines, gradients and what is kept of them are (N, groups, filters of a group, …)."""

    @abc.abstractmethod
    def forward_(self, c: Tensor, kept: Tensor | None) -> None:
        """Write g(c) over c, and into `kept` what backward needs."""

    @abc.abstractmethod
    def backward(
        self,
        kept: Tensor,
        gradient: Tensor,
        factor: Tensor,
        magnitude: Tensor | None,
        out: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Write factor·∂c into `out`, ∂c = gradient·g′; return Σ ∂c·c over filters and, with an h, Σ gradient·g."""

    def to_k(self) -> Tensor:
        """Return what the blocks so far give as the gradient of a learned k."""
        raise TypeError(f"{type(self).__name__} has no k to learn")


class _Straight(Response):
    """The cosine itself."""

    def forward_(self, c: Tensor, kept: Tensor | None) -> None:
        if kept is not None:
            kept.copy_(c)

    def backward(
        self,
        kept: Tensor,
        gradient: Tensor,
        factor: Tensor,
        magnitude: Tensor | None,
        out: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        along = torch.mul(gradient, kept.to(gradient.dtype), out=out).sum(2, keepdim=True)
        torch.mul(gradient, factor, out=out)
        return along, along


class _Smooth(Response):
    """A g that is smooth in the cosine."""

    def __init__(self, angular: Angular) -> None:
        self.angular = angular

    def forward_(self, c: Tensor, kept: Tensor | None) -> None:
        if kept is not None:
            kept.copy_(c)
        c.copy_(self.angular(c))

    def backward(
        self,
        kept: Tensor,
        gradient: Tensor,
        factor: Tensor,
        magnitude: Tensor | None,
        out: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        c = kept.to(gradient.dtype, copy=True)
        value = self.angular(c)
        to_c = self.angular.slope(c, value).mul_(gradient)
        torch.mul(to_c, factor, out=out)
        along = c.mul_(to_c).sum(2, keepdim=True)
        return along, None if magnitude is None else value.mul_(gradient).sum(2, keepdim=True)


class _Arc(Response):
    """g = (2/π)(π/2 − θ)."""

    def forward_(self, c: Tensor, kept: Tensor | None) -> None:
        if kept is not None:
            kept.copy_(_numerics.cotangent(c))
        _numerics.arcsin_(c).mul_(2 / math.pi)

    def backward(
        self,
        kept: Tensor,
        gradient: Tensor,
        factor: Tensor,
        magnitude: Tensor | None,
        out: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        t = kept.to(gradient.dtype, copy=True)
        values = None
        if magnitude is not None:
            values = kept.atan().to(t.dtype).mul_(gradient).sum(2, keepdim=True).mul_(2 / math.pi)
        to_theta = _numerics.mask_poles(gradient, t)
        along = torch.mul(to_theta, t, out=out).sum(2, keepdim=True).mul_(2 / math.pi)
        torch.mul(to_theta.div_(_numerics.sine_(t)), factor * (2 / math.pi), out=out)
        return along, values


class _Logistic(Response):
    """g = (2σ((π/2 − θ)/k) − 1)/T with T = tanh(π/(4k)); k a number, or a tensor that may be learned."""

    def __init__(self, k: float | Tensor, learn: bool) -> None:
        self.k, self.learn = k, learn
        self.top = torch.tanh(math.pi / (4 * k)) if isinstance(k, Tensor) else math.tanh(math.pi / (4 * k))
        self.by_angle: float | Tensor = 0.0
        self.by_value: float | Tensor = 0.0

    def forward_(self, c: Tensor, kept: Tensor | None) -> None:
        if kept is not None:
            kept.copy_(_numerics.cotangent(c))
        _numerics.arcsin_(c).mul_(1 / self.k).sigmoid_().sub_(0.5).mul_(2 / self.top)

    def backward(
        self,
        kept: Tensor,
        gradient: Tensor,
        factor: Tensor,
        magnitude: Tensor | None,
        out: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        t, elevation = kept.to(gradient.dtype, copy=True), kept.atan().to(gradient.dtype)
        rise = torch.mul(elevation, 1 / self.k).sigmoid_()
        slope = torch.ops.aten.sigmoid_backward(gradient, rise)
        values = None
        if self.learn:
            self.by_angle = self.by_angle + _filter_sums(elevation.mul_(slope), magnitude)
        if self.learn or magnitude is not None:
            responses = rise.sub_(0.5).mul_(2 / self.top).mul_(gradient)
            values = responses.sum(2, keepdim=True)
            if self.learn:
                self.by_value = self.by_value + _filter_sums(responses, magnitude)
        slope = _numerics.mask_poles(slope.mul_(2 / (self.k * self.top)), t)
        along = torch.mul(slope, t, out=out).sum(2, keepdim=True)
        torch.mul(slope.div_(_numerics.sine_(t)), factor, out=out)
        return along, values

    def to_k(self) -> Tensor:
        """−2/(k²T)·Σ G·σ′·(π/2 − θ) + π(1−T²)/(4k²T)·Σ G·g, of which the second is by way of T."""
        top = torch.as_tensor(self.top)
        k = torch.as_tensor(self.k)
        slope = ((1 / top - top) * (math.pi / 4) * self.by_value - 2 / top * self.by_angle) / k.square()
        return slope if k.ndim else slope.sum()


def _filter_sums(values: Tensor, magnitude: Tensor | None) -> Tensor:
    """Sum (N, groups, filters of a group, …) to (1, groups, filters of a group, 1, …), weighted by h."""
    if magnitude is not None:
        values = values.mul_(magnitude)
    return values.sum((0, *range(3, values.ndim)), keepdim=True).squeeze(0)


def response_of(angular: Angular, learn: bool = False) -> Response:
    """Make the response of one pass; `learn` says whether a gradient of k is wanted."""
    if isinstance(angular, Cosine):
        return _Straight()
    if isinstance(angular, Linear):
        return _Arc()
    if isinstance(angular, Sigmoid):
        return _Logistic(angular.k, learn)
    return _Smooth(angular)
