"""A process' share of the actors: those that run here, the ports that are open here, and its knowledge of the others.

Messages come in through `_deliver`, in the I/O thread for those of other processes: it only hands on.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any

from monarch.compiler.execution.executor import Executor
from monarch.compiler.mesh import Point
from monarch.compiler.plan import MeshSpec
from monarch.runtime.actors.actor_mesh import ActorMesh
from monarch.runtime.actors.debugging.debugger import stop
from monarch.runtime.actors.debugging.stacks import SlowCalls, stacks_here
from monarch.runtime.actors.errors import ActorError, MeshFailure, SupervisionError
from monarch.runtime.actors.meshes import ProcMesh
from monarch.runtime.actors.messages.message import EMPTY, Payload
from monarch.runtime.actors.messages.order import Order
from monarch.runtime.actors.messages.protocol import (
    CALL,
    ENDED,
    FLUSH,
    LEAVE,
    LOG_OPTIONS,
    LOOK,
    NUMBERED,
    OUTPUT,
    PLACE_ENDED,
    READY,
    RECORD,
    REFUSED,
    RELAY,
    REPLIES,
    REPLY,
    SPAWN,
    STACKS,
    STOP,
    UNREACHED,
    UNSENT,
    Head,
    ReplyTo,
)
from monarch.runtime.actors.messages.recent import Ended, Recent
from monarch.runtime.actors.messages.router import Router
from monarch.runtime.actors.processes import logs
from monarch.runtime.actors.processes.circles import Circles
from monarch.runtime.actors.processes.current import running
from monarch.runtime.actors.processes.exits import run_exit_handlers
from monarch.runtime.actors.processes.faults import Faults
from monarch.runtime.actors.processes.group import Death, ProcMeshSpec
from monarch.runtime.actors.processes.hearing import Hearing
from monarch.runtime.actors.processes.identity import Instance
from monarch.runtime.actors.processes.instance import LocalActor, Refusal
from monarch.runtime.actors.processes.ownership import (
    Born,
    Bury,
    Cleanup,
    Command,
    EndProcess,
    Event,
    Exit,
    Owns,
    PlaceEnded,
    ProcessGone,
    StopActor,
    StopMesh,
    Supervise,
    Supervised,
    Supervision,
    Tell,
)
from monarch.runtime.actors.processes.ports import Answer, Ports
from monarch.runtime.actors.processes.programs import Programs, executor_in
from monarch.runtime.actors.processes.spreading import Spreads
from monarch.runtime.actors.telemetry import recording
from monarch.runtime.actors.telemetry.recording import Bounds
from monarch.runtime.future import Future
from monarch.runtime.processes.looking import share_of

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.host import Host
    from monarch.runtime.hosts.attached import AttachedHosts

Message = tuple[str, Head, Payload]

_LAST_SECONDS = 1.0
"""How long messages of a process of another host may be on their way after it has ended."""
EARLY_SECONDS = 1.0
"""How much earlier a call may come than the message that makes its actor, before its creator is asked for."""
CAUSE_SECONDS = 5.0
"""How long the cause of a lost connection may take to arrive."""


class Process:
    """This process's part in actors."""

    def __init__(self, group: ProcMeshSpec, rank: int, listener: socket.socket) -> None:
        self.group = group
        self.rank = rank
        self.address = group.addresses[rank]
        self.threads = group.threads
        self.ports = Ports()
        self.actors: dict[str, LocalActor] = {}
        self.ended: Recent[str, Refusal] = Recent()
        """The actors that have ended here, and what calls of them are answered."""
        self._all_ended = Ended()
        self.dead: Recent[str, Death] = Recent()
        self.refused: Recent[tuple[str, str], SupervisionError] = Recent()
        """By mesh and process: the next call's error, of an actor that refused a message or was stopped from here."""
        self.ready = threading.Event()
        self.leaving = math.inf
        """Where it was stopped: after how many seconds it is killed."""
        self.client = Instance(self, "", group.name)
        self.host: Host | None = None
        """The agent of this host, if it is this process."""
        self._early: dict[str, list[Message]] = {}
        self._lock = threading.Lock()
        self._numbers = count()
        self.handlers: dict[int, Callable[[str, Head, Payload], None]] = {
            REPLY: self._on_reply,
            CALL: self._on_actor,
            SPAWN: self._on_spawn,
            STOP: self._on_actor,
            PLACE_ENDED: self._on_place_ended,
            ENDED: self.on_ended,
            REFUSED: self._on_refused,
            LEAVE: self._on_leave,
            READY: self._on_ready,
            STACKS: self._on_stacks,
            LOG_OPTIONS: self._on_log_options,
            FLUSH: self._on_flush,
            LOOK: self._on_look,
            RELAY: self._on_relay,
            UNREACHED: self._on_unreached,
            NUMBERED: self._on_numbered,
            REPLIES: self._on_replies,
            UNSENT: lambda sender, head, payload: None,
        }
        self._order: Order[tuple[Head, Payload]] = Order()
        self.spreads = Spreads(self)
        self.hearing = Hearing(self)
        self.faults = Faults(self)
        self.programs = Programs(self)
        self._spawned: dict[str, ActorMesh[Any] | ProcMesh] = {}
        self._supervision = Supervision(None if group.owner[0] == self.address else group.owner[0])
        self._events: deque[Event] = deque()
        self._deciding = threading.RLock()
        self._slow_calls = SlowCalls(self)
        self._circles = Circles(self)
        self._unexplained: deque[tuple[float, str, str]] = deque()
        agent = group.host_of(rank)
        relay = agent if agent != self.address else group.root
        self.router = Router(
            self.address, listener, self._deliver, relay if relay != self.address else None, self.connection_lost
        )
        if sys.breakpointhook is sys.__breakpointhook__:  # or else the user has one of his own
            sys.breakpointhook = _breakpoint

    def new_id(self) -> str:
        """A name for a mesh that is spawned from here: unique, with its creator in it."""
        return f"{self.address}.{next(self._numbers)}"

    def this_proc(self) -> ProcMesh:
        group = self.group
        return ProcMesh(group, group.shape.slice(**group.shape.point(self.rank)))

    def actor_of(self, instance: Instance) -> LocalActor | None:
        """None once it has ended. Raises RuntimeError for an object that is no actor."""
        if not instance.actor_id:
            raise RuntimeError(f"'{instance.name}' is a process, and no actor: stop or abort an actor from inside it")
        return self.actors.get(instance.actor_id)

    # -- answering -----------------------------------------------------------------------------------------------------

    def reply(self, to: ReplyTo, well: bool, value: object, of: Callable[[], str] = lambda: "the value") -> None:
        """`of` describes the value, for the error where it cannot be sent."""
        address, port, place = to[:3]
        if len(to) == 4 and not well:
            self.programs.give_nothing(address, to[3])
        if value is None and len(to) == 3:
            payload = EMPTY
        else:
            try:
                payload = Payload.of(self.programs.give(address, to[3], value) if len(to) == 4 and well else value)
            except Exception as error:
                well, payload = False, Payload.of(ActorError.of(error, f"sending {of()}"))
        self.router.send(address, (REPLY, port, place, well), payload)

    def raise_at(self, to: ReplyTo, error: Exception, where: str) -> None:
        told = error if isinstance(error, (ActorError, SupervisionError)) else ActorError.of(error, where)
        self.reply(to, False, told)

    def refuse(
        self, sender: str, head: Head, name: str, rank: int | None, reason: str, place: Point | None = None
    ) -> None:
        """A call is for an actor that has ended; `place` is its place in its mesh, where that is known."""
        error = SupervisionError.refusing(name, rank, place, head[3], reason)
        if head[2] is not None:
            self.reply(head[2], False, error)
        else:
            self.router.send(sender, (REFUSED, head[1]), Payload.of(error))

    def lost(self, address: str, endpoint: str) -> SupervisionError:
        """The error of a call to a process that is gone."""
        death = self.dead.get(address)
        why = "its process is gone" if death is None else f"its process {death.name}[{death.rank}] {death.reason}"
        return SupervisionError(f"'{endpoint}' cannot be called: {why}", endpoint)

    # -- incoming messages ---------------------------------------------------------------------------------------------

    def handle(self, kind: int, handler: Callable[[str, Head, Payload], None]) -> None:
        """Have messages of another kind handled."""
        self.handlers[kind] = handler

    def _deliver(self, sender: str, head: Head, payload: Payload) -> None:
        self.handlers[head[0]](sender, head, payload)

    def _on_reply(self, sender: str, head: Head, payload: Payload) -> None:
        _, port, place, well = head
        self.ports.reply(port, place, well, Answer(payload, well))

    def _on_replies(self, sender: str, head: Head, payload: Payload) -> None:
        _, port, replies = head
        for place, data in replies:
            self.ports.reply(port, place, True, Answer(Payload(data), True))

    def _on_numbered(self, sender: str, head: Head, payload: Payload) -> None:
        for ready, its in self._order.take(sender, head[1], (head[2], payload)):
            self._deliver(sender, ready, its)

    def _wait_no_more(self, sender: str, ended: bool) -> None:
        """A message of a process of another host does not wait for one that may never come."""
        for ready, its in self._order.gone(sender, ended):
            self._deliver(sender, ready, its)

    def _on_actor(self, sender: str, head: Head, payload: Payload) -> None:
        actor = self.actors.get(head[1])
        if actor is None:
            with self._lock:
                actor = self.actors.get(head[1])
                if actor is None and head[1] not in self._all_ended:
                    creator = head[1].rpartition(".")[0]
                    if creator not in self.dead:
                        # Its creator and its caller are two senders: the call was faster.
                        first = head[1] not in self._early
                        self._early.setdefault(head[1], []).append((sender, head, payload))
                        if first:
                            self.router.later(EARLY_SECONDS, lambda: self._look_after(head[1], creator))
                        return
        if actor is None:
            payload.drop()
            self._never(sender, head)
        elif head[0] == CALL:
            actor.put((sender, head, payload))
        else:
            actor.stop(head[3], head[2])

    def _never(self, sender: str, head: Head) -> None:
        if head[0] == STOP:
            if head[2] is not None:
                self.reply(head[2], True, None)
        elif (refusal := self.ended.get(head[1])) is not None:
            self.refuse(sender, head, *refusal)
        elif head[1] in self._all_ended:
            self.refuse(sender, head, "the actor", None, "it has ended")
        else:
            self.refuse(sender, head, "the actor", None, "its spawner ended before that")

    def _look_after(self, actor: str, creator: str) -> None:
        """Messages have waited for the spawn of an actor. A creator that has ended before this process began, or so
        long ago that it is forgotten, is found here: nothing reports that. In the I/O thread."""
        if actor in self._early and not self.router.send(creator, (UNSENT,), EMPTY):
            self.router.after_last(creator, lambda: self._spawns_no_more(creator), _LAST_SECONDS)

    def _spawns_no_more(self, creator: str) -> None:
        """Messages that wait for a spawn by an ended process wait for nothing. In the I/O thread."""
        with self._lock:
            self._all_ended.forget(creator)
            ids = [id for id in self._early if id.rpartition(".")[0] == creator]
            early = [message for id in ids for message in self._early.pop(id)]
        for sender, head, payload in early:
            payload.drop()
            self._never(sender, head)

    def _bury(self, actor: LocalActor) -> None:
        """An actor is no more, and its owner knows. From any thread."""
        id = actor.instance.actor_id
        with self._lock:
            if id.rpartition(".")[0] not in self.dead:
                self._all_ended.add(id)
            self.ended[id] = actor.refusal
            del self.actors[id]
        actor.bury()

    def _on_spawn(self, sender: str, head: Head, payload: Payload) -> None:
        _, actor_id, _, rank, name, owner = head
        actor = LocalActor(self, actor_id, rank, name, owner, payload)
        with self._lock:
            for early in self._early.pop(actor_id, ()):
                if early[1][0] == CALL:
                    actor.put(early)
                else:
                    actor.stop(early[1][3], early[1][2])
            self.actors[actor_id] = actor
        self.supervision(Born(actor_id, owner, actor_id, name, rank))
        actor.start()

    def _on_place_ended(self, sender: str, head: Head, payload: Payload) -> None:
        ended = PlaceEnded(head[1], head[2], payload.decode())
        with self._deciding:
            self.supervision(ended)
            self._noted(ended)
        if head[3] is not None:
            self.reply(head[3], True, None)

    def _noted(self, ended: PlaceEnded) -> None:
        """An owner here knows of the end of a place."""
        if ended.failure is not None:
            self.faults.note(ended.failure)
        if self._supervision.owner_of(ended.mesh) is None:
            self._spawned.pop(ended.mesh, None)

    def _on_refused(self, sender: str, head: Head, payload: Payload) -> None:
        self.refused[head[1], sender] = payload.decode()

    def on_ended(self, sender: str, head: Head, payload: Payload) -> None:
        """A process has ended: nothing comes from there any more, and what its actors own ends."""
        death: Death = payload.decode()

        def heard() -> None:
            self._has_ended(death, death.expected or not head[2])

        def heard_straight() -> None:
            self.spreads.after_answers(death.address, sender, heard)

        if head[2]:
            self.router.after_last(death.address, heard, 0.0)
        else:
            self.router.after_last(death.address, heard_straight, _LAST_SECONDS)

    def _has_ended(self, death: Death, surely: bool) -> None:
        """A process has ended, or its host is out of reach, where it may live on."""
        self._wait_no_more(death.address, surely)
        self.dead[death.address] = death
        self.router.gone(death.address, surely)
        self.spreads.lost(death.address)
        self._lose(ProcessGone(death.address, death.reason, not death.expected, death.status, death.log))

        def fail_calls() -> None:
            self.ports.lost(death.address, f"its process {death.name}[{death.rank}] {death.reason}")

        # Owners first: a caller that sees the error of a call, and then asks the owner, finds that it knows.
        if death.expected:
            fail_calls()
        else:
            self.hearing.owners_first(death.address, fail_calls)
        self.programs.died(death)
        self._spawns_no_more(death.address)

    def _lose(self, gone: ProcessGone) -> None:
        with self._deciding:
            self.supervision(gone)
            for mesh in [mesh for mesh in self._spawned if self._supervision.owner_of(mesh) is None]:
                del self._spawned[mesh]
        self.hearing.knows(gone.address)

    def connection_lost(self, address: str, why: str) -> None:
        """There is no connection to a process of another host any more. If it has ended, the reason comes soon, and
        until then calls to it wait on. In the I/O thread."""
        if address in self.dead:
            return
        self._unexplained.append((monotonic() + CAUSE_SECONDS, address, why))
        if len(self._unexplained) == 1:
            self._explain_later()

    def _explain_later(self) -> None:
        self.router.later(CAUSE_SECONDS, self._explain)

    def _explain(self) -> None:
        """Lost connections whose cause nobody has told are lost, and that is all. In the I/O thread."""
        while self._unexplained and self._unexplained[0][0] <= monotonic():
            _, address, why = self._unexplained.popleft()
            self.unreached(address, why)
        if self._unexplained:
            self._explain_later()

    def unreached(self, address: str, why: str) -> None:
        """There is no way to a process, and its end is not known: meshes there are lost to their owners here, and
        meshes owned from there end. In the I/O thread."""
        for lost in (address, *self.spreads.through(address)):
            if lost not in self.dead:
                self.router.gone(lost, ended=False)
                self._wait_no_more(lost, ended=False)
                self._lose(ProcessGone(lost, f"is out of reach: {why}", failed=True))
                self.ports.lost(lost, f"the connection is lost: {why}")
                self._spawns_no_more(lost)
        self.spreads.lost(address)

    def _on_unreached(self, sender: str, head: Head, payload: Payload) -> None:
        self.connection_lost(head[1], "it cannot be reached")

    def _on_relay(self, sender: str, head: Head, payload: Payload) -> None:
        _, to, origin, relayed = head
        if to == self.address:
            self._deliver(origin, relayed, payload)
        elif not self.router.send(to, head, payload):
            self.router.send(origin, (UNREACHED, to), EMPTY)

    def _on_ready(self, sender: str, head: Head, payload: Payload) -> None:
        def answer() -> None:
            self.ready.wait()
            self.reply(head[1], True, None)

        if self.ready.is_set() or sender == self.address:  # the bootstrap asks, and is not to wait for itself
            self.reply(head[1], True, None)
        else:
            threading.Thread(target=answer, name="monarch ready", daemon=True).start()

    def _on_stacks(self, sender: str, head: Head, payload: Payload) -> None:
        # Not in this thread: which would be left out, and source lines are read from files.
        self._answer(head, lambda: stacks_here(self))

    def _on_look(self, sender: str, head: Head, payload: Payload) -> None:
        self._answer(head, self.look)  # not in this thread: Linux takes a millisecond to count its memory

    def _answer(self, head: Head, value: Callable[[], object]) -> None:
        threading.Thread(target=lambda: self.reply(head[1], True, value()), name="monarch look", daemon=True).start()

    def _on_log_options(self, sender: str, head: Head, payload: Payload) -> None:
        logs.forward_from(head[2], head[3])
        self.reply(head[1], True, None)

    def _on_flush(self, sender: str, head: Head, payload: Payload) -> None:
        if recording.current is not None:
            recording.current.flush()
        self.reply(head[1], True, None)

    def look(self) -> dict[str, Any]:
        """Its pid, host, memory (bytes, as by `share_of`), answers (that it does), and actors (`LocalActor.look`)."""
        pid = os.getpid()
        about = {"pid": pid, "host": os.uname().nodename, "memory": share_of(pid), "answers": True}
        return {**about, "actors": [actor.look() for actor in list(self.actors.values()) if actor.ended is None]}

    def places_elsewhere(self) -> list[tuple[str, str]]:
        """The processes on other hosts that this one knows, by address, and their names."""
        return []

    def record(self, bounds: Bounds) -> None:
        """Record what happens here, for the agent of this host to keep."""
        agent, place = self.group.host_of(self.rank), self.group.place(self.rank)
        head = RECORD, place, os.getpid(), bounds.memory, bounds.seconds
        recording.start(bounds, lambda rows: self.router.send(agent, head, Payload.of(rows)))

    def watch(self) -> None:
        """Look now and then at what waits for long: see `SlowCalls` and `Circles`."""
        self.router.soon(self._slow_calls.watch)
        self.router.soon(self._circles.watch)

    @property
    def slow_calls(self) -> float | None:
        """After how many seconds calls are reported, where the settings do not say so; infinite: never."""
        return self._slow_calls.seconds

    def report_calls_after(self, seconds: float | None) -> None:
        """See `slow_calls`."""
        self._slow_calls.report_after(seconds)

    # -- supervision: the decisions of `ownership`, carried out --------------------------------------------------------

    def owns(self, owner: str, mesh: ActorMesh[Any] | ProcMesh, processes: bool) -> None:
        """An actor of this process, or the process itself, spawns a mesh."""
        with self._deciding:
            self._spawned[mesh._id] = mesh
            self.supervision(Owns(owner, mesh._id, mesh._name, mesh._addresses, processes))

    def owned_in(self, actor: str) -> set[str]:
        """The processes in which there is something that an actor of this process owns."""
        with self._deciding:
            return self._supervision.owned_in(actor)

    def spawned_on(self, hosts: Collection[str]) -> list[ProcMesh]:
        """The processes that this one has spawned, and that run on hosts with these agents alone; the newest first."""
        with self._deciding:
            newest = list(self._spawned.values())[::-1]
        return [mesh for mesh in newest if isinstance(mesh, ProcMesh) and set(mesh._group.hosts) <= set(hosts)]

    def supervision(self, event: Event) -> None:
        """Something has happened: have done what follows from it. From any thread; waits for nothing."""
        with self._deciding:
            self._events.append(event)
            if len(self._events) > 1:  # the commands of an event are done before the next event is looked at
                return
            while self._events:
                try:
                    commands = self._supervision.handle(self._events[0])
                    while commands:
                        command, *commands = commands
                        match command:
                            case Tell((self.address, _), ended):
                                # At once: the actor's caller is answered behind it, and the process' end is last.
                                commands = self._supervision.handle(ended) + commands
                                commands.sort(key=lambda each: isinstance(each, Exit))
                                self._noted(ended)
                            case _:
                                self._do(command)
                finally:
                    self._events.popleft()

    def _do(self, command: Command) -> None:
        match command:
            case Supervise("", failure):
                threading.Thread(target=self._last_resort, args=(failure,), name="monarch fault", daemon=True).start()
            case Supervise(actor, failure):
                self.actors[actor].fail(failure)
            case StopActor(actor, reason):
                self.actors[actor].stop(reason, None)
            case StopMesh(mesh, ranks, reason):
                self._spawned[mesh]._have_stopped(self, ranks, reason)
            case Cleanup(actor):
                self.actors[actor].alone()
            case Bury(actor):
                self.hearing.after(actor, partial(self._bury, self.actors[actor]))
            case Tell((address, _), ended):
                self.hearing.tell(address, ended)
            case Exit():
                self.empty()

    def _last_resort(self, failure: MeshFailure) -> None:
        self.unhandled(failure)
        self.supervision(Supervised("", failure, True))

    def write(self, error: bool, line: str) -> None:
        """Have the root print a line of a process that it has not started itself."""
        self.router.send(self.group.root, (OUTPUT, error, line), EMPTY)

    def agents_on(self, attached: AttachedHosts) -> tuple[str, ...]:
        """The addresses of the agents on attached hosts, which are made where there are none. Raises MonarchError where
        one cannot be made or reached, RuntimeError in a process that was spawned."""
        raise RuntimeError(
            "the program itself spawns processes on the hosts that it attached: send their mesh to actors"
        )

    def agents_there(self, attached: AttachedHosts) -> tuple[str, ...]:
        """The same, of those that have been made."""
        return ()

    def executor(self, mesh: MeshSpec, group: ProcMeshSpec, ranks: Sequence[int], ready: Future[bool]) -> Executor:
        """See `programs.executor_in`."""
        return executor_in(self, mesh, group, ranks, ready)

    def attached_with(self, agents: tuple[str, ...]) -> AttachedHosts | None:
        """The hosts that this process has attached together, and that have these agents, in order."""
        return None

    def unhandled(self, failure: MeshFailure) -> None:
        """No actor is left that could deal with it. In a spawned process that is the end of the process."""
        sys.stderr.write(f"{failure.report()}\n")
        sys.stderr.flush()
        self.faults.send()
        os._exit(1)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _on_leave(self, sender: str, head: Head, payload: Payload) -> None:
        self.leaving = head[2]
        self.supervision(EndProcess(head[1]))

    def empty(self) -> None:
        """Nothing lives here any more, and the process was to end."""
        threading.Thread(target=self._exit, name="monarch exit", daemon=True).start()

    def _exit(self) -> None:
        self.hearing.wait()
        self.faults.send()
        run_exit_handlers()
        recording.stop()
        self.router.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    """`breakpoint()`: an actor stops for a console that attaches to it; anywhere else it is Python's."""
    found = running.get(None)
    if found is None or not found.actor_instance.actor_id:
        return sys.__breakpointhook__(*args, **kwargs)
    return stop(sys._getframe(1))
