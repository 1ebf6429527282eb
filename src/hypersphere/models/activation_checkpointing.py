"""Activation checkpointing: recompute the activations of blocks in the backward pass instead of storing them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_activations_"]


def checkpoint_activations_(model: nn.Module) -> list[str]:
    """Make every block of a model recompute its activations, in place; return the names of the blocks.

    Blocks are the outermost items of lists of modules (`nn.Sequential`, `nn.ModuleList`) that contain parameters; a
    model without lists is one block. Names of parameters do not change.

    >>> checkpoint_activations_(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    ['0', '2']
    """
    blocks = dict(_blocks(model, "")) or {"": model}
    for block in blocks.values():
        block.forward = partial(_checkpointed_forward, block, block.forward)
    return list(blocks)


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each block."""
    is_list = isinstance(module, (nn.Sequential, nn.ModuleList))
    for name, child in module.named_children():
        if is_list and next(child.parameters(), None) is not None and not isinstance(child, nn.ModuleList):
            yield f"{prefix}{name}", child
        else:
            yield from _blocks(child, f"{prefix}{name}.")


def _checkpointed_forward(block: nn.Module, forward: Any, *arguments: Any, **options: Any) -> Any:
    if not block.training:
        return forward(*arguments, **options)
    if torch.compiler.is_compiling():
        # The compiler recomputes activations only; updates of buffers stay in the forward graph.
        return checkpoint(forward, *arguments, use_reentrant=False, **options)
    contexts = partial(_contexts, block)
    return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **options)


def _contexts(block: nn.Module) -> tuple[Any, Any]:
    """Return the contexts of the forward pass and of the recomputation."""
    return nullcontext(), _unchanged_statistics(block)


@contextmanager
def _unchanged_statistics(block: nn.Module) -> Iterator[None]:
    """Do not update the running statistics of BatchNorm again, which the forward pass has updated."""
    norms = [module for module in block.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    tracked = [norm for norm in norms if norm.training and norm.track_running_stats]
    # The recomputation may stop early, so restore the counts instead of decrementing them.
    saved = [(norm, norm.momentum, _clone(norm.num_batches_tracked)) for norm in tracked]
    for norm in tracked:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in saved:
            norm.momentum = momentum
            if count is not None:
                norm.num_batches_tracked.copy_(count)  # type: ignore[union-attr]


def _clone(count: object) -> Tensor | None:
    return count.clone() if isinstance(count, Tensor) else None
