"""A host's service for a controller: it starts its part of a mesh's workers, hands them their commands, and reports
their progress.

    down   start     dims, host (the number of its place in the mesh), hosts, first (the number of the first command),
                     secret, transports, timeout, actor_processes:
                     null, or the actors' processes in which the workers run, with the mesh's name there and its owner
           peers     data: for every worker of the mesh its endpoint and memory, as JSON
           load      command, number; data: the plan's bytes
           stage     command, offset; data: for the staging area
           commands  first; data: records, each behind its length (8 bytes)
           release   step: all workers of all hosts have finished or given up so many commands
           passed    command: all of them have finished so many
           cancel    first, behind: the controller was interrupted, and wants the steps given up that have numbers from
                     the first on and before the other, and have not passed their commit
           dead      rank: a worker elsewhere has ended
           say       rank; data: a packet for that worker
           renew     first, ranks, of: a session without those that have ended begins, with new workers for these
                     places, of the mesh that had the number `of`; then `workers`, `peers` and `links` as at the start
           clock     sent: the controller's clock, which comes back with this host's
           measured  what workers have measured is to be sent
           links     how many control messages workers have sent to peers on other hosts is to be told
           look      what the workers here do is to be told
           stop
           actors    secret, root, number: an agent for the controller's actors; with nothing, its end
           end       this host is to end once the controller has let it go
    up     workers   for each: its process id, endpoint and memory
           links     for each: the transport to each other host, and why
           packet    rank; data: what that worker sent, and behind it the file that came with it
           exited    rank, how; status and log (its last lines), where they are known; data: the small results that it
                     has copied (see `shared.results`)
           lost      rank, peer, why: the link between the two has broken
           refused   message, hint, and of a start its place, of a worker the peer that it does not reach: that, or what
                     came before `links`, has failed
           progress  (commands finished by all, commands finished or given up by all)
           behind    command: a worker here waits until all workers of all hosts have finished so many
           clock     sent, here
           measured  rank; data: the written part of its buffer (see `shared.measured`)
           counted   messages
           seen      data: for each worker its `processes.looking.Seen`, as JSON
           stopped
           actors    address: where that agent is reached

What carries the number of a command that the host has already is passed over: a controller that was interrupted while
it sent something sends it again.

The plan is decoded and checked here, and its kernels are built here, for this host's processors.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any, Protocol

from monarch.compiler.plan import MeshSpec, MonarchError, PlanError
from monarch.compiler.plan.file import plan_from_bytes
from monarch.runtime.control.message import Message, Reply
from monarch.runtime.controller.local import pack_plan
from monarch.runtime.processes.looking import Exit
from monarch.runtime.processes.workers import Processes, Workers
from monarch.runtime.shared import signals, wire
from monarch.runtime.shared.measured import clock, measured_part
from monarch.runtime.shared.results import Results
from monarch.runtime.shared.ring import Full
from monarch.runtime.shared.window import STAGING_BYTES
from monarch.runtime.worker.peers import pack, unpack

_LIMIT = "A limit of that host is reached: on open files (ulimit -n) or processes and threads (ulimit -u)."


class ActorsHere(Protocol):
    """The controller's actors on this host: the interface that `HostService` needs, without importing them."""

    def start(self, head: dict[str, Any], reached: dict[str, Any]) -> str:
        """Start an agent for them; gives its address. `reached` is how this host is: bind, advertise, tls. Raises
        MonarchError."""

    def processes(self, ranks: range, actor_processes: dict[str, Any]) -> Processes:
        """Their processes, for workers of these ranks to be in. Raises MonarchError where they have ended."""

    def end(self) -> None:
        """End the agent, if there is one, and all that it has started."""


class HostService:
    """`control.message.Service`: the parts of an attached controller's meshes that are on this host."""

    def __init__(
        self,
        reply: Reply,
        bind: str,
        tls: str | None,
        advertise: str | None = None,
        actors: ActorsHere | None = None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """`bind` is the address on which this host's workers listen for those of others, and `advertise` the one by
        which they are reached, if that is another; `tls` the folder with this host's certificates, which connections
        between workers are to use, or None. Without `actors` this host runs workers alone. `end` has the host end."""
        self._reply = reply
        self._across = {"bind": bind, "advertise": advertise, "tls": tls}
        self.parts: dict[int, list[_Part]] = {}
        """By mesh. A host can have several places of one, where others are lost."""
        self._progress = threading.Lock()
        self._actors = actors
        self._end = end
        self._last = False
        """Whether this host is to end with this controller's session."""

    def receive(self, message: Message) -> None:
        if message.kind == "start":
            parts = self.parts.setdefault(message.mesh, [])
            try:
                parts.append(_Part(message.mesh, message.head, self._tell, self._across, self._actors))
            except (MonarchError, OSError, RuntimeError) as error:
                self._refuse(message.mesh, error, place=int(message.head["host"]))
        elif message.kind == "stop":
            for part in self.parts.pop(message.mesh, []):
                part.stop()
            self._reply(Message("stopped", message.mesh))
        elif message.kind == "actors":
            self._end_actors()
            if message.head:
                self._start_actors(message)
        elif message.kind == "end":
            self._last = True
        else:
            if message.kind == "renew":
                parts = self.parts.pop(int(message.head["of"]), [])
                self.parts[message.mesh] = [part for part in parts if part.place not in message.head["left"]]
                for part in parts:
                    if part.place in message.head["left"]:
                        part.stop()
            for part in self.parts.get(message.mesh, ()):  # a part that could not start gets the rest as well
                part.receive(message)

    def _tell(self, message: Message) -> None:
        """A part's messages: of progress the least of all parts of its mesh."""
        parts = self.parts.get(message.mesh, ())
        if message.progress and len(parts) > 1:
            with self._progress:
                least = tuple(map(min, *[part.told for part in parts]))
                self._reply(Message(message.kind, message.mesh, progress=least))
        else:
            self._reply(message)

    def _start_actors(self, message: Message) -> None:
        try:
            if self._actors is None:
                raise MonarchError("this host runs no actors")
            address = self._actors.start(message.head, self._across)
        except (MonarchError, OSError, RuntimeError) as error:
            self._refuse(message.mesh, error)
        else:
            self._reply(Message("actors", message.mesh, head={"address": address}))

    def _refuse(self, mesh: int, error: Exception, **head: int) -> None:
        """Tell why something cannot be started here. OSError and RuntimeError (of threads) tell of limits: they are no
        end of the session."""
        known = error if isinstance(error, MonarchError) else MonarchError(str(error), hint=_LIMIT)
        self._reply(Message("refused", mesh, head={"message": known.message, "hint": known.hint, **head}))

    def _end_actors(self) -> None:
        if self._actors is not None:
            self._actors.end()

    def detached(self) -> None:
        self._end_actors()
        while self.parts:
            for part in self.parts.popitem()[1]:
                part.stop()
        if self._last:
            self._end()


def _processes(actor_processes: dict[str, Any] | None, ranks: range, actors: ActorsHere | None) -> Processes | None:
    """Where workers are to run, if not in processes of their own."""
    if actor_processes is None:
        return None
    if actors is None:
        raise MonarchError("this host runs no actors, and the mesh is to run in their processes")
    return actors.processes(ranks, actor_processes)


class _Stopping(Exception):
    pass


class _Part:
    """One mesh's workers here. Commands come in the service's thread; a thread of its own listens to the workers."""

    def __init__(
        self, number: int, head: dict[str, Any], reply: Reply, own: dict[str, Any], actors: ActorsHere | None
    ) -> None:
        spec = MeshSpec(tuple((str(name), int(size)) for name, size in head["dims"]))
        self._number = number
        self._reply = reply
        self.place = int(head["host"])
        hosts = int(head["hosts"])
        self._each = spec.workers // hosts
        ranks = range(self.place * self._each, (self.place + 1) * self._each)
        across = {
            "secret": head["secret"],
            "transports": head["transports"],
            "timeout": head["timeout"],
            "hosts": hosts,
            **own,
        }
        self.workers = Workers(
            spec,
            ranks,
            across,
            _processes(head["actor_processes"], ranks, actors),
            head["settings"],
            int(head["first"]),
        )
        self._buffers: dict[int, mmap.mmap] = {}  # the buffers of the workers' measurements, by rank
        self._joined: dict[int, dict[str, Any]] = {}
        self._links: dict[int, dict[str, Any]] = {}
        self._stopping = False
        self.told = (-1, -1)
        """How far the workers here are, as the controller knows it."""
        self._behind = 0
        self._exits: dict[int, Exit] = {}
        """The deaths that were reported."""
        self._next = int(head["first"])  # the first command that has not come yet
        self._listener = threading.Thread(target=self._listen, name=f"mesh {number}", daemon=True)
        self._listener.start()
        self._handlers: dict[str, Callable[[dict[str, Any], Any], None]] = {
            "peers": self._peers,
            "load": self._load,
            "stage": self._stage,
            "commands": self._commands,
            "release": self._release,
            "passed": self._passed,
            "cancel": self._cancel,
            "dead": self._dead,
            "say": self._say_to,
            "renew": self._renew,
            "clock": self._clock,
            "measured": self._measured,
            "links": self._count_links,
            "look": self._look_at_workers,
            "memory": self._weigh_workers,
        }

    # -- down ------------------------------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise MonarchError(f"a controller sent a message of an unknown kind, {message.kind!r}")
        self._number = message.mesh
        try:
            handler(message.head, message.data)
        except _Stopping:  # a worker has died, which the listener reports: the mesh takes no commands
            pass
        except OSError as error:  # of a limit: the end of this mesh, and of nothing else
            self._say("exited", rank=self.workers.ranks[0], how=f"cannot get a command: {error}")

    def _peers(self, head: dict[str, Any], data: Any) -> None:
        everyone = json.loads(bytes(data))
        for rank in self.workers.ranks:
            place = rank % self._each
            counterparts = range(place, len(everyone), self._each)
            peers = {
                host: {"rank": peer, **everyone[peer]} for host, peer in enumerate(counterparts) if host != self.place
            }
            self.workers.send(rank, pack({"peers": peers}))

    def _load(self, head: dict[str, Any], data: Any) -> None:
        command, number = int(head["command"]), int(head["number"])
        if command < self._next:
            return
        try:
            blob = pack_plan(plan_from_bytes(bytes(data)))
        except PlanError as error:  # for the workers to tell, at each step that would run it
            blob = pickle.dumps((error, None, ()))
        self.workers.hand(number, blob)
        record = wire.numbers(wire.LOAD, number, *map(int, head["place"]))
        self._write(partial(self.workers.ring.write, record, command))
        self._next = command + 1
        self.workers.ring.publish()

    def _stage(self, head: dict[str, Any], data: Any) -> None:
        offset = int(head["offset"])
        if offset < 0 or offset + len(data) > STAGING_BYTES:
            raise MonarchError(f"{len(data)} bytes at {offset} are not within the staging area of {STAGING_BYTES}")
        if int(head["command"]) >= self._next:
            self.workers.stage(offset, data)

    def _commands(self, head: dict[str, Any], data: Any) -> None:
        command, view = int(head["first"]), memoryview(data)
        while view:
            (size,) = wire.RECORD.unpack_from(view)
            if size < wire.KIND.size or wire.RECORD.size + size > len(view):
                raise MonarchError(f"command {command} announced {size} bytes, and {len(view)} have arrived")
            record = bytes(view[wire.RECORD.size : wire.RECORD.size + size])
            view = view[wire.RECORD.size + size :]
            if command >= self._next:
                self._write(partial(self.workers.ring.write, record, command))
                self._next = command + 1
            command += 1
        self.workers.ring.publish()

    def _write(self, write: Callable[[int], None]) -> None:
        """The controller writes only what there is room for, so that it hardly ever has to be waited for here."""
        while True:
            try:
                write(self.workers.finished())
                return
            except Full as full:
                self.workers.ring.publish()
                self.workers.wait(full.sequence + 1, self._check)

    def _check(self, seen: int) -> None:
        if self._stopping or self.workers.signals.words[signals.DEAD]:
            raise _Stopping

    def _release(self, head: dict[str, Any], data: Any) -> None:
        self.workers.signals.store(signals.RELEASED, int(head["step"]))

    def _passed(self, head: dict[str, Any], data: Any) -> None:
        self.workers.signals.advance(signals.PASSED, int(head["command"]))

    def _cancel(self, head: dict[str, Any], data: Any) -> None:
        self.workers.stop_steps(int(head["first"]), int(head["behind"]))

    def _dead(self, head: dict[str, Any], data: Any) -> None:
        self.workers.mark_dead(int(head["rank"]))

    def _say_to(self, head: dict[str, Any], data: Any) -> None:
        if int(head["rank"]) in self.workers.ranks:
            self.workers.send(int(head["rank"]), bytes(data))

    def _renew(self, head: dict[str, Any], data: Any) -> None:
        self._joined, self._links, self._next = {}, {}, int(head["first"])
        # It may go by another number, under which nothing has been told.
        self.told = (-1, -1)
        self._exits.clear()
        try:
            self.workers.renew(self._next, [int(rank) for rank in head["ranks"]])
        except MonarchError as error:
            self._say("refused", message=error.message, hint=error.hint)

    def _clock(self, head: dict[str, Any], data: Any) -> None:
        self._say("clock", sent=head["sent"], here=clock())

    def _measured(self, head: dict[str, Any], data: Any) -> None:
        for rank, buffer in list(self._buffers.items()):
            self._say("measured", bytes(measured_part(memoryview(buffer))), rank=rank)

    def _count_links(self, head: dict[str, Any], data: Any) -> None:
        self._say("counted", messages=self.workers.link_messages())

    def _look_at_workers(self, head: dict[str, Any], data: Any) -> None:
        def look() -> None:  # may take seconds
            seen = {rank: astuple(each) for rank, each in self.workers.seen().items()}
            self._say("seen", json.dumps(seen).encode())

        threading.Thread(target=look, name="monarch look", daemon=True).start()

    def _weigh_workers(self, head: dict[str, Any], data: Any) -> None:
        self._say("memory", json.dumps(self.workers.memory()).encode())

    # -- up --------------------------------------------------------------------------------------------------------

    def _say(self, kind: str, data: Any = b"", **head: Any) -> None:
        self._reply(Message(kind, self._number, head=head, data=data))

    def _listen(self) -> None:
        """Report the workers' messages, their progress, and their ends. Reports of a command go before the command
        counts as finished."""
        try:
            while True:
                finished = self.workers.finished()
                self._look()
                over = self.workers.over()
                if (finished, over) != self.told:
                    self.told = (finished, over)
                    self._reply(Message("progress", self._number, progress=(finished, over)))
                self.workers.wait(finished + 1, self._while_waiting)
        except _Stopping:
            pass
        except BaseException as error:
            self._say("exited", rank=self.workers.ranks[0], how=f"can no longer be heard: {error}")
            raise

    def _while_waiting(self, seen: int) -> None:
        finished, over = self.told
        self._look()
        if self.workers.over() > over:
            self.told = (finished, self.workers.over())
            self._reply(Message("progress", self._number, progress=self.told))

    def _look(self) -> None:
        if self._stopping:
            raise _Stopping
        if (behind := self.workers.behind()) > self._behind:
            self._behind = behind
            self._say("behind", command=behind)
        for rank, packet, file in self.workers.packets():
            kind, command = wire.UP_HEAD.unpack_from(packet)
            if kind == wire.STARTUP:
                self._startup(rank, unpack(packet))
            elif file == wire.LOST_FILE:
                error = wire.not_taken_in(packet[wire.UP_HEAD.size :], os.strerror(errno.EMFILE))
                self._say("packet", wire.Report("failed", rank, command, error).encode(), rank=rank)
            elif kind == wire.BUFFER_FILE:
                self._buffers[rank] = mmap.mmap(file, 0)
                self._say("packet", packet, rank=rank)
            elif file >= 0:
                with mmap.mmap(file, 0, prot=mmap.PROT_READ) as contents:
                    self._say("packet", b"".join((packet, contents)), rank=rank)
            else:
                self._say("packet", packet, rank=rank)
        for exit in self.workers.exits():
            if self._exits.get(exit.rank) is not exit:
                self._exits[exit.rank] = exit
                self._say("exited", Results.at(self.workers.window, exit.rank).contents(), **exit._asdict())
        if self.workers.lost_at_once:
            self._say("exited", rank=self.workers.ranks[0], how="has lost the process that it was forked from")
            raise _Stopping

    def _startup(self, rank: int, what: dict[str, Any]) -> None:
        """See `worker.peers` for a worker's messages before its first command."""
        if "address" in what:
            self._joined[rank] = what
            if len(self._joined) == self._each:
                self._say("workers", json.dumps(self._joined).encode())
        elif "links" in what:
            self._links[rank] = what["links"]
            if len(self._links) == self._each:
                self._say("links", json.dumps(self._links).encode())
        elif "failed" in what:
            self._say("refused", message=f"worker {rank}: {what['failed']}", hint=what["hint"], peer=what["peer"])
        else:
            self._say("lost", rank=rank, peer=what["lost"], why=what["why"])

    # -- the end ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self._stopping = True
        self._listener.join()
        self.workers.stop()
