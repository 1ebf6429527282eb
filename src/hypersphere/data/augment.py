"""Augmentations of batches. Each is a callable (inputs, generator) → inputs.

An augmentation that changes the shape of an input, such as `window`, has a method `output_shape`.

Images are floats (B, C, H, W) in [0, 1]; point clouds are floats (B, P, 3). All random numbers come from the generator,
so a checkpoint needs to store only its state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from hypersphere._validation import is_integer, is_number, require, require_package

Images = Shaped[Tensor, "batch channels height width"]
Clouds = Float[Tensor, "batch points 3"]
Augmentation = Callable[[Tensor, torch.Generator], Tensor]


class Shift:
    """Shift each image by up to `pixels` in each direction, padded with zeros.

    >>> images = torch.arange(4.0).view(1, 1, 2, 2)
    >>> Shift(1)(images, torch.Generator().manual_seed(0)).shape
    torch.Size([1, 1, 2, 2])
    """

    def __init__(self, pixels: int = 2) -> None:
        require(is_integer(pixels, 0), "augment.pixels", "an integer >= 0", pixels)
        self.pixels = int(pixels)

    def __call__(self, images: Images, generator: torch.Generator) -> Images:
        """Return shifted images."""
        _require_images(images)
        count, _, height, width = images.shape
        pixels = self.pixels
        require(pixels < min(height, width), "augment.pixels", f"less than the size {height}x{width}", pixels)
        if not pixels:
            return images
        # Draw the corner of a window in each padded image, and compute the flat indices of the pixels of the window.
        corner = torch.randint(2 * pixels + 1, (2, count, 1), generator=generator)
        rows, columns = corner[0] + torch.arange(height), corner[1] + torch.arange(width)
        index = (rows.unsqueeze(2) * (width + 2 * pixels) + columns.unsqueeze(1)).flatten(1).to(images.device)
        padded = F.pad(images, (pixels,) * 4).flatten(2)
        return padded.gather(2, index.unsqueeze(1).expand(-1, padded.shape[1], -1)).view_as(images)


class Roll:
    """Shift all images of a batch cyclically by the same random amount of up to `pixels` in each direction.

    >>> images = torch.arange(4.0).view(1, 1, 2, 2)
    >>> Roll(1)(images, torch.Generator().manual_seed(0)).sum().item()
    6.0
    """

    def __init__(self, pixels: int = 2) -> None:
        require(is_integer(pixels, 0), "augment.pixels", "an integer >= 0", pixels)
        self.pixels = int(pixels)

    def __call__(self, images: Images, generator: torch.Generator) -> Images:
        """Return shifted images."""
        _require_images(images)
        # One shift per batch, because `roll` is then a single copy.
        down, right = torch.randint(-self.pixels, self.pixels + 1, (2,), generator=generator).tolist()
        return torch.roll(images, (down, right), (2, 3))


class Window:
    """Cut a random window from each image, `margin` pixels smaller in height and width.

    With images of 256×256 pixels and a margin of 32, these are the random 224×224 crops of ImageNet; the option
    `margin` of the data `imagenet` cuts the central window of the same size from validation images.

    >>> Window(margin=2)(torch.zeros(1, 3, 8, 8), torch.Generator().manual_seed(0)).shape
    torch.Size([1, 3, 6, 6])
    """

    def __init__(self, margin: int = 4) -> None:
        require(is_integer(margin, 0), "augment.margin", "an integer >= 0", margin)
        self.margin = int(margin)

    def __call__(
        self, images: Images, generator: torch.Generator
    ) -> Shaped[Tensor, "batch channels smaller_height smaller_width"]:
        """Return the windows."""
        _require_images(images)
        _, height, width = self.output_shape(images.shape[1:])
        corners = torch.randint(self.margin + 1, (len(images), 2), generator=generator).tolist()
        windows = [
            image[:, top : top + height, left : left + width]
            for image, (top, left) in zip(images, corners, strict=True)
        ]
        return torch.stack(windows) if windows else images[..., :height, :width]

    def output_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return the shape (C, H, W) of a window of an image of this shape."""
        channels, height, width = shape
        fits = min(height, width) > self.margin
        require(fits, "augment.margin", "less than the size of the images", self.margin)
        return channels, height - self.margin, width - self.margin


class Mirror:
    """Mirror each image horizontally with probability 1/2."""

    def __call__(self, images: Images, generator: torch.Generator) -> Images:
        """Return images of which about half are mirrored."""
        _require_images(images)
        mirrored = torch.randint(2, (len(images),), generator=generator).bool().view(-1, 1, 1, 1).to(images.device)
        return torch.where(mirrored, images.flip(3), images)


class TurnPoints:
    """Rotate each point cloud by a random angle about a coordinate axis; axis 1, the default, points up.

    >>> clouds = torch.rand(2, 5, 3)
    >>> turned = TurnPoints()(clouds, torch.Generator().manual_seed(0))
    >>> torch.allclose(turned.norm(dim=2), clouds.norm(dim=2)), torch.equal(turned[..., 1], clouds[..., 1])
    (True, True)
    """

    def __init__(self, axis: int = 1) -> None:
        require(is_integer(axis, 0, 2), "augment.axis", "0, 1 or 2", axis)
        self.axis = int(axis)

    def __call__(self, clouds: Clouds, generator: torch.Generator) -> Clouds:
        """Return rotated clouds."""
        _require_clouds(clouds)
        angle = (2 * math.pi * torch.rand(len(clouds), 1, generator=generator)).to(clouds)
        first, second = ((self.axis + 1) % 3, (self.axis + 2) % 3)
        x, y, turned = clouds[..., first], clouds[..., second], clouds.clone()
        turned[..., first] = angle.cos() * x - angle.sin() * y
        turned[..., second] = angle.sin() * x + angle.cos() * y
        return turned


class JitterPoints:
    """Add independent Gaussian noise of deviation `sigma`, cut off at ±`limit`, to each coordinate.

    >>> JitterPoints()(torch.zeros(2, 5, 3), torch.Generator().manual_seed(0)).abs().max() <= 0.05
    tensor(True)
    """

    def __init__(self, sigma: float = 0.01, limit: float = 0.05) -> None:
        for name, value in (("sigma", sigma), ("limit", limit)):
            require(is_number(value, 0), f"augment.{name}", "a number >= 0", value)
        self.sigma, self.limit = sigma, limit

    def __call__(self, clouds: Clouds, generator: torch.Generator) -> Clouds:
        """Return clouds with noise."""
        _require_clouds(clouds)
        noise = self.sigma * torch.randn(clouds.shape, generator=generator)
        return clouds + noise.clamp(-self.limit, self.limit).to(clouds)


class KorniaAugmentation:
    """An augmentation of Kornia whose random numbers come from a generator.

    Args:
        build: returns the module of Kornia for images of (channels, height, width).
    """

    def __init__(self, build: Callable[[Any, tuple[int, int, int]], Any]) -> None:
        self._build = build
        self._modules: dict[tuple[int, int, int], Any] = {}

    def __call__(self, images: Images, generator: torch.Generator) -> Images:
        """Return augmented images."""
        _require_images(images)
        shape = (images.shape[1], images.shape[2], images.shape[3])
        if shape not in self._modules:
            kornia = require_package("kornia.augmentation", "Kornia", "train")
            self._modules[shape] = self._build(kornia, shape)
        # Kornia draws from the global generator. Seed it for this call and restore it afterwards.
        seed = int(torch.randint(2**62, (), generator=generator))
        saved = torch.default_generator.get_state()
        try:
            torch.default_generator.manual_seed(seed)
            return self._modules[shape](images)
        finally:
            torch.default_generator.set_state(saved)


def crop(
    scale: Sequence[float] = (0.5, 1.0), ratio: Sequence[float] = (3 / 4, 4 / 3), p: float = 1.0
) -> KorniaAugmentation:
    """Crop a random part of each image, of `scale` times its area and a random aspect ratio, and resize it back."""
    _require_range("scale", scale, 1)
    _require_range("ratio", ratio)
    _require_probability(p)
    return KorniaAugmentation(
        lambda kornia, shape: kornia.RandomResizedCrop(shape[1:], scale=tuple(scale), ratio=tuple(ratio), p=p)
    )


def flip(p: float = 0.5) -> KorniaAugmentation:
    """Mirror each image horizontally with probability `p`."""
    _require_probability(p)
    return KorniaAugmentation(lambda kornia, shape: kornia.RandomHorizontalFlip(p=p))


def flip_vertical(p: float = 0.5) -> KorniaAugmentation:
    """Mirror each image vertically with probability `p`."""
    _require_probability(p)
    return KorniaAugmentation(lambda kornia, shape: kornia.RandomVerticalFlip(p=p))


def colour(
    brightness: float = 0.2, contrast: float = 0.2, saturation: float = 0.2, hue: float = 0.05, p: float = 0.8
) -> KorniaAugmentation:
    """Change brightness, contrast, saturation and hue by random factors. Grey images have no saturation and hue."""
    for name, value in (("brightness", brightness), ("contrast", contrast), ("saturation", saturation)):
        require(is_number(value, 0, 1), f"augment.{name}", "a number in [0, 1]", value)
    require(is_number(hue, 0, 0.5), "augment.hue", "a number in [0, 0.5]", hue)
    _require_probability(p)

    def build(kornia: Any, shape: tuple[int, int, int]) -> Any:
        if shape[0] != 3:
            return kornia.AugmentationSequential(
                kornia.RandomBrightness((1 - brightness, 1 + brightness), p=p),
                kornia.RandomContrast((1 - contrast, 1 + contrast), p=p),
            )
        return kornia.ColorJiggle(brightness, contrast, saturation, hue, p=p)

    return KorniaAugmentation(build)


def blur(sigma: Sequence[float] = (0.1, 2.0), kernel: int = 5, p: float = 0.5) -> KorniaAugmentation:
    """Blur each image with probability `p` by a Gaussian of random width `sigma`, in pixels."""
    _require_range("sigma", sigma)
    require(is_integer(kernel, 1) and kernel % 2 == 1, "augment.kernel", "an odd integer >= 1", kernel)
    _require_probability(p)
    return KorniaAugmentation(lambda kornia, shape: kornia.RandomGaussianBlur((kernel, kernel), tuple(sigma), p=p))


def erase(
    scale: Sequence[float] = (0.02, 0.33), ratio: Sequence[float] = (0.3, 3.3), value: float = 0.0, p: float = 0.5
) -> KorniaAugmentation:
    """Fill a random rectangle of each image, of `scale` times its area, with a value, with probability `p`."""
    _require_range("scale", scale, 1)
    _require_range("ratio", ratio)
    require(is_number(value, 0, 1), "augment.value", "a number in [0, 1]", value)
    _require_probability(p)
    return KorniaAugmentation(
        lambda kornia, shape: kornia.RandomErasing(scale=tuple(scale), ratio=tuple(ratio), value=value, p=p)
    )


def rand_augment(n: int = 2, m: int = 10) -> KorniaAugmentation:
    """Apply `n` random transformations of strength `m`, 1 to 29, to each image (RandAugment)."""
    require(is_integer(n, 1), "augment.n", "an integer >= 1", n)
    require(is_integer(m, 1, 29), "augment.m", "an integer in 1..29", m)

    def build(kornia: Any, shape: tuple[int, int, int]) -> Any:
        if shape[0] != 3:
            raise ValueError(f"the augmentation rand_augment needs images with three channels, not {shape[0]}")
        return kornia.auto.RandAugment(n=n, m=m)

    return KorniaAugmentation(build)


def _require_images(images: Tensor) -> None:
    require(images.ndim == 4, "images", "a tensor with four dimensions (N, C, H, W)", tuple(images.shape))


def _require_clouds(clouds: Tensor) -> None:
    is_clouds = clouds.ndim == 3 and clouds.shape[2] == 3
    require(is_clouds, "inputs", "point clouds (N, P, 3)", tuple(clouds.shape))


def _require_probability(p: float) -> None:
    require(is_number(p, 0, 1), "augment.p", "a probability in [0, 1]", p)


def _require_range(name: str, limits: Sequence[float], high: float = float("inf")) -> None:
    is_range = isinstance(limits, (list, tuple)) and len(limits) == 2 and all(is_number(end, 0, high) for end in limits)
    is_range = is_range and 0 < limits[0] <= limits[1]
    require(
        is_range, f"augment.{name}", "two positive numbers in ascending order" + (" <= 1" if high == 1 else ""), limits
    )


AUGMENTATIONS: dict[str, Callable[..., Augmentation]] = {
    "shift": Shift,
    "roll": Roll,
    "window": Window,
    "mirror": Mirror,
    "turn_points": TurnPoints,
    "jitter_points": JitterPoints,
    "crop": crop,
    "flip": flip,
    "flip_vertical": flip_vertical,
    "colour": colour,
    "blur": blur,
    "erase": erase,
    "rand_augment": rand_augment,
}
