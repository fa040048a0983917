"""`monarch dashboard` and `monarch top`: a running program of this user, in a browser and in a terminal."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial

from monarch.compiler.cli.screen import console, print_json
from monarch.stdlib.live.listening import ask, choose
from monarch.stdlib.live.serving import Server
from monarch.stdlib.live.terminal import render

_SECONDS = 1.0


def dashboard(pid: int | None, port: int) -> None:
    """Serve a program's page until ^C."""
    pid = choose(pid)
    server = Server({what: partial(ask, pid, what) for what in ("snapshot", "stacks")}, port)
    out = console()
    out.print(f"process {pid} is shown at", soft_wrap=True)
    out.print(server.url, soft_wrap=True)
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)
    server.close()


def top(pid: int | None, once: bool, as_json: bool) -> None:
    """Print a program's activity, every second until ^C or its end."""
    pid = choose(pid)
    out = console()
    if as_json:
        print_json(ask(pid, "snapshot"))
        return
    with suppress(KeyboardInterrupt):
        while True:
            shown = render(ask(pid, "snapshot"))
            if once:
                out.print(shown)
                return
            out.clear()
            out.print(shown)
            time.sleep(_SECONDS)
