"""Hosts in this process, and what they were told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from monarch.runtime.control.agent import Agent, serve
from monarch.runtime.control.message import Message, Reply
from monarch.runtime.control.records import HostInfo
from monarch.runtime.control.security import Security
from monarch.runtime.control.tree import HostTree

SECONDS = 30.0
"""Far more than anything here takes."""
TOKEN = "correct horse battery staple"


def token_security() -> Security:
    return Security.token(TOKEN)


class Echo:
    """Says back what it is told; "progress" it counts, at "fail" it fails, and at "hold" it waits to be let go."""

    def __init__(self, reply: Reply, info: HostInfo) -> None:
        self.reply = reply
        self.info = info
        self.got: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.holds = threading.Event()
        self.let_go = threading.Event()
        self.ended = threading.Event()

    def receive(self, message: Message) -> None:
        if message.kind == "fail":
            if "last" in message.head:
                self.reply(Message("last", data=bytes(message.head["last"])))
            raise RuntimeError("it was asked to")
        if message.kind == "hold":
            self.holds.set()
            assert self.let_go.wait(SECONDS)
        self.got.put(message)
        if message.kind == "progress":
            self.reply(Message("progress", message.mesh, progress=tuple(message.head["numbers"])))
        elif message.kind != "quiet":
            self.reply(Message("echo", message.mesh, head=message.head, data=message.data))

    def detached(self) -> None:
        self.let_go.set()
        self.ended.set()


class Host:
    """A host in this process, and the services that it has made, in order."""

    def __init__(self, security: Security, listen: str = "127.0.0.1:0", **more: Any) -> None:
        self.services: queue.SimpleQueue[Echo] = queue.SimpleQueue()
        self.made: list[Echo] = []
        self.agent: Agent = serve(listen, security, self._make, **more)

    def _make(self, reply: Reply, info: HostInfo) -> Echo:
        made = Echo(reply, info)
        self.made.append(made)
        self.services.put(made)
        return made

    @property
    def address(self) -> str:
        return self.agent.address


@contextmanager
def running(count: int, security: Security | None = None, **more: Any) -> Iterator[list[Host]]:
    hosts = [Host(security or token_security(), **more) for _ in range(count)]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.agent.close()


@contextmanager
def attached(hosts: list[Host], security: Security | None = None, **more: Any) -> Iterator[HostTree]:
    tree = HostTree([host.address for host in hosts], security or token_security(), **more)
    try:
        yield tree
    finally:
        tree.close()


class Subscriber:
    """What comes up of one mesh."""

    def __init__(self, tree: HostTree, mesh: int = 0) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.losses: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        tree.subscribe(mesh, self.messages.put, lambda host, reason: self.losses.put((host, reason)))

    def next(self) -> Message:
        return self.messages.get(timeout=SECONDS)

    def several(self, count: int) -> list[Message]:
        return [self.next() for _ in range(count)]

    def until(self, wanted: Callable[[Message], bool]) -> Message:
        while not wanted(message := self.next()):
            pass
        return message

    def lost(self, count: int) -> dict[int, str]:
        return dict(self.losses.get(timeout=SECONDS) for _ in range(count))
