"""The executor's part for actors in its workers' processes: values go to them and come from them by reference."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from monarch.compiler.execution.executor import Handle
from monarch.compiler.plan import TensorType
from monarch.runtime.controller.connection import ActorProcesses, Connection
from monarch.runtime.controller.healing import Handles
from monarch.runtime.controller.state import ControllerState
from monarch.runtime.controller.steps import RemoteTensor, Step
from monarch.runtime.shared import wire
from monarch.runtime.shared.place import Place

if TYPE_CHECKING:
    from monarch.runtime.controller.parts import PartExecutor


class Lending(ABC):
    """The part of `executor.MeshExecutor` that concerns actors."""

    place: Place
    connection: Connection
    state: ControllerState
    _lock: threading.RLock
    _handles: Handles
    _types: dict[TensorType, TensorType]
    _freed: deque[int]
    _numbers: Iterator[int]
    _lent: int

    @abstractmethod
    def _own(self, handle: Handle, what: str, part: PartExecutor | None = None) -> RemoteTensor: ...

    @abstractmethod
    def _flush_freed(self) -> None: ...

    @property
    def actor_processes(self) -> ActorProcesses | None:
        """The processes in which the workers are, where these are processes of actors."""
        return self.connection.actor_processes

    def number(self) -> int:
        """For something that is lent to actors: a new one."""
        return next(self._numbers)

    def owned(self, handle: Handle, what: str, part: PartExecutor | None = None) -> RemoteTensor:
        """The handle, which is this mesh's, and whose value no step has taken. Raises MonarchError."""
        remote = self._own(handle, what, part)
        self.state.refuse_donated(remote, what)
        return remote

    def lend(self, number: int, values: Sequence[RemoteTensor], messages: Sequence[int]) -> None:
        """Have the workers lend values, each to so many messages in its process (see `worker.exchange`)."""
        with self._lock:
            self.connection.enter()
            for value in values:  # another thread may have run a step since the message was pickled
                self.state.refuse_donated(value, "a tensor in the message")
                value.copied = None  # actors may write to it
            self._flush_freed()
            step = Step("lend")
            ids = [value.id for value in values]
            self.connection.command(step, wire.numbers(wire.LEND, number, len(ids), *ids, *messages))
            self.connection.publish()
            self._lent = step.sequence + 1

    def adopt(self, number: int, types: Sequence[TensorType], part: PartExecutor | None = None) -> list[Handle]:
        """Values of tensors that actors have made, one of each type."""
        on, place = part or self, None if part is None else part.place
        with self._lock:
            self.connection.enter()
            self._flush_freed()
            base = self.state.handles(len(types))
            step = Step("adopt", place=place)
            where = () if place is None else place.numbers()
            self.connection.command(step, wire.numbers(wire.ADOPT, number, base, len(types), *where))
            self.connection.publish()
            types = [self._types.setdefault(type_, type_) for type_ in types]
            adopted = [RemoteTensor(base + at, type_, step, on, self._freed) for at, type_ in enumerate(types)]
            self._handles.add(adopted)
            return [*adopted]
