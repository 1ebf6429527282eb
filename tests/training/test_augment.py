from collections import Counter

import pytest
import torch

from hypersphere.training import Batches
from hypersphere.training.augment import Augmented, moved


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def slowly(image, down, right, mirror):
    """Return the image shifted pixel by pixel, padded with zeros, and then mirrored."""
    channels, height, width = image.shape
    out = torch.zeros_like(image)
    for c in range(channels):
        for i in range(height):
            for j in range(width):
                if 0 <= i - down < height and 0 <= j - right < width:
                    out[c, i, width - 1 - j if mirror else j] = image[c, i - down, j - right]
    return out


@pytest.mark.parametrize(("shift", "mirror"), [(0, True), (1, False), (2, True)])
def test_moved_uses_all_shifts_and_mirrors_and_no_others(shift, mirror):
    image = torch.randn(2, 4, 5, generator=seeded())
    places = range(-shift, shift + 1)
    ways = [
        (down, right, turned)
        for down in places
        for right in places
        for turned in ([False, True] if mirror else [False])
    ]
    known = {tuple(slowly(image, *way).flatten().tolist()): way for way in ways}
    assert len(known) == len(ways)
    count = 60 * len(ways)
    found = Counter(
        known[tuple(one.flatten().tolist())]
        for one in moved(image.expand(count, -1, -1, -1), seeded(1), shift=shift, mirror=mirror)
    )  # a KeyError means that an image was moved in another way
    assert set(found) == set(ways)
    assert sum((number - 60) ** 2 / 60 for number in found.values()) < 3 * len(ways)


def test_moved_moves_images_independently_and_keeps_uint8():
    images = torch.randint(256, (50, 1, 6, 6), dtype=torch.uint8, generator=seeded())
    out = moved(images, seeded(3), shift=2, mirror=True)
    assert out.dtype == torch.uint8
    ways = [(down, right, turned) for down in range(-2, 3) for right in range(-2, 3) for turned in (False, True)]
    for before, after in zip(images, out, strict=True):
        assert any(torch.equal(slowly(before, *way), after) for way in ways)
    assert torch.equal(moved(images, seeded(3), shift=2, mirror=True), out)
    assert not torch.equal(moved(images, seeded(4), shift=2, mirror=True), out)


def test_moved_without_options_is_the_identity():
    images = torch.randn(3, 1, 4, 4)
    assert torch.equal(moved(images, seeded()), images)
    with pytest.raises(ValueError, match="images must be a tensor with four dimensions"):
        moved(torch.zeros(2, 3), seeded())


@pytest.mark.parametrize("stop", [0, 1, 3, 4])
def test_augmented_batches_resume_exactly(stop):
    images, labels = torch.randn(18, 1, 5, 5, generator=seeded()), torch.arange(18)

    def made(seed):
        generator = seeded(seed)
        return Augmented(Batches(images, labels, 4, generator), generator, shift=2, mirror=True)

    whole, first, second = made(1), made(1), made(2)
    expected = [batch for _ in range(2) for batch in whole]
    assert len(whole) == 5
    seen = []
    for at, batch in enumerate(first):
        seen.append(batch)
        if at == stop:
            break
    second.load_state_dict(first.state_dict())
    seen += [batch for _ in range(2) for batch in second]
    assert len(seen) == len(expected)
    for (x, y), (a, b) in zip(seen, expected, strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)
