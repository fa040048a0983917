"""The tables of parameters in our docstrings as lists, for the site's reference (mkdocs.yml; griffe loads this).

`nodes`, `cpus`   what is to be kept,        becomes        - `nodes`, `cpus`: what is to be kept,
                  on each host                                on each host
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROW = re.compile(r"^((?:`[^`]+`|\w+=)(?:, `[^`]+`)*) {2,}(\S.*)$")


def listed(text: str) -> str:
    """The text of a docstring, with each run of such rows as a list."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if row := ROW.match(line):
            lines += [*([] if inside else [""]), f"- {row[1]}: {row[2]}"]
            inside = True
        elif inside and line.startswith("  "):
            lines.append(f"    {line.strip()}")
        else:
            lines += [*([""] if inside and line else []), line]
            inside = False
    return "\n".join(lines)


class Lists(Extension):
    """Rewrites the docstring of everything that is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = listed(obj.docstring.value)
