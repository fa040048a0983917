"""Where a value comes from, as the comment at the end of its line: `# train.py:12:9-14 backward in "blocks.0"; why`.

Every part may be missing: `# train.py:12`, `# backward`, `# ; the loss is whole on every worker`. A comment of another
form is the writer's own and is skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from monarch.compiler.errors import Source
from monarch.compiler.graph import UNKNOWN, Provenance

_STRING = r'"(?:[^"\\]|\\.)*"'
_COMMENT = re.compile(
    rf"# ?(?:(?P<file>{_STRING}|[^\s\":;]+):(?P<line>\d+)(?::(?P<column>\d+)(?:-(?P<end>\d+))?)?)?"
    rf"(?P<backward>(?:(?<=# )|(?<!#) )backward)?(?:(?:(?<=# )|(?<!#) )in (?P<module>{_STRING}))?(?:; (?P<why>.*))?",
    re.ASCII,
)
_PLAIN_FILE = re.compile(r"[^\s\":;]+")


def print_comment(meta: Mapping[str, Any], *, paths: bool, why: bool, modules: bool = False) -> str:
    """The comment of a value with this `meta`, or "" for none. `paths` keeps a file's folder."""
    parts = []
    of: Provenance = meta.get("provenance", UNKNOWN)
    source = of.source
    if source is not None:
        file = source.file if paths else re.split(r"[/\\]", source.file)[-1]
        text = f"{file if _PLAIN_FILE.fullmatch(file) and file.isprintable() else json.dumps(file)}:{source.line}"
        if source.column:
            text += f":{source.column}" + (f"-{source.end_column}" if source.end_column else "")
        parts.append(text)
    if of.backward:
        parts.append("backward")
    if modules and of.module:
        parts.append(f"in {json.dumps(of.module)}")
    text = " ".join(parts)
    if why and (reason := meta.get("why")):
        plain = reason.isprintable() and reason == reason.strip() and not reason.startswith('"')
        text += f"; {reason if plain else json.dumps(reason)}"
    return f"# {text}" if text else ""


def parse_comment(text: str) -> dict[str, Any]:
    """The "provenance" and "why" that a comment names, or {} where it is the writer's own."""
    match = _COMMENT.fullmatch(text.rstrip())
    if match is None:
        return {}
    meta: dict[str, Any] = {}
    source = None
    try:
        if file := match["file"]:
            name = json.loads(file) if file.startswith('"') else file
            source = Source(name, *(int(match[part] or 0) for part in ("line", "column", "end")))
        module = json.loads(match["module"]) if match["module"] else ""
        found = Provenance(source, module, bool(match["backward"]))
        if found != UNKNOWN:
            meta["provenance"] = found
        if why := match["why"]:
            meta["why"] = json.loads(why) if why.startswith('"') else why
    except ValueError:  # not JSON after all, or a number of thousands of digits
        return {}
    return meta
