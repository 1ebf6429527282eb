"""Where neurons live: the rows of linear layers, the filters of convolutions, the class vectors of heads."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hypersphere import sphere
from hypersphere.functions.menu import require

__all__ = ["Neurons", "Population", "Source", "find_neurons", "stack_equal_shapes"]

Source = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Neurons:
    """The neurons of one layer, read anew at every call, so that moves, copies and parametrisations are seen.

    Filters of different groups look at different channels and are kept in different sets.
    """

    name: str
    source: nn.Module | Tensor
    groups: int = 1
    transposed: bool = False

    @property
    def weight(self) -> Tensor:
        """The layer's tensor as it is now."""
        return self.source if isinstance(self.source, Tensor) else self.source.weight  # type: ignore[return-value]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sets, neurons in a set, channels and taps of a neuron."""
        first, second, *kernel = self.weight.shape
        taps = math.prod(kernel)
        if self.transposed:
            return self.groups, second, first // self.groups, taps
        return self.groups, first // self.groups, second, taps

    def rows(self) -> Tensor:
        """Return the neurons as (sets, N, d), in float32 or wider."""
        sets, n, channels, taps = self.shape
        w = sphere.widen(self.weight)
        if self.transposed:
            w = w.reshape(sets, channels, n, taps).transpose(1, 2)
        return w.reshape(sets, n, channels * taps)


@dataclass(frozen=True, eq=False)
class Population:
    """The layers of a network: hidden ones, the output or None, and the names of those with one neuron."""

    hidden: tuple[Neurons, ...]
    output: Neurons | None
    skipped: tuple[str, ...]

    @property
    def layers(self) -> tuple[Neurons, ...]:
        """Hidden layers, then the output."""
        return self.hidden if self.output is None else (*self.hidden, self.output)

    def require_finite(self, value: Tensor) -> None:
        """Blame the first layer with a NaN or an infinity, if that is what made `value` one."""
        if sphere.inspectable(value) and not math.isfinite(value.detach().item()):
            for layer in self.layers:
                sphere.require_finite_rows(f"weight of {layer.name}", layer.weight.detach())


def find_neurons(
    source: Source, *, output: str | None = "last", where: Callable[[str, nn.Module], bool] | None = None
) -> Population:
    """Find the layers of a model, or take named tensors whose first dimension counts neurons.

    Args:
        source: a module, a mapping of names to tensors, or pairs of them (such as `model.named_parameters()`).
        output: which layer is the output: "last" (a head if there is one, else the last layer of a model; none of named
            tensors), the name of a layer, or None.
        where: which of a model's layers to take, by name and module; all by default.

    Example:
        >>> found = find_neurons(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 10)))
        >>> [layer.name for layer in found.hidden], found.output.name
        (['0'], '2')
    """
    heads: list[Neurons] = []
    if isinstance(source, nn.Module):
        found, heads = _of_module(source, where)
    else:
        pairs = source.items() if isinstance(source, Mapping) else source
        found = [Neurons(name, tensor) for name, tensor in pairs]
        for layer in found:
            rows = isinstance(layer.source, Tensor) and layer.source.ndim >= 2 and layer.source.is_floating_point()
            require(rows, layer.name, "a floating-point tensor (N, ...) of neurons", type(layer.source).__name__)
    require(bool(found), "model", "a module with linear, convolution or head layers, or named tensors", "without any")
    chosen: Neurons | None = None
    if output == "last":
        chosen = heads[-1] if heads else found[-1] if isinstance(source, nn.Module) else None
    elif output is not None:
        by_name = {layer.name: layer for layer in found}
        require(output in by_name, "output_layer", f"None, 'last' or one of {', '.join(map(repr, by_name))}", output)
        chosen = by_name[output]
    alone = [layer for layer in found if layer.shape[1] < 2]
    if alone:
        names = ", ".join(layer.name or "the model itself" for layer in alone)
        warnings.warn(f"left out, with one neuron to a set: {names}", stacklevel=3)
    kept = [layer for layer in found if layer not in alone]
    require(bool(kept), "model", "a module with a layer of two neurons or more", "without any")
    return Population(
        tuple(layer for layer in kept if layer is not chosen),
        chosen if chosen in kept else None,
        tuple(layer.name for layer in alone),
    )


def _of_module(model: nn.Module, where: Callable[[str, nn.Module], bool] | None) -> tuple[list[Neurons], list[Neurons]]:
    """All layers and those of them that are heads; a tensor that several layers share counts once."""
    found, heads, seen = [], [], set()
    for name, module in model.named_modules():
        linear = hasattr(module, "in_features")
        if not (linear or hasattr(module, "kernel_size")) or (where is not None and not where(name, module)):
            continue
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            continue
        uninitialised = nn.parameter.is_lazy(weight)
        require(not uninitialised, f"weight of {name}", "initialised (run a batch first)", "lazy")
        if weight.ndim < (2 if linear else 3):
            continue
        own = module._parameters.get("weight")
        if own is not None and id(own) in seen:
            continue
        seen.add(id(own))
        layer = Neurons(name, module, getattr(module, "groups", 1), getattr(module, "transposed", False))
        found.append(layer)
        if hasattr(module, "num_classes"):
            heads.append(layer)
    return found, heads


def stack_equal_shapes(sets: Iterable[Tensor]) -> list[Tensor]:
    """Stack tensors of equal shape, so that one batched product serves them all.

    >>> [tuple(s.shape) for s in stack_equal_shapes([torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 3)])]
    [(2, 2, 3), (1, 4, 3)]
    """
    by_shape: dict[tuple[object, ...], list[Tensor]] = {}
    for tensor in sets:
        by_shape.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(tensor)
    return [torch.stack(equal) if len(equal) > 1 else equal[0].unsqueeze(0) for equal in by_shape.values()]
