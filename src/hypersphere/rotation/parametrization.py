r"""The parametrisation of a rotated layer: W = V·Rᵀ with fixed neurons V and a learned rotation R (OPT, equation 1).

`Rotation` is a parametrisation in the sense of `torch.nn.utils.parametrize`: the layer stores V as
`parametrizations.weight.original`, and reading `layer.weight` calls `Rotation.forward(V)`, which applies a map of
`hypersphere.orthogonal` to the rows of V and caches the result:

    layer.weight  →  Rotation.forward  →  method.forward_kernel(free, V)
    W.backward    →  _RotatedWeight    →  method.backward_kernel(residuals, G)

`BlockLayout` cuts the rows into the parts that the map acts on. With one block, these are the rows themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._deprecation import deprecated_attribute, deprecated_names
from hypersphere._validation import is_integer, require
from hypersphere.functions._autograd import differentiable_gradients
from hypersphere.functions._rowmap import Residuals, RowMap, kernels_usable
from hypersphere.functions.orthogonal import SkewMap

__all__ = ["BlockLayout", "Rotation", "WeightState"]

__getattr__ = deprecated_names(__name__, {"Layout": "hypersphere.rotation:BlockLayout"})  # named in saved modules


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
    original_state: WeightState  # set when the rotation is attached to a layer

    def __init__(
        self,
        method: RowMap,
        layout: BlockLayout,
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
        self.register_buffer("seed", None if seed is None else torch.tensor(seed, device=like.device))
        self.free["main"] = nn.Parameter(layout.expand(method.identity(layout.block_size)).to(like))
        self._cache: _CachedWeight | None = None

    # The weight ------------------------------------------------------------------------------------------------------

    def forward(self, neurons: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Return the rotated weight, with the shape, dtype and memory format of `neurons`."""
        free = self.parameter
        if not kernels_usable(free, neurons):
            return _weight_expression(self.method, self.layout, self.dimensions, free, neurons)
        inputs = (free, neurons, self.dimensions)
        needs_graph = torch.is_grad_enabled() and (free.requires_grad or neurons.requires_grad)
        keep_residuals = needs_graph or self.training
        if self._cache is None or not self._cache.is_valid(inputs, needs_residuals=keep_residuals):
            self._cache = self._compute(inputs, keep_residuals=keep_residuals)
        return self._cache.connect(self.method, self.layout, free, neurons) if needs_graph else self._cache.weight

    def _compute(self, inputs: tuple[Tensor, Tensor, Tensor | None], *, keep_residuals: bool) -> _CachedWeight:
        """Compute the weight by the kernels of the map."""
        residuals: list[Residuals] = []

        def rotate_parts(free: Tensor, parts: Tensor) -> Tensor:
            rotated, saved = self.method.forward_kernel(free, parts)
            residuals.append(saved)
            return rotated

        free, neurons, dimensions = inputs
        self.require_finite()
        # The copies have two purposes: residuals refer to them, so that a later optimiser step does not change the
        # residuals, and the next read compares them with its inputs. The cache may be filled in inference mode and read
        # in training, and inference tensors cannot be part of a graph, hence inference_mode(False).
        with torch.inference_mode(False), torch.no_grad(), _numerics.autocast_disabled(neurons):
            copies = free.detach().clone(), neurons.detach().clone(), None if dimensions is None else dimensions.clone()
            wide_free, wide_rows = _numerics.widen(copies[0]), _numerics.widen(copies[1]).flatten(1)
            with self._layer_named_in_errors():
                rows = self.layout.rotate(rotate_parts, wide_free, wide_rows, copies[2])
            weight = _numerics.narrow(rows, neurons.dtype).view(neurons.shape)
            if not neurons.is_contiguous():  # such as channels_last
                weight = torch.empty_like(neurons).copy_(weight)
        return _CachedWeight(copies, weight, weight._version, residuals if keep_residuals else None)

    @torch.no_grad()
    def fold(self, neurons: Float[Tensor, "n ..."]) -> None:
        """Replace the neurons by the rotated neurons, computed in float64, and restart from R = I."""
        require(len(self.free) == 1, "model", "rotated by one set of parameters to fold and continue", list(self.free))
        self.require_finite()
        free, rows = _numerics.to_float64(self.parameter), _numerics.to_float64(neurons.flatten(1))
        dimensions = None if self.dimensions is None else self.dimensions.to(rows.device)
        with self._layer_named_in_errors():
            rows = self.layout.rotate(self.method, free, rows, dimensions)
        neurons.copy_(_numerics.narrow(rows, neurons.dtype).view_as(neurons))
        self.parameter.copy_(self.identity())

    def require_finite(self) -> None:
        """Raise a `ValueError` if a free parameter is not finite."""
        free = self.parameter.detach()  # activation checkpointing counts the operations that autograd records
        if _numerics.values_readable(free) and not bool(torch.isfinite(free).all()):
            bad = int((~torch.isfinite(free)).sum())
            with self._layer_named_in_errors():
                raise ValueError(f"the parameters of a rotation must be finite, but {bad} of {free.numel()} are not")

    @contextmanager
    def _layer_named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            if not self.layer_name:
                raise
            raise ValueError(f"layer {self.layer_name!r}: {error}") from None

    # The free parameters ---------------------------------------------------------------------------------------------

    @property
    def parameter(self) -> nn.Parameter:
        """The active set of free parameters."""
        return self.free[self.active]

    @property
    def decay_free_parameters(self) -> tuple[str, ...]:
        """The names of the parameters that weight decay would pull away from a rotation."""
        return tuple(f"free.{name}" for name in self.free)

    def identity(self) -> Float[Tensor, "..."]:
        """Return the free parameters of R = I."""
        return self.layout.expand(self.method.identity(self.layout.block_size)).to(self.parameter)

    def matrices(self) -> Float[Tensor, "*blocks b b"]:
        """Return the active matrices: (d, d), or one per block and factor."""
        return self.method(self.parameter.detach())

    def degrees_of_freedom(self) -> int:
        """Return the dimension of the set of all R that training can reach, summed over trained parameter sets."""
        trained_sets = sum(p.requires_grad for p in self.free.values())
        return trained_sets * self.layout.matrix_count * self.method.degrees_of_freedom(self.layout.block_size)

    def direction_norms(self) -> dict[str, Float[Tensor, "..."]]:
        r"""Return the norms (…, 1) that rows of a random direction in parameter space get, for loss landscapes.

        Rows of a matrix P get the norms of P. The parameters of a skew S get √(d/2), so that ‖S‖_F = √d as for R.
        """
        if isinstance(self.method, SkewMap):
            norm = math.sqrt(self.layout.block_size / 2)
            return {f"free.{name}": free.new_full((*free.shape[:-1], 1), norm) for name, free in self.free.items()}
        return {f"free.{name}": sphere.norm(free.detach(), keepdim=True) for name, free in self.free.items()}

    def add(self, name: str) -> None:
        """Add a set of free parameters that starts at R = I."""
        fits = isinstance(name, str) and name.isidentifier() and not hasattr(self.free, name)
        require(fits, "name", "an identifier that is not yet in use, nor an attribute of ParameterDict", name)
        self.free[name] = nn.Parameter(self.identity())

    def use(self, name: str) -> None:
        """Make this set of free parameters the active one. The state dict stores the choice."""
        require(name in self.free, "name", "one of " + ", ".join(map(repr, self.free)), name)
        self.active = name

    # Saving and loading ----------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if len(self.free) > 1:  # stored as a tensor, because some file formats hold nothing else
            destination[prefix + "active"] = torch.tensor(list(self.active.encode()), dtype=torch.uint8)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        *_, error_messages = others  # after metadata, strict, missing keys and unexpected keys
        saved = state_dict.pop(prefix + "active", None)
        active = self.active if saved is None else bytes(saved.tolist()).decode()
        if active in self.free:
            self.active = active
        else:  # an error even if strict=False, because the weight would silently be a different one
            existing = ", ".join(map(repr, self.free))
            error_messages.append(
                f"{prefix}: saved with the set of rotations {active!r} in use, but there is only {existing}: "
                f"call use_rotation_set(model, {active!r}) before loading"
            )
        if self.seed is not None:  # version 0.1 did not store the seed
            state_dict.setdefault(prefix + "seed", self.seed)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": None}  # copies and pickles compute their weight again

    def extra_repr(self) -> str:
        """Show the map and its layout."""
        return f"{self.method!r}, {self.layout!r}"


class WeightState(NamedTuple):
    """The state of a layer's weight before it was rotated, which folding restores."""

    requires_grad: bool
    parameter_order: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module) -> WeightState:
        """Return the current state of a layer with a plain weight."""
        return cls(cast(Tensor, module.weight).requires_grad, tuple(module._parameters))

    def restore(self, module: nn.Module) -> None:
        """Restore the state of a layer that has a plain weight again."""
        cast(Tensor, module.weight).requires_grad_(self.requires_grad)
        for name in self.parameter_order:  # a saved optimiser state refers to parameters by their position
            module._parameters[name] = module._parameters.pop(name)


# The cache and its gradient ------------------------------------------------------------------------------------------


@dataclass
class _CachedWeight:
    """A rotated weight and what it was computed from."""

    inputs: tuple[Tensor, Tensor, Tensor | None]  # copies of the free parameters, the neurons and the dimensions
    weight: Tensor
    version: int  # of `weight`, to notice in-place writes to it
    residuals: list[Residuals] | None
    # The weight as a node of the autograd graph, and the graph inputs it is connected to.
    node: Tensor | None = None
    node_key: tuple[int, int, bool, bool] | None = None

    def is_valid(self, inputs: tuple[Tensor | None, ...], *, needs_residuals: bool) -> bool:
        """Return True if the weight belongs to these inputs."""
        return (
            (self.residuals is not None or not needs_residuals)
            and self.weight._version == self.version
            and all(_same_values(copy, current) for copy, current in zip(self.inputs, inputs, strict=True))
        )

    def connect(self, method: RowMap, layout: BlockLayout, free: Tensor, neurons: Tensor) -> Tensor:
        """Return the weight as a node of the autograd graph, the same one for every reader."""
        # Gradients must reach the tensors of this call. `functional_call` may have replaced the parameters by others of
        # equal value. The node holds references to its inputs, so their ids cannot be reused while it is cached.
        key = (id(free), id(neurons), free.requires_grad, neurons.requires_grad)
        if self.node is None or self.node_key != key:
            self.node, self.node_key = _RotatedWeight.apply(free, neurons, method, layout, self), key
        return self.node


class _RotatedWeight(torch.autograd.Function):
    """Connect a cached weight to its free parameters and neurons in the autograd graph.

    Nothing is stored through `save_for_backward`, whose tensors are freed by the first backward pass: the same node
    may be differentiated several times. The context refers neither to the cache nor to the module, which refer to it.
    """

    @staticmethod
    def forward(
        ctx: Any, free: Tensor, neurons: Tensor, method: RowMap, layout: BlockLayout, cached: _CachedWeight
    ) -> Tensor:
        ctx.method, ctx.layout, ctx.dimensions, ctx.residuals = method, layout, cached.inputs[2], cached.residuals
        ctx.inputs, ctx.versions = (free, neurons), (free._version, neurons._version)
        return cached.weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        free, neurons = ctx.inputs
        needs = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # create_graph=True: the gradients must themselves be differentiable
            # First derivatives use residuals, which are copies. Second derivatives use the inputs themselves, so these
            # must still have the values of the forward pass.
            if ctx.versions != (free._version, neurons._version):
                raise RuntimeError("a rotated layer was changed between forward and a backward with create_graph=True")
            expression = partial(_weight_expression, ctx.method, ctx.layout, ctx.dimensions)
            return *differentiable_gradients(expression, ctx.inputs, needs, grad), None, None, None
        with _numerics.autocast_disabled(grad):
            grad_free, grad_rows = ctx.layout.gradients(
                ctx.method, ctx.residuals, _numerics.widen(grad).flatten(1), ctx.dimensions, needs_rows=needs[1]
            )
        grad_neurons = None if grad_rows is None else _numerics.narrow(grad_rows, neurons.dtype).view(neurons.shape)
        return _numerics.narrow(grad_free, free.dtype), grad_neurons, None, None, None


def _weight_expression(
    method: RowMap, layout: BlockLayout, dimensions: Tensor | None, free: Tensor, neurons: Tensor
) -> Tensor:
    """Return the rotated weight in differentiable torch operations, computed in float32 or wider."""
    with _numerics.autocast_disabled(neurons):
        wide_free, wide_rows = _numerics.widen(free), _numerics.widen(neurons).flatten(1)
        rows = layout.rotate(method.expression, wide_free, wide_rows, dimensions)
        return _numerics.narrow(rows, neurons.dtype).view(neurons.shape)


def _same_values(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if both tensors have the same dtype, device, shape and values, or if both are None."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.device != b.device or a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach()
    # Comparing the memory as 64-bit integers takes half the time of comparing float32 values one by one. It must be
    # contiguous and consist of whole and aligned words.
    per_word = 8 // a.element_size()
    if all(
        type(x) is Tensor and x.is_contiguous() and x.numel() % per_word == 0 and x.storage_offset() % per_word == 0
        for x in (a, b)
    ):
        a, b = a.view(-1).view(torch.int64), b.view(-1).view(torch.int64)
    return torch.equal(a, b)


# Blocks and factors --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockLayout:
    r"""How R is composed: R = Diag(R₁…R_k), or a product of `factors` such matrices (butterfly).

    The blocks of factor j act on entries that are b^j apart, where b = size/blocks is the block size.

    Args:
        size: d, the number of entries of a neuron.
        blocks: k, the number of blocks of each factor.
        shared: use one matrix for all blocks of a factor.
        factors: the number of factors.

    Example:
        >>> BlockLayout(size=8, blocks=4, factors=3).block_size
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
        require(is_integer(self.factors, 1), "factors", "an integer >= 1", self.factors)
        # The last factor connects entries b^(factors−1) apart, so a neuron must consist of groups of b^factors entries.
        reach = self.block_size**self.factors
        accepted = f"a number >= 1 with (d/blocks)^factors = {self.block_size}^factors dividing d = {self.size}"
        require(self.factors == 1 or self.size % reach == 0, "factors", accepted, self.factors)

    @property
    def block_size(self) -> int:
        """The block size b."""
        return self.size // self.blocks

    @property
    def matrix_count(self) -> int:
        """The number of learned b×b matrices."""
        return self.factors * (1 if self.shared else self.blocks)

    block = deprecated_attribute("block", "block_size")
    matrices = deprecated_attribute("matrices", "matrix_count")

    def expand(self, one: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return free parameters of all matrices, each equal to `one`: ([factors], [blocks], *one.shape)."""
        lead = [self.factors] if self.factors > 1 else []
        lead += [self.blocks] if self.blocks > 1 and not self.shared else []
        return one.expand(*lead, *one.shape).clone()

    def rotate(
        self,
        rotate_parts: Callable[[Tensor, Tensor], Tensor],
        free: Float[Tensor, "..."],
        rows: Float[Tensor, "n d"],
        dimensions: Int[Tensor, " p"] | None = None,
    ) -> Float[Tensor, "n d"]:
        """Return the rotated rows. `rotate_parts(free, parts)` applies the matrices of one factor to its parts."""
        selected = rows if dimensions is None else rows.index_select(1, dimensions)
        for j, free_of_factor in enumerate(free.unbind() if self.factors > 1 else (free,)):
            parts = rotate_parts(free_of_factor, self.split(selected, j))
            selected = self.join(parts, rows.shape[0], j)
        return selected if dimensions is None else rows.index_copy(1, dimensions, selected)

    def gradients(
        self, method: RowMap, residuals: list[Residuals], grad: Tensor, dimensions: Tensor | None, *, needs_rows: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the free parameters and of the rows (None unless `needs_rows`)."""
        selected = grad if dimensions is None else grad.index_select(1, dimensions)
        grads_free: list[Tensor] = []
        for j in reversed(range(self.factors)):
            # The gradient of the rows is the input of the previous factor. That of the first factor goes to the caller.
            grad_free, grad_parts = method.backward_kernel(
                residuals[j], self.split(selected, j), needs_rows=needs_rows or j > 0
            )
            grads_free.insert(0, grad_free)
            if grad_parts is not None:
                selected = self.join(grad_parts, grad.shape[0], j)
        grad_free = torch.stack(grads_free) if self.factors > 1 else grads_free[0]
        if not needs_rows:
            return grad_free, None
        return grad_free, selected if dimensions is None else grad.index_copy(1, dimensions, selected)

    def split(self, rows: Float[Tensor, "n d"], j: int = 0) -> Float[Tensor, "..."]:
        """Cut rows into the parts that the blocks of factor j act on: (k, n, b), or (k·n, b) for a shared matrix."""
        if self.blocks == 1:
            return rows
        # Write the index of an entry in three digits, (outer, position, inner) with inner < b^j. Entries that differ
        # only in `position` form a block, so (outer, inner) is the number of the block.
        b, n = self.block_size, rows.shape[0]
        parts = rows.reshape(n, -1, b, b**j).permute(1, 3, 0, 2)
        return parts.reshape(-1, b) if self.shared else parts.reshape(self.blocks, n, b)

    def join(self, parts: Float[Tensor, "..."], n: int, j: int = 0) -> Float[Tensor, "n d"]:
        """Undo `split` for `n` rows."""
        if self.blocks == 1:
            return parts
        b = self.block_size
        return parts.reshape(-1, b**j, n, b).permute(2, 0, 3, 1).reshape(n, self.size)
