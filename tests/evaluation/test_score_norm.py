import math

import numpy as np
import pytest
import torch

from hypersphere.evaluation import score_norm


def trials(seed=0, count=6, cohort=20):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(count), rng.standard_normal((count, cohort)), 2 + rng.standard_normal((count, cohort))


@pytest.mark.parametrize("top", [2, 7, 300])
def test_score_norm_matches_a_loop_over_trials(top):
    scores, enrol, test = trials()
    expected = {"z": [], "t": [], "s": [], "adaptive_s": []}
    for s, e, t in zip(scores, enrol, test, strict=True):
        z, u = (s - np.mean(e)) / np.std(e), (s - np.mean(t)) / np.std(t)
        e, t = sorted(e)[-top:], sorted(t)[-top:]
        adaptive = ((s - np.mean(e)) / np.std(e) + (s - np.mean(t)) / np.std(t)) / 2
        for kind, value in (("z", z), ("t", u), ("s", (z + u) / 2), ("adaptive_s", adaptive)):
            expected[kind].append(value)
    for kind, values in expected.items():
        np.testing.assert_allclose(score_norm(scores, enrol, test, kind=kind, top=top), values, rtol=1e-12)


@pytest.mark.parametrize("kind", ["z", "t", "s", "adaptive_s"])
def test_score_norm_of_a_matrix_is_that_of_its_trials(kind):
    rng = np.random.default_rng(1)
    scores, enrol, test = rng.standard_normal((3, 4)), rng.standard_normal((3, 9)), rng.standard_normal((4, 9))
    expected = score_norm(scores.flatten(), np.repeat(enrol, 4, 0), np.tile(test, (3, 1)), kind=kind, top=5)
    result = score_norm(torch.tensor(scores), torch.tensor(enrol), torch.tensor(test), kind=kind, top=5)
    np.testing.assert_allclose(result.flatten(), expected)


def test_score_norm_removes_scale_and_offset_of_each_enrolment():
    scores, enrol, _ = trials()
    scale, offset = np.random.default_rng(2).uniform(0.5, 3, (2, len(scores)))
    changed = score_norm(scores * scale + offset, enrol * scale[:, None] + offset[:, None], kind="z")
    np.testing.assert_allclose(changed, score_norm(scores, enrol, kind="z"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "x"}, "kind must be one of 'z', 't', 's', 'adaptive_s', not 'x'"),
        ({"top": 1}, "top must be an integer >= 2, not 1"),
        ({"test_cohort": None}, "test_cohort must be given for 'adaptive_s', not None"),
        ({"enrol_cohort": np.ones((5, 3))}, "enrol_cohort must be a matrix with 6 rows, one per trial"),
        ({"enrol_cohort": np.ones((6, 3))}, "enrol_cohort must have different scores in each row, but those of row 0"),
        ({"scores": [0.1, math.nan] * 3}, "scores must be finite, but row 1 is not"),
        ({"scores": 0.5}, "scores must be a non-empty vector or matrix"),
    ],
)
def test_score_norm_rejects_invalid_input(arguments, message):
    scores, enrol, test = trials()
    with pytest.raises(ValueError, match=message):
        score_norm(**{"scores": scores, "enrol_cohort": enrol, "test_cohort": test, **arguments})
