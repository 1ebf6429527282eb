"""Low-rank bilateral CoMHE: neurons that are the product of two learned factors, whose energies are taken."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import _numerics
from hypersphere._validation import is_integer, require
from hypersphere.energy.neurons import find_neurons

__all__ = ["LowRank", "factors", "low_rank_"]


class LowRank(nn.Module):
    r"""A parametrisation W̃ = Y₂(P₁Y₂)⁻¹Y₁ of rank r, here with neurons as rows: Y₁ᵀ(Y₂ᵀP₁ᵀ)⁻¹Y₂ᵀ   (thesis, E.23).

    Y₁ (N, r) and Y₂ (r, d) are learned; P₁ stays. All start from the singular vectors UΣVᵀ of the layer as it was, as
    Y₁ = UΣ, Y₂ = P₁ = Vᵀ of the r largest: the layer's best approximation of that rank, and the best conditioned P₁Y₂.

    Args:
        weight: the layer's tensor, (N, …).
        rank: r, at most N and the length of a neuron.
    """

    left: Tensor

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows = _numerics.widen(weight.detach()).flatten(1)
        smaller = min(rows.shape)
        accepted = f"an integer from 1 to {smaller}, of {rows.shape[0]} x {rows.shape[1]} neurons"
        require(is_integer(rank, 1, smaller), "rank", accepted, rank)
        self.shape = tuple(weight.shape)
        self.register_buffer("left", torch.linalg.svd(rows, full_matrices=False).Vh[:rank].contiguous())

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the layer's tensor from Y₁ (N, r) and Y₂ (r, d)."""
        with _numerics.autocast_disabled(first):
            y1, y2, p1 = _numerics.widen(first), _numerics.widen(second), self.left.to(_numerics.widen(first).dtype)
            w = y1 @ torch.linalg.solve(y2 @ p1.mT, y2)
        return w.reshape(self.shape).to(first.dtype)

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return WP₁ᵀ and P₁ for a layer's tensor, which is met where its rows lie in the span of P₁."""
        p1 = self.left.to(_numerics.widen(w).dtype)
        return (_numerics.widen(w).flatten(1) @ p1.mT).to(w.dtype), p1.to(w.dtype, copy=True)


def low_rank_(model: nn.Module, rank: int, *, where: Callable[[str, nn.Module], bool] | None = None) -> nn.Module:
    """Make the hidden layers of `model` products of two learned factors of rank `rank`, in place, and return it.

    `MHE(factors(model))` is the regulariser of low-rank BP-CoMHE. `parametrize.remove_parametrizations` folds a layer.
    If a layer cannot be changed, none is.

    Example:
        >>> net = low_rank_(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), rank=3)
        >>> torch.linalg.matrix_rank(net[0].weight).item()
        3
    """
    hidden = find_neurons(model, where=where).hidden
    require(bool(hidden), "model", "one with a hidden layer", "without")
    made: list[tuple[nn.Module, LowRank]] = []
    for layer in hidden:
        assert isinstance(layer.source, nn.Module)
        plain = layer.groups == 1 and not layer.transposed
        require(plain, layer.name, "a layer without groups, not transposed", type(layer.source).__name__)
        parametrised = parametrize.is_parametrized(layer.source, "weight")
        require(not parametrised, layer.name, "a layer whose weight has no parametrisation yet", "parametrised")
        try:
            made.append((layer.source, LowRank(layer.weight, rank)))
        except ValueError as error:
            raise ValueError(f"{error} in {layer.name}") from None
    for module, parametrisation in made:
        parametrize.register_parametrization(module, "weight", parametrisation, unsafe=True)
    return model


def factors(model: nn.Module) -> dict[str, Tensor]:
    """Return Y₁ and Y₂ of every low-rank layer as named rows: N vectors of r numbers and r vectors of d.

    >>> net = low_rank_(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), rank=3)
    >>> {name: tuple(rows.shape) for name, rows in factors(net).items()}
    {'0.first': (6, 3), '0.second': (3, 8)}
    """
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, parametrize.ParametrizationList) and isinstance(module[0], LowRank):
            layer = name.removesuffix(".parametrizations.weight")
            found |= {f"{layer}.first": module.get_parameter("original0")}
            found |= {f"{layer}.second": module.get_parameter("original1")}
    return found
