"""The command `hypersphere`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. An interrupt during its imports is also reported in one line."""
    try:
        from hypersphere.cli.commands import main as run

        run()
    except KeyboardInterrupt:
        print("hypersphere: interrupted", file=sys.stderr)
        sys.exit(130)
