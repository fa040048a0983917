"""Where a value comes from, as the comment at the end of its line: `# train.py:12:9-14 backward in "blocks.0"; why`.
For a line of a library `# llama.py:80:9-14 from train.py:12:5-9`, with the line that called it. An op of a pipeline's
step names its microbatch and stage before the reason: `# train.py:12 backward of microbatch 2, stage 1; why`.

Every part may be missing: `# train.py:12`, `# backward`, `# ; the loss is whole on every worker`. A comment of another
form is the writer's own and is skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from monarch.compiler.errors import Source
from monarch.compiler.graph import UNKNOWN, Provenance

_STRING = r'"(?:[^"\\]|\\.)*"'
_PLACE = rf"(?:{_STRING}|[^\s\":;]+):\d+(?::\d+(?:-\d+)?)?"
_PARTS = re.compile(rf"(?P<file>{_STRING}|[^\s\":;]+):(?P<line>\d+)(?::(?P<column>\d+)(?:-(?P<end>\d+))?)?", re.ASCII)
_COMMENT = re.compile(
    rf"# ?(?:(?P<place>{_PLACE})(?: from (?P<caller>{_PLACE}))?)?"
    rf"(?P<backward>(?:(?<=# )|(?<!#) )backward)?(?:(?:(?<=# )|(?<!#) )in (?P<module>{_STRING}))?"
    r"(?:(?:(?<=# )|(?<!#) )of (?P<task>microbatch \d+, stage \d+|microbatch \d+|stage \d+))?(?:; (?P<why>.*))?",
    re.ASCII,
)
_PLAIN_FILE = re.compile(r"[^\s\":;]+")


def print_comment(meta: Mapping[str, Any], *, paths: bool, modules: bool = False) -> str:
    """The comment of a value with this `meta`, or "" for none. `paths` keeps a file's folder."""
    parts = []
    of: Provenance = meta.get("provenance", UNKNOWN)
    if of.source is not None:
        parts.append(_print_place(of.source, paths))
        if of.source.caller is not None:
            parts.append(f"from {_print_place(of.source.caller, paths)}")
    if of.backward:
        parts.append("backward")
    if modules and of.module:
        parts.append(f"in {json.dumps(of.module)}")
    task = [f"{name} {at}" for name, at in (("microbatch", of.microbatch), ("stage", of.stage)) if at is not None]
    if modules and task:
        parts.append(f"of {', '.join(task)}")
    text = " ".join(parts)
    if reason := meta.get("why"):
        plain = reason.isprintable() and reason == reason.strip() and not reason.startswith('"')
        text += f"; {reason if plain else json.dumps(reason)}"
    return f"# {text}" if text else ""


@lru_cache(1024)
def _print_place(source: Source, paths: bool) -> str:
    file = source.file if paths else re.split(r"[/\\]", source.file)[-1]
    text = f"{file if _PLAIN_FILE.fullmatch(file) and file.isprintable() else json.dumps(file)}:{source.line}"
    if source.column:
        text += f":{source.column}" + (f"-{source.end_column}" if source.end_column else "")
    return text


def _parse_place(text: str, caller: Source | None = None) -> Source:
    match = _PARTS.fullmatch(text)
    assert match is not None
    name = json.loads(match["file"]) if match["file"].startswith('"') else match["file"]
    line, column, end = (int(match[part] or 0) for part in ("line", "column", "end"))
    return Source(name, line, column, end, caller)


def parse_comment(text: str) -> dict[str, Any]:
    """The "provenance" and "why" that a comment names, or {} where it is the writer's own."""
    match = _COMMENT.fullmatch(text.rstrip())
    if match is None:
        return {}
    meta: dict[str, Any] = {}
    source = None
    try:
        if place := match["place"]:
            source = _parse_place(place, _parse_place(match["caller"]) if match["caller"] else None)
        module = json.loads(match["module"]) if match["module"] else ""
        task = {name: int(at) for name, at in re.findall(r"(\w+) (\d+)", match["task"] or "", re.ASCII)}
        found = Provenance(
            source, module, bool(match["backward"]), microbatch=task.get("microbatch"), stage=task.get("stage")
        )
        if found != UNKNOWN:
            meta["provenance"] = found
        if why := match["why"]:
            meta["why"] = json.loads(why) if why.startswith('"') else why
    except ValueError:  # not JSON after all, or a number of thousands of digits
        return {}
    return meta
