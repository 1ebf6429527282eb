"""Histograms: counts agree with NumPy, bins are at round numbers."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from hypersphere.report import Distribution, Histogram
from hypersphere.report.histogram import MOST_BINS, histogram_html, round_bins

from .document import HOSTILE, Checker


def data_of(histogram: Histogram) -> dict:
    return json.loads(histogram_html(histogram).rsplit('<script type="application/json">', 1)[1].split("</script>")[0])


def counts(series: dict) -> list[float]:
    return [float(text.split(" ")[0].replace(",", "")) for text in series["text"]]


def test_histogram_counts_agree_with_numpy() -> None:
    random = np.random.default_rng(0)
    one, two = random.normal(0, 1, 1500), random.normal(4, 0.5, 90)
    histogram = Histogram("t", [Distribution("one", one), Distribution("two", torch.from_numpy(two))])
    data = data_of(histogram)
    for series, values in zip(data["series"], (one, two), strict=True):
        assert counts(series) == np.histogram(values, histogram.bins)[0].tolist()
        assert sum(counts(series)) == len(values)
    assert len(data["x"]) == len(histogram.bins) - 1


@pytest.mark.parametrize("scale", [1e-5, 0.3, 1.0, 700.0, 1e8])
def test_round_bins_are_round_even_and_complete(scale: float) -> None:
    values = np.random.default_rng(1).gamma(3, scale, 400)
    edges = round_bins(values)
    assert edges[0] <= values.min()
    assert values.max() <= edges[-1]
    widths = np.diff(edges)
    np.testing.assert_allclose(widths, widths[0])
    assert f"{widths[0]:.5e}"[:3] in ("1.0", "2.0", "5.0")
    assert 4 <= len(widths) <= 101


def test_round_bins_of_equal_or_no_values() -> None:
    assert counts(data_of(Histogram("t", [Distribution("k", np.full(9, 0.5))]))["series"][0]) == [9]
    assert data_of(Histogram("t", [Distribution("k", [])]))["series"][0]["text"] == ["0"]
    assert "k: no values." in histogram_html(Histogram("t", [Distribution("k", [np.nan])]))


def test_histogram_accepts_counts_in_given_bins() -> None:
    edges = np.linspace(0, 180, 181)
    angles = Histogram("t", [Distribution("same", counts=torch.arange(180))], edges=edges, shares=False)
    assert counts(data_of(angles)["series"][0]) == list(range(180))
    many = Histogram("t", [Distribution("same", counts=np.ones(1000))], edges=np.arange(1001))
    joined = counts(data_of(many)["series"][0])
    assert len(joined) <= MOST_BINS
    assert sum(joined) == 1000
    middles = np.arange(180) + 0.5
    mean = (middles * np.arange(180)).sum() / np.arange(180).sum()
    assert f"mean {mean:.3g}" in histogram_html(angles)


def test_histogram_reports_omitted_values() -> None:
    html = histogram_html(Histogram("t", [Distribution("a", [1, 2, np.nan, np.inf, 50])], edges=[0, 1, 3]))
    assert "2 values not finite, omitted." in html
    assert "1 value outside the bins, not drawn." in html


def test_histogram_shares_are_relative_to_each_distribution() -> None:
    few, many = Distribution("few", [0.5] * 3), Distribution("many", [1.5] * 3000)
    shares = data_of(Histogram("t", [few, many], edges=[0, 1, 2]))["series"]
    assert shares[0]["y"][0] == shares[1]["y"][1]
    numbers = data_of(Histogram("t", [few, many], edges=[0, 1, 2], shares=False))["series"]
    assert numbers[0]["y"][0] > numbers[1]["y"][1]


def test_histogram_outline_skips_empty_bins() -> None:
    html = histogram_html(Histogram("t", [Distribution("a", [0.5, 3.5])], edges=[0, 1, 2, 3, 4]))
    (outline,) = re.findall(r"<path class='line thin' d='([^']*)'", html)
    assert outline.count("M") == 2
    (closed,) = re.findall(r"<path class='band' d='([^']*)'", html)
    assert closed.count("M") == 1


def test_histogram_escapes_names_and_draws_marks() -> None:
    histogram = Histogram(
        HOSTILE, [Distribution(HOSTILE, [1, 2])], x_name=HOSTILE, marks={HOSTILE: 1.5}, caption=HOSTILE
    )
    document = Checker(histogram_html(histogram))
    assert document.count("script") == 1
    assert sum((attributes.get("class") or "") == "mark" for _, attributes in document.elements) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Distribution("a"), "values of 'a' must be given either as values or as counts, not None"),
        (lambda: Distribution("a", [1], [1]), "values of 'a' must be given either as values or as counts"),
        (lambda: Distribution("a", counts=[-1]), r"counts of 'a' must be finite numbers >= 0, not \[-1.0\]"),
        (lambda: Histogram("t", []), "distributions must be at least one Distribution, not 0"),
        (lambda: Histogram("t", [[1, 2]]), r"distributions\[0\] must be a Distribution, not 'list'"),
        (lambda: Histogram("t", [Distribution("a", ["x"])]), "values of 'a' must be real numbers"),
        (lambda: Histogram("t", [Distribution("a", [1])], edges=[1, 1]), "edges must be at least two ascending"),
        (
            lambda: Histogram("t", [Distribution("a", counts=[1])]),
            "edges must be given with the counts of 'a', not None",
        ),
        (
            lambda: Histogram("t", [Distribution("a", counts=[1])], edges=[0, 1, 2]),
            "counts of 'a' must be one count for each of the 2 bins, not 1",
        ),
        (
            lambda: Histogram("t", [Distribution("a", [1])], marks={"m": np.nan}),
            r"marks\['m'\] must be a finite number, not nan",
        ),
    ],
)
def test_histogram_rejects_invalid_input_in_one_line(make, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
