r"""A head whose class vectors are distributed over the processes of a `torch.distributed` group.

`ShardedHead` keeps a copy of the head that owns the class vectors of this process, and replaces its `compute_terms`
by `_ShardedClassTerms`, which computes the terms of the local classes and combines them over processes. Everything else
(margins, schedules, losses, penalties) is the unchanged code of the head.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from hypersphere import _numerics
from hypersphere._validation import is_number, require
from hypersphere.functions._recomputation import PassHistory
from hypersphere.heads import _class_changes
from hypersphere.heads._checks import check_features, check_labels, require_labels
from hypersphere.heads._collectives import Processes, problem_of
from hypersphere.heads.fused_loss import ClassInputs, ClassTerms, ScoreRule, class_terms
from hypersphere.heads.head import AngularHead, NonFiniteScoresError

__all__ = ["ShardedHead"]

# Random numbers are drawn in blocks of the logical weight with one seed each, so that they do not depend on how classes
# are distributed over processes. A block is small compared with the part of a process.
_INITIAL_ROWS_PER_SEED = 1024
_SAMPLES_PER_SEED = 2**16
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ShardedHead(nn.Module):
    r"""A head with its classes distributed over processes: each process holds some rows of the logical (C, d) weight.

    Features and labels of all processes are gathered, and the reductions over classes run over all processes. Every
    process returns the loss of the global batch, and its gradients are those of a single process with all classes. A
    process may have fewer samples than others, or none. All processes must call the same methods in the same order.

    The parameters of the head differ between processes and must not be passed to `DistributedDataParallel`: wrap only
    the backbone. If a process ends, the others raise at their next collective: immediately if the connection breaks, or
    after the timeout given to `torch.distributed.init_process_group` if it stops responding.

    Every process takes its rows from the head it was given. Settings are compared and must be equal; class vectors are
    not compared. Create the head with the same seed or load the same state everywhere if it should equal the head of a
    single process.

    Classes that are not sampled (`sample`) have no row in the sparse gradient. They are not updated by optimizers that
    use nothing but the gradient: `torch.optim.SGD` without momentum and weight decay, and `torch.optim.SparseAdam`. SGD
    with momentum also moves rows that were sampled in earlier steps. Most other optimizers reject sparse gradients.

    There is no `logits`: another loss would need the scores of all classes with their gradients in every process, which
    is what this class avoids. Use `forward`, or `scores` without gradients.

    `full_state_dict` and `load_full_state_dict` create checkpoints that fit any number of processes. `state_dict`
    describes the part of this process only, and so does the state of an optimizer.

    Args:
        head: any head of this library; it is not modified. If it is on the meta device, no process ever holds all class
            vectors: blocks of rows are drawn from the global seed of the first process, with the same values for any
            number of processes.
        group: a process group; None for the default group, or for this process alone if there is none.
        sizes: the number of classes of each process; None for an even distribution.
        sample: a fraction of the negative classes to train with, drawn again in each training step. Loss and gradients
            then contain these and the positive classes only. None for all classes.
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
        self.processes.raise_any(problem_of(lambda: _check_plan(head, sizes, sample, backbone)))
        shared_bias = head.bias is not None and head.shares_bias
        # A bias is compared even if it is missing: either all processes have one, or none.
        plan = fingerprint(head, ["weight"] if shared_bias else ["weight", "bias"])
        plan |= {"sizes": repr(sizes and tuple(sizes)), "sample": repr(sample), "backbone": backbone}
        different = differences(self.processes.all_gather_objects(plan))
        require(not different, "head", "made with the same arguments in all processes", different)
        if sizes is None:
            sizes = _even_sizes(head.num_classes, self.processes.size)
        self._terms = _ShardedClassTerms(self.processes, sizes, head.num_centers)
        self.sharded_parameters = ("weight",) if shared_bias or head.bias is None else ("weight", "bias")
        # All processes draw, so that their generators stay in step, and use the numbers of the first.
        seed, sampling_seed = self.processes.all_gather_objects(torch.randint(2**62, (2,)).tolist())[0]
        self.in_features: int = head.in_features
        self.num_classes: int = head.num_classes
        self.sample = sample
        self.backbone = backbone
        self.head = self._local_part(head, seed)
        if sample is not None:
            self.register_buffer("sampling", torch.tensor([sampling_seed, 0]))
            self._sampling_passes = PassHistory("the classes of the next step")

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
        return self._terms.first

    @property
    def classes(self) -> slice:
        """The range of classes of this process."""
        return self._terms.classes

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of classes of each process."""
        return self._terms.sizes

    def forward(self, x: Float[Tensor, "batch dim"], y: Integer[Tensor, " batch"]) -> Float[Tensor, "*samples"]:
        """Return the loss of the global batch; with reduction "none", the losses of this process's samples.

        Raises:
            ValueError: in every process, if the batch of any process is invalid; the message names process and row.
            NonFiniteScoresError: a `ValueError` for a class vector that is not finite or a score that overflows.
        """
        features, labels, counts = self._gathered(x, y)
        sampling = self._sampling_of_pass(features, labels)
        if self.sample is not None and sampling is not None:
            self._terms.sample_classes(labels, self.sample, *sampling.tolist())
        failure = None
        try:
            loss = self.head(features, labels)
            is_finite = bool(torch.isfinite(loss.detach()).all())
        except ValueError as error:
            failure, is_finite = error, False
        finally:
            self._terms.use_all_classes()  # `scores` and evaluation use all classes
        if not is_finite:
            # The class vectors of another process may be the reason. All processes must raise, or none.
            problem = problem_of(lambda: _numerics.require_finite_rows("weight", self.weight))
            self.processes.raise_any(problem, NonFiniteScoresError)
            if failure is not None:
                raise failure
        if sampling is not None and _numerics.can_update_state(features):
            self._sampling_passes.record(self.head._fingerprint(features, labels), (sampling,))
            self.sampling[1] += 1
        return self.processes.local_rows(loss, counts) if self.head.reduction == "none" else loss

    def _sampling_of_pass(self, features: Tensor, labels: Tensor) -> Tensor | None:
        """Return a copy of the state of the sampling, or the state that a repeated pass used; None without sampling."""
        if self.sample is None or not self.training:
            return None
        sampling = self.sampling.clone()
        if _numerics.in_backward():  # activation checkpointing repeats a pass
            (state,) = self._sampling_passes.recall(self.head._fingerprint(features, labels), (sampling,))
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
        return self._change(lambda rows: _class_changes.grow(self.head, n, init, optimizer, rows), self.num_classes + n)

    def drop(
        self, classes: Sequence[int] | Int[Tensor, " dropped"], *, optimizer: torch.optim.Optimizer | None = None
    ) -> Int[Tensor, " classes"]:
        """Remove classes as `AngularHead.drop` does; see `grow`."""
        count = self.num_classes - len(classes)
        return self._change(lambda rows: _class_changes.drop(self.head, classes, optimizer, rows), count)

    def merge(self, a: int, b: int, *, optimizer: torch.optim.Optimizer | None = None) -> Int[Tensor, " classes"]:
        """Merge two classes as `AngularHead.merge` does; see `grow`."""
        return self._change(lambda rows: _class_changes.merge(self.head, a, b, optimizer, rows), self.num_classes - 1)

    def _change(self, change: Callable[[_class_changes.ClassRows], Tensor], num_classes: int) -> Tensor:
        """Apply a change that leaves `num_classes` classes, and distribute them evenly."""
        size = self.processes.size
        require(num_classes >= size, "classes", f"at least {size}, one per process, after the change", num_classes)
        terms = _ShardedClassTerms(self.processes, _even_sizes(num_classes, size), self.head.num_centers)
        result = change(_ShardedClassRows(self._terms, terms, self.weight.device))
        self._terms = self.head.compute_terms = terms  # type: ignore[method-assign]
        self.head.target_vectors = functools.partial(terms.target_vectors, self.head)  # type: ignore[method-assign]
        self.num_classes = self.head.num_classes
        return result

    @torch.no_grad()
    def scores(self, x: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch classes"]:
        """Return the scores without margin of this process's features for all classes, without gradient."""
        features, _, counts = self._gathered(x, torch.zeros(len(x), dtype=torch.int64, device=x.device))
        # If the class vectors of one process are not finite, all must raise. Otherwise they would wait for each other.
        columns, problem = features, None
        try:
            columns = self.head.scores(features)
        except NonFiniteScoresError as error:
            problem = str(error)
        self.processes.raise_any(problem, NonFiniteScoresError)
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
            given = tuple(state[name].shape)
            require(given == shape, f"state[{name!r}]", f"of shape {shape}", given)
            part[name] = state[name][_slice_of_rows(self.classes, per_class)] if is_sharded else state[name]
        self.head.load_state_dict(part)
        if self.sample is not None and "sampling" in state:
            self.sampling.copy_(state["sampling"])

    def extra_repr(self) -> str:
        """Show the classes of this process."""
        return f"classes={self.classes.start}:{self.classes.stop}, sample={self.sample!r}, backbone={self.backbone!r}"

    @torch.no_grad()
    def _local_part(self, head: AngularHead, seed: int) -> AngularHead:
        """Return a copy of the head with only the classes of this process."""
        sharded = {name: p for name, p in head.named_parameters() if name in self.sharded_parameters}
        device = torch.get_default_device() if head.weight.is_meta else None
        # `deepcopy` takes these parameters from its memo, so the full weight is never copied.
        memo: dict[int, Any] = {}
        for name, parameter in sharded.items():
            rows = parameter[_slice_of_rows(self.classes, head.num_centers if name == "weight" else 1)]
            rows = torch.empty_like(rows, device=device) if rows.is_meta else rows.clone()
            memo[id(parameter)] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
        local = copy.deepcopy(head, memo)
        local.compute_terms = self._terms  # type: ignore[method-assign]  # of this copy only
        local.target_vectors = functools.partial(self._terms.target_vectors, local)  # type: ignore[method-assign]
        local.normal_noise = self._terms.normal_noise  # type: ignore[method-assign]
        if head.weight.is_meta:
            self._initialize(local, seed)
        return local

    def _initialize(self, local: AngularHead, seed: int) -> None:
        """Initialise class vectors with `reset_parameters`, in blocks of the logical weight with one seed each."""
        weight = local.weight
        local._apply(lambda t: torch.empty_like(t, device=weight.device) if t.is_meta else t)
        # `reset_parameters` initialises `local.weight`, so let it be one block after the other.
        with torch.random.fork_rng(devices=[]):
            for number, block, here in numbered_blocks(
                _slice_of_rows(self.classes, local.num_centers), _INITIAL_ROWS_PER_SEED
            ):
                torch.default_generator.manual_seed((seed + number) % 2**63)
                rows = torch.empty(_INITIAL_ROWS_PER_SEED, local.in_features, dtype=weight.dtype, device="cpu")
                local.weight = nn.Parameter(rows)
                local.reset_parameters()
                weight[here] = local.weight[block].to(weight.device)
        local.weight = weight

    def _gathered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Return features and labels of all processes and the number of samples of each. All raise if one must."""
        # Check before the first large collective: a process that raised alone would leave the others waiting.
        problem = problem_of(lambda: self._check(x, y))
        header = [0, 0, 0, 1] if problem else [len(x), _FLOATS.index(x.dtype), x.requires_grad, 0]
        headers = torch.stack(self.processes.all_gather(torch.tensor(header, device=x.device))).tolist()
        if any(has_problem for *_, has_problem in headers):
            self.processes.raise_any(problem)
        counts, dtypes, need_grad, _ = (list(column) for column in zip(*headers, strict=True))
        names = [str(_FLOATS[index]) for index in dtypes]
        require(len(set(dtypes)) == 1, "x", "of one type in all processes", names)
        if any(need_grad) and not x.requires_grad:
            x = x.detach().requires_grad_()  # the backward pass contains collectives, so all processes must run it
        # `DistributedDataParallel` divides gradients by the number of processes, but the loss is already global.
        factor = self.processes.size if self.backbone == "averaged" else 1
        features = self.processes.gather_rows(x, counts, factor)
        return features, self.processes.concatenate_rows(y.long(), counts), counts

    def _check(self, x: Tensor, y: Tensor) -> None:
        check_features(x, self.head.in_features)
        require(x.dtype in _FLOATS, "x", f"of one of {', '.join(map(str, _FLOATS))}", x.dtype)
        _numerics.require_finite_rows("x", x)
        require_labels(check_labels(y, len(x)), self.head.num_classes, self.head.ignore_index)


def _check_plan(head: AngularHead, sizes: Sequence[int] | None, sample: float | None, backbone: str) -> None:
    require(isinstance(head, AngularHead), "head", "a head of this library", head)
    accepted = "a head whose loss is computed from the terms of its classes"
    inherits = all(getattr(type(head), name) is getattr(AngularHead, name) for name in ("forward", "compute_terms"))
    require(inherits, "head", accepted, type(head).__name__)
    require("weight" in dict(head.named_parameters()), "head", "one whose class vectors are learned", head)
    is_local = head.hard_negatives == 0
    require(
        is_local, "hard_negatives", "0 in a sharded head, whose classes are not in one process", head.hard_negatives
    )
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


def _even_sizes(num_classes: int, processes: int) -> list[int]:
    """Return the number of classes of each process; the first ones hold one more if they cannot be equal."""
    each, rest = divmod(num_classes, processes)
    return [each + (rank < rest) for rank in range(processes)]


def _slice_of_rows(classes: slice, per_class: int) -> slice:
    """Return the range of rows of a range of classes."""
    return slice(classes.start * per_class, classes.stop * per_class)


# The terms of classes that are distributed over processes ------------------------------------------------------------


class _ShardedClassTerms:
    """`class_terms` for distributed classes: compute the terms of the local classes and combine those of all processes.

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

        Whether a class is sampled depends only on seed, step and class, not on how classes are distributed.
        """
        generator = torch.Generator()
        is_sampled = torch.empty(self.size, dtype=torch.bool, device=generator.device)
        num_blocks = -(-sum(self.sizes) // _SAMPLES_PER_SEED)
        for number, block, here in numbered_blocks(self.classes, _SAMPLES_PER_SEED):
            generator.manual_seed((seed + step * num_blocks + number) % 2**63)
            uniform = torch.rand(_SAMPLES_PER_SEED, generator=generator, device=generator.device)[block]
            is_sampled[here] = uniform < fraction
        local = labels.to(is_sampled.device) - self.first
        is_sampled[local[(local >= 0) & (local < self.size)]] = True
        # A reduction over no classes is undefined.
        if not bool(is_sampled.any()):
            is_sampled[0] = True
        self.sampled = is_sampled.nonzero().flatten().to(labels.device)

    @torch.no_grad()
    def target_vectors(self, head: AngularHead, labels: Tensor) -> Tensor:
        """Return the class vectors (B, K, d) of labels, each from the process that holds it, without gradient."""
        local = labels - self.first
        is_here = (local >= 0) & (local < self.size)
        vectors = AngularHead.target_vectors(head, local.clamp(0, self.size - 1))
        return self.processes.all_reduce_(vectors.masked_fill(~is_here[:, None, None], 0))

    def normal_noise(self, like: Tensor) -> Tensor:
        """Return the standard normal numbers of the first process. All draw, so that their generators stay in step."""
        noise = torch.randn_like(like)
        return self.processes.all_reduce_(noise if self.processes.rank == 0 else torch.zeros_like(noise))

    def use_all_classes(self) -> None:
        """End the use of sampled classes."""
        self.sampled = None

    def __call__(self, inputs: ClassInputs, rule: ScoreRule, *, scale_safely: bool = False) -> ClassTerms:
        """Return the terms of all classes; `w` and `bias` hold the local classes, `class_weights` all classes.

        `scale_safely` has no effect, because every call scales safely: `in_range` differs between processes, and if
        some of them repeated a call, the others would not take part in its collectives.
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
        part = class_terms(local_inputs, dataclasses.replace(rule, targets_present=False), scale_safely=True)
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
        others, *rest = terms.unbind(1)
        sums = iter(rest)
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
        rows = self.sampled if per_class == 1 else _class_changes.class_rows(self.sampled, per_class)
        return _SparseRows.apply(values, rows)


class _ShardedClassRows(_class_changes.ClassRows):
    """Access to the rows of all classes while they move between processes.

    Args:
        old: the distribution before the change.
        new: the distribution after it.
        device: of the rows.
    """

    def __init__(self, old: _ShardedClassTerms, new: _ShardedClassTerms, device: torch.device) -> None:
        self.old, self.new, self.processes, self.device = old, new, old.processes, device

    def take(self, values: Tensor, source: Tensor, per_class: int) -> Tensor:
        """Return the new rows of this process, received from the processes that hold them."""
        starts = [sum(self.new.sizes[:rank]) for rank in range(self.processes.size)]
        wanted = [source[start : start + size] for start, size in zip(starts, self.new.sizes, strict=True)]
        old_ends = torch.tensor(self.old.sizes).cumsum(0)
        sent = []
        for one in wanted:
            is_here = (one >= self.old.first) & (one < self.old.first + self.old.size)
            sent.append(_class_changes.class_rows(one[is_here] - self.old.first, per_class))
        mine = wanted[self.processes.rank]
        owners = torch.searchsorted(old_ends, mine.clamp_min(0), right=True).masked_fill(mine < 0, -1)
        received_counts = [per_class * int((owners == rank).sum()) for rank in range(self.processes.size)]
        received = self.processes.exchange_rows(
            values[torch.cat(sent).to(values.device)], [len(one) for one in sent], received_counts
        )
        # Rows arrive ordered by their owner, and in the order of the new classes for each owner.
        positions = [(owners == rank).nonzero().flatten() for rank in range(self.processes.size)]
        result = values.new_zeros(per_class * len(mine), *values.shape[1:])
        result[_class_changes.class_rows(torch.cat(positions), per_class).to(values.device)] = received
        return result

    def fetch(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return rows, given by their position among the rows of all processes."""
        local, is_here = self._local(values, rows)
        found = values[local.clamp(0, len(values) - 1)]
        return self.processes.all_reduce_(torch.where(is_here.view(-1, *[1] * (values.ndim - 1)), found, 0))

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


def numbered_blocks(classes: slice, size: int) -> Iterator[tuple[int, slice, slice]]:
    """Cut a range of classes at multiples of `size`.

    Yields:
        The number of each block, the part of the block that is in the range, and its position within the range.

    Example:
        >>> list(numbered_blocks(slice(3, 6), 4))
        [(0, slice(3, 4, None), slice(0, 1, None)), (1, slice(0, 2, None), slice(1, 3, None))]
    """
    for number in range(classes.start // size, -(-classes.stop // size)):
        start, stop = max(classes.start, number * size), min(classes.stop, (number + 1) * size)
        base = number * size
        yield number, slice(start - base, stop - base), slice(start - classes.start, stop - classes.start)


class _SparseRows(torch.autograd.Function):
    """Select rows of a parameter. The gradient is a sparse tensor with these rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor) -> Tensor:
        ctx.rows, ctx.shape = rows, values.shape
        return values[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.sparse_coo_tensor(ctx.rows[None], grad, ctx.shape, is_coalesced=True, check_invariants=False), None


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
    return {name: each for name, each in values.items() if len(set(each)) > 1}


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
