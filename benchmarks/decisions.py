"""Decisions about people who were never trained on: does a threshold keep its promise, and what does storage cost?

The plan, written before the first run:

1. Data: LFW, 24 x 28 grey. Two small encoders (seeds 0 and 1, AM-Softmax) are trained on the people of folds 1 to 5 of
   View 2 who have at least two images. The people of folds 6 to 10 are the test people; no encoder has seen them.
2. Promised and measured false accept rate: the test people are divided at random into two halves, 20 times. Thresholds
   for FAR 1e-1 to 1e-4 come from all pairs of one half, a logistic calibration from the same half. On all pairs of
   the other half we measure the FAR of each threshold, the cost of the log-likelihood ratios (Cllr), and its lowest
   value for any monotone calibration. Expected: a median ratio measured/promised close to 1, with a spread that grows
   as the rate falls, and a small calibration loss.
3. Storage: TAR at FAR 1e-3 of all pairs of up to 2,000 images of test people, one side from a gallery in float32,
   float16, int8 or binary. Expected: no loss for float16, less than 0.1 points for int8, several points for binary.
4. Migration: the same pairs, one side from encoder 2 and the other from a gallery of encoder 1 that was rotated by
   `Gallery.migrate`, fitted on the training images. Compared with each encoder alone, and with no rotation. Expected:
   a large loss, because two small encoders differ by more than a rotation.
5. With `--embeddings FILE.npz`, points 2 and 3 are repeated for a pretrained encoder. The file has `embeddings` (N, d)
   and `names` of photographs of LFW, such as "Aaron_Peirsol_0001.jpg". The recorded run used the 128-d features of
   dlib's face network, which the package face_recognition_models contains (aligned crops of 96 x 112, enlarged twice,
   with dlib's five landmarks), for people of folds 6 to 10: up to four photographs of each one who has several, and
   one of 600 others. Such features are not centred. So the mean over 300
   people with one photograph is subtracted, and these people are left out. Expected: as in point 2, and no loss in
   int8. The network may have been trained on photographs of some of these people.

Nothing is tuned on the test people, and the result is reported whatever it is. The first version of the plan had images
of 48 x 56 and 10 epochs. They were reduced to 24 x 28 and 8 before any complete run, to keep the study short.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy
import torch

import hypersphere as hs
from hypersphere.evaluation import AllPairs, Calibration, cllr, min_cllr, pair_scores, verify_blocks

RESULTS = Path(__file__).parent / "results"
FARS = (1e-1, 1e-2, 1e-3, 1e-4)
DTYPES = ("float32", "float16", "int8", "binary")
SIZE = (28, 24)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="./run bench decisions", description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--people", type=int, help="use only this number of people of each half, for a quick check")
    parser.add_argument("--embeddings", type=Path, help="embeddings of a pretrained encoder, see point 5")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.embeddings is not None:
        x, y = read_embeddings(options.embeddings)
        write(options.out / "decisions_pretrained", measure(x, y, options.splits))
        return
    folds = hs.data.lfw_people()
    halves = [[name for fold in part for name in fold][: options.people] for part in (folds[:5], folds[5:])]
    train, test = (hs.data.lfw(people=sorted(people), size=SIZE, grey=True) for people in halves)
    counts = train.labels.bincount()
    train = train.subset(counts[train.labels] > 1)
    encoders = [train_encoder(train, options.epochs, seed) for seed in (0, 1)]
    old, new = (embed(encoder, test) for encoder in encoders)
    record = {
        "training": {"people": len(train.labels.unique()), "images": len(train), "epochs": options.epochs},
        **measure(old, test.labels, options.splits),
        "migration": migration(old, new, test.labels, *(embed(encoder, train) for encoder in encoders)),
    }
    write(options.out / "decisions", record)


def read_embeddings(path: Path, cohort: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the centred embeddings of a file and the numbers of their people, without those who determine the mean."""
    with numpy.load(path, allow_pickle=False) as file:
        x = torch.from_numpy(file["embeddings"]).float()
        people = [name.rpartition("_")[0] for name in file["names"].tolist()]
    numbers = {name: number for number, name in enumerate(sorted(set(people)))}
    y = torch.tensor([numbers[name] for name in people])
    singles = (y.bincount()[y] == 1).nonzero().flatten()[:cohort]
    kept = torch.ones(len(y), dtype=torch.bool)
    kept[singles] = False
    return x[kept] - x[singles].mean(0), y[kept]


def measure(x, y, splits: int) -> dict:
    """Return what points 2 and 3 of the plan ask for."""
    return {
        "test": {"people": len(y.unique()), "images": len(y)},
        "splits": promises(x, y, splits),
        "storage": storage(x, y),
    }


def write(path: Path, record: dict) -> None:
    """Write a record as JSON and its tables as Markdown, and print the tables."""
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    text = report(record)
    path.with_suffix(".md").write_text(text)
    print(text)


def train_encoder(data, epochs: int, seed: int):
    """Train a small network on images and their mirror images."""
    torch.manual_seed(seed)
    classes, labels = data.labels.unique(return_inverse=True)
    model = hs.models.EmbeddingCNN(1, SIZE, feature_dim=64, widths=(16, 32, 64, 64))
    head = hs.heads.am_softmax(64, len(classes), s=30.0, m=0.2)
    images = torch.cat([data.images, data.images.flip(-1)])
    batches = hs.data.Batches(images, torch.cat([labels, labels]), 64, torch.Generator().manual_seed(seed))
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * len(batches))
    optimizer.register_step_post_hook(
        lambda *_: schedule.step() if schedule.last_epoch < schedule.total_steps else None
    )
    hs.training.fit(
        model,
        head,
        batches,
        epochs=epochs,
        optimizer=optimizer,
        on_epoch=lambda epoch: print(f"encoder {seed}, epoch {epoch.number}: loss {epoch.loss:.2f}", flush=True),
    )
    return model


def embed(model, data) -> torch.Tensor:
    return hs.training.embed(model, hs.data.Batches(data.images, data.labels, 500))[0]


def promises(x, y, splits: int, fars=FARS) -> list[dict]:
    """Return for each split the promised and measured rates, and the costs of the calibration."""
    rows = []
    for split in range(splits):
        generator = torch.Generator().manual_seed(split)
        people = y.unique()
        chosen = people[torch.randperm(len(people), generator=generator)[: len(people) // 2]]
        fitted = torch.isin(y, chosen)
        points = verify_blocks(AllPairs(x[fitted], y[fitted]), fars)
        scores, same = sample(x[fitted], y[fitted], generator)
        calibration = Calibration.fit(scores, same, prior=0.5)
        scores, same = sample(x[~fitted], y[~fitted], generator)
        llrs = calibration.llr(scores)
        measured = rates(x[~fitted], y[~fitted], points.thresholds.values())
        rows.append(
            {
                "far": dict(zip(map(str, fars), measured, strict=True)),
                "cllr": cllr(llrs, same),
                "min_cllr": min_cllr(llrs, same),
            }
        )
    return rows


def sample(x, y, generator, most: int = 200_000):
    """Return the scores of all same pairs and of random different pairs."""
    order = y.argsort()
    same = torch.cat([torch.combinations(part) for part in order.split(y.unique(return_counts=True)[1].tolist())])
    different = torch.randint(len(y), (most, 2), generator=generator)
    different = different[y[different[:, 0]] != y[different[:, 1]]]
    pairs = torch.cat([same, different])
    return pair_scores(x, pairs[:, 0], pairs[:, 1]), torch.arange(len(pairs)) < len(same)


def rates(x, y, thresholds) -> list[float]:
    """Return the share of all different pairs that each threshold accepts."""
    thresholds = list(thresholds)
    accepted, total = torch.zeros(len(thresholds)).double(), 0
    for scores, same in AllPairs(x, y):
        negative = scores[~same]
        total += len(negative)
        accepted += torch.tensor([float((negative >= threshold).sum()) for threshold in thresholds])
    return (accepted / total).tolist()


def tar(queries, gallery, y) -> float:
    """Return the TAR at FAR 1e-3 of all pairs of an image as a query and another one in a gallery."""

    def blocks():
        for rows in torch.arange(len(y)).split(256):
            matches = gallery.search(queries[rows], len(y))
            # Of each pair of images, one is the query and the other the entry: no image is compared with itself.
            pair = matches.entries > rows[:, None]
            yield matches.scores[pair], (y[rows, None] == y[matches.entries])[pair]

    return verify_blocks(blocks, [1e-3]).tar[1e-3]


def chosen_images(y, most: int = 2000) -> torch.Tensor:
    """Return images of people with at least two of them, at most ten per person."""
    order = y.argsort(stable=True)
    groups = [part[:10] for part in order.split(y.unique(return_counts=True)[1].tolist()) if len(part) > 1]
    return torch.cat(groups)[:most]


def filled(x, dtype: str = "float32"):
    gallery = hs.gallery.Gallery(x.shape[1], dtype)
    gallery.enroll([str(row) for row in range(len(x))], x)
    return gallery


def storage(x, y) -> dict[str, float]:
    rows = chosen_images(y)
    return {dtype: tar(x[rows], filled(x[rows], dtype), y[rows]) for dtype in DTYPES}


def migration(old, new, y, old_training, new_training) -> dict[str, float]:
    rows = chosen_images(y)
    old, new, y = old[rows], new[rows], y[rows]
    migrated = filled(old)
    migrated.migrate((old_training, new_training))
    return {
        "old encoder alone": tar(old, filled(old), y),
        "new encoder alone": tar(new, filled(new), y),
        "new queries, old gallery": tar(new, filled(old), y),
        "new queries, migrated gallery": tar(new, migrated, y),
    }


def report(record) -> str:
    """Return the tables in Markdown."""
    splits, training = record["splits"], record.get("training")
    test = f"{record['test']['people']:,} {'other ' * bool(training)}people and {record['test']['images']:,} images"
    if training is None:
        title = "# Decisions about people, with a pretrained encoder"
        data = f"LFW, {test}, and the 128-d features of dlib's face network."
    else:
        title = "# Decisions about people who were never trained on"
        data = f"LFW, {training['people']:,} people and {training['images']:,} images for training, {test} for tests."
    lines = [
        title,
        "",
        data,
        "",
        f"| promised FAR | measured, median of {len(splits)} splits | 5 % to 95 % |",
        "|---|---|---|",
    ]
    for far in splits[0]["far"]:
        values = torch.tensor([split["far"][far] for split in splits], dtype=torch.float64)
        low, middle, high = values.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
        lines.append(f"| {float(far):g} | {middle:.3g} | {low:.3g} to {high:.3g} |")
    costs, lowest = (sum(split[key] for split in splits) / len(splits) for key in ("cllr", "min_cllr"))
    lines += ["", f"Cllr {costs:.4f} bits, lowest possible {lowest:.4f}: calibration loss {costs - lowest:.4f}.", ""]
    for title, key in (("gallery", "storage"), ("queries and gallery", "migration")):
        if key not in record:
            continue
        lines += [f"| {title} | TAR at FAR 1e-3 |", "|---|---|"]
        lines += [f"| {name} | {100 * value:.2f} % |" for name, value in record[key].items()]
        lines.append("")
    return "\n".join(lines)
