"""A training step of a head makes the host wait at most once."""

import pytest
from benchmarks.host_syncs import count, head_steps


@pytest.mark.parametrize("name", head_steps())
def test_head_training_step_of_every_preset_synchronises_once(name):
    syncs = count(head_steps()[name])
    assert syncs.total <= 1, dict(syncs.counts)
