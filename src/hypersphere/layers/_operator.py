r"""The operator of a decoupled layer: from its settings and learned numbers to the function that is evaluated.

The settings are a magnitude h, an angular activation g and a weighting. A forward pass asks three questions, in the
order of this module:

1. Which implementation computes the responses? `choose_implementation`
2. What are the learned k and ρ for this batch? `with_learned_k`, `LearnedRadius`
3. Which a, s and k make h(‖w‖, ‖x‖)·g(θ) equal to s·φ(a·‖x‖)·g(θ; k)? `operator_spec`

**Factors and scales.** A factor is part of the function. A range scale is not: it is a power of two that keeps
squares, products and gradients in the range of the dtype, and it cancels in the responses.

    name                per                      multiplies
    norm factor a       layer, group or filter   ‖x‖ inside φ
    response factor s   layer, group or filter   φ(a·‖x‖)
    relative radius     layer or filter          the mean patch norm; the result is the learned ρ
    input range scale   sample                   the input. In float16 the largest entry becomes at most 128, so that
                                                 products and gradients do not overflow. In other dtypes it is 1, or
                                                 the square range scale if the result has a graph
    square range scale  sample                   x where it is squared, in `measure_patches` and in backward, so that
                                                 squares of tiny and huge entries stay in range. It is 1 for ordinary
                                                 inputs
    norm range scale    group                    the patch norms, if a Seg has a learned ρ (`operator_spec`)

`_numerics.unit_scale` and `_numerics.safe_scale` compute range scales. The `scale` of `convert_` is unrelated: it
adjusts α and β of the magnitude, so that a converted layer has outputs of the same size as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import require
from hypersphere.functions._recomputation import PassHistory
from hypersphere.functions.angular import ANGULARS, Cosine, Sigmoid
from hypersphere.functions.magnitude import MAGNITUDES, Ball, InnerProduct, Linear, Radial, Seg, Sphere, Tanh
from hypersphere.layers._geometry import ConvGeometry, MeasuredPatches, filter_polar, measure_patches

if TYPE_CHECKING:
    from hypersphere.layers.decoupled import DecoupledLayer

__all__ = [
    "AngularFunction",
    "LearnedRadius",
    "MagnitudeFunction",
    "OperatorSpec",
    "absorb_response_factor",
    "check_learn_radius",
    "choose_implementation",
    "initial_log_k",
    "inner_product_filters",
    "is_factorable",
    "is_inner_product",
    "operator_spec",
    "with_learned_k",
]

MagnitudeFunction = Callable[[Tensor, Tensor], Tensor]
AngularFunction = Callable[[Tensor], Tensor]


# 1. The implementation -----------------------------------------------------------------------------------------------


def choose_implementation(
    magnitude: MagnitudeFunction,
    angular: AngularFunction,
    x: Tensor,
    filters: Tensor,
    *,
    learns_radius: bool,
    learns_k: bool,
) -> Literal["torch", "fused", "reference"]:
    """Return which implementation computes the responses of a layer. All three compute the same function.

    name         computes with                                 is chosen
    "torch"      torch's layer, with `inner_product_filters`   if h·g is an inner product
    "fused"      `fused_forward`, a custom operator with an    if h and g are entries of the menus, in eager mode or
                 explicit backward pass                        compiled for the CPU
    "reference"  `reference_forward`, ordinary operations,     in all other cases: a user's h or g, `torch.func`,
                 differentiated by autograd                    forward mode, tracing, export, compilation for an
                                                               accelerator, empty inputs, the meta device
    """
    if is_inner_product(magnitude, angular):
        return "torch"
    if not is_factorable(magnitude, learns_radius=learns_radius) or type(angular) not in ANGULARS.values():
        return "reference"  # a custom operator cannot call a user's function
    if not all(getattr(entry, "has_slope", True) for entry in (magnitude, angular)):
        return "reference"  # its backward pass needs the slopes of h and g
    # The operator differentiates only the radius and k that the layer learns, not other tensors of the user.
    learned = {"radius": learns_radius, "k": learns_k}
    numbers = {**vars(magnitude), **vars(angular)}
    if any(isinstance(value, Tensor) and not learned.get(name) for name, value in numbers.items()):
        return "reference"
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        # The compiler of an accelerator fuses ordinary operations better.
        is_usable = not _numerics.in_functorch() and not _numerics.on_accelerator(x)
    else:
        is_usable = _numerics.custom_backward_allowed(x, filters) and x.numel() > 0 and filters.numel() > 0
    return "fused" if is_usable else "reference"


# The three functions below compare types exactly, because a user's subclass may compute something else.


def is_inner_product(magnitude: MagnitudeFunction, angular: AngularFunction) -> bool:
    """Return True if h is linear in ‖x‖ and g is the cosine, so that torch's layer computes the response."""
    return type(angular) is Cosine and type(magnitude) in (InnerProduct, Linear)


def inner_product_filters(magnitude: MagnitudeFunction, weighting: str | None, filters: Tensor) -> Tensor:
    """Return the filters with which torch's layer gives the responses, if `is_inner_product` is True."""
    if type(magnitude) is not Linear:
        return filters
    # α‖x‖·cos θ is the inner product with αŵ.
    directions = filters if weighting == "linear" else filter_polar(filters)[1]
    is_one = not isinstance(magnitude.alpha, Tensor) and magnitude.alpha == 1
    return directions if is_one else directions * magnitude.alpha


def is_factorable(magnitude: MagnitudeFunction, *, learns_radius: bool) -> bool:
    """Return True if h = s·φ(a·‖x‖) with φ from the menu, see `operator_spec`."""
    kind = type(magnitude)
    if learns_radius:
        return kind in (Ball, Tanh, Seg)
    return kind is InnerProduct or (kind in MAGNITUDES.values() and issubclass(kind, Radial))


# 2. The learned k and ρ ----------------------------------------------------------------------------------------------


def _log_parameter(start: float | Tensor, per: str, filters: Tensor) -> nn.Parameter:
    """Return log(start) as a parameter with one entry, or one per filter."""
    # The logarithm is learned, so that k and ρ stay positive. The shape is (1,) and not (), because FSDP2 does not
    # accept 0-d parameters.
    filters = _numerics.widen(filters.detach())
    value = torch.as_tensor(start, dtype=filters.dtype, device=filters.device).log()
    return nn.Parameter(value.expand(len(filters) if per == "filter" else 1).clone())


def initial_log_k(angular: AngularFunction, learn_k: str | nn.Parameter | None, filters: Tensor) -> nn.Parameter | None:
    """Check the option `learn_k` and return log k as a parameter, or None if k is not learned."""
    if isinstance(angular, Sigmoid) and isinstance(angular.k, nn.Parameter):
        raise ValueError("angular must have a fixed k; to learn k, pass learn_k='layer', 'filter' or shared_k()")
    if learn_k is None:
        return None
    accepted = f"None, 'layer', 'filter' or a parameter with 1 or {len(filters)} entries"
    if isinstance(learn_k, nn.Parameter):
        require(learn_k.shape in ((), (1,), (len(filters),)), "learn_k", accepted, tuple(learn_k.shape))
    else:
        require(learn_k in ("layer", "filter"), "learn_k", accepted, learn_k)
    if not isinstance(angular, Sigmoid):
        raise ValueError(f"learn_k must be None for {angular!r}; only a Sigmoid has a k")
    return learn_k if isinstance(learn_k, nn.Parameter) else _log_parameter(angular.k, learn_k, filters)


def with_learned_k(angular: AngularFunction, log_k: Tensor | None, geometry: ConvGeometry) -> AngularFunction:
    """Return g with the learned k, or unchanged if k is not learned."""
    if log_k is None or not isinstance(angular, Sigmoid):
        return angular
    return replace(angular, k=geometry.per_filter(_numerics.widen(log_k).exp()))


def check_learn_radius(magnitude: MagnitudeFunction, learn_radius: str | None) -> None:
    """Check the option `learn_radius`."""
    if isinstance(getattr(magnitude, "radius", None), nn.Parameter):
        raise ValueError("magnitude must have a fixed radius; to learn it, pass learn_radius='layer' or 'filter'")
    if learn_radius is None:
        return
    require(learn_radius in ("layer", "filter"), "learn_radius", "None, 'layer' or 'filter'", learn_radius)
    if not isinstance(magnitude, (Ball, Tanh, Seg)):
        raise ValueError(f"learn_radius must be None for {magnitude!r}; only Ball, Tanh and Seg have a radius")


class Radius(NamedTuple):
    """The learned radius for one batch, in shapes that broadcast with (N, groups, filters per group, *places).

    Attributes:
        log: log ρ.
        mean_norm: the mean patch norm per group.
    """

    log: Tensor
    mean_norm: Tensor


class LearnedRadius:
    r"""The learned radius of a layer: ρ = (relative radius)·(mean of ‖x‖), thesis (C.1).

    Its tensors belong to the layer, so that they have their place in its state dict and move with it. Each method has
    the layer as an argument, because the replicas that `nn.DataParallel` makes of a layer share this object.

    * `log_radius`, the logarithm of the relative radius: a parameter with one entry, or one per filter;
    * `mean_norm`, the running mean patch norm: a buffer with one entry per group, because the filters of a group see
      the same patches;
    * `num_batches_tracked`, how many batches have moved the mean of each group: a buffer.

    The running mean is handled like the statistics of BatchNorm: each training batch moves it by `momentum`, and the
    first batch in which the group has a nonzero patch sets it. It is constant in evaluation mode.

    Activation checkpointing computes a forward pass twice; the second pass reuses the running mean of the first and
    does not update it. The mean patch norm of a batch identifies the pass that is repeated, see `PassHistory`. If the
    pass is not remembered, it uses the current running mean, and the gradient belongs to a slightly different ρ than
    the loss. A warning reports this once per layer.
    """

    def __init__(self) -> None:
        self._passes = PassHistory("the current running mean")

    @classmethod
    def attach_to(cls, layer: DecoupledLayer, start: float | Tensor, per: str) -> LearnedRadius:
        """Register the three tensors on a layer that has none, and return the object that computes ρ from them."""
        layer.log_radius = _log_parameter(start, per, layer._weight_as_filters)
        mean_norm = layer.log_radius.new_ones(layer.groups, requires_grad=False)
        layer.register_buffer("mean_norm", mean_norm)
        layer.register_buffer("num_batches_tracked", torch.zeros_like(mean_norm, dtype=torch.int64))
        return cls()

    def reset_(self, layer: DecoupledLayer, start: float | Tensor) -> None:
        """Set the relative radius to `start` and forget all batches."""
        assert layer.log_radius is not None
        layer.log_radius.copy_(torch.as_tensor(start).log())
        layer.mean_norm.fill_(1)
        layer.num_batches_tracked.zero_()
        self._passes.clear()

    def for_batch(self, layer: DecoupledLayer, x: Tensor, geometry: ConvGeometry, norm: Tensor) -> Radius:
        """Return ρ for a batch `x` with patch norms (N, groups, 1, *places). Training updates the running mean."""
        assert layer.log_radius is not None
        mean_norm = geometry.per_filter(self._mean_norm(layer, x, geometry, norm))
        # Adding logarithms keeps derivatives representable for extreme inputs.
        log_relative_radius = geometry.per_filter(_numerics.widen(layer.log_radius))
        return Radius(log_relative_radius + mean_norm.log(), mean_norm)

    def _mean_norm(self, layer: DecoupledLayer, x: Tensor, geometry: ConvGeometry, norm: Tensor) -> Tensor:
        """Return the mean patch norm per group, from the batch or from the running mean."""
        if not layer.training or norm.numel() == 0:
            return _numerics.widen(layer.mean_norm)
        all_but_groups = (0, *range(2, norm.ndim))
        batch_mean = norm.detach().mean(all_but_groups).to(layer.mean_norm.dtype)
        # Groups whose patches are all zero, or whose norms overflow, do not update their mean. These are tensor
        # operations and not branches, so that nothing waits for the device.
        is_valid = (batch_mean > 0) & torch.isfinite(batch_mean)
        if _numerics.in_backward():  # activation checkpointing repeats a forward pass
            # With `radius_norm="batch"`, ρ depends on the mean of the batch, which is the same in both passes.
            (running,) = self._passes.recall([batch_mean], (layer.mean_norm,), warn=layer.radius_norm == "running")
            assert running is not None
        else:
            running = self._running_mean(layer, batch_mean, is_valid, can_update=_numerics.can_update_state(x))
        if layer.radius_norm == "running":
            return _numerics.widen(running)
        # The mean of the batch, with its gradient.
        if x.requires_grad and not norm.requires_grad:  # the norms of the custom operator have no graph
            norm = measure_patches(x, geometry, with_graph=True).norm
        return torch.where(is_valid, norm.mean(all_but_groups), _numerics.widen(running))

    def _running_mean(self, layer: DecoupledLayer, batch_mean: Tensor, is_valid: Tensor, *, can_update: bool) -> Tensor:
        """Return the running mean after this batch. Store it, and record the pass, if `can_update` is True."""
        rate = torch.where(layer.num_batches_tracked == 0, 1.0, layer.momentum).to(batch_mean.dtype)
        running = torch.where(is_valid, torch.lerp(layer.mean_norm, batch_mean, rate), layer.mean_norm)
        if can_update:
            layer.mean_norm.copy_(running)
            layer.num_batches_tracked += is_valid.to(layer.num_batches_tracked.dtype)
            self._passes.record([batch_mean], (running,))
        return running


# 3. The function -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OperatorSpec:
    """The function s·φ(a·‖x‖)·g(cos θ) of filters and patches.

    Attributes:
        magnitude: φ, one of the library's functions of ‖x‖.
        angular: g; the k of a Sigmoid may be a tensor. The custom operator needs one of the library's functions.
        norm_factor: a, of the shape (groups or 1, filters per group or 1, *ones), or None for 1.
        response_factor: s, in the same form.
    """

    magnitude: Radial
    angular: AngularFunction
    norm_factor: Tensor | None = None
    response_factor: Tensor | None = None

    @property
    def k(self) -> Tensor | None:
        """The k of a sigmoid if it is a tensor."""
        return self.angular.k if isinstance(self.angular, Sigmoid) and isinstance(self.angular.k, Tensor) else None

    @property
    def has_unit_magnitude(self) -> bool:
        """True if h = 1, so that it can be left out."""
        is_sphere = type(self.magnitude) is Sphere and not isinstance(self.magnitude.alpha, Tensor)
        return is_sphere and self.magnitude == Sphere(1.0) and self.response_factor is None

    @property
    def depends_on_filter(self) -> bool:
        """True if h differs between the filters of a group, so that it has as many entries as the output."""
        return any(t is not None and t.shape[1] > 1 for t in (self.norm_factor, self.response_factor))

    def sum_filters(self, t: Tensor) -> Tensor:
        """Sum `t` over the filters of a group, unless h, by which it will be multiplied, depends on the filter."""
        return t if self.depends_on_filter else t.sum(2, keepdim=True)

    def h(self, norm: Tensor) -> Tensor | None:
        """Return h = s·φ(a·‖x‖) for norms (N, groups, 1, *places), or None if h = 1."""
        if self.has_unit_magnitude:
            return None
        argument = norm if self.norm_factor is None else norm * self.norm_factor
        value = self.magnitude.at(argument)
        return value if self.response_factor is None else value * self.response_factor


def operator_spec(
    magnitude: MagnitudeFunction,
    angular: AngularFunction,
    weighting: str | None,
    w_norm: Tensor,
    radius: Radius | None,
    patches: MeasuredPatches,
) -> tuple[OperatorSpec, MeasuredPatches]:
    r"""Write h(‖w‖, ‖x‖)·g(θ) as s·φ(a·n)·g(θ), and return it and the patches with the norms n.

    Args:
        magnitude: h without weighting, for which `is_factorable` is True.
        angular: g with the current k.
        weighting: how ‖w‖ enters.
        w_norm: the filter norms, shaped by `ConvGeometry.per_filter`.
        radius: the learned ρ, or None if ρ is a number of the magnitude.
        patches: with the norms n = ‖x‖. Only a Seg with a learned ρ changes them.
    """
    a = s = None
    if radius is not None:
        assert isinstance(magnitude, (Ball, Tanh, Seg))
        # Ball and Tanh are functions of ‖x‖/ρ, so a = 1/ρ. Seg is ρ times such a function, so also s = ρ.
        log_a = -radius.log
        if isinstance(magnitude, Seg):
            s = radius.log.exp()
            # Its gradients contain s·n = ρ·‖x‖. Where that could overflow or underflow, multiply n by a power of two
            # near 1/ρ, and divide a by it.
            norm_range_scale = _numerics.safe_scale(radius.mean_norm.detach())
            patches, log_a = patches._replace(norm=patches.norm * norm_range_scale), log_a - norm_range_scale.log()
        a, magnitude = log_a.exp(), replace(magnitude, radius=1.0)
    if isinstance(magnitude, InnerProduct):  # ‖w‖‖x‖ = s·φ(‖x‖) with φ the identity
        magnitude, s = Linear(), w_norm
    elif weighting == "linear":
        s = w_norm if s is None else s * w_norm
    elif weighting == "joint":
        a = w_norm if a is None else a * w_norm
    elif weighting == "separate":
        assert isinstance(magnitude, Tanh)
        # s = tanh(‖w‖/ρ); the factor α stays in φ.
        argument = w_norm if a is None else a * w_norm
        s = replace(magnitude, alpha=1.0).at(argument)
    assert isinstance(magnitude, Radial)
    # For constant φ = α, move α into s. `absorb_response_factor` can then multiply s into the filters, so that h is 1.
    if type(magnitude) is Sphere and s is not None:
        magnitude, s = Sphere(), s * magnitude.alpha
    return OperatorSpec(magnitude, angular, a, s), patches


def absorb_response_factor(spec: OperatorSpec, w_hat: Tensor, patches: MeasuredPatches) -> tuple[OperatorSpec, Tensor]:
    """Multiply s into the filters if g is the cosine, which is linear in ŵ. Return the other factors and filters."""
    s = spec.response_factor
    if s is None or type(spec.angular) is not Cosine:
        return spec, w_hat
    if patches.x.dtype == torch.float16:
        return spec, w_hat  # products of patches with filters of norm s could overflow, see `measure_patches`
    if spec.norm_factor is not None and type(spec.magnitude) is Seg:
        return spec, w_hat  # s is a radius, and filters times a huge radius times huge patches would overflow
    # Repeat an s per layer or per group for all of its filters.
    factors = s.reshape(-1, 1).expand(-1, len(w_hat) // s.numel())
    return replace(spec, response_factor=None), w_hat * factors.reshape(-1, *[1] * (w_hat.ndim - 1))
