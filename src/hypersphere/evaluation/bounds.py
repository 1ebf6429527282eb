r"""How large the margin m of A-Softmax has to be so that classes are tighter than they are close (thesis, 2.3.5).

For class vectors at the angle θ₁₂, A-Softmax accepts a sample where m·θ₁ < θ₂. Features are desired such that the
greatest angle inside a class is below the smallest angle between two classes; m_min is the least m that sees to it.
"""

from __future__ import annotations

import math

from hypersphere._validation import is_integer, require

__all__ = ["M_MIN_BINARY", "M_MIN_MULTICLASS", "inter_class_angle", "intra_class_angle", "smallest_margin"]

M_MIN_BINARY = 2 + math.sqrt(3)
"""Lower bound of m_min for two classes (property 2)."""

M_MIN_MULTICLASS = 3.0
"""Lower bound of m_min for three or more evenly spaced classes (property 3)."""


def smallest_margin(classes: int) -> float:
    """The lower bound of m_min for that many classes.

    >>> round(smallest_margin(2), 3), smallest_margin(10)
    (3.732, 3.0)
    """
    require(is_integer(classes, 2), "classes", "a whole number >= 2", classes)
    return M_MIN_BINARY if classes == 2 else M_MIN_MULTICLASS


def inter_class_angle(m: float, between: float) -> float:
    """The smallest angle between samples of two classes, (m−1)/(m+1)·θ₁₂ for class vectors at the angle θ₁₂.

    >>> inter_class_angle(3, between=1.0)
    0.5
    """
    _check(m, between)
    return (m - 1) / (m + 1) * between


def intra_class_angle(m: float, between: float, *, classes: int = 2) -> float:
    """The greatest angle inside a class, in the plane of the class vectors (thesis, 2.21 to 2.23).

    Two classes: θ₁₂/(m−1) + θ₁₂/(m+1) while θ₁₂ ≤ (m−1)π/m, then 2π/(m+1). More, with neighbours at θ₁₂ on both sides:
    2θ₁₂/(m+1).

    >>> intra_class_angle(3, between=1.0), intra_class_angle(3, between=1.0, classes=3)
    (0.75, 0.5)
    """
    _check(m, between)
    smallest_margin(classes)
    if classes > 2:
        return 2 * between / (m + 1)
    if m * between > (m - 1) * math.pi:
        return 2 * math.pi / (m + 1)
    return between / (m - 1) + between / (m + 1)


def _check(m: float, between: float) -> None:
    require(m >= 1, "m", "a number >= 1", m)
    require(0 < between <= math.pi, "between", "an angle in (0, pi]", between)
