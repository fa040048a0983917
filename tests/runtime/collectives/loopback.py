"""Hosts without a network: services in this process, each with a thread of its own, as an agent gives it one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from monarch.compiler.execution.executor import Handle
from monarch.compiler.plan import MeshSpec, Plan
from monarch.compiler.plan.options import CompileOptions
from monarch.runtime.control.message import Message
from monarch.runtime.controller.executor import Argument, Connect, MeshExecutor
from monarch.runtime.controller.local import LocalConnection
from monarch.runtime.hosts.remote import RemoteConnection
from monarch.runtime.hosts.service import HostService
from tests.runtime.collectives.nccl import over_nccl, standing_in


@dataclass(frozen=True)
class Named:
    address: str


class LoopbackTree:
    """What `control.tree.HostTree` is to a connection."""

    def __init__(self, hosts: int) -> None:
        self.hosts = [Named(f"host{number}:4242") for number in range(hosts)]
        self.sent: list[str] = []
        self.lost: set[int] = set()
        self.refuses: dict[int, str] = {}
        """Why hosts start no workers."""
        self._members: dict[int, set[int]] = {}
        self._subscribers: dict[int, tuple[Callable[[Message], None], Callable[[int, str], None]]] = {}
        self._least: dict[int, dict[int, tuple[int, ...]]] = {}
        self._lock = threading.Lock()
        self._queues: list[queue.Queue[Any]] = []
        self.services: list[HostService] = []
        self._threads: list[threading.Thread] = []
        for host in self.hosts:
            self._open(host)

    def join(self, address: str) -> None:
        self.hosts.append(Named(address))
        self._open(self.hosts[-1])

    def _open(self, host: Named) -> None:
        number = self.hosts.index(host)
        self._queues.append(queue.Queue())
        self.services.append(HostService(self._reply(number), "127.0.0.1", None))
        self._threads.append(threading.Thread(target=self._serve, args=(number,)))
        self._threads[-1].start()

    def send(self, message: Message, hosts: Sequence[int] | None = None) -> None:
        self.sent.append(message.kind)
        to = set(range(len(self.hosts)) if hosts is None else hosts) - self.lost
        self._members.setdefault(message.mesh, set()).update(to)
        for host in to:
            self._queues[host].put(message)

    def subscribe(self, mesh: int, receive: Callable[[Message], None], lost: Callable[[int, str], None]) -> None:
        self._subscribers[mesh] = (receive, lost)

    def unsubscribe(self, mesh: int) -> None:
        self._subscribers.pop(mesh, None)

    def lose(self, host: int, why: str) -> None:
        """As if the host were out of reach, and had noticed that too."""
        self.lost.add(host)
        self._queues[host].put(None)
        for _, lost in list(self._subscribers.values()):
            lost(host, why)

    def _serve(self, number: int) -> None:
        while (message := self._queues[number].get()) is not None:
            if message.kind == "start" and number in self.refuses:
                refused = {"message": self.refuses[number], "hint": "", "place": int(message.head["host"])}
                self._reply(number)(Message("refused", message.mesh, head=refused))
            else:
                self.services[number].receive(message)
        self.services[number].detached()

    def _reply(self, number: int) -> Callable[[Message], None]:
        def reply(message: Message) -> None:
            with self._lock:
                if number in self.lost:
                    return
                if message.progress:
                    told = self._least.setdefault(message.mesh, {})
                    members = self._members[message.mesh]
                    before = self._combined(told, members)
                    told[number] = message.progress
                    after = self._combined(told, members)
                    if after == before:
                        return
                    message = replace(message, progress=after)
                subscriber = self._subscribers.get(message.mesh)
                if subscriber is not None:
                    subscriber[0](replace(message, host=number))

        return reply

    def _combined(self, told: dict[int, tuple[int, ...]], members: set[int]) -> tuple[int, ...]:
        if len(told) < len(members):
            return ()
        return tuple(min(column) for column in zip(*told.values(), strict=True))

    def close(self) -> None:
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.join()


class _Choosing(MeshExecutor):
    """Runs every plan over process groups."""

    chosen: Callable[[Plan], Plan]

    def __init__(self, mesh: MeshSpec, connect: Connect = LocalConnection) -> None:
        super().__init__(mesh, connect)
        self._chosen: dict[int, tuple[Plan, Plan]] = {}

    def run(
        self, plan: Plan, arguments: Sequence[Argument], bind: Any = None, part: Any = None, **more: Any
    ) -> list[Handle]:
        _, chosen = self._chosen.setdefault(id(plan), (plan, type(self).chosen(plan)))
        return super().run(chosen, arguments, bind, part, **more)


class _Gloo(_Choosing):
    chosen = staticmethod(lambda plan: replace(plan, options=CompileOptions(collectives="gloo")))


class _Nccl(_Choosing):
    chosen = staticmethod(over_nccl)


KINDS = {"": MeshExecutor, "gloo": _Gloo, "nccl": _Nccl}


@contextmanager
def executor_on(where: str, mesh: MeshSpec) -> Iterator[MeshExecutor]:
    """A mesh of this host's ("local"), or of several hosts in one process, whose workers speak TCP ("hosts"); with
    "gloo" behind it, all its plans choose Gloo, with "nccl" NCCL, for which Gloo stands in, and CPUs for GPUs."""
    where, _, backend = where.partition(" ")
    kind = KINDS[backend]
    with standing_in() if backend == "nccl" else nullcontext():
        if where == "local":
            with kind(mesh) as executor:
                yield executor
            return
        tree = LoopbackTree(next(count for count in (2, 3, 1) if mesh.workers % count == 0))
        try:
            with kind(mesh, partial(RemoteConnection, tree, ["tcp"], 30.0)) as executor:
                yield executor
        finally:
            tree.close()


WAYS = ("local", "hosts", "local gloo", "hosts gloo")
