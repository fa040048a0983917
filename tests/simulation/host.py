"""A host of the simulated cluster: what `hosts.service` does, in miniature."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch.runtime.control.message import Message
from monarch.runtime.control.records import Assembly, Progress, started
from monarch.runtime.shared import wire
from monarch.runtime.worker.peers import pack, unpack
from tests.simulation.worker import Memory, Worker

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster


class Host:
    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.number = cluster, number
        self.address = f"host{number}:1"
        self._parts: dict[int, list[MeshPart]] = {}
        """By mesh. A host can have several places of one."""
        self.assembly = Assembly()
        self.messages: deque[Message] = deque()
        self.attached = True
        self.refuses = False
        """Whether it starts no workers."""

    @property
    def parts(self) -> list[MeshPart]:
        return [part for parts in self._parts.values() for part in parts]

    @property
    def workers(self) -> dict[int, Worker]:
        return {rank: worker for part in self.parts for rank, worker in part.workers.items()}

    def part_of(self, rank: int) -> MeshPart:
        return next(part for part in self.parts if rank in part.here)

    def receive(self, message: Message) -> None:
        head = message.head
        if message.kind == "start" and self.refuses:
            self.say("refused", message.mesh, message="it was asked to", hint="", place=int(head["host"]))
        elif message.kind == "start":
            self._parts.setdefault(message.mesh, []).append(MeshPart(self, message.mesh, head))
        elif message.kind == "stop":
            for part in self._parts.pop(message.mesh, []):
                part.stop()
            self.say("stopped", message.mesh)
        else:
            if message.kind == "renew":
                parts = self._parts.pop(int(head["of"]), [])
                self._parts[message.mesh] = [part for part in parts if part.place not in head["left"]]
                for part in parts:
                    if part.place in head["left"]:
                        part.stop()
            for part in self._parts.get(message.mesh, ()):
                part.receive(message)

    def stop(self) -> None:
        for part in self.parts:
            part.stop()
        self._parts.clear()

    def listen(self) -> None:
        for part in self.parts:
            part.listen()

    def told(self, mesh: int) -> None:
        """Tell how far all parts of a mesh are."""
        least = tuple(map(min, zip(*[part.told for part in self._parts.get(mesh, ())], strict=True)))
        self.cluster.up(self, Progress("progress", mesh, least))

    def say(self, kind: str, mesh: int, data: bytes = b"", **head: Any) -> None:
        self.cluster.up(self, started(Message(kind, mesh, head=head, data=data), host=self.number))


class MeshPart:
    """A mesh's workers at one of its places."""

    def __init__(self, host: Host, mesh: int, head: dict[str, Any]) -> None:
        total = 1
        for _, size in head["dims"]:
            total *= size
        each = total // head["hosts"]
        self.host, self.mesh, self.place = host, mesh, int(head["host"])
        self.here = range(self.place * each, (self.place + 1) * each)
        self.next, self.epoch = int(head["first"]), int(head["epoch"])
        self.memory: Memory | None = Memory(total, self.next)
        self.workers: dict[int, Worker] = {}
        self.ended: deque[int] = deque()
        """Ranks of workers that have ended, which nobody has heard of yet."""
        self.told = (-1, -1)
        self.joined: dict[str, dict[int, Any]] = {"workers": {}, "links": {}}
        for rank in self.here:
            self._fork(rank, self.next)

    def _fork(self, rank: int, first: int) -> None:
        assert self.memory is not None
        cluster = self.host.cluster
        self.workers[rank] = Worker(
            rank, cluster.pid(), self.here, self.memory, first, self.epoch, cluster.mirror, cluster.fails
        )

    def receive(self, message: Message) -> None:
        head = message.head
        if self.mesh != message.mesh:
            self.mesh, self.told = message.mesh, (-1, -1)
        if self.memory is None:
            return
        if message.kind == "peers":
            for worker in self.workers.values():
                worker.packets.append(pack({"peers": {}}))
        elif message.kind == "load":
            self._command(int(head["command"]), wire.numbers(wire.LOAD, head["number"]))
        elif message.kind == "commands":
            command, view = int(head["first"]), memoryview(message.data)
            while view:
                (size,) = wire.RECORD.unpack_from(view)
                self._command(command, bytes(view[wire.RECORD.size : wire.RECORD.size + size]))
                view, command = view[wire.RECORD.size + size :], command + 1
        elif message.kind == "release":
            self.memory.released = int(head["step"])
        elif message.kind == "dead":
            self.memory.dead = True
        elif message.kind == "say":
            if int(head["rank"]) in self.here:
                self.workers[int(head["rank"])].packets.append(bytes(message.data))
        elif message.kind == "look":
            self._say("seen", b"{}")
        else:
            assert message.kind == "renew", message.kind
            self._renew(int(head["first"]), head["ranks"], int(head["epoch"]))

    def _renew(self, first: int, ranks: Sequence[int], epoch: int) -> None:
        assert self.memory is not None
        self.memory.begin(first)
        self.next, self.epoch = first, epoch
        self.joined = {"workers": {}, "links": {}}
        for rank in self.here:
            if rank in ranks:
                self.ended = deque(each for each in self.ended if each != rank)
                self.workers[rank].alive = False  # one that was given up is killed
                self._fork(rank, first)
            elif not self.workers[rank].alive:
                self.ended.append(rank)  # it was told under another number, perhaps
            else:
                self.workers[rank].epochs.append(self.epoch)
                self.workers[rank].packets.append(wire.numbers(wire.SESSION, first))

    def _command(self, number: int, body: bytes) -> None:
        assert self.memory is not None
        if number >= self.next:
            assert number == self.next, "a command was left out"
            self.memory.ring[number] = body
            self.next = number + 1

    def kill(self, rank: int) -> None:
        self.workers[rank].alive = False
        self.ended.append(rank)

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.alive = False
        self.memory = None

    def listen(self) -> None:
        """Tell what the workers have said, how far they are, and which have ended."""
        if self.memory is None:
            return
        done, over = self.memory.done, self.memory.over
        finished = min(done[rank] for rank in self.here)
        for rank, worker in self.workers.items():
            while worker.said:
                packet = worker.said.popleft()
                if wire.UP_HEAD.unpack_from(packet)[0] == wire.STARTUP:
                    self._startup(rank, unpack(packet))
                else:
                    self._say("packet", packet, rank=rank)
        while self.ended:
            self.memory.dead = True
            self._say("exited", rank=self.ended.popleft(), how="was killed by SIGKILL", status=-9)
        told = finished, min(max(done[rank], over[rank]) for rank in self.here)
        if told != self.told:
            self.told = told
            self.host.told(self.mesh)

    def _startup(self, rank: int, what: dict[str, Any]) -> None:
        kind = "workers" if "pid" in what else "links"
        if "lost" in what:
            self._say("lost", rank=rank, peer=what["lost"], why="the connection was reset")
            return
        self.joined[kind][rank] = what if kind == "workers" else what["links"]
        if len(self.joined[kind]) == len(self.here):
            self._say(kind, json.dumps(self.joined[kind]).encode())

    def _say(self, kind: str, data: bytes = b"", **head: Any) -> None:
        self.host.say(kind, self.mesh, data, **head)

    def mirrors(self, rank: int) -> bool:
        """Whether what this worker shows is to be shown here."""
        return self.memory is not None and rank not in self.here

    def counterpart(self, rank: int) -> Worker:
        """The worker here to which one on another place has a link."""
        return self.workers[self.here[rank % len(self.here)]]
