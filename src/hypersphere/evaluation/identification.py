r"""Identification: who is shown? Each probe is compared with all entries of a gallery and with distractors.

The gallery is read in blocks. Only the scores of one block and one count per probe are stored, so the memory does not
grow with the gallery. Gallery and distractors may be memory-mapped arrays with millions of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._deprecation import deprecated_attribute
from hypersphere._notebook import NotebookResult
from hypersphere._validation import is_integer, require
from hypersphere.evaluation._arrays import Array, as_features, as_labels, as_numbers, blocks
from hypersphere.evaluation.roc import OperatingPoint, RankedScores, read_curve

__all__ = ["Identification", "OpenSet", "first_of_each", "identify", "identify_by_first"]

PROBE_ROWS = 1024  # probes per block of scores
MATE_PAIRS = 8192  # pairs of a probe and its mate per block


@dataclass(frozen=True, eq=False, repr=False)
class OpenSet:
    r"""Open-set identification rates as functions of the threshold. Created by `Identification.open_set`.

    A probe is *mated* if its identity is in the gallery; otherwise it is a *stranger*. TPIR (true positive
    identification rate) is the fraction of mated probes whose identity has the required rank and a score ≥ threshold.
    FPIR (false positive identification rate) is the fraction of strangers whose highest score is ≥ threshold. A mated
    probe whose identity misses the required rank is never identified, so TPIR may end below 1.

    Attributes:
        thresholds: float64, descending from ∞.
        tpir, fpir: the rates at each threshold, ascending.
        mated: number of mated probes.
        strangers: number of strangers.
    """

    thresholds: Float[Tensor, " points"]
    tpir: Float[Tensor, " points"]
    fpir: Float[Tensor, " points"]
    mated: int
    strangers: int

    def __repr__(self) -> str:
        return f"OpenSet({self.mated} mated probes, {self.strangers} strangers, TPIR up to {float(self.tpir[-1]):.4f})"

    @property
    def fnir(self) -> Float[Tensor, " points"]:
        """False negative identification rate 1 − TPIR, the ordinate of a DET curve."""
        return 1 - self.tpir

    def at(self, fpir: float, *, rule: str = "step") -> OperatingPoint:
        """Return the operating point at a false positive identification rate, by the rules of `Roc.at`."""
        return read_curve(self.thresholds, self.tpir, self.fpir, self.strangers, fpir, "fpir", rule)


@dataclass(frozen=True, eq=False, repr=False)
class Identification(NotebookResult):
    """Result of `identify`.

    Attributes:
        mated: for each probe, True if its identity is in the gallery.
        ranks: for each mated probe, the rank of its identity, from 1.
        mate_scores: for each mated probe, the highest cosine with an entry of its identity.
        top_scores: for each stranger, the highest cosine with any entry.
        entries: number of gallery entries and distractors together.
        reported_ranks: the ranks at which `accuracy` is reported.
        neighbours: (P, k) the k best entries of each probe, best first, or None if they were not requested. Numbers
            below G are rows of the gallery; G + i is row i of the distractors. The order of equal scores is arbitrary.
    """

    mated: Bool[Tensor, " probes"]
    ranks: Int64[Tensor, " mated_probes"]
    mate_scores: Float[Tensor, " mated_probes"]
    top_scores: Float[Tensor, " strangers"]
    entries: int
    reported_ranks: tuple[int, ...]
    neighbours: Int64[Tensor, "probes k"] | None = None

    shown = deprecated_attribute("shown", "reported_ranks")

    def accuracy_at(self, rank: int) -> float:
        """Return the fraction of mated probes whose identity has `rank` or a better one."""
        require(is_integer(rank, 1), "rank", "an integer >= 1", rank)
        return float((self.ranks <= rank).double().mean())

    @property
    def accuracy(self) -> dict[int, float]:
        """`accuracy_at` each of the requested ranks."""
        return {rank: self.accuracy_at(rank) for rank in self.reported_ranks}

    def cmc(self, depth: int = 100) -> Float[Tensor, " depth"]:
        """Return the cumulative match characteristic: `accuracy_at` 1, 2, …, `depth`, in float64."""
        require(is_integer(depth, 1), "depth", "an integer >= 1", depth)
        hits = self.ranks[self.ranks <= depth].bincount(minlength=depth + 1)
        return hits[1:].cumsum(0).double() / len(self.ranks)

    def open_set(self, rank: int = 1) -> OpenSet:
        """Return the open-set rates. A mated probe is identified only if its identity has `rank` or a better one.

        >>> result = identify(torch.eye(3), [0, 1, 9], torch.eye(3)[:2], [0, 1])
        >>> result.open_set()
        OpenSet(2 mated probes, 1 strangers, TPIR up to 1.0000)
        >>> result.open_set().at(0.5)
        OperatingPoint(requested_rate=0.5, threshold=1.0, false_rate=0.0, true_rate=1.0, resolved=False)
        """
        require(is_integer(rank, 1), "rank", "an integer >= 1", rank)
        if not len(self.top_scores):
            raise ValueError(f"open_set needs probes without a mate in the gallery, but all {len(self.mated)} have one")
        # The curve is the ROC of the mated probes with the required rank against the strangers. Its counts are divided
        # by all mated probes, including those that miss the rank.
        identified_scores = self.mate_scores[self.ranks <= rank]
        scores = torch.cat([identified_scores, self.top_scores]).double()
        is_mated = torch.arange(len(scores), device=scores.device) < len(identified_scores)
        curve = RankedScores(scores, is_mated).roc()
        mated, strangers = len(self.ranks), len(self.top_scores)
        return OpenSet(curve.thresholds, curve.true_accepts / mated, curve.false_accepts / strangers, mated, strangers)

    def tpir_at(self, fpir: float, *, rank: int = 1, rule: str = "step") -> float:
        """Return the true positive identification rate at a false positive identification rate in (0, 1)."""
        return self.open_set(rank).at(fpir, rule=rule).true_rate

    def __repr__(self) -> str:
        accuracies = ", ".join(f"rank-{rank} {value:.4f}" for rank, value in self.accuracy.items())
        strangers = f", {len(self.top_scores)} probes of strangers" if len(self.top_scores) else ""
        return f"Identification({len(self.ranks)} probes among {self.entries}{strangers}: {accuracies})"


@torch.no_grad()
def identify(
    probes: Array,
    probe_labels: Array,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    *,
    distractors: Array | None = None,
    ranks: Sequence[int] | Array = (1, 5, 10),
    neighbours: int | None = None,
    block: int = 8192,
) -> Identification:
    r"""Rank the gallery entries of each probe by their cosine with it.

    The rank of a probe is one plus the number of entries of *other* identities that score at least as high as the best
    entry of its identity. A tie counts against the probe, so a network that maps everything to one point gets the last
    rank and not the first. Cosines that differ by less than 16·eps are tied. Probes whose identity is not in the
    gallery have no rank; they are the strangers of `Identification.open_set`.

    Without a gallery, each probe is searched among all other probes (leave-one-out). Passing the probes as the gallery
    instead would let each of them find itself.

    Args:
        probes: (P, d) embeddings. Their norms do not matter.
        probe_labels: (P,) integers.
        gallery: (G, d), with any number of entries per identity; None for leave-one-out.
        gallery_labels: (G,) integers, if there is a gallery.
        distractors: (D, d) entries of identities that no probe has.
        ranks: the ranks at which to report the accuracy.
        neighbours: number of best entries to list per probe, which needs a second search; None for no list.
        block: gallery rows per block. The search stores block × min(P, 1024) scores, 32 MB in float32.

    Example:
        >>> gallery = torch.eye(3)
        >>> result = identify(gallery + 0.1, [0, 1, 9], gallery, [0, 1, 2], distractors=-gallery, ranks=[1, 2])
        >>> result
        Identification(2 probes among 6, 1 probes of strangers: rank-1 1.0000, rank-2 1.0000)
        >>> result.cmc(3)
        tensor([1., 1., 1.], dtype=torch.float64)
        >>> identify([[3.0, 2.0, 1.0]], [0], gallery, [0, 1, 2], neighbours=2).neighbours
        tensor([[0, 1]])
        >>> identify([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]], [0, 0, 1, 1], ranks=[1])
        Identification(4 probes among 3: rank-1 1.0000)
    """
    x = as_features("probes", probes)
    labels = as_labels("probe_labels", probe_labels, len(x), x.device)
    require((gallery is None) == (gallery_labels is None), "gallery_labels", "given with a gallery", gallery_labels)
    is_leave_one_out = gallery is None or gallery_labels is None
    sources, entry_labels = [x], labels
    if gallery is not None and gallery_labels is not None:
        sources = [as_features("gallery", gallery, like=x)]
        entry_labels = as_labels("gallery_labels", gallery_labels, len(sources[0]), x.device)
    if distractors is not None:
        sources.append(as_features("distractors", distractors, like=x))
    entries = sum(map(len, sources)) - is_leave_one_out  # a probe is not its own entry
    require(is_integer(block, 1), "block", "an integer >= 1", block)
    reported_ranks = as_numbers("ranks", ranks)
    require(all(is_integer(rank, 1) for rank in reported_ranks), "ranks", "integers >= 1", ranks)
    accepted = f"an integer from 1 to {entries}, the number of entries, or None"
    require(neighbours is None or is_integer(neighbours, 1, entries), "neighbours", accepted, neighbours)
    mated = torch.isin(labels, entry_labels)
    if is_leave_one_out:
        _, index, counts = labels.unique(return_inverse=True, return_counts=True)
        mated = counts[index] > 1
    if not bool(mated.any()):
        accepted = "a label that occurs twice" if is_leave_one_out else "a label in common with gallery_labels"
        raise ValueError(f"probe_labels must have {accepted}, but there is none")

    # Scores have the widest dtype of all inputs, and float32 at least.
    dtype = torch.float32
    for features in (x, *sources):
        dtype = torch.promote_types(dtype, features.dtype)
    with _numerics.autocast_disabled(x):
        mated_probes, strangers = (sphere.row_directions(x[rows].to(dtype)) for rows in (mated, ~mated))
        mates = Mates(labels[mated], entry_labels)
        # Without a gallery, row i of the entries is probe i itself, which is excluded from its search.
        self_rows = torch.arange(len(x), device=x.device) if is_leave_one_out else None
        self_rows_of_mated, self_rows_of_strangers = (
            None if self_rows is None else self_rows[rows] for rows in (mated, ~mated)
        )
        mate_scores = _best_mate_scores(mated_probes, sources[0], mates, block, self_rows_of_mated)
        # An entry within the tolerance below the best mate is tied with it, and ties count as rivals.
        rival_thresholds = mate_scores - _numerics.tie_tolerance(dtype)
        rivals, top_scores = _search(
            mated_probes, strangers, sources, mates, rival_thresholds, block, self_rows_of_strangers
        )
        nearest = None
        if neighbours is not None:
            nearest = nearest_entries(sphere.row_directions(x.to(dtype)), sources, int(neighbours), block, self_rows)
    return Identification(mated, rivals + 1, mate_scores, top_scores, entries, tuple(map(int, reported_ranks)), nearest)


def first_of_each(labels: Array) -> Bool[Tensor, " samples"]:
    """Return a mask of the first sample of each class, which selects a gallery with one entry per identity.

    The other samples are then the probes.

    Args:
        labels: (N,) integers.

    Example:
        >>> first_of_each([7, 5, 7, 5, 5])
        tensor([ True,  True, False, False, False])
    """
    device = labels.device if isinstance(labels, Tensor) else torch.device("cpu")
    _, classes = as_labels("labels", labels, None, device).unique(return_inverse=True)
    # After a stable sort by class, the first sample of a class is where the class changes.
    order = classes.argsort(stable=True)
    sorted_classes = classes[order]
    first = torch.ones_like(sorted_classes, dtype=torch.bool)
    first[1:] = sorted_classes[1:] != sorted_classes[:-1]
    return torch.zeros_like(first).scatter_(0, order, first)


def identify_by_first(features: Array, labels: Array, *, ranks: Sequence[int] | Array = (1, 5, 10)) -> Identification:
    """Identify all samples but the first of each class in a gallery of the first samples; see `identify`.

    Args:
        features: (N, d) embeddings.
        labels: (N,) integers.
        ranks: the ranks at which to report the accuracy.

    Example:
        >>> identify_by_first([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.8, 0.2]], [0, 1, 0, 1], ranks=[1])
        Identification(2 probes among 2: rank-1 0.5000)
    """
    x = as_features("features", features)
    y = as_labels("labels", labels, len(x), x.device)
    first = first_of_each(y)
    if bool(first.all()):
        raise ValueError("labels must have a label that occurs twice, but there is none")
    return identify(x[~first], y[~first], x[first], y[first], ranks=ranks)


class Mates:
    """All pairs of a probe and a gallery entry with the same label, listed for one block of entries at a time.

    The full list may have P·G pairs, so it is never stored.

    >>> Mates(torch.tensor([7, 5, 7]), torch.tensor([5, 6, 7])).between(1, 3)
    (tensor([0, 2]), tensor([2, 2]))
    """

    def __init__(self, probe_labels: Int64[Tensor, " probes"], gallery_labels: Int64[Tensor, " entries"]) -> None:
        classes, class_of_probe, self.class_sizes = probe_labels.unique(return_inverse=True, return_counts=True)
        # Probes sorted by class: those of class c start at class_starts[c] in probes_by_class.
        self.probes_by_class = class_of_probe.argsort(stable=True)
        self.class_starts = self.class_sizes.cumsum(0) - self.class_sizes
        # Gallery entries whose class has a probe, and the index of that class. `searchsorted` returns len(classes) for
        # a label above all classes; clamped, it is compared with a class that differs from it.
        position = torch.searchsorted(classes, gallery_labels).clamp(max=len(classes) - 1)
        self.entries = (classes[position] == gallery_labels).nonzero().flatten()
        self.class_of_entry = position[self.entries]

    def between(self, start: int, stop: int) -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]]:
        """Return probes and gallery entries of the pairs whose entry is in start … stop − 1."""
        low, high = torch.searchsorted(self.entries, self.entries.new_tensor([start, stop])).tolist()
        classes = self.class_of_entry[low:high]
        counts = self.class_sizes[classes]
        entry = torch.repeat_interleave(self.entries[low:high], counts)
        # The k-th pair of an entry belongs to the probe at class_start + k. The pairs of all entries are consecutive,
        # so k is the running number of the pair minus the number of pairs before this entry.
        offset = torch.repeat_interleave(self.class_starts[classes] - (counts.cumsum(0) - counts), counts)
        return self.probes_by_class[offset + torch.arange(len(entry), device=entry.device)], entry


def _best_mate_scores(
    x: Tensor, gallery: Tensor, mates: Mates, block: int, self_rows: Tensor | None
) -> Float[Tensor, " probes"]:
    """Return the highest cosine of each probe with an entry of its identity, other than the row of the probe itself."""
    # This is a separate pass over the mated pairs, because `_search` can count rivals only once the best mate in the
    # complete gallery is known.
    best = x.new_full((len(x),), -math.inf)
    for start in range(0, len(gallery), block):
        pairs = mates.between(start, start + block)
        for probe, entry in zip(*(index.split(MATE_PAIRS) for index in pairs), strict=True):
            w = sphere.row_directions(gallery[entry.to(gallery.device)].to(x))
            scores = (x[probe] * w).sum(1)
            if self_rows is not None:
                scores = scores.masked_fill(self_rows[probe] == entry, -math.inf)
            best.scatter_reduce_(0, probe, scores, "amax")
    return best


def _search(
    mated_probes: Tensor,
    strangers: Tensor,
    sources: Sequence[Tensor],
    mates: Mates,
    rival_thresholds: Tensor,
    block: int,
    self_rows: Tensor | None,
) -> tuple[Int64[Tensor, " mated_probes"], Float[Tensor, " strangers"]]:
    """Compare all probes with all entries of gallery and distractors.

    `self_rows` are the gallery rows of the strangers themselves, which are excluded from their search, or None. Mated
    probes need no such list: their rows have their identity, and entries of their identity are not rivals.

    Returns:
        For each mated probe, the number of rivals: entries of other identities whose score reaches the threshold of the
        probe. For each stranger, the highest score.
    """
    rivals = torch.zeros(len(mated_probes), dtype=torch.int64, device=mated_probes.device)
    top_scores = strangers.new_full((len(strangers),), -math.inf)
    entries = min(block, max(map(len, sources)))
    buffer = mated_probes.new_empty(entries * min(PROBE_ROWS, max(len(mated_probes), len(strangers))))
    no_mates = rivals[:0], rivals[:0]
    for source, features in enumerate(sources):
        is_gallery = source == 0
        for start, rows in blocks(features, block):
            w = sphere.row_directions(rows.to(mated_probes))
            probe, entry = mates.between(start, start + len(w)) if is_gallery else no_mates
            for first, x in blocks(mated_probes, PROBE_ROWS):
                scores = _scores(x, w, buffer)
                # Entries of the probe's identity are not rivals.
                in_block = (probe >= first) & (probe < first + len(x))
                scores[probe[in_block] - first, entry[in_block] - start] = -math.inf
                # Compare in place, in the dtype of the scores. A separate matrix of booleans would cost a third as
                # much time as the product.
                rivals_in_block = scores.ge_(rival_thresholds[first : first + len(x), None]).sum(1)
                rivals[first : first + len(x)] += rivals_in_block.long()
            for first, x in blocks(strangers, PROBE_ROWS):
                block_top, scores = top_scores[first : first + len(x)], _scores(x, w, buffer)
                if self_rows is not None and is_gallery:
                    _exclude(scores, self_rows[first : first + len(x)] - start)
                torch.maximum(block_top, scores.amax(1), out=block_top)
    return rivals, top_scores


def _exclude(scores: Float[Tensor, "rows columns"], column_of_row: Int64[Tensor, " rows"]) -> None:
    """Set scores[i, column_of_row[i]] to −∞ in each row i for which this column exists."""
    inside = ((column_of_row >= 0) & (column_of_row < scores.shape[1])).nonzero().flatten()
    scores[inside, column_of_row[inside]] = -math.inf


def _scores(x: Tensor, w: Tensor, buffer: Tensor) -> Float[Tensor, "rows columns"]:
    """Return x @ w.mT in the memory of `buffer`, because allocating a large matrix per block is slow."""
    return torch.mm(x, w.mT, out=buffer[: len(x) * len(w)].view(len(x), len(w)))


def nearest_entries(
    x: Float[Tensor, "probes dim"], sources: Sequence[Tensor], k: int, block: int, self_rows: Tensor | None = None
) -> Int64[Tensor, "probes k"]:
    """Return the k entries with the highest cosine for each unit row of `x`, best first.

    Entries are numbered consecutively through all matrices of `sources`. The entry with the number self_rows[i], if
    given, is excluded for probe i.

    >>> nearest_entries(torch.eye(2), [torch.tensor([[0.0, 2.0], [3.0, 1.0]]), torch.eye(2)], 2, block=2)
    tensor([[2, 1],
            [0, 3]])
    """
    best_scores = x.new_full((len(x), k), -math.inf)
    best_entries = torch.zeros(len(x), k, dtype=torch.int64, device=x.device)
    offset = 0
    for features in sources:
        for _, rows in blocks(features, block):
            w = sphere.row_directions(rows.to(x))
            for first, probes in blocks(x, PROBE_ROWS):
                rows_of_block = slice(first, first + len(probes))
                # Merge the k best so far with the k best of this block. The stable sort prefers earlier entries.
                block_scores = probes @ w.mT
                if self_rows is not None:
                    _exclude(block_scores, self_rows[rows_of_block] - offset)
                scores, index = block_scores.topk(min(k, len(w)), dim=1)
                scores = torch.cat([best_scores[rows_of_block], scores], 1)
                entries = torch.cat([best_entries[rows_of_block], index + offset], 1)
                scores, order = scores.sort(dim=1, descending=True, stable=True)
                best_scores[rows_of_block] = scores[:, :k]
                best_entries[rows_of_block] = entries.gather(1, order[:, :k])
            offset += len(w)
    return best_entries
