"""MHE: the hyperspherical energy of a network's neurons as a regulariser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from hypersphere._layer_selection import LayerSelection, LayerSource, NeuronLayer
from hypersphere._signatures import accept_options_of
from hypersphere._validation import is_number, require
from hypersphere.energy._energy_regularizer import EnergyRegularizer, NeuronWeights, WeightedSums
from hypersphere.energy._layer_sets import stack_equal_shapes
from hypersphere.energy._regularizer import RegularizerKeywords, RegularizerOptions, options_of
from hypersphere.energy._steps import Step
from hypersphere.functions._pairwise import PairSum
from hypersphere.functions.kernel import PairPotential

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MHE"]


class MHE(EnergyRegularizer):
    r"""Minimum hyperspherical energy: λ_h·Σ_hidden Ē + λ_o·Ē_output   (thesis, 5.4).

    Ē is the mean energy of the neurons of a layer. Neurons of the output layer always repel each other in full space.
    The regulariser holds no parameters. Call it once per optimiser step and add the result to the loss; see
    `NeuronRegularizer` for the counting of steps. Weights without neurons are listed in `skipped`, with the reason.

    If labels are passed to the call, Ē_output is the energy of the classes of the batch against all classes
    (`data_dependent_energy`). A head whose class vectors are distributed over processes has no such energy: pass
    `output=0`.

    The arguments from `layer_weights` to `report` are those of `RegularizerOptions`, which all regularisers share.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        hidden: λ_h; None for the paper's values: 1 in half space, 10 in full space.
        half_space: layers whose neurons are also repelled by the opposites −ŵ: True for all hidden layers, False for
            none, or a list of names. None means True if the model has hidden layers.
        batch: the number of neurons that are drawn from each larger layer at each step; None for all. It does not apply
            to the output layer if labels are passed.
        power: s ≥ 0, a kernel or a callable of the distance.
        min_distance: below this distance the energy continues linearly, which bounds the gradient of near-duplicate
            neurons; None for no bound.
        output: λ_o.
        embedding: λ of embeddings, which are left out by default.
        distance: "euclidean", or "angular" (A-MHE).
        neuron_weights: a mapping from names or patterns of layers to positive factors β of their neurons, for the
            energy of βᵢ·ŵᵢ (Euclidean distance only). The output layer can have them only if no labels are passed.
        average: divide the sum over hidden layers by their number.
        ignore_index: labels of this value do not count, as in `torch.nn.functional.cross_entropy`.
        seed: the seed of random draws, which are the same on every rank.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> regularizer = MHE(net)
        >>> loss = net(torch.randn(5, 8)).square().mean() + regularizer()

    Reference:
        Liu et al., Learning towards Minimum Hyperspherical Energy, NeurIPS 2018.
    """

    @accept_options_of(RegularizerOptions)
    def __init__(
        self,
        model: LayerSource,
        *,
        hidden: float | None = None,
        half_space: bool | Sequence[str] | None = None,
        batch: int | None = None,
        power: float | str | Callable[[Tensor], Tensor] = 2,
        min_distance: float | None = None,
        output: float = 1.0,
        embedding: float = 0.0,
        distance: str = "euclidean",
        neuron_weights: NeuronWeights | None = None,
        average: bool = False,
        ignore_index: int = -100,
        seed: int = 0,
        **options: Unpack[RegularizerKeywords],
    ) -> None:
        require(hidden is None or is_number(hidden, 0), "hidden", "None or a finite number >= 0", hidden)
        super().__init__(
            model,
            options_of(self, options),
            is_random=False,
            batch=batch,
            output=output,
            embedding=embedding,
            power=power,
            distance=distance,
            min_distance=min_distance,
            neuron_weights=neuron_weights,
            average=average,
            ignore_index=ignore_index,
            seed=seed,
        )
        self.hidden, self.half_space_layers = hidden, _half_space_names(self.selection, half_space)

    def factor(self, layer: NeuronLayer) -> float:
        """Return λ of a layer, by default that of the paper."""
        in_paper = 1.0 if layer.name in self.half_space_layers else 10.0
        return self.factor_of_role(layer, hidden=in_paper if self.hidden is None else self.hidden)

    def weighted_sums(self, layers: list[NeuronLayer], step: Step) -> WeightedSums:
        """Return the neurons of layers as stacks (layers, groups, N, d), with the factors λ of their layers."""
        indices = self.draw_neurons(step.number, layers)
        sums = WeightedSums()
        for half_space in (False, True):
            potential = replace(self.potential, half_space=half_space)
            in_space = [layer for layer in layers if (layer.name in self.half_space_layers) == half_space]
            # Samples and weighted neurons differ from layer to layer, so these layers are stacks of one.
            single = [layer for layer in in_space if layer.name in indices or layer.name in self.neuron_weights]
            for layer in single:
                sums.add(self._single_stack(layer, potential, indices.get(layer.name)), self.factor(layer))
            # All other layers of equal shape share one batched product.
            stackable = ((layer.row_sets(), self.factor(layer)) for layer in in_space if layer not in single)
            for stack, layer_factors in stack_equal_shapes(stackable):
                sums.add(PairSum(stack, potential, mean=True), layer_factors)
        return sums

    def _single_stack(self, layer: NeuronLayer, potential: PairPotential, index: Tensor | None) -> PairSum:
        """Return one layer, all neurons or a sample, with its neuron weights."""
        rows = layer.row_sets()
        betas = self.neuron_weights.get(layer.name)
        betas = None if betas is None else betas.to(rows)
        if index is None:
            return PairSum(rows, potential, betas, mean=True)
        # All groups of a layer use the same sample. Indices are drawn on the CPU, so every device gets the same ones.
        index = index.to(rows.device)
        betas = None if betas is None else betas[..., index]
        return PairSum(rows[:, index], potential, betas, mean=True, sampled_from=layer.shape[1])

    def extra_repr(self) -> str:
        """Show the layers and their settings."""
        names = [layer.name for layer in self.selection.hidden]
        output = ", ".join(layer.name for layer in self.selection.outputs) or None
        if not self.half_space_layers:
            space, default = "full space", "10.0"
        elif self.half_space_layers == set(names):
            space, default = "half space", "1.0"
        else:
            space = f"half space in [{', '.join(sorted(self.half_space_layers))}]"
            default = "1 in half space, 10 in full space,"
        hidden = f"hidden={default if self.hidden is None else self.hidden} of [{', '.join(names)}]"
        return (
            f"{hidden}, {space}, output={self.output} of {output}, {self.potential.kernel}, {self.potential.distance}"
        )


def _half_space_names(selection: LayerSelection, half_space: bool | Sequence[str] | None) -> frozenset[str]:
    """Return the names of the hidden layers in half space."""
    hidden = [layer.name for layer in selection.hidden]
    outputs = [layer.name for layer in selection.outputs]
    if half_space is None or isinstance(half_space, bool):
        # None means "where possible", but an explicit True that has no effect is probably a mistake.
        if half_space and not hidden:
            raise ValueError(
                f"half_space must be False if the only layer, {outputs[0]!r}, is the output layer, whose energy is "
                "always computed in full space (output_layer=None makes it a hidden layer)"
            )
        return frozenset(() if half_space is False else hidden)
    accepted = f"None, a bool or a list of some of the hidden layers {', '.join(hidden)}"
    is_listing = isinstance(half_space, Sequence) and not isinstance(half_space, str)
    require(is_listing, "half_space", accepted, half_space)
    for name in half_space:
        if name in outputs:
            raise ValueError(f"half_space must not name the output layer {name!r}: opposite classes are far apart")
    unknown = [name for name in half_space if name not in hidden]
    require(not unknown, "half_space", accepted, unknown)
    return frozenset(half_space)
