"""How tokens, words and colours look in pictures, tables and pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")

# Colours that stay apart for most colour-blind readers; classes beyond them get another kind of mark.
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8b5a2b", "#6a3d9a", "#666666", "#b2182b",
)  # fmt: skip
_DARK = (8, 48, 107)


def printable(text: str) -> str:
    r"""The text on one line, with everything that cannot be seen spelled out.

    Example:
        >>> print(printable("a\n\x00"))
        a\n\x00
    """
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def shown_token(token: str, width: int | None = None) -> str:
    """A token as it is shown: without the space in front, but not as nothing.

    Args:
        token: Its text.
        width: Most characters; the rest becomes an ellipsis.

    Example:
        >>> shown_token(" honey"), shown_token(" "), shown_token(" honeycomb", 6)
        ('honey', "' '", 'honey…')
    """
    text = printable(token.strip(" ")) or repr(token)
    return shortened(text, width)


def shortened(text: str, width: int | None) -> str:
    """A text of at most so many characters, the last one an ellipsis if any were cut.

    Example:
        >>> shortened("honeycomb", 6)
        'honey…'
    """
    return text if width is None or len(text) <= width else text[: width - 1] + "…"


def depth(probability: float) -> float:
    """How dark a probability is drawn, from 0 to 1; the root keeps small ones apart."""
    return max(0.0, min(1.0, probability)) ** 0.5


def shade(probability: float) -> tuple[str, str]:
    """Colours of a cell and of the text in it, for CSS.

    Example:
        >>> shade(0.0), shade(1.0)
        (('#ffffff', '#000000'), ('#08306b', '#ffffff'))
    """
    weight = depth(probability)
    channels = (round(255 + (dark - 255) * weight) for dark in _DARK)
    return "#" + "".join(f"{channel:02x}" for channel in channels), "#ffffff" if weight > 0.5 else "#000000"


def grouped(items: Iterable[_Item], keys: Iterable[int]) -> list[list[_Item]]:
    """Items of equal key together, in the order in which the keys appear.

    Example:
        >>> grouped("abc", [2, 1, 2])
        [['a', 'c'], ['b']]
    """
    found: dict[int, list[_Item]] = {}
    for key, item in zip(keys, items, strict=True):
        found.setdefault(key, []).append(item)
    return list(found.values())


def classes(labels: Sequence[str]) -> list[str]:
    """The classes of a map in a fixed order, whatever the order of the texts."""
    return sorted(set(labels))
