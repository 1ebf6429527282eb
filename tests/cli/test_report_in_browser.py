"""Pages of runs in headless Chromium."""

from pathlib import Path

import pytest
from report.document import Checker


def opened(browser, path):
    browser.visit(Path(path))
    return browser


def picture(browser):
    browser.settle()
    return browser.run("return document.querySelector('canvas').toDataURL()")


def shown(browser):
    return browser.run(
        "return [...document.querySelectorAll('main .tabs > .panel:not([hidden]) > h3')].map((h) => h.textContent)"
    )


@pytest.mark.slow
def test_run_page_switches_tabs_and_turns_the_sphere(browser, page):
    opened(browser, page)
    assert browser.console() == []
    assert shown(browser) == ["Training"]
    browser.click("[role=tab]:nth-child(2)")
    assert shown(browser) == ["Features"]
    browser.run("document.querySelector('canvas').scrollIntoView({block: 'center', behavior: 'instant'})")
    before = picture(browser)
    browser.drag("canvas", 60, 25)
    assert picture(browser) != before
    browser.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
    for name in ("Verification", "Class vectors", "Layers", "Landscape"):
        browser.press("\ue014")  # the right arrow
        assert shown(browser) == [name]
        browser.settle()
    assert browser.console() == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.slow
@pytest.mark.parametrize("width", [375, 1280])
def test_run_page_is_never_wider_than_the_window(browser, page, comparison, width):
    for path in (page, comparison):
        opened(browser, path)
        browser.resize(width, 800, mobile=width < 500)
        for tab in range(browser.run("return document.querySelectorAll('[role=tab]').length")):
            browser.run("document.querySelectorAll('[role=tab]')[arguments[0]].click()", tab)
            browser.settle()
            assert browser.run("return document.documentElement.scrollWidth") == width


def test_run_page_describes_every_picture(page, comparison):
    for path in (page, comparison):
        for tag, attributes in Checker(path.read_text(encoding="utf-8")).elements:
            if attributes.get("role") == "img" or tag == "canvas":
                assert attributes.get("aria-label"), attributes
            if tag == "img":
                assert "alt" in attributes
