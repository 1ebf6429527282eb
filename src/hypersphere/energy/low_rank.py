r"""Layers of low rank: a parametrisation by two learned factors, whose energies are the low-rank form of CoMHE."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import _numerics
from hypersphere._layer_selection import NeuronLayer, layers_of
from hypersphere._validation import is_integer, require

__all__ = ["LowRank", "factors", "low_rank_"]


class LowRank(nn.Module):
    r"""A parametrisation W̃ = Y₂(P₁Y₂)⁻¹Y₁ of rank r   (thesis, E.23). With neurons as rows it is Y₁(Y₂P₁ᵀ)⁻¹Y₂.

    Y₁ (N, r) and Y₂ (r, d) are learned; P₁ (r, d) is fixed. They start at the layer's best approximation of
    rank r, W·VVᵀ with its leading right singular vectors V: Y₂ = Vᵀ and Y₁ = W·VVᵀ·P₁ᵀ.

    Args:
        weight: the tensor of the layer, (N, …).
        rank: r, at most N and the length of a neuron.
        basis: P₁, "svd" for Vᵀ, which makes P₁Y₂ well conditioned, or "random" for the Gaussian matrix of the source.
        generator: the generator of a random P₁; the global one if None.
    """

    left: Tensor  # P₁, on the left in (E.23), where neurons are columns

    def __init__(
        self,
        weight: Float[Tensor, "neurons ..."],
        rank: int,
        *,
        basis: str = "svd",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        rows = _numerics.widen(weight.detach()).flatten(1)
        smaller = min(rows.shape)
        accepted = f"an integer from 1 to {smaller}, of {rows.shape[0]} x {rows.shape[1]} neurons"
        require(is_integer(rank, 1, smaller), "rank", accepted, rank)
        require(basis in ("svd", "random"), "basis", "'svd' or 'random'", basis)
        self.shape = tuple(weight.shape)
        if basis == "random":
            p1 = torch.randn(rank, rows.shape[1], generator=generator).to(rows)
        else:
            p1 = _right_singular_vectors(rows, rank)
        self.register_buffer("left", p1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the tensor of the layer from Y₁ (N, r) and Y₂ (r, d)."""
        with _numerics.autocast_disabled(first):
            y1, y2 = _numerics.widen(first), _numerics.widen(second)
            p1 = self.left.to(y1.dtype)
            # Solving with the r × r matrix Y₂P₁ᵀ is more accurate than multiplying by its inverse.
            w = y1 @ torch.linalg.solve(y2 @ p1.mT, y2)
        return w.reshape(self.shape).to(first.dtype)

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return Y₁ = W·VVᵀ·P₁ᵀ and Y₂ = Vᵀ for the best approximation W·VVᵀ of a tensor."""
        rows = _numerics.widen(w).flatten(1)
        right = _right_singular_vectors(rows, len(self.left))
        # Then Y₁(Y₂P₁ᵀ)⁻¹Y₂ = W·V·(VᵀP₁ᵀ)(VᵀP₁ᵀ)⁻¹·Vᵀ = W·VVᵀ.
        return (rows @ right.mT @ (right @ self.left.to(rows).mT)).to(w.dtype), right.to(w.dtype)


def _right_singular_vectors(rows: Tensor, rank: int) -> Tensor:
    """Return the `rank` leading right singular vectors of a matrix as rows."""
    return torch.linalg.svd(rows, full_matrices=False).Vh[:rank].contiguous()


def low_rank_(
    model: nn.Module,
    rank: int,
    *,
    basis: str = "svd",
    output_layer: str | Sequence[str] | None = "auto",
    where: Callable[[str, nn.Module], bool] | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Turn the hidden layers of `model` into products of two learned factors of rank `rank`, in place, and return it.

    `MHE(factors(model))` is the regulariser of low-rank BP-CoMHE. `parametrize.remove_parametrizations` folds a layer.
    If one layer cannot be changed, none is.

    Args:
        model: the model.
        rank: the rank of every hidden layer.
        basis: the fixed matrix P₁, "svd" or "random" (see `LowRank`).
        output_layer: the name of the output layer, or several names. "auto" recognises it as `layers_of` does, and
            warns if it cannot. None if the model has no output layer.
        where: a predicate of name and module that selects layers.
        generator: the generator of random matrices P₁; the global one if None.

    Example:
        >>> net = low_rank_(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), rank=3)
        >>> torch.linalg.matrix_rank(net[0].weight).item()
        3
    """
    selection = layers_of(model, output_layer=output_layer, where=where)
    selection.warn_if_output_is_unknown()
    hidden = [layer for layer in selection.hidden if layer.shape[1] > 1]
    require(bool(hidden), "model", "one with a hidden layer", "one without")
    parametrizations: list[tuple[NeuronLayer, LowRank]] = []
    # Check and factorise all layers before the first one is changed.
    for layer in hidden:
        module, kind = layer.module, type(layer.module).__name__
        assert module is not None
        is_plain = layer.groups == 1 and layer.part.is_whole
        require(is_plain, layer.name, "a layer without groups that stores its neurons in the first dimension", kind)
        is_free = not parametrize.is_parametrized(module, layer.parameter)
        require(is_free, layer.name, "a layer whose weight has no parametrisation yet", "parametrised")
        try:
            parametrizations.append((layer, LowRank(layer.tensor, rank, basis=basis, generator=generator)))
        except ValueError as error:
            raise ValueError(f"{error} in {layer.name}") from None
    for layer, parametrization in parametrizations:
        assert layer.module is not None
        # `unsafe` skips one more evaluation of the product, which would only compare dtype and shape.
        parametrize.register_parametrization(layer.module, layer.parameter, parametrization, unsafe=True)
    return model


def factors(model: nn.Module) -> dict[str, Tensor]:
    """Return Y₁ and Y₂ of every low-rank layer as named rows: N vectors of r numbers and r vectors of d numbers.

    >>> net = low_rank_(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), rank=3)
    >>> {name: tuple(rows.shape) for name, rows in factors(net).items()}
    {'0.first': (6, 3), '0.second': (3, 8)}
    """
    named: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, parametrize.ParametrizationList) and isinstance(module[0], LowRank):
            # The path is "layer.parametrizations.weight". The name of the layer suffices for its only weight.
            owner, _, parameter = name.rpartition("parametrizations.")
            layer = owner if parameter == "weight" else f"{owner}{parameter}."
            named[f"{layer}first"] = module.get_parameter("original0")
            named[f"{layer}second"] = module.get_parameter("original1")
    return named
