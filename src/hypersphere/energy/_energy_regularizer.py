"""The abstract regulariser of `MHE` and `CoMHE`: a weighted sum of the mean energies of layers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._layer_selection import LayerSelection, LayerSource, NeuronLayer
from hypersphere._validation import is_integer, is_number, require
from hypersphere.energy._layer_sets import require_complete_output, resolve_patterns
from hypersphere.energy._regularizer import NeuronRegularizer, RegularizerOptions, StepResult
from hypersphere.energy._sampling import check_seed, seeded_generator
from hypersphere.energy._steps import Step, run_uncompiled
from hypersphere.energy.energy import check_weights, data_dependent_energy
from hypersphere.functions._pairwise import PairSum, pair_energies
from hypersphere.functions.kernel import PairPotential, kernel_of

__all__ = ["EnergyRegularizer", "NeuronWeights", "WeightedSums"]

NeuronWeights = Mapping[str, Tensor | Sequence[float]]


def _mean_over_groups(energies: Tensor) -> Tensor:
    """Return one energy per layer from those of its groups (…, groups)."""
    return energies.mean(-1)


@dataclass
class WeightedSums:
    """Mean energies of stacks of layers, and new values of buffers.

    Attributes:
        reduce: how the energies of a stack become one energy per layer.
        sums: the mean energies of the stacks.
        factors: λ of the layers of each stack.
        updates: new values of buffers by name.
    """

    reduce: Callable[[Tensor], Tensor] = _mean_over_groups
    sums: list[PairSum] = field(default_factory=list)
    factors: list[Tensor | float] = field(default_factory=list)
    updates: dict[str, Tensor] = field(default_factory=dict)

    def add(self, pair_sum: PairSum, factor: Tensor | float) -> None:
        """Add one stack."""
        self.sums.append(pair_sum)
        self.factors.append(factor)


class EnergyRegularizer(NeuronRegularizer):
    r"""A weighted sum of mean energies. A subclass implements `factor` and `weighted_sums`.

    `MHE` documents the other arguments.

    Args:
        model: a module or named tensors.
        options: the options that all regularisers share.
        is_random: whether the energy depends on random draws other than those of `batch`. If it depends on any, the
            seed and a counter of steps are saved.
    """

    seed: Tensor

    def __init__(
        self,
        model: LayerSource,
        options: RegularizerOptions,
        *,
        is_random: bool,
        batch: int | None,
        output: float,
        embedding: float,
        power: float | str | Callable[[Tensor], Tensor],
        distance: str,
        min_distance: float | None,
        neuron_weights: NeuronWeights | None,
        average: bool,
        ignore_index: int,
        seed: int,
    ) -> None:
        require(batch is None or is_integer(batch, 2), "batch", "None or an integer >= 2", batch)
        for name, factor in (("output", output), ("embedding", embedding)):
            require(is_number(factor, 0), name, "a finite number >= 0", factor)
        require(isinstance(average, bool), "average", "a bool", average)
        require(is_integer(ignore_index, -(2**63), 2**63 - 1), "ignore_index", "an integer", ignore_index)
        check_seed(seed)
        is_random = is_random or batch is not None
        roles = ("hidden", "output", "embedding") if embedding else ("hidden", "output")
        super().__init__(model, options, roles=roles, shortest=2, needs_counter=is_random)
        require_complete_output(self.selection, output)
        has_effect = not embedding or bool(self.selection.embeddings)
        require(has_effect, "embedding", "0 for a model without embeddings", embedding)
        self.output, self.embedding, self.average = output, embedding, average
        self.batch, self.ignore_index = batch, ignore_index
        # The potential of the output layer. Its neurons repel each other in full space.
        self.potential = PairPotential(kernel_of(power, min_distance), distance)
        self.neuron_weights = _resolve_neuron_weights(neuron_weights, self.selection, distance)
        # The seed is saved with the counter, so that a resumed run continues the same sequence of draws.
        if is_random:
            self.register_buffer("seed", torch.tensor(seed))

    @abc.abstractmethod
    def weighted_sums(self, layers: list[NeuronLayer], step: Step) -> WeightedSums:
        """Return the energies of layers at a step."""

    def factor_of_role(self, layer: NeuronLayer, hidden: float) -> float:
        """Return λ of a layer, given λ_h, with the division by the number of hidden layers included."""
        # A weight of `layer_weights` replaces the default of the role; only hidden layers are averaged.
        by_role = {"hidden": hidden, "output": self.output, "embedding": self.embedding}
        factor = self.layer_weights.get(layer.name, by_role[layer.role])
        return factor / len(self.selection.hidden) if self.average and layer.role == "hidden" else factor

    def compute(self, labels: Tensor | None, step: Step) -> StepResult:
        """Return the weighted energies. With `labels`, the energy of the output is the data-dependent one."""
        layers = self.weighted_layers()
        terms: list[Tensor] = []
        if labels is not None:
            output = self._labelled_output()
            if output in layers:
                layers.remove(output)
                terms.append(self.factor(output) * self._labelled_energy(output, labels))
        # All other energies are computed by one call, so that the host waits for the device once.
        weighted = self.weighted_sums(layers, step)
        energies, is_finite = pair_energies(weighted.sums)
        terms += [(factor * weighted.reduce(e)).sum() for factor, e in zip(weighted.factors, energies, strict=True)]
        # Energies that are known to be finite are smaller than the largest number by ENERGY_HEADROOM. If the factors λ
        # are smaller than it in total, the sum cannot overflow, and the base class need not read it. A layer has at
        # most two stacks (`Bilateral`).
        is_bounded = labels is None and 2 * sum(map(self.factor, layers)) < _numerics.ENERGY_HEADROOM
        return StepResult(terms, weighted.updates, is_finite and is_bounded)

    def draw_neurons(self, draw: int, layers: Sequence[NeuronLayer]) -> dict[str, Tensor]:
        """Return the indices of the neurons that draw number `draw` takes from each layer of more than `batch`."""
        large = [layer for layer in layers if self.batch is not None and layer.shape[1] > self.batch]
        return self._draw_from(draw, large) if large else {}  # without a batch there is no seed to read

    @run_uncompiled
    def _draw_from(self, draw: int, layers: Sequence[NeuronLayer]) -> dict[str, Tensor]:
        # One generator for all layers: the draw depends only on seed, number and the order of the layers.
        generator = seeded_generator(int(self.seed), draw)
        return {layer.name: torch.randperm(layer.shape[1], generator=generator)[: self.batch] for layer in layers}

    def _labelled_output(self) -> NeuronLayer:
        """Return the output layer that labels refer to."""
        outputs = self.selection.outputs
        if len(outputs) != 1 or outputs[0].shape[0] != 1:
            received = f"one with {outputs[0].shape[0]} groups" if len(outputs) == 1 else str(len(outputs))
            raise ValueError(f"labels need exactly one output layer without groups; this model has {received}")
        return outputs[0]

    def _labelled_energy(self, output: NeuronLayer, labels: Tensor) -> Tensor:
        """Return the energy of the classes of a batch against all classes, which replaces that of all pairs."""
        # The data-dependent energy is defined for directions, without factors β.
        if output.name in self.neuron_weights:
            raise ValueError(f"labels cannot be combined with neuron_weights of the output layer {output.name!r}")
        if getattr(output.module, "num_centers", 1) > 1:
            raise ValueError(f"labels need one class vector per class, but {output.name!r} has several centres")
        kernel, distance = self.potential.kernel, self.potential.distance
        return data_dependent_energy(
            output.rows(), labels, power=kernel, distance=distance, ignore_index=self.ignore_index
        )


def _resolve_neuron_weights(
    weights: NeuronWeights | None, selection: LayerSelection, distance: str
) -> dict[str, Tensor]:
    """Return factors β per layer as tensors (groups, neurons per group), after checking sizes and signs."""
    if weights is not None:
        require(distance == "euclidean", "distance", "'euclidean' when neuron_weights are given", distance)
    by_name = {layer.name: layer for layer in selection}
    resolved = {}
    for name, betas in resolve_patterns("neuron_weights", weights, selection).items():
        groups, neurons, _, _ = by_name[name].shape
        accepted = f"{groups * neurons} numbers for {name}"
        try:
            values = torch.as_tensor(betas)
        except (TypeError, ValueError, RuntimeError):  # torch raises any of them for what is no tensor
            raise ValueError(f"neuron_weights must be {accepted}, not {betas!r}") from None
        # A list of integers is a valid list of factors.
        values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
        require(values.numel() == groups * neurons, "neuron_weights", accepted, f"shape {tuple(values.shape)}")
        check_weights("neuron_weights", values.detach())
        resolved[name] = values.reshape(groups, neurons)
    return resolved
