r"""Decoupled layers: f(w, x) = h(‖w‖, ‖x‖)·g(θ(w, x)) instead of the inner product (thesis, section 4.3).

Each layer takes the arguments of torch's layer of the same kind and has the same parameters and state dict. Unlike in
torch, `padding_mode`, `device` and `dtype` are keyword-only. A learned k or ρ adds parameters and buffers, so a
checkpoint of torch's layer is loaded into such a layer with `strict=False`.

**The path of a forward pass** has four files. `DecoupledLayer.forward` checks the input and calls
`choose_implementation`. An inner product is computed by torch's layer. For all other responses, `_to_batch` makes a
batch of the input, and `_forward_batch` computes them: `_geometry` measures patches and filters, `_operator` inserts
the learned k and ρ into h and g, and `_fused_op` evaluates them, with a custom operator or with ordinary operations.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
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
from hypersphere._validation import choose, is_number, nearest_name, require
from hypersphere.functions._entries import fields_on_device
from hypersphere.functions.angular import ANGULARS, Sigmoid
from hypersphere.functions.magnitude import MAGNITUDES, Ball, Seg, Tanh, weighted
from hypersphere.layers._fused_op import fused_forward, reference_forward
from hypersphere.layers._geometry import ConvGeometry, filter_polar, measure_patches
from hypersphere.layers._operator import (
    AngularFunction,
    LearnedRadius,
    MagnitudeFunction,
    absorb_response_factor,
    check_learn_radius,
    choose_implementation,
    initial_log_k,
    inner_product_filters,
    is_factorable,
    operator_spec,
    with_learned_k,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "DEFAULT_OPTIONS",
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledLayer",
    "DecoupledLinear",
    "OperatorOptions",
    "RowLayer",
    "SlidingWindowLayer",
    "require_known_options",
    "shared_k",
]


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


def require_known_options(owner: str, options: OperatorOptions, others: Iterable[str] = ()) -> None:
    """Raise a `TypeError` that suggests the nearest option for an unknown one. TypedDicts are not checked at run time.

    Args:
        owner: the class or function that was called, for the message.
        options: its keywords.
        others: names of further options of the owner that may be suggested.
    """
    for name in options.keys() - DEFAULT_OPTIONS.keys():
        near = nearest_name(name, [*DEFAULT_OPTIONS, *others], {"angle": "angular"})
        raise TypeError(f"{owner} has no option {name!r}{near}")


# For type checkers only. At run time the second base class of each layer, torch's layer, provides these attributes.
if TYPE_CHECKING:

    class _TorchLayer(nn.Module):
        """What `DecoupledLayer` uses of torch's layer."""

        weight: Tensor
        bias: Any

        def reset_parameters(self) -> None: ...

else:
    _TorchLayer = nn.Module


class DecoupledLayer(_TorchLayer, abc.ABC):
    r"""Mixin that makes a layer of torch decoupled.

    A decoupled layer inherits from this class first and from torch's layer second, so that `super()` is torch's layer.
    It calls `_configure` at the end of its constructor and defines `_check_shape`, `_inner_product`, `_to_batch` and
    `_from_batch`, the four methods in which convolutions and linear layers differ.

    A learned k is stored as its logarithm, `log_k`, with one entry or one per filter. `LearnedRadius` describes the
    tensors of a learned ρ.
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
    _radius: LearnedRadius | None

    @property
    def _weight_as_filters(self) -> Tensor:
        """The weight as (filters, channels per group, *kernel). Layers that store it in another order override this."""
        return self.weight

    def _filters_as_weight(self, filters: Tensor) -> Tensor:
        """Return filters in the order of `weight`: the inverse of `_weight_as_filters`."""
        return filters

    # Forward ---------------------------------------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Float[Tensor, "..."]:  # the name of torch, for calls by keyword
        """Return the responses to `input`.

        A convolution maps (N, channels, *size) or (channels, *size) to (N, filters, *places) or (filters, *places), a
        linear layer maps (..., in_features) to (..., out_features).
        """
        x = input
        is_real = isinstance(x, Tensor) and x.is_floating_point()
        require(is_real, "input", "a tensor of a floating-point dtype", x.dtype if isinstance(x, Tensor) else type(x))
        autocast_dtype = _autocast_dtype(x)
        # The cast below does what autocast would do to products. It must not apply to norms and angles.
        with _numerics.autocast_disabled(x):
            filters = self._weight_as_filters  # the only read of the weight: a parametrisation computes it each time
            if not is_tracing():  # `torch.jit.trace` warns about comparisons of sizes
                self._check_shape(x, filters.shape[1])
            dtype = torch.promote_types(x.dtype, filters.dtype) if autocast_dtype is None else autocast_dtype
            x = x.to(dtype)
            learned = {"learns_radius": self.log_radius is not None, "learns_k": self.log_k is not None}
            implementation = choose_implementation(self.magnitude, self.angular, x, filters, **learned)
            if implementation == "torch":
                weight = inner_product_filters(self.magnitude, self.weighting, filters)
                return self._inner_product(x, weight.to(dtype), None if self.bias is None else self.bias.to(dtype))
            batch, geometry = self._to_batch(x)
            y = self._forward_batch(batch, geometry, filters, fused=implementation == "fused")
            return self._from_batch(y, x)

    @abc.abstractmethod
    def _check_shape(self, x: Tensor, filter_channels: int) -> None:
        """Raise a `ValueError` unless `x` has the right dimensions and the right number of channels or features.

        `filter_channels` is the number of channels or features of one group, which each filter sees.
        """

    @abc.abstractmethod
    def _inner_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ⟨w, x⟩ + b, computed as torch's layer does."""

    @abc.abstractmethod
    def _to_batch(self, x: Tensor) -> tuple[Tensor, ConvGeometry]:
        """Return an input of any accepted shape as a batch (N, channels, *size), and the geometry of its patches.

        Padding that is asymmetric or not with zeros is applied to the batch.
        """

    def _forward_batch(self, x: Tensor, geometry: ConvGeometry, filters: Tensor, *, fused: bool) -> Tensor:
        """Return f(w, x) + b (N, filters, *places) for a batch (N, channels, *size)."""
        w_norm, w_hat = filter_polar(filters)
        w_norm = geometry.per_filter(w_norm)
        # The custom operator differentiates the norms itself, so they need no graph.
        patches = measure_patches(x, geometry, with_graph=not fused)
        # h and g with the learned numbers for this batch. ρ depends on the patch norms, so it comes after them.
        g = with_learned_k(self.angular, self.log_k, geometry)
        radius = None if self._radius is None else self._radius.for_batch(self, x, geometry, patches.norm)
        h: Callable[[Tensor], Tensor | None]
        if is_factorable(self.magnitude, learns_radius=radius is not None):
            spec, patches = operator_spec(self.magnitude, g, self.weighting, w_norm, radius, patches)
            # Products in half precision take 16 bits already, and float64 is used where precision matters.
            saves_cotangents = fused and self.storage == "half" and patches.x.dtype == torch.float32
            if not saves_cotangents:  # a cotangent is computed from a cosine, so the filters must stay unit vectors
                spec, w_hat = absorb_response_factor(spec, w_hat, patches)
            if fused:
                y = fused_forward(patches, w_hat, geometry, spec, saves_cotangents=saves_cotangents)
                return y if self.bias is None else y.add_(self._shaped_bias(y))  # backward does not need y
            h = spec.h
        else:  # a user's function of both norms
            magnitude = self.magnitude
            if radius is not None:
                # `check_learn_radius` accepts subclasses, which `is_factorable` rejects.
                assert isinstance(magnitude, (Ball, Tanh, Seg))
                magnitude = replace(magnitude, radius=radius.log.exp())
            h = partial(weighted(magnitude, self.weighting), w_norm)
        y = reference_forward(patches, w_hat, geometry, h, g)
        return y if self.bias is None else y + self._shaped_bias(y)

    def _shaped_bias(self, y: Tensor) -> Tensor:
        return self.bias.to(y.dtype).reshape(-1, *[1] * (y.ndim - 2))

    @abc.abstractmethod
    def _from_batch(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the responses (N, filters, *places) in the shape that belongs to the input `x` of the layer."""

    # Settings --------------------------------------------------------------------------------------------------------

    def _configure(self, options: OperatorOptions) -> None:
        """Check all options, then store them. Nothing is stored if one of them is invalid."""
        require_known_options(type(self).__name__, options)
        settings = OperatorOptions(**{**DEFAULT_OPTIONS, **options})
        magnitude = choose(MAGNITUDES, settings["magnitude"], "magnitude")
        angular = choose(ANGULARS, settings["angular"], "angular")
        weighted(magnitude, settings["weighting"])  # raises an error if the weighting is not defined for the magnitude
        # The other checks also come before the first assignment.
        radius_norm, momentum, storage = settings["radius_norm"], settings["momentum"], settings["storage"]
        require(radius_norm in ("running", "batch"), "radius_norm", "'running' or 'batch'", radius_norm)
        require(is_number(momentum, 0, 1) and momentum > 0, "momentum", "a number in (0, 1]", momentum)
        require(storage in ("full", "half"), "storage", "'full' or 'half'", storage)
        learn_k, learn_radius = settings["learn_k"], settings["learn_radius"]
        log_k = initial_log_k(angular, learn_k, self._weight_as_filters)
        check_learn_radius(magnitude, learn_radius)
        self.magnitude, self.angular, self.weighting = magnitude, angular, settings["weighting"]
        self.radius_norm, self.momentum, self.storage = radius_norm, momentum, storage
        self.log_k, self.log_radius, self._radius = log_k, None, None
        # Keep the initial value of a user's parameter for `reset_parameters`; it may differ from the k of g. It has no
        # value on the meta device.
        is_given = isinstance(learn_k, nn.Parameter) and not learn_k.is_meta
        self._given_log_k = learn_k.detach().clone() if is_given else None  # type: ignore[union-attr]
        if learn_radius is not None:
            assert isinstance(magnitude, (Ball, Tanh, Seg))  # `check_learn_radius` refuses others
            self._radius = LearnedRadius.attach_to(self, magnitude.radius, learn_radius)

    def _remove_configuration(self) -> None:
        """Undo `_configure`."""
        # `delattr` of a module also removes parameters and buffers.
        added = ("log_k", "log_radius", "_given_log_k", "mean_norm", "num_batches_tracked", "_radius")
        for name in (*DEFAULT_OPTIONS, *added):
            if hasattr(self, name):
                delattr(self, name)

    def reset_parameters(self) -> None:
        """Reinitialise the weight, and reset k, the radius and its running mean to their initial values."""
        super().reset_parameters()
        # torch's constructor calls this method before `_configure` has set anything.
        log_k, radius = self._parameters.get("log_k"), self.__dict__.get("_radius")
        with torch.no_grad():
            if log_k is not None and isinstance(self.angular, Sigmoid):
                start = torch.as_tensor(self.angular.k).log()
                log_k.copy_(start if self._given_log_k is None else self._given_log_k)
            if radius is not None:
                radius.reset_(self, self.magnitude.radius)  # type: ignore[attr-defined]

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
        # torch passes a copy of the user's dictionary, so its entries may be replaced.
        if prefix + "batches" in state_dict and hasattr(self, "num_batches_tracked"):
            state_dict[prefix + "num_batches_tracked"] = state_dict.pop(prefix + "batches")
        for name in ("log_k", "log_radius", "mean_norm", "num_batches_tracked"):
            stored, current = state_dict.get(prefix + name), getattr(self, name, None)
            if stored is not None and current is not None and stored.ndim == 0 and current.ndim == 1:
                state_dict[prefix + name] = stored.expand(current.shape).clone()
        super()._load_from_state_dict(state_dict, prefix, *args)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives to products with `x`, or None if it does not change them."""
    # torch's autocast leaves float64 inputs alone, too.
    device = x.device.type
    if x.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


# The layers ----------------------------------------------------------------------------------------------------------


class SlidingWindowLayer(DecoupledLayer):
    """Mixin of decoupled layers with a kernel: convolutions and transposed convolutions."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    def _check_shape(self, x: Tensor, filter_channels: int) -> None:
        dims, channels = len(self.kernel_size) + 2, filter_channels * self.groups
        fits = x.ndim in (dims - 1, dims) and x.shape[1 - dims] == channels
        require(fits, "input", f"a tensor with {dims - 1} or {dims} dimensions and {channels} channels", tuple(x.shape))

    def _is_single_sample(self, x: Tensor) -> bool:
        return x.ndim < len(self.kernel_size) + 2


class _DecoupledConv(SlidingWindowLayer):
    """Mixin of the three decoupled convolutions. Each inherits from this class, then from torch's convolution."""

    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
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

    def _inner_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(x, weight, bias)

    def _to_batch(self, x: Tensor) -> tuple[Tensor, ConvGeometry]:
        batch = x.unsqueeze(0) if self._is_single_sample(x) else x
        # Pairs (before, after) in reverse order of the dimensions, the order of F.pad.
        padding = self._reversed_padding_repeated_twice
        symmetric = tuple(padding[-2::-2])
        # `ConvGeometry` pads with the same number of zeros on both sides. Other padding is applied to the batch here.
        if self.padding_mode != "zeros" or padding[::2] != padding[1::2]:
            batch = F.pad(batch, padding, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)
            symmetric = (0,) * len(symmetric)
        return batch, ConvGeometry(self.kernel_size, self.stride, symmetric, self.dilation, self.groups)

    def _from_batch(self, y: Tensor, x: Tensor) -> Tensor:
        return y.squeeze(0) if self._is_single_sample(x) else y


class DecoupledConv1d(_DecoupledConv, nn.Conv1d):
    r"""A decoupled convolution over sequences (N, C, L). The arguments are those of `DecoupledConv2d`.

    >>> DecoupledConv1d(4, 8, 3)(torch.randn(2, 4, 10)).shape
    torch.Size([2, 8, 8])
    """


class DecoupledConv2d(_DecoupledConv, nn.Conv2d):
    r"""A convolution whose filters respond by magnitude and angle (thesis, section 4.3; SphereConv is section 3.1).

        f(w, x) = h(‖w‖, ‖x‖)·g(θ(w, x)),   x a patch

    The bias is added to f. With `InnerProduct` and cosine the layer equals `torch.nn.Conv2d` exactly.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias: as in `torch.nn.Conv2d`.
        padding_mode, device, dtype: as in `torch.nn.Conv2d`, but keyword-only.
        magnitude: h, a name from `hypersphere.magnitude`, an instance of its classes, or a callable of (‖w‖, ‖x‖).
        angular: g, a name from `hypersphere.angular`, an instance of its classes, or a callable of the cosine.
        weighting: how ‖w‖ enters: None (not at all), "linear", or for Tanh "joint" or "separate".
        learn_k: for a Sigmoid g: None, "layer", "filter", or the parameter returned by `shared_k`.
        learn_radius: for Ball, Tanh and Seg: None, "layer" or "filter". A learned ρ is the product of a learned
            relative radius, which starts at the radius of the magnitude, and the mean patch norm of the group.
        radius_norm: the mean patch norm used in training: "running" for the running mean, which has no gradient, or
            "batch" for the mean of the batch with its gradient, as in the code of the thesis' author. Evaluation mode
            uses the running mean.
        momentum: weight of a new batch in the running mean.
        storage: what is saved for backward in addition to the input: "full" for products in full precision, or "half"
            for 16 bits per response, see below.

    A zero patch gives h·g(π/2), with zero gradient through its direction. Products of patches and filters have the
    dtype of the input, so in half precision a cosine is as accurate as that dtype. Norms and angles are computed in
    float32 or wider. A patch is treated as zero if its norm is below 3.1e-16 in float32 and bfloat16, or 1.0e-146 in
    float64. If the largest entry of a sample is below this bound, or above 6.4e15 or 2.0e146, the sample is scaled to a
    largest entry between ½ and 1 first, and the bound is relative to that entry. Float16 samples are always scaled. If
    h is unbounded, gradients are finite for patch norms up to 10¹⁹ in float32.

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


class RowLayer(DecoupledLayer):
    """Mixin of decoupled layers that respond to rows (..., features)."""

    groups = 1  # an attribute that convolutions have; here all filters see the same rows

    def _check_shape(self, x: Tensor, filter_channels: int) -> None:
        fits = x.ndim > 0 and x.shape[-1] == filter_channels
        require(fits, "input", f"a tensor whose last dimension has {filter_channels} entries", tuple(x.shape))

    def _inner_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def _to_batch(self, x: Tensor) -> tuple[Tensor, ConvGeometry]:
        return x.reshape(-1, x.shape[-1]), ConvGeometry()  # no spatial dimensions: each row is one patch

    def _from_batch(self, y: Tensor, x: Tensor) -> Tensor:
        return y.reshape(*x.shape[:-1], y.shape[-1])


class DecoupledLinear(RowLayer, nn.Linear):
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
