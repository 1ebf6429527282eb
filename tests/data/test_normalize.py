import numpy as np
import pytest
import torch

from hypersphere.data import NORMALIZATIONS, ImageFolderSource, TensorSource
from hypersphere.data import normalize as module
from picture_files import write_tree


@pytest.fixture
def files(tmp_path):
    written = write_tree(tmp_path, {"a": 7, "b": 5}, size=(6, 4))
    return ImageFolderSource(tmp_path), np.stack(list(written.values())).astype(np.float64) / 255


def tensor_source(channels=3):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(256, (9, channels, 5, 4), dtype=torch.uint8, generator=generator)
    return TensorSource(inputs, torch.arange(9) % 2, ("a", "b")), inputs.double().numpy() / 255


def test_standardize_estimates_mean_and_std_of_files(files):
    source, values = files
    mean, std = NORMALIZATIONS["standardize"](source)
    assert mean.shape == std.shape == (3, 1, 1)
    np.testing.assert_allclose(mean.flatten(), values.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(std.flatten(), values.std((0, 1, 2), ddof=1), rtol=1e-6)


def test_standardize_uses_evenly_spaced_samples(files):
    source, values = files
    mean, std = NORMALIZATIONS["standardize"](source, samples=4)
    np.testing.assert_allclose(mean.flatten(), values[[0, 3, 6, 9]].mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(std.flatten(), values[[0, 3, 6, 9]].std((0, 1, 2), ddof=1), rtol=1e-6)


@pytest.mark.parametrize("limit", [module.SMALL_TENSOR, 0])
def test_standardize_of_tensors_uses_all_samples(monkeypatch, limit):
    monkeypatch.setattr(module, "SMALL_TENSOR", limit)
    source, values = tensor_source()
    mean, std = NORMALIZATIONS["standardize"](source, samples=2)
    np.testing.assert_allclose(mean.flatten(), values.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(std.flatten(), values.std((0, 2, 3), ddof=1), rtol=1e-5)


def test_standardize_of_point_clouds_has_one_mean():
    points = torch.randn(6, 10, 3, generator=torch.Generator().manual_seed(0))
    mean, std = NORMALIZATIONS["standardize"](TensorSource(points, torch.zeros(6, dtype=torch.int64), ("a",)))
    assert mean.shape == std.shape == ()
    np.testing.assert_allclose(mean, points.double().mean(), atol=1e-6)
    np.testing.assert_allclose(std, points.double().std(), rtol=1e-5)


def test_standardize_accepts_given_statistics(files):
    source, values = files
    mean, std = NORMALIZATIONS["standardize"](source, mean=[0.1, 0.2, 0.3], std=0.5)
    assert mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert mean.shape == (3, 1, 1)
    assert float(std) == 0.5
    mean, std = NORMALIZATIONS["standardize"](source, mean=0.0)
    assert float(mean) == 0
    np.testing.assert_allclose(std.flatten(), values.std((0, 1, 2), ddof=1), rtol=1e-6)
    for options in ({"mean": [0.1, 0.2]}, {"std": 0}, {"std": [0.1, -1, 1]}, {"mean": "half"}):
        with pytest.raises(ValueError, match=rf"normalize\.{next(iter(options))} must be"):
            NORMALIZATIONS["standardize"](source, **options)


def test_standardize_divides_constant_channels_by_one():
    source = TensorSource(torch.full((4, 1, 3, 3), 7, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), ("a",))
    for limit in (module.SMALL_TENSOR, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SMALL_TENSOR", limit)
            assert NORMALIZATIONS["standardize"](source)[1].item() == 1


def test_centered_maps_pixels_as_the_source():
    mean, std = NORMALIZATIONS["centered"](tensor_source()[0])
    pixels = torch.arange(256).float()
    assert torch.allclose((pixels / 255 - mean) / std, (pixels - 127.5) / 128, atol=1e-6)


def test_mean_image_is_the_mean_of_each_pixel(files):
    source, values = files
    mean, std = NORMALIZATIONS["mean_image"](source)
    assert mean.shape == (3, 6, 4)
    np.testing.assert_allclose(mean.permute(1, 2, 0), values.mean(0), rtol=1e-6)
    assert float(std) == 1


def test_auto_standardizes_images_only():
    source, values = tensor_source(1)
    np.testing.assert_allclose(NORMALIZATIONS["auto"](source)[0].flatten(), values.mean((0, 2, 3)), rtol=1e-5)
    points = TensorSource(torch.randn(4, 5, 3), torch.zeros(4, dtype=torch.int64), ("a",))
    assert [float(one) for one in NORMALIZATIONS["auto"](points)] == [0, 1]
    nodes = TensorSource(torch.arange(4), torch.zeros(4, dtype=torch.int64), ("a",))
    assert [float(one) for one in NORMALIZATIONS["auto"](nodes)] == [0, 1]
    assert [float(one) for one in NORMALIZATIONS["none"](source)] == [0, 1]


def test_standardize_skips_broken_files(tmp_path):
    write_tree(tmp_path, {"a": 4})
    complete = ImageFolderSource(tmp_path)
    expected = torch.stack([complete[index] for index in (1, 2, 3)]).double() / 255
    (tmp_path / "a" / "000.png").write_bytes(b"")
    mean, _ = NORMALIZATIONS["standardize"](ImageFolderSource(tmp_path))
    np.testing.assert_allclose(mean.flatten(), expected.mean((0, 2, 3)), rtol=1e-6)


def test_standardize_does_not_copy_large_tensors(monkeypatch):
    """Only one sample at a time becomes a float."""
    monkeypatch.setattr(module, "SMALL_TENSOR", 0)
    source, _ = tensor_source()
    largest = 0
    original = torch.Tensor.double

    def double(tensor):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "double", double)
    NORMALIZATIONS["standardize"](source)
    assert largest <= 3 * 5 * 4


def test_mean_image_does_not_change_the_data():
    inputs = torch.ones(3, 1, 2, 2, dtype=torch.float64)
    NORMALIZATIONS["mean_image"](TensorSource(inputs, torch.tensor([0, 1, 0]), ["a", "b"]))
    assert torch.equal(inputs, torch.ones_like(inputs))


def test_statistics_of_floats_are_per_channel_for_every_number_of_images(monkeypatch):
    inputs = torch.rand(5, 3, 4, 4) * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    source = TensorSource(inputs, torch.zeros(5, dtype=torch.int64), ["a"])
    small = NORMALIZATIONS["standardize"](source)
    monkeypatch.setattr(module, "SMALL_TENSOR", 0)
    for one, other in zip(small, NORMALIZATIONS["standardize"](source), strict=True):
        torch.testing.assert_close(one, other)
