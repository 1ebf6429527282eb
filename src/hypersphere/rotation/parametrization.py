r"""The parametrisation: a weight that is its own fixed neurons V, rotated, W = V·Rᵀ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._validation import require
from hypersphere.functions.orthogonal import SkewMap
from hypersphere.functions.rowmap import Memory, RowMap
from hypersphere.rotation.layout import Layout

__all__ = ["Rotation", "direction_norms", "require_finite"]

_ACTIVE = "active"  # the key of the state dict that says which set is in use, where there are several


class TurnMemory(NamedTuple):
    """What a gradient needs: the dimensions that were turned, as they were then, and the memories of the factors."""

    dimensions: Tensor | None
    factors: list[Memory]


@dataclass
class _Turned:
    """A rotated weight, what it was made from, and what its gradient needs."""

    neurons: Tensor
    stamps: tuple[int, ...]
    parameters: tuple[Tensor, ...]
    weight: Tensor
    version: int
    memory: TurnMemory | None
    linked: dict[tuple[bool, bool], Tensor] = field(default_factory=dict)


class Rotation(nn.Module):
    r"""Turns the neurons of one layer: W = V·Rᵀ, R from free parameters (OPT, section 3).

    The weight is computed once and given out until what it is made of changes. The free parameters, drawn dimensions
    and neurons that are trained are compared by value, so that no way of writing to them goes unnoticed. Fixed neurons
    V are compared by identity, address and version: writes through `.data` or NumPy are not noticed, in-place
    operations and assignment are. The weight given out is shared: in-place operations on it are noticed and undone at
    the next reading, writes to it through `.data` are not. In `eval` mode under `no_grad` only the weight is kept, and
    not what its gradient needs. The gradient keeps the factorisation and not autograd's saved tensors: a weight may be
    read many times, under `no_grad` and outside, and be differentiated by several `backward` calls. A compiled graph
    holds the rotation and computes it in every call, by the stablest factorisation, for it cannot look at the numbers:
    fold before compiling for inference.

    Args:
        method: one of `hypersphere.orthogonal` or `hypersphere.transform`.
        layout: blocks and factors of R.
        dimensions: the p numbers of each neuron that are turned, all of them if None (S-OPT).
        like: a tensor whose type and device the free parameters take.
    """

    dimensions: Tensor | None
    plain: tuple[bool, tuple[str, ...]]  # whether the weight was trained, and the order of the layer's parameters

    def __init__(self, method: RowMap, layout: Layout, *, dimensions: Tensor | None = None, like: Tensor) -> None:
        super().__init__()
        self.method = method
        self.layout = layout
        self.active = "main"
        self.free = nn.ParameterDict()
        self.register_buffer("dimensions", dimensions)
        self.free["main"] = nn.Parameter(layout.repeated(method.identity(layout.block)).to(like))
        self._turned: _Turned | None = None

    @property
    def decay_free_parameters(self) -> tuple[str, ...]:
        """The parameters that weight decay would pull away from a rotation."""
        return tuple(f"free.{name}" for name in self.free)

    def direction_norms(self) -> dict[str, Tensor]:
        """Return how long the rows of a random direction are, for landscapes."""
        return {f"free.{name}": direction_norms(self.method, free) for name, free in self.free.items()}

    @property
    def parameter(self) -> nn.Parameter:
        """The free parameters in use."""
        return self.free[self.active]

    def identity(self) -> Tensor:
        """Return free parameters of R = I."""
        return self.layout.repeated(self.method.identity(self.layout.block)).to(self.parameter)

    def add(self, name: str) -> None:
        """Add a set of free parameters, R = I."""
        fits = isinstance(name, str) and name.isidentifier() and not hasattr(self.free, name)
        require(fits, "name", "an identifier that is not yet in use, nor an attribute of ParameterDict", name)
        self.free[name] = nn.Parameter(self.identity())

    def use(self, name: str) -> None:
        """Turn by this set of free parameters from now on; the state dict remembers which."""
        require(name in self.free, "name", "one of " + ", ".join(map(repr, self.free)), name)
        self.active = name

    def degrees_of_freedom(self) -> int:
        """Return how many numbers R depends on, over all sets that are trained."""
        return (
            sum(p.requires_grad for p in self.free.values())
            * self.layout.matrices
            * self.method.degrees_of_freedom(self.layout.block)
        )

    def matrices(self) -> Tensor:
        """Return the matrices of the set in use: (d, d), or one for each block and factor."""
        return self.method(self.parameter.detach())

    def forward(self, neurons: Tensor) -> Tensor:
        """Return the rotated weight, of the shape and type of `neurons`."""
        free = self.parameter
        if not _numerics.values_readable(free, neurons):
            return _Linked.apply(self, None, free, neurons)
        wanted = (free.requires_grad, neurons.requires_grad)
        linked = torch.is_grad_enabled() and any(wanted)
        turned = self._current(free, neurons, remember=linked or self.training)
        if not linked:
            return turned.weight
        if wanted not in turned.linked:
            turned.linked[wanted] = _Linked.apply(self, turned, free, neurons)
        return turned.linked[wanted]

    def turn(self, free: Tensor, rows: Tensor) -> tuple[Tensor, TurnMemory]:
        """Return the turned rows (n, d) and what `turn_back` needs, outside autograd."""
        dimensions = None if self.dimensions is None else self.dimensions.to(rows.device, copy=True)
        picked = rows if dimensions is None else rows[:, dimensions]
        memories = []
        for j in range(self.layout.factors):
            cut, memory = self.method.apply(self.layout.of_factor(free, j), self.layout.split(picked, j))
            picked = self.layout.join(cut, len(rows), j)
            memories.append(memory)
        if dimensions is None:
            return picked, TurnMemory(None, memories)
        turned = rows.clone()
        turned[:, dimensions] = picked
        return turned, TurnMemory(dimensions, memories)

    def turn_back(self, memory: TurnMemory, gradient: Tensor, *, rows: bool) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the free parameters and of the rows (None unless `rows`)."""
        dimensions, memories = memory
        picked = gradient if dimensions is None else gradient[:, dimensions]
        pulled: list[Tensor] = []
        for j in reversed(range(self.layout.factors)):
            cut = self.layout.split(picked, j)
            free, back = self.method.pull(memories[j], cut, rows=rows or j > 0)
            pulled.insert(0, free)
            if back is not None:
                picked = self.layout.join(back, len(gradient), j)
        of_free = torch.stack(pulled) if self.layout.factors > 1 else pulled[0]
        if not rows:
            return of_free, None
        if dimensions is None:
            return of_free, picked
        of_rows = gradient.clone()
        of_rows[:, dimensions] = picked
        return of_free, of_rows

    @torch.no_grad()
    def fold(self, neurons: Tensor) -> None:
        """Make the rotated neurons the neurons, in double precision, and start again from R = I."""
        require(len(self.free) == 1, "model", "rotated by one set of parameters to fold and go on", list(self.free))
        require_finite(self.parameter)
        rows, _ = self.turn(_numerics.to_float64(self.parameter), _numerics.to_float64(neurons.flatten(1)))
        neurons.copy_(_numerics.narrow(rows, neurons.dtype).view_as(neurons))
        self.parameter.copy_(self.identity())

    def _current(self, free: Tensor, neurons: Tensor, *, remember: bool) -> _Turned:
        """What is at hand, or made anew if anything it is made of has changed, or if its memory is wanted and gone."""
        stamps = (neurons._version, neurons.data_ptr())
        watched: tuple[Tensor, ...] = (free, neurons) if neurons.requires_grad else (free,)
        if self.dimensions is not None:
            watched += (self.dimensions,)
        old = self._turned
        if (
            old is not None
            and old.neurons is neurons
            and old.stamps == stamps
            and (old.memory is not None or not remember)
            and old.weight._version == old.version  # nobody has written into what was given out
            and len(old.parameters) == len(watched)
            and all(torch.equal(a, b) for a, b in zip(old.parameters, watched, strict=True))
        ):
            return old
        require_finite(free)
        with torch.inference_mode(False), torch.no_grad(), _numerics.autocast_disabled(neurons):
            kept = tuple(tensor.detach().clone() for tensor in watched)  # which a later step cannot write to
            v = kept[1] if neurons.requires_grad else neurons.detach()
            rows, memory = self.turn(_numerics.widen(kept[0]), _numerics.widen(v).flatten(1))
            weight = _shaped(rows, neurons)
        self._turned = _Turned(neurons, stamps, kept, weight, weight._version, memory if remember else None)
        return self._turned

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if len(self.free) > 1:  # as numbers, so that formats for tensors alone can hold it
            destination[prefix + _ACTIVE] = torch.tensor(list(self.active.encode()), dtype=torch.uint8)

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
        saved = state_dict.pop(prefix + _ACTIVE, None)
        active = self.active if saved is None else bytes(saved.tolist()).decode()
        if active in self.free:
            self.active = active
        else:  # an error even where others are forgiven: the weight would silently be another
            have, need = ", ".join(map(repr, self.free)), f"call use(model, {active!r}) before loading"
            error_msgs.append(
                f"{prefix}: saved with the set of rotations {active!r} in use, but there is only {have}: {need}"
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_turned": None}

    def extra_repr(self) -> str:
        """Show the map and its layout."""
        return f"{self.method!r}, {self.layout!r}"


class _Linked(torch.autograd.Function):
    """The link from a remembered weight to its parameters; it saves no tensors, so it can be walked again and again."""

    @staticmethod
    def forward(ctx: Any, rotation: Rotation, turned: _Turned | None, free: Tensor, neurons: Tensor) -> Tensor:
        ctx.fixed = None
        if turned is None:
            with _numerics.autocast_disabled(neurons):
                rows, memory = rotation.turn(
                    _numerics.widen(free.detach()), _numerics.widen(neurons.detach()).flatten(1)
                )
            weight = _shaped(rows, neurons)
        else:
            assert turned.memory is not None
            weight, memory = turned.weight.detach(), turned.memory
            if memory.dimensions is None and not neurons.requires_grad:  # the memory then holds V itself
                ctx.fixed = neurons.detach(), turned.stamps[0]
        ctx.rotation, ctx.memory = rotation, memory
        ctx.shape, ctx.types = neurons.shape, (free.dtype, neurons.dtype)
        return weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, Tensor | None]:
        if ctx.fixed is not None and ctx.fixed[0]._version != ctx.fixed[1]:
            raise RuntimeError("the neurons of a rotated layer were changed (folded?) between forward and backward")
        with _numerics.autocast_disabled(gradient):
            rows = _numerics.widen(gradient).flatten(1)
            free, v = ctx.rotation.turn_back(ctx.memory, rows, rows=ctx.needs_input_grad[3])
        return (
            None,
            None,
            _numerics.narrow(free, ctx.types[0]),
            None if v is None else v.view(ctx.shape).to(ctx.types[1]),
        )


def _shaped(rows: Tensor, neurons: Tensor) -> Tensor:
    """Rows in the shape, type and memory format of the neurons."""
    weight = _numerics.narrow(rows, neurons.dtype).view(neurons.shape)
    return weight if neurons.is_contiguous() else torch.empty_like(neurons).copy_(weight)


def direction_norms(method: RowMap, free: Tensor) -> Tensor:
    """The lengths (…, 1) of the rows of a direction: those of P, and √(d/2) for the numbers of a skew S, ‖S‖_F = √d."""
    if isinstance(method, SkewMap):
        return free.new_full((*free.shape[:-1], 1), math.sqrt(method.size(free) / 2))
    return sphere.norm(free.detach(), keepdim=True)


def require_finite(free: Tensor) -> None:
    """Raise unless the parameters of a rotation are finite; autograd must not see it, or checkpoints count it."""
    free = free.detach()
    if _numerics.values_readable(free) and not bool(torch.isfinite(free).all()):
        bad = int((~torch.isfinite(free)).sum())
        raise ValueError(f"the parameters of a rotation must be finite, but {bad} of {free.numel()} are not")
