"""Normalisations (x − mean)/std of inputs, after images are scaled to [0, 1].

Each entry maps a source to tensors (mean, std) that broadcast over a batch of its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from hypersphere._validation import is_integer, is_number, require
from hypersphere.data.images import BrokenSample, as_floats
from hypersphere.data.sources import Source, TensorSource, first_sample, spaced_positions

Statistics = tuple[Float32[Tensor, "..."], Float32[Tensor, "..."]]

SMALL_TENSOR = 2**26  # entries of a tensor that may be copied as float32


def none(source: Source) -> Statistics:
    """Leave the inputs as they are."""
    return torch.zeros(()), torch.ones(())


def auto(source: Source) -> Statistics:
    """Standardise images; leave other inputs as they are."""
    return standardize(source) if first_sample(source).dtype == torch.uint8 else none(source)


def standardize(
    source: Source,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    samples: int = 2000,
) -> Statistics:
    """Subtract the mean and divide by the standard deviation, per channel of images.

    Args:
        source: the training data.
        mean: one number, or one per channel, for images in [0, 1]; by default the mean of the data.
        std: standard deviation, given like `mean`.
        samples: number of evenly spaced samples from which statistics that are not given are estimated. All
            samples are used if they are a tensor in memory.
    """
    require(is_integer(samples, 1), "normalize.samples", "an integer >= 1", samples)
    shape = first_sample(source).shape
    given_mean, given_std = _per_channel("mean", mean, shape), _per_channel("std", std, shape)
    if given_mean is not None and given_std is not None:
        return given_mean, given_std
    data_mean, data_std = _statistics(source, samples)
    return data_mean if given_mean is None else given_mean, data_std if given_std is None else given_std


def centered(source: Source) -> Statistics:
    """Map pixels x in 0..255 to (x − 127.5)/128, as in SphereFace and most face recognition since."""
    return torch.tensor(127.5 / 255), torch.tensor(128 / 255)


def mean_image(source: Source, samples: int = 2000, std: float = 1.0) -> Statistics:
    """Subtract the mean image, estimated from evenly spaced samples, and divide by `std`."""
    require(is_integer(samples, 1), "normalize.samples", "an integer >= 1", samples)
    require(is_number(std, 0) and std > 0, "normalize.std", "a number > 0", std)
    total, count = None, 0
    for sample in _samples(source, samples):
        total = sample.to(torch.float64, copy=True) if total is None else total.add_(sample)
        count += 1
    assert total is not None
    return (total / (count * _scale(source))).float(), torch.tensor(float(std))


def _statistics(source: Source, samples: int) -> Statistics:
    """Return mean and standard deviation, per channel of images; deviations of zero become one."""
    if isinstance(source, TensorSource):
        require(source.inputs.ndim > 1, "normalize", "none on a graph", "standardize")
    if isinstance(source, TensorSource) and source.inputs.numel() <= SMALL_TENSOR:
        inputs = as_floats(source.inputs)
        if inputs.ndim != 4:
            mean, std = inputs.mean(), inputs.std()
        else:
            mean, std = (values.view(-1, 1, 1) for values in (inputs.mean((0, 2, 3)), inputs.std((0, 2, 3))))
        return mean, torch.where(std > 0, std, 1)
    # Read one sample at a time. Sums of pixels and of their squares are exact in float64.
    count, total, squares = 0, torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for sample in _samples(source, len(source) if isinstance(source, TensorSource) else samples):
        values = sample.double()
        dims = (1, 2) if values.ndim == 3 else tuple(range(values.ndim))  # per channel of an image
        total, squares = total + values.sum(dims), squares + values.square().sum(dims)
        count += values.numel() // max(total.numel(), 1)
    mean = total / count
    variance = (squares - count * mean.square()).clamp(min=0) / max(count - 1, 1)
    scale = _scale(source)
    mean, std = (mean / scale).float(), (variance.sqrt() / scale).float()
    std = torch.where(std > 0, std, 1)
    return (mean.view(-1, 1, 1), std.view(-1, 1, 1)) if mean.ndim else (mean, std)


def _samples(source: Source, most: int) -> Iterator[Tensor]:
    """Yield at most `most` evenly spaced samples, without those that cannot be decoded."""
    readable = 0
    for index in spaced_positions(len(source), most):
        try:
            sample = source[index]
        except BrokenSample:
            continue  # reported when it is loaded
        readable += 1
        yield sample
    require(readable > 0, "data", "a source with a readable sample", "none")


def _scale(source: Source) -> float:
    """Return 255 for pixels, which are scaled to [0, 1] before normalisation, else 1."""
    return 255.0 if first_sample(source).dtype == torch.uint8 else 1.0


def _per_channel(name: str, value: float | Sequence[float] | None, shape: torch.Size) -> Tensor | None:
    """Return a number, or one number per channel, as a tensor that broadcasts over samples of this shape."""
    if value is None:
        return None
    numbers: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    lowest = 0 if name == "std" else -float("inf")
    fits = all(is_number(number, lowest) and (name == "mean" or number > 0) for number in numbers)
    fits = fits and len(numbers) in (1, shape[0])
    require(fits, f"normalize.{name}", f"a number, or one number per channel ({shape[0]})", value)
    tensor = torch.tensor([float(number) for number in numbers])
    return tensor.view(-1, *[1] * (len(shape) - 1)) if len(tensor) > 1 else tensor.view(())


NORMALIZATIONS: dict[str, Callable[..., Statistics]] = {
    "auto": auto,
    "none": none,
    "standardize": standardize,
    "centered": centered,
    "mean_image": mean_image,
}
