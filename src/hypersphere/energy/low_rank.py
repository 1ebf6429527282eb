"""Low-rank bilateral CoMHE: neurons that are the product of two learned factors, whose energies are taken."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import sphere
from hypersphere.energy.draws import seeded
from hypersphere.energy.neurons import find_neurons
from hypersphere.functions.menu import require

__all__ = ["LowRank", "factors", "low_rank_"]


class LowRank(nn.Module):
    r"""A parametrisation W̃ = Y₂(P₁Y₂)⁻¹Y₁ of rank r, here with neurons as rows: Y₁ᵀ(Y₂ᵀP₁ᵀ)⁻¹Y₂ᵀ   (thesis, E.23).

    P₁ is drawn once and stays; Y₁ (N, r) and Y₂ (r, d) are learned, from P₁W and WP₂ of the layer as it was.

    Args:
        neurons: N.
        length: d, the numbers of one neuron.
        rank: r, at most the smaller of both.
        shape: of the layer's tensor.
        generator: where P₁ and P₂ come from.
    """

    left: Tensor
    right: Tensor

    def __init__(
        self, neurons: int, length: int, rank: int, shape: tuple[int, ...], generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        smaller = min(neurons, length)
        require(1 <= rank <= smaller, "rank", f"a number from 1 to {smaller}, of {neurons} x {length} neurons", rank)
        self.shape = shape
        self.register_buffer("left", torch.randn(rank, length, generator=generator) / length**0.5)
        self.register_buffer("right", torch.randn(rank, neurons, generator=generator) / neurons**0.5, persistent=False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the layer's tensor from Y₁ (N, r) and Y₂ (r, d)."""
        with sphere.full_precision(first):
            y1, y2, p1 = sphere.widen(first), sphere.widen(second), self.left.to(sphere.widen(first).dtype)
            w = y1 @ torch.linalg.solve(y2 @ p1.mT, y2)
        return w.reshape(self.shape).to(first.dtype)

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return P₁W and WP₂ of a layer's tensor, as rows."""
        rows = w.flatten(1)
        return rows @ self.left.to(rows).mT, self.right.to(rows) @ rows


def low_rank_(
    model: nn.Module, rank: int, *, where: Callable[[str, nn.Module], bool] | None = None, seed: int = 0
) -> nn.Module:
    """Make the hidden layers of `model` products of two learned factors of rank `rank`, in place, and return it.

    `MHE(factors(model))` is the regulariser of low-rank BP-CoMHE. `parametrize.remove_parametrizations` folds a layer.

    Example:
        >>> net = low_rank_(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), rank=3)
        >>> torch.linalg.matrix_rank(net[0].weight).item()
        3
    """
    generator = seeded(seed, 0)
    for layer in find_neurons(model, where=where).hidden:
        sets, n, channels, taps = layer.shape
        require(sets == 1 and not layer.transposed, layer.name, "a layer without groups, not transposed", layer.source)
        assert isinstance(layer.source, nn.Module)
        shape = tuple(layer.weight.shape)
        parametrize.register_parametrization(
            layer.source, "weight", LowRank(n, channels * taps, rank, shape, generator), unsafe=True
        )
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
