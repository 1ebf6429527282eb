"""Measuring features: tensors in, numbers out."""

from hypersphere.evaluation.fisher import angular_fisher_score, smallest_angle

__all__ = ["angular_fisher_score", "smallest_angle"]
