"""Compare searches of a gallery with a bare float32 matrix product and `topk`.

The baseline multiplies unit queries with all embeddings at once and takes the best ten. The target of 80 % of its
throughput for the exact search is a ratio of 1.25; int8 should be 2.5 times as fast as the exact search, and HNSW
20 times, with a recall@1 of 0.99. Embeddings are those of synthetic people: ten noisy copies of a centre in a subspace
of 32 dimensions. Queries are noisy embeddings.
"""

from __future__ import annotations

import argparse
import importlib.util
import time

import torch

from benchmarks.timing import compare, save
from hypersphere.gallery import Gallery

K = 10
PER_PERSON = 10
TARGETS = {"exact float32": 1.25, "exact int8": 1.25 / 2.5, "hnsw": 1.25 / 20}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="./run bench gallery", description=__doc__)
    parser.add_argument("--gallery", type=int, nargs="+", default=[100_000, 1_000_000], help="gallery sizes")
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 64], help="queries per search")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    approximate = ["hnsw", "ivf"] if importlib.util.find_spec("faiss") else []
    if approximate:
        import faiss

        faiss.omp_set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    tables, notes = {}, []
    for size in options.gallery:
        embeddings, probes = people(size, options.dim)
        galleries = build(embeddings, approximate)
        notes += describe(galleries, embeddings, probes)
        for count in options.queries:
            steps = contenders(galleries, embeddings, probes[:count])
            title = f"{count:,} queries among {size:,} × {options.dim}"
            tables[title] = compare(steps, baseline="product and topk", rounds=options.rounds, warmup=1, clock=clock)
    save("gallery", "Search in a gallery", tables, TARGETS, notes)


def people(size: int, dim: int, probes: int = 256):
    """Return the unit embeddings of synthetic people, and queries near some of them."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(-(-size // PER_PERSON), 32, generator=generator)
    centres = centres @ torch.randn(32, dim, generator=generator) / 32**0.5
    embeddings = centres.repeat_interleave(PER_PERSON, 0)[:size]
    embeddings += 0.4 * torch.randn(size, dim, generator=generator)
    embeddings /= embeddings.norm(dim=1, keepdim=True)
    chosen = torch.randint(size, (probes,), generator=generator)
    queries = embeddings[chosen] + 0.5 / dim**0.5 * torch.randn(probes, dim, generator=generator)
    return embeddings, queries / queries.norm(dim=1, keepdim=True)


def build(embeddings, approximate):
    """Return one gallery per contender."""
    size, dim = embeddings.shape
    galleries = {f"exact {dtype}": Gallery(dim, dtype) for dtype in ("float32", "float16", "int8")}
    galleries["binary, rescored"] = Gallery(dim, "binary", keep_full=True)
    galleries |= {index: Gallery(dim, "float32", index) for index in approximate}
    names = [f"{entry // PER_PERSON}/{entry}" for entry in range(size)]
    for gallery in galleries.values():
        gallery.enroll(names, embeddings)
        gallery.search(embeddings[:1])  # builds the index
    return galleries


def describe(galleries, embeddings, probes):
    """Return one line per gallery: memory and recall@1 against the product in float64."""
    rows = [(part.double() @ embeddings.double().mT).argmax(1) for part in probes.split(16)]
    best = torch.cat(rows)
    lines = []
    for name, gallery in galleries.items():
        recall = (gallery.search(probes, 1).entries[:, 0] == best).float().mean()
        memory = gallery.nbytes / embeddings.nbytes
        lines.append(f"{len(embeddings):,} embeddings, {name}: recall@1 {recall:.3f}, memory {memory:.3f} of float32")
    return lines


def contenders(galleries, embeddings, queries):
    """Return the functions to compare, by name."""
    steps = {"product and topk": lambda: (queries @ embeddings.mT).topk(K)}
    return steps | {name: lambda gallery=gallery: gallery.search(queries, K) for name, gallery in galleries.items()}
