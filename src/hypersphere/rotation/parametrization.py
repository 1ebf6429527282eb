r"""The parametrisation of a rotated layer: W = V·Rᵀ with fixed neurons V and a learned rotation R (OPT, equation 1).

`Rotation` is a parametrisation in the sense of `torch.nn.utils.parametrize`: the layer stores V as
`parametrizations.weight.original`, and reading `layer.weight` calls `Rotation.forward(V)`.

How the weight is computed:

* `Layout` says how R is composed of blocks and factors, and cuts rows into the parts that each block acts on.
* `_RowRotation` applies a map of `hypersphere.orthogonal` to these parts: by its kernels, or by its expression.
* `Rotation` holds the parameters and a cache. `_CachedRotation` connects a cached weight to the autograd graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, require
from hypersphere.functions._rowmap import Residuals, RowMap, differentiable_gradients, kernels_usable
from hypersphere.functions.orthogonal import SkewMap

__all__ = ["Layout", "Rotation", "direction_norms", "require_finite", "restore_parameter_order"]

_ACTIVE_KEY = "active"  # state-dict key of the active parameter set, present if there are several sets
_SEED_KEY = "seed"  # state-dict key of the seed from which dimensions are drawn (S-OPT)


@dataclass(frozen=True)
class Layout:
    r"""How R is composed: R = Diag(R₁…R_k), or a product of `factors` such matrices (butterfly).

    The blocks of factor j act on entries that are b^j apart, where b = size/blocks is the block size.

    Args:
        size: d, the number of entries of a neuron.
        blocks: k, the number of blocks of each factor.
        shared: use one matrix for all blocks of a factor.
        factors: the number of factors.

    Example:
        >>> Layout(size=8, blocks=4, factors=3).block
        2
    """

    size: int
    blocks: int = 1
    shared: bool = False
    factors: int = 1

    def __post_init__(self) -> None:
        """Check that the blocks divide the neuron."""
        accepted = f"a divisor of {self.size}, the length of a neuron"
        require(is_integer(self.blocks, 1) and self.size % self.blocks == 0, "blocks", accepted, self.blocks)
        require(is_integer(self.factors, 1), "factors", "a whole number >= 1", self.factors)
        # The last factor connects entries b^(factors−1) apart, so a neuron must consist of groups of b^factors entries.
        reach = self.block**self.factors
        accepted = f"a number >= 1 with (d/blocks)^factors = {self.block}^factors dividing d = {self.size}"
        require(self.factors == 1 or self.size % reach == 0, "factors", accepted, self.factors)

    @property
    def block(self) -> int:
        """The block size b."""
        return self.size // self.blocks

    @property
    def matrices(self) -> int:
        """The number of learned b×b matrices."""
        return self.factors * (1 if self.shared else self.blocks)

    def expand(self, one: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return free parameters of all matrices, each equal to `one`: ([factors], [blocks], *one.shape)."""
        lead = [self.factors] if self.factors > 1 else []
        lead += [self.blocks] if self.blocks > 1 and not self.shared else []
        return one.expand(*lead, *one.shape).clone()

    def of_factor(self, free: Float[Tensor, "..."], j: int) -> Float[Tensor, "..."]:
        """Return the free parameters of factor j."""
        return free[j] if self.factors > 1 else free

    def split(self, rows: Float[Tensor, "n d"], j: int = 0) -> Float[Tensor, "..."]:
        """Cut rows into the parts that the blocks of factor j act on: (k, n, b), or (k·n, b) for a shared matrix."""
        if self.blocks == 1:
            return rows
        stride = self.block**j
        # Write the index of an entry in three digits, (outer, position, inner) with `inner` < stride. Entries that
        # differ only in `position` form a block, so (outer, inner) is the number of the block.
        parts = rows.reshape(rows.shape[0], -1, self.block, stride).permute(1, 3, 0, 2)
        return parts.reshape(-1, self.block) if self.shared else parts.reshape(self.blocks, rows.shape[0], self.block)

    def join(self, parts: Float[Tensor, "..."], n: int, j: int = 0) -> Float[Tensor, "n d"]:
        """Undo `split` for `n` rows."""
        if self.blocks == 1:
            return parts
        stride = self.block**j
        return parts.reshape(-1, stride, n, self.block).permute(2, 0, 3, 1).reshape(n, self.size)


@dataclass(frozen=True)
class _RowRotation:
    """Rows (n, d) → rotated rows: a map, its layout, and optionally the p of d entries that it acts on (S-OPT)."""

    method: RowMap
    layout: Layout
    dimensions: Tensor | None

    def expression(self, free: Tensor, rows: Tensor) -> Tensor:
        """Return the rotated rows in differentiable torch operations."""
        selected = rows if self.dimensions is None else rows.index_select(1, self.dimensions)
        for j in range(self.layout.factors):
            parts = self.method.expression(self.layout.of_factor(free, j), self.layout.split(selected, j))
            selected = self.layout.join(parts, rows.shape[0], j)
        return selected if self.dimensions is None else rows.index_copy(1, self.dimensions, selected)

    def forward_kernel(self, free: Tensor, rows: Tensor) -> tuple[Tensor, list[Residuals]]:
        """Return the rotated rows, and the residuals of every factor for `backward_kernel`."""
        selected = rows if self.dimensions is None else rows[:, self.dimensions]
        residuals = []
        for j in range(self.layout.factors):
            parts, saved = self.method.forward_kernel(self.layout.of_factor(free, j), self.layout.split(selected, j))
            selected = self.layout.join(parts, rows.shape[0], j)
            residuals.append(saved)
        return self._insert(selected, rows), residuals

    def backward_kernel(
        self, residuals: list[Residuals], grad: Tensor, *, needs_rows: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the free parameters and of the rows (None unless `needs_rows`)."""
        selected = grad if self.dimensions is None else grad[:, self.dimensions]
        grads_free: list[Tensor] = []
        for j in reversed(range(self.layout.factors)):
            # The gradient of the rows is the input of the previous factor. That of the first factor goes to the caller.
            grad_free, grad_parts = self.method.backward_kernel(
                residuals[j], self.layout.split(selected, j), rows=needs_rows or j > 0
            )
            grads_free.insert(0, grad_free)
            if grad_parts is not None:
                selected = self.layout.join(grad_parts, grad.shape[0], j)
        grad_free = torch.stack(grads_free) if self.layout.factors > 1 else grads_free[0]
        return grad_free, self._insert(selected, grad) if needs_rows else None

    def _insert(self, selected: Tensor, rows: Tensor) -> Tensor:
        """Return `rows` with the entries at `dimensions` replaced."""
        if self.dimensions is None:
            return selected
        result = rows.clone()
        result[:, self.dimensions] = selected
        return result


@dataclass
class _CachedWeight:
    """A rotated weight and what it was computed from."""

    inputs: tuple[Tensor, ...]  # copies of the free parameters, the neurons and the drawn dimensions
    weight: Tensor
    version: int  # of `weight`, to notice in-place writes to it
    kernel: _RowRotation
    residuals: list[Residuals] | None
    # The weight as a node of the autograd graph, and the graph inputs it is connected to.
    node: Tensor | None = None
    node_key: tuple[int, int, bool, bool] | None = None


class Rotation(nn.Module):
    r"""Rotate the neurons of one layer: W = V·Rᵀ, R from free parameters (OPT, section 3).

    The weight is cached. Parameters, neurons and dimensions are compared with the copies that the cached weight was
    computed from, value by value. So every write to them is noticed, including writes through `.data`, as in
    `torch.distributed.broadcast(p.data)`. The comparison reads each tensor once per forward pass, which is much cheaper
    than the rotation. All readers share the returned weight. An in-place operation on it is undone at the next read; a
    write to it through `.data` is not noticed.

    The autograd node of a cached weight stores the residuals of the kernel instead of saved tensors, so the weight can
    be read many times and differentiated by several `backward` calls per step. In `eval` mode without gradients, the
    residuals are not stored. Compiled graphs, tracers and `torch.func` transforms bypass the cache and compute the
    rotation in every call. Call `fold_` before compiling for inference.

    Args:
        method: an object of `hypersphere.orthogonal` or `hypersphere.transform`.
        layout: blocks and factors of R.
        dimensions: the p entries of each neuron that are rotated, all of them if None (S-OPT).
        seed: the seed from which `dimensions` are drawn again later (S-OPT).
        like: a tensor whose dtype and device the free parameters take.
    """

    dimensions: Tensor | None
    seed: Tensor | None
    original_state: tuple[bool, tuple[str, ...]]
    """`requires_grad` of the weight before it was rotated, and the order of the parameters of the layer."""

    def __init__(
        self,
        method: RowMap,
        layout: Layout,
        *,
        dimensions: Int[Tensor, " p"] | None = None,
        seed: int | None = None,
        like: Float[Tensor, "..."],
    ) -> None:
        super().__init__()
        self.method = method
        self.layout = layout
        self.active = "main"
        self.layer_name = ""
        self.free = nn.ParameterDict()
        self.register_buffer("dimensions", dimensions)
        self.register_buffer(_SEED_KEY, None if seed is None else torch.tensor(seed, device=like.device))
        self.free["main"] = nn.Parameter(layout.expand(method.identity(layout.block)).to(like))
        self._cache: _CachedWeight | None = None

    @property
    def decay_free_parameters(self) -> tuple[str, ...]:
        """The names of the parameters that weight decay would pull away from a rotation."""
        return tuple(f"free.{name}" for name in self.free)

    @property
    def parameter(self) -> nn.Parameter:
        """The active set of free parameters."""
        return self.free[self.active]

    def identity(self) -> Float[Tensor, "..."]:
        """Return the free parameters of R = I."""
        return self.layout.expand(self.method.identity(self.layout.block)).to(self.parameter)

    def matrices(self) -> Float[Tensor, "*blocks b b"]:
        """Return the active matrices: (d, d), or one per block and factor."""
        return self.method(self.parameter.detach())

    def degrees_of_freedom(self) -> int:
        """Return the dimension of the set of all R that training can reach, summed over trained parameter sets."""
        trained_sets = sum(p.requires_grad for p in self.free.values())
        return trained_sets * self.layout.matrices * self.method.degrees_of_freedom(self.layout.block)

    def direction_norms(self) -> dict[str, Float[Tensor, "..."]]:
        """Return the row norms of a random direction in parameter space, for loss landscapes."""
        return {f"free.{name}": direction_norms(self.method, free) for name, free in self.free.items()}

    def add(self, name: str) -> None:
        """Add a set of free parameters that starts at R = I."""
        fits = isinstance(name, str) and name.isidentifier() and not hasattr(self.free, name)
        require(fits, "name", "an identifier that is not yet in use, nor an attribute of ParameterDict", name)
        self.free[name] = nn.Parameter(self.identity())

    def use(self, name: str) -> None:
        """Make this set of free parameters the active one. The state dict stores the choice."""
        require(name in self.free, "name", "one of " + ", ".join(map(repr, self.free)), name)
        self.active = name

    def forward(self, neurons: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Return the rotated weight, with the shape, dtype and memory format of `neurons`."""
        free = self.parameter
        if not kernels_usable(free, neurons):
            return _weight_expression(_RowRotation(self.method, self.layout, self.dimensions), free, neurons)
        needs_graph = torch.is_grad_enabled() and (free.requires_grad or neurons.requires_grad)
        cached = self._cached_weight(free, neurons, keep_residuals=needs_graph or self.training)
        if not needs_graph:
            return cached.weight
        # Gradients must reach the tensors of this call. `functional_call` may have replaced the parameters by others of
        # equal value. The node holds references to its inputs, so their ids cannot be reused while it is cached.
        key = (id(free), id(neurons), free.requires_grad, neurons.requires_grad)
        if cached.node is None or cached.node_key != key:
            cached.node, cached.node_key = _CachedRotation.apply(cached, free, neurons), key
        return cached.node

    def _cached_weight(self, free: Tensor, neurons: Tensor, *, keep_residuals: bool) -> _CachedWeight:
        """Return the cached weight if it is valid, or compute it."""
        inputs = (free, neurons) if self.dimensions is None else (free, neurons, self.dimensions)
        cached = self._cache
        if (
            cached is not None
            and (cached.residuals is not None or not keep_residuals)
            and cached.weight._version == cached.version
            and len(cached.inputs) == len(inputs)
            and all(_same_values(copy, current) for copy, current in zip(cached.inputs, inputs, strict=True))
        ):
            return cached
        # The copies have two purposes: residuals refer to them, so that a later optimiser step does not change the
        # residuals, and the next read compares them with its inputs. The cache may be filled in inference mode and read
        # in training, and inference tensors cannot be part of a graph, hence inference_mode(False).
        with torch.inference_mode(False), torch.no_grad(), _numerics.autocast_disabled(neurons):
            copies = tuple(tensor.detach().clone() for tensor in inputs)
            kernel = _RowRotation(self.method, self.layout, copies[2] if len(copies) > 2 else None)
            with self._prefix_errors_with_layer_name():
                require_finite(free)
                rows, residuals = kernel.forward_kernel(
                    _numerics.widen(copies[0]), _numerics.widen(copies[1]).flatten(1)
                )
            weight = _numerics.narrow(rows, neurons.dtype).view(neurons.shape)
            if not neurons.is_contiguous():  # such as channels_last
                weight = torch.empty_like(neurons).copy_(weight)
        self._cache = _CachedWeight(copies, weight, weight._version, kernel, residuals if keep_residuals else None)
        return self._cache

    @torch.no_grad()
    def fold(self, neurons: Float[Tensor, "n ..."]) -> None:
        """Replace the neurons by the rotated neurons, computed in float64, and restart from R = I."""
        require(len(self.free) == 1, "model", "rotated by one set of parameters to fold and continue", list(self.free))
        kernel = _RowRotation(self.method, self.layout, self.dimensions)
        with self._prefix_errors_with_layer_name():
            require_finite(self.parameter)
            rows, _ = kernel.forward_kernel(
                _numerics.to_float64(self.parameter), _numerics.to_float64(neurons.flatten(1))
            )
        neurons.copy_(_numerics.narrow(rows, neurons.dtype).view_as(neurons))
        self.parameter.copy_(self.identity())

    @contextmanager
    def _prefix_errors_with_layer_name(self) -> Iterator[None]:
        """Prefix errors with the name of the layer."""
        try:
            yield
        except ValueError as error:
            if not self.layer_name:
                raise
            raise ValueError(f"layer {self.layer_name!r}: {error}") from None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if len(self.free) > 1:  # stored as a tensor, because some file formats hold nothing else
            destination[prefix + _ACTIVE_KEY] = torch.tensor(list(self.active.encode()), dtype=torch.uint8)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        saved = state_dict.pop(prefix + _ACTIVE_KEY, None)
        active = self.active if saved is None else bytes(saved.tolist()).decode()
        if active in self.free:
            self.active = active
        else:  # an error even if strict=False, because the weight would silently be a different one
            existing = ", ".join(map(repr, self.free))
            error_msgs.append(
                f"{prefix}: saved with the set of rotations {active!r} in use, but there is only {existing}: "
                f"call use(model, {active!r}) before loading"
            )
        if self.seed is not None:  # version 0.1 did not store the seed
            state_dict.setdefault(prefix + _SEED_KEY, self.seed)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": None}  # copies and pickles compute their weight again

    def extra_repr(self) -> str:
        """Show the map and its layout."""
        return f"{self.method!r}, {self.layout!r}"


class _CachedRotation(torch.autograd.Function):
    """Connect a cached weight to its free parameters and neurons in the autograd graph.

    Nothing is stored through `save_for_backward`, whose tensors are freed by the first backward pass: the same node
    may be differentiated several times.
    """

    @staticmethod
    def forward(ctx: Any, cached: _CachedWeight, free: Tensor, neurons: Tensor) -> Tensor:
        ctx.kernel, ctx.residuals = cached.kernel, cached.residuals
        ctx.inputs, ctx.versions = (free, neurons), (free._version, neurons._version)
        return cached.weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        free, neurons = ctx.inputs
        _, *needs = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True: the gradients must themselves be differentiable
            # First derivatives use residuals, which are copies. Second derivatives use the inputs themselves, so these
            # must still have the values of the forward pass.
            if ctx.versions != (free._version, neurons._version):
                raise RuntimeError("a rotated layer was changed between forward and a backward with create_graph=True")
            expression = partial(_weight_expression, ctx.kernel)
            return None, *differentiable_gradients(expression, ctx.inputs, needs, grad)
        with _numerics.autocast_disabled(grad):
            grad_rows = _numerics.widen(grad).flatten(1)
            grad_free, grad_neurons = ctx.kernel.backward_kernel(ctx.residuals, grad_rows, needs_rows=needs[1])
        return (
            None,
            _numerics.narrow(grad_free, free.dtype),
            None if grad_neurons is None else _numerics.narrow(grad_neurons, neurons.dtype).view(neurons.shape),
        )


def _weight_expression(kernel: _RowRotation, free: Tensor, neurons: Tensor) -> Tensor:
    """Return the rotated weight in differentiable torch operations, computed in float32 or wider."""
    with _numerics.autocast_disabled(neurons):
        rows = kernel.expression(_numerics.widen(free), _numerics.widen(neurons).flatten(1))
        return _numerics.narrow(rows, neurons.dtype).view(neurons.shape)


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Return True if both tensors have the same dtype, device, shape and values."""
    if a.dtype != b.dtype or a.device != b.device or a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach()
    # Comparing the memory as 64-bit integers takes half the time of comparing float32 values one by one.
    per_word = 8 // a.element_size()
    if all(_is_viewable_as_words(x, per_word) for x in (a, b)):
        a, b = a.view(-1).view(torch.int64), b.view(-1).view(torch.int64)
    return torch.equal(a, b)


def _is_viewable_as_words(x: Tensor, per_word: int) -> bool:
    """Return True if the memory of a plain tensor consists of whole and aligned 64-bit words."""
    is_aligned = x.numel() % per_word == 0 and x.storage_offset() % per_word == 0
    return type(x) is Tensor and x.is_contiguous() and is_aligned


def direction_norms(method: RowMap, free: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r"""Return the norms (…, 1) that rows of a random direction in parameter space get, for loss landscapes.

    Rows of a matrix P get the norms of P. The parameters of a skew S get √(d/2), so that ‖S‖_F = √d as for R.
    """
    if isinstance(method, SkewMap):
        return free.new_full((*free.shape[:-1], 1), math.sqrt(method.size(free) / 2))
    return sphere.norm(free.detach(), keepdim=True)


def restore_parameter_order(module: nn.Module, order: tuple[str, ...]) -> None:
    """Sort the parameters of a module. A saved optimiser state refers to parameters by their position."""
    for name in order:
        module._parameters[name] = module._parameters.pop(name)


def require_finite(free: Float[Tensor, "..."]) -> None:
    """Raise a `ValueError` if a parameter of a rotation is not finite."""
    free = free.detach()  # activation checkpointing counts the operations that autograd records
    if _numerics.values_readable(free) and not bool(torch.isfinite(free).all()):
        bad = int((~torch.isfinite(free)).sum())
        raise ValueError(f"the parameters of a rotation must be finite, but {bad} of {free.numel()} are not")
