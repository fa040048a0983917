"""`monarchc`, the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from monarch import __version__
from monarch.compiler.cli.inspect import show, summary
from monarch.compiler.errors import MonarchError
from monarch.compiler.plan.file import load_plan

app = typer.Typer(
    name="monarchc", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


def main() -> None:
    """Run the command line and exit: with status 2 and one message where the user's input is wrong."""
    try:
        app(prog_name="monarchc")
    except MonarchError as error:
        typer.echo(f"monarchc: error: {_printable(str(error))}", err=True)
        raise SystemExit(2) from None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"monarchc {__version__}")
        raise typer.Exit()


@app.callback()
def monarchc(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One Python program drives a whole cluster: the compiler's tools."""


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A plan that plan.save() wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    graph: Annotated[bool, typer.Option(help="Print the partitioned graph as well.")] = True,
) -> None:
    """Print what a .mplan FILE holds. Runs nothing of it."""
    plan = load_plan(file)
    if as_json:
        typer.echo(json.dumps(summary(plan, graph), indent=2))
    else:
        show(plan, graph)


def _printable(text: str) -> str:
    """Text for a terminal: without the control characters that a file could have brought in."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
