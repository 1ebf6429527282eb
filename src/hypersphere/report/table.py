"""Tables of results in which the best value of each column is marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from numbers import Real
from typing import TypeAlias

from hypersphere._validation import require
from hypersphere.report.text import unbroken

Cell: TypeAlias = "str | float | tuple[float, float] | None"  # text, a number, (mean, standard deviation), or nothing

MISSING = "–"
MOST_WIDE = 7  # up to this number of columns there is extra space between them
ARROWS = {True: "↑", False: "↓"}
DIRECTIONS = {True: "higher is better", False: "lower is better"}


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
        accepted = "a format specification for numbers such as '.2f'"
        require(_formats_numbers(self.format), f"format of column {self.name!r}", accepted, self.format)

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
        value, spread = _number(cell)
        if math.isnan(value):
            return MISSING
        shown = self._digits(value)
        if not math.isnan(spread):
            shown += f" ± {self._digits(spread).removeprefix('+')}"
        return shown + ("%" if self.format.endswith("%") else "") + self.unit

    def _digits(self, value: float) -> str:
        digits = format(value, self.format).removesuffix("%")
        return (
            digits.lstrip("+-") if digits.strip("+-0.") == "" else digits
        )  # no sign for a value that is displayed as 0


@dataclass(frozen=True)
class Table:
    """Rows of cells; the first cell of a row is its name."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            count = len(self.columns)
            require(len(row) == count, f"length of rows[{index}]", f"{count}, one cell per column", len(row))
            for column, cell in zip(self.columns, row, strict=True):
                accepted = "a string, a number, a (mean, sd) pair or None"
                require(_is_cell(cell), f"rows[{index}] under {column.name!r}", accepted, cell)


def best_cells(table: Table) -> frozenset[tuple[int, int]]:
    """Return (row, column) of the best value of each column; values that are displayed alike share the mark.

    A column in which all values are displayed alike, or with fewer than two numbers, has no best value.
    """
    best: set[tuple[int, int]] = set()
    for position, column in enumerate(table.columns):
        values = {index: _number(row[position])[0] for index, row in enumerate(table.rows)}
        numbers = {index: value for index, value in values.items() if math.isfinite(value)}
        if column.higher_is_better is None or len(numbers) < 2:
            continue
        top = column.show(max(numbers.values()) if column.higher_is_better else min(numbers.values()))
        winners = {index for index, value in numbers.items() if column.show(value) == top}
        if len(winners) < len(numbers):
            best.update((index, position) for index in winners)
    return frozenset(best)


def markdown(table: Table) -> str:
    """Return the table as Markdown, with the best value of each column in bold and the caption below.

    >>> print(markdown(Table("", [Column("method"), Column("score", True, ".1f")], [["a", 1.0], ["b", (2.0, 0.1)]])))
    | method | score ↑ |
    |---|---|
    | a | 1.0 |
    | b | **2.0 ± 0.1** |
    """
    best = best_cells(table)
    heads = [column.heading for column in table.columns]
    lines = [
        heads,
        *([_markdown_cell(table, row, at, best) for at in range(len(heads))] for row in range(len(table.rows))),
    ]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    text.insert(1, "|" + "---|" * len(heads))
    return "\n".join([*text, "", table.caption] if table.caption else text)


def _markdown_cell(table: Table, row: int, at: int, best: frozenset[tuple[int, int]]) -> str:
    shown = table.columns[at].show(table.rows[row][at]).replace("|", "\\|")
    return f"**{shown}**" if (row, at) in best else shown


def table_html(section: Table) -> str:
    """Return the table as HTML, with a note that explains its marks.

    On a narrow screen each row becomes a card (page.css), unless it has only two cells.
    """
    best = best_cells(section)
    head = "".join(_head_html(column, is_numeric(section, at)) for at, column in enumerate(section.columns))
    body = "".join(
        "<tr>"
        + "".join(_cell_html(section, row, at, (row, at) in best) for at in range(len(section.columns)))
        + "</tr>"
        for row in range(len(section.rows))
    )
    paragraphs = [escape(section.caption), " · ".join(_notes_html(section, bool(best)))]
    notes = "".join(f"<p class='note'>{paragraph}</p>" for paragraph in paragraphs if paragraph)
    kind = " dense" if len(section.columns) > MOST_WIDE else " pairs" if len(section.columns) == 2 else ""
    return f"<div class='table{kind}'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{notes}"


def _is_cell(cell: object) -> bool:
    if isinstance(cell, tuple):
        return len(cell) == 2 and all(isinstance(part, Real) for part in cell)
    return cell is None or isinstance(cell, (str, Real))


def _formats_numbers(specification: str) -> bool:
    try:
        format(0.0, specification)
    except ValueError:
        return False
    return True


def _number(cell: Cell) -> tuple[float, float]:
    """Return (value, spread), NaN where a number is missing."""
    if isinstance(cell, tuple):
        return _float(cell[0]), _float(cell[1])
    if cell is None or isinstance(cell, str):
        return math.nan, math.nan
    return _float(cell), math.nan


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer above the largest float
        return math.inf if number > 0 else -math.inf


def is_numeric(table: Table, at: int) -> bool:
    """Return True if a column contains a number."""
    return any(row[at] is not None and not isinstance(row[at], str) for row in table.rows)


def _head_html(column: Column, numeric: bool) -> str:
    name, arrow = unbroken(column.name), ""
    if column.higher_is_better is not None:
        direction = DIRECTIONS[column.higher_is_better]
        *first, last = column.name.split(" ")
        name = unbroken("".join(f"{word} " for word in first))  # keep the arrow on the line of the last word
        arrow = (
            f"<span class='whole'>{escape(last)} <span class='direction' title='{direction}' role='img' "
            f"aria-label='{direction}'>{ARROWS[column.higher_is_better]}</span></span>"
        )
    return f"<th scope='col'{' class=number' if numeric else ''}>{name}{arrow}</th>"


def _cell_html(table: Table, row: int, at: int, best: bool) -> str:
    column = table.columns[at]
    shown = escape(column.show(table.rows[row][at]))
    if at == 0:
        return f"<th scope='row'>{shown}</th>"
    if best:
        shown = f"<span class='best'>{shown}<span class='unseen'> (best)</span></span>"
    kind = " class=number" if is_numeric(table, at) else ""
    return f"<td{kind} data-column='{escape(column.heading)}'>{shown}</td>"


def _notes_html(table: Table, any_best: bool) -> list[str]:
    notes = []
    if any_best:
        notes.append("<span class='best'>Marked</span>: best value of its column")
    notes += [
        f"{ARROWS[way]} {DIRECTIONS[way]}"
        for way in (True, False)
        if any(column.higher_is_better is way for column in table.columns)
    ]
    if any(isinstance(cell, tuple) for row in table.rows for cell in row):
        notes.append("mean ± standard deviation over seeds")
    return notes
