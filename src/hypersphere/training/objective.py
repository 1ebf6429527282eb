"""The training objective (moved to `loop`)."""

from hypersphere.training.loop import Objective

__all__ = ["Objective"]
