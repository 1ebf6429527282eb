"""The application `hypersphere`: its commands, exit codes and error messages.

A command that fails prints one line on stderr. The exit code is 2 for invalid input, 3 for damaged data or checkpoints,
1 for a run that fails (divergence, full disk, out of memory) and 130 for an interrupt. Commands import torch when they
run, so that `--help` answers quickly.
"""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from hypersphere.cli.attack import attack
from hypersphere.cli.cite import cite
from hypersphere.cli.embed import embed
from hypersphere.cli.evaluate import evaluate
from hypersphere.cli.export import export
from hypersphere.cli.fold import fold
from hypersphere.cli.inspect import inspect
from hypersphere.cli.list import list_menus
from hypersphere.cli.output import printable, warn
from hypersphere.cli.pack import pack
from hypersphere.cli.report import report
from hypersphere.cli.reproduce import reproduce
from hypersphere.cli.train import train

__all__ = ["app", "main"]

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


app = typer.Typer(
    name="hypersphere",
    cls=Commands,
    help="Deep learning on the hypersphere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)
app.command("list")(list_menus)
for command in (reproduce, evaluate, embed, inspect, fold, export, attack, report, pack, cite):
    app.command()(command)


def _version(requested: bool) -> None:
    if requested:
        from hypersphere import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. An error becomes one line on stderr; a closed output pipe exits silently with code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print "?" where the terminal cannot show a character such as ±
    # One line without the place in the code, for example about an empty class folder.
    warnings.formatwarning = lambda message, *_: f"hypersphere: {printable(' '.join(str(message).split()))}\n"
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        sys.exit(1)
    except Exception as error:
        end_with(error)


def end_with(error: Exception) -> NoReturn:
    """Exit with the message and code of an error. An unexpected error, which is a bug, is raised again."""
    if isinstance(error, ValueError):
        from hypersphere.data import DamagedData
        from hypersphere.training import DamagedCheckpoint

        end(error, 3 if isinstance(error, DamagedData | DamagedCheckpoint) else 2)
    if isinstance(error, FileNotFoundError | PermissionError | ImportError):
        # `root` is the name of the argument in Python
        end(str(error).replace("pass root= or", "pass --data-root or"), 2)
    if isinstance(error, OSError | FloatingPointError):
        end(error, 1)
    raise error


def end(reason: object, code: int) -> NoReturn:
    """Print the reason in one line and exit with the code."""
    warn(reason)
    sys.exit(code)


def _is_out_of_memory(error: Exception) -> bool:
    words = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in words or "can't allocate memory" in words


def _about_memory(error: Exception, option: str | None) -> str:
    size = re.search(r"allocate ([\d.]+ ?\w*)", str(error))
    request = f" (could not allocate {size[1]})" if size else ""
    return f"out of memory{request}; {f'try a smaller {option}' if option else 'try a machine with more memory'}"
