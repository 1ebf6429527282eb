"""Images listed in a CSV, TSV, JSONL or Parquet file with one path and one label per row."""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from hypersphere._validation import require, require_package
from hypersphere.data._files import DamagedData, MissingData
from hypersphere.data.images import Size
from hypersphere.data.sources import FileSource, Names

LIST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")


class ListSource(FileSource):
    """Images whose paths and labels are listed in a file.

    Labels may be text or integers. Classes are ordered as numbers if all of them are, else alphabetically.

    Args:
        file: a .csv or .tsv file with a header, a .jsonl file of objects, or a .parquet file.
        images: folder to which relative paths refer; by default that of the list.
        path_column: column of the paths.
        label_column: column of the labels.
        where: (column, values), to read only rows with one of these values in the column.
        classes: names of the classes in their order, if they are known. Labels are then names or positions.
        size, grey, fit: see ImageSource.
    """

    def __init__(
        self,
        file: str | Path,
        *,
        images: str | Path | None = None,
        path_column: str = "path",
        label_column: str = "label",
        where: tuple[str, Sequence[str]] | None = None,
        classes: Sequence[str] | None = None,
        size: Size = None,
        grey: bool | None = None,
        fit: str = "stretch",
    ) -> None:
        list_file = Path(file).expanduser()
        columns = [path_column, label_column, *([where[0]] if where is not None else [])]
        codes = LabelCodes()

        def scan() -> Iterator[str]:
            for number, (path, label, *filtered) in read_rows(list_file, columns):
                if where is None or filtered[0] in where[1]:
                    _require_filled(list_file, number, path_column, path)
                    _require_filled(list_file, number, label_column, label)
                    codes.append(label)
                    yield path

        names = Names(scan())
        if not len(names):
            condition = "" if where is None else f" with {where[0]} {' or '.join(where[1])}"
            raise MissingData(f"{list_file} lists no images{condition}")
        folder = list_file.parent if images is None else Path(images).expanduser()
        labels, classes = codes.labels(classes)
        super().__init__(folder, names, labels, classes, size=size, grey=grey, fit=fit)


class LabelCodes:
    """Collects labels given as text and numbers the classes.

    >>> codes = LabelCodes()
    >>> for text in ("10", "9", "10"):
    ...     codes.append(text)
    >>> codes.labels()
    (tensor([1, 0, 1]), ['9', '10'])
    """

    def __init__(self) -> None:
        self._code_of: dict[str, int] = {}  # in the order in which the classes appear
        self._codes = array("q")

    def append(self, text: str) -> None:
        """Add the label of the next sample."""
        self._codes.append(self._code_of.setdefault(text, len(self._code_of)))

    def labels(
        self, classes: Sequence[str] | None = None, *, prefer_positions: bool = False
    ) -> tuple[Int64[Tensor, " items"], list[str]]:
        """Return the labels and the classes.

        Args:
            classes: the classes in their order, if known. Labels are then their names or, as integers, positions.
            prefer_positions: if the classes are integers too, read labels as positions where all of them can be.
        """
        names = sort_classes(self._code_of) if classes is None else list(classes)
        position = {name: label for label, name in enumerate(names)}
        if classes is not None and prefer_positions and all(_position(text) < len(names) for text in self._code_of):
            position = {}
        label_of_code = []
        for text in self._code_of:
            label = int(position.get(text, min(_position(text), len(names))))
            if label >= len(names):
                raise DamagedData(f"labels must be names or positions of the {len(names)} classes, not {text!r}")
            label_of_code.append(label)
        # NumPy copies the buffer at once; torch would copy it number by number.
        codes = torch.from_numpy(np.array(self._codes, dtype=np.int64))
        return torch.tensor(label_of_code, dtype=torch.int64)[codes], names


def _position(text: str) -> float:
    """Return a text as an integer >= 0, or ∞ if it is not one."""
    return int(text) if text.isdecimal() and len(text) < 19 else math.inf


def sort_classes(names: Iterable[str]) -> list[str]:
    """Return the names sorted as numbers if all of them are integers, else alphabetically."""
    ordered = sorted(names)
    are_numbers = all(name.isdecimal() and len(name) < 19 for name in ordered)
    return sorted(ordered, key=int) if are_numbers else ordered


def read_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each row, counted from 1, and the values of these columns as text.

    Raises:
        MissingData: if the file does not exist.
        DamagedData: if a row cannot be read or lacks a column; the message states its number.
    """
    if not file.is_file():
        raise MissingData(f"{file} not found. Give a list of images in {', '.join(LIST_SUFFIXES)}.")
    suffix = file.suffix.lower()
    require(suffix in LIST_SUFFIXES, "path", f"a file ending in {', '.join(LIST_SUFFIXES)}", str(file))
    rows = _parquet_rows(file, columns) if suffix == ".parquet" else _text_rows(file, suffix)
    number = 0
    try:
        for number, row in rows:
            values = [row.get(column) for column in columns]
            for column, value in zip(columns, values, strict=True):
                if not isinstance(value, (str, int)):
                    present = ", ".join(map(str, row))
                    raise DamagedData(f"{file} row {number} must have text or an integer in {column}; it has {present}")
            yield number, [str(value) for value in values]
    except DamagedData:
        raise
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        raise DamagedData(f"{file} is not readable after row {number}: {error}") from error


def _require_filled(file: Path, number: int, column: str, value: str) -> None:
    if not value.strip() or "\0" in value:
        raise DamagedData(f"{file} row {number} must have text without null characters in {column}, not {value!r}")


def _text_rows(file: Path, suffix: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and fields of each row of a CSV, TSV or JSONL file."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        if suffix != ".jsonl":
            yield from enumerate(csv.DictReader(lines, delimiter="\t" if suffix == ".tsv" else ","), start=1)
            return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DamagedData(f"{file} row {number} must be a JSON object, not {line[:80]!r}")
                yield number, row


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and fields of each row of a Parquet file, read in batches."""
    parquet = require_package("pyarrow.parquet", "PyArrow", "data")
    table = parquet.ParquetFile(file)
    present = table.schema_arrow.names
    for column in columns:
        if column not in present:
            raise DamagedData(f"{file} must have the column {column}, not only {', '.join(present)}")
    number = 0
    for batch in table.iter_batches(columns=list(dict.fromkeys(columns))):
        for row in batch.to_pylist():
            number += 1
            yield number, row
