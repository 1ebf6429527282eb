"""Tables of results as Markdown, as HTML and in the terminal.

A mark shows the best value of a column if it differs by more than the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from hypersphere._validation import printable, require
from hypersphere.evaluation import student_quantile
from hypersphere.report._html import Displayable, escape, unbroken

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid

__all__ = ["Column", "Table", "best_cells", "markdown", "print_table"]

# Text, a number, None, (mean, standard deviation), or (mean, standard deviation, number of seeds).
Cell: TypeAlias = "str | float | tuple[float, float] | tuple[float, float, int] | None"

MISSING = "–"
PLAIN_SIGNS = str.maketrans({"±": "+/-", "↑": "(high)", "↓": "(low)", "–": "-", "°": " deg", "−": "-", "×": "x"})
STAR = " *"
MOST_WIDE = 7  # a table with more columns has less space between them
LONGEST_NAME = 40  # characters of a row name that is not broken into lines; longer ones are sentences
ARROWS = {True: "↑", False: "↓"}
DIRECTIONS = {True: "higher is better", False: "lower is better"}
MOST_DEGREES = 60  # degrees of freedom beyond which the quantile of Student's t is nearly constant


@dataclass(frozen=True)
class Column:
    """One column: name, which direction is better (None: neither), format and unit of the numbers.

    `format` is a Python format specification such as `".2f"` or `".2%"`.
    """

    name: str
    higher_is_better: bool | None = None
    format: str = "g"
    unit: str = ""

    def __post_init__(self) -> None:
        try:
            format(1.0, self.format)
        except ValueError:
            accepted = "a format specification for numbers such as '.2f'"
            require(False, f"format of column {self.name!r}", accepted, self.format)

    @property
    def heading(self) -> str:
        """The name, with an arrow that shows which direction is better."""
        return self.name + ("" if self.higher_is_better is None else f" {ARROWS[self.higher_is_better]}")

    def show(self, cell: Cell) -> str:
        """Format a cell as text.

        >>> Column("accuracy", format=".1%").show((0.973, 0.002))
        '97.3 ± 0.2%'
        """
        if isinstance(cell, str):
            return cell
        value, spread, _ = _numbers(cell)
        if math.isnan(value):
            return MISSING
        shown = self._digits(value)
        if not math.isnan(spread):
            shown += f" ± {self._digits(spread).removeprefix('+')}"
        return shown + ("%" if self.format.endswith("%") else "") + self.unit

    def _digits(self, value: float) -> str:
        digits = format(value, self.format).removesuffix("%")
        return digits.lstrip("+-") if digits.strip("+-0.") == "" else digits  # a value displayed as 0 has no sign


@dataclass(frozen=True, repr=False)
class Table(Displayable):
    """Rows of cells, one per column.

    A cell is text, a number, None, (mean, standard deviation), or (mean, standard deviation, number of seeds). A
    standard deviation of NaN means that the noise is unknown, for example with one seed.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    def __post_init__(self) -> None:
        accepted = "a string, a number, (mean, sd), (mean, sd, seeds) or None"
        for index, row in enumerate(self.rows):
            count = len(self.columns)
            require(len(row) == count, f"length of rows[{index}]", f"{count}, one cell per column", len(row))
            for column, cell in zip(self.columns, row, strict=True):
                parts = cell if isinstance(cell, tuple) and len(cell) in (2, 3) else (cell,)
                is_number = all(part is None or isinstance(part, Real) for part in parts)
                require(is_number or isinstance(cell, str), f"rows[{index}] under {column.name!r}", accepted, cell)

    def is_numeric(self, at: int) -> bool:
        """Return True if the column with index `at` contains a number."""
        return any(row[at] is not None and not isinstance(row[at], str) for row in self.rows)

    def shown(self) -> list[list[str]]:
        """Return all cells as text."""
        return [[column.show(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows]


def best_cells(table: Table) -> frozenset[tuple[int, int]]:
    """Return (row, column) of the best values, including those that differ from the best by no more than the noise.

    The noise is the half-width of the 95 % interval of the difference of two means over seeds (Welch's t). Numbers
    without a deviation are exact; they tie if they are displayed alike. Nothing is marked in a column if the noise is
    unknown or if all its values tie.

    >>> columns = [Column("method"), Column("error", False, ".1f")]
    >>> best_cells(Table("", columns, [["a", (5.0, 0.3, 3)], ["b", (5.1, 0.3, 3)], ["c", (9.0, 0.3, 3)]]))
    frozenset({(0, 1), (1, 1)})
    """
    best: set[tuple[int, int]] = set()
    for position, column in enumerate(table.columns):
        numbers = {index: _numbers(row[position]) for index, row in enumerate(table.rows)}
        finite = {index: number for index, number in numbers.items() if math.isfinite(number[0])}
        noise_is_unknown = any(
            isinstance(table.rows[index][position], tuple) and math.isnan(finite[index][1]) for index in finite
        )
        if column.higher_is_better is None or len(finite) < 2 or noise_is_unknown:
            continue
        sign = 1 if column.higher_is_better else -1
        top = max(finite.values(), key=lambda number: sign * number[0])
        winners = {
            index
            for index, number in finite.items()
            if column.show(number[0]) == column.show(top[0]) or abs(top[0] - number[0]) <= _noise(top, number)
        }
        if len(winners) < len(finite):
            best.update((index, position) for index in winners)
    return frozenset(best)


def markdown(table: Table) -> str:
    """Return the table as Markdown, with the best values in bold; the caption and the meaning of bold follow.

    >>> print(markdown(Table("", [Column("method"), Column("score", True, ".1f")], [["a", 1.0], ["b", (2.0, 0.1)]])))
    | method | score ↑ |
    |---|---|
    | a | 1.0 |
    | b | **2.0 ± 0.1** |
    <BLANKLINE>
    Bold: best value of its column, and values within its noise (95 %).
    """
    best, lines = best_cells(table), [[column.heading for column in table.columns]]
    for index, row in enumerate(table.shown()):
        lines.append([f"**{words}**" if (index, position) in best else words for position, words in enumerate(row)])
    text = ["| " + " | ".join(printable(words).replace("|", "\\|") for words in line) + " |" for line in lines]
    text.insert(1, "|" + "---|" * len(table.columns))
    bold = "Bold: best value of its column, and values within its noise (95 %)." if best else ""
    notes = " ".join(filter(None, (printable(table.caption), bold)))
    return "\n".join([*text, "", notes] if notes else text)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print the table; a star marks the best values of each column.

    A terminal gets rules and bold text, or one line per value if it is too narrow. A file or a pipe gets a plain ASCII
    grid of any width.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    console = console or Console()
    has_unicode = console.encoding.lower().startswith("utf")

    def text(words: str, style: str = "", is_number: bool = False) -> Text:
        words = "\n".join(map(printable, words.split("\n")))
        return Text(words if has_unicode else words.translate(PLAIN_SIGNS), style=style, no_wrap=is_number)

    best = best_cells(table)
    starred = {position for _, position in best}
    numeric = {position for position in range(len(table.columns)) if table.is_numeric(position)}
    headings = [text(column.heading) for column in table.columns]
    rows = []
    for index, row in enumerate(table.shown()):
        marks = [
            STAR if (index, position) in best else " " * len(STAR) if position in starred else ""
            for position in range(len(row))
        ]
        cells = [cell + mark for cell, mark in zip(row, marks, strict=True)]
        styles = ["bold green" if mark == STAR else "" for mark in marks]
        rows.append(
            [
                text(cell, style, position in numeric)
                for position, (cell, style) in enumerate(zip(cells, styles, strict=True))
            ]
        )
    longest, needed = [], []
    for column in zip(headings, *rows, strict=True):
        longest.append(max(cell_len(cell.plain) for cell in column))
        parts = [part for cell in column for part in ([cell.plain] if cell.no_wrap else cell.plain.split())]
        needed.append(max(map(cell_len, parts), default=0))
    is_ruled = console.is_terminal and has_unicode
    room = console.width - sum(needed) - (2 if is_ruled else 3) * len(headings) - 1
    if table.title:
        console.print(text(table.title, "bold"), soft_wrap=not console.is_terminal)
    if not console.is_terminal:
        _print_unfolded(_wide_grid(headings, rows, longest, numeric, is_ruled), console)
    elif room >= 0:
        widths = []
        for least, most in zip(needed, longest, strict=True):  # columns on the left are widened first
            widths.append(min(most, least + room))
            room -= widths[-1] - least
        console.print(_wide_grid(headings, rows, widths, numeric, is_ruled))
    else:
        console.print(_long_grid(headings, rows, is_ruled))
    caption = f"{'* best value of its column. ' if best else ''}{table.caption}"
    if caption:
        console.print(text(caption, "dim"), soft_wrap=not console.is_terminal)


def table_html(table: Table) -> str:
    """Return the table as HTML, with a note that explains its marks.

    On a narrow screen each row becomes a card (page.css), unless it has only two cells.
    """
    best = best_cells(table)
    kinds = [" class=number" if table.is_numeric(position) else "" for position in range(len(table.columns))]
    shared = {position for _, position in best if sum(column == position for _, column in best) > 1}
    head = "".join(
        f"<th scope='col'{kind}>{_heading_html(column)}</th>" for kind, column in zip(kinds, table.columns, strict=True)
    )
    body = ""
    for index, row in enumerate(table.shown()):
        name, *cells = map(escape, row)
        sentence = " class=sentence" if len(row[0]) > LONGEST_NAME else ""
        body += f"<tr><th scope='row'{sentence}>{name}</th>"
        for position, cell in enumerate(cells, 1):
            if (index, position) in best:
                words = "among the best" if position in shared else "best"
                cell = f"<span class='best'>{cell}<span class='unseen'> ({words})</span></span>"
            body += f"<td{kinds[position]} data-column='{escape(table.columns[position].heading)}'>{cell}</td>"
        body += "</tr>"
    size = len(table.columns)
    kind = " pairs" if size <= 2 else " dense" if size > MOST_WIDE else ""
    notes = [escape(table.caption), " · ".join(_notes_html(table, bool(best)))]
    return (
        f"<div class='table{kind}'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        + "".join(f"<p class='note'>{note}</p>" for note in notes if note)
    )


def _heading_html(column: Column) -> str:
    if column.higher_is_better is None:
        return unbroken(column.name)
    direction = DIRECTIONS[column.higher_is_better]
    *first, last = column.name.split(" ")  # the arrow stays on the line of the last word
    return (
        f"{unbroken(''.join(f'{word} ' for word in first))}<span class='whole'>{escape(last)} <span class='direction' "
        f"title='{direction}' role='img' aria-label='{direction}'>{ARROWS[column.higher_is_better]}</span></span>"
    )


def _notes_html(table: Table, marked: bool) -> list[str]:
    """Return the explanations of marks, arrows and deviations that the table needs."""
    has_deviations = any(isinstance(cell, tuple) and not math.isnan(cell[1]) for row in table.rows for cell in row)
    within = ", and values within its noise (95 %)" if has_deviations else ""
    notes = [f"<span class='best'>Marked</span>: best value of its column{within}"] if marked else []
    directions = {column.higher_is_better for column in table.columns}
    notes += [f"{ARROWS[higher]} {DIRECTIONS[higher]}" for higher in (True, False) if higher in directions]
    return notes + ["mean ± standard deviation over seeds"] * has_deviations


def _empty_grid(is_ruled: bool) -> Grid:
    from rich import box
    from rich.table import Table as Grid

    return Grid(box=box.SIMPLE_HEAD if is_ruled else box.ASCII, collapse_padding=is_ruled, pad_edge=not is_ruled)


def _wide_grid(headings: list, rows: list[list], widths: list[int], numeric: set[int], is_ruled: bool) -> Grid:
    """Return one line per row."""
    from rich.align import Align

    grid = _empty_grid(is_ruled)
    for position, heading in enumerate(headings):
        side: Literal["left", "right"] = "right" if position in numeric else "left"
        heading.justify = side
        grid.add_column(Align(heading, side, vertical="bottom"), justify=side, width=widths[position])
    for row in rows:
        grid.add_row(*row)
    return grid


def _long_grid(headings: list, rows: list[list], is_ruled: bool) -> Grid:
    """Return one line per value, for a narrow terminal."""
    from rich.text import Text

    grid = _empty_grid(is_ruled)
    grid.show_header = False
    grid.add_column()
    grid.add_column(justify="right")
    for name, *cells in rows:
        grid.add_row(Text(name.plain, style="bold"), "")
        for heading, cell in zip(headings[1:], cells, strict=True):
            if cell.plain.strip():
                grid.add_row(Text("  ") + heading, cell)
        grid.add_section()
    return grid


def _print_unfolded(grid: Grid, console: Console) -> None:
    """Print a grid at its full width, without wrapping lines at the width of the console."""
    wide = console.options.update(width=10_000)
    lines = console.render_lines(grid, wide.update(width=grid.__rich_measure__(console, wide).maximum), pad=False)
    for line in lines:
        console.out("".join(segment.text for segment in line).rstrip(), highlight=False)


def _noise(first: tuple[float, float, float], second: tuple[float, float, float]) -> float:
    """Return the half-width of the 95 % interval of the difference of two means; 0 for exact numbers."""
    parts = [(spread**2 / count, count - 1) for _, spread, count in (first, second) if not math.isnan(spread)]
    variance = sum(part for part, _ in parts)
    if not variance:
        return 0.0
    # Welch–Satterthwaite. A deviation without a number of seeds counts as exact.
    weights = sum(part**2 / degrees for part, degrees in parts if degrees > 0)
    degrees = min(variance**2 / weights, MOST_DEGREES) if weights else MOST_DEGREES
    # `student_quantile` takes integers, so interpolate between the two nearest.
    lower = max(math.floor(degrees), 1)
    quantiles = student_quantile(0.975, lower), student_quantile(0.975, lower + 1)
    return float(np.interp(degrees, (lower, lower + 1), quantiles)) * math.sqrt(variance)


def _numbers(cell: Cell) -> tuple[float, float, float]:
    """Return value, standard deviation and number of seeds of a cell; NaN and one seed if they are missing."""
    parts = cell if isinstance(cell, tuple) else (math.nan if isinstance(cell, str) else cell,)
    value, spread, count = (math.nan if part is None else float(part) for part in (*parts, None, None)[:3])
    return value, spread, 1 if math.isnan(count) else count
