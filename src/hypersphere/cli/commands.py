"""The application `hypersphere`: `train`, `reproduce`, `list` and the commands of `run_commands`.

Commands import torch when they run, so that `--help` answers quickly.
"""

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


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Read settings from this .yaml or .json file.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set: digits, mnist, cifar10, image_folder…")] = None,
    model: Annotated[str | None, typer.Option(help="Network: toy_cnn, opt_cnn6, sphereface20…")] = None,
    operator: Annotated[str | None, typer.Option(help="Operator of its layers: none, sphere, ball, tanh…")] = None,
    head: Annotated[str | None, typer.Option(help="Head with the loss: softmax, a_softmax, arcface…")] = None,
    regularizer: Annotated[str | None, typer.Option(help="Regulariser: none, mhe, comhe, orthonormal…")] = None,
    rotation: Annotated[str | None, typer.Option(help="Rotation: none, cayley, gram_schmidt, stochastic…")] = None,
    optimizer: Annotated[str | None, typer.Option(help="Optimiser: sgd, adam or adamw.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Learning-rate schedule: one_cycle, cosine, steps…")] = None,
    epochs: Annotated[int | None, typer.Option(help="Number of passes over the data (10).")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per step, summed over processes (64).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for all random number generators (0).")] = None,
    precision: Annotated[str | None, typer.Option(help="Precision of the network: float32 or bfloat16.")] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile the network with torch.compile.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="Start from the weights of this run or .safetensors file.")
    ] = None,
    resume: Annotated[str, typer.Option(help="never, or auto: continue from the last checkpoint, if any.")] = ("never"),
    out: Annotated[Path, typer.Option(help="Folder to write the run to.")] = Path("runs/train"),
    data_root: DataRoot = None,
    device: Device = None,
    threads: Threads = None,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints within an epoch.")] = 60.0,
    keep: Annotated[int, typer.Option(help="Number of checkpoints to keep; older ones are deleted.")] = 3,
    log_every: Annotated[int, typer.Option(help="Steps between two lines in metrics.jsonl.")] = 10,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print settings and sizes without training.")] = False,
) -> None:
    """Train a network. Options of a component take dots: --head.m=4, --optimizer.lr=0.1, --data.limit=500.

    With N processes: `torchrun --nproc-per-node N -m hypersphere train …`.
    --head.sharded then divides the classes among them.
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
    name: Annotated[str, typer.Argument(help="Name of a recipe; `hypersphere list recipes` shows them.")] = "digits",
    out: Annotated[Path, typer.Option(help="Folder to write records and report to.")] = Path("runs"),
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds; default: that of the recipe.")] = None,
    rows: Annotated[list[str] | None, typer.Option("--row", help="Run only this row; can be repeated.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting of the recipe: KEY=VALUE; can be repeated.")
    ] = None,
    threads: Threads = None,
    data_root: DataRoot = None,
) -> None:
    """Reproduce a table or figure of the sources, row by row; rows that already have a record are not run again."""
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
    menu: Annotated[str | None, typer.Argument(help="Show only this menu, for example heads or data-sets.")] = None,
    entry: Annotated[str | None, typer.Argument(help="Show only this entry of the menu, with its options.")] = None,
) -> None:
    """List the available heads, networks, data sets, recipes and so on, or show one entry with its options."""
    from hypersphere.cli.catalogue import print_catalogue

    print_catalogue(menu, entry)


def main() -> None:
    """Run the command line. An error becomes one line on stderr; a closed output pipe exits silently with code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print "?" where the terminal cannot show a character such as ±
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
