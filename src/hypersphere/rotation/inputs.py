r"""Rotating what comes in instead of the weight: ⟨x, R·v⟩ = ⟨Rᵀx, v⟩.

With a million class vectors this is the cheap side: R meets a batch of features and never the vectors (CLS-OPT).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hypersphere.functions.menu import choose, require
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.functions.rowmap import RowMap
from hypersphere.rotation.parametrization import direction_norms

__all__ = ["InputRotation"]


class InputRotation(nn.Module):
    r"""A linear layer or a head whose fixed rows V are turned by turning its input: scores of x·R against V.

    Args:
        module: a Linear layer, or a head with rows of class vectors as `weight`; its weight is frozen.
        method: a name or object of `hypersphere.orthogonal`.
        seed: draw the rows from this seed, of the same spread, and keep them out of the state dict: they cost neither
            optimiser state nor disk. None keeps the rows that are there.

    Example:
        >>> layer = InputRotation(nn.Linear(4, 1000, bias=False), seed=0)
        >>> sum(p.numel() for p in layer.parameters() if p.requires_grad), len(layer.state_dict())
        (6, 1)
    """

    decay_free_parameters = ("free",)

    def __init__(self, module: nn.Module, method: str | RowMap = "cayley", *, seed: int | None = None) -> None:
        super().__init__()
        weight = module._parameters.get("weight")
        accepted = "a layer with a plain weight of rows (n, d), such as Linear or a head"
        require(weight is not None and weight.ndim == 2, "module", accepted, type(module).__name__)
        assert weight is not None
        self.method = choose(ORTHOGONALS, method, "method")
        self.module = module
        self.seed = seed
        self.trained = weight.requires_grad
        weight.requires_grad_(False)
        if seed is not None:
            random = torch.Generator().manual_seed(seed)
            rows = torch.randn(weight.shape, generator=random) * float(weight.detach().square().mean().sqrt())
            del module.weight
            module.register_buffer("weight", rows.to(weight), persistent=False)
        self.free = nn.Parameter(self.method.identity(weight.shape[1]).to(weight))

    def direction_norms(self) -> dict[str, Tensor]:
        """Return how long the rows of a random direction are, for landscapes."""
        return {"free": direction_norms(self.method, self.free)}

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

    @torch.no_grad()
    def fold(self) -> nn.Module:
        """Return the module itself with the rows V·Rᵀ, plain and trainable as before."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        rows = self.method(self.free.detach(), weight)
        if self.seed is not None:
            del self.module.weight
            self.module.weight = nn.Parameter(rows, requires_grad=self.trained)
        else:
            weight.copy_(rows)
            weight.requires_grad_(self.trained)
        return self.module

    def extra_repr(self) -> str:
        """Show the map and the seed."""
        return f"method={self.method!r}, seed={self.seed}"
