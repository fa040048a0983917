"""The executor of a local mesh: the controller's thin loop around `controller_state`.

Commands go to all workers at once through the ring; nothing is waited for until a value or a failure is asked for, or
the workers are too far behind. What workers say is read when the controller happens to come by: there is no thread for
it.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from monarch.compiler.plan import (
    Handle,
    LayoutError,
    MeshSpec,
    MonarchError,
    Plan,
    PlanError,
    TensorType,
    Trace,
    log_topics,
)
from monarch.compiler.plan.tracing import ended, started
from monarch.runtime import frame, futex, memory, signals, wire
from monarch.runtime.controller_state import ControllerState, PlanRecord, Remote, Step, fresh
from monarch.runtime.placing import Blocks, pieces
from monarch.runtime.processes import WarmParent, warm_parent
from monarch.runtime.replies import Replies
from monarch.runtime.ring import Full, RingWriter, Space
from monarch.runtime.tracing import Recorder, buffer_words, clock
from monarch.runtime.window import RING_BYTES, STAGING_BYTES, Geometry, Window

TARGET = "cpu"
"""What the workers here run plans for."""
WORKERS_PER_CORE = 64
MAX_UNDER_WAY = 256
_REFRESH_EVERY = 16
_WORKER_BYTES = 8 << 20  # what a forked worker has of its own before it computes anything
_ASK_ABOVE = 16 << 20
_STAGING_KEEP = 8 << 20
_FREE_AT_ONCE = 4096
_EXIT_SECONDS = 2.0

Argument = Handle | torch.Tensor | float | int


class LocalExecutor:
    """`monarch.compiler.plan.Executor` over worker processes on this host. Safe to use from several threads."""

    def __init__(self, mesh: MeshSpec) -> None:
        geometry = Geometry.of(mesh.workers)
        _check_size(mesh, geometry)
        self._mesh = mesh
        self._state = ControllerState(mesh)
        self._lock = threading.RLock()
        self._closing = False
        self._refreshed = 0  # the command at which the workers' progress was last looked at
        self._log = "commands" in log_topics()
        self._freed: deque[int] = deque()
        self._types: dict[TensorType, TensorType] = {}
        self._plans: dict[int, tuple[weakref.ref[Plan], PlanRecord]] = {}
        self._records: dict[str, PlanRecord] = {}
        self._unloaded: deque[tuple[str, int]] = deque()
        self._recorder: Recorder | None = None

        warm = warm_parent()
        fd = Window.create(geometry)
        ends: list[socket.socket] = []
        theirs: list[socket.socket] = []
        try:
            for _ in range(mesh.workers):
                mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                mine.setblocking(False)
                ends.append(mine)
                theirs.append(other)
            self._window = Window(geometry, fd)
            threads = max(1, signals.cores() // mesh.workers)
            number = warm.start(mesh, fd, theirs, threads)
        except OSError as error:
            for end in ends:
                end.close()
            raise MonarchError(
                f"cannot start {mesh.workers} workers: {error}",
                hint="A limit is reached: on open files (ulimit -n), of which each worker takes one, or processes\n"
                "(ulimit -u).",
            ) from error
        finally:
            os.close(fd)
            for end in theirs:
                end.close()
        self._warm = warm
        self._number = number
        self._signals = self._window.signals()
        self._signals.spins = 0
        memory_ = self._window.bytes
        self._ring = RingWriter(memory_[geometry.ring : geometry.ring + RING_BYTES], self._signals)
        self._staging = Space(STAGING_BYTES, restart=True)
        self._replies = Replies(ends, self._state)
        self._pids: dict[int, int] = {}
        self._stop = weakref.finalize(self, _stop, warm, number, ends, os.getpid())
        _executors.add(self)
        started(self)

    @property
    def mesh(self) -> MeshSpec:
        return self._mesh

    # -- values ----------------------------------------------------------------------------------------------------

    def put(self, tensor: torch.Tensor, type: TensorType) -> Remote:
        with self._lock:
            self._enter()
            handle = self._put(tensor, type)
            self._ring.publish()
            return handle

    def _put(self, tensor: torch.Tensor, type: TensorType, what: str = "the tensor") -> Remote:
        start = clock()
        if tuple(tensor.shape) != type.shape or tensor.dtype != type.dtype:
            raise LayoutError(
                f"{what} is {TensorType(tensor.dtype, tuple(tensor.shape))}, and {type} is to be placed",
                hint=f"give a tensor of the global shape {list(type.shape)} and dtype {type.dtype}.",
            )
        type.check(self._mesh, what)
        self._flush_freed()
        blocks = Blocks.of(tensor.detach(), type, self._mesh)
        total = blocks.size * self._mesh.workers
        if total > _ASK_ABOVE:
            memory.require(total, f"{type} on {self._mesh.workers} workers", memory.available_bytes)
        id = self._state.handles(1)
        for piece in pieces(blocks.size, len(blocks.distinct), STAGING_BYTES // 8):
            step = self._state.step(f"put {type}")
            length = piece.stop - piece.start
            staged = length * len(blocks.distinct)
            if staged <= wire.INLINE_BYTES:
                record = blocks.head(id, wire.INLINE, piece) + b"".join(
                    block[piece].numpy().tobytes() for block in blocks.distinct
                )
            else:
                offset = self._stage(staged, step.sequence)
                target = self._window.view(self._window.geometry.staging, (STAGING_BYTES,), torch.uint8)
                for at, block in enumerate(blocks.distinct):
                    target[offset + at * length : offset + (at + 1) * length].copy_(block[piece])
                record = blocks.head(id, offset, piece)
            self._write(record, step.sequence)
        if self._log:
            self._say(f"put {id} {type}")
        if self._recorder is not None:
            self._recorder.did("put", str(type), start, step.sequence)
        return Remote(id, self._types.setdefault(type, type), step, self, self._freed)

    def _stage(self, size: int, command: int) -> int:
        """Room in the staging area, until `command` is finished."""
        while True:
            try:
                at = self._staging.reserve(size, self._state.finished_commands)
            except Full as full:
                self._catch_up(full.sequence + 1)
                continue
            self._staging.take(at, size, command)
            return at % STAGING_BYTES

    def shards(self, handle: Handle, workers: Sequence[int] | None = None) -> list[torch.Tensor]:
        start = clock()
        ranks = list(range(self._mesh.workers)) if workers is None else list(workers)
        with self._lock:
            self._enter()
            remote = self._own(handle, "the value that is fetched")
            for rank in ranks:
                if not 0 <= rank < self._mesh.workers:
                    raise MonarchError(
                        f"no worker {rank}: the mesh {self._mesh} has workers 0 to {self._mesh.workers - 1}"
                    )
            size = remote.type.nbytes * len(ranks)
            if size > _ASK_ABOVE:
                memory.require(size, f"fetching {remote.type} from {len(ranks)} workers", memory.available_bytes)
            self._flush_freed()
            step = self._state.step("fetch")
            self._replies.expect(step.sequence)
            self._write(wire.numbers(wire.FETCH, remote.id, *ranks), step.sequence)
            self._ring.publish()
            if self._log:
                self._say(f"fetch {remote.id} from {ranks}")
        try:
            self._gather(step, set(ranks))
            with self._lock:
                self._state.check(remote.step)
                self._state.check(step)
                found = self._replies.of(step.sequence)
                return [found[rank] for rank in ranks]
        finally:
            with self._lock:
                self._replies.forget(step.sequence)
                if self._recorder is not None:
                    self._recorder.did("fetch", str(remote.type), start, step.sequence)

    def held_values(self) -> list[int]:
        """How many values each worker holds, once it has done everything asked of it so far."""
        with self._lock:
            self._enter()
            self._flush_freed()
            step = self._state.step("count")
            self._replies.expect(step.sequence)
            self._write(wire.numbers(wire.COUNT), step.sequence)
            self._ring.publish()
        self._gather(step, set(range(self._mesh.workers)))
        with self._lock:
            self._state.check(step)
            found = self._replies.of(step.sequence)
            self._replies.forget(step.sequence)
            return [int(found[rank].item()) for rank in range(self._mesh.workers)]

    def worker_pids(self) -> list[int]:
        """The workers' process ids, by rank, once all have started."""
        self._until(self._state.next_command)
        with self._lock:
            while len(self._pids) < self._mesh.workers:
                self._read_deaths(_EXIT_SECONDS)
                self._ready()
            return [self._pids[rank] for rank in range(self._mesh.workers)]

    def wait(self, handle: Handle) -> None:
        start = clock()
        remote = self._own(handle, "the value that is waited for")
        step = remote.step
        self._until(step.sequence + 1)
        with self._lock:
            if self._recorder is not None:
                self._recorder.did("wait", step.name, start, step.sequence)
            self._state.check(step)

    def recover(self, handle: Handle) -> Remote:
        """For a state that a failed step was to make: the newest value of it that there is, which is that of the last
        step that committed. Gives `handle` itself where nothing failed; raises DeviceMeshError where nothing is
        left."""
        remote = self._own(handle, "the value")
        self._until(self._state.next_command)
        with self._lock:
            return self._state.recover(remote)

    # -- steps -----------------------------------------------------------------------------------------------------

    def run(self, plan: Plan, arguments: Sequence[Argument]) -> list[Handle]:
        with self._lock:
            self._enter()
            start = clock() if self._recorder is not None else 0
            known = self._plans.get(id(plan))
            record = known[1] if known is not None and known[0]() is plan else self._load(plan)
            if len(arguments) != len(record.dtypes):
                raise MonarchError(
                    f"plan '{record.name}' takes {len(record.dtypes)} arguments, and {len(arguments)} were given"
                )
            values: list[Any] = []
            held = []  # temporary handles, which live until the command is written
            for at, (argument, dtype) in enumerate(zip(arguments, record.dtypes, strict=True)):
                if dtype is not None:
                    values.append(self._number_for(record, at, argument, dtype))
                elif type(argument) is Remote:
                    if (
                        argument.owner is not self
                        or argument.taken_by is not None
                        or argument.type is not record.input_types[at]
                    ):
                        self._refuse(record, at, argument)
                    values.append(argument.id)
                elif isinstance(argument, torch.Tensor):
                    made = self._put(argument, record.input_types[at], f"argument {at} of plan '{record.name}'")
                    held.append(made)
                    values.append(made.id)
                else:
                    self._refuse(record, at, argument)
            if self._freed or self._unloaded:
                self._flush_freed()
            state = self._state
            base = state.handles(len(record.output_types))
            donated = tuple([handle for at in record.donated if type(handle := arguments[at]) is Remote])
            step = state.step(record.name, donated)
            if donated:
                step.previous = (record, base, arguments)
            body = record.struct.pack(wire.RUN, record.number, base, len(record.output_types), *values)
            self._write(body, step.sequence)
            self._ring.publish()
            if self._log:
                self._say(f"run {record.name} ({', '.join(map(str, values))}) -> {base} ...")
            if self._recorder is not None:
                self._recorder.ran(record.number, plan)
                self._recorder.did("run", record.name, start, step.sequence)
            if step.sequence - self._refreshed >= _REFRESH_EVERY:
                self._refreshed = step.sequence
                self._refresh()
                if step.sequence - state.finished_commands > MAX_UNDER_WAY:
                    self._catch_up(step.sequence - MAX_UNDER_WAY // 2)
            freed = self._freed
            return [Remote(base + at, type_, step, self, freed) for at, type_ in enumerate(record.output_types)]

    def _number_for(self, record: PlanRecord, at: int, argument: Any, dtype: torch.dtype) -> float | int:
        if isinstance(argument, torch.Tensor):
            argument = argument.item()
        if not isinstance(argument, (int, float)):
            self._refuse(record, at, argument)
        return float(argument) if dtype.is_floating_point else int(argument)

    def _refuse(self, record: PlanRecord, at: int, argument: object) -> None:
        """Raise what is wrong with an argument; return where nothing is."""
        spec = record.inputs[at]
        what = f"{spec.kind} {spec.label!r} of plan '{record.name}'"
        if not isinstance(argument, Remote):
            raise MonarchError(f"{what} is {spec.type}, and a {type(argument).__name__} was given")
        self._own(argument, what)
        self._state.refuse_donated(argument, what)
        if argument.type != spec.type:
            raise MonarchError(f"{what} is {spec.type}, and a handle of {argument.type} was given")

    def _load(self, plan: Plan) -> PlanRecord:
        """Send the plan to the workers, unless they have it."""
        if plan.mesh != self._mesh:
            raise MonarchError(f"plan '{plan.name}' is for {plan.mesh}, and this mesh is {self._mesh}")
        if plan.target != TARGET:
            raise PlanError(
                f"plan '{plan.name}' is compiled for {plan.target}, and the workers of this mesh run {TARGET}",
                hint=f"compile it for {TARGET}, or run it where there are workers for {plan.target}.",
            )
        bare = replace(plan, graph="", traced="", report=None, costs={})
        blob = b""
        key = plan.hash
        if not key:
            blob = pickle.dumps(bare)
            key = f"unnamed {hash(blob)}"
        record = self._records.get(key)
        if record is None:
            start = clock()
            frame.check(plan)
            blob = blob or pickle.dumps(bare)
            record = PlanRecord(self._state.next_command, plan, self._types)
            self._send_plan(record.number, blob)
            self._records[key] = record
            if self._log:
                self._say(f"load {record.name} as {record.number}: {len(blob)} bytes")
            if self._recorder is not None:
                self._recorder.did("load", record.name, start, record.number)
        # When the last object that stands for the plan is gone, the workers need not keep it either.
        identity = id(plan)
        record.users += 1

        def forget(
            _: object, plans: Any = self._plans, records: Any = self._records, gone: Any = self._unloaded
        ) -> None:
            plans.pop(identity, None)
            record.users -= 1
            if record.users == 0:
                gone.append((key, record.number))

        self._plans[identity] = (weakref.ref(plan, forget), record)
        return record

    def _send_plan(self, number: int, blob: bytes) -> None:
        geometry = self._window.geometry
        for piece in pieces(len(blob), 1, STAGING_BYTES // 8):
            step = self._state.step("load")
            part = blob[piece]
            if len(part) <= wire.INLINE_BYTES:
                offset, tail = wire.INLINE, part
            else:
                offset, tail = self._stage(len(part), step.sequence), b""
                at = geometry.staging + offset
                self._window.bytes[at : at + len(part)] = part
            head = wire.LOAD_HEAD.pack(wire.LOAD, number, len(blob), offset, piece.start, piece.stop)
            self._write(head + tail, step.sequence)

    # -- measuring -------------------------------------------------------------------------------------------------

    def trace_start(self) -> None:
        words = buffer_words(self._mesh.workers)
        size = 8 * words * self._mesh.workers
        memory.require(size, f"tracing {self._mesh.workers} workers", memory.available_bytes)
        with self._lock:
            if self._recorder is not None:
                raise MonarchError(f"the mesh {self._mesh} is being traced already", hint="stop that trace first.")
            step = self._command_trace(words)
        try:
            self._gather(step, set(range(self._mesh.workers)))
            with self._lock:
                self._state.check(step)
                self._recorder = Recorder(self._mesh)
                self._recorder.buffers = self._replies.of(step.sequence)
        except BaseException:
            with suppress(MonarchError):
                self._command_trace(0)
            raise
        finally:
            with self._lock:
                self._replies.forget(step.sequence)

    def trace_stop(self) -> Trace:
        with self._lock:
            if self._recorder is None:
                raise MonarchError(f"the mesh {self._mesh} is not being traced", hint="call trace_start() first.")
            recorder, self._recorder = self._recorder, None
        # A mesh that is closed, or has lost a worker, does nothing any more: what was measured is there all the same.
        with suppress(MonarchError):
            step = self._command_trace(0)
            self._until(step.sequence + 1)
            self._replies.forget(step.sequence)
        return recorder.trace()

    def _command_trace(self, words: int) -> Step:
        with self._lock:
            self._enter()
            self._flush_freed()
            step = self._state.step("trace")
            self._replies.expect(step.sequence)
            self._write(wire.numbers(wire.TRACE, words), step.sequence)
            self._ring.publish()
            return step

    # -- the ring --------------------------------------------------------------------------------------------------

    def _write(self, record: bytes, command: int) -> None:
        while True:
            try:
                self._ring.write(record, command, self._state.finished_commands)
                return
            except Full as full:
                self._catch_up(full.sequence + 1)

    def _flush_freed(self) -> None:
        """Tell the workers which values and plans are no longer needed."""
        while self._freed:
            ids: list[int] = []
            while self._freed and len(ids) < _FREE_AT_ONCE:
                ids.append(self._freed.popleft())
            self._write(wire.numbers(wire.FREE, *ids), self._state.step("free").sequence)
        while self._unloaded:
            key, number = self._unloaded.popleft()
            record = self._records.get(key)
            if record is not None and record.number == number and record.users == 0:
                del self._records[key]
                self._write(wire.numbers(wire.UNLOAD, number), self._state.step("unload").sequence)

    def _refresh(self) -> None:
        """Take note of what the workers have finished, without waiting."""
        done = self._signals.all_done()
        self._replies.read(self._signals.reports())
        self._state.finished(done)
        if not self._staging.in_use(done) and self._staging.touched > _STAGING_KEEP:
            self._window.give_back(self._window.geometry.staging, STAGING_BYTES)
            self._staging.touched = 0

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _until(self, commands: int) -> None:
        """Wait until all workers have finished so many commands. Raises DeviceMeshError where the mesh is lost."""
        with self._lock:
            self._enter()
            if self._freed:
                self._flush_freed()
        self._catch_up(commands)

    def _catch_up(self, commands: int) -> None:
        with self._lock:
            self._ring.publish()
        words, looks = self._signals.words, 0

        def check(seen: int) -> None:
            nonlocal looks
            looks += 1
            if looks > 1 or words[signals.DEAD]:
                self._look()

        if self._state.finished_commands < commands:
            for rank in range(self._mesh.workers):
                index = signals.line_of(rank) + signals.DONE
                if words[index] < commands:
                    self._signals.wait(index, commands, check)
        with self._lock:
            self._refresh()

    def _look(self) -> None:
        """While waiting: take in what has come, and raise where there is nothing left to wait for."""
        with self._lock:
            self._ready()
            self._read_deaths(0.0)
            self._ready()
            self._replies.read(-1)

    def _gather(self, step: Step, ranks: set[int]) -> None:
        """Wait for the answers of `ranks` to a command, and until all workers have finished it."""
        while True:
            self._look()
            with self._lock:
                pending = self._replies.pending(step.sequence, ranks)
            if not pending:
                break
            self._replies.sleep(pending)
        self._catch_up(step.sequence + 1)

    def _enter(self) -> None:
        """Raise where the mesh cannot take a command."""
        if self._ring.records != self._state.next_command:
            # Only what may be raised anywhere, such as KeyboardInterrupt, can come between the two.
            self._state.give_up(
                f"the mesh {self._mesh} was interrupted while a command was being written",
                "It cannot be used any more: close it, and make a new one.",
            )
        self._ready()

    def _ready(self) -> None:
        """Raise where the mesh is closed or lost."""
        if self._closing:
            raise MonarchError(f"the mesh {self._mesh} is closed")
        state = self._state
        if state.dead is None and self._signals.words[signals.DEAD]:
            self._read_deaths(_EXIT_SECONDS)
        elif state.dead is None and not self._warm.alive:
            state.give_up(
                f"the mesh {self._mesh} has lost its workers: the process that they were forked from has ended"
            )
        if state.dead is not None:
            ended(self)
            raise fresh(state.dead)

    def _read_deaths(self, seconds: float) -> None:
        exits: list[tuple[int, str]] = []
        for message in self._warm.messages(self._number, seconds):
            if message["is"] == "started":
                self._pids[message["rank"]] = message["pid"]
            elif message["is"] == "exited":
                exits.append((message["rank"], _how(message["status"])))
        self._state.died(exits)

    def _own(self, handle: Handle, what: str) -> Remote:
        if not isinstance(handle, Remote) or handle.owner is not self:
            raise MonarchError(
                f"{what} is not on this mesh, {self._mesh}",
                hint="fetch it there and distribute it here.",
            )
        return handle

    def _say(self, text: str) -> None:
        print(f"monarch: {self._mesh} {self._state.next_command - 1}: {text}", file=sys.stderr)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._closing = True  # seen by whoever waits with the lock held
        ended(self)
        with self._lock:
            if self._stop.alive:
                self._stop()
                geometry = self._window.geometry
                self._window.give_back(geometry.ring, geometry.total - geometry.ring)
            self._plans.clear()
            self._records.clear()

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stop(warm: WarmParent, number: int, ends: list[socket.socket], owner: int) -> None:
    if os.getpid() == owner:
        warm.stop(number)
    for end in ends:
        end.close()


def _check_size(mesh: MeshSpec, geometry: Geometry) -> None:
    if not futex.supported():
        raise MonarchError("local workers need Linux, on a processor whose futex call is known")
    most = WORKERS_PER_CORE * signals.cores()
    if mesh.workers > most or mesh.workers < 1:
        raise MonarchError(
            f"{mesh} has {mesh.workers} workers, and this machine runs 1 to {most}",
            hint=f"it has {signals.cores()} cores, and at most {WORKERS_PER_CORE} workers a core make sense.\n"
            "To compile for a larger mesh without running, make it abstract.",
        )
    windows = geometry.total - STAGING_BYTES
    memory.require(windows + mesh.workers * _WORKER_BYTES, f"{mesh.workers} workers", memory.available_bytes)


def _how(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    import signal

    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


_executors: weakref.WeakSet[LocalExecutor] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child of this process: the meshes are the parent's, and commands from here would mix with its own."""
    for executor in list(_executors):
        executor._closing = True


os.register_at_fork(after_in_child=_after_fork)
