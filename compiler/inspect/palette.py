"""The colours of meshes and layouts, the same in notebooks and on the inspector's page.

A mesh dim has one hue, by its place in the mesh. A tensor that the dim shards is filled with it; a replicated one is
grey; a partial value is hatched with it, and a varying one dotted, so that no difference is one of hue alone. The six
hues stay apart for readers with protanopia, deuteranopia and tritanopia (tests/compiler/inspect/test_palette.py
simulates them), and stand out from the ground of their theme by 3:1 at least, as WCAG 2.2 asks of graphics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shade:
    """One colour, as #rrggbb, on a light and on a dark ground."""

    light: str
    dark: str


DIMS = (
    Shade("#0d63ad", "#5b7be0"),  # blue
    Shade("#d0740c", "#b07a1a"),  # orange
    Shade("#2a9d8a", "#4fe3cd"),  # teal
    Shade("#8a2163", "#ee7996"),  # plum
    Shade("#6b5f0b", "#e4de6a"),  # olive
    Shade("#a77ee6", "#a9a6fe"),  # violet
)
"""For the first mesh dim, the second, …; a seventh takes the first again."""

ROLES = {
    "ground": Shade("#ffffff", "#16181d"),
    "surface": Shade("#f5f6f8", "#20242b"),
    "line": Shade("#d3d7de", "#3a404a"),
    "text": Shade("#1b1f26", "#e6e9ee"),
    "muted": Shade("#5c6470", "#a0a8b4"),
    "whole": Shade("#b9bec4", "#51565b"),  # replicated
    "accent": Shade("#0d63ad", "#8aa2f0"),  # links, focus, the selected
    "error": Shade("#b3261e", "#ff8a80"),
}
"""Colours that are not of a mesh dim, by their use."""


def of_mesh(names: Sequence[str]) -> dict[str, Shade]:
    """The colour of each mesh dim, by name."""
    return {name: DIMS[place % len(DIMS)] for place, name in enumerate(names)}


def variables(theme: str, prefix: str = "--") -> str:
    """CSS declarations for one theme, "light" or "dark": `--dim0: #0d63ad; … --ground: #ffffff; …`."""
    shades = {f"dim{place}": shade for place, shade in enumerate(DIMS)} | ROLES
    return " ".join(f"{prefix}{name}: {getattr(shade, theme)};" for name, shade in shades.items())
