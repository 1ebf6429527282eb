"""Initialisations of the weights of linear and convolution layers and of heads, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["INITIALIZATIONS"]


def _default_init(modules: nn.Module) -> None:
    """The initialisation of the model."""


def _initialization(fill_: Callable[[Tensor], Any], summary: str) -> Callable[..., None]:
    """Return a function that fills the weights of all linear and convolution layers and heads with `fill_`."""

    @torch.no_grad()
    def initialize_(modules: nn.Module, *, mean: float = 0.0) -> None:
        for module in modules.modules():
            if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)) or hasattr(module, "num_classes"):
                weight = module._parameters.get("weight")
                if weight is not None:
                    fill_(weight)
                    weight.add_(mean)

    initialize_.__doc__ = (
        f"{summary} Applied to the weights of all linear and convolution layers and heads, plus `mean`."
    )
    return initialize_


INITIALIZATIONS: dict[str, Callable[..., None]] = {
    "default": _default_init,
    "normal": _initialization(nn.init.normal_, "Normal distribution with variance 1."),
    "xavier": _initialization(nn.init.xavier_uniform_, "Xavier: uniform, by the numbers of inputs and outputs."),
    "he": _initialization(
        partial(nn.init.kaiming_normal_, nonlinearity="relu"), "He: normal, by the number of inputs."
    ),
}
