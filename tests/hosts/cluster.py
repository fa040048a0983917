"""`monarch host` on each host of a network, with TLS."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from monarch.runtime.control.certificates import make_certificates
from tests.hosts.network import Host, Network, Process

MONARCH = (str(Path(sys.executable).with_name("monarch")),)


@dataclass
class Cluster:
    network: Network
    agents: list[Process]
    addresses: list[str]
    tls: Path
    """The controller's certificates."""

    @property
    def hosts(self) -> list[Host]:
        return self.network.hosts


@contextmanager
def cluster(network: Network, folder: Path, options: Sequence[str] = ()) -> Iterator[Cluster]:
    """A host agent in each namespace. They end with the block, or with their namespaces."""
    made = make_certificates(folder, [host.address for host in network.hosts])
    folders = {path.name: path for path in made}
    agents = [
        host.start(
            [*MONARCH, "host", "--listen", f"{host.address}:0", "--tls", folders[host.address], *options],
            {"OMP_WAIT_POLICY": "passive"},  # each of them takes the machine's cores for its own
        )
        for host in network.hosts
    ]
    try:
        addresses = [agent.wait_for(r"serving on (\S+)").group(1) for agent in agents]
        yield Cluster(network, agents, addresses, folders["controller"])
    finally:
        for agent in agents:
            agent.end()
