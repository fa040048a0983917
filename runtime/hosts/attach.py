"""Attaching hosts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from os import PathLike, fspath
from os.path import isfile
from pathlib import Path

from monarch.compiler.config import settings
from monarch.compiler.plan import MonarchError
from monarch.runtime.control.hosts_file import parse_hosts
from monarch.runtime.control.security import Security
from monarch.runtime.control.tree import HostTree
from monarch.runtime.hosts.attached import AttachedHosts
from monarch.runtime.hosts.remote import RemoteConnection
from monarch.runtime.transport.plug import IN_THE_CLEAR, TRANSPORTS


def attach(
    addresses: Sequence[str] | str | PathLike[str] | None,
    tls: str | PathLike[str] | None,
    token: str | PathLike[str] | None,
    trusted_network: bool,
    transports: Sequence[str] | None,
    fan_out: int,
    timeout: float | None,
    spares: int = 0,
    room: int = 0,
) -> AttachedHosts:
    """See `monarch.hosts`."""
    for name in transports or ():
        if name not in TRANSPORTS:
            raise MonarchError(f"no transport is called {name!r}", hint=f"there are {', '.join(TRANSPORTS)}.")
    timeout = settings.host_timeout if timeout is None else timeout
    security = security_from(tls, token, trusted_network)
    parsed = parse_hosts(addresses)
    if not 0 <= spares < len(parsed):
        raise MonarchError(f"{spares} spare hosts of {len(parsed)}", hint="at least one host is no spare.")
    if room < 0:
        raise MonarchError(f"room for {room} hosts", hint="0 or more can join.")
    tree = HostTree(parsed, security, fan_out, timeout, settings.host_reconnect)
    known = tuple(transports or default_transports(security))
    return AttachedHosts(tree, security, partial(RemoteConnection, tree, known, timeout), spares, room)


def default_transports(security: Security) -> list[str]:
    """All, in order of preference; a program that attaches hosts with TLS does not trust the network."""
    return [name for name in TRANSPORTS if not (security.uses_tls and name in IN_THE_CLEAR)]


def security_from(
    tls: str | PathLike[str] | None, token: str | PathLike[str] | None, trusted_network: bool = False
) -> Security:
    """The caller's values, or else the environment's."""
    if tls is None and token is None:
        tls, token = settings.tls, settings.token
    if tls is not None and token is not None:
        raise MonarchError(
            "attaching hosts takes TLS or a token, and got both", hint="give one: with TLS no token is needed."
        )
    if tls is not None:
        return Security.tls(fspath(tls))
    if token is not None:
        is_path = isinstance(token, PathLike) or "/" in token or isfile(token)
        return Security.token(Path(token) if is_path else token, trusted_network=trusted_network)
    raise MonarchError(
        "attaching hosts needs TLS or a token, and got neither",
        hint="make certificates (monarch ca DIR) and give tls=DIR here and --tls DIR to monarch host;\n"
        "on loopback, or where you trust the network, token= and --token-file will do.",
    )
