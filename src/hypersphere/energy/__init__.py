"""Hyperspherical energy: how evenly neurons cover the sphere."""

from hypersphere.energy.hyperspherical import hyperspherical_energy

__all__ = ["hyperspherical_energy"]
