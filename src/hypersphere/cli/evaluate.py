"""`hypersphere evaluate`: evaluate the features of a run or of a file, and print one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypersphere._validation import require
from hypersphere.cli import options
from hypersphere.cli.output import check_target, write_json

__all__ = ["evaluate"]


def evaluate(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or embeddings as .npy or .safetensors.")
    ],
    second: Annotated[
        Path | None, typer.Argument(help="Labels of the embeddings, or the second embeddings of the pairs, as .npy.")
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(
            help="File of pairs (`name name 0|1 [fold]`, or LFW's pairs.txt), or the number of each kind to draw."
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
        typer.Option(
            min=1,
            help="Project onto this number of principal components, fitted on training data of a run, or on the file.",
        ),
    ] = None,
    bootstrap: Annotated[
        int | None,
        typer.Option(
            min=0, help="Bootstrap draws for 95 % intervals, 0 for none; default: 1000, fewer for many pairs."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed for the drawn pairs and the bootstrap.")] = 0,
    mirror: Annotated[
        bool, typer.Option("--mirror", help="Also use the features of the mirrored images (runs only).")
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Fit probabilities and thresholds on half of the held-out classes, test them on the others, and store "
            "them in the run.",
        ),
    ] = False,
    prior: Annotated[
        float | None, typer.Option(help="With --calibrate: fraction of same pairs that probabilities assume (0.5).")
    ] = None,
    step: options.Step = None,
    json: options.JsonFile = None,
    device: options.Device = None,
    threads: options.Threads = None,
    data_root: options.DataRoot = None,
    trust_code: options.TrustCode = False,
) -> None:
    """Evaluate a run or embeddings: classification, verification, identification, Fisher score, hardness."""
    from hypersphere import report
    from hypersphere.cli.measures import EvaluationOptions, measure_files, measure_run
    from hypersphere.cli.opening import open_run
    from hypersphere.data.embeddings import SUFFIXES

    if source.suffix not in SUFFIXES:
        options.check_run(source, also=f" or a file of embeddings ({', '.join(SUFFIXES)})")
    check_target("--json", json, [".json"])
    protocol = EvaluationOptions(
        pairs=int(pairs) if pairs and pairs.isdecimal() else Path(pairs) if pairs else None,
        folds=folds,
        ranks=options.parse_numbers("--ranks", ranks, int),
        far=options.parse_numbers("--far", far, float),
        bootstrap=bootstrap,
        seed=seed,
        subtract_mean=subtract_mean,
        pca=pca,
        mirror=mirror,
        calibrate=calibrate,
        prior=0.5 if prior is None else prior,
    )
    require(prior is None or calibrate, "--prior", "omitted without --calibrate", prior)
    if options.is_run(source):
        for option, path in (("SECOND", second), ("--same", same)):
            require(path is None, option, "omitted if RUN is the folder of a run", str(path))
        opened = open_run(source, data_root, step=step, device=device, trust_code=trust_code)
        results = measure_run(opened, protocol)
    else:
        flags = (("--mirror", mirror or None), ("--calibrate", calibrate or None))
        for option, value in (*flags, ("--step", step), ("--device", device)):
            require(value is None, option, "omitted unless RUN is the folder of a run", value)
        results = measure_files(source, second, same, protocol)
    results = {"source": str(source), **results}
    if json is not None:
        write_json(json, results)  # before printing, so that a closed pipe cannot prevent it
    report.print_table(report.evaluation_table(results))
