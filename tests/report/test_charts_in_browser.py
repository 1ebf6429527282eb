"""Charts and tabs in headless Chromium."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hypersphere.report import Chart, Page, Series, write_page
from hypersphere.report.charts import bars, heat_map, histogram, lines

from .browser import Browser
from .charts import every_section
from .document import HOSTILE

LEFT, RIGHT, UP, DOWN, HOME, END, ESCAPE = "\ue012", "\ue014", "\ue013", "\ue015", "\ue011", "\ue010", "\ue00c"
LOSS = "#section-2 .cell:nth-child(1)"
ENERGY = "#section-2 .cell:nth-child(2)"
ROC = "#section-3"
GEOMETRY = "#section-4"
LEARNED = "#section-5"

# Visible labels that overlap another label of their group, or that are outside their chart.
FAULTS = """
    const faults = [];
    const visible = { visibilityProperty: true, opacityProperty: true };
    const seen = (e) => e.checkVisibility(visible) && e.getBoundingClientRect().width > 0;
    const groups = document.querySelectorAll(".role-axis-label, .role-legend-label, .toggles");
    for (const group of groups) {
        const items = [...group.querySelectorAll("text, button")].filter(seen).filter((e) => e.textContent.trim());
        const boxes = items.map((e) => e.getBoundingClientRect());
        for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
            const [a, b] = [boxes[i], boxes[j]];
            const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (wide > 0.5 && high > 2.5) faults.push(["touch", items[i].textContent, items[j].textContent]);
        }
        const chart = group.closest(".chart").getBoundingClientRect();
        items.forEach((e, i) => {
            const b = boxes[i];
            const aside = b.left < chart.left - 12 || b.right > chart.right + 12;  // the padding of a cell
            if (aside || b.bottom > chart.bottom + 1 || b.top < chart.top - 6) faults.push(["outside", e.textContent]);
        });
    }
    return faults;
"""


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("charts") / "page.html"
    return write_page(target, Page("All of it", "Every kind of section.", every_section()))


@pytest.fixture
def opened(browser: Browser, charts: Path) -> Browser:
    browser.visit(charts)
    return browser


def show(browser: Browser, selector: str) -> None:
    browser.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center', behavior: 'instant'})", selector)


def focus(browser: Browser, selector: str) -> None:
    browser.run("document.querySelector(arguments[0]).focus({focusVisible: true})", selector)


def words(browser: Browser, selector: str) -> str:
    return browser.run("const e = document.querySelector(arguments[0]); return e.hidden ? '' : e.innerText", selector)


def visible(browser: Browser, selector: str) -> int:
    return browser.run(
        "return [...document.querySelectorAll(arguments[0])]"
        ".filter((e) => e.checkVisibility({visibilityProperty: true}) && e.getClientRects().length).length",
        selector,
    )


def shown_panels(browser: Browser, section: str) -> list[int]:
    return browser.run(
        "return [...document.querySelectorAll(arguments[0] + ' .panel')]"
        ".flatMap((p, i) => p.checkVisibility({visibilityProperty: true}) ? [i] : [])",
        section,
    )


@pytest.mark.slow
def test_charts_log_no_errors_and_make_no_requests(opened: Browser) -> None:
    for index in (2, 3, 4, 1):
        opened.click(f"{GEOMETRY} [role=tab]:nth-child({index})")
    opened.click("#theme")
    opened.click("#theme")
    opened.settle()
    assert opened.console() == []
    names = opened.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in names if not name.startswith("data:")] == []


def test_tabs_switch_by_click(opened: Browser) -> None:
    assert shown_panels(opened, GEOMETRY) == [0]
    assert shown_panels(opened, LEARNED) == [0]
    opened.click(f"{GEOMETRY} [role=tab]:nth-child(3)")
    assert shown_panels(opened, GEOMETRY) == [2]
    assert shown_panels(opened, LEARNED) == [0]
    chosen = "return document.querySelector(arguments[0] + ' [aria-selected=true]')"
    assert opened.run(f"{chosen}.textContent", GEOMETRY) == "Class vectors"
    assert (
        opened.run(
            f"const t = {chosen[7:]}; return document.getElementById(t.getAttribute('aria-controls')).hidden", GEOMETRY
        )
        is False
    )


def test_tabs_switch_by_keys(opened: Browser) -> None:
    focus(opened, f"{GEOMETRY} [role=tab]")
    for key, panel in ((RIGHT, 1), (RIGHT, 2), (LEFT, 1), (END, 3), (RIGHT, 0), (LEFT, 3), (HOME, 0)):
        opened.press(key)
        assert shown_panels(opened, GEOMETRY) == [panel]
        assert opened.run("return document.activeElement.getAttribute('aria-selected')") == "true"
    reachable = "return [...document.querySelectorAll(arguments[0] + ' [role=tab]')].map((t) => t.tabIndex)"
    assert opened.run(reachable, GEOMETRY) == [0, -1, -1, -1]


@pytest.mark.slow
def test_sphere_in_a_tab_turns_when_dragged(opened: Browser) -> None:
    canvas = f"{GEOMETRY} canvas"
    picture = "return document.querySelector(arguments[0]).toDataURL()"
    opened.click(f"{GEOMETRY} [role=tab]:nth-child(2)")
    show(opened, canvas)
    opened.settle()
    before = opened.run(picture, canvas)
    assert len(before) > 20_000
    opened.drag(canvas, 60, 25)
    opened.settle()
    assert opened.run(picture, canvas) != before


def test_toggle_hides_and_shows_its_series(opened: Browser) -> None:
    assert visible(opened, f"{LOSS} .mark-line path") == 3
    opened.click(f"{LOSS} [data-name='A-Softmax (m=4)']")
    opened.settle()
    assert visible(opened, f"{LOSS} .mark-line path") == 2
    pressed = "return document.querySelector(arguments[0]).getAttribute('aria-pressed')"
    assert opened.run(pressed, f"{LOSS} [data-name='A-Softmax (m=4)']") == "false"
    focus(opened, f"{LOSS} .plot")
    assert "A-Softmax (m=4)" not in words(opened, f"{LOSS} .readout")
    assert "Softmax" in words(opened, f"{LOSS} .readout")
    opened.click(f"{LOSS} [data-name='A-Softmax (m=4)']")
    opened.settle()
    assert visible(opened, f"{LOSS} .mark-line path") == 3
    assert visible(opened, f"{ENERGY} .mark-line path") == 9


def test_readout_follows_the_pointer(opened: Browser) -> None:
    show(opened, f"{LOSS} .plot")
    opened.hover(f"{LOSS} .plot")
    read = words(opened, f"{LOSS} .readout")
    assert read.startswith(("epoch 15", "epoch 16"))
    assert read.count("±") == 3
    assert visible(opened, f"{LOSS} .dot") == 3
    opened.hover("h1")
    assert words(opened, f"{LOSS} .readout") == ""
    show(opened, f"{GEOMETRY} .plot")
    opened.hover(f"{GEOMETRY} .plot", -300)
    assert "angle in degrees" in words(opened, f"{GEOMETRY} .readout")


def test_readout_of_curves_follows_the_keys(opened: Browser) -> None:
    focus(opened, f"{LOSS} .plot")
    assert words(opened, f"{LOSS} .readout").startswith("epoch 30")
    for key, head in (
        (LEFT, "epoch 29"),
        (LEFT, "epoch 28"),
        (RIGHT, "epoch 29"),
        (HOME, "epoch 1\n"),
        (END, "epoch 30"),
    ):
        opened.press(key)
        assert words(opened, f"{LOSS} .readout").startswith(head)
    opened.press(ESCAPE)
    assert words(opened, f"{LOSS} .readout") == ""
    focus(opened, f"{ROC} .plot")
    opened.press(HOME)
    assert "false accept rate 0.00001" in words(opened, f"{ROC} .readout")


def test_readout_of_cells_follows_the_keys(opened: Browser) -> None:
    opened.click(f"{GEOMETRY} [role=tab]:nth-child(3)")
    area = f"{GEOMETRY} .panel:nth-of-type(4) .plot"  # the list of tabs comes first
    focus(opened, area)
    for key, head in (
        (RIGHT, "airplane · automobile"),
        (DOWN, "automobile · automobile"),
        (END, "automobile · truck"),
        (UP, "airplane · truck"),
    ):
        opened.press(key)
        assert words(opened, f"{area} .readout").startswith(head)


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 390, 620, 830, 1280])
def test_labels_neither_overlap_nor_leave_their_charts(opened: Browser, width: int) -> None:
    opened.resize(width, 900, mobile=width < 500)
    for tab in range(4):
        opened.run(
            "for (const list of document.querySelectorAll('[role=tablist]')) "
            "list.children[Math.min(arguments[0], list.children.length - 1)].click()",
            tab,
        )
        opened.settle()
        assert opened.run(FAULTS) == []
        assert opened.run("return document.documentElement.scrollWidth") == width


def test_charts_follow_the_theme(opened: Browser) -> None:
    colors = """
        const of = (selector, name) => getComputedStyle(document.querySelector(arguments[0] + " " + selector))[name];
        return [of(".role-axis-label text", "fill"), of(".role-axis-grid line", "stroke"), of(".mark-line", "filter")];
    """
    light = opened.run(colors, LOSS)
    line = opened.run("return getComputedStyle(document.querySelector(arguments[0])).stroke", f"{LOSS} .mark-line path")
    assert line == "rgb(15, 91, 216)"
    opened.prefer(color_scheme="dark", reduced_motion="reduce")
    opened.until("document.documentElement.dataset.theme === 'dark'")
    assert all(one != other for one, other in zip(light, opened.run(colors, LOSS), strict=True))


@pytest.mark.slow
def test_print_shows_every_panel(opened: Browser) -> None:
    opened.protocol("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert shown_panels(opened, GEOMETRY) == [0, 1, 2, 3]
        assert visible(opened, f"{GEOMETRY} .panel > h3") == 4
        assert visible(opened, "[role=tablist]") == 0
    finally:
        opened.protocol("Emulation.setEmulatedMedia", {"media": ""})


def test_page_without_scripts_shows_all_panels_and_numbers(opened: Browser, charts: Path) -> None:
    opened.protocol("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        opened.open(charts)
    finally:
        opened.protocol("Emulation.setScriptExecutionDisabled", {"value": False})
    assert shown_panels(opened, GEOMETRY) == [0, 1, 2, 3]
    assert visible(opened, f"{GEOMETRY} .panel > h3") == 4
    assert visible(opened, "details") == 8


@pytest.mark.slow
def test_charts_fit_their_columns_and_are_printed(opened: Browser) -> None:
    widths = """
        const width = (view) => view.querySelector("svg").getBoundingClientRect().width;
        return [...document.querySelectorAll(".view")].map((view) => width(view) - view.clientWidth);
    """
    assert all(abs(difference) < 2 for difference in opened.run(widths))
    opened.resize(700, 900)
    opened.until(
        "document.querySelector('.view').clientWidth < 640 && document.querySelector('.view svg').clientWidth < 640"
    )
    opened.settle()
    assert all(difference < 2 for difference in opened.run(widths))
    assert opened.pdf().count(b"/Type /Page\n") >= 2 or len(opened.pdf()) > 30_000


def test_hostile_names_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    names = [HOSTILE, "'] + alert(1) + ['", "\\u0027", "${alert(1)}"]
    series = [Series(name, [1.0, place]) for place, name in enumerate(names, 1)]
    sections = [
        Chart("a", lines(series, x_name=HOSTILE, y_name=HOSTILE)),
        Chart("b", heat_map(np.eye(4), names, value_name=HOSTILE)),
        Chart("c", bars(names, [Series(HOSTILE, [1.0, 2.0, 3.0, 4.0])], value_name=HOSTILE)),
        Chart("d", histogram({HOSTILE: [1.0, 2.0], "x": [2.0, 3.0]}, x_name=HOSTILE, marks={HOSTILE: 1.5})),
    ]
    browser.visit(write_page(tmp_path / "p.html", Page("t", "l", sections)))
    assert browser.console() == []
    labels = browser.run(
        "return [...document.querySelectorAll('#section-2 .role-axis-label text')].map((t) => t.textContent)"
    )
    assert "${alert(1)}" in labels
    browser.run("document.querySelector('#section-1 .plot').focus({focusVisible: true})")
    assert "alert(1)" in browser.run("return document.querySelector('#section-1 .readout').textContent")
    assert browser.run("return document.querySelectorAll('script').length") == 3 + 4
