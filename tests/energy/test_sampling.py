"""Random draws by seed and number."""

import torch

from hypersphere.energy._sampling import seeded_generator


def test_seeded_generator_differs_from_the_stream_of_manual_seed():
    first = torch.randn(4, generator=seeded_generator(0, 0))
    assert not torch.equal(first, torch.randn(4, generator=torch.Generator().manual_seed(0)))
    firsts = {tuple(torch.rand(2, generator=seeded_generator(a, b)).tolist()) for a in range(-9, 9) for b in range(20)}
    assert len(firsts) == 360
