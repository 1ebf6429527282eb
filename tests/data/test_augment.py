from collections import Counter

import pytest
import torch

from hypersphere.data import AUGMENTATIONS

POINTS = ("turn_points", "jitter_points")
IMAGES = [name for name in AUGMENTATIONS if name not in (*POINTS, "window")]  # these keep the size


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


def moved(images, generator, *, shift=0, mirror=False):
    images = AUGMENTATIONS["shift"](shift)(images, generator) if shift else images
    return AUGMENTATIONS["mirror"]()(images, generator) if mirror else images


@pytest.mark.parametrize(("shift", "mirror"), [(0, True), (1, False), (2, True)])
def test_shift_and_mirror_use_all_moves_and_no_others(shift, mirror):
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
    counts = Counter(
        known[tuple(one.flatten().tolist())]
        for one in moved(image.expand(count, -1, -1, -1), seeded(1), shift=shift, mirror=mirror)
    )  # a KeyError means that an image was moved in another way
    assert set(counts) == set(ways)
    assert sum((number - 60) ** 2 / 60 for number in counts.values()) < 3 * len(ways)


def test_shift_and_mirror_move_images_independently_and_keep_uint8():
    images = torch.randint(256, (50, 1, 6, 6), dtype=torch.uint8, generator=seeded())
    out = moved(images, seeded(3), shift=2, mirror=True)
    assert out.dtype == torch.uint8
    ways = [(down, right, turned) for down in range(-2, 3) for right in range(-2, 3) for turned in (False, True)]
    for before, after in zip(images, out, strict=True):
        assert any(torch.equal(slowly(before, *way), after) for way in ways)


def test_shift_and_mirror_draw_the_random_numbers_of_version_0_1():
    """The first draw is the corners (2, N, 1) in 0..2·shift; the second is N bits."""
    images, generator = torch.randn(20, 1, 6, 6, generator=seeded()), seeded(4)
    out = moved(images, seeded(4), shift=2, mirror=True)
    corners = torch.randint(5, (2, 20, 1), generator=generator).squeeze(2)
    mirrored = torch.randint(2, (20,), generator=generator)
    for number in range(20):
        down, right = 2 - int(corners[0, number]), 2 - int(corners[1, number])
        assert torch.equal(out[number], slowly(images[number], down, right, bool(mirrored[number])))


def test_shift_of_zero_pixels_is_the_identity_and_draws_nothing():
    images, generator = torch.randn(3, 1, 4, 4), seeded()
    before = generator.get_state()
    assert torch.equal(AUGMENTATIONS["shift"](0)(images, generator), images)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("pixels", [4, 10**12])
def test_shift_must_be_smaller_than_the_image(pixels):
    with pytest.raises(ValueError, match=r"augment\.pixels must be less than the size 4x6"):
        AUGMENTATIONS["shift"](pixels)(torch.zeros(2, 1, 4, 6), seeded())


@pytest.mark.parametrize("name", IMAGES)
def test_augmentation_keeps_shape_and_range_and_follows_the_generator(name):
    images = torch.rand(6, 3, 16, 12, generator=seeded())
    augment = AUGMENTATIONS[name]()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = augment(images, seeded(1))
    assert torch.equal(torch.get_rng_state(), before), "the global generator must not change"
    torch.manual_seed(12)
    assert torch.equal(augment(images, seeded(1)), first)
    assert first.shape == images.shape
    assert first.dtype == images.dtype
    assert first.min() >= -1e-6
    assert first.max() <= 1 + 1e-6
    others = [augment(images, seeded(seed)) for seed in range(2, 6)]
    assert any(not torch.equal(other, first) for other in others)
    assert torch.equal(AUGMENTATIONS[name]()(images, seeded(1)), first)  # after a restart


@pytest.mark.parametrize("name", [name for name in IMAGES if name != "rand_augment"])
def test_augmentation_accepts_grey_images(name):
    images = torch.rand(4, 1, 12, 12, generator=seeded())
    assert AUGMENTATIONS[name]()(images, seeded(1)).shape == images.shape


def test_window_cuts_parts_of_the_image_at_all_places():
    images = torch.arange(5 * 4 * 6.0).view(5, 1, 4, 6).expand(5, 3, 4, 6)
    generator, seen = seeded(), set()
    for _ in range(40):
        windows = AUGMENTATIONS["window"](margin=2)(images, generator)
        assert windows.shape == (5, 3, 2, 4)
        for window, image in zip(windows, images, strict=True):
            places = [
                (top, left)
                for top in range(3)
                for left in range(3)
                if torch.equal(window, image[:, top : top + 2, left : left + 4])
            ]
            seen.update(places)
    assert len(seen) == 9
    assert torch.equal(AUGMENTATIONS["window"](margin=0)(images, generator), images)
    with pytest.raises(ValueError, match=r"augment\.margin must be less than the size of the images, not 4"):
        AUGMENTATIONS["window"](margin=4)(images, generator)


def test_rand_augment_needs_colours():
    with pytest.raises(ValueError, match="three channels"):
        AUGMENTATIONS["rand_augment"]()(torch.rand(2, 1, 8, 8), seeded())


@pytest.mark.parametrize(("name", "axis"), [("flip", 3), ("flip_vertical", 2)])
def test_flips_return_each_image_or_its_mirror_image(name, axis):
    images = torch.rand(64, 3, 5, 4, generator=seeded())
    out = AUGMENTATIONS[name]()(images, seeded(1))
    flipped = [torch.equal(one, other) for one, other in zip(out, images.flip(axis), strict=True)]
    kept = [torch.equal(one, other) for one, other in zip(out, images, strict=True)]
    assert all(a != b for a, b in zip(flipped, kept, strict=True))
    assert 16 < sum(flipped) < 48
    assert torch.equal(AUGMENTATIONS[name](p=1.0)(images, seeded()), images.flip(axis))
    assert torch.equal(AUGMENTATIONS[name](p=0.0)(images, seeded()), images)


def test_crop_of_the_full_scale_and_ratio_is_the_identity():
    images = torch.rand(3, 3, 9, 9, generator=seeded())
    out = AUGMENTATIONS["crop"](scale=[1.0, 1.0], ratio=[1.0, 1.0])(images, seeded())
    assert torch.allclose(out, images, atol=1e-5)


def test_erase_sets_a_rectangle_to_the_value():
    images = torch.rand(8, 3, 20, 20, generator=seeded()) * 0.9
    out = AUGMENTATIONS["erase"](p=1.0, value=1.0)(images, seeded())
    for before, after in zip(images, out, strict=True):
        changed = (before != after).any(0)
        rows, columns = changed.any(1).nonzero(), changed.any(0).nonzero()
        box = changed[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert box.all()
        assert (after[:, changed] == 1).all()


def test_augmentation_continues_from_a_saved_generator_state():
    images = torch.rand(4, 3, 8, 8, generator=seeded())
    augment, generator = AUGMENTATIONS["colour"](), seeded()
    augment(images, generator)
    state = generator.get_state()
    expected = augment(images, generator)
    resumed = torch.Generator()
    resumed.set_state(state)
    assert torch.equal(AUGMENTATIONS["colour"]()(images, resumed), expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shift", {"pixels": -1}),
        ("shift", {"pixels": True}),
        ("flip", {"p": 1.5}),
        ("crop", {"scale": [0.5]}),
        ("crop", {"scale": [0.9, 0.1]}),
        ("crop", {"scale": [0.5, 2.0]}),
        ("colour", {"hue": 0.7}),
        ("blur", {"kernel": 4}),
        ("erase", {"value": "white"}),
        ("rand_augment", {"m": 30}),
        ("turn_points", {"axis": 3}),
        ("jitter_points", {"sigma": -1.0}),
    ],
)
def test_augmentation_rejects_invalid_options(name, options):
    with pytest.raises(ValueError, match=rf"augment\.{next(iter(options))} must be"):
        AUGMENTATIONS[name](**options)


@pytest.mark.parametrize("name", IMAGES)
def test_augmentation_needs_four_dimensions(name):
    with pytest.raises(ValueError, match="images must be a tensor with four dimensions"):
        AUGMENTATIONS[name]()(torch.zeros(2, 3), seeded())


def test_roll_moves_a_batch_cyclically_by_one_amount():
    images = torch.rand(3, 1, 5, 5)
    generator = torch.Generator().manual_seed(0)
    moves = set()
    for _ in range(200):
        rolled = AUGMENTATIONS["roll"](1)(images, generator)
        matches = [
            (down, right)
            for down in (-1, 0, 1)
            for right in (-1, 0, 1)
            if torch.equal(rolled, torch.roll(images, (down, right), (2, 3)))
        ]
        assert len(matches) == 1
        moves |= set(matches)
    assert len(moves) == 9


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_turn_points_rotates_each_cloud_by_one_angle_about_the_axis(axis):
    clouds = torch.randn(40, 6, 3, dtype=torch.float64, generator=seeded())
    turned = AUGMENTATIONS["turn_points"](axis)(clouds, seeded(1))
    # The rotation that maps the points of a cloud to the turned ones, by least squares.
    rotation = torch.linalg.lstsq(clouds, turned).solution
    torch.testing.assert_close(clouds @ rotation, turned)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(3, dtype=torch.float64).expand(40, 3, 3))
    assert (torch.linalg.det(rotation) > 0).all()
    torch.testing.assert_close(turned[..., axis], clouds[..., axis])
    cosines = (rotation.diagonal(dim1=1, dim2=2).sum(1) - 1) / 2
    assert cosines.min() < -0.7
    assert cosines.max() > 0.7


def test_jitter_points_adds_clipped_noise_of_the_given_deviation():
    clouds = torch.randn(50, 100, 3, generator=seeded())
    noise = AUGMENTATIONS["jitter_points"](sigma=0.02, limit=0.05)(clouds, seeded(1)) - clouds
    assert noise.abs().max() <= 0.05 + 1e-6
    assert float(noise.std()) == pytest.approx(0.01977, abs=4e-4)  # cut off at 2.5 deviations
    assert float(noise.mean()) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("name", POINTS)
def test_augmentation_of_points_follows_the_generator_and_rejects_images(name):
    clouds, augment = torch.randn(3, 4, 3), AUGMENTATIONS[name]()
    assert torch.equal(augment(clouds, seeded(1)), augment(clouds, seeded(1)))
    assert not torch.equal(augment(clouds, seeded(1)), augment(clouds, seeded(2)))
    with pytest.raises(ValueError, match=r"inputs must be point clouds \(N, P, 3\), not"):
        augment(torch.zeros(2, 3, 8, 8), seeded())
