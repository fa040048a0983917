"""The shell's completions: programs of a file, found by reading it."""

from __future__ import annotations

import ast
from pathlib import Path


def complete_program(incomplete: str) -> list[str]:
    """`train.py:tr` to the names of the programs in train.py. Files' names are completed without it."""
    name, colon, start = incomplete.rpartition(":")
    if not colon:
        path = Path(incomplete)
        folder = path.parent if not incomplete.endswith("/") else path
        found = sorted(folder.glob(f"{path.name if folder != path else ''}*"))
        shown = [f"{file}/" if file.is_dir() else str(file) for file in found if _useful(file)]
        return [entry for text in shown for entry in ([text, f"{text}:"] if text.endswith(".py") else [text])]
    return [f"{name}:{program}" for program in programs_in(Path(name)) if program.startswith(start)]


def _useful(file: Path) -> bool:
    return not file.name.startswith(".") and (file.is_dir() or file.suffix in (".py", ".mplan"))


def programs_in(file: Path) -> list[str]:
    """The functions at a file's top level that `@monarch.program` (or `@program`) decorates."""
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    return [
        statement.name
        for statement in tree.body
        if isinstance(statement, ast.FunctionDef)
        and any(ast.unparse(d).partition("(")[0].split(".")[-1] == "program" for d in statement.decorator_list)
    ]
