"""The agent of an attached host, for one program: in the process of `monarch host`, beside its service for workers.

It does the work of the root for the program's host (`host.Host`), listens for processes of other hosts on behalf of
those that it has started, and sends messages that these cannot send themselves (`network`).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from monarch.compiler.mesh import Shape
from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.errors import MeshFailure
from monarch.runtime.actors.messages.address import name_of, new_address, tag_of
from monarch.runtime.actors.messages.network import Across, refuse
from monarch.runtime.actors.messages.router import hand_over, listen
from monarch.runtime.actors.messages.strangers import Strangers
from monarch.runtime.actors.processes.group import ProcMeshSpec
from monarch.runtime.actors.processes.host import Host
from monarch.runtime.actors.processes.process import Process
from monarch.runtime.actors.processes.programs import WorkersInProcesses
from monarch.runtime.control.security import Security
from monarch.runtime.transport import sockets


class AgentOfHost:
    """`hosts.service.ActorsHere`: an agent on this host, for as long as a controller has actors here."""

    def __init__(self) -> None:
        self._agent: Agent | None = None

    def start(self, head: dict[str, Any], reached: dict[str, Any]) -> str:
        """See `hosts.service.ActorsHere.start`; `head` has the program's secret, the root's address, and this host's
        number in the job."""
        tls = None if reached["tls"] is None else Security.tls(reached["tls"]).files
        across = Across(bytes.fromhex(head["secret"]), tls, str(reached["bind"]), reached["advertise"])
        self._agent = Agent(str(head["root"]), int(head["number"]), across)
        return self._agent.address

    def processes(self, ranks: range, actor_processes: dict[str, Any]) -> WorkersInProcesses:
        """See `hosts.service.ActorsHere.processes`."""
        if self._agent is None:
            raise MonarchError("the processes that the mesh is to run in have ended")
        where = dict(zip(ranks, map(str, actor_processes["processes"]), strict=True))
        return WorkersInProcesses(self._agent, str(actor_processes["name"]), where, str(actor_processes["owner"]))

    def end(self) -> None:
        """See `hosts.service.ActorsHere.end`."""
        if self._agent is not None:
            self._agent.end()
            self._agent = None


class Agent(Process):
    """`root` is the address of the program's process, and `number` this host's in the program's job."""

    def __init__(self, root: str, number: int, across: Across) -> None:
        """Raises MonarchError where it cannot listen."""
        listener, where = sockets.listen_tcp(across.bind, across.advertise)
        address = new_address(tag_of(number, str(where["host"]), int(str(where["port"]))))
        shape, owner = Shape.unity(), (address, "")
        group = ProcMeshSpec(
            address, "agent", (address,), root, (address,), shape, owner, None, None, (), os.getcwd(), ()
        )
        super().__init__(group, 0, listen(address))
        self.ready.set()
        self._over = False
        self._agent = Host(self)
        self._agent.across = across
        self._agent.other_hosts.add(root)
        self.host = self._agent
        self.router.network.across = across
        self.router.broken = self._stop
        self._strangers = Strangers(listener, self.router, self._usher)
        self.router.start()

    def _usher(self, connection: socket.socket, name: str) -> None:
        """Have the process that somebody wants take the connection over. In the I/O thread."""
        if name == name_of(self.address):
            take: Callable[[socket.socket], None] = self.router.network.admit
        elif self._agent.has(name):
            take = partial(_hand_over, name)
        else:
            refuse(connection, f"it wants process {name[:8]}, which is not here")
            return
        try:
            threading.Thread(target=take, args=(connection,), name="monarch usher", daemon=True).start()
        except RuntimeError as error:
            refuse(connection, str(error))

    def unreached(self, address: str, why: str) -> None:
        if address == self.group.root:
            self.end()
        else:
            super().unreached(address, why)

    def unhandled(self, failure: MeshFailure) -> None:
        """It owns nothing that could fail."""

    def empty(self) -> None:
        pass

    def end(self) -> None:
        """End all processes that were started here, and this."""
        self.router.soon(self._end)

    def _end(self) -> None:
        self._stop()
        self.router.close()

    def _stop(self) -> None:
        """In the I/O thread, or once that is no more."""
        if not self._over:
            self._over = True
            self._agent.end()
            self._strangers.close()


def _hand_over(name: str, connection: socket.socket) -> None:
    try:
        hand_over(connection, name)
    except OSError as error:
        refuse(connection, f"it wants process {name[:8]}: {error}")
    else:
        connection.close()
