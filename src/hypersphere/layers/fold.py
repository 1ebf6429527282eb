"""Replace decoupled layers by layers of torch with the same response, where an equivalent layer exists."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere.layers._operator import inner_product_filters, is_inner_product
from hypersphere.layers.convert import layers_to_revert, revert_
from hypersphere.layers.decoupled import DecoupledLayer

__all__ = ["equivalent_weight", "fold_operator_"]


def fold_operator_(model: nn.Module) -> int:
    """Replace all decoupled layers by those of torch in place if each is an inner product; return their number, or 0.

    The responses of `inner_product`, and of `linear` with or without weighting, with the cosine, are inner products.
    All others depend on the norm of each patch, which a layer of torch does not compute.

    Raises:
        ValueError: each layer is an inner product, but one is parametrised. The model is unchanged.
    """
    weights = {module: equivalent_weight(module) for module in model.modules() if isinstance(module, DecoupledLayer)}
    if not weights or any(weight is None for weight in weights.values()):
        return 0
    layers_to_revert(model)  # raises the errors of `revert_` before the first weight changes
    for module, weight in weights.items():
        assert weight is not None
        with torch.no_grad():
            module.weight.copy_(weight)
    revert_(model)
    return len(weights)


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
