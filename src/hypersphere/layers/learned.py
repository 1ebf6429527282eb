"""The h and g of a layer, and what of them is learned: the k of a sigmoid and the radius ρ of a magnitude."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import choose, is_number, require
from hypersphere.functions.angular import ANGULARS, Sigmoid
from hypersphere.functions.magnitude import MAGNITUDES, Ball, Magnitude, Seg, Tanh, weighted

__all__ = ["Learned", "shared_k"]

MagnitudeFunction = Callable[[Tensor, Tensor], Tensor]
AngularFunction = Callable[[Tensor], Tensor]


def shared_k(k: float = 0.5) -> nn.Parameter:
    """Make one k for a whole network: pass it as `learn_k` to every layer that shares it. It is kept as log k.

    >>> shared_k().exp()
    tensor(0.5000, grad_fn=<ExpBackward0>)
    """
    require(is_number(k, 0) and k > 0, "k", "a positive number", k)
    return nn.Parameter(torch.tensor(float(k)).log())


class Learned(nn.Module):
    r"""Owns h, g and their learned numbers, all kept positive by learning their logarithms.

    `log_k` holds log k, `log_radius` the logarithm of the factor of ρ = factor·(running mean of ‖x‖), thesis (C.1). The
    mean is kept as BatchNorm keeps its own: it moves by `momentum` with every training batch (the first one sets it),
    rests in evaluation, and is saved. A layer whose forward is computed again for its gradient (activation
    checkpointing) moves it twice, and its gradient is then that of the second mean.
    """

    weight: Tensor
    magnitude: MagnitudeFunction
    angular: AngularFunction
    weighting: str | None
    log_k: nn.Parameter | None
    log_radius: nn.Parameter | None
    momentum: float
    mean_norm: Tensor
    batches: Tensor
    groups: int

    def _choose(
        self,
        magnitude: str | MagnitudeFunction,
        angular: str | AngularFunction,
        weighting: str | None,
        learn_k: str | nn.Parameter | None,
        learn_radius: str | None,
        momentum: float,
    ) -> None:
        """Check everything, then set it."""
        chosen = choose(MAGNITUDES, magnitude, "magnitude")
        response = choose(ANGULARS, angular, "angular")
        weighted(chosen, weighting)
        require(is_number(momentum, 0, 1) and momentum > 0, "momentum", "a number in (0, 1]", momentum)
        log_k = self._start_k(response, learn_k)
        log_radius = self._start_radius(chosen, learn_radius)
        self.magnitude, self.angular, self.weighting, self.momentum = chosen, response, weighting, momentum
        self.log_k, self.log_radius = log_k, log_radius
        if log_radius is not None:
            self.register_buffer("mean_norm", torch.ones_like(log_radius.detach().flatten()[0]))
            self.register_buffer("batches", torch.zeros((), dtype=torch.int64, device=log_radius.device))

    def _forget(self) -> None:
        """Undo `_choose`."""
        for name in ("magnitude", "angular", "weighting", "momentum", "log_k", "log_radius", "mean_norm", "batches"):
            if hasattr(self, name):
                delattr(self, name)

    def _start_k(self, angular: AngularFunction, learn_k: str | nn.Parameter | None) -> nn.Parameter | None:
        if isinstance(angular, Sigmoid) and isinstance(angular.k, nn.Parameter):
            raise ValueError("angular must have a fixed k; to learn k, pass learn_k='layer', 'filter' or shared_k()")
        if learn_k is None:
            return None
        filters = len(self.weight)
        accepted = f"None, 'layer', 'filter' or a parameter of 1 or {filters} numbers"
        if isinstance(learn_k, nn.Parameter):
            require(learn_k.shape in ((), (filters,)), "learn_k", accepted, tuple(learn_k.shape))
        else:
            require(learn_k in ("layer", "filter"), "learn_k", accepted, learn_k)
        if not isinstance(angular, Sigmoid):
            raise ValueError(f"learn_k must be None for {angular!r}; only a Sigmoid has a k")
        return learn_k if isinstance(learn_k, nn.Parameter) else self._logarithm(angular.k, learn_k)

    def _start_radius(self, magnitude: MagnitudeFunction, learn_radius: str | None) -> nn.Parameter | None:
        if isinstance(getattr(magnitude, "radius", None), nn.Parameter):
            raise ValueError("magnitude must have a fixed radius; to learn it, pass learn_radius='layer' or 'filter'")
        if learn_radius is None:
            return None
        require(learn_radius in ("layer", "filter"), "learn_radius", "None, 'layer' or 'filter'", learn_radius)
        if not isinstance(magnitude, (Ball, Tanh, Seg)):
            raise ValueError(f"learn_radius must be None for {magnitude!r}; only Ball, Tanh and Seg have a radius")
        return self._logarithm(magnitude.radius, learn_radius)

    def _logarithm(self, start: float | Tensor, per: str) -> nn.Parameter:
        weight = _numerics.widen(self.weight.detach())
        value = torch.as_tensor(start, dtype=weight.dtype, device=weight.device).log()
        return nn.Parameter(value.expand(len(weight)).clone() if per == "filter" else value.clone())

    def _current_angular(self, x_norm: Tensor) -> AngularFunction:
        """The angular activation with the present k."""
        if self.log_k is None or not isinstance(self.angular, Sigmoid):
            return self.angular
        return replace(self.angular, k=self._by_filter(_numerics.widen(self.log_k).exp(), x_norm))

    def _current_magnitude(self, x_norm: Tensor) -> MagnitudeFunction:
        """The magnitude with the present radius; a training batch moves the mean first."""
        magnitude = self.magnitude
        if self.log_radius is not None and isinstance(magnitude, (Ball, Tanh, Seg)):
            if self.training and x_norm.numel():
                self._track(x_norm.detach().mean())
            factor = self._by_filter(_numerics.widen(self.log_radius).exp(), x_norm)
            magnitude = replace(magnitude, radius=factor * _numerics.widen(self.mean_norm.clone()))
        return weighted(magnitude, self.weighting)

    def _track(self, mean: Tensor) -> None:
        seen = (mean > 0) & torch.isfinite(mean)  # a batch of zeros, or one that overflowed, says nothing
        share = torch.where(self.batches == 0, 1.0, self.momentum).to(self.mean_norm.dtype)
        moved = torch.lerp(self.mean_norm, mean.to(self.mean_norm.dtype), share)
        self.mean_norm.copy_(torch.where(seen, moved, self.mean_norm))
        self.batches += seen.to(self.batches.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move and cast as torch does, but keep the running mean in float32 or wider, where it does not stall."""
        before = self._buffers.get("mean_norm")
        super()._apply(fn, recurse)
        after = self._buffers.get("mean_norm")
        if before is not None and after is not None and after.dtype in (torch.float16, torch.bfloat16):
            self.mean_norm = before.to(after.device)
        return self

    def reset_parameters(self) -> None:
        """Draw the weight anew, and start k, the radius and its running mean again."""
        super().reset_parameters()  # type: ignore[misc]
        with torch.no_grad():
            if self._parameters.get("log_k") is not None and isinstance(self.angular, Sigmoid):
                self.log_k.copy_(torch.as_tensor(self.angular.k).log())  # type: ignore[union-attr]
            if self._parameters.get("log_radius") is not None and isinstance(self.magnitude, (Ball, Tanh, Seg)):
                self.log_radius.copy_(torch.as_tensor(self.magnitude.radius).log())  # type: ignore[union-attr]
                self.mean_norm.fill_(1)
                self.batches.zero_()

    def _by_filter(self, value: Tensor, like: Tensor) -> Tensor:
        """Shape numbers of filters (K,) to broadcast with (N, groups, filters of a group, …); a single one as it is."""
        return value.reshape(self.groups, -1, *[1] * (like.ndim - 3)) if value.ndim else value

    @property
    def uses_weight_norm(self) -> bool:
        """Whether ‖w‖ changes the output; a callable of one's own is taken to use it unless it says otherwise."""
        if self.weighting is not None:
            return True
        return bool(getattr(self.magnitude, "uses_weight_norm", not isinstance(self.magnitude, Magnitude)))

    @property
    def decay_free_parameters(self) -> tuple[str, ...]:
        """Names of parameters that weight decay should leave alone."""
        names = ("log_k", "log_radius") if self.uses_weight_norm else ("weight", "log_k", "log_radius")
        return tuple(name for name in names if self._parameters.get(name) is not None)

    def _describe(self) -> str:
        parts = [f"magnitude={self.magnitude!r}", f"angular={self.angular!r}"]
        if self.weighting is not None:
            parts.append(f"weighting={self.weighting!r}")
        if self.log_k is not None:
            parts.append(f"learn_k={'filter' if self.log_k.ndim else 'layer'!r}")
        if self.log_radius is not None:
            parts.append(f"learn_radius={'filter' if self.log_radius.ndim else 'layer'!r}")
        return ", ".join(parts)
