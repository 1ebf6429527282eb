r"""Any optimiser on the sphere: weights keep their initial norm, and steps have a constant angle.

For weights whose norm does not matter, only the ratio of step to norm counts, and weight decay controls this ratio
indirectly. `Hyperball` sets it directly: it uses the direction of the update of another optimiser, but neither its
length nor weight decay.

Reference:
    Wen, Dang, Lyu, Ma and Liang, Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball Optimization,
    2026.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import require
from hypersphere.optim.torch_optimizers import restore_saved_dtypes

__all__ = ["Hyperball"]

_PER_OPTIONS = ("matrix", "row", None)


class Hyperball(torch.optim.Optimizer):
    r"""Keep weights on the sphere of their initial norm ρ while another optimiser chooses the directions u.

    Where the base optimiser would update W ← W − ηu, this one updates

        W ← ρ·norm(W − η·ρ·norm(u)),    norm(x) = x/‖x‖.

    The learning rate η is therefore the length of a step relative to the weight, for all weights and throughout
    training. A step perpendicular to W turns it by the angle arctan η, which is 0.6° for η = 0.01.

    - A parameter with two or more dimensions is one matrix, and its first dimension counts its rows (neurons, filters,
      class vectors). Parameters with fewer dimensions get the plain update of the base optimiser.
    - ρ is measured before the first step of a parameter and saved in its state as "radius". Weights may therefore be
      loaded between the construction of the optimiser and the first step.
    - A matrix that is zero at its first step, such as the second factor of LoRA or a zero-initialised output layer, has
      no radius. It gets the plain update throughout training. With per="row", so does a zero row.
    - Weight decay has no effect on projected matrices. It applies to the parameters that get the plain update.
    - If u is zero, W does not change.

    The base optimiser computes its update from W = 0 and not from W, so u is free of weight decay and of the rounding
    of W − ηu, which matters in half precision. This needs memory of the size of the matrices, which is kept between
    steps on the CPU. Step hooks of the base optimiser see these updates in place of the weights; hooks of `Hyperball`
    see the weights.

    `param_groups`, `defaults` and `state` belong to the base optimiser, so learning-rate schedulers, gradient
    scalers and checkpoints work as for the base optimiser. A state of the base optimiser alone can be loaded, too; the
    radii are then the norms at the next step.

    Args:
        base_optimizer: an optimiser of `torch.optim` or with the same interface, other than `LBFGS`, which evaluates
            the model within a step.
        per: "matrix" to keep the Frobenius norm of every matrix, or "row" to keep the norm of every row. A parameter
            group may have its own option "per", where None selects the plain update, for example for embeddings.

    Example:
        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = Hyperball(torch.optim.AdamW(layer.parameters(), lr=0.01))
        >>> norm = layer.weight.detach().norm()
        >>> for _ in range(10):
        ...     optimizer.zero_grad()
        ...     layer(torch.randn(16, 8)).square().mean().backward()
        ...     optimizer.step()
        >>> torch.allclose(layer.weight.norm(), norm)
        True
    """

    base_optimizer: torch.optim.Optimizer
    """The optimiser that chooses the directions."""

    _displacements: dict[Tensor, Tensor]

    def __init__(self, base_optimizer: torch.optim.Optimizer, per: str | None = "matrix") -> None:
        is_optimizer = isinstance(base_optimizer, torch.optim.Optimizer)
        fits = is_optimizer and not isinstance(base_optimizer, torch.optim.LBFGS)
        fits = fits and all("lr" in group for group in base_optimizer.param_groups)
        accepted = "an optimiser of torch.optim with a learning rate, other than LBFGS"
        require(fits, "base_optimizer", accepted, type(base_optimizer).__name__)
        for group in base_optimizer.param_groups:
            _require_per({"per": per, **group})
        base_optimizer.defaults["per"] = per
        for group in base_optimizer.param_groups:
            group.setdefault("per", per)
        # `Optimizer.__init__` would create separate groups and states. `__setstate__` initialises everything else.
        self.__setstate__({"base_optimizer": base_optimizer, "_displacements": {}})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the base optimiser."""
        return self.base_optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default options of the base optimiser."""
        return self.base_optimizer.defaults

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The state of the base optimiser, which includes the radii."""
        return self.base_optimizer.state

    def __getstate__(self) -> dict[str, Any]:
        return {"base_optimizer": self.base_optimizer, "_displacements": {}}

    def __repr__(self) -> str:
        return f"Hyperball({self.base_optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the base optimiser."""
        param_group.setdefault("per", self.defaults["per"])
        _require_per(param_group)
        self.base_optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base optimiser, which includes the radii."""
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimiser, or of the base optimiser alone."""
        self.base_optimizer.load_state_dict(state_dict)
        restore_saved_dtypes(self, state_dict, names=["radius"])
        for group in self.param_groups:
            group.setdefault("per", self.defaults["per"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the base optimiser, and move the matrices on their spheres."""
        loss = None
        if closure is not None:
            # Called now, because the parameters are zero during the step of the base optimiser.
            with torch.enable_grad():
                loss = closure()
        moves = [move for group in self.param_groups for move in self._moves(group)]
        projected = [move for move in moves if move.radius is not None]
        try:
            for move in projected:
                move.begin(self._displacements)
            self.base_optimizer.step()
        finally:
            for move in projected:
                move.end()
        for move in moves:
            # Optimisers initialise states that are empty, so the radius must not be stored before their step.
            self.state[move.parameter]["radius"] = move.radius
        batches: dict[Any, list[_Move]] = {}
        for move in projected:
            key = id(move.group), move.weight.device, move.weight.dtype
            batches.setdefault(key, []).append(move)
        for batch in batches.values():
            _move_on_spheres(batch)
        return loss

    def _moves(self, group: dict[str, Any]) -> list[_Move]:
        """Return the matrices of a group that have a gradient, with their radii."""
        moves = []
        for p in group["params"]:
            if group["per"] is not None and p.grad is not None and p.ndim >= 2 and p.numel():
                state = self.state.get(p, {})
                radius = state["radius"] if "radius" in state else _initial_radius(p.data, group["per"])
                moves.append(_Move(p, p.data, radius, group))
        return moves


@dataclass
class _Move:
    """The step of one matrix.

    Attributes:
        parameter: the matrix.
        weight: its values.
        radius: ρ, with one number per matrix or per row and as many dimensions as the weight; None if there is none.
        group: its parameter group.
        displacement: −ηu, the update of the base optimiser.
    """

    parameter: Tensor
    weight: Tensor
    radius: Tensor | None
    group: dict[str, Any]
    displacement: Tensor | None = None

    @property
    def _is_plain(self) -> bool:
        # Subclasses, such as the DTensors of FSDP2, hold their values elsewhere than in `data`.
        return type(self.weight) is Tensor

    def begin(self, displacements: dict[Tensor, Tensor]) -> None:
        """Set the parameter to zero until `end`. On the CPU, `displacements` keeps the memory that this needs."""
        if not self._is_plain:
            self.displacement = self.weight.clone()
            self.weight.zero_()
            return
        zeros = displacements.get(self.parameter)
        if zeros is not None and _layout(zeros) == _layout(self.weight):
            zeros.zero_()
        else:
            zeros = torch.zeros_like(self.weight)
            # The CPU allocator may return memory to the system, and requesting it again costs more than the arithmetic
            # of a step. Other devices have allocators that keep memory.
            if zeros.device.type == "cpu":
                displacements[self.parameter] = zeros
        self.parameter.data = zeros

    def end(self) -> None:
        """Take the displacement from the parameter, and restore its values."""
        if self._is_plain:
            self.displacement, self.parameter.data = self.parameter.data, self.weight
        elif self.displacement is not None:
            values, self.displacement = self.displacement, self.weight.clone()
            self.weight.copy_(values)


def _move_on_spheres(moves: Sequence[_Move]) -> None:
    """Add displacements of length η·ρ to the weights of one group, device and dtype, and restore their norms."""
    per, rate = moves[0].group["per"], moves[0].group["lr"]
    weights = [_numerics.widen(move.weight) for move in moves]
    displacements = [_numerics.widen(move.displacement) for move in moves]  # type: ignore[arg-type]
    # The radii and norms of all matrices are joined in one vector, so that a few operations update them all.
    radii = torch.cat([move.radius.flatten() for move in moves])  # type: ignore[union-attr]
    lengths = _norms(displacements, per)
    sizes, shapes = [t.numel() for t in lengths], [t.shape for t in lengths]

    def split(values: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(values.split(sizes), shapes, strict=True)]

    length = torch.cat([t.flatten() for t in lengths])
    has_radius, is_unchanged = radii > 0, _numerics.squared_norm_is_zero(length.square())
    # Rows without radius get the plain update.
    factors = torch.where(has_radius, (rate * radii / length).masked_fill(is_unchanged, 0.0), 1.0)
    torch._foreach_addcmul_(weights, displacements, split(factors))
    norms = torch.cat([t.flatten() for t in _norms(weights, per)])
    # Weights without a step are not rescaled, so that rounding does not change them.
    is_unchanged |= _numerics.squared_norm_is_zero(norms.square())
    torch._foreach_mul_(weights, split(torch.where(has_radius & ~is_unchanged, radii / norms, 1.0)))
    for move, weight in zip(moves, weights, strict=True):
        if weight is not move.weight:
            move.weight.copy_(_numerics.narrow(weight, move.weight.dtype))


def _initial_radius(weight: Tensor, per: str) -> Tensor | None:
    """Return the norm of a matrix or of its rows in float32 or wider, zero where it is too small to define a direction.

    Returns None if there is no such norm. This reads a value from the device, once per parameter.
    """
    norms = _norms([_numerics.widen(weight)], per)[0]
    is_zero = _numerics.squared_norm_is_zero(norms.square())
    return None if bool(is_zero.all()) else norms.masked_fill(is_zero, 0.0)


def _norms(tensors: Sequence[Tensor], per: str) -> list[Tensor]:
    """Return the norm of every tensor or of its rows, with as many dimensions as the tensor."""
    # On the CPU one sum over a large matrix loses three digits in float32, so matrices are summed row by row, too.
    norms = [torch.linalg.vector_norm(t, dim=tuple(range(1, t.ndim)), keepdim=True) for t in tensors]
    if per == "matrix":
        totals = torch._foreach_norm(norms)
        norms = [total.view([1] * t.ndim) for total, t in zip(totals, tensors, strict=True)]
    return norms


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device


def _require_per(group: dict[str, Any]) -> None:
    require(group["per"] in _PER_OPTIONS, "per", "'matrix', 'row' or None", group["per"])
