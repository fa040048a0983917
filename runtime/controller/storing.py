"""The executor's part in files: workers write values to them, and read them, while the controller looks on."""

from __future__ import annotations

import json
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

from monarch.compiler.execution.executor import Handle
from monarch.compiler.execution.storage import Piece, Stored, Written
from monarch.compiler.plan import DTYPE_NAMES, DeviceMeshError, MeshSpec, MonarchError, TensorType
from monarch.compiler.survival import worker_bytes
from monarch.runtime.controller.connection import Connection
from monarch.runtime.controller.healing import Handles
from monarch.runtime.controller.replies import Replies
from monarch.runtime.controller.snapshots import Snapshots
from monarch.runtime.controller.state import ControllerState
from monarch.runtime.controller.steps import RemoteTensor, Step
from monarch.runtime.shared import memory, wire
from monarch.runtime.shared.place import Place

if TYPE_CHECKING:
    from monarch.runtime.controller.parts import PartExecutor

_RECORD_BYTES = 128 << 10
"""About the most bytes that one command has; the entries of one tensor stay together."""
_LOOK_SECONDS = 0.2
_STOPPED_SECONDS = 0.002


class Storing(ABC):
    """The part of `executor.MeshExecutor` that concerns files."""

    connection: Connection
    state: ControllerState
    _replies: Replies
    _mesh: MeshSpec
    place: Place
    _lock: threading.RLock
    _handles: Handles
    kept_snapshots: Snapshots | None
    _types: dict[TensorType, TensorType]
    _freed: deque[int]

    _saves: ClassVar[count[int]] = count()
    _writing: weakref.WeakSet[WorkersWriting] | None = None

    @abstractmethod
    def _go_on_with_snapshots(self, step: Step | None = None) -> None: ...

    @abstractmethod
    def _own(self, handle: Handle, what: str, part: PartExecutor | None = None) -> RemoteTensor: ...

    @abstractmethod
    def _flush_freed(self) -> None: ...

    @abstractmethod
    def _ask(self, step: Step, record: bytes) -> None: ...

    @abstractmethod
    def _forget(self, step: Step) -> None: ...

    def writing(self, part: PartExecutor | None = None) -> WorkersWriting:
        """See `Executor.writing`. With a part, of values that the workers have."""
        return WorkersWriting(self, next(Storing._saves), part)

    def start(self, writing: WorkersWriting, values: Sequence[tuple[Handle, Sequence[Piece]]]) -> None:
        """See `Writing.start`."""
        part = writing.part
        place = self.place if part is None else part.place
        where = None if part is None else place_text(place)
        with self._lock:
            self.connection.enter()
            remotes = []
            for handle, pieces in values:
                remote = self._own(handle, "a value that is saved", part)
                self.state.refuse_donated(remote, "a value that is saved")
                listed = [
                    [place.ranks[each.rank], each.file, each.offset, each.dim, each.start, each.length]
                    for each in pieces
                ]
                remotes.append([remote.id, type_text(remote.type), listed])
            self._flush_freed()
            self._writing = self._writing or weakref.WeakSet()
            self._writing.add(writing)
            groups = list(_grouped(remotes)) or [[]]
            for at, group in enumerate(groups):
                step = Step("save")
                writing.steps.append(step)
                job = {"save": writing.number, "values": group, "last": at == len(groups) - 1, "place": where}
                self.connection.command(step, wire.pack_json(wire.WRITE, job))
            self.connection.publish()

    def read(
        self, tensors: Sequence[tuple[TensorType, str, Sequence[Stored]]], part: PartExecutor | None = None
    ) -> list[Handle]:
        """See `Executor.read`. With a part, the tensors are to be there."""
        owner = self if part is None else part
        mesh, place = owner.place.mesh, None if part is None else part.place
        where = None if place is None else place_text(place)
        with self._lock:
            self.connection.enter()
            self._flush_freed()
            total = sum(worker_bytes(type_, mesh) for type_, *_ in tensors) * mesh.workers
            memory.require(total, f"loading tensors on {mesh.workers} workers", memory.available_bytes)
            base = self.state.handles(len(tensors))
            made: list[RemoteTensor] = []
            described = []
            for id, (type_, name, blocks) in enumerate(tensors, base):
                type_.check(mesh, name)
                made.append(RemoteTensor(id, self._types.setdefault(type_, type_), Step("load"), owner, self._freed))
                described.append([id, type_text(type_), name, [block_text(block) for block in blocks]])
            self._handles.add(made)
            for group in _grouped(described):
                step = Step("load", place=place)
                ids = [each[0] for each in group]
                for id in ids:
                    made[id - base].step = step
                # Never given again: other values may stand in the files by then.
                self.connection.command(step, wire.pack_json(wire.READ, {"place": where, "tensors": group}))
            self.connection.publish()
            if self.kept_snapshots is not None:
                self.kept_snapshots.due = True
                self._go_on_with_snapshots()
            return [*made]

    def finish_writing(self) -> None:
        """Wait until nothing is being written any more: before the workers end. What no thread has yet (see
        `Writing.belongs_to`) is not waited for: the call that began it is still under way, maybe further up in this
        thread."""
        for writing in list(self._writing or ()):
            while writing.thread is not None and writing.thread.is_alive() and not writing.ended.wait(_LOOK_SECONDS):
                pass

    def look_at(self, writing: WorkersWriting) -> Written:
        """See `Writing.poll`."""
        found = self._ask_all(writing.number, 0, *writing.steps)
        error = next((each["error"] for each in found if each["error"]), "")
        if error:
            raise DeviceMeshError(f"a worker of {self._mesh} cannot write {error}")
        done = all(each["done"] for each in found)
        sums = {(file, offset): sums for each in found for file, offset, sums in each["sums"]} if done else {}
        return Written(sum(each["bytes"] for each in found), done, sums)

    def end(self, writing: WorkersWriting) -> None:
        """See `Writing.end`."""
        if writing.ended.is_set():
            return
        try:
            with suppress(MonarchError):
                while writing.steps and not all(each["done"] for each in self._ask_all(writing.number, 1)):
                    time.sleep(_STOPPED_SECONDS)  # for a worker that is within a write
        finally:
            writing.ended.set()

    def _ask_all(self, number: int, stop: int, *steps: Step) -> list[dict[str, Any]]:
        """Each worker's progress of a save. Raises DeviceMeshError where one of its steps has failed."""
        step = Step("saved")
        try:
            with self._lock:
                self.connection.enter()
                self._ask(step, wire.numbers(wire.WRITTEN, number, stop))
            self.connection.gather(step, set(range(self._mesh.workers)))
            with self._lock:
                for each in (*steps, step):
                    self.state.check(each)
                found = list(self._replies.of(step.sequence).values())
            return [json.loads(bytes(value.tolist())) for value in found]
        finally:
            with self._lock:
                self._forget(step)


class WorkersWriting:
    """`execution.executor.Writing`, of one mesh."""

    def __init__(self, executor: Storing, number: int, part: PartExecutor | None) -> None:
        self._executor = executor
        self.number = number
        self.part = part
        self.steps: list[Step] = []
        """The saves that the workers have got, and the one that they are getting."""
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, values: Sequence[tuple[Handle, Sequence[Piece]]]) -> None:
        self._executor.start(self, values)

    def belongs_to(self, thread: threading.Thread) -> None:
        self.thread = thread

    def poll(self) -> Written:
        return self._executor.look_at(self)

    def ahead(self) -> int:
        connection = self._executor.connection
        return 0 if connection.closing else max(0, connection.asked() - connection.finished())

    def end(self) -> None:
        self._executor.end(self)


def _grouped(items: Sequence[Any]) -> Iterator[list[Any]]:
    """The items, in order, in groups of about `_RECORD_BYTES` as JSON."""
    group: list[Any] = []
    size = 0
    for item in items:
        length = len(json.dumps(item))
        if group and size + length > _RECORD_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += length
    if group:
        yield group


def type_text(type: TensorType) -> list[Any]:
    """A type as commands have it: see `worker.files`."""
    return [DTYPE_NAMES[type.dtype], type.shape, type.layout.shards]


def place_text(place: Place) -> list[Any]:
    """Some of a mesh's workers, with the dims that they have, likewise."""
    return [place.mesh.dims, place.numbers()]


def block_text(block: Stored) -> list[Any]:
    """A stored block, likewise."""
    dtype = str(block.dtype).removeprefix("torch.")
    return [block.file, block.offset, dtype, block.start, block.shape, block.strides, block.sums]
