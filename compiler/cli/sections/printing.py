"""Sections and texts of a plan, one below the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from monarch.compiler.cli.screen import clean, console

Show = Callable[[Console], None]
Sections = dict[str, tuple[Callable[[], Any], Show]]
"""By name: the JSON value of each, and the function that prints it."""


def print_sections(sections: Sections, texts: Mapping[str, str]) -> None:
    """Print sections, and then texts as they are."""
    out = console()
    for number, (_, show) in enumerate(sections.values()):
        if number:
            out.print()
        show(out)
    for content in texts.values():
        sys.stdout.write(clean(content) + "\n")
