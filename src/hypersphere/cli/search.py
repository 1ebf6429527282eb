"""`hypersphere search`: find the names in a gallery that are nearest to images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hypersphere.cli import options

__all__ = ["search"]


def search(
    gallery: options.GalleryFolder,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Images, or a folder of images.")],
    run: options.OfRun,
    k: Annotated[int, typer.Option("-k", min=1, help="Number of names per image.")] = 5,
    photos: Annotated[
        bool, typer.Option("--photos", help="List the nearest photos instead of names, so that a name may be repeated.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    step: options.Step = None,
    device: options.Device = None,
    threads: options.Threads = None,
    trust_code: options.TrustCode = False,
) -> None:
    """Find the names in a gallery that are nearest to images by cosine, with probabilities if the run is calibrated."""
    from hypersphere import report
    from hypersphere._files import strict_json
    from hypersphere.cli.opening import open_run
    from hypersphere.gallery import Gallery

    enrolled = Gallery.load(gallery)
    opened = open_run(run, step=step, device=device, with_data=False, trust_code=trust_code)
    source, _ = opened.images(images, "search")
    features, _ = opened.embed(source)
    matches = enrolled.search(features, k, per_name=not photos, fingerprint=opened.fingerprint)
    calibration = opened.calibration() if enrolled.scores_are_cosines else None
    results: list[dict[str, Any]] = []
    for position, (names, scores) in enumerate(zip(matches.names, matches.scores.tolist(), strict=True)):
        rows = [{"name": name, "cosine": score} for name, score in zip(names, scores, strict=True)]
        if calibration is not None and rows:
            values = calibration.calibration.probability(scores).tolist()
            rows = [{**row, "probability": value} for row, value in zip(rows, values, strict=True)]
        results.append({"image": source.name(position), "matches": rows})
    if json:
        print(strict_json(results, indent=1))
        return
    columns = [report.Column("image"), report.Column("name"), report.Column("cosine", format=".4f")]
    columns += [report.Column("probability", format=".3f")] * (calibration is not None)
    lines = [[result["image"], *row.values()] for result in results for row in result["matches"]]
    note = ""
    if calibration is not None:
        note = "Probability: that the image and the nearest photo of this name show the same identity."
    elif not enrolled.scores_are_cosines:
        note = "Cosine: with the signs of the photo's embedding, so thresholds and calibrations do not hold for it."
    title = f"{len(enrolled)} photos of {len(set(enrolled.names))} names"
    report.print_table(report.Table(title, columns, lines, note))
