"""Random shifts and mirror images as data augmentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere._validation import require
from hypersphere.data.batches import Batches

__all__ = ["Augmented", "moved"]


def moved(images: Tensor, generator: torch.Generator, *, shift: int = 0, mirror: bool = False) -> Tensor:
    """Shift each image by up to `shift` pixels in each direction, padded with zeros; mirror it with probability 1/2.

    >>> image = torch.arange(4.0).view(1, 1, 2, 2)
    >>> moved(image, torch.Generator().manual_seed(0), shift=1).shape
    torch.Size([1, 1, 2, 2])
    """
    require(images.ndim == 4, "images", "a tensor with four dimensions (N, C, H, W)", tuple(images.shape))
    count, _, height, width = images.shape
    if shift:
        corner = torch.randint(2 * shift + 1, (2, count, 1), generator=generator)
        rows = corner[0] + torch.arange(height)
        columns = corner[1] + torch.arange(width)
        places = (rows.unsqueeze(2) * (width + 2 * shift) + columns.unsqueeze(1)).flatten(1).to(images.device)
        wide = F.pad(images, (shift,) * 4).flatten(2)
        images = wide.gather(2, places.unsqueeze(1).expand(-1, wide.shape[1], -1)).view_as(images)
    if mirror:
        mirrored = torch.randint(2, (count,), generator=generator).bool().view(-1, 1, 1, 1).to(images.device)
        images = torch.where(mirrored, images.flip(3), images)
    return images


class Augmented:
    """Batches whose images are shifted and mirrored by `moved`."""

    def __init__(
        self,
        batches: Batches,
        generator: torch.Generator,
        *,
        shift: int = 0,
        mirror: bool = False,
    ) -> None:
        self.batches, self.generator, self.shift, self.mirror = batches, generator, shift, mirror

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.batches:
            yield moved(x, self.generator, shift=self.shift, mirror=self.mirror), y

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data and the random state."""
        return {"batches": self.batches.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position in the data and the random state."""
        self.batches.load_state_dict(state["batches"])
        self.generator.set_state(state["generator"])
