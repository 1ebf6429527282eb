"""Compare identification of 1,000 probes in a large gallery with the matrix products that it contains.

The baseline multiplies normalised probes with the gallery in the same blocks and discards the scores. The target of
60 % of its speed is a ratio of 1.67.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.timing import compare, save
from hypersphere import evaluation, sphere

TARGETS = {"identify, all labelled": 1 / 0.6, "identify, distractors": 1 / 0.6, "identify, strangers": 1 / 0.6}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="./run bench evaluation", description=__doc__)
    parser.add_argument("--gallery", type=int, nargs="+", default=[1_000_000], help="gallery sizes")
    parser.add_argument("--probes", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    tables = {}
    for size in options.gallery:
        steps = contenders(options.probes, size, options.dim)
        title = f"{options.probes:,} probes among {size:,} × {options.dim}"
        tables[title] = compare(steps, baseline="matrix products", rounds=options.rounds, warmup=1, clock=clock)
    save("evaluation", "Identification", tables, TARGETS)


def contenders(probes: int, size: int, dim: int):
    """Return the functions to compare, by name."""
    generator = torch.Generator().manual_seed(0)
    gallery = torch.randn(size, dim, generator=generator)
    labels = torch.arange(size) // 2
    x = gallery[:probes] + 0.5 * torch.randn(probes, dim, generator=generator)
    y = labels[:probes]
    directions = sphere.row_directions(x)

    def products():
        scores = torch.empty(probes, 8192)
        for block in gallery.split(8192):
            torch.mm(directions, block.mT, out=scores[:, : len(block)])

    return {
        "matrix products": products,
        "identify, all labelled": lambda: evaluation.identify(x, y, gallery, labels),
        "identify, distractors": lambda: evaluation.identify(
            x, y, gallery[:probes], labels[:probes], distractors=gallery[probes:]
        ),
        "identify, strangers": lambda: evaluation.identify(x, y - (y > 0) * size, gallery, labels),
    }
