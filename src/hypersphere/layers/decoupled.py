r"""Decoupled layers: f(w, x) = h(‖w‖, ‖x‖)·g(θ(w, x)) instead of the inner product (thesis, section 4.3).

Each layer takes the arguments of torch's layer of the same kind and has the same parameters and state dict. A learned
k or ρ adds parameters and buffers, so a checkpoint of torch's layer is loaded into such a layer with `strict=False`.

**The path of a forward pass.** `DecoupledLayer.forward` checks the input, `_forward_any_shape` of the convolutions or
of the linear layer makes it a batch, and `_forward_batch` computes the responses. There `_geometry` measures patches
and filters, `_operator_spec` inserts the learned k and ρ into the operator, and `_fused_op` evaluates it.

**Three implementations** return the same responses:

* *torch's layer*, if the response is an inner product: g is the cosine and h is linear in ‖x‖ (`_equivalent_weight`);
* *the custom operator* (`fused_forward`), which has an explicit backward pass, if `_uses_custom_op` is True: g and h
  are entries of the menus, and the layer runs in eager mode or is compiled for the CPU;
* *ordinary operations* (`reference_forward`), which autograd differentiates, in all other cases: a user's g or h,
  `torch.func` transforms, forward mode, tracing, export, compilation for an accelerator, empty inputs, and the meta
  device. Second derivatives of the custom operator use them too.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.jit._trace import is_tracing

from hypersphere import _numerics
from hypersphere._deprecation import deprecated_attribute
from hypersphere._validation import choose, is_number, require
from hypersphere.functions._recomputation import PassHistory
from hypersphere.functions._tensor_fields import fields_on_device
from hypersphere.functions.angular import ANGULARS, Cosine, Sigmoid
from hypersphere.functions.magnitude import (
    MAGNITUDES,
    Ball,
    InnerProduct,
    Linear,
    Radial,
    Seg,
    Sphere,
    Tanh,
    weighted,
)
from hypersphere.layers._fused_op import (
    OperatorSpec,
    absorb_output_scale,
    fused_forward,
    reference_forward,
    saves_cotangents,
    use_custom_op,
)
from hypersphere.layers._geometry import ConvGeometry, MeasuredPatches, filter_polar, measure_patches

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "DEFAULT_OPTIONS",
    "ConvOptions",
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledLayer",
    "DecoupledLinear",
    "OperatorOptions",
    "shared_k",
]

MagnitudeFunction = Callable[[Tensor, Tensor], Tensor]
AngularFunction = Callable[[Tensor], Tensor]


def shared_k(k: float = 0.5) -> nn.Parameter:
    """Return a parameter for one k per network. Pass it as `learn_k` to every layer that shares it. It holds log k.

    >>> shared_k().exp()
    tensor([0.5000], grad_fn=<ExpBackward0>)
    """
    require(is_number(k, 0) and k > 0, "k", "a positive number", k)
    return nn.Parameter(torch.tensor([float(k)]).log())


class OperatorOptions(TypedDict, total=False):
    """The arguments of a decoupled layer that torch's layer does not have. `DecoupledConv2d` describes them."""

    magnitude: str | MagnitudeFunction
    angular: str | AngularFunction
    weighting: str | None
    learn_k: str | nn.Parameter | None
    learn_radius: str | None
    radius_norm: str
    momentum: float
    storage: str


class ConvOptions(OperatorOptions, total=False):
    """The keyword arguments of a decoupled convolution: those of torch's, and those of the operator."""

    padding_mode: str
    device: torch.device | str | None
    dtype: torch.dtype | None


DEFAULT_OPTIONS = OperatorOptions(
    magnitude="sphere",
    angular="cosine",
    weighting=None,
    learn_k=None,
    learn_radius=None,
    radius_norm="running",
    momentum=0.1,
    storage="full",
)


if TYPE_CHECKING:

    class _TorchLayer(nn.Module):
        """What `DecoupledLayer` uses of torch's layer."""

        weight: Tensor
        bias: Any

        def reset_parameters(self) -> None: ...

else:
    _TorchLayer = nn.Module


class DecoupledLayer(_TorchLayer, abc.ABC):
    r"""Mixin that makes a layer of torch decoupled: the operator, its settings and its learned k and ρ.

    A decoupled layer inherits from this class first and from torch's layer second, so that `super()` is torch's layer.
    It calls `_configure` at the end of its constructor and defines `_check_shape`, `_inner_product`,
    `_forward_any_shape` and `_input_and_geometry`, the four methods in which convolutions and linear layers differ.

    The learned k and ρ are kept positive by learning their logarithms: `log_k` holds log k, and `log_radius` holds the
    logarithm of the factor in ρ = factor·(mean of ‖x‖), thesis (C.1). Both have one entry, or one per filter.

    The mean patch norm `mean_norm` has one entry per group, because the filters of a group see the same patches. It is
    handled like the statistics of BatchNorm: each training batch moves it by `momentum`, and the first batch in which
    the group has a nonzero patch sets it. It is constant in evaluation mode and part of the state dict.

    Activation checkpointing computes a forward pass twice; the second pass reuses the running mean of the first and
    does not update it. The mean patch norm of a batch identifies the pass that is repeated, see `PassHistory`. If the
    pass is not remembered, it uses the current running mean, and the gradient belongs to a slightly different ρ than
    the loss. A warning reports this once per layer.
    """

    groups: int
    magnitude: MagnitudeFunction
    angular: AngularFunction
    weighting: str | None
    radius_norm: str
    momentum: float
    storage: str
    log_k: nn.Parameter | None
    log_radius: nn.Parameter | None
    mean_norm: Tensor
    num_batches_tracked: Tensor
    batches = deprecated_attribute("batches", "num_batches_tracked")
    _passes: PassHistory

    @property
    def _filters(self) -> Tensor:
        """The weight as (filters, channels per group, *kernel). Layers that store it in another order override this."""
        return self.weight

    def _in_order_of_weight(self, filters: Tensor) -> Tensor:
        """Return filters in the order of `weight`: the inverse of `_filters`."""
        return filters

    # Settings --------------------------------------------------------------------------------------------------------

    def _configure(self, options: OperatorOptions) -> None:
        """Check all options, then store them. Nothing is stored if one of them is invalid."""
        for name in options.keys() - DEFAULT_OPTIONS.keys():
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {name!r}")
        settings = OperatorOptions(**{**DEFAULT_OPTIONS, **options})
        magnitude = choose(MAGNITUDES, settings["magnitude"], "magnitude")
        angular = choose(ANGULARS, settings["angular"], "angular")
        weighted(magnitude, settings["weighting"])  # raises an error if the weighting is not defined for the magnitude
        radius_norm, momentum, storage = settings["radius_norm"], settings["momentum"], settings["storage"]
        require(radius_norm in ("running", "batch"), "radius_norm", "'running' or 'batch'", radius_norm)
        require(is_number(momentum, 0, 1) and momentum > 0, "momentum", "a number in (0, 1]", momentum)
        require(storage in ("full", "half"), "storage", "'full' or 'half'", storage)
        log_k = self._initial_log_k(angular, settings["learn_k"])
        log_radius = self._initial_log_radius(magnitude, settings["learn_radius"])
        self.magnitude, self.angular, self.weighting = magnitude, angular, settings["weighting"]
        self.radius_norm, self.momentum, self.storage = radius_norm, momentum, storage
        self.log_k, self.log_radius = log_k, log_radius
        # The initial value of a parameter of the user, which need not be that of g. On the meta device it has none.
        is_given = isinstance(settings["learn_k"], nn.Parameter) and log_k is not None and not log_k.is_meta
        self._given_log_k = log_k.detach().clone() if is_given and log_k is not None else None
        if log_radius is not None:
            groups, device, dtype = self.groups, log_radius.device, log_radius.dtype
            self.register_buffer("mean_norm", torch.ones(groups, dtype=dtype, device=device))
            # Batches that have moved the mean of each group. The first one sets it instead.
            self.register_buffer("num_batches_tracked", torch.zeros(groups, dtype=torch.int64, device=device))
            self._passes = PassHistory("the current running mean")

    def _remove_configuration(self) -> None:
        """Undo `_configure`."""
        added = ("log_k", "log_radius", "_given_log_k", "mean_norm", "num_batches_tracked", "_passes")
        for name in (*DEFAULT_OPTIONS, *added):
            if hasattr(self, name):
                delattr(self, name)

    def _initial_log_k(self, angular: AngularFunction, learn_k: str | nn.Parameter | None) -> nn.Parameter | None:
        if isinstance(angular, Sigmoid) and isinstance(angular.k, nn.Parameter):
            raise ValueError("angular must have a fixed k; to learn k, pass learn_k='layer', 'filter' or shared_k()")
        if learn_k is None:
            return None
        filters = len(self._filters)
        accepted = f"None, 'layer', 'filter' or a parameter with 1 or {filters} entries"
        if isinstance(learn_k, nn.Parameter):
            require(learn_k.shape in ((), (1,), (filters,)), "learn_k", accepted, tuple(learn_k.shape))
        else:
            require(learn_k in ("layer", "filter"), "learn_k", accepted, learn_k)
        if not isinstance(angular, Sigmoid):
            raise ValueError(f"learn_k must be None for {angular!r}; only a Sigmoid has a k")
        return learn_k if isinstance(learn_k, nn.Parameter) else self._log_parameter(angular.k, learn_k)

    def _initial_log_radius(self, magnitude: MagnitudeFunction, learn_radius: str | None) -> nn.Parameter | None:
        if isinstance(getattr(magnitude, "radius", None), nn.Parameter):
            raise ValueError("magnitude must have a fixed radius; to learn it, pass learn_radius='layer' or 'filter'")
        if learn_radius is None:
            return None
        require(learn_radius in ("layer", "filter"), "learn_radius", "None, 'layer' or 'filter'", learn_radius)
        if not isinstance(magnitude, (Ball, Tanh, Seg)):
            raise ValueError(f"learn_radius must be None for {magnitude!r}; only Ball, Tanh and Seg have a radius")
        return self._log_parameter(magnitude.radius, learn_radius)

    def _log_parameter(self, start: float | Tensor, per: str) -> nn.Parameter:
        """Return log(start) as a parameter with one entry, or one per filter."""
        # The shape is (1,) and not (), because FSDP2 does not accept 0-d parameters.
        weight = _numerics.widen(self._filters.detach())
        value = torch.as_tensor(start, dtype=weight.dtype, device=weight.device).log()
        return nn.Parameter(value.expand(len(weight) if per == "filter" else 1).clone())

    def reset_parameters(self) -> None:
        """Reinitialise the weight, and reset k, the radius and its running mean to their initial values."""
        super().reset_parameters()
        # torch's constructor calls this method before `_configure` has set anything.
        log_k, log_radius = self._parameters.get("log_k"), self._parameters.get("log_radius")
        with torch.no_grad():
            if log_k is not None and isinstance(self.angular, Sigmoid):
                start = torch.as_tensor(self.angular.k).log()
                log_k.copy_(start if self._given_log_k is None else self._given_log_k)
            if log_radius is not None and isinstance(self.magnitude, (Ball, Tanh, Seg)):
                log_radius.copy_(torch.as_tensor(self.magnitude.radius).log())
                self.mean_norm.fill_(1)
                self.num_batches_tracked.zero_()
                self._passes.clear()

    @property
    def uses_weight_norm(self) -> bool:
        """True if ‖w‖ changes the output. A user's callable counts as using it unless it has this attribute."""
        if self.weighting is not None:
            return True
        return bool(getattr(self.magnitude, "uses_weight_norm", True))

    @property
    def decay_free_parameters(self) -> tuple[str, ...]:
        """Names of parameters that weight decay should not change."""
        names = ("log_k", "log_radius") if self.uses_weight_norm else ("weight", "log_k", "log_radius")
        return tuple(name for name in names if self._parameters.get(name) is not None)

    def extra_repr(self) -> str:
        """Show torch's arguments, the magnitude, the angular activation and other settings that were changed."""
        parts = [super().extra_repr(), f"magnitude={self.magnitude!r}", f"angular={self.angular!r}"]
        if self.weighting is not None:
            parts.append(f"weighting={self.weighting!r}")
        if self.log_k is not None:
            parts.append(f"learn_k={'layer' if self.log_k.numel() == 1 else 'filter'!r}")
        if self.log_radius is not None:
            parts.append(f"learn_radius={'layer' if self.log_radius.numel() == 1 else 'filter'!r}")
            parts.append(f"radius_norm={self.radius_norm!r}")
        if self.storage != "full":
            parts.append(f"storage={self.storage!r}")
        return ", ".join(parts)

    # Forward ---------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Float[Tensor, "..."]:
        """Return the responses to `x`.

        A convolution maps (N, channels, *size) or (channels, *size) to (N, filters, *places) or (filters, *places), a
        linear layer maps (..., in_features) to (..., out_features).
        """
        is_real = isinstance(x, Tensor) and x.is_floating_point()
        require(is_real, "x", "a tensor of a floating-point dtype", x.dtype if isinstance(x, Tensor) else type(x))
        if not is_tracing():  # `torch.jit.trace` warns about comparisons of sizes
            self._check_shape(x)
        dtype = _product_dtype(x, self.weight)
        x = x.to(dtype)
        with _numerics.autocast_disabled(x):
            weight = self._equivalent_weight()
            if weight is None:
                return self._forward_any_shape(x)
            return self._inner_product(x, weight.to(dtype), None if self.bias is None else self.bias.to(dtype))

    @abc.abstractmethod
    def _check_shape(self, x: Tensor) -> None:
        """Raise a `ValueError` unless `x` has the right dimensions and the right number of channels or features."""

    @abc.abstractmethod
    def _inner_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ⟨w, x⟩ + b, computed as torch's layer does."""

    @abc.abstractmethod
    def _forward_any_shape(self, x: Tensor) -> Tensor:
        """Return the responses to an input of any accepted shape, with `_forward_batch`."""

    @abc.abstractmethod
    def _input_and_geometry(self, x: Tensor) -> tuple[Tensor, ConvGeometry]:
        """Return the input and the geometry. Padding that is asymmetric or not with zeros is applied to the input."""

    def _equivalent_weight(self) -> Tensor | None:
        """Return the filters of torch's layer with the same responses, or None if there is none."""
        # Types are compared exactly, because a user's subclass may compute something else.
        magnitude = self.magnitude
        if type(self.angular) is not Cosine:
            return None
        if type(magnitude) is InnerProduct:
            return self._filters
        if type(magnitude) is Linear:  # α‖x‖·cos θ is the inner product with αŵ
            weight = self._filters if self.weighting == "linear" else filter_polar(self._filters)[1]
            is_one = not isinstance(magnitude.alpha, Tensor) and magnitude.alpha == 1
            return weight if is_one else weight * magnitude.alpha
        return None

    def _forward_batch(self, x: Tensor) -> Tensor:
        """Return f(w, x) + b (N, filters, *places) for a batch (N, channels, *size)."""
        x, geometry = self._input_and_geometry(x)
        w_norm, w_hat = filter_polar(self._filters)
        if self._uses_custom_op(x):
            # The operator differentiates the norms itself, so they need no graph.
            patches, half_storage = measure_patches(x, geometry, with_graph=False), self.storage == "half"
            spec, patches = self._operator_spec(x, geometry, patches, w_norm)
            # Cotangents are those of cosines, so the filters must stay unit vectors if they are saved.
            if not saves_cotangents(x, half_storage=half_storage):
                spec, w_hat = absorb_output_scale(spec, w_hat)
            y = fused_forward(patches, w_hat.to(x.dtype), geometry, spec, half_storage)
            return y if self.bias is None else y.add_(self._shaped_bias(y))  # backward does not need y
        patches = measure_patches(x, geometry, with_graph=True)
        if self._is_factorable:
            spec, patches = self._operator_spec(x, geometry, patches, w_norm)
            spec, w_hat = absorb_output_scale(spec, w_hat)
            h, g = spec.h, spec.angular
        else:  # a user's function of both norms
            magnitude = self._magnitude_with_radius(x, geometry, patches.norm)
            h = partial(weighted(magnitude, self.weighting), self._per_filter(w_norm, x))
            g = self._angular_with_k(x)
        y = reference_forward(patches, w_hat.to(x.dtype), geometry, h, g)
        return y if self.bias is None else y + self._shaped_bias(y)

    def _shaped_bias(self, y: Tensor) -> Tensor:
        return self.bias.to(y.dtype).reshape(-1, *[1] * (y.ndim - 2))

    # The operator with the current k and ρ ---------------------------------------------------------------------------

    @property
    def _is_factorable(self) -> bool:
        """True if h = s·φ(a·‖x‖) with φ from the menu.

        Types are compared exactly, because a user's subclass may be any function of ‖w‖, ‖x‖ and ρ.
        """
        kind = type(self.magnitude)
        if self.log_radius is not None:
            return kind in (Ball, Tanh, Seg)
        return kind is InnerProduct or (kind in MAGNITUDES.values() and issubclass(kind, Radial))

    def _uses_custom_op(self, x: Tensor) -> bool:
        """Return True if the custom operator computes the layer. The top of this module lists the alternatives.

        The operator needs h and g from the menus, without tensors of the user: it cannot call a user's function, it
        needs the slopes of h and g, and it differentiates only the k and ρ that this layer learns.
        """
        if not self._is_factorable or type(self.angular) not in ANGULARS.values():
            return False
        if not all(getattr(entry, "has_slope", True) for entry in (self.magnitude, self.angular)):
            return False
        numbers = {**vars(self.magnitude), **vars(self.angular)}
        learned = {"radius": self.log_radius is not None, "k": self.log_k is not None}
        if any(isinstance(value, Tensor) and not learned.get(name) for name, value in numbers.items()):
            return False
        return use_custom_op(x, self._filters)

    def _operator_spec(
        self, x: Tensor, geometry: ConvGeometry, patches: MeasuredPatches, w_norm: Tensor
    ) -> tuple[OperatorSpec, MeasuredPatches]:
        r"""Write h(‖w‖, ‖x‖)·g(θ) as s·φ(a·n)·g(θ), and return it and the patches with the norms n.

        Ball and Tanh are functions of ‖x‖/ρ, and Seg is ρ times one, so a = 1/ρ and, for Seg, s = ρ. The weightings
        multiply a (joint) or s (linear, separate) by a function of ‖w‖.

        n = ‖x‖, except for a Seg with a learned ρ. Its gradients contain s·n = ρ·‖x‖. If that could overflow or
        underflow, n is ‖x‖ times the norm scale of `MeasuredPatches`, a power of two near 1/ρ, and a compensates.
        """
        magnitude, a, s = self.magnitude, None, None
        if self.log_radius is not None:
            assert isinstance(magnitude, (Ball, Tanh, Seg))
            mean_norm = self._mean_norm(x, geometry, patches.norm)
            log_radius = self._log_radius_per_filter(x, mean_norm)
            log_a = -log_radius
            if isinstance(magnitude, Seg):
                s = log_radius.exp()
                norm_scale = self._per_filter(_numerics.safe_scale(mean_norm.detach()), x)
                patches, log_a = patches._replace(norm=patches.norm * norm_scale), log_a - norm_scale.log()
            a, magnitude = log_a.exp(), replace(magnitude, radius=1.0)
        filter_norms = self._per_filter(w_norm, x)
        if isinstance(magnitude, InnerProduct):  # ‖w‖‖x‖ = s·φ(‖x‖) with φ the identity
            magnitude, s = Linear(), filter_norms
        elif self.weighting == "linear":
            s = filter_norms if s is None else s * filter_norms
        elif self.weighting == "joint":
            a = filter_norms if a is None else a * filter_norms
        elif self.weighting == "separate":
            assert isinstance(magnitude, Tanh)
            # s = tanh(‖w‖/ρ); the factor α stays in φ.
            bounded = replace(magnitude, alpha=1.0)
            argument = filter_norms if a is None else a * filter_norms
            s = bounded(argument, argument)
        assert isinstance(magnitude, Radial)
        # For constant φ = α, move α into s. With cosine g, s is then multiplied into the filters and h is skipped.
        if type(magnitude) is Sphere and s is not None:
            magnitude, s = Sphere(), s * magnitude.alpha
        return OperatorSpec(magnitude, self._angular_with_k(x), a, s), patches

    def _magnitude_with_radius(self, x: Tensor, geometry: ConvGeometry, norm: Tensor) -> MagnitudeFunction:
        """Return a user's h with the current ρ, which depends on the patch norms in training."""
        if self.log_radius is None:
            return self.magnitude
        assert isinstance(self.magnitude, (Ball, Tanh, Seg))
        mean_norm = self._mean_norm(x, geometry, norm)
        return replace(self.magnitude, radius=self._log_radius_per_filter(x, mean_norm).exp())

    def _log_radius_per_filter(self, x: Tensor, mean_norm: Tensor) -> Tensor:
        """Return log ρ for ρ = factor·mean. Adding logarithms keeps derivatives representable for extreme inputs."""
        assert self.log_radius is not None
        return self._per_filter(_numerics.widen(self.log_radius), x) + self._per_filter(mean_norm.log(), x)

    def _angular_with_k(self, x: Tensor) -> AngularFunction:
        """Return g with the current k."""
        if self.log_k is None or not isinstance(self.angular, Sigmoid):
            return self.angular
        return replace(self.angular, k=self._per_filter(_numerics.widen(self.log_k).exp(), x))

    def _per_filter(self, value: Tensor, x: Tensor) -> Tensor:
        """Reshape one entry, or one per group or filter, to broadcast with (N, groups, filters per group, *places)."""
        ones = [1] * (x.ndim - 2)
        return value.reshape(1, 1, *ones) if value.numel() == 1 else value.reshape(self.groups, -1, *ones)

    # The mean patch norm ---------------------------------------------------------------------------------------------

    def _mean_norm(self, x: Tensor, geometry: ConvGeometry, norm: Tensor) -> Tensor:
        """Return the mean patch norm per group, which determines ρ. Training updates the running mean."""
        if not self.training or norm.numel() == 0:
            return _numerics.widen(self.mean_norm)
        all_but_groups = (0, *range(2, norm.ndim))
        batch_mean = norm.detach().mean(all_but_groups).to(self.mean_norm.dtype)
        # Groups whose patches are all zero, or whose norms overflow, do not update their mean. These are tensor
        # operations and not branches, so that nothing waits for the device.
        is_valid = (batch_mean > 0) & torch.isfinite(batch_mean)
        if _numerics.in_backward():  # activation checkpointing repeats a forward pass
            # With `radius_norm="batch"`, ρ depends on the mean of the batch, which is the same in both passes.
            state = self._passes.recall([batch_mean], (self.mean_norm,), warn=self.radius_norm == "running")
            (running,) = state
            assert running is not None
        else:
            running = self._running_mean(batch_mean, is_valid, can_update=_numerics.can_update_state(x))
        if self.radius_norm == "running":
            return _numerics.widen(running)
        # The mean of the batch, with its gradient.
        if x.requires_grad and not norm.requires_grad:  # the norms of the custom operator have no graph
            norm = measure_patches(x, geometry, with_graph=True).norm
        return torch.where(is_valid, norm.mean(all_but_groups), _numerics.widen(running))

    def _running_mean(self, batch_mean: Tensor, is_valid: Tensor, *, can_update: bool) -> Tensor:
        """Return the running mean after this batch. Store it, and record the pass, if `can_update` is True."""
        rate = torch.where(self.num_batches_tracked == 0, 1.0, self.momentum).to(batch_mean.dtype)
        running = torch.where(is_valid, torch.lerp(self.mean_norm, batch_mean, rate), self.mean_norm)
        if can_update:
            self.mean_norm.copy_(running)
            self.num_batches_tracked += is_valid.to(self.num_batches_tracked.dtype)
            self._passes.record([batch_mean], (running,))
        return running

    # State -----------------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move and cast as torch does, but keep the running mean in float32 or wider; move fixed tensors of h and g."""
        # In half precision an update by a small momentum would be rounded away.
        old = self._buffers.get("mean_norm")
        super()._apply(fn, recurse)
        new = self._buffers.get("mean_norm")
        if old is not None and new is not None and new.dtype in (torch.float16, torch.bfloat16):
            self._buffers["mean_norm"] = old.to(new.device)
        # Not the device of `weight`, which a parametrisation would compute, or another module owns.
        stored = next(self.parameters(), None)
        if stored is not None:
            self._move_operator(stored.device)
        return self

    def _move_operator(self, device: torch.device) -> None:
        """Move fixed tensors of h and g to a device."""
        self.magnitude = fields_on_device(self.magnitude, device)
        self.angular = fields_on_device(self.angular, device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a state dict. In version 0.1, k and ρ per layer, the mean norm and its counter were 0-d tensors.

        The counter was named `batches`.
        """
        if prefix + "batches" in state_dict and hasattr(self, "num_batches_tracked"):
            state_dict[prefix + "num_batches_tracked"] = state_dict.pop(prefix + "batches")
        for name in ("log_k", "log_radius", "mean_norm", "num_batches_tracked"):
            stored, current = state_dict.get(prefix + name), getattr(self, name, None)
            if stored is not None and current is not None and stored.ndim == 0 and current.ndim == 1:
                state_dict[prefix + name] = stored.expand(current.shape).clone()
        super()._load_from_state_dict(state_dict, prefix, *args)


def _product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of products: autocast's if it is enabled and `x` is not float64, else the promoted dtype."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(x.dtype, weight.dtype)


# The layers ----------------------------------------------------------------------------------------------------------


class _DecoupledConv(DecoupledLayer):
    """Mixin of the three decoupled convolutions. Each inherits from this class, then from torch's convolution."""

    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
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
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[OperatorOptions],
    ) -> None:
        shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups)
        super().__init__(*shape, bias=bias, padding_mode=padding_mode, device=device, dtype=dtype)
        self._configure(options)

    def _check_shape(self, x: Tensor) -> None:
        dims, channels = self.weight.ndim, self.weight.shape[1] * self.groups
        fits = x.ndim in (dims - 1, dims) and x.shape[1 - dims] == channels
        require(fits, "x", f"a tensor with {dims - 1} or {dims} dimensions and {channels} channels", tuple(x.shape))

    def _inner_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(x, weight, bias)

    def _forward_any_shape(self, x: Tensor) -> Tensor:
        if x.ndim < self.weight.ndim:  # a single sample
            return self._forward_batch(x.unsqueeze(0)).squeeze(0)
        return self._forward_batch(x)

    def _input_and_geometry(self, x: Tensor) -> tuple[Tensor, ConvGeometry]:
        # Pairs (before, after) in reverse order of the dimensions, the order of F.pad.
        padding = self._reversed_padding_repeated_twice
        symmetric = tuple(padding[-2::-2])
        if self.padding_mode != "zeros" or padding[::2] != padding[1::2]:
            x = F.pad(x, padding, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)
            symmetric = (0,) * len(symmetric)
        return x, ConvGeometry(self.kernel_size, self.stride, symmetric, self.dilation, self.groups)


class DecoupledConv1d(_DecoupledConv, nn.Conv1d):
    r"""A decoupled convolution over sequences (N, C, L). The arguments are those of `DecoupledConv2d`.

    >>> DecoupledConv1d(4, 8, 3)(torch.randn(2, 4, 10)).shape
    torch.Size([2, 8, 8])
    """


class DecoupledConv2d(_DecoupledConv, nn.Conv2d):
    r"""A convolution whose filters respond by magnitude and angle (thesis, section 4.3; SphereConv is section 3.1).

        f(w, x) = h(‖w‖, ‖x‖)·g(θ(w, x)),   x a patch

    The first eight arguments, `padding_mode`, `device` and `dtype` are those of `torch.nn.Conv2d`, and so are the
    parameters. The bias is added to f. With `InnerProduct` and cosine the layer equals `torch.nn.Conv2d` exactly.

    The options of the operator:

    - `magnitude`: h, a name from `hypersphere.magnitude`, an instance of its classes, or a callable of (‖w‖, ‖x‖).
    - `angular`: g, a name from `hypersphere.angular`, an instance of its classes, or a callable of the cosine.
    - `weighting`: how ‖w‖ enters: None (not at all), "linear", or for Tanh "joint" or "separate".
    - `learn_k`: for a Sigmoid g: None, "layer", "filter", or the parameter returned by `shared_k`.
    - `learn_radius`: for Ball, Tanh and Seg: None, "layer" or "filter". A learned ρ is the product of a learned factor,
      which starts at the radius of the magnitude, and the mean patch norm of the group.
    - `radius_norm`: the mean patch norm used in training: "running" for the running mean, which has no gradient, or
      "batch" for the mean of the batch with its gradient, as in the code of the thesis' author. Evaluation mode
      uses the running mean.
    - `momentum`: weight of a new batch in the running mean.
    - `storage`: what is saved for backward in addition to the input: "full" for products in full precision, or "half"
      for 16 bits per response, see below.

    A zero patch gives h·g(π/2), with zero gradient through its direction. Products of patches and filters have the
    dtype of the input, so in half precision a cosine is as accurate as that dtype. Norms and angles are computed in
    float32 or wider. A patch is treated as zero if its norm is below 1e-16 times the largest entry of its sample. If h
    is unbounded, gradients are finite for patch norms up to 10¹⁹ in float32.

    Memory saved for backward: the input, as in `torch.nn.Conv2d`, plus the products, which have the size and dtype of
    the output, plus two numbers per patch and group. With 64 channels and filters at stride 1 this is twice the memory
    of `torch.nn.Conv2d`. With `storage="half"` the products take 16 bits each, so it is 1.5 times that memory; float32
    gradients are then rounded to about 2e-4 of their size, and to 1e-2 for an input within 0.1 rad of a filter.

    A user's callable, or a tensor as fixed k or radius, is computed with ordinary operations. They take up to 2.5 times
    as long as `torch.nn.Conv2d` and save several tensors of the size of the output.

    Example:
        >>> layer = DecoupledConv2d(3, 16, 3, padding=1, magnitude="tanh", learn_radius="layer")
        >>> layer(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 16, 8, 8])
    """


class DecoupledConv3d(_DecoupledConv, nn.Conv3d):
    r"""A decoupled convolution over volumes (N, C, D, H, W). The arguments are those of `DecoupledConv2d`.

    >>> DecoupledConv3d(2, 4, 3, padding="same")(torch.randn(1, 2, 5, 5, 5)).shape
    torch.Size([1, 4, 5, 5, 5])
    """


class _DecoupledRows(DecoupledLayer):
    """Mixin of decoupled layers that respond to rows (..., features)."""

    groups = 1

    def _check_shape(self, x: Tensor) -> None:
        features = self._filters.shape[1]
        fits = x.ndim > 0 and x.shape[-1] == features
        require(fits, "x", f"a tensor whose last dimension has {features} entries", tuple(x.shape))

    def _inner_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def _forward_any_shape(self, x: Tensor) -> Tensor:
        y = self._forward_batch(x.reshape(-1, x.shape[-1]))
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _input_and_geometry(self, x: Tensor) -> tuple[Tensor, ConvGeometry]:
        return x, ConvGeometry()


class DecoupledLinear(_DecoupledRows, nn.Linear):
    r"""A fully connected decoupled layer: a row is a patch. Further arguments are those of `DecoupledConv2d`.

    >>> layer = DecoupledLinear(2, 1, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 0.0]]))
    >>> layer(torch.tensor([[5.0, 0.0], [0.0, 2.0]]))
    tensor([[1.],
            [0.]], grad_fn=...)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[OperatorOptions],
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._configure(options)
