r"""Rotating what comes in instead of the weight: ⟨x, R·v⟩ = ⟨Rᵀx, v⟩.

With a million class vectors this is the cheap side: R meets a batch of features and never the vectors (CLS-OPT).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import choose, is_integer, require
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.functions.rowmap import RowMap
from hypersphere.rotation.parametrization import direction_norms, require_finite

__all__ = ["InputRotation"]


class InputRotation(nn.Module):
    r"""A linear layer or a head whose fixed rows V are turned by turning its input: scores of x·R against V.

    Args:
        module: a Linear layer, or a head with rows of class vectors as `weight`; its weight is frozen.
        method: a name or object of `hypersphere.orthogonal`.
        seed: draw the rows from this seed, of the same spread (or 1/√d where there is none to see), and keep them out
            of the state dict, which holds seed and spread instead: they cost neither optimiser state nor disk, and are
            drawn again on loading and on every change of type or device. None keeps the rows that are there.

    Example:
        >>> layer = InputRotation(nn.Linear(4, 1000, bias=False), seed=0)
        >>> sum(p.numel() for p in layer.parameters() if p.requires_grad), list(layer.state_dict())
        (6, ['free', 'seed', 'spread'])
    """

    decay_free_parameters = ("free",)

    def __init__(self, module: nn.Module, method: str | RowMap = "cayley", *, seed: int | None = None) -> None:
        super().__init__()
        weight = module._parameters.get("weight") if isinstance(module, nn.Module) else None
        accepted = "a layer with a plain weight of rows (n, d), such as Linear or a head"
        require(weight is not None and weight.ndim == 2, "module", accepted, type(module).__name__)
        assert weight is not None
        whole = seed is None or (is_integer(seed, -(2**63), 2**63 - 1))
        require(whole, "seed", "None or a whole number", seed)
        self.method = choose(ORTHOGONALS, method, "method")
        require(isinstance(self.method, RowMap), "method", "a name or an object of `hypersphere.orthogonal`", method)
        self.module = module
        self.seed = seed
        self.plain = weight.requires_grad, tuple(module._parameters)
        weight.requires_grad_(False)
        self.free = nn.Parameter(self.method.identity(weight.shape[1]).to(weight))
        if seed is not None:
            self.spread = _spread(weight.detach())
            del module.weight
            module.register_buffer("weight", torch.empty_like(weight), persistent=False)
            self._draw()

    def direction_norms(self) -> dict[str, Tensor]:
        """Return how long the rows of a random direction are, for landscapes."""
        return {"free": direction_norms(self.method, self.free)}

    def degrees_of_freedom(self) -> int:
        """Return how many numbers R depends on, none if it is frozen."""
        return self.method.degrees_of_freedom(cast(Tensor, self.module.weight).shape[1]) * self.free.requires_grad

    def turn(self, x: Tensor) -> Tensor:
        """Return x·R, row by row."""
        return x @ self.method(self.free).to(x.dtype)

    def forward(self, x: Tensor, *labels: Tensor) -> Tensor:
        """Return what the module gives for x·R."""
        return self.module(self.turn(x), *labels)

    def scores(self, x: Tensor) -> Tensor:
        """Return the plain scores of a head."""
        return self.module.scores(self.turn(x))  # type: ignore[operator]

    def logits(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the scores of a head with the margin."""
        return self.module.logits(self.turn(x), y)  # type: ignore[operator]

    def reset_parameters(self) -> None:
        """Start from R = I, and draw the rows if there is a seed: for a model made on meta and moved by `to_empty`."""
        with torch.no_grad():
            self.free.copy_(self.method.identity(cast(Tensor, self.module.weight).shape[1]).to(self.free))
        self._draw()

    @torch.no_grad()
    def fold(self) -> nn.Module:
        """Return the module itself with the rows V·Rᵀ, plain and trainable as before; this one starts from R = I."""
        require_finite(self.free)
        weight = cast(Tensor, self.module.weight)
        rows = self.method(self.free.detach(), weight)
        trained, order = self.plain
        if self.seed is not None:
            del self.module.weight
            self.module.weight = nn.Parameter(rows, requires_grad=trained)
            for name in order:  # so that an optimiser's state finds the parameters in their places
                self.module._parameters[name] = self.module._parameters.pop(name)
            self.seed = None
        else:
            weight.copy_(rows)
            weight.requires_grad_(trained)
        self.free.copy_(self.method.identity(rows.shape[1]).to(self.free))
        return self.module

    def extra_repr(self) -> str:
        """Show the map and the seed."""
        return f"method={self.method!r}, seed={self.seed}"

    @torch.no_grad()
    def _draw(self) -> None:
        """Draw the rows where they come from a seed, in float32 whatever their type, so that all types agree."""
        if self.seed is None or self.free.is_meta:
            return
        random = torch.Generator().manual_seed(self.seed)
        weight = cast(Tensor, self.module.weight)
        rows = torch.randn(weight.shape, generator=random, dtype=torch.float32, device="cpu") * self.spread
        self.module.weight = rows.to(self.free)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InputRotation:
        super()._apply(fn, recurse)
        self._draw()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.seed is not None:  # as numbers, so that formats for tensors alone can hold it
            destination[prefix + "seed"] = torch.tensor(self.seed)
            destination[prefix + "spread"] = torch.tensor(self.spread, dtype=torch.float64)

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
        if self.seed is not None:
            seed, spread = (state_dict.pop(prefix + key, None) for key in ("seed", "spread"))
            missing_keys += [prefix + k for k, v in (("seed", seed), ("spread", spread)) if v is None]
            if seed is not None and int(seed) != self.seed:  # an error even where others are forgiven
                error_msgs.append(f"{prefix}: saved with seed={int(seed)}, but this one has seed={self.seed}")
            self.spread = self.spread if spread is None else float(spread)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._draw()


def _spread(rows: Tensor) -> float:
    """The root of the mean square of the entries; 1/√d where there are none to see, or all are zero."""
    found = 0.0 if rows.is_meta else float(_numerics.widen(rows).square().mean().sqrt())
    return found if 0 < found < math.inf else 1 / math.sqrt(rows.shape[1])
