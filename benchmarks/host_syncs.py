"""Count how often one training step makes the host wait for the device.

Reading a value in Python (`.item()`, `bool(tensor)`, `.tolist()`) and operations whose output size depends on values
(`nonzero`, indexing by a boolean mask) stop the host until the device has caught up. On a CPU this costs nothing, but
the counts are the same as on a GPU. A step is forward and backward.

To add rows, write a function that returns a dictionary from names to callables, and list it in `GROUPS`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hypersphere as hs
from benchmarks.layers import OPERATORS as LAYER_OPERATORS
from benchmarks.timing import RESULTS

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
        self._modes = (_Operators(self.counts), _Methods(self.counts))

    @property
    def total(self) -> int:
        """The number of all counted operations."""
        return self.counts.total()

    def __enter__(self) -> HostSyncs:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


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


GROUPS: dict[str, Callable[[], dict[str, Callable[[], object]]]] = {
    "heads": head_steps,
    "layers": layer_steps,
    "energies": energy_steps,
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
