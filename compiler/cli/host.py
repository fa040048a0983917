"""`monarch host`: this machine as a host."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path

import typer

from monarch.compiler.errors import MonarchError
from monarch.runtime.actors.processes.agent import AgentOfHost
from monarch.runtime.control.agent import serve
from monarch.runtime.control.host_info import cores
from monarch.runtime.control.message import Reply
from monarch.runtime.control.records import HostInfo
from monarch.runtime.control.security import Security, split_address
from monarch.runtime.hosts.service import HostService
from monarch.runtime.processes.parent import warm_parent

_WILDCARDS = ("0.0.0.0", "::")


def host(
    listen: str,
    tls: Path | None,
    token_file: Path | None,
    trusted_network: bool,
    data_bind: str | None,
    advertise: str | None,
) -> None:
    """Serve until the process is ended."""
    if (tls is None) == (token_file is None):
        raise MonarchError(
            "a host listens with --tls or with --token-file, " + ("not both" if tls else "and neither was given"),
            hint="monarch ca DIR makes certificates: monarch host --listen ADDRESS --tls DIR/NAME",
        )
    if trusted_network and tls is not None:
        raise MonarchError("--trusted-network goes with --token-file: with TLS no network has to be trusted")
    if tls is not None:
        security = Security.tls(tls)
    else:
        assert token_file is not None
        security = Security.token(token_file, trusted_network=trusted_network)
    name, _ = split_address(listen)
    bind = data_bind or name
    if advertise is None and bind in _WILDCARDS:
        raise MonarchError(
            f"{bind} is every address of this machine, and workers of other hosts need one",
            hint="say by which they reach it: --data-bind 10.0.0.1, or --advertise node1",
        )
    security.check(listen)
    if data_bind is not None:  # without TLS, what workers send each other is not encrypted either
        security.check(f"[{data_bind}]:0" if ":" in data_bind else f"{data_bind}:0")
    _serve(listen, security, bind, advertise, tls)


def _serve(listen: str, security: Security, bind: str, advertise: str | None, tls: Path | None) -> None:
    # What workers are forked from has to be there before gRPC starts its threads.
    warm_parent()
    logging.basicConfig(format="monarch host: %(asctime)s %(levelname)s: %(message)s", level=logging.INFO)
    folder = None if tls is None else str(tls.resolve())
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())

    def service(reply: Reply, _: HostInfo) -> HostService:
        return HostService(reply, bind, folder, advertise, AgentOfHost(), ended.set)

    agent = serve(listen, security, service, advertise=advertise or "", data_bind=bind)
    typer.echo(f"monarch host: serving on {agent.address} ({security}), {cores()} cores")
    ended.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # a second one does not wait for anything
    agent.close()
    typer.echo("monarch host: ended")
