"""Attached hosts, and meshes on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from monarch.compiler.execution.executor import Executor
from monarch.compiler.plan import MeshSpec
from monarch.runtime.control.message import Message
from monarch.runtime.controller.connection import ActorProcesses, Connection
from monarch.runtime.controller.executor import MeshExecutor

if TYPE_CHECKING:  # gRPC is loaded where hosts are attached
    from monarch.runtime.control.security import Security
    from monarch.runtime.control.tree import HostTree


class AttachedHosts:
    """`monarch.compiler.plan.Hosts` over a tree of hosts."""

    def __init__(self, tree: HostTree, security: Security, connect: Callable[..., Connection], spares: int) -> None:
        """`connect(mesh, lost, actor_processes=...)` starts the workers of a mesh on these hosts, of which the last are
        `spares`."""
        self.tree = tree
        self.security = security
        self.before_close: list[Callable[[], None]] = []
        """What is to be done while the hosts can still be told something."""
        self._connect = connect
        self._spares = spares

    @property
    def attached(self) -> AttachedHosts:
        """These, as `LaunchedHosts` have them too."""
        return self

    @property
    def addresses(self) -> tuple[str, ...]:
        hosts = self.tree.hosts
        return tuple(host.address for host in hosts[: len(hosts) - self._spares])

    def start(self, mesh: MeshSpec, actor_processes: ActorProcesses | None = None) -> Executor:
        """With `actor_processes`, the workers are in processes of actors there."""
        return MeshExecutor(mesh, partial(self._connect, actor_processes=actor_processes))

    def end(self) -> None:
        """Close, and have the hosts themselves end, for all controllers. MonarchError where they are detached."""
        self.tree.send(Message("end"))
        self.close()

    def close(self) -> None:
        while self.before_close:
            self.before_close.pop()()
        self.tree.close()
