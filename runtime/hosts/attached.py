"""Attached hosts, and meshes on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from monarch.compiler.execution.executor import Executor
from monarch.compiler.plan import MeshSpec
from monarch.runtime.control.hosts_file import parse_hosts
from monarch.runtime.control.message import Message
from monarch.runtime.controller.connection import ActorProcesses, Connection
from monarch.runtime.controller.executor import MeshExecutor

if TYPE_CHECKING:  # gRPC is loaded where hosts are attached
    from monarch.runtime.control.security import Security
    from monarch.runtime.control.tree import HostTree


class AttachedHosts:
    """`monarch.compiler.plan.Hosts` over a tree of hosts."""

    def __init__(
        self, tree: HostTree, security: Security, connect: Callable[..., Connection], spares: int, room: int
    ) -> None:
        """`connect(mesh, lost, places=..., joining=..., actor_processes=...)` starts the workers of a mesh on these
        hosts, of which the last are `spares`; there are places for `room` others that join."""
        self.tree = tree
        self.security = security
        self.before_close: list[Callable[[], None]] = []
        """Functions to call while the hosts can still be reached."""
        self._connect = connect
        self._joining, self._room = len(tree.hosts), room
        self._own = self._joining - spares

    @property
    def attached(self) -> AttachedHosts:
        """These, as `LaunchedHosts` have them too."""
        return self

    @property
    def addresses(self) -> tuple[str, ...]:
        hosts = self.tree.hosts
        return tuple(host.address for host in hosts[: self._own])

    def join(self, address: str) -> None:
        """See `HostMesh.join`."""
        for each in parse_hosts([address]):
            self.tree.join(each)

    def places(self) -> list[int]:
        """The host of each place of a mesh that is made now, by its number in the tree."""
        joined = range(self._joining, len(self.tree.hosts))
        own = range(self._own)
        return [*own, *(joined[at] if at < len(joined) else own[at % len(own)] for at in range(self._room))]

    def start(self, mesh: MeshSpec, actor_processes: ActorProcesses | None = None) -> Executor:
        """With `actor_processes`, the workers are in processes of actors there."""
        connect = partial(self._connect, places=self.places(), joining=self._joining)
        return MeshExecutor(mesh, partial(connect, actor_processes=actor_processes))

    def end(self) -> None:
        """Close, and have the hosts themselves end, for all controllers. MonarchError where they are detached."""
        self.tree.send(Message("end"))
        self.close()

    def close(self) -> None:
        while self.before_close:
            self.before_close.pop()()
        self.tree.close()
