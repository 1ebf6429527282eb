r"""CoMHE: the energy of projected neurons as a regulariser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hypersphere._layer_selection import LayerSource, NeuronLayer
from hypersphere._validation import is_number, require, warn_user
from hypersphere.energy._regularizer import (
    NeuronRegularizer,
    StepResult,
    place_on_layer,
    require_bools,
    warn_if_constant,
)
from hypersphere.energy._sampling import check_seed, seeded_generator
from hypersphere.energy._steps import Step, run_uncompiled
from hypersphere.energy.mhe import LayerEnergies, NeuronWeights, energy_roles, sampled_rows
from hypersphere.functions._pairwise import PairSum
from hypersphere.functions.kernel import PairPotential, kernel_of
from hypersphere.functions.projection import PROJECTIONS, Bilateral, Learned, Projection

__all__ = ["CoMHE"]


class _DrawnBases(NamedTuple):
    """Bases by key, with the seed and the number of their draw."""

    seed: int
    number: int
    bases: dict[str, Tensor]


class CoMHE(NeuronRegularizer):
    r"""Compressive MHE: λ_h·Σ_hidden Ē(g(ŵ₁), …, g(ŵ_N)) + λ_o·Ē_output with g(ŵ) = Pŵ/‖Pŵ‖   (thesis, 6.3).

    Random bases are functions of the seed and the step, and learned bases are buffers. The state dict therefore
    restores both, and they are the same on every rank. The output layer is not projected. A layer whose neurons are
    shorter than the projection's `dim` is not projected either and contributes its plain energy. Labels and distributed
    heads are as for `MHE`. Call the regulariser once per optimiser step; see `NeuronRegularizer` for the counting of
    steps.

    Args:
        model: a module or named tensors, as for `hypersphere.layers_of`.
        projection: a name of `hypersphere.projection` or an object of its classes.
        shared: True if layers whose neurons have equal length share a basis.
        hidden: λ_h.
        output: λ_o.
        embedding: λ of embeddings, which are left out by default.
        half_space: True if hidden neurons are also repelled by the opposites of the others.
        power: s ≥ 0, a kernel or a callable of the distance.
        distance: "euclidean", or "angular" (A-MHE).
        min_distance: below this distance the energy continues linearly, which bounds the gradient of near-duplicate
            neurons; None for the bound of the projection, 0.1 for "adversarial" and no bound for the others.
        batch: the number of neurons that are drawn from each larger layer at each step; None for all. It does not apply
            to the output layer if labels are passed. Learned bases are updated from the neurons that are drawn. It
            cannot be combined with "bilateral", which mixes neurons.
        seed: the seed of random draws, which are the same on every rank.
        neuron_weights: positive factors β of neurons by name or pattern of layers, for the energy of βᵢ·ŵᵢ (Euclidean
            distance only). The output layer can have them only if no labels are passed. They cannot be combined with
            "bilateral", which mixes neurons.
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
        >>> from hypersphere.functions.projection import Random
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> regularizer = CoMHE(net, projection=Random(dim=3, views=2))
        >>> loss = net(torch.randn(5, 8)).square().mean() + regularizer()

    Reference:
        Lin et al., Regularizing Neural Networks via Minimizing Hyperspherical Energy, CVPR 2020.
    """

    def __init__(
        self,
        model: LayerSource,
        *,
        projection: str | Projection = "random",
        shared: bool = True,
        hidden: float = 1.0,
        output: float = 1.0,
        embedding: float = 0.0,
        half_space: bool = True,
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
        require(is_number(hidden, 0), "hidden", "a finite number >= 0", hidden)
        require_bools(half_space=half_space, shared=shared)
        check_seed(seed)
        resolved = _projection_of(projection)
        if isinstance(resolved, Bilateral):
            accepted = "None with a bilateral projection, which mixes neurons"
            require(not neuron_weights, "neuron_weights", accepted, "a mapping")
            require(batch is None, "batch", accepted, batch)
        super().__init__(
            model,
            roles=energy_roles(embedding),
            min_length=2,  # the directions of single numbers are ±1
            needs_counter=True,
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
        self.hidden, self.projection, self.shared = hidden, resolved, shared
        # The seed is saved with the counter, so that a resumed run continues the same sequence of draws.
        self.register_buffer("seed", torch.tensor(seed))
        # Apply the projection's bound only to kernels given by power or name: an object or a callable says itself how
        # it behaves at small distances. The output layer is not projected, so it needs no bound unless one is passed.
        uses_default = min_distance is None and isinstance(power, (int, float, str))
        bound = resolved.min_distance if uses_default else min_distance
        self.projected_potential = PairPotential(kernel_of(power, bound), distance, half_space)
        self.projected = self._projected_layers()
        # A projection P·R·w depends on R. The energy of layers that are not projected does not.
        warn_if_constant(layer for layer in self.weighted_layers() if layer not in self.projected)
        # The layers that share a basis, by its key.
        self._layers_by_basis: dict[str, list[NeuronLayer]] = {}
        for layer in self.projected:
            self._layers_by_basis.setdefault(self._basis_key(layer), []).append(layer)
        self._drawn = self._draw_bases(int(seed), 0)  # the last bases that were drawn
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
        return self.energies.factor(layer, hidden=self.hidden)

    def compute(self, labels: Tensor | None, step: Step) -> StepResult:
        """Return λ·Ē of all layers with λ > 0, projected or as they are, and the learned bases."""
        layers = self.weighted_layers()
        # Neurons and bases share the seed. Bases have the draws 0, 1, 2, …, so neurons have −1, −2, −3, …
        samples = self.energies.draw_neurons(step.buffers["seed"], ~step.number)
        # Read the rows once: the bases are learned from them, and a parametrised weight is computed at every access.
        projected = [layer for layer in layers if layer in self.projected]
        rows = {layer.name: sampled_rows(layer, samples.get(layer.name)) for layer in projected}
        bases = self._bases(rows, step) if rows else {}
        labelled = self.energies.labelled_output(labels)
        energies: list[tuple[float, PairSum | Tensor]] = []
        for layer in layers:
            factor, sample = self.factor(layer), samples.get(layer.name)
            if labels is not None and layer is labelled:
                energies.append((factor, self.energies.labelled_energy(layer, labels)))
                continue
            if layer.name in rows:
                w, basis = rows[layer.name], bases[self._basis_key(layer)]
                # Tensors (views, sets, N, r), one per shape of view: two for a bilateral projection, else one. A basis
                # of integers lists the channels of groups and keeps its dtype.
                views = self.projection(w, basis.to(w if basis.is_floating_point() else w.device))
            else:
                views = (sampled_rows(layer, sample).unsqueeze(0),)  # one view, the neurons themselves
            potential = self.energies.potential if layer.role == "output" else self.projected_potential
            energies += [(factor, self.energies.pair_sum(layer, view, potential, sample)) for view in views]
        terms, is_finite = self.energies.weighted_terms(energies, self._reduce)
        updates = {}  # drawn bases are not stored: seed and step determine them
        if isinstance(self.projection, Learned):
            updates = {f"basis_{key}": basis for key, basis in bases.items()}
        return StepResult(terms, updates, is_finite)

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
        step = self._begin_step()
        if isinstance(self.projection, Learned):
            by_key = {key: step.buffers[f"basis_{key}"] for key in self._layers_by_basis}
        else:
            by_key = self._drawn_bases(step)
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
        return self._drawn_bases(step)

    def _drawn_bases(self, step: Step) -> dict[str, Tensor]:
        """Return the bases that are drawn for a step."""
        # Bases are functions of seed and step. Cache the last ones for projections that draw less than once per step,
        # and for calls that peek at a step or repeat it.
        draw = (int(step.buffers["seed"]), step.number // self.projection.every)
        if self._drawn[:2] != draw:
            self._drawn = self._draw_bases(*draw)
        return self._drawn.bases

    def _learn_bases(self, projection: Learned, rows: Mapping[str, Tensor], step: Step) -> dict[str, Tensor]:
        """Return learned bases: those at the start of the step, or drawn again, after the updates of this step."""
        redrawn: dict[str, Tensor] = {}
        updates = 0
        # A peek uses the bases as they are: measuring must not depend on how often it is done.
        if step.kind != "peek":
            period = projection.redraw_every
            # The first period keeps the bases that the constructor has drawn.
            if period is not None and step.number >= period and self._is_first_of_period(step.number, period):
                redrawn = self._draw_bases(int(step.buffers["seed"]), step.number // period).bases
            if projection.unrolled or self._is_first_of_period(step.number, projection.every):
                updates = projection.updates
        bases: dict[str, Tensor] = {}
        for key, layers in self._layers_by_basis.items():
            sets = [rows[layer.name] for layer in layers if layer.name in rows]
            if not sets:  # all of its layers have λ = 0, so no energy needs the basis
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
        settings = [f"{self.projection!r}", f"hidden={self.hidden} of [{hidden}]", f"shared={self.shared}"]
        return ", ".join([*settings, f"{self.projected_potential!r}", *self._step_settings()])


def _projection_of(projection: str | Projection) -> Projection:
    """Return a projection given by its name or as an object."""
    if isinstance(projection, str) and projection in PROJECTIONS:
        return PROJECTIONS[projection]()
    accepted = f"one of {', '.join(map(repr, PROJECTIONS))} or an object of those classes"
    require(isinstance(projection, Projection), "projection", accepted, projection)
    assert isinstance(projection, Projection)
    return projection
