r"""The parametrisation: a weight that is its own fixed neurons V, rotated, W = V·Rᵀ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import sphere
from hypersphere.functions.menu import require
from hypersphere.functions.orthogonal import SkewMap
from hypersphere.functions.rowmap import Memory, RowMap
from hypersphere.rotation.layout import Layout

__all__ = ["Rotation", "direction_norms", "require_finite"]

_ACTIVE = "active"  # the key of the state dict that says which set is in use, where there are several


@dataclass
class _Turned:
    """A rotated weight, what it was made from, and what its gradient needs."""

    neurons: Tensor
    stamps: tuple[int, ...]
    parameters: tuple[Tensor, ...]
    weight: Tensor
    version: int
    memories: list[Memory]
    linked: dict[tuple[bool, bool], Tensor] = field(default_factory=dict)


class Rotation(nn.Module):
    r"""Turns the neurons of one layer: W = V·Rᵀ, R from free parameters (OPT, section 3).

    The weight is computed once and given out until its parameters change; they are compared by value, so that no way of
    writing to them goes unnoticed. The gradient keeps the factorisation and not autograd's saved tensors: a weight may
    be read many times, under `no_grad` and outside, and be differentiated by several `backward` calls. A compiled graph
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
        require(name.isidentifier() and name not in self.free, "name", "an identifier that is not yet in use", name)
        self.free[name] = nn.Parameter(self.identity())

    def use(self, name: str) -> None:
        """Turn by this set of free parameters from now on; the state dict remembers which."""
        require(name in self.free, "name", "one of " + ", ".join(map(repr, self.free)), name)
        self.active = name

    def degrees_of_freedom(self) -> int:
        """Return how many numbers R depends on, over all sets."""
        return len(self.free) * self.layout.matrices * self.method.degrees_of_freedom(self.layout.block)

    def matrices(self) -> Tensor:
        """Return the matrices of the set in use: (d, d), or one for each block and factor."""
        return self.method(self.parameter.detach())

    def forward(self, neurons: Tensor) -> Tensor:
        """Return the rotated weight, of the shape and type of `neurons`."""
        free = self.parameter
        if not sphere.inspectable(free, neurons):
            return _Linked.apply(self, None, free, neurons)
        turned = self._current(free, neurons)
        wanted = (free.requires_grad, neurons.requires_grad)
        if not torch.is_grad_enabled() or not any(wanted):
            return turned.weight
        if wanted not in turned.linked:
            turned.linked[wanted] = _Linked.apply(self, turned, free, neurons)
        return turned.linked[wanted]

    def turn(self, free: Tensor, rows: Tensor) -> tuple[Tensor, list[Memory]]:
        """Return the turned rows (n, d) and the memories of the factors, outside autograd."""
        dimensions = None if self.dimensions is None else self.dimensions.to(rows.device)
        picked = rows if dimensions is None else rows[:, dimensions]
        memories = []
        for j in range(self.layout.factors):
            cut, memory = self.method.apply(self.layout.of_factor(free, j), self.layout.split(picked, j))
            picked = self.layout.join(cut, len(rows), j)
            memories.append(memory)
        if dimensions is None:
            return picked, memories
        turned = rows.clone()
        turned[:, dimensions] = picked
        return turned, memories

    def turn_back(self, memories: list[Memory], gradient: Tensor, *, rows: bool) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the free parameters and of the rows (None unless `rows`)."""
        picked = gradient if self.dimensions is None else gradient[:, self.dimensions]
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
        if self.dimensions is None:
            return of_free, picked
        of_rows = gradient.clone()
        of_rows[:, self.dimensions] = picked
        return of_free, of_rows

    @torch.no_grad()
    def fold(self, neurons: Tensor) -> None:
        """Make the rotated neurons the neurons, in double precision, and start again from R = I."""
        require(len(self.free) == 1, "model", "rotated by one set of parameters to fold and go on", list(self.free))
        require_finite(self.parameter)
        rows, _ = self.turn(sphere.widest(self.parameter), sphere.widest(neurons.flatten(1)))
        neurons.copy_(sphere.narrow(rows, neurons.dtype).view_as(neurons))
        self.parameter.copy_(self.identity())

    def _current(self, free: Tensor, neurons: Tensor) -> _Turned:
        """What is remembered, or made anew if any of its parameters has changed."""
        stamps: tuple[int, ...] = (neurons._version, neurons.data_ptr())
        if self.dimensions is not None:
            stamps += (self.dimensions._version,)
        watched = (free, neurons) if neurons.requires_grad else (free,)
        old = self._turned
        if (
            old is not None
            and old.neurons is neurons
            and old.stamps == stamps
            and old.weight._version == old.version  # nobody has written into what was given out
            and len(old.parameters) == len(watched)
            and all(torch.equal(a, b) for a, b in zip(old.parameters, watched, strict=True))
        ):
            return old
        require_finite(free)
        with torch.inference_mode(False), torch.no_grad(), sphere.full_precision(neurons):
            rows, memories = self.turn(sphere.widen(free.detach()), sphere.widen(neurons.detach()).flatten(1))
            weight = sphere.narrow(rows, neurons.dtype).view_as(neurons)
            kept = tuple(tensor.detach().clone() for tensor in watched)
        self._turned = _Turned(neurons, stamps, kept, weight, weight._version, memories)
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
        if turned is None:
            with sphere.full_precision(neurons):
                rows, memories = rotation.turn(sphere.widen(free.detach()), sphere.widen(neurons.detach()).flatten(1))
            weight = sphere.narrow(rows, neurons.dtype).view_as(neurons)
        else:
            weight, memories = turned.weight.detach(), turned.memories
        ctx.rotation, ctx.memories = rotation, memories
        ctx.shape, ctx.types = neurons.shape, (free.dtype, neurons.dtype)
        return weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, Tensor | None]:
        with sphere.full_precision(gradient):
            rows = sphere.widen(gradient).flatten(1)
            free, v = ctx.rotation.turn_back(ctx.memories, rows, rows=ctx.needs_input_grad[3])
        return None, None, sphere.narrow(free, ctx.types[0]), None if v is None else v.view(ctx.shape).to(ctx.types[1])


def direction_norms(method: RowMap, free: Tensor) -> Tensor:
    """The lengths (…, 1) of the rows of a direction: those of P, and √(d/2) for the numbers of a skew S, ‖S‖_F = √d."""
    if isinstance(method, SkewMap):
        return free.new_full((*free.shape[:-1], 1), math.sqrt(method.size(free) / 2))
    return sphere.norm(free.detach(), keepdim=True)


def require_finite(free: Tensor) -> None:
    """Raise unless the parameters of a rotation are finite; autograd must not see it, or checkpoints count it."""
    free = free.detach()
    if sphere.inspectable(free) and not bool(torch.isfinite(free).all()):
        bad = int((~torch.isfinite(free)).sum())
        raise ValueError(f"the parameters of a rotation must be finite, but {bad} of {free.numel()} are not")
