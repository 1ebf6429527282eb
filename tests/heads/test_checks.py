"""Options that a head refuses, alone or together."""

import pytest
import torch

import hypersphere as hs
from hypersphere.heads import AngularHead


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hs.heads.arcface(5, 4, centers=0), r"centers must be an integer in \[1, 255\], not 0"),
        (lambda: hs.heads.arcface(5, 4, hard_negatives=-1), "hard_negatives must be an integer >= 0, not -1"),
        (lambda: hs.heads.arcface(5, 4, hard_margin=4), r"hard_margin must be an angle in \[0, pi\], not 4"),
        (
            lambda: hs.heads.arcface(5, 4, interclass_filter=2),
            r"interclass_filter must be a cosine in \[-1, 1\] or None",
        ),
        (
            lambda: hs.heads.arcface(5, 4, interclass_filter=0.5, label_smoothing=0.1),
            "interclass_filter must be None with label smoothing, which needs all classes, not 0.5",
        ),
        (
            lambda: hs.heads.curricularface(5, 4, hard_negatives=2),
            "hard_negatives must be 0 with a curriculum, not 2",
        ),
        (lambda: AngularHead(5, 4, curriculum=0.9), "curriculum must be None without a margin, not 0.9"),
        (
            lambda: AngularHead(5, 4, curriculum=1.0, margin="additive_angle"),
            r"curriculum must be a number in \[0, 1\)",
        ),
        (
            lambda: hs.heads.softmax(5, 4, class_sizes=torch.ones(4)),
            "class_margins and class_sizes need a margin that changes",
        ),
        (lambda: hs.heads.arcface(5, 4, class_sizes=torch.ones(3)), r"class_sizes must be 4 numbers >= 1, not \(3,\)"),
        (
            lambda: hs.heads.arcface(5, 4, class_sizes=torch.zeros(4)),
            r"class_sizes must be 4 numbers >= 1, not \[0.0\]",
        ),
        (lambda: hs.heads.arcface(5, 4, m=torch.ones(3)), r"m must be a number or 4 numbers >= 0, not \(3,\)"),
        (lambda: hs.heads.a_softmax(5, 4, m=torch.tensor([1.0, 2, 0.5, 3])), "m must be a number or 4 numbers >= 1"),
        (
            lambda: hs.heads.arcface(5, 4, class_margins=2 * torch.ones(4)),
            r"class_margins must be 4 numbers in \[0, 1\], not 2.0",
        ),
        (
            lambda: hs.heads.arcface(5, 4, class_margins=torch.ones(4), class_sizes=torch.ones(4)),
            "class_sizes cannot be combined with class_margins or with m as a tensor",
        ),
        (
            lambda: hs.heads.sphereface_r(5, 4, version=2, class_sizes=torch.ones(4)),
            "class_margins and class_sizes need a margin that changes the target alone",
        ),
        (lambda: hs.heads.adacos(5, 2), "num_classes must be an integer >= 3 for adacos, not 2"),
        (
            lambda: AngularHead(5, 4, radius="adaptive", margin="norm_adaptive"),
            "radius must be a number if feature norms are used or classes are binary, not 'adaptive'",
        ),
        (lambda: hs.heads.magface(5, 4, reduction="sum"), "reduction must be 'mean' with the margin NormLinear"),
        (lambda: hs.heads.sphereface2(5, 4, variant="B"), "variant must be one of 'C', 'A', 'M', not 'B'"),
        (
            lambda: hs.heads.sphereface2(5, 4, variant="A", margin="two_sided"),
            "variant must be 'C' if margin is given, not 'A'",
        ),
        (
            lambda: hs.heads.a_softmax(5, 4, gradient="normalized", hard_negatives=2),
            "gradient must be 'true' or 'detached' with options for other classes, not 'normalized'",
        ),
    ],
)
def test_heads_reject_options_that_exclude_each_other(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"radius": "adaptive", "normalize_weight": False},
            "normalize_weight must be True with radius='adaptive', not False",
        ),
        ({"radius": "adaptive", "bias": True}, "bias must be False with radius='adaptive', not True"),
        (
            {"curriculum": 0.9, "margin": "norm_adaptive", "radius": 64.0},
            "curriculum needs a margin that does not follow",
        ),
        (
            {"curriculum": 0.9, "margin": "additive_cosine", "centers": 2, "normalize_weight": False},
            "curriculum with several centres needs normalize_weight=True",
        ),
    ],
)
def test_heads_refuse_options_that_need_each_others_results(options, message):
    with pytest.raises(ValueError, match=message):
        AngularHead(8, 4, **options)
