"""Which layers of a model can be rotated, and which of them are its output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import _numerics
from hypersphere._validation import require
from hypersphere.rotation.inputs import InputRotation

__all__ = ["Where", "neurons_of", "owners_of", "select"]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Where = Callable[[str, nn.Module], bool]


def select(model: nn.Module, where: Where | None = None, *, output: bool = False) -> list[tuple[str, nn.Module]]:
    """Return the layers that `rotate_` would rotate, by name: the output layer only if asked for, see there.

    >>> [name for name, _ in select(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm([2, 3]), nn.Linear(3, 2)))]
    ['0']
    """
    require(isinstance(model, nn.Module), "model", "a module", type(model).__name__)
    require(where is None or callable(where), "where", "None or a callable of name and module", where)
    named = [(n, m) for n, m in model.named_modules() if ".parametrizations." not in f".{n}."]
    found = [(name, module) for name, module in named if _has_neurons(module)]
    for name, module in named:
        if _is_transposed(module) and (where is None or where(name, module)):
            kind = type(module).__name__
            raise ValueError(f"layer {name!r} ({kind}) holds its weight as (in, out): leave it out by `where`")
    last = _outputs(named)
    if where is None:
        found = [(name, module) for name, module in found if output or name not in last]
    else:
        found = [(name, module) for name, module in found if where(name, module)]
        asked = [name for name, _ in found if name in last]
        if asked and not output:
            raise ValueError(f"where selects the output layer {asked[0]!r}; pass output=True to rotate it all the same")
    owners = owners_of(model)
    shared = [name for name, module in found if owners[id(module._parameters.get("weight"))] > 1]
    if shared:
        raise ValueError(f"layer {shared[0]!r} must have a weight of its own, but it shares it with another layer")
    if not found:
        raise ValueError("where must select at least one layer with neurons (the output layer counts if output=True)")
    return found


def neurons_of(name: str, layer: nn.Module) -> Tensor:
    """Return the weight of a layer that can be rotated, or raise an error that says why it cannot."""
    if parametrize.is_parametrized(layer, "weight"):
        by = type(layer.parametrizations.weight[0]).__name__  # type: ignore[union-attr,index]
        raise ValueError(f"layer {name!r} must have a plain weight, but it is parametrised already (by {by})")
    weight = layer.weight
    assert isinstance(weight, Tensor)
    _numerics.require_finite_rows(f"the weight of layer {name!r}", weight)
    return weight


def _outputs(named: list[tuple[str, nn.Module]]) -> set[str]:
    """The names of what counts as output: all heads, and the layer that is registered last."""
    inner = [(name, module) for name, module in named if name and _has_neurons(module)]
    turned = [name for name, module in named if name and isinstance(module, InputRotation)]
    last = [name for name, module in named if name and (_has_neurons(module) or isinstance(module, InputRotation))][-1:]
    heads = [name for name, module in inner if hasattr(module, "num_classes")]
    return {*heads, *last, *(name for name, _ in inner if any(name.startswith(f"{t}.") for t in turned))}


def owners_of(model: nn.Module) -> Counter[int]:
    """How many modules hold each parameter, by identity."""
    return Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)


def _has_neurons(module: nn.Module) -> bool:
    """Whether the rows of `weight` are neurons: Linear, ConvNd, heads, and others' linear layers of shape (out, in)."""
    if parametrize.is_parametrized(module, "weight"):
        return isinstance(module, _LAYERS) or hasattr(module, "num_classes") or hasattr(module, "out_features")
    weight = module._parameters.get("weight")
    if weight is None or nn.parameter.is_lazy(weight) or weight.ndim < 2 or not weight.is_floating_point():
        return False
    if isinstance(module, _LAYERS) or hasattr(module, "num_classes"):
        return True
    sides = getattr(module, "out_features", None), getattr(module, "in_features", None)
    return tuple(weight.shape) == sides


def _is_transposed(module: nn.Module) -> bool:
    """Whether this is a linear layer with its neurons as columns, such as the Conv1D of transformers."""
    weight = module._parameters.get("weight")
    return weight is not None and tuple(weight.shape) == (getattr(module, "nx", None), getattr(module, "nf", None))
