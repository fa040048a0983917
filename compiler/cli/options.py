"""The options that several commands share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from monarch.compiler.errors import MonarchError

if TYPE_CHECKING:
    from monarch.compiler.types import MeshSpec

MAX_WORKERS = 2**20
TARGETS = ("cpu", "cuda:80", "cuda:90", "cuda:100", "gfx942")
"""What a shell completes after --target, without loading torch."""


def _programs(incomplete: str) -> list[str]:
    """Complete `train.py:` with the programs of the file, which is read and not run; a file's name is the shell's."""
    from monarch.compiler.cli.completion import complete_program

    return complete_program(incomplete)


def _targets(incomplete: str) -> list[str]:
    return [target for target in TARGETS if target.startswith(incomplete)]


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print each pass and its time, on standard error.")]
Mesh = Annotated[
    str | None,
    typer.Option("--mesh", metavar="DIM=N,…", help="Sizes of mesh dims instead of the file's own: data=8,model=4."),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="TARGET",
        help="What to compile for instead of the program's own: cpu, cuda:90, gfx942.",
        autocompletion=_targets,
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="NAME=TYPE", help='An argument\'s type or value: --arg x="f32[64@data, 1024]".'),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit", metavar="SIZE", help="What a worker may hold at once, instead of the program's own: 2GiB."
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse an op that every worker would compute whole, for want of a rule.")
]
FirstCall = Annotated[
    bool,
    typer.Option(
        "--first-call", help="The program's first call, which makes the optimizer's state, not its later ones."
    ),
]
ProgramSpec = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:PROGRAM", help="A program in a Python file: train.py:train_step.", autocompletion=_programs
    ),
]
PlanOrProgram = Annotated[
    str,
    typer.Argument(
        metavar="PLAN|FILE.py:PROGRAM", help="A plan's file, or a program to compile.", autocompletion=_programs
    ),
]


def read_mesh(text: str | None) -> MeshSpec | None:
    """`data=8,model=4` as a mesh. Raises MonarchError with a caret under what does not fit."""
    if text is None:
        return None
    from monarch.compiler.types import MeshSpec

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
    """`--arg x=…` and `--scalar lr=…` as a dict. Raises MonarchError for what has no `=`, or stands twice."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise MonarchError(f"{option} {text!r} is not NAME=VALUE")
        if name.strip() in found:
            raise MonarchError(f"{option} {name.strip()} stands twice")
        found[name.strip()] = value.strip()
    return found
