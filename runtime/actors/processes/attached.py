"""The root's side of attached hosts: an agent on each, and what becomes of the processes there when a host is lost."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING

from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.errors import SupervisionError
from monarch.runtime.actors.messages.address import host_of
from monarch.runtime.actors.messages.message import EMPTY, Payload
from monarch.runtime.actors.messages.network import Across
from monarch.runtime.actors.messages.protocol import OUTPUT, READY, SPAWNED, Head
from monarch.runtime.actors.processes.group import Death, ProcMeshSpec
from monarch.runtime.actors.processes.ports import One
from monarch.runtime.control.message import Message
from monarch.runtime.transport.reach import use_tls

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.host import Root
    from monarch.runtime.hosts.attached import AttachedHosts

_TELL_SECONDS = 10.0  # unless the program is being shut down beside this

ACTORS = 0
"""The number under which the control plane carries messages about actors; meshes of programs count from 1."""


class OtherHosts:
    """The hosts that a program has actors on, besides its own."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._secret = secrets.token_bytes(32)
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._attached: dict[AttachedHosts, tuple[str, ...]] = {}
        self._processes: dict[str, dict[str, tuple[str, int]]] = {}
        root.handle(SPAWNED, self._on_spawned)
        root.handle(OUTPUT, self._on_output)

    def attach(self, hosts: AttachedHosts) -> tuple[str, ...]:
        """The addresses of the hosts' agents, which are made where there are none. Raises MonarchError."""
        with self._lock:
            if hosts not in self._attached:
                self._attached[hosts] = self._attach(hosts)
                hosts.before_close.append(lambda: self._detach(hosts))
            return self._attached[hosts]

    def agents_there(self, hosts: AttachedHosts) -> tuple[str, ...]:
        with self._lock:
            return self._attached.get(hosts, ())

    def attached_with(self, agents: tuple[str, ...]) -> AttachedHosts | None:
        """The hosts that have these agents, in order."""
        with self._lock:
            return next((hosts for hosts, there in self._attached.items() if there == agents), None)

    def _attach(self, hosts: AttachedHosts) -> tuple[str, ...]:
        tree, root = hosts.tree, self._root
        waiting = _Answers(len(tree.hosts))
        agents: dict[int, str] = {}

        def lost(host: int, why: str) -> None:
            waiting.lost(host, why)
            root.router.soon(lambda: self.lost(agents.get(host, ""), f"is out of reach: {why}"))

        tree.subscribe(ACTORS, waiting.take, lost)
        for host in range(len(tree.hosts)):
            head = {"secret": self._secret.hex(), "root": root.address, "number": next(self._numbers)}
            tree.send(Message("actors", ACTORS, head=head), hosts=[host])
        agents.update(waiting.all(tree.timeout, [host.address for host in tree.hosts]))
        across = Across(self._secret, hosts.security.files, "127.0.0.1", None)
        use_tls(across.contexts)
        root.host.across = across
        asked = []
        for agent in agents.values():
            root.router.network.join(host_of(agent), across)
            root.host.other_hosts.add(agent)
            answer: One[None] = One(agent)
            port = root.ports.open(answer)
            root.router.send(agent, (READY, (root.address, port, 0)), EMPTY)
            asked.append(answer.future)
        try:
            for future in asked:
                future.get()
        except SupervisionError as error:
            raise MonarchError(
                f"actors cannot be started: {error}",
                hint="the program connects to a port of each host's that its agent chooses: look for a firewall.",
            ) from None
        return tuple(agents[host] for host in range(len(tree.hosts)))

    def _on_spawned(self, sender: str, head: Head, payload: Payload) -> None:
        """Processes are about to be started on other hosts, by whomever."""
        group: ProcMeshSpec = payload.decode()
        for rank, address in enumerate(group.addresses):
            agent = group.host_of(rank)
            if host_of(agent):
                self._processes.setdefault(agent, {})[address] = group.name, rank
        for agent in {agent for agent in group.hosts if agent in self._root.dead}:
            self.lost(agent, self._root.dead[agent].reason)

    def ended(self, address: str) -> None:
        """A process has ended, on one of these hosts or elsewhere. In the I/O thread."""
        for processes in list(self._processes.values()):
            processes.pop(address, None)

    def places(self) -> list[tuple[str, str]]:
        """The processes on these hosts, by address, and their names."""
        there = [process for processes in list(self._processes.values()) for process in list(processes.items())]
        return [(address, f"{name}[{rank}]") for address, (name, rank) in there]

    def _on_output(self, sender: str, head: Head, payload: Payload) -> None:
        self._root.write(head[1], head[2])

    def _detach(self, hosts: AttachedHosts) -> None:
        """The program drops these hosts: all that runs there for it ends, and that is no failure."""
        with self._lock:
            agents = self._attached.pop(hosts, ())
        if not agents:
            return
        told = threading.Event()

        def tell() -> None:
            for agent in agents:
                self.lost(agent, "was stopped: its host was detached", expected=True)
            told.set()

        self._root.router.soon(tell)
        told.wait(_TELL_SECONDS)

    def lost(self, agent: str, why: str, expected: bool = False) -> None:
        """A host is out of reach: all processes there count as ended. In the I/O thread."""
        if agent not in self._root.host.other_hosts and agent not in self._processes:
            return
        self._root.host.other_hosts.discard(agent)
        processes = {**self._processes.pop(agent, {}), agent: ("agent", 0)}
        for address, (name, rank) in processes.items():
            if address not in self._root.dead:
                self._root.host.tell(Death(address, name, rank, why, None, (), expected), lost=True)

    def close(self) -> None:
        """Have the agents end, and all that they have started."""
        with self._lock:
            attached = list(self._attached)
            self._attached.clear()
        for hosts in attached:
            with suppress(MonarchError):
                hosts.tree.send(Message("actors", ACTORS))
            hosts.tree.unsubscribe(ACTORS)


class _Answers:
    """The answers of hosts to the request for an agent."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._changed = threading.Condition()
        self._agents: dict[int, str] = {}
        self._failed: dict[int, tuple[str, str]] = {}

    def take(self, message: Message) -> None:
        with self._changed:
            if message.kind == "actors":
                self._agents[message.host] = str(message.head["address"])
            else:
                self._failed[message.host] = str(message.head["message"]), str(message.head["hint"])
            self._changed.notify_all()

    def lost(self, host: int, why: str) -> None:
        with self._changed:
            self._failed.setdefault(host, (why, ""))
            self._changed.notify_all()

    def all(self, seconds: float, names: list[str]) -> dict[int, str]:
        deadline = monotonic() + seconds
        with self._changed:
            done: Callable[[], bool] = lambda: bool(self._failed) or len(self._agents) == self._hosts  # noqa: E731
            self._changed.wait_for(done, deadline - monotonic())
            for host, (message, hint) in self._failed.items():
                raise MonarchError(f"no actors can be started on host {names[host]}: {message}", hint=hint)
            late = [name for host, name in enumerate(names) if host not in self._agents]
            if late:
                raise MonarchError(f"no actors can be started: no answer in time from {', '.join(late)}")
            return dict(self._agents)
