"""`monarch`: machines as hosts, jobs of them, and what they have to offer.

The commands are declared here, and loaded when they run.

Exit status as of `monarchc`: 0 fine, 1 it found something, 2 the user's input is wrong, 3 an internal error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from monarch.compiler.cli import entry
from monarch.compiler.cli.options import Debug, Imports, Version

Variables = Annotated[
    list[str] | None,
    typer.Option("-e", "--env", metavar="NAME=VALUE", help="A variable of its environment. Can be repeated."),
]
State = Annotated[
    Path,
    typer.Option("--state", metavar="FILE", help="The file that remembers the job, as JobTrait.state has it."),
]

app = typer.Typer(name="monarch", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
command = entry.commands(app)


def main() -> None:
    """Run the command line, and exit."""
    entry.run(app, "monarch")


@app.callback()
def monarch(
    version: Version = False,
    debug: Debug = False,
    imports: Imports = None,
) -> None:
    """Make this machine a host, run jobs of hosts, watch programs, and attach to actors that stopped.

    Exit status: 0 fine, 1 it found something, 2 the input is wrong, 3 an internal error of monarch.
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

    Refused and attached controllers are printed to standard error.
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
    """Report what this machine offers, from limits and devices to the bandwidth of its transports, and what it lacks.

    Takes a few seconds. Exit status 1 where something is missing that Monarch needs.
    """


@command("monarch.compiler.cli.jobs:apply")
def apply(
    job: Annotated[
        str, typer.Argument(metavar="FILE.py:JOB", help="A job of monarch.job at the top level of a Python file.")
    ],
    state: State = Path(".monarch/job_state.pkl"),
) -> None:
    """Ask a scheduler for the hosts of a job, wait until they serve, and remember them for programs and `monarch exec`.

    JOB can be left out where the file has one; make_job() is a function that makes it. A running
    job that has all that this one asks for is kept; another job in the state file is killed.
    """


@command("monarch.compiler.cli.jobs:execute", "exec", passes_on=True)
def execute(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="A command with its arguments. No shell reads it.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option("--mesh", metavar="NAME", help="Run it on all ranks of this mesh of the job.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Run it on all ranks of all meshes.")] = False,
    point: Annotated[
        str | None,
        typer.Option("--point", metavar="DIM=N,…", help="Run it there only: hosts=1,gpus=0. Dims left out are whole."),
    ] = None,
    per_host: Annotated[
        str | None, typer.Option("--per-host", metavar="DIM=N,…", help="Ranks on each host: gpus=4. [one]")
    ] = None,
    env: Variables = None,
    workdir: Annotated[
        str | None, typer.Option("--workdir", metavar="DIR", help="Where it runs. [this folder, if it is there too]")
    ] = None,
    script: Annotated[
        str | None,
        typer.Option("--script", metavar="FILE", help="Run a script of bash of this machine; - is its input."),
    ] = None,
    kill_after: Annotated[bool, typer.Option("--kill", help="Kill the job when the command has ended.")] = False,
    state: State = Path(".monarch/job_state.pkl"),
) -> None:
    """Run a command on the hosts of the job that was applied: on the first rank of its first mesh, or where you say.

    The output of one rank appears unchanged, of several by line, after mesh and rank. Its environment has
    MONARCH_RANK_DIM and MONARCH_SIZE_DIM for each dim of its rank. ^C ends it everywhere. Exit status: the largest of
    all ranks. Options of monarch stand before the command; --debug before exec.
    """


@command("monarch.compiler.cli.jobs:shell")
def shell(
    mesh: Annotated[
        str | None, typer.Option("--mesh", metavar="NAME", help="On a host of this mesh of the job. [the first]")
    ] = None,
    point: Annotated[
        str | None, typer.Option("--point", metavar="DIM=N,…", help="On this host: hosts=1. [the first]")
    ] = None,
    env: Variables = None,
    workdir: Annotated[
        str | None, typer.Option("--workdir", metavar="DIR", help="Where it starts. [this folder, if it is there too]")
    ] = None,
    state: State = Path(".monarch/job_state.pkl"),
) -> None:
    """Run a shell in this terminal on a host of the job that was applied, until it ends.

    All that is typed goes there, ^C too. Exit status: the shell's.
    """


@command("monarch.compiler.cli.jobs:kill")
def kill(state: State = Path(".monarch/job_state.pkl")) -> None:
    """End the hosts of the applied job, and their processes."""


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


@command("monarch.compiler.cli.live:dashboard")
def dashboard(
    pid: Annotated[
        int | None, typer.Argument(metavar="[PID]", help="The program's process. [the only one that can be seen]")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="The port on loopback; 0 takes one that is free.")] = 0,
) -> None:
    """Serve a live page of a program of yours on this machine, until ^C: meshes, steps, losses, actors, failures.

    The page only reads. It is for anyone with its address, which ends with a token; from another machine reach it by
    `ssh -L PORT:127.0.0.1:PORT`. A program can be seen once it calls monarch.dashboard(), or where MONARCH_LIVE=1 is
    set.
    """


@command("monarch.compiler.cli.live:top")
def top(
    pid: Annotated[
        int | None, typer.Argument(metavar="[PID]", help="The program's process. [the only one that can be seen]")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print once, as JSON.")] = False,
) -> None:
    """Show the contents of `monarch dashboard` in this terminal, updated every second."""
