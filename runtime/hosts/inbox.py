"""The messages of hosts about a mesh.

They come in threads of the control plane's, and wait here until the controller reads them. Only three things must not
wait for the controller, and are done at once: workers that stand still after a failed step are released, those that
wait for others get the progress of these, and all hosts get the news of a worker's end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from monarch.compiler.plan import MonarchError
from monarch.runtime.control.message import Message


class Host(Protocol):
    @property
    def address(self) -> str: ...


class Tree(Protocol):
    """The part of `control.tree.HostTree` that this module needs."""

    @property
    def hosts(self) -> Sequence[Host]: ...

    def send(self, message: Message, hosts: Sequence[int] | None = None) -> None: ...

    def subscribe(self, mesh: int, receive: Callable[[Message], None], lost: Callable[[int, str], None]) -> None: ...

    def unsubscribe(self, mesh: int) -> None: ...


class Inbox:
    """The unread messages of the hosts about one mesh; and which hosts these are."""

    def __init__(self, tree: Tree, number: int, hosts: Sequence[int]) -> None:
        self._tree = tree
        self.number = number
        """By which its hosts know the mesh."""
        self.hosts = list(hosts)
        """By place in the mesh, the number of the host in the tree. One host can have several places."""
        self._messages: deque[Message] = deque()
        self._lock = threading.RLock()  # Ctrl-C can leave a Condition's __enter__ with it
        self._changed = threading.Condition(self._lock)
        self._released = 0
        self._finished = self._passed = self._behind = 0  # commands that all have finished; told of; to be told of
        self._dead = False
        self.lost: set[int] = set()
        """Hosts that are out of reach, by their numbers in the tree."""

    def send(self, kind: str, head: dict[str, Any] | None = None, data: Any = b"") -> None:
        """To all hosts of the mesh."""
        self._tree.send(Message(kind, self.number, head=head or {}, data=data), hosts=sorted(set(self.hosts)))

    def receive(self, message: Message) -> None:
        if message.kind == "behind":
            self._behind = max(self._behind, message.head["command"])
            self._tell_passed()
            return
        if message.kind == "progress":
            finished, over = message.progress
            self._finished = finished
            self._tell_passed()
            if over > max(finished, self._released):
                self._released = over
                self.send("release", {"step": over})
        elif message.kind in ("exited", "lost") and not self._dead:
            self._dead = True
            self.send("dead", {"rank": message.head["rank"]})
        self._put(message)

    def _tell_passed(self) -> None:
        if self._finished >= self._behind > self._passed:
            self._passed = self._finished
            self.send("passed", {"command": self._finished})

    def host_lost(self, host: int, why: str) -> None:
        self.lost.add(host)
        if host not in self.hosts:
            return
        self._put(Message("host lost", self.number, host, {"why": why}))
        if not self._dead:
            self._dead = True
            with suppress(MonarchError):  # it was the last host
                self.send("dead", {"rank": 0})

    def renew(self, first: int) -> None:
        """A new session begins, whose first command has this number."""
        self._dead = False
        self._released = first

    def _put(self, message: Message) -> None:
        with self._lock:
            self._messages.append(message)
            self._changed.notify_all()

    def take(self) -> list[Message]:
        with self._lock:
            taken = list(self._messages)
            self._messages.clear()
            return taken

    def first(self) -> Message | None:
        """The oldest message, which stays here until it is dropped."""
        with self._lock:
            return self._messages[0] if self._messages else None

    def drop(self, message: Message) -> None:
        with self._lock:
            if self._messages and self._messages[0] is message:
                self._messages.popleft()

    def wait(self, seconds: float) -> None:
        """Until there is something, at most so long."""
        with self._lock:
            if not self._messages:
                self._changed.wait(seconds)
