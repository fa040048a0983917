"""Hosts by the names that PyTorch Monarch's programs know: `run_worker_loop_forever` on each, and `attach_to_workers`.

They are those of `monarch host` and `monarch.hosts`, and prove their identity as these do. Where a program says
`ca="trust_all_connections"`, the credentials are those of the settings `tls` and `token`, and a token is taken on any
network; a `ca` is otherwise the folder with this end's certificates, as `monarch ca` makes it.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from time import monotonic, sleep
from typing import NoReturn

from monarch.compiler.config import settings
from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.hosts import mesh_of
from monarch.runtime.actors.meshes import HostMesh
from monarch.runtime.actors.serving import serve_host
from monarch.runtime.control.security import split_address
from monarch.runtime.future import Future
from monarch.runtime.hosts.attach import attach, security_from

TRUST = "trust_all_connections"
_ADDRESS = re.compile(r"(?:tcp|tls)://([^@/]+)(?:@(?:tcp|tls)://([^@/]+))?")
_LOOK_SECONDS, _ANSWER_SECONDS = 0.05, 5.0
_TRANSPORTS = ("tcp", "tls", "ipc")


def run_worker_loop_forever(*, private_key: None = None, ca: str | PathLike[str], address: str) -> NoReturn:
    """Make this process a host, until `HostMesh.shutdown` or a signal ends it: the process exits then.

    `ca`       the folder with this host's certificates, or "trust_all_connections", for those of the settings
    `address`  where it listens: "tcp://node1:4242"; "tcp://node1:4242@tcp://0.0.0.0:4242" where that differs from how
               it is reached. "*" is every address, and the host is reached by its name.

    Raises MonarchError where it cannot listen, or has no credentials.
    """
    run_worker_loop_until_shutdown(private_key=private_key, ca=ca, address=address)
    sys.exit(0)


def run_worker_loop_until_shutdown(*, private_key: None = None, ca: str | PathLike[str], address: str) -> None:
    """The same, and returns at the end."""
    given = _folder(private_key, ca)
    security = security_from(given, None, given is None)
    reached, listen = _parts(address)
    name, port = split_address(reached.replace("*:", "0.0.0.0:", 1))
    if name == "0.0.0.0":
        name = socket.gethostname()
    at, _ = split_address(listen)
    security.check(listen)
    folder = None if security.folder is None else Path(security.folder)
    serve_host(listen, security, at, name if name != at else None, folder)


def attach_to_workers(
    *,
    private_key: None = None,
    ca: str | PathLike[str],
    workers: Sequence[str | Future[str]],
    name: str | None = None,
) -> HostMesh:
    """Attach such hosts, "tcp://node1:4242" each, as a mesh with the dim `hosts`: like `monarch.hosts`, but this waits
    for those that do not listen yet, as long as the setting `host_timeout` says. `name` is not used. Raises
    MonarchError where one cannot be attached, with the reason for each."""
    folder = _folder(private_key, ca)
    addresses = [_parts(each if isinstance(each, str) else each.get())[0] for each in workers]
    security_from(folder, None, folder is None)  # or else missing credentials would be waited for
    deadline = monotonic() + settings.host_timeout
    listened = False
    while True:
        try:
            return mesh_of(attach(addresses, folder, None, folder is None, None, 8, None))
        except MonarchError:
            before, listened = listened, all(map(_listens, addresses))
            if before or monotonic() >= deadline:
                raise
        if not listened:
            sleep(_LOOK_SECONDS)


def _listens(address: str) -> bool:
    """Whether waiting for a host is of no use: it listens, or something else is wrong with its address."""
    try:
        socket.create_connection(split_address(address), timeout=_ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return False
    except (OSError, MonarchError):
        return True
    return True


def enable_transport(transport: str) -> None:
    """Say how processes of several hosts are to speak: "tcp", "tls" or "ipc", or an address such as "tcp://node1:4242".
    It changes nothing: they speak as the hosts' credentials say, and those of one host by sockets of its kernel. Raises
    ValueError for another word."""
    if transport not in _TRANSPORTS and not _ADDRESS.fullmatch(transport):
        raise ValueError(f"there is no transport {transport!r}: there are {', '.join(_TRANSPORTS)}")


def _folder(private_key: object, ca: object) -> str | PathLike[str] | None:
    """The folder of certificates; None for the settings' credentials."""
    if private_key is not None or not isinstance(ca, str | PathLike):
        raise MonarchError(
            "pass certificates as a folder, which holds the key too, and not as bytes",
            hint=f'ca="certificates/node1", as `monarch ca` makes it, or "{TRUST}" for the credentials in\n'
            "MONARCH_TLS or MONARCH_TOKEN.",
        )
    return None if ca == TRUST else ca


def _parts(address: str) -> tuple[str, str]:
    """How a host is reached, and where it listens: "node1:4242" each."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise MonarchError(f"{address!r} is no address of a host here", hint='write it as "tcp://node1:4242".')
    return found[1], (found[2] or found[1]).replace("*:", "0.0.0.0:", 1)
