r"""Where the class vectors of a head are.

A head asks its storage for everything that involves classes which another process may hold. `LocalClasses` is the
storage of a head that holds all of its classes. `ShardedClasses` overrides it for a head whose classes are distributed
over processes: each process holds a range of classes, computes their terms and combines the terms of all processes, so
that every process has the terms of a head with all classes; `hypersphere._collectives` explains how gradients return.
`LocalRows` and `ShardedRows` give access to rows while classes are added or removed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hypersphere._collectives import Processes
from hypersphere._validation import require
from hypersphere.heads._score_functions import Negatives
from hypersphere.heads.fused_loss import ClassInputs, ClassTerms, ScoreRule, class_terms

__all__ = [
    "LocalClasses",
    "LocalRows",
    "ShardedClasses",
    "ShardedRows",
    "even_sizes",
    "numbered_blocks",
    "rows_of_classes",
]

# Classes are sampled in blocks with one seed each, so that they do not depend on how classes are distributed over
# processes. Blocks are much smaller than the share of one process, so few surplus numbers are drawn.
_SAMPLES_PER_SEED = 2**16


class LocalClasses:
    """All class vectors are in this process."""

    is_fixed = False
    """True if the class vectors are a buffer of the head that a `ShardedHead` holds as a parameter."""

    def terms(self, inputs: ClassInputs, rule: ScoreRule) -> ClassTerms:
        """Return the terms of all classes; `inputs` has the class vectors of this process."""
        return class_terms(inputs, rule)

    def target_vectors(self, weight: Tensor, labels: Tensor, centers: int) -> Tensor:
        """Return the class vectors (B, K, d) of labels; `weight` has the class vectors of this process."""
        return weight.unflatten(0, (len(weight) // centers, centers))[labels]

    def normal_noise(self, like: Tensor) -> Tensor:
        """Return standard normal numbers, the same in all processes."""
        return torch.randn_like(like)

    def rows_after_change(self, num_classes: int) -> LocalRows:
        """Return access to rows for a change that leaves `num_classes` classes."""
        return LocalRows(self)


class LocalRows:
    """Access to tensors with one row, or K rows, per class while classes are added or removed.

    Args:
        storage: the storage after the change.
    """

    def __init__(self, storage: LocalClasses) -> None:
        self.storage = storage

    def take(self, values: Tensor, source: Tensor, per_class: int) -> Tensor:
        """Return the new rows of this process: those of the old classes `source`, and zeros where it is −1.

        Args:
            values: the old rows of this process, `per_class` for each class.
            source: (new classes,) the old class of each new class of all processes, or −1.
            per_class: the number of rows of a class.
        """
        rows = values[rows_of_classes(source.to(values.device).clamp_min(0), per_class)]
        rows[rows_of_classes(source.to(values.device), per_class) < 0] = 0
        return rows

    def fetch(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return a copy of single rows, given by their position among the rows of all processes."""
        return values[rows.to(values.device)]

    def store_(self, values: Tensor, rows: Tensor, new: Tensor) -> None:
        """Overwrite single rows, given by their position among the rows of all processes."""
        values[rows.to(values.device)] = new.to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the rows of all processes."""
        return values.mean(0)

    def draw(self, *shape: int) -> Tensor:
        """Return standard normal numbers, the same in all processes."""
        return torch.randn(*shape)

    def new_classes(self, source: Tensor) -> slice:
        """Return the range of new classes that this process holds after the change."""
        return slice(0, len(source))


def rows_of_classes(classes: Tensor, per_class: int) -> Tensor:
    """Return the positions of the rows of classes; negative for the class −1.

    >>> rows_of_classes(torch.tensor([2, -1]), 3).tolist()
    [6, 7, 8, -3, -2, -1]
    """
    offsets = torch.arange(per_class, device=classes.device)
    return (per_class * classes.unsqueeze(1) + offsets).flatten()


# Classes that are distributed over processes -------------------------------------------------------------------------


class ShardedClasses(LocalClasses):
    """The storage of classes that are distributed over processes.

    In a training step with sampling only the sampled classes take part.

    Args:
        processes: the processes that hold classes.
        sizes: the number of classes of each process, in order.
        centers: the number of class vectors per class.
    """

    def __init__(self, processes: Processes, sizes: Sequence[int], centers: int = 1) -> None:
        accepted = f"{processes.size} positive numbers, the classes of each process"
        fits = len(sizes) == processes.size and all(size >= 1 for size in sizes)
        require(fits, "sizes", f"{accepted} (there may be no more processes than classes)", tuple(sizes))
        self.processes = processes
        self.sizes = tuple(sizes)
        self.centers = centers
        self.first = sum(sizes[: processes.rank])
        self.size = sizes[processes.rank]
        self.sampled: Tensor | None = None

    @property
    def classes(self) -> slice:
        """The range of classes of this process."""
        return slice(self.first, self.first + self.size)

    def sample_classes(self, labels: Tensor, fraction: float, seed: int, step: int) -> None:
        """Use the classes of the labels and a random fraction of the others, at least one, until `use_all_classes`.

        The random fraction is a function of seed, step and class, and the classes of the labels are those of the global
        batch, so neither depends on how classes are distributed. The exception is a process without any of them, which
        adds its first class.
        """
        generator = torch.Generator()
        is_sampled = torch.empty(self.size, dtype=torch.bool, device=generator.device)
        num_blocks = -(-sum(self.sizes) // _SAMPLES_PER_SEED)
        for index, part_of_block, part_of_range in numbered_blocks(self.classes, _SAMPLES_PER_SEED):
            generator.manual_seed((seed + step * num_blocks + index) % 2**63)
            uniform = torch.rand(_SAMPLES_PER_SEED, generator=generator, device=generator.device)[part_of_block]
            is_sampled[part_of_range] = uniform < fraction
        local = labels.to(is_sampled.device) - self.first
        is_sampled[local[(local >= 0) & (local < self.size)]] = True
        # A reduction over no classes is undefined.
        if not bool(is_sampled.any()):
            is_sampled[0] = True
        self.sampled = is_sampled.nonzero().flatten().to(labels.device)

    @torch.no_grad()
    def target_vectors(self, weight: Tensor, labels: Tensor, centers: int) -> Tensor:
        """Return the class vectors (B, K, d) of labels, each from the process that holds it, without gradient."""
        local = labels - self.first
        is_here = (local >= 0) & (local < self.size)
        vectors = super().target_vectors(weight, local.clamp(0, self.size - 1), centers)
        return self.processes.all_reduce_(vectors.masked_fill(~is_here[:, None, None], 0))

    def normal_noise(self, like: Tensor) -> Tensor:
        """Return the standard normal numbers of the first process. All draw, so that their generators stay in step."""
        noise = torch.randn_like(like)
        return self.processes.all_reduce_(noise if self.processes.rank == 0 else torch.zeros_like(noise))

    def use_all_classes(self) -> None:
        """End the use of sampled classes."""
        self.sampled = None

    def rows_after_change(self, num_classes: int) -> ShardedRows:
        """Return access to rows for a change that leaves `num_classes` classes, which are then distributed evenly."""
        size = self.processes.size
        require(num_classes >= size, "classes", f"at least {size}, one per process, after the change", num_classes)
        return ShardedRows(self, ShardedClasses(self.processes, even_sizes(num_classes, size), self.centers))

    def terms(self, inputs: ClassInputs, rule: ScoreRule) -> ClassTerms:
        """Return the terms of all classes; `w` and `bias` hold the local classes, `class_weights` all classes.

        They are always exact: `in_range` differs between processes, and if some of them repeated a call, the others
        would not take part in its collectives.
        """
        x, w, labels, bias, class_weights, counted, target_vectors = inputs
        local_labels = self._local_labels(labels)
        weight = self._sampled_rows(w, self.centers)
        shared_bias = bias if rule.shared_bias else None
        if rule.needs_energy:
            # Each class vector of the batch is held by one process; the others contribute zeros.
            rows = weight[local_labels.clamp_min(0)].masked_fill((local_labels < 0).unsqueeze(1), 0)
            target_vectors = self.processes.sum_parts(rows)
        # Global tensors that all processes use: their gradients are summed over processes.
        features, shared_bias, target_vectors = self.processes.share(x, shared_bias, target_vectors)
        assert features is not None
        local_inputs = ClassInputs(
            x=features,
            w=weight,
            labels=local_labels,
            bias=shared_bias if rule.shared_bias or bias is None else self._sampled_rows(bias),
            class_weights=None if class_weights is None else self._sampled_rows(class_weights[self.classes]),
            counted=counted,
            target_vectors=target_vectors,
        )
        local_rule = rule._replace(targets_present=False, exact=True)
        if rule.negatives is not None and rule.negatives.hard_count:
            local_rule = local_rule._replace(negatives=self._with_global_nearest(rule.negatives))
        part = class_terms(local_inputs, local_rule)
        # All terms with one number per sample travel together. Feature norms come from the first process.
        feature_norm = part.feature_norm
        if feature_norm is not None and self.processes.rank > 0:
            feature_norm = torch.zeros_like(feature_norm)
        per_sample = (part.others, part.weighted_sum, part.target, feature_norm, part.target_norm, part.target_bias)
        local_terms = torch.stack([term for term in per_sample if term is not None], 1)
        # The derivative of logsumexp is undefined if no process has another class, so −∞ becomes a finite number.
        lowest = torch.finfo(x.dtype).min
        terms = self.processes.reduce_terms(
            local_terms, lambda parts: rule.reduction.across(parts.clamp_min(lowest)), rule.reduction.part_derivative
        )
        # The other terms are zero except in the process that holds the target, or sums over classes.
        others, *sums_of_terms = terms.unbind(1)
        sums = iter(sums_of_terms)
        weighted_sum, target, feature_norm, target_norm, target_bias = (
            None if t is None else next(sums) for t in per_sample[1:]
        )
        assert target is not None
        direction, energy = part.target_direction, part.energy
        return ClassTerms(
            others=others,
            weighted_sum=weighted_sum,
            target=target,
            feature_norm=feature_norm,
            target_norm=target_norm,
            energy=None if energy is None else self.processes.sum_parts(energy) * self._energy_scale(w),
            in_range=torch.ones((), dtype=torch.bool, device=x.device),
            target_bias=target_bias,
            target_direction=None if direction is None else self.processes.sum_parts(direction),
        )

    def _with_global_nearest(self, negatives: Negatives) -> Negatives:
        """Return the changes of other classes, of which the k nearest are those of all processes."""

        def nearest(cosines: Tensor, count: int) -> tuple[Tensor, Tensor]:
            # A class among the k nearest of all processes is among the k nearest of its own process, so k cosines per
            # sample and process are enough. Processes with fewer than k classes fill up with −∞.
            local, columns = cosines.topk(min(count, cosines.shape[1]), dim=1)
            padded = F.pad(local, (0, count - local.shape[1]), value=-torch.inf)
            candidates = torch.cat(self.processes.all_gather(padded), 1)
            nearest_of_all = candidates.topk(count, dim=1).indices
            is_near = torch.zeros_like(candidates, dtype=torch.bool).scatter_(1, nearest_of_all, True)
            first = self.processes.rank * count
            return columns, is_near[:, first : first + local.shape[1]]

        return dataclasses.replace(negatives, nearest=nearest)

    def _energy_scale(self, w: Tensor) -> float:
        """Return (C−1)/(n−1) with n sampled classes: the head divides by C−1, but the sum has only n−1 terms."""
        if self.sampled is None:
            return 1.0
        num_sampled = int(self.processes.all_reduce_(torch.tensor(len(self.sampled), device=w.device)))
        return (sum(self.sizes) - 1) / max(num_sampled - 1, 1)

    def _local_labels(self, labels: Tensor) -> Tensor:
        """Return the position of each label among the local classes in use, −1 if it is not among them."""
        local = labels - self.first
        if self.sampled is None:
            return local.masked_fill((local < 0) | (local >= self.size), -1)
        # `sampled` is sorted. A label that is not in it gets a position with another class.
        position = torch.searchsorted(self.sampled, local).clamp_max(len(self.sampled) - 1)
        return position.masked_fill(self.sampled[position] != local, -1)

    def _sampled_rows(self, values: Tensor, per_class: int = 1) -> Tensor:
        """Return the rows of the classes in use; sampled rows have a sparse gradient."""
        if self.sampled is None:
            return values
        rows = self.sampled if per_class == 1 else rows_of_classes(self.sampled, per_class)
        return _SparseRows.apply(values, rows)


class ShardedRows(LocalRows):
    """Access to the rows of all classes while they move between processes.

    Args:
        old: the distribution before the change.
        storage: the distribution after it.
    """

    def __init__(self, old: ShardedClasses, storage: ShardedClasses) -> None:
        super().__init__(storage)
        self.old, self.new, self.processes = old, storage, old.processes

    def take(self, values: Tensor, source: Tensor, per_class: int) -> Tensor:
        """Return the new rows of this process, received from the processes that hold them."""
        starts = [sum(self.new.sizes[:rank]) for rank in range(self.processes.size)]
        sources_by_rank = [source[start : start + size] for start, size in zip(starts, self.new.sizes, strict=True)]
        old_ends = torch.tensor(self.old.sizes).cumsum(0)
        sent = []
        for classes in sources_by_rank:
            is_here = (classes >= self.old.first) & (classes < self.old.first + self.old.size)
            sent.append(rows_of_classes(classes[is_here] - self.old.first, per_class))
        local_source = sources_by_rank[self.processes.rank]
        owners = torch.searchsorted(old_ends, local_source.clamp_min(0), right=True).masked_fill(local_source < 0, -1)
        received_counts = [per_class * int((owners == rank).sum()) for rank in range(self.processes.size)]
        received = self.processes.exchange_rows(
            values[torch.cat(sent).to(values.device)], [len(rows) for rows in sent], received_counts
        )
        # Rows arrive ordered by their owner, and in the order of the new classes for each owner.
        positions = [(owners == rank).nonzero().flatten() for rank in range(self.processes.size)]
        result = values.new_zeros(per_class * len(local_source), *values.shape[1:])
        result[rows_of_classes(torch.cat(positions), per_class).to(values.device)] = received
        return result

    def fetch(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return rows, given by their position among the rows of all processes."""
        local, is_here = self._local(values, rows)
        local_rows = values[local.clamp(0, len(values) - 1)]
        return self.processes.all_reduce_(torch.where(is_here.view(-1, *[1] * (values.ndim - 1)), local_rows, 0))

    def store_(self, values: Tensor, rows: Tensor, new: Tensor) -> None:
        """Overwrite the rows that this process holds."""
        local, is_here = self._local(values, rows)
        values[local[is_here]] = new[is_here].to(values.dtype)

    def _local(self, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        first = self.old.first * (len(values) // self.old.size)
        local = rows.to(values.device) - first
        return local, (local >= 0) & (local < len(values))

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the rows of all processes."""
        total = self.processes.all_reduce_(values.sum(0))
        return total / (sum(self.old.sizes) * (len(values) // self.old.size))

    def draw(self, *shape: int) -> Tensor:
        """Return standard normal numbers, the same in all processes."""
        seed = self.processes.all_gather_objects(int(torch.randint(2**62, ())))[0]
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=generator.device)

    def new_classes(self, source: Tensor) -> slice:
        """Return the range of new classes of this process."""
        return self.new.classes


def even_sizes(num_classes: int, processes: int) -> list[int]:
    """Return the number of classes of each process; the first ones hold one more if they cannot be equal.

    >>> even_sizes(7, 3)
    [3, 2, 2]
    """
    size, remainder = divmod(num_classes, processes)
    return [size + (rank < remainder) for rank in range(processes)]


def numbered_blocks(classes: slice, size: int) -> Iterator[tuple[int, slice, slice]]:
    """Cut a range of classes at multiples of `size`.

    Yields:
        The index of each block, the part of the block that is in the range, and its position within the range.

    Example:
        >>> list(numbered_blocks(slice(3, 6), 4))
        [(0, slice(3, 4, None), slice(0, 1, None)), (1, slice(0, 2, None), slice(1, 3, None))]
    """
    for index in range(classes.start // size, -(-classes.stop // size)):
        base = index * size
        start, stop = max(classes.start, base), min(classes.stop, base + size)
        yield index, slice(start - base, stop - base), slice(start - classes.start, stop - classes.start)


class _SparseRows(torch.autograd.Function):
    """Select rows of a parameter. The gradient is a sparse tensor with these rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor) -> Tensor:
        ctx.rows, ctx.shape = rows, values.shape
        return values.index_select(0, rows)  # takes half the time of values[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.sparse_coo_tensor(ctx.rows[None], grad, ctx.shape, is_coalesced=True, check_invariants=False), None
