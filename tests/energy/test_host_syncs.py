"""A call of a regulariser makes the host wait for the device a fixed number of times, if its layers are small."""

import pytest
import torch
from benchmarks.host_syncs import count, energy_steps
from torch import nn

from hypersphere.energy import MHE

# CoMHE also reads its step counter and its seed. Every learned basis checks the norms of the neurons of each layer.
MAX_SYNCS = {"MHE": 1, "half-space MHE": 1, "RP-CoMHE": 3}


@pytest.mark.parametrize("name", MAX_SYNCS)
def test_regularizers_synchronise_at_most_a_fixed_number_of_times(name):
    torch.manual_seed(0)
    syncs = count(energy_steps()[name])
    assert syncs.total <= MAX_SYNCS[name], dict(syncs.counts)


@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_regularizers_that_skip_the_check_still_report_overflow_and_nan(factor):
    net = nn.Linear(3, 4)
    with torch.no_grad():
        net.weight[2, 1] = torch.nan
    with pytest.raises(ValueError, match="row 2 is not"):
        MHE({"w": net.weight}, hidden=factor, output_layer=None)()
    with pytest.raises(ValueError, match="must be finite"):
        MHE({"w": torch.eye(3)}, hidden=3e38, half_space=False, power=lambda z: 1e3 * z, output_layer=None)()
    with pytest.raises(ValueError, match="must be finite"):
        MHE({"a": torch.eye(3), "b": torch.eye(3), "c": torch.eye(3)}, hidden=3e38, output_layer=None)()
