"""MHE: the hyperspherical energy of a network's neurons as a regulariser.

A call `MHE(model)()` runs `NeuronRegularizer.forward` (`energy/_regularizer.py`), which calls `MHE.compute` here, which
calls `pair_energies` (`functions/_pairwise.py`). `LayerEnergies` is the weighted sum that `MHE` shares with `CoMHE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._layer_selection import LayerSelection, LayerSource, NeuronLayer
from hypersphere._validation import is_integer, is_number, require
from hypersphere.energy._regularizer import (
    NeuronRegularizer,
    StepResult,
    require_bools,
    require_complete_output,
    resolve_patterns,
    stack_equal_shapes,
    warn_if_constant,
)
from hypersphere.energy._sampling import check_seed, seeded_generator
from hypersphere.energy._steps import Step, run_uncompiled
from hypersphere.energy.energy import check_weights, data_dependent_energy
from hypersphere.functions._pairwise import PairSum, pair_energies
from hypersphere.functions.kernel import PairPotential, kernel_of

__all__ = ["MHE", "LayerEnergies", "energy_roles", "sampled_rows"]

NeuronWeights = Mapping[str, Tensor | Sequence[float]]


class MHE(NeuronRegularizer):
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
        layer_weights: λ of layers by name or pattern, which replaces their default. The first match counts.
        schedule: a function of the step that returns a factor for the whole regulariser, such as `Warmup`.
        every: compute the regulariser only at every k-th step; it is 0 at the others. A call that does not count as a
            step returns the value of the last step that was not skipped.
        output_layer: "auto" (see `hypersphere.layers_of`), one or more names, or None.
        where: a function of name and module that returns True for the layers to regularise.
        auto_advance: False if steps are counted by calling `advance`.
        report: print which layers are regularised, and which are skipped and why.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> regularizer = MHE(net)
        >>> loss = net(torch.randn(5, 8)).square().mean() + regularizer()

    Reference:
        Liu et al., Learning towards Minimum Hyperspherical Energy, NeurIPS 2018.
    """

    is_rotation_invariant: ClassVar[bool] = True

    def __init__(
        self,
        model: LayerSource,
        *,
        hidden: float | None = None,
        output: float = 1.0,
        embedding: float = 0.0,
        half_space: bool | Sequence[str] | None = None,
        power: float | str | Callable[[Tensor], Tensor] = 2,
        distance: str = "euclidean",
        min_distance: float | None = None,
        batch: int | None = None,
        seed: int = 0,
        neuron_weights: NeuronWeights | None = None,
        average: bool = False,
        ignore_index: int = -100,
        layer_weights: Mapping[str, float] | None = None,
        schedule: Callable[[int], float] | None = None,
        every: int = 1,
        output_layer: str | Sequence[str] | None = "auto",
        where: Callable[[str, nn.Module], bool] | None = None,
        auto_advance: bool = True,
        report: bool = False,
    ) -> None:
        require(hidden is None or is_number(hidden, 0), "hidden", "None or a finite number >= 0", hidden)
        check_seed(seed)
        super().__init__(
            model,
            roles=energy_roles(embedding),
            min_length=2,  # the directions of single numbers are ±1
            needs_counter=batch is not None,
            layer_weights=layer_weights,
            schedule=schedule,
            every=every,
            output_layer=output_layer,
            where=where,
            auto_advance=auto_advance,
            report=report,
        )
        self.energies = LayerEnergies(
            self.selection,
            self.layer_weights,
            potential=PairPotential(kernel_of(power, min_distance), distance),
            output=output,
            embedding=embedding,
            average=average,
            batch=batch,
            neuron_weights=neuron_weights,
            ignore_index=ignore_index,
        )
        self.hidden, self.half_space_layers = hidden, _half_space_names(self.selection, half_space)
        self.half_space_potential = replace(self.energies.potential, half_space=True)
        # The seed is saved with the counter, so that a resumed run continues the same sequence of draws.
        if batch is not None:
            self.register_buffer("seed", torch.tensor(seed))
        if self.is_rotation_invariant:
            # Not `self.factor`, which a subclass may override with attributes that it sets later.
            warn_if_constant(layer for layer in self.selection if MHE.factor(self, layer))

    def factor(self, layer: NeuronLayer) -> float:
        """Return λ of a layer, by default that of the paper."""
        in_paper = 1.0 if layer.name in self.half_space_layers else 10.0
        return self.energies.factor(layer, hidden=in_paper if self.hidden is None else self.hidden)

    def compute(self, labels: Tensor | None, step: Step) -> StepResult:
        """Return λ·Ē of all layers with λ > 0."""
        samples = self.energies.draw_neurons(step.buffers.get("seed"), step.number)
        # With labels, this layer has the energy of the classes of the batch instead of that of all pairs.
        labelled = self.energies.labelled_output(labels)
        energies: list[tuple[float, PairSum | Tensor]] = []
        for layer in self.weighted_layers():
            if labels is not None and layer is labelled:
                energy: PairSum | Tensor = self.energies.labelled_energy(layer, labels)
            else:
                in_half_space = layer.name in self.half_space_layers
                potential = self.half_space_potential if in_half_space else self.energies.potential
                sample = samples.get(layer.name)
                energy = self.energies.pair_sum(layer, sampled_rows(layer, sample), potential, sample)
            energies.append((self.factor(layer), energy))
        # A stack of layers has energies (layers, groups); the groups of a layer count equally.
        terms, is_finite = self.energies.weighted_terms(energies, reduce=lambda of_groups: of_groups.mean(-1))
        return StepResult(terms, is_finite=is_finite)

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
        potential = self.energies.potential
        settings = [
            hidden,
            space,
            f"output={self.energies.output} of {outputs}",
            f"{potential.kernel}",
            potential.distance,
        ]
        return ", ".join([*settings, *self._step_settings()])


@dataclass(eq=False)
class LayerEnergies:
    """The weighted sum Σ λ·Ē over layers: the part that `MHE` and `CoMHE` have in common.

    It knows the factors λ, the neuron weights β, the random batches and the labels. The regulariser decides which rows
    and which potential each layer has.

    Attributes:
        selection: the layers of the regulariser.
        layer_weights: λ of the layers that have their own, by name.
        potential: the potential of pairs in full space, which the output layer always has.
        output: λ_o. This and the following ones are arguments of the regulariser.
        embedding: λ of embeddings.
        average: divide the sum over hidden layers by their number.
        batch: the number of neurons that are drawn from each larger layer, or None.
        neuron_weights: factors β of neurons by name or pattern of layers, or None.
        ignore_index: labels of this value do not count.
        betas: the factors of `neuron_weights` as tensors (groups, neurons per group), by name of a layer.
    """

    selection: LayerSelection
    layer_weights: Mapping[str, float]
    _: KW_ONLY
    potential: PairPotential
    output: float
    embedding: float
    average: bool
    batch: int | None
    neuron_weights: NeuronWeights | None
    ignore_index: int
    betas: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Check the arguments and resolve the patterns of neuron weights."""
        for name, factor in (("output", self.output), ("embedding", self.embedding)):
            require(is_number(factor, 0), name, "a finite number >= 0", factor)
        require_complete_output(self.selection, self.output)
        has_effect = not self.embedding or bool(self.selection.embeddings)
        require(has_effect, "embedding", "0 for a model without embeddings", self.embedding)
        require_bools(average=self.average)
        require(self.batch is None or is_integer(self.batch, 2), "batch", "None or an integer >= 2", self.batch)
        is_index = is_integer(self.ignore_index, -(2**63), 2**63 - 1)
        require(is_index, "ignore_index", "an integer", self.ignore_index)
        self.betas = _resolve_neuron_weights(self.neuron_weights, self.selection, self.potential.distance)

    def factor(self, layer: NeuronLayer, hidden: float) -> float:
        """Return λ of a layer, given λ_h, with the division by the number of hidden layers included."""
        # A weight of `layer_weights` replaces the default of the role; only hidden layers are averaged.
        by_role = {"hidden": hidden, "output": self.output, "embedding": self.embedding}
        factor = self.layer_weights.get(layer.name, by_role[layer.role])
        return factor / len(self.selection.hidden) if self.average and layer.role == "hidden" else factor

    def draw_neurons(self, seed: Tensor | None, number: int) -> dict[str, Tensor]:
        """Return the indices of the drawn neurons by layer name, for draw `number`.

        Layers with at most `batch` neurons are left out.
        Layers with λ = 0 take part, although their sample is not used: otherwise setting λ of one layer to 0 would
        change the samples of the layers after it.
        """
        large = [layer for layer in self.selection if self.batch is not None and layer.shape[1] > self.batch]
        # Without a layer to draw from, the seed is not read, because the host would wait for the device.
        if self.batch is None or seed is None or not large:
            return {}
        return _draw_neurons(large, self.batch, seed, number)

    def pair_sum(self, layer: NeuronLayer, rows: Tensor, potential: PairPotential, sample: Tensor | None) -> PairSum:
        """Describe the mean energy of rows (…, N, d) that stand for a layer. `weighted_terms` computes it.

        Args:
            layer: the layer.
            rows: its neurons, those of the sample if there is one, or projections of them.
            potential: of pairs.
            sample: the indices of the neurons that were drawn, or None.
        """
        betas = self.betas.get(layer.name)
        if betas is not None:
            betas = (betas if sample is None else betas[..., sample]).to(rows)
        return PairSum(rows, potential, betas, mean=True, sampled_from=None if sample is None else layer.shape[1])

    def weighted_terms(
        self, energies: Iterable[tuple[float, PairSum | Tensor]], reduce: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], bool]:
        """Compute the energies together. Return the terms of Σ λ·Ē, and whether their sum is known to be finite.

        Args:
            energies: pairs (λ, Ē). Ē is either a scalar or a sum over pairs of neurons, which is computed here.
            reduce: the mean energy of each layer of a stack, given the energies (layers, …) of its sets of neurons.
        """
        terms: list[Tensor] = []
        sums: list[PairSum] = []
        factors: list[float] = []
        for factor, energy in energies:
            if isinstance(energy, Tensor):
                terms.append(factor * energy)
            else:
                sums.append(energy)
                factors.append(factor)
        # Energies that are known to be finite are smaller than the largest number by ENERGY_HEADROOM. If the factors λ
        # are smaller than it in total, the sum cannot overflow, and the regulariser need not read it.
        is_bounded = not terms and sum(factors) < _numerics.ENERGY_HEADROOM
        stacks, stacked_factors = _stack_sums(sums, factors)
        # One call computes all energies, so that the host waits for the device once.
        values, is_finite = pair_energies(stacks)
        terms += [(f * reduce(value)).sum() for f, value in zip(stacked_factors, values, strict=True)]
        return terms, is_finite and is_bounded

    def labelled_output(self, labels: Tensor | None) -> NeuronLayer | None:
        """Return the output layer that labels refer to, or None without labels."""
        if labels is None:
            return None
        outputs = self.selection.outputs
        if len(outputs) != 1 or outputs[0].shape[0] != 1:
            received = f"one with {outputs[0].shape[0]} groups" if len(outputs) == 1 else str(len(outputs))
            raise ValueError(f"labels need exactly one output layer without groups; this model has {received}")
        return outputs[0]

    def labelled_energy(self, output: NeuronLayer, labels: Tensor) -> Tensor:
        """Return the energy of the classes of a batch against all classes, which replaces that of all pairs."""
        # The data-dependent energy is defined for directions, without factors β.
        if output.name in self.betas:
            raise ValueError(f"labels cannot be combined with neuron_weights of the output layer {output.name!r}")
        if getattr(output.module, "num_centers", 1) > 1:
            raise ValueError(f"labels need one class vector per class, but {output.name!r} has several centres")
        kernel, distance, ignored = self.potential.kernel, self.potential.distance, self.ignore_index
        return data_dependent_energy(output.rows(), labels, power=kernel, distance=distance, ignore_index=ignored)


def energy_roles(embedding: float) -> tuple[str, ...]:
    """Return the roles of the layers that have an energy. An output layer with λ_o = 0 can have a λ by its name."""
    return ("hidden", "output", "embedding") if embedding else ("hidden", "output")


def sampled_rows(layer: NeuronLayer, sample: Tensor | None) -> Tensor:
    """Return the neurons (groups, N, d) of a layer, or those of a sample, which is the same for all groups."""
    rows = layer.row_sets()
    # Samples are drawn on the CPU, so every device gets the same ones.
    return rows if sample is None else rows[:, sample.to(rows.device)]


@run_uncompiled
def _draw_neurons(layers: Sequence[NeuronLayer], size: int, seed: Tensor, number: int) -> dict[str, Tensor]:
    # One generator for all layers: the draw depends only on seed, number and the order of the layers.
    generator = seeded_generator(int(seed), number)
    return {layer.name: torch.randperm(layer.shape[1], generator=generator)[:size] for layer in layers}


def _stack_sums(sums: Sequence[PairSum], factors: Sequence[float]) -> tuple[list[PairSum], list[Tensor | float]]:
    """Stack sums of equal shape and potential, which then share one batched product; return their factors λ too."""
    # Layers with neuron weights are stacks of one: their position is part of the key.
    keys = [(id(one.potential), one.sampled_from, None if one.weights is None else i) for i, one in enumerate(sums)]
    stacks: list[PairSum] = []
    stacked_factors: list[Tensor | float] = []
    for index, w in stack_equal_shapes([one.w for one in sums], keys):
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
        except (TypeError, ValueError, RuntimeError):  # torch raises any of them for what is no tensor
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
