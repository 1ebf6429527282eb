"""Verification pairs: two positions in a dataset, whether they show the same, and the fold the pair belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hypersphere._validation import require
from hypersphere.data.errors import DamagedData, MissingData
from hypersphere.data.labelled import as_indices

LONGEST_FOLD = 6


@dataclass(frozen=True, eq=False)
class Pairs:
    """M pairs: int64 positions `first` and `second`, bool `same`, int64 `fold`; all of shape (M,).

    >>> pairs = Pairs(torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([True, False]), torch.tensor([0, 1]))
    >>> rest, held_out = pairs.split(fold=1)
    >>> len(pairs), pairs.folds, held_out.first
    (2, 2, tensor([2]))
    """

    first: Tensor
    second: Tensor
    same: Tensor
    fold: Tensor

    def __post_init__(self) -> None:
        wanted = {"first": torch.int64, "second": torch.int64, "same": torch.bool, "fold": torch.int64}
        for name, dtype in wanted.items():
            value: Tensor = getattr(self, name)
            if value.dtype != dtype or value.shape != (len(self.first),):
                raise ValueError(f"{name} must be {dtype} ({len(self.first)},), not {value.dtype} {tuple(value.shape)}")
        if len(self) and min(int(self.first.min()), int(self.second.min()), int(self.fold.min())) < 0:
            raise ValueError("first, second and fold must be 0 or more, not negative")

    def __len__(self) -> int:
        return len(self.first)

    def __repr__(self) -> str:
        return f"Pairs({len(self)} pairs, {int(self.same.sum())} of them same, {self.folds} folds)"

    @property
    def folds(self) -> int:
        """How many folds there are."""
        return int(self.fold.max()) + 1 if len(self) else 0

    def subset(self, indices: Tensor | Sequence[int] | Sequence[bool]) -> Pairs:
        """The pairs at these positions, or under this mask."""
        index = as_indices(indices, len(self))
        return Pairs(self.first[index], self.second[index], self.same[index], self.fold[index])

    def split(self, fold: int) -> tuple[Pairs, Pairs]:
        """The pairs of all other folds, and those of this fold."""
        require(0 <= fold < self.folds, "fold", f"in 0..{self.folds - 1}", fold)
        return self.subset(self.fold != fold), self.subset(self.fold == fold)


def as_pairs(rows: Sequence[tuple[int, int, bool, int]]) -> Pairs:
    """Pairs from rows of (first, second, same, fold)."""
    columns = torch.tensor([[int(value) for value in row] for row in rows], dtype=torch.int64).reshape(-1, 4)
    first, second, same, fold = columns.unbind(dim=1)
    return Pairs(first.contiguous(), second.contiguous(), same.bool(), fold.contiguous())


def read_pairs(file: str | Path, names: Sequence[str]) -> Pairs:
    """Read your own pairs: lines of `name name 0|1`, with an optional fold 0, 1, ... (six digits at most) at the end.

    Fields are separated by commas, tabs or spaces; empty lines and lines that begin with # are skipped.

    Args:
        file: the text file, in UTF-8.
        names: the names of the dataset (`LabelledImages.names`); positions refer to them.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise MissingData(f"{path} not found. Give a text file with lines of: name name 0|1")
    place = {name: number for number, name in enumerate(names)}
    rows = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        separator = next((mark for mark in (",", "\t") if mark in line), None)
        fields = [field.strip() for field in line.strip().split(separator)]
        folds_fit = all(fold.isdecimal() and len(fold) <= LONGEST_FOLD for fold in fields[3:])
        if len(fields) not in (3, 4) or fields[2] not in ("0", "1") or not folds_fit:
            raise DamagedData(f"{path} line {number} must be `name name 0|1 [fold]`, not {line!r}")
        for name in fields[:2]:
            if name not in place:
                raise DamagedData(f"{path} line {number} must name two of the {len(place)} images, not {name!r}")
        fold = int(fields[3]) if len(fields) == 4 else 0
        rows.append((place[fields[0]], place[fields[1]], fields[2] == "1", fold))
    return as_pairs(rows)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise DamagedData(
            f"{path} line {number} must be UTF-8 text, not {error.object[error.start : error.end]!r}"
        ) from error


def draw_pairs(labels: Tensor, *, folds: int = 10, per_fold: int = 300, seed: int = 0) -> Pairs:
    """Draw a verification protocol like that of LFW: folds of classes, each with as many same as different pairs.

    No class is in two folds and no pair comes twice; the same arguments give the same pairs.

    Args:
        labels: integers (N,).
        folds: number of folds.
        per_fold: same pairs a fold, and different pairs a fold.
        seed: of the random draw.
    """
    require(labels.ndim == 1, "labels", "one row of integers", tuple(labels.shape))
    require(folds >= 1, "folds", "at least 1", folds)
    require(per_fold >= 1, "per_fold", "at least 1", per_fold)
    generator = torch.Generator().manual_seed(seed)
    kinds, labels = torch.unique(labels.to(generator.device), return_inverse=True)  # now 0, 1, ... whatever they were
    rows: list[tuple[int, int, bool, int]] = []
    for fold, members in enumerate(torch.randperm(len(kinds), generator=generator).tensor_split(folds)):
        items = torch.isin(labels, members).nonzero().flatten()
        here = labels[items]
        counts = torch.bincount(here) if len(here) else torch.zeros(1, dtype=torch.int64)
        same_pairs = int((counts * (counts - 1) // 2).sum())
        different_pairs = len(items) * (len(items) - 1) // 2 - same_pairs
        if min(same_pairs, different_pairs) < per_fold:
            raise ValueError(
                f"per_fold must be at most the pairs there are, not {per_fold}: fold {fold} has "
                f"{same_pairs} same and {different_pairs} different pairs"
            )
        for same in (True, False):
            rows.extend((a, b, same, fold) for a, b in _draw(items, here, same, per_fold, generator))
    return as_pairs(rows)


def _draw(items: Tensor, labels: Tensor, same: bool, count: int, generator: torch.Generator) -> list[tuple[int, int]]:
    """Distinct pairs of one kind, by listing them all when there are few and by rejection when there are many."""
    size = len(items)
    if size <= 2000:
        first, second = torch.triu_indices(size, size, offset=1)
        fit = (labels[first] == labels[second]) == same
        chosen = fit.nonzero().flatten()
        chosen = chosen[torch.randperm(len(chosen), generator=generator)[:count]]
        return list(zip(items[first[chosen]].tolist(), items[second[chosen]].tolist(), strict=True))
    order = torch.argsort(labels, stable=True)
    counts = torch.bincount(labels)
    starts = torch.cumsum(counts, dim=0) - counts
    drawn: dict[tuple[int, int], None] = {}
    while len(drawn) < count:
        first = torch.randint(size, (count,), generator=generator)
        second = torch.randint(size, (count,), generator=generator)
        if same:
            second = order[starts[labels[first]] + second % counts[labels[first]]]
        fit = ((labels[first] == labels[second]) == same) & (first != second)
        for a, b in zip(first[fit].tolist(), second[fit].tolist(), strict=True):
            if len(drawn) < count:
                drawn[(min(a, b), max(a, b))] = None
    return [(int(items[a]), int(items[b])) for a, b in drawn]
