"""`hypersphere evaluate`: evaluate the features of a run or of a file, and print one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypersphere._validation import require
from hypersphere.cli.options import DataRoot, Device, JsonFile, Step, Threads, TrustCode, parse_numbers
from hypersphere.cli.output import check_target, write_json

__all__ = ["evaluate"]


def evaluate(
    source: Annotated[Path, typer.Argument(help="Folder of a run, or embeddings as .npy or .safetensors.")],
    second: Annotated[
        Path | None, typer.Argument(help="Labels of the embeddings, or the second embeddings of the pairs, as .npy.")
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(
            help=r"File of pairs (`name name 0|1 \[fold]`, or LFW's pairs.txt), or the number of each kind to draw."
        ),
    ] = None,
    same: Annotated[Path | None, typer.Option(help="With two files of embeddings: which pairs match, as .npy.")] = None,
    folds: Annotated[
        int | None, typer.Option(min=2, help="Number of folds of the pairs; default: those of the file, or 10.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Ranks of identification, separated by commas.")] = "1,5,10",
    far: Annotated[str, typer.Option(help="False accept rates, separated by commas.")] = "0.1,0.01,0.001",
    subtract_mean: Annotated[
        bool, typer.Option("--subtract-mean", help="Verification: subtract the mean embedding of the other folds.")
    ] = False,
    pca: Annotated[
        int | None,
        typer.Option(min=1, help="Project on principal components, fitted on the training data of a run or the file."),
    ] = None,
    bootstrap: Annotated[
        int | None,
        typer.Option(
            min=0, help="Bootstrap draws for 95 % intervals, 0 for none; default: 1000 for up to 20,000 pairs."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed for the drawn pairs and the bootstrap.")] = 0,
    mirror: Annotated[
        bool, typer.Option("--mirror", help="Also use the features of the mirrored images (runs only).")
    ] = False,
    step: Step = None,
    json: JsonFile = None,
    device: Device = None,
    threads: Threads = None,
    data_root: DataRoot = None,
    trust_code: TrustCode = False,
) -> None:
    """Evaluate a run or embeddings: classification, verification, identification, Fisher score, hardness."""
    from hypersphere import report
    from hypersphere.cli.evaluation_table import evaluation_table
    from hypersphere.cli.measures import Protocol, measure_files, measure_run
    from hypersphere.cli.opening import open_run

    check_target("--json", json, [".json"])
    protocol = Protocol(
        pairs=int(pairs) if pairs and pairs.isdigit() else Path(pairs) if pairs else None,
        folds=folds,
        ranks=parse_numbers("--ranks", ranks, int),
        far=parse_numbers("--far", far, float),
        bootstrap=bootstrap,
        seed=seed,
        subtract_mean=subtract_mean,
        pca=pca,
    )
    if not source.suffix and not source.exists():
        raise ValueError(f"{source} not found; give the folder of a run or a file of embeddings")
    if source.is_dir():
        require(second is None, "second", "omitted if the source is a run", str(second))
        opened = open_run(source, data_root, step=step, device=device, trust_code=trust_code)
        results = measure_run(opened, protocol, mirror)
    else:
        for option, value in (("--mirror", mirror or None), ("--step", step), ("--device", device)):
            require(value is None, option, "omitted unless the source is a run", value)
        results = measure_files(source, second, same, protocol)
    results = {"source": str(source), **results}
    if json is not None:
        write_json(json, results)  # before printing, so that a closed pipe cannot prevent it
    report.print_table(evaluation_table(results))
