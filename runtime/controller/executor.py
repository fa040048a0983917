"""The executor of a mesh: values, plans and steps as commands, over a `connection` to the workers.

Commands go to all workers at once through the ring; nothing is waited for until a value or a failure is asked for, or
the workers are too far behind.
"""

from __future__ import annotations

import pickle
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch

from monarch.compiler.config import settings
from monarch.compiler.execution.events import Log, Span, ended, heard, say, started, subscribe, tell
from monarch.compiler.execution.executor import Bind, Executor, Handle, Undo
from monarch.compiler.mesh import Shape
from monarch.compiler.plan import (
    DeviceMeshError,
    LayoutError,
    MeshSpec,
    MonarchError,
    Plan,
    TensorType,
    Trace,
    check_backend,
)
from monarch.runtime.controller.connection import Connection
from monarch.runtime.controller.fetching import ASK_ABOVE, Fetching
from monarch.runtime.controller.lending import Lending
from monarch.runtime.controller.liveness import watch
from monarch.runtime.controller.local import LocalConnection
from monarch.runtime.controller.moving import Moving
from monarch.runtime.controller.parts import PartExecutor
from monarch.runtime.controller.placing import Blocks, pieces
from monarch.runtime.controller.recorder import Recorder
from monarch.runtime.controller.restoring import Restoring
from monarch.runtime.controller.steps import PlanRecord, RemoteTensor, Replay, Step
from monarch.runtime.controller.storing import Storing
from monarch.runtime.processes.looking import WorkerProgress
from monarch.runtime.shared import memory, wire
from monarch.runtime.shared.checking import check
from monarch.runtime.shared.measured import buffer_words, clock
from monarch.runtime.shared.place import Place
from monarch.runtime.shared.window import STAGING_BYTES

_REFRESH_EVERY = 16
_GIVE_UP_SECONDS = 1.0


Argument = Handle | torch.Tensor | float | int


Connect = Callable[[MeshSpec, Callable[[], None]], Connection]


class MeshExecutor(Restoring, Fetching, Storing, Lending, Moving):
    """`monarch.compiler.plan.Executor` over worker processes: on this host, or where `connect` has them. Safe to use
    from several threads."""

    def __init__(self, mesh: MeshSpec, connect: Connect = LocalConnection) -> None:
        me = weakref.ref(self)
        self.connection = connect(mesh, lambda: ended(executor) if (executor := me()) is not None else None)
        self._mesh = mesh
        self.place = Place.whole(mesh)
        self.plans: dict[int, tuple[weakref.ref[Plan], PlanRecord]] = {}
        """The plans that run on all of the workers and that these know, by identity."""
        self._parts: dict[Shape, PartExecutor] = {}
        self._lock = self.connection.lock
        self.state = self.connection.state
        self._replies = self.connection.replies
        self._refreshed = 0  # the command at which the workers' progress was last looked at
        self._log = "commands" in settings.log
        self._ahead = settings.steps_ahead
        self._freed: deque[int] = deque()
        self._types: dict[TensorType, TensorType] = {}
        self._records: dict[tuple[str, Place | None], PlanRecord] = {}
        self._unloaded: deque[tuple[tuple[str, Place | None], int]] = deque()
        self._recorder: Recorder | None = None
        self._unsubscribe: Undo = lambda: None
        self._numbers = count()
        self._plan_numbers = count()
        self._lent = 0  # so many commands are done once all is lent that actors were sent
        self._moves = deque()
        self._begin()
        started(self)
        watch(self.connection)

    @property
    def mesh(self) -> MeshSpec:
        return self._mesh

    @property
    def whole(self) -> MeshExecutor:
        return self

    def over(self, shape: Shape) -> MeshExecutor | PartExecutor:
        if shape == self.place.shape:
            return self
        found = self._parts.get(shape)
        return self._parts.setdefault(shape, PartExecutor(self, shape)) if found is None else found

    @property
    def is_lost(self) -> bool:
        """Whether the mesh is known to have lost a worker, and is not healed."""
        return self.state.dead is not None

    # -- values ----------------------------------------------------------------------------------------------------

    # With a `part`, a method is for some of the workers, with the dims and numbers that they have there.

    def put(
        self, tensor: torch.Tensor, type: TensorType, lent: bool = False, part: PartExecutor | None = None
    ) -> RemoteTensor:
        with self._lock:
            self.connection.enter()
            handle = self._put(tensor, type, part, lent=lent)
            self.connection.publish()
            if self.kept_snapshots is not None:
                self._go_on_with_snapshots(handle.step)
            return handle

    def _put(
        self,
        tensor: torch.Tensor,
        type: TensorType,
        part: PartExecutor | None,
        what: str = "the tensor",
        lent: bool = False,
    ) -> RemoteTensor:
        start = clock()
        on = part or self
        mesh, place = on.mesh, None if part is None else part.place
        if tuple(tensor.shape) != type.shape or tensor.dtype != type.dtype:
            raise LayoutError(
                f"{what} is {TensorType(tensor.dtype, tuple(tensor.shape))}, and {type} is to be placed",
                hint=f"give a tensor of the global shape {list(type.shape)} and dtype {type.dtype}.",
            )
        type.check(mesh, what)
        if tensor.is_meta:
            raise LayoutError(
                f"{what} is on the meta device, and has no data",
                hint="monarch.distribute makes zeros of it on the mesh.",
            )
        self._flush_freed()
        blocks = Blocks.of(tensor.detach().cpu(), type, mesh)
        rows = [block.numpy() for block in blocks.distinct]  # a tensor without data is refused first
        total = blocks.size * mesh.workers
        if total > ASK_ABOVE:
            memory.require(total, f"{type} on {mesh.workers} workers", memory.available_bytes)
        id = self.state.handles(1)
        name = f"put {type}"
        made = RemoteTensor(id, self._types.setdefault(type, type), Step(name), on, self._freed)
        self._handles.add([made])
        alone = self._mesh.workers > 1 and min(map(blocks.of_worker.count, set(blocks.of_worker))) == 1
        if place is not None:
            blocks = blocks.on(place, self._mesh.workers)
        steps: list[Step] = []
        for piece in pieces(blocks.size, len(blocks.distinct), STAGING_BYTES // 8):
            made.step = step = Step(name, place=place)
            parts: list[Any] = [memoryview(row[piece]) for row in rows]  # type: ignore[arg-type]
            inline = sum(map(len, parts)) <= wire.INLINE_BYTES
            if inline or not lent:
                parts = [b"".join(parts)]
            if inline:
                step.again = Replay(blocks.head(id, wire.INLINE, piece) + parts[0], puts=(id,))
            else:
                step.again = Replay(partial(blocks.head, id, piece=piece), parts, (id,))
            step.placed = alone
            steps.append(step)
            self._give(step)
        if alone:
            self._placed.keep(made, steps, total)
        if self._log or heard(Log):
            self._say(f"put {id} {type}")
        self._did("put", type, start, step.sequence)
        return made

    def settle(self) -> bool:
        """Put all handles of steps that the workers have got where they belong, though a call was interrupted, or is
        still under way further up in this thread. See `Executor.settle`."""
        if (step := self.state.last).bind is not None or not step.noted or self._moves:
            with self._lock:
                self.connection.settle()
                self._finish_moves()
        stopped, self.connection.interrupted = self.connection.interrupted, False
        return stopped

    def give_up(self, handle: Handle | None, part: PartExecutor | None = None) -> bool:
        connection = self.connection
        with connection.lock:
            connection.settle()  # a command of an interrupted call
            connection.publish()
            connection.refresh()
        first, behind = connection.finished(), self.state.next_command
        if handle is not None:
            step = self._own(handle, "the value that was waited for", part).step
            first = step.sequence
            if step.place is not None:  # steps of other parts go on that need nothing of it
                behind = first + 1
        if not connection.give_up_steps(first, behind):
            return True
        until = time.monotonic() + _GIVE_UP_SECONDS
        while connection.finished() < connection.asked():
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
            with connection.lock:
                connection.refresh()
        return True

    def worker_pids(self) -> list[int]:
        """The workers' process ids, by rank, once all have started."""
        self.until(self.state.next_command)
        return self.connection.pids()

    # -- steps -----------------------------------------------------------------------------------------------------

    def run(
        self,
        plan: Plan,
        arguments: Sequence[Argument],
        bind: Bind | None = None,
        part: PartExecutor | None = None,
        *,
        release: Sequence[Handle] = (),
    ) -> list[Handle]:
        with self._lock:
            self.connection.enter(plan.name)
            if self._found is not None:
                self._raise_found()
            timed = heard(Span)
            start = clock() if timed else 0
            on = part or self
            known = on.plans.get(id(plan))
            record = known[1] if known is not None and known[0]() is plan else self._load(plan, part)
            if len(arguments) != len(record.dtypes):
                raise MonarchError(
                    f"plan '{record.name}' takes {len(record.dtypes)} arguments, and {len(arguments)} were given"
                )
            values: list[Any] = []
            held: list[RemoteTensor] = []  # temporary handles, which live until the command is written
            types, owners = record.handle_types, record.owners
            for at, argument in enumerate(arguments):
                if (
                    type(argument) is RemoteTensor
                    and argument.type is types[at]
                    and argument.owner is (on if owners is None else owners[at])
                    and argument.taken_by is None
                ):
                    values.append(argument.id)
                else:
                    values.append(self._number_for(record, at, argument, part, held))
            if self._unloaded or len(self._freed) > wire.FREE_AT_ONCE:
                self._flush_freed()
            state = self.state
            base = state.handles(len(record.output_types))
            step = Step(record.name, (), record.place)
            if record.donated:
                step.donated = tuple([handle for at in record.donated if type(handle := arguments[at]) is RemoteTensor])
                step.commits = True
                if step.donated:
                    step.previous = (record, base, arguments)
            if record.receivers:
                step.receivers = record.receivers
            made: list[Any] = [
                RemoteTensor(base + at, each, step, on, self._freed) for at, each in enumerate(record.output_types)
            ]
            if record.owners is not None:
                for remote, giver in zip(made, record.givers, strict=True):
                    remote.owner = giver
            self._handles.add(made)
            place = state.places.take(record.room) if record.small else 0
            for at, small in record.small:
                made[at].copied = place + small.offset, small
            if bind is not None:
                step.bind = partial(bind, made)
            freed = self._next_freed() if self._freed else []
            released: list[RemoteTensor] = []
            if release:
                left = wire.FREE_AT_ONCE - len(freed)
                released = [each for each in release if type(each) is RemoteTensor][:left]
            gone = [*freed, *[each.id for each in released]] if released else freed
            body = record.struct.pack(wire.RUN, record.number, base, len(made), place, len(gone), *values)
            if gone:
                body += array("q", gone).tobytes()
            step.again = Replay(body, (), (), plan, record)
            if not record.loaded:
                self._send_plan(record, plan)
            self.connection.command(step, body)
            self._drop_freed(freed)
            for each in released:
                each.taken_by = step  # which has freed it
            self.connection.publish()
            if self._log or heard(Log):
                self._say(f"run {record.name} ({', '.join(map(str, values))}) -> {base} ...")
            if self._recorder is not None:
                self._recorder.ran(record.number, plan)
            if timed:
                self._did("run", record.name, start, step.sequence)
            if self.kept_snapshots is not None:
                self._go_on_with_snapshots(step)
            if self._checks is not None:
                self._go_on_with_checks(step)
            # Values that a step replaces in Python stay on the workers until the step is known to have worked.
            if step.undo is not None or step.sequence - self._refreshed >= _REFRESH_EVERY:
                self._refreshed = step.sequence
                self.connection.refresh()
                self._handles.forget()
                if step.sequence - state.finished_commands > self._ahead:
                    try:
                        self.connection.catch_up(step.sequence - self._ahead // 2)
                    except DeviceMeshError:
                        if state.dead is None or state.is_done(step):
                            raise
                        raise state.lost_step(step) from None
            return made

    # -- in order --------------------------------------------------------------------------------------------------

    def _give(self, step: Step) -> None:
        """Give the workers a command, or give it to them once more, and the plan and values that it needs before it."""
        assert step.again is not None
        known = step.again.known
        if known is not None and not known.loaded:
            assert step.again.plan is not None
            self._send_plan(known, step.again.plan)
        self.connection.command(step, step.again.record, step.again.parts)

    def _number_for(
        self, record: PlanRecord, at: int, argument: Any, part: PartExecutor | None, held: list[RemoteTensor]
    ) -> float | int:
        """The record's entry for an argument that is not just a handle of the right type: a number's value, or the id
        of the handle. The handle of a tensor that is placed first goes to `held`."""
        dtype = record.dtypes[at]
        if dtype is not None:
            if isinstance(argument, torch.Tensor):
                argument = argument.item()
            if not isinstance(argument, (int, float)):
                self._refuse(record, at, argument)
            return float(argument) if dtype.is_floating_point else int(argument)
        part = self._part_of(record, at, part)
        if not isinstance(argument, torch.Tensor):
            self._refuse(record, at, argument, part)
            return argument.id  # of a type that is equal, and another object
        held.append(self._put(argument, record.input_types[at], part, f"argument {at} of plan '{record.name}'"))
        return held[-1].id

    def _part_of(self, record: PlanRecord, at: int, part: PartExecutor | None) -> PartExecutor | None:
        """On which part of the mesh an input of a plan is."""
        if record.owners is None:
            return part
        owner = record.owners[at]
        return owner if isinstance(owner, PartExecutor) else None

    def _refuse(self, record: PlanRecord, at: int, argument: object, part: PartExecutor | None = None) -> None:
        """Raise the error of a wrong argument; return where it is right."""
        spec = record.inputs[at]
        what = f"{spec.kind} {spec.label!r} of plan '{record.name}'"
        if not isinstance(argument, RemoteTensor):
            raise MonarchError(f"{what} is {spec.type}, and a {type(argument).__name__} was given")
        self._own(argument, what, part)
        self.state.refuse_donated(argument, what)
        if argument.type != spec.type:
            raise MonarchError(f"{what} is {spec.type}, and a handle of {argument.type} was given")

    def _load(self, plan: Plan, part: PartExecutor | None) -> PlanRecord:
        """Send the plan to the workers, unless they have it."""
        on, place = part or self, None if part is None else part.place
        if plan.mesh != on.mesh:
            raise MonarchError(f"plan '{plan.name}' is for {plan.mesh}, and this mesh is {on.mesh}")
        check_backend(plan.collectives, plan.target)
        key = plan.hash or f"unnamed {hash(pickle.dumps(_bare(plan)))}", place
        record = self._records.get(key)
        if record is None:
            start = clock()
            check(plan)
            record = PlanRecord(next(self._plan_numbers), plan, self._types, place)
            if plan.parts:
                on_parts = [self.over(each.place) for each in plan.parts]
                record.owners = [on_parts[spec.part] for spec in plan.inputs]
                record.givers = [on_parts[spec.part] for spec in plan.outputs]
            self._send_plan(record, plan)
            self._records[key] = record
            self._did("load", record.name, start, record.number)
        # When the last object that stands for the plan is gone, the workers need not keep it either.
        identity = id(plan)
        record.users += 1

        def forget(_: object, plans: Any = on.plans, records: Any = self._records, gone: Any = self._unloaded) -> None:
            plans.pop(identity, None)
            record.users -= 1
            if record.users == 0:
                gone.append((key, record.number))

        on.plans[identity] = (weakref.ref(plan, forget), record)
        return record

    def _send_plan(self, record: PlanRecord, plan: Plan) -> None:
        blob = self.connection.packed(_bare(plan))
        where = () if record.place is None else record.place.numbers()
        self.connection.command(Step("load"), wire.numbers(wire.LOAD, record.number, *where), plan=blob)
        record.loaded = True
        if self._log:
            self._say(f"load {record.name} as {record.number}: {len(blob)} bytes")

    def heal(self, states: Sequence[tuple[str, Handle]], give_up: bool = False, elsewhere: str = "") -> bool:
        """See `Executor.heal`."""
        self.connection.elsewhere = elsewhere
        if self.restore(states, give_up) and self._recorder is None:
            started(self)
        return self._gave_up

    # -- being watched -------------------------------------------------------------------------------------------------

    def look(self) -> tuple[int, dict[int, int]]:
        """How many commands the workers have got and not finished, and how many bytes of memory each holds, by rank: on
        other hosts, when this was last asked. Takes no lock, and waits for nothing."""
        connection = self.connection
        if connection.closing:
            return 0, {}
        return max(0, connection.asked() - connection.finished()), connection.memory()

    def where(self) -> Mapping[int, WorkerProgress]:
        """Where the workers are, by rank: their stacks are asked for by signals. Without those of hosts that do not
        answer."""
        return self.connection.seen()

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
            self.connection.gather(step, set(range(self._mesh.workers)))
            with self._lock:
                self.state.check(step)
                self._recorder = recorder = Recorder(self._mesh, weakref.ref(self))
                self._unsubscribe = subscribe(recorder.hear, Span)
                weakref.finalize(self, self._unsubscribe)
                self._recorder.buffers = self._replies.of(step.sequence)
            self._recorder.offsets = self.connection.clock_offsets()
        except BaseException:
            with suppress(MonarchError):
                self._command_trace(0)
            raise
        finally:
            with self._lock:
                self._forget(step)

    def trace_stop(self) -> Trace:
        with self._lock:
            if self._recorder is None:
                raise MonarchError(f"the mesh {self._mesh} is not being traced", hint="call trace_start() first.")
            recorder, self._recorder = self._recorder, None
            self._unsubscribe()
        # A mesh that is closed, or has lost a worker, does nothing any more: its measurements are there all the same.
        with suppress(MonarchError):
            step = self._command_trace(0)
            self.until(step.sequence + 1)
            self._forget(step)
        with suppress(MonarchError):
            self.connection.measured(recorder.buffers)
        return recorder.trace()

    def _command_trace(self, words: int) -> Step:
        with self._lock:
            self.connection.enter()
            self._flush_freed()
            step = Step("trace")
            self._ask(step, wire.numbers(wire.TRACE, words))
            return step

    def inject(self, rank: int, *fault: int) -> Step:
        """Have a worker suffer a fault (see `chaos.workers`), at its place in the order of commands."""
        with self._lock:
            self.connection.enter()
            step = Step("fault")
            self.connection.command(step, wire.numbers(wire.FAULT, rank, *fault))
            self.connection.publish()
            return step

    # -- in between ------------------------------------------------------------------------------------------------

    def _next_freed(self) -> list[int]:
        """Values that are no longer needed, which leave the queue when the workers have the command (`_drop_freed`): a
        signal's handler may give it for the same ones meanwhile, and to free a value twice does no harm."""
        return [*self._freed][: wire.FREE_AT_ONCE]

    def _drop_freed(self, freed: Sequence[int]) -> None:
        for id in freed:
            try:
                self._freed.remove(id)  # it comes first, unless a handler was quicker
            except ValueError:
                pass

    def _flush_freed(self) -> None:
        """Tell the workers which values and plans are no longer needed."""
        while self._freed:
            ids = self._next_freed()
            step = Step("free")
            step.again = Replay(wire.numbers(wire.FREE, *ids))
            self._give(step)
            self._drop_freed(ids)
        while self._unloaded:
            key, number = self._unloaded.popleft()
            record = self._records.get(key)
            if record is not None and record.number == number and record.users == 0:
                del self._records[key]
                self.connection.command(Step("unload"), wire.numbers(wire.UNLOAD, number))

    def until(self, commands: int, place: Place | None = None, known: bool = False) -> None:
        """Wait until all workers, or those at a place, have finished so many commands, if that is not `known`. Raises
        DeviceMeshError where the mesh is lost."""
        with self._lock:
            self.connection.enter()
            if self._freed:
                self._flush_freed()
        if not known:
            self.connection.catch_up(commands, place)

    def _own(self, handle: Handle, what: str, part: PartExecutor | None = None) -> RemoteTensor:
        on = part or self
        if not isinstance(handle, RemoteTensor) or handle.owner is not on:
            raise MonarchError(
                f"{what} is not on this mesh, {on.mesh}",
                hint="fetch it there and distribute it here.",
            )
        return handle

    def _say(self, text: str) -> None:
        say("commands", f"{self._mesh} {self.state.next_command - 1}: {text}")

    def _did(self, kind: str, label: object, start: int, number: int) -> None:
        if heard(Span):
            tell(Span(self, kind, str(label), start, clock(), number))

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.finish_writing()
        ended(self)
        if self.state.finished_commands < self._lent:  # messages on their way to actors refer to it
            with suppress(MonarchError):
                self.connection.catch_up(self._lent)
        if self._recorder is not None:
            with suppress(MonarchError):
                self.connection.measured(self._recorder.buffers)
        self.connection.close()
        with self._lock:
            self.plans.clear()
            self._records.clear()

    def __enter__(self) -> MeshExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bare(plan: Plan) -> Plan:
    """The part of a plan that the workers need."""
    parts = tuple([replace(part, plan=_bare(part.plan)) for part in plan.parts])
    return replace(plan, graph="", traced="", report=None, costs={}, parts=parts)


def start_local(mesh: MeshSpec) -> Executor:
    """Start a worker process on this host for each place of `mesh`. Raises MonarchError where that is too many for the
    machine's cores or memory."""
    return MeshExecutor(mesh)
