"""Where the running code is: in which process, which actor, and at which place of the mesh that was messaged."""

from __future__ import annotations

import os
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

from monarch.compiler.mesh import Extent, Point
from monarch.runtime.actors.messages.protocol import Place
from monarch.runtime.processes.roles import ROOT, role

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.identity import Instance
    from monarch.runtime.actors.processes.process import Process

_lock = threading.Lock()
_process: Process | None = None
_inherited: list[Process] = []  # kept from being collected, which would close files that are not its own any more
_NOWHERE = Point(0, Extent([], []))


class Context:
    """The result of `context()`: `actor_instance`, and `message_rank`."""

    __slots__ = ("_place", "actor_instance")

    def __init__(self, instance: Instance, place: Place | None = None) -> None:
        self.actor_instance = instance
        self._place = place

    @property
    def message_rank(self) -> Point:
        """This actor's place in the mesh, or slice of one, that was messaged; `{}` where that was one actor. Outside
        messages, as in a constructor, it is that in the mesh as spawned."""
        if self._place is None:
            return _NOWHERE
        rank, labels, sizes = self._place
        return Point(rank, Extent(labels, sizes))


running: ContextVar[Context] = ContextVar("monarch actor")


def process() -> Process:
    """This process' share of the actors; where there is none yet, it is the root's."""
    return _process or _start()


def _start() -> Process:
    global _process
    with _lock:
        if _process is None:
            _process = role(ROOT)()
        return _process


def become(process: Process) -> None:
    """This process is one that was spawned."""
    global _process
    _process = process


def started() -> Process | None:
    return _process


def end(process: Process) -> None:
    """It has been shut down: the next use starts anew."""
    global _process
    with _lock:
        if _process is process:
            _process = None


def _after_fork() -> None:
    global _process, _lock
    if _process is not None:
        _inherited.append(_process)
    _process = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def context() -> Context:
    """The actor that runs this code. Outside an endpoint it is the process' own instance, which owns the meshes that
    the program spawns."""
    found = running.get(None)
    if found is None or found.actor_instance._process is not _process:
        return Context(process().client)
    return found


def current_rank() -> Point:
    """The place of the running actor in the mesh that was messaged: `context().message_rank`."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """The sizes of the dims of the mesh that was messaged."""
    return dict(context().message_rank.extent)


def current_actor_name() -> str:
    """The name of the running actor, with its rank: "trainer[3]"."""
    return context().actor_instance.label
