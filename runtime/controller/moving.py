"""The executor's part where a mesh gets another size: its values go to the workers of another place."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch.compiler.execution.executor import Handle
from monarch.compiler.mesh import Shape
from monarch.compiler.plan import MeshSpec, MonarchError, TensorType
from monarch.runtime.controller.connection import Connection
from monarch.runtime.controller.healing import Handles, Pairs, Placed, copies, find_sources
from monarch.runtime.controller.snapshots import Snapshots
from monarch.runtime.controller.state import ControllerState
from monarch.runtime.controller.steps import Owner, RemoteTensor, Step
from monarch.runtime.shared import wire
from monarch.runtime.shared.place import Place

if TYPE_CHECKING:
    from monarch.runtime.controller.executor import MeshExecutor
    from monarch.runtime.controller.parts import PartExecutor


@dataclass(frozen=True)
class _Move:
    """A handle that is to stand for another value: the id, type, step and owner that it gets."""

    handle: RemoteTensor
    id: int
    type: TensorType
    step: Step
    owner: Owner

    @staticmethod
    def of(handle: RemoteTensor, value: RemoteTensor, owner: Owner) -> _Move:
        return _Move(handle, value.id, value.type, value.step, owner)


class Moving(ABC):
    """The part of `executor.MeshExecutor` that concerns meshes of another size.

    A started mesh keeps its workers. A smaller mesh is one on some of them, and the others hold and run nothing. So a
    value that is replicated along the mesh dim that changes need not move where the mesh shrinks, and is copied to the
    further workers where it grows. Sharding a value anew makes a new one (`language.placing.resizing`).
    """

    connection: Connection
    state: ControllerState
    _mesh: MeshSpec
    _lock: threading.RLock
    _handles: Handles
    _placed: Placed
    kept_snapshots: Snapshots | None
    place: Place

    _moves: deque[_Move | Callable[[], None]]
    """The commands that a move which has begun still has to give."""

    @abstractmethod
    def over(self, shape: Shape) -> MeshExecutor | PartExecutor: ...

    @abstractmethod
    def until(self, commands: int, place: Place | None = None) -> None: ...

    @abstractmethod
    def snapshots(self, every: int, copies: int) -> None: ...

    def live(self, part: PartExecutor | None = None) -> list[Handle]:
        """See `Resizable.live`."""
        on = part or self
        with self._lock:
            self.connection.enter()
            return [
                handle
                for handle in self._handles.live()
                if handle.owner is on and handle.step.noted and handle.step.error is None and handle.taken_by is None
            ]

    def placed(self, handle: Handle) -> bool:
        """See `Resizable.placed`."""
        assert isinstance(handle, RemoteTensor)
        return self._placed.has(handle.id)

    def take_hosts(self, shape: Shape) -> bool:
        """See `Resizable.take_hosts`."""
        if not self.connection.free_hosts:
            return False
        self.until(self.state.next_command)
        with self._lock:
            self.connection.enter()
            holding = {rank for handle in self._handles.live() for rank in handle.owner.place.members}
            return self.connection.move(set(self.over(shape).place.members) - holding)

    def spread(self, handles: Sequence[Handle], shape: Shape) -> None:
        """See `Resizable.spread`."""
        place = self.over(shape).place
        with self._lock:
            self.connection.enter()
            values: dict[Pairs, dict[int, TensorType]] = {}
            for handle in handles:
                assert isinstance(handle, RemoteTensor)
                pairs = find_sources(handle.type, place, handle.owner.place.members)
                if pairs is None:
                    raise MonarchError(f"no worker of {handle.owner.place.mesh} has all blocks of {handle.type}")
                if pairs:
                    values.setdefault(pairs, {})[handle.id] = handle.type
            steps = []
            for pairs, types in values.items():
                for record in copies(types, place.mesh, pairs):
                    steps.append(Step("copy"))
                    self.connection.command(steps[-1], record)
            self.connection.publish()
        self.until(self.state.next_command)
        with self._lock:
            for step in steps:
                self.state.check(step)

    def carry(self, handle: Handle, shape: Shape, type: TensorType) -> None:
        """See `Resizable.carry`."""
        assert isinstance(handle, RemoteTensor)
        handle.owner, handle.type, handle.copied = self.over(shape), type, None

    def move(
        self,
        pairs: Sequence[tuple[Handle, Handle]],
        shape: Shape,
        bind: Callable[[], None],
        part: PartExecutor | None = None,
    ) -> None:
        """See `Resizable.move`."""
        on, to = part or self, self.over(shape)
        self.until(self.state.next_command)  # no step that is under way knows the handles
        with self._lock:
            self.connection.enter()
            # Handles without a value go along, so that reading them raises the reason.
            moves: list[_Move | Callable[[], None]] = [
                _Move.of(handle, handle, to)
                for handle in self._handles.live()
                if handle.owner is on and (handle.step.error is not None or handle.taken_by is not None)
            ]
            kept: list[int] = []
            for handle, value in pairs:
                assert isinstance(handle, RemoteTensor) and isinstance(value, RemoteTensor)
                moves.append(_Move.of(handle, value, to))
                if value is handle:
                    kept.append(handle.id)
                else:  # it frees the former value when it is dropped
                    moves.append(_Move.of(value, handle, handle.owner))
            self._moves = deque([bind, *moves])  # from here on it is done, whatever interrupts this
            self._finish_moves()
            self._placed.moved({move.id: move.handle for move in moves if isinstance(move, _Move) and move.owner is to})
            size = wire.FREE_AT_ONCE
            for first in range(0, len(kept), size):
                numbers = to.place.numbers()
                record = wire.numbers(wire.LEAVE, len(numbers), *numbers, *kept[first : first + size])
                self.connection.command(Step("leave"), record)
            self.connection.publish()
        if self.kept_snapshots is not None:  # the last is of values that are elsewhere now
            self.snapshots(self.kept_snapshots.every, self.kept_snapshots.copies)

    def _finish_moves(self) -> None:
        """Give the rest of a move's commands. Doing so again changes nothing."""
        moves = self._moves
        while moves:
            move = moves[0]
            if isinstance(move, _Move):
                handle = move.handle
                handle.id, handle.type, handle.step = move.id, move.type, move.step
                handle.owner, handle.copied = move.owner, None
            else:
                move()
            _ = moves.popleft() if moves and moves[0] is move else None
