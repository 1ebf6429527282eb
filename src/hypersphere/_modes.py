"""Temporary evaluation or training mode for modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluation_mode", "training_mode"]


@contextmanager
def evaluation_mode(*parts: object) -> Iterator[None]:
    """Put modules into evaluation mode inside a `with` block and restore the mode of every submodule afterwards.

    The `training` flags are set directly instead of calling `eval` and `train`. Modules may override these methods with
    side effects that cannot be undone, such as merging adapters.

    Args:
        parts: modules. Anything else, such as a function used in place of a model, is ignored.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval())
        >>> with evaluation_mode(network, abs):
        ...     [layer.training for layer in network]
        [False, False]
        >>> [layer.training for layer in network]
        [True, False]
    """
    with _mode(parts, training=False):
        yield


@contextmanager
def training_mode(*parts: object) -> Iterator[None]:
    """Put modules into training mode inside a `with` block, like `evaluation_mode`."""
    with _mode(parts, training=True):
        yield


@contextmanager
def _mode(parts: tuple[object, ...], training: bool) -> Iterator[None]:
    modes = [(module, module.training) for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    try:
        for module, _ in modes:
            module.training = training
        yield
    finally:
        # Restore each module separately: some may have been frozen in evaluation mode.
        for module, was_training in modes:
            module.training = was_training
