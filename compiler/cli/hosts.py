"""`monarch`: machines as hosts, and what they have to offer. One file for each command.

Exit status as of `monarchc`: 0 fine, 1 it found something, 2 the user's input is wrong, 3 a fault of its own.
"""

from __future__ import annotations

from typing import Annotated

import typer

from monarch import __version__
from monarch.compiler.cli import entry
from monarch.compiler.cli.ca import ca
from monarch.compiler.cli.debug import debug as debug_actors
from monarch.compiler.cli.doctor import doctor
from monarch.compiler.cli.host import host
from monarch.compiler.cli.imports import Imports

app = typer.Typer(name="monarch", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """Run the command line, and exit."""
    entry.run(app, "monarch")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"monarch {__version__}")
        raise typer.Exit()


@app.callback()
def monarch(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. Of every command.")] = False,
    imports: Imports = None,
) -> None:
    """Make this machine a host, see what it offers, and attach to actors that stopped.

    Exit status: 0 fine, 1 it found something, 2 the input is wrong, 3 a fault of monarch's own.
    """


app.command()(host)
app.command()(ca)
app.command()(doctor)
app.command("debug")(debug_actors)
