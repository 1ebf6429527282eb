"""Training data, networks, and verification and identification of unseen people, for all recipes of faces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import log10, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypersphere import data, evaluation
from hypersphere.data.lfw import find_images
from hypersphere.recipes.protocols import separation, sgd, stepwise
from hypersphere.recipes.recipe import Axis, Metric, Outcome, Recipe
from hypersphere.training import Experiment, Run

ACCURACY = Metric("accuracy", "verification %", ".2f", True)
YTF = Metric("ytf", "YTF verification %", ".2f", True)
EER = Metric("eer", "EER %", ".2f", False)
FISHER = Metric("fisher", "Fisher score", ".4f", False)
SEPARATION = Metric("separation", "min angle °", ".1f", True)
RANK1 = Metric("rank1", "rank-1 % among distractors", ".2f", True)
TAR = Metric("tar", "TAR % against distractors", ".2f", True)

CMC_DEPTH = 100
ROC_POINTS = 61
DISTRACTOR_POWERS = range(1, 7)  # 10 to a million distractors, as in figure D.5
# Curves that are not drawn by epoch.
AXES = {
    "cmc": Axis("rank", 1, CMC_DEPTH),
    "roc": Axis("log10 of the false accept rate", -6, 0),
    "roc_few": Axis("log10 of the false accept rate", -6, 0),
    "rank1_by_distractors": Axis("log10 of the number of distractors", 1, 6),
    "rank10_by_distractors": Axis("log10 of the number of distractors", 1, 6),
}

# At the cpu scale, seed k tests on fold k of LFW.
SEEDED = ("seed", "data.fold")
# The schedule of the released SphereFace code; the thesis states only its end, λ = 5 (A.7).
SOURCE_ANNEALING = {"start": 1000, "gamma": 0.12, "power": 1, "end": 5}

# The protocol of section 2.3.6. Momentum, weight decay, PReLU and the size of the faces are those of the released code.
FACES: dict[str, dict[str, Any]] = {
    "base": {
        "normalize": "centered",
        "augment": [{"name": "mirror"}],
        "batch_size": 128,
        "measure": {"threshold_pairs": 1000, "pca": None, "distractors": "lfw", "far": 1e-3, "ytf": False},
    },
    "paper": {
        "data": {"name": "casia_webface", "validation": "lfw"},
        "optimizer": sgd(0.1),
        "validation": {"every": 1000, "every_unit": "steps", "energy": False},
        "measure": {"distractors": "megaface", "far": 1e-6, "ytf": True},
        **stepwise(28_000, [16_000, 24_000]),
    },
    # Nine folds of LFW for training, and the pairs of the remaining one for testing.
    "cpu": {
        "data": {"name": "lfw", "split": "fold", "fold": 0, "at_least": 4, "size": [56, 48], "grey": True},
        "augment": [{"name": "shift", "pixels": 2}, {"name": "mirror"}],
        "optimizer": sgd(0.1, decay_everything=True),
        "batch_size": 64,
        "channels_last": True,  # a fifth faster on a CPU
        "epochs": 16,
        "validation": {"every": 5, "energy": False},
    },
    "smoke": {
        "data": {"name": "generated", "classes": 24, "per_class": 6, "open_set": True, "size": 16},
        "optimizer": sgd(0.02),
        "batch_size": 60,
        "epochs": 1,
        "measure": {"threshold_pairs": 20, "distractors": "noise", "far": 0.1},
    },
}


def cpu_network(units: list[int]) -> dict[str, Any]:
    """Return a narrow SphereFace network for small faces, with batch normalisation so that it needs no warm-up."""
    return {
        "name": "sphereface20",
        "units": units,
        "widths": [16, 32, 64, 64],
        "feature_dim": 64,
        "norm": "batch",
        "bias": False,
    }


def smoke_network(units: list[int]) -> dict[str, Any]:
    """Return a tiny SphereFace network."""
    return {"name": "sphereface20", "units": units, "widths": [4, 4, 4, 4], "feature_dim": 8}


def a_softmax(m: int, annealing: Mapping[str, Any] = SOURCE_ANNEALING, **options: Any) -> dict[str, Any]:
    """Return the settings of A-Softmax, or of SphereFace+ if it has options; m = 1 is the modified softmax."""
    if m == 1 and not options:
        return {"name": "modified_softmax"}
    return {"name": "sphereface_plus" if options else "a_softmax", "m": m, "annealing": dict(annealing), **options}


def measure_faces(
    experiment: Experiment,
    run: Run,
    *,
    threshold_pairs: int,
    pca: float | None,
    distractors: str,
    far: float,
    ytf: bool,
    data_root: Path | None = None,
) -> Outcome:
    """Verify pairs of unseen people and rank their images among distractors, by features of image and mirror image.

    With several folds, the threshold of a fold is the best one on the other folds. With a single fold, it is the best
    one on pairs of other people. If the data have no pairs, as in trials, they are drawn.

    Args:
        experiment: the trained experiment.
        run: its run.
        threshold_pairs: number of pairs of each kind that choose the threshold for a single fold.
        pca: fraction of the variance of training features that a projection keeps, or None for all features.
        distractors: "megaface" (probes of FaceScrub), "lfw" (people with one photograph) or "noise".
        far: false accept rate of `tar`.
        ytf: also verify the video pairs of YouTube Faces, by the mean features of their frames.
        data_root: folder of the data sets.
    """
    split = experiment.data
    assert split.validation is not None
    others = _other_people(experiment, distractors, data_root)
    project = _projection(experiment, pca, threshold_pairs)
    pairs = data.draw_all_class_pairs(split.validation.labels) if split.pairs is None else split.pairs
    scores, features, labels = _pair_scores(experiment, project, split.validation, pairs)
    if pairs.folds > 1:
        verified = evaluation.verify_scores(scores, pairs.same, folds=pairs.fold)
        accuracy, curve = verified.accuracy, verified.roc
    else:
        other_pairs = _draw_pairs(others.for_threshold.labels, threshold_pairs)
        other_scores, _, _ = _pair_scores(experiment, project, others.for_threshold, other_pairs)
        threshold = evaluation.roc(other_scores, other_pairs.same).best_threshold
        accuracy, curve = (
            float(((scores >= threshold) == pairs.same).double().mean()),
            evaluation.roc(scores, pairs.same),
        )
    metrics = {
        "accuracy": 100 * accuracy,
        "best": 100 * curve.best_accuracy,
        "eer": 100 * curve.eer,
        "fisher": evaluation.angular_fisher_score(features, labels),
        "separation": separation(experiment),
    }
    if ytf:
        metrics["ytf"] = 100 * _verify_videos(experiment, project, data_root)
    ranked, few = _rank(experiment, project, others)
    metrics |= {"rank1": 100 * ranked.rate(1), "tar": 100 * ranked.roc().tar_at(far)}
    return Outcome(metrics, _curves(ranked, few))


# What all recipes of faces share.
face_recipe = partial(
    Recipe, base=FACES["base"], seeds=tuple(range(1, 6)), measure=measure_faces, seeded=SEEDED, axes=AXES
)


@torch.no_grad()
def embed_mirrored(experiment: Experiment, source: data.Source) -> Tensor:
    """Return the features of images and of their mirror images, concatenated, on the CPU."""
    loader = data.Loader(source, batch_size=500, sampler=data.SAMPLERS["sequential"](source.labels, 0))
    parts = [
        evaluation.mirrored_features(experiment.network, images.to(experiment.device), batch=500).cpu()
        for images, _ in loader
    ]
    return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class _OtherPeople:
    """Probes and distractors for identification, and images whose pairs determine the threshold of verification."""

    probes: data.Source
    distractors: data.Source
    for_threshold: data.Source


def _other_people(experiment: Experiment, distractors: str, data_root: Path | None) -> _OtherPeople:
    """Return the sources that `distractors` names, see `measure_faces`."""
    split = experiment.data
    assert split.validation is not None
    shape = (split.outline() or {"shape": []})["shape"]
    if distractors == "megaface":
        benchmark = data.megaface(data_root, size=(shape[1], shape[2]))
        return _OtherPeople(benchmark.probes, benchmark.distractors, split.train)
    if distractors == "noise":
        noise = torch.randint(256, (50, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        others = data.TensorSource(noise, torch.zeros(50, dtype=torch.int64), ("noise",))
        return _OtherPeople(split.validation, others, split.train)
    # People outside the test fold with too few photographs to be trained on.
    options = experiment.config.data.options
    counts = Counter(name.split("/")[0] for name in data.image_names(find_images(data_root)))
    other_folds = (names for fold, names in enumerate(data.lfw_people(data_root)) if fold != options.get("fold", 0))
    people = sorted(name for names in other_folds for name in names if counts[name] < options.get("at_least", 4))
    faces = data.TensorSource.of(data.lfw(data_root, people=people, size=(shape[1], shape[2]), grey=shape[0] == 1))
    has_one = faces.labels.bincount()[faces.labels] == 1
    return _OtherPeople(split.validation, data.subset(faces, has_one), data.subset(faces, ~has_one))


def _projection(experiment: Experiment, pca: float | None, count: int) -> Callable[[Tensor], Tensor]:
    """Return the projection to principal directions of features of training images, or the identity."""
    if pca is None:
        return lambda features: features
    source = experiment.data.train
    chosen = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[: 2 * count]
    return evaluation.fit_pca(embed_mirrored(experiment, data.subset(source, chosen)), pca)


def _draw_pairs(labels: Tensor, count: int) -> data.Pairs:
    """Draw at most `count` pairs of each kind."""
    sizes = labels.unique(return_counts=True)[1]
    return data.draw_all_class_pairs(labels, min(int((sizes * (sizes - 1) // 2).sum()), count))


def _pair_scores(
    experiment: Experiment, project: Callable[[Tensor], Tensor], source: data.Source, pairs: data.Pairs
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cosines of pairs, and features and labels of the images that occur in them."""
    used, position = torch.cat([pairs.first, pairs.second]).unique(return_inverse=True)
    features = project(embed_mirrored(experiment, data.subset(source, used)))
    first, second = position.chunk(2)
    return evaluation.cosine_scores(features[first], features[second]), features, source.labels[used]


def _verify_videos(experiment: Experiment, project: Callable[[Tensor], Tensor], data_root: Path | None) -> float:
    """Return the accuracy on YouTube Faces."""
    shape = experiment.data.outline() or {"shape": [3, 112, 96]}
    videos = data.youtube_faces(data_root, size=tuple(shape["shape"][1:]))
    features, labels = project(embed_mirrored(experiment, videos.frames)), videos.frames.labels
    counts = labels.bincount().unsqueeze(1)
    means = torch.zeros(len(counts), features.shape[1]).index_add_(0, labels, features) / counts
    pairs = videos.pairs
    return evaluation.verify(means[pairs.first], means[pairs.second], pairs.same, folds=pairs.fold).accuracy


def _rank(
    experiment: Experiment, project: Callable[[Tensor], Tensor], others: _OtherPeople
) -> tuple[evaluation.MateRanks, evaluation.MateRanks]:
    """Rank the mates of probes among all distractors, and among the first hundredth of them."""
    features = project(embed_mirrored(experiment, others.probes))
    labels, distractors = others.probes.labels, project(embed_mirrored(experiment, others.distractors))
    sizes = [10**power for power in DISTRACTOR_POWERS if 10**power <= len(distractors)]
    ranked = evaluation.rank_mates(features, labels, distractors, sizes=sizes or None)
    return ranked, evaluation.rank_mates(features, labels, distractors[: max(len(distractors) // 100, 1)])


def _curves(ranked: evaluation.MateRanks, few: evaluation.MateRanks) -> dict[str, list[float]]:
    """Return the curves of figures 2.12, D.5 and D.6, in per cent; NaN where there are too few distractors."""
    powers = torch.linspace(AXES["roc"].low, AXES["roc"].high, ROC_POINTS, dtype=torch.float64).tolist()

    def rates(ranks: evaluation.MateRanks) -> list[float]:
        curve = ranks.roc()
        resolved = -log10(curve.negatives)  # log10 of the smallest false accept rate that can be measured
        return [100 * curve.tar_at(min(10**power, 1 - 1e-9)) if power >= resolved else nan for power in powers]

    def by_distractors(rank: int) -> list[float]:
        sizes = [10**power for power in DISTRACTOR_POWERS]
        return [100 * ranked.rate(rank, size) if size in ranked.ranks else nan for size in sizes]

    return {
        "cmc": (100 * ranked.cmc(CMC_DEPTH)).tolist(),
        "roc": rates(ranked),
        "roc_few": rates(few),
        "rank1_by_distractors": by_distractors(1),
        "rank10_by_distractors": by_distractors(10),
    }
