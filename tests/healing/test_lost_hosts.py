"""A mesh that has lost a whole host goes on with a spare one, or without it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import DeviceMeshError, MonarchError
from monarch.runtime.control.message import Message
from monarch.runtime.control.security import Security
from monarch.runtime.hosts.attached import AttachedHosts
from monarch.runtime.hosts.remote import RemoteConnection
from monarch.testing import chaos
from tests.runtime.collectives.loopback import LoopbackTree

STEPS = 6
BATCHES = [torch.randn(8, 4) for _ in range(STEPS)]


@contextmanager
def mesh_on(hosts: int, spares: int, room: int = 0, **dims: int) -> Iterator[tuple[Mesh, LoopbackTree]]:
    """A mesh on hosts without a network."""
    tree: Any = LoopbackTree(hosts + spares)
    made = AttachedHosts(tree, Security.token("x" * 32), partial(RemoteConnection, tree, ["tcp"], 30.0), spares, room)
    try:
        with Mesh(hosts=made, **dims) as mesh:
            yield mesh, tree
    finally:
        made.close()


class Training:
    def __init__(self, mesh: Mesh) -> None:
        torch.manual_seed(0)
        self.model = monarch.module_to_mesh(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), mesh, {"*": None})
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

        @monarch.program
        def step(x: "f32[8@data, 4]") -> torch.Tensor:  # type: ignore[name-defined, valid-type]
            optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        self.step: Any = step

    def run(self, mesh: Mesh, lose: dict[int, Any], policy: Any) -> list[torch.Tensor]:
        """The losses and the parameters; `lose` is called before a step."""
        losses: list[torch.Tensor] = []
        while len(losses) < STEPS:
            lose.pop(len(losses), lambda: None)()
            try:
                losses.append(self.step(BATCHES[len(losses)]).full_tensor())
            except DeviceMeshError as error:
                assert error.mesh_lost
                monarch.heal_mesh(mesh, policy)
        return [*losses, *(each.detach().full_tensor() for each in self.model.parameters())]


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    with Mesh(data=2, model=2) as mesh:
        return Training(mesh).run(mesh, {}, "respawn")


def test_a_spare_host_takes_the_place_of_a_lost_one(expected: list[torch.Tensor]) -> None:
    with mesh_on(2, 2, data=2, model=2) as (mesh, tree):
        lose = {2: partial(tree.lose, 1, "cut"), 4: partial(tree.lose, 2, "cut")}
        found = Training(mesh).run(mesh, lose, "spare")
        assert all(map(torch.equal, found, expected))
        tree.lose(3, "cut")
        with pytest.raises(MonarchError, match="host3:4242 is out of reach") as info:
            monarch.heal_mesh(mesh, "spare")
        assert "spare hosts: there are 0" in info.value.hint


def test_a_spare_host_that_refuses_is_passed_over(expected: list[torch.Tensor]) -> None:
    """The next one takes the place; where there is none, that is said at once, with why."""
    with mesh_on(2, 2, data=2, model=2) as (mesh, tree):
        tree.refuses[2] = "its disk is full"
        found = Training(mesh).run(mesh, {2: partial(tree.lose, 1, "cut")}, "spare")
        assert all(map(torch.equal, found, expected))
        tree.lose(3, "cut")
        for _ in range(2):
            with pytest.raises(MonarchError, match="host3:4242 is out of reach") as info:
                monarch.heal_mesh(mesh, "spare")
            assert info.value.hint.startswith("host2:4242 has refused: its disk is full\n")


def test_a_mesh_shrinks_without_a_lost_host(expected: list[torch.Tensor]) -> None:
    with mesh_on(2, 0, data=2, model=2) as (mesh, tree):
        training = Training(mesh)
        with pytest.raises(MonarchError, match="host1:4242 is out of reach") as info:
            training.run(mesh, {1: partial(tree.lose, 1, "cut")}, "respawn")
        assert 'policy="shrink"' in info.value.hint
        monarch.heal_mesh(mesh, "shrink")
        assert mesh.spec.sizes == {"data": 1, "model": 2}
        monarch.resize_mesh(mesh, data=2)  # on the one host, which has both places now
        assert mesh.spec.sizes == {"data": 2, "model": 2}
        found = training.step(BATCHES[0]).full_tensor()
        assert torch.isfinite(found)


def test_numbers_are_close_without_a_lost_host(expected: list[torch.Tensor]) -> None:
    with mesh_on(2, 0, data=2, model=2) as (mesh, tree):
        found = Training(mesh).run(mesh, {3: partial(tree.lose, 0, "cut")}, "shrink")
        assert mesh.spec.sizes == {"data": 1, "model": 2}
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("heals", [False, True])
def test_a_pending_sum_outlives_a_worker_of_another_host_that_dies_behind_the_commit(heals: bool) -> None:
    losses = []
    for dies in (False, True):
        with mesh_on(2, 0, data=2) as (mesh, _):
            training = Training(mesh)
            training.step(BATCHES[0]).item()
            if dies:
                chaos.kill(mesh, 1, 1 << 30)
            loss = training.step(BATCHES[1])
            if dies and heals:
                with pytest.raises(DeviceMeshError):
                    while True:
                        monarch.distribute(torch.zeros(()), mesh, "[]").full_tensor()
                monarch.heal_mesh(mesh)
            losses.append(loss.item())
    assert losses[0] == losses[1]


def test_a_spare_host_refuses_while_another_worker_dies(
    expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says comes behind the death, and is not lost: another spare host takes the place."""
    with mesh_on(2, 2, data=2, model=2) as (mesh, tree):
        training, send = Training(mesh), tree.send

        def delayed(message: Message, hosts: Sequence[int] | None = None) -> None:
            if message.kind == "start" and hosts == [2]:
                os.kill(pids[0], signal.SIGKILL)
                timer = threading.Timer(0.5, send, (message, hosts))
                timers.append(timer)
                timer.start()
            else:
                send(message, hosts)

        def lose() -> None:
            executor: Any = mesh.executor
            pids.extend(executor.whole.worker_pids())
            tree.refuses[2] = "its disk is full"
            monkeypatch.setattr(tree, "send", delayed)
            tree.lose(1, "cut")

        pids: list[int] = []
        timers: list[threading.Timer] = []
        found = training.run(mesh, {2: lose}, "spare")
        assert all(map(torch.equal, found, expected)) and timers
