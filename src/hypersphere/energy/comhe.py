r"""CoMHE: the energy of projected neurons as a regulariser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hypersphere._layer_selection import LayerSource, NeuronLayer
from hypersphere._signatures import accept_options_of
from hypersphere._validation import is_number, require, warn_user
from hypersphere.energy._regularizer import place_on_layer, require_bools, warn_if_constant
from hypersphere.energy._steps import Step, run_uncompiled, seeded_generator
from hypersphere.energy.mhe import EnergyOptions, EnergyRegularizer, Views
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
        **options: `layer_weights`, `schedule`, `every`, `output_layer`, `where`, `auto_advance` and `report`, as in
            `NeuronRegularizer`.

    Example:
        >>> from torch import nn
        >>> from hypersphere.functions.projection import Random
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> regularizer = CoMHE(net, projection=Random(dim=3, views=2))
        >>> loss = net(torch.randn(5, 8)).square().mean() + regularizer()

    Reference:
        Lin et al., Regularizing Neural Networks via Minimizing Hyperspherical Energy, CVPR 2020.
    """

    @accept_options_of(EnergyRegularizer.__init__, only=EnergyOptions.__annotations__)
    def __init__(
        self,
        model: LayerSource,
        *,
        projection: str | Projection = "random",
        shared: bool = True,
        hidden: float = 1.0,
        half_space: bool = True,
        power: float | str | Callable[[Tensor], Tensor] = 2,
        min_distance: float | None = None,
        **options: Unpack[EnergyOptions],
    ) -> None:
        require(is_number(hidden, 0), "hidden", "a finite number >= 0", hidden)
        require_bools(half_space=half_space, shared=shared)
        super().__init__(model, needs_counter=True, power=power, min_distance=min_distance, **options)
        self.hidden, self.projection, self.shared = hidden, _projection_of(projection), shared
        if isinstance(self.projection, Bilateral):
            accepted = "None with a bilateral projection, which mixes neurons"
            require(not self.betas, "neuron_weights", accepted, "a mapping")
            require(self.batch is None, "batch", accepted, self.batch)
        # Apply the projection's bound only to kernels given by power or name: an object or a callable says itself how
        # it behaves at small distances. The output layer is not projected, so it needs no bound unless one is passed.
        uses_default = min_distance is None and isinstance(power, (int, float, str))
        bound = self.projection.min_distance if uses_default else min_distance
        self.projected_potential = PairPotential(kernel_of(power, bound), self.potential.distance, half_space)
        self.projected = self._projected_layers()
        # A projection P·R·w depends on R. The energy of layers that are not projected does not.
        warn_if_constant(layer for layer in self.weighted_layers() if layer not in self.projected)
        # The layers that share a basis, by its key.
        self._layers_by_basis: dict[str, list[NeuronLayer]] = {}
        for layer in self.projected:
            self._layers_by_basis.setdefault(self._basis_key(layer), []).append(layer)
        self._drawn = self._draw_bases(int(options.get("seed", 0)), 0)  # the last bases that were drawn
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

    def hidden_factor(self, layer: NeuronLayer) -> float:
        """Return λ_h."""
        return self.hidden

    def draw_neurons(self, step: Step) -> dict[str, Tensor]:
        """Return the indices of the neurons that are drawn at a step by layer name."""
        # Neurons and bases share the seed. Bases have the draws 0, 1, 2, …, so neurons have −1, −2, −3, …
        return super().draw_neurons(step._replace(number=~step.number))

    def views(self, rows: Mapping[str, Tensor], step: Step) -> tuple[Views, Mapping[str, Tensor]]:
        """Return the projections of each layer or, where it is not projected, its rows; and the learned bases."""
        projected = {layer.name: self._basis_key(layer) for layer in self.projected if layer.name in rows}
        bases = self._bases({name: rows[name] for name in projected}, step) if projected else {}
        outputs = {layer.name for layer in self.selection.outputs}
        views: Views = {}
        for name, w in rows.items():
            if name in projected:
                basis = bases[projected[name]]
                # Tensors (views, sets, N, r), one per shape of view: two for a bilateral projection, else one. A basis
                # of integers lists the channels of groups and keeps its dtype.
                stacks = self.projection(w, basis.to(w if basis.is_floating_point() else w.device))
            else:
                stacks = (w.unsqueeze(0),)  # one view, the neurons themselves
            potential = self.potential if name in outputs else self.projected_potential
            views[name] = [(stack, potential) for stack in stacks]
        # Drawn bases are not stored: seed and step determine them.
        is_learned = isinstance(self.projection, Learned)
        return views, {f"basis_{key}": basis for key, basis in bases.items()} if is_learned else {}

    def _reduce(self, energies: Tensor) -> Tensor:
        """Reduce energies (…, views, sets): the mean or maximum over views, then the mean over sets."""
        views = energies.amax(-2) if self.projection.aggregate == "max" else energies.mean(-2)
        return super()._reduce(views)

    # Bases ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def bases(self) -> dict[str, Tensor]:
        """Return the current basis of each projected layer by name: the basis of the last step, or the learned one.

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
        """Draw the bases of all keys, also for layers with λ = 0, so that λ does not change the other bases."""
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
        """Return learned bases: the bases at the start of the step, or redrawn ones, after the updates of this step."""
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
