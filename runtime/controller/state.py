"""What the controller knows of its mesh: steps under way (`steps.py`), and their failures. Pure: its methods
(`finished`, `report`, `died`) take events and decide what follows; it reads no socket and no shared memory.

A signal's handler may run between any two lines of the controller, in the middle of a method: it may raise, so that the
rest of the method never runs, or use the mesh itself before the method goes on. So each method can be run again from
its start, also late, after the world has moved on: then it changes nothing. What must not come apart stands on one
line without a call, where Python runs no handler.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from signal import Signals
from types import MappingProxyType
from typing import Any, TypeVar

from monarch.compiler.plan import (
    AnomalyError,
    DeviceIndexError,
    DeviceMeshError,
    LostError,
    MeshSpec,
    MonarchError,
    ReplicaError,
    check_kind,
)
from monarch.runtime.controller.steps import RemoteTensor, Replay, Step
from monarch.runtime.processes.looking import Exit
from monarch.runtime.shared.place import Place
from monarch.runtime.shared.results import Places
from monarch.runtime.shared.wire import Report

E = TypeVar("E", bound=MonarchError)

_REMEMBERED = 1024
_KINDS: tuple[tuple[type[DeviceMeshError], re.Pattern[str]], ...] = (
    (
        DeviceIndexError,
        re.compile(r"^IndexError\b|\bindex .* is out of bounds for dimension|\bis out of DATA bounds\b"),
    ),
)
"""The errors that failed workers' words stand for, where it is not the general one. Of an index that is out of range
PyTorch raises an IndexError, for `gather`, `scatter` and `index_select`, as which `x[:, i]` runs, a RuntimeError."""

_CHECK = "CheckFailed: "
_KIND_RANK = {"stopped": 0, "failed": 1, "dependent": 2, "aborted": 3}

_GO_ON = "monarch.heal_mesh(mesh) continues from here, with the values of the other workers."


def _last_words(exit: Exit) -> str:
    """The hint on a worker's end: its last output, and what to do."""
    hint = [_GO_ON]
    if exit.status == -Signals.SIGKILL:
        hint.append("A worker that was killed by SIGKILL was most often killed for memory: look at the kernel's log.")
    if exit.log:
        hint += ["the worker's last lines:", *("  " + line for line in exit.log.splitlines())]
    return "\n".join(hint)


class ControllerState:
    def __init__(self, mesh: MeshSpec, failed: Callable[[DeviceMeshError], object] = lambda error: None) -> None:
        """`failed` is called for each step that fails, and when the mesh is lost."""
        self.mesh = mesh
        self._whole = Place.whole(mesh)
        self._tell = failed
        self.last = Step("start")
        """The newest step: the workers get it in the moment in which this is set."""
        self.last.noted = True
        self.first = 0
        """The session's first command."""
        self.next_handle = 1
        self.places = Places()
        self.finished_commands = 0
        self.dead: DeviceMeshError | None = None
        self.gone: dict[int, str] = {}
        """How the workers have ended that have, by rank."""
        self.quiet: dict[int, int] = {}
        """After a death, the workers that have ended their session, and how many commands each has finished."""
        self.doubts: dict[int, int] = {}
        """After a death, the workers that ask whether others have passed the commit of a step."""
        self.told: dict[Place | None, int] = {}
        """By place, the first step whose stop by a death was reported: it, and those behind it on that place, are
        dropped."""
        self.committed: dict[Place | None, int] = {}
        """By place, the last step that is known to have replaced state."""
        self._under_way: deque[Step] = deque()
        self.log: deque[tuple[Step, Replay]] | None = None
        """The steps that can be given again, with how, where they are kept for snapshots; in order."""
        self._reports: dict[int, dict[int, Report]] = {}
        self._failed: list[Step] = []
        """Steps that failed and that are still to be undone in Python, in order."""
        self._failures: OrderedDict[int, MonarchError] = OrderedDict()

    # -- commands --------------------------------------------------------------------------------------------------

    @property
    def next_command(self) -> int:
        return self.last.sequence + 1

    def note(self, step: Step) -> None:
        """Note that the workers get a step. To note it again changes nothing."""
        for handle in step.donated:
            handle.taken_by = handle.taken_by if step.noted else step
        if self.log is not None and not step.noted and step.again is not None:
            self.log += ((step, step.again),)
        self._under_way += () if step.noted else (step,)
        step.noted = True

    def handles(self, count: int) -> int:
        """The first of `count` new handles' numbers."""
        first, self.next_handle = self.next_handle, self.next_handle + count
        return first

    def refuse_donated(self, handle: RemoteTensor, what: str) -> None:
        """Raise MonarchError for a handle whose value another step has taken."""
        step = handle.taken_by
        if step is not None:
            if step.error is not None:
                raise fresh(step.error)
            raise MonarchError(
                f"{what} was donated to step {step.sequence} ('{step.name}'), which replaces it",
                hint="use the handle that that step returned for it; a failed step gives its inputs back.",
            )

    def step_of(self, command: int) -> Step | None:
        """The step under way with this number."""
        return next((step for step in tuple(self._under_way) if step.sequence == command), None)

    def coordinates_of(self, rank: int) -> str:
        return self._whole.name_of(rank)

    def _place_of(self, step: Step) -> Place:
        return step.place or self._whole

    def _deciding(self, step: Step) -> Sequence[int]:
        """The workers by which it is judged whether a step is done."""
        return step.receivers or self._place_of(step).ranks

    # -- what happens ----------------------------------------------------------------------------------------------

    def report(self, report: Report) -> None:
        """A worker says that a command failed there. Reports come before the command counts as finished. To say it
        again changes nothing."""
        self._reports.setdefault(report.step, {})[report.rank] = report

    def finished(self, commands: int) -> None:
        """Every worker has finished this many commands, and all reports of theirs are in."""
        under_way, reports = self._under_way, self._reports
        while under_way and (step := under_way[0]).sequence < commands:
            if not step.ended:
                self._end(step)
            _ = under_way.popleft() if under_way and under_way[0] is step else None
        for sequence in [sequence for sequence in reports if sequence < commands] if reports else ():
            if sequence not in self._failures:
                self._remember(sequence, self.explain(list(reports[sequence].values())))
            del reports[sequence]
        self.finished_commands = commands if commands > self.finished_commands else self.finished_commands

    def finished_by(self, commands: Mapping[int, int]) -> None:
        """Each of these workers has finished so many commands, and all their reports are in: the effects of steps that
        concern some workers alone, and that these have finished."""
        for step in tuple(self._under_way):
            if step.place is not None and not step.ended and self._finished_by(step, commands):
                self._end(step)

    def _finished_by(self, step: Step, commands: Mapping[int, int]) -> bool:
        """Whether all workers that a step concerns, of those that are known, have finished it; and any is."""
        known = [commands[rank] for rank in self._deciding(step) if rank in commands]
        return bool(known) and min(known) > step.sequence

    def _end(self, step: Step) -> None:
        """All workers that a step concerns have finished it."""
        if step.sequence in self._reports:
            self._fail(step, list(self._reports[step.sequence].values()))
        elif step.error is None:
            step.previous = step.undo = None
            if step.commits:
                self.committed[step.place] = step.sequence
        step.donated = ()
        step.again = step.again if step.placed else None
        step.ended = True

    def died(self, deaths: Iterable[Exit], host: str = "") -> None:
        """Workers on a host have ended: nothing of this mesh can be relied on any more."""
        deaths = list(deaths)
        for each in deaths:
            self.gone.setdefault(each.rank, each.how)
        if self.dead is None and deaths:
            where = f"on host {host} " if host else ""
            who = "; ".join(f"worker {self.coordinates_of(each.rank)} {where}{each.how}" for each in deaths)
            first = deaths[0]
            facts = {**_facts(self._whole, first.rank), "host": host, "exit_status": first.status, "log": first.log}
            if first.status is not None and -first.status in set(Signals):
                facts["signal"] = Signals(-first.status).name
            self.give_up(f"the mesh {self.mesh} has lost a worker: {who}", _last_words(first), facts)

    def give_up(self, message: str, hint: str = "", facts: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.end(DeviceMeshError(message, hint=hint or _GO_ON).knowing(**facts))

    def end(self, error: DeviceMeshError) -> None:
        """The mesh takes no steps any more, for this reason."""
        if self.dead is None:
            self.dead = error.knowing(mesh_lost=True)
            self._tell(self.dead)

    def check(self, step: Step) -> None:
        """Raise what went wrong in a finished step, if anything did."""
        if step.error is not None:
            raise fresh(step.error)
        if self.dead is not None:
            raise fresh(self.dead)

    def recover(self, handle: RemoteTensor) -> RemoteTensor:
        """For a state that a failed step was to make: the newest value of it that there is, or that was lost. Raises
        what `check` raises where there is none."""
        handle = self.newest(handle)
        if not isinstance(handle.step.error, LostError):  # reading it raises the error
            self.check(handle.step)
        return handle

    def newest(self, handle: RemoteTensor) -> RemoteTensor:
        """`recover`, also where the mesh is lost."""
        while handle.step.error is not None and not isinstance(handle.step.error, LostError):
            before = None
            if handle.step.previous is not None:
                record, base, arguments = handle.step.previous
                at = dict(record.state_pairs).get(handle.id - base)
                before = None if at is None else arguments[at]
            if not isinstance(before, RemoteTensor):
                raise fresh(handle.step.error)
            handle = before
        return handle

    def undo(self) -> None:
        """TakeBack in Python what failed steps have done to it, the newest first."""
        while self._failed:
            step = self._failed[-1]
            if step.undo is not None:
                step.undo(step.dropped)
            step.undo = None
            _ = self._failed.pop() if self._failed and self._failed[-1] is step else None

    # -- after a death -----------------------------------------------------------------------------------------------

    def ended(self, rank: int, finished: int) -> None:
        """A worker has ended its session, and has finished so many commands."""
        if finished >= self.first:
            self.doubts.pop(rank, None)
            self.quiet[rank] = finished

    def doubted(self, rank: int, step: int) -> None:
        """A worker that waits at a step's commit asks whether others have passed it."""
        if step >= self.first:
            self.doubts[rank] = step

    @property
    def expected(self) -> list[int]:
        """The workers that live, and have said neither of both."""
        known = self.gone.keys() | self.quiet.keys() | self.doubts.keys()
        return [rank for rank in range(self.mesh.workers) if rank not in known]

    def verdicts(self) -> dict[int, tuple[int, bool]]:
        """The answers to the workers that asked, by rank: the step, and whether it is committed. Call this when no
        further worker is expected. A step is committed where any worker that it concerns has passed its commit: then
        all of these had come to it, and the rest of it cannot fail on any."""
        far = self.quiet | self.doubts
        steps = {step: self.step_of(step) for step in self.doubts.values()}
        judges = {at: self._whole.ranks if step is None else self._deciding(step) for at, step in steps.items()}
        return {
            rank: (step, any(far.get(other, -1) > step for other in judges[step])) for rank, step in self.doubts.items()
        }

    @property
    def is_quiet(self) -> bool:
        """Whether all workers that live have ended their session."""
        return len(self.gone.keys() | self.quiet.keys()) == self.mesh.workers

    @property
    def survivors(self) -> list[int]:
        """The workers that live and have ended their session. A place whose worker was to be replaced counts as gone,
        also where the healing in which it was came to nothing, and its new worker has said something."""
        return sorted(self.quiet.keys() - self.gone.keys())

    def conclude(self) -> None:
        """All workers that live have ended their session: what all of those that it concerns have finished is done, and
        the first step that they have not is what the death stopped."""
        for step in tuple(self._under_way):
            if not step.ended and self._finished_by(step, self.quiet):
                self._end(step)
        left = [step for step in self._under_way if not step.ended]
        self.finished(min((step.sequence for step in left), default=self.next_command))
        stopped = next((step for step in left if step.again is not None and step.again.plan), None)
        assert self.dead is not None
        if stopped is not None and "step" not in self.dead.facts and not isinstance(self.dead, ReplicaError):
            places = [report for report in self._reports.get(stopped.sequence, {}).values() if report.op]
            where = min(places, key=lambda report: report.rank, default=None)
            facts = {"step": stopped.sequence, "program": stopped.name, "op": "" if where is None else where.op}
            source = where.source if where is not None else None
            waiting = f", where the others waited in {where.op}" if where is not None else ""
            self.dead = DeviceMeshError(
                f"{self.dead.message}, in step {stopped.sequence} ('{stopped.name}'){waiting}",
                hint=self.dead.hint,
                source=source,
            ).knowing(**self.dead.facts, **facts)

    def is_done(self, step: Step) -> bool:
        """Whether all workers that live have done a step, and it has worked."""
        return step.error is None and (step.ended or step.sequence < self.finished_commands)

    def lost_step(self, step: Step) -> MonarchError:
        """The error for a call that needs a step that a death stopped: from now on neither this step nor any behind it
        is applied."""
        assert self.dead is not None
        if step.error is not None:
            return fresh(step.error)
        self.tell_of(step)
        error = fresh(self.dead)
        return error.knowing(step=step.sequence, program=step.name)

    def tell_of(self, step: Step) -> None:
        """A call reports that a death stopped a step: neither this step nor any behind it there is applied."""
        self.told[step.place] = min(step.sequence, self.told.get(step.place, step.sequence))

    def refused(self, program: str) -> DeviceMeshError:
        """The error of a program called when the mesh is lost. It names the first step that is not applied: this
        call, or an earlier one that somebody was told of. The step that the death stopped, which stands in the message,
        may be one that is given again."""
        assert self.dead is not None
        if not self.told:
            return fresh(self.dead).knowing(step=self.next_command, program=program)
        first = min(self.told.values())
        names = {step.sequence: step.name for step in self._under_way}
        return fresh(self.dead).knowing(step=first, program=names.get(first, ""))

    def drop(self) -> list[Step]:
        """Give up the step of which somebody was told that it failed, and all behind it on the same place; forget what
        else is under way, and give the steps of it that are to be given again, in order."""
        assert self.dead is not None
        again = []
        for step in self._under_way:
            if step.ended:
                pass
            elif step.sequence >= self.told.get(step.place, self.next_command):
                step.error = DeviceMeshError(
                    f"step {step.sequence} ('{step.name}') was dropped when the mesh was healed: {self.dead.message}",
                    hint="the first step that is known to have failed, and those called after it, are not applied:\n"
                    "call them again. All before it are.",
                ).knowing(**{**self.dead.facts, "step": step.sequence, "program": step.name, "mesh_lost": False})
                step.dropped = True
                self._fail(step, [])
            elif step.again is not None:
                again.append(step)
            step.expects = False
        self._under_way.clear()
        self._reports.clear()
        self.told.clear()
        return again

    def miss(self, step: Step) -> None:
        """A step was to run again, but its senders have gone on, and no longer have the values that it sends."""
        assert self.dead is not None
        cause = DeviceMeshError(
            f"step {step.sequence} ('{step.name}') was dropped when the mesh was healed: {self.dead.message}",
            hint="its receivers had not started it, and the values that it sends have been replaced:\n"
            "call it again, and the later calls that use its results.",
        )
        step.dropped = True
        self.depend(step, cause.knowing(**{**self.dead.facts, "step": step.sequence, "mesh_lost": False}))

    def depend(self, step: Step, cause: MonarchError) -> None:
        """A step that was to run again needs a result of a failed one: it fails likewise."""
        step.error = fresh(cause)
        self._fail(step, [])

    def renewed(self) -> None:
        """A new session begins, with all workers. It leaves a number out, so that what workers say of an earlier one,
        and comes late, is of numbers below its first."""
        self.dead = None
        self.gone, self.quiet, self.doubts = {}, {}, {}
        left_out = Step("session")
        left_out.sequence, left_out.noted = self.next_command, True
        self.last = left_out
        self.first = self.finished_commands = self.next_command

    # -- failures --------------------------------------------------------------------------------------------------

    def _remember(self, sequence: int, error: MonarchError) -> None:
        if sequence not in self._failures and isinstance(error, DeviceMeshError):
            self._tell(error)
        self._failures[sequence] = error
        while len(self._failures) > _REMEMBERED:
            self._failures.popitem(last=False)

    def _fail(self, step: Step, reports: list[Report]) -> None:
        step.error = self.explain(reports, step) if step.error is None else step.error
        step.lost = any(report.committed for report in reports)
        self._remember(step.sequence, step.error)
        self._failed += () if step.undo is None or step in self._failed else (step,)
        for handle in step.donated:
            handle.taken_by = None if handle.taken_by is step else handle.taken_by
            if step.lost:  # some workers may still hold it
                handle.step = step
        if step.lost:
            step.previous = None

    def explain(self, reports: Sequence[Report], step: Step | None = None) -> MonarchError:
        """One error from the workers' reports: the first cause, and how far it reaches."""
        cause = min(reports, key=lambda report: (_KIND_RANK[report.kind], report.rank))
        if cause.kind == "dependent" and cause.root in self._failures:
            first = self._failures[cause.root]
            return fresh(first)
        place = self._whole if step is None else self._place_of(step)
        if cause.anomaly:
            return _anomaly(cause, place, step)
        if cause.kind == "stopped":
            return _stopped(cause, place, step)
        who = f"worker {place.name_of(cause.rank)}"
        what = f" in {cause.op}" if cause.op else ""
        message = f"{who} failed{what}: {cause.error or 'another step has replaced a value that it needs'}"
        hint = cause.hint.splitlines()
        if step is not None:
            part = "" if step.place is None else f", part of {self.mesh}"
            hint.append(f"step {step.sequence} ('{step.name}') on {place.mesh}{part}")
        if cause.operands:
            hint.append(f"operands: {', '.join(cause.operands)}")
        failed = [place.name_of(report.rank) for report in reports if report.kind == "failed"]
        if len(failed) > 1:
            shown = "; ".join(failed[:8]) + ("; ..." if len(failed) > 8 else "")
            hint.append(f"{len(failed)} of {place.mesh.workers} workers failed: {shown}")
        if any(report.committed for report in reports):
            hint.append("the step had committed: the state that it replaces is gone")
        if cause.traceback:
            hint.append("the worker's traceback:")
            hint.extend("  " + line for line in cause.traceback.rstrip().splitlines())
        kind = next((kind for kind, words in _KINDS if words.search(cause.error or "")), DeviceMeshError)
        if (cause.error or "").startswith(_CHECK):
            kind = check_kind((cause.error or "").removeprefix(_CHECK))
        facts = _facts(place, cause.rank) | ({} if step is None else {"step": step.sequence, "program": step.name})
        return kind(message, hint="\n".join(hint), source=cause.source).knowing(**facts, op=cause.op)


def _anomaly(report: Report, place: Place, step: Step | None) -> AnomalyError:
    facts = _facts(place, report.where) | ({} if step is None else {"step": step.sequence, "program": step.name})
    return AnomalyError(
        f"worker {place.name_of(report.where)} {report.anomaly}",
        hint="" if step is None else f"step {step.sequence} ('{step.name}') on {place.mesh}, which is not applied",
        source=report.source,
    ).knowing(**facts, op=report.op)


def _stopped(report: Report, place: Place, step: Step | None) -> DeviceMeshError:
    facts = _facts(place, report.rank) | ({} if step is None else {"step": step.sequence, "program": step.name})
    return DeviceMeshError(
        "a step was aborted" if step is None else f"step {step.sequence} ('{step.name}') was aborted",
        hint="the program was interrupted (Ctrl-C) while it waited for the workers: this step, and those that were\n"
        "called after it, are not applied. Call them again.",
        source=report.source,
    ).knowing(**facts, op=report.op)


def _facts(place: Place, rank: int) -> dict[str, Any]:
    return {"worker": rank, "coordinates": place.coordinates_of(rank)}


def fresh(error: E) -> E:
    """The same error to be raised once more: one that has been raised keeps the frames that it went through alive, and
    the handles in them."""
    made = type(error)(error.message, hint=error.hint, source=error.source)
    if isinstance(made, DeviceMeshError) and isinstance(error, DeviceMeshError):
        made.knowing(**error.facts)
    return made
