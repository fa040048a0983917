"""Hosts that are started for a program, and end with it: `monarch.launch.ray(nodes=2, cpus_per_node=8)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monarch.runtime.actors.hosts import mesh_of
from monarch.runtime.actors.meshes import HostMesh
from monarch.runtime.hosts.launch.launcher import launch
from monarch.runtime.hosts.launch.local import LocalLauncher
from monarch.runtime.hosts.launch.on_ray import RayLauncher

__all__ = ["local", "ray"]


def ray(
    nodes: int,
    *,
    cpus_per_node: float = 1,
    gpus_per_node: float = 0,
    resources_per_node: Mapping[str, float] | None = None,
    actor_options: Mapping[str, Any] | None = None,
    imports: Sequence[str] = (),
    trusted_network: bool = False,
    transports: Sequence[str] | None = None,
    fan_out: int = 8,
    timeout: float = 60.0,
) -> HostMesh:
    """Hosts on nodes of a Ray cluster, one a node.

        with monarch.launch.ray(nodes=2, gpus_per_node=8) as hosts:
            mesh = Mesh(data=16, hosts=hosts)

    Uses the cluster that Ray is connected to (`ray.init`), or the one that runs on this machine. Each node has to have
    Monarch installed, or to get it by a runtime environment.

    `cpus_per_node`, `gpus_per_node`, `resources_per_node`   what Ray keeps for each host, in a placement group
    `actor_options`      of the actors that keep the hosts, as Ray's `.options(...)` takes them
    `imports`            modules that the hosts import first, such as those that register ops of your own
    `trusted_network`    nobody else listens between the nodes: a token and no encryption, rather than certificates
                         that are made for these hosts alone. Either goes to the nodes through Ray.
    `transports`, `fan_out`    as those of `monarch.hosts`
    `timeout`            seconds to wait for free nodes, and for hosts to start

    Raises MonarchError where there is no cluster, or not enough nodes, or a host does not start.
    """
    launcher = RayLauncher(nodes, cpus_per_node, gpus_per_node, resources_per_node, actor_options, imports, timeout)
    return mesh_of(launch(launcher, trusted_network=trusted_network, transports=transports, fan_out=fan_out))


def local(
    hosts: int,
    *,
    imports: Sequence[str] = (),
    trusted_network: bool = False,
    transports: Sequence[str] | None = None,
    fan_out: int = 8,
) -> HostMesh:
    """Hosts on this machine, over its loopback: to try out what is to run over several. They import these modules
    first. See `monarch.hosts`."""
    return mesh_of(
        launch(LocalLauncher(hosts, imports), trusted_network=trusted_network, transports=transports, fan_out=fan_out)
    )
