"""Running a command line: arguments in, errors as people read them, an exit status out."""

from __future__ import annotations

import functools
import gc
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import typer
from typer.models import CommandInfo

from monarch.compiler.cli.screen import clean, console
from monarch.compiler.errors import DeviceMeshError, MonarchError
from monarch.compiler.loading import load

Declaration = Callable[..., None]

FOUND, WRONG_INPUT, OWN_FAULT = 1, 2, 3


def collect_rarely() -> None:
    """Look for garbage after 50,000 new objects rather than 700. Imported modules stay, and to look through all of
    torch in the midst of imports takes a tenth of a second."""
    gc.set_threshold(50_000, 20, 20)


def commands(app: typer.Typer) -> Callable[..., Callable[[Declaration], Declaration]]:
    """The decorator of an app's commands. A command is declared by a function without a body, whose parameters are its
    options; "module:function", which is loaded when the command runs, is called with their values by name.
    `passes_on`: it runs another command line, whose options are not its own."""

    def command(
        function: str, name: str | None = None, passes_on: bool = False
    ) -> Callable[[Declaration], Declaration]:
        settings = {"allow_interspersed_args": not passes_on}

        def declared(declaration: Declaration) -> Declaration:
            @functools.wraps(declaration)
            def call(**options: Any) -> None:
                out = console(stderr=True)
                with out.status("loading …") if out.is_terminal else nullcontext():
                    run = load(function)
                run(**options)

            app.command(name, context_settings=settings)(call)
            return declaration

        return declared

    return command


def _is_interspersed(command: CommandInfo) -> bool:
    """Whether a command's options may stand behind its arguments: those that it passes on are not its own."""
    settings = command.context_settings or {}
    return bool(settings.get("allow_interspersed_args", True))


def run(app: typer.Typer, name: str) -> None:
    """Run it with this process's arguments, and exit. `--debug` anywhere before a `--`, or a command that passes
    its arguments on, shows an error's traceback."""
    collect_rarely()
    arguments = sys.argv[1:]
    ends = ["--", *(each.name for each in app.registered_commands if not _is_interspersed(each))]
    end = min((arguments.index(word) for word in ends if word in arguments), default=len(arguments))
    debug = "--debug" in arguments[:end]
    try:
        app([a for at, a in enumerate(arguments) if a != "--debug" or at >= end], prog_name=name)
    except MonarchError as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"{name}: error: {clean(str(error))}", err=True)
        raise SystemExit(FOUND if isinstance(error, DeviceMeshError) else WRONG_INPUT) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        what = clean(f"{type(error).__name__}: {error}")
        hint = "" if debug else "\n  run it again with --debug for the traceback, and report it."
        typer.echo(f"{name}: this is an internal error of {name}: {what}{hint}", err=True)
        raise SystemExit(OWN_FAULT) from None
