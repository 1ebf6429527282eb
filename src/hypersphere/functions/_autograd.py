"""Parts of autograd functions that compute gradients in their forward pass and can be differentiated twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hypersphere import _numerics

__all__ = ["differentiable_gradients", "inner_graph", "only_reverse_mode"]


@contextlib.contextmanager
def inner_graph() -> Iterator[None]:
    """Record a graph that is differentiated before the forward pass ends.

    Its tensors bypass the hooks of activation checkpointing, which would repeat the forward pass to restore them.
    """
    plain = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch.enable_grad(), plain if _numerics.values_readable() else contextlib.nullcontext():
        yield


def differentiable_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], needs: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients of `function(*inputs)` as differentiable functions of the inputs and of `grad`."""
    with torch.enable_grad():
        # Views separate the inputs from their history: a gradient with respect to one input must not include a path
        # through another input that was computed from it.
        views = [x.view_as(x) for x in inputs]
        output = function(*views)
        selected = [view for view, needed in zip(views, needs, strict=True) if needed]
        grads = iter(torch.autograd.grad(output, selected, grad, create_graph=True, materialize_grads=True))
    return [next(grads) if needed else None for needed in needs]


def only_reverse_mode(*tensors: Tensor) -> bool:
    """Return True in eager mode, where values can be read, if no tensor has a tangent of forward-mode differentiation.

    Only then may an autograd function replace ordinary operations.
    """
    if not _numerics.values_readable(*tensors):
        return False
    return all(forward_ad.unpack_dual(x).tangent is None for x in tensors)
