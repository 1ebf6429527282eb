"""Toy flows on the sphere: vectors that only descend a penalty (figures 5.1, 5.2, D.1 and D.2 of the thesis)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hypersphere import energy, sphere
from hypersphere.recipes.recipe import Axis, Claim, Metric, Outcome, Recipe, Row

__all__ = ["FLOWS", "descend", "flow"]

_NUM_FRAMES = 50  # positions per trajectory that are stored for pictures
_LONGEST_GRADIENT = 10.0


def descend(
    start: Tensor, penalty: Callable[[Tensor], Tensor], *, steps: int, rate: float
) -> tuple[Tensor, list[float], Tensor]:
    """Move unit vectors down the gradient of a penalty and normalise them after each step.

    The tangential part of the gradient is clipped to norm 10 per vector. Otherwise, two vectors that start close
    together would jump across the sphere.

    Args:
        start: (N, d) unit vectors.
        penalty: maps them to a scalar.
        steps: number of steps.
        rate: step size.

    Returns:
        The positions (frames, N, d), evenly spaced in time and with the first and last one; the values of the penalty
        at these times; and the length of the path of each vector (N,) in radians.
    """
    vectors, path = start.clone(), torch.zeros(len(start), dtype=start.dtype)
    times = {round(time) for time in torch.linspace(0, steps, min(_NUM_FRAMES, steps) + 1).tolist()}
    frames, values = [], []
    for step in range(steps + 1):
        leaf = vectors.requires_grad_()
        value = penalty(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
        vectors = leaf.detach()
        if step in times:
            frames.append(vectors)
            values.append(float(value.detach()))
        if step == steps:
            break
        tangential = gradient - (gradient * vectors).sum(1, keepdim=True) * vectors
        excess = tangential.norm(dim=1, keepdim=True).clamp_min(_LONGEST_GRADIENT) / _LONGEST_GRADIENT
        moved = sphere.normalize(vectors - rate * tangential / excess)
        # The angle between two unit vectors, accurate for short steps.
        path = path + 2 * torch.asin((moved - vectors).norm(dim=1) / 2)
        vectors = moved
    return torch.stack(frames), values, path


def _orthonormality(vectors: Tensor) -> Tensor:
    """Return ‖WWᵀ − I‖_F, as in section 5.3.7."""
    return (vectors @ vectors.mT - torch.eye(len(vectors), dtype=vectors.dtype)).norm()


def flow(
    seed: int, *, penalty: str, count: int, dim: int, power: float, betas: Sequence[float], steps: int, rate: float
) -> Outcome:
    """Draw unit vectors and let them descend the orthonormal penalty, the energy or the energy in half space.

    Args:
        seed: seed of the initial vectors, which are the same in all rows.
        penalty: "orthonormal", "mhe" or "half_space".
        count, dim: number of vectors, and their dimension.
        power: s of the energy.
        betas: weights β of the first vectors (equation D.10); all others have weight 1.
        steps, rate: number and size of the steps.
    """
    generator = torch.Generator().manual_seed(seed)
    start = sphere.normalize(torch.randn(count, dim, dtype=torch.float64, generator=generator))
    weights = torch.ones(count, dtype=torch.float64)
    weights[: len(betas)] = torch.tensor(betas, dtype=torch.float64)

    def potential(vectors: Tensor) -> Tensor:
        half = penalty == "half_space"
        used_weights = None if half or not len(betas) else weights
        return energy.hyperspherical_energy(
            vectors, power=power, half_space=half, weights=used_weights, reduction="sum"
        )

    frames, values, path = descend(
        start, _orthonormality if penalty == "orthonormal" else potential, steps=steps, rate=rate
    )
    cosines = (frames[-1] @ frames[-1].mT).masked_fill(torch.eye(count, dtype=torch.bool), -math.inf)
    line_cosines = cosines.abs().masked_fill(torch.eye(count, dtype=torch.bool), -math.inf)
    metrics = {
        "smallest_angle": _degrees(cosines.max()),
        "smallest_line_angle": _degrees(line_cosines.max()),
        "path": float(path[: max(len(betas), 1)].mean()),
        "other_path": float(path[max(len(betas), 1) :].mean()),
    }
    return Outcome(metrics, {"penalty": values}, {"start": frames[0], "points": frames[-1], "frames": frames})


def _degrees(cosine: Tensor) -> float:
    return math.degrees(float(sphere.angle(cosine)))


def _measure(penalty: str, **options: object) -> dict[str, object]:
    return {"measure": {"penalty": penalty, **options}}


_PLANE = "MHE, two vectors in the plane"
FLOWS = Recipe(
    name="energy-flows",
    title="Vectors on the sphere that descend orthonormality, energy and weighted energy",
    reference="figures 5.1, 5.2, D.1 and D.2 of the thesis",
    base={"measure": {"count": 10, "dim": 3, "power": 2.0, "betas": [], "steps": 4000, "rate": 0.002}},
    scales={"paper": {}, "cpu": {}, "smoke": {"measure": {"steps": 20}}},
    rows=(
        Row("orthonormal", _measure("orthonormal")),
        Row("MHE", _measure("mhe")),
        Row("half-space MHE", _measure("half_space")),
        Row(_PLANE, _measure("mhe", count=2, dim=2), baseline=_PLANE),  # not compared with ten vectors in space
        Row(f"half-space {_PLANE}", _measure("half_space", count=2, dim=2), baseline=_PLANE),
        *(
            Row(f"one vector weighted {beta}", _measure("mhe", betas=[beta]), baseline="one vector weighted 1")
            for beta in (1, 2, 4, 10)
        ),
        *(
            Row(f"two vectors weighted {beta}", _measure("mhe", betas=[beta] * 2), baseline="two vectors weighted 1")
            for beta in (1, 2, 4, 10)
        ),
    ),
    seeds=tuple(range(10)),
    metrics=(
        Metric("smallest_angle", "smallest angle °", ".1f", True),
        Metric("smallest_line_angle", "smallest angle of lines °", ".1f", True),
        Metric("path", "path of the first vectors, rad", ".3f", False),
        Metric("other_path", "path of the others, rad", ".3f", None),
    ),
    covers=("F5.1", "F5.2", "F-D.1", "F-D.2"),
    cost={"paper": 0.2, "cpu": 0.2, "smoke": 0.001},
    figures=("penalty",),
    compute=flow,
    axes={"penalty": Axis("step", 0, 4000)},
    baseline="orthonormal",
    claims=(
        Claim("MHE separates the vectors more than orthonormality.", "MHE"),
        Claim("Half-space MHE separates the lines more than MHE.", "half-space MHE", "MHE", "smallest_line_angle"),
        Claim(
            "Half-space MHE makes two vectors perpendicular, MHE opposite.",
            "half-space MHE, two vectors in the plane",
            metric="smallest_line_angle",
            source="F5.2",
        ),
        Claim("A heavier vector moves less.", "one vector weighted 10", metric="path", source="F-D.1"),
        Claim("Heavier vectors move less.", "two vectors weighted 10", metric="path", source="F-D.2"),
    ),
    note="Ten random unit vectors in three dimensions, the same ones for all rows of a seed; gradient steps of 0.002 "
    "on the penalty alone, clipped along the sphere to norm 10 per vector and followed by normalisation. Power (2 "
    "here), step size, number of steps and normalisation are not stated in the source, which prints pictures only. Two "
    "vectors in the plane end opposite (a line angle of 0°) under MHE and perpendicular under half-space MHE. Weights "
    "multiply the vectors, as in equation D.10. The penalty is the sum over ordered pairs.",
)
