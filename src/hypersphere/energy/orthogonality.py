"""Orthogonality regularisers, with which energies are compared: they want neurons orthogonal, not evenly spread."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from hypersphere import sphere
from hypersphere._layer_selection import LayerSource
from hypersphere._signatures import accept_options_of
from hypersphere._validation import is_integer, require
from hypersphere.energy._regularizer import LayerPenalty, PenaltyOptions, StepResult, place_on_layer, require_bools
from hypersphere.energy._steps import Step, check_seed, seeded_generator

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SRIP", "Orthogonal", "Orthonormal"]


class Orthonormal(LayerPenalty):
    r"""Orthonormality: λ·Σ_layers ‖WWᵀ − I‖²_F, where the rows of W are neurons.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        weight: λ.
        output: True to regularise the output layer too, which the sources exclude.
        **options: `layer_weights`, `schedule`, `every`, `output_layer`, `where`, `auto_advance` and `report`, as in
            `NeuronRegularizer`.

    Example:
        >>> Orthonormal({"w": 2 * torch.eye(2)}, weight=1.0)()
        tensor(18.)
    """

    is_rotation_invariant: ClassVar[bool] = True

    @accept_options_of(LayerPenalty.__init__)
    def __init__(self, model: LayerSource, weight: float = 1e-5, **options: Unpack[PenaltyOptions]) -> None:
        super().__init__(model, weight, **options)

    def penalty(self, w: Tensor) -> Tensor:
        """Return ‖WWᵀ − I‖² of each set."""
        identity = torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)
        return (w @ w.mT - identity).square().sum((-2, -1))


class Orthogonal(LayerPenalty):
    r"""Orthogonality: λ·Σ_layers Σ_{i≠j} cos²(wᵢ, wⱼ), the sum of squared cosines between neurons.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        weight: λ.
        normalize: False for Σ_{i≠j} (wᵢ·wⱼ)² = ‖WWᵀ − diag(WWᵀ)‖²_F, which also shrinks the neurons.
        output: True to regularise the output layer too.
        **options: `layer_weights`, `schedule`, `every`, `output_layer`, `where`, `auto_advance` and `report`, as in
            `NeuronRegularizer`.

    Example:
        >>> w = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
        >>> Orthogonal({"w": w}, weight=1.0)(), Orthogonal({"w": w}, weight=1.0, normalize=False)()
        (tensor(1.0000), tensor(8.))
    """

    is_rotation_invariant: ClassVar[bool] = True

    @accept_options_of(LayerPenalty.__init__)
    def __init__(
        self,
        model: LayerSource,
        weight: float = 1e-5,
        *,
        normalize: bool = True,
        **options: Unpack[PenaltyOptions],
    ) -> None:
        require_bools(normalize=normalize)
        super().__init__(model, weight, **options)
        self.uses_cosines = normalize

    def penalty(self, w: Tensor) -> Tensor:
        """Return the sum of squares off the diagonal of the Gram matrix of each set."""
        # The Gram matrix of unit rows holds cosines.
        rows = sphere.row_directions(w) if self.uses_cosines else w
        # The diagonal is masked instead of subtracted: it is large, and rounding errors of it would remain.
        excluded = torch.eye(w.shape[-2], dtype=torch.bool, device=w.device)
        return (rows @ rows.mT).masked_fill(excluded, 0.0).square().sum((-2, -1))


class SRIP(LayerPenalty):
    r"""Spectral restricted isometry: λ·Σ_layers σ_max(WWᵀ − I) by power iteration, where the rows of W are neurons.

    The iteration uses products with W and Wᵀ only. Its vectors are buffers, and each step continues from the last one,
    so a few iterations per step suffice while the weights change slowly. `penalty` is the exact value.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        weight: λ.
        iterations: power iterations per step.
        seed: the seed of the first vectors.
        output: True to regularise the output layer too.
        **options: `layer_weights`, `schedule`, `every`, `output_layer`, `where`, `auto_advance` and `report`, as in
            `NeuronRegularizer`.

    Example:
        >>> SRIP({"w": torch.diag(torch.tensor([2.0, 1.0]))}, weight=1.0, iterations=9)()
        tensor(3.)

    Reference:
        Bansal et al., Can We Gain More from Orthogonality Regularizations in Training Deep CNNs?, NeurIPS 2018.
    """

    is_rotation_invariant: ClassVar[bool] = True

    @accept_options_of(LayerPenalty.__init__)
    def __init__(
        self,
        model: LayerSource,
        weight: float = 1e-5,
        *,
        iterations: int = 2,
        seed: int = 0,
        **options: Unpack[PenaltyOptions],
    ) -> None:
        require(is_integer(iterations, 1), "iterations", "an integer >= 1", iterations)
        check_seed(seed)
        super().__init__(model, weight, **options)
        self.iterations = iterations
        # One vector per group of each layer, also where λ = 0, so that the keys of the state dict do not depend on λ.
        for index, layer in enumerate(self.selection):
            groups, n, _, _ = layer.shape
            # Drawn on the CPU from seed and position, so that every rank starts from the same vectors.
            vector = torch.randn(groups, n, 1, generator=seeded_generator(seed, index)) / math.sqrt(n)
            self.register_buffer(f"vector_{index}", place_on_layer(vector, layer))

    def penalty(self, w: Tensor) -> Tensor:
        """Return σ_max(WWᵀ − I) of each set by a decomposition: the value to which `compute` converges."""
        identity = torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)
        return torch.linalg.matrix_norm(w @ w.mT - identity, ord=2)

    def compute(self, labels: Tensor | None, step: Step) -> StepResult:
        """Return one term per layer with λ > 0, and the vectors from which the next step continues.

        It replaces `LayerPenalty.compute`, which has no state. A peek iterates too but its vectors are not stored.
        """
        terms, vectors = [], {}
        for index, layer in enumerate(self.selection):
            if not self.factor(layer):  # see `weighted_layers`; here the index is needed too
                continue
            w, name = layer.row_sets(), f"vector_{index}"
            v = self._iterate(w, step.buffers[name].to(w))
            # ‖(WWᵀ − I)v‖ of a unit v converges to the largest |eigenvalue|, also if that is negative.
            terms.append(self.factor(layer) * sphere.norm(_excess(w, v), dim=-2).sum())
            vectors[name] = v
        return StepResult(terms, vectors)

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
