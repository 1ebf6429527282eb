"""Verification pairs: two positions in a data set, whether both show the same class, and the fold of the pair."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from hypersphere._validation import is_integer, require
from hypersphere.data._files import DamagedData, MissingData, is_count, read_text
from hypersphere.data.containers import Indices, require_tensor, to_positions

MAX_FOLD_DIGITS = 6  # evaluation loops over all folds up to the largest number, so it is bounded
LFW_PAIRS = 3000  # pairs of each kind in View 2 of LFW
MAX_ITEMS_TO_ENUMERATE = 2000  # draw_pairs lists all pairs of up to this number of items: 2 million
CLASSES_PER_FOLD = 2  # draw_possible_pairs draws folds only if each can have this number of classes with two items
FEWEST_HALVED_PAIRS = 10  # per fold; if there are fewer, draw_possible_pairs draws from all classes


@dataclass(frozen=True, eq=False)
class Pairs:
    """M verification pairs.

    Attributes:
        first: int64 (M,), positions of the first items.
        second: int64 (M,), positions of the second items.
        same: bool (M,), True if both items belong to the same class.
        fold: int64 (M,), the fold of each pair.

    Example:
        >>> pairs = Pairs(torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([True, False]), torch.tensor([0, 1]))
        >>> rest, held_out = pairs.split(fold=1)
        >>> len(pairs), pairs.folds, held_out.first
        (2, 2, tensor([2]))
    """

    first: Int64[Tensor, " pairs"]
    second: Int64[Tensor, " pairs"]
    same: Bool[Tensor, " pairs"]
    fold: Int64[Tensor, " pairs"]

    def __post_init__(self) -> None:
        shape = (len(self.first),)
        for name in ("first", "second", "same", "fold"):
            value: Tensor = getattr(self, name)
            dtype = torch.bool if name == "same" else torch.int64
            require_tensor(name, value, dtype, f"({len(self.first)},)", value.shape == shape)
        if len(self):
            lowest = min(int(self.first.min()), int(self.second.min()), int(self.fold.min()))
            require(lowest >= 0, "first, second and fold", ">= 0", lowest)

    def __len__(self) -> int:
        return len(self.first)

    def __repr__(self) -> str:
        return f"Pairs({len(self)} pairs, {int(self.same.sum())} of them same, {self.folds} folds)"

    @property
    def folds(self) -> int:
        """The number of folds."""
        return int(self.fold.max()) + 1 if len(self) else 0

    def subset(self, indices: Indices) -> Pairs:
        """Return the pairs at these positions, or where this mask is True."""
        index = to_positions(indices, len(self))
        return Pairs(self.first[index], self.second[index], self.same[index], self.fold[index])

    def split(self, fold: int) -> tuple[Pairs, Pairs]:
        """Return the pairs of all other folds, and those of this fold."""
        require(0 <= fold < self.folds, "fold", f"in 0..{self.folds - 1}", fold)
        return self.subset(self.fold != fold), self.subset(self.fold == fold)


def pairs_from_rows(rows: Sequence[tuple[int, int, bool, int]]) -> Pairs:
    """Return pairs from rows of (first, second, same, fold)."""
    columns = torch.tensor([[int(value) for value in row] for row in rows], dtype=torch.int64).reshape(-1, 4)
    first, second, same, fold = columns.unbind(dim=1)
    return Pairs(first.contiguous(), second.contiguous(), same.bool(), fold.contiguous())


def read_pairs(file: str | Path, names: Sequence[str]) -> Pairs:
    """Read pairs from a text file in UTF-8, in one of two formats.

    - Lines of `name name 0|1`, optionally followed by a fold 0, 1, ... (at most six digits). Fields are separated by
      commas, tabs or spaces.
    - The pairs.txt of LFW, which begins with the numbers of folds and of same pairs per fold, followed by lines of
      `person number number` (same) and `person number person number` (different). Names are person/person_0001.

    Empty lines and lines that begin with # are skipped.

    Args:
        file: the text file.
        names: the names of the data set (`LabelledImages.names`), to which positions refer.

    Raises:
        MissingData: if the file does not exist.
        DamagedData: if a line is malformed or names an unknown image; the message states its number.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise MissingData(f"{path} not found. Give a text file with lines of: name name 0|1")
    lines = [(number, line.strip()) for number, line in enumerate(read_text(path).splitlines(), start=1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    # Only the list of LFW begins with a line of one or two numbers.
    if lines and len(lines[0][1].split()) <= 2 and all(map(is_count, lines[0][1].split())):
        return lfw_pairs_from_lines(lines, names, path)
    position = {name: number for number, name in enumerate(names)}
    rows = []
    for number, line in lines:
        # Names may contain spaces if the fields are separated by commas or tabs.
        separator = next((mark for mark in (",", "\t") if mark in line), None)
        fields = [field.strip() for field in line.split(separator)]
        fold_is_valid = all(fold.isdecimal() and len(fold) <= MAX_FOLD_DIGITS for fold in fields[3:])
        if len(fields) not in (3, 4) or fields[2] not in ("0", "1") or not fold_is_valid:
            raise DamagedData(f"{path} line {number} must be `name name 0|1 [fold]`, not {line!r}")
        for name in fields[:2]:
            if name not in position:
                raise DamagedData(f"{path} line {number} must name two of the {len(position)} images, not {name!r}")
        fold = int(fields[3]) if len(fields) == 4 else 0
        rows.append((position[fields[0]], position[fields[1]], fields[2] == "1", fold))
    return pairs_from_rows(rows)


def lfw_pairs_from_lines(lines: Sequence[tuple[int, str]], names: Sequence[str], path: Path) -> Pairs:
    """Return the pairs of the numbered lines of an LFW list; `path` is used in messages."""
    # The list has no file suffixes, so images may have any format.
    position = {name.rsplit(".", 1)[0]: number for number, name in enumerate(names)}
    header = lines[0][1].split() if lines else []
    if len(header) not in (1, 2) or not all(map(is_count, header)):
        raise DamagedData(f"{path} must begin with the numbers of folds and pairs, not {' '.join(header)!r}")
    # The lists of View 1 (pairsDevTrain.txt) are one fold and begin with the number of pairs alone.
    folds, per_fold = (1, int(header[0])) if len(header) == 1 else map(int, header)
    if len(lines) != 1 + 2 * folds * per_fold:
        raise DamagedData(f"{path} must contain {2 * folds * per_fold} pairs, not {len(lines) - 1}")
    rows = []
    for index, (number, line) in enumerate(lines[1:]):
        # In every fold, `per_fold` same pairs come first, then `per_fold` different pairs.
        fold, rank = divmod(index, 2 * per_fold)
        same = rank < per_fold
        fields = line.split("\t")
        image_numbers = fields[1:] if same else fields[1::2]
        if len(fields) != (3 if same else 4) or not all(map(is_count, image_numbers)):
            expected = "name, number, number" if same else "name, number, name, number"
            raise DamagedData(f"{path} line {number} must be {expected}, not {line!r}")
        first_person, second_person = fields[0], fields[0] if same else fields[2]
        first, second = (
            f"{person}/{person}_{int(image):04d}"
            for person, image in zip((first_person, second_person), image_numbers, strict=True)
        )
        for name in (first, second):
            if name not in position:
                raise DamagedData(f"{path} line {number} must name one of the {len(position)} images, not {name!r}")
        rows.append((position[first], position[second], same, fold))
    return pairs_from_rows(rows)


def draw_pairs(labels: Int[Tensor, " items"], *, folds: int = 10, per_fold: int = 300, seed: int = 0) -> Pairs:
    """Draw a verification protocol like that of LFW: disjoint folds of classes, with as many same as different pairs.

    No class is in two folds and no pair occurs twice. All pairs of a kind in a fold have the same probability. The same
    arguments give the same pairs. (Before 0.2, same pairs of large classes were drawn too rarely if a fold had more
    than 2,000 items and classes of different sizes.)

    Args:
        labels: integers (N,).
        folds: number of folds.
        per_fold: number of same pairs per fold, which is also the number of different pairs per fold.
        seed: seed of the random draw.

    Raises:
        ValueError: if a fold has fewer pairs of a kind than `per_fold`.

    Example:
        >>> draw_pairs(torch.arange(8) // 4, folds=1, per_fold=3)
        Pairs(6 pairs, 3 of them same, 1 folds)
    """
    require(labels.ndim == 1, "labels", "1-d integers", tuple(labels.shape))
    require(is_integer(folds, 1), "folds", "an integer >= 1", folds)
    require(is_integer(per_fold, 1), "per_fold", "an integer >= 1", per_fold)
    generator = torch.Generator().manual_seed(seed)
    classes, labels = torch.unique(labels.to(generator.device), return_inverse=True)  # labels become 0, 1, ...
    rows: list[tuple[int, int, bool, int]] = []
    for fold, fold_classes in enumerate(torch.randperm(len(classes), generator=generator).tensor_split(folds)):
        items = torch.isin(labels, fold_classes).nonzero().flatten()
        fold_labels = labels[items]
        # With n items and n_c of class c there are Σ n_c(n_c−1)/2 same pairs among n(n−1)/2.
        counts = torch.bincount(fold_labels) if len(fold_labels) else torch.zeros(1, dtype=torch.int64)
        same_pairs = int((counts * (counts - 1) // 2).sum())
        different_pairs = len(items) * (len(items) - 1) // 2 - same_pairs
        if min(same_pairs, different_pairs) < per_fold:
            raise ValueError(
                f"per_fold must be at most the number of pairs per fold, not {per_fold}: fold {fold} has "
                f"{same_pairs} same and {different_pairs} different pairs"
            )
        for same in (True, False):
            drawn = _draw_distinct(items, fold_labels, same, per_fold, generator)
            rows.extend((first, second, same, fold) for first, second in drawn)
    return pairs_from_rows(rows)


class NoPairsError(ValueError):
    """No class has two items, so there are no pairs of the same class."""


def draw_all_class_pairs(labels: Int[Tensor, " items"], count: int | None = None, *, seed: int = 0) -> Pairs:
    """Draw as many same as different pairs from all classes, in one fold.

    Args:
        labels: integers (N,).
        count: number of same and of different pairs; by default 3,000, as in LFW, or all if there are fewer.
        seed: seed of the random draw.

    Example:
        >>> draw_all_class_pairs(torch.tensor([0, 0, 1, 1]))
        Pairs(4 pairs, 2 of them same, 1 folds)
    """
    counts = labels.unique(return_counts=True)[1]
    same = int((counts * (counts - 1) // 2).sum())
    different = len(labels) * (len(labels) - 1) // 2 - same
    if not same:
        raise NoPairsError("verification and identification need a class with two samples; every class has one")
    require(different > 0, "labels", "labels of at least two classes", len(counts))
    largest = min(same, different)
    accepted = f"a list, or a number from 1 to {largest}: there are {same} same and {different} different pairs"
    require(count is None or 1 <= count <= largest, "pairs", accepted, count)
    return draw_pairs(labels, folds=1, per_fold=min(LFW_PAIRS, largest) if count is None else count, seed=seed)


def draw_possible_pairs(labels: Int[Tensor, " items"], folds: int, per_fold: int, seed: int) -> Pairs:
    """Draw pairs in folds of different classes, or from all classes together if a fold would have few classes.

    With few classes per fold, a threshold chosen on the other folds does not transfer, and accuracies would depend
    more on the folds than on the features. There are at most `folds` times `per_fold` pairs of each kind.

    Example:
        >>> draw_possible_pairs(torch.arange(12) // 3, folds=10, per_fold=300, seed=0)
        Pairs(24 pairs, 12 of them same, 1 folds)
    """
    counts = labels.unique(return_counts=True)[1]
    if int((counts > 1).sum()) >= CLASSES_PER_FOLD * folds:
        # Halve the number of pairs until every fold has enough.
        halves = (per_fold >> times for times in range(1, per_fold.bit_length()))
        for pairs_per_fold in (per_fold, *(half for half in halves if half >= FEWEST_HALVED_PAIRS)):
            with suppress(ValueError):
                return draw_pairs(labels, folds=folds, per_fold=pairs_per_fold, seed=seed)
    same = int((counts * (counts - 1) // 2).sum())
    different = len(labels) * (len(labels) - 1) // 2 - same
    return draw_all_class_pairs(labels, min(same, different, folds * per_fold) or None, seed=seed)


def sample_pairs(
    labels: Int64[Tensor, " items"], most: int, generator: torch.Generator
) -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"]]:
    """Return the positions of all pairs, or of about `most` random pairs of each kind if there are more of them.

    Random pairs of a kind are drawn uniformly, and independently of each other, so that a pair can occur twice.
    """
    count = len(labels)
    if count * (count - 1) // 2 <= 2 * most:
        first, second = torch.triu_indices(count, count, offset=1)
        return first, second
    _, index, sizes = labels.unique(return_inverse=True, return_counts=True)
    by_class = index.argsort(stable=True)
    if int((sizes * (sizes - 1) // 2).sum()) <= most:
        same = torch.cat([torch.combinations(positions) for positions in by_class.split(sizes.tolist())])
    else:
        same = torch.stack(_random_same_pairs(by_class, sizes, most, generator), dim=1)
    different = [same.new_empty(0, 2)]
    while len(sizes) > 1 and sum(map(len, different)) < most:
        candidates = torch.randint(count, (most, 2), generator=generator)
        different.append(candidates[labels[candidates[:, 0]] != labels[candidates[:, 1]]])
    pairs = torch.cat([same, torch.cat(different)[:most]])
    return pairs[:, 0], pairs[:, 1]


def _draw_distinct(
    items: Tensor, labels: Tensor, same: bool, count: int, generator: torch.Generator
) -> list[tuple[int, int]]:
    """Draw distinct pairs of one kind: from the list of all pairs if it is short, by rejection otherwise."""
    size = len(items)
    if size <= MAX_ITEMS_TO_ENUMERATE:
        first, second = torch.triu_indices(size, size, offset=1)
        is_candidate = (labels[first] == labels[second]) == same
        candidates = is_candidate.nonzero().flatten()
        chosen = candidates[torch.randperm(len(candidates), generator=generator)[:count]]
        return list(zip(items[first[chosen]].tolist(), items[second[chosen]].tolist(), strict=True))
    # Rejection sampling. Two random items rarely have the same class, so the second item is drawn from the class of the
    # first.
    _, index, sizes = labels.unique(return_inverse=True, return_counts=True)
    by_class, starts = index.argsort(stable=True), sizes.cumsum(0) - sizes
    is_balanced = bool((sizes == sizes[0]).all())
    pairs: dict[tuple[int, int], None] = {}  # a set in the order of drawing
    while len(pairs) < count:
        if same and not is_balanced:
            first, second = _random_same_pairs(by_class, sizes, count, generator)
        else:
            first = torch.randint(size, (count,), generator=generator)
            second = torch.randint(size, (count,), generator=generator)
            if same:  # uniform over pairs, because all classes have the same size
                second = by_class[starts[index[first]] + second % sizes[0]]
        is_candidate = ((labels[first] == labels[second]) == same) & (first != second)
        for a, b in zip(first[is_candidate].tolist(), second[is_candidate].tolist(), strict=True):
            if len(pairs) < count:
                pairs[(min(a, b), max(a, b))] = None  # a pair and its reverse are equal
    return [(int(items[a]), int(items[b])) for a, b in pairs]


def _random_same_pairs(
    by_class: Tensor, sizes: Tensor, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw pairs of one class, all with the same probability and with replacement.

    Args:
        by_class: positions of all items, ordered by class.
        sizes: number of items of each class, in the same order.
        count: number of pairs.
        generator: source of the random numbers.
    """
    # Draw a class in proportion to its number of pairs, then two different items of it.
    classes = torch.multinomial((sizes * (sizes - 1)).double(), count, replacement=True, generator=generator)
    start, size = (sizes.cumsum(0) - sizes)[classes], sizes[classes]
    first = (torch.rand(count, generator=generator, dtype=torch.float64) * size).long()
    step = 1 + (torch.rand(count, generator=generator, dtype=torch.float64) * (size - 1)).long()
    return by_class[start + first], by_class[start + (first + step) % size]
