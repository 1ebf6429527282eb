import numpy as np
import pytest
import torch

from hypersphere.evaluation import first_of_each


@pytest.mark.parametrize("count", [1, 2, 500])
def test_the_first_of_each_class_and_no_other(count):
    labels = np.random.default_rng(count).integers(-3, 40, size=count)
    expected, seen = [], set()
    for label in labels.tolist():
        expected.append(label not in seen)
        seen.add(label)
    assert first_of_each(labels).tolist() == expected
    assert first_of_each(torch.from_numpy(labels)).tolist() == expected
    assert first_of_each(labels.tolist()).tolist() == expected


def test_labels_that_are_none():
    with pytest.raises(ValueError, match="labels must be integers, not 'ann'"):
        first_of_each(["ann", "bob"])
    with pytest.raises(ValueError, match="labels must be a non-empty vector of integers"):
        first_of_each(torch.zeros(2, 2, dtype=torch.int64))
