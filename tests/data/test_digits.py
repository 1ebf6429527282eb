import pytest
import torch

from hypersphere.data import digits

pytest.importorskip("sklearn")


def test_the_split_is_fixed_stratified_and_complete():
    from sklearn.datasets import load_digits

    train, test = digits(), digits("test")
    assert (len(train), len(test)) == (1297, 500)
    assert torch.bincount(test.labels).tolist() == [50] * 10
    together = torch.cat((train.images, test.images)).flatten(1)
    source = torch.from_numpy(load_digits().data * 255 / 16).round().to(torch.uint8)
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, source.tolist()))


def test_all_grey_levels_stay_apart():
    assert len(digits().images.unique()) == 17
    assert digits().images.max() == 255


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split must be one of 'train', 'test', not 'val'"):
        digits("val")
