"""Pictures of robustness (extra `report`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypersphere._validation import require
from hypersphere.robustness.accuracy import RobustAccuracy, Strength

__all__ = ["plot_accuracy", "plot_strength"]


def plot_accuracy(results: Mapping[str, RobustAccuracy]) -> Any:
    """Return a matplotlib figure: accuracy over ε in units of 1/255, one line a model, its clean accuracy at 0.

    Args:
        results: a name and what `accuracy_under` gave, for each model.
    """
    axes = _axes(results)
    for name, result in results.items():
        points = sorted({0.0: result.clean, **dict(zip(result.epsilons, result.accuracies, strict=True))}.items())
        axes.plot(
            [255 * epsilon for epsilon, _ in points], [100 * value for _, value in points], marker="o", label=name
        )
    attacks = sorted({result.attack + (", transferred" if result.transferred else "") for result in results.values()})
    axes.set(xlabel="ε · 255", ylabel="accuracy %", title="; ".join(attacks), ylim=(0, 100))
    axes.legend()
    return axes.figure


def plot_strength(results: Mapping[str, Strength], norm: str = "l2") -> Any:
    """Return a matplotlib figure: the strength that each image took to fool a model, sorted (thesis, figure C.1).

    Images that no step fooled are left out, and those that were wrong before count as zero.

    Args:
        results: a name and what `fooling_strength` gave, for each model.
        norm: "l2" or "linf".
    """
    require(norm in ("l2", "linf"), "norm", "'l2' or 'linf'", norm)
    axes = _axes(results)
    for name, result in results.items():
        strengths = (result.l2 if norm == "l2" else result.linf)[result.fooled].sort().values
        axes.plot(range(len(strengths)), strengths.tolist(), label=name)
    axes.set(xlabel="image, sorted", ylabel=f"strength ({norm})")
    axes.legend()
    return axes.figure


def _axes(results: Mapping[str, object]) -> Any:
    from matplotlib.figure import Figure  # without pyplot, so that no global state and no window comes with it

    require(len(results) > 0, "results", "at least one result by name", results)
    return Figure(figsize=(5, 3.5), layout="constrained").add_subplot()
