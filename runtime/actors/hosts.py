"""Attached hosts as a mesh: `monarch.hosts`."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from monarch.compiler.mesh import Shape
from monarch.runtime.actors.meshes import HostMesh
from monarch.runtime.hosts.attach import attach
from monarch.runtime.hosts.attached import AttachedHosts
from monarch.runtime.hosts.launch.launcher import LaunchedHosts


def mesh_of(attached: AttachedHosts | LaunchedHosts) -> HostMesh:
    """Hosts along the dim `hosts`, in order."""
    return HostMesh(Shape.of({"hosts": len(attached.addresses)}), None, attached)


def hosts(
    addresses: Sequence[str] | str | PathLike[str] | None = None,
    *,
    tls: str | PathLike[str] | None = None,
    token: str | PathLike[str] | None = None,
    trusted_network: bool = False,
    transports: Sequence[str] | None = None,
    fan_out: int = 8,
    timeout: float | None = None,
    spares: int = 0,
    room: int = 0,
) -> HostMesh:
    """Attach hosts on which `monarch host` runs.

        hosts = monarch.hosts(["node1:4242", "node2:4242"], tls="certificates")
        mesh = Mesh(data=16, hosts=hosts)

    `addresses`        a list of them, the path of a hosts file (one a line), or None for those of MONARCH_HOSTS
    `tls`              the folder with this machine's certificates, as `monarch ca` makes it; MONARCH_TLS without it
    `token`            instead of TLS, a token that the hosts know as well, or the path of the file that holds it (a
                       Path, or a string that contains a slash); MONARCH_TOKEN without it. On loopback only, unless
                       `trusted_network` says that nobody else listens between the hosts.
    `transports`       which to try between workers of two hosts, in order; by default all that there are, with TLS
                       only those that encrypt (verbs does not)
    `fan_out`          how many hosts each host (and this process) speaks to directly; the others are reached over them
    `timeout`          seconds after which a host that does not answer counts as lost; the setting `host_timeout`
                       without it
    `spares`           so many of them, the last, run nothing until `heal_mesh(mesh, policy="spare")` puts one in the
                       place of a host that is lost
    `room`             so many further hosts may join while a mesh runs (`HostMesh.join`): the mesh has workers for them
                       too, which until then are on the hosts that there are

    Raises MonarchError where a host cannot be attached, with the reason for each.
    """
    return mesh_of(attach(addresses, tls, token, trusted_network, transports, fan_out, timeout, spares, room))
