"""MHE: the hyperspherical energy of a network's neurons as a regulariser."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import is_integer, is_number, require
from hypersphere.energy.draws import require_seed, seeded, uncompiled
from hypersphere.energy.energy import stacked_energy
from hypersphere.energy.neurons import Population, Source, find_neurons, stack_equal_shapes
from hypersphere.functions._pairwise import PairPotential, data_dependent_energy
from hypersphere.functions.kernel import kernel_of

__all__ = ["MHE"]


class MHE(nn.Module):
    r"""λ_h·Σ_hidden Ē + λ_o·Ē_output, with Ē the mean energy of a layer's neurons   (thesis, 5.4).

    It holds the layers, not their parameters: its state dict has its seed and step counter at most. Called once a step,
    it returns the scalar to add to the loss. Neurons of the output layer always repel each other in full space.

    Args:
        model: a module (linear, convolution and head layers are found, parametrised ones too), or named tensors.
        hidden: λ_h; None for what the sources use, 1 for layers in half space and 10 for those in full space.
        output: λ_o.
        half_space: whether hidden neurons repel the opposites of the others too, or the names of the layers where so;
            None for all hidden layers, if there are any.
        power: s ≥ 0, a kernel or a callable of the distance.
        distance: "euclidean" or "angular" (A-MHE).
        output_layer: "last" (all heads, else the last layer; none of named tensors), a name (beside heads), or None.
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
        hidden: float | None = None,
        output: float = 1.0,
        half_space: bool | tuple[str, ...] | list[str] | None = None,
        power: float | str | Callable[[Tensor], Tensor] = 2,
        distance: str = "euclidean",
        output_layer: str | None = "last",
        where: Callable[[str, nn.Module], bool] | None = None,
        batch: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require(hidden is None or is_number(hidden, 0), "hidden", "None or a number >= 0", hidden)
        require(is_number(output, 0), "output", "a number >= 0", output)
        whole = is_integer(batch, 2)
        require(batch is None or whole, "batch", "None or an integer >= 2", batch)
        require_seed(seed)
        self.population = find_neurons(model, output=output_layer, where=where, shortest=2)
        self.hidden, self.output, self.batch = hidden, output, batch
        self.potential = PairPotential(kernel_of(power), distance)
        self.mirrored = _mirrored(self.population, half_space)
        if batch is not None:
            self.register_buffer("seed", torch.tensor(seed))
            self.register_buffer("steps", torch.tensor(0))

    @property
    def skipped(self) -> tuple[str, ...]:
        """The layers left out because they have one neuron, or neurons of one number."""
        return self.population.skipped

    def forward(self, labels: Tensor | None = None) -> Tensor:
        """Return the regulariser; with the `labels` of a batch, the output's energy is the data-dependent one."""
        outputs = self.population.outputs
        if labels is not None:
            one = len(outputs) == 1 and outputs[0].shape[0] == 1
            require(one, "labels", "None without one output layer of one group", f"given, with {len(outputs)} outputs")
        generator = None if self.batch is None else self._generator()
        anchor = self.population.layers[0].anchor
        with _numerics.autocast_disabled(anchor):
            terms = self._hidden_energies(generator)
            for layer in outputs if self.output else ():
                w = layer.rows()
                if labels is None:
                    energy = stacked_energy(w, self.potential).mean()
                else:
                    kernel, distance = self.potential.kernel, self.potential.distance
                    energy = data_dependent_energy(w[0], labels, power=kernel, distance=distance)
                terms.append(self.output * energy)
            total = torch.stack([term.to(anchor.device) for term in terms]).sum() if terms else _nothing(anchor)
        self.population.require_finite(total)
        if generator is not None and self.training:
            self.steps += 1
        return total

    def _hidden_energies(self, generator: torch.Generator | None) -> list[Tensor]:
        """The energies of hidden layers times λ_h, those of one shape together."""
        energies: list[Tensor] = []
        for mirrored in (False, True):
            factor = (1.0 if mirrored else 10.0) if self.hidden is None else self.hidden
            potential = PairPotential(self.potential.kernel, self.potential.distance, mirrored)
            layers = [layer for layer in self.population.hidden if (layer.name in self.mirrored) == mirrored]
            if not factor:
                continue
            whole = [layer.rows() for layer in layers if not self._is_large(layer.shape[1])]
            energies += [
                factor * stacked_energy(stack, potential).mean(-1).sum() for stack in stack_equal_shapes(whole)
            ]
            for layer in layers:
                n = layer.shape[1]
                if self._is_large(n):
                    drawn = torch.randperm(n, generator=generator)[: self.batch]
                    rows = layer.rows()
                    energies.append(
                        factor * stacked_energy(rows[:, drawn.to(rows.device)], potential, sampled_from=n).mean()
                    )
        return energies

    def _is_large(self, n: int) -> bool:
        return self.batch is not None and n > self.batch

    @uncompiled
    def _generator(self) -> torch.Generator:
        return seeded(int(self.seed), int(self.steps))

    def extra_repr(self) -> str:
        """Show the layers and what is asked of them."""
        hidden = ", ".join(layer.name for layer in self.population.hidden)
        output = ", ".join(layer.name for layer in self.population.outputs) or None
        space = f"half space in [{', '.join(sorted(self.mirrored))}]" if self.mirrored else "full space"
        kernel, distance = self.potential.kernel, self.potential.distance
        factor = "1 in half space, 10 in full space," if self.hidden is None else self.hidden
        return f"hidden={factor} of [{hidden}], {space}, output={self.output} of {output}, {kernel}, {distance}"


def _nothing(anchor: Tensor) -> Tensor:
    return torch.zeros((), device=anchor.device)


def _mirrored(population: Population, half_space: bool | tuple[str, ...] | list[str] | None) -> frozenset[str]:
    """The names of the hidden layers in half space."""
    hidden = [layer.name for layer in population.hidden]
    outputs = [layer.name for layer in population.outputs]
    if half_space is None or isinstance(half_space, bool):
        if half_space and not hidden:
            raise ValueError(
                f"half_space must be False here: the only layer, {outputs[0] or 'the model itself'!r}, is the output "
                "layer, whose energy is always that of the full space (output_layer=None makes it a hidden one)"
            )
        return frozenset(() if half_space is False else hidden)
    accepted = f"None, a bool or a list of some of the hidden layers {', '.join(hidden)}"
    require(isinstance(half_space, (tuple, list)), "half_space", accepted, half_space)
    for name in half_space:
        if name in outputs:
            raise ValueError(f"half_space must not name the output layer {name!r}: opposite classes are far apart")
    unknown = [name for name in half_space if name not in hidden]
    require(not unknown, "half_space", accepted, unknown)
    return frozenset(half_space)
