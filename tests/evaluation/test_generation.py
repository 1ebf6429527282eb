import numpy as np
import pytest
import torch

from hypersphere.evaluation import inception_score


def slow_score(p):
    """Return the score of one part, term by term."""
    marginal = p.mean(0)
    terms = [sum(v * np.log(v / m) for v, m in zip(row, marginal, strict=True) if v > 0) for row in p]
    return np.exp(np.mean(terms))


def test_inception_score_is_the_exponential_of_the_mean_divergence():
    p = np.random.default_rng(0).dirichlet(np.full(5, 0.3), size=60)
    p[0] = [1, 0, 0, 0, 0]
    parts = [slow_score(part) for part in np.array_split(p, 4)]
    score = inception_score(p, splits=4)
    assert score.mean == pytest.approx(np.mean(parts))
    assert score.deviation == pytest.approx(np.std(parts))


def test_inception_score_is_one_for_equal_images_and_the_number_of_classes_at_most():
    assert inception_score(torch.full((20, 10), 0.1)).mean == pytest.approx(1)
    assert inception_score(torch.eye(10).repeat(5, 1), splits=5).mean == pytest.approx(10)


@pytest.mark.parametrize("probabilities", [torch.ones(4, 3), torch.tensor([[2.0, -1.0]])])
def test_inception_score_needs_probabilities(probabilities):
    with pytest.raises(ValueError, match="probabilities must be non-negative rows that sum to 1"):
        inception_score(probabilities, splits=1)


def test_inception_score_needs_an_image_per_split():
    with pytest.raises(ValueError, match="splits must be an integer from 1 to 2, the number of images, not 3"):
        inception_score(torch.eye(2), splits=3)
