"""Exit codes and error messages. A command that fails prints one line on stderr.

The code is 2 for invalid input, 3 for damaged data or checkpoints, 1 for a run that fails (divergence, full disk, out
of memory) and 130 for an interrupt. This module imports torch only after an error, so that `--help` answers quickly.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NoReturn

from typer.core import TyperGroup

__all__ = ["Commands", "end", "end_with"]

INTERRUPTED = {"reproduce": "interrupted; finished rows are kept"}
SMALLER = {  # the option that lowers the memory use of a command
    "train": "--batch-size",
    "evaluate": "number of --pairs",
    "embed": "--batch",
    "inspect": "--most",
    "attack": "--limit",
}


class Commands(TyperGroup):
    """The group of commands. It prints its own messages for errors that typer would print differently or not at all."""

    def invoke(self, ctx: Any) -> Any:
        """Run the requested command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            end(INTERRUPTED.get(ctx.invoked_subcommand, "interrupted"), 130)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            end(_about_memory(error, SMALLER.get(ctx.invoked_subcommand)), 1)
        except Exception as error:
            if not hasattr(error, "format_message"):  # only usage errors of typer and click have this method
                raise
            end(error.format_message(), 2)


def end_with(error: Exception) -> NoReturn:
    """Exit with the message and code of an error. An unexpected error, which is a bug, is raised again."""
    if isinstance(error, ValueError):
        from hypersphere.data import DamagedData
        from hypersphere.training import DamagedCheckpoint

        end(error, 3 if isinstance(error, DamagedData | DamagedCheckpoint) else 2)
    if isinstance(error, FileNotFoundError | PermissionError | ImportError):
        end(
            str(error).replace("pass root= or", "pass --data-root or"), 2
        )  # `root` is the name of the argument in Python
    if isinstance(error, OSError | FloatingPointError):
        end(error, 1)
    raise error


def end(reason: object, code: int) -> NoReturn:
    """Print the reason in one line and exit with the code."""
    print(f"hypersphere: {' '.join(str(reason).splitlines())}", file=sys.stderr)
    sys.exit(code)


def _is_out_of_memory(error: Exception) -> bool:
    words = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in words or "can't allocate memory" in words


def _about_memory(error: Exception, option: str | None) -> str:
    size = re.search(r"allocate ([\d.]+ ?\w*)", str(error))
    request = f" (could not allocate {size[1]})" if size else ""
    return f"out of memory{request}; {f'try a smaller {option}' if option else 'try a machine with more memory'}"
