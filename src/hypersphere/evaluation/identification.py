r"""Identification: whose is this? A probe is searched in a gallery, among distractors too.

The search goes through the gallery in blocks. Beside the scores of one block it keeps a count for each probe, so 10⁶
distractors need no more memory than their own, and a memory-mapped array not even that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, require
from hypersphere.evaluation.arrays import Array, as_features, as_labels, blocks
from hypersphere.evaluation.mates import Mates
from hypersphere.evaluation.neighbours import nearest
from hypersphere.evaluation.open_set import OpenSet, open_set

__all__ = ["Identification", "identify"]

PROBES = 1024  # searched at once


@dataclass(frozen=True, eq=False, repr=False)
class Identification:
    """What `identify` found.

    Attributes:
        mated: (P,) whether the gallery shows the person of a probe.
        ranks: int64, of each mated probe: at which place its person first comes, from 1.
        mate_scores: of each mated probe, the highest cosine with its own person.
        top_scores: of each other probe, the highest cosine with anybody, for `open_set`.
        entries: gallery and distractors together.
        shown: the ranks that were asked for.
        neighbours: (P, k) int64, the k best entries of each probe, best first, if they were asked for: the numbers of
            gallery rows, and from G on of distractors. Of equal scores any may come first.
    """

    mated: Tensor
    ranks: Tensor
    mate_scores: Tensor
    top_scores: Tensor
    entries: int
    shown: tuple[int, ...]
    neighbours: Tensor | None = None

    def accuracy_at(self, rank: int) -> float:
        """The share of mated probes whose person is among the first `rank` entries."""
        require(is_integer(rank, 1), "rank", "a whole number >= 1", rank)
        return float((self.ranks <= rank).double().mean())

    @property
    def accuracy(self) -> dict[int, float]:
        """`accuracy_at` each of the ranks asked for."""
        return {rank: self.accuracy_at(rank) for rank in self.shown}

    def cmc(self, depth: int = 100) -> Tensor:
        """Cumulative match characteristic: `accuracy_at` 1, 2, … `depth`, as a float64 vector."""
        require(is_integer(depth, 1), "depth", "a whole number >= 1", depth)
        found = self.ranks[self.ranks <= depth].bincount(minlength=depth + 1)
        return found[1:].cumsum(0).double() / len(self.ranks)

    def open_set(self, rank: int = 1) -> OpenSet:
        """TPIR over FPIR: who is found at `rank` or better above a threshold, and who is wrongly found above it."""
        require(is_integer(rank, 1), "rank", "a whole number >= 1", rank)
        accepted = "probes of which some have nobody in the gallery"
        require(len(self.top_scores) > 0, "probes", accepted, f"{len(self.mated)} probes that all have")
        return open_set(self.mate_scores[self.ranks <= rank], self.top_scores, len(self.ranks))

    def tpir_at(self, fpir: float, *, rank: int = 1, rule: str = "step") -> float:
        """True positive identification rate at a false positive identification rate in (0, 1)."""
        return self.open_set(rank).at(fpir, rule=rule).true_rate

    def __repr__(self) -> str:
        found = ", ".join(f"rank-{rank} {value:.4f}" for rank, value in self.accuracy.items())
        strangers = f", {len(self.top_scores)} probes of strangers" if len(self.top_scores) else ""
        return f"Identification({len(self.ranks)} probes among {self.entries}{strangers}: {found})"


@torch.no_grad()
def identify(
    probes: Array,
    probe_labels: Array,
    gallery: Array,
    gallery_labels: Array,
    *,
    distractors: Array | None = None,
    ranks: Sequence[int] | Array = (1, 5, 10),
    neighbours: int | None = None,
    block: int = 8192,
) -> Identification:
    r"""Search every probe in the gallery by cosine.

    The rank of a probe is one more than the number of entries of *other* people that score at least as high as the best
    entry of its own: a tie counts against the probe, so a network that maps everything to one point is last and not
    first. Cosines closer than 16·eps are tied. Probes whose person is not in the gallery take no part in ranks;
    they are the strangers of the open-set rates.

    Args:
        probes: (P, d) embeddings of any length.
        probe_labels: (P,) integers.
        gallery: (G, d); several entries of one person are welcome.
        gallery_labels: (G,) integers.
        distractors: (D, d) entries of people that no probe shows.
        ranks: at which the accuracy is wanted.
        neighbours: how many of the best entries of each probe to name, by a second search; None for no names.
        block: gallery rows searched at once; memory is that of block × min(P, 1024) scores, 32 MB in float32.

    Example:
        >>> gallery = torch.eye(3)
        >>> found = identify(gallery + 0.1, [0, 1, 9], gallery, [0, 1, 2], distractors=-gallery, ranks=[1, 2])
        >>> found
        Identification(2 probes among 6, 1 probes of strangers: rank-1 1.0000, rank-2 1.0000)
        >>> found.cmc(3)
        tensor([1., 1., 1.], dtype=torch.float64)
        >>> identify([[3.0, 2.0, 1.0]], [0], gallery, [0, 1, 2], neighbours=2).neighbours
        tensor([[0, 1]])
    """
    x = as_features("probes", probes)
    labels = as_labels("probe_labels", probe_labels, len(x), x.device)
    entries = [as_features("gallery", gallery, like=x)]
    theirs = as_labels("gallery_labels", gallery_labels, len(entries[0]), x.device)
    if distractors is not None:
        entries.append(as_features("distractors", distractors, like=x))
    require(is_integer(block, 1), "block", "a whole number >= 1", block)
    require(all(is_integer(k, 1) for k in ranks), "ranks", "whole numbers >= 1", ranks)
    shown, size = tuple(int(k) for k in ranks), sum(map(len, entries))
    few = neighbours is None or (is_integer(neighbours, 1) and neighbours <= size)
    require(few, "neighbours", f"a whole number from 1 to {size}, the entries, or None", neighbours)
    mated = torch.isin(labels, theirs)
    require(bool(mated.any()), "probe_labels", "labels of which some are in gallery_labels", "no such label")

    wide = torch.float32
    for features in (x, *entries):
        wide = torch.promote_types(wide, features.dtype)
    with _numerics.autocast_disabled(x):
        known, strangers = (sphere.row_directions(x[rows].to(wide)) for rows in (mated, ~mated))
        mates = Mates(labels[mated], theirs)
        best = _best_mates(known, entries[0], mates, block)
        counts, top = _search(known, strangers, entries, mates, best - _numerics.tie_tolerance(wide), block)
        named = None
        if neighbours is not None:
            named = nearest(sphere.row_directions(x.to(wide)), entries, int(neighbours), block, PROBES)
    return Identification(mated, counts + 1, best, top, size, shown, named)


def _best_mates(x: Tensor, gallery: Tensor, mates: Mates, block: int) -> Tensor:
    """The highest cosine of each probe with an entry of its own person."""
    best = x.new_full((len(x),), -math.inf)
    for start in range(0, len(gallery), block):
        pairs = mates.between(start, start + block)
        for probe, entry in zip(*(index.split(8192) for index in pairs), strict=True):
            others = sphere.row_directions(gallery[entry.to(gallery.device)].to(x))
            best.scatter_reduce_(0, probe, (x[probe] * others).sum(1), "amax")
    return best


def _search(
    known: Tensor, strangers: Tensor, entries: Sequence[Tensor], mates: Mates, least: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """How many entries of others score `least` or more for each known probe, and the highest score of each stranger.

    Comparison and sum stay in the buffer of the product, in its own type: a matrix of booleans would cost as much as a
    third of the product itself.
    """
    counts = torch.zeros(len(known), dtype=torch.int64, device=known.device)
    top = strangers.new_full((len(strangers),), -math.inf)
    buffer = known.new_empty(block * min(PROBES, max(len(known), len(strangers))))
    for source, rows in enumerate(entries):
        for start, piece in blocks(rows, block):
            w = sphere.row_directions(piece.to(known))
            probe, entry = mates.between(start, start + len(w)) if source == 0 else (counts[:0], counts[:0])
            for first, x in blocks(known, PROBES):
                scores = _product(x, w, buffer)
                here = (probe >= first) & (probe < first + len(x))
                scores[probe[here] - first, entry[here] - start] = -math.inf
                reached = scores.ge_(least[first : first + len(x), None]).sum(1)
                counts[first : first + len(x)] += reached.long()
            for first, x in blocks(strangers, PROBES):
                highest = top[first : first + len(x)]
                torch.maximum(highest, _product(x, w, buffer).amax(1), out=highest)
    return counts, top


def _product(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    return torch.mm(x, w.mT, out=buffer[: len(x) * len(w)].view(len(x), len(w)))
