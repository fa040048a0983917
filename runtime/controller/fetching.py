"""An executor reads its values: it waits for them, and reads them from shared memory or asks the workers."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from monarch.compiler.execution.events import Log, heard
from monarch.compiler.execution.executor import Handle
from monarch.compiler.mesh import Shape
from monarch.compiler.plan import DeviceMeshError, MeshSpec, MonarchError
from monarch.runtime.controller.connection import Connection
from monarch.runtime.controller.parts import PartExecutor
from monarch.runtime.controller.replies import Replies
from monarch.runtime.controller.state import ControllerState
from monarch.runtime.controller.steps import RemoteTensor, Step
from monarch.runtime.shared import memory, wire
from monarch.runtime.shared.measured import clock
from monarch.runtime.shared.place import Place

ASK_ABOVE = 16 << 20
"""Above so many bytes an executor first asks how much memory is left."""


class Fetching(ABC):
    """The part of `executor.MeshExecutor` that concerns reading values."""

    connection: Connection
    state: ControllerState
    _replies: Replies
    _mesh: MeshSpec
    _lock: threading.RLock
    _parts: dict[Shape, PartExecutor]
    _log: bool

    @abstractmethod
    def _own(self, handle: Handle, what: str, part: PartExecutor | None = None) -> RemoteTensor: ...

    @abstractmethod
    def _flush_freed(self) -> None: ...

    @abstractmethod
    def until(self, commands: int, place: Place | None = None, known: bool = False) -> None: ...

    @abstractmethod
    def _from_survivors(self, remote: RemoteTensor, ranks: Sequence[int]) -> list[torch.Tensor]: ...

    @abstractmethod
    def _say(self, text: str) -> None: ...

    @abstractmethod
    def _did(self, kind: str, label: object, start: int, number: int) -> None: ...

    def shards(
        self,
        handle: Handle,
        workers: Sequence[int] | None = None,
        part: PartExecutor | None = None,
        *,
        quiet: bool = False,
    ) -> list[torch.Tensor]:
        start = clock()
        remote = self._own(handle, "the value that is fetched", part)
        mesh, everyone = remote.owner.place.mesh, remote.owner.place.ranks
        numbers = range(mesh.workers) if workers is None else workers
        copied = self._copied(remote, numbers, start, quiet)
        if copied is not None:
            return copied
        for number in numbers:
            if not 0 <= number < mesh.workers:
                raise MonarchError(f"no worker {number}: the mesh {mesh} has workers 0 to {mesh.workers - 1}")
        ranks = [everyone[number] for number in numbers]
        step = Step("fetch", place=None if part is None else part.place)
        try:
            return self._shards(remote, ranks, step)
        except DeviceMeshError:
            if quiet:
                raise
            self._check_lost(remote.step)
            return self._from_survivors(remote, ranks)
        finally:
            with self._lock:
                self._forget(step)
                if step.sequence >= 0:
                    self._did("fetch", handle.type, start, step.sequence)

    def _shards(self, remote: RemoteTensor, ranks: Sequence[int], step: Step) -> list[torch.Tensor]:
        with self._lock:
            self.connection.enter()
            size = remote.type.nbytes * len(ranks)
            if size > ASK_ABOVE:
                memory.require(size, f"fetching {remote.type} from {len(ranks)} workers", memory.available_bytes)
            self._flush_freed()
            self._ask(step, wire.numbers(wire.FETCH, remote.id, *ranks))
            if self._log or heard(Log):
                self._say(f"fetch {remote.id} from {ranks}")
        self.connection.gather(step, set(ranks))
        if step.error is not None and remote.step.error is None:  # it failed on workers that were not asked
            self.until(remote.step.sequence + 1, remote.step.place)
        with self._lock:
            self.state.check(remote.step)
            self.state.check(step)
            found = self._replies.of(step.sequence)
            return [found[rank] for rank in ranks]

    def _check_lost(self, step: Step) -> None:
        """In the handler of an error: raise it, unless it was that the mesh has lost a worker, and all others have done
        the step."""
        with self._lock:
            if self.state.dead is None or self.connection.actor_processes is not None:
                raise
            if not self.state.is_done(step):  # no variable has the error: it would hold its own frames for ever
                raise self.state.lost_step(step) from None

    def _copied(
        self, remote: RemoteTensor, numbers: Sequence[int], start: int, quiet: bool
    ) -> list[torch.Tensor] | None:
        """The blocks of a small result that workers with these numbers have copied to shared memory with the step that
        made it, where the copies are still there."""
        results, ranks = self.connection.results, remote.owner.place.ranks
        if not results or remote.copied is None or remote.taken_by is not None:
            return None
        place, small = remote.copied
        if not small.workers.issuperset(numbers) or not results.keys() >= {ranks[at] for at in numbers}:
            return None
        step, state = remote.step, self.state
        try:
            self.until(step.sequence + 1, step.place, known=state.is_done(step))
        except DeviceMeshError:
            if quiet:
                raise
            self._check_lost(step)
        with self._lock:
            if step.error is not None or state.dead is None:
                state.check(step)
            found = [value for at in numbers if (value := results[ranks[at]].read(place, small)) is not None]
            if len(found) < len(numbers) or not state.places.has(place):
                return None
            self._did("fetch", remote.type, start, step.sequence)
            return found

    def held_values(self) -> list[int]:
        """How many values each worker holds, once it has done everything asked of it so far."""
        with self._lock:
            self.connection.enter()
            self._flush_freed()
        step = Step("count")
        try:
            self._ask(step, wire.numbers(wire.COUNT))
            self.connection.gather(step, set(range(self._mesh.workers)))
            with self._lock:
                self.state.check(step)
                found = self._replies.of(step.sequence)
                return [int(found[rank].item()) for rank in range(self._mesh.workers)]
        finally:
            with self._lock:
                self._forget(step)

    def _ask(self, step: Step, record: bytes) -> None:
        """Give the workers a command that they answer; `_forget` ends the wait for that."""
        with self._lock:
            step.expects = True
            self.connection.command(step, record)
            self.connection.publish()

    def _forget(self, step: Step) -> None:
        step.expects = False
        self._replies.forget(step.sequence)

    def wait(self, handle: Handle, part: PartExecutor | None = None) -> None:
        start = clock()
        if part is None and isinstance(handle, RemoteTensor) and isinstance(handle.owner, PartExecutor):
            part = self._parts.get(handle.owner.place.shape)  # of a step over several parts, say
        remote = self._own(handle, "the value that is waited for", part)
        step = remote.step
        try:
            self.until(step.sequence + 1, step.place)
        except DeviceMeshError:
            self._check_lost(step)
            return
        with self._lock:
            self._did("wait", step.name, start, step.sequence)
            self.state.check(step)

    def recover(self, handle: Handle, wait: bool = True, part: PartExecutor | None = None) -> RemoteTensor:
        """See `Executor.recover`."""
        remote = self._own(handle, "the value", part)
        if wait:
            self.until(self.state.next_command, None if part is None else part.place)
        with self._lock:
            return self.state.recover(remote)

    def undo(self, part: PartExecutor | None = None) -> None:
        self.until(self.state.next_command, None if part is None else part.place)
        with self._lock:
            self.state.undo()
