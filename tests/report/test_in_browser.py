"""The page in headless Chromium."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hypersphere.report import Page, Sphere, Spheres, write_page

from .browser import Browser

FIRST = "#section-2 figure:nth-child(1) canvas"
SECOND = "#section-2 figure:nth-child(2) canvas"
CIRCLE = "#section-3 canvas"


def picture(browser: Browser, selector: str = FIRST) -> str:
    browser.settle()
    return browser.run("return document.querySelector(arguments[0]).toDataURL()", selector)


def theme(browser: Browser) -> str:
    return browser.run("return document.documentElement.dataset.theme")


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.visit(page)
    return browser


def test_page_draws_pictures_without_errors(opened: Browser) -> None:
    painted = """
        const canvas = document.querySelector(arguments[0]);
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return new Set(pixels).size;
    """
    for selector in (FIRST, SECOND, CIRCLE):
        assert opened.run(painted, selector) > 50
    assert opened.console() == []


def test_page_makes_no_requests(opened: Browser) -> None:
    names = opened.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in names if not name.startswith("data:")] == []


@pytest.mark.parametrize("selector", [FIRST, CIRCLE])
def test_sphere_turns_when_dragged(opened: Browser, selector: str) -> None:
    before = picture(opened, selector)
    opened.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center', behavior: 'instant'})", selector)
    opened.drag(selector, 60, 25)
    assert picture(opened, selector) != before


def test_spheres_turn_together_unless_unlinked(opened: Browser) -> None:
    opened.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center', behavior: 'instant'})", FIRST)
    before = picture(opened, SECOND)
    opened.drag(FIRST, 50, 0)
    together = picture(opened, SECOND)
    assert together != before
    opened.click("#section-2 [name=link]")
    opened.drag(FIRST, 50, 0)
    assert picture(opened, SECOND) == together
    opened.click("#section-2 [name=link]")
    assert picture(opened, SECOND) != together


@pytest.mark.slow
@pytest.mark.parametrize("key", ["\ue012", "\ue013", "\ue014", "\ue015", "+", "-"])
def test_sphere_reacts_to_keys(opened: Browser, key: str) -> None:
    opened.run("document.querySelector(arguments[0]).focus()", FIRST)
    before = picture(opened)
    opened.press(key)
    assert picture(opened) != before
    opened.press("0")
    assert picture(opened) == before


def test_theme_follows_the_system_until_chosen(opened: Browser) -> None:
    light = picture(opened)
    assert theme(opened) == "light"
    opened.prefer(color_scheme="dark", reduced_motion="reduce")
    opened.until("document.documentElement.dataset.theme === 'dark'")
    assert theme(opened) == "dark"
    assert picture(opened) != light
    opened.click("#theme")
    assert theme(opened) == "light"
    assert picture(opened) == light
    assert opened.run("return document.getElementById('theme').getAttribute('aria-pressed')") == "false"


def test_legend_entry_highlights_its_class(opened: Browser) -> None:
    before = picture(opened)
    opened.click("#section-2 [data-class='3']")
    opened.hover("h1")
    assert picture(opened) != before
    assert opened.run("return document.querySelectorAll('[aria-pressed=true]').length") == 1
    opened.click("#section-2 [data-class='3']")
    opened.hover("h1")
    assert picture(opened) == before


@pytest.mark.parametrize("angles", [None, np.full(3000, 123.4)], ids=["seen", "projected"])
def test_tooltip_shows_the_angle_of_a_feature(browser: Browser, tmp_path: Path, angles: np.ndarray | None) -> None:
    """The given angle for projected features, and the angle in the picture for others."""
    points = np.random.default_rng(0).normal(size=(3000, 3))
    labels = np.zeros(3000, dtype=int)
    sphere = Sphere("many", points, labels, np.array([[1.0, 0.0, 0.0]]), ("one",), angles=angles)
    browser.visit(write_page(tmp_path / "p.html", Page("t", "l", [Spheres("", [sphere])])))
    browser.run("document.querySelector('canvas').scrollIntoView({block: 'center', behavior: 'instant'})")
    browser.hover("canvas")
    tip = browser.run("const tip = document.querySelector('.tip'); return tip.hidden ? '' : tip.textContent")
    found = re.fullmatch(r"one · ([0-9.]+)° from its vector", tip)
    assert found, tip
    middle = np.degrees(np.arccos(np.cos(0.42) * np.sin(0.5)))  # angle of the direction that faces the viewer initially
    assert float(found[1]) == pytest.approx(123.4) if angles is not None else abs(float(found[1]) - middle) < 5
    assert browser.console() == []


def test_slow_turn_respects_reduced_motion(opened: Browser, page: Path) -> None:
    assert picture(opened) == picture(opened)
    opened.prefer(color_scheme="light", reduced_motion="no-preference")
    opened.open(page)
    opened.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center', behavior: 'instant'})", FIRST)
    assert picture(opened) != picture(opened)
    opened.run("document.querySelector(arguments[0]).focus()", FIRST)
    opened.press("\ue014")
    assert picture(opened) == picture(opened)


def test_page_prints_in_the_light_theme(opened: Browser) -> None:
    opened.click("#theme")
    opened.run("addEventListener('beforeprint', () => { window.printed = document.documentElement.dataset.theme; })")
    assert opened.pdf().startswith(b"%PDF")
    assert opened.run("return window.printed") == "light"
    assert theme(opened) == "dark"


def test_touch_screen_shows_no_hints_about_keys(page: Path, tmp_path: Path, browser: Browser) -> None:
    seen = "return ['.keys', '.touch'].map((kind) => document.querySelector(kind).checkVisibility())"
    browser.visit(page)
    assert browser.run(seen) == [True, False]
    with Browser(tmp_path) as phone:  # a separate browser, because touch emulation cannot be undone
        phone.protocol("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})
        phone.resize(390, 844, mobile=True)
        phone.visit(page)
        assert phone.run(seen) == [False, True]


def test_page_fits_tablets_and_phones(opened: Browser) -> None:
    for tablet in (700, 830, 1000):
        opened.resize(tablet, 800)
        opened.settle()
        assert opened.run("return document.documentElement.scrollWidth") == tablet
    opened.resize(375, 800, density=2, mobile=True)
    opened.settle()
    assert opened.run("return document.documentElement.scrollWidth") == 375
    width, shown = opened.run(
        "const c = document.querySelector(arguments[0]); return [c.width, c.getBoundingClientRect().width]", FIRST
    )
    assert abs(width - 2 * shown) <= 1


def test_labels_of_a_collapsed_run_do_not_overlap(browser: Browser, tmp_path: Path) -> None:
    """All class vectors have nearly the same direction, so only labels that have room are drawn."""
    random = np.random.default_rng(0)
    vectors = np.array([0.0, 0.0, 1.0]) + random.normal(0, 0.01, (10, 3))
    sphere = Sphere("collapsed", vectors[random.integers(0, 10, 50)], random.integers(0, 10, 50), vectors)
    browser.visit(write_page(tmp_path / "p.html", Page("t", "l", [Spheres("", [sphere])])))
    count = "return document.querySelector('.spheres').group.views[0].labelled"
    collapsed = browser.run(count)
    assert 1 <= len(collapsed) < 10
    browser.click("[data-class='7']")
    browser.hover("h1")
    browser.settle()
    assert "7" in browser.run(count)  # the highlighted class always has a label
    spread = Sphere("spread", np.eye(3), [0, 1, 2], np.eye(3))
    browser.visit(write_page(tmp_path / "q.html", Page("t", "l", [Spheres("", [spread])])))
    assert len(browser.run(count)) == 3
