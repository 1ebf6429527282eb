"""Lists of trials as they are distributed: speaker verification (VoxCeleb), and templates of faces (IJB-B, IJB-C)."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from hypersphere._validation import require
from hypersphere.data._files import DamagedData, MissingData, data_root, is_count, read_text
from hypersphere.data.pairs import Pairs

__all__ = [
    "IJB",
    "TemplateSet",
    "Trials",
    "ijb",
    "read_template_list",
    "read_template_pairs",
    "read_template_set",
    "read_trials",
]

ID_DIGITS = 18  # an identifier is stored in 64 bits
GALLERIES = {"b": ("S1", "S2"), "c": ("G1", "G2")}  # names of the two galleries in the files of IJB-B and IJB-C


@dataclass(frozen=True, eq=False)
class Trials:
    """Pairs of named items.

    Attributes:
        names: the items.
        pairs: pairs of positions in the names.
    """

    names: tuple[str, ...]
    pairs: Pairs


@dataclass(frozen=True, eq=False)
class TemplateSet:
    """Templates of a gallery or of probes.

    Attributes:
        rows: int64, the row of each template in the result of `hypersphere.evaluation.templates`.
        subjects: int64, the person of each template.
    """

    rows: Int64[Tensor, " templates"]
    subjects: Int64[Tensor, " templates"]


@dataclass(frozen=True, eq=False)
class IJB:
    """Protocols of IJB-B or IJB-C.

    Attributes:
        names: file names of the face images.
        template_ids: the template of each image.
        media_ids: the photograph or video of each image.
        pairs: the 1:1 protocol: pairs of rows in the result of `hypersphere.evaluation.templates`.
        galleries: the two galleries of the 1:N protocol, which have no person in common.
        probes: the probes of the 1:N protocol. People of one gallery are unknown to the other.
    """

    names: tuple[str, ...]
    template_ids: Int64[Tensor, " images"]
    media_ids: Int64[Tensor, " images"]
    pairs: Pairs
    galleries: tuple[TemplateSet, TemplateSet]
    probes: TemplateSet


def read_trials(file: str | Path, names: Sequence[str] | None = None) -> Trials:
    """Read trials in the layout of VoxCeleb: lines of `0|1 enrolment test`, where 1 marks the same speaker.

    Empty lines are skipped. For lines of `name name 0|1`, see `read_pairs`.

    Args:
        file: the text file, for example veri_test2.txt.
        names: the items to which positions refer; by default those of the list, in the order of their appearance.

    Raises:
        MissingData: if the file does not exist.
        DamagedData: if a line is malformed or names an unknown item; the message states its number.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise MissingData(f"{path} not found. Give a text file with lines of: 0|1 enrolment test")
    position = {} if names is None else {name: number for number, name in enumerate(names)}
    columns: list[list[int]] = [[], [], []]
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 3 or fields[0] not in ("0", "1"):
            raise DamagedData(f"{path} line {number} must be `0|1 enrolment test`, not {line!r}")
        for name in fields[1:]:
            if names is None:
                position.setdefault(name, len(position))
            elif name not in position:
                raise DamagedData(f"{path} line {number} must name two of the {len(position)} items, not {name!r}")
        for column, value in zip(columns, (position[fields[1]], position[fields[2]], int(fields[0])), strict=True):
            column.append(value)
    first, second, same = (torch.tensor(column, dtype=torch.int64) for column in columns)
    items = tuple(position if names is None else names)
    return Trials(items, Pairs(first, second, same.bool(), torch.zeros_like(first)))


def read_template_list(
    file: str | Path,
) -> tuple[tuple[str, ...], Int64[Tensor, " images"], Int64[Tensor, " images"]]:
    """Read the templates and media of images: lines of `image template medium`, as in ijbc_face_tid_mid.txt.

    Returns:
        Names of the images, and for each image the numbers of its template and of its medium.

    Raises:
        MissingData: if the file does not exist.
        DamagedData: if a line is malformed; the message states its number.
    """
    path = _existing(file)
    names, numbers = [], []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 3 or not all(is_count(field.strip(), ID_DIGITS) for field in fields[1:]):
            raise DamagedData(f"{path} line {number} must be `image template medium`, not {line!r}")
        names.append(fields[0])
        numbers.append([int(field) for field in fields[1:]])
    if not names:
        raise DamagedData(f"{path} must list at least one image")
    template_ids, media_ids = torch.tensor(numbers, dtype=torch.int64).unbind(1)
    return tuple(names), template_ids, media_ids


def read_template_pairs(file: str | Path, template_ids: Int64[Tensor, " images"]) -> Pairs:
    """Read pairs of templates: lines of `template template 0|1`, as in ijbc_template_pair_label.txt.

    Args:
        file: the text file; that of IJB-C has 15.7 million lines.
        template_ids: the template of each image. Positions in the pairs refer to its distinct values in ascending
            order, which are the rows of `hypersphere.evaluation.templates`.

    Raises:
        MissingData: if the file does not exist.
        DamagedData: if a line is malformed or names an unknown template.
    """
    path = _existing(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # loadtxt warns of an empty file
            table = np.loadtxt(path, dtype=np.int64, ndmin=2)
    except (ValueError, OSError, UserWarning) as error:
        raise DamagedData(f"{path} must have lines of `template template 0|1`: {error}") from error
    if table.shape[1] != 3:
        raise DamagedData(f"{path} must have lines of `template template 0|1`, not {table.shape[1]} columns")
    wrong = np.flatnonzero(~np.isin(table[:, 2], (0, 1)))
    if len(wrong):
        raise DamagedData(f"{path} must have lines of `template template 0|1`, not {table[wrong[0]].tolist()}")
    columns = torch.from_numpy(table)
    first, second = (_rows_of_templates(columns[:, side], template_ids, path) for side in (0, 1))
    return Pairs(first, second, columns[:, 2] == 1, torch.zeros_like(first))


def read_template_set(file: str | Path, template_ids: Int64[Tensor, " images"]) -> TemplateSet:
    """Read a gallery or a set of probes: a CSV file that begins with the columns TEMPLATE_ID and SUBJECT_ID.

    A template may have several rows, one per image, as in ijbc_1N_gallery_G1.csv.

    Args:
        file: the CSV file.
        template_ids: as for `read_template_pairs`.

    Raises:
        MissingData: if the file does not exist.
        DamagedData: if a row is malformed, or a template has two subjects; the message states its number.
    """
    path = _existing(file)
    subject_of: dict[int, int] = {}  # in the order of the file
    for number, row in enumerate(_csv_rows(path), start=1):
        is_heading = number == 1 and len(row) > 1 and not is_count(row[0].strip(), ID_DIGITS)
        if is_heading or not row:
            continue
        if len(row) < 2 or not all(is_count(field.strip(), ID_DIGITS) for field in row[:2]):
            raise DamagedData(f"{path} line {number} must begin with a template and a subject, not {row[:2]!r}")
        template, subject = int(row[0]), int(row[1])
        if subject_of.setdefault(template, subject) != subject:
            raise DamagedData(f"{path} line {number} gives template {template} a second subject, {subject}")
    if not subject_of:
        raise DamagedData(f"{path} must list at least one template")
    templates, subjects = (torch.tensor(list(column)) for column in (subject_of.keys(), subject_of.values()))
    return TemplateSet(_rows_of_templates(templates, template_ids, path), subjects)


def ijb(root: str | Path | None = None, version: str = "c") -> IJB:
    """Protocols of IJB-B and IJB-C, in the files that insightface distributes.

    Reads from the folder IJBC/meta (or IJBB/meta): ijbc_face_tid_mid.txt, ijbc_template_pair_label.txt,
    ijbc_1N_gallery_G1.csv, ijbc_1N_gallery_G2.csv (S1 and S2 in IJB-B) and ijbc_1N_probe_mixed.csv.

    Args:
        root: contains the folder IJBC or IJBB.
        version: "b" or "c".
    """
    require(version in GALLERIES, "version", "'b' or 'c'", version)
    folder = data_root(root) / f"IJB{version.upper()}" / "meta"
    prefix = f"ijb{version}"
    names, template_ids, media_ids = read_template_list(folder / f"{prefix}_face_tid_mid.txt")
    first, second, probes = (
        read_template_set(folder / f"{prefix}_1N_{part}.csv", template_ids)
        for part in (*(f"gallery_{name}" for name in GALLERIES[version]), "probe_mixed")
    )
    pairs = read_template_pairs(folder / f"{prefix}_template_pair_label.txt", template_ids)
    return IJB(names, template_ids, media_ids, pairs, (first, second), probes)


def _existing(file: str | Path) -> Path:
    """Return the path of a file; raise MissingData if there is none."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise MissingData(f"{path} not found. It is part of the lists of IJB.")
    return path


def _rows_of_templates(templates: Tensor, template_ids: Tensor, path: Path) -> Int64[Tensor, " templates"]:
    """Return the positions of templates among the distinct ids in ascending order."""
    ids = template_ids.unique()
    rows = torch.searchsorted(ids, templates.contiguous()).clamp(max=len(ids) - 1)
    unknown = templates[ids[rows] != templates][:1].tolist()
    if unknown:
        raise DamagedData(f"{path} must name templates that have images, not {unknown[0]}")
    return rows


def _csv_rows(path: Path) -> Iterator[list[str]]:
    """Yield the rows of a CSV file; raise DamagedData if it is not one."""
    try:
        yield from csv.reader(read_text(path).splitlines())
    except csv.Error as error:
        raise DamagedData(f"{path} is not readable CSV: {error}") from error
