"""Backwards that are written by hand: when they are taken, and in which pieces a batch is gone through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hypersphere import _numerics

__all__ = ["blocks", "by_hand", "on_accelerator", "opaque", "pieces", "require_first_order"]


def by_hand(*tensors: Tensor) -> bool:
    """Whether to take the backward that is written by hand: in eager mode, outside `torch.func`, with real numbers."""
    return _numerics.values_readable(*tensors) and torch._C._functorch.peek_interpreter_stack() is None


def opaque(x: Tensor) -> bool:
    """Whether to take an operator by hand that no transform can look into: not where a program of its own is made.

    Nor while compiling for an accelerator, whose compiler makes more of plain operations.
    """
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    return not (torch.compiler.is_compiling() and on_accelerator(x))


def on_accelerator(x: Tensor) -> bool:
    """Whether `x` lies on the accelerator of the machine."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == x.device.type


def require_first_order() -> None:
    """Refuse to build a graph of a backward that is written by hand; without this the graph would silently be cut."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "decoupled layers have no gradient of the gradient in eager mode (create_graph=True): "
            "take it through torch.func, which uses plain operations"
        )


def blocks(size: int, each: int, x: Tensor) -> list[slice]:
    """Cut a batch evenly into blocks of about `size` numbers a thread, `each` to a sample.

    What is computed of a block stays in the cache, and in memory that is used again for the next. An accelerator, which
    has neither, takes the batch as it is.

    >>> blocks(4, 2, torch.arange(5))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    if on_accelerator(x):
        return [slice(0, len(x))]
    count = max(1, -(-len(x) * each // (size * torch.get_num_threads())))
    step = max(1, -(-len(x) // count))
    return [slice(start, start + step) for start in range(0, max(1, len(x)), step)]


def pieces(size: int, each: int, *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Go through the blocks of batches together; a batch that is None has blocks that are None.

    >>> [a.tolist() for a, b in pieces(4, 2, torch.arange(5), None)]
    [[0, 1], [2, 3], [4]]
    """
    cut = blocks(size, each, next(t for t in tensors if t is not None))
    return zip(*([None] * len(cut) if t is None else t.split(max(1, cut[0].stop)) for t in tensors), strict=True)
