"""One schedule: a controller's program on a simulated cluster, by a seed. The controller is the real one, but for its
clock and for waiting, in which the cluster goes on; so are healing, the control plane's relays and its outboxes."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import torch

from monarch.compiler.plan import DeviceMeshError, Layout, LostError, MeshSpec, MonarchError, Plan, TensorType
from monarch.runtime.controller import connection, executor, restoring
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.controller.healing import find_sources
from monarch.runtime.controller.steps import RemoteTensor
from monarch.runtime.hosts import remote
from monarch.runtime.hosts.inbox import Inbox
from monarch.runtime.hosts.remote import RemoteConnection
from monarch.runtime.shared.place import Place
from tests.runtime.building import Building
from tests.simulation.cluster import IDLE_SECONDS, Chances, Cluster
from tests.simulation.worker import Worker

STEPS = 6
_HOSTS = 5
"""So many hosts there are at most."""
_JOINS, _REFUSES = 0.3, 0.2
"""How likely a host joins before the controller goes on, and how likely it starts no workers."""


class _Clock:
    """In place of the module `time`."""

    cluster: Cluster

    def monotonic(self) -> float:
        return self.cluster.now


class _Inbox(Inbox):
    """In which waiting is the world's going on."""

    def wait(self, seconds: float) -> None:
        cluster = self._tree
        assert isinstance(cluster, Cluster)
        until = cluster.now + seconds
        while not self._messages and cluster.now < until:
            if not cluster.step():
                cluster.now += IDLE_SECONDS


class _Connection(RemoteConnection):
    def _renew(self, first: int, ranks: Sequence[int]) -> None:
        _clock.cluster.epoch += 1
        super()._renew(first, ranks)

    def packed(self, plan: Plan) -> bytes:
        return b"plan"


_clock = _Clock()


@contextmanager
def simulated() -> Iterator[None]:
    """In the block, what the controller's modules have of clocks and threads is the simulation's."""
    with ExitStack() as end:
        for module in (connection, restoring, remote):
            end.enter_context(mock.patch.object(module, "time", _clock))
        end.enter_context(mock.patch.object(remote, "Inbox", _Inbox))
        end.enter_context(mock.patch.object(executor, "watch", lambda connection: None))
        end.enter_context(mock.patch.object(executor, "check", lambda plan: None))
        yield


@cache
def program(mesh: MeshSpec, sharded: bool) -> tuple[Plan, TensorType]:
    """w += the sum of all workers' x; gives w's first element. w is whole, or sharded over the last mesh dim."""
    build = Building(mesh, "train")
    last = mesh.names[-1]
    w_type = TensorType(torch.float64, (mesh.sizes[last],), Layout(((last,) if sharded else (),)))
    w = build.input(w_type, "state", "w", donate=True)
    x = build.input(TensorType(torch.float64, (mesh.workers,), Layout((mesh.names,))))
    build.call("commit")
    out = build.call("aten.add.Tensor", w, x)
    build.output(out, TensorType(torch.float64, (1,), Layout(((),))))
    build.output(out, w_type, "state", "w")
    return build.plan(), w_type


def run(seed: int, resets: bool = True, joins: bool = True) -> list[str]:
    """Run a schedule within `simulated`; with `resets` connections between hosts are reset in it, and with `joins`
    hosts may join. Gives what went wrong in the cluster. Raises AssertionError where a number is wrong, state is lost
    of which a copy lives, something is left behind, or the controller waits for ever."""
    chance = random.Random(seed)
    hosts = chance.choice([1, 2, 2, 2, 3])
    late = random.Random(f"joins {seed}")
    room = late.choice([0, 0, 1, 2]) if joins else 0
    mesh = MeshSpec.of(a=hosts + room, b=chance.choice([1, 2, 2]))
    harsh = chance.choice([0.0, 0.0005, 0.002, 0.005]) / (1 + room)  # or more workers would die than can start
    chances = Chances(harsh, harsh / 3, chance.choice([0.0, 0.0, harsh / 20]), chance.choice([0.0, 0.0, 0.02]))
    others = random.Random(f"resets {seed}") if resets else None
    cluster = _clock.cluster = Cluster(hosts, chance.choice([1, 2, 8]), chance, chances, others)
    plan, w_type = program(mesh, chance.random() < 0.5 and not room)
    places = [*range(hosts), *(at % hosts for at in range(room))]
    connect = partial(_Connection, cluster, ["tcp"], 30.0, places=places, joining=hosts)
    with MeshExecutor(mesh, connect) as made:
        loop = _Loop(made, plan, w_type, cluster, chance.choice([0, 0, 1, 4]), late if room else None)
        try:
            loop.run()
        except _Over:
            pass
        cluster.calm = True
    while cluster.step():
        pass
    left = [rank for host in cluster.at.values() for rank, worker in host.workers.items() if worker.alive]
    assert not left, f"workers {left} are left behind"
    return cluster.happened


def run_some(first: int, count: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Run schedules; gives what went wrong in their clusters, and the seeds of those that failed, with how."""
    happened: Counter[str] = Counter()
    failed = []
    with simulated():
        for seed in range(first, first + count):
            try:
                happened.update(what.split()[0] for what in run(seed))
            except Exception as error:  # whatever it is, the others run on
                failed.append((seed, f"{type(error).__name__}: {error}"))
    return happened, failed


class _Over(Exception):
    """The mesh cannot be healed, rightly."""


class _Loop:
    """Training that reads losses some steps late, and goes back to the step that it is told has failed."""

    def __init__(
        self,
        made: MeshExecutor,
        plan: Plan,
        w_type: TensorType,
        cluster: Cluster,
        late: int,
        joins: random.Random | None,
    ) -> None:
        self.made, self.plan, self.cluster, self.late = made, plan, cluster, late
        self.mesh = made.mesh
        self.given_up: set[Worker] = set()
        """Those whose places others took: what they held does not count."""
        self.joins = joins
        """Says when hosts join, and when they are lost while they do."""
        self.elsewhere = "" if joins is None else joins.choice(["", "any host"])
        self.states: list[Any] = [made.put(torch.zeros(w_type.shape, dtype=torch.float64), w_type)]
        made.wait(self.states[0])
        self.losses: list[Any] = []
        self.read: list[float] = []

    def x(self, step: int) -> torch.Tensor:
        return torch.arange(1.0, self.mesh.workers + 1, dtype=torch.float64) * 10**step

    def expected(self, steps: int) -> float:
        """What w is after so many steps."""
        return float(sum(self.x(step).sum().item() for step in range(steps)))

    def run(self) -> None:
        self.cluster.calm = False
        for attempt in itertools.count():
            if len(self.read) == STEPS:
                break
            self.cluster.calm = attempt > 200  # in the end there is peace
            assert attempt < 1000, "no progress"
            try:
                if self.joins is not None and self.joins.random() < _JOINS:
                    self._join(self.joins)
                while len(self.losses) < STEPS and len(self.losses) - len(self.read) <= self.late:
                    loss, state = self.made.run(self.plan, [self.states[-1], self.x(len(self.losses))])
                    self.losses.append(loss)
                    self.states.append(state)
                self._take(self.made.shards(self.losses[len(self.read)], [0])[0].item())
            except LostError:
                self._check_lost()
            except DeviceMeshError as error:
                if error.mesh_lost:
                    self._heal()
                self._go_back()
        self.cluster.calm = True
        for shard in self._final():
            assert shard.tolist() == [self.expected(STEPS)] * len(shard), "wrong at the end"

    def _join(self, joins: random.Random) -> None:
        """Attach another host, and have workers start there that share a host with others; here these hold something,
        which others have too."""
        if len(self.cluster.hosts) < _HOSTS:
            self.cluster.join(joins, refuses=joins.random() < _REFUSES)
        connection = self.made.connection
        assert isinstance(connection, RemoteConnection)
        self.made.until(self.made.state.next_command)
        with connection.lock:
            connection.enter()
            if not connection.move(range(self.mesh.workers)):
                return
            moving = [rank for rank, how in self.made.state.gone.items() if how == "moves to another host"]
            for host in self.cluster.at.values():
                self.given_up.update(worker for rank, worker in host.workers.items() if rank in moving)
        self.cluster.happened.append("move")
        self._heal()

    def _take(self, value: float) -> None:
        assert value == self.expected(len(self.read) + 1), f"loss {len(self.read)} is {value}"
        self.read.append(value)

    def _final(self) -> Sequence[torch.Tensor]:
        while True:
            try:
                return self.made.shards(self.states[-1])
            except LostError:
                self._check_lost()
            except DeviceMeshError:
                self._heal()

    def _heal(self) -> None:
        try:
            self.made.heal([("w", self.states[-1])], elsewhere=self.elsewhere)
        except LostError:
            self._check_lost()
        except MonarchError as error:
            if "is out of reach" in error.message or "all" in error.message:
                assert self.cluster.lost, error.message
                raise _Over from error
            if "do not answer" not in error.message and "no answer in time" not in error.message:
                raise

    def _check_lost(self) -> None:
        """State is lost, or the loss that is to be read, only where no worker lives that holds it."""
        handles = [self.made.state.newest(self.states[-1]), *self.losses[len(self.read) :][:1]]
        living = [worker for host in self.cluster.at.values() for worker in host.workers.values() if worker.alive]
        living = [worker for worker in living if worker not in self.given_up]
        for handle in handles:
            holders = {worker.rank for worker in living if worker.values.get(handle.id) is not None}
            if find_sources(handle.type, Place.whole(self.mesh), holders) is None:
                raise _Over
        raise AssertionError("lost, and a copy lives")

    def _go_back(self) -> None:
        """To the first step that is not applied."""
        good = len(self.read)
        while good < len(self.losses):
            try:
                self.made.wait(self.losses[good])
            except LostError:
                self._check_lost()
            except DeviceMeshError as error:
                if error.mesh_lost:
                    self._heal()
                    continue
                break
            good += 1
        del self.losses[good:], self.states[good + 1 :]
        newest = self.states[-1]
        assert isinstance(newest, RemoteTensor)
