"""Claims of the sources about angles, checked with brute force."""

import math

import numpy as np
import pytest
from sklearn.datasets import load_digits

from hypersphere.evaluation import (
    class_angles,
    cosine_scores,
    identify,
    inter_class_angle,
    intra_class_angle,
)

CIRCLE = np.linspace(-math.pi, math.pi, 40_001)


# Bounds on the margin m of A-Softmax (thesis, section 2.3.5) ---------------------------------------------------------


def widths_and_gap(m, positions):
    """Return the angle covered by each of the first two classes and the smallest angle between them.

    The classes are on a circle: a point belongs to class i if m·θᵢ < θⱼ for all other classes j. The result is exact
    up to the spacing of the grid.
    """
    angles = np.abs((CIRCLE - np.array(positions)[:, None] + math.pi) % (2 * math.pi) - math.pi)
    ends = []
    for i in (0, 1):
        members = CIRCLE[m * angles[i] < np.delete(angles, i, axis=0).min(0)]
        # Offsets from the class vector, in (−π, π], so that a class across ±π is one interval.
        offsets = (members - positions[i] + math.pi) % (2 * math.pi) - math.pi
        ends.append((positions[i] + offsets.min(), positions[i] + offsets.max()))
    (low_0, high_0), (low_1, high_1) = ends
    return (high_0 - low_0, high_1 - low_1), min(low_1 - high_0, low_0 + 2 * math.pi - high_1)


def smallest_separating_margin(sets_of_positions):
    """Return, by bisection, the smallest m for which classes are narrower than the gap between them in all sets."""
    spacing = CIRCLE[1] - CIRCLE[0]
    low, high = 1.5, 8.0
    while high - low > 1e-3:
        m = (low + high) / 2
        measured = [widths_and_gap(m, positions) for positions in sets_of_positions]
        separated = all(max(widths) <= gap + 2 * spacing for widths, gap in measured)
        low, high = (low, m) if separated else (m, high)
    return high


def test_smallest_margin_of_two_classes_is_two_plus_root_three():
    sets = [(0.0, between) for between in (0.5, 1.0, 2.0, 2.5, 3.0, math.pi)]
    assert smallest_separating_margin(sets) == pytest.approx(2 + math.sqrt(3), abs=0.02)


@pytest.mark.parametrize("classes", [3, 4, 7, 10])
def test_smallest_margin_of_evenly_spaced_classes_is_three(classes):
    positions = [2 * math.pi * i / classes for i in range(classes)]
    assert smallest_separating_margin([positions]) == pytest.approx(3, abs=0.02)


@pytest.mark.parametrize("m", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("between", [0.7, 2.0, 3.0])
def test_class_angles_of_two_classes_match_the_formulas(m, between):
    (width, _), gap = widths_and_gap(m, (0.0, between))
    assert width == pytest.approx(intra_class_angle(m, between), abs=1e-3)
    assert gap == pytest.approx(inter_class_angle(m, between), abs=1e-3)


# Random vectors in high dimensions (thesis, equation 1.1) ------------------------------------------------------------


@pytest.mark.parametrize("dim", [16, 256, 4096])
def test_random_vectors_become_orthogonal_and_distances_depend_on_norms(dim):
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((300, dim))
    angles = class_angles(x, np.arange(300) % 2).negative
    # The cosine of two random directions has mean 0 and variance 1/dim.
    assert angles.mean == pytest.approx(math.pi / 2, abs=0.01)
    assert angles.std == pytest.approx(dim**-0.5, rel=0.1)
    first, second = x[:150], x[150:]
    from_norms = np.sqrt((first**2).sum(1) + (second**2).sum(1))
    gap = np.abs(np.linalg.norm(first - second, axis=1) / from_norms - 1)
    # ‖x−y‖² = ‖x‖² + ‖y‖² − 2‖x‖‖y‖cos θ, so the relative gap is about |cos θ|/2, with mean √(2/(π·dim))/2.
    assert gap.mean() == pytest.approx(math.sqrt(2 / (math.pi * dim)) / 2, rel=0.25)


# Phases and magnitudes of images (thesis, section 3.1) ---------------------------------------------------------------


def test_images_are_recognised_by_fourier_phases_and_not_by_magnitudes():
    images = load_digits().images[:300]
    images = images - images.mean((1, 2), keepdims=True)  # the mean of an image has no phase
    spectrum = np.fft.fft2(images)
    noise = np.fft.fft2(np.random.default_rng(0).standard_normal(images.shape))

    def rebuilt(magnitudes, phases):
        result = np.fft.ifft2(np.abs(magnitudes) * np.exp(1j * np.angle(phases)))
        assert np.abs(result.imag).max() < 1e-12
        return result.real.reshape(len(images), -1)

    originals, numbers = images.reshape(len(images), -1), np.arange(len(images))
    from_phases, from_magnitudes = rebuilt(noise, spectrum), rebuilt(spectrum, noise)
    assert cosine_scores(from_phases, originals).mean() > 0.5
    assert abs(cosine_scores(from_magnitudes, originals).mean()) < 0.1
    # Each rebuilt image is searched among all originals.
    assert identify(from_phases, numbers, originals, numbers).accuracy_at(1) > 0.8
    assert identify(from_magnitudes, numbers, originals, numbers).accuracy_at(1) < 0.05
