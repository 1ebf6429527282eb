r"""Rotate the input of a layer instead of its weight: ⟨x, R·v⟩ = ⟨Rᵀx, v⟩.

The outputs are the same. With a million class vectors, rotating the input is cheaper: R is applied to a batch of
features and never to the class vectors (CLS-OPT).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import is_integer, require, warn_user
from hypersphere.functions._rowmap import RowMap
from hypersphere.rotation.layout import BlockLayout
from hypersphere.rotation.parametrization import Rotation, WeightState, orthogonal_map

__all__ = ["InputRotation"]


class InputRotation(nn.Module):
    r"""Wrap a linear layer or a head with fixed rows V and rotate its input: returns module(x·R).

    To rotate the inputs of all linear layers of a model, call `rotate_` with `side="input"`. This wrapper is for heads
    and other modules whose forward pass is more than a product with V, and for rows that are drawn from a seed.

    Args:
        module: a linear layer, or a head with class vectors as `weight`. The weight is frozen.
        method: a name or an object of `hypersphere.orthogonal`.
        blocks: k, to make R block diagonal.
        block_size: b, the size of the blocks, instead of their number. It must divide d.
        seed: draw the rows from this seed instead of keeping the existing ones, with the same standard deviation (or
            1/√d if there is none to measure). The state dict then contains seed and standard deviation instead of the
            rows, which are drawn again after loading and after every change of dtype or device.

    Example:
        >>> layer = InputRotation(nn.Linear(4, 1000, bias=False), seed=0)
        >>> sum(p.numel() for p in layer.parameters() if p.requires_grad), list(layer.state_dict())
        (6, ['seed', 'spread', 'rotation.free.main'])
    """

    def __init__(
        self,
        module: nn.Module,
        method: str | RowMap = "cayley",
        *,
        blocks: int = 1,
        block_size: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        weight = module._parameters.get("weight") if isinstance(module, nn.Module) else None
        accepted = "a layer with a plain weight of rows (n, d), such as Linear or a head"
        require(weight is not None and weight.ndim == 2, "module", accepted, type(module).__name__)
        assert weight is not None
        is_seed = seed is None or is_integer(seed, -(2**63), 2**63 - 1)
        require(is_seed, "seed", "None or an integer", seed)
        method = orthogonal_map(method)
        length = weight.shape[1]
        if block_size is not None:
            accepted = f"None or a divisor of {length}, the length of a row"
            require(is_integer(block_size, 1) and length % block_size == 0, "block_size", accepted, block_size)
            require(blocks == 1, "block_size", f"None with {blocks=}, because the two exclude each other", block_size)
            blocks = length // block_size
        self.rotation = Rotation(method, BlockLayout(length, blocks), like=weight)
        self.rotation.original_state = WeightState.of(module)
        self.module = module
        self.seed = seed
        weight.requires_grad_(False)
        self.register_load_state_dict_post_hook(self._draw_after_loading)
        if seed is not None:
            self.spread = _standard_deviation(weight.detach())
            del module.weight
            module.register_buffer("weight", torch.empty_like(weight), persistent=False)
            self._draw()

    @property
    def method(self) -> RowMap:
        """The map from free parameters to R."""
        return self.rotation.method

    @property
    def free(self) -> nn.Parameter:
        """The free parameters of R."""
        return self.rotation.parameter

    @property
    def rows(self) -> Float[Tensor, "n d"]:
        """The fixed rows V."""
        return cast(Tensor, self.module.weight)

    def degrees_of_freedom(self) -> int:
        """Return the dimension of the set of all R that training can reach, 0 if R is frozen."""
        return self.rotation.degrees_of_freedom()

    def rotate(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return x·R."""
        return self.rotation.rotate_input(x)

    def turn(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return `rotate(x)`. Deprecated."""
        warn_user("InputRotation.turn is deprecated, use InputRotation.rotate", DeprecationWarning)
        return self.rotate(x)

    def forward(self, x: Float[Tensor, "*batch d"], labels: Tensor | None = None) -> Float[Tensor, "..."]:
        """Return the output of the module for x·R, and for the labels of a head if they are given."""
        rotated = self.rotate(x)
        return self.module(rotated) if labels is None else self.module(rotated, labels)

    def scores(self, x: Float[Tensor, "batch d"]) -> Float[Tensor, "batch n"]:
        """Return the scores of a head without a margin."""
        return self.module.scores(self.rotate(x))  # type: ignore[operator]

    def logits(self, x: Float[Tensor, "batch d"], y: Int[Tensor, " batch"]) -> Float[Tensor, "batch n"]:
        """Return the scores of a head with the margin."""
        return self.module.logits(self.rotate(x), y)  # type: ignore[operator]

    def reset_parameters(self) -> None:
        """Restart from R = I, and draw the rows again if they come from a seed.

        Call it after `to_empty` if the model was made on the meta device.
        """
        with torch.no_grad():
            self.free.copy_(self.rotation.identity())
        self._draw()

    def fold(self) -> nn.Module:
        """Return the module with the plain rows V·Rᵀ, trainable as before. This wrapper restarts from R = I."""
        self.rotation.fold(self.rows)
        if self.seed is not None:  # the rows are a buffer
            rows, self.seed = self.rows, None
            del self.module.weight
            self.module.weight = nn.Parameter(rows)
        self.rotation.original_state.restore(self.module)
        return self.module

    def extra_repr(self) -> str:
        """Show the seed."""
        return f"seed={self.seed}"

    @torch.no_grad()
    def _draw(self) -> None:
        """Draw the rows from the seed, if there is one: in float32 on the CPU, so that all dtypes and devices agree."""
        if self.seed is None or self.free.is_meta:
            return
        generator = torch.Generator().manual_seed(self.seed)
        rows = torch.randn(self.rows.shape, generator=generator, dtype=torch.float32, device="cpu") * self.spread
        # The dtype is taken from the layer, because the parameters of R are never narrower than float32. The device is
        # taken from R, because a state dict that was assigned moves R from the meta device but not the rows.
        self.module.weight = rows.to(self.free.device, self.rows.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InputRotation:
        super()._apply(fn, recurse)
        self._draw()  # draw instead of converting: conversion to half precision and back would round the rows
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.seed is not None:  # stored as tensors, because some file formats hold nothing else
            destination[prefix + "seed"] = torch.tensor(self.seed)
            destination[prefix + "spread"] = torch.tensor(self.spread, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        _, _, missing_keys, _, error_messages = others  # metadata, strict, …, unexpected keys, …
        if self.seed is not None:
            seed, spread = (state_dict.pop(prefix + key, None) for key in ("seed", "spread"))
            missing_keys += [prefix + key for key, value in (("seed", seed), ("spread", spread)) if value is None]
            if seed is not None and int(seed) != self.seed:  # an error even if strict=False: all rows would differ
                error_messages.append(f"{prefix}: saved with seed={int(seed)}, but this module has seed={self.seed}")
            self.spread = self.spread if spread is None else float(spread)
        if prefix + "free" in state_dict:  # the name in version 0.1
            state_dict[prefix + "rotation.free.main"] = state_dict.pop(prefix + "free")
        super()._load_from_state_dict(state_dict, prefix, *others)

    @staticmethod
    def _draw_after_loading(module: nn.Module, incompatible_keys: object) -> None:
        cast(InputRotation, module)._draw()


def _standard_deviation(rows: Tensor) -> float:
    """Return the root mean square of the entries, or 1/√d if they are all zero or on the meta device."""
    rms = 0.0 if rows.is_meta else float(_numerics.widen(rows).square().mean().sqrt())
    return rms if 0 < rms < math.inf else 1 / math.sqrt(rows.shape[1])
