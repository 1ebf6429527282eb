r"""A head whose class vectors are distributed over the processes of a `torch.distributed` group.

`ShardedHead` keeps a copy of the head that has the class vectors of this process. The `class_storage` of this copy is
`ShardedClasses`, which computes the terms of the local classes and combines them over processes. Everything else
(margins, schedules, losses, penalties) is the unchanged code of the head.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hypersphere import _numerics
from hypersphere._collectives import Processes, error_message
from hypersphere._validation import is_number, require
from hypersphere.functions._recomputation import PassHistory
from hypersphere.heads._checks import (
    NonFiniteScoresError,
    int64_labels,
    require_features,
    require_labels,
    without_ignored,
)
from hypersphere.heads._class_storage import ShardedClasses, even_sizes, numbered_blocks
from hypersphere.heads._state import call_fingerprint
from hypersphere.heads.head import AngularHead

__all__ = ["ShardedHead"]

# Initial class vectors are drawn in blocks of the logical weight with one seed each, so that they do not depend on how
# classes are distributed over processes.
_INITIAL_ROWS_PER_SEED = 1024
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ShardedHead(nn.Module):
    r"""A head with its classes distributed over processes: each process holds some rows of the logical (C, d) weight.

    Features and labels of all processes are gathered, and the reductions over classes run over all processes. Every
    process returns the loss of the global batch, and its gradients are those of a single process with all classes. A
    process may have fewer samples than others, or none. All processes must call the same methods in the same order.

    The parameters of the head differ between processes and must not be passed to `DistributedDataParallel`: wrap only
    the backbone. If a process ends, the others raise at their next collective: immediately if the connection breaks, or
    after the timeout given to `torch.distributed.init_process_group` if it stops responding.

    Every process takes its rows from the head it was given. Settings are compared and must be equal, and so must the
    class vectors of a `FixedHead`; learned class vectors are not compared. Create the head with the same seed or load
    the same state everywhere if it should equal the head of a single process.

    Classes that are not sampled (`sample`) have no row in the sparse gradient. They are not updated by optimizers that
    use nothing but the gradient: `torch.optim.SGD` without momentum and weight decay, and `torch.optim.SparseAdam`. SGD
    with momentum also moves rows that were sampled in earlier steps. Most other optimizers reject sparse gradients.
    `hypersphere.optim.RowSGD` and `RowAdamW` apply momentum and weight decay to the sampled rows only.

    There is no `logits`: another loss would need the scores of all classes with their gradients in every process, which
    is what this class avoids. Use `forward`, or `scores` without gradients.
    There is no `label_angles` and no `keep_dominant_centers` either: load `full_state_dict` into a head of one process.

    `full_state_dict` and `load_full_state_dict` create checkpoints that fit any number of processes. `state_dict`
    describes the part of this process only, and so does the state of an optimizer.

    Args:
        head: any head of this library; it is not modified. If it is on the meta device, no process ever holds all class
            vectors: blocks of rows are drawn from the global seed of the first process, with the same values for any
            number of processes.
        group: a process group; None for the default group, or for this process alone if there is none.
        sizes: the number of classes of each process; None for an even distribution.
        sample: a fraction of the classes to train with, drawn again in each training step. The classes of the labels
            are always added. Loss and gradients contain these classes only. None for all classes.
        backbone: how gradients of the backbone are combined over processes: "averaged", as `DistributedDataParallel`
            does, so that features get their gradient times the number of processes; or "summed".

    Example:
        >>> from hypersphere.heads import arcface
        >>> head = ShardedHead(arcface(8, 3))
        >>> head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).shape
        torch.Size([])
    """

    sampling: Tensor
    """The state of the sampling of classes, [seed, step] in int64; a buffer that exists only with `sample`."""

    def __init__(
        self,
        head: AngularHead,
        *,
        group: dist.ProcessGroup | None = None,
        sizes: Sequence[int] | None = None,
        sample: float | None = None,
        backbone: str = "averaged",
    ) -> None:
        super().__init__()
        self.processes = Processes(group)
        self.processes.raise_everywhere(error_message(lambda: _check_plan(head, sizes, sample, backbone)))
        shared_bias = head.bias is not None and head.shares_bias
        # A bias is compared even if it is missing: either all processes have one, or none. Learned class vectors may
        # differ between processes; fixed ones are settings, and their rows must belong to one configuration.
        learned = ["weight"] if isinstance(head.weight, nn.Parameter) else []
        plan = fingerprint(head, learned if shared_bias else [*learned, "bias"])
        plan |= {"sizes": repr(sizes and tuple(sizes)), "sample": repr(sample), "backbone": backbone}
        different = differences(self.processes.all_gather_objects(plan))
        require(not different, "head", "made with the same arguments in all processes", different)
        if sizes is None:
            sizes = even_sizes(head.num_classes, self.processes.size)
        storage = ShardedClasses(self.processes, sizes, head.num_centers)
        self.sharded_parameters = ("weight",) if shared_bias or head.bias is None else ("weight", "bias")
        # All processes draw, so that their generators stay in step, and use the numbers of the first.
        seed, sampling_seed = self.processes.all_gather_objects(torch.randint(2**62, (2,)).tolist())[0]
        self.sample = sample
        self.backbone = backbone
        self.head = self._local_part(head, storage, seed)
        if sample is not None:
            self.register_buffer("sampling", torch.tensor([sampling_seed, 0]))
            self._sampling_passes = PassHistory("the classes of the next step")

    @property
    def in_features(self) -> int:
        """d, the length of a feature."""
        return self.head.in_features

    @property
    def num_classes(self) -> int:
        """C, the number of classes of all processes."""
        return self.head.num_classes

    @property
    def weight(self) -> Tensor:
        """The class vectors of this process, those of `classes`."""
        return self.head.weight

    @property
    def rows(self) -> slice:
        """The rows of the logical weight that this process holds: those of `classes`, one or several per class."""
        return _slice_of_rows(self.classes, self.head.num_centers)

    @property
    def first(self) -> int:
        """The first class of this process."""
        return self._storage.first

    @property
    def classes(self) -> slice:
        """The range of classes of this process."""
        return self._storage.classes

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of classes of each process."""
        return self._storage.sizes

    @property
    def _storage(self) -> ShardedClasses:
        storage = self.head.class_storage
        assert isinstance(storage, ShardedClasses)
        return storage

    def forward(self, x: Float[Tensor, "batch dim"], y: Integer[Tensor, " batch"]) -> Float[Tensor, "*samples"]:
        """Return the loss of the global batch; with reduction "none", the losses of this process's samples.

        Raises:
            ValueError: in every process, if the batch of any process is invalid; the message names process and row.
            NonFiniteScoresError: a `ValueError` for a class vector that is not finite or a score that overflows.
        """
        features, labels, counts = self._gathered(x, y)
        sampling = self._sampling_of_pass(features, labels)
        if self.sample is not None and sampling is not None:
            self._storage.sample_classes(labels, self.sample, *sampling.tolist())
        failure = None
        try:
            loss = self.head(features, labels)
            is_finite = bool(torch.isfinite(loss.detach()).all())
        except ValueError as error:
            failure, is_finite = error, False
        finally:
            self._storage.use_all_classes()  # `scores` and evaluation use all classes
        if not is_finite:
            # The class vectors of another process may be the reason. All processes must raise, or none.
            message = error_message(lambda: _numerics.require_finite_rows("weight", self.weight))
            self.processes.raise_everywhere(message, NonFiniteScoresError)
            if failure is not None:
                raise failure
        if sampling is not None and _numerics.can_update_state(features):
            self._sampling_passes.record(call_fingerprint(features, labels), (sampling,))
            self.sampling[1] += 1
        return self.processes.local_rows(loss, counts) if self.head.reduction == "none" else loss

    def _sampling_of_pass(self, features: Tensor, labels: Tensor) -> Tensor | None:
        """Return a copy of the state of the sampling, or the state that a repeated pass used; None without sampling."""
        if self.sample is None or not self.training:
            return None
        sampling = self.sampling.clone()
        if _numerics.in_backward():  # activation checkpointing repeats a pass
            (state,) = self._sampling_passes.recall(call_fingerprint(features, labels), (sampling,))
            return state
        return sampling

    def advance_with(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Let the schedules count the steps of `optimizer`, as `AngularHead.advance_with` does, in every process."""
        return self.head.advance_with(optimizer)

    def grow(
        self,
        n: int,
        *,
        init: Float[Tensor, "n dim"] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Int[Tensor, " classes"]:
        """Add classes as `AngularHead.grow` does. All processes must call it, with the same arguments.

        After a change of the classes they are distributed evenly: rows and their optimiser state move to other
        processes. Random class vectors are those of the first process.
        """
        return self.head.grow(n, init=init, optimizer=optimizer)

    def drop(
        self, classes: Sequence[int] | Int[Tensor, " dropped"], *, optimizer: torch.optim.Optimizer | None = None
    ) -> Int[Tensor, " classes"]:
        """Remove classes as `AngularHead.drop` does; see `grow`."""
        return self.head.drop(classes, optimizer=optimizer)

    def merge(self, a: int, b: int, *, optimizer: torch.optim.Optimizer | None = None) -> Int[Tensor, " classes"]:
        """Merge two classes as `AngularHead.merge` does; see `grow`."""
        return self.head.merge(a, b, optimizer=optimizer)

    @torch.no_grad()
    def scores(self, x: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch classes"]:
        """Return the scores without margin of this process's features for all classes, without gradient."""
        features, _, counts = self._gathered(x, None)
        # If the class vectors of one process are not finite, all must raise. Otherwise they would wait for each other.
        columns, message = features, None
        try:
            columns = self.head.scores(features)
        except NonFiniteScoresError as error:
            message = str(error)
        self.processes.raise_everywhere(message, NonFiniteScoresError)
        return self.processes.exchange_columns(columns, counts, self.sizes)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the state of the logical head on the first process and an empty dict on the others.

        All processes must call it. The state loads into any number of processes, and into the original head (with
        `strict=True` if nothing is sampled).

        Example:
            >>> import tempfile
            >>> from hypersphere.heads import arcface
            >>> head, folder = ShardedHead(arcface(8, 3)), tempfile.TemporaryDirectory()
            >>> state = head.full_state_dict()  # in every process
            >>> if head.processes.rank == 0:
            ...     torch.save(state, f"{folder.name}/head.pt")
            >>> dist.barrier() if dist.is_initialized() else None
            >>> head.load_full_state_dict(torch.load(f"{folder.name}/head.pt", mmap=True))  # in every process
        """
        state: dict[str, Tensor] = {}
        for name, value in self.head.state_dict().items():
            if name in self.sharded_parameters:
                per_class = self.head.num_centers if name == "weight" else 1
                full = self.processes.gather_at_first(value, [per_class * size for size in self.sizes])
            else:
                full = value.cpu().clone()
            if full is not None:
                state[name] = full
        if self.sample is not None:
            state["sampling"] = self.sampling.cpu().clone()
        return state if self.processes.rank == 0 else {}

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this process's part of a `full_state_dict` or of the state dict of the original head, in all processes.

        Raises:
            ValueError: if a name is missing, unknown, or has another shape.
        """
        current = self.head.state_dict()
        accepted = f"a dict of {sorted(current)} in every process"
        if not state:
            accepted += " (full_state_dict gives it to the first alone: save it there, and load the file everywhere)"
        require(current.keys() == state.keys() - {"sampling"}, "state", accepted, sorted(state))
        part = {}
        for name, value in current.items():
            is_sharded = name in self.sharded_parameters
            per_class = self.head.num_centers if name == "weight" else 1
            shape = (per_class * self.head.num_classes, *value.shape[1:]) if is_sharded else tuple(value.shape)
            loaded_shape = tuple(state[name].shape)
            require(loaded_shape == shape, f"state[{name!r}]", f"of shape {shape}", loaded_shape)
            part[name] = state[name][_slice_of_rows(self.classes, per_class)] if is_sharded else state[name]
        self.head.load_state_dict(part)
        if self.sample is not None and "sampling" in state:
            self.sampling.copy_(state["sampling"])

    def extra_repr(self) -> str:
        """Show the classes of this process."""
        return f"classes={self.classes.start}:{self.classes.stop}, sample={self.sample!r}, backbone={self.backbone!r}"

    @torch.no_grad()
    def _local_part(self, head: AngularHead, storage: ShardedClasses, seed: int) -> AngularHead:
        """Return a copy of the head with only the classes of this process."""
        device = torch.get_default_device() if head.weight.is_meta else None
        # `deepcopy` takes these tensors from its memo, so the full weight is never copied.
        memo: dict[int, Any] = {}
        for name in self.sharded_parameters:
            tensor = getattr(head, name)
            rows = tensor[_slice_of_rows(storage.classes, head.num_centers if name == "weight" else 1)]
            rows = torch.empty_like(rows, device=device) if rows.is_meta else rows.clone()
            memo[id(tensor)] = nn.Parameter(rows, requires_grad=tensor.requires_grad)
        local = copy.deepcopy(head, memo)
        # Fixed class vectors are a buffer of the head. Buffers are expected to be equal in all processes, and training
        # loops copy those of the first process to the others, so here they are a parameter without gradient.
        local.weight = memo[id(head.weight)]
        storage.is_fixed = not isinstance(head.weight, nn.Parameter)
        local.class_storage = storage
        if head.weight.is_meta:
            _initialize(local, storage.classes, seed)
        return local

    def _gathered(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor, list[int]]:
        """Return features and labels of all processes and the number of samples of each. All raise if one must.

        Features of ignored samples are zero, as they may be NaN. Without labels, every sample counts.
        """
        # Check before the first large collective: a process that raised alone would leave the others waiting.
        message = error_message(lambda: self._check(x, y))
        header = [0, 0, 0, 1] if message else [len(x), _FLOATS.index(x.dtype), x.requires_grad, 0]
        device = x.device if isinstance(x, Tensor) else self.weight.device
        headers = torch.stack(self.processes.all_gather(torch.tensor(header, device=device))).tolist()
        if any(has_message for *_, has_message in headers):
            self.processes.raise_everywhere(message)
        counts, dtypes, need_grad, _ = (list(column) for column in zip(*headers, strict=True))
        names = [str(_FLOATS[index]) for index in dtypes]
        require(len(set(dtypes)) == 1, "x", "of one type in all processes", names)
        if any(need_grad) and not x.requires_grad:
            x = x.detach().requires_grad_()  # the backward pass contains collectives, so all processes must run it
        # `DistributedDataParallel` divides gradients by the number of processes, but the loss is already global.
        factor = self.processes.size if self.backbone == "averaged" else 1
        if y is None:
            labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        else:
            labels = y.long()
            x = without_ignored(x, labels, self.head.ignore_index)
        features = self.processes.gather_rows(x, counts, factor)
        return features, self.processes.concatenate_rows(labels, counts), counts

    def _check(self, x: Tensor, y: Tensor | None) -> None:
        require_features(x, self.head.in_features)
        require(x.dtype in _FLOATS, "x", f"of one of {', '.join(map(str, _FLOATS))}", x.dtype)
        if y is None:
            _numerics.require_finite_rows("x", x)
            return
        labels = int64_labels(y, len(x))
        _numerics.require_finite_rows("x", without_ignored(x, labels, self.head.ignore_index))
        require_labels(labels, self.head.num_classes, self.head.ignore_index)


def _check_plan(head: AngularHead, sizes: Sequence[int] | None, sample: float | None, backbone: str) -> None:
    require(isinstance(head, AngularHead), "head", "a head of this library", head)
    accepted = "a head whose loss is computed from the terms of its classes"
    require(type(head).forward is AngularHead.forward, "head", accepted, type(head).__name__)
    is_plain = "weight" in head._parameters or "weight" in head._buffers
    require(is_plain, "head", "one whose class vectors are a plain parameter or buffer", type(head).__name__)
    has_values = isinstance(head.weight, nn.Parameter) or not head.weight.is_meta
    require(has_values, "head", "one whose fixed class vectors are not on the meta device", type(head).__name__)
    has_energy = head.energy_weight > 0 and head.num_centers > 1
    require(not has_energy, "energy_weight", "0 in a sharded head with several centres", head.energy_weight)
    learned = [name for name, _ in head.named_parameters() if name not in ("weight", "bias")]
    require(not learned, "head", "without learned parameters other than weight and bias", learned)
    if sizes is not None:
        fits = all(isinstance(size, int) for size in sizes) and sum(sizes) == head.num_classes
        require(fits, "sizes", f"integers that add up to the {head.num_classes} classes", tuple(sizes))
    if sample is not None:
        require(is_number(sample, 0, 1) and sample > 0, "sample", "a number in (0, 1] or None", sample)
        require(head.label_smoothing == 0, "sample", "None with label smoothing, which needs all classes", sample)
    require(backbone in ("averaged", "summed"), "backbone", "'averaged' or 'summed'", backbone)


def _initialize(local: AngularHead, classes: slice, seed: int) -> None:
    """Initialise class vectors with `reset_parameters`, in blocks of the logical weight with one seed each."""
    weight = local.weight
    local._apply(lambda t: torch.empty_like(t, device=weight.device) if t.is_meta else t)
    local_rows = _slice_of_rows(classes, local.num_centers)
    # `reset_parameters` initialises `local.weight`, so let it be one block after the other.
    with torch.random.fork_rng(devices=[]):
        for index, part_of_block, part_of_range in numbered_blocks(local_rows, _INITIAL_ROWS_PER_SEED):
            torch.default_generator.manual_seed((seed + index) % 2**63)
            rows = torch.empty(_INITIAL_ROWS_PER_SEED, local.in_features, dtype=weight.dtype, device="cpu")
            local.weight = nn.Parameter(rows)
            local.reset_parameters()
            weight[part_of_range] = local.weight[part_of_block].to(weight.device)
    local.weight = weight


def _slice_of_rows(classes: slice, per_class: int) -> slice:
    """Return the range of rows of a range of classes."""
    return slice(classes.start * per_class, classes.stop * per_class)


# Comparison of settings between processes ----------------------------------------------------------------------------


def fingerprint(head: nn.Module, sharded: Collection[str]) -> dict[str, str]:
    """Return all settings and unsharded tensors of a head as text that does not depend on the process.

    Parameters named in `sharded` may differ; only their dtype is included. Callables are described by their name.

    >>> fingerprint(nn.Linear(2, 3), ["weight", "bias"])["out_features"]
    '3'
    """
    values = {name: value for name, value in vars(head).items() if not name.startswith("_") and name != "training"}
    values |= {name: getattr(head, name) for name in ("angular", "margin") if hasattr(head, name)}
    values |= dict(head.named_children()) | dict(head.named_buffers()) | dict(head.named_parameters())
    described = {name: _describe(value) for name, value in values.items() if name not in sharded}
    dtypes = {name: str(getattr(values[name], "dtype", None)) for name in sharded}
    return {"head": _qualified_name(type(head)), **described, **dtypes}


def differences(fingerprints: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the entries that are not equal in all fingerprints, with the value of each.

    >>> differences([{"m": "0.1", "s": "64"}, {"m": "0.5", "s": "64"}])
    {'m': ['0.1', '0.5']}
    """
    names = dict.fromkeys(name for entries in fingerprints for name in entries)
    values = {name: [entries.get(name, "absent") for entries in fingerprints] for name in names}
    return {name: received for name, received in values.items() if len(set(received)) > 1}


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return _describe_tensor(value.detach())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{field.name}={_describe(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, functools.partial):
        return f"partial({_describe(value.func)}, {value.args}, {value.keywords})"
    if hasattr(value, "__qualname__"):
        return _qualified_name(value)
    # The default repr contains an address, which differs between processes.
    return _qualified_name(type(value)) if type(value).__repr__ is object.__repr__ else repr(value)


def _describe_tensor(value: Tensor) -> str:
    kind = f"{value.dtype} {tuple(value.shape)}"
    if value.is_meta:
        return kind
    if value.numel() == 1:
        return f"{kind} {value.item()}"
    content = value.to("cpu").contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{kind} {hashlib.sha256(content).hexdigest()[:16]}"


def _qualified_name(value: object) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', value)}"
