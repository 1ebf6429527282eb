"""The commands and their options. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """The commands; an interrupt ends them with a line of ours, where typer would say nothing or something else."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _end("interrupted; finished rows are kept", 130)


app = typer.Typer(
    name="hypersphere",
    cls=_Commands,
    help="Deep learning on the hypersphere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
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


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="A recipe; `hypersphere list` shows them.")] = "digits",
    out: Annotated[Path, typer.Option(help="Folder of the records and the report.")] = Path("runs"),
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds; the recipe's own number if left out.")
    ] = None,
    rows: Annotated[list[str] | None, typer.Option("--row", help="Only this row; may be repeated.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A setting of the recipe, as KEY=VALUE.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; HYPERSPHERE_DATA if left out.")] = None,
) -> None:
    """Run a table of the sources, row by row; rows that have a record are not run again."""
    from hypersphere.cli.reproduce import reproduce as run

    run(name, out, seeds=seeds, rows=rows or None, assignments=set_ or [], threads=threads, data_root=data_root)


@app.command("list")
def list_() -> None:
    """Show every objective, function, data set and recipe, one line each."""
    from hypersphere.cli.catalogue import print_catalogue

    print_catalogue()


def main() -> None:
    """Run the command line; whatever ends it early is told in one line.

    Misuse ends with code 2, damaged data with 3, a run that fails (it diverged, the disk is full) with 1, an interrupt
    with 130; a reader that closes the pipe ends it silently with 1.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no ± gets a ?
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end of Python
        sys.exit(1)
    except ValueError as error:
        from hypersphere.data import DamagedData

        _end(error, 3 if isinstance(error, DamagedData) else 2)
    except (FileNotFoundError, PermissionError, ImportError) as error:
        _end(error, 2)
    except (OSError, FloatingPointError) as error:
        _end(error, 1)


def _end(reason: object, code: int) -> NoReturn:
    print(f"hypersphere: {' '.join(str(reason).splitlines())}", file=sys.stderr)
    sys.exit(code)
