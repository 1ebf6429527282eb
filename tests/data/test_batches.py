import pytest
import torch

from hypersphere.data import Batches


def test_batches_are_reshuffled_in_every_epoch():
    x = torch.arange(50)
    data = Batches(x, -x, 8, torch.Generator().manual_seed(0))
    orders = [torch.cat([inputs for inputs, _ in data]) for _ in range(2)]
    assert not torch.equal(orders[0], orders[1])
    for order in orders:
        assert not torch.equal(order, x)
        assert torch.equal(order.sort().values, x)
    assert all(torch.equal(inputs, -labels) for inputs, labels in data)
    assert torch.equal(torch.cat([inputs for inputs, _ in Batches(x, x, 8)]), x)


def test_batches_reject_invalid_arguments():
    with pytest.raises(ValueError, match="labels must be one label for each of the 3 inputs"):
        Batches(torch.zeros(3, 1), torch.zeros(2), 1)
    with pytest.raises(ValueError, match="batch_size must be"):
        Batches(torch.zeros(3, 1), torch.zeros(3), 0)
    images = torch.full((2, 1, 2, 2), 255, dtype=torch.uint8)
    assert next(iter(Batches(images, torch.zeros(2), 2)))[0].max() == 1.0


@pytest.mark.parametrize(("count", "size"), [(33, 16), (17, 16), (5, 4), (3, 2), (1, 4), (7, 7), (6, 1), (34, 16)])
def test_batches_have_at_least_two_rows(count, size):
    data = Batches(torch.arange(count), torch.arange(count), size)
    sizes = [len(y) for _, y in data]
    assert len(sizes) == len(data)
    assert torch.equal(torch.cat([y for _, y in data]), torch.arange(count))
    assert min(sizes) > 1 or 1 in (count, size)
    assert max(sizes) <= size + 1
    whole, rest = divmod(count, size)
    if rest != 1 or whole == 0:
        assert sizes == [size] * whole + [rest] * (rest > 0)
