"""The command `hypersphere`."""

from hypersphere.cli.commands import main

__all__ = ["main"]
