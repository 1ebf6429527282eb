"""Which parameters weight decay is for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from hypersphere._validation import is_number, require

__all__ = ["param_groups"]

_NORMALIZATIONS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


def param_groups(
    model: nn.Module | Sequence[nn.Module], weight_decay: float, *, bias: bool = False, normalization: bool = False
) -> list[dict[str, Any]]:
    """Split the trained parameters into two groups for an optimiser: with weight decay, and without.

    A module says which of its own parameters decay would harm by an attribute `decay_free_parameters`, a tuple of their
    names: the parameters of a rotation, whose decay pulls it to the identity or makes it no rotation at all, or class
    vectors of which only the direction counts.

    Args:
        model: any module, or several, such as a network and its head;
            parameters that are not trained are left out, shared ones are listed once.
        weight_decay: of the first group; that of the second is 0.
        bias: whether biases decay too.
        normalization: whether the parameters of batch, layer, group and instance normalisation decay too.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> [len(group["params"]) for group in param_groups(model, 5e-4)]
        [2, 4]
    """
    require(is_number(weight_decay, 0), "weight_decay", "a number >= 0", weight_decay)
    if not isinstance(model, nn.Module):
        modules = list(model) if isinstance(model, Iterable) else []
        fits = bool(modules) and all(isinstance(one, nn.Module) for one in modules)
        require(fits, "model", "a module or a list of modules", model)
        model = nn.ModuleList(modules)
    spared: set[int] = set()
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        free = set(getattr(module, "decay_free_parameters", ()))
        spared |= {
            id(p) for name, p in module.named_parameters() if name in free
        }  # a parametrised one has another name
        if not normalization and isinstance(module, _NORMALIZATIONS):
            spared |= {id(p) for p in own.values()}
        if not bias and own.get("bias") is not None:
            spared.add(id(own["bias"]))
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if id(p) not in spared], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in spared], "weight_decay": 0.0},
    ]
