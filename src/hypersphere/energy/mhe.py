"""MHE: the hyperspherical energy of a network's neurons as a regulariser."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hypersphere import sphere
from hypersphere.energy.draws import seeded
from hypersphere.energy.hyperspherical import stacked_energy
from hypersphere.energy.neurons import Source, find_neurons, stack_equal_shapes
from hypersphere.functions.kernel import kernel_of
from hypersphere.functions.menu import require
from hypersphere.functions.potential import PairPotential
from hypersphere.functions.repulsion import data_dependent_energy

__all__ = ["MHE"]


class MHE(nn.Module):
    r"""λ_h·Σ_hidden Ē + λ_o·Ē_output, with Ē the mean energy of a layer's neurons   (thesis, 5.4).

    It holds the layers, not their parameters: its state dict has its seed and step counter at most. Called once a step,
    it returns the scalar to add to the loss. Neurons of the output layer always repel each other in full space.

    Args:
        model: a module (linear, convolution and head layers are found, parametrised ones too), or named tensors.
        hidden: λ_h; the sources use 1 in half space and 10 in full space.
        output: λ_o.
        half_space: whether hidden neurons repel the opposites of the others too; or the names of the layers where so.
        power: s ≥ 0, a kernel or a callable of the distance.
        distance: "euclidean" or "angular" (A-MHE).
        output_layer: "last" (a head if there is one, else the last layer; none of named tensors), a name, or None.
        where: which layers to take, by name and module.
        batch: how many neurons of each larger hidden layer to draw at each step, or None for all.
        seed: of those draws, which are the same on every rank.

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> regulariser = MHE(net)
        >>> loss = net(torch.randn(5, 8)).square().mean() + regulariser()

    Reference:
        Liu et al., Learning towards Minimum Hyperspherical Energy, NeurIPS 2018.
    """

    steps: Tensor
    seed: Tensor

    def __init__(
        self,
        model: Source,
        *,
        hidden: float = 1.0,
        output: float = 1.0,
        half_space: bool | tuple[str, ...] | list[str] = True,
        power: float | str | Callable[[Tensor], Tensor] = 2,
        distance: str = "euclidean",
        output_layer: str | None = "last",
        where: Callable[[str, nn.Module], bool] | None = None,
        batch: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, factor in (("hidden", hidden), ("output", output)):
            require(0 <= factor < math.inf, name, "a number >= 0", factor)
        require(batch is None or batch >= 2, "batch", "None or a number >= 2", batch)
        self.population = find_neurons(model, output=output_layer, where=where)
        self.hidden, self.output, self.batch = hidden, output, batch
        self.potential = PairPotential(kernel_of(power), distance)
        self.mirrored = _mirrored(self, half_space)
        if batch is not None:
            self.register_buffer("seed", torch.tensor(seed))
            self.register_buffer("steps", torch.tensor(0))

    @property
    def skipped(self) -> tuple[str, ...]:
        """The layers left out because they have one neuron."""
        return self.population.skipped

    def forward(self, labels: Tensor | None = None) -> Tensor:
        """Return the regulariser; with the `labels` of a batch, the output's energy is the data-dependent one."""
        device = self.population.layers[0].weight.device
        generator = self._advance() if self.batch is not None else None
        total = torch.zeros((), device=device)
        with sphere.full_precision(total):
            if self.hidden:
                total = total + self.hidden * self._hidden_energy(generator)
            layer = self.population.output
            if layer is not None and self.output:
                if labels is None:
                    total = total + self.output * stacked_energy(layer.rows(), self.potential).mean()
                else:
                    power, distance = self.potential.kernel, self.potential.distance
                    weight = sphere.widen(layer.weight).flatten(1)
                    total = total + self.output * data_dependent_energy(weight, labels, power=power, distance=distance)
        self.population.require_finite(total)
        return total

    def _hidden_energy(self, generator: torch.Generator | None) -> Tensor:
        energies: list[Tensor] = []
        for mirrored in (False, True):
            potential = PairPotential(self.potential.kernel, self.potential.distance, mirrored)
            layers = [layer for layer in self.population.hidden if (layer.name in self.mirrored) == mirrored]
            whole = [layer.rows() for layer in layers if not self._is_large(layer.shape[1])]
            energies += [stacked_energy(stack, potential).mean(-1).sum() for stack in stack_equal_shapes(whole)]
            for layer in layers:
                n = layer.shape[1]
                if self._is_large(n):
                    drawn = torch.randperm(n, generator=generator)[: self.batch]
                    rows = layer.rows()
                    energies.append(stacked_energy(rows[:, drawn.to(rows.device)], potential, of=n).mean())
        return torch.stack([e.to(energies[0]) for e in energies]).sum() if energies else torch.zeros(())

    def _is_large(self, n: int) -> bool:
        return self.batch is not None and n > self.batch

    @torch.compiler.disable
    def _advance(self) -> torch.Generator:
        generator = seeded(int(self.seed), int(self.steps))
        if self.training:
            self.steps += 1
        return generator

    def extra_repr(self) -> str:
        """Show the layers and what is asked of them."""
        hidden = ", ".join(layer.name for layer in self.population.hidden)
        output = None if self.population.output is None else self.population.output.name
        space = f"half space in [{', '.join(sorted(self.mirrored))}]" if self.mirrored else "full space"
        kernel, distance = self.potential.kernel, self.potential.distance
        return f"hidden={self.hidden} of [{hidden}], {space}, output={self.output} of {output}, {kernel}, {distance}"


def _mirrored(self: MHE, half_space: bool | tuple[str, ...] | list[str]) -> frozenset[str]:
    """The names of the hidden layers in half space."""
    population = self.population
    hidden = [layer.name for layer in population.hidden]
    output = population.output
    if isinstance(half_space, bool):
        if half_space and not hidden and output is not None:
            raise ValueError(
                f"half_space must be False here: the only layer, {output.name or 'the model itself'!r}, is the output "
                "layer, whose energy is always that of the full space (output_layer=None makes it a hidden one)"
            )
        return frozenset(hidden if half_space else ())
    if output is not None and output.name in half_space:
        raise ValueError(f"half_space must not name the output layer {output.name!r}: opposite classes are far apart")
    unknown = sorted(set(half_space) - set(hidden))
    require(not unknown, "half_space", f"a bool or some of the hidden layers {', '.join(hidden)}", unknown)
    return frozenset(half_space)
