"""The connection of a controller to workers on other hosts, through the control plane.

What hosts say (see `service`) is put into an inbox (`inbox`); the controller reads it when it waits for something, and
otherwise when it comes by.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count, groupby
from typing import Any

import torch

from monarch.compiler.config import for_spawned
from monarch.compiler.execution.events import say, wanted
from monarch.compiler.plan import DeviceMeshError, MeshSpec, MonarchError, Plan
from monarch.compiler.plan.file import plan_bytes
from monarch.runtime.control.message import Message
from monarch.runtime.controller.connection import SLEEP_MILLISECONDS, ActorProcesses, Connection
from monarch.runtime.controller.state import fresh
from monarch.runtime.controller.steps import Step
from monarch.runtime.hosts.inbox import Inbox, Tree
from monarch.runtime.processes.looking import Exit, WorkerProgress
from monarch.runtime.shared import wire
from monarch.runtime.shared.measured import clock
from monarch.runtime.shared.place import Place
from monarch.runtime.shared.results import Results
from monarch.runtime.shared.ring import Space, record_size
from monarch.runtime.shared.window import RING_BYTES, STAGING_BYTES

_EXPLAIN_SECONDS = 2.0  # for the cause of a broken link to arrive
_STOP_SECONDS = 10.0
_ANSWER_SECONDS = 15.0
_CLOCK_ROUNDS = 8

_END = sys.maxsize

_Item = tuple[str, bytes, dict[str, Any]]
"""A message for all hosts: kind, data, head."""

_meshes = count(1)

logger = logging.getLogger("monarch")


class RemoteConnection(Connection):
    """The workers of a mesh, in blocks of equal size: each has a place on a host of `tree`."""

    def __init__(
        self,
        tree: Tree,
        transports: Sequence[str],
        timeout: float,
        mesh: MeshSpec,
        lost: Callable[[], None],
        actor_processes: ActorProcesses | None = None,
        places: Sequence[int] | None = None,
        joining: int | None = None,
    ) -> None:
        """`places` has the numbers of the hosts of the places, in order, without it all hosts of the tree. Hosts from
        the number `joining` on have joined later: `move` takes them."""
        places = range(len(tree.hosts)) if places is None else places
        hosts = len(places)
        if mesh.workers % hosts:
            raise MonarchError(
                f"{mesh} has {mesh.workers} workers, which cannot be divided evenly over {hosts} hosts",
                hint="give the mesh a dim that the number of hosts divides, or attach another number of hosts (those\n"
                "that may join count too).",
            )
        super().__init__(mesh, lost)
        self.actor_processes = actor_processes
        self.tree = tree
        self.hosts = hosts
        self._each = mesh.workers // hosts
        self._inbox = inbox = Inbox(tree, next(_meshes), places)
        self._joining = len(tree.hosts) if joining is None else joining
        self._moving: set[int] = set()
        """Places whose workers are to start on other hosts."""
        self._before: dict[int, int] = {}
        """The former hosts of the places that others are to take, until their workers have started there."""
        self._ring = Space(RING_BYTES, restart=False)  # what is free in the hosts' rings, which are all alike
        self._items: list[_Item] = []  # what is to be sent to the hosts
        self._pids: dict[int, int] = {}
        self._memory: dict[int, int] = {}  # what hosts last said of it
        self._set_aside: list[Message] = []  # what somebody waits for in `_answers`
        self._timeout = timeout
        self._suspect: tuple[float, str] | None = None  # a broken link, whose cause may still be told
        self._refused: dict[int, str] = {}
        """Why hosts did not start workers, by their numbers in the tree."""
        self.links: list[dict[str, Any]] = [{} for _ in range(mesh.workers)]
        """By worker and host: the transport that joins the worker to its counterpart there, and why."""
        tree.subscribe(inbox.number, inbox.receive, inbox.host_lost)
        self._stop = weakref.finalize(self, _stop, tree, inbox, os.getpid())
        try:
            self._start(transports)
        except BaseException:
            self._stop()
            raise

    # -- starting --------------------------------------------------------------------------------------------------

    def _start(self, transports: Sequence[str]) -> None:
        self._head = {
            "dims": [list(dim) for dim in self.mesh.dims],
            "hosts": self.hosts,
            "secret": secrets.token_hex(32),
            "transports": list(transports),
            "timeout": self._timeout,
            "settings": for_spawned(),
        }
        for place in range(self.hosts):
            self._start_at(place, 0)
        self._join()

    def _start_at(self, place: int, first: int) -> None:
        """Have the host of a place start its workers, for a session whose first command has this number."""
        head = {"host": place, "first": first, "actor_processes": self._actor_processes(place)}
        host = self._inbox.hosts[place]
        self.tree.send(Message("start", self._inbox.number, head={**self._head, **head}), hosts=[host])

    def _join(self) -> None:
        """Have the workers on different hosts find each other."""
        deadline = time.monotonic() + self._timeout
        everyone = self._ask_all("workers", deadline)
        self._pids = {rank: what["pid"] for rank, what in everyone.items()}
        peers = [{name: everyone[rank][name] for name in ("address", "region")} for rank in range(self.mesh.workers)]
        self._inbox.send("peers", data=json.dumps(peers).encode())
        for rank, links in self._ask_all("links", deadline).items():
            self.links[rank] = links
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
            ends = f"{self._address_at(here)} to {self._address_at(there)}"
            say("commands", f"{self.mesh}: workers {ranks}, {ends}: {reasons}")

    def _ask_all(self, kind: str, deadline: float) -> dict[int, Any]:
        """The answers of all hosts about their workers, by rank."""
        told: dict[int, Any] = {}
        refused, explained = None, deadline
        while True:
            for message in self._inbox.take():
                if message.kind == kind:
                    told |= {int(rank): what for rank, what in json.loads(bytes(message.data)).items()}
                elif message.kind == "refused" and refused is None:
                    refused = message
                    if "peer" in message.head:  # it may have died, of which its host tells
                        explained = min(deadline, time.monotonic() + _EXPLAIN_SECONDS)
                else:
                    self._handle(message)
            if refused is not None and ("peer" not in refused.head or time.monotonic() > explained):
                where = self._address(refused.host) if refused.host >= 0 else ""
                error = DeviceMeshError if self._refuse(refused) else MonarchError
                raise error(
                    f"cannot start {self.mesh} on host {where}: {refused.head['message']}", hint=refused.head["hint"]
                )
            self.ready()
            if len(told) == self.mesh.workers:
                return told
            if time.monotonic() > deadline:
                late = [self._address_at(at) for at in range(self.hosts) if at * self._each not in told]
                raise MonarchError(
                    f"cannot start {self.mesh}: no answer in time from {', '.join(late)}",
                    hint="read the output of `monarch host` there; if starting takes long, attach with a longer "
                    "timeout=.",
                )
            self._inbox.wait(SLEEP_MILLISECONDS / 1000)

    def _refuse(self, message: Message) -> bool:
        """A host does not start workers: the places that it was to take are as they were, so that another may. Whether
        there are such."""
        inbox, head, host = self._inbox, message.head, message.host
        self._refused[host] = head["message"]
        taken = [place for place in self._before if inbox.hosts[place] == host]
        if "place" in head:
            taken = [place for place in taken if place == head["place"]]
        elif taken and len(taken) == inbox.hosts.count(host):  # it has started them, and they cannot go on
            self.tree.send(Message("stop", inbox.number), hosts=[host])
        else:
            taken = []
        self._put_back(taken)
        ranks = [rank for place in taken for rank in range(place * self._each, (place + 1) * self._each)]
        self.state.died([Exit(rank, "could not be started") for rank in ranks])
        return bool(taken)

    def _put_back(self, places: Sequence[int]) -> None:
        """Places whose workers have not started at the hosts that were to take them are at their former ones."""
        inbox = self._inbox
        for place in places:
            inbox.hosts[place] = self._before.pop(place)
            if inbox.hosts[place] not in inbox.lost:
                self._moving.add(place)

    # -- commands --------------------------------------------------------------------------------------------------

    def packed(self, plan: Plan) -> bytes:
        """The bytes of its file: checked, and its kernels built, where they arrive."""
        return plan_bytes(plan)

    def try_to_give(
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

    def taken(self, step: Step) -> None:
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
        for item in items:  # an interrupted call sends them once more, and hosts pass over those that they have
            self._items[: 1 if self._items[:1] == [item] else 0] = ()

    def _send(self, kind: str, data: Any = b"", **head: Any) -> None:
        try:
            self._inbox.send(kind, head, data)
        except MonarchError as error:  # a later command would be out of order
            self.state.give_up(f"the mesh {self.mesh} has lost its hosts: {error.message}", error.hint)
            self.ready()

    # -- messages of the hosts ------------------------------------------------------------------------------------

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
        elif message.kind == "memory":
            self._memory |= {int(rank): size for rank, size in json.loads(bytes(message.data)).items()}
        elif message.kind == "exited":
            if message.data:
                self.results[head["rank"]] = Results(memoryview(message.data))
            self.state.died(
                [Exit(head["rank"], head["how"], head.get("status"), head.get("log", ""))], self._address(message.host)
            )
        elif message.kind == "host lost":
            places = [at for at, host in enumerate(self._inbox.hosts) if host == message.host]
            ranks = [rank for at in places for rank in range(at * self._each, (at + 1) * self._each)]
            for rank in ranks:
                self.state.gone.setdefault(rank, f"was on host {self._address(message.host)}, which is lost")
            self.state.give_up(
                f"the mesh {self.mesh} has lost host {self._address(message.host)}, with workers "
                f"{', '.join(map(str, ranks))}: {message.head['why']}",
                'monarch.heal_mesh(mesh, policy="spare") puts a spare host in its place, and\n'
                'policy="shrink" continues without it.',
            )
            self._put_back([place for place in places if place in self._before])
        elif message.kind == "refused":  # while a death was reported
            self._refuse(message)
        elif message.kind == "lost" and self._suspect is None:
            link = f"worker {head['rank']} (host {self._address(message.host)}) and worker {head['peer']} (host "
            link += f"{self._address_at(head['peer'] // self._each)})"
            self._suspect = (time.monotonic() + _EXPLAIN_SECONDS, f"the connection between {link}: {head['why']}")

    def _address(self, host: int) -> str:
        return self.tree.hosts[host].address

    def _address_at(self, place: int) -> str:
        return self._address(self._inbox.hosts[place])

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

    def give_up_steps(self, first: int, behind: int) -> bool:
        with self.lock:
            if self.state.dead is not None or self.state.finished_commands > first:
                return False
            self.interrupted = True
            try:
                self.publish()
                self._send("cancel", first=first, behind=behind)
            except DeviceMeshError:  # the hosts are lost: the next call raises that
                pass
        return True

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
            for message in self._answers("clock", self.hosts):
                sent, here, now = message.head["sent"], message.head["here"], clock()
                best[message.host] = min(best.get(message.host, (now, 0)), (now - sent, (sent + now) // 2 - here))
        hosts = {rank: self._inbox.hosts[rank // self._each] for rank in range(self.mesh.workers)}
        return {rank: best[host][1] for rank, host in hosts.items() if host in best}

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
        return sum(message.head["messages"] for message in self._answers("counted", self.hosts))

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

    def memory(self) -> dict[int, int]:
        with suppress(MonarchError):  # all hosts are lost, which others report
            self._inbox.send("memory")
        return dict(sorted(self._memory.items()))

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

    def seen(self) -> Mapping[int, WorkerProgress]:
        found: dict[int, WorkerProgress] = {}
        try:
            self._inbox.send("look")
        except MonarchError:  # all hosts are lost, which others report
            return found
        for message in self._answers("seen", self.hosts):
            found |= {int(rank): WorkerProgress(*seen) for rank, seen in json.loads(bytes(message.data)).items()}
        return found

    def host_of(self, rank: int) -> str:
        return self._address_at(rank // self._each)

    def lose(self, rank: int, how: str) -> None:
        self.state.died([Exit(rank, how)], self.host_of(rank))
        with suppress(MonarchError):
            self._inbox.send("dead", {"rank": rank})

    # -- the end ---------------------------------------------------------------------------------------------------

    # -- after a death -----------------------------------------------------------------------------------------------

    def say(self, rank: int, packet: bytes) -> None:
        host = self._inbox.hosts[rank // self._each]
        self.tree.send(Message("say", self._inbox.number, head={"rank": rank}, data=packet), hosts=[host])

    def _hear(self) -> None:
        self.refresh()

    def _stop_all(self) -> None:
        self._inbox.send("dead", {"rank": min(self.state.gone, default=0)})

    def _renew(self, first: int, ranks: Sequence[int]) -> None:
        inbox = self._inbox
        lost = {place: host for place, host in enumerate(inbox.hosts) if host in inbox.lost or place in self._moving}
        hosts = self._with_others(lost)
        self._items.clear()
        self._ring = Space(RING_BYTES, restart=False)
        self._suspect = None
        inbox.renew(first)
        head = {"first": first, "ranks": list(ranks), "of": inbox.number, "left": sorted(lost)}
        if not lost:
            inbox.send("renew", head)
        else:  # by another number: hosts may still have messages of the lost ones about this one
            there = sorted({host for place, host in enumerate(hosts) if place not in lost})
            moving, before = set(self._moving), inbox.number
            self._before |= {place: inbox.hosts[place] for place in lost if place not in self._before}
            inbox.number, inbox.hosts = next(_meshes), hosts
            self.tree.subscribe(inbox.number, inbox.receive, inbox.host_lost)
            self.tree.send(Message("renew", inbox.number, head=head), hosts=there)
            for place in lost:
                self._start_at(place, first)
                host = self._address_at(place)
                if place not in moving:
                    logger.info("healing %s: host %s has the place of a lost one", self.mesh, host)
                elif inbox.hosts[place] >= self._joining:
                    logger.info("%s: host %s, which has joined, takes workers", self.mesh, host)
                else:
                    logger.warning("%s: workers stay on host %s: no host that has joined takes them", self.mesh, host)
            self._moving.clear()  # whatever comes now: they run, unless their host refuses them or is lost
            self.tree.unsubscribe(before)
        self._join()
        self._before.clear()

    def _with_others(self, lost: Mapping[int, int]) -> list[int]:
        """The host of each place, with other hosts in those of lost ones, as `elsewhere` allows. Raises
        MonarchError."""
        inbox = self._inbox
        hosts = list(inbox.hosts)
        if not lost:
            return hosts
        dead = [place for place in lost if place not in self._moving]
        alive = [host for host in range(len(self.tree.hosts)) if host not in inbox.lost]
        unused = [host for host in alive if host not in hosts]
        spares = [host for host in unused if host not in self._refused]
        crowded = [host for host in alive if host in hosts]
        names = ", ".join(self._address(host) for host in lost.values())
        refused = [host for host in unused if host in self._refused]
        enough = {"": not dead, "spare": len(spares) >= len(dead), "any host": True}[self.elsewhere]
        if not enough or not (spares or crowded):
            raise MonarchError(
                f"the mesh {self.mesh} cannot be healed as it was: host {names} is out of reach",
                hint="".join(f"{self._address(each)} has refused: {self._refused[each]}\n" for each in refused)
                + f'policy="spare" needs spare hosts: there are {len(spares)} (monarch.hosts(..., spares=1));\n'
                'policy="shrink" continues without the lost hosts.',
            )
        shared = crowded or spares  # where all hosts of the mesh are lost, spare ones have several places
        for turn, place in enumerate(dead):
            hosts[place] = spares[turn] if turn < len(spares) else shared[turn % len(shared)]
        joined = [host for host in spares[len(dead) :] if host >= self._joining]
        for turn, place in enumerate(sorted(self._moving)):
            hosts[place] = joined[turn] if turn < len(joined) else shared[turn % len(shared)]
        return hosts

    @property
    def free_hosts(self) -> int:
        taken = {*self._inbox.hosts, *self._inbox.lost, *self._refused}
        return len(set(range(self._joining, len(self.tree.hosts))) - taken)

    def move(self, ranks: Collection[int]) -> bool:
        chosen: dict[int, range] = {}
        sharing = Counter(self._inbox.hosts)
        for place, host in enumerate(self._inbox.hosts):
            own = range(place * self._each, (place + 1) * self._each)
            if len(chosen) < self.free_hosts and sharing[host] > 1 and set(own) <= set(ranks):
                sharing[host] -= 1
                chosen[place] = own
        if not chosen:
            return False
        self._moving.update(chosen)
        moving = [rank for own in chosen.values() for rank in own]
        self.state.died([Exit(rank, "moves to another host") for rank in moving])
        self._inbox.send("dead", {"rank": moving[0]})
        return True

    def _close(self) -> None:
        self._stop()


def _stop(tree: Tree, inbox: Inbox, owner: int) -> None:
    """End the workers, and wait until the hosts say so, or are lost. In a forked child of the controller: nothing."""
    if os.getpid() != owner:
        return
    stopped: set[int] = set()
    deadline = time.monotonic() + _STOP_SECONDS
    try:
        inbox.send("stop")
        while (left := deadline - time.monotonic()) > 0:
            stopped |= {message.host for message in inbox.take() if message.kind == "stopped"}
            if set(inbox.hosts) <= stopped | inbox.lost:
                break
            inbox.wait(left)
    except MonarchError:  # the hosts are gone, and have ended what ran for this controller
        pass
    finally:
        tree.unsubscribe(inbox.number)
