r"""A head whose class vectors are spread over the processes of a `torch.distributed` group."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import is_number, require
from hypersphere.heads.angular_head import AngularHead
from hypersphere.heads.batch import check_features, counted_rows
from hypersphere.heads.collectives import Processes, problem_of
from hypersphere.heads.fingerprint import differences, fingerprint
from hypersphere.heads.shard import Shard, numbered_blocks

__all__ = ["ShardedHead"]

_ROWS_A_SEED = 1024
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ShardedHead(nn.Module):
    r"""The same head with its classes spread over processes: each has some rows of the one logical (C, d) matrix.

    Features and labels of all processes are gathered, and the sums over classes are taken over processes. Every process
    returns the loss of the whole batch, and its gradients are those that one process with all classes would have. A
    process may have fewer rows than others, or none; all of them have to call the same methods in the same order.

    The head's parameters differ from process to process and must not be given to `DistributedDataParallel`: wrap the
    backbone alone. If a process ends, the others raise at their next collective: at once where the connection breaks,
    and after the time-out that `torch.distributed.init_process_group` was given if it only falls silent.

    Each process takes its rows from its own copy of the head. All settings are compared, and have to be the same; class
    vectors are not: make the head with one seed, or load one state, everywhere, if it is to be that of one process.

    A class that is not drawn (`sample`) has no row in the sparse gradient, and no update by an optimiser that takes the
    gradient as all there is: `torch.optim.SGD` without momentum and weight decay, or `torch.optim.SparseAdam`. SGD with
    momentum moves rows that were not drawn by what earlier steps left; most others refuse sparse gradients.

    `full_state_dict` and `load_full_state_dict` make checkpoints for any number of processes. `state_dict` is that of
    this process's part alone, and so is an optimiser's: it is not gathered, and fits only the same spread of classes.

    Args:
        head: any head; it is left as it is. If it lies on the meta device, no process ever holds all class vectors:
            blocks of rows are drawn from the first process's global seed, alike for any number of processes.
        group: a process group; None for the default one, or for this process alone if there is none.
        sizes: how many classes each process has; None for an even spread.
        sample: a fraction of the negatives to train with, drawn anew each training step beside the positives; the loss
            and, as sparse gradients, the update are of those class vectors alone. None for all.
        backbone: how gradients of the backbone are combined over processes: "averaged", as `DistributedDataParallel`
            does, so that features get their gradient times the number of processes; or "summed".

    Example:
        >>> from hypersphere.heads import arcface
        >>> head = ShardedHead(arcface(8, 3))
        >>> head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).shape
        torch.Size([])
    """

    sampling: Tensor

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
        one_bias = head.bias is not None and len(head.bias) == 1
        plan = fingerprint(head, ["weight"] if one_bias else ["weight", "bias"])
        plan |= {"sizes": repr(sizes and tuple(sizes)), "sample": repr(sample), "backbone": backbone}
        different = differences(self.processes.objects(plan))
        require(not different, "head", "made with the same arguments in all processes", different)
        if sizes is None:
            each, rest = divmod(head.num_classes, self.processes.size)
            sizes = [each + (rank < rest) for rank in range(self.processes.size)]
        self.shard = Shard(self.processes, sizes, one_bias=one_bias)
        seed, sampling_seed = self.processes.objects(torch.randint(2**62, (2,)).tolist())[0]
        self.in_features: int = head.in_features
        self.num_classes: int = head.num_classes
        self.sample = sample
        self.backbone = backbone
        self.head = self._own_part(head, seed)
        if sample is not None:
            self.register_buffer("sampling", torch.tensor([sampling_seed, 0]))

    @property
    def weight(self) -> Tensor:
        """The class vectors of this process, classes `first` to `first + len(weight)`."""
        return self.head.weight

    @property
    def first(self) -> int:
        """The first class of this process."""
        return self.shard.first

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of all processes' features and labels; with reduction "none", those of this one's rows."""
        rows, labels, counts = self._gathered(x, y)
        before = {name: buffer for name, buffer in self.head.named_buffers() if buffer.ndim == 0}
        if self.sample is not None and self.training:
            seed, step = self.sampling.tolist()
            self.shard.choose(labels, self.sample, seed, step)
        failure = None
        try:
            loss = self.head(rows, labels)
            finite = bool(torch.isfinite(loss.detach()).all())
        except ValueError as error:
            failure, finite = error, False
        finally:
            self.shard.choose_all()
        if not finite:
            self._refuse(before, failure)
        if self.sample is not None and self.training:
            self.sampling[1] += 1
        return self.processes.own(loss, counts) if self.head.reduction == "none" else loss

    @torch.no_grad()
    def scores(self, x: Tensor) -> Tensor:
        """Return the plain scores of this process's features for all classes, without gradient."""
        rows, _, counts = self._gathered(x, torch.zeros(len(x), dtype=torch.int64, device=x.device))
        return self.processes.exchanged(self.head.scores(rows), counts, self.shard.sizes)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the state of the one logical head to the first process, nothing to the others; all have to call it.

        It loads into any number of processes, and into the plain head (strictly, if nothing is sampled).

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
            whole = self.processes.at_first(value, self.shard.sizes) if self._is_spread(name) else value.cpu().clone()
            if whole is not None:
                state[name] = whole
        if self.sample is not None:
            state["sampling"] = self.sampling.cpu().clone()
        return state if self.processes.rank == 0 else {}

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this process's part of a `full_state_dict`, or of a plain head's state dict; each process needs all."""
        wanted = self.head.state_dict()
        accepted = f"a dict of {sorted(wanted)} in every process"
        if not state:
            accepted += " (full_state_dict gives it to the first alone: save it there, and load the file everywhere)"
        require(wanted.keys() == state.keys() - {"sampling"}, "state", accepted, sorted(state))
        part = {}
        for name, value in wanted.items():
            spread = self._is_spread(name)
            shape = (self.head.num_classes, *value.shape[1:]) if spread else tuple(value.shape)
            require(
                tuple(state[name].shape) == shape, f"state[{name!r}]", f"of shape {shape}", tuple(state[name].shape)
            )
            part[name] = state[name][self.shard.mine] if spread else state[name]
        self.head.load_state_dict(part)
        if self.sample is not None and "sampling" in state:
            self.sampling.copy_(state["sampling"])

    def extra_repr(self) -> str:
        """Show which classes are here."""
        mine = self.shard.mine
        return f"classes={mine.start}:{mine.stop}, sample={self.sample!r}, backbone={self.backbone!r}"

    def _is_spread(self, name: str) -> bool:
        return name == "weight" or (name == "bias" and not self.shard.one_bias)

    @torch.no_grad()
    def _own_part(self, head: AngularHead, seed: int) -> AngularHead:
        """A copy of the head that has the classes of this process only."""
        spread = {id(p): p for name, p in head.named_parameters() if self._is_spread(name)}
        device = torch.get_default_device() if head.weight.is_meta else None
        part: dict[int, Any] = {}
        for key, parameter in spread.items():
            rows = parameter[self.shard.mine]
            rows = torch.empty_like(rows, device=device) if rows.is_meta else rows.clone()
            part[key] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
        own = copy.deepcopy(head, part)
        own.classes = self.shard
        if head.weight.is_meta:
            self._draw(own, seed)
        return own

    def _draw(self, own: AngularHead, seed: int) -> None:
        """Fill the class vectors as the head itself does, block by block of the logical matrix, each with its seed."""
        weight, ordinary = own.weight, torch.default_generator.device
        own._apply(lambda t: torch.empty_like(t, device=weight.device) if t.is_meta else t)
        with torch.random.fork_rng(devices=[]):
            for number, block, here in numbered_blocks(self.shard.mine, _ROWS_A_SEED):
                torch.default_generator.manual_seed((seed + number) % 2**63)
                own.weight = nn.Parameter(
                    torch.empty(_ROWS_A_SEED, own.in_features, dtype=weight.dtype, device=ordinary)
                )
                own.reset_parameters()
                weight[here] = own.weight[block].to(weight.device)
        own.weight = weight

    def _gathered(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Features and labels of all processes, and how many each has; what one refuses, all refuse."""
        problem = problem_of(lambda: self._check(x, y))
        shown = [0, 0, 0, 1] if problem else [len(x), _FLOATS.index(x.dtype), x.requires_grad, 0]
        table = torch.stack(self.processes.list_of(torch.tensor(shown, device=x.device))).tolist()
        if any(refused for *_, refused in table):
            self.processes.raise_any(problem)
        counts, types, learning, _ = (list(column) for column in zip(*table, strict=True))
        named = [str(_FLOATS[index]) for index in types]
        require(len(set(types)) == 1, "x", "of one type in all processes", named)
        if any(learning) and not x.requires_grad:
            x = x.detach().requires_grad_()  # all take part in backward, also one without rows
        factor = self.processes.size if self.backbone == "averaged" else 1
        return self.processes.gathered(x, counts, factor), self.processes.rows_of_all(y.long(), counts), counts

    def _check(self, x: Tensor, y: Tensor) -> None:
        check_features(x, self.head.in_features)
        require(x.dtype in _FLOATS, "x", f"of one of {', '.join(map(str, _FLOATS))}", x.dtype)
        _numerics.require_finite_rows("x", x)
        counted_rows(x, y, self.head.num_classes, self.head.ignore_index)

    def _refuse(self, before: dict[str, Tensor], failure: ValueError | None) -> None:
        """Raise everywhere, and leave the head as it was, if class vectors are why a loss is not finite."""
        try:
            self.processes.raise_any(problem_of(lambda: _numerics.require_finite_rows("weight", self.weight)))
            if failure is not None:
                raise failure
        except ValueError:
            for name, value in before.items():
                setattr(self.head, name, value)
            raise


def _check_plan(head: AngularHead, sizes: Sequence[int] | None, sample: float | None, backbone: str) -> None:
    require(isinstance(head, AngularHead), "head", "a head of this library", head)
    learned = [name for name, _ in head.named_parameters() if name not in ("weight", "bias")]
    require(not learned, "head", "without learned parameters but weight and bias", learned)
    if sizes is not None:
        whole = all(isinstance(size, int) for size in sizes) and sum(sizes) == head.num_classes
        require(whole, "sizes", f"numbers that add up to the {head.num_classes} classes", tuple(sizes))
    if sample is not None:
        require(is_number(sample, 0, 1) and sample > 0, "sample", "a number in (0, 1] or None", sample)
        require(head.label_smoothing == 0, "sample", "None with label smoothing, which needs all classes", sample)
    require(backbone in ("averaged", "summed"), "backbone", "'averaged' or 'summed'", backbone)
