"""A model and its head as one map from images to scores."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = ["Classifier"]


@runtime_checkable
class Scorer(Protocol):
    """Anything with plain scores (B, C), as the heads have."""

    def scores(self, x: Tensor, /) -> Tensor:
        """Return the plain scores of features."""


class Classifier(nn.Module):
    """Images to the plain scores of a head, which is what an attack asks for.

    Args:
        model: images to features.
        head: features to scores by its method `scores`; a plain module does as well, by being called.

    Example:
        >>> import torch
        >>> Classifier(nn.Flatten(), nn.Linear(4, 3))(torch.rand(2, 1, 2, 2)).shape
        torch.Size([2, 3])
    """

    def __init__(self, model: nn.Module, head: nn.Module | Scorer) -> None:
        super().__init__()
        self.model = model
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, …) to scores (B, C)."""
        features = self.model(images)
        return self.head.scores(features) if isinstance(self.head, Scorer) else self.head(features)
