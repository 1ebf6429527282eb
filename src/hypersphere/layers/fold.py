"""Replace decoupled layers by layers of torch with the same response, where an equivalent layer exists."""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere.layers._attention import DecoupledMultiheadAttention
from hypersphere.layers._operator import inner_product_filters, is_inner_product
from hypersphere.layers.convert import layers_to_revert, revert_
from hypersphere.layers.decoupled import DecoupledLayer

__all__ = ["equivalent_weight", "fold_operator_"]


def fold_operator_(model: nn.Module) -> int:
    """Replace all decoupled layers by those of torch in place if each is an inner product; return their number, or 0.

    The responses of `inner_product`, and of `linear` with or without weighting, with the cosine, are inner products.
    All others depend on the norm of each patch, which a layer of torch does not compute.

    Raises:
        ValueError: each layer is an inner product, but one is parametrised, or shares its weight with a layer that
            needs another one after folding. The model is unchanged.
    """
    weights = {module: equivalent_weight(module) for module in model.modules() if isinstance(module, DecoupledLayer)}
    if not weights or any(weight is None for weight in weights.values()):
        return 0
    folded = cast(dict[nn.Module, Tensor], weights)
    # Both raise their errors before the first weight changes.
    layers_to_revert(model)
    _require_consistent_ties(model, folded)
    for module, weight in folded.items():
        with torch.no_grad():
            cast(Tensor, module.weight).copy_(weight)
    revert_(model)
    return len(weights)


def _require_consistent_ties(model: nn.Module, folded: dict[nn.Module, Tensor]) -> None:
    """Raise a `ValueError` if layers share a parameter of which they need different values after folding."""

    def value_after_folding(module: nn.Module, name: str, parameter: Tensor) -> Tensor:
        if isinstance(module, DecoupledMultiheadAttention):
            for projection in module.projections.values():
                part = projection._part
                if part.parameter == name:
                    parameter = part.with_rows(parameter, folded[projection])
            return parameter
        return folded[module] if name == "weight" and module in folded else parameter

    # Parameters are shared if they are the same object, or different objects with the same memory.
    users: dict[tuple[int, ...], list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault((parameter.data_ptr(), *parameter.shape), []).append((path, module, name))
    for first, *others in users.values():
        for other in others:
            values = [
                value_after_folding(module, name, cast(Tensor, module._parameters[name]).detach())
                for _, module, name in (first, other)
            ]
            if not torch.equal(*values):
                raise ValueError(
                    f"layer {first[0]!r} must not share its weight, but it shares it with {other[0]!r}, "
                    "and folding would change the output of one of them"
                )


def equivalent_weight(layer: DecoupledLayer) -> Float[Tensor, "..."] | None:
    """Return the weight of the layer of torch with the same response, or None if there is no such layer.

    >>> from hypersphere.layers import DecoupledLinear
    >>> layer = DecoupledLinear(2, 1, magnitude="linear")
    >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> equivalent_weight(layer), equivalent_weight(DecoupledLinear(2, 1, magnitude="tanh"))
    (tensor([[0.6000, 0.8000]]), None)
    """
    if not is_inner_product(layer.magnitude, layer.angular):
        return None
    filters = inner_product_filters(layer.magnitude, layer.weighting, layer._filters)
    return layer._in_order_of_weight(filters.detach()).to(layer.weight.dtype)
