"""Where the class vectors of a head live, and what its loss asks of them: here, all in this process."""

from __future__ import annotations

from torch import Tensor

from hypersphere.functions._pairwise import data_dependent_energy
from hypersphere.heads.terms import Terms, Wanted, class_terms

__all__ = ["Classes"]


class Classes:
    """All classes, in this process."""

    def terms(
        self, x: Tensor, w: Tensor, y: Tensor, rho: Tensor | None, bias: Tensor | None, wanted: Wanted, *, fused: bool
    ) -> Terms:
        """Return `class_terms` of all classes."""
        return class_terms(x, w, y, rho, bias, wanted, fused=fused)

    def rows(self, values: Tensor, labels: Tensor) -> Tensor:
        """Return the rows of a parameter that belong to the labels."""
        return values[labels]

    def energy(self, w: Tensor, labels: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return the energy of the class vectors of the labels that count against all others."""
        return data_dependent_energy(w, labels, counted=counted)
