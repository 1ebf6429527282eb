"""The training loop and what it needs."""

from hypersphere.training.batches import Batches
from hypersphere.training.loop import Epoch, embed, fit, predict

__all__ = ["Batches", "Epoch", "embed", "fit", "predict"]
