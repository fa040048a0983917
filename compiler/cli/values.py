"""Values of options: meshes, and names with values."""

from __future__ import annotations

import re

from monarch.compiler.errors import MonarchError
from monarch.compiler.types import MeshSpec

MAX_WORKERS = 2**20


def read_mesh(text: str | None) -> MeshSpec | None:
    """`data=8,model=4` as a mesh. Raises MonarchError with a caret under what does not fit."""
    if text is None:
        return None
    dims: list[tuple[str, int]] = []
    at = 0
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]{1,18})\s*", part, re.ASCII)
        if match is None:
            raise MonarchError(
                f"--mesh: {part.strip()!r} is not DIM=SIZE",
                hint=f"{text}\n{' ' * at}{'^' * max(1, len(part))}\nwrite the mesh as data=8,model=4.",
            )
        dims.append((match[1], int(match[2])))
        at += len(part) + 1
    mesh = MeshSpec(tuple(dims))
    if mesh.workers > MAX_WORKERS:
        raise MonarchError(f"--mesh: {mesh} has {mesh.workers:,} workers", hint=f"at most {MAX_WORKERS:,}.")
    return mesh


def read_pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    """`--arg x=…` and `--scalar lr=…` as a dict. Raises MonarchError for an entry without `=`, or one that comes
    twice."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise MonarchError(f"{option} {text!r} is not NAME=VALUE")
        if name.strip() in found:
            raise MonarchError(f"{option} {name.strip()} stands twice")
        found[name.strip()] = value.strip()
    return found
