"""The command `hypersphere`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; an interrupt while it is being imported is told in one line too."""
    try:
        from hypersphere.cli.commands import main as run

        run()
    except KeyboardInterrupt:
        print("hypersphere: interrupted", file=sys.stderr)
        sys.exit(130)
