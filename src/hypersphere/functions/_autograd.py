"""Gradients inside a forward pass, and second derivatives of explicit backward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hypersphere import _numerics

__all__ = ["differentiable_gradients", "inner_graph"]


@contextlib.contextmanager
def inner_graph() -> Iterator[None]:
    """Record a graph that is differentiated before the forward pass ends.

    Its tensors bypass the hooks of activation checkpointing, which would repeat the forward pass to restore them.
    """
    plain = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch.enable_grad(), plain if _numerics.values_readable() else contextlib.nullcontext():
        yield


def differentiable_gradients(
    function: Callable[..., Any], inputs: Sequence[Tensor | None], needs: Sequence[bool], *grads: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of `function(*inputs)` as differentiable functions of the inputs and of `grads`.

    Args:
        function: the same values as the forward pass in ordinary operations: a tensor, or several tensors or None.
        inputs: its arguments. One that is None has no gradient.
        needs: which inputs need a gradient.
        grads: the gradient of each output, None for an output that is not used.
    """
    with torch.enable_grad():
        # Views separate the inputs from their history: a gradient with respect to one input must not include a path
        # through another input that was computed from it.
        views = [None if x is None else x.view_as(x) for x in inputs]
        outputs = function(*views)
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        used = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if y is not None and grad is not None]
        used_outputs, used_grads = [y for y, _ in used], [grad for _, grad in used]
        selected = [view for view, needed in zip(views, needs, strict=True) if needed and view is not None]
        if not used or not selected:
            return [None] * len(inputs)
        results = iter(
            torch.autograd.grad(used_outputs, selected, used_grads, create_graph=True, materialize_grads=True)
        )
    return [next(results) if needed and x is not None else None for x, needed in zip(inputs, needs, strict=True)]
