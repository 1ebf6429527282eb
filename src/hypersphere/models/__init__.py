"""The networks of the sources."""

from hypersphere.models.toy import ToyCNN

__all__ = ["ToyCNN"]
