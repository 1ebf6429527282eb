r"""The operator y = h·g(c), c = ⟨ŵ, x⟩/‖x‖, and its gradients, a few samples at a time.

A block of samples goes through the product and all that follows while it is in the cache, and backward likewise through
the gradients of the product, so that nothing of the size of the output is made but the output itself and 16 bits a
number for backward. (Large memory that is asked for anew costs more than what is computed in it.) Of h backward takes
dh/d‖x‖, so that ‖x‖ needs no graph of its own:

.. math:: ∂x = \text{conv}^T(G h g'/\|x\|) + x·\text{box}^T\big((Σ G g)\,h' − (Σ G h g' c)/\|x\|\big)/\|x\|

with sums over the filters of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere.layers.by_hand import blocks, pieces
from hypersphere.layers.response import Response
from hypersphere.layers.walk import Walk

__all__ = ["backward", "forward", "kept_type"]

PRODUCT = 2**19  # responses of a block that goes through the product together
PIECE = 2**18  # and of one that goes through the response


def kept_type(wide: torch.dtype) -> torch.dtype:
    """The type of what is kept for backward, of numbers computed in `wide`."""
    return wide if wide == torch.float64 else torch.float16


def forward(
    x: Tensor,
    weight: Tensor,
    magnitude: Tensor | None,
    reciprocal: Tensor,
    walk: Walk,
    response: Response,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return y (N, filters, …), no view of another, and what the response keeps of the cosines, in the same shape."""
    split, each, wide = (walk.groups, -1), _each(weight, reciprocal), reciprocal.dtype
    y = kept = None
    for part in _blocks(weight, each, x):
        product = walk.product(x[part], weight)
        if y is None:
            whole = len(product) == len(x) and not product._is_view()
            y = product if whole else _like(product, len(x), product.dtype)
            kept = _like(product, len(x), kept_type(wide)) if keep else None
        for p, r, h, out, code in pieces(
            PIECE,
            each,
            product.unflatten(1, split),
            reciprocal[part],
            None if magnitude is None else magnitude[part],
            y[part].unflatten(1, split),
            None if kept is None else kept[part].unflatten(1, split),
        ):
            c = torch.mul(p, r, out=out) if out.dtype == wide else p.to(wide).mul_(r)
            response.forward_(c, code)
            if h is not None:
                c.mul_(h)
            if c is not out:
                out.copy_(_numerics.narrow(c, out.dtype))
    assert y is not None
    return y, kept


def backward(
    gradient: Tensor,
    kept: Tensor | None,
    x: Tensor,
    weight: Tensor,
    magnitude: Tensor | None,
    scale: Tensor,
    reciprocal: Tensor,
    slope: Tensor | None,
    walk: Walk,
    response: Response,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x and weight, as far as wanted, and that of the magnitude, if there is one."""
    split, each, wide = (walk.groups, -1), _each(weight, reciprocal), reciprocal.dtype
    to_x = to_weight = None
    to_magnitude = None if magnitude is None else torch.empty_like(magnitude)
    for part in _blocks(weight, each, x):
        r, h = reciprocal[part], None if magnitude is None else magnitude[part]
        factor = r if h is None else r * h
        outgoing = torch.empty_like(gradient[part], dtype=wide)
        sums: list[tuple[Tensor, Tensor | None]] = []
        for g, f, m, out, code in pieces(
            PIECE,
            each,
            gradient[part].unflatten(1, split),
            factor,
            h,
            outgoing.unflatten(1, split),
            None if kept is None else kept[part].unflatten(1, split),
        ):
            if code is None:  # the cosine, of which the filters alone learn
                torch.mul(g, f, out=out)
            else:
                sums.append(response.backward(code, _numerics.widen(g), f, m, out))
        if to_magnitude is not None and sums:
            torch.cat([v for _, v in sums if v is not None], out=to_magnitude[part])
        of_x, of_weight = walk.product_gradients(outgoing.to(x.dtype), x[part], weight, wanted)
        if of_weight is not None:
            to_weight = of_weight.to(wide) if to_weight is None else to_weight.add_(of_weight)
        if of_x is not None:
            shares = torch.cat([a for a, _ in sums]).mul_(-factor)
            if to_magnitude is not None and slope is not None:
                shares.addcmul_(to_magnitude[part], slope[part])
            shares.mul_(r / scale[part].unsqueeze(1))
            if to_x is None:
                to_x = of_x if len(of_x) == len(x) else torch.empty_like(x)
            torch.addcmul(
                of_x.unflatten(1, split),
                (x[part] * scale[part]).unflatten(1, split),  # in two steps, because its square may leave the type
                walk.window_spread(shares.squeeze(2), x.shape[2:]).unsqueeze(2),
                out=to_x[part].unflatten(1, split),
            )
    return to_x, to_weight, to_magnitude


def _blocks(weight: Tensor, each: int, x: Tensor) -> list[slice]:
    """Blocks for the product: large beside the filters, which each of them reads anew."""
    return blocks(max(PRODUCT, 4 * weight.numel()), each, x)


def _each(weight: Tensor, reciprocal: Tensor) -> int:
    """How many responses a sample has."""
    return reciprocal[:1].numel() * len(weight) // reciprocal.shape[1]


def _like(product: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """An empty tensor of that many samples in the memory format of `product`."""
    strides = (product[:1].numel(), *product.stride()[1:])
    return torch.empty_strided((length, *product.shape[1:]), strides, dtype=dtype, device=product.device)
