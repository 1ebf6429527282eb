"""MHE: the hyperspherical energy of a network's neurons as a regulariser.

A call `MHE(model)()` runs `NeuronRegularizer.forward` (`energy/_regularizer.py`), which calls
`EnergyRegularizer.compute`. This method asks `MHE.views` for the neurons and the potential of each layer and computes
their energies with `pair_energies` (`functions/_pairwise.py`). `CoMHE` implements `views` with projected neurons.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._layer_selection import LayerSelection, LayerSource, NeuronLayer
from hypersphere._signatures import accept_options_of
from hypersphere._validation import is_integer, is_number, require
from hypersphere.energy._regularizer import (
    NeuronRegularizer,
    RegularizerOptions,
    StepResult,
    accept_regularizer_options,
    require_bools,
    require_complete_output,
    resolve_patterns,
    stack_equal_shapes,
    warn_if_constant,
)
from hypersphere.energy._steps import Step, check_seed, run_uncompiled, seeded_generator
from hypersphere.energy.energy import check_weights, data_dependent_energy
from hypersphere.functions._pairwise import PairSum, pair_energies
from hypersphere.functions.kernel import PairPotential, kernel_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MHE", "EnergyOptions", "EnergyRegularizer", "Views"]

NeuronWeights = Mapping[str, Tensor | Sequence[float]]
Views = dict[str, list[tuple[Tensor, PairPotential]]]
"""By name of a layer, the rows (…, N, d) whose energies are computed for it, with their potential."""


class EnergyOptions(RegularizerOptions, total=False):
    """The options that `MHE` and `CoMHE` pass on to `EnergyRegularizer`."""

    output: float
    embedding: float
    distance: str
    batch: int | None
    seed: int
    neuron_weights: NeuronWeights | None
    average: bool
    ignore_index: int


class EnergyRegularizer(NeuronRegularizer):
    """The weighted sum Σ λ·Ē over layers, with random batches, labels and neuron weights β.

    A subclass implements `views`, which returns the rows and the potential that each layer has in the sum, and
    `hidden_factor`.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        needs_counter: True if `views` uses the number of the step.
        power: s ≥ 0, a kernel or a callable of the distance.
        min_distance: below this distance the energy continues linearly; None for no bound.
        output, embedding, distance, batch, seed, neuron_weights, average, ignore_index: as in `MHE`.
        **options: as in `NeuronRegularizer`.
    """

    @accept_regularizer_options
    def __init__(
        self,
        model: LayerSource,
        *,
        needs_counter: bool = False,
        power: float | str | Callable[[Tensor], Tensor],
        min_distance: float | None,
        output: float = 1.0,
        embedding: float = 0.0,
        distance: str = "euclidean",
        batch: int | None = None,
        seed: int = 0,
        neuron_weights: NeuronWeights | None = None,
        average: bool = False,
        ignore_index: int = -100,
        **options: Unpack[RegularizerOptions],
    ) -> None:
        check_seed(seed)
        needs_counter = needs_counter or batch is not None
        super().__init__(
            model,
            # `layer_weights` can give an output layer a λ even if λ_o = 0. Embeddings need `embedding` > 0.
            roles=("hidden", "output", "embedding") if embedding else ("hidden", "output"),
            min_length=2,  # the directions of single numbers are ±1
            needs_counter=needs_counter,
            **options,
        )
        # The potential of pairs in full space, which the output layer always has.
        self.potential = PairPotential(kernel_of(power, min_distance), distance)
        for name, factor in (("output", output), ("embedding", embedding)):
            require(is_number(factor, 0), name, "a finite number >= 0", factor)
        require_complete_output(self.selection, output)
        has_effect = not embedding or bool(self.selection.embeddings)
        require(has_effect, "embedding", "0 for a model without embeddings", embedding)
        require_bools(average=average)
        require(batch is None or is_integer(batch, 2), "batch", "None or an integer >= 2", batch)
        require(is_integer(ignore_index, -(2**63), 2**63 - 1), "ignore_index", "an integer", ignore_index)
        self.output, self.embedding, self.average = output, embedding, average
        self.batch, self.ignore_index = batch, ignore_index
        self.betas = _resolve_neuron_weights(neuron_weights, self.selection, distance)
        # The seed is saved with the counter, so that a resumed run continues the same sequence of draws.
        if needs_counter:
            self.register_buffer("seed", torch.tensor(seed))

    @abc.abstractmethod
    def hidden_factor(self, layer: NeuronLayer) -> float:
        """Return λ_h of a hidden layer."""

    @abc.abstractmethod
    def views(self, rows: Mapping[str, Tensor], step: Step) -> tuple[Views, Mapping[str, Tensor]]:
        """Return the rows and the potential that each layer has in the sum, and new values of buffers.

        Args:
            rows: the neurons (groups, N, d) of all layers with λ > 0 by name, or a sample of them. With labels, the
                output layer is missing.
            step: the number of the step, and the buffers to start from.
        """

    def factor(self, layer: NeuronLayer) -> float:
        """Return λ of a layer, with the division by the number of hidden layers included."""
        # A weight of `layer_weights` replaces the default of the role; only hidden layers are averaged.
        by_role = {"hidden": self.hidden_factor(layer), "output": self.output, "embedding": self.embedding}
        factor = self.layer_weights.get(layer.name, by_role[layer.role])
        return factor / len(self.selection.hidden) if self.average and layer.role == "hidden" else factor

    def compute(self, labels: Tensor | None, step: Step) -> StepResult:
        """Return λ·Ē of all layers with λ > 0, and the new values of buffers."""
        layers, samples, labelled = self.weighted_layers(), self.draw_neurons(step), self._labelled_output(labels)
        rows = {layer.name: _sampled_rows(layer, samples.get(layer.name)) for layer in layers if layer is not labelled}
        views, updates = self.views(rows, step)
        terms: list[Tensor] = []
        sums: list[PairSum] = []
        factors: list[float] = []
        for layer in layers:
            if labels is not None and layer is labelled:
                terms.append(self.factor(layer) * self._labelled_energy(layer, labels))
                continue
            for view, potential in views[layer.name]:
                sums.append(self._pair_sum(layer, view, potential, samples.get(layer.name)))
                factors.append(self.factor(layer))
        # Energies that are known to be finite are smaller than the largest number by ENERGY_HEADROOM. If the factors λ
        # are smaller than it in total, the sum cannot overflow, and the regulariser need not read it.
        is_bounded = not terms and sum(factors) < _numerics.ENERGY_HEADROOM
        stacks, stacked_factors = _stack_sums(sums, factors)
        # One call computes all energies, so that the host waits for the device once.
        energies, is_finite = pair_energies(stacks)
        terms += [(f * self._reduce(value)).sum() for f, value in zip(stacked_factors, energies, strict=True)]
        return StepResult(terms, updates, is_finite and is_bounded)

    def _reduce(self, energies: Tensor) -> Tensor:
        """Return the mean energy of each layer of a stack, given the energies (layers, groups) of its groups."""
        return energies.mean(-1)

    def _pair_sum(self, layer: NeuronLayer, rows: Tensor, potential: PairPotential, sample: Tensor | None) -> PairSum:
        """Describe the mean energy of rows (…, N, d) that represent a layer, or a sample of its neurons."""
        betas = self.betas.get(layer.name)
        if betas is not None:
            betas = (betas if sample is None else betas[..., sample]).to(rows)
        return PairSum(rows, potential, betas, mean=True, sampled_from=None if sample is None else layer.shape[1])

    def draw_neurons(self, step: Step) -> dict[str, Tensor]:
        """Return the indices of the neurons that are drawn at a step by layer name.

        Layers with at most `batch` neurons are left out.
        Layers with λ = 0 take part, although their sample is not used: otherwise setting λ of one layer to 0 would
        change the samples of the layers after it.
        """
        large = [layer for layer in self.selection if self.batch is not None and layer.shape[1] > self.batch]
        # Without a layer to draw from, the seed is not read, because the host would wait for the device.
        return _draw_neurons(large, self.batch, step.buffers["seed"], step.number) if large else {}

    def _labelled_output(self, labels: Tensor | None) -> NeuronLayer | None:
        """Return the output layer that labels refer to, or None without labels."""
        if labels is None:
            return None
        outputs = self.selection.outputs
        if len(outputs) != 1 or outputs[0].shape[0] != 1:
            received = f"one with {outputs[0].shape[0]} groups" if len(outputs) == 1 else str(len(outputs))
            raise ValueError(f"labels need exactly one output layer without groups; this model has {received}")
        return outputs[0]

    def _labelled_energy(self, output: NeuronLayer, labels: Tensor) -> Tensor:
        """Return the energy of the classes of a batch against all classes, which replaces the energy of all pairs."""
        # The data-dependent energy is defined for directions, without factors β.
        if output.name in self.betas:
            raise ValueError(f"labels cannot be combined with neuron_weights of the output layer {output.name!r}")
        if getattr(output.module, "num_centers", 1) > 1:
            raise ValueError(f"labels need one class vector per class, but {output.name!r} has several centres")
        kernel, distance, ignored = self.potential.kernel, self.potential.distance, self.ignore_index
        return data_dependent_energy(output.rows(), labels, power=kernel, distance=distance, ignore_index=ignored)


class MHE(EnergyRegularizer):
    r"""Minimum hyperspherical energy: λ_h·Σ_hidden Ē + λ_o·Ē_output   (thesis, 5.4).

    Ē is the mean energy of the neurons of a layer. Neurons of the output layer always repel each other in full space.
    The regulariser holds no parameters. Call it once per optimiser step and add the result to the loss; see
    `NeuronRegularizer` for the counting of steps. Weights without neurons are listed in `skipped`, with the reason.

    If labels are passed to the call, Ē_output is the energy of the classes of the batch against all classes
    (`data_dependent_energy`). A head whose class vectors are distributed over processes has no such energy: pass
    `output=0`.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        hidden: λ_h; None for the paper's values: 1 in half space, 10 in full space.
        output: λ_o.
        embedding: λ of embeddings, which are left out by default.
        half_space: layers whose neurons are also repelled by the opposites −ŵ: True for all hidden layers, False for
            none, or a list of names. None means True if the model has hidden layers.
        power: s ≥ 0, a kernel or a callable of the distance.
        distance: "euclidean", or "angular" (A-MHE).
        min_distance: below this distance the energy continues linearly, which bounds the gradient of near-duplicate
            neurons; None for no bound.
        batch: the number of neurons that are drawn from each larger layer at each step; None for all. It does not apply
            to the output layer if labels are passed.
        seed: the seed of random draws, which are the same on every rank.
        neuron_weights: positive factors β of neurons by name or pattern of layers, for the energy of βᵢ·ŵᵢ (Euclidean
            distance only). The output layer can have them only if no labels are passed.
        average: divide the sum over hidden layers by their number.
        ignore_index: labels of this value do not count, as in `torch.nn.functional.cross_entropy`.
        **options: `layer_weights`, `schedule`, `every`, `output_layer`, `where`, `auto_advance` and `report`, as in
            `NeuronRegularizer`.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> regularizer = MHE(net)
        >>> loss = net(torch.randn(5, 8)).square().mean() + regularizer()

    Reference:
        Liu et al., Learning towards Minimum Hyperspherical Energy, NeurIPS 2018.
    """

    is_rotation_invariant: ClassVar[bool] = True

    @accept_options_of(EnergyRegularizer.__init__, only=EnergyOptions.__annotations__)
    def __init__(
        self,
        model: LayerSource,
        *,
        hidden: float | None = None,
        half_space: bool | Sequence[str] | None = None,
        power: float | str | Callable[[Tensor], Tensor] = 2,
        min_distance: float | None = None,
        **options: Unpack[EnergyOptions],
    ) -> None:
        require(hidden is None or is_number(hidden, 0), "hidden", "None or a finite number >= 0", hidden)
        super().__init__(model, power=power, min_distance=min_distance, **options)
        self.hidden, self.half_space_layers = hidden, _half_space_names(self.selection, half_space)
        self.half_space_potential = replace(self.potential, half_space=True)
        if self.is_rotation_invariant:
            # Not `self.factor`, which a subclass may override with attributes that it sets later.
            warn_if_constant(layer for layer in self.selection if EnergyRegularizer.factor(self, layer))

    def hidden_factor(self, layer: NeuronLayer) -> float:
        """Return λ_h, by default the value of the paper."""
        in_paper = 1.0 if layer.name in self.half_space_layers else 10.0
        return in_paper if self.hidden is None else self.hidden

    def views(self, rows: Mapping[str, Tensor], step: Step) -> tuple[Views, Mapping[str, Tensor]]:
        """Return the rows of each layer as they are, with its potential."""
        potentials = (self.potential, self.half_space_potential)
        return {name: [(w, potentials[name in self.half_space_layers])] for name, w in rows.items()}, {}

    def extra_repr(self) -> str:
        """Show the layers and their settings."""
        names = [layer.name for layer in self.selection.hidden]
        outputs = ", ".join(layer.name for layer in self.selection.outputs) or None
        if not self.half_space_layers:
            space, default = "full space", "10.0"
        elif self.half_space_layers == set(names):
            space, default = "half space", "1.0"
        else:
            space = f"half space in [{', '.join(sorted(self.half_space_layers))}]"
            default = "1 in half space, 10 in full space,"
        hidden = f"hidden={default if self.hidden is None else self.hidden} of [{', '.join(names)}]"
        settings = [hidden, space, f"output={self.output} of {outputs}", f"{self.potential.kernel}"]
        return ", ".join([*settings, self.potential.distance, *self._step_settings()])


def _sampled_rows(layer: NeuronLayer, sample: Tensor | None) -> Tensor:
    """Return the neurons (groups, N, d) of a layer, or a sample of them, which is the same for all groups."""
    rows = layer.row_sets()
    # Samples are drawn on the CPU, so every device gets the same ones.
    return rows if sample is None else rows[:, sample.to(rows.device)]


@run_uncompiled
def _draw_neurons(layers: Sequence[NeuronLayer], size: int | None, seed: Tensor, number: int) -> dict[str, Tensor]:
    # One generator for all layers: the draw depends only on seed, number and the order of the layers.
    generator = seeded_generator(int(seed), number)
    return {layer.name: torch.randperm(layer.shape[1], generator=generator)[:size] for layer in layers}


def _stack_sums(sums: Sequence[PairSum], factors: Sequence[float]) -> tuple[list[PairSum], list[Tensor | float]]:
    """Stack sums of equal shape and potential, which then share one batched product; return their factors λ too."""
    # Layers with neuron weights are stacks of one: their position is part of the key.
    keys = [
        (id(pairs.potential), pairs.sampled_from, None if pairs.weights is None else i) for i, pairs in enumerate(sums)
    ]
    stacks: list[PairSum] = []
    stacked_factors: list[Tensor | float] = []
    for index, w in stack_equal_shapes([pairs.w for pairs in sums], keys):
        stacks.append(sums[index[0]]._replace(w=w))
        members = [factors[i] for i in index]
        stacked_factors.append(members[0] if len(members) == 1 else torch.tensor(members, dtype=w.dtype).to(w.device))
    return stacks, stacked_factors


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
        except (TypeError, ValueError, RuntimeError):  # `as_tensor` raises any of them
            raise ValueError(f"neuron_weights must be {accepted}, not {betas!r}") from None
        # A list of integers is a valid list of factors.
        values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
        require(values.numel() == groups * neurons, "neuron_weights", accepted, f"shape {tuple(values.shape)}")
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
