"""How values show themselves, as text and in notebooks, by functions that are registered here.

The modules that write a value's text or drawing stand above the module that defines it, which so cannot import them.
`monarch` registers the drawing on import, before torch is loaded: so this module loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_texts: dict[type, Callable[[Any], str]] = {}
_draw: Callable[[Any], str] | None = None


def shows_as(kind: type, write: Callable[[Any], str]) -> None:
    """Register what writes the text of values of a class."""
    _texts[kind] = write


def text_of(value: object) -> str:
    """A value's text, in `str(value)`."""
    return _texts[type(value)](value)


def draw_with(draw: Callable[[Any], str]) -> None:
    """Register what draws values as HTML."""
    global _draw
    _draw = draw


def html_of(value: object) -> str | None:
    """A value's drawing for a notebook; None, so that the notebook shows its text, where nothing draws."""
    return None if _draw is None else _draw(value)
