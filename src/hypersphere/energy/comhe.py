r"""CoMHE: the energy of projected neurons as a regulariser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hypersphere._layer_selection import LayerSource, NeuronLayer
from hypersphere._signatures import accept_options_of
from hypersphere._validation import is_number, require, warn_user
from hypersphere.energy._energy_regularizer import EnergyRegularizer, NeuronWeights, WeightedSums
from hypersphere.energy._layer_sets import place_on_layer, stack_equal_shapes
from hypersphere.energy._regularizer import RegularizerKeywords, RegularizerOptions, options_of
from hypersphere.energy._sampling import seeded_generator
from hypersphere.energy._steps import Step, run_uncompiled
from hypersphere.functions._pairwise import PairSum
from hypersphere.functions.kernel import PairPotential, kernel_of
from hypersphere.functions.projection import PROJECTIONS, Bilateral, Learned, Projection

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CoMHE"]


class _DrawnBases(NamedTuple):
    """Bases by key, with the seed and the number of their draw."""

    seed: int
    number: int
    bases: dict[str, Tensor]


class CoMHE(EnergyRegularizer):
    r"""Compressive MHE: λ_h·Σ_hidden Ē(g(ŵ₁), …, g(ŵ_N)) + λ_o·Ē_output with g(ŵ) = Pŵ/‖Pŵ‖   (thesis, 6.3).

    Random bases are functions of the seed and the step; learned bases are buffers. Both are in the state dict and the
    same on every rank. The output layer is not projected. A layer whose neurons are shorter than the projection's `dim`
    is not projected either and contributes its plain energy. Labels and distributed heads are as for `MHE`. Call the
    regulariser once per optimiser step; see `NeuronRegularizer` for the counting of steps.

    The arguments from `layer_weights` to `report` are those of `RegularizerOptions`, which all regularisers share.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        projection: a name of `hypersphere.projection` or an object of its classes.
        hidden: λ_h.
        half_space: True if hidden neurons are also repelled by the opposites of the others.
        shared: True if layers whose neurons have equal length share a basis.
        batch: the number of neurons that are drawn from each larger layer at each step, as for `MHE`; None for all.
            Learned bases are updated from the drawn neurons. Not with "bilateral".
        power: s ≥ 0, a kernel or a callable of the distance.
        min_distance: below this distance the energy continues linearly, which bounds the gradient; None for the value
            of the projection, 0.1 for "adversarial" and no bound for the others.
        output: λ_o.
        embedding: λ of embeddings, which are left out by default.
        distance: "euclidean" or "angular".
        neuron_weights: factors β of neurons by layer, as for `MHE`; not with "bilateral".
        average: divide the sum over hidden layers by their number.
        ignore_index: labels of this value do not count, as in `torch.nn.functional.cross_entropy`.
        seed: the seed of random draws, which are the same on every rank.

    Example:
        >>> from torch import nn
        >>> from hypersphere.functions.projection import Random
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> regularizer = CoMHE(net, projection=Random(dim=3, views=2))
        >>> loss = net(torch.randn(5, 8)).square().mean() + regularizer()

    Reference:
        Lin et al., Regularizing Neural Networks via Minimizing Hyperspherical Energy, CVPR 2020.
    """

    @accept_options_of(RegularizerOptions)
    def __init__(
        self,
        model: LayerSource,
        *,
        projection: str | Projection = "random",
        hidden: float = 1.0,
        half_space: bool = True,
        shared: bool = True,
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
        require(is_number(hidden, 0), "hidden", "a finite number >= 0", hidden)
        for name, flag in (("half_space", half_space), ("shared", shared)):
            require(isinstance(flag, bool), name, "a bool", flag)
        resolved = _projection_of(projection)  # before the layers are read, which takes longer
        super().__init__(
            model,
            options_of(self, options),
            is_random=True,
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
        self.hidden, self.projection, self.shared = hidden, resolved, shared
        if isinstance(self.projection, Bilateral):
            accepted = "None with a bilateral projection, which mixes neurons"
            require(not self.neuron_weights, "neuron_weights", accepted, "a mapping")
            require(batch is None, "batch", accepted, batch)
        # Apply the projection's cap only to kernels given by power or name. The output layer is not projected, so it
        # needs no cap unless one is requested.
        is_named_power = isinstance(power, (int, float, str))
        cap = self.projection.min_distance if min_distance is None and is_named_power else min_distance
        self.projected_potential = PairPotential(kernel_of(power, cap), self.potential.distance, half_space)
        self.projected = self._projected_layers()
        # The layers that share a basis, by its key.
        self._layers_by_basis: dict[str, list[NeuronLayer]] = {}
        for layer in self.projected:
            self._layers_by_basis.setdefault(self._basis_key(layer), []).append(layer)
        self._drawn = self._draw_bases(int(self.seed), 0)  # the last bases that were drawn
        if isinstance(self.projection, Learned):
            for key, basis in self._drawn.bases.items():
                # The first layer determines device and dtype.
                self.register_buffer(f"basis_{key}", place_on_layer(basis, self._layers_by_basis[key][0]))

    def _projected_layers(self) -> tuple[NeuronLayer, ...]:
        """Return the hidden layers that are large enough for the projection; warn about the others."""
        layers = [layer for layer in self.selection if layer.role != "output"]
        accepted = "one with a hidden layer (output_layer=None makes the output layer a hidden one)"
        require(bool(layers), "model", accepted, "one with an output layer only")
        projected = tuple(layer for layer in layers if self.projection.fits(layer.shape[1], layer.length))
        small = ", ".join(layer.name for layer in layers if layer not in projected)
        if small:
            warn_user(f"not projected, because the layers are smaller than the projection: {small}")
        return projected

    def factor(self, layer: NeuronLayer) -> float:
        """Return λ of a layer."""
        return self.factor_of_role(layer, hidden=self.hidden)

    def weighted_sums(self, layers: list[NeuronLayer], step: Step) -> WeightedSums:
        """Return the output layers as they are and views (views, sets, N, r) of the others."""
        # Neurons and bases are drawn from different streams, so the numbers of the draws must differ.
        indices = self.draw_neurons(~step.number, self.selection)
        # Read the rows once: the bases are learned from them, and a parametrised weight is computed at every access.
        rows = {layer.name: self._sampled_rows(layer, indices) for layer in layers if layer in self.projected}
        bases = self._bases(rows, step) if rows else {}
        sums = WeightedSums(self._reduce)
        if isinstance(self.projection, Learned):
            sums.updates = {f"basis_{key}": basis for key, basis in bases.items()}
        # By the number of neurons that a sample stands for; None for layers that are not sampled.
        stackable: dict[int | None, list[tuple[Tensor, float]]] = {}
        for layer in layers:
            is_output = layer.role == "output"
            potential = self.potential if is_output else self.projected_potential
            index, betas = indices.get(layer.name), self.neuron_weights.get(layer.name)
            count = None if index is None else layer.shape[1]
            for view in self._views(layer, rows, bases, indices):
                # Views of equal shape share one batched product, unless their neurons have weights.
                if betas is None and not is_output:
                    stackable.setdefault(count, []).append((view, self.factor(layer)))
                else:
                    weights = None if betas is None else (betas if index is None else betas[..., index]).to(view)
                    pair_sum = PairSum(view, potential, weights, mean=True, sampled_from=count)
                    sums.add(pair_sum, self.factor(layer))
        for count, views in stackable.items():
            for stack, layer_factors in stack_equal_shapes(views):
                pair_sum = PairSum(stack, self.projected_potential, mean=True, sampled_from=count)
                sums.add(pair_sum, layer_factors)
        return sums

    @staticmethod
    def _sampled_rows(layer: NeuronLayer, indices: Mapping[str, Tensor]) -> Tensor:
        """Return the neurons of a layer, or those that were drawn from it."""
        rows, index = layer.row_sets(), indices.get(layer.name)
        return rows if index is None else rows[:, index.to(rows.device)]

    def _views(
        self,
        layer: NeuronLayer,
        rows: Mapping[str, Tensor],
        bases: Mapping[str, Tensor],
        indices: Mapping[str, Tensor],
    ) -> tuple[Tensor, ...]:
        """Return the projections of a layer, or one view of its neurons if it is not projected."""
        if layer.name not in rows:
            return (self._sampled_rows(layer, indices).unsqueeze(0),)
        # Group projections have integer indices as a basis, whose dtype must not change.
        basis, w = bases[self._basis_key(layer)], rows[layer.name]
        return self.projection(w, basis.to(w if basis.is_floating_point() else w.device))

    def _reduce(self, energies: Tensor) -> Tensor:
        """Reduce energies (…, views, sets): the mean or maximum over views, then the mean over sets."""
        views = energies.amax(-2) if self.projection.aggregate == "max" else energies.mean(-2)
        return views.mean(-1)

    # Bases ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def bases(self) -> dict[str, Tensor]:
        """Return the current basis of each projected layer by name: that of the last step, or the learned one.

        Layers that share a basis have the same tensor. `Projection.basis` documents the shape.
        """
        step = self.counter.begin(self)
        if isinstance(self.projection, Learned):
            by_key = {key: step.buffers[f"basis_{key}"] for key in self._layers_by_basis}
        else:
            by_key = self._drawn_bases(step.number)
        return {layer.name: by_key[self._basis_key(layer)] for layer in self.projected}

    def _basis_key(self, layer: NeuronLayer) -> str:
        """Return what layers that share a basis have in common, as part of a buffer's name."""
        _, _, channels, taps = layer.shape
        if not self.shared or self.projection.scope == "layer":
            return layer.name.replace("~", "~0").replace(".", "~1")  # names of buffers contain no dot
        return f"{channels}x{taps}" if self.projection.scope == "channels" else str(channels * taps)

    def _draw_bases(self, seed: int, number: int) -> _DrawnBases:
        """Draw the bases of all keys, also those of layers with λ = 0, so that λ does not change the other bases."""
        generator = seeded_generator(seed, number)
        bases = {
            key: self.projection.basis(*layers[0].shape[1:], generator) for key, layers in self._layers_by_basis.items()
        }
        return _DrawnBases(seed, number, bases)

    @run_uncompiled
    def _bases(self, rows: Mapping[str, Tensor], step: Step) -> dict[str, Tensor]:
        """Return the basis of every key at a step: drawn, or learned."""
        if isinstance(self.projection, Learned):
            return self._learn_bases(self.projection, rows, step)
        return self._drawn_bases(step.number)

    def _drawn_bases(self, number: int) -> dict[str, Tensor]:
        """Return the bases that are drawn for a step."""
        # Bases are functions of seed and step. Cache the last ones for projections that draw less than once per step,
        # and for calls that peek at a step or repeat it.
        draw = (int(self.seed), number // self.projection.every)
        if self._drawn[:2] != draw:
            self._drawn = self._draw_bases(*draw)
        return self._drawn.bases

    def _learn_bases(self, projection: Learned, rows: Mapping[str, Tensor], step: Step) -> dict[str, Tensor]:
        """Return learned bases: those at the start of the step, or drawn again, after the updates of this step."""
        redrawn: dict[str, Tensor] = {}
        updates = 0
        if step.kind != "peek":
            period = projection.redraw_every
            if period is not None and step.number >= period and self._is_first_of_period(step.number, period):
                redrawn = self._draw_bases(int(self.seed), step.number // period).bases
            if projection.unrolled or self._is_first_of_period(step.number, projection.every):
                updates = projection.updates
        bases: dict[str, Tensor] = {}
        for key, layers in self._layers_by_basis.items():
            sets = [rows[layer.name] for layer in layers if layer.name in rows]
            if not sets:
                continue
            basis = redrawn.get(key, step.buffers[f"basis_{key}"]).to(sets[0])
            # Unrolled updates are part of the energy and need a graph. In all others the basis is a constant.
            with torch.set_grad_enabled(torch.is_grad_enabled() and projection.unrolled):
                for _ in range(updates):
                    # A shared basis descends the sum of the objectives of its layers.
                    gradients = [projection.gradient(w, basis, self.projected_potential) for w in sets]
                    basis = projection.update(basis, torch.stack(gradients).sum(0))
            bases[key] = basis
        return bases

    def _is_first_of_period(self, number: int, period: int) -> bool:
        """Return True at the first step of each `period` steps at which the regulariser is computed.

        The start of the period itself may be skipped by `every` or by a schedule that is 0 there.
        """
        start = number - number % period
        earliest = -(-start // self.every) * self.every  # the first step from `start` on that `every` does not skip
        return not any(self._scheduled_factor(earlier) for earlier in range(earliest, number, self.every))

    def extra_repr(self) -> str:
        """Show the layers and their settings."""
        hidden = ", ".join(layer.name for layer in self.projected)
        layers = f"hidden={self.hidden} of [{hidden}], shared={self.shared}"
        return f"{self.projection!r}, {layers}, {self.projected_potential!r}"


def _projection_of(projection: str | Projection) -> Projection:
    """Return a projection given by its name or as an object."""
    if isinstance(projection, str) and projection in PROJECTIONS:
        return PROJECTIONS[projection]()
    accepted = f"one of {', '.join(map(repr, PROJECTIONS))} or an object of those classes"
    require(isinstance(projection, Projection), "projection", accepted, projection)
    assert isinstance(projection, Projection)
    return projection
