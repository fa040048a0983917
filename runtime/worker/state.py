"""A worker's values and plans, and the effect of each command on them: no sockets, no clock, no waiting but in the
plan's collectives."""

from __future__ import annotations

import pickle
import struct
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from monarch.compiler.loading import load
from monarch.compiler.mesh import NDSlice
from monarch.compiler.plan import DTYPE_NAMES, MeshSpec, Plan, PlanError
from monarch.runtime.processes.looking import stopping
from monarch.runtime.shared import wire
from monarch.runtime.shared.bits import bit_sum
from monarch.runtime.shared.definitions import define
from monarch.runtime.shared.place import ranks_of
from monarch.runtime.shared.results import Results, Small
from monarch.runtime.shared.signals import Aborted
from monarch.runtime.shared.wire import Report
from monarch.runtime.worker.arena import Arena, NoRoomError
from monarch.runtime.worker.exchange import Actors
from monarch.runtime.worker.failures import explain, locate
from monarch.runtime.worker.files import Files
from monarch.runtime.worker.frame import Observer
from monarch.runtime.worker.freed import Freed
from monarch.runtime.worker.lending import Lending
from monarch.runtime.worker.loaded import LoadedPlan, Steps, describe
from monarch.runtime.worker.messages import GONE, Buffer, Count, Fetched, Message, Missing, Snapshot
from monarch.runtime.worker.moving import move
from monarch.runtime.worker.tracing import CountedValues, Tracer

if TYPE_CHECKING:
    from monarch.runtime.collectives.mirror import Mirror


class WorkerState(Lending):
    """`handle(step, body)` carries out command number `step` and gives the messages for the controller.

    A report among the messages says that the command failed here. The values that it would have made are then missing,
    those that it would have replaced are kept (unless the step had committed), and commands that do not need them work.
    """

    def __init__(
        self,
        mesh: MeshSpec,
        rank: int,
        collectives: Steps,
        staging: Callable[[int, int], torch.Tensor],
        tracer: Callable[[int], Tracer | None],
        received: Callable[[int], bytes],
        actors: Actors | None = None,
        results: Results | None = None,
    ) -> None:
        """`tracer(words)` gives what measures into a buffer of so many words; with 0 it ends that, and gives None.
        `received(number)` gives the file of the plan that a LOAD names. Without `actors` there is no LEND and no
        ADOPT. `results` is where a controller reads what this worker copies there."""
        self.rank = rank
        self.values: dict[int, torch.Tensor | Missing] = {}
        self._freed = Freed()
        self.plans: dict[int, LoadedPlan | Report | None] = {}
        """By number; None for those that run on other workers."""
        self._unmade: dict[int, tuple[Any, NDSlice | None]] = {}
        """Files of plans that could not be made, as memory was short, and for whom they are: each step tries again."""
        self._mesh = mesh
        self._everyone = range(mesh.workers)
        self._session(collectives)
        self._staging = staging
        self.new_tracer = tracer
        self._received = received
        self.actors = actors
        self._results = results
        self.seen = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._shared: frozenset[int] = frozenset()
        """The values that are in a snapshot too: no step may write over them."""
        self._files = Files(mesh, rank, lambda handle: self.values.get(handle, GONE))
        self.arena = Arena()
        self._tracer: Tracer | None = None
        self._mixed = False
        """Whether there were plans for a GPU: then values are on the GPU or on the CPU, and move to where a plan needs
        them."""
        self._donated: list[int] = []
        self._small: Sequence[Small] = ()
        self._small_place = 0
        self._committed = False
        self.handlers: dict[int, Callable[[int, bytearray], list[Message]]] = {
            wire.RUN: self._run,
            wire.PUT: self._put,
            wire.LOAD: self._load,
            wire.UNLOAD: self._unload,
            wire.FREE: self._free,
            wire.FETCH: self._fetch,
            wire.COUNT: self._count,
            wire.TRACE: self._trace,
            wire.LEND: self._lend,
            wire.ADOPT: self._adopt,
            wire.COPY: self._copy,
            wire.TAKE: self._take,
            wire.SEND: self._send,
            wire.BACK: self._back,
            wire.GIVE: self._give,
            wire.LEAVE: self._leave,
            wire.SUM: self._sum,
            wire.WRITE: self._files.write,
            wire.WRITTEN: self._files.tell,
            wire.READ: lambda step, body: self._files.read(step, body, self.values),
            wire.FAULT: self._suffer,
        }
        self._untraced = self.handlers

    def handle(self, step: int, body: bytearray) -> list[Message]:
        (kind,) = wire.KIND.unpack_from(body)
        if self._freed.many:
            self.let_go()
        return self.handlers[kind](step, body)

    def let_go(self) -> None:
        """Let go of freed values that no other worker needs any more."""
        self._freed.let_go(self._collectives.at)

    @property
    def mirror(self) -> Mirror | None:
        """This worker's way to other hosts."""
        return self._collectives.at.mirror

    @property
    def beside_actors(self) -> bool:
        """Whether this worker is in a process of actors."""
        return self.actors is not None

    def _session(self, collectives: Steps) -> None:
        self._collectives, self._begin, self._is_stopped = collectives, collectives.at.begin, collectives.at.is_stopped
        self._parts: dict[tuple[MeshSpec, NDSlice, tuple[int, ...] | None, tuple[int, ...] | None], Steps] = {}
        self._ranks: dict[int, Collection[int]] = {}
        """The workers that a plan runs on, by its number, where these are not all."""
        self._together: dict[Collection[int], int] = {}
        """By workers, the command behind the last step of several parts that these have run together."""

    def take_back(self) -> None:
        """A session has ended: the values are here again that a step may read which others have not finished."""
        self.values.update(self._freed.take())

    def renew(self, collectives: Steps) -> None:
        """Begin a new session: with the values that there are, and without plans, which have the last one's
        collectives."""
        self._session(collectives)
        self.plans.clear()
        self._unmade.clear()
        self._files.stop_all()
        self.arena.fit(0)
        self.handlers, self._tracer = self._untraced, None
        self.values = {handle: value for handle, value in self.values.items() if isinstance(value, torch.Tensor)}

    def close(self) -> None:
        """End the links of the session's collectives."""
        for collectives in (self._collectives, *self._parts.values()):
            collectives.close()
        self._collectives.at.sending.stop()

    def peers(self, body: bytearray) -> Collection[int]:
        """The workers that a command is for, in which they wait for each other."""
        kind, number = wire.PAIR.unpack_from(body)
        return self._ranks.get(number, self._everyone) if kind == wire.RUN else self._everyone

    def table(self, number: int) -> Fetched:
        """The handles that have a value here, as the answer `number`."""
        held = [handle for handle, value in self.values.items() if isinstance(value, torch.Tensor)]
        return Fetched(number, torch.tensor(held, dtype=torch.int64))

    def run_next(self, observer: Callable[[LoadedPlan], Observer]) -> None:
        """Have the next step run with an observer that is made for its plan."""
        before = self.handlers

        def run(step: int, body: bytearray) -> list[Message]:
            plan = self.plans[wire.RUN_HEAD.unpack_from(body)[1]]
            if plan is None:  # the next is meant that this worker has a part in
                return before[wire.RUN](step, body)
            self.handlers = before
            if not isinstance(plan, LoadedPlan):
                return before[wire.RUN](step, body)
            plan.frame.measure(observer(plan))
            try:
                return before[wire.RUN](step, body)
            finally:
                plan.frame.measure(self._tracer)

        self.handlers = {**before, wire.RUN: run}

    # -- measuring -------------------------------------------------------------------------------------------------

    def _trace(self, step: int, body: bytearray) -> list[Message]:
        """Measure from here on, or no longer: handlers, frames and values are exchanged for ones that note times and
        bytes, and back, so that a worker that does not measure does not ask whether it should."""
        _, words = wire.unpack_numbers(body)
        try:
            tracer = self.new_tracer(words)
        except OSError as error:
            return [Report("failed", self.rank, step, f"tracing with a buffer of {8 * words} bytes: {error}")]
        self._tracer = tracer
        self.values = dict(self.values)
        self.handlers = self._untraced
        if tracer is not None:
            self.values = CountedValues(self.values, tracer.held)
            self.handlers = {
                kind: handler if kind in (wire.TRACE, wire.COUNT) else partial(self._measured, kind, handler, tracer)
                for kind, handler in self._untraced.items()
            }
        for plan in self.plans.values():
            if isinstance(plan, LoadedPlan):
                plan.frame.measure(tracer)
        return [] if tracer is None else [Buffer(step, tracer)]

    def _measured(
        self,
        kind: int,
        handler: Callable[[int, bytearray], list[Message]],
        tracer: Tracer,
        step: int,
        body: bytearray,
    ) -> list[Message]:
        start = tracer.clock()
        messages = handler(step, body)
        if kind == wire.RUN:
            number = wire.RUN_HEAD.unpack_from(body)[1]
            if self.plans[number] is not None:
                tracer.step(step, number, start, failed=bool(messages))
        else:
            tracer.other(kind, step, start)
        return messages

    def _suffer(self, step: int, body: bytearray) -> list[Message]:
        _, rank, *fault = wire.unpack_numbers(body)
        if rank != self.rank:
            return []
        try:
            load("monarch.runtime.worker.faults:suffer")(self, *fault)
        except Exception as error:
            return [Report("failed", self.rank, step, f"injecting a fault: {describe(error)}")]
        return []

    # -- steps -----------------------------------------------------------------------------------------------------

    def _run(self, step: int, body: bytearray) -> list[Message]:
        _, number, base, outputs, place, freed = wire.RUN_HEAD.unpack_from(body)
        if freed:
            self._drop(step, wire.last_numbers(body, freed))
        plan = self.plans[number]
        if number in self._unmade:
            self._make(step, number, *self._unmade.pop(number))
            plan = self.plans[number]
        if not isinstance(plan, LoadedPlan):
            return [] if plan is None else [self._miss(step, base, outputs, replace(plan, step=step))]
        if stopping:
            stopping.clear()
        if self._is_stopped(step):
            return [self._miss(step, base, outputs, Report("stopped", self.rank, step))]
        arguments: list[Any] = list(plan.struct.unpack_from(body, wire.RUN_HEAD.size))
        self._donated = [arguments[at] for at in plan.donated] if plan.donated else []
        self._committed = False
        values = self.values
        elsewhere: list[tuple[int, int]] = []
        for at, dtype in enumerate(plan.dtypes):
            if dtype is not None:
                arguments[at] = torch.scalar_tensor(arguments[at], dtype=dtype, device=plan.device)
                continue
            handle = arguments[at]
            value = arguments[at] = values.get(handle, GONE)
            if isinstance(value, Missing):
                report = Report("dependent", self.rank, step, root=value.root)
                return [self._miss(step, base, outputs, report)]
            if self._mixed and value.device != plan.device:
                elsewhere.append((at, handle))
        self._begin(step)
        try:
            if plan.sends is not None:
                self._collectives.at.sending.begin(step, plan.sends.readers, arguments)
            if self._donated:
                self._part_from_readers(plan, arguments)
            for at, handle in elsewhere:
                arguments[at] = values[handle] = arguments[at].to(plan.device)
            if plan.failed:
                plan.failed = False
                if plan.ready is not None:
                    plan.ready.forget()
            self._small, self._small_place = plan.small_early, place
            results = plan.run(arguments)
            for wait in plan.waits:
                wait()
            if plan.sends is not None:
                self._collectives.at.sending.finish(plan.sends.last)
        except Aborted as aborted:
            plan.failed = True
            self._collectives.at.sending.fail()
            report = Report(aborted.kind, self.rank, step, error=str(aborted), committed=self._committed)
            locate(report, plan, aborted)
            return [self._miss(step, base, outputs, report)]
        except Exception as error:  # any error of an op is the failure of the step
            plan.failed = True
            self._collectives.at.sending.fail()
            report = explain(self.rank, step, plan, error, self._committed)
            error.__traceback__ = None  # it holds the step's values
            return [self._miss(step, base, outputs, report)]
        gives = plan.gives
        for at, result in enumerate(results):
            values[base + gives[at]] = result
        if plan.shares:
            self._together[self._ranks[number]] = step + 1
        if self._results is not None:
            for small in plan.small:
                self._results.write(place + small.offset, small, results[small.output])
        return []

    def _part_from_readers(self, plan: LoadedPlan, arguments: list[Any]) -> None:
        """Values that the step may write in place, and that others read, are copied for the step: for actors, sends
        beside the steps that follow, snapshots and files."""
        if self.seen:
            self._part_from_actors(plan, arguments)
        sending = self._collectives.at.sending
        for at, handle in zip(plan.donated, self._donated, strict=True):
            if (
                handle in self._shared
                or (sending.is_busy and sending.holds(arguments[at]))
                or (self._files.writing and self._files.is_held(handle))
            ):
                arguments[at] = arguments[at].clone()

    def _halt(self) -> None:
        if not self._committed:
            self._collectives.at.halt()

    def _miss(self, step: int, base: int, outputs: int, report: Report) -> Report:
        root = report.root if report.kind == "dependent" else step
        for at in range(outputs):
            self.values[base + at] = Missing(root, report.committed)
        return report

    def _commit(
        self, ranks: Collection[int], check: Callable[[], None], meet: Callable[[], None]
    ) -> Callable[..., None]:
        """The commit of a plan that runs on these workers, called with the small results that stand by then."""

        def commit(*small: object) -> None:
            check()
            if self._results is not None:
                for each, value in zip(self._small, small, strict=True):
                    self._results.write(self._small_place + each.offset, each, value)
            if self._together:
                self._await_other_parts(ranks)
            meet()
            self._committed = True
            for handle in self._donated:  # so that the plan's frees do free
                self.values.pop(handle, None)
                if self.seen:
                    self.seen.pop(handle, None)

        return commit

    def _await_other_parts(self, ranks: Collection[int]) -> None:
        """Workers of another part may still be in a step that reads what these are about to replace, and die there."""
        at = self._collectives.at
        for together, command in list(self._together.items()):
            if not at.await_passed(command, [rank for rank in together if rank not in ranks]):
                at.look(ranks)
            del self._together[together]

    # -- plans -----------------------------------------------------------------------------------------------------

    def _load(self, step: int, body: bytearray) -> list[Message]:
        _, number, *place = wire.unpack_numbers(body)
        blob = self._received(number)
        ranks = ranks_of(place) if place else None
        if ranks is not None:
            if self.rank not in ranks:
                self.plans[number] = None
                return []
            self._ranks[number] = frozenset(ranks)
        return self._make(step, number, blob, ranks)

    def _make(self, step: int, number: int, blob: Any, ranks: NDSlice | None) -> list[Message]:
        """Make the plan of a file for these workers, or a report for each step that would run it."""
        try:
            plan: Plan | PlanError
            # Made by the process of which this one is a fork.
            plan, kernels, ops = pickle.loads(blob)
            define(ops)
            if isinstance(plan, PlanError):  # its host has refused it
                raise plan
            self._mixed = self._mixed or plan.target != "cpu"
            collectives = self._collectives if ranks is None else self._among(plan.mesh, ranks)
            whole, part = plan, 0
            if whole.parts:
                joint = tuple([rank for each in whole.parts for rank in each.place.ndslice])
                if self.rank not in joint:
                    self.plans[number] = None
                    return []
                part = next(at for at, each in enumerate(whole.parts) if self.rank in each.place.ndslice)
                plan = whole.parts[part].plan
                self._ranks[number] = frozenset(joint)
                alike = [
                    rank
                    for at, each in enumerate(whole.parts)
                    if (at in whole.senders) == (part in whole.senders)
                    for rank in each.place.ndslice
                ]
                collectives = self._among(plan.mesh, whole.parts[part].place.ndslice, joint, tuple(alike))
            self._fit(plan)
            commit = partial(self._commit, self._ranks.get(number, self._everyone))
            self.plans[number] = loaded = LoadedPlan(
                plan, self.rank, collectives, self.arena, kernels, commit, self._halt, whole, part
            )
            loaded.frame.measure(self._tracer)
        except Exception as error:  # told at each step that would run the plan
            report = Report("failed", self.rank, step, describe(error))
            if isinstance(error, NoRoomError):
                report.hint, report.source = error.hint, error.source
            elif not isinstance(error, PlanError):  # of one that is not for this machine the message says it all
                report.traceback = "".join(traceback.format_exception(error))
            if not isinstance(error, PlanError):
                self._unmade[number] = blob, ranks
            self.plans[number] = report
            return [report]
        return []

    def _among(
        self,
        mesh: MeshSpec,
        ranks: NDSlice,
        joint: tuple[int, ...] | None = None,
        committing: tuple[int, ...] | None = None,
    ) -> Steps:
        """The collectives of plans for some of the workers, with these dims; or of one part of plans of several, which
        run on `joint`, and of which those on `committing` commit together."""
        key = (mesh, ranks, joint, committing)
        if key not in self._parts:
            self._parts[key] = self._collectives.over(mesh, tuple(ranks), joint, committing)
        return self._parts[key]

    def _unload(self, step: int, body: bytearray) -> list[Message]:
        for number in wire.unpack_numbers(body)[1:]:
            self.plans.pop(number, None)
            self._unmade.pop(number, None)
            self._ranks.pop(number, None)
        if not any(isinstance(plan, LoadedPlan) and plan.frame.plan.arena for plan in self.plans.values()):
            self.arena.fit(0)
        return []

    def _fit(self, plan: Plan) -> None:
        """Have room for a plan's values. Raises NoRoomError where there is none."""
        try:
            moved = plan.arena and self.arena.fit(plan.arena)
        except OSError as error:
            raise NoRoomError(plan, error) from error
        if moved:
            for each in self.plans.values():
                if isinstance(each, LoadedPlan):
                    each.frame.use(self.arena)

    # -- values ----------------------------------------------------------------------------------------------------

    def _put(self, step: int, body: bytearray) -> list[Message]:
        head = wire.PUT_HEAD
        _, handle, code, ndim, size, offset, start, end, workers = head.unpack_from(body)
        shape = struct.unpack_from(f"={ndim}q", body, head.size)
        at = head.size + 8 * ndim
        (block,) = struct.unpack_from("=q", body, at + 8 * self.rank)
        if block < 0:  # it is placed on other workers
            return []
        at += 8 * workers
        length = end - start
        try:
            value = self.values.get(handle)
            if start == 0:
                value = self.values[handle] = torch.empty(shape, dtype=wire.DTYPE_LIST[code])
            if isinstance(value, torch.Tensor) and length:
                row = wire.in_bytes(value)
                if offset == wire.INLINE:
                    piece = torch.frombuffer(body, dtype=torch.uint8, count=length, offset=at + block * length)
                else:
                    piece = self._staging(offset + block * length, length)
                row[start:end] = piece
        except RuntimeError as error:  # no memory left
            what = f"{DTYPE_NAMES[wire.DTYPE_LIST[code]]}{list(shape)}"
            self.values[handle] = Missing(step)
            return [Report("failed", self.rank, step, f"placing {what} ({size} bytes): {describe(error)}")]
        return []

    def _copy(self, step: int, body: bytearray) -> list[Message]:
        """Give values to workers that have none of them."""
        numbers = wire.unpack_numbers(body)[1:]
        return self._move(step, numbers, lambda handle, pair: self.values.get(handle), self._set)

    def _set(self, handle: int, pair: tuple[int, int], value: torch.Tensor) -> None:
        self.values[handle] = value

    def _move(
        self,
        step: int,
        body: Sequence[int],
        held: Callable[[int, tuple[int, int]], torch.Tensor | Missing | None],
        keep: Callable[[int, tuple[int, int], torch.Tensor], None],
    ) -> list[Message]:
        """Move blocks from worker to worker, as a COPY says, by `moving.move`."""
        self._begin(step)
        return move(step, body, self.rank, partial(self._collectives.permute, self._mesh.names), held, keep)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def _take(self, step: int, body: bytearray) -> list[Message]:
        """Values that no step replaces are shared with the snapshot; `_run` copies the others before it does."""
        _, number, kept = wire.unpack_numbers(body)
        self._snapshots = {at: each for at, each in self._snapshots.items() if at >= kept}
        tensors = {handle: value for handle, value in self.values.items() if isinstance(value, torch.Tensor)}
        if number >= 0:
            self._snapshots[number] = Snapshot(tensors, {})
        self._shared = frozenset().union(*(each.values for each in self._snapshots.values()))
        return []

    def _send(self, step: int, body: bytearray) -> list[Message]:
        _, number, *rest = wire.unpack_numbers(body)
        snapshot = self._snapshots.get(number, Snapshot({}, {}))  # it may have been given up meanwhile

        def keep(handle: int, pair: tuple[int, int], block: torch.Tensor) -> None:
            snapshot.others[pair[0], handle] = block

        return self._move(step, rest, lambda handle, pair: snapshot.values.get(handle), keep)

    def _back(self, step: int, body: bytearray) -> list[Message]:
        _, number = wire.unpack_numbers(body)
        snapshot = self._snapshots.get(number)
        self.values = {} if snapshot is None else dict(snapshot.values)
        return []

    def _give(self, step: int, body: bytearray) -> list[Message]:
        _, number, *rest = wire.unpack_numbers(body)
        snapshot = self._snapshots.get(number, Snapshot({}, {}))
        return self._move(step, rest, lambda handle, pair: snapshot.others.get((pair[1], handle)), self._set)

    def _free(self, step: int, body: bytearray) -> list[Message]:
        self._drop(step, wire.unpack_numbers(body)[1:])
        return []

    def _leave(self, step: int, body: bytearray) -> list[Message]:
        _, size, *numbers = wire.unpack_numbers(body)
        if self.rank not in ranks_of(numbers[:size]):
            self._drop(step, numbers[size:])
        return []

    def _drop(self, step: int, handles: Sequence[int]) -> None:
        values, seen, kept = self.values, self.seen, {}
        for handle in handles:
            value = values.pop(handle, None)
            if isinstance(value, torch.Tensor):
                kept[handle] = value
            if seen:
                seen.pop(handle, None)
        if kept and self.actors is None:  # a mesh in processes of actors is not healed
            self._freed.keep(step, kept, self._collectives.at)

    def _fetch(self, step: int, body: bytearray) -> list[Message]:
        _, handle, *ranks = wire.unpack_numbers(body)
        if self.rank not in ranks:
            return []
        value = self.values.get(handle, GONE)
        if isinstance(value, Missing):
            return [Report("dependent", self.rank, step, root=value.root)]
        if not isinstance(value, torch.Tensor):
            return [Report("failed", self.rank, step, f"the value is a {type(value).__name__}, not one tensor")]
        return [Fetched(step, value.cpu())]

    def _sum(self, step: int, body: bytearray) -> list[Message]:
        held = [self.values.get(handle, GONE) for handle in wire.unpack_numbers(body)[1:]]
        sums = [bit_sum(value) if isinstance(value, torch.Tensor) else None for value in held]
        told = [-1 if each is None else int(each) & 0xFFFFFFFF for each in sums]
        return [Fetched(step, torch.tensor(told, dtype=torch.int64))]

    def _count(self, step: int, body: bytearray) -> list[Message]:
        return [Count(step, len(self.values))]
