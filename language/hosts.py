"""Hosts: the machines on which the workers of meshes run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Self

from monarch.compiler.errors import LayoutError
from monarch.compiler.execution.executor import Executor, Hosts
from monarch.compiler.execution.factories import attach_hosts, executor_for
from monarch.compiler.types import MeshSpec
from monarch.language.mesh import Mesh


class HostMesh:
    """Attached hosts, in order. `Mesh(data=4, hosts=hosts)` and `hosts.spawn_procs({"gpus": 8})` start workers on them.

    Leaving a `with hosts:` block, `close`, or the end of this process ends what runs on them for it; the hosts stay.
    """

    def __init__(self, attached: Hosts) -> None:
        self._attached = attached

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where each host listens, `host:port`, in the order of the hosts."""
        return self._attached.addresses

    @property
    def attached(self) -> Hosts:
        """What meshes are started on, whether of workers or of actors."""
        return self._attached

    def __len__(self) -> int:
        return len(self.addresses)

    def start(self, mesh: MeshSpec) -> Executor:
        """Start the workers of `mesh` on these hosts, in equal blocks, and give what runs plans on them.

        Raises MonarchError where the workers cannot be divided evenly over the hosts, and where one cannot start them.
        """
        return self._attached.start(mesh)

    def spawn_procs(self, per_host: Mapping[str, int] | None = None) -> Mesh:
        """A mesh of so many workers on each host: dim `hosts`, if there are several, and the dims given.

        hosts.spawn_procs({"gpus": 8})      # with two hosts, Mesh(hosts=2, gpus=8)
        """
        dims = dict(per_host or {})
        if "hosts" in dims:
            raise LayoutError("the mesh dim 'hosts' counts the hosts", hint="call what is on each host otherwise.")
        if len(self) > 1:
            dims = {"hosts": len(self), **dims}
        return Mesh(tuple(dims.values()), tuple(dims), hosts=self)

    def close(self) -> None:
        """Let go of the hosts: meshes on them end, and hosts that were launched with it end too."""
        self._attached.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HostMesh({', '.join(address or 'this host' for address in self.addresses)})"


def hosts(
    addresses: Sequence[str] | str | PathLike[str] | None = None,
    *,
    tls: str | PathLike[str] | None = None,
    token: str | PathLike[str] | None = None,
    trusted_network: bool = False,
    transports: Sequence[str] | None = None,
    fan_out: int = 8,
    timeout: float = 10.0,
) -> HostMesh:
    """Attach hosts on which `monarch host` runs.

        hosts = monarch.hosts(["node1:4242", "node2:4242"], tls="certificates")
        mesh = Mesh(data=16, hosts=hosts)

    `addresses`        a list of them, the path of a hosts file (one a line), or None for what MONARCH_HOSTS holds
    `tls`              the folder with this machine's certificates, as `monarch ca` makes it; MONARCH_TLS without it
    `token`            instead of TLS, a token that the hosts know as well, or the path of the file that holds it (a
                       Path, or a string that contains a slash); MONARCH_TOKEN without it. On loopback only, unless
                       `trusted_network` says that nobody else listens between the hosts.
    `transports`       which to try between workers of two hosts, in order; by default all that there are, with TLS
                       only those that encrypt (verbs does not)
    `fan_out`          how many hosts each host (and this process) speaks to directly; the others are reached over them
    `timeout`          seconds after which a host that does not answer counts as lost

    Raises MonarchError where a host cannot be attached, with the reason for each.
    """
    return HostMesh(
        attach_hosts(
            addresses=addresses,
            tls=tls,
            token=token,
            trusted_network=trusted_network,
            transports=transports,
            fan_out=fan_out,
            timeout=timeout,
        )
    )


class _ThisHost:
    """This machine: no port, no network."""

    addresses = ("",)

    def start(self, mesh: MeshSpec) -> Executor:
        return executor_for(mesh)

    def close(self) -> None:
        pass


def this_host() -> HostMesh:
    """The machine that this process runs on: meshes made without `hosts` run here."""
    return HostMesh(_ThisHost())


__all__ = ["HostMesh", "hosts", "this_host"]
