"""The commands and their options. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app", "main"]

app = typer.Typer(
    name="hypersphere",
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

    run(name, out, seeds=seeds, rows=rows, assignments=set_ or [], threads=threads, data_root=data_root)


@app.command("list")
def list_() -> None:
    """Show every objective, function, data set and recipe, one line each."""
    from hypersphere.cli.catalogue import print_catalogue

    print_catalogue()


def main() -> None:
    """Run the command line; misuse ends with one line and code 2, damaged data with 3, an interrupt with 130."""
    try:
        app()
    except (ValueError, FileNotFoundError, PermissionError, ImportError) as error:
        code = 3 if type(error).__name__ == "DamagedData" else 2
        print(f"hypersphere: {error}", file=sys.stderr)
        sys.exit(code)
    except KeyboardInterrupt:
        print("hypersphere: interrupted; finished rows are kept", file=sys.stderr)
        sys.exit(130)
