"""Decisions about speakers with a pretrained encoder, from the recordings of a few voices.

The plan, written before the first run:

1. Data: recordings in packages of Debian 12. The voice prompts of Asterisk (asterisk-core-sounds-en-wav, -es-wav,
   -fr-wav, -it-wav and -ru-wav, asterisk-prompt-es-co, -fr-armelle and -it-menardi-wav) have eight voices of 285 to 599
   files in telephone quality. Two of these belong to one person, who speaks English and Spanish. The letters and
   syllables of klettres-data have 20 voices of 28 to 521 files, one per language or accent. They count as 20 people,
   which the package does not say. Pauses are removed, and the files of a voice are joined in random order until an
   utterance has four seconds. A voice has at most 20 utterances.
2. Encoder: the 256-d speaker encoder of the package Resemblyzer, which was trained on English speech.
3. All pairs of utterances: equal error rate, minDCF with a prior of 0.01, Cllr after calibration on the same pairs.
   Speaker, language and microphone change together here, so different pairs are easier than in practice. Expected: an
   equal error rate below 10 %.
4. Promised and measured false accept rate: as in `decisions`, for FAR 1e-1 and 1e-2, with 20 random halves of the
   people. Expected: the median is right within a factor of two at 1e-1, and the spread is much larger than for faces,
   because half of the people form only 78 different pairs of people.
5. Score normalisation: the utterances of one half are the cohort of an adaptive s-norm for the pairs of the other half.
   Expected: a lower equal error rate, because utterances of telephone quality resemble each other.
6. Gallery: the first utterance of each person is enrolled, and the others search. The share of queries whose person
   comes first, in float32, int8 and binary. The person with two languages is enrolled in English, and the share of the
   Spanish utterances that find this person is reported too. Expected: above 90 %, int8 without loss, and a lower share
   in Spanish.

Nothing is tuned. `./run bench speakers --embed FOLDER` computes the embeddings, where FOLDER is `usr/share` of the
unpacked Debian packages. It needs the packages Resemblyzer, soundfile and soxr.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy
import torch

import hypersphere as hs
from benchmarks import decisions
from hypersphere.evaluation import Calibration, cllr, min_dcf, roc, score_norm

RESULTS = Path(__file__).parent / "results"
FARS = (1e-1, 1e-2)
RATE = 16_000
SECONDS, MOST = 4, 20
SPLITS = 20
# The voice with two languages. Its English utterances come first.
BILINGUAL = {"en_US_f_Allison": "Allison English", "es_MX_f_Allison": "Allison Spanish"}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="./run bench speakers", description=__doc__)
    parser.add_argument("embeddings", type=Path, help="file of embeddings, written by --embed")
    parser.add_argument("--embed", type=Path, metavar="FOLDER", help="compute the embeddings of these recordings first")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.embed is not None:
        embed(options.embed, options.embeddings)
    with numpy.load(options.embeddings, allow_pickle=False) as file:
        x, voices = torch.from_numpy(file["embeddings"]).float(), file["voices"].tolist()
    people = [voice.split()[0] for voice in voices]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(people))}
    y = torch.tensor([numbers[name] for name in people])
    record = {
        "sizes": {"people": len(numbers), "utterances": len(y), "dimensions": x.shape[1]},
        "pairs": pairs(x, y),
        "splits": decisions.promises(x, y, SPLITS, FARS),
        "normalisation": normalisation(x, y),
        "gallery": {dtype: gallery(x, y, voices, dtype) for dtype in ("float32", "int8", "binary")},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "speakers.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "speakers.md").write_text(report(record))
    print(report(record))


def embed(folder: Path, out: Path) -> None:
    """Write the embeddings of all utterances and the names of their voices."""
    from resemblyzer import VoiceEncoder

    encoder = VoiceEncoder("cpu", verbose=False)
    embeddings, voices = [], []
    for voice, files in recordings(folder).items():
        for utterance in utterances(files)[:MOST]:
            embeddings.append(encoder.embed_utterance(utterance))
            voices.append(voice)
    numpy.savez(out, embeddings=numpy.stack(embeddings), voices=numpy.array(voices))


def recordings(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each voice."""
    voices: dict[str, list[Path]] = {}
    for place in sorted((folder / "asterisk" / "sounds").iterdir()):
        if "_" in place.name or place.name in ("es", "fr"):  # the other folders are links to these
            files = [file for file in sorted(place.rglob("*")) if file.suffix in (".wav", ".gsm")]
            voice = BILINGUAL.get(place.name, f"asterisk-{place.name}")
            voices[voice] = [file for file in files if "silence" not in file.parts and "beep" not in file.name]
    for place in sorted((folder / "klettres").iterdir()):
        files = sorted(place.rglob("*.ogg"))
        if files:
            voices[f"klettres-{place.name}"] = files
    return voices


def utterances(files: list[Path]) -> list[numpy.ndarray]:
    """Join clips of a voice in random order until an utterance has four seconds of speech."""
    from resemblyzer.audio import normalize_volume, trim_long_silences

    files = list(files)
    random.Random(0).shuffle(files)
    joined: list[numpy.ndarray] = []
    parts: list[numpy.ndarray] = []
    for file in files:
        clip = read(file)
        if len(clip) < RATE // 10 or abs(clip).max() < 1e-3:  # silence
            continue
        parts.append(trim_long_silences(normalize_volume(clip, -30, increase_only=True)))
        if sum(map(len, parts)) >= SECONDS * RATE:
            joined.append(numpy.concatenate(parts))
            parts = []
    return joined


def read(file: Path) -> numpy.ndarray:
    """Return the samples of a file at 16 kHz."""
    import soundfile
    import soxr

    telephone: dict[str, Any] = {"format": "RAW", "subtype": "GSM610", "samplerate": 8000, "channels": 1}
    samples, rate = soundfile.read(file, always_2d=True, **(telephone if file.suffix == ".gsm" else {}))
    return soxr.resample(samples.mean(1), rate, RATE).astype(numpy.float32)


def all_pairs(x, y) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of all pairs and whether they belong to one person."""
    i, j = torch.triu_indices(len(y), len(y), 1)
    return hs.sphere.cosines(x, x)[i, j], y[i] == y[j]


def pairs(x, y) -> dict[str, float]:
    scores, same = all_pairs(x, y)
    llrs = Calibration.fit(scores, same, prior=0.5).llr(scores)
    return {**costs(scores, same), "cllr": cllr(llrs, same)}


def costs(scores, same) -> dict[str, float]:
    return {"eer": roc(scores, same).eer, "min_dcf": min_dcf(scores, same, prior=0.01)}


def normalisation(x, y) -> list[dict[str, dict[str, float]]]:
    """Return for each split the costs of the pairs of one half, with and without the other half as a cohort."""
    rows = []
    for split in range(SPLITS):
        order = torch.randperm(int(y.max()) + 1, generator=torch.Generator().manual_seed(split))
        measured = torch.isin(y, order[: len(order) // 2])
        scores, same = all_pairs(x[measured], y[measured])
        cosines = hs.sphere.cosines(x[measured], x[~measured])
        i, j = torch.triu_indices(len(cosines), len(cosines), 1)
        rows.append({"raw": costs(scores, same), "normalised": costs(score_norm(scores, cosines[i], cosines[j]), same)})
    return rows


def gallery(x, y, voices: list[str], dtype: str) -> dict[str, float]:
    """Return the percentage of queries whose person comes first, and the same for the second language of one person."""
    first = torch.tensor([int((y == person).nonzero()[0]) for person in range(int(y.max()) + 1)])
    enrolled = hs.gallery.Gallery(x.shape[1], dtype)
    enrolled.enroll([str(person) for person in range(len(first))], x[first])
    queries = torch.ones(len(y), dtype=torch.bool)
    queries[first] = False
    found = (enrolled.search(x, 1).entries.squeeze(1) == y).double()
    spanish = torch.tensor([voice == BILINGUAL["es_MX_f_Allison"] for voice in voices])
    return {"all": 100 * float(found[queries].mean()), "second language": 100 * float(found[queries & spanish].mean())}


def report(record: dict) -> str:
    """Return the tables in Markdown."""
    sizes, whole = record["sizes"], record["pairs"]
    lines = [
        "# Decisions about speakers with a pretrained encoder",
        "",
        f"{sizes['people']} people, {sizes['utterances']} utterances, {sizes['dimensions']} dimensions.",
        f"All pairs: equal error rate {100 * whole['eer']:.2f} %, minDCF {whole['min_dcf']:.3f}, "
        f"Cllr {whole['cllr']:.3f} bits.",
        "",
        f"| promised FAR | measured, median of {len(record['splits'])} splits | 5 % to 95 % |",
        "|---|---|---|",
    ]
    for far in record["splits"][0]["far"]:
        low, middle, high = quantiles([split["far"][far] for split in record["splits"]])
        lines.append(f"| {float(far):g} | {middle:.3g} | {low:.3g} to {high:.3g} |")
    lines += ["", "| adaptive s-norm | equal error rate % | minDCF |", "|---|---|---|"]
    for name in ("raw", "normalised"):
        rates, lowest = ([split[name][key] for split in record["normalisation"]] for key in ("eer", "min_dcf"))
        lines.append(f"| {name} | {100 * quantiles(rates)[1]:.2f} | {quantiles(lowest)[1]:.3f} |")
    differences = [100 * (split["normalised"]["eer"] - split["raw"]["eer"]) for split in record["normalisation"]]
    low, middle, high = quantiles(differences)
    lines += [
        "",
        f"Medians over the splits; the equal error rate changes by {middle:+.2f} points ({low:+.2f} to {high:+.2f}).",
        "",
        "| gallery | person comes first | in the second language |",
        "|---|---|---|",
    ]
    for dtype, row in record["gallery"].items():
        lines.append(f"| {dtype} | {row['all']:.2f} % | {row['second language']:.2f} % |")
    return "\n".join(lines) + "\n"


def quantiles(values: list[float]) -> list[float]:
    """Return the 5 %, 50 % and 95 % quantiles."""
    return torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.05, 0.5, 0.95]).double()).tolist()
