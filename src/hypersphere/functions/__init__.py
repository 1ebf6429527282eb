"""The menu: angular activations g, magnitudes h, margins ψ, energy kernels f, projections, rotations, transforms."""

from hypersphere.functions import angular, kernel, magnitude, margin, orthogonal, projection, transform

__all__ = ["angular", "kernel", "magnitude", "margin", "orthogonal", "projection", "transform"]
