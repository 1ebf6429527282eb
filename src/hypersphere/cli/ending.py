"""How a command ends: whatever ends it early is one line on the standard error, and a code.

Misuse ends with code 2, damaged data or checkpoints with 3, a run that fails (it diverged, the disk or the memory is
full) with 1, an interrupt with 130. Nothing here imports torch before something went wrong.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NoReturn

from typer.core import TyperGroup

__all__ = ["Commands", "end", "end_with"]

KEPT = {"reproduce": "interrupted; finished rows are kept"}
SMALLER = {  # what a command that runs out of memory can be given less of
    "train": "--batch-size",
    "evaluate": "number of --pairs",
    "embed": "--batch",
    "inspect": "--most",
    "attack": "--limit",
}


class Commands(TyperGroup):
    """The commands; what they raise becomes a line of ours, where typer would say nothing or something else."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the words name."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            end(KEPT.get(ctx.invoked_subcommand, "interrupted"), 130)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            end(_about_memory(error, SMALLER.get(ctx.invoked_subcommand)), 1)
        except Exception as error:
            if not hasattr(error, "format_message"):  # which errors of the command line itself have
                raise
            end(error.format_message(), 2)


def end_with(error: Exception) -> NoReturn:
    """End with the line and the code of an error; one that is nobody's fault but ours is raised again."""
    if isinstance(error, ValueError):
        from hypersphere.data import DamagedData
        from hypersphere.training import DamagedCheckpoint

        end(error, 3 if isinstance(error, DamagedData | DamagedCheckpoint) else 2)
    if isinstance(error, FileNotFoundError | PermissionError | ImportError):
        end(str(error).replace("pass root= or", "pass --data-root or"), 2)  # as the data room calls it
    if isinstance(error, OSError | FloatingPointError):
        end(error, 1)
    raise error


def end(reason: object, code: int) -> NoReturn:
    """Say why in one line, and end."""
    print(f"hypersphere: {' '.join(str(reason).splitlines())}", file=sys.stderr)
    sys.exit(code)


def _is_out_of_memory(error: Exception) -> bool:
    words = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in words or "can't allocate memory" in words


def _about_memory(error: Exception, option: str | None) -> str:
    size = re.search(r"allocate ([\d.]+ ?\w*)", str(error))
    wanted = f" ({size[1]} more were asked for)" if size else ""
    return f"out of memory{wanted}; {f'a smaller {option}' if option else 'a larger machine'} may help"
