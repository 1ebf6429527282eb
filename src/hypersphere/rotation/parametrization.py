r"""The parametrisation of a rotated layer: W = V·Rᵀ with fixed neurons V and a learned rotation R (OPT, equation 1).

`Rotation` is a parametrisation in the sense of `torch.nn.utils.parametrize`: the layer stores V as
`parametrizations.weight.original`, and every read of `layer.weight` computes W:

    layer.weight  →  Rotation.forward(V)  →  BlockLayout.rotate  →  a map of hypersphere.orthogonal, such as Cayley

`WeightPart` reads the neurons of a weight as rows, whatever the name and the order of the dimensions of the weight. A
weight that holds several layers, such as the fused q, k and v of attention, has one rotation for each of them; each
changes the rows of its own part. `BlockLayout` cuts the rows into the parts that the map acts on. With one block, these
are the rows themselves. The forward pass of a linear layer may rotate its input instead, which gives the same output
(`linear_output`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._deprecation import deprecated_names
from hypersphere._layer_selection import WeightPart
from hypersphere._validation import choose, require
from hypersphere.functions._rowmap import RowMap
from hypersphere.functions.orthogonal import ORTHOGONALS, Cayley, SkewMap
from hypersphere.rotation._quantized import int8_linear
from hypersphere.rotation._rotated_linear import cayley_linear, rotate_wide, rotated_linear, rotating_input_is_cheaper
from hypersphere.rotation.layout import BlockLayout

__all__ = ["Rotation", "Side", "WeightState", "orthogonal_map"]

Side = Literal["auto", "weight", "input"]

__getattr__ = deprecated_names(__name__, {"Layout": "hypersphere.rotation:BlockLayout"})  # named in saved modules


class Rotation(nn.Module):
    r"""Rotate the neurons of one layer: W = V·Rᵀ, R from unconstrained parameters (OPT, section 3).

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
        seed: the seed of later draws: of `dimensions` (S-OPT), or of the order of the blocks (`TwoSidedRotation`).
        side: what the forward pass of a linear layer rotates: "weight", "input", or "auto" for the cheaper of the two.
        dropout: the probability with which each block is replaced by the identity in training, 0 with `dimensions`.
        like: the weight. The free parameters take its device, and its dtype or float32 if that is wider.

    Attributes:
        free: the rotation sets: unconstrained parameters by name. A new rotation has the single set "main".
        active: the name of the rotation set that rotates the neurons, see `use_rotation_set`.
        layer_name: the name of the layer in the model, for error messages. It is empty until the rotation is attached.
        merged: the rotated weight while the rotation is merged, else None, see `hypersphere.rotation.merge`.
        part: where the weight stores the neurons. By default, the first dimension of the whole weight counts them.
    """

    dimensions: Tensor | None
    seed: Tensor | None
    merged: Tensor | None
    original_state: WeightState  # set when the rotation is attached to a layer
    part: WeightPart = WeightPart()

    def __init__(
        self,
        method: RowMap,
        layout: BlockLayout,
        *,
        dimensions: Int[Tensor, " p"] | None = None,
        seed: int | None = None,
        side: Side = "auto",
        dropout: float = 0.0,
        like: Float[Tensor, "..."],
    ) -> None:
        super().__init__()
        require(dimensions is None or not dropout, "dropout", "0 if only some dimensions are rotated", dropout)
        self.method = method
        self.layout = layout
        self.side = side
        self.dropout = dropout
        self.active = "main"
        self.layer_name = ""
        self.free = nn.ParameterDict()
        # Dimensions and seed are buffers, so that processes and checkpoints that share the model's state share them.
        self.register_buffer("dimensions", dimensions)
        self.register_buffer("seed", None if seed is None else torch.tensor(seed, device=like.device))
        self.register_buffer("merged", None, persistent=False)
        # Small steps of a half-precision parameter would be rounded away, so the free parameters are never narrower
        # than float32, whatever the precision of the frozen weight.
        identity = layout.expand(method.identity(layout.block_size))
        self.free["main"] = nn.Parameter(identity.to(device=like.device, dtype=_numerics.compute_dtype(like.dtype)))

    # The weight ------------------------------------------------------------------------------------------------------

    def forward(self, neurons: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the rotated weight, with the shape, dtype and memory format of `neurons`."""
        if self.merged is not None:
            return self.merged
        # Widen once for all factors, so that a half-precision weight is rounded only at the end.
        with _numerics.autocast_disabled(neurons), self.layer_named_in_errors():
            free = _numerics.widen_parameter(self.parameter)
            rows = _numerics.widen_parameter(self._experts_side_by_side(neurons))
            if self.dropout and self.training:  # blocks are dropped as matrices, so R must be formed
                rows = self.layout.rotate_rows(self.dropped_out(self.method.matrix(free)), rows)
            else:
                rows = self.layout.rotate(self.method, free, rows, self.dimensions)
            return self.part.with_rows(neurons, self._split_experts(_numerics.narrow(rows, neurons.dtype), neurons))

    def rotates_input(self, x: Float[Tensor, "*batch d"], weight: Tensor) -> bool:
        """Return True if a linear layer should rotate its input x instead of the neurons in its stored weight."""
        if self.side == "weight" or self.dimensions is not None or x.shape[-1:] != (self.layout.size,):
            return False
        if self.merged is not None:  # the rotated weight is already computed
            return False
        if self.side == "input":
            return True
        trains = torch.is_grad_enabled() and self.parameter.requires_grad
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        tokens, neurons = x.numel() // max(self.layout.size, 1), self.part.shape_of(weight)[1]
        return rotating_input_is_cheaper(tokens, neurons, self.layout, x_needs_grad=needs_grad, trains=trains)

    def linear_output(
        self, x: Float[Tensor, "*batch d"], stored: Sequence[Tensor], bias: Float[Tensor, " n"] | None
    ) -> Float[Tensor, "*batch n"]:
        """Return (x·R)·Vᵀ + bias, where `stored` is the weight, or its integers and scales."""
        neurons, *scales = (self.part.rows(tensor) for tensor in stored)
        if scales:
            return int8_linear(self.rotate_input(x), neurons, scales[0], bias)
        # A subclass of `Cayley` may define another map, for which the series would be wrong.
        if type(self.method) is Cayley and self.layout.factors == 1 and not (self.dropout and self.training):
            free = _numerics.widen_parameter(self.parameter)
            y = cayley_linear(x, self.method, free, neurons, bias, self.layout)
            if y is not None:
                return y
        return rotated_linear(x, self._matrices_in_training(x), neurons, bias, self.layout)

    def rotate_input(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return x·R, computed in float32 or wider, in the dtype of x."""
        matrices = self._matrices_in_training(x)
        return rotate_wide(self.layout, x.reshape(-1, self.layout.size), matrices).view(x.shape)

    def _matrices_in_training(self, x: Tensor) -> Float[Tensor, "..."]:
        with _numerics.autocast_disabled(x), self.layer_named_in_errors():
            return self.dropped_out(self.method.matrix(_numerics.widen_parameter(self.parameter)))

    def _experts_side_by_side(self, weight: Float[Tensor, "..."]) -> Float[Tensor, "rows size"]:
        """Return the rows that `layout` rotates: the neurons, or in one row the i-th neurons of all experts.

        One rotation per expert is a rotation of these longer rows, with the blocks of all experts.
        """
        if self._rotation_count(weight) == 1:
            return self.part.rows(weight)
        return self.part.row_sets(weight).transpose(0, 1).flatten(1)

    def _split_experts(self, rows: Float[Tensor, "rows size"], weight: Float[Tensor, "..."]) -> Float[Tensor, "n d"]:
        """Undo `_experts_side_by_side`."""
        experts = self._rotation_count(weight)
        return rows if experts == 1 else rows.unflatten(1, (experts, -1)).transpose(0, 1).flatten(0, 1)

    def _rotation_count(self, weight: Tensor) -> int:
        """Return the number of experts if each has its own rotation, else 1."""
        groups, _, channels, taps = self.part.shape_of(weight)
        return groups if self.dimensions is None and self.layout.size == groups * channels * taps else 1

    def dropped_out(self, matrices: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the matrices with a random share of them replaced by the identity in training (OFT's dropout)."""
        if not self.dropout or not self.training:
            return matrices
        keep = torch.rand(*matrices.shape[:-2], 1, 1, device=matrices.device) >= self.dropout
        return torch.where(keep, matrices, torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device))

    @torch.no_grad()
    def fold(self, neurons: Float[Tensor, "..."]) -> None:
        """Replace the neurons by the rotated neurons, computed in float64, and restart from R = I."""
        self.require_foldable()
        free, rows = _numerics.to_float64(self.parameter), _numerics.to_float64(self._experts_side_by_side(neurons))
        # `to_float64` moves tensors of a device without float64 to the CPU.
        dimensions = None if self.dimensions is None else self.dimensions.to(rows.device)
        with self.layer_named_in_errors():
            rows = self.layout.rotate(self.method, free, rows, dimensions)
        rows = self._split_experts(_numerics.narrow(rows, neurons.dtype), neurons)
        self.part.write(neurons, rows)
        self.parameter.copy_(self.identity())
        self.merged = None

    @torch.no_grad()
    def merge(self, neurons: Float[Tensor, "..."]) -> None:
        """Compute the rotated weight once and return it from now on. The neurons and the parameters stay as they are.

        Training mode, another rotation set and a loaded state end this, because the weight would be outdated.
        """
        self.require_finite()
        self.merged = None
        self.merged = self(neurons)

    def train(self, mode: bool = True) -> Rotation:
        """Set training or evaluation mode. Training mode ends a merge."""
        if mode:
            self.merged = None
        return super().train(mode)

    @torch.no_grad()
    def redraw(self, neurons: Float[Tensor, "..."], folds: int) -> None:
        """Draw other dimensions after fold number `folds` (S-OPT)."""
        dimensions, seed = cast(Tensor, self.dimensions), int(cast(Tensor, self.seed))
        size = self.part.rows(neurons).shape[1]
        dimensions.copy_(self.layout.draw_order(size, seed, folds)[: len(dimensions)])

    def require_foldable(self) -> None:
        """Raise a `ValueError` if `fold` would."""
        names = list(self.free)
        with self.layer_named_in_errors():
            require(len(names) == 1, "model", "rotated by a single rotation set to fold and continue", names)
        self.require_finite()

    def require_finite(self) -> None:
        """Raise a `ValueError` if a free parameter is not finite."""
        free = self.parameter.detach()
        if _numerics.values_readable(free) and not bool(torch.isfinite(free).all()):
            bad = int((~torch.isfinite(free)).sum())
            with self.layer_named_in_errors():
                raise ValueError(f"the parameters of a rotation must be finite, but {bad} of {free.numel()} are not")

    @contextmanager
    def layer_named_in_errors(self) -> Iterator[None]:
        """Add the name of the layer to a `ValueError` raised inside the context."""
        try:
            yield
        except ValueError as error:
            if not self.layer_name:
                raise
            raise ValueError(f"layer {self.layer_name!r}: {error}") from None

    # The free parameters ---------------------------------------------------------------------------------------------

    @property
    def parameter(self) -> nn.Parameter:
        """The active rotation set."""
        return self.free[self.active]

    @property
    def decay_free_parameters(self) -> tuple[str, ...]:
        """The names of the parameters that weight decay would pull away from a rotation."""
        return tuple(f"free.{name}" for name in self.free)

    @property
    def keeps_angles(self) -> bool:
        """True if the angles between neurons are the same as in V for all values of the parameters."""
        return self.method.always_orthogonal

    def identity(self) -> Float[Tensor, "..."]:
        """Return the free parameters of R = I."""
        return self.layout.expand(self.method.identity(self.layout.block_size)).to(self.parameter)

    def matrices(self) -> Float[Tensor, "*blocks b b"]:
        """Return the active matrices: (d, d), or one per block and factor."""
        return self.method.matrix(self.parameter.detach())

    def degrees_of_freedom(self) -> int:
        """Return the dimension of the set of all R that training can reach, summed over trained rotation sets."""
        trained_sets = sum(p.requires_grad for p in self.free.values())
        return trained_sets * self.layout.matrix_count * self.method.degrees_of_freedom(self.layout.block_size)

    def direction_norms(self) -> dict[str, Float[Tensor, "..."]]:
        r"""Return the norms (…, 1) that rows of a random direction in parameter space get, for loss landscapes.

        Rows of a matrix P get the norms of P. The parameters of a skew S get √(d/2), so that ‖S‖_F = √d as for R.
        """
        sets = {f"free.{name}": parameters.detach() for name, parameters in self.free.items()}
        if isinstance(self.method, SkewMap):
            norm = math.sqrt(self.layout.block_size / 2)
            return {name: entries.new_full((*entries.shape[:-1], 1), norm) for name, entries in sets.items()}
        return {name: sphere.norm(p, keepdim=True) for name, p in sets.items()}

    def add(self, name: str) -> None:
        """Add a rotation set that starts at R = I."""
        self.require_new_name(name)
        self.free[name] = nn.Parameter(self.identity())

    def require_new_name(self, name: str) -> None:
        """Raise a `ValueError` unless a rotation set of this name can be added."""
        fits = isinstance(name, str) and name.isidentifier() and not hasattr(self.free, name)
        require(fits, "name", "an identifier that is not yet in use, nor an attribute of ParameterDict", name)

    def use(self, name: str) -> None:
        """Make this rotation set the active one. The state dict stores the choice."""
        require(name in self.free, "name", "one of " + ", ".join(map(repr, self.free)), name)
        self.active = name
        self.merged = None

    # Saving and loading ----------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if len(self.free) > 1:  # stored as a tensor, because some file formats hold nothing else
            destination[prefix + "active"] = torch.tensor(list(self.active.encode()), dtype=torch.uint8)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        *_, error_messages = others  # after metadata, strict, missing keys and unexpected keys
        self.merged = None
        saved = state_dict.pop(prefix + "active", None)
        active = self.active if saved is None else bytes(saved.tolist()).decode()
        if active in self.free:
            self.active = active
        else:  # an error even if strict=False, because the weight would silently be a different one
            existing = ", ".join(map(repr, self.free))
            error_messages.append(
                f"{prefix}: saved with the rotation set {active!r} in use, but there is only {existing}: "
                f"call use_rotation_set(model, {active!r}, create=True) before loading"
            )
        if self.seed is not None:  # version 0.1 did not store the seed
            state_dict.setdefault(prefix + "seed", self.seed)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        """Show the map and its layout."""
        return f"{self.method!r}, {self.layout!r}"


def orthogonal_map(method: str | RowMap) -> RowMap:
    """Return a map by its name in `hypersphere.orthogonal`, or check that the argument `method` is a map."""
    chosen = choose(ORTHOGONALS, method, "method")
    require(isinstance(chosen, RowMap), "method", "a name or an object of `hypersphere.orthogonal`", method)
    return chosen


class WeightState(NamedTuple):
    """The state of a layer's weight before it was rotated, which folding restores."""

    requires_grad: bool
    parameter_order: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module, parameter: str = "weight") -> WeightState:
        """Return the current state of a layer with a plain weight."""
        return cls(cast(Tensor, getattr(module, parameter)).requires_grad, tuple(module._parameters))

    def restore(self, module: nn.Module, parameter: str = "weight") -> None:
        """Restore the state of a layer that has a plain weight again."""
        cast(Tensor, getattr(module, parameter)).requires_grad_(self.requires_grad)
        for name in self.parameter_order:  # a saved optimiser state refers to parameters by their position
            if name in module._parameters:  # another weight of the module may still be rotated
                module._parameters[name] = module._parameters.pop(name)
