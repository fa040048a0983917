"""The app: its commands, and what becomes of errors.

Exit status: 0 fine; 1 it found something (`check`'s findings, differing plans, a step that failed on a worker); 2 the
user's input is wrong; 3 a fault of monarchc's own.

`monarchc --help` must be quick: a command imports torch, and what needs it, when it runs.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from monarch import __version__
from monarch.compiler.cli.check import check
from monarch.compiler.cli.compile import compile_
from monarch.compiler.cli.diff import diff
from monarch.compiler.cli.inspect import inspect
from monarch.compiler.cli.opt import opt
from monarch.compiler.cli.profile import profile
from monarch.compiler.cli.run import run
from monarch.compiler.cli.screen import clean
from monarch.compiler.errors import DeviceMeshError, MonarchError

FOUND, WRONG_INPUT, OWN_FAULT = 1, 2, 3

app = typer.Typer(name="monarchc", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """Run the command line, and exit."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    try:
        app([a for at, a in enumerate(arguments) if a != "--debug" or at >= end], prog_name="monarchc")
    except MonarchError as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"monarchc: error: {clean(str(error))}", err=True)
        raise SystemExit(FOUND if isinstance(error, DeviceMeshError) else WRONG_INPUT) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        what = clean(f"{type(error).__name__}: {error}")
        hint = "" if debug else "\n  run it again with --debug for the traceback, and report it."
        typer.echo(f"monarchc: this is a fault of monarchc's own: {what}{hint}", err=True)
        raise SystemExit(OWN_FAULT) from None


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
