"""Count how often one training step makes the host wait for the device.

Reading a value in Python (`.item()`, `bool(tensor)`, `.tolist()`) and operations whose output size depends on values
(`nonzero`, indexing by a boolean mask) stop the host until the device has caught up. On a CPU this costs nothing. While
counting, tensors on the CPU are treated as if they were on a GPU (`_numerics.all_on_cpu`), so that the counts are
those of a GPU. Waits inside an operation of torch, such as the SVD on a GPU, are not counted. A step is forward and
backward.

To add rows, write a function that returns a dictionary from names to callables, and list it in `GROUPS`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hypersphere as hs
from benchmarks.layers import OPERATORS as LAYER_OPERATORS
from benchmarks.timing import RESULTS
from hypersphere import _numerics

_SYNCING_OPERATORS = {
    "_local_scalar_dense",  # .item(), bool(tensor), float(tensor), int(tensor)
    "is_nonzero",
    "equal",
    "nonzero",
    "nonzero_static",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
    "_linalg_check_errors",  # of torch.linalg.solve and others; their forms with the suffix _ex do not check
}
_INDEXING_OPERATORS = {"index", "index_put", "index_put_", "_index_put_impl_"}
_SYNCING_METHODS = {"tolist", "numpy", "cpu"}  # these reach no operator on a CPU


class HostSyncs:
    """A context that counts operations that make the host wait, by name.

    Example:
        >>> with HostSyncs() as syncs:
        ...     _ = torch.ones(3).sum().item()
        >>> syncs.total, dict(syncs.counts)
        (1, {'_local_scalar_dense': 1})
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        as_on_a_gpu = mock.patch.object(_numerics, "all_on_cpu", return_value=False)
        self._contexts = (as_on_a_gpu, _Operators(self.counts), _Methods(self.counts))

    @property
    def total(self) -> int:
        """The number of all counted operations."""
        return self.counts.total()

    def __enter__(self) -> HostSyncs:
        for context in self._contexts:
            context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._sync_counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in _INDEXING_OPERATORS and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in _SYNCING_OPERATORS or by_mask:
            self._sync_counts[name] += 1
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._sync_counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _SYNCING_METHODS:
            self._sync_counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def head_steps() -> dict[str, Callable[[], object]]:
    """Return one training step of every preset."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 32, generator=generator), torch.randint(50, (16,), generator=generator)

    def step(head: torch.nn.Module) -> Callable[[], object]:
        return lambda: head(x.clone().requires_grad_(), y).backward()

    return {name: step(preset(32, 50)) for name, preset in hs.heads.PRESETS.items()}


def layer_steps() -> dict[str, Callable[[], object]]:
    """Return one training step of every kind of decoupled convolution."""
    x = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(0))

    def step(layer: torch.nn.Module) -> Callable[[], object]:
        return lambda: layer(x.clone().requires_grad_()).sum().backward()

    return {name: step(hs.layers.DecoupledConv2d(8, 8, 3, **settings)) for name, settings in LAYER_OPERATORS.items()}


def energy_steps() -> dict[str, Callable[[], object]]:
    """Return one step of every kind of regulariser of a network whose layers all have different shapes."""
    widths = (32, 24, 16, 12, 5)
    net = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    # A close pair costs further reads; eight dimensions are enough to make one unlikely.
    # Several layers of one shape are computed together, so different shapes are the worst case.
    energies: dict[str, torch.nn.Module] = {
        "MHE": hs.energy.MHE(net, half_space=False),
        "half-space MHE": hs.energy.MHE(net),
        "half-space MHE of samples": hs.energy.MHE(net, batch=4),
        "RP-CoMHE": hs.energy.CoMHE(net, projection=hs.projection.Random(dim=8)),
        "AP-CoMHE": hs.energy.CoMHE(net, projection=hs.projection.AnglePreserving(dim=8)),
        "adversarial CoMHE": hs.energy.CoMHE(net, projection=hs.projection.Adversarial(dim=8)),
    }

    def step(energy: torch.nn.Module) -> Callable[[], object]:
        return lambda: energy().backward()

    return {name: step(energy) for name, energy in energies.items()}


def rotation_steps() -> dict[str, Callable[[], object]]:
    """Return one training step for every kind of rotation of a layer, and for a layer whose input is rotated."""
    x = torch.randn(4, 36, generator=torch.Generator().manual_seed(0))

    def step(convert: Callable[[torch.nn.Module], object], *layers: torch.nn.Module) -> Callable[[], object]:
        model = torch.nn.Sequential(*(layers or [torch.nn.Linear(36, 8)]))
        convert(model)
        return lambda: model(x).square().sum().backward()

    def rotated(method: str | hs.orthogonal.RowMap, **options: Any) -> Callable[[torch.nn.Module], object]:
        return lambda model: hs.rotation.rotate_(model, method, output=True, **options)

    methods = {**hs.orthogonal.ORTHOGONALS, **hs.transform.TRANSFORMS}
    return {
        **{name: step(rotated(name, spread=0.1)) for name in methods},
        "cayley of a convolution": step(rotated("cayley"), torch.nn.Unflatten(1, (1, 6, 6)), torch.nn.Conv2d(1, 8, 3)),
        "cayley with a bound": step(rotated(hs.orthogonal.Cayley(bound=0.5))),
        "cayley, 4 blocks": step(rotated("cayley", blocks=4)),
        "cayley, 4 equal blocks": step(rotated("cayley", blocks=4, shared=True)),
        "cayley, 2 butterfly factors": step(rotated("cayley", blocks=2, factors=2)),
        "cayley, learned neurons": step(rotated("cayley", learn_neurons=True)),
        "stochastic": step(lambda model: hs.rotation.Stochastic(model, 0.25, output=True, whole_first=False)),
        "input rotation": step(lambda model: None, hs.rotation.InputRotation(torch.nn.Linear(36, 8))),
    }


GROUPS: dict[str, Callable[[], dict[str, Callable[[], object]]]] = {
    "heads": head_steps,
    "layers": layer_steps,
    "energies": energy_steps,
    "rotations": rotation_steps,
}


def count(step: Callable[[], object]) -> HostSyncs:
    """Return the counts of one step, after one step of warm-up."""
    step()
    with HostSyncs() as syncs:
        step()
    return syncs


def main(arguments: list[str]) -> None:
    """Write and print a table of all groups."""
    lines = ["# Host synchronisations per training step", "", f"torch {torch.__version__}, forward and backward", ""]
    for group, make in GROUPS.items():
        lines += [f"## {group}", "", "| step | synchronisations | operations |", "|---|---|---|"]
        for name, step in make().items():
            syncs = count(step)
            operations = ", ".join(f"{n} × {operation}" for operation, n in syncs.counts.items())
            lines.append(f"| {name} | {syncs.total} | {operations} |")
        lines.append("")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "host_syncs.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))
