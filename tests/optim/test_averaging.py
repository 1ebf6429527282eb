import pytest
import torch
from torch import nn

from hypersphere.optim import MovingAverage


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_moving_average_follows_small_changes_in_every_dtype(dtype):
    layer = nn.Linear(3, 2, bias=False).to(dtype)
    nn.init.ones_(layer.weight)
    average = MovingAverage(layer, 0.999)
    nn.init.constant_(layer.weight, 2.0)
    expected = torch.full((2, 3), 2 - 0.999**2000, dtype=torch.float64)
    for step in range(2000):
        average.update()
        if step % 10 == 0:  # applying the averages must not round them
            with average.applied():
                assert bool((layer.weight <= 2).all())
    assert bool((layer.weight == 2).all())
    torch.testing.assert_close(average.averages["weight"].double(), expected, rtol=1e-4, atol=0)
    with average.applied():
        torch.testing.assert_close(layer.weight, expected.to(dtype), rtol=1e-2, atol=0)
    other = MovingAverage(layer, 0.999)
    other.load_state_dict(average.state_dict())
    assert torch.equal(other.averages["weight"], average.averages["weight"])


def test_moving_average_can_be_applied_within_itself():
    layer = nn.Linear(2, 2, bias=False)
    average, initial = MovingAverage(layer, 0.5), layer.weight.detach().clone()
    nn.init.zeros_(layer.weight)
    with average.applied(), average.applied():
        assert torch.equal(layer.weight, initial)
    assert not layer.weight.any()


def test_moving_average_rejects_a_decay_that_is_no_number():
    with pytest.raises(ValueError, match="decay must be a number in"):
        MovingAverage(nn.Linear(2, 2), "0.9")
