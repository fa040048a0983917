"""Processes that are spawned together, as plain data, and how one of them ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monarch.compiler.mesh import Shape
from monarch.runtime.actors.messages.protocol import Owner
from monarch.runtime.actors.processes.binding import Binding
from monarch.runtime.actors.telemetry.recording import Bounds


@dataclass(frozen=True)
class Death:
    """How a process ended."""

    address: str
    name: str
    rank: int
    reason: str
    status: int | None
    """None where its host is lost."""
    log: tuple[str, ...]
    expected: bool
    """It was stopped."""
    unfit: bytes | None = None
    """The pickled ActorError that its bootstrap raised, if it ended of that."""


@dataclass(frozen=True)
class ProcMeshSpec:
    """Processes that are spawned together, a mesh of them: the data that they and the agent of their host need."""

    id: str
    name: str
    hosts: tuple[str, ...]
    """The addresses of their hosts' agents; each has an equal block of them."""
    root: str
    addresses: tuple[str, ...]
    shape: Shape
    owner: Owner
    bootstrap: bytes | None
    slow_calls: float | None
    """After how many seconds an unanswered call is reported, where the settings do not say so."""
    path: tuple[str, ...]
    folder: str
    environ: tuple[tuple[str, str], ...]
    """The environment of the spawning process, as it is then; on attached hosts, and from there, only the variables
    that the setting `environment` names."""
    threads: int = 1
    """How many each may compute with, as the agent of their host says."""
    settings: tuple[tuple[str, Any], ...] = ()
    """The settings of the spawning process, as they are then (`config.for_spawned`)."""
    levels: tuple[tuple[str, int], ...] = ()
    """Of its loggers (`logs.levels`)."""
    bindings: tuple[Binding, ...] = ()
    """The binding of each of a host's processes; empty: none."""
    commands: tuple[tuple[str, ...], ...] = ()
    """The command that each runs in place of being forked, up to the interpreter's arguments; one for all; empty:
    none."""
    recorded: Bounds | None = None
    """How many of the events there telemetry keeps; None: nothing is recorded."""

    def place(self, rank: int) -> str:
        """A process for people: "trainers gpus=3"."""
        place = ",".join(f"{name}={at}" for name, at in self.shape.coordinates(rank).items())
        return f"{self.name} {place}" if place else self.name

    def host_of(self, rank: int) -> str:
        return self.hosts[rank * len(self.hosts) // len(self.addresses)]

    def binding_of(self, rank: int) -> Binding:
        return self.bindings[rank % len(self.bindings)] if self.bindings else ()

    def command_of(self, rank: int) -> tuple[str, ...]:
        return self.commands[rank % len(self.commands)] if self.commands else ()

    def ranks_on(self, host: str) -> list[int]:
        return [rank for rank in range(len(self.addresses)) if self.host_of(rank) == host]
