"""The application `hypersphere`: its commands, exit codes and error messages.

A command that fails prints one line on stderr. The exit code is 2 for invalid input, 3 for damaged files, 1 for a
failure at run time (divergence, full disk, out of memory) and 130 for an interrupt. The module of a command is imported
when the command is used, and torch when the command runs, so that `--help` answers quickly.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from hypersphere.cli.output import is_out_of_memory, printable, warn

__all__ = ["app", "main"]

COMMANDS = {
    "train": "Train a model and write a run.",
    "list": "List the names that other commands accept, with their options.",
    "reproduce": "Reproduce a table or figure of the sources.",
    "evaluate": "Measure a run or files of embeddings.",
    "embed": "Compute the embeddings of images.",
    "enroll": "Add a folder of images to a gallery.",
    "search": "Find the names in a gallery that are nearest to images.",
    "serve": "Answer searches in a gallery over HTTP.",
    "inspect": "Show how redundant the neurons of each layer are.",
    "adapt": "Fine-tune a language model by rotation.",
    "fold": "Fold rotations and operators into plain layers.",
    "export": "Write a run as ONNX or as a torch.export program.",
    "attack": "Measure the accuracy of a run under attacks.",
    "report": "Write an HTML report of runs or of records.",
    "pack": "Write a folder of images as tar shards.",
    "cite": "Print the BibTeX entries of the works that a run used.",
}
FUNCTIONS = {"list": "list_menus"}  # functions that are not named like their command
CONTEXT = {"train": {"allow_extra_args": True, "ignore_unknown_options": True}}  # for `--head.m=4`
INTERRUPTED = {"reproduce": "interrupted; finished rows are kept"}  # messages other than "interrupted"
MEMORY_OPTIONS = {  # the option to lower if a command is out of memory
    "train": "--batch-size",
    "evaluate": "number of --pairs",
    "embed": "--batch",
    "enroll": "--batch",
    "inspect": "--most",
    "attack": "--limit",
    "adapt": "--batch",
}
# Advice in errors of the library, for Python, and the same advice for the command line.
ADVICE = {
    "pass root= or": "pass --data-root or",
    "imported only with trust_code=True": "imported only with --trust-code",
    "pass its weights to build_experiment(weights=…)": "start a new run from them with hypersphere train --from",
    "source must be the folder of a run or": "initial weights (--from) must be the folder of a run or",
    "resume it, or choose another folder": "continue it with --resume auto, or choose another folder with --out",
}


class Command(TyperCommand):
    """A command whose help is plain text, because a rich table truncates option names on a narrow terminal."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, and the arguments and options by panel."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            panel = getattr(parameter, "rich_help_panel", None) or f"{parameter.param_type_name.capitalize()}s"
            if record := parameter.get_help_record(ctx):
                panels.setdefault(panel, []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


class Commands(TyperGroup):
    """The group of commands, each imported when it is used. Errors are printed in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # `get_command` returns the commands

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, imported now, or None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        function = getattr(importlib.import_module(f"hypersphere.cli.{cmd_name}"), FUNCTIONS.get(cmd_name, cmd_name))
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(cmd_name, cls=Command, context_settings=CONTEXT.get(cmd_name))(function)
        return typer.main.get_command(single)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; without arguments, show the overview."""
        return super().parse_args(ctx, args or ["--help"])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the overview as plain text, without importing the commands or rich."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        with formatter.section("Options"):
            records = (parameter.get_help_record(ctx) for parameter in self.get_params(ctx))
            formatter.write_dl([record for record in records if record])
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: Any) -> Any:
        """Run the requested command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            fail(INTERRUPTED.get(ctx.invoked_subcommand, "interrupted"), 130)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            size = re.search(r"allocate ([\d.]+ ?\w*)", str(error))
            request = f" (could not allocate {size[1]})" if size else ""
            option = MEMORY_OPTIONS.get(ctx.invoked_subcommand)
            advice = f"try a smaller {option}" if option else "try a machine with more memory"
            fail(f"out of memory{request}; {advice}", 1)
        except Exception as error:
            if not hasattr(error, "format_message"):  # only usage errors of typer and click have this method
                raise
            fail(error.format_message(), 2)


app = typer.Typer(
    name="hypersphere",
    cls=Commands,
    help="Deep learning on the hypersphere.",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Options may also be written with underscores, like the settings in files: --batch_size is --batch-size.
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)


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
    """Run the command line. An error is printed as one line; a closed output pipe exits silently with code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print "?" where the terminal cannot show a character such as ±
    # Print warnings, for example about an empty class folder, as one line without the line of code.
    warnings.formatwarning = lambda message, *_: f"hypersphere: {printable(' '.join(str(message).split()))}\n"
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        sys.exit(1)
    except ValueError as error:
        from hypersphere.data import DamagedData
        from hypersphere.gallery import DamagedGallery
        from hypersphere.training import DamagedCheckpoint

        fail(error, 3 if isinstance(error, DamagedData | DamagedCheckpoint | DamagedGallery) else 2)
    except (FileNotFoundError, PermissionError, ImportError) as error:
        fail(error, 2)
    except (OSError, FloatingPointError) as error:
        fail(error, 1)


def fail(reason: object, code: int) -> NoReturn:
    """Print the reason in one line, with advice for the command line, and exit with the code."""
    text = str(reason)
    for in_python, on_command_line in ADVICE.items():
        text = text.replace(in_python, on_command_line)
    warn(text)
    sys.exit(code)
