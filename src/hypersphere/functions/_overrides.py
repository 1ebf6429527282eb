"""Which closed forms a subclass of a menu entry may inherit.

An entry often has two implementations of one function: a method that defines it, and a faster closed form of the value
or of the derivative. A user's subclass that overrides the first inherits the second from its parent, where it belongs
to another function. The engines use a closed form only if `closed_form_matches` confirms that both belong together.
Closed forms that an engine writes out for one entry, such as g = cos, are used only if the type of the entry is exactly
that class.
"""

from __future__ import annotations

__all__ = ["closed_form_matches", "reset_closed_forms"]


def closed_form_matches(cls: type, closed_form: str, *, of: tuple[str, ...]) -> bool:
    """Return True if the closed form that `cls` has belongs to the methods `of` that it has.

    It does if no class overrides one of the methods without defining the closed form too.

    >>> class Square:
    ...     def value(self, x): return x**2
    ...     def slope(self, x): return 2 * x
    >>> class Cube(Square):
    ...     def value(self, x): return x**3
    >>> closed_form_matches(Square, "slope", of=("value",)), closed_form_matches(Cube, "slope", of=("value",))
    (True, False)
    """
    for parent in cls.__mro__:
        if closed_form in vars(parent):
            return True
        if any(method in vars(parent) for method in of):
            return False
    return False


def reset_closed_forms(cls: type, base: type, closed_forms: tuple[str, ...], *methods: str) -> None:
    """Replace closed forms that do not match the methods of `cls` by those of `base`, which hold for any methods."""
    for name in closed_forms:
        if not closed_form_matches(cls, name, of=methods):
            setattr(cls, name, vars(base)[name])
