"""The connection of a controller to workers on other hosts, through the control plane.

What hosts say (see `service`) comes in threads of the control plane's, and is put into an inbox; the controller reads
it when it waits for something, and otherwise when it comes by. Only what must not wait for the controller is done at
once: workers that stand still after a failed step are released, those that wait for others which are behind are told
how far these have come, and all hosts are told of a worker's end.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count, groupby
from typing import Any, Protocol

import torch

from monarch.compiler.config import for_spawned
from monarch.compiler.execution.events import say, wanted
from monarch.compiler.plan import MeshSpec, MonarchError, Plan
from monarch.compiler.plan.file import plan_bytes
from monarch.runtime.control.message import Message
from monarch.runtime.controller.connection import SLEEP_MILLISECONDS, ActorProcesses, Connection
from monarch.runtime.controller.state import Step, fresh
from monarch.runtime.processes.looking import Exit, Seen
from monarch.runtime.shared import wire
from monarch.runtime.shared.measured import clock
from monarch.runtime.shared.place import Place
from monarch.runtime.shared.ring import Space, record_size
from monarch.runtime.shared.window import RING_BYTES, STAGING_BYTES

_EXPLAIN_SECONDS = 2.0  # for the cause of a broken link to be told
_STOP_SECONDS = 10.0
_ANSWER_SECONDS = 15.0
_CLOCK_ROUNDS = 8

_END = sys.maxsize

_Item = tuple[str, bytes, dict[str, Any]]
"""A message for all hosts: kind, data, head."""

_meshes = count(1)


class Host(Protocol):
    @property
    def address(self) -> str: ...


class Tree(Protocol):
    """What of `control.tree.HostTree` is needed here."""

    @property
    def hosts(self) -> Sequence[Host]: ...

    def send(self, message: Message, hosts: Sequence[int] | None = None) -> None: ...

    def subscribe(self, mesh: int, receive: Callable[[Message], None], lost: Callable[[int, str], None]) -> None: ...

    def unsubscribe(self, mesh: int) -> None: ...


class Inbox:
    """What the hosts have said about one mesh, and has not been read yet."""

    def __init__(self, tree: Tree, number: int) -> None:
        self._tree = tree
        self._number = number
        self._messages: deque[Message] = deque()
        self._changed = threading.Condition()
        self._released = 0
        self._finished = self._passed = self._behind = 0  # commands that all have finished; told of; to be told of
        self._dead = False
        self.lost: set[int] = set()
        """Hosts that are out of reach."""

    def receive(self, message: Message) -> None:
        if message.kind == "behind":
            self._behind = max(self._behind, message.head["command"])
            self._tell_passed()
            return
        if message.kind == "progress":
            finished, over = message.progress
            self._finished = finished
            self._tell_passed()
            if over > max(finished, self._released):
                self._released = over
                self._tree.send(Message("release", self._number, head={"step": over}))
        elif message.kind in ("exited", "lost") and not self._dead:
            self._dead = True
            self._tree.send(Message("dead", self._number, head={"rank": message.head["rank"]}))
        self._put(message)

    def _tell_passed(self) -> None:
        if self._finished >= self._behind > self._passed:
            self._passed = self._finished
            self._tree.send(Message("passed", self._number, head={"command": self._finished}))

    def host_lost(self, host: int, why: str) -> None:
        self.lost.add(host)
        self._put(Message("host lost", self._number, host, {"why": why}))
        if not self._dead:
            self._dead = True
            with suppress(MonarchError):  # it was the last host
                self._tree.send(Message("dead", self._number, head={"rank": 0}))

    def renew(self, first: int) -> None:
        """A new session begins, whose first command has this number."""
        self._dead = False
        self._released = first

    def _put(self, message: Message) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    def take(self) -> list[Message]:
        with self._changed:
            taken = list(self._messages)
            self._messages.clear()
            return taken

    def first(self) -> Message | None:
        """The oldest message, which stays here until it is dropped."""
        with self._changed:
            return self._messages[0] if self._messages else None

    def drop(self, message: Message) -> None:
        with self._changed:
            if self._messages and self._messages[0] is message:
                self._messages.popleft()

    def wait(self, seconds: float) -> None:
        """Until there is something, at most so long."""
        with self._changed:
            if not self._messages:
                self._changed.wait(seconds)


class RemoteConnection(Connection):
    """The workers of a mesh whose blocks of equal size are on the hosts of `tree`, in order."""

    def __init__(
        self,
        tree: Tree,
        transports: Sequence[str],
        timeout: float,
        mesh: MeshSpec,
        lost: Callable[[], None],
        actor_processes: ActorProcesses | None = None,
    ) -> None:
        hosts = len(tree.hosts)
        if mesh.workers % hosts:
            raise MonarchError(
                f"{mesh} has {mesh.workers} workers, which cannot be divided evenly over {hosts} hosts",
                hint="give the mesh a dim that the number of hosts divides, or attach another number of hosts.",
            )
        super().__init__(mesh, lost)
        self.actor_processes = actor_processes
        self._tree = tree
        self.hosts = hosts
        self._number = next(_meshes)
        self._each = mesh.workers // hosts
        self._inbox = inbox = Inbox(tree, self._number)
        self._ring = Space(RING_BYTES, restart=False)  # what is free in the hosts' rings, which are all alike
        self._items: list[_Item] = []  # what is to be sent to the hosts
        self._pids: dict[int, int] = {}
        self._set_aside: list[Message] = []  # what somebody waits for in `_answers`
        self._timeout = timeout
        self._suspect: tuple[float, str] | None = None  # a broken link, whose cause may still be told
        self.links: list[dict[str, Any]] = [{} for _ in range(mesh.workers)]
        """By worker and host: the transport that joins the worker to its counterpart there, and why."""
        tree.subscribe(self._number, inbox.receive, inbox.host_lost)
        self._stop = weakref.finalize(self, _stop, tree, self._number, inbox, hosts, os.getpid())
        try:
            self._start(transports)
        except BaseException:
            self._stop()
            raise

    # -- starting --------------------------------------------------------------------------------------------------

    def _start(self, transports: Sequence[str]) -> None:
        hosts = len(self._tree.hosts)
        head = {
            "dims": [list(dim) for dim in self.mesh.dims],
            "hosts": hosts,
            "secret": secrets.token_hex(32),
            "transports": list(transports),
            "timeout": self._timeout,
            "settings": for_spawned(),
        }
        for host in range(hosts):
            here = {"host": host, "actor_processes": self._actor_processes(host)}
            self._tree.send(Message("start", self._number, head={**head, **here}), hosts=[host])
        self._join()

    def _join(self) -> None:
        """Have the workers on different hosts find each other."""
        deadline = time.monotonic() + self._timeout
        everyone: dict[int, Any] = {}
        for part in self._told_by_all("workers", deadline):
            everyone |= {int(rank): what for rank, what in part.items()}
        self._pids = {rank: what["pid"] for rank, what in everyone.items()}
        peers = [{name: everyone[rank][name] for name in ("address", "region")} for rank in range(self.mesh.workers)]
        self._tree.send(Message("peers", self._number, data=json.dumps(peers).encode()))
        for part in self._told_by_all("links", deadline):
            for rank, links in part.items():
                self.links[int(rank)] = links
        if wanted("commands"):
            self._say_links()

    def _actor_processes(self, host: int) -> dict[str, Any] | None:
        if self.actor_processes is None:
            return None
        processes = self.actor_processes.processes[host * self._each : (host + 1) * self._each]
        return {"name": self.actor_processes.name, "processes": processes, "owner": self.actor_processes.owner}

    def _say_links(self) -> None:
        """Which transports join the hosts' workers, and why; once for all pairs of workers that are alike."""
        pairs: dict[tuple[int, int, str], list[int]] = {}
        for rank, links in enumerate(self.links):
            for host, link in links.items():
                pairs.setdefault((rank // self._each, int(host), "; ".join(link["reasons"])), []).append(rank)
        for (here, there, reasons), ranks in pairs.items():
            ends = f"{self._address(here)} to {self._address(there)}"
            say("commands", f"{self.mesh}: workers {ranks}, {ends}: {reasons}")

    def _told_by_all(self, kind: str, deadline: float) -> list[Any]:
        told: dict[int, Any] = {}
        while len(told) < len(self._tree.hosts):
            for message in self._inbox.take():
                where = self._tree.hosts[message.host].address if message.host >= 0 else ""
                if message.kind == kind:
                    told[message.host] = json.loads(bytes(message.data))
                elif message.kind == "refused":
                    raise MonarchError(
                        f"cannot start {self.mesh} on host {where}: {message.head['message']}",
                        hint=message.head["hint"],
                    )
                else:
                    self._handle(message)
            self.ready()
            if len(told) == len(self._tree.hosts):
                break
            if time.monotonic() > deadline:
                late = [host.address for at, host in enumerate(self._tree.hosts) if at not in told]
                raise MonarchError(
                    f"cannot start {self.mesh}: no answer in time from {', '.join(late)}",
                    hint="look at what `monarch host` prints there; attach with a longer timeout= where starting takes "
                    "long.",
                )
            self._inbox.wait(SLEEP_MILLISECONDS / 1000)
        return list(told.values())

    # -- commands --------------------------------------------------------------------------------------------------

    def packed(self, plan: Plan) -> bytes:
        """The bytes of its file: checked, and its kernels built, where they arrive."""
        return plan_bytes(plan)

    def _try(
        self, step: Step, last: Step, record: bytes | Callable[[int], bytes], parts: Sequence[Any], plan: bytes
    ) -> bool:
        state, finished, command = self.state, self.state.finished_commands, last.sequence + 1
        items: list[_Item] = []
        if parts:
            data = b"".join(memoryview(part).cast("B") for part in parts)
            at = self.staging.reserve(len(data), finished)
            step.staged = at, len(data)
            items.append(("stage", data, {"command": command, "offset": at % STAGING_BYTES}))
        body = record if isinstance(record, bytes) else record(items[0][2]["offset"] if items else 0)
        size = record_size(len(body))
        step.sequence, step.at = command, (self._ring.reserve(size, finished), size)
        if plan:
            _, number, *where = wire.unpack_numbers(body)
            items.append(("load", plan, {"command": command, "number": number, "place": where}))
        else:
            items.append(("commands", wire.RECORD.pack(len(body)) + body, {"first": command}))
        given, not_given = (items, step, True), ()
        self._items[_END:], state.last, done = given if state.last is last else (not_given, state.last, False)
        return done

    def _taken(self, step: Step) -> None:
        self._ring.take(*step.at, step.sequence)

    def publish(self) -> None:
        items = self._items[:]
        for commands, group in groupby(items, lambda item: item[0] == "commands"):
            if commands:
                joined = list(group)
                self._send("commands", b"".join(data for _, data, _ in joined), **joined[0][2])
            else:
                for kind, data, head in group:
                    self._send(kind, data, **head)
        for item in items:  # where this was interrupted they go once more, and hosts pass over what they have
            self._items[: 1 if self._items[:1] == [item] else 0] = ()

    def _send(self, kind: str, data: Any = b"", **head: Any) -> None:
        try:
            self._tree.send(Message(kind, self._number, head=head, data=data))
        except MonarchError as error:  # what comes after it would be out of order
            self.state.give_up(f"the mesh {self.mesh} has lost its hosts: {error.message}", error.hint)
            self.ready()

    # -- what comes back -------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        while (message := self._inbox.first()) is not None:
            self._handle(message)
            self._inbox.drop(message)

    def _handle(self, message: Message) -> None:
        head = message.head
        if message.kind == "packet":
            self.replies.take(head["rank"], message.data)
        elif message.kind == "progress":
            self.state.finished(message.progress[0])
        elif message.kind in ("clock", "measured", "counted", "seen"):
            self._set_aside.append(message)
        elif message.kind == "exited":
            self.state.died(
                [Exit(head["rank"], head["how"], head.get("status"), head.get("log", ""))], self._address(message.host)
            )
        elif message.kind == "host lost":
            first = message.host * self._each
            for rank in range(first, first + self._each):
                self.state.gone.setdefault(rank, f"was on host {self._address(message.host)}, which is lost")
            self.state.give_up(
                f"the mesh {self.mesh} has lost host {self._address(message.host)}, with workers {first} to "
                f"{first + self._each - 1}: {head['why']}",
                "All values on the mesh are lost with it. Attach the hosts again, make a new mesh, and start again\n"
                "from the last checkpoint.",
            )
        elif message.kind == "lost" and self._suspect is None:
            link = f"worker {head['rank']} (host {self._address(message.host)}) and worker {head['peer']} (host "
            link += f"{self._address(head['peer'] // self._each)})"
            self._suspect = (time.monotonic() + _EXPLAIN_SECONDS, f"the connection between {link}: {head['why']}")

    def _address(self, host: int) -> str:
        return self._tree.hosts[host].address

    def news(self) -> None:
        """A broken link is most often a sign of something worse, of which hosts tell as soon as they notice."""
        if self._suspect is not None and self.state.dead is None:
            until, what = self._suspect
            while self.state.dead is None and (left := until - time.monotonic()) > 0:
                self.refresh()
                self._inbox.wait(min(left, SLEEP_MILLISECONDS / 1000))
            self.state.give_up(f"the mesh {self.mesh} has lost {what}")

    def catch_up(self, commands: int, place: Place | None = None) -> None:
        with self.lock:
            self.publish()
        while True:
            with self.lock:
                self.refresh()
                if self.state.finished_commands >= commands:
                    return
                self.ready()
            self._inbox.wait(SLEEP_MILLISECONDS / 1000)

    def _look(self) -> None:
        with self.lock:
            self.refresh()
            self.ready()

    def _sleep(self, ranks: list[int]) -> None:
        self._inbox.wait(SLEEP_MILLISECONDS / 1000)

    def clock_offsets(self) -> dict[int, int]:
        """From messages there and back: the quickest says most, and is off by less than half its time."""
        best: dict[int, tuple[int, int]] = {}
        for _ in range(_CLOCK_ROUNDS):
            self._send("clock", sent=clock())
            for message in self._answers("clock", len(self._tree.hosts)):
                sent, here, now = message.head["sent"], message.head["here"], clock()
                best[message.host] = min(best.get(message.host, (now, 0)), (now - sent, (sent + now) // 2 - here))
        return {rank: best[host][1] for rank in range(self.mesh.workers) if (host := rank // self._each) in best}

    def measured(self, buffers: dict[int, torch.Tensor]) -> None:
        if self.closing:  # filled then, and its hosts know the mesh no more
            return
        self._send("measured")
        for message in self._answers("measured", len(buffers)):
            buffer = buffers[message.head["rank"]]
            words = torch.frombuffer(bytearray(message.data), dtype=buffer.dtype)
            buffer[: len(words)] = words

    def link_messages(self) -> int:
        """How many handshakes, registrations and the like the workers have sent each other so far."""
        self._send("links")
        return sum(message.head["messages"] for message in self._answers("counted", len(self._tree.hosts)))

    def _answers(self, kind: str, number: int) -> Iterator[Message]:
        """So many messages of a kind, as they come; fewer where a host does not answer in time."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while number > 0 and time.monotonic() < deadline:
            with self.lock:
                self.refresh()
                found = [message for message in self._set_aside if message.kind == kind]
                self._set_aside = [message for message in self._set_aside if message.kind != kind]
            yield from found
            number -= len(found)
            if not found:
                self._inbox.wait(SLEEP_MILLISECONDS / 1000)

    def pids(self) -> list[int]:
        return [self._pids[rank] for rank in range(self.mesh.workers)]

    # -- being watched ---------------------------------------------------------------------------------------------

    exact = False  # hosts tell of commands, not of collectives

    def take_in(self) -> None:
        self.refresh()
        if self.state.dead is not None:
            raise fresh(self.state.dead)

    def finished(self) -> int:
        return self.state.finished_commands

    def asked(self) -> int:
        return self.state.finished_commands if self._items else self.state.next_command

    def marks(self) -> Sequence[int]:
        return (self.state.finished_commands,)

    def seen(self) -> Mapping[int, Seen]:
        found: dict[int, Seen] = {}
        try:
            self._tree.send(Message("look", self._number))
        except MonarchError:  # all hosts are lost, which is told elsewhere
            return found
        for message in self._answers("seen", len(self._tree.hosts)):
            found |= {int(rank): Seen(*seen) for rank, seen in json.loads(bytes(message.data)).items()}
        return found

    def host_of(self, rank: int) -> str:
        return self._address(rank // self._each)

    def lose(self, rank: int, how: str) -> None:
        self.state.died([Exit(rank, how)], self.host_of(rank))
        with suppress(MonarchError):
            self._tree.send(Message("dead", self._number, head={"rank": rank}))

    # -- the end ---------------------------------------------------------------------------------------------------

    # -- after a death -----------------------------------------------------------------------------------------------

    def say(self, rank: int, packet: bytes) -> None:
        self._tree.send(Message("say", self._number, head={"rank": rank}, data=packet), hosts=[rank // self._each])

    def _hear(self) -> None:
        self.refresh()

    def _stop_all(self) -> None:
        self._tree.send(Message("dead", self._number, head={"rank": min(self.state.gone, default=0)}))

    def _renew(self, first: int, ranks: Sequence[int]) -> None:
        if lost := sorted(self._inbox.lost):
            raise MonarchError(
                f"the mesh {self.mesh} cannot be healed: host {self._address(lost[0])} is out of reach",
                hint="attach the hosts again, make a new mesh, and start again from the last checkpoint.",
            )
        self._items.clear()
        self._ring = Space(RING_BYTES, restart=False)
        self._suspect = None
        self._inbox.renew(first)
        self._tree.send(Message("renew", self._number, head={"first": first, "ranks": list(ranks)}))
        self._join()

    def _close(self) -> None:
        self._stop()


def _stop(tree: Tree, number: int, inbox: Inbox, hosts: int, owner: int) -> None:
    """End the workers, and wait until the hosts say so, or are lost. In a forked child of the controller: nothing."""
    if os.getpid() != owner:
        return
    stopped: set[int] = set()
    deadline = time.monotonic() + _STOP_SECONDS
    try:
        tree.send(Message("stop", number))
        while (left := deadline - time.monotonic()) > 0:
            stopped |= {message.host for message in inbox.take() if message.kind == "stopped"}
            if len(stopped | inbox.lost) == hosts:
                break
            inbox.wait(left)
    except MonarchError:  # the hosts are gone, and have ended what ran for this controller
        pass
    finally:
        tree.unsubscribe(number)
