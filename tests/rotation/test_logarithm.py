"""Generators and logarithms of rotations."""

import pytest
import torch

from hypersphere.rotation._logarithm import cayley_generator


@pytest.mark.parametrize("size", [2, 5, 6, 9])
def test_cayley_generator_refuses_every_reflection(size):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        q = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]
        q[0] *= -torch.linalg.det(q)  # the determinant is now −1
        with pytest.raises(ValueError, match="turns a plane by 180° or reflects"):
            cayley_generator(q)
