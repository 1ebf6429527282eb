"""Labeled Faces in the Wild: images, and the ten folds of pairs and of people (View 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hypersphere.data._files import DamagedData, data_root, find_file, is_count, read_content, verify_sha256
from hypersphere.data.containers import LabelledImages
from hypersphere.data.folder import image_folder, image_names
from hypersphere.data.pairs import Pairs, lfw_pairs_from_lines

# In the order of preference. The first is aligned and has the input size of the SphereFace networks.
IMAGE_SOURCES = ("lfw-a-96x112.tar.gz", "lfw.tar.gz", "lfw.tgz", "lfw")
ADVICE = (
    "Put the images (NAME/NAME_0001.jpg under a folder lfw, or an archive of it) "
    "with pairs.txt and people.txt of View 2 in the folder lfw."
)
# Checksums of the published lists. Images are not verified, because copies differ (original, aligned, cropped).
SHA256 = {
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
        root: contains the folder lfw with lfw-a-96x112.tar.gz, lfw.tar.gz, lfw.tgz or a folder lfw of
            NAME/NAME_0001.jpg.
        people: read only these people, for example nine of the folds of lfw_people.
        size: resize every image to (height, width).
        grey: True for one channel, False for three; None keeps one channel if every image is grey.
    """
    return image_folder(find_images(root), size=size, grey=grey, classes=people)


def lfw_people(root: str | Path | None = None, *, verify: bool = True) -> tuple[tuple[str, ...], ...]:
    """Return the folds of people of View 2 (people.txt): ten lists of names, no name in two of them.

    Args:
        root: contains the folder lfw with people.txt.
        verify: compare with the published file; False reads any file in the same format.
    """
    path, lines = _read_lines(root, "people.txt", verify)
    numbered_lines = iter(lines)
    folds: list[tuple[str, ...]] = []
    seen: set[str] = set()
    # The number of folds, then for each fold the number of people and one line per person.
    for _ in range(_read_count(numbered_lines, path)):
        names: list[str] = []
        for _ in range(_read_count(numbered_lines, path)):
            number, line = next(numbered_lines, (lines[-1][0], ""))
            fields = line.split("\t")
            if len(fields) != 2 or not is_count(fields[1]) or fields[0] in seen:
                raise DamagedData(f"{path} line {number} must be a new name and a count, not {line!r}")
            seen.add(fields[0])
            names.append(fields[0])
        folds.append(tuple(names))
    if next(numbered_lines, None) is not None:
        raise DamagedData(f"{path} must have the number of lines that its counts state, not more")
    return tuple(folds)


def lfw_pairs(root: str | Path | None = None, *, names: Sequence[str] | None = None, verify: bool = True) -> Pairs:
    """Return the pairs of View 2 (pairs.txt): ten folds of 300 same and 300 different pairs.

    Args:
        root: contains the folder lfw with pairs.txt and the images.
        names: the names of the images to which positions refer; by default those of lfw(root).
        verify: compare with the published file; False reads any file in the same format.
    """
    path, lines = _read_lines(root, "pairs.txt", verify)
    if names is None:
        names = image_names(find_images(root))
    return lfw_pairs_from_lines(lines, names, path)


def find_images(root: str | Path | None) -> Path:
    """Return the folder or archive of the images."""
    return find_file([data_root(root) / "lfw"], IMAGE_SOURCES, ADVICE)


def _read_lines(root: str | Path | None, name: str, verify: bool) -> tuple[Path, list[tuple[int, str]]]:
    """Return the path of a list, and its lines with their numbers, without empty lines."""
    path = find_file([data_root(root) / "lfw"], (name,), ADVICE)
    content = read_content(path)
    verify_sha256(content, SHA256[name] if verify else None, path)
    lines = content.decode("utf-8", errors="replace").splitlines()
    return path, [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]


def _read_count(numbered_lines: Iterator[tuple[int, str]], path: Path) -> int:
    """Return the count on the next line."""
    number, line = next(numbered_lines, (0, ""))
    if not is_count(line):
        problem = f"line {number} must be a count, not {line!r}" if number else "ends before its last fold"
        raise DamagedData(f"{path} {problem}")
    return int(line)
