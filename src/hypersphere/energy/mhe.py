"""MHE: the hyperspherical energy of a network's neurons as a regulariser, and what it shares with CoMHE."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._layer_selection import LayerSelection, LayerSource, NeuronLayer
from hypersphere._validation import is_integer, is_number, require
from hypersphere.energy._regularizer import (
    CallKind,
    NeuronRegularizer,
    RegularizerOptions,
    StepResult,
    add_terms,
    check_factor,
    check_seed,
    resolve_patterns,
    run_uncompiled,
    seeded_generator,
    stack_equal_shapes,
)
from hypersphere.energy.energy import check_weights, data_dependent_energy
from hypersphere.functions._pairwise import PairSum, pair_energies
from hypersphere.functions.kernel import PairPotential, kernel_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MHE", "EnergyOptions", "EnergyRegularizer", "WeightedSums"]

NeuronWeights = Mapping[str, Tensor | Sequence[float]]


class EnergyOptions(RegularizerOptions, total=False):
    """The options that `MHE` and `CoMHE` share. `MHE` documents them."""

    output: float
    embedding: float
    distance: str
    neuron_weights: NeuronWeights | None
    average: bool
    seed: int


@dataclass
class WeightedSums:
    """Mean energies (…, groups) of stacks, the factors λ of their layers, and new values of buffers."""

    sums: list[PairSum] = field(default_factory=list)
    factors: list[Tensor | float] = field(default_factory=list)
    updates: dict[str, Tensor] = field(default_factory=dict)

    def add(self, pair_sum: PairSum, factor: Tensor | float) -> None:
        """Add one stack."""
        self.sums.append(pair_sum)
        self.factors.append(factor)


class EnergyRegularizer(NeuronRegularizer):
    r"""A weighted sum of mean energies. A subclass defines the sums; `MHE` documents the options.

    Args:
        model: a module or named tensors.
        hidden: λ_h; None for 1 in half space and 10 in full space.
        draws: whether the energy depends on random draws, so that the seed and a counter of steps are saved.
    """

    seed: Tensor

    def __init__(
        self,
        model: LayerSource,
        *,
        hidden: float | None,
        draws: bool,
        output: float = 1.0,
        embedding: float = 0.0,
        power: float | str | Callable[[Tensor], Tensor] = 2,
        distance: str = "euclidean",
        min_distance: float | None = None,
        neuron_weights: NeuronWeights | None = None,
        average: bool = False,
        seed: int = 0,
        **options: Unpack[RegularizerOptions],
    ) -> None:
        check_factor("output", output)
        check_factor("embedding", embedding)
        require(isinstance(average, bool), "average", "a bool", average)
        check_seed(seed)
        roles = ("hidden", "output", "embedding") if embedding else ("hidden", "output")
        super().__init__(model, roles=roles, shortest=2, needs_counter=draws, **options)
        has_effect = not embedding or bool(self.selection.embeddings)
        require(has_effect, "embedding", "0 for a model without embeddings", embedding)
        self.hidden, self.output, self.embedding, self.average = hidden, output, embedding, average
        # The potential of the output layer. Its neurons repel each other in full space.
        self.potential = PairPotential(kernel_of(power, min_distance), distance)
        self.neuron_weights = _resolve_neuron_weights(neuron_weights, self.selection, distance)
        # The seed is saved with the counter, so that a resumed run continues the same sequence of draws.
        if draws:
            self.register_buffer("seed", torch.tensor(seed))

    @abc.abstractmethod
    def weighted_sums(self, layers: list[NeuronLayer], step: int, call: CallKind) -> WeightedSums:
        """Return the energies of layers; `step` and `call` are those of `compute`."""

    def is_half_space(self, layer: NeuronLayer) -> bool:
        """Return True if the neurons of a layer are also repelled by the opposites of the others."""
        return False

    def factor(self, layer: NeuronLayer) -> float:
        """Return λ of a layer, with the division by the number of hidden layers included."""
        # A weight of `layer_weights` replaces the default of the role; only hidden layers are averaged.
        by_role = {"output": self.output, "embedding": self.embedding}
        default = (1.0 if self.is_half_space(layer) else 10.0) if self.hidden is None else self.hidden
        factor = self.layer_weights.get(layer.name, by_role.get(layer.role, default))
        return factor / len(self.selection.hidden) if self.average and layer.role == "hidden" else factor

    def compute(self, labels: Tensor | None, step: int, call: CallKind) -> StepResult:
        """Return the weighted sum of energies. With `labels`, the energy of the output is the data-dependent one."""
        # Layers with λ = 0 cost nothing.
        layers = [layer for layer in self.selection if self.factor(layer)]
        terms: list[Tensor] = []
        # Labels replace the mutual energy of the output by that of the classes of the batch against all classes.
        if labels is not None:
            output = self._labelled_output()
            layers = [layer for layer in layers if layer is not output]
            if self.factor(output):
                # The data-dependent energy is defined for directions, without factors β.
                accepted = f"given for other layers than the output {output.name} if labels are passed"
                require(output.name not in self.neuron_weights, "neuron_weights", accepted, "given for it")
                kernel, distance = self.potential.kernel, self.potential.distance
                energy = data_dependent_energy(output.rows(), labels, power=kernel, distance=distance)
                terms.append(self.factor(output) * energy)
        # All energies are computed by one call, so that the host waits for the device once.
        weighted = self.weighted_sums(layers, step, call)
        energies, is_finite = pair_energies(weighted.sums)
        terms += [(factor * self.reduce(e)).sum() for factor, e in zip(weighted.factors, energies, strict=True)]
        # Energies that are known to be finite are smaller than the largest number by ENERGY_HEADROOM. If the factors λ
        # are smaller than it in total, the sum cannot overflow, and the base class need not read it. A layer has at
        # most two stacks.
        is_bounded = labels is None and 2 * sum(map(self.factor, layers)) < _numerics.ENERGY_HEADROOM
        total = add_terms(terms, self.selection[0].anchor)
        return StepResult(total, weighted.updates, is_finite and is_bounded)

    def reduce(self, energies: Tensor) -> Tensor:
        """Return one energy per layer: the mean over its groups."""
        return energies.mean(-1)

    def _labelled_output(self) -> NeuronLayer:
        """Return the output layer that labels refer to."""
        outputs = self.selection.outputs
        is_single = len(outputs) == 1 and outputs[0].shape[0] == 1
        accepted = "None unless there is one output layer of one group"
        require(is_single, "labels", accepted, f"given, with {len(outputs)} outputs")
        return outputs[0]


class MHE(EnergyRegularizer):
    r"""Minimum hyperspherical energy: λ_h·Σ_hidden Ē + λ_o·Ē_output   (thesis, 5.4).

    Ē is the mean energy of the neurons of a layer. Neurons of the output layer always repel each other in full space.
    The regulariser holds no parameters. Call it once per optimiser step and add the result to the loss; see
    `NeuronRegularizer` for the counting of steps. Weights without neurons are listed in `skipped`, with the reason.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        hidden: λ_h; None for the values of the source, 1 for layers in half space and 10 for layers in full space.
        half_space: True if hidden neurons are also repelled by the opposites of the others, or the names of the layers
            where they are; None for all hidden layers, if there are any.
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
        seed: the seed of random draws, which are the same on every rank.
        options: `layer_weights`, `schedule`, `every`, `output_layer`, `where`, `auto_advance` and `report`, which all
            regularisers share; see `NeuronRegularizer`.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> regularizer = MHE(net)
        >>> loss = net(torch.randn(5, 8)).square().mean() + regularizer()

    Reference:
        Liu et al., Learning towards Minimum Hyperspherical Energy, NeurIPS 2018.
    """

    def __init__(
        self,
        model: LayerSource,
        *,
        hidden: float | None = None,
        half_space: bool | Sequence[str] | None = None,
        batch: int | None = None,
        power: float | str | Callable[[Tensor], Tensor] = 2,
        min_distance: float | None = None,
        **options: Unpack[EnergyOptions],
    ) -> None:
        require(hidden is None or is_number(hidden, 0), "hidden", "None or a number >= 0", hidden)
        require(batch is None or is_integer(batch, 2), "batch", "None or an integer >= 2", batch)
        super().__init__(
            model, hidden=hidden, draws=batch is not None, power=power, min_distance=min_distance, **options
        )
        self.batch = batch
        self.mirrored = _half_space_names(self.selection, half_space)  # names of the layers in half space

    def is_half_space(self, layer: NeuronLayer) -> bool:
        """Return True if the layer is in half space."""
        return layer.name in self.mirrored

    def weighted_sums(self, layers: list[NeuronLayer], step: int, call: CallKind) -> WeightedSums:
        """Return the neurons of layers as stacks (layers, groups, N, d), with the factors λ of their layers."""
        sampled = [layer for layer in layers if self.batch is not None and layer.shape[1] > self.batch]
        indices = self._draw(step, sampled) if sampled else {}
        sums = WeightedSums()
        for half_space in (False, True):
            potential = replace(self.potential, half_space=half_space)
            in_space = [layer for layer in layers if (layer.name in self.mirrored) == half_space]
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

    @run_uncompiled
    def _draw(self, step: int, layers: list[NeuronLayer]) -> dict[str, Tensor]:
        """Return the indices of the neurons that are drawn from large layers at a step."""
        # One generator for all layers: the draw depends only on seed, step and the order of the layers.
        generator = seeded_generator(int(self.seed), step)
        return {layer.name: torch.randperm(layer.shape[1], generator=generator)[: self.batch] for layer in layers}

    def extra_repr(self) -> str:
        """Show the layers and their settings."""
        names = [layer.name for layer in self.selection.hidden]
        output = ", ".join(layer.name for layer in self.selection.outputs) or None
        if not self.mirrored:
            space, default = "full space", "10.0"
        elif self.mirrored == set(names):
            space, default = "half space", "1.0"
        else:
            space = f"half space in [{', '.join(sorted(self.mirrored))}]"
            default = "1 in half space, 10 in full space,"
        hidden = f"hidden={default if self.hidden is None else self.hidden} of [{', '.join(names)}]"
        return (
            f"{hidden}, {space}, output={self.output} of {output}, {self.potential.kernel}, {self.potential.distance}"
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
        values = torch.as_tensor(betas)
        # A list of integers is a valid list of factors.
        values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
        accepted = f"{groups * neurons} numbers for {name}"
        require(values.numel() == groups * neurons, "neuron_weights", accepted, tuple(values.shape))
        check_weights("neuron_weights", values.detach())
        resolved[name] = values.reshape(groups, neurons)
    return resolved


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
