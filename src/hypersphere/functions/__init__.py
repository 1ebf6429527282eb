"""The menu: angular activations g, magnitudes h, margins ψ and energy kernels f."""

from hypersphere.functions import angular, kernel, magnitude, margin

__all__ = ["angular", "kernel", "magnitude", "margin"]
