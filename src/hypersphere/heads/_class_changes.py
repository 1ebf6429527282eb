r"""Add, remove and merge classes of a trained head, together with the state of its optimiser.

Every change is described by the old class of each new class, −1 for a class without one. Parameters, numbers per class
and the tensors of an optimiser that have one row per row of a parameter follow this description. The rows come from the
storage of the head, which may be distributed over processes.

The functions check all arguments before they change anything. `AngularHead` documents them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, require
from hypersphere.heads._class_storage import LocalRows, rows_of_classes

if TYPE_CHECKING:
    from hypersphere.heads.head import AngularHead

__all__ = ["drop", "grow", "keep_centers", "merge"]

# State that an optimiser starts with another value than 0, and the option of its parameter group that has the value:
# the accumulator of Adagrad, and the step sizes of Rprop.
_INITIAL_STATE = {"sum": "initial_accumulator_value", "step_size": "lr"}
# State that an optimiser measures again if it is missing: the radius of `hypersphere.optim.Hyperball`.
_MEASURED_STATE = ("radius",)


class _Change(NamedTuple):
    """A change of the classes of a head."""

    source: Tensor  # (new classes,) the old class of each new class, or −1
    rows: LocalRows  # access to the rows of all classes
    optimizer: Any  # the optimiser of the head, or None


class _Merger(NamedTuple):
    """Two classes that become one. Rows are positions among the rows of all classes."""

    kept: Tensor  # (K,) the rows of the class that stays
    dropped: Tensor  # (K,) the rows of the class that is dropped
    vectors: Tensor | None = None  # (K, d) the class vectors of the class that stays; None for means


@torch.no_grad()
def grow(head: AngularHead, n: int, init: Tensor | None, optimizer: Any) -> Tensor:
    """Add classes; see `AngularHead.grow`."""
    require(is_integer(n, 1), "n", "an integer >= 1", n)
    shape = (n, head.in_features)
    if init is not None:
        is_matrix = isinstance(init, Tensor) and init.is_floating_point() and tuple(init.shape) == shape
        received = tuple(init.shape) if isinstance(init, Tensor) else init
        require(is_matrix, "init", f"features of shape {shape} or None", received)
        _numerics.require_finite_rows("init", init)
        # A class vector without a direction has no gradient, so it would never learn.
        require(bool((init != 0).any(1).all()), "init", "features other than zero", "a feature that is zero")
    _require_changeable(head, optimizer)  # before random vectors are drawn
    rows = head.class_storage.rows_after_change(head.num_classes + n)
    vectors = rows.draw(n, head.num_centers, head.in_features)
    if init is not None:
        vectors[:, 0] = init.detach().to(vectors)
    weight = _numerics.widen(head.weight.detach())
    norm = rows.mean(sphere.norm(weight))
    vectors = sphere.normalize(vectors.to(weight)) * norm
    old = torch.arange(head.num_classes)
    source = torch.cat([old, old.new_full((n,), -1)])
    _replace_classes(head, _Change(source, rows, optimizer), new_vectors=vectors.flatten(0, 1))
    return old


@torch.no_grad()
def drop(head: AngularHead, classes: Sequence[int] | Tensor, optimizer: Any) -> Tensor:
    """Remove classes; see `AngularHead.drop`."""
    is_listed = (
        isinstance(classes, (Sequence, Tensor)) and not isinstance(classes, str) and getattr(classes, "ndim", 1) == 1
    )
    require(is_listed, "classes", "a list or tensor of classes", classes)
    dropped = classes.tolist() if isinstance(classes, Tensor) else list(classes)
    fits = bool(dropped) and all(is_integer(label, 0, head.num_classes - 1) for label in dropped)
    require(fits and len(set(dropped)) == len(dropped), "classes", f"classes in [0, {head.num_classes})", dropped)
    most = head.num_classes - _fewest_classes(head)
    require(len(dropped) <= most, "classes", f"at most {most} of {head.num_classes} classes", len(dropped))
    is_kept = torch.ones(head.num_classes, dtype=torch.bool)
    is_kept[torch.tensor(dropped)] = False
    rows = head.class_storage.rows_after_change(head.num_classes - len(dropped))
    _replace_classes(head, _Change(is_kept.nonzero().flatten(), rows, optimizer))
    return (is_kept.cumsum(0) - 1).masked_fill(~is_kept, -1)


@torch.no_grad()
def merge(head: AngularHead, a: int, b: int, optimizer: Any) -> Tensor:
    """Merge two classes; see `AngularHead.merge`."""
    for name, value in (("a", a), ("b", b)):
        require(is_integer(value, 0, head.num_classes - 1), name, f"a class in [0, {head.num_classes})", value)
    require(a != b, "b", f"a class other than a={a}", b)
    fewest = _fewest_classes(head)
    require(head.num_classes > fewest, "b", f"a class of a head with more than {fewest} classes", b)
    rows = head.class_storage.rows_after_change(head.num_classes - 1)
    rows_a, rows_b = (rows_of_classes(torch.tensor([label]), head.num_centers) for label in (a, b))
    (norms_a, hats_a), (norms_b, hats_b) = (
        sphere.polar(_numerics.widen(rows.fetch(head.weight.detach(), positions))) for positions in (rows_a, rows_b)
    )
    partner = _greedy_matching(hats_a @ hats_b.mT)
    direction = sphere.normalize(hats_a + hats_b[partner])
    # Opposite vectors have no mean direction.
    direction = torch.where((direction == 0).all(1, keepdim=True), hats_a, direction)
    vectors = direction * (norms_a + norms_b[partner]) / 2
    is_kept = torch.arange(head.num_classes) != b
    merger = _Merger(rows_a, rows_b[partner.cpu()], vectors)
    _replace_classes(head, _Change(is_kept.nonzero().flatten(), rows, optimizer), merger=merger)
    new = is_kept.cumsum(0) - 1
    new[b] = new[a]
    return new


@torch.no_grad()
def keep_centers(head: AngularHead, dominant: Tensor, optimizer: Any) -> None:
    """Keep one centre per class; see `AngularHead.keep_dominant_centers`."""
    centers = head.num_centers
    accepted = f"{head.num_classes} centres in [0, {centers})"
    is_vector = isinstance(dominant, Tensor) and dominant.shape == (head.num_classes,)
    is_integral = is_vector and not dominant.is_floating_point() and not dominant.is_complex()
    require(is_integral, "dominant", accepted, dominant.shape if isinstance(dominant, Tensor) else dominant)
    fits = bool(((dominant >= 0) & (dominant < centers)).all())
    require(fits, "dominant", accepted, dominant.tolist())
    _require_changeable(head, optimizer)
    source = centers * torch.arange(head.num_classes) + dominant.cpu()
    change = _Change(source, head.class_storage.rows_after_change(len(source)), optimizer)
    _replace_parameter(head, "weight", change, per_class=1)
    head.num_centers = 1


def _greedy_matching(cosines: Tensor) -> Tensor:
    """Return a different column for each row, (K,): the free one with the largest cosine, row by row."""
    free, partner = cosines.clone(), []
    for row in range(len(free)):
        column = int(free[row].argmax())
        partner.append(column)
        free[:, column] = -torch.inf
    return torch.tensor(partner, device=cosines.device)


def _fewest_classes(head: AngularHead) -> int:
    """Return the smallest number of classes: the scale of AdaCos is √2·log(C−1), which must be positive."""
    return 3 if head.radius == "adaptive" else 2


def _require_changeable(head: AngularHead, optimizer: Any) -> None:
    """Raise a `ValueError` if the rows of a head cannot be replaced. Called before the first one is replaced."""
    is_plain = "weight" in head._parameters and not head.class_storage.is_fixed
    require(is_plain, "head", "one whose weight is a plain parameter", type(head).__name__)
    require(not [*head.children()], "head", "one without losses of other libraries", type(head).__name__)
    for name in ("weight", "bias"):
        parameter = head._parameters.get(name)
        if optimizer is None or parameter is None or not parameter.requires_grad:
            continue
        owners = _owners(optimizer, parameter)
        if not owners:
            raise ValueError(f"optimizer must have the parameters of the head, but lacks its {name}")
        # Its state is one vector of all parameters, and it holds references to the old ones.
        if any(isinstance(owner, torch.optim.LBFGS) for owner in owners):
            raise ValueError("optimizer must not be LBFGS, whose state does not follow rows; create a new one instead")


def _owners(optimizer: Any, parameter: Tensor) -> list[Any]:
    """Return the optimisers that have a parameter."""
    groups = ((owner, group) for owner in _optimizers(optimizer) for group in owner.param_groups)
    return list(dict.fromkeys(owner for owner, group in groups if any(p is parameter for p in group["params"])))


def _replace_classes(
    head: AngularHead, change: _Change, *, new_vectors: Tensor | None = None, merger: _Merger | None = None
) -> None:
    """Replace the classes of a head, or of the part of a head in this process.

    Args:
        head: the head.
        change: the new classes.
        new_vectors: the rows of all classes without an old class, in order.
        merger: two classes that are merged.
    """
    source, rows, optimizer = change
    _require_changeable(head, optimizer)
    _replace_parameter(head, "weight", change, head.num_centers, new_values=new_vectors, merger=merger)
    if head.bias is not None and not head.shares_bias:
        bias = rows.mean(head.bias.detach())
        classes = None
        if merger is not None:
            kept, dropped = (positions[:1] // head.num_centers for positions in (merger.kept, merger.dropped))
            classes = _Merger(kept, dropped)
        new_biases = bias.expand(int((source < 0).sum()))
        _replace_parameter(head, "bias", change, per_class=1, new_values=new_biases, merger=classes)
    # These are complete in every process.
    for name, default in head.class_buffers.items():
        values = getattr(head, name)
        if values is not None:
            chosen = source.to(values.device)
            changed = values[chosen.clamp_min(0)]
            changed[chosen < 0] = default
            setattr(head, name, changed)
    head.num_classes = len(source)
    head.class_storage = rows.storage


def _replace_parameter(
    head: nn.Module,
    name: str,
    change: _Change,
    per_class: int,
    *,
    new_values: Tensor | None = None,
    merger: _Merger | None = None,
) -> None:
    """Replace a parameter with `per_class` rows per class, and the state that an optimiser has for it."""
    source, rows, optimizer = change
    old = head._parameters[name]
    assert old is not None
    owners = _owners(optimizer, old)
    # Which rows of this process are new, and how many new classes other processes hold before them.
    classes = rows.new_classes(source)
    is_new = rows_of_classes(source[classes], per_class) < 0
    new_before = int((source[: classes.start] < 0).sum())
    values = _with_mean_rows(rows, old.detach(), merger)
    if merger is not None and merger.vectors is not None:
        rows.store_(values, merger.kept, merger.vectors)
    replaced = rows.take(values, source, per_class)
    if new_values is not None:
        first = new_before * per_class
        replaced[is_new.to(replaced.device)] = new_values[first : first + int(is_new.sum())].to(replaced)
    # A new parameter: graphs of earlier steps refer to the shape of the old one.
    new = nn.Parameter(replaced, requires_grad=old.requires_grad)
    setattr(head, name, new)
    for owner in owners:
        (group,) = (group for group in owner.param_groups if any(p is old for p in group["params"]))
        group["params"] = [new if p is old else p for p in group["params"]]
        state = owner.state.pop(old, None)
        if state is None:
            continue
        owner.state[new] = {}
        for key, value in sorted(state.items()):
            if key in _MEASURED_STATE:
                continue
            if _has_rows(value, old):
                followed = rows.take(_with_mean_rows(rows, value, merger), source, per_class)
                followed[is_new.to(followed.device)] = _initial_value(key, group)
                owner.state[new][key] = followed
            else:
                owner.state[new][key] = value


def _initial_value(key: str, group: dict[str, Any]) -> float:
    """Return the value with which an optimiser starts the state `key` of a new parameter."""
    option = _INITIAL_STATE.get(key)
    return float(group[option]) if option in group else 0.0


def _with_mean_rows(rows: LocalRows, values: Tensor, merger: _Merger | None) -> Tensor:
    """Return a copy of `values` in which the rows of the class that stays are the means of both classes."""
    values = values.clone()
    if merger is not None:
        total = rows.fetch(values, merger.kept) + rows.fetch(values, merger.dropped)
        rows.store_(values, merger.kept, total / 2 if total.is_floating_point() else total // 2)
    return values


def _has_rows(value: object, parameter: Tensor) -> bool:
    """Return True if a tensor of an optimiser has one row per row of its parameter, such as a momentum."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == len(parameter)


def _optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield the optimisers that an argument stands for: none, one, or those of `hypersphere.optim.Optimizers`."""
    if optimizer is None:
        return
    yield from getattr(optimizer, "optimizers", [optimizer])
