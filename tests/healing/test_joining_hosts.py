"""Hosts join while a mesh runs, and it grows onto them."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import DeviceMeshError, MonarchError
from tests.healing.test_lost_hosts import BATCHES, STEPS, Training, mesh_on
from tests.runtime.actors.agents import TOKEN, hosts_here
from tests.runtime.collectives.loopback import LoopbackTree
from tests.sample import is_full

T = TypeVar("T")


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    with Mesh(data=2) as mesh:
        return Training(mesh).run(mesh, {}, "respawn")


def hosts_of(mesh: Mesh) -> list[str]:
    executor: Any = mesh.executor
    return [executor.whole.connection.host_of(rank) for rank in mesh.ranks]


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_mesh_grows_onto_hosts_that_join(expected: list[torch.Tensor]) -> None:
    """In the middle of a training, by one host and by another; then one of these is lost."""
    with mesh_on(1, 0, room=2, data=3) as (mesh, tree):
        monarch.resize_mesh(mesh, data=1)
        training = Training(mesh)

        def join(size: int) -> None:
            tree.join(f"late{size}:4242")
            monarch.resize_mesh(mesh, data=size)
            assert hosts_of(mesh) == ["host0:4242", *(f"late{at}:4242" for at in range(2, size + 1))]

        acts = {1: lambda: join(2), 3: lambda: join(3), 4: lambda: tree.lose(2, "cut")}
        close(training.run(mesh, acts, "shrink"), expected)
        assert mesh.spec.sizes == {"data": 2}


def test_workers_of_a_new_mesh_start_on_hosts_that_have_joined() -> None:
    with mesh_on(2, 1, room=2, data=8) as (mesh, tree):
        tree.join("late:4242")
        monarch.resize_mesh(mesh, data=8)  # nobody holds anything yet
        assert Counter(hosts_of(mesh)) == {"host0:4242": 2, "host1:4242": 4, "late:4242": 2}
        x = monarch.distribute(torch.arange(8.0), mesh, "[@data]")
        monarch.resize_mesh(mesh, data=8)  # workers that hold something stay
        assert x.full_tensor().tolist() == list(range(8))


@pytest.mark.parametrize("how", ["refuses", "is lost"])
def test_workers_stay_where_a_host_that_joins_does_not_take_them(
    how: str, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with mesh_on(1, 0, room=1, data=2) as (mesh, tree):
        monarch.resize_mesh(mesh, data=1)
        training = Training(mesh)

        def join() -> None:
            tree.join("late:4242")
            if how == "refuses":
                tree.refuses[1] = "its disk is full"
            else:
                _die_when_asked(tree, 1, monkeypatch)
            monarch.resize_mesh(mesh, data=2)
            assert hosts_of(mesh) == ["host0:4242"] * 2
            assert "workers stay on host host0:4242" in caplog.text

        close(training.run(mesh, {2: join}, "respawn"), expected)


def _die_when_asked(tree: LoopbackTree, host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    send = tree.send

    def sent(message: Any, hosts: Any = None) -> None:
        send(message, hosts)
        if message.kind == "start" and hosts == [host] and host not in tree.lost:
            tree.lose(host, "cut")

    monkeypatch.setattr(tree, "send", sent)


def test_an_elastic_loop_grows_when_hosts_join(expected: list[torch.Tensor]) -> None:
    with mesh_on(1, 0, room=1, data=2) as (mesh, tree):
        monarch.resize_mesh(mesh, data=1)
        training, losses = Training(mesh), []

        def size() -> dict[str, int]:
            if len(losses) == 2:
                tree.join("late:4242")
            return {"data": len(tree.hosts)}

        for loss in monarch.elastic(mesh, training.step, BATCHES, resize=size):
            losses.append(loss.full_tensor())
        assert hosts_of(mesh) == ["host0:4242", "late:4242"] and len(losses) == STEPS
        close([*losses, *(each.detach().full_tensor() for each in training.model.parameters())], expected)


def test_where_all_hosts_of_a_mesh_are_lost_one_that_joined_has_all_places() -> None:
    with mesh_on(2, 0, room=1, data=3) as (mesh, tree):
        monarch.resize_mesh(mesh, data=2)
        tree.join("late:4242")
        for host in range(2):
            tree.lose(host, "cut")
        monarch.heal_mesh(mesh, {"data": 2})
        assert hosts_of(mesh) == ["late:4242"] * 2
        assert monarch.distribute(torch.arange(4.0), mesh, "[@data]").full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_hosts_that_run_monarch_host_join(tmp_path: Path) -> None:
    with hosts_here(2, tmp_path) as agents:
        with monarch.hosts(agents.addresses[:1], token=TOKEN, room=1) as hosts, Mesh(data=2, hosts=hosts) as mesh:
            monarch.resize_mesh(mesh, data=1)
            x = monarch.distribute(torch.arange(6.0), mesh, "[@data]")
            with pytest.raises(MonarchError, match="127.0.0.1:1: "):
                hosts.join("127.0.0.1:1")
            hosts.join(agents.addresses[1])
            monarch.resize_mesh(mesh, data=2)
            assert hosts_of(mesh) == agents.addresses
            assert (x * 2).full_tensor().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    with pytest.raises(MonarchError, match="takes no hosts"):
        monarch.this_host().join("127.0.0.1:1")


def test_a_worker_that_is_healed_dies_while_another_reaches_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says so before the host does that it has died on."""
    pids: list[int] = []
    said: list[str] = []
    healing, told_of = threading.Event(), threading.Event()
    subscribe = LoopbackTree.subscribe

    def subscribed(tree: LoopbackTree, mesh: int, receive: Any, lost: Any) -> None:
        held: list[Any] = []

        def received(message: Any) -> None:
            if message.kind == "workers" and "1" in (told := json.loads(bytes(message.data))):
                pids.append(told["1"]["pid"])
                if healing.is_set():
                    healing.clear()
                    _kill_and_wait(pids[-1])
            if message.kind == "exited" and len(pids) == 2 and not said:
                held.append(message)
                return
            receive(message)
            if message.kind == "exited":
                told_of.set()
            if message.kind == "refused":
                said.append(message.head["message"])
                for each in held:
                    receive(each)

        subscribe(tree, mesh, received, lost)

    monkeypatch.setattr(LoopbackTree, "subscribe", subscribed)
    with mesh_on(2, 0, data=2) as (mesh, _):
        x = monarch.distribute(torch.arange(3.0), mesh)
        _kill_and_wait(pids[0])
        assert told_of.wait(60)
        healing.set()
        monarch.heal_mesh(mesh)
        assert len(said) == 1 and "worker 0: no connection to worker 1" in said[0]
        assert len(pids) == 3 and x.full_tensor().tolist() == [0.0, 1.0, 2.0]


def _kill_and_wait(pid: int) -> None:
    ended = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        select.select([ended], [], [])
    finally:
        os.close(ended)


class Fates:
    """What happens to a mesh on hosts, as a seed says: hosts join, are lost and refuse, workers die at any time, and
    the mesh gets other sizes. Its first worker and the two first hosts stay."""

    def __init__(self, seed: int, mesh: Mesh, tree: LoopbackTree) -> None:
        self.chance, self.mesh, self.tree = random.Random(seed), mesh, tree
        self.timers: list[threading.Timer] = []

    def act(self) -> None:
        self.chance.choice([self.resize, self.resize, self.kill, self.join, self.join, self.lose])()

    def resize(self) -> None:
        monarch.resize_mesh(self.mesh, data=self.chance.randint(2, 4))

    def kill(self) -> None:
        """Soon: within whatever is done then."""
        executor: Any = self.mesh.executor
        for pid in executor.worker_pids()[1:][: self.chance.randint(1, 2)]:
            self.timers.append(threading.Timer(self.chance.random() / 10, _kill, (pid,)))
            self.timers[-1].start()

    def join(self) -> None:
        if len(self.tree.hosts) < 4:
            if self.chance.random() < 0.2:
                self.tree.refuses[len(self.tree.hosts)] = "its disk is full"
            self.tree.join(f"late{len(self.tree.hosts)}:4242")

    def lose(self) -> None:
        if late := [host for host in range(2, len(self.tree.hosts)) if host not in self.tree.lost]:
            self.tree.lose(self.chance.choice(late), "cut")


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", range(20 if is_full() else 1))
def test_hosts_join_and_are_lost_among_deaths_and_resizes(seed: int, expected: list[torch.Tensor]) -> None:
    with mesh_on(2, 0, room=2, data=4) as (mesh, tree):
        training, fates = Training(mesh), Fates(seed, mesh, tree)

        def done(act: Callable[[], T]) -> T:
            for _ in range(50):
                try:
                    return act()
                except DeviceMeshError as error:
                    assert error.mesh_lost
                    monarch.heal_mesh(mesh, "shrink")
            raise AssertionError("no progress")

        found: list[torch.Tensor] = []
        while len(found) < STEPS:
            for _ in range(fates.chance.randrange(4)):
                done(fates.act)
            found.append(done(lambda: training.step(BATCHES[len(found)]).full_tensor()))
        for timer in fates.timers:
            timer.join()
        close(found + done(lambda: [each.detach().full_tensor() for each in training.model.parameters()]), expected)
