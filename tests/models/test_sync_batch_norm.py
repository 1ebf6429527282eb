import torch
from torch import nn

from hypersphere.models import sync_batch_norm_


def test_sync_batch_norm_keeps_the_mode_of_each_layer():
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    frozen, trained = network[1].eval(), network[3]
    statistics, weights = dict(frozen.named_buffers()), dict(trained.named_parameters())
    before = {name: value.clone() for name, value in statistics.items()}
    assert sync_batch_norm_(network) == 2
    assert [layer.training for layer in network] == [True, False, True, True]
    assert all(network[1].get_buffer(name) is value for name, value in statistics.items())
    assert all(network[3].get_parameter(name) is value for name, value in weights.items())
    network(torch.randn(8, 3) + 5)
    assert all(torch.equal(statistics[name], before[name]) for name in statistics)
    assert int(network[3].num_batches_tracked) == 1
