r"""The parametrisation of a rotated layer: W = V·Rᵀ with fixed neurons V and a learned rotation R (OPT, equation 1).

`Rotation` is a parametrisation in the sense of `torch.nn.utils.parametrize`: the layer stores V as
`parametrizations.weight.original`, and every read of `layer.weight` computes W:

    layer.weight  →  Rotation.forward(V)  →  BlockLayout.rotate  →  method(free, parts): a map of hypersphere.orthogonal

`BlockLayout` cuts the rows of V into the parts that the map acts on. With one block, these are the rows themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._deprecation import deprecated_attribute, deprecated_names
from hypersphere._validation import is_integer, require
from hypersphere.functions._rowmap import RowMap
from hypersphere.functions.orthogonal import SkewMap

__all__ = ["BlockLayout", "Rotation", "WeightState"]

__getattr__ = deprecated_names(__name__, {"Layout": "hypersphere.rotation:BlockLayout"})  # named in saved modules


class Rotation(nn.Module):
    r"""Rotate the neurons of one layer: W = V·Rᵀ, R from free parameters (OPT, section 3).

    The weight is computed at every read, from the current parameters and neurons. A layer that is called once per
    training step, as most are, reads its weight once. If a weight is read several times while it does not change, let
    torch compute it only once: in a recurrent layer, for tied weights, or for an evaluation over many batches. The
    functions of `hypersphere.training` and `hypersphere.evaluation` do so.

        with torch.nn.utils.parametrize.cached():
            loss = model(x)

    Parameters that are not finite give a weight that is not finite, without an error; `fold_` refuses to store it.

    Args:
        method: an object of `hypersphere.orthogonal` or `hypersphere.transform`.
        layout: blocks and factors of R.
        dimensions: the p entries of each neuron that are rotated, all of them if None (S-OPT).
        seed: the seed from which `dimensions` are drawn again later (S-OPT).
        like: a tensor whose dtype and device the free parameters take.

    Attributes:
        free: the sets of free parameters by name. A new rotation has the single set "main".
        active: the name of the set that rotates the neurons, see `use_rotation_set`.
        layer_name: the name of the layer in the model, for error messages. It is empty until the rotation is attached.
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
        # Dimensions and seed are buffers, so that processes and checkpoints that share the model's state share them.
        self.register_buffer("dimensions", dimensions)
        self.register_buffer("seed", None if seed is None else torch.tensor(seed, device=like.device))
        self.free["main"] = nn.Parameter(layout.expand(method.identity(layout.block_size)).to(like))

    # The weight ------------------------------------------------------------------------------------------------------

    def forward(self, neurons: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Return the rotated weight, with the shape, dtype and memory format of `neurons`."""
        # Widen once for all factors, so that a half-precision weight is rounded only at the end.
        with _numerics.autocast_disabled(neurons), self._layer_named_in_errors():
            free, wide_neurons = _numerics.widen_parameter(self.parameter), _numerics.widen_parameter(neurons)
            # A filter of a convolution is one neuron: its row has C·k·k entries.
            rows = self.layout.rotate(self.method, free, wide_neurons.flatten(1), self.dimensions)
            return _in_memory_format_of(neurons, _numerics.narrow(rows, neurons.dtype).view(neurons.shape))

    @torch.no_grad()
    def fold(self, neurons: Float[Tensor, "n ..."]) -> None:
        """Replace the neurons by the rotated neurons, computed in float64, and restart from R = I."""
        require(len(self.free) == 1, "model", "rotated by one set of parameters to fold and continue", list(self.free))
        self.require_finite()
        free, rows = _numerics.to_float64(self.parameter), _numerics.to_float64(neurons.flatten(1))
        # `to_float64` moves tensors of a device without float64 to the CPU.
        dimensions = None if self.dimensions is None else self.dimensions.to(rows.device)
        with self._layer_named_in_errors():
            rows = self.layout.rotate(self.method, free, rows, dimensions)
        neurons.copy_(_numerics.narrow(rows, neurons.dtype).view_as(neurons))
        self.parameter.copy_(self.identity())

    def require_finite(self) -> None:
        """Raise a `ValueError` if a free parameter is not finite."""
        free = self.parameter.detach()
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


def _in_memory_format_of(neurons: Tensor, weight: Tensor) -> Tensor:
    """Return a contiguous weight in the memory format of the neurons, such as `torch.channels_last`."""
    # Compilers choose memory formats themselves, and transforms cannot ask for them.
    if not _numerics.values_readable(neurons) or neurons.is_contiguous():
        return weight
    return torch.empty_like(neurons).copy_(weight)


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
        method: RowMap,
        free: Float[Tensor, "..."],
        rows: Float[Tensor, "n d"],
        dimensions: Int[Tensor, " p"] | None = None,
    ) -> Float[Tensor, "n d"]:
        """Return the rotated rows V·Rᵀ. If `dimensions` are given, only these entries of each row change."""
        if dimensions is not None:
            # Autograd saves the indices. `DistributedDataParallel` writes to buffers in every forward pass, which would
            # invalidate saved ones if there are several forward passes before the backward pass, so save a copy.
            dimensions = dimensions.clone()
        selected = rows if dimensions is None else rows.index_select(1, dimensions)
        for j, free_of_factor in enumerate(free.unbind() if self.factors > 1 else (free,)):
            rotated_parts = method(free_of_factor, self.split(selected, j))
            selected = self.join(rotated_parts, rows.shape[0], j)
        return selected if dimensions is None else rows.index_copy(1, dimensions, selected)

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
