"""CoMHE: the energy of projected neurons as a regulariser."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import is_number, require
from hypersphere.energy.draws import require_seed, seeded, uncompiled
from hypersphere.energy.energy import stacked_energy
from hypersphere.energy.neurons import Neurons, Source, find_neurons, stack_equal_shapes
from hypersphere.functions._pairwise import PairPotential
from hypersphere.functions.kernel import kernel_of
from hypersphere.functions.projection import PROJECTIONS, Learned, Projection

__all__ = ["CoMHE"]


class CoMHE(nn.Module):
    r"""λ_h·Σ_hidden Ē(g(ŵ₁), …, g(ŵ_N)) + λ_o·Ē_output with g(ŵ) = Pŵ/‖Pŵ‖   (thesis, 6.3).

    Random bases are a function of the seed and the step, learned ones are buffers: both are in the state dict and the
    same on every rank. The output layer is not projected. Neurons shorter than the projection's `dim` stand for
    themselves, with a note.

    Args:
        model: a module or named tensors, as for `MHE`.
        projection: a name of `hypersphere.projection` or one of its objects.
        hidden: λ_h.
        output: λ_o, of the full-space energy of the output layer.
        half_space: whether hidden neurons repel the opposites of the others too.
        power: s ≥ 0, a kernel or a callable of the distance.
        distance: "euclidean" or "angular".
        shared: whether layers whose neurons have equal length share a basis.
        output_layer: "last" (a head if there is one, else the last layer; none of named tensors), a name, or None.
        where: which layers to take, by name and module.
        seed: of the bases.

    Example:
        >>> from hypersphere.functions.projection import Random
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> regulariser = CoMHE(net, projection=Random(dim=3, views=2))
        >>> loss = net(torch.randn(5, 8)).square().mean() + regulariser()

    Reference:
        Lin et al., Regularizing Neural Networks via Minimizing Hyperspherical Energy, CVPR 2020.
    """

    steps: Tensor
    seed: Tensor

    def __init__(
        self,
        model: Source,
        *,
        projection: str | Projection = "random",
        hidden: float = 1.0,
        output: float = 1.0,
        half_space: bool = True,
        power: float | str | Callable[[Tensor], Tensor] = 2,
        distance: str = "euclidean",
        shared: bool = True,
        output_layer: str | None = "last",
        where: Callable[[str, nn.Module], bool] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, factor in (("hidden", hidden), ("output", output)):
            require(is_number(factor, 0), name, "a number >= 0", factor)
        for name, flag in (("half_space", half_space), ("shared", shared)):
            require(isinstance(flag, bool), name, "a bool", flag)
        require_seed(seed)
        if isinstance(projection, str) and projection in PROJECTIONS:
            projection = PROJECTIONS[projection]()
        accepted = f"one of {', '.join(map(repr, PROJECTIONS))} or an object of those classes"
        require(isinstance(projection, Projection), "projection", accepted, projection)
        assert isinstance(projection, Projection)
        self.projection = projection
        self.population = find_neurons(model, output=output_layer, where=where, shortest=2)
        self.hidden, self.output, self.shared = hidden, output, shared
        self.potential = PairPotential(kernel_of(power), distance, half_space)
        self.plain = PairPotential(kernel_of(power), distance)
        self.projected, self.short = self._split()
        self.register_buffer("seed", torch.tensor(seed))
        self.register_buffer("steps", torch.tensor(0))
        self._drawn: tuple[tuple[int, int], dict[str, Tensor]] = (seed, 0), self._draw(0)
        if isinstance(projection, Learned):
            first = {self._key(layer): layer for layer in reversed(self.projected)}
            for key, basis in self._drawn[1].items():
                self.register_buffer(f"basis_{key}", first[key].placed(basis))

    def _split(self) -> tuple[tuple[Neurons, ...], tuple[Neurons, ...]]:
        """Which hidden layers are projected, and which have neurons too short for that."""
        hidden = self.population.hidden
        fits = [self.projection.fits(layer.shape[1], layer.length) for layer in hidden]
        longest = max((layer.length for layer in hidden), default=0)
        require(
            bool(hidden), "model", "one with a hidden layer (output_layer=None makes the last one hidden)", "without"
        )
        require(any(fits), "projection", f"at most as wide as the longest neurons, {longest}", self.projection)
        short = tuple(layer for layer, long in zip(hidden, fits, strict=True) if not long)
        if short:
            names = ", ".join(layer.name for layer in short)
            warnings.warn(f"not projected, with neurons shorter than the projection: {names}", stacklevel=3)
        return tuple(layer for layer, long in zip(hidden, fits, strict=True) if long), short

    @property
    def skipped(self) -> tuple[str, ...]:
        """The layers left out because they have one neuron, or neurons of one number."""
        return self.population.skipped

    def forward(self) -> Tensor:
        """Return the regulariser, and count a step while training."""
        anchor = self.population.layers[0].anchor
        with _numerics.autocast_disabled(anchor):
            rows = {layer.name: layer.rows() for layer in self.projected}
            bases = self._bases(rows)
            terms = []
            if self.hidden:
                stacks = [layer.rows().unsqueeze(0) for layer in self.short]
                for layer in self.projected:
                    w, basis = rows[layer.name], bases[self._key(layer)]
                    stacks += self.projection(w, basis.to(w if basis.is_floating_point() else w.device))
                for stack in stack_equal_shapes(stacks):
                    energies = stacked_energy(stack, self.potential)
                    views = energies.amax(1) if self.projection.aggregate == "max" else energies.mean(1)
                    terms.append(self.hidden * views.mean(-1).sum())
            for layer in self.population.outputs if self.output else ():
                terms.append(self.output * stacked_energy(layer.rows(), self.plain).mean())
            total = torch.stack([term.to(terms[0]) for term in terms]).sum() if terms else anchor.new_zeros(())
        self._keep(total, bases)
        return total

    @uncompiled
    def _keep(self, total: Tensor, bases: dict[str, Tensor]) -> None:
        """Count the step and keep learned bases, unless numbers are not finite."""
        self.population.require_finite(total)
        if self.training:
            self.steps += 1
        if isinstance(self.projection, Learned):
            for key, basis in bases.items():
                setattr(self, f"basis_{key}", basis.detach())

    def _key(self, layer: Neurons) -> str:
        """What layers that share a basis have in common."""
        _, _, channels, taps = layer.shape
        if not self.shared or self.projection.scope == "layer":
            return layer.name.replace("~", "~0").replace(".", "~1")  # a buffer's name has no dot
        return f"{channels}x{taps}" if self.projection.scope == "channels" else str(channels * taps)

    def _draw(self, number: int) -> dict[str, Tensor]:
        generator = seeded(int(self.seed), number)
        bases: dict[str, Tensor] = {}
        for layer in self.projected:
            key = self._key(layer)
            if key not in bases:
                bases[key] = self.projection.basis(*layer.shape[1:], generator)
        return bases

    @uncompiled
    def _bases(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """The basis of every key at this step: drawn, or moved along its slope."""
        step = int(self.steps)
        if isinstance(self.projection, Learned):
            return self._learn(self.projection, rows, step)
        draw = (int(self.seed), step // self.projection.every)
        if self._drawn[0] != draw:
            self._drawn = draw, self._draw(draw[1])
        return self._drawn[1]

    def _learn(self, projection: Learned, rows: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        bases: dict[str, Tensor] = {}
        moves = self.training and (projection.unrolled or step % projection.every == 0)
        for key in {self._key(layer): None for layer in self.projected}:
            equal = [rows[layer.name] for layer in self.projected if self._key(layer) == key]
            basis = getattr(self, f"basis_{key}").to(equal[0])
            with torch.set_grad_enabled(torch.is_grad_enabled() and projection.unrolled):
                for _ in range(projection.updates if moves else 0):
                    gradients = [projection.gradient(w, basis, self.potential) for w in equal]
                    basis = projection.update(basis, torch.stack(gradients).sum(0))
            bases[key] = basis
        return bases

    def extra_repr(self) -> str:
        """Show the layers and what is asked of them."""
        hidden = ", ".join(layer.name for layer in self.projected)
        return f"{self.projection!r}, hidden={self.hidden} of [{hidden}], shared={self.shared}, {self.potential!r}"
