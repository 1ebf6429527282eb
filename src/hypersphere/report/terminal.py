"""Print tables in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hypersphere.report._text import printable
from hypersphere.report.tables import Table, best_cells

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid

PLAIN_SIGNS = str.maketrans({"±": "+/-", "↑": "(high)", "↓": "(low)", "–": "-", "°": " deg", "−": "-", "×": "x"})
STAR = " *"


def print_table(table: Table, console: Console | None = None) -> None:
    """Print the table; a star marks the best value of each column.

    On a terminal there are rules and bold text, and one line per value if the terminal is too narrow. A file or a pipe
    gets a plain ASCII grid of any width.
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
    starred = {at for _, at in best}
    numeric = {at for at in range(len(table.columns)) if table.is_numeric(at)}
    headings = [text(column.heading) for column in table.columns]
    rows = []
    for index, row in enumerate(table.shown()):
        marks = [STAR if (index, at) in best else " " * len(STAR) if at in starred else "" for at in range(len(row))]
        cells = [cell + mark for cell, mark in zip(row, marks, strict=True)]
        styles = ["bold green" if mark == STAR else "" for mark in marks]
        rows.append(
            [text(cell, style, at in numeric) for at, (cell, style) in enumerate(zip(cells, styles, strict=True))]
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


def _empty_grid(is_ruled: bool) -> Grid:
    from rich import box
    from rich.table import Table as Grid

    return Grid(box=box.SIMPLE_HEAD if is_ruled else box.ASCII, collapse_padding=is_ruled, pad_edge=not is_ruled)


def _wide_grid(headings: list, rows: list[list], widths: list[int], numeric: set[int], is_ruled: bool) -> Grid:
    """Return one line per row."""
    from rich.align import Align

    grid = _empty_grid(is_ruled)
    for at, heading in enumerate(headings):
        side: Literal["left", "right"] = "right" if at in numeric else "left"
        heading.justify = side
        grid.add_column(Align(heading, side, vertical="bottom"), justify=side, width=widths[at])
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
    wide = console.options.update(width=10_000)
    lines = console.render_lines(grid, wide.update(width=grid.__rich_measure__(console, wide).maximum), pad=False)
    for line in lines:
        console.out("".join(segment.text for segment in line).rstrip(), highlight=False)
