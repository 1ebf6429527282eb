"""Which gallery entries show the person of which probe, found block by block."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Mates"]


class Mates:
    """Pairs of a probe and a gallery entry with the same label; no more than a block's are ever listed.

    >>> Mates(torch.tensor([7, 5, 7]), torch.tensor([5, 6, 7])).between(1, 3)
    (tensor([0, 2]), tensor([2, 2]))
    """

    def __init__(self, probe_labels: Tensor, gallery_labels: Tensor) -> None:
        classes, index, self.counts = probe_labels.unique(return_inverse=True, return_counts=True)
        self.probes = index.argsort(stable=True)  # by class
        self.starts = self.counts.cumsum(0) - self.counts
        place = torch.searchsorted(classes, gallery_labels).clamp(max=len(classes) - 1)
        self.entries = (classes[place] == gallery_labels).nonzero().flatten()
        self.classes = place[self.entries]

    def between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Probes and gallery entries of the pairs whose entry is in start … stop − 1."""
        ends = self.entries.new_tensor([start, stop])
        low, high = torch.searchsorted(self.entries, ends).tolist()
        of_class = self.classes[low:high]
        counts = self.counts[of_class]
        entry = torch.repeat_interleave(self.entries[low:high], counts)
        begin = torch.repeat_interleave(self.starts[of_class] - (counts.cumsum(0) - counts), counts)
        return self.probes[begin + torch.arange(len(entry), device=entry.device)], entry
