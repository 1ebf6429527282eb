"""Tables in HTML and in the terminal."""

from __future__ import annotations

import io
import math
import re

import numpy as np
import pytest
from rich.console import Console

from hypersphere.report import Column, Table, markdown, print_table
from hypersphere.report.tables import best_cells, table_html


def single(*values: object, higher: bool | None = True, form: str = ".2f") -> Table:
    rows = [(str(index), value) for index, value in enumerate(values)]
    return Table("t", [Column("name"), Column("value", higher, form)], rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "best"),
    [
        (single(1, 3, 2), {1}),
        (single(1, 3, 2, higher=False), {0}),
        (single(1, 3, 2, higher=None), set()),
        (single((1, 9.0), (2, 0.1)), set()),  # the difference is within the noise
        (single((1, 0.2), (2, 0.1)), {1}),
        (single((97.9, 0.3, 3), (97.8, 0.3, 3)), set()),
        (single((97.9, 0.3, 3), (97.8, 0.3, 3), (90.0, 0.3, 3)), {0, 1}),
        (single((97.9, 0.3, 3), (96.0, 0.3, 3), higher=False), {1}),
        (single((97.9, 0.3, 2), (97.0, 0.3, 2)), set()),  # two seeds say little: t has two degrees of freedom
        (single((97.9, 0.3, 20), (97.5, 0.3, 20)), {0}),
        (single((2.0, math.nan, 1), (1.0, math.nan, 1)), set()),  # one seed: the noise is not known
        (single(1.001, 1.002, 0.5), {0, 1}),
        (single(1, 1), set()),
        (single(1), set()),
        (single(1, math.nan, None, 2, math.inf), {3}),
        (single("words", 1.0), set()),
    ],
)
def test_best_cells_finds_the_best_values(table: Table, best: set[int]) -> None:
    assert {row for row, _ in best_cells(table)} == best


@pytest.mark.parametrize(
    ("column", "cell", "shown"),
    [
        (Column("a", format=".2%"), 0.97314, "97.31%"),
        (Column("a", format=".2%"), (0.97314, 0.0021), "97.31 ± 0.21%"),
        (Column("a", format=".1f", unit="°"), (48.7, 0.61), "48.7 ± 0.6°"),
        (Column("a", format=".1f"), (48.7, math.nan), "48.7"),
        (Column("a", format=".1f"), np.float32(2), "2.0"),
        (Column("a"), 5, "5"),
        (Column("a", format=".1f"), None, "–"),
        (Column("a", format=".1f"), math.nan, "–"),
        (Column("a", format=".1f"), "words", "words"),
    ],
)
def test_column_show_formats_cells(column: Column, cell: object, shown: str) -> None:
    assert column.show(cell) == shown  # type: ignore[arg-type]


def test_table_html_marks_the_best_and_explains_the_marks(table: Table) -> None:
    html = table_html(table)
    assert html.count("(best)") == 1
    assert html.count("(among the best)") == 2  # 97.94 ± 0.10 and 97.81 ± 0.10
    assert "97.94 ± 0.10%<span class='unseen'> (among the best)" in html
    assert "values within its noise" in html
    assert "higher is better" in html
    assert "standard deviation" in html
    assert "Three seeds." in html
    assert "<th scope='row'>softmax</th>" in html


def test_table_rejects_invalid_input() -> None:
    with pytest.raises(ValueError, match=r"length of rows\[0\] must be 2, one cell per column, not 1"):
        Table("t", [Column("a"), Column("b")], [("x",)])
    with pytest.raises(ValueError, match=r"rows\[0\] under 'a' must be a string, .* not \(1, 2, 3, 4\)"):
        Table("t", [Column("a")], [((1, 2, 3, 4),)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"format of column 'a' must be .*, not '\.2z'"):
        Column("a", format=".2z")


def test_print_table_to_a_file_uses_plain_characters(table: Table) -> None:
    out = io.StringIO()
    print_table(table, Console(file=out, width=20))
    text = out.getvalue()
    assert "\x1b" not in text
    assert not set(text) & set("─│┃━┏╭")
    assert "97.94 ± 0.10% *" in text
    assert "A-Softmax + energy" in text  # not wrapped to twenty columns
    assert "…" not in text


def test_print_table_to_a_terminal_does_not_interpret_markup(table: Table) -> None:
    out = io.StringIO()
    hostile = Table("[red]title[/]", table.columns, [("[bold]x", *table.rows[0][1:])])
    print_table(hostile, Console(file=out, force_terminal=True, width=120))
    assert "[bold]x" in out.getvalue()
    assert "[red]title[/]" in out.getvalue()


def test_print_table_on_a_narrow_terminal_truncates_nothing(table: Table) -> None:
    for width in (40, 60, 80, 100, 200):
        out = io.StringIO()
        print_table(table, Console(file=out, force_terminal=True, width=width, no_color=True))
        text = out.getvalue()
        assert "…" not in text
        assert all(words in text for words in ("97.94 ± 0.10% *", "A-Softmax + energy", "1.170 *"))


def test_print_table_without_rows(table: Table) -> None:
    out = io.StringIO()
    print_table(Table("Summary", table.columns, []), Console(file=out))
    assert "Objective" in out.getvalue()


def test_print_table_to_an_ascii_stream(table: Table) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    print_table(Table("± title", table.columns, table.rows, caption="2–3 seeds, mean ± s.d."), Console(file=out))
    out.flush()
    for words in (b"97.94 +/- 0.10% *", b"+/- title", b"2-3 seeds, mean +/- s.d."):
        assert words in raw.getvalue()


def test_column_shows_no_sign_for_zero() -> None:
    signed = Column("x", format="+.2%")
    assert [signed.show(value) for value in (-0.00001, 0.00001, -0.001)] == ["0.00%", "0.00%", "-0.10%"]
    assert Column("x", format=".1f").show((-0.01, 0.02)) == "0.0 ± 0.0"


def test_table_html_cells_repeat_the_heading_with_its_arrow() -> None:
    assert "data-column='value ↓'" in table_html(single(1, 2, higher=False))


def test_print_table_wraps_text_columns_first() -> None:
    columns = [Column("measure"), Column("value", format=".2f"), Column("of")]
    rows = [["accuracy", 0.5, "all of the three thousand pairs in ten folds"], ["hardness", 0.25, ""]]
    file = io.StringIO()
    print_table(Table("", columns, rows), Console(file=file, width=40, force_terminal=True, no_color=True))
    lines = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue()).splitlines()
    assert max(map(len, lines)) <= 40
    assert any("accuracy" in line and "0.50" in line and "all of the" in line for line in lines)
    long = [["classification accuracy", "0.95"], ["angular visual hardness", "0.00104 ± 0.00002"]]
    file = io.StringIO()
    print_table(
        Table("", [Column("measure"), Column("value")], long), Console(file=file, width=38, force_terminal=True)
    )
    assert "classification accuracy" in file.getvalue()  # the one long number is wrapped, not both names
    file = io.StringIO()
    print_table(Table("", columns, rows), Console(file=file, width=22, force_terminal=True, no_color=True))
    assert [line.split()[0] for line in file.getvalue().splitlines() if line.strip()].count("of") == 1  # not of ""


def test_best_cells_agree_with_welch_test_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(0)
    for _ in range(200):
        first, second = (random.normal(place, random.uniform(0.1, 2), random.integers(2, 12)) for place in (0.0, 1.0))
        cells = [(float(one.mean()), float(one.std(ddof=1)), len(one)) for one in (first, second)]
        probability = stats.ttest_ind(first, second, equal_var=False).pvalue
        if not 0.03 < probability < 0.06:  # quantiles are rounded
            marked = best_cells(single(*cells, form=".9f"))
            assert bool(marked) == (probability < 0.05)


@pytest.mark.parametrize("terminal", [False, True])
def test_print_table_writes_out_control_characters(terminal: bool) -> None:
    hostile = "run\x1b]0;title\x07\x1b[2J\x9b31m\r\u202e"
    file = io.StringIO()
    table = Table(hostile, [Column(hostile), Column("value")], [(hostile, 1.0)], hostile)
    print_table(table, Console(file=file, force_terminal=terminal, width=150, no_color=True, color_system=None))
    text = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())  # styles of rich
    assert not any((ord(letter) < 32 and letter != "\n") or letter in "\x7f\x9b\u202e" for letter in text)
    assert "run\\x1b]0;title\\x07" in text


def test_markdown_and_html_write_out_control_characters() -> None:
    hostile = "run\x1b[2J\n| x |\u202e"
    table = Table("", [Column(hostile), Column("value")], [(hostile, 1.0)], hostile)
    for text in (markdown(table), table_html(table)):
        assert "run\\x1b[2J\\n" in text
        assert "\\u202e" in text
        assert not set(text) & set("\x1b\u202e")
    assert len(markdown(table).splitlines()) == 5  # the name neither ends a row nor a cell
    assert "\\| x \\|" in markdown(table)


def test_table_html_breaks_row_names_that_are_sentences() -> None:
    claim = "The first method has a lower error than the second one."
    page = table_html(Table("t", [Column("claim"), Column("verdict")], [("short", "yes"), (claim, "no")]))
    assert "<th scope='row'>short</th>" in page
    assert f"<th scope='row' class=sentence>{claim}</th>" in page
