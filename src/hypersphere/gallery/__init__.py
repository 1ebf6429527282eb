"""An index of embeddings: enrol, search by cosine, save, and migrate to another model."""

from hypersphere.gallery._folder import DamagedGallery
from hypersphere.gallery.fingerprint import fingerprint_of
from hypersphere.gallery.gallery import Gallery, Matches, Migration

__all__ = ["DamagedGallery", "Gallery", "Matches", "Migration", "fingerprint_of"]
