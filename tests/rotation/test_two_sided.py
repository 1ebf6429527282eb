"""The product (R·W₀·P)·x with an explicit backward pass."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from hypersphere.rotation import BlockLayout
from hypersphere.rotation.two_sided import OrderedBlocks, _TwoSided


@pytest.mark.parametrize(("p", "r"), [(8, 8), (6, 8), (8, 4), (8, None), (None, 4)])
def test_two_sided_linear_passes_gradcheck_and_gradgradcheck(p, r):
    torch.manual_seed(0)
    x, v = torch.randn(3, 8).double().requires_grad_(), torch.randn(9, 8).double().requires_grad_()
    inputs = None if p is None else OrderedBlocks(BlockLayout(p, 2), torch.randperm(8))
    outputs = None if r is None else OrderedBlocks(BlockLayout(r, 4), torch.randperm(9))
    r_t = None if r is None else torch.randn(4, r // 4, r // 4).double().requires_grad_()
    p_t = None if p is None else torch.randn(2, p // 2, p // 2).double().requires_grad_()

    def function(*tensors):
        return _TwoSided.apply(outputs, inputs, *tensors)

    assert gradcheck(function, (x, r_t, p_t, v))
    assert gradgradcheck(function, (x, r_t, p_t, v), fast_mode=True)
