"""Heads and batches that the checks of sharded heads share."""

from functools import partial

import pytest
import torch

from hypersphere import margin
from hypersphere.heads import PRESETS, AngularHead, Annealing, Ramp

CLASSES, DIM = 7, 6
ROWS = (5, 0, 3, 2)

HEADS = {name: partial(preset, DIM, CLASSES) for name, preset in PRESETS.items()} | {
    "elasticface": partial(PRESETS["elasticface"], DIM, CLASSES, sigma=0.0),  # `check_noise` draws margins
    "centers": partial(PRESETS["arcface"], DIM, CLASSES, s=8.0, centers=3),
    "biased centers": partial(PRESETS["softmax"], DIM, CLASSES, bias=True, centers=2, label_smoothing=0.1),
    "margined centers": partial(PRESETS["l_softmax"], DIM, CLASSES, m=2, centers=2),
    "curricular centers": partial(PRESETS["curricularface"], DIM, CLASSES, s=8.0, centers=2),
    "hard negatives": partial(PRESETS["arcface"], DIM, CLASSES, s=8.0, hard_negatives=3, hard_margin=0.2),
    "one hard negative": partial(PRESETS["am_softmax"], DIM, CLASSES, hard_negatives=1, interclass_filter=0.5),
    "all hard negatives": partial(PRESETS["s_softmax"], DIM, CLASSES, hard_negatives=20, centers=2),
    "filtered": partial(PRESETS["arcface"], DIM, CLASSES, s=8.0, interclass_filter=0.3),
    "class sizes": partial(PRESETS["arcface"], DIM, CLASSES, s=8.0, class_sizes=torch.arange(1, CLASSES + 1)),
    "biased": partial(AngularHead, DIM, CLASSES, normalize_weight=False, bias=True),
    "annealed": partial(AngularHead, DIM, CLASSES, margin="multiplicative", annealing=Annealing(10, 1, 1, 0)),
    "ramped": partial(AngularHead, DIM, CLASSES, radius=8.0, margin="additive_angle", ramp=Ramp(3)),
    "normalized": partial(AngularHead, DIM, CLASSES, margin="multiplicative", gradient="normalized"),
    "detached": partial(AngularHead, DIM, CLASSES, radius=8.0, margin="additive_angle", gradient="detached"),
    "smooth": partial(AngularHead, DIM, CLASSES, label_smoothing=0.2, bias=True),
    "weighted": partial(AngularHead, DIM, CLASSES, class_weights=torch.arange(CLASSES) / 3, label_smoothing=0.1),
    "ignoring": partial(AngularHead, DIM, CLASSES, ignore_index=2, energy_weight=0.5),
    "summing": partial(AngularHead, DIM, CLASSES, angular="sigmoid", reduction="sum"),
    "pulling": partial(AngularHead, DIM, CLASSES, angular="sigmoid", norm_weight=0.1, ignore_index=2),
    "linear": partial(
        AngularHead, DIM, CLASSES, angular="linear", normalize_weight=False, margin=margin.Multiplicative(2)
    ),
    "soft": partial(PRESETS["sphereface_r"], DIM, CLASSES, normalization="soft"),
    "weighted plus": partial(PRESETS["sphereface_plus"], DIM, CLASSES, class_weights=torch.arange(CLASSES) / 3),
    "callable": partial(AngularHead, DIM, CLASSES, angular=torch.tanh),
}


def batch(size, dtype=torch.float64, seed=0, rows=ROWS):
    """Features and labels of all processes, and which rows belong to which."""
    generator = torch.Generator().manual_seed(seed)
    counts = rows[:size]
    x = 3 * torch.randn(sum(counts), DIM, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (sum(counts),), generator=generator)
    starts = [sum(counts[:rank]) for rank in range(size)]
    return x.to(dtype), y, [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]


def build_head(make, dtype=torch.float64):
    """Return the same head in every process, with class vectors that are not unit vectors and unequal biases."""
    torch.manual_seed(1)
    head = make().to(dtype)
    with torch.no_grad():
        head.weight.mul_(1.5)
        if head.bias is not None:
            head.bias.add_(torch.linspace(-1, 1, len(head.bias), dtype=dtype))
    return head


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def raises(action, *words, kind=ValueError):
    with pytest.raises(kind) as caught:
        action()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def local_classes(head):
    """Return the range of classes whose vectors this process holds."""
    return slice(head.first, head.first + head.sizes[head.processes.rank])


def local_rows(head):
    """Return the rows of the logical weight that this process holds."""
    per_class = len(head.weight) // head.sizes[head.processes.rank]
    return slice(per_class * head.first, per_class * head.first + len(head.weight))
