"""The app: its commands, and what becomes of errors.

Exit status: 0 fine; 1 it found something (`check`'s findings, differing plans, a step that failed on a worker); 2 the
user's input is wrong; 3 a fault of monarchc's own.

`monarchc --help` must be quick: a command imports torch, and what needs it, when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from monarch import __version__
from monarch.compiler.cli import entry
from monarch.compiler.cli.check import check
from monarch.compiler.cli.compile import compile_
from monarch.compiler.cli.diff import diff
from monarch.compiler.cli.imports import Imports
from monarch.compiler.cli.inspect import inspect
from monarch.compiler.cli.opt import opt
from monarch.compiler.cli.profile import profile
from monarch.compiler.cli.run import run
from monarch.compiler.cli.tune import tune

app = typer.Typer(name="monarchc", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """Run the command line, and exit."""
    entry.run(app, "monarchc")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"monarchc {__version__}")
        raise typer.Exit()


@app.callback()
def monarchc(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. Of every command.")] = False,
    imports: Imports = None,
) -> None:
    """See what a distributed program became: compile it, look into the plan, run it.

    Exit status: 0 fine, 1 it found something, 2 the input is wrong, 3 a fault of monarchc's own.
    """


app.command("compile")(compile_)
app.command()(run)
app.command()(profile)
app.command()(inspect)
app.command()(opt)
app.command()(diff)
app.command()(check)
app.command()(tune)
