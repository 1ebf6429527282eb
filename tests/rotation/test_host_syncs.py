"""A training step of a rotated layer does not make the host wait for the device."""

import pytest
from benchmarks.host_syncs import count, rotation_steps


@pytest.mark.parametrize("name", rotation_steps())
def test_training_step_of_every_rotation_does_not_synchronise(name):
    syncs = count(rotation_steps()[name])
    assert syncs.total == 0, dict(syncs.counts)
