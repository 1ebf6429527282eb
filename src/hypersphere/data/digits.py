"""The 1,797 handwritten 8x8 digits inside scikit-learn: real data without a file."""

from __future__ import annotations

import numpy as np
import torch

from hypersphere.data.errors import check_choice, require_package
from hypersphere.data.labelled import LabelledImages

TEST_PER_CLASS = 50


def digits(split: str = "train") -> LabelledImages:
    """Handwritten digits, 8x8 grey, 10 classes, inside scikit-learn: 1,297 train and 500 test, no file needed.

    The test set is the last 50 images of every class in scikit-learn's order; nothing is drawn at random. The grey
    values 0..16 become 0..255 by rounding, so all 17 levels stay apart.

    Args:
        split: "train" or "test".

    >>> digits("test")
    LabelledImages(500 images 1x8x8, 10 classes)
    """
    check_choice("split", split, ("train", "test"))
    source = require_package("sklearn.datasets", "scikit-learn", "eval").load_digits()
    labels = np.asarray(source.target, dtype=np.int64)
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[-TEST_PER_CLASS:]] = True
    chosen = test if split == "test" else ~test
    images = np.rint(np.asarray(source.images)[chosen] * (255 / 16)).astype(np.uint8)
    return LabelledImages(
        torch.from_numpy(images).unsqueeze(1),
        torch.from_numpy(labels[chosen]),
        tuple(str(label) for label in range(10)),
    )
