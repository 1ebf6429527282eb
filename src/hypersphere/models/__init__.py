"""The networks of the sources."""

from hypersphere.models.embedding import EmbeddingCNN
from hypersphere.models.toy import ToyCNN

__all__ = ["EmbeddingCNN", "ToyCNN"]
