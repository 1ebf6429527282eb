"""The command line: what trains, what lists, and those of `run_commands`. Nothing here imports torch too early."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hypersphere.cli import run_commands
from hypersphere.cli.ending import Commands, end_with
from hypersphere.cli.options import DataRoot, Device, Threads

__all__ = ["app", "main"]

app = typer.Typer(
    name="hypersphere",
    cls=Commands,
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


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Settings in a .yaml or .json file.")] = None,
    data: Annotated[str | None, typer.Option(help="What is learned: digits, mnist, cifar10, image_folder…")] = None,
    model: Annotated[str | None, typer.Option(help="The network: toy_cnn, opt_cnn6, sphereface20…")] = None,
    operator: Annotated[str | None, typer.Option(help="Of its layers: none, sphere, ball, tanh…")] = None,
    head: Annotated[str | None, typer.Option(help="The objective: softmax, a_softmax, arcface…")] = None,
    regularizer: Annotated[str | None, typer.Option(help="none, mhe, comhe, orthonormal…")] = None,
    rotation: Annotated[str | None, typer.Option(help="none, cayley, gram_schmidt, stochastic…")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Of the learning rate: one_cycle, cosine, steps…")] = None,
    epochs: Annotated[int | None, typer.Option(help="How many times through the data (10).")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples a step, over all processes (64).")] = None,
    seed: Annotated[int | None, typer.Option(help="Of all random numbers (0).")] = None,
    precision: Annotated[str | None, typer.Option(help="Of the network: float32 or bfloat16.")] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile the network with torch.compile.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="Begin with the weights of this run or .safetensors file.")
    ] = None,
    resume: Annotated[str, typer.Option(help="never, or auto: go on from the last checkpoint if there is one.")] = (
        "never"
    ),
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/train"),
    data_root: DataRoot = None,
    device: Device = None,
    threads: Threads = None,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints within an epoch.")] = 60.0,
    keep: Annotated[int, typer.Option(help="How many of the last checkpoints stay.")] = 3,
    log_every: Annotated[int, typer.Option(help="Steps between lines of metrics.jsonl.")] = 10,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events for TensorBoard too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print settings and sizes, and write nothing.")] = False,
) -> None:
    """Train a network; any option of a part by its name: --head.m=4, --optimizer.lr=0.1, --data.limit=500.

    Also under `torchrun --nproc-per-node N -m hypersphere train …`, where --head.sharded spreads the classes.
    """
    from hypersphere.cli.train import train as run

    settings = {
        "data": data,
        "model": model,
        "operator": operator,
        "head": head,
        "regularizer": regularizer,
        "rotation": rotation,
        "optimizer": optimizer,
        "schedule": schedule,
        "epochs": epochs,
        "batch_size": batch_size,
        "seed": seed,
        "precision": precision,
        "compile": compile,
    }
    code = run(
        out,
        config=config,
        options=settings,
        words=ctx.args,
        names=[name for parameter in ctx.command.params for name in parameter.opts],
        start=start,
        resume=resume,
        data_root=data_root,
        device=device,
        threads=threads,
        save_every=save_every,
        keep=keep,
        log_every=log_every,
        tensorboard=tensorboard,
        dry_run=dry_run,
    )
    if code:
        raise typer.Exit(code)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="A recipe; `hypersphere list recipes` shows them.")] = "digits",
    out: Annotated[Path, typer.Option(help="Folder of the records and the report.")] = Path("runs"),
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds; the recipe's own number if left out.")
    ] = None,
    rows: Annotated[list[str] | None, typer.Option("--row", help="Only this row; may be repeated.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A setting of the recipe, as KEY=VALUE.")] = None,
    threads: Threads = None,
    data_root: DataRoot = None,
) -> None:
    """Run a table of the sources, row by row; rows that have a record are not run again."""
    from hypersphere.cli.reproduce import reproduce as run

    run(name, out, seeds=seeds, rows=rows or None, assignments=set_ or [], threads=threads, data_root=data_root)


for command in (
    run_commands.evaluate,
    run_commands.embed,
    run_commands.inspect,
    run_commands.fold,
    run_commands.export,
    run_commands.attack,
    run_commands.report,
    run_commands.cite,
):
    app.command()(command)


@app.command("list")
def list_(
    menu: Annotated[str | None, typer.Argument(help="Only this menu, as heads or data-sets.")] = None,
    entry: Annotated[str | None, typer.Argument(help="Only this entry of it, with its options.")] = None,
) -> None:
    """Show everything that has a name (heads, networks, data sets, recipes…), or one of them with its options."""
    from hypersphere.cli.catalogue import print_catalogue

    print_catalogue(menu, entry)


def main() -> None:
    """Run the command line; a reader that closes the pipe ends it silently with 1, anything else in one line."""
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
    except Exception as error:
        end_with(error)
