"""Print tables in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hypersphere.report.tables import Column, Table, best_cells

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid

STAR = " *"
PLAIN_SIGNS = str.maketrans({"±": "+/-", "↑": "(high)", "↓": "(low)", "–": "-", "°": " deg", "−": "-", "×": "x"})


def printable(words: str) -> str:
    r"""Return text with control characters written out, so that a name cannot send commands to the terminal.

    >>> printable("run\x1b[31m"), printable("naïve – 1")
    ('run\\x1b[31m', 'naïve – 1')
    """
    return "".join(
        letter
        if letter.isprintable() or (letter.isspace() and letter not in "\r\n\v\f\x1c\x1d\x1e\x1f\x85")
        else ascii(letter)[1:-1]
        for letter in words
    )


def print_table(table: Table, console: Console | None = None) -> None:
    """Print the table; a star marks the best value of each column.

    On a terminal there are rules and bold text, and one line per value if the terminal is too narrow. A file or a pipe
    gets a plain ASCII grid of any width.
    """
    from rich.console import Console

    console = console or Console()
    shown = [[_writable(cell, console) for cell in row] for row in _shown_cells(table)]
    headings = [_heading(column, console) for column in table.columns]
    unwrapped = _widths([[heading] for heading in headings], shown)
    split = [heading.split() for heading in headings]  # a heading may take one line per word
    folded = _widths(split, shown)
    room = console.width - (2 if _is_ruled(console) else 3) * len(headings) - 1
    _print_words(table.title, "bold", console)
    if not console.is_terminal:
        _print_unfolded(_wide_grid(table, shown, unwrapped, console), console)
    elif sum(folded) <= room:
        console.print(_wide_grid(table, shown, unwrapped if sum(unwrapped) <= room else folded, console))
    elif wrapped := _wrapped(table, split, shown, room):
        console.print(_wide_grid(table, shown, wrapped, console))
    else:
        console.print(_long_grid(table, shown, console))
    _print_words(f"{'* best value of its column. ' if best_cells(table) else ''}{table.caption}", "dim", console)


def _widths(headings: list[list[str]], shown: list[list[str]]) -> list[int]:
    """Return the width of each column: the longest part of its heading and its cells."""
    from rich.cells import cell_len

    columns = zip(headings, *shown, strict=True)
    return [max(map(cell_len, [*heading, *cells]), default=0) for heading, *cells in columns]


def _wrapped(table: Table, headings: list[list[str]], shown: list[list[str]], room: int) -> list[int]:
    """Return widths that fit by wrapping columns of text as little as possible; empty if a word would be split."""
    from rich.cells import cell_len

    fitting = _widths(headings, shown)
    words = _widths(headings, [[max(cell.split(), key=len, default="") for cell in row] for row in shown])
    least = [fitting[at] if table.is_numeric(at) else words[at] for at in range(len(words))]
    while sum(fitting) > room:
        able = [at for at, width in enumerate(fitting) if width > least[at]]
        if not able:
            return []
        broken = {at: sum(cell_len(row[at]) >= fitting[at] for row in shown) for at in able}
        fitting[min(able, key=lambda at: (broken[at], -fitting[at]))] -= 1
    return fitting


def _shown_cells(table: Table) -> list[list[str]]:
    """Return the cells as text, padded for a star in the columns that have one."""
    best = best_cells(table)
    starred = {at for _, at in best}
    return [
        [
            column.show(row[at]) + (STAR if (index, at) in best else " " * len(STAR) if at in starred else "")
            for at, column in enumerate(table.columns)
        ]
        for index, row in enumerate(table.rows)
    ]


def _empty_grid(console: Console) -> Grid:
    from rich import box
    from rich.table import Table as Grid

    ruled = _is_ruled(console)
    return Grid(box=box.SIMPLE_HEAD if ruled else box.ASCII, collapse_padding=ruled, pad_edge=not ruled)


def _wide_grid(table: Table, shown: list[list[str]], widths: list[int], console: Console) -> Grid:
    from rich.align import Align
    from rich.text import Text as Words

    grid = _empty_grid(console)
    for at, column in enumerate(table.columns):
        side: Literal["left", "right"] = "right" if table.is_numeric(at) else "left"
        heading = Align(Words(_heading(column, console), justify=side), side, vertical="bottom")
        grid.add_column(heading, justify=side, width=widths[at])
    for row in shown:
        grid.add_row(*(Words(cell, style=_style(cell)) for cell in row))
    return grid


def _long_grid(table: Table, shown: list[list[str]], console: Console) -> Grid:
    from rich.text import Text as Words

    grid = _empty_grid(console)
    grid.show_header = False
    for justify in ("left", "right"):
        grid.add_column(justify=justify)
    for name, *cells in shown:
        grid.add_row(Words(name, style="bold"), "")
        for column, cell in zip(table.columns[1:], cells, strict=True):
            if cell.strip():
                grid.add_row(Words(f"  {_heading(column, console)}"), Words(cell, style=_style(cell)))
        grid.add_section()
    return grid


def _print_unfolded(grid: Grid, console: Console) -> None:
    wide = console.options.update(width=10_000)
    lines = console.render_lines(grid, wide.update(width=grid.__rich_measure__(console, wide).maximum), pad=False)
    for line in lines:
        console.out("".join(segment.text for segment in line).rstrip(), highlight=False)


def _print_words(words: str, style: str, console: Console) -> None:
    """Print a title or a caption in the width of the terminal."""
    from rich.text import Text as Words

    if words.strip():
        console.print(Words(_writable(words.strip(), console), style=style), soft_wrap=not console.is_terminal)


def _heading(column: Column, console: Console) -> str:
    return _writable(column.heading, console)


def _writable(words: str, console: Console) -> str:
    words = "\n".join(map(printable, words.split("\n")))
    return words if _has_unicode(console) else words.translate(PLAIN_SIGNS)


def _is_ruled(console: Console) -> bool:
    """Return True if the table has rules instead of an ASCII grid."""
    return console.is_terminal and _has_unicode(console)


def _has_unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _style(cell: str) -> str:
    return "bold green" if cell.endswith(STAR) else ""
