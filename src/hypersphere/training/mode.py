"""Training mode and evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Put modules into evaluation mode meanwhile; each part goes back to the mode that it had.

    >>> network = nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval())
    >>> with evaluating(network):
    ...     print([part.training for part in network])
    [False, False]
    >>> [part.training for part in network]
    [True, False]
    """
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, mode in modes:  # one by one: some may have been frozen in evaluation mode
            part.training = mode
