"""`monarch host` on each host of a network, with TLS or with a token."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from monarch.runtime.control.certificates import make_certificates
from tests.hosts.network import Host, Network, Process

MONARCH = ("-c", "from monarch.compiler.cli.hosts import main; main()")


@dataclass
class Cluster:
    network: Network
    agents: list[Process]
    addresses: list[str]
    tls: Path | None
    """The controller's certificates."""
    token: Path | None
    """That of hosts without TLS, on a network that they trust."""

    @property
    def hosts(self) -> list[Host]:
        return self.network.hosts


@contextmanager
def cluster(network: Network, folder: Path, options: Sequence[str] = (), *, trusted: bool = False) -> Iterator[Cluster]:
    """A host agent in each namespace. They end with the block, or with their namespaces."""
    tls = token = None
    if trusted:
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        security = {host.address: ["--token-file", str(token), "--trusted-network"] for host in network.hosts}
    else:
        names = [f"{host.address},127.0.0.1" for host in network.hosts]  # a `chaos.Link` to them is on this machine
        folders = {path.name: path for path in make_certificates(folder, names)}
        tls = folders["controller"]
        security = {host.address: ["--tls", str(folders[host.address])] for host in network.hosts}
    agents = [
        host.program(*MONARCH, "host", "--listen", f"{host.address}:0", *security[host.address], *options)
        for host in network.hosts
    ]
    try:
        addresses = [agent.wait_for(r"serving on (\S+)").group(1) for agent in agents]
        yield Cluster(network, agents, addresses, tls, token)
    finally:
        for agent in agents:
            agent.end()
