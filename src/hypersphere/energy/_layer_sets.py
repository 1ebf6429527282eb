"""The layers of a regulariser: select them, look up options by their names, and stack those of equal shape."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import dropwhile
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import _numerics
from hypersphere._layer_selection import LayerSelection, LayerSource, NeuronLayer, layers_of
from hypersphere._validation import require, warn_user
from hypersphere.functions.orthogonal import ORTHOGONALS

__all__ = ["place_on_layer", "require_complete_output", "resolve_patterns", "select_layers", "stack_equal_shapes"]

T = TypeVar("T")

_LEFT_OUT = {
    "output": "the output layer, which is left out by default",
    "embedding": "an embedding, which is only regularised on request",
}


def select_layers(
    model: LayerSource,
    output_layer: str | Sequence[str] | None,
    where: Callable[[str, nn.Module], bool] | None,
    roles: Sequence[str],
    min_length: int,
) -> LayerSelection:
    """Return the layers of some roles whose neurons can be compared: two per set, of at least `min_length` numbers.

    Raises:
        ValueError: there is no such layer.
    """

    def reason_to_skip(layer: NeuronLayer) -> str | None:
        if layer.role not in roles:
            return _LEFT_OUT[layer.role]
        if layer.shape[1] < 2:
            return "one neuron per set"
        return f"neurons of {layer.length} number" if layer.length < min_length else None

    if output_layer == "last":
        warn_user("output_layer='last' is deprecated, use 'auto' instead", DeprecationWarning)
        output_layer = "auto"
    candidates = layers_of(model, output=output_layer, where=where, output_argument="output_layer")
    candidates.warn_if_output_is_unknown()
    selection = candidates.without(reason_to_skip)
    if len(selection) == 0:
        reasons = "; ".join(f"{skip.name}: {skip.reason}" for skip in selection.skipped)
        reason = f"every layer is skipped ({reasons})" if reasons else "it has no layers"
        raise ValueError(f"model must have a layer of two or more neurons, but {reason}")
    rotated = [layer.name for layer in selection if _has_fixed_angles(layer)]
    if rotated:
        reason = "rotations do not change the angles between neurons"
        warn_user(f"{reason}, so the regulariser is constant in {', '.join(rotated)}")
    return selection


def require_complete_output(selection: LayerSelection, output: float) -> None:
    """Raise a `ValueError` if the output layer is regularised but no process holds all of its class vectors."""
    distributed = [repr(skip.name) for skip in selection.skipped if skip.is_distributed]
    zero = False if isinstance(output, bool) else 0
    accepted = f"{zero} with {', '.join(distributed)}, whose class vectors are distributed over processes"
    require(not output or not distributed, "output", accepted, output)


def _has_fixed_angles(layer: NeuronLayer) -> bool:
    """Return True if the weight is W = V·Rᵀ with a frozen V and a rotation R, which changes no angle between rows."""
    if layer.module is None or not parametrize.is_parametrized(layer.module, layer.parameter):
        return False
    rotations = tuple(entry for name, entry in ORTHOGONALS.items() if name != "free")
    parametrizations = cast(nn.ModuleList, layer.module.parametrizations[layer.parameter])  # type: ignore[index]
    # A quantised V is stored as integers and scales, which a first parametrisation without parameters multiplies.
    originals = [p for name, p in parametrizations.named_parameters(recurse=False) if name.startswith("original")]
    maps = list(dropwhile(lambda one: next(one.parameters(), None) is None, parametrizations))
    is_frozen = not any(original.requires_grad for original in originals)
    return is_frozen and bool(maps) and all(isinstance(getattr(one, "method", None), rotations) for one in maps)


def resolve_patterns(argument: str, patterns: Mapping[str, T] | None, layers: Iterable[NeuronLayer]) -> dict[str, T]:
    """Return the values of a mapping from names or patterns (as in `fnmatch`) per layer; the first match counts.

    Raises:
        ValueError: a pattern matches no layer.
    """
    resolved: dict[str, T] = {}
    names = [layer.name for layer in layers]
    require(patterns is None or isinstance(patterns, Mapping), argument, "None or a mapping from names", patterns)
    for pattern, value in (patterns or {}).items():
        matches = [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
        accepted = f"a mapping whose names or patterns match some of {', '.join(map(repr, names))}"
        require(bool(matches), argument, accepted, pattern)
        for name in matches:
            resolved.setdefault(name, value)  # the first match counts
    return resolved


def stack_equal_shapes(sets: Iterable[tuple[Tensor, float]]) -> list[tuple[Tensor, Tensor]]:
    """Stack tensors of equal shape, so that one batched product computes all of them.

    Args:
        sets: tensors with a factor each.

    Returns:
        Stacks (L, …) with the factors (L,) of their members.

    Example:
        >>> [tuple(s.shape) for s, _ in stack_equal_shapes([(torch.ones(2, 3), 1), (torch.ones(4, 3), 1)])]
        [(1, 2, 3), (1, 4, 3)]
    """
    by_shape: dict[tuple[object, ...], list[tuple[Tensor, float]]] = {}
    for tensor, factor in sets:
        # `torch.stack` needs equal dtypes and devices too.
        by_shape.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append((tensor, factor))
    stacks = []
    for members in by_shape.values():
        tensors, factors = zip(*members, strict=True)
        stack = torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
        stacks.append((stack, torch.tensor(factors, dtype=stack.dtype, device=stack.device)))
    return stacks


def place_on_layer(x: Tensor, layer: NeuronLayer) -> Tensor:
    """Return `x` on the device of a layer and in the dtype of its rows; on the meta device it stays as it is."""
    anchor = layer.anchor.detach()
    return x if anchor.is_meta else x.to(anchor.device, _numerics.widen(anchor[:0]).dtype)
