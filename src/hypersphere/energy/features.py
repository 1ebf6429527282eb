r"""Energies of the features of a batch: uniformity, alignment, KoLeo, and the hyperspherical energy of features.

    uniformity = log E exp(−t·‖x̂ − ŷ‖²)      pairs of different features
    alignment  = E ‖x̂ − x̂⁺‖²                 a feature and its positive
    KoLeo      = −(1/n)·Σᵢ log minⱼ ‖x̂ᵢ − x̂ⱼ‖   each feature and its nearest neighbour

A zero feature has no direction. It counts as one at a right angle to all others, at the squared distance 2, and has no
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._collectives import Processes
from hypersphere._validation import nearest_name, require
from hypersphere.functions._pairwise import PairSum, pair_energy
from hypersphere.functions.kernel import KERNELS, Gaussian, Kernel, Logarithmic, PairPotential, kernel_of

__all__ = ["FEATURE_ENERGIES", "FeatureEnergy", "Gaussian", "alignment", "koleo", "uniformity"]

_LARGEST_FLOAT32_T = 16  # up to here float32 can represent exp(−4t), the smallest term
_PAIRS_IN_CACHE = 2**20  # cosines per block of the search for nearest neighbours
_GATHERED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def uniformity(features: Float[Tensor, "batch dim"], t: float = 2.0) -> Float[Tensor, ""]:
    r"""Return the logarithm of the mean Gaussian potential of all pairs of features.

        log E_{i≠j} exp(−t·‖x̂ᵢ − x̂ⱼ‖²)

    It is 0 if all features coincide. Near-duplicate features are computed from differences in float64. Memory does not
    grow with the number of pairs, except under `torch.compile`, `torch.func` and in second derivatives.

    Args:
        features: (n, d), n ≥ 2. Only their directions matter.
        t: a positive number up to 100.

    Returns:
        A scalar of the dtype of `features`.

    Raises:
        ValueError: there are fewer than two features, or one of them is not finite.

    Example:
        >>> round(uniformity(torch.eye(3)).item(), 4)  # all squared distances are 2
        -4.0

    Reference:
        Wang and Isola, Understanding Contrastive Representation Learning through Alignment and Uniformity on the
        Hypersphere, ICML 2020.
    """
    kernel = Gaussian(t)
    _check_matrix("features", features, least=2)
    rows = _numerics.widen(features)
    # All terms are at least exp(−4t), so in float64 neither they nor their sum can underflow.
    rows = rows if t <= _LARGEST_FLOAT32_T else _numerics.to_float64(rows)
    value = pair_energy(PairSum(rows, PairPotential(kernel), mean=True)).log()
    return _checked_result(value, features)


def alignment(features: Float[Tensor, "batch dim"], positives: Float[Tensor, "batch dim"]) -> Float[Tensor, ""]:
    r"""Return the mean squared distance of features to their positives, such as other views of the same images.

        (1/n)·Σᵢ ‖x̂ᵢ − x̂ᵢ⁺‖²

    Args:
        features: (n, d), n ≥ 1. Only their directions matter.
        positives: (n, d), the positive of each feature.

    Returns:
        A scalar of the dtype of `features`.

    Example:
        >>> alignment(torch.eye(2), torch.tensor([[3.0, 0.0], [1.0, 0.0]]))
        tensor(1.)

    Reference:
        Wang and Isola, Understanding Contrastive Representation Learning through Alignment and Uniformity on the
        Hypersphere, ICML 2020.
    """
    _check_matrix("features", features, least=1)
    _check_matrix("positives", positives, least=1)
    accepted = f"of shape {tuple(features.shape)}, the shape of the features"
    require(positives.shape == features.shape, "positives", accepted, tuple(positives.shape))
    value = _squared_chords(_polar64(features), _polar64(positives)).mean()
    return _checked_result(value, features, positives)


def koleo(features: Float[Tensor, "batch dim"]) -> Float[Tensor, ""]:
    r"""Return the Kozachenko–Leonenko estimate of minus the entropy of features, up to a constant.

        −(1/n)·Σᵢ log min_{j≠i} ‖x̂ᵢ − x̂ⱼ‖

    The gradient moves every feature away from its nearest neighbour, and the neighbour away from it. Distances below
    4.2e-8 count as that and have no gradient. Memory does not grow with the number of pairs, except under
    `torch.compile` and `torch.func`.

    Args:
        features: (n, d), n ≥ 2. Only their directions matter.

    Returns:
        A scalar of the dtype of `features`.

    Raises:
        ValueError: there are fewer than two features, or one of them is not finite.

    Example:
        >>> koleo(torch.tensor([[1.0, 0.0], [-2.0, 0.0]]))  # −log 2
        tensor(-0.6931)

    Reference:
        Sablayrolles et al., Spreading Vectors for Similarity Search, ICLR 2019.
    """
    _check_matrix("features", features, least=2)
    with torch.no_grad(), _numerics.autocast_disabled(features):
        nearest = _nearest_neighbors(_numerics.widen(features.detach()))
    norms, unit = _polar64(features)
    # The indices may be on another device than float64 numbers, see `to_float64`.
    nearest = nearest.to(unit.device)
    squared = _squared_chords((norms, unit), (norms[nearest], unit[nearest]))
    value = Logarithmic().floored_value_at_square(squared).mean()
    return _checked_result(value, features)


def _mean_energy(features: Tensor, kernel: Kernel) -> Tensor:
    """Return the mean of a kernel over the pairs of features."""
    _check_matrix("features", features, least=2)
    value = pair_energy(PairSum(_numerics.widen(features), PairPotential(kernel), mean=True))
    return _checked_result(value, features)


FEATURE_ENERGIES: dict[str, Callable[..., Tensor]] = {
    "uniformity": uniformity,
    "koleo": koleo,
}
"""The energies of features by name, next to the kernels of `hypersphere.kernel`."""


class FeatureEnergy(nn.Module):
    r"""An energy of the features of a batch, to be added to a loss. The lower it is, the more evenly they are spread.

    Args:
        energy: "uniformity", "koleo", or the kernel of a mean hyperspherical energy: a name or an object of
            `hypersphere.kernel`, such as "gaussian" for E exp(−t·‖x̂ − ŷ‖²), its power s ≥ 0, or a callable of the
            distance.
        t: t of "uniformity" and "gaussian"; None for 2.
        gather: gather the features of all processes of `group` (torch.distributed). Each process then returns the
            energy of the complete batch. Processes may have different numbers of features, also none. Without a process
            group, `gather` has no effect.
        group: a process group; None for the default group.
        backbone: how gradients of the backbone are combined over processes: "averaged", as `DistributedDataParallel`
            does, so that features get their gradient times the number of processes; or "summed". In both cases the
            parameters of the backbone get the gradient of a single process with the complete batch.

    Example:
        >>> features = torch.randn(8, 4, requires_grad=True)
        >>> FeatureEnergy("koleo")(features).backward()
        >>> FeatureEnergy(1)(torch.tensor([[1.0, 0.0], [-3.0, 0.0]]))  # 1/z at the distance 2
        tensor(0.5000)

    Reference:
        Liu et al., Learning towards Minimum Hyperspherical Energy, NeurIPS 2018.
    """

    def __init__(
        self,
        energy: str | float | Kernel | Callable[[Tensor], Tensor] = "uniformity",
        *,
        t: float | None = None,
        gather: bool = False,
        group: dist.ProcessGroup | None = None,
        backbone: str = "averaged",
    ) -> None:
        super().__init__()
        require(isinstance(gather, bool), "gather", "a bool", gather)
        require(group is None or gather, "group", "None without gather", group)
        require(backbone in ("averaged", "summed"), "backbone", "'averaged' or 'summed'", backbone)
        names = (*FEATURE_ENERGIES, *KERNELS)
        if isinstance(energy, str) and energy not in names:
            accepted = f"one of {', '.join(map(repr, names))}, a power >= 0, a kernel or a callable of the distance"
            raise ValueError(f"energy must be {accepted}, not {energy!r}{nearest_name(energy, names)}")
        has_t = isinstance(energy, str) and energy in ("uniformity", "gaussian")
        require(t is None or has_t, "t", "None unless the energy is 'uniformity' or 'gaussian'", t)
        self.energy, self.gather, self.group, self.backbone = energy, gather, group, backbone
        self.options: dict[str, float | Kernel] = {}
        kernel = Gaussian() if t is None else Gaussian(t)  # it also checks the t of "uniformity"
        if energy == "uniformity":
            self.options["t"] = kernel.t
        elif not isinstance(energy, str) or energy in KERNELS:
            self.options["kernel"] = kernel if energy == "gaussian" else kernel_of(energy)

    def forward(self, features: Float[Tensor, "batch dim"]) -> Float[Tensor, ""]:
        """Return the energy of the features, with `gather` of those of all processes.

        Raises:
            ValueError: in every process, if the features of any process are not a matrix, or all together are fewer
                than two.
        """
        if self.gather and dist.is_available() and dist.is_initialized():
            features = _gather_rows(features, Processes(self.group), averaged=self.backbone == "averaged")
        has_kernel = "kernel" in self.options
        function: Callable[..., Tensor] = _mean_energy if has_kernel else FEATURE_ENERGIES[str(self.energy)]
        return function(features, **self.options)

    def extra_repr(self) -> str:
        """Show the energy and how features are gathered."""
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{self.energy!r}{options}" + (f", gather=True, backbone={self.backbone!r}" if self.gather else "")


# Nearest neighbours --------------------------------------------------------------------------------------------------


def _nearest_neighbors(rows: Tensor) -> Tensor:
    """Return the index of the nearest other row of each row, in blocks of pairs."""
    everything = torch.arange(len(rows), device=rows.device)
    if not _numerics.values_readable(rows):
        # Without values to branch on, all cosines are computed in float64.
        return _largest_cosines(sphere.polar(_numerics.to_float64(rows))[1], everything)[1]
    cosines, nearest = _largest_cosines(sphere.row_directions(rows), everything)
    # Cosines of the dtype of the rows cannot rank close neighbours. Search again for rows that have any.
    limit = 1 - _numerics.close_pair_threshold(rows.dtype) / 2
    close = (cosines > limit).nonzero().flatten()
    if len(close) and rows.dtype != torch.float64:
        unit = sphere.polar(_numerics.to_float64(rows))[1]
        nearest[close] = _largest_cosines(unit, close.to(unit.device))[1].to(nearest.device)
    return nearest


def _largest_cosines(unit: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest cosine of each of the rows `index` with another row, and the position of that row."""
    everything = torch.arange(len(unit), device=unit.device)
    maxima = []
    for block in index.to(unit.device).split(max(_PAIRS_IN_CACHE // len(unit), 1)):
        c = (unit[block] @ unit.mT).masked_fill_(block[:, None] == everything, -math.inf)
        maxima.append(c.max(1))
    return torch.cat([best.values for best in maxima]), torch.cat([best.indices for best in maxima])


def _polar64(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return norms (n, 1) and directions (n, d) in float64, so that differences of close directions are accurate."""
    return sphere.polar(_numerics.to_float64(_numerics.widen(x)))


def _squared_chords(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
    """Return ‖x̂ᵢ − ŷᵢ‖² from norms and directions, and 2 if one of the two is a zero vector."""
    (x_norms, x_unit), (y_norms, y_unit) = x, y
    # A zero vector has the direction 0, which is at the squared distance 1 from a unit vector and 0 from another zero.
    zeros = (x_norms == 0).to(x_unit) + (y_norms == 0).to(x_unit)
    return (x_unit - y_unit).square().sum(-1) + zeros.squeeze(-1)


# Checks --------------------------------------------------------------------------------------------------------------


def _is_matrix(features: object) -> bool:
    return isinstance(features, Tensor) and features.ndim == 2 and features.is_floating_point()


def _check_matrix(argument: str, features: Tensor, least: int) -> None:
    """Raise a `ValueError` unless the argument is a floating-point matrix of enough rows."""
    is_tensor = isinstance(features, Tensor)
    received = f"{features.dtype} {tuple(features.shape)}" if is_tensor else type(features).__name__
    accepted = f"a floating-point matrix (n, d) with n >= {least}"
    require(_is_matrix(features) and len(features) >= least, argument, accepted, received)


def _checked_result(value: Tensor, features: Tensor, positives: Tensor | None = None) -> Tensor:
    """Return an energy on the device and in the dtype of the features; raise an error that names a non-finite row."""
    if _numerics.values_readable(value) and not math.isfinite(value.item()):
        _numerics.require_finite_rows("features", features)
        if positives is not None:
            _numerics.require_finite_rows("positives", positives)
    return _numerics.narrow(value.to(features.device), features.dtype)


# Several processes ---------------------------------------------------------------------------------------------------


def _gather_rows(rows: Tensor, processes: Processes, *, averaged: bool) -> Tensor:
    """Return the rows of all processes. The gradient returns to the rows of this process, without communication.

    Every process computes the same function of all rows. Its partial derivative with respect to the rows of this
    process does not depend on whether the other rows are constants, so they are gathered as constants.
    """
    # A process with invalid features takes part in this exchange. Otherwise the others would wait for it.
    is_valid = _is_matrix(rows) and rows.dtype in _GATHERED_DTYPES
    header = (*rows.shape, _GATHERED_DTYPES.index(rows.dtype)) if is_valid else (-1, -1, -1)
    device = rows.device if isinstance(rows, Tensor) else _exchange_device(processes)
    headers = processes.all_gather(torch.tensor(header, device=device))
    counts, widths, dtypes = torch.stack(headers).T.tolist()
    if min(counts) < 0:
        _check_matrix("features", rows, least=0)
        raise ValueError(
            f"features must be a floating-point matrix (n, d), but those of process {counts.index(-1)} are not"
        )
    require(len(set(widths)) == 1, "features", "as wide in all processes", widths)
    names = [str(_GATHERED_DTYPES[index]) for index in dtypes]
    require(len(set(dtypes)) == 1, "features", "of one dtype in all processes", names)
    # The backbone averages gradients over processes, but the energy is already global.
    return processes.gather_rows(rows, counts, factor=processes.size if averaged else 1)


def _exchange_device(processes: Processes) -> torch.device:
    """Return a device whose tensors the processes can exchange: the accelerator, or the CPU with the backend gloo."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or dist.get_backend(processes.group) == dist.Backend.GLOO:
        return torch.device("cpu")
    return accelerator
