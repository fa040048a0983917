"""How the commands print: tables of 100 columns, text without control characters, bytes and seconds for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from monarch.compiler.sizes import format_bytes, format_seconds

WIDTH = 100

size = format_bytes
duration = format_seconds


def console(stderr: bool = False) -> Console:
    """Where a command prints: a terminal as wide as it is, anything else 100 columns and without colours."""
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made = Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=WIDTH, no_color=True)
    return made


def clean(text: str) -> str:
    """Text from a file, for a terminal: without the control characters that it could have brought in."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def plain(text: object, style: str = "") -> Text:
    """Text as it is: no markup, nothing that a terminal would take for a command."""
    return Text(clean(str(text)), style)


def print_json(value: Any) -> None:
    """A JSON object on standard output, in ASCII."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def line(out: Console, *parts: object) -> None:
    """One line, however long, that is never wrapped."""
    text = Text(" ").join(part if isinstance(part, Text) else plain(part) for part in parts)
    out.print(text, soft_wrap=True)


def heading(out: Console, text: str, note: str = "", *, first: bool = False) -> None:
    """A table's title, behind an empty line where it is not the first."""
    if not first:
        out.print()
    line(out, plain(f"{text}: " if note else text, "bold") + plain(note))


def table(out: Console, columns: Sequence[str], rows: Iterable[Sequence[object]], indent: int = 2) -> None:
    """Rows below their columns' names, in columns aligned to the left, or right where the name begins with ">". A row
    that is wider than the screen is folded in the columns whose names begin with "~"; the others keep their width. A
    row of one cell is as wide as the table."""
    cells = [[cell if isinstance(cell, Text) else plain(cell) for cell in row] for row in rows]
    if any(name.strip(">~") for name in columns):
        cells.insert(0, [plain(name.lstrip(">~"), "dim") for name in columns])
    whole = [row for row in cells if len(row) == len(columns)]
    widths = [max((len(row[at].plain) for row in whole), default=0) for at in range(len(columns))]
    _narrow(widths, [at for at, name in enumerate(columns) if name.startswith("~")], out.width - indent)
    for row in cells:
        if len(row) == 1 < len(columns):
            for part in _fold(row[0], out.width - indent):
                out.print(Text(" " * indent) + part, soft_wrap=True)
            continue
        folded = [_fold(cell, width) for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, folded))):
            shown = Text(" " * indent)
            for name, lines, width in zip(columns, folded, widths, strict=True):
                part = lines[number] if number < len(lines) else Text("")
                space = " " * (width - len(part.plain))
                shown = shown + (Text(space) + part if name.startswith(">") else part + Text(space)) + Text("  ")
            shown.rstrip()
            out.print(shown, soft_wrap=True)


def _narrow(widths: list[int], folding: list[int], limit: int) -> None:
    """Take the excess from the widest of the columns that may be folded."""
    while folding and sum(widths) + 2 * (len(widths) - 1) > limit:
        widest = max(folding, key=lambda at: widths[at])
        if widths[widest] <= 12:
            return
        widths[widest] -= 1


def _fold(text: Text, width: int) -> list[Text]:
    """Text in lines of some width, broken behind a space, comma or dot where there is one in the last third."""
    lines = []
    while len(text.plain) > width:
        ends = [at for at in range(2 * width // 3, width) if _may_end(text.plain, at)]
        at = ends[-1] + 1 if ends else width
        lines.append(text[:at])
        text = text[at:]
    return [*lines, text]


def _may_end(text: str, at: int) -> bool:
    """Whether a line may end behind this character: not within a number."""
    return text[at] in " ,." and not (text[at - 1 : at].isdigit() and text[at + 1 : at + 2].isdigit())


def pairs(out: Console, rows: Iterable[Sequence[object]]) -> None:
    """A name, and its value."""
    table(out, ["", "~"], rows)


def amount(value: float) -> str:
    """A large number for people: `1.5 G`."""
    unit = 0
    while abs(value) >= 1000 and unit < 5:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {('', 'k', 'M', 'G', 'T', 'P')[unit]}".strip()


def count(number: int, singular: str, plural: str = "") -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
