"""The options that several commands share."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from monarch import __version__
from monarch.compiler.cli.completion import complete_program
from monarch.compiler.loading import load

LANGUAGES = ("cpp", "triton", "ptx")
GROUPS = ("value", "op", "module", "line")
"""The groupings of the table of measured times."""
BY = ("line", "module", "op", "mesh-dim", "phase", "stage")
"""The groupings of the table of a plan's costs."""
SORTS = ("time", "bytes", "memory")
"""The sort keys of that table's rows."""
STEPS = 10
"""How often a plan is run to measure it."""
TARGETS = ("cpu", "cuda:80", "cuda:90", "cuda:100", "gfx942")
"""The shell's completions after --target, without loading torch."""


def _targets(incomplete: str) -> list[str]:
    return [target for target in TARGETS if target.startswith(incomplete)]


def _import(names: list[str] | None) -> None:
    if names:
        load("monarch.compiler.cli.imports:import_all")(names)


class Format(enum.StrEnum):
    """The output forms of `check`."""

    TEXT = "text"
    GITHUB = "github"
    JSON = "json"


def _print_version(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(f"{context.info_name} {__version__}")
        raise typer.Exit()


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. Of every command.")]
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
        metavar="FILE.py:PROGRAM",
        help="A program in a Python file: train.py:train_step.",
        autocompletion=complete_program,
    ),
]
PlanOrProgram = Annotated[
    str,
    typer.Argument(
        metavar="PLAN|FILE.py:PROGRAM", help="A plan's file, or a program to compile.", autocompletion=complete_program
    ),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        callback=_import,
        is_eager=True,
        help="Import a module, by its name or file, such as one that registers ops of your own. Can be repeated.",
    ),
]
