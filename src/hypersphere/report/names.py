"""Many names in little room."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile


def short_names(names: Sequence[str], most: int) -> list[str]:
    """Return names of at most so many letters, that still can be told apart where these can.

    Where any is too long, all lose the words that all begin with; what is still too long loses its middle.

    >>> short_names(["Alphabet_of_the_Magi/character01", "Alphabet_of_the_Magi/character17"], 12)
    ['character01', 'character17']
    >>> short_names(["Futurama/character01", "Greek/character24"], 12)
    ['Futur…cter01', 'Greek…cter24']
    """
    if max(map(len, names), default=0) <= most:
        return list(names)
    if len(names) > 1:
        alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
        words = re.sub(r"[^\W_]+$", "", "".join(letters[0] for letters in alike))
        names = [name.removeprefix(words) or name for name in names]
    tail = most // 2
    return [name if len(name) <= most else f"{name[: most - tail - 1]}…{name[-tail:]}" for name in names]
