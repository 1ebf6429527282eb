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
        except Exception as error:
            if not hasattr(error, "format_message"):  # which errors of the command line itself have
                raise
            _end(error.format_message(), 2)


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
    resume: Annotated[str, typer.Option(help="never, or auto: go on from the last checkpoint if there is one.")] = (
        "never"
    ),
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/train"),
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; HYPERSPHERE_DATA if left out.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute; an accelerator if there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints within an epoch.")] = 60.0,
    log_every: Annotated[int, typer.Option(help="Steps between lines of metrics.jsonl.")] = 10,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events for TensorBoard too.")] = False,
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
        resume=resume,
        data_root=data_root,
        device=device,
        threads=threads,
        save_every=save_every,
        log_every=log_every,
        tensorboard=tensorboard,
    )
    if code:
        raise typer.Exit(code)


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


@app.command()
def evaluate(
    source: Annotated[Path, typer.Argument(help="A run, or embeddings as .npy or .safetensors.")],
    second: Annotated[
        Path | None, typer.Argument(help="Labels of the embeddings, or the other side of pairs, as .npy.")
    ] = None,
    pairs: Annotated[
        str | None, typer.Option(help="A file of pairs (`name name 0|1 [fold]`), or how many of either kind to draw.")
    ] = None,
    same: Annotated[Path | None, typer.Option(help="With two sides of pairs: which are the same, as .npy.")] = None,
    folds: Annotated[
        int | None, typer.Option(min=2, help="Folds of the pairs; those of the file, or 10, if left out.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Ranks of identification, with commas.")] = "1,5,10",
    far: Annotated[str, typer.Option(help="False accept rates, with commas.")] = "0.1,0.01,0.001",
    seed: Annotated[int, typer.Option(min=0, help="Of the drawn pairs.")] = 0,
    mirror: Annotated[bool, typer.Option("--mirror", help="Of a run: features of mirror images too.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this .json file.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; HYPERSPHERE_DATA if left out.")] = None,
) -> None:
    """Measure a run or embeddings: classification, verification, identification, Fisher score, hardness."""
    from hypersphere.cli.evaluate import Protocol, numbers
    from hypersphere.cli.evaluate import evaluate as run

    _use_threads(threads)
    chosen = int(pairs) if pairs and pairs.isdigit() else Path(pairs) if pairs else None
    protocol = Protocol(chosen, folds, numbers("--ranks", ranks, int), numbers("--far", far, float), seed)
    run(source, second, protocol, same=same, mirror=mirror, json_file=json, data_root=data_root)


@app.command()
def embed(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    images: Annotated[
        Path | None, typer.Argument(help="Folder of images, or of one folder a class; the run's test data if left out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A .npy or .safetensors file; RUN/embeddings.safetensors if left out.")
    ] = None,
    mirror: Annotated[bool, typer.Option("--mirror", help="Put the features of the mirror image beside.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images at once.")] = 500,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; HYPERSPHERE_DATA if left out.")] = None,
) -> None:
    """Write the embeddings of images, with names and labels as JSON beside them."""
    from hypersphere.cli.embed import embed as run

    _use_threads(threads)
    run(folder, images, out=out, mirror=mirror, batch=batch, data_root=data_root)


@app.command()
def inspect(
    source: Annotated[
        Path, typer.Argument(help="A run, a .safetensors file (or a folder of them), or a file of torch.save.")
    ],
    html: Annotated[Path | None, typer.Option(help="Write a page with histograms to this .html file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this .json file.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Nearest and most opposite pairs to list a layer.")] = 5,
    most: Annotated[int, typer.Option(min=2, help="Neurons of larger layers are sampled.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Of samples and probes.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; HYPERSPHERE_DATA if left out.")] = None,
) -> None:
    """Show how redundant the neurons of every layer are, beside random ones."""
    from hypersphere.cli.inspect import inspect as run

    _use_threads(threads)
    run(source, pairs=pairs, most=most, seed=seed, html=html, json_file=json, data_root=data_root)


@app.command()
def fold(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a rotated or converted run.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the plain run; RUN/folded if left out.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; HYPERSPHERE_DATA if left out.")] = None,
) -> None:
    """Make a run of plain layers with the same outputs, and write its weights as one file."""
    from hypersphere.cli.fold import fold as run

    run(folder, out, data_root=data_root)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    to: Annotated[str, typer.Option(help="onnx, or torch for a torch.export program.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="A .onnx or .pt2 file; RUN/model.onnx or RUN/model.pt2 if left out.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; HYPERSPHERE_DATA if left out.")] = None,
) -> None:
    """Write the network and head as ONNX or torch.export, once they are found to compute the same."""
    from hypersphere.cli.export import export as run

    run(folder, to, out, data_root=data_root)


@app.command()
def attack(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    name: Annotated[str, typer.Option("--attack", help="fgsm, bim or deepfool.")] = "fgsm",
    epsilon: Annotated[str, typer.Option(help="Strengths of fgsm and bim, with commas.")] = "2/255,4/255,8/255",
    norm: Annotated[str, typer.Option(help="What deepfool keeps small: l2 or linf.")] = "l2",
    source: Annotated[
        Path | None, typer.Option(help="Another run, that attacks are made on and transferred from.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many test images.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this .png file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this .json file.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; HYPERSPHERE_DATA if left out.")] = None,
) -> None:
    """Measure the accuracy of a run under attack, white-box or transferred."""
    from hypersphere.cli.attack import attack as run
    from hypersphere.cli.evaluate import numbers

    _use_threads(threads)
    run(
        folder,
        name,
        epsilons=numbers("--epsilon", epsilon, float),
        norm=norm,
        source=source,
        limit=limit,
        plot=plot,
        json_file=json,
        data_root=data_root,
    )


@app.command()
def cite(
    folder: Annotated[Path | None, typer.Argument(metavar="RUN", help="Folder of the run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All works that the library rests on.")] = False,
) -> None:
    """Print the BibTeX of what a run used."""
    from hypersphere.cli.cite import cite as run

    run(folder, everything=everything)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Runs of `train`, or folders of records of `reproduce`.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; report.html in the folder, or here if there are several.")
    ] = None,
    landscape: Annotated[
        bool, typer.Option("--landscape", help="Measure loss and error around the trained weights too.")
    ] = False,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; HYPERSPHERE_DATA if left out.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
) -> None:
    """Write one HTML file of one or several runs: curves, features on the sphere, angles, layers."""
    from hypersphere.cli.report import report as run

    _use_threads(threads)
    run(folders, out, landscape=landscape, data_root=data_root)


@app.command("list")
def list_(
    menu: Annotated[str | None, typer.Argument(help="Only this menu, as heads or recipes.")] = None,
) -> None:
    """Show every head, operator, regulariser, rotation, network, attack, data set and recipe, one line each."""
    from hypersphere.cli.catalogue import print_catalogue

    print_catalogue(menu)


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def main() -> None:
    """Run the command line; whatever ends it early is told in one line.

    Misuse ends with code 2, damaged data or checkpoints with 3, a run that fails (it diverged, the disk is full) with
    1, an interrupt with 130; a reader that closes the pipe ends it silently with 1.
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
        from hypersphere.training import DamagedCheckpoint

        _end(error, 3 if isinstance(error, DamagedData | DamagedCheckpoint) else 2)
    except (FileNotFoundError, PermissionError, ImportError) as error:
        _end(error, 2)
    except (OSError, FloatingPointError) as error:
        _end(error, 1)


def _end(reason: object, code: int) -> NoReturn:
    print(f"hypersphere: {' '.join(str(reason).splitlines())}", file=sys.stderr)
    sys.exit(code)
