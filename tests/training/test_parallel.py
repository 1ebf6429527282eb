import pytest
import torch
import torch.distributed as dist
from torch import nn

from hypersphere.heads import ShardedHead, softmax
from hypersphere.training import Batches, Objective, minimize
from hypersphere.training.measure import MOST, class_vectors
from hypersphere.training.parallel import Parallel, part_of


class Process:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.fixture
def alone():
    """A process group with one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("count", [*range(1, 20), 64])
def test_part_of_covers_all_rows_with_at_least_two_per_process(count):
    x, y = torch.randn(count, 2), torch.arange(count)
    for size in range(1, 6):
        parts = [part_of(x, y, Process(rank, size), -7) for rank in range(size)]
        assert sorted(torch.cat([labels[labels != -7] for _, labels in parts]).tolist()) == y.tolist()
        for rank, (rows, labels) in enumerate(parts):
            assert len(rows) == len(labels) >= min(count, 2)
            real = labels != -7
            assert torch.equal(rows[real], x[labels[real]])
            assert real.all() or not real.any()
            if count >= 2 * size:
                assert torch.equal(labels, y[rank::size])


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


def exploding(wrap):
    """Return an objective with finite parameters and non-finite features."""
    network = nn.Linear(2, 3)
    nn.init.constant_(network.weight, 3e38)
    return wrap(Objective(network, softmax(3, 2)))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda objective: objective,
        Parallel,
        lambda objective: nn.parallel.DistributedDataParallel(objective),
        lambda objective: Parallel(Objective(objective.network, ShardedHead(objective.head))),
    ],
    ids=["plain", "parallel", "ddp", "sharded"],
)
def test_minimize_reports_non_finite_features_as_divergence(wrap, alone):
    objective = exploding(wrap)
    data = [(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))]
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
    with pytest.raises(FloatingPointError, match="training diverged in epoch 1"):
        minimize(objective, data, epochs=1, optimizer=optimizer)
    wrong = [(torch.ones(4, 2), torch.tensor([0, 1, 0, 9]))]  # invalid labels are still reported as such
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.fill_(0.5)
    with pytest.raises(ValueError, match="y must be in"):
        minimize(objective, wrong, epochs=1, optimizer=optimizer)


@pytest.mark.parametrize("classes", [5, MOST, MOST + 1000])
def test_class_vectors_sample_does_not_depend_on_processes(classes):
    head = softmax(4, classes)
    whole = class_vectors(head)
    chosen = torch.linspace(0, classes - 1, min(classes, MOST)).long()
    assert torch.equal(class_vectors(ShardedHead(head)), whole[chosen])
