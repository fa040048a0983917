"""A process's role, "module:function", names its main function: so code that starts processes imports none of the code
that runs in them, and a process imports only the modules of its own role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from monarch.compiler.loading import load
from monarch.runtime.shared.window import Window

WORKER = "monarch.runtime.worker.loop:serve"
WORKER_ACROSS_HOSTS = "monarch.runtime.worker.peers:serve"
WORKER_BESIDE_ACTORS = "monarch.runtime.worker.loop:serve_in_actors"
WORKER_BESIDE_ACTORS_ACROSS_HOSTS = "monarch.runtime.worker.peers:serve_in_actors"
ACTORS = "monarch.runtime.actors.processes.serving:serve"
ROOT = "monarch.runtime.actors.processes.host:start_root"

_BEFORE = {ACTORS: "monarch.runtime.actors.processes.logs:note"}
"""The preparation that the parent makes each time before it forks processes for a role: it would copy its pages in
each."""


@dataclass(frozen=True)
class Forked:
    """The arguments of a process that was forked for a role.

    `rank`      which of the processes that were asked for together
    `shared`    the file that all of them were given
    `window`    its mapping, where that file is the memory of a mesh
    `files`     this process's own files
    `given`     what the request says to all of them
    """

    rank: int
    shared: int
    window: Window | None
    files: list[int]
    given: dict[str, Any]


def before(name: str) -> None:
    """In the parent, before it forks processes for a role."""
    if name in _BEFORE:
        load(_BEFORE[name])()


def role(name: str) -> Callable[..., Any]:
    """The function that a role names. Its module is imported, unless that was done before."""
    return load(name)
