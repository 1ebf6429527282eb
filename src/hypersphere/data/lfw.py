"""Labeled Faces in the Wild: the images, the ten folds of pairs and the ten folds of people (View 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hypersphere.data.content import check_sum, read_content
from hypersphere.data.errors import DamagedData
from hypersphere.data.folder import image_folder, image_names
from hypersphere.data.labelled import LabelledImages
from hypersphere.data.pairs import Pairs, as_pairs
from hypersphere.data.root import data_root, find

SOURCES = ("lfw-a-96x112.tar.gz", "lfw.tar.gz", "lfw.tgz", "lfw")
ADVICE = (
    "Put the images (NAME/NAME_0001.jpg under a folder lfw, or an archive of it) "
    "with pairs.txt and people.txt of View 2 in the folder lfw."
)
SUMS = {
    "pairs.txt": "ea42330c62c92989f9d7c03237ed5d591365e89b3e649747777b70e692dc1592",
    "people.txt": "bc8fa2b7f25c895cf7efb6de4f4fc27ca8b8d1cfa63350ad8b96eae2b198d365",
}


def lfw(
    root: str | Path | None = None,
    *,
    people: Sequence[str] | None = None,
    size: int | tuple[int, int] | None = None,
    grey: bool | None = None,
) -> LabelledImages:
    """Faces of 5,749 people, 13,233 images in the size of your copy; classes are names of people.

    Args:
        root: holds the folder lfw with lfw-a-96x112.tar.gz, lfw.tar.gz, lfw.tgz or a folder lfw of NAME/NAME_0001.jpg.
        people: read only these people, for example nine of the folds of lfw_people.
        size: resize every image to (height, width).
        grey: True for one channel, False for three; None keeps grey when every image is grey.
    """
    return image_folder(find([data_root(root) / "lfw"], SOURCES, ADVICE), size=size, grey=grey, classes=people)


def lfw_people(root: str | Path | None = None, *, verify: bool = True) -> tuple[tuple[str, ...], ...]:
    """The folds of people of View 2 (people.txt): ten lists of names, no name in two of them.

    Args:
        root: holds the folder lfw with people.txt.
        verify: compare with the published file; False reads any file of the same form.
    """
    path, lines = _lines(root, "people.txt", verify)
    remaining = iter(enumerate(lines, start=1))
    folds: list[tuple[str, ...]] = []
    seen: set[str] = set()
    for _ in range(_count(remaining, path)):
        names: list[str] = []
        for _ in range(_count(remaining, path)):
            number, line = next(remaining, (len(lines), ""))
            fields = line.split("\t")
            if len(fields) != 2 or not _is_number(fields[1]) or fields[0] in seen:
                raise DamagedData(f"{path} line {number} must be a new name and a count, not {line!r}")
            seen.add(fields[0])
            names.append(fields[0])
        folds.append(tuple(names))
    if next(remaining, None) is not None:
        raise DamagedData(f"{path} must hold as many lines as its counts say, not more")
    return tuple(folds)


def lfw_pairs(root: str | Path | None = None, *, names: Sequence[str] | None = None, verify: bool = True) -> Pairs:
    """The pairs of View 2 (pairs.txt): ten folds of 300 same and 300 different pairs.

    Args:
        root: holds the folder lfw with pairs.txt and the images.
        names: what positions refer to; without them, the order of lfw(root).
        verify: compare with the published file; False reads any file of the same form.
    """
    path, lines = _lines(root, "pairs.txt", verify)
    if names is None:
        names = image_names(find([data_root(root) / "lfw"], SOURCES, ADVICE))
    place = {name.rsplit(".", 1)[0]: number for number, name in enumerate(names)}
    header = lines[0].split() if lines else []
    if len(header) != 2 or not all(map(_is_number, header)):
        raise DamagedData(f"{path} must begin with the number of folds and of pairs, not {' '.join(header)!r}")
    folds, each = map(int, header)
    if len(lines) != 1 + 2 * folds * each:
        raise DamagedData(f"{path} must hold {2 * folds * each} pairs, not {len(lines) - 1}")
    rows = []
    for number, line in enumerate(lines[1:]):
        fold, position = divmod(number, 2 * each)
        same = position < each
        fields = line.split("\t")
        numbers = fields[1:] if same else fields[1::2]
        if len(fields) != (3 if same else 4) or not all(map(_is_number, numbers)):
            form = "name, number, number" if same else "name, number, name, number"
            raise DamagedData(f"{path} line {number + 2} must be {form}, not {line!r}")
        first = f"{fields[0]}/{fields[0]}_{int(fields[1]):04d}"
        other = fields[0] if same else fields[2]
        second = f"{other}/{other}_{int(fields[-1]):04d}"
        for name in (first, second):
            if name not in place:
                raise DamagedData(f"{path} line {number + 2} must name one of the {len(place)} images, not {name!r}")
        rows.append((place[first], place[second], same, fold))
    return as_pairs(rows)


def _lines(root: str | Path | None, name: str, verify: bool) -> tuple[Path, list[str]]:
    path = find([data_root(root) / "lfw"], (name,), ADVICE)
    content = read_content(path)
    if verify:
        check_sum(content, SUMS[name], path)
    return path, [line.strip() for line in content.decode("utf-8", errors="replace").splitlines() if line.strip()]


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


def _count(lines: Iterator[tuple[int, str]], path: Path) -> int:
    number, line = next(lines, (0, ""))
    if not _is_number(line):
        where = f"line {number} must be a count, not {line!r}" if number else "ends before all its folds"
        raise DamagedData(f"{path} {where}")
    return int(line)
