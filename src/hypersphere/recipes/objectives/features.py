"""Features that can be drawn: digits and faces in two and three dimensions, and the norms of class vectors.

Figures 1.3, 2.2, 2.7, 2.10 and A.1 to A.5 of the thesis.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hypersphere import data, energy, evaluation, sphere
from hypersphere.recipes.face_protocol import SOURCE_ANNEALING, a_softmax
from hypersphere.recipes.protocols import ERROR, SMOKE, picture, separation, sgd, stepwise
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Recipe, Row
from hypersphere.training import Experiment, Run

__all__ = ["CLASS_VECTORS", "DIGITS", "FACES", "MNIST"]

PICTURED = 2000  # features in a picture

_ACCURACY = Metric("accuracy", "accuracy %", ".2f", True)
_FISHER = Metric("fisher", "Fisher score", ".4f", False)
_SEPARATION = Metric("separation", "min angle °", ".1f", True)


def measure_digits(experiment: Experiment, run: Run) -> Outcome:
    """Measure the features of the test images and the class vectors."""
    features, labels = experiment.embed()
    tensors = picture(experiment, features, labels)
    metrics = {
        "fisher": evaluation.angular_fisher_score(features, labels),
        "separation": separation(experiment),
        "energy": float(energy.hyperspherical_energy(tensors["class_vectors"])),
    }
    return Outcome(metrics, tensors=tensors)


# A margin of m = 4 is hard to train from the first step, so it is annealed (thesis, A.7).
_A_SOFTMAX = {"name": "a_softmax", "m": 4.0, "annealing": {"gamma": 0.5, "end": 1.0}}
# The energy of the class vectors only: they repel each other on the sphere.
_REPULSION = {"name": "mhe", "hidden": 0.0, "output": 1.0, "half_space": False}

DIGITS = Recipe(
    name="digits",
    title="Digits on the unit sphere",
    reference="after figure 2.10 of the thesis (3-d features of faces)",
    base={
        "model": {"name": "toy_cnn", "feature_dim": 3, "widths": [32, 64]},
        "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 1e-4, "decay_everything": True},
        "normalize": "none",
        "batch_size": 64,
    },
    scales={
        "paper": {"data": "digits", "epochs": 100},
        "cpu": {"data": "digits", "epochs": 30},
        "smoke": {"data": {"name": "digits", "limit": 100}, "model": {"widths": [4, 4]}, "epochs": 1},
    },
    rows=(
        Row("Softmax"),
        Row("A-Softmax (m=4)", {"head": _A_SOFTMAX}),
        Row("A-Softmax + energy", {"head": _A_SOFTMAX, "regularizers": [_REPULSION]}),
    ),
    metrics=(
        _ACCURACY,
        _FISHER,
        _SEPARATION,
        Metric("energy", "energy", ".4f", False),
        Metric("seconds", "seconds", ".1f", None),
    ),
    cost={"paper": 0.06, "cpu": 0.02, "smoke": 0.001},
    measure=measure_digits,
    note="A first example, which is in no table of the sources. Trained on 1,297 digits of 8×8 pixels, tested on 500. "
    "The Fisher score is the angular Fisher score of the test features; lower is better. The smallest angle and the "
    "energy (s = 2, mean over pairs) are those of the ten class vectors. The training loss of the last row includes "
    "the energy. The default is one seed; --seeds 5 gives mean ± s.d. No setting is tuned.",
)


def measure_plane(experiment: Experiment, run: Run, *, pictured: int) -> Outcome:
    """Measure 2-d features of training and test digits; store some of both for the first seed."""
    features, labels = experiment.embed()
    source = experiment.data.train
    sample = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[: max(pictured, 2)]
    train_features, train_labels = experiment.embed(data.subset(source, sample))
    metrics = {
        "fisher": evaluation.angular_fisher_score(features, labels),
        "fisher_train": evaluation.angular_fisher_score(train_features, train_labels),
        "separation": separation(experiment),
        "first_quadrant": 100 * float((features >= 0).all(1).double().mean()),
    }
    if experiment.config.seed:
        return Outcome(metrics)
    tensors = picture(experiment, features, labels, pictured)
    return Outcome(metrics, tensors={**tensors, "train_features": train_features, "train_labels": train_labels})


MNIST = Recipe(
    name="mnist-features",
    title="Two-dimensional features of MNIST",
    reference="figures 1.3 (also 4.1), 2.2, A.1, A.4 and A.5 of the thesis",
    base={
        "model": "mnist_cnn6",
        "optimizer": sgd(0.1),
        "normalize": "mean_image",
        "batch_size": 256,
        "clip": 5.0,
        "measure": {"pictured": PICTURED},
    },
    scales={
        "paper": {"data": "mnist", **stepwise(18_000, [12_000, 15_000])},
        "cpu": {
            "data": {"name": "mnist", "limit": 20_000, "pool": 2},
            "model": {"name": "mnist_cnn6", "widths": [8, 16, 32]},
            "batch_size": 128,
            "epochs": 10,
            "validation": {"every": 2},
        },
        "smoke": {**SMOKE, "model": {"name": "mnist_cnn6", "widths": [4, 4, 4]}, "measure": {"pictured": 50}},
    },
    rows=(
        Row("Softmax"),
        *(
            Row(f"L-Softmax (m={m})", {"head": {"name": "l_softmax", "m": m, "annealing": SOURCE_ANNEALING}})
            for m in (2, 3, 4)
        ),
        *(Row(f"A-Softmax (m={m})", {"head": a_softmax(m)}) for m in (2, 3, 4)),
        Row("Softmax with a last ReLU", {"model": {"feature_activation": "relu"}}),
        Row("Softmax with biases", {"head": {"name": "softmax", "bias": True}}),
    ),
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        _ACCURACY,
        _FISHER,
        Metric("fisher_train", "Fisher score, training", ".4f", False),
        _SEPARATION,
        Metric("first_quadrant", "in the first quadrant %", ".1f", None),
    ),
    covers=("F1.3", "F4.1", "F2.2", "F-A.1", "F-A.4", "F-A.5"),
    cost={"paper": 200, "cpu": 0.7, "smoke": 0.01},
    measure=measure_plane,
    baseline="Softmax",
    claims=(
        Claim(
            "L-Softmax with m = 4 has a lower Fisher score than softmax.",
            "L-Softmax (m=4)",
            metric="fisher",
            source="F2.2",
        ),
        Claim(
            "A-Softmax with m = 4 has a lower Fisher score than softmax.",
            "A-Softmax (m=4)",
            metric="fisher",
            source="F-A.5",
        ),
        Claim("A larger m has a lower Fisher score.", "A-Softmax (m=4)", "A-Softmax (m=2)", "fisher", "F-A.5"),
        Claim(
            "Without the last ReLU features are better separated.",
            "Softmax",
            "Softmax with a last ReLU",
            "fisher",
            "F-A.1",
        ),
    ),
    note="The network of the first column of table 2.1: six 5×5 convolutions, PReLU, batch normalisation and a 2-d "
    "feature; the schedule of section 2.2.7. At the cpu scale: 20,000 digits of 14×14 pixels. Margins are annealed to "
    "λ = 5, as in A.7; the thesis does not state λ for these figures, nor the network of figures 1.3, A.1, A.4 and "
    "A.5. Ten classes share the plane, so larger margins cannot be trained without annealing. Gradients are clipped to "
    "norm 5. Nothing is tuned: all rows use the learning rate of the thesis. Softmax is figure 1.3 and the first panel "
    "of figures 2.2, A.1, A.4 and A.5. The pictures show 2,000 test digits and 2,000 training digits of the first "
    "seed.",
)


def measure_people(experiment: Experiment, run: Run, *, bins: int) -> Outcome:
    """Measure angles of training features within and between people, and how well directions alone separate them."""
    features, labels = experiment.embed(experiment.data.train)
    # Pairs of the first two people, as in figure 2.10.
    of_two = labels < 2
    angles = evaluation.class_angles(features[of_two], labels[of_two], bins=bins)
    classes = labels.unique()
    means = torch.stack([sphere.normalize(features[labels == label]).mean(0) for label in classes])
    nearest = classes[sphere.cosines(features, means).argmax(1)]
    metrics = {
        "fisher": evaluation.angular_fisher_score(features, labels),
        "by_angle": 100 * float((nearest == labels).double().mean()),
        "positive": math.degrees(angles.positive.mean),
        "negative": math.degrees(angles.negative.mean),
        "overlap": angles.overlap,
    }
    if experiment.config.seed:
        return Outcome(metrics)
    histograms = {"positive_angles": angles.positive.histogram, "negative_angles": angles.negative.histogram}
    return Outcome(metrics, tensors={**picture(experiment, features, labels), **histograms})


_TWO = {"data": {"at_least": 236}, "model": {"feature_dim": 2}}
_SIX = {"data": {"at_least": 77}, "model": {"feature_dim": 3}}
# λ reaches its end within the 460 steps of the cpu scale.
_PEOPLE_ANNEALING = {"start": 1000, "gamma": 0.5, "power": 1, "end": 5}


def _people(title: str, heads: dict[str, Any], patch: dict[str, Any], small: int) -> list[Row]:
    smoke = {"data": {"name": "generated", "classes": small, "per_class": 8, "size": 16}}
    smoke |= {"model": patch["model"]}
    return [
        Row(f"{title}, {name}", {**patch, "head": head}, at={"smoke": smoke}, baseline=f"{title}, {next(iter(heads))}")
        for name, head in heads.items()
    ]


_TWO_HEADS = {
    "softmax": {"name": "softmax", "bias": True},
    "modified softmax": "modified_softmax",
    "A-Softmax (m=4)": a_softmax(4, _PEOPLE_ANNEALING),
}
_SIX_HEADS = {f"m={m}": a_softmax(m, _PEOPLE_ANNEALING) for m in (1, 2, 3, 4)}
FACES = Recipe(
    name="face-features",
    title="Two people in the plane, six people on the sphere",
    reference="figures 2.7 and 2.10 of the thesis",
    base={
        "data": {"name": "lfw", "held_out": 0.2},
        "optimizer": sgd(0.05),
        "normalize": "centered",
        "augment": [{"name": "mirror"}],
        "batch_size": 64,
        "clip": 5.0,
        "measure": {"bins": 60},
    },
    scales={
        "paper": {"model": "sphereface20", "epochs": 100},
        "cpu": {
            "data": {"size": [56, 48], "grey": True},
            "model": {"name": "sphereface20", "units": [0, 0, 0, 0], "widths": [16, 32, 64, 64], "norm": "batch"},
            "epochs": 30,
            "validation": {"every": 10},
        },
        "smoke": {
            "model": {"name": "sphereface20", "units": [0, 0, 0, 0], "widths": [4, 4, 4, 4]},
            "batch_size": 16,
            "epochs": 1,
            "measure": {"bins": 12},
        },
    },
    rows=(*_people("two people", _TWO_HEADS, _TWO, 2), *_people("six people", _SIX_HEADS, _SIX, 6)),
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        _ACCURACY,
        _FISHER,
        Metric("by_angle", "right by angle %", ".2f", True),
        Metric("positive", "angle within °", ".1f", False),
        Metric("negative", "angle between °", ".1f", True),
        Metric("overlap", "overlap of angles", ".3f", False),
    ),
    covers=("F2.7", "F2.10"),
    cost={"paper": 40, "cpu": 0.2, "smoke": 0.01},
    measure=measure_people,
    claims=(
        Claim(
            "Angles separate the features of the modified softmax better than those of softmax.",
            "two people, modified softmax",
            metric="by_angle",
        ),
        Claim(
            "A-Softmax widens the angle between two people.",
            "two people, A-Softmax (m=4)",
            "two people, modified softmax",
            "negative",
        ),
        Claim("A larger m lowers the overlap of angles.", "six people, m=4", metric="overlap", source="F2.10"),
        Claim("A larger m lowers the Fisher score.", "six people, m=4", metric="fisher", source="F2.10"),
    ),
    note="The people with most photographs in LFW, two with 236 or more and six with 77 or more, because those of "
    "CASIA-WebFace are not named; a fifth of their photographs is held out for the accuracy. Angles and pictures are "
    "those of training photographs, pairs those of the first two people, as in the thesis. Network, m of figure 2.7, "
    "schedule and λ are not stated: SphereFace-20 for 100 epochs at the paper scale; four convolutions with batch "
    "normalisation at the cpu scale, on faces of 48×56 grey pixels; λ falls to 5. Nothing is tuned: the rows share one "
    "learning rate, and the figure shows shapes.",
)


def measure_vectors(experiment: Experiment, run: Run) -> Outcome:
    """Compare the norms of class vectors with the sizes of classes, and measure the biases."""
    head: Any = experiment.head
    norms, biases = sphere.norm(head.weight.detach()).cpu(), head.bias.detach().cpu()
    sizes = experiment.data.train.labels.bincount(minlength=len(norms))
    features, labels = experiment.embed()
    with torch.no_grad():
        scores = head.scores(features.to(experiment.device)).cpu() - biases
    return Outcome(
        {
            "norm_correlation": evaluation.rank_correlation(norms, sizes),
            "bias_correlation": evaluation.rank_correlation(biases, sizes),
            "bias": float(biases.abs().mean()),
            # Biases matter if they are large compared with the differences of scores between classes.
            "bias_share": float(biases.std() / scores.std(1).mean()),
            "without_bias": 100 * float((scores.argmax(1) == labels).double().mean()),
        },
        tensors={"weight_norms": norms, "class_sizes": sizes, "biases": biases},
    )


_FACE_DATA: dict[str, dict[str, Any]] = {
    "paper": {
        "data": {"name": "image_folder", "path": "casia-webface", "held_out": 0.05, "size": [112, 96], "grey": False},
        "model": "sphereface20",
        "normalize": "centered",
        "batch_size": 128,
        **stepwise(28_000, [16_000, 24_000]),
    },
    "cpu": {
        "data": {"name": "lfw", "at_least": 5, "held_out": 1, "size": [56, 48], "grey": True},
        "model": {
            "name": "sphereface20",
            "units": [0, 0, 0, 0],
            "widths": [16, 32, 64, 64],
            "feature_dim": 64,
            "norm": "batch",
        },
        "normalize": "centered",
        "batch_size": 64,
    },
    "smoke": {"data": {"name": "digits", "rising": True}},
}
CLASS_VECTORS = Recipe(
    name="class-vectors",
    title="Norms and biases of class vectors, and the sizes of classes",
    reference="figures A.2 and A.3 of the thesis",
    base={
        "head": {"name": "softmax", "bias": True},
        "optimizer": sgd(0.1),
        "normalize": "mean_image",
        "batch_size": 256,
    },
    scales={
        "paper": {"data": "mnist", "model": "lsoftmax_cnn10", **stepwise(18_000, [12_000, 15_000])},
        "cpu": {
            "data": {"name": "mnist", "limit": 20_000, "pool": 2},
            "model": {"name": "lsoftmax_cnn10", "depth": [2, 1, 1], "widths": [16, 16, 16], "feature_dim": 32},
            "batch_size": 128,
            "epochs": 10,
            "validation": {"every": 5},
        },
        "smoke": {
            **SMOKE,
            "model": {"name": "lsoftmax_cnn10", "depth": [1, 1, 1], "widths": [4, 4, 4], "feature_dim": 8},
        },
    },
    rows=(Row("MNIST"), Row("MNIST, rising class sizes", {"data": {"rising": True}}), Row("faces", at=_FACE_DATA)),
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        ERROR,
        Metric("norm_correlation", "rank correlation of norm and size", ".3f", None),
        Metric("bias_correlation", "rank correlation of bias and size", ".3f", None),
        Metric("bias", "mean |bias|", ".4f", None),
        Metric("bias_share", "s.d. of biases / s.d. of scores", ".4f", None),
        Metric("without_bias", "accuracy % without biases", ".2f", True),
    ),
    covers=("F-A.2", "F-A.3"),
    cost={"paper": 500, "cpu": 0.15, "smoke": 0.005},
    measure=measure_vectors,
    note="Softmax with biases. The classes of MNIST differ little in size (5,400 to 6,700), so a second row keeps the "
    "fraction (i+1)/10 of digit i. Faces: CASIA-WebFace at the paper scale, with a twentieth of the photographs held "
    "out; at the cpu scale the people of LFW with at least 5 photographs, one of each held out. The thesis prints no "
    "network, schedule or coefficient for figure A.2. Nothing is tuned, because one method is described, not compared.",
)
