r"""One embedding from several views: an image and its mirror image, or several patches of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, require
from hypersphere.evaluation.arrays import Array, as_features, as_tensor, blocks

__all__ = ["concatenate", "mirrored_features", "patch_features"]

Embedding = Callable[[Tensor], Tensor]


def concatenate(*features: Array, unit: bool = False) -> Tensor:
    """Put the features of several views of the same N images side by side: (N, d₁ + d₂ + …), in float32 or wider.

    Args:
        features: (N, dᵢ) of each view, for example of the images and of their mirror images.
        unit: divide each view by its norms first, so that every view has the same say in the cosine.

    Example:
        >>> concatenate(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]]), unit=True)
        tensor([[0.6000, 0.8000, 0.0000, 1.0000]])
    """
    require(len(features) >= 1, "features", "at least one view", "none")
    views = [as_features(f"features[{i}]", view) for i, view in enumerate(features)]
    for i, view in enumerate(views):
        require(len(view) == len(views[0]), f"features[{i}]", f"{len(views[0])} rows like the first", len(view))
    wide = [sphere.row_directions(view) if unit else _numerics.widen(view) for view in views]
    return torch.cat([view.to(wide[0].device) for view in wide], dim=1)


def mirrored_features(model: Embedding, images: Array, *, unit: bool = False, batch: int = 256) -> Tensor:
    """Features of the images and of their mirror images side by side: (N, 2d), as the thesis tests faces (2.3.6).

    A module is in evaluation mode meanwhile, and no gradient is kept.

    Args:
        model: images (N, channels, height, width) -> features (N, d).
        images: mirrored along their last dimension. Integers of 8 bits are scaled to [0, 1], as `training.Batches`
            does; others come to the model as they are.
        unit: divide either half by its norm.
        batch: images at once.

    Example:
        >>> mirrored_features(lambda images: images.flatten(1), torch.tensor([[[[1.0, 2.0]]]]))
        tensor([[1., 2., 2., 1.]])
    """
    pixels = as_tensor("images", images)
    return concatenate(*(_embed(model, pixels, flip, batch) for flip in (False, True)), unit=unit)


def patch_features(
    models: Embedding | Sequence[Embedding],
    images: Array,
    boxes: Sequence[tuple[int, int, int, int]],
    *,
    mirror: bool = False,
    batch: int = 256,
) -> Tensor:
    """Unit features of several patches of each image side by side; three patches are the ensemble of the thesis (A.8).

    Args:
        models: one for all patches, or one for each.
        images: (N, channels, height, width); integers of 8 bits are scaled to [0, 1].
        boxes: (top, left, height, width) of each patch.
        mirror: each patch gives its `mirrored_features`.
        batch: images at once.

    Example:
        >>> image = torch.tensor([[[[3.0, 4.0, 0.0]]]])
        >>> patch_features(lambda patch: patch.flatten(1), image, [(0, 0, 1, 2), (0, 1, 1, 2)])
        tensor([[0.6000, 0.8000, 1.0000, 0.0000]])
    """
    require(len(boxes) >= 1, "boxes", "at least one (top, left, height, width)", boxes)
    each = [models] * len(boxes) if callable(models) else list(models)
    require(len(each) == len(boxes), "models", f"one model or one for each of the {len(boxes)} boxes", len(each))
    views, pixels = [], as_tensor("images", images)
    for model, box in zip(each, boxes, strict=True):
        top, left, height, width = box
        fits = min(top, left) >= 0 and min(height, width) >= 1
        fits = fits and top + height <= pixels.shape[-2] and left + width <= pixels.shape[-1]
        require(fits, "boxes", f"(top, left, height, width) inside {tuple(pixels.shape[-2:])}", box)
        patch = pixels[..., top : top + height, left : left + width]
        views.append(mirrored_features(model, patch, batch=batch) if mirror else _embed(model, patch, False, batch))
    return concatenate(*views, unit=True)


@torch.no_grad()
def _embed(model: Embedding, images: Tensor, flip: bool, batch: int) -> Tensor:
    require(images.ndim >= 2 and len(images) > 0, "images", "a non-empty batch (N, …)", tuple(images.shape))
    require(is_integer(batch, 1), "batch", "a whole number >= 1", batch)
    with _evaluating(model):
        return torch.cat([model(_scaled(rows.flip(-1) if flip else rows)) for _, rows in blocks(images, batch)])


def _scaled(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images


@contextlib.contextmanager
def _evaluating(model: Embedding) -> Iterator[None]:
    """Every part of a module in evaluation mode, and afterwards each in the mode it was in."""
    modes = {part: part.training for part in model.modules()} if isinstance(model, nn.Module) else {}
    try:
        for part in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
