"""Attached hosts, and meshes on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike, fspath
from os.path import isfile
from pathlib import Path

from monarch.compiler.config import settings
from monarch.compiler.plan import Executor, MeshSpec, MonarchError
from monarch.runtime.control.hosts_file import parse_hosts
from monarch.runtime.control.security import Security
from monarch.runtime.control.tree import HostTree
from monarch.runtime.controller.connection import Beside
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.hosts.remote import RemoteConnection
from monarch.runtime.transport.plug import IN_THE_CLEAR, TRANSPORTS


class AttachedHosts:
    """`monarch.compiler.plan.Hosts` over a tree of hosts."""

    def __init__(self, tree: HostTree, security: Security, transports: Sequence[str], timeout: float) -> None:
        self.tree = tree
        self.security = security
        self.before_close: list[Callable[[], None]] = []
        """What is to be done while the hosts can still be told something."""
        self._connect = partial(RemoteConnection, tree, tuple(transports), timeout)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(host.address for host in self.tree.hosts)

    def start(self, mesh: MeshSpec, beside: Beside | None = None) -> Executor:
        """With `beside`, the workers are in processes of actors there."""
        return MeshExecutor(mesh, partial(self._connect, beside=beside))

    def close(self) -> None:
        while self.before_close:
            self.before_close.pop()()
        self.tree.close()


def attach(
    addresses: Sequence[str] | str | PathLike[str] | None,
    tls: str | PathLike[str] | None,
    token: str | PathLike[str] | None,
    trusted_network: bool,
    transports: Sequence[str] | None,
    fan_out: int,
    timeout: float,
) -> AttachedHosts:
    """See `monarch.hosts`."""
    for name in transports or ():
        if name not in TRANSPORTS:
            raise MonarchError(f"no transport is called {name!r}", hint=f"there are {', '.join(TRANSPORTS)}.")
    security = security_from(tls, token, trusted_network)
    tree = HostTree(parse_hosts(addresses), security, fan_out, timeout)
    return AttachedHosts(tree, security, transports or default_transports(security), timeout)


def default_transports(security: Security) -> list[str]:
    """All, in order of preference; who attaches hosts with TLS does not trust the network."""
    return [name for name in TRANSPORTS if not (security.uses_tls and name in IN_THE_CLEAR)]


def security_from(
    tls: str | PathLike[str] | None, token: str | PathLike[str] | None, trusted_network: bool = False
) -> Security:
    """What was given, or else what the environment says."""
    if tls is None and token is None:
        tls, token = settings.tls, settings.token
    if tls is not None and token is not None:
        raise MonarchError("both TLS and a token were given", hint="give one: with TLS no token is needed.")
    if tls is not None:
        return Security.tls(fspath(tls))
    if token is not None:
        is_path = isinstance(token, PathLike) or "/" in token or isfile(token)
        return Security.token(Path(token) if is_path else token, trusted_network=trusted_network)
    raise MonarchError(
        "hosts are attached with TLS or with a token, and neither was given",
        hint="make certificates (monarch ca DIR) and give tls=DIR here and --tls DIR to monarch host;\n"
        "on loopback, or where you trust the network, token= and --token-file will do.",
    )
