r"""Add, remove and merge classes of a trained head, together with the state of its optimiser.

Every change is described by the old class of each new class, −1 for a class without one. Parameters, numbers per class
and the tensors of an optimiser that have one row per row of a parameter follow this description. `ClassRows` does so
for a head that holds all classes; `ShardedHead` passes rows between processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, is_number, require
from hypersphere.heads._centers import LabelAngles, label_angles
from hypersphere.heads._checks import check_features, check_labels, require_labels

__all__ = ["ChangingClasses", "ClassRows", "drop", "grow", "keep_centers", "merge"]


class ChangingClasses(nn.Module):
    """The methods of a head that change its classes, and those that find the centres to keep."""

    weight: Tensor
    bias: Tensor | None
    class_weights: Tensor | None
    class_margins: Tensor | None
    in_features: int
    num_classes: int
    num_centers: int
    ignore_index: int
    shares_bias: ClassVar[bool]
    class_buffers: ClassVar[dict[str, float]] = {"class_weights": 1.0, "class_margins": 1.0}
    """Buffers with one entry or row per class, with the value of new classes."""

    def grow(
        self,
        n: int,
        *,
        init: Float[Tensor, "n dim"] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Int[Tensor, " classes"]:
        r"""Add `n` classes, with the indices C to C + n − 1. The other classes keep their indices.

        New class vectors have the mean norm of the others. New biases are their mean; new classes have class weight 1
        and the full margin.

        Args:
            n: the number of new classes, at least 1.
            init: (n, d) directions of the new class vectors, such as mean features of the new classes; None for random
                ones. With several centres it is the first centre of each class; the others are random.
            optimizer: an optimiser that has the parameters of the head, of torch or of this library. Its state follows
                the rows of the weight; new rows start with zeros. Without it, create a new optimiser afterwards: the
                head has new parameters.

        Returns:
            The new index of each old class.

        Example:
            >>> from hypersphere.heads import AngularHead
            >>> head = AngularHead(8, 3)
            >>> head.grow(2, init=torch.randn(2, 8))
            tensor([0, 1, 2])
            >>> head.num_classes, head.weight.shape
            (5, torch.Size([5, 8]))
        """
        return grow(self, n, init, optimizer)

    def drop(
        self, classes: Sequence[int] | Int[Tensor, " dropped"], *, optimizer: torch.optim.Optimizer | None = None
    ) -> Int[Tensor, " classes"]:
        """Remove classes. The other classes keep their order, and their indices have no gaps.

        Args:
            classes: the indices of the classes to remove. At least two classes must remain.
            optimizer: as in `grow`.

        Returns:
            The new index of each old class, −1 for a removed class: ``y = head.drop([3])[y]`` relabels samples.

        Example:
            >>> from hypersphere.heads import AngularHead
            >>> AngularHead(8, 4).drop([1])
            tensor([ 0, -1,  1,  2])
        """
        return drop(self, classes, optimizer)

    def merge(self, a: int, b: int, *, optimizer: torch.optim.Optimizer | None = None) -> Int[Tensor, " classes"]:
        r"""Merge class `b` into class `a`, for example two labels of one person, and remove `b` as `drop` does.

        The new class vector has the mean direction of both (ŵ_a + ŵ_b, normalised) and their mean norm. With several
        centres, each centre of `a` is merged with the nearest free centre of `b`. The bias and the state of the
        optimiser are means. Class weight and margin are those of `a`.

        Args:
            a: a class.
            b: another class.
            optimizer: as in `grow`.

        Returns:
            The new index of each old class. `a` and `b` have the same.

        Example:
            >>> from hypersphere.heads import AngularHead
            >>> AngularHead(8, 4).merge(0, 2)
            tensor([0, 1, 0, 2])
        """
        return merge(self, a, b, optimizer)

    def label_angles(
        self,
        x: Float[Tensor, "samples dim"],
        y: Integer[Tensor, " samples"],
        *,
        max_angle: float = math.radians(75),
    ) -> LabelAngles:
        r"""Find the dominant centre of each class, and the samples that are far from it (Sub-center ArcFace).

        The dominant centre of a class is the one that is nearest to most of its samples. Samples at a larger angle than
        `max_angle` to it probably have a wrong label; Deng et al. (ECCV 2020) train a head with K = 3, remove them and
        train again with the dominant centres (`keep_dominant_centers`).

        Args:
            x: features.
            y: labels. Samples with the label `ignore_index` do not count.
            max_angle: the threshold in radians.

        Example:
            >>> from hypersphere.heads import AngularHead
            >>> head = AngularHead(2, 2, centers=2)
            >>> with torch.no_grad():
            ...     _ = head.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
            >>> x = torch.tensor([[3.0, 0.2], [2.0, 0.1], [-1.0, 0.1], [0.1, 2.0]])
            >>> found = head.label_angles(x, torch.tensor([0, 0, 0, 1]))
            >>> found.dominant, found.exceeds
            (tensor([0, 0]), tensor([False, False,  True, False]))
        """
        check_features(x, self.in_features)
        y = check_labels(y, len(x))
        require_labels(y, self.num_classes, self.ignore_index)
        require(is_number(max_angle, 0, math.pi), "max_angle", "an angle in [0, pi]", max_angle)
        x = x.masked_fill((y == self.ignore_index).unsqueeze(1), 0)  # ignored rows may be NaN
        _numerics.require_finite_rows("x", x)
        y = y.masked_fill(y == self.ignore_index, -1)
        return label_angles(self.weight, self.num_centers, x, y, max_angle)

    def keep_dominant_centers(
        self, dominant: Integer[Tensor, " classes"], *, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Keep one centre per class, such as `label_angles(x, y).dominant`; the head then has `centers=1`.

        Args:
            dominant: (C,) the centre of each class to keep, in [0, K).
            optimizer: as in `grow`.
        """
        keep_centers(self, dominant, optimizer)


class ClassRows:
    """Access to tensors with one row, or K rows, per class, in a process that holds all classes."""

    def take(self, values: Tensor, source: Tensor, per_class: int) -> Tensor:
        """Return new rows: those of the old classes `source`, and zeros where it is −1.

        Args:
            values: old rows, `per_class` for each class.
            source: (new classes,) the old class of each new class, or −1.
            per_class: the number of rows of a class.
        """
        rows = values[class_rows(source.to(values.device).clamp_min(0), per_class)]
        rows[class_rows(source.to(values.device), per_class) < 0] = 0
        return rows

    def fetch(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return a copy of single rows, given by their position among all rows."""
        return values[rows.to(values.device)]

    def store_(self, values: Tensor, rows: Tensor, new: Tensor) -> None:
        """Overwrite single rows, given by their position among all rows."""
        values[rows.to(values.device)] = new.to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over all rows."""
        return values.mean(0)

    def draw(self, *shape: int) -> Tensor:
        """Return standard normal numbers from the global generator."""
        return torch.randn(*shape)

    def new_classes(self, source: Tensor) -> slice:
        """Return the range of new classes that this process holds after a change."""
        return slice(0, len(source))


def class_rows(classes: Tensor, per_class: int) -> Tensor:
    """Return the positions of the rows of classes; negative for the class −1.

    >>> class_rows(torch.tensor([2, -1]), 3).tolist()
    [6, 7, 8, -3, -2, -1]
    """
    offsets = torch.arange(per_class, device=classes.device)
    return (per_class * classes.unsqueeze(1) + offsets).flatten()


@torch.no_grad()
def grow(head: ChangingClasses, n: int, init: Tensor | None, optimizer: Any, rows: ClassRows | None = None) -> Tensor:
    """Add classes; see `AngularHead.grow`."""
    rows = rows or ClassRows()
    require(is_integer(n, 1), "n", "an integer >= 1", n)
    shape = (n, head.in_features)
    if init is not None:
        is_matrix = isinstance(init, Tensor) and init.is_floating_point() and tuple(init.shape) == shape
        given = tuple(init.shape) if isinstance(init, Tensor) else init
        require(is_matrix, "init", f"features of shape {shape} or None", given)
        _numerics.require_finite_rows("init", init)
        # A class vector without a direction has no gradient, so it would never learn.
        require(bool((init != 0).any(1).all()), "init", "features other than zero", "a feature that is zero")
    vectors = rows.draw(n, head.num_centers, head.in_features)
    if init is not None:
        vectors[:, 0] = init.detach().to(vectors)
    weight = _numerics.widen(head.weight.detach())
    norm = rows.mean(sphere.norm(weight))
    vectors = sphere.normalize(vectors.to(weight)) * norm
    old = torch.arange(head.num_classes)
    source = torch.cat([old, old.new_full((n,), -1)])
    _replace_classes(head, source, rows, optimizer, new_vectors=vectors.flatten(0, 1))
    return old


@torch.no_grad()
def drop(
    head: ChangingClasses, classes: Sequence[int] | Tensor, optimizer: Any, rows: ClassRows | None = None
) -> Tensor:
    """Remove classes; see `AngularHead.drop`."""
    is_listed = (
        isinstance(classes, (Sequence, Tensor)) and not isinstance(classes, str) and getattr(classes, "ndim", 1) == 1
    )
    require(is_listed, "classes", "a list or tensor of classes", classes)
    dropped = classes.tolist() if isinstance(classes, Tensor) else list(classes)
    fits = bool(dropped) and all(is_integer(one, 0, head.num_classes - 1) for one in dropped)
    require(fits and len(set(dropped)) == len(dropped), "classes", f"classes in [0, {head.num_classes})", dropped)
    most = head.num_classes - _fewest_classes(head)
    require(len(dropped) <= most, "classes", f"at most {most} of {head.num_classes} classes", len(dropped))
    is_kept = torch.ones(head.num_classes, dtype=torch.bool)
    is_kept[torch.tensor(dropped)] = False
    _replace_classes(head, is_kept.nonzero().flatten(), rows or ClassRows(), optimizer)
    return (is_kept.cumsum(0) - 1).masked_fill(~is_kept, -1)


@torch.no_grad()
def merge(head: ChangingClasses, a: int, b: int, optimizer: Any, rows: ClassRows | None = None) -> Tensor:
    """Merge two classes; see `AngularHead.merge`."""
    rows = rows or ClassRows()
    for name, value in (("a", a), ("b", b)):
        require(is_integer(value, 0, head.num_classes - 1), name, f"a class in [0, {head.num_classes})", value)
    require(a != b, "b", f"a class other than a={a}", b)
    fewest = _fewest_classes(head)
    require(head.num_classes > fewest, "b", f"a class of a head with more than {fewest} classes", b)
    of_a, of_b = (class_rows(torch.tensor([one]), head.num_centers) for one in (a, b))
    (norms_a, hats_a), (norms_b, hats_b) = (
        sphere.polar(_numerics.widen(rows.fetch(head.weight.detach(), one))) for one in (of_a, of_b)
    )
    partner = _greedy_matching(hats_a @ hats_b.mT)
    direction = sphere.normalize(hats_a + hats_b[partner])
    # Opposite vectors have no mean direction.
    direction = torch.where((direction == 0).all(1, keepdim=True), hats_a, direction)
    vectors = direction * (norms_a + norms_b[partner]) / 2
    is_kept = torch.arange(head.num_classes) != b
    _replace_classes(
        head, is_kept.nonzero().flatten(), rows, optimizer, merged=(of_a, of_b[partner.cpu()]), merged_vectors=vectors
    )
    new = is_kept.cumsum(0) - 1
    new[b] = new[a]
    return new


@torch.no_grad()
def keep_centers(head: ChangingClasses, dominant: Tensor, optimizer: Any) -> None:
    """Keep one centre per class; see `AngularHead.keep_dominant_centers`."""
    centers = head.num_centers
    is_vector = isinstance(dominant, Tensor) and dominant.shape == (head.num_classes,) and not dominant.is_complex()
    accepted = f"{head.num_classes} centres in [0, {centers})"
    is_vector = is_vector and not dominant.is_floating_point()
    require(is_vector, "dominant", accepted, dominant.shape if isinstance(dominant, Tensor) else dominant)
    fits = bool(((dominant >= 0) & (dominant < centers)).all())
    require(fits, "dominant", accepted, dominant.tolist() if len(dominant) < 10 else "others")
    _require_changeable(head, optimizer)
    source = centers * torch.arange(head.num_classes) + dominant.cpu()
    _replace_parameter(head, "weight", ClassRows(), source, 1, optimizer)
    head.num_centers = 1


def _greedy_matching(cosines: Tensor) -> Tensor:
    """Return a different column for each row, (K,): the free one with the largest cosine, row by row."""
    free, partner = cosines.clone(), []
    for row in range(len(free)):
        column = int(free[row].argmax())
        partner.append(column)
        free[:, column] = -torch.inf
    return torch.tensor(partner, device=cosines.device)


def _fewest_classes(head: ChangingClasses) -> int:
    """Return the smallest number of classes: the scale of AdaCos is √2·log(C−1), which must be positive."""
    return 3 if getattr(head, "radius", None) == "adaptive" else 2


def _require_changeable(head: ChangingClasses, optimizer: Any) -> None:
    """Raise a `ValueError` if the rows of a head cannot be replaced. Called before the first one is replaced."""
    require("weight" in head._parameters, "head", "one whose weight is a plain parameter", type(head).__name__)
    require(not [*head.children()], "head", "one without losses of other libraries", type(head).__name__)
    for name in ("weight", "bias"):
        parameter = head._parameters.get(name)
        if optimizer is not None and parameter is not None and parameter.requires_grad:
            is_owned = bool(_owners(optimizer, parameter))
            require(is_owned, "optimizer", "one with the parameters of the head", f"one without its {name}")


def _owners(optimizer: Any, parameter: Tensor) -> list[Any]:
    """Return the optimisers that have a parameter."""
    groups = ((one, group) for one in _optimizers(optimizer) for group in one.param_groups)
    return list(dict.fromkeys(one for one, group in groups if any(p is parameter for p in group["params"])))


def _replace_classes(
    head: ChangingClasses,
    source: Tensor,
    rows: ClassRows,
    optimizer: Any,
    *,
    new_vectors: Tensor | None = None,
    merged: tuple[Tensor, Tensor] | None = None,
    merged_vectors: Tensor | None = None,
) -> None:
    """Replace the classes of a head by those of `source`.

    Args:
        head: a head, or the part of a head in this process.
        source: (new classes,) the old class of each new class, or −1.
        rows: access to the rows of all classes.
        optimizer: the optimiser of the head, or None.
        new_vectors: the rows of all classes without an old class, in order.
        merged: old rows whose state is merged, (K,) of the class that stays and (K,) of the one that is dropped.
        merged_vectors: the class vectors (K, d) of the class that stays.
    """
    _require_changeable(head, optimizer)
    _replace_parameter(head, "weight", rows, source, head.num_centers, optimizer, merged, merged_vectors, new_vectors)
    if head.bias is not None and not head.shares_bias:
        bias = rows.mean(head.bias.detach()).expand(int((source < 0).sum()))
        classes = None if merged is None else (merged[0][:1] // head.num_centers, merged[1][:1] // head.num_centers)
        _replace_parameter(head, "bias", rows, source, 1, optimizer, classes, None, bias)
    # These are complete in every process.
    for name, new in head.class_buffers.items():
        values = getattr(head, name)
        if values is not None:
            chosen = source.to(values.device)
            rows_of_classes = values[chosen.clamp_min(0)]
            rows_of_classes[chosen < 0] = new
            setattr(head, name, rows_of_classes)
    head.num_classes = len(source)


def _replace_parameter(
    head: nn.Module,
    name: str,
    rows: ClassRows,
    source: Tensor,
    per_class: int,
    optimizer: Any,
    merged: tuple[Tensor, Tensor] | None = None,
    merged_values: Tensor | None = None,
    new_values: Tensor | None = None,
) -> None:
    """Replace a parameter and the state that an optimiser has for it; see `_replace_classes`."""
    old = head._parameters[name]
    assert old is not None
    owners = _owners(optimizer, old)
    values = _merged(rows, old.detach(), merged)
    if merged is not None and merged_values is not None:
        rows.store_(values, merged[0], merged_values)
    taken = rows.take(values, source, per_class)
    if new_values is not None:
        # The rows of this process among the new ones.
        mine = source[rows.new_classes(source)]
        before = int((source[: rows.new_classes(source).start] < 0).sum())
        count = int((mine < 0).sum()) * per_class
        part = new_values[before * per_class : before * per_class + count]
        taken[(class_rows(mine, per_class) < 0).to(taken.device)] = part.to(taken)
    # A new parameter: graphs of earlier steps refer to the shape of the old one.
    new = nn.Parameter(taken, requires_grad=old.requires_grad)
    setattr(head, name, new)
    for one in owners:
        for group in one.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        state = one.state.pop(old, None)
        if state is not None:
            one.state[new] = {
                key: rows.take(_merged(rows, value, merged), source, per_class) if _has_rows(value, old) else value
                for key, value in sorted(state.items())
                if key != "radius"  # of `hypersphere.optim.Hyperball`, which measures it again
            }


def _merged(rows: ClassRows, values: Tensor, merged: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return a copy of `values` in which the rows of a class are the means of its rows and those of another one."""
    values = values.clone()
    if merged is not None:
        first, second = (rows.fetch(values, one) for one in merged)
        total = first + second
        rows.store_(values, merged[0], total / 2 if total.is_floating_point() else total // 2)
    return values


def _has_rows(value: object, parameter: Tensor) -> bool:
    """Return True if a tensor of an optimiser has one row per row of its parameter, such as a momentum."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == len(parameter)


def _optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield the optimisers that an argument stands for: none, one, or those of `hypersphere.optim.Optimizers`."""
    if optimizer is None:
        return
    yield from getattr(optimizer, "optimizers", [optimizer])
