"""Evaluation of generated images: the Inception score."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hypersphere._validation import is_integer, require
from hypersphere.evaluation._arrays import Array, as_features

__all__ = ["InceptionScore", "inception_score"]


class InceptionScore(NamedTuple):
    """Mean and standard deviation of the score over the parts of the images. Returned by `inception_score`."""

    mean: float
    deviation: float


@torch.no_grad()
def inception_score(probabilities: Array, *, splits: int = 10) -> InceptionScore:
    r"""Return exp(E_x KL(p(y|x) ‖ p(y))), the Inception score of images.

    The score is between 1 and the number of classes. It is high if a classifier is certain about each image and
    predicts all classes equally often. Published scores use the Inception network of Salimans et al. on 50,000 images
    in ten parts. Scores of another classifier can be compared with each other only.

    Args:
        probabilities: (N, classes), p(y|x) of each image.
        splits: number of consecutive parts into which the images are divided; each has a score.

    Example:
        >>> inception_score(torch.eye(4), splits=1)
        InceptionScore(mean=4.0, deviation=0.0)

    Reference:
        Salimans et al., Improved Techniques for Training GANs, NeurIPS 2016.
    """
    p = as_features("probabilities", probabilities).double()
    is_distribution = bool((p >= 0).all()) and torch.allclose(p.sum(1), torch.ones_like(p[:, 0]), atol=1e-3)
    if not is_distribution:
        raise ValueError("probabilities must be non-negative rows that sum to 1, but some are not")
    require(is_integer(splits, 1, len(p)), "splits", f"an integer from 1 to {len(p)}, the number of images", splits)
    scores = []
    for part in p.tensor_split(splits):
        # KL(p(y|x) ‖ p(y)) = Σ p log p − Σ p log p(y), with 0·log 0 = 0.
        divergence = torch.special.xlogy(part, part).sum(1) - torch.special.xlogy(part, part.mean(0)).sum(1)
        scores.append(divergence.mean().exp())
    part_scores = torch.stack(scores)
    return InceptionScore(float(part_scores.mean()), float(part_scores.std(correction=0)))
