"""The gradient of a loss with respect to the images alone, which leaves no trace in the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

from hypersphere._numerics import values_readable
from hypersphere._validation import require

__all__ = ["Loss", "Model", "check_batch", "evaluating", "image_gradient", "tracked"]

Model: TypeAlias = Callable[[Tensor], Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@contextlib.contextmanager
def evaluating(*parts: object) -> Iterator[None]:
    """Put those parts that are modules in evaluation mode, and every module of theirs back in its own mode after.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with evaluating(model, torch.tanh):
    ...     [part.training for part in model]
    [False, False]
    >>> [part.training for part in model]
    [True, False]
    """
    modes = [(m, m.training) for part in parts if isinstance(part, nn.Module) for m in part.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def tracked(tensor: Tensor) -> Tensor:
    """A copy that can be differentiated (or, of labels, used in doing so), even of a tensor of inference mode."""
    with torch.inference_mode(False):
        copy = tensor.detach().clone()
        return copy.requires_grad_() if copy.is_floating_point() else copy


def image_gradient(model: Model, images: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """∂loss(model(x), y)/∂x; parameters keep the gradients they have.

    >>> image_gradient(lambda x: 3 * x, torch.tensor([[0.5]]), torch.tensor([0]), lambda output, y: output.sum())
    tensor([[3.]])
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = tracked(images)
        (gradient,) = torch.autograd.grad(loss(model(x), tracked(labels)), x)
    return gradient


def check_batch(images: Tensor, labels: Tensor) -> None:
    """Images must be floating-point numbers in [0, 1], and there must be a label for each."""
    require(images.is_floating_point(), "images", "floating-point numbers in [0, 1]", images.dtype)
    require(len(images) == len(labels), "labels", f"one for each of the {len(images)} images", len(labels))
    if images.numel() and values_readable(images):
        low, high = (float(value) for value in images.aminmax())
        require(low >= 0 and high <= 1, "images", "numbers in [0, 1]", (low, high))  # False for NaN too
