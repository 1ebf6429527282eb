"""Energies on a device without float64, which is imitated on the CPU."""

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hypersphere.functions import _pairwise
from hypersphere.functions._pairwise import PairSum, pair_energy
from hypersphere.functions.kernel import PairPotential

DEVICE, CPU = torch.device("mps"), torch.device("cpu")  # "mps" is a real device without float64


def is_on_device(x):
    return getattr(x, "on_device", False)


class DeviceWithoutFloat64(TorchFunctionMode):
    """Tensors with the attribute `on_device` refuse float64, and operations with tensors that do not have it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = any(map(is_on_device, tensors))
        if function == Tensor.device.__get__:
            return DEVICE if on_device else CPU
        if function in (Tensor.cpu, Tensor.to):
            target = next((x for x in args[1:] if isinstance(x, (torch.device, Tensor))), None)
            target = is_on_device(target) if isinstance(target, Tensor) else target == DEVICE if target else on_device
            on_device = target and function is Tensor.to
            # Copy: torch returns the same tensor if dtype and real device stay, but it must not keep the attribute.
            args = [CPU if isinstance(x, torch.device) else x for x in (args[0].clone(), *args[1:])]
        elif on_device and not all(is_on_device(x) or x.ndim == 0 for x in tensors):
            raise RuntimeError(f"{function.__name__} of tensors on two devices")
        if kwargs.get("device") == DEVICE:
            kwargs["device"], on_device = CPU, True
        result = function(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and on_device:
                if x.dtype == torch.float64:
                    raise TypeError(f"{function.__name__} of float64 on a device that does not have it")
                x.on_device = True
        return result


def energy_and_gradient(w, device, **options):
    """Return an energy and its gradient, computed on the imitated device or on the CPU."""
    leaf = w.clone().requires_grad_()
    tensors = {name: value.clone() for name, value in options.items() if isinstance(value, Tensor)}
    for x in (leaf, *tensors.values()):
        x.on_device = device == DEVICE
    options |= tensors
    with DeviceWithoutFloat64():
        energy = pair_energy(PairSum(leaf, PairPotential(half_space=True), **options))
        (gradient,) = torch.autograd.grad(energy, leaf, create_graph=True)
    return energy.detach(), gradient.detach()


def near_duplicates():
    w = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    w[1] = w[0] + 1e-4
    return w


def test_imitated_device_has_no_float64():
    x = torch.ones(2)
    x.on_device = True
    with DeviceWithoutFloat64():
        with pytest.raises(TypeError, match="double of float64"):
            x.double()
        with pytest.raises(RuntimeError, match="add of tensors on two devices"):
            torch.add(x, torch.ones(2))
        assert x.cpu().double().to(x).device == DEVICE


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"weights": torch.linspace(0.5, 2, 12)}, {"labels": torch.tensor([0, 3, 3])}],
    ids=["mutual", "weighted", "cross"],
)
def test_pair_energy_needs_no_float64_of_the_device(options, dense, monkeypatch):
    if not dense:
        monkeypatch.setattr(_pairwise, "_DENSE_PAIRS", 16)
        monkeypatch.setattr(_pairwise, "_PAIRS_IN_CACHE", 16)
    w = near_duplicates()
    energy, gradient = energy_and_gradient(w, DEVICE, **options)
    expected, expected_gradient = energy_and_gradient(w, CPU, **options)
    assert energy == expected
    assert torch.equal(gradient, expected_gradient)
