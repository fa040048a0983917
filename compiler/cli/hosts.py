"""`monarch`: machines as hosts, and what they have to offer. The commands are declared here, and loaded when they run.

Exit status as of `monarchc`: 0 fine, 1 it found something, 2 the user's input is wrong, 3 a fault of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from monarch import __version__
from monarch.compiler.cli import entry
from monarch.compiler.cli.options import Imports

app = typer.Typer(name="monarch", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
command = entry.commands(app)


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


@command("monarch.compiler.cli.host:host")
def host(
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen: 10.0.0.1:4242. Port 0 takes one that is free.")
    ],
    tls: Annotated[
        Path | None, typer.Option(metavar="DIR", help="This host's certificates, as `monarch ca` makes them.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Or the token that controllers have to know; for loopback.")
    ] = None,
    trusted_network: Annotated[
        bool, typer.Option("--trusted-network", help="Take the token on other addresses too: nobody else can listen.")
    ] = False,
    data_bind: Annotated[
        str | None,
        typer.Option(metavar="ADDR", help="Where workers listen for those of other hosts. [the address of --listen]"),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="By which name or address those reach them. With TLS the certificate has it."
        ),
    ] = None,
) -> None:
    """Make this machine a host: it runs workers for the controllers that attach it, until it is ended.

    What is refused, and who attaches, is printed to standard error.
    """


@command("monarch.compiler.cli.ca:ca")
def ca(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put them. What is there is not overwritten.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME",
            help="A host, by the name or address under which it is attached; several of one host with commas between. "
            "Can be given several times. [this machine]",
        ),
    ] = None,
) -> None:
    """Make certificates: an authority, one for the controller, and one for each host.

    Run it again with more hosts to add them. Each host needs its own folder and nothing else; whoever has ca-key.pem
    can make certificates that all of them accept.
    """


@command("monarch.compiler.cli.doctor:doctor")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts and the findings as JSON.")] = False,
    tls: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The certificates with which this host would listen; without it MONARCH_TLS."),
    ] = None,
    describe: Annotated[
        Path | None,
        typer.Option(
            "--measure",
            metavar="FILE.toml",
            help="Measure this machine's workers instead, and write their description, for monarchc's --machine.",
        ),
    ] = None,
) -> None:
    """See what this machine offers, from limits and devices to the bandwidth of its transports, and what it lacks.

    Takes a few seconds. Exit status 1 where something is missing that Monarch needs.
    """


@command("monarch.compiler.cli.debug:debug", "debug")
def debug_actors(
    pid: Annotated[
        int | None, typer.Argument(metavar="[PID]", help="The program's process. [the only one with such actors]")
    ] = None,
) -> None:
    """Attach to actors that wait at a breakpoint, of a program that runs on this machine.

    Commands: list, attach NAME [RANK], cast NAME [RANKS] COMMAND, continue, help, quit. An attached actor takes the
    commands of Python's debugger; detach leaves it where it is.
    """
