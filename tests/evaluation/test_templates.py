import math

import numpy as np
import pytest
import torch

from hypersphere.evaluation import templates


def images(seed=0, count=60, dim=5):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, dim)), rng.integers(100, 108, count), rng.integers(3, count), rng


def unit(x):
    return x / np.linalg.norm(x)


@pytest.mark.parametrize("normalise_first", [False, True])
@pytest.mark.parametrize("with_quality", [False, True])
def test_templates_match_loops_over_templates_and_media(normalise_first, with_quality):
    x, template, _, rng = images()
    medium = rng.integers(0, 3, len(x))
    quality = rng.uniform(0.1, 1, len(x)) if with_quality else None
    expected = []
    for t in np.unique(template):
        means = []
        for m in np.unique(medium[template == t]):
            members = np.flatnonzero((template == t) & (medium == m))
            rows = [unit(x[k]) if normalise_first else x[k] for k in members]
            weights = quality[members] if with_quality else np.ones(len(members))
            means.append(sum(w * row for w, row in zip(weights, rows, strict=True)) / len(members))
        expected.append(unit(np.mean(means, axis=0)))
    result = templates(x, template, medium, quality, unit=normalise_first)
    np.testing.assert_allclose(result, expected, atol=1e-12)


def test_templates_count_a_video_like_a_photograph():
    frames, photograph = np.array([[1.0, 0.0]] * 50), np.array([[0.0, 1.0]])
    result = templates(np.concatenate([frames, photograph]), [0] * 51, [7] * 50 + [8])
    np.testing.assert_allclose(result, [[math.sqrt(0.5)] * 2])
    as_photographs = templates(np.concatenate([frames, photograph]), [0] * 51, range(51))
    assert as_photographs[0, 0] > 0.99


def test_templates_do_not_depend_on_order_or_names_of_media():
    x, template, _, rng = images()
    medium, order = rng.integers(0, 4, len(x)), rng.permutation(len(x))
    result = templates(x, template, medium)
    torch.testing.assert_close(templates(x[order], template[order], medium[order] + 1000 * template[order]), result)
    assert templates(torch.tensor(x).bfloat16(), template, medium).dtype == torch.float32
    torch.testing.assert_close(templates(x.astype(np.float32), template, medium), result.float())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"template_ids": [0, 0]}, "template_ids must be a vector of 3 integers"),
        ({"media_ids": [0.5, 1.0, 2.0]}, "media_ids must be a vector of 3 integers"),
        ({"quality": [1.0, 2.0]}, "quality must be a vector of 3 numbers"),
        ({"quality": [1.0, -2.0, 1.0]}, "quality must be numbers >= 0, not -2.0"),
        (
            {"quality": [1.0, 1.0, 0.0]},
            "quality must be positive for an image of each template, but is 0 in template 6",
        ),
        ({"features": [[math.nan], [1.0], [1.0]]}, "features must be finite, but row 0 is not"),
    ],
)
def test_templates_reject_invalid_input(arguments, message):
    given = {"features": [[1.0], [2.0], [3.0]], "template_ids": [5, 5, 6], "media_ids": [0, 1, 0], **arguments}
    with pytest.raises(ValueError, match=message):
        templates(**given)
