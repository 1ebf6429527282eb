"""Orthogonality regularisers, with which energies are compared: they want neurons orthogonal, not evenly spread."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._layer_selection import LayerSource, NeuronLayer
from hypersphere._validation import is_integer, require
from hypersphere.energy._regularizer import (
    CallKind,
    NeuronRegularizer,
    RegularizerOptions,
    StepResult,
    add_terms,
    check_factor,
    check_seed,
    seeded_generator,
    stack_equal_shapes,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SRIP", "Orthogonal", "Orthonormal"]


class GramOptions(RegularizerOptions, total=False):
    """The options that the regularisers of Gram matrices share. `Orthonormal` documents them."""

    output: bool


class _GramRegularizer(NeuronRegularizer):
    """Σ_layers λ·f(WWᵀ) for the rows W of each layer."""

    def __init__(
        self,
        model: LayerSource,
        weight: float = 1e-5,
        *,
        output: bool = False,
        **options: Unpack[RegularizerOptions],
    ) -> None:
        check_factor("weight", weight)
        require(isinstance(output, bool), "output", "a bool", output)
        roles = ("hidden", "output") if output else ("hidden",)
        super().__init__(model, roles=roles, shortest=1, needs_counter=False, **options)
        self.weight = weight

    def factor(self, layer: NeuronLayer) -> float:
        """Return λ of a layer."""
        return self.layer_weights.get(layer.name, self.weight)

    def sum_over_layers(self, value: Callable[[Tensor], Tensor]) -> Tensor:
        """Return Σ λ·value for a function of stacks (L, groups, N, d) that returns one number per layer."""
        stacks = stack_equal_shapes((layer.row_sets(), self.factor(layer)) for layer in self.selection)
        return add_terms([(factors * value(stack)).sum() for stack, factors in stacks], self.selection[0].anchor)

    def extra_repr(self) -> str:
        """Show the factor and the layers."""
        return f"weight={self.weight} of [{', '.join(layer.name for layer in self.selection)}]"


class Orthonormal(_GramRegularizer):
    r"""Orthonormality: λ·Σ_layers ‖WWᵀ − I‖²_F, where the rows of W are neurons.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        weight: λ.
        output: True to regularise the output layer too, which the sources exclude.
        options: `layer_weights`, `schedule`, `every`, `output_layer`, `where`, `auto_advance` and `report`, which all
            regularisers share; see `NeuronRegularizer`.

    Example:
        >>> Orthonormal({"w": 2 * torch.eye(2)}, weight=1.0)()
        tensor(18.)
    """

    def compute(self, labels: Tensor | None, step: int, call: CallKind) -> StepResult:
        """Return λ·Σ‖WWᵀ − I‖²."""

        def squared_error(w: Tensor) -> Tensor:
            identity = torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)
            return (w @ w.mT - identity).square().sum((-3, -2, -1))

        return StepResult(self.sum_over_layers(squared_error))


class Orthogonal(_GramRegularizer):
    r"""Orthogonality: λ·Σ_layers Σ_{i≠j} cos²(wᵢ, wⱼ), the sum of squared cosines between neurons.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        weight: λ.
        normalize: False for Σ_{i≠j} (wᵢ·wⱼ)² = ‖WWᵀ − diag(WWᵀ)‖²_F, which also shrinks the neurons.
        options: `output` and the options that all regularisers share, see `Orthonormal`.

    Example:
        >>> w = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
        >>> Orthogonal({"w": w}, weight=1.0)(), Orthogonal({"w": w}, weight=1.0, normalize=False)()
        (tensor(1.0000), tensor(8.))
    """

    def __init__(
        self,
        model: LayerSource,
        weight: float = 1e-5,
        *,
        normalize: bool = True,
        **options: Unpack[GramOptions],
    ) -> None:
        require(isinstance(normalize, bool), "normalize", "a bool", normalize)
        super().__init__(model, weight, **options)
        self.uses_cosines = normalize

    def compute(self, labels: Tensor | None, step: int, call: CallKind) -> StepResult:
        """Return λ times the sum of squares off the diagonal of the Gram matrices."""

        def squares_off_diagonal(w: Tensor) -> Tensor:
            # The diagonal is masked instead of subtracted: it is large, and rounding errors of it would remain.
            rows = sphere.row_directions(w) if self.uses_cosines else w
            no_pair = torch.eye(w.shape[-2], dtype=torch.bool, device=w.device)
            return (rows @ rows.mT).masked_fill(no_pair, 0.0).square().sum((-3, -2, -1))

        return StepResult(self.sum_over_layers(squares_off_diagonal))


class SRIP(_GramRegularizer):
    r"""Spectral restricted isometry: λ·Σ_layers σ_max(WWᵀ − I) by power iteration, where the rows of W are neurons.

    The iteration uses products with W and Wᵀ only. Its vectors are buffers, and each step continues from the last one.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        weight: λ.
        iterations: power iterations per step.
        seed: the seed of the first vectors.
        options: `output` and the options that all regularisers share, see `Orthonormal`.

    Example:
        >>> SRIP({"w": torch.diag(torch.tensor([2.0, 1.0]))}, weight=1.0, iterations=9)()
        tensor(3.)

    Reference:
        Bansal et al., Can We Gain More from Orthogonality Regularizations in Training Deep CNNs?, NeurIPS 2018.
    """

    def __init__(
        self,
        model: LayerSource,
        weight: float = 1e-5,
        *,
        iterations: int = 2,
        seed: int = 0,
        **options: Unpack[GramOptions],
    ) -> None:
        super().__init__(model, weight, **options)
        require(is_integer(iterations, 1), "iterations", "an integer >= 1", iterations)
        check_seed(seed)
        self.iterations = iterations
        for index, layer in enumerate(self.selection):
            groups, n, _, _ = layer.shape
            # Drawn on the CPU from seed and position, so that every rank starts from the same vectors.
            vector = torch.randn(groups, n, 1, generator=seeded_generator(seed, index)) / math.sqrt(n)
            anchor = layer.anchor.detach()
            placed = vector if anchor.is_meta else vector.to(anchor.device, _numerics.widen(anchor[:0]).dtype)
            self.register_buffer(f"vector_{index}", placed)

    def compute(self, labels: Tensor | None, step: int, call: CallKind) -> StepResult:
        """Return the weighted sum over layers, and the vectors from which the next step continues."""
        terms, vectors = [], {}
        for index, layer in enumerate(self.selection):
            w, name = layer.row_sets(), f"vector_{index}"
            # A repeated call starts from the vector before the step, so that it computes the same value.
            v = self._iterate(w, self.initial_value(name, call).to(w))
            # ‖(WWᵀ − I)v‖ of a unit v converges to the largest |eigenvalue|, also if that is negative.
            terms.append(self.factor(layer) * sphere.norm(_excess(w, v), dim=-2).sum())
            vectors[name] = v
        return StepResult(add_terms(terms, self.selection[0].anchor), vectors)

    def _iterate(self, w: Tensor, v: Tensor) -> Tensor:
        """Return v after differentiable power iterations; where WWᵀ − I maps it to zero, v stays as it is."""
        for _ in range(self.iterations):
            # An orthonormal layer maps v to zero. Keeping v lets the iteration recover when the layer changes.
            direction = sphere.normalize(_excess(w, v), dim=-2)
            v = torch.where((direction == 0).all(-2, keepdim=True), v, direction)
        return v


def _excess(w: Tensor, v: Tensor) -> Tensor:
    """Return (WWᵀ − I)v without forming the Gram matrix."""
    return w @ (w.mT @ v) - v
