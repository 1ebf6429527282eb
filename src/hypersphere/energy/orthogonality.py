"""The regularisers that energies are compared with: they want neurons orthogonal, not evenly spread."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, is_number, require
from hypersphere.energy.draws import require_seed, seeded
from hypersphere.energy.neurons import Source, find_neurons, stack_equal_shapes

__all__ = ["SRIP", "Orthogonal", "Orthonormal"]


class _GramRegulariser(nn.Module):
    """λ·Σ_layers of some function of the layer's rows, all layers of a model taken."""

    def __init__(
        self, model: Source, weight: float = 1e-4, *, where: Callable[[str, nn.Module], bool] | None = None
    ) -> None:
        super().__init__()
        require(is_number(weight, 0), "weight", "a number >= 0", weight)
        self.weight = weight
        self.population = find_neurons(model, output=None, where=where)

    @property
    def skipped(self) -> tuple[str, ...]:
        """The layers left out because they have one neuron."""
        return self.population.skipped

    def forward(self) -> Tensor:
        """Return the regulariser."""
        with _numerics.autocast_disabled(self.population.layers[0].anchor):
            rows = [layer.rows() for layer in self.population.layers]
            terms = [self.of(stack) for stack in stack_equal_shapes(rows)]
            total = self.weight * torch.stack([term.to(terms[0]) for term in terms]).sum()
        self.population.require_finite(total)
        return total

    def of(self, w: Tensor) -> Tensor:
        """Return the sum over a stack (…, N, d)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Show the factor and the layers."""
        return f"weight={self.weight} of [{', '.join(layer.name for layer in self.population.layers)}]"


class Orthonormal(_GramRegulariser):
    r"""λ·Σ_layers ‖WWᵀ − I‖²_F, rows of W being neurons.

    Args:
        model: a module or named tensors, as for `MHE`; the output layer is a layer like the others.
        weight: λ.
        where: which layers to take, by name and module.

    Example:
        >>> Orthonormal({"w": 2 * torch.eye(2)}, weight=1.0)()
        tensor(18.)
    """

    def of(self, w: Tensor) -> Tensor:
        """Return Σ‖WWᵀ − I‖²."""
        return (w @ w.mT - torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)).square().sum()


class Orthogonal(_GramRegulariser):
    r"""λ·Σ_layers ‖WWᵀ − diag(WWᵀ)‖²_F, rows of W being neurons, whose norms are free.

    Args:
        model: a module or named tensors, as for `MHE`; the output layer is a layer like the others.
        weight: λ.
        where: which layers to take, by name and module.

    Example:
        >>> Orthogonal({"w": torch.tensor([[2.0, 0.0], [1.0, 1.0]])}, weight=1.0)()
        tensor(8.)
    """

    def of(self, w: Tensor) -> Tensor:
        """Return the sum of the squares off the diagonals of WWᵀ."""
        itself = torch.eye(w.shape[-2], dtype=torch.bool, device=w.device)
        return (w @ w.mT).masked_fill(itself, 0.0).square().sum()


class SRIP(_GramRegulariser):
    r"""λ·Σ_layers σ_max(WWᵀ − I) by power iteration, rows of W being neurons.

    Products with W and Wᵀ alone; the vectors that the iteration reached are in the state dict and serve the next step.

    Args:
        model: a module or named tensors, as for `MHE`; the output layer is a layer like the others.
        weight: λ.
        iterations: power iterations at each step.
        where: which layers to take, by name and module.
        seed: of the first vectors.

    Example:
        >>> SRIP({"w": torch.diag(torch.tensor([2.0, 1.0]))}, weight=1.0, iterations=9)()
        tensor(3.)

    Reference:
        Bansal et al., Can We Gain More from Orthogonality Regularizations in Training Deep CNNs?, NeurIPS 2018.
    """

    def __init__(
        self,
        model: Source,
        weight: float = 1e-4,
        *,
        iterations: int = 2,
        where: Callable[[str, nn.Module], bool] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, weight, where=where)
        whole = is_integer(iterations, 1)
        require(whole, "iterations", "an integer >= 1", iterations)
        require_seed(seed)
        self.iterations = iterations
        for at, layer in enumerate(self.population.layers):
            sets, n, _, _ = layer.shape
            vector = torch.randn(sets, n, 1, generator=seeded(seed, at))
            self.register_buffer(f"vector_{at}", layer.placed(vector / math.sqrt(n)))

    def forward(self) -> Tensor:
        """Return the regulariser and, while training, keep the vectors for the next step."""
        with _numerics.autocast_disabled(self.population.layers[0].anchor):
            terms, vectors = [], []
            for at, layer in enumerate(self.population.layers):
                w = layer.rows()
                v = self._reached(w.detach(), getattr(self, f"vector_{at}").to(w))
                terms.append(sphere.norm(_excess(w, v), dim=-2).sum())
                vectors.append(v)
            total = self.weight * torch.stack([term.to(terms[0]) for term in terms]).sum()
        self.population.require_finite(total)
        if self.training:
            for at, v in enumerate(vectors):
                setattr(self, f"vector_{at}", v.clone())
        return total

    @torch.no_grad()
    def _reached(self, w: Tensor, v: Tensor) -> Tensor:
        """Where the iteration comes to from v; it stays where the excess vanishes, as at an orthonormal layer."""
        for _ in range(self.iterations):
            moved = sphere.normalize(_excess(w, v), dim=-2)
            v = torch.where((moved == 0).all(-2, keepdim=True), v, moved)
        return v


def _excess(w: Tensor, v: Tensor) -> Tensor:
    """(WWᵀ − I)v without the Gram matrix."""
    return w @ (w.mT @ v) - v
