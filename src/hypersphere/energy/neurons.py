"""Where neurons live: the rows of linear layers, the filters of convolutions, the class vectors of heads."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import _numerics
from hypersphere._modes import evaluation_mode
from hypersphere._validation import require

__all__ = ["Neurons", "Population", "Source", "find_neurons", "stack_equal_shapes"]

Source = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Neurons:
    """The neurons of one layer, read anew at every call, so that moves, copies and parametrisations are seen.

    Filters of different groups look at different channels and are kept in different sets. `shape` has sets, neurons in
    a set, channels and taps of a neuron; it is found once, from `size` or a look at the weight.
    """

    name: str
    source: nn.Module | Tensor
    groups: int = 1
    transposed: bool = False
    size: tuple[int, ...] | None = None
    shape: tuple[int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Find the shape."""
        size = self.size
        if size is None:
            look = self.source if isinstance(self.source, Tensor) else _look(self.source)
            assert look is not None
            size = look.shape
        first, second, *kernel = size
        n, channels = (second, first // self.groups) if self.transposed else (first // self.groups, second)
        object.__setattr__(self, "shape", (self.groups, n, channels, math.prod(kernel)))

    @property
    def weight(self) -> Tensor:
        """The layer's tensor as it is now; a parametrisation is evaluated."""
        return self.source if isinstance(self.source, Tensor) else self.source.weight  # type: ignore[return-value]

    @property
    def anchor(self) -> Tensor:
        """A tensor of the layer that tells device and type; no parametrisation is evaluated."""
        if isinstance(self.source, Tensor):
            return self.source
        own = self.source._parameters.get("weight")
        own = next(self.source.parameters(), None) if own is None else own
        return self.weight if own is None else own

    @property
    def length(self) -> int:
        """How many numbers a neuron has."""
        return self.shape[2] * self.shape[3]

    def rows(self) -> Tensor:
        """Return the neurons as (sets, N, d), in float32 or wider."""
        sets, n, channels, taps = self.shape
        w = _numerics.widen_parameter(self.weight)
        if self.transposed:
            w = w.reshape(sets, channels, n, taps).transpose(1, 2)
        return w.reshape(sets, n, channels * taps)

    def placed(self, x: Tensor) -> Tensor:
        """Return `x` on the layer's device and in the type of its rows; on meta as it is."""
        anchor = self.anchor.detach()
        return x if anchor.is_meta else x.to(anchor.device, _numerics.widen(anchor[:0]).dtype)


def _look(module: nn.Module) -> Tensor | None:
    """The weight of a module; one that is parametrised is evaluated as in evaluation, which leaves no trace."""
    if not parametrize.is_parametrized(module, "weight"):
        return getattr(module, "weight", None)
    with evaluation_mode(module.parametrizations["weight"]):  # type: ignore[index]
        return cast(Tensor, module.weight)


@dataclass(frozen=True, eq=False)
class Population:
    """The layers of a network: hidden ones, outputs, and the names of those left out."""

    hidden: tuple[Neurons, ...]
    outputs: tuple[Neurons, ...]
    skipped: tuple[str, ...]

    @property
    def output(self) -> Neurons | None:
        """The last output, or None."""
        return self.outputs[-1] if self.outputs else None

    @property
    def layers(self) -> tuple[Neurons, ...]:
        """Hidden layers, then outputs."""
        return *self.hidden, *self.outputs

    def require_finite(self, value: Tensor) -> None:
        """Blame the first layer with a NaN or an infinity if `value` is one, or the size of what is finite."""
        if _numerics.values_readable(value) and not math.isfinite(value.detach().item()):
            for layer in self.layers:
                _numerics.require_finite_rows(f"weight of {layer.name}", layer.weight.detach())
            largest = max(self.layers, key=lambda layer: float(layer.weight.detach().abs().amax()))
            reason = f"though all weights are finite: those of {largest.name} are too large"
            raise ValueError(f"the regulariser must be finite, but is {value.item()} {reason}")


def find_neurons(
    source: Source,
    *,
    output: str | None = "last",
    where: Callable[[str, nn.Module], bool] | None = None,
    shortest: int = 1,
) -> Population:
    """Find the layers of a model, or take named tensors whose first dimension counts neurons.

    Args:
        source: a module, a mapping of names to tensors, or pairs of them (such as `model.named_parameters()`).
        output: which layer is the output: "last" (the heads if there are any, else the last layer of a model; none of
            named tensors), the name of a layer (beside the heads), or None for none at all.
        where: which of a model's layers to take, by name and module; all by default.
        shortest: neurons of fewer numbers are left out.

    Example:
        >>> found = find_neurons(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 10)))
        >>> [layer.name for layer in found.hidden], found.output.name
        (['0'], '2')
    """
    found, heads = _of_module(source, where) if isinstance(source, nn.Module) else (_of_tensors(source), [])
    require(bool(found), "model", "a module with linear, convolution or head layers, or named tensors", "without any")
    outputs = [] if output is None else list(heads)
    if output == "last":
        outputs = outputs or (found[-1:] if isinstance(source, nn.Module) else [])
    elif output is not None:
        by_name = {layer.name: layer for layer in found}
        accepted = f"None, 'last' or one of {', '.join(map(repr, by_name))}"
        require(isinstance(output, str) and output in by_name, "output_layer", accepted, output)
        outputs += [by_name[output]] if by_name[output] not in outputs else []
    alone = [layer for layer in found if layer.shape[1] < 2]
    short = [layer for layer in found if layer.length < shortest and layer not in alone]
    for left_out, why in ((alone, "one neuron to a set"), (short, "neurons of one number")):
        if left_out:
            names = ", ".join(layer.name or "the model itself" for layer in left_out)
            warnings.warn(f"left out, with {why}: {names}", stacklevel=3)
    kept = [layer for layer in found if layer not in alone and layer not in short]
    require(bool(kept), "model", "a module with a layer of two neurons or more", "without any")
    return Population(
        tuple(layer for layer in kept if layer not in outputs),
        tuple(layer for layer in outputs if layer in kept),
        tuple(layer.name for layer in (*alone, *short)),
    )


def _of_tensors(source: object) -> list[Neurons]:
    """Named tensors as layers."""
    accepted = "a module, a mapping of names to tensors, or pairs of both"
    listed = isinstance(source, Iterable) and not isinstance(source, (str, bytes, Tensor))
    require(listed, "model", accepted, source if isinstance(source, str) else type(source).__name__)
    pairs = list(source.items() if isinstance(source, Mapping) else cast(Iterable[object], source))
    found, names = [], set()
    for pair in pairs:
        named = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
        require(named, "model", accepted, f"with {type(pair).__name__}")
        name, tensor = cast(tuple[str, Tensor], pair)
        rows = isinstance(tensor, Tensor) and tensor.ndim >= 2 and tensor.is_floating_point()
        require(rows, name, "a floating-point tensor (N, ...) of neurons", type(tensor).__name__)
        require(name not in names, "model", "pairs with different names", f"with {name!r} twice")
        names.add(name)
        found.append(Neurons(name, tensor))
    return found


def _of_module(model: nn.Module, where: Callable[[str, nn.Module], bool] | None) -> tuple[list[Neurons], list[Neurons]]:
    """All layers and those of them that are heads; a tensor of several modules counts once, for one that owns it."""
    with parametrize.cached():
        seen = [
            (name, module, weight)
            for name, module in model.named_modules()
            if not {"lora_A", "lora_B"} & set(name.split(".")) and (where is None or where(name, module))
            if (weight := _layer_weight(name, module)) is not None
        ]
    heads = {id(weight) for _, module, weight in seen if hasattr(module, "num_classes")}
    owners: dict[int, Neurons] = {}
    for forwarded in (False, True):
        for name, module, weight in seen:
            groups, transposed = getattr(module, "groups", 1), getattr(module, "transposed", False)
            if _is_forwarded(module) == forwarded and id(weight) not in owners:
                owners[id(weight)] = Neurons(name, module, groups, transposed, tuple(weight.shape))
    found = list(dict.fromkeys(owners[id(weight)] for _, _, weight in seen))
    return found, [layer for layer in found if any(owners.get(key) is layer for key in heads)]


def _layer_weight(name: str, module: nn.Module) -> Tensor | None:
    """The weight of a linear, convolution or head layer, None of another module."""
    linear = hasattr(module, "in_features")
    weight = _look(module) if linear or hasattr(module, "kernel_size") else None
    if not isinstance(weight, Tensor):
        return None
    require(not nn.parameter.is_lazy(weight), f"weight of {name}", "initialised (run a batch first)", "lazy")
    spread = getattr(getattr(module, "processes", None), "size", 1)
    together = "a head whose class vectors are all in one process (of a sharded one, its own energy_weight serves)"
    require(spread == 1, name or "model", together, f"spread over {spread}")
    return weight if weight.ndim >= (2 if linear else 3) else None


def _is_forwarded(module: nn.Module) -> bool:
    """Whether the weight is a property that may be another module's, as of wrappers."""
    own = parametrize.is_parametrized(module, "weight")
    return not own and isinstance(getattr(type(module), "weight", None), property)


def stack_equal_shapes(sets: Iterable[Tensor]) -> list[Tensor]:
    """Stack tensors of equal shape, so that one batched product serves them all.

    >>> [tuple(s.shape) for s in stack_equal_shapes([torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 3)])]
    [(2, 2, 3), (1, 4, 3)]
    """
    by_shape: dict[tuple[object, ...], list[Tensor]] = {}
    for tensor in sets:
        by_shape.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(tensor)
    return [torch.stack(equal) if len(equal) > 1 else equal[0].unsqueeze(0) for equal in by_shape.values()]
